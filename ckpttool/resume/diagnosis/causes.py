"""From failed checks to likely causes, most likely first.

    find_causes(reference, got, checks, opened)

The rules run in the order of `RULES`. Exact evidence comes first: a missing tensor, a fingerprint that is another
tensor's (rules_state), an option, a learning rate, a batch that the reference had in another step (rules_config).
Numerical evidence (rules_numbers) is used only if nothing exact explains the failure. With both checkpoints open, some
of the differing tensors are read, and the cause says how they differ, with the file, bytes and rank of the first
difference. A cause is never made up: if nothing fits, it is "unknown", with the observations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from ...engine.opening import OpenCheckpoint
from ...printable import list_first
from ..compare.differences import find_state_obstacle
from ..compare.verdict import Cause, Check
from ..text import parse_fqn
from ..trace.model import Trace
from .context import Context
from .kinds import CauseKind
from .rules_config import (
    explain_differing_batches,
    explain_groups_and_scheduler,
    explain_lost_scheduler,
    explain_model_config,
    explain_side_state,
    explain_tied_parameters,
)
from .rules_numbers import (
    explain_final_state,
    explain_gradient_scale,
    explain_implausible_state,
    explain_loss_ranks,
    explain_not_finite,
    explain_probe_ranks,
    explain_round_trip,
    explain_run_failures,
    explain_step_numbers,
)
from .rules_state import (
    explain_held_values,
    explain_load,
    explain_missing_and_extra,
    explain_shapes_and_dtypes,
    explain_unequal_tensors,
)

__all__ = ["RULES", "find_causes"]


def _reorder_load_causes(context: Context) -> None:
    """Reorder the causes of a failed load: causes about what the error names, then the load itself, then all other
    causes.

    A lost scheduler state is added as a cause first. Does nothing if the load did not fail.
    """
    failed = context.got.failed
    if failed is None:
        return
    explain_lost_scheduler(context)
    failure, *others = context.out
    about = [
        c
        for c in others
        if c.kind == CauseKind.SCHEDULER_MISSING.label or any(parse_fqn(n) in failed for n in c.tensors)
    ]
    context.out[:] = [*about, failure, *(c for c in others if c not in about)]


class Rule(NamedTuple):
    """A rule, and what it needs: the run alone, a reference, or a reference whose state can be compared."""

    explain: Callable[[Context], None]
    needs: Literal["run", "reference", "state"] = "run"


#: Exact evidence before numerical; each rule is silent about what an earlier one explains.
RULES = (
    Rule(explain_load),
    Rule(explain_held_values),
    Rule(explain_missing_and_extra, "state"),
    Rule(explain_shapes_and_dtypes, "state"),
    Rule(explain_unequal_tensors, "state"),
    Rule(_reorder_load_causes, "reference"),
    Rule(explain_tied_parameters, "reference"),
    Rule(explain_model_config, "reference"),
    Rule(explain_groups_and_scheduler, "reference"),
    Rule(explain_side_state, "reference"),
    Rule(explain_differing_batches, "reference"),
    Rule(explain_implausible_state),
    Rule(explain_not_finite),
    Rule(explain_probe_ranks),
    Rule(explain_gradient_scale, "reference"),
    Rule(explain_step_numbers, "reference"),
    Rule(explain_loss_ranks),
    Rule(explain_run_failures),
    Rule(explain_final_state, "reference"),
    Rule(explain_round_trip),
)


def find_causes(
    reference: Trace | None,
    got: Trace,
    checks: Sequence[Check],
    opened: tuple[OpenCheckpoint, OpenCheckpoint] | None = None,
) -> list[Cause]:
    """Find what is likely wrong, most likely first; [] where no check failed but gates.

    Args:
        reference: what the job should have done; None if there is none.
        got: the run.
        checks: the checks of `judge` for these two.
        opened: the checkpoints of the two traces, the reference's first; None if they cannot be read.

    Raises:
        CkpttoolError: an index of `opened` cannot be read.
    """
    context = Context(reference, got, {c.name: c for c in checks if c.stage != "gate"}, opened)
    if not context.failed:
        return []
    met = {"run"}
    if reference is not None:
        met |= {"reference"} if find_state_obstacle(reference, got) is not None else {"reference", "state"}
    for rule in RULES:
        if rule.needs in met:
            rule.explain(context)
    if not context.out:
        evidence = [f"{c.name}: {c.text}" for c in context.failed.values()]
        text = f"no known fault looks like this: {list_first(context.failed)} failed"
        context.add(CauseKind.UNKNOWN, text, evidence)
    return context.out
