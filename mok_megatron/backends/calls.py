"""A rank's calls: their numbers, who the peers are, and what is written down when one fails.

A group meets at the first call of any of its layers: each rank learns the processes of the others,
so that, when a call fails, it can look whether they are still there. That costs a barrier of the
host, once for each group. Then a call costs a count and a few words.

Numbers   Calls count in their group, forward and backward alike, whether they end well or not; so
          all ranks have the same number in the same call. Layers count in the order of their first
          calls.
Records   mok_megatron.records. The error of a call keeps its type and words, and gets a line with
          call, layer, direction and the directory, the same on all ranks.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mok_megatron import __version__, peers, records
from mok_megatron.backends.rules import CallFault
from mok_megatron.contract import MoEShape

GRACE_S = 3.0  # how long a rank that has waited looks for the records of others
_RECENT = 64
_STARTED = time.time()


class Call(NamedTuple):
    """number: in the group; epoch: in the workspace of the group and shape, if no call is in a CUDA
    graph. began: on the monotonic clock."""

    number: int
    layer: int
    direction: str
    tokens: int
    began: float
    epoch: int = 0


@dataclass
class Place:
    """A process in a group. `run` and `processes` (host, pid of each rank) once it has met."""

    ranks: list[int]
    own: int
    device: str = ""
    run: str = ""
    processes: list[tuple[int, int]] = field(default_factory=list)
    calls: int = 0
    layers: int = 0
    completed: int = 0
    captured: bool = False  # calls in CUDA graphs: replays advance epochs that nobody counts here
    epochs: dict[MoEShape, list[int]] = field(default_factory=dict)
    recent: deque[Call] = field(default_factory=lambda: deque(maxlen=_RECENT))


_places: weakref.WeakKeyDictionary[ProcessGroup, Place] = weakref.WeakKeyDictionary()
_alone: list[Place] = []
_latest: list[Calls] = []  # the layer that has called last
_written: list[int] = []  # calls that had completed in this process when its record was written


def place_of(group: ProcessGroup | None) -> Place:
    """Of this process in a group, or alone."""
    if group is None:
        if not _alone:
            _alone.append(Place(ranks=[_world()[0]], own=0, run=f"{secrets.randbits(63):x}"))
        return _alone[0]
    if group not in _places:
        _places[group] = Place(ranks=dist.get_process_group_ranks(group), own=group.rank())
    return _places[group]


def latest() -> Calls | None:
    """Of the layer that has called last in this process."""
    return _latest[0] if _latest else None


class Calls:
    """One layer's, of a backend in a group; None: of a process alone."""

    def __init__(self, backend: str, shape: MoEShape, group: ProcessGroup | None) -> None:
        self.backend, self._shape, self._group = backend, shape, group
        self._place: Place | None = None
        self.layer, self._epoch = 0, [0]
        self.phase = ""
        self.now = Call(0, 0, "", 0, 0.0)

    @property
    def place(self) -> Place:
        if self._place is None:
            self._place = place_of(self._group)
        return self._place

    def begin(self, direction: str, tokens: int) -> None:
        """A call; the first of a group meets. Raises what its collective raises, written down."""
        place = self._place or self.place
        place.calls += 1
        if not self.layer:
            place.layers += 1
            self.layer = place.layers
            self._epoch = place.epochs.setdefault(self._shape, [0])
            place.device = _device()  # of this thread; the one that watches has none
        self._epoch[0] += 1
        self.now = Call(
            place.calls, self.layer, direction, tokens, time.monotonic(), self._epoch[0]
        )
        place.recent.append(self.now)
        _latest[:] = [self]
        if self._group is not None and not place.run:
            with self.waiting("meeting"):
                _meet(place, self._group)

    def of_epoch(self, epoch: int) -> None:
        """`now` becomes the group's call of that epoch, where it is still known; else of none."""
        found = [call for call in self.place.recent if call.epoch == epoch]
        if len(found) == 1 and not self.place.captured:
            self.now = found[0]
        else:
            self.now = Call(0, 0, "", 0, self.now.began)

    def end(self) -> None:
        """The call has raised nothing."""
        self.place.completed = self.now.number

    @contextmanager
    def call(self, direction: str, tokens: int) -> Iterator[None]:
        """Around a call; what it raises is written down."""
        self.begin(direction, tokens)
        self.phase = "its arguments"
        try:
            yield
        except Exception as error:
            self.failed(error)
            raise
        self.end()

    @contextmanager
    def waiting(self, phase: str) -> Iterator[None]:
        """Around a collective of torch. Raises CallFault (who did not take part) from its error."""
        self.phase = phase
        try:
            yield
        except RuntimeError as error:
            raise self._unfinished(error) from error

    def failed(self, error: Exception) -> None:
        """Writes the record of a failed call, once, and adds to the error where it is."""
        if "mok_record" in vars(error):
            return
        vars(error)["mok_record"] = True
        rank = error.rank if isinstance(error, CallFault) else None
        kind = error.kind if isinstance(error, CallFault) else _kind(error)
        blamed = [self.place.own if rank is None else rank]
        why_not = _write(self.record(kind, str(error), blamed)) if _is_first() else None
        error.args = (f"{error}{self._line(why_not, kind)}", *error.args[1:])

    def _unfinished(self, cause: RuntimeError) -> CallFault:
        """Torch's collective has failed."""
        place, ranks = self.place, len(self.place.ranks)
        said = f"a collective of torch failed in {self.phase}: {cause}"
        record = replace(
            self.record("collective", said, []), counter="ranks that took part", expected=ranks
        )
        blamed, names, why_not = self.write_wait(record)
        waited = time.monotonic() - self.now.began
        fault = CallFault(
            f"all {ranks} ranks {place.ranks} must take part in a call, got no end of {self.phase} "
            f"on rank {place.ranks[place.own]} within {waited:.1f} s, and "
            f"{'no word from ' + names if blamed else 'word from all'}; "
            f"look into the log of {f'rank {blamed[0]}' if blamed else 'each'} first",
            "collective",
        )
        vars(fault)["mok_record"] = True
        fault.args = (f"{fault}{self._line(why_not)}",)
        return fault

    def write_wait(self, record: records.Record) -> tuple[list[int], str, str | None]:
        """Who it was that this rank waited for, of the job, in words too, as soon as that can be
        seen; and why it could not be written. The own record comes first, since others look for it,
        and again with what is known then."""
        first = _is_first()
        why_not = _write(record) if first else None
        if not record.blamed:
            found, states = self._blamed()
            ranks = self.place.ranks
            seen = len(ranks) - len(found) if found and record.seen is None else record.seen
            record = replace(
                record,
                seen=seen,
                blamed=[ranks[peer] for peer in found],
                peers={str(ranks[peer]): state for peer, state in states.items()},
            )
            why_not = _write(record) if first else None
        states_of = record.peers
        names = [
            f"rank {rank}" + (f" ({states_of[str(rank)]})" if str(rank) in states_of else "")
            for rank in record.blamed
        ]
        return record.blamed, ", ".join(names), why_not

    def _line(self, why_not: str | None, kind: str = "") -> str:
        now, folder = self.now, records.directory()
        where = "" if kind == "desync" else f" (layer {now.layer}, {now.direction})"
        call = f"\nmok: found in call {now.number}{where}"
        if why_not is not None:
            return f"{call}; no record: {why_not}"
        return f"{call}, recorded for {records.MERGE} {folder}"

    def record(self, kind: str, text: str, blamed: list[int]) -> records.Record:
        """Of this moment. blamed: ranks of the group; not virtual ones, who are this process."""
        place, now = self.place, self.now
        rank, world = _world()
        expected, seen = _form(text)
        return records.Record(
            kind=kind,
            message=text,
            backend=self.backend,
            run=place.run,
            job=records.launcher(os.environ),
            rank=rank,
            world=world,
            group=place.ranks,
            layer=now.layer,
            direction=now.direction,
            phase=self.phase,
            call=now.number,
            completed=place.completed,
            tokens=now.tokens,
            counter=kind,
            expected=expected,
            seen=seen,
            blamed=[place.ranks[peer] for peer in blamed if peer < len(place.ranks)],
            peers={str(place.ranks[peer]): state for peer, state in self.states().items()},
            waited_s=round(time.monotonic() - now.began, 3),
            time=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
            device=place.device,
            versions=_versions(),
            stack=[f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_stack()[-16:]],
        )

    def states(self) -> dict[int, str]:
        """What the peers' processes on this host are doing, by rank of the group."""
        place, here = self.place, _host()
        return {
            peer: f"process {pid} {_state(pid)}"
            for peer, (host, pid) in enumerate(place.processes)
            if peer != place.own and host == here
        }

    def _blamed(self) -> tuple[list[int], dict[int, str]]:
        """Ranks of the group that failed by themselves, have ended or are stopped; after GRACE_S,
        those that have said nothing. And the states then."""
        place, began = self.place, time.monotonic()
        while True:
            said = {
                record.rank: record.kind
                for record in records.of_group(place.run, place.ranks, _STARTED - 60)
                if record.call >= self.now.number - 1
            }
            states, own = self.states(), place.own
            others = [(peer, rank) for peer, rank in enumerate(place.ranks) if peer != own]
            silent = [peer for peer, rank in others if rank not in said]
            guilty = [peer for peer, rank in others if said.get(rank, "wait") not in records.WAITS]
            guilty += [peer for peer in silent if not states.get(peer, _RUNS).endswith(_RUNS)]
            if guilty or not silent or time.monotonic() - began > GRACE_S:
                return guilty or silent, states
            time.sleep(0.1)


