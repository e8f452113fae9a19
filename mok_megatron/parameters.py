"""Megatron's own expert modules -> weight tensors, and back: pre-hooks before use, gradients after.

Megatron's modules stay the owners: they made the parameters, initialised them, name them in
checkpoints and give them to DDP and the optimizer. This file reads the tensors out of them at every
call, because DDP and the distributed optimizer re-point `param.data` after the layer is built.

A fused layer never calls `linear_fc1.forward`, so two things that hang on that call are done here
instead:
  * forward pre-hooks: with --overlap-param-gather, DDP waits for a bucket's all-gather in a
    pre-hook of the module that owns the parameters. Without it the layer would read last step's
    weights.
  * `main_grad`: the backward adds into it in place, sets `grad_added_to_main_grad`, and hands
    autograd a stand-in that DDP's hook throws away (it insists on some gradient when it overlaps
    the reduction).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from mok_megatron.contract import MoEShape, WeightGradients, Weights
from mok_megatron.function import FreshGradients


def read_weights(experts: Any, shared_experts: Any) -> Weights:
    """The Parameters of SequentialMLP or TEGroupedMLP, and of the shared expert when it is fused.

    `experts`: Megatron's expert module of this rank; `shared_experts`: SharedExpertMLP or None.
    Raises TypeError for any other expert module.
    """
    if hasattr(experts, "local_experts"):  # SequentialMLP: one MLP per expert
        w1 = tuple(e.linear_fc1.weight for e in experts.local_experts)
        w2 = tuple(e.linear_fc2.weight for e in experts.local_experts)
    elif hasattr(experts, "linear_fc1") and hasattr(experts.linear_fc1, "weight0"):  # TEGroupedMLP
        local = range(experts.num_local_experts)
        w1 = tuple(getattr(experts.linear_fc1, f"weight{i}") for i in local)
        w2 = tuple(getattr(experts.linear_fc2, f"weight{i}") for i in local)
    else:
        raise TypeError(
            "mok: the expert module must be Megatron's SequentialMLP or TEGroupedMLP with one "
            f"weight per expert, got {type(experts).__name__}; use the standard layer spec, or "
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


def run_forward_pre_hooks(*modules: nn.Module | None) -> None:
    """Call the forward pre-hooks of the modules and of all modules inside, in the order a forward
    would.

    They get no inputs, because there are none: these modules' forwards are not called.
    """
    for module in chain.from_iterable(_modules_inside(m) for m in modules):
        for hook_id, hook in list(module._forward_pre_hooks.items()):
            if hook_id in module._forward_pre_hooks_with_kwargs:
                hook(module, (), {})
            else:
                hook(module, ())


def _modules_inside(module: nn.Module | None) -> Iterator[nn.Module]:
    return iter(()) if module is None else module.modules()


class MainGradients:
    """Weight gradients in Megatron's `main_grad` where a parameter has one, else in new memory.

    The parameters are held here, not read back from autograd: saved-tensor hooks may hand out
    copies, which do not carry `main_grad`.
    """

    def __init__(self, parameters: Weights) -> None:
        self.parameters = parameters.flat()

    def open(self, weights: Weights, needed: tuple[bool, ...], shape: MoEShape) -> WeightGradients:
        """main_grad of each parameter that wants a gradient; zeros where only some of them have
        one."""
        main_grads = [getattr(p, "main_grad", None) for p in self.parameters]
        if all(g is None for g in main_grads):
            return FreshGradients().open(weights, needed, shape)
        flat: list[Tensor | None] = []
        for parameter, main_grad, wanted in zip(self.parameters, main_grads, needed, strict=True):
            if not wanted:
                flat.append(None)
            elif main_grad is None:
                flat.append(torch.zeros_like(parameter))
            else:
                flat.append(_checked(parameter, main_grad))
        return WeightGradients.of(tuple(flat), shape, accumulate=True)

    def close(self, weights: Weights, into: WeightGradients) -> tuple[Tensor | None, ...]:
        """For a parameter with main_grad: the flag, and a stand-in of its shape and dtype."""
        gradients = FreshGradients().close(weights, into)
        return tuple(
            _stand_in(p) if g is not None and g is getattr(p, "main_grad", None) else g
            for p, g in zip(self.parameters, gradients, strict=True)
        )


def _checked(parameter: Tensor, main_grad: Any) -> Tensor:
    if main_grad.shape != parameter.shape or not main_grad.is_contiguous():
        raise RuntimeError(
            "mok: main_grad must be contiguous and of its parameter's shape "
            f"{tuple(parameter.shape)}, got {tuple(main_grad.shape)} with strides "
            f"{main_grad.stride()}; use Megatron's DistributedDataParallel"
        )
    if main_grad.dtype not in (torch.float32, parameter.dtype):
        raise RuntimeError(
            f"mok: main_grad must be float32 or {parameter.dtype}, got {main_grad.dtype}; "
            "drop --grad-reduce-in-bf16's custom dtype or --main-grads-dtype"
        )
    tensor: Tensor = main_grad
    return tensor


def _stand_in(parameter: Any) -> Tensor:
    """An alias of the weight itself: no memory, and autograd can take it without a copy."""
    parameter.grad_added_to_main_grad = True
    if getattr(parameter, "zero_out_wgrad", False):
        return torch.zeros_like(parameter)
    alias: Tensor = parameter.detach()
    return alias
