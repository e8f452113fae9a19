"""What the host does in a call of the cuda backend, on a GPU: its time, and what it notices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mok_megatron.function import FusedMoE, top_k_choices
from mok_megatron.parameters import MainGradients
from tests.backends import cuda_cases as cases

CASE = replace(cases.CASE, seed=23)
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stand_ins", [False, True], ids=["plain", "overlapped-reduction"])
@pytest.mark.parametrize(
    ("experts", "forward_us", "backward_us"), [(16, 120, 160), (32, 130, 190), (128, 200, 350)]
)
def test_what_a_call_costs_on_the_host(
    experts: int,
    forward_us: int,
    backward_us: int,
    stand_ins: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Inside FusedMoE.forward and .backward; best of five medians, which a busy machine seldom
    spoils. Prints them, and what the backend's calls and the ops alone take, launches included.
    `stand_ins`: with what DDP wants of a backward that overlaps its reduction."""
    problem = cases.Problem.of(replace(CASE, num_experts=experts, top_k=8))
    backend, p = cases.cuda_backend(problem.shape), problem
    leaves = [w.clone().requires_grad_() for w in p.weights.flat()]
    for leaf in leaves:
        leaf.main_grad = torch.zeros_like(leaf, dtype=torch.float32)
    weights = type(p.weights).of(tuple(leaves), p.shape)
    x, prob = p.x_TH.clone().requires_grad_(), p.prob_TK.clone().requires_grad_()
    store, spent = MainGradients(weights.flat(), stand_ins=stand_ins), Spent()
    methods = {name: staticmethod(spent(name, getattr(FusedMoE, name))) for name in _DIRECTIONS}
    node = type("Timed", (torch.autograd.Function,), methods)
    ops = torch.ops.mok_megatron
    with pytest.MonkeyPatch.context() as patch:
        for name in _DIRECTIONS:
            op = getattr(ops, name)
            patch.setattr(backend, name, spent(f"{name} of the backend", getattr(backend, name)))
            patch.setattr(ops, name, SimpleNamespace(default=spent(f"{name} op", op.default)))
        for _ in range(5 * 40):
            torch.cuda.synchronize()
            y = node.apply(backend, store, weights, x, p.expert_TK, prob, *leaves)
            y.backward(p.dy_TH)
            for leaf in leaves:
                leaf.grad = None
    routed_TE = torch.zeros(len(x), experts, dtype=torch.bool, device=cases.DEVICE)
    routed_TE[:, :8] = True
    dense_TE = torch.rand_like(routed_TE, dtype=torch.float32)
    for _ in range(5 * 40):
        torch.cuda.synchronize()
        spent("choices", top_k_choices)(dense_TE, routed_TE, 8, torch.bfloat16, kernel=True)
    best = {name: spent.best(name) for name in spent.us}
    with capsys.disabled():
        print(
            f"\nhost, {experts} experts, stand-ins {stand_ins}, us:",
            {name: round(us) for name, us in best.items()},
        )
    assert best["forward"] < forward_us
    assert best["backward"] < backward_us


_DIRECTIONS = ("forward", "backward")


class Spent:
    """The microseconds of every call, by name."""

    def __init__(self) -> None:
        self.us: dict[str, list[float]] = {}

    def __call__(self, name: str, inner: Callable[..., object]) -> Callable[..., object]:
        times = self.us.setdefault(name, [])

        def call(*arguments: object, **keywords: object) -> object:
            start = time.perf_counter()
            result = inner(*arguments, **keywords)
            times.append(1e6 * (time.perf_counter() - start))
            return result

        return call

    def best(self, name: str) -> float:
        """Of the medians of five parts."""
        times = self.us[name]
        part = len(times) // 5
        return min(statistics.median(times[i * part : (i + 1) * part]) for i in range(5))


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
