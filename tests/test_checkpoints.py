"""Checkpoints (torch_dist) across expert parallel sizes and dispatchers, and resumed runs.

What is saved are Megatron's modules and nothing else, so every reader gets every writer's weights
and Adam moments to the bit, and a resumed run is the unbroken one to the bit.

Not the printed one: `training_log` of megatron.training does not reset its sum after a process's
first iteration, so the loss it prints for the second is the mean of the first two. A resumed run
therefore prints another loss than the unbroken one there, on every dispatcher, and only there.

Between expert parallel size 1 and others Megatron moves the weights and the moments, but refuses
the rest of a plain optimizer's state, on every dispatcher: it has one optimizer here, two there.

What a distributed optimizer would save with expert parallel size 1 is compared here; it is saved
and loaded in test_checkpoints_sharded.py.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import checkpoints
from tests import tiny_megatron as tiny
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

SAVED_AT = 2  # steps
STEPS = 3  # after that
SIZES = (1, 2, 4)
SHARDED_SIZES = (1, 2)
DISPATCHERS = ("alltoall", "mok")
# An MoE layer with a shared expert and an expert bias, and another one in the MTP block.
MODEL: dict[str, Any] = {
    "base": tiny.DEEPSEEK_V3,
    "overrides": {"num_layers": 1, "moe_layer_freq": [1], "mtp_num_layers": 1},
    "mtp": True,
}
BF16: dict[str, Any] = {
    "base": tiny.DEEPSEEK_V3,
    "overrides": {"params_dtype": torch.bfloat16, "bf16": True},
    "optimizer": {"bf16": True, "params_dtype": torch.bfloat16},
}
SHARDED: dict[str, Any] = {
    "base": tiny.DEEPSEEK_V3,
    "ddp": {"use_distributed_optimizer": True},
    "optimizer": {"use_distributed_optimizer": True},
}


def _training(dispatcher: str, options: dict[str, Any]) -> tiny.Training:
    training = tiny.Training(dispatcher=dispatcher, **options)
    assert bool(training.mok_layers()) == (dispatcher == "mok")
    return training


def _matrix_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    saved: dict[str, checkpoints.Digests] = {}
    losses: dict[str, float] = {}
    for size in SIZES:
        tiny.set_up(expert_parallel=size)
        for dispatcher in DISPATCHERS:
            training = _training(dispatcher, MODEL)
            training.run(SAVED_AT)
            name = f"{dispatcher}-ep{size}"
            checkpoints.save(training, Path(folder, name))
            saved[name] = checkpoints.digests(training)
            losses[name] = training.evaluate()
    read: dict[str, tuple[bool, float]] = {}
    for size in SIZES:
        tiny.set_up(expert_parallel=size)
        for dispatcher in DISPATCHERS:
            training = _training(dispatcher, MODEL)
            training.run(1)  # moments to spoil
            for writer in saved:
                if dispatcher == "alltoall" and writer.startswith("alltoall"):
                    continue  # Megatron's own business
                path = Path(folder, writer)
                checkpoints.spoil(training)
                loaded = checkpoints.read(training, path)
                if (size == 1) != writer.endswith("ep1"):
                    if dispatcher == "alltoall":
                        with pytest.raises((ValueError, RuntimeError, KeyError)):
                            checkpoints.give(training, loaded)
                        loaded = checkpoints.read(training, path)
                    loaded = checkpoints.with_own_groups(training, loaded)
                checkpoints.give(training, loaded)
                training.seek(SAVED_AT)
                same = checkpoints.digests(training) == saved[writer]
                read[f"{writer}->{dispatcher}-ep{size}"] = same, training.evaluate()
    return {"saved": saved, "losses": losses, "read": read}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 saw of every writer and every reader."""
    return run_ranks(4, _matrix_rank, str(tmp_path_factory.mktemp("matrix")), deadline=300)[0]


