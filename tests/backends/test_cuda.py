"""The cuda backend: what it refuses (anywhere), and its invariants (on a GPU).

Against the reference backend and the float64 oracle; cuda_cases.py says what a comparison asserts.
"""

from __future__ import annotations

import random
import re
from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from mok_megatron import backends
from mok_megatron.backends import cuda, faults, library
from mok_megatron.contract import OVERFULL, MoEShape, WeightGradients
from mok_megatron.function import FreshGradients
from tests.backends import cuda_cases as cases

SHAPE = MoEShape(
    hidden=128, ffn=64, shared_ffn=64, num_experts=4, top_k=2, ep_size=1, dtype=torch.bfloat16
)
CASE = cases.CASE
gpu = pytest.mark.gpu


# What it refuses.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"num_experts": 257, "ep_size": 257},
            r"expert parallel .*257( with --mok-backend auto)?; use",
        ),
        ({"dtype": torch.float16}, r"computes in torch.bfloat16, got torch.float16; use --bf16"),
        ({"hidden": 2890}, r"hidden size must be a multiple of 64, got 2890; use"),
        ({"ffn": 100}, r"expert width must be a multiple of 64, got 100; use"),
        ({"shared_ffn": 65}, r"shared expert width must be a multiple of 64, got 65; use"),
        ({"num_experts": 2049}, r"at most 2048 experts, got 2049; use --mok-backend reference"),
        ({"num_experts": 128, "top_k": 65}, r"at most 64 choices a token, got 65; use"),
    ],
)
@pytest.mark.parametrize("name", ["cuda", "auto"])
def test_a_shape_outside_the_kernels_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, name: str, change: dict[str, object], words: str
) -> None:
    monkeypatch.setattr(library, "load", lambda: pytest.fail("loaded"))
    shape = replace(SHAPE, **change)
    group = type("Group", (), {"size": lambda self: shape.ep_size})()
    with pytest.raises(RuntimeError, match=f"^mok: .*{words}"):
        backends.choose(name, shape, torch.device("cuda"), group)


def test_a_group_of_another_size_is_refused() -> None:
    group = type("Group", (), {"size": lambda self: 2})()
    with pytest.raises(RuntimeError, match=r"must have 1 ranks, got 2; pass the group"):
        backends.choose("cuda", SHAPE, torch.device("cuda"), group)


