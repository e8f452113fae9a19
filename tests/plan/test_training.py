"""An iteration of a whole run: by hand, against the steps that were measured, and its limits."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest

from mok_megatron.plan.estimate import DIRECTIONS, direction, layer_of, step
from mok_megatron.plan.machines import LINK_SHARE, MACHINES, NETWORK_SHARE, REST_TIMES
from mok_megatron.plan.model import Model, read
from mok_megatron.plan.training import Iteration, Unformed, iteration

ROOT = Path(__file__).resolve().parents[2]
H200, GB200 = MACHINES["h200"], MACHINES["gb200"]
PARTS = ("compute", "bubble", "exposed", "optimizer")


def model(name: str, **overrides: object) -> Model:
    given = {key.replace("_", "-"): value for key, value in overrides.items()}
    return read(ROOT / "configs" / f"{name}.yaml", given)


def test_without_a_pipeline_by_hand() -> None:
    qwen = model("qwen3_30b_a3b")
    found = iteration(qwen, H200, 64)
    assert (found.pipeline, found.expert_parallel, found.data_parallel) == (1, 8, 64)
    assert found.micro_batches == 1024 // 64
    assert found.bubble == 0
    assert found.compute == pytest.approx(16 * step(qwen, H200, 8).best)
    (count,) = qwen.ranks_of_pipeline()
    experts = count.experts / 8
    # Dense values go round 8 hosts, 8 cards for each; experts' go from host to host, one card each.
    dense_s = count.dense * 63 / 64 / (8 * 50e9 * NETWORK_SHARE.value)
    link_s = count.dense * 63 / 64 / (450e9 * LINK_SHARE.value)
    experts_s = experts * 7 / 8 / (50e9 * NETWORK_SHARE.value)
    seconds = max(dense_s, link_s) + experts_s
    assert found.reduce == pytest.approx(1e3 * 4 * seconds, rel=1e-6)
    assert found.gather == pytest.approx(1e3 * 2 * seconds, rel=1e-6)
    # fp32 gradient read twice, weight and two moments in and out, bf16 weight out; then zeros.
    moved = 34 * (count.dense / 64 + experts / 8) + 4 * (count.dense + experts)
    assert found.optimizer == pytest.approx(1e3 * moved / 4.3e12, rel=1e-6)


def test_overlap_hides_as_much_as_one_pass_lasts() -> None:
    bare = {"overlap_grad_reduce": "false", "overlap_param_gather": "false"}
    shown = iteration(model("qwen3_30b_a3b", **bare), H200, 64)
    assert shown.exposed == pytest.approx(shown.reduce + shown.gather)
    qwen = model("qwen3_30b_a3b")
    layer = layer_of(qwen, 8)
    forward, backward = (48 * direction(layer, H200, name).best for name in DIRECTIONS)
    rest = step(qwen, H200, 8).rest
    hidden = iteration(qwen, H200, 64)
    assert hidden.reduce > backward + 2 * rest / 3
    assert hidden.exposed == pytest.approx(
        hidden.reduce - backward - 2 * rest / 3 + hidden.gather - forward - rest / 3
    )
    assert iteration(qwen, H200, 8).exposed == 0, "inside a host they are short"
    assert iteration(qwen, GB200, 64).exposed == 0, "and where all ranks have own experts"


@pytest.mark.parametrize("ranks", [64, 512])
def test_all_ranks_together_take_the_batch(ranks: int) -> None:
    deepseek = model("deepseek_v3")
    found = iteration(deepseek, H200, ranks)
    assert found.pipeline == 16
    tokens = found.tokens_per_s * ranks * found.best / 1e3
    assert tokens == pytest.approx(deepseek.batch * 4096)


def test_the_pipelines_bubble() -> None:
    deepseek = model("deepseek_v3")
    found = iteration(deepseek, H200, 512)
    assert (found.pipeline, found.expert_parallel, found.data_parallel) == (16, 8, 32)
    assert found.micro_batches == 15360 // 32
    # Two chunks a rank: 15 / 2 micro-batches of the fullest rank, of four of the 59 MoE layers.
    assert found.bubble == pytest.approx(found.compute * 15 / 2 / 480)
    even = step(deepseek, H200, 8).best / 16
    assert even < found.compute / 480 < 1.3 * even
    with pytest.raises(Unformed, match="60 micro-batches are no multiple of 16, with 2 stages"):
        iteration(deepseek, H200, 4096)
    many = iteration(model("deepseek_v3", **{"global-batch-size": 16384}), H200, 4096)
    assert many.micro_batches == 64
    assert many.bubble == pytest.approx(found.bubble)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_30b_a3b", "qwen3_235b_a22b"])
def test_more_gpus_are_faster_and_each_is_slower(name: str) -> None:
    for machine in MACHINES.values():
        runs: list[Iteration] = []
        for ranks in (128, 256, 512, 1024):
            runs.append(iteration(model(name), machine, ranks))
        for run in runs:
            assert run.best == pytest.approx(sum(getattr(run, part) for part in PARTS))
            assert run.best < run.worst
            assert all(getattr(run, part) >= 0 for part in PARTS)
        for fewer, more in itertools.pairwise(runs):
            assert more.best < fewer.best
            assert more.optimizer < fewer.optimizer
            assert more.exposed + more.bubble >= 0.98 * (fewer.exposed + fewer.bubble)


def test_the_measured_steps_lie_between_best_and_worst() -> None:
    """Of one GPU; and REST_TIMES is the slower one's."""
    slowest = []
    lines = (ROOT / "scripts/results/throughput.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        assert line["device"].startswith("NVIDIA H200")
        batch = re.search(r"--global-batch-size (\d+)", line["command"])
        slice_ = model(line["name"], **({"global_batch_size": batch[1]} if batch else {}))
        found, measured = iteration(slice_, H200, 1), line["dispatchers"]["mok"]
        assert found.best < measured["step_ms"] < found.worst, line["name"]
        rest = found.micro_batches * step(slice_, H200, 1).rest
        slowest.append((measured["step_ms"] - (found.best - rest)) / rest)
    assert sorted(round(each, 1) for each in slowest) == [2.1, 3.3]
    assert max(slowest) == pytest.approx(REST_TIMES.value, rel=0.02)


@pytest.mark.parametrize(
    ("name", "ranks", "changes", "why"),
    [
        ("deepseek_v3", 8, {}, "8 ranks cannot form pipelines of 16"),
        ("qwen3_30b_a3b", 4, {"context_parallel_size": 8}, "4 ranks cannot form context parallel"),
        ("qwen3_30b_a3b", 4096, {}, "a batch of 1024 is no multiple of 4096 replicas x 1"),
        ("qwen3_30b_a3b", 3, {}, "a batch of 1024 is no multiple of 3 replicas x 1"),
    ],
)
def test_so_many_ranks_cannot_run_it(
    name: str, ranks: int, changes: dict[str, object], why: str
) -> None:
    with pytest.raises(Unformed, match=why):
        iteration(model(name, **changes), H200, ranks)


def test_without_a_batch_it_is_one_micro_batch_a_rank() -> None:
    alone = dataclasses.replace(model("qwen3_30b_a3b"), batch=0)
    assert iteration(alone, H200, 4096).micro_batches == 1
