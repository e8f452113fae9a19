"""Expert parallel ranks as processes on one GPU, in symmetric memory, over gloo.

They take turns on the GPU: a wait for another rank lasts until its turn comes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from mok_megatron import peers, records
from mok_megatron.backends import calls, choose, workspace
from mok_megatron.backends.cuda import CudaBackend
from mok_megatron.doctor import merge
from tests.backends import cuda_cases as cases
from tests.backends import cuda_ranks as virtual
from tests.backends.cuda_cases import Problem
from tests.ranks import RankFailed, run_ranks

pytestmark = pytest.mark.gpu
CASE = replace(cases.CASE, seed=37, num_experts=16, top_k=4, tokens=(300,))
DEADLINE_S = 240.0
MANY = 40_000  # tokens, of a workspace of 160 MB a rank


def _on_one_gpu(rank: int, world: int, name: str) -> Any:
    """A function of this file, called by each rank with its group: not the default one, and of two
    groups' ranks in turn where there are four."""
    import torch.distributed as dist

    os.environ[peers.OVERLAP] = "1"
    torch.cuda.set_device(0)
    every = [dist.new_group(list(range(first, world, 2))) for first in range(2)]
    group = dist.group.WORLD if name in _OF_ALL else every[rank % 2]
    result = globals()[name](group)
    dist.barrier()
    workspace.destroy_all()
    return result


def _parts(group: Any, tokens: list[int]) -> tuple[Problem, Problem]:
    """The whole problem, and this rank's part."""
    problem = Problem.of(replace(CASE, tokens=(sum(tokens),)))
    return problem, virtual.split(problem, tokens)[group.rank()]


