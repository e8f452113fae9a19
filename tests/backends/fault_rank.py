"""One rank of a fault trial: steps of two layers, of which one call goes wrong.

    python -m tests.backends.fault_rank '{"folder": …}'        scripts/fault_trials.py starts it

A step is two forwards, their backwards in the opposite order, and an optimizer's step that counts
itself in a parameter. What ends the rank is written to the trial's folder.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mok_megatron.backends import calls, choose, workspace
from mok_megatron.contract import Backend, MoEShape, WeightGradients, Weights
from tests.batches import Batch, Case, places

KINDS = ("killed", "stopped", "skips", "flags", "counter", "slow")
PLACES = ("first", "forward", "backward", "anywhere")
LAYERS, CALLS = 2, 4  # calls a step
STEPS, SLOW_STEPS = 400, 6
CASE = Case(
    seed=11,
    hidden=64,
    ffn=64,
    shared_ffn=0,
    num_experts=12,
    top_k=3,
    tokens=(20, 9, 33),
    load="skewed",
    dtype=torch.bfloat16,
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """limit: seconds of the group; deadline: of --mok-deadline. At call `at`, which counts from 0,
    or after `pause` seconds of the second step if that is not None, rank `culprit` goes wrong."""

    folder: str
    rank: int
    backend: str
    kind: str
    culprit: int
    at: int
    pause: float | None
    limit: float
    deadline: int

    @property
    def steps(self) -> int:
        return SLOW_STEPS if self.kind == "slow" else STEPS


def drawn(place: str, kind: str, draw: random.Random) -> tuple[int, float | None]:
    """Which call, or which moment."""
    step = draw.randrange(1, 4)
    if place == "first":
        return 0, None
    if place == "forward":
        return CALLS * step + draw.randrange(0, 2), None
    if place == "backward":
        return CALLS * step + draw.randrange(2, 4), None
    if kind in ("killed", "stopped"):
        return -1, draw.uniform(0.0, 0.5)
    return draw.randrange(CALLS, SLOW_STEPS * CALLS), None


class Rank:
    """This process."""

    def __init__(self, trial: Trial, group: Any) -> None:
        self.trial, self.group, self.done = trial, group, 0
        self.wrong = trial.rank == trial.culprit
        device = torch.device("cuda", 0) if trial.backend == "cuda" else torch.device("cpu")
        batch, self.shape = Batch.of(CASE).to(device.type), CASE.shape(group.size())
        mine = batch.tokens(trial.rank, group.size())
        self.x_TH, self.dy_TH = batch.x_TH[mine].contiguous(), batch.dy_TH[mine].contiguous()
        self.choices = batch.expert_TK[mine].contiguous(), batch.prob_TK[mine].contiguous()
        self.weights = batch.weights(trial.rank, group.size())
        self.device = device
        self.layers = [self.layer(self.shape) for _ in range(LAYERS)]
        self.parameter = torch.nn.Parameter(torch.zeros(1, device=device))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)

    def layer(self, shape: MoEShape) -> Backend:
        limits = {"max_tokens": 40, "row_budget": 3.0, "deadline": self.trial.deadline}
        return choose(self.trial.backend, shape, self.device, self.group, **limits)[0]

    def run(self) -> None:
        """All steps, each in order: forward 0, forward 1, backward 1, backward 0."""
        for step in range(self.trial.steps):
            if self.wrong and self.trial.pause is not None and step == 1:
                threading.Timer(self.trial.pause, self._end).start()
            contexts: dict[int, Any] = {}
            for place, layer in enumerate((0, 1, 1, 0)):
                self._call(CALLS * step + place, layer, contexts, forward=place < LAYERS)
            self.parameter.grad = -torch.ones_like(self.parameter)
            self.optimizer.step()
            self.done += 1

    def _call(self, number: int, layer: int, contexts: dict[int, Any], *, forward: bool) -> None:
        backend, weights = self.layers[layer], self.weights
        if self.wrong and self.trial.pause is None and number == self.trial.at:
            if self.trial.kind in ("killed", "stopped"):
                self._end()
            self._say_injected()
            if self.trial.kind == "skips":
                if forward:  # so that its backward has a context
                    contexts[layer] = None
                return
            if self.trial.kind == "slow":
                time.sleep(3 * self.trial.deadline)
            elif self.trial.kind == "counter":
                self._corrupt(backend)
            elif self.trial.kind == "flags":
                backend, weights = self._other()
                forward = True
        if forward:
            _, contexts[layer] = backend.forward(self.x_TH, *self.choices, weights)
        elif contexts[layer] is not None:
            into = self._places(weights)
            backend.backward(contexts[layer], self.dy_TH, weights, into)

    def _places(self, weights: Weights) -> WeightGradients:
        return places(weights, self.shape, 0.0, torch.float32)

    def _other(self) -> tuple[Backend, Weights]:
        """A layer as other flags would make it: half the width of an expert."""
        shape = replace(self.shape, ffn=self.shape.ffn // 2, hidden=self.shape.hidden)
        if self.trial.backend == "cuda":  # of which the kernels have multiples of 64
            shape = replace(self.shape, ffn=2 * self.shape.ffn)
        make = torch.ones if shape.ffn > self.shape.ffn else torch.zeros

        def of(count: int, *size: int) -> tuple[torch.Tensor, ...]:
            return tuple(make(*size, dtype=CASE.dtype, device=self.device) for _ in range(count))

        local = shape.local_experts
        return self.layer(shape), Weights(
            w1=of(local, 2 * shape.ffn, shape.hidden), w2=of(local, shape.hidden, shape.ffn)
        )

    def _corrupt(self, backend: Backend) -> None:
        """The number of the last call, as the protocol keeps it."""
        if self.trial.backend == "reference":
            calls.place_of(self.group).calls += 6
            return
        space = backend._ranks._given  # type: ignore[attr-defined]
        if space is None:  # before the first call there is no workspace
            space = workspace.of(self.group, self.shape, self.device, 40), 0
        control = workspace.parts(self.shape, space[0].limits.tokens)[1]
        space[0].memory[control : control + 4].view(torch.int32).add_(6)

    def _end(self) -> None:
        self._say_injected()
        os.kill(os.getpid(), signal.SIGKILL if self.trial.kind == "killed" else signal.SIGSTOP)

    def _say_injected(self) -> None:
        _write(Path(self.trial.folder) / "injected.json", {"time": time.time()})


def _write(path: Path, words: dict[str, Any]) -> None:
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(words))
    draft.rename(path)


def _value(read: Callable[[], float]) -> float | None:
    """None where the device's context has ended."""
    try:
        return read()
    except RuntimeError:
        return None


def main() -> int:
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # where it is, for who waits for it
    trial = Trial(**json.loads(sys.argv[1]))
    folder, world = Path(trial.folder), len(CASE.tokens)
    torch.set_num_threads(1)
    if trial.backend == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), world),
        rank=trial.rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=trial.limit))
    rank, error = Rank(trial, group), None
    try:
        rank.run()
    except Exception as raised:
        error = raised
    words = {
        "time": time.time(),
        "error": f"{type(error).__name__}: {error}" if error is not None else None,
        "done": rank.done,
        "parameter": _value(rank.parameter.item),
    }
    _write(folder / f"rank-{trial.rank}.json", words)
    return 0 if error is None else 1


if __name__ == "__main__":
    sys.exit(main())
