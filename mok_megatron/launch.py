"""python -m mok_megatron.launch SCRIPT [ARGUMENT ...]: run a script with mok activated.

Otherwise the same as `python SCRIPT [ARGUMENT ...]`: sys.argv, sys.path[0] and `__main__` are the
script's. For environments where the installed entry point is off, and for sources that are not
installed:

    torchrun --nproc-per-node 8 -m mok_megatron.launch pretrain_gpt.py \
        --moe-token-dispatcher-type mok ...
"""

from __future__ import annotations

import builtins
import os
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

from mok_megatron import activate

_HELP = """\
Run a training script in which Megatron knows the dispatcher 'mok', as `python SCRIPT` would.

For environments where the installed entry point is off; in others the script alone does it:
    torchrun --nproc-per-node 8 -m mok_megatron.launch pretrain_gpt.py \\
        --moe-token-dispatcher-type mok ..."""
_USAGE = "usage: python -m mok_megatron.launch SCRIPT [ARGUMENT ...]"


def main() -> None:
    """Run sys.argv[1] as `__main__`; exits with code 2 when there is no such file."""
    if len(sys.argv) < 2:
        _stop(_USAGE)
    script = sys.argv[1]
    if script in ("-h", "--help"):
        print(f"{_USAGE}\n\n{_HELP}")
        return
    if not os.path.isfile(script):
        _stop(f"mok: the script to launch must be a file, got {script!r}; {_USAGE}")
    activate()
    del sys.argv[0]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    # Not runpy.run_path: it makes __file__ and sys.argv[0] the same, and takes the module away
    # from exit handlers that still need it.
    path = os.path.abspath(script)
    loader = SourceFileLoader("__main__", path)
    module = ModuleType("__main__")
    vars(module).update(__file__=path, __loader__=loader, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = module
    exec(loader.source_to_code(loader.get_data(path), path), vars(module))


def _stop(message: str) -> None:
    print(message, file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
