"""Lists of matrices that a layer sees in every call: are they as before, and their tensor maps.

A model has hundreds of weights. To look at each in Python in every call would cost more than the
launches, so the library holds the list and says in one call whether all are what they were
(csrc/table_ops.cpp). Nothing is trusted for longer than a call: DDP moves parameters in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor

from mok_megatron.backends import library

# Matrices of one shape and dtype, and library.Matrices' role.
Groups = Sequence[tuple[Sequence[Tensor], str]]


class Watch:
    """Whether a list of tensors is the one of the call before, and unchanged, in one call.

    It holds a list only when it has come twice: copies that saved-tensor hooks make, and what a
    recompute makes anew, are not kept alive.
    """

    def __init__(self) -> None:
        self.number = 0  # of the watch that holds them; another list has another one
        self._flat: tuple[Tensor | None, ...] = ()
        self._ids: list[int] = []

    def holds(self, flat: tuple[Tensor | None, ...]) -> bool:
        """The same objects, with the addresses, forms and dtypes they had in `see`."""
        return bool(
            self.number
            and (
                flat is self._flat
                or (len(flat) == len(self._flat) and all(map(is_, flat, self._flat)))
            )
            and library.holds(self.number)
        )

    def see(self, flat: tuple[Tensor | None, ...]) -> None:
        """A list that has just been checked."""
        self.drop()
        ids = [*map(id, flat)]
        if ids == self._ids:
            self._flat = flat
            self.number = torch.ops.mok_megatron.watch([t for t in flat if t is not None])
        self._ids = ids

    def drop(self) -> None:
        if self.number:
            torch.ops.mok_megatron.unwatch(self.number)
        self.number, self._flat = 0, ()

    def __del__(self) -> None:
        self.drop()


class Tables:
    """The last tables of tensor maps of each name and stream, and what they were made of.

    A table belongs to the stream that wrote it: no other is ordered after the writing.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], tuple[object, Tensor]] = {}

    def of(self, name: str, groups: Groups, watch: int, stream: int | None) -> Tensor:
        """Those of all groups, one behind the other in uint8 [n, 128]; the groups are a part of
        what `watch` holds or, for 0, of nothing."""
        if stream is None:
            # The graph writes a table at each replay, so nobody may take it before the first one.
            return _written(groups)
        made_of = watch or [
            (role, matrices[0].dtype, [matrix.data_ptr() for matrix in matrices])
            for matrices, role in groups
        ]
        last = self._last.get((name, stream))
        if last is None or last[0] != made_of:
            last = self._last[name, stream] = (made_of, _written(groups))
        return last[1]


def _written(groups: Groups) -> Tensor:
    sizes = [len(matrices) + 1 for matrices, _ in groups]
    device = groups[0][0][0].device if groups else None
    form = (sum(sizes), library.TENSOR_MAP_BYTES)
    tables = torch.empty(form, dtype=torch.uint8, device=device)
    for (matrices, role), part in zip(groups, tables.split(sizes), strict=True):
        torch.ops.mok_megatron.stream_matrices(list(matrices), role, part)
    return tables


def stream_of(x: Tensor) -> int | None:
    """The current stream of x's device; None while it captures."""
    if torch.cuda.is_current_stream_capturing():
        return None
    # torch.cuda.current_stream makes an object, which takes longer than a launch.
    stream: int = torch._C._cuda_getCurrentRawStream(x.get_device())
    return stream
