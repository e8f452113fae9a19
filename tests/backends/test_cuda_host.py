"""What the host does in a call of the cuda backend, on a GPU: its time, and what it notices."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import pytest
import torch

from mok_megatron.function import FusedMoE
from mok_megatron.parameters import MainGradients
from tests.backends import cuda_cases as cases
from tests.batches import Case

CASE = Case(
    seed=23,
    hidden=256,
    ffn=192,
    shared_ffn=128,
    num_experts=8,
    top_k=3,
    tokens=(301,),
    load="zipf",
    dtype=torch.bfloat16,
)
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("experts", [16, 32, 128])
def test_the_host_walks_over_no_experts(
    monkeypatch: pytest.MonkeyPatch, experts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints the time inside FusedMoE.forward and .backward; the limit is far above what it should
    be, so that a slow host does not fail it, and below what a walk over 128 experts takes."""
    problem = cases.Problem.of(replace(CASE, num_experts=experts, top_k=8))
    backend, p = cases.cuda_backend(problem.shape), problem
    leaves = [w.clone().requires_grad_() for w in p.weights.flat()]
    for leaf in leaves:
        leaf.main_grad = torch.zeros_like(leaf, dtype=torch.float32)
    weights = type(p.weights).of(tuple(leaves), p.shape)
    x, prob = p.x_TH.clone().requires_grad_(), p.prob_TK.clone().requires_grad_()
    store, times = MainGradients(weights), {"forward": [], "backward": []}

    def timed(name: str):
        inner = getattr(FusedMoE, name)

        def call(*arguments: object) -> object:
            start = time.perf_counter()
            result = inner(*arguments)
            times[name].append(1e6 * (time.perf_counter() - start))
            return result

        return staticmethod(call)

    node = type("Timed", (torch.autograd.Function,), {n: timed(n) for n in times})
    for _ in range(60):
        torch.cuda.synchronize()
        y = node.apply(backend, store, weights, x, p.expert_TK, prob, *leaves)
        y.backward(p.dy_TH)
        for leaf in leaves:
            leaf.grad = None
    forward, backward = (statistics.median(times[name][10:]) for name in times)
    with capsys.disabled():
        print(f"\nhost, {experts} experts: {forward:.0f} us forward, {backward:.0f} us backward")
    assert forward < 200
    assert backward < 350


def test_weights_and_places_that_move_are_noticed() -> None:
    """As DDP moves them, after they were watched; the memory they leave is poison."""
    problem = cases.Problem.of(CASE)
    backend = cases.cuda_backend(problem.shape)
    into = problem.places(torch.float32, accumulate=True)
    start = [place.clone() for place in cases.flat(into)]

    def call() -> cases.Result:
        for place, value in zip(cases.flat(into), start, strict=True):
            place.copy_(value)
        result = cases.call(backend, problem, into)
        return replace(result, dw=tuple(w.clone() for w in result.dw))

    expected = [call() for _ in range(3)][-1]
    assert all(watch.number for watch in backend._weights.values())
    assert backend._places is not None
    for tensor in (problem.weights.w1[3], problem.weights.w2[0], into.w1[5], into.w2[1]):
        assert tensor is not None
        old = tensor.data
        tensor.data = old.clone()
        old.fill_(float("nan"))
        for _ in range(2):
            assert cases.same_results(expected, call()) == []
