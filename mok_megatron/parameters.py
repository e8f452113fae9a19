"""Megatron's own expert modules -> weight tensors, and back: pre-hooks before use, gradients after.

Megatron's modules stay the owners: they made the parameters, initialised them, name them in
checkpoints and give them to DDP and the optimizer. This file reads the parameters out of them at
every call. The walk to them is kept, and made again when a module or parameter was exchanged; their
addresses are looked up by who uses them, since DDP and the distributed optimizer re-point
`param.data` after the layer is built.

A fused layer never calls `linear_fc1.forward`, so two things that hang on that call are done here
instead:
  * forward pre-hooks: with --overlap-param-gather, DDP waits for a bucket's all-gather in a
    pre-hook of the module that owns the parameters. Without it the layer would read last step's
    weights.
  * `main_grad`: the backward adds into it in place and sets `grad_added_to_main_grad`. Unless it is
    known that DDP does not overlap the reduction, where it insists on some gradient, the backward
    leaves a stand-in in `.grad` that DDP's hook throws away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from mok_megatron.contract import MoEShape, WeightGradients, Weights


def read_weights(experts: Any, shared_experts: Any) -> Weights:
    """The Parameters of SequentialMLP or TEGroupedMLP, and of the shared expert when it is fused;
    of a TEGroupedMLP with --moe-single-grouped-weight, each expert's view of its Parameter.

    `experts`: Megatron's expert module of this rank; `shared_experts`: SharedExpertMLP or None.
    Raises TypeError for any other expert module.
    """
    local = range(getattr(experts, "num_local_experts", 0))
    if hasattr(experts, "local_experts"):  # SequentialMLP: one MLP per expert
        w1 = tuple(e.linear_fc1.weight for e in experts.local_experts)
        w2 = tuple(e.linear_fc2.weight for e in experts.local_experts)
    elif stacked := _stacked(experts):
        w1, w2 = (_members(parameter) for parameter in stacked)
    elif getattr(getattr(experts, "linear_fc1", None), "weight0", None) is not None:
        w1 = tuple(getattr(experts.linear_fc1, f"weight{i}") for i in local)
        w2 = tuple(getattr(experts.linear_fc2, f"weight{i}") for i in local)
    else:
        raise TypeError(
            "mok: the expert module must be Megatron's SequentialMLP or TEGroupedMLP with "
            f"unquantised weights, got {type(experts).__name__}; use the standard layer spec, or "
            "--moe-token-dispatcher-type alltoall"
        )
    if shared_experts is None:
        return Weights(w1=w1, w2=w2)
    return Weights(
        w1=w1,
        w2=w2,
        shared_w1=shared_experts.linear_fc1.weight,
        shared_w2=shared_experts.linear_fc2.weight,
    )


def _stacked(experts: Any) -> tuple[Any, ...]:
    """The weights of a TEGroupedMLP that has one Parameter [L, ...] for all its experts, else none.

    It is Transformer Engine's GroupedTensor, which keeps its numbers beside itself, in
    `rowwise_data`.
    """
    layers = (getattr(experts, name, None) for name in ("linear_fc1", "linear_fc2"))
    weights = tuple(getattr(layer, "weight", None) for layer in layers)
    for weight in weights:
        held = getattr(weight, "rowwise_data", None)
        if weight is None or held is None or held.dtype != weight.dtype:
            return ()
    return weights


def _members(tensor: Any) -> tuple[Tensor, ...]:
    """Of a stacked parameter [L, ...], or of what has its form, each expert's view; else itself."""
    if tensor.dim() < 3:
        return (tensor,)
    held = getattr(tensor, "rowwise_data", None)
    return tuple((tensor if held is None else held.detach().view(tensor.shape)).unbind())


