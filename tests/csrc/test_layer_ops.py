"""Wrong arguments of the layer's ops: each is named before the device is asked; no GPU needed."""

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


def _table(matrices: int) -> Tensor:
    """As stream_matrices makes it: a record a matrix and the header, at a multiple of 128 bytes."""
    room = torch.zeros(128 * (matrices + 2), dtype=torch.uint8)
    return room[-room.data_ptr() % 128 :][: 128 * (matrices + 1)].view(matrices + 1, 128)


def _misaligned(rows: int, columns: int) -> Tensor:
    return torch.zeros(rows * columns + 8, dtype=BF16)[4:-4].view(rows, columns)


def _schedule() -> Tensor:
    words = torch.ops.mok_megatron.schedule_words(T, K, E)[-1]
    return torch.zeros(4 * words, dtype=torch.uint8)


def _forward() -> dict[str, object]:
    return {
        "x": _bf16(T, H),
        "expert": torch.zeros(T, K, dtype=INT),
        "prob": torch.zeros(T, K),
        "weights": [_table(E), _table(E), _table(1), _table(1)],
        "width": F,
        "shared_width": S,
    }


def _backward() -> dict[str, object]:
    return {
        "x": _bf16(T, H),
        "dy": _bf16(T, H),
        "kept": [_schedule(), _bf16(R, 2 * F), _bf16(T, 2 * S)],
        "weights": [_table(E), _table(E), _table(1), _table(1)],
        "gradients": [_table(E), _table(E), _table(1), _table(1)],
        "choices": K,
        "width": F,
        "shared_width": S,
        "fp32": True,
        "accumulate": True,
        "outside": False,
    }


def _forward_without_shared() -> dict[str, object]:
    whole = _forward()
    return whole | {"weights": whole["weights"][:2], "shared_width": 0}


def _backward_without_shared() -> dict[str, object]:
    """And without a gradient of w1."""
    whole = _backward()
    short = {"weights": 2, "kept": 2, "gradients": 2}
    whole |= {name: whole[name][:count] for name, count in short.items()}
    whole["gradients"][0] = torch.zeros(0, dtype=torch.uint8)
    return whole | {"shared_width": 0}


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
        ("forward", "weights", [_table(E)] * 2, "weights must be 4 tensors, got 2"),
        ("forward", "shared_width", 0, "weights must be 2 tensors, got 4"),
        ("forward", "weights 1", _table(E - 1), r"w2 must have shape \[5, 128\], got \[4, 128\]"),
        ("forward", "weights 3", _table(E), r"shared w2 must have shape \[2, 128\]"),
        ("forward", "weights 1", torch.zeros(0, dtype=torch.uint8), "w2 must have shape"),
        ("forward", "weights 0", torch.zeros(5, 128), "w1 must be uint8, got float32"),
        ("backward", "x", _bf16(0, H), "a layer's kernel needs tokens, got none"),
        ("backward", "dy", _bf16(T, 64), r"dy must have shape \[5, 128\], got \[5, 64\]"),
        ("backward", "dy", _bf16(H, T).t(), "dy must be contiguous"),
        ("backward", "kept", [_bf16(R, 2 * F)], "kept must be 3 tensors, got 1"),
        ("backward", "kept 0", torch.zeros(9, dtype=torch.uint8), "schedule must have shape"),
        ("backward", "kept 1", _bf16(R, F), r"gate_up must have shape \[512, 128\]"),
        ("backward", "kept 1", torch.zeros(R, 2 * F), "gate_up must be bfloat16"),
        ("backward", "kept 2", _bf16(T, S), r"shared gate_up must have shape \[5, 384\]"),
        ("backward", "choices", 65, "1 to 64 choices, got 65"),
        ("backward", "choices", 64, "schedule must have shape"),
        ("backward", "gradients", [_table(E)] * 2, "gradients must be 4 tensors, got 2"),
        ("backward", "gradients 1", _table(1), r"the gradients of w2 must have shape \[5, 128\]"),
        ("backward", "gradients 2", _table(E), "the shared gradient of w1 must have shape"),
    ],
)
def test_one_wrong_argument_is_named(op: str, argument: str, value: object, words: str) -> None:
    """`argument`: a name, or a name and a place in its list."""
    arguments = ARGUMENTS[op]()
    name, *place = argument.split()
    assert name in arguments
    if place:
        arguments[name][int(place[0])] = value
    else:
        arguments[name] = value
    with pytest.raises(RuntimeError, match=f"mok: .*{words}"):
        getattr(torch.ops.mok_megatron, op)(**arguments)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (T, K, E), (3000, 8, 2048), (77, 64, 64)])
def test_the_parts_of_a_schedule_have_room_and_do_not_overlap(sizes: tuple[int, int, int]) -> None:
    """Each at a multiple of 512 bytes; as many rows as capacity() says."""
    tokens, choices, experts = sizes
    *starts, rows, total = torch.ops.mok_megatron.schedule_words(*sizes)
    assert rows == cuda.capacity(tokens * choices, experts)
    room = (experts + 1, experts, 2, 1, 1, tokens * choices, rows, rows)
    ends = [start + size for start, size in zip(starts, room, strict=True)]
    assert all(start % 128 == 0 for start in starts)
    assert all(end <= start for end, start in zip(ends, [*starts[1:], total], strict=True))


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
        torch.ops.mok_megatron.stream_matrices(matrices, role)


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
