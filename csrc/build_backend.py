"""PEP 517 build backend: setuptools, plus the CUDA library where a CUDA toolkit is here.

Policy.
    Two products of one tree: a pure Python wheel (py3-none-any, reference backend only), or a wheel
    that also holds mok_megatron/_C.abi3.so (cp312-abi3). The library uses torch's stable ABI and no
    symbol of Python, so one file serves every torch from TORCH_FLOOR and every Python from 3.12 on.
    It loads on a machine without a GPU.

    MOK_CUDA chooses. 0: pure Python. 1: the library, built strictly: a missing toolkit and a
    compiler warning are errors (CI and GPU images want this). Unset: the library if there is a
    toolkit. What the machine code may spill is tests/csrc/test_sass.py's matter.

    The toolkit is CUDA_HOME when that is set, else /usr/local/cuda. It is never guessed from an
    nvcc on PATH, which may be a wrapper script far from headers and libraries. A toolkit that is
    here but cannot build the library is an error, not a quiet pure Python wheel: installers hide
    what a build prints.

    Nothing is downloaded here. torch is imported from the build environment; only an isolated build
    is told to get one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.build_meta import _BuildMetaBackend
from setuptools.command.sdist import sdist

DEFAULT_TOOLKIT = "/usr/local/cuda"
# sm_90a and C++20 need nvcc 12.0; 12.8 is what TORCH_FLOOR's own wheels were built with. Tried with
# 13.0 only.
NVCC_FLOOR = (12, 8)
TORCH_FLOOR = (2, 10)
ARCHES = ("90a",)
# Everything a source distribution needs beside the package itself.
SDIST_TREES = ("csrc", "configs", "scripts", "tests", ".ci")
# Where an editable install puts the library.
LIBRARY = Path("mok_megatron/_C.abi3.so")
WITHOUT_LIBRARY = "set MOK_CUDA=0 to install without the CUDA library"

ConfigSettings = Mapping[str, Any] | None


def stop(cause: str, remedy: str) -> SystemExit:
    """The end of a build, as one line: installers print a SystemExit without a traceback."""
    return SystemExit(f"mok: {cause}; {remedy}")


def find_toolkit() -> Path | None:
    """The folder of the CUDA toolkit to build with, or None for a pure Python build.

    Raises SystemExit when MOK_CUDA is not a known value, or is 1 and there is no toolkit.
    """
    wish = os.environ.get("MOK_CUDA", "")
    if wish not in ("", "0", "1"):
        raise stop(f"MOK_CUDA must be 0, 1 or unset, got {wish!r}", "unset it to build what fits")
    if wish == "0":
        return None
    toolkit = Path(os.environ.get("CUDA_HOME") or DEFAULT_TOOLKIT)
    if (toolkit / "bin" / "nvcc").is_file():
        return toolkit
    if wish == "1":
        raise stop(
            f"MOK_CUDA=1 needs a CUDA toolkit, got no {toolkit}/bin/nvcc",
            f"set CUDA_HOME to a toolkit, or {WITHOUT_LIBRARY}",
        )
    return None


def nvcc_version(toolkit: Path) -> tuple[int, int]:
    """(major, minor) of the toolkit's compiler. Raises SystemExit when it cannot be asked."""
    nvcc = toolkit / "bin" / "nvcc"
    try:
        answer = subprocess.run(
            [str(nvcc), "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise stop(f"{nvcc} must run, got {error}", f"repair it, or {WITHOUT_LIBRARY}") from None
    found = re.search(r"release (\d+)\.(\d+)", answer)
    if found is None:
        raise stop(
            f"{nvcc} --version must name a release, got {answer.strip()!r}",
            f"set CUDA_HOME to a CUDA toolkit, or {WITHOUT_LIBRARY}",
        )
    return int(found[1]), int(found[2])


def check_toolkit(toolkit: Path) -> tuple[int, int]:
    """Apply every rule that needs no torch; returns the version of nvcc. Raises SystemExit."""
    version = nvcc_version(toolkit)
    if version < NVCC_FLOOR:
        raise stop(
            "nvcc must be {}.{} or newer, got {}.{} in {}".format(*NVCC_FLOOR, *version, toolkit),
            f"set CUDA_HOME to a newer toolkit, or {WITHOUT_LIBRARY}",
        )
    for name, places in {
        "cuda_runtime.h": ("include",),
        "libcudart.so": ("lib64", "lib"),
    }.items():
        if not any((toolkit / place / name).is_file() for place in places):
            raise stop(
                f"the CUDA toolkit must be complete, got no {places[0]}/{name} in {toolkit}",
                f"install the whole toolkit, or {WITHOUT_LIBRARY}",
            )
    arches = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if arches and not re.search(r"\b9\.0|hopper", arches, re.IGNORECASE):
        raise stop(
            f"the kernels exist for compute capability 9.0a, got TORCH_CUDA_ARCH_LIST={arches!r}",
            f"unset it or add 9.0a, or {WITHOUT_LIBRARY}",
        )
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler.split()[0]) is None:
        raise stop(
            f"the library needs a C++20 compiler, got no {compiler!r} on PATH",
            f"install g++ or set CXX, or {WITHOUT_LIBRARY}",
        )
    return version


def check_torch(nvcc: tuple[int, int]) -> None:
    """Can the library be built against the torch of this environment? Raises SystemExit."""
    try:
        import torch
    except ImportError as error:
        raise stop(
            f"building the CUDA library needs torch, got {error}",
            f"install torch first or build with isolation, or {WITHOUT_LIBRARY}",
        ) from None
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < TORCH_FLOOR:
        raise stop(
            "torch must be {}.{} or newer, got {}".format(*TORCH_FLOOR, torch.__version__),
            f"upgrade torch, or {WITHOUT_LIBRARY}",
        )
    built_for = torch.version.cuda
    if built_for is None:
        raise stop(
            f"the CUDA library needs a torch built with CUDA, got torch {torch.__version__}",
            f"install a CUDA build of torch, or {WITHOUT_LIBRARY}",
        )
    if int(built_for.split(".")[0]) != nvcc[0]:
        raise stop(
            "nvcc and torch must be of one CUDA major version, "
            f"got nvcc {nvcc[0]}.{nvcc[1]} and torch for CUDA {built_for}",
            "set CUDA_HOME to a toolkit of torch's version, or install a torch of the toolkit's "
            f"version and build with --no-build-isolation, or {WITHOUT_LIBRARY}",
        )


def flags(strict: bool, torch_headers: list[str]) -> dict[str, list[str]]:
    """Compiler flags of C++ ("cxx") and CUDA ("nvcc") files; strict makes warnings errors."""
    target = TORCH_FLOOR[0] << 56 | TORCH_FLOOR[1] << 48
    stable_abi = ["-DUSE_CUDA", f"-DTORCH_TARGET_VERSION=0x{target:016x}"]
    # A folder given as -isystem drops out of the -I list, so torch's own warnings are not ours.
    system = [f"-isystem{folder}" for folder in torch_headers]
    cxx = ["-std=c++20", "-O3", "-g0", "-Wall", "-Wextra", *stable_abi, *system]
    nvcc = ["-std=c++20", "-O3", "-lineinfo"]
    # torch forbids the operators of half types by default; a kernel means what plain nvcc says.
    nvcc += [f"-U__CUDA_NO_{what}__" for what in ("HALF_OPERATORS", "HALF_CONVERSIONS")]
    nvcc += [f"-U__CUDA_NO_{what}__" for what in ("HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")]
    nvcc += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHES]
    if strict:
        cxx += ["-Werror"]
        nvcc += ["--Werror=all-warnings"]  # ptxas obeys it too
    return {"cxx": cxx, "nvcc": nvcc}


