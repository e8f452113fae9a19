"""Which backend runs a layer, and why: an `if`, since there are two."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from mok_megatron.backends.cuda import CudaBackend
from mok_megatron.backends.reference import ReferenceBackend
from mok_megatron.contract import Backend, MoEShape

NAMES = ("auto", "cuda", "reference")


def choose(
    name: str,
    shape: MoEShape,
    device: torch.device,
    group: ProcessGroup | None,
    **limits: Any,
) -> tuple[Backend, str]:
    """The backend and the reason, in words for the start line.

    `auto` is cuda for CUDA tensors and reference for CPU tensors: the reference never runs on a GPU
    unless it is named. Raises RuntimeError (cause, remedy) when what was asked for cannot run: no
    library, another GPU, a shape, dtype or group that cuda.py does not take. limits: of the cuda
    backend with several ranks: max_tokens, row_budget, deadline, arguments, as ranks.Ranks.
    """
    if name not in NAMES:
        raise ValueError(f"mok: --mok-backend must be one of {', '.join(NAMES)}, got {name!r}")
    if name == "reference":
        return ReferenceBackend(shape, group), "asked for by --mok-backend reference"
    if name == "auto" and device.type == "cpu":
        return ReferenceBackend(shape, group), "the tensors are on the CPU"
    if device.type != "cuda":
        raise RuntimeError(
            f"mok: --mok-backend cuda needs CUDA tensors, got {device.type}; "
            "use --mok-backend reference"
        )
    return CudaBackend(shape, group, device, **limits), (
        "asked for by --mok-backend cuda" if name == "cuda" else "the tensors are on a GPU"
    )
