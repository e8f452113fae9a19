"""Whole Megatron training runs, one for each dispatcher, with the same seed and data, side by side.

    python scripts/compare_throughput.py configs/tiny_cpu_qwen3.yaml --dispatchers mok,alltoall
    python scripts/compare_throughput.py configs/qwen3_30b_a3b_slice_1gpu.yaml \\
        --dispatchers mok,alltoall,flex --without-checkpoints
    … --train-iters 30                              an argument of Megatron, not the file's

Each run is scripts/train.py's, in a folder of its own, one after another. What stopped goes on: a
finished run is not done again, an unfinished one continues from its checkpoint (from its start
with --without-checkpoints). A folder whose runs had another commit, GPU, versions or arguments (but
--train-iters) is refused. Then: tokens/s, model TFLOP/s by Megatron's own count, the step's time
and the MoE layers' part of it, peak memory, and the losses; a table, a JSON line, a PNG. The first
iterations after each start are left out of times, --warm-up of them.

The runs follow one another, so a GPU's clocks may differ between them: for ratios of one layer see
bench.py. A dispatcher that cannot run here is left out with its reason.

Exit codes: those of train.py, the worst of all runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import compare_worker
from bench_record import aligned, append, environment, origin
from train import DISPATCHER
from train_config import OneLineParser, RunConfig, UserError, read_config, read_overrides
from train_log import compare, read_lines, started_alike
from train_worker import WRONG_INPUT

DISPATCHERS = ("mok", "alltoall", "allgather", "flex")
IDENTITY = "identity.json"  # in a run's folder: what it was made of
# What flex's backends are imported from.
_FLEX_PACKAGES = {"deepep": "deep_ep", "hybridep": "deep_ep"}


def main(tokens: list[str]) -> int:
    parser = OneLineParser(
        prog="compare_throughput.py",
        usage="compare_throughput.py CONFIG [option …] [--ARGUMENT VALUE …]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, help="a YAML file, see configs/")
    parser.add_argument("--dispatchers", default="mok,alltoall", metavar="A,B")
    parser.add_argument("--warm-up", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--without-checkpoints", action="store_true", help="save nothing")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="default: runs/NAME of the config/throughput"
    )
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="default: scripts/results/throughput.jsonl"
    )
    parser.add_argument("--commit", help="of this tree, where git cannot tell")
    try:
        options, overrides = parser.parse_known_args(tokens)
        names = tuple(dict.fromkeys(options.dispatchers.split(",")))
        config = read_config(options.config).replace(read_overrides(overrides))
        _check(names, options.warm_up, config)
        output = options.output or Path("runs") / config.path.stem / "throughput"
        identity = identity_of(config, options.commit)
        for name in names:
            _refuse_another(output / name, identity)
    except UserError as error:
        print(error, file=sys.stderr)
        return WRONG_INPUT
    target = int(config.arguments["train-iters"])
    left_out, worst = {}, 0
    _share_bytecode(output)
    for name in names:
        reason = _absent(name, config)
        if reason is None:
            write_identity(output / name, identity)
            code = _run(name, output, target, options, overrides)
            if code in (128 + 2, 128 + 15):  # stopped by the user
                return code
            worst = max(worst, code)
            reason = f"failed with exit code {code}; see {output / name / 'logs'}" if code else None
        if reason is not None:
            left_out[name] = reason
    runs = {name: output / name for name in names if name not in left_out}
    line = {
        "name": config.path.stem,
        "warm_up": options.warm_up,
        "train_iters": target,
        "dispatchers": summarise(runs, options.warm_up),
        "left_out": left_out,
        **environment(config.launch.device, options.commit),
    }
    print(f"\n{table(line)}")
    _say_losses(runs)
    if runs:
        scripts = Path(__file__).resolve().parent
        results = options.results or scripts / "results" / "throughput.jsonl"
        append(results, line)
        picture = results.with_name(f"{results.stem}_{config.path.stem}.png")
        print(f"{plot(picture, line) or f'picture: {picture}'}; lines: {results}")
    return worst


def _check(names: tuple[str, ...], warm_up: int, config: RunConfig) -> None:
    """Raises UserError for what would only show after a run, or between two."""
    if "WORLD_SIZE" in os.environ:
        raise UserError(
            "mok: compare_throughput.py starts its runs itself, got WORLD_SIZE from a launcher; "
            "run it without torchrun"
        )
    for name in names:
        if name not in DISPATCHERS:
            raise UserError(
                f"mok: a dispatcher must be one of {', '.join(DISPATCHERS)}, got {name!r}; "
                "choose one of them"
            )
    iterations = str(config.arguments.get("train-iters", ""))
    if not iterations.isdecimal() or int(iterations) <= warm_up or warm_up < 0:
        raise UserError(
            "mok: train-iters must be a number above --warm-up, and that 0 or more, got "
            f"{iterations or 'none'} and {warm_up}; pass --train-iters"
        )


def _absent(name: str, config: RunConfig) -> str | None:
    """Why a dispatcher cannot run here, None if nothing speaks against it."""
    backend = str(config.arguments.get("moe-flex-dispatcher-backend", "deepep"))
    package = _FLEX_PACKAGES.get(backend)
    if name == "flex" and config.launch.device == "cpu":
        return "its communication needs GPUs"
    if name == "flex" and package and importlib.util.find_spec(package) is None:
        return f"its backend {backend} needs the package {package}, which is not installed"
    return None


def _share_bytecode(output: Path) -> None:
    """Containers often tell Python to keep no bytecode; then each process compiles torch and
    Megatron again, 10 s and more of every start. Such bytecode goes to the runs' folder instead."""
    try:
        megatron = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return  # a run will say what is missing
    cached = megatron and megatron.cached
    if sys.dont_write_bytecode and cached and not Path(cached).exists():
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        folder = os.environ.setdefault("PYTHONPYCACHEPREFIX", str((output / "bytecode").resolve()))
        sys.dont_write_bytecode, sys.pycache_prefix = False, folder  # here, for torch


