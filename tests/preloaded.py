"""What every rank of a test has when it is forked: the fork server imports this module once.

Megatron's import takes longer than most tests. Where there is a GPU it is left to the ranks: it
asks the driver, and what has asked the driver before a fork cannot use CUDA after it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from pathlib import Path

import torch.distributed
import torch.nn.functional  # noqa: F401

if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read at import; the shim for the CPU wants it too
    with contextlib.suppress(ImportError):
        for name in ("models.gpt.gpt_layer_specs", "optimizer", "dist_checkpointing"):
            importlib.import_module(f"megatron.core.{name}")
