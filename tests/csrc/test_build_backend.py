"""The build backend: every toolkit that may be found gives a library, a pure wheel, or one line.

Toolkits are folders with a script for nvcc, torch is a module made up for the case, so that rules
are tested and not this machine. What a real nvcc makes of the sources is the business of .ci/run.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import types
import zipfile
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BACKEND = ROOT / "csrc" / "build_backend.py"


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.ModuleType:
    """The module itself, in a tree with one kernel file and without this machine's settings."""
    for name in ("MOK_CUDA", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST", "CXX", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("build_backend", BACKEND)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DEFAULT_TOOLKIT", str(tmp_path / "no-toolkit"))
    tree = tmp_path / "tree"
    (tree / "csrc").mkdir(parents=True)
    (tree / "csrc" / "kernel.cu").touch()
    monkeypatch.chdir(tree)
    return module


def make_toolkit(folder: Path, *, release: str = "13.0", lacks: str = "") -> Path:
    """A folder that looks like a CUDA toolkit whose nvcc says `release`, less one file."""
    for name in ("bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart.so"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name != lacks:
            path.touch(mode=0o755)
    answer = f"Cuda compilation tools, release {release}, V{release}.0" if release else "hello"
    (folder / "bin" / "nvcc").write_text(f"#!/bin/sh\necho '{answer}'\n")
    return folder


def make_torch(version: str = "2.11.0", cuda: str | None = "13.0") -> types.ModuleType:
    torch = types.ModuleType("torch")
    torch.__version__ = version
    torch.version = types.SimpleNamespace(cuda=cuda)
    return torch


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One toolkit, one torch and one environment that cannot give a library, and its one line."""

    id: str
    says: str
    release: str = "13.0"
    lacks: str = ""
    torch_version: str = "2.11.0"
    torch_cuda: str | None = "13.0"
    environment: dict[str, str] = field(default_factory=dict)


REFUSALS = [
    Refusal(id="nvcc-11", release="11.8", says="nvcc must be 12.8 or newer, got 11.8"),
    Refusal(id="nvcc-12.7", release="12.7", says="nvcc must be 12.8 or newer, got 12.7"),
    Refusal(id="nvcc-mute", release="", says="must name a release, got 'hello'"),
    Refusal(id="no-headers", lacks="include/cuda_runtime.h", says="got no include/cuda_runtime.h"),
    Refusal(id="no-cudart", lacks="lib64/libcudart.so", says="got no lib64/libcudart.so"),
    Refusal(
        id="other-arch",
        environment={"TORCH_CUDA_ARCH_LIST": "8.0;8.6+PTX"},
        says="compute capability 9.0a, got TORCH_CUDA_ARCH_LIST='8.0;8.6+PTX'",
    ),
    Refusal(
        id="no-compiler", environment={"CXX": "no-such-c++"}, says="got no 'no-such-c++' on PATH"
    ),
    Refusal(
        id="torch-2.9", torch_version="2.9.1+cu130", says="torch must be 2.10 or newer, got 2.9.1"
    ),
    Refusal(id="torch-cpu", torch_cuda=None, says="a torch built with CUDA, got torch 2.11.0"),
    Refusal(
        id="other-major",
        release="12.8",
        says="one CUDA major version, got nvcc 12.8 and torch for CUDA 13.0",
    ),
]


@pytest.mark.parametrize("wish", ["", "1"], ids=["unset", "MOK_CUDA=1"])
@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.id)
def test_a_toolkit_that_cannot_build_ends_in_one_line(
    backend: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    case: Refusal,
    wish: str,
) -> None:
    toolkit = make_toolkit(tmp_path / "cuda", release=case.release, lacks=case.lacks)
    settings = {"CUDA_HOME": str(toolkit), "MOK_CUDA": wish, "CXX": "sh", **case.environment}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "torch", make_torch(case.torch_version, case.torch_cuda))

    with pytest.raises(SystemExit) as stopped:
        backend.library(backend.find_toolkit())

    message = str(stopped.value)
    assert case.says in message
    assert message.startswith("mok: ")
    assert message.endswith("MOK_CUDA=0 to install without the CUDA library")
    assert "\n" not in message


def test_torch_that_is_not_there_ends_in_one_line(
    backend: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        SystemExit, match=r"mok: building the CUDA library needs torch, got .*torch"
    ):
        backend.check_torch((13, 0))


def test_nvcc_that_does_not_run_ends_in_one_line(backend: types.ModuleType, tmp_path: Path) -> None:
    toolkit = make_toolkit(tmp_path / "cuda")
    (toolkit / "bin" / "nvcc").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(SystemExit, match=r"nvcc must run, got .*exit status 3"):
        backend.check_toolkit(toolkit)


@pytest.mark.parametrize("arches", ["", "9.0", "9.0a", "8.0;9.0;10.0+PTX", "Hopper"])
@pytest.mark.parametrize("release", ["12.8", "13.0", "13.10", "14.0"])
def test_a_right_toolkit_is_taken(
    backend: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    release: str,
    arches: str,
) -> None:
    toolkit = make_toolkit(tmp_path / "cuda", release=release)
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", arches)
    monkeypatch.setenv("CXX", "sh -c")
    assert backend.find_toolkit() == toolkit
    version = backend.check_toolkit(toolkit)
    assert version == tuple(int(part) for part in release.split("."))
    monkeypatch.setitem(sys.modules, "torch", make_torch("2.10.0+cu", release))
    backend.check_torch(version)


def test_toolkit_comes_from_the_variable_then_the_usual_place_never_from_path(
    backend: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_path = make_toolkit(tmp_path / "on-path")
    monkeypatch.setenv("PATH", str(on_path / "bin"), prepend=os.pathsep)
    assert backend.find_toolkit() is None

    usual = make_toolkit(tmp_path / "usual")
    monkeypatch.setattr(backend, "DEFAULT_TOOLKIT", str(usual))
    assert backend.find_toolkit() == usual

    named = make_toolkit(tmp_path / "named")
    monkeypatch.setenv("CUDA_HOME", str(named))
    assert backend.find_toolkit() == named

    # A variable that names no toolkit is not quietly replaced by the usual place.
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    assert backend.find_toolkit() is None


def test_mok_cuda_chooses(
    backend: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    monkeypatch.setenv("MOK_CUDA", "1")
    with pytest.raises(SystemExit, match=r"MOK_CUDA=1 needs a CUDA toolkit, got no .*nothing/bin"):
        backend.find_toolkit()

    monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda")))
    assert backend.find_toolkit() == tmp_path / "cuda"
    monkeypatch.setenv("MOK_CUDA", "0")
    assert backend.find_toolkit() is None
    monkeypatch.setenv("MOK_CUDA", "yes")
    with pytest.raises(SystemExit, match="MOK_CUDA must be 0, 1 or unset, got 'yes'"):
        backend.find_toolkit()


def test_an_isolated_build_fetches_torch_only_for_the_library(
    backend: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hooks = (backend.get_requires_for_build_wheel, backend.get_requires_for_build_editable)
    assert [hook() for hook in hooks] == [[], []]
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda")))
    monkeypatch.setenv("CXX", "sh")
    assert [hook() for hook in hooks] == [["torch>=2.10", "ninja"]] * 2
    assert backend.get_requires_for_build_sdist() == []
    Path("csrc/kernel.cu").unlink()
    assert backend.get_requires_for_build_wheel() == []


def test_flags(backend: types.ModuleType) -> None:
    loose, strict = (backend.flags(strict, ["/t/include"]) for strict in (False, True))
    assert "-DTORCH_TARGET_VERSION=0x020a000000000000" in loose["cxx"]
    assert {"-DUSE_CUDA", "-std=c++20", "-Wall", "-Wextra", "-isystem/t/include"} <= {*loose["cxx"]}
    assert {"-gencode=arch=compute_90a,code=sm_90a", "-lineinfo", "-O3"} <= {*loose["nvcc"]}
    assert {*strict["cxx"]} - {*loose["cxx"]} == {"-Werror"}
    assert {*strict["nvcc"]} - {*loose["nvcc"]} == {"--Werror=all-warnings"}


def build(hook: str, tree: Path, into: Path, **environment: str) -> Path:
    """Call one hook of the backend as an installer does, in a process of its own; the file made."""
    into.mkdir()
    script = f"import build_backend; build_backend.{hook}({str(into)!r})"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": "csrc", **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = into.iterdir()
    return made


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's own pyproject.toml and backend around a package of two modules."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "LICENSE", "csrc/build_backend.py", "scripts/env.sh"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes((ROOT / name).read_bytes())
    (tree / "README.md").write_text("# A project\n")
    (tree / "csrc" / "device").mkdir()
    (tree / "csrc" / "device" / "part.cuh").write_text("#pragma once\n")
    (tree / "mok_megatron" / "backends").mkdir(parents=True)
    (tree / "mok_megatron" / "__init__.py").write_text("def _autoload():\n    pass\n")
    (tree / "mok_megatron" / "backends" / "__init__.py").touch()
    (tree / "mok_megatron" / "_C.abi3.so").write_text("left by an earlier editable install")
    (tree / "build" / "lib" / "mok_megatron").mkdir(parents=True)
    (tree / "build" / "lib" / "mok_megatron" / "deleted.py").touch()
    return tree


def test_pure_wheel(tree: Path, tmp_path: Path) -> None:
    wheel = build("build_wheel", tree, tmp_path / "out", MOK_CUDA="0")
    assert wheel.name == "mok_megatron-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        entry_points = archive.read("mok_megatron-0.1.0.dist-info/entry_points.txt").decode()
        metadata = archive.read("mok_megatron-0.1.0.dist-info/METADATA").decode()
        licence = archive.read("mok_megatron-0.1.0.dist-info/licenses/LICENSE").decode()
    assert names == {"mok_megatron/__init__.py", "mok_megatron/backends/__init__.py"}
    assert entry_points.split() == [
        "[torch.backends]",
        "mok_megatron",
        "=",
        "mok_megatron:_autoload",
    ]
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.12" in metadata
    assert "Apache License" in licence


def test_editable_install_without_the_library_forgets_an_old_one(
    tree: Path, tmp_path: Path
) -> None:
    old = tree / "mok_megatron" / "_C.abi3.so"
    old.write_text("left by an earlier editable install")
    build("build_editable", tree, tmp_path / "out", MOK_CUDA="0")
    assert not old.exists()


def test_source_distribution_can_build_the_library(tree: Path, tmp_path: Path) -> None:
    made = build("build_sdist", tree, tmp_path / "out", MOK_CUDA="1", CUDA_HOME="/no-toolkit")
    with tarfile.open(made) as archive:
        names = {name.removeprefix("mok_megatron-0.1.0/") for name in archive.getnames()}
    assert {"csrc/build_backend.py", "csrc/device/part.cuh", "scripts/env.sh", "LICENSE"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_a_missing_toolkit_stops_an_installer_in_one_line(tree: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import build_backend as b; b.build_wheel('out')"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": "csrc", "MOK_CUDA": "1", "CUDA_HOME": "/no-toolkit"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "mok: MOK_CUDA=1 needs a CUDA toolkit, got no /no-toolkit/bin/nvcc; set CUDA_HOME to a "
        "toolkit, or set MOK_CUDA=0 to install without the CUDA library\n"
    )


def test_installed_metadata_names_the_hook() -> None:
    installed = distribution("mok-megatron")
    (hook,) = installed.entry_points.select(group="torch.backends")
    assert (hook.name, hook.value) == ("mok_megatron", "mok_megatron:_autoload")
    assert callable(hook.load())
    assert installed.version == importlib.import_module("mok_megatron").__version__
