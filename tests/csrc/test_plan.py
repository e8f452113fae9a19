"""csrc/device/plan.cuh on the host: every tile once, causes first, and any set of CTAs finishes.

A tile's causes are read off its fields, not off the plan's order: pass 1 waits for the pass 0 tiles
of its row block, weight gradients for those of their expert, combine for pass 1 of every block
(more than the rows of any token), a lap for the last readers of the lap before it. Seeds are edits
of plan.cuh that a check must notice.
"""

from __future__ import annotations

import ctypes
import pathlib
import random
import shutil
import subprocess
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = (
    "csrc/arguments.h",
    "csrc/device/schedule.cuh",
    "csrc/device/plan.cuh",
    "tests/csrc/plan_host.cpp",
)
COUNTS = (0, 0, 1, 64, 65, 128, 129, 700, 1500)
FIELDS = 11  # expert, pass, m, n, row, rows, depth, fault, idle, lap, base
Tile = tuple[int, ...]
Pass = tuple[int, int, int]  # m_tiles, n_tiles, depth
AGAIN = 9


@dataclass(frozen=True, kw_only=True)
class Shape:
    routed: list[Pass]
    shared: list[Pass]
    passes: int
    ahead: int
    tokens: int
    combine_tiles: int
    keep_empty: bool
    start: list[int]
    count: list[int]
    again: Pass = (0, 0, 0)  # what laps behind the first do first
    capacity: int = 0  # rows; 0: all of them
    ranks: int = 0
    rank: int = 0

    @property
    def experts(self) -> int:
        return len(self.count)

    @property
    def rows(self) -> int:
        return self.capacity or max(self.start[-1], 128)

    def words(self) -> list[int]:
        numbers = [word for one in (*self.routed, *self.shared, self.again) for word in one]
        numbers += [self.passes, self.experts, self.ahead, self.tokens, self.combine_tiles]
        numbers += [int(self.keep_empty), self.rows, max(self.start[-1], 128)]
        return [*numbers, self.ranks, self.rank]

    def split(self, tile: Tile) -> tuple[bool, int]:
        """Of the shared expert; the pass: 0 to passes - 1, passes of combine, or AGAIN."""
        if tile[1] == 2 * self.passes + 1:
            return False, AGAIN
        shared = tile[0] == self.experts and tile[1] > self.passes
        return shared, tile[1] - (self.passes + 1 if shared else 0)

    def laps(self) -> list[range]:
        """The experts of each: as many as fit, one after the other."""
        found, first = [], 0
        while first < self.experts:
            end = first + 1
            while end < self.experts and self.start[end + 1] - self.start[first] <= self.rows:
                end += 1
            if self.start[-1] - self.start[first] <= self.rows:
                end = self.experts
            found.append(range(first, end))
            first = end
        return found

    def blocks(self, expert: int) -> int:
        if expert == self.experts:
            return -(-self.tokens // 128)
        return (self.start[expert + 1] - self.start[expert]) // 128


def ints(values: list[int]) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * len(values))(*values)


