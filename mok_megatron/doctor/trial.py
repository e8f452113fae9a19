"""One small layer, by a backend and by a dense float64 layer that knows neither rows nor ranks.

Data go in from the host and come back to it, so a device that loses them is found too. Every
gradient is compared.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from mok_megatron import backends
from mok_megatron.contract import Backend, MoEShape, Weights
from mok_megatron.function import fused_moe

TOKENS = 48


def shape_of(name: str) -> MoEShape:
    """The layer's shape: sizes that every kernel takes; bf16 for the kernels, fp32 for torch."""
    dtype = torch.float32 if name == "reference" else torch.bfloat16
    return MoEShape(
        hidden=256, ffn=128, shared_ffn=128, num_experts=8, top_k=2, ep_size=1, dtype=dtype
    )


def choose(name: str, device: torch.device) -> Backend:
    """The backend of that name for tensors on that device; raises as backends.choose does."""
    return backends.choose(name, shape_of(name), device, None)[0]


def run(name: str, device: torch.device) -> dict[str, Any]:
    """The fields of machine.SelfTest. Raises what the backend raises."""
    backend = choose(name, device)
    one = torch.ones(1, device=device, requires_grad=True)
    torch.autograd.grad(one * one, one, torch.ones_like(one))  # torch imports much at its first
    start = time.perf_counter()
    error = worst_error(backend, device)
    seconds = time.perf_counter() - start
    return {"backend": name, "device": str(device), "error": error, "seconds": seconds}


def worst_error(backend: Backend, device: torch.device) -> float:
    """The largest relative error over y and every gradient; infinite where one is not finite."""
    shape = backend.shape
    generator = torch.Generator().manual_seed(1234)

    def normal(*size: int, width: int = 1) -> Tensor:
        values = torch.randn(*size, generator=generator)
        return values.div(width**0.5).to(shape.dtype)

    widths = [shape.ffn] * shape.num_experts + [shape.shared_ffn]
    x_TH, dy_TH = normal(TOKENS, shape.hidden), normal(TOKENS, shape.hidden)
    w1 = [normal(2 * width, shape.hidden, width=shape.hidden) for width in widths]
    w2 = [normal(shape.hidden, width, width=width) for width in widths]
    score_TE = torch.rand(TOKENS, shape.num_experts, generator=generator)
    score_TE[:, 0] = -1  # an expert without rows
    expert_TK = score_TE.topk(shape.top_k).indices.to(torch.int32)
    expert_TK[::7, 1] = -1  # and empty slots
    prob_TK = torch.rand(expert_TK.shape, generator=generator).masked_fill(expert_TK < 0, 0)

    inputs = [x_TH, prob_TK, *w1, *w2]
    ours = [v.detach().to(device).requires_grad_() for v in inputs]
    exact = [v.detach().double().requires_grad_() for v in inputs]
    experts = len(w1)
    x, prob, *rest = ours
    weights = Weights(
        w1=tuple(rest[: experts - 1]),
        w2=tuple(rest[experts:-1]),
        shared_w1=rest[experts - 1],
        shared_w2=rest[-1],
    )
    y_TH = fused_moe(x, expert_TK.to(device), prob, weights, backend)
    found = [y_TH, *torch.autograd.grad(y_TH, ours, dy_TH.to(device))]
    x, prob, *rest = exact
    y_TH = dense(x, expert_TK, prob, rest[:experts], rest[experts:])
    wanted = [y_TH, *torch.autograd.grad(y_TH, exact, dy_TH.double())]
    return max(_error(a, b) for a, b in zip(found, wanted, strict=True))


def dense(x: Tensor, expert_TK: Tensor, prob: Tensor, w1: list[Tensor], w2: list[Tensor]) -> Tensor:
    """Every expert on every token, weighted by its probability; the last expert has all of them."""
    y = torch.zeros_like(x)
    for expert, (up, down) in enumerate(zip(w1, w2, strict=True)):
        share = (prob * (expert_TK == expert)).sum(dim=1, keepdim=True)
        if expert == len(w1) - 1:
            share = torch.ones_like(share)
        gate, value = (x @ up.T).chunk(2, dim=1)
        y = y + share * ((torch.nn.functional.silu(gate) * value) @ down.T)
    return y


def _error(found: Tensor, wanted: Tensor) -> float:
    error = (found.detach().cpu().double() - wanted.detach()).norm()
    size = float(wanted.detach().norm())
    relative = float(error) / size if size else float(error)
    return relative if relative == relative else float("inf")
