"""The specification: one MoE layer in plain torch, forward and an explicit backward.

Every other backend is judged by this file, so it is written to be read, not to be fast. It runs on
CPU and on CUDA tensors, over any group that can all_gather and all_to_all them, or over no group.

Rounding  Products and elementwise work are done in the wide dtype (fp32; fp64 in an fp64 model) and
          rounded to the model's dtype once each at: g|u, a, y_tk, s, dg|du, dx_tk, and at y and dx
          after their last addition. da, dp and the weight gradients are not rounded on their way.
Order     Rows: expert, source rank, token, choice (a stable sort), for any number of ranks. y and
          dx: slot 0 to K-1, then the shared expert. An expert's products see its own rows alone, in
          that order, so their bytes depend neither on the number of ranks nor on other experts.
          The shared expert's products see the T tokens of their rank: their bytes depend on T where
          the BLAS's do.
Memory    The context holds x itself, the route of the rows and g|u of the R rows received. In
          backward x travels again, beside dy, and a is recomputed. No state survives a call.
Faults    A call starts with one small gather in which every rank says whether its own arguments are
          sound, and which call of which layer it makes; expert ids are checked by every rank for
          all ranks. So all ranks raise, in the same words, before a row moves. A rank that fails
          later (out of memory) or dies leaves its peers to the time limit of the process group.
          What is raised is written down (calls.py), with who did not take part.
Host      The host reads the row counts, which synchronises with a GPU.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from mok_megatron.backends.calls import Calls
from mok_megatron.backends.rules import (
    CallFault,
    backward_fault,
    check_choices,
    forward_fault,
)
from mok_megatron.contract import (
    Context,
    Gradients,
    MoEShape,
    Schedule,
    WeightGradients,
    Weights,
)

_MESSAGE_BYTES = 512


class ReferenceBackend:
    """contract.Backend in torch operations.

    `group` has shape.ep_size ranks, else ValueError; None stands for a group of one.
    """

    name = "reference"

    def __init__(self, shape: MoEShape, group: ProcessGroup | None) -> None:
        self.shape = shape
        self._ranks = _Ranks(shape, group)

    @torch.no_grad()
    def forward(
        self, x_TH: Tensor, expert_TK: Tensor, prob_TK: Tensor, weights: Weights
    ) -> tuple[Tensor, Context]:
        """y_TH [T, H] and the context; arguments and errors as in contract.Backend."""
        with self._ranks.calls.call("forward", _length(x_TH)):
            return self._forward(x_TH, expert_TK, prob_TK, weights)

    def _forward(
        self, x_TH: Tensor, expert_TK: Tensor, prob_TK: Tensor, weights: Weights
    ) -> tuple[Tensor, Context]:
        rank = self._ranks.rank
        fault = forward_fault(self.shape, rank, x_TH, expert_TK, prob_TK, weights)
        tokens_P = self._ranks.agree("forward", fault, x_TH.shape[0] if fault is None else 0, x_TH)
        padding = (0, 0, 0, max(tokens_P) - len(expert_TK))
        expert_PTK = self._ranks.gather("choices", F.pad(expert_TK, padding, value=-1))
        check_choices(expert_PTK, self.shape.num_experts)

        route = _Route.of(expert_PTK, rank, self.shape)
        x_R = self._ranks.dispatch(x_TH[route.token_N], route)
        prob_R = self._ranks.dispatch(prob_TK.flatten()[route.slot_N], route)
        h_R = x_R.new_empty(len(x_R), 2 * self.shape.ffn)
        y_R = torch.empty_like(x_R)
        for expert, rows in route.experts():
            y_R[rows], h_R[rows] = _expert_forward(
                x_R[rows], prob_R[rows], weights.w1[expert], weights.w2[expert]
            )
        y_N = self._ranks.combine(y_R, route)
        y_TKH = _slots(y_N, route.slot_N, expert_TK.shape)

        shared_h_TS, shared_y_TH = x_TH.new_empty(0), None
        if weights.shared_w1 is not None and weights.shared_w2 is not None:
            shared_y_TH, shared_h_TS = _expert_forward(
                x_TH.contiguous(), _ones(x_TH), weights.shared_w1, weights.shared_w2
            )
        y_TH = _sum_in_slot_order(y_TKH, shared_y_TH)
        return y_TH, route.context(x_TH, h_R, prob_R, shared_h_TS)

    @torch.no_grad()
    def backward(
        self, context: Context, dy_TH: Tensor, weights: Weights, into: WeightGradients
    ) -> Gradients:
        """dx and dprob; weight gradients go `into` their places.

        dy_TH [T, H] like the forward's x. Raises RuntimeError on every rank when one rank's is not.
        """
        with self._ranks.calls.call("backward", _length(context.tensors[0])):
            return self._backward(context, dy_TH, weights, into)

    def _backward(
        self, context: Context, dy_TH: Tensor, weights: Weights, into: WeightGradients
    ) -> Gradients:
        route, x_TH, h_R, prob_R, shared_h_TS = _Route.restore(context, self.shape)
        fault = backward_fault(self._ranks.rank, x_TH, dy_TH, weights, into)
        self._ranks.agree("backward", fault, x_TH.shape[0], x_TH)

        x_R = self._ranks.dispatch(x_TH[route.token_N], route)
        dy_R = self._ranks.dispatch(dy_TH[route.token_N], route)
        dx_R, dprob_R = torch.empty_like(x_R), torch.empty_like(prob_R)
        for expert, rows in route.experts():
            dx_R[rows], dprob_R[rows] = _expert_backward(
                _Rows(x=x_R[rows], prob=prob_R[rows], h=h_R[rows], dy=dy_R[rows]),
                weights.w1[expert],
                weights.w2[expert],
                _Places(w1=into.w1[expert], w2=into.w2[expert], accumulate=into.accumulate),
            )
        dx_N = self._ranks.combine(dx_R, route)
        dprob_N = self._ranks.combine(dprob_R, route)
        shape_TK = torch.Size((x_TH.shape[0], self.shape.top_k))
        dx_TKH = _slots(dx_N, route.slot_N, shape_TK)

        shared_dx_TH = None
        if weights.shared_w1 is not None and weights.shared_w2 is not None:
            shared_dx_TH, _ = _expert_backward(
                _Rows(x=x_TH.contiguous(), prob=_ones(x_TH), h=shared_h_TS, dy=dy_TH.contiguous()),
                weights.shared_w1,
                weights.shared_w2,
                _Places(w1=into.shared_w1, w2=into.shared_w2, accumulate=into.accumulate),
            )
        return Gradients(
            dx_TH=_sum_in_slot_order(dx_TKH, shared_dx_TH),
            dprob_TK=_slots(dprob_N, route.slot_N, shape_TK),
        )

    def schedule(self, context: Context) -> Schedule:
        """Rows per local expert and the source of every row. Local: no rank waits for another."""
        route = _Route.restore(context, self.shape)[0]
        return Schedule(
            rows_L=torch.tensor(route.rows_L, device=route.source_R3.device),
            source_R3=route.source_R3,
        )


def _length(x_TH: Tensor) -> int:
    return len(x_TH) if x_TH.dim() else 0


# One expert: its rows and its two weights. The shared expert is one whose every probability is 1.


def _expert_forward(x: Tensor, prob: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, H], prob [rows] -> y [rows, H] and g|u [rows, 2F], both in x's dtype."""
    h = _product(x, w1.t()).to(x.dtype)
    _, act = _activation(h)
    a = (act * prob.unsqueeze(-1)).to(x.dtype)
    return _product(a, w2.t()).to(x.dtype), h


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """An expert's rows in backward: x and dy [rows, H], prob [rows], h = g|u [rows, 2F]."""

    x: Tensor
    prob: Tensor
    h: Tensor
    dy: Tensor


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Where one expert's weight gradients go; see contract.WeightGradients."""

    w1: Tensor | None
    w2: Tensor | None
    accumulate: bool


