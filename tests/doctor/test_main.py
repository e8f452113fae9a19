"""The command: what it prints, and how it exits, on simulated machines and on this one."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from mok_megatron.doctor import __main__ as command
from mok_megatron.doctor.judge import CHECKS, examine
from tests.doctor.machines import CPU_ONLY, H200, HEALTHY, PAIRS, RANK, first

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_command_judges_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--backend", "reference", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["can_run"]
    assert answer["backend"] == "reference"
    assert answer["machine"]["torch_version"] == torch.__version__
    assert answer["machine"]["megatron_version"].startswith("0.")
    assert {finding["name"] for finding in answer["findings"]} == set(CHECKS)
    tests = [t for t in answer["machine"]["self_tests"] if t["device"] == "cpu"]
    assert [t["backend"] for t in tests] == ["reference"]
    assert 0 < tests[0]["error"] < 1e-5


def test_the_command_answers_and_exits_as_it_finds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "gather", lambda limit: CPU_ONLY)
    assert command.main(["--backend", "cuda"]) == 1
    text = capsys.readouterr().out
    assert "error    gpus                no GPU is visible\n" in text
    assert text.rstrip().splitlines()[-1].startswith("This machine cannot run the cuda backend:")
    assert command.main([]) == 0
    text = capsys.readouterr().out
    assert text.startswith("mok-megatron")
    assert "backend reference (auto: no GPU is here)" in text
    assert text.rstrip().endswith(
        "This machine can run the reference backend: no errors, no warnings."
    )
    monkeypatch.setattr(command, "gather", lambda limit: HEALTHY)
    assert command.main([]) == 0
    assert "can run the cuda backend: no errors, no warnings." in capsys.readouterr().out


def test_a_group_that_does_not_fit_the_host_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "gather", lambda limit: HEALTHY)
    assert command.main(["--expert-model-parallel-size", "2"]) == 0
    assert "groups of 2 ranks lie on one host of 2" in capsys.readouterr().out
    assert command.main(["--expert-model-parallel-size", "4", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert [f["name"] for f in answer["findings"] if f["level"] == "error"] == ["hosts"]


def test_the_matrix_shows_every_pair() -> None:
    machine = replace(HEALTHY, devices=3 * (H200,), pairs=(replace(PAIRS[0], peer=2), *PAIRS))
    closed = replace(PAIRS[1], rank=2, access=False)
    plain = replace(PAIRS[1], rank=2, peer=1, atomics=False)
    text = command.render(replace(machine, pairs=(*machine.pairs, closed, plain)), [], "", "", 80)
    table = text[text.index("peer access") :].splitlines()[1:5]
    assert [line.split() for line in table] == [
        ["0", "1", "2"],
        ["0", ".", "A", "A"],
        ["1", "A", ".", "?"],
        ["2", "-", "r", "."],
    ]
    assert len({len(line) for line in table}) == 1
    assert command.peer_matrix(CPU_ONLY) == command.peer_matrix(replace(HEALTHY, devices=(H200,)))


def test_lines_are_aligned_and_fit() -> None:
    machine = replace(HEALTHY, **first(mig=True))
    text = command.render(machine, examine(machine, "cuda"), "cuda", "asked for", 80)
    assert max(map(len, text.splitlines())) <= 80
    body = text[: text.index("\n\npeer access")].splitlines()[2:]
    assert {line[:9].strip() for line in body} <= {*RANK, ""}
    assert all(line[28] == " " and line[29] != " " for line in body if line[0] != " ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--backend", "tpu"],
        ["--limit", "-1"],
        ["--limit", "soon"],
        ["--expert-model-parallel-size", "0"],
        ["more"],
    ],
)
def test_wrong_usage_is_two(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2


def test_as_a_module_it_refuses_cuda_without_a_gpu() -> None:
    """Whatever the machine has: CUDA_VISIBLE_DEVICES hides its GPUs."""
    ran = subprocess.run(
        [sys.executable, "-m", "mok_megatron.doctor", "--backend", "cuda"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    assert ran.stderr == ""
    assert "error    gpus                no GPU is visible" in ran.stdout
