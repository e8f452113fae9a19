"""The memory that the ranks of an expert parallel group share: who makes it, who frees it.

Layout    csrc/workspace.h; the same on all ranks. Zeroed when it is made, never by a call.
Owner     One workspace for each group and shape, in this module's table; all layers of that shape
          use it. A new group of an old name makes a new one.
Making    Collective, at the first call of a shape, before any kernel that waits: peers agree and
          are checked (peers.py), allocate, map each other's memory, and each reads from every
          peer's what that peer has written there. Each step ends with a barrier of the host, so
          that a rank that fails is named on all of them, and none is left waiting.
Freeing   Local: a mapping keeps its physical memory alive, so a peer that still writes harms
          nobody, and a dead one is not needed. Waits for the own GPU, whose calls have deadlines;
          after a fault that ended the CUDA context the driver frees it, at the process's end.
Virtual   The same for P ranks of one process on one GPU, in ordinary memory.
No multicast, ever: torch is told so, and what it made is looked at.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mok_megatron import __version__, peers
from mok_megatron.backends import library
from mok_megatron.backends.rules import CallFault
from mok_megatron.contract import MoEShape
from mok_megatron.limits import (
    Limits,
    buffer_rows,
    max_tokens,
    row_buffer_bytes,
    row_capacity,
    shared_buffer_bytes,
    tokens_fault,
)

_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Workspace:
    """One rank's part of the shared memory, and where its peers' parts lie.

    memory: uint8 [bytes], the own part. bases_P: int64 [P] on the device, addresses of all parts in
    rank order. settings: the fingerprint that a call's first signal carries.
    """

    def __init__(
        self,
        memory: Tensor,
        bases: list[int],
        rank: int,
        limits: Limits,
        settings: int,
        handle: Any = None,
    ) -> None:
        self.rank, self.limits, self.settings = rank, limits, settings
        self.waited_ns = [0, 0, 0]  # as they were taken last (ranks.py)
        self._memory: Tensor | None = memory
        self._bases_P: Tensor | None = torch.tensor(bases, dtype=torch.int64, device=memory.device)
        self._handle = handle

    @property
    def memory(self) -> Tensor:
        """Raises RuntimeError once the workspace is freed."""
        return _alive(self._memory)

    @property
    def bases_P(self) -> Tensor:
        """Raises RuntimeError once the workspace is freed."""
        return _alive(self._bases_P)

    def destroy(self) -> None:
        """Frees the own memory and the mappings of the peers'; a second call does nothing."""
        memory, self._memory, self._bases_P = self._memory, None, None
        if memory is None:
            return
        handle, self._handle = self._handle, None
        try:
            _synchronize(memory)
        except RuntimeError:  # a fault has ended the context, and torch's release would abort
            _leave_to_the_driver(memory, handle)


def _synchronize(memory: Tensor) -> None:
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)


def _leave_to_the_driver(*objects: object) -> None:
    """References that Python never drops, at its own end either."""
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def _alive(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise RuntimeError(
            "mok: a workspace must not be used after destroy(), got a call on a freed one; build "
            "the layers anew after the process groups"
        )
    return tensor


def parts(shape: MoEShape, tokens: int) -> list[int]:
    """[bytes, offsets in csrc/workspace.h's order] for at most `tokens` tokens of a rank."""
    library.load()
    found = torch.ops.mok_megatron.workspace_parts(shape.ep_size, tokens, shape.top_k, shape.hidden)
    return [int(number) for number in found]


def fingerprint(shape: MoEShape, limits: Limits) -> int:
    """What must be equal on all ranks: shape, limits and version, in 63 bits."""
    return peers.fingerprint(shape, limits.tokens, limits.rows, __version__)


@dataclass
class _Entry:
    group: ProcessGroup
    workspace: Workspace


_entries: dict[tuple[str, MoEShape], _Entry] = {}


def of(
    group: ProcessGroup,
    shape: MoEShape,
    device: torch.device,
    tokens: int,
    *,
    given_tokens: int | None = None,
    row_budget: float = 1.25,
    arguments: Any = None,
    load: Callable[[], None] = lambda: None,
) -> Workspace:
    """The workspace of this group and shape, made at the first call. Collective then.

    tokens: T of this call on this rank. given_tokens, row_budget: --mok-max-tokens and
    --mok-row-budget; arguments: megatron.training's, or None (limits.max_tokens). load: loads every
    kernel of a call; a kernel that loads while another waits may wait for it.
    Raises RuntimeError (rule, value, remedy), on all ranks or none.
    """
    key = (group.group_name, shape)
    entry = _entries.get(key)
    if entry is not None and entry.group is group:
        return entry.workspace
    if entry is not None:
        entry.workspace.destroy()
        del _entries[key]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "mok: a layer with expert parallelism must have run once before a CUDA graph captures "
            "it, got a capture as its first call; make one eager call before it"
        )
    every = [row[0] for row in peers.gather(group, [tokens])]
    most, source = max_tokens(given_tokens, arguments, max(every))
    rows = row_capacity(most, shape.top_k, shape.ep_size, shape.local_experts, row_budget)
    limits = Limits(tokens=most, rows=rows, source=source)
    for rank, count in enumerate(every):
        if fault := tokens_fault(limits, rank, count):
            raise RuntimeError(f"mok: {fault}")
    workspace = share(group, shape, limits, device, load)
    _entries[key] = _Entry(group, workspace)
    return workspace


