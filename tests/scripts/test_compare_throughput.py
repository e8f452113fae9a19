"""scripts/compare_throughput.py: its words and arithmetic, and one comparison of real trainings."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
TINY = ROOT / "configs" / "tiny_cpu_qwen3.yaml"
DEADLINE = 240.0  # of one command; on two idle cores the longest needs 30 seconds

sys.path.insert(0, str(SCRIPTS))
import compare_throughput  # noqa: E402
import compare_worker  # noqa: E402
from train_config import RunConfig, read_config, read_overrides  # noqa: E402


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run_of(folder: Path, step_ms: list[float], losses: list[float]) -> Path:
    """A run's folder as a training leaves it: half of each step in the MoE layers."""
    timed = [
        {
            "iteration": index,
            "since_start": index,
            "step_ms": ms,
            "moe_forward_ms": ms / 8,
            "moe_backward_ms": 3 * ms / 8,
            "tokens": 1000,
            "ranks": 2,
            "tflops": 1 / ms,
            "peak_bytes": 1e9 * index,
        }
        for index, ms in enumerate(step_ms, 1)
    ]
    timed[0]["start_s"] = 31.4
    write(folder / compare_worker.FILE, timed)
    entries = [{"iteration": i, "loss": loss} for i, loss in enumerate(losses, 1)]
    write(folder / "losses.jsonl", entries)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, Path]:
    return {
        "mok": run_of(tmp_path / "mok", [9999, 100, 200, 100], [5, 4, 3, 2]),
        "alltoall": run_of(tmp_path / "alltoall", [9999, 200, 400, 200], [5, 4, 3, 2]),
    }


def line(runs: dict[str, Path]) -> dict[str, Any]:
    return {
        "name": "model",
        "train_iters": 4,
        "device": "a GPU",
        "versions": {"torch": "2"},
        "commit": "0123456789abcdef",
        "dispatchers": compare_throughput.summarise(runs, 1),
        "left_out": {"flex": "no DeepEP"},
    }


def test_medians_are_of_what_comes_after_the_warm_up(runs: dict[str, Path]) -> None:
    found = compare_throughput.summarise(runs, 1)["mok"]
    assert found["iterations"] == 3
    assert found["step_ms"] == 100
    assert (found["step_ms_least"], found["step_ms_most"]) == (100, 200)
    assert (found["moe_forward_ms"], found["moe_backward_ms"]) == (12.5, 37.5)
    assert found["moe_share"] == 0.5
    assert found["tokens_per_s_per_rank"] == 5000
    assert found["peak_bytes"] == 4e9
    assert found["start_s"] == 31.4
    assert found["losses"] == [5, 4, 3, 2]
    assert compare_throughput.summarise(runs, 4) == {}


def test_a_restart_warms_up_again(tmp_path: Path) -> None:
    folder = run_of(tmp_path, [50, 100, 50, 100], [1, 1, 1, 1])
    lines = [json.loads(text) for text in (folder / compare_worker.FILE).read_text().splitlines()]
    for entry in lines[2:]:
        entry["since_start"] -= 2
    write(folder / compare_worker.FILE, lines)
    found = compare_throughput.summarise({"mok": folder}, 1)["mok"]
    assert (found["iterations"], found["step_ms"]) == (2, 100)


def test_long_curves_are_thinned_and_keep_their_end() -> None:
    thin = compare_throughput._thinned([float(i) for i in range(1001)])
    assert len(thin) <= 100
    assert thin[-1] == 1000
    assert compare_throughput._thinned([]) == []
    assert compare_throughput._thinned([1.0, 2.0]) == [1.0, 2.0]


@pytest.mark.parametrize("count", [0, 1, 2, 99, 100, 101, 250, 1001])
def test_what_was_thinned_is_drawn_where_it_was(count: int) -> None:
    thin = compare_throughput._thinned([float(i) for i in range(1, count + 1)])
    assert list(compare_throughput._iterations(thin, count)) == thin


def test_the_table_says_all_of_it(runs: dict[str, Path]) -> None:
    said = compare_throughput.table(line(runs)).splitlines()
    assert said[0] == "model, on a GPU"
    assert said[2].split() == ["mok", "5,000", "0.01", "100.0", "100.0-200.0", "12.5", "37.5",
                               "50", "%", "4.00", "31", "2.0000", "1.00", "x"]  # fmt: skip
    assert said[3].split()[-2:] == ["0.50", "x"]
    assert len(said[1]) == len(said[2]) == len(said[3])
    assert said[4] == "flex left out: no DeepEP"


