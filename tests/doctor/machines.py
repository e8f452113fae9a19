"""A healthy machine, a machine without a GPU, and what may break."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, replace
from typing import Any

from mok_megatron.doctor.finding import GIB, Finding
from mok_megatron.doctor.judge import examine
from mok_megatron.doctor.machine import Device, Machine, Pair, SelfTest

H200 = Device(name="NVIDIA H200", capability=(9, 0), memory_bytes=140 * GIB, multicast=True)
PAIRS = tuple(
    Pair(rank=a, peer=b, access=True, atomics=True) for a, b in itertools.permutations(range(2), 2)
)
TESTS = tuple(
    SelfTest(backend=backend, device=device, error=1e-6, seconds=0.1)
    for backend, device in (("reference", "cpu"), ("cuda", "cuda:0"), ("cuda", "cuda:1"))
)
HEALTHY = Machine(
    python=(3, 12),
    environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    torch_version="2.11.0+cu130",
    torch_cuda="13.0",
    plugin_installed=True,
    plugin_active=True,
    megatron_version="0.19.2",
    megatron_metadata="0.19.2",
    transformer_engine_version="2.9.0",
    transformer_engine_fault="",
    apex=True,
    driver=True,
    driver_version="580.159.04",
    driver_cuda=(13, 0),
    driver_error=0,
    devices=(H200, H200),
    pairs=PAIRS,
    device_nodes=2,
    pci_gpus=2,
    library=True,
    library_arches=("sm_90",),
    library_fault="",
    cuda_backend_fault="",
    nvcc=(13, 0),
    compiler=True,
    torch_gpu_fault="",
    free_bytes=(139 * GIB, 139 * GIB),
    symmetric_fault="",
    data_fault="",
    self_tests=TESTS,
    host_bytes=100 * GIB,
    shm_bytes=64 * GIB,
    take_descriptor_fault="",
    own_namespaces=(),
)
# No GPU, no driver: what a laptop or a CI machine looks like.
CPU_ONLY = replace(
    HEALTHY,
    driver=False,
    driver_version=None,
    driver_cuda=None,
    driver_error=None,
    devices=(),
    pairs=(),
    device_nodes=0,
    pci_gpus=0,
    library=False,
    library_arches=(),
    library_fault=None,
    cuda_backend_fault="mok: --mok-backend cuda needs a GPU, got none; use --mok-backend reference",
    torch_gpu_fault=None,
    free_bytes=(),
    symmetric_fault=None,
    data_fault=None,
    self_tests=TESTS[:1],
)


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A healthy machine with `changes`: the level, cause and remedy of the finding `name`.

    Beside it only the findings in `also` may be worse than the healthy machine's.
    """

    id: str
    changes: dict[str, Any]
    name: str
    level: str
    cause: str
    remedy: str
    also: tuple[str, ...] = ()


def environment(**variables: str) -> dict[str, Any]:
    return {"environment": {**HEALTHY.environment, **variables}}


def first(**changes: Any) -> dict[str, Any]:
    return {"devices": (replace(H200, **changes), H200)}


def cuinit(error: int) -> dict[str, Any]:
    return {
        **{f.name: getattr(CPU_ONLY, f.name) for f in dataclasses.fields(Machine)},
        "driver": True,
        "driver_cuda": (13, 0),
        "driver_error": error,
        "device_nodes": 2,
        "library": True,
        "library_arches": ("sm_90",),
        "library_fault": "",
    }


RANK = ("ok", "info", "warning", "error")


def worst(findings: list[Finding]) -> dict[str, str]:
    levels: dict[str, str] = {}
    for finding in findings:
        before = levels.get(finding.name, "ok")
        levels[finding.name] = max(before, finding.level, key=RANK.index)
    return levels


def check_answer(broken: Broken) -> None:
    """The finding that `broken` describes is made once, and nothing that is sound is blamed."""
    findings = examine(replace(HEALTHY, **broken.changes), "cuda")
    matching = [
        finding
        for finding in findings
        if finding.name == broken.name
        and finding.level == broken.level
        and broken.cause in finding.cause
        and broken.remedy in finding.remedy
    ]
    assert len(matching) == 1, [f for f in findings if f.name == broken.name]
    healthy, found = worst(examine(HEALTHY, "cuda")), worst(findings)
    worse = {n for n in found if found[n] in ("warning", "error") and found[n] != healthy[n]}
    assert worse <= {broken.name, *broken.also}
    for backend in ("cuda", "reference"):
        check_form(examine(replace(HEALTHY, **broken.changes), backend))


def check_form(findings: list[Finding]) -> None:
    """One line each; a complaint can be acted on, and what is sound asks for nothing."""
    for finding in findings:
        assert "\n" not in finding.cause + finding.remedy
        assert finding.cause
        if finding.level in ("warning", "error"):
            assert finding.remedy
        if finding.level == "ok":
            assert not finding.remedy
