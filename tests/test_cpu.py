"""The CPU shim: off until asked for, then whole; an unmodified script trains under it.

It changes the whole process, so everything that installs it runs in a subprocess with a deadline.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch

from mok_megatron import cpu

ROOT = Path(__file__).resolve().parents[1]
DEADLINE = 150.0


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs in a session of its own, which is killed at the deadline with all that it started."""
    command = [sys.executable, "-W", "ignore", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def passes(code: str, *words: str) -> None:
    """The Python code ends well and prints each of `words`."""
    done = python("-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    for word in words:
        assert word in done.stdout


def test_nothing_changes_until_it_is_asked_for() -> None:
    passes("""
        import torch
        before = torch.cuda.is_available, torch.cuda.Stream, torch.get_rng_state
        import mok_megatron, mok_megatron.cpu
        mok_megatron.activate()
        assert before == (torch.cuda.is_available, torch.cuda.Stream, torch.get_rng_state)
        import sys
        assert not any(name.startswith("megatron") for name in sys.modules)
    """)


def test_what_asks_for_cuda_gets_the_cpu() -> None:
    passes("""
        import torch
        from mok_megatron import cpu
        cpu.install()
        cpu.install()  # a second time changes nothing
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
        here = torch.cuda.current_device()
        for tensor in (
            torch.zeros(2, device="cuda"),
            torch.ones(2, device="cuda:0"),
            torch.tensor([1], device=here),
            torch.empty(2, device=0),
            torch.arange(3, device=torch.device("cuda", 0)),
            torch.zeros(2).cuda(),
            torch.zeros(2).to("cuda"),
            torch.zeros(2).to(torch.device("cuda")),
            torch.zeros(2).to(device="cuda", dtype=torch.bfloat16),
            torch.zeros(2, pin_memory=True),
            torch.nn.Linear(2, 2).cuda().weight,
        ):
            assert tensor.device == torch.device("cpu"), tensor
        assert torch.zeros(1).to(torch.int32).dtype == torch.int32  # a dtype is no device
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"

        stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            event.record()
        torch.cuda.current_stream().wait_stream(stream)
        assert event.query() and event.elapsed_time(stream.record_event()) == 0.0
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.get_device_properties(0).name == "cpu"
        compiled = torch.compile(lambda x: x + 1)
        assert compiled(torch.zeros(1)).item() == 1
    """)


def test_parameters_are_drawn_under_megatrons_own_states() -> None:
    """One seed, one draw; a fork leaves the stream around it alone; and it does not warn."""
    passes("""
        import logging, torch
        from mok_megatron import cpu
        cpu.install()
        from megatron.core.tensor_parallel import random

        class Heard(logging.Handler):
            def emit(self, record):
                raise AssertionError(record.getMessage())

        logging.getLogger(random.__name__).addHandler(Heard())

        def draw():
            random.get_cuda_rng_tracker().reset()
            random.get_cuda_rng_tracker().add("states", 7)
            torch.manual_seed(1)
            outside = [torch.rand(1).item()]
            with random.get_cuda_rng_tracker().fork("states"):
                inside = [torch.rand(1).item()]
            outside.append(torch.rand(1).item())
            with random.get_cuda_rng_tracker().fork("states"):
                inside.append(torch.rand(1).item())
            return outside, inside

        outside, inside = draw()
        assert draw() == (outside, inside)
        torch.manual_seed(1)
        assert outside == torch.rand(2).tolist()
        torch.manual_seed(7)
        assert inside == torch.rand(2).tolist()
    """)


def test_a_target_that_moved_is_an_error_that_names_it() -> None:
    module = types.ModuleType("torch.cuda")
    with pytest.raises(RuntimeError, match=r"replaces torch\.cuda\.set_stream, got a version"):
        cpu._redirect(module, set_stream=None)


def test_it_refuses_to_hide_a_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    before = torch.cuda.current_device
    with pytest.raises(RuntimeError, match="must be installed before CUDA is used"):
        cpu.install()
    assert torch.cuda.current_device is before


def test_a_script_runs_as_it_would_alone(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 3\n")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import sys
            import torch
            import beside
            from mok_megatron import cpu
            cpu.install()  # the module that runs the script is the module it imports
            assert torch.zeros(1, device="cuda").device.type == "cpu"
            print(__name__, sys.argv[1:], beside.VALUE)
            sys.exit(5)
        """)
    )
    done = python("-m", "mok_megatron.cpu", str(script), "--flag", "value")
    assert done.returncode == 5, done.stderr
    assert done.stdout.splitlines()[-1] == "__main__ ['--flag', 'value'] 3"


@pytest.mark.parametrize("arguments", [[], ["--flag"], ["nowhere.py"]])
def test_a_script_that_is_not_there_is_named(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"SCRIPT|'nowhere\.py'") as stopped:
        cpu.main(arguments)
    assert "\n" not in str(stopped.value)


# A training script as Megatron's users write them: nothing in it knows of mok or of the shim.
SCRIPT = """
from functools import partial
import torch
from megatron.core.enums import ModelType
from megatron.training import arguments, get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

def datasets(num_samples):
    class Text(torch.utils.data.Dataset):
        def __len__(self):
            return 1000
        def __getitem__(self, i):
            start = 7 * i % 50
            return {"ids": torch.arange(start, start + get_args().seq_length + 1) % 60}
    return Text(), None, None

datasets.is_distributed = True

def loss(loss_mask, losses):
    total = losses.float().sum()
    count = torch.tensor(losses.numel(), dtype=torch.int, device="cuda")
    return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}

def step(iterator, model):
    ids = next(iterator)["ids"].cuda(non_blocking=True)
    position = torch.arange(ids.shape[1] - 1, device="cuda")[None].expand(ids.shape[0], -1)
    return model(ids[:, :-1], position, None, labels=ids[:, 1:]), partial(loss, None)

if __name__ == "__main__":
    args = arguments.parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, step)
"""
ARGUMENTS = """
    --num-layers 1 --hidden-size 32 --ffn-hidden-size 32 --num-attention-heads 2 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 4 --global-batch-size 8 --train-iters 8
    --lr 1e-2 --eval-iters 0 --eval-interval 100 --num-workers 0 --log-interval 1
    --tokenizer-type NullTokenizer --vocab-size 60 --transformer-impl local --swiglu
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --expert-model-parallel-size 2
    --distributed-backend gloo
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm
    --no-rope-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
"""


@pytest.mark.parametrize("dispatcher", ["mok", "alltoall"])
def test_an_unmodified_script_trains(tmp_path: Path, dispatcher: str) -> None:
    """In bf16 with the distributed optimizer, which tells precisions apart by CUDA type names."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    chosen = ["--moe-token-dispatcher-type", dispatcher]
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 -m mok_megatron.cpu"
    done = python(*torchrun.split(), str(script), *ARGUMENTS.split(), *chosen)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "lm loss:" in line]
    losses = [float(line.split("lm loss:")[1].split()[0]) for line in lines]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5
    assert ("on the reference backend" in done.stdout) == (dispatcher == "mok")
