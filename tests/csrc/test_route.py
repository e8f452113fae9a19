"""The device code that makes the schedule, on the host: a stable sort, whoever goes first."""

from __future__ import annotations

import pathlib
import secrets

import numpy as np
import pytest
import torch

from mok_megatron.function import top_k_choices
from tests.csrc.fuzz import drawn, fuzz, shrunk
from tests.csrc.route import Choices, Router, expected
from tests.ranks import RankFailed, run_ranks

CASES = 10_000


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Router:
    return Router(tmp_path_factory.mktemp("route"))


def test_the_oracle_by_hand() -> None:
    ids = np.array([[1, -1], [1, 0], [0, 0], [5, 1]], np.int32)
    case = Choices(ids=ids, wild=np.zeros(ids.shape, bool), experts=2, order=0)
    words = expected(case)
    six = int(np.float32(6).view(np.int32))
    assert words["fault"].tolist() == [2, 0, 2, 1, 2, 2, six]
    assert words["faulty"].tolist() == [2]
    assert words["row_start"].tolist() == [0, 128, 256]
    assert words["row_count"].tolist() == [2, 3]
    assert words["row_TK"].tolist() == [128, -1, 129, 0, 1, -1, -1, 130]
    assert words["slot_R"][[0, 1, 2, 128, 129, 130, 131]].tolist() == [3, 4, -1, 0, 2, 7, -1]
    case.wild[1, 0] = case.wild[0, 1] = True  # the other slot is empty
    words = expected(case)
    assert words["fault"].tolist() == [3, 1, 1, 0, 2, 2, int(np.float32(-np.inf).view(np.int32))]
    assert words["faulty"].tolist() == [3]
    assert words["row_count"].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("tokens", "choices", "experts"),
    [(1, 1, 1), (1, 64, 70), (300, 1, 1), (129, 3, 33), (700, 8, 31), (900, 6, 2048)],
)
def test_sizes_at_the_edges(router: Router, tokens: int, choices: int, experts: int) -> None:
    random = np.random.default_rng(tokens)
    ids = np.argsort(random.random((tokens, experts)), axis=1)[:, :choices].astype(np.int32)
    wild = np.zeros(ids.shape, bool)
    for order in range(3):
        wild[-1, -1] = order == 2
        assert not router.failures([Choices(ids=ids, wild=wild, experts=experts, order=order)])


def test_random_choices(router: Router) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}: python -m tests.csrc --seed {seed} --cases {CASES}")
    fuzz(router, CASES, seed)


def test_drawn_cases_have_everything_in_them(router: Router) -> None:
    cases = [drawn(router, 0, index) for index in range(500)]
    faults = [expected(case)["fault"][0] for case in cases]
    assert min(faults.count(kind) for kind in (0, 1, 2, 3)) > 20
    assert sum(case.ids.size > 512 for case in cases) > 20, "of several chunks"
    assert sum(case.experts > 64 for case in cases) > 20
    assert sum(bool((case.ids == -1).all()) for case in cases) > 20
    assert sum(case.ids.shape[1] > case.experts for case in cases) > 20


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(1, 1, 1), (3, 33, 3), (40, 16, 8), (9, 128, 8), (5, 100, 40), (3, 70, 70)],
)
def test_choices_and_their_gradient_are_those_of_torch(
    router: Router, tokens: int, experts: int, top_k: int
) -> None:
    """With empty tokens, full ones, and ones with more routes than slots."""
    random = np.random.default_rng(experts)
    for order in range(4):
        counts = random.integers(0, min(top_k + 1, experts), tokens, endpoint=True)
        ranks = random.random((tokens, experts)).argsort(1).argsort(1)
        routed = ranks < counts[:, None]
        probs = random.random((tokens, experts), np.float32)
        dprob = random.random((tokens, top_k), np.float32)
        expert, prob, dense = router.choose(probs, routed, top_k, dprob, order)
        leaf = torch.from_numpy(probs).requires_grad_()
        wanted, value = top_k_choices(leaf, torch.from_numpy(routed), top_k, torch.float32)
        fits = torch.from_numpy(counts <= top_k)
        (value * torch.from_numpy(dprob))[fits].sum().backward()
        assert torch.equal(torch.from_numpy(expert), wanted)
        assert torch.equal(torch.from_numpy(prob)[fits], value[fits])
        assert torch.equal(torch.from_numpy(dense), leaf.grad)


# Seeded faults: an edit of route.cuh, and what is said of it.
SEEDS = {
    "slots read what another has written": (
        "next[column[i]];\n    __syncwarp();",
        "next[column[i]];",
        "around|row_TK",
    ),
    "sums are read before they are there": (
        "sums[segment][inside] = sum;\n  __syncthreads();",
        "sums[segment][inside] = sum;",
        "around|row|died",
    ),
    "one thread does not come": (
        "int sum = padded;",
        "int sum = padded;\n    if (lane == 5 && padded > 128) return;",
        "stands still",
    ),
    "a negative id is an empty slot": ("expert < 0 || expert >= ", "expert >= ", "fault"),
    "the choice before is not looked at": (
        "other < slot; ++other",
        "other < slot - 1; ++other",
        "fault",
    ),
    "an infinite probability is like any other": (
        "prob - prob == 0.0f",
        "prob == prob",
        "fault",
    ),
    "padding has a row too many": (
        "row < start[expert + 1];",
        "row <= start[expert + 1];",
        "around",
    ),
    "a view has the rows of the expert before": (
        "column >= first && column < first + local",
        "column >= first - 1 && column < first + local",
        "views|died|out of bounds",
        "view.cuh",
    ),
    "a view takes other ranks' tokens for its own": (
        "mine < own_slots",
        "mine < own_slots + 1",
        "views|died",
        "view.cuh",
    ),
    "the budget is one row tile more": (
        "largest <= a.capacity",
        "largest <= a.capacity + kRowTile",
        "views|died",
        "view.cuh",
    ),
    "rows that laps overwrite stay": (
        "start[first + local] - base <= a.rows",
        "start[first + local] - base <= a.rows + kRowTile",
        "views|died",
        "view.cuh",
    ),
}


def _fuzz(rank: int, world: int, tree: str, edit: tuple[str, ...], seed: int) -> None:
    router = Router(pathlib.Path(tree), *edit)
    failing = router.failures([drawn(router, seed, index) for index in range(300)])
    assert not failing, failing[0][1]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seeded_fault_is_noticed(tmp_path: pathlib.Path, seed: str) -> None:
    """In a process of its own: a wrong row may be a wild write."""
    old, new, words, *edited = SEEDS[seed]
    with pytest.raises(RankFailed, match=words):
        run_ranks(1, _fuzz, str(tmp_path), (old, new, *edited), 1)


def test_a_failing_case_is_made_small(tmp_path: pathlib.Path) -> None:
    old, new, _ = SEEDS["the choice before is not looked at"]
    router = Router(tmp_path, old, new)
    cases = [drawn(router, 1, index) for index in range(200)]
    small = shrunk(router, cases[router.failures(cases)[0][0]])
    assert small.ids.tolist() == [[0, 0]]
    assert small.experts == 1
