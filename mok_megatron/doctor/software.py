"""Checks of what is installed, and for which GPUs: from Python to the backend that is to run."""

from __future__ import annotations

from mok_megatron.doctor.finding import (
    ALLTOALL,
    REFERENCE,
    REPORT,
    Check,
    Found,
    Level,
    dotted,
    gib,
    needed,
    numbers,
)
from mok_megatron.doctor.machine import Machine
from mok_megatron.plugin import KNOWN_VERSIONS as KNOWN_MEGATRON

PYTHON_FLOOR, TORCH_FLOOR, NVCC_FLOOR = (3, 12), (2, 10), (12, 8)
CAPABILITY = (9, 0)
# The oldest driver for each major version of CUDA.
_DRIVERS = {11: "450", 12: "525", 13: "580"}
# What cuInit answers, why, and what to do.
_CUINIT = {
    3: ("the driver is being shut down", "run this again; else reboot"),
    34: (
        "the libcuda.so.1 that was found is the toolkit's stub",
        "take the folder 'stubs' out of LD_LIBRARY_PATH",
    ),
    100: (
        "the driver sees no GPU",
        "make a GPU visible: CUDA_VISIBLE_DEVICES, or the container's --gpus all",
    ),
    802: (
        "the GPUs' NVLink fabric is not ready: the fabric manager does not run, or not yet",
        "start nvidia-fabricmanager of the driver's version on the host, and look into its log",
    ),
    803: (
        "libcuda and the kernel's driver module are of different versions",
        "reboot after a driver update; in a container remove a copied libcuda or cuda-compat",
    ),
    804: (
        "the cuda-compat package does not support this GPU",
        "take cuda-compat out of LD_LIBRARY_PATH",
    ),
    999: (
        "the driver fails with an unknown error, often for want of /dev/nvidia-uvm",
        "run nvidia-modprobe -u on the host and pass /dev/nvidia-uvm to the container",
    ),
}


def _python(m: Machine, backend: str) -> Found:
    if m.python < PYTHON_FLOOR:
        yield (
            "error",
            f"Python must be {dotted(PYTHON_FLOOR)} or newer, got {dotted(m.python)}",
            f"make the environment with Python {dotted(PYTHON_FLOOR)}",
        )
    else:
        yield "ok", dotted(m.python), ""


def _torch(m: Machine, backend: str) -> Found:
    if m.torch_version is None:
        yield "error", "torch cannot be imported", "install torch; see the fault under 'probes'"
        return
    built = f"built for CUDA {m.torch_cuda}" if m.torch_cuda else "a CPU build"
    if numbers(m.torch_version)[:2] < TORCH_FLOOR:
        yield (
            "error",
            f"torch must be {dotted(TORCH_FLOOR)} or newer, got {m.torch_version}",
            "upgrade torch, then install mok-megatron again",
        )
    elif m.torch_cuda is None and backend == "cuda":
        yield (
            "error",
            f"torch {m.torch_version} is a CPU build and cannot use a GPU",
            "install the CUDA build of torch that fits the driver, then mok-megatron again",
        )
    else:
        yield "ok", f"{m.torch_version}, {built}", ""


def _plugin(m: Machine, backend: str) -> Found:
    by_hand = "start scripts with python -m mok_megatron.launch, or call mok_megatron.activate()"
    if m.environment.get("MOK_MEGATRON_DISABLE") == "1":
        yield "error", "MOK_MEGATRON_DISABLE=1 switches mok off", "unset MOK_MEGATRON_DISABLE"
    elif m.plugin_active:
        yield "ok", "active as soon as torch is imported", ""
    elif m.environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        yield (
            "warning",
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading the plugin",
            f"unset it, or {by_hand}",
        )
    elif not m.plugin_installed:
        yield (
            "warning",
            "the entry point is not installed, so Megatron does not know mok by itself",
            f"pip install mok-megatron, or {by_hand}",
        )
    elif m.plugin_active is None:
        yield "warning", "not known: torch was not imported", "see the finding about torch"
    else:
        yield (
            "warning",
            "the entry point is installed, but importing torch did not make the plugin active",
            f"reinstall mok-megatron, or {by_hand}",
        )


