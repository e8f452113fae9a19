"""The reference backend against a dense float64 oracle, and the promises that only bits can show.

One spawn per number of ranks and property, many cases inside. A failing case prints its record,
which holds its seed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron.backends.reference import ReferenceBackend
from mok_megatron.contract import WeightGradients
from tests.batches import LOADS, Batch, Case, places, random_case
from tests.oracle import Answer, solve
from tests.ranks import run_ranks

RANKS = (1, 2, 4)
ALL_DTYPES = (torch.float64, torch.float64, torch.float32, torch.bfloat16)
# ||v - v64|| / ||v64||; what bf16 loses is its 2^-9 a rounding, a few times over
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 1.4e-2}


def _group(world: int) -> dist.ProcessGroup | None:
    return dist.group.WORLD if world > 1 else None


def _call(
    batch: Batch, rank: int, world: int, into: WeightGradients | None = None
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """y, dx, dprob and the weight gradients (fresh ones unless `into` says where) of one rank."""
    shape = batch.case.shape(world)
    backend = ReferenceBackend(shape, _group(world))
    mine, weights = batch.tokens(rank, world), batch.weights(rank, world)
    y_TH, context = backend.forward(
        batch.x_TH[mine], batch.expert_TK[mine], batch.prob_TK[mine], weights
    )
    if into is None:
        into = places(weights, shape, float("nan"), torch.promote_types(shape.dtype, torch.float32))
    gradients = backend.backward(context, batch.dy_TH[mine], weights, into)
    return y_TH, gradients.dx_TH, gradients.dprob_TK, _flat(into)


def _flat(into: WeightGradients) -> tuple[Tensor, ...]:
    shared = (into.shared_w1, into.shared_w2)
    return tuple(w for w in (*into.w1, *into.w2, *shared) if w is not None)


def _solve(batch: Batch) -> Answer:
    return solve(
        batch.x_TH,
        batch.expert_TK,
        batch.prob_TK,
        batch.dy_TH,
        batch.w1,
        batch.w2,
        batch.case.num_experts,
    )


def _expected_weight_gradients(
    batch: Batch, answer: Answer, rank: int, world: int
) -> tuple[Tensor, ...]:
    """This rank's experts see all tokens; the shared expert's gradient is of its own tokens."""
    mine = batch.experts(rank, world)
    shared: tuple[Tensor, ...] = ()
    if batch.case.shared_ffn:
        here = batch.tokens(rank, world)
        own = solve(
            batch.x_TH[here],
            torch.full_like(batch.expert_TK[here], -1),
            batch.prob_TK[here],
            batch.dy_TH[here],
            batch.w1,
            batch.w2,
            batch.case.num_experts,
        )
        shared = (own.dw1[-1], own.dw2[-1])
    return (*answer.dw1[mine], *answer.dw2[mine], *shared)


def _assert_close(case: Case, name: str, value: Tensor, expected: Tensor, scale: float) -> None:
    """Relative in the norm, with a floor for tensors whose true value cancels to almost nothing."""
    assert value.shape == expected.shape, (case, name, value.shape, expected.shape)
    error = (value.double() - expected).norm().item()
    floor = 0.5 * scale * expected.numel() ** 0.5
    assert error <= TOLERANCE[case.dtype] * max(expected.norm().item(), floor), (case, name, error)


def _check_against_oracle(case: Case, rank: int, world: int) -> None:
    batch = Batch.of(case)
    answer = _solve(batch)
    here = batch.tokens(rank, world)
    y, dx, dprob, dw = _call(batch, rank, world)
    assert y.dtype == dx.dtype == case.dtype
    assert dprob.dtype == torch.promote_types(case.dtype, torch.float32)
    _assert_close(case, "y", y, answer.y_TH[here], 1)
    _assert_close(case, "dx", dx, answer.dx_TH[here], 1)
    _assert_close(case, "dprob", dprob, answer.dprob_TK[here], case.hidden**0.5)
    assert not dprob[batch.expert_TK[here] < 0].any(), (case, "dprob of an empty slot")
    expected = _expected_weight_gradients(batch, answer, rank, world)
    for index, (value, true) in enumerate(zip(dw, expected, strict=True)):
        _assert_close(case, f"weight gradient {index}", value, true, 1)
    _check_accumulation(batch, rank, world, dw)


def _check_accumulation(batch: Batch, rank: int, world: int, fresh: tuple[Tensor, ...]) -> None:
    """main_grad gets fresh + what was there, rounded once; an expert without rows touches nothing.

    Every third place is frozen.
    """
    case, shape = batch.case, batch.case.shape(world)
    wide = torch.promote_types(case.dtype, torch.float32)
    local = shape.local_experts
    owner = torch.arange(local) + batch.experts(rank, world).start
    loaded = [bool((batch.expert_TK == e).any()) for e in owner.tolist()] * 2
    loaded += [len(batch.x_TH[batch.tokens(rank, world)]) > 0] * 2 * (case.shared_ffn > 0)
    for dtype in {wide, case.dtype}:
        weights = batch.weights(rank, world)
        flat = [torch.full_like(w, -0.0, dtype=dtype) for w in weights.flat()]
        for w in flat[1::2]:
            w.fill_(1.5)
        before = [w.clone() for w in flat]
        wanted = tuple(None if i % 3 == 2 else w for i, w in enumerate(flat))
        _call(batch, rank, world, WeightGradients.of(wanted, shape, accumulate=True))
        for i, (value, gradient) in enumerate(zip(flat, fresh, strict=True)):
            changed = loaded[i] and wanted[i] is not None
            expected = (before[i].to(wide) + gradient).to(dtype) if changed else before[i]
            assert _same(value, expected), (case, dtype, i, changed)


def _same(a: Tensor, b: Tensor) -> bool:
    """The same bytes: -0.0 is not 0.0, and a NaN is itself."""
    a, b = a.contiguous(), b.contiguous()
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
    )


def _random_cases(rank: int, world: int, seeds: range) -> int:
    for seed in seeds:
        _check_against_oracle(random_case(seed, world, ALL_DTYPES), rank, world)
    return len(seeds)


@pytest.mark.parametrize(
    ("world", "seeds"),
    [(1, range(1000, 1140)), (2, range(2000, 2120)), (4, range(4000, 4080))],
    ids=["ep1", "ep2", "ep4"],
)
def test_random_configurations_equal_the_oracle(world: int, seeds: range) -> None:
    print(f"seeds {seeds}")
    assert run_ranks(world, _random_cases, seeds) == [len(seeds)] * world


def _same_as_on_the_cpu(rank: int, world: int, device: str, seeds: range) -> int:
    for seed in seeds:
        batch = Batch.of(random_case(seed, world, ALL_DTYPES))
        here, there = _call(batch, rank, world), _call(batch.to(device), rank, world)
        for expected, value in zip((*here[:3], *here[3]), (*there[:3], *there[3]), strict=True):
            assert value.device.type == torch.device(device).type
            _assert_close(batch.case, "on the device", value.cpu(), expected.double(), 1)
    return len(seeds)


@pytest.mark.gpu
@pytest.mark.parametrize("world", RANKS, ids=["ep1", "ep2", "ep4"])
def test_cuda_tensors_of_several_processes_on_one_gpu(world: int) -> None:
    seeds = range(7000, 7040)
    assert run_ranks(world, _same_as_on_the_cpu, "cuda", seeds) == [len(seeds)] * world


# The same bytes.


def _bitwise_cases() -> list[Case]:
    cases = []
    for index, load in enumerate(LOADS):
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            case = Case(
                seed=7000 + len(cases),
                hidden=(24, 33, 64)[index % 3],
                ffn=(40, 17)[index % 2],
                shared_ffn=(0, 20)[index % 2],
                num_experts=8,
                top_k=1 + index % 3,
                tokens=((9, 0, 30, 14), (1, 2, 0, 3), (0, 0, 50, 0))[index % 3],
                load=load,
                dtype=dtype,
            )
            cases.append(case)
    return cases


def _bits(rank: int, world: int, cases: list[Case]) -> list[tuple[Tensor, ...]]:
    return [(*(r := _call(Batch.of(case), rank, world))[:3], *r[3]) for case in cases]


def _routed(case: Case, ranks: int, results: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """One rank's-worth of results from those of all ranks: tokens and experts in global order."""
    local = case.num_experts // ranks
    tokens = [torch.cat([result[i] for result in results]) for i in range(3)]
    w1 = [w for result in results for w in result[3 : 3 + local]]
    w2 = [w for result in results for w in result[3 + local : 3 + 2 * local]]
    return [*tokens, *w1, *w2]


