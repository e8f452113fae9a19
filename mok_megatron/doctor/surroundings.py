"""Checks of what is around the software: links, memory, limits, variables, and the trials."""

from __future__ import annotations

from mok_megatron.doctor.finding import (
    ALLTOALL,
    GIB,
    REFERENCE,
    REPORT,
    Check,
    Found,
    Level,
    gib,
    needed,
)
from mok_megatron.doctor.machine import Machine

TOLERANCE = {"reference": 1e-3, "cuda": 2e-2}  # a row that goes astray costs more than 5e-2
TRIAL_SECONDS = 2.0
GPU_FLOOR, HOST_FLOOR, SHM_FLOOR = 2 * GIB, 4 * GIB, GIB
_APART = "leave GPUs out with CUDA_VISIBLE_DEVICES until all that remain reach each other"

# Variables that change how ranks talk: (bad values, None for any), level, what they do, what to do.
_VARIABLES: dict[str, tuple[tuple[str, ...] | None, Level, str, str]] = {
    "CUDA_LAUNCH_BLOCKING": (
        ("1",),
        "warning",
        "makes the host wait for every kernel",
        "unset it, except to find a fault",
    ),
    "NCCL_P2P_DISABLE": (
        ("1",),
        "warning",
        "sends Megatron's own collectives through host memory",
        "unset it",
    ),
    "NCCL_SHM_DISABLE": (
        ("1",),
        "warning",
        "sends what goes through host memory over the network instead",
        "unset it",
    ),
    "NCCL_IB_DISABLE": (("1",), "info", "keeps NCCL off InfiniBand: slow between hosts", ""),
    "NCCL_NVLS_ENABLE": (("0",), "info", "keeps NCCL off NVLink multicast; mok uses none", ""),
    "NCCL_ALGO": (None, "info", "overrules NCCL's own choice", ""),
    "NCCL_PROTO": (None, "info", "overrules NCCL's own choice", ""),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (
        ("0",),
        "warning",
        "lets the other ranks wait for ever when one fails",
        "unset it",
    ),
}
# What to do about a step that a probe did not survive.
_STEPS = {
    "calling cuInit": "see dmesg for Xid or NVRM; restart the fabric manager, or reboot",
    "importing torch": "install torch again; see what `python -c 'import torch'` says",
    "moving a pattern between the GPUs": "switch PCI ACS off, or the IOMMU to pass-through",
    "starting CUDA in torch": "run nvidia-smi; see dmesg for Xid or NVRM",
    "opening the GPUs": "run nvidia-smi; see dmesg for Xid or NVRM",
    "loading the CUDA library": "install mok-megatron again with this torch",
    "importing Transformer Engine": "install the version built for this torch, or uninstall it",
}


def _probes(m: Machine, backend: str) -> Found:
    for step, fault in m.faults.items():
        remedy = _STEPS.get(step, "")
        if "no answer" in fault:
            remedy = f"give it more time with --limit; else {remedy or REPORT}"
        yield (
            "warning" if step == "importing Transformer Engine" else "error",
            f"{step}: {fault}",
            remedy or REPORT,
        )
    if not m.faults:
        yield "ok", "every question was answered", ""


def _memory(m: Machine, backend: str) -> Found:
    sound = True
    for rank, (free, device) in enumerate(zip(m.free_bytes, m.devices, strict=False)):
        known = f"GPU {rank} has {gib(free)} of {gib(device.memory_bytes)} free"
        if free < GPU_FLOOR:
            sound = False
            yield (
                needed(backend),
                f"{known}, less than CUDA, NCCL and torch take before the first layer",
                "end what holds it (nvidia-smi shows it), or choose another GPU",
            )
        elif 2 * free < device.memory_bytes:
            sound = False
            yield (
                "warning",
                f"{known}: other processes hold the rest",
                "end them (nvidia-smi shows them), or plan with what is left",
            )
    if m.host_bytes is None:
        yield "info", "host memory: not known how much is free", ""
    elif m.host_bytes < HOST_FLOOR:
        yield (
            "warning",
            f"{gib(m.host_bytes)} of host memory is left, where each rank's libraries take more "
            "than one",
            "free memory or raise the container's limit (--memory)",
        )
    elif sound:
        on_gpu = f"{gib(min(m.free_bytes))} free on each GPU, " if m.free_bytes else ""
        yield "ok", f"{on_gpu}{gib(m.host_bytes)} free on the host", ""


