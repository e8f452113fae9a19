"""The protocol between ranks (csrc/workspace.h): no order breaks it, and what would is seen.

Prints the number of states of each problem whose every order was visited.
"""

from __future__ import annotations

import enum
import pathlib
import re
import secrets
from dataclasses import replace

import pytest

from tests.csrc.protocol import ROOT, SMALL, Protocol, Small

SCHEDULES = 2000
PER_SEED = 3000  # drawn schedules in which a planted fault must show
MODEL = (ROOT / "tests/csrc/protocol_model.h").read_text()


class Seed(enum.IntEnum):
    """Of protocol_model.h, read off it."""

    _ignore_ = "names"
    names = re.findall(r"\n  (k\w+),", MODEL[MODEL.index("enum Seed") :].partition("}")[0])
    locals().update({name: number for number, name in enumerate(names[:-1])})


@pytest.fixture(scope="module")
def protocol(tmp_path_factory: pytest.TempPathFactory) -> Protocol:
    return Protocol(tmp_path_factory.mktemp("protocol"))


@pytest.mark.parametrize("name", SMALL)
def test_every_order_of_a_small_problem(
    protocol: Protocol, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = protocol.explore(SMALL[name])
    assert found.fault == ""
    assert found.complete
    assert found.states > 1000
    with capsys.disabled():
        print(f"\n{name}: {found.states} states, {found.steps} steps", end="")


def test_drawn_orders_of_large_problems(protocol: Protocol) -> None:
    random_seed = secrets.randbits(32)
    held, steps, fault = protocol.wander(random_seed, SCHEDULES)
    assert (held, fault) == (SCHEDULES, ""), f"schedule {held} of seed {random_seed}"
    assert steps > 100 * SCHEDULES


BLOCKED = "all are blocked"
LATE = "waits out its own limit"
OTHERS = "others' rows"
SEEDS = {
    "kNoStartWait": "(not this|another) call's",
    "kDroppedStart": BLOCKED,
    "kEarlyStart": "a start that is not this call's",
    "kOneGeneration": f"(not this|another) call's|{BLOCKED}",
    "kWrongGeneration": BLOCKED,
    "kAnyArrival": "a row that is not home",
    "kDroppedArrival": BLOCKED,
    "kEarlyArrival": "a row that is not home",
    "kPushEarly": "a push reads what pass 1 has not made",
    "kPushFirst": BLOCKED,
    "kUnsettled": BLOCKED,
    "kOwedAnnounce": BLOCKED,
    "kEarlyReady": "rows that are not there",
    "kEarlyDone": "has not made",
    "kOwnedTiles": BLOCKED,
    "kGridBarrier": BLOCKED,
    "kTornTicket": "not combined once|not made once",
    "kStaleCounters": "has not made",
    "kFrozenEpoch": "not this call's",
    "kSwappedWait": "has not made",
    "kNoSums": "sums that are not there",
    "kNoRows": "rows that are not there",
    "kUncheckedStart": f"not this call's|{BLOCKED}",
    "kNoDeadline": BLOCKED,
    "kAbortNotTold": LATE,
    "kAbortNotPolled": LATE,
    "kNoLapWait": OTHERS,
    "kNoWeightTiles": OTHERS,
    "kNoHomeRows": OTHERS,
    "kNoSecondRows": "brought over others'",
    "kStay": OTHERS,
    "kOwnLapDone": BLOCKED,
    "kOneSource": "rows that are not there",
    "kNoAgain": "what is not made again",
    "kFirstPass": BLOCKED,
}
# Of two CTAs, in few of their orders: all of a small problem are visited instead.
RARE = {"kNoSecondRows": "laps-of-frozen-weights"}


def test_every_planted_fault_has_a_row() -> None:
    assert {seed.name for seed in Seed} == {"kSound", *SEEDS}
    assert len(SEEDS) >= 12


@pytest.mark.parametrize("name", SEEDS)
def test_a_planted_fault_is_seen(protocol: Protocol, name: str) -> None:
    if name in RARE:
        fault = protocol.explore(replace(SMALL[RARE[name]], seed=Seed[name])).fault
    else:
        _, _, fault = protocol.wander(1, PER_SEED, seed=Seed[name])
    assert re.search(SEEDS[name], fault), fault


EDITS = {
    "an-epoch-may-be-0": ("workspace.h", "epoch + 1 != 0 ? epoch + 1 : 2", "epoch + 1"),
    "an-epoch-keeps-its-generation": (
        "workspace.h",
        "epoch + 1 != 0 ? epoch + 1 : 2",
        "epoch + 1 != 0 ? epoch + 1 : 1",
    ),
    "an-expert-starts-with-its-second-pass": (
        "plan.cuh",
        "if (index < ahead) return of(index, 0);",
        "if (index < ahead) return of(index, 1);",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_planted_fault_of_a_header_is_seen(tmp_path: pathlib.Path, name: str) -> None:
    broken = Protocol(tmp_path, *EDITS[name], optimise="-O0")
    assert any(broken.explore(Small(calls=3, epoch=e, local=2)).fault for e in (-3, -2))
