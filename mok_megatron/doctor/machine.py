"""The facts about a machine, in one frozen record, and how they are gathered.

What reads a file or a variable is done here, and an unexpected failure of it is a fact too. What
touches torch or the driver is done by `probes` in a process of its own, with a time limit; a probe
that dies or hangs leaves what it had reported, and a fault that names the step it was in. None
stands for what nobody could find out.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent
DEFAULT_TOOLKIT = "/usr/local/cuda"
IMEX_CHANNELS = "/dev/nvidia-caps-imex-channels"
# A probe never makes an NVLink multicast object: nothing in mok needs one.
_PROBE_ENVIRONMENT = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_HOME",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "CXX",
    "GROUP_WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MOK_CUDA",
    "MOK_MEGATRON_DISABLE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SLURM_JOB_NUM_NODES",
    "SLURM_NNODES",
    "SLURM_NTASKS_PER_NODE",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "WORLD_SIZE",
)
_CAP_SYS_PTRACE = 19
# Of the namespaces that Linux starts with (proc_ns.h); a container's have other numbers.
_FIRST_NAMESPACES = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF}
_FATBIN_MAGIC = 0xBA55ED50


@dataclass(frozen=True, kw_only=True)
class Device:
    """One CUDA device, in the order of CUDA_VISIBLE_DEVICES, as the driver describes it."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multicast: bool = False
    mig: bool = False
    nvlink_domain: str | None = None  # "cluster.clique", where NVLink goes beyond the host


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What `rank`'s device may do with the memory of `peer`'s: reach it; its atomics on it."""

    rank: int
    peer: int
    access: bool
    atomics: bool


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """A backend beside a dense float64 layer: the largest relative error, and how long it took."""

    backend: str
    device: str
    error: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Every fact that a check looks at.

    Fields named *_fault hold words: None is not tried, "" is tried without a fault.
    """

    python: tuple[int, int] = (0, 0)
    environment: Mapping[str, str] = field(default_factory=dict)  # the variables that matter
    faults: Mapping[str, str] = field(default_factory=dict)  # step -> what went wrong in it

    torch_version: str | None = None
    torch_cuda: str | None = None  # None: a CPU build
    plugin_installed: bool = False  # its entry point is
    plugin_active: bool | None = None  # after `import torch`
    megatron_version: str | None = None  # in its own words
    megatron_metadata: str | None = None  # of the wheel, which a checkout may hide
    transformer_engine_version: str | None = None
    transformer_engine_fault: str | None = None
    apex: bool = False  # its fused weight gradient

    driver: bool | None = None  # libcuda.so.1 is there
    driver_version: str | None = None
    driver_cuda: tuple[int, int] | None = None  # the newest CUDA it runs
    driver_error: int | None = None  # of cuInit
    devices: tuple[Device, ...] = ()
    pairs: tuple[Pair, ...] = ()
    mig_without_instances: bool = False
    device_nodes: int = 0  # /dev/nvidia0 and so on
    pci_gpus: int = 0

    library: bool = False  # the file is there
    library_arches: tuple[str, ...] = ()
    library_fault: str | None = None
    cuda_backend_fault: str | None = None
    toolkit: str = DEFAULT_TOOLKIT
    nvcc: tuple[int, int] | None = None
    compiler: bool = False

    torch_gpu_fault: str | None = None
    free_bytes: tuple[int, ...] = ()  # of each device
    symmetric_fault: str | None = None
    data_fault: str | None = None  # of the pattern that went over every pair
    self_tests: tuple[SelfTest, ...] = ()

    host_bytes: int | None = None  # what this process may still take
    shm_bytes: int | None = None  # size of /dev/shm; None: it is not there
    locked_bytes: int | None = None  # ulimit -l; None: no limit
    infiniband: bool = False
    take_descriptor_fault: str | None = None  # of pidfd_getfd between siblings
    ptrace_scope: int | None = None
    may_ptrace: bool = False  # CAP_SYS_PTRACE

    expert_parallel: int | None = None  # ranks of a group, as asked for
    own_namespaces: tuple[str, ...] | None = None  # pid, ipc: those that are not the host's
    imex_channels: tuple[int, ...] = ()
    imex_service: bool = False  # among the processes that are seen


def gather(limit: float, root: Path = Path("/")) -> Machine:
    """Look at this machine; a probe gets `limit` seconds. `root` is where /dev, /proc, /sys are."""
    facts: dict[str, Any] = {"devices": [], "self_tests": []}
    faults: dict[str, str] = {}
    for step, look in _LOOKS.items():
        try:
            facts |= look(root)
        except Exception as error:
            faults[f"looking at {step}"] = words(error)
    for group in (("driver", "descriptors"), ("torch", "gpus")):
        probes = [f"{_MODULE}:ask_{name}" for name in group if name != "gpus" or facts["devices"]]
        with ThreadPoolExecutor(max_workers=len(group)) as pool:
            for found, trouble in pool.map(lambda probe: ask(probe, limit), probes):
                facts["self_tests"] += found.pop("self_tests", [])
                facts |= found
                faults |= trouble
    return Machine(**_typed(facts), faults=faults)