def sources() -> list[str]:
    """The library's C++ and CUDA files, relative to the root, a build's current directory."""
    return sorted(str(path) for kind in ("cpp", "cu") for path in Path("csrc").rglob(f"*.{kind}"))


def library(toolkit: Path) -> dict[str, Any]:
    """What setup() must know to build mok_megatron/_C.abi3.so. Raises SystemExit if it cannot."""
    os.environ["CUDA_HOME"] = str(toolkit)  # torch reads it once, when cpp_extension is imported
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # what is installed does not take part
    check_torch(check_toolkit(toolkit))
    os.environ.setdefault("MAX_JOBS", str(min(len(os.sched_getaffinity(0)), 8)))
    from torch.utils.cpp_extension import BuildExtension, CUDAExtension, include_paths

    headers = [str(path) for kind in ("h", "cuh") for path in Path("csrc").rglob(f"*.{kind}")]
    extension = CUDAExtension(
        "mok_megatron._C",
        sources(),
        include_dirs=[str(Path("csrc").resolve())],
        depends=sorted(headers),
        py_limited_api=True,
        extra_compile_args=flags(os.environ.get("MOK_CUDA") == "1", include_paths("cuda")),
        extra_link_args=["-s"],
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp312"}},
    }


class Sdist(sdist):
    """A source distribution with the whole tree that builds and tests it, toolkit or not."""

    def make_distribution(self) -> None:
        for tree in SDIST_TREES:
            for path in sorted(Path(tree).rglob("*")):
                if path.is_file() and path.suffix not in (".pyc", ".so", ".o"):
                    self.filelist.append(str(path))
        super().make_distribution()


