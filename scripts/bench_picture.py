"""A layer benchmark as a PNG that can be read without the text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bench_report import BOUND, TABLES, Sweep, Trend, bound_ms, sweeps

BOUND_LABEL = "bound (cuBLAS or bytes, pass by pass)"
PASSES_OF = {
    "forward": ("up", "down"),
    "backward": ("down_gradient", "up_gradient", "w1_gradient", "w2_gradient"),
}
PASSES = tuple(name for names in PASSES_OF.values() for name in names)
GRADIENTS = {"fresh": "fresh bf16 gradients", "main_grad": "fp32 main_grad"}
WORDS = {"tokens": "tokens T", "experts": "experts E on the rank"}


def plot(path: Path, lines: list[dict[str, Any]], curves: list[Sweep] | None = None) -> str | None:
    """A PNG of measurements: rates beside the bound's, and times over T or E where these vary.

    curves: the sweeps to draw, those among the lines if not given.
    Returns a line that says why not, if matplotlib is missing.
    """
    try:
        os.environ.setdefault("MPLBACKEND", "agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return "mok: the picture needs matplotlib, got none; pip install matplotlib"
    curves = sweeps(lines) if curves is None else curves
    swept = {id(line) for sweep in curves for line in sweep.lines}
    single = [line for line in lines if id(line) not in swept]
    panels = [
        (table, part)
        for table in TABLES
        for part in _rows([line for line in single if line["table"] == table])
    ]
    count = len(panels) + len(curves)
    widest = max([len(part) for _, part in panels] or [1])
    figure, axes = plt.subplots(
        count,
        1,
        figsize=(max(11, 3 + 2.4 * widest), 4.2 * count),
        layout="constrained",
        squeeze=False,
    )
    every = [*lines, *(line for sweep in curves for line in sweep.lines)]
    colors = _colors(every)
    for axis, (which, part) in zip(axes[:, 0], panels, strict=False):
        _bars(axis, part, colors)
        axis.set_title(f"One MoE layer, {TABLES[which]}; whiskers: all rounds", loc="left")
    for axis, sweep in zip(axes[len(panels) :, 0], curves, strict=True):
        _curves(axis, sweep, colors)
        axis.set_title(
            f"{sweep.name}, {sweep.load} load, forward + backward, {TABLES[sweep.table]}",
            loc="left",
        )
    _about(figure, every[-1])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return None


def waterfall(path: Path, lines: list[dict[str, Any]]) -> str | None:
    """A PNG of where the first arm's time goes: each direction of each measurement as a bar of its
    passes at the bound's rate, and of what lies above the bound.

    Returns a line that says why not, if matplotlib is missing.
    """
    try:
        os.environ.setdefault("MPLBACKEND", "agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return "mok: the picture needs matplotlib, got none; pip install matplotlib"
    bars = [(line, way) for line in lines if line["bound"].get("passes_ms") for way in PASSES_OF]
    if not bars:
        return "no picture of where time goes: these lines have no times of a bound's passes"
    names = dict.fromkeys(name for line, _ in bars for name in line["bound"]["passes_ms"])
    colors = {name: f"C{index}" for index, name in enumerate(PASSES)}
    figure, axis = plt.subplots(figsize=(11, 1.6 + 0.55 * len(bars)), layout="constrained")
    for place, (line, way) in enumerate(bars):
        left = 0.0
        whole = line["arms"][line["first"]][f"{way}_ms"]
        for name in names:
            plain = name.removeprefix("shared ")
            ms = line["bound"]["passes_ms"].get(name, 0.0)
            if plain in PASSES_OF[way] and ms:
                shared = name != plain
                axis.barh(
                    place, 100 * ms / whole, left=100 * left / whole, color=colors[plain],
                    hatch="//" if shared else None, edgecolor="white",
                    label=name.replace("_gradient", ", gradient"),
                )  # fmt: skip
                left += ms
        above = max(whole - left, 0.0)
        axis.barh(place, 100 * above / whole, left=100 * left / whole, color="lightgray",
                  edgecolor="white", label="above the bound")  # fmt: skip
        axis.text(
            100 * max(left, whole) / whole + 1,
            place,
            f"{whole:.2f} ms, bound {left:.2f} ms",
            va="center",
            fontsize=8,
        )
    axis.set_yticks(
        range(len(bars)),
        [f"{_told(line).replace(chr(10), ', ')}\n{way}, {GRADIENTS[line['table']]}"
         for line, way in bars], fontsize=8,
    )  # fmt: skip
    axis.invert_yaxis()
    axis.set_xlim(0, 1.4 * max(patch.get_x() + patch.get_width() for patch in axis.patches))
    axis.set(xlabel=f"% of the time of {lines[0]['first']}'s direction")
    axis.set_title(
        "Where a direction's time goes: each pass at its bound\n(cuBLAS or bytes), and the rest: "
        "routing, rows moved and\ncombined, waits, and what a pass needs above its bound",
        loc="left",
        fontsize=10,
    )  # fmt: skip
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    handles["above the bound"] = handles.pop("above the bound")  # at the end
    figure.legend(handles.values(), handles.keys(), fontsize=8, loc="outside right upper")
    _about(figure, lines[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return None


def _about(figure: Any, line: dict[str, Any]) -> None:
    versions = ", ".join(f"{k} {v}" for k, v in line["versions"].items())
    figure.supxlabel(f"{line['device']}; {versions}; commit {line['commit'][:12]}", fontsize=8)


def _rows(lines: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """In rows of one length, of five at most."""
    rows = -(-len(lines) // 5)
    size = -(-len(lines) // max(rows, 1))
    return [lines[row * size : (row + 1) * size] for row in range(rows)]


def _colors(lines: list[dict[str, Any]]) -> dict[str, str]:
    names = dict.fromkeys(name for line in lines for name in line["arms"])
    return {name: f"C{index}" for index, name in enumerate(names)}


def _bars(axis: Any, lines: list[dict[str, Any]], colors: dict[str, str]) -> None:
    """TFLOP/s of each arm, one group a measurement, the bound as a line over the group."""
    width = 0.8 / max(len(colors), 1)
    labelled: set[str] = set()
    for place, line in enumerate(lines):
        bound = bound_ms(line)
        of_bound = [arm["both_tflops"] * arm["both_ms"] / bound for arm in line["arms"].values()]
        if of_bound:
            label = None if BOUND in labelled else BOUND_LABEL
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
                f"{rate:.3g}",
                ha="center",
                va="bottom",
                fontsize=7,
                color="white",
            )
    axis.set_xticks(
        range(len(lines)),
        list(map(_told, lines)),
    )
    axis.set_ylabel("TFLOP/s, forward + backward")
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def _told(line: dict[str, Any]) -> str:
    shape = line["shape"]
    experts = f"{shape['experts']} experts{' + shared' * bool(shape['shared_ffn'])}"
    model = line["name"].partition("/")[0]
    return f"{model}\n{experts}\n{line['load']} load, {shape['tokens']} tokens"


def _curves(axis: Any, sweep: Sweep, colors: dict[str, str]) -> None:
    """Milliseconds of each arm and of the bound, both axes logarithmic."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    for name, color in colors.items():
        measured = [line for line in sweep.lines if name in line["arms"]]
        if measured:
            times = [line["arms"][name]["both_ms"] for line in measured]
            label = measured[0]["arms"][name]["label"]
            axis.plot(list(map(sweep.place, measured)), times, "o-", color=color, label=label)
    places = list(map(sweep.place, sweep.lines))
    axis.plot(places, list(map(bound_ms, sweep.lines)), "k--", label=BOUND_LABEL)
    first = next(iter(colors))
    trend = Trend.of(sweep, first)
    if trend is not None:
        times = [trend.ms(bound_ms(line)) for line in sweep.lines]
        axis.plot(places, times, ":", color="gray", label=f"trend of {first}: {trend}")
    axis.set(xscale="log", yscale="log", xlabel=WORDS[sweep.axis], ylabel="ms (lower is better)")
    axis.set_xticks(places, list(map(str, places)), minor=False)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
