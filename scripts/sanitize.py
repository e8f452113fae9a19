"""Run small cases of every kernel under the four tools of compute-sanitizer, all at once.

    python scripts/sanitize.py [--record scripts/results/sanitizers.jsonl] [--seed S]
    python scripts/sanitize.py --build      the library of racecheck and initcheck: nvcc, no GPU
    python scripts/sanitize.py --tools racecheck --sanitizer /opt/sanitizer/compute-sanitizer

Cases, the same for each tool: layouts of every grouped product, layers forward and backward (the
megakernels, with empty experts and partial tiles), and calls of 2 and 4 virtual ranks. Each checks
its results too (python -m tests.csrc.attack). A tool's cases are shared among processes, which all
run at the same time on one GPU; a case is quick, what takes time is the start of a process.

Products and layers run without torch's cache of memory, so that a tensor is an allocation, whose
ends and first use a tool sees. Virtual ranks cannot: freeing would wait for ranks that wait.
initcheck sees all kernels, torch's too, since what it does not see written is unwritten to it; the
others see ours. racecheck and synccheck are told how many barriers a CTA has: they cannot count
those of an array. racecheck and initcheck have a build of their own (MOK_SANITIZED). racecheck
follows no order from one lane to another by __syncwarp and on by that one's arrival at an mbarrier,
so there every lane arrives; initcheck does not see what a tensor map stores, so there rows leave by
ordinary stores. A tool older than 2026 takes some orders by mbarrier for races, and what
cp.async.bulk has written for unwritten (its release notes).

Exit codes: 0 no report and all cases passed, 1 otherwise, 2 wrong input.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from bench_record import aligned, append, environment
from library_variant import build
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
BARRIERS = "128"  # a CTA of the megakernels has fewer
OURS = ("--kernel-name", "kernel_substring=mok")
FLAGS = {
    "memcheck": OURS,
    "racecheck": (*OURS, "--num-cuda-barriers", BARRIERS),
    "initcheck": (),
    "synccheck": (*OURS, "--num-cuda-barriers", BARRIERS),
}
KINDS = ("products", "layers", "groups")  # of cases
LIBRARY = ROOT / "build" / "sanitized" / "_C.abi3.so"
SANITIZED = ("racecheck", "initcheck")  # tools that run it
MOST_KINDS = 12  # of a tool's reports, in table and record
_SUMMARY = re.compile(
    r"^=+ (?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed)", re.M
)
_TROUBLE = re.compile(r"didn't terminate|Target application|Internal|overflow of tracked|not print")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One process: cases of one kind and the first's seed, under one tool."""

    tool: str
    kind: str  # one of KINDS
    seed: int
    count: int
    library: Path | None = None  # None: the installed one

    def command(self, sanitizer: str) -> list[str]:
        counts = {"cases": 0, "layers": 0, "groups": 0}
        counts["cases" if self.kind == "products" else self.kind] = self.count
        words = [word for name, n in counts.items() for word in (f"--{name}", str(n))]
        attack = [sys.executable, "-u", "-m", "tests.csrc.attack", "--largest", "129", *words]
        limits = ("--print-limit", "1000")
        if self.tool == "initcheck":  # which may print one a thread, with a stack each
            limits = ("--print-limit", "50", "--show-backtrace", "no")
        command = [sanitizer, "--tool", self.tool, *limits, *FLAGS[self.tool], *attack]
        given = () if self.library is None else ("--library", str(self.library))
        return [*command, "--seed", str(self.seed), *given]

    def environment(self) -> dict[str, str]:
        found = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return found if self.kind == "groups" else found | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a job's output says. reports: of the tool, None where it gave no summary; kinds: how
    many were printed, by what and where; trouble: why there may be more, or ""."""

    passed: int
    reports: int | None
    kinds: Counter[str]
    trouble: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A tool's jobs together."""

    tool: str
    cases: int
    passed: int
    reports: int | None
    kinds: Counter[str]
    troubles: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return self.reports == 0 and self.passed == self.cases and not self.troubles