def _expert_backward(rows: _Rows, w1: Tensor, w2: Tensor, into: _Places) -> tuple[Tensor, Tensor]:
    """dx [rows, H] in x's dtype and dprob [rows], wide; weight gradients go `into`.

    Products of three factors are taken in the order in which autograd takes them for
    act = silu(g) * u, a = act * p: in fp32 that gives the bits of Megatron's SequentialMLP.
    """
    dtype, prob = rows.x.dtype, rows.prob.unsqueeze(-1)
    g, u = _gate_and_up(rows.h)
    silu_g, act = _activation(rows.h)
    da = _product(rows.dy, w2)
    d_act = da * prob
    dg, du = torch.ops.aten.silu_backward(d_act * u, g), d_act * silu_g
    dh = torch.cat([dg, du], dim=-1).to(dtype)
    _put(into.w2, rows.dy, (act * prob).to(dtype), accumulate=into.accumulate)
    _put(into.w1, dh, rows.x, accumulate=into.accumulate)
    return _product(dh, w1).to(dtype), (da * act).sum(-1)


def _gate_and_up(h: Tensor) -> tuple[Tensor, Tensor]:
    """g and u [rows, F], wide, from the rounded g|u [rows, 2F]."""
    g, u = h.chunk(2, dim=-1)
    wide = torch.promote_types(h.dtype, torch.float32)
    return g.to(wide), u.to(wide)


