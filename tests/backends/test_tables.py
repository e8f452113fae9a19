"""Whether a list is as before: what a watch notices, and what it does not keep alive. No GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mok_megatron.backends import library
from mok_megatron.backends.tables import Tables, Watch

pytestmark = pytest.mark.skipif(
    not library.LIBRARY.is_file(), reason="the CUDA library is not built in this tree"
)


@pytest.fixture(autouse=True)
def _loaded() -> None:
    library.load()


def _list() -> tuple[Tensor, None, Tensor]:
    return torch.zeros(64, 64), None, torch.zeros(64, 64)


def _watching(flat: tuple[Tensor | None, ...]) -> Watch:
    watch = Watch()
    for _ in range(2):
        assert not watch.holds(flat)
        watch.see(flat)
    assert watch.number
    assert watch.holds(flat)
    return watch


def _moved(t: Tensor) -> None:
    t.data = t.data.clone()


def _reshaped(t: Tensor) -> None:
    t.data = t.data.view(32, 128)


def _transposed(t: Tensor) -> None:
    t.data = t.data.t()


def _of_another_dtype(t: Tensor) -> None:
    t.data = t.data.view(torch.int32)


@pytest.mark.parametrize("change", [_moved, _reshaped, _transposed, _of_another_dtype])
@pytest.mark.parametrize("which", [0, 2])
def test_a_tensor_that_changed_in_place_is_noticed(
    change: Callable[[Tensor], None], which: int
) -> None:
    flat = _list()
    watch = _watching(flat)
    first = watch.number
    change(flat[which])
    assert not watch.holds(flat)
    assert not watch.holds(flat)  # until it is seen, which checks it
    watch.see(flat)
    assert watch.number != first
    assert watch.holds(flat) == flat[which].is_contiguous()  # else it is checked in every call


def test_another_object_or_place_is_noticed() -> None:
    a, _, b = flat = _list()
    watch = _watching(flat)
    assert watch.holds((a, None, b))
    for other in ((a, b, None), (b, None, a), (a, None), (a, None, b.detach()), (a, b, b), ()):
        assert not watch.holds(other)


def test_values_may_change() -> None:
    flat = _list()
    watch = _watching(flat)
    flat[0].add_(1)
    assert watch.holds(flat)


def test_only_what_came_twice_is_held_and_only_until_another_list() -> None:
    watch = Watch()
    flat = _list()
    gone = weakref.ref(flat[0].untyped_storage())
    once = flat[0].data
    watch.see((once,))
    once = None
    watch.see(flat)
    watch.see(flat)
    address = flat[0].data_ptr()
    flat = None
    gc.collect()
    assert watch.number
    assert watch._flat[0].data_ptr() == address  # held: nobody else can get this memory
    watch.see(_list())
    assert not watch.number
    assert watch._flat == ()
    gc.collect()
    assert gone() is None


def test_a_watch_ends_with_its_object() -> None:
    watch = _watching(_list())
    number = watch.number
    del watch
    gc.collect()
    assert not library.holds(number)


def test_a_table_is_kept_for_its_watch_or_addresses_and_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []

    def write(matrices: list[Tensor], role: str, table: Tensor) -> None:
        assert table.shape == (len(matrices) + 1, 128)
        made.append(role)
        table.fill_(len(made))

    monkeypatch.setattr(torch.ops.mok_megatron, "stream_matrices", write)
    kept, pair, other = Tables(), [torch.zeros(64, 64), torch.zeros(64, 64)], torch.zeros(64, 64)
    groups = ((pair, "up"), ((other,), "product"))
    first = kept.of("weights", groups, 0, 7)
    assert first[:, 0].tolist() == [1, 1, 1, 2, 2]
    assert kept.of("weights", groups, 0, 7) is first
    assert kept.of("weights", groups, 0, 8) is not first
    assert kept.of("others", groups, 0, 7) is not first
    assert kept.of("weights", groups, 0, 7) is first
    assert kept.of("weights", groups[:1], 0, 7) is not first
    watched = kept.of("weights", groups, 5, 7)
    _moved(pair[1])
    assert kept.of("weights", groups, 5, 7) is watched
    assert kept.of("weights", groups, 6, 7) is not watched
    third = kept.of("weights", groups, 0, 7)
    _moved(other)
    assert kept.of("weights", groups, 0, 7) is not third
    before = len(made)
    captured = [kept.of("weights", groups, 6, None) for _ in range(2)]
    assert captured[0] is not captured[1]
    assert len(made) == before + 4
    assert kept.of("none", (), 0, 7).shape == (0, 128)
