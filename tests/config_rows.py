"""Configurations of Megatron that work with mok, and those that are refused, one a row.

test_config.py makes each of them; scripts/flag_table.py says which flags they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.activations import squared_relu
from torch.nn import functional

PLAIN: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "mok",
    "activation_func": functional.silu,
    "gated_linear_unit": True,
    "add_bias_linear": False,
}
SHARED = {"moe_shared_expert_intermediate_size": 32}
SIGMOID = {"moe_router_score_function": "sigmoid"}
SELECTIVE = {"recompute_granularity": "selective"}
FP8 = {"fp8": "hybrid"}


@dataclass(frozen=True)
class Works:
    id: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """`rule`: a name in RULES; `words` of its message: rule | value | remedy."""

    rule: str
    fields: dict[str, Any]
    words: str


WORKS = [
    Works("plain"),
    Works("top1", {"moe_router_topk": 1, "moe_router_pre_softmax": True}),
    Works("every-expert", {"moe_router_topk": 8}),
    Works("aux-loss", {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}),
    Works("seq-aux-loss", {"moe_router_load_balancing_type": "seq_aux_loss"}),
    Works("global-aux-loss", {"moe_router_load_balancing_type": "global_aux_loss"}),
    Works(
        "two-aux-losses",
        {
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
            "moe_aux_loss_coeff": [1e-2, 1e-3],
        },
    ),
    Works("sinkhorn", {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1}),
    Works("no-balancing", {"moe_router_load_balancing_type": "none"}),
    Works("z-loss", {"moe_z_loss_coeff": 1e-3}),
    Works("sigmoid", SIGMOID),
    Works("expert-bias", {**SIGMOID, "moe_router_enable_expert_bias": True}),
    Works("group-limited", {**SIGMOID, "moe_router_num_groups": 4, "moe_router_group_topk": 2}),
    Works("scaling-factor", {**SIGMOID, "moe_router_topk_scaling_factor": 2.5}),
    Works("router-in-fp64", {"moe_router_dtype": "fp64"}),
    Works("jitter", {"moe_input_jitter_eps": 0.1}),
    Works("forced-balance", {"moe_router_force_load_balancing": True}),
    Works("router-replay", {"moe_enable_routing_replay": True}),
    Works("capacity-drops", {"moe_expert_capacity_factor": 1.0}),
    Works(
        "capacity-drops-by-position",
        {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "position"},
    ),
    Works("dense-first-layer", {"moe_layer_freq": [0, 1]}),
    Works("shared-expert", SHARED),
    Works("shared-expert-gate", {**SHARED, "moe_shared_expert_gate": True}),
    Works("shared-expert-overlap", {**SHARED, "moe_shared_expert_overlap": True}),
    Works("router-fusion", {"moe_router_fusion": True}),
    Works("deterministic", {"deterministic_mode": True}),
    Works("recompute-moe", {**SELECTIVE, "recompute_modules": ["moe"]}),
    Works(
        "recompute-activation",
        {**SELECTIVE, "recompute_modules": ["moe_act"], "moe_grouped_gemm": True},
    ),
    Works("recompute-attention", {**SELECTIVE, "recompute_modules": ["core_attn"]}),
    Works("recompute-norm", {**SELECTIVE, "recompute_modules": ["layernorm"]}),
    Works(
        "recompute-shared-expert",
        {**SHARED, **SELECTIVE, "recompute_modules": ["shared_experts"]},
    ),
    Works(
        "recompute-everything",
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
    Works("deprecated-recompute-flag", {"moe_layer_recompute": True}),
    Works("multi-token-prediction", {"mtp_num_layers": 1, "mtp_use_repeated_layer": True}),
    Works("expert-parallel", {"expert_model_parallel_size": 4}),
    Works(
        "tensor-parallel",
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_tensor_parallel_size": 1,
        },
    ),
    Works("grouped-gemm-experts", {"moe_grouped_gemm": True}),
    Works("variable-sequence-lengths", {"variable_seq_lengths": True}),
    Works("bf16", {"bf16": True, "params_dtype": torch.bfloat16}),
    Works("attention-graph", {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]}),
    Works("attention-graph-old-name", {"cuda_graph_impl": "local", "cuda_graph_scope": "attn"}),
    Works("iteration-graph", {"cuda_graph_impl": "full_iteration"}),
    Works(
        "iteration-graph-old-name",
        {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"},
    ),
    Works("graph-modules-without-graphs", {"cuda_graph_modules": ["moe_router"]}),
    Works(
        "attention-offload",
        {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]},
    ),
    Works("offload-modules-without-offload", {"offload_modules": ["expert_fc1"]}),
    Works("recompute-modules-without-recompute", {"recompute_modules": ["moe_act"]}),
    Works("overlap-without-shared-expert", {"moe_shared_expert_overlap": True}),
    Works("no-moe-layers", {"num_moe_experts": None, "moe_ffn_hidden_size": None}),
    Works(
        "no-moe-layers-and-bias",
        {"num_moe_experts": None, "moe_ffn_hidden_size": None, "add_bias_linear": True},
    ),
]

REFUSED = [
    Refused("moe_router_topk", {"moe_router_topk": 9}, "at most all | 9 | --moe-router-topk"),
    Refused("moe_router_topk", {"moe_router_topk": 0}, "at least one | 0 | --moe-router-topk"),
    Refused(
        "expert_model_parallel_size",
        {"expert_model_parallel_size": 3},
        "divisible | expert_model_parallel_size=3 | --expert-model-parallel-size",
    ),
    Refused("moe_latent_size", {"moe_latent_size": 16}, "latent | 16 | --moe-latent-size"),
    Refused(
        "activation_func",
        {"activation_func": functional.gelu},
        "SwiGLU | activation_func=gelu | --swiglu",
    ),
    Refused(
        "activation_func",
        {"gated_linear_unit": False},
        "SwiGLU | gated_linear_unit=False | --swiglu",
    ),
    Refused(
        "activation_func",
        {"activation_func": squared_relu, "gated_linear_unit": False},
        "SwiGLU | squared_relu | --swiglu",
    ),
    Refused(
        "activation_func_clamp_value",
        {"activation_func_clamp_value": 7.0},
        "clamped | 7.0 | activation_func_clamp_value unset",
    ),
    Refused(
        "glu_linear_offset", {"glu_linear_offset": 1.0}, "offset | 1.0 | glu_linear_offset to 0"
    ),
    Refused(
        "add_bias_linear",
        {"add_bias_linear": True},
        "biases | add_bias_linear=True | --disable-bias-linear",
    ),
    Refused(
        "moe_apply_probs_on_input",
        {"moe_apply_probs_on_input": True},
        "scale | moe_apply_probs_on_input=True | --moe-apply-probs-on-input",
    ),
    Refused(
        "moe_mlp_glu_interleave_size",
        {"moe_mlp_glu_interleave_size": 32},
        "all gates | 32 | --moe-mlp-glu-interleave-size",
    ),
    Refused(
        "expert_tensor_parallel_size",
        {"expert_tensor_parallel_size": 2},
        "whole on its rank | expert_tensor_parallel_size=2 | --expert-tensor-parallel-size 1",
    ),
    Refused(
        "expert_tensor_parallel_size",
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "whole on its rank | expert_tensor_parallel_size=2 | --expert-tensor-parallel-size 1",
    ),
    Refused(
        "expert_gtp_weight_remat_size",
        {"expert_tensor_parallel_num_weight_shards": 2},
        "expert weights cannot be sharded | 2 | --expert-tensor-parallel-num-weight-shards",
    ),
    Refused(
        "gtp_weight_remat_size",
        {"tensor_parallel_num_weight_shards": 2},
        "weights cannot be sharded | 2 | --tensor-parallel-num-weight-shards",
    ),
    Refused(
        "moe_single_grouped_bias",
        {"moe_single_grouped_bias": True, "moe_grouped_gemm": True},
        "biases | True | --moe-single-grouped-bias",
    ),
    Refused(
        "fp16", {"fp16": True, "params_dtype": torch.float16}, "in BF16 | fp16=True | use --bf16"
    ),
    Refused("fp8", FP8, "FP8 | fp8=hybrid | --fp8-format"),
    Refused("fp8", {**FP8, "fp8_recipe": "mxfp8", "fp8_param": True}, "FP8 | hybrid | --fp8-for"),
    Refused("fp4", {"fp4": "e2m1"}, "FP4 | fp4=e2m1 | --fp4-format"),
    Refused(
        "quant_recipe",
        {"quant_recipe": SimpleNamespace()},
        "recipe | a quant_recipe | --te-precision-config-file",
    ),
    Refused("use_kitchen", {"use_kitchen": True}, "kitchen | use_kitchen=True | kitchen flags"),
    Refused(
        "activation_func_fp8_input_store",
        {"activation_func_fp8_input_store": True},
        "FP8 | activation_func_fp8_input_store=True | --activation-func-fp8-input-store",
    ),
    Refused("enable_autocast", {"enable_autocast": True}, "autocast | True | --bf16"),
    Refused(
        "batch_invariant_mode",
        {"batch_invariant_mode": True},
        "do not depend on the batch | True | --batch-invariant-mode",
    ),
    Refused(
        "deterministic_mode",
        {"deterministic_mode": True, "moe_router_fusion": True},
        "any order | deterministic_mode=True and moe_router_fusion=True | drop --moe-router-fusion",
    ),
    Refused(
        "moe_pad_expert_input_to_capacity",
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        "padded to their capacity | True | --moe-pad-expert-input-to-capacity",
    ),
    Refused(
        "moe_pad_experts_for_cuda_graph_inference",
        {"moe_pad_experts_for_cuda_graph_inference": True},
        "padded to their capacity | True | --moe-pad-experts-for-cuda-graph-inference",
    ),
    Refused(
        "moe_router_padding_for_quantization",
        {"moe_router_padding_for_quantization": True},
        "be padded | moe_router_padding_for_quantization | --moe-router-padding-for-quantization",
    ),
    Refused(
        "moe_router_padding_for_quantization",
        {"moe_router_padding_for_fp8": True},
        "be padded | padding_for_fp8=True | --moe-router-padding-for-quantization",
    ),
    Refused(
        "moe_expert_rank_capacity_factor",
        {"moe_expert_rank_capacity_factor": 1.5, "moe_flex_dispatcher_backend": "hybridep"},
        "capped | 1.5 | --moe-expert-rank-capacity-factor",
    ),
    Refused(
        "moe_token_dropping",
        {"moe_token_dropping": True},
        "by capacity factor only | True | --moe-expert-capacity-factor",
    ),
    Refused(
        "use_grouped_gemm_for_shared_expert",
        {**SHARED, "use_grouped_gemm_for_shared_expert": True},
        "plain MLP | True | --use-grouped-gemm-for-shared-expert",
    ),
    Refused(
        "moe_shared_expert_glu_interleave_size",
        {**SHARED, "moe_shared_expert_glu_interleave_size": 32},
        "all gates | 32 | --moe-shared-expert-glu-interleave-size",
    ),
    Refused(
        "overlap_moe_expert_parallel_comm",
        {"overlap_moe_expert_parallel_comm": True, "expert_model_parallel_size": 2},
        "stage by stage | True | --overlap-moe-expert-parallel-comm",
    ),
    Refused(
        "ep_overlap_early_attn_memory_release",
        {"ep_overlap_early_attn_memory_release": True},
        "stage by stage | True | --ep-overlap-early-attn-memory-release",
    ),
    Refused(
        "delay_wgrad_compute",
        {"delay_wgrad_compute": True},
        "cannot be delayed | True | --delay-wgrad-compute",
    ),
    Refused(
        "overlap_dispatch_backward_with_experts_wgrad",
        {"overlap_dispatch_backward_with_experts_wgrad": True},
        "cannot be delayed | True | --overlap-dispatch-backward-with-experts-wgrad",
    ),
    Refused(
        "offload_modules",
        {
            "fine_grained_activation_offloading": True,
            "offload_modules": ["core_attn", "expert_fc1", "moe_act"],
        },
        "cannot be offloaded | expert_fc1, moe_act | --offload-modules",
    ),
    Refused("moe_paged_stash", {"moe_paged_stash": True}, "paged stash | True | --moe-paged-stash"),
    Refused(
        "cuda_graph_modules",
        {"cuda_graph_impl": "local"},
        "cannot capture an MoE layer | no modules | --cuda-graph-modules attn",
    ),
    Refused(
        "cuda_graph_modules",
        {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "moe_router"]},
        "cannot capture an MoE layer | moe_router | --cuda-graph-modules attn",
    ),
    Refused(
        "cuda_graph_modules",
        {
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_modules": "moe_router,moe_preprocess",
        },
        "cannot capture an MoE layer | moe_router, moe_preprocess | --cuda-graph-modules attn",
    ),
    Refused(
        "cuda_graph_modules",
        {"enable_cuda_graph": True},
        "cannot capture an MoE layer | cuda_graph_impl=local | --cuda-graph-modules attn",
    ),
    Refused(
        "cuda_graph_modules",
        {"external_cuda_graph": True, "cuda_graph_scope": ["moe"]},
        "cannot capture an MoE layer | moe | --cuda-graph-modules attn",
    ),
    Refused(
        "cuda_graph_modules",
        {"cuda_graph_impl": "local", "cuda_graph_modules": "full_iteration_inference"},
        "cannot capture an MoE layer | no modules | --cuda-graph-modules attn",
    ),
    Refused(
        "cuda_graph_impl",
        {"cuda_graph_impl": "full_iteration", "cuda_graph_warmup_steps": 0},
        "have run before | cuda_graph_warmup_steps=0 | --cuda-graph-warmup-steps 1",
    ),
    Refused(
        "cuda_graph_impl",
        {
            "cuda_graph_impl": "local",
            "cuda_graph_modules": "full_iteration",
            "cuda_graph_warmup_steps": 0,
        },
        "have run before | cuda_graph_warmup_steps=0 | --cuda-graph-warmup-steps 1",
    ),
    Refused(
        "transformer_impl",
        {"transformer_impl": "inference_optimized"},
        "dispatchers of their own | inference_optimized | --transformer-impl local",
    ),
    Refused(
        "transformer_impl",
        {"use_inference_optimized_layers": True},
        "dispatchers of their own | use_inference_optimized_layers=True | --transformer-impl local",
    ),
]

# A flag of megatron.training, and words of the remedy.
REFUSED_ARGUMENTS = [
    ("use_megatron_fsdp", "--use-distributed-optimizer"),
    ("use_torch_fsdp2", "--use-distributed-optimizer"),
    ("optimizer_cuda_graph", "drop --optimizer-cuda-graph"),
    ("moe_use_upcycling", "then resume with mok"),
    ("fake_process_group", "drop --fake-process-group"),
]
