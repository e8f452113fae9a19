"""Trainings on every layout of four ranks that Megatron can run on CPU, mok beside alltoall.

Pipelines, plain, interleaved, and of sequences of several lengths; expert parallelism that is
smaller than data parallelism, that strides over the ranks, that folds over context or tensor
parallel ranks. In fp32, where both sum in the same order, losses and gradient norms agree to the
last digits.

What unmodified alltoall cannot do on CPU either is stood in for: Megatron's own attention has no
context parallelism, so that model has no attention; its norms have no sequence parallelism, so
tiny_megatron has one that does. Tensor parallelism without sequence parallelism does not train an
MoE model in Megatron at all; it evaluates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist

from tests import tiny_megatron as tiny
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

STEPS = 3
SHARDED = {
    "ddp": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": 10_000,
    },
    "optimizer": {"use_distributed_optimizer": True, "overlap_param_gather": True},
}
FOUR_LAYERS = {"num_layers": 4, "moe_layer_freq": [0, 1, 1, 1]}
# Megatron's rule for two interleaved ranks: in one batch it could not tell their messages apart.
INTERLEAVED = {"overlap_p2p_comm": True, "batch_p2p_comm": False}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """groups: arguments of tiny.set_up; training: of tiny.Training; ep_ranks: of rank 0's group."""

    name: str
    groups: dict[str, Any]
    training: dict[str, Any]
    ep_ranks: list[int]
    overrides: dict[str, Any] = field(default_factory=dict)


LAYOUTS = [
    Layout(
        name="ep-below-dp",
        groups={"expert_parallel": 2},
        training={"base": tiny.DEEPSEEK_V3},
        ep_ranks=[0, 1],
    ),
    Layout(
        name="ep-below-dp-sharded",
        groups={"expert_parallel": 2},
        training={"base": tiny.QWEN3, **SHARDED},
        ep_ranks=[0, 1],
    ),
    Layout(
        name="ep-strided",
        groups={"expert_parallel": 2, "order": "tp-cp-dp-ep-pp"},
        training={"base": tiny.DEEPSEEK_V3},
        ep_ranks=[0, 2],
    ),
    Layout(
        name="pp2",
        groups={"expert_parallel": 2, "pipeline_model_parallel_size": 2},
        training={"base": tiny.DEEPSEEK_V3, "micro_batches": 4},
        overrides=FOUR_LAYERS | {"deallocate_pipeline_outputs": True},
        ep_ranks=[0, 1],
    ),
    Layout(
        name="pp2-lengths",
        groups={"expert_parallel": 2, "pipeline_model_parallel_size": 2},
        training={"base": tiny.DEEPSEEK_V3, "micro_batches": 4, "lengths": (32, 8, 20, 12)},
        overrides=FOUR_LAYERS | {"variable_seq_lengths": True},
        ep_ranks=[0, 1],
    ),
    Layout(
        name="pp2-mtp-recompute",
        groups={"expert_parallel": 2, "pipeline_model_parallel_size": 2},
        training={"base": tiny.DEEPSEEK_V3, "micro_batches": 4, "mtp": True},
        overrides=FOUR_LAYERS
        | {
            "mtp_num_layers": 1,
            "recompute_granularity": "selective",
            "recompute_modules": ["moe"],
        },
        ep_ranks=[0, 1],
    ),
    Layout(
        name="pp2-interleaved",
        groups={
            "expert_parallel": 2,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
        },
        training={"base": tiny.DEEPSEEK_V3, "micro_batches": 4},
        overrides=FOUR_LAYERS | INTERLEAVED | {"deallocate_pipeline_outputs": True},
        ep_ranks=[0, 1],
    ),
    Layout(
        name="pp2-interleaved-sharded",
        groups={
            "expert_parallel": 2,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
        },
        training={"base": tiny.QWEN3, "micro_batches": 4, **SHARDED},
        overrides=INTERLEAVED | {"num_layers": 4},
        ep_ranks=[0, 1],
    ),
    Layout(
        name="cp2-ep4",
        groups={"expert_parallel": 4, "context_parallel_size": 2},
        training={"base": tiny.DEEPSEEK_V3, "attention": False},
        ep_ranks=[0, 1, 2, 3],
    ),
    Layout(
        name="tp2-ep4",
        groups={"expert_parallel": 4, "tensor_model_parallel_size": 2},
        training={"base": tiny.DEEPSEEK_V3},
        ep_ranks=[0, 1, 2, 3],
    ),
    Layout(
        name="tp2-shared-gate",
        groups={"expert_parallel": 2, "tensor_model_parallel_size": 2},
        training={"base": tiny.DEEPSEEK_V3},
        overrides={"moe_shared_expert_gate": True},
        ep_ranks=[0, 1],
    ),
    Layout(
        name="tp2-pp2",
        groups={
            "expert_parallel": 2,
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
        },
        training={"base": tiny.DEEPSEEK_V3},
        overrides=FOUR_LAYERS,
        ep_ranks=[0, 1],
    ),
]
Curve = list[tuple[float, float]]


