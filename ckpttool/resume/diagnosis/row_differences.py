"""How the rows of two batches differ, by the marks of their rows (`batches.digest_and_mark_rows`).

    describe_row_mismatch(reference, got, pairs)       what happened to the rows: (kind, sentence), or None

A row is looked up in all steps of the other side. If data is k samples ahead, the rows of a step are those of the
reference's step and of the next ones, and the distances of its rows from their own step add up to k, however large the
global batch is.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...printable import count_noun, list_first
from ..compare.dynamics import count_row_marks
from ..trace.batches import split_marks
from ..trace.model import Step, Trace
from .kinds import CauseKind

__all__ = ["describe_row_mismatch"]


def describe_row_mismatch(
    reference: Trace, got: Trace, pairs: Sequence[tuple[Step, Step]]
) -> tuple[CauseKind, str] | None:
    """Find how the rows of differing batches are related to the reference's rows: (kind of cause, sentence).

    Rows may be duplicated, shifted or reordered, for example. None if no rows were recorded, or if no row is the
    reference's. `pairs` are the steps with differing batches, (expected, found).
    """
    known = [(a, b) for a, b in pairs if a.rows and b.rows]
    if not known:
        return None
    first, second = known[0]
    same, many = (count_row_marks(first) & count_row_marks(second)).total(), count_row_marks(second).total()
    some = (
        f"{same} of the {count_noun(many, 'row')} of step {second.step} {'is' if same == 1 else 'are'} the reference's"
    )
    if (twice := _describe_duplicated_rows(first, second)) is not None:
        return CauseKind.DATA_ROWS, f"{twice}: {some}"
    ahead = _find_sample_shift([(b, a.step) for a, b in known], reference.steps)
    behind = None if ahead is not None else _find_sample_shift([(a, b.step) for a, b in known], got.steps)
    k = ahead if ahead is not None else None if behind is None else -behind
    if k:
        way = "ahead of" if k > 0 else "behind"
        return (
            CauseKind.DATA_ROWS,
            f"the data is shifted by {count_noun(abs(k), 'sample')}, {way} the reference: {some}",
        )
    ours, theirs = count_row_marks(second), count_row_marks(first)
    again = sum(n - theirs[row] for row, n in ours.items() if n > theirs[row] > 0)
    if again and again + same == many:
        return CauseKind.DATA_ROWS, f"rows of the step come several times, in place of others: {some}"
    steps = _map_rows_to_steps(reference.steps)
    found = [steps[row][0] for row in (count_row_marks(second) - count_row_marks(first)).elements() if row in steps]
    if not same and not found:
        return None
    if same + len(found) == many:
        others = list_first([f"step {s}" for s in sorted(set(found))])
        return CauseKind.DATA_ORDER, f"the rows come in a different order: {some}, and the others are those of {others}"
    text = f"{some}, {len(found)} of its other steps" if found else some
    return CauseKind.DATA_ROWS, f"{text}, and {many - same - len(found)} of none that was recorded"


def _describe_duplicated_rows(expected: Step, got: Step) -> str | None:
    """Return a text about which ranks process the same rows as others; None if there are none.

    Rows that occur as often in the reference's step do not count.
    """
    ours = [sorted(rows) for rows in split_marks(got.rows)]
    again = count_row_marks(got) - count_row_marks(expected)
    copies: dict[int, list[int]] = {}
    for rank, rows in enumerate(ours):
        first = ours.index(rows)
        if rows and first != rank and all(again[row] for row in rows):
            copies.setdefault(first, []).append(rank)
    if not copies:
        return None
    if len(copies) == 1 and len(next(iter(copies.values()))) == len(ours) - 1 > 1:
        return f"all {len(ours)} ranks have the same rows"
    whose = [
        f"{list_first([f'rank {r}' for r in ranks])} {'has' if len(ranks) == 1 else 'have'} the rows of rank {first}"
        for first, ranks in copies.items()
    ]
    return list_first(whose)


def _map_rows_to_steps(steps: Sequence[Step]) -> dict[str, list[int]]:
    """Return {mark of a row: numbers of the steps that contain it}."""
    out: dict[str, list[int]] = {}
    for step in steps:
        for row in count_row_marks(step):
            out.setdefault(row, []).append(step.step)
    return out


def _find_sample_shift(batches: Sequence[tuple[Step, int]], others: Sequence[Step]) -> int | None:
    """Find by how many samples one side's batches are ahead of the other side's steps.

    None if the shift is not the same in all batches, or if the rows of a batch are not those of one step or of two
    consecutive ones. Batches with rows that the other side does not have are left out.

    Args:
        batches: [(step of the one side, number of the step that it is compared with)].
        others: the steps of the other side.
    """
    steps = _map_rows_to_steps(others)
    shifts = set()
    for step, at in batches:
        rows = list(count_row_marks(step).elements())
        if not all(row in steps for row in rows):
            continue
        gaps = [min((s - at for s in steps[row]), key=abs) for row in rows]
        if max(gaps) - min(gaps) > 1:
            return None
        shifts.add(sum(gaps))
    return shifts.pop() if len(shifts) == 1 else None
