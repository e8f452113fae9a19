"""The cuda backend under autograd: what a model does to a layer changes no byte of it.

The expected bytes are those of direct calls of the backend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mok_megatron.backends.cuda import CudaBackend
from mok_megatron.contract import MoEShape, WeightGradients, Weights
from mok_megatron.function import fused_moe, top_k_choices
from tests.backends import cuda_cases as cases

pytestmark = pytest.mark.gpu
CASE = replace(cases.CASE, seed=31)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer on leaves that collect gradients; `frozen`: places in Weights.flat that do not."""

    problem: cases.Problem
    backend: CudaBackend
    weights: Weights
    x_TH: Tensor
    prob_TK: Tensor

    @staticmethod
    def of(problem: cases.Problem, frozen: tuple[int, ...] = ()) -> Layer:
        flat = problem.weights.flat()
        leaves = tuple(w.clone().requires_grad_(i not in frozen) for i, w in enumerate(flat))
        return Layer(
            problem=problem,
            backend=cases.cuda_backend(problem.shape),
            weights=Weights.of(leaves, problem.shape),
            x_TH=problem.x_TH.clone().requires_grad_(),
            prob_TK=problem.prob_TK.clone().requires_grad_(),
        )

    def __call__(self, x_TH: Tensor, prob_TK: Tensor) -> Tensor:
        return fused_moe(x_TH, self.problem.expert_TK, prob_TK, self.weights, self.backend)

    def leaves(self) -> tuple[Tensor, ...]:
        return (self.x_TH, self.prob_TK, *(w for w in self.weights.flat() if w.requires_grad))


def _direct(problem: cases.Problem) -> list[Tensor]:
    """y, dx, dprob and fresh bf16 gradients of one direct call."""
    into = problem.places(torch.bfloat16, accumulate=False)
    return list(cases.call(cases.cuda_backend(problem.shape), problem, into).tensors().values())


def _through(layer: Layer, y_TH: Tensor) -> list[Tensor]:
    cases.poison()
    return list(torch.autograd.grad(y_TH, layer.leaves(), layer.problem.dy_TH))


def test_several_forwards_before_their_backwards_and_a_retained_graph() -> None:
    problem = cases.Problem.of(CASE)
    problems = [problem, problem.rerouted(98), problem.rerouted(99)]
    expected = [_direct(p) for p in problems]
    layers = [Layer.of(p) for p in problems]
    outputs = []
    for layer in layers:
        cases.poison()
        outputs.append(layer(layer.x_TH, layer.prob_TK))
    for index in (0, 2, 1, 0):
        cases.poison()
        layer, y_TH = layers[index], outputs[index]
        found = torch.autograd.grad(y_TH, layer.leaves(), problem.dy_TH, retain_graph=True)
        assert cases.differing([y_TH.detach(), *found], expected[index]) == []


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_changes_no_byte(use_reentrant: bool) -> None:
    problem = cases.Problem.of(CASE)
    layer = Layer.of(problem)
    y_TH = checkpoint(layer, layer.x_TH, layer.prob_TK, use_reentrant=use_reentrant)
    cases.poison()
    y_TH.backward(problem.dy_TH)
    found = [y_TH.detach(), *(leaf.grad for leaf in layer.leaves())]
    assert cases.differing(found, _direct(problem)) == []


def test_a_layer_may_feed_itself() -> None:
    problem = cases.Problem.of(CASE)
    layer, p = Layer.of(problem), problem
    found = _through(layer, layer(layer(layer.x_TH, layer.prob_TK), layer.prob_TK))

    y_TH, inner = layer.backend.forward(p.x_TH, p.expert_TK, p.prob_TK, p.weights)
    _, outer = layer.backend.forward(y_TH, p.expert_TK, p.prob_TK, p.weights)
    places = [problem.places(torch.bfloat16, accumulate=False) for _ in range(2)]
    last = layer.backend.backward(outer, p.dy_TH, p.weights, places[0])
    first = layer.backend.backward(inner, last.dx_TH, p.weights, places[1])
    dw = [a + b for a, b in zip(*(cases.flat(into) for into in places), strict=True)]
    expected = [first.dx_TH, first.dprob_TK + last.dprob_TK, *dw]
    assert cases.differing(found, expected) == []


