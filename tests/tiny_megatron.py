"""Small Megatron-Core models and a training loop, on whichever dispatcher a test asks for.

Everything runs in a rank that `tests.ranks.run_ranks` started, on the CPU shim, or all ranks on one
GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import mok_megatron
from mok_megatron import cpu
from tests import shared_gpu

VOCABULARY, SEQUENCE = 256, 32

BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 128,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_router_dtype": "fp32",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
}
DEEPSEEK_V3: dict[str, Any] = BASE | {
    "moe_layer_freq": [0, 1],
    "moe_shared_expert_intermediate_size": 48,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_pre_softmax": True,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-3,
}
QWEN3: dict[str, Any] = BASE | {
    "num_query_groups": 2,
    "qk_layernorm": True,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-3,
    "moe_z_loss_coeff": 1e-3,
}


def set_up(*, expert_parallel: int, seed: int = 1234, device: str = "cpu", **groups: Any) -> None:
    """Shim, plugin and Megatron's process groups and random states for this rank.

    `device`: the shim's cpu, or cuda, where all ranks are on the first GPU. `groups`: more of
    initialize_model_parallel's arguments. A second call replaces the groups.
    """
    if device == "cpu":
        cpu.install()
    else:
        shared_gpu.install()
    mok_megatron.activate()
    from megatron.core import parallel_state, tensor_parallel

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=expert_parallel, expert_tensor_parallel_size=1, **groups
    )
    tensor_parallel.random.initialize_rng_tracker(force_reset=True)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)


def config(dispatcher: str, base: dict[str, Any], **overrides: Any) -> Any:
    """A TransformerConfig for the groups that are set up."""
    from megatron.core import parallel_state as groups
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    tensor = groups.get_tensor_model_parallel_world_size()
    kind = MLATransformerConfig if base.get("multi_latent_attention") else TransformerConfig
    return kind(
        **base
        | {
            "moe_token_dispatcher_type": dispatcher,
            "expert_model_parallel_size": groups.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": 1,
            "tensor_model_parallel_size": tensor,
            "sequence_parallel": tensor > 1,
            "context_parallel_size": groups.get_context_parallel_world_size(),
            "pipeline_model_parallel_size": groups.get_pipeline_model_parallel_world_size(),
            "virtual_pipeline_model_parallel_size": (
                groups.get_virtual_pipeline_model_parallel_world_size()
            ),
            "pipeline_dtype": overrides.get("params_dtype", torch.float32),
        }
        | overrides
    )


def reseed(seed: int = 1234) -> None:
    """Both dispatchers start from the same random states."""
    from megatron.core import tensor_parallel

    tensor_parallel.random.initialize_rng_tracker(force_reset=True)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)


def moe_layer(dispatcher: str, base: dict[str, Any], **overrides: Any) -> Any:
    """One MoE layer from Megatron's own local spec, identically initialised for every
    dispatcher."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    reseed()
    cfg = config(dispatcher, base, **overrides)
    build = get_moe_module_spec(use_te=False, num_experts=cfg.num_moe_experts)
    layer = build(cfg, layer_number=1)
    return layer.to(cfg.params_dtype)


