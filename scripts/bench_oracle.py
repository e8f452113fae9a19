"""The exact answer of a layer in float64, and how far an arm is from it.

Written with explicit gradients, expert by expert and in pieces of rows, so that the largest shapes
fit; tests compare it with tests/oracle.py, which is dense and leaves the gradients to autograd. An
error is the norm of a difference over the norm of the exact value, and of a tensor it is the
largest over its parts: rows of y and dx, experts of a weight gradient. One wrong token or expert
among thousands is as visible as a layer that is wrong throughout. What must be zero must be exactly
zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from bench_problem import Problem
from torch import Tensor

LIMIT = 2e-2  # of an arm in bf16: every arm is near 5e-3 when it is right
PIECE = 8192  # rows in float64 at a time


@dataclass(frozen=True, kw_only=True)
class Answer:
    """y, dx [T, H], dprob [T, K]; dw1 and dw2 hold one matrix an expert, the shared expert last."""

    y_TH: Tensor
    dx_TH: Tensor
    dprob_TK: Tensor
    dw1: Sequence[Tensor]
    dw2: Sequence[Tensor]


def solve(problem: Problem) -> Answer:
    """In float64; weight gradients are then kept in float32, whose rounding is far below LIMIT."""
    y_TH, dx_TH = (torch.zeros_like(problem.x_TH, dtype=torch.float64) for _ in range(2))
    dprob_TK = torch.zeros_like(problem.prob_TK, dtype=torch.float64)
    dw1, dw2 = [], []
    for token, slot, w1, w2 in _groups(problem):
        w1, w2 = w1.double(), w2.double()
        dw1_e, dw2_e = torch.zeros_like(w1), torch.zeros_like(w2)
        for start in range(0, len(token), PIECE):
            t = token[start : start + PIECE]
            k = None if slot is None else slot[start : start + PIECE]
            x, dy = problem.x_TH[t].double(), problem.dy_TH[t].double()
            p = x.new_ones(len(t), 1) if k is None else problem.prob_TK[t, k].double()[:, None]
            gate, up = (x @ w1.T).chunk(2, dim=1)
            sigmoid = gate.sigmoid()
            activation = gate * sigmoid * up
            y_TH.index_add_(0, t, (activation * p) @ w2.T)
            d_scaled = dy @ w2
            if k is not None:
                dprob_TK[t, k] = (d_scaled * activation).sum(dim=1)
            d_activation = d_scaled * p
            d_gate = d_activation * up * sigmoid * (1 + gate * (1 - sigmoid))
            d_gate_up = torch.cat([d_gate, d_activation * gate * sigmoid], dim=1)
            dx_TH.index_add_(0, t, d_gate_up @ w1)
            dw1_e += d_gate_up.T @ x
            dw2_e += dy.T @ (activation * p)
        dw1.append(dw1_e.float())
        dw2.append(dw2_e.float())
    return Answer(y_TH=y_TH, dx_TH=dx_TH, dprob_TK=dprob_TK, dw1=dw1, dw2=dw2)


def _groups(problem: Problem) -> Iterator[tuple[Tensor, Tensor | None, Tensor, Tensor]]:
    """Tokens, slots (None: the shared expert), w1 and w2 of each expert."""
    for expert in range(problem.shape.experts):
        token, slot = (problem.expert_TK == expert).nonzero(as_tuple=True)
        yield token, slot, problem.w1[expert], problem.w2[expert]
    if problem.shared_w1 is not None and problem.shared_w2 is not None:
        every = torch.arange(problem.shape.tokens, device=problem.device)
        yield every, None, problem.shared_w1, problem.shared_w2


def errors(found: Answer, exact: Answer, times: float = 1) -> dict[str, float]:
    """The error of each tensor; `times`: how often its weight gradients were added up.

    Infinite where a value is not finite, where what must be zero is not, and for another number of
    matrices.
    """
    worst = {
        "y": _of_parts([(found.y_TH, exact.y_TH)]),
        "dx": _of_parts([(found.dx_TH, exact.dx_TH)]),
        "dprob": _of_parts([(found.dprob_TK.reshape(1, -1), exact.dprob_TK.reshape(1, -1))]),
    }
    for name, ours, true in (("dw1", found.dw1, exact.dw1), ("dw2", found.dw2, exact.dw2)):
        pairs = zip(ours, true, strict=False)
        one = _of_parts((a.reshape(1, -1), times * b.reshape(1, -1)) for a, b in pairs)
        worst[name] = one if len(ours) == len(true) else float("inf")
    return worst


def _of_parts(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The largest error over the rows of all pairs; each pair [rows, n]."""
    largest = []
    for value, true in pairs:
        difference = (value.double() - true.double()).norm(dim=1)
        size = true.double().norm(dim=1)
        relative = torch.where(
            size > 0, difference / size, torch.where(difference == 0, 0.0, torch.inf)
        )
        largest.append(relative.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
    return float(torch.stack(largest).max())
