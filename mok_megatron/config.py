"""Every knob, and every rule that a Megatron configuration must keep to run mok.

A rule is data: what it is about, how to see that it is broken, what it says, what to do. Rules look
at a finished or unfinished TransformerConfig through its attributes alone, and a field that another
Megatron version lacks breaks none of them.

What is not refused works: Megatron's router with all its losses, biases, groups and replay;
capacity factors that drop tokens without padding; multi-token prediction; shared experts;
recomputation of the layer, of its norm and of the shared expert; tensor parallelism with sequence
parallelism; CUDA graphs of attention. Flags that ask for what the fused call does in any case are
accepted and named once (`already_done`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

BACKENDS = ("auto", "cuda", "reference")


@dataclass(frozen=True, kw_only=True)
class MokConfig:
    """backend: what computes the layers, one of BACKENDS; see `mok_megatron.backends.choose`.
    max_tokens: the most tokens that a rank brings to a call of the cuda backend where ranks share a
    workspace; None: `mok_megatron.limits.max_tokens` finds it.
    row_budget: rows that a rank's buffers hold there, as a multiple of its share of a balanced
    routing; see `mok_megatron.limits.row_capacity`.

    Raises ValueError for any other value.
    """

    backend: str = "auto"
    max_tokens: int | None = None
    row_budget: float = 1.25

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(
                f"mok: --mok-backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}; "
                "choose one of them"
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(
                f"mok: --mok-max-tokens must be at least 1, got {self.max_tokens}; give the most "
                "tokens that a rank brings to an MoE layer, or drop it"
            )
        if not 1 <= self.row_budget < float("inf"):
            raise ValueError(
                f"mok: --mok-row-budget must be at least 1, got {self.row_budget}; 1 holds a "
                "balanced routing, more than that spares passes"
            )


def check(config: Any) -> None:
    """Refuse a TransformerConfig that asks mok for what it cannot do.

    A config with another dispatcher, or without MoE layers, breaks no rule.
    Raises ValueError, with a line for each broken rule.
    """
    if _get(config, "moe_token_dispatcher_type") == "mok" and _get(config, "num_moe_experts"):
        _raise_broken(RULES, config)


def check_arguments(arguments: Any) -> None:
    """The same for what only megatron.training's arguments show; None breaks no rule."""
    if _get(arguments, "moe_token_dispatcher_type") == "mok" and _get(arguments, "num_experts"):
        _raise_broken(ARGUMENT_RULES, arguments)


SHARED_OVERLAP = "--moe-shared-expert-overlap"


def already_done(config: Any) -> tuple[str, ...]:
    """The flags of a config that ask for what the fused call does without being asked."""
    asked = {
        "--moe-grouped-gemm": _get(config, "moe_grouped_gemm"),
        "--moe-permute-fusion": _get(config, "moe_permute_fusion"),
        SHARED_OVERLAP: _with_shared_expert(_on("moe_shared_expert_overlap"))(config),
        "--recompute-modules moe_act": _recomputed("moe_act")(config),
    }
    return tuple(flag for flag, value in asked.items() if value)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """name: the field it is about. found: the offending value in words, None while the rule holds.

    Its message: `mok: <must>, got <found>; <remedy>`.
    """

    name: str
    found: Callable[[Any], str | None]
    must: str
    remedy: str


def _raise_broken(rules: tuple[Rule, ...], config: Any) -> None:
    broken = [
        f"mok: {rule.must}, got {found}; {rule.remedy}"
        for rule in rules
        if (found := rule.found(config)) is not None
    ]
    if broken:
        raise ValueError("\n".join(broken))


def _get(config: Any, field: str, default: Any = None) -> Any:
    return getattr(config, field, default)


def _on(field: str) -> Callable[[Any], str | None]:
    """Broken while the field is set to anything true."""
    return lambda c: f"{field}={_get(c, field)}" if _get(c, field) else None


def _given(field: str) -> Callable[[Any], str | None]:
    """Broken while the field is not None."""
    return lambda c: f"{field}={_get(c, field)}" if _get(c, field) is not None else None


