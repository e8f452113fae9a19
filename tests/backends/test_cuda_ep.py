"""Several expert parallel ranks on one GPU (cuda_ranks.py): the bytes of one rank, whatever the
number of ranks, their tokens, their SMs, and who comes first."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mok_megatron.backends import faults
from tests.backends import cuda_cases as cases
from tests.backends import cuda_ranks as virtual
from tests.backends.cuda_cases import Problem, Result

gpu = pytest.mark.gpu
CASE = replace(cases.CASE, seed=31, num_experts=16, top_k=4, tokens=(600,))


# What is said of a call: no GPU needed.


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((1, 3, 7, 6), "got layer 7 on expert parallel rank 3, .* and 6 on the others; look for a"),
        ((2, 1, 2, 1), "got direction backward on .* rank 1, .* and forward on the others"),
        ((3, 1, 9, 8), "got forward call 9 on expert parallel rank 1, .* and 8 on the others"),
        ((4, 2, 256, 128), "got row buffers of 256 on expert parallel rank 2"),
        ((5, 2, 1, 2), "got fingerprint of shape, flags and version 1 on .* rank 2"),
        ((6, 1, 17, 16), "at most 16 tokens, got 17 on .* rank 1, .*; set --mok-max-tokens to 17"),
        ((6, 1, -1, 16), "whose arguments keep the rules, got one that did not on .* rank 1"),
        ((7, 0, 100, 40), "of 40 rows, got 100 .* rank 0, .*set --mok-row-budget to 3.13 or more"),
    ],
)
def test_a_fault_of_a_call_names_rank_values_and_remedy(words: tuple[int, ...], text: str) -> None:
    with pytest.raises(AssertionError, match=f"^mok: .*{text}.* That call's results are NaN$"):
        raise AssertionError(faults.describe_call([*words, 32]))


def test_a_bad_choice_is_named_by_its_rank() -> None:
    text = faults.describe([1, 8, 2 * 16 + 5, 1, 8, 2, 0, 16])
    assert "got 8 at token 5, slot 1, on expert parallel rank 2, in an earlier call" in text


# The invariants.


def _ragged(total: int, ranks: int, seed: int) -> list[int]:
    """Tokens of each rank, some of them none."""
    draw = random.Random(seed)
    cuts = sorted(draw.choice([0, total, draw.randint(0, total)]) for _ in range(ranks - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def _whole(problem: Problem, dtype: torch.dtype, *, accumulate: bool) -> Result:
    into = problem.places(dtype, accumulate=accumulate)
    return cases.call(cases.cuda_backend(problem.shape), problem, into)


def _check(
    problem: Problem,
    tokens: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    accumulate: bool = True,
    group: virtual.Group | None = None,
    whole: Result | None = None,
    order: Sequence[int] | None = None,
) -> list[Result]:
    """The ranks' results, which are those of one rank."""
    parts = virtual.split(problem, tokens)
    into = virtual.places(parts, problem.places(dtype, accumulate=accumulate))
    group = group or virtual.Group.of(parts[0].shape, max(tokens))
    cases.poison()
    torch.cuda.synchronize()
    results = group.call(parts, into, order=order)
    whole = whole or _whole(problem, dtype, accumulate=accumulate)
    found = virtual.different(whole, results, problem.case.num_experts)
    assert found == [], (problem.case, tokens)
    return results


@gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("shared", [0, 128])
def test_any_number_of_ranks_gives_the_bytes_of_one(ranks: int, shared: int) -> None:
    problem = Problem.of(replace(CASE, shared_ffn=shared))
    even = [600 // ranks] * ranks
    _check(problem, even)
    _check(problem, _ragged(600, ranks, ranks), dtype=torch.bfloat16, accumulate=False)


@gpu
def test_what_a_rank_waits_for_is_counted() -> None:
    """The first rank comes late: the other waits for its call so long, and for rows no longer than
    a call lasts."""
    parts = virtual.split(Problem.of(CASE), [300, 300])
    into = virtual.places(parts, Problem.of(CASE).places(torch.float32, accumulate=True))
    group = virtual.Group.of(parts[0].shape, 300)
    group.call(parts, into)
    for backend in group.backends:
        backend.take_waits()
    with torch.cuda.stream(group.streams[0]):
        torch.cuda._sleep(400_000_000)  # cycles: 0.2 s or more
    group.call(parts, into)
    (first, *_), (start, rows, home) = (backend.take_waits() for backend in group.backends)
    assert start > 100
    assert 0 < first < 50
    assert 0 <= rows < 50
    assert 0 <= home < 50
    assert group.backends[0].take_waits() == [0, 0, 0]


@gpu
@pytest.mark.parametrize("load", ["balanced", "one_expert", "half_empty", "tile_edges", "nothing"])
def test_loads(load: str) -> None:
    problem = Problem.of(replace(CASE, load=load))
    for ranks in (2, 8):
        _check(problem, [600 // ranks] * ranks, accumulate=False)


@gpu
@pytest.mark.parametrize("tokens", [(600, 0), (0, 600), (1, 0, 0, 599), (0, 0, 0, 0, 600, 0, 0, 0)])
def test_ranks_without_tokens(tokens: tuple[int, ...]) -> None:
    for accumulate in (False, True):
        _check(Problem.of(CASE), tokens, accumulate=accumulate)


@gpu
def test_no_tokens_anywhere() -> None:
    problem = Problem.of(replace(CASE, load="no_tokens"))
    parts = virtual.split(problem, (0, 0))
    into = virtual.places(parts, problem.places(torch.float32, accumulate=False))
    group = virtual.Group.of(parts[0].shape, 5)
    for result in group.call(parts, into):
        assert result.y_TH.shape == result.dx_TH.shape == (0, CASE.hidden)
        assert not any(bool(w.any()) for w in result.dw)


@gpu
@pytest.mark.parametrize("load", ["balanced", "one_expert", "zipf", "half_empty", "tile_edges"])
@pytest.mark.parametrize("rows", [128, 512, 768, 1280])
def test_rows_beyond_the_budget_take_the_buffers_in_turn(load: str, rows: int) -> None:
    """An expert may have all 600 tokens, and four of a rank 2,400; the first lap may have none."""
    problem = Problem.of(replace(CASE, load=load))
    shape = replace(problem.shape, ep_size=4)
    for accumulate in (True, False):
        group = virtual.Group.of(shape, 150, rows=rows)
        _check(problem, (150,) * 4, group=group, accumulate=accumulate)
    last = CASE.num_experts - CASE.num_experts // 4  # all tokens to one rank
    ids = torch.arange(CASE.top_k, dtype=torch.int32, device=cases.DEVICE) + last
    problem = replace(problem, expert_TK=ids.expand(600, -1).contiguous())
    for ctas, order in ((1, None), (8, (3, 1, 0, 2))):
        group = virtual.Group.of(shape, 150, rows=rows, ctas=ctas)
        for _ in range(2):
            _check(problem, (150,) * 4, group=group, order=order)


@gpu
@pytest.mark.parametrize(("w1", "w2"), [(1, 8), (8, 0), (8, 8), (0, 3)])
def test_frozen_experts_with_laps_change_nothing_else(w1: int, w2: int) -> None:
    """So many of rank 1's first experts want no gradient."""
    problem, local = Problem.of(CASE), CASE.num_experts // 2
    parts = virtual.split(problem, (300, 300))
    group = virtual.Group.of(parts[0].shape, 300, rows=640)
    into = virtual.places(parts, problem.places(torch.float32, accumulate=True))
    frozen = replace(into[1], w1=(None,) * w1 + into[1].w1[w1:], w2=(None,) * w2 + into[1].w2[w2:])
    results = group.call(parts, [into[0], frozen])
    right = _whole(problem, torch.float32, accumulate=True)
    for name in ("y_TH", "dx_TH", "dprob_TK"):
        joined = torch.cat([getattr(result, name) for result in results])
        assert cases.same(getattr(right, name), joined), name
    for i in range(local):
        for places, first in ((frozen.w1, local), (frozen.w2, 3 * local)):
            place = places[i]
            assert place is None or torch.equal(place, right.dw[first + i]), (first, i)


@gpu
def test_all_tokens_to_one_rank() -> None:
    problem = Problem.of(CASE)
    last = CASE.num_experts - CASE.num_experts // 4
    ids = torch.arange(CASE.top_k, dtype=torch.int32, device=cases.DEVICE) + last
    problem = replace(problem, expert_TK=ids.expand(600, -1).contiguous())
    _check(problem, (150,) * 4)


@gpu
@pytest.mark.parametrize(
    ("ctas", "ahead", "movers"), [(1, 0, 0), (3, 1, 1), (8, 100, 2), (16, 2, 5), (16, 0, 16)]
)
def test_neither_share_nor_order_of_the_work_changes_a_byte(
    ctas: int, ahead: int, movers: int
) -> None:
    problem = Problem.of(CASE)
    shape = replace(problem.shape, ep_size=8)
    group = virtual.Group.of(shape, 75, ctas=ctas, ahead=ahead, movers=movers)
    _check(problem, (75,) * 8, group=group)


@gpu
def test_calls_in_any_order_of_ranks_and_near_the_end_of_epochs() -> None:
    """40 calls of 4 ranks over the same workspaces, with other routings, loads and tokens."""
    base = Problem.of(CASE)
    group = virtual.Group.of(replace(base.shape, ep_size=4), 600, epoch=2**32 - 20)
    draw = random.Random(5)
    for call in range(20):  # forward and backward each
        order = draw.sample(range(4), 4)
        _check(base.rerouted(call), _ragged(600, 4, call), group=group, order=order)


@gpu
def test_a_hundred_repeats_are_the_same_bytes() -> None:
    problem = Problem.of(CASE)
    group = virtual.Group.of(replace(problem.shape, ep_size=2), 300)
    whole = _whole(problem, torch.float32, accumulate=True)
    for _ in range(100):
        _check(problem, (300, 300), group=group, whole=whole)


@gpu
def test_a_rank_that_comes_late_is_waited_for() -> None:
    problem = Problem.of(CASE)
    parts = virtual.split(problem, (300, 300))
    group = virtual.Group.of(parts[0].shape, 300)
    whole = _whole(problem, torch.float32, accumulate=True)
    for late in (0, 1):
        into = virtual.places(parts, problem.places(torch.float32, accumulate=True))
        with torch.cuda.stream(group.streams[late]):
            torch.cuda._sleep(50_000_000)
        found = virtual.different(whole, group.call(parts, into), CASE.num_experts)
        assert found == [], late


@gpu
def test_forwards_before_their_backwards() -> None:
    """Two microbatches under way, and a backward in the order of neither."""
    problems = [Problem.of(CASE), Problem.of(CASE).rerouted(3)]
    split = [virtual.split(problem, (200, 400)) for problem in problems]
    group = virtual.Group.of(split[0][0].shape, 400)
    forwards = [group.forward(parts) for parts in split]
    for which in (1, 0):
        problem, parts = problems[which], split[which]
        into = virtual.places(parts, problem.places(torch.float32, accumulate=True))
        contexts = [context for _, context in forwards[which]]
        gradients = group.backward(parts, contexts, into)
        torch.cuda.synchronize()
        whole = _whole(problem, torch.float32, accumulate=True)
        dx_TH = torch.cat([g.dx_TH for g in gradients])
        assert cases.same(dx_TH, whole.dx_TH)
        y_TH = torch.cat([y_TH for y_TH, _ in forwards[which]])
        assert cases.same(y_TH, whole.y_TH)


@gpu
def test_replays_of_graphs_and_eager_calls_in_turn() -> None:
    """A graph a rank, replayed with new routings between eager calls in odd and even numbers."""
    problem = Problem.of(CASE)
    group = virtual.Group.of(replace(problem.shape, ep_size=2), 300)
    static = virtual.split(problem, (300, 300))
    group.forward(static)
    torch.cuda.synchronize()
    graphs, found = [torch.cuda.CUDAGraph() for _ in static], []
    for graph, p, backend, stream in zip(
        graphs, static, group.backends, group.streams, strict=True
    ):
        with torch.cuda.graph(graph, stream=stream):
            found.append(backend.forward(p.x_TH, p.expert_TK, p.prob_TK, p.weights)[0])
    for seed in range(30):
        new = problem.rerouted(seed)
        for ours, theirs in zip(static, virtual.split(new, (300, 300)), strict=True):
            ours.expert_TK.copy_(theirs.expert_TK)
            ours.prob_TK.copy_(theirs.prob_TK)
        group.each(lambda rank: graphs[rank].replay())
        whole = cases.cuda_backend(new.shape)
        wanted, _ = whole.forward(new.x_TH, new.expert_TK, new.prob_TK, new.weights)
        assert cases.same(torch.cat(found), wanted), seed
        for _ in range(seed % 3):
            eager = torch.cat([y_TH for y_TH, _ in group.forward(static)])
            assert cases.same(eager, wanted), seed


# Faults, which all ranks find in the same call.


def _raises_once(group: virtual.Group, words: str) -> None:
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=words):
        group.backends[0].check()
    group.backends[1].check()


def _all_nan(results: Sequence[tuple[Tensor, object]]) -> bool:
    return all(bool(y_TH.isnan().all()) for y_TH, _ in results)


@gpu
def test_a_rank_that_makes_another_call_is_a_fault_on_all() -> None:
    problem = Problem.of(CASE)
    parts = virtual.split(problem, (300, 300))
    group = virtual.Group.of(parts[0].shape, 300)
    space, _ = group.backends[1]._ranks._given
    group.backends[1]._ranks._given = (space, 2)
    assert _all_nan(group.forward(parts))
    _raises_once(group, "got layer 2 on expert parallel rank 1, .* and 1 on the others")
    group.backends[1]._ranks._given = (space, 1)
    first, second = (group.forward(parts) for _ in range(2))
    mixed = [first[0][1], second[1][1]]
    into = virtual.places(parts, problem.places(torch.float32, accumulate=True))
    gradients = group.backward(parts, mixed, into)
    torch.cuda.synchronize()
    assert all(bool(g.dx_TH.isnan().all() and g.dprob_TK.isnan().all()) for g in gradients)
    _raises_once(group, "got forward call 3 on expert parallel rank 1, .* and 2 on the others")
    _check(problem, (300, 300), group=group)


@gpu
def test_more_tokens_than_the_limit_is_a_fault_on_all() -> None:
    parts = virtual.split(Problem.of(CASE), (300, 300))
    group = virtual.Group.of(parts[0].shape, 299)
    assert _all_nan(group.forward(parts))
    _raises_once(group, "at most 299 tokens, got 300 on expert parallel rank 0")


@gpu
def test_a_rank_that_cannot_make_its_call_keeps_nobody_waiting() -> None:
    problem = Problem.of(CASE)
    parts = virtual.split(problem, (300, 300))
    group = virtual.Group.of(parts[0].shape, 300)
    wrong = replace(parts[1], x_TH=parts[1].x_TH.float())

    def run(rank: int) -> Tensor:
        p = (parts[0], wrong)[rank]
        if rank == 0:
            return group.backends[0].forward(p.x_TH, p.expert_TK, p.prob_TK, p.weights)[0]
        with pytest.raises(RuntimeError, match=r"x must be .* on expert parallel rank 1"):
            group.backends[1].forward(p.x_TH, p.expert_TK, p.prob_TK, p.weights)
        return p.x_TH

    assert bool(group.each(run)[0].isnan().all())
    _raises_once(group, "got one that did not on expert parallel rank 1")
    _check(problem, (300, 300), group=group)


ALONE = """
import time
import torch
from tests.backends import cuda_ranks as virtual
from tests.backends.test_cuda_ep import CASE, Problem

parts = virtual.split(Problem.of(CASE), (300, 300))
group = virtual.Group.of(parts[0].shape, 300)
group.backends[0]._ranks._patience_s = 3
first = parts[0]
torch.cuda.synchronize()
began = time.monotonic()
y_TH, _ = group.backends[0].forward(first.x_TH, first.expert_TK, first.prob_TK, first.weights)
torch.cuda.synchronize()
print(time.monotonic() - began, bool(y_TH.isnan().all()))
parameter = torch.nn.Parameter(torch.zeros(1, device="cuda"))
parameter.grad = torch.ones_like(parameter)
try:
    torch.optim.SGD([parameter], lr=1.0).step()
finally:
    print(parameter.item())
"""


@gpu
def test_a_rank_that_does_not_come_is_given_up() -> None:
    """In a process of its own, which can make no other call. Its CUDA context lives on."""
    command = [sys.executable, "-c", ALONE]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    # 3 s by the GPU's clock; its end waits for its turn where other processes have the GPU too.
    seconds, is_nan, parameter = found.stdout.split()
    assert 2.9 < float(seconds) < 15, found.stderr
    assert (is_nan, float(parameter)) == ("True", 0.0)
    assert re.search(r"gather waited for the start .* thread 1, saw", found.stderr), found.stderr


@gpu
def test_a_bad_id_spoils_the_call_on_all() -> None:
    problem = Problem.of(CASE)
    parts = virtual.split(problem, (200, 400))
    group = virtual.Group.of(parts[0].shape, 400)
    ids = parts[1].expert_TK.clone()
    ids[7, 2] = CASE.num_experts
    assert _all_nan(group.forward([parts[0], replace(parts[1], expert_TK=ids)]))
    _raises_once(group, "got 16 at token 7, slot 2, on expert parallel rank 1")
    _check(problem, (200, 400), group=group)


@gpu
def test_rows_that_travel_beyond_two_to_the_31_elements() -> None:
    """What comes home to a rank, and what it receives, need 64-bit offsets; tokens as above."""
    copies, case = 148, replace(CASE, hidden=7168, ffn=64, num_experts=8, top_k=8, tokens=(256,))
    small = Problem.of(replace(case, shared_ffn=0, load="balanced"))
    tokens = copies * 256
    assert tokens * 8 * 7168 > 2**31
    alone = _whole(small, torch.float32, accumulate=False)
    (half, _), shape = virtual.split(small, (256, 0)), replace(small.shape, ep_size=2)
    group = virtual.Group.of(shape, tokens, rows=tokens * 8 + 8 * 128)
    places = small.places(torch.float32, accumulate=False)
    parts = [
        replace(
            half,
            x_TH=half.x_TH.repeat(copies, 1),
            expert_TK=half.expert_TK.repeat(copies, 1),
            prob_TK=half.prob_TK.repeat(copies, 1),
            dy_TH=half.dy_TH.repeat(copies, 1),
            weights=part.weights,
        )
        for part in virtual.split(small, (256, 0))
    ]
    forward = group.forward(parts)
    gradients = group.backward(
        parts, [context for _, context in forward], virtual.places(parts, places)
    )
    torch.cuda.synchronize()
    group.backends[0].check()
    for rank in range(2):
        found = forward[rank][0], gradients[rank].dx_TH, gradients[rank].dprob_TK
        for value, expected in zip(found, (alone.y_TH, alone.dx_TH, alone.dprob_TK), strict=True):
            for copy in (0, copies // 2, copies - 1):
                assert cases.same(value[256 * copy : 256 * (copy + 1)], expected), (rank, copy)
