"""scripts/run_upstream_tests.py on a checkout of five tests with known outcomes."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import run_upstream_tests as upstream

pytestmark = pytest.mark.slow

UPSTREAM = """
import os

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import random
from megatron.core.transformer import TransformerConfig

SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}


def layer(**more):
    if not torch.distributed.is_initialized():
        os.environ.update(MASTER_ADDR="127.0.0.1", WORLD_SIZE="1", RANK="0")
        torch.distributed.init_process_group(backend="nccl", device_id=None)
        parallel_state.initialize_model_parallel()
        random.model_parallel_cuda_manual_seed(1)
    fields = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_moe_experts": 2}
    fields |= {"moe_ffn_hidden_size": 16, "moe_token_dispatcher_type": "alltoall"}
    config = TransformerConfig(**fields, add_bias_linear=False, **more)
    return get_moe_module_spec(use_te=False, num_experts=2)(config)


def forward(moe):
    assert moe(torch.randn(4, 1, 16, device="cuda"))[0].shape == (4, 1, 16)


def test_swiglu():
    forward(layer(**SWIGLU))


def test_gelu():
    forward(layer())


def test_that_it_is_alltoall():
    assert layer(**SWIGLU).config.moe_token_dispatcher_type == "alltoall"


def test_broken():
    raise RuntimeError("always")


@pytest.mark.skip(reason="never")
def test_skipped():
    pass
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    tests = folder / upstream.MOE_TESTS
    tests.mkdir(parents=True)
    (tests / "test_some.py").write_text(UPSTREAM)
    return folder


def outcomes(output: Path, dispatcher: str) -> dict[str, tuple[str, int]]:
    records = upstream.read([output / f"{dispatcher}.jsonl"])
    return {name.partition("::")[2]: (r.outcome, r.layers) for name, r in records.items()}


def test_both_runs_and_what_was_lost(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(checkout), "--device", "cpu", "--output", str(tmp_path), "--deadline", "200"]
    assert upstream.main(arguments) == 1
    out = capsys.readouterr().out
    log = (tmp_path / "mok.log").read_text()
    assert outcomes(tmp_path, "alltoall") == {
        "test_swiglu": ("passed", 0),
        "test_gelu": ("passed", 0),
        "test_that_it_is_alltoall": ("passed", 0),
        "test_broken": ("failed", 0),
        "test_skipped": ("skipped", 0),
    }, log
    assert outcomes(tmp_path, "mok") == {
        "test_swiglu": ("passed", 1),
        "test_gelu": ("passed", 0),
        "test_that_it_is_alltoall": ("failed", 0),
        "test_broken": ("failed", 0),
        "test_skipped": ("skipped", 0),
    }, log
    assert "stayed with alltoall in 1 tests: mok: experts must be SwiGLU" in out
    assert "test_that_it_is_alltoall: failed: AssertionError" in out
    assert out.splitlines()[-1] == "mok lost 1 of 3"
    assert re.search(r"^all +3 +1 +0 +1 +2 +2 +0 +1  1 of 1 passed$", out, re.MULTILINE)


def test_a_run_that_does_not_end_is_ended_and_told(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(checkout), "--device", "cpu", "--output", str(tmp_path), "--deadline", "0.5"]
    assert upstream.main(arguments) == upstream.WRONG_INPUT
    out = capsys.readouterr().out
    assert "mok: the alltoall run must reach its end, got no end within 0.5 s" in out
    assert "mok: some tests must pass with alltoall, got none" in out


def test_what_is_not_a_checkout_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert upstream.main([str(tmp_path)]) == upstream.WRONG_INPUT
    assert "mok: the checkout must have the tests" in capsys.readouterr().err


def record(test: str, outcome: str, **more: Any) -> upstream.Record:
    fields = {"message": "", "layers": 0, "refused": []} | more
    return upstream.Record(test=test, outcome=outcome, **fields)


def test_of_several_ranks_the_worst_counts(tmp_path: Path) -> None:
    for rank, outcome in enumerate(("skipped", "failed", "passed")):
        line = json.dumps(asdict(record("a.py::t", outcome)))
        (tmp_path / f"mok.jsonl.{rank}").write_text(line + "\n")
    assert upstream.read(sorted(tmp_path.iterdir()))["a.py::t"].outcome == "failed"


def test_a_test_that_was_not_reached_is_lost() -> None:
    alltoall = {"a.py::t": record("a.py::t", "passed"), "a.py::u": record("a.py::u", "failed")}
    assert upstream.lost(alltoall, {}) == ["a.py::t: not reached"]
    mok = {"a.py::t": record("a.py::t", "passed"), "a.py::u": record("a.py::u", "passed")}
    assert "passed with mok only: a.py::u" in upstream.compare(alltoall, mok)
