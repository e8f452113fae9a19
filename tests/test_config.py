"""Every Megatron flag that touches MoE works with mok, or is refused with rule, value, remedy."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn import functional

import mok_megatron
from mok_megatron.config import (
    ARGUMENT_RULES,
    RULES,
    MokConfig,
    already_done,
    check,
    check_arguments,
)
from tests.config_rows import (
    PLAIN,
    REFUSED,
    REFUSED_ARGUMENTS,
    SELECTIVE,
    SHARED,
    WORKS,
    Refused,
    Works,
)

mok_megatron.activate()


def build(cls: type = TransformerConfig, **overrides: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cls(**PLAIN | overrides)


@pytest.mark.parametrize("row", WORKS, ids=lambda row: row.id)
def test_works(row: Works) -> None:
    config = build(**row.fields)
    check(config)
    assert config.moe_token_dispatcher_type == "mok"


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.words.replace(" ", "-"))
def test_refused(row: Refused) -> None:
    (rule,) = [rule for rule in RULES if rule.name == row.rule]
    assert rule.found(build()) is None
    with pytest.raises(ValueError, match=r"^mok: ") as error:
        build(**row.fields)
    (line,) = [line for line in str(error.value).splitlines() if f"mok: {rule.must}, " in line]
    must, got, remedy = map(re.escape, row.words.split(" | "))
    assert re.fullmatch(rf"mok: .*{must}.*, got .*{got}.*; .*{remedy}.*", line)


def test_what_the_fused_call_does_anyway_is_named() -> None:
    config = build(
        **SHARED | SELECTIVE,
        recompute_modules=["moe_act"],
        moe_grouped_gemm=True,
        moe_shared_expert_overlap=True,
    )
    assert not config.moe_shared_expert_overlap
    overlap, activation = "--moe-shared-expert-overlap", "--recompute-modules moe_act"
    assert config.mok_already_done == ("--moe-grouped-gemm", overlap, activation)
    assert build().mok_already_done == ()
    assert already_done(SimpleNamespace(moe_permute_fusion=True)) == ("--moe-permute-fusion",)


def test_every_rule_has_a_row() -> None:
    simulated = {"moe_megakernel_backend"}  # a field of newer versions, tested below
    assert {row.rule for row in REFUSED} | simulated == {rule.name for rule in RULES}
    assert len(WORKS) + len(REFUSED) >= 40


def test_rules_have_different_names() -> None:
    names = [rule.name for rule in RULES + ARGUMENT_RULES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("dispatcher", ["alltoall", "flex"])
def test_other_dispatchers_are_not_our_business(dispatcher: str) -> None:
    config = build(moe_token_dispatcher_type=dispatcher, add_bias_linear=True, moe_latent_size=16)
    assert config.moe_latent_size == 16


def test_all_broken_rules_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="mok") as error:
        build(add_bias_linear=True, moe_latent_size=16)
    assert len(str(error.value).splitlines()) == 2


def test_subclasses_are_checked() -> None:
    assert build(MLATransformerConfig).moe_token_dispatcher_type == "mok"
    with pytest.raises(ValueError, match=r"mok: .*biases"):
        build(MLATransformerConfig, add_bias_linear=True)


def test_megatrons_own_rules_still_hold() -> None:
    with pytest.raises(ValueError, match="pre-softmax when topk is 1"):
        build(moe_router_topk=1)
    with pytest.raises(ValueError, match="flex token dispatcher"):
        build(moe_enable_deepep=True)


def test_a_field_that_this_version_lacks_breaks_no_rule() -> None:
    bare = SimpleNamespace(
        moe_token_dispatcher_type="mok",
        num_moe_experts=8,
        activation_func=functional.silu,
        gated_linear_unit=True,
    )
    check(bare)


def test_two_selectors_are_refused() -> None:
    config = SimpleNamespace(**vars(build()), moe_megakernel_backend=None)
    check(config)
    config.moe_megakernel_backend = "mok"
    with pytest.raises(ValueError, match=r"one selector .*moe_megakernel_backend=mok; drop one"):
        check(config)


@pytest.mark.parametrize(("flag", "remedy"), REFUSED_ARGUMENTS)
def test_refused_arguments(flag: str, remedy: str) -> None:
    arguments = SimpleNamespace(moe_token_dispatcher_type="mok", num_experts=8)
    check_arguments(arguments)
    setattr(arguments, flag, True)
    with pytest.raises(ValueError, match=rf"^mok: .*, got {flag}=True; .*{remedy}"):
        check_arguments(arguments)
    arguments.num_experts = None
    check_arguments(arguments)
    assert {flag} <= {rule.name for rule in ARGUMENT_RULES}


def test_settings_are_checked() -> None:
    assert MokConfig().backend == "auto"
    with pytest.raises(ValueError, match=r"mok: --mok-backend must be one of .*, got 'fast'"):
        MokConfig(backend="fast")
    assert (MokConfig().max_tokens, MokConfig().row_budget) == (None, 1.25)
    with pytest.raises(ValueError, match=r"mok: --mok-max-tokens must be at least 1, got 0; give"):
        MokConfig(max_tokens=0)
    for budget in (0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"mok: --mok-row-budget must .*, got {budget}; "):
            MokConfig(row_budget=budget)
    assert MokConfig().deadline == 60
    for deadline in (0, -1, 86401):
        with pytest.raises(ValueError, match=rf"mok: --mok-deadline must .*, got {deadline}; give"):
            MokConfig(deadline=deadline)
    assert (MokConfig().movers, MokConfig().ahead) == (0, 0)
    for name in ("movers", "ahead"):
        with pytest.raises(ValueError, match=rf"mok: --mok-{name} must be 0 to 65535, got -1; 0"):
            MokConfig(**{name: -1})


# Fields about MoE that only the router reads, or only another dispatcher: those by their beginning.
INDIFFERENT = {
    "moe_enable_deepep",
    "moe_grad_scale_func",
    "moe_per_layer_logging",
    "moe_permute_fusion",  # Megatron wants Transformer Engine for it
    "moe_permute_fusion_into_hybridep",
    "moe_router_bias_update_rate",
    "moe_router_force_biased",
    "moe_router_quantile_balancing_ema",
    "moe_router_topk_limited_devices",
    "moe_single_grouped_weight",  # so for this
}
OF_OTHERS = ("moe_deepep_", "moe_flex_", "moe_hybridep_", "moe_ncclep_", "moe_paged_stash_")


def test_every_moe_field_of_megatron_has_a_verdict() -> None:
    fields = {name for name in TransformerConfig.__dataclass_fields__ if name.startswith("moe_")}
    ruled = {rule.name for rule in RULES}
    tried = {name for row in (*WORKS, *REFUSED) for name in row.fields} | set(PLAIN)
    open_fields = fields - ruled - tried - INDIFFERENT
    assert sorted(name for name in open_fields if not name.startswith(OF_OTHERS)) == []
    assert sorted(INDIFFERENT - fields) == []
