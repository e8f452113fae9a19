"""Every file of configs/ against Megatron: it parses, keeps the published numbers, and builds.

Megatron parses and validates each file with each layout that its comments state, then builds the
model of every pipeline rank on torch's meta device, in fake process groups of one process. Its
parameters are counted and compared with the plan's formulas and with the comments. Where there is
no pipeline, each expert has a rank to itself, which saves time and changes no sum. Two things stand
in for Transformer Engine, which is not needed here: Megatron's local modules, which have the same
parameters, and an attention core (it has none) that takes MLA's head sizes.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from mok_megatron.plan.model import Count, Model, read, state_bytes
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
FILES = {path.stem: path for path in sorted((ROOT / "configs").glob("*.yaml"))}
STATED = re.compile(r"^# +(\d+) GPUs? +(as it is|--.*?): (\d+) GB", re.MULTILINE)


def stated(name: str) -> dict[int, tuple[list[str], int]]:
    """GPUs -> (overrides, GB of the fullest GPU) of a file's comments; without any: one GPU."""
    found = {
        int(gpus): ([] if flags == "as it is" else flags.split(), int(size))
        for gpus, flags, size in STATED.findall(FILES[name].read_text())
    }
    return found or {yaml.safe_load(FILES[name].read_text())["launch"]["processes"]: ([], 0)}


CASES = [(name, gpus) for name in FILES for gpus in stated(name)]
PUBLISHED = {
    "deepseek_v3": {
        "num_layers": 61,
        "hidden_size": 7168,
        "ffn_hidden_size": 18432,
        "num_attention_heads": 128,
        "multi_latent_attention": True,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 256,
        "moe_layer_freq": [0] * 3 + [1] * 58,
        "moe_ffn_hidden_size": 2048,
        "moe_shared_expert_intermediate_size": 2048,
        "moe_router_topk": 8,
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 1e-4,
        "mtp_num_layers": 1,
        "padded_vocab_size": 129280,
        "max_position_embeddings": 163840,
        "rotary_base": 10000,
        "rotary_scaling_factor": 40,
        "untie_embeddings_and_output_weights": True,
    },
    "qwen3_235b_a22b": {
        "num_layers": 94,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "moe_ffn_hidden_size": 1536,
    },
    "qwen3_30b_a3b": {
        "num_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "moe_ffn_hidden_size": 768,
    },
}
QWEN3 = {
    "group_query_attention": True,
    "num_query_groups": 4,
    "kv_channels": 128,
    "qk_layernorm": True,
    "num_experts": 128,
    "moe_layer_freq": 1,
    "moe_router_topk": 8,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_shared_expert_intermediate_size": None,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-3,
    "padded_vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rotary_base": 1000000,
    "untie_embeddings_and_output_weights": True,
}
for _name in ("qwen3_235b_a22b", "qwen3_30b_a3b"):
    PUBLISHED[_name] |= QWEN3


@pytest.fixture(scope="module")
def built() -> dict[tuple[str, int], dict[str, Any]]:
    """What Megatron made of each case: `arguments`, and what each pipeline rank holds."""
    return run_ranks(1, _build_all, deadline=300.0)[0]


def of_plan(name: str, gpus: int) -> Model:
    overrides = stated(name)[gpus][0]
    keys = [key.removeprefix("--") for key in overrides[::2]]
    return read(FILES[name], dict(zip(keys, overrides[1::2], strict=True)))


def planned(name: str) -> list[int]:
    """GPUs of a file's layouts, for files that a plan can read: fp32 ones are for CPUs."""
    return [] if name.startswith("tiny_cpu") else list(stated(name))


@pytest.mark.parametrize(("name", "gpus"), CASES)
def test_megatron_accepts_it_and_builds_mok_layers(name: str, gpus: int, built: Any) -> None:
    arguments, ranks = built[name, gpus]["arguments"], built[name, gpus]["ranks"]
    assert arguments["moe_token_dispatcher_type"] == "mok"
    assert len(ranks) == arguments["pipeline_model_parallel_size"]
    pattern = arguments["moe_layer_freq"]
    moe_layers = arguments["num_layers"] if pattern == 1 else sum(pattern)
    layers = sum((rank["layers"] for rank in ranks), Counter())
    assert layers["MokMoELayer"] == moe_layers + (arguments["mtp_num_layers"] or 0)
    assert layers["MoELayer"] == 0


@pytest.mark.parametrize(
    ("name", "gpus"), [(name, gpus) for name in FILES for gpus in planned(name)]
)
def test_every_rank_holds_what_the_plan_says(name: str, gpus: int, built: Any) -> None:
    model = of_plan(name, gpus)
    case = built[name, gpus]
    seen = [Count(dense=rank["dense"], experts=rank["experts"]) for rank in case["ranks"]]
    assert seen == model.ranks_of_pipeline()
    size = stated(name)[gpus][1]
    if size:
        parallel = case["arguments"]["expert_model_parallel_size"]
        fullest = max(state_bytes(count, gpus, model.pipeline, parallel) for count in seen)
        assert round(fullest / 1e9) == size, "the file's comment"


