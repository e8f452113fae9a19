"""What a backend promises, in records. Above this file there is no CUDA, below it no Megatron.

Letters, the same everywhere:
    T  tokens on this rank     K  choices a token may make     N  routed rows sent, at most T * K
    P  ranks (expert parallel size)     E  experts     L = E / P  experts on this rank
    H  hidden size     F  expert width     S  shared-expert width (0: none)
    R  rows received by this rank

A *row* is one routed token: (source rank, token, choice). A *choice* is a slot k of a token; an
empty slot has expert id -1 and probability 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

# Expert id in the slots of a token that has more routes than slots; every backend refuses it.
OVERFULL = -2


@dataclass(frozen=True, kw_only=True)
class MoEShape:
    """The problem, fixed for a layer.

    Raises ValueError (rule, value, remedy) when the numbers cannot describe a layer.
    """

    hidden: int
    ffn: int
    num_experts: int
    top_k: int
    ep_size: int
    dtype: torch.dtype
    shared_ffn: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden", "ffn", "num_experts", "top_k", "ep_size"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"mok: {name} must be at least 1, got {getattr(self, name)}; "
                    "correct the model's configuration"
                )
        if self.shared_ffn < 0:
            raise ValueError(
                f"mok: shared_ffn must be 0 (no shared expert) or more, got {self.shared_ffn}; "
                "correct --moe-shared-expert-intermediate-size"
            )
        if self.top_k > self.num_experts:
            raise ValueError(
                f"mok: a token cannot choose {self.top_k} of {self.num_experts} experts; "
                "lower --moe-router-topk"
            )
        if self.num_experts % self.ep_size:
            raise ValueError(
                f"mok: the number of experts ({self.num_experts}) must be divisible by the expert "
                f"parallel size ({self.ep_size}); change --expert-model-parallel-size"
            )
        if not self.dtype.is_floating_point:
            raise ValueError(
                f"mok: the model's dtype must be floating point, got {self.dtype}; use --bf16"
            )

    @property
    def local_experts(self) -> int:
        """L, the number of experts each rank owns."""
        return self.num_experts // self.ep_size


@dataclass(frozen=True, kw_only=True)
class Weights:
    """This rank's weights: one tensor per local expert, in expert order, at unrelated addresses.

    w1[l] is [2F, H] with the F gate rows first, w2[l] is [H, F]; the shared expert has the same
    form with width S, or None for both.
    """

    w1: tuple[Tensor, ...]
    w2: tuple[Tensor, ...]
    shared_w1: Tensor | None = None
    shared_w2: Tensor | None = None

    def flat(self) -> tuple[Tensor, ...]:
        """All tensors in the order w1, w2, shared_w1, shared_w2, without the missing ones."""
        return self._flat

    @cached_property
    def _flat(self) -> tuple[Tensor, ...]:
        shared = (self.shared_w1, self.shared_w2)
        return (*self.w1, *self.w2, *(w for w in shared if w is not None))

    @staticmethod
    def of(flat: tuple[Tensor, ...], shape: MoEShape) -> Weights:
        """The inverse of `flat`."""
        local = shape.local_experts
        shared_w1, shared_w2 = flat[2 * local :] if shape.shared_ffn else (None, None)
        return Weights(
            w1=flat[:local], w2=flat[local : 2 * local], shared_w1=shared_w1, shared_w2=shared_w2
        )


@dataclass(frozen=True, kw_only=True)
class WeightGradients:
    """Where a backward puts the weight gradients; the fields mirror `Weights`.

    A None entry is not wanted (a frozen weight) and costs no product. With `accumulate` the
    gradient is added in place to what is there (Megatron's main_grad, fp32 or the weight's dtype),
    else it overwrites: an expert without rows then gets exact zeros.
    """

    w1: tuple[Tensor | None, ...]
    w2: tuple[Tensor | None, ...]
    shared_w1: Tensor | None = None
    shared_w2: Tensor | None = None
    accumulate: bool

    @staticmethod
    def of(
        flat: tuple[Tensor | None, ...], shape: MoEShape, *, accumulate: bool
    ) -> WeightGradients:
        """From the order of `Weights.flat`."""
        local = shape.local_experts
        shared_w1, shared_w2 = flat[2 * local :] if shape.shared_ffn else (None, None)
        return WeightGradients(
            w1=flat[:local],
            w2=flat[local : 2 * local],
            shared_w1=shared_w1,
            shared_w2=shared_w2,
            accumulate=accumulate,
        )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Where every routed row goes, made once per forward: what any two backends must agree on.

    rows_L    int64 [L], rows of each local expert.
    source_R3 int64 [R, 3], (rank, token, choice) of each row, rows in the order expert, rank,
    token, choice.
    """

    rows_L: Tensor
    source_R3: Tensor


@dataclass(frozen=True, kw_only=True)
class Context:
    """What one forward keeps for its backward; only its backend looks inside.

    All tensors are listed, so that autograd can own them (`save_for_backward`) and activation
    checkpointing can free them; `host` holds plain integers.
    """

    tensors: tuple[Tensor, ...]
    host: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """dx_TH [T, H] in x's dtype; dprob_TK [T, K] in prob_TK's dtype, zero where a slot is empty."""

    dx_TH: Tensor
    dprob_TK: Tensor


class Backend(Protocol):
    """One MoE layer's arithmetic on one rank of an expert-parallel group.

    Every rank of the group calls forward, and backward, the same number of times in the same order,
    also with T = 0. A backend keeps no state between calls that a result depends on.
    """

    name: str
    shape: MoEShape

    def forward(
        self, x_TH: Tensor, expert_TK: Tensor, prob_TK: Tensor, weights: Weights
    ) -> tuple[Tensor, Context]:
        """y_TH [T, H] in x's dtype, and the context.

        x_TH [T, H] in shape.dtype; expert_TK int32 [T, K], ids in [0, E) or -1, none twice in a
        row; prob_TK [T, K], fp32 (fp64 in an fp64 model). T may differ from rank to rank.
        Raises RuntimeError on every rank of the group when any rank's input breaks a rule.
        """

    def backward(
        self, context: Context, dy_TH: Tensor, weights: Weights, into: WeightGradients
    ) -> Gradients:
        """Gradients of x and prob; those of the weights go `into` their places."""

    def schedule(self, context: Context) -> Schedule:
        """The schedule of a forward, in the form that can be compared."""


class GradientStore(Protocol):
    """Who owns the memory of the weight gradients, and what autograd is given in their place."""

    def open(self, weights: Weights, needed: tuple[bool, ...], shape: MoEShape) -> WeightGradients:
        """Memory for this backward; `needed` is in the order of what autograd differentiates:
        `Weights.flat`, or the tensors that those are views of."""

    def close(self, weights: Weights, into: WeightGradients) -> tuple[Tensor | None, ...]:
        """What autograd gets for each of them, in that order."""
