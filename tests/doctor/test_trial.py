"""The trial passes a right backend and catches a wrong one."""

from __future__ import annotations

from typing import Any

import torch

from mok_megatron.doctor import trial
from mok_megatron.doctor.surroundings import TOLERANCE


class Wrong:
    """The reference with one row astray, or with a value that is not a number."""

    def __init__(self, how: str) -> None:
        self._right = trial.choose("reference", torch.device("cpu"))
        self.how, self.name, self.shape = how, "reference", self._right.shape

    def forward(self, x: Any, expert: Any, prob: Any, weights: Any) -> Any:
        y, context = self._right.forward(x, expert, prob, weights)
        if self.how == "astray":
            y[3] = y[4]
        return y, context

    def backward(self, context: Any, dy: Any, weights: Any, into: Any) -> Any:
        gradients = self._right.backward(context, dy, weights, into)
        if self.how == "nan":
            gradients.dx_TH[0, 0] = float("nan")
        if self.how == "dw":
            into.w2[5].zero_()
        return gradients


def test_the_trial_passes_the_reference_and_catches_a_wrong_backend() -> None:
    cpu, tolerance = torch.device("cpu"), TOLERANCE
    assert trial.run("reference", cpu)["error"] < tolerance["reference"] / 100
    for how in ("astray", "nan", "dw"):
        assert trial.worst_error(Wrong(how), cpu) > 2 * tolerance["cuda"], how  # type: ignore[arg-type]
