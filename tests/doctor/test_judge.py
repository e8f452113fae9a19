"""Which backend is judged, and what a whole machine is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mok_megatron.doctor.finding import Finding
from mok_megatron.doctor.judge import CHECKS, examine, judged
from mok_megatron.doctor.machine import Machine, words
from tests.doctor.machines import CPU_ONLY, HEALTHY, cuinit, first, worst


def test_a_healthy_machine_has_nothing_to_complain_of() -> None:
    findings = examine(HEALTHY, "cuda")
    assert {f.name for f in findings if f.level in ("warning", "error")} == set()
    assert [f.name for f in findings if f.level == "info"] == ["multicast"]
    assert set(worst(findings)) == set(CHECKS)


def test_the_reference_runs_where_cuda_cannot() -> None:
    for machine in (CPU_ONLY, replace(HEALTHY, **first(mig=True)), Machine(**cuinit(802))):
        levels = {backend: worst(examine(machine, backend)) for backend in ("cuda", "reference")}
        assert "error" in levels["cuda"].values()
        assert "error" not in levels["reference"].values()


def test_what_nobody_found_out_is_never_fine() -> None:
    found = worst(examine(replace(Machine(), devices=HEALTHY.devices), "cuda"))
    for name in ("torch", "megatron", "driver", "library", "backend", "peers", "self-test"):
        assert found[name] == "error"
    assert found["symmetric memory"] == "error"


def test_the_judged_backend() -> None:
    assert judged("auto", HEALTHY) == ("cuda", "auto: 2 GPUs visible")
    assert judged("auto", CPU_ONLY) == ("reference", "auto: no GPU is here")
    assert judged("auto", replace(CPU_ONLY, device_nodes=1))[0] == "cuda"
    hidden = replace(CPU_ONLY, device_nodes=1, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert judged("auto", hidden)[0] == "reference"
    assert judged("reference", HEALTHY) == ("reference", "asked for")


def test_a_check_that_fails_becomes_its_own_finding() -> None:
    def fails(m: Machine, backend: str) -> Any:
        yield "ok", "until here", ""
        raise KeyError("nothing\nhere")

    first, second = examine(HEALTHY, "cuda", {"odd": fails})
    assert first == Finding(name="odd", level="ok", cause="until here")
    assert (second.name, second.level) == ("odd", "error")
    assert "this check failed: KeyError" in second.cause


def test_words_of_an_exception() -> None:
    assert words(ValueError("a\nb")) == "ValueError: a"
    assert words(TimeoutError()) == "TimeoutError"
    assert words(RuntimeError("mok: must; do")) == "mok: must; do"