def _activation(h: Tensor) -> tuple[Tensor, Tensor]:
    """silu(g) and silu(g) * u [rows, F], wide."""
    g, u = _gate_and_up(h)
    silu_g = F.silu(g)
    return silu_g, silu_g * u


def _ones(x: Tensor) -> Tensor:
    """The probabilities [T] of the shared expert, wide."""
    return x.new_ones(len(x), dtype=torch.promote_types(x.dtype, torch.float32))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with wide factors and wide sums: the factors are exact, only the sum rounds.

    Factors start at a multiple of 64 bytes, since a BLAS may sum in another order where they do
    not, and where an expert's rows start depends on the number of ranks.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    a, b = (v if v.data_ptr() % 64 == 0 else v.clone() for v in (a.to(wide), b.to(wide)))
    return a @ b


def _put(place: Tensor | None, left: Tensor, right: Tensor, *, accumulate: bool) -> None:
    """The weight gradient left^T @ right [out, in], added to `place` or written over it.

    No place (frozen): nothing. No rows: `place` stays as it is, or becomes exact zeros.
    """
    if place is None or (accumulate and not len(left)):
        return
    gradient = _product(left.t(), right)
    if accumulate:
        place.add_(gradient)  # one rounding, to place's dtype
    else:
        place.copy_(gradient)


# Tokens: slots filled from rows, and their sum.


def _slots(rows_N: Tensor, slot_N: Tensor, shape_TK: torch.Size) -> Tensor:
    """Rows sent, come home -> [T, K, ...], zero where a slot is empty."""
    flat = rows_N.new_zeros(shape_TK.numel(), *rows_N.shape[1:])
    flat[slot_N] = rows_N
    return flat.view(*shape_TK, *rows_N.shape[1:])


def _sum_in_slot_order(rows_TKH: Tensor, shared_TH: Tensor | None) -> Tensor:
    """[T, K, H] -> [T, H]: wide sum over k = 0 .. K-1, then the shared expert; rounded once."""
    wide = torch.promote_types(rows_TKH.dtype, torch.float32)
    total_TH = rows_TKH.new_zeros(rows_TKH.shape[0], rows_TKH.shape[2], dtype=wide)
    for rows_TH in (*rows_TKH.unbind(1), *([] if shared_TH is None else [shared_TH])):
        total_TH += rows_TH.to(wide)
    return total_TH.to(rows_TKH.dtype)


# The schedule: what every rank can work out from everybody's choices.


