"""The flag table names tests that exist, and runs that have what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer import TransformerConfig

from mok_megatron.config import ARGUMENT_RULES, RULES
from tests import (
    config_rows,
    test_engine_cuda,
    test_gradients,
    test_launches_cuda,
    test_layer,
    test_parallelism,
    test_training,
    tiny_megatron,
)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import flag_table  # noqa: E402

CASES = {
    "layer": set(test_layer.CASES),
    "training": set(test_training.CASES),
    "gradients": {case.name for case in test_gradients.CASES},
    "parallelism": {layout.name for layout in test_parallelism.LAYOUTS},
    "engine": set(test_engine_cuda.CASES),
    "launch": set(test_launches_cuda.MODELS),
}


# Flags whose field in a test's settings has another name, or that all cases of a test have.
OTHER_NAMES = {
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "ckpt_format": "torch_dist",
    "transformer_impl": "engine",
}


def _fields(flags: str) -> dict[str, Any]:
    """Of a row that is written as flags."""
    found: dict[str, Any] = {}
    for flag in flags.split(", "):
        name, _, value = flag.removeprefix("--").partition(" ")
        key = name.replace("-", "_")
        number = float(value) if re.fullmatch(r"[\d.]+", value) else True
        found[OTHER_NAMES.get(key, key)] = number
    return found


def _settings(test: str, case: str) -> dict[str, Any]:
    """All that a case of a test sets, wherever it sets it."""
    if test == "layer":
        base, overrides = test_layer.CASES[case]
        return base | overrides
    if test == "gradients":
        (found,) = (c for c in test_gradients.CASES if c.name == case)
        options: dict[str, Any] = {"base": tiny_megatron.DEEPSEEK_V3, **found.training}
        groups, overrides = {}, found.overrides
    elif test == "parallelism":
        (layout,) = (one for one in test_parallelism.LAYOUTS if one.name == case)
        options, groups, overrides = layout.training, layout.groups, layout.overrides
    elif test == "engine":
        of_engine = test_engine_cuda.CASES[case]
        options = {"base": of_engine.base, "engine": True, **test_engine_cuda.SHARDED}
        groups, overrides = of_engine.groups, of_engine.overrides | of_engine.mok
    else:
        options, groups, overrides = test_training.CASES[case], {}, {}
    settings = {**options["base"], **options.get("overrides", {}), **overrides, **groups}
    for part in ("ddp", "optimizer"):
        settings |= options.get(part, {})
    settings |= {key: value for key, value in options.items() if isinstance(value, bool)}
    # What tiny_megatron.config makes of the groups.
    settings["sequence_parallel"] = groups.get("tensor_model_parallel_size", 1) > 1
    settings["expert_model_parallel_size"] = groups.get("expert_parallel", 1)
    settings["expert_tensor_parallel_size"] = 1
    return settings


def _has(settings: dict[str, Any], key: str, value: Any) -> bool:
    """The value, or all of a list, or another number that is not Megatron's default either."""
    missing = object()
    found = settings.get(key, missing)
    if isinstance(value, list) and isinstance(found, list):
        return {*value} <= {*found} or (len(found) == len(value) and type(found[0]) is float)
    if isinstance(value, int | float) and not isinstance(value, bool):
        default = getattr(TransformerConfig, key, None)
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        return is_number and (found == value or found != default)
    return bool(found == value)


def test_every_test_that_it_names_is_collected() -> None:
    named = {test for row in flag_table.rows() for test in row.tests}
    files = sorted({test.partition("::")[0] for test in named})
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", *files]
    result = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout
    assert sorted(named - set(result.stdout.splitlines())) == []


def test_every_case_that_it_names_is_there() -> None:
    works = {row.id for row in config_rows.WORKS}
    assert flag_table.RUNS.keys() <= works
    assert works >= flag_table.IDLE
    for runs in (*flag_table.RUNS.values(), *flag_table.OF_TRAINING.values()):
        for test, case in runs:
            assert case in CASES.get(test, {case})


RUNS = [
    (row.fields, test, case)
    for row in config_rows.WORKS
    for test, case in flag_table.RUNS.get(row.id, ())
] + [
    (_fields(flags), test, case)
    for flags, runs in flag_table.OF_TRAINING.items()
    for test, case in runs
]


@pytest.mark.parametrize(("fields", "test", "case"), RUNS, ids=str)
def test_a_run_has_what_it_is_named_for(fields: dict[str, Any], test: str, case: str) -> None:
    if test in CASES and test != "launch":
        settings = _settings(test, case)
        assert {key: value for key, value in fields.items() if not _has(settings, key, value)} == {}
        return
    # A launch says it in words; a test without cases, somewhere in its file.
    text = (ROOT / flag_table.COMPARED[test].partition("::")[0]).read_text()
    words = (
        test_launches_cuda.COMMON + test_launches_cuda.MODELS[case] if test == "launch" else text
    )
    for key in fields:
        assert key in words or f"--{key.replace('_', '-')}" in words


def test_a_run_without_it_is_told() -> None:
    settings = _settings("layer", "qwen3")
    assert _has(settings, "moe_router_topk", 2)
    for key, value in (
        ("moe_router_topk", "2"),
        ("moe_router_dtype", "fp64"),
        ("variable_seq_lengths", True),
        ("recompute_modules", ["moe"]),
        ("moe_z_loss_coeff", None),
        ("moe_shared_expert_intermediate_size", 32),
        ("moe_router_topk_scaling_factor", 2.5),
    ):
        assert not _has(settings, key, value), key


def test_every_rule_is_a_row() -> None:
    refused = [row for row in flag_table.rows() if row.verdict == "refused"]
    rules = (*RULES, *ARGUMENT_RULES)
    assert [row.why for row in refused] == [f"{rule.must}; {rule.remedy}" for rule in rules]
    assert all(row.tests for row in refused)


def test_flags_are_megatrons() -> None:
    by_test = {row.tests[0]: row.flags for row in flag_table.rows()}
    assert by_test["tests/test_config.py::test_works[expert-parallel]"] == (
        "--expert-model-parallel-size 4"
    )
    assert "without --disable-bias-linear" in by_test.values()
    table = flag_table.markdown(flag_table.rows()).splitlines()
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 4 for line in table)
