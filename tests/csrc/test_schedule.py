"""csrc/device/schedule.cuh on the host: every tile is visited once, whatever the counts."""

from __future__ import annotations

import ctypes
import pathlib
import random
import shutil
import subprocess
from collections.abc import Sequence

import pytest

HERE = pathlib.Path(__file__).parent
ROW_TILE, DEPTH_TILE = 128, 64
COUNTS = (0, 1, 7, 63, 64, 65, 127, 128, 129, 1000, 5000)
Tile = tuple[int, ...]  # expert, m, n, row, rows, depth, fault


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler, found none")
    library = tmp_path_factory.mktemp("schedule") / "schedule.so"
    command = [compiler, "-std=c++20", "-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
    sources = [str(HERE / name) for name in ("schedule_host.cpp", "plan_host.cpp")]
    subprocess.run([*command, *sources, "-o", str(library)], check=True, timeout=120)
    return ctypes.CDLL(str(library))


def ints(values: Sequence[int]) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * len(values))(*values)


def starts_of(counts: Sequence[int], first: int = 0, gap: int = 0) -> list[int]:
    starts = [first]
    for count in counts:
        starts.append(starts[-1] + -(-count // ROW_TILE) * ROW_TILE + gap * ROW_TILE)
    return starts


def tiles_of(call, starts, counts, capacity, *shape) -> list[Tile]:
    most = 400_000
    out = (ctypes.c_int32 * (7 * most))()
    count = call(ints(starts), ints(counts), len(counts), capacity, *shape, out, most)
    assert 0 <= count <= most
    return [tuple(out[7 * i : 7 * i + 7]) for i in range(count)]


@pytest.mark.parametrize("seed", range(40))
def test_row_tiles_cover_every_row_and_column_tile_once(scheduler: ctypes.CDLL, seed: int) -> None:
    draw = random.Random(seed)
    counts = [draw.choice(COUNTS) for _ in range(draw.choice((1, 2, 8, 33, 128)))]
    starts = starts_of(counts, first=ROW_TILE * draw.randrange(3), gap=draw.randrange(3))
    n_tiles, depth = draw.randrange(1, 12), draw.randrange(1, 120)
    tiles = tiles_of(scheduler.row_tiles, starts, counts, starts[-1], n_tiles, depth)

    seen = set()
    for expert, m, n, row, rows, found_depth, fault in tiles:
        assert fault == 0
        if rows == 0:
            continue  # a slice without a valid row: nothing to do
        assert found_depth == depth
        assert row == starts[expert] + m * ROW_TILE
        assert rows == min(ROW_TILE, counts[expert] - m * ROW_TILE)
        assert (expert, m, n) not in seen
        seen.add((expert, m, n))
    expected = {
        (e, m, n)
        for e, count in enumerate(counts)
        for m in range(-(-count // ROW_TILE))
        for n in range(n_tiles)
    }
    assert seen == expected


@pytest.mark.parametrize("keep_empty", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_weight_tiles_cover_every_gradient_once(
    scheduler: ctypes.CDLL, seed: int, keep_empty: bool
) -> None:
    draw = random.Random(seed)
    counts = [draw.choice(COUNTS) for _ in range(draw.choice((1, 5, 16)))]
    starts = starts_of(counts)
    m_tiles, n_tiles = draw.randrange(1, 40), draw.randrange(1, 20)
    shape = (m_tiles, n_tiles, int(keep_empty))
    tiles = tiles_of(scheduler.weight_tiles, starts, counts, starts[-1], *shape)

    idle = ints([-1] * len(tiles))
    scheduler.weight_idle(ints(starts), ints(counts), len(counts), starts[-1], *shape, idle)

    assert len({tile[:3] for tile in tiles}) == len(tiles) == len(counts) * m_tiles * n_tiles
    for (expert, m, n, row, rows, depth, fault), nothing in zip(tiles, idle, strict=True):
        assert (row, rows, fault) == (starts[expert], counts[expert], 0)
        assert 0 <= m < m_tiles and 0 <= n < n_tiles  # noqa: PT018
        assert depth == max(-(-counts[expert] // DEPTH_TILE), 1)  # an empty expert's is zeroed
        assert nothing == (counts[expert] == 0 and not keep_empty)


def test_depth_depends_on_nothing_but_the_experts_own_rows(scheduler: ctypes.CDLL) -> None:
    alone = tiles_of(scheduler.weight_tiles, [0, 1024], [1000], 1024, 2, 3, 0)
    counts = [5, 1000, 0, 70]
    starts = starts_of(counts)
    among = tiles_of(scheduler.weight_tiles, starts, counts, starts[-1], 2, 3, 0)
    assert {t[5] for t in alone} == {t[5] for t in among if t[0] == 1} == {16}


@pytest.mark.parametrize(
    ("starts", "counts", "capacity"),
    [
        ([0, 64, 192], [64, 128], 256),  # not a multiple of 128
        ([0, 128, 256], [128, 129], 256),  # more rows than room
        ([0, 128, 512], [128, 384], 256),  # past the buffers
        ([0, 128, 256], [-1, 128], 256),  # a negative count
    ],
)
def test_rows_outside_the_contract_are_marked(
    scheduler: ctypes.CDLL, starts: list[int], counts: list[int], capacity: int
) -> None:
    tiles = tiles_of(scheduler.row_tiles, starts, counts, capacity, 2, 8)
    assert any(tile[6] for tile in tiles)


def test_neighbouring_tickets_share_the_column_tile(scheduler: ctypes.CDLL) -> None:
    """Inside a group of 16 row tiles m runs fastest: many read a weight tile at once."""
    tiles = tiles_of(scheduler.row_tiles, [0, 4096], [4096], 4096, 8, 4)
    assert [t[2] for t in tiles[:17]] == [0] * 16 + [1]
    assert [t[1] for t in tiles[:17]] == [*range(16), 0]
