"""Records of failed calls, by real processes that are killed, stopped, elsewhere or wrong.

Each test ends with the merged records: who was first must be right whatever the survivors saw.
"""

from __future__ import annotations

import os
import signal
import stat
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mok_megatron import records
from mok_megatron.backends import calls, reference
from mok_megatron.backends.reference import ReferenceBackend
from mok_megatron.doctor import merge
from tests.batches import Batch, Case, places
from tests.ranks import RankFailed, run_ranks

CASE = Case(
    seed=5,
    hidden=8,
    ffn=6,
    shared_ffn=0,
    num_experts=6,
    top_k=2,
    tokens=(4, 4, 4),
    load="skewed",
    dtype=torch.float32,
)
LIMIT_S = 6.0
CULPRIT = 1
GOOD_CALLS = 3


def _until_the_others_know() -> None:
    """Bounded by the deadline of the test."""
    while [r.blamed for r in records.read(records.directory())[0]] != [[CULPRIT]] * 2:
        time.sleep(0.02)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _elsewhere() -> None:
    _until_the_others_know()
    raise LookupError("this rank has made no call")


def _out_of_memory(*_: Any) -> Any:
    raise MemoryError("nothing left")


def _run(rank: int, world: int, folder: str, what: str) -> tuple[str, list[int]]:
    """What the failed call says on this rank, and the process ids of all."""
    os.environ[records.VARIABLE] = folder
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=LIMIT_S))
    batch, shape = Batch.of(CASE), CASE.shape(world)
    mine, weights = batch.tokens(rank, world), batch.weights(rank, world)
    backend = ReferenceBackend(shape, group)
    arguments = batch.x_TH[mine], batch.expert_TK[mine], batch.prob_TK[mine], weights
    for _ in range(GOOD_CALLS):
        backend.forward(*arguments)
    pids = [pid for _, pid in calls.place_of(group).processes]
    try:
        if rank == CULPRIT and what in ("kill", "stop", "elsewhere"):
            {"kill": _kill, "stop": _stop, "elsewhere": _elsewhere}[what]()
        if rank == CULPRIT and what == "memory":
            reference._expert_forward = _out_of_memory  # type: ignore[assignment]
        if rank == CULPRIT and what == "skip":  # one call less than the others
            _, context = backend.forward(*arguments)
            into = places(weights, shape, 0.0, torch.float32)
            backend.backward(context, torch.zeros_like(arguments[0]), weights, into)
        else:
            backend.forward(*arguments)
            backend.forward(*arguments)
        said = "nothing was raised"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    if what == "stop" and rank == (CULPRIT + 1) % world:  # the other may have ended already
        _until_the_others_know()
        os.kill(pids[CULPRIT], signal.SIGCONT)
    return said, pids


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 of 3 failed.*\ndied with exit code -9"):
        run_ranks(3, _run, str(tmp_path), "kill", deadline=60, last_words=50)
    assert time.monotonic() - began < LIMIT_S + 54
    answer = merge.merge(tmp_path)
    (found,) = answer["incidents"]
    assert found["ranks"] == [CULPRIT]
    assert found["what"].startswith("rank 1 did not arrive at call 4 (layer 1, forward)")
    assert "process" in found["what"]
    assert "has ended" in found["what"]
    assert {record["rank"] for record in found["records"]} <= {0, 2}
    for record in found["records"]:
        assert record["kind"] == "collective"
        assert (record["completed"], record["call"], record["layer"]) == (GOOD_CALLS, 4, 1)
        assert record["blamed"] == [CULPRIT]
        assert (record["expected"], record["seen"]) == (3, 2)
        assert record["group"] == [0, 1, 2]
        assert "test_calls.py" in "".join(record["stack"])
    assert merge.exit_code(answer) == 0


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    said = run_ranks(3, _run, str(tmp_path), "stop", deadline=60)
    pid = said[0][1][CULPRIT]
    for rank in (0, 2):
        text = said[rank][0]
        assert "must take part in a call, got no end of the gather of headers" in text
        assert f"no word from rank 1 (process {pid} is stopped)" in text
        assert f"found in call 4 (layer 1, forward), recorded for {records.MERGE}" in text
        assert str(tmp_path) in text
    (found,) = merge.merge(tmp_path)["incidents"]
    assert found["ranks"] == [CULPRIT]
    assert f"process {pid} is stopped" in found["what"]
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.name.startswith("mok-rank")
    assert len(list(tmp_path.iterdir())) == 3  # one each; the stopped one went on and failed too


