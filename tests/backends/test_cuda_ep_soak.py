"""Thousands of calls of virtual ranks behind one another, as a training makes them: the hot spot
moves from rank to rank, tokens are ragged, ranks come late by random amounts, evaluations lie
between. Nothing waits for the device on the way; what differs by a byte is counted there.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from mok_megatron.contract import WeightGradients
from tests.backends import cuda_cases as cases
from tests.backends import cuda_ranks as virtual
from tests.backends.cuda_cases import Problem

pytestmark = pytest.mark.gpu
CALLS = 2000  # a forward and its backward are two
RANKS = 4
TOKENS = 240  # of all ranks
KINDS = 16
LATE_CYCLES = 400_000  # 0.2 ms; a call takes about as long
CASE = replace(cases.CASE, seed=31, tokens=(TOKENS,))


@dataclass(frozen=True, kw_only=True, eq=False)
class Kind:
    """A batch: each rank's part, what y, dx and dprob of its tokens are on one rank, and places,
    with what a backward makes of them. They are overwritten, so a batch may come again."""

    parts: list[Problem]
    expected: list[list[Tensor]]  # of each rank
    into: list[WeightGradients]
    gradients: list[list[Tensor]]


def _hot(problem: Problem, rank: int, seed: int) -> Problem:
    """Nine tenths of the tokens choose experts of one rank alone."""
    other, local = problem.rerouted(seed), CASE.num_experts // RANKS
    top_k = min(CASE.top_k, local)
    hot_TK = torch.full_like(other.expert_TK, -1)
    hot_TK[:, :top_k] = torch.arange(top_k, device=hot_TK.device, dtype=torch.int32) + rank * local
    generator = torch.Generator(cases.DEVICE).manual_seed(seed)
    is_hot_T1 = torch.rand(TOKENS, 1, generator=generator, device=cases.DEVICE) < 0.9
    expert_TK = torch.where(is_hot_T1, hot_TK, other.expert_TK)
    return replace(other, expert_TK=expert_TK, prob_TK=other.prob_TK.masked_fill(expert_TK < 0, 0))


def _kind(problem: Problem, number: int) -> Kind:
    draw = random.Random(number)
    problem = _hot(problem, number % RANKS, number)
    cuts = sorted(draw.choice([0, TOKENS, *range(1, TOKENS, 7)]) for _ in range(RANKS - 1))
    tokens = [b - a for a, b in zip([0, *cuts], [*cuts, TOKENS], strict=True)]
    places = problem.places(torch.float32, accumulate=False)
    whole = cases.call(cases.cuda_backend(problem.shape), problem, places)
    parts, local = virtual.split(problem, tokens), CASE.num_experts // RANKS
    each = [t.split(tokens) for t in (whole.y_TH, whole.dx_TH, whole.dprob_TK)]
    gradients = [
        [*whole.dw[r * local : (r + 1) * local], *whole.dw[CASE.num_experts :][r * local :][:local]]
        for r in range(RANKS)
    ]
    return Kind(
        parts=parts,
        expected=[[t[rank].clone() for t in each] for rank in range(RANKS)],
        into=virtual.places(parts, places),
        gradients=gradients,
    )


def _late(draw: random.Random) -> None:
    if draw.random() < 0.3:
        torch.cuda._sleep(draw.randrange(LATE_CYCLES))


@pytest.mark.timeout(100)
def test_two_thousand_calls_with_hot_spots_that_move() -> None:
    problem, draw = Problem.of(CASE), random.Random(1)
    kinds = [_kind(problem, number) for number in range(KINDS)]
    group = virtual.Group.of(kinds[0].parts[0].shape, TOKENS, epoch=2**32 - 500)
    wrong = torch.zeros(RANKS, CALLS, dtype=torch.int32, device=cases.DEVICE)

    def judge(rank: int, call: int, found: list[Tensor], wanted: list[Tensor]) -> None:
        for a, b in zip(found, wanted, strict=True):
            wrong[rank, call] += (a.view(torch.int16) != b.view(torch.int16)).any()

    # A kernel that is launched for the first time may wait for those that run, and these wait for
    # ranks that are not called yet.
    torch.cuda._sleep(1)
    for kind in kinds:
        for rank in range(RANKS):
            judge(rank, 0, kind.expected[rank], kind.expected[rank])
            judge(rank, 0, kind.gradients[rank], kind.gradients[rank])
    torch.cuda.synchronize()
    call, held, began = 0, [], time.monotonic()
    while call < CALLS:
        kind = kinds[draw.randrange(KINDS)]
        evaluation = draw.random() < 0.1
        order = draw.sample(range(RANKS), RANKS)

        def run(rank: int, kind: Kind = kind, alone: bool = evaluation, call: int = call) -> None:
            p, backend = kind.parts[rank], group.backends[rank]
            y_TH, dx_TH, dprob_TK = kind.expected[rank]
            _late(draw)
            found, context = backend.forward(p.x_TH, p.expert_TK, p.prob_TK, p.weights)
            judge(rank, call, [found], [y_TH])
            if alone or call + 1 == CALLS:
                return
            _late(draw)
            into = kind.into[rank]
            g = backend.backward(context, p.dy_TH, p.weights, into)
            judge(rank, call + 1, [g.dx_TH, g.dprob_TK], [dx_TH, dprob_TK])
            judge(rank, call + 1, [*into.w1, *into.w2], kind.gradients[rank])

        group.each(run, order=order)
        call += 1 if evaluation else 2
        if call % 200 < 2:  # the host may not run away from the device; memory is flat
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_reserved())
    torch.cuda.synchronize()
    group.backends[0].check()
    bad = wrong.nonzero().tolist()
    assert bad == [], f"{len(bad)} of {CALLS} calls; the first (rank, call): {bad[:3]}"
    assert len(set(held[len(held) // 2 :])) == 1, held
    print(f"{CALLS} calls of {RANKS} ranks, {time.monotonic() - began:.0f} s")
