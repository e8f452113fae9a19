"""scripts/fault_trials.py: a few of its faults, and what it takes for a process that hangs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import fault_trials  # noqa: E402


def test_a_rank_that_is_stopped_or_leaves_a_call_out_is_named(tmp_path: Path) -> None:
    """On the reference backend, both at the same time."""
    kinds = ("stopped", "skips")
    command = [sys.executable, str(ROOT / "scripts" / "fault_trials.py"), "--kinds", *kinds]
    command += ["--places", "backward", "--at-once", "2", "--record", str(tmp_path / "record")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in kinds:
        said = rf"^{kind}, backward, rank (\d): rank \1 (did not arrive at|made another call)"
        assert re.search(said, done.stdout, re.MULTILINE), done.stdout
    record = json.loads((tmp_path / "record").read_text())
    assert (record["passed"], record["trials"], record["left"]) == (2, 2, [])


@pytest.mark.parametrize(
    ("does", "has_spoken", "ends"),
    [
        ("pass", False, True),
        ("import time\nwhile time.process_time() < 1.5: pass", True, True),
        ("import time\nwhile time.process_time() < 1.5: pass", False, False),
        ("import time; time.sleep(60)", True, False),
    ],
)
def test_only_who_uses_a_cpu_after_its_word_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, has_spoken: bool, ends: bool
) -> None:
    monkeypatch.setattr(fault_trials, "STALL_S", 1.0)
    if has_spoken:
        (tmp_path / "word").touch()
    seconds = 30.0 if does == "pass" else 0.2
    with subprocess.Popen([sys.executable, "-c", does]) as process:
        try:
            assert fault_trials.ended(process, seconds, tmp_path / "word") == ends
        finally:
            process.kill()
