"""Where weight gradients go: Megatron's main_grad, or new memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from mok_megatron.backends.reference import ReferenceBackend
from mok_megatron.contract import MoEShape, Weights
from mok_megatron.function import fused_moe
from mok_megatron.parameters import (
    ExpertModules,
    MainGradients,
    check_owners,
    read_weights,
    run_forward_pre_hooks,
)

SHAPE = MoEShape(
    hidden=16, ffn=24, shared_ffn=8, num_experts=4, top_k=2, ep_size=1, dtype=torch.bfloat16
)


def _weights() -> Weights:
    generator = torch.Generator().manual_seed(0)

    def parameter(*size: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(*size, generator=generator).to(SHAPE.dtype) / 4)

    h, f, s = SHAPE.hidden, SHAPE.ffn, SHAPE.shared_ffn
    return Weights(
        w1=tuple(parameter(2 * f, h) for _ in range(4)),
        w2=tuple(parameter(h, f) for _ in range(4)),
        shared_w1=parameter(2 * s, h),
        shared_w2=parameter(h, s),
    )


def _backward(weights: Weights, times: int = 1, owners: ExpertModules | None = None) -> None:
    generator = torch.Generator().manual_seed(1)
    x_TH = torch.randn(9, SHAPE.hidden, generator=generator).to(SHAPE.dtype)
    # Expert 3 gets no row.
    expert_TK = torch.tensor([[0, 1], [1, 2], [0, 2]] * 3, dtype=torch.int32)
    prob_TK = torch.rand(9, 2, generator=generator)
    backend = ReferenceBackend(SHAPE, None)
    for _ in range(times):
        store = MainGradients(weights.flat()) if owners is None else owners.store
        parameters = None if owners is None else owners.parameters
        y_TH = fused_moe(x_TH, expert_TK, prob_TK, weights, backend, store, parameters)
        y_TH.float().square().sum().backward()


def test_main_grad_is_added_to_in_place() -> None:
    plain = _weights()
    _backward(plain)
    for dtype in (torch.float32, torch.bfloat16):
        weights = _weights()
        before = {}
        for parameter in weights.flat():
            parameter.main_grad = torch.ones(parameter.shape, dtype=dtype)
            parameter.grad_added_to_main_grad = False
            before[parameter] = parameter.main_grad.data_ptr()
        values = [parameter.detach().clone() for parameter in weights.flat()]
        _backward(weights, times=2)  # nobody clears .grad in between
        for parameter, value in zip(weights.flat(), values, strict=True):
            assert torch.equal(parameter, value)
        for parameter, want in zip(weights.flat(), plain.flat(), strict=True):
            main_grad = parameter.main_grad
            assert main_grad.data_ptr() == before[parameter]
            assert parameter.grad_added_to_main_grad
            assert parameter.grad is not None
            assert parameter.grad.shape == parameter.shape
            assert parameter.grad.dtype == parameter.dtype
            assert want.grad is not None
            torch.testing.assert_close(
                main_grad.float(), 1 + 2 * want.grad.float(), rtol=2e-2, atol=2e-2
            )


def test_an_expert_without_rows_leaves_main_grad_alone() -> None:
    weights = _weights()
    for parameter in weights.flat():
        parameter.main_grad = torch.full(parameter.shape, torch.nan)
    weights.w1[3].main_grad.fill_(7.0)
    _backward(weights)
    assert (weights.w1[3].main_grad == 7.0).all()


def test_without_main_grad_gradients_are_ordinary() -> None:
    weights = _weights()
    _backward(weights)
    assert all(p.grad is not None for p in weights.flat())
    assert (weights.w1[3].grad == 0).all()
    first = [p.grad.clone() for p in weights.flat()]
    _backward(weights)
    for parameter, once in zip(weights.flat(), first, strict=True):
        assert torch.equal(parameter.grad, once + once)


def test_mixed_and_frozen_parameters() -> None:
    plain = _weights()
    _backward(plain)
    weights = _weights()
    weights.w2[0].main_grad = torch.zeros(weights.w2[0].shape)
    weights.w1[1].requires_grad_(False)
    _backward(weights)
    assert weights.w1[1].grad is None
    torch.testing.assert_close(weights.w1[0].grad, plain.w1[0].grad)
    torch.testing.assert_close(
        weights.w2[0].main_grad.bfloat16(),
        plain.w2[0].grad,
    )


@pytest.mark.parametrize(
    ("main_grad", "words"),
    [
        (torch.zeros(3, 3), r"shape of its weight, \[16, 24\] in torch.bfloat16, got \[3, 3\]"),
        (torch.zeros(24, 16).t(), r"must be contiguous and .* got \[16, 24\] .* strides \(1, 16\)"),
        (torch.zeros(16, 24, dtype=torch.float64), r"bfloat16 or torch.float32, got .*float64"),
    ],
    ids=["shape", "strides", "dtype"],
)
def test_a_wrong_main_grad_is_refused(main_grad: torch.Tensor, words: str) -> None:
    weights = _weights()
    weights.w2[0].main_grad = main_grad
    with pytest.raises(RuntimeError, match=words):
        _backward(weights)


def test_zero_out_wgrad_gives_zeros() -> None:
    weights = _weights()
    parameter = weights.w1[0]
    parameter.main_grad = torch.zeros(parameter.shape)
    parameter.zero_out_wgrad = True
    _backward(weights)
    assert (parameter.grad == 0).all()


def test_pre_hooks_run_in_order_for_every_module() -> None:
    seen = []
    tree = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Sequential(nn.Linear(2, 2))})
    names = {module: name for name, module in tree.named_modules()}

    def hook(module: nn.Module, *unused: object) -> None:
        seen.append(names[module])

    hook.__module__ = "megatron.core.distributed.distributed_data_parallel"
    for module in tree.modules():
        module.register_forward_pre_hook(hook)
    run_forward_pre_hooks(None, tree)
    assert seen == ["", "a", "b", "b.0"]


def test_a_pre_hook_that_wants_inputs_is_refused() -> None:
    linear = nn.Linear(2, 2)
    linear.register_forward_pre_hook(lambda module, args: print(args[0]))
    with pytest.raises(TypeError, match=r"Megatron's own forward pre-hooks only.*got tests\."):
        run_forward_pre_hooks(linear)


class _Adapter(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside


def _with_own_forward(linear: nn.Linear) -> nn.Module:
    linear.forward = lambda x: x * 0
    return linear


def _with_hook(linear: nn.Linear) -> nn.Module:
    linear.register_forward_hook(lambda module, args, output: output * 0)
    return linear


def _sharded(linear: nn.Linear) -> nn.Module:
    linear.weight.get_main_grad = lambda: None
    return linear


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_Adapter, r"got .*_Adapter"),
        (_with_own_forward, r"Linear with a forward of its own"),
        (_with_hook, r"Linear with a forward or backward hook"),
        (_sharded, r"Linear with sharded parameters"),
    ],
    ids=["adapter", "own-forward", "hook", "sharded"],
)
def test_modules_that_do_more_than_own_weights_are_refused(change: Any, words: str) -> None:
    plain = nn.Sequential(nn.Linear(2, 2))
    check_owners(plain, None)
    with pytest.raises(TypeError, match=words):
        check_owners(nn.Sequential(change(nn.Linear(2, 2))), None)
    with pytest.raises(TypeError, match=words):
        check_owners(plain, nn.Sequential(change(nn.Linear(2, 2))))


def test_an_unknown_expert_module_is_named() -> None:
    with pytest.raises(TypeError, match=r"SequentialMLP or TEGroupedMLP .* got Linear"):
        read_weights(nn.Linear(2, 2), None)


# One parameter for all experts.


class _Grouped(torch.Tensor):
    """What is seen of Transformer Engine's GroupedTensor: no numbers of its own, and no views."""

    @staticmethod
    def __new__(cls, rowwise_data: torch.Tensor, form: tuple[int, ...]) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, form, dtype=rowwise_data.dtype)

    def __init__(self, rowwise_data: torch.Tensor, form: tuple[int, ...]) -> None:
        self.rowwise_data = rowwise_data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default) or (
            func is aten.view.default and tuple(args[1]) == args[0].shape  # get_gradient_edge
        ):
            return cls(args[0].rowwise_data, tuple(args[0].shape))
        raise AssertionError(f"{func} of a grouped tensor")