def test_bytes_do_not_depend_on_the_number_of_ranks() -> None:
    """y, dx, dprob and every routed expert's gradients.

    Not with a shared expert, whose products have as many rows as its rank has tokens.
    """
    cases = [replace(case, shared_ffn=0) for case in _bitwise_cases()]
    by_world = {world: run_ranks(world, _bits, cases) for world in RANKS}
    for index, case in enumerate(cases):
        one = _routed(case, 1, [result[index] for result in by_world[1]])
        for world in RANKS[1:]:
            many = _routed(case, world, [result[index] for result in by_world[world]])
            for position, (a, b) in enumerate(zip(one, many, strict=True)):
                assert _same(a, b), (case, world, position)


def _repeat_and_poison(rank: int, world: int, cases: list[Case]) -> None:
    first = _bits(rank, world, cases)
    torch.use_deterministic_algorithms(True)  # fills every torch.empty with NaN
    assert torch.empty(3).isnan().all()
    poisoned = _bits(rank, world, cases)
    torch.use_deterministic_algorithms(False)
    for case, *results in zip(cases, first, poisoned, _bits(rank, world, cases), strict=True):
        for values in zip(*results, strict=True):
            assert all(_same(values[0], value) for value in values[1:]), case


@pytest.mark.parametrize("world", RANKS)
def test_bytes_do_not_depend_on_the_run_nor_on_unused_memory(world: int) -> None:
    run_ranks(world, _repeat_and_poison, _bitwise_cases())


