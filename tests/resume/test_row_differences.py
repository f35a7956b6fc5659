"""What the rows of batches say: a shift by samples, a rank with another's rows, another order, rows of nowhere."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.resume.compare.dynamics import count_common_rows
from ckpttool.resume.compare.judge import judge_single_run
from ckpttool.resume.diagnosis.causes import find_causes
from ckpttool.resume.diagnosis.row_differences import describe_row_mismatch
from ckpttool.resume.trace import batches
from ckpttool.resume.trace.model import Step, Trace


def run(
    sample: Callable[[int, int], int], *, batch: int = 24, world: int = 2, first: int = 13, steps: int = 4
) -> Trace:
    """A run on the data `sample(position, rank)`, in micro-batches of 3 rows."""
    out = Trace(start=first - 1, layout="dcp", global_batch=batch, world_size=world)
    for step in range(first, first + steps):
        parts = []
        for rank in range(world):
            passes = batches.list_micro_batches(step, batch, 3, rank, world)
            mine = [sample(i, rank) for a, b, counts in passes for i in range(a, b) if counts]
            parts.append(batches.digest_and_mark_rows(np.array([[i, i + 1] for i in mine])))
        total = sum(digest for digest, _ in parts) % (1 << 128)
        out.steps.append(Step(step, 2.0, batch=f"{total:032x}", rows=[marks for _, marks in parts]))
    return out


def said(reference: Trace, got: Trace) -> tuple[str, str] | None:
    """The kind and text of the cause."""
    checks = judge_single_run(reference, got).checks
    assert next(c for c in checks if c.name == "step1.batch").verdict == "fail"
    (cause,) = [c for c in find_causes(reference, got, checks) if c.kind.startswith("data")]
    return cause.kind, cause.text


def plain(i: int, rank: int) -> int:
    return i


@pytest.mark.parametrize("world", [1, 3])
def test_data_that_is_one_sample_on_or_back_is_called_that(world: int) -> None:
    reference = run(plain)
    same = "23 of the 24 rows of step 13 are the reference's"
    assert said(reference, run(lambda i, r: i + 1, world=world)) == (
        "data-rows", f"the data is shifted by 1 sample, ahead of the reference: {same}"
    )  # fmt: skip
    assert said(reference, run(lambda i, r: i - 1, world=world)) == (
        "data-rows", f"the data is shifted by 1 sample, behind the reference: {same}"
    )  # fmt: skip
    far = said(reference, run(lambda i, r: i + 30, world=world))
    assert far == ("data-rows", "the data is shifted by 30 samples, ahead of the reference: 0 of the 24 rows of step 13 are the reference's")  # fmt: skip
    checks = judge_single_run(reference, run(lambda i, r: i + 1, world=world)).checks
    assert next(c for c in checks if c.name == "step1.batch").text.endswith(same)


@pytest.mark.slow
@given(st.integers(-60, 60), st.integers(1, 4), st.integers(1, 4), st.integers(2, 6))
def test_a_shift_is_found_at_any_world_size_or_something_weaker_is_said(
    k: int, ours: int, theirs: int, steps: int
) -> None:
    reference, got = run(plain, world=theirs, steps=steps), run(lambda i, r: i + k, world=ours, steps=steps)
    pairs = list(zip(reference.steps, got.steps, strict=True))
    found = describe_row_mismatch(reference, got, pairs)
    if k % 24 == 0:
        return  # whole batches, found by their digests
    if abs(k) < 24 * (steps - 1):
        assert found is not None and f"shifted by {abs(k)} sample" in found[1]
        assert ("ahead" in found[1]) == (k > 0)
    assert count_common_rows(*pairs[0]) == (max(0, 24 - abs(k)), 24)


def test_a_rank_with_the_rows_of_another_is_named() -> None:
    reference = run(plain)
    one = run(lambda i, r: i - 3 if r == 1 else i)
    assert said(reference, one) == (
        "data-rows", "rank 1 has the rows of rank 0: 12 of the 24 rows of step 13 are the reference's"
    )  # fmt: skip
    all_of_them = run(lambda i, r: i - 3 * r, world=4)
    assert said(reference, all_of_them) == (
        "data-rows", "all 4 ranks have the same rows: 6 of the 24 rows of step 13 are the reference's"
    )  # fmt: skip
    two = run(lambda i, r: i - 3 * (r % 2), world=4)
    assert said(reference, two) == (
        "data-rows", "rank 1 has the rows of rank 0, rank 3 has the rows of rank 2: 12 of the 24 rows of step 13 are the reference's"
    )  # fmt: skip


def test_rows_that_a_reference_has_several_times_are_no_fault_of_a_rank() -> None:
    reference = run(lambda i, r: i // 6)
    kind, text = said(reference, run(lambda i, r: i // 6 + (i % 24 == 7) * 1000)) or ("", "")
    assert (kind, text) == (
        "data-rows",
        "23 of the 24 rows of step 13 are the reference's, and 1 of none that was recorded",
    )


def test_another_order_and_other_data_are_told_apart() -> None:
    reference = run(plain, first=1, steps=30)
    draw = np.random.default_rng(1).permutation(30 * 24)
    kind, text = said(reference, run(lambda i, r: int(draw[i]))) or ("", "")
    assert kind == "data-order" and text.startswith("the rows come in a different order: ") and "step 1, step 2" in text
    assert said(reference, run(lambda i, r: i + 10_000)) == (
        "data-other", "the data differs from step 13 on: none of these batches is in the reference"
    )  # fmt: skip


def test_a_recording_without_rows_says_what_it_said_before() -> None:
    reference = run(plain)
    for step in reference.steps:
        step.rows = []
    assert said(reference, run(lambda i, r: i + 1)) == (
        "data-other", "the data differs from step 13 on: none of these batches is in the reference"
    )  # fmt: skip


def test_rows_that_come_several_times_are_in_no_other_order() -> None:
    """A sampler that draws with replacement, or an index that was halved."""
    kind, text = said(run(plain), run(lambda i, r: i // 2 * 2)) or ("", "")
    assert (kind, text) == (
        "data-rows", "rows of the step come several times, in place of others: 12 of the 24 rows of step 13 are the reference's"
    )  # fmt: skip
