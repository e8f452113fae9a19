"""The cuda backend and bad input on a GPU: named, or kept where it came from, and usable after.

Every test ends with a good call that gives the bytes it gave before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from mok_megatron.backends.reference import ReferenceBackend
from mok_megatron.contract import OVERFULL
from tests.backends import cuda_cases as cases
from tests.backends import cuda_ranks as virtual

pytestmark = pytest.mark.gpu
CASE = cases.CASE
NAN = float("nan")


@pytest.fixture
def usable_after() -> Iterator[cases.Result]:
    """A good call's results; the same call must give them after the test too."""
    problem = cases.Problem.of(CASE)
    backend = cases.cuda_backend(problem.shape)
    good = cases.call(backend, problem, problem.places(torch.float32, accumulate=True))
    yield good
    backend = cases.cuda_backend(problem.shape)
    again = cases.call(backend, problem, problem.places(torch.float32, accumulate=True))
    assert cases.same_results(good, again) == []
    backend.check()


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ((8, 1, 2), r"in \[0, 8\), got 8 at token 200, slot 0"),
        ((1, -3, 2), r"got -3 at token 200, slot 1"),
        ((1, 2, 2**31 - 1), r"got 2147483647 at token 200, slot 2"),
        ((5, -1, 5), r"only once, got expert 5 again at token 200, slot 2"),
        ((OVERFULL, OVERFULL, OVERFULL), r"at most 3 experts, got more routes at token 200"),
    ],
)
def test_a_bad_choice_poisons_its_call_and_is_raised_once(ids: tuple[int, ...], words: str) -> None:
    problem, p = cases.Problem.of(CASE), cases.Problem.of(CASE)
    backend = cases.cuda_backend(problem.shape)
    good = cases.call(backend, problem, problem.places(torch.float32, accumulate=True))
    bad_TK = problem.expert_TK.clone()
    bad_TK[200] = torch.tensor(ids, dtype=torch.int32)
    bad_TK[250, 0] = -7  # a later one, which is not reported
    into = problem.places(torch.float32, accumulate=True)
    y_TH, context = backend.forward(p.x_TH, bad_TK, p.prob_TK, p.weights)
    torch.cuda.synchronize()
    assert bool(y_TH.isnan().all())
    with pytest.raises(RuntimeError, match=words):
        backend.forward(p.x_TH, p.expert_TK, p.prob_TK, p.weights)
    backend.check()
    gradients = backend.backward(context, p.dy_TH, p.weights, into)
    assert bool(gradients.dx_TH.isnan().all())
    assert bool(gradients.dprob_TK.isnan().all())
    again = cases.call(backend, problem, problem.places(torch.float32, accumulate=True))
    assert cases.same_results(good, again) == []
    backend.check()


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_a_probability_that_is_not_finite_is_raised(
    usable_after: cases.Result, value: float
) -> None:
    p = cases.Problem.of(CASE)
    backend = cases.cuda_backend(p.shape)
    prob_TK = p.prob_TK.clone()
    prob_TK[200, 1] = value
    y_TH, context = backend.forward(p.x_TH, p.expert_TK, prob_TK, p.weights)
    torch.cuda.synchronize()
    words = rf"^mok: a routing probability must be finite, got {value} at token 200, slot 1, in an"
    with pytest.raises(RuntimeError, match=words):
        backend.check()
    into = p.places(torch.float32, accumulate=True)
    gradients = backend.backward(context, p.dy_TH, p.weights, into)
    for result in (y_TH, gradients.dx_TH, gradients.dprob_TK):
        assert bool(result.isnan().all())
    with pytest.raises(RuntimeError, match=rf"must be finite, got {value} at token 200, slot 1 on"):
        ReferenceBackend(p.shape, None).forward(p.x_TH, p.expert_TK, prob_TK, p.weights)


def test_no_optimizer_changes_a_parameter_after_a_fault(usable_after: cases.Result) -> None:
    """The host has not asked the device before the step, which is right behind the bad call."""
    p = cases.Problem.of(CASE)
    backend = cases.cuda_backend(p.shape)
    weight = torch.nn.Parameter(torch.ones(4, device=cases.DEVICE))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    prob_TK = p.prob_TK.clone()
    prob_TK[0, 0] = NAN
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # the device is far behind
    backend.forward(p.x_TH, p.expert_TK, prob_TK, p.weights)
    with pytest.raises(RuntimeError, match="must be finite, got nan at token 0, slot 0"):
        optimizer.step()
    assert weight.tolist() == [1.0] * 4
    optimizer.step()
    assert weight.tolist() == [0.0] * 4


LOST = {
    "slot_R": r"got \d+ as the sum of the slots moved in for \d+ on expert parallel rank 0",
    "row_TK": r"got \d+ pieces of rows added up for \d+ on expert parallel rank 0",
}


