"""A run leaves mok at a checkpoint: the next launch is Megatron's own, with the plugin off.

On alltoall, with MOK_MEGATRON_DISABLE=1, it reads what a run on mok saved and goes on like it. Its
second loss is left out, since Megatron prints another there after any resume: see
test_checkpoints.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_cpu import ARGUMENTS, SCRIPT, python

pytestmark = pytest.mark.slow

SAVED_AT, ITERATIONS = 4, 8
# Without what Megatron cannot resume here: see test_checkpoints_sharded.py.
LEFT_OUT = ("--use-distributed-optimizer", "--overlap-param-gather")
FLAGS = [word for word in ARGUMENTS.split() if word not in LEFT_OUT]


def _run(script: Path, dispatcher: str, *flags: str, **variables: str) -> tuple[str, list[float]]:
    """What it printed, and its losses."""
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 -m mok_megatron.cpu"
    chosen = ("--ckpt-format", "torch_dist", "--moe-token-dispatcher-type", dispatcher)
    done = python(*torchrun.split(), str(script), *FLAGS, *flags, *chosen, **variables)
    assert done.returncode == 0, done.stderr[-6000:]
    losses = re.findall(r"lm loss: ([-+.\dE]+)", done.stdout)
    return done.stdout, [float(loss) for loss in losses]


def test_a_launch_without_the_plugin_goes_on(tmp_path: Path) -> None:
    script, saved = tmp_path / "train.py", tmp_path / "checkpoints"
    script.write_text(SCRIPT)
    output, unbroken = _run(script, "mok", "--save", str(saved), "--save-interval", str(SAVED_AT))
    assert "mok: MoE layers run on the reference backend" in output
    assert len(unbroken) == ITERATIONS

    written = [path for path in saved.rglob("*") if path.is_file()]
    assert ".metadata" in {path.name for path in written}
    assert [path.name for path in written if b"mok_megatron" in path.read_bytes()] == []

    load = ("--load", str(saved), "--ckpt-step", str(SAVED_AT))
    output, left = _run(script, "alltoall", *load, MOK_MEGATRON_DISABLE="1")
    assert "mok: " not in output
    assert len(left) == ITERATIONS - SAVED_AT
    del left[1]
    assert left == pytest.approx([unbroken[SAVED_AT], *unbroken[SAVED_AT + 2 :]], rel=5e-3)
    assert left[-1] < unbroken[0] - 0.5