def test_the_picture_is_drawn(runs: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    recorded = json.loads(json.dumps(line(runs)))  # no run's folder is needed
    assert compare_throughput.plot(tmp_path / "p.png", recorded) is None
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["missing.yaml"], "the config file must exist"),
        ([str(TINY), "--dispatchers", "mok,deepep"], "got 'deepep'"),
        ([str(TINY), "--train-iters", "3"], "above --warm-up, and that 0 or more, got 3 and 3"),
        ([str(TINY), "--train-iters", "many"], "got many and 3"),
        ([str(TINY), "--warm-up", "-1"], "got 40 and -1"),
        ([str(TINY), "--warm-up", "few"], "invalid int value: 'few'"),
        ([str(TINY), "extra"], "an override must start with --, got 'extra'"),
        ([], "the following arguments are required: config"),
    ],
)
def test_bad_input_is_one_clear_line(
    tokens: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare_throughput.main(tokens) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith("mok: ")
    assert said.count("\n") == 1


def test_a_launcher_around_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert compare_throughput.main([str(TINY)]) == 2
    assert "got WORLD_SIZE from a launcher" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--commit", "b"], "one commit, got b now and a in "),
        (
            ["--commit", "a", "--seed", "7"],
            "one arguments, got {'seed': '7'} now and {'seed': '1234'} in ",
        ),
    ],
)
def test_measurements_of_something_else_are_not_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    run = run_of(tmp_path / "alltoall", [9, 8], [5, 4])
    command = [str(TINY), "--output", str(tmp_path), "--dispatchers", "alltoall"]
    assert compare_throughput.main([*command, "--commit", "a"]) == 2
    assert "an unknown one in " in capsys.readouterr().err
    identity = compare_throughput.identity_of(read_config(TINY), "a")
    compare_throughput.write_identity(run, identity)
    assert compare_throughput.main([*command, *more]) == 2
    assert words in capsys.readouterr().err
    compare_throughput._refuse_another(run, identity)


def test_what_cannot_run_is_left_out_with_its_reason() -> None:
    config = read_config(TINY)
    gpu = config.relaunch({"device": "cuda"})
    assert compare_throughput._absent("mok", config) is None
    assert compare_throughput._absent("flex", config) == "its communication needs GPUs"
    assert "needs the package deep_ep" in str(compare_throughput._absent("flex", gpu))
    other = gpu.replace({"moe-flex-dispatcher-backend": "something-new"})
    assert compare_throughput._absent("flex", other) is None


def test_bytecode_is_kept_with_the_runs_where_there_would_be_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    spec = importlib.util.spec_from_file_location("megatron.core", package / "__init__.py")
    assert spec is not None
    assert spec.cached is not None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    monkeypatch.setattr(sys, "pycache_prefix", None)

    def prefix(*, dont_write: bool) -> str | None:
        monkeypatch.setattr(sys, "dont_write_bytecode", dont_write)
        compare_throughput._share_bytecode(tmp_path)
        return os.environ.get("PYTHONPYCACHEPREFIX")

    assert prefix(dont_write=False) is None
    Path(spec.cached).parent.mkdir()
    Path(spec.cached).write_text("")
    assert prefix(dont_write=True) is None, "it has some already"
    Path(spec.cached).unlink()
    assert prefix(dont_write=True) == str(tmp_path / "bytecode")
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ
    assert not sys.dont_write_bytecode
    assert sys.pycache_prefix == str(tmp_path / "bytecode")


# --- the clock -------------------------------------------------------------------------


