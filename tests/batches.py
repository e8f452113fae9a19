"""Random global batches: the same seed gives the same batch in every process.

A batch is made for `world` homes of ragged sizes. Laid out over fewer ranks, each takes the tokens
of neighbouring homes, so that the global batch in rank order stays what it was.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mok_megatron.contract import MoEShape, WeightGradients, Weights

LOADS = ("uniform", "skewed", "one_expert", "few_experts", "one_rank", "sparse", "nothing")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem: sizes, tokens per home, and how the experts are loaded."""

    seed: int
    hidden: int
    ffn: int
    shared_ffn: int
    num_experts: int
    top_k: int
    tokens: tuple[int, ...]
    load: str
    dtype: torch.dtype

    def shape(self, ranks: int) -> MoEShape:
        return MoEShape(
            hidden=self.hidden,
            ffn=self.ffn,
            shared_ffn=self.shared_ffn,
            num_experts=self.num_experts,
            top_k=self.top_k,
            ep_size=ranks,
            dtype=self.dtype,
        )


def random_case(seed: int, world: int, dtypes: tuple[torch.dtype, ...]) -> Case:
    """Small sizes, odd ones among them; `world` homes of 0 to 12 tokens."""
    draw = random.Random(seed)
    num_experts = world * draw.choice([1, 1, 2, 3, 4])
    tokens = [draw.choice([0, 0, 1, 2, 5, 12]) for _ in range(world)]
    return Case(
        seed=seed,
        hidden=draw.choice([1, 3, 8, 16, 24]),
        ffn=draw.choice([1, 2, 7, 16, 20]),
        shared_ffn=draw.choice([0, 0, 1, 9, 16]),
        num_experts=num_experts,
        top_k=draw.randint(1, min(num_experts, 4)),
        tokens=tuple(tokens),
        load=draw.choice(LOADS),
        dtype=draw.choice(dtypes),
    )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The global batch and all weights; the shared expert, if any, is the last of w1 and w2."""

    case: Case
    x_TH: Tensor
    expert_TK: Tensor
    prob_TK: Tensor
    dy_TH: Tensor
    w1: list[Tensor]
    w2: list[Tensor]

    @staticmethod
    def of(case: Case) -> Batch:
        """Values of unit size in y and x, already rounded to the case's dtype."""
        generator = torch.Generator().manual_seed(case.seed)
        wide = torch.promote_types(case.dtype, torch.float32)

        def normal(*size: int) -> Tensor:
            values = torch.randn(*size, generator=generator, dtype=torch.float64)
            return values.div(size[-1] ** 0.5 if len(size) == 3 else 1).to(case.dtype)

        widths = [case.ffn] * case.num_experts + [case.shared_ffn] * (case.shared_ffn > 0)
        tokens = sum(case.tokens)
        expert_TK = _choices(case, generator)
        prob_TK = torch.rand(expert_TK.shape, generator=generator, dtype=torch.float64).to(wide)
        return Batch(
            case=case,
            x_TH=normal(tokens, case.hidden),
            expert_TK=expert_TK,
            prob_TK=prob_TK.masked_fill(expert_TK < 0, 0),
            dy_TH=normal(tokens, case.hidden),
            w1=[normal(1, 2 * width, case.hidden)[0] for width in widths],
            w2=[normal(1, case.hidden, width)[0] for width in widths],
        )

    def to(self, device: str) -> Batch:
        """The same batch on another device."""
        return replace(
            self,
            x_TH=self.x_TH.to(device),
            expert_TK=self.expert_TK.to(device),
            prob_TK=self.prob_TK.to(device),
            dy_TH=self.dy_TH.to(device),
            w1=[w.to(device) for w in self.w1],
            w2=[w.to(device) for w in self.w2],
        )

    def tokens(self, rank: int, ranks: int) -> slice:
        """The tokens of `rank` when the homes are spread over `ranks`."""
        homes = len(self.case.tokens) // ranks
        start = sum(self.case.tokens[: rank * homes])
        return slice(start, start + sum(self.case.tokens[rank * homes : (rank + 1) * homes]))

    def experts(self, rank: int, ranks: int) -> slice:
        local = self.case.num_experts // ranks
        return slice(rank * local, (rank + 1) * local)

    def weights(self, rank: int, ranks: int) -> Weights:
        mine, shared = self.experts(rank, ranks), self.case.shared_ffn > 0
        return Weights(
            w1=tuple(self.w1[mine]),
            w2=tuple(self.w2[mine]),
            shared_w1=self.w1[-1] if shared else None,
            shared_w2=self.w2[-1] if shared else None,
        )


def places(weights: Weights, shape: MoEShape, fill: float, dtype: torch.dtype) -> WeightGradients:
    """A place for every gradient; NaN in `fill` means memory to overwrite, else to add to."""
    flat = tuple(torch.full_like(w, fill, dtype=dtype) for w in weights.flat())
    return WeightGradients.of(flat, shape, accumulate=fill == fill)


def _choices(case: Case, generator: torch.Generator) -> Tensor:
    """int32 [T, K], no id twice in a token, -1 in empty slots anywhere."""
    tokens, experts, top_k = sum(case.tokens), case.num_experts, case.top_k
    score = torch.rand(tokens, experts, generator=generator)
    ids = torch.arange(experts)
    if case.load == "skewed":
        score = score + 2.0 / (1 + ids)
    elif case.load == "one_expert":
        score[:, experts // 2] += 1
    elif case.load == "few_experts":
        score = score + (ids % 3 == 0)
    elif case.load == "one_rank":
        score = score + (ids >= experts - max(experts // len(case.tokens), top_k))
    expert_TK = score.argsort(dim=1, descending=True)[:, :top_k].to(torch.int32)
    if case.load in ("sparse", "one_rank"):
        empty = torch.rand(tokens, top_k, generator=generator) < 0.4
        expert_TK = expert_TK.masked_fill(empty, -1)
    elif case.load == "nothing":
        expert_TK = torch.full_like(expert_TK, -1)
    return expert_TK
