"""The forward and backward kernels on the CPU: csrc/ as it stands, compiled by a C++ compiler.

Only the assembly (both ptx.cuh) and CUDA's own headers are replaced, by emulation/; what is
launched runs thread by thread as fibers, in an order drawn from a seed. emulation/grid.h says what
that shows and what it does not. Ranks of a group are streams whose grids run at the same time; what
the kernels that open a call would have left in their workspaces, this file writes.
"""

from __future__ import annotations

import ctypes
import pathlib
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent / "emulation"
KERNELS = (
    "device/plan.cu",
    "sm90/launch.cu",
    "sm90/forward.cu",
    "sm90/forward_ranks.cu",
    "sm90/backward.cu",
    "sm90/backward_ranks.cu",
)
SIZES = [
    "tokens",
    "choices",
    "experts",
    "rows",
    "hidden",
    "width",
    "shared_width",
    "ctas",
    "ahead",
    "fp32",
    "accumulate",
    "ranks",
    "rank",
    "most_tokens",
]
BUFFERS = [
    "row_start",
    "row_count",
    "row_TK",
    "slot_R",
    "prob_R",
    "faulty",
    "words",
    "x",
    "dy",
    "y",
    "dx",
    "x_rows",
    "dy_rows",
    "dx_rows",
    "gate_up",
    "activation",
    "d_gate_up",
    "shared_gate_up",
    "shared_activation",
    "shared_y",
    "shared_d_gate_up",
    "shared_dx",
    "parts",
    "d_prob_TK",
    "w1",
    "w2",
    "d_w1",
    "d_w2",
    "base",
]
# Statements of csrc/ and what a mistake would make of them; `planted` chooses one, or none.
FAULTS = {
    "a-tile-is-passed-before-the-one-that-is-owed": (
        "sm90/units.cuh",
        "if (owed) settle<0>();  // which knows its tile as the one before",
        "",
    ),
    "announced-before-it-is-in-memory": (
        "sm90/units.cuh",
        "bulk_wait<PENDING>();",
        "bulk_wait_read<PENDING>();",
    ),
    "a-unit-is-freed-before-it-has-been-read": (
        "sm90/units.cuh",
        "bulk_wait_read<kLag>();",
        "",
    ),
    "a-stage-is-freed-before-its-products": (
        "sm90/mainloop.cuh",
        "products_wait<1>();",
        "products_wait<2>();",
    ),
    "load-does-not-wait-for-a-free-stage": (
        "sm90/mainloop.cuh",
        "wait(storage.stage_empty[slot], stage_ring.phase() ^ 1, p.fault, Tag::kLoadStage);",
        "",
    ),
    "load-does-not-wait-for-its-rows": (
        "sm90/mainloop.cuh",
        "wait_count(input.word, input.count, p.fault, input.tag);",
        "",
    ),
    "rows-are-signalled-before-they-are-there": (
        "device/move.cuh",
        "bulk_wait<kSettle>();",
        "",
    ),
    "the-last-rows-are-signalled-before-they-are-there": (
        "device/move.cuh",
        "bulk_wait<0>();",
        "",
    ),
    "a-chunk-is-overwritten-before-it-has-left": (
        "device/move.cuh",
        "bulk_wait_read<kMoveSlots - kAhead - 1>();",
        "",
    ),
    "one-arrival-too-many": (
        "sm90/grouped_gemm.cuh",
        "barrier_init(s.unit_filled[i], 4);",
        "barrier_init(s.unit_filled[i], 3);",
    ),
    "combine-does-not-wait": (
        "sm90/direction.cuh",
        "await_block(p, row / kRowTile, Tag::kCombineRows, Tag::kCombineSums);",
        "",
    ),
    "a-push-does-not-wait": (
        "sm90/direction.cuh",
        "await_block(p, first / kRowTile, Tag::kPushRows, Tag::kPushSums);",
        "",
    ),
    "an-arrival-overtakes-its-row": (
        "sm90/direction.cuh",
        "if (lane == 0) mover.settle();",
        "",
    ),
}
ROW_TILE = 128
ELSEWHERE = -2
EPOCH = 4  # of the group's last call


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("c++")


def sources(folder: pathlib.Path) -> pathlib.Path:
    """A copy of csrc/ in that folder, made ready for a C++ compiler."""
    copy = folder / "csrc"
    shutil.copytree(ROOT / "csrc", copy, ignore=shutil.ignore_patterns("*.py", "*_ops.cpp"))
    shutil.copy(HERE / "device_ptx.cuh", copy / "device" / "ptx.cuh")
    shutil.copy(HERE / "sm90_ptx.cuh", copy / "sm90" / "ptx.cuh")
    shared = "extern __shared__ __align__(1024) uint8_t shared[];"
    replace(
        copy / "sm90" / "grouped_gemm.cuh", shared, "uint8_t* const shared = emulated::shared();"
    )
    for path in (*(copy / name for name in KERNELS), copy / "sm90" / "launch.cuh"):
        pattern = r"([\w<>]+)<<<(.*?),\s*(static_cast<cudaStream_t>\([^)]*\))>>>\("
        text = re.sub(pattern, r"emulated::launch(\1, \2, \3, ", path.read_text())
        assert "<<<" not in text, path
        path.write_text(text)
    for number, (name, right, wrong) in enumerate(FAULTS.values(), start=1):
        planted = f"if (emulated::planted == {number}) {{ {wrong} }} else {{ {right}\n }}"
        replace(copy / name, right, planted)
    return copy


