"""Choices of experts for fuzz.py: route.cuh on the host beside a stable sort.

The C++ file runs the device code with CUDA's threads in a drawn order between collectives.
"""

from __future__ import annotations

import ctypes
import pathlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = (
    "csrc/arguments.h",
    "csrc/check.h",
    "csrc/layer_arguments.h",
    "csrc/workspace.h",
    "csrc/exchange_arguments.h",
    "csrc/device/schedule.cuh",
    "csrc/device/route.cuh",
    "csrc/device/view.cuh",
    "tests/csrc/route_on_host.cpp",
)
Ints = np.ndarray  # of int32
OUT_OF_RANGE, DUPLICATE, NOT_FINITE = 1, 2, 3  # RouteFaultKind
WRONG_IDS = (-2, -(2**31), 2**31 - 1)  # and E
WRONG_PROBS = np.array([np.nan, np.inf, -np.inf], np.float32)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """ids int32 [T, K]; `wild` [T, K]: whose probability is not finite; `order` seeds which thread
    goes first at every collective."""

    ids: Ints
    wild: np.ndarray
    experts: int
    order: int

    def __str__(self) -> str:
        wild = self.wild.nonzero()[0].tolist()
        return f"{self.experts} experts, order {self.order}, ids {self.ids.tolist()}, wild {wild}"

    @property
    def probs(self) -> np.ndarray:
        """fp32 [T, K], one value a slot, or one that is not finite."""
        slots = np.arange(self.ids.size).reshape(self.ids.shape)
        return np.where(self.wild, WRONG_PROBS[slots % 3], (slots + 1).astype(np.float32))


