"""Wrong arguments of the layer's ops: each is named before the device is asked; no GPU needed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mok_megatron import limits
from mok_megatron.backends import cuda, library
from tests.csrc.test_sass import cuobjdump

needs_library = pytest.mark.skipif(
    not library.LIBRARY.is_file(), reason="the CUDA library is not built in this tree"
)
pytestmark = needs_library
T, K, E, H, F, S, R = 5, 2, 4, 128, 64, 192, 512
BF16, INT = torch.bfloat16, torch.int32
BEFORE_THE_LAYER = ("route_count", "route_prefix", "route_place", "route_view", "plan_work")
CHOICES = ("6choose", "6spread")  # as mangled names have them
LAYER = ("7ForwardI", "8BackwardI")  # as mangled names have them


@pytest.fixture(autouse=True)
def _loaded() -> None:
    library.load()


def _route() -> dict[str, object]:
    return {"expert": torch.zeros(T, K, dtype=INT), "prob": torch.zeros(T, K), "experts": E}


def _bf16(rows: int, columns: int) -> Tensor:
    return torch.zeros(rows, columns, dtype=BF16)


def _tables(*matrices: int) -> Tensor:
    """For stream_matrices: records of each table's matrices and its header, at a multiple of 128
    bytes."""
    records = sum(matrices) + len(matrices)
    room = torch.zeros(128 * (records + 1), dtype=torch.uint8)
    return room[-room.data_ptr() % 128 :][: 128 * records].view(records, 128)


def _misaligned(rows: int, columns: int) -> Tensor:
    return torch.zeros(rows * columns + 8, dtype=BF16)[4:-4].view(rows, columns)


def _kept(shared: int = S) -> Tensor:
    """The schedule, g|u of the rows and of the tokens, each of a multiple of 512 bytes."""
    words = torch.ops.mok_megatron.schedule_words(T, K, E)[-1]
    size = 4 * words + 4 * R * F + -(-4 * T * shared // 512) * 512
    return torch.zeros(size, dtype=torch.uint8)


def _forward() -> dict[str, object]:
    return {
        "x": _bf16(T, H),
        "expert": torch.zeros(T, K, dtype=INT),
        "prob": torch.zeros(T, K),
        "weights": _tables(E, E, 1, 1),
        "width": F,
        "shared_width": S,
    }


def _backward() -> dict[str, object]:
    return {
        "x": _bf16(T, H),
        "dy": _bf16(T, H),
        "kept": _kept(),
        "weights": _tables(E, E, 1, 1),
        "gradients": _tables(E, E, 1, 1),
        "wanted": 0b1111,
        "choices": K,
        "width": F,
        "shared_width": S,
        "fp32": True,
        "accumulate": True,
        "outside": False,
    }


def _forward_without_shared() -> dict[str, object]:
    return _forward() | {"weights": _tables(E, E), "shared_width": 0}


def _backward_without_shared() -> dict[str, object]:
    """And without a gradient of w1."""
    tables = {"weights": _tables(E, E), "gradients": _tables(E), "wanted": 0b10}
    return _backward() | tables | {"kept": _kept(0), "shared_width": 0}


def _backward_without_weight_gradients() -> dict[str, object]:
    return _backward() | {"gradients": torch.zeros(0, 128, dtype=torch.uint8), "wanted": 0}


def _choices() -> dict[str, object]:
    return {"probs": torch.zeros(T, E), "map": torch.zeros(T, E, dtype=torch.bool), "top_k": K}


def _spread() -> dict[str, object]:
    expert = torch.zeros(T, K, dtype=INT)
    return {"dprob": torch.zeros(T, K), "expert": expert, "experts": E, "dtype": BF16}


ARGUMENTS: dict[str, Callable[[], dict[str, object]]] = {
    "choices": _choices,
    "spread": _spread,
    "route": _route,
    "forward": _forward,
    "backward": _backward,
}


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        *ARGUMENTS.items(),
        ("forward", _forward_without_shared),
        ("backward", _backward_without_shared),
        ("backward", _backward_without_weight_gradients),
    ],
)
def test_right_arguments_on_the_cpu_are_refused_for_their_device_alone(
    op: str, arguments: Callable[[], dict[str, object]]
) -> None:
    with pytest.raises(RuntimeError, match=f"mok: {op} needs CUDA tensors"):
        getattr(torch.ops.mok_megatron, op)(**arguments())


@pytest.mark.parametrize("op", ["route", "forward", "backward"])
def test_schema_says_that_no_argument_is_written(op: str) -> None:
    """Weight gradients are written through their tables, which autograd never sees."""
    schema = getattr(torch.ops.mok_megatron, op).default._schema
    assert not any(a.alias_info for a in schema.arguments)


@pytest.mark.parametrize(
    ("op", "argument", "value", "words"),
    [
        ("choices", "probs", torch.zeros(T, E).half(), "bfloat16, float32 or float64, got float16"),
        ("choices", "probs", torch.zeros(E, T).t(), "probs must be contiguous"),
        ("choices", "map", torch.zeros(T, E), "map must be bool, got float32"),
        ("choices", "map", torch.zeros(T, K, dtype=torch.bool), r"map must have shape \[5, 4\]"),
        ("choices", "top_k", 0, "1 to 4 choices, got 0"),
        ("choices", "top_k", 5, "1 to 4 choices, got 5"),
        ("spread", "dprob", torch.zeros(T, E), r"dprob must have shape \[5, 2\], got \[5, 4\]"),
        ("spread", "expert", torch.zeros(T, K), "expert must be int32, got float32"),
        ("spread", "experts", 1, "at least as many experts as choices, got 1 for 2"),
        ("spread", "dtype", torch.int32, "bfloat16, float32 or float64, got int32"),
        ("route", "expert", torch.zeros(T, K), "expert must be int32, got float32"),
        ("route", "expert", torch.zeros(T, 65, dtype=INT), "1 to 64 choices, got 65"),
        ("route", "expert", torch.zeros(0, K, dtype=INT), "kernel needs tokens, got none"),
        ("route", "prob", torch.zeros(T, K, dtype=BF16), "prob must be float32, got bfloat16"),
        ("route", "prob", torch.zeros(K, T).t(), "prob must be contiguous"),
        ("route", "experts", 2049, "1 to 2048 experts, got 2049"),
        ("forward", "expert", torch.zeros(T, K), "expert must be int32, got float32"),
        ("forward", "expert", torch.zeros(T, 65, dtype=INT), "1 to 64 choices, got 65"),
        ("forward", "prob", torch.zeros(T, K + 1), r"prob must have shape \[5, 2\], got \[5, 3\]"),
        ("forward", "x", torch.zeros(T, H), "x must be bfloat16, got float32"),
        ("forward", "x", _bf16(T + 1, H), r"x must have shape \[5, any\], got \[6, 128\]"),
        ("forward", "x", _bf16(T, 96), "hidden size must be .* of 64, got 96"),
        ("forward", "x", _misaligned(T, H), "x must start at a multiple of 16 bytes"),
        ("forward", "width", 96, "expert width must be .* of 64, got 96"),
        ("forward", "width", 0, "expert width must be .* of 64, got 0"),
        ("forward", "shared_width", -64, "shared expert's width must be .*, got -64"),
        ("forward", "weights", _tables(E, E, 2), r"weights must have shape \[12, 128\], got \[13"),
        ("forward", "weights", _tables(E), r"1 to 2048 experts, got -1"),
        ("forward", "weights", _tables(E).flatten(), r"weights must be tables, got \[640\]"),
        ("forward", "weights", torch.zeros(14, 128), "weights must be uint8, got float32"),
        ("backward", "x", _bf16(0, H), "a layer's kernel needs tokens, got none"),
        ("backward", "dy", _bf16(T, 64), r"dy must have shape \[5, 128\], got \[5, 64\]"),
        ("backward", "dy", _bf16(H, T).t(), "dy must be contiguous"),
        ("backward", "kept", torch.zeros(9, dtype=torch.uint8), r"kept must have shape .* \[9\]"),
        ("backward", "kept", torch.zeros(9), "kept must be uint8, got float32"),
        ("backward", "choices", 65, "1 to 64 choices, got 65"),
        ("backward", "choices", 64, "kept must have shape"),
        ("backward", "shared_width", 64, "kept must have shape"),
        ("backward", "gradients", _tables(E, E), r"gradients must have shape \[14, 128\]"),
        ("backward", "wanted", 0b1011, r"gradients must have shape \[12, 128\], got \[14, 128\]"),
    ],
)
def test_one_wrong_argument_is_named(op: str, argument: str, value: object, words: str) -> None:
    arguments = ARGUMENTS[op]()
    assert argument in arguments
    arguments[argument] = value
    with pytest.raises(RuntimeError, match=f"mok: .*{words}"):
        getattr(torch.ops.mok_megatron, op)(**arguments)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (T, K, E), (3000, 8, 2048), (77, 64, 64)])
def test_the_parts_of_a_schedule_have_room_and_do_not_overlap(sizes: tuple[int, int, int]) -> None:
    """Each at a multiple of 512 bytes; as many rows as capacity() says."""
    tokens, choices, experts = sizes
    *starts, rows, most, total = torch.ops.mok_megatron.schedule_words(*sizes)
    assert rows == most == cuda.capacity(tokens * choices, experts)
    room = (experts + 1, experts, 2, 1, 1, tokens * choices, rows, rows)
    ends = [start + size for start, size in zip(starts, room, strict=True)]
    assert all(start % 128 == 0 for start in starts)
    assert all(end <= start for end, start in zip(ends, [*starts[1:], total], strict=True))


@pytest.mark.parametrize(("ranks", "budget"), [(2, 1.0), (8, 1.25), (72, 1.25), (3, 100.0)])
def test_a_schedule_of_several_ranks_has_room_for_any_routing(ranks: int, budget: float) -> None:
    tokens, choices, experts = 300, 4, 6
    rows = limits.row_capacity(tokens, choices, ranks, experts, budget)
    *starts, held, most, total = torch.ops.mok_megatron.schedule_words(
        tokens, choices, experts, rows, ranks * tokens
    )
    assert held == rows
    assert most == limits.most_rows(tokens, choices, ranks, experts)
    assert total >= starts[-1] + most  # its last part, probabilities
    with pytest.raises(RuntimeError, match=r"mok: rows of any routing .*raise --mok-row-budget"):
        torch.ops.mok_megatron.schedule_words(tokens, choices, experts, 128, 128 * 1000)


@pytest.mark.parametrize("sizes", [(0, 5, 4), (128, 0, 4), (128, 5, -1)])
def test_sizes_of_no_layer_are_named(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(RuntimeError, match=r"mok: .*, got (none|0|-1)"):
        torch.ops.mok_megatron.schedule_words(*sizes)


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
        torch.ops.mok_megatron.stream_matrices(matrices, role, _tables(len(matrices)))


def test_a_table_of_another_size_is_refused() -> None:
    matrix, table = torch.zeros(64, 64, dtype=BF16), _tables(2)
    with pytest.raises(RuntimeError, match=r"table must have shape \[2, 128\], got \[3, 128\]"):
        torch.ops.mok_megatron.stream_matrices([matrix], "up", table)


def test_limits_in_python_are_those_of_the_kernels() -> None:
    """One expert, or choice, more than cuda.py allows is one too many for the op."""
    words = torch.ops.mok_megatron.schedule_words
    words(1, cuda.MAX_CHOICES, cuda.MAX_EXPERTS)
    with pytest.raises(RuntimeError, match="experts, got"):
        words(1, 1, cuda.MAX_EXPERTS + 1)
    with pytest.raises(RuntimeError, match="choices, got"):
        words(1, cuda.MAX_CHOICES + 1, cuda.MAX_EXPERTS)


@pytest.fixture(scope="module")
def kernels() -> dict[str, list[str]]:
    """Name -> machine code of the kernels that have it in theirs."""
    tool = cuobjdump()
    if tool is None:
        pytest.skip("needs cuobjdump, found none")
    dump = [tool, "--dump-sass", str(library.LIBRARY)]
    text = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    parts = re.split(r"^\s*Function : (\S+)", text, flags=re.MULTILINE)
    code = dict(zip(parts[1::2], parts[2::2], strict=True))
    names = (*BEFORE_THE_LAYER, *CHOICES, *LAYER)
    return {name: [code[long] for long in code if name in long] for name in names}


def test_a_kernel_for_each_step(kernels: dict[str, list[str]]) -> None:
    """Of one rank and of several; backward: fp32 and bf16 gradients, fresh and added to."""
    expected = dict.fromkeys(BEFORE_THE_LAYER, 1) | dict(zip(LAYER, (2, 8), strict=True))
    expected |= dict.fromkeys(CHOICES, 3)  # bf16, fp32 and fp64 probabilities
    assert {name: len(codes) for name, codes in kernels.items()} == expected


@pytest.mark.parametrize("name", LAYER)
def test_rows_move_sixteen_bytes_at_a_time(kernels: dict[str, list[str]], name: str) -> None:
    for code in kernels[name]:
        assert re.search(r"\bLDG\.E\.128", code)
        assert re.search(r"\bSTG\.E\.128", code)


@pytest.mark.parametrize("name", [*BEFORE_THE_LAYER, *CHOICES])
def test_no_atomics_and_no_local_memory(kernels: dict[str, list[str]], name: str) -> None:
    """But the four sums of a census."""
    for code in kernels[name]:
        atomics = re.findall(r"\b(ATOM|ATOMG|ATOMS|RED|REDG)\b", code)
        assert len(atomics) == (4 if name in ("route_place", "route_view") else 0)
        assert not re.search(r"\b(LDL|STL)\b", code)


@pytest.mark.parametrize("seconds", [0, -5, 86401])
def test_a_deadline_has_bounds(seconds: int) -> None:
    with pytest.raises(
        RuntimeError, match=rf"mok: --mok-deadline must .*, got {seconds}; give the"
    ):
        torch.ops.mok_megatron.load_kernels(seconds)


def test_no_launch_has_failed() -> None:
    torch.ops.mok_megatron.check_stopped()
