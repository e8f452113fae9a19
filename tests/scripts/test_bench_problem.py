"""Shapes, loads, the bound and the oracle of scripts/bench.py."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from tests import oracle as dense

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import bench_clock
import bench_oracle
import bench_problem
from bench_problem import BenchError, LayerShape, Problem

SMALL = bench_problem.parse_shape("48,2,6,32,16,24")


def problem(load: str = "random") -> Problem:
    return Problem.of(SMALL, load, 3, "cpu", accumulate=False)


# --- shapes and loads ------------------------------------------------------------------


def test_presets_are_the_shapes_that_the_goals_are_about() -> None:
    rows = {name: dataclasses.astuple(shape) for name, shape in bench_problem.PRESETS.items()}
    assert rows["deepseek-v3/32"] == (4096, 8, 32, 7168, 2048, 2048)
    assert rows["qwen3-235b/16"] == (4096, 8, 16, 4096, 1536, 0)
    assert rows["qwen3-30b/16"] == (8192, 8, 16, 2048, 768, 0)
    assert rows["qwen3-30b/128"] == (8192, 8, 128, 2048, 768, 0)
    assert set(bench_problem.QUICK) <= rows.keys()
    # performance.md's forward of the DeepSeek-V3 slice: 466 TFLOP/s in 6.19 ms.
    assert bench_problem.PRESETS["deepseek-v3/32-routed"].forward_flop == 6 * 32768 * 7168 * 2048


def test_flops_count_the_shared_expert_for_each_token_once() -> None:
    assert SMALL.forward_flop == 6 * 32 * (48 * 2 * 16 + 48 * 24)


def rows_of(load: str, shape: LayerShape) -> tuple[list[int], torch.Tensor]:
    shape = bench_problem.loaded(shape, load)
    expert_TK = bench_problem.choices(shape, load, 0)
    return torch.bincount(expert_TK.flatten(), minlength=shape.experts).tolist(), expert_TK


@pytest.mark.parametrize("load", bench_problem.LOADS)
def test_every_load_is_a_routing_with_the_same_number_of_rows(load: str) -> None:
    shape = bench_problem.parse_shape("512,8,32,64,64,0")
    rows, expert_TK = rows_of(load, shape)
    assert sum(rows) == shape.rows
    assert expert_TK.dtype == torch.int32
    assert (expert_TK[:, 1:] > expert_TK[:, :-1]).all(), "ascending, hence none twice in a token"
    assert int(expert_TK.min()) >= 0
    assert int(expert_TK.max()) < shape.experts


def test_loads_are_what_their_names_say() -> None:
    shape = bench_problem.parse_shape("2048,8,32,64,64,0")
    mean = shape.rows // shape.experts
    assert rows_of("balanced", shape)[0] == [mean] * 32
    random = rows_of("random", shape)[0]
    assert max(random) < 1.3 * mean
    assert min(random) < mean
    zipf = sorted(rows_of("zipf", shape)[0])
    assert zipf[-1] > 2.5 * mean
    assert zipf[0] < 0.5 * mean
    assert max(rows_of("hot", shape)[0]) == shape.rows // 2
    assert sum(rows == 0 for rows in rows_of("empty", shape)[0]) == 8


@pytest.mark.parametrize("top_k", [1, 2])
def test_one_hot_expert_has_half_the_rows_at_any_k(top_k: int) -> None:
    shape = bench_problem.parse_shape(f"100,{top_k},5,64,64,0")
    assert bench_problem.loaded(shape, "hot") == shape
    assert max(rows_of("hot", shape)[0]) == shape.rows // 2


@pytest.mark.parametrize("text", ["", "1,2,3", "8,2,4,64,64,x", "8,-1,4,64,64,0", "8,0,4,64,64,0"])
def test_a_wrong_shape_is_one_line(text: str) -> None:
    with pytest.raises(BenchError, match=r"^mok: [^\n]+, got [^\n]+; [^\n]+$"):
        bench_problem.parse_shape(text)


def test_a_token_cannot_choose_more_experts_than_there_are() -> None:
    with pytest.raises(BenchError, match="5 of 4 experts"):
        bench_problem.parse_shape("8,5,4,64,64,0")


def test_a_problem_is_the_same_for_the_same_seed_and_its_dense_routing_agrees() -> None:
    one, two = problem("zipf"), problem("zipf")
    for field in dataclasses.fields(Problem):
        a, b = getattr(one, field.name), getattr(two, field.name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, field.name
    gathered_TK = one.probs_TE.gather(1, one.expert_TK.long())
    assert torch.equal(gathered_TK, one.prob_TK)
    assert one.routing_map_TE.sum(1).unique().tolist() == [2]
    assert one.routing_map_TE.sum(0).tolist() == list(one.rows_E)


# --- the bound -------------------------------------------------------------------------


def test_passes_do_the_work_of_the_layer() -> None:
    for accumulate in (False, True):
        every = bench_problem.passes(SMALL, problem().rows_E, accumulate=accumulate)
        flop = {"forward": 0, "backward": 0}
        for one in every:
            flop[one.direction] += 2 * one.m * one.n * one.k
        assert flop == {"forward": SMALL.forward_flop, "backward": 2 * SMALL.forward_flop}


def test_bytes_are_those_that_cannot_be_avoided() -> None:
    shape = bench_problem.parse_shape("10,1,3,64,32,0")
    w1, w2, x = 64 * 64, 64 * 32, 10 * 64

    def bytes_of(*, accumulate: bool) -> dict[str, int]:
        return {
            p.name: p.bytes for p in bench_problem.passes(shape, (7, 0, 3), accumulate=accumulate)
        }

    assert bytes_of(accumulate=False) == {
        "up": 2 * (x + 2 * w1 + 10 * 64),
        "down": 2 * (2 * w2 + x),
        "down_gradient": 2 * (x + 2 * w2 + 10 * 64),
        "up_gradient": 2 * (2 * w1 + x),
        "w1_gradient": 2 * 3 * w1,  # zeros of the empty expert are written too
        "w2_gradient": 2 * 3 * w2,
    }
    accumulated = bytes_of(accumulate=True)
    assert accumulated["w1_gradient"] == 8 * 2 * w1  # and not touched here
    assert accumulated["w2_gradient"] == 8 * 2 * w2


def test_a_pass_takes_its_product_or_its_bytes_whichever_is_longer() -> None:
    one = bench_problem.passes(SMALL, problem().rows_E, accumulate=True)[0]
    assert bench_problem.bound_ms(one, 3.0, one.bytes) == 3.0
    assert bench_problem.bound_ms(one, 0.5, one.bytes) == 1.0


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_a_bounds_product_has_the_passes_sizes(layout: str) -> None:
    one = bench_problem.Pass(name="p", direction="forward", layout=layout, m=3, n=5, k=7, bytes=0)
    assert bench_clock._product(one, torch.device("cpu"))().shape == (3, 5)


# --- the oracle ------------------------------------------------------------------------


@pytest.mark.parametrize("load", ["random", "hot", "empty"])
def test_the_oracle_agrees_with_the_dense_one(load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_oracle, "PIECE", 7)  # experts in several pieces
    p = problem(load)
    found = bench_oracle.solve(p)
    w1, w2 = ([*w, s] for w, s in ((p.w1, p.shared_w1), (p.w2, p.shared_w2)))
    true = dense.solve(p.x_TH, p.expert_TK, p.prob_TK, p.dy_TH, w1, w2, SMALL.experts)
    for name in ("y_TH", "dx_TH", "dprob_TK"):
        torch.testing.assert_close(getattr(found, name), getattr(true, name))
    for name in ("dw1", "dw2"):
        for ours, theirs in zip(getattr(found, name), getattr(true, name), strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-6)


def answers() -> tuple[bench_oracle.Answer, bench_oracle.Answer]:
    exact = bench_oracle.solve(problem("empty"))
    copy = dataclasses.replace(
        exact,
        **{n: getattr(exact, n).clone() for n in ("y_TH", "dx_TH", "dprob_TK")},
        **{n: [w.clone() for w in getattr(exact, n)] for n in ("dw1", "dw2")},
    )
    return copy, exact


def test_an_exact_answer_has_no_error() -> None:
    found, exact = answers()
    assert set(bench_oracle.errors(found, exact).values()) == {0.0}


@pytest.mark.parametrize("tensor", ["y_TH", "dx_TH", "dprob_TK", "dw1", "dw2"])
def test_one_wrong_part_shows_and_so_does_a_nan(tensor: str) -> None:
    found, exact = answers()
    part = getattr(found, tensor)[-1]
    part *= 2.0
    name = tensor.partition("_")[0]
    assert bench_oracle.errors(found, exact)[name] > bench_oracle.LIMIT
    part[...] = float("nan")
    assert bench_oracle.errors(found, exact)[name] == float("inf")


def test_what_must_be_zero_must_be_exactly_zero() -> None:
    found, exact = answers()
    (empty,) = [e for e in range(SMALL.experts) if not exact.dw1[e].any()]
    found.dw1[empty][0, 0] = 1e-30
    assert bench_oracle.errors(found, exact)["dw1"] == float("inf")


def test_a_missing_matrix_is_an_error_and_two_steps_add_up() -> None:
    found, exact = answers()
    fewer = dataclasses.replace(found, dw2=found.dw2[:-1])
    assert bench_oracle.errors(fewer, exact)["dw2"] == float("inf")
    twice = dataclasses.replace(
        found, dw1=[2 * w for w in found.dw1], dw2=[2 * w for w in found.dw2]
    )
    assert set(bench_oracle.errors(twice, exact, times=2).values()) == {0.0}
    assert bench_oracle.errors(found, exact, times=2)["dw1"] == 0.5
