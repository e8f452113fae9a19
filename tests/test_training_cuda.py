"""Whole trainings with expert parallelism: ranks as processes on one GPU, or on the CPU.

On the GPU the ranks take turns. Their collectives are gloo's; rows travel inside mok's kernels.
Invariant 2 holds call by call: what the ranks of a group computed in the first step has the bytes
of one rank that is given all their tokens. Losses of runs on other layouts agree within what bf16
rounds: there, gradients are added up over data-parallel ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron.contract import Weights
from tests import tiny_megatron as tiny
from tests.batches import places
from tests.ranks import run_ranks

STEPS = 4
NEAR = 2e-2  # of two backends' values in bf16, relative, in the 2-norm
DEADLINE_S = 200.0
EXPERTS = 16
# Two layers, which share a workspace, both with a shared expert.
OPTIONS: dict[str, Any] = {
    "base": tiny.DEEPSEEK_V3,
    "overrides": {
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "hidden_size": 128,
        "moe_ffn_hidden_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "moe_layer_freq": [1, 1],
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 4,
    },
    "optimizer": {"bf16": True, "params_dtype": torch.bfloat16},
    "ddp": {"grad_reduce_in_fp32": True},
}


@dataclass(frozen=True, kw_only=True)
class Calls:
    """A layer's calls in a step on one rank: what went in and what came out. Those of weight
    gradients are what has been added up so far."""

    forward: list[dict[str, Tensor]] = field(default_factory=list)
    backward: list[dict[str, Tensor]] = field(default_factory=list)


@contextmanager
def _recorded() -> Iterator[dict[Any, Calls]]:
    """The calls of every observed layer, by its Observed."""
    from mok_megatron.observe import Observed

    calls: dict[Any, Calls] = defaultdict(Calls)
    run = Observed._seen

    def seen(self: Any, phase: str, call: Any, *arguments: Any) -> Any:
        result = run(self, phase, call, *arguments)
        if phase == "forward":
            x_TH, expert_TK, prob_TK, weights = arguments
            kept = {"x": x_TH, "expert": expert_TK, "prob": prob_TK, "y": result[0]}
            kept |= {"w1": torch.stack(weights.w1), "w2": torch.stack(weights.w2)}
            kept |= {"shared_w1": weights.shared_w1, "shared_w2": weights.shared_w2}
        else:
            _, dy_TH, _, into = arguments
            kept = {"dy": dy_TH, "dx": result.dx_TH, "dprob": result.dprob_TK}
            kept |= {"dw1": torch.stack(into.w1), "dw2": torch.stack(into.w2)}
        of_phase = {"forward": calls[self].forward, "backward": calls[self].backward}[phase]
        of_phase.append({name: tensor.detach().cpu().clone() for name, tensor in kept.items()})
        return result

    with tiny.patched(Observed, "_seen", seen):
        yield calls


def _whole(group: Any, tensor: Tensor) -> Tensor:
    """Those of the group's ranks behind one another."""
    mine = tensor.contiguous().view(torch.uint8)
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine, group=group)
    return torch.cat(every).view(tensor.dtype)


