"""500 random calls of 2 to 8 virtual ranks: the bytes of one rank with the same global batch, and,
for every tenth, the rule of accuracy of test_cuda_random.py for what all ranks have made together.

A call is a forward and a backward. Drawn are the number of ranks, their tokens (also none), experts
a rank, sizes, loads, limits of tokens and rows (also none to spare), SMs and order of the work, the
order of the ranks, and the epoch. Workspaces, and what each stream's allocator hands out, hold NaN
and ids far outside. A case that fails is made smaller as long as it fails; seed and rest are said.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mok_megatron.contract import Context, Gradients, Schedule, WeightGradients, Weights
from mok_megatron.limits import ROW_TILE
from tests.backends import cuda_cases as cases
from tests.backends import cuda_ranks as virtual
from tests.backends.cuda_cases import Problem, Result
from tests.backends.cuda_loads import LOADS
from tests.batches import Case

gpu = pytest.mark.gpu
FIRST, COUNT, SHARE = 50_000, 500, 100
SHARED_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # parts of ranks are rounded apart


@dataclass(frozen=True, kw_only=True)
class Call:
    """case: the global batch, its tokens one a rank. spare_tokens: of the limit; spare_rows: of R
    on the rank with the most rows, or None: room for any routing. laps: instead, beyond what the
    expert with the most rows needs, so that ranks take their experts in turn."""

    case: Case
    local: int
    spare_tokens: int
    spare_rows: int | None
    laps: bool
    ctas: int
    ahead: int
    epoch: int
    dtype: torch.dtype
    accumulate: bool

    @property
    def ranks(self) -> int:
        return len(self.case.tokens)


def drawn(seed: int) -> Call:
    draw = random.Random(seed)
    ranks = draw.randint(2, 8)
    local = draw.choice([1, 1, 2, 3, 4, 8])
    few = ranks * local <= 16
    sizes = [64, 128, 192, 320] if few else [64, 128]
    tokens = [draw.choice([0, 0, 1, 2, 7, 64, 100, 127, 128, 129, 200]) for _ in range(ranks)]
    tokens[0] += not any(tokens)
    case = Case(
        seed=seed,
        hidden=draw.choice([*sizes, 512] if few else sizes),
        ffn=draw.choice(sizes),
        shared_ffn=draw.choice([0, 0, 64, 192]),
        num_experts=ranks * local,
        top_k=draw.randint(1, min(ranks * local, 8)),
        tokens=tuple(tokens),
        load=draw.choice([load for load in LOADS if load != "no_tokens"]),
        dtype=torch.bfloat16,
    )
    return Call(
        case=case,
        local=local,
        spare_tokens=draw.choice([0, 0, 1, 100]),
        spare_rows=draw.choice([None, 0, 0, ROW_TILE]),
        laps=draw.random() < 0.4,
        ctas=draw.choice([1, 2, 3, virtual.SMS // ranks, virtual.SMS // ranks]),
        ahead=draw.choice([0, 0, 1, 2, 100]),
        epoch=draw.choice([0, 0, 1, 2**32 - 2, 2**32 - 3, draw.randrange(2**32)]),
        dtype=draw.choice([torch.float32, torch.bfloat16]),
        accumulate=draw.random() < 0.5,
    )


def smaller(call: Call) -> Iterator[Call]:
    """Simpler calls, those that leave out most first."""
    case, fewer = call.case, sorted({call.ranks // 2, call.ranks - 1} - {0, 1})
    for tokens in [some for n in fewer for some in (case.tokens[:n], case.tokens[-n:])]:
        experts = len(tokens) * call.local
        top_k = min(case.top_k, experts)
        yield replace(call, case=replace(case, num_experts=experts, top_k=top_k, tokens=tokens))
    if call.local > 1:
        experts = call.ranks
        top_k = min(case.top_k, experts)
        yield replace(call, local=1, case=replace(case, num_experts=experts, top_k=top_k))
    for rank, count in enumerate(case.tokens):
        for less in sorted({0, 1, count // 2} - set(range(count, 2))):
            tokens = (*case.tokens[:rank], less, *case.tokens[rank + 1 :])
            yield replace(call, case=replace(case, tokens=tokens))
    simple = {"hidden": 64, "ffn": 64, "shared_ffn": 0, "top_k": 1, "load": "balanced"}
    for name, value in simple.items():
        yield replace(call, case=replace(case, **{name: value}))
    plain = {"spare_tokens": 0, "spare_rows": None, "ctas": 1, "ahead": 0, "epoch": 0}
    for name, value in {
        "laps": False,
        **plain,
        "dtype": torch.float32,
        "accumulate": False,
    }.items():
        yield replace(call, **{name: value})


def shrunk(call: Call, fails: Callable[[Call], bool], tries: int = 60) -> Call:
    """The smallest call found that still fails, in at most so many tries."""
    for _ in range(tries):
        for candidate in smaller(call):
            tries -= 1
            if candidate != call and tries >= 0 and fails(candidate):
                call = candidate
                break
        else:
            break
    return call


class Given:
    """A backend whose call has been made, by whomever: cuda_cases.compare judges it."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def forward(self, *_: Any) -> tuple[Tensor, Context]:
        return self.result.y_TH, Context(tensors=())

    def backward(
        self, context: Context, dy_TH: Tensor, weights: Weights, into: WeightGradients
    ) -> Gradients:
        for place, value in zip(cases.flat(into), self.result.dw, strict=True):
            place.copy_(value)
        return Gradients(dx_TH=self.result.dx_TH, dprob_TK=self.result.dprob_TK)

    def schedule(self, context: Context) -> Schedule:
        return self.result.schedule


