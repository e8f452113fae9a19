"""A config file of scripts/train.py -> the model in numbers.

Reads Megatron's argument names, with Megatron's defaults, and only those that a plan depends on.
Parameters are counted by formula; a test compares every count with the modules that Megatron builds
from the same file. What a plan cannot count (tensor parallelism, other activations, other number
formats) is an error, never a guess.
"""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DEFAULTS: dict[str, Any] = {
    "bf16": False,
    "context-parallel-size": 1,
    "ffn-hidden-size": None,
    "global-batch-size": None,
    "group-query-attention": False,
    "hidden-size": None,
    "kv-channels": None,
    "kv-lora-rank": 32,
    "make-vocab-size-divisible-by": 128,
    "micro-batch-size": None,
    "moe-ffn-hidden-size": None,
    "moe-layer-freq": 1,
    "moe-router-group-topk": None,
    "moe-router-num-groups": None,
    "moe-router-topk": 2,
    "moe-shared-expert-gate": False,
    "moe-shared-expert-intermediate-size": None,
    "mtp-num-layers": None,
    "multi-latent-attention": False,
    "num-attention-heads": None,
    "num-experts": None,
    "num-layers": None,
    "num-query-groups": 1,
    "overlap-grad-reduce": False,
    "overlap-param-gather": False,
    "padded-vocab-size": None,
    "pipeline-model-parallel-layout": None,
    "pipeline-model-parallel-size": 1,
    "q-lora-rank": None,
    "qk-head-dim": 128,
    "qk-layernorm": False,
    "qk-pos-emb-head-dim": 64,
    "seq-length": None,
    "swiglu": False,
    "tensor-model-parallel-size": 1,
    "untie-embeddings-and-output-weights": False,
    "v-head-dim": 128,
    "vocab-size": None,
}
_NEEDED = (
    "hidden-size",
    "micro-batch-size",
    "num-attention-heads",
    "num-experts",
    "num-layers",
    "seq-length",
)
_FLAGS = ("overlap-grad-reduce", "overlap-param-gather")
_NO_NUMBER = ("moe-layer-freq", "pipeline-model-parallel-layout", *_FLAGS)
# Arguments that would change the counts in ways that are not counted here.
_UNCOUNTED = (
    "add-qkv-bias",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "moe-latent-size",
    "mtp-use-repeated-layer",
    "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
)
WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12  # bf16; fp32; fp32 weight, two moments


class PlanError(Exception):
    """Something in the file or on the command line; the message is the one line to read."""


@dataclass(frozen=True, kw_only=True)
class Count:
    """Parameters: those that every rank of a stage has, and those of the routed experts."""

    dense: int = 0
    experts: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(dense=self.dense + other.dense, experts=self.experts + other.experts)

    @property
    def total(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True, kw_only=True)
class Work:
    """Of a pipeline rank: MoE layers, and forward FLOPs of a token for everything else."""

    moe_layers: int = 0
    rest_flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            moe_layers=self.moe_layers + other.moe_layers,
            rest_flops=self.rest_flops + other.rest_flops,
        )


