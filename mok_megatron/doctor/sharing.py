"""Checks of what may lie between ranks: containers, hosts, and NVLink beyond one host.

Ranks that share memory send each other a POSIX file descriptor through a socket that is named after
a process id, in the directory of temporary files. So they must be on one host, in one PID
namespace, and see each other's GPUs. Between hosts only a fabric handle would do: it needs an
NVLink domain that spans them, the service nvidia-imex on each, and a channel of it in every
container. mok shares no memory between hosts, with such a domain or without (peers.py refuses the
group); torch may take fabric handles wherever there is one.
"""

from __future__ import annotations

from collections.abc import Mapping

from mok_megatron.doctor.finding import ALLTOALL, Check, Found, Level, needed
from mok_megatron.doctor.machine import IMEX_CHANNELS, Machine

TOGETHER = (
    "run all ranks of a host in one container with all its GPUs, or start each with --pid=host "
    f"--ipc=host, every GPU and one TMPDIR; else {ALLTOALL}"
)


def launch(environment: Mapping[str, str]) -> tuple[int, int]:
    """Hosts of the launch that this process is in, and its ranks on this one; 0 is not known."""

    def number(*names: str) -> int:
        values = (environment.get(name, "") for name in names)
        return next((int(value) for value in values if value.isdigit()), 0)

    tasks = number("SLURM_NTASKS_PER_NODE")  # a single one may be an agent that starts the ranks
    here = number("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE") or (tasks if tasks > 1 else 0)
    world = number("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")
    hosts = number("GROUP_WORLD_SIZE", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    return hosts or (-(-world // here) if here else 0), here


def _namespaces(m: Machine, backend: str) -> Found:
    """PID and IPC; a rank in another container has other ones, and often another GPU."""
    if m.own_namespaces is None:
        yield "info", "not known whether other processes of the host are seen here", ""
        return
    _, here = launch(m.environment)
    own = " and ".join(name.upper() for name in m.own_namespaces)
    inside = f"own {own} namespace{'s' * (len(m.own_namespaces) > 1)}, as in a container"
    if m.expert_parallel == 1:
        yield "ok", "groups of one rank share no memory", ""
    elif m.devices and here > len(m.devices):
        yield (
            needed(backend),
            f"the launch has {here} ranks on this host, and {len(m.devices)} of its GPUs are seen "
            f"here{f' ({inside})' if own else ''}: a rank cannot map the memory of a GPU that it "
            "does not see",
            TOGETHER if own else "leave CUDA_VISIBLE_DEVICES the same on all ranks of a host",
        )
    elif own and 0 < len(m.devices) < m.pci_gpus:
        yield (
            "warning",
            f"{inside}, with {len(m.devices)} of the host's {m.pci_gpus} GPUs: ranks in other "
            "containers cannot be sent memory handles",
            TOGETHER,
        )
    elif own:
        yield "ok", f"{inside}: ranks must all be started in this one", ""
    else:
        yield "ok", "the host's own, for PID and IPC", ""


def _hosts(m: Machine, backend: str) -> Found:
    """Does every expert parallel group, of consecutive ranks, lie on one host?"""
    hosts, here = launch(m.environment)
    gpus, group = here or len(m.devices), m.expert_parallel
    if not gpus:
        yield "info", "no GPU and no launch is here: nothing to lie on several hosts", ""
        return
    domain = {device.nvlink_domain for device in m.devices if device.nvlink_domain}
    link = (
        f"the NVLink domain that spans hosts ({', '.join(sorted(domain))}) is not used by mok"
        if domain
        else "no NVLink domain that spans hosts is seen"
    )
    level: Level = needed(backend)
    if group is None:
        several = f"the launch has {hosts} hosts: " if hosts > 1 else ""
        yield (
            "ok" if hosts <= 1 else "info",
            f"{several}an expert parallel group of up to {gpus} ranks lies on this host",
            ""
            if hosts <= 1
            else "name its size, --expert-model-parallel-size N, to have it judged",
        )
    elif group > gpus or (hosts > 1 and gpus % group):
        yield (
            level,
            f"an expert parallel group must lie on one host, got groups of {group} ranks where a "
            f"host has {gpus} ranks; {link}",
            f"use an --expert-model-parallel-size that divides {gpus}, or {ALLTOALL}",
        )
    elif not hosts and gpus % group:
        yield (
            "warning",
            f"groups of {group} ranks would lie on two hosts, were there several of {gpus} ranks",
            f"on several hosts use an --expert-model-parallel-size that divides {gpus}",
        )
    else:
        yield "ok", f"groups of {group} ranks lie on one host of {gpus}", ""


def _imex(m: Machine, backend: str) -> Found:
    """The service and channels that fabric handles need, where GPUs are in such a domain."""
    if not any(device.nvlink_domain for device in m.devices):
        yield "ok", "not needed: no GPU is in an NVLink domain of several hosts", ""
        return
    # Only where torch has chosen fabric handles in vain does it matter to ranks of one host.
    level: Level = needed(backend) if m.symmetric_fault else "warning"
    sound = True
    if not m.imex_channels:
        sound = False
        yield (
            level,
            f"no channel of IMEX is here ({IMEX_CHANNELS}/channel0): fabric handles of memory are "
            "not permitted",
            "load the nvidia module with NVreg_CreateImexChannel0=1, or mknod the channel with the "
            "major number that /proc/devices names, and mount the same one into every container",
        )
    if not m.imex_service and m.own_namespaces is not None and "pid" not in m.own_namespaces:
        sound = False
        yield (
            level,
            "the service nvidia-imex does not run: no other host's fabric handle can be opened",
            "list the domain's hosts in /etc/nvidia-imex/nodes_config.cfg and start nvidia-imex on "
            "each (nvidia-imex-ctl -N shows them)",
        )
    if sound:
        channels = ", ".join(map(str, m.imex_channels))
        seen = "the service runs" if m.imex_service else "its service is not seen from here"
        yield "ok", f"channel {channels}; {seen}; mok's groups lie on one host and use none", ""


SHARING: dict[str, Check] = {"namespaces": _namespaces, "hosts": _hosts, "imex": _imex}
