"""Every knob, and every rule that a Megatron configuration must keep to run mok.

A rule is data: what it is about, how to see that it is broken, what it says, what to do. Rules look
at a finished or unfinished TransformerConfig through its attributes alone, and a field that another
Megatron version lacks breaks none of them.

What is not refused works: Megatron's router with all its losses, biases, groups and replay;
capacity factors that drop tokens without padding; multi-token prediction; shared experts;
recomputation of the layer, of its norm and of the shared expert; tensor parallelism with sequence
parallelism; CUDA graphs of attention or of whole iterations. Flags that ask for what the fused call
does in any case are accepted and named once (`already_done`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mok_megatron.conditions import (
    above_one,
    activation,
    cold_graph_of_iteration,
    expert_tensor_parallel,
    get,
    given,
    graphs_of_moe,
    inference_optimized,
    offloaded,
    on,
    other_selector,
    recomputed,
    topk,
    uneven_experts,
    unordered_router,
    with_shared_expert,
)

BACKENDS = ("auto", "cuda", "reference")
MAX_DEADLINE = 86400  # a day


@dataclass(frozen=True, kw_only=True)
class MokConfig:
    """backend: what computes the layers, one of BACKENDS; see `mok_megatron.backends.choose`.
    max_tokens: the most tokens that a rank brings to a call of the cuda backend where ranks share a
    workspace; None: `mok_megatron.limits.max_tokens` finds it.
    row_budget: rows that a rank's buffers hold there at once, as a multiple of its share of a
    balanced routing; see `mok_megatron.limits.row_capacity`.
    deadline: seconds that a call waits there for another rank before it ends with an error.
    movers: CTAs of a call that move rows beside their matrix work there; 0: all.
    ahead: experts whose first product the cuda backend computes before the first expert's second;
    0: chosen for the shape. Neither changes a bit of any result.

    Raises ValueError for any other value.
    """

    backend: str = "auto"
    max_tokens: int | None = None
    row_budget: float = 1.25
    deadline: int = 60
    movers: int = 0
    ahead: int = 0

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
        if not 1 <= self.deadline <= MAX_DEADLINE:
            raise ValueError(
                f"mok: --mok-deadline must be 1 to {MAX_DEADLINE} seconds, got {self.deadline}; "
                "give the longest that a healthy rank may let others wait"
            )
        for flag, value in (("movers", self.movers), ("ahead", self.ahead)):
            if not 0 <= value <= 65535:
                raise ValueError(
                    f"mok: --mok-{flag} must be 0 to 65535, got {value}; 0 leaves it to the backend"
                )


def check(config: Any) -> None:
    """Refuse a TransformerConfig that asks mok for what it cannot do.

    A config with another dispatcher, or without MoE layers, breaks no rule.
    Raises ValueError, with a line for each broken rule.
    """
    if get(config, "moe_token_dispatcher_type") == "mok" and get(config, "num_moe_experts"):
        _raise_broken(RULES, config)


def check_arguments(arguments: Any) -> None:
    """The same for what only megatron.training's arguments show; None breaks no rule."""
    if get(arguments, "moe_token_dispatcher_type") == "mok" and get(arguments, "num_experts"):
        _raise_broken(ARGUMENT_RULES, arguments)


SHARED_OVERLAP = "--moe-shared-expert-overlap"


