"""Builds of the CUDA library that scripts need and no training does: with a throttled wire
(bench_wire.py), or for compute-sanitizer (sanitize.py)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build(to: Path, macro: str) -> None:
    """The library, with that macro of csrc/, for compute capability 9.0. Raises
    subprocess.CalledProcessError as nvcc does."""
    from torch.utils.cpp_extension import include_paths, library_paths

    to.parent.mkdir(parents=True, exist_ok=True)
    csrc = ROOT / "csrc"
    nvcc = str(Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda", "bin", "nvcc"))
    flags = ["-std=c++20", "-O3", "-lineinfo", "-Xcompiler=-fPIC", f"-D{macro}", "-DUSE_CUDA"]
    flags += ["-gencode=arch=compute_90a,code=sm_90a", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    flags += [f"-I{folder}" for folder in include_paths()]
    objects = []
    for source in sorted((*csrc.rglob("*.cu"), *csrc.glob("*.cpp"))):
        print(f"nvcc {source.relative_to(ROOT)}", flush=True)
        objects.append(str(to.parent / f"{source.name}.o"))
        subprocess.run([nvcc, *flags, "-c", str(source), "-o", objects[-1]], check=True)
    link = [nvcc, "-shared", "-cudart=shared", *objects, "-o", str(to)]
    link += [f"-L{folder}" for folder in library_paths()]
    subprocess.run([*link, "-ltorch", "-ltorch_cpu", "-lc10"], check=True)
