"""What a rule of `config` can find in a Megatron configuration.

Each function takes a configuration, or makes one that does, and returns the offending value in
words, or None while there is none. A field that another Megatron version lacks offends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def get(config: Any, field: str, default: Any = None) -> Any:
    return getattr(config, field, default)


def on(field: str) -> Callable[[Any], str | None]:
    """Broken while the field is set to anything true."""
    return lambda c: f"{field}={get(c, field)}" if get(c, field) else None


def given(field: str) -> Callable[[Any], str | None]:
    """Broken while the field is not None."""
    return lambda c: f"{field}={get(c, field)}" if get(c, field) is not None else None


def above_one(field: str) -> Callable[[Any], str | None]:
    return lambda c: f"{field}={get(c, field)}" if (get(c, field) or 1) > 1 else None


def with_shared_expert(found: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    """The rule only concerns layers that have a shared expert."""
    return lambda c: found(c) if get(c, "moe_shared_expert_intermediate_size") else None


def among(field: str, values: Any, unwanted: tuple[str, ...]) -> str | None:
    bad = [v for v in values or () if v in unwanted]
    return f"{field} with {', '.join(bad)}" if bad else None


def topk(c: Any) -> str | None:
    topk, experts = get(c, "moe_router_topk", 1), c.num_moe_experts
    return None if 1 <= topk <= experts else f"moe_router_topk={topk} with {experts} experts"


def uneven_experts(c: Any) -> str | None:
    ep = get(c, "expert_model_parallel_size", 1) or 1
    if c.num_moe_experts % ep == 0:
        return None
    return f"num_moe_experts={c.num_moe_experts} and expert_model_parallel_size={ep}"


def expert_tensor_parallel(c: Any) -> str | None:
    size = get(c, "expert_tensor_parallel_size")
    if size is None:  # Megatron's default
        size = get(c, "tensor_model_parallel_size", 1)
    return f"expert_tensor_parallel_size={size}" if size > 1 else None


def activation(c: Any) -> str | None:
    from torch.nn import functional  # here, so that rules and settings can be read without torch

    activation, gated = get(c, "activation_func"), get(c, "gated_linear_unit")
    if activation is functional.silu and gated:
        return None
    name = getattr(activation, "__name__", repr(activation))
    return f"activation_func={name} with gated_linear_unit={bool(gated)}"


def recomputed(module: str) -> Callable[[Any], str | None]:
    def found(c: Any) -> str | None:
        if get(c, "recompute_granularity") != "selective":
            return None
        return among("recompute_modules", get(c, "recompute_modules"), (module,))

    return found


def offloaded(c: Any) -> str | None:
    if not get(c, "fine_grained_activation_offloading"):
        return None
    inside = ("expert_fc1", "moe_act", "fused_group_mlp")
    return among("offload_modules", get(c, "offload_modules"), inside)


def graph_implementation(c: Any) -> str:
    if get(c, "enable_cuda_graph"):
        return "local"
    if get(c, "external_cuda_graph"):
        return "transformer_engine"
    return get(c, "cuda_graph_impl") or "none"


def graph_modules(c: Any) -> list[str]:
    """What CUDA graphs capture, from text, enum or list, under the field's new or old name."""
    for field in ("cuda_graph_modules", "cuda_graph_scope"):
        value = get(c, field)
        if value and value != "full":
            items = value.split(",") if isinstance(value, str) else value
            items = items if isinstance(items, list | tuple | set) else [items]
            return [str(getattr(item, "name", item)) for item in items]
    return []


def graphs_of_moe(c: Any) -> str | None:
    if graph_implementation(c) not in ("local", "transformer_engine"):
        return None
    names = graph_modules(c)
    if not names or names == ["full"]:
        return f"cuda_graph_impl={graph_implementation(c)} with no modules, that is, whole layers"
    bad = [name for name in names if name.startswith("moe")]
    return f"cuda_graph_modules with {', '.join(bad)}" if bad else None


def cold_graph_of_iteration(c: Any) -> str | None:
    """A CUDA graph of the whole iteration, of which none has run before it is captured."""
    whole = graph_implementation(c) == "full_iteration" or "full_iteration" in graph_modules(c)
    steps = get(c, "cuda_graph_warmup_steps", 1)
    return f"cuda_graph_warmup_steps={steps}" if whole and steps < 1 else None


def unordered_router(c: Any) -> str | None:
    if get(c, "deterministic_mode") and get(c, "moe_router_fusion"):
        return "deterministic_mode=True and moe_router_fusion=True"
    return None


def inference_optimized(c: Any) -> str | None:
    if get(c, "transformer_impl") == "inference_optimized":
        return "transformer_impl=inference_optimized"
    return on("use_inference_optimized_layers")(c)


def other_selector(c: Any) -> str | None:
    backend = get(c, "moe_megakernel_backend")
    if backend in (None, "none", ""):
        return None
    return f"--moe-token-dispatcher-type mok and moe_megakernel_backend={backend}"
