"""Shapes of a direction for fuzz.py: plan.cuh on the host beside a sort of all its tiles."""

from __future__ import annotations

import ctypes
import random as standard
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from tests.csrc import test_plan
from tests.csrc.test_plan import FIELDS, Pass, Shape

NAMES = ("expert", "pass", "m", "n", "row", "rows", "depth", "fault", "idle", "lap", "base")
Ints = np.ndarray  # of int32


class Tiles(test_plan.Planner):
    """The library of plan_host.cpp; with an edit of plan.cuh, see test_plan.Planner."""

    def draw(self, random: np.random.Generator) -> Shape:
        """test_plan's shapes with fewer experts, and now and then rows outside the contract."""
        draw = standard.Random(int(random.integers(2**63)))
        shape = test_plan.drawn(draw, most=draw.choice((3, 12, 12, 40)))
        if draw.random() < 0.15:
            expert = draw.randrange(shape.experts)
            count, start = [*shape.count], [*shape.start]
            if draw.random() < 0.5:
                count[expert] = draw.choice((-1, start[expert + 1] - start[expert] + 1))
            else:
                start[expert + 1 :] = [s + draw.choice((1, 64)) for s in start[expert + 1 :]]
                start = sorted(start)
            shape = replace(shape, count=count, start=start, capacity=0)
        return shape

    def failures(self, cases: Sequence[Shape]) -> list[tuple[int, str]]:
        wanted = [expected(case) for case in cases]
        table = [
            [*case.words(), case.experts, 1 + index % 5, tiles.size]
            for index, (case, tiles) in enumerate(zip(cases, wanted, strict=True))
        ]
        rows = [word for case in cases for word in (*case.start, *case.count)]
        arrays = [np.array(words, np.int32).ravel() for words in (table, rows)]
        out = np.full(sum(tiles.size for tiles in wanted), -99, np.int32)
        at = [array.ctypes.data_as(ctypes.c_void_p) for array in (*arrays, out)]
        self.library.plan_cases(at[0], len(cases), at[1], at[2])
        ends = np.cumsum([tiles.size for tiles in wanted])
        failing = []
        for index, (found, tiles) in enumerate(zip(np.split(out, ends[:-1]), wanted, strict=True)):
            if not np.array_equal(found.reshape(-1, FIELDS), tiles):
                failing.append((index, _difference(found.reshape(-1, FIELDS), tiles)))
        return failing

    def smaller(self, case: Shape) -> Iterator[Shape]:
        for keep in (case.experts // 2, case.experts - 1):
            if keep:
                yield replace(case, count=case.count[:keep], start=case.start[: keep + 1])
                yield replace(case, count=case.count[-keep:], start=case.start[-keep - 1 :])
        for expert in range(case.experts):
            if case.count[expert] > 0:
                count = [*case.count]
                count[expert] //= 2
                yield replace(case, count=count)
        for name in ("ahead", "tokens", "combine_tiles"):
            if getattr(case, name) > 1:
                yield replace(case, **{name: getattr(case, name) // 2})
        for name in ("routed", "shared"):
            for index, one in enumerate(passes := getattr(case, name)):
                less: list[Pass] = [
                    (*one[:i], one[i] // 2, *one[i + 1 :]) for i in range(3) if one[i] > 1
                ]
                for smaller in less:
                    yield replace(case, **{name: [*passes[:index], smaller, *passes[index + 1 :]]})


def expected(s: Shape) -> Ints:
    """int32 [tickets, 11]: every tile of every pass and expert, sorted by what the head of plan.cuh
    says of the order. Inside a pass of an expert: groups of 16 in m, then n, then m."""
    segments = [((s.experts, 4, 0, 0), s.experts, s.passes, s.combine_tiles, 1, *[0] * 7)]
    shared = range(s.experts, s.experts + 1)
    for lap, expert, first, last in [
        *((lap, e, of.start, of.stop) for lap, of in enumerate(s.laps()) for e in of),
        (0, s.experts, s.experts, s.experts),
    ]:
        start, count = (0, s.tokens) if expert in shared else (s.start[expert], s.count[expert])
        end = -(-s.tokens // 128) * 128 if expert in shared else s.start[expert + 1]
        fault = start % 128 or count < 0 or end - start != -(-count // 128) * 128
        ahead, base = min(s.ahead, last - first), 0 if expert in shared else s.start[first]
        passes = [*enumerate((s.shared if expert in shared else s.routed)[: s.passes])]
        if lap > 0 and s.again[1]:
            passes.insert(0, (2 * s.passes + 1, s.again))
        for place, (which, (m, n, depth)) in enumerate(passes):
            if expert in shared:
                when = (lap, 2 if place else 0, place, 0)
            elif place:
                when = (lap, 3, expert - first, place)
            else:
                early = expert - first < ahead
                when = (lap, 1 if early else 3, expert - first - (0 if early else ahead), 0)
            weight = m > 0
            tall = (m if count > 0 or s.keep_empty else 0) if weight else (end - start) // 128
            deep = max(-(-count // 64), 1) if weight else depth
            number = which + (s.passes + 1 if expert in shared else 0)
            form = (start - base, count, deep, weight, bool(fault), lap, base)
            segments.append((when, expert, number, tall, n, *form))
    segments.sort()
    of = np.array([segment[1:] for segment in segments])
    each = of[:, 2] * of[:, 3]
    inside = np.arange(each.sum()) - np.repeat(each.cumsum() - each, each)
    segment = np.repeat(np.arange(len(of)), each)
    expert, number, _, wide, start, count, deep, weight, fault, lap, base = of[segment].T
    m, n = inside // wide, inside % wide
    order = np.lexsort((m, n, m // 16, segment))
    if s.ranks > 1:
        tall = of[:, 2][segment]
        moved = (m + -(-tall * (s.rank + 1) // s.ranks)) % tall
        m = np.where(number == 1, moved, m)
    combine = number == s.passes
    row = np.where(weight, start, start + 128 * m)
    rows = np.where(weight, count, np.clip(count - 128 * m, 0, 128))
    row, rows, deep = (np.where(combine | (fault > 0), 0, v) for v in (row, rows, deep))
    m, n = (np.where(fault, 0, v) for v in (m, n))
    idle = np.zeros_like(m)
    tiles = np.stack([expert, number, m, n, row, rows, deep, fault, idle, lap, base], axis=1)
    return tiles[order].astype(np.int32)


def _difference(found: Ints, wanted: Ints) -> str:
    if found[0, 0] == -9:
        return "another number of tickets"
    ticket, field = np.argwhere(found != wanted)[0]
    mine, right = found[ticket, field], wanted[ticket, field]
    return f"{NAMES[field]} of ticket {ticket} is {mine}, not {right}"
