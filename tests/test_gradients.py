"""Gradients where a real run bends them: accumulation, repetition, freezing, recomputation.

Mok beside unmodified alltoall on two ranks, whole trainings first, then single layers. In fp32 both
sum in the same order: every main_grad agrees to a few last digits, expert counts agree exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import tiny_megatron as tiny
from tests.ranks import run_ranks

STEPS = 2
BF16 = {"params_dtype": torch.bfloat16, "bf16": True}
BF16_OPTIMIZER = {"bf16": True, "params_dtype": torch.bfloat16}
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 10_000}
REPEATED = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def _selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """training: arguments of tiny.Training; overrides: of its config."""

    name: str
    training: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def recomputes_routing(self) -> bool:
        return self.overrides.get("recompute_granularity") == "full" or "moe" in self.overrides.get(
            "recompute_modules", ()
        )


CASES = [
    Case(name="plain"),
    Case(name="one-micro-batch", training={"micro_batches": 1, "ddp": BUCKETS}),
    Case(name="four-micro-batches", training={"micro_batches": 4, "ddp": BUCKETS}),
    Case(name="mtp-repeated", training={"mtp": True, "ddp": BUCKETS}, overrides=REPEATED),
    Case(name="experts-frozen", training={"freeze": r"mlp\.experts\.", "ddp": BUCKETS}),
    Case(
        name="some-frozen",
        training={"freeze": r"local_experts\.1\.|shared_experts\.linear_fc1", "ddp": BUCKETS},
    ),
    Case(name="clipped", training={"optimizer": {"clip_grad": 0.05}}),
    Case(
        name="bf16-main-grad-bf16",
        training={"micro_batches": 4, "optimizer": BF16_OPTIMIZER},
        overrides=BF16,
    ),
    Case(
        name="bf16-main-grad-fp32",
        training={
            "micro_batches": 4,
            "optimizer": BF16_OPTIMIZER,
            "ddp": BUCKETS | {"grad_reduce_in_fp32": True},
        },
        overrides=BF16,
    ),
    Case(name="apex", overrides={"gradient_accumulation_fusion": True}),
    Case(name="recompute-moe-shared", overrides=_selective("moe", "shared_experts")),
    Case(name="recompute-norms", overrides=_selective("layernorm")),
    Case(name="recompute-norms-moe", overrides=_selective("layernorm", "moe", "core_attn")),
    Case(name="recompute-full-mtp", training={"mtp": True}, overrides=FULL | REPEATED),
]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One training: curve, first main_grads, expert counts and biases, what the routers said."""

    curve: list[tuple[float, float]]
    main_grads: dict[str, torch.Tensor]
    counts: list[torch.Tensor]
    biases: list[torch.Tensor]
    routings: dict[bool, list[bytes]]  # grad mode -> map and probabilities of every call, sorted
    frozen_moved: list[str]


def _record(dispatcher: str, case: Case) -> Record:
    training = tiny.Training(
        dispatcher=dispatcher, base=tiny.DEEPSEEK_V3, overrides=case.overrides, **case.training
    )
    assert bool(training.mok_layers()) == (dispatcher == "mok")
    routers = [m for m in training.modules() if getattr(m, "enable_expert_bias", False)]
    assert routers
    counts: list[torch.Tensor] = []
    finish = training.config.finalize_model_grads_func

    def finish_and_count(*args: Any, **kwargs: Any) -> None:
        counts.extend(router.local_tokens_per_expert.clone() for router in routers)
        finish(*args, **kwargs)

    training.config.finalize_model_grads_func = finish_and_count
    parameters = dict(training.model.named_parameters())
    frozen = {n: p.detach().clone() for n, p in parameters.items() if not p.requires_grad}
    assert bool(frozen) == bool(training.freeze)
    with _routings() as routings:
        curve = training.run(1)
        main_grads = {n: p.main_grad.clone() for n, p in parameters.items() if p.requires_grad}
        curve += training.run(STEPS - 1)
    return Record(
        curve=curve,
        main_grads=main_grads,
        counts=counts,
        biases=[router.expert_bias.clone() for router in routers],
        routings={mode: sorted(calls) for mode, calls in routings.items()},
        frozen_moved=[n for n, before in frozen.items() if not torch.equal(before, parameters[n])],
    )


