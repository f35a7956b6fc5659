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
#: Parametrized tests whose rows take half a second to ten each: one row in eight is run.
SAMPLED = (
    "attacks/test_attacks.py::test_what_has_no_bound_or_no_type",
    "attacks/test_audit_attacks.py::test_a_call_that_fails",
    "attacks/test_audit_attacks.py::test_a_flipped_bit_anywhere",
    "attacks/test_audit_attacks.py::test_small_files_that_would_take_much",
    "attacks/test_audit_attacks.py::test_the_nightly_check_of_the_docs",
    "attacks/test_audit_attacks.py::test_the_table_of_attacks",
    "attacks/test_audit_attacks.py::test_what_every_command_refuses",
    "attacks/test_kinds.py::test_a_value_of_another_kind_is_read_or_refused",
    "attacks/test_mixups.py::test_a_file_of_another_layout_that_is_a_copy_of_another_rank_s",
    "attacks/test_mixups.py::test_an_optimizer_file_of_zero_that_is_a_copy_of_another_rank_s",
    "attacks/test_mixups.py::test_random_states_and_the_like_under_another_ranks_name_are_not_taken_for_its_own",
    "attacks/test_planted.py::test_a_command_runs_nothing_that_was_planted",
    "attacks/test_zero_attacks.py::test_a_save_that_is_not_one_is_refused_and_nothing_is_left",
    "attacks/test_zero_attacks.py::test_a_save_that_is_odd_is_read_as_the_state_of_its_job",
    "audit/test_audit.py::test_restored_into_every_layout",
    "audit/test_audit_frames.py::test_an_interrupted_file_is_gone_on_with",
    "audit/test_audit_frames.py::test_any_range_comes_out_as_it_was_before_the_planes",
    "audit/test_audit_frames.py::test_threads_and_the_sizes_of_pieces_change_nothing",
    "audit/test_audit_ledger.py::test_in_a_bucket_behind_a_bad_line",
    "audit/test_audit_signing.py::test_altered_files_are_refused_by_both",
    "audit/test_audit_workers.py::test_any_number_of_processes_and_any_executor_agree",
    "audit/test_audit_workers.py::test_clusters_agree",
    "cli/test_cli.py::test_a_dry_run_counts_what_the_run_counts_and_no_two_notes_contradict_each_other",
    "cli/test_help.py::test_tab_completes_values_of_options_without_large_packages",
    "cli/test_hub_urls.py::test_the_url_that_push_prints_is_one_that_every_command_reads",
    "cli/test_interrupts.py::test_a_signal_at_any_moment_is_answered_with_what_is_there",
    "cli/test_interrupts.py::test_another_signal_while_the_first_one_is_answered",
    "cli/test_surroundings.py::test_what_is_not_permitted_is_exit_14_and_no_damage",
    "converters/test_autotp.py::test_deepspeed_resumes_at_another_tensor_parallel_size",
    "converters/test_autotp.py::test_it_is_written_in_other_layouts",
    "converters/test_deepspeed_parallel.py::test_deepspeed_resumes_a_pipeline_at_other_stages_and_ranks",
    "converters/test_deepspeed_parallel.py::test_deepspeed_resumes_at_another_number_of_expert_parallel_ranks",
    "converters/test_hf_training.py::test_a_state_that_went_through_an_hf_folder_becomes_the_very_bytes_it_becomes_at_once",
    "converters/test_matrix.py::test_a_dcp_folder_holds_the_state_of_the_live_job",
    "converters/test_matrix.py::test_a_full_file_holds_the_state_of_the_live_job",
    "converters/test_matrix.py::test_a_state_goes_from_any_layout_to_any_other_and_home_again_with_one_digest",
    "converters/test_matrix.py::test_every_zip_written_from_an_engine_has_right_checksums",
    "converters/test_matrix.py::test_every_zip_written_has_right_checksums",
    "converters/test_matrix.py::test_the_digest_is_the_same_in_every_layout_at_every_world_size_and_after_a_round_trip",
    "converters/test_matrix.py::test_the_source_of_an_engine_comes_back_with_an_equal_digest_at_every_world_size",
    "converters/test_matrix.py::test_what_is_written_of_a_sparse_state_is_recognised_for_what_it_is",
    "converters/test_megatron.py::test_a_state_is_that_of_the_live_job_bit_for_bit",
    "converters/test_megatron.py::test_to_hf_has_the_weights_of_every_variant",
    "converters/test_megatron.py::test_what_is_written_is_read_as_the_same_state",
    "converters/test_megatron_ranks.py::test_other_layouts_take_the_whole_state",
    "converters/test_metadata_records.py::test_the_index_is_that_of_the_whole_pickle",
    "converters/test_torch_checkpointing.py::test_the_manager_itself_loads_what_is_written",
    "converters/test_torch_checkpointing.py::test_what_is_written_for_any_world_size_is_the_same_state",
    "converters/test_trainer_directories.py::test_a_directory_is_its_model_and_its_optimizer_bit_for_bit",
    "converters/test_zero.py::test_an_odd_name_of_a_parameter_is_kept_or_refused",
    "converters/test_zero.py::test_deepspeed_s_own_adam_steps_with_the_groups_of_torch_s",
    "engine/test_adapter.py::test_a_base_model_and_an_adapter_are_what_peft_merges",
    "engine/test_adapter.py::test_the_state_of_a_job_is_what_its_live_model_merges",
    "engine/test_adapter_layers.py::test_convolutions_are_what_peft_merges",
    "engine/test_adapter_layers.py::test_split_experts_are_the_same_adapter",
    "engine/test_averaging.py::test_every_layout_gets_the_bits_of_torch",
    "engine/test_averaging.py::test_three_saves_of_engines_have_the_average_of_their_gathered_states",
    "engine/test_casts.py::test_the_command_casts_every_dtype_to_every_floating_one_and_leaves_the_others",
    "engine/test_changing.py::test_what_matches_is_what_the_function_computes_and_the_rest_is_as_it_was",
    "engine/test_conservation.py::test_a_writer_that_is_given_less_or_other_state_is_found_before_a_byte_is_written",
    "engine/test_conservation.py::test_components_that_are_no_dict_with_names",
    "engine/test_conservation.py::test_generated_states_are_conserved",
    "engine/test_diff.py::test_the_command_compares_every_dtype_with_itself_and_with_others",
    "engine/test_doctor.py::test_a_torch_file_cut_anywhere_gives_exactly_the_tensors_that_are_whole",
    "engine/test_doctor_numbers.py::test_a_conversion_stops_at_an_average_of_squares_below_zero",
    "engine/test_executors.py::test_mpiexec_runs_the_command_once_and_the_other_ranks_work",
    "engine/test_logits.py::test_a_fault_is_named_with_the_first_layer_that_it_changes",
    "engine/test_logits.py::test_a_streamed_model_has_the_logits_of_from_pretrained",
    "engine/test_logits.py::test_equal_models_give_equal_bits_in_other_layouts",
    "engine/test_logits.py::test_names_of_another_program_go_through_its_map",
    "engine/test_parts.py::test_options_give_workers_the_bytes_of_one_pass",
    "engine/test_parts.py::test_parts_have_the_bytes_of_one_pass",
    "engine/test_parts.py::test_when_the_coordinator_dies_any_run_goes_on",
    "engine/test_plan_files.py::test_a_plan_and_its_run_agree_for_every_layout",
    "engine/test_quantizing.py::test_transformers_has_the_same_codes_and_loads_the_numbers",
    "engine/test_salvage_ranks.py::test_what_other_ranks_have_copies_of_is_exact",
    "engine/test_selecting.py::test_tensors_of_a_part_have_the_digests_that_they_have_in_the_whole",
    "formats/test_pickles.py::test_nesting_without_bound_is_refused",
    "formats/test_pickles.py::test_work_that_no_pickler_leaves_is_refused_early",
    "hub/test_push.py::test_a_hub_that_takes_what_is_sent_and_says_nothing",
    "huggingface/test_decoding.py::test_memory_does_not_grow_with_a_tensor",
    "huggingface/test_encodings.py::test_no_cast_touches_codes_or_their_scales",
    "huggingface/test_encodings.py::test_to_hf_no_config_says_that_plain_weights_are_quantised",
    "huggingface/test_name_maps.py::test_a_model_of_transformers_goes_into_another_program_without_an_optimizer",
    "huggingface/test_name_maps.py::test_the_model_of_transformers_has_the_logits_of_the_other",
    "huggingface/test_name_maps.py::test_the_next_steps_have_the_losses_of_the_other",
    "huggingface/test_name_maps.py::test_the_way_back_is_what_the_other_wrote",
    "live/test_job_memory.py::test_the_bytes_of_every_rank_are_those_that_torch_and_deepspeed_allocate",
    "live/test_live.py::test_a_fixture_that_is_made_anew_by_a_real_job_converts_like_the_one_in_the_repository",
    "live/test_live.py::test_the_engine_at_another_world_size_goes_on_as_if_never_interrupted",
    "live/test_megatron_fsdp.py::test_weights_moments_and_settings_of_the_ranks_are_there_exactly",
    "live/test_megatron_premises.py::test_transformers_has_the_logits_of_the_live_model",
    "live/test_multi_token_prediction.py::test_the_folder_for_the_hub_has_them_behind_the_layers_of_the_model",
    "live/test_multi_token_prediction.py::test_the_further_layers_have_the_logits_of_the_live_job",
    "live/test_newer_maps.py::test_the_way_back_is_what_the_job_wrote",
    "live/test_newer_maps.py::test_training_goes_on_with_the_losses_of_the_live_job",
    "live/test_newer_maps.py::test_transformers_has_the_logits_of_the_live_model",
    "live/test_precision_aware.py::test_masters_and_moments_of_the_ranks_are_there_exactly",
    "live/test_resume_pairs.py::test_a_trainer_goes_on_from_the_checkpoint_of_another",
    "live/test_zero_masters.py::test_the_engine_has_the_masters_and_computes_with_their_rounding",
    "resume/test_after.py::test_what_no_step_shows_is_seen_after_the_last_one_and_called_by_its_name",
    "resume/test_beside_conversions.py::test_a_conversion_there_and_on_loses_and_changes_nothing",
    "resume/test_diagnosis.py::test_numbers_alone_tell_the_part_that_is_wrong",
    "resume/test_diagnosis_values.py::test_factors_of_moments_tell_what_left_them",
    "resume/test_faults.py::test_a_zero3_folder_of_deepspeed_goes_on_in_fsdp2_as_deepspeed_did",
    "resume/test_faults.py::test_the_command_fails_a_spoiled_checkpoint_and_says_why",
    "resume/test_faults.py::test_the_command_passes_a_converted_checkpoint_at_another_world_size",
    "resume/test_judge.py::test_state_beside_model_and_optimizer_that_is_lost_or_other_fails_its_check_alone",
    "resume/test_operations.py::test_a_signal_ends_every_rank_also_a_stopped_one",
    "resume/test_operations.py::test_the_rank_that_failed_is_named_with_what_ended_it",
    "resume/test_operations.py::test_the_silent_rank_is_named_and_not_the_one_that_waits_for_it",
    "resume/test_report.py::test_a_browser_shows_the_page",
    "resume/test_resume_parts.py::test_boxes_of_any_cut_add_up_to_the_whole",
    "resume/test_witness.py::test_who_loads_other_layouts",
    "storage/test_crash.py::test_death_before_a_call_of_a_save_of_ranks_leaves_the_old_or_the_new_one_and_the_next_run_goes_on",
    "storage/test_crash.py::test_death_before_any_call_leaves_the_old_or_the_new_state_and_the_next_run_goes_on",
    "storage/test_crash.py::test_failure_of_a_call_of_a_deepspeed_save_is_an_error_of_ours",
    "storage/test_crash.py::test_failure_of_any_call_is_an_error_of_ours_and_the_same_process_can_run_again",
    "storage/test_lying_servers.py::test_a_lie_is_an_error_or_makes_no_difference",
    "storage/test_lying_servers.py::test_an_error_comes_in_time_with_the_usual_limits",
    "storage/test_object_destinations.py::test_a_run_that_ends_early_leaves_nothing",
    "storage/test_object_destinations.py::test_a_store_that_fails_while_objects_become_visible",
    "storage/test_object_destinations.py::test_many_files_at_once_take_no_more_memory",
    "storage/test_object_destinations.py::test_there_and_back",
    "storage/test_remote.py::test_a_completion_that_is_an_error_with_status_200",
    "storage/test_remote.py::test_a_store_that_takes_no_part",
    "storage/test_remote.py::test_completed_though_nobody_heard",
    "storage/test_remote.py::test_reading_through_failures",
    "storage/test_remote.py::test_tries_are_bounded",
    "storage/test_remote.py::test_writing_through_failures",
    "storage/test_shared_objects.py::test_a_source_that_changes_between_an_upload_and_the_one_that_goes_on",
    "storage/test_shared_objects.py::test_when_the_coordinator_dies_the_same_command_goes_on",
    "storage/test_shared_objects.py::test_workers_send_the_bytes_of_one_process",
    "test_acid.py::test_a_program_that",
    "test_migrations.py::test_every_migration_from_an_engine_keeps_weights_and_optimizer",
    "watching/test_guard.py::test_a_bad_save_of_lightning_is_in_the_log_or_ends_the_fit",
    "watching/test_guard.py::test_a_bad_save_of_torchtitan_is_in_the_log",
    "watching/test_guard.py::test_a_job_that_is_killed_leaves_no_process",
)
#: Parametrized tests whose rows are jobs of several ranks, or as slow: one row in four is run.
JOBS = (
    "attacks/test_mixups.py::test_model_files_of_nanotron_that_were_exchanged",
    "converters/test_hf.py::test_from_pretrained_misses_nothing_and_has_the_weights_of_the_live_job_whatever_lies_beside_them",
    "converters/test_megatron.py::test_halves_of_megatron_fsdp_are_one_tensor_again",
    "engine/test_workers.py::test_a_disk_that_fills_up_under_workers_keeps_what_is_filled",
    "live/test_muon.py::test_every_tensor_of_the_ranks_and_the_groups_of_both_optimizers_are_there",
    "live/test_reader.py::test_a_live_job_filled_from_every_layout_holds_the_truth_and_trains_on",
    "packaging/test_install.py::test_what_needs_an_extra_says_so_and_writes_nothing",
    "packaging/test_third_party.py::test_a_layout_that_cannot_be_used_is_named_and_left_out",
    "resume/test_benign.py::test_nothing_is_said_of_a_job_of_ones_own_in_which_nothing_is_wrong",
    "resume/test_faults.py::test_a_fault_is_seen_first_where_it_should_be_and_called_by_its_name",
    "resume/test_faults.py::test_a_run_with_nothing_wrong_passes_against_the_recorded_trajectory",
    "resume/test_hybrid.py::test_each_fault_of_the_third_suite_has_its_verdict",
    "resume/test_resume.py::test_a_job_that_cannot_be_built_ends_with_a_sentence",
    "resume/test_zoo.py::test_each_fault_of_the_second_suite_has_its_verdict",
    "storage/test_azure.py::test_there_and_back",
)
#: {test of ten seconds or more: the test of the same kind that is run}.
ALIKE = {
    "resume/test_resume.py::test_a_signal_ends_all_ranks_and_leaves_nothing":
        "resume/test_operations.py::test_a_signal_ends_every_rank_also_a_stopped_one",
    "attacks/test_audit_attacks.py::test_killed_at_any_time": "audit/test_audit.py::test_killed_in_the_middle_and_run_again",
    "storage/test_shared_objects.py::test_four_processes_three_of_which_are_killed":
        "storage/test_shared_objects.py::test_a_worker_that_dies_costs_its_part",
    "storage/test_crash.py::test_sigkill_at_random_moments_leaves_a_fresh_destination_absent_or_complete":
        "storage/test_crash.py::test_sigkill_at_random_moments_leaves_a_replaced_destination_old_or_complete",
    "test_examples.py::test_the_slurm_file_runs_two_ranks_and_ends_with_their_verdict":
        "resume/test_resume.py::test_torchrun_may_start_it_and_rank_0_alone_speaks",
    "engine/test_executors.py::test_ray_works_with_four_workers_and_fails_the_future_of_one_that_dies":
        "engine/test_engines.py::test_ray",
    "live/test_torchao.py::test_three_ranks_go_on_from_two": "live/test_torchao.py::test_two_ranks_go_on_as_if_they_had_never_stopped",
    "resume/test_other_python.py::test_a_job_whose_result_depends_on_the_version_of_a_package_fails_and_the_versions_are_named":
        "resume/test_other_python.py::test_the_reference_and_its_noise_run_in_the_other_python_and_the_candidate_in_this_one",
    "resume/test_other_python.py::test_a_rank_that_is_killed_there_is_named_with_its_python":
        "resume/test_operations.py::test_the_rank_that_failed_is_named_with_what_ended_it",
    "storage/test_shared_objects.py::test_a_coordinator_that_is_killed":
        "storage/test_shared_objects.py::test_when_the_coordinator_dies_the_same_command_goes_on",
    "attacks/test_planted.py::test_workers_of_ray_run_nothing_that_was_planted":
        "attacks/test_planted.py::test_workers_of_dask_run_nothing_that_was_planted",
    "live/test_torchao.py::test_one_process_goes_on_from_one_file_and_from_a_folder":
        "live/test_torchao.py::test_two_ranks_go_on_as_if_they_had_never_stopped",
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

    Rows are chosen by a hash of their ids, so that a new one moves one other at most. At least one row of every test is run.

    Args:
        ids: such as "tests/a/test_b.py::test_c[row]".
    """
    rows_of: defaultdict[str, list[str]] = defaultdict(list)
    ids = list(ids)
    alike = [] if EVERY else [name for name in ids if name.removeprefix("tests/") in ALIKE]
    LEFT_OUT["tests like another"] = (len(alike), len(ALIKE))
    out: set[str] = set(alike)
    one_in = dict.fromkeys(SAMPLED, 8) | dict.fromkeys(JOBS, 4)
    for name in ids:
        test = name.removeprefix("tests/").partition("[")[0]
        if test in one_in:
            rows_of[test].append(name)
    for test, rows in rows_of.items():
        count = max(1, round(len(rows) / one_in[test]))
        kept = sorted(rows, key=lambda row: crc32(row.encode()))[:count]
        left = [] if EVERY else [row for row in rows if row not in kept]
        out.update(left)
        LEFT_OUT[f"rows of {test}"] = (len(left), len(rows))
    return out