@pytest.mark.parametrize(
    ("name", "billions"),
    [("deepseek_v3", 671.0), ("qwen3_235b_a22b", 235.0), ("qwen3_30b_a3b", 30.5)],
)
def test_the_whole_model_has_its_published_size(name: str, billions: float, built: Any) -> None:
    (rank,) = built[name, 8]["ranks"]  # one pipeline rank holds every layer
    total = rank["dense"] + rank["experts"] - rank["mtp dense"] - rank["mtp experts"]
    assert total == pytest.approx(billions * 1e9, rel=0.01)
    assert total == of_plan(name, 8).main().total


def test_multi_token_prediction_adds_about_14_billion(built: Any) -> None:
    """11.5 of its own, as published, and the embedding and output that a released file repeats."""
    (rank,) = built["deepseek_v3", 8]["ranks"]
    own = rank["mtp dense"] + rank["mtp experts"]
    assert own == pytest.approx(11.5e9, rel=0.01)
    assert own == of_plan("deepseek_v3", 8).mtp().total
    assert 13e9 < own + 2 * 129280 * 7168 < 14.5e9
    every = rank["dense"] + rank["experts"] + 2 * 129280 * 7168
    assert every == pytest.approx(685e9, rel=0.01), "671 and 14, the released file's"


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_whole_model_has_its_published_numbers(name: str, built: Any) -> None:
    arguments = built[name, 512]["arguments"]
    assert {key: arguments[key] for key in PUBLISHED[name]} == PUBLISHED[name]


MAY_DIFFER = {"launch", "num-layers", "num-experts", "moe-layer-freq", "padded-vocab-size"}
MAY_DIFFER |= {"max-position-embeddings", "mtp-num-layers", "mtp-loss-scaling-factor"}
MAY_DIFFER |= {"micro-batch-size", "global-batch-size", "train-iters", "lr", "min-lr"}
MAY_DIFFER |= {"recompute-granularity", "recompute-modules", "save"}
MAY_DIFFER |= {"lr-warmup-iters", "save-interval", "overlap-grad-reduce", "overlap-param-gather"}
MAY_DIFFER |= {f"{kind}-model-parallel-size" for kind in ("tensor", "pipeline", "expert")}
MAY_DIFFER |= {"pipeline-model-parallel-layout", "no-gradient-accumulation-fusion"}


@pytest.mark.parametrize("name", [name for name in FILES if "_slice_" in name])
def test_a_slice_keeps_the_sizes_of_a_layer(name: str) -> None:
    whole = yaml.safe_load(FILES[name.partition("_slice_")[0]].read_text())
    part = yaml.safe_load(FILES[name].read_text())
    different = {key for key in whole.keys() | part.keys() if whole.get(key) != part.get(key)}
    assert different <= MAY_DIFFER
    assert part["num-experts"] in (whole["num-experts"], whole["num-experts"] // 8)
    assert part["seq-length"] == 4096
    assert part["save"] is False, "its checkpoint would have a hundred gigabytes"


def test_a_run_that_saves_nothing_has_a_folder_to_look_into() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    from train_config import read_config
    from train_worker import checkpoints

    config = read_config(FILES["deepseek_v3_slice_1gpu"])
    assert checkpoints(config, Path("run")) == Path("run/checkpoints")
    assert checkpoints(config.replace({"save": "here"}), Path("run")) == Path("here")


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("tiny_gpu")])
def test_a_tiny_gpu_run_needs_one_gpu_and_no_transformer_engine(name: str) -> None:
    content = yaml.safe_load(FILES[name].read_text())
    assert content["launch"] == {"device": "cuda", "processes": 1}
    assert content["transformer-impl"] == "local"
    assert content["bf16"]
    assert content["expert-model-parallel-size"] == 1
    sizes = [content[k] for k in ("hidden-size", "moe-ffn-hidden-size")]
    sizes.append(content.get("moe-shared-expert-intermediate-size", 0))
    assert not any(size % 64 for size in sizes), "what the cuda backend takes"


# ---- in the child process


def _build_all(rank: int, world: int) -> dict[tuple[str, int], dict[str, Any]]:
    import torch
    import torch.distributed as dist

    import mok_megatron
    from mok_megatron import cpu

    dist.destroy_process_group()
    mok_megatron.activate()
    cpu.install()
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    _let_the_attention_core_take_head_sizes()
    sys.path.insert(0, str(ROOT / "scripts"))
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    return {(name, gpus): _build(name, gpus) for name, gpus in CASES}


