"""Bad input on one rank: every rank raises the same words at once, and the next call works."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron.backends.reference import ReferenceBackend
from mok_megatron.contract import Context, WeightGradients, Weights
from tests.batches import Batch, Case, places
from tests.ranks import run_ranks

CASE = Case(
    seed=5,
    hidden=8,
    ffn=6,
    shared_ffn=4,
    num_experts=4,
    top_k=2,
    tokens=(5, 3),
    load="uniform",
    dtype=torch.float32,
)


@dataclass(frozen=True)
class Forward:
    """The arguments of one forward."""

    x: Tensor
    expert: Tensor
    prob: Tensor
    weights: Weights

    def change(self, field: str, edit: Callable[[Tensor], Tensor]) -> Forward:
        """With one tensor, or one of the weights, edited."""
        if hasattr(self, field):
            return replace(self, **{field: edit(getattr(self, field))})
        old = getattr(self.weights, field)
        new = (*old[:-1], edit(old[-1])) if isinstance(old, tuple) else edit(old)
        return replace(self, weights=replace(self.weights, **{field: new}))


def _first_token(*values: float) -> Callable[[Tensor], Tensor]:
    def edit(choice_TK: Tensor) -> Tensor:
        choice_TK = choice_TK.clone()
        choice_TK[0] = torch.tensor(values)
        return choice_TK

    return edit


def _without_last(weights: Weights, field: str) -> Weights:
    return replace(weights, **{field: getattr(weights, field)[:-1]})


# name -> (how the culprit's arguments go wrong, what the words must hold, <T> being the
# culprit's T)
FORWARD_FAULTS: dict[str, tuple[Callable[[Forward], Forward], str]] = {
    "id_is_E": (
        lambda a: a.change("expert", _first_token(1, 4)),
        r"must be -1 or in \[0, 4\), got 4 at token 0, slot 1 on expert parallel rank <rank>",
    ),
    "id_below_minus_1": (
        lambda a: a.change("expert", _first_token(-3, 1)),
        r"must be -1 or in \[0, 4\), got -3 at token 0, slot 0 on expert parallel rank <rank>",
    ),
    "id_is_huge": (
        lambda a: a.change("expert", _first_token(2**31 - 1, 1)),
        r"got 2147483647 at token 0, slot 0 on expert parallel rank <rank>",
    ),
    "duplicate": (
        lambda a: a.change("expert", _first_token(3, 3)),
        r"only once, got expert 3 at token 0, slots \[0, 1\] on expert parallel rank <rank>",
    ),
    "prob_is_nan": (
        lambda a: a.change("expert", _first_token(2, 1)).change("prob", _first_token(1, math.nan)),
        r"must be finite, got nan at token 0, slot 1 on expert parallel rank <rank>; look for NaN",
    ),
    "prob_is_infinite": (
        lambda a: a.change("expert", _first_token(2, 1)).change("prob", _first_token(-math.inf, 1)),
        r"must be finite, got -inf at token 0, slot 0 on expert parallel rank <rank>",
    ),
    "x_of_three_dimensions": (
        lambda a: a.change("x", lambda v: v[None]),
        r"x must be \[T, 8\] in .*, got \[1, <T>, 8\] in .* rank <rank>; flatten",
    ),
    "x_of_other_width": (
        lambda a: a.change("x", lambda v: v[:, :7]),
        r"x must be \[T, 8\] .*got \[<T>, 7\]",
    ),
    "x_of_other_dtype": (
        lambda a: a.change("x", Tensor.bfloat16),
        r"x must be .* in torch.float32, got \[<T>, 8\] in torch.bfloat16",
    ),
    "expert_of_other_T": (
        lambda a: a.change("expert", lambda v: v[1:]),
        r"expert must be \[<T>, 2\] in torch.int32, got",
    ),
    "expert_of_other_K": (
        lambda a: a.change("expert", lambda v: v[:, :1]),
        r"expert must be \[<T>, 2\] in torch.int32, got \[<T>, 1\]",
    ),
    "expert_is_int64": (
        lambda a: a.change("expert", Tensor.long),
        r"expert must be \[<T>, 2\] in torch.int32, got \[<T>, 2\] in torch.int64 .*top_k_choices",
    ),
    "prob_is_bf16": (
        lambda a: a.change("prob", Tensor.bfloat16),
        r"prob must be \[<T>, 2\] in torch.float32, got \[<T>, 2\] in torch.bfloat16",
    ),
    "prob_is_dense": (
        lambda a: a.change("prob", lambda v: v.repeat(1, 2)),
        r"prob must be \[<T>, 2\] in torch.float32, got \[<T>, 4\]",
    ),
    "prob_elsewhere": (
        lambda a: a.change("prob", lambda v: v.to("meta")),
        r"prob must be on x's device, cpu, got meta",
    ),
    "w1_of_an_expert_missing": (
        lambda a: replace(a, weights=_without_last(a.weights, "w1")),
        r"must bring w1 and w2 of its <L> experts, got <L-1> and <L>",
    ),
    "w1_of_one_gate_only": (
        lambda a: a.change("w1", lambda w: w[:6]),
        r"w1\[<L-1>\] must be \[12, 8\] in torch.float32, got \[6, 8\]",
    ),
    "w2_transposed": (
        lambda a: a.change("w2", lambda w: w.t()),
        r"w2\[<L-1>\] must be \[8, 6\] in torch.float32, got \[6, 8\]",
    ),
    "w2_of_other_dtype": (
        lambda a: a.change("w2", Tensor.half),
        r"w2\[<L-1>\] must be \[8, 6\] in torch.float32, got \[8, 6\] in torch.float16",
    ),
    "w2_elsewhere": (
        lambda a: a.change("w2", lambda w: w.to("meta")),
        r"w2\[<L-1>\] must be on x's device, cpu, got meta",
    ),
    "shared_w2_missing": (
        lambda a: replace(a, weights=replace(a.weights, shared_w2=None)),
        r"shared width, 4, is not 0, got \[8, 8\] in torch.float32 and none",
    ),
    "shared_expert_missing": (
        lambda a: replace(a, weights=replace(a.weights, shared_w1=None, shared_w2=None)),
        r"shared width, 4, is not 0, got none and none",
    ),
    "shared_w1_of_other_width": (
        lambda a: a.change("shared_w1", lambda w: w[:6]),
        r"shared_w1 must be \[8, 8\] in torch.float32, got \[6, 8\]",
    ),
}

Places = WeightGradients
BACKWARD_FAULTS: dict[str, tuple[Callable[[Tensor, Places], tuple[Tensor, Places]], str]] = {
    "dy_of_other_T": (
        lambda dy, into: (dy[1:], into),
        r"dy must be like the forward's x, \[<T>, 8\] in torch.float32 on cpu, got",
    ),
    "dy_of_other_width": (
        lambda dy, into: (dy[:, :4], into),
        r"dy must be like the forward's x, .* got \[<T>, 4\]",
    ),
    "dy_of_other_dtype": (
        lambda dy, into: (dy.double(), into),
        r"dy must be like the forward's x, .* got \[<T>, 8\] in torch.float64",
    ),
    "a_place_is_missing": (
        lambda dy, into: (dy, replace(into, w2=into.w2[:-1])),
        r"a place or None for each of <L> w1 and w2, got <L> and <L-1>",
    ),
    "a_place_of_other_shape": (
        lambda dy, into: (dy, replace(into, w1=(*into.w1[:-1], torch.zeros(3)))),
        r"must have the shape of its weight, \[12, 8\] in torch.float32, got \[3\]",
    ),
}


def _setting(rank: int, world: int) -> tuple[ReferenceBackend, Forward, Tensor, Places]:
    batch, shape = Batch.of(CASE), CASE.shape(world)
    mine, weights = batch.tokens(rank, world), batch.weights(rank, world)
    backend = ReferenceBackend(shape, dist.group.WORLD if world > 1 else None)
    arguments = Forward(batch.x_TH[mine], batch.expert_TK[mine], batch.prob_TK[mine], weights)
    return backend, arguments, batch.dy_TH[mine], places(weights, shape, 0.0, torch.float32)


def _forward(backend: ReferenceBackend, a: Forward) -> tuple[Tensor, Context]:
    return backend.forward(a.x, a.expert, a.prob, a.weights)


def _words(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def _every_fault(rank: int, world: int, culprit: int) -> dict[str, str]:
    backend, good, dy, into = _setting(rank, world)
    y_TH, context = _forward(backend, good)
    said = {}
    for name, (edit, _) in FORWARD_FAULTS.items():
        bad = edit(good) if rank == culprit else good
        said[name] = _words(lambda bad=bad: _forward(backend, bad))
        assert torch.equal(_forward(backend, good)[0], y_TH), f"after {name}"
    for name, (edit_backward, _) in BACKWARD_FAULTS.items():
        bad_dy, bad_into = edit_backward(dy, into) if rank == culprit else (dy, into)
        said[name] = _words(
            lambda d=bad_dy, i=bad_into: backend.backward(context, d, good.weights, i)
        )
        assert not any(w.any() for w in (*into.w1, *into.w2)), f"{name} left a gradient"
    backend.backward(context, dy, good.weights, into)
    return said


@pytest.mark.parametrize(("world", "culprit"), [(1, 0), (2, 0), (2, 1)])
def test_all_ranks_raise_the_same_words(world: int, culprit: int) -> None:
    said, *others = run_ranks(world, _every_fault, culprit, deadline=60)
    assert others == [said] * (world - 1)
    local, tokens = 4 // world, sum(CASE.tokens) if world == 1 else CASE.tokens[culprit]
    values = {"<rank>": culprit, "<T>": tokens, "<L>": local, "<L-1>": local - 1}
    for name, (_, pattern) in (FORWARD_FAULTS | BACKWARD_FAULTS).items():
        for place, value in values.items():
            pattern = pattern.replace(place, str(value))
        assert re.search(pattern, said[name]), (name, pattern, said[name])
        assert re.fullmatch(r"mok: .+, got .+; .+\nmok: found in call .+", said[name]), said[name]


def _faults_on_both_and_desynchronised(rank: int, world: int) -> list[str]:
    backend, good, dy, into = _setting(rank, world)
    y_TH, context = _forward(backend, good)
    bad = good.change("x", lambda v: v[:, : 3 + rank])
    other = ReferenceBackend(replace(CASE, ffn=7).shape(world), dist.group.WORLD)
    ffn_7 = replace(good, weights=Batch.of(replace(CASE, ffn=7)).weights(rank, world))

    def forward_and_backward() -> object:
        if rank == 0:
            return _forward(backend, good)
        return backend.backward(context, dy, good.weights, into)

    said = [
        _words(lambda: _forward(backend, bad)),
        _words(forward_and_backward),
        _words(lambda: _forward(*((other, ffn_7) if rank else (backend, good)))),
    ]
    assert torch.equal(_forward(backend, good)[0], y_TH)
    return said


def test_two_faults_and_ranks_in_different_calls() -> None:
    said, others = run_ranks(2, _faults_on_both_and_desynchronised, deadline=60)
    assert said == others
    assert "got [5, 3] in torch.float32 on expert parallel rank 0" in said[0]
    where = " on expert parallel rank 0 and "
    assert f"got forward of layer 1 as call 3{where}backward of layer 1 as call 3 on 1" in said[1]
    words = "forward of layer 2 as call 4 with other sizes on 1; call every"
    assert f"forward of layer 1 as call 4{where}{words}" in said[2]


def test_a_group_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="group must have 4 ranks, got 1; pass"):
        ReferenceBackend(CASE.shape(4), None)
