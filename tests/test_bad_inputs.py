"""The table of bad inputs: what is set -> what the message must hold. Rows live where their subject
is tested; CAUSES says where. Here they are counted, held to one form, and the missing ones added.

Rows that need a GPU are in tests/backends/test_cuda*.py and tests/csrc, and are not counted.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mok_megatron import backends, records
from mok_megatron.backends import workspace
from mok_megatron.backends.reference import ReferenceBackend
from mok_megatron.contract import MoEShape
from tests import config_rows
from tests.backends import test_rules
from tests.batches import Batch, Case, places
from tests.ranks import run_ranks
from tests.test_reports import check_answer

BATCH = Case(
    seed=7,
    hidden=8,
    ffn=6,
    shared_ffn=0,
    num_experts=4,
    top_k=2,
    tokens=(5, 3),
    load="skewed",
    dtype=torch.float32,
)

SHAPE: dict[str, Any] = {
    "hidden": 8,
    "ffn": 6,
    "num_experts": 4,
    "top_k": 2,
    "ep_size": 2,
    "dtype": torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A shape that cannot be; `words` of the message: value, remedy."""

    fields: dict[str, Any]
    words: tuple[str, ...]


SHAPES = [
    Row(fields={"hidden": 0}, words=("hidden must be at least 1, got 0", "configuration")),
    Row(fields={"ffn": -3}, words=("ffn must be at least 1, got -3", "configuration")),
    Row(fields={"num_experts": 0}, words=("num_experts must be", "got 0")),
    Row(fields={"top_k": 0}, words=("top_k must be at least 1, got 0",)),
    Row(fields={"ep_size": 0}, words=("ep_size must be at least 1, got 0",)),
    Row(fields={"shared_ffn": -1}, words=("shared_ffn", "got -1", "intermediate-size")),
    Row(fields={"top_k": 5}, words=("5 of 4 experts", "--moe-router-topk")),
    Row(fields={"ep_size": 3}, words=("(4)", "(3)", "--expert-model-parallel-size")),
    Row(fields={"dtype": torch.int8}, words=("floating point, got torch.int8", "--bf16")),
]


@pytest.mark.parametrize("row", SHAPES, ids=lambda row: str(row.fields))
def test_a_shape_that_cannot_be(row: Row) -> None:
    MoEShape(**SHAPE)
    with pytest.raises(ValueError, match=r"^mok: .*; ") as error:
        MoEShape(**SHAPE | row.fields)
    for word in row.words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("name", "device", "words"),
    [
        ("fast", "cpu", "one of auto, cuda, reference, got 'fast'"),
        ("cuda", "cpu", "needs CUDA tensors, got cpu; use --mok-backend reference"),
        ("auto", "meta", "needs CUDA tensors, got meta; use --mok-backend reference"),
    ],
)
def test_a_backend_that_cannot_run(name: str, device: str, words: str) -> None:
    shape = MoEShape(**SHAPE | {"ep_size": 1})
    with pytest.raises((ValueError, RuntimeError), match=r"^mok: ") as error:
        backends.choose(name, shape, torch.device(device), None)
    assert words in str(error.value)


