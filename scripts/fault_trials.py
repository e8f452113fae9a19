"""Let one rank of three go wrong in every way and place, and see who says what, and when.

    python scripts/fault_trials.py [--backend reference|cuda] [--record FILE] [--seed S]
    python scripts/fault_trials.py --backend cuda --places forward --at-once 5

Five kinds (a process is killed, is stopped, skips a call, runs with other flags, has a corrupted
counter) at four places (its first call, a forward, a backward, anywhere) are twenty trials. A trial
passes when, within the limit and 10 s: every rank that still runs has raised and has written one
record, the merged records name the one that went wrong and no other, and no optimizer has made a
step that the fault was in; and when its process has ended, or is taking itself down, which on a
busy machine may last. A sixth kind is a slow rank, three times the deadline of a kernel late,
that nobody may report. Behind all trials nothing is left: no process, socket, shared memory, or
memory of the GPU.

The ranks are processes with gloo; of the cuda backend, all on one GPU, in symmetric memory.

Exit codes: 0 all trials passed and nothing is left, 1 not, 2 wrong input.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from bench_record import append, environment
from resume_trials import shared_memory, still_there
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from mok_megatron.doctor import merge  # noqa: E402
from tests.backends import fault_rank  # noqa: E402

WORLD = len(fault_rank.CASE.tokens)
LIMIT_S, DEADLINE_S = 6.0, 2
GRACE_S = 10.0  # behind the limit
START_S = 180.0
STALL_S, TEARDOWN_S = 5.0, 60.0  # without use of a CPU; in all
LEFT_BYTES = 64 << 20  # of the GPU's memory: another process's context may differ by as much


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a trial went; `trouble` is "" when it passed. seconds: until the last rank had said so;
    None where nobody had to."""

    kind: str
    place: str
    culprit: int
    seconds: float | None
    said: str
    trouble: str


