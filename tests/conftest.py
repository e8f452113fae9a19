"""Markers: `gpu` needs an sm_90a GPU, `multigpu` at least two; without them the tests say why.

Files marked `slow` come first, so that of two workers neither is left with one at the end.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

import pytest

# Records of the faults that tests make, also in processes that they start.
os.environ["MOK_RECORDS"] = tempfile.mkdtemp(prefix="mok-records-of-tests-")
atexit.register(shutil.rmtree, os.environ["MOK_RECORDS"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.getparent(pytest.Module).get_closest_marker("slow") is None)
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    needs_several = [item for item in items if item.get_closest_marker("multigpu")]
    if not needs_gpu and not needs_several:
        return
    count, found = _gpus()
    for item in needs_gpu:
        if count < 1:
            item.add_marker(pytest.mark.skip(reason=f"needs an sm_90a GPU, found {found}"))
    for item in needs_several:
        if count < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two sm_90a GPUs, found {found}"))


def _gpus() -> tuple[int, str]:
    """How many sm_90a GPUs there are, and in words what was found."""
    import torch

    if not torch.cuda.is_available():
        return 0, "no CUDA device"
    devices = range(torch.cuda.device_count())
    right = [device for device in devices if torch.cuda.get_device_capability(device) == (9, 0)]
    names = ", ".join(torch.cuda.get_device_name(device) for device in devices)
    return len(right), names
