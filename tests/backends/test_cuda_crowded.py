"""The layer among other kernels: most SMs held by one that does not end, and two streams at once.

The holder is a kernel of one-thread CTAs that take all shared memory of their SM, so that no CTA of
a layer fits beside one. It ends when the host says so, or after a limit, so that nothing can hang
longer than that. All waiting on the host has a deadline.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.backends import cuda_cases as cases
from tests.backends import cuda_ranks as virtual

gpu = pytest.mark.gpu
LIMIT = 20  # seconds that a holder stays at most
CASE = replace(cases.CASE, seed=29, tokens=(500,))
HOLD = r"""
extern "C" __global__ void hold(volatile int* words, int seconds) {
  // words[0]: may end; words[1 + c]: CTA c runs
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  words[1 + blockIdx.x] = 1;
  __threadfence_system();
  do {
    __nanosleep(2000);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (words[0] == 0 && now - start < seconds * 1000000000ull);
}
"""


def _wait(until: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not until() and time.monotonic() < deadline:
        time.sleep(0.001)
    return until()


@contextmanager
def _held(sms: int) -> Iterator[Callable[[], bool]]:
    """So many SMs are taken while the block runs; yields whether they still are."""
    kernel = torch.cuda._compile_kernel(HOLD, "hold")
    room = torch.cuda.get_device_properties(cases.DEVICE).shared_memory_per_block_optin
    kernel.set_shared_memory_config(room)
    words = torch.zeros(1 + sms, dtype=torch.int32).pin_memory()
    stream, ended = torch.cuda.Stream(), torch.cuda.Event()
    try:
        kernel((sms, 1, 1), (1, 1, 1), [words, LIMIT], shared_mem=room, stream=stream)
        ended.record(stream)
        assert _wait(lambda: bool(words[1:].all()), LIMIT / 2), f"{int(words[1:].sum())} CTAs run"
        yield lambda: not ended.query()
    finally:
        words[0] = 1
        stream.synchronize()


@gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("left", [32, 5, 1])
def test_a_layer_ends_while_another_kernel_holds_all_but_a_few_sms(left: int) -> None:
    problem = cases.Problem.of(CASE)
    backend, p = cases.cuda_backend(problem.shape), problem
    into = problem.places(torch.float32, accumulate=True)
    expected = cases.call(backend, problem, problem.places(torch.float32, accumulate=True))
    torch.cuda.synchronize()
    sms = torch.cuda.get_device_properties(cases.DEVICE).multi_processor_count
    with _held(sms - left) as holds:
        y_TH, context = backend.forward(p.x_TH, p.expert_TK, p.prob_TK, p.weights)
        gradients = backend.backward(context, p.dy_TH, p.weights, into)
        ended = torch.cuda.Event()
        ended.record()
        assert _wait(ended.query, LIMIT / 2), "the layer waits for the other kernel"
        assert holds(), "the other kernel ended too early to show anything"
    found = [y_TH, gradients.dx_TH, gradients.dprob_TK, *cases.flat(into)]
    assert cases.differing(found, list(expected.tensors().values())) == []


@gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("left", [72, 68])
def test_ranks_end_while_most_of_one_ranks_ctas_cannot_start(left: int) -> None:
    """Two virtual ranks of 66 CTAs each, the second of which finds room for few. The other kernel
    ends when both directions of both ranks have."""
    problem = cases.Problem.of(CASE)
    parts = virtual.split(problem, (200, 300))
    group = virtual.Group.of(parts[0].shape, 300)
    places = problem.places(torch.float32, accumulate=True)
    into = virtual.places(parts, places)
    whole = cases.call(cases.cuda_backend(problem.shape), problem, places)
    group.forward(parts)  # so that the streams' allocations and the kernels are there
    torch.cuda.synchronize()
    with _held(virtual.SMS - left) as holds:
        forward = group.forward(parts)
        gradients = group.backward(parts, [context for _, context in forward], into)
        ended = torch.cuda.Event()
        ended.record()
        assert _wait(ended.query, LIMIT / 2), "the ranks wait for the other kernel"
        assert holds(), "the other kernel ended too early to show anything"
    found = [
        torch.cat([y_TH for y_TH, _ in forward]),
        torch.cat([g.dx_TH for g in gradients]),
        torch.cat([g.dprob_TK for g in gradients]),
        *(w for places in into for w in places.w1),
        *(w for places in into for w in places.w2),
    ]
    wanted = [whole.y_TH, whole.dx_TH, whole.dprob_TK, *whole.dw[: 2 * CASE.num_experts]]
    assert cases.differing(found, wanted) == []


@gpu
def test_two_streams_share_a_backend() -> None:
    problems = [cases.Problem.of(CASE), cases.Problem.of(CASE).rerouted(5)]
    backend = cases.cuda_backend(problems[0].shape)
    rounds = 20
    expected, into = [], []
    for p in problems:
        result = cases.call(backend, p, p.places(torch.float32, accumulate=True))
        expected.append(list(result.tensors().values()))
        into.append([p.places(torch.float32, accumulate=True) for _ in range(rounds)])
    streams = [torch.cuda.Stream() for _ in problems]
    found: list[list[list[Tensor]]] = [[], []]
    torch.cuda.synchronize()
    for index in range(rounds):
        for which, p in enumerate(problems):
            with torch.cuda.stream(streams[which]):
                y_TH, context = backend.forward(p.x_TH, p.expert_TK, p.prob_TK, p.weights)
                gradients = backend.backward(context, p.dy_TH, p.weights, into[which][index])
            places = cases.flat(into[which][index])
            found[which].append([y_TH, gradients.dx_TH, gradients.dprob_TK, *places])
    torch.cuda.synchronize()
    for which in range(len(problems)):
        for index in range(rounds):
            assert cases.differing(found[which][index], expected[which]) == [], (which, index)


@gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hundred_calls_beside_a_busy_stream_have_the_same_bytes(ranks: int) -> None:
    """Another stream multiplies and copies all the while; each rank comes late by a drawn time."""
    problem, draw = cases.Problem.of(CASE), random.Random(9)
    whole = cases.call(
        cases.cuda_backend(problem.shape), problem, problem.places(torch.float32, accumulate=True)
    )
    parts = virtual.split(problem, (500,) if ranks == 1 else (200, 300))
    group = virtual.Group.of(parts[0].shape, 500) if ranks > 1 else None
    backend, busy = cases.cuda_backend(problem.shape), torch.cuda.Stream()
    a = torch.randn(8192, 8192, device=cases.DEVICE, dtype=torch.bfloat16)
    product, copied, beside = torch.empty_like(a), torch.empty_like(a), 0
    for call in range(100):
        places = problem.places(torch.float32, accumulate=True)
        into = virtual.places(parts, places)
        torch.cuda.synchronize()
        with torch.cuda.stream(busy):
            for _ in range(draw.randint(3, 6)):  # of about 2 ms each
                torch.mm(a, a, out=product)
                copied.copy_(a)
        for stream in group.streams if group is not None else (torch.cuda.current_stream(),):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(draw.randrange(1, 2_000_000))
        ended = torch.cuda.Event()
        if group is None:
            p = parts[0]
            y_TH, context = backend.forward(p.x_TH, p.expert_TK, p.prob_TK, p.weights)
            found = [(y_TH, backend.backward(context, p.dy_TH, p.weights, into[0]))]
        else:
            forward = group.forward(parts)
            gradients = group.backward(parts, [context for _, context in forward], into)
            found = [(y_TH, g) for (y_TH, _), g in zip(forward, gradients, strict=True)]
        ended.record()
        ended.synchronize()
        beside += not busy.query()
        seen = [
            torch.cat([y_TH for y_TH, _ in found]),
            torch.cat([g.dx_TH for _, g in found]),
            torch.cat([g.dprob_TK for _, g in found]),
            *(w for of in into for w in of.w1),
            *(w for of in into for w in of.w2),
        ]
        wanted = [whole.y_TH, whole.dx_TH, whole.dprob_TK, *whole.dw[: 2 * CASE.num_experts]]
        assert cases.differing(seen, wanted) == [], call
    print(f"{ranks} ranks: 100 calls, {beside} ended before their neighbour")
    assert beside > 50