def _grouped_experts(weights: Weights) -> Any:
    """In the form of TEGroupedMLP with --moe-single-grouped-weight: these weights, stacked."""
    experts = nn.Module()
    experts.num_local_experts = len(weights.w1)
    for name, of_experts in (("linear_fc1", weights.w1), ("linear_fc2", weights.w2)):
        stacked = torch.stack([w.detach() for w in of_experts])
        linear = nn.Linear(1, 1)
        linear.weight = nn.Parameter(_Grouped(stacked.flatten(), tuple(stacked.shape)))
        linear.register_parameter("weight0", None)
        setattr(experts, name, linear)
    return experts


def _shared_of(weights: Weights) -> Any:
    shared = nn.Module()
    shared.linear_fc1, shared.linear_fc2 = nn.Linear(1, 1), nn.Linear(1, 1)
    shared.linear_fc1.weight, shared.linear_fc2.weight = weights.shared_w1, weights.shared_w2
    return shared


@pytest.mark.parametrize("main_grads", [False, True])
def test_one_parameter_for_all_experts_gets_their_gradients(main_grads: bool) -> None:
    plain, weights = _weights(), _weights()
    experts, shared = _grouped_experts(weights), _shared_of(weights)
    owners = ExpertModules(experts, shared)
    assert owners.parameters[0] is experts.linear_fc1.weight
    assert len(owners.parameters) == 4
    for parameter in (*plain.flat(), *owners.parameters) if main_grads else ():
        parameter.main_grad = torch.ones(parameter.shape)
        parameter.grad_added_to_main_grad = False
    ready: list[int] = []
    nodes = [get_gradient_edge(p).node for p in owners.parameters]
    for i, node in enumerate(nodes):  # as DDP does
        node.register_hook(lambda *_, i=i: ready.append(i))
    _backward(plain, times=2)
    _backward(owners.weights, 2, owners)
    assert sorted(ready) == [0, 0, 1, 1, 2, 2, 3, 3]
    want = [torch.stack([_gradient(w) for w in group]) for group in (plain.w1, plain.w2)]
    want += map(_gradient, (plain.shared_w1, plain.shared_w2))
    for parameter, gradient in zip(owners.parameters, want, strict=True):
        assert torch.equal(_gradient(parameter), gradient)
        assert parameter.grad.shape == parameter.shape
        assert not main_grads or parameter.grad_added_to_main_grad


