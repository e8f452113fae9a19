"""All ranks of a test on the first GPU, over gloo, where NCCL wants a GPU for each.

Gloo coalesces collectives of CPU tensors only, so the collectives of DDP's buckets are made one by
one here, and what DDP waits for is all of them. It sends and receives CPU tensors only, so what
pipeline stages and ring attention send from one rank to another goes through the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from mok_megatron import cpu, peers


def install() -> None:
    """For this rank, before Megatron makes its groups. Nothing is compiled at run time, as on the
    shim for the CPU."""
    cpu.forgo_compilation()
    from megatron.core.distributed import param_and_grad_buffer as buffers

    os.environ[peers.OVERLAP] = "1"
    torch.cuda.set_device(0)
    assert buffers._coalescing_manager
    buffers._coalescing_manager = lambda group, async_ops=False: _OneByOne(buffers)
    send_through_the_host()


def send_through_the_host(wanted: Callable[[Tensor], bool] = lambda tensor: tensor.is_cuda) -> None:
    """dist.isend and irecv, batched or not, of `wanted` tensors with a copy on the CPU between."""
    if getattr(dist.isend, "through_the_host", False):
        return
    isend, irecv = dist.isend, dist.irecv

    def staged_isend(
        tensor: Tensor,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> Any:
        if not wanted(tensor):
            return isend(tensor, dst, group, tag, group_dst)
        sent = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
        sent.copy_(tensor)  # waits for the current stream
        return _Staged(isend(sent, dst, group, tag, group_dst), sent, None)

    def staged_irecv(
        tensor: Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Any:
        if not wanted(tensor):
            return irecv(tensor, src, group, tag, group_src)
        received = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
        return _Staged(irecv(received, src, group, tag, group_src), received, tensor)

    staged_isend.through_the_host = True  # type: ignore[attr-defined]
    for owner in (dist, distributed_c10d):  # where users find them, and where P2POp looks
        owner.isend, owner.irecv = staged_isend, staged_irecv


class _Staged:
    """A send or receive of `host`; what came is in `device` after `wait`, in stream order."""

    def __init__(self, work: Any, host: Tensor, device: Tensor | None) -> None:
        self._work, self._host, self._device = work, host, device

    def wait(self) -> None:
        self._work.wait()
        if self._device is not None:
            with torch.no_grad():
                self._device.copy_(self._host)
            self._device = None


class _OneByOne:
    """`with` it: the collectives inside are noted; `wait` waits for each."""

    def __init__(self, buffers: Any) -> None:
        self._collectives = (
            (buffers, "dist_all_gather_func"),
            (buffers, "dist_reduce_scatter_func"),
            (dist, "all_reduce"),
        )
        self._works: list[Any] = []
        self._undo = ExitStack()

    def __enter__(self) -> _OneByOne:
        for owner, name in self._collectives:
            original = getattr(owner, name)
            setattr(owner, name, self._noted(original))
            self._undo.callback(setattr, owner, name, original)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._undo.close()

    def _noted(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*positional: Any, **named: Any) -> Any:
            work = collective(*positional, **named)
            if work is not None:
                self._works.append(work)
            return work

        return noted

    def wait(self) -> None:
        for work in self._works:
            work.wait()
