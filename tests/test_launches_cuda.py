"""An unmodified pretrain_gpt.py of Megatron-LM on a GPU with what real launches turn on, mok beside
alltoall: losses together, saved, resumed on mok to the bit, and left for alltoall in the middle.
Then flags that some launches have: the fused router, attention in CUDA graphs or offloaded.

MEGATRON_LM is the folder of pretrain_gpt.py, gpt_builders.py, model_provider.py and
hybrid_builders.py (tag core_v0.19.0); the wheel has the rest. Each model's flags are those of its
published launches in small. Launches are deterministic, so what a resumed run prints are the
digits of the unbroken one; but for its second iteration, where Megatron prints the mean of the
first two (see test_checkpoints.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests import counted_replays
from tests.printed_rows import MARK

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[1]
SCRIPT, LAUNCHER = "pretrain_gpt.py", "mok_megatron.launch"
SAVED_AT, ITERATIONS = 3, 6
DEADLINE_S = 150.0

COMMON = f"""
    --transformer-impl transformer_engine --use-mcore-models --disable-bias-linear --swiglu --bf16
    --normalization RMSNorm --norm-epsilon 1e-6 --qk-layernorm --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0
    --hidden-size 1024 --ffn-hidden-size 2048 --seq-length 1024 --max-position-embeddings 1024
    --micro-batch-size 2 --global-batch-size 8 --train-iters {ITERATIONS}
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.02
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --manual-gc
    --no-gradient-accumulation-fusion --expert-model-parallel-size 1
    --expert-tensor-parallel-size 1 --num-experts 32 --moe-ffn-hidden-size 256
    --moe-router-topk 8 --moe-router-dtype fp32 --moe-grouped-gemm --moe-permute-fusion
    --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --num-workers 0 --seed 1234
    --no-create-attention-mask-in-dataloader --eval-iters 0 --eval-interval 1000
    --log-interval 1 --ckpt-format torch_dist --distributed-timeout-minutes 2 --deterministic-mode
"""
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
MODELS = {
    "deepseek-v3": """
        --num-layers 3 --num-attention-heads 8 --kv-channels 128 --multi-latent-attention
        --q-lora-rank 384 --kv-lora-rank 128 --qk-head-dim 128 --qk-pos-emb-head-dim 64
        --v-head-dim 128 --rotary-base 10000 --rotary-scaling-factor 40 --mscale 1.0
        --mscale-all-dim 1.0 --no-rope-fusion --moe-layer-freq ([0]*1+[1]*2)
        --moe-shared-expert-intermediate-size 256 --moe-shared-expert-overlap
        --moe-router-score-function sigmoid --moe-router-pre-softmax
        --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
        --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5
        --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
        --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
        --recompute-granularity selective --recompute-modules mla_up_proj moe mlp layernorm
    """,
    "qwen3": f"""
        --num-layers 2 --num-attention-heads 16 --group-query-attention --num-query-groups 4
        --kv-channels 128 --rotary-base 1000000 --rotary-percent 1.0
        --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
        {FULL_RECOMPUTE}
    """,
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Flags beside a model's; `without`: what it leaves out of them; `environment`: what the flags
    need there. replays: whether CUDA graphs must have run, which the eager run has not."""

    flags: str
    model: str = "qwen3"
    without: tuple[str, ...] = (FULL_RECOMPUTE,)
    environment: dict[str, str] = field(default_factory=dict)
    replays: bool = False

    def words(self) -> tuple[str, ...]:
        text = " ".join(f"{COMMON} {MODELS[self.model]}".split())
        for left_out in self.without:
            assert left_out in text
            text = text.replace(left_out, "")
        return *text.split(), *self.flags.split()


