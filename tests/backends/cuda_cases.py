"""Calls of the cuda backend beside the reference's and the float64 oracle, on one GPU.

Every call runs over poisoned memory: what torch's allocator hands out next holds NaN in floats, and
ids far outside in integers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mok_megatron.backends.cuda import CudaBackend
from mok_megatron.backends.reference import ReferenceBackend
from mok_megatron.contract import MoEShape, Schedule, WeightGradients, Weights
from tests.backends.cuda_loads import LOADS, choices
from tests.batches import Case
from tests.oracle import solve

DEVICE = torch.device("cuda")
CASE = Case(
    seed=17,
    hidden=256,
    ffn=192,
    shared_ffn=128,
    num_experts=8,
    top_k=3,
    tokens=(301,),
    load="zipf",
    dtype=torch.bfloat16,
)
POISON = 0x7FFF7FFF  # a NaN in fp32 and twice in bf16; as an id or a row, far outside
FEW = 1000  # elements other than zero: below it the limit is absolute
LIMIT = 2e-2
SHARE = 1.25  # of the reference's own error


def poison(megabytes: int = 256) -> None:
    """Fill memory that is free, or about to be, and free it."""
    sizes = [(megabytes << 18, 1), (200_000, 16), (3_000, 64), (64, 256)]  # int32, how many
    held = [
        torch.full((size,), POISON, dtype=torch.int32, device=DEVICE)
        for size, count in sizes
        for _ in range(count)
    ]
    del held


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
        tokens=(draw.choice([1, 2, 7, 64, 100, 127, 128, 129, 256, 300, 513]),),
        load=draw.choices(LOADS, weights=[2, 4, 1, 2, 1, 0.2, 0.4, 4])[0],
        dtype=torch.bfloat16,
    )


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a forward and a backward take, drawn on the GPU; weights at unrelated addresses."""

    case: Case
    shape: MoEShape
    x_TH: Tensor
    expert_TK: Tensor
    prob_TK: Tensor
    dy_TH: Tensor
    weights: Weights

    @staticmethod
    def of(case: Case) -> Problem:
        """Values of unit size in x, y and dy; `case.load` is one of cuda_loads.LOADS."""
        generator, shape = torch.Generator(DEVICE).manual_seed(case.seed), case.shape(1)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=DEVICE)

        def matrices(count: int, rows: int, columns: int) -> list[Tensor]:
            block = normal(count, rows, columns).div(columns**0.5).to(case.dtype)
            return [matrix.clone() for matrix in block]

        experts, (tokens,) = case.num_experts, case.tokens
        expert_TK = choices(case.load, tokens, experts, case.top_k, case.seed).to(DEVICE)
        shared = 1 if case.shared_ffn else 0
        flat = matrices(experts, 2 * case.ffn, case.hidden)
        flat += matrices(experts, case.hidden, case.ffn)
        flat += matrices(shared, 2 * case.shared_ffn, case.hidden)
        flat += matrices(shared, case.hidden, case.shared_ffn) if shared else []
        prob_TK = torch.rand(expert_TK.shape, generator=generator, device=DEVICE)
        return Problem(
            case=case,
            shape=shape,
            x_TH=normal(len(expert_TK), case.hidden).to(case.dtype),
            expert_TK=expert_TK,
            prob_TK=prob_TK.masked_fill(expert_TK < 0, 0),
            dy_TH=normal(len(expert_TK), case.hidden).to(case.dtype),
            weights=Weights.of(tuple(flat), shape),
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
        """The same tokens and weights with other choices, in another load, and probabilities."""
        draw, shape = random.Random(seed), self.shape
        load = draw.choice([load for load in LOADS if load != "no_tokens"])
        expert_TK = choices(load, len(self.x_TH), shape.num_experts, shape.top_k, seed).to(DEVICE)
        generator = torch.Generator(DEVICE).manual_seed(seed)
        prob_TK = torch.rand(expert_TK.shape, generator=generator, device=DEVICE)
        return replace(self, expert_TK=expert_TK, prob_TK=prob_TK.masked_fill(expert_TK < 0, 0))


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


def call(backend: Any, problem: Problem, into: WeightGradients, *, poisoned: bool = True) -> Result:
    """One forward and one backward, each over poisoned memory."""
    p = problem
    if poisoned:
        poison()
    y_TH, context = backend.forward(p.x_TH, p.expert_TK, p.prob_TK, p.weights)
    if poisoned:
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


def compare(
    problem: Problem,
    dtype: torch.dtype,
    *,
    accumulate: bool,
    backend: Any = None,
    poisoned: bool = True,
) -> tuple[list[float], list[str]]:
    """Runs both backends, asserts what must be exact, and measures the errors.

    Ratios of our error to the reference's, for the large tensors; and in words, what broke the rule
    of accuracy. `backend` is judged; by default a new cuda backend.
    """
    case = problem.case
    into, like = (problem.places(dtype, accumulate=accumulate) for _ in range(2))
    old = tuple(w.clone() for w in flat(into)) if accumulate else None
    ours = call(backend or cuda_backend(problem.shape), problem, into, poisoned=poisoned)
    theirs = call(ReferenceBackend(problem.shape, None), problem, like, poisoned=False)
    assert torch.equal(ours.schedule.rows_L, theirs.schedule.rows_L), case
    assert torch.equal(ours.schedule.source_R3, theirs.schedule.source_R3), case
    assert not ours.dprob_TK[problem.expert_TK < 0].any(), (case, "dprob of an empty slot")
    _assert_empty_experts(problem, ours, old)

    references, true = theirs.tensors(), exact(problem, old)
    for name, value in ours.tensors().items():
        reference = references[name]
        assert (value.shape, value.dtype) == (reference.shape, reference.dtype), (case, name)
    names = [name for name, value in true.items() if value.numel()]
    ratios, broken = [], []
    for name, (own, limit, size, count) in zip(
        names,
        _errors(*([of[name] for name in names] for of in (ours.tensors(), references, true))),
        strict=True,
    ):
        allowed = max(SHARE * limit, 1e-6)
        if count < FEW:  # one value may cancel to almost nothing: measure its usual size
            unit = case.hidden**0.5 if name == "dprob" else 1.0
            floor = 0.5 * unit * count**0.5
            allowed = max(allowed, LIMIT * max(size, floor) / size) if size else 0.0
        elif limit > 1e-6:
            ratios.append(own / limit)
        if not own <= allowed:
            broken.append(f"{name}: {own:.2e} > {allowed:.2e} (reference {limit:.2e}) in {case}")
    return ratios, broken


def _errors(
    ours: list[Tensor], theirs: list[Tensor], true: list[Tensor]
) -> list[tuple[float, float, float, int]]:
    """Of each tensor our error and theirs, the norm of the true one, and its elements that are not
    zero. One answer from the device for all."""
    if not true:
        return []
    norms = []
    for values in (ours, theirs):
        differences = torch._foreach_sub([value.double() for value in values], true)
        norms.append(torch.stack(torch._foreach_norm(differences)))
    norms.append(torch.stack(torch._foreach_norm(true)))
    norms.append(torch.stack([value.count_nonzero() for value in true]).double())
    return [
        (_relative(own, size), _relative(their, size), size, int(count))
        for own, their, size, count in torch.stack(norms, 1).tolist()
    ]


def error(value: Tensor, true: Tensor) -> float:
    """Norm of the difference over the norm; infinite for a NaN, zero where both are all zeros."""
    return _relative(float((value.double() - true).norm()), float(true.norm()))


def _relative(difference: float, size: float) -> float:
    relative = difference / size if size else difference
    return relative if relative == relative else float("inf")


def _assert_empty_experts(problem: Problem, ours: Result, old: tuple[Tensor, ...] | None) -> None:
    """An expert without rows gets exact zeros, or touches nothing."""
    experts = problem.shape.num_experts
    counts = ours.schedule.rows_L.tolist()
    empty = [i for i in range(2 * experts) if counts[i % experts] == 0]
    expected = [torch.zeros_like(ours.dw[i]) if old is None else old[i] for i in empty]
    wrong = differing([ours.dw[i] for i in empty], expected)
    assert wrong == [], (problem.case, "empty experts", [empty[i] for i in wrong])


def differing(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[int]:
    """Where the bytes differ: -0.0 is not 0.0, and a NaN is itself. Asks the device once."""
    if not a:
        return []
    bytes_of = [
        [v.contiguous().flatten().view(torch.uint8) for v in (x, y)]
        for x, y in zip(a, b, strict=True)
    ]
    assert all(x.shape == y.shape for x, y in bytes_of)
    return torch.stack([(x != y).any() for x, y in bytes_of]).nonzero().flatten().tolist()


def same(a: Tensor, b: Tensor) -> bool:
    """The same bytes."""
    return differing([a], [b]) == []


def same_results(a: Result, b: Result) -> list[str]:
    """The names of the tensors whose bytes differ."""
    names, others = list(a.tensors()), b.tensors()
    found = differing(list(a.tensors().values()), [others[name] for name in names])
    return [names[i] for i in found]
