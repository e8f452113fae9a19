"""Real DeepSeek-V3 and Qwen3 layers of Transformer Engine on a GPU: whole trainings, mok beside
alltoall, with what a launch turns on.

Latent attention, MTP, fused norms, grouped experts; distributed optimizer with both overlaps,
recompute, pipelines; and what alltoall cannot do on a CPU: tensor parallelism with sequence
parallelism, a shared expert cut by it, expert parallelism folded over it, attention with context
parallelism. Ranks are processes on one GPU. In bf16 the two sum in other orders, and where two
experts score alike a token may go elsewhere, which is much of the gradient of an expert with few
rows. So in the first step mok's routers choose what alltoall's chose, and its gradients are near,
parameter by parameter; afterwards each chooses itself, and losses are near.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from tests import tiny_megatron as tiny
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu
STEPS = 4
DEADLINE_S = 240.0
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "moe_ffn_hidden_size": 128,
    "num_moe_experts": 16,
    "moe_router_topk": 4,
    "moe_grouped_gemm": True,
    "params_dtype": torch.bfloat16,
    "bf16": True,
}
DEEPSEEK_V3: dict[str, Any] = (
    tiny.DEEPSEEK_V3
    | SIZES
    | {
        "multi_latent_attention": True,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "qk_layernorm": True,
        "moe_shared_expert_intermediate_size": 128,
        "mtp_num_layers": 1,
    }
)
QWEN3: dict[str, Any] = tiny.QWEN3 | SIZES
# What the distributed optimizer of every case has on.
SHARDED: dict[str, Any] = {
    "ddp": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "grad_reduce_in_fp32": True,
        "bucket_size": 200_000,
    },
    "optimizer": {
        "use_distributed_optimizer": True,
        "overlap_param_gather": True,
        "lr": 3e-4,  # at ten times that the few steps wander apart
        "bf16": True,
        "params_dtype": torch.bfloat16,
    },
}
# Without the first Transformer Engine ignores --moe-single-grouped-weight; without the second
# Megatron refuses its companion.
SINGLE_WEIGHT = {"NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1", "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}
FOUR_LAYERS = {"num_layers": 4, "moe_layer_freq": [0, 1, 1, 1]}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """groups: arguments of tiny.set_up; fuses: whether the fused call has the shared expert; mok:
    overrides for mok alone; moe_layers: by pipeline stage; batch: cases of as many ranks and the
    same batch are run by the same processes."""

    ranks: int
    base: dict[str, Any]
    batch: str = ""
    moe_layers: tuple[int, ...] = (2,)
    micro_batches: int = 2
    groups: dict[str, Any] = field(default_factory=lambda: {"expert_parallel": 1})
    overrides: dict[str, Any] = field(default_factory=dict)
    mok: dict[str, Any] = field(default_factory=dict)
    experts: str = "TEGroupedMLP"
    fuses: bool = False


CASES = {
    "deepseek-v3": Case(ranks=1, base=DEEPSEEK_V3, fuses=True),
    "deepseek-v3-recompute": Case(
        ranks=1,
        base=DEEPSEEK_V3,
        overrides=_selective("mla_up_proj", "layernorm", "moe", "mlp"),
        fuses=True,
    ),
    "qwen3-recompute-full": Case(ranks=1, base=QWEN3, overrides=FULL),
    "qwen3-single-experts": Case(
        ranks=1, base=QWEN3, overrides={"moe_grouped_gemm": False}, experts="SequentialMLP"
    ),
    # Megatron's own layers have no kernel for it on this GPU.
    "qwen3-single-weight": Case(
        ranks=1,
        base=QWEN3,
        mok={"moe_single_grouped_weight": True, "use_transformer_engine_op_fuser": True},
    ),
    "deepseek-v3-ep2": Case(ranks=2, base=DEEPSEEK_V3, groups={"expert_parallel": 2}, fuses=True),
    "qwen3-dp2": Case(ranks=2, base=QWEN3),
    "deepseek-v3-tp2": Case(
        ranks=2,
        base=DEEPSEEK_V3,
        groups={"expert_parallel": 2, "tensor_model_parallel_size": 2},
        overrides=_selective("mla_up_proj", "moe_act"),
    ),
    "deepseek-v3-tp2-ep4": Case(
        ranks=4,
        base=DEEPSEEK_V3,
        groups={"expert_parallel": 4, "tensor_model_parallel_size": 2},
        overrides=_selective("moe"),
    ),
    "qwen3-tp2-ep4": Case(
        ranks=4, base=QWEN3, groups={"expert_parallel": 4, "tensor_model_parallel_size": 2}
    ),
    # Expert parallelism below data parallelism, in every other rank.
    "qwen3-ep2-strided": Case(
        ranks=4, base=QWEN3, groups={"expert_parallel": 2, "order": "tp-cp-dp-ep-pp"}
    ),
    "qwen3-cp2": Case(
        ranks=2,
        batch="context",
        base=QWEN3,
        groups={"expert_parallel": 2, "context_parallel_size": 2},
    ),
    "deepseek-v3-cp2": Case(
        ranks=2,
        batch="latent context",
        base=DEEPSEEK_V3,
        groups={"expert_parallel": 2, "context_parallel_size": 2},
        fuses=True,
    ),
    "deepseek-v3-pp2-ep2": Case(
        ranks=4,
        batch="pipeline",
        base=DEEPSEEK_V3,
        groups={"expert_parallel": 2, "pipeline_model_parallel_size": 2},
        overrides=FOUR_LAYERS | _selective("mla_up_proj", "moe"),
        moe_layers=(1, 3),
        micro_batches=4,
        fuses=True,
    ),
    "qwen3-pp2-interleaved": Case(
        ranks=2,
        batch="pipeline",
        base=QWEN3,
        groups={
            "expert_parallel": 1,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
        },
        overrides={"num_layers": 4, "overlap_p2p_comm": True, "batch_p2p_comm": False},
        moe_layers=(2, 2),
        micro_batches=4,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """losses and gradient norms; gradients of the first step, and what each router chose in it;
    names of what the MoE layers are."""

    curve: list[tuple[float, float]]
    gradients: dict[str, torch.Tensor]
    routes: list[list[torch.Tensor]]
    layers: list[tuple[str, str, str, bool]]  # layer, experts, backend, fuses the shared expert


class _Routes:
    """What a router chose, call by call, in the place of Megatron's RouterReplay; `told` is what it
    chooses instead."""

    def __init__(self, told: list[torch.Tensor] | None) -> None:
        self.told = told
        self.chosen: list[torch.Tensor] = []

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """scores [T, E] -> the scores of the chosen [T, K], and the chosen."""
        chosen = compute(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
        if self.told is not None:
            chosen = self.told[len(self.chosen)]
        self.chosen.append(chosen)
        return scores.gather(1, chosen), chosen


def _train(dispatcher: str, case: Case, routes: list[list[torch.Tensor]] | None) -> Record:
    """`routes`: what each router is told to choose in the first step, call by call."""
    with mock.patch.dict(os.environ, SINGLE_WEIGHT):
        training = tiny.Training(
            dispatcher=dispatcher,
            base=case.base,
            overrides=case.overrides | (case.mok if dispatcher == "mok" else {}),
            mtp=bool(case.base.get("mtp_num_layers")),
            engine=True,
            micro_batches=case.micro_batches,
            **SHARDED,
        )
    moe_layers = [m for m in training.modules() if hasattr(m, "token_dispatcher")]
    replays = [_Routes(None if routes is None else routes[i]) for i in range(len(moe_layers))]
    for layer, replay in zip(moe_layers, replays, strict=True):
        layer.router.router_replay = replay
        first = getattr(getattr(layer.experts, "linear_fc1", None), "weight", None)
        assert (first is not None) == bool(training.config.moe_single_grouped_weight)
    curve = training.run(1)
    gradients = dict(_of_each_expert(training.gradients()))
    for layer in moe_layers:
        layer.router.router_replay = None
    curve += training.run(STEPS - 1)
    layers = []
    for layer in moe_layers:
        backend = getattr(layer, "_backend", None)
        fuses = getattr(layer, "fuses_shared_experts", False)
        of_layer = (type(layer), type(layer.experts), type(backend))
        layers.append((*(kind.__name__ for kind in of_layer), fuses))
        if backend is not None:
            backend.check()
    chosen = [replay.chosen for replay in replays]
    return Record(curve=curve, gradients=gradients, layers=layers, routes=chosen)


def _of_each_expert(gradients: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of a stacked weight [L, ...] under the names that one weight an expert has."""
    for name, gradient in gradients.items():
        if gradient.dim() < 3:
            yield name, gradient
        else:
            yield from ((f"{name}{i}", member) for i, member in enumerate(gradient))


