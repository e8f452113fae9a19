"""Calls of the cuda backend beside the reference's and the float64 oracle, on one GPU.

Every call runs over poisoned memory: what torch's allocator hands out next holds NaN in floats, and
ids far outside in integers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mok_megatron.backends.cuda import CudaBackend
from mok_megatron.backends.reference import ReferenceBackend
from mok_megatron.contract import MoEShape, Schedule, WeightGradients, Weights
from tests.batches import LOADS, Batch, Case
from tests.oracle import solve

DEVICE = torch.device("cuda")
POISON = 0x7FFF7FFF  # a NaN in fp32 and twice in bf16; as an id or a row, far outside
FEW = 1000  # elements: below it the limit is absolute
LIMIT = 2e-2
SHARE = 1.25  # of the reference's own error


def poison(megabytes: int = 256) -> None:
    """Fill memory that is free, or about to be, and free it."""
    large = [torch.full((megabytes << 18,), POISON, dtype=torch.int32, device=DEVICE)]
    small = [torch.full((200_000,), POISON, dtype=torch.int32, device=DEVICE) for _ in range(16)]
    tiny = [torch.full((64,), POISON, dtype=torch.int32, device=DEVICE) for _ in range(256)]
    del large, small, tiny


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    experts = draw.choice([1, 2, 3, 4, 8, 16, 33, 64])
    few = experts <= 8
    return Case(
        seed=seed,
        hidden=draw.choice([64, 128, 192, 320, 512] if few else [64, 128, 192]),
        ffn=draw.choice([64, 128, 192, 320] if few else [64, 128]),
        shared_ffn=draw.choice([0, 0, 64, 192]),
        num_experts=experts,
        top_k=draw.randint(1, min(experts, 8)),
        tokens=(draw.choice([0, 1, 2, 7, 64, 100, 127, 128, 129, 256, 300, 513]),),
        load=draw.choice(LOADS),
        dtype=torch.bfloat16,
    )


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A batch on the GPU: what a forward and a backward take."""

    case: Case
    shape: MoEShape
    x_TH: Tensor
    expert_TK: Tensor
    prob_TK: Tensor
    dy_TH: Tensor
    weights: Weights

    @staticmethod
    def of(case: Case) -> Problem:
        batch, shape = Batch.of(case), case.shape(1)
        weights = Weights.of(tuple(w.to(DEVICE) for w in batch.weights(0, 1).flat()), shape)
        return Problem(
            case=case,
            shape=shape,
            x_TH=batch.x_TH.to(DEVICE),
            expert_TK=batch.expert_TK.to(DEVICE),
            prob_TK=batch.prob_TK.to(DEVICE),
            dy_TH=batch.dy_TH.to(DEVICE),
            weights=weights,
        )

    def places(self, dtype: torch.dtype, *, accumulate: bool) -> WeightGradients:
        """Random old values to add to, or NaN to overwrite."""
        generator = torch.Generator(DEVICE).manual_seed(self.case.seed)
        flat = [
            torch.randn(w.shape, generator=generator, device=DEVICE).to(dtype)
            if accumulate
            else torch.full_like(w, float("nan"), dtype=dtype)
            for w in self.weights.flat()
        ]
        return WeightGradients.of(tuple(flat), self.shape, accumulate=accumulate)

    def rerouted(self, seed: int) -> Problem:
        """The same tokens and weights with other choices and probabilities."""
        other = Batch.of(replace(self.case, seed=seed))
        return replace(self, expert_TK=other.expert_TK.to(DEVICE), prob_TK=other.prob_TK.to(DEVICE))


@dataclass(frozen=True, kw_only=True)
class Result:
    y_TH: Tensor
    dx_TH: Tensor
    dprob_TK: Tensor
    dw: tuple[Tensor, ...]  # in the order of Weights.flat
    schedule: Schedule

    def tensors(self) -> dict[str, Tensor]:
        dw = {f"dw[{i}]": w for i, w in enumerate(self.dw)}
        return {"y": self.y_TH, "dx": self.dx_TH, "dprob": self.dprob_TK, **dw}


def flat(into: WeightGradients) -> tuple[Tensor, ...]:
    every = (*into.w1, *into.w2, into.shared_w1, into.shared_w2)
    return tuple(w for w in every if w is not None)


def cuda_backend(shape: MoEShape) -> CudaBackend:
    return CudaBackend(shape, None, DEVICE)