def main(tokens: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--tools", nargs="+", choices=FLAGS, default=list(FLAGS))
    parser.add_argument("--build", action="store_true", help="compile --library, and end")
    parser.add_argument(
        "--library",
        type=Path,
        default=LIBRARY,
        help="of racecheck and initcheck; default: %(default)s",
    )
    parser.add_argument("--products", type=int, default=4, help="layouts, each of all products")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--groups", type=int, default=8, help="calls of virtual ranks")
    parser.add_argument("--shards", type=int, default=2, help="processes of a tool's layers")
    parser.add_argument("--seed", type=int, default=None, help="default: another every time")
    parser.add_argument("--limit", type=float, default=230.0, help="seconds of a process")
    parser.add_argument("--sanitizer", metavar="FILE", help="default: PATH's, or CUDA_HOME's")
    parser.add_argument("--record", type=Path, metavar="FILE", help="add a JSON line a tool")
    parser.add_argument("--commit", help="default: that of this checkout")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where outputs are kept")
    options = parser.parse_args(tokens)
    if min(getattr(options, kind) for kind in KINDS) < 0 or options.shards < 1:
        parser.error("mok: counts must be 0 or more and shards 1 or more, got fewer; raise them")
    if options.build:
        build(options.library, "MOK_SANITIZED")
        return 0
    sanitizer = options.sanitizer or installed()
    if sanitizer is None or shutil.which(sanitizer) is None:
        parser.error(
            f"mok: compute-sanitizer must be an executable file, got {sanitizer}; install "
            "nvidia-cuda-sanitizer-api or a CUDA toolkit, and name it with --sanitizer"
        )
    of_build = [tool for tool in options.tools if tool in SANITIZED]
    if of_build and not options.library.is_file():
        parser.error(
            f"mok: {' and '.join(of_build)} must have a library made for them, got no "
            f"{options.library}; make it with --build"
        )
    seed = secrets.randbits(31) if options.seed is None else options.seed
    jobs = plan(
        options.tools, options.products, options.layers, options.groups, options.shards, seed
    )
    jobs = [replace(job, library=options.library) if job.tool in SANITIZED else job for job in jobs]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mok-sanitize-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = run(jobs, sanitizer, folder, options.limit)
    verdicts = [judge(tool, jobs, outcomes) for tool in options.tools]
    print("\n".join(table(verdicts)))
    print(f"seed {seed}, {time.monotonic() - began:.0f} s, {version(sanitizer)}")
    if options.record is not None:
        origin = environment("cuda", options.commit)
        for verdict in verdicts:
            line = {
                "what": "compute-sanitizer",
                "tool": verdict.tool,
                "version": version(sanitizer),
                "cases": {kind: getattr(options, kind) for kind in KINDS},
                "passed": verdict.passed,
                "of": verdict.cases,
                "reports": verdict.reports,
                "kinds": dict(verdict.kinds.most_common(MOST_KINDS)),
                "troubles": verdict.troubles,
                "seed": seed,
                "seconds": round(time.monotonic() - began),
            }
            append(options.record, line | origin)
    return 0 if all(verdict.clean for verdict in verdicts) else 1


def installed() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which(f"{home}/bin/compute-sanitizer")


def version(sanitizer: str) -> str:
    said = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"^Version (\S+)", said.stdout, re.M)
    return f"compute-sanitizer {found[1] if found else 'of unknown version'}"


