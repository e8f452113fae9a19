"""What is written down of faults that the device finds: the device's words are planted."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mok_megatron import records
from mok_megatron.backends import calls, faults
from mok_megatron.backends.calls import Calls
from mok_megatron.backends.ranks import Ranks
from mok_megatron.backends.rules import CallFault
from mok_megatron.doctor import merge
from mok_megatron.records import Record
from tests.backends.test_workspace import SHAPE
from tests.ranks import run_ranks

CHECK = Path(__file__).parents[2] / "csrc" / "check.h"
WORDS = {
    18: "mok: an earlier launch failed: gather waited for the start of the call on the rank that "
    "is the thread's number (CTA 3, thread 1, saw 2, for 3); this process cannot go on",
    19: "mok: an earlier launch failed: combine waited for a row from another rank (CTA 3, thread "
    "1, saw 2, for 3); this process cannot go on",
    10: "mok: an earlier launch failed: load waited for the rows of its block (CTA 3, thread 1, "
    "saw 2, for 0); this process cannot go on",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a process that has made no call yet."""
    monkeypatch.setenv(records.VARIABLE, str(tmp_path))
    for name in ("_written", "_latest", "_alone"):
        monkeypatch.setattr(calls, name, [])
    monkeypatch.setattr(faults, "_looked", [])
    return tmp_path


def only(folder: Path) -> Record:
    found, damaged = records.read(folder)
    assert not damaged
    (record,) = found
    return record


def test_the_tags_are_those_of_the_header() -> None:
    text = CHECK.read_text().partition("enum class Tag : uint32_t {")[2].partition("};")[0]
    tags = re.findall(r"^  (k\w+)", text, flags=re.MULTILINE)
    ours = {"kStart": faults._START, "kCombineHome": faults._COMBINE_HOME}
    ours["kAborted"] = faults._ABORTED
    assert {name: tags.index(name) for name in ours} == ours


def test_the_counts_are_those_of_the_header() -> None:
    text = (CHECK.parent / "device" / "census.cuh").read_text()
    counts = re.findall(r"^  (k\w+)", text.partition("enum Count")[2].partition("};")[0], re.M)
    header = (CHECK.parent / "exchange_arguments.h").read_text()
    first = re.search(r"kCounted = (\d+)", header)
    assert first is not None
    assert list(faults._COUNTED) == [int(first[1]) + i for i in range(counts.index("kCounts"))]


def _raises(words: str) -> None:
    raise RuntimeError(words)


def _stopped(rank: int, world: int, folder: str, tag: int) -> list[str]:
    """The device of rank 0 has stopped the group's third call of a shape, the fourth of all.
    What is raised there, twice."""
    said = []
    os.environ[records.VARIABLE] = folder
    first, second = (Calls("cuda", SHAPE, dist.group.WORLD) for _ in range(2))
    other = Calls("cuda", replace(SHAPE, hidden=128), dist.group.WORLD)
    for layer, direction in ((first, "forward"), (other, "forward"), (second, "forward")):
        layer.begin(direction, 7)
        layer.end()
    second.begin("backward", 7)
    first.begin("backward", 7)
    if rank == 0:
        faults.stopped = lambda: [tag, 3, 1, 2, 3]
        faults._why_stopped = lambda: WORDS[tag]
        assert faults.look_for_stopped()
        assert faults.look_for_stopped()
        torch.ops.mok_megatron = SimpleNamespace(
            take_route_fault=lambda: [0] * 8,
            take_exchange_fault=lambda: [0] * 5,
            check_stopped=lambda: _raises(WORDS[tag]),
        )
        for _ in range(2):
            with pytest.raises(RuntimeError) as raised:
                faults.raise_found()
            said.append(str(raised.value))
    dist.barrier()
    return said


@pytest.mark.parametrize("tag", WORDS)
def test_a_stopped_launch_is_written_down(tmp_path: Path, tag: int) -> None:
    (said, again), _ = run_ranks(2, _stopped, str(tmp_path), tag, deadline=60)
    record = only(tmp_path)
    assert (record.rank, record.group, record.seen) == (0, [0, 1], 2)
    assert said == again
    words, _, line = said.partition("\nmok: found on rank 0 in ")
    assert words == WORDS[tag]
    assert f", where {record.phase}: {record.counter}, expected " in line
    assert line.endswith(f"; recorded for {records.MERGE} {tmp_path}")
    if tag == 10:  # nobody else's fault, and no epoch says in which call
        assert (record.kind, record.blamed, record.call) == ("error", [0], 0)
        assert record.phase == "load waited for the rows of its block"
        assert line.startswith("a call that is not known, where load waited")
        assert ", expected not known, got 2; look into the log of rank 0 first;" in line
        return
    assert (record.kind, record.counter, record.expected) == ("wait", "epoch of the call", 3)
    assert (record.call, record.layer, record.direction) == (4, 3, "backward")
    assert record.blamed == [1]
    assert re.fullmatch(r"process \d+ runs", record.peers["1"])
    assert line.startswith("call 4 (layer 3, backward), where ")
    assert ": epoch of the call, expected 3, got 2; look into the log of rank 1 (process " in line
    (found,) = merge.merge(tmp_path)["incidents"]
    assert found["what"].startswith("rank 1 did not arrive at call 4 (layer 3, backward)")


