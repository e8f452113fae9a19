"""Several ranks for one test: processes with a gloo group, a deadline, and nothing left behind.

The processes are forked from a server that has imported torch and Megatron once (preloaded.py), so
a second call costs a fraction of a second, and still no two calls share a process. Each is a
session leader: whatever it starts is killed with it. Each also watches its pipe to the test, and
ends itself when the test process is gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_LAST_WORDS_S = 3.0

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.preloaded"])


class RankFailed(AssertionError):
    """One rank raised, or died; the text holds its traceback or its exit code."""


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    deadline: float = 120.0,
    last_words: float = _LAST_WORDS_S,
) -> list[Any]:
    """What `function(rank, world, *args)` returns on each of `world` ranks, in rank order.

    `function` is found by its name, at module level; arguments and results are pickled. Each rank
    has a default gloo group and one thread. Raises RankFailed for the first rank that fails, when
    the others have ended too or `last_words` seconds later, and TimeoutError `deadline` seconds
    after the ranks were started; either way no process is left.
    """
    call = pickle.dumps((function, args))
    results: dict[int, Any] = {}
    failures: dict[int, tuple[float, str]] = {}  # when, and what is known of it
    with tempfile.TemporaryDirectory(prefix="mok-ranks-") as folder:
        pipes: dict[Connection, int] = {}
        ranks = []
        for rank in range(world):
            ours, theirs = _processes.Pipe()
            process = _processes.Process(
                target=_rank_main, args=(rank, world, folder, call, theirs, deadline)
            )
            process.start()
            theirs.close()
            pipes[ours] = rank
            ranks.append(process)
        end = time.monotonic() + deadline  # not before: the first start waits for the server
        try:
            while pipes and (left := end - time.monotonic()) > 0:
                ready = wait(list(pipes), timeout=left)
                for pipe in ready:
                    rank = pipes.pop(pipe)
                    try:
                        when, succeeded, value = pickle.loads(pipe.recv_bytes())
                    except (EOFError, ConnectionError):
                        ranks[rank].join()  # its peers' failures follow from this one
                        when, succeeded = 0.0, False
                        value = f"died with exit code {ranks[rank].exitcode}\n"
                    if succeeded:
                        results[rank] = value
                        continue
                    if not failures:
                        end = min(end, time.monotonic() + last_words)
                    failures[rank] = when, value
        finally:
            for process in ranks:
                _end(process)
    if failures:
        rank, *later = sorted(failures, key=lambda rank: failures[rank][0])
        text = failures[rank][1]
        others = f"; failed too: {later}" if later else ""
        raise RankFailed(f"rank {rank} of {world} failed{others}\n{text}")
    if pipes:
        late = sorted(pipes.values())
        raise TimeoutError(f"ranks {late} of {world} did not finish within {deadline:g} s")
    return [results[rank] for rank in range(world)]


def _end(process: Any) -> None:
    """Kills the rank, if it still runs, and whatever it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    process.close()


def _rank_main(
    rank: int, world: int, folder: str, call: bytes, pipe: Connection, deadline: float
) -> None:
    os.setsid()
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        function, args = pickle.loads(call)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(os.path.join(folder, "store"), world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=deadline),
        )
        result = function(rank, world, *args)
        message = pickle.dumps((time.monotonic(), True, result))
    except BaseException:
        message = pickle.dumps((time.monotonic(), False, traceback.format_exc()))
    pipe.send_bytes(message)
    if dist.is_initialized():
        dist.destroy_process_group()


def _end_with_parent(pipe: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()  # the parent never writes: this returns when it is gone
    os.killpg(os.getpid(), signal.SIGKILL)
