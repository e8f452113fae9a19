"""Virtual ranks: the ranks of an expert parallel group as launches of one process on one GPU.

Each has a stream, a share of the SMs, a part of one allocation as its workspace, and the tokens of
neighbouring places in a global batch. Nothing here waits for the device between two ranks' calls:
a rank's kernels wait for those of the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mok_megatron.backends import workspace
from mok_megatron.backends.cuda import CudaBackend
from mok_megatron.contract import Context, Gradients, MoEShape, WeightGradients, Weights
from mok_megatron.limits import Limits, row_buffer_bytes, row_capacity
from tests.backends import cuda_cases as cases
from tests.backends.cuda_cases import Problem, Result

SMS = 132
# Fewer hardware queues than streams would put one rank's kernels behind another's that waits for
# them. Read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


@dataclass(frozen=True, kw_only=True)
class Group:
    """The virtual ranks of one layer. streams: one a rank; none is the default stream. room: bytes
    that torch's allocator holds for each."""

    shape: MoEShape
    workspaces: tuple[workspace.Workspace, ...]
    backends: tuple[CudaBackend, ...]
    streams: tuple[torch.cuda.Stream, ...]
    room: int

    @staticmethod
    def of(
        shape: MoEShape,
        tokens: int,
        *,
        budget: float | None = None,
        rows: int | None = None,
        ctas: int | None = None,
        ahead: int = 0,
        movers: int = 0,
        epoch: int = 0,
    ) -> Group:
        """For at most `tokens` tokens a rank; R is `rows`, or of `budget`; neither: room for any
        routing. epoch: of the last call, as if there had been that many."""
        ranks, local = shape.ep_size, shape.local_experts
        rows = rows or row_capacity(tokens, shape.top_k, ranks, local, budget or float(ranks))
        limits = Limits(tokens=tokens, rows=rows, source="a test")
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32", "streams need queues"
        spaces = workspace.virtual(shape, limits, cases.DEVICE)
        _, control, _, _, expert, _, _, _, x, _, _, _, arrived, _ = workspace.parts(shape, tokens)
        for space in spaces:
            space.memory[expert:arrived] = 0x7F  # ids far outside
            space.memory[x:] = 0xFF  # NaN in bf16
            word = torch.tensor([epoch], dtype=torch.uint32).view(torch.uint8)
            space.memory[control : control + 4] = word.to(cases.DEVICE)
        given = [(space, 1) for space in spaces]
        backends = [CudaBackend(shape, None, cases.DEVICE, at, movers=movers) for at in given]
        for backend in backends:
            backend.ctas = ctas or SMS // ranks
            backend.ahead = ahead
        torch.ops.mok_megatron.load_kernels()
        streams = tuple(torch.cuda.Stream(cases.DEVICE) for _ in range(ranks))
        room = max(64 << 20, 2 * row_buffer_bytes(shape.hidden, shape.ffn, rows))
        for stream in streams:
            with torch.cuda.stream(stream):  # torch's pool of the stream has memory from here on
                torch.empty(room, dtype=torch.uint8, device=cases.DEVICE)
        torch.cuda.synchronize()
        return Group(
            shape=shape,
            workspaces=tuple(spaces),
            backends=tuple(backends),
            streams=streams,
            room=room,
        )

    def each(self, action: Callable[[int], Any], order: Sequence[int] | None = None) -> list[Any]:
        """action(rank) on every rank's stream, in rank order unless `order` says otherwise."""
        results: list[Any] = [None] * len(self.streams)
        current = torch.cuda.current_stream()
        for stream in self.streams:
            stream.wait_stream(current)
        for rank in order or range(len(self.streams)):
            with torch.cuda.stream(self.streams[rank]):
                results[rank] = action(rank)
        for stream in self.streams:
            current.wait_stream(stream)
        return results

    def forward(self, parts: Sequence[Problem], **how: Any) -> list[tuple[Tensor, Context]]:
        def run(rank: int) -> tuple[Tensor, Context]:
            p = parts[rank]
            return self.backends[rank].forward(p.x_TH, p.expert_TK, p.prob_TK, p.weights)

        return self.each(run, **how)

    def backward(
        self,
        parts: Sequence[Problem],
        contexts: Sequence[Context],
        into: Sequence[WeightGradients],
        **how: Any,
    ) -> list[Gradients]:
        def run(rank: int) -> Gradients:
            p = parts[rank]
            return self.backends[rank].backward(contexts[rank], p.dy_TH, p.weights, into[rank])

        return self.each(run, **how)

    def call(
        self, parts: Sequence[Problem], into: Sequence[WeightGradients], **how: Any
    ) -> list[Result]:
        """One forward and one backward of all ranks."""
        forward = self.forward(parts, **how)
        contexts = [context for _, context in forward]
        gradients = self.backward(parts, contexts, into, **how)
        torch.cuda.synchronize()
        return [
            Result(
                y_TH=y_TH,
                dx_TH=g.dx_TH,
                dprob_TK=g.dprob_TK,
                dw=cases.flat(places),
                schedule=backend.schedule(context),
            )
            for (y_TH, context), g, places, backend in zip(
                forward, gradients, into, self.backends, strict=True
            )
        ]


