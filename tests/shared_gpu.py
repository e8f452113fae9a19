"""All ranks of a test on the first GPU, over gloo, where NCCL wants a GPU for each.

Gloo coalesces collectives of CPU tensors only, so the collectives of DDP's buckets are made one by
one here, and what DDP waits for is all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

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
