"""A dense MoE layer in float64: every expert sees every token, autograd makes the gradients.

It takes the global batch and all experts, and knows nothing of ranks, rows, order or rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Answer:
    """y and the gradients of sum(y * dy), all float64; dw in the order of the weights given."""

    y_TH: Tensor
    dx_TH: Tensor
    dprob_TK: Tensor
    dw1: tuple[Tensor, ...]
    dw2: tuple[Tensor, ...]


def solve(
    x_TH: Tensor,
    expert_TK: Tensor,
    prob_TK: Tensor,
    dy_TH: Tensor,
    w1: list[Tensor],
    w2: list[Tensor],
    num_experts: int,
) -> Answer:
    """Experts 0 .. E-1 by id, weighted by prob; a further one is shared by all tokens."""
    x_TH, prob_TK, *weights = (
        v.detach().double().requires_grad_() for v in (x_TH, prob_TK, *w1, *w2)
    )
    w1, w2 = weights[: len(w1)], weights[len(w1) :]
    y_TH = torch.zeros_like(x_TH)
    for e in range(len(w1)):
        shared = e >= num_experts
        p_T = torch.ones(len(x_TH)) if shared else (prob_TK * (expert_TK == e)).sum(dim=1)
        g_TF, u_TF = (x_TH @ w1[e].T).chunk(2, dim=1)
        y_TH = y_TH + (g_TF * torch.sigmoid(g_TF) * u_TF * p_T[:, None]) @ w2[e].T
    inputs = [x_TH, prob_TK, *weights]
    dx, dprob, *dw = torch.autograd.grad((y_TH * dy_TH).sum(), inputs)
    return Answer(
        y_TH=y_TH.detach(),
        dx_TH=dx,
        dprob_TK=dprob,
        dw1=tuple(dw[: len(w1)]),
        dw2=tuple(dw[len(w1) :]),
    )
