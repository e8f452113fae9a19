"""The only place where autograd appears: one node for the whole layer, between the router and the
residual.

Every activation that a backward needs is in `save_for_backward`, nothing in attributes of ctx but
plain integers, the backend and the weights: activation checkpointing can free and rebuild it,
several forwards may precede their backwards, and an output that is discarded and recomputed later
refills the storage that backward reads. The weights outlive the call anyway, and there are hundreds
of them: they are held, and their version counters compared, as `save_for_backward` would.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mok_megatron.contract import (
    OVERFULL,
    Backend,
    Context,
    GradientStore,
    MoEShape,
    WeightGradients,
    Weights,
)

_version = attrgetter("_version")


class FreshGradients:
    """Weight gradients in new memory, returned to autograd: what a plain torch model expects."""

    def open(self, weights: Weights, needed: tuple[bool, ...], shape: MoEShape) -> WeightGradients:
        """Uninitialised tensors like the weights; the backward overwrites every element."""
        flat = tuple(
            torch.empty_like(w) if n else None for w, n in zip(weights.flat(), needed, strict=True)
        )
        return WeightGradients.of(flat, shape, accumulate=False)

    def close(self, weights: Weights, into: WeightGradients) -> tuple[Tensor | None, ...]:
        """The tensors themselves."""
        shared = (into.shared_w1, into.shared_w2) if weights.shared_w1 is not None else ()
        return (*into.w1, *into.w2, *shared)


class FusedMoE(torch.autograd.Function):
    """x_TH, expert_TK, prob_TK, *owners -> y_TH, through a backend's explicit forward and backward.

    `owners` are the tensors that autograd must see, one by one; `weights` are they, or views of
    them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        backend: Backend,
        store: GradientStore,
        weights: Weights,
        x_TH: Tensor,
        expert_TK: Tensor,
        prob_TK: Tensor,
        *owners: Tensor,
    ) -> Tensor:
        """One call of backend.forward; shapes as in contract.Backend."""
        y_TH, context = backend.forward(x_TH, expert_TK, prob_TK, weights)
        ctx.backend, ctx.store, ctx.host = backend, store, context.host
        ctx.weights, ctx.owners, ctx.versions = weights, owners, sum(map(_version, owners))
        ctx.save_for_backward(*context.tensors)
        return y_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor | None, ...]:
        """One call of backend.backward."""
        backend, store, weights = ctx.backend, ctx.store, ctx.weights
        saved = ctx.saved_tensors  # read once: recompute refills it at the first reading only
        if sum(map(_version, ctx.owners)) != ctx.versions:  # each only ever grows
            raise RuntimeError(
                "mok: an expert weight must stay as it is from forward to backward, got one "
                "modified by an inplace operation; step the optimizer after the backward"
            )
        into = store.open(weights, ctx.needs_input_grad[6:], backend.shape)
        gradients = backend.backward(
            Context(tensors=saved, host=ctx.host), dy_TH.contiguous(), weights, into
        )
        return (
            None,
            None,
            None,
            gradients.dx_TH,
            None,
            gradients.dprob_TK,
            *store.close(weights, into),
        )


def fused_moe(
    x_TH: Tensor,
    expert_TK: Tensor,
    prob_TK: Tensor,
    weights: Weights,
    backend: Backend,
    store: GradientStore | None = None,
    owners: tuple[Tensor, ...] | None = None,
) -> Tensor:
    """The whole MoE layer after its router, differentiable in x_TH, prob_TK and the weights.

    x_TH [T, H], expert_TK int32 [T, K] (-1: empty slot), prob_TK fp32 [T, K] -> y_TH [T, H] in x's
    dtype. Collective over the backend's group. `store` says where weight gradients go (default: new
    tensors). `owners`: what autograd differentiates in the weights' place, where those are views of
    fewer tensors; `store` is one that knows them then.
    """
    store = store or FreshGradients()
    if owners is None:
        owners = weights.flat()
    y_TH: Tensor = FusedMoE.apply(backend, store, weights, x_TH, expert_TK, prob_TK, *owners)
    return y_TH


class Choices(torch.autograd.Function):
    """probs_TE, routing_map_TE -> expert_TK, prob_TK of top_k_choices, a kernel a direction."""

    @staticmethod
    def forward(
        ctx: Any, probs_TE: Tensor, routing_map_TE: Tensor, top_k: int
    ) -> tuple[Tensor, Tensor]:
        """On a GPU; probs_TE in bf16, fp32 or fp64."""
        expert_TK, prob_TK = torch.ops.mok_megatron.choices(
            probs_TE.contiguous(), routing_map_TE.contiguous(), top_k
        )
        ctx.save_for_backward(expert_TK)
        ctx.mark_non_differentiable(expert_TK)
        ctx.num_experts, ctx.dtype = probs_TE.shape[1], probs_TE.dtype
        return expert_TK, prob_TK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, dprob_TK: Tensor) -> tuple[Tensor | None, ...]:
        """Dense, zero where nothing was chosen."""
        (expert_TK,) = ctx.saved_tensors
        dense_TE = torch.ops.mok_megatron.spread(
            dprob_TK.contiguous(), expert_TK, ctx.num_experts, ctx.dtype
        )
        return dense_TE, None, None


def top_k_choices(
    probs_TE: Tensor,
    routing_map_TE: Tensor,
    top_k: int,
    model_dtype: torch.dtype,
    *,
    kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Megatron's dense routing -> (expert_TK int32, prob_TK); the host never waits.

    probs_TE [T, E] floating point, routing_map_TE bool [T, E]. Choices come from the map alone (a
    routed probability may be zero), experts ascending in a row, -1 and probability 0 in unused
    slots. prob_TK is fp32, fp64 for a `model_dtype` of fp64, whatever the router computes in. Its
    gradient goes back to probs_TE dense, in that dtype, so losses that hang on the router's output
    keep theirs. A token with more than `top_k` routes is marked OVERFULL, which every backend
    refuses: nothing is dropped. `kernel`: by the library's kernels, which need a GPU.
    """
    if kernel:
        expert_TK, prob_TK = Choices.apply(probs_TE, routing_map_TE, top_k)
        return expert_TK, prob_TK
    num_experts = routing_map_TE.shape[1]
    ids_E = torch.arange(num_experts, device=routing_map_TE.device)
    routed_TE = torch.where(routing_map_TE, ids_E, num_experts)
    expert_TK = routed_TE.topk(top_k, dim=1, largest=False, sorted=True).values
    empty_TK = expert_TK == num_experts
    prob_TK = probs_TE.gather(1, expert_TK.clamp(max=num_experts - 1)).masked_fill(empty_TK, 0)
    wide = torch.promote_types(model_dtype, torch.float32)
    overfull_T = routing_map_TE.sum(1) > top_k
    expert_TK = expert_TK.masked_fill(empty_TK, -1).masked_fill(overfull_T.unsqueeze(1), OVERFULL)
    return expert_TK.to(torch.int32), prob_TK.to(wide)
