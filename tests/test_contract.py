"""The records: what a shape may be, the flat order of weights, and who fulfils the protocol."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

from mok_megatron import contract
from mok_megatron.backends.reference import ReferenceBackend
from mok_megatron.contract import Backend, MoEShape, WeightGradients, Weights

GOOD = {
    "hidden": 8,
    "ffn": 6,
    "num_experts": 4,
    "top_k": 2,
    "ep_size": 2,
    "dtype": torch.float32,
}


def _weights(shape: MoEShape) -> Weights:
    local = shape.local_experts
    shared = shape.shared_ffn > 0
    return Weights(
        w1=tuple(torch.full((2 * shape.ffn, shape.hidden), float(e)) for e in range(local)),
        w2=tuple(torch.full((shape.hidden, shape.ffn), 10.0 + e) for e in range(local)),
        shared_w1=torch.full((2 * shape.shared_ffn, shape.hidden), 20.0) if shared else None,
        shared_w2=torch.full((shape.hidden, shape.shared_ffn), 21.0) if shared else None,
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 0}, "hidden must be at least 1, got 0"),
        ({"ffn": -1}, "ffn must be at least 1, got -1"),
        ({"num_experts": 0}, "num_experts must be at least 1, got 0"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"ep_size": 0}, "ep_size must be at least 1, got 0"),
        ({"shared_ffn": -2}, "shared_ffn must be 0 .* or more, got -2"),
        ({"top_k": 5}, "cannot choose 5 of 4 experts; lower --moe-router-topk"),
        ({"ep_size": 3}, r"\(4\) must be divisible .*\(3\); change --expert-model-parallel-size"),
        ({"dtype": torch.int32}, "must be floating point, got torch.int32"),
    ],
)
def test_a_shape_that_describes_no_layer_is_refused(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=f"mok: .*{words}"):
        MoEShape(**GOOD | change)


def test_a_shape_knows_its_local_experts_and_may_have_all_experts_chosen() -> None:
    shape = MoEShape(**GOOD | {"top_k": 4})
    assert (shape.local_experts, shape.shared_ffn) == (2, 0)
    assert MoEShape(**GOOD | {"ep_size": 4}).local_experts == 1


@pytest.mark.parametrize("shared_ffn", [0, 3])
def test_the_flat_order_goes_there_and_back(shared_ffn: int) -> None:
    shape = MoEShape(**GOOD, shared_ffn=shared_ffn)
    weights = _weights(shape)
    flat = weights.flat()
    values = [0.0, 1.0, 10.0, 11.0, 20.0, 21.0][: 6 if shared_ffn else 4]
    assert [w.flatten()[0].item() for w in flat] == values
    again = Weights.of(flat, shape)
    assert again.w1 == weights.w1
    assert again.w2 == weights.w2
    assert again.shared_w1 is weights.shared_w1
    assert again.shared_w2 is weights.shared_w2

    frozen = (None, *flat[1:])
    into = WeightGradients.of(frozen, shape, accumulate=True)
    assert into.w1 == (None, weights.w1[1])
    assert into.w2 == weights.w2
    assert (into.shared_w1, into.shared_w2) == (weights.shared_w1, weights.shared_w2)
    assert into.accumulate


RECORDS = [record for record in vars(contract).values() if dataclasses.is_dataclass(record)]


def test_the_records_are_all_there() -> None:
    names = {record.__name__ for record in RECORDS}
    assert names == {"MoEShape", "Weights", "WeightGradients", "Schedule", "Context", "Gradients"}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_records_are_frozen_and_keyword_only(record: type) -> None:
    parameters = inspect.signature(record).parameters.values()
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters)
    assert record.__dataclass_params__.frozen


@pytest.mark.parametrize("method", ["forward", "backward", "schedule"])
def test_the_reference_has_the_signatures_of_the_protocol(method: str) -> None:
    promised = inspect.signature(getattr(Backend, method))
    assert inspect.signature(getattr(ReferenceBackend, method)) == promised
    shape = MoEShape(**GOOD | {"ep_size": 1})
    backend = ReferenceBackend(shape, None)
    assert (backend.name, backend.shape) == ("reference", shape)