@pytest.mark.parametrize("name", LOST)
def test_a_row_that_another_takes_the_place_of_is_counted(
    usable_after: cases.Result, name: str
) -> None:
    """What a stray write into the schedule would do between forward and backward."""
    p = cases.Problem.of(CASE)
    backend = cases.cuda_backend(p.shape)
    weight = torch.nn.Parameter(torch.ones(4, device=cases.DEVICE))
    weight.grad = torch.ones_like(weight)
    _, context = backend.forward(p.x_TH, p.expert_TK, p.prob_TK, p.weights)
    words = getattr(backend._plan(context), name).view(-1)
    at = int((words[:-1].minimum(words[1:]) >= 0).nonzero()[0])
    words[at] = words[at + 1] if name == "slot_R" else -1
    into = p.places(torch.float32, accumulate=True)
    gradients = backend.backward(context, p.dy_TH, p.weights, into)
    with pytest.raises(RuntimeError, match=LOST[name]):
        torch.optim.SGD([weight], lr=1.0).step()
    assert weight.tolist() == [1.0] * 4
    for result in (gradients.dx_TH, gradients.dprob_TK):
        assert bool(result.isnan().all())


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_row_that_does_not_come_home_is_counted(usable_after: cases.Result, ranks: int) -> None:
    """On the rank that misses it, whose results are NaN; those of the others are as ever."""
    problem = cases.Problem.of(replace(CASE, tokens=(240,)))
    parts = virtual.split(problem, (240 // ranks,) * ranks)
    group = virtual.Group.of(parts[0].shape, 240 // ranks)
    into = virtual.places(parts, problem.places(torch.float32, accumulate=True))
    good = group.call(parts, into)
    contexts = [context for _, context in group.forward(parts)]
    row_TK = group.backends[1]._plan(contexts[1]).row_TK
    elsewhere = (row_TK == -2).nonzero()[0].tolist()
    row_TK[elsewhere[0], elsewhere[1]] = -1
    found = group.backward(parts, contexts, into)
    torch.cuda.synchronize()
    words = r"got \d+ pieces of rows added up for \d+ on expert parallel rank 1"
    with pytest.raises(RuntimeError, match=words):
        group.backends[0].check()
    for rank, gradients in enumerate(found):
        for value, before in (
            (gradients.dx_TH, good[rank].dx_TH),
            (gradients.dprob_TK, good[rank].dprob_TK),
        ):
            assert bool(value.isnan().all()) if rank == 1 else cases.same(value, before)


def test_nan_probabilities_of_empty_slots_are_inert(usable_after: cases.Result) -> None:
    problem = cases.Problem.of(CASE)
    empty = torch.zeros_like(problem.expert_TK, dtype=torch.bool)
    empty[::3, 1] = True
    ids = problem.expert_TK.masked_fill(empty, -1)
    backend = cases.cuda_backend(problem.shape)
    results = []
    for value in (0.0, NAN):
        other = replace(problem, expert_TK=ids, prob_TK=problem.prob_TK.masked_fill(empty, value))
        into = other.places(torch.float32, accumulate=False)
        results.append(cases.call(backend, other, into))
    assert cases.same_results(*results) == []
    assert not any(bool(value.isnan().any()) for value in results[1].tensors().values())


def test_a_token_that_is_not_finite_spoils_no_other(usable_after: cases.Result) -> None:
    problem = cases.Problem.of(CASE)
    x_TH = problem.x_TH.clone()
    x_TH[200, 5] = NAN
    into = problem.places(torch.float32, accumulate=False)
    found = cases.call(cases.cuda_backend(problem.shape), replace(problem, x_TH=x_TH), into)
    others = torch.arange(len(x_TH), device=x_TH.device) != 200
    for name in ("y_TH", "dx_TH", "dprob_TK"):
        value, good = getattr(found, name), getattr(usable_after, name)
        assert bool(value[200].isnan().all()), name
        assert cases.same(value[others], good[others]), name


def test_too_little_memory_is_an_error_and_passes(usable_after: cases.Result) -> None:
    problem = p = cases.Problem.of(replace(CASE, tokens=(200_000,), load="balanced"))
    backend = cases.cuda_backend(problem.shape)
    into = p.places(torch.float32, accumulate=True)
    before = [place.clone() for place in cases.flat(into)]
    with _little_memory(), pytest.raises(torch.OutOfMemoryError, match=_NO_ROOM % "forward"):
        backend.forward(p.x_TH, p.expert_TK, p.prob_TK, p.weights)
    y_TH, context = backend.forward(p.x_TH, p.expert_TK, p.prob_TK, p.weights)
    assert bool(y_TH.isfinite().all())
    with _little_memory(), pytest.raises(torch.OutOfMemoryError, match=_NO_ROOM % "backward"):
        backend.backward(context, p.dy_TH, p.weights, into)
    assert cases.differing(before, cases.flat(into)) == []
    gradients = backend.backward(context, p.dy_TH, p.weights, into)
    assert bool(gradients.dx_TH.isfinite().all())


_NO_ROOM = r"^mok: the buffers of a %s of 200000 tokens must fit .*; lower --micro-batch-size"


@contextmanager
def _little_memory() -> Iterator[None]:
    """64 MiB more than what is held."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(cases.DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_arguments_of_another_form_raise_before_any_launch() -> None:
    problem = p = cases.Problem.of(CASE)
    backend = cases.cuda_backend(problem.shape)
    with pytest.raises(RuntimeError, match="x must be"):
        backend.forward(p.x_TH.float(), p.expert_TK, p.prob_TK, p.weights)
    with pytest.raises(RuntimeError, match="expert must be"):
        backend.forward(p.x_TH, p.expert_TK.long(), p.prob_TK, p.weights)
    with pytest.raises(RuntimeError, match="on x's device"):
        backend.forward(p.x_TH, p.expert_TK, p.prob_TK.cpu(), p.weights)
    _, context = backend.forward(p.x_TH, p.expert_TK, p.prob_TK, p.weights)
    with pytest.raises(RuntimeError, match="dy must be"):
        backend.backward(context, p.dy_TH[1:], p.weights, p.places(torch.float32, accumulate=True))
    reference = ReferenceBackend(problem.shape, None)
    assert torch.equal(
        backend.schedule(context).source_R3,
        reference.schedule(
            reference.forward(p.x_TH, p.expert_TK, p.prob_TK, p.weights)[1]
        ).source_R3,
    )
