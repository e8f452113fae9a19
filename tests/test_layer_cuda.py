"""A real MoELayer of Megatron on a GPU: mok's kernels beside alltoall, same state, same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import tiny_megatron as tiny
from tests.ranks import run_ranks

SIZES: dict[str, Any] = {"hidden_size": 256, "moe_ffn_hidden_size": 128}
BASES: dict[str, dict[str, Any]] = {
    "deepseek-v3": tiny.DEEPSEEK_V3 | SIZES | {"moe_shared_expert_intermediate_size": 192},
    "qwen3": tiny.QWEN3 | SIZES,
    "shared-gate": tiny.DEEPSEEK_V3
    | SIZES
    | {"moe_shared_expert_intermediate_size": 192, "moe_shared_expert_gate": True},
    "recompute-moe": tiny.DEEPSEEK_V3
    | SIZES
    | {
        "moe_shared_expert_intermediate_size": 192,
        "recompute_granularity": "selective",
        "recompute_modules": ["moe"],
    },
}


def _set_up() -> None:
    import mok_megatron

    torch.cuda.set_device(0)
    mok_megatron.activate()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=1, expert_tensor_parallel_size=1
    )


def _run(layer: Any, x_SBH: Tensor, *, main_grads: bool) -> dict[str, Tensor]:
    """Output and all gradients; with `main_grads` experts have a place to add to, as under DDP."""
    experts = [p for name, p in layer.named_parameters() if "experts" in name]
    for parameter in experts if main_grads else []:
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    x_SBH = x_SBH.clone().requires_grad_()
    y_SBH, _ = layer(x_SBH)
    generator = torch.Generator().manual_seed(99)
    dy_SBH = torch.randn(y_SBH.shape, generator=generator).to(y_SBH)
    (y_SBH * dy_SBH).sum().backward()
    results = {"y": y_SBH.detach(), "dx": x_SBH.grad}
    for name, parameter in layer.named_parameters():
        main_grad = getattr(parameter, "main_grad", None)
        # A module that Megatron runs itself has not added its gradient to main_grad yet.
        added = main_grad is not None and getattr(parameter, "grad_added_to_main_grad", False)
        results[f"d({name})"] = main_grad if added else parameter.grad
    return {name: value.double().cpu() for name, value in results.items() if value is not None}


def _errors(rank: int, world: int) -> dict[str, dict[str, tuple[float, float]]]:
    """case -> tensor -> error of mok and of alltoall against alltoall in fp32."""
    _set_up()
    torch.manual_seed(5)
    errors: dict[str, dict[str, tuple[float, float]]] = {}
    for name, base in BASES.items():
        for main_grads in (False, True):
            x_SBH = F.normalize(torch.randn(150, 2, base["hidden_size"]), dim=-1) * 16
            x_SBH = x_SBH.to("cuda", torch.bfloat16)
            results, state = {}, None
            for arm in ("alltoall", "mok", "truth"):
                dtype = torch.float32 if arm == "truth" else torch.bfloat16
                options = {"params_dtype": dtype, "bf16": dtype == torch.bfloat16}
                layer = tiny.moe_layer("mok" if arm == "mok" else "alltoall", base, **options)
                layer.cuda().train()  # Megatron leaves the weight of a shared gate on the CPU
                state = layer.state_dict() if state is None else state
                layer.load_state_dict(state)
                with_places = main_grads and arm == "mok"
                results[arm] = _run(layer, x_SBH.to(dtype), main_grads=with_places)
                if arm == "mok":
                    assert layer._backend.name == "cuda"
                    layer._backend.check()
            assert results["mok"].keys() == results["truth"].keys()
            errors[f"{name}, main_grad {main_grads}"] = {
                tensor: (
                    _error(results["mok"][tensor], true),
                    _error(results["alltoall"][tensor], true),
                )
                for tensor, true in results["truth"].items()
            }
    return errors


def _error(value: Tensor, true: Tensor) -> float:
    return float((value - true).norm() / true.norm().clamp_min(1e-30))


@pytest.mark.gpu
def test_a_layer_on_the_kernels_is_as_accurate_as_alltoall() -> None:
    pytest.importorskip("megatron.core")
    (errors,) = run_ranks(1, _errors, deadline=300)
    ratios = []
    for case, tensors in errors.items():
        for tensor, (of_mok, of_alltoall) in tensors.items():
            assert of_mok <= 1.25 * of_alltoall + 1e-6, (case, tensor, of_mok, of_alltoall)
            ratios.append(of_mok / of_alltoall if of_alltoall else 1.0)
    median = sorted(ratios)[len(ratios) // 2]
    print(
        f"{len(ratios)} tensors: error / alltoall's, median {median:.4f}, at most {max(ratios):.4f}"
    )
    assert median <= 1.0