@pytest.fixture
def moe_model(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """A layer that the clock takes for Megatron's, between two that it does not."""
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.moe import moe_layer

    class Layer(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return super().forward(x).tanh(), None

    monkeypatch.setattr(moe_layer, "MoELayer", Layer)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.moe = torch.nn.Linear(4, 4), Layer(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.moe(self.before(x))[0]
            return output.sum()

    return Model()


def test_the_clock_finds_the_moe_layers_time(moe_model: torch.nn.Module, tmp_path: Path) -> None:
    args = SimpleNamespace(seq_length=4, global_batch_size=3, world_size=2)
    clock = compare_worker.Clock(tmp_path / "t.jsonl", lambda args, batch: 2e12 * batch, args)
    write(clock.path, [{"iteration": i} for i in range(1, 8)])
    seen: list[tuple[int, int]] = []

    def train_step(step: Any, data: Any, model: Any, *, iteration: int) -> str:
        for _ in range(2):  # micro-batches
            model[0](torch.ones(2, 4)).backward()
        with torch.no_grad():
            model[0](torch.ones(2, 4))
        seen.append((len(clock.marks["forward"]), len(clock.marks["backward"])))
        return "result"

    timed = clock.around(train_step)
    for iteration in (5, 6):
        assert timed(None, None, [moe_model], iteration=iteration) == "result"
    assert seen == [(6, 4), (6, 4)]
    lines = [json.loads(text) for text in clock.path.read_text().splitlines()]
    assert [entry["iteration"] for entry in lines] == [1, 2, 3, 4, 5, 6, 7], "6 and 7 done again"
    first, second = lines[5:]
    assert (first["since_start"], second["since_start"]) == (1, 2)
    for entry in (first, second):
        assert 0 < entry["moe_forward_ms"] + entry["moe_backward_ms"] < entry["step_ms"]
        assert entry["moe_backward_ms"] > 0
        assert entry["tflops"] == pytest.approx(2 * 3 / (entry["step_ms"] / 1e3) / 2)
        assert entry["tokens"] == 12
        assert entry["peak_bytes"] > 1e6
    assert first["start_s"] > 0
    assert "start_s" not in second


def test_without_checkpoints_nothing_says_where_to_save() -> None:
    def complete(config: RunConfig, folder: Path) -> RunConfig:
        return config.replace({"save": "x", "load": "x", "exit-signal-handler": True})

    config = dataclasses.replace(read_config(TINY), arguments={"seed": 1})
    done = compare_worker._without_checkpoints(complete)(config, Path())
    assert done.arguments == {"seed": 1, "exit-signal-handler": True}


# --- whole runs ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_comparison_goes_on_with_the_run_that_is_missing(tmp_path: Path) -> None:
    """A real training on mok, beside one on alltoall that an earlier command has finished."""
    small = ["--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "64"]
    small += ["--kv-channels", "8", "--moe-ffn-hidden-size", "16", "--seq-length", "32"]
    small += ["--max-position-embeddings", "32", "--micro-batch-size", "2"]
    small += ["--global-batch-size", "4", "--train-iters", "4", "--lr-warmup-iters", "1"]
    command = [sys.executable, str(SCRIPTS / "compare_throughput.py"), str(TINY), *small]
    command += ["--dispatchers", "mok,alltoall,flex", "--warm-up", "1", "--without-checkpoints"]
    command += ["--commit", "a"]
    command += ["--output", str(tmp_path / "runs"), "--results", str(tmp_path / "results.jsonl")]
    alltoall = run_of(tmp_path / "runs" / "alltoall", [9, 8, 8, 8], [5, 4, 3, 2])
    config = read_config(TINY).replace(read_overrides(small))
    compare_throughput.write_identity(alltoall, compare_throughput.identity_of(config, "a"))
    outer = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    done = subprocess.run(
        command,
        env={**outer, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "[alltoall] already measured to iteration 4" in done.stdout
    assert "[mok] already" not in done.stdout
    assert "mok 4/4: loss " in done.stderr
    assert "\r" not in done.stderr, "a progress bar in a pipe"
    assert "flex left out: its communication needs GPUs" in done.stdout
    assert "difference" in done.stdout
    assert "also differ by how they were started" in done.stdout, "the invented one tells nothing"
    (line,) = [json.loads(text) for text in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert list(line["dispatchers"]) == ["mok", "alltoall"]
    run = line["dispatchers"]["mok"]
    assert run["iterations"] == 3
    assert run["ranks"] == 2
    assert len(run["losses"]) == 4
    assert 0 < run["moe_share"] < 1
    assert run["start_s"] > 1
    assert "mok starts, " in done.stderr
    assert run["moe_backward_ms"] > 0
    assert run["tflops_per_rank"] > 0
    assert not list((tmp_path / "runs").rglob("checkpoints"))
    assert (tmp_path / "results_tiny_cpu_qwen3.png").read_bytes().startswith(b"\x89PNG")