def _megatron(m: Machine, backend: str) -> Found:
    install = "install 'megatron-core>=0.17,<0.20'"
    if m.megatron_version is None:
        yield (
            "error",
            "Megatron-Core is not here",
            f"{install}, or put its checkout on PYTHONPATH",
        )
        return
    metadata = m.megatron_metadata
    other = f"; the installed wheel, {metadata}, is hidden by it" if metadata else ""
    if metadata is not None and m.megatron_version.startswith(metadata):
        other = ""
    if not KNOWN_MEGATRON.match(m.megatron_version):
        yield (
            "error",
            f"Megatron-Core must be 0.17 to 0.19, got {m.megatron_version}{other}",
            f"{install} or a mok-megatron that knows this version",
        )
    elif other:
        yield (
            "warning",
            f"Megatron-Core {m.megatron_version} is imported{other}",
            "keep one of them: uninstall the wheel, or take the checkout off PYTHONPATH",
        )
    else:
        yield "ok", f"Megatron-Core {m.megatron_version}", ""


def _transformer_engine(m: Machine, backend: str) -> Found:
    if m.transformer_engine_fault:
        yield (
            "warning",
            f"Transformer Engine is installed but cannot be imported: {m.transformer_engine_fault}",
            "install the version that was built for this torch and CUDA, or uninstall it",
        )
    elif m.transformer_engine_version and m.transformer_engine_fault == "":
        yield "ok", m.transformer_engine_version, ""
    elif m.transformer_engine_version:
        yield "warning", f"{m.transformer_engine_version}, but not known whether it loads", REPORT
    else:
        yield (
            "info",
            "absent: latent attention (MLA) needs it, and fused attention and norms",
            "pip install 'mok-megatron[te]' for those, else pass --transformer-impl local",
        )


def _apex(m: Machine, backend: str) -> Found:
    if m.apex:
        yield "ok", "its fused weight gradient is here", ""
    elif m.transformer_engine_version:
        yield "info", "absent: Transformer Engine's layers do without it", ""
    else:
        yield (
            "info",
            "absent: Megatron's local linear layers cannot fuse gradient accumulation",
            "pass --no-gradient-accumulation-fusion, or install apex with its CUDA extensions",
        )


def _driver(m: Machine, backend: str) -> Found:
    level = needed(backend)
    version = m.driver_version or "of unknown version"
    if m.driver is False:
        here = m.pci_gpus or m.device_nodes
        yield (
            "warning" if here and level == "info" else level,
            "no NVIDIA driver is here: libcuda.so.1 is not found"
            + (f", though the machine has {here} NVIDIA GPU{'s' * (here > 1)}" if here else ""),
            "install the driver, or start the container with its GPUs (--gpus all)",
        )
        return
    if m.driver_error:
        why, remedy = _CUINIT.get(m.driver_error, ("the driver does not start", REPORT))
        if m.driver_error == 100 and m.mig_without_instances:
            why = "MIG is on and no instance is there to use"
            remedy = "switch MIG off: nvidia-smi -mig 0"
        visible = m.environment.get("CUDA_VISIBLE_DEVICES")
        if m.driver_error == 100 and visible is not None:
            why = f"CUDA_VISIBLE_DEVICES={visible!r} leaves no GPU"
            remedy = "unset CUDA_VISIBLE_DEVICES or name GPUs that are here"
        yield level, f"{why} (cuInit: error {m.driver_error})", remedy
        return
    if m.driver is None or m.driver_cuda is None or m.driver_error is None:
        yield level, "not known: the driver gave no answer", "see the fault under 'probes'"
        return
    wanted = numbers(m.torch_cuda) if m.torch_cuda else ()
    if wanted and m.driver_cuda[0] < wanted[0]:
        minimum = _DRIVERS.get(wanted[0], "of that CUDA version")
        yield (
            level,
            f"driver {version} runs CUDA up to {dotted(m.driver_cuda)}, torch is built for "
            f"{m.torch_cuda}",
            f"install driver {minimum} or newer, or a torch built for CUDA {m.driver_cuda[0]}",
        )
    else:
        yield "ok", f"{version}, runs CUDA up to {dotted(m.driver_cuda)}", ""


