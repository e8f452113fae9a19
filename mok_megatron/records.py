"""What a rank writes down when a call fails: one JSON file a process, for people and for
`python -m mok_megatron.doctor --merge DIR`. The standard library alone.

Where     In the directory that MOK_RECORDS names, which is made where it is missing: on several
          hosts, one that they share. Otherwise mok-records-UID in the directory of temporary files,
          which must then be ours and closed to others.
Form      A Record in JSON, at most 64 KiB, readable by its owner only. Counts, ids and words: no
          value of a tensor but one that broke a rule, no address. It appears whole or not at all.
Once      A process keeps one file: the first fault. A later one, when calls have ended well in
          between, takes its place.
Reading   Nothing in a file is trusted: whatever is not a Record is named as damaged.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

VARIABLE = "MOK_RECORDS"
FORMAT = 1
MOST_BYTES = 1 << 16
MERGE = "python -m mok_megatron.doctor --merge"
WAITS = ("wait", "collective")  # kinds of those who suffer from another rank
_PREFIX = "mok-rank"
_LAUNCHER = (
    ("TORCHELASTIC_RUN_ID", "torchrun"),
    ("TORCHELASTIC_RESTART_COUNT", "restart"),
    ("SLURM_JOB_ID", "slurm job"),
    ("MASTER_ADDR", "master"),
    ("MASTER_PORT", "port"),
)


@dataclass(frozen=True, kw_only=True)
class Record:
    """A failed call, as one rank saw it.

    kind       wait (the device's), collective (torch's): for another rank; desync, arguments,
               choice, probability, tokens, rows: a rule broken by the `blamed`; memory, error: of
               this rank.
    run        the same in all processes of the group, and in no other run; "" when not all had met.
    rank       of the job; so are `group` and `blamed`.
    layer, call  count in the order of first calls, and of calls of the group, from 1; 0: not known.
               `completed`: the last call that had no error here.
    phase, counter, expected, seen  what was waited for or judged, and what was there.
    peers      of other ranks' processes: rank -> what it was doing when the call failed.
    """

    kind: str
    message: str
    backend: str
    run: str
    job: str
    rank: int
    world: int
    group: list[int]
    layer: int
    direction: str
    phase: str
    call: int
    completed: int
    tokens: int
    counter: str
    expected: int | str | None
    seen: int | str | None
    blamed: list[int]
    peers: dict[str, str]
    waited_s: float
    time: float  # seconds since 1970
    host: str
    pid: int
    device: str
    versions: dict[str, str]
    stack: list[str]
    format: int = FORMAT


def directory() -> Path:
    """Where records go; see above. Makes nothing."""
    named = os.environ.get(VARIABLE)
    return Path(named or f"{tempfile.gettempdir()}/mok-records-{os.getuid()}").absolute()


def launcher(environment: Mapping[str, str]) -> str:
    """What the launcher calls this run."""
    found = ((word, environment.get(name)) for name, word in _LAUNCHER)
    return ", ".join(f"{word} {value}" for word, value in found if value)


def write(record: Record) -> Path:
    """The file. Raises OSError where it cannot be written."""
    into = directory()
    into.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.environ.get(VARIABLE):
        _refuse_foreign(into)
    path = into / f"{_PREFIX}{record.rank}-{_plain(record.host)}-{record.pid}.json"
    handle, draft = tempfile.mkstemp(prefix=".mok-", dir=into)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_text(record))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    return path


def read(folder: Path) -> tuple[list[Record], dict[str, str]]:
    """The records of a directory, and of each file that is none: name -> why."""
    records, damaged = [], {}
    for path in sorted(folder.glob(f"{_PREFIX}*.json")):
        try:
            records.append(_parse(path))
        except (OSError, ValueError, RecursionError) as error:
            damaged[path.name] = str(error)
    return records, damaged


def of_group(run: str, group: list[int], since: float) -> list[Record]:
    """What the ranks of a group have written so far into this process's directory."""
    records, _ = read(directory())
    return [r for r in records if (r.run, r.group) == (run, group) and r.time >= since]


def _text(record: Record) -> bytes:
    """At most MOST_BYTES: what is long is cut."""
    words = asdict(record)
    for most in (8192, 1024, 128):
        text = json.dumps({name: _cut(word, most) for name, word in words.items()}, indent=1)
        if len(text) < MOST_BYTES:
            break
    return text.encode() + b"\n"


def _cut(value: object, most: int) -> object:
    if isinstance(value, str):
        return value[:most]
    if isinstance(value, list):
        return [_cut(item, most) for item in value[:most]]
    if isinstance(value, dict):
        return {key: _cut(item, most) for key, item in list(value.items())[:most]}
    return value


def _refuse_foreign(into: Path) -> None:
    """A directory in a place where everybody writes may be another user's."""
    found = into.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{into} must be a directory of this user that is closed to others, got mode "
            f"{stat.filemode(found.st_mode)} of user {found.st_uid}; set {VARIABLE}"
        )


def _parse(path: Path) -> Record:
    """Raises OSError or ValueError (why)."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("no plain file")
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes")
    try:
        words = json.loads(text)
    except ValueError:
        raise ValueError("cut off, or no JSON") from None
    if not isinstance(words, dict):
        raise ValueError("no JSON object")
    if words.get("format") != FORMAT:
        raise ValueError(f"format {words.get('format')!r}, not {FORMAT}: of another version of mok")
    for name, kind in _KINDS.items():
        if name not in words:
            raise ValueError(f"{name} is missing")
        if not _is(words[name], kind):
            raise ValueError(f"{name} must be {_word(kind)}")
    return Record(**{name: words[name] for name in _KINDS})


_KINDS = typing.get_type_hints(Record)
assert list(_KINDS) == [field.name for field in fields(Record)]


def _is(value: object, kind: object) -> bool:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(_is(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is(item, inner[1]) for item in value.values())
    if origin is types.UnionType:
        return any(_is(value, one) for one in inner)
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def _word(kind: object) -> str:
    return str(getattr(kind, "__name__", kind)) if not typing.get_args(kind) else str(kind)


def _plain(text: str) -> str:
    """For a file's name."""
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in text)[:100]
