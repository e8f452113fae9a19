"""What a check is, and what it finds.

A check looks at a Machine and at nothing else, for one backend. What that backend cannot do without
is an error; what costs speed, or some users, a warning; what only the other backend would need, a
note (info). A fact that nobody could find out is never taken for a good one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from mok_megatron.doctor.machine import Machine

Level = Literal["ok", "info", "warning", "error"]
Found = Iterator[tuple[Level, str, str]]  # level, cause, remedy
Check = Callable[[Machine, str], Found]

ALLTOALL = "use --moe-token-dispatcher-type alltoall"
REFERENCE = "use --mok-backend reference"
REPORT = "report it with the output of --json"
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the answer; `remedy` is "" where nothing is to be done."""

    name: str
    level: Level
    cause: str
    remedy: str = ""


def needed(backend: str) -> Level:
    """The level of a fault that only the cuda backend minds."""
    return "error" if backend == "cuda" else "info"


def dotted(version: tuple[int, ...]) -> str:
    """(3, 12) -> 3.12"""
    return ".".join(str(part) for part in version)


def numbers(version: str) -> tuple[int, ...]:
    """2.11.0+cu130 -> (2, 11, 0)"""
    parts = version.partition("+")[0].split(".")
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)


def gib(size: int) -> str:
    """Bytes in words."""
    return f"{size / GIB:.1f} GiB"