def words(error: BaseException) -> str:
    """The first line of an exception's text, and its type where that tells something."""
    first = next(iter(str(error).strip().splitlines()), "")
    if first.startswith("mok: "):
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


# Probes: processes that may hang or die.

_MODULE = "mok_megatron.doctor.probes"
_CHILD = (
    "import json, sys; sys.path[:], name = json.loads(sys.argv[1]); "
    "from mok_megatron.doctor import probes; probes.main(name)"
)


def ask(probe: str, limit: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Facts and faults of the function `module:name`, run in a process of its own.

    Returns within `limit` seconds and a few, whatever the process does, and never raises.
    """
    name = probe.rpartition(":")[2].removeprefix("ask_")
    try:
        child = subprocess.Popen(
            # -P: or -c would look into the current directory first, until sys.path is set.
            [sys.executable, "-P", "-c", _CHILD, json.dumps([sys.path, probe])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **_PROBE_ENVIRONMENT},
            start_new_session=True,
        )
    except OSError as error:
        return {}, {f"starting the {name} probe": words(error)}
    late = ""
    try:
        report, noise = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired as timeout:
        late = f"no answer within {limit:g} s"
        report, noise = _text(timeout.output), ""
        try:
            os.killpg(child.pid, signal.SIGKILL)
            report, noise = child.communicate(timeout=5)
        except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
            late += ", and it does not end when killed"
    facts, faults, step = _read(report)
    if step is None:
        step = f"starting the {name} probe"
    if late:
        faults[step] = late
    elif child.returncode < 0:
        faults[step] = f"died of signal {signal.Signals(-child.returncode).name}"
    elif child.returncode > 0:
        last = next(iter(noise.strip().splitlines()[::-1]), "")
        faults[step] = f"exit code {child.returncode}: {last}".rstrip(": ")
    return facts, faults


def _text(output: Any) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _read(report: str) -> tuple[dict[str, Any], dict[str, str], str | None]:
    """Facts, faults and the last step of a report; a line that was cut off counts for nothing."""
    facts: dict[str, Any] = {}
    faults: dict[str, str] = {}
    step = None
    for line in report.splitlines():
        try:
            kind, value = json.loads(line)
        except ValueError:
            continue
        if kind == "step":
            step = value
        elif kind == "facts":
            facts |= value
        elif kind == "fault":
            faults |= value
    return facts, faults, step


def _typed(facts: dict[str, Any]) -> dict[str, Any]:
    """JSON's lists and objects as the tuples and records of Machine."""
    records: dict[str, Any] = {"devices": Device, "pairs": Pair, "self_tests": SelfTest}
    typed = {name: tuple(v) if isinstance(v, list) else v for name, v in facts.items()}
    for name, record in records.items():
        typed[name] = tuple(record(**values) for values in typed.get(name, ()))
    typed["devices"] = tuple(
        dataclasses.replace(device, capability=tuple(device.capability))
        for device in typed["devices"]
    )
    return typed


# Looks: files and variables.


def _look_at_python(root: Path) -> dict[str, Any]:
    kept = {
        name: value
        for name, value in sorted(os.environ.items())
        if name in _VARIABLES or name.startswith("NCCL_")
    }
    return {"python": sys.version_info[:2], "environment": kept}


def _look_at_packages(root: Path) -> dict[str, Any]:
    entries = importlib.metadata.entry_points(group="torch.backends")
    return {
        "plugin_installed": any(entry.name == "mok_megatron" for entry in entries),
        "megatron_metadata": _version("megatron-core"),
        "transformer_engine_version": _version("transformer-engine"),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _look_at_devices(root: Path) -> dict[str, Any]:
    nodes = [p for p in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", p.name)]
    gpus = [
        bus
        for bus in root.glob("sys/bus/pci/devices/*")
        if _line(bus / "vendor") == "0x10de" and (_line(bus / "class") or "").startswith("0x03")
    ]
    return {
        "device_nodes": len(nodes),
        "pci_gpus": len(gpus),
        "infiniband": any(root.glob("dev/infiniband/uverbs*")),
    }


def _look_at_limits(root: Path) -> dict[str, Any]:
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shm = root / "dev/shm"
    scope = _line(root / "proc/sys/kernel/yama/ptrace_scope")
    effective = re.search(r"^CapEff:\s*(\w+)", _all(root / "proc/self/status"), re.MULTILINE)
    return {
        "locked_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "shm_bytes": shutil.disk_usage(shm).total if shm.is_dir() else None,
        "ptrace_scope": int(scope) if scope and scope.isdigit() else None,
        "may_ptrace": bool(effective and int(effective[1], 16) >> _CAP_SYS_PTRACE & 1),
    }


def _look_at_sharing(root: Path) -> dict[str, Any]:
    own: tuple[str, ...] | None = None
    links = {name: root / "proc/self/ns" / name for name in _FIRST_NAMESPACES}
    if all(link.is_symlink() for link in links.values()):
        own = tuple(
            name
            for name, link in links.items()
            if os.readlink(link) != f"{name}:[{_FIRST_NAMESPACES[name]}]"
        )
    names = [path.name for path in (root / IMEX_CHANNELS[1:]).glob("channel*")]
    numbers = [name.removeprefix("channel") for name in names]
    return {
        "own_namespaces": own,
        "imex_channels": sorted(int(number) for number in numbers if number.isdigit()),
        "imex_service": any(_line(path) == "nvidia-imex" for path in root.glob("proc/[0-9]*/comm")),
    }


def _look_at_memory(root: Path) -> dict[str, Any]:
    """The least of what is free and what is left under the limits of the control groups."""
    left = []
    free = re.search(r"^MemAvailable:\s*(\d+) kB", _all(root / "proc/meminfo"), re.MULTILINE)
    if free:
        left.append(int(free[1]) * 1024)
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        most, taken = (_line(root / "sys/fs/cgroup" / name) for name in (limit, used))
        if most and taken and most.isdigit() and taken.isdigit():
            left.append(max(int(most) - int(taken), 0))
    return {"host_bytes": min(left) if left else None}


def _look_at_library(root: Path) -> dict[str, Any]:
    path = PACKAGE / "_C.abi3.so"
    if not path.is_file():
        return {"library": False}
    try:
        return {"library": True, "library_arches": arches(path.read_bytes())}
    except ValueError:  # whether it loads is for a probe to find out
        return {"library": True}


def _look_at_toolkit(root: Path) -> dict[str, Any]:
    """The toolkit and compiler that a build would take: the rules of csrc/build_backend.py."""
    toolkit = Path(os.environ.get("CUDA_HOME") or DEFAULT_TOOLKIT)
    compiler = (os.environ.get("CXX") or "c++").split()[0]
    facts: dict[str, Any] = {
        "toolkit": str(toolkit),
        "compiler": shutil.which(compiler) is not None,
    }
    nvcc = toolkit / "bin" / "nvcc"
    if nvcc.is_file():
        answer = subprocess.run(
            [str(nvcc), "--version"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
        release = re.search(r"release (\d+)\.(\d+)", answer)
        facts["nvcc"] = [int(release[1]), int(release[2])] if release else None
    return facts


_LOOKS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "Python": _look_at_python,
    "packages": _look_at_packages,
    "devices": _look_at_devices,
    "limits": _look_at_limits,
    "what lies between ranks": _look_at_sharing,
    "memory": _look_at_memory,
    "the CUDA library": _look_at_library,
    "the CUDA toolkit": _look_at_toolkit,
}


def _all(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _line(path: Path) -> str | None:
    return next(iter(_all(path).split()), None)


# The library's file: which architectures its kernels were compiled for.


def arches(library: bytes) -> tuple[str, ...]:
    """`sm_90` for machine code, `compute_90` for PTX, from the fat binary of an ELF file.

    A trailing letter (sm_90a) is not in any documented place of the file and is left out.
    Raises ValueError when the file is no 64-bit ELF file or its fat binary is not understood.
    """
    found = set()
    for code in _sections(library, b".nv_fatbin"):
        position = 0
        while position + 16 <= len(code):
            magic, _, header, size = struct.unpack_from("<IHHQ", code, position)
            if magic == 0:  # padding between two fat binaries
                position += 8
                continue
            if magic != _FATBIN_MAGIC or not header:
                raise ValueError(f"no fat binary at byte {position} of .nv_fatbin")
            end = position + header + size
            found |= set(_entries(code, position + header, min(end, len(code))))
            position = end
    return tuple(f"{kind}_{arch}" for arch, kind in sorted(found))


def _entries(code: bytes, position: int, end: int) -> Iterator[tuple[int, str]]:
    while position + 32 <= end:
        kind, _, header, size = struct.unpack_from("<HHIQ", code, position)
        if not header + size:
            raise ValueError(f"an entry without a size at byte {position} of .nv_fatbin")
        if kind in (1, 2):
            (arch,) = struct.unpack_from("<I", code, position + 28)
            yield arch, "compute" if kind == 1 else "sm"
        position += header + size


def _sections(elf: bytes, wanted: bytes) -> Iterator[bytes]:
    try:
        if elf[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        (table,) = struct.unpack_from("<Q", elf, 40)
        size, count, names = struct.unpack_from("<HHH", elf, 58)
        headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
        (*_, names_start, names_size) = headers[names]
        strings = elf[names_start : names_start + names_size]
        for name, _, _, _, start, length in headers:
            if strings[name:].partition(b"\0")[0] == wanted:
                yield elf[start : start + length]
    except (struct.error, IndexError) as error:
        raise ValueError(f"an ELF file that was cut off ({error})") from None