@dataclass(kw_only=True)
class Training:
    """A GPT model under DDP with Megatron's optimizer and schedule, and its data.

    A pipeline rank holds one chunk of the model, or several when it is interleaved. `freeze` is a
    pattern of parameter names. `lengths`: how many tokens a sequence of each micro-batch has.
    `engine`: every layer is of Transformer Engine's modules; with `grouped` the MoE layers alone,
    with a TEGroupedMLP. Megatron's local spec has no attention for context parallelism and no norms
    for sequence parallelism: without `attention`, layers are MoE or MLP alone; with tensor
    parallelism, norms are `SequenceNorm`.
    """

    dispatcher: str
    base: dict[str, Any]
    overrides: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    mtp: bool = False
    micro_batches: int = 2
    lengths: tuple[int, ...] = ()
    attention: bool = True
    freeze: str = ""
    grouped: bool = False
    engine: bool = False

    def __post_init__(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

        destroy_moe_metrics_tracker()  # it keeps the number of layers of the model before
        reseed()
        cfg = self.config = config(self.dispatcher, self.base, **self.overrides)
        stages = cfg.virtual_pipeline_model_parallel_size
        options = DistributedDataParallelConfig(**self.ddp)
        self.models = [
            DistributedDataParallel(
                cfg, options, self._chunk(None if stages is None else stage), bool(stage)
            )
            for stage in range(stages or 1)
        ]
        self.model = self.models[0]
        chosen = {"optimizer": "adam", "lr": 3e-3, "weight_decay": 0.01} | self.optimizer
        self.optim = get_megatron_optimizer(OptimizerConfig(**chosen), self.models)
        cfg.grad_scale_func = self.optim.scale_loss
        cfg.no_sync_func = _one_or_all([m.no_sync for m in self.models])
        if self.ddp.get("overlap_param_gather"):
            cfg.param_sync_func = _one_or_all([m.start_param_sync for m in self.models])
        cfg.finalize_model_grads_func = finalize_model_grads
        generator = torch.Generator().manual_seed(7 + parallel_state.get_data_parallel_rank())
        steps = torch.randint(1, 3, (64, SEQUENCE + 1), generator=generator)
        self._data = torch.cumsum(steps, 1) % VOCABULARY
        self._generator, self._start = generator, generator.get_state()

    def _chunk(self, stage: int | None) -> torch.nn.Module:
        """What this rank holds of the model, in virtual pipeline stage `stage`."""
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_decoder_block_spec,
            get_gpt_mtp_block_spec,
        )

        named = {"use_transformer_engine": self.engine, "vp_stage": stage}
        spec = get_gpt_decoder_block_spec(self.config, **named)
        if self.grouped:
            _group_experts(spec, self.config.num_moe_experts)
        if not self.attention:
            _leave_out_attention(spec)
        if self.config.sequence_parallel and not self.engine:
            _replace_norms(spec)
        mtp_spec = get_gpt_mtp_block_spec(self.config, spec, **named) if self.mtp else None
        where = {"ignore_virtual": False, "vp_stage": stage}
        gpt = GPTModel(
            self.config,
            spec,
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            mtp_block_spec=mtp_spec,
            vp_stage=stage,
        ).to(self.config.params_dtype)
        gpt.cuda()  # Megatron leaves norms and routers on the CPU
        for name, parameter in gpt.named_parameters():
            if self.freeze and re.search(self.freeze, name):
                parameter.requires_grad_(False)
        return gpt

    def step(self) -> tuple[float, float]:
        """One optimizer step over eight sequences in micro-batches: (mean loss, gradient norm)."""
        for model in self.models:
            model.zero_grad_buffer()
        self.optim.zero_grad()
        loss = self._schedule(forward_only=False)
        _, norm, _ = self.optim.step()
        return loss, float(norm)

    def evaluate(self) -> float:
        """The mean loss over eight sequences, in eval mode, without gradients."""
        for model in self.models:
            model.eval()
        with torch.no_grad():
            loss = self._schedule(forward_only=True)
        for model in self.models:
            model.train()
        return loss

    def _schedule(self, *, forward_only: bool) -> float:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        batch = self._next_batch().chunk(self.micro_batches)
        if self.lengths:
            batch = tuple(b[:, : n + 1] for b, n in zip(batch, self.lengths, strict=True))
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=_one_or_all([iter(batch) for _ in self.models]),
            model=self.models,
            num_microbatches=len(batch),
            seq_length=SEQUENCE,
            micro_batch_size=len(batch[0]),
            forward_only=forward_only,
        )
        # Only the last pipeline stage has losses.
        each = [step["loss"].cpu() for step in losses]
        mean = torch.stack(each).mean() if each else torch.zeros(())
        total = torch.stack([mean, torch.tensor(float(bool(losses)))])
        dist.all_reduce(total)
        return total[0].item() / total[1].item()

    def _next_batch(self) -> torch.Tensor:
        return self._data[torch.randint(0, 64, (8,), generator=self._generator)]

    def seek(self, steps: int) -> None:
        """Go to where the data stands after `steps` steps."""
        self._generator.set_state(self._start)
        for _ in range(steps):
            self._next_batch()

    def run(self, steps: int) -> list[tuple[float, float]]:
        """`steps` steps."""
        return [self.step() for _ in range(steps)]

    def gradients(self) -> dict[str, torch.Tensor]:
        """name -> the gradient of the last step, fp32 on the CPU, as the optimizer had it.

        The distributed optimizer leaves the ranks' sum in each rank's own shard of a bucket alone,
        and in the others what this rank added by itself: each shard is fetched from its owner.
        """
        for model in self.models if self.ddp.get("use_distributed_optimizer") else ():
            for buffer in (*model.buffers, *model.expert_parallel_buffers):
                group = buffer.data_parallel_group
                for bucket in buffer.buckets:
                    own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                    dist.all_gather_into_tensor(bucket.grad_data, own, group=group)
        kept = {"device": "cpu", "dtype": torch.float32, "copy": True}
        return {
            f"{stage}.{name}" if len(self.models) > 1 else name: p.main_grad.to(**kept)
            for stage, model in enumerate(self.models)
            for name, p in model.named_parameters()
            if p.requires_grad
        }

    def modules(self) -> Iterator[torch.nn.Module]:
        """Of every chunk."""
        return chain.from_iterable(model.modules() for model in self.models)

    def mok_layers(self) -> list[Any]:
        """The mok layers in the model."""
        from mok_megatron.layer import MokMoELayer

        return [m for m in self.modules() if isinstance(m, MokMoELayer)]


