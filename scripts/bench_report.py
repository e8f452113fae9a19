"""What a layer benchmark says: a table for people, a JSON line, and a picture.

A measurement is one shape under one load in one table; it is one JSON line, complete in itself:
shape, samples boiled down, who was left out and why, device, versions, commit and command. Ratios
are medians over the rounds of ratios inside a round. TFLOP/s count the layer's products and no
padding. In table b a backward includes the addition into main_grad, which is also shown apart where
it is not fused.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench_clock import Sample
from bench_problem import LayerShape
from bench_record import aligned

TABLES = {
    "fresh": "(a) fresh bf16 weight gradients",
    "main_grad": "(b) += fp32 main_grad",
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
    """P10 in words: how far each arm's time over T is above a line through bound and fixed cost.

    Fitted to relative errors, for each shape, load and table with three sizes or more.
    """
    import numpy as np

    said = []
    for (name, load, which), group in sweeps(lines).items():
        for arm in group[0]["arms"]:
            points = [
                (line["shape"]["tokens"], _bound_ms(line), line["arms"][arm]["both_ms"])
                for line in group
                if arm in line["arms"]
            ]
            if len(points) < 3:
                continue
            tokens, bound, time = np.array(points).T
            design = np.stack([bound / time, 1 / time], axis=1)
            (slope, fixed), *_ = np.linalg.lstsq(design, np.ones_like(time), rcond=None)
            excess = time / (slope * bound + fixed) - 1
            worst = int(excess.argmax())
            said.append(
                f"{name}, {load}, {TABLES[which][:3]} {arm}: {slope:.2f} x bound + {fixed:.3f} ms; "
                f"at most {100 * excess[worst]:.0f} % above it, at T {tokens[worst]:.0f}"
            )
    return said


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


def _bound_ms(line: dict[str, Any]) -> float:
    return float(line["bound"]["forward_ms"] + line["bound"]["backward_ms"])


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["name"], line["table"], line["asked_tokens"]


def sweeps(lines: list[dict[str, Any]]) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """Measurements that differ by T alone, ascending, where there are three or more."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: line["shape"]["tokens"]):
        groups.setdefault((line["name"], line["load"], line["table"]), []).append(line)
    return {key: group for key, group in groups.items() if len(group) >= 3}


def plot(path: Path, lines: list[dict[str, Any]]) -> str | None:
    """A PNG of a run's measurements: rates beside the bound's, and times over T where T varies.

    Returns a line that says why not, if matplotlib is missing.
    """
    try:
        os.environ.setdefault("MPLBACKEND", "agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return "mok: the picture needs matplotlib, got none; pip install matplotlib"
    curves = sweeps(lines)
    swept = {id(line) for group in curves.values() for line in group}
    single = [line for line in lines if id(line) not in swept]
    panels = [t for t in TABLES if any(line["table"] == t for line in single)]
    count = len(panels) + len(curves)
    widest = max([sum(line["table"] == t for line in single) for t in panels] or [1])
    figure, axes = plt.subplots(
        count,
        1,
        figsize=(max(9, 2 + 2.4 * widest), 4.2 * count),
        layout="constrained",
        squeeze=False,
    )
    colors = _colors(lines)
    for axis, which in zip(axes[:, 0], panels, strict=False):
        _bars(axis, [line for line in single if line["table"] == which], colors)
        axis.set_title(f"One MoE layer, forward + backward, {TABLES[which]}; whiskers: all rounds")
    for axis, ((name, load, which), group) in zip(
        axes[len(panels) :, 0], curves.items(), strict=True
    ):
        _curves(axis, group, colors)
        axis.set_title(f"{name}, {load} load, forward + backward, {TABLES[which]}")
    about = lines[0]
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items())
    figure.supxlabel(f"{about['device']}; {versions}; commit {about['commit'][:12]}", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return None


def _colors(lines: list[dict[str, Any]]) -> dict[str, str]:
    names = dict.fromkeys(name for line in lines for name in line["arms"])
    return {name: f"C{index}" for index, name in enumerate(names)}


def _bars(axis: Any, lines: list[dict[str, Any]], colors: dict[str, str]) -> None:
    """TFLOP/s of each arm, one group a measurement, the bound as a line over the group."""
    width = 0.8 / max(len(colors), 1)
    labelled: set[str] = set()
    for place, line in enumerate(lines):
        bound = _bound_ms(line)
        of_bound = [arm["both_tflops"] * arm["both_ms"] / bound for arm in line["arms"].values()]
        if of_bound:
            label = None if BOUND in labelled else "bound (cuBLAS or bytes, pass by pass)"
            axis.hlines(of_bound[0], place - 0.42, place + 0.42, "black", "dashed", label=label)
            labelled.add(BOUND)
        for index, name in enumerate(colors):
            if name not in line["arms"]:
                continue
            arm, left = line["arms"][name], place - 0.4 + (index + 0.5) * width
            rate, scale = arm["both_tflops"], arm["both_tflops"] * arm["both_ms"]
            spread = [
                [rate - scale / arm["both_ms_most"]],
                [scale / arm["both_ms_least"] - rate],
            ]
            label = None if name in labelled else arm["label"]
            labelled.add(name)
            axis.bar(left, rate, width * 0.95, color=colors[name], label=label, yerr=spread)
            axis.text(
                left,
                0.02 * rate,
                f"{rate:.0f}",
                ha="center",
                va="bottom",
                fontsize=7,
                color="white",
            )
    axis.set_xticks(
        range(len(lines)),
        [f"{line['name']}\nT {line['shape']['tokens']}, {line['load']}" for line in lines],
    )
    axis.set_ylabel("TFLOP/s (higher is better)")
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def _curves(axis: Any, group: list[dict[str, Any]], colors: dict[str, str]) -> None:
    """Milliseconds over T of each arm and of the bound, both axes logarithmic."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    for name, color in colors.items():
        points = [
            (line["shape"]["tokens"], line["arms"][name]) for line in group if name in line["arms"]
        ]
        if points:
            times = [arm["both_ms"] for _, arm in points]
            axis.plot([t for t, _ in points], times, "o-", color=color, label=points[0][1]["label"])
    bound = [_bound_ms(line) for line in group]
    tokens = [line["shape"]["tokens"] for line in group]
    axis.plot(tokens, bound, "k--", label="bound (cuBLAS or bytes, pass by pass)")
    axis.set(xscale="log", yscale="log", xlabel="tokens T", ylabel="ms (lower is better)")
    axis.set_xticks(tokens, [f"{t}" for t in tokens], minor=False)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
