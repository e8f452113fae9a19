"""What a layer benchmark says: a table for people, and a JSON line; bench_picture.py draws it.

A measurement is one shape under one load in one table; it is one JSON line, complete in itself:
shape, samples boiled down, who was left out and why, device, versions, commit and command. Ratios
are medians over the rounds of ratios inside a round. TFLOP/s count the layer's products and no
padding. In table b a backward includes the addition into main_grad, which is also shown apart where
it is not fused.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bench_clock import Sample
from bench_problem import LayerShape
from bench_record import aligned

TABLES = {
    "fresh": "(a) fresh bf16 weight gradients",
    "main_grad": "(b) weight gradients added into fp32 main_grad",
}
BOUND = "bound"


def summarise(
    shape: LayerShape, samples: dict[str, list[Sample]], first: str
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The bound, and each arm: times, rates, parts of the bound, and time / time of arm `first`."""
    bounds = samples[BOUND]
    bound = {
        "forward_ms": statistics.median(b.forward for b in bounds),
        "backward_ms": statistics.median(b.backward for b in bounds),
        "passes_ms": {
            name: statistics.median(b.passes[name] for b in bounds) for name in bounds[0].passes
        },
    }
    arms: dict[str, dict[str, Any]] = {}
    for name, visits in samples.items():
        if name == BOUND:
            continue
        both = [v.both for v in visits]
        forward = statistics.median(v.forward for v in visits)
        backward = statistics.median(v.backward + v.add for v in visits)
        flop = shape.forward_flop / 1e9  # a rate is flop / ms / 1e9
        arms[name] = {
            "forward_ms": forward,
            "backward_ms": backward,
            "add_ms": statistics.median(v.add for v in visits),
            "both_ms": statistics.median(both),
            "both_ms_least": min(both),
            "both_ms_most": max(both),
            "forward_tflops": flop / forward,
            "backward_tflops": 2 * flop / backward,
            "both_tflops": 3 * flop / statistics.median(both),
            "of_bound_forward": _ratio(
                (b.forward, v.forward) for b, v in zip(bounds, visits, strict=True)
            ),
            "of_bound_backward": _ratio(
                (b.backward, v.backward + v.add) for b, v in zip(bounds, visits, strict=True)
            ),
            "of_bound": _ratio((b.both, v.both) for b, v in zip(bounds, visits, strict=True)),
            f"times_{first}": _ratio(
                (v.both, f.both) for v, f in zip(visits, samples[first], strict=True)
            ),
        }
    return bound, arms


def _ratio(pairs: Iterable[tuple[float, float]]) -> float:
    return statistics.median(a / b for a, b in pairs)


def title(line: dict[str, Any]) -> str:
    """One measurement in words: what, under which load, in which table."""
    letters = ", ".join(
        f"{letter} {line['shape'][field.name]}"
        for letter, field in zip("TKEHFS", dataclasses.fields(LayerShape), strict=True)
    )
    least, most = line["rows_least"], line["rows_most"]
    return (
        f"{line['name']}, {line['load']}: {letters}; {least}-{most} rows an expert; "
        f"{TABLES[line['table']]}"
    )


def table(line: dict[str, Any]) -> str:
    """A measurement for the terminal: the arms, the bound, and who was left out."""
    first = line["first"]
    columns = ("fwd ms", "bwd ms", "both ms", "spread", "TFLOP/s", f"x {first}", "bound/time")
    rows: list[tuple[str, ...]] = [("", *columns, "host us", "kept MB", "peak MB", "error")]
    for name, arm in line["arms"].items():
        host = "-" if arm["host_us"] is None else "{:.0f}/{:.0f}".format(*arm["host_us"])
        kept, peak = (
            ("-", "-") if arm["bytes"] is None else (f"{b / 1e6:.0f}" for b in arm["bytes"])
        )
        rows.append(
            (
                name,
                f"{arm['forward_ms']:.3f}",
                f"{arm['backward_ms']:.3f}",
                f"{arm['both_ms']:.3f}",
                f"{arm['both_ms_least']:.3f}-{arm['both_ms_most']:.3f}",
                f"{arm['both_tflops']:.1f}",
                f"{arm[f'times_{first}']:.2f}",
                f"{arm['of_bound_forward']:.2f}/{arm['of_bound_backward']:.2f}",
                host,
                kept,
                peak,
                f"{max(arm['errors'].values()):.1e}",
            )
        )
    directions = line["bound"]["forward_ms"], line["bound"]["backward_ms"]
    rows.append((BOUND, *(f"{ms:.3f}" for ms in (*directions, sum(directions))), *[""] * 8))
    said = [title(line), *aligned(rows)]
    for name, arm in line["arms"].items():
        if arm["add_ms"]:
            said.append(f"{name}: of it {arm['add_ms']:.3f} ms to add into main_grad")
        if arm["calls_us"]:
            forward, backward = arm["calls_us"]
            said.append(
                f"{name}: of the host's time {forward:.0f}/{backward:.0f} us are the backend's own"
            )
    said += [f"{name} left out: {reason}" for name, reason in line["left_out"].items()]
    both_paths = [arm for name, arm in line["arms"].items() if name.startswith("megatron")]
    if len(both_paths) > 1:
        ahead = min(arm[f"times_{first}"] for arm in both_paths)
        said.append(f"the faster of Megatron's two takes {ahead:.2f} x {first}'s time")
    if line["gpu_meanwhile"]:
        said.append(
            "GPU meanwhile: {sm_mhz:.0f} MHz, {power_w:.0f} W, {temperature_c:.0f} C "
            "(medians)".format(**line["gpu_meanwhile"])
        )
    return "\n".join(said)