def _bytes(group: Any) -> list[str]:
    """Several calls with other tokens; what differs from one rank's, on this rank."""
    size, rank, wrong = group.size(), group.rank(), []
    shape = replace(Problem.of(CASE).shape, ep_size=size)
    backend = CudaBackend(shape, group, cases.DEVICE, max_tokens=300, row_budget=float(size))
    for seed in range(4):
        tokens = [[300 // size] * size, [0] * (size - 1) + [300]][seed % 2]
        problem, mine = _parts(group, tokens)
        problem = problem.rerouted(seed)
        mine = virtual.split(problem, tokens)[rank]
        places = problem.places(torch.float32, accumulate=True)
        into = virtual.places(virtual.split(problem, tokens), places)[rank]
        result = cases.call(backend, mine, into)
        whole = cases.call(cases.cuda_backend(problem.shape), problem, places)
        first, local = sum(tokens[:rank]), shape.local_experts
        own = slice(first, first + tokens[rank])
        for name in ("y_TH", "dx_TH", "dprob_TK"):
            if not cases.same(getattr(whole, name)[own], getattr(result, name)):
                wrong.append(f"call {seed}: {name}")
        for group_of, start in enumerate((0, CASE.num_experts)):
            here = slice(start + rank * local, start + (rank + 1) * local)
            own_of = slice(group_of * local, (group_of + 1) * local)
            differs = cases.differing(whole.dw[here], result.dw[own_of])
            wrong += [f"call {seed}: dw{group_of + 1}[{e}]" for e in differs]
    return wrong


def _forward(backend: CudaBackend, part: Problem) -> str:
    """What a call says, or raises, once it is over."""
    try:
        y_TH, _ = backend.forward(part.x_TH, part.expert_TK, part.prob_TK, part.weights)
        torch.cuda.synchronize()
        backend.check()
    except RuntimeError as error:
        return f"{error}"
    return "finite" if bool(y_TH.isfinite().all()) else "NaN without a word"


def _faults(group: Any) -> list[str]:
    """Too many tokens in the first call; then, after a good one, in a later one; a rank that leaves
    a layer out; and a good call."""
    shape = replace(Problem.of(CASE).shape, ep_size=group.size())
    _, small = _parts(group, [100, 50])
    _, large = _parts(group, [100, 120])
    said = [_forward(_backend(shape, group), large)]
    first, second = _backend(shape, group), _backend(shape, group)
    said += [_forward(first, small), _forward(first, large), _forward(second, small)]
    said.append(_forward(first if group.rank() == 0 else second, small))
    said.append(_forward(first, small))
    return said


def _backend(shape: Any, group: Any) -> CudaBackend:
    limits = {"max_tokens": 110, "row_budget": 4.0, "deadline": 5}
    backend, reason = choose("auto", shape, cases.DEVICE, group, **limits)
    assert reason == "the tensors are on a GPU"
    assert isinstance(backend, CudaBackend)
    return backend


def _memory(group: Any) -> tuple[int, int, int]:
    """Of ten workspaces, made and freed one after the other on all ranks at a time: bytes that nine
    of them leave taken on the GPU, bytes that one takes there while it lives, and a rank's part."""
    shape = replace(Problem.of(CASE).shape, ep_size=group.size())
    size = workspace.parts(shape, MANY)[0]
    taken, left = [], []
    for _ in range(10):
        space = workspace.of(group, shape, cases.DEVICE, MANY)
        assert not space.memory.any()
        taken.append(_free())
        peers.gather(group, [0])
        workspace.destroy_all()
        del space
        peers.gather(group, [0])
        left.append(_free())  # the next workspace begins with a barrier
    return left[0] - left[-1], left[-1] - taken[-1], size


def _free() -> int:
    """Bytes free on the GPU, whichever process has the others."""
    return torch.cuda.mem_get_info()[0]


def _death(group: Any) -> str:
    """The last rank dies between two calls."""
    shape = replace(Problem.of(CASE).shape, ep_size=group.size())
    _, mine = _parts(group, [50] * group.size())
    backend = _backend(shape, group)
    assert _forward(backend, mine) == "finite"
    peers.gather(group, [0])
    if group.rank() == group.size() - 1:
        os._exit(7)
    said = _forward(backend, mine)
    workspace.destroy_all()
    raise AssertionError(f"the others hear: {said}")


_OF_ALL = ("_bytes", "_memory", "_death")


def _run(world: int, function: Callable[[Any], Any]) -> list[Any]:
    return run_ranks(world, _on_one_gpu, function.__name__, deadline=DEADLINE_S)


@pytest.mark.parametrize("world", [2, 4])
def test_processes_have_the_bytes_of_one_rank(world: int) -> None:
    assert _run(world, _bytes) == [[]] * world


def test_all_ranks_hear_of_a_fault() -> None:
    """Two groups of two, whose ranks alternate."""
    for first, later_good, later, good, skipped, last in _run(4, _faults):
        assert "at most 110 tokens (--mok-max-tokens), got 120 on expert parallel rank 1" in first
        assert "at most 110 tokens, got 120 on expert parallel rank 1" in later
        assert "must make the same calls in the same order, got layer" in skipped
        assert [later_good, good, last] == ["finite"] * 3


def _stopped(rank: int, world: int, folder: str) -> None:
    """Rank 1 stops between two calls; rank 0, once its record names it, ends both."""
    import torch.distributed as dist

    os.environ |= {peers.OVERLAP: "1", records.VARIABLE: folder}
    torch.cuda.set_device(0)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=15))
    backend = _backend(replace(Problem.of(CASE).shape, ep_size=world), group)
    _, mine = _parts(group, [50] * world)
    assert _forward(backend, mine) == "finite"
    torch.cuda.synchronize()
    peers.gather(group, [0])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    _forward(backend, mine)  # refused, in the end
    while not records.read(Path(folder))[0]:
        time.sleep(0.1)
    os.kill(calls.place_of(group).processes[1][1], signal.SIGKILL)
    os._exit(3)


def test_a_stopped_rank_is_written_down_by_those_who_wait(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="died with exit code"):
        run_ranks(2, _stopped, str(tmp_path), deadline=90)
    answer = merge.merge(tmp_path)
    (found,) = answer["incidents"]
    assert found["what"].startswith("rank 1 did not arrive at call 2 (layer 1, forward)")
    assert "is stopped" in found["what"]
    (record,) = found["records"]
    assert (record["kind"], record["rank"], record["expected"]) == ("wait", 0, 2)
    assert record["phase"].startswith("gather waited for the start")
    assert record["seen"] == 0  # the other generation's first
    assert record["device"].startswith("cuda:0, ")
    assert 15 <= record["waited_s"] < 30


def test_freed_memory_is_free() -> None:
    for left, taken, size in _run(4, _memory):
        assert taken >= 4 * size > 2**29
        assert left < size


def test_a_dead_rank_is_heard_of() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2 failed.*\ndied with exit code 7"):
        _run(2, _death)
