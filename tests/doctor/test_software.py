"""Machines whose software or GPUs cannot run mok, and what is said about each."""

from __future__ import annotations

import importlib.util
import pathlib
from dataclasses import replace

import pytest

from mok_megatron.doctor import software
from mok_megatron.doctor.judge import examine
from mok_megatron.doctor.machine import DEFAULT_TOOLKIT, PACKAGE
from tests.doctor.machines import (
    CPU_ONLY,
    H200,
    TESTS,
    Broken,
    check_answer,
    cuinit,
    environment,
    first,
    worst,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
NO_GPU = ("gpus", "backend")
ENVIRONMENTS = [
    Broken(
        id="python too old",
        changes={"python": (3, 10)},
        name="python",
        level="error",
        cause="must be 3.12 or newer, got 3.10",
        remedy="Python 3.12",
    ),
    Broken(
        id="torch missing",
        changes={"torch_version": None, "torch_cuda": None},
        name="torch",
        level="error",
        cause="cannot be imported",
        remedy="install torch",
    ),
    Broken(
        id="torch too old",
        changes={"torch_version": "2.9.1+cu128", "torch_cuda": "12.8", "nvcc": (12, 8)},
        name="torch",
        level="error",
        cause="must be 2.10 or newer, got 2.9.1",
        remedy="upgrade torch",
    ),
    Broken(
        id="torch for CPU, with a GPU",
        changes={"torch_version": "2.11.0+cpu", "torch_cuda": None},
        name="torch",
        level="error",
        cause="CPU build",
        remedy="install the CUDA build",
    ),
    Broken(
        id="disabled",
        changes=environment(MOK_MEGATRON_DISABLE="1") | {"plugin_active": False},
        name="plugin",
        level="error",
        cause="MOK_MEGATRON_DISABLE=1 switches mok off",
        remedy="unset MOK_MEGATRON_DISABLE",
    ),
    Broken(
        id="autoload off",
        changes=environment(TORCH_DEVICE_BACKEND_AUTOLOAD="0") | {"plugin_active": False},
        name="plugin",
        level="warning",
        cause="TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        remedy="python -m mok_megatron.launch",
    ),
    Broken(
        id="not installed",
        changes={"plugin_installed": False, "plugin_active": False},
        name="plugin",
        level="warning",
        cause="entry point is not installed",
        remedy="pip install mok-megatron",
    ),
    Broken(
        id="installed, not active",
        changes={"plugin_active": False},
        name="plugin",
        level="warning",
        cause="did not make the plugin active",
        remedy="reinstall",
    ),
    Broken(
        id="megatron missing",
        changes={"megatron_version": None, "megatron_metadata": None},
        name="megatron",
        level="error",
        cause="not here",
        remedy="megatron-core>=0.17,<0.20",
    ),
    Broken(
        id="megatron unknown",
        changes={"megatron_version": "0.21.0+abc", "megatron_metadata": "0.19.2"},
        name="megatron",
        level="error",
        cause="must be 0.17 to 0.19, got 0.21.0+abc; the installed wheel, 0.19.2, is hidden",
        remedy="megatron-core>=0.17,<0.20",
    ),
    Broken(
        id="megatron twice",
        changes={"megatron_version": "0.18.0", "megatron_metadata": "0.19.2"},
        name="megatron",
        level="warning",
        cause="0.18.0 is imported; the installed wheel, 0.19.2, is hidden by it",
        remedy="uninstall the wheel",
    ),
    Broken(
        id="transformer engine missing",
        changes={"transformer_engine_version": None, "transformer_engine_fault": None},
        name="transformer engine",
        level="info",
        cause="latent attention (MLA) needs it",
        remedy="mok-megatron[te]",
    ),
    Broken(
        id="transformer engine broken",
        changes={"transformer_engine_fault": "ImportError: undefined symbol: _ZN3c10"},
        name="transformer engine",
        level="warning",
        cause="undefined symbol",
        remedy="built for this torch",
    ),
    Broken(
        id="neither engine nor apex",
        changes={
            "transformer_engine_version": None,
            "transformer_engine_fault": None,
            "apex": False,
        },
        name="apex",
        level="info",
        cause="cannot fuse gradient accumulation",
        remedy="--no-gradient-accumulation-fusion",
        also=("transformer engine",),
    ),
    Broken(
        id="no driver",
        changes=cuinit(0) | {"driver": False, "driver_cuda": None, "driver_error": None},
        name="driver",
        level="error",
        cause="libcuda.so.1 is not found, though the machine has 2 NVIDIA GPUs",
        remedy="--gpus all",
        also=NO_GPU,
    ),
    Broken(
        id="driver too old",
        changes={"driver_version": "535.104.05", "driver_cuda": (12, 2)},
        name="driver",
        level="error",
        cause="535.104.05 runs CUDA up to 12.2, torch is built for 13.0",
        remedy="install driver 580 or newer, or a torch built for CUDA 12",
    ),
    *(
        Broken(
            id=f"cuInit {error}",
            changes=cuinit(error),
            name="driver",
            level="error",
            cause=cause,
            remedy=remedy,
            also=NO_GPU,
        )
        for error, cause, remedy in (
            (34, "stub", "LD_LIBRARY_PATH"),
            (100, "the driver sees no GPU", "--gpus all"),
            (802, "fabric manager", "nvidia-fabricmanager"),
            (803, "different versions", "reboot"),
            (804, "cuda-compat", "LD_LIBRARY_PATH"),
            (999, "/dev/nvidia-uvm", "nvidia-modprobe -u"),
            (46, "does not start (cuInit: error 46)", "report it"),
        )
    ),
    Broken(
        id="wrong CUDA_VISIBLE_DEVICES",
        changes=cuinit(100) | environment(CUDA_VISIBLE_DEVICES="9"),
        name="driver",
        level="error",
        cause="CUDA_VISIBLE_DEVICES='9' leaves no GPU",
        remedy="unset CUDA_VISIBLE_DEVICES",
        also=NO_GPU,
    ),
    Broken(
        id="MIG without instances",
        changes=cuinit(100) | {"mig_without_instances": True},
        name="driver",
        level="error",
        cause="MIG is on and no instance",
        remedy="nvidia-smi -mig 0",
        also=NO_GPU,
    ),
    Broken(
        id="sm_80",
        changes={"devices": (replace(H200, name="NVIDIA A100", capability=(8, 0)), H200)},
        name="gpus",
        level="error",
        cause="need compute capability 9.0 (H100, H200), got 8.0 on GPU 0 (NVIDIA A100)",
        remedy="--moe-token-dispatcher-type alltoall",
        also=("library",),
    ),
    Broken(
        id="sm_100",
        changes=first(name="NVIDIA B200", capability=(10, 0)),
        name="gpus",
        level="error",
        cause="got 10.0 on GPU 0 (NVIDIA B200)",
        remedy="--mok-backend reference",
        also=("library",),
    ),
    Broken(
        id="MIG",
        changes=first(mig=True),
        name="gpus",
        level="error",
        cause="GPU 0 (NVIDIA H200) is in MIG mode",
        remedy="nvidia-smi -mig 0",
    ),
    Broken(
        id="torch does not start",
        changes={"torch_gpu_fault": "RuntimeError: CUDA error 719"},
        name="gpus",
        level="error",
        cause="torch cannot start CUDA: RuntimeError: CUDA error 719",
        remedy="repair driver and torch",
    ),
    Broken(
        id="library missing",
        changes={"library": False, "library_arches": (), "library_fault": None},
        name="library",
        level="error",
        cause="was not built",
        remedy="where a CUDA toolkit is",
    ),
    Broken(
        id="library missing, no toolkit",
        changes={"library": False, "library_arches": (), "library_fault": None, "nvcc": None},
        name="toolkit",
        level="warning",
        cause="no nvcc that answers in /usr/local/cuda/bin",
        remedy="CUDA_HOME",
        also=("library",),
    ),
    Broken(
        id="library for another GPU",
        changes={"library_arches": ("sm_80", "sm_100")},
        name="library",
        level="error",
        cause="built for sm_80, sm_100, but a GPU here needs sm_90",
        remedy="install mok-megatron again",
    ),
    Broken(
        id="library of another torch",
        changes={"library_fault": "mok: the CUDA library must load, got: undefined symbol; do it"},
        name="library",
        level="error",
        cause="must load, got: undefined symbol",
        remedy="do it",
    ),
    Broken(
        id="nvcc too old",
        changes={"nvcc": (12, 4)},
        name="toolkit",
        level="info",
        cause="must be 12.8 or newer",
        remedy="newer toolkit",
    ),
    Broken(
        id="nvcc of another CUDA, library missing",
        changes={"library": False, "library_fault": None, "nvcc": (12, 9)},
        name="toolkit",
        level="warning",
        cause="one CUDA major version to build the CUDA library, got 12.9 and 13.0",
        remedy="toolkit of torch's version",
        also=("library",),
    ),
    Broken(
        id="backend refuses",
        changes={
            "cuda_backend_fault": "mok: it is not ready; use another",
            "self_tests": TESTS[:1],
        },
        name="backend",
        level="error",
        cause="it is not ready",
        remedy="use another",
        also=("self-test",),
    ),
]


@pytest.mark.parametrize("broken", ENVIRONMENTS, ids=lambda broken: broken.id)
def test_a_broken_machine_gets_cause_and_remedy(broken: Broken) -> None:
    check_answer(broken)


def test_every_check_has_a_broken_machine() -> None:
    assert len({broken.id for broken in ENVIRONMENTS}) == len(ENVIRONMENTS) >= 12
    assert {broken.name for broken in ENVIRONMENTS} == set(software.SOFTWARE)


def test_a_gpu_without_driver_is_told_of_also_where_the_reference_runs() -> None:
    found = worst(examine(replace(CPU_ONLY, pci_gpus=1), "reference"))
    assert found["driver"] == "warning"


def test_floors_are_those_of_the_build() -> None:
    path = ROOT / "csrc" / "build_backend.py"
    spec = importlib.util.spec_from_file_location("build_backend_of_the_doctor", path)
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert software.TORCH_FLOOR == build.TORCH_FLOOR
    assert software.NVCC_FLOOR == build.NVCC_FLOOR
    assert str(build.DEFAULT_TOOLKIT) == DEFAULT_TOOLKIT
    assert PACKAGE / "_C.abi3.so" == ROOT / build.LIBRARY
