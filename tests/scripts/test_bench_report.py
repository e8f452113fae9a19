"""What scripts/bench.py says of a layer: ratios, table, JSON line, trends, picture."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import bench_clock
import bench_picture
import bench_problem
import bench_record
import bench_report

SMALL = bench_problem.parse_shape("48,2,6,32,16,24")


def samples(*both: tuple[float, float, float]) -> list[bench_clock.Sample]:
    return [bench_clock.Sample(forward=f, backward=b, add=a) for f, b, a in both]


def line(
    name: str = "x/1", load: str = "balanced", tokens: int = 48, scale: float = 1.0
) -> dict[str, Any]:
    """A measurement as Measurement.run makes it, of invented samples."""
    shape = dataclasses.replace(SMALL, tokens=tokens)
    visits = {
        "mok": samples((1 * scale, 2, 0), (2 * scale, 4, 0), (1 * scale, 2, 0)),
        "peer": samples((2, 3, 1), (4, 6, 2), (8, 2, 2)),
        "bound": [
            bench_clock.Sample(forward=f, backward=2 * f, passes={"up": f, "w1_gradient": 2 * f})
            for f in (0.5, 1, 0.5)
        ],
    }
    bound, arms = bench_report.summarise(shape, visits, "mok")
    for arm in arms:
        arms[arm] |= {"label": arm, "errors": {"y": 1e-3, "dx": 2e-3}, "host_us": (10.0, 20.0)}
        arms[arm] |= {"bytes": (1_000_000, 3_000_000), "calls_us": None}
    arms["mok"]["calls_us"] = (4.0, 5.0)
    return {
        "name": name,
        "load": load,
        "table": "main_grad",
        "shape": dataclasses.asdict(shape),
        "asked_tokens": tokens,
        "rows_least": 1,
        "rows_most": 9,
        "first": "mok",
        "bound": bound,
        "arms": arms,
        "left_out": {"sonic": "SonicMoE is not installed"},
        "gpu_meanwhile": {"sm_mhz": 1600.0, "power_w": 690.0, "temperature_c": 60.0},
        "device": "a GPU",
        "versions": {"torch": "2"},
        "commit": "0123456789abcdef",
    }


def test_ratios_are_taken_inside_a_round() -> None:
    arms = line()["arms"]
    assert arms["mok"]["of_bound_forward"] == 0.5
    assert arms["peer"]["times_mok"] == 2.0  # of 2, 2 and 4; of the medians it would be 4
    assert arms["mok"]["times_mok"] == 1.0
    assert arms["peer"]["backward_ms"] == 4.0  # with the addition, 4, 8 and 4
    assert arms["peer"]["add_ms"] == 2.0
    assert arms["mok"]["both_tflops"] == pytest.approx(3 * SMALL.forward_flop / 3e9)


def test_the_table_says_all_of_it() -> None:
    text = bench_report.table(line())
    assert text.splitlines()[0] == (
        "x/1, balanced: T 48, K 2, E 6, H 32, F 16, S 24; 1-9 rows an expert; "
        "(b) weight gradients added into fp32 main_grad"
    )
    header, mok, peer, bound = text.splitlines()[1:5]
    assert mok.split() == ["mok", "1.000", "2.000", "3.000", "3.000-6.000", "0.0", "1.00",
                           "0.50/0.50", "10/20", "1", "3", "2.0e-03"]  # fmt: skip
    assert len(header) == len(mok) == len(peer)
    assert bound.split() == ["bound", "0.500", "1.000", "1.500"]
    assert "mok: of the host's time 4/5 us are the backend's own" in text
    assert "peer: of it 2.000 ms to add into main_grad" in text
    assert "sonic left out: SonicMoE is not installed" in text
    assert "GPU meanwhile: 1600 MHz, 690 W, 60 C" in text
    assert "Megatron's two" not in text


def test_the_faster_of_megatrons_paths_is_named() -> None:
    one = line()
    peer = one["arms"].pop("peer")
    one["arms"] |= {"megatron": peer, "megatron-cutlass": {**peer, "times_mok": 1.25}}
    assert "the faster of Megatron's two takes 1.25 x mok's time" in bench_report.table(one)


def test_a_line_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "layer.jsonl"
    for name in ("one", "two"):
        bench_record.append(path, line(name))
    read = [json.loads(text) for text in path.read_text().splitlines()]
    assert [entry["name"] for entry in read] == ["one", "two"]
    assert bench_report.table(read[0]) == bench_report.table(line("one"))


def test_loads_are_compared_with_balanced_of_the_same_shape() -> None:
    slow = line(load="zipf", scale=2.0)
    text = bench_report.loads_against_balanced([line(), slow, line("other/1", "zipf")])
    assert text == ["x/1 T 48, (b) rate under zipf / balanced: mok 0.75, peer 1.00"]


def swept(extra: float) -> list[dict[str, Any]]:
    """Time 2 x bound + 0.1 ms at four sizes, and `extra` of it more at the third."""
    lines = []
    for index, tokens in enumerate((64, 128, 256, 512)):
        one = line(tokens=tokens)
        one["bound"] = {"forward_ms": tokens / 100, "backward_ms": tokens / 50}
        both = 2 * tokens * 0.03 + 0.1
        one["arms"] = {"mok": one["arms"]["mok"] | {"both_ms": both * (1 + extra * (index == 2))}}
        lines.append(one)
    return lines[::-1]


def test_a_sweep_over_tokens_has_a_trend() -> None:
    (smooth,) = bench_report.trends(swept(0.0))
    assert smooth.startswith("x/1, balanced, (b) mok: 2.00 x bound + 0.100 ms; at most 0 % above")
    (bumpy,) = bench_report.trends(swept(0.3))
    assert bumpy.endswith("at T 256")
    assert int(bumpy.split("at most ")[1].split(" %")[0]) > 10
    assert bench_report.trends(swept(0.0)[:2]) == []


def test_a_sweep_over_experts_has_one_too() -> None:
    lines = swept(0.0)
    for index, one in enumerate(lines):
        one["shape"] |= {"tokens": 48, "experts": 4 + index}
        one["name"] = f"x/{4 + index}"
    (said,) = bench_report.trends(lines)
    assert said.startswith("x, 96 rows, balanced, (b) mok: 2.00 x bound + 0.100 ms")
    assert ", at E " in said
    (sweep,) = bench_report.sweeps(lines)
    assert [sweep.place(one) for one in sweep.lines] == [4, 5, 6, 7]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    several = [line("a/1"), line("b/2", "zipf"), *swept(0.1)]
    several.append({**line("c/3"), "arms": {"peer": line()["arms"]["peer"]}})
    for name, lines in {"few": several[:1], "all": several}.items():
        assert bench_picture.plot(tmp_path / f"{name}.png", lines) is None
    few, every = ((tmp_path / f"{name}.png").read_bytes() for name in ("few", "all"))
    assert few.startswith(b"\x89PNG")
    assert every.startswith(b"\x89PNG")
    width, height = (int.from_bytes(every[i : i + 4]) for i in (16, 20))
    assert height > int.from_bytes(few[20:24]), "a panel more for the sweep"
    assert width > 1000


def test_a_bounds_passes_are_medians_and_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert line()["bound"]["passes_ms"] == {"up": 0.5, "w1_gradient": 1}
    for count in (1, 3):
        lines = [line(f"a/{i}") for i in range(count)]
        assert bench_picture.waterfall(tmp_path / f"{count}.png", lines) is None
    one, three = (int.from_bytes((tmp_path / f"{n}.png").read_bytes()[20:24]) for n in (1, 3))
    assert three > one, "a bar more for each direction"


def test_a_commit_that_git_cannot_tell_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_record, "_say", lambda command: None)
    assert bench_record.environment("cpu", None)["commit"] == "unknown"
    assert bench_record.environment("cpu", "abc")["commit"] == "abc"