@pytest.mark.parametrize("name", ["cuda", "auto"])
def test_a_missing_library_is_an_error_not_a_slower_path(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def missing() -> None:
        raise library.LibraryMissing("mok: the CUDA library must be built, got no file")

    monkeypatch.setattr(library, "load", missing)
    with pytest.raises(RuntimeError, match="must be built, got no file"):
        backends.choose(name, SHAPE, torch.device("cuda"), None)


def test_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(RuntimeError, match=r"compute capability 9.0 .*got 10.0; use --mok-backend"):
        backends.choose("cuda", SHAPE, torch.device("cuda"), None)


def test_cpu_tensors_get_the_reference_or_an_error() -> None:
    cpu = torch.device("cpu")
    assert backends.choose("auto", SHAPE, cpu, None)[0].name == "reference"
    with pytest.raises(RuntimeError, match="needs CUDA tensors, got cpu; use --mok-backend"):
        backends.choose("cuda", SHAPE, cpu, None)


# Rows and places on the host.


def test_capacity_holds_any_routing_and_is_reached() -> None:
    draw = random.Random(3)
    for _ in range(2000):
        experts, slots = draw.randint(1, 40), draw.choice([0, 1, 5, 127, 128, 1000])
        counts = [0] * experts
        for _ in range(slots):
            counts[draw.randrange(draw.randint(1, experts))] += 1
        padded = sum(-(-count // 128) * 128 for count in counts)
        assert padded <= cuda.capacity(slots, experts)
        assert cuda.capacity(slots, experts) % 128 == 0
    assert cuda.capacity(3, 8) == 3 * 128
    assert cuda.capacity(0, 8) == 128


def test_runs_of_places_leave_the_frozen_out_and_split_at_dtypes() -> None:
    a, b = torch.empty(1), torch.empty(1, dtype=torch.bfloat16)
    found = [(start, end) for start, end, _ in cuda._runs([None, a, a, b, None, None, b])]
    assert found == [(1, 3), (3, 4), (6, 7)]
    assert list(cuda._runs([None, None])) == []


@pytest.mark.parametrize(
    ("kind", "expert", "words"),
    [
        (1, 9, r"an expert id must be -1 or in \[0, 4\), got 9 at token 5, slot 1"),
        (2, 3, r"only once, got expert 3 again at token 5, slot 1"),
        (1, OVERFULL, r"at most 2 experts, got more routes at token 5, .*--moe-router-topk"),
        (3, 3, r"probability must be finite, got -inf at token 5, slot 1, .*; look for NaN"),
    ],
)
def test_the_words_of_a_fault(kind: int, expert: int, words: str) -> None:
    minus_infinity = 0xFF800000
    text = faults.describe([kind, expert, 5, 1, 4, 2, minus_infinity, 0])
    assert re.fullmatch(r"mok: .*, got .*; .*", text)
    assert re.search(words, text)


def test_an_op_without_room_says_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 2**37))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2**30)
    other, x_TH = RuntimeError("mok: another rule"), torch.empty(7, 2)
    assert faults.out_of_memory(other, "forward", x_TH) is other
    error = faults.out_of_memory(
        RuntimeError("mok: no room for 4294967296 bytes"), "backward", x_TH
    )
    assert isinstance(error, torch.OutOfMemoryError)
    for words in ("mok: the buffers of a backward of 7 tokens", "1.00 GiB free of 128.00 GiB"):
        assert words in str(error)
    for words in ("2.00 GiB in pieces", "buffer of 4.00 GiB (4294967296 bytes); lower --micro"):
        assert words in str(error)


# On a GPU: right.


@gpu
def test_poison_reaches_what_the_allocator_hands_out() -> None:
    for size in (1, 100, 100_000, 10_000_000):
        cases.poison()
        fresh = torch.empty(size, dtype=torch.int32, device=cases.DEVICE)
        assert bool((fresh == cases.POISON).all()), size


