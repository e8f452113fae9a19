"""Published launches of DeepSeek-V3 and Qwen3 with the flag added: accepted, or refused by name.

They are those of Megatron-MoE-ModelZoo (commit e865051, May 2026: model_configs/benchmarking and
best_practice), with its own dispatcher's flags left away, a tokenizer that needs no files, and
the parts about data, logging and checkpoints, which no rule is about, left out. Two are ours: "in
bf16" was published in FP8, "without stage-wise overlap" with it. Transformer Engine is pretended to
be there while arguments are judged.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.judged_launches import Answer, Question, judge

COMMON = """
    --use-mcore-models --sequence-parallel --use-flash-attn --disable-bias-linear --swiglu
    --micro-batch-size 1 --train-samples 268554688 --cross-entropy-loss-fusion --manual-gc
    --transformer-impl transformer_engine --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --expert-tensor-parallel-size 1 --untie-embeddings-and-output-weights
    --position-embedding-type rope --normalization RMSNorm --norm-epsilon 1e-6 --qk-layernorm
    --attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0 --weight-decay 0.1 --lr 1.2e-4
    --lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --moe-router-topk 8
    --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion --moe-router-dtype fp32 --bf16
    --tokenizer-type NullTokenizer --vocab-size 1000 --seq-length 4096
    --max-position-embeddings 40960 --moe-token-dispatcher-type mok
"""
DEEPSEEK_V3 = """
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
    --kv-channels 128 --rotary-base 10000 --make-vocab-size-divisible-by 3232
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
    --qk-pos-emb-head-dim 64 --v-head-dim 128 --rotary-scaling-factor 40 --mscale 1.0
    --mscale-all-dim 1.0 --num-experts 256 --moe-layer-freq ([0]*3+[1]*58)
    --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-router-group-topk 4 --moe-router-num-groups 8 --moe-router-topk-scaling-factor 2.5
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-3 --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
"""
QWEN3 = """
    --rotary-percent 1.0 --rotary-base 1000000 --group-query-attention --num-query-groups 4
    --kv-channels 128 --make-vocab-size-divisible-by 1187 --num-experts 128
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --init-method-std 0.02
"""
QWEN3_235B = f"""{QWEN3} --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288
    --num-attention-heads 64 --moe-ffn-hidden-size 1536
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
"""
QWEN3_30B = f"""{QWEN3} --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
    --num-attention-heads 32 --moe-ffn-hidden-size 768
