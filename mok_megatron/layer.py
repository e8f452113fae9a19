"""Megatron's MoELayer with everything after the router in one fused call.

    router (Megatron's)  ->  top_k_choices  ->  fused_moe  ->  output

The layer adds no parameter, no buffer and no key to a checkpoint: router, experts and shared
experts are Megatron's own modules, built by Megatron's own constructor in its own order, so
initialisation and saved state are those of any other dispatcher and a run may change dispatchers at
any checkpoint.

The shared expert is computed inside the fused call when it is plain: tensor parallel size 1, no
sigmoid gate, no recompute of its own. Otherwise Megatron's module runs beside the fused call, as it
does with alltoall.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.utils import nvtx_range_pop, nvtx_range_push
from torch import Tensor

from mok_megatron import backends, observe, plugin
from mok_megatron.backends.cuda import CudaBackend
from mok_megatron.config import SHARED_OVERLAP
from mok_megatron.contract import Backend, MoEShape, Weights
from mok_megatron.function import fused_moe, top_k_choices
from mok_megatron.parameters import ExpertModules


class MokTokenDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """What `layer.token_dispatcher` is in a mok layer.

    The layer's forward never goes through it: dispatch and combine happen inside the fused call. It
    is a whole dispatcher all the same, so that code which drives the stages itself
    (dispatch_preprocess, token_dispatch, …) gets the exchange those stages are defined by,
    Megatron's alltoall.
    """


class MokMoELayer(MoELayer):  # type: ignore[misc]
    """The layer behind `--moe-token-dispatcher-type mok`; same constructor and state as
    MoELayer."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        with _shown_as_alltoall(config):
            super().__init__(config, *args, **kwargs)
        # The constructor knows its own dispatchers only; the subclass has no state of its own.
        self.token_dispatcher.__class__ = MokTokenDispatcher
        self._backend: Backend | None = None
        self._observed: observe.Observed | None = None
        self._owners: ExpertModules | None = None
        self._has_said_memory = False

    @property
    def fuses_shared_experts(self) -> bool:
        """Whether the shared expert is part of the fused call."""
        return (
            self.use_shared_expert
            and self.tp_group.size() == 1
            and not self.config.moe_shared_expert_gate
            and not self.shared_experts_recompute
        )

    def backend(self, weights: Weights, device: torch.device) -> Backend:
        """The backend of this layer, chosen and announced at its first call.

        Raises RuntimeError when the backend that was asked for cannot run on `device`.
        """
        if self._backend is None:
            shape = MoEShape(
                hidden=self.config.hidden_size,
                ffn=self.config.moe_ffn_hidden_size,
                shared_ffn=0 if weights.shared_w2 is None else weights.shared_w2.shape[1],
                num_experts=self.config.num_moe_experts,
                top_k=self.config.moe_router_topk,
                ep_size=self.config.num_moe_experts // self.num_local_experts,
                dtype=weights.w1[0].dtype,
            )
            settings = plugin.settings()
            self._backend, reason = backends.choose(
                settings.backend,
                shape,
                device,
                self.ep_group,
                max_tokens=settings.max_tokens,
                row_budget=settings.row_budget,
                deadline=settings.deadline,
                movers=settings.movers,
                ahead=settings.ahead,
                arguments=plugin.training_arguments(),
            )
            pipelined = self.config.pipeline_model_parallel_size > 1
            _announce(
                f"mok: MoE layers run on the {self._backend.name} backend: {reason}", pipelined
            )
            for line in self._already_done():
                _announce(line, pipelined)
        return self._backend

    def _say_memory(self, tokens: int) -> None:
        """Once, after the first call, which has made the memory."""
        self._has_said_memory = True
        if isinstance(self._backend, CudaBackend):
            memory = self._backend.memory(tokens)
            _announce(f"mok: {memory}", self.config.pipeline_model_parallel_size > 1)

    def _observe(self, backend: Backend, device: torch.device) -> observe.Observed:
        counts = device if observe.wants_scalars(plugin.training_arguments()) else None
        return observe.Observed(backend, self.config, self.ep_group, counts=counts)

    def _already_done(self) -> Iterator[str]:
        """What to say of flags that ask for nothing that the layer does not do anyway."""
        flags = list(getattr(self.config, "mok_already_done", ()))
        if SHARED_OVERLAP in flags and not self.fuses_shared_experts:
            flags.remove(SHARED_OVERLAP)
            yield (
                f"mok: {SHARED_OVERLAP} overlaps nothing here: a shared expert with a gate, a "
                "recompute of its own or tensor parallelism runs before the fused call"
            )
        if flags:
            yield f"mok: part of the fused call in any case: {', '.join(flags)}"

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: Any = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """hidden_states [S, B, H] -> (output [S, B, H], None); padding_mask [B, S], as in MoELayer.

        Padded tokens are routed and computed like any other; the mask only keeps them out of the
        router's losses and counts, as in Megatron.
        """
        if intermediate_tensors is not None:
            raise RuntimeError(
                "mok: the layer is one call and cannot resume from a partial CUDA graph, got "
                "intermediate_tensors; take 'moe_router' and 'moe_preprocess' out of "
                "--cuda-graph-modules"
            )
        if self.training and self.attn_tp_group.size() > 1 and not self.config.sequence_parallel:
            raise ValueError(
                "mok: training with tensor parallelism needs --sequence-parallel, got tensor "
                f"parallel size {self.attn_tp_group.size()} without it; add --sequence-parallel"
            )
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute and self.training:
            output = tensor_parallel.checkpoint(self._forward, False, hidden_states, padding_mask)
        else:
            output = self._forward(hidden_states, padding_mask)
        return output, None

    def _forward(self, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        fused_shared = self.shared_experts if self.fuses_shared_experts else None
        shared_output = (
            None if fused_shared is not None else self.shared_experts_compute(hidden_states)
        )
        nvtx_range_push("mok/route")
        probs_TE, routing_map_TE = self.route(hidden_states, padding_mask)

        owners = self._owners
        if owners is None or not owners.still(self.experts, fused_shared):
            overlaps = getattr(plugin.training_arguments(), "overlap_grad_reduce", True)
            owners = ExpertModules(self.experts, fused_shared, stand_ins=overlaps)
            self._owners = owners
        owners.run_forward_pre_hooks()
        weights = owners.weights
        backend = self.backend(weights, hidden_states.device)
        expert_TK, prob_TK = top_k_choices(
            probs_TE,
            routing_map_TE,
            self.config.moe_router_topk,
            weights.w1[0].dtype,
            kernel=backend.name == "cuda",
        )
        nvtx_range_pop("mok/route")
        if self._observed is None:
            self._observed = self._observe(backend, hidden_states.device)
        self._observed.count(routing_map_TE)
        y_TH = fused_moe(
            hidden_states.reshape(-1, hidden_states.shape[-1]),
            expert_TK,
            prob_TK,
            weights,
            self._observed,
            owners.store,
            owners.parameters,
        )
        if not self._has_said_memory:
            self._say_memory(y_TH.shape[0])
        output = y_TH.view(hidden_states.shape)
        return output if shared_output is None else output + shared_output


@contextmanager
def _shown_as_alltoall(config: Any) -> Iterator[None]:
    config.moe_token_dispatcher_type = "alltoall"
    try:
        yield
    finally:
        config.moe_token_dispatcher_type = "mok"


@cache
def _announce(line: str, pipelined: bool) -> None:
    """Once per process and text, on the ranks whose output people read: the first, and with
    pipeline stages the last (the first stage may have no MoE layer)."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    rank = torch.distributed.get_rank() if world > 1 else 0
    if rank == 0 or (pipelined and rank == world - 1):
        print(line, flush=True)
