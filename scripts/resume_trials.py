"""Kill a training with SIGKILL at a random moment, start it again, and compare it with an unbroken
one to the last bit.

    python scripts/resume_trials.py [--trials 20] [--seed S] [--record FILE] [CONFIG] [--ARGUMENT …]

A trial kills the whole run at once, as when a machine loses power, or one rank, or the launcher
alone; the moment is drawn over all iterations and the pauses between them, a checkpoint being
written among them. The same command then continues, with nothing cleaned up before it. A trial
passes when every iteration's loss and gradient norm have the unbroken run's bits, and nothing of
the killed run is left that anybody would have to clean up: no process, nothing in /dev/shm. (The
server that Megatron's checkpoints start leaves two socket files without a listener in TMPDIR, as
every killed Python process with a multiprocessing manager does; they are counted in the record.)

Exit codes: 0 all trials passed, 1 one did not, 2 wrong input.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from bench_record import append, environment
from tqdm import tqdm
from train_log import read_lines

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "tiny_cpu_deepseek_v3.yaml"
VICTIMS = ("everything", "a rank", "the launcher")
START_S = 300.0  # a start, or the rest of a run; on two idle cores 10 to 20
GONE_S = 60.0  # after a rank died; torch's launcher gives the others 30


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all runs of a session share."""

    config: Path
    arguments: tuple[str, ...]
    iterations: int
    interval: int  # of checkpoints

    def command(self, output: Path) -> list[str]:
        fixed = ("--train-iters", str(self.iterations), "--save-interval", str(self.interval))
        script = str(ROOT / "scripts" / "train.py")
        command = [sys.executable, script, str(self.config), *self.arguments, *fixed]
        return [*command, "--output", str(output)]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How one trial went; `trouble` is "" when it passed."""

    victim: str
    killed_after: int  # iterations that were logged
    resumed_from: int
    sockets: int  # files left in TMPDIR, without a listener
    trouble: str


class Failed(Exception):
    """A run did not do what every run must."""


def main(tokens: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, nargs="?", default=CONFIG)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None, help="default: another in every session")
    parser.add_argument("--iterations", type=int, default=12, help="of a run")
    parser.add_argument("--interval", type=int, default=3, help="iterations between checkpoints")
    parser.add_argument("--record", type=Path, metavar="FILE", help="add a JSON line to FILE")
    options, arguments = parser.parse_known_args(tokens)
    if options.iterations < 2 or options.interval < 1 or options.trials < 1:
        parser.error("mok: trials, iterations and interval must be at least 1, 2 and 1")
    seed = secrets.randbits(32) if options.seed is None else options.seed
    plan = Plan(
        config=options.config,
        arguments=tuple(arguments),
        iterations=options.iterations,
        interval=options.interval,
    )
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mok-resume-") as folder:
        trials = list(run_trials(plan, options.trials, seed, Path(folder)))
    passed = sum(not trial.trouble for trial in trials)
    print(f"{passed} of {len(trials)} trials passed, seed {seed}")
    if options.record is not None:
        line = {
            "what": "SIGKILL at a random moment, then the same command again",
            "passed": passed,
            "trials": len(trials),
            "seed": seed,
            "killed": Counter(trial.victim for trial in trials),
            "resumed_from": Counter(str(trial.resumed_from) for trial in trials),
            "socket_files_left": sum(trial.sockets for trial in trials),
            "troubles": [trial.trouble for trial in trials if trial.trouble],
            "seconds": round(time.monotonic() - started),
        }
        append(options.record, line | environment("cpu", None))
    return 0 if passed == len(trials) else 1


def run_trials(plan: Plan, count: int, seed: int, folder: Path) -> Any:
    """The unbroken run, then `count` trials, each yielded as it ends. Raises Failed when the
    unbroken run does not end well."""
    draw = random.Random(seed)
    before = set(psutil.Process().children(recursive=True))  # of a test's process, say
    bar = tqdm(total=count, unit="trial", desc="unbroken run", disable=None)
    try:
        started = time.monotonic()
        # TMPDIR is not in `folder`: the path of a socket in it may have 107 bytes at most.
        with tempfile.TemporaryDirectory(prefix="mok-") as temporary:
            finish(start(plan.command(folder / "unbroken"), Path(temporary)))
        with bar.external_write_mode():
            print(f"an unbroken run took {time.monotonic() - started:.0f} s", flush=True)
        wanted = curve(folder / "unbroken")
        if len(wanted) != plan.iterations:
            raise Failed(f"the unbroken run logged {len(wanted)} of {plan.iterations} iterations")
        bar.set_description("killed and resumed")
        for number in range(count):
            with tempfile.TemporaryDirectory(prefix="mok-") as temporary:
                trial = run_trial(plan, draw, folder / str(number), Path(temporary), wanted)
            with bar.external_write_mode():
                print(
                    f"trial {number + 1}: {trial.victim} killed after iteration "
                    f"{trial.killed_after}, resumed from {trial.resumed_from}: "
                    f"{trial.trouble or 'the same bits'}",
                    flush=True,
                )
            bar.update()
            yield trial
    finally:
        bar.close()
        for process in set(psutil.Process().children(recursive=True)) - before:
            process.kill()


def run_trial(
    plan: Plan, draw: random.Random, folder: Path, temporary: Path, wanted: dict[int, Any]
) -> Trial:
    """Start, kill, start again, compare."""
    victim = draw.choice(VICTIMS)
    last, pause = draw.randrange(plan.iterations), draw.uniform(0.0, 0.5)
    before = shared_memory()
    process = start(plan.command(folder), temporary)
    log = next_log(folder, process)
    await_iteration(log, last, process)
    time.sleep(pause)
    killed = kill(process, victim, draw)
    done = max((line["iteration"] for line in read_lines(log)), default=0)
    trouble = []
    _, alive = psutil.wait_procs(killed, timeout=GONE_S)
    if alive:
        trouble.append(f"{len(alive)} processes were left")
        for each in alive:
            each.kill()
    process.wait(GONE_S)
    if new := still_there(shared_memory() - before):
        trouble.append(f"left in shared memory: {', '.join(sorted(new))}")
    sockets = sum(path.is_socket() for path in temporary.rglob("*"))
    resumed_from = 0
    try:
        finish(start(plan.command(folder), temporary))
        starts = read_lines(log.parent / "starts.jsonl")
        resumed_from = starts[-1]["iteration"]
        found = curve(folder)
        differs = [i for i in wanted if found.get(i) != wanted[i]]
        if differs or found.keys() != wanted.keys():
            at = differs[0] if differs else max(found)
            trouble.append(f"iteration {at} is {found.get(at)}, unbroken {wanted.get(at)}")
    except Failed as failed:
        trouble.append(str(failed))
    return Trial(
        victim=victim,
        killed_after=done,
        resumed_from=resumed_from,
        sockets=sockets,
        trouble="; ".join(trouble),
    )


def start(command: list[str], temporary: Path) -> subprocess.Popen[str]:
    outer = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    path = os.pathsep.join(filter(None, (str(ROOT), outer.get("PYTHONPATH", ""))))
    return subprocess.Popen(
        command,
        env={**outer, "PYTHONPATH": path, "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for its end. Raises Failed when that is late or no success."""
    try:
        _, err = process.communicate(timeout=START_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"a run did not end within {START_S:g} s") from None
    if process.returncode:
        last = next(iter(err.strip().splitlines()[::-1]), "")
        raise Failed(f"a run ended with code {process.returncode}: {last}")


