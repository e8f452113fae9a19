"""Megatron's MoE layers in one fused call: `--moe-token-dispatcher-type mok`.

This file runs inside `import torch`, in every process of an environment that has the package, also
where nobody uses Megatron: it imports nothing new, and waits. `plugin` is imported with Megatron.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "activate"]

_TARGETS = (
    "megatron.core.transformer.transformer_config",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.training.arguments",
    "megatron.training.training",
)


def activate(**settings: Any) -> None:
    """Teach Megatron the dispatcher `mok` in this process; calling it again changes nothing.

    Needed only where the installed entry point is off, or to pass `settings` (the fields of
    `mok_megatron.config.MokConfig`) from code that has no command line. Call it before Megatron
    parses its arguments. With MOK_MEGATRON_DISABLE=1 it warns and does nothing.
    Raises ValueError, or TypeError for a name, when settings are wrong or differ from an earlier
    call's; RuntimeError when the command line asks for mok and this Megatron cannot run it.
    """
    if _disabled():
        import warnings

        message = "mok: activate() does nothing while MOK_MEGATRON_DISABLE=1; unset it to use mok"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return
    if settings:
        from mok_megatron import plugin

        plugin.configure(**settings)
    _wait_for_megatron()


def _autoload() -> None:
    """The entry point of group `torch.backends`, called by `import torch`; it never raises."""
    try:
        if not _disabled():
            _wait_for_megatron()
    except Exception as error:
        _report(error)


def _disabled() -> bool:
    return os.environ.get("MOK_MEGATRON_DISABLE") == "1"


def _wait_for_megatron() -> None:
    if _finder in sys.meta_path:
        return
    sys.meta_path.insert(0, _finder)
    for name in _TARGETS:
        if name in sys.modules:
            _patch(sys.modules[name])


class _Finder:
    """Finds the targets as Python would, and has each patched when it has been executed."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in _TARGETS:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None:
                try:
                    _patch_after_execution(spec.loader)
                except Exception as error:  # a loader of another kind: Megatron goes on without us
                    _report(error)
                return spec
        return None


_finder = _Finder()


def _patch_after_execution(loader: Any) -> None:
    """Shadow the loader's exec_module once; afterwards the loader is as Python made it."""
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        del loader.exec_module
        execute(module)
        _patch(module)

    loader.exec_module = exec_module


def _patch(module: Any) -> None:
    try:
        from mok_megatron import plugin
    except Exception as error:  # then Megatron goes on without us
        _report(error)
    else:
        plugin.patch(module)


def _report(error: Exception) -> None:
    with contextlib.suppress(Exception):  # a closed stderr must not break `import torch` either
        print(
            f"mok: the dispatcher 'mok' must be added to Megatron, got {error!r}; reinstall "
            "mok-megatron, or silence it with MOK_MEGATRON_DISABLE=1",
            file=sys.stderr,
        )


def _leave_current_directory() -> None:
    """In `python -m mok_megatron.…`, which looks there first for all that is imported, torch too:
    the package's own place instead."""
    arguments = getattr(sys, "argv", [])
    if arguments[:1] != ["-m"] or sys.flags.safe_path:  # "-m": while Python looks for the module
        return
    module = sys.orig_argv[len(sys.orig_argv) - len(arguments)].removeprefix("-m")
    if module.partition(".")[0] == __name__:
        sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


_leave_current_directory()
