"""python -m tests.csrc.protocol: the protocol between ranks under every order and drawn ones.

The model is protocol_model.h; this file compiles it with the kernels' own headers and names what it
is run on. Exits with an AssertionError at the first schedule that breaks a property.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import pathlib
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = (
    "csrc/arguments.h",
    "csrc/workspace.h",
    "csrc/device/schedule.cuh",
    "csrc/device/plan.cuh",
    "tests/csrc/protocol_model.h",
    "tests/csrc/protocol_state.h",
    "tests/csrc/protocol_moves.h",
    "tests/csrc/protocol_machine.h",
    "tests/csrc/protocol_host.cpp",
)


@dataclass(frozen=True, kw_only=True)
class Small:
    """A problem whose every order of steps is visited; the order of protocol_host.cpp's words.

    backward: a bit for each call. tokens: of each rank, call after call. dies: a rank that stops at
    any step, or -1. kept and capacity: row blocks, one for each expert with rows, that the first
    lap holds, and a later one. frozen: nobody wants the experts' weight gradients. Token t of rank
    r has experts r + 1 + t and on.
    """

    ranks: int = 2
    local: int = 1
    choices: int = 2
    most: int = 2
    ctas: int = 1
    slots: int = 1
    depth: int = 1
    held: int = 0
    tiles: int = 1
    ahead: int = 1
    kept: int = 99
    capacity: int = 99
    frozen: bool = False
    seed: int = 0
    calls: int = 2
    backward: int = 0
    dies: int = -1
    epoch: int = 0
    tokens: tuple[int, ...] = field(default=())

    def words(self) -> list[int]:
        *numbers, tokens = astuple(self)
        return [*numbers, *(tokens or (1,) * (self.ranks * self.calls))]


_SAY_SECONDS = 30  # between two lines of progress; drawing makes about 1,300 schedules a second
# Rank 1 has both experts of its one token, which take their turns.
_LAPS = Small(
    local=2, most=1, kept=1, capacity=1, ctas=2, slots=2, calls=1, backward=1, tokens=(0, 1)
)
# In seconds.
SMALL = {
    "three-calls": Small(calls=3),
    "forward-backward": Small(calls=4, backward=0b1010),
    "wrap-around": Small(calls=4, backward=0b0010, epoch=-3),
    "one-slot-for-two-ctas": Small(calls=3, ctas=2),
    "two-ctas": Small(choices=1, ctas=2, slots=2, calls=1),
    "two-experts-a-rank": Small(local=2, calls=3),
    "ragged": Small(tokens=(0, 2, 2, 1)),
    "moves-under-way-and-held": Small(depth=2, held=2, local=2, calls=3),
    "two-column-tiles": Small(tiles=2),
    "a-rank-stops": Small(calls=3, dies=1),
    "three-ranks": Small(ranks=3, calls=1),
    "laps": Small(local=2, kept=1, capacity=1, backward=0b10),
    "laps-after-none-is-kept": Small(local=2, kept=0, capacity=1, calls=3, backward=0b110),
    "laps-of-two-ctas": replace(_LAPS, backward=0),
    "laps-of-two-ctas-backward": _LAPS,
    "laps-of-frozen-weights": replace(_LAPS, frozen=True),
}
# In minutes.
LARGE = {
    "two-ctas-both-choices": Small(ctas=2, slots=2, calls=1),
    "two-ctas-two-calls": Small(ctas=2, slots=2),
    "two-ctas-backward": Small(ctas=2, slots=2, calls=1, backward=1),
    "two-ctas-a-rank-stops": Small(ctas=2, slots=2, calls=1, dies=0),
    "two-ctas-two-experts": Small(ctas=2, slots=2, local=2, calls=1),
    "three-ranks-three-calls": Small(ranks=3, calls=3),
    "laps-of-two-ctas-both-ranks": replace(_LAPS, backward=0, tokens=(1, 1)),
    "laps-of-two-ctas-after-none": replace(_LAPS, kept=0),
}


@dataclass(frozen=True, kw_only=True)
class Explored:
    states: int
    steps: int
    complete: bool
    fault: str


class Protocol:
    """The model as a library; `old` becomes `new` in the header `edited`."""

    def __init__(
        self,
        tree: pathlib.Path,
        edited: str = "",
        old: str = "",
        new: str = "",
        optimise: str = "-O1",
    ) -> None:
        for source in SOURCES:
            text = (ROOT / source).read_text()
            if edited and source.endswith(edited):
                assert text.count(old) == 1, f"the seed no longer fits: {old}"
                text = text.replace(old, new)
            (tree / source).parent.mkdir(parents=True, exist_ok=True)
            (tree / source).write_text(text)
        compiler = shutil.which("g++") or shutil.which("c++")
        assert compiler is not None, "needs a C++ compiler, found none"
        command = [compiler, "-std=c++20", optimise, "-Wall", "-Werror", "-shared", "-fPIC"]
        command += [str(tree / SOURCES[-1]), "-o", str(tree / "protocol.so")]
        subprocess.run(command, check=True, timeout=240)
        self.library = ctypes.CDLL(str(tree / "protocol.so"))
        self.library.wander_many.restype = ctypes.c_int64

    def explore(self, small: Small, most: int = 20_000_000) -> Explored:
        """Every order of steps, up to `most` states."""
        words = small.words()
        out = (ctypes.c_int64 * 3)()
        fault = ctypes.create_string_buffer(500)
        given = (ctypes.c_int32 * len(words))(*words)
        self.library.explore_all(given, ctypes.c_int64(most), out, fault, len(fault))
        return Explored(
            states=out[0], steps=out[1], complete=bool(out[2]), fault=fault.value.decode()
        )

    def wander(
        self, random_seed: int, schedules: int, *, first: int = 0, seed: int = 0
    ) -> tuple[int, int, str]:
        """(schedules that held, their steps, the fault of the next one)."""
        steps, fault = ctypes.c_int64(), ctypes.create_string_buffer(500)
        held = self.library.wander_many(
            ctypes.c_uint64(random_seed),
            ctypes.c_int64(first),
            ctypes.c_int64(schedules),
            seed,
            ctypes.byref(steps),
            fault,
            len(fault),
        )
        return held, steps.value, fault.value.decode()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedules", type=int, default=100_000, help="drawn ones; 0: none")
    parser.add_argument("--seed", type=int, default=None, help="default: another in every run")
    parser.add_argument("--large", action="store_true", help="the large problems, in minutes each")
    parser.add_argument("--record", type=pathlib.Path, metavar="FILE", help="add lines of JSON")
    options = parser.parse_args(arguments)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        protocol = Protocol(pathlib.Path(folder), optimise="-O2")
        for name, small in {**SMALL, **(LARGE if options.large else {})}.items():
            began = time.monotonic()
            found = protocol.explore(small)
            print(f"{name}: {found}, {time.monotonic() - began:.0f} s", flush=True)
            assert not found.fault, f"{name}: {found.fault}"
            lines.append(
                {"what": f"every order of {name}", "states": found.states, "steps": found.steps}
                | {"complete": found.complete}
            )
        began, steps = time.monotonic(), 0
        said = began
        for first in range(0, options.schedules, 1000):
            count = min(1000, options.schedules - first)
            held, more, fault = protocol.wander(seed, count, first=first)
            steps += more
            assert not fault, f"schedule {first + held} of seed {seed}: {fault}"
            if time.monotonic() - said > _SAY_SECONDS:
                said = time.monotonic()
                print(f"{first + held} schedules of seed {seed}, {said - began:.0f} s", flush=True)
        print(f"{options.schedules} schedules of seed {seed}, {steps} steps: no fault", flush=True)
        lines.append(
            {"what": "drawn orders of the protocol, up to 8 ranks", "schedules": options.schedules}
            | {"failed": 0, "seed": seed, "steps": steps}
            | {"seconds": round(time.monotonic() - began)}
        )
    if options.record is not None:
        command = " ".join(["python -m tests.csrc.protocol", *(arguments or sys.argv[1:])])
        with options.record.open("a") as file:
            for line in lines:
                file.write(json.dumps(line | {"command": command}) + "\n")


if __name__ == "__main__":
    main()
