"""Tables of cases of which `make test` runs a sample; `make test-all`, and EVERY=1 before pytest, run every row."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar
from zlib import crc32

Row = TypeVar("Row")

EVERY = os.environ.get("EVERY") == "1"
#: {table: (rows that this run leaves out, all its rows)}, which the summary of pytest shows.
LEFT_OUT: dict[str, tuple[int, int]] = {}
#: Parametrized tests whose rows take half a second to ten each: about one row in four is run.
SAMPLED = (
    "attacks/test_attacks.py::test_what_has_no_bound_or_no_type",
    "attacks/test_audit_attacks.py::test_small_files_that_would_take_much",
    "attacks/test_kinds.py::test_a_value_of_another_kind_is_read_or_refused",
    "attacks/test_planted.py::test_a_command_runs_nothing_that_was_planted",
    "attacks/test_zero_attacks.py::test_a_save_that_is_odd_is_read_as_the_state_of_its_job",
    "cli/test_interrupts.py::test_a_signal_at_any_moment_is_answered_with_what_is_there",
    "converters/test_autotp.py::test_deepspeed_resumes_at_another_tensor_parallel_size",
    "converters/test_hf_training.py::test_a_state_that_went_through_an_hf_folder_becomes_the_very_bytes_it_becomes_at_once",
    "converters/test_matrix.py::test_a_state_goes_from_any_layout_to_any_other_and_home_again_with_one_digest",
    "converters/test_matrix.py::test_the_source_of_an_engine_comes_back_with_an_equal_digest_at_every_world_size",
    "converters/test_megatron.py::test_to_hf_has_the_weights_of_every_variant",
    "converters/test_megatron.py::test_what_is_written_is_read_as_the_same_state",
    "engine/test_adapter.py::test_a_base_model_and_an_adapter_are_what_peft_merges",
    "engine/test_adapter.py::test_the_state_of_a_job_is_what_its_live_model_merges",
    "engine/test_adapter_layers.py::test_split_experts_are_the_same_adapter",
    "engine/test_averaging.py::test_every_layout_gets_the_bits_of_torch",
    "engine/test_casts.py::test_the_command_casts_every_dtype_to_every_floating_one_and_leaves_the_others",
    "engine/test_conservation.py::test_a_writer_that_is_given_less_or_other_state_is_found_before_a_byte_is_written",
    "engine/test_conservation.py::test_components_that_are_no_dict_with_names",
    "engine/test_conservation.py::test_generated_states_are_conserved",
    "engine/test_doctor_numbers.py::test_a_conversion_stops_at_an_average_of_squares_below_zero",
    "engine/test_parts.py::test_parts_have_the_bytes_of_one_pass",
    "engine/test_quantizing.py::test_transformers_has_the_same_codes_and_loads_the_numbers",
    "huggingface/test_name_maps.py::test_a_model_of_transformers_goes_into_another_program_without_an_optimizer",
    "huggingface/test_name_maps.py::test_the_model_of_transformers_has_the_logits_of_the_other",
    "huggingface/test_name_maps.py::test_the_next_steps_have_the_losses_of_the_other",
    "live/test_job_memory.py::test_the_bytes_of_every_rank_are_those_that_torch_and_deepspeed_allocate",
    "live/test_live.py::test_the_engine_at_another_world_size_goes_on_as_if_never_interrupted",
    "live/test_megatron_fsdp.py::test_weights_moments_and_settings_of_the_ranks_are_there_exactly",
    "live/test_megatron_premises.py::test_transformers_has_the_logits_of_the_live_model",
    "live/test_newer_maps.py::test_training_goes_on_with_the_losses_of_the_live_job",
    "live/test_newer_maps.py::test_transformers_has_the_logits_of_the_live_model",
    "live/test_precision_aware.py::test_masters_and_moments_of_the_ranks_are_there_exactly",
    "live/test_resume_pairs.py::test_a_trainer_goes_on_from_the_checkpoint_of_another",
    "resume/test_after.py::test_what_no_step_shows_is_seen_after_the_last_one_and_called_by_its_name",
    "resume/test_faults.py::test_the_command_passes_a_converted_checkpoint_at_another_world_size",
    "resume/test_operations.py::test_the_silent_rank_is_named_and_not_the_one_that_waits_for_it",
    "resume/test_report.py::test_a_browser_shows_the_page",
    "resume/test_witness.py::test_who_loads_other_layouts",
    "storage/test_crash.py::test_death_before_a_call_of_a_save_of_ranks_leaves_the_old_or_the_new_one_and_the_next_run_goes_on",
    "storage/test_crash.py::test_death_before_any_call_leaves_the_old_or_the_new_state_and_the_next_run_goes_on",
    "storage/test_crash.py::test_failure_of_any_call_is_an_error_of_ours_and_the_same_process_can_run_again",
    "storage/test_lying_servers.py::test_a_lie_is_an_error_or_makes_no_difference",
    "storage/test_remote.py::test_a_completion_that_is_an_error_with_status_200",
    "storage/test_remote.py::test_completed_though_nobody_heard",
    "storage/test_remote.py::test_tries_are_bounded",
    "storage/test_remote.py::test_writing_through_failures",
    "storage/test_shared_objects.py::test_workers_send_the_bytes_of_one_process",
)
#: {test of ten seconds or more: the test of the same kind that is run}.
ALIKE = {
    "live/test_torchao.py::test_three_ranks_go_on_from_two": "live/test_torchao.py::test_two_ranks_go_on_as_if_they_had_never_stopped",
    "resume/test_other_python.py::test_a_job_whose_result_depends_on_the_version_of_a_package_fails_and_the_versions_are_named":
        "resume/test_other_python.py::test_the_reference_and_its_noise_run_in_the_other_python_and_the_candidate_in_this_one",
    "resume/test_other_python.py::test_a_rank_that_is_killed_there_is_named_with_its_python":
        "resume/test_operations.py::test_the_rank_that_failed_is_named_with_what_ended_it",
    "storage/test_shared_objects.py::test_a_coordinator_that_is_killed":
        "storage/test_shared_objects.py::test_when_the_coordinator_dies_the_same_command_goes_on",
}  # fmt: skip


def sample(table: str, rows: Iterable[Row], keep: Iterable[Row]) -> list[Row]:
    """Return the rows of a table that this run tests, in their order: those of `keep`, or all of them with EVERY=1."""
    rows, keep = list(rows), list(keep)
    assert all(row in rows for row in keep), f"{table} has not all of {keep}"
    chosen = [row for row in rows if EVERY or row in keep]
    LEFT_OUT[table] = (len(rows) - len(chosen), len(rows))
    return chosen


def leave_out(ids: Iterable[str]) -> set[str]:
    """Return the ids of the tests that this run leaves out, and count them in `LEFT_OUT`.

    Rows are chosen by a hash of their ids, so that a new one does not move the others. At least one row of every test is run.

    Args:
        ids: such as "tests/a/test_b.py::test_c[row]".
    """
    rows_of: defaultdict[str, list[str]] = defaultdict(list)
    ids = list(ids)
    alike = [] if EVERY else [name for name in ids if name.removeprefix("tests/") in ALIKE]
    LEFT_OUT["tests like another"] = (len(alike), len(ALIKE))
    out: set[str] = set(alike)
    for name in ids:
        test = name.removeprefix("tests/").partition("[")[0]
        if test in SAMPLED:
            rows_of[test].append(name)
    for test, rows in rows_of.items():
        left = [] if EVERY else [row for row in rows if crc32(row.encode()) % 4]
        left = left[1:] if len(left) == len(rows) else left
        out.update(left)
        LEFT_OUT[f"rows of {test}"] = (len(left), len(rows))
    return out
