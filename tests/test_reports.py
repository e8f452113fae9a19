"""Public reports of what MoE training suffers from, each with its tests or why it cannot happen.

A line: report | what went wrong | tests, or "-: reason". Tests are FILE::NAME below tests/, without
.py; the names are checked here. (gpu) and (multigpu) tests are among them.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re

import pytest

TESTS = pathlib.Path(__file__).parent

REPORTS = """\
Megatron-LM 4851 | a rank without tokens skips collectives | backends/test_reference::test_random_configurations_equal_the_oracle test_soak::test_a_thousand_calls backends/test_cuda_ep::test_ranks_without_tokens
Megatron-LM 3626 | zero rows leave the graph | test_function::test_choices_of_no_token_and_of_all_experts test_function::test_ranks_with_and_without_tokens_recompute_together
TransformerEngine 3019 | all local experts empty deadlocks | backends/test_cuda_ep::test_no_tokens_anywhere backends/test_cuda::test_the_host_waits_for_nothing_not_even_in_the_first_call
MSLK 158 | NaN weight gradients of empty experts | backends/test_cuda_random::test_an_expert_without_rows_must_not_be_touched test_function::test_fresh_gradients_overwrite_and_zero_the_idle
TransformerEngine 2499 | stale gradients of empty experts | test_parameters::test_an_expert_without_rows_leaves_main_grad_alone test_parameters::test_zero_out_wgrad_gives_zeros
pytorch 193633 | NaN from tail rows in later backwards | backends/test_reference::test_nan_without_a_row_changes_nothing backends/test_cuda_autograd::test_every_backward_adds_to_main_grads
torchtitan 1166 | grouped product hangs at an empty expert | backends/test_cuda_random::test_tile_edges_are_all_met backends/test_cuda_random::test_every_load_with_and_without_a_shared_expert
pytorch 174314 | NaN from partial tiles | backends/test_cuda_random::test_two_thousand_random_cases csrc/test_products::test_sanitizer
DeepEP 447 | a starved rank loses its own tokens | backends/test_cuda_ep::test_all_tokens_to_one_rank backends/test_reference::test_random_configurations_equal_the_oracle
TransformerEngine 2908 | 32-bit offsets | backends/test_cuda::test_every_tensor_beyond_two_to_the_31_elements backends/test_cuda_ep::test_rows_that_travel_beyond_two_to_the_31_elements csrc/test_products::test_offsets_past_two_to_the_31
torchtitan 2430 | 32-bit offsets under compile | -: nothing here is compiled: autograd's node calls registered ops
flashinfer 2642 | 32-bit offsets in g and u | csrc/test_products::test_offsets_past_two_to_the_31
TransformerEngine 2966 | MXFP8 splits of other than 32 | test_config::test_refused
torchtitan 2262 | FP8 padding left out | test_config::test_refused
ao 2678 | FP8 alignment asserts on the device | test_config::test_refused
Megatron-LM 1421 | probabilities travel in bf16 | backends/test_reference::test_bytes_do_not_depend_on_the_number_of_ranks backends/test_reference::test_rounding_points_are_those_of_the_specification backends/test_cuda_ep::test_any_number_of_ranks_gives_the_bytes_of_one
Megatron-LM 1482 | expert bias in bf16 | test_gradients::test_expert_counts_and_biases_equal_alltoalls
NeMo RL 2258 | forward does not repeat | backends/test_cuda::test_a_hundred_repeats_give_the_same_bytes backends/test_cuda_ep::test_a_hundred_repeats_are_the_same_bytes test_training::test_training_repeats_to_the_bit
Megatron-LM 6254 | deterministic mode with a fused aux loss | test_config::test_refused
Automodel 2635 | recompute routes otherwise | test_gradients::test_recompute_routes_as_the_forward_did
Liger-Kernel 1255 | recomputed metadata differ in size | -: the context's sizes do not depend on the routing (csrc/layer_arguments.h), and test_gradients::test_recompute_changes_nothing
Megatron-LM 1478 | recompute counts a token twice | test_gradients::test_recompute_counts_a_token_once
Megatron-LM 5916 | parameter flags missing | test_layer::test_state_is_megatrons test_parallelism::test_training_equals_alltoall
Megatron-LM 1628 | ETP and EP layouts differ | test_config::test_refused
Megatron-LM 7452 | aux-loss counts doubled under TP | test_parallelism::test_training_equals_alltoall test_gradients::test_layer_equals_alltoall
pytorch 160285 | expert gradients twice as large | test_training::test_training_equals_alltoall_ep2 test_parallelism::test_training_equals_alltoall
Megatron-LM 7101 | gradients overwritten in a second path | test_gradients::test_accumulation_adds_up test_function::test_accumulating_stores_add_every_backward
Pai-Megatron-Patch 425 | shared expert wrong under TP | test_parallelism::test_training_equals_alltoall
Megatron-LM 6114 | mask of another shape than the map | test_gradients::test_layer_equals_alltoall
Megatron-LM 2121 | padding changes real tokens | test_gradients::test_layer_equals_alltoall
Megatron-LM 6108 | packs taken for one sequence | -: the router is Megatron's; no flag of it is changed (test_config::test_works)
Megatron-LM 4816 | packed data fail | test_data_shapes::test_every_shape_has_alltoalls_bytes
Megatron-LM 924 | keys of experts differ | test_checkpoints::test_keys_are_megatrons
Megatron-LM 909 | loss jumps after another expert module | test_checkpoints::test_every_reader_computes_what_its_writer_did test_checkpoints::test_a_run_can_change_dispatchers
Megatron-LM 1517 | optimizer state of another layout | test_checkpoints::test_every_reader_has_every_writers_bytes
Model-Optimizer 742 | wrong groups in sharded state | test_checkpoints::test_every_reader_has_every_writers_bytes test_parallelism::test_training_equals_alltoall
AReaL 1468 | moments dropped at load | test_checkpoints::test_resumed_is_unbroken_to_the_bit scripts/test_resume::test_a_killed_training_continues_with_the_same_bits
Automodel 2595 | keys of MTP experts | test_checkpoints::test_keys_are_megatrons
megablocks 160 | ranks save the same experts | test_checkpoints::test_every_reader_has_every_writers_bytes
Automodel 3109 | overlapped shared expert corrupts | backends/test_cuda_crowded::test_two_streams_share_a_backend backends/test_cuda_random::test_every_load_with_and_without_a_shared_expert
Megatron-LM 7389 | weight gradients wait for the shared expert | -: one kernel a direction orders them; the flag is refused (test_config::test_refused)
Megatron-Bridge 1800 | adapters on shared experts | test_parameters::test_modules_that_do_more_than_own_weights_are_refused
Megatron-LM 2296 | latent experts | test_config::test_refused
Megatron-LM 1862 | overlap flag crashes | test_config::test_refused test_config::test_every_moe_field_of_megatron_has_a_verdict
Megatron-LM 5749 | deadlock beside other kernels | backends/test_cuda_crowded::test_a_layer_ends_while_another_kernel_holds_all_but_a_few_sms csrc/test_protocol::test_every_order_of_a_small_problem
Megatron-LM 2238 | time limit not passed on | backends/test_calls::test_a_stopped_rank_is_named
DeepEP 570 | the culprit is not named | backends/test_calls::test_a_stopped_rank_is_named backends/test_calls::test_a_killed_rank_is_named backends/test_cuda_processes::test_a_stopped_rank_is_written_down_by_those_who_wait doctor/test_merge::test_who_was_first
Megatron-Bridge 1335 | the host waits for counts | backends/test_cuda::test_the_host_waits_for_nothing_not_even_in_the_first_call
TensorRT-LLM 17376 | slow but healthy is killed | backends/test_calls::test_a_slow_rank_is_waited_for_in_every_call_anew backends/test_calls::test_a_rank_that_is_elsewhere_is_named
nccl 2303 | later noise hides the first error | backends/test_faults::test_the_first_fault_stays_until_a_call_ends_well
Megatron-Bridge 3517 | hang after capture | test_config::test_two_selectors_are_refused test_config::test_refused
Tutel 182 | ranks make other numbers of calls | backends/test_calls::test_a_rank_that_skips_a_call_is_found_at_once backends/test_calls::test_a_rank_that_is_elsewhere_is_named backends/test_cuda_ep::test_a_rank_that_makes_another_call_is_a_fault_on_all
pytorch 193834 | waits without a limit | csrc/test_waits::test_every_loop_that_waits_has_a_deadline csrc/test_waits::test_a_planted_loop_without_a_deadline_is_found backends/test_cuda_processes::test_a_stopped_rank_is_written_down_by_those_who_wait
pytorch 165685 | pidfd_getfd not permitted | doctor/test_surroundings::test_a_broken_machine_gets_cause_and_remedy
flashinfer 4089 | the same in siblings | doctor/test_surroundings::test_a_broken_machine_gets_cause_and_remedy
pytorch 171495 | group over two hosts | test_peers::test_two_hosts_are_refused doctor/test_sharing::test_a_broken_machine_gets_cause_and_remedy
pytorch 167537 | system not yet initialized | doctor/test_software::test_a_broken_machine_gets_cause_and_remedy
nccl 1647 | handle of another container | doctor/test_sharing::test_a_broken_machine_gets_cause_and_remedy doctor/test_machine::test_limits_are_read_from_the_files_of_a_container
nvshmem 40 | acts on a failed query | test_peers::test_a_query_that_the_driver_refuses_is_an_error_not_an_answer doctor/test_probes::test_the_driver_refuses_hides_or_is_not_there
vllm 50179 | multicast missing | backends/test_workspace::test_two_groups_share_what_is_theirs
nccl 360 | handles of many containers | doctor/test_sharing::test_a_broken_machine_gets_cause_and_remedy doctor/test_machine::test_limits_are_read_from_the_files_of_a_container
pytorch 84803 | peer copies return zeros | doctor/test_probes::test_a_pattern_that_changes_names_its_pair
sglang 29942 | out of memory as invalid argument | backends/test_cuda::test_an_op_without_room_says_what_is_there test_peers::test_ranks_of_one_gpu_need_its_memory_together
Megatron-LM 5288 | a budget drops tokens silently | backends/test_cuda_ep::test_rows_beyond_the_budget_take_the_buffers_in_turn backends/test_cuda_faults::test_no_optimizer_changes_a_parameter_after_a_fault
vllm-ascend 15014 | tokens above a limit are cut | backends/test_cuda_ep::test_more_tokens_than_the_limit_is_a_fault_on_all test_function::test_a_token_with_too_many_routes_is_refused_not_cut
Megatron-Bridge 947 | imbalance unseen, memory creeps | test_observe::test_a_training_shows_its_layers test_soak::test_a_thousand_calls
Megatron-LM 3999 | limit from global tokens | test_limits::test_the_flag_is_stronger_than_the_arguments_and_they_than_the_first_call
DeepEP 165 | raw assertion at too many tokens | test_limits::test_too_many_tokens_are_named
Megatron-LM 1598 | capture fails on a copy to the host | backends/test_cuda::test_a_hundred_replays_of_a_captured_call_equal_eager_calls
torchtitan 3830 | ops cannot be traced | csrc/test_library::test_traces_without_a_device csrc/test_library::test_schema_names_what_is_written
sglang 18908 | ranks tune to other tiles | -: nothing is tuned at run time (csrc/sm90/tiling.cuh is a table), and all kernels load before the first call
Megatron-LM 6572 | graph scopes not validated | test_config::test_refused
DeepEP 87 | built for another GPU | doctor/test_software::test_a_broken_machine_gets_cause_and_remedy backends/test_cuda::test_another_gpu_is_refused
DeepEP 167 | TORCH_CUDA_ARCH_LIST of an image | csrc/test_build_backend::test_flags
DeepEP 481 | builds, does not import | csrc/test_build_backend::test_pure_wheel backends/test_cuda::test_a_missing_library_is_an_error_not_a_slower_path
DeepGEMM 157 | nvcc too old or too new | csrc/test_build_backend::test_a_toolkit_that_cannot_build_ends_in_one_line
DeepGEMM 301 | processes race for a cache | -: nothing is compiled at run time
Megatron-LM 6572 dtypes | unsupported dtypes fail late | test_config::test_refused backends/test_cuda::test_a_shape_outside_the_kernels_is_refused_before_anything_is_loaded
Automodel 3422 | what an integration needs | test_boundaries::test_importing_the_package_brings_nothing_heavy test_parameters::test_modules_that_do_more_than_own_weights_are_refused
mixture-of-kittens limits | T, EP and H of few values | backends/test_cuda_ep::test_any_number_of_ranks_gives_the_bytes_of_one backends/test_cuda_random::test_two_thousand_random_cases
mixture-of-kittens overflow | bare trap at capacity | test_limits::test_rows_hold_the_budget_with_padding_and_no_more_than_any_routing backends/test_cuda_ep::test_rows_beyond_the_budget_take_the_buffers_in_turn
mixture-of-kittens ids | unchecked ids | backends/test_cuda_faults::test_a_bad_choice_poisons_its_call_and_is_raised_once backends/test_rules::test_all_ranks_raise_the_same_words
mixture-of-kittens sm90 | registers spill | csrc/test_sass::test_no_kernel_has_local_memory csrc/test_sass::test_registers_are_given_and_taken
flashinfer 3196 | no fused MoE with backward on Hopper | csrc/test_products::test_gpt_oss_extents backends/test_cuda_random::test_two_thousand_random_cases
Megatron-Bridge 5992 | dispatcher replaced silently | backends/test_cuda::test_cpu_tensors_get_the_reference_or_an_error backends/test_cuda::test_a_missing_library_is_an_error_not_a_slower_path
Megatron-LM 7488 | named loads from a seed | backends/test_cuda_random::test_a_load_is_what_it_is_called backends/test_cuda_ep::test_loads
Liger-Kernel 1412 | forward without its backward breaks state | backends/test_cuda_ep::test_forwards_before_their_backwards test_function::test_several_forwards_may_precede_their_backwards backends/test_cuda_autograd::test_evaluation_gives_the_same_bytes_and_disturbs_nothing
"""  # noqa: E501
LINES = REPORTS.splitlines()


@functools.cache
def _tests_of(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / f"{file}.py").read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def check_answer(answer: str) -> None:
    """Tests that exist, or a reason."""
    named = re.findall(r"([\w/]+)::(\w+)", answer)
    assert len(named) == answer.count("::")
    for file, test in named:
        assert test.startswith("test_")
        assert test in _tests_of(file), f"{file} has no {test}"
    if answer.startswith("-: "):
        assert len(answer) > 30
    else:
        assert len(named) == len(answer.split())


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition(" |")[0])
def test_a_report_has_a_test_or_a_reason(line: str) -> None:
    report, what, answer = line.split(" | ")
    assert report
    assert what
    check_answer(answer)


def test_every_report_has_one_line() -> None:
    assert len(LINES) == 87
    assert len({line.partition(" |")[0] for line in LINES}) == len(LINES)
