"""Random MoE layers on mok beside the same on Megatron's alltoall dispatcher: fp32, two ranks.

Output and every gradient have the same bytes, but for those that say why below. Shapes, routers,
ragged and empty ranks, masks and loads are drawn; the seed is printed.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests import tiny_megatron as tiny
from tests.ranks import run_ranks

CONFIGS = 300
EXACT, ROUNDED = 0.0, 2e-6


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One layer: Megatron's fields beside tiny.BASE, and what each rank puts in."""

    fields: dict[str, Any]
    sequence: tuple[int, int]  # of each rank
    batch: int
    mask: bool
    hot: int | None  # an expert that most tokens like


def drawn(seed: int) -> Drawn:
    draw = random.Random(seed)
    experts = 2 * draw.choice([1, 2, 3, 4, 8])
    top_k = draw.randint(1, min(experts, 6))
    fields: dict[str, Any] = {
        "num_moe_experts": experts,
        "moe_router_topk": top_k,
        "hidden_size": draw.choice([8, 16, 24, 40]),
        "num_attention_heads": 4,
        "moe_ffn_hidden_size": draw.choice([1, 7, 16, 33]),
        "moe_shared_expert_intermediate_size": draw.choice([None, None, 16, 9]),
        "moe_router_dtype": draw.choice(["fp32", "fp32", None, "fp64"]),
        "moe_router_pre_softmax": top_k == 1 or draw.random() < 0.5,
        "moe_router_load_balancing_type": draw.choice(["none", "aux_loss", "seq_aux_loss"]),
        "moe_aux_loss_coeff": 1e-2,
        "moe_z_loss_coeff": draw.choice([None, 1e-3]),
    }
    if draw.random() < 0.4:
        fields |= {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5}
        fields["moe_router_enable_expert_bias"] = draw.random() < 0.5
    elif draw.random() < 0.2:
        fields["moe_expert_capacity_factor"] = draw.choice([0.5, 1.0])
    if draw.random() < 0.2:
        fields |= {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    return Drawn(
        fields=fields,
        sequence=(draw.choice([1, 2, 9, 16]), draw.choice([1, 3, 8, 30])),
        batch=draw.choice([1, 1, 2, 3]),
        # With an expert bias Megatron 0.19's router cannot take a mask, on any dispatcher.
        mask=draw.random() < 0.2 and not fields.get("moe_router_enable_expert_bias"),
        hot=draw.choice([None, None, 0, experts - 1]),
    )


def _run(dispatcher: str, case: Drawn, rank: int) -> dict[str, Tensor | None]:
    """y, dx and every parameter's gradient on this rank."""
    layer = tiny.moe_layer(dispatcher, tiny.BASE, **case.fields)
    layer.train()
    generator = torch.Generator().manual_seed(17 + rank)
    size = (case.sequence[rank], case.batch, case.fields["hidden_size"])
    x_SBH = torch.randn(size, generator=generator)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(10)  # initialised to 0.02: outputs would hardly differ from zero
        if case.hot is not None:
            x_SBH[..., 0] = 3.0
            layer.router.weight[case.hot, 0] += 5.0
    mask = None
    if case.mask:
        mask = torch.rand(size[1], size[0], generator=generator) < 0.3
        mask[:, 0] = False  # a loss over no token at all is 0 / 0, in Megatron's router
    x_SBH.requires_grad_()
    y_SBH, _ = layer(x_SBH, padding_mask=mask)
    (y_SBH * torch.randn(size, generator=generator)).sum().backward()
    grads = {f"d({name})": p.grad for name, p in layer.named_parameters()}
    return {"y": y_SBH.detach(), "dx": x_SBH.grad, **grads}


def _tolerance(name: str, fields: dict[str, Any]) -> float:
    if name == "dx" and fields["moe_shared_expert_intermediate_size"]:
        return ROUNDED  # its two halves are added in another order
    if fields["moe_router_dtype"] == "fp64" and name in ("d(router.weight)", "dx"):
        return ROUNDED  # probabilities, hence their gradients, pass in fp32
    return EXACT


def _error(found: Tensor | None, wanted: Tensor | None, scale: float) -> float:
    """In the 2-norm, relative to the value's or to `scale`, whichever is more; no gradient at all
    (an expert without rows) is a zero one."""
    if found is None or wanted is None:
        rest = wanted if found is None else found
        return 0.0 if rest is None else float(rest.abs().max())
    if torch.equal(found, wanted):
        return 0.0
    error = float((found.double() - wanted.double()).norm())
    return error / max(float(wanted.double().norm()), scale) if error == error else float("inf")


def _parity(rank: int, world: int, seeds: range) -> tuple[list[str], int]:
    """Differences, and how many of the outputs were not zero."""
    tiny.set_up(expert_parallel=world)
    wrong, moved = [], 0
    for seed in seeds:
        case = drawn(seed)
        found, wanted = (_run(dispatcher, case, rank) for dispatcher in ("mok", "alltoall"))
        assert found.keys() == wanted.keys()
        moved += bool(found["y"].any())
        # Where a router is saturated its gradient is what terms of dx's size leave.
        scale = max(float(wanted["dx"].norm()), 1e-30)
        for name in found:
            error = _error(found[name], wanted[name], scale)
            if not error <= _tolerance(name, case.fields):
                wrong.append(f"seed {seed}, {name}: {error:.1e}, {case}")
    return wrong, moved


def test_random_layers_equal_alltoall() -> None:
    first = secrets.randbits(31)
    print(f"seeds from {first}")
    for wrong, moved in run_ranks(2, _parity, range(first, first + CONFIGS), deadline=300):
        assert not wrong, "\n".join([f"{len(wrong)} differences", *wrong[:9]])
        assert moved > 0.9 * CONFIGS
