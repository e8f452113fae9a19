"""Random cases for the code that plans a layer, compiled for the host.

Cases are compared in batches, one call into C++ for each. A failing case is made small before it is
shown, together with the seed that draws it again:

    python -m tests.csrc [--cases N] [--seed S]    every subject; 1,000,000 cases take minutes
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

BATCH = 500


class Subject[Case](Protocol):
    """What is planned: cases, their oracle, and how a case becomes a smaller one."""

    def draw(self, random: np.random.Generator) -> Case:
        """Any case; the same state of `random` gives the same one."""

    def failures(self, cases: Sequence[Case]) -> list[tuple[int, str]]:
        """Index and words for each case in which the code and the oracle differ."""

    def smaller(self, case: Case) -> Iterable[Case]:
        """Cases with less in them, the smallest first; without end only if they shrink."""


def drawn[Case](subject: Subject[Case], seed: int, index: int) -> Case:
    """Case number `index` of a run: no other case has to be drawn for it."""
    return subject.draw(np.random.default_rng((seed, index)))


def fuzz[Case](
    subject: Subject[Case],
    cases: int,
    seed: int,
    passed: Callable[[int], object] = lambda cases: None,
) -> None:
    """Tells `passed` of each batch; raises AssertionError with seed, number and a small form of the
    first failing case."""
    for first in range(0, cases, BATCH):
        batch = [drawn(subject, seed, i) for i in range(first, min(first + BATCH, cases))]
        for index, words in subject.failures(batch)[:1]:
            small = shrunk(subject, batch[index])
            raise AssertionError(
                f"seed {seed}, case {first + index}: {words}; a small one: {small}, "
                f"{subject.failures([small])[0][1]}"
            )
        passed(len(batch))


def shrunk[Case](subject: Subject[Case], case: Case) -> Case:
    """The failing case with as much taken away as leaves it failing."""
    while (next_one := _smaller_and_failing(subject, case)) is not None:
        case = next_one
    return case


def _smaller_and_failing[Case](subject: Subject[Case], case: Case) -> Case | None:
    for candidates in itertools.batched(subject.smaller(case), 16):
        for index, _ in subject.failures(candidates)[:1]:
            return candidates[index]
    return None
