"""The autograd node: what users do to a layer, against the same thing done to a dense model.

One rank suffices here, but where the order of calls between ranks matters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mok_megatron.backends.reference import ReferenceBackend
from mok_megatron.contract import OVERFULL, MoEShape, WeightGradients, Weights
from mok_megatron.function import FreshGradients, fused_moe, top_k_choices
from tests.batches import Batch, Case
from tests.ranks import run_ranks

CASE = Case(
    seed=11,
    hidden=6,
    ffn=5,
    shared_ffn=3,
    num_experts=4,
    top_k=2,
    tokens=(7,),
    load="sparse",
    dtype=torch.float64,
)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer with leaves that collect gradients, and the dense model on the same leaves."""

    backend: ReferenceBackend
    weights: Weights
    expert_TK: Tensor

    def __call__(self, x_TH: Tensor, prob_TK: Tensor) -> Tensor:
        return fused_moe(x_TH, self.expert_TK, prob_TK, self.weights, self.backend)

    def dense(self, x_TH: Tensor, prob_TK: Tensor) -> Tensor:
        y_TH = torch.zeros_like(x_TH)
        pairs = [*zip(self.weights.w1, self.weights.w2, strict=True)]
        if self.weights.shared_w1 is not None:
            pairs.append((self.weights.shared_w1, self.weights.shared_w2))
        for e, (w1, w2) in enumerate(pairs):
            shared = e == self.backend.shape.num_experts
            p_T = torch.ones(len(x_TH)) if shared else (prob_TK * (self.expert_TK == e)).sum(1)
            g, u = (x_TH @ w1.T).chunk(2, dim=1)
            y_TH = y_TH + (torch.nn.functional.silu(g) * u * p_T[:, None]) @ w2.T
        return y_TH

    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(w for w in self.weights.flat() if w.requires_grad)


def _setting(case: Case = CASE) -> tuple[Layer, Tensor, Tensor]:
    """A layer, and x and prob that want gradients."""
    batch = Batch.of(case)
    shape = case.shape(1)
    flat = tuple(w.clone().requires_grad_() for w in batch.weights(0, 1).flat())
    layer = Layer(
        backend=ReferenceBackend(shape, None),
        weights=Weights.of(flat, shape),
        expert_TK=batch.expert_TK,
    )
    return layer, batch.x_TH.clone().requires_grad_(), batch.prob_TK.clone().requires_grad_()


def _assert_same_gradients(use: Callable[[Callable[..., Tensor], Tensor, Tensor], Tensor]) -> None:
    """`use(layer, x, prob)` makes a loss of a layer: through mok and dense, all gradients agree."""
    layer, x, prob = _setting()
    inputs = (x, prob, *layer.leaves())
    losses, gradients = [], []
    for model in (layer, layer.dense):
        losses.append(use(model, x, prob))
        gradients.append(torch.autograd.grad(losses[-1], inputs))
    torch.testing.assert_close(*losses)
    for got, expected in zip(*gradients, strict=True):
        assert expected.any()
        torch.testing.assert_close(got, expected)


def test_gradcheck_in_fp64() -> None:
    layer, x, prob = _setting(replace(CASE, tokens=(4,), hidden=3, ffn=2, shared_ffn=2))

    def function(x: Tensor, prob: Tensor, *flat: Tensor) -> Tensor:
        weights = Weights.of(flat, layer.backend.shape)
        return fused_moe(x, layer.expert_TK, prob, weights, layer.backend)

    assert torch.autograd.gradcheck(function, (x, prob, *layer.leaves()))


def test_several_forwards_may_precede_their_backwards() -> None:
    def use(layer: Callable[..., Tensor], x: Tensor, prob: Tensor) -> Tensor:
        first, second = layer(x, prob), layer(2 * x, prob * prob)
        third = layer(x.sin(), prob)
        return second.square().sum() + (first * third).sum()

    _assert_same_gradients(use)


def test_a_layer_may_feed_itself() -> None:
    _assert_same_gradients(lambda layer, x, prob: layer(layer(x, prob), prob).square().sum())


def test_dy_may_have_any_strides() -> None:
    def use(layer: Callable[..., Tensor], x: Tensor, prob: Tensor) -> Tensor:
        y = layer(x, prob)
        return (y.t().reshape(-1) * torch.arange(y.numel())).sum() + y.sum()

    _assert_same_gradients(use)  # dy is a transposed view, then an expanded scalar
    _assert_same_gradients(lambda layer, x, prob: layer(x, prob).sum())