def shared_sum(ranks: list[Result], old: tuple[Tensor, ...] | None, whole: Result) -> list[Tensor]:
    """The shared expert's gradients of all ranks together. old: what each has added to."""
    experts = len(whole.schedule.rows_L)
    local = len(ranks[0].schedule.rows_L)
    sums = []
    for i in range(2 * experts, len(whole.dw)):
        own = [r.dw[i - 2 * experts + 2 * local].double() for r in ranks]
        base = 0 if old is None else old[i].double()
        sums.append(sum((part - base for part in own), base + torch.zeros_like(own[0])))
    return sums


def joined(whole: Result, ranks: list[Result], shared: list[Tensor]) -> Result:
    """What the ranks have made, as one rank's."""
    local = len(ranks[0].schedule.rows_L)
    starts = torch.tensor([0, *(len(r.y_TH) for r in ranks)]).cumsum(0).to(cases.DEVICE)
    source_R3 = torch.cat([r.schedule.source_R3 for r in ranks])
    source_R3[:, 1] += starts[source_R3[:, 0]]
    source_R3[:, 0] = 0
    routed = [w for at in (0, local) for r in ranks for w in r.dw[at : at + local]]
    return Result(
        y_TH=torch.cat([r.y_TH for r in ranks]),
        dx_TH=torch.cat([r.dx_TH for r in ranks]),
        dprob_TK=torch.cat([r.dprob_TK for r in ranks]),
        dw=(*routed, *(w.to(whole.dw[0].dtype) for w in shared)),
        schedule=Schedule(
            rows_L=torch.cat([r.schedule.rows_L for r in ranks]), source_R3=source_R3
        ),
    )


def poison_streams(group: virtual.Group) -> None:
    """Fills what the allocator hands out next on each rank's stream."""

    def fill(rank: int) -> None:
        for words, count in ((group.room // 4, 1), (100_000, 8), (1_000, 16)):
            held = [
                torch.full((words,), cases.POISON, dtype=torch.int32, device=cases.DEVICE)
                for _ in range(count)
            ]
            del held

    group.each(fill)


def made(call: Call) -> tuple[Problem, Result, list[Result], tuple[Tensor, ...] | None]:
    """One rank's result and the ranks', each over poisoned memory."""
    case, tokens = call.case, call.case.tokens
    problem = Problem.of(replace(case, tokens=(sum(tokens),)))
    whole_places = problem.places(call.dtype, accumulate=call.accumulate)
    old = tuple(w.clone() for w in cases.flat(whole_places)) if call.accumulate else None
    parts = virtual.split(problem, tokens)
    into = virtual.places(parts, whole_places)
    cases.poison(32)
    whole = cases.call(cases.cuda_backend(problem.shape), problem, whole_places, poisoned=False)
    padded = (whole.schedule.rows_L + ROW_TILE - 1) // ROW_TILE * ROW_TILE
    most = int((padded if call.laps else padded.view(call.ranks, call.local).sum(1)).max())
    group = virtual.Group.of(
        parts[0].shape,
        max(*tokens, 1) + call.spare_tokens,
        rows=None if call.spare_rows is None else max(most + call.spare_rows, ROW_TILE),
        ctas=call.ctas,
        ahead=call.ahead,
        epoch=call.epoch,
    )
    poison_streams(group)
    order = random.Random(case.seed).sample(range(call.ranks), call.ranks)
    return problem, whole, group.call(parts, into, order=order), old


def broken(call: Call, *, by_the_rule: bool) -> list[str]:
    """What of a call is wrong, in words."""
    problem, whole, ranks, old = made(call)
    found = virtual.different(whole, ranks, call.case.num_experts)
    shared = shared_sum(ranks, old, whole)
    for name, ours, theirs in zip(("w1", "w2"), shared, whole.dw[-2:], strict=False):
        off = cases.error(ours, theirs.double())
        if not off <= SHARED_LIMIT[call.dtype]:
            found.append(f"shared d{name}: {off:.1e} from one rank's")
    if by_the_rule and not found:
        result = joined(whole, ranks, shared)
        found += cases.compare(
            problem,
            call.dtype,
            accumulate=call.accumulate,
            backend=Given(result),
            poisoned=False,
        )[1]
    return found


def fails(call: Call, *, by_the_rule: bool) -> bool:
    try:
        return broken(call, by_the_rule=by_the_rule) != []
    except RuntimeError:
        return True


# The drawing and the shrinking themselves: no GPU needed.


def test_every_kind_of_call_is_drawn() -> None:
    calls = [drawn(seed) for seed in range(FIRST, FIRST + COUNT)]
    assert {call.ranks for call in calls} == set(range(2, 9))
    assert {call.case.load for call in calls} == set(LOADS) - {"no_tokens"}
    assert sum(0 in call.case.tokens for call in calls) > COUNT / 3
    assert sum(call.spare_rows == 0 and call.spare_tokens == 0 for call in calls) > COUNT / 10
    assert sum(call.laps and call.local > 1 and call.spare_rows == 0 for call in calls) > COUNT / 20
    assert any(sum(call.case.tokens) > 1000 for call in calls)
    assert any(call.epoch > 2**32 - 4 for call in calls)
    assert drawn(FIRST) == drawn(FIRST)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 8))
