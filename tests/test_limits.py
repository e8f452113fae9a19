"""What bounds a call: tokens from flags, rows from the budget, bytes from both."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from mok_megatron.backends import cuda
from mok_megatron.limits import Limits, max_tokens, most_rows, row_capacity, tokens_fault

ARGUMENTS = SimpleNamespace(
    seq_length=4096,
    micro_batch_size=2,
    context_parallel_size=2,
    tensor_model_parallel_size=4,
    sequence_parallel=True,
)


def test_the_flag_is_stronger_than_the_arguments_and_they_than_the_first_call() -> None:
    assert max_tokens(100, ARGUMENTS, 7) == (100, "--mok-max-tokens")
    words = "sequence length 4096 x micro-batch size 2 / (TP 4 x CP 2)"
    assert max_tokens(None, ARGUMENTS, 7) == (1024, words)
    whole = SimpleNamespace(**{**vars(ARGUMENTS), "sequence_parallel": False})
    assert max_tokens(None, whole, 7)[0] == 4096
    odd = SimpleNamespace(seq_length=101, micro_batch_size=3, context_parallel_size=2)
    assert max_tokens(None, odd, 7)[0] == 3 * 51
    for nothing in (None, SimpleNamespace(seq_length=None, micro_batch_size=1)):
        assert max_tokens(None, nothing, 7) == (7, "the first call")
    assert max_tokens(None, None, 0)[0] == 1


def test_rows_hold_the_budget_with_padding_and_no_more_than_any_routing() -> None:
    drawn = itertools.product((1, 5, 300, 4096), (1, 2, 8), (1, 2, 8, 72), (1, 4, 32), (1, 1.25, 9))
    for tokens, top_k, ranks, local, budget in drawn:
        rows = row_capacity(tokens, top_k, ranks, local, budget)
        most = ranks * tokens * min(top_k, local)
        wanted = min(-(-int(tokens * top_k * budget * 4) // 4), most)
        assert rows % 128 == 0
        # The worst split of those rows: one in as many experts as can be, the rest in one.
        experts = min(local, wanted)
        padded = (experts - 1) * 128 + -(-(wanted - experts + 1) // 128) * 128
        assert rows >= padded
        one = -(-ranks * tokens // 128) * 128  # an expert's, which is never cut
        assert one <= rows <= max(wanted + 127 * experts, one)
        assert row_capacity(tokens, top_k, ranks, local, ranks) == most_rows(
            tokens, top_k, ranks, local
        )
    assert row_capacity(1000, 8, 8, 16, 1.25) == (10_000 + 127 * 16) // 128 * 128
    assert row_capacity(1000, 8, 8, 2, 100) == (8 * 2000 + 127 * 2) // 128 * 128


def test_one_rank_has_room_for_any_routing() -> None:
    for tokens, top_k, experts in ((1, 1, 1), (300, 4, 16), (4096, 8, 256)):
        assert row_capacity(tokens, top_k, 1, experts, 1.25) == cuda.capacity(
            tokens * top_k, experts
        )


def test_too_many_tokens_are_named() -> None:
    limits = Limits(tokens=512, rows=1024, source="--mok-max-tokens")
    assert tokens_fault(limits, 3, 512) is None
    assert tokens_fault(limits, 3, 513) == (
        "a rank may bring at most 512 tokens (--mok-max-tokens), got 513 on expert parallel rank "
        "3; set --mok-max-tokens to 513 or more"
    )
