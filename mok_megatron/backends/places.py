"""What a backward's launches read and write, expert by expert: groups of weights, and of places for
their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mok_megatron.backends.tables import Groups
from mok_megatron.contract import WeightGradients, Weights

_GROUPS = ("w1", "w2", "shared_w1", "shared_w2")


def weight_groups(weights: Weights, w1_role: str, w2_role: str) -> Groups:
    """In the order of _GROUPS."""
    routed = ((weights.w1, w1_role), (weights.w2, w2_role))
    if weights.shared_w1 is None or weights.shared_w2 is None:
        return routed
    return (*routed, ((weights.shared_w1,), w1_role), ((weights.shared_w2,), w2_role))


@dataclass(frozen=True)
class Places:
    """Where a backward's weight gradients go: the groups that the kernel fills itself, and the
    rest."""

    into: WeightGradients
    flat: tuple[Tensor | None, ...]
    watch: int  # of what is inside, or 0
    inside: Groups  # those of _GROUPS that have a bit in `wanted`
    wanted: int
    fp32: bool  # those inside
    outside: WeightGradients | None  # None: nothing is left

    @staticmethod
    def of(
        into: WeightGradients, flat: tuple[Tensor | None, ...], watch: int, several: bool
    ) -> Places:
        """The kernel takes a group when every place is wanted and all have the dtype of the first
        such group; experts of which some are frozen, or have places of another dtype, take
        launches of their own.

        Of several ranks there are none: an expert's rows may be gone when the kernel ends. There
        the gradients of frozen experts beside others go where nobody looks, and another dtype is an
        error.
        """
        groups = {name: getattr(into, name) for name in _GROUPS}
        inside: dict[str, Sequence[Tensor]] = {}
        dtype, watched = None, True
        for name, group in groups.items():
            places: Sequence[Any] = group if isinstance(group, tuple) else (group,)
            if several and (filled := _filled(places)):
                places, watched = filled, False  # nothing watches what is made here
            if any(place is None or place.dtype != places[0].dtype for place in places):
                continue
            if dtype is None or dtype == places[0].dtype:
                dtype = places[0].dtype
                inside[name] = places
        left = {
            name: (None,) * len(group) if isinstance(group, tuple) else None
            for name, group in groups.items()
            if name in inside
        }
        rest = replace(into, **left)  # type: ignore[arg-type]
        some = (*rest.w1, *rest.w2, rest.shared_w1, rest.shared_w2)
        if several and (other := {place.dtype for place in some if place is not None}):
            raise RuntimeError(
                "mok: with expert parallelism all weight gradients of a layer must have one dtype, "
                f"got {dtype} and {other}; use --mok-backend reference"
            )
        return Places(
            into=into,
            flat=flat,
            watch=watch if watched else 0,
            inside=[(group, "gradient") for group in inside.values()],
            wanted=sum(1 << i for i, name in enumerate(_GROUPS) if name in inside),
            fp32=dtype == torch.float32,
            outside=None if all(place is None for place in some) else rest,
        )


def _filled(places: Sequence[Tensor | None]) -> Sequence[Tensor] | None:
    """With one scratch for all that nobody wants, if somebody wants another; else None."""
    wanted = [place for place in places if place is not None]
    if not wanted or len(wanted) == len(places):
        return None
    scratch = torch.empty_like(wanted[0])
    return [scratch if place is None else place for place in places]