CAUSES = """\
T differs across ranks (allowed) | backends/test_reference::test_random_configurations_equal_the_oracle backends/test_cuda_ep::test_ranks_without_tokens
T above the limit | test_limits::test_too_many_tokens_are_named backends/test_cuda_ep::test_more_tokens_than_the_limit_is_a_fault_on_all backends/test_cuda_processes::test_all_ranks_hear_of_a_fault
H or F of another multiple | backends/test_cuda::test_a_shape_outside_the_kernels_is_refused_before_anything_is_loaded
K of 0, above E, above the limit | test_bad_inputs::test_a_shape_that_cannot_be backends/test_cuda::test_a_shape_outside_the_kernels_is_refused_before_anything_is_loaded
E not divisible by EP | test_bad_inputs::test_a_shape_that_cannot_be test_config::test_refused
EP size unsupported | backends/test_cuda::test_a_shape_outside_the_kernels_is_refused_before_anything_is_loaded
EP group over two hosts | test_peers::test_two_hosts_are_refused
expert id out of range | backends/test_rules::test_all_ranks_raise_the_same_words backends/test_cuda_faults::test_a_bad_choice_poisons_its_call_and_is_raised_once backends/test_cuda_ep::test_a_bad_id_spoils_the_call_on_all
an expert twice in a token | backends/test_rules::test_all_ranks_raise_the_same_words backends/test_cuda_faults::test_a_bad_choice_poisons_its_call_and_is_raised_once
probabilities of another dtype | backends/test_rules::test_all_ranks_raise_the_same_words
probabilities not finite | backends/test_rules::test_all_ranks_raise_the_same_words backends/test_cuda_faults::test_a_probability_that_is_not_finite_is_raised
x of another dtype or shape | backends/test_rules::test_all_ranks_raise_the_same_words backends/test_cuda_faults::test_arguments_of_another_form_raise_before_any_launch
x not contiguous (allowed) | test_function::test_x_may_have_any_strides backends/test_cuda_autograd::test_x_and_dy_may_have_any_strides
x on the CPU, or on another device | backends/test_cuda::test_cpu_tensors_get_the_reference_or_an_error backends/test_rules::test_all_ranks_raise_the_same_words
no gradient wanted (allowed) | test_function::test_evaluation_keeps_nothing_and_gives_the_same_bytes
FP8 or FP4 | test_config::test_refused
fp16 model | backends/test_cuda::test_a_shape_outside_the_kernels_is_refused_before_anything_is_loaded
another activation, clamp, bias, interleaving | test_config::test_refused
shared expert with a gate (allowed) | test_layer::test_fp32_has_alltoalls_bytes
shared expert under TP (allowed) | test_parallelism::test_training_equals_alltoall
shared weights of another width or missing | backends/test_rules::test_all_ranks_raise_the_same_words
latent size | test_config::test_refused
ETP above 1 | test_config::test_refused
capacity with padding | test_config::test_refused
more routes than K | test_function::test_a_token_with_too_many_routes_is_refused_not_cut
padding mask of another shape | -: the mask goes to Megatron's router as it is, before anything of ours runs
recompute with another routing | test_gradients::test_recompute_routes_as_the_forward_did
an input changed between forward and backward | test_function::test_an_input_changed_in_place_is_noticed
capture as the first call | test_bad_inputs::test_a_capture_as_the_first_call
graphs over an MoE layer | test_config::test_refused test_config::test_two_selectors_are_refused
overlap flags | test_config::test_refused
adapters around experts | test_parameters::test_modules_that_do_more_than_own_weights_are_refused
main_grad missing (allowed) | test_parameters::test_without_main_grad_gradients_are_ordinary
main_grad of another dtype or shape | test_parameters::test_a_wrong_main_grad_is_refused backends/test_rules::test_all_ranks_raise_the_same_words
main_grad not finite | test_bad_inputs::test_a_main_grad_that_is_not_finite_stays_so
experts frozen (allowed) | test_layer::test_frozen_weights_are_skipped backends/test_cuda::test_frozen_and_mixed_places_get_the_same_bytes_as_all_of_them
layers of several shapes in a group | backends/test_workspace::test_one_workspace_for_a_group_and_shape
a group of another size | backends/test_rules::test_a_group_of_another_size_is_refused backends/test_cuda::test_a_group_of_another_size_is_refused
a process group that was destroyed (allowed) | test_bad_inputs::test_a_group_that_was_destroyed
other settings on a second activation | test_plugin::test_settings_of_activate test_plugin::test_wrong_settings_are_loud
other flags on one rank | test_peers::test_ranks_that_differ_are_named
a rank that makes another call | backends/test_calls::test_a_rank_that_skips_a_call_is_found_at_once backends/test_cuda_ep::test_a_rank_that_makes_another_call_is_a_fault_on_all
a rank that makes no call | backends/test_calls::test_a_rank_that_is_elsewhere_is_named
a rank that is dead or stopped | backends/test_calls::test_a_killed_rank_is_named backends/test_calls::test_a_stopped_rank_is_named backends/test_cuda_processes::test_a_stopped_rank_is_written_down_by_those_who_wait
weights on another device than at first | backends/test_tables::test_another_object_or_place_is_noticed backends/test_rules::test_all_ranks_raise_the_same_words
unsupported GPU, MIG, driver | backends/test_cuda::test_another_gpu_is_refused doctor/test_software::test_a_broken_machine_gets_cause_and_remedy
toolkit too old | csrc/test_build_backend::test_a_toolkit_that_cannot_build_ends_in_one_line
library missing, or for another GPU | backends/test_cuda::test_a_missing_library_is_an_error_not_a_slower_path doctor/test_software::test_a_broken_machine_gets_cause_and_remedy
peer access off | test_peers::test_a_pair_that_cannot_is_named
two ranks on a GPU | test_peers::test_one_gpu_for_two_ranks_is_for_tests_only
multicast missing (allowed) | backends/test_workspace::test_two_groups_share_what_is_theirs
not enough memory | backends/test_cuda::test_an_op_without_room_says_what_is_there test_peers::test_ranks_of_one_gpu_need_its_memory_together backends/test_cuda_faults::test_too_little_memory_is_an_error_and_passes
allocator without handles | doctor/test_surroundings::test_a_broken_machine_gets_cause_and_remedy
Megatron of an unknown version | test_plugin::test_moved_target_is_loud_when_asked_on_the_command_line test_plugin::test_known_versions
checkpoint of another expert module (allowed) | test_checkpoints::test_every_reader_computes_what_its_writer_did
"""  # noqa: E501