def _above_one(field: str) -> Callable[[Any], str | None]:
    return lambda c: f"{field}={_get(c, field)}" if (_get(c, field) or 1) > 1 else None


def _with_shared_expert(found: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    """The rule only concerns layers that have a shared expert."""
    return lambda c: found(c) if _get(c, "moe_shared_expert_intermediate_size") else None


def _among(field: str, values: Any, unwanted: tuple[str, ...]) -> str | None:
    bad = [v for v in values or () if v in unwanted]
    return f"{field} with {', '.join(bad)}" if bad else None


def _topk(c: Any) -> str | None:
    topk, experts = _get(c, "moe_router_topk", 1), c.num_moe_experts
    return None if 1 <= topk <= experts else f"moe_router_topk={topk} with {experts} experts"


def _uneven_experts(c: Any) -> str | None:
    ep = _get(c, "expert_model_parallel_size", 1) or 1
    if c.num_moe_experts % ep == 0:
        return None
    return f"num_moe_experts={c.num_moe_experts} and expert_model_parallel_size={ep}"


def _expert_tensor_parallel(c: Any) -> str | None:
    size = _get(c, "expert_tensor_parallel_size")
    if size is None:  # Megatron's default
        size = _get(c, "tensor_model_parallel_size", 1)
    return f"expert_tensor_parallel_size={size}" if size > 1 else None


def _activation(c: Any) -> str | None:
    from torch.nn import functional  # here, so that rules and settings can be read without torch

    activation, gated = _get(c, "activation_func"), _get(c, "gated_linear_unit")
    if activation is functional.silu and gated:
        return None
    name = getattr(activation, "__name__", repr(activation))
    return f"activation_func={name} with gated_linear_unit={bool(gated)}"


def _recomputed(module: str) -> Callable[[Any], str | None]:
    def found(c: Any) -> str | None:
        if _get(c, "recompute_granularity") != "selective":
            return None
        return _among("recompute_modules", _get(c, "recompute_modules"), (module,))

    return found


def _offloaded(c: Any) -> str | None:
    if not _get(c, "fine_grained_activation_offloading"):
        return None
    inside = ("expert_fc1", "moe_act", "fused_group_mlp")
    return _among("offload_modules", _get(c, "offload_modules"), inside)


def _graph_implementation(c: Any) -> str:
    if _get(c, "enable_cuda_graph"):
        return "local"
    if _get(c, "external_cuda_graph"):
        return "transformer_engine"
    return _get(c, "cuda_graph_impl") or "none"


def _graph_modules(c: Any) -> list[str]:
    """What CUDA graphs capture, from text, enum or list, under the field's new or old name."""
    for field in ("cuda_graph_modules", "cuda_graph_scope"):
        value = _get(c, field)
        if value and value != "full":
            items = value.split(",") if isinstance(value, str) else value
            items = items if isinstance(items, list | tuple | set) else [items]
            return [str(getattr(item, "name", item)) for item in items]
    return []


def _graphs_of_moe(c: Any) -> str | None:
    if _graph_implementation(c) not in ("local", "transformer_engine"):
        return None
    names = _graph_modules(c)
    if not names or names == ["full"]:
        return f"cuda_graph_impl={_graph_implementation(c)} with no modules, that is, whole layers"
    bad = [name for name in names if name.startswith("moe")]
    return f"cuda_graph_modules with {', '.join(bad)}" if bad else None


def _graph_of_iteration(c: Any) -> str | None:
    if _graph_implementation(c) == "full_iteration" or any(
        name == "full_iteration" for name in _graph_modules(c)
    ):
        return "a full-iteration CUDA graph"
    return None


def _unordered_router(c: Any) -> str | None:
    if _get(c, "deterministic_mode") and _get(c, "moe_router_fusion"):
        return "deterministic_mode=True and moe_router_fusion=True"
    return None


def _inference_optimized(c: Any) -> str | None:
    if _get(c, "transformer_impl") == "inference_optimized":
        return "transformer_impl=inference_optimized"
    return _on("use_inference_optimized_layers")(c)


def _other_selector(c: Any) -> str | None:
    backend = _get(c, "moe_megakernel_backend")
    if backend in (None, "none", ""):
        return None
    return f"--moe-token-dispatcher-type mok and moe_megakernel_backend={backend}"


_ALLTOALL = "or use --moe-token-dispatcher-type alltoall"

RULES: tuple[Rule, ...] = (
    # Shapes.
    Rule(
        name="moe_router_topk",
        found=_topk,
        must="a token must choose at least one expert and at most all of them",
        remedy="change --moe-router-topk",
    ),
    Rule(
        name="expert_model_parallel_size",
        found=_uneven_experts,
        must="the number of experts must be divisible by the expert parallel size",
        remedy="change --expert-model-parallel-size or --num-experts",
    ),
    Rule(
        name="moe_latent_size",
        found=_on("moe_latent_size"),
        must="experts must work on the full hidden size, without a latent projection",
        remedy=f"drop --moe-latent-size, {_ALLTOALL}",
    ),
    # The expert's arithmetic.
    Rule(
        name="activation_func",
        found=_activation,
        must="experts must be SwiGLU",
        remedy=f"use --swiglu, {_ALLTOALL}",
    ),
    Rule(
        name="activation_func_clamp_value",
        found=_given("activation_func_clamp_value"),
        must="the experts' activation cannot be clamped",
        remedy=f"leave activation_func_clamp_value unset, {_ALLTOALL}",
    ),
    Rule(
        name="glu_linear_offset",
        found=_on("glu_linear_offset"),
        must="the linear half of SwiGLU cannot have an offset",
        remedy=f"set glu_linear_offset to 0, {_ALLTOALL}",
    ),
    Rule(
        name="add_bias_linear",
        found=_on("add_bias_linear"),
        must="experts cannot have biases",
        remedy=f"use --disable-bias-linear, {_ALLTOALL}",
    ),
    Rule(
        name="moe_apply_probs_on_input",
        found=_on("moe_apply_probs_on_input"),
        must="probabilities must scale the experts' activation, not their input",
        remedy=f"drop --moe-apply-probs-on-input, {_ALLTOALL}",
    ),
    Rule(
        name="moe_mlp_glu_interleave_size",
        found=_given("moe_mlp_glu_interleave_size"),
        must="an expert's first weight must have all gates, then all linear units",
        remedy=f"drop --moe-mlp-glu-interleave-size, {_ALLTOALL}",
    ),
    # How the weights are stored.
    Rule(
        name="expert_tensor_parallel_size",
        found=_expert_tensor_parallel,
        must="an expert must be whole on its rank",
        remedy=f"use --expert-tensor-parallel-size 1, {_ALLTOALL}",
    ),
    Rule(
        name="expert_gtp_weight_remat_size",
        found=_above_one("expert_gtp_weight_remat_size"),
        must="expert weights cannot be sharded and gathered on use",
        remedy=f"drop --expert-tensor-parallel-num-weight-shards, {_ALLTOALL}",
    ),
    Rule(
        name="gtp_weight_remat_size",
        found=_above_one("gtp_weight_remat_size"),
        must="weights cannot be sharded and gathered on use",
        remedy=f"drop --tensor-parallel-num-weight-shards, {_ALLTOALL}",
    ),
    Rule(
        name="moe_single_grouped_weight",
        found=_on("moe_single_grouped_weight"),
        must="each expert must have a weight of its own",
        remedy=f"drop --moe-single-grouped-weight, {_ALLTOALL}",
    ),
    Rule(
        name="moe_single_grouped_bias",
        found=_on("moe_single_grouped_bias"),
        must="experts cannot have biases",
        remedy=f"drop --moe-single-grouped-bias, {_ALLTOALL}",
    ),
    # Number formats.
    Rule(
        name="fp8",
        found=_on("fp8"),
        must="the model cannot be quantised to FP8",
        remedy=f"drop --fp8-format, {_ALLTOALL}",
    ),
    Rule(
        name="fp4",
        found=_on("fp4"),
        must="the model cannot be quantised to FP4",
        remedy=f"drop --fp4-format, {_ALLTOALL}",
    ),
    Rule(
        name="quant_recipe",
        found=lambda c: "a quant_recipe" if _get(c, "quant_recipe") is not None else None,
        must="modules cannot be quantised by a recipe",
        remedy=f"drop --te-precision-config-file and the kitchen recipe, {_ALLTOALL}",
    ),
    Rule(
        name="use_kitchen",
        found=_on("use_kitchen"),
        must="modules cannot be quantised by kitchen",
        remedy=f"drop the kitchen flags, {_ALLTOALL}",
    ),
    Rule(
        name="activation_func_fp8_input_store",
        found=_on("activation_func_fp8_input_store"),
        must="the activation's input cannot be kept in FP8",
        remedy=f"drop --activation-func-fp8-input-store, {_ALLTOALL}",
    ),
    Rule(
        name="enable_autocast",
        found=_on("enable_autocast"),
        must="the layer computes in its weights' dtype and cannot follow autocast",
        remedy=f"set enable_autocast to False and use --bf16, {_ALLTOALL}",
    ),
    Rule(
        name="batch_invariant_mode",
        found=_on("batch_invariant_mode"),
        must="results that do not depend on the batch are not promised",
        remedy=f"drop --batch-invariant-mode, {_ALLTOALL}",
    ),
    Rule(
        name="deterministic_mode",
        found=_unordered_router,
        must="a deterministic run cannot have the fused router, which adds up its auxiliary loss "
        "in any order",
        remedy="drop --moe-router-fusion or --deterministic-mode",
    ),
    # What travels.
    Rule(
        name="moe_pad_expert_input_to_capacity",
        found=_on("moe_pad_expert_input_to_capacity"),
        must="experts cannot be padded to their capacity",
        remedy="drop --moe-pad-expert-input-to-capacity (a capacity factor alone drops tokens and "
        f"works), {_ALLTOALL}",
    ),
    Rule(
        name="moe_pad_experts_for_cuda_graph_inference",
        found=_on("moe_pad_experts_for_cuda_graph_inference"),
        must="experts cannot be padded to their capacity for CUDA graphs",
        remedy=f"drop --moe-pad-experts-for-cuda-graph-inference, {_ALLTOALL}",
    ),
    Rule(
        name="moe_router_padding_for_quantization",
        found=lambda c: (
            _on("moe_router_padding_for_quantization")(c) or _on("moe_router_padding_for_fp8")(c)
        ),
        must="routes cannot be padded for quantised experts",
        remedy=f"drop --moe-router-padding-for-quantization, {_ALLTOALL}",
    ),
    Rule(
        name="moe_expert_rank_capacity_factor",
        found=_given("moe_expert_rank_capacity_factor"),
        must="a rank's received rows cannot be capped",
        remedy=f"drop --moe-expert-rank-capacity-factor, {_ALLTOALL}",
    ),
    Rule(
        name="moe_token_dropping",
        found=_on("moe_token_dropping"),
        must="tokens can be dropped by capacity factor only",
        remedy=f"use --moe-expert-capacity-factor, {_ALLTOALL}",
    ),
    # The shared expert.
    Rule(
        name="use_grouped_gemm_for_shared_expert",
        found=_with_shared_expert(_on("use_grouped_gemm_for_shared_expert")),
        must="the shared expert must be a plain MLP",
        remedy=f"drop --use-grouped-gemm-for-shared-expert, {_ALLTOALL}",
    ),
    Rule(
        name="moe_shared_expert_glu_interleave_size",
        found=_with_shared_expert(_given("moe_shared_expert_glu_interleave_size")),
        must="the shared expert's first weight must have all gates, then all linear units",
        remedy=f"drop --moe-shared-expert-glu-interleave-size, {_ALLTOALL}",
    ),
    # Who drives the layer, and when.
    Rule(
        name="overlap_moe_expert_parallel_comm",
        found=_on("overlap_moe_expert_parallel_comm"),
        must="the layer is one call and cannot overlap with another microbatch stage by stage",
        remedy=f"drop --overlap-moe-expert-parallel-comm, {_ALLTOALL}",
    ),
    Rule(
        name="ep_overlap_early_attn_memory_release",
        found=_on("ep_overlap_early_attn_memory_release"),
        must="the layer is one call and cannot overlap with another microbatch stage by stage",
        remedy=f"drop --ep-overlap-early-attn-memory-release, {_ALLTOALL}",
    ),
    Rule(
        name="delay_wgrad_compute",
        found=_on("delay_wgrad_compute"),
        must="weight gradients are part of the layer's backward and cannot be delayed",
        remedy=f"drop --delay-wgrad-compute, {_ALLTOALL}",
    ),
    Rule(
        name="overlap_dispatch_backward_with_experts_wgrad",
        found=_on("overlap_dispatch_backward_with_experts_wgrad"),
        must="weight gradients are part of the layer's backward and cannot be delayed",
        remedy=f"drop --overlap-dispatch-backward-with-experts-wgrad, {_ALLTOALL}",
    ),
    Rule(
        name="offload_modules",
        found=_offloaded,
        must="activations inside the experts cannot be offloaded",
        remedy=f"keep attention's and norms' modules in --offload-modules only, {_ALLTOALL}",
    ),
    Rule(
        name="moe_paged_stash",
        found=_on("moe_paged_stash"),
        must="the experts' activations cannot go to a paged stash",
        remedy=f"drop --moe-paged-stash, {_ALLTOALL}",
    ),
    Rule(
        name="cuda_graph_modules",
        found=_graphs_of_moe,
        must="CUDA graphs cannot capture an MoE layer or a part of it",
        remedy=f"use --cuda-graph-modules attn, {_ALLTOALL}",
    ),
    Rule(
        name="cuda_graph_impl",
        found=_graph_of_iteration,
        must="a CUDA graph cannot capture the whole iteration",
        remedy=f"use --cuda-graph-impl none, or local with --cuda-graph-modules attn, {_ALLTOALL}",
    ),
    Rule(
        name="transformer_impl",
        found=_inference_optimized,
        must="the inference-optimised layers have dispatchers of their own",
        remedy=f"use --transformer-impl local or transformer_engine, {_ALLTOALL}",
    ),
    Rule(
        name="moe_megakernel_backend",
        found=_other_selector,
        must="one selector must choose the MoE kernel",
        remedy="drop one of them",
    ),
)

# Seen in megatron.training's arguments only: when they are validated, and when a config is built
# after they are initialised.
ARGUMENT_RULES: tuple[Rule, ...] = (
    Rule(
        name="use_megatron_fsdp",
        found=lambda a: _on("use_megatron_fsdp")(a) or _on("use_custom_fsdp")(a),
        must="parameters cannot be sharded by Megatron-FSDP",
        remedy=f"use --use-distributed-optimizer in place of --use-megatron-fsdp, {_ALLTOALL}",
    ),
    Rule(
        name="use_torch_fsdp2",
        found=_on("use_torch_fsdp2"),
        must="parameters cannot be sharded by torch FSDP2",
        remedy=f"use --use-distributed-optimizer in place of --use-torch-fsdp2, {_ALLTOALL}",
    ),
    Rule(
        name="moe_use_upcycling",
        found=_on("moe_use_upcycling"),
        must="a dense checkpoint must be upcycled with Megatron's own layers",
        remedy="upcycle with --moe-token-dispatcher-type alltoall, then resume with mok",
    ),
    Rule(
        name="fake_process_group",
        found=_on("fake_process_group"),
        must="ranks must be real: rows travel between them inside the layer",
        remedy=f"drop --fake-process-group, {_ALLTOALL}",
    ),
)
