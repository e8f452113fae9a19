"""Checkpoints between SequentialMLP and Transformer Engine's TEGroupedMLP, alltoall and mok, and
expert parallel sizes: ranks as processes on one GPU. test_checkpoints.py has the rest.
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

pytestmark = pytest.mark.gpu
STEPS = 2
RANKS = 4
MOVES = ((1, 2), (2, 4), (4, 1))  # writer's and reader's expert parallel size
KINDS = tuple(product(("SequentialMLP", "TEGroupedMLP"), ("alltoall", "mok")))
OVERRIDES: dict[str, Any] = {
    "num_layers": 1,
    "moe_layer_freq": [1],
    "hidden_size": 128,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "params_dtype": torch.bfloat16,
    "bf16": True,
}
Kind = tuple[str, str]


def _told(writer: Kind, reader: Kind) -> bool:
    """Pairs with mok and TEGroupedMLP among them."""
    return "mok" in (writer[1], reader[1]) and "TEGroupedMLP" in (writer[0], reader[0])


def _training(kind: Kind) -> tiny.Training:
    experts, dispatcher = kind
    grouped = experts == "TEGroupedMLP"
    training = tiny.Training(
        dispatcher=dispatcher,
        base=tiny.DEEPSEEK_V3,
        overrides=OVERRIDES | {"moe_grouped_gemm": grouped},
        optimizer={"bf16": True, "params_dtype": torch.bfloat16},
        grouped=grouped,
    )
    (layer,) = (m for m in training.modules() if hasattr(m, "token_dispatcher"))
    assert type(layer.experts).__name__ == experts
    assert bool(training.mok_layers()) == (dispatcher == "mok")
    return training


def _rank(rank: int, world: int, device: str, kinds: list[Kind], folder: str) -> dict[str, Any]:
    from mok_megatron import plugin
    from mok_megatron.backends import workspace
    from mok_megatron.config import MokConfig

    saved: dict[Any, checkpoints.Digests] = {}
    losses: dict[Any, float] = {}
    read: dict[str, tuple[bool, float, float]] = {}
    with tiny.patched(plugin, "settings", lambda: MokConfig(row_budget=float(world))):
        for size, _ in MOVES:
            tiny.set_up(expert_parallel=size, device=device)
            for kind in kinds:
                training = _training(kind)
                training.run(STEPS)
                checkpoints.save(training, Path(folder, f"{'-'.join(kind)}-{size}"))
                saved[kind, size] = checkpoints.digests(training)
                losses[kind, size] = training.evaluate()
            workspace.destroy_all()
        for written, size in MOVES:
            tiny.set_up(expert_parallel=size, device=device)
            for reader in kinds:
                training = _training(reader)
                training.run(1)  # moments to spoil
                for writer in kinds:
                    if not _told(writer, reader):
                        continue
                    checkpoints.spoil(training)
                    path = Path(folder, f"{'-'.join(writer)}-{written}")
                    loaded = checkpoints.read(training, path)
                    if 1 in (written, size):
                        loaded = checkpoints.with_own_groups(training, loaded)
                    checkpoints.give(training, loaded)
                    training.seek(STEPS)
                    same = checkpoints.digests(training) == saved[writer, written]
                    name = f"{'-'.join(writer)}-{written} -> {'-'.join(reader)}-{size}"
                    read[name] = same, training.evaluate(), losses[writer, written]
            workspace.destroy_all()
    return {"saved": saved, "read": read}


def test_every_reader_has_every_writers_bytes(tmp_path: Path) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    results = run_ranks(RANKS, _rank, "cuda", list(KINDS), str(tmp_path), deadline=200)
    saved, read = results[0]["saved"], results[0]["read"]
    assert len(read) == len(MOVES) * sum(_told(*pair) for pair in product(KINDS, KINDS)) == 27
    assert [name for name, (same, _, _) in read.items() if not same] == []
    # The writers differ, so no reader could have kept the one before.
    assert len({str(sorted(digests.items())) for digests in saved.values()}) == len(saved) == 12
    assert len({frozenset(key for key, _ in digests) for digests in saved.values()}) == 1
    for name, (_, loss, want) in read.items():
        assert loss == pytest.approx(want, rel=5e-3), name