def split(problem: Problem, tokens: Sequence[int]) -> list[Problem]:
    """The ranks' parts of a problem of one rank: `tokens` of its tokens and an equal share of its
    experts each, in order."""
    ranks = len(tokens)
    assert sum(tokens) == len(problem.x_TH)
    shape = replace(problem.shape, ep_size=ranks)
    w, local, parts, first = problem.weights, shape.local_experts, [], 0
    for rank, count in enumerate(tokens):
        own, here = slice(first, first + count), slice(rank * local, (rank + 1) * local)
        parts.append(
            replace(
                problem,
                shape=shape,
                x_TH=problem.x_TH[own].clone(),
                expert_TK=problem.expert_TK[own].clone(),
                prob_TK=problem.prob_TK[own].clone(),
                dy_TH=problem.dy_TH[own].clone(),
                weights=Weights(
                    w1=w.w1[here], w2=w.w2[here], shared_w1=w.shared_w1, shared_w2=w.shared_w2
                ),
            )
        )
        first += count
    return parts


def places(parts: Sequence[Problem], whole: WeightGradients) -> list[WeightGradients]:
    """Copies of the ranks' parts of the places of one rank."""
    local, copies = parts[0].shape.local_experts, []
    for rank in range(len(parts)):
        here = slice(rank * local, (rank + 1) * local)

        def copy(place: Tensor | None) -> Tensor | None:
            return None if place is None else place.clone()

        copies.append(
            WeightGradients(
                w1=tuple(copy(place) for place in whole.w1[here]),
                w2=tuple(copy(place) for place in whole.w2[here]),
                shared_w1=copy(whole.shared_w1),
                shared_w2=copy(whole.shared_w2),
                accumulate=whole.accumulate,
            )
        )
    return copies


def different(whole: Result, ranks: Sequence[Result], experts: int) -> list[str]:
    """What of the ranks' results is not, byte for byte, that of one rank: y, dx, dprob, the
    gradients of the routed experts, and the schedule. (Those of the shared expert are sums over a
    rank's own tokens.)"""
    wrong = [
        name
        for name in ("y_TH", "dx_TH", "dprob_TK")
        if not cases.same(getattr(whole, name), torch.cat([getattr(r, name) for r in ranks]))
    ]
    local = experts // len(ranks)
    for i, group in enumerate(("w1", "w2")):
        of = whole.dw[i * experts : (i + 1) * experts]
        mine = [w for r in ranks for w in r.dw[i * local : (i + 1) * local]]
        wrong += [f"d{group}[{expert}]" for expert in cases.differing(of, mine)]
    rows_E = torch.cat([r.schedule.rows_L for r in ranks])
    source_R3 = torch.cat([r.schedule.source_R3 for r in ranks])
    starts = torch.tensor([0, *(len(r.y_TH) for r in ranks)]).cumsum(0).to(source_R3.device)
    source_R3[:, 1] += starts[source_R3[:, 0]]
    if not torch.equal(rows_E, whole.schedule.rows_L):
        wrong.append("rows_L")
    elif not torch.equal(source_R3[:, 1:], whole.schedule.source_R3[:, 1:]):
        wrong.append("source_R3")
    return wrong
