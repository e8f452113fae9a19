"""--merge DIR: from the records of a run's ranks to the rank that was first, and what to do.

Records belong together when they name the same run and the same group of ranks; one whose group
never met names no run, and goes with the records of its launch. Of a rank with several the newest
counts, unless others have waited in much later calls. Who is to be blamed, by the first of these
that gives an answer:

    broken      a rank's own record says that it broke a rule or failed by itself, or others' do
    arrived     a rank of the group has written nothing: it did not arrive
    seen        ranks that others saw dead, stopped or silent
    behind      all have waited: those whose call has the smallest number, if not all have the same
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mok_megatron.records import VARIABLE, WAITS, Record, read

_REMEDY = {
    "desync": "look for a rank that skips a layer or a microbatch (uneven data, an early exit), or "
    "runs with other flags or another version",
    "arguments": "its message says what to change",
    "choice": "its message says what to change",
    "probability": "look for NaN in the router's input and weights: the training may have diverged",
    "tokens": "set --mok-max-tokens as its message says",
    "rows": "set --mok-row-budget as its message says, or balance the router's load",
    "memory": "lower --micro-batch-size or recompute more on all ranks",
    "error": "its message is the first error; those of the others follow from it",
    "missing": "look into that rank's own log and its host's kernel log (out of memory, a GPU that "
    "fell off); if the process still runs, py-spy dump --pid says where it is",
    "behind": "look for a rank that skips a layer or a microbatch, or for a slow one: raise "
    "--distributed-timeout-minutes if its first calls take longer",
    "nobody": "all ranks have waited for each other in the same call: look at the links between "
    "them (python -m mok_megatron.doctor; NCCL's and the kernel's log), and whether the time limit "
    "is long enough",
}


@dataclass(frozen=True, kw_only=True)
class Incident:
    """Records of one group in one run, by rank, and how many older ones there are of those
    ranks."""

    run: str
    group: tuple[int, ...]
    records: dict[int, Record]
    older: int

    @property
    def last(self) -> float:
        return max(record.time for record in self.records.values())


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Who was first; `ranks` is empty where the records do not say."""

    ranks: tuple[int, ...]
    what: str
    remedy: str


def incidents(records: Iterable[Record]) -> list[Incident]:
    """The newest first."""
    together: dict[tuple[str, tuple[int, ...]], list[Record]] = {}
    records = sorted(records, key=lambda record: record.time)
    runs: dict[tuple[str, tuple[int, ...]], set[str]] = {}
    for record in records:
        if record.run:
            runs.setdefault((record.job, tuple(record.group)), set()).add(record.run)
    for record in records:
        group = tuple(record.group)
        known = runs.get((record.job, group), set())
        run = record.run or (next(iter(known)) if len(known) == 1 else "")
        together.setdefault((run, group), []).append(record)
    found = []
    for (run, group), of_group in together.items():
        newest = _of_one_failure({record.rank: record for record in of_group})
        older = len(of_group) - len(newest)
        found.append(Incident(run=run, group=group, records=newest, older=older))
    return sorted(found, key=lambda incident: -incident.last)


def _of_one_failure(newest: dict[int, Record]) -> dict[int, Record]:
    """Without what a rank has recovered from: a broken rule, more than a call before those in which
    others have waited."""
    waits = [record.call for record in newest.values() if record.kind in WAITS and record.call]
    first = min(waits, default=1)
    return {
        rank: record
        for rank, record in newest.items()
        if record.kind in WAITS or record.call >= first - 1
    }


def judge(incident: Incident) -> Verdict:
    """Who was first, and what to do."""
    records = incident.records
    at = _call(max(records.values(), key=lambda record: record.call))
    broken = sorted(
        (record for record in records.values() if record.kind not in WAITS),
        key=lambda record: (record.call, record.time),
    )
    if broken:
        first = broken[0]
        by = Counter(rank for r in broken if r.kind == first.kind for rank in r.blamed)
        ranks = tuple(sorted(by)) or (first.rank,)
        return Verdict(
            ranks=ranks,
            what=f"{_ranks(ranks)} {_did(ranks, first)} in {_call(first)}",
            remedy=_REMEDY[first.kind if first.kind in _REMEDY else "error"],
        )
    missing = tuple(rank for rank in incident.group if rank not in records)
    if missing:
        states = {rank: _state(incident, rank) for rank in missing}
        seen = "; ".join(f"rank {rank}: {state}" for rank, state in states.items() if state)
        return Verdict(
            ranks=missing,
            what=f"{_ranks(missing)} did not arrive at {at}{f' ({seen})' if seen else ''}",
            remedy=_REMEDY["missing"],
        )
    accused = Counter(rank for record in records.values() for rank in record.blamed)
    if accused:
        most = max(accused.values())
        ranks = tuple(sorted(rank for rank, count in accused.items() if count == most))
        states = {rank: _state(incident, rank) for rank in ranks}
        seen = "; ".join(f"rank {rank}: {state}" for rank, state in states.items() if state)
        return Verdict(
            ranks=ranks,
            what=f"{_ranks(ranks)} came too late for the others in {at}"
            f"{f' ({seen})' if seen else ''}",
            remedy=_REMEDY["missing"],
        )
    calls = {record.call for record in records.values()}
    if len(calls) > 1:
        ranks = tuple(sorted(rank for rank, r in records.items() if r.call == min(calls)))
        return Verdict(
            ranks=ranks,
            what=f"{_ranks(ranks)} stood at {_call(records[ranks[0]])}, others at {at}",
            remedy=_REMEDY["behind"],
        )
    return Verdict(ranks=(), what=f"every rank waited in {at}", remedy=_REMEDY["nobody"])