SELECTIVE = "--recompute-granularity selective --recompute-modules moe layernorm"
GRAPH = f"{SELECTIVE} --te-rng-tracker --cuda-graph-warmup-steps 2 --cuda-graph-modules attn"
VARIANTS = {
    "router-fusion": Variant(
        flags="--moe-router-fusion", without=(FULL_RECOMPUTE, "--deterministic-mode")
    ),
    "router-fusion-deepseek-v3": Variant(
        flags="--moe-router-fusion", model="deepseek-v3", without=("--deterministic-mode",)
    ),
    "attention-graph-local": Variant(flags=f"{GRAPH} --cuda-graph-impl local", replays=True),
    "attention-graph-engine": Variant(
        flags=f"{GRAPH} --cuda-graph-impl transformer_engine", replays=True
    ),
    "attention-offload": Variant(
        flags="--fine-grained-activation-offloading --offload-modules core_attn",
        environment={"NVTE_CPU_OFFLOAD_V1": "1"},
    ),
}
_LINE = re.compile(
    r" iteration +(\d+)/.* lm loss: ([-+.E\d]+) \|.* grad norm: ([.\d]+) \|", re.IGNORECASE
)

Printed = dict[int, tuple[str, str]]  # iteration -> loss and gradient norm, as printed


class Launch:
    """One `torchrun pretrain_gpt.py`, from its start."""

    def __init__(
        self,
        megatron: Path,
        folder: Path,
        name: str,
        *flags: str,
        launcher: str = LAUNCHER,
        more: dict[str, str] | None = None,
    ) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        environment = {**os.environ, "PYTHONPATH": _joined(ROOT, os.environ.get("PYTHONPATH"))}
        environment |= more or {}
        environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "MOK_RECORDS": str(folder)}
        # Megatron's wheel has its dataset index compiled, but no Makefile for the `make` at start.
        if not (megatron / "megatron/core/datasets/Makefile").exists():
            (folder / "bin").mkdir(exist_ok=True)
            (folder / "bin" / "make").unlink(missing_ok=True)
            (folder / "bin" / "make").symlink_to(shutil.which("true") or "/bin/true")
            environment["PATH"] = _joined(folder / "bin", environment.get("PATH"))
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
        launch = ("-m", launcher, str(megatron / SCRIPT))
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *torchrun, *launch, *flags],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def printed(self) -> Printed:
        """Waits for the end, which must be a good one."""
        try:
            code = self.process.wait(DEADLINE_S)
        finally:
            self.process.terminate()
        text = self.log.read_text()
        assert code == 0, f"{self.name} ended with {code}:\n{text[-6000:]}"
        return {int(i): (loss, norm) for i, loss, norm in _LINE.findall(text)}


def _joined(first: Path, rest: str | None) -> str:
    return os.pathsep.join([str(first), *([rest] if rest else [])])


def together(model: str, megatron: Path, folder: Path, *more: str) -> dict[str, Printed]:
    """The launches of a model, two at a time. more: flags that come last, so they win."""

    def launch(name: str, dispatcher: str, *flags: str) -> Launch:
        given = (*COMMON.split(), *MODELS[model].split(), *flags, *more)
        return Launch(megatron, folder, name, *given, "--moe-token-dispatcher-type", dispatcher)

    saved = str(folder / "checkpoints")
    save = ("--save", saved, "--save-interval", str(SAVED_AT))
    resume = ("--load", saved, "--ckpt-step", str(SAVED_AT))
    first = launch("alltoall", "alltoall"), launch("mok", "mok", *save)
    printed = {run.name: run.printed() for run in first}
    second = launch("resumed", "mok", *resume), launch("left", "alltoall", *resume)
    return printed | {run.name: run.printed() for run in second}


def near(found: tuple[str, str], want: tuple[str, str]) -> None:
    (loss, norm), (want_loss, want_norm) = (tuple(map(float, pair)) for pair in (found, want))
    assert loss == pytest.approx(want_loss, rel=5e-3)
    assert norm == pytest.approx(want_norm, rel=5e-2)


def judge(printed: dict[str, Printed]) -> None:
    """Losses together, the resumed run's those of the unbroken one, and all of them falling."""
    every = range(1, ITERATIONS + 1)
    after = [i for i in every if i > SAVED_AT]
    assert [list(run) for run in printed.values()] == [[*every], [*every], after, after]
    mok = printed["mok"]
    compared = [i for i in after if i != SAVED_AT + 2]
    assert compared
    for iteration in every:
        near(mok[iteration], printed["alltoall"][iteration])
    for iteration in compared:
        assert printed["resumed"][iteration] == mok[iteration]
        near(printed["left"][iteration], mok[iteration])
    assert float(mok[ITERATIONS][0]) < float(mok[1][0])