def trends(lines: list[dict[str, Any]]) -> list[str]:
    """P10 in words: how far each arm's time in a sweep is above its trend."""
    return [
        f"{sweep.name}, {sweep.load}, {TABLES[sweep.table][:3]} {arm}: {trend}"
        for sweep in sweeps(lines)
        for arm in sweep.lines[0]["arms"]
        if (trend := Trend.of(sweep, arm)) is not None
    ]


def loads_against_balanced(lines: list[dict[str, Any]]) -> list[str]:
    """P5 in words: an arm's rate under each load over its rate under balanced rows."""
    balanced = {_key(line): line["arms"] for line in lines if line["load"] == "balanced"}
    said = []
    for line in lines:
        arms = balanced.get(_key(line), {})
        parts = [
            f"{name} {arm['both_tflops'] / arms[name]['both_tflops']:.2f}"
            for name, arm in line["arms"].items()
            if name in arms and line["load"] != "balanced"
        ]
        if parts:
            said.append(
                f"{line['name']} T {line['asked_tokens']}, {TABLES[line['table']][:3]} "
                f"rate under {line['load']} / balanced: {', '.join(parts)}"
            )
    return said


def bound_ms(line: dict[str, Any]) -> float:
    return float(line["bound"]["forward_ms"] + line["bound"]["backward_ms"])


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["name"], line["table"], line["asked_tokens"]


LETTERS = {"tokens": "T", "experts": "E"}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Measurements that differ by T alone, or by the experts on the rank alone (the same rows),
    ascending, three or more. `axis`: a key of LETTERS."""

    axis: str
    name: str
    load: str
    table: str
    lines: list[dict[str, Any]]

    def place(self, line: dict[str, Any]) -> int:
        return int(line["shape"][self.axis])


def sweeps(lines: list[dict[str, Any]]) -> list[Sweep]:
    """Over T first, then over E."""
    found = []
    for axis in LETTERS:
        groups: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
        for line in sorted(lines, key=lambda line: line["shape"][axis]):
            shape, name = line["shape"], line["name"]
            if axis == "experts":  # the sizes, not the slice's own name
                name = f"{name.partition('/')[0]}, {shape['tokens'] * shape['top_k']} rows"
            group = groups.setdefault((name, line["load"], line["table"]), {})
            group[shape[axis]] = line
        found += [
            Sweep(axis=axis, name=name, load=load, table=which, lines=list(group.values()))
            for (name, load, which), group in groups.items()
            if len(group) >= 3
        ]
    return found


@dataclass(frozen=True, kw_only=True)
class Trend:
    """slope x bound + fixed, ms: a line through an arm's times in a sweep, fitted to relative
    errors. `excess`: the most that a time is above it, as a part of it, at `worst` of the axis."""

    axis: str
    slope: float
    fixed: float
    excess: float
    worst: int

    @staticmethod
    def of(sweep: Sweep, arm: str) -> Trend | None:
        """None with fewer than three times."""
        import numpy as np

        points = [
            (sweep.place(line), bound_ms(line), line["arms"][arm]["both_ms"])
            for line in sweep.lines
            if arm in line["arms"]
        ]
        if len(points) < 3:
            return None
        places, bound, time = np.array(points).T
        design = np.stack([bound / time, 1 / time], axis=1)
        (slope, fixed), *_ = np.linalg.lstsq(design, np.ones_like(time), rcond=None)
        excess = time / (slope * bound + fixed) - 1
        worst = int(excess.argmax())
        return Trend(
            axis=sweep.axis,
            slope=float(slope),
            fixed=float(fixed),
            excess=float(excess[worst]),
            worst=int(places[worst]),
        )

    def ms(self, bound: float) -> float:
        return self.slope * bound + self.fixed

    def __str__(self) -> str:
        return (
            f"{self.slope:.2f} x bound {'-' if self.fixed < 0 else '+'} {abs(self.fixed):.3f} ms; "
            f"at most {100 * self.excess:.0f} % above it, at {LETTERS[self.axis]} {self.worst}"
        )
