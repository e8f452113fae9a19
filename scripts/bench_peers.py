"""The peers a user could have instead, where they are installed: Megatron with TE, and SonicMoE.

Megatron  Its own MoELayer on alltoall, built by its own spec: TEGroupedMLP, TE's fused permute, the
          fused weighted SwiGLU, main_grad accumulated in TE's products. Only the router is
          replaced, by the problem's dense routing. TE picks one of its two grouped products at each
          call from NVTE_USE_CUTLASS_GROUPED_GEMM; both are arms. On a CPU (the product's shim)
          experts are Megatron's SequentialMLP: that proves this file, not a speed. The flex
          dispatcher is no arm: it refuses a group of one rank.
SonicMoE  moe_general_routing_inputs over the top-k tensors, gate rows above up rows as we keep
          them, in training mode. Its products take their default tile unless `autotune`: its tuner
          has been seen to need minutes a shape. It has no shared expert; torch computes that.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_arms import Absent, Arm, one_by_one, shared_expert
from bench_problem import Problem
from torch import Tensor

_CUTLASS = "NVTE_USE_CUTLASS_GROUPED_GEMM"


class MegatronArm(Arm):
    """alltoall + TEGroupedMLP with per-expert cuBLAS, TE's default."""

    name, label = "megatron", "Megatron alltoall + TE, cuBLAS"
    dense = True
    cutlass = False

    def __init__(self, problem: Problem, *, accumulate: bool) -> None:
        on_gpu = problem.device.type == "cuda"
        if on_gpu:
            _must_be_installed("megatron.core", "Megatron-Core")
            _must_be_installed("transformer_engine.pytorch", "Transformer Engine")
        elif self.cutlass:
            raise Absent("CUTLASS products need a GPU")
        self.fused = on_gpu  # TE's products add; SequentialMLP's on a CPU do not
        if not on_gpu:
            self.label = "Megatron alltoall + SequentialMLP"
        self.layer = _layer(problem, accumulate)
        super().__init__(problem, accumulate=accumulate)
        if accumulate and self.fused:
            for parameter, place in zip(self.weights, self.places(), strict=True):
                parameter.main_grad = place  # type: ignore[attr-defined] # as Megatron's DDP does
                parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        routing = (self.prob, problem.routing_map_TE)
        self.layer.route = lambda hidden_states, padding_mask=None: routing

    def weight_leaves(self) -> list[Tensor]:
        """Megatron's own parameters, moved onto the problem's memory."""
        from mok_megatron.parameters import read_weights

        shared = self.layer.shared_experts if self.problem.shape.shared_ffn else None
        parameters = list(read_weights(self.layer.experts, shared).flat())
        for parameter, w in zip(
            parameters, one_by_one(self.problem, self.problem.weights), strict=True
        ):
            parameter.data = w
        return parameters

    def places(self) -> list[Tensor]:
        return one_by_one(self.problem, self.problem.main)

    def forward(self) -> Tensor:
        with self._path():
            y_T1H, _ = self.layer(self.x_TH.unsqueeze(1))
        y_TH: Tensor = y_T1H.squeeze(1)
        return y_TH

    def backward(self, y_TH: Tensor) -> None:
        with self._path():
            super().backward(y_TH)

    @contextlib.contextmanager
    def _path(self) -> Iterator[None]:
        """TE reads the variable at each call."""
        before = os.environ.pop(_CUTLASS, None)
        if self.cutlass:
            os.environ[_CUTLASS] = "1"
        try:
            yield
        finally:
            os.environ.pop(_CUTLASS, None)
            if before is not None:
                os.environ[_CUTLASS] = before


class MegatronCutlassArm(MegatronArm):
    """The same with TE's CUTLASS grouped products."""

    name, label = "megatron-cutlass", "Megatron alltoall + TE, CUTLASS"
    cutlass = True


class SonicArm(Arm):
    """SonicMoE."""

    name, label = "sonic", "SonicMoE"
    autotune = False

    def __init__(self, problem: Problem, *, accumulate: bool) -> None:
        if problem.device.type != "cuda":
            raise Absent("SonicMoE needs a GPU")
        _must_be_installed("sonicmoe", "SonicMoE")
        super().__init__(problem, accumulate=accumulate)
        self.package = _sonic(self.autotune)
        self.swiglu = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
        shape = problem.shape
        self.expert_N = problem.expert_TK.flatten()
        self.token_N = torch.arange(shape.tokens, dtype=torch.int32, device=problem.device)
        self.token_N = self.token_N.repeat_interleave(shape.top_k)
        self.stream = torch.cuda.current_stream().cuda_stream

    def forward(self) -> Tensor:
        w1, w2, *shared = self.weights
        y_TH: Tensor
        y_TH, _ = self.package.moe_general_routing_inputs(
            self.x_TH,
            self.prob.flatten(),
            self.token_N,
            self.expert_N,
            w1.permute(1, 2, 0),
            None,
            w2.permute(1, 2, 0),
            None,
            self.problem.shape.experts,
            self.stream,
            self.swiglu,
            False,  # not inference: keep what backward needs
            concat_layout=True,
        )
        return y_TH + shared_expert(self.x_TH, *shared) if shared else y_TH


def _must_be_installed(module: str, name: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of its parent
        found = None
    if found is None:
        raise Absent(f"{name} is not installed")


@cache
def _sonic(autotune: bool) -> Any:
    """The package, with its products bound to the default tile unless they are to be tuned."""
    try:
        package = importlib.import_module("sonicmoe")
        for part in ("forward", "backward") if not autotune else ():
            module = importlib.import_module(f"sonicmoe.functional.{part}")
            for name in ("gemm", "gemm_gated", "gemm_dgated"):
                if hasattr(module, name):
                    setattr(module, name, partial(getattr(module, name), tuned=False))
    except ImportError as error:
        raise Absent(f"SonicMoE does not import: {error}") from error
    return package


def _layer(problem: Problem, accumulate: bool) -> Any:
    """Megatron's MoELayer of the problem's shape, in training mode, with weights of its own."""
    on_gpu = problem.device.type == "cuda"
    _start_megatron(on_gpu)
    try:
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
        from megatron.core.transformer import TransformerConfig
    except ImportError as error:
        raise Absent(f"Megatron-Core does not import: {error}") from error
    shape = problem.shape
    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=1,
        num_moe_experts=shape.experts,
        moe_router_topk=shape.top_k,
        moe_ffn_hidden_size=shape.ffn,
        moe_shared_expert_intermediate_size=shape.shared_ffn or None,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=on_gpu,
        moe_permute_fusion=on_gpu,
        bias_activation_fusion=on_gpu,
        gradient_accumulation_fusion=on_gpu and accumulate,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        perform_initialization=False,
    )
    build = get_moe_module_spec(use_te=on_gpu, num_experts=shape.experts, moe_grouped_gemm=on_gpu)
    return build(config, layer_number=1).to(problem.device, torch.bfloat16).train()


@cache
def _start_megatron(on_gpu: bool) -> None:
    """A world of one rank, which talks to nobody. On a CPU this shows the whole process a fake CUDA
    device."""
    if not on_gpu:
        from mok_megatron import cpu

        cpu.install()
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
