"""The throttled wire's arithmetic (csrc/device/wire.cuh) on the CPU, with the kernels' own header:
no way carries more than its rate, and a busy one carries no less."""

from __future__ import annotations

import ctypes
import pathlib
import shutil
import subprocess

import pytest

SOURCE = pathlib.Path(__file__).with_name("wire_host.cpp")
NANOSECOND = 1 << 10
# B x (132 / P) / 132 in bytes a nanosecond, of 8 and 4 ranks.
RATES = [b * sms / 132 for b in (450, 360, 250) for sms in (16, 33)]


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler is not None, "needs a C++ compiler, found none"
    built = tmp_path_factory.mktemp("wire") / "wire.so"
    flags = ["-std=c++20", "-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(built)], check=True, timeout=120)
    library = ctypes.CDLL(str(built))
    library.per_byte.restype = ctypes.c_uint32
    library.time_of.restype = library.between.restype = ctypes.c_uint64
    return library


def _pull(
    wire: ctypes.CDLL,
    rate: float,
    *,
    ranks: int = 8,
    movers: int = 16,
    rows: int = 40,
    size: int = 4096,
    start: int = 1_700_000_000_000_000_000 << 10,
    pause: int = 0,
    hot: bool = False,
) -> list[tuple[float, float, int, int]]:
    """Of each rank: nanoseconds to its first and its last row, bytes received and sent."""
    start %= 1 << 64
    out = (ctypes.c_uint64 * (4 * ranks))()
    u64 = ctypes.c_uint64
    wire.pull_all(
        *(ranks, movers, rows, size, ctypes.c_double(rate)),
        *(u64(start), u64(pause * NANOSECOND), int(hot), u64(7), out),
    )
    return [
        ((out[i] - start) / NANOSECOND, (out[i + 1] - start) / NANOSECOND, out[i + 2], out[i + 3])
        for i in range(0, len(out), 4)
    ]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("size", [8, 4096, 14336, 32768])
def test_a_row_takes_its_bytes_over_the_rate(wire: ctypes.CDLL, rate: float, size: int) -> None:
    each = wire.per_byte(ctypes.c_double(rate))
    took = wire.time_of(ctypes.c_uint32(size), ctypes.c_uint32(each)) / NANOSECOND
    assert took == pytest.approx(size / rate, rel=1e-3 if size > 8 else 2e-2)


@pytest.mark.parametrize("rate", RATES)
def test_no_way_carries_more_than_its_rate_and_a_busy_one_no_less(
    wire: ctypes.CDLL, rate: float
) -> None:
    ranks = _pull(wire, rate)
    for first, last, received, _ in ranks:
        assert first >= 4096 / rate * 0.999
        assert received / last <= rate * 1.001
    end = max(last for _, last, _, _ in ranks)
    assert all(sent / end <= rate * 1.001 for *_, sent in ranks)
    busiest = max(max(received, sent) for *_, received, sent in ranks)
    assert busiest / end >= 0.9 * rate  # the tail of a rank that nobody else waits for apart


def test_ranks_that_pull_from_one_share_its_way_out(wire: ctypes.CDLL) -> None:
    rate = 43.6
    ranks = _pull(wire, rate, hot=True)
    sent = ranks[0][3]
    end = max(last for _, last, _, _ in ranks)
    assert sum(received for *_, received, _ in ranks) == sent == 7 * 16 * 40 * 4096
    assert sent / end == pytest.approx(rate, rel=1e-3)


def test_an_idle_way_saves_nothing_up(wire: ctypes.CDLL) -> None:
    """One mover that asks seldom waits for its own row alone, whatever the way has been idle."""
    ((_, last, received, _), _) = _pull(
        wire, 43.6, ranks=2, movers=1, rows=100, pause=10_000, hot=False
    )
    row = 4096 / 43.6
    assert received > 0
    assert last <= 100 * (10_000 + row) + 1
    each = wire.per_byte(ctypes.c_double(43.6))
    time = wire.time_of(ctypes.c_uint32(4096), ctypes.c_uint32(each))
    u64 = ctypes.c_uint64
    assert wire.between(u64(5), u64(1_000_000), u64(time)) == 1_000_000 + 2 * time
    assert wire.between(u64(2_000_000), u64(1_000_000), u64(time)) == 2_000_000 + 2 * time
