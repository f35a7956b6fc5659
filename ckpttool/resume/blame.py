"""blame: from checks that failed to what is likely wrong, in words, most likely first.

    causes(reference, got, checks, opened)

What is exact comes first: a tensor that is missing, a fingerprint that is that of another tensor (`blame_state`), an
option, a learning rate, a batch that the reference had in another step (`blame_config`). What numbers of steps suggest
(`blame_numbers`) is said only where nothing exact explains it. With both checkpoints open some of the differing tensors
are read, and how they differ is named, with the file, the bytes and the rank of the first difference. A cause is never
made up: where nothing fits, the one cause is "unknown", with what was seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.opening import OpenCheckpoint
from . import blame_config, blame_numbers, blame_state
from .case import Case
from .differences import state_obstacle
from .trace import Trace
from .verdict import Cause, Check
from .words import listed

__all__ = ["causes"]


def causes(
    reference: Trace | None,
    got: Trace,
    checks: Sequence[Check],
    opened: tuple[OpenCheckpoint, OpenCheckpoint] | None = None,
) -> list[Cause]:
    """What is likely wrong, most likely first; nothing where no check of continuity failed.

    Args:
        reference, got, checks: as `judge` had and gave them.
        opened: the checkpoints that the two traces are of, the reference's first.
    """
    case = Case(reference, got, {c.name: c for c in checks if c.stage != "gate"}, opened)
    if not case.failed:
        return []
    blame_state.load(case)
    if reference is not None:
        if state_obstacle(reference, got) is None:
            blame_state.absent(case, reference)
            blame_state.shapes(case, reference)
            blame_state.values(case, reference)
        if got.failed is not None and case.out:
            case.out.append(case.out.pop(0))  # what is missing or has another shape says more
        blame_config.tied(case)
        blame_config.model(case, reference)
        rules = [blame_config.groups, blame_config.scheduler]
        if "config.scheduler" in case.failed:  # the learning rates in the groups follow from it
            rules.reverse()
        for rule in (*rules, blame_config.values, blame_config.data):
            rule(case, reference)
    blame_numbers.plausible(case)
    blame_numbers.finite(case)
    if reference is not None:
        blame_numbers.gradients_summed(case, reference)
        blame_numbers.steps(case, reference)
    blame_numbers.ranks(case)
    blame_numbers.run(case)
    blame_numbers.round_trip(case)
    seen = [f"{c.name}: {c.text}" for c in case.failed.values()]
    return case.out or [Cause("unknown", f"no known fault looks like this: {listed(case.failed)} failed", seen)]
