"""What a call of several ranks passes to the ops beside its tensors.

csrc/workspace.h has the protocol. A layer's number is part of the first signal of each of its
calls, so that a rank that makes another call is found before a row moves: layers count in the order
of their first calls, which is the same on all ranks of a group.

A rank that cannot make a call, because its arguments break a rule or there is no memory, tells the
others so in the call's first signal before it raises: then the call is a fault on all of them, and
none waits. So every forward and backward is one call of the group, whether it raises or not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mok_megatron.backends import faults, workspace
from mok_megatron.backends.calls import Calls
from mok_megatron.backends.workspace import Workspace
from mok_megatron.contract import MoEShape
from mok_megatron.limits import (
    Limits,
    buffer_rows,
    context_bytes,
    most_rows,
    row_buffer_bytes,
    row_capacity,
    shared_buffer_bytes,
    symmetric_bytes,
)
from mok_megatron.peers import gib

_WAITS = ("start", "rows", "home")  # Wait in csrc/workspace.h
_WAITED = 16  # bytes before them in its Control
_VIRTUAL_S = 10  # how long virtual ranks wait for each other
_DIRECTIONS = {"forward": 1, "backward": 2}  # CallDirection in csrc/workspace.h


class Ranks:
    """One layer's place in its expert parallel group.

    `given`: a workspace and a layer number, of virtual ranks; otherwise the group's workspace, made
    at the first call. max_tokens, row_budget, deadline and movers: the flags --mok-max-tokens and
    so on; arguments: megatron.training's, or None.
    """

    def __init__(
        self,
        shape: MoEShape,
        group: ProcessGroup | None,
        device: torch.device,
        *,
        given: tuple[Workspace, int] | None = None,
        max_tokens: int | None = None,
        row_budget: float = 1.25,
        deadline: int = 60,
        movers: int = 0,
        arguments: Any = None,
    ) -> None:
        self.shape, self.several = shape, shape.ep_size > 1
        self._group, self._device, self._given = group, device, given
        self._flags = {
            "given_tokens": max_tokens,
            "row_budget": row_budget,
            "arguments": arguments,
        }
        self._deadline = deadline
        self.movers = movers  # CTAs that move rows, 0: all; they change no byte of any result
        self.calls = Calls("cuda", shape, group if self.several else None)
        self._patience_s = _VIRTUAL_S

    def call(self, direction: str, tokens: int) -> tuple[Tensor, list[int]] | tuple[()]:
        """Begins a call. `bases` and `group` of the ops forward and backward; nothing of one rank.

        tokens: T of this rank. The first call of a group and shape makes its workspace, on all
        ranks together, and raises as workspace.of does.
        """
        self.calls.begin(direction, tokens)
        if not self.several:
            return ()
        if self._given is None:
            self._given = self._join(tokens)
        if torch.cuda.is_current_stream_capturing():
            self.calls.place.captured = True
        return self._numbers()

    def _numbers(self) -> tuple[Tensor, list[int]]:
        assert self._given is not None, "no call has begun"
        space, layer = self._given
        limits = space.limits
        return space.bases_P, [
            space.rank,
            limits.tokens,
            limits.rows,
            layer,
            space.settings,
            self._patience_s,
            self.movers,
        ]

    @property
    def rank(self) -> int:
        """The own one in the group."""
        return self._given[0].rank if self._given is not None else 0

    def not_begun(self, error: RuntimeError) -> None:
        """The error of what comes before a call's op: told to the other ranks, and written down."""
        self.calls.phase = "its arguments"
        try:
            self._refuse()
        finally:
            self.calls.failed(error)

    def ended(self, error: RuntimeError) -> RuntimeError:
        """The error of a call's op, written down. There was no memory: then it had not begun, and
        is refused."""
        self.calls.phase = "its launch"
        try:
            if isinstance(error, torch.OutOfMemoryError):
                self._refuse()
            else:
                faults.look_for_stopped()
        finally:
            self.calls.failed(error)
        return error

    def _refuse(self) -> None:
        if not self.several or torch.cuda.is_current_stream_capturing():
            return
        if not faults.stopped()[0]:  # or all have been told
            direction = _DIRECTIONS[self.calls.now.direction]
            torch.ops.mok_megatron.refuse(
                *self._numbers(), direction, self.shape.top_k, self.shape.hidden
            )

    @property
    def limits(self) -> Limits:
        """Of a group that has made a call."""
        assert self._given is not None, "no call has been made"
        return self._given[0].limits

    def take_waits(self) -> list[float]:
        """Milliseconds that the group's calls on this rank have waited since asked last, in all
        layers of the workspace: for other ranks' calls, for rows of tiles, for rows of combine. All
        zero of one rank, and before a first call. Waits for the device."""
        if not self.several or self._given is None:
            return [0.0] * len(_WAITS)
        space = self._given[0]
        at = workspace.parts(self.shape, space.limits.tokens)[1] + _WAITED
        words = space.memory[at : at + 8 * len(_WAITS)].view(torch.int64).tolist()
        taken, space.waited_ns = space.waited_ns, words
        return [(now - before) / 1e6 for now, before in zip(words, taken, strict=True)]

    def numbers(self) -> tuple[int, int]:
        """R of the schedules, and the most tokens of all ranks; 0 and 0 where one rank has room for
        any routing."""
        if not self.several:
            return 0, 0
        return self.limits.rows, self.limits.tokens * self.shape.ep_size

    def memory(self, tokens: int) -> str:
        """What a call of so many tokens keeps and takes, in words; after the first call."""
        shape = self.shape
        most = row_capacity(tokens, shape.top_k, 1, shape.num_experts, 1)
        rows = self.numbers()[0] or most
        if self.several:
            most = most_rows(self.limits.tokens, shape.top_k, shape.ep_size, shape.local_experts)
        held = buffer_rows(rows, self.limits.tokens, shape.ep_size) if self.several else rows
        buffers = row_buffer_bytes(shape.hidden, shape.ffn, held)
        buffers += shared_buffer_bytes(shape.hidden, shape.shared_ffn, tokens)
        kept = context_bytes(shape.ffn, shape.shared_ffn, shape.top_k, tokens, rows, most)
        text = (
            f"a layer keeps {gib(kept)} of each forward of {tokens} tokens for its backward; all "
            f"layers of a shape take buffers of {held} rows in turn, {gib(buffers)}"
        )
        if not self.several:
            return text
        most = self.limits.tokens
        shared = symmetric_bytes(shape.ep_size, most, shape.top_k, shape.hidden)
        return (
            f"{text}, and share a workspace of {gib(shared)} for at most {most} tokens a rank "
            f"({self.limits.source})"
        )

    def _join(self, tokens: int) -> tuple[Workspace, int]:
        assert self._group is not None, "several ranks have a group"
        self._patience_s = patience_s(self._group)
        self.calls.phase = "making the workspace"
        try:
            space = workspace.of(
                self._group,
                self.shape,
                self._device,
                tokens,
                load=lambda: torch.ops.mok_megatron.load_kernels(self._deadline),
                **self._flags,
            )
        except RuntimeError as error:
            self.calls.failed(error)
            raise
        return space, self.calls.layer


def patience_s(group: ProcessGroup) -> int:
    """Seconds that a rank waits for the others to make the call that it is in: the time limit of
    the group, which Megatron's --distributed-timeout-minutes sets; at least 1."""
    kinds = [torch.device(name) for name in ("cuda", "cpu")]
    devices = [device for device in kinds if device in group._device_types]
    limit = group._get_backend(devices[0]).options._timeout
    return max(math.ceil(limit.total_seconds()), 1)