def identity_of(config: RunConfig, commit: str | None) -> dict[str, Any]:
    """What the runs of a folder must share: a number may come from an earlier command."""
    not_of_it = ("train-iters", DISPATCHER)
    arguments = {k: str(v) for k, v in config.arguments.items() if k not in not_of_it}
    started = {"processes": config.launch.processes, "arguments": arguments}
    return {**origin(config.launch.device, commit), **started}


def write_identity(run: Path, identity: dict[str, Any]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / IDENTITY).write_text(json.dumps(identity))


def _refuse_another(run: Path, identity: dict[str, Any]) -> None:
    """Raises UserError where the folder has measurements of another identity, or of an unknown."""
    if not read_lines(run / compare_worker.FILE):
        return
    file = run / IDENTITY
    before = json.loads(file.read_text()) if file.is_file() else {}
    for key, value in identity.items():
        old = before.get(key, "an unknown one")
        if old == value:
            continue
        if isinstance(old, dict):  # only what differs
            keys = sorted(k for k in {*old, *value} if old.get(k) != value.get(k))
            old, value = ({k: some.get(k) for k in keys} for some in (old, value))
        raise UserError(
            f"mok: the runs of a folder must have one {key}, got {value} now and {old} in {run}; "
            "pass another --output or remove it"
        )


def _run(
    name: str, output: Path, target: int, options: argparse.Namespace, overrides: list[str]
) -> int:
    """Train on one dispatcher, unless that is done; train.py's exit code."""
    lines = read_lines(output / name / compare_worker.FILE)
    if lines and lines[-1]["iteration"] >= target:
        print(f"[{name}] already measured to iteration {lines[-1]['iteration']}", flush=True)
        return 0
    command = [str(options.config), "--output", str(output), *overrides, f"--{DISPATCHER}", name]
    return compare_worker.main(
        [*command, *([compare_worker.WITHOUT] if options.without_checkpoints else [])]
    )


def summarise(runs: dict[str, Path], warm_up: int) -> dict[str, dict[str, Any]]:
    """For each run its medians over the iterations that are not warm-up, and its last loss."""
    found: dict[str, dict[str, Any]] = {}
    for name, folder in runs.items():
        lines = read_lines(folder / compare_worker.FILE)
        timed = [line for line in lines if line["since_start"] > warm_up]
        if not timed:
            continue
        moe = [line["moe_forward_ms"] + line["moe_backward_ms"] for line in timed]
        steps = [line["step_ms"] for line in timed]
        found[name] = {
            "iterations": len(timed),
            "step_ms": statistics.median(steps),
            "step_ms_least": min(steps),
            "step_ms_most": max(steps),
            "moe_forward_ms": statistics.median(line["moe_forward_ms"] for line in timed),
            "moe_backward_ms": statistics.median(line["moe_backward_ms"] for line in timed),
            "moe_share": statistics.median(m / s for m, s in zip(moe, steps, strict=True)),
            "tokens_per_s_per_rank": statistics.median(
                1e3 * line["tokens"] / line["step_ms"] / line["ranks"] for line in timed
            ),
            "tflops_per_rank": statistics.median(line["tflops"] for line in timed),
            "peak_bytes": max(line["peak_bytes"] for line in lines),
            "start_s": max((line.get("start_s", 0.0) for line in lines), default=0.0),
            "ranks": timed[-1]["ranks"],
            "losses": _thinned([line["loss"] for line in read_lines(folder / "losses.jsonl")]),
        }
    return found


