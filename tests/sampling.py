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
#: Parametrized tests whose rows take half a second to ten each: about one row in three is run.
SAMPLED = (
    "attacks/test_kinds.py::test_a_value_of_another_kind_is_read_or_refused",
    "attacks/test_planted.py::test_a_command_runs_nothing_that_was_planted",
    "cli/test_interrupts.py::test_a_signal_at_any_moment_is_answered_with_what_is_there",
    "converters/test_matrix.py::test_a_state_goes_from_any_layout_to_any_other_and_home_again_with_one_digest",
    "converters/test_megatron.py::test_what_is_written_is_read_as_the_same_state",
    "engine/test_adapter.py::test_a_base_model_and_an_adapter_are_what_peft_merges",
    "engine/test_adapter.py::test_the_state_of_a_job_is_what_its_live_model_merges",
    "engine/test_averaging.py::test_every_layout_gets_the_bits_of_torch",
    "engine/test_casts.py::test_the_command_casts_every_dtype_to_every_floating_one_and_leaves_the_others",
    "engine/test_conservation.py::test_a_writer_that_is_given_less_or_other_state_is_found_before_a_byte_is_written",
    "engine/test_conservation.py::test_generated_states_are_conserved",
    "engine/test_parts.py::test_parts_have_the_bytes_of_one_pass",
    "huggingface/test_name_maps.py::test_the_model_of_transformers_has_the_logits_of_the_other",
    "huggingface/test_name_maps.py::test_the_next_steps_have_the_losses_of_the_other",
    "live/test_live.py::test_the_engine_at_another_world_size_goes_on_as_if_never_interrupted",
    "live/test_newer_maps.py::test_transformers_has_the_logits_of_the_live_model",
    "live/test_precision_aware.py::test_masters_and_moments_of_the_ranks_are_there_exactly",
    "live/test_reader.py::test_a_live_job_filled_from_every_layout_holds_the_truth_and_trains_on",
    "resume/test_report.py::test_a_browser_shows_the_page",
    "storage/test_crash.py::test_failure_of_any_call_is_an_error_of_ours_and_the_same_process_can_run_again",
    "storage/test_lying_servers.py::test_a_lie_is_an_error_or_makes_no_difference",
    "storage/test_shared_objects.py::test_workers_send_the_bytes_of_one_process",
)


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
    for name in ids:
        test = name.removeprefix("tests/").partition("[")[0]
        if test in SAMPLED:
            rows_of[test].append(name)
    out: set[str] = set()
    for test, rows in rows_of.items():
        left = [] if EVERY else [row for row in rows if crc32(row.encode()) % 3]
        left = left[1:] if len(left) == len(rows) else left
        out.update(left)
        LEFT_OUT[f"rows of {test}"] = (len(left), len(rows))
    return out
