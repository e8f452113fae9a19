"""What a benchmark of the throttled wire says: exposed communication, a table, a picture.

bench_wire.py says what is measured. No torch here.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_record import aligned

ARRIVAL_BYTES = 8  # that follow a row home
CHOICE_BYTES = 8  # id and probability of a choice
DIRECTIONS = ("forward", "backward")


class WireError(Exception):
    """A result that is not what it must be; the message is the one line to read."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Milliseconds of one forward and one backward of all ranks."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


def way_bytes(rows_PP: list[list[int]], hidden: int, slots: int) -> Times:
    """Bytes of the busiest way of any rank in a forward and a backward.

    rows_PP[p][q]: rows that tokens of rank p send to experts of rank q. slots: T * K of a rank,
    whose choices every other rank reads.
    """
    ranks, row = len(rows_PP), 2 * hidden
    most = [0, 0]
    for r in range(ranks):
        others = [p for p in range(ranks) if p != r]
        sent = sum(rows_PP[r][q] for q in others)  # rows of the own tokens, elsewhere
        held = sum(rows_PP[p][r] for p in others)  # rows of others' tokens, here
        for direction, sources in enumerate((1, 2)):
            choices = (1 - direction) * (ranks - 1) * slots * CHOICE_BYTES
            come = held * sources * row + sent * (row + ARRIVAL_BYTES) + choices
            go = sent * sources * row + held * (row + ARRIVAL_BYTES) + choices
            most[direction] = max(most[direction], come, go)
    return Times(forward=most[0], backward=most[1])


def summarise(
    samples: dict[float, list[Times]], way: Times, share: float
) -> tuple[Times, dict[str, dict[str, float]]]:
    """Unthrottled times, and of each rate what it exposes.

    samples: rate B in GB/s (0: unthrottled) -> its times, one a round. share: a rank's part of B.
    Raises WireError when a direction was faster than its wire.
    """
    free = samples[0.0]
    base = _median(free)
    found = {}
    for rate, times in samples.items():
        if not rate:
            continue
        mine = _median(times)
        line = {
            "forward_ms": mine.forward,
            "backward_ms": mine.backward,
            "exposed": statistics.median(
                t.both / f.both - 1 for t, f in zip(times, free, strict=True)
            ),
        }
        for name in DIRECTIONS:
            took, alone = getattr(mine, name), getattr(base, name)
            wire = getattr(way, name) / (rate * share) / 1e6  # GB/s are 1e6 bytes a millisecond
            if took < 0.98 * wire:
                raise WireError(
                    f"mok: a {name} must take its wire's time at {rate:g} GB/s, {wire:.3f} ms, got "
                    f"{took:.3f} ms; look at csrc/device/wire.cuh"
                )
            line[f"{name}_wire_ms"] = wire
            line[f"{name}_exposed"] = took / alone - 1
            line[f"{name}_of_longer"] = took / max(alone, wire)
        found[f"{rate:g}"] = line
    return base, found


def _median(times: list[Times]) -> Times:
    return Times(
        forward=statistics.median(t.forward for t in times),
        backward=statistics.median(t.backward for t in times),
    )


def table(lines: list[dict[str, Any]]) -> list[str]:
    """For people."""
    rows: list[tuple[str, ...]] = [
        ("model, ranks", "B GB/s", "fwd + bwd ms", "exposed", "fwd, of the longer", "bwd")
    ]
    for line in lines:
        name = f"{line['model']}, {line['ranks']}"
        free = f"{line['forward_ms']:.2f} + {line['backward_ms']:.2f}"
        rows.append((name, "none", free, "", "", ""))
        for rate, at in line["rates"].items():
            both = f"{at['forward_ms']:.2f} + {at['backward_ms']:.2f}"
            exposed = f"{100 * at['exposed']:.1f} %"
            longer = [f"{at[f'{d}_of_longer']:.2f}x" for d in DIRECTIONS]
            rows.append((name, rate, both, exposed, *longer))
    return aligned(rows)


def plot(path: Path, lines: list[dict[str, Any]]) -> str | None:
    """Exposed communication against bandwidth; a line that says why not, without matplotlib."""
    try:
        os.environ.setdefault("MPLBACKEND", "agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return "mok: the picture needs matplotlib, got none; pip install matplotlib"
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    colors = {model: f"C{i}" for i, model in enumerate(dict.fromkeys(x["model"] for x in lines))}
    for line in lines:
        rates = sorted(map(float, line["rates"]))
        exposed = [100 * line["rates"][f"{rate:g}"]["exposed"] for rate in rates]
        style = "o-" if line["ranks"] == 8 else "s--"
        label = f"{line['model']}, EP {line['ranks']}, T {line['tokens']}"
        axis.plot(rates, exposed, style, color=colors[line["model"]], label=label)
    axis.axhline(15, color="black", lw=0.8, ls=":", label="floor, 15 %")
    axis.set(
        xlabel="B, GB/s a direction of a whole GPU",
        ylabel="exposed, % of the unthrottled layer (lower is better)",
        title="Emulated wire between virtual ranks of one GPU, forward + backward",
    )
    axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    about = lines[0]
    figure.supxlabel(f"{about['device']}; commit {about['commit'][:12]}", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return None
