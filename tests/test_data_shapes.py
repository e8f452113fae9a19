"""What a layer is fed, mok beside alltoall: packed sequences, lengths that change, replayed routes.

Packed data come to the layer as [T, 1, H] with another T on every rank and in every micro-batch.
In fp32 outputs and gradients have the same bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests import tiny_megatron as tiny
from tests.ranks import run_ranks

# Tokens of each micro-batch on each of two ranks, all in flight before the first backward. Never
# none: Megatron's router fails on an empty input, on any dispatcher.
PACKED = ((513, 1), (1, 40), (7, 2), (64, 64))


def _normal(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def _results(layer: Any, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor | None]:
    for number, y_SBH in reversed(list(enumerate(outputs))):
        y_SBH.backward(_normal(50 + number, *y_SBH.shape))
    grads = [x.grad for x in inputs] + [p.grad for p in layer.parameters()]
    return [y.detach() for y in outputs] + grads


def _same(found: list[Tensor | None], wanted: list[Tensor | None]) -> bool:
    zeros = (torch.zeros(()) if tensor is None else tensor for tensor in (*found, *wanted))
    pairs = list(zeros)
    half = len(pairs) // 2
    return all(
        torch.equal(a, b) or (not a.any() and not b.any())
        for a, b in zip(pairs[:half], pairs[half:], strict=True)
    )


def _packed(dispatcher: str, rank: int, **overrides: Any) -> list[Tensor | None]:
    layer = tiny.moe_layer(dispatcher, tiny.QWEN3, **overrides).train()
    inputs = [
        _normal(10 * rank + number, lengths[rank], 1, 64).requires_grad_()
        for number, lengths in enumerate(PACKED)
    ]
    return _results(layer, inputs, [layer(x)[0] for x in inputs])


def _replayed(dispatcher: str, rank: int, **overrides: Any) -> tuple[list[Tensor | None], bool]:
    """Two micro-batches on routes that another router chose; and whether it was another one."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    RouterReplay.clear_global_router_replay_instances()
    layer = tiny.moe_layer(
        dispatcher, tiny.DEEPSEEK_V3, moe_enable_routing_replay=True, **overrides
    ).train()
    inputs = [_normal(20 + 3 * rank + n, 9 + n, 2, 64).requires_grad_() for n in range(2)]
    own = [layer.route(x)[1] for x in inputs]
    routes = []
    for x in inputs:
        tokens = x.shape[0] * x.shape[1]
        scores = torch.rand(tokens, 8, generator=torch.Generator().manual_seed(tokens + rank))
        routes.append(scores.topk(2).indices)
    outputs = []
    for x, route in zip(inputs, routes, strict=True):
        RouterReplay.set_replay_data([route])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        outputs.append(layer(x)[0])
    # A recompute asks for the routes again, in the order of the backwards.
    layer.router.router_replay.replay_backward_list.reverse()
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    results = _results(layer, inputs, outputs)
    RouterReplay.clear_global_router_replay_instances()
    replayed = [torch.zeros_like(m).scatter_(1, r, True) for m, r in zip(own, routes, strict=True)]
    return results, not any(map(torch.equal, own, replayed))


def _rank(rank: int, world: int) -> dict[str, bool]:
    tiny.set_up(expert_parallel=world)
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    same = {}
    for name, overrides in {"": {}, " recomputed": recompute}.items():
        found, wanted = (_packed(d, rank, **overrides) for d in ("mok", "alltoall"))
        same[f"packed{name}"] = _same(found, wanted)
        found, other = _replayed("mok", rank, **overrides)
        wanted, _ = _replayed("alltoall", rank, **overrides)
        shared_dx = slice(2, 4)  # its two halves are added in another order
        assert other
        for a, b in zip(found[shared_dx], wanted[shared_dx], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        del found[shared_dx], wanted[shared_dx]
        same[f"replayed{name}"] = _same(found, wanted)
    return same


def test_every_shape_has_alltoalls_bytes() -> None:
    for same in run_ranks(2, _rank, deadline=120):
        assert same.keys() == {
            "packed",
            "packed recomputed",
            "replayed",
            "replayed recomputed",
        }
        assert all(same.values()), same