@pytest.fixture
def megatron() -> Path:
    given = os.environ.get("MEGATRON_LM")
    if not given:
        pytest.skip(f"needs MEGATRON_LM, the folder of Megatron-LM's {SCRIPT}; see this file")
    assert Path(given, SCRIPT).is_file()
    return Path(given).resolve()


@pytest.mark.parametrize("model", MODELS)
def test_an_unmodified_launch_trains_saves_and_resumes(
    model: str, megatron: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    printed: dict[str, Any] = together(model, megatron, tmp_path)
    print(f"{model}: {printed}")
    judge(printed)
    log = (tmp_path / "mok.log").read_text()
    assert "mok: MoE layers run on the cuda backend" in log
    assert "mok: part of the fused call in any case: " in log


def test_a_graph_of_iterations_prints_the_eager_digits(megatron: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    flags = (*COMMON.split(), *MODELS["qwen3"].split(), "--moe-token-dispatcher-type", "mok")
    flags += ("--te-rng-tracker", "--no-check-for-nan-in-loss-and-grad")
    flags += ("--tensorboard-dir", str(tmp_path / "tensorboard"))
    graph = ("--cuda-graph-impl", "full_iteration", "--cuda-graph-warmup-steps", str(SAVED_AT))
    runs = [
        Launch(megatron, tmp_path, name, *flags, *more, launcher="tests.printed_rows")
        for name, more in (("eager", ()), ("graph", graph))
    ]
    digits, rows = [], []
    for run in runs:
        digits.append(run.printed())
        lines = [line for line in run.log.read_text().splitlines() if line.startswith(MARK)]
        rows.append([json.loads(line.removeprefix(MARK)) for line in lines])
    eager, replayed = rows
    print(f"{digits}; {rows}")
    assert len(digits[0]) == ITERATIONS
    assert digits[1] == digits[0]
    assert [captured for captured, _ in eager] == [False] * ITERATIONS
    assert [captured for captured, _ in replayed] == [i >= SAVED_AT for i in range(ITERATIONS)]
    assert [scalars for _, scalars in replayed] == [scalars for _, scalars in eager]
    assert all(scalars["mok/rows per rank, mean"] > 0 for _, scalars in eager)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_flag_of_some_launches_trains_like_alltoall(
    name: str, megatron: Path, tmp_path: Path
) -> None:
    """A graph's run beside mok's eager one too, and both must have replayed what they captured."""
    pytest.importorskip("transformer_engine.pytorch")
    variant = VARIANTS[name]

    def launch(dispatcher: str, words: tuple[str, ...] = variant.words()) -> Launch:
        flags = (*words, "--moe-token-dispatcher-type", dispatcher)
        number = f"{dispatcher}-{len(words)}"
        launcher, more = "tests.counted_replays", variant.environment
        return Launch(megatron, tmp_path, number, *flags, launcher=launcher, more=more)

    runs = [launch("mok"), launch("alltoall")]
    printed = [run.printed() for run in runs]
    if variant.replays:
        eager = replace(variant, flags=SELECTIVE).words()
        runs.append(launch("mok", eager))
        printed.append(runs[-1].printed())
    logs = [run.log.read_text() for run in runs]
    marks = [re.findall(rf"^{counted_replays.MARK}(\d+)$", log, re.MULTILINE) for log in logs]
    print(f"{name}: {printed}; replays {marks}")
    assert [list(run) for run in printed] == [[*range(1, ITERATIONS + 1)]] * len(runs)
    for iteration, found in printed[0].items():
        near(found, printed[1][iteration])
    assert float(printed[0][ITERATIONS][0]) < float(printed[0][1][0])
    replays = [sum(map(int, mark)) for mark in marks]
    wanted = [variant.replays, variant.replays, False]
    assert [count > 0 for count in replays] == wanted[: len(runs)]
    assert "mok: MoE layers run on the cuda backend" in logs[0]
    if variant.replays:  # the same kernels in the same order
        for iteration, (loss, norm) in printed[0].items():
            want_loss, want_norm = map(float, printed[2][iteration])
            assert float(loss) == pytest.approx(want_loss, rel=1e-3)
            assert float(norm) == pytest.approx(want_norm, rel=1e-2)