def curve(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by iteration; JSON keeps every bit of a float."""
    (log,) = folder.glob("*/losses.jsonl")
    return {line["iteration"]: (line["loss"], line["grad_norm"]) for line in read_lines(log)}


def next_log(folder: Path, process: subprocess.Popen[str]) -> Path:
    """The run's losses.jsonl, once it is there: right before its first iteration ends."""
    end = time.monotonic() + START_S
    while not (logs := list(folder.glob("*/losses.jsonl"))):
        _still_running(process, end)
    return logs[0]


def await_iteration(log: Path, iteration: int, process: subprocess.Popen[str]) -> None:
    """Returns when that iteration is logged, or the run has ended by itself."""
    end = time.monotonic() + START_S
    while max((line["iteration"] for line in read_lines(log)), default=0) < iteration:
        _still_running(process, end)


def _still_running(process: subprocess.Popen[str], end: float) -> None:
    if process.poll() is not None or time.monotonic() > end:
        process.kill()
        raise Failed(f"the run to be killed ended or hung before: {process.communicate()[1]}")
    time.sleep(0.01)


def kill(process: subprocess.Popen[str], victim: str, draw: random.Random) -> list[psutil.Process]:
    """SIGKILL, to all of the run's processes or to one. Returns all that it had."""
    launcher = psutil.Process(process.pid)
    family = [*launcher.children(recursive=True), launcher]
    ranks = [one for one in family if one != launcher and "--launched" in _words(one)]
    victims = {"everything": family, "a rank": ranks and [draw.choice(ranks)]}
    for one in victims.get(victim) or [launcher]:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    return family


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def still_there(files: set[str]) -> set[str]:
    """Those that nobody removes or maps in GONE_S: others on this machine make some too."""
    end = time.monotonic() + GONE_S
    while files and time.monotonic() < end:
        time.sleep(0.5)
        files &= shared_memory()
    return files


def shared_memory() -> set[str]:
    """Files in /dev/shm that no living process has mapped."""
    memory = set(map(str, Path("/dev/shm").iterdir())) if Path("/dev/shm").is_dir() else set()
    for process in psutil.process_iter() if memory else ():
        with contextlib.suppress(psutil.Error):
            memory -= {area.path.partition(" (deleted)")[0] for area in process.memory_maps()}
    return memory


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
