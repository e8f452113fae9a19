"""--determinism: it sees one bit in one call, one process that differs, and calls not made."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from mok_megatron.doctor import __main__ as command
from mok_megatron.doctor import determinism, trial
from mok_megatron.doctor.determinism import PROCESSES, REPEATS, RESULTS, Repeats
from tests.doctor.machines import CPU_ONLY

CPU = torch.device("cpu")


def test_the_command_repeats_the_reference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "gather", lambda limit: CPU_ONLY)
    assert command.main(["--determinism", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["determinism"]
    assert found["same"]
    assert found["backend"] == "reference"
    assert found["calls"] == REPEATS * PROCESSES >= 300
    assert all(len(found["hashes"][name]) == 1 for name in RESULTS)
    assert len({hashes[0] for hashes in found["hashes"].values()}) == len(RESULTS)


class Wavering:
    """The reference, but the third call has one other bit in one result."""

    def __init__(self, result: str) -> None:
        self._right = trial.choose("reference", CPU)
        self.result, self.calls = result, 0
        self.name, self.shape = "reference", self._right.shape

    def _waver(self, result: str, value: torch.Tensor) -> None:
        if result == self.result and self.calls == 3:
            value.view(torch.int32).flatten()[5] ^= 1

    def forward(self, *arguments: Any) -> Any:
        self.calls += 1
        y, context = self._right.forward(*arguments)
        self._waver("y", y)
        return y, context

    def backward(self, context: Any, dy: Any, weights: Any, into: Any) -> Any:
        gradients = self._right.backward(context, dy, weights, into)
        self._waver("dx", gradients.dx_TH)
        self._waver("dprob", gradients.dprob_TK)
        self._waver("dW", into.w2[4])
        return gradients


@pytest.mark.parametrize("result", RESULTS)
def test_one_bit_in_one_call_is_seen(result: str) -> None:
    hashes = determinism.hashes_of(Wavering(result), CPU, 4)  # type: ignore[arg-type]
    assert {name: len(found) for name, found in hashes.items()} == {
        name: 1 + (name == result) for name in RESULTS
    }


def test_a_process_that_differs_or_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [
        ({"calls": REPEATS, "hashes": {name: [f"{name}1"] for name in RESULTS}}, {}),
        ({"calls": REPEATS, "hashes": {name: [f"{name}1"] for name in RESULTS}}, {}),
        ({"calls": REPEATS, "hashes": {name: [f"{name}2"] for name in RESULTS}}, {}),
    ]
    monkeypatch.setattr(command, "gather", lambda limit: CPU_ONLY)
    for last, words in (
        (answers[2], "2 different results"),
        (
            ({}, {"repeating a layer": "died of signal SIGSEGV"}),
            "process 2, repeating a layer: died",
        ),
    ):
        left = iter([*answers[:2], last])
        monkeypatch.setattr(determinism, "ask", lambda probe, limit, left=left: next(left))
        assert command.main(["--determinism"]) == 1
        text = capsys.readouterr().out
        assert words in text
        assert text.rstrip().endswith("NOT all are equal.")
    whole = Repeats(backend="cuda", calls=299, hashes={n: ["a"] for n in RESULTS}, faults={})
    assert not whole.same, "a call was not made"
