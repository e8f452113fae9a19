"""1,000 calls of a layer on two ranks: moving hot spots, ragged ranks, evaluation between.

Nothing hangs (the deadline), memory stays flat, and the last call has the first one's bytes.
"""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass, replace

import psutil
import pytest
import torch
import torch.distributed as dist

from mok_megatron.backends.reference import ReferenceBackend
from mok_megatron.function import fused_moe
from tests.batches import LOADS, Batch, Case
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

CALLS, EVALUATE_EVERY, LOOK_EVERY = 1000, 50, 125
MOST_GROWTH = 4 << 20  # bytes over the last 750 calls: 5.6 KB a call would be seen
CASE = Case(
    seed=1,
    hidden=8,
    ffn=6,
    shared_ffn=4,
    num_experts=6,
    top_k=2,
    tokens=(6, 6),
    load="uniform",
    dtype=torch.float32,
)


@dataclass(frozen=True, kw_only=True)
class Look:
    """After a number of calls: resident bytes, tensors and Python objects that live."""

    resident: int
    tensors: int
    objects: int


def _look() -> Look:
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(isinstance(o, torch.Tensor) for o in objects)
    resident = psutil.Process().memory_info().rss
    return Look(resident=resident, tensors=tensors, objects=len(objects))


def _call(backend: ReferenceBackend, case: Case, rank: int, *, train: bool) -> list[torch.Tensor]:
    batch = Batch.of(case)
    mine, weights = batch.tokens(rank, 2), batch.weights(rank, 2)
    x_TH, prob_TK = batch.x_TH[mine], batch.prob_TK[mine]
    leaves = [v.requires_grad_(train) for v in (x_TH, prob_TK, *weights.flat())]
    with torch.set_grad_enabled(train):
        y_TH = fused_moe(*leaves[:1], batch.expert_TK[mine], prob_TK, weights, backend)
    if not train:
        return [y_TH]
    return [y_TH.detach(), *torch.autograd.grad(y_TH, leaves, batch.dy_TH[mine])]


def _soak(rank: int, world: int) -> list[Look]:
    backend = ReferenceBackend(CASE.shape(world), dist.group.WORLD)
    draw = random.Random(5)
    first = _call(backend, CASE, rank, train=True)
    looks = []
    for call in range(1, CALLS + 1):
        case = replace(
            CASE,
            seed=call,
            tokens=(draw.choice([0, 1, 5, 12]), draw.choice([0, 2, 7, 20])),
            load=LOADS[call // 10 % len(LOADS)],
        )
        _call(backend, case, rank, train=True)
        if call % EVALUATE_EVERY == 0:
            _call(backend, case, rank, train=False)
        if call % LOOK_EVERY == 0:
            looks.append(_look())
    for before, after in zip(first, _call(backend, CASE, rank, train=True), strict=True):
        assert torch.equal(before, after), "a call depends on those before it"
    return looks


def test_a_thousand_calls() -> None:
    for looks in run_ranks(2, _soak, deadline=300):
        assert len(looks) == CALLS // LOOK_EVERY
        warm, *later = looks[1:]
        assert max(look.resident for look in later) - warm.resident <= MOST_GROWTH, looks
        assert max(look.tensors for look in later) - warm.tensors < 10, looks
        assert max(look.objects for look in later) - warm.objects < 100, looks
