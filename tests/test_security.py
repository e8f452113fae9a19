"""What the product never does: unpickle, run a shell, evaluate text, hand objects between ranks,
run what lies in the current directory."""

from __future__ import annotations

import ast
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = sorted(
    path
    for folder in ("mok_megatron", "scripts", "csrc")
    for path in (ROOT / folder).rglob("*.py")
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
# Calls, by their last name: what they would do with a peer's or a file's bytes.
FORBIDDEN_CALLS = {
    "all_gather_object": "unpickles",
    "gather_object": "unpickles",
    "scatter_object_list": "unpickles",
    "broadcast_object_list": "unpickles",
    "send_object_list": "unpickles",
    "recv_object_list": "unpickles",
    "unsafe_load": "builds objects",
    "full_load": "builds objects",
    "eval": "runs text",
    "system": "runs a shell",
    "popen": "runs a shell",
    "mktemp": "names a file that somebody else can make first",
}
ALLOWED = {
    ("mok_megatron/launch.py", "exec"),  # the script that the user named, as python SCRIPT does
}


def faults(source: str, name: str = "") -> list[str]:
    """What the source does of all this, by line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for module in names:
                if module.partition(".")[0] in FORBIDDEN_MODULES:
                    found.append((node.lineno, f"imports {module}"))
        elif isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            last = call.rpartition(".")[2]
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if last in FORBIDDEN_CALLS and call not in ("model.eval", "self.model.eval"):
                found.append((node.lineno, f"{call} {FORBIDDEN_CALLS[last]}"))
            elif call == "exec" and (name, "exec") not in ALLOWED:
                found.append((node.lineno, "exec runs text"))
            elif call in ("import_module", "importlib.import_module", "__import__"):
                module = ast.unparse(node.args[0]).strip("'\"") if node.args else ""
                if module.partition(".")[0] in FORBIDDEN_MODULES:
                    found.append((node.lineno, f"imports {module}"))
            elif call == "torch.load" and given.get("weights_only") != "True":
                found.append((node.lineno, "torch.load without weights_only=True"))
            elif call in ("yaml.load", "yaml.load_all"):
                found.append((node.lineno, f"{call} in place of yaml.safe_load"))
            elif given.get("allow_pickle", "False") != "False":
                found.append((node.lineno, f"{call} with allow_pickle"))
            elif given.get("shell", "False") != "False":
                found.append((node.lineno, f"{call} with shell"))
    return [f"line {line}: {what}" for line, what in found]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_does_nothing_of_the_kind(file: pathlib.Path) -> None:
    assert faults(file.read_text(), str(file.relative_to(ROOT))) == []


def test_the_walk_saw_the_product() -> None:
    names = {str(file.relative_to(ROOT)) for file in FILES}
    assert {"mok_megatron/layer.py", "scripts/train.py", "csrc/build_backend.py"} <= names


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import os, dill as d",
        "import importlib\nimportlib.import_module('pickle')",
        "import torch.distributed as dist\ndist.all_gather_object(a, b)",
        "from torch.distributed import broadcast_object_list as b\n"
        "torch.distributed.broadcast_object_list(x)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "subprocess.run(command, shell=True)",
        "os.system('ls')",
        "eval(text)",
        "exec(text)",
        "tempfile.mktemp()",
    ],
)
def test_the_walk_sees_it(source: str) -> None:
    assert len(faults(source)) == 1


def test_the_walk_is_not_fooled() -> None:
    source = (
        "torch.load(path, weights_only=True)\nyaml.safe_load(text)\nmodel.eval()\n"
        "subprocess.run([name], shell=False)\nast.literal_eval(text)\n'import pickle'\n"
    )
    assert faults(source) == []


# Modules in the current directory that say so when they are imported. None is of those that Python
# itself imports for -m, from there, before it runs anything of ours.
HOSTILE = ("torch", "megatron", "numpy", "yaml", "json", "ctypes", "subprocess", "setuptools")
USES = "import torch, json, yaml, ctypes, subprocess, megatron.core\nprint('ran')\n"
ASK = (
    "from mok_megatron.doctor import machine; "
    "print(machine.ask('mok_megatron.doctor.probes:ask_torch', 60.0))"
)
LOAD = (
    "from mok_megatron.backends import library; import mok_megatron; "
    "print(library.LIBRARY == __import__('pathlib').Path(mok_megatron.__file__).parent / "
    "'_C.abi3.so' and library.LIBRARY.is_absolute() and 'ran')"
)
FROM_THERE = {
    "a script of a launch": ["-m", "mok_megatron.launch", "{script}"],
    "a script of the shim": ["-m", "mok_megatron.cpu", "{script}"],
    "the doctor": ["-m", "mok_megatron.doctor", "--help"],
    "a plan": ["-m", "mok_megatron.plan", "--help"],
    "scripts/train.py": ["{root}/scripts/train.py", "--help"],
    "a probe of the doctor": ["-P", "-c", ASK],
    "the library": ["-P", "-c", LOAD],
}


@pytest.fixture
def hostile(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in HOSTILE:
        said = f"import sys; print('hostile {name}', file=sys.stderr)"
        (folder / f"{name}.py").write_text(said)
    return folder


@pytest.mark.parametrize("what", FROM_THERE)
def test_nothing_is_imported_from_the_current_directory(hostile: pathlib.Path, what: str) -> None:
    script = hostile.parent / "script.py"
    script.write_text(USES)
    if "-m" not in FROM_THERE[what]:  # where Python takes even mok_megatron from there
        package = hostile / "mok_megatron"
        package.mkdir()
        (package / "__init__.py").write_text("raise ImportError('hostile mok_megatron')")
        (package / "_C.abi3.so").write_text("hostile")
    words = [word.format(script=script, root=ROOT) for word in FROM_THERE[what]]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=hostile,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "hostile" not in done.stdout + done.stderr
    assert "ran" in done.stdout or "usage" in done.stdout or "torch" in done.stdout