@dataclass(frozen=True, kw_only=True)
class Model:
    """name: of the file. is_moe: one entry a decoder layer. stages: Megatron's layout letters, one
    string a stage in pipeline order: E embedding, t a decoder layer, m an MTP layer, L the loss.

    attention: parameters of one layer's attention. score_flops: of q·k and scores·v for one token
    whose predecessors are half a sequence, forward. sequences, tokens: of a micro-batch, the tokens
    those of one rank. batch: sequences between two optimizer steps, 0 for one micro-batch a rank.
    overlap_reduce, overlap_gather: of gradients and parameters, as Megatron's flags ask for it.
    """

    name: str
    hidden: int
    ffn: int
    dense_ffn: int
    shared_ffn: int
    num_experts: int
    top_k: int
    groups: int
    group_top_k: int
    is_moe: tuple[bool, ...]
    mtp_layers: int
    vocabulary: int
    tied: bool
    gated_shared: bool
    attention: int
    score_flops: int
    tokens: int
    sequences: int
    batch: int
    context_parallel: int
    overlap_reduce: bool
    overlap_gather: bool
    pipeline: int
    stages: tuple[str, ...]

    def layer(self, moe: bool) -> Count:
        """Attention, two norms, and an MLP or router, shared expert and routed experts."""
        dense = self.attention + 2 * self.hidden
        if not moe:
            return Count(dense=dense + 3 * self.hidden * self.dense_ffn)
        shared = 3 * self.hidden * self.shared_ffn + self.hidden * self.gated_shared
        return Count(
            dense=dense + self.hidden * self.num_experts + shared,
            experts=self.num_experts * 3 * self.hidden * self.ffn,
        )

    def mtp(self) -> Count:
        """One MTP layer's own: three norms, a projection of 2H to H, a layer like the last one.

        Embedding and output are the model's.
        """
        return Count(dense=3 * self.hidden + 2 * self.hidden**2) + self.layer(self.is_moe[-1])

    def tables(self) -> int:
        """Parameters of embedding and output."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    def main(self) -> Count:
        """The whole model without MTP."""
        layers = sum((self.layer(moe) for moe in self.is_moe), Count())
        return layers + Count(dense=self.tables() + self.hidden)

    def ranks_of_pipeline(self) -> list[Count]:
        """What each pipeline rank holds. A table that two ranks use is on both."""
        counts = [Count() for _ in range(self.pipeline)]
        has_table: set[int] = set()
        layers = iter(self.is_moe)
        decoders = sum(stage.count("t") for stage in self.stages)
        table = self.vocabulary * self.hidden
        for index, stage in enumerate(self.stages):
            rank = index % self.pipeline
            for letter in stage:
                if letter == "t":
                    counts[rank] += self.layer(next(layers))
                    decoders -= 1
                    if not decoders:  # the norm after the last decoder layer
                        counts[rank] += Count(dense=self.hidden)
                elif letter == "m":
                    counts[rank] += self.mtp()
                if letter in "Em" or (letter == "L" and self.tied):
                    if rank not in has_table:
                        counts[rank] += Count(dense=table)
                    has_table.add(rank)
                elif letter == "L":
                    counts[rank] += Count(dense=table)
        return counts

    def work_of_pipeline(self) -> list[Work]:
        """What each pipeline rank computes: of a layer that is not its experts and router, twice
        the parameters of each product, and attention's scores; the loss has every output."""

        def layer(moe: bool) -> Work:
            dense = 0 if moe else 3 * self.hidden * self.dense_ffn
            flops = 2 * (self.attention + dense) + self.score_flops
            return Work(moe_layers=int(moe), rest_flops=flops)

        works = [Work() for _ in range(self.pipeline)]
        layers = iter(self.is_moe)
        outputs = 2 * (1 + self.mtp_layers) * self.vocabulary * self.hidden
        for index, stage in enumerate(self.stages):
            for letter in stage:
                work = Work()
                if letter == "t":
                    work = layer(next(layers))
                elif letter == "m":
                    work = layer(self.is_moe[-1]) + Work(rest_flops=4 * self.hidden**2)
                elif letter == "L":
                    work = Work(rest_flops=outputs)
                works[index % self.pipeline] += work
        return works

    def rest_flops(self) -> int:
        """Forward, one token, of everything that is not an MoE layer's experts and router."""
        return sum(work.rest_flops for work in self.work_of_pipeline())

    @property
    def moe_layers(self) -> int:
        return sum(self.is_moe) + self.mtp_layers * self.is_moe[-1]


def state_bytes(count: Count, ranks: int, pipeline: int, expert_parallel: int) -> int:
    """Weights (bf16), gradients (fp32) and Adam's state (fp32) of one rank, with Megatron's
    distributed optimizer: the state is shared by all ranks that hold the same parameters."""
    replicas = ranks // pipeline
    experts = count.experts // expert_parallel
    kept = (WEIGHT_BYTES + GRADIENT_BYTES) * (count.dense + experts)
    shared = count.dense // replicas + experts // (replicas // expert_parallel)
    return kept + OPTIMIZER_BYTES * shared


