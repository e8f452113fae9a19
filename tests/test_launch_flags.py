"""The launches of test_launches_cuda.py, as far as a machine without a GPU can judge them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.judged_launches import Answer, Question, judge
from tests.test_launches_cuda import COMMON, MODELS, SELECTIVE, VARIANTS

MOK = ("--moe-token-dispatcher-type", "mok")
# Fields that a variant is about, as the configuration has them.
FIELDS: dict[str, dict[str, Any]] = {
    "router-fusion": {"moe_router_fusion": True, "deterministic_mode": False},
    "router-fusion-deepseek-v3": {"moe_router_fusion": True, "deterministic_mode": False},
    "attention-graph-local": {
        "cuda_graph_impl": "local",
        "cuda_graph_modules": ["attn"],
        "recompute_modules": ["moe", "layernorm"],
        "deterministic_mode": True,
    },
    "attention-graph-engine": {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": ["attn"],
        "recompute_modules": ["moe", "layernorm"],
        "deterministic_mode": True,
    },
    "attention-offload": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["core_attn"],
        "recompute_granularity": None,
    },
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    questions = {
        name: Question(
            gpus=1,
            words=(*variant.words(), *MOK),
            environment=variant.environment,
            fields=(*FIELDS[name],),
        )
        for name, variant in VARIANTS.items()
    }
    questions |= {
        model: Question(gpus=1, words=(*COMMON.split(), *flags.split(), *MOK))
        for model, flags in MODELS.items()
    }
    return judge(questions)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_asks_for_what_it_is_called(name: str, answers: dict[str, Answer]) -> None:
    answer = answers[name]
    assert answer.refusals == []
    found = {key: _plain(value) for key, value in answer.fields.items()}
    assert found == FIELDS[name]


@pytest.mark.parametrize("model", MODELS)
def test_a_launch_is_accepted(model: str, answers: dict[str, Answer]) -> None:
    assert answers[model].refusals == []
    assert {"--moe-grouped-gemm", "--moe-permute-fusion"} <= {*answers[model].anyway}


def test_an_eager_run_beside_a_graph_has_its_recompute() -> None:
    for variant in VARIANTS.values():
        if variant.replays:
            assert variant.flags.startswith(SELECTIVE)


def _plain(value: Any) -> Any:
    """Enums by their names."""
    return [getattr(v, "name", v) for v in value] if isinstance(value, list) else value