def _let_the_attention_core_take_head_sizes() -> None:
    from megatron.core.transformer import dot_product_attention

    core = dot_product_attention.DotProductAttention
    original = core.__init__

    def __init__(self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kw: Any):
        original(self, *args, **kw)

    core.__init__ = __init__


_ranks: dict[tuple[str, ...], list[dict[str, Any]]] = {}


def _build(name: str, gpus: int) -> dict[str, Any]:
    """Megatron's arguments for so many GPUs, and the parameters of every pipeline rank."""
    from megatron.training import arguments as megatron_arguments
    from train_config import OneLineParser, read_config, read_overrides, to_argv

    config = read_config(FILES[name]).replace(read_overrides(stated(name)[gpus][0]))
    os.environ["WORLD_SIZE"] = str(gpus)
    parser = megatron_arguments.add_megatron_arguments(OneLineParser(allow_abbrev=False))
    sys.argv = ["train.py", *to_argv(config.arguments, parser)]
    args = megatron_arguments.parse_args()
    megatron_arguments.validate_args(args)
    seen = dict(vars(args))
    args.transformer_impl = "local"
    args.no_persist_layer_norm = True
    args.gradient_accumulation_fusion = args.apply_rope_fusion = args.moe_permute_fusion = False
    if args.padded_vocab_size is None:  # set with the tokenizer in a run
        args.padded_vocab_size = -(-args.vocab_size // 8) * 8
    key = name, *stated(name)[gpus][0]  # data parallel ranks hold the same
    if key not in _ranks:
        alike: dict[Any, dict[str, Any]] = {}  # ranks with the same stages hold as much
        for index, stages in enumerate(_stages(args)):
            if stages not in alike:
                alike[stages] = _build_rank(args, index)
        _ranks[key] = [alike[stages] for stages in _stages(args)]
    keys = (*PUBLISHED["deepseek_v3"], *QWEN3, "moe_token_dispatcher_type")
    keys += ("pipeline_model_parallel_size", "expert_model_parallel_size")
    return {"arguments": {key: seen[key] for key in keys}, "ranks": _ranks[key]}


def _stages(args: Any) -> list[Any]:
    """What Megatron's layout puts on each pipeline rank, and if it has the last decoder layer, thus
    the norm after it. Dense layers are all on the first rank."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    size = args.pipeline_model_parallel_size
    if size == 1:
        return ["everything"]
    every = PipelineParallelLayerLayout.parse_str_to_list(args.pipeline_model_parallel_layout)
    last = max(i for i, stage in enumerate(every) if LayerType.decoder in stage) % size
    return [(tuple(map(tuple, every[rank::size])), rank == last) for rank in range(size)]


def _build_rank(args: Any, pipeline: int) -> dict[str, Any]:
    """One pipeline rank's model on the meta device: parameters of all ranks that share its layers'
    experts, and how many MoE layers of which class."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder
    from torch.testing._internal.distributed.fake_pg import FakeStore

    pipelined = args.pipeline_model_parallel_size > 1
    parallel = args.expert_model_parallel_size if pipelined else args.num_experts
    args.expert_model_parallel_size = parallel
    world = args.pipeline_model_parallel_size * parallel
    dist.init_process_group("fake", store=FakeStore(), rank=pipeline * parallel, world_size=world)
    try:
        parallel_state.initialize_model_parallel(
            1,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=parallel,
            create_gloo_process_groups=False,
        )
        tensor_parallel.random.initialize_rng_tracker(force_reset=True)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        config = gpt_config_from_args(args)
        config.transformer.use_cpu_initialization = True  # the default device, here meta
        config.transformer.perform_initialization = False
        config.transformer.rope_type = "rope"  # YaRN's tables, no parameters, take seconds
        groups = ProcessGroupCollection.use_mpu_process_groups()
        chunks = args.virtual_pipeline_model_parallel_size
        with torch.device("meta"):
            models = [
                GPTModelBuilder(config).build_model(groups, vp_stage=chunk)
                for chunk in (range(chunks) if chunks else [None])
            ]
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    held: Counter[str] = Counter()
    layers: Counter[str] = Counter()
    for model in models:
        layers.update(type(module).__name__ for module in model.modules())
        for name, parameter in model.named_parameters():
            assert parameter.is_meta, name
            kind = "experts" if ".mlp.experts." in name else "dense"
            size = parameter.numel() * (parallel if kind == "experts" else 1)
            held[kind] += size
            held[f"mtp {kind}"] += size if name.startswith("mtp.") else 0
    wanted = ("dense", "experts", "mtp dense", "mtp experts")
    return {key: held[key] for key in wanted} | {
        "layers": Counter({k: v for k, v in layers.items() if k.endswith("MoELayer")})
    }
