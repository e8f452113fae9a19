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
T, K, E, H, F, S, R = 5, 2, 4, 128, 64, 192, 1408
BF16, INT = torch.bfloat16, torch.int32
BEFORE_THE_LAYER = ("route_count", "route_prefix", "route_place", "plan_work")
LAYER = ("7ForwardE", "8BackwardI")  # as mangled names have them


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


def _bf16(rows: int, columns: int) -> Tensor:
    return torch.zeros(rows, columns, dtype=BF16)


def _table(matrices: int) -> Tensor:
    """As stream_matrices makes it: a record a matrix and the header, at a multiple of 128 bytes."""
    room = torch.zeros(128 * (matrices + 2), dtype=torch.uint8)
    return room[-room.data_ptr() % 128 :][: 128 * (matrices + 1)].view(matrices + 1, 128)


def _misaligned(rows: int, columns: int) -> Tensor:
    return torch.zeros(rows * columns + 8, dtype=BF16)[4:-4].view(rows, columns)


def _forward() -> dict[str, object]:
    made = _route()
    names = ("row_start", "row_count", "faulty", "row", "slot", "row_prob")
    shared = [_bf16(T, 2 * S), _bf16(T, S), _bf16(T, H)]
    return {
        "x": _bf16(T, H),
        "routing": [made[name] for name in names],
        "weights": [_table(E), _table(E), _table(1), _table(1)],
        "into": [_bf16(R, H), _bf16(R, 2 * F), _bf16(R, F), _bf16(T, H), *shared],
        "words": torch.zeros(_words(R, T, E), dtype=INT),
    }


