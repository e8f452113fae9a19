"""Processes for tests of the plugin, and a Megatron of four small modules that needs no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(
    *command: str, cwd: Path, path: list[Path] | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A Python process with PYTHONPATH `path` + the repository; fails at its deadline."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MOK_", "TORCH_DEVICE_"))}
    clean["PYTHONPATH"] = os.pathsep.join(map(str, [*(path or []), ROOT]))
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=clean | variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


SIMULATED = {
    "megatron/core/package_info.py": "__version__ = '{version}'",
    "megatron/core/transformer/transformer_config.py": """
        from dataclasses import dataclass
        from typing import Literal, Optional

        @dataclass
        class TransformerConfig:
            moe_token_dispatcher_type: Literal['allgather', 'alltoall', 'flex'] = 'allgather'
            num_moe_experts: Optional[int] = None
            add_bias_linear: bool = False

            def __post_init__(self):
                self.finished = True
        """,
    "megatron/core/transformer/moe/moe_layer.py": """
        class MoEAlltoAllTokenDispatcher:
            pass

        class MoELayer:
            def __init__(self, config):
                if config.moe_token_dispatcher_type not in ('allgather', 'alltoall', 'flex'):
                    raise ValueError(f'Unsupported token dispatcher type: '
                                     f'{config.moe_token_dispatcher_type}')
            def route(self): ...
            def shared_experts_compute(self): ...
            def forward(self): ...
        """,
    "megatron/training/arguments.py": """
        import argparse
        from typing import get_args
        from megatron.core.transformer.transformer_config import TransformerConfig

        def add_megatron_arguments(parser):
            field = TransformerConfig.__dataclass_fields__['moe_token_dispatcher_type']
            parser.add_argument('--moe-token-dispatcher-type', choices=get_args(field.type),
                                default='allgather')
            parser.add_argument('--num-experts', type=int)
            return parser

        def validate_args(args, defaults={}):
            args.validated = True

        def parse_args():
            return add_megatron_arguments(argparse.ArgumentParser()).parse_args()

        if __name__ == '__main__':
            print('argument module', parse_args().moe_token_dispatcher_type)
        """,
    "megatron/training/global_vars.py": """
        ARGS = None

        def get_args():
            assert ARGS is not None
            return ARGS
        """,
}
CONFIG, LAYER, ARGUMENTS = list(SIMULATED)[1:4]
IMPORT = """
import sys
import mok_megatron
mok_megatron.activate()
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.training import arguments
"""


def simulate(
    folder: Path, version: str = "0.19.2", changes: dict[str, tuple[str, str]] | None = None
) -> None:
    """Write a Megatron of this version; `changes`: file -> (text, its replacement)."""
    for name, text in SIMULATED.items():
        old, new = (changes or {}).get(name, ("", ""))
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for package in path.relative_to(folder).parents[:-1]:
            (folder / package / "__init__.py").touch()
        source = textwrap.dedent(text).replace("{version}", version)
        assert old in source
        path.write_text(source.replace(old, new) if old else source)


def python(folder: Path, code: str, *argv: str, first: str = IMPORT) -> tuple[str, str]:
    """Output and last line of the errors of a process that runs the code."""
    done = run("-c", first + textwrap.dedent(code), *argv, cwd=folder)
    errors = done.stderr.strip().splitlines() or [""]
    return done.stdout.strip(), errors[-1]
