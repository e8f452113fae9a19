"""Train for thousands of steps while everything changes, and see whether memory stays as it is.

    python scripts/soak.py [--device cpu|cuda] [--ranks N] [--steps 2000] [--record FILE]

A small DeepSeek-V3-like model in Megatron, with mok: of the reference on CPUs, of the kernels on a
GPU, where several ranks are processes that share it. The experts that most tokens choose move every
ten steps, ranks have other numbers of tokens in each micro-batch, every 50 steps are an evaluation,
and every 200 a checkpoint, which is read back into the running training and must hold its bits.

Looked at after every 200 steps: bytes that are allocated on the GPU, Python objects and tensors
that live, resident memory. A run passes when all steps had finite losses, and the last look has no
more bytes on the GPU, tensors (10) or resident memory (MOST_GROWTH) than the first.

Exit codes: 0 passed, 1 not, 2 wrong input.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from bench_record import append, environment
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402

from tests import checkpoints  # noqa: E402
from tests import tiny_megatron as tiny  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

HOT_STEPS, EVALUATE_EVERY, SAVE_EVERY = 10, 50, 200
HOT = 4.0  # added to an expert's logit
MOST_ROWS = 8  # sequences of a rank in a step
MOST_GROWTH = 48 << 20  # bytes resident between the first look and the last
MOST_TENSORS = 10
BF16 = {"params_dtype": torch.bfloat16, "bf16": True}
SIZES = {"hidden_size": 128, "moe_ffn_hidden_size": 64, "moe_shared_expert_intermediate_size": 64}


@dataclass(frozen=True, kw_only=True)
class Look:
    """After `step` steps on one rank."""

    step: int
    allocated: int  # bytes of the GPU
    resident: int
    tensors: int
    objects: int


class Ragged(tiny.Training):
    """With a number of sequences of its own on each rank in each step, and in each micro-batch."""

    draw: random.Random

    def _next_batch(self) -> torch.Tensor:
        batch: torch.Tensor = super()._next_batch()
        return batch[: self.draw.randint(2, MOST_ROWS)]


def main(tokens: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000, help=f"a multiple of {SAVE_EVERY}")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for all of it")
    parser.add_argument("--seed", type=int, default=None, help="default: another in every session")
    parser.add_argument("--commit", help="of the record, where there is no git")
    parser.add_argument("--record", type=Path, metavar="FILE", help="add a JSON line to FILE")
    options = parser.parse_args(tokens)
    if options.steps < 2 * SAVE_EVERY or options.steps % SAVE_EVERY or options.ranks < 1:
        parser.error(
            f"mok: --steps must be a multiple of {SAVE_EVERY} from {2 * SAVE_EVERY} on and --ranks "
            f"at least 1, got {options.steps} and {options.ranks}"
        )
    seed = secrets.randbits(31) if options.seed is None else options.seed
    print(f"seed {seed}, {options.ranks} ranks, {options.device}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mok-soak-") as folder:
        arguments = (options.device, options.steps, seed, folder)
        every = run_ranks(options.ranks, soak, *arguments, deadline=options.limit)
    seconds, trouble = round(time.monotonic() - started), []
    for rank, (looks, said) in enumerate(every):
        trouble += [f"rank {rank}: {words}" for words in (*said, *grown(looks))]
        for look in (looks[0], looks[-1]):
            print(f"rank {rank}: {look}")
    print(f"{options.steps} steps in {seconds} s: {trouble or 'memory is flat'}")
    if options.record is not None:
        looks_of = [[asdict(look) for look in (looks[0], looks[-1])] for looks, _ in every]
        line = {
            "what": "a soak: moving hot spots, ragged ranks, evaluations and checkpoints between",
            "backend": "cuda" if options.device == "cuda" else "reference",
            "ranks": options.ranks,
            "steps": options.steps,
            "evaluations": options.steps // EVALUATE_EVERY,
            "checkpoints": options.steps // SAVE_EVERY,
            "looks": looks_of,
            "troubles": trouble,
            "seed": seed,
            "seconds": seconds,
        }
        append(options.record, line | environment(options.device, options.commit))
    return 1 if trouble else 0


def soak(
    rank: int, world: int, device: str, steps: int, seed: int, folder: str
) -> tuple[list[Look], list[str]]:
    """On one rank: what was looked at, and what went wrong."""
    tiny.set_up(expert_parallel=world, device=device)
    fields = {"moe_layer_freq": [1, 1]} | (SIZES | BF16 if device == "cuda" else {})
    if device == "cuda" and world > 1:
        # The first call is not the largest.
        import mok_megatron

        mok_megatron.activate(max_tokens=MOST_ROWS * tiny.SEQUENCE)
    training = Ragged(
        dispatcher="mok",
        base=tiny.DEEPSEEK_V3,
        overrides=fields,
        optimizer={"lr": 1e-4} | (BF16 if device == "cuda" else {}),
        ddp={"grad_reduce_in_fp32": True},
    )
    training.draw = random.Random(seed + rank)
    layers = training.mok_layers()
    assert len(layers) == 2
    looks: list[Look] = []
    said: list[str] = []
    with (
        hot_experts(layers) as heat,
        tqdm(total=steps, unit="step", disable=True if rank else None) as bar,
    ):
        for step in range(1, steps + 1):
            heat.zero_()[step // HOT_STEPS % len(heat)] = HOT
            loss, norm = training.step()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                said.append(f"step {step}: loss {loss}, gradient norm {norm}")
                break
            if step % EVALUATE_EVERY == 0 and not math.isfinite(training.evaluate()):
                said.append(f"evaluation after step {step} is not finite")
            if step % SAVE_EVERY == 0:
                said += _saved_and_read_back(training, Path(folder) / str(step), step)
                looks.append(_look(step, device))
                if rank == 0:
                    with bar.external_write_mode():
                        print(f"step {step}: loss {loss:.4f}, {looks[-1]}", flush=True)
            bar.update()
    return looks, said


@contextmanager
def hot_experts(layers: list[Any]) -> Iterator[torch.Tensor]:
    """What is added to the logits of every layer's router, [E]."""
    (experts,) = {layer.config.num_moe_experts for layer in layers}
    heat = torch.zeros(experts, device=layers[0].router.weight.device)
    for layer in layers:
        gating = layer.router.gating
        layer.router.gating = lambda x, gating=gating: gating(x) + heat
    yield heat


def _saved_and_read_back(training: Ragged, folder: Path, step: int) -> list[str]:
    before = checkpoints.digests(training)
    checkpoints.save(training, folder)
    checkpoints.load(training, folder)
    same = checkpoints.digests(training) == before
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(folder)
    return [] if same else [f"the checkpoint of step {step} holds other bits"]


def _look(step: int, device: str) -> Look:
    gc.collect()
    objects = gc.get_objects()
    return Look(
        step=step,
        allocated=torch.cuda.memory_allocated() if device == "cuda" else 0,
        resident=psutil.Process().memory_info().rss,
        tensors=sum(isinstance(one, torch.Tensor) for one in objects),
        objects=len(objects),
    )


def grown(looks: list[Look]) -> list[str]:
    """In words, what the last look has more of than the first."""
    if len(looks) < 2:
        return ["there was no second look"]
    first, last, found = looks[0], looks[-1], []
    for name, most in (("allocated", 0), ("tensors", MOST_TENSORS), ("resident", MOST_GROWTH)):
        before, after = getattr(first, name), getattr(last, name)
        if after - before > most:
            found.append(f"{name} {before} after {first.step} steps, {after} after {last.step}")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
