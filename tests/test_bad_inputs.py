"""The table of bad inputs: what is set -> what the message must hold. Rows live where their subject
is tested; here they are counted, held to one form, and the missing ones added.

Rows that need a GPU are in tests/backends/test_cuda*.py and tests/csrc, and are not counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mok_megatron import backends
from mok_megatron.contract import MoEShape
from tests import config_rows
from tests.backends import test_rules

SHAPE: dict[str, Any] = {
    "hidden": 8,
    "ffn": 6,
    "num_experts": 4,
    "top_k": 2,
    "ep_size": 2,
    "dtype": torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A shape that cannot be; `words` of the message: value, remedy."""

    fields: dict[str, Any]
    words: tuple[str, ...]


SHAPES = [
    Row(fields={"hidden": 0}, words=("hidden must be at least 1, got 0", "configuration")),
    Row(fields={"ffn": -3}, words=("ffn must be at least 1, got -3", "configuration")),
    Row(fields={"num_experts": 0}, words=("num_experts must be", "got 0")),
    Row(fields={"top_k": 0}, words=("top_k must be at least 1, got 0",)),
    Row(fields={"ep_size": 0}, words=("ep_size must be at least 1, got 0",)),
    Row(fields={"shared_ffn": -1}, words=("shared_ffn", "got -1", "intermediate-size")),
    Row(fields={"top_k": 5}, words=("5 of 4 experts", "--moe-router-topk")),
    Row(fields={"ep_size": 3}, words=("(4)", "(3)", "--expert-model-parallel-size")),
    Row(fields={"dtype": torch.int8}, words=("floating point, got torch.int8", "--bf16")),
]


@pytest.mark.parametrize("row", SHAPES, ids=lambda row: str(row.fields))
def test_a_shape_that_cannot_be(row: Row) -> None:
    MoEShape(**SHAPE)
    with pytest.raises(ValueError, match=r"^mok: .*; ") as error:
        MoEShape(**SHAPE | row.fields)
    for word in row.words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("name", "device", "words"),
    [
        ("fast", "cpu", "one of auto, cuda, reference, got 'fast'"),
        ("cuda", "cpu", "needs CUDA tensors, got cpu; use --mok-backend reference"),
        ("auto", "meta", "needs CUDA tensors, got meta; use --mok-backend reference"),
    ],
)
def test_a_backend_that_cannot_run(name: str, device: str, words: str) -> None:
    shape = MoEShape(**SHAPE | {"ep_size": 1})
    with pytest.raises((ValueError, RuntimeError), match=r"^mok: ") as error:
        backends.choose(name, shape, torch.device(device), None)
    assert words in str(error.value)


def test_the_table_has_eighty_rows_and_each_says_something() -> None:
    flags = {f"{row.rule}: {row.words}" for row in config_rows.REFUSED}
    calls = test_rules.FORWARD_FAULTS | test_rules.BACKWARD_FAULTS
    assert len(flags) + len(calls) + len(SHAPES) >= 80
    assert all(len(re.sub(r"\W", "", words)) >= 8 for _, words in calls.values())