@contextmanager
def _routings() -> Iterator[dict[bool, list[bytes]]]:
    """What every call of MoELayer.route returned, by grad mode."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    calls: dict[bool, list[bytes]] = {False: [], True: []}
    route = MoELayer.route

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        probs, routing_map = route(self, *args, **kwargs)
        content = routing_map.numpy().tobytes() + probs.detach().float().numpy().tobytes()
        calls[torch.is_grad_enabled()].append(content)
        return probs, routing_map

    with tiny.patched(MoELayer, "route", recorded):
        yield calls


def _allow_output_discarding() -> None:
    """Let Megatron's CheckpointWithoutOutput run without Transformer Engine and a C++ compiler.

    It asks Transformer Engine for an FP8 state unless `fp8` is None, and refills a storage through
    an extension that is compiled at first use.
    """
    from megatron.core.tensor_parallel import random

    construct = random.CheckpointWithoutOutput.__init__

    def without_fp8(self: Any, fp8: Any = None) -> None:
        construct(self, fp8=fp8 or None)

    def share_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
        storage = output.untyped_storage()
        assert storage.size() == 0
        storage.resize_(recomputed.untyped_storage().size())
        storage.copy_(recomputed.untyped_storage())

    random.CheckpointWithoutOutput.__init__ = without_fp8
    random._share_storage_ext = SimpleNamespace(share_storage=share_storage)


def _stand_in_for_apex() -> list[torch.Size]:
    """Its weight gradients, which --gradient-accumulation-fusion has; sizes of those asked for."""
    from megatron.core.tensor_parallel import layers

    asked: list[torch.Size] = []

    def accumulate(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
        asked.append(main_grad.shape)
        main_grad += dy.t() @ x

    layers._grad_accum_fusion_available = True
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    return asked


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative, in the 2-norm."""
    scale = want.double().norm().item()
    difference = (got.double() - want.double()).norm().item()
    return difference / scale if scale > 0 else difference


@dataclass(frozen=True, kw_only=True)
class Comparison:
    mok: Record
    alltoall: Record
    errors: dict[str, float]  # of main_grads


def _trainings_rank(rank: int, world: int) -> dict[str, Any]:
    tiny.set_up(expert_parallel=world)
    _allow_output_discarding()
    by_apex = _stand_in_for_apex()
    compared: dict[str, Any] = {"by-apex": {}}
    for case in CASES:
        alltoall = _record("alltoall", case)
        before = len(by_apex)
        mok = _record("mok", case)
        compared["by-apex"][case.name] = len(by_apex) - before
        assert mok.main_grads.keys() == alltoall.main_grads.keys()
        errors = {n: _error(mok.main_grads[n], alltoall.main_grads[n]) for n in mok.main_grads}
        compared[case.name] = Comparison(mok=mok, alltoall=alltoall, errors=errors)
    compared["layers"] = _layer_errors()
    return compared


@pytest.fixture(scope="module")
def compared() -> list[dict[str, Any]]:
    """Per rank: case -> Comparison, and the layers' errors."""
    return run_ranks(2, _trainings_rank, deadline=300)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_equals_alltoall(case: Case, compared: list[dict[str, Any]]) -> None:
    loose = case.name.startswith("bf16")
    for of_rank in compared:
        both: Comparison = of_rank[case.name]
        for (loss, norm), (want_loss, want_norm) in zip(
            both.mok.curve, both.alltoall.curve, strict=True
        ):
            assert loss == pytest.approx(want_loss, rel=5e-3 if loose else 2e-6)
            assert norm == pytest.approx(want_norm, rel=5e-2 if loose else 2e-5)
        worst = max(both.errors, key=lambda name: both.errors[name])
        assert both.errors[worst] <= (5e-2 if loose else 2e-5), worst
        assert any("experts" in name for name in both.errors)
        assert both.mok.frozen_moved == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_expert_counts_and_biases_equal_alltoalls(
    case: Case, compared: list[dict[str, Any]]
) -> None:
    exact = not case.name.startswith("bf16")
    tokens = 8 * tiny.SEQUENCE * tiny.BASE["moe_router_topk"]
    for of_rank in compared:
        mok, alltoall = of_rank[case.name].mok, of_rank[case.name].alltoall
        # A router of the repeated MTP layer sees every token twice, once for each depth.
        assert {int(count.sum()) for count in mok.counts} <= {tokens, 2 * tokens}
        for got, want in zip(mok.counts, alltoall.counts, strict=True):
            assert torch.equal(got, want) if exact else got.sum() == want.sum()
        for got, want in zip(mok.biases, alltoall.biases, strict=True):
            assert got.abs().max() > 0
            assert torch.equal(got, want) or not exact


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.overrides.get("recompute_granularity")],
    ids=lambda case: case.name,
)
def test_recompute_routes_as_the_forward_did(case: Case, compared: list[dict[str, Any]]) -> None:
    for of_rank in compared:
        routings = of_rank[case.name].mok.routings
        assert routings[True]
        assert routings[False] == (routings[True] if case.recomputes_routing else [])