def _layouts_rank(rank: int, world: int) -> dict[str, dict[str, Curve]]:
    """name -> dispatcher -> losses and gradient norms."""
    curves: dict[str, dict[str, Curve]] = {}
    for layout in LAYOUTS:
        curves[layout.name] = {}
        tiny.set_up(**layout.groups)
        for dispatcher in ("alltoall", "mok"):
            training = tiny.Training(
                dispatcher=dispatcher, overrides=layout.overrides, **layout.training
            )
            mok_layers = training.mok_layers()
            assert bool(mok_layers) == (dispatcher == "mok")
            for layer in mok_layers if rank == 0 else ():
                assert dist.get_process_group_ranks(layer.ep_group) == layout.ep_ranks
            curves[layout.name][dispatcher] = training.run(STEPS)
    curves["evaluation"] = _evaluations()
    return curves


def _evaluations() -> dict[str, Curve]:
    """Tensor parallelism without sequence parallelism, which neither dispatcher may train."""
    tiny.set_up(expert_parallel=4, tensor_model_parallel_size=2)
    losses: dict[str, Curve] = {}
    for dispatcher in ("alltoall", "mok"):
        training = tiny.Training(
            dispatcher=dispatcher,
            base=tiny.DEEPSEEK_V3,
            overrides={"sequence_parallel": False},
        )
        assert bool(training.mok_layers()) == (dispatcher == "mok")
        losses[dispatcher] = [(training.evaluate(), 0.0) for _ in range(STEPS)]
        with pytest.raises(ValueError, match=r"sequence.parallel"):
            training.step()
    return losses


@pytest.fixture(scope="module")
def curves() -> list[dict[str, dict[str, Curve]]]:
    return run_ranks(4, _layouts_rank, deadline=300)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_training_equals_alltoall(layout: Layout, curves: list[dict[str, Any]]) -> None:
    for of_rank in curves:
        mok, alltoall = of_rank[layout.name]["mok"], of_rank[layout.name]["alltoall"]
        for (loss, norm), (want_loss, want_norm) in zip(mok, alltoall, strict=True):
            assert loss == pytest.approx(want_loss, rel=2e-6)
            assert norm == pytest.approx(want_norm, rel=2e-5)
        assert mok[-1][0] < mok[0][0]


def test_tensor_parallel_evaluation_equals_alltoall(curves: list[dict[str, Any]]) -> None:
    for of_rank in curves:
        mok, alltoall = of_rank["evaluation"]["mok"], of_rank["evaluation"]["alltoall"]
        losses, want = ([loss for loss, _ in curve] for curve in (mok, alltoall))
        assert losses == pytest.approx(want, rel=2e-6)
        assert len(set(losses)) == STEPS