def _is_first() -> bool:
    """Whether this process has not yet written a record, or calls have ended well since."""
    done = sum(place.completed for place in (*_places.values(), *_alone))
    if _written and done <= _written[0]:
        return False
    _written[:] = [done]
    return True


def _write(record: records.Record) -> str | None:
    """Or why it could not be."""
    try:
        records.write(record)
    except OSError as error:
        return str(error)
    return None


def _meet(place: Place, group: ProcessGroup) -> None:
    every = peers.gather(group, [secrets.randbits(63), _host(), os.getpid()])
    place.run = f"{every[0][0]:x}"
    place.processes = [(host, pid) for _, host, pid in every]


@cache
def _host() -> int:
    """One number for all processes that see each other's ids."""
    return peers.fingerprint(peers.host(), os.readlink("/proc/self/ns/pid"))


_RUNS = "runs"


def _state(pid: int) -> str:
    """Of a process on this host."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "has ended"
    return {"T": "is stopped", "t": "is stopped", "Z": "has ended", "X": "has ended"}.get(
        letter, _RUNS
    )


def _world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _kind(error: Exception) -> str:
    return "memory" if isinstance(error, torch.OutOfMemoryError | MemoryError) else "error"


def _form(text: str) -> tuple[str | None, str | None]:
    """Rule and value of `mok: rule, got value; remedy`."""
    rule, _, rest = text.partition(", got ")
    if not rest:
        return None, None
    return rule.removeprefix("mok: "), rest.partition("; ")[0]


def _device() -> str:
    if not torch.cuda.is_initialized():
        return "cpu"
    return f"cuda:{torch.cuda.current_device()}, {torch.cuda.get_device_name()}"


@cache
def _versions() -> dict[str, str]:
    found = {"mok_megatron": __version__, "torch": torch.__version__}
    with suppress(metadata.PackageNotFoundError):
        found["megatron-core"] = metadata.version("megatron-core")
    return found
