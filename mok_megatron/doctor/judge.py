"""From a machine and a wish to the findings."""

from __future__ import annotations

from collections.abc import Mapping

from mok_megatron.doctor.finding import REPORT, Check, Finding
from mok_megatron.doctor.machine import Machine, words
from mok_megatron.doctor.sharing import SHARING
from mok_megatron.doctor.software import SOFTWARE
from mok_megatron.doctor.surroundings import SURROUNDINGS

CHECKS: Mapping[str, Check] = {**SOFTWARE, **SHARING, **SURROUNDINGS}  # in the order of the answer
_HIDDEN = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES


def judged(asked: str, m: Machine) -> tuple[str, str]:
    """The backend that the machine is judged for, and why: auto is cuda where there is a GPU."""
    if asked != "auto":
        return asked, "asked for"
    if m.devices:
        return "cuda", f"auto: {len(m.devices)} GPU{'s' * (len(m.devices) > 1)} visible"
    if m.environment.get("CUDA_VISIBLE_DEVICES") in _HIDDEN:
        return "reference", "auto: CUDA_VISIBLE_DEVICES hides every GPU"
    if m.device_nodes:
        return "cuda", f"auto: /dev has {m.device_nodes} NVIDIA GPU{'s' * (m.device_nodes > 1)}"
    return "reference", "auto: no GPU is here"


def examine(m: Machine, backend: str, checks: Mapping[str, Check] = CHECKS) -> list[Finding]:
    """Every finding about `m` when it is to run `backend` (cuda or reference); never raises."""
    findings = []
    for name, check in checks.items():
        try:
            for level, cause, remedy in check(m, backend):
                findings.append(Finding(name=name, level=level, cause=cause, remedy=remedy))
        except Exception as error:
            cause = f"this check failed: {words(error)}"
            findings.append(Finding(name=name, level="error", cause=cause, remedy=REPORT))
    return findings
