"""Virtual ranks of one layer on one GPU, whose wire has a rate; bench_wire.py says what for.

Each rank has a stream, an equal share of the SMs, the tokens of a preset's rank, and an equal share
of the model's experts. Before each direction the GPU sleeps while the host launches all ranks, so
that they start together and no time of the host's is measured.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from bench_problem import LayerShape
from bench_wire_report import Times, WireError
from torch import Tensor

from mok_megatron.backends import library, workspace
from mok_megatron.backends.cuda import CudaBackend
from mok_megatron.contract import Context, MoEShape, WeightGradients, Weights
from mok_megatron.limits import Limits, row_buffer_bytes, row_capacity

BUDGET = 1.1  # rows of a rank, as a multiple of the balanced ones
SLEEP_CYCLES = 40_000_000  # 20 ms, longer than the host takes to launch 8 ranks


def need_wire(path: Path) -> None:
    """Loads the library. Raises RuntimeError for one that has no wire, and without a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("mok: --ranks need a CUDA device, got none; use a machine with one")
    library.load(path)
    if not hasattr(ctypes.CDLL(str(path)), "mok_wire_place"):
        raise RuntimeError(
            f"mok: the library must have the throttled wire, got {path} without; "
            "run scripts/bench_wire.py --build"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Rank:
    """One rank's tensors, and its parts of the shared memory."""

    space: workspace.Workspace
    backend: CudaBackend
    stream: torch.cuda.Stream
    x_TH: Tensor
    dy_TH: Tensor
    expert_TK: Tensor
    prob_TK: Tensor
    weights: Weights
    into: WeightGradients


class VirtualRanks:
    """A layer of `experts` experts on ranks of `shape.tokens` tokens each."""

    def __init__(self, shape: MoEShape, ranks: list[Rank], path: Path) -> None:
        self.shape, self.ranks = shape, ranks
        self._wire = ctypes.CDLL(str(path))
        self._wire.mok_wire_place.restype = ctypes.c_int64
        self._wire.mok_wire_per_byte.restype = ctypes.c_uint32
        self._control = workspace.parts(shape, ranks[0].space.limits.tokens)[1]

    @staticmethod
    def of(layer: LayerShape, experts: int, count: int, seed: int, path: Path) -> VirtualRanks:
        """Random values and a random routing, the same for the same seed. path: the library."""
        gc.collect()  # of the last layer, which may hold most of the memory
        torch.cuda.empty_cache()
        device = torch.device("cuda", torch.cuda.current_device())
        generator = torch.Generator(device).manual_seed(seed)
        tokens, hidden, ffn, shared = layer.tokens, layer.hidden, layer.ffn, layer.shared_ffn
        shape = MoEShape(
            hidden=hidden,
            ffn=ffn,
            shared_ffn=shared,
            num_experts=experts,
            top_k=layer.top_k,
            ep_size=count,
            dtype=torch.bfloat16,
        )
        local = shape.local_experts
        rows = row_capacity(tokens, layer.top_k, count, local, BUDGET)
        limits = Limits(tokens=tokens, rows=rows, source="bench_wire.py")

        def normal(*size: int) -> Tensor:
            values = torch.empty(size, dtype=torch.bfloat16, device=device)
            return values.normal_(
                std=1 if len(size) == 2 else size[-1] ** -0.5, generator=generator
            )

        ranks = []
        for space in workspace.virtual(shape, limits, device):
            backend = CudaBackend(shape, None, device, (space, 1))
            backend.ctas = torch.cuda.get_device_properties(device).multi_processor_count // count
            score_TE = torch.rand(tokens, experts, generator=generator, device=device)
            expert_TK = score_TE.topk(layer.top_k, dim=1).indices.to(torch.int32)
            flat = (*normal(local, 2 * ffn, hidden), *normal(local, hidden, ffn))
            if shared:
                flat += (*normal(1, 2 * shared, hidden), *normal(1, hidden, shared))
            places = tuple(torch.zeros_like(w, dtype=torch.float32) for w in flat)
            ranks.append(
                Rank(
                    space=space,
                    backend=backend,
                    stream=torch.cuda.Stream(device),
                    x_TH=normal(tokens, hidden),
                    dy_TH=normal(tokens, hidden),
                    expert_TK=expert_TK,
                    prob_TK=torch.rand(tokens, layer.top_k, generator=generator, device=device),
                    weights=Weights.of(flat, shape),
                    into=WeightGradients.of(places, shape, accumulate=True),
                )
            )
        torch.ops.mok_megatron.load_kernels()
        room = 2 * row_buffer_bytes(hidden, ffn, rows) + 8 * tokens * (2 * hidden + 5 * shared)
        for rank in ranks:  # no allocation may wait for a kernel that waits for another rank
            with torch.cuda.stream(rank.stream):
                torch.empty(room, dtype=torch.uint8, device=device)
        torch.cuda.synchronize()
        return VirtualRanks(shape, ranks, path)

    @property
    def share(self) -> float:
        """Of B and of all SMs, of one rank."""
        rank = self.ranks[0]
        every = torch.cuda.get_device_properties(rank.x_TH.device).multi_processor_count
        return rank.backend.ctas / every

    def rows_PP(self) -> list[list[int]]:
        """Rows that tokens of rank p send to experts of rank q."""
        local, count = self.shape.local_experts, self.shape.ep_size
        return [
            torch.bincount(rank.expert_TK.flatten() // local, minlength=count).tolist()
            for rank in self.ranks
        ]

    def interleaved(
        self, rates: list[float], rounds: int, passed: Callable[[], object] = lambda: None
    ) -> dict[float, list[Times]]:
        """The times at each rate (GB/s of a whole GPU, 0: no bound), one a round. `passed` is
        called after each.

        Raises WireError where a rate changes a byte of y, dx or dprob.
        """
        # The second sees lists that it has seen, and watches them; results are held as later.
        held = [self._call(0.0, warm=True)[1] for _ in range(3)]
        del held
        samples: dict[float, list[Times]] = {rate: [] for rate in rates}
        right: list[Tensor] | None = None
        for _ in range(rounds):
            for rate in rates:
                times, found = self._call(rate)
                samples[rate].append(times)
                right = right or found
                if not all(map(torch.equal, right, found)):
                    raise WireError(
                        f"mok: a wire must change no byte, got other results at {rate:g} GB/s; "
                        "look at csrc/device/wire.cuh"
                    )
                del found
                passed()
        return samples

    def _throttle(self, rate: float) -> None:
        """B in GB/s, which are bytes a nanosecond."""
        mine = ctypes.c_double(rate * self.share)
        word = self._wire.mok_wire_per_byte(mine) if rate else 0
        at = self._control + self._wire.mok_wire_place()
        for rank in self.ranks:
            four = torch.tensor([word], dtype=torch.uint32).view(torch.uint8)
            rank.space.memory[at : at + 4] = four.to(rank.space.memory.device)
        torch.cuda.synchronize()

    def _call(self, rate: float, *, warm: bool = False) -> tuple[Times, list[Tensor]]:
        """One forward and one backward of all ranks, and what they make: y, dx and dprob."""
        self._throttle(rate)
        contexts: list[Context] = []
        made: list[Tensor] = []

        def forward(rank: Rank) -> None:
            y_TH, context = rank.backend.forward(
                rank.x_TH, rank.expert_TK, rank.prob_TK, rank.weights
            )
            contexts.append(context)
            made.append(y_TH)

        def backward(rank: Rank) -> None:
            kept = contexts[self.ranks.index(rank)]
            gradients = rank.backend.backward(kept, rank.dy_TH, rank.weights, rank.into)
            made.extend((gradients.dx_TH, gradients.dprob_TK))

        times = Times(forward=self._time(forward, warm), backward=self._time(backward, warm))
        self.ranks[0].backend.check()
        return times, made

    def _time(self, action: Callable[[Rank], None], warm: bool) -> float:
        """Milliseconds from the common start to the end of the last rank."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        current = torch.cuda.current_stream()
        torch.cuda._sleep(SLEEP_CYCLES)
        began.record(current)
        for rank in self.ranks:
            rank.stream.wait_event(began)
        for rank in self.ranks:
            with torch.cuda.stream(rank.stream):
                action(rank)
        late = began.query()
        for rank in self.ranks:
            current.wait_stream(rank.stream)
        ended.record(current)
        torch.cuda.synchronize()
        if late and not warm:
            raise WireError(
                f"mok: the host must launch {len(self.ranks)} ranks in the GPU's sleep of "
                f"{SLEEP_CYCLES} cycles, got a later launch; run it on an idle host"
            )
        return began.elapsed_time(ended)