def _backward() -> dict[str, object]:
    rows = [_bf16(R, H), _bf16(R, H), _bf16(R, H), _bf16(R, 2 * F), _bf16(R, F)]
    tokens = [torch.zeros(R, F // library.PART_COLUMNS), _bf16(T, H), torch.zeros(T, K)]
    return _forward() | {
        "dy": _bf16(T, H),
        "gate_up": [_bf16(R, 2 * F), _bf16(T, 2 * S)],
        "gradients": [_table(E), _table(E), _table(1), _table(1)],
        "fp32": True,
        "accumulate": True,
        "into": [*rows, *tokens, _bf16(T, 2 * S), _bf16(T, S), _bf16(T, H)],
    }


def _forward_without_shared() -> dict[str, object]:
    whole = _forward()
    return whole | {"weights": whole["weights"][:2], "into": whole["into"][:4]}


def _backward_without_shared() -> dict[str, object]:
    """And without a gradient of w1."""
    whole = _backward()
    short = {"weights": 2, "gate_up": 1, "gradients": 2, "into": 8}
    whole |= {name: whole[name][:count] for name, count in short.items()}
    whole["gradients"][0] = torch.zeros(0, dtype=torch.uint8)
    return whole


def _words(rows: int, tokens: int, experts: int) -> int:
    """Of int32: four of tickets; ready and sums of each row block; done of two passes of those and
    of the shared expert's; the experts' counts; first tickets of four passes, combine, the end."""
    blocks = rows // 128
    counters = 4 + 2 * blocks + 2 * (blocks + -(-tokens // 128)) + experts + 1
    return counters + 4 * (experts + 1) + 2


ARGUMENTS: dict[str, Callable[[], dict[str, object]]] = {
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


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_schema_names_what_is_written(op: str) -> None:
    schema = getattr(torch.ops.mok_megatron, op).default._schema
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    assert written == {"into", "words"}
    assert not schema.returns


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
        ("forward", "routing", [], "routing must be row_start, .*, got 0 tensors"),
        ("forward", "routing 0", torch.zeros(E, dtype=INT), r"row_start must have shape \[5\]"),
        ("forward", "routing 1", torch.zeros(E), "row_count must be int32, got float32"),
        ("forward", "routing 2", torch.zeros(2, dtype=INT), r"faulty must have shape \[1\]"),
        ("forward", "routing 3", torch.zeros(T, 65, dtype=INT), "1 to 64 choices, got 65 in row"),
        ("forward", "routing 4", torch.zeros(R - 1, dtype=INT), "multiple of 128, got 1407"),
        ("forward", "routing 5", torch.zeros(R - 1), r"row_prob must have shape \[1408\]"),
        ("forward", "x", torch.zeros(T, H), "x must be bfloat16, got float32"),
        ("forward", "x", _bf16(T + 1, H), r"x must have shape \[5, any\], got \[6, 128\]"),
        ("forward", "x", _bf16(T, 96), "multiple of 64, got 96"),
        ("forward", "x", _misaligned(T, H), "x must start at a multiple of 16 bytes"),
        ("forward", "weights", [_table(E)] * 3, "two tables, or four with a shared expert, got 3"),
        ("forward", "weights", [_table(E)] * 2, "into must be 4 tensors, got 7"),
        ("forward", "weights 0", _table(E - 1), r"w1 must have shape \[5, 128\], got \[4, 128\]"),
        ("forward", "weights 3", _table(E), r"shared w2 must have shape \[2, 128\]"),
        ("forward", "weights 1", torch.zeros(0, dtype=torch.uint8), "w2 must have shape"),
        ("forward", "into", [], "into must be 7 tensors, got 0"),
        ("forward", "into 0", _bf16(R, 64), r"rows must have shape \[1408, 128\]"),
        ("forward", "into 1", _bf16(R, F), r"gate_up must have shape \[1408, 128\]"),
        ("forward", "into 2", _bf16(R, 96), "columns of activation must be .* of 64, got 96"),
        ("forward", "into 3", _misaligned(T, H), "y must start at a multiple of 16 bytes"),
        ("forward", "into 4", _bf16(T, S), r"shared gate_up must have shape \[5, 384\]"),
        ("forward", "into 5", _bf16(T, 0), "columns of shared activation must be .*, got 0"),
        ("forward", "into 6", torch.zeros(T, H), "shared y must be bfloat16, got float32"),
        ("backward", "dy", _bf16(T, 64), r"dy must have shape \[5, 128\], got \[5, 64\]"),
        ("backward", "dy", _bf16(H, T).t(), "dy must be contiguous"),
        ("backward", "gate_up", [_bf16(R, 2 * F)], "gate_up must be 2 tensors, got 1"),
        ("backward", "gate_up 0", _bf16(R, F), r"gate_up must have shape \[1408, 128\]"),
        ("backward", "gate_up 1", _bf16(T, S), r"shared gate_up must have shape \[5, 384\]"),
        ("backward", "gradients", [_table(E)] * 2, "gradients must be 4 tensors, got 2"),
        ("backward", "gradients 1", _table(1), r"the gradients of w2 must have shape \[5, 128\]"),
        ("backward", "gradients 2", _table(E), "the shared gradient of w1 must have shape"),
        ("backward", "into", [], "into must be 11 tensors, got 0"),
        ("backward", "into 0", _bf16(R, 64), r"x rows must have shape \[1408, 128\]"),
        ("backward", "into 1", _bf16(R - 1, H), r"dy rows must have shape \[1408, 128\]"),
        ("backward", "into 2", torch.zeros(R, H), "dx rows must be bfloat16"),
        ("backward", "into 3", _bf16(R, F), r"d_gate_up must have shape \[1408, 128\]"),
        ("backward", "into 4", _bf16(R, 96), "columns of activation must be .* of 64, got 96"),
        ("backward", "into 5", torch.zeros(R, 1), r"parts must have shape \[1408, 2\]"),
        ("backward", "into 6", _misaligned(T, H), "dx must start at a multiple of 16 bytes"),
        ("backward", "into 7", torch.zeros(T, K, dtype=BF16), "d_prob must be float32"),
        ("backward", "into 8", _bf16(T, S), r"shared d_gate_up must have shape \[5, 384\]"),
        ("backward", "into 9", _bf16(T, 96), "columns of shared activation must be .*, got 96"),
        ("backward", "into 10", _bf16(T, 64), r"shared dx must have shape \[5, 128\]"),
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


def test_a_layers_kernel_needs_tokens() -> None:
    arguments = _forward() | {"x": _bf16(0, H)}
    arguments["routing"][3] = torch.zeros(0, K, dtype=INT)
    with pytest.raises(RuntimeError, match="mok: a layer's kernel needs tokens, got none"):
        torch.ops.mok_megatron.forward(**arguments)


@pytest.mark.parametrize("sizes", [(128, 1, 1), (R, T, E), (128 * 77, 129, 2048)])
def test_words_have_room_for_every_counter(sizes: tuple[int, int, int]) -> None:
    assert torch.ops.mok_megatron.direction_words(*sizes) == _words(*sizes)


@pytest.mark.parametrize("sizes", [(0, 5, 4), (128, 0, 4), (128, 5, -1)])
def test_sizes_of_no_layer_are_named(sizes: tuple[int, int, int]) -> None:
    got = ", ".join(map(str, sizes))
    with pytest.raises(RuntimeError, match=f"mok: direction_words needs .*, got {got}"):
        torch.ops.mok_megatron.direction_words(*sizes)


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
def kernels() -> dict[str, list[str]]:
    """Name -> machine code of the kernels that have it in theirs."""
    tool = cuobjdump()
    if tool is None:
        pytest.skip("needs cuobjdump, found none")
    dump = [tool, "--dump-sass", str(library.LIBRARY)]
    text = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    parts = re.split(r"^\s*Function : (\S+)", text, flags=re.MULTILINE)
    code = dict(zip(parts[1::2], parts[2::2], strict=True))
    names = (*BEFORE_THE_LAYER, *LAYER)
    return {name: [code[long] for long in code if name in long] for name in names}


def test_a_kernel_for_each_step(kernels: dict[str, list[str]]) -> None:
    """backward: fp32 and bf16 gradients, fresh and added to."""
    expected = dict.fromkeys(BEFORE_THE_LAYER, 1) | dict(zip(LAYER, (1, 4), strict=True))
    assert {name: len(codes) for name, codes in kernels.items()} == expected


@pytest.mark.parametrize("name", LAYER)
def test_rows_move_sixteen_bytes_at_a_time(kernels: dict[str, list[str]], name: str) -> None:
    for code in kernels[name]:
        assert re.search(r"\bLDG\.E\.128", code)
        assert re.search(r"\bSTG\.E\.128", code)


@pytest.mark.parametrize("name", BEFORE_THE_LAYER)
def test_no_atomics_and_no_local_memory(kernels: dict[str, list[str]], name: str) -> None:
    for code in kernels[name]:
        assert not re.search(r"\b(ATOM|ATOMG|ATOMS|RED|REDG)\b", code)
        assert not re.search(r"\b(LDL|STL)\b", code)
