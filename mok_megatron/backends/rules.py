"""What a call's arguments must obey, in words that every rank can raise.

The functions that see one rank's tensors return the first broken rule as text: that rank must
not raise alone, its peers would wait for it. The check of the choices sees all ranks', and raises.
Values of activations are not looked at: a NaN propagates as in any torch model.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mok_megatron.contract import OVERFULL, MoEShape, WeightGradients, Weights


class CallFault(RuntimeError):
    """A call that breaks a rule, in the words `mok: rule, got value; remedy`.

    kind: as in records.Record. rank: of the group, whose fault it is; None: nobody's, or not known.
    """

    def __init__(self, text: str, kind: str, rank: int | None = None) -> None:
        super().__init__(f"mok: {text}")
        self.kind, self.rank = kind, rank


def forward_fault(
    shape: MoEShape,
    rank: int,
    x_TH: Tensor,
    expert_TK: Tensor,
    prob_TK: Tensor,
    weights: Weights,
) -> str | None:
    """The first rule of contract.Backend.forward that this rank's arguments break, or None."""
    return (
        tokens_fault(shape, rank, x_TH, expert_TK, prob_TK)
        or weights_fault(shape, rank, weights, x_TH.device)
        or prob_fault(f"on expert parallel rank {rank}", expert_TK, prob_TK)
    )


def backward_fault(
    rank: int, x_TH: Tensor, dy_TH: Tensor, weights: Weights, into: WeightGradients
) -> str | None:
    """The first rule of contract.Backend.backward that this rank's arguments break, or None."""
    return dy_fault(rank, x_TH, dy_TH) or places_fault(rank, weights, into)


def tokens_fault(
    shape: MoEShape, rank: int, x_TH: Tensor, expert_TK: Tensor, prob_TK: Tensor
) -> str | None:
    """Of x and the choices, which are others in every call."""
    form_TK = (x_TH.shape[0] if x_TH.dim() else 0, shape.top_k)
    wide = torch.float64 if shape.dtype == torch.float64 else torch.float32
    if (
        x_TH.shape == (form_TK[0], shape.hidden)
        and expert_TK.shape == prob_TK.shape == form_TK
        and (x_TH.dtype, expert_TK.dtype, prob_TK.dtype) == (shape.dtype, torch.int32, wide)
        and x_TH.device == expert_TK.device == prob_TK.device
    ):
        return None
    where = f"on expert parallel rank {rank}"
    if x_TH.dim() != 2 or x_TH.shape[1] != shape.hidden or x_TH.dtype != shape.dtype:
        return (
            f"x must be [T, {shape.hidden}] in {shape.dtype}, got {_form(x_TH)} {where}; "
            "flatten the tokens and cast them to the model's dtype"
        )
    for name, choice, dtype in (("expert", expert_TK, torch.int32), ("prob", prob_TK, wide)):
        if choice.shape != form_TK or choice.dtype != dtype:
            return (
                f"{name} must be {list(form_TK)} in {dtype}, got {_form(choice)} {where}; "
                "make it with mok_megatron.function.top_k_choices"
            )
        if choice.device != x_TH.device:
            return _elsewhere(name, choice, x_TH.device, where)
    return None


def prob_fault(where: str, expert_TK: Tensor, prob_TK: Tensor) -> str | None:
    """Of the values of the probabilities whose slots are not empty. Waits for the device."""
    wild = (expert_TK != -1) & ~prob_TK.isfinite()
    if not wild.any():
        return None
    token, slot = wild.nonzero()[0].tolist()
    return not_finite(float(prob_TK[token, slot]), f"at token {token}, slot {slot} {where}")


def not_finite(prob: float, where: str) -> str:
    """What is said of such a probability."""
    return (
        f"a routing probability must be finite, got {prob} {where}; "
        "look for NaN in the router's input and weights: the training may have diverged"
    )


def weights_fault(shape: MoEShape, rank: int, weights: Weights, device: torch.device) -> str | None:
    """Of the weights, which have to be looked at again only when one is another or has moved."""
    where = f"on expert parallel rank {rank}"
    local = shape.local_experts
    if (len(weights.w1), len(weights.w2)) != (local, local):
        return (
            f"a rank must bring w1 and w2 of its {local} experts, got {len(weights.w1)} and "
            f"{len(weights.w2)} {where}; pass one tensor per local expert"
        )
    given = {weights.shared_w1 is not None, weights.shared_w2 is not None}
    if given != {shape.shared_ffn > 0}:
        return (
            f"both shared weights must be there exactly when the shared width, {shape.shared_ffn},"
            f" is not 0, got {_form(weights.shared_w1)} and {_form(weights.shared_w2)} {where}; "
            "pass both or none"
        )
    for name, weight, form in _weights(shape, weights):
        if weight.shape != form or weight.dtype != shape.dtype:
            return (
                f"{name} must be {list(form)} in {shape.dtype}, got {_form(weight)} {where}; "
                "pass gate rows above up rows, and cast to the model's dtype"
            )
        if weight.device != device:
            return _elsewhere(name, weight, device, where)
    return None


