"""The file of a record: who may read it, that it is whole or not there, and what is none."""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mok_megatron import records
from mok_megatron.records import Record
from tests.doctor.records import RECORD


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(records.VARIABLE, str(tmp_path / "made" / "here"))
    return tmp_path / "made" / "here"


def test_what_is_written_is_read_and_nobody_elses(folder: Path) -> None:
    before = os.umask(0)
    path = records.write(RECORD)
    os.umask(before)
    assert path.parent == folder == records.directory()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert json.loads(path.read_text()) == asdict(RECORD)
    assert records.read(folder) == ([RECORD], {})


def test_a_process_has_one_file_and_leaves_nothing_beside(folder: Path) -> None:
    records.write(RECORD)
    later = replace(RECORD, call=9)
    path = records.write(later)
    assert [*folder.iterdir()] == [path]
    assert records.read(folder) == ([later], {})
    records.write(replace(RECORD, host="other/../host"))
    assert len([*folder.iterdir()]) == 2


def test_a_long_record_is_cut_to_the_limit(folder: Path) -> None:
    long = replace(
        RECORD,
        message="m" * 200_000,
        stack=["s" * 9000] * 100,
        peers={str(rank): "p" * 400 for rank in range(2000)},
    )
    path = records.write(long)
    assert path.stat().st_size <= records.MOST_BYTES
    (found,), damaged = records.read(folder)
    assert not damaged
    assert found.message.startswith("mmm")
    assert found.call == RECORD.call


def test_a_directory_that_cannot_be_is_an_error_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(records.VARIABLE, str(tmp_path / "file" / "below"))
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        records.write(RECORD)


@pytest.mark.parametrize("wrong", ["open", "link"])
def test_the_default_directory_of_another_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.delenv(records.VARIABLE)
    monkeypatch.setattr(records.tempfile, "gettempdir", lambda: str(tmp_path))
    default = tmp_path / f"mok-records-{os.getuid()}"
    assert records.directory() == default
    if wrong == "open":
        default.mkdir()
        default.chmod(0o777)
    else:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        default.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match=r"closed to others, got mode .*; set MOK_RECORDS"):
        records.write(RECORD)
    assert not [*default.iterdir()]


def test_the_default_directory_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(records.VARIABLE)
    monkeypatch.setattr(records.tempfile, "gettempdir", lambda: str(tmp_path))
    assert stat.S_IMODE(records.write(RECORD).parent.stat().st_mode) == 0o700


def _text(**changed: Any) -> str:
    return json.dumps({**asdict(RECORD), **changed})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "cut off, or no JSON"),
        (_text()[:-40], "cut off, or no JSON"),
        ("[" * 60_000, "cut off, or no JSON|recursion"),
        ("[1, 2]", "no JSON object"),
        (_text(format=2), "format 2, not 1: of another version"),
        (json.dumps({"format": 1}), "kind is missing"),
        (_text(rank="0"), "rank must be int"),
        (_text(rank=True), "rank must be int"),
        (_text(group=[0, "1"]), r"group must be list\[int\]"),
        (_text(peers={"1": 2}), "peers must be dict"),
        (_text(seen=[1]), r"seen must be int \| str \| None"),
        (" " * records.MOST_BYTES + _text(), "more than 65536 bytes"),
        ('{"format": 1, "kind": "\\ud800"}\xff', "cut off, or no JSON"),
    ],
)
def test_what_is_no_record_is_named(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "mok-rank1-a-1.json").write_bytes(text.encode("latin-1"))
    (tmp_path / "mok-rank0-a-1.json").write_text(_text())
    (tmp_path / "other.json").write_text("not ours")
    found, damaged = records.read(tmp_path)
    assert found == [RECORD]
    assert list(damaged) == ["mok-rank1-a-1.json"]
    assert re.search(why, damaged["mok-rank1-a-1.json"])


def test_links_pipes_and_directories_are_no_records(tmp_path: Path) -> None:
    (tmp_path / "real").write_text(_text())
    (tmp_path / "mok-rank0-link.json").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "mok-rank1-pipe.json")  # reading it would wait for a writer
    (tmp_path / "mok-rank2-folder.json").mkdir()
    found, damaged = records.read(tmp_path)
    assert found == []
    assert len(damaged) == 3


def test_of_group_sees_its_run_and_nothing_old(folder: Path) -> None:
    for rank, run, when in ((0, "a", 100.0), (1, "a", 50.0), (2, "b", 100.0)):
        records.write(replace(RECORD, rank=rank, run=run, time=when))
    seen: list[Record] = records.of_group("a", RECORD.group, since=60.0)
    assert [record.rank for record in seen] == [0]


def test_the_launcher_is_in_the_name_of_the_run() -> None:
    assert records.launcher({}) == ""
    environment = {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500", "PATH": "/bin"}
    assert records.launcher(environment) == "torchrun none, port 29500"