def _gradient(parameter: Any) -> torch.Tensor:
    return getattr(parameter, "main_grad", parameter.grad)


def test_a_frozen_or_moved_parameter_for_all_experts() -> None:
    weights = _weights()
    experts = _grouped_experts(weights)
    owners = ExpertModules(experts, _shared_of(weights))
    experts.linear_fc1.weight.requires_grad_(False)
    experts.linear_fc2.weight.main_grad = torch.zeros(experts.linear_fc2.weight.shape)
    _backward(owners.weights, 1, owners)
    assert experts.linear_fc1.weight.grad is None
    assert experts.linear_fc2.weight.main_grad.any()
    assert owners.parameters[2].grad.any()
    assert owners.still(*owners._roots)
    moved = experts.linear_fc2.weight.rowwise_data.clone()
    experts.linear_fc2.weight.rowwise_data = moved  # as the distributed optimizer does
    assert not owners.still(*owners._roots)
    again = ExpertModules(*owners._roots)
    assert again.weights.w2[1].data_ptr() == moved.view(4, -1)[1].data_ptr()
    assert torch.equal(again.weights.w2[1], weights.w2[1])


def test_quantised_weights_of_all_experts_are_refused() -> None:
    experts = _grouped_experts(_weights())
    weight = experts.linear_fc1.weight
    weight.rowwise_data = weight.rowwise_data.to(torch.uint8)
    with pytest.raises(TypeError, match="with unquantised weights, got Module; use"):
        ExpertModules(experts, None)


# What is kept from call to call.


def _experts(count: int = 3) -> nn.Module:
    """In the form of SequentialMLP, of modules that check_owners takes."""
    made = nn.Module()
    made.local_experts = nn.ModuleList()
    for _ in range(count):
        mlp = nn.Module()
        mlp.linear_fc1, mlp.linear_fc2 = nn.Linear(4, 8), nn.Linear(4, 4)
        made.local_experts.append(mlp)
    return made


