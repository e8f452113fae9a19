"""One MoE layer beside its peers: the measurements that an invocation asks for, one after another.

A measurement is a shape, a load and a table. Its arms are made one after another on shared weights,
each does a step (in table b two, from zeros) and is compared with the float64 answer; only then are
those that were right timed, all in one interleaving. A wrong arm prints no speed. The command fails
when an arm was wrong or broke; an arm that cannot run here is named with its reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_arms import Absent, Arm, GraphReplay, GroupedMMArm, MokArm, ReferenceArm
from bench_clock import (
    Stopwatch,
    TimedArm,
    TimedBound,
    host_us,
    interleave,
    memory_bytes,
    watching_gpu,
)
from bench_oracle import LIMIT, Answer, errors, solve
from bench_peers import MegatronArm, MegatronCutlassArm, SonicArm
from bench_picture import plot, waterfall
from bench_problem import (
    LOADS,
    PRESETS,
    QUICK,
    BenchError,
    LayerShape,
    Problem,
    parse_shape,
    slice_of,
)
from bench_record import append, environment
from bench_report import BOUND, TABLES, loads_against_balanced, summarise, table, trends
from tqdm import tqdm
from train_log import read_lines

STOPPED = 3  # exit code
ARMS: dict[str, type[Arm]] = {
    arm.name: arm
    for arm in (MokArm, ReferenceArm, GroupedMMArm, MegatronArm, MegatronCutlassArm, SonicArm)
}
DEFAULT_ARMS = {
    "cuda": ("mok", "grouped_mm", "megatron", "megatron-cutlass", "sonic"),
    "cpu": ("reference", "grouped_mm"),
}
QUICK_ARMS = {"cuda": ("mok", "grouped_mm"), "cpu": ("reference", "grouped_mm")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `bench.py --layer`."""
    group = parser.add_argument_group("--layer")
    group.add_argument("--quick", action="store_true", help="four shapes, ours and torch, 90 s")
    group.add_argument(
        "--presets", type=_names, metavar="A,B", help=f"of {', '.join(PRESETS)}; or all"
    )
    group.add_argument("--shape", metavar="T,K,E,H,F,S", help="instead of a preset")
    group.add_argument("--tokens", metavar="T,T", help="instead of the shape's T")
    group.add_argument("--experts", metavar="E,E", help="instead of the shape's E")
    group.add_argument(
        "--ep-sizes",
        metavar="P,P",
        help="instead of the preset's slice, what a rank of so many holds: its part of the "
        "public model's experts, and as many rows",
    )
    group.add_argument("--loads", type=_names, metavar="A,B", help=f"of {', '.join(LOADS)}")
    group.add_argument("--tables", type=_names, metavar="A,B", help=f"of {', '.join(TABLES)}")
    group.add_argument("--arms", type=_names, metavar="A,B", help=f"of {', '.join(ARMS)}")
    group.add_argument("--no-graph", action="store_true", help="leave out CUDA graph replay")
    group.add_argument("--autotune-sonic", action="store_true", help="minutes for each shape")
    group.add_argument("--commit", help="of this tree, where git cannot tell")
    group.add_argument(
        "--resume", action="store_true", help="take what the output has of this commit and device"
    )
    group.add_argument(
        "--limit", type=float, metavar="SECONDS", help="start no measurement after so long"
    )
    group.add_argument("--device", choices=("cuda", "cpu"), default="cuda")


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(option: str, text: str) -> tuple[int, ...]:
    parts = _names(text)
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise BenchError(
            f"mok: {option} must be numbers above 0, got {text!r}; give them as 1024,4096"
        )
    return tuple(map(int, parts))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What an invocation measures, checked before anything runs."""

    shapes: tuple[tuple[str, LayerShape], ...]
    loads: tuple[str, ...]
    tables: tuple[str, ...]
    arms: tuple[str, ...]

    @staticmethod
    def of(options: argparse.Namespace) -> Plan:
        """Raises BenchError for what the options ask wrongly."""
        if options.shape and options.presets:
            raise BenchError(
                "mok: the shape must come from one place, got --shape and --presets; drop one"
            )
        presets = options.presets or QUICK
        chosen = dict.fromkeys(PRESETS if presets == ("all",) else presets)
        _check("a preset", chosen, PRESETS)
        shapes = {"shape": parse_shape(options.shape)} if options.shape else {
            name: PRESETS[name] for name in chosen
        }  # fmt: skip
        sizes, numbers, ranks = (
            _numbers(f"--{option.replace('_', '-')}", text)
            if (text := getattr(options, option))
            else ()
            for option in ("tokens", "experts", "ep_sizes")
        )
        if numbers and ranks:
            raise BenchError(
                "mok: E must come from one place, got --experts and --ep-sizes; drop one"
            )
        plan = Plan(
            shapes=tuple(
                (f"{name.partition('/')[0]}/{part.experts}" if numbers or ranks else name,
                 dataclasses.replace(part, tokens=part.tokens * tokens // shape.tokens))
                for name, shape in shapes.items()
                for part in (
                    [slice_of(name, shape, size) for size in ranks]
                    or [dataclasses.replace(shape, experts=e) for e in numbers]
                    or [shape]
                )
                for tokens in sizes or (shape.tokens,)
            ),
            loads=options.loads or ("random",),
            tables=options.tables or tuple(TABLES),
            arms=options.arms or (QUICK_ARMS if options.quick else DEFAULT_ARMS)[options.device],
        )  # fmt: skip
        _check("a load", plan.loads, LOADS)
        _check("a table", plan.tables, TABLES)
        _check("an arm", plan.arms, ARMS)
        if options.device == "cuda" and not torch.cuda.is_available():
            raise BenchError(
                "mok: the layer benchmark needs a CUDA device, got none; use a machine with one, "
                "or --device cpu with a small --shape, which proves results and no speed"
            )
        return plan


def _check(what: str, given: Any, known: Any) -> None:
    for name in given:
        if name not in known:
            raise BenchError(
                f"mok: {what} must be one of {', '.join(known)}, got {name!r}; choose one of them"
            )


def measure_layers(options: argparse.Namespace) -> int:
    """All measurements of an invocation; the exit code."""
    plan = Plan.of(options)
    SonicArm.autotune = options.autotune_sonic
    rounds = options.rounds or (3 if options.quick else 7)
    milliseconds = options.milliseconds or (40 if options.quick else 100)
    about = environment(options.device, options.commit)
    print(f"{about['device']}; {about['versions']}; commit {about['commit']}", flush=True)
    output = options.output or Path(__file__).resolve().parent / "results" / "layer.jsonl"
    started = time.monotonic()
    before = read_lines(output) if options.resume else []
    lines: list[dict[str, Any]] = []
    failed = False
    not_begun = 0
    for name, shape in plan.shapes:
        for load in plan.loads:
            for which in plan.tables:
                wanted = {
                    "name": name, "load": load, "table": which, "asked_tokens": shape.tokens,
                    "seed": options.seed, "rounds": rounds, "asked_arms": list(plan.arms),
                    "asked_milliseconds": milliseconds, "asked_graph": not options.no_graph,
                    "sonic_autotuned": options.autotune_sonic,
                    **{key: about[key] for key in ("commit", "device")},
                }  # fmt: skip
                old = [line for line in before if wanted.items() <= line.items()]
                if old and old[-1]["asked_shape"] == dataclasses.asdict(shape):
                    lines.append(old[-1])
                    continue
                if options.limit and time.monotonic() - started > options.limit:
                    not_begun += 1
                    continue
                measurement = Measurement(
                    shape=shape, load=load, which=which, arms=plan.arms, options=options
                )
                line = None
                with tqdm(total=1, desc=f"{name} {load} {which}", leave=False, disable=None) as bar:
                    try:
                        line = measurement.run(bar, rounds, milliseconds)
                    except RuntimeError as error:  # out of memory, a fault on the device
                        bar.write(f"{name} {load} {which} broke with {_said(error)}")
                        failed = True
                failed |= measurement.failed
                if line is None:
                    continue
                line = {**wanted, "asked_shape": dataclasses.asdict(shape), **line, **about}
                lines.append(line)
                append(output, line)
                print(f"\n{table(line)}", flush=True)
                if options.device == "cuda":
                    torch.cuda.empty_cache()
    for text in (*loads_against_balanced(lines), *trends(lines)):
        print(text)
    if lines:
        picture = output.with_suffix(".png")
        times = output.with_name(f"{output.stem}_time.png")
        problem = plot(picture, lines) or waterfall(times, lines)
        print(f"\n{problem or f'pictures: {picture}, {times}'}; lines: {output}", flush=True)
    if not_begun:
        print(f"{not_begun} measurements not begun after {options.limit:g} s; --resume does them")
        return STOPPED
    return int(failed or not lines)


def _said(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


class Measurement:
    """One shape under one load in one table. `failed`: an arm was wrong or broke."""

    def __init__(
        self, *, shape: LayerShape, load: str, which: str, arms: tuple[str, ...],
        options: argparse.Namespace,
    ) -> None:  # fmt: skip
        self.shape, self.load, self.which, self.arms, self.options = (
            shape,
            load,
            which,
            arms,
            options,
        )
        self.accumulate = which == "main_grad"
        self.failed = False
        self.left_out: dict[str, str] = {}

    def run(self, bar: Any, rounds: int, milliseconds: float) -> dict[str, Any] | None:
        """The line, without name and environment; None when no arm can be timed."""
        device, seed = self.options.device, self.options.seed
        bar.total = 2 + 2 * len(self.arms) + (len(self.arms) + 1) * rounds
        problem = Problem.of(self.shape, self.load, seed, device, accumulate=self.accumulate)
        bar.update()
        exact = solve(problem)
        bar.update()
        ready: dict[str, tuple[Arm, dict[str, float]]] = {}
        for name in self.arms:
            make = partial(ARMS[name], problem, accumulate=self.accumulate)
            made = self._attempt(name, make)
            self._admit(name, made, exact, ready)
            bar.update()
            if made is not None and name in ready and self._wants_graph(made):
                replay = self._attempt(f"{name} graph", partial(GraphReplay, made))
                self._admit(f"{name} graph", replay, exact, ready)
                bar.total += rounds
            bar.update()
        del exact
        if not ready:
            for name, reason in self.left_out.items():
                bar.write(f"{name} left out: {reason}")
            return None
        watch = Stopwatch(problem.device)
        costs = {name: self._costs(arm, watch) for name, (arm, _) in ready.items()}
        timed: dict[str, TimedArm | TimedBound] = {
            name: TimedArm(arm, watch) for name, (arm, _) in ready.items()
        }
        timed[BOUND] = TimedBound(problem, watch, accumulate=self.accumulate)
        with watching_gpu(problem.device) as gpu:
            samples = interleave(timed, rounds, milliseconds, seed, bar.update)
        first = next(iter(ready))
        bound, arms = summarise(problem.shape, samples, first)
        for name, (arm, found) in ready.items():
            arms[name] |= {"label": arm.label, "errors": found, **costs[name]}
        return {
            "load": self.load,
            "table": self.which,
            "shape": dataclasses.asdict(problem.shape),
            "rows_least": min(problem.rows_E),
            "rows_most": max(problem.rows_E),
            "seed": seed,
            "rounds": rounds,
            "first": first,
            "bound": bound,
            "arms": arms,
            "left_out": self.left_out,
            "gpu_meanwhile": gpu,
        }

    def _wants_graph(self, arm: Arm) -> bool:
        return self.options.device == "cuda" and arm.capturable and not self.options.no_graph

    def _attempt(self, name: str, make: Callable[[], Arm]) -> Arm | None:
        """An arm, or None with its reason noted."""
        try:
            return make()
        except Absent as reason:
            self.left_out[name] = str(reason)
        except Exception as error:  # a peer may break in any way, and the others go on
            self._broke(name, error)
        return None

    def _admit(
        self,
        name: str,
        arm: Arm | None,
        exact: Answer,
        ready: dict[str, tuple[Arm, dict[str, float]]],
    ) -> None:
        """Into `ready`, if the arm's results are right."""
        if arm is None:
            return
        try:
            found = self._errors(arm, exact)
        except Exception as error:
            self._broke(name, error)
            return
        worst = max(found, key=lambda tensor: found[tensor])
        if found[worst] <= LIMIT:
            ready[name] = (arm, found)
        else:
            self.failed = True
            self.left_out[name] = (
                f"wrong: error of {worst} is {found[worst]:.1e}, above {LIMIT:.0e}"
            )

    def _errors(self, arm: Arm, exact: Answer) -> dict[str, float]:
        """Of one step, or of two steps whose weight gradients are added up from zero."""
        for place in arm.problem.main:
            place.zero_()
        if self.accumulate:
            arm.step()
        found = errors(arm.answer(arm.step()), exact, times=2 if self.accumulate else 1)
        arm.gradients = ()
        return found

    def _broke(self, name: str, error: Exception) -> None:
        self.failed = True
        self.left_out[name] = f"broke with {_said(error)}"

    def _costs(self, arm: Arm, watch: Stopwatch) -> dict[str, Any]:
        replay = isinstance(arm, GraphReplay)  # holds its memory from the capture on
        arm.gradients = ()
        costs: dict[str, Any] = {
            "host_us": host_us(arm.forward, arm.backward, watch),
            "bytes": None if replay else memory_bytes(arm, watch),
            "calls_us": host_us(*arm.calls(), watch) if isinstance(arm, MokArm) else None,
        }
        arm.gradients = ()
        return costs