class Planner:
    def __init__(self, tree: pathlib.Path, old: str = "", new: str = "") -> None:
        for source in SOURCES:
            text = (ROOT / source).read_text()
            if old and source.endswith("plan.cuh"):
                assert text.count(old) == 1, f"the seed no longer fits: {old}"
                text = text.replace(old, new)
            (tree / source).parent.mkdir(parents=True, exist_ok=True)
            (tree / source).write_text(text)
        compiler = shutil.which("g++") or shutil.which("c++")
        if compiler is None:
            pytest.skip("needs a C++ compiler, found none")
        command = [compiler, "-std=c++20", "-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
        command += [str(tree / SOURCES[-1]), "-o", str(tree / "plan.so")]
        subprocess.run(command, check=True, timeout=120)
        self.library = ctypes.CDLL(str(tree / "plan.so"))

    def tiles(self, shape: Shape, draw: random.Random, walkers: int) -> list[Tile]:
        """The tile of every ticket; tickets go to the walkers by chance."""
        arrays = [ints(shape.words()), ints(shape.start), ints(shape.count)]
        total = self.library.plan_count(*arrays)
        tickets: list[list[int]] = [[] for _ in range(walkers)]
        for ticket in range(total):
            draw.choice(tickets).append(ticket)
        found: dict[int, Tile] = {}
        for mine in tickets:
            out = ints([0] * (FIELDS * len(mine)))
            self.library.plan_walk(*arrays, ints(mine), len(mine), out)
            for i, ticket in enumerate(mine):
                found[ticket] = tuple(out[FIELDS * i : FIELDS * (i + 1)])
        return [found[ticket] for ticket in range(total)]


def drawn(draw: random.Random, most: int = 40) -> Shape:
    experts, passes = draw.randint(1, most), draw.choice((2, 4))
    count = [draw.choice(COUNTS) for _ in range(experts)]
    start = [0]
    for rows in count:
        start.append(start[-1] + -(-rows // 128) * 128)

    def passes_of(wanted: bool) -> list[Pass]:
        row = [(0, draw.randint(1, 4) * wanted, draw.randint(1, 9)) for _ in range(2)]
        weight = [
            (draw.randint(1, 18), draw.randint(1, 3), 0)
            if wanted and passes == 4 and draw.random() < 0.7
            else (0, 0, 0)
            for _ in range(2)
        ]
        return row + weight

    ranks = draw.choice((0, 2, 3, 8))
    return Shape(
        ranks=ranks,
        rank=draw.randrange(max(ranks, 1)),
        routed=passes_of(True),
        shared=passes_of(draw.random() < 0.5),
        passes=passes,
        ahead=draw.randint(0, experts + 3),  # 0, which no launch has, is slow and not wrong
        tokens=draw.choice((1, 127, 128, 300)),
        combine_tiles=draw.randint(1, 40),
        keep_empty=draw.random() < 0.5,
        start=start,
        count=count,
        again=(0, draw.randint(1, 3), 5) if passes == 4 else (0, 0, 0),
        capacity=draw.choice((0, max(max(count), 1) + draw.choice((127, 127, 700)))) // 128 * 128,
    )


def expected(shape: Shape) -> Counter[Tile]:
    laps = shape.laps()
    tiles = [
        (shape.experts, shape.passes, m, 0, 0, 0, 0, 0, 0, 0, 0) for m in range(shape.combine_tiles)
    ]
    lap_of = {expert: lap for lap, experts in enumerate(laps) for expert in experts}
    for expert in range(shape.experts + 1):
        shared = expert == shape.experts
        start = 0 if shared else shape.start[expert]
        valid = shape.tokens if shared else shape.count[expert]
        lap = 0 if shared else lap_of[expert]
        base = 0 if shared else shape.start[laps[lap].start]
        passes = [*enumerate((shape.shared if shared else shape.routed)[: shape.passes])]
        if lap > 0 and shape.again[1]:
            passes.append((2 * shape.passes + 1, shape.again))
        for which, (m_tiles, n_tiles, depth) in passes:
            number = which + (shape.passes + 1 if shared else 0)
            rows_of, weight = shape.blocks(expert), m_tiles > 0
            if weight:
                rows_of = m_tiles if valid or shape.keep_empty else 0
                depth = max(-(-valid // 64), 1)
            for m in range(rows_of):
                row = (start if weight else start + 128 * m) - base
                rows = valid if weight else min(max(valid - 128 * m, 0), 128)
                head, tail = (expert, number, m), (row, rows, depth, 0, 0, lap, base)
                tiles += [(*head, n, *tail) for n in range(n_tiles)]
    return Counter(tiles)


Key = tuple[int, int]  # pass 0, 1 or AGAIN, and a block; 2 and an expert; 3 and a lap


def block_of(shape: Shape, tile: Tile) -> int:
    return (tile[4] + tile[10]) // 128 + (shape.start[-1] // 128 if shape.split(tile)[0] else 0)


def raised(shape: Shape, tile: Tile) -> list[Key]:
    """Counters that the tile adds one to when it is done; as in direction.cuh announce."""
    shared, which = shape.split(tile)
    done = [(3, tile[9])] if not shared and 0 < which < shape.passes else []
    if which in (0, 1, AGAIN):
        done.append((which, block_of(shape, tile)))
    return [*done, (2, tile[0])] if which == 0 else done


def awaited(shape: Shape, tile: Tile) -> dict[Key, int]:
    """Counters that it waits for; as in direction.cuh input and combine_when_ready."""
    shared, which = shape.split(tile)
    tiles = (shape.shared if shared else shape.routed)[0][1]
    if which in (0, AGAIN):  # behind the lap's moves, which wait for the lap before
        lap = tile[9]
        waits = {(3, lap - 1): _steps(shape, shape.laps()[lap - 1])} if lap > 0 else {}
        if lap > 0 and which == 0 and shape.again[1]:
            waits |= {(AGAIN, block_of(shape, tile)): shape.again[1]}
        return waits
    if which == shape.passes:
        blocks = shape.start[-1] // 128
        waits = {(1, block): shape.routed[1][1] for block in range(blocks)}
        of_shared = shape.shared[1][1]
        own = range(blocks, blocks + shape.blocks(shape.experts)) if of_shared else ()
        return waits | {(1, block): of_shared for block in own}
    if which == 1:
        return {(0, block_of(shape, tile)): tiles}
    return {(2, tile[0]): shape.blocks(tile[0]) * tiles}


def _steps(shape: Shape, experts: range) -> int:
    """Tiles of the lap that read the buffers last: of pass 1 and of weight gradients."""
    steps = 0
    for expert in experts:
        steps += shape.blocks(expert) * shape.routed[1][1]
        if shape.count[expert] or shape.keep_empty:
            steps += sum(m * n for m, n, _ in shape.routed[2 : shape.passes])
    return steps


def check_visits(shape: Shape, tiles: list[Tile], _: random.Random) -> None:
    assert Counter(tiles) == expected(shape), "a tile is missing, wrong or there twice"


def check_far_first(shape: Shape, tiles: list[Tile], _: random.Random) -> None:
    """Of pass 1 the row blocks behind the own rank's come first, if all have as many rows."""
    for expert in range(shape.experts):
        blocks = shape.blocks(expert)
        order = [t[2] for t in tiles if t[0] == expert and t[1] == 1 and t[3] == 0]
        if 1 < shape.ranks <= blocks < 16:
            assert order[0] == -(-blocks * (shape.rank + 1) // shape.ranks) % blocks
            assert sorted(order) == list(range(blocks))


def check_order(shape: Shape, tiles: list[Tile], _: random.Random) -> None:
    done: Counter[Key] = Counter()
    combined = False
    for ticket, tile in enumerate(tiles):
        combine = shape.split(tile)[1] == shape.passes
        assert combine or not combined, f"ticket {ticket} comes after a combine tile"
        combined = combine
        for key, count in awaited(shape, tile).items():
            assert done[key] == count, f"ticket {ticket} {tile} waits for {key} of a later ticket"
        done.update(raised(shape, tile))


def check_progress(shape: Shape, tiles: list[Tile], draw: random.Random) -> None:
    """k CTAs run, whatever the grid is; each holds tickets it took in order, and works on the
    oldest. A step is any CTA's whose wait is over."""
    for ctas, held in ((1, 1), (2, 1), (draw.randint(3, 9), draw.randint(1, 3))):
        done: Counter[Key] = Counter()
        holds: list[deque[int]] = [deque() for _ in range(ctas)]
        taken = finished = 0
        while finished < len(tiles):
            for mine in draw.sample(holds, ctas):
                while taken < len(tiles) and len(mine) < held:
                    mine.append(taken)
                    taken += 1
            for mine in draw.sample(holds, ctas):
                waits = awaited(shape, tiles[mine[0]]) if mine else {None: 1}
                if all(done[key] >= count for key, count in waits.items()):
                    done.update(raised(shape, tiles[mine.popleft()]))
                    finished += 1
                    break
            else:
                raise AssertionError(f"{ctas} CTAs stand still after {finished} of {len(tiles)}")


Check = Callable[[Shape, list[Tile], random.Random], None]


def run(planner: Planner, check: Check, seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        shape = drawn(draw)
        check(shape, planner.tiles(shape, draw, draw.randint(1, 7)), draw)


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    return Planner(tmp_path_factory.mktemp("plan"))


@pytest.mark.parametrize(
    ("check", "shapes"),
    [(check_visits, 60), (check_order, 60), (check_progress, 40), (check_far_first, 60)],
)
def test_random_shapes(planner: Planner, check: Check, shapes: int) -> None:
    run(planner, check, range(shapes))


STEADY = "of(ahead + step, 0) : of(step, inside)"
SAYS = {check_visits: "a tile is", check_order: "of a later ticket", check_progress: "stand still"}
SEEDS = {
    "shared rest lost": (
        "if (index < rest) return apart(s.passes + 2 + index);\n    index -= rest;",
        "",
        check_visits,
    ),
    "first in reverse": (
        STEADY,
        "of(experts - 1 - step, 0) : of(step, inside)",
        check_order,
    ),
    "rest of a later expert": (
        STEADY,
        "of(ahead + step, 0) : of(steady - 1 - step, inside)",
        check_progress,
    ),
    "combine twice, first too": (
        "if (index == 0) return apart(s.passes + 1);",
        "if (index == 0) return apart(s.passes);",
        check_progress,
    ),
    "an expert's rest twice": ("of(steady + index / rest, 1", "of(index / rest, 1", check_visits),
    "no zeros for the empty": ("rows || s.keep_empty", "rows", check_visits),
    "every block the first": ("tile.row += tile.m * kRowTile;", "", check_visits),
    "again in the first lap": ("again = number > 0 &&", "again = number >= 0 &&", check_visits),
    "again behind the rest": (
        "!again ? pass : pass == 0 ? pass_again(s) : pass - 1",
        "!again ? pass : pass == s.passes ? pass_again(s) : pass",
        check_order,
    ),
    "a lap of one row tile too many": (
        "while (expert < s.experts && s.start[expert + 1] - row <= s.capacity)",
        "while (expert < s.experts && s.start[expert + 1] - row <= s.capacity + kRowTile)",
        check_visits,
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seeded_fault_is_noticed(tmp_path: pathlib.Path, seed: str) -> None:
    old, new, check = SEEDS[seed]
    planner = Planner(tmp_path, old, new)
    with pytest.raises(AssertionError, match=SAYS[check]):
        run(planner, check, range(40))


def test_moves_come_once_and_the_second_source_follows_the_first(planner: Planner) -> None:
    draw = random.Random(4)
    for _ in range(200):
        shape = replace(drawn(draw), capacity=0)
        groups = shape.start[-1] // 4
        for sources in (1, 2):
            out = ints([0] * (2 * groups * sources + 1))
            words = [ints(shape.words()), ints(shape.start), ints(shape.count)]
            lag = planner.library.move_order(*words, sources, 0, out)
            moves = list(zip(out[:-1:2], out[1::2], strict=True))
            assert lag == shape.start[min(shape.ahead + 1, shape.experts)] // 4
            for source in range(sources):
                assert [g for g, s in moves if s == source] == list(range(groups))
            at = {move: ticket for ticket, move in enumerate(moves)}
            for group in range(groups if sources == 2 else 0):
                assert at[group, 1] > at[min(group + lag, groups - 1), 0]


@pytest.mark.parametrize("most", [8, 32])  # pushes and moves of a row tile
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 16, 72])
def test_ranks_take_turns_in_an_expert(planner: Planner, ranks: int, most: int) -> None:
    """Each takes every group once, and never all of them the same part of an expert."""
    for tiles in (1, 2, 3, 8, 33):
        groups = most * tiles
        orders = []
        for rank in range(ranks):
            out = (ctypes.c_int32 * groups)()
            planner.library.turns(ranks, rank, most, groups, out)
            assert sorted(out) == list(range(groups))
            orders.append(list(out))
        parts = min(1 << ranks.bit_length() - 1, most)
        for taken in zip(*orders, strict=True):
            each = Counter(group * parts // groups for group in taken)
            assert len(each) == parts
            assert max(each.values()) <= -(-ranks // parts)


def test_laps_are_whole_experts_that_fit(planner: Planner) -> None:
    draw, several, alone = random.Random(5), 0, 0
    for _ in range(200):
        shape = drawn(draw)
        laps = shape.laps()
        several += len(laps) > 1
        out = ints([0] * (4 * (len(laps) + 1)))
        words = [ints(shape.words()), ints(shape.start), ints(shape.count)]
        assert planner.library.plan_laps(*words, out) == len(laps)
        for lap, experts in enumerate(laps):
            first, row, _, steps = out[4 * lap : 4 * lap + 4]
            assert (first, row) == (experts.start, shape.start[experts.start])
            rows = shape.start[experts.stop] - row
            assert rows <= shape.rows
            if lap + 1 < len(laps):  # groups of 16 rows sent home, and weight tiles
                pushed = sum(shape.blocks(e) * shape.routed[1][1] for e in experts)
                of_nobody = lap == 0 and shape.again[1] and not shape.routed[shape.passes - 1][1]
                brought = sum(shape.count[e] for e in experts) if of_nobody else 0
                alone += brought > 0
                assert steps == _steps(shape, experts) - pushed + rows // 16 + brought
            groups = ints([0] * (rows + 1))  # a group and its source, of 4 rows
            assert planner.library.move_order(*words, 2, lap, groups) >= 0
            for source in range(2):
                moved = [g for g, s in zip(groups[:-1:2], groups[1::2], strict=True) if s == source]
                assert moved == list(range(rows // 4))
    assert several > 50
    assert alone > 10


def test_rows_outside_the_contract_are_marked(planner: Planner) -> None:
    draw = random.Random(3)
    base = drawn(draw)
    outside = ([0, 64, 256], [64, 128]), ([0, 128, 256], [129, 1]), ([0, 256, 384], [1, 128])
    for start, count in outside:
        shape = replace(base, start=start, count=count, ahead=1, capacity=0)
        assert any(tile[7] for tile in planner.tiles(shape, draw, 1))
