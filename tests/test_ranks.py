"""What the multi-process tests stand on: results, failures, deadlines, and nothing left."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailed, run_ranks


def _sum_of_ranks(rank: int, world: int, start: torch.Tensor) -> tuple[int, torch.Tensor]:
    total = start + rank
    dist.all_reduce(total)
    return rank, total


def _raise_on(rank: int, world: int, who: int) -> None:
    if rank == who:
        raise ValueError(f"I am rank {rank}")
    dist.barrier()


def _kill_self(rank: int, world: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _leave_a_child_and_hang(rank: int, world: int, folder: str) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    pathlib.Path(folder, f"{rank}").write_text(f"{os.getpid()} {child.pid}")
    if rank == 0:
        signal.pause()


def _hang(rank: int, world: int) -> None:
    os.write(1, f"{os.getpid()}\n".encode())  # one write: lines of two ranks do not mix
    signal.pause()


def test_results_come_in_rank_order():
    results = run_ranks(3, _sum_of_ranks, torch.tensor([10.0]))
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(total.item() == 33.0 for _, total in results)


def test_a_failing_rank_is_named_and_its_peers_do_not_hang():
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 of 2 failed(.|\n)*ValueError: I am rank 1"):
        run_ranks(2, _raise_on, 1, deadline=60)
    assert time.monotonic() - start < 30


def test_a_dead_rank_is_named():
    with pytest.raises(RankFailed, match=r"rank 1 of 2 failed.*\ndied with exit code -9"):
        run_ranks(2, _kill_self, deadline=60)


def test_the_deadline_ends_ranks_and_what_they_started(tmp_path: pathlib.Path):
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 2 did not finish within 8 s"):
        run_ranks(2, _leave_a_child_and_hang, str(tmp_path), deadline=8)
    started = [int(pid) for rank in "01" for pid in (tmp_path / rank).read_text().split()]
    assert len(started) == 4
    for pid in started:  # killed; a zombie may wait for its reaper
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


def test_ranks_end_when_the_test_process_is_killed():
    code = (
        "from tests.ranks import run_ranks\n"
        "from tests.test_ranks import _hang\n"
        "run_ranks(2, _hang, deadline=100)\n"
    )
    root = pathlib.Path(__file__).parents[1]
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    ranks = [psutil.Process(pid) for pid in pids]
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert all(process.status() == "zombie" for process in alive)