def _rank(rank: int, world: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """case -> what was seen of both dispatchers, and the error of each gradient."""
    from mok_megatron import plugin
    from mok_megatron.backends import workspace
    from mok_megatron.config import MokConfig

    found = {}
    with tiny.patched(plugin, "settings", lambda: MokConfig(row_budget=float(world))):
        for name in names:
            case = CASES[name]
            tiny.set_up(device="cuda", **case.groups)
            alltoall = _train("alltoall", case, None)
            mok = _train("mok", case, alltoall.routes)
            assert [*map(len, mok.routes)] == [*map(len, alltoall.routes)]
            assert mok.gradients.keys() == alltoall.gradients.keys()
            found[name] = {
                "curves": (mok.curve, alltoall.curve),
                "layers": (mok.layers, alltoall.layers),
                "errors": {
                    parameter: _error(mok.gradients[parameter], true)
                    for parameter, true in alltoall.gradients.items()
                },
            }
            workspace.destroy_all()
    return found


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm().clamp_min(1e-12))


@pytest.fixture(scope="module")
def trained() -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Number of ranks and batch -> what each rank found, filled when a test asks for it."""
    return {}


@pytest.mark.parametrize("name", CASES)
def test_training_equals_alltoall(name: str, trained: dict[tuple[int, str], Any]) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    case = CASES[name]
    batch = case.ranks, case.batch
    if batch not in trained:
        names = [n for n, other in CASES.items() if (other.ranks, other.batch) == batch]
        trained[batch] = run_ranks(case.ranks, _rank, names, deadline=DEADLINE_S)
    for rank, of_rank in enumerate(trained[batch]):
        mok, alltoall = of_rank[name]["curves"]
        errors = sorted((e, parameter) for parameter, e in of_rank[name]["errors"].items())
        if rank == 0:
            print(f"{name}: {mok} beside {alltoall}; gradients at most {errors[-3:]}")
        layers, others = of_rank[name]["layers"]
        assert layers == [("MokMoELayer", case.experts, "CudaBackend", case.fuses)] * len(layers)
        assert others == [("MoELayer", case.experts, "NoneType", False)] * len(layers)
        stage = rank * len(case.moe_layers) // case.ranks
        assert len(layers) == len(others) == case.moe_layers[stage]
        for (loss, norm), (want_loss, want_norm) in zip(mok, alltoall, strict=True):
            assert loss == pytest.approx(want_loss, rel=5e-3)
            assert norm == pytest.approx(want_norm, rel=5e-2)
        assert min(loss for loss, _ in mok[1:]) < mok[0][0]
        # The largest are 0.01, on an H200 0.021; of tokens sent elsewhere it would be 0.1 and more.
        assert errors[-1][0] < 0.05, errors[-5:]