def _wrong(device: str, observed: Any, calls: Calls) -> list[str]:
    """The calls again, on one rank with all tokens and experts: what has other bytes there, and
    what is not near to the reference's."""
    from mok_megatron import backends

    first = calls.forward[0]
    shape = replace(observed.shape, ep_size=1)
    w1, w2 = (_whole(observed.group, first[name]).to(device) for name in ("w1", "w2"))
    shared_w1, shared_w2 = (first[name].to(device) for name in ("shared_w1", "shared_w2"))
    weights = Weights(w1=tuple(w1), w2=tuple(w2), shared_w1=shared_w1, shared_w2=shared_w2)
    arms = {
        name: (
            backends.choose(name, shape, torch.device(device), None)[0],
            places(weights, shape, 0.0, torch.float32),
        )
        for name in (observed.name, "reference")
    }
    exact = {("cuda", "cuda"), ("reference", "cpu")}  # cuBLAS sums as the number of rows suits it
    wrong = []
    for number, (forward, backward) in enumerate(zip(calls.forward, calls.backward, strict=True)):
        got = {n: _whole(observed.group, t) for n, t in (forward | backward).items()}
        x_TH, expert_TK, prob_TK, dy_TH = (got[n].to(device) for n in ("x", "expert", "prob", "dy"))
        for name, (backend, into) in arms.items():
            y_TH, context = backend.forward(x_TH, expert_TK, prob_TK, weights)
            gradients = backend.backward(context, dy_TH, weights, into)
            want = {"y": y_TH, "dx": gradients.dx_TH, "dprob": gradients.dprob_TK}
            want |= {"dw1": torch.stack(into.w1), "dw2": torch.stack(into.w2)}
            for tensor, value in want.items():
                value = value.cpu()
                same = torch.equal(got[tensor].view(torch.uint8), value.view(torch.uint8))
                error = float(
                    (got[tensor].double() - value.double()).norm() / value.double().norm()
                )
                near = error <= NEAR and (name, device) not in exact
                if not (same or near):
                    wrong.append(f"call {number}: {tensor} is {error:.1e} from {name}'s")
    return wrong


def _give_experts(training: tiny.Training) -> None:
    """Experts by their number in the model, whichever rank holds them."""
    for number, layer in enumerate(training.mok_layers()):
        first = dist.get_rank(layer.ep_group) * layer.num_local_experts
        for local, expert in enumerate(layer.experts.local_experts):
            generator = torch.Generator().manual_seed(1000 * number + first + local)
            for parameter in expert.parameters():
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    training.optim.reload_model_params()


def _train(device: str, backend: str, expert_parallel: int) -> tuple[Any, list[str]]:
    """Losses and gradient norms, and what was wrong in the first step."""
    from mok_megatron import plugin
    from mok_megatron.backends import workspace
    from mok_megatron.config import MokConfig

    tiny.set_up(expert_parallel=expert_parallel, device=device)
    settings = MokConfig(backend=backend, row_budget=float(expert_parallel))
    with tiny.patched(plugin, "settings", lambda: settings):
        training = tiny.Training(dispatcher="mok", **OPTIONS)
        _give_experts(training)
        with _recorded() as calls:
            curve = training.run(1)
        with torch.no_grad():
            wrong = [f"{o.name}: {what}" for o, c in calls.items() for what in _wrong(device, o, c)]
        curve += training.run(STEPS - 1)
    assert [o.name for o in calls] == [backend] * 2
    assert {len(c.backward) for c in calls.values()} == {training.micro_batches}
    dist.barrier()
    workspace.destroy_all()
    return curve, wrong


def _rank(rank: int, world: int, device: str) -> dict[str, tuple[Any, list[str]]]:
    backend = "reference" if device == "cpu" else "cuda"
    sizes = [size for size in (1, 2, 4) if size <= world]
    arms = {f"{backend}, EP {size}": (backend, size) for size in sizes}
    arms[f"reference, EP {world}"] = ("reference", world)
    return {name: _train(device, *arm) for name, arm in arms.items()}


@pytest.mark.parametrize(
    ("device", "world"),
    [
        ("cpu", 2),
        pytest.param("cuda", 2, marks=pytest.mark.gpu),
        pytest.param("cuda", 4, marks=pytest.mark.gpu),
    ],
)
def test_a_training_is_the_same_on_every_layout(device: str, world: int) -> None:
    pytest.importorskip("megatron.core")
    for arms in run_ranks(world, _rank, device, deadline=DEADLINE_S):
        assert {name: wrong for name, (_, wrong) in arms.items() if wrong} == {}
        (of_one, _), *others = arms.values()
        for curve, _ in others:
            for (loss, norm), (want_loss, want_norm) in zip(curve, of_one, strict=True):
                assert loss == pytest.approx(want_loss, rel=5e-3)
                assert norm == pytest.approx(want_norm, rel=5e-2)
            assert curve[-1][0] < curve[0][0]
