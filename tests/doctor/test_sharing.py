"""Machines where containers, hosts or NVLink domains lie between ranks, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mok_megatron.doctor.judge import examine
from mok_megatron.doctor.sharing import SHARING, launch
from tests.doctor.machines import CPU_ONLY, H200, HEALTHY, Broken, check_answer, environment

NVL72 = replace(H200, nvlink_domain="0a01.3")
DOMAIN: dict[str, Any] = {"devices": (NVL72, NVL72)}
NOT_PERMITTED = {"symmetric_fault": "RuntimeError: CUDA driver error: operation not permitted"}
ENVIRONMENTS = [
    Broken(
        id="a container per GPU",
        changes={"own_namespaces": ("pid", "ipc"), "pci_gpus": 8},
        name="namespaces",
        level="warning",
        cause="own PID and IPC namespaces, as in a container, with 2 of the host's 8 GPUs",
        remedy="--pid=host --ipc=host, every GPU and one TMPDIR",
    ),
    Broken(
        id="ranks in other containers",
        changes={"own_namespaces": ("pid",), "pci_gpus": 2} | environment(LOCAL_WORLD_SIZE="8"),
        name="namespaces",
        level="error",
        cause="8 ranks on this host, and 2 of its GPUs are seen here (own PID namespace, as in a",
        remedy="one container with all its GPUs",
    ),
    Broken(
        id="GPUs hidden from ranks",
        changes=environment(OMPI_COMM_WORLD_LOCAL_SIZE="4"),
        name="namespaces",
        level="error",
        cause="a rank cannot map the memory of a GPU that it does not see",
        remedy="CUDA_VISIBLE_DEVICES",
    ),
    Broken(
        id="group larger than the host",
        changes={"expert_parallel": 16},
        name="hosts",
        level="error",
        cause="got groups of 16 ranks where a host has 2 ranks; no NVLink domain that spans hosts",
        remedy="--expert-model-parallel-size that divides 2, or use --moe-token-dispatcher-type",
    ),
    Broken(
        id="groups that do not fill a host",
        changes={"devices": 8 * (H200,), "pairs": (), "expert_parallel": 6},
        name="hosts",
        level="warning",
        cause="groups of 6 ranks would lie on two hosts, were there several of 8 ranks",
        remedy="divides 8",
        also=("peers", "self-test"),
    ),
    Broken(
        id="group over two hosts",
        changes={"devices": 8 * (H200,), "pairs": (), "expert_parallel": 6}
        | environment(SLURM_JOB_NUM_NODES="3"),
        name="hosts",
        level="error",
        cause="got groups of 6 ranks where a host has 8",
        remedy="divides 8",
        also=("peers", "self-test"),
    ),
    Broken(
        id="group over an NVLink domain",
        changes=DOMAIN | {"expert_parallel": 4, "imex_channels": (0,), "imex_service": True},
        name="hosts",
        level="error",
        cause="2 ranks; the NVLink domain that spans hosts (0a01.3) is not used by mok",
        remedy="alltoall",
    ),
    Broken(
        id="several hosts, group not named",
        changes=environment(WORLD_SIZE="6", LOCAL_WORLD_SIZE="2"),
        name="hosts",
        level="info",
        cause="the launch has 3 hosts: an expert parallel group of up to 2 ranks lies on this host",
        remedy="--expert-model-parallel-size",
    ),
    Broken(
        id="no IMEX channel",
        changes=DOMAIN | {"imex_service": True},
        name="imex",
        level="warning",
        cause="no channel of IMEX is here (/dev/nvidia-caps-imex-channels/channel0)",
        remedy="mount the same one into every container",
    ),
    Broken(
        id="no IMEX channel, and no memory",
        changes=DOMAIN | NOT_PERMITTED | {"imex_service": True},
        name="imex",
        level="error",
        cause="fabric handles of memory are not permitted",
        remedy="NVreg_CreateImexChannel0=1",
        also=("symmetric memory",),
    ),
    Broken(
        id="no IMEX service",
        changes=DOMAIN | {"imex_channels": (0,)},
        name="imex",
        level="warning",
        cause="the service nvidia-imex does not run",
        remedy="/etc/nvidia-imex/nodes_config.cfg",
    ),
]


@pytest.mark.parametrize("broken", ENVIRONMENTS, ids=lambda broken: broken.id)
def test_a_broken_machine_gets_cause_and_remedy(broken: Broken) -> None:
    check_answer(broken)


def test_every_check_has_a_broken_machine() -> None:
    assert {broken.name for broken in ENVIRONMENTS} == set(SHARING)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ["the host's own", "up to 2 ranks", "not needed"]),
        ({"own_namespaces": ("pid", "ipc")}, ["ranks must all be started in this one", "", ""]),
        ({"expert_parallel": 1} | environment(SLURM_NNODES="4"), ["", "groups of 1 ranks", ""]),
        (
            DOMAIN | {"imex_channels": (0, 3), "own_namespaces": ("pid",)},
            ["own PID namespace,", "", "channel 0, 3; its service is not seen from here"],
        ),
    ],
)
def test_a_sound_machine_is_not_blamed(changes: dict[str, Any], said: list[str]) -> None:
    findings = examine(replace(HEALTHY, **changes), "cuda", SHARING)
    assert [finding.level for finding in findings] == 3 * ["ok"]
    assert all(words in finding.cause for words, finding in zip(said, findings, strict=True))


def test_the_reference_minds_none_of_it() -> None:
    for broken in ENVIRONMENTS:
        findings = examine(replace(HEALTHY, **broken.changes), "reference", SHARING)
        assert "error" not in {finding.level for finding in findings}
    findings = examine(replace(CPU_ONLY, expert_parallel=16), "reference", SHARING)
    assert {finding.level for finding in findings} == {"ok", "info"}


def test_a_launch_is_read_off_its_variables() -> None:
    assert launch({}) == (0, 0)
    torchrun = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"}
    assert launch(torchrun) == (2, 8)
    assert launch({"SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS_PER_NODE": "8"}) == (4, 8)
    assert launch({"SLURM_NTASKS_PER_NODE": "8(x4)"}) == (0, 0)
    assert launch({"OMPI_COMM_WORLD_SIZE": "12", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}) == (2, 8)


def test_one_task_of_slurm_is_an_agent_that_starts_a_hosts_ranks() -> None:
    one = {"SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_NUM_NODES": "2"}
    assert launch(one) == (2, 0)
    assert launch(one | {"LOCAL_WORLD_SIZE": "8"}) == (2, 8)
    assert launch(one | {"SLURM_NTASKS_PER_NODE": "8"}) == (2, 8)