def replace(path: pathlib.Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} has {text.count(old)} times: {old}"
    path.write_text(text.replace(old, new))


def build(folder: pathlib.Path) -> ctypes.CDLL:
    """The library, in an empty folder."""
    copy, tool = sources(folder), compiler()
    assert tool is not None
    command = [tool, "-std=c++20", "-O1", "-Wall", "-Wno-unknown-pragmas", "-Wno-psabi", "-fPIC"]
    command += [f"-I{HERE}", f"-I{folder}", "-xc++", "-c"]
    objects = [folder / f"{name.replace('/', '_')}.o" for name in (*KERNELS, "directions")]
    paths = [*(copy / name for name in KERNELS), HERE / "directions.cpp"]

    def compile_one(path: pathlib.Path, to: pathlib.Path) -> None:
        subprocess.run([*command, str(path), "-o", str(to)], check=True, timeout=300)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, paths, objects))
    library = folder / "emulated.so"
    subprocess.run([tool, "-shared", "-o", str(library), *map(str, objects)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.forward.restype = loaded.backward.restype = ctypes.c_char_p
    loaded.words.restype = loaded.switches.restype = ctypes.c_int64
    return loaded


@dataclass(kw_only=True)
class Rank:
    """A rank's share of a layer's call; buffers hold NaN until the kernels write them."""

    rank: int
    tokens: int
    rows: int
    buffers: dict[str, Tensor] = field(default_factory=dict)
    w1: list[Tensor] = field(default_factory=list)  # the shared expert's last
    w2: list[Tensor] = field(default_factory=list)
    d_w1: list[Tensor] = field(default_factory=list)
    d_w2: list[Tensor] = field(default_factory=list)


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

    def _rank(self, rank: int) -> Rank:
        local, ranks = self.experts // len(self.tokens), len(self.tokens)
        tokens, most = self.tokens[rank], max(self.tokens)
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
        slots += [-1] * (max(len(slots), ROW_TILE) - len(slots))
        it = Rank(rank=rank, tokens=tokens, rows=len(slots))
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
        b["prob_R"] = torch.tensor([probs[i] if i >= 0 else 0.0 for i in slots])
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
            "x_rows": (it.rows, hidden),
            "dy_rows": (it.rows, hidden),
            "dx_rows": (it.rows, hidden),
            "gate_up": (it.rows, 2 * width),
            "activation": (it.rows, width),
            "d_gate_up": (it.rows, 2 * width),
            "shared_gate_up": (tokens, 2 * of_shared),
            "shared_activation": (tokens, of_shared),
            "shared_y": (tokens, hidden * bool(of_shared)),
            "shared_d_gate_up": (tokens, 2 * of_shared),
            "shared_dx": (tokens, hidden * bool(of_shared)),
        }.items():
            b[name] = torch.full(size, torch.nan, dtype=torch.bfloat16)
        b["parts"] = torch.full((it.rows, width // 32), torch.nan)
        b["d_prob_TK"] = torch.full((tokens, self.choices), torch.nan)
        return it

    def run(self, library: ctypes.CDLL, direction: str, planted: str = "") -> str:
        """Why the direction stopped, or ""; planted: one of FAULTS."""
        library.plant(list(FAULTS).index(planted) + 1 if planted else 0)
        ranks, most = len(self.tokens), max(self.tokens)
        at = (ctypes.c_int64 * 8)()
        library.workspace(*map(ctypes.c_int64, (ranks, most, self.choices, self.hidden)), at)
        if not hasattr(self, "spaces"):
            self.spaces = [torch.zeros(at[0], dtype=torch.uint8) for _ in self.ranks]
            self.epoch = EPOCH
        self.epoch += 1
        for rank, space in zip(self.ranks, self.spaces, strict=True):
            space[at[1] : at[1] + 4].view(torch.int32)[0] = self.epoch
            for name, here in (("x", at[2 + self.epoch % 2]), ("dy", at[4 + self.epoch % 2])):
                data = rank.buffers[name].flatten().view(torch.uint8)
                space[here : here + len(data)] = data
        bases = _addresses(self.spaces)
        sizes, buffers, alive = [], [], []
        for rank in self.ranks:
            numbers = vars(self) | vars(rank) | {"ranks": ranks, "most_tokens": most}
            numbers["experts"] = self.experts // ranks
            sizes.append((ctypes.c_int64 * len(SIZES))(*(int(numbers[name]) for name in SIZES)))
            rank.buffers["words"] = torch.full(
                (library.words(sizes[-1]) + 4,), 0x7FFF7FFF, dtype=torch.int32
            )
            lists = {name: _addresses(getattr(rank, name)) for name in ("w1", "w2", "d_w1", "d_w2")}
            pointers = {name: t.data_ptr() or None for name, t in rank.buffers.items()}
            pointers |= {name: ctypes.addressof(array) for name, array in lists.items()}
            pointers["base"] = ctypes.addressof(bases)
            buffers.append((ctypes.c_void_p * len(BUFFERS))(*(pointers[n] for n in BUFFERS)))
            alive.append(lists)
        found: bytes = getattr(library, direction)(
            ctypes.c_int64(ranks),
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
