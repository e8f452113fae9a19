"""Step time against expert parallel size, one line a machine, as a PNG that explains itself."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

from mok_megatron.plan.estimate import Step, step
from mok_megatron.plan.machines import Machine
from mok_megatron.plan.model import Model, PlanError


def draw(path: Path, model: Model, machines: list[Machine], caveat: str) -> None:
    """Raises PlanError when matplotlib is missing or the file cannot be written."""
    try:
        os.environ.setdefault("MPLBACKEND", "agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise PlanError(
            "mok: the plot needs matplotlib, got none; pip install 'mok-megatron[plots]', or leave "
            "out --png"
        ) from None
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
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
            alpha=0.15,
            linewidth=0,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [str(p) for p in shown])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set(
        xlabel="expert parallel size (ranks that share the experts, inside one NVLink domain)",
        ylabel="step time, at least (ms)",
        title=f"{model.name}: one micro-batch of {model.tokens} tokens, forward and backward",
    )
    axes.grid(alpha=0.3)
    axes.legend(title="line: communication overlaps\nshade: up to none of it does")
    figure.supxlabel("\n".join(textwrap.wrap(caveat, 110)), fontsize=7)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise PlanError(
            f"mok: the plot must be written to a file ending in .png, got {path}: {error}; choose "
            "another with --png"
        ) from error
    finally:
        plt.close(figure)


def _sizes(model: Model, count: int | None = None) -> list[int]:
    """The first `count` numbers of ranks that can share the experts evenly."""
    return [p for p in range(1, model.num_experts + 1) if model.num_experts % p == 0][:count]


def _steps(model: Model, machine: Machine) -> list[Step]:
    """One for each size that the machine's domain holds."""
    return [step(model, machine, p) for p in _sizes(model) if p <= machine.domain.value]