def _one_or_all(items: list[Any]) -> Any:
    """Megatron's habit: the thing itself for one model chunk, a list for several."""
    return items[0] if len(items) == 1 else items


def _leave_out_attention(block: Any) -> None:
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

    for layer in block.layer_specs:
        layer.submodules.self_attention = IdentityOp
        layer.submodules.self_attn_bda = IdentityFuncOp


def _group_experts(block: Any, num_experts: int) -> None:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    grouped = get_moe_module_spec(use_te=True, num_experts=num_experts, moe_grouped_gemm=True)
    for layer in block.layer_specs:
        if getattr(layer.submodules.mlp, "func", None) is MoELayer:
            layer.submodules.mlp = grouped


class SequenceNorm(torch.nn.RMSNorm):
    """What Megatron takes from Transformer Engine for sequence parallelism: its ranks add up dw."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = True


def _replace_norms(block: Any) -> None:
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = SequenceNorm
        layer.submodules.pre_mlp_layernorm = SequenceNorm
    block.layer_norm = SequenceNorm


def _forward_step(data: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[Any, Any]:
    from megatron.core import parallel_state

    tokens = next(data)
    positions = torch.arange(tokens.shape[1] - 1)[None].expand(len(tokens), -1)
    ranks = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    inputs, places, labels = (
        _share(t, rank, ranks).cuda() for t in (tokens[:, :-1], positions, tokens[:, 1:])
    )
    output = model(inputs, places, None, labels=labels)
    return output, lambda out: (out.float().mean(), {"loss": out.detach().float().mean()})


def _share(tokens: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What a context parallel rank has of [B, S]: a part of the first half and its mirror image, as
    Transformer Engine's attention wants it, so that causal attention costs all ranks the same."""
    parts = tokens.chunk(2 * ranks, 1)
    return torch.cat((parts[rank], parts[-1 - rank]), 1)


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name = value` for a while."""
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)
