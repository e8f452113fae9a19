"""Machines whose links, memory, limits or variables stand in the way, and what is said of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mok_megatron.doctor import surroundings
from mok_megatron.doctor.finding import GIB
from tests.doctor.machines import PAIRS, TESTS, Broken, check_answer, environment

ENVIRONMENTS = [
    Broken(
        id="GPU full",
        changes={"free_bytes": (GIB, 139 * GIB)},
        name="memory",
        level="error",
        cause="GPU 0 has 1.0 GiB of 140.0 GiB free",
        remedy="nvidia-smi",
    ),
    Broken(
        id="GPU shared",
        changes={"free_bytes": (139 * GIB, 30 * GIB)},
        name="memory",
        level="warning",
        cause="GPU 1 has 30.0 GiB of 140.0 GiB free: other processes",
        remedy="nvidia-smi",
    ),
    Broken(
        id="host memory low",
        changes={"host_bytes": GIB},
        name="memory",
        level="warning",
        cause="1.0 GiB of host memory",
        remedy="--memory",
    ),
    Broken(
        id="peer access off",
        changes={"pairs": (replace(PAIRS[0], access=False, atomics=False), PAIRS[1])},
        name="peers",
        level="error",
        cause="no peer access from GPU 0 to 1",
        remedy="nvidia-smi topo -p2p r",
    ),
    Broken(
        id="no peer atomics",
        changes={"pairs": (PAIRS[0], replace(PAIRS[1], atomics=False))},
        name="peers",
        level="error",
        cause="no native atomics on a peer's memory from GPU 1 to 0",
        remedy="CUDA_VISIBLE_DEVICES",
    ),
    Broken(
        id="peer copies lose data",
        changes={"data_fault": "a pattern came back changed over GPU 0 to 1"},
        name="peers",
        level="error",
        cause="came back changed over GPU 0 to 1",
        remedy="ACS",
    ),
    Broken(
        id="no symmetric memory",
        changes={"symmetric_fault": "RuntimeError: CUDA driver error: operation not permitted"},
        name="symmetric memory",
        level="error",
        cause="operation not permitted",
        remedy="cuMemCreate",
    ),
    Broken(
        id="descriptors kept",
        changes={"take_descriptor_fault": "Operation not permitted", "ptrace_scope": 1},
        name="descriptors",
        level="info",
        cause="Operation not permitted (yama ptrace_scope 1, CAP_SYS_PTRACE not held)",
        remedy="",
    ),
    Broken(
        id="expandable segments",
        changes=environment(PYTORCH_CUDA_ALLOC_CONF="backend:native, expandable_segments:True")
        | {"take_descriptor_fault": "Operation not permitted"},
        name="allocator",
        level="warning",
        cause="cannot share here (pidfd_getfd: Operation not permitted)",
        remedy="--cap-add=SYS_PTRACE",
        also=("descriptors",),
    ),
    Broken(
        id="tiny /dev/shm",
        changes={"shm_bytes": 64 << 20},
        name="shared memory",
        level="warning",
        cause="/dev/shm holds 64 MiB",
        remedy="--shm-size",
    ),
    Broken(
        id="no /dev/shm",
        changes={"shm_bytes": None},
        name="shared memory",
        level="warning",
        cause="not there",
        remedy="mount a tmpfs",
    ),
    Broken(
        id="memlock with InfiniBand",
        changes={"locked_bytes": 65536, "infiniband": True},
        name="locked memory",
        level="warning",
        cause="64 KiB",
        remedy="memlock=-1",
    ),
    Broken(
        id="connections not set",
        changes={"environment": {}},
        name="connections",
        level="info",
        cause="is not set: Megatron stops with tensor or context parallelism",
        remedy="CUDA_DEVICE_MAX_CONNECTIONS=1",
    ),
    Broken(
        id="connections nonsense",
        changes=environment(CUDA_DEVICE_MAX_CONNECTIONS="many"),
        name="connections",
        level="warning",
        cause="must be 1 to 32, got 'many'",
        remedy="CUDA_DEVICE_MAX_CONNECTIONS=1",
    ),
    Broken(
        id="NCCL without peers",
        changes=environment(NCCL_P2P_DISABLE="1"),
        name="variables",
        level="warning",
        cause="NCCL_P2P_DISABLE=1 sends",
        remedy="unset it",
    ),
    Broken(
        id="wrong result",
        changes={"self_tests": (*TESTS[:2], replace(TESTS[2], error=float("inf")))},
        name="self-test",
        level="error",
        cause="cuda on cuda:1: error inf",
        remedy="do not train on this machine",
    ),
    Broken(
        id="result missing",
        changes={"self_tests": TESTS[:2]},
        name="self-test",
        level="error",
        cause="cuda on cuda:1 gave no answer",
        remedy="probes",
    ),
    Broken(
        id="self-test slow",
        changes={"self_tests": (*TESTS[:2], replace(TESTS[2], seconds=2.5))},
        name="self-test",
        level="warning",
        cause="cuda on cuda:1: error 1e-06 in 2.5 s, right but slow: more than 2 s",
        remedy="throttling",
    ),
    Broken(
        id="driver hangs",
        changes={"faults": {"calling cuInit": "no answer within 120 s"}},
        name="probes",
        level="error",
        cause="calling cuInit: no answer within 120 s",
        remedy="--limit; else see dmesg",
    ),
]


@pytest.mark.parametrize("broken", ENVIRONMENTS, ids=lambda broken: broken.id)
def test_a_broken_machine_gets_cause_and_remedy(broken: Broken) -> None:
    check_answer(broken)


def test_every_check_has_a_broken_machine() -> None:
    assert len({broken.id for broken in ENVIRONMENTS}) == len(ENVIRONMENTS) >= 12
    named = {broken.name for broken in ENVIRONMENTS}
    assert named == set(surroundings.SURROUNDINGS) - {"multicast"}