def merge(folder: Path) -> dict[str, Any]:
    """What DIR says, for JSON and for `render`: `incidents`, the newest first, each with its
    verdict and its ranks' records, and `damaged`, file -> why."""
    records, damaged = read(folder)
    answer = []
    for incident in incidents(records):
        verdict = judge(incident)
        answer.append(
            {
                "run": incident.run,
                "job": next(iter(incident.records.values())).job,
                "group": list(incident.group),
                "time": incident.last,
                "ranks": list(verdict.ranks),
                "what": verdict.what,
                "remedy": verdict.remedy,
                "older": incident.older,
                "lines": {str(rank): _line(incident, rank) for rank in incident.group},
                "records": [vars(record) for record in incident.records.values()],
            }
        )
    return {"directory": str(folder), "incidents": answer, "damaged": damaged}


def exit_code(answer: dict[str, Any]) -> int:
    """0: the newest incident's first rank is known; 1: not, or something is damaged."""
    known = bool(answer["incidents"]) and bool(answer["incidents"][0]["ranks"])
    return 0 if known and not answer["damaged"] else 1


def render(answer: dict[str, Any]) -> str:
    """The newest incident whole, a line for each rank; one line for each older one."""
    lines = []
    for number, found in enumerate(answer["incidents"]):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["time"]))
        job = f" ({found['job']})" if found["job"] else ""
        name = f"run {found['run'] or 'without a number'}{job}, {_ranks(found['group'])}, {when}"
        if _superseded(answer["incidents"][:number], found):
            lines.append(f"older: {name}: {found['what']}")
            continue
        lines += [name, f"  {found['what']}", f"  -> {found['remedy']}"]
        lines += [f"  rank {rank:<4} {line}" for rank, line in found["lines"].items()]
        if found["older"]:
            lines.append(f"  {found['older']} older records of these ranks are left out")
    if not answer["incidents"]:
        lines.append(
            f"no record in {answer['directory']}: the error of a rank names its directory, which "
            f"{VARIABLE} sets"
        )
    lines += [f"damaged: {file}: {why}" for file, why in answer["damaged"].items()]
    return "\n".join(_printable(line) for line in lines)


def _superseded(newer: list[dict[str, Any]], found: dict[str, Any]) -> bool:
    """Whether a rank of it has failed again in a newer run: groups of one run share no rank."""
    return any(set(one["group"]) & set(found["group"]) for one in newer)


def _line(incident: Incident, rank: int) -> str:
    record = incident.records.get(rank)
    if record is None:
        state = _state(incident, rank)
        return f"no record{f': {state}' if state else ''}"
    if record.kind in WAITS:
        did = f"waited {record.waited_s:.1f} s in {record.phase}"
    else:
        did = record.message.partition("\n")[0]
    return f"{record.kind}, {_call(record)}, {record.host} process {record.pid}: {did}"


def _state(incident: Incident, rank: int) -> str:
    """What others saw of its process: the worst of it."""
    words = [record.peers.get(str(rank), "") for record in incident.records.values()]
    return next((w for w in words if w and not w.endswith("runs")), next(filter(None, words), ""))


def _did(ranks: tuple[int, ...], record: Record) -> str:
    if record.kind == "desync":
        return "made another call than the others"
    if record.kind in ("memory", "error"):
        return "failed by itself" if len(ranks) == 1 else "failed by themselves"
    return "broke a rule"


def _call(record: Record) -> str:
    if not record.call:
        return "a call whose number is not known"
    return f"call {record.call} (layer {record.layer}, {record.direction})"


def _ranks(ranks: Iterable[int]) -> str:
    """rank 3; ranks 0-3, 7"""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [f"{a}" if a == b else f"{a}-{b}" for a, b in spans]
    one = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"rank{'' if one else 's'} {', '.join(words)}"


def _printable(line: str) -> str:
    """Records are files: nothing in them may steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in line)