def _peers(m: Machine, backend: str) -> Found:
    """Access and atomics, for every pair of visible GPUs in both directions."""
    if len(m.devices) < 2:
        yield "info", "one GPU or none: there is no pair", ""
        return
    if len(m.pairs) != len(m.devices) * (len(m.devices) - 1):
        yield needed(backend), "not known which GPUs reach each other", "see 'probes'"
        return
    closed = [f"{p.rank} to {p.peer}" for p in m.pairs if not p.access]
    plain = [f"{p.rank} to {p.peer}" for p in m.pairs if p.access and not p.atomics]
    if closed:
        yield (
            needed(backend),
            f"no peer access from GPU {_few(closed)}",
            f"{_APART}; look at nvidia-smi topo -p2p r for the driver's reason",
        )
    if plain:
        yield (
            needed(backend),
            f"no native atomics on a peer's memory from GPU {_few(plain)}: no NVLink",
            f"{_APART}, or {ALLTOALL}",
        )
    if m.data_fault:
        yield (
            needed(backend),
            m.data_fault,
            "switch PCI ACS off, or the IOMMU to pass-through (iommu=pt)",
        )
    elif m.data_fault is None:
        yield needed(backend), "no pattern was moved between the GPUs", "see 'probes'"
    if not closed and not plain and m.data_fault == "":
        yield "ok", f"{len(m.pairs)} of {len(m.pairs)} pairs: access, atomics, a pattern moved", ""


