"""Formulas of one layer against cases worked out by hand and a table made independently."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from mok_megatron.backends.cuda import capacity
from mok_megatron.plan.layer import Layer

TINY = Layer(hidden=4, ffn=3, shared_ffn=0, num_experts=4, top_k=2, tokens=10, ranks=2)
MODELS = {
    "dsv3": Layer(
        hidden=7168, ffn=2048, shared_ffn=2048, num_experts=256, top_k=8, tokens=1, ranks=1
    ),
    "qwen235": Layer(
        hidden=4096, ffn=1536, shared_ffn=0, num_experts=128, top_k=8, tokens=1, ranks=1
    ),
    "qwen30": Layer(
        hidden=2048, ffn=768, shared_ffn=0, num_experts=128, top_k=8, tokens=1, ranks=1
    ),
}


def sized(model: str, tokens: int, ranks: int, **more: int) -> Layer:
    return Layer(**{**vars(MODELS[model]), "tokens": tokens, "ranks": ranks, **more})


@dataclass(frozen=True)
class Line:
    """A line of the roofline table that preceded this code: TFLOP and GB, forward and backward."""

    model: str
    ranks: int
    tokens: int
    rows: int
    tflop: tuple[float, float]
    gb: tuple[float, float]


TABLE = [
    Line("dsv3", 8, 2048, 512, (1.62, 3.25), (3.7, 15.9)),
    Line("dsv3", 8, 4096, 1024, (3.25, 6.49), (4.5, 17.2)),
    Line("dsv3", 8, 8192, 2048, (6.49, 12.99), (6.1, 19.8)),
    Line("dsv3", 32, 8192, 8192, (6.49, 12.99), (4.7, 10.2)),
    Line("qwen235", 8, 2048, 1024, (0.62, 1.24), (1.1, 3.9)),
    Line("qwen235", 8, 8192, 4096, (2.47, 4.95), (2.6, 6.5)),
    Line("qwen235", 32, 8192, 16384, (2.47, 4.95), (2.5, 4.8)),
    Line("qwen30", 8, 8192, 4096, (0.62, 1.24), (1.1, 2.5)),
    Line("qwen30", 32, 8192, 16384, (0.62, 1.24), (1.2, 2.2)),
]


@pytest.mark.parametrize("line", TABLE, ids=lambda x: f"{x.model}-ep{x.ranks}-{x.tokens}")
def test_flops_and_bytes_are_the_tables(line: Line) -> None:
    layer = sized(line.model, line.tokens, line.ranks)
    assert layer.rows_per_expert == line.rows
    flops = layer.forward_flops() / 1e12, layer.backward_flops() / 1e12
    assert flops == pytest.approx(line.tflop, abs=0.005)
    moved = layer.forward_bytes() / 1e9, layer.backward_bytes() / 1e9
    assert moved == pytest.approx(line.gb, abs=0.051)


@pytest.mark.parametrize(
    ("model", "each_row", "once"),
    [("dsv3", 822, 544), ("qwen235", 470, 314), ("qwen30", 235, 157)],
)
def test_transfers_are_the_tables(model: str, each_row: int, once: int) -> None:
    """MB one way at EP 8 and 8192 tokens."""
    layer = sized(model, 8192, 8)
    assert layer.transfer_bytes() / 1e6 == pytest.approx(each_row, abs=0.5)
    assert layer.transfer_bytes_once() / 1e6 == pytest.approx(once, abs=0.5)


def test_a_layer_by_hand() -> None:
    """20 rows of 4, experts of width 3, two of them here, half of the rows from elsewhere."""
    assert TINY.rows == 20
    assert TINY.rows_per_expert == 10
    assert TINY.forward_flops() == 6 * 20 * 4 * 3
    assert TINY.backward_flops() == 2 * TINY.forward_flops()
    assert TINY.weight_bytes() == 2 * (3 * 4 * 3 * 2)
    assert TINY.transfer_bytes() == 2 * 4 * 20 / 2
    assert TINY.forward_wire_bytes() == 2 * TINY.transfer_bytes()
    assert TINY.backward_wire_bytes() == 3 * TINY.transfer_bytes()
    # Of 6 pairs of 4 experts one misses a rank that has two.
    assert TINY.copies() == pytest.approx(2 * (1 - 1 / 6))
    once = 10 * TINY.copies() * 4
    forward = 2 * once + 144 + 8 * 20 * 3 + 4 * once + 2 * 10 * 4
    assert TINY.forward_bytes() == pytest.approx(forward)
    backward = 4 * once + 144 + 20 * 20 * 3 + 8 * 72 + 4 * once + 2 * 10 * 4
    assert TINY.backward_bytes() == pytest.approx(backward)


def test_a_shared_expert_by_hand() -> None:
    shared = Layer(**{**vars(TINY), "shared_ffn": 5})
    assert shared.forward_flops() - TINY.forward_flops() == 6 * 10 * 4 * 5
    assert shared.weight_bytes() - TINY.weight_bytes() == 2 * (3 * 4 * 5)
    extra = 2 * (3 * 4 * 5) + 8 * 10 * 5
    assert shared.forward_bytes() - TINY.forward_bytes() == pytest.approx(extra)


def test_memory_by_hand() -> None:
    """25 rows of budget and 127 of padding for two experts: 279, so 2 row tiles, 256 rows."""
    assert TINY.capacity() == 256
    row_buffers = 256 * 2 * (4 + 4 + 4 + 3 + 6)
    twice = (512, 512, 512, 512, 512)  # starts, ids, probabilities, x, dy: less than 512 bytes each
    symmetric = 512 + 2 * sum(twice) + 512 + 512  # control, arrivals, rows at home
    assert TINY.workspace_bytes() == row_buffers + symmetric
    assert TINY.context_bytes() == 256 * (2 * 6 + 4 + 4) + 4 * 20
    alone = Layer(**{**vars(TINY), "ranks": 1, "shared_ffn": 5})
    shared_buffers = 10 * 2 * (4 + 5 + 10)
    assert alone.workspace_bytes() == alone.capacity() * 2 * 21 + shared_buffers
    wide = Layer(**{**vars(TINY), "ranks": 1, "ffn": 64})
    assert wide.workspace_bytes() == wide.capacity() * (2 * (12 + 3 * 64) + 4 * 2)
    assert alone.context_bytes() == alone.capacity() * 20 + 10 * 2 * 10 + 80


@pytest.mark.parametrize("tokens", [1, 7, 500, 4096])
def test_one_ranks_buffers_are_the_cuda_backends(tokens: int) -> None:
    layer = sized("qwen30", tokens, 1)
    assert layer.capacity() == capacity(layer.rows, layer.num_experts)


@pytest.mark.parametrize(
    ("ranks", "groups", "group_top_k"), [(2, 1, 1), (8, 4, 2), (2, 4, 2), (4, 4, 3), (4, 2, 1)]
)
def test_copies_are_an_average_over_all_choices(ranks: int, groups: int, group_top_k: int) -> None:
    """Every choice of groups and of 2 of their experts, counted one by one."""
    experts, top_k = 8, 2
    size, local = experts // groups, experts // ranks
    seen = []
    for chosen in itertools.combinations(range(groups), group_top_k):
        open_ = [e for e in range(experts) if e // size in chosen]
        seen += [
            len({e // local for e in choice}) for choice in itertools.combinations(open_, top_k)
        ]
    layer = Layer(
        hidden=4,
        ffn=4,
        shared_ffn=0,
        num_experts=experts,
        top_k=top_k,
        tokens=4,
        ranks=ranks,
        groups=groups,
        group_top_k=group_top_k,
    )
    assert layer.copies() == pytest.approx(sum(seen) / len(seen))


def test_group_limited_routing_of_deepseek_v3() -> None:
    layer = sized("dsv3", 8192, 8, groups=8, group_top_k=4)
    off_rank = layer.transfer_bytes_once() / (2 * 8192 * 7168)
    assert off_rank == pytest.approx(3.2, abs=0.05)