def check_owners(experts: nn.Module, shared_experts: nn.Module | None) -> None:
    """Refuse modules that do more than own weights: the fused call would leave that out.

    An adapter, a quantised linear, a forward hook or an overridden forward changes what Megatron's
    own forward computes, and so do parameters that are gathered on use. Raises TypeError.
    """
    for name, module in chain.from_iterable(
        m.named_modules() for m in (experts, shared_experts) if m is not None
    ):
        where = (
            f"{name or 'the expert module'}, a {type(module).__module__}.{type(module).__name__}"
        )
        found = None
        if not type(module).__module__.startswith(("megatron.core.", "torch.nn.")):
            found = where
        elif "forward" in vars(module):
            found = f"{where} with a forward of its own"
        elif module._forward_hooks or module._backward_hooks or module._backward_pre_hooks:
            found = f"{where} with a forward or backward hook"
        elif any(
            hasattr(p, "get_main_grad") or hasattr(p, "device_mesh")
            for p in module.parameters(recurse=False)
        ):
            found = f"{where} with sharded parameters"
        if found is not None:
            raise TypeError(
                "mok: experts must be Megatron's own modules, since their forward is not called, "
                f"got {found}; remove the adapter, quantiser, hook or sharding, or use "
                "--moe-token-dispatcher-type alltoall"
            )


def run_forward_pre_hooks(*modules: nn.Module | None, inside: bool = True) -> None:
    """Call Megatron's forward pre-hooks of the modules, and of all modules inside, in order.

    They wait for parameters and look at nothing else, so they get no inputs. A pre-hook of somebody
    else wants the inputs of a forward that does not run: raises TypeError.
    """
    every = (m.modules() if inside else (m,) for m in modules if m is not None)
    for module in chain.from_iterable(every):
        for hook in list(module._forward_pre_hooks.values()):
            if not hook.__module__.startswith("megatron.core.distributed"):
                raise TypeError(
                    "mok: expert modules can have Megatron's own forward pre-hooks only, since "
                    f"their forward is not called, got {hook.__module__}.{hook.__qualname__} on a "
                    f"{type(module).__name__}; register it on the MoE layer, or use "
                    "--moe-token-dispatcher-type alltoall"
                )
            hook(module, ())


class ExpertModules:
    """The modules that own a layer's expert weights, and what hangs on them, walked once.

    `experts` and `shared_experts` as in read_weights and check_owners, which raise from here;
    `stand_ins` as in MainGradients.
    """

    def __init__(
        self, experts: nn.Module, shared_experts: nn.Module | None, *, stand_ins: bool = True
    ) -> None:
        check_owners(experts, shared_experts)
        self.weights = read_weights(experts, shared_experts)
        self._stacked = _stacked(experts)
        # What autograd sees: the weights, or the parameters that they are views of.
        self.parameters = self.weights.flat()
        if self._stacked:
            self.parameters = *self._stacked, *self.parameters[2 * len(self.weights.w1) :]
        self.store = MainGradients(self.parameters, stand_ins=stand_ins)
        roots = [m for m in (shared_experts, experts) if m is not None]
        self._roots = experts, shared_experts
        self._modules = [*chain.from_iterable(m.modules() for m in roots)]
        self._held: list[Any] = [
            held for m in self._modules for held in (m._modules, m._parameters)
        ]
        self._inside = self._now_inside()

    def still(self, experts: nn.Module, shared_experts: nn.Module | None) -> bool:
        """Whether they are the same modules, with the same modules and parameters inside."""
        return (
            self._roots[0] is experts
            and self._roots[1] is shared_experts
            and _same(self._now_inside(), self._inside)
        )

    def run_forward_pre_hooks(self) -> None:
        """See there. Whether a module has a hook is seen at every call: DDP registers them late."""
        with_hooks = [m for m in self._modules if m._forward_pre_hooks]
        if with_hooks:
            run_forward_pre_hooks(*with_hooks, inside=False)

    def _now_inside(self) -> list[Any]:
        """Every child and every parameter, module by module, and where stacked ones are."""
        places = (parameter.rowwise_data for parameter in self._stacked)
        return [*chain.from_iterable(map(dict.values, self._held)), *places]


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """The same objects: tensors must not be compared by value."""
    return len(a) == len(b) and all(map(is_, a, b))


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """What `open` found, and made of it for `close` too."""

    needed: tuple[bool, ...]
    wanted: list[tuple[Any, Tensor]]  # the parameters of which a gradient is, and their main_grad
    stand_ins: list[tuple[Any, Tensor]]  # they, and zeros in their forms
    fresh: tuple[Tensor | None, ...]  # for each parameter
    once: bool  # some are
    into: WeightGradients

    def still(self, needed: tuple[bool, ...]) -> bool:
        if self.once or self.needed != needed:
            return False
        try:
            for parameter, main_grad in self.wanted:  # quicker than map and is_
                if parameter.main_grad is not main_grad:
                    return False
        except AttributeError:
            return False
        return True


