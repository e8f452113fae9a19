"""MokMoELayer beside Megatron's own layer on alltoall: same state, same numbers, same gradients."""

from __future__ import annotations

import contextlib
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import tiny_megatron as tiny
from tests.ranks import run_ranks

# name -> (base, overrides of both layers)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "deepseek-v3": (tiny.DEEPSEEK_V3, {}),
    "qwen3": (tiny.QWEN3, {}),
    "top-1": (tiny.QWEN3, {"moe_router_topk": 1, "moe_router_pre_softmax": True}),
    "top-5": (tiny.QWEN3, {"moe_router_topk": 5}),
    "router-in-model-dtype": (tiny.QWEN3, {"moe_router_dtype": None}),
    "router-in-fp64": (tiny.DEEPSEEK_V3, {"moe_router_dtype": "fp64"}),
    "shared-gate": (tiny.DEEPSEEK_V3, {"moe_shared_expert_gate": True}),
    "shared-overlap": (tiny.DEEPSEEK_V3, {"moe_shared_expert_overlap": True}),
    "shared-gate-overlap": (
        tiny.DEEPSEEK_V3,
        {"moe_shared_expert_overlap": True, "moe_shared_expert_gate": True},
    ),
    "forced-balance": (tiny.QWEN3, {"moe_router_force_load_balancing": True}),
    "no-balancing": (tiny.QWEN3, {"moe_router_load_balancing_type": "none"}),
    "sinkhorn": (
        tiny.QWEN3,
        {
            "moe_router_load_balancing_type": "sinkhorn",
            "moe_router_topk": 1,
            "moe_aux_loss_coeff": 0.0,
        },
    ),
    "global-aux-loss": (tiny.QWEN3, {"moe_router_load_balancing_type": "global_aux_loss"}),
    "two-aux-losses": (
        tiny.QWEN3,
        {
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
            "moe_aux_loss_coeff": [1e-2, 1e-3],
        },
    ),
    "jitter": (tiny.QWEN3, {"moe_input_jitter_eps": 0.1}),
    "every-expert": (tiny.QWEN3, {"moe_router_topk": 8}),
    "drops-by-position": (
        tiny.QWEN3,
        {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"},
    ),
    "fewer-than-k-choices": (tiny.QWEN3, {"moe_expert_capacity_factor": 0.5}),
    "one-expert-takes-most": (tiny.QWEN3, {"moe_router_topk": 2, "skew": 50.0}),
    "recompute-moe": (
        tiny.DEEPSEEK_V3,
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ),
    "recompute-moe-old-flag": (tiny.DEEPSEEK_V3, {"moe_layer_recompute": True}),
    # Routers that draw random numbers, which a recompute must draw again.
    "recompute-forced-balance": (
        tiny.QWEN3,
        {
            "recompute_granularity": "selective",
            "recompute_modules": ["moe"],
            "moe_router_force_load_balancing": True,
        },
    ),
    "recompute-jitter": (
        tiny.QWEN3,
        {
            "recompute_granularity": "selective",
            "recompute_modules": ["moe"],
            "moe_input_jitter_eps": 0.1,
        },
    ),
    "recompute-shared-experts": (
        tiny.DEEPSEEK_V3,
        {"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]},
    ),
}


def _run(layer: Any, x_SBH: torch.Tensor, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Outputs and all gradients of one forward and backward with a fixed loss."""
    x_SBH = x_SBH.clone().requires_grad_()
    y_SBH, bias = layer(x_SBH, padding_mask=mask)
    assert bias is None
    generator = torch.Generator().manual_seed(99 + dist.get_rank())
    (y_SBH * torch.randn(y_SBH.shape, generator=generator).to(y_SBH.dtype)).sum().backward()
    results = {"y": y_SBH.detach(), "dx": x_SBH.grad}
    for name, parameter in layer.named_parameters():
        results[f"d({name})"] = parameter.grad
    return results


def _compare(
    base: dict[str, Any], overrides: dict[str, Any], dtype: torch.dtype, mask: bool
) -> dict[str, dict[str, torch.Tensor]]:
    """Results of mok, of alltoall, and of alltoall in fp32 on the same values ("truth")."""
    overrides = dict(overrides)
    skew = overrides.pop("skew", None)
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    tokens = 12 + 3 * dist.get_rank()
    x_SBH = torch.randn(tokens, 2, base["hidden_size"], generator=generator).to(dtype)
    padding = torch.rand(2, tokens, generator=generator) < 0.3 if mask else None
    results = {}
    state: dict[str, Any] = {}
    for arm in ("alltoall", "mok", "truth"):
        of_arm = torch.float32 if arm == "truth" else dtype
        layer = tiny.moe_layer(
            "mok" if arm == "mok" else "alltoall",
            base,
            **overrides | {"params_dtype": of_arm, "bf16": of_arm == torch.bfloat16},
        )
        layer.train()
        if skew is not None:
            with torch.no_grad():
                layer.router.weight.mul_(1e-3)
                layer.router.weight[1] += skew / base["hidden_size"]
                x_SBH = x_SBH.abs()
        if arm == "truth":
            layer.load_state_dict(state)
        state = state or layer.state_dict()
        results[arm] = _run(layer, x_SBH.to(of_arm), padding)
    return results


def _error(got: torch.Tensor | None, want: torch.Tensor | None) -> float:
    """Relative error in the 2-norm. No gradient at all (an expert without rows) is a zero one."""
    if got is None or want is None:
        rest = want if got is None else got
        return 0.0 if rest is None else rest.abs().max().item()
    scale = want.double().norm().item()
    difference = (got.double() - want.double()).norm().item()
    return difference / scale if scale > 0 else difference


def _parity_rank(rank: int, world: int) -> dict[str, dict[str, tuple[float, float, float]]]:
    """case -> tensor -> (mok against alltoall, mok against truth, alltoall against truth)."""
    tiny.set_up(expert_parallel=world)
    errors: dict[str, dict[str, tuple[float, float, float]]] = {}
    for name, (base, overrides) in CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            # With an expert bias Megatron 0.19's router cannot take a mask, on any dispatcher.
            for mask in (False, True) if name == "qwen3" else (False,):
                results = _compare(base, overrides, dtype, mask)
                mok, alltoall, truth = results["mok"], results["alltoall"], results["truth"]
                assert mok.keys() == alltoall.keys()
                key = f"{name}{'-mask' if mask else ''}-{str(dtype).removeprefix('torch.')}"
                errors[key] = {
                    tensor: (
                        _error(mok[tensor], alltoall[tensor]),
                        _error(mok[tensor], truth[tensor]),
                        _error(alltoall[tensor], truth[tensor]),
                    )
                    for tensor in mok
                }
    return errors


Errors = list[dict[str, dict[str, tuple[float, float, float]]]]


@pytest.fixture(scope="module", params=[1, 2], ids=["ep1", "ep2"])
def parity(request: pytest.FixtureRequest) -> Errors:
    """Errors per case and tensor, per rank."""
    return run_ranks(request.param, _parity_rank, deadline=300)


def _other_order(case: str, tensors: dict[str, Any]) -> set[str]:
    router = {"d(router.weight)"} if case.startswith("router-in-fp64") else set()
    return router | ({"dx"} if any("shared_experts" in name for name in tensors) else set())


def test_fp32_has_alltoalls_bytes(parity: Errors) -> None:
    # All but two: with a fused shared expert, dx adds its two halves in another order; and the
    # layer takes probabilities in fp32, so an fp64 router gets its gradient rounded to that.
    for errors in parity:
        wrong = {
            (case, tensor): of_mok
            for case, tensors in errors.items()
            if case.endswith("float32")
            for tensor, (of_mok, _, _) in tensors.items()
            if of_mok > (1e-6 if tensor in _other_order(case, tensors) else 0.0)
        }
        assert not wrong


def test_bf16_is_as_accurate_as_alltoall(parity: Errors) -> None:
    for errors in parity:
        wrong = {}
        ratios = []
        for case, tensors in errors.items():
            # With the router itself in bf16, fp32 routes some tokens elsewhere: no common truth.
            if not case.endswith("bfloat16") or case.startswith("router-in-model-dtype"):
                continue
            for tensor, (_, of_mok, of_alltoall) in tensors.items():
                if not of_mok <= 1.25 * of_alltoall + 1e-6:
                    wrong[case, tensor] = (of_mok, of_alltoall)
                if of_alltoall > 1e-4:
                    ratios.append(of_mok / of_alltoall)
        assert not wrong
        assert sorted(ratios)[len(ratios) // 2] <= 1.0


def _state_rank(rank: int, world: int) -> None:
    tiny.set_up(expert_parallel=world)
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from mok_megatron.layer import MokMoELayer, MokTokenDispatcher

    mok = tiny.moe_layer("mok", tiny.DEEPSEEK_V3)
    native = tiny.moe_layer("alltoall", tiny.DEEPSEEK_V3)
    assert type(mok) is MokMoELayer
    assert isinstance(mok, MoELayer)
    assert type(native) is MoELayer
    assert mok.config.moe_token_dispatcher_type == "mok"

    assert type(mok.token_dispatcher) is MokTokenDispatcher
    assert isinstance(mok.token_dispatcher, MoEAlltoAllTokenDispatcher)
    assert type(mok.experts) is SequentialMLP
    assert type(mok.shared_experts) is SharedExpertMLP

    want, got = native.state_dict(), mok.state_dict()
    assert want.keys() == got.keys()
    for name in want:
        if isinstance(want[name], torch.Tensor):
            assert torch.equal(want[name], got[name]), name
    for (name, p), (other, q) in zip(
        native.named_parameters(), mok.named_parameters(), strict=True
    ):
        assert name == other
        assert getattr(p, "allreduce", True) == getattr(q, "allreduce", True), name
    assert native.sharded_state_dict().keys() == mok.sharded_state_dict().keys()

    # The stages still work one by one, for code that drives them itself.
    x_SBH = torch.randn(4, 2, 64)
    probs, routing_map = mok.route(x_SBH)
    rows, row_probs = mok.preprocess(x_SBH, probs, routing_map)
    rows, row_probs = mok.dispatch(rows, row_probs)
    output, _ = mok.routed_experts_compute(rows, row_probs)
    staged = mok.postprocess(mok.combine(output), mok.shared_experts_compute(x_SBH))
    torch.testing.assert_close(staged, mok(x_SBH)[0], rtol=1e-5, atol=1e-6)

    # eval and no_grad run mok too, and keep nothing.
    mok.eval()
    with torch.no_grad():
        evaluated = mok(x_SBH)[0]
    assert not evaluated.requires_grad
    assert torch.equal(evaluated, mok(x_SBH)[0])

    with pytest.raises(RuntimeError, match=r"partial CUDA graph.*--cuda-graph-modules"):
        mok(x_SBH, intermediate_tensors=(x_SBH, probs))


def test_state_is_megatrons(tmp_path: Any) -> None:
    run_ranks(2, _state_rank, deadline=120)


def _frozen_rank(rank: int, world: int) -> None:
    tiny.set_up(expert_parallel=world)
    whole = tiny.moe_layer("mok", tiny.DEEPSEEK_V3)
    part = tiny.moe_layer("mok", tiny.DEEPSEEK_V3)
    part.experts.local_experts[1].requires_grad_(False)
    part.shared_experts.linear_fc1.requires_grad_(False)
    x_SBH = torch.randn(16, 2, 64)
    want, got = _run(whole, x_SBH, None), _run(part, x_SBH, None)
    for name in want:
        if "local_experts.1." in name or "shared_experts.linear_fc1" in name:
            assert got[name] is None
        else:
            assert torch.equal(got[name], want[name]), name


def test_frozen_weights_are_skipped() -> None:
    run_ranks(2, _frozen_rank, deadline=120)


def _stand_ins_rank(rank: int, world: int) -> None:
    tiny.set_up(expert_parallel=world)
    from mok_megatron import plugin

    for arguments, wanted in (
        (None, True),  # not megatron.training's: DDP may overlap
        (SimpleNamespace(), True),
        (SimpleNamespace(overlap_grad_reduce=True), True),
        (SimpleNamespace(overlap_grad_reduce=False), False),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plugin, "training_arguments", lambda said=arguments: said)
            layer = tiny.moe_layer("mok", tiny.DEEPSEEK_V3)
            owned = [*layer.experts.parameters(), *layer.shared_experts.parameters()]
            for parameter in owned:
                parameter.main_grad = torch.zeros(parameter.shape)
            layer(torch.randn(16, 2, 64))[0].sum().backward()
        assert all(parameter.grad_added_to_main_grad for parameter in owned)
        assert all((parameter.grad is not None) == wanted for parameter in owned)
        assert layer.router.weight.grad is not None


def test_a_grad_is_left_unless_the_reduction_is_known_not_to_overlap() -> None:
    run_ranks(1, _stand_ins_rank, deadline=120)


def _lines_rank(rank: int, world: int) -> list[str]:
    """What layers say at their first calls, of which the first two say the same."""
    tiny.set_up(expert_parallel=world)
    said = io.StringIO()
    overlap = {"moe_shared_expert_overlap": True}
    with contextlib.redirect_stdout(said):
        for overrides in (
            overlap | {"moe_grouped_gemm": True},
            overlap | {"moe_grouped_gemm": True},
            overlap | {"moe_shared_expert_gate": True},
        ):
            layer = tiny.moe_layer("mok", tiny.DEEPSEEK_V3, **overrides)
            for _ in range(2):
                layer(torch.randn(4, 1, 64))
    return said.getvalue().splitlines()


def test_what_is_done_anyway_is_said_once_and_what_is_not_too() -> None:
    first, second = run_ranks(2, _lines_rank, deadline=60)
    assert first == [
        "mok: MoE layers run on the reference backend: the tensors are on the CPU",
        "mok: part of the fused call in any case: --moe-grouped-gemm, --moe-shared-expert-overlap",
        "mok: --moe-shared-expert-overlap overlaps nothing here: a shared expert with a gate, a "
        "recompute of its own or tensor parallelism runs before the fused call",
    ]
    assert second == []
