"""The plan's bytes of a rank beside what one H200 held at its peak.

A layer: what its forward keeps, and the peak of forward and backward, within 1 %. A training:
state, workspace and what the MoE layers keep are 75 to 100 % of the peak; the rest of it is
activations of attention, norms and the loss, which no plan counts.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mok_megatron.limits import PART_COLUMNS
from mok_megatron.plan.estimate import layer_of
from mok_megatron.plan.layer import Layer
from mok_megatron.plan.machines import LAYERS_COMMIT
from mok_megatron.plan.model import read, state_bytes

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "scripts" / "results"
TOLERANCE, LEAST = 0.01, 0.75


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (RESULTS / name).read_text().splitlines()]


LAYERS = [line for line in _lines("layer.jsonl") if line["commit"] == LAYERS_COMMIT]


@pytest.mark.parametrize("line", LAYERS, ids=lambda line: line["name"])
def test_a_layer_holds_what_is_planned(line: dict[str, Any]) -> None:
    shape = {{"experts": "num_experts"}.get(k, k): v for k, v in line["shape"].items()}
    layer = Layer(**shape)
    kept, peak = line["arms"]["mok"]["bytes"]
    assert layer.context_bytes() == pytest.approx(kept, rel=TOLERANCE)
    outside = 2 * 2 * layer.tokens * layer.hidden + 4 * layer.rows  # y, dx; dprob
    planned = layer.context_bytes() + layer.workspace_bytes() + outside
    assert planned == pytest.approx(peak, rel=TOLERANCE)


def test_there_are_layers_with_and_without_a_shared_expert() -> None:
    assert len(LAYERS) == 8
    assert {line["shape"]["shared_ffn"] > 0 for line in LAYERS} == {True, False}


@pytest.mark.parametrize("line", _lines("throughput.jsonl"), ids=lambda line: line["name"])
def test_a_training_holds_what_is_planned_and_its_other_activations(line: dict[str, Any]) -> None:
    model, run = read(ROOT / "configs" / f"{line['name']}.yaml"), line["dispatchers"]["mok"]
    assert (run["ranks"], model.pipeline) == (1, 1)
    layer = layer_of(model, 1)
    (count,) = model.ranks_of_pipeline()
    planned = state_bytes(count, 1, 1, 1) + layer.workspace_bytes()
    planned += model.moe_layers * layer.context_bytes()
    assert LEAST < planned / run["peak_bytes"] < 1
    assert run["peak_bytes"] < line["dispatchers"]["alltoall"]["peak_bytes"]


def test_the_width_of_a_partial_sum_is_the_headers() -> None:
    header = (ROOT / "csrc" / "arguments.h").read_text()
    assert re.findall(r"constexpr int kPartColumns = (\d+);", header) == [str(PART_COLUMNS)]
