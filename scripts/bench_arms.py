"""Ways to compute one MoE layer after its router, behind one interface: ours, and plain torch.

An arm goes from the router's output to y, and from dy to all gradients, through autograd as a model
would. Megatron's router gives dense probabilities and a map, so mok and Megatron start there and
their time includes what they make of it; the others get the top-k tensors they want. Weights are
the problem's memory for everybody. Gradients of weights are fresh bf16 tensors, or with
`accumulate` added to the problem's fp32 places: in the arm's own backward where `fused` says so,
else by `add`, one in-place addition for each weight tensor.

An arm that cannot run here raises Absent when it is made.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from bench_oracle import Answer
from bench_problem import Problem
from torch import Tensor

from mok_megatron.backends import choose
from mok_megatron.contract import Context, MoEShape, Weights
from mok_megatron.function import fused_moe, top_k_choices
from mok_megatron.parameters import MainGradients


class Absent(Exception):
    """An arm that this machine cannot run; the message says why, in one line."""


class Arm:
    """Forward, backward and, where it is not fused, the addition into main_grad.

    `leaves` are x, the probabilities, and the weights in the problem's order: one tensor for all
    experts, or one for each.
    """

    name = ""
    label = ""  # what it is, for a legend
    dense = False  # whether the probabilities are [T, E]
    fused = False  # whether backward itself adds into main_grad
    capturable = False  # whether a CUDA graph can be made of it

    def __init__(self, problem: Problem, *, accumulate: bool) -> None:
        self.problem, self.accumulate = problem, accumulate
        self.x_TH = _leaf(problem.x_TH)
        self.prob = _leaf(problem.probs_TE if self.dense else problem.prob_TK)
        self.weights = self.weight_leaves()
        self.leaves = [self.x_TH, self.prob, *self.weights]
        self.gradients: tuple[Tensor | None, ...] = ()

    def weight_leaves(self) -> list[Tensor]:
        """One tensor for each of the problem's weights."""
        return [_leaf(w) for w in self.problem.weights]

    def places(self) -> list[Tensor]:
        """main_grad of each weight leaf."""
        return list(self.problem.main)

    def forward(self) -> Tensor:
        """y_TH, with what its backward needs."""
        raise NotImplementedError

    def backward(self, y_TH: Tensor) -> None:
        """All gradients of sum(y * dy)."""
        self.gradients = torch.autograd.grad(
            y_TH, self.leaves, self.problem.dy_TH, allow_unused=True
        )

    def add(self) -> None:
        """The fresh gradients into main_grad, after a backward that is not fused."""
        for place, gradient in zip(self.places(), self.gradients[2:], strict=True):
            if gradient is not None:
                place.add_(gradient)

    def step(self) -> Tensor:
        """y of a whole forward and backward."""
        self.gradients = ()
        y_TH = self.forward()
        self.backward(y_TH)
        if self.accumulate and not self.fused:
            self.add()
        return y_TH.detach()

    def answer(self, y_TH: Tensor) -> Answer:
        """The results of the last step in the oracle's form."""
        dx, dprob, *fresh = self.gradients
        if dx is None or dprob is None:
            raise RuntimeError(f"{self.name} gave no gradient of x or of the probabilities")
        if self.dense:
            dprob = dprob.gather(1, self.problem.expert_TK.long())
        experts, shared = self.problem.shape.experts, self.problem.shared_w1 is not None
        dw = list(self.problem.main) if self.accumulate else [_given(g) for g in fresh]
        if len(dw) == len(self.problem.weights):  # all experts in one tensor
            w1, w2, *rest = dw
            dw = [*w1.unbind(), *w2.unbind(), *rest]
        shared_dw1, shared_dw2 = (dw[2 * experts :][i : i + 1] for i in (0, 1))
        if shared != bool(shared_dw1):
            raise RuntimeError(f"{self.name} gave {len(dw)} weight gradients")
        return Answer(
            y_TH=y_TH,
            dx_TH=dx,
            dprob_TK=dprob,
            dw1=[*dw[:experts], *shared_dw1],
            dw2=[*dw[experts : 2 * experts], *shared_dw2],
        )


class MokArm(Arm):
    """fused_moe on the cuda backend, with its route adapter. With `accumulate` a parameter for each
    expert, as Megatron keeps them; else one for all, as the other arms have."""

    name, label = "mok", "mok"
    backend_name = "cuda"
    dense = True
    fused = True
    capturable = True

    def __init__(self, problem: Problem, *, accumulate: bool) -> None:
        shape = problem.shape
        layer = MoEShape(
            hidden=shape.hidden,
            ffn=shape.ffn,
            shared_ffn=shape.shared_ffn,
            num_experts=shape.experts,
            top_k=shape.top_k,
            ep_size=1,
            dtype=problem.x_TH.dtype,
        )
        try:
            self.backend, _ = choose(self.backend_name, layer, problem.device, None)
        except RuntimeError as error:
            raise Absent(str(error).removeprefix("mok: ")) from error
        super().__init__(problem, accumulate=accumulate)
        each = [w.detach() for w in self.weights]
        if not accumulate:
            each = one_by_one(problem, tuple(each))
        self.given = Weights.of(tuple(each), self.backend.shape)
        if accumulate:
            for leaf, place in zip(self.weights, self.places(), strict=True):
                leaf.main_grad = place  # type: ignore[attr-defined] # as Megatron's DDP does
        self.store = MainGradients(tuple(self.weights))

    def weight_leaves(self) -> list[Tensor]:
        if not self.accumulate:
            return super().weight_leaves()
        return [_leaf(w) for w in one_by_one(self.problem, self.problem.weights)]

    def places(self) -> list[Tensor]:
        return one_by_one(self.problem, self.problem.main)

    def choices(self) -> tuple[Tensor, Tensor]:
        """The route adapter, as the layer calls it."""
        p = self.problem
        return top_k_choices(
            self.prob,
            p.routing_map_TE,
            p.shape.top_k,
            p.x_TH.dtype,
            kernel=self.backend.name == "cuda",
        )

    def forward(self) -> Tensor:
        expert_TK, prob_TK = self.choices()
        y_TH: Tensor = fused_moe(
            self.x_TH,
            expert_TK,
            prob_TK,
            self.given,
            self.backend,
            self.store,
            tuple(self.weights),
        )
        return y_TH

    @torch.no_grad()
    def calls(self) -> tuple[Callable[[], Context], Callable[[Context], object]]:
        """The backend's own two calls, without adapter and autograd."""
        p, backend = self.problem, self.backend
        expert_TK, prob_TK = self.choices()
        into = self.store.open(self.given, (True,) * len(self.weights), backend.shape)
        return (
            lambda: backend.forward(p.x_TH, expert_TK, prob_TK, self.given)[1],
            lambda context: backend.backward(context, p.dy_TH, self.given, into),
        )


