"""scripts/train.py with a clock in it: what compare_throughput.py starts, once for each dispatcher.

The same training, ranks, terminal and endings. The rank that reports also writes throughput.jsonl
beside losses.jsonl, a line for each iteration: the time of Megatron's train_step between two waits
for the device, and inside it the time of the MoE layers, router included. A layer's forward lasts
from its call to its return, its backward from the gradient of its output to that of its input; on a
GPU these are events in the stream, on a CPU the wall clock. Peak memory is that rank's: allocated
device memory, on a CPU the process's resident memory. The first line of a start says how long that
took, from the rank's process to the end of its first iteration.

`--without-checkpoints`, anywhere on the command line, trains without saving: for models whose
checkpoints would fill the disk.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import train
import train_worker
from train_config import RunConfig
from train_log import read_lines, seconds_since_birth
from train_worker import end_with_parent

WITHOUT = "--without-checkpoints"
FILE = "throughput.jsonl"


def main(tokens: list[str]) -> int:
    """train.main, as the parent of the ranks or as one of them."""
    train.__file__ = __file__  # what it starts as ranks
    if "--launched" in tokens or "WORLD_SIZE" in os.environ:
        if WITHOUT in tokens:
            train_worker._complete = _without_checkpoints(train_worker._complete)
        tokens = [token for token in tokens if token != WITHOUT]
        train_worker._watch = _with_clock(train_worker._watch)
    return train.main(tokens)


def _without_checkpoints(complete: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    def wrapped(config: RunConfig, folder: Path) -> RunConfig:
        done = complete(config, folder)
        kept = {k: v for k, v in done.arguments.items() if k not in ("save", "load")}
        return dataclasses.replace(done, arguments=kept)

    return wrapped


def _with_clock(watch: Callable[..., None]) -> Callable[..., None]:
    """train_worker._watch, which the reporting rank calls before it trains, and our clock."""

    def wrapped(training: Any, log: Any, args: Any) -> None:
        watch(training, log, args)
        clock = Clock(log.path.with_name(FILE), training.num_floating_point_operations, args)
        training.train_step = clock.around(training.train_step)

    return wrapped


class Clock:
    """Times train_step and the MoE layers in it, and writes the lines."""

    def __init__(self, path: Path, flop: Callable[[Any, int], float], args: Any) -> None:
        self.path, self.args = path, args
        self.flop = flop
        self.steps = 0
        self.on_gpu = False
        self.marks: dict[str, list[Any]] = {"forward": [], "backward": []}

    def around(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*positional: Any, **named: Any) -> Any:
            done = named["iteration"]
            if not self.steps:
                self._start(positional[2], done)
            for marks in self.marks.values():
                marks.clear()
            self._wait()
            start = time.perf_counter()
            result = train_step(*positional, **named)
            self._wait()
            self.steps += 1
            self._write(done + 1, time.perf_counter() - start)
            return result

        return timed

    def _start(self, model: list[Any], done: int) -> None:
        """Hooks into the MoE layers of a model's chunks; forgets what will be done again."""
        from megatron.core.transformer.moe.moe_layer import MoELayer

        self.on_gpu = next(model[0].parameters()).is_cuda
        for layer in (m for chunk in model for m in chunk.modules() if isinstance(m, MoELayer)):
            layer.register_forward_pre_hook(self._enter)
            layer.register_forward_hook(self._leave)
        kept = [line for line in read_lines(self.path) if line["iteration"] <= done]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def _enter(self, layer: Any, arguments: tuple[Any, ...]) -> None:
        if arguments[0].requires_grad:
            arguments[0].register_hook(lambda gradient: self._mark("backward"))
        self._mark("forward")

    def _leave(self, layer: Any, arguments: tuple[Any, ...], results: tuple[Any, ...]) -> None:
        self._mark("forward")
        if results[0].requires_grad:
            results[0].register_hook(lambda gradient: self._mark("backward"))

    def _mark(self, direction: str) -> None:
        import torch

        mark: Any = time.perf_counter()
        if self.on_gpu:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self.marks[direction].append(mark)

    def _wait(self) -> None:
        import torch

        if self.on_gpu:
            torch.cuda.synchronize()

    def _write(self, iteration: int, seconds: float) -> None:
        import torch

        args = self.args
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self.on_gpu:
            peak = torch.cuda.max_memory_allocated()
        line = {
            "iteration": iteration,
            "since_start": self.steps,
            "step_ms": 1e3 * seconds,
            **{f"moe_{way}_ms": self._spent(marks) for way, marks in self.marks.items()},
            "tokens": args.seq_length * args.global_batch_size,
            "ranks": args.world_size,
            "tflops": self.flop(args, args.global_batch_size) / seconds / args.world_size / 1e12,
            "peak_bytes": peak,
        }
        if self.steps == 1:
            line["start_s"] = seconds_since_birth()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _spent(self, marks: list[Any]) -> float:
        """Milliseconds between the marks of each pair."""
        pairs = zip(marks[::2], marks[1::2], strict=True)
        spans = (a.elapsed_time(b) if self.on_gpu else 1e3 * (b - a) for a, b in pairs)
        return float(sum(spans))


if __name__ == "__mp_main__":  # a server that Megatron's checkpoints start beside each rank
    end_with_parent()
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
