"""Step time against expert parallel size, one line a machine, and what an iteration of the whole
run is made of, as a PNG that explains itself."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mok_megatron.plan.estimate import Step, step
from mok_megatron.plan.machines import Machine
from mok_megatron.plan.model import Model, PlanError
from mok_megatron.plan.training import Iteration

Runs = Mapping[tuple[str, int], Iteration | str]
PARTS = {
    "compute": "micro-batches",
    "bubble": "pipeline bubble",
    "exposed": "gradients reduced and parameters gathered, not hidden",
    "optimizer": "optimizer",
}


def draw(path: Path, model: Model, machines: list[Machine], runs: Runs, caveat: str) -> None:
    """runs: by machine and ranks. Raises PlanError when matplotlib is missing or the file cannot be
    written."""
    try:
        os.environ.setdefault("MPLBACKEND", "agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise PlanError(
            "mok: the plot needs matplotlib, got none; pip install 'mok-megatron[plots]', or leave "
            "out --png"
        ) from None
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    _draw_steps(left, model, machines)
    names = [machine.name for machine in machines]
    _draw_iterations(right, model, runs, "H200" if "H200" in names else names[0])
    figure.supxlabel("\n".join(textwrap.wrap(caveat, 170)), fontsize=8)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise PlanError(
            f"mok: the plot must be written to a file ending in .png, got {path}: {error}; choose "
            "another with --png"
        ) from error
    finally:
        plt.close(figure)


def _draw_steps(axes: Any, model: Model, machines: list[Machine]) -> None:
    curves: dict[tuple[Step, ...], list[str]] = {}  # machines that cannot be told apart share one
    for machine in machines:
        curves.setdefault(tuple(_steps(model, machine)), []).append(machine.name)
    shown: list[int] = []
    for index, (steps, names) in enumerate(curves.items()):
        sizes = _sizes(model, len(steps))
        shown = max(shown, sizes, key=len)
        (line,) = axes.plot(
            sizes,
            [s.best for s in steps],
            marker="os^D"[index % 4],
            linestyle=("-", "--")[index % 2],
            label=", ".join(names),
        )
        axes.fill_between(
            sizes,
            [s.best for s in steps],
            [s.worst for s in steps],
            color=line.get_color(),
            alpha=0.2,
            linewidth=0,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [str(p) for p in shown])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set(
        xlabel="expert parallel size (ranks that share the experts, inside one NVLink domain)",
        ylabel="time of a micro-batch, at least (ms)",
        title=f"{model.name}: one micro-batch of {model.tokens} tokens,\nforward and backward",
    )
    axes.grid(alpha=0.3)
    axes.legend(
        title="line: communication overlaps\n"
        "shade: up to the most that\nan emulated wire left exposed"
    )


def _draw_iterations(axes: Any, model: Model, runs: Runs, name: str) -> None:
    """Parts of an iteration in percent, one bar for each number of ranks."""
    mine = {ranks: run for (machine, ranks), run in runs.items() if machine == name}
    below = [0.0] * len(mine)
    for part, label in PARTS.items():
        heights = [
            0.0 if isinstance(run, str) else 100 * getattr(run, part) / run.best
            for run in mine.values()
        ]
        bars = axes.bar(range(len(mine)), heights, 0.6, bottom=below, label=label)
        texts = [f"{height:.0f} %" if height >= 4 else "" for height in heights]
        axes.bar_label(bars, texts, label_type="center", color="white", fontsize=9)
        below = [b + height for b, height in zip(below, heights, strict=True)]
    for index, run in enumerate(mine.values()):
        if isinstance(run, str):
            text, at = "cannot run it:\n" + "\n".join(textwrap.wrap(run, 20)), 2.0
        else:
            sizes = f"PP {run.pipeline}, EP {run.expert_parallel}, DP {run.data_parallel}"
            text = f"{sizes}\n≥ {run.best / 1e3:.3g} s\n≤ {run.tokens_per_s:,.0f}\ntokens/s/GPU"
            at = 101.0
        axes.text(index, at, text, ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(mine)), [f"{ranks} GPUs" for ranks in mine])
    axes.set_xlim(-0.6, len(mine) - 0.4)
    axes.set_ylim(0, 155)
    axes.set_yticks(range(0, 101, 20))
    batch = f"{model.batch} sequences" if model.batch else "one micro-batch a rank"
    axes.set(
        ylabel="part of an iteration, at best (%)",
        title=f"An iteration of {batch} on {name},\nwith the file's pipeline, at best",
    )
    axes.legend(loc="upper right", fontsize=8, ncols=2)


def _sizes(model: Model, count: int | None = None) -> list[int]:
    """The first `count` numbers of ranks that can share the experts evenly."""
    return [p for p in range(1, model.num_experts + 1) if model.num_experts % p == 0][:count]


def _steps(model: Model, machine: Machine) -> list[Step]:
    """One for each size that the machine's domain holds."""
    return [step(model, machine, p) for p in _sizes(model) if p <= machine.domain.value]
