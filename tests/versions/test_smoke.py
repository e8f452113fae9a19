"""What must hold on every Megatron-Core that mok knows, small enough to run on each of them in CI.

The other tests are for the version that is installed. To run these on another one, put it first:

    pip install --no-deps --target FOLDER megatron-core==0.18.2
    PYTHONPATH=FOLDER pytest tests/versions
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests import tiny_megatron as tiny
from tests.ranks import run_ranks

STEPS = 3
MODELS = {"deepseek-v3": tiny.DEEPSEEK_V3, "qwen3": tiny.QWEN3}
DISPATCHERS = ("alltoall", "mok")


def _everything_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    from tests import checkpoints

    _stand_in_for_the_tracker()
    tiny.set_up(expert_parallel=world)
    found: dict[str, Any] = {"flags": _flags(), "refusal": _refusal()}
    for name, base in MODELS.items():
        for dispatcher in DISPATCHERS:
            training = tiny.Training(dispatcher=dispatcher, base=base)
            assert bool(training.mok_layers()) == (dispatcher == "mok")
            found[f"{name}-{dispatcher}"] = training.run(STEPS)
            path = Path(folder, f"{name}-{dispatcher}")
            checkpoints.save(training, path)
            reader = tiny.Training(dispatcher="mok", base=base)
            checkpoints.load(reader, path)
            reader.seek(STEPS)
            found[f"{name}-{dispatcher}->mok"] = reader.run(STEPS)
    for name, base in MODELS.items():  # after the trainings, which give the losses their scale
        found[f"{name}-layer"] = _error_of_a_layer(base, rank)
    return found


def _flags() -> tuple[str, str]:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = ["--moe-token-dispatcher-type", "mok", "--mok-backend", "reference"]
    arguments = parser.parse_args(flags)
    parser.format_help()
    return arguments.moe_token_dispatcher_type, arguments.mok_backend


def _refusal() -> str:
    with pytest.raises(ValueError, match=r"^mok: ") as refused:
        tiny.config("mok", tiny.BASE, moe_router_topk=1, moe_apply_probs_on_input=True)
    return str(refused.value)


def _error_of_a_layer(base: dict[str, Any], rank: int) -> float:
    """The larger relative difference to alltoall, of output and input gradient."""
    results = []
    for dispatcher in DISPATCHERS:
        torch.manual_seed(rank)
        x_SBH = torch.randn(16, 2, base["hidden_size"], requires_grad=True)
        y_SBH = tiny.moe_layer(dispatcher, base)(x_SBH)[0]
        y_SBH.square().sum().backward()
        results.append((y_SBH.detach(), x_SBH.grad))
    return max(((b - a).norm() / a.norm()).item() for a, b in zip(*results, strict=True))


def _stand_in_for_the_tracker() -> None:
    """0.17 keeps its count of layers elsewhere; it is the same for both dispatchers."""
    name = "megatron.core.transformer.moe.moe_logging"
    if importlib.util.find_spec(name) is None:
        module: Any = ModuleType(name)
        module.destroy_moe_metrics_tracker = lambda: None
        sys.modules[name] = module


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks saw."""
    return run_ranks(2, _everything_rank, str(tmp_path_factory.mktemp("smoke")), deadline=200)


def test_the_flag_is_there_and_its_rules(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert of_rank["flags"] == ("mok", "reference")
        assert ", got moe_apply_probs_on_input=True; drop" in of_rank["refusal"]


@pytest.mark.parametrize("model", MODELS)
def test_a_layer_equals_alltoall(model: str, found: list[dict[str, Any]]) -> None:
    assert max(of_rank[f"{model}-layer"] for of_rank in found) <= 1e-6


@pytest.mark.parametrize("model", MODELS)
def test_training_equals_alltoall(model: str, found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        mok, alltoall = (of_rank[f"{model}-{dispatcher}"] for dispatcher in DISPATCHERS[::-1])
        for (loss, norm), (want_loss, want_norm) in zip(mok, alltoall, strict=True):
            assert loss == pytest.approx(want_loss, rel=2e-6)
            assert norm == pytest.approx(want_norm, rel=2e-5)
        assert mok[-1][0] < mok[0][0]


@pytest.mark.parametrize("model", MODELS)
def test_either_checkpoint_continues_on_mok(model: str, found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        ours, theirs = (of_rank[f"{model}-{writer}->mok"] for writer in DISPATCHERS[::-1])
        for (loss, _), (want_loss, _) in zip(ours, theirs, strict=True):
            assert loss == pytest.approx(want_loss, rel=2e-6)
        assert ours[0][0] < of_rank[f"{model}-mok"][0][0]
