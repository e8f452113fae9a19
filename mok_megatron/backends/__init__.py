"""Which backend runs a layer, and why: an `if`, since there are two."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from mok_megatron.backends.reference import ReferenceBackend
from mok_megatron.config import BACKENDS
from mok_megatron.contract import Backend, MoEShape


def choose(
    name: str, shape: MoEShape, device: torch.device, group: ProcessGroup | None
) -> tuple[Backend, str]:
    """The backend and the reason, in words for the start line.

    `auto` is cuda for CUDA tensors and reference for CPU tensors: the reference never runs on a GPU
    unless it is named. Raises RuntimeError (cause, remedy) when what was asked for cannot run.
    """
    if name not in BACKENDS:
        raise ValueError(
            f"mok: --mok-backend must be one of {', '.join(BACKENDS)}, got {name!r}; "
            "choose one of them"
        )
    if name == "reference":
        return ReferenceBackend(shape, group), "asked for by --mok-backend reference"
    if name == "auto" and device.type == "cpu":
        return ReferenceBackend(shape, group), "the tensors are on the CPU"
    if device.type != "cuda":
        raise RuntimeError(
            f"mok: --mok-backend cuda needs CUDA tensors, got {device.type}; "
            "use --mok-backend reference"
        )
    raise RuntimeError(
        "mok: the cuda backend's megakernel is not part of this release yet; "
        "use --mok-backend reference for the same training without its speed, "
        "or --moe-token-dispatcher-type alltoall"
    )