def _another_parameter(experts: Any) -> None:
    experts.local_experts[1].linear_fc2.weight = nn.Parameter(torch.zeros(4, 4))


def _another_linear(experts: Any) -> None:
    experts.local_experts[2].linear_fc1 = nn.Linear(4, 8)


def _another_expert(experts: Any) -> None:
    experts.local_experts[0] = _experts(1).local_experts[0]


def _one_expert_more(experts: Any) -> None:
    experts.local_experts.append(_experts(1).local_experts[0])


def _something_inside(experts: Any) -> None:
    experts.local_experts[1].linear_fc1.inside = nn.Linear(1, 1)


@pytest.mark.parametrize(
    "change",
    [_another_parameter, _another_linear, _another_expert, _one_expert_more, _something_inside],
)
def test_an_exchanged_module_or_parameter_ends_the_walk(change: Any) -> None:
    experts = _experts()
    owners = ExpertModules(experts, None)
    assert owners.still(experts, None)
    assert owners.weights.w1[1] is experts.local_experts[1].linear_fc1.weight
    change(experts)
    assert not owners.still(experts, None)
    again = ExpertModules(experts, None)
    assert again.still(experts, None)
    assert again.weights.w2[1] is experts.local_experts[1].linear_fc2.weight


def test_other_roots_end_the_walk() -> None:
    experts, shared = _experts(), _experts(1).local_experts[0]
    owners = ExpertModules(experts, shared)
    assert owners.weights.shared_w1 is shared.linear_fc1.weight
    assert owners.still(experts, shared)
    assert not owners.still(experts, None)
    assert not owners.still(_experts(), shared)


def test_a_pre_hook_that_comes_late_is_run_and_a_strangers_refused() -> None:
    experts = _experts()
    owners = ExpertModules(experts, None)
    owners.run_forward_pre_hooks()
    seen = []

    def hook(module: nn.Module, *unused: object) -> None:
        seen.append(module)

    hook.__module__ = "megatron.core.distributed.distributed_data_parallel"
    for mlp in experts.local_experts:
        mlp.linear_fc1.register_forward_pre_hook(hook)
    owners.run_forward_pre_hooks()
    assert seen == [mlp.linear_fc1 for mlp in experts.local_experts]
    experts.register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(TypeError, match="Megatron's own forward pre-hooks only"):
        owners.run_forward_pre_hooks()


def test_places_are_one_record_until_a_main_grad_is_another() -> None:
    weights = _weights()
    needed = (True,) * len(weights.flat())
    store = MainGradients(weights.flat())
    for parameter in weights.flat():
        parameter.main_grad = torch.zeros(parameter.shape)
    into = store.open(weights, needed, SHAPE)
    assert store.open(weights, needed, SHAPE) is into
    frozen = store.open(weights, (False, *needed[1:]), SHAPE)
    assert frozen.w1[0] is None
    assert store.close(weights, frozen)[0] is None
    other = weights.w2[2].main_grad = torch.zeros(weights.w2[2].shape)
    assert store.open(weights, needed, SHAPE).w2[2] is other
    del weights.w2[2].main_grad
    mixed = [store.open(weights, needed, SHAPE).w2[2] for _ in range(2)]
    assert mixed[0] is not mixed[1]  # returned to autograd, which keeps it


def test_without_stand_ins_a_grad_is_left_as_it_is() -> None:
    weights = _weights()
    for parameter in weights.flat():
        parameter.main_grad = torch.zeros(parameter.shape)
    needed, given = (True,) * len(weights.flat()), torch.ones_like(weights.w1[1])
    weights.w1[1].grad = given
    store = MainGradients(weights.flat(), stand_ins=False)
    for _ in range(2):
        into = store.open(weights, needed, SHAPE)
        assert store.close(weights, into) == (None,) * len(needed)
        assert weights.w1[1].grad is given
        assert all(p.grad is None for p in weights.flat() if p is not weights.w1[1])
        assert all(p.grad_added_to_main_grad for p in weights.flat())
        for parameter in weights.flat():
            parameter.grad_added_to_main_grad = False  # as DDP does with its buffers
