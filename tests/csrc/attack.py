"""Every grouped product, and whole layers, on small random cases: for sanitizers, and for delays.

    python -m tests.csrc.attack [--library FILE] [--cases N] [--layers M] [--seed S]

A library built with -DMOK_RANDOM_DELAYS sleeps at random before arrivals and after waits: whatever
order of the roles the protocol allows will happen, and a wrong parity shows as a wrong result or an
expired deadline. Exits with an AssertionError or a launch error on the first wrong case.
"""

from __future__ import annotations

import argparse
import pathlib
import random

import torch

from mok_megatron.backends import library
from tests.backends import cuda_cases
from tests.backends.cuda_loads import LOADS
from tests.batches import Case
from tests.csrc import grouped


def run_case(draw: random.Random, largest: int) -> None:
    small = [count for count in grouped.COUNTS if count <= largest]
    counts = [draw.choice(small) for _ in range(draw.randrange(1, 6))]
    layout = grouped.Layout.of(counts)
    h, f = (64 * draw.randrange(1, 8) for _ in range(2))
    how = {"ctas": draw.choice((1, 2, 3, 0))}
    for tiling in (1, 2):
        grouped.check_product(layout, h, f, tiling=tiling, **how)
        grouped.check_product(layout, h, f, gradient=True, tiling=tiling, **how)
        grouped.check_up(layout, h, f, tiling=tiling, **how)
        grouped.check_down_gradient(layout, h, f, tiling=tiling, **how)
    for dtype in (torch.float32, torch.bfloat16):
        for accumulate in (True, False):
            grouped.check_weight_gradient(layout, h, f, dtype=dtype, accumulate=accumulate, **how)


def run_layer(seed: int) -> None:
    """A tiny layer, forward and backward, by the rule of accuracy; the loads take turns."""
    draw = random.Random(seed)
    experts = draw.choice((1, 2, 4, 5))
    case = Case(
        seed=seed,
        hidden=64 * draw.randint(1, 4),
        ffn=64 * draw.randint(1, 3),
        shared_ffn=64 * draw.choice((0, 0, 1, 3)),
        num_experts=experts,
        top_k=draw.randint(1, min(experts, 3)),
        tokens=(draw.choice((1, 7, 63, 64, 65, 127, 128, 129, 200)),),
        load=LOADS[seed % len(LOADS)],
        dtype=torch.bfloat16,
    )
    problem = cuda_cases.Problem.of(case)
    backend = cuda_cases.cuda_backend(problem.shape)
    backend.ctas, backend.ahead = draw.choice(((1, 1), (2, 1), (3, 2), (0, 0)))
    dtype = draw.choice((torch.float32, torch.bfloat16))
    accumulate = draw.random() < 0.5
    _, broken = cuda_cases.compare(
        problem, dtype, accumulate=accumulate, backend=backend, poisoned=False
    )
    assert broken == [], broken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=pathlib.Path, default=library.LIBRARY)
    parser.add_argument("--cases", type=int, default=1)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--largest", type=int, default=1000, help="rows of an expert")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    library.load(options.library)
    draw = random.Random(options.seed)
    torch.manual_seed(options.seed)
    for _ in range(options.cases):
        run_case(draw, options.largest)
    for layer in range(options.layers):
        run_layer(options.seed + layer)
    torch.cuda.synchronize()
    print(f"{options.cases} cases and {options.layers} layers passed", flush=True)


if __name__ == "__main__":
    main()
