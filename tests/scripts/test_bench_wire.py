"""scripts/bench_wire.py as far as a CPU can show it: bytes, ratios, table, picture, wrong input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import bench_wire  # noqa: E402
import bench_wire_report as report  # noqa: E402
from bench_wire_report import Times, WireError  # noqa: E402


def _line(**changes: object) -> dict[str, object]:
    free = [Times(forward=f, backward=2 * f) for f in (10.0, 11.0, 12.0)]
    slow = [Times(forward=1.2 * t.forward, backward=1.1 * t.backward) for t in free]
    way = Times(forward=4e8, backward=6e8)
    base, rates = report.summarise({0.0: free, 360.0: slow}, way, 0.125)
    about = {"device": "a GPU", "commit": "0123456789abcdef"}
    line = {"model": "qwen3-30b", "ranks": 8, "tokens": 8192, "rates": rates}
    return about | line | {"forward_ms": base.forward, "backward_ms": base.backward} | changes


def test_bytes_of_the_busiest_way_by_hand() -> None:
    rows = [[5, 3], [2, 7]]  # rank 0 sends 3 rows away and holds 2 of another's
    way = report.way_bytes(rows, hidden=64, slots=8)
    row, choices = 128, 64
    assert way.forward == max(2 * row + 3 * (row + 8), 3 * row + 2 * (row + 8)) + choices
    assert way.backward == max(4 * row + 3 * (row + 8), 6 * row + 2 * (row + 8))
    assert report.way_bytes([[4, 0], [0, 4]], hidden=64, slots=0).backward == 0


def test_exposed_is_a_median_of_ratios_inside_a_round() -> None:
    line = _line()
    (at,) = line["rates"].values()
    assert at["exposed"] == pytest.approx((1.2 + 2 * 1.1) / 3 - 1)
    assert at["forward_exposed"] == pytest.approx(0.2)
    assert at["forward_wire_ms"] == pytest.approx(4e8 / 45e9 * 1e3)
    assert at["forward_of_longer"] == pytest.approx(13.2 / 11)
    free = [Times(forward=1.0, backward=100.0)]
    way = Times(forward=4.5e8, backward=1e8)  # 10 ms at 45 GB/s
    slow = [Times(forward=11.0, backward=100.0)]
    _, rates = report.summarise({0.0: free, 360.0: slow}, way, 0.125)
    assert rates["360"]["forward_of_longer"] == pytest.approx(1.1)


def test_a_direction_faster_than_its_wire_is_an_error() -> None:
    times = [Times(forward=9.0, backward=100.0)]
    way = Times(forward=4.5e8, backward=1e8)
    with pytest.raises(WireError, match=r"^mok: a forward must take .* 360 GB/s, 10.000 ms, got 9"):
        report.summarise({0.0: times, 360.0: times}, way, 0.125)


def test_table_and_picture(tmp_path: Path) -> None:
    lines = [_line(), _line(ranks=4, model="deepseek-v3")]
    text = "\n".join(report.table(lines))
    assert "qwen3-30b, 8" in text
    assert "13.3 %" in text
    pytest.importorskip("matplotlib")
    assert report.plot(tmp_path / "wire.png", lines) is None
    assert (tmp_path / "wire.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "gpt-9"], "mok: a model must be one of deepseek-v3, .* got 'gpt-9'"),
        (["--ranks", "1"], "mok: --ranks must be numbers of 2 to 16, got '1'"),
        (["--rates", "fast"], "mok: --rates must be numbers of 1 to 10000, got 'fast'"),
        (["--rounds", "0"], "mok: --rounds must be at least 1, got 0"),
    ],
)
def test_wrong_input_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_wire.main(arguments)
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert len(err.splitlines()) == 1
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(err)


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    script = str(ROOT / "scripts" / "bench_wire.py")
    found = subprocess.run(
        [sys.executable, "-W", "ignore", script, "--output", str(tmp_path / "wire.jsonl")],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 2
    assert "mok: --ranks need a CUDA device, got none" in found.stderr
    assert not (tmp_path / "wire.jsonl").exists()