def test_recompute_changes_nothing(compared: list[dict[str, Any]]) -> None:
    # Nothing but the order in which torch's norm adds the parts of its input's gradient.
    for of_rank in compared:
        plain: Record = of_rank["plain"].mok
        for name in ("recompute-norms", "recompute-norms-moe"):
            again: Record = of_rank[name].mok
            for got, want in zip(again.curve, plain.curve, strict=True):
                assert got == pytest.approx(want, rel=2e-6)
            assert all(map(torch.equal, again.counts, plain.counts))


def test_apex_changes_nothing(compared: list[dict[str, Any]]) -> None:
    # Not for the experts' gradients, which are in main_grad without it, and not for the others'.
    for of_rank in compared:
        asked: dict[str, int] = of_rank["by-apex"]
        assert asked.pop("apex") > 0
        assert set(asked.values()) == {0}
        plain, apex = of_rank["plain"].mok.main_grads, of_rank["apex"].mok.main_grads
        assert apex.keys() == plain.keys()
        for name, want in plain.items():
            assert _error(apex[name], want) <= (0 if "experts" in name else 1e-6), name


def test_accumulation_adds_up(compared: list[dict[str, Any]]) -> None:
    # Every loss here is a mean over sequences: how they are cut into micro-batches cannot matter.
    for of_rank in compared:
        one, four = of_rank["one-micro-batch"].mok, of_rank["four-micro-batches"].mok
        assert one.curve[0] == pytest.approx(four.curve[0], rel=1e-5)
        for name in one.main_grads:
            assert _error(four.main_grads[name], one.main_grads[name]) < 1e-4, name


# Single layers.

Tensors = dict[str, torch.Tensor]


