"""Shared memory of a group: agreed on, proved by marks, one per group and shape, freed alone.

Without a GPU the memory is a file that all ranks map, and torch's part is played by _Joined.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

from mok_megatron import limits, peers
from mok_megatron.backends import workspace
from mok_megatron.contract import MoEShape
from mok_megatron.limits import Limits
from tests.ranks import RankFailed, run_ranks

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHAPE = MoEShape(hidden=64, ffn=64, num_experts=8, top_k=2, ep_size=2, dtype=torch.bfloat16)
LIMITS = Limits(tokens=16, rows=384, source="a test")
CPU = torch.device("cpu")

# ---- layout

LAYOUT = """
#include <initializer_list>
#include "csrc/workspace.h"
extern "C" void layout(int32_t p, int32_t t, int32_t k, int32_t h, int64_t* out) {
  const auto w = mok::Workspace::of({p, t, k, h});
  for (int64_t at : {w.bytes, w.control, w.start[0], w.start[1], w.expert[0], w.expert[1],
                     w.prob[0], w.prob[1], w.x[0], w.x[1], w.dy[0], w.dy[1], w.arrived, w.home})
    *out++ = at;
}
"""


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory):
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler, found none")
    folder = tmp_path_factory.mktemp("layout")
    (folder / "layout.cpp").write_text(LAYOUT)
    command = [compiler, "-std=c++20", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{ROOT}"]
    command += [str(folder / "layout.cpp"), "-o", str(folder / "layout.so")]
    subprocess.run(command, check=True, timeout=120)
    library = ctypes.CDLL(str(folder / "layout.so"))

    def of(*shape: int) -> list[int]:
        out = (ctypes.c_int64 * 14)()
        library.layout(*shape, out)
        return list(out)

    return of


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 64), (2, 300, 8, 2048), (8, 4096, 8, 7168), (72, 8192, 64, 7168)]
)
def test_parts_lie_apart_and_the_plan_knows_their_bytes(layout, shape) -> None:
    ranks, tokens, choices, hidden = shape
    size, control, *ats = layout(*shape)
    starts, rest = [control, *ats], tokens * choices
    sizes = [8, *[32 * ranks] * 2, *[4 * rest] * 4, *[2 * hidden * tokens] * 4]
    sizes += [8 * rest, 2 * hidden * rest]
    ends = 0
    for start, bytes_of in sorted(zip(starts, sizes, strict=True)):
        assert start % 512 == 0
        assert ends <= start < ends + 512
        ends = start + bytes_of
    assert ends <= size < ends + 512
    assert size == limits.symmetric_bytes(*shape)


# ---- ranks that share a file


class _Joined:
    """torch's handle: every rank's file; `wrong` swaps two of them."""

    multicast_ptr = 0

    def __init__(self, files: list[pathlib.Path], rank: int, size: int, wrong: str) -> None:
        self.rank, self.world_size = rank, len(files)
        self.views = [_mapped(file, size) for file in files]
        if wrong == "swapped" and files[1].name == "memory-3" and rank == 1:
            self.views.reverse()
        self.buffer_ptrs = [view.data_ptr() for view in self.views]

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.views[rank][:8].view(dtype)


def _mapped(file: pathlib.Path, size: int) -> torch.Tensor:
    return torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)


def _fake_torch(rank: int, folder: str, wrong: str, of_group: list[int]) -> list[str]:
    """Replaces what needs a GPU; returns the calls."""
    files = [pathlib.Path(folder) / f"memory-{one}" for one in of_group]
    seen = []

    def card(device: torch.device, **known: int) -> peers.Card:
        return peers.Card(host=1, uuid_high=0, uuid_low=rank, nonce=1000 + rank, **known)

    def allocate(size: int, device: torch.device) -> torch.Tensor:
        seen.append(f"allocate, multicast off: {os.environ[workspace._NO_MULTICAST]}")
        if wrong == "allocation" and rank == 2:
            raise RuntimeError("CUDA driver error: out of memory")
        with files[of_group.index(rank)].open("wb") as file:
            file.write(b"\xff" * size)  # as dirty as a GPU's
        return _mapped(files[of_group.index(rank)], size)

    def join(memory: torch.Tensor, group) -> _Joined:
        seen.append("join")
        return _Joined(files, group.rank(), len(memory), wrong)

    peers.card = card
    peers.reaches = lambda every, here: [peers.FINE] * len(every)
    workspace.parts = lambda shape, tokens: [
        limits.symmetric_bytes(shape.ep_size, tokens, shape.top_k, shape.hidden)
    ]
    workspace.free_bytes = lambda device: 1 << 40
    workspace._allocate, workspace._join = allocate, join
    return seen


def _groups(rank: int):
    """Of 0 and 2, of 1 and 3."""
    import torch.distributed as dist

    return [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]


def _share(rank: int, world: int, folder: str, wrong: str) -> dict[str, object]:
    group, of_group = _groups(rank), [rank % 2, rank % 2 + 2]
    seen = _fake_torch(rank, folder, wrong, of_group)
    loaded: list[int] = []
    try:
        w = workspace.share(group, SHAPE, LIMITS, CPU, lambda: loaded.append(1))
    except RuntimeError as error:
        return {"said": str(error)}
    found = {
        "seen": seen,
        "loaded": loaded,
        "zero": not bool(w.memory.any()),
        "bases": w.bases_P.tolist() == w._handle.buffer_ptrs,
        "left": os.environ.get(workspace._NO_MULTICAST),
        "rank": w.rank,
    }
    w.memory[100] = 1 + rank  # what the peer's mapping must show
    peers.gather(group, [0])
    found["peer"] = int(w._handle.views[1 - w.rank][100])
    peers.gather(group, [0])
    if rank == 3 and wrong == "death":
        os._exit(0)
    w.destroy()
    w.destroy()
    with pytest.raises(RuntimeError, match=r"not be used after destroy\(\), got a call on a freed"):
        _ = w.bases_P
    return found


def test_two_groups_share_what_is_theirs(tmp_path: pathlib.Path) -> None:
    for rank, found in enumerate(run_ranks(4, _share, str(tmp_path), "")):
        peer = (rank + 2) % 4
        assert found == {
            "seen": ["allocate, multicast off: 1", "join"],
            "loaded": [1],
            "zero": True,
            "bases": True,
            "left": None,
            "rank": rank // 2,
            "peer": 1 + peer,
        }


def test_destroy_needs_no_peer(tmp_path: pathlib.Path) -> None:
    """Rank 3 dies first; the others end well."""
    with pytest.raises(RankFailed, match=r"rank 3 of 4 failed\ndied with exit code 0"):
        run_ranks(4, _share, str(tmp_path), "death")


@pytest.mark.parametrize(
    ("wrong", "of_group", "words"),
    [
        ("swapped", 1, "find its peers' marks in their memory, got a failure on rank 1"),
        ("allocation", 0, "allocate its workspace, got a failure on rank 1"),
    ],
    ids=["swapped", "allocation"],
)
def test_a_rank_that_fails_is_named_by_its_group(
    tmp_path: pathlib.Path, wrong: str, of_group: int, words: str
) -> None:
    for rank, found in enumerate(run_ranks(4, _share, str(tmp_path), wrong)):
        said = str(found.get("said"))
        if rank % 2 == of_group:
            assert f"mok: every expert parallel rank must {words}" in said
            assert ("whose log says why" in said) == (rank != 2 + of_group)
        else:
            assert said == "None"


def _of(rank: int, world: int, folder: str) -> list[object]:
    import torch.distributed as dist

    group = _groups(rank)
    _fake_torch(rank, folder, "", [rank % 2, rank % 2 + 2])
    first = workspace.of(group, SHAPE, CPU, 10 + rank)
    again = workspace.of(group, SHAPE, CPU, 3)
    other = workspace.of(group, replace(SHAPE, top_k=3), CPU, 10)
    new_group = _groups(rank)
    entries = workspace._entries  # as if the new group had the old one's name
    entries[new_group.group_name, SHAPE] = entries[group.group_name, SHAPE]
    fresh = workspace.of(new_group, SHAPE, CPU, 5)
    over = ""
    try:
        workspace.of(new_group, replace(SHAPE, top_k=1), CPU, 9 + rank, given_tokens=10)
    except RuntimeError as error:
        over = str(error)
    found = [first.limits, again is first, other is first, first._memory is None, fresh.limits.rows]
    workspace.destroy_all()
    dist.barrier()
    return [*found, workspace._entries, fresh._memory, over]


def test_one_workspace_for_a_group_and_shape(tmp_path: pathlib.Path) -> None:
    for rank, found in enumerate(run_ranks(4, _of, str(tmp_path))):
        tokens = 12 + rank % 2  # the larger of the group's
        rows = limits.row_capacity(tokens, 2, 2, 4, 1.25)
        assert found[0] == Limits(tokens=tokens, rows=rows, source="the first call")
        assert found[1:4] == [True, False, True]
        assert found[4] == limits.row_capacity(5, 2, 2, 4, 1.25)
        assert found[5:7] == [{}, None]
        most = 11 + rank % 2
        assert f"bring at most 10 tokens (--mok-max-tokens), got {most} on expert" in found[7]


def test_virtual_ranks_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    size = limits.symmetric_bytes(4, 16, 2, 64)
    monkeypatch.setattr(workspace, "parts", lambda shape, tokens: [size])
    every = workspace.virtual(replace(SHAPE, ep_size=4), LIMITS, CPU)
    assert [w.rank for w in every] == [0, 1, 2, 3]
    bases = every[0].bases_P.tolist()
    for w in every:
        assert w.bases_P.tolist() == bases
        assert w.memory.data_ptr() == bases[w.rank]
        assert len(w.memory) == size
        assert not w.memory.any()
        assert w.settings == every[0].settings
    every[1].destroy()
    assert every[0].memory.sum() == 0


def test_after_a_fault_the_memory_is_left_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Released by torch it would end the process."""
    released = []

    class Handle:
        def __del__(self) -> None:
            released.append(1)

    def fails(memory: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    memory = torch.zeros(8, dtype=torch.uint8)
    sound = workspace.Workspace(memory, [0], 0, LIMITS, 1, Handle())
    sound.destroy()
    assert released == [1]
    faulty = workspace.Workspace(memory, [0], 0, LIMITS, 1, Handle())
    monkeypatch.setattr(workspace, "_synchronize", fails)
    faulty.destroy()
    faulty.destroy()
    del faulty
    assert released == [1]


def test_settings_tell_shapes_and_limits_apart() -> None:
    of = workspace.fingerprint
    known = {
        of(SHAPE, LIMITS),
        of(replace(SHAPE, hidden=128), LIMITS),
        of(SHAPE, replace(LIMITS, rows=512)),
        of(SHAPE, replace(LIMITS, tokens=17)),
    }
    assert len(known) == 4
    assert of(SHAPE, LIMITS) == of(SHAPE, replace(LIMITS, source="other words"))
