"""What shared_gpu.py does for ranks on one GPU, on the CPU: sends through the host."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests import shared_gpu
from tests import tiny_megatron as tiny
from tests.ranks import run_ranks


def _sends_rank(rank: int, world: int) -> None:
    plain = dist.isend
    shared_gpu.send_through_the_host(lambda tensor: tensor.dtype == torch.float32)
    staged = dist.isend
    shared_gpu.send_through_the_host()  # a second call changes nothing
    assert dist.isend is staged is not plain
    peer = 1 - rank
    group = dist.new_group([0, 1])

    # In a batch, of a view, into what autograd looks at: as pipeline stages do it.
    sent = torch.arange(12.0).view(3, 4).t() + 100 * rank
    received = torch.zeros(4, 3, requires_grad=True)
    operations = [
        dist.P2POp(dist.isend, sent, peer, group),
        dist.P2POp(dist.irecv, received, peer, group),
    ]
    works = dist.batch_isend_irecv(operations)
    assert len(works) == 2
    sent.fill_(-1)  # it has left
    works[0].wait()
    assert not received.any()  # nothing is in the tensor before its wait
    works[1].wait()
    assert torch.equal(received, torch.arange(12.0).view(3, 4).t() + 100 * peer)
    assert received.is_leaf

    # One by one, and those that are not wanted directly.
    for dtype in (torch.float32, torch.int64):
        values = torch.empty(5, dtype=dtype)
        receive = dist.irecv(tensor=values, src=peer, group=dist.group.WORLD)
        send = dist.isend(tensor=torch.full((5,), rank + 7, dtype=dtype), dst=peer)
        send.wait()
        receive.wait()
        assert values.tolist() == [peer + 7] * 5


def test_what_is_sent_arrives_at_its_wait() -> None:
    run_ranks(2, _sends_rank, deadline=60)


def _pipeline_rank(rank: int, world: int) -> list[Any]:
    tiny.set_up(
        expert_parallel=1,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
    )
    overrides = {"num_layers": 4, "overlap_p2p_comm": True, "batch_p2p_comm": False}

    def curve() -> Any:
        options = {"base": tiny.QWEN3, "overrides": overrides, "micro_batches": 4}
        training = tiny.Training(dispatcher="mok", **options)
        curve = training.run(2)
        gradients = training.gradients()
        # Two chunks have parameters of the same names.
        assert len(gradients) == sum(len([*m.parameters()]) for m in training.models)
        return curve

    direct = curve()
    staged: list[torch.Size] = []
    shared_gpu.send_through_the_host(lambda tensor: not staged.append(tensor.shape))
    return [direct, curve(), len(staged)]


def test_a_pipeline_trains_the_same_through_the_host() -> None:
    for direct, staged, tensors in run_ranks(2, _pipeline_rank, deadline=120):
        assert tensors > 0
        assert staged == direct


def test_context_parallel_ranks_share_a_sequence() -> None:
    tokens = torch.arange(16).view(2, 8)
    first, second = (tiny._share(tokens, rank, 2) for rank in range(2))
    assert first[0].tolist() == [0, 1, 6, 7]
    assert second[1].tolist() == [10, 11, 12, 13]
    assert torch.equal(tiny._share(tokens, 0, 1), tokens)
