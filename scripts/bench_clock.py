"""Times of arms and of a bound, interleaved, and what else a call costs: host time and memory.

A round visits every arm and the bound once, in a new order each round; a visit is one warm-up step
and then `repeats` steps, and its sample is their median. The chip is power-limited and a rate moves
by several percent with what ran before, so ratios are taken inside a round and their median over
the rounds is what counts. On a GPU a step starts with a cleared L2 cache and its parts lie between
CUDA events, so that a launch-bound arm shows its launches; on a CPU the clock is the wall's.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from bench_arms import Arm
from bench_problem import Pass, Problem, bound_ms, passes
from torch import Tensor

_FLUSH_BYTES = 256 << 20
MOST_REPEATS = 50


class Stopwatch:
    """Milliseconds between marks, on the device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._flushed = torch.empty(
            _FLUSH_BYTES if self.on_gpu else 0, dtype=torch.int8, device=device
        )

    def laps(self, parts: list[Callable[[], Any]], repeats: int) -> list[list[float]]:
        """For each of `repeats` runs through the parts, the time of each part."""
        runs: list[list[Any]] = []
        for _ in range(repeats):
            self._flushed.zero_()
            marks = [self._mark()]
            for part in parts:
                part()
                marks.append(self._mark())
            runs.append(marks)
        self.wait()
        return [[self._between(a, b) for a, b in itertools.pairwise(m)] for m in runs]

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) if self.on_gpu else 1e3 * (end - start))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Milliseconds of one visit. `add` is the addition into main_grad that is not fused; `passes`
    what a bound is made of, by the pass's name."""

    forward: float
    backward: float
    add: float = 0.0
    passes: dict[str, float] = field(default_factory=dict)

    @property
    def both(self) -> float:
        return self.forward + self.backward + self.add


class TimedArm:
    """Visits of an arm."""

    def __init__(self, arm: Arm, watch: Stopwatch) -> None:
        self.arm, self.watch = arm, watch

    def visit(self, repeats: int) -> Sample:
        y: list[Tensor] = []

        def forward() -> None:
            y[:] = [self.arm.forward()]

        def backward() -> None:
            self.arm.backward(y.pop())

        parts: list[Callable[[], Any]] = [forward, backward]
        if self.arm.accumulate and not self.arm.fused:
            parts.append(self.arm.add)
        self.arm.step()
        self.arm.gradients = ()
        laps = self.watch.laps(parts, repeats)
        self.arm.gradients = ()
        return Sample(**dict(zip(("forward", "backward", "add"), _medians(laps), strict=False)))


class TimedBound:
    """Visits of P4's bound: a cuBLAS product for each pass, and the in-place add over main_grad."""

    def __init__(self, problem: Problem, watch: Stopwatch, *, accumulate: bool) -> None:
        self.watch = watch
        self.passes = passes(problem.shape, problem.rows_E, accumulate=accumulate)
        self.products = [_product(p, problem.device) for p in self.passes]
        # Without main_grad the same add runs over as much memory of its own.
        self.filled = problem.main or tuple(
            torch.zeros_like(w, dtype=torch.float32) for w in problem.weights[:2]
        )

    def visit(self, repeats: int) -> Sample:
        for part in (*self.products, self._add):
            part()
        (add_ms,) = _medians(self.watch.laps([self._add], repeats))
        moved = sum(2 * values.numel() * values.element_size() for values in self.filled)
        directions = {"forward": 0.0, "backward": 0.0}
        by_pass: dict[str, float] = {}
        for pass_, product in zip(self.passes, self.products, strict=True):
            (product_ms,) = _medians(self.watch.laps([product], repeats))
            by_pass[pass_.name] = bound_ms(pass_, product_ms, moved / add_ms)
            directions[pass_.direction] += by_pass[pass_.name]
        return Sample(**directions, passes=by_pass)

    def _add(self) -> None:
        for values in self.filled:
            values.add_(1.0)


