"""What bounds a call where ranks share a workspace: tokens that a rank brings, rows that it holds.

Both are fixed when the workspace is made, and are the same on every rank. Without torch: the
planner (mok_megatron.plan) reads this file too.

Letters of contract.py: T tokens, K choices, P ranks, L local experts, R rows whose gate and
up a forward keeps, C rows that buffers hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

ROW_TILE = 128  # an expert's rows start at a multiple of it
PART_COLUMNS = 32  # columns of one partial sum of the probability's gradient


@dataclass(frozen=True, kw_only=True)
class Limits:
    """tokens: the most tokens of a rank, and `source`, in words, who says so. rows: R."""

    tokens: int
    rows: int
    source: str = ""


def max_tokens(given: int | None, arguments: Any, first_call: int) -> tuple[int, str]:
    """The most tokens that a rank may bring, and who says so.

    given: --mok-max-tokens. arguments: megatron.training's, or None; a microbatch's tokens lie on
    TP x CP ranks. first_call: the largest T of any rank in the first call, for code without either.
    """
    if given is not None:
        return given, "--mok-max-tokens"
    length = getattr(arguments, "seq_length", None)
    batch = getattr(arguments, "micro_batch_size", None)
    if not length or not batch:
        return max(first_call, 1), "the first call"
    context = getattr(arguments, "context_parallel_size", 1) or 1
    tensor = getattr(arguments, "tensor_model_parallel_size", 1) or 1
    if not getattr(arguments, "sequence_parallel", False):
        tensor = 1  # every rank of a tensor group has all tokens
    return math.ceil(length / (context * tensor)) * batch, (
        f"sequence length {length} x micro-batch size {batch} / (TP {tensor} x CP {context})"
    )


def row_capacity(tokens: int, top_k: int, ranks: int, local_experts: int, budget: float) -> int:
    """R: budget x the rows of a balanced routing, but no more than any routing can bring; with room
    for the padding that starts each expert's rows at a row tile. Rows beyond R take the buffers in
    turn, expert by expert."""
    most = ranks * tokens * min(top_k, local_experts)
    rows = min(math.ceil(budget * tokens * top_k), most)
    padded = rows + (ROW_TILE - 1) * min(rows, local_experts)
    return max(padded // ROW_TILE, 1) * ROW_TILE


def buffer_rows(rows: int, tokens: int, ranks: int) -> int:
    """C, what the buffers that all layers share must hold: R, and all rows that an expert may get,
    since an expert is never cut."""
    return max(rows, math.ceil(ranks * tokens / ROW_TILE) * ROW_TILE)


def most_rows(tokens: int, top_k: int, ranks: int, local_experts: int) -> int:
    """Rows of any routing, with their padding."""
    return row_capacity(tokens, top_k, ranks, local_experts, ranks)


def context_bytes(ffn: int, shared_ffn: int, top_k: int, tokens: int, rows: int, most: int) -> int:
    """What a forward keeps for its backward: g|u [R, 2F], the shared expert's [T, 2S], and the
    schedule: row of each choice [T, K], slot and probability of each row that a routing may bring
    (most_rows). Its input x [T, H] is not counted: autograd keeps that for any dispatcher."""
    return rows * 2 * 2 * ffn + 8 * most + tokens * 2 * 2 * shared_ffn + 4 * tokens * top_k


def row_buffer_bytes(hidden: int, ffn: int, rows: int) -> int:
    """Of a call, beside the workspace: x, dy, dx [C, H], a [C, F], dg|du [C, 2F], bf16, and
    partial sums [C, F / PART_COLUMNS], fp32; rows: C."""
    return 2 * rows * (3 * hidden + 3 * ffn) + 4 * rows * (ffn // PART_COLUMNS)


def shared_buffer_bytes(hidden: int, shared_ffn: int, tokens: int) -> int:
    """The same for the shared expert: dx [T, H], a [T, S], dg|du [T, 2S], bf16."""
    return 2 * tokens * (hidden + 3 * shared_ffn) if shared_ffn else 0


def symmetric_bytes(ranks: int, tokens: int, top_k: int, hidden: int) -> int:
    """What csrc/workspace.h takes of each rank, for those who have no library to ask."""
    slots, row = tokens * top_k, 2 * hidden
    twice = (32 * ranks, 4 * slots, 4 * slots, row * tokens, row * tokens)
    parts = [8, *twice, *twice, 8 * slots, row * slots]
    return sum(-(-size // 512) * 512 for size in parts)


def tokens_fault(limits: Limits, rank: int, tokens: int) -> str | None:
    """Why rank's T is too many, in words that every rank can raise, or None."""
    if tokens <= limits.tokens:
        return None
    return (
        f"a rank may bring at most {limits.tokens} tokens ({limits.source}), got {tokens} on "
        f"expert parallel rank {rank}; set --mok-max-tokens to {tokens} or more"
    )