"""
OVERLAP = "--overlap-moe-expert-parallel-comm --delay-wgrad-compute"
FP8 = "--fp8-recipe blockwise --fp8-format e4m3 --fp8-param-gather --moe-router-padding-for-fp8"
LAYOUT = "--pipeline-model-parallel-layout Et|(tt|)*30mL"


def parallel(tensor: int, pipeline: int, expert: int, context: int = 1) -> str:
    return (
        f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline} "
        f"--expert-model-parallel-size {expert} --context-parallel-size {context}"
    )


@dataclass(frozen=True, kw_only=True)
class Launch:
    """refused: the fields whose rules refuse it. anyway: named as part of the fused call."""

    gpus: int
    flags: str
    refused: tuple[str, ...] = ()
    anyway: tuple[str, ...] = ("--moe-grouped-gemm", "--moe-permute-fusion")


ACTIVATION = ("--moe-grouped-gemm", "--moe-permute-fusion", "--recompute-modules moe_act")
LAUNCHES = {
    "qwen3-30b on 32 H100": Launch(
        gpus=32,
        flags=f"{QWEN3_30B} {parallel(1, 1, 8)} --global-batch-size 256 "
        "--moe-router-force-load-balancing",
    ),
    "qwen3-30b on 32 H100, full recompute": Launch(
        gpus=32,
        flags=f"{QWEN3_30B} {parallel(1, 1, 8)} --global-batch-size 256 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "qwen3-30b on 8 GPUs": Launch(
        gpus=8,
        flags=f"{QWEN3_30B} {parallel(1, 1, 8)} --global-batch-size 256 "
        "--recompute-granularity selective --recompute-modules moe_act layernorm",
        anyway=ACTIVATION,
    ),
    "qwen3-235b on 256 H100, sequence 16384": Launch(
        gpus=256,
        flags=f"{QWEN3_235B} {parallel(4, 8, 8)} --num-virtual-stages-per-pipeline-rank 4 "
        "--tp-comm-overlap --global-batch-size 256 --recompute-granularity selective "
        "--recompute-modules layernorm moe",
    ),
    "qwen3-235b on 256 H100, sequence 32768": Launch(
        gpus=256,
        flags=f"{QWEN3_235B} {parallel(4, 8, 8, 2)} --num-virtual-stages-per-pipeline-rank 4 "
        "--global-batch-size 256 --recompute-granularity selective "
        "--recompute-modules layernorm moe",
    ),
    "qwen3-235b on 256 H100 without stage-wise overlap": Launch(
        gpus=256,
        flags=f"{QWEN3_235B} {parallel(2, 8, 32)} --num-virtual-stages-per-pipeline-rank 4 "
        "--global-batch-size 2048 --recompute-granularity selective "
        "--recompute-modules moe_act layernorm --moe-router-force-load-balancing",
        anyway=ACTIVATION,
    ),
    "qwen3-235b on 256 H100": Launch(
        gpus=256,
        flags=f"{QWEN3_235B} {parallel(2, 8, 32)} --num-virtual-stages-per-pipeline-rank 4 "
        "--global-batch-size 2048 --recompute-granularity selective "
        f"--recompute-modules moe_act layernorm {OVERLAP}",
        refused=("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
    ),
    "qwen3-235b on 512 GB200, graphs over the router": Launch(
        gpus=512,
        flags=f"{QWEN3_235B} {parallel(1, 8, 8)} --global-batch-size 8192 "
        "--cuda-graph-impl transformer_engine "
        "--cuda-graph-modules attn moe_router moe_preprocess --te-rng-tracker",
        refused=("cuda_graph_modules",),
    ),
    "deepseek-v3 on 1024 H100 in bf16, without stage-wise overlap": Launch(
        gpus=1024,
        flags=f"{DEEPSEEK_V3} {parallel(2, 8, 64)} {LAYOUT} --global-batch-size 8192 "
        "--recompute-granularity selective --recompute-modules mla_up_proj mlp",
    ),
    "deepseek-v3 on 256 H100 in bf16": Launch(
        gpus=256,
        flags=f"{DEEPSEEK_V3} {parallel(1, 8, 32)} --global-batch-size 8192 "
        "--pipeline-model-parallel-layout Et*2|(tt|)*22t|(tt|)*7mL --use-precision-aware-optimizer "
        "--recompute-granularity selective --recompute-modules mla_up_proj moe mlp layernorm",
    ),
    "deepseek-v3 on 1024 H100": Launch(
        gpus=1024,
        flags=f"{DEEPSEEK_V3} {parallel(2, 8, 64)} {LAYOUT} --global-batch-size 8192 "
        f"--recompute-granularity selective --recompute-modules mla_up_proj mlp {OVERLAP} {FP8}",
        refused=(
            "fp8",
            "moe_router_padding_for_quantization",
            "overlap_moe_expert_parallel_comm",
            "delay_wgrad_compute",
        ),
    ),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    return judge(
        {
            name: Question(gpus=launch.gpus, words=(*COMMON.split(), *launch.flags.split()))
            for name, launch in LAUNCHES.items()
        }
    )


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_published_launch(name: str, answers: dict[str, Answer]) -> None:
    from mok_megatron.config import RULES

    launch, answer = LAUNCHES[name], answers[name]
    refused_by = [
        rule.name
        for line in answer.refusals
        for rule in RULES
        if line.startswith(f"mok: {rule.must}, got ") and line.endswith(f"; {rule.remedy}")
    ]
    assert len(refused_by) == len(answer.refusals)
    assert sorted(refused_by) == sorted(launch.refused)
    assert answer.anyway == (() if launch.refused else launch.anyway)
