"""Each grouped product beside a dense cuBLAS product of the same M, N, K, on one GPU.

Arms run interleaved in one process, in a new order each round, on random Gaussian data; a ratio is
the median over the rounds of (time of the reference arm / time of the arm) inside one round,
because the chip is power-limited and a rate moves by several percent with what ran before. Padding
is never counted as work. Every arm of ours is compared with a float64 product before it is timed;
a wrong one prints no speed. One JSON line a measurement goes to --output.

Arms: cublas (one weight for all rows), grouped_mm (torch, rows packed without padding), add (weight
gradients that accumulate: an in-place add over the same gradients, which moves the bytes that
accumulation cannot avoid), and ours, one for each tiling class asked for. Passes: up_plain, up
(SwiGLU), down, down_grad (dSwiGLU), down_grad_plain, up_grad, and the weight gradients w1 and w2
with +32 (add into fp32), +16 (add into bf16), =32 and =16 (fresh).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
from bench_problem import BenchError
from tqdm import tqdm

from mok_megatron.backends import library

BF16 = torch.bfloat16
TOLERANCE = 4e-3
Arm = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Shape:
    rows: int
    experts: int
    hidden: int
    width: int


SHAPES = {
    "dsv3_32": Shape(32768, 32, 7168, 2048),
    "dsv3_32_16k": Shape(16384, 32, 7168, 2048),
    "dsv3_8": Shape(32768, 8, 7168, 2048),
    "qwen235_16": Shape(32768, 16, 4096, 1536),
    "qwen235_16_16k": Shape(16384, 16, 4096, 1536),
    "qwen30_16": Shape(65536, 16, 2048, 768),
    "qwen30_128": Shape(65536, 128, 2048, 768),
    "gpt_oss_16": Shape(32768, 16, 2880, 2880),
}
PRODUCTS = ("up_plain", "up", "down", "down_grad", "down_grad_plain", "up_grad")
WEIGHT_GRADIENTS = {"+32": (torch.float32, True), "+16": (BF16, True)}
WEIGHT_GRADIENTS |= {"=32": (torch.float32, False), "=16": (BF16, False)}
PASSES = (*PRODUCTS, *(w + mode for w in ("w1", "w2") for mode in WEIGHT_GRADIENTS))


def counts_of(routing: str, rows: int, experts: int) -> list[int]:
    if routing == "balanced":
        return [rows // experts] * experts
    weight = torch.ones(experts)
    if routing == "zipf":
        weight = 1.0 / torch.arange(1, experts + 1)
        weight = weight[torch.randperm(experts)]
    chosen = torch.multinomial(weight, rows, replacement=True)
    return torch.bincount(chosen, minlength=experts).tolist()


class Problem:
    """Tensors of one pass: `arms` to time, and `verify` for ours."""

    def __init__(self, name: str, shape: Shape, counts: list[int], tilings: list[int]) -> None:
        self.name, self.shape, self.counts = name, shape, counts
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + -(-count // library.ROW_TILE) * library.ROW_TILE)
        self.starts, self.padded = starts, starts[-1]
        ints = [torch.tensor(v, dtype=torch.int32, device="cuda") for v in (starts, counts)]
        self.split = library.Split.of(*ints)
        self.offsets = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
        self.rows = sum(counts)
        self.arms: dict[str, Arm] = {}
        self.reset: Callable[[], object] = lambda: None
        self.checks: dict[str, Callable[[], list[tuple[torch.Tensor, torch.Tensor]]]] = {}
        h, f = shape.hidden, shape.width
        if name in PRODUCTS:
            forward = name in ("up_plain", "up", "down")
            self.n, self.k = {
                "up_plain": (2 * f, h),
                "up": (2 * f, h),
                "down": (h, f),
                "down_grad": (f, h),
                "down_grad_plain": (f, h),
                "up_grad": (h, 2 * f),
            }[name]
            self._products(forward, tilings)
        else:
            self.n, self.k = (2 * f, h) if name.startswith("w1") else (h, f)
            self._weight_gradients(*WEIGHT_GRADIENTS[name[2:]], tilings)
        self.flop = 2 * self.rows * self.n * self.k

    def _products(self, forward: bool, tilings: list[int]) -> None:
        n, k, experts, name = self.n, self.k, self.shape.experts, self.name
        a = torch.randn(self.padded, k, dtype=BF16, device="cuda")
        dense = torch.randn(self.rows, k, dtype=BF16, device="cuda")
        w = (
            torch.randn(experts, *((n, k) if forward else (k, n)), dtype=BF16, device="cuda")
            / k**0.5
        )
        weight = w[0].t() if forward else w[0]
        self.arms["cublas"] = lambda: dense @ weight
        w_kn = w.transpose(1, 2) if forward else w
        self.arms["grouped_mm"] = lambda: torch.nn.functional.grouped_mm(
            dense, w_kn, offs=self.offsets
        )
        split, roles = self.split, {"up": "up", "down_grad": "down_gradient"}
        role = roles.get(name, "product" if forward else "input_gradient")
        empty = lambda *s, dtype=BF16: torch.empty(self.padded, *s, dtype=dtype, device="cuda")  # noqa: E731
        prob = torch.rand(self.padded, device="cuda")

        def product_of(e: int, rows: slice) -> torch.Tensor:
            exact: torch.Tensor = a[rows].double() @ (
                w[e].double().t() if forward else w[e].double()
            )
            return exact

        def products(out: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
            return [(out[r], product_of(e, r)) for e, r in self.samples()]

        for tiling in tilings:
            arm = f"ours{tiling}"
            try:
                maps = library.Matrices.of(list(w), role, tiling=tiling)
            except RuntimeError as error:  # a class that this pass does not have
                if "tilings" not in str(error):
                    raise
                continue
            if name == "up":
                out, activation = empty(n), empty(n // 2)
                run = lambda t=tiling, maps=maps, o=out, c=activation: library.up(  # noqa: E731
                    a, maps, prob, split, o, c, tiling=t
                )
                self.checks[arm] = partial(products, out)
            elif name == "down_grad":
                gate_up = torch.randn(self.padded, 2 * n, dtype=BF16, device="cuda")
                parts = empty(n // library.PART_COLUMNS, dtype=torch.float32)
                into = library.DownGradient(
                    d_gate_up_RF=empty(2 * n),
                    activation_RF=empty(n),
                    prob_parts=parts,
                    d_prob_R=empty(dtype=torch.float32),
                )
                run = lambda t=tiling, maps=maps, g=gate_up, i=into: library.down_gradient(  # noqa: E731
                    a, maps, prob, g, split, i, tiling=t
                )

                def check(
                    g: torch.Tensor = gate_up, i: library.DownGradient = into
                ) -> list[tuple[torch.Tensor, torch.Tensor]]:
                    pairs = []
                    for e, r in self.samples():
                        gate = g[r, :n].double()
                        du = product_of(e, r) * prob[r, None].double() * gate * gate.sigmoid()
                        pairs.append((i.d_gate_up_RF[r, n:], du))
                    return pairs

                self.checks[arm] = check
            else:
                op, out = (library.product if forward else library.input_gradient), empty(n)
                run = lambda t=tiling, maps=maps, o=out, op=op: op(a, maps, split, o, tiling=t)  # noqa: E731
                self.checks[arm] = partial(products, out)
            self.arms[arm] = run

    def _weight_gradients(self, dtype: torch.dtype, accumulate: bool, tilings: list[int]) -> None:
        m, n, experts = self.n, self.k, self.shape.experts
        a, b = (torch.randn(self.padded, c, dtype=BF16, device="cuda") for c in (m, n))
        a_dense, b_dense = (torch.randn(self.rows, c, dtype=BF16, device="cuda") for c in (m, n))
        a_t = a_dense.t()
        self.arms["cublas"] = lambda: a_t @ b_dense
        self.arms["grouped_mm"] = lambda: torch.nn.functional.grouped_mm(
            a_t, b_dense, offs=self.offsets
        )
        gradients = torch.zeros(experts, m, n, dtype=dtype, device="cuda")
        if accumulate:
            self.arms["add"] = lambda: gradients.add_(1.0)
        split = self.split
        for tiling in tilings:
            try:
                maps = library.Matrices.of(list(gradients), "gradient", tiling=tiling)
            except RuntimeError as error:  # a class that this pass does not have
                if "tilings" not in str(error):
                    raise
                continue
            run = lambda t=tiling, maps=maps: library.weight_gradient(  # noqa: E731
                a, b, maps, split, accumulate=accumulate, tiling=t
            )
            self.arms[f"ours{tiling}"] = run
            self.checks[f"ours{tiling}"] = lambda: [
                (gradients[e], a[r].double().t() @ b[r].double()) for e, r in self.samples()
            ]
        self.reset = gradients.zero_

    def samples(self) -> list[tuple[int, slice]]:
        largest = max(range(len(self.counts)), key=lambda e: self.counts[e])
        experts = {largest, len(self.counts) - 1, random.randrange(len(self.counts))}
        return [
            (e, slice(self.starts[e], self.starts[e] + self.counts[e]))
            for e in experts
            if self.counts[e]
        ]

    def verify(self, arm: str) -> float:
        """Largest error of a few experts against float64."""
        self.reset()
        self.arms[arm]()
        worst = 0.0
        for value, exact in self.checks[arm]():
            found = float((value.double() - exact).norm() / exact.norm())
            worst = max(worst, found if found == found else float("inf"))
        return worst


def measure(problem: Problem, rounds: int, milliseconds: float) -> dict[str, dict[str, float]]:
    from triton.testing import do_bench  # type: ignore[import-untyped]

    errors = {}
    for arm in problem.checks:
        errors[arm] = problem.verify(arm)
        if not errors[arm] <= TOLERANCE:
            say(f"  {problem.name} {arm}: error {errors[arm]:.2e}, not timed")
            del problem.arms[arm]
    times: dict[str, list[float]] = {arm: [] for arm in problem.arms}
    for _ in range(rounds):
        for arm in random.sample(list(problem.arms), len(problem.arms)):
            times[arm].append(
                do_bench(problem.arms[arm], warmup=3, rep=milliseconds, return_mode="median")
            )
    results = {}
    for arm, ms in times.items():
        bound = [
            max(pair)
            for pair in zip(times["cublas"], times.get("add", times["cublas"]), strict=True)
        ]
        results[arm] = {
            "ms": statistics.median(ms),
            "ms_min": min(ms),
            "ms_max": max(ms),
            "tflops": problem.flop / statistics.median(ms) / 1e9,
            "of_cublas": statistics.median(c / t for c, t in zip(times["cublas"], ms, strict=True)),
            "of_bound": statistics.median(b / t for b, t in zip(bound, ms, strict=True)),
        }
        if arm in errors:
            results[arm]["error"] = errors[arm]
    return results


def environment() -> dict[str, str]:
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
    ask = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    seen = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    git = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": " ".join(["python", *sys.argv]),
        "gpu": seen,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "commit": commit or "unknown",
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `bench.py --passes`."""
    group = parser.add_argument_group("--passes")
    group.add_argument("--shapes", default="dsv3_32,dsv3_8,qwen235_16,qwen30_16,qwen30_128")
    group.add_argument("--only", default="up_plain,up,down,down_grad,up_grad,w1+32,w2+32")
    group.add_argument("--routing", default="balanced", help="balanced, multinomial, zipf")
    group.add_argument("--tilings", default="0", help="0: the table's choice")