def already_done(config: Any) -> tuple[str, ...]:
    """The flags of a config that ask for what the fused call does without being asked."""
    asked = {
        "--moe-grouped-gemm": get(config, "moe_grouped_gemm"),
        "--moe-permute-fusion": get(config, "moe_permute_fusion"),
        SHARED_OVERLAP: with_shared_expert(on("moe_shared_expert_overlap"))(config),
        "--recompute-modules moe_act": recomputed("moe_act")(config),
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


_ALLTOALL = "or use --moe-token-dispatcher-type alltoall"

RULES: tuple[Rule, ...] = (
    # Shapes.
    Rule(
        name="moe_router_topk",
        found=topk,
        must="a token must choose at least one expert and at most all of them",
        remedy="change --moe-router-topk",
    ),
    Rule(
        name="expert_model_parallel_size",
        found=uneven_experts,
        must="the number of experts must be divisible by the expert parallel size",
        remedy="change --expert-model-parallel-size or --num-experts",
    ),
    Rule(
        name="moe_latent_size",
        found=on("moe_latent_size"),
        must="experts must work on the full hidden size, without a latent projection",
        remedy=f"drop --moe-latent-size, {_ALLTOALL}",
    ),
    # The expert's arithmetic.
    Rule(
        name="activation_func",
        found=activation,
        must="experts must be SwiGLU",
        remedy=f"use --swiglu, {_ALLTOALL}",
    ),
    Rule(
        name="activation_func_clamp_value",
        found=given("activation_func_clamp_value"),
        must="the experts' activation cannot be clamped",
        remedy=f"leave activation_func_clamp_value unset, {_ALLTOALL}",
    ),
    Rule(
        name="glu_linear_offset",
        found=on("glu_linear_offset"),
        must="the linear half of SwiGLU cannot have an offset",
        remedy=f"set glu_linear_offset to 0, {_ALLTOALL}",
    ),
    Rule(
        name="add_bias_linear",
        found=on("add_bias_linear"),
        must="experts cannot have biases",
        remedy=f"use --disable-bias-linear, {_ALLTOALL}",
    ),
    Rule(
        name="moe_apply_probs_on_input",
        found=on("moe_apply_probs_on_input"),
        must="probabilities must scale the experts' activation, not their input",
        remedy=f"drop --moe-apply-probs-on-input, {_ALLTOALL}",
    ),
    Rule(
        name="moe_mlp_glu_interleave_size",
        found=given("moe_mlp_glu_interleave_size"),
        must="an expert's first weight must have all gates, then all linear units",
        remedy=f"drop --moe-mlp-glu-interleave-size, {_ALLTOALL}",
    ),
    # How the weights are stored.
    Rule(
        name="expert_tensor_parallel_size",
        found=expert_tensor_parallel,
        must="an expert must be whole on its rank",
        remedy=f"use --expert-tensor-parallel-size 1, {_ALLTOALL}",
    ),
    Rule(
        name="expert_gtp_weight_remat_size",
        found=above_one("expert_gtp_weight_remat_size"),
        must="expert weights cannot be sharded and gathered on use",
        remedy=f"drop --expert-tensor-parallel-num-weight-shards, {_ALLTOALL}",
    ),
    Rule(
        name="gtp_weight_remat_size",
        found=above_one("gtp_weight_remat_size"),
        must="weights cannot be sharded and gathered on use",
        remedy=f"drop --tensor-parallel-num-weight-shards, {_ALLTOALL}",
    ),
    Rule(
        name="moe_single_grouped_bias",
        found=on("moe_single_grouped_bias"),
        must="experts cannot have biases",
        remedy=f"drop --moe-single-grouped-bias, {_ALLTOALL}",
    ),
    # Number formats.
    Rule(
        name="fp16",
        found=on("fp16"),
        must="the model must be in BF16, or in FP32 on the reference backend",
        remedy=f"use --bf16, {_ALLTOALL}",
    ),
    Rule(
        name="fp8",
        found=on("fp8"),
        must="the model cannot be quantised to FP8",
        remedy=f"drop --fp8-format, {_ALLTOALL}",
    ),
    Rule(
        name="fp4",
        found=on("fp4"),
        must="the model cannot be quantised to FP4",
        remedy=f"drop --fp4-format, {_ALLTOALL}",
    ),
    Rule(
        name="quant_recipe",
        found=lambda c: "a quant_recipe" if get(c, "quant_recipe") is not None else None,
        must="modules cannot be quantised by a recipe",
        remedy=f"drop --te-precision-config-file and the kitchen recipe, {_ALLTOALL}",
    ),
    Rule(
        name="use_kitchen",
        found=on("use_kitchen"),
        must="modules cannot be quantised by kitchen",
        remedy=f"drop the kitchen flags, {_ALLTOALL}",
    ),
    Rule(
        name="activation_func_fp8_input_store",
        found=on("activation_func_fp8_input_store"),
        must="the activation's input cannot be kept in FP8",
        remedy=f"drop --activation-func-fp8-input-store, {_ALLTOALL}",
    ),
    Rule(
        name="enable_autocast",
        found=on("enable_autocast"),
        must="the layer computes in its weights' dtype and cannot follow autocast",
        remedy=f"set enable_autocast to False and use --bf16, {_ALLTOALL}",
    ),
    Rule(
        name="batch_invariant_mode",
        found=on("batch_invariant_mode"),
        must="results that do not depend on the batch are not promised",
        remedy=f"drop --batch-invariant-mode, {_ALLTOALL}",
    ),
    Rule(
        name="deterministic_mode",
        found=unordered_router,
        must="a deterministic run cannot have the fused router, which adds up its auxiliary loss "
        "in any order",
        remedy="drop --moe-router-fusion or --deterministic-mode",
    ),
    # What travels.
    Rule(
        name="moe_pad_expert_input_to_capacity",
        found=on("moe_pad_expert_input_to_capacity"),
        must="experts cannot be padded to their capacity",
        remedy="drop --moe-pad-expert-input-to-capacity (a capacity factor alone drops tokens and "
        f"works), {_ALLTOALL}",
    ),
    Rule(
        name="moe_pad_experts_for_cuda_graph_inference",
        found=on("moe_pad_experts_for_cuda_graph_inference"),
        must="experts cannot be padded to their capacity for CUDA graphs",
        remedy=f"drop --moe-pad-experts-for-cuda-graph-inference, {_ALLTOALL}",
    ),
    Rule(
        name="moe_router_padding_for_quantization",
        found=lambda c: (
            on("moe_router_padding_for_quantization")(c) or on("moe_router_padding_for_fp8")(c)
        ),
        must="routes cannot be padded for quantised experts",
        remedy=f"drop --moe-router-padding-for-quantization, {_ALLTOALL}",
    ),
    Rule(
        name="moe_expert_rank_capacity_factor",
        found=given("moe_expert_rank_capacity_factor"),
        must="a rank's received rows cannot be capped",
        remedy=f"drop --moe-expert-rank-capacity-factor, {_ALLTOALL}",
    ),
    Rule(
        name="moe_token_dropping",
        found=on("moe_token_dropping"),
        must="tokens can be dropped by capacity factor only",
        remedy=f"use --moe-expert-capacity-factor, {_ALLTOALL}",
    ),
    # The shared expert.
    Rule(
        name="use_grouped_gemm_for_shared_expert",
        found=with_shared_expert(on("use_grouped_gemm_for_shared_expert")),
        must="the shared expert must be a plain MLP",
        remedy=f"drop --use-grouped-gemm-for-shared-expert, {_ALLTOALL}",
    ),
    Rule(
        name="moe_shared_expert_glu_interleave_size",
        found=with_shared_expert(given("moe_shared_expert_glu_interleave_size")),
        must="the shared expert's first weight must have all gates, then all linear units",
        remedy=f"drop --moe-shared-expert-glu-interleave-size, {_ALLTOALL}",
    ),
    # Who drives the layer, and when.
    Rule(
        name="overlap_moe_expert_parallel_comm",
        found=on("overlap_moe_expert_parallel_comm"),
        must="the layer is one call and cannot overlap with another microbatch stage by stage",
        remedy=f"drop --overlap-moe-expert-parallel-comm, {_ALLTOALL}",
    ),
    Rule(
        name="ep_overlap_early_attn_memory_release",
        found=on("ep_overlap_early_attn_memory_release"),
        must="the layer is one call and cannot overlap with another microbatch stage by stage",
        remedy=f"drop --ep-overlap-early-attn-memory-release, {_ALLTOALL}",
    ),
    Rule(
        name="delay_wgrad_compute",
        found=on("delay_wgrad_compute"),
        must="weight gradients are part of the layer's backward and cannot be delayed",
        remedy=f"drop --delay-wgrad-compute, {_ALLTOALL}",
    ),
    Rule(
        name="overlap_dispatch_backward_with_experts_wgrad",
        found=on("overlap_dispatch_backward_with_experts_wgrad"),
        must="weight gradients are part of the layer's backward and cannot be delayed",
        remedy=f"drop --overlap-dispatch-backward-with-experts-wgrad, {_ALLTOALL}",
    ),
    Rule(
        name="offload_modules",
        found=offloaded,
        must="activations inside the experts cannot be offloaded",
        remedy=f"keep attention's and norms' modules in --offload-modules only, {_ALLTOALL}",
    ),
    Rule(
        name="moe_paged_stash",
        found=on("moe_paged_stash"),
        must="the experts' activations cannot go to a paged stash",
        remedy=f"drop --moe-paged-stash, {_ALLTOALL}",
    ),
    Rule(
        name="cuda_graph_modules",
        found=graphs_of_moe,
        must="CUDA graphs cannot capture an MoE layer or a part of it",
        remedy=f"use --cuda-graph-modules attn, {_ALLTOALL}",
    ),
    Rule(
        name="cuda_graph_impl",
        found=cold_graph_of_iteration,
        must="an iteration must have run before a CUDA graph captures it, since kernels load and "
        "buffers are made then",
        remedy="use --cuda-graph-warmup-steps 1 or more",
    ),
    Rule(
        name="transformer_impl",
        found=inference_optimized,
        must="the inference-optimised layers have dispatchers of their own",
        remedy=f"use --transformer-impl local or transformer_engine, {_ALLTOALL}",
    ),
    Rule(
        name="moe_megakernel_backend",
        found=other_selector,
        must="one selector must choose the MoE kernel",
        remedy="drop one of them",
    ),
)

# Seen in megatron.training's arguments only: when they are validated, and when a config is built
# after they are initialised.
ARGUMENT_RULES: tuple[Rule, ...] = (
    Rule(
        name="use_megatron_fsdp",
        found=lambda a: on("use_megatron_fsdp")(a) or on("use_custom_fsdp")(a),
        must="parameters cannot be sharded by Megatron-FSDP",
        remedy=f"use --use-distributed-optimizer in place of --use-megatron-fsdp, {_ALLTOALL}",
    ),
    Rule(
        name="use_torch_fsdp2",
        found=on("use_torch_fsdp2"),
        must="parameters cannot be sharded by torch FSDP2",
        remedy=f"use --use-distributed-optimizer in place of --use-torch-fsdp2, {_ALLTOALL}",
    ),
    Rule(
        name="optimizer_cuda_graph",
        found=on("optimizer_cuda_graph"),
        must="the host must look for faults of the device before each optimizer step, which a "
        "graph's replay does not",
        remedy=f"drop --optimizer-cuda-graph, {_ALLTOALL}",
    ),
    Rule(
        name="moe_use_upcycling",
        found=on("moe_use_upcycling"),
        must="a dense checkpoint must be upcycled with Megatron's own layers",
        remedy="upcycle with --moe-token-dispatcher-type alltoall, then resume with mok",
    ),
    Rule(
        name="fake_process_group",
        found=on("fake_process_group"),
        must="ranks must be real: rows travel between them inside the layer",
        remedy=f"drop --fake-process-group, {_ALLTOALL}",
    ),
)