def read(path: Path, overrides: dict[str, Any] | None = None) -> Model:
    """Raises PlanError for a file that is missing, no mapping, or of a model that a plan cannot
    count. `overrides` replace the file's arguments, and must be among those that count."""
    import yaml  # type: ignore[import-untyped]

    if not path.is_file():
        raise PlanError(f"mok: the config file must exist, got {str(path)!r}; see configs/")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = " ".join(str(error).split())
        raise PlanError(f"mok: {path} must be YAML, got an error: {where}; see configs/") from error
    if not isinstance(content, dict):
        raise PlanError(
            f"mok: {path} must map Megatron's argument names to values, got "
            f"{type(content).__name__}; see configs/"
        )
    for key in overrides or {}:
        if key not in _DEFAULTS:
            near = difflib.get_close_matches(key, _DEFAULTS, n=1, cutoff=0.5)
            remedy = f"did you mean --{near[0]}?" if near else "leave it out"
            raise PlanError(
                f"mok: an override must be an argument that a plan depends on, got --{key}; "
                f"{remedy}"
            )
    given = {str(key).replace("_", "-"): value for key, value in content.items()}
    return _model(path.stem, given | (overrides or {}))


def _model(name: str, given: dict[str, Any]) -> Model:
    for key in _UNCOUNTED:
        if given.get(key):
            raise PlanError(
                f"mok: a plan does not know --{key}, got {given[key]!r}; leave it out, or lay the "
                "pipeline out with --pipeline-model-parallel-layout"
            )
    a = _DEFAULTS | {key: value for key, value in given.items() if key in _DEFAULTS}
    for key in _NEEDED:
        if a[key] is None:
            raise PlanError(f"mok: a plan needs --{key}, got none; add it to the file")
    number = {key: _number(key, a[key]) for key in a if key not in _NO_NUMBER}
    positive = [*_NEEDED, "context-parallel-size", "pipeline-model-parallel-size"]
    positive += ["global-batch-size"] if a["global-batch-size"] is not None else []
    for key in positive:
        if number[key] < 1:
            raise PlanError(f"mok: --{key} must be at least 1, got {a[key]}; correct it")
    for key, wanted in (("bf16", "true"), ("swiglu", "true"), ("tensor-model-parallel-size", "1")):
        if str(a[key]).lower() != wanted:
            raise PlanError(f"mok: a plan counts with {key}: {wanted}, got {a[key]}; set it so")
    hidden, heads, layers = (
        number[k] for k in ("hidden-size", "num-attention-heads", "num-layers")
    )
    dense_ffn = number["ffn-hidden-size"] or hidden * 4 * 2 // 3 // 64 * 64
    vocabulary = number["padded-vocab-size"]
    if not vocabulary:
        multiple = number["make-vocab-size-divisible-by"]
        vocabulary = -(-number["vocab-size"] // multiple) * multiple
    if not vocabulary:
        raise PlanError("mok: a plan needs --padded-vocab-size, got none; add it to the file")
    _check_routing(
        number["num-experts"],
        number["moe-router-topk"],
        number["moe-router-num-groups"] or 1,
        number["moe-router-group-topk"] or 1,
    )
    attention, head_sizes = _attention(a, number, hidden, heads)
    tokens = number["seq-length"] * number["micro-batch-size"]
    return Model(
        name=name,
        hidden=hidden,
        ffn=number["moe-ffn-hidden-size"] or dense_ffn,
        dense_ffn=dense_ffn,
        shared_ffn=number["moe-shared-expert-intermediate-size"],
        num_experts=number["num-experts"],
        top_k=number["moe-router-topk"],
        groups=number["moe-router-num-groups"] or 1,
        group_top_k=number["moe-router-group-topk"] or 1,
        is_moe=_pattern(a["moe-layer-freq"], layers),
        mtp_layers=number["mtp-num-layers"],
        vocabulary=vocabulary,
        tied=not a["untie-embeddings-and-output-weights"],
        gated_shared=bool(a["moe-shared-expert-gate"]),
        attention=attention,
        score_flops=2 * number["seq-length"] // 2 * heads * head_sizes,
        tokens=tokens // number["context-parallel-size"],
        sequences=number["micro-batch-size"],
        batch=number["global-batch-size"],
        context_parallel=number["context-parallel-size"],
        overlap_reduce=_flag(a["overlap-grad-reduce"]),
        overlap_gather=_flag(a["overlap-param-gather"]),
        pipeline=number["pipeline-model-parallel-size"],
        stages=_stages(
            a["pipeline-model-parallel-layout"],
            number["pipeline-model-parallel-size"],
            layers,
            number["mtp-num-layers"],
        ),
    )


def _check_routing(experts: int, top_k: int, groups: int, group_top_k: int) -> None:
    if experts % groups or not 1 <= group_top_k <= groups:
        raise PlanError(
            f"mok: groups must divide the experts and be chosen from, got {group_top_k} of "
            f"{groups} groups of {experts} experts; correct --moe-router-num-groups"
        )
    selectable = group_top_k * experts // groups
    if not 1 <= top_k <= selectable:
        raise PlanError(
            f"mok: a token cannot choose {top_k} of {selectable} experts; change --moe-router-topk"
        )


def _number(key: str, value: Any) -> int:
    """0 for what is not given."""
    try:
        return int(value or 0)
    except (TypeError, ValueError):
        raise PlanError(f"mok: --{key} must be a whole number, got {value!r}; correct it") from None


def _flag(value: Any) -> bool:
    """Of a file or of the command line."""
    return str(value).lower() == "true"


def _attention(
    a: dict[str, Any], number: dict[str, int], hidden: int, heads: int
) -> tuple[int, int]:
    """Parameters of one layer's attention with its inner norms, and the sizes of a key's and a
    value's head together."""
    if a["multi-latent-attention"]:
        rotary, value, rank = (
            number[k] for k in ("qk-pos-emb-head-dim", "v-head-dim", "kv-lora-rank")
        )
        plain = number["qk-head-dim"]
        query, q_rank = heads * (plain + rotary), number["q-lora-rank"]
        from_x = hidden * q_rank + q_rank * query if q_rank else hidden * query
        keys = hidden * (rank + rotary) + rank * heads * (plain + value)
        norms = (q_rank + rank) if a["qk-layernorm"] else 0
        return from_x + keys + heads * value * hidden + norms, plain + rotary + value
    size = number["kv-channels"] or hidden // heads
    groups = number["num-query-groups"] if a["group-query-attention"] else heads
    norms = 2 * size if a["qk-layernorm"] else 0
    return 2 * hidden * size * (heads + groups) + norms, 2 * size


def _pattern(value: Any, layers: int) -> tuple[bool, ...]:
    """Which layers are MoE layers: every n-th one, or a list such as [0]*3+[1]*58."""
    if str(value).isdigit() and int(value):
        return tuple(index % int(value) == 0 for index in range(layers))
    try:
        pattern = _list_of(ast.parse(str(value), mode="eval").body)
    except (SyntaxError, TypeError, ValueError):
        pattern = []
    if len(pattern) != layers or not set(pattern) <= {0, 1}:
        raise PlanError(
            f"mok: --moe-layer-freq must be a number or a list of {layers} zeros and ones, got "
            f"{value!r}; write it like [0]*3+[1]*58"
        )
    return tuple(map(bool, pattern))


def _list_of(node: ast.expr) -> list[int]:
    """The value of an expression of lists of numbers, + and *; raises ValueError for others."""
    match node:
        case ast.List():
            return [int(ast.literal_eval(item)) for item in node.elts]
        case ast.BinOp(op=ast.Add()):
            return _list_of(node.left) + _list_of(node.right)
        case ast.BinOp(op=ast.Mult(), right=ast.Constant()):
            return _list_of(node.left) * int(ast.literal_eval(node.right))
    raise ValueError(ast.unparse(node))


def _stages(layout: Any, pipeline: int, layers: int, mtp: int) -> tuple[str, ...]:
    """Megatron's layout, or even stages with embedding at the start, MTP and loss at the end."""
    if not layout:
        if layers % pipeline:
            raise PlanError(
                f"mok: {layers} layers must be divisible by the pipeline's size, got {pipeline}; "
                "lay them out with --pipeline-model-parallel-layout"
            )
        stages = ["t" * (layers // pipeline)] * pipeline
        stages[0] = "E" + stages[0]
        stages[-1] += "m" * mtp + "L"
    else:
        text = str(layout).replace(",", "")
        for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
            text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
        stages = text.split("|")
    letters = "".join(stages)
    expected = "E" + "t" * layers + "m" * mtp + "L"
    if letters != expected or len(stages) % pipeline:
        raise PlanError(
            f"mok: the pipeline's layout must place {layers} layers, embedding, loss"
            f"{' and MTP' * bool(mtp)} on stages that {pipeline} ranks can share, got {layout!r}; "
            "correct --pipeline-model-parallel-layout"
        )
    return tuple(stages)