def _check(options: argparse.Namespace) -> None:
    """Raises BenchError for a name that is not known, and where nothing can run."""
    known = {"shapes": SHAPES, "only": PASSES, "routing": ("balanced", "multinomial", "zipf")}
    for option, names in known.items():
        for name in getattr(options, option).split(","):
            if name not in names:
                raise BenchError(
                    f"mok: --{option} must be of {', '.join(names)}, got {name!r}; choose of them"
                )
    if not all(tiling.isdecimal() for tiling in options.tilings.split(",")):
        raise BenchError(
            f"mok: --tilings must be numbers, got {options.tilings!r}; 0 is the table's choice"
        )
    if not torch.cuda.is_available():
        raise BenchError("mok: --passes needs a CUDA device, got none; use a machine with one")
    try:
        library.load()
    except library.LibraryMissing as error:
        raise BenchError(str(error)) from error


def measure_passes(options: argparse.Namespace) -> int:
    """Every pass of every shape and routing asked for; the exit code."""
    _check(options)
    about = environment()
    print(about["gpu"], "torch", about["torch"], flush=True)
    names, routings = options.only.split(","), options.routing.split(",")
    cells = [(shape, routing) for shape in options.shapes.split(",") for routing in routings]
    with tqdm(total=len(cells) * len(names), unit="pass", disable=None) as bar:
        for shape_name, routing in cells:
            shape = SHAPES[shape_name]
            torch.manual_seed(options.seed)
            random.seed(options.seed)
            counts = counts_of(routing, shape.rows, shape.experts)
            say(f"{shape_name} {routing}: {shape}, largest {max(counts)}")
            for name in names:
                bar.set_description(f"{shape_name} {routing} {name}")
                results = _measure_pass(options, name, shape, counts)
                bar.update()
                if results is not None and options.output:
                    line = {"shape": shape_name, **dataclasses.asdict(shape), "routing": routing}
                    line |= {"pass": name, "results": results, "largest": max(counts), **about}
                    with open(options.output, "a") as file:
                        file.write(json.dumps(line) + "\n")
    return 0


def _measure_pass(
    options: argparse.Namespace, name: str, shape: Shape, counts: list[int]
) -> dict[str, dict[str, float]] | None:
    """The results by arm, which are printed too; None where memory does not suffice."""
    problem = Problem(name, shape, counts, [int(t) for t in options.tilings.split(",")])
    try:
        results = measure(problem, options.rounds or 5, options.milliseconds or 20)
    except torch.cuda.OutOfMemoryError as error:
        say(f"  {name}: {str(error).splitlines()[0]}")
        return None
    finally:
        del problem
        torch.cuda.empty_cache()
    cells = [
        f"{arm} {r['tflops']:.0f} ({r['of_cublas']:.3f}"
        + (f", bound {r['of_bound']:.3f})" if "add" in results else ")")
        for arm, r in results.items()
        if arm != "add"
    ]
    say(f"  {name:16s} {'  '.join(cells)}")
    return results


def say(line: str) -> None:
    """A line above the bar."""
    with tqdm.external_write_mode():
        print(line, flush=True)
