"""plan.cuh on the host: the tile of every ticket of random shapes, in its order."""

from __future__ import annotations

import pathlib
import secrets

import pytest

from tests.csrc.fuzz import drawn, fuzz, shrunk
from tests.csrc.plan import Tiles, expected

CASES = 10_000


def test_random_shapes(tmp_path: pathlib.Path) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}: python -m tests.csrc --seed {seed} --cases {CASES}")
    tiles = Tiles(tmp_path)
    fuzz(tiles, CASES, seed)
    wrong = [expected(drawn(tiles, seed, index))[:, 7].any() for index in range(500)]
    assert 20 < sum(wrong) < 250, "of the shapes, some have rows outside the contract"


# Seeded faults: an edit of plan.cuh, and what is said of it.
SEEDS = {
    "a start inside a row tile": (
        "g.row % kRowTile != 0 || ",
        "",
        "row of|rows of|depth of|fault of|m of|n of",
    ),
    "a first of the wrong expert": (
        "of(ahead + step, 0) : of(step",
        "of(step, 0) : of(step",
        "expert of|row of|rows of|depth of|another number",
    ),
    "m not counted from the group": ("tile.row += tile.m * kRowTile;", "", "row of"),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seeded_fault_is_noticed_and_made_small(tmp_path: pathlib.Path, seed: str) -> None:
    old, new, words = SEEDS[seed]
    tiles = Tiles(tmp_path, old, new)
    with pytest.raises(AssertionError, match=words):
        fuzz(tiles, 500, 1)
    cases = [drawn(tiles, 1, index) for index in range(500)]
    small = shrunk(tiles, cases[tiles.failures(cases)[0][0]])
    assert small.experts <= 2