def test_evaluation_gives_the_same_bytes_and_disturbs_nothing() -> None:
    problem = cases.Problem.of(CASE)
    expected = _direct(problem)
    layer, other = Layer.of(problem), problem.rerouted(4)
    y_TH = layer(layer.x_TH, layer.prob_TK)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            cases.poison()
            again = layer(layer.x_TH, layer.prob_TK)
            assert not again.requires_grad
            assert cases.same(again.clone(), y_TH.detach())
            fused_moe(other.x_TH, other.expert_TK, other.prob_TK, other.weights, layer.backend)
    assert cases.differing([y_TH.detach(), *_through(layer, y_TH)], expected) == []


@pytest.mark.parametrize("which", ["some", "all"])
def test_frozen_weights_leave_the_other_gradients_as_they_are(which: str) -> None:
    problem = cases.Problem.of(CASE)
    count = len(problem.weights.flat())
    frozen = tuple(i for i in range(count) if which == "all" or i % 5 in (1, 2) or i == count - 1)
    layer = Layer.of(problem, frozen)
    y_TH = layer(layer.x_TH, layer.prob_TK)
    every = _direct(problem)
    expected = [*every[:3], *(w for i, w in enumerate(every[3:]) if i not in frozen)]
    assert cases.differing([y_TH.detach(), *_through(layer, y_TH)], expected) == []


def test_x_and_dy_may_have_any_strides() -> None:
    problem = cases.Problem.of(CASE)
    layer = Layer.of(problem)
    y_TH = layer(layer.x_TH.t().contiguous().t(), layer.prob_TK)
    dy_TH = problem.dy_TH.t().contiguous().t()
    found = torch.autograd.grad(y_TH, layer.leaves(), dy_TH)
    assert cases.differing([y_TH.detach(), *found], _direct(problem)) == []


class MainGrads:
    """A store as Megatron's: fp32 memory that every backward adds to."""

    def __init__(self, problem: cases.Problem) -> None:
        self.into = problem.places(torch.float32, accumulate=True)

    def open(self, weights: Weights, needed: tuple[bool, ...], shape: MoEShape) -> WeightGradients:
        return self.into

    def close(self, weights: Weights, into: WeightGradients) -> tuple[Tensor | None, ...]:
        return (None,) * len(weights.flat())


def test_every_backward_adds_to_main_grads() -> None:
    problem = cases.Problem.of(CASE)
    backend, layer, store = cases.cuda_backend(problem.shape), Layer.of(problem), MainGrads(problem)
    expected = problem.places(torch.float32, accumulate=True)
    for p in (problem, problem.rerouted(7), problem.rerouted(8)):
        y_TH = fused_moe(layer.x_TH, p.expert_TK, p.prob_TK, layer.weights, backend, store)
        y_TH.backward(p.dy_TH)
        cases.call(backend, p, expected)
    assert cases.differing(cases.flat(store.into), cases.flat(expected)) == []
    assert all(w.grad is None for w in layer.weights.flat())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(0, 4, 2), (1, 1, 1), (3001, 300, 9)])
def test_the_kernels_of_choices_give_the_bytes_of_torch(
    dtype: torch.dtype, tokens: int, experts: int, top_k: int
) -> None:
    """With tokens that have no route, and some that have too many."""
    generator = torch.Generator(cases.DEVICE).manual_seed(experts)

    def random(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, device=cases.DEVICE)

    count_T = (random(tokens) * (top_k + 2)).long()
    routed_TE = random(tokens, experts).argsort(1).argsort(1) < count_T[:, None]
    fits_T, weight_TK = routed_TE.sum(1) <= top_k, random(tokens, top_k)
    leaf = random(tokens, experts).to(dtype)
    results = []
    for kernel in (False, True):
        cases.poison()
        probs_TE = leaf.clone().requires_grad_()
        expert_TK, prob_TK = top_k_choices(
            probs_TE, routed_TE, top_k, torch.bfloat16, kernel=kernel
        )
        (prob_TK * weight_TK)[fits_T].sum().backward()
        results.append([expert_TK, prob_TK.detach()[fits_T], probs_TE.grad])
    assert cases.differing(*results) == []
