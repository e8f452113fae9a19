"""Times of a layer: floors against an independent table, the measured rates against their file."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from mok_megatron.plan.estimate import direction, expert_parallel, rate, step
from mok_megatron.plan.layer import Layer
from mok_megatron.plan.machines import (
    EXPOSED_SHARE,
    LAYERS_COMMIT,
    LINK_SHARE,
    MACHINES,
    NETWORK_SHARE,
    RATES,
    REST_TIMES,
    ROWS,
    WIRE_COMMIT,
)
from mok_megatron.plan.model import read
from tests.plan.test_layer import sized

ROOT = Path(__file__).resolve().parents[2]
H200 = MACHINES["h200"]
LETTERS = {"experts": "num_experts"}  # bench.py's names that differ


def test_the_rates_are_those_of_the_results_file() -> None:
    """The median over shapes, for each pass and number of rows an expert."""
    seen = defaultdict(list)
    for line in (ROOT / "scripts/results/passes.jsonl").read_text().splitlines():
        result = json.loads(line)
        if result["routing"] == "balanced" and result["pass"] in RATES:
            key = result["pass"], result["rows"] // result["experts"]
            seen[key].append(result["results"]["ours0"]["tflops"])
    medians = {key: round(statistics.median(values)) for key, values in seen.items()}
    assert medians == {
        (name, rows): value for name, known in RATES.items() for rows, value in known.items()
    }


def test_measured_layers_come_out() -> None:
    """With the cost of rows, on which no result of another commit bears."""
    lines = (ROOT / "scripts/results/layer.jsonl").read_text().splitlines()
    seen = [line for line in map(json.loads, lines) if line["commit"] == LAYERS_COMMIT]
    assert len(seen) == 8
    for line in seen:
        assert line["table"] == "main_grad"
        layer = Layer(**{LETTERS.get(k, k): v for k, v in line["shape"].items()})
        for name in ("forward", "backward"):
            found, ms = direction(layer, H200, name).compute, line["arms"]["mok"][f"{name}_ms"]
            assert found == pytest.approx(ms, rel=0.08), (line["name"], name)


def test_the_cost_of_rows_goes_by_memory() -> None:
    layer = sized("qwen235", 4096, 8)
    h100, h200 = (direction(layer, MACHINES[name], "forward") for name in ("h100", "h200"))
    rows = 1.95 * 2 * 32768 * 4096 / 1e9
    assert h100.compute - h200.compute == pytest.approx(rows * (4.8 / 3.35 - 1))


@pytest.mark.parametrize(
    ("layer", "forward", "backward"),
    [
        (sized("dsv3", 2048, 8), (2.06, 0.86), (4.11, 3.69)),
        (sized("dsv3", 4096, 8), (4.11, 1.05), (8.22, 3.99)),
        (sized("dsv3", 8192, 8), (8.22, 1.42), (16.44, 4.61)),
        (sized("qwen235", 2048, 8), (0.78, 0.25), (1.57, 0.91)),
        (sized("qwen30", 8192, 32), (0.78, 0.28), (1.57, 0.52)),
        (sized("dsv3", 4096, 1), (4.11, 5.46), (8.22, 26.7)),
        (sized("qwen235", 16384, 1), (6.26, 1.62), (12.5, 6.7)),
        (sized("qwen30", 16384, 1), (1.57, 0.53), (3.13, 1.95)),
    ],
)
def test_floors_are_the_tables(
    layer: Layer, forward: tuple[float, float], backward: tuple[float, float]
) -> None:
    """Milliseconds on one H200: by the matrix rate, by memory."""
    for name, expected in (("forward", forward), ("backward", backward)):
        found = direction(layer, H200, name)
        assert (found.matrix_floor, found.memory_floor) == pytest.approx(
            expected, rel=0.01, abs=0.006
        )
        assert found.floor == max(found.matrix_floor, found.memory_floor, found.wire_floor)


@pytest.mark.parametrize(("model", "ms"), [("dsv3", 1.83), ("qwen235", 1.04), ("qwen30", 0.52)])
def test_the_wire_is_the_tables(model: str, ms: float) -> None:
    """Each way at EP 8, 8192 tokens, at the whole link rate."""
    layer = sized(model, 8192, 8)
    assert direction(layer, H200, "forward").wire_floor == pytest.approx(2 * ms, abs=0.02)
    assert direction(layer, H200, "backward").wire_floor == pytest.approx(3 * ms, abs=0.03)


def test_only_the_small_model_is_bound_by_the_wire() -> None:
    assert direction(sized("dsv3", 8192, 8), H200, "forward").bound == "matrix"
    assert direction(sized("qwen30", 8192, 8), H200, "forward").bound == "wire"
    assert direction(sized("dsv3", 4096, 1), H200, "backward").bound == "memory"


def test_expected_times_by_hand() -> None:
    layer = sized("qwen235", 4096, 8)  # 32768 rows, 2048 an expert
    half, whole = 2 * 32768 * 1536 * 4096, 2 * 32768 * 2 * 1536 * 4096
    found = direction(layer, H200, "forward")
    rows = 2 * 32768 * 4096 / 1e9  # GB
    products = 1e3 * (whole / 683e12 + half / 691e12)
    assert found.compute == pytest.approx(products + ROWS["forward"] * rows)
    products = 1e3 * (half / 633e12 + whole / 684e12 + whole / 681e12 + half / 675e12)
    assert direction(layer, H200, "backward").compute == pytest.approx(
        products + ROWS["backward"] * rows
    )
    transfer = 2 * 32768 * 4096 * 7 / 8
    assert found.wire == pytest.approx(1e3 * 2 * transfer / (450e9 * 0.8))
    # 132 tiles: 11 row tiles of 12 column tiles wait for 1408 rows; 132 results of 128 x 256.
    ends = 7 / 8 * 2 * (11 * 128 * 4096 + 132 * 128 * 256) / (450e9 * 0.8)
    assert found.best == pytest.approx(found.compute + 1e3 * ends)
    assert found.wire < found.compute
    assert found.worst == pytest.approx(found.compute + EXPOSED_SHARE.value * found.wire)


def test_the_most_that_an_emulated_wire_left_exposed() -> None:
    """By model, ranks and direction the median of what was measured; and each lies in the range."""
    lines = map(json.loads, (ROOT / "scripts/results/wire.jsonl").read_text().splitlines())
    seen = defaultdict(list)
    for line in lines:
        if line["commit"].startswith(WIRE_COMMIT):
            for name in ("forward", "backward"):
                rate = line["rates"]["360"]
                wire, free = rate[f"{name}_wire_ms"], line[f"{name}_ms"]
                assert wire < free
                exposed = rate[f"{name}_exposed"]
                assert exposed < EXPOSED_SHARE.value * wire / free
                seen[line["model"], line["ranks"], name].append(exposed * free / wire)
    assert len(seen) == 8
    largest = max(map(statistics.median, seen.values()))
    assert largest == pytest.approx(EXPOSED_SHARE.value, abs=0.015)


def test_rates_of_one_h200_are_near_what_results_hold() -> None:
    lines = (ROOT / "scripts/results/passes.jsonl").read_text().splitlines()
    dense, added = [], []
    for line in map(json.loads, lines):
        dense.append(line["results"]["cublas"]["tflops"])
        if line["pass"].endswith("+32") and "add" in line["results"]:
            sizes = line["experts"] * line["hidden"] * line["width"]
            moved = 8 * sizes * (2 if line["pass"].startswith("w1") else 1)
            added.append(moved / line["results"]["add"]["ms"] / 1e9)
    assert round(max(dense)) == 800
    assert round(max(added), 2) == 4.23
    assert H200.matrix.value == pytest.approx(max(dense), rel=0.02)
    assert H200.memory.value == pytest.approx(max(added), rel=0.02)


def test_where_the_wire_is_longer_it_is_the_time() -> None:
    found = direction(sized("qwen30", 8192, 8, ffn=256), H200, "forward")
    assert found.wire > found.compute
    assert found.best == pytest.approx(found.wire)
    assert found.worst == pytest.approx(found.wire + EXPOSED_SHARE.value * found.compute)


def test_one_rank_communicates_nothing() -> None:
    for name in ("forward", "backward"):
        found = direction(sized("dsv3", 4096, 1), H200, name)
        assert found.wire == 0
        assert found.best == found.worst == found.compute


def test_rates_between_and_outside_what_was_measured() -> None:
    up, w1 = RATES["up"], RATES["w1+32"]
    assert rate("up", 1024) == up[1024]
    assert rate("w1+32", 724.077) == pytest.approx((w1[512] + w1[1024]) / 2, abs=0.1)
    assert rate("up", 100) == up[512]
    assert rate("up", 1e6) == up[4096]
    assert rate("w1+32", 256) == w1[512] / 2, "as long as with 512 rows: the same bytes"


@pytest.mark.parametrize(
    ("ranks", "domain", "expected"),
    [(1, 8, 1), (8, 8, 8), (64, 8, 8), (64, 72, 64), (72, 72, 8), (6, 8, 2), (4096, 72, 64)],
)
def test_expert_parallel_size_of_256_experts(ranks: int, domain: int, expected: int) -> None:
    assert expert_parallel(256, ranks, domain) == expected


def test_every_input_says_where_it_comes_from() -> None:
    for name, machine in MACHINES.items():
        for key, value in machine.inputs().items():
            assert value.source, (name, key)
            assert value.kind in ("measured", "datasheet", "derived", "assumed")
            assert value.kind != "measured" or name == "h200"
            assert value.kind != "assumed" or key == "processors"
    assert LINK_SHARE.kind == NETWORK_SHARE.kind == "assumed"
    for measured in (EXPOSED_SHARE, REST_TIMES, H200.matrix, H200.memory):
        file = re.search(r"scripts/results/\w+\.jsonl", measured.source)
        assert measured.kind == "measured"
        assert file
        assert (ROOT / file[0]).is_file()
    assert MACHINES["gb200"].matrix.value == pytest.approx(2500 * 790 / 989)
    assert MACHINES["h100"].memory.value == pytest.approx(3.35 * 4.3 / 4.8)


def test_a_step_is_its_layers_and_the_rest() -> None:
    model = read(ROOT / "configs/qwen3_30b_a3b.yaml")
    layer = sized("qwen30", 4096, 8)
    found = step(model, H200, 8)
    layers = 48 * sum(direction(layer, H200, name).best for name in ("forward", "backward"))
    assert found.best == pytest.approx(layers + found.rest)
    assert found.rest == pytest.approx(3 * 4096 * model.rest_flops() / 790e9)
    assert found.tokens_per_s == pytest.approx(1e3 * 4096 / found.best)