def _thinned(losses: list[float], most: int = 100) -> list[float]:
    """Every n-th up to the last: the whole curve is in the run's folder."""
    return losses[:: -max(1, -(-len(losses) // most))][::-1]


def _iterations(thinned: list[float], last: int, most: int = 100) -> range:
    """Whose losses _thinned has kept."""
    every = max(1, -(-last // most))
    return range(last - every * (len(thinned) - 1), last + 1, every)


def table(line: dict[str, Any]) -> str:
    """The comparison for the terminal."""
    found = line["dispatchers"]
    columns = ("tokens/s/rank", "TFLOP/s/rank", "step ms", "spread", "MoE fwd ms", "MoE bwd ms")
    rows: list[tuple[str, ...]] = [
        ("", *columns, "MoE share", "peak GB", "start s", "last loss", "speed")
    ]
    first = next(iter(found.values()), None)
    for name, run in found.items():
        rate = run["tokens_per_s_per_rank"]
        rows.append(
            (
                name,
                f"{rate:,.0f}",
                f"{run['tflops_per_rank']:.4g}",
                f"{run['step_ms']:.1f}",
                f"{run['step_ms_least']:.1f}-{run['step_ms_most']:.1f}",
                f"{run['moe_forward_ms']:.1f}",
                f"{run['moe_backward_ms']:.1f}",
                f"{100 * run['moe_share']:.0f} %",
                f"{run['peak_bytes'] / 1e9:.2f}",
                f"{run['start_s']:.0f}",
                f"{run['losses'][-1]:.4f}" if run["losses"] else "-",
                f"{rate / first['tokens_per_s_per_rank']:.2f} x" if first else "",
            )
        )
    said = [f"{line['name']}, on {line['device']}", *aligned(rows)]
    said += [f"{name} left out: {reason}" for name, reason in line["left_out"].items()]
    return "\n".join(said)


def _say_losses(runs: dict[str, Path]) -> None:
    """The curves of the first run and of each other."""
    (first, folder), *others = runs.items() if runs else [("", Path())]
    for name, other in others:
        print(f"\n{compare(first, folder / 'losses.jsonl', name, other / 'losses.jsonl')}")
        if not started_alike(folder, other, DISPATCHER):
            print(f"{first} and {name} also differ by how they were started, see starts.jsonl")


def plot(path: Path, line: dict[str, Any]) -> str | None:
    """A PNG of a recorded line: rates, where the step's time goes, and the losses.

    Returns a line that says why not, if matplotlib is missing.
    """
    try:
        os.environ.setdefault("MPLBACKEND", "agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return "mok: the picture needs matplotlib, got none; pip install matplotlib"
    found = line["dispatchers"]
    figure, (rates, times, losses) = plt.subplots(1, 3, figsize=(14, 4.5), layout="constrained")
    names = list(found)
    bars = rates.bar(names, [run["tokens_per_s_per_rank"] for run in found.values()])
    first = next(iter(found.values()))["tokens_per_s_per_rank"] if found else 1.0
    labels = [
        f"{run['tokens_per_s_per_rank']:,.0f}\n({run['tokens_per_s_per_rank'] / first:.2f} x)"
        for run in found.values()
    ]
    rates.bar_label(bars, labels)
    rates.margins(y=0.15)
    rates.set(ylabel="tokens/s/rank", title="Rate (higher is better)")
    below = [0.0] * len(names)
    for part, label in (
        ("moe_forward_ms", "MoE layers, forward"),
        ("moe_backward_ms", "MoE layers, backward"),
        (None, "everything else"),
    ):
        heights = [
            run[part] if part else run["step_ms"] - under
            for run, under in zip(found.values(), below, strict=True)
        ]
        bars = times.bar(names, heights, bottom=below, label=label)
        times.bar_label(bars, fmt="{:.4g} ms", label_type="center", color="white")
        below = [a + b for a, b in zip(below, heights, strict=True)]
    times.set(ylabel="ms an iteration", title="Step time (lower is better)")
    times.margins(y=0.3)  # room for the legend
    times.legend(fontsize=8, loc="upper left")
    for index, (name, run) in enumerate(found.items()):
        losses.plot(
            _iterations(run["losses"], line["train_iters"]),
            run["losses"],
            label=f"{name}, at the end {run['losses'][-1]:.4f}" if run["losses"] else name,
            linestyle="-" if index == 0 else "--",
            linewidth=max(2.5 - index, 1),
        )
    losses.set(xlabel="iteration", ylabel="nats per token", title="Language model loss")
    losses.legend(fontsize=8)
    for axis in (rates, times, losses):
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    versions = ", ".join(f"{k} {v}" for k, v in line["versions"].items())
    figure.suptitle(f"{line['name']}: the same training on each dispatcher")
    figure.supxlabel(f"{line['device']}; {versions}; commit {line['commit'][:12]}", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
