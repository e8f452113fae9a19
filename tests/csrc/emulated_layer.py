"""python -m tests.csrc.emulated_layer [--seconds S] [--seed N] [--record FILE]: drawn calls of the
layer, by one rank or several, through the emulated kernels (emulation.py) in drawn orders.

Exits with an AssertionError that names the seed of the first call that stops or is wrong.

Ranks of a group are streams that run at the same time, from publish and gather on. The schedule of
one rank is made here; that of several by their kernels, and compared with what is made here.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import pathlib
import random
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.csrc.emulation import BUFFERS, PLANTED, SIZES, build
from tests.oracle import solve

ROW_TILE = 128
ELSEWHERE = -2
EPOCH = -3  # of the group's last call: the next but one is past 2^32
LIMIT = 2e-2
POISON = 0x7FFF7FFF


@dataclass(kw_only=True)
class Rank:
    """A rank's share of a layer's call; buffers hold NaN until the kernels write them."""

    rank: int
    tokens: int
    rows: int
    capacity: int
    most: int  # rows in the schedule
    layer: int = 7  # the same on all ranks, or the call is refused
    buffers: dict[str, Tensor] = field(default_factory=dict)
    w1: list[Tensor] = field(default_factory=list)  # the shared expert's last
    w2: list[Tensor] = field(default_factory=list)
    d_w1: list[Tensor] = field(default_factory=list)
    d_w2: list[Tensor] = field(default_factory=list)
    schedule: dict[str, Tensor] = field(default_factory=dict)  # that several ranks should find


@dataclass(kw_only=True)
class Layer:
    """A layer's call by one rank or several, drawn from a seed.

    tokens: of each rank. expert_TK: of all tokens, rank by rank; -1: no choice. The experts are
    spread evenly over the ranks; every rank has the whole shared expert.
    """

    tokens: tuple[int, ...]
    hidden: int
    width: int
    shared_width: int
    experts: int  # of all ranks
    expert_TK: Tensor
    seed: int = 0  # of all values
    order: int = 0  # and of who goes on when
    fp32: bool = True
    accumulate: bool = True
    ctas: int = 2
    started: int = 0
    ahead: int = 0
    movers: int = 0  # CTAs that move rows of several ranks; 0: all
    most: int = 0  # tokens that a rank may have; 0: what one has
    tiles: int = 0  # row tiles of R; 0: what the rank with the most rows needs
    spaces: list[Tensor] = field(default_factory=list)  # the ranks' workspaces

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=draw)

        total, hidden = sum(self.tokens), self.hidden
        self.choices = self.expert_TK.shape[1]
        self.x, self.dy = normal(total, hidden).bfloat16(), normal(total, hidden).bfloat16()
        self.prob_TK = torch.rand(total, self.choices, generator=draw)
        widths = [self.width] * self.experts + [self.shared_width] * (self.shared_width > 0)
        self.w1 = [(normal(2 * w, hidden) / hidden**0.5).bfloat16() for w in widths]
        self.w2 = [(normal(hidden, w) / w**0.5).bfloat16() for w in widths]
        kind = torch.float32 if self.fp32 else torch.bfloat16
        self.before = [normal(*w.shape).to(kind) for w in (*self.w1, *self.w2)]
        self.ranks = [self._rank(rank) for rank in range(len(self.tokens))]

    def _blocks_of(self) -> Tensor:
        """Row tiles of each rank's experts, [P, L]."""
        chosen = self.expert_TK[self.expert_TK >= 0]
        blocks = (chosen.bincount(minlength=self.experts) + ROW_TILE - 1) // ROW_TILE
        return blocks.view(len(self.tokens), -1)

    def most_rows(self) -> int:
        """What the rank with the most rows needs."""
        return int(self._blocks_of().sum(1).max().clamp(min=1)) * ROW_TILE

    def budget(self) -> int:
        """R, the same on all ranks."""
        return self.tiles * ROW_TILE or self.most_rows()

    def capacity(self) -> int:
        """What buffers hold: R, and at least the rows of an expert."""
        return max(int(self._blocks_of().max()) * ROW_TILE, self.budget())

    def _rank(self, rank: int) -> Rank:
        local, ranks = self.experts // len(self.tokens), len(self.tokens)
        tokens, most = self.tokens[rank], self.most or max(self.tokens)
        first = sum(self.tokens[:rank])
        mine = range(rank * local, (rank + 1) * local)
        # The number of a slot: rank, token of Tmax, choice.
        number = [
            (p * most + t) * self.choices + k
            for p in range(ranks)
            for t in range(self.tokens[p])
            for k in range(self.choices)
        ]
        start, slots, row_of = [0], [], {}
        flat, probs = self.expert_TK.flatten().tolist(), self.prob_TK.flatten().tolist()
        for e in mine:
            here = [i for i, expert in enumerate(flat) if expert == e]
            row_of |= {i: start[-1] + n for n, i in enumerate(here)}
            slots += [*here, *[-1] * (-len(here) % ROW_TILE)]
            start.append(len(slots))
        if start[-1] > self.budget():  # in laps: all rows come home
            row_of = dict.fromkeys(row_of, ELSEWHERE)
        slots += [-1] * (self.most_rows() - len(slots))
        it = Rank(
            rank=rank, tokens=tokens, rows=self.budget(), capacity=self.capacity(), most=len(slots)
        )
        own = range(first * self.choices, (first + tokens) * self.choices)
        words = {
            "row_start": start,
            "row_count": [flat.count(e) for e in mine],
            "row_TK": [row_of.get(i, -1 if flat[i] < 0 else ELSEWHERE) for i in own] + [-1],
            "slot_R": [number[i] if i >= 0 else -1 for i in slots],
            "faulty": [0],
        }
        b = it.buffers
        b |= {name: torch.tensor(values, dtype=torch.int32) for name, values in words.items()}
        b["census"] = torch.tensor(census([i for i in own if flat[i] >= 0]), dtype=torch.int32)
        b["prob_R"] = torch.tensor([probs[i] if i >= 0 else 0.0 for i in slots])
        if ranks > 1:
            self._leave_to_gather(it, first, start[-1])
        b["x"] = self.x[first : first + tokens].clone()
        b["dy"] = self.dy[first : first + tokens].clone()
        shared = [self.experts] * (self.shared_width > 0)
        for e in (*mine, *shared):
            it.w1.append(self.w1[e])
            it.w2.append(self.w2[e])
            it.d_w1.append(self.before[e].clone())
            it.d_w2.append(self.before[len(self.w1) + e].clone())
        width, of_shared, hidden = self.width, self.shared_width, self.hidden
        for name, size in {
            "y": (tokens, hidden),
            "dx": (tokens, hidden),
            "x_rows": (it.capacity, hidden),
            "dy_rows": (it.capacity, hidden),
            "dx_rows": (it.capacity, hidden),
            "gate_up": (it.rows, 2 * width),
            "activation": (it.capacity, width),
            "d_gate_up": (it.capacity, 2 * width),
            "shared_gate_up": (tokens, 2 * of_shared),
            "shared_activation": (tokens, of_shared),
            "shared_y": (tokens, hidden * bool(of_shared)),
            "shared_d_gate_up": (tokens, 2 * of_shared),
            "shared_dx": (tokens, hidden * bool(of_shared)),
        }.items():
            b[name] = torch.full(size, torch.nan, dtype=torch.bfloat16)
        b["parts"] = torch.full((it.capacity, width // 32), torch.nan)
        b["d_prob_TK"] = torch.full((tokens, self.choices), torch.nan)
        return it

    def _leave_to_gather(self, it: Rank, first: int, end: int) -> None:
        b, most = it.buffers, len(self.tokens) * (self.most or max(self.tokens)) * self.choices
        names = ("row_start", "row_count", "row_TK", "slot_R", "prob_R", "faulty")
        it.schedule = {name: b[name].clone() for name in names}
        b["census"].fill_(POISON)
        for name, kept in (("slot_R", end), ("prob_R", end), ("row_TK", it.tokens * self.choices)):
            it.schedule[name] = it.schedule[name][:kept]
        for name in names:
            b[name].view(torch.int32).fill_(POISON)
        own = slice(first, first + it.tokens)
        b["expert_TK"] = self.expert_TK[own].int().contiguous()
        b["prob_TK"] = self.prob_TK[own].contiguous()
        for name, size in {
            "gathered_expert": most,
            "gathered_prob": most,
            "counts": (most + 2) * (self.experts + 1),
            "few": 6,
            "admitted_start": self.experts + 1,
            "admitted_count": self.experts,
        }.items():
            b[name] = torch.full((size,), POISON, dtype=torch.int32)

    def schedule_fault(self) -> str:
        """How the ranks' kernels' schedule differs from what it should be, or ""."""
        for it in self.ranks:
            for name, right in it.schedule.items():
                if not torch.equal(it.buffers[name][: len(right)], right):
                    return f"{name} of rank {it.rank} is {it.buffers[name]}, not {right}"
        return ""

    def run(
        self, library: ctypes.CDLL, direction: str, planted: str = "", absent: int | None = None
    ) -> str:
        """Why the direction stopped, or ""; planted: one of PLANTED; absent: a rank that makes no
        call."""
        library.plant(PLANTED.index(planted) + 1 if planted else 0)
        ranks, most = len(self.tokens), self.most or max(self.tokens)
        numbers = (ctypes.c_int64(n) for n in (ranks, most, self.choices, self.hidden))
        if not self.spaces:
            size = library.workspace_bytes(*numbers)
            self.spaces += [torch.zeros(size, dtype=torch.uint8) for _ in self.ranks]
            for space in self.spaces:
                space[:4].view(torch.int32)[0] = EPOCH
        bases = _addresses(self.spaces)
        sizes, buffers, alive = [], [], []
        present = [rank for rank in self.ranks if rank.rank != absent]
        for rank in present:
            of = vars(self) | vars(rank) | {"ranks": ranks, "most_tokens": most}
            of["experts"] = self.experts // ranks
            sizes.append((ctypes.c_int64 * len(SIZES))(*(int(of[name]) for name in SIZES)))
            rank.buffers["words"] = torch.full(
                (library.words(sizes[-1]) + 4,), POISON, dtype=torch.int32
            )
            lists = {name: _addresses(getattr(rank, name)) for name in ("w1", "w2", "d_w1", "d_w2")}
            pointers = {name: t.data_ptr() or None for name, t in rank.buffers.items()}
            pointers |= {name: ctypes.addressof(array) for name, array in lists.items()}
            pointers["base"] = ctypes.addressof(bases)
            buffers.append((ctypes.c_void_p * len(BUFFERS))(*map(pointers.get, BUFFERS)))
            alive.append(lists)
        found: bytes = getattr(library, direction)(
            ctypes.c_int64(len(present)),
            (ctypes.c_void_p * ranks)(*map(ctypes.addressof, sizes)),
            (ctypes.c_void_p * ranks)(*map(ctypes.addressof, buffers)),
            ctypes.c_int64(self.order),
            ctypes.c_int64(self.started),
        )
        return found.decode()

    def of_all(self, name: str) -> Tensor:
        """A result of all tokens."""
        return torch.cat([rank.buffers[name] for rank in self.ranks])

    def gradients(self) -> list[Tensor]:
        """What all experts' gradients hold: w1's, then w2's; the shared expert's are summed."""
        found = []
        for name, first in (("d_w1", 0), ("d_w2", len(self.w1))):
            local = self.experts // len(self.ranks)
            found += [g for rank in self.ranks for g in getattr(rank, name)[:local]]
            if self.shared_width > 0:
                before = self.before[first + self.experts].double() * self.accumulate
                # A rank without tokens has no shared expert, and leaves its gradient as it is.
                busy = [rank for rank in self.ranks if rank.tokens > 0]
                shares = [getattr(rank, name)[-1] - before for rank in busy]
                found.append(before + torch.stack(shares).sum(0))
        return found


def _addresses(tensors: list[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))


def drawn(seed: int, ranks: int = 1) -> Layer:
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    experts = ranks * draw.choice([1, 1, 2, 3])
    choices = draw.randint(1, min(experts, 3))
    tokens = tuple(draw.choice([0, 1, 7, 20, 130]) for _ in range(ranks))
    tokens = tokens if any(tokens) else (9,) * ranks
    expert_TK = torch.rand(sum(tokens), experts, generator=generator).argsort(dim=1)[:, :choices]
    expert_TK[torch.rand(expert_TK.shape, generator=generator) < draw.choice([0.0, 0.2])] = -1
    return Layer(
        tokens=tokens,
        hidden=draw.choice([64, 64, 128, 256]),
        width=draw.choice([64, 64, 128]),
        shared_width=draw.choice([0, 0, 64]),
        experts=experts,
        expert_TK=expert_TK,
        seed=seed,
        order=seed,
        fp32=draw.random() < 0.5,
        accumulate=draw.random() < 0.5,
        ctas=draw.choice([1, 2, 3]),
        ahead=draw.choice([0, 1]),
        tiles=draw.choice([0, 1, 2]) if ranks > 1 else 0,
        movers=draw.choice([0, 1]),
    )


def census(slots: list[int]) -> list[int]:
    """Of one rank, which has all slots that have a row."""
    total = sum(slots) + len(slots)
    return [len(slots), total, total, len(slots)]


def found_by_the_kernels(kernels: ctypes.CDLL) -> tuple[int, ...]:
    """kind, rank, value, wanted of an ExchangeFault since the last call of this, or ()."""
    found = (ctypes.c_int64 * 4)()
    kernels.exchange_fault(found)
    return tuple(found) if found[0] else ()


def trouble(it: Layer, kernels: ctypes.CDLL, planted: str = "") -> str:
    """Why a direction stopped, or what differs from the float64 oracle; "" if nothing does."""
    for direction in ("forward", "backward"):
        if why := it.run(kernels, direction, planted):
            return f"{direction}: {why}"
        if why := it.schedule_fault() or found_by_the_kernels(kernels):
            return f"{direction}: {why}"
    answer = solve(it.x, it.expert_TK, it.prob_TK, it.dy, it.w1, it.w2, it.experts)
    found = {name: it.of_all(name).double() for name in ("y", "dx", "d_prob_TK")}
    wanted = {"y": answer.y_TH, "dx": answer.dx_TH, "d_prob_TK": answer.dprob_TK}
    gradients = zip(it.gradients(), it.before, (*answer.dw1, *answer.dw2), strict=True)
    for i, (gradient, before, added) in enumerate(gradients):
        found[f"gradient {i}"] = gradient.double()
        wanted[f"gradient {i}"] = added + (before.double() if it.accumulate else 0.0)
    for name, right in wanted.items():
        # The H terms of a probability's gradient may nearly cancel.
        least = (right.numel() * it.hidden) ** 0.5 / 4 if name == "d_prob_TK" else 1e-6
        error = (found[name] - right).norm() / right.norm().clamp(min=least)
        if not error < LIMIT:  # NaN too
            return f"{name}: off by {error}"
    return ""


def main(tokens: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(31), help="of the first call")
    parser.add_argument("--record", type=pathlib.Path, metavar="FILE", help="add a JSON line")
    options = parser.parse_args(tokens)
    with tempfile.TemporaryDirectory() as folder:
        kernels = build(pathlib.Path(folder))
        began, calls, switches = time.monotonic(), 0, 0
        while time.monotonic() - began < options.seconds:
            for ranks in (1, 2, 4):
                seed = options.seed + calls
                assert (said := trouble(drawn(seed, ranks), kernels)) == "", (seed, ranks, said)
                calls, switches = calls + 1, switches + kernels.switches()
            print(f"\r{calls} layers, seeds from {options.seed}", end="", flush=True)
    print()
    if options.record is not None:
        record = {
            "what": "layers forward and backward, kernels emulated thread by thread on the CPU",
            "layers": calls,
            "ranks": [1, 2, 4],
            "seed": options.seed,
            "failed": 0,
            "turns_of_the_last_grids": switches,
            "seconds": round(time.monotonic() - began),
            "date": time.strftime("%Y-%m-%d"),
        }
        with options.record.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