def _empty_slots_are_inert(rank: int, world: int) -> None:
    for case in (case for case in _bitwise_cases() if case.load in ("sparse", "nothing")):
        batch = Batch.of(replace(case, shared_ffn=0))
        unrouted = (batch.expert_TK < 0).all(dim=1)
        assert unrouted.any()
        poisoned = replace(
            batch,
            x_TH=batch.x_TH.masked_fill(unrouted[:, None], float("nan")),
            dy_TH=batch.dy_TH.masked_fill(unrouted[:, None], float("nan")),
            prob_TK=batch.prob_TK.masked_fill(batch.expert_TK < 0, float("nan")),
        )
        clean, dirty = _call(batch, rank, world), _call(poisoned, rank, world)
        for a, b in zip((*clean[:3], *clean[3]), (*dirty[:3], *dirty[3]), strict=True):
            assert _same(a, b), case


@pytest.mark.parametrize("world", [1, 2])
def test_nan_without_a_row_changes_nothing(world: int) -> None:
    run_ranks(world, _empty_slots_are_inert)


def test_sums_run_from_slot_0_to_the_shared_expert() -> None:
    """One token: a row's bytes do not change when the token's other slots are empty."""
    reversed_differs = 0
    for seed in range(8):
        case = Case(
            seed=8000 + seed,
            hidden=64,
            ffn=16,
            shared_ffn=16,
            num_experts=8,
            top_k=4,
            tokens=(1,),
            load="uniform",
            dtype=torch.float32,
        )
        batch = Batch.of(case)
        slots = torch.arange(case.top_k)
        routed_only = replace(batch, case=replace(case, shared_ffn=0))
        nothing = torch.full_like(batch.expert_TK, -1)
        parts = [
            *(
                _call(replace(routed_only, expert_TK=batch.expert_TK.where(slots == k, -1)), 0, 1)
                for k in slots
            ),
            _call(replace(batch, expert_TK=nothing), 0, 1),
        ]
        whole = _call(batch, 0, 1)
        for index in (0, 1):  # y, dx
            terms = [part[index] for part in parts]
            assert _same(whole[index], sum(terms[1:], terms[0])), case
            reversed_differs += not _same(whole[index], sum(terms[-2::-1], terms[-1]))
    assert reversed_differs > 8  # the order can be seen


# Where it rounds.


def _transcription(batch: Batch) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """y, dx, dw1, dw2 by the formulas of the specification: exact sums, bf16 where they say so."""

    def bf16(v: Tensor) -> Tensor:
        return v.bfloat16().double()

    x, dy = batch.x_TH.double(), batch.dy_TH.double()
    w1, w2 = [w.double() for w in batch.w1], [w.double() for w in batch.w2]
    dw1, dw2 = [torch.zeros_like(w) for w in w1], [torch.zeros_like(w) for w in w2]
    y, dx = torch.zeros_like(x), torch.zeros_like(x)
    for t in range(len(x)):
        chosen = list(zip(batch.expert_TK[t].tolist(), batch.prob_TK[t].tolist(), strict=True))
        for e, p in [*chosen, *[(len(w1) - 1, 1.0)] * (batch.case.shared_ffn > 0)]:
            if e < 0:
                continue
            g, u = bf16(w1[e] @ x[t]).chunk(2)
            s = torch.sigmoid(g)
            a = bf16(g * s * u * p)
            y[t] += bf16(w2[e] @ a)
            da = w2[e].T @ dy[t]
            dg, du = da * p * u * (s + g * s * (1 - s)), da * p * g * s
            dh = bf16(torch.cat([dg, du]))
            dx[t] += bf16(w1[e].T @ dh)
            dw2[e] += torch.outer(dy[t], a)
            dw1[e] += torch.outer(dh, x[t])
    return bf16(y), bf16(dx), dw1, dw2


