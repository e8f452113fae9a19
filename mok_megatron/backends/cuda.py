"""The CUDA backend for one rank (EP = 1): one MoE layer as a few kernels on the caller's stream.

Forward   route (count, prefix, place) -> dispatch -> up (gate, up, SwiGLU) -> down -> combine
Backward  dispatch (x again, dy) -> gradient of down and SwiGLU -> weight gradients ->
          gradient of up -> combine
The shared expert is a group of one expert over the tokens themselves, through the same products;
combine adds it. Rounding and order are the reference's (reference.py), and no atomic touches a
value: the same bytes on every run.

Host      Never waits for the device, in no call, and reads nothing from it but the fault record in
          pinned memory. A CUDA graph cannot capture it yet, and a capture is refused: see Tables.
Memory    The routing is not known on the host, so row buffers have room for the worst case: N rows,
          and 127 of padding for each expert that can have one. At EP = 1 that is all of N, so there
          is no budget and there are no passes. They come from torch's allocator in each call. The
          context keeps x, g|u [R, 2F], the schedule, and the shared expert's g|u.
Tables    Tensor maps hold addresses. A table is kept for each role and stream, with the addresses
          it was made of, and made anew when they differ (DDP moves weights; fresh gradients are
          elsewhere each time). A captured call would have to make its own inside the graph; that
          failed when it was tried, probably because the products read maps that a kernel before
          them wrote without the fence (fence.proxy.tensormap, acquire) that such maps need.
          Nothing else outlives a call.
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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

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
        self._begin()
        _raise(forward_fault(self.shape, 0, x_TH, expert_TK, prob_TK, weights))
        x_TH = x_TH.contiguous()
        if not len(x_TH):
            return torch.empty_like(x_TH), Context(tensors=(x_TH,))
        plan = _Plan.of(expert_TK.contiguous(), prob_TK.contiguous(), self.shape.num_experts)
        routed, shared = plan.splits()

        x_RH = x_TH.new_empty(plan.rows, self.shape.hidden)
        torch.ops.mok_megatron.dispatch([x_TH], plan.row_TK, [x_RH])
        y_RH = x_RH  # up has read x when down writes y
        gate_up_RF = self._up_and_down(
            "", x_RH, plan.prob_R, routed, (weights.w1, weights.w2), y_RH
        )

        shared_y_TH, shared_gate_up_TF = None, x_TH.new_empty(0)
        if weights.shared_w1 is not None and weights.shared_w2 is not None:
            tokens_TH = _whole_tiles(x_TH)
            shared_y_TH = torch.empty_like(tokens_TH)
            shared_gate_up_TF = self._up_and_down(
                "shared ",
                tokens_TH,
                _ones(tokens_TH),
                shared,
                ((weights.shared_w1,), (weights.shared_w2,)),
                shared_y_TH,
            )
        y_TH = torch.empty_like(x_TH)
        torch.ops.mok_megatron.combine(
            y_RH, shared_y_TH, plan.row_TK, plan.faulty, None, y_TH, None
        )
        return y_TH, Context(tensors=(x_TH, gate_up_RF, shared_gate_up_TF, *plan.tensors()))

    @torch.no_grad()
    def backward(
        self, context: Context, dy_TH: Tensor, weights: Weights, into: WeightGradients
    ) -> Gradients:
        """dx and dprob; weight gradients, fp32 or bf16, go `into` their places.

        dy_TH [T, H] like the forward's x. Raises RuntimeError as forward does.
        """
        self._begin()
        x_TH = context.tensors[0]
        _raise(backward_fault(0, x_TH, dy_TH, weights, into))
        dy_TH = dy_TH.contiguous()
        if not len(x_TH):
            _zero(into)
            no_prob = x_TH.new_empty(0, self.shape.top_k, dtype=torch.float32)
            return Gradients(dx_TH=torch.empty_like(x_TH), dprob_TK=no_prob)
        _, gate_up_RF, shared_gate_up_TF, *schedule = context.tensors
        plan = _Plan(*schedule)
        routed, shared = plan.splits()

        x_RH, dy_RH = (x_TH.new_empty(plan.rows, self.shape.hidden) for _ in range(2))
        torch.ops.mok_megatron.dispatch([x_TH, dy_TH], plan.row_TK, [x_RH, dy_RH])
        dx_RH = dy_RH  # every product of dy is done when the last one writes dx
        rows = _Rows(x_RH=x_RH, dy_RH=dy_RH, prob_R=plan.prob_R, gate_up_RF=gate_up_RF)
        experts = _Experts(
            w1=weights.w1, w2=weights.w2, into1=into.w1, into2=into.w2, accumulate=into.accumulate
        )
        dprob_R = self._gradients("", rows, routed, experts, dx_RH)

        shared_dx_TH = None
        if weights.shared_w1 is not None and weights.shared_w2 is not None:
            tokens_TH = _whole_tiles(x_TH)
            tokens = _Rows(
                x_RH=tokens_TH,
                dy_RH=_whole_tiles(dy_TH),
                prob_R=_ones(tokens_TH),
                gate_up_RF=shared_gate_up_TF,
            )
            expert = _Experts(
                w1=(weights.shared_w1,),
                w2=(weights.shared_w2,),
                into1=(into.shared_w1,),
                into2=(into.shared_w2,),
                accumulate=into.accumulate,
            )
            shared_dx_TH = torch.empty_like(tokens_TH)
            self._gradients("shared ", tokens, shared, expert, shared_dx_TH)
        dx_TH = torch.empty_like(x_TH)
        dprob_TK = x_TH.new_empty(len(x_TH), self.shape.top_k, dtype=torch.float32)
        torch.ops.mok_megatron.combine(
            dx_RH, shared_dx_TH, plan.row_TK, plan.faulty, dprob_R, dx_TH, dprob_TK
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

    def _begin(self) -> None:
        """What every call checks first."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "mok: the cuda backend cannot be captured in a CUDA graph, got a stream that is "
                "capturing; leave the MoE layers out of --cuda-graph-modules"
            )
        self.check()

    def _up_and_down(
        self,
        role: str,
        x_RH: Tensor,
        prob_R: Tensor,
        split: library.Split,
        weights: tuple[Sequence[Tensor], Sequence[Tensor]],
        y_RH: Tensor,
    ) -> Tensor:
        """y_RH [R, H] of a group of experts, and g|u [R, 2F]. y may be x's memory."""
        w1, w2 = weights
        rows, width = len(x_RH), w2[0].shape[1]
        gate_up_RF = x_RH.new_empty(rows, 2 * width)
        activation_RF = x_RH.new_empty(rows, width)
        w1_maps = self._tables.of(role + "w1", w1, "up")
        library.up(x_RH, w1_maps, prob_R, split, gate_up_RF, activation_RF)
        w2_maps = self._tables.of(role + "w2", w2, "product")
        library.product(activation_RF, w2_maps, split, y_RH)
        return gate_up_RF

    def _gradients(
        self, role: str, rows: _Rows, split: library.Split, experts: _Experts, dx_RH: Tensor
    ) -> Tensor:
        """dx_RH [R, H] and the weight gradients of a group of experts, and dprob [R].

        dx may be dy's memory.
        """
        count, width = len(rows.prob_R), experts.w2[0].shape[1]
        down = library.DownGradient(
            d_gate_up_RF=rows.x_RH.new_empty(count, 2 * width),
            activation_RF=rows.x_RH.new_empty(count, width),
            prob_parts=rows.prob_R.new_empty(count, width // library.PART_COLUMNS),
            d_prob_R=rows.prob_R.new_empty(count),
        )
        w2_maps = self._tables.of(role + "w2", experts.w2, "down_gradient")
        library.down_gradient(rows.dy_RH, w2_maps, rows.prob_R, rows.gate_up_RF, split, down)
        for name, a_RM, b_RN, places in (
            ("w2", rows.dy_RH, down.activation_RF, experts.into2),
            ("w1", down.d_gate_up_RF, rows.x_RH, experts.into1),
        ):
            self._weight_gradients(role + name, a_RM, b_RN, split, places, experts.accumulate)
        w1_maps = self._tables.of(role + "w1", experts.w1, "input_gradient")
        library.input_gradient(down.d_gate_up_RF, w1_maps, split, dx_RH)
        return down.d_prob_R

    def _weight_gradients(
        self,
        name: str,
        a_RM: Tensor,
        b_RN: Tensor,
        split: library.Split,
        places: Sequence[Tensor | None],
        accumulate: bool,
    ) -> None:
        """a^T · b of each expert into its place; None costs nothing.

        One launch for each run of places of one dtype.
        """
        for start, end, wanted in _runs(places):
            part = split
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
    """A group's rows in backward: x and dy [R, H], prob [R], g|u [R, 2F]."""

    x_RH: Tensor
    dy_RH: Tensor
    prob_R: Tensor
    gate_up_RF: Tensor


@dataclass(frozen=True, kw_only=True)
class _Experts:
    """A group's weights and where their gradients go; see contract.WeightGradients."""

    w1: Sequence[Tensor]
    w2: Sequence[Tensor]
    into1: Sequence[Tensor | None]
    into2: Sequence[Tensor | None]
    accumulate: bool


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

    def splits(self) -> tuple[library.Split, library.Split]:
        """Of the routed experts and of the shared one, with tickets made for this call."""
        tickets = self.faulty.new_zeros(8)
        return (
            library.Split(
                row_start_E=self.row_start_E, row_count_E=self.row_count_E, tickets=tickets[:2]
            ),
            library.Split(
                row_start_E=self.shared_start, row_count_E=self.shared_count, tickets=tickets[4:6]
            ),
        )


class _Tables:
    """The last table of tensor maps of each role and stream, and the addresses it holds.

    It keeps no matrix alive. A table belongs to the stream that wrote it: no other is ordered after
    the writing.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, str, int], tuple[tuple[torch.dtype, list[int]], Tensor]] = {}

    def of(self, name: str, matrices: Sequence[Tensor], role: str) -> library.Matrices:
        """Matrices of one shape and dtype; `role` is library.Matrices'."""
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


def _whole_tiles(x_TH: Tensor) -> Tensor:
    """x itself when its rows fill row tiles, else a copy with room after the last one."""
    rows = -(-len(x_TH) // library.ROW_TILE) * library.ROW_TILE
    if rows == len(x_TH):
        return x_TH
    padded = x_TH.new_empty(rows, x_TH.shape[1])
    padded[: len(x_TH)].copy_(x_TH)
    return padded


def _ones(x_TH: Tensor) -> Tensor:
    """The probabilities of the shared expert."""
    return x_TH.new_ones(len(x_TH), dtype=torch.float32)


def _zero(into: WeightGradients) -> None:
    """The weight gradients of no tokens: zero where they overwrite."""
    if not into.accumulate:
        for place in (*into.w1, *into.w2, into.shared_w1, into.shared_w2):
            if place is not None:
                place.zero_()


def _raise(fault: str | None) -> None:
    if fault is not None:
        raise RuntimeError(f"mok: {fault}")
