"""The forward and backward kernels, thread by thread on the CPU, under drawn orders of threads."""

from __future__ import annotations

import ctypes
import random
import secrets

import pytest
import torch

from tests.csrc.emulation import FAULTS, Layer, build, compiler
from tests.oracle import solve

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler, found none")
LIMIT = 2e-2


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("emulated"))


def drawn(seed: int, ranks: int = 1) -> Layer:
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    experts = ranks * draw.choice([1, 1, 2, 3])
    choices = draw.randint(1, min(experts, 3))
    tokens = tuple(draw.choice([0, 1, 7, 20, 130]) for _ in range(ranks))
    tokens = tokens if any(tokens) else (9,) * ranks
    expert_TK = torch.rand(sum(tokens), experts, generator=generator).argsort(dim=1)[:, :choices]
    expert_TK[torch.rand(expert_TK.shape, generator=generator) < draw.choice([0.0, 0.2])] = -1
    return Layer(
        tokens=tokens,
        hidden=draw.choice([64, 64, 128, 256]),
        width=draw.choice([64, 64, 128]),
        shared_width=draw.choice([0, 0, 64]),
        experts=experts,
        expert_TK=expert_TK,
        seed=seed,
        order=seed,
        fp32=draw.random() < 0.5,
        accumulate=draw.random() < 0.5,
        ctas=draw.choice([1, 2, 3]),
        ahead=draw.choice([0, 1]),
    )


def trouble(it: Layer, kernels: ctypes.CDLL, planted: str = "") -> str:
    """Why a direction stopped, or what differs from the float64 oracle; "" if nothing does."""
    for direction in ("forward", "backward"):
        if why := it.run(kernels, direction, planted):
            return f"{direction}: {why}"
    answer = solve(it.x, it.expert_TK, it.prob_TK, it.dy, it.w1, it.w2, it.experts)
    found = {name: it.of_all(name).double() for name in ("y", "dx", "d_prob_TK")}
    wanted = {"y": answer.y_TH, "dx": answer.dx_TH, "d_prob_TK": answer.dprob_TK}
    gradients = zip(it.gradients(), it.before, (*answer.dw1, *answer.dw2), strict=True)
    for i, (gradient, before, added) in enumerate(gradients):
        found[f"gradient {i}"] = gradient.double()
        wanted[f"gradient {i}"] = added + (before.double() if it.accumulate else 0.0)
    for name, right in wanted.items():
        error = (found[name] - right).norm() / right.norm().clamp(min=1e-6)
        if not error < LIMIT:  # NaN too
            return f"{name}: off by {error}"
    return ""


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_drawn_layers_in_drawn_orders(kernels: ctypes.CDLL, ranks: int) -> None:
    for _ in range(6 // ranks):
        seed = secrets.randbits(31)
        assert trouble(drawn(seed, ranks), kernels) == "", f"seed {seed}"


def of(ranks: int, hidden: int = 64, **more: int) -> Layer:
    """150 tokens that go to 4 experts, so that some boxes are full and some are not."""
    draw = torch.Generator().manual_seed(1)
    return Layer(
        tokens={1: (150,), 2: (20, 130), 4: (7, 0, 142, 1)}[ranks],
        hidden=hidden,
        width=64,
        shared_width=64,
        experts=4,
        expert_TK=torch.rand(150, 4, generator=draw).argsort(dim=1)[:, :2],
        seed=1,
        **more,
    )


def test_neither_ranks_nor_ctas_nor_orders_change_a_byte(kernels: ctypes.CDLL) -> None:
    seen = []
    for ranks, ctas, started, order in ((1, 1, 0, 1), (1, 3, 2, 2), (2, 2, 0, 3), (4, 1, 0, 4)):
        it = of(ranks, ctas=ctas, started=started, order=order)
        assert trouble(it, kernels) == "", (ranks, ctas, started, order)
        routed = [g for i, g in enumerate(it.gradients()) if i % 5 < 4]
        results = [it.of_all(name) for name in ("y", "dx", "d_prob_TK")] + routed
        seen.append([r.contiguous().view(torch.uint8).numpy().tobytes() for r in results])
    assert seen[1:] == seen[:-1]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(kernels: ctypes.CDLL, name: str) -> None:
    for order in range(20):
        ranks = 2 if "push" in name or "overtakes" in name else 1
        hidden = 512 if "products" in name else 64  # so that stages are used again
        if trouble(of(ranks, hidden, order=order), kernels, name):
            return
    raise AssertionError("not seen in 20 orders")
