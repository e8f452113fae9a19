"""One MoE layer on one rank, balanced routing: what it computes, moves, sends and keeps.

Letters of contract.py: T tokens of a rank, K choices, E experts, P ranks (expert parallel size),
L = E / P, H hidden, F expert width, S shared width, N = T * K rows sent, and, balanced, received.
bf16 is 2 bytes, fp32 4. Padding of an expert's rows to row tiles is memory, never work.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from mok_megatron.config import MokConfig
from mok_megatron.limits import (
    buffer_rows,
    context_bytes,
    most_rows,
    row_buffer_bytes,
    row_capacity,
    shared_buffer_bytes,
    symmetric_bytes,
)

BUDGET = MokConfig.row_budget  # rows that buffers hold, as a multiple of the balanced share


@dataclass(frozen=True, kw_only=True)
class Layer:
    """groups, group_top_k: a token chooses in group_top_k of the groups only (1 and 1: no such
    limit). Groups are consecutive experts, as in Megatron's router."""

    hidden: int
    ffn: int
    shared_ffn: int
    num_experts: int
    top_k: int
    tokens: int
    ranks: int = 1
    groups: int = 1
    group_top_k: int = 1

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.ranks

    @property
    def rows(self) -> int:
        """N = T * K: rows that a rank sends, and receives when the routing is balanced."""
        return self.tokens * self.top_k

    @property
    def rows_per_expert(self) -> float:
        return self.rows / self.local_experts

    # ---- what it computes

    def forward_flops(self) -> int:
        """6·N·H·F + 6·T·H·S: products of H with 2F and of F with H, two FLOPs a multiply-add."""
        return self._flops("forward")

    def backward_flops(self) -> int:
        """Twice the forward's: gradients of the input and of the weights."""
        return self._flops("backward")

    def _flops(self, direction: str) -> int:
        return sum(2 * m * n * k for _, _, (m, n, k) in self.passes(direction))

    def passes(self, direction: str) -> list[tuple[str, float, tuple[int, int, int]]]:
        """(name, rows of an expert, (M, N, K)) of each product; the names are those of
        scripts/bench.py."""
        every = []
        for rows, width, an_expert in (
            (self.rows, self.ffn, self.rows_per_expert),
            (self.tokens, self.shared_ffn, float(self.tokens)),
        ):
            up, down = (rows, 2 * width, self.hidden), (rows, self.hidden, width)
            backward = {"down_grad": down, "up_grad": up, "w1+32": up, "w2+32": down}
            named = {"up": up, "down": down} if direction == "forward" else backward
            every += [(name, an_expert, shape) for name, shape in named.items() if width]
        return every

    # ---- what memory must move, at least

    def copies(self) -> float:
        """Ranks, on average, that hold at least one of a token's K experts, were K experts drawn
        at random from the chosen groups. Exact where a rank has whole groups or a part of one."""
        group = self.num_experts // self.groups
        here = max(1, self.local_experts // group)  # groups with experts on a rank
        mine = min(self.local_experts, group)  # and how many of each
        selectable = self.group_top_k * group
        hit = 0.0
        for chosen in range(min(here, self.group_top_k) + 1):
            ways = comb(here, chosen) * comb(self.groups - here, self.group_top_k - chosen)
            missed = comb(selectable - chosen * mine, self.top_k) / comb(selectable, self.top_k)
            hit += ways / comb(self.groups, self.group_top_k) * (1 - missed)
        return self.ranks * hit

    def weight_bytes(self) -> int:
        """6·L·F·H + 6·S·H: this rank's experts and the shared one, bf16."""
        return 6 * self.hidden * (self.local_experts * self.ffn + self.shared_ffn)

    def forward_bytes(self) -> float:
        """x of each (token, rank) in and partial y out and in, weights, gate and up kept, the
        activation out and in, y; the shared expert's gate, up and activation.

        An upper estimate of what a fused kernel needs: the second-level cache keeps a part.
        """
        once = self.tokens * self.copies() * self.hidden
        kept = 8 * self.rows * self.ffn + 8 * self.tokens * self.shared_ffn
        return 2 * once + self.weight_bytes() + kept + 4 * once + 2 * self.tokens * self.hidden

    def backward_bytes(self) -> float:
        """dy and x in, weights, gate and up in, activation out and in, their gradients out and
        twice in, fp32 main_grad in and out, partial dx out and in, dx."""
        once = self.tokens * self.copies() * self.hidden
        kept = 20 * self.rows * self.ffn
        gradients = 8 * self.weight_bytes() // 2
        moved = 4 * once + self.weight_bytes() + kept + gradients
        return moved + 4 * once + 2 * self.tokens * self.hidden

    # ---- what crosses NVLink

    def transfer_bytes(self) -> float:
        """2·N·H·(P - 1) / P: a rank's rows to or from other ranks, each row by itself, one way."""
        return 2 * self.rows * self.hidden * (self.ranks - 1) / self.ranks

    def transfer_bytes_once(self) -> float:
        """The same if a token went once to each rank that holds any of its experts. Only rows on
        their way in can: on the way home that would change the order of additions."""
        off_rank = self.copies() * (self.ranks - 1) / self.ranks
        return 2 * self.tokens * self.hidden * off_rank

    def forward_wire_bytes(self) -> float:
        """x to the experts, y home."""
        return 2 * self.transfer_bytes()

    def backward_wire_bytes(self) -> float:
        """dy and, since it is not kept there, x to the experts; dx home."""
        return 3 * self.transfer_bytes()

    # ---- what stays in memory

    def capacity(self) -> int:
        """R, rows whose gate and up are kept: of one rank room for any routing, of several the
        budget."""
        return row_capacity(self.tokens, self.top_k, self.ranks, self.local_experts, BUDGET)

    def workspace_bytes(self) -> int:
        """Scratch that all layers of this shape share: a backward's row buffers and the shared
        expert's (limits.py); of several ranks also what peers read and write (csrc/workspace.h)."""
        held = buffer_rows(self.capacity(), self.tokens, self.ranks)
        rows = row_buffer_bytes(self.hidden, self.ffn, held)
        rows += shared_buffer_bytes(self.hidden, self.shared_ffn, self.tokens)
        if self.ranks == 1:
            return rows
        return rows + symmetric_bytes(self.ranks, self.tokens, self.top_k, self.hidden)

    def context_bytes(self) -> int:
        """What a forward keeps for its backward, without x (limits.context_bytes)."""
        rows = self.capacity()
        most = most_rows(self.tokens, self.top_k, self.ranks, self.local_experts)
        return context_bytes(self.ffn, self.shared_ffn, self.top_k, self.tokens, rows, most)

    def usual_context_bytes(self) -> int:
        """What Megatron's own layer keeps: permuted x, gate and up, activation and y of each row
        (the shared expert's left out). Upper estimate, nothing recomputed."""
        return 2 * self.rows * (2 * self.hidden + 3 * self.ffn)
