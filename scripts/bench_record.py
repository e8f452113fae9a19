"""Where a result came from, and how it is kept: the same for every benchmark of this folder."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "sonic-moe", "quack-kernels", "triton")


def environment(device: str, commit: str | None) -> dict[str, Any]:
    """Where and from what a run was made."""
    import torch  # here: `--help` of a command need not wait for it

    line = origin(device, commit)
    if device == "cuda":
        p = torch.cuda.get_device_properties(0)
        about = f"{p.multi_processor_count} SMs, compute capability {p.major}.{p.minor}"
        line |= {"device": f"{p.name}, {about}"}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        **line,
        "driver": _gpu("driver_version") if device == "cuda" else None,
        "cuda": torch.version.cuda,
        "command": " ".join(["python", *sys.argv]),
    }


def origin(device: str, commit: str | None) -> dict[str, Any]:
    """What two runs of one kind share; asks no GPU for memory."""
    return {
        "device": _gpu("name") if device == "cuda" else "CPU",
        "versions": {package: found for package in _PACKAGES if (found := _version(package))},
        "commit": commit or _commit(),
    }


def _gpu(what: str) -> str | None:
    return _say(["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"])


def _commit() -> str:
    root = Path(__file__).resolve().parent
    found = _say(["git", "-C", str(root), "rev-parse", "HEAD"])
    changed = _say(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return f"{found}{', changed' if changed else ''}" if found else "unknown"


def _say(command: list[str]) -> str | None:
    """The first line that a command prints, None where there is none."""
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = said.stdout.splitlines() if said.returncode == 0 else []
    return lines[0].strip() if lines else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def append(path: Path, line: dict[str, Any]) -> None:
    """One JSON line to a file that is made when it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns as wide as they must be, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