@pytest.mark.parametrize("line", CAUSES.splitlines(), ids=lambda line: line.partition(" |")[0])
def test_a_cause_has_a_test_or_a_reason(line: str) -> None:
    cause, answer = line.split(" | ")
    assert cause
    check_answer(answer)


def test_the_causes_are_forty_and_more() -> None:
    causes = [line.partition(" |")[0] for line in CAUSES.splitlines()]
    assert len(set(causes)) == len(causes) >= 40


def test_a_capture_as_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before any rank waits: no memory is made inside a CUDA graph."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(workspace.peers, "gather", lambda *_: pytest.fail("a rank waited"))
    group = type("Group", (), {"group_name": "captured"})()
    with pytest.raises(RuntimeError, match=r"^mok: .*run once before .*, got a capture .*; make"):
        workspace.of(group, MoEShape(**SHAPE), torch.device("cuda"), 4)


def test_a_main_grad_that_is_not_finite_stays_so() -> None:
    """What was there is added to, never covered up: Megatron's check of gradients sees it."""
    batch = Batch.of(BATCH)
    shape, weights = BATCH.shape(1), batch.weights(0, 1)
    backend = ReferenceBackend(shape, None)
    into = places(weights, shape, 0.0, torch.float32)
    into.w1[0][0, 0] = float("inf")
    _, context = backend.forward(batch.x_TH, batch.expert_TK, batch.prob_TK, weights)
    backend.backward(context, batch.dy_TH, weights, into)
    assert into.w1[0][0, 0] == float("inf")
    wild = sum(int((~place.isfinite()).sum()) for place in (*into.w1, *into.w2))
    assert wild == 1


def _destroyed(rank: int, world: int, folder: str) -> list[str]:
    """A sum of y, or what is said: while the group is there, when torch has forgotten it on all
    ranks, and by a layer of a new group."""
    os.environ[records.VARIABLE] = folder
    batch, shape = Batch.of(BATCH), BATCH.shape(world)
    mine, weights = batch.tokens(rank, world), batch.weights(rank, world)
    arguments = batch.x_TH[mine], batch.expert_TK[mine], batch.prob_TK[mine], weights
    old = ReferenceBackend(shape, dist.new_group([0, 1], timeout=timedelta(seconds=20)))
    said = []
    for end in (False, True):
        if end:
            dist.destroy_process_group()
        try:
            y_TH, _ = old.forward(*arguments)
            said.append(f"{y_TH.double().sum():.3f}")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    y_TH, _ = ReferenceBackend(shape, dist.new_group([0, 1])).forward(*arguments)
    return [*said, f"{y_TH.double().sum():.3f}"]


def test_a_group_that_was_destroyed(tmp_path: Path) -> None:
    """No rank hangs: a layer holds its group, and one of a new group works beside it."""
    for before, after, again in run_ranks(2, _destroyed, str(tmp_path), deadline=60):
        assert before == after == again
        assert float(before)


def test_the_table_has_eighty_rows_and_each_says_something() -> None:
    flags = {f"{row.rule}: {row.words}" for row in config_rows.REFUSED}
    calls = test_rules.FORWARD_FAULTS | test_rules.BACKWARD_FAULTS
    assert len(flags) + len(calls) + len(SHAPES) >= 80
    assert all(len(re.sub(r"\W", "", words)) >= 8 for _, words in calls.values())