def call(backend: Any, problem: Problem, into: WeightGradients) -> Result:
    """One forward and one backward, each over poisoned memory."""
    p = problem
    poison()
    y_TH, context = backend.forward(p.x_TH, p.expert_TK, p.prob_TK, p.weights)
    poison()
    gradients = backend.backward(context, p.dy_TH, p.weights, into)
    return Result(
        y_TH=y_TH,
        dx_TH=gradients.dx_TH,
        dprob_TK=gradients.dprob_TK,
        dw=flat(into),
        schedule=backend.schedule(context),
    )


def exact(problem: Problem, old: tuple[Tensor, ...] | None) -> dict[str, Tensor]:
    """The float64 answer, by the names of Result.tensors; `old`: what gradients were added to."""
    p, experts = problem, problem.shape.num_experts
    shared1 = [w for w in [p.weights.shared_w1] if w is not None]
    shared2 = [w for w in [p.weights.shared_w2] if w is not None]
    with DEVICE:
        answer = solve(
            p.x_TH,
            p.expert_TK,
            p.prob_TK,
            p.dy_TH,
            [*p.weights.w1, *shared1],
            [*p.weights.w2, *shared2],
            experts,
        )
    dw = (
        *answer.dw1[:experts],
        *answer.dw2[:experts],
        *answer.dw1[experts:],
        *answer.dw2[experts:],
    )
    if old is not None:
        dw = tuple(a + b.double() for a, b in zip(dw, old, strict=True))
    named = {f"dw[{i}]": w for i, w in enumerate(dw)}
    return {"y": answer.y_TH, "dx": answer.dx_TH, "dprob": answer.dprob_TK, **named}


def error(value: Tensor, true: Tensor) -> float:
    """Norm of the difference over the norm; infinite for a NaN, zero where both are all zeros."""
    difference = float((value.double() - true).norm())
    size = float(true.norm())
    relative = difference / size if size else difference
    return relative if relative == relative else float("inf")


def compare(
    problem: Problem, dtype: torch.dtype, *, accumulate: bool
) -> tuple[list[float], list[str]]:
    """Runs both backends, asserts what must be exact, and measures the errors.

    Ratios of our error to the reference's, for the large tensors; and in words, what broke the rule
    of accuracy.
    """
    case = problem.case
    into, like = (problem.places(dtype, accumulate=accumulate) for _ in range(2))
    old = tuple(w.clone() for w in flat(into)) if accumulate else None
    ours = call(cuda_backend(problem.shape), problem, into)
    theirs = call(ReferenceBackend(problem.shape, None), problem, like)
    assert torch.equal(ours.schedule.rows_L, theirs.schedule.rows_L), case
    assert torch.equal(ours.schedule.source_R3, theirs.schedule.source_R3), case
    assert not ours.dprob_TK[problem.expert_TK < 0].any(), (case, "dprob of an empty slot")
    _assert_empty_experts(problem, ours, old)

    true, references = exact(problem, old), theirs.tensors()
    ratios, broken = [], []
    for name, value in ours.tensors().items():
        reference = references[name]
        assert (value.shape, value.dtype) == (reference.shape, reference.dtype), (case, name)
        if not value.numel():
            continue
        own, limit = error(value, true[name]), error(reference, true[name])
        allowed = max(SHARE * limit, 1e-6)
        if value.numel() < FEW:  # one value may cancel to almost nothing: measure its usual size
            unit = case.hidden**0.5 if name == "dprob" else 1.0
            size = float(true[name].norm())
            floor = 0.5 * unit * value.numel() ** 0.5
            allowed = max(allowed, LIMIT * max(size, floor) / size) if size else LIMIT * floor
        elif limit > 1e-6:
            ratios.append(own / limit)
        if not own <= allowed:
            broken.append(f"{name}: {own:.2e} > {allowed:.2e} (reference {limit:.2e}) in {case}")
    return ratios, broken


def _assert_empty_experts(problem: Problem, ours: Result, old: tuple[Tensor, ...] | None) -> None:
    """An expert without rows gets exact zeros, or touches nothing."""
    experts = problem.shape.num_experts
    counts = ours.schedule.rows_L.tolist()
    for index, gradient in enumerate(ours.dw[: 2 * experts]):
        if counts[index % experts] == 0:
            expected = torch.zeros_like(gradient) if old is None else old[index]
            assert same(gradient, expected), (problem.case, "an empty expert", index)


def same(a: Tensor, b: Tensor) -> bool:
    """The same bytes: -0.0 is not 0.0, and a NaN is itself."""
    a, b = (v.contiguous().flatten().view(torch.uint8) for v in (a, b))
    return torch.equal(a, b)


def same_results(a: Result, b: Result) -> list[str]:
    """The names of the tensors whose bytes differ."""
    others = b.tensors()
    return [name for name, value in a.tensors().items() if not same(value, others[name])]