class MainGradients:
    """Weight gradients in Megatron's `main_grad` where a parameter has one, else in new memory.

    `parameters`: those of the weights, in the order of Weights.flat; a stacked one stands for all
    its experts, and its new memory is one tensor. The last main_grads are held, and a backward that
    finds the same ones again gets the same record. `stand_ins`: whether DDP insists on some
    `.grad`; to set it takes longer than all else that is done for a parameter.
    """

    def __init__(self, parameters: tuple[Tensor, ...], *, stand_ins: bool = True) -> None:
        self.parameters = parameters
        self.stand_ins = stand_ins
        self._last: _Opened | None = None

    def open(self, weights: Weights, needed: tuple[bool, ...], shape: MoEShape) -> WeightGradients:
        """main_grad of each parameter that wants a gradient; zeros where only some of them have
        one. The next call is `close` with the result."""
        if self._last is not None and self._last.still(needed):
            return self._last.into
        main_grads = [
            getattr(p, "main_grad", None) if n else None
            for p, n in zip(self.parameters, needed, strict=True)
        ]
        held = [(p, g) for p, g in zip(self.parameters, main_grads, strict=True) if g is not None]
        new = torch.zeros if held else torch.empty
        fresh = tuple(
            new(p.shape, dtype=p.dtype, device=p.device) if n and g is None else None
            for p, g, n in zip(self.parameters, main_grads, needed, strict=True)
        )
        flat: list[Tensor | None] = []
        for parameter, *places in zip(self.parameters, main_grads, fresh, strict=True):
            place = next((p for p in places if p is not None), None)
            flat += [None] * len(_members(parameter)) if place is None else _members(place)
        into = WeightGradients.of(tuple(flat), shape, accumulate=bool(held))
        self._last = _Opened(
            needed=needed,
            wanted=held,
            stand_ins=[(p, _zeros(p.shape, p.dtype, p.device)) for p, _ in held],
            fresh=fresh,
            once=any(gradient is not None for gradient in fresh),
            into=into,
        )
        return into

    def close(self, weights: Weights, into: WeightGradients) -> tuple[Tensor | None, ...]:
        """For a parameter with main_grad: the flag, and None for autograd.

        With `stand_ins` its `.grad`, if there is none, becomes zeros of its shape and dtype, made
        once for all that are alike: what autograd is given costs more, and it would copy what
        somebody else holds.
        """
        last = self._last
        if last is None or last.into is not into:
            raise RuntimeError(
                "mok: weight gradients must be closed with what the last open gave, got another "
                "record; call close right after the backward"
            )
        self._added(last.stand_ins)
        if last.once:
            self._last = None
        return last.fresh

    def _added(self, stand_ins: Sequence[tuple[Any, Tensor]]) -> None:
        if not self.stand_ins:
            for parameter, _ in stand_ins:
                parameter.grad_added_to_main_grad = True
            return
        for parameter, zeros in stand_ins:
            parameter.grad_added_to_main_grad = True
            if parameter.grad is None:
                parameter.grad = zeros


@cache
def _zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of a stacked parameter in the memory of one expert."""
    return torch.zeros(shape[-2:], dtype=dtype, device=device).expand(shape)
