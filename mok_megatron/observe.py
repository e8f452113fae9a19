"""What a run shows of its mok layers, through Megatron's own means.

Ranges    mok/route (the router and the choice of rows), mok/forward, mok/backward: with --profile
          --nvtx-ranges, in the profiler's timeline.
Timers    mok-forward, mok-backward: with --timing-log-level 2, beside Megatron's own. Like those
          of that level they wait for the device where they start and stop.
Scalars   rows that a rank computes in a layer and micro-batch (the largest, the mean, and the
          largest over the mean in the worst layer), and how long its calls of the cuda backend
          wait for other ranks with nothing to do meanwhile, forward and backward (the largest and
          the mean of the ranks): for their calls to begin, and, as a mean of the SMs, for rows that
          the next tile or a token's sum needs. With --tensorboard-dir or --wandb-project, every
          --tensorboard-log-interval iterations.

Rows, and the calls they came in, are counted on the device, so that a CUDA graph's replays count
too, and read when they are written, where all ranks add them up. A recomputed forward counts once,
an evaluation not at all, but for what it waits. Without these flags no row is counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import nvtx_range_pop, nvtx_range_push
from torch import Tensor
from torch.distributed import ProcessGroup

from mok_megatron.contract import Backend, Context, Gradients, Schedule, WeightGradients, Weights

TIMERS = ("mok-forward", "mok-backward")
_observed: list[weakref.ref[Observed]] = []  # in the order of the model, the same on every rank


class Observed:
    """A layer's backend with its calls seen; a contract.Backend itself.

    `config`: the layer's, which Megatron gives its timers. `group`: the expert parallel one.
    `counts`: the device on which rows are counted; None: they are not.
    """

    def __init__(
        self, backend: Backend, config: Any, group: ProcessGroup, *, counts: torch.device | None
    ) -> None:
        self.backend, self.name, self.shape = backend, backend.name, backend.shape
        self.group = group
        self._config = config
        # Rows of each expert, and calls: the same memory for good, to which graphs add.
        self._counted: Tensor | None = None
        if counts is not None:
            self._counted = torch.zeros(
                backend.shape.num_experts + 1, dtype=torch.int64, device=counts
            )
            _observed.append(weakref.ref(self))

    def forward(
        self, x_TH: Tensor, expert_TK: Tensor, prob_TK: Tensor, weights: Weights
    ) -> tuple[Tensor, Context]:
        """backend.forward."""
        return self._seen("forward", self.backend.forward, x_TH, expert_TK, prob_TK, weights)

    def backward(
        self, context: Context, dy_TH: Tensor, weights: Weights, into: WeightGradients
    ) -> Gradients:
        """backend.backward."""
        return self._seen("backward", self.backend.backward, context, dy_TH, weights, into)

    def schedule(self, context: Context) -> Schedule:
        """backend.schedule."""
        return self.backend.schedule(context)

    def count(self, routing_map_TE: Tensor) -> None:
        """Adds the rows of a forward that a backward will follow."""
        if self._counted is not None and torch.is_grad_enabled():
            self._counted[:-1].add_(routing_map_TE.sum(0))
            self._counted[-1:].add_(1)

    def take_waits(self) -> float:
        """Milliseconds that all layers of this backend's workspace have waited, since asked last;
        0 where none are counted."""
        take = getattr(self.backend, "take_waits", None)
        return 0.0 if take is None else sum(take())

    def take(self) -> Tensor | None:
        """int64 [E + 1]: rows this rank's tokens sent to each expert, and in how many calls, since
        asked last; None: nothing is counted."""
        if self._counted is None:
            return None
        taken = self._counted.clone()
        self._counted.zero_()
        return taken

    def _seen[T](self, phase: str, call: Callable[..., T], *arguments: Any) -> T:
        timers = self._config.timers
        timer = None if timers is None else timers(f"mok-{phase}", log_level=2)
        name = f"mok/{phase}"
        nvtx_range_push(name)
        if timer is not None:
            timer.start()
        try:
            return call(*arguments)
        finally:
            if timer is not None:
                timer.stop()
            nvtx_range_pop(name)


def wants_scalars(arguments: Any) -> bool:
    """Whether a run writes scalars; the same answer on every rank."""
    return bool(
        getattr(arguments, "tensorboard_dir", None) or getattr(arguments, "wandb_project", None)
    )


def report(iteration: int, arguments: Any) -> None:
    """Called by every rank after Megatron has logged an iteration."""
    from megatron.training import global_vars

    interval = arguments.tensorboard_log_interval
    if wants_scalars(arguments) and iteration % interval == 0:
        scalars = gather()
        writer, wandb = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
        for name, value in scalars.items() if writer or wandb else ():
            if writer:
                writer.add_scalar(name, value, iteration)
            if wandb:
                wandb.log({name: value}, iteration)
    if arguments.timing_log_level >= 2 and iteration % arguments.log_interval == 0:
        timers, every = global_vars.get_timers(), arguments.log_interval
        if arguments.log_timers_to_tensorboard:
            timers.write(TIMERS, global_vars.get_tensorboard_writer(), iteration, every, False)
        timers.log(list(TIMERS), normalizer=every)


def gather() -> dict[str, float]:
    """The scalars since they were gathered last. Collective over all ranks."""
    alive = [observed for ref in _observed if (observed := ref()) is not None]
    device = torch.cuda.current_device()  # of the shim a CPU
    most = torch.zeros(3, dtype=torch.float64, device=device)  # rows, ratio, wait
    total = torch.zeros(4, dtype=torch.float64, device=device)  # rows, layers, wait, ranks
    waited, calls = sum(observed.take_waits() for observed in alive), most.new_zeros(())
    by_group: dict[ProcessGroup, list[Tensor]] = {}
    for observed in alive:
        taken = observed.take()
        if taken is not None:
            calls += taken[-1]
            mean_E = taken[:-1].double() / taken[-1].clamp_min(1)
            by_group.setdefault(observed.group, []).append(mean_E)
    for group, layers in by_group.items():
        rows_ME = torch.stack(layers)
        dist.all_reduce(rows_ME, group=group)
        rows_MP = rows_ME.unflatten(1, (group.size(), -1)).sum(-1)
        mean_M, most_M = rows_MP.mean(1), rows_MP.amax(1)
        ratio_M = most_M / mean_M.clamp_min(1e-9)
        most[:2] = torch.maximum(most[:2], torch.stack([most_M.max(), ratio_M.max()]))
        total[0] += mean_M.sum()
        total[1] += len(layers)
    most[2] = total[2] = waited / calls.clamp_min(1)
    total[3] = calls > 0
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    rows, ratio, wait = most.tolist()
    sum_rows, layers_seen, sum_waits, ranks = total.tolist()
    if not layers_seen:
        return {}
    scalars = {
        "mok/rows per rank, max": rows,
        "mok/rows per rank, mean": sum_rows / layers_seen,
        "mok/rows per rank, max over mean": ratio,
    }
    if wait:
        scalars["mok/exposed wait in ms, max"] = wait
        scalars["mok/exposed wait in ms, mean"] = sum_waits / max(ranks, 1)
    return scalars
