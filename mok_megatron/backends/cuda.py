"""The CUDA backend for one rank (EP = 1): one MoE layer as one kernel per direction.

Forward   route (count, prefix, place) and the order of work, then one persistent grid: rows in, up
          and SwiGLU, down, combine
Backward  the order of work, then one persistent grid: rows in, gradient of down and SwiGLU,
          gradient of up, weight gradients, combine
The shared expert's products are tiles of the same grids, over the tokens themselves, and come
first: they need no rows. Rounding and order are the reference's (reference.py), and no atomic
touches a value: the same bytes on every run.

Host      Never waits for the device, in no call, and reads nothing from it but the fault record in
          pinned memory. So a CUDA graph can capture forward and backward, once both have run before
          with the same kind of gradient places (kernels load at their first launch).
Memory    The routing is not known on the host, so row buffers have room for the worst case: N rows,
          and 127 of padding for each expert that can have one. At EP = 1 that is all of N, so there
          is no budget and there are no passes. They come from torch's allocator in each call. The
          context keeps x, g|u [R, 2F], the schedule, and the shared expert's g|u.
Launches  Three for route, two a direction (its plan, its grid), one for each table that is new, and
          one for each run of weight gradients that the grid leaves out: see _divide.
Tables    Tensor maps hold addresses. A table is kept for each role and stream, with the addresses
          it was made of, and made anew when they differ (DDP moves weights; fresh gradients are
          elsewhere each time). A capture makes its own, inside the graph. Nothing else outlives a
          call.
Streams   The caller's order is all there is. Calls on two streams share nothing that is written but
          the fault record.
Faults    Sizes and dtypes raise before any launch. Ids are checked on the device, in every call: a
          choice out of range, or an expert twice in a token, gets no row; y (dx, dprob) of the
          whole call become NaN, and the first such choice is recorded. The next forward or backward
          of any layer that sees the record raises it, once, as `check` does. Until then the loss is
          NaN, which Megatron's checks of loss and gradients stop before the optimizer step. The
          backend is usable afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mok_megatron.backends import library
from mok_megatron.backends.rules import backward_fault, forward_fault
from mok_megatron.contract import (
    OVERFULL,
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
_CHUNK = 256  # slots that one warp places; csrc/layer_arguments.h
_CAPABILITY = (9, 0)


class CudaBackend:
    """contract.Backend in kernels for compute capability 9.0, for a group of one rank.

    Raises RuntimeError (rule, value, remedy) when shape, device or library does not allow it.
    """

    name = "cuda"

    def __init__(self, shape: MoEShape, group: ProcessGroup | None, device: torch.device) -> None:
        fault = unsupported(shape, 1 if group is None else group.size())
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
        self.ctas, self.ahead = 0, 0
        self._tables = _Tables()
        self._fault_words = torch.zeros(4, dtype=torch.int32)
        self.check()

    @torch.no_grad()
    def forward(
        self, x_TH: Tensor, expert_TK: Tensor, prob_TK: Tensor, weights: Weights
    ) -> tuple[Tensor, Context]:
        """y_TH [T, H] and the context; arguments as in contract.Backend.

        Raises RuntimeError for arguments of another form, and for a fault recorded by an earlier
        call.
        """
        self.check()
        _raise(forward_fault(self.shape, 0, x_TH, expert_TK, prob_TK, weights))
        x_TH = x_TH.contiguous()
        if not len(x_TH):
            return torch.empty_like(x_TH), Context(tensors=(x_TH,))
        plan = _Plan.of(expert_TK.contiguous(), prob_TK.contiguous(), self.shape.num_experts)
        rows, tokens, hidden = plan.rows, len(x_TH), self.shape.hidden
        new = x_TH.new_empty
        y_TH = torch.empty_like(x_TH)
        gate_up_RF = new(rows, 2 * self.shape.ffn)
        into = [new(rows, hidden), gate_up_RF, new(rows, self.shape.ffn), y_TH]
        shared_gate_up_TF = new(tokens, 2 * self.shape.shared_ffn)
        if self.shape.shared_ffn:
            into += [shared_gate_up_TF, new(tokens, self.shape.shared_ffn), torch.empty_like(x_TH)]
        torch.ops.mok_megatron.forward(
            x_TH,
            plan.routing(),
            self._weights(weights, "up", "product"),
            into,
            plan.words(tokens),
            self.ctas,
            self.ahead,
        )
        return y_TH, Context(tensors=(x_TH, gate_up_RF, shared_gate_up_TF, *plan.tensors()))

    @torch.no_grad()
    def backward(
        self, context: Context, dy_TH: Tensor, weights: Weights, into: WeightGradients
    ) -> Gradients:
        """dx and dprob; weight gradients, fp32 or bf16, go `into` their places.

        dy_TH [T, H] like the forward's x. Raises RuntimeError as forward does.
        """
        self.check()
        x_TH = context.tensors[0]
        _raise(backward_fault(0, x_TH, dy_TH, weights, into))
        dy_TH = dy_TH.contiguous()
        if not len(x_TH):
            _zero(into)
            no_prob = x_TH.new_empty(0, self.shape.top_k, dtype=torch.float32)
            return Gradients(dx_TH=torch.empty_like(x_TH), dprob_TK=no_prob)
        _, gate_up_RF, shared_gate_up_TF, *schedule = context.tensors
        plan = _Plan(*schedule)
        rows, tokens, hidden = plan.rows, len(x_TH), self.shape.hidden
        new = x_TH.new_empty
        dx_TH = torch.empty_like(x_TH)
        dprob_TK = plan.prob_R.new_empty(tokens, self.shape.top_k)
        buffers = _Rows(
            x_RH=new(rows, hidden),
            dy_RH=new(rows, hidden),
            d_gate_up_RF=new(rows, 2 * self.shape.ffn),
            activation_RF=new(rows, self.shape.ffn),
        )
        parts = plan.prob_R.new_empty(rows, self.shape.ffn // library.PART_COLUMNS)
        into_kernel = [buffers.x_RH, buffers.dy_RH, new(rows, hidden)]
        into_kernel += [buffers.d_gate_up_RF, buffers.activation_RF, parts, dx_TH, dprob_TK]
        gate_up = [gate_up_RF]
        if self.shape.shared_ffn:
            gate_up.append(shared_gate_up_TF)
            width = self.shape.shared_ffn
            into_kernel += [new(tokens, 2 * width), new(tokens, width), torch.empty_like(x_TH)]
        inside, outside = _divide(into)
        names = _GROUPS if self.shape.shared_ffn else _GROUPS[:2]
        torch.ops.mok_megatron.backward(
            x_TH,
            dy_TH,
            plan.routing(),
            self._weights(weights, "input_gradient", "down_gradient"),
            gate_up,
            [self._gradients(name, inside.get(name)) for name in names],
            any(places[0].dtype == torch.float32 for places in inside.values()),
            into.accumulate,
            into_kernel,
            plan.words(tokens),
            self.ctas,
            self.ahead,
        )
        for name, a_RM, b_RN, places in (
            ("w2", buffers.dy_RH, buffers.activation_RF, outside.w2),
            ("w1", buffers.d_gate_up_RF, buffers.x_RH, outside.w1),
        ):
            self._weight_gradients(name, a_RM, b_RN, plan.split, places, into.accumulate)
        if self.shape.shared_ffn:
            d_gate_up_TF, activation_TF = into_kernel[-3], into_kernel[-2]
            for name, a_TM, b_TN, place in (
                ("shared w2", dy_TH, activation_TF, outside.shared_w2),
                ("shared w1", d_gate_up_TF, x_TH, outside.shared_w1),
            ):
                self._weight_gradients(
                    name, a_TM, b_TN, plan.shared_split, (place,), into.accumulate
                )
        return Gradients(dx_TH=dx_TH, dprob_TK=dprob_TK)

    def schedule(self, context: Context) -> Schedule:
        """The schedule of a forward in the form that can be compared. Waits for the device."""
        if len(context.tensors) == 1:  # no tokens
            nothing = context.tensors[0].new_zeros(0, 3, dtype=torch.int64)
            rows_L = nothing.new_zeros(self.shape.num_experts)
            return Schedule(rows_L=rows_L, source_R3=nothing)
        plan = _Plan(*context.tensors[3:])
        slot_R = plan.slot_R[: int(plan.row_start_E[-1])].long()
        slot_R = slot_R[slot_R >= 0]
        token_R, choice_R = slot_R // self.shape.top_k, slot_R % self.shape.top_k
        source_R3 = torch.stack([torch.zeros_like(slot_R), token_R, choice_R], dim=1)
        return Schedule(rows_L=plan.row_count_E.long(), source_R3=source_R3)

    def check(self) -> None:
        """Raises RuntimeError for the first fault recorded by the device, in any layer, once.

        Does not wait: after torch.cuda.synchronize() it has seen all calls made before.
        """
        torch.ops.mok_megatron.take_route_fault(self._fault_words)
        kind, expert, token, choice = self._fault_words.tolist()
        if kind:
            raise RuntimeError(describe(kind, expert, token, choice, self.shape))

    def _weights(self, weights: Weights, w1_role: str, w2_role: str) -> list[Tensor]:
        """Tables of w1, w2, and of the shared expert's."""
        tables = [self._tables.of("w1", weights.w1, w1_role).table]
        tables.append(self._tables.of("w2", weights.w2, w2_role).table)
        if weights.shared_w1 is not None and weights.shared_w2 is not None:
            tables.append(self._tables.of("shared w1", (weights.shared_w1,), w1_role).table)
            tables.append(self._tables.of("shared w2", (weights.shared_w2,), w2_role).table)
        return tables

    def _gradients(self, name: str, places: Sequence[Tensor] | None) -> Tensor:
        """The table of a group's places, or one without records."""
        if places is None:
            return torch.empty(0, dtype=torch.uint8)
        return self._tables.of(f"{name} gradient", places, "gradient").table

    def _weight_gradients(
        self,
        name: str,
        a_RM: Tensor,
        b_RN: Tensor,
        split_of: Callable[[], library.Split],
        places: Sequence[Tensor | None],
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
            maps = self._tables.of(f"{name} gradient from {start}", wanted, "gradient")
            library.weight_gradient(a_RM, b_RN, maps, part, accumulate=accumulate)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """What a weight gradient of the routed experts reads: x and dy [R, H], dg|du [R, 2F], a."""

    x_RH: Tensor
    dy_RH: Tensor
    d_gate_up_RF: Tensor
    activation_RF: Tensor


_GROUPS = ("w1", "w2", "shared_w1", "shared_w2")


def _divide(into: WeightGradients) -> tuple[dict[str, Sequence[Tensor]], WeightGradients]:
    """The groups of places that the kernel fills itself, and the rest.

    The kernel takes a group when every place is wanted and all have the dtype of the first such
    group; experts of which some are frozen, or have places of another dtype, take launches of
    their own.
    """
    groups = {name: getattr(into, name) for name in _GROUPS}
    inside: dict[str, Sequence[Tensor]] = {}
    dtype = None
    for name, group in groups.items():
        places = group if isinstance(group, tuple) else (group,)
        if any(place is None or place.dtype != places[0].dtype for place in places):
            continue
        if dtype is None or dtype == places[0].dtype:
            dtype = places[0].dtype
            inside[name] = places
    left = {
        name: (None,) * len(group) if isinstance(group, tuple) else None
        for name, group in groups.items()
        if name in inside
    }
    return inside, replace(into, **left)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Plan:
    """The schedule on the device, as route writes it; see csrc/layer_arguments.h.

    All int32, but prob_R. Positional: it travels through a Context as its tensors, in this order.
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
    def of(expert_TK: Tensor, prob_TK: Tensor, num_experts: int) -> _Plan:
        """Three launches; int32 [T, K] and fp32 [T, K], T > 0."""
        slots = expert_TK.numel()
        rows = capacity(slots, num_experts)
        plan = _Plan(
            row_start_E=expert_TK.new_empty(num_experts + 1),
            row_count_E=expert_TK.new_empty(num_experts),
            shared_start=expert_TK.new_empty(2),
            shared_count=expert_TK.new_empty(1),
            faulty=expert_TK.new_empty(1),
            row_TK=torch.empty_like(expert_TK),
            slot_R=expert_TK.new_empty(rows),
            prob_R=prob_TK.new_empty(rows),
        )
        counts = expert_TK.new_empty(-(-slots // _CHUNK) + 1, num_experts + 1)
        torch.ops.mok_megatron.route(expert_TK, prob_TK, counts, *plan.tensors())
        return plan

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def rows(self) -> int:
        """R, the rows that buffers hold."""
        return len(self.slot_R)

    def words(self, tokens: int) -> Tensor:
        """Room for a direction's counters and its order of work."""
        count = torch.ops.mok_megatron.direction_words(self.rows, tokens, len(self.row_count_E))
        return self.row_count_E.new_empty(count)

    def routing(self) -> list[Tensor]:
        """What the kernels read of it."""
        return [
            self.row_start_E,
            self.row_count_E,
            self.faulty,
            self.row_TK,
            self.slot_R,
            self.prob_R,
        ]

    def split(self) -> library.Split:
        """Of the routed experts, for launches beside the kernels."""
        return library.Split.of(self.row_start_E, self.row_count_E)

    def shared_split(self) -> library.Split:
        return library.Split.of(self.shared_start, self.shared_count)


class _Tables:
    """The last table of tensor maps of each role and stream, and the addresses it holds.

    It keeps no matrix alive. A table belongs to the stream that wrote it: no other is ordered after
    the writing.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, str, int], tuple[tuple[torch.dtype, list[int]], Tensor]] = {}

    def of(self, name: str, matrices: Sequence[Tensor], role: str) -> library.Matrices:
        """Matrices of one shape and dtype; `role` is library.Matrices'."""
        if torch.cuda.is_current_stream_capturing():
            # The graph writes the table at each replay, so nobody may take it before the first one.
            return library.Matrices(matrices=tuple(matrices), table=_table(matrices, role))
        key = (name, role, torch.cuda.current_stream(matrices[0].device).cuda_stream)
        made_of = matrices[0].dtype, [matrix.data_ptr() for matrix in matrices]
        last = self._last.get(key)
        if last is None or last[0] != made_of:
            last = self._last[key] = (made_of, _table(matrices, role))
        return library.Matrices(matrices=tuple(matrices), table=last[1])


def _table(matrices: Sequence[Tensor], role: str) -> Tensor:
    table: Tensor = torch.ops.mok_megatron.stream_matrices(list(matrices), role)
    return table


def unsupported(shape: MoEShape, ranks: int) -> str | None:
    """The first rule of the cuda backend that a layer breaks, with its remedy, or None."""
    if ranks != shape.ep_size:
        return (
            f"the expert parallel group must have {shape.ep_size} ranks, got {ranks}; "
            "pass the group that --expert-model-parallel-size made"
        )
    if shape.ep_size != 1:
        return (
            "the cuda backend runs expert parallel size 1 so far, got "
            f"{shape.ep_size}; use --mok-backend reference or --expert-model-parallel-size 1"
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


def describe(kind: int, expert: int, token: int, choice: int, shape: MoEShape) -> str:
    """The words of a fault record; `shape` is that of the layer that read it."""
    where = f"at token {token}, slot {choice}, in an earlier call on this GPU"
    if kind == 2:
        rule, value = "a token may choose an expert only once", f"expert {expert} again {where}"
    elif expert == OVERFULL:
        return (
            f"mok: a token may choose at most {shape.top_k} experts, got more routes {where}; "
            "set --moe-router-topk to what the router really chooses"
        )
    else:
        rule = f"an expert id must be -1 or in [0, {shape.num_experts})"
        value = f"{expert} {where}"
    return (
        f"mok: {rule}, got {value}; make the ids with mok_megatron.function.top_k_choices. "
        "That call's results are NaN"
    )


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
        raise RuntimeError(f"mok: {fault}")
