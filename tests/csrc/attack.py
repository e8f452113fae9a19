"""Every grouped product, and whole layers by one rank and by virtual ones, on small random cases:
for sanitizers (scripts/sanitize.py), and for delays.

    python -m tests.csrc.attack [--library FILE] [--cases N] [--layers M] [--groups G] [--seed S]

A library built with -DMOK_RANDOM_DELAYS sleeps at random before arrivals and after waits: whatever
order of the roles the protocol allows will happen, and a wrong parity shows as a wrong result or an
expired deadline. Exits with an AssertionError or a launch error on the first wrong case.
"""

from __future__ import annotations

import argparse
import pathlib
import random
from dataclasses import replace

import torch

from mok_megatron.backends import library
from tests.backends import cuda_cases, test_cuda_ep_random
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


def group(seed: int) -> test_cuda_ep_random.Call:
    """A small call of 2 or 4 virtual ranks, in turns."""
    call, ranks = test_cuda_ep_random.drawn(seed), (2, 4)[seed % 2]
    tokens = (call.case.tokens * 2)[:ranks]
    local = min(call.local, 3)
    case = replace(
        call.case,
        hidden=min(call.case.hidden, 192),
        ffn=min(call.case.ffn, 128),
        num_experts=ranks * local,
        top_k=min(call.case.top_k, ranks * local, 3),
        tokens=tokens if any(tokens) else (7,) * ranks,
    )
    return replace(call, case=case, local=local, ctas=min(call.ctas, 3))


def run_group(seed: int) -> None:
    """The bytes of one rank with the same tokens."""
    assert (broken := test_cuda_ep_random.broken(group(seed), by_the_rule=False)) == [], broken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=pathlib.Path, default=library.LIBRARY)
    parser.add_argument("--cases", type=int, default=1)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--groups", type=int, default=0)
    parser.add_argument("--largest", type=int, default=1000, help="rows of an expert")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    library.load(options.library)
    draw = random.Random(options.seed)
    torch.manual_seed(options.seed)
    for case in range(options.cases):
        run_case(draw, options.largest)
        print(f"passed case {case}")
    for what, run, count in (
        ("layer", run_layer, options.layers),
        ("group", run_group, options.groups),
    ):
        for seed in range(options.seed, options.seed + count):
            run(seed)
            torch.cuda.synchronize()
            print(f"passed {what} {seed}")
    torch.cuda.synchronize()
    print(f"{options.cases} cases and {options.layers} layers passed", flush=True)


if __name__ == "__main__":
    main()
