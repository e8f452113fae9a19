"""Checkpoints (torch_dist) of a distributed optimizer across expert parallel sizes and dispatchers.

With torch's Adam Megatron 0.19 cannot load one, whatever the dispatcher: it asserts on the state of
an optimizer that has made no step; it looks for a `step` among a parameter's tensors, where it has
left it out itself; and all parameters get the same tensor for their step, which then counts all of
them: a resumed run, alltoall's too, has other bias corrections than the unbroken one. So a reader
makes one step here, is spoiled before it loads, is told that there is no such tensor, and gets a
step for each parameter. Between expert parallel size 1 and others Megatron refuses: it has other
optimizers there (test_checkpoints.py).
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import checkpoints
from tests import tiny_megatron as tiny
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

RANKS = 4
SAVED_AT, STEPS = 2, 2
SIZES = (2, 4)
DISPATCHERS = ("alltoall", "mok")
# Without --overlap-param-gather, which leaves old weights in the model until the next forward.
MODEL: dict[str, Any] = {
    "base": tiny.DEEPSEEK_V3,
    "overrides": {"num_layers": 1, "moe_layer_freq": [1]},
    "ddp": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 10_000},
    "optimizer": {"use_distributed_optimizer": True},
}
# Writer and reader; alltoall's of alltoall's are what mok's are compared with, once for each size.
PAIRS = tuple(
    ((writer, written), (reader, size))
    for written, size in ((2, 2), (2, 4), (4, 2))
    for writer in DISPATCHERS
    for reader in DISPATCHERS
    if written == size or "mok" in (writer, reader)
)


def _allow_loading() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def told(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        assert "step" not in tensors
        original(self, parameter, defaultdict(lambda: None, tensors))

    DistributedOptimizer._set_main_param_and_optimizer_states = told


def _shards(training: tiny.Training) -> list[torch.Tensor]:
    """This rank's weights, moments and steps, where the optimizers have them."""
    found = []
    for optimizer in training.optim.chained_optimizers:
        for group in optimizer.optimizer.param_groups:
            for shard in group["params"]:
                state = optimizer.optimizer.state[shard]
                found += [shard, state["exp_avg"], state["exp_avg_sq"], state["step"]]
    assert found
    return found


def _load(training: tiny.Training, folder: Path) -> bool:
    """Whether Megatron had all parameters share a step."""
    checkpoints.load(training, folder)
    shared = []
    for optimizer in training.optim.chained_optimizers:
        states = optimizer.optimizer.state.values()
        shared.append(len({id(state["step"]) for state in states}) == 1 < len(states))
        for state in states:
            state["step"] = state["step"].clone()
    return all(shared)


def _spoil(training: tiny.Training) -> None:
    """NaN in all that a load must fill, and a wrong number of steps."""
    with torch.no_grad():
        for tensor in training.model.module.state_dict().values():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.fill_(float("nan"))
        for shard in _shards(training):
            shard.fill_(99 if shard.dim() == 0 else float("nan"))  # steps must be one number


def _rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    _allow_loading()
    saved: dict[Any, tuple[checkpoints.Digests, list[torch.Tensor]]] = {}
    unbroken: dict[Any, Any] = {}
    for size in SIZES:
        tiny.set_up(expert_parallel=size)
        for dispatcher in DISPATCHERS:
            training = tiny.Training(dispatcher=dispatcher, **MODEL)
            training.run(SAVED_AT)
            name = dispatcher, size
            checkpoints.save(training, Path(folder, f"{dispatcher}-{size}"))
            shards = [shard.clone() for shard in _shards(training)]
            saved[name] = checkpoints.digests(training), shards
            unbroken[name] = training.run(STEPS)
    read: dict[Any, Any] = {}
    for size in SIZES:
        tiny.set_up(expert_parallel=size)
        for writer, reader in PAIRS:
            if reader[1] != size:
                continue
            training = tiny.Training(dispatcher=reader[0], **MODEL)
            assert bool(training.mok_layers()) == (reader[0] == "mok")
            training.run(1)
            _spoil(training)
            assert _load(training, Path(folder, f"{writer[0]}-{writer[1]}"))
            training.seek(SAVED_AT)
            digests, shards = saved[writer]
            same = checkpoints.digests(training) == digests
            if writer[1] == size:
                same = same and all(map(torch.equal, _shards(training), shards))
            read[writer, reader] = same, training.run(STEPS)
    keys = {name: {key for key, _ in digests} for name, (digests, _) in saved.items()}
    distinct = len({str(sorted(digests.items())) for digests, _ in saved.values()})
    return {"read": read, "unbroken": unbroken, "keys": keys, "distinct": distinct}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw."""
    return run_ranks(RANKS, _rank, str(tmp_path_factory.mktemp("sharded")), deadline=300)


def test_every_reader_has_every_writers_bytes(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert of_rank["read"].keys() == {*PAIRS}
        assert [pair for pair, (same, _) in of_rank["read"].items() if not same] == []
    assert found[0]["distinct"] >= len(SIZES)  # no reader could have kept another size's


def test_keys_are_megatrons(found: list[dict[str, Any]]) -> None:
    keys = found[0]["keys"]
    assert all(of_one == keys["alltoall", 2] for of_one in keys.values())
    for part in ("mlp.experts", "shared_experts", "mlp.router"):
        for moment in ("exp_avg", "exp_avg_sq"):
            assert any(f".{moment}." in key and part in key for key in keys["mok", 2])


def test_resumed_is_unbroken(found: list[dict[str, Any]]) -> None:
    """To the bit on the same dispatcher and size, as alltoall's is."""
    for of_rank in found:
        for (writer, reader), (_, curve) in of_rank["read"].items():
            want = of_rank["unbroken"][writer]
            if writer == reader:
                assert curve == want, writer
            for (loss, norm), (want_loss, want_norm) in zip(curve, want, strict=True):
                assert loss == pytest.approx(want_loss, rel=2e-6), (writer, reader)
                assert norm == pytest.approx(want_norm, rel=2e-5), (writer, reader)
