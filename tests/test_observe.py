"""What a run shows of its mok layers: ranges, timers and scalars, in a training on two ranks."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch

from tests import tiny_megatron as tiny
from tests.ranks import run_ranks

EXPERTS, STEPS = 8, 2
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def _arguments() -> Any:
    return SimpleNamespace(
        moe_token_dispatcher_type="mok",
        num_experts=EXPERTS,
        tensorboard_dir="somewhere",
        tensorboard_log_interval=STEPS,
        timing_log_level=2,
        log_interval=1,
        log_timers_to_tensorboard=True,
    )


def _rank(rank: int, world: int) -> dict[str, Any]:
    tiny.set_up(expert_parallel=world)
    from megatron.core import timers, utils
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.training import global_vars

    from mok_megatron import observe

    written: dict[str, float] = {}
    ranges: list[str] = []
    maps: list[torch.Tensor] = []
    route = MoELayer.route

    def seen_route(self: Any, *args: Any, **kwargs: Any) -> Any:
        probs, routing_map = route(self, *args, **kwargs)
        if torch.is_grad_enabled():
            maps.append(routing_map)
        return probs, routing_map

    class Writer:
        def add_scalar(self, name: str, value: float, iteration: int) -> None:
            written[name] = float(value)
            assert iteration == STEPS or name.endswith("-time")

    arguments = _arguments()
    global_vars._GLOBAL_ARGS = arguments
    global_vars._GLOBAL_TIMERS = timers.Timers(2, "minmax")
    timers.SummaryWriter = Writer  # TensorBoard's, which need not be installed
    global_vars._GLOBAL_TENSORBOARD_WRITER = Writer() if rank == world - 1 else None
    torch.cuda.nvtx.range_push = ranges.append
    torch.cuda.nvtx.range_pop = lambda: ranges.append("")
    utils.configure_nvtx_profiling(True)

    training = tiny.Training(dispatcher="mok", base=tiny.QWEN3, overrides=RECOMPUTE)
    training.config.timers = global_vars.get_timers()
    with tiny.patched(MoELayer, "route", seen_route):
        training.run(STEPS)
    training.config.timers = None
    training.evaluate()
    first = next(seen for ref in observe._observed if (seen := ref()) is not None)
    first.backend.take_waits = lambda: [0.5, 1.0 + rank, 0.0]  # the kernels count them
    logged = global_vars.get_timers().get_all_timers_string(list(observe.TIMERS), reset=False)
    observe.report(STEPS - 1, arguments)
    assert not any(name.startswith("mok/") for name in written)
    observe.report(STEPS, arguments)

    # Two layers in turn, in every micro-batch of every step.
    rows_2E = torch.stack([torch.stack(maps[n::2]).sum((0, 1)) for n in range(2)]).double()
    torch.distributed.all_reduce(rows_2E)
    rows_2P = rows_2E.unflatten(1, (world, -1)).sum(-1) / (len(maps) // 2)
    return {
        "ranges": ranges,
        "logged": logged,
        "written": written,
        "rows": rows_2P.tolist(),
        "layers": len(training.mok_layers()),
        "calls": len(maps),
    }


def test_a_training_shows_its_layers() -> None:
    first, last = run_ranks(2, _rank, deadline=120)
    rows = torch.tensor(last["rows"])
    most, mean = rows.amax(1), rows.mean(1)
    assert first["written"] == {}  # writers are on the last rank
    shown = {name: v for name, v in last["written"].items() if name.startswith("mok/")}
    wanted = {
        "mok/rows per rank, max": most.max(),
        "mok/rows per rank, mean": mean.mean(),
        "mok/rows per rank, max over mean": (most / mean).max(),
        "mok/exposed wait in ms, max": 2.5 / last["calls"],
        "mok/exposed wait in ms, mean": 2.0 / last["calls"],
    }
    assert shown.keys() == wanted.keys()
    for name, value in wanted.items():
        assert abs(shown[name] - float(value)) < 1e-4 * float(value), name
    assert {"mok-forward-time", "mok-backward-time"} <= last["written"].keys()
    for of_rank in (first, last):
        opened = [name for name in of_rank["ranges"] if name.startswith("mok/")]
        # A micro-batch: routed and computed, again for the backward, and that; then evaluated.
        assert opened.count("mok/backward") == first["layers"] * 2 * STEPS
        assert opened.count("mok/forward") == opened.count("mok/route")
        assert opened.count("mok/forward") == first["layers"] * 2 * (2 * STEPS + 1)
        assert of_rank["ranges"].count("") == len(of_rank["ranges"]) // 2
    assert re.search(r"mok-forward \.+: \(\d+\.\d\d, \d+\.\d\d\)\n +mok-backward", last["logged"])


def test_nothing_is_counted_that_nobody_reads() -> None:
    from mok_megatron import observe

    assert not observe.wants_scalars(None)
    assert not observe.wants_scalars(SimpleNamespace(tensorboard_dir=None, wandb_project=""))
    assert observe.wants_scalars(SimpleNamespace(tensorboard_dir=None, wandb_project="mine"))
    observed = _observed(None)
    observed.count(torch.ones(4, EXPERTS, dtype=torch.bool))
    assert observed.take() is None


def test_rows_are_counted_in_the_memory_that_a_graph_has_seen() -> None:
    observed = _observed(torch.device("cpu"))
    counted = observed._counted
    places = set()
    for calls in (3, 1):
        for _ in range(calls):
            observed.count(torch.ones(4, EXPERTS, dtype=torch.bool))
        with torch.no_grad():
            observed.count(torch.ones(4, EXPERTS, dtype=torch.bool))
        taken = observed.take()
        assert taken.tolist() == [4 * calls] * EXPERTS + [calls]
        assert observed._counted is counted
        places.add(counted.data_ptr())
        assert taken.data_ptr() not in places
    assert len(places) == 1
    assert observed.take().tolist() == [0] * (EXPERTS + 1)


def _observed(counts: torch.device | None) -> Any:
    from mok_megatron import observe

    backend: Any = SimpleNamespace(name="reference", shape=SimpleNamespace(num_experts=EXPERTS))
    group: Any = None
    return observe.Observed(backend, SimpleNamespace(timers=None), group, counts=counts)