def plan(
    tools: Sequence[str], products: int, layers: int, groups: int, shards: int, seed: int
) -> list[Job]:
    """The processes of all tools: the same cases for each."""
    jobs = []
    for tool in tools:
        cuts = [layers * i // shards for i in range(shards + 1)]
        shares = [("layers", a, b - a) for a, b in pairwise(cuts)]
        for kind, first, count in (("products", 0, products), *shares, ("groups", 0, groups)):
            if count > 0:
                jobs.append(Job(tool=tool, kind=kind, seed=seed + first, count=count))
    return jobs


def run(jobs: Sequence[Job], sanitizer: str, folder: Path, limit: float) -> list[Outcome]:
    """All jobs at the same time. One that takes longer than the limit, in seconds, is killed."""
    names = [f"{job.tool}-{job.kind}-{job.seed}.txt" for job in jobs]
    began, running, files = time.monotonic(), [], [folder / name for name in names]
    try:
        for job, file in zip(jobs, files, strict=True):
            with file.open("w") as output:
                process = subprocess.Popen(
                    job.command(sanitizer),
                    cwd=ROOT,
                    env=job.environment(),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            running.append(process)
        total = sum(job.count for job in jobs)
        with tqdm(total=total, unit="case", desc=f"{len(jobs)} processes", disable=None) as bar:
            while any(process.poll() is None for process in running):
                bar.update(sum(passed(file.read_text(errors="replace")) for file in files) - bar.n)
                if time.monotonic() - began > limit:
                    break
                time.sleep(0.5)
        ends = [process.poll() for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return [
        read(file.read_text(errors="replace"), code, limit)
        for file, code in zip(files, ends, strict=True)
    ]


def passed(output: str) -> int:
    return len(re.findall(r"^passed \w+ \d+$", output, re.M))


def read(output: str, code: int | None, limit: float) -> Outcome:
    """code: of the process; None: it was killed after `limit` seconds."""
    kinds: Counter[str] = Counter()
    troubles = []
    lines = output.splitlines()
    for line, after in pairwise([*lines, ""]):
        head = re.match(r"=+ (\S.*)", line)
        if head is None or head[1] == "COMPUTE-SANITIZER" or " SUMMARY: " in line:
            continue
        if _TROUBLE.search(line):
            troubles.append(head[1])
        elif re.match(r"=+ {2,}\S", after):
            kinds[f"{_at(head[1])} {_at(after.lstrip('= '))}"] += 1
    found = _SUMMARY.findall(output)
    reports = sum(int(a or b) for a, b in found) if found else None
    if code is None:
        troubles.insert(0, f"killed after {limit:g} s")
    elif reports is None or (code != 0 and not reports):
        own = [line for line in lines if line.strip() and not line.startswith("=")]
        troubles.insert(0, f"exit code {code}: {own[-1][:200] if own else 'no output'}")
    return Outcome(
        passed=passed(output), reports=reports, kinds=kinds, trouble="; ".join(troubles[:3])
    )


def _at(line: str) -> str:
    """A line of a report without what differs from one to the next: a place is its file and line,
    or else its kernel."""
    line = re.sub(r"\bat .*? in (?:\S*/)?([\w.]+:\d+)", r"at \1", line)
    line = re.sub(r"\+0x[0-9a-f]+", "", line)
    return re.sub(r" \[\d+ hazards?\]", "", line)[:120]


def judge(tool: str, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> Verdict:
    own = [(j, o) for j, o in zip(jobs, outcomes, strict=True) if j.tool == tool]
    counts = [o.reports for _, o in own]
    return Verdict(
        tool=tool,
        cases=sum(j.count for j, _ in own),
        passed=sum(o.passed for _, o in own),
        reports=None if None in counts else sum(n for n in counts if n is not None),
        kinds=sum((o.kinds for _, o in own), Counter()),
        troubles=tuple(f"{j.kind} from seed {j.seed}: {o.trouble}" for j, o in own if o.trouble),
    )


def table(verdicts: Sequence[Verdict]) -> list[str]:
    rows: list[tuple[str, ...]] = [("tool", "cases", "passed", "reports", "")]
    for v in verdicts:
        reports = "?" if v.reports is None else str(v.reports)
        verdict = "clean" if v.clean else "NOT CLEAN"
        rows.append((v.tool, str(v.cases), str(v.passed), reports, verdict))
    lines = aligned(rows)
    for v in verdicts:
        lines += [f"{v.tool}: {trouble}" for trouble in v.troubles]
        lines += [f"{v.tool}: {n} x {kind}" for kind, n in v.kinds.most_common(MOST_KINDS)]
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
