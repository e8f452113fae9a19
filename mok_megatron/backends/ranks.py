"""What a call of several ranks passes to the ops beside its tensors, and what can be wrong with it.

csrc/workspace.h has the protocol. A layer's number is part of the first signal of each of its
calls, so that a rank that makes another call is found before a row moves: layers count in the order
of their first calls, which is the same on all ranks of a group. What the kernels find is the same
on all ranks, in the same call: its results are NaN on all of them, and each says why.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mok_megatron import workspace
from mok_megatron.contract import MoEShape
from mok_megatron.limits import Limits
from mok_megatron.workspace import Workspace

_DIRECTIONS = {1: "forward", 2: "backward"}  # CallDirection in csrc/workspace.h
_FIELDS = (
    "layer",
    "direction",
    "forward call",
    "row budget",
    "fingerprint of shape, flags and version",
)  # ExchangeFaultKind 1 to 5 in csrc/exchange_arguments.h
_TOKENS, _BUDGET = 6, 7

_layers: Counter[tuple[str, int, int]] = Counter()


class Ranks:
    """One layer's place in its expert parallel group.

    `given`: a workspace and a layer number, of virtual ranks; otherwise the group's workspace, made
    at the first call. max_tokens and row_budget: --mok-max-tokens and --mok-row-budget; arguments:
    megatron.training's, or None.
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
        arguments: Any = None,
    ) -> None:
        self.shape, self.several = shape, shape.ep_size > 1
        self._group, self._device, self._given = group, device, given
        self._flags = {
            "given_tokens": max_tokens,
            "row_budget": row_budget,
            "arguments": arguments,
        }
        self._found: ctypes.c_int32 | None = None
        if self.several:
            address = torch.ops.mok_megatron.exchange_fault_address()
            self._found = ctypes.c_int32.from_address(address)

    def call(self, tokens: int) -> tuple[Tensor | None, list[int]]:
        """`bases` and `group` of the ops forward and backward; of one rank (None, []).

        tokens: T of this rank. The first call of a group and shape makes its workspace, on all
        ranks together, and raises as workspace.of does.
        """
        if not self.several:
            return None, []
        if self._given is None:
            self._given = self._join(tokens)
        space, layer = self._given
        limits = space.limits
        return space.bases_P, [space.rank, limits.tokens, limits.rows, layer, space.settings]

    @property
    def limits(self) -> Limits:
        """Of a group that has made a call."""
        assert self._given is not None, "no call has been made"
        return self._given[0].limits

    def rows(self) -> int:
        """R of the schedules; 0 where one rank has room for any routing."""
        return self.limits.rows if self.several else 0

    def check(self) -> None:
        """Raises RuntimeError for the first fault of a call that the device has recorded, once."""
        if self._found is not None and self._found.value:
            words = torch.ops.mok_megatron.take_exchange_fault()
            if words[0]:
                limits = self._given[0].limits if self._given is not None else None
                raise RuntimeError(describe(words, self.shape, limits))

    def _join(self, tokens: int) -> tuple[Workspace, int]:
        assert self._group is not None, "several ranks have a group"
        space = workspace.of(
            self._group,
            self.shape,
            self._device,
            tokens,
            load=lambda: torch.ops.mok_megatron.load_kernels(),
            **self._flags,
        )
        key = (self._group.group_name, self.shape.hidden, self.shape.top_k)
        _layers[key] += 1
        return space, _layers[key]


def describe(words: Sequence[int], shape: MoEShape, limits: Limits | None) -> str:
    """The words of a record: ExchangeFaultKind, rank, its value, and what it should be."""
    kind, rank, value, wanted = words
    where = f"on expert parallel rank {rank}, in an earlier call on this GPU"
    if kind == _TOKENS:
        text = (
            f"a rank may bring at most {wanted} tokens, got {value} {where}; "
            f"set --mok-max-tokens to {value} or more"
        )
    elif kind == _BUDGET:
        balanced = (limits.tokens if limits is not None else 1) * shape.top_k
        fits = math.ceil(100 * value / balanced) / 100
        remedy = (
            f"set --mok-row-budget to {fits} or more"
            if limits is not None
            else ("raise --mok-row-budget")
        )
        text = (
            f"the rows of a rank must fit its buffers of {wanted}, got {value} with padding "
            f"{where}; {remedy}, or balance the router's load"
        )
    else:
        field = _FIELDS[kind - 1]
        name = (lambda v: _DIRECTIONS.get(v, v)) if field == "direction" else (lambda v: v)
        text = (
            "all expert parallel ranks must make the same calls in the same order, got "
            f"{field} {name(value)} {where}, and {name(wanted)} on rank 0; look for a rank that "
            "skips a layer or a microbatch, or runs with other flags or another version"
        )
    return f"mok: {text}. That call's results are NaN"
