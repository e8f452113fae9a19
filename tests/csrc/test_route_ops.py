"""Wrong arguments of the ops around the products: each is named before the device is asked."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mok_megatron.backends import cuda, library
from tests.csrc.test_sass import cuobjdump

needs_library = pytest.mark.skipif(
    not library.LIBRARY.is_file(), reason="the CUDA library is not built in this tree"
)
pytestmark = needs_library
T, K, E, H, R = 5, 2, 4, 128, 1408
BF16, INT = torch.bfloat16, torch.int32


@pytest.fixture(autouse=True)
def _loaded() -> None:
    library.load()


def _route() -> dict[str, Tensor]:
    return {
        "expert": torch.zeros(T, K, dtype=INT),
        "prob": torch.zeros(T, K),
        "counts": torch.zeros(2, E + 1, dtype=INT),
        "row_start": torch.zeros(E + 1, dtype=INT),
        "row_count": torch.zeros(E, dtype=INT),
        "shared_start": torch.zeros(2, dtype=INT),
        "shared_count": torch.zeros(1, dtype=INT),
        "faulty": torch.zeros(1, dtype=INT),
        "row": torch.zeros(T, K, dtype=INT),
        "slot": torch.zeros(R, dtype=INT),
        "row_prob": torch.zeros(R),
    }


def _dispatch() -> dict[str, Tensor | list[Tensor]]:
    return {
        "tokens": [torch.zeros(T, H, dtype=BF16)],
        "row": torch.zeros(T, K, dtype=INT),
        "rows": [torch.zeros(R, H, dtype=BF16)],
    }


def _combine() -> dict[str, Tensor | None]:
    return {
        "rows": torch.zeros(R, H, dtype=BF16),
        "shared": torch.zeros(128, H, dtype=BF16),
        "row": torch.zeros(T, K, dtype=INT),
        "faulty": torch.zeros(1, dtype=INT),
        "row_d_prob": torch.zeros(R),
        "out": torch.zeros(T, H, dtype=BF16),
        "d_prob": torch.zeros(T, K),
    }


ARGUMENTS: dict[str, Callable[[], dict[str, object]]] = {
    "route": _route,
    "dispatch": _dispatch,
    "combine": _combine,
}


@pytest.mark.parametrize("op", ARGUMENTS)
def test_right_arguments_on_the_cpu_are_refused_for_their_device_alone(op: str) -> None:
    with pytest.raises(RuntimeError, match=f"mok: {op} needs CUDA tensors"):
        getattr(torch.ops.mok_megatron, op)(**ARGUMENTS[op]())


@pytest.mark.parametrize(
    ("op", "argument", "value", "words"),
    [
        ("route", "expert", torch.zeros(T, K), "expert must be int32, got float32"),
        ("route", "expert", torch.zeros(T, 65, dtype=INT), "1 to 64 choices, got 65 in expert"),
        ("route", "prob", torch.zeros(T, K, dtype=BF16), "prob must be float32, got bfloat16"),
        ("route", "prob", torch.zeros(K, T).t(), "prob must be contiguous"),
        ("route", "row_count", torch.zeros(2049, dtype=INT), "1 to 2048 experts, got 2049"),
        ("route", "counts", torch.zeros(1, E + 1, dtype=INT), r"shape \[2, 5\], got \[1, 5\]"),
        ("route", "slot", torch.zeros(511, dtype=INT), "slot must have 512 to .* rows"),
        ("route", "row", torch.zeros(T, K + 1, dtype=INT), r"row must have shape \[5, 2\]"),
        ("dispatch", "tokens", [], "one or two tensors and as many places, got 0 and 1"),
        ("dispatch", "tokens", [torch.zeros(T, 96, dtype=BF16)], "multiple of 64, got 96"),
        ("dispatch", "tokens", [torch.zeros(T, H)], "tokens must be bfloat16, got float32"),
        ("dispatch", "rows", [torch.zeros(R, 64, dtype=BF16)], r"shape \[any, 128\]"),
        ("combine", "shared", torch.zeros(4, H, dtype=BF16), "a row for each of 5 tokens, got 4"),
        ("combine", "d_prob", None, "both gradients of the probabilities or none, got one"),
        ("combine", "row_d_prob", torch.zeros(R - 1), r"row_d_prob must have shape \[1408\]"),
        ("combine", "out", torch.zeros(T * H + 8, dtype=BF16)[4:-4].view(T, H), "multiple of 16"),
    ],
)
def test_one_wrong_argument_is_named(op: str, argument: str, value: object, words: str) -> None:
    arguments = ARGUMENTS[op]()
    assert argument in arguments
    with pytest.raises(RuntimeError, match=f"mok: .*{words}"):
        getattr(torch.ops.mok_megatron, op)(**{**arguments, argument: value})


@pytest.mark.parametrize(
    ("matrices", "role", "words"),
    [
        ([], "up", "at least one matrix, got none"),
        ([torch.zeros(64, 64, dtype=BF16)], "down", "role must be product, .*got down"),
        ([torch.zeros(64, 64)], "up", "bfloat16, or float32 gradients, got float32 in role up"),
        ([torch.zeros(64, 96, dtype=BF16)], "up", r"multiples of 64, got \[64, 96\]"),
        ([torch.zeros(64, 64, dtype=BF16)], "up", "stream_matrices needs CUDA tensors"),
        (
            [torch.zeros(64, 64, dtype=BF16), torch.zeros(128, 64, dtype=BF16)],
            "up",
            r"every matrix must have shape \[64, 64\], got \[128, 64\]",
        ),
    ],
)
def test_matrices_that_have_no_table(matrices: list[Tensor], role: str, words: str) -> None:
    with pytest.raises(RuntimeError, match=f"mok: .*{words}"):
        torch.ops.mok_megatron.stream_matrices(matrices, role)


def test_limits_in_python_are_those_of_the_kernels() -> None:
    """One expert more than cuda.py allows is one too many for the op; the bound of rows fits."""
    for slots in (1, 7, 300):
        arguments = _route()
        arguments |= {
            "expert": torch.zeros(slots, 1, dtype=INT),
            "prob": torch.zeros(slots, 1),
            "row": torch.zeros(slots, 1, dtype=INT),
            "counts": torch.zeros(-(-slots // cuda._CHUNK) + 1, E + 1, dtype=INT),
        }
        for rows, words in (
            (cuda.capacity(slots, E), "route needs CUDA tensors"),
            (cuda.capacity(slots, E) - 1, "slot must have"),
        ):
            arguments |= {"slot": torch.zeros(rows, dtype=INT), "row_prob": torch.zeros(rows)}
            with pytest.raises(RuntimeError, match=f"mok: {words}"):
                torch.ops.mok_megatron.route(**arguments)
    for experts, words in (
        (cuda.MAX_EXPERTS, "counts must have shape"),
        (cuda.MAX_EXPERTS + 1, "experts, got"),
    ):
        arguments = _route() | {"row_count": torch.zeros(experts, dtype=INT)}
        with pytest.raises(RuntimeError, match=words):
            torch.ops.mok_megatron.route(**arguments)


@pytest.fixture(scope="module")
def kernels() -> dict[str, str]:
    """Name -> machine code of the kernels around the products."""
    tool = cuobjdump()
    if tool is None:
        pytest.skip("needs cuobjdump, found none")
    dump = [tool, "--dump-sass", str(library.LIBRARY)]
    text = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    parts = re.split(r"^\s*Function : (\S+)", text, flags=re.MULTILINE)
    code = dict(zip(parts[1::2], parts[2::2], strict=True))
    names = ("route_count", "route_prefix", "route_place", "dispatch_tokens", "combine_tokens")
    return {name: next(code[long] for long in code if name in long) for name in names}


def test_rows_move_sixteen_bytes_at_a_time(kernels: dict[str, str]) -> None:
    for name in ("dispatch_tokens", "combine_tokens"):
        assert re.search(r"\bLDG\.E\.128", kernels[name]), name
        assert re.search(r"\bSTG\.E\.128", kernels[name]), name


def test_no_atomics_and_no_local_memory(kernels: dict[str, str]) -> None:
    for name, code in kernels.items():
        assert not re.search(r"\b(ATOM|ATOMG|ATOMS|RED|REDG)\b", code), name
        assert not re.search(r"\b(LDL|STL)\b", code), name
