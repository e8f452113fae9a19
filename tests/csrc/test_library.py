"""The ops as torch sees them: schemas, traces, and the checks of every argument; no GPU needed."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mok_megatron.backends import library

BF16, INT, BYTE = torch.bfloat16, torch.int32, torch.uint8


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    try:
        library.load()
    except library.LibraryMissing as missing:
        pytest.skip(f"needs the CUDA library: {missing}")


def table(experts: int = 2) -> torch.Tensor:
    return torch.zeros(experts + 1, 128, dtype=BYTE)


def split(experts: int = 2) -> dict[str, torch.Tensor]:
    return {
        "row_start": torch.zeros(experts + 1, dtype=INT),
        "row_count": torch.zeros(experts, dtype=INT),
        "tickets": torch.zeros(2, dtype=INT),
    }


def product_call(**changes: object) -> dict[str, object]:
    call = {"a": torch.zeros(256, 128, dtype=BF16), "weights": table(), **split()}
    return call | {"out": torch.zeros(256, 192, dtype=BF16)} | changes


def up_call(**changes: object) -> dict[str, object]:
    call = {"x": torch.zeros(256, 128, dtype=BF16), "weights": table(), **split()}
    call |= {"prob": torch.zeros(256), "gate_up": torch.zeros(256, 384, dtype=BF16)}
    return call | {"activation": torch.zeros(256, 192, dtype=BF16)} | changes


def down_gradient_call(**changes: object) -> dict[str, object]:
    call = {"dy": torch.zeros(256, 128, dtype=BF16), "weights": table(), **split()}
    call |= {"prob": torch.zeros(256), "gate_up": torch.zeros(256, 384, dtype=BF16)}
    call |= {"d_gate_up": torch.zeros(256, 384, dtype=BF16)}
    call |= {"activation": torch.zeros(256, 192, dtype=BF16)}
    return call | {"prob_parts": torch.zeros(256, 6), "d_prob": torch.zeros(256)} | changes


def weight_gradient_call(**changes: object) -> dict[str, object]:
    call = {"a": torch.zeros(256, 128, dtype=BF16), "b": torch.zeros(256, 192, dtype=BF16)}
    call |= {"table": table(), "gradients": [torch.zeros(128, 192) for _ in range(2)], **split()}
    return call | {"accumulate": True} | changes


CALLS = {
    "grouped_product": product_call,
    "grouped_input_gradient": product_call,
    "grouped_up": up_call,
    "grouped_down_gradient": down_gradient_call,
    "grouped_weight_gradient": weight_gradient_call,
}
WRITTEN = {
    "grouped_product": {"tickets", "out"},
    "grouped_input_gradient": {"tickets", "out"},
    "grouped_up": {"tickets", "gate_up", "activation"},
    "grouped_down_gradient": {"tickets", "d_gate_up", "activation", "prob_parts", "d_prob"},
    "grouped_weight_gradient": {"tickets", "gradients"},
}


@pytest.mark.parametrize("name", CALLS)
def test_schema_names_what_is_written(name: str) -> None:
    schema = getattr(torch.ops.mok_megatron, name).default._schema
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    assert written == WRITTEN[name]
    assert not schema.returns


@pytest.mark.parametrize("name", CALLS)
def test_a_right_call_reaches_the_device_check(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"mok: {name} needs CUDA tensors"):
        getattr(torch.ops.mok_megatron, name)(**CALLS[name]())


@pytest.mark.parametrize("name", CALLS)
def test_traces_without_a_device(name: str) -> None:
    with FakeTensorMode() as mode:
        call = {
            key: [mode.from_tensor(v) for v in value]
            if isinstance(value, list)
            else mode.from_tensor(value)
            if isinstance(value, torch.Tensor)
            else value
            for key, value in CALLS[name]().items()
        }
        assert getattr(torch.ops.mok_megatron, name)(**call) is None


def test_table_traces_with_its_shape() -> None:
    with FakeTensorMode():
        matrices = [torch.empty(128, 64, dtype=BF16) for _ in range(3)]
        made = torch.ops.mok_megatron.encode_matrices(matrices, "product")
        assert (made.shape, made.dtype) == ((4, 128), BYTE)


def misaligned(rows: int, columns: int) -> torch.Tensor:
    return torch.zeros(rows * columns + 1, dtype=BF16)[1:].view(rows, columns)


WRONG = {
    "dtype": ("grouped_product", {"a": torch.zeros(256, 128)}, "a must be bfloat16, got float32"),
    "dimensions": (
        "grouped_product",
        {"a": torch.zeros(256, dtype=BF16)},
        "a must have shape [any, any], got [256]",
    ),
    "columns of a": (
        "grouped_product",
        {"a": torch.zeros(256, 100, dtype=BF16)},
        "the columns of a must be a positive multiple of 64, got 100",
    ),
    "columns of out": (
        "grouped_input_gradient",
        {"out": torch.zeros(256, 96, dtype=BF16)},
        "the columns of out must be a positive multiple of 64, got 96",
    ),
    "rows of out": (
        "grouped_product",
        {"out": torch.zeros(128, 192, dtype=BF16)},
        "out must have shape [256, any], got [128, 192]",
    ),
    "stride": (
        "grouped_product",
        {"a": torch.zeros(128, 256, dtype=BF16).t()},
        "a must be contiguous",
    ),
    "alignment": (
        "grouped_product",
        {"a": misaligned(256, 128)},
        "a must start at a multiple of 16 bytes",
    ),
    "table": (
        "grouped_product",
        {"weights": torch.zeros(3, 64, dtype=BYTE)},
        "weights must have shape [any, 128], got [3, 64]",
    ),
    "empty table": (
        "grouped_product",
        {"weights": torch.zeros(1, 128, dtype=BYTE)},
        "weights must be a table from encode_matrices, got 1 records",
    ),
    "starts": (
        "grouped_product",
        {"row_start": torch.zeros(2, dtype=INT)},
        "row_start must have shape [3], got [2]",
    ),
    "counts": (
        "grouped_up",
        {"row_count": torch.zeros(2, dtype=torch.int64)},
        "row_count must be int32, got int64",
    ),
    "tickets": (
        "grouped_up",
        {"tickets": torch.zeros(1, dtype=INT)},
        "tickets must have shape [2], got [1]",
    ),
    "ctas": ("grouped_product", {"ctas": -1}, "ctas must be 0 (all SMs) to 65535, got -1"),
    "gate_up": (
        "grouped_up",
        {"gate_up": torch.zeros(256, 192, dtype=BF16)},
        "gate_up must have shape [256, 384], got [256, 192]",
    ),
    "prob": (
        "grouped_up",
        {"prob": torch.zeros(256, dtype=BF16)},
        "prob must be float32, got bfloat16",
    ),
    "prob_parts": (
        "grouped_down_gradient",
        {"prob_parts": torch.zeros(256, 3)},
        "prob_parts must have shape [256, 6], got [256, 3]",
    ),
    "gradients": (
        "grouped_weight_gradient",
        {"gradients": [torch.zeros(128, 192)]},
        "gradients must be one tensor for each of the table's 2 experts, got 1",
    ),
    "gradient shape": (
        "grouped_weight_gradient",
        {"gradients": [torch.zeros(192, 128) for _ in range(2)]},
        "every gradient must have shape [128, 192], got [192, 128]",
    ),
    "gradient dtype": (
        "grouped_weight_gradient",
        {"gradients": [torch.zeros(128, 192, dtype=torch.float16) for _ in range(2)]},
        "gradients must be bfloat16 or float32",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_named_with_its_value(case: str) -> None:
    name, changes, message = WRONG[case]
    with pytest.raises(RuntimeError, match=f"mok: {re.escape(message)}"):
        getattr(torch.ops.mok_megatron, name)(**CALLS[name](**changes))


def test_matrices_are_checked() -> None:
    encode = torch.ops.mok_megatron.encode_matrices
    with pytest.raises(RuntimeError, match="needs at least one matrix, got none"):
        encode([], "product")
    with pytest.raises(RuntimeError, match=r"role must be product, .*, got weights"):
        encode([torch.zeros(64, 64, dtype=BF16)], "weights")
    with pytest.raises(
        RuntimeError, match="rows of every matrix must be a positive multiple of 64"
    ):
        encode([torch.zeros(65, 64, dtype=BF16)], "product")
    with pytest.raises(RuntimeError, match="every matrix must have shape"):
        encode([torch.zeros(64, 64, dtype=BF16), torch.zeros(64, 128, dtype=BF16)], "product")
    with pytest.raises(RuntimeError, match="or float32 gradients"):
        encode([torch.zeros(64, 64)], "product")
    with pytest.raises(RuntimeError, match="encode_matrices needs CUDA tensors"):
        encode([torch.zeros(64, 64)], "gradient")


def test_a_missing_library_says_what_to_do(tmp_path: pathlib.Path) -> None:
    with pytest.raises(library.LibraryMissing, match="CUDA library must be built, got no file"):
        library.load(tmp_path / "_C.abi3.so")
