"""python -m mok_megatron.doctor: the facts, the findings, and an exit code.

Exit codes: 0 this machine can run what was asked, 1 it cannot (or --determinism saw different
bytes), 2 wrong usage, 130 Ctrl-C. --merge: 0 the newest run's first rank is known, 1 it is not, or
a record is damaged.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import textwrap
from collections import Counter
from pathlib import Path

from mok_megatron import __version__
from mok_megatron.config import BACKENDS
from mok_megatron.doctor import determinism, merge
from mok_megatron.doctor.finding import Finding
from mok_megatron.doctor.judge import CHECKS, examine, judged
from mok_megatron.doctor.machine import Machine, gather

_EPILOG = """\
ok        as it should be
info      of no consequence for the backend in question
warning   it runs, but slower, or not for everybody
error     it does not run; the line with -> says what to do

exit code: 0 the machine can run the backend, 1 it cannot (or bytes differ), 2 wrong usage
--merge:   0 the newest run's first rank is known, 1 it is not, or a record is damaged
"""


def main(arguments: list[str] | None = None) -> int:
    """The command; `arguments` default to the command line's. Returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.merge is not None:
        if not options.merge.is_dir():
            parser.error(f"--merge needs a directory of records, got {options.merge}")
        answer = merge.merge(options.merge)
        print(json.dumps(answer) if options.json else merge.render(answer))
        return merge.exit_code(answer)
    if sys.stderr.isatty():
        print("mok: asking torch, the driver and the GPUs (seconds) ...", file=sys.stderr)
    machine = gather(options.limit)
    machine = dataclasses.replace(machine, expert_parallel=options.expert_model_parallel_size)
    backend, why = judged(options.backend, machine)
    findings = examine(machine, backend)
    can_run = not any(finding.level == "error" for finding in findings)
    repeats = None
    if can_run and options.determinism:
        if sys.stderr.isatty():
            print("mok: repeating a small layer (up to a minute) ...", file=sys.stderr)
        repeats = determinism.repeat(backend, options.limit)
    if options.json:
        answer = {
            "mok_megatron": __version__,
            "backend": backend,
            "why": why,
            "can_run": can_run,
            "findings": [dataclasses.asdict(finding) for finding in findings],
            "machine": dataclasses.asdict(machine),
        }
        if repeats is not None:
            answer["determinism"] = {**dataclasses.asdict(repeats), "same": repeats.same}
        print(json.dumps(answer))
    else:
        width = min(shutil.get_terminal_size((100, 24)).columns, 120)
        print(render(machine, findings, backend, why, width))
        if repeats is not None:
            print(f"\n{determinism.render(repeats)}")
    return 0 if can_run and (repeats is None or repeats.same) else 1


def render(machine: Machine, findings: list[Finding], backend: str, why: str, width: int) -> str:
    """The findings in aligned lines of at most `width` columns, where words allow it."""
    names = max(len(name) for name in CHECKS) + 2
    indent = " " * (9 + names)
    lines = [f"mok-megatron {__version__}, backend {backend} ({why})", ""]
    for finding in findings:
        head = f"{finding.level:<9}{finding.name:<{names}}"
        for first, text in ((head, finding.cause), (indent + "-> ", finding.remedy)):
            if text:
                rest = " " * len(first)
                lines += textwrap.wrap(
                    text,
                    max(width, len(indent) + 30),
                    initial_indent=first,
                    subsequent_indent=rest,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
    lines += peer_matrix(machine)
    count = Counter(finding.level for finding in findings)
    errors, warnings = count["error"], count["warning"]
    answer = f"cannot run the {backend} backend" if errors else f"can run the {backend} backend"
    lines += ["", f"This machine {answer}: {_many(errors, 'error')}, {_many(warnings, 'warning')}."]
    return "\n".join(lines)


def peer_matrix(machine: Machine) -> list[str]:
    """What the row's GPU can do with the memory of the column's, in lines; none for one GPU."""
    count = len(machine.devices)
    if count < 2:
        return []
    marks = {
        (p.rank, p.peer): ("A" if p.atomics else "r") if p.access else "-" for p in machine.pairs
    }
    marks |= {(rank, rank): "." for rank in range(count)}
    wide = len(str(count - 1)) + 1
    lines = ["", "peer access, from the row's GPU to the column's memory:"]
    for rank in range(-1, count):
        cells = [str(p) if rank < 0 else marks.get((rank, p), "?") for p in range(count)]
        head = "" if rank < 0 else str(rank)
        lines.append(f"{head:>5} " + "".join(f"{cell:>{wide}}" for cell in cells))
    return [*lines, "  A with atomics (NVLink)  r reads and writes only  - none  ? not known"]


def _many(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mok_megatron.doctor",
        description="Can this machine run mok, and if not, why, and what to do about it?",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="which backend to judge the machine for; auto: cuda where a GPU is, else reference",
    )
    parser.add_argument(
        "--expert-model-parallel-size",
        type=_ranks,
        metavar="N",
        help="judge it for expert parallel groups of N ranks, each of which must lie on one host",
    )
    parser.add_argument(
        "--determinism",
        action="store_true",
        help=f"also run a small layer {determinism.REPEATS} times in each of "
        f"{determinism.PROCESSES} processes, and compare all bytes of its results",
    )
    parser.add_argument(
        "--merge",
        type=Path,
        metavar="DIR",
        help="instead: read the records that the ranks of a failed run have left in DIR, and say "
        "which rank was first, or did not arrive",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with all facts")
    parser.add_argument(
        "--limit",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="how long torch, the driver and the GPUs may each take to answer (default: 120)",
    )
    return parser


def _ranks(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a number of ranks, 1 or more, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text!r}")
    return seconds


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