def test_every_reader_has_every_writers_bytes(matrix: dict[str, Any]) -> None:
    names = [f"{dispatcher}-ep{size}" for size, dispatcher in product(SIZES, DISPATCHERS)]
    pairs = [pair for pair in product(names, names) if "mok" in str(pair)]
    assert matrix["read"].keys() == {f"{writer}->{reader}" for writer, reader in pairs}
    assert {name for name, (same, _) in matrix["read"].items() if not same} == set()
    # The writers differ in their weights, so no reader could have kept the one before.
    assert len({str(sorted(digests.items())) for digests in matrix["saved"].values()}) == len(names)


def test_every_reader_computes_what_its_writer_did(matrix: dict[str, Any]) -> None:
    for name, (_, loss) in matrix["read"].items():
        writer, reader = name.split("->")
        want = matrix["losses"][writer]
        assert loss == (want if writer == reader else pytest.approx(want, rel=2e-6)), name


def test_keys_are_megatrons(matrix: dict[str, Any]) -> None:
    alltoall = {key for key, _ in matrix["saved"]["alltoall-ep2"]}
    for name, digests in matrix["saved"].items():
        assert {key for key, _ in digests} == alltoall, name
    moments = {key for key in alltoall if key.startswith("optimizer.state.exp_avg")}
    for part in ("mlp.experts", "shared_experts", "mlp.router", "mtp."):
        assert any(part in key for key in alltoall - moments)
        assert any(part in key for key in moments)
    assert any("expert_bias" in key for key in alltoall)


def _resume_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    tiny.set_up(expert_parallel=world)
    curves: dict[str, Any] = {}
    for name, options in {"fp32": MODEL, "bf16": BF16}.items():
        for dispatcher in DISPATCHERS:
            training = _training(dispatcher, options)
            training.run(SAVED_AT)
            path = Path(folder, f"{name}-{dispatcher}")
            checkpoints.save(training, path)
            unbroken = training.run(STEPS), checkpoints.digests(training)
            other = _training(dispatcher, options)
            checkpoints.load(other, path)
            other.seek(SAVED_AT)
            resumed = other.run(STEPS), checkpoints.digests(other)
            curves[f"{name}-{dispatcher}"] = unbroken, resumed
        # Leaving and joining in the middle of a run.
        for writer, reader in (DISPATCHERS, DISPATCHERS[::-1]):
            other = _training(reader, options)
            checkpoints.load(other, Path(folder, f"{name}-{writer}"))
            other.seek(SAVED_AT)
            curves[f"{name}-{writer}->{reader}"] = other.run(STEPS)
    for size in SHARDED_SIZES:
        curves[f"places-ep{size}"] = {d: _places_of_shards(size, d) for d in DISPATCHERS}
    return curves


def _places_of_shards(expert_parallel: int, dispatcher: str) -> list[Any]:
    """What a distributed optimizer would save on this rank."""
    tiny.set_up(expert_parallel=expert_parallel)
    training = _training(dispatcher, SHARDED)
    training.run(1)
    return [(key, offset, tuple(t.shape)) for key, offset, t in checkpoints.tensors(training)]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(2, _resume_rank, str(tmp_path_factory.mktemp("resume")), deadline=200)[0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_resumed_is_unbroken_to_the_bit(
    dtype: str, dispatcher: str, resumed: dict[str, Any]
) -> None:
    unbroken, again = resumed[f"{dtype}-{dispatcher}"]
    assert again[0] == unbroken[0]
    assert again[1] == unbroken[1]


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 2e-6), ("bf16", 5e-3)])
def test_a_run_can_change_dispatchers(
    dtype: str, tolerance: float, resumed: dict[str, Any]
) -> None:
    for writer, reader in (DISPATCHERS, DISPATCHERS[::-1]):
        want = resumed[f"{dtype}-{writer}"][0][0]
        for (loss, _), (want_loss, _) in zip(
            resumed[f"{dtype}-{writer}->{reader}"], want, strict=True
        ):
            assert loss == pytest.approx(want_loss, rel=tolerance)


def test_the_distributed_optimizer_saves_the_same_places(resumed: dict[str, Any]) -> None:
    for size in SHARDED_SIZES:
        places = resumed[f"places-ep{size}"]
        assert places["mok"] == places["alltoall"]
        for part in ("experts", "shared_experts", "router"):
            assert any("exp_avg" in key and part in key for key, _, _ in places["mok"])
