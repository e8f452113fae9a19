"""Where a backward's weight gradients go (mok_megatron/backends/places.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mok_megatron.backends.places import Places
from mok_megatron.contract import WeightGradients

WATCH = 7  # its number


def _into(w1: tuple[Tensor | None, ...], w2: tuple[Tensor | None, ...]) -> WeightGradients:
    return WeightGradients(w1=w1, w2=w2, accumulate=True)


def _of(into: WeightGradients, several: bool) -> Places:
    return Places.of(into, (*into.w1, *into.w2, None, None), WATCH, several)


def _new(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(4, 2, dtype=dtype)


def test_what_nobody_watches_is_told_by_its_addresses() -> None:
    """A table of a watch's number would still name the scratch of the call before."""
    w1, w2 = (_new(), None, _new(), None), (_new(), _new(), _new(), _new())
    several = _of(_into(w1, w2), several=True)
    (filled, _), (whole, _) = several.inside
    assert (several.watch, several.wanted, several.outside) == (0, 0b11, None)
    assert filled[0] is w1[0]
    assert filled[2] is w1[2]
    assert filled[1] is filled[3]  # one scratch for all
    assert filled[1].shape == w1[0].shape
    assert whole == w2
    alone = _of(_into(w1, w2), several=False)
    assert (alone.watch, alone.wanted) == (WATCH, 0b10)
    assert alone.outside is not None
    assert alone.outside.w1 == w1


def test_all_wanted_or_all_frozen_keep_their_watch() -> None:
    places = _of(_into((None, None), (_new(), _new())), several=True)
    assert (places.watch, places.wanted, places.outside) == (WATCH, 0b10, None)


def test_several_ranks_have_one_dtype() -> None:
    into = _into((_new(), _new()), (_new(torch.bfloat16), _new(torch.bfloat16)))
    with pytest.raises(RuntimeError, match=r"mok: .* must have one dtype, got .*; use --mok-back"):
        _of(into, several=True)
    assert _of(into, several=False).wanted == 0b01