def test_a_rank_that_is_elsewhere_is_named(tmp_path: Path) -> None:
    said = run_ranks(3, _run, str(tmp_path), "elsewhere", deadline=60)
    pid = said[0][1][CULPRIT]
    assert said[CULPRIT][0] == "LookupError: this rank has made no call"
    assert f"no word from rank 1 (process {pid} runs)" in said[0][0]
    (found,) = merge.merge(tmp_path)["incidents"]
    assert found["ranks"] == [CULPRIT]
    assert found["what"].startswith("rank 1 did not arrive at call 4 (layer 1, forward)")


def test_a_rank_that_fails_in_the_middle_is_first(tmp_path: Path) -> None:
    said = run_ranks(3, _run, str(tmp_path), "memory", deadline=60)
    assert said[CULPRIT][0].startswith("MemoryError: nothing left\nmok: found in call 4 (layer 1")
    assert "got no end of combine" in said[0][0]
    assert "no word from rank 1" in said[0][0]
    (found,) = merge.merge(tmp_path)["incidents"]
    assert found["ranks"] == [CULPRIT]
    assert found["what"].startswith("rank 1 failed by itself in call 4 (layer 1, forward)")
    assert sorted(record["kind"] for record in found["records"]) == [
        "collective",
        "collective",
        "memory",
    ]


def test_a_rank_that_skips_a_call_is_found_at_once(tmp_path: Path) -> None:
    said = run_ranks(3, _run, str(tmp_path), "skip", deadline=60)
    assert said[0][0] == said[2][0]
    for text, _ in said:
        assert "got forward of layer 1 as call 5 on expert parallel rank 0 and backward" in text
    (found,) = merge.merge(tmp_path)["incidents"]
    assert found["ranks"] == [CULPRIT]
    assert max(record["waited_s"] for record in found["records"]) < LIMIT_S
    assert found["what"].startswith("rank 1 made another call than the others in call 5")


LATE_LIMIT_S, LATE_S = 5.0, 2.5  # late in three calls: together longer than the limit
LATE_CALLS = (0, 3, 5)


def _late(rank: int, world: int, folder: str) -> tuple[list[bytes], list[float]]:
    """Each call's y or dx, and how long it took. One rank is late in its first call, in a later
    forward, and in the backward."""
    os.environ[records.VARIABLE] = folder
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=LATE_LIMIT_S))
    batch, shape = Batch.of(CASE), CASE.shape(world)
    mine, weights = batch.tokens(rank, world), batch.weights(rank, world)
    backend = ReferenceBackend(shape, group)
    found, took = [], []
    for number in range(6):
        if rank == CULPRIT and number in LATE_CALLS:
            time.sleep(LATE_S)
        began = time.monotonic()
        if number < 5:
            y_TH, context = backend.forward(
                batch.x_TH[mine], batch.expert_TK[mine], batch.prob_TK[mine], weights
            )
            found.append(y_TH.numpy().tobytes())
        else:
            into = places(weights, shape, 0.0, torch.float32)
            given = backend.backward(context, batch.dy_TH[mine], weights, into)
            found.append(given.dx_TH.numpy().tobytes())
        took.append(time.monotonic() - began)
    return found, took


def test_a_slow_rank_is_waited_for_in_every_call_anew(tmp_path: Path) -> None:
    """The limit is of one wait, not of a run: slow is not dead, and nothing is written down."""
    every = run_ranks(3, _late, str(tmp_path), deadline=60)
    for rank, (found, took) in enumerate(every):
        assert len(set(found[:5])) == 1
        if rank != CULPRIT:
            assert min(took[number] for number in LATE_CALLS) > LATE_S / 2
            assert sum(took) > LATE_LIMIT_S
    assert not [*tmp_path.iterdir()]
