"""scripts/bench.py: its arms, its clock and its command line, as far as a CPU can show them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
DEADLINE = 240.0  # of one command; on two idle cores it needs 15 seconds

sys.path.insert(0, str(SCRIPTS))
import bench  # noqa: E402
import bench_arms  # noqa: E402
import bench_clock  # noqa: E402
import bench_layer  # noqa: E402
import bench_oracle  # noqa: E402
import bench_problem  # noqa: E402
import bench_report  # noqa: E402
from bench_problem import LayerShape, Problem  # noqa: E402

SMALL = bench_problem.parse_shape("48,2,6,32,16,24")


def problem(
    load: str = "random", *, accumulate: bool = False, shape: LayerShape = SMALL
) -> Problem:
    return Problem.of(shape, load, 3, "cpu", accumulate=accumulate)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For tensors this small, more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- arms ------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", [bench_arms.ReferenceArm, bench_arms.GroupedMMArm])
@pytest.mark.parametrize("accumulate", [False, True], ids=["fresh", "main_grad"])
@pytest.mark.parametrize("load", ["random", "empty"])
def test_arms_are_right(arm: type[bench_arms.Arm], accumulate: bool, load: str) -> None:
    p = problem(load, accumulate=accumulate)
    made = arm(p, accumulate=accumulate)
    y_TH = made.step()
    if accumulate:
        y_TH = made.step()
    found = bench_oracle.errors(made.answer(y_TH), bench_oracle.solve(p), times=1 + accumulate)
    assert max(found.values()) < bench_oracle.LIMIT, found
    assert min(found.values()) > 1e-4, "bf16 has an error; none means that nothing was compared"


@pytest.mark.parametrize("accumulate", [False, True], ids=["fresh", "main_grad"])
def test_a_replay_writes_where_the_capture_did(
    accumulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With graphs that run what they capture, and then again at each replay."""
    captured: list[Any] = []

    class Graph:
        replay = staticmethod(lambda: captured.append("replay"))

    @contextlib.contextmanager
    def capture(graph: Graph, pool: object) -> Iterator[None]:
        captured.append(pool)
        yield

    for name, fake in (
        ("CUDAGraph", Graph),
        ("graph", capture),
        ("graph_pool_handle", lambda: "pool"),
        ("synchronize", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    p = problem(accumulate=accumulate)
    replay = bench_arms.GraphReplay(bench_arms.GroupedMMArm(p, accumulate=accumulate))
    for place in p.main:
        place.zero_()
    y_TH = replay.step()
    assert captured == ["pool", "pool", "replay", "replay"]
    assert replay.name == "grouped_mm graph"
    found = bench_oracle.errors(replay.answer(y_TH), bench_oracle.solve(p))
    assert max(found.values()) < bench_oracle.LIMIT, found


def test_a_failed_capture_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: object, pool: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    for name in ("CUDAGraph", "graph_pool_handle", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    arm = bench_arms.GroupedMMArm(problem(), accumulate=False)
    with pytest.raises(bench_arms.Absent, match=r"^capture failed: operation not permitted[^\n]*$"):
        bench_arms.GraphReplay(arm)


class WrongArm(bench_arms.GroupedMMArm):
    name, label = "wrong", "halves one token's output"

    def forward(self) -> torch.Tensor:
        y_TH = super().forward()
        scale_T1 = torch.ones(len(y_TH), 1, dtype=y_TH.dtype)
        scale_T1[5] = 0.5
        return y_TH * scale_T1


class BrokenArm(bench_arms.GroupedMMArm):
    name, label = "broken", "raises"

    def forward(self) -> torch.Tensor:
        raise ValueError("first line\nsecond line")


def options(*tokens: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_layer.add_arguments(parser)
    parser.set_defaults(seed=0)
    return parser.parse_args(["--device", "cpu", *tokens])


def test_a_wrong_arm_prints_no_speed_and_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for arm in (WrongArm, BrokenArm):
        monkeypatch.setitem(bench_layer.ARMS, arm.name, arm)
    names = ("grouped_mm", "wrong", "broken", "mok")
    measurement = bench_layer.Measurement(
        shape=SMALL, load="random", which="main_grad", arms=names, options=options()
    )
    with bench_layer.tqdm(disable=True) as bar:
        line = measurement.run(bar, 2, 1.0)
    assert measurement.failed
    assert line is not None
    assert list(line["arms"]) == ["grouped_mm"]
    assert re.match(r"wrong: error of (y|dx) is 5.0e-01, above 2e-02", line["left_out"]["wrong"])
    assert line["left_out"]["broken"] == "broke with ValueError: first line"
    assert "needs CUDA tensors, got cpu" in line["left_out"]["mok"]


def test_an_absent_arm_alone_does_not_fail_a_run() -> None:
    measurement = bench_layer.Measurement(
        shape=SMALL, load="random", which="fresh", arms=("grouped_mm", "mok"), options=options()
    )
    with bench_layer.tqdm(disable=True) as bar:
        assert measurement.run(bar, 1, 1.0) is not None
    assert not measurement.failed


def test_a_measurement_that_breaks_is_one_line_and_the_next_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = bench_layer.Measurement.run

    def breaks_once(self: Any, *arguments: Any) -> Any:
        if self.which == "fresh":
            raise RuntimeError("CUDA out of memory\nsecond line")
        return run(self, *arguments)

    monkeypatch.setattr(bench_layer.Measurement, "run", breaks_once)
    output = tmp_path / "layer.jsonl"
    tokens = ["--layer", "--device", "cpu", "--shape", "48,2,6,32,16,0", "--arms", "grouped_mm"]
    code = bench.main([*tokens, "--rounds", "1", "--output", str(output), "--milliseconds", "1"])
    said = capsys.readouterr()
    assert code == 1
    words = "shape random fresh broke with RuntimeError: CUDA out of memory"
    assert words in said.out.splitlines() + said.err.splitlines()
    assert [json.loads(text)["table"] for text in output.read_text().splitlines()] == ["main_grad"]


def test_a_limit_stops_and_resume_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "layer.jsonl"
    command = ["--layer", "--device", "cpu", "--shape", "48,4,8,32,16,0", "--arms", "grouped_mm"]
    command += ["--rounds", "1", "--milliseconds", "1", "--output", str(output), "--commit", "a"]
    command += ["--tables", "fresh", "--loads", "balanced,hot", "--resume"]

    def loads() -> list[str]:
        return [json.loads(text)["load"] for text in output.read_text().splitlines()]

    assert bench.main([*command, "--limit", "1e-9"]) == bench_layer.STOPPED
    assert "2 measurements not begun" in capsys.readouterr().out
    assert bench.main([*command[:-2], "balanced"]) == 0
    assert loads() == ["balanced"]
    capsys.readouterr()
    assert bench.main(command) == 0
    assert "rate under hot / balanced" in capsys.readouterr().out, "with the measurement of before"
    assert bench.main(command) == 0
    assert loads() == ["balanced", "hot"]
    assert bench.main([*command, "--seed", "7"]) == 0
    assert loads() == ["balanced", "hot", "balanced", "hot"], "another problem"
    for more in (["--milliseconds", "2"], ["--no-graph"]):
        before = len(loads())
        assert bench.main([*command, *more]) == 0
        assert loads()[before:] == ["balanced", "hot"], "another measurement"
        assert bench.main([*command, *more]) == 0
        assert len(loads()) == before + 2


# --- time ------------------------------------------------------------------------------


class Scripted:
    """In place of a timed arm: notes its visits."""

    def __init__(self, name: str, visits: list[str]) -> None:
        self.name, self.visits = name, visits

    def visit(self, repeats: int) -> bench_clock.Sample:
        self.visits.append(self.name)
        return bench_clock.Sample(forward=repeats, backward=1.0)


def test_arms_are_visited_in_turns() -> None:
    visits: list[str] = []
    timed: Any = {name: Scripted(name, visits) for name in "abc"}
    ticks: list[None] = []
    samples = bench_clock.interleave(timed, 4, 30.0, 0, lambda: ticks.append(None))
    assert visits[:3] == ["a", "b", "c"], "how long a step takes, first"
    rounds = [visits[i : i + 3] for i in range(3, len(visits), 3)]
    assert [sorted(r) for r in rounds] == [["a", "b", "c"]] * 4
    assert len({tuple(r) for r in rounds}) > 1, "in a new order each round"
    assert len(ticks) == 12
    assert {s.forward for s in samples["a"]} == {10.0}, "30 ms of steps of 3 ms"


def test_a_visit_times_each_part() -> None:
    p = problem(accumulate=True)
    watch = bench_clock.Stopwatch(p.device)
    fused = bench_clock.TimedArm(bench_arms.ReferenceArm(p, accumulate=True), watch).visit(3)
    apart = bench_clock.TimedArm(bench_arms.GroupedMMArm(p, accumulate=True), watch).visit(3)
    assert fused.forward > 0
    assert fused.add == 0
    assert apart.add > 0
    assert apart.both == apart.forward + apart.backward + apart.add
    bound = bench_clock.TimedBound(p, watch, accumulate=True).visit(3)
    assert bound.forward > 0
    assert bound.backward > 0


def test_the_hosts_time_is_of_both_calls_in_turn() -> None:
    arm = bench_arms.ReferenceArm(problem(), accumulate=False)
    watch = bench_clock.Stopwatch(torch.device("cpu"))
    assert bench_clock.host_us(*arm.calls(), watch) is None
    watch.on_gpu, watch.wait = True, lambda: None  # type: ignore[method-assign]
    found = bench_clock.host_us(*arm.calls(), watch, repeats=1)
    assert found is not None
    assert min(found) > 0


def test_numbers_of_nvidia_smi_become_medians() -> None:
    text = "1500, 3201, 600.5, 50\n1700, 3201, 700.5, 60\n1600, 3201, [N/A], 70\n1980, 32"
    names = ["sm_mhz", "memory_mhz", "power_w", "temperature_c"]
    expected = {"sm_mhz": 1600, "memory_mhz": 3201, "power_w": 650.5, "temperature_c": 55}
    assert bench_clock.read_smi(text, names) == expected
    assert bench_clock.read_smi("no devices were found\n", names) == {}


# --- the command -----------------------------------------------------------------------


def test_a_plan_crosses_shapes_sizes_and_experts() -> None:
    plan = bench_layer.Plan.of(
        options("--presets", "qwen3-30b/16", "--tokens", "64,128", "--experts", "8,32")
    )
    assert [(name, s.tokens, s.experts) for name, s in plan.shapes] == [
        ("qwen3-30b/8", 64, 8),
        ("qwen3-30b/8", 128, 8),
        ("qwen3-30b/32", 64, 32),
        ("qwen3-30b/32", 128, 32),
    ]
    assert plan.tables == ("fresh", "main_grad")
    assert plan.arms == ("reference", "grouped_mm")
    assert len(bench_layer.Plan.of(options("--presets", "all")).shapes) == len(
        bench_problem.PRESETS
    )


def test_a_slice_of_the_public_model_keeps_its_rows() -> None:
    plan = bench_layer.Plan.of(
        options("--presets", "deepseek-v3/32-routed", "--ep-sizes", "1,8,64", "--tokens", "2048")
    )
    assert [(name, s.tokens, s.top_k, s.experts) for name, s in plan.shapes] == [
        ("deepseek-v3/256", 2048, 8, 256),
        ("deepseek-v3/32", 2048, 8, 32),
        ("deepseek-v3/4", 4096, 4, 4),
    ]


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["--layer", "--device", "cpu", "--ep-sizes", "7"], "got 7 for deepseek-v3/32 with 256"),
        (
            ["--layer", "--device", "cpu", "--ep-sizes", "8", "--experts", "4"],
            "got --experts and --ep-sizes",
        ),
        ([], "one of --layer and --passes must be given, got neither"),
        (["--layer", "--passes"], "got both"),
        (["--layer", "--presets", "deepsek"], "a preset must be one of"),
        (["--layer", "--loads", "uneven"], "a load must be one of"),
        (["--layer", "--arms", "mok,deepep"], "got 'deepep'"),
        (["--layer", "--tables", "c"], "a table must be one of"),
        (["--layer", "--shape", "1,2"], "--shape must be six numbers"),
        (["--layer", "--shape", "8,1,4,64,64,0", "--presets", "all"], "got --shape and --presets"),
        (["--layer", "--tokens", "1k"], "--tokens must be numbers above 0, got '1k'"),
        (["--layer", "--rounds", "0"], "--rounds must be above 0, got 0"),
        (["--layer", "--milliseconds", "nan"], "--milliseconds must be above 0, got nan"),
        (["--layer", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["--layer", "--speed"], "unrecognized arguments: --speed"),
        (["--layer", "--experts", "4", "--device", "cpu"], "cannot choose 8 of 4 experts"),
        (["--passes", "--shapes", "dsv4"], "--shapes must be of dsv3_32"),
        (["--passes", "--only", "sideways"], "--only must be of up_plain"),
        (["--passes", "--routing", "none"], "--routing must be of balanced"),
        (["--passes", "--tilings", "a"], "--tilings must be numbers"),
    ],
)
def test_bad_arguments_are_one_clear_line(
    tokens: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.main(tokens)
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert words in said
    assert said.startswith("mok: ")
    assert said.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("mode", ["--layer", "--passes"])
def test_without_a_gpu_the_default_says_so(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main([mode])
    assert "needs a CUDA device, got none" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_measures_megatron_and_ours_on_the_cpu(tmp_path: Path) -> None:
    """Megatron's real MoELayer too; in a process of its own, which sees a fake CUDA device."""
    output = tmp_path / "layer.jsonl"
    command = [sys.executable, str(SCRIPTS / "bench.py"), "--layer", "--device", "cpu"]
    command += ["--arms", "reference,grouped_mm,megatron,sonic", "--shape", "64,2,8,64,32,48"]
    command += ["--loads", "hot", "--rounds", "1", "--milliseconds", "1"]
    done = subprocess.run(
        [*command, "--output", str(output)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "\r" not in done.stderr, "a progress bar in a pipe"
    lines = [json.loads(text) for text in output.read_text().splitlines()]
    assert [(entry["load"], entry["table"]) for entry in lines] == [
        ("hot", "fresh"),
        ("hot", "main_grad"),
    ]
    for entry in lines:
        assert list(entry["arms"]) == ["reference", "grouped_mm", "megatron"]
        assert entry["left_out"] == {"sonic": "SonicMoE needs a GPU"}
        assert entry["device"] == "CPU"
        assert "--loads hot" in entry["command"]
        assert all(max(a["errors"].values()) < bench_oracle.LIMIT for a in entry["arms"].values())
        assert bench_report.table(entry) in done.stdout
    assert (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")
