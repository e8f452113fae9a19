"""The forward and backward kernels on the CPU: csrc/ as it stands, compiled by a C++ compiler.

Only the assembly (both ptx.cuh) and CUDA's own headers are replaced, by emulation/; what is
launched runs thread by thread as fibers, in an order drawn from a seed. emulation/grid.h says what
that shows and what it does not.
"""

from __future__ import annotations

import ctypes
import pathlib
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent / "emulation"
KERNELS = (
    "device/layer.cu",
    "device/exchange.cu",
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
    "layer",
    "most",
    "capacity",
    "movers",
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
    "expert_TK",
    "prob_TK",
    "gathered_expert",
    "gathered_prob",
    "counts",
    "few",
    "admitted_start",
    "admitted_count",
    "census",
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
        "barrier_init(s.unit_filled[i], 4 * kWarpArrivals);",
        "barrier_init(s.unit_filled[i], 3 * kWarpArrivals);",
    ),
    "combine-does-not-wait": (
        "sm90/direction.cuh",
        "await_block(p, row / kRowTile, Tag::kCombineRows, Tag::kCombineSums);",
        "",
    ),
    "combine-adds-a-chunk-before-it-is-there": (
        "device/combine.cuh",
        "wait(storage.full[slot], used / kCombineSlots & 1, fault, Tag::kCombineChunk);",
        "",
    ),
    "combine-takes-the-stages-before-the-last-product": (
        "sm90/grouped_gemm.cuh",
        "if (i == 0) epilogue.await_turn(tiles.ring.slot() / 2);",
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
    "a-lap-does-not-wait-for-the-one-before": (
        "sm90/direction.cuh",
        "await_lap(p, storage.lap.number - 1);",
        "",
    ),
    "fetch-does-not-wait-for-what-is-computed-again": (
        "sm90/units.cuh",
        "wait_count(input.word, input.count, p.fault, input.tag);",
        "",
    ),
}
_MOVED = "mover.copy(from, to, bytes);"
_SENT = "mover.copy(from + static_cast<int64_t>(i) * bytes, there, bytes);"
_ADDED = """sum[j].add(load_shared_16(ring + slot * kCombineBytes + 16 * piece));
        added += i < a.choices ? 1 : 0;"""
# Rows that are lost or doubled: of slot 3, of those sent home at once the second, of token 0 the
# first. Only the counts of device/census.cuh must show it.
LOST = {
    "a-row-is-not-moved": ("sm90/direction.cuh", _MOVED, f"if (slot != 3) {_MOVED}"),
    "a-row-is-moved-twice": (
        "sm90/direction.cuh",
        _MOVED,
        f"{_MOVED} if (slot == 3) {_MOVED}",
    ),
    "a-row-is-not-sent-home": ("sm90/direction.cuh", _SENT, f"if (first + i != 1) {_SENT}"),
    "a-row-is-sent-home-twice": (
        "sm90/direction.cuh",
        _SENT,
        f"{_SENT} if (first + i == 1) {_SENT}",
    ),
    "a-row-is-not-combined": (
        "device/combine.cuh",
        _ADDED,
        f"if (t != 0 || i != 0) {{ {_ADDED} }}",
    ),
    "a-row-is-combined-twice": (
        "device/combine.cuh",
        _ADDED,
        f"{_ADDED} if (t == 0 && i == 0) {{ {_ADDED} }}",
    ),
}
# A rank that stops where it should tell that a row is home, and has said so.
STOPS = {
    "a-rank-stops-before-an-arrival": (
        "sm90/direction.cuh",
        "send_arrival(reinterpret_cast<Arrival*>(space + group.at.arrived) + inside, "
        "epoch(p), sum);",
        "store_relaxed_system(&reinterpret_cast<Control*>(space + group.at.control)->abort, "
        "uint32_t(Tag::kCombineHome) << 24 | group.rank << 12 | 5);",
    )
}
PLANTED = (*FAULTS, *LOST, *STOPS)


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("c++")


def sources(folder: pathlib.Path) -> pathlib.Path:
    """A copy of csrc/ in that folder, made ready for a C++ compiler."""
    copy = folder / "csrc"
    shutil.copytree(ROOT / "csrc", copy, ignore=shutil.ignore_patterns("*.py", "*_ops.cpp"))
    shutil.copy(HERE / "device_ptx.cuh", copy / "device" / "ptx.cuh")
    shutil.copy(HERE / "sm90_ptx.cuh", copy / "sm90" / "ptx.cuh")
    for path in (*(copy / name for name in KERNELS), *(copy / "sm90").glob("*.cuh")):
        path.write_text(_for_the_host(path.read_text()))
    places: dict[tuple[str, str], str] = {}
    for number, (name, right, wrong) in enumerate((FAULTS | LOST | STOPS).values(), start=1):
        places.setdefault((name, right), "")
        places[name, right] += f"if (emulated::planted == {number}) {{ {wrong} }} else "
    for (name, right), planted in places.items():
        replace(copy / name, right, f"{planted}{{ {right}\n }}")
    return copy


def _for_the_host(text: str) -> str:
    """What no header can give: launches, and variables in shared memory."""
    stream = r"(static_cast<cudaStream_t>\([^)]*\)|stream)"
    launch = rf"([\w<>]+)<<<(.*?),\s*{stream}>>>\("
    text = re.sub(launch, r"emulated::launch(\1, \2, \3, ", text, flags=re.DOTALL)
    room = r"extern __shared__ (?:__align__\(1024\) )?(\w+) (\w+)\[\];"
    text = re.sub(room, r"auto* const \2 = reinterpret_cast<\1*>(emulated::shared());", text)
    one = r"__shared__ (\w+) (\w+)((?:\[\w+\])*);"
    text = re.sub(one, r'auto& \2 = emulated::shared_object<\1\3>("\2");', text)
    assert "<<<" not in text
    assert "__shared__" not in text
    return text


def replace(path: pathlib.Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} has {text.count(old)} times: {old}"
    path.write_text(text.replace(old, new))


def build(folder: pathlib.Path) -> ctypes.CDLL:
    """The library, in an empty folder."""
    copy, tool = sources(folder), compiler()
    assert tool is not None
    command = [
        tool,
        "-std=c++20",
        "-O1",
        "-Wall",
        "-Wno-unknown-pragmas",
        "-Wno-psabi",
        "-Wno-sign-compare",
        "-fPIC",
    ]
    command += [
        f"-I{HERE}",
        f"-I{folder}",
        "-D__CUDACC__",
        "-include",
        "cuda_runtime.h",
        "-xc++",
        "-c",
    ]
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
