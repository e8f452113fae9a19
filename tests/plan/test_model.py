"""Reading a config file: counts by hand, and what is refused. tests/test_configs.py compares the
counts of the real models with Megatron's modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mok_megatron.plan.model import Count, PlanError, Work, read, state_bytes

SMALL: dict[str, Any] = {
    "bf16": True,
    "swiglu": True,
    "num-layers": 4,
    "hidden-size": 10,
    "ffn-hidden-size": 30,
    "num-attention-heads": 2,
    "seq-length": 100,
    "micro-batch-size": 3,
    "num-experts": 8,
    "moe-ffn-hidden-size": 7,
    "moe-layer-freq": "([0]*1+[1]*2+[1])",
    "padded-vocab-size": 50,
    "untie-embeddings-and-output-weights": True,
}
ATTENTION = 4 * 10 * 10
NORMS = 2 * 10
DENSE = ATTENTION + NORMS + 3 * 10 * 30
MOE = Count(dense=ATTENTION + NORMS + 10 * 8, experts=8 * 3 * 10 * 7)
TABLE = 50 * 10


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def write(**changes: Any) -> Path:
        content = SMALL | {key.replace("_", "-"): value for key, value in changes.items()}
        path = tmp_path / "small.yaml"
        path.write_text(yaml.safe_dump({k: v for k, v in content.items() if v != "absent"}))
        return path

    return write


def test_parameters_by_hand(config: Any) -> None:
    model = read(config())
    assert model.is_moe == (False, True, True, True)
    assert model.tokens == 300
    assert model.layer(moe=False) == Count(dense=DENSE)
    assert model.layer(moe=True) == MOE
    assert model.main() == Count(
        dense=DENSE + 3 * MOE.dense + 2 * TABLE + 10, experts=3 * MOE.experts
    )
    assert read(config(untie_embeddings_and_output_weights=False)).main().dense == (
        model.main().dense - TABLE
    )


def test_grouped_queries_norms_of_heads_and_a_shared_expert(config: Any) -> None:
    changed = read(
        config(
            group_query_attention=True,
            num_query_groups=1,
            kv_channels=6,
            qk_layernorm=True,
            moe_shared_expert_intermediate_size=5,
            moe_shared_expert_gate=True,
        )
    )
    attention = 10 * 6 * (2 + 1 + 1) + 6 * 2 * 10 + 2 * 6
    assert changed.attention == attention
    assert changed.layer(moe=True).dense == attention + NORMS + 80 + 3 * 10 * 5 + 10
    assert changed.score_flops == 100 * 2 * (6 + 6)


def test_latent_attention_by_hand(config: Any) -> None:
    sizes = dict(q_lora_rank=3, kv_lora_rank=4, qk_head_dim=5, qk_pos_emb_head_dim=2, v_head_dim=6)
    model = read(config(multi_latent_attention=True, qk_layernorm=True, **sizes))
    down = 10 * 3 + 10 * (4 + 2)
    up = 3 * 2 * (5 + 2) + 4 * 2 * (5 + 6)
    assert model.attention == down + up + 2 * 6 * 10 + (3 + 4)
    assert model.score_flops == 100 * 2 * (5 + 2 + 6)


def test_a_pipeline_holds_what_its_layout_says(config: Any) -> None:
    layout = {"pipeline_model_parallel_size": 2, "mtp_num_layers": 1}
    layout["pipeline_model_parallel_layout"] = "Et|(t|)*2t|m|L"
    first, second = read(config(**layout)).ranks_of_pipeline()
    mtp = Count(dense=3 * 10 + 2 * 100) + MOE
    # Stages in turn: Et, t | m on the first rank, and t, t, L on the second.
    assert first == Count(dense=TABLE + DENSE) + MOE + mtp  # MTP uses the same table
    assert second == Count(dense=10) + MOE + MOE + Count(dense=TABLE)


def test_a_pipeline_without_a_layout_is_even_and_mtp_needs_the_embedding(config: Any) -> None:
    first, last = read(config(pipeline_model_parallel_size=2, mtp_num_layers=1)).ranks_of_pipeline()
    assert first == Count(dense=TABLE + DENSE) + MOE
    mtp = Count(dense=3 * 10 + 2 * 100) + MOE
    assert last == Count(dense=10 + 2 * TABLE) + MOE + MOE + mtp


def test_state_of_a_rank_by_hand() -> None:
    """16 ranks, 2 stages, EP 4: 8 ranks share a stage's dense parameters, 2 an expert's."""
    count = Count(dense=80, experts=160)
    assert state_bytes(count, 16, 2, 4) == 6 * (80 + 40) + 12 * (80 // 8 + 40 // 2)
    assert state_bytes(count, 1, 1, 1) == 18 * 240


def test_rest_of_the_model_by_hand(config: Any) -> None:
    model = read(config())
    products = 4 * ATTENTION + 3 * 10 * 30 + TABLE
    assert model.rest_flops() == 2 * products + 4 * 100 * 2 * (5 + 5)


def test_work_of_a_pipeline_by_hand(config: Any) -> None:
    layout = {"pipeline_model_parallel_size": 2, "mtp_num_layers": 1}
    layout["pipeline_model_parallel_layout"] = "Et|(t|)*2t|m|L"
    model = read(config(**layout))
    scores = 100 * 2 * (5 + 5)
    first, second = model.work_of_pipeline()
    mtp = 2 * (ATTENTION + 2 * 10 * 10) + scores
    assert first == Work(
        moe_layers=2, rest_flops=2 * (2 * ATTENTION + 3 * 10 * 30) + 2 * scores + mtp
    )
    assert second == Work(moe_layers=2, rest_flops=2 * (2 * ATTENTION + 2 * TABLE) + 2 * scores)
    assert first.moe_layers + second.moe_layers == model.moe_layers


def test_a_batch_and_what_overlaps(config: Any) -> None:
    plain = read(config())
    assert (plain.batch, plain.sequences, plain.overlap_reduce) == (0, 3, False)
    found = read(config(global_batch_size=24, overlap_grad_reduce=True), {"micro-batch-size": "2"})
    assert (found.batch, found.sequences, found.overlap_reduce) == (24, 2, True)
    assert read(config(), {"overlap-param-gather": True}).overlap_gather


def test_defaults_are_megatrons(config: Any) -> None:
    model = read(
        config(ffn_hidden_size="absent", padded_vocab_size="absent", vocab_size=257),
        {"hidden-size": "512"},
    )
    assert model.dense_ffn == 1344  # 4 * 512 * 2 / 3, down to a multiple of 64
    assert model.vocabulary == 384
    assert model.top_k == 2
    assert read(config(moe_layer_freq=2)).is_moe == (True, False, True, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bf16": "absent"}, "mok: a plan counts with bf16: true, got False; set it so"),
        ({"tensor_model_parallel_size": 2}, "tensor-model-parallel-size: 1, got 2"),
        ({"num_experts": "absent"}, "mok: a plan needs --num-experts, got none; add it"),
        ({"num_layers": "many"}, "mok: --num-layers must be a whole number, got 'many'; correct"),
        ({"padded_vocab_size": "absent"}, "mok: a plan needs --padded-vocab-size, got none"),
        ({"moe_latent_size": 4}, "mok: a plan does not know --moe-latent-size, got 4"),
        ({"moe_layer_freq": "[0]*3"}, "a list of 4 zeros and ones, got '[0]*3'"),
        ({"moe_layer_freq": "exit()"}, "a list of 4 zeros and ones, got 'exit()'"),
        ({"pipeline_model_parallel_size": 3}, "4 layers must be divisible by the pipeline's size"),
        ({"pipeline_model_parallel_layout": "Et*3L"}, "must place 4 layers, embedding, loss on"),
        ({"moe_router_topk": 9}, "mok: a token cannot choose 9 of 8 experts; change"),
        (
            {"moe_router_num_groups": 3, "moe_router_group_topk": 1},
            "got 1 of 3 groups of 8 experts",
        ),
        ({"moe_router_num_groups": 4, "moe_router_group_topk": 1, "moe_router_topk": 3}, "3 of 2"),
        ({"global_batch_size": 0}, "mok: --global-batch-size must be at least 1, got 0"),
        ({"seq_length": 0}, "mok: --seq-length must be at least 1, got 0; correct it"),
    ],
)
def test_what_cannot_be_counted_is_refused(
    changes: dict[str, Any], message: str, config: Any
) -> None:
    with pytest.raises(PlanError) as error:
        read(config(**changes))
    assert str(error.value).startswith("mok: ")
    assert message in str(error.value)


def test_files_and_overrides_that_are_wrong(config: Any, tmp_path: Path) -> None:
    path = config()
    with pytest.raises(PlanError, match=r"must exist, got .*nowhere\.yaml"):
        read(tmp_path / "nowhere.yaml")
    with pytest.raises(PlanError, match="got --num-expert; did you mean --num-experts"):
        read(path, {"num-expert": "4"})
    path.write_text("- a list")
    with pytest.raises(PlanError, match=r"must map .* got list; see configs/"):
        read(path)
    path.write_text("a: [")
    with pytest.raises(PlanError, match="must be YAML"):
        read(path)