def destroy_all() -> None:
    """Frees every workspace of this process."""
    while _entries:
        _entries.popitem()[1].workspace.destroy()


def share(
    group: ProcessGroup,
    shape: MoEShape,
    limits: Limits,
    device: torch.device,
    load: Callable[[], None] = lambda: None,
) -> Workspace:
    """A new workspace of the group's ranks. Collective; ends with a barrier of the host.

    Raises RuntimeError (rule, value, remedy), on all ranks or none.
    """
    size, settings = parts(shape, limits.tokens)[0], fingerprint(shape, limits)
    rows = buffer_rows(limits.rows, limits.tokens, shape.ep_size)
    buffers = row_buffer_bytes(shape.hidden, shape.ffn, rows)
    buffers += shared_buffer_bytes(shape.hidden, shape.shared_ffn, limits.tokens)
    mine = peers.card(device, wanted=size + buffers, free=free_bytes(device), config=settings)
    try:
        cards = peers.meet(group, mine)
    except peers.Differs as found:
        raise CallFault(str(found).removeprefix("mok: "), "desync", found.rank) from None
    with _multicast_off():
        memory = _together(group, "allocate its workspace", lambda: _allocate(size, device))
        handle = _together(group, "map its peers' memory", lambda: _join(memory, group))
    workspace = Workspace(memory, handle.buffer_ptrs, group.rank(), limits, settings, handle)
    _together(group, "write its mark", lambda: _mark(memory, mine.nonce))
    _together(group, "find its peers' marks in their memory", lambda: _look(handle, cards))
    _together(group, "make its workspace ready", lambda: _clear(memory, load))
    return workspace


def virtual(
    shape: MoEShape, limits: Limits, device: torch.device, settings: int | None = None
) -> list[Workspace]:
    """Workspaces of shape.ep_size ranks that live in this process on one device.

    They share one allocation; each is freed by its own destroy, the memory with the last.
    """
    size = parts(shape, limits.tokens)[0]
    every = torch.zeros(shape.ep_size, size, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    bases = [part.data_ptr() for part in every]
    same = fingerprint(shape, limits) if settings is None else settings
    return [Workspace(part, bases, rank, limits, same) for rank, part in enumerate(every)]


def free_bytes(device: torch.device) -> int:
    """What the driver would still give on a CUDA device, without torch's unused cache."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def _together[Result](group: ProcessGroup, what: str, action: Callable[[], Result]) -> Result:
    """The action's result once every rank has one; else RuntimeError on all of them."""
    failed: Exception | None = None
    result: Any = None
    try:
        result = action()
    except Exception as error:
        failed = error
    wrong = [rank for rank, row in enumerate(peers.gather(group, [failed is not None])) if row[0]]
    if wrong:
        said = f" ({failed})" if failed is not None else ", whose log says why"
        raise RuntimeError(
            f"mok: every expert parallel rank must {what}, got a failure on rank {wrong[0]}{said}; "
            f"see python -m mok_megatron.doctor, or use {peers.ALLTOALL}"
        ) from failed
    checked: Result = result
    return checked


@contextlib.contextmanager
def _multicast_off() -> Iterator[None]:
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before


def _allocate(size: int, device: torch.device) -> Tensor:
    """Not from torch's pool of symmetric memory, which would keep it when it is freed."""
    from torch._C._distributed_c10d import _SymmetricMemory

    kind = _SymmetricMemory.get_backend(device)
    if kind != "CUDA":
        raise RuntimeError(f"torch's symmetric memory is on {kind}; set_backend('CUDA')")
    return _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)


def _join(memory: Tensor, group: ProcessGroup) -> Any:
    """torch's handle of all ranks' memory."""
    from torch._C._distributed_c10d import _SymmetricMemory

    handle = _SymmetricMemory.rendezvous(memory, group.group_name)
    if handle.multicast_ptr:
        raise RuntimeError(f"torch made a multicast object in spite of {_NO_MULTICAST}=1")
    if (handle.rank, handle.world_size) != (group.rank(), group.size()):
        raise RuntimeError(f"torch joined rank {handle.rank} of {handle.world_size}")
    return handle


def _mark(memory: Tensor, nonce: int) -> None:
    memory[:8].view(torch.int64).fill_(nonce)
    _synchronize(memory)


def _clear(memory: Tensor, load: Callable[[], None]) -> None:
    _mark(memory.zero_(), 0)
    load()


def _look(handle: Any, cards: list[peers.Card]) -> None:
    for rank, card in enumerate(cards):
        seen = int(handle.get_buffer(rank, (1,), torch.int64).item())
        if seen != card.nonce:
            raise RuntimeError(f"rank {rank}'s memory holds {seen:x}, not {card.nonce:x}")
