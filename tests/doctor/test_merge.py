"""Records that were planted: who was first, in which of several runs, and what is damaged."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mok_megatron import records
from mok_megatron.doctor import __main__ as command
from mok_megatron.doctor import merge
from mok_megatron.records import Record
from tests.doctor.records import RECORD

STOPPED = "process 77 is stopped"


def of(rank: int, **changed: Any) -> Record:
    return replace(RECORD, rank=rank, pid=4000 + rank, time=RECORD.time + rank, **changed)


def waits(*ranks: int, **changed: Any) -> list[Record]:
    return [of(rank, **changed) for rank in ranks]


def fault(rank: int, kind: str, blamed: list[int], **changed: Any) -> Record:
    message = f"mok: a rule must hold, got {kind}; do this\nmok: found in call"
    return of(rank, kind=kind, blamed=blamed, message=message, **changed)


@dataclass(frozen=True)
class Planted:
    """Records, the ranks that were first, and words of the answer."""

    records: list[Record]
    ranks: list[int]
    words: tuple[str, ...]


CASES = {
    "missing": Planted(
        waits(0, 1, 3),
        [2],
        ("rank 2 did not arrive at call 1234 (layer 3, backward)", "kernel log"),
    ),
    "missing-and-seen": Planted(
        waits(0, 1, 3, peers={"2": STOPPED}),
        [2],
        (f"rank 2 did not arrive at call 1234 (layer 3, backward) (rank 2: {STOPPED})",),
    ),
    "several-missing": Planted(waits(3), [0, 1, 2], ("ranks 0-2 did not arrive",)),
    "resumed-later": Planted(
        [*waits(0, 1, 3, blamed=[2], peers={"2": STOPPED}), of(2)],
        [2],
        ("rank 2 came too late for the others in call 1234", STOPPED),
    ),
    "desync": Planted(
        [fault(rank, "desync", [3]) for rank in range(4)],
        [3],
        ("rank 3 made another call than the others", "skips a layer or a microbatch"),
    ),
    "choice": Planted(
        [fault(rank, "choice", [1]) for rank in range(4)],
        [1],
        ("rank 1 broke a rule in call 1234", "its message says"),
    ),
    "probability": Planted([fault(0, "probability", [0])], [0], ("NaN in the router",)),
    "tokens": Planted([fault(0, "tokens", [2])], [2], ("--mok-max-tokens",)),
    "rows": Planted([fault(0, "rows", [2])], [2], ("--mok-row-budget",)),
    "memory": Planted(
        [*waits(0, 1, 3), fault(2, "memory", [2], call=1234)],
        [2],
        ("rank 2 failed by itself in call 1234", "--micro-batch-size"),
    ),
    "two-errors": Planted(
        [fault(1, "error", [1], call=1233), fault(2, "error", [2]), *waits(0, 3)],
        [1, 2],
        ("failed by themselves in call 1233",),
    ),
    "recovered-long-ago": Planted(
        [*waits(0, 1, 3), fault(2, "choice", [2], call=5)],
        [2],
        ("rank 2 did not arrive at call 1234",),
    ),
    "behind": Planted(
        [*waits(0, 1, 3), of(2, call=1233, direction="forward")],
        [2],
        ("rank 2 stood at call 1233 (layer 3, forward), others at call 1234",),
    ),
    "nobody": Planted(waits(0, 1, 2, 3), [], ("every rank waited in call 1234", "links")),
    "unknown-call": Planted(
        waits(0, 1, 3, call=0, kind="wait"), [2], ("a call whose number is not known",)
    ),
}


def plant(folder: Path, found: list[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(records.VARIABLE, str(folder))
    for record in found:
        records.write(record)


@pytest.mark.parametrize("name", CASES)
def test_who_was_first(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = CASES[name]
    plant(tmp_path, case.records, monkeypatch)
    assert command.main(["--merge", str(tmp_path)]) == (0 if case.ranks else 1)
    text = capsys.readouterr().out
    for word in case.words:
        assert word in text
    lines = text.splitlines()
    assert [line.split()[:2] for line in lines[3:7]] == [["rank", f"{rank}"] for rank in range(4)]
    assert command.main(["--merge", str(tmp_path), "--json"]) == (0 if case.ranks else 1)
    answer = json.loads(capsys.readouterr().out)
    assert answer["incidents"][0]["ranks"] == case.ranks
    assert answer["damaged"] == {}


def test_several_runs_and_groups_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old run of the same ranks, and two groups of the new one, of which one is fine."""
    old = [replace(of(rank, run="01d"), time=1.0, pid=1) for rank in range(4)]
    new = [of(rank, run="e1", group=[0, 1]) for rank in (0,)]
    other = [of(rank, run="e2", group=[2, 3]) for rank in (3,)]
    plant(tmp_path, [*old, *new, *other], monkeypatch)
    answer = merge.merge(tmp_path)
    assert [(found["run"], found["ranks"]) for found in answer["incidents"]] == [
        ("e2", [2]),
        ("e1", [1]),
        ("01d", []),
    ]
    text = merge.render(answer)
    assert text.count("did not arrive") == 2
    assert "\nolder: run 01d (torchrun none), ranks 0-3, " in text
    assert merge.exit_code(answer) == 0


def test_a_rank_that_has_not_met_is_of_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, [of(0), of(1, run=""), of(2, run="")], monkeypatch)
    (found,) = merge.merge(tmp_path)["incidents"]
    assert found["ranks"] == [3]
    two = [of(0, run="a"), of(0, run="b"), of(1, run="")]
    assert len(merge.incidents(two)) == 3


def test_the_newest_of_a_restarted_rank_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = [replace(of(rank, run=""), pid=1, time=1.0, phase="meeting") for rank in range(4)]
    plant(tmp_path, [*first, *waits(0, 1, 3, run="")], monkeypatch)
    answer = merge.merge(tmp_path)
    (found,) = answer["incidents"]
    assert found["older"] == 3
    assert "3 older records of these ranks are left out" in merge.render(answer)


def test_damaged_records_are_named_and_the_others_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(tmp_path, waits(0, 1, 2, 3), monkeypatch)
    path = next(tmp_path.glob("mok-rank2-*"))
    path.write_text(path.read_text()[:300])
    assert command.main(["--merge", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert f"damaged: {path.name}: cut off, or no JSON" in text
    assert "rank 2    no record" in text


def test_a_directory_without_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--merge", str(tmp_path)]) == 1
    assert "no record in" in capsys.readouterr().out
    with pytest.raises(SystemExit) as error:
        command.main(["--merge", str(tmp_path / "missing")])
    assert error.value.code == 2
    assert "--merge needs a directory" in capsys.readouterr().err


def test_nothing_in_a_record_steers_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, [of(0, kind="error", message="\x1b[2Jgone\x07", host="a\x1b]0;b")], monkeypatch)
    text = merge.render(merge.merge(tmp_path))
    assert "\x1b" not in text
    assert "?[2Jgone?" in text