def _stable_order(expert: Tensor) -> Tensor:
    """Positions of the entries >= 0 of a flat tensor, by value, then by position."""
    position = (expert >= 0).nonzero().squeeze(-1)
    return position[expert[position].argsort(stable=True)]


@dataclass(frozen=True, kw_only=True)
class _Route:
    """Both ends of the rows' journey, as one rank sees them.

    slot_N     int64 [N], the slot t * K + k of each row it sends, in the order expert, token,
               choice: by destination, then.
    source_R3  int64 [R, 3], (rank, token, choice) of each row it computes, in schedule order.
    arrive_R   int64 [R], the schedule position of each row in the order in which they arrive:
               rank, expert, token, choice.
    send_P, receive_P, rows_L: row counts per destination, per source and per local expert.
    """

    slot_N: Tensor
    source_R3: Tensor
    arrive_R: Tensor
    send_P: tuple[int, ...]
    receive_P: tuple[int, ...]
    rows_L: tuple[int, ...]
    top_k: int

    @staticmethod
    def of(expert_PTK: Tensor, rank: int, shape: MoEShape) -> _Route:
        """From all ranks' checked choices [P, Tmax, K], -1 in padding and empty slots."""
        num_ranks, max_tokens, top_k = expert_PTK.shape
        local = shape.local_experts

        own_TK = expert_PTK[rank].flatten()
        slot_N = _stable_order(own_TK)
        send_P = torch.bincount(own_TK[slot_N] // local, minlength=num_ranks)

        flat = expert_PTK.flatten()
        order_R = _stable_order(flat.where(flat // local == rank, -1))
        rows_L = torch.bincount(flat[order_R] - rank * local, minlength=local)
        source_R3 = torch.stack(
            [
                order_R // max(max_tokens * top_k, 1),
                order_R // top_k % max(max_tokens, 1),
                order_R % top_k,
            ],
            dim=1,
        )
        return _Route(
            slot_N=slot_N,
            source_R3=source_R3,
            arrive_R=source_R3[:, 0].argsort(stable=True),
            send_P=tuple(send_P.tolist()),
            receive_P=tuple(torch.bincount(source_R3[:, 0], minlength=num_ranks).tolist()),
            rows_L=tuple(rows_L.tolist()),
            top_k=top_k,
        )

    @property
    def token_N(self) -> Tensor:
        """int64 [N], the token of each row sent."""
        return self.slot_N // self.top_k

    def experts(self) -> Iterable[tuple[int, slice]]:
        """(local expert, its rows), also of empty experts: their gradient may have to be zeroed."""
        start = 0
        for expert, rows in enumerate(self.rows_L):
            yield expert, slice(start, start + rows)
            start += rows

    def context(self, x_TH: Tensor, h_R: Tensor, prob_R: Tensor, shared_h_TS: Tensor) -> Context:
        """Everything a backward needs; `restore` is the inverse."""
        return Context(
            tensors=(x_TH, h_R, prob_R, shared_h_TS, self.slot_N, self.source_R3, self.arrive_R),
            host=(*self.send_P, *self.receive_P, *self.rows_L),
        )

    @staticmethod
    def restore(context: Context, shape: MoEShape) -> tuple[_Route, Tensor, Tensor, Tensor, Tensor]:
        """The route, x_TH, h_R, prob_R and shared_h_TS of a forward."""
        x_TH, h_R, prob_R, shared_h_TS, slot_N, source_R3, arrive_R = context.tensors
        ranks = shape.ep_size
        route = _Route(
            slot_N=slot_N,
            source_R3=source_R3,
            arrive_R=arrive_R,
            send_P=context.host[:ranks],
            receive_P=context.host[ranks : 2 * ranks],
            rows_L=context.host[2 * ranks :],
            top_k=shape.top_k,
        )
        return route, x_TH, h_R, prob_R, shared_h_TS


# The ranks of the group: the only place with communication.


class _Ranks:
    """Collectives of one expert-parallel group; one rank needs none."""

    def __init__(self, shape: MoEShape, group: ProcessGroup | None) -> None:
        size = 1 if group is None else group.size()
        if size != shape.ep_size:
            raise ValueError(
                f"mok: the expert parallel group must have {shape.ep_size} ranks, got {size}; "
                "pass the group that --expert-model-parallel-size made"
            )
        self.group = group if size > 1 else None
        self.size = size
        self.rank = 0 if group is None else group.rank()
        self.calls = Calls("reference", shape, self.group)
        self._shape = zlib.crc32(repr(shape).encode())

    def gather(self, phase: str, values: Tensor) -> Tensor:
        """[...] of the same shape on every rank -> [P, ...]. phase: what it is for, in words."""
        if self.group is None:
            return values.unsqueeze(0)
        gathered = values.new_empty(self.size, *values.shape)
        with self.calls.waiting(f"the gather of {phase}"):
            dist.all_gather_into_tensor(gathered.flatten(), values.flatten(), group=self.group)
        return gathered

    def agree(
        self,
        direction: Literal["forward", "backward"],
        fault: str | None,
        tokens: int,
        like: Tensor,
    ) -> tuple[int, ...]:
        """Every rank's T, once all ranks are in the same call of the same layer with sound input.

        `like` tells the device. Raises RuntimeError on every rank, with the words of the lowest
        rank that found a fault.
        """
        now = self.calls.now
        header = [fault is not None, direction == "backward", self._shape, now.layer, now.number]
        row = torch.tensor([*header, tokens], dtype=torch.int64, device=like.device)
        headers = self.gather("headers", row).tolist()
        if any(faulty for faulty, *_ in headers):
            words = (fault or "").encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
            row = torch.tensor(list(words), dtype=torch.uint8, device=like.device)
            words_PB = self.gather("faults", row)
            rank = next(rank for rank, header in enumerate(headers) if header[0])
            text = bytes(words_PB[rank].tolist()).rstrip(b"\0").decode(errors="replace")
            raise CallFault(text, "arguments", rank)
        wanted = Counter(tuple(header[1:5]) for header in headers).most_common(1)[0][0]
        most = next(rank for rank, header in enumerate(headers) if tuple(header[1:5]) == wanted)
        for rank, header in enumerate(headers):
            if tuple(header[1:5]) != wanted:
                first, other = (
                    f"{'backward' if backward else 'forward'} of layer {layer} as call {number}"
                    for _, backward, _, layer, number, _ in (headers[most], header)
                )
                sizes = "" if header[2] == wanted[1] else " with other sizes"
                raise CallFault(
                    "all ranks must make the same call of the same layer, got "
                    f"{first} on expert parallel rank {most} and {other}{sizes} on {rank}; "
                    "call every MoE layer in the same order everywhere, with or without tokens",
                    "desync",
                    rank,
                )
        return tuple(tokens for *_, tokens in headers)

    def dispatch(self, rows_N: Tensor, route: _Route) -> Tensor:
        """Rows at home, in the order of `slot_N` -> rows at their experts, in schedule order."""
        arrived = self._exchange("dispatch", rows_N, route.send_P, route.receive_P)
        rows_R = torch.empty_like(arrived)
        rows_R[route.arrive_R] = arrived
        return rows_R

    def combine(self, rows_R: Tensor, route: _Route) -> Tensor:
        """The inverse of `dispatch`: every row goes home."""
        return self._exchange("combine", rows_R[route.arrive_R], route.receive_P, route.send_P)

    def _exchange(
        self, phase: str, rows: Tensor, send_P: tuple[int, ...], receive_P: tuple[int, ...]
    ) -> Tensor:
        if self.group is None:
            return rows
        received = rows.new_empty(sum(receive_P), *rows.shape[1:])
        with self.calls.waiting(phase):
            dist.all_to_all_single(received, rows, list(receive_P), list(send_P), group=self.group)
        return received
