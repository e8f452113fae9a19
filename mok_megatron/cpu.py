"""Opt-in: unmodified Megatron trains on the CPU over gloo, because it is told of a CUDA device that
does not exist.

What a run under this module proves is integration: arguments, layer, autograd, optimizer,
checkpoints, processes. It says nothing about speed, nothing about CUDA code, and nothing here
computes: every redirect below only answers a question about a device, or sends an allocation to the
CPU. Nothing activates it but a call to `install()`:

    python -m mok_megatron.cpu SCRIPT args…     an unmodified script, such as pretrain_gpt.py
    mok_megatron.cpu.install()                  from Python, before Megatron is used

Pass --distributed-backend gloo --transformer-impl local, and the --no-… flags of fusions that need
CUDA kernels. The change is to the whole process and cannot be undone in it; new threads do not see
the redirected allocations.

Every redirect names a target that must exist, so that a torch or Megatron in which it moved is an
error here and not a strange one later. Checked with
megatron-core 0.19.2; on 0.17.1 and 0.18.2 it installs, no training was run there.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_installed = False


def install() -> None:
    """Redirect torch.cuda and Megatron's CUDA-only spots to the CPU, once per process.

    Raises RuntimeError when CUDA is already in use here, or when a target is not where it was.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "mok: the CPU shim must be installed before CUDA is used, got an initialised CUDA "
            "context; call mok_megatron.cpu.install() first"
        )
    _installed = True
    forgo_compilation()
    _report_one_device()
    _replace_streams_and_events()
    _share_the_cpu_generator()
    _CudaMeansCpu().__enter__()
    _adapt_megatron()
    use_built_dataset_index()


# --- torch ----------------------------------------------------------------------------


def forgo_compilation() -> None:
    """megatron.core.jit wraps small functions in torch.compile, which would ask the accelerator for
    its properties."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].config.disable = True


def _report_one_device() -> None:
    """Answers about the device. training.initialize asserts is_available() and skips seeding at
    device_count() 0."""
    _redirect(
        torch.cuda,
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: CPU,  # Megatron passes it on as device=…
        set_device=lambda device: None,
        device=lambda device=None: contextlib.nullcontext(),
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        get_device_name=lambda device=None: "cpu",
        get_device_capability=lambda device=None: (0, 0),
        get_device_properties=lambda device=None: SimpleNamespace(
            name="cpu", major=0, minor=0, total_memory=0, multi_processor_count=1
        ),
        is_current_stream_capturing=lambda: False,
    )
    no_bytes = dict.fromkeys(
        (
            "memory_allocated",
            "memory_reserved",
            "max_memory_allocated",
            "max_memory_reserved",
            "device_memory_used",
        ),
        lambda device=None: 0,
    )
    _redirect(torch.cuda, **no_bytes)
    _redirect(
        torch.cuda,
        memory_stats=lambda device=None: {},
        reset_peak_memory_stats=lambda device=None: None,
    )
    _redirect(torch.cuda.nvtx, range_push=lambda message: 0, range_pop=lambda: 0)


class _Event:
    """torch.cuda.Event where work is done by the time a call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 0.0


class _Stream:
    """torch.cuda.Stream where there is one order only, the program's."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass


def _replace_streams_and_events() -> None:
    """DDP, the token dispatchers and the training loop order their copies with them."""
    the_stream = _Stream()
    _redirect(
        torch.cuda,
        Stream=_Stream,
        Event=_Event,
        current_stream=lambda device=None: the_stream,
        default_stream=lambda device=None: the_stream,
        set_stream=lambda stream: None,
        stream=lambda stream: contextlib.nullcontext(),
    )


def _share_the_cpu_generator() -> None:
    """The "CUDA" generator is the CPU's: parameters are drawn from it, under Megatron's own state
    tracker."""

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(int(value))

    def set_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    for module in (torch.cuda, torch.cuda.random):
        _redirect(
            module,
            get_rng_state=lambda device=None: torch.get_rng_state(),
            set_rng_state=set_state,
            manual_seed=seed,
            manual_seed_all=seed,
            initial_seed=torch.initial_seed,
        )


class _CudaMeansCpu(TorchFunctionMode):
    """Sends what asks for CUDA memory to the CPU: device=…, .cuda(), .to(…), pinned memory."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The optimizers tell precisions apart by these names, e.g. 'torch.cuda.FloatTensor'.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


# --- Megatron -------------------------------------------------------------------------


def _adapt_megatron() -> None:
    """The spots that look at a tensor's device or at CUDA's own generator instead of asking
    torch.cuda."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    # It reaches into torch.cuda.default_generators; the tracker above it works as it is.
    _redirect(
        random,
        _set_cuda_rng_state=lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(
            new_state
        ),
    )
    # torch calls backward with the mode off, and a checkpoint runs its forward again in there.
    recompute = random.CheckpointFunction.backward

    def backward(ctx: Any, *gradients: Any) -> Any:
        with _CudaMeansCpu():
            return recompute(ctx, *gradients)

    _redirect(random.CheckpointFunction, backward=staticmethod(backward))
    # The tracker warns when drawing "CUDA" numbers moves the CPU generator; here they are one.
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )

    # Split sizes become numbers only when they were on a GPU, and all_to_all_single wants numbers.
    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    for name in ("moe_utils", "token_dispatcher"):
        module = importlib.import_module(f"megatron.core.transformer.moe.{name}")
        _redirect(module, maybe_move_tensor_to_cpu=to_host)


def use_built_dataset_index() -> None:
    """Skip the compilation of Megatron's dataset index where it is already compiled.

    Not about CUDA: at start Megatron runs `make` in megatron/core/datasets, and its wheel holds the
    compiled module but no Makefile, so any training from the wheel would end there.
    """
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        utils = importlib.import_module("megatron.core.datasets.utils")
        _redirect(utils, compile_helpers=lambda: None)


def _redirect(owner: Any, **targets: Any) -> None:
    """Replace attributes of `owner`; RuntimeError for one that it does not have."""
    for name, replacement in targets.items():
        if not hasattr(owner, name):
            raise RuntimeError(
                f"mok: the CPU shim replaces {owner.__name__}.{name}, got a version without it; "
                "use the torch and megatron-core versions named in pyproject.toml"
            )
        setattr(owner, name, replacement)


_USAGE = "usage: python -m mok_megatron.cpu SCRIPT [args…]"
_HELP = """\
Run a Megatron training script on the CPU: the script sees a CUDA device that is not there.

This proves that a launch works and what its losses are. It says nothing about speed, and nothing
about CUDA. Collectives need --distributed-backend gloo."""


def main(argv: list[str]) -> None:
    """Run the script `argv[0]` with the arguments `argv[1:]` under the shim, as `python SCRIPT
    args…` would."""
    if argv[:1] in (["-h"], ["--help"]):
        print(f"{_USAGE}\n\n{_HELP}")
        return
    if not argv or argv[0].startswith("-"):
        sys.exit(_USAGE)
    if not os.path.isfile(argv[0]):
        sys.exit(f"mok: the script to run must be a file, got {argv[0]!r}; check the path")
    import mok_megatron

    mok_megatron.activate()
    sys.argv = argv
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    install()
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    # Not this copy, which is named __main__: install() is once per process.
    from mok_megatron import cpu

    cpu.main(sys.argv[1:])