class ReferenceArm(MokArm):
    """The same on the reference backend: what is right, not what is fast."""

    name, label = "reference", "mok's reference"
    backend_name = "reference"
    capturable = False


class GroupedMMArm(Arm):
    """torch.nn.functional.grouped_mm over permuted rows: Megatron without Transformer Engine.

    Gathers and sums instead of atomics, counts on the device: no wait for the host, and the same
    bytes every time.
    """

    name, label = "grouped_mm", "torch grouped_mm + permute"
    capturable = True

    def forward(self) -> Tensor:
        p, (w1, w2, *shared) = self.problem, self.weights
        expert_N, order_N = p.expert_TK.flatten().sort(stable=True)
        ids_E = torch.arange(p.shape.experts, dtype=torch.int32, device=p.device)
        ends_E = torch.searchsorted(expert_N, ids_E, right=True, out_int32=True)
        row_N = torch.empty_like(order_N)
        row_N[order_N] = torch.arange(len(order_N), device=p.device)

        x_NH = _Permute.apply(self.x_TH, order_N, row_N, p.shape.top_k)
        prob_N = self.prob.flatten().index_select(0, order_N).to(x_NH.dtype)
        gate, up = F.grouped_mm(x_NH, w1.transpose(1, 2), offs=ends_E).chunk(2, dim=1)
        y_NH = F.grouped_mm(F.silu(gate) * up * prob_N[:, None], w2.transpose(1, 2), offs=ends_E)
        y_TH: Tensor = _Unpermute.apply(y_NH, order_N, row_N, p.shape.top_k)
        return y_TH + shared_expert(self.x_TH, *shared) if shared else y_TH


class _Permute(torch.autograd.Function):
    """x [T, H] -> its rows [N, H] in the order of their experts."""

    @staticmethod
    def forward(ctx, x_TH, order_N, row_N, top_k):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(row_N)
        ctx.top_k = top_k
        return x_TH.index_select(0, order_N // top_k)

    @staticmethod
    def backward(ctx, dx_NH):  # type: ignore[no-untyped-def]
        (row_N,) = ctx.saved_tensors
        return dx_NH.index_select(0, row_N).unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class _Unpermute(torch.autograd.Function):
    """The rows' sum over each token's choices: [N, H] -> [T, H]."""

    @staticmethod
    def forward(ctx, y_NH, order_N, row_N, top_k):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(order_N)
        ctx.top_k = top_k
        return y_NH.index_select(0, row_N).unflatten(0, (-1, top_k)).sum(1)

    @staticmethod
    def backward(ctx, dy_TH):  # type: ignore[no-untyped-def]
        (order_N,) = ctx.saved_tensors
        return dy_TH.index_select(0, order_N // ctx.top_k), None, None, None


class GraphReplay(Arm):
    """An arm's forward and backward as two CUDA graphs, captured when it is made.

    Raises Absent with the cause when the capture fails.
    """

    def __init__(self, arm: Arm) -> None:
        self.name, self.label = f"{arm.name} graph", f"{arm.label}, graph replay"
        self.dense, self.fused = arm.dense, arm.fused
        self.problem, self.accumulate, self.arm = arm.problem, arm.accumulate, arm
        arm.step()
        torch.cuda.synchronize()
        pool = torch.cuda.graph_pool_handle()
        self.graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self.graphs[0], pool=pool):
                self.y_TH = arm.forward()
            with torch.cuda.graph(self.graphs[1], pool=pool):
                arm.backward(self.y_TH)
        except RuntimeError as error:
            raise Absent(f"capture failed: {str(error).splitlines()[0]}") from error
        self.gradients, self.captured = arm.gradients, arm.gradients
        arm.gradients = ()

    def places(self) -> list[Tensor]:
        return self.arm.places()

    def forward(self) -> Tensor:
        self.graphs[0].replay()
        return self.y_TH

    def backward(self, y_TH: Tensor) -> None:
        self.graphs[1].replay()
        self.gradients = self.captured


def shared_expert(x_TH: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """For arms that have none of their own: an ordinary SwiGLU MLP."""
    gate, up = F.linear(x_TH, w1).chunk(2, dim=1)
    return F.linear(F.silu(gate) * up, w2)


def one_by_one(problem: Problem, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """w1 of each expert, w2 of each, the shared expert's: the order of contract.Weights.flat."""
    if not tensors:
        return []
    w1, w2, *shared = tensors
    return [*w1.unbind(), *w2.unbind(), *shared]


def _leaf(tensor: Tensor) -> Tensor:
    """The same memory, as an input that wants a gradient."""
    return tensor.detach().requires_grad_()


def _given(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise RuntimeError("a weight got no gradient")
    return gradient
