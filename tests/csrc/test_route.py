"""The device code that makes the schedule, run on the host and compared with a stable sort."""

from __future__ import annotations

import pathlib
import random
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    compiler = shutil.which("c++")
    assert compiler is not None, "the library needs a C++ compiler, and so does its test"
    program = tmp_path_factory.mktemp("route") / "route"
    command = [compiler, "-std=c++20", "-O1", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror"]
    source = ROOT / "tests/csrc/route_on_host.cpp"
    command += [f"-I{ROOT / 'csrc'}", str(source), "-pthread", "-o", str(program)]
    subprocess.run(command, check=True, timeout=120)
    return program


def _ids(draw: random.Random, tokens: int, choices: int, experts: int, bad: float) -> list[int]:
    ids: list[int] = []
    loaded = draw.randint(choices, experts)
    for _ in range(tokens):
        row = draw.sample(range(loaded), choices)
        row = [-1 if draw.random() < 0.15 else expert for expert in row]
        if draw.random() < bad:
            row[draw.randrange(choices)] = draw.choice([-2, experts, 2**31 - 1, -(2**31), row[0]])
        ids += row
    return ids


def _expected(ids: list[int], choices: int, experts: int) -> list[list[int]]:
    columns: list[int] = []
    for slot, expert in enumerate(ids):
        earlier = ids[slot - slot % choices : slot]
        wrong = expert < -1 or expert >= experts or (expert >= 0 and expert in earlier)
        columns.append(experts if wrong else expert)
    faulty = [slot for slot, column in enumerate(columns) if column == experts]
    fault = [0, 0, 0, 0]
    if faulty:
        first = faulty[0]
        kind = 2 if 0 <= ids[first] < experts else 1
        fault = [kind, ids[first], first // choices, first % choices]
    starts, slot_R, row_TK = [0], [], [-1] * len(ids)
    for expert in range(experts):
        mine = [slot for slot, column in enumerate(columns) if column == expert]
        for position, slot in enumerate(mine):
            row_TK[slot] = starts[-1] + position
        starts.append(starts[-1] + -(-len(mine) // 128) * 128)
        slot_R += mine + [-1] * (starts[-1] - starts[-2] - len(mine))
    counts = [columns.count(expert) for expert in range(experts)]
    return [[len(faulty)], fault, starts, counts, row_TK, slot_R, [1]]


def test_the_schedule_is_a_stable_sort_and_the_first_fault_is_found(program: pathlib.Path) -> None:
    draw = random.Random(11)
    cases: list[tuple[list[int], int, int]] = []
    sizes = [(1, 1, 1), (1, 64, 70), (300, 1, 1), (129, 3, 33), (700, 8, 31), (513, 5, 32)]
    sizes += [(draw.randint(1, 200), draw.randint(1, 6), draw.randint(6, 40)) for _ in range(14)]
    for index, (tokens, choices, experts) in enumerate(sizes):
        bad = 0.02 if index % 2 else 0.0
        cases.append((_ids(draw, tokens, choices, experts, bad), choices, experts))
    text = "".join(
        f"{len(ids) // choices} {choices} {experts}\n{' '.join(map(str, ids))}\n"
        for ids, choices, experts in cases
    )
    ran = subprocess.run(
        [str(program)], input=text, capture_output=True, text=True, check=True, timeout=300
    )
    lines = [[int(word) for word in line.split()] for line in ran.stdout.splitlines()]
    assert len(lines) == 7 * len(cases)
    found_faults = 0
    for index, case in enumerate(cases):
        expected = _expected(*case)
        found_faults += expected[0][0]
        for name, line, wanted in zip(
            ("faulty", "fault", "starts", "counts", "row_TK", "slot_R", "the rest"),
            lines[7 * index : 7 * index + 7],
            expected,
            strict=True,
        ):
            assert line == wanted, (index, case[1:], name)
    assert found_faults > 10