def test_a_failure_shrinks_to_its_cause(seed: int) -> None:
    call = drawn(seed)
    call = replace(call, case=replace(call.case, tokens=(*call.case.tokens[:-1], 100)))
    least = shrunk(call, lambda c: max(c.case.tokens) >= 3 and c.ranks >= 2, tries=400)
    assert (least.ranks, least.local, least.case.top_k) == (2, 1, 1)
    assert 3 <= max(least.case.tokens) <= 5
    assert min(least.case.tokens) == 0
    assert (least.case.hidden, least.epoch, least.ctas, least.accumulate) == (64, 0, 1, False)
    assert shrunk(call, lambda c: False) == call


def test_ranks_joined_are_what_they_are_parts_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole result cut in ranks and joined again passes; a part that is off does not."""
    from mok_megatron.backends.reference import ReferenceBackend

    monkeypatch.setattr(cases, "DEVICE", torch.device("cpu"))
    case = replace(
        drawn(FIRST).case,
        hidden=64,
        ffn=64,
        shared_ffn=64,
        num_experts=4,
        top_k=2,
        tokens=(30,),
        load="balanced",
    )
    problem = Problem.of(case)
    into = problem.places(torch.float32, accumulate=True)
    old = tuple(w.clone() for w in cases.flat(into))
    whole = cases.call(ReferenceBackend(problem.shape, None), problem, into, poisoned=False)
    ranks = []
    for rank, (first, end) in enumerate([(0, 10), (10, 30)]):
        source_R3 = whole.schedule.source_R3.clone()
        source_R3[:, 0] = (source_R3[:, 1] >= 10).long()
        source_R3[:, 1] -= 10 * source_R3[:, 0]
        rows = whole.schedule.rows_L.cumsum(0)
        here = slice(*((0, int(rows[1])) if rank == 0 else (int(rows[1]), int(rows[3]))))
        part = 0.25 if rank == 0 else 0.75
        shared = [(w - old[8 + i]) * part + old[8 + i] for i, w in enumerate(whole.dw[8:])]
        local = slice(2 * rank, 2 * rank + 2)
        ranks.append(
            Result(
                y_TH=whole.y_TH[first:end],
                dx_TH=whole.dx_TH[first:end],
                dprob_TK=whole.dprob_TK[first:end],
                dw=(*whole.dw[local], *whole.dw[4 + 2 * rank : 6 + 2 * rank], *shared),
                schedule=Schedule(rows_L=whole.schedule.rows_L[local], source_R3=source_R3[here]),
            )
        )

    def judged(parts: list[Result]) -> list[str]:
        given = Given(joined(whole, parts, shared_sum(parts, old, whole)))
        return cases.compare(
            problem, torch.float32, accumulate=True, backend=given, poisoned=False
        )[1]

    assert judged(ranks) == []
    assert virtual.different(whole, ranks, 4) == []
    off = replace(ranks[1], dw=(*ranks[1].dw[:4], ranks[1].dw[4] * 1.1, ranks[1].dw[5]))
    assert judged([ranks[0], off]) != []


# On a GPU.


@gpu
@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, SHARE))
def test_random_calls_have_the_bytes_of_one_rank(first: int) -> None:
    for seed in range(first, first + SHARE):
        call, by_the_rule = drawn(seed), seed % 10 == 0
        if found := broken(call, by_the_rule=by_the_rule):
            least = shrunk(call, lambda c, rule=by_the_rule: fails(c, by_the_rule=rule))
            pytest.fail(f"seed {seed}: {found}\nof {call}\nthe smallest that fails: {least}")
    print(f"seeds {first} to {first + SHARE - 1}: the bytes of one rank")
