"""The CUDA backend: one MoE layer as one kernel per direction, on 1 to 256 expert parallel ranks.

Forward   route (count, prefix, place) and the order of work, then one persistent grid: rows in, up
          and SwiGLU, down, combine
Backward  the order of work, then one persistent grid: rows in, gradient of down and SwiGLU,
          gradient of up, weight gradients, combine
Several ranks open a call with two kernels more, publish and gather (csrc/workspace.h). Every rank
then knows the whole schedule; rows come from their ranks and go home inside the grid.
The shared expert's products are tiles of the same grids, over the tokens themselves, and come
first: they need no rows. Rounding and order are the reference's (reference.py), and no atomic
touches a value: the same bytes on every run.

Host      Never waits for the device, in no call, and reads nothing from it but the fault record in
          pinned memory. So a CUDA graph can capture forward and backward, once both have run before
          with the same kind of gradient places (kernels load at their first launch). One op a
          direction; nothing is looked at expert by expert while a watch says that it is as before.
Memory    The routing is not known on the host, so row buffers have room for the worst case: N rows,
          and 127 of padding for each expert that can have one. Of several ranks R is a budget
          (limits.py), which more rows take in turn (csrc/device/plan.cuh). Buffers come from
          torch's allocator in each call. The context keeps x, the schedule, g|u [R, 2F], and the
          shared expert's g|u.
Launches  Three for route, two a direction (its plan, its grid), one for each table that is new, and
          one for each run of weight gradients that the grid leaves out: see Places.
Watches   Weights, and places to add to, that come twice are watched from then on: held, and in each
          call compared with what they were when they were checked, by object, address, form, dtype
          and device. What differs is checked again, and has new tables.
Tables    Tensor maps hold addresses. A table is kept for each role and stream, with the watch or
          the addresses it was made of, and made anew when they differ (DDP moves weights; fresh
          gradients are elsewhere each time). A capture makes its own, inside the graph. Nothing
          else outlives a call.
Streams   The caller's order is all there is. Calls on two streams share nothing that is written but
          the fault record; of several ranks, all calls of a group are on one stream.
Faults    Sizes and dtypes raise before any launch. Choices are checked on the device, in every
          call: an id out of range, an expert twice in a token, or a probability that is not finite,
          gets no row; y (dx, dprob) of the whole call become NaN, and the first such choice is
          recorded. The next forward or backward of any layer that sees the record raises it, once,
          as `check` does, and so does every optimizer before it changes a parameter (faults.py).
          The backend is usable afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mok_megatron.backends import faults, library
from mok_megatron.backends.places import Places, weight_groups
from mok_megatron.backends.ranks import Ranks
from mok_megatron.backends.rules import (
    CallFault,
    dy_fault,
    places_fault,
    tokens_fault,
    weights_fault,
)
from mok_megatron.backends.tables import Tables, Watch, stream_of
from mok_megatron.backends.workspace import Workspace
from mok_megatron.contract import (
    Context,
    Gradients,
    MoEShape,
    Schedule,
    WeightGradients,
    Weights,
)

COLUMNS = 64  # H, F and S are multiples of it
MAX_EXPERTS = 2048
MAX_CHOICES = 64
MAX_RANKS = 256
_CAPABILITY = (9, 0)


class CudaBackend:
    """contract.Backend in kernels for compute capability 9.0.

    `given`: workspace and layer number of a virtual rank, whose group is None; `limits` are those
    of ranks.Ranks. Raises RuntimeError (rule, value, remedy) when shape, device or library does not
    allow it.
    """

    name = "cuda"

    def __init__(
        self,
        shape: MoEShape,
        group: ProcessGroup | None,
        device: torch.device,
        given: tuple[Workspace, int] | None = None,
        ahead: int = 0,
        **limits: Any,
    ) -> None:
        virtual = shape.ep_size if given is not None else 1
        fault = unsupported(shape, virtual if group is None else group.size())
        if fault is not None:
            raise RuntimeError(f"mok: {fault}")
        library.load()
        capability = torch.cuda.get_device_capability(device)
        if capability != _CAPABILITY:
            raise RuntimeError(
                "mok: the cuda backend needs a GPU of compute capability 9.0 (H100, H200), got "
                f"{capability[0]}.{capability[1]}; use --mok-backend reference"
            )
        self.shape = shape
        # CTAs (0: one for each SM) and experts ahead (0: chosen; csrc/device/plan.cuh) of a launch.
        # They change no byte of any result.
        self.ctas, self.ahead = 0, ahead
        self._tables = Tables()
        self._weights = {"forward": Watch(), "backward": Watch()}
        self._places_watch = Watch()
        self._places: Places | None = None  # the last ones, while they are watched
        self._ranks = Ranks(shape, group, device, given=given, **limits)
        self._found = faults.record()
        self.check()

    def __deepcopy__(self, memo: object) -> CudaBackend:
        """Itself: a copied layer may share it, since no result depends on what it keeps."""
        return self

    def forward(
        self, x_TH: Tensor, expert_TK: Tensor, prob_TK: Tensor, weights: Weights
    ) -> tuple[Tensor, Context]:
        """y_TH [T, H] and the context; arguments as in contract.Backend.

        Raises RuntimeError for arguments of another form, and for a fault recorded by an earlier
        call.
        """
        if torch.is_grad_enabled():  # never inside autograd's node
            with torch.no_grad():
                return self.forward(x_TH, expert_TK, prob_TK, weights)
        call = self._ranks.call("forward", x_TH.shape[0])  # len() is Python
        try:
            self.check()
            _raise(tokens_fault(self.shape, self._ranks.rank, x_TH, expert_TK, prob_TK))
            watch = self._look_at(weights, "forward", x_TH.device)
            x_TH = x_TH.contiguous()
            if not x_TH.shape[0] and not self._ranks.several:
                return torch.empty_like(x_TH), Context(tensors=(x_TH,))
            groups = weight_groups(weights, "up", "product")
            tables = self._tables.of("forward", groups, watch, stream_of(x_TH))
        except RuntimeError as error:
            self._ranks.not_begun(error)
            raise
        try:
            y_TH, kept = torch.ops.mok_megatron.forward.default(
                x_TH,
                expert_TK.contiguous(),
                prob_TK.contiguous(),
                tables,
                self.shape.ffn,
                self.shape.shared_ffn,
                self.ctas,
                self.ahead,
                *call,
            )
        except RuntimeError as error:
            raise self._ranks.ended(faults.out_of_memory(error, "forward", x_TH)) from None
        self._ranks.calls.end()
        return y_TH, Context(tensors=(x_TH, kept))

    def backward(
        self, context: Context, dy_TH: Tensor, weights: Weights, into: WeightGradients
    ) -> Gradients:
        """dx and dprob; weight gradients, fp32 or bf16, go `into` their places.

        dy_TH [T, H] like the forward's x. Raises RuntimeError as forward does.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.backward(context, dy_TH, weights, into)
        x_TH = context.tensors[0]
        call = self._ranks.call("backward", x_TH.shape[0])
        try:
            self.check()
            _raise(dy_fault(self._ranks.rank, x_TH, dy_TH))
            watch = self._look_at(weights, "backward", x_TH.device)
            places = self._places_of(into, weights)
            dy_TH = dy_TH.contiguous()
        except RuntimeError as error:
            self._ranks.not_begun(error)
            raise
        if not x_TH.shape[0] and self._ranks.several:
            _zero(replace(into, w1=(), w2=()))  # nobody else brings tokens to the shared expert
        elif not x_TH.shape[0]:
            _zero(into)
            no_prob = x_TH.new_empty(0, self.shape.top_k, dtype=torch.float32)
            return Gradients(dx_TH=torch.empty_like(x_TH), dprob_TK=no_prob)
        stream = stream_of(x_TH)
        groups = weight_groups(weights, "input_gradient", "down_gradient")
        if self._ranks.several:  # whose later laps compute gate and up again
            groups = (*groups, (weights.w1, "up"))
        tables = self._tables.of("backward", groups, watch, stream)
        gradients = self._tables.of("gradients", places.inside, places.watch, stream)
        try:
            dx_TH, dprob_TK, rows = torch.ops.mok_megatron.backward.default(
                x_TH,
                dy_TH,
                context.tensors[1],
                tables,
                gradients,
                places.wanted,
                self.shape.top_k,
                self.shape.ffn,
                self.shape.shared_ffn,
                places.fp32,
                into.accumulate,
                places.outside is not None,
                self.ctas,
                self.ahead,
                *call,
            )
        except RuntimeError as error:
            raise self._ranks.ended(faults.out_of_memory(error, "backward", x_TH)) from None
        self._ranks.calls.end()
        if places.outside is not None:
            plan = self._plan(context)
            self._beside(x_TH, dy_TH, rows, plan, places.outside, stream)
        return Gradients(dx_TH=dx_TH, dprob_TK=dprob_TK)

    def take_waits(self) -> list[float]:
        """Milliseconds of waiting since asked last (ranks.Ranks.take_waits)."""
        return self._ranks.take_waits()

    def memory(self, tokens: int) -> str:
        """What a call of so many tokens keeps and takes, in words; after the first call."""
        return self._ranks.memory(tokens)

    def schedule(self, context: Context) -> Schedule:
        """The schedule of a forward in the form that can be compared. Waits for the device."""
        if len(context.tensors) == 1:  # no tokens
            nothing = context.tensors[0].new_zeros(0, 3, dtype=torch.int64)
            rows_L = nothing.new_zeros(self.shape.num_experts)
            return Schedule(rows_L=rows_L, source_R3=nothing)
        plan = self._plan(context)
        slot_R = plan.slot_R[: int(plan.row_start_E[-1])].long()
        slot_R = slot_R[slot_R >= 0]
        most = self._ranks.limits.tokens if self._ranks.several else len(context.tensors[0])
        token_R, choice_R = slot_R // self.shape.top_k, slot_R % self.shape.top_k
        source_R3 = torch.stack([token_R // most, token_R % most, choice_R], dim=1)
        return Schedule(rows_L=plan.row_count_E.long(), source_R3=source_R3)

    def _plan(self, context: Context) -> _Plan:
        """The schedule of a forward, in parts."""
        x_TH, kept = context.tensors
        return _Plan.of(kept, len(x_TH), self.shape, *self._ranks.numbers())

    def check(self) -> None:
        """Raises RuntimeError for the first fault recorded by the device, in any layer, once.

        Does not wait: after torch.cuda.synchronize() it has seen all calls made before.
        """
        if self._found.value:
            faults.raise_found()

    def _look_at(self, weights: Weights, direction: str, device: torch.device) -> int:
        """Checks weights that are not as before; their watch, or 0."""
        watch, flat = self._weights[direction], weights.flat()
        if not watch.holds(flat):
            _raise(weights_fault(self.shape, self._ranks.rank, weights, device))
            watch.see(flat)
        return watch.number

    def _places_of(self, into: WeightGradients, weights: Weights) -> Places:
        """The places, checked unless they are as before."""
        last, watch = self._places, self._places_watch
        if last is not None and last.into is into and watch.holds(last.flat):
            return last
        flat = (*into.w1, *into.w2, into.shared_w1, into.shared_w2)
        if not (into.accumulate and watch.holds(flat)):
            _raise(places_fault(self._ranks.rank, weights, into))
            if not into.accumulate:  # new memory each time, which nothing may hold
                return Places.of(into, flat, 0, self._ranks.several)
            watch.see(flat)
        places = Places.of(into, flat, watch.number, self._ranks.several)
        self._places = places if watch.number else None
        return places

    def _beside(
        self,
        x_TH: Tensor,
        dy_TH: Tensor,
        rows: Sequence[Tensor],
        plan: _Plan,
        outside: WeightGradients,
        stream: int | None,
    ) -> None:
        """The weight gradients that the kernel has left out. rows: x, dy, dg|du and activation of
        the routed experts; dg|du and activation of the shared one."""
        x_RH, dy_RH, d_gate_up_RF, activation_RF, *shared = rows
        products = [
            ("w2", dy_RH, activation_RF, plan.split, outside.w2),
            ("w1", d_gate_up_RF, x_RH, plan.split, outside.w1),
        ]
        if shared and x_TH.shape[0]:
            d_gate_up_TF, activation_TF = shared
            w1, w2 = (outside.shared_w1,), (outside.shared_w2,)
            products += [("shared w2", dy_TH, activation_TF, plan.shared_split, w2)]
            products += [("shared w1", d_gate_up_TF, x_TH, plan.shared_split, w1)]
        for name, a_RM, b_RN, split_of, places in products:
            self._weight_gradients(
                name, a_RM, b_RN, split_of, places, stream, accumulate=outside.accumulate
            )

    def _weight_gradients(
        self,
        name: str,
        a_RM: Tensor,
        b_RN: Tensor,
        split_of: Callable[[], library.Split],
        places: Sequence[Tensor | None],
        stream: int | None,
        *,
        accumulate: bool,
    ) -> None:
        """a^T · b of each expert into its place; None costs nothing.

        One launch for each run of places of one dtype.
        """
        for start, end, wanted in _runs(places):
            part = split = split_of()
            if len(wanted) < len(places):  # copies, since the products want them 16-byte aligned
                part = library.Split(
                    row_start_E=split.row_start_E[start : end + 1].clone(),
                    row_count_E=split.row_count_E[start:end].clone(),
                    tickets=split.tickets,
                )
            group = (wanted, "gradient")
            table = self._tables.of(f"{name} gradient from {start}", (group,), 0, stream)
            maps = library.Matrices(matrices=tuple(wanted), table=table)
            library.weight_gradient(a_RM, b_RN, maps, part, accumulate=accumulate)


@dataclass(frozen=True)
class _Plan:
    """The schedule on the device, as route writes it, in parts; see csrc/layer_arguments.h.

    All int32, but prob_R.
    """

    row_start_E: Tensor  # [E + 1]
    row_count_E: Tensor  # [E]
    shared_start: Tensor  # [2]
    shared_count: Tensor  # [1]
    faulty: Tensor  # [1], choices that broke a rule
    row_TK: Tensor
    slot_R: Tensor
    prob_R: Tensor

    @staticmethod
    def of(schedule: Tensor, tokens: int, shape: MoEShape, rows: int, all_tokens: int) -> _Plan:
        """Views of bytes that start with it. rows: R, and the most tokens of all ranks; or 0 and 0
        of one rank, with T > 0 tokens."""
        form = tokens, shape.top_k, shape.local_experts, rows, all_tokens
        *starts, _, most, _ = torch.ops.mok_megatron.schedule_words(*form)
        words, experts = schedule.view(torch.int32), shape.local_experts
        sizes = (experts + 1, experts, 2, 1, 1, tokens * shape.top_k, most, most)
        parts = [words[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        parts[5] = parts[5].view(tokens, shape.top_k)
        parts[7] = parts[7].view(torch.float32)
        return _Plan(*parts)

    def split(self) -> library.Split:
        """Of the routed experts, for launches beside the kernels."""
        return library.Split.of(self.row_start_E, self.row_count_E)

    def shared_split(self) -> library.Split:
        return library.Split.of(self.shared_start, self.shared_count)


def unsupported(shape: MoEShape, ranks: int) -> str | None:
    """The first rule of the cuda backend that a layer breaks, with its remedy, or None."""
    if ranks != shape.ep_size:
        return (
            f"the expert parallel group must have {shape.ep_size} ranks, got {ranks}; "
            "pass the group that --expert-model-parallel-size made"
        )
    if shape.ep_size > MAX_RANKS:
        return (
            f"the cuda backend takes at most {MAX_RANKS} expert parallel ranks, got "
            f"{shape.ep_size}; use --mok-backend reference or a smaller "
            "--expert-model-parallel-size"
        )
    if shape.dtype != torch.bfloat16:
        return (
            f"the cuda backend computes in torch.bfloat16, got {shape.dtype}; "
            "use --bf16 or --mok-backend reference"
        )
    for name, size in (
        ("hidden size", shape.hidden),
        ("expert width", shape.ffn),
        ("shared expert width", shape.shared_ffn),
    ):
        if size % COLUMNS:
            return (
                f"the {name} must be a multiple of {COLUMNS}, got {size}; "
                "use --mok-backend reference or --moe-token-dispatcher-type alltoall"
            )
    for name, size, limit in (
        ("experts", shape.num_experts, MAX_EXPERTS),
        ("choices a token", shape.top_k, MAX_CHOICES),
    ):
        if size > limit:
            return (
                f"the cuda backend takes at most {limit} {name}, got {size}; "
                "use --mok-backend reference"
            )
    return None


def capacity(slots: int, num_experts: int) -> int:
    """R: room for any routing of `slots` choices, each expert's rows starting at a row tile."""
    tile = library.ROW_TILE
    worst = slots + (tile - 1) * min(slots, num_experts)
    return max(worst // tile * tile, tile)


def _runs(places: Sequence[Tensor | None]) -> Iterator[tuple[int, int, list[Tensor]]]:
    """(start, end, places) of the longest runs of places of one dtype, without the missing ones."""
    start = 0
    while start < len(places):
        first = places[start]
        end = start + 1
        if first is not None:
            run = [first]
            while end < len(places):
                place = places[end]
                if place is None or place.dtype != first.dtype:
                    break
                run.append(place)
                end += 1
            yield start, end, run
        start = end


def _zero(into: WeightGradients) -> None:
    """The weight gradients of no tokens: zero where they overwrite."""
    if not into.accumulate:
        for place in (*into.w1, *into.w2, into.shared_w1, into.shared_w2):
            if place is not None:
                place.zero_()


def _raise(fault: str | None) -> None:
    if fault is not None:
        raise CallFault(fault, "arguments")