class Backend(_BuildMetaBackend):
    """setuptools' backend with setup() called here, so that the top level needs no setup.py."""

    def __init__(self) -> None:
        super().__init__()
        self.additions: dict[str, Any] = {}

    def run_setup(self, setup_script: str = "setup.py") -> None:
        """One run of setup(); metadata and source distributions never need the library."""
        commands = {"sdist": Sdist, **self.additions.get("cmdclass", {})}
        setup(**{**self.additions, "cmdclass": commands})

    def add_library(self) -> None:
        toolkit = find_toolkit()
        self.additions = library(toolkit) if toolkit is not None and sources() else {}

    def build_wheel(
        self,
        wheel_directory: str,
        config_settings: ConfigSettings = None,
        metadata_directory: str | None = None,
    ) -> str:
        self.add_library()
        for stale in Path("build").glob("lib*"):  # else a deleted module would live on in the wheel
            shutil.rmtree(stale)
        return super().build_wheel(wheel_directory, config_settings, metadata_directory)

    def build_editable(
        self,
        wheel_directory: str,
        config_settings: ConfigSettings = None,
        metadata_directory: str | None = None,
    ) -> str:
        self.add_library()
        LIBRARY.unlink(missing_ok=True)  # one of other sources, or one that MOK_CUDA=0 refuses
        return super().build_editable(wheel_directory, config_settings, metadata_directory)

    def get_requires_for_build_wheel(self, config_settings: ConfigSettings = None) -> list[str]:
        """What an isolated build has to fetch: torch and ninja only where the library is built."""
        toolkit = find_toolkit()
        if toolkit is None or not sources():
            return []
        check_toolkit(toolkit)
        return ["torch>={}.{}".format(*TORCH_FLOOR), "ninja"]

    get_requires_for_build_editable = get_requires_for_build_wheel

    def get_requires_for_build_sdist(self, config_settings: ConfigSettings = None) -> list[str]:
        return []


_backend = Backend()
build_wheel = _backend.build_wheel
build_sdist = _backend.build_sdist
build_editable = _backend.build_editable
get_requires_for_build_wheel = _backend.get_requires_for_build_wheel
get_requires_for_build_sdist = _backend.get_requires_for_build_sdist
get_requires_for_build_editable = _backend.get_requires_for_build_editable
prepare_metadata_for_build_wheel = _backend.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _backend.prepare_metadata_for_build_editable
