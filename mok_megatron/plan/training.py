"""An iteration of a whole run on so many GPUs, from one global batch to the next.

compute    micro-batches of a rank x the time of one on the fullest pipeline rank: MoE layers as
           estimate.py has them, the rest at the matrix rate
bubble     (pipeline ranks - 1) / (chunks of a rank) x that time: Megatron's schedule, interleaved
           when the layout has several stages a rank
reduce     gradients, fp32, scattered over the ranks that hold the same parameters
gather     their new values, bf16, back to all of them
optimizer  Adam over a rank's share, and gradients zeroed: UPDATE_BYTES and ZERO_BYTES at the
           memory's rate

Both collectives take bytes x (n - 1) / n over a rank's own way: its link inside an NVLink domain,
and beyond one its network card, whose work the ranks of the group in the domain share. At best
(with Megatron's overlap flags) the backward of the last micro-batch hides the reduction, and the
forward of the first one the gathering, as far as they are long enough; at worst nothing does.

Best and worst also differ in the MoE layers (estimate.py) and in the rest, which takes up to
REST_TIMES as long as at the matrix rate: between them lie the two steps that were measured, of one
rank (scripts/results/throughput.jsonl; a test compares them).

Not counted: recomputation, activations sent between pipeline ranks, latency, stragglers, ranks with
more rows than others, loading of data, checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from mok_megatron.plan.estimate import DIRECTIONS, direction, layer_of, size_of_group
from mok_megatron.plan.machines import LINK_SHARE, NETWORK_SHARE, REST_TIMES, Machine
from mok_megatron.plan.model import GRADIENT_BYTES, WEIGHT_BYTES, Model

# Bytes of a parameter: gradient, weight and two moments in fp32, in and out but the gradient, which
# the norm reads before; and the bf16 weight out. And of zeroing: the fp32 gradient, out.
UPDATE_BYTES, ZERO_BYTES = 4 * 4 + 3 * 4 + 4 + WEIGHT_BYTES, GRADIENT_BYTES


class Unformed(Exception):
    """So many ranks cannot run it; the message says why in a few words."""


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """Milliseconds. pipeline, expert_parallel, data_parallel: their sizes; data_parallel counts the
    ranks that hold a stage, context parallel ones too. micro_batches: of a rank. exposed: of reduce
    and gather, at best. best, worst: all of it. tokens_per_s: of one rank, at best."""

    ranks: int
    pipeline: int
    expert_parallel: int
    data_parallel: int
    micro_batches: int
    compute: float
    bubble: float
    reduce: float
    gather: float
    exposed: float
    optimizer: float
    best: float
    worst: float
    tokens_per_s: float


def iteration(model: Model, machine: Machine, ranks: int) -> Iteration:
    """Raises Unformed."""
    replicas, odd = divmod(ranks, model.pipeline)
    if odd or not replicas:
        raise Unformed(f"{ranks} ranks cannot form pipelines of {model.pipeline}")
    data, odd = divmod(replicas, model.context_parallel)
    if odd or not data:
        raise Unformed(f"{replicas} ranks cannot form context parallel {model.context_parallel}")
    ep = size_of_group(model, ranks, machine)
    micro_batches, odd = divmod(model.batch or model.sequences * data, model.sequences * data)
    if odd or not micro_batches:
        raise Unformed(
            f"a batch of {model.batch} is no multiple of {data} replicas x {model.sequences}"
        )
    chunks = len(model.stages) // model.pipeline
    if chunks > 1 and micro_batches % model.pipeline:
        raise Unformed(
            f"{micro_batches} micro-batches are no multiple of {model.pipeline}, with {chunks} "
            "stages a rank"
        )
    layer = layer_of(model, ep)
    forward, backward = (direction(layer, machine, name) for name in DIRECTIONS)
    of_a_flop = model.tokens / (machine.matrix.value * 1e9)
    works = model.work_of_pipeline()

    def slowest(moe: float, passes: float) -> float:
        return max(w.moe_layers * moe + passes * w.rest_flops * of_a_flop for w in works)

    best = slowest(forward.best + backward.best, 3)
    worst = slowest(forward.worst + backward.worst, 3 * REST_TIMES.value)
    # Of the pipeline's ranks as one, since another may hold most parameters than does most work.
    counts = [(c.dense, c.experts // ep) for c in model.ranks_of_pipeline()]
    moved = [
        _collective(dense, replicas, 1, machine) + _collective(experts, replicas // ep, ep, machine)
        for dense, experts in counts
    ]
    reduce, gather = GRADIENT_BYTES * max(moved), WEIGHT_BYTES * max(moved)
    update = max(
        UPDATE_BYTES * (dense / replicas + experts * ep / replicas) + ZERO_BYTES * (dense + experts)
        for dense, experts in counts
    )
    optimizer = update / (machine.memory.value * 1e9)
    hidden_reduce = slowest(backward.best, 2) if model.overlap_reduce else 0.0
    hidden_gather = slowest(forward.best, 1) if model.overlap_gather else 0.0
    exposed = max(0.0, reduce - hidden_reduce) + max(0.0, gather - hidden_gather)
    passes = micro_batches + (model.pipeline - 1) / chunks
    total = passes * best + exposed + optimizer
    return Iteration(
        ranks=ranks,
        pipeline=model.pipeline,
        expert_parallel=ep,
        data_parallel=replicas,
        micro_batches=micro_batches,
        compute=micro_batches * best,
        bubble=(model.pipeline - 1) / chunks * best,
        reduce=reduce,
        gather=gather,
        exposed=exposed,
        optimizer=optimizer,
        best=total,
        worst=passes * worst + reduce + gather + optimizer,
        tokens_per_s=1e3 * micro_batches * model.tokens / (model.pipeline * total),
    )


def _collective(count: int, group: int, stride: int, machine: Machine) -> float:
    """Milliseconds a byte of each of `count` values, scattered over or gathered from `group` ranks
    that are `stride` apart."""
    domain = int(machine.domain.value)
    together = min(group, max(1, domain // stride))
    moved = count * (group - 1) / group
    link = moved / (machine.link.value * LINK_SHARE.value) if together > 1 else 0.0
    network = moved / (together * machine.network.value * NETWORK_SHARE.value)
    return 1e-6 * max(link, network if group > together else 0.0)
