"""Who may import whom, and what importing costs."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mok_megatron"
MAY_IMPORT_MEGATRON = {"plugin.py", "layer.py", "parameters.py", "observe.py", "cpu.py"}
FILES = sorted(PACKAGE.rglob("*.py"))


def _imported(source: str) -> set[str]:
    """Every module named by an import anywhere in the source, or given by name to an importer."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(str(node.module))
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                names.add(str(first.value))
    return names


def _imports(source: str, package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in _imported(source))


@pytest.mark.parametrize(
    "source",
    [
        "import megatron",
        "def f():\n    from megatron.core import parallel_state",
        "import torch, megatron.training as t",
        "if True:\n    import importlib\n    importlib.import_module('megatron.core')",
        "m = __import__('megatron')",
    ],
)
def test_the_walk_sees_every_kind_of_import(source: str) -> None:
    assert _imports(source, "megatron")


def test_the_walk_is_not_fooled_by_names_and_words() -> None:
    assert not _imports("import megatronic, mok_megatron.megatron\n'import megatron'", "megatron")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_only_a_few_import_megatron(file: pathlib.Path) -> None:
    name = str(file.relative_to(PACKAGE))
    if name not in MAY_IMPORT_MEGATRON:
        assert not _imports(file.read_text(), "megatron")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_below_the_seam_nothing_of_the_upper_house(file: pathlib.Path) -> None:
    """Backends and records know neither the files that import Megatron nor autograd's node."""
    name = str(file.relative_to(PACKAGE))
    if name.startswith("backends/") or name in ("contract.py", "config.py"):
        for upper in (*MAY_IMPORT_MEGATRON, "function.py"):
            module = f"mok_megatron.{upper.removesuffix('.py')}"
            assert not _imports(file.read_text(), module), module


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_file_is_asking_to_be_two(file: pathlib.Path) -> None:
    assert len(file.read_text().splitlines()) <= 500


def _modules_after(statement: str) -> set[str]:
    """What `statement` brings into a fresh interpreter, site packages and all."""
    code = (
        "import sys; before = set(sys.modules)\n"
        f"{statement}\n"
        "print(*sorted(set(sys.modules) - before), sep='\\n')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return set(ran.stdout.split())


def test_importing_the_package_brings_nothing_heavy() -> None:
    brought = _modules_after("import mok_megatron")
    assert "mok_megatron" in brought
    heavy = {
        "torch",
        "megatron",
        "numpy",
        "yaml",
        "tqdm",
        "psutil",
        "matplotlib",
        "transformer_engine",
    }
    assert not brought & heavy
    assert {name for name in brought if name.startswith("mok_megatron")} == {"mok_megatron"}


def test_importing_a_backend_brings_torch_but_nothing_of_megatron() -> None:
    brought = _modules_after("import mok_megatron.backends, mok_megatron.function")
    assert "torch" in brought
    assert not {name for name in brought if name.partition(".")[0] == "megatron"}