@gpu
@pytest.mark.parametrize(("tokens", "experts"), [(1, 1), (31, 2), (8192, 256), (3000, 2048)])
def test_a_large_schedule_is_a_stable_sort(tokens: int, experts: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    top_k = min(experts, 8)
    score_TE = torch.rand(tokens, experts, generator=generator)
    expert_TK = score_TE.topk(top_k).indices.to(torch.int32)
    expert_TK[torch.rand(tokens, top_k, generator=generator) < 0.1] = -1
    prob_TK = torch.rand(tokens, top_k, generator=generator)
    cases.poison()
    library.load()
    schedule = torch.ops.mok_megatron.route(
        expert_TK.to(cases.DEVICE), prob_TK.to(cases.DEVICE), experts
    )
    plan = cuda._Plan.of(schedule, tokens, replace(SHAPE, num_experts=experts, top_k=top_k), 0, 0)
    (start_E, count_E, _, _, faulty, row_TK, slot_R, prob_R) = (
        getattr(plan, field.name).cpu() for field in fields(plan)
    )

    ids = expert_TK.flatten()
    order = ids.argsort(stable=True)
    order = order[ids[order] >= 0]
    counts = torch.bincount(ids[order], minlength=experts)
    assert faulty.tolist() == [0]
    assert count_E.tolist() == counts.tolist()
    assert start_E.tolist() == [0, *((counts + 127) // 128 * 128).cumsum(0).tolist()]
    rows = torch.cat([torch.arange(count) + a for a, count in zip(start_E, count_E, strict=False)])
    assert torch.equal(slot_R[rows].long(), order)
    assert torch.equal(prob_R[rows], prob_TK.flatten()[order])
    assert torch.equal(row_TK.flatten()[order].long(), rows)
    assert bool((row_TK.flatten()[ids < 0] == -1).all())
    padding = torch.ones(int(start_E[-1]), dtype=torch.bool)
    padding[rows] = False
    assert bool((slot_R[: len(padding)][padding] == -1).all())


@gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("accumulate", [True, False])
def test_ctas_and_the_order_of_experts_change_no_byte(accumulate: bool) -> None:
    problem = cases.Problem.of(CASE)
    backend = cases.cuda_backend(problem.shape)
    places = problem.places(torch.float32, accumulate=accumulate)
    expected = cases.call(backend, problem, places)
    for ctas, ahead in ((1, 0), (1, 1), (2, 3), (7, 1), (131, 100), (500, 2)):
        backend.ctas, backend.ahead = ctas, ahead
        places = problem.places(torch.float32, accumulate=accumulate)
        assert cases.same_results(expected, cases.call(backend, problem, places)) == [], ctas


@gpu
def test_frozen_and_mixed_places_get_the_same_bytes_as_all_of_them() -> None:
    problem = cases.Problem.of(CASE)
    whole = problem.places(torch.float32, accumulate=True)
    backend = cases.cuda_backend(problem.shape)
    all_of_them = cases.call(backend, problem, whole)
    places = list(cases.flat(problem.places(torch.float32, accumulate=True)))
    narrow = list(cases.flat(problem.places(torch.bfloat16, accumulate=True)))
    wanted: list[Tensor | None] = [
        None if i % 5 in (1, 2) else narrow[i] if i % 7 == 3 else places[i]
        for i in range(len(places))
    ]
    into = WeightGradients.of(tuple(wanted), problem.shape, accumulate=True)
    some = cases.call(backend, problem, into)
    assert cases.same(some.dx_TH, all_of_them.dx_TH)
    assert cases.same(some.dprob_TK, all_of_them.dprob_TK)
    for i, place in enumerate(wanted):
        if place is not None and place.dtype == torch.float32:
            assert cases.same(place, all_of_them.dw[i]), i
        elif place is not None:
            assert cases.error(place, all_of_them.dw[i].double()) < 1e-2, i


@gpu
@pytest.mark.parametrize(
    ("ffn", "shared_ffn", "experts", "copies", "limit"),
    [
        (64, 0, 8, 150, 1e-4),  # rows of eight choices
        # x, y, dx, dy, g|u of routed and shared experts, and all that is made of them. A sum over
        # 300,800 rows is cut in each of its 18,800 steps, by 2^-23 at most.
        (3584, 3584, 2, 1175, 2.3e-3),
    ],
)
def test_every_tensor_beyond_two_to_the_31_elements(
    ffn: int, shared_ffn: int, experts: int, copies: int, limit: float
) -> None:
    """Tokens of a batch that needs 64-bit offsets, the last among them: the bytes they have alone.

    (No weight of an expert can be as large; of choices and probabilities a call has fewer.)
    """
    case = replace(
        CASE,
        hidden=7168,
        ffn=ffn,
        shared_ffn=shared_ffn,
        num_experts=experts,
        top_k=8 if experts == 8 else 1,
        tokens=(256,),
        load="balanced",
    )
    assert copies * 256 * case.top_k * min(7168, 2 * ffn if ffn > 64 else 7168) > 2**31
    small = cases.Problem.of(case)
    large = replace(
        small,
        x_TH=small.x_TH.repeat(copies, 1),
        expert_TK=small.expert_TK.repeat(copies, 1),
        prob_TK=small.prob_TK.repeat(copies, 1),
        dy_TH=small.dy_TH.repeat(copies, 1),
    )
    backend = cases.cuda_backend(small.shape)
    alone = cases.call(backend, small, small.places(torch.float32, accumulate=False))
    together = cases.call(backend, large, small.places(torch.float32, accumulate=False))
    for name in ("y_TH", "dx_TH", "dprob_TK"):
        value, expected = getattr(together, name), getattr(alone, name)
        for copy in (0, copies // 2, copies - 1):
            assert cases.same(value[256 * copy : 256 * (copy + 1)], expected), (name, copy)
    off = [cases.error(v, copies * e.double()) for v, e in zip(together.dw, alone.dw, strict=True)]
    print(f"weight gradients of {copies * 256} tokens: at most {max(off):.1e} off")
    assert max(off) < limit


# On a GPU: always the same, waiting for nothing.


@gpu
def test_a_hundred_repeats_give_the_same_bytes() -> None:
    problem = cases.Problem.of(CASE)
    backend = cases.cuda_backend(problem.shape)
    first = cases.call(backend, problem, problem.places(torch.float32, accumulate=True))
    for repeat in range(100):
        fresh = cases.cuda_backend(problem.shape) if repeat % 2 else backend
        again = cases.call(fresh, problem, problem.places(torch.float32, accumulate=True))
        assert cases.same_results(first, again) == [], repeat


@gpu
def test_a_tokens_bytes_do_not_depend_on_the_other_tokens() -> None:
    problem = cases.Problem.of(CASE)
    backend = cases.cuda_backend(problem.shape)
    whole = cases.call(backend, problem, problem.places(torch.float32, accumulate=False))
    for start, end in pairwise([0, 1, 128, 200, 301]):
        mine = slice(start, end)
        part = replace(
            problem,
            x_TH=problem.x_TH[mine],
            expert_TK=problem.expert_TK[mine],
            prob_TK=problem.prob_TK[mine],
            dy_TH=problem.dy_TH[mine],
        )
        alone = cases.call(backend, part, part.places(torch.float32, accumulate=False))
        assert cases.same(alone.y_TH, whole.y_TH[mine])
        assert cases.same(alone.dx_TH, whole.dx_TH[mine])
        assert cases.same(alone.dprob_TK, whole.dprob_TK[mine])


@gpu
def test_the_host_waits_for_nothing_not_even_in_the_first_call() -> None:
    problem = cases.Problem.of(CASE)
    backend, p = cases.cuda_backend(problem.shape), problem
    into = problem.places(torch.float32, accumulate=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            _, context = backend.forward(p.x_TH, p.expert_TK, p.prob_TK, p.weights)
            backend.backward(context, p.dy_TH, p.weights, into)
            fresh = FreshGradients().open(p.weights, (True,) * len(p.weights.flat()), p.shape)
            backend.backward(context, p.dy_TH, p.weights, fresh)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
@pytest.mark.parametrize("accumulate", [True, False])
def test_a_hundred_replays_of_a_captured_call_equal_eager_calls(accumulate: bool) -> None:
    problem = cases.Problem.of(CASE)
    backend, p = cases.cuda_backend(problem.shape), problem
    cases.call(backend, problem, problem.places(torch.float32, accumulate=accumulate))
    x_TH, expert_TK, prob_TK, dy_TH = (v.clone() for v in (p.x_TH, p.expert_TK, p.prob_TK, p.dy_TH))
    into = problem.places(torch.float32, accumulate=accumulate)
    start = [w.clone() for w in cases.flat(into)]
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        y_TH, context = backend.forward(x_TH, expert_TK, prob_TK, p.weights)
    with torch.cuda.graph(backward, pool=forward.pool()):
        gradients = backend.backward(context, dy_TH, p.weights, into)
    for replay in range(100):
        other = problem.rerouted(900 + replay)
        x_TH.copy_(other.x_TH.flip(0) if replay % 2 else other.x_TH)
        other = replace(other, x_TH=x_TH.clone())
        expert_TK.copy_(other.expert_TK)
        prob_TK.copy_(other.prob_TK)
        for place, value in zip(cases.flat(into), start, strict=True):
            place.copy_(value)
        forward.replay()
        if replay % 3 == 0:  # eager calls in between, in odd and even numbers
            places = problem.places(torch.float32, accumulate=accumulate)
            cases.call(backend, problem, places)
        backward.replay()
        eager = cases.call(backend, other, problem.places(torch.float32, accumulate=accumulate))
        found = [y_TH, gradients.dx_TH, gradients.dprob_TK, *cases.flat(into)]
        wrong = cases.differing(found, list(eager.tensors().values()))
        assert wrong == [], (replay, [list(eager.tensors())[i] for i in wrong])