def _normal(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(*shape, generator=generator)


def _weighted(seed: int, y: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is full of different numbers."""
    return (y * _normal(seed, *y.shape)).sum()


def _layer(dispatcher: str, base: dict[str, Any], **overrides: Any) -> Any:
    from mok_megatron.layer import MokMoELayer

    layer = tiny.moe_layer(dispatcher, base, **overrides).train()
    assert isinstance(layer, MokMoELayer) == (dispatcher == "mok")
    return layer


def _weight_gradients(*layers: Any) -> Tensors:
    return {
        f"{number}.{name}": parameter.grad
        for number, layer in enumerate(layers)
        for name, parameter in layer.named_parameters()
        if parameter.grad is not None
    }


def _called_twice(dispatcher: str) -> Tensors:
    """Two forwards, an evaluation between them, then both backwards at once."""
    layer = _layer(dispatcher, tiny.DEEPSEEK_V3)
    first, second = (_normal(1, 12, 2, 64).requires_grad_(), _normal(2, 7, 3, 64).requires_grad_())
    y_first = layer(first)[0]
    layer.eval()
    with torch.no_grad():
        evaluated = layer(_normal(3, 5, 1, 64))[0]
    layer.train()
    y_second = layer(second)[0]
    (_weighted(4, y_first) + _weighted(5, y_second)).backward()
    return {
        "evaluated": evaluated,
        "first": first.grad,
        "second": second.grad,
        **_weight_gradients(layer),
    }


def _different_shapes(dispatcher: str) -> Tensors:
    """Three layers of three shapes in a row, the first one again at the end."""
    layers = [
        _layer(dispatcher, tiny.QWEN3),
        _layer(dispatcher, tiny.DEEPSEEK_V3, moe_ffn_hidden_size=48, moe_router_topk=3),
        _layer(dispatcher, tiny.QWEN3, num_moe_experts=4, moe_ffn_hidden_size=16),
    ]
    x = _normal(1, 9, 2, 64).requires_grad_()
    y = x
    for layer in (*layers, layers[0]):
        y = y + layer(y)[0]
    _weighted(2, y).backward()
    return {"y": y.detach(), "dx": x.grad, **_weight_gradients(*layers)}


def _masked(dispatcher: str) -> Tensors:
    """A padding mask through a recomputed layer, with two auxiliary losses."""
    layer = _layer(dispatcher, tiny.QWEN3, **_selective("moe"))
    x = _normal(1, 12, 2, 64).requires_grad_()
    y = layer(x, padding_mask=_normal(2, 2, 12) < -0.5)[0]
    _weighted(3, y).backward()
    return {"y": y.detach(), "dx": x.grad, **_weight_gradients(layer)}


def _norm_discarded(dispatcher: str, *, discard: bool = True) -> Tensors:
    """The layer's input, thrown away after the forward and refilled before its backward."""
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    layer = _layer(dispatcher, tiny.DEEPSEEK_V3)
    norm = torch.nn.RMSNorm(64)
    x = _normal(1, 12, 2, 64).requires_grad_()
    if discard:
        checkpoint = CheckpointWithoutOutput()
        normed = checkpoint.checkpoint(norm, x)
        y = layer(normed)[0]
        checkpoint.discard_output_and_register_recompute(y)
        assert normed.untyped_storage().size() == 0
    else:
        y = layer(norm(x))[0]
    _weighted(2, x + y).backward()
    return {"y": y.detach(), "dx": x.grad, "norm": norm.weight.grad, **_weight_gradients(layer)}


def _recomputed_counts(dispatcher: str, recompute: dict[str, Any]) -> torch.Tensor:
    layer = _layer(dispatcher, tiny.DEEPSEEK_V3, **recompute)
    layer(_normal(1, 12, 2, 64).requires_grad_())[0].sum().backward()
    return layer.router.local_tokens_per_expert


def _padding_does_not_leak() -> float:
    """How far the outputs of real tokens move when the padded ones become huge. (With a NaN their
    probabilities would be, which is an error: they are routed like any other.)"""
    layer = _layer("mok", tiny.QWEN3)
    mask = _normal(2, 2, 12) < -0.3
    assert mask.any()
    x = _normal(1, 12, 2, 64)
    poisoned = x.masked_fill(mask.t().unsqueeze(-1), 1e6)
    real = ~mask.t()
    with torch.no_grad():
        clean, dirty = (layer(v, padding_mask=mask)[0][real] for v in (x, poisoned))
    return _error(dirty, clean)


def _layer_errors() -> dict[str, dict[str, float]]:
    """Case -> tensor -> error of mok against alltoall; of a discarded input against a kept one."""
    errors: dict[str, dict[str, float]] = {}
    for name, run in {
        "called-twice": _called_twice,
        "different-shapes": _different_shapes,
        "masked": _masked,
        "norm-discarded": _norm_discarded,
    }.items():
        alltoall, mok = run("alltoall"), run("mok")
        assert mok.keys() | alltoall.keys() == mok.keys()
        errors[name] = {n: _error(mok[n], alltoall[n]) for n in alltoall}
    kept, discarded = (_norm_discarded("mok", discard=d) for d in (False, True))
    errors["norm-kept"] = {n: _error(discarded[n], kept[n]) for n in kept}
    once = _recomputed_counts("mok", {})
    assert once.sum() == 12 * 2 * tiny.BASE["moe_router_topk"]
    again = _recomputed_counts("mok", _selective("moe"))
    errors["counts"] = {"recomputed": float((again - once).abs().sum())}
    errors["padding"] = {"real tokens": _padding_does_not_leak()}
    return errors


@pytest.mark.parametrize(
    "name", ["called-twice", "different-shapes", "masked", "norm-discarded", "padding"]
)
def test_layer_equals_alltoall(name: str, compared: list[dict[str, Any]]) -> None:
    for of_rank in compared:
        errors = of_rank["layers"][name]
        assert errors
        assert {tensor: e for tensor, e in errors.items() if not e <= 1e-6} == {}


def test_discarded_input_gives_the_same_bytes(compared: list[dict[str, Any]]) -> None:
    for of_rank in compared:
        errors = dict(of_rank["layers"]["norm-kept"])
        # Behind the norm: torch adds the parts of its gradient in another order, as with alltoall.
        assert errors.pop("dx") <= 1e-6
        assert set(errors.values()) == {0.0}


def test_recompute_counts_a_token_once(compared: list[dict[str, Any]]) -> None:
    for of_rank in compared:
        assert of_rank["layers"]["counts"] == {"recomputed": 0.0}
