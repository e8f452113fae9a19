"""The forward and backward kernels, thread by thread on the CPU, under drawn orders of threads."""

from __future__ import annotations

import ctypes
import secrets

import pytest
import torch

from tests.csrc.emulated_layer import EPOCH, Layer, drawn, found_by_the_kernels, trouble
from tests.csrc.emulation import FAULTS, LOST, build, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler, found none")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_drawn_layers_in_drawn_orders(kernels: ctypes.CDLL, ranks: int) -> None:
    for _ in range(6 // ranks):
        seed = secrets.randbits(31)
        assert trouble(drawn(seed, ranks), kernels) == "", f"seed {seed}"


def of(ranks: int, hidden: int = 64, *, favoured: bool = False, **more: int) -> Layer:
    """150 tokens that go to 4 experts, so that some boxes are full and some are not; favoured: the
    first expert gets them all."""
    draw = torch.Generator().manual_seed(1)
    liking = torch.rand(150, 4, generator=draw)
    liking[:, 0] -= float(favoured)
    return Layer(
        tokens={1: (150,), 2: (20, 130), 4: (7, 0, 142, 1)}[ranks],
        hidden=hidden,
        width=64,
        shared_width=64,
        experts=4,
        expert_TK=liking.argsort(dim=1)[:, :2],
        seed=1,
        **more,
    )


def test_neither_ranks_nor_ctas_nor_orders_change_a_byte(kernels: ctypes.CDLL) -> None:
    """Nor do buffers of one row tile, which a rank's two experts take in turn."""
    seen = []
    for ranks, ctas, started, order, tiles in (
        (1, 1, 0, 1, 0),
        (1, 3, 2, 2, 0),
        (2, 2, 0, 3, 0),
        (4, 1, 0, 4, 0),
        (2, 1, 0, 5, 1),
        (2, 3, 2, 6, 1),
    ):
        it = of(ranks, ctas=ctas, started=started, order=order, tiles=tiles)
        assert (it.budget() < it.most_rows()) == (tiles > 0)
        assert trouble(it, kernels) == "", (ranks, ctas, started, order, tiles)
        routed = [g for i, g in enumerate(it.gradients()) if i % 5 < 4]
        results = [it.of_all(name) for name in ("y", "dx", "d_prob_TK")] + routed
        seen.append([r.contiguous().view(torch.uint8).numpy().tobytes() for r in results])
    assert seen[1:] == seen[:-1]


def test_a_map_is_encoded_again_only_where_a_buffer_has_moved(kernels: ctypes.CDLL) -> None:
    """Ten in a forward, whose weights have ten more in their tables, which are new in each."""
    it, counts = of(1, hidden=192), []  # 192: in no other test
    for moved in ((), (), ("x", "shared_y"), ()):
        for name in moved:
            it.ranks[0].buffers[name] = it.ranks[0].buffers[name].clone()
        before = kernels.encoded_maps()
        assert it.run(kernels, "forward") == ""
        counts.append(kernels.encoded_maps() - before)
    first, again, moved_two, last = counts
    assert 10 < first <= 20
    assert 10 <= again <= 14  # two forms may have one place
    assert 12 <= moved_two <= 16
    assert 10 <= last <= 14
    assert trouble(it, kernels) == ""


def test_what_a_rank_waits_for_is_counted(kernels: ctypes.CDLL) -> None:
    """By a clock that moves with each look; of every call, and where there are others alone."""
    it, before = of(2, ctas=2), [[0, 0, 0]] * 2
    rows = 0
    for direction in ("forward", "backward"):
        assert it.run(kernels, direction) == ""
        now = [space[16:40].view(torch.int64).tolist() for space in it.spaces]
        for a, b in zip(before, now, strict=True):
            assert b[0] >= a[0] + 1000, "for the others' calls"
            assert b[2] > a[2], "for rows of combine"
            rows += b[1] - a[1]
        before = now
    assert rows > 0, "for rows of tiles, in some order"


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(kernels: ctypes.CDLL, name: str) -> None:
    for order in range(20):
        laps = "lap" in name or "again" in name
        ranks = 2 if laps or "push" in name or "overtakes" in name else 1
        hidden = 512 if "products" in name else 64  # so that stages are used again
        ctas = 4 if laps else 2  # more than one is in a lap while others are in the next
        it = of(ranks, hidden, order=order, tiles=int(laps), ctas=ctas)
        if trouble(it, kernels, name):
            return
    raise AssertionError("not seen in 20 orders")


COUNTED, MOVED, MOVED_SLOTS, PUSHED, COMBINED, COMBINED_SLOTS = 8, 0, 1, 2, 3, 4  # census.cuh


@pytest.mark.parametrize(
    ("name", "ranks"),
    [(name, ranks) for name in LOST for ranks in (1, 2) if ranks > 1 or "home" not in name]
    + [(name, 4) for name in LOST if "not" in name],
)
def test_a_lost_or_doubled_row_is_counted(kernels: ctypes.CDLL, name: str, ranks: int) -> None:
    """The count that is wrong is named, and its rank has no result."""
    count = COMBINED if "combined" in name else PUSHED if "home" in name else MOVED
    it = of(ranks)
    for direction, sources, results in (
        ("forward", 1, ["y"]),
        ("backward", 2, ["dx", "d_prob_TK"]),
    ):
        assert it.run(kernels, direction, name) == ""
        kind, rank, value, wanted = found_by_the_kernels(kernels)
        pieces = {MOVED: sources, PUSHED: 1, COMBINED: it.hidden // 8}[count]
        assert (kind, value - wanted) == (COUNTED + count, -pieces if "not" in name else pieces)
        for result in results:
            assert it.ranks[rank].buffers[result].isnan().all()


@pytest.mark.parametrize(
    ("name", "count"), [("slot_R", MOVED_SLOTS), ("row_TK", COMBINED), ("row_count", MOVED)]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_schedule_that_has_changed_since_forward_is_found(
    kernels: ctypes.CDLL, name: str, count: int, ranks: int
) -> None:
    it = of(ranks)
    assert it.run(kernels, "forward") == ""
    assert found_by_the_kernels(kernels) == ()
    words = it.ranks[0].buffers[name]
    words[0] = {"slot_R": words[1], "row_TK": -1, "row_count": words[0] - 1}[name]
    assert it.run(kernels, "backward") == ""
    assert found_by_the_kernels(kernels)[:2] == (COUNTED + count, 0)
    for result in ("dx", "d_prob_TK"):
        assert it.ranks[0].buffers[result].isnan().all()


START, COMBINE_HOME, ABORTED = 18, 19, 24  # Tag in csrc/check.h


def told(it: Layer) -> list[tuple[int, int, int]]:
    """tag, rank and thread of what each rank has been told."""
    words = [int(space[8:12].view(torch.int32)) for space in it.spaces]
    return [(word >> 24, word >> 12 & 0xFFF, word & 0xFFF) for word in words]


def test_a_rank_that_does_not_come_is_given_up_by_all(kernels: ctypes.CDLL) -> None:
    """The first whose limit passes tells all; then nobody waits as long, in later calls either.
    Grids end, with NaN, and no gradient has changed."""
    it, words = of(4), (ctypes.c_int64 * 4)()
    assert it.run(kernels, "forward", absent=2) == ""
    kernels.stopped(words)
    assert tuple(words) == (START, 2, 0, EPOCH + 1 & 0xFFFFFFFF)
    tag, caller, thread = told(it)[0]
    assert (tag, thread) == (START, 2)
    assert caller in (0, 1, 3)
    assert told(it) == [(tag, caller, thread)] * 4
    x_TH = it.ranks[0].buffers["x"].normal_()  # the one given up may still read the old one
    for order, direction in enumerate(("forward", "backward", "forward")):
        it.order = order
        assert it.run(kernels, direction, absent=2) == ""
        assert x_TH.view(torch.uint8).numpy().tobytes() not in it.spaces[0].numpy().tobytes()
        kernels.stopped(words)
        assert words[0] == ABORTED
        assert told(it) == [(tag, caller, thread)] * 4  # who passes it on changes nothing
    assert found_by_the_kernels(kernels) == ()  # that is another record
    for rank in (0, 1, 3):
        for name in ("y", "dx", "d_prob_TK"):
            assert it.ranks[rank].buffers[name].isnan().all(), name
    experts = len(it.w1) - 1
    for i, (gradient, before) in enumerate(zip(it.gradients(), it.before, strict=True)):
        assert i % (experts + 1) == experts or torch.equal(gradient, before)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_combine_waits_no_more_when_another_rank_has_stopped(
    kernels: ctypes.CDLL, direction: str
) -> None:
    """Grids end, and nothing that was waited for in vain is a result."""
    it, words = of(2), (ctypes.c_int64 * 4)()
    if direction == "backward":
        assert it.run(kernels, "forward") == ""
    assert it.run(kernels, direction, "a-rank-stops-before-an-arrival") == ""
    kernels.stopped(words)
    assert words[0] == ABORTED
    for tag, caller, thread in told(it):  # either may have said so to the other
        assert (tag, thread) == (COMBINE_HOME, 5)
        assert caller in (0, 1)
    assert found_by_the_kernels(kernels) == ()
    for name in ("y",) if direction == "forward" else ("dx", "d_prob_TK"):
        assert it.of_all(name).isnan().all(), name


REFUSED = {  # kind in exchange_arguments.h, rank, value, wanted
    "another-layer": (1, 1, 8, 7),
    "tokens-above-the-limit": (6, 1, 130, 100),
    "an-expert-above-the-budget": (7, 0, 256, 128),
}


@pytest.mark.parametrize("why", REFUSED)
def test_ranks_refuse_a_call_alike(kernels: ctypes.CDLL, why: str) -> None:
    """All results are NaN on every rank, gradients are as before, and the next call is made."""
    found = (ctypes.c_int64 * 4)()
    kernels.exchange_fault(found)  # of no call of this test
    it = of(2, most=100 if "limit" in why else 0, favoured="budget" in why)
    it.ranks[1].layer += "layer" in why
    for rank in it.ranks:
        rank.rows = rank.capacity = 128 if "budget" in why else rank.rows
    for direction in ("forward", "backward"):
        assert it.run(kernels, direction) == ""
        kernels.exchange_fault(found)
        if direction == "forward" or "budget" not in why:  # which forward alone can see
            assert tuple(found) == REFUSED[why]
    for name in ("y", "dx", "d_prob_TK"):
        assert it.of_all(name).isnan().all(), name
    experts = len(it.w1) - 1
    for i, (gradient, before) in enumerate(zip(it.gradients(), it.before, strict=True)):
        assert i % (experts + 1) == experts or torch.equal(gradient, before)
    again = of(2)
    again.spaces = [] if "limit" in why else it.spaces  # which a limit shapes
    assert trouble(again, kernels) == ""
