"""Scripts that last longer than two seconds show on a terminal how far they are, and in a pipe or a
file write no bar. What they measure is replaced by something that takes no time."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import bench  # noqa: E402
import bench_passes  # noqa: E402
import bench_wire  # noqa: E402
import bench_wire_ranks  # noqa: E402
import fault_trials  # noqa: E402
import resume_trials  # noqa: E402
import soak  # noqa: E402
from bench_wire_report import Times  # noqa: E402


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _passes(patch: pytest.MonkeyPatch, folder: Path) -> None:
    del folder
    result = {"cublas": {"tflops": 700.0, "of_cublas": 1.0}}
    patch.setattr(bench_passes, "_check", lambda options: None)
    patch.setattr(bench_passes, "environment", lambda: {"gpu": "none", "torch": "none"})
    patch.setattr(bench_passes, "Problem", lambda *arguments: None)
    patch.setattr(bench_passes, "measure", lambda *arguments: result)
    arguments = ["--passes", "--shapes", "dsv3_8,qwen30_16", "--only", "up,down"]
    assert bench.main(arguments) == 0


def _virtual_ranks() -> Any:
    """Without a GPU: a call takes no time, and finds what every call finds."""
    ranks = bench_wire_ranks.VirtualRanks.__new__(bench_wire_ranks.VirtualRanks)
    found = (Times(forward=100.0, backward=100.0), [torch.ones(1)])
    ranks._call = lambda rate, *, warm=False: found  # type: ignore[method-assign]
    ranks.ranks = []
    ranks.rows_PP = lambda: [[1, 1], [1, 1]]  # type: ignore[method-assign]
    return ranks


def _wire(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(bench_wire_ranks, "need_wire", lambda path: None)
    patch.setattr(bench_wire_ranks.VirtualRanks, "of", lambda *arguments: _virtual_ranks())
    patch.setattr(bench_wire_ranks.VirtualRanks, "share", 0.5)
    patch.setattr(bench_wire.bench_record, "environment", lambda *arguments: {"commit": "c"})
    patch.setattr(bench_wire, "table", lambda lines: [line["model"] for line in lines])
    patch.setattr(bench_wire, "plot", lambda *arguments: None)
    arguments = ["--models", "qwen3-30b,qwen3-235b", "--ranks", "2", "--rates", "450,360"]
    arguments += ["--rounds", "3", "--output", str(folder / "wire.jsonl")]
    assert bench_wire.main(arguments) == 0


def _faults(patch: pytest.MonkeyPatch, folder: Path) -> None:
    del folder
    outcome = SimpleNamespace(culprit=0, trouble="", said="named")
    patch.setattr(fault_trials, "run_trial", lambda *arguments: outcome)
    patch.setattr(fault_trials, "shared_memory", set)
    cells = [("killed", "forward"), ("stopped", "forward"), ("skips", "backward")]
    outcomes, _ = fault_trials.run_trials("reference", cells, 1, 2)
    assert outcomes == [outcome] * 3


def _resumes(patch: pytest.MonkeyPatch, folder: Path) -> None:
    trial = SimpleNamespace(victim="a rank", killed_after=1, resumed_from=0, trouble="")
    plan = resume_trials.Plan(config=ROOT, arguments=(), iterations=2, interval=1)
    for name, value in {"start": None, "finish": None, "run_trial": trial}.items():
        patch.setattr(resume_trials, name, lambda *arguments, value=value: value)
    patch.setattr(resume_trials, "curve", lambda folder: {1: (1.0, 1.0), 2: (1.0, 1.0)})
    assert list(resume_trials.run_trials(plan, 4, 1, folder)) == [trial] * 4


def _soak(patch: pytest.MonkeyPatch, folder: Path) -> None:
    training = SimpleNamespace(step=lambda: (1.0, 1.0), evaluate=lambda: 1.0)
    training.mok_layers = lambda: [None, None]
    patch.setattr(soak.tiny, "set_up", lambda **options: None)
    patch.setattr(soak, "Ragged", lambda **options: training)
    patch.setattr(soak, "hot_experts", lambda layers: contextlib.nullcontext(torch.zeros(4)))
    patch.setattr(soak, "_saved_and_read_back", lambda *arguments: [])
    patch.setattr(soak, "_look", lambda step, device: f"look {step}")
    for rank in range(2):  # the second says nothing
        looks, said = soak.soak(rank, 2, "cpu", 400, 1, str(folder))
        assert (len(looks), said) == (2, [])


@pytest.mark.parametrize(
    ("run", "total", "line"),
    [
        (_passes, "4/4", "dsv3_8 balanced"),
        (_wire, "18/18", "qwen3-30b"),
        (_faults, "3/3", "stopped, forward, rank 0: named"),
        (_resumes, "4/4", "trial 4: a rank killed"),
        (_soak, "400/400", "step 400: loss 1.0000, look 400"),
    ],
)
def test_a_terminal_sees_the_progress_and_a_pipe_only_the_results(
    run: Callable[[pytest.MonkeyPatch, Path], None],
    total: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    run(monkeypatch, tmp_path)
    piped = capsys.readouterr()
    assert (piped.err, "\r" in piped.out) == ("", False)
    assert line in piped.out
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    run(monkeypatch, tmp_path)
    assert capsys.readouterr().out == piped.out
    shown = terminal.getvalue()
    # Again and again in one line, and complete at the end; of one rank of several.
    assert re.search(rf"\r[^\n]* {total} \[", shown), shown
    assert shown.count("\n") == 1