def _product(pass_: Pass, device: torch.device) -> Callable[[], Tensor]:
    """One dense product of the pass's sizes and layout, on random data."""

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, dtype=torch.bfloat16, device=device)

    a = normal(pass_.k, pass_.m).t() if pass_.layout[0] == "T" else normal(pass_.m, pass_.k)
    b = normal(pass_.n, pass_.k).t() if pass_.layout[1] == "T" else normal(pass_.k, pass_.n)
    return lambda: a @ b


def _medians(laps: list[list[float]]) -> list[float]:
    return [statistics.median(part) for part in zip(*laps, strict=True)]


def interleave(
    timed: dict[str, TimedArm | TimedBound],
    rounds: int,
    milliseconds: float,
    seed: int,
    visited: Callable[[], Any],
) -> dict[str, list[Sample]]:
    """Samples of each, one a round, of visits of about `milliseconds`; tells `visited` of each."""
    order = random.Random(seed)
    repeats: dict[str, int] = {}
    for name, each in timed.items():
        expected = each.visit(2).both
        repeats[name] = min(max(3, round(milliseconds / max(expected, 1e-3))), MOST_REPEATS)
    samples: dict[str, list[Sample]] = {name: [] for name in timed}
    gc.collect()
    gc.disable()  # a collection inside a visit would be somebody's time
    try:
        for _ in range(rounds):
            for name in order.sample(list(timed), len(timed)):
                samples[name].append(timed[name].visit(repeats[name]))
                visited()
    finally:
        gc.enable()
    return samples


def host_us[T](
    forward: Callable[[], T], backward: Callable[[T], object], watch: Stopwatch, repeats: int = 15
) -> tuple[float, float] | None:
    """Microseconds that the host spends in each, from an idle GPU on; None on a CPU."""
    if not watch.on_gpu:
        return None
    times = []
    for _ in range(repeats + 2):
        watch.wait()
        start = time.perf_counter()
        between_them = forward()
        middle = time.perf_counter()
        backward(between_them)
        times.append((middle - start, time.perf_counter() - middle))
        del between_them
    watch.wait()
    of_forward, of_backward = (statistics.median(part) for part in zip(*times[2:], strict=True))
    return 1e6 * of_forward, 1e6 * of_backward


def memory_bytes(arm: Arm, watch: Stopwatch) -> tuple[int, int] | None:
    """What a forward keeps for its backward, without y; and the peak of both, above what was there.

    Weights, inputs and main_grad were there; fresh gradients of weights count for the peak.
    """
    if not watch.on_gpu:
        return None
    arm.gradients = ()
    watch.wait()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y_TH = arm.forward()
    kept = torch.cuda.memory_allocated() - before - y_TH.numel() * y_TH.element_size()
    arm.backward(y_TH)
    watch.wait()
    peak = torch.cuda.max_memory_allocated() - before
    arm.gradients = ()
    return kept, peak


@contextmanager
def watching_gpu(device: torch.device) -> Iterator[dict[str, float]]:
    """Fills the dict, when it ends, with medians of clocks, power and temperature meanwhile."""
    found: dict[str, float] = {}
    fields = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "power_w": "power.draw",
              "temperature_c": "temperature.gpu"}  # fmt: skip
    ask = ["nvidia-smi", f"--query-gpu={','.join(fields.values())}", "-lms", "100"]
    ask += ["--format=csv,noheader,nounits", "-i", _gpu_name_for_smi(device)]
    process = None
    if device.type == "cuda":
        with suppress(OSError):  # no nvidia-smi: the record then has no clocks
            process = subprocess.Popen(
                ask, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
    try:
        yield found
    finally:
        if process is not None:
            process.terminate()
            found.update(read_smi(process.communicate()[0], list(fields)))


def _gpu_name_for_smi(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def read_smi(text: str, names: list[str]) -> dict[str, float]:
    """Medians of the columns of nvidia-smi's numbers; a line that is cut off or has none is left
    out."""
    rows = []
    for line in text.splitlines():
        cells = line.split(",")
        try:
            rows.append([float(cell) for cell in cells])
        except ValueError:
            continue
    rows = [row for row in rows if len(row) == len(names)]
    if not rows:
        return {}
    return dict(zip(names, (statistics.median(c) for c in zip(*rows, strict=True)), strict=True))