def test_rounding_points_are_those_of_the_specification() -> None:
    """Bit for bit but where an fp32 sum or exp falls on the other side of a tie."""
    equal = total = 0
    for seed in range(20):
        case = Case(
            seed=9000 + seed,
            hidden=48,
            ffn=32,
            shared_ffn=16 * (seed % 2),
            num_experts=4,
            top_k=2,
            tokens=(24,),
            load=LOADS[seed % len(LOADS)],
            dtype=torch.bfloat16,
        )
        batch = Batch.of(case)
        y, dx, _, dw = _call(batch, 0, 1)
        y_true, dx_true, dw1, dw2 = _transcription(batch)
        for value, true in ((y, y_true), (dx, dx_true)):
            equal += int((value.double() == true).sum())
            total += true.numel()
        local = case.num_experts
        truth = (*dw1[:local], *dw2[:local], *dw1[local:], *dw2[local:])
        for value, true in zip(dw, truth, strict=True):
            assert value.dtype == torch.float32
            # one bf16 factor of a sum may fall the other way; unrounded factors would give 1e-3
            assert (value - true).norm() <= 1e-4 * true.norm(), case
    assert equal >= 0.995 * total, (equal, total)


def test_fp32_gives_the_bits_that_autograd_gives_for_a_plain_expert() -> None:
    """Megatron's order of the elementwise products; its losses can then be compared bit for bit."""
    for seed, (tokens, hidden, ffn) in enumerate([(1, 16, 32), (37, 48, 24), (200, 64, 80)]):
        case = Case(
            seed=seed,
            hidden=hidden,
            ffn=ffn,
            shared_ffn=0,
            num_experts=1,
            top_k=1,
            tokens=(tokens,),
            load="uniform",
            dtype=torch.float32,
        )
        batch = Batch.of(case)
        y, dx, dprob, dw = _call(batch, 0, 1)
        leaves = [v.requires_grad_() for v in (batch.x_TH, batch.prob_TK, *batch.w1, *batch.w2)]
        x, prob, w1, w2 = leaves
        g, u = torch.chunk(torch.matmul(x, w1.t()), 2, dim=-1)
        expected = torch.matmul(torch.nn.functional.silu(g) * u * prob, w2.t())
        assert _same(y, expected), case
        for value, true in zip((dx, dprob, *dw), _grad(expected, leaves, batch.dy_TH), strict=True):
            assert _same(value, true), case


def _grad(y: Tensor, leaves: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((y * dy).sum(), leaves)  # the gradient of y is dy * 1


# The schedule.


def _planned(
    expert_PTK: list[list[list[int]]], experts: range
) -> tuple[list[int], list[list[int]]]:
    """Rows per expert and (rank, token, choice) of each row, by looking."""
    rows, sources = [], []
    for expert in experts:
        before = len(sources)
        for rank, expert_TK in enumerate(expert_PTK):
            for token, choices in enumerate(expert_TK):
                for choice, chosen in enumerate(choices):
                    if chosen == expert:
                        sources.append([rank, token, choice])
        rows.append(len(sources) - before)
    return rows, sources


def _schedules(rank: int, world: int, seeds: range) -> int:
    for seed in seeds:
        case = replace(random_case(seed, world, (torch.float32,)), hidden=1, ffn=1, shared_ffn=0)
        batch = Batch.of(case)
        shape, mine = case.shape(world), batch.tokens(rank, world)
        backend = ReferenceBackend(shape, _group(world))
        _, context = backend.forward(
            batch.x_TH[mine],
            batch.expert_TK[mine],
            batch.prob_TK[mine],
            batch.weights(rank, world),
        )
        schedule = backend.schedule(context)
        homes = [batch.expert_TK[batch.tokens(home, world)].tolist() for home in range(world)]
        mine = batch.experts(rank, world)
        rows, sources = _planned(homes, range(mine.start, mine.stop))
        assert schedule.rows_L.dtype == schedule.source_R3.dtype == torch.int64
        assert schedule.source_R3.shape == (len(sources), 3)
        assert schedule.rows_L.tolist() == rows, case
        assert schedule.source_R3.tolist() == sources, case
    return len(seeds)


@pytest.mark.parametrize(
    ("world", "seeds"),
    [(1, range(10_000, 11_000)), (2, range(20_000, 20_700)), (4, range(40_000, 40_400))],
    ids=["ep1", "ep2", "ep4"],
)
def test_schedules_equal_a_plain_planner(world: int, seeds: range) -> None:
    print(f"seeds {seeds}")
    assert run_ranks(world, _schedules, seeds) == [len(seeds)] * world