def dy_fault(rank: int, x_TH: Tensor, dy_TH: Tensor) -> str | None:
    """Of the gradient of y."""
    if (dy_TH.shape, dy_TH.dtype, dy_TH.device) != (x_TH.shape, x_TH.dtype, x_TH.device):
        return (
            f"dy must be like the forward's x, {_form(x_TH)} on {x_TH.device}, got "
            f"{_form(dy_TH)} on {dy_TH.device} on expert parallel rank {rank}; "
            "pass the gradient of this forward's y"
        )
    return None


def places_fault(rank: int, weights: Weights, into: WeightGradients) -> str | None:
    """Of the places of weight gradients; like weights_fault, for those that stay."""
    where = f"on expert parallel rank {rank}"
    if (len(into.w1), len(into.w2)) != (len(weights.w1), len(weights.w2)):
        return (
            f"there must be a place or None for each of {len(weights.w1)} w1 and w2, got "
            f"{len(into.w1)} and {len(into.w2)} {where}; see WeightGradients.of"
        )
    places = (*into.w1, *into.w2, into.shared_w1, into.shared_w2)
    owners = (*weights.w1, *weights.w2, weights.shared_w1, weights.shared_w2)
    for place, owner in zip(places, owners, strict=True):
        if place is None:
            continue
        if owner is None or place.shape != owner.shape:
            return (
                f"a weight gradient must have the shape of its weight, {_form(owner)}, got "
                f"{_form(place)} {where}; make it with torch.empty_like"
            )
        if place.dtype == owner.dtype and place.is_contiguous():
            continue
        wide = torch.promote_types(owner.dtype, torch.float32)
        if place.dtype not in (owner.dtype, wide) or not place.is_contiguous():
            return (
                "a weight gradient (main_grad) must be contiguous and in "
                f"{owner.dtype} or {wide}, got {_form(place)} with strides {place.stride()} "
                f"{where}; let Megatron's DistributedDataParallel make it"
            )
    return None


def check_choices(expert_PTK: Tensor, num_experts: int) -> None:
    """All ranks' choices int32 [P, T, K]: ids in [-1, E), none twice in a token.

    Raises CallFault; every rank holds the same tensor, hence raises the same words.
    """
    beyond = (expert_PTK < -1) | (expert_PTK >= num_experts)
    if beyond.any():
        rank, token, slot = beyond.nonzero()[0].tolist()
        if expert_PTK[rank, token, slot] == OVERFULL:
            raise CallFault(
                f"a token may choose at most {expert_PTK.shape[2]} experts, got more routes "
                f"at token {token} on expert parallel rank {rank}; set --moe-router-topk to what "
                "the router really chooses",
                "choice",
                rank,
            )
        raise CallFault(
            f"an expert id must be -1 or in [0, {num_experts}), got "
            f"{int(expert_PTK[rank, token, slot])} at token {token}, slot {slot} on expert "
            f"parallel rank {rank}; make the ids with mok_megatron.function.top_k_choices",
            "choice",
            rank,
        )
    ordered = expert_PTK.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if twice.any():
        rank, token, position = twice.nonzero()[0].tolist()
        expert = int(ordered[rank, token, position])
        slots = (expert_PTK[rank, token] == expert).nonzero().flatten().tolist()
        raise CallFault(
            f"a token may choose an expert only once, got expert {expert} at token {token}, "
            f"slots {slots} on expert parallel rank {rank}; "
            "make the ids with mok_megatron.function.top_k_choices",
            "choice",
            rank,
        )


def _weights(shape: MoEShape, weights: Weights) -> Iterable[tuple[str, Tensor, tuple[int, int]]]:
    """(name, tensor, the shape it must have) of every weight that is there."""
    for expert, (w1, w2) in enumerate(zip(weights.w1, weights.w2, strict=True)):
        yield f"w1[{expert}]", w1, (2 * shape.ffn, shape.hidden)
        yield f"w2[{expert}]", w2, (shape.hidden, shape.ffn)
    if weights.shared_w1 is not None and weights.shared_w2 is not None:
        yield "shared_w1", weights.shared_w1, (2 * shape.shared_ffn, shape.hidden)
        yield "shared_w2", weights.shared_w2, (shape.hidden, shape.shared_ffn)


def _elsewhere(name: str, tensor: Tensor, device: torch.device, where: str) -> str:
    return f"{name} must be on x's device, {device}, got {tensor.device} {where}; move it"


def _form(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{list(tensor.shape)} in {tensor.dtype}"
