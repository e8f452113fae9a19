"""A layer on a machine: what no kernel can beat, what the measured kernels make of it, a step.

floor      max(FLOPs / matrix rate, bytes / memory rate, wire bytes / link rate)
compute    max(sum over passes of FLOPs / the pass's measured rate + routed rows x the measured cost
           of bringing and combining them, bytes / memory rate); other machines than the H200 get
           its rates times the ratio of their matrix rates, and its cost of rows by that of memory
wire       wire bytes / (link rate x LINK_SHARE)
exposed    what wire adds to compute. At best everything but the ends overlaps: the rows that the
           first wave of tiles waits for, and the results of the last one. At worst EXPOSED_SHARE of
           the shorter of the two stays too, the most that an emulated wire left. Both are of a rank
           whose share of rows is balanced: the busiest rank sets a layer's time, so multiply by its
           rows over the mean (mok's TensorBoard scalar of a run has that ratio).
step       forward and backward of all layers of the model on one micro-batch: MoE layers at best
           overlap; the rest at the matrix rate, which is a floor. training.py adds what lies
           between micro-batches.

For more than one rank this is a model and no measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from mok_megatron.limits import ROW_TILE
from mok_megatron.plan.layer import Layer
from mok_megatron.plan.machines import EXPOSED_SHARE, LINK_SHARE, MACHINES, RATES, ROWS, Machine
from mok_megatron.plan.model import Model

COLUMN_TILE = 256
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class Direction:
    """Milliseconds of one direction of one layer on one rank. floor: the largest of the next three.
    compute: without other ranks. best, worst: with them."""

    floor: float
    matrix_floor: float
    memory_floor: float
    wire_floor: float
    bound: str
    compute: float
    wire: float
    best: float
    worst: float


def layer_of(model: Model, ranks: int) -> Layer:
    """The model's MoE layer with its experts on `ranks` ranks."""
    return Layer(
        hidden=model.hidden,
        ffn=model.ffn,
        shared_ffn=model.shared_ffn,
        num_experts=model.num_experts,
        top_k=model.top_k,
        tokens=model.tokens,
        ranks=ranks,
        groups=model.groups,
        group_top_k=model.group_top_k,
    )


def expert_parallel(num_experts: int, ranks: int, domain: float) -> int:
    """The most ranks that can share the experts evenly, divide all ranks, and reach each other."""
    limit = min(ranks, int(domain), num_experts)
    return next(p for p in range(limit, 0, -1) if num_experts % p == 0 and ranks % p == 0)


def size_of_group(model: Model, ranks: int, machine: Machine) -> int:
    """Expert parallel size of a run on so many ranks: inside a pipeline stage, where they form the
    file's pipeline."""
    of_a_stage = ranks if ranks % model.pipeline else ranks // model.pipeline
    return expert_parallel(model.num_experts, of_a_stage, machine.domain.value)


def direction(layer: Layer, machine: Machine, name: str) -> Direction:
    """`name`: forward or backward."""
    forward = name == "forward"
    flops = layer.forward_flops() if forward else layer.backward_flops()
    moved = layer.forward_bytes() if forward else layer.backward_bytes()
    sent = layer.forward_wire_bytes() if forward else layer.backward_wire_bytes()
    floors = {
        "matrix": flops / (machine.matrix.value * 1e12),
        "memory": moved / (machine.memory.value * 1e12),
        "wire": sent / (machine.link.value * 1e9),
    }
    bound = max(floors, key=lambda key: floors[key])
    h200 = MACHINES["h200"]
    scale = machine.matrix.value / h200.matrix.value
    products = sum(
        2 * m * n * k / (rate(which, rows) * scale * 1e12)
        for which, rows, (m, n, k) in layer.passes(name)
    )
    rows = ROWS[name] * 2e-12 * layer.rows * layer.hidden * h200.memory.value / machine.memory.value
    compute = max(products + rows, floors["memory"])
    wire = floors["wire"] / LINK_SHARE.value
    ends = min(wire, _ends(layer, machine))
    best = max(compute, wire - ends) + ends
    worst = max(best, max(compute, wire) + EXPOSED_SHARE.value * min(compute, wire))
    return Direction(
        floor=1e3 * floors[bound],
        matrix_floor=1e3 * floors["matrix"],
        memory_floor=1e3 * floors["memory"],
        wire_floor=1e3 * floors["wire"],
        bound=bound,
        compute=1e3 * compute,
        wire=1e3 * wire,
        best=1e3 * best,
        worst=1e3 * worst,
    )


def rate(which: str, rows: float) -> float:
    """TFLOP/s on an H200 of a pass at so many rows an expert: between two measured ones linear in
    the logarithm, outside them the nearest. Fewer rows than measured do not shorten a weight
    gradient: it moves the same bytes."""
    known = RATES[which]
    least = min(known)
    if rows < least:
        return known[least] * (rows / least if which in ("w1+32", "w2+32") else 1.0)
    below = max(r for r in known if r <= rows)
    above = min((r for r in known if r > rows), default=below)
    part = log2(rows / below) / log2(above / below) if above > below else 0.0
    return known[below] + part * (known[above] - known[below])


def _ends(layer: Layer, machine: Machine) -> float:
    """Seconds on the wire of what cannot overlap: rows for the first wave of tiles, one to an SM,
    and the results of the last wave."""
    tiles = machine.processors.value
    first = ceil(tiles / ceil(2 * layer.ffn / COLUMN_TILE)) * ROW_TILE
    first_bytes = 2 * min(first, layer.rows) * layer.hidden
    last_bytes = min(2 * tiles * ROW_TILE * COLUMN_TILE, 2 * layer.rows * layer.hidden)
    off_rank = (layer.ranks - 1) / layer.ranks
    return off_rank * (first_bytes + last_bytes) / (machine.link.value * 1e9 * LINK_SHARE.value)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Milliseconds of one micro-batch through the whole model, forward and backward.

    best, worst: both include `rest`, everything but the MoE layers. tokens_per_s: of one rank, best
    case.
    """

    best: float
    worst: float
    rest: float
    tokens_per_s: float


def step(model: Model, machine: Machine, ranks: int) -> Step:
    layer = layer_of(model, ranks)
    both = [direction(layer, machine, name) for name in DIRECTIONS]
    rest = 3 * model.tokens * model.rest_flops() / (machine.matrix.value * 1e9)
    best = rest + model.moe_layers * sum(each.best for each in both)
    worst = rest + model.moe_layers * sum(each.worst for each in both)
    return Step(best=best, worst=worst, rest=rest, tokens_per_s=1e3 * model.tokens / best)