def _few(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _symmetric_memory(m: Machine, backend: str) -> Found:
    if not m.devices:
        yield "info", "not tried: no GPU is visible", ""
    elif m.symmetric_fault is None:
        yield needed(backend), "not known whether torch can allocate it", "see 'probes'"
    elif m.symmetric_fault:
        yield (
            needed(backend),
            f"torch cannot allocate it: {m.symmetric_fault}",
            f"allow cuMemCreate with POSIX file descriptors and sockets in /tmp; else {REFERENCE}",
        )
    else:
        yield "ok", "torch allocates, shares and reads a block", ""


def _multicast(m: Machine, backend: str) -> Found:
    able = sum(device.multicast for device in m.devices)
    off = m.environment.get("TORCH_SYMM_MEM_DISABLE_MULTICAST")
    switched = ", switched off in torch by TORCH_SYMM_MEM_DISABLE_MULTICAST" if off else ""
    yield "info", f"{able} of {len(m.devices)} GPUs have it{switched}; mok does not use it", ""


def _descriptors(m: Machine, backend: str) -> Found:
    """Taking a sibling's descriptor: only torch's expandable segments want that."""
    if m.take_descriptor_fault is None:
        yield "info", "not known whether a process may take a file descriptor of its sibling", ""
    elif m.take_descriptor_fault:
        scope = "unknown" if m.ptrace_scope is None else m.ptrace_scope
        yield (
            "info",
            f"a process may not take a sibling's: {m.take_descriptor_fault} (yama ptrace_scope "
            f"{scope}, CAP_SYS_PTRACE {'held' if m.may_ptrace else 'not held'}); mok needs no such "
            "right, its memory is sent over a socket",
            "",
        )
    else:
        yield "ok", "a process may take a sibling's (pidfd_getfd)", ""


def _allocator(m: Machine, backend: str) -> Found:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        settings = m.environment.get(name, "").lower().replace(" ", "")
        if "expandable_segments:true" not in settings:
            continue
        if m.take_descriptor_fault == "":
            yield "ok", f"{name} asks for expandable segments, which can be shared here", ""
        else:
            yield (
                "warning",
                f"{name} asks for expandable segments, which processes cannot share here "
                f"(pidfd_getfd: {m.take_descriptor_fault or 'not tried'}); mok's memory is not "
                "taken from them",
                "drop expandable_segments:True, or start the container with --cap-add=SYS_PTRACE",
            )
        return
    yield "ok", "no expandable segments", ""


def _shm(m: Machine, backend: str) -> Found:
    if m.shm_bytes is None:
        yield (
            "warning",
            "/dev/shm is not there: NCCL and data loader workers share memory through it",
            "mount a tmpfs on /dev/shm",
        )
    elif m.shm_bytes < SHM_FLOOR:
        yield (
            "warning",
            f"/dev/shm holds {m.shm_bytes >> 20} MiB, which NCCL and data loader workers share",
            "start the container with --ipc=host or --shm-size=16g",
        )
    else:
        yield "ok", f"{gib(m.shm_bytes)} in /dev/shm", ""


def _locked(m: Machine, backend: str) -> Found:
    if m.locked_bytes is None:
        yield "ok", "no limit (ulimit -l)", ""
        return
    limit = f"ulimit -l is {m.locked_bytes >> 10} KiB"
    if m.infiniband:
        yield (
            "warning",
            f"{limit}, where InfiniBand registers much more",
            "start with --ulimit memlock=-1, or raise it in limits.conf",
        )
    else:
        yield "info", f"{limit}; it matters with InfiniBand only, and there is none", ""


def _connections(m: Machine, backend: str) -> Found:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = m.environment.get(name)
    if value == "1":
        yield "ok", f"{name}=1", ""
    elif value is not None and not (value.isdigit() and 1 <= int(value) <= 32):
        yield "warning", f"{name} must be 1 to 32, got {value!r}", f"set {name}=1"
    elif m.devices:
        yield (
            "info",
            f"{name} is {value or 'not set'}: Megatron stops with tensor or context parallelism "
            "on GPUs before Blackwell",
            f"set {name}=1 for those",
        )
    else:
        yield "info", f"{name} is {value or 'not set'}; it matters with a GPU only", ""


def _variables(m: Machine, backend: str) -> Found:
    quiet = True
    for name, (bad, level, effect, remedy) in _VARIABLES.items():
        value = m.environment.get(name)
        if value is not None and (bad is None or value in bad):
            quiet = False
            yield level, f"{name}={value} {effect}", remedy
    if quiet:
        yield "ok", "none is set that changes how ranks talk", ""


def _trials(m: Machine, backend: str) -> Found:
    """The backend in question on every device it is for; the reference on the CPU always."""
    on_gpus = [f"cuda:{rank}" for rank in range(len(m.devices))]
    wanted = [("reference", "cpu")] + [(backend, d) for d in on_gpus if backend == "cuda"]
    done = {(t.backend, t.device) for t in m.self_tests}
    if backend == "cuda" and (m.cuda_backend_fault or not m.devices):
        yield "info", "the cuda backend was not tried: see 'backend' and 'gpus'", ""
        wanted = wanted[:1]
    for name, device in wanted:
        if (name, device) not in done:
            yield "error", f"{name} on {device} gave no answer", "see 'backend' and 'probes'"
    for t in m.self_tests:
        level: Level = "error" if t.backend == backend or t.device == "cpu" else "warning"
        told = f"{t.backend} on {t.device}: error {t.error:.0e} in {t.seconds:.1f} s"
        if not t.error <= TOLERANCE[t.backend]:
            yield (
                level,
                f"{told}, more than {TOLERANCE[t.backend]:.0e} from a dense float64 layer",
                f"do not train on this machine; {REPORT}",
            )
        elif t.seconds > TRIAL_SECONDS:
            yield (
                "warning",
                f"{told}, right but slow: more than {TRIAL_SECONDS:g} s",
                "end what else uses the CPUs and GPUs, and run it again; if it stays slow, look at "
                "clocks and throttling (nvidia-smi -q -d PERFORMANCE)",
            )
        else:
            yield "ok", told, ""


SURROUNDINGS: dict[str, Check] = {
    "memory": _memory,
    "peers": _peers,
    "symmetric memory": _symmetric_memory,
    "multicast": _multicast,
    "descriptors": _descriptors,
    "allocator": _allocator,
    "shared memory": _shm,
    "locked memory": _locked,
    "connections": _connections,
    "variables": _variables,
    "self-test": _trials,
    "probes": _probes,
}