class Router:
    """The library of route_on_host.cpp; `old` becomes `new` in the file `edited`."""

    def __init__(
        self, tree: pathlib.Path, old: str = "", new: str = "", edited: str = "route.cuh"
    ) -> None:
        for source in SOURCES:
            text = (ROOT / source).read_text()
            if old and source.endswith(edited):
                assert text.count(old) == 1, f"the seed no longer fits: {old}"
                text = text.replace(old, new)
            (tree / source).parent.mkdir(parents=True, exist_ok=True)
            (tree / source).write_text(text)
        compiler = shutil.which("c++")
        assert compiler is not None, "the library needs a C++ compiler, and so does its test"
        command = [compiler, "-std=c++20", "-O1", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
        command += ["-Werror", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", f"-I{tree / 'csrc'}"]
        command += [str(tree / SOURCES[-1]), "-o", str(tree / "route.so")]
        subprocess.run(command, check=True, timeout=120)
        self._library = ctypes.CDLL(str(tree / "route.so"))

    def draw(self, random: np.random.Generator) -> Choices:
        """Small cases for the most part; several chunks, many experts and many choices too."""
        tokens = int(random.integers(1, _one(random, 4, 16, 16, 16, 30, 300), endpoint=True))
        choices = int(random.integers(1, _one(random, 2, 8, 8, 64)))
        experts = int(random.integers(1, _one(random, 4, 30, 30, 30, 30, 300), endpoint=True))
        loaded = int(random.integers(1, experts, endpoint=True))
        first, step = random.integers(1, loaded, (2, tokens, 1), np.int32, endpoint=True)
        ids = (first + np.arange(choices, dtype=np.int32) * step) % loaded
        ids[_twice(ids)] = -1
        ids[random.random(ids.shape) < _one(random, 0.0, 0.0, 0.15, 0.15, 0.8, 1.0)] = -1
        wrong = random.random(ids.shape) < _one(random, 0.0, 0.0, 0.02, 0.3)
        others = np.array([*WRONG_IDS, experts, *range(min(loaded, 4))], np.int32)
        ids[wrong] = others[random.integers(len(others), size=wrong.sum())]
        wild = random.random(ids.shape) < _one(random, 0.0, 0.0, 0.0, 0.02)
        return Choices(ids=ids, wild=wild, experts=experts, order=int(random.integers(2**31)))

    def failures(self, cases: Sequence[Choices]) -> list[tuple[int, str]]:
        wanted = [expected(case) for case in cases]
        rows = [
            (*case.ids.shape, case.experts, case.order, sum(map(len, words.values())))
            for case, words in zip(cases, wanted, strict=True)
        ]
        table = np.array(rows, np.int32).reshape(-1, 5)
        ids = np.concatenate([case.ids.ravel() for case in cases] or [np.empty(0, np.int32)])
        probs = np.concatenate([case.probs.ravel() for case in cases] or [WRONG_PROBS])
        ends = table[:, 4].cumsum()
        out = np.full(ends[-1] if len(ends) else 0, -99, np.int32)
        self._library.route_cases(
            _at(table), len(cases), _at(ids), _at(probs, np.float32), _at(out)
        )
        everything = [np.concatenate(list(words.values())) for words in wanted]
        failing = []
        for index, (found, all_words) in enumerate(
            zip(np.split(out, ends[:-1]), everything, strict=True) if cases else ()
        ):
            if not np.array_equal(found, all_words):
                failing.append((index, _difference(found, wanted[index])))
        return failing

    def smaller(self, case: Choices) -> Iterator[Choices]:
        tokens, choices = case.ids.shape
        for part in (tokens // 2, tokens // 4, 1):
            for first in range(0, tokens, part) if 0 < part < tokens else ():
                yield _without(case, slice(first, first + part), 0)
        for choice in range(choices) if choices > 1 else ():
            yield _without(case, choice, 1)
        for slot in np.flatnonzero(case.wild):
            yield replace(case, wild=_with(case.wild, slot, False))
        if case.experts > 1:
            yield replace(case, experts=case.experts // 2)
            yield replace(case, experts=case.experts - 1)
        if case.ids.size <= 64:
            for slot in np.flatnonzero(case.ids != -1):
                yield replace(case, ids=_with(case.ids, slot, -1))
            for slot in np.flatnonzero((case.ids > 0) & (case.ids < case.experts)):
                yield replace(case, ids=_with(case.ids, slot, case.ids.flat[slot] // 2))
        if case.order > 9:
            yield from (replace(case, order=order) for order in range(10))


def expected(case: Choices) -> dict[str, Ints]:
    """What route.cuh must write, in the order of route_on_host.cpp."""
    ids, experts = case.ids, case.experts
    tokens, choices = ids.shape
    flat, slots = ids.ravel(), np.arange(ids.size)
    known = (flat >= 0) & (flat < experts)
    again, wild = _twice(ids).ravel(), case.wild.ravel()
    wrong = (flat < -1) | (flat >= experts) | (known & (again | wild))
    column = np.where(wrong, experts, flat)
    count = np.bincount(column[column >= 0], minlength=experts + 1)
    start = np.concatenate([[0], (-(-count[:experts] // 128) * 128).cumsum()])
    order = np.argsort(column, kind="stable")
    order = order[(column[order] >= 0) & (column[order] < experts)]
    of = column[order]
    row = start[of] + np.arange(len(of)) - np.searchsorted(of, of)
    row_TK, slot_R = np.full(ids.size, -1), np.full(start[-1], -1)
    row_TK[order], slot_R[row] = row, order
    fault = [0] * 7
    if wrong.any():
        first = slots[wrong][0]
        kind = OUT_OF_RANGE if not known[first] else DUPLICATE if again[first] else NOT_FINITE
        prob = case.probs.ravel()[first : first + 1].view(np.int32)[0]
        fault = [kind, flat[first], first // choices, first % choices]
        fault += [experts, choices, prob]
    words = {
        "probabilities, views, and the words around": [1],
        "fault": fault,
        "faulty": count[experts:],
        "shared_start and shared_count": [0, -(-tokens // 128) * 128, tokens],
        "row_start": start,
        "row_count": count[:experts],
        "row_TK": row_TK,
        "slot_R": slot_R,
    }
    return {name: np.asarray(value, np.int32) for name, value in words.items()}


def _twice(ids: Ints) -> np.ndarray:
    """Which of the ids [T, K] are in an earlier slot of their token too."""
    return (np.tri(ids.shape[1], k=-1, dtype=bool) & (ids[:, :, None] == ids[:, None, :])).any(2)


def _one(random: np.random.Generator, *values: float) -> float:
    return values[random.integers(len(values))]


def _difference(found: Ints, wanted: dict[str, Ints]) -> str:
    if found[0] == -2:
        return "a CTA stands still"
    if found[0] == -1:
        return "another number of rows"
    for name, words in wanted.items():
        mine, found = found[: len(words)], found[len(words) :]
        if not np.array_equal(mine, words):
            at = np.flatnonzero(mine != words)[0]
            return f"{name}[{at}] is {mine[at]}, not {words[at]}"
    return "nothing"


def _with(array: np.ndarray, slot: int, value: int) -> np.ndarray:
    array = array.copy()
    array.flat[slot] = value
    return array


def _without(case: Choices, part: slice | int, axis: int) -> Choices:
    ids, wild = (np.delete(array, part, axis=axis) for array in (case.ids, case.wild))
    return replace(case, ids=ids, wild=wild)


def _at(array: np.ndarray, dtype: type = np.int32) -> ctypes.c_void_p:
    assert array.dtype == dtype
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)