def test_x_may_have_any_strides() -> None:
    layer, x, prob = _setting()
    strided = x.detach().t().contiguous().t()
    assert not strided.is_contiguous()
    torch.testing.assert_close(layer(strided, prob), layer(x, prob), rtol=0, atol=0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_equals_and_frees_what_it_recomputes(use_reentrant: bool) -> None:
    layer, x, prob = _setting()
    inputs = (x, prob, *layer.leaves())
    saved: list[Tensor] = []

    def remember(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    def gradients(recompute: bool) -> tuple[Tensor, list[Tensor | None]]:
        for leaf in inputs:
            leaf.grad = None
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            if recompute:
                y = checkpoint(layer, x, prob, use_reentrant=use_reentrant)
            else:
                y = layer(x, prob)
        y.square().sum().backward()
        return y.detach(), [leaf.grad for leaf in inputs]

    y, plain = gradients(recompute=False)
    width = 2 * layer.backend.shape.ffn
    assert any(tensor.shape[-1:] == (width,) for tensor in saved)  # g|u was kept
    y_again, recomputed = gradients(recompute=True)
    assert not any(tensor.shape[-1:] == (width,) for tensor in saved)
    assert torch.equal(y, y_again)
    for a, b in zip(plain, recomputed, strict=True):
        assert torch.equal(a, b)


def test_frozen_weights_get_no_gradient_and_cost_no_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, x, prob = _setting()
    layer.weights.w1[0].requires_grad_(False)
    layer.weights.w2[2].requires_grad_(False)
    assert layer.weights.shared_w1 is not None
    layer.weights.shared_w1.requires_grad_(False)
    asked: list[WeightGradients] = []
    backward = layer.backend.backward

    def watched(context, dy_TH, weights, into):
        asked.append(into)
        return backward(context, dy_TH, weights, into)

    monkeypatch.setattr(layer.backend, "backward", watched)
    inputs = (x, prob, *layer.leaves())
    got = torch.autograd.grad(layer(x, prob).square().sum(), inputs)
    expected = torch.autograd.grad(layer.dense(x, prob).square().sum(), inputs)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    (into,) = asked
    assert [w is None for w in into.w1] == [True, False, False, False]
    assert [w is None for w in into.w2] == [False, False, True, False]
    assert into.shared_w1 is None
    assert into.shared_w2 is not None


def test_a_frozen_layer_still_passes_gradients_through() -> None:
    layer, x, prob = _setting()
    for w in layer.leaves():
        w.requires_grad_(False)
    got = torch.autograd.grad(layer(x, prob).square().sum(), (x, prob))
    expected = torch.autograd.grad(layer.dense(x, prob).square().sum(), (x, prob))
    torch.testing.assert_close(got, expected)


def test_evaluation_keeps_nothing_and_gives_the_same_bytes() -> None:
    layer, x, prob = _setting()
    y = layer(x, prob)
    assert y.requires_grad
    with torch.no_grad():
        assert torch.equal(layer(x, prob), y)
        assert not layer(x, prob).requires_grad
    with torch.inference_mode():
        assert torch.equal(layer(x, prob), y)
    y.sum().backward()  # a forward in between has not disturbed it
    assert x.grad is not None


def test_a_second_backward_without_retain_graph_is_refused_and_with_it_repeats() -> None:
    layer, x, prob = _setting()
    loss = layer(x, prob).square().sum()
    first = torch.autograd.grad(loss, (x, prob), retain_graph=True)
    second = torch.autograd.grad(loss, (x, prob))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, (x, prob))


def test_an_input_changed_in_place_is_noticed() -> None:
    layer, x, prob = _setting()
    changed = x * 1
    y = layer(changed, prob)
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# Who owns the weight gradients.


def test_fresh_gradients_overwrite_and_zero_the_idle() -> None:
    layer, x, prob = _setting()
    layer.expert_TK[layer.expert_TK == 1] = -1
    layer(x, prob).square().sum().backward()
    assert not layer.weights.w1[1].grad.any()
    assert not layer.weights.w2[1].grad.any()
    assert layer.weights.w1[0].grad.any()
    store, needed = FreshGradients(), (True, False) * 5
    into = store.open(layer.weights, needed, layer.backend.shape)
    assert not into.accumulate
    closed = store.close(layer.weights, into)
    assert tuple(w is not None for w in closed) == needed


class Accumulator:
    """A store as Megatron's: gradients are added to memory that outlives the backward."""

    def __init__(self, weights: Weights, dtype: torch.dtype, value: float) -> None:
        self.main = [torch.full_like(w, value, dtype=dtype) for w in weights.flat()]
        self.closed = 0

    def open(self, weights: Weights, needed: tuple[bool, ...], shape: MoEShape) -> WeightGradients:
        flat = tuple(w if n else None for w, n in zip(self.main, needed, strict=True))
        return WeightGradients.of(flat, shape, accumulate=True)

    def close(self, weights: Weights, into: WeightGradients) -> tuple[Tensor | None, ...]:
        self.closed += 1
        return (None,) * len(weights.flat())


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_accumulating_stores_add_every_backward(main_dtype: torch.dtype) -> None:
    layer, x, prob = _setting(replace(CASE, dtype=torch.bfloat16))
    store = Accumulator(layer.weights, main_dtype, 0.5)
    fresh = [torch.zeros_like(w, dtype=torch.float32) for w in layer.leaves()]
    into = WeightGradients.of(tuple(fresh), layer.backend.shape, accumulate=True)
    for scale in (1, 2):
        y = fused_moe(x, layer.expert_TK, prob, layer.weights, layer.backend, store)
        (scale * y).sum().backward()
        _, context = layer.backend.forward(x, layer.expert_TK, prob, layer.weights)
        dy = torch.full_like(x, scale)
        layer.backend.backward(context, dy.detach(), layer.weights, into)
    assert store.closed == 2
    assert all(w.grad is None for w in layer.leaves())
    tolerance = 1e-6 if main_dtype is torch.float32 else 2e-2
    for main, total in zip(store.main, fresh, strict=True):
        torch.testing.assert_close(main.float(), 0.5 + total, rtol=tolerance, atol=tolerance)


# From Megatron's dense routing to choices.


def test_choices_come_from_the_map_not_from_the_probabilities() -> None:
    routed = torch.tensor(
        [[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]], dtype=torch.bool
    )
    probs = torch.tensor(
        [[0.0, 0.7, 0.0, 0.3], [0.9, 0.0, 0.0, 0.0], [0.0] * 4, [0.0, 0.0, 0.0, 1.0]]
    )
    expert, prob = top_k_choices(probs, routed, 2, probs.dtype)
    assert expert.dtype == torch.int32
    assert expert.tolist() == [[1, 3], [0, -1], [-1, -1], [2, 3]]  # 2 is routed with probability 0
    torch.testing.assert_close(prob, torch.tensor([[0.7, 0.3], [0.9, 0], [0, 0], [0, 1]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_gradient_of_choices_is_dense_and_in_the_routers_dtype(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    routed = torch.rand(50, 6, generator=generator) < 0.3
    routed &= routed.cumsum(1) <= 3
    probs = torch.rand(50, 6, generator=generator).to(dtype).requires_grad_()
    expert, prob = top_k_choices(probs, routed, 3, probs.dtype)
    assert prob.dtype == torch.promote_types(dtype, torch.float32)
    weight = torch.arange(150.0).view(50, 3)
    (prob * weight).sum().backward()
    assert probs.grad.dtype == dtype
    assert probs.grad.shape == (50, 6)
    expected = torch.zeros(50, 6, dtype=dtype)
    for token in range(50):
        ids = routed[token].nonzero().flatten().tolist()
        assert expert[token].tolist() == ids + [-1] * (3 - len(ids))
        for slot, e in enumerate(ids):
            assert prob[token, slot] == probs[token, e]
            expected[token, e] = weight[token, slot]
    assert torch.equal(probs.grad, expected)


@pytest.mark.parametrize("tokens", [0, 1])
def test_choices_of_no_token_and_of_all_experts(tokens: int) -> None:
    routed = torch.ones(tokens, 3, dtype=torch.bool)
    expert, prob = top_k_choices(torch.rand(tokens, 3), routed, 3, torch.bfloat16)
    assert expert.tolist() == [[0, 1, 2]] * tokens
    assert prob.shape == (tokens, 3)


def test_a_routed_probability_of_zero_still_gets_its_gradient() -> None:
    """What a router learns from an expert it does not use yet must not be lost."""
    layer, x, _ = _setting(replace(CASE, load="uniform"))
    routed = torch.zeros(len(x), 4, dtype=torch.bool).scatter_(1, layer.expert_TK.long(), True)
    probs = torch.zeros(len(x), 4, dtype=torch.float64, requires_grad=True)
    expert, prob = top_k_choices(probs, routed, 2, probs.dtype)
    y = fused_moe(x, expert, prob, layer.weights, layer.backend)
    y.square().sum().backward()
    assert (probs.grad[routed] != 0).all()
    assert not probs.grad[~routed].any()


# Several ranks.


def _interleaved_calls(rank: int, world: int) -> None:
    """Two layers, forwards of both before their backwards, one rank without tokens."""
    case = replace(CASE, tokens=(6, 0), load="uniform")
    batch, shape = Batch.of(case), case.shape(world)
    backend = ReferenceBackend(shape, dist.group.WORLD)
    mine = batch.tokens(rank, world)

    def gradients(in_a_chain: bool) -> list[Tensor]:
        x = batch.x_TH[mine].clone().requires_grad_()
        prob = batch.prob_TK[mine].clone().requires_grad_()
        flat = tuple(w.clone().requires_grad_() for w in batch.weights(rank, world).flat())
        weights = Weights.of(flat, shape)

        def layer(x: Tensor) -> Tensor:
            return fused_moe(x, batch.expert_TK[mine], prob, weights, backend)

        if in_a_chain:
            checkpoint(lambda x: layer(layer(x)), x, use_reentrant=False).square().sum().backward()
        else:
            layer(layer(x)).square().sum().backward()
        return [x.grad, prob.grad, *(w.grad for w in flat)]

    for a, b in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(a, b)


def test_ranks_with_and_without_tokens_recompute_together() -> None:
    run_ranks(2, _interleaved_calls)


def test_a_token_with_too_many_routes_is_refused_not_cut() -> None:
    routing_map_TE = torch.zeros(3, 4, dtype=torch.bool)
    routing_map_TE[0, :2] = True
    routing_map_TE[2, 1:] = True  # three routes
    expert_TK, prob_TK = top_k_choices(torch.full((3, 4), 0.25), routing_map_TE, 2, torch.float32)
    assert expert_TK.tolist() == [[0, 1], [-1, -1], [OVERFULL, OVERFULL]]
    shape = MoEShape(hidden=4, ffn=4, num_experts=4, top_k=2, ep_size=1, dtype=torch.float32)
    weights = Weights(w1=(torch.zeros(8, 4),) * 4, w2=(torch.zeros(4, 4),) * 4)
    with pytest.raises(RuntimeError, match=r"at most 2 experts, got more routes at token 2"):
        fused_moe(torch.zeros(3, 4), expert_TK, prob_TK, weights, ReferenceBackend(shape, None))


@pytest.mark.parametrize(
    ("router", "model", "wide"),
    [
        (torch.float64, torch.bfloat16, torch.float32),
        (torch.float64, torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16, torch.float32),
    ],
)
def test_probabilities_follow_the_model_and_their_gradient_the_router(
    router: torch.dtype, model: torch.dtype, wide: torch.dtype
) -> None:
    probs_TE = torch.full((1, 3), 0.5, dtype=router, requires_grad=True)
    _, prob_TK = top_k_choices(probs_TE, torch.tensor([[True, False, True]]), 2, model)
    assert prob_TK.dtype == wide
    prob_TK.sum().backward()
    assert probs_TE.grad is not None
    assert probs_TE.grad.dtype == router
    assert probs_TE.grad.tolist() == [[1, 0, 1]]


def test_a_second_derivative_is_an_error_not_a_wrong_number() -> None:
    shape = MoEShape(hidden=4, ffn=4, num_experts=2, top_k=1, ep_size=1, dtype=torch.float64)
    w1 = (torch.rand(8, 4, dtype=torch.float64),) * 2
    w2 = (torch.rand(4, 4, dtype=torch.float64),) * 2
    x_TH = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    expert_TK = torch.tensor([[0], [1], [0]], dtype=torch.int32)
    prob_TK = torch.rand(3, 1, dtype=torch.float64)
    backend = ReferenceBackend(shape, None)
    y_TH = fused_moe(x_TH, expert_TK, prob_TK, Weights(w1=w1, w2=w2), backend)
    (dx_TH,) = torch.autograd.grad(y_TH.square().sum(), x_TH, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx_TH.square().sum().backward()
