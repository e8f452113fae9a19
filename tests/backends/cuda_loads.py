"""Eight ways in which tokens load the experts: choices made to order.

A choice's slot is random in its token in every load, so that neither order nor fullness of a
token's slots carries a meaning. The same arguments give the same choices.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

LOADS = (
    "balanced",
    "zipf",
    "one_expert",
    "half_empty",
    "one_row_each",
    "no_tokens",
    "nothing",
    "tile_edges",
)
EDGES = (0, 1, 7, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)  # rows of an expert


def choices(load: str, tokens: int, experts: int, top_k: int, seed: int) -> Tensor:
    """int32 [T, K] on the CPU: ids in [0, E), none twice in a token, -1 in empty slots.

    balanced      counts differ by one at most
    zipf          the i-th expert, in random order, drawn with weight 1 / i^1.2
    one_expert    takes one slot of every token; no other has a row
    half_empty    half of the experts, rounded up, share all tokens
    one_row_each  every expert has one row, as far as there are slots
    no_tokens     T = 0
    nothing       every slot is empty
    tile_edges    counts from EDGES, as far as there are slots
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = 0 if load == "no_tokens" else tokens
    free_TK = torch.full((tokens, top_k), -1)
    random_TE = torch.rand(tokens, experts, generator=generator)
    shuffled_E = torch.randperm(experts, generator=generator)
    if load == "balanced":
        found_TK = torch.arange(tokens * top_k).view(tokens, top_k) % experts
    elif load == "zipf":
        found_TK = (random_TE.log() * (1 + shuffled_E) ** 1.2).topk(top_k).indices
    elif load == "one_expert":
        found_TK = free_TK.index_fill(1, torch.tensor([0]), int(shuffled_E[0]))
    elif load == "half_empty":
        found_TK = _best(random_TE * (shuffled_E < (experts + 1) // 2), top_k)
    elif load == "one_row_each":
        slots = torch.randperm(tokens * top_k, generator=generator)[:experts]
        found_TK = free_TK.flatten().index_put((slots,), shuffled_E[: len(slots)]).view(-1, top_k)
    elif load == "tile_edges":
        found_TK = _best(random_TE * _routed(tokens, experts, top_k, random.Random(seed)), top_k)
    elif load in ("nothing", "no_tokens"):
        found_TK = free_TK
    else:
        raise ValueError(f"the load must be one of {', '.join(LOADS)}, got {load}")
    order_TK = torch.rand(tokens, top_k, generator=generator).argsort(1)
    return found_TK.gather(1, order_TK).to(torch.int32)


def _best(score_TE: Tensor, top_k: int) -> Tensor:
    """The experts of the K largest positive scores, -1 where there are fewer."""
    best = score_TE.topk(top_k)
    return best.indices.where(best.values > 0, -1)


def _routed(tokens: int, experts: int, top_k: int, draw: random.Random) -> Tensor:
    """bool [T, E]: columns with counts from EDGES, rows with at most K."""
    routed_TE = torch.zeros(tokens, experts, dtype=torch.bool)
    free = [top_k] * tokens
    for expert in draw.sample(range(experts), experts):
        able = [token for token in range(tokens) if free[token]]
        count = draw.choice([edge for edge in EDGES if edge <= len(able)])
        draw.shuffle(able)
        for token in sorted(able, key=lambda token: -free[token])[:count]:
            routed_TE[token, expert] = True
            free[token] -= 1
    return routed_TE
