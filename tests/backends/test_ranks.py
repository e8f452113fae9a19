"""What the start lines say of memory."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from mok_megatron.backends import calls, ranks, workspace
from mok_megatron.backends.ranks import Ranks
from mok_megatron.backends.workspace import Workspace
from mok_megatron.limits import Limits, most_rows
from tests.backends.test_workspace import LIMITS, SHAPE
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def test_memory_of_one_rank() -> None:
    said = Ranks(replace(SHAPE, ep_size=1), None, CPU).memory(16)
    kept, buffers = 1024 * (4 * 64 + 8) + 4 * 32, 1024 * (2 * (3 * 64 + 3 * 64) + 4 * 64 // 32)
    assert f"({kept} bytes) of each forward of 16 tokens" in said
    assert f"1024 rows in turn, 0.00 GiB ({buffers} bytes)" in said
    assert "workspace" not in said


def test_memory_of_several_ranks() -> None:
    limits = Limits(tokens=16, rows=384, source="--mok-max-tokens")
    space = Workspace(torch.zeros(8, dtype=torch.uint8), [0, 0], 0, limits, 1)
    said = Ranks(SHAPE, None, CPU, given=(space, 1)).memory(10)
    most = most_rows(16, 2, 2, SHAPE.local_experts)
    assert f"({384 * 4 * 64 + 8 * most + 4 * 20} bytes) of each forward of 10 tokens" in said
    assert "for at most 16 tokens a rank (--mok-max-tokens)" in said


def test_the_first_call_joins_with_the_flags_and_counts_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a group: what is asked of workspace.of."""
    asked = []

    def of(group, shape, device, tokens, **flags) -> Workspace:
        flags.pop("load")()
        asked.append((shape, tokens, flags))
        return Workspace(torch.zeros(8, dtype=torch.uint8), [0, 0], 1, LIMITS, 77)

    loaded: list[int] = []
    ops = SimpleNamespace(load_kernels=loaded.append)
    monkeypatch.setattr(torch, "ops", SimpleNamespace(mok_megatron=ops))
    monkeypatch.setattr(workspace, "of", of)
    group = type("Group", (), {"group_name": "a test's", "rank": lambda self: 1})()
    monkeypatch.setattr(calls.dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(ranks, "patience_s", lambda group: 60)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    met = []
    monkeypatch.setattr(calls, "_meet", lambda place, group: met.append(setattr(place, "run", "5")))
    flags = {"max_tokens": 9, "row_budget": 2.0, "arguments": None}
    layers = [Ranks(SHAPE, group, CPU, deadline=7, movers=3, **flags) for _ in range(2)]
    numbers = [layer.call("forward", tokens)[1] for layer in layers for tokens in (5, 6)]
    given = {"given_tokens": 9, "row_budget": 2.0, "arguments": None}
    assert len(met) == 1
    assert [layer.calls.now.number for layer in layers] == [2, 4]
    assert asked == [(SHAPE, 5, given), (SHAPE, 5, given)]
    assert loaded == [7, 7]
    assert numbers == [[1, 16, 384, layer, 77, 60, 3] for layer in (1, 1, 2, 2)]


def _patience(rank: int, world: int) -> list[int]:
    import torch.distributed as dist

    limits = (timedelta(seconds=0.5), timedelta(minutes=7))
    groups = [dist.new_group([0, 1], timeout=limit) for limit in limits]
    return [ranks.patience_s(group) for group in groups]


def test_ranks_wait_as_long_as_their_group_does() -> None:
    assert run_ranks(2, _patience, deadline=60) == [[1, 420]] * 2
