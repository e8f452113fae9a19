"""The flag table names tests that exist, and runs that have what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from mok_megatron.config import ARGUMENT_RULES, RULES
from tests import (
    config_rows,
    test_engine_cuda,
    test_gradients,
    test_launches_cuda,
    test_layer,
    test_parallelism,
    test_training,
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
