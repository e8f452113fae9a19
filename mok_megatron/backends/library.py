"""The CUDA library: loading it, what its ops return in a trace, and typed wrappers around products.

The wrapped ops are the grouped products of csrc/sm90, each on its own, for tests, benchmarks and
the weight gradients that the backward kernel leaves out. Nothing here waits for the device.
Letters: R rows, each expert's at a multiple of 128; L experts; H hidden; F expert width.
"""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import torch

from mok_megatron import limits

LIBRARY = pathlib.Path(__file__).resolve().parent.parent / "_C.abi3.so"
ROW_TILE = 128  # each expert's rows start at a multiple of it
PART_COLUMNS = limits.PART_COLUMNS
TENSOR_MAP_BYTES = 128

_loaded: list[pathlib.Path] = []
_holds: list[Callable[[int], int]] = []  # of the library, past the dispatcher


class LibraryMissing(RuntimeError):
    """The CUDA library was not built, or does not fit this torch."""


def load(path: pathlib.Path | None = None) -> None:
    """Registers torch.ops.mok_megatron.*; raises LibraryMissing with the reason when it cannot.

    The first library stays: a later call with another path raises.
    """
    if path is None:
        path = _loaded[0] if _loaded else LIBRARY
    if path in _loaded:
        return
    if not path.is_file():
        raise LibraryMissing(
            f"mok: the CUDA library must be built, got no file {path.name} in {path.parent}; "
            "install with a CUDA toolkit (CUDA_HOME) or use --mok-backend reference"
        )
    if _loaded:
        raise LibraryMissing(
            f"mok: a process can load one CUDA library, got {path} after {_loaded[0]}; "
            "start another process"
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise LibraryMissing(
            f"mok: the CUDA library must load, got: {error}; "
            f"install again with this torch ({torch.__version__})"
        ) from error
    _declare_fakes()
    entry = ctypes.PyDLL(str(path)).mok_holds  # keeps the interpreter's lock: it takes microseconds
    entry.argtypes, entry.restype = [ctypes.c_int64], ctypes.c_int32
    _holds.append(entry)
    _loaded.append(path)


def holds(watch: int) -> bool:
    """Whether all matrices of torch.ops.mok_megatron.watch's number have the address, form and
    dtype that they had."""
    return bool(_holds[0](watch))


def _declare_fakes() -> None:
    fake = torch.library.register_fake

    @fake("mok_megatron::encode_matrices")
    def _(matrices: Sequence[torch.Tensor], role: str, tiling: int = 0) -> torch.Tensor:
        return matrices[0].new_empty((len(matrices) + 1, TENSOR_MAP_BYTES), dtype=torch.uint8)

    def writes_its_arguments(*_: object, **__: object) -> None:
        return None

    for name in ("product", "input_gradient", "up", "down_gradient", "weight_gradient"):
        fake(f"mok_megatron::grouped_{name}")(writes_its_arguments)

    def given(bases: torch.Tensor | None, group: Sequence[int]) -> tuple[int, ...]:
        """R, and the most tokens of all ranks, where there are several."""
        return () if bases is None else (group[2], len(bases) * group[1])

    def bytes_of(expert: torch.Tensor, experts: int, *several: int) -> tuple[int, int]:
        """Of a schedule, and R."""
        tokens, choices = expert.shape
        words = torch.ops.mok_megatron.schedule_words(tokens, choices, experts, *several)
        return 4 * words[-1], words[-3]

    def experts_of(weights: torch.Tensor, shared_width: int, routed: int = 2) -> int:
        return (len(weights) - (4 if shared_width else 0)) // routed - 1

    @fake("mok_megatron::choices")
    def _(probs: torch.Tensor, map: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        form = len(probs), top_k
        return probs.new_empty(form, dtype=torch.int32), probs.new_empty(form, dtype=torch.float32)

    @fake("mok_megatron::spread")
    def _(
        dprob: torch.Tensor, expert: torch.Tensor, experts: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return dprob.new_empty(len(dprob), experts, dtype=dtype)

    @fake("mok_megatron::route")
    def _(expert: torch.Tensor, prob: torch.Tensor, experts: int) -> torch.Tensor:
        return expert.new_empty(bytes_of(expert, experts)[0], dtype=torch.uint8)

    @fake("mok_megatron::forward")
    def _(
        x: torch.Tensor,
        expert: torch.Tensor,
        prob: torch.Tensor,
        weights: torch.Tensor,
        width: int,
        shared_width: int,
        ctas: int = 0,
        ahead: int = 0,
        bases: torch.Tensor | None = None,
        group: Sequence[int] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        experts = experts_of(weights, shared_width)
        size, rows = bytes_of(expert, experts, *given(bases, group))
        for part in (4 * rows * width, 4 * len(x) * shared_width):
            size += -(-part // 512) * 512
        return torch.empty_like(x), x.new_empty(size, dtype=torch.uint8)

    @fake("mok_megatron::backward")
    def _(
        x: torch.Tensor,
        dy: torch.Tensor,
        kept: torch.Tensor,
        weights: torch.Tensor,
        gradients: torch.Tensor,
        wanted: int,
        choices: int,
        width: int,
        shared_width: int,
        fp32: bool,
        accumulate: bool,
        outside: bool,
        ctas: int = 0,
        ahead: int = 0,
        bases: torch.Tensor | None = None,
        group: Sequence[int] = (),
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        tokens, hidden = x.shape
        experts, several = experts_of(weights, shared_width, 3 if group else 2), given(bases, group)
        rows = torch.ops.mok_megatron.schedule_words(tokens, choices, experts, *several)[-3]
        forms = [(rows, hidden), (rows, hidden), (rows, 2 * width), (rows, width)]
        if shared_width:
            forms += [(tokens, 2 * shared_width), (tokens, shared_width)]
        buffers = [x.new_empty(form) for form in forms] if outside else []
        return torch.empty_like(x), x.new_empty(tokens, choices, dtype=torch.float32), buffers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """Each expert's rows, on the device: starts [L + 1] at multiples of 128, counts [L]."""

    row_start_E: torch.Tensor
    row_count_E: torch.Tensor
    tickets: torch.Tensor  # two zeros, left at zero by every call; one for each stream

    @classmethod
    def of(cls, row_start_E: torch.Tensor, row_count_E: torch.Tensor) -> Split:
        return cls(
            row_start_E=row_start_E,
            row_count_E=row_count_E,
            tickets=torch.zeros(2, dtype=torch.int32, device=row_start_E.device),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrices:
    """One matrix for each expert, at any addresses, with their tensor maps on the device.

    The maps hold addresses: make a new one when a matrix has moved. They also hold the boxes in
    which one op, `role`, and one tiling read the matrices: product, input_gradient, up,
    down_gradient, or gradient for what a weight_gradient writes.
    """

    matrices: tuple[torch.Tensor, ...]
    table: torch.Tensor

    @classmethod
    def of(cls, matrices: Sequence[torch.Tensor], role: str, *, tiling: int = 0) -> Matrices:
        load()
        return cls(
            matrices=tuple(matrices),
            table=torch.ops.mok_megatron.encode_matrices(list(matrices), role, tiling),
        )


def product(
    a_RK: torch.Tensor,
    weights: Matrices,
    split: Split,
    out_RN: torch.Tensor,
    *,
    tiling: int = 0,
    ctas: int = 0,
) -> None:
    """out = a · W^T with each expert's W [N, K]."""
    torch.ops.mok_megatron.grouped_product(
        a_RK,
        weights.table,
        split.row_start_E,
        split.row_count_E,
        split.tickets,
        out_RN,
        tiling,
        ctas,
    )


def input_gradient(
    a_RK: torch.Tensor,
    weights: Matrices,
    split: Split,
    out_RN: torch.Tensor,
    *,
    tiling: int = 0,
    ctas: int = 0,
) -> None:
    """out = a · W with each expert's W [K, N]."""
    torch.ops.mok_megatron.grouped_input_gradient(
        a_RK,
        weights.table,
        split.row_start_E,
        split.row_count_E,
        split.tickets,
        out_RN,
        tiling,
        ctas,
    )


def up(
    x_RH: torch.Tensor,
    w1: Matrices,
    prob_R: torch.Tensor,
    split: Split,
    gate_up_RF: torch.Tensor,
    activation_RF: torch.Tensor,
    *,
    tiling: int = 0,
    ctas: int = 0,
) -> None:
    """gate|up [R, 2F] = x · W1^T and activation = silu(gate) · up · prob."""
    torch.ops.mok_megatron.grouped_up(
        x_RH,
        w1.table,
        prob_R,
        split.row_start_E,
        split.row_count_E,
        split.tickets,
        gate_up_RF,
        activation_RF,
        tiling,
        ctas,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DownGradient:
    """What the gradient of down and activation writes."""

    d_gate_up_RF: torch.Tensor  # [R, 2F]
    activation_RF: torch.Tensor
    prob_parts: torch.Tensor  # fp32 [R, F / 32]
    d_prob_R: torch.Tensor


def down_gradient(
    dy_RH: torch.Tensor,
    w2: Matrices,
    prob_R: torch.Tensor,
    gate_up_RF: torch.Tensor,
    split: Split,
    into: DownGradient,
    *,
    tiling: int = 0,
    ctas: int = 0,
) -> None:
    """da = dy · W2, and from it the gradients of gate, up and prob, and the activation again."""
    torch.ops.mok_megatron.grouped_down_gradient(
        dy_RH,
        w2.table,
        prob_R,
        gate_up_RF,
        split.row_start_E,
        split.row_count_E,
        split.tickets,
        into.d_gate_up_RF,
        into.activation_RF,
        into.prob_parts,
        into.d_prob_R,
        tiling,
        ctas,
    )


def weight_gradient(
    a_RM: torch.Tensor,
    b_RN: torch.Tensor,
    gradients: Matrices,
    split: Split,
    *,
    accumulate: bool,
    tiling: int = 0,
    ctas: int = 0,
) -> None:
    """Each expert's gradient [M, N] (+)= a^T · b over its rows, in fp32 or bf16."""
    torch.ops.mok_megatron.grouped_weight_gradient(
        a_RM,
        b_RN,
        gradients.table,
        list(gradients.matrices),
        split.row_start_E,
        split.row_count_E,
        split.tickets,
        accumulate,
        tiling,
        ctas,
    )