TOLD = {"waited for a start": (18, 2, [2]), "waited for a row": (19, 5, [2])}


def _told(rank: int, world: int, folder: str, word: int) -> None:
    """Rank 1 has stopped in the first call, and told rank 0; rank 2 is nowhere."""
    os.environ[records.VARIABLE] = folder
    layer = Calls("cuda", SHAPE, dist.group.WORLD)
    layer.begin("forward", 7)
    if rank == 1:
        layer.phase = "its own wait"
        layer.write_wait(layer.record("wait", "waited in vain", [2]))
    dist.barrier()
    if rank == 0:
        faults.stopped = lambda: [faults._ABORTED, 3, 900, word, 1]
        faults._why_stopped = lambda: (
            "mok: an earlier launch failed: another rank has called abort: expert parallel rank 1, "
            "where gather waited (CTA 3, thread 900, saw 1, for 1); this process cannot go on"
        )
        assert faults.look_for_stopped()
    dist.barrier()


@pytest.mark.parametrize("why", TOLD)
def test_a_rank_that_is_told_to_stop_names_who_told_it_and_who_did_not_come(
    tmp_path: Path, why: str
) -> None:
    tag, thread, blamed = TOLD[why]
    run_ranks(3, _told, str(tmp_path), tag << 24 | 1 << 12 | thread, deadline=60)
    found, damaged = records.read(tmp_path)
    assert not damaged
    (record,) = [one for one in found if one.rank == 0]
    assert (record.kind, record.counter, record.expected) == ("wait", "abort of rank 1", 0)
    assert (record.call, record.blamed) == (1, blamed)
    assert "another rank has called abort: expert parallel rank 1" in record.phase
    (incident,) = merge.merge(tmp_path)["incidents"]
    assert incident["ranks"] == [2]


def test_nothing_is_written_while_nothing_has_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "stopped", lambda: [0, 0, 0, 0, 0])
    Calls("cuda", SHAPE, None).begin("forward", 7)
    assert not faults.look_for_stopped()
    assert not [*folder.iterdir()]


@pytest.mark.parametrize(
    ("route", "exchange", "kind", "words"),
    [
        ([1, 9, 5, 1, 4, 2, 0, 0], [0] * 5, "choice", "got 9 at token 5"),
        ([3, 1, 5, 1, 4, 2, 0x7FC00000, 0], [0] * 5, "probability", "got nan at token 5"),
        ([0] * 8, [6, 1, 120, 110, 0], "tokens", "got 120 on expert parallel rank 1"),
        ([0] * 8, [7, 0, 2560, 1280, 1200], "rows", "set --mok-row-budget to 2.14"),
        (
            [0] * 8,
            [8, 1, 311, 312, 0],
            "error",
            "got 311 pieces of rows moved in for 312",
        ),
        ([0] * 8, [12, 0, 7, 8, 0], "error", "got 7 as the sum of the slots added up for 8"),
        ([0] * 8, [1, 1, 2, 1, 0], "desync", "got layer 2 on expert parallel rank 1"),
    ],
)
def test_a_fault_that_the_device_found_is_written_down(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    route: list[int],
    exchange: list[int],
    kind: str,
    words: str,
) -> None:
    ops = SimpleNamespace(take_route_fault=lambda: route, take_exchange_fault=lambda: exchange)
    monkeypatch.setattr(torch.ops, "mok_megatron", ops, raising=False)
    Calls("cuda", SHAPE, None).begin("forward", 7)
    with pytest.raises(CallFault, match=r"NaN\nmok: found in call 1") as error:
        faults.raise_found()
    assert words in str(error.value)
    record = only(folder)
    assert (record.kind, record.call, record.phase) == (kind, 1, "an earlier call")
    assert words in record.message
    assert record.seen is not None
    assert str(record.seen) in record.message


@pytest.mark.parametrize("error", [CallFault("a rule, got it; do", "arguments"), RuntimeError("x")])
def test_an_error_before_the_launch_is_written_once(folder: Path, error: Exception) -> None:
    ranks = Ranks(replace(SHAPE, ep_size=1), None, torch.device("cpu"))
    ranks.call("backward", 7)
    ranks.not_begun(error)
    said = str(error)
    assert "\nmok: found in call 1 (layer 1, backward)" in said
    ranks.calls.failed(error)
    assert str(error) == said
    record = only(folder)
    assert record.kind == getattr(error, "kind", "error")
    assert (record.direction, record.tokens, record.blamed) == ("backward", 7, [record.rank])


def test_the_first_fault_stays_until_a_call_ends_well(folder: Path) -> None:
    layer = Calls("reference", SHAPE, None)
    for text in ("first", "second"):
        layer.begin("forward", 1)
        layer.failed(RuntimeError(text))
        assert only(folder).message == "first"
    layer.begin("forward", 1)
    layer.end()
    layer.begin("forward", 1)
    layer.failed(RuntimeError("third"))
    assert (only(folder).message, only(folder).call, only(folder).completed) == ("third", 4, 3)


def test_a_record_that_cannot_be_written_hides_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv(records.VARIABLE, str(folder / "file"))
    layer = Calls("reference", SHAPE, None)
    layer.begin("forward", 1)
    error = RuntimeError("the cause")
    layer.failed(error)
    assert str(error).startswith("the cause\nmok: found in call 1 (layer 1, forward); no record: ")
