"""sanitize.py's plan, and what it reads in outputs of compute-sanitizer, which are written here."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import sanitize  # noqa: E402

from tests.csrc import attack  # noqa: E402

CLEAN = """\
========= COMPUTE-SANITIZER
passed layer 7
passed layer 8
0 cases and 2 layers passed
========= ERROR SUMMARY: 0 errors
"""
MEMORY = """\
========= COMPUTE-SANITIZER
passed case 0
========= Invalid __global__ write of size 16 bytes
=========     at void mok::sm90::grouped_gemm<mok::sm90::Forward<(bool)0>>(T1::Parameters)+0x2c10 \
in /w/csrc/device/combine.cuh:74
=========     by thread (5,0,0) in block (1,0,0)
=========     Access to 0x7f10 is out of bounds
=========
========= Invalid __global__ write of size 16 bytes
=========     at void mok::sm90::grouped_gemm<mok::sm90::Forward<(bool)0>>(T1::Parameters)+0x2c20 \
in /w/csrc/device/combine.cuh:74
=========     by thread (6,0,0) in block (1,0,0)
=========     Access to 0x7f20 is out of bounds
=========
========= ERROR SUMMARY: 2 errors
"""
RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at mok::a(int *)+0x90 in /w/units.cuh:41
=========     and Read access at mok::a(int *)+0x100 in /w/units.cuh:51 [508 hazards]
=========
========= Warning: Detected overflow of tracked cuda::barrier structures. Results might be \
incorrect. Try using --num-cuda-barriers to fix the issue
passed layer 3
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
DIED = """\
========= COMPUTE-SANITIZER
Traceback (most recent call last):
AssertionError: ['y: 1.00e+00 > 1.00e-02']
========= Target application returned an error
========= ERROR SUMMARY: 0 errors
"""


def test_a_clean_output() -> None:
    found = sanitize.read(CLEAN, 0, 9.0)
    assert (found.passed, found.reports, found.kinds, found.trouble) == (2, 0, {}, "")


def test_reports_are_counted_by_what_and_where() -> None:
    found = sanitize.read(MEMORY, 0, 9.0)
    assert (found.passed, found.reports, found.trouble) == (1, 2, "")
    assert found.kinds == {"Invalid __global__ write of size 16 bytes at combine.cuh:74": 2}
    found = sanitize.read(RACE, 0, 9.0)
    assert (found.passed, found.reports) == (1, 1)
    (kind,) = found.kinds
    assert kind == (
        "Error: Race reported between Write access at units.cuh:41 and Read access at units.cuh:51"
    )
    assert "overflow of tracked cuda::barrier" in found.trouble


@pytest.mark.parametrize(
    ("output", "code", "words"),
    [
        (DIED, 1, ("exit code 1: AssertionError: ['y: 1.00e+00", "Target application returned")),
        (CLEAN, None, ("killed after 9 s",)),
        (CLEAN.partition("=========")[0], 127, ("exit code 127: no output",)),
        (CLEAN.replace("ERROR SUMMARY: 0 errors", ""), 0, ("exit code 0: 0 cases and 2 layers",)),
    ],
)
def test_what_did_not_run_to_its_end_is_never_clean(
    output: str, code: int | None, words: tuple[str, ...]
) -> None:
    found = sanitize.read(output, code, 9.0)
    assert all(word in found.trouble for word in words), found.trouble
    jobs = sanitize.plan(["memcheck"], 0, 2, 0, 1, 7)
    assert not sanitize.judge("memcheck", jobs, [found]).clean


def test_every_tool_has_all_cases() -> None:
    jobs = sanitize.plan(list(sanitize.FLAGS), 4, 41, 8, 3, 100)
    for tool in sanitize.FLAGS:
        own = [job for job in jobs if job.tool == tool]
        layers = [s for j in own if j.kind == "layers" for s in range(j.seed, j.seed + j.count)]
        assert layers == list(range(100, 141))
        assert [j.count for j in own if j.kind != "layers"] == [4, 8]
    assert len(jobs) == 4 * 5


def test_a_missing_case_is_not_clean() -> None:
    jobs = sanitize.plan(["memcheck", "racecheck"], 0, 3, 0, 1, 7)
    outcomes = [sanitize.read(CLEAN, 0, 9.0), sanitize.read(RACE, 0, 9.0)]
    verdicts = [sanitize.judge(tool, jobs, outcomes) for tool in ("memcheck", "racecheck")]
    assert [(v.cases, v.passed, v.reports, v.clean) for v in verdicts] == [
        (3, 2, 0, False),
        (3, 1, 1, False),
    ]
    lines = sanitize.table(verdicts)
    assert lines[1].split() == ["memcheck", "3", "2", "0", "NOT", "CLEAN"]
    assert any(line.startswith("racecheck: 1 x Error: Race reported") for line in lines)


FAKE = """\
#!/bin/sh
case "$*" in *--version*) echo "Version 1.2.3 (build 4)"; exit 0;; esac
echo "========= COMPUTE-SANITIZER"
while [ $# -gt 1 ]; do
  case "$1" in
    --tool) tool=$2;;
    --cases) cases=$2;;
    --layers) layers=$2;;
    --groups) groups=$2;;
  esac
  shift
done
for i in $(seq $((cases + layers + groups))); do echo "passed layer $i"; done
[ $tool = racecheck ] && sleep 60
echo "========= ERROR SUMMARY: 0 errors"
"""


def test_one_command_runs_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for the tool passes all cases, but under racecheck it never ends."""
    tool, record = tmp_path / "compute-sanitizer", tmp_path / "record.jsonl"
    tool.write_text(FAKE)
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sanitize, "environment", lambda *_: {"device": "none"})
    arguments = ["--sanitizer", str(tool), "--record", str(record), "--seed", "5", "--limit", "4"]
    with pytest.raises(SystemExit):
        sanitize.main([*arguments, "--library", str(tmp_path / "none.so")])
    assert "mok: racecheck and initcheck must have a library" in capsys.readouterr().err
    arguments += ["--library", str(tool)]
    assert sanitize.main(arguments) == 1
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["tool"] for line in lines] == list(sanitize.FLAGS)
    for line in lines:
        assert (line["passed"], line["of"], line["seed"], line["device"]) == (52, 52, 5, "none")
        raced = line["tool"] == "racecheck"
        assert line["reports"] == (None if raced else 0)
        assert len(line["troubles"]) == (4 if raced else 0)
    said = capsys.readouterr().out
    assert said.count("clean") == 3
    assert "compute-sanitizer 1.2.3" in said
    assert sanitize.main([*arguments[:2], "--tools", "memcheck", "--layers", "2"]) == 0


def test_no_sanitizer_is_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        sanitize.main(["--sanitizer", "/nowhere/compute-sanitizer"])
    assert stopped.value.code == 2
    assert "must be an executable file, got /nowhere" in capsys.readouterr().err


def test_groups_are_small_and_of_two_or_four_ranks() -> None:
    calls = [attack.group(seed) for seed in range(200)]
    assert {call.ranks for call in calls} == {2, 4}
    assert all(call.case.num_experts == call.ranks * call.local for call in calls)
    assert all(0 < sum(call.case.tokens) <= 800 for call in calls)
    assert any(0 in call.case.tokens for call in calls)
    assert max(call.case.top_k for call in calls) == 3
