"""Facts for which torch, the driver or a process must be touched, by processes of their own.

A probe reports line by line, so that what it learnt before it hangs or dies is kept: the step it is
in, then the facts of that step. An exception ends a step, not the probe. The driver is asked by its
own library, not through torch: a torch that cannot use the GPU is one of the faults to find.
Nothing here makes an NVLink multicast object; whether the devices could is read off an attribute.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import itertools
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mok_megatron.doctor.machine import PACKAGE, words

if TYPE_CHECKING:
    import torch

# Attributes of CUdevice_attribute and CUdevice_P2PAttribute.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MULTICAST_SUPPORTED = 75, 76, 132
_NATIVE_ATOMIC_SUPPORTED = 3


class Report:
    """Lines of JSON, [kind, value], to whoever started the probe."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def facts(self, **facts: Any) -> None:
        self._write("facts", facts)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """What is done inside; an exception becomes the fault of this step."""
        self._write("step", name)
        try:
            yield
        except Exception as error:
            self._write("fault", {name: words(error)})

    def _write(self, kind: str, value: Any) -> None:
        print(json.dumps([kind, value]), file=self._stream, flush=True)


def main(name: str) -> None:
    """Run the probe `module:function`; what libraries print goes to stderr."""
    report = Report(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    module, _, function = name.partition(":")
    getattr(importlib.import_module(module), function)(report)


# The driver.


def ask_driver(report: Report, load: Callable[[str], Any] = ctypes.CDLL) -> None:
    """The driver's versions, its devices, and what each pair of them can do. Opens no context."""
    nvml = None
    with report.step("asking NVML"):
        nvml = _nvml(report, load)
    with report.step("loading libcuda.so.1"):
        try:
            cuda = load("libcuda.so.1")
        except OSError:
            report.facts(driver=False)
            return
        report.facts(driver=True)
        version = _out(cuda.cuDriverGetVersion, ctypes.c_int())
        report.facts(driver_cuda=[version // 1000, version % 1000 // 10])
    with report.step("calling cuInit"):
        error = cuda.cuInit(0)
        report.facts(driver_error=error)
        if error:
            return
    with report.step("listing the devices"):
        count = _out(cuda.cuDeviceGetCount, ctypes.c_int())
        devices = [_out(cuda.cuDeviceGet, ctypes.c_int(), rank) for rank in range(count)]
        report.facts(devices=[_device(cuda, nvml, device) for device in devices])
    with report.step("asking for peer access"):
        pairs = [
            {
                "rank": rank,
                "peer": peer,
                "access": bool(
                    _out(cuda.cuDeviceCanAccessPeer, ctypes.c_int(), devices[rank], devices[peer])
                ),
                "atomics": bool(
                    _out(
                        cuda.cuDeviceGetP2PAttribute,
                        ctypes.c_int(),
                        _NATIVE_ATOMIC_SUPPORTED,
                        devices[rank],
                        devices[peer],
                    )
                ),
            }
            for rank, peer in itertools.permutations(range(count), 2)
        ]
        report.facts(pairs=pairs)


def _out(function: Any, result: Any, *arguments: Any) -> int:
    """What a driver's function writes into its first argument. Raises RuntimeError."""
    error = function(ctypes.byref(result), *arguments)
    if error:
        raise RuntimeError(f"{getattr(function, '__name__', 'the call')} returned error {error}")
    return int(result.value)


def _device(cuda: Any, nvml: Any, device: int) -> dict[str, Any]:
    name, bus = ctypes.create_string_buffer(128), ctypes.create_string_buffer(64)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceGetPCIBusId(bus, len(bus), device)

    def attribute(which: int) -> int:
        return _out(cuda.cuDeviceGetAttribute, ctypes.c_int(), which, device)

    text = name.value.decode(errors="replace")
    multicast = False
    with contextlib.suppress(RuntimeError):  # a driver older than the attribute
        multicast = bool(attribute(_MULTICAST_SUPPORTED))
    by_bus = nvml and nvml.nvmlDeviceGetHandleByPciBusId_v2
    return {
        "name": text,
        "capability": [attribute(_CAPABILITY_MAJOR), attribute(_CAPABILITY_MINOR)],
        "memory_bytes": _out(cuda.cuDeviceTotalMem_v2, ctypes.c_size_t(), device),
        "multicast": multicast,
        "mig": " MIG " in text or _mig(nvml, by_bus, bus),
        "nvlink_domain": _nvlink_domain(nvml, by_bus, bus),
    }


def _nvml(report: Report, load: Callable[[str], Any]) -> Any:
    """NVML, initialised; None where it is not to be had."""
    try:
        nvml = load("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    version = ctypes.create_string_buffer(96)
    if not nvml.nvmlSystemGetDriverVersion(version, len(version)):
        report.facts(driver_version=version.value.decode(errors="replace"))
    count = _out(nvml.nvmlDeviceGetCount_v2, ctypes.c_uint())
    by_index = nvml.nvmlDeviceGetHandleByIndex_v2
    report.facts(mig_without_instances=any(_mig(nvml, by_index, index) for index in range(count)))
    return nvml


def _mig(nvml: Any, find: Any, which: Any) -> bool:
    """Is MIG on in the GPU that NVML's function `find` finds by `which`?"""
    if nvml is None:
        return False
    handle, now, pending = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
    if find(which, ctypes.byref(handle)):
        return False
    asked = nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(now), ctypes.byref(pending))
    return asked == 0 and now.value == 1


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


def _nvlink_domain(nvml: Any, find: Any, which: Any) -> str | None:
    """Where the GPU's NVLink goes beyond its host: cluster and clique, which its peers share."""
    handle, info = ctypes.c_void_p(), _FabricInfo()
    if nvml is None or find(which, ctypes.byref(handle)):
        return None
    try:
        error = nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    except AttributeError:  # an NVML from before there were such domains
        return None
    if error or info.status or not any(info.cluster):
        return None
    return f"{bytes(info.cluster).hex()}.{info.clique}"


# Processes.


def ask_descriptors(report: Report) -> None:
    """May a process take a file descriptor of its sibling? torch's expandable segments want to."""
    with report.step("taking a sibling's file descriptor"):
        holder = os.fork()
        if not holder:
            signal.pause()
        try:
            taker = os.fork()
            if not taker:
                os._exit(_take_descriptor(holder))
            error = os.waitstatus_to_exitcode(os.waitpid(taker, 0)[1])
        finally:
            os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)
        report.facts(take_descriptor_fault=os.strerror(error) if error else "")


def _take_descriptor(pid: int) -> int:
    """0, or the error number."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        process = os.pidfd_open(pid)
    except OSError as error:
        return error.errno or 1
    taken = libc.syscall(438, process, 0, 0)  # pidfd_getfd, the same number everywhere
    return 0 if taken >= 0 else ctypes.get_errno()


# torch, without a GPU.


def ask_torch(report: Report) -> None:
    """Versions, the plugin, the library, the reference backend on the CPU, Transformer Engine."""
    with report.step("reading Megatron's version"):
        report.facts(megatron_version=_megatron_version())
    with report.step("importing torch"):
        import torch

        torch.set_num_threads(1)  # the layer is small, and a loaded machine has no cores to give
        report.facts(torch_version=torch.__version__, torch_cuda=torch.version.cuda)
    if "torch" not in sys.modules:
        return
    with report.step("looking for the plugin"):
        import mok_megatron

        report.facts(plugin_active=mok_megatron._finder in sys.meta_path)
    with report.step("testing the reference backend on the CPU"):
        from mok_megatron.doctor import trial

        report.facts(self_tests=[trial.run("reference", torch.device("cpu"))])
    with report.step("choosing the cuda backend"):
        from mok_megatron.doctor import trial

        chosen = _fault(lambda: trial.choose("cuda", torch.device("cuda")))
        report.facts(cuda_backend_fault=chosen)
    with report.step("looking for apex"):
        report.facts(apex=importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None)
    if (PACKAGE / "_C.abi3.so").is_file():
        with report.step("loading the CUDA library"):
            from mok_megatron.backends import library

            report.facts(library_fault=_fault(library.load))
    if importlib.util.find_spec("transformer_engine") is not None:
        with report.step("importing Transformer Engine"):
            name = "transformer_engine.pytorch"
            report.facts(transformer_engine_fault=_fault(lambda: importlib.import_module(name)))


def _fault(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return words(error)
    return ""


def _megatron_version() -> str | None:
    """What the Megatron that an import would find says of itself, without importing it."""
    spec = importlib.util.find_spec("megatron")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "core" / "package_info.py"
        if path.is_file():
            return str(runpy.run_path(str(path))["__version__"])
    return None


# The GPUs, through torch.


def ask_gpus(report: Report) -> None:
    """Free memory, data over every pair, symmetric memory, and each backend on each GPU."""
    import torch

    count, fault = 0, ""
    with report.step("starting CUDA in torch"):
        fault = _fault(torch.cuda.init)
        report.facts(torch_gpu_fault=fault)
        count = torch.cuda.device_count()
    if fault or not count:
        return
    with report.step("opening the GPUs"):
        free = [torch.cuda.mem_get_info(rank)[0] for rank in range(count)]
        report.facts(free_bytes=free)
    with report.step("moving a pattern between the GPUs"):
        report.facts(data_fault=wrong_pairs(count, carry))
    with report.step("allocating symmetric memory"):
        report.facts(symmetric_fault=_fault(_symmetric_memory))
    from mok_megatron.doctor import trial

    tests = []
    for name, rank in itertools.product(("reference", "cuda"), range(count)):
        with report.step(f"testing the {name} backend on GPU {rank}"):
            device = torch.device("cuda", rank)
            if name == "reference" or not _fault(partial(trial.choose, "cuda", device)):
                tests.append(trial.run(name, device))
                report.facts(self_tests=tests)


def wrong_pairs(count: int, carry: Callable[[torch.Tensor, int, int], torch.Tensor]) -> str:
    """The pairs over which a pattern arrives changed, in words; "" when there are none.

    `carry(pattern, a, b)` brings an int32 tensor from the host to GPU a, to GPU b and home.
    """
    import torch

    wrong = []
    for a, b in itertools.product(range(count), repeat=2):
        pattern = torch.arange(1 << 18, dtype=torch.int32) * 40503 + (a * count + b)
        if not torch.equal(carry(pattern, a, b), pattern):
            wrong.append(f"{a} to {b}")
    return f"a pattern came back changed over GPU {', '.join(wrong)}" if wrong else ""


def carry(pattern: torch.Tensor, a: int, b: int) -> torch.Tensor:
    """Over the link between two GPUs, or to one and back."""
    return pattern.to(f"cuda:{a}").to(f"cuda:{b}").cpu()


def _symmetric_memory() -> None:
    """A small symmetric block in a group of one rank; it is written and read."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.distributed import _symmetric_memory as symmetric_memory

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        block = symmetric_memory.empty([4096], dtype=torch.int32, device=torch.device("cuda", 0))
        handle = symmetric_memory.rendezvous(block, dist.distributed_c10d._get_default_group())
        block.fill_(7)
        seen = handle.get_buffer(0, (4096,), torch.int32)
        if int(seen.sum()) != 7 * 4096:
            raise RuntimeError("what was written into symmetric memory was not read back")
    finally:
        dist.destroy_process_group()