def _gpus(m: Machine, backend: str) -> Found:
    level = needed(backend)
    if not m.devices:
        remedy = f"use a machine with H100 or H200 GPUs, or {REFERENCE}"
        yield level, "no GPU is visible", remedy if level == "error" else ""
        return
    sound = True
    for rank, device in enumerate(m.devices):
        if device.mig:
            sound = False
            yield (
                level,
                f"GPU {rank} ({device.name}) is in MIG mode, whose instances reach no peer",
                "switch MIG off (nvidia-smi -mig 0) or leave the GPU out with "
                f"CUDA_VISIBLE_DEVICES; else {REFERENCE}",
            )
        if device.capability != CAPABILITY:
            sound = False
            yield (
                level,
                f"the kernels need compute capability {dotted(CAPABILITY)} (H100, H200), got "
                f"{dotted(device.capability)} on GPU {rank} ({device.name})",
                f"{ALLTOALL}, or {REFERENCE}",
            )
    if m.torch_gpu_fault:
        sound = False
        yield (
            level,
            f"torch cannot start CUDA: {m.torch_gpu_fault}",
            "repair driver and torch first; see the findings about them",
        )
    if sound:
        kinds = sorted({f"{d.name}, {gib(d.memory_bytes)}" for d in m.devices})
        yield "ok", f"{len(m.devices)} of capability {dotted(CAPABILITY)}: {'; '.join(kinds)}", ""


def _library(m: Machine, backend: str) -> Found:
    level = needed(backend)
    rebuild = "install mok-megatron again where a CUDA toolkit is (MOK_CUDA=1 says what is missing)"
    if not m.library:
        off = m.environment.get("MOK_CUDA") == "0"
        yield (
            level,
            "the CUDA library was not built: _C.abi3.so is not in the package",
            f"unset MOK_CUDA, then {rebuild}" if off else rebuild,
        )
        return
    built = ", ".join(m.library_arches)
    if m.library_fault is None:
        yield level, "not known whether the CUDA library loads", "see the fault under 'probes'"
    elif m.library_fault:
        cause, _, remedy = m.library_fault.removeprefix("mok: ").rpartition("; ")
        yield level, cause or remedy, remedy if cause else rebuild
    elif not m.library_arches:
        yield (
            "warning",
            "loads, but its file does not tell for which GPUs it was built",
            rebuild,
        )
    else:
        arches = {f"sm_{d.capability[0]}{d.capability[1]}" for d in m.devices}
        missing = ", ".join(sorted(arches - set(m.library_arches)))
        if missing:
            yield (
                level,
                f"built for {built}, but a GPU here needs {missing}",
                f"{rebuild}; kernels exist for sm_90a only",
            )
        else:
            yield "ok", f"loads, built for {built}", ""


def _toolkit(m: Machine, backend: str) -> Found:
    wanted = backend == "cuda" and not (m.library and m.library_fault == "")
    level: Level = "warning" if wanted else "info"
    if m.nvcc is None:
        yield (
            level,
            f"no nvcc that answers in {m.toolkit}/bin: the CUDA library cannot be built here",
            f"set CUDA_HOME to a CUDA toolkit of {dotted(NVCC_FLOOR)} or newer",
        )
    elif m.nvcc < NVCC_FLOOR:
        yield (
            level,
            f"nvcc must be {dotted(NVCC_FLOOR)} or newer to build the CUDA library, got "
            f"{dotted(m.nvcc)} in {m.toolkit}",
            "set CUDA_HOME to a newer toolkit",
        )
    elif m.torch_cuda and numbers(m.torch_cuda)[0] != m.nvcc[0]:
        yield (
            level,
            f"nvcc and torch must be of one CUDA major version to build the CUDA library, got "
            f"{dotted(m.nvcc)} and {m.torch_cuda}",
            "set CUDA_HOME to a toolkit of torch's version",
        )
    elif not m.compiler:
        yield level, "no C++ compiler to build the CUDA library", "install g++ or set CXX"
    else:
        yield "ok", f"nvcc {dotted(m.nvcc)} in {m.toolkit}", ""


def _backend(m: Machine, backend: str) -> Found:
    if backend == "reference":
        yield "ok", "reference: plain torch, on the CPU or a GPU", ""
    elif m.cuda_backend_fault is None:
        yield "error", "not known whether cuda can be chosen", "see the fault under 'probes'"
    elif m.cuda_backend_fault:
        cause, _, remedy = m.cuda_backend_fault.removeprefix("mok: ").partition("; ")
        yield "error", cause, remedy or REFERENCE
    else:
        yield "ok", "cuda: the fused kernel", ""


SOFTWARE: dict[str, Check] = {
    "python": _python,
    "torch": _torch,
    "plugin": _plugin,
    "megatron": _megatron,
    "transformer engine": _transformer_engine,
    "apex": _apex,
    "driver": _driver,
    "gpus": _gpus,
    "library": _library,
    "toolkit": _toolkit,
    "backend": _backend,
}