def main(tokens: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--backend", choices=("reference", "cuda"), default="reference")
    parser.add_argument(
        "--kinds", nargs="+", choices=fault_rank.KINDS, default=list(fault_rank.KINDS)
    )
    parser.add_argument(
        "--places", nargs="+", choices=fault_rank.PLACES, default=list(fault_rank.PLACES)
    )
    parser.add_argument("--at-once", type=int, default=1, help="trials that run at the same time")
    parser.add_argument("--seed", type=int, default=None, help="default: another in every session")
    parser.add_argument("--commit", help="of the record, where there is no git")
    parser.add_argument("--record", type=Path, metavar="FILE", help="add a JSON line to FILE")
    options = parser.parse_args(tokens)
    if options.at_once < 1:
        parser.error(f"mok: --at-once must be at least 1, got {options.at_once}")
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    started, cells = time.monotonic(), [(k, p) for p in options.places for k in options.kinds]
    outcomes, left = run_trials(options.backend, cells, seed, options.at_once)
    faults = [one for one in outcomes if one.kind != "slow"]
    slow = [one for one in outcomes if one.kind == "slow"]
    passed, unharmed = (sum(not one.trouble for one in some) for some in (faults, slow))
    print(f"{passed} of {len(faults)} faults were reported in time and by name", flush=True)
    print(f"{unharmed} of {len(slow)} slow ranks were waited for; left behind: {left or 'nothing'}")
    if options.record is not None:
        line = {
            "what": "one rank of three goes wrong: reported in time, by name, nothing left",
            "backend": options.backend,
            "passed": passed,
            "trials": len(faults),
            "slow_passed": unharmed,
            "slow": len(slow),
            "left": left,
            "limit_s": LIMIT_S,
            "seconds_to_the_last_report": sorted(
                round(one.seconds, 1) for one in faults if one.seconds is not None
            ),
            "troubles": [
                f"{one.kind}, {one.place}, rank {one.culprit}: {one.trouble}"
                for one in outcomes
                if one.trouble
            ],
            "seed": seed,
            "seconds": round(time.monotonic() - started),
        }
        device = "cuda" if options.backend == "cuda" else "cpu"
        append(options.record, line | environment(device, options.commit))
    return 0 if passed == len(faults) and unharmed == len(slow) and not left else 1


def run_trials(
    backend: str, cells: Sequence[tuple[str, str]], seed: int, at_once: int
) -> tuple[list[Outcome], list[str]]:
    """Every (kind, place), and in words what is left behind all of them."""
    memory, gpu = shared_memory(), _gpu_free() if backend == "cuda" else 0
    with tempfile.TemporaryDirectory(prefix="mok-") as folder:

        def one(number: int) -> Outcome:
            kind, place = cells[number]
            # Of its own name, not of its turn: a trial can be run again alone.
            draw = random.Random(f"{seed} {kind} {place}")
            outcome = run_trial(backend, kind, place, draw, Path(folder) / str(number))
            result = outcome.trouble or outcome.said
            with tqdm.external_write_mode():
                print(f"{kind}, {place}, rank {outcome.culprit}: {result}", flush=True)
            return outcome

        with (
            ThreadPoolExecutor(at_once) as pool,
            tqdm(total=len(cells), unit="trial", disable=None) as bar,
        ):
            trials = [pool.submit(one, number) for number in range(len(cells))]
            for _ in as_completed(trials):
                bar.update()
            outcomes = [trial.result() for trial in trials]
        left = [f"socket {path.name}" for path in Path(folder).rglob("*") if path.is_socket()]
    left += [f"process {process.pid}" for process in _of_ranks()]
    left += [f"shared memory {name}" for name in still_there(shared_memory() - memory)]
    if backend == "cuda" and (lost := gpu - _gpu_free()) > LEFT_BYTES:
        left.append(f"{lost} bytes of the GPU")
    return outcomes, left


def run_trial(backend: str, kind: str, place: str, draw: random.Random, folder: Path) -> Outcome:
    """Start the ranks, wait, judge."""
    (folder / "records").mkdir(parents=True)
    culprit = draw.randrange(WORLD)
    at, pause = fault_rank.drawn(place, kind, draw)
    trial = fault_rank.Trial(
        folder=str(folder),
        rank=0,
        backend=backend,
        kind=kind,
        culprit=culprit,
        at=at,
        pause=pause,
        limit=3 * DEADLINE_S * 3 if kind == "slow" else LIMIT_S,
        deadline=DEADLINE_S,
    )
    ranks = [_start(replace(trial, rank=rank)) for rank in range(WORLD)]
    try:
        injected = _await_injection(folder, ranks)
        ends = [r for r in range(WORLD) if r != culprit or kind not in ("killed", "stopped")]
        late = injected + trial.limit + GRACE_S
        trouble = []
        if running := [
            r for r in ends if not ended(ranks[r], late - time.time(), _word(folder, r))
        ]:
            trouble.append(f"ranks {running} have not ended {trial.limit + GRACE_S:g} s later")
            trouble += [f"rank {r} is at {_stack(ranks[r], folder / f'log-{r}')}" for r in running]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    words = {r: _read(_word(folder, r)) for r in range(WORLD)}
    judge = _judge_slow if kind == "slow" else _judge_fault
    troubles, said = judge(trial, words, [r for r in ends if r != culprit], late)
    records, _ = merge.read(folder / "records")
    seconds = max((record.time for record in records), default=None)
    return Outcome(
        kind=kind,
        place=place,
        culprit=culprit,
        seconds=None if seconds is None else seconds - injected,
        said=said,
        trouble="; ".join([*trouble, *troubles]),
    )


def _judge_fault(
    trial: fault_rank.Trial, words: dict[int, Any], others: list[int], late: float
) -> tuple[list[str], str]:
    """What is wrong, and what the merged records say."""
    folder, trouble = Path(trial.folder) / "records", []
    records, damaged = merge.read(folder)
    written = {record.rank: record.time for record in records}
    for rank in others:
        if words[rank] is None or words[rank]["error"] is None:
            trouble.append(f"rank {rank} has raised nothing")
        elif words[rank]["parameter"] not in (None, words[rank]["done"]):
            trouble.append(f"rank {rank}'s parameter is {words[rank]['parameter']}")
        elif trial.pause is None and words[rank]["done"] > trial.at // fault_rank.CALLS:
            trouble.append(f"rank {rank} has made {words[rank]['done']} steps, call {trial.at}")
        if written.get(rank, late + 1) > late:
            trouble.append(f"rank {rank} has no record in time")
    if damaged or len(records) != len(written):
        trouble.append(f"records {sorted(written)} of {len(records)}, damaged {damaged}")
    found = merge.merge(folder)["incidents"]
    if [one["ranks"] for one in found] != [[trial.culprit]]:
        trouble.append(f"named {[one['what'] for one in found]}")
    return trouble, "; ".join(str(one["what"]) for one in found)


def _judge_slow(
    trial: fault_rank.Trial, words: dict[int, Any], others: list[int], late: float
) -> tuple[list[str], str]:
    del late
    trouble = []
    for rank in (*others, trial.culprit):
        word = words[rank] or {"error": "has ended", "done": None, "parameter": None}
        if word["error"] is not None or word["parameter"] != word["done"] or not word["done"]:
            trouble.append(f"rank {rank}: {word}")
    if records := merge.read(Path(trial.folder) / "records")[0]:
        trouble.append(f"{len(records)} records")
    return trouble, f"{3 * trial.deadline} s late, and waited for"


def _start(trial: fault_rank.Trial) -> subprocess.Popen[bytes]:
    folder = Path(trial.folder)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    variables = {
        "PYTHONPATH": path,
        "TMPDIR": trial.folder,
        "MOK_RECORDS": str(folder / "records"),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }
    log = (folder / f"log-{trial.rank}").open("wb")
    return subprocess.Popen(
        [sys.executable, "-m", "tests.backends.fault_rank", json.dumps(asdict(trial))],
        env={**os.environ, **variables},
        cwd=ROOT,
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def _await_injection(folder: Path, ranks: Sequence[subprocess.Popen[bytes]]) -> float:
    end = time.monotonic() + START_S
    while (found := _read(folder / "injected.json")) is None:
        if time.monotonic() > end or any(process.poll() is not None for process in ranks):
            logs = [(folder / f"log-{r}").read_text()[-2000:] for r in range(WORLD)]
            raise RuntimeError("no rank has gone wrong\n" + "\n".join(logs))
        time.sleep(0.02)
    return float(found["time"])


def _stack(process: subprocess.Popen[bytes], log: Path) -> str:
    """The innermost frames of its main thread, as faulthandler writes them."""
    before = len(log.read_bytes())
    process.send_signal(signal.SIGUSR1)
    _waited(process, 1.0)
    said = log.read_bytes()[before:].decode(errors="replace")
    frames = re.findall(r'File ".*?([^/"]+)", line (\d+) in (\w+)', said)
    return " < ".join(f"{name}:{line} {function}" for name, line, function in frames[:4]) or "?"


def ended(process: subprocess.Popen[bytes], seconds: float, word: Path) -> bool:
    """In so many seconds; after its word, Python and torch may still be freeing what they have,
    which is work for a CPU. Only who waits meanwhile is stuck."""
    if _waited(process, seconds):
        return True
    end, used = time.monotonic() + TEARDOWN_S, -1.0
    while word.exists() and time.monotonic() < end and process.poll() is None:
        times = psutil.Process(process.pid).cpu_times()
        if times.user + times.system <= used:
            return False
        used = times.user + times.system
        _waited(process, STALL_S)
    return process.poll() is not None


def _waited(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        return False
    return True


def _word(folder: Path, rank: int) -> Path:
    """What the rank says at its end."""
    return folder / f"rank-{rank}.json"


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _of_ranks() -> list[psutil.Process]:
    return [one for one in psutil.Process().children(recursive=True) if one.is_running()]


def _gpu_free() -> int:
    import torch

    return int(torch.cuda.mem_get_info(0)[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
