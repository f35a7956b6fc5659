"""From failed checks to likely causes, most likely first.

    find_causes(reference, got, checks, opened)

Exact evidence comes first: a missing tensor, a fingerprint that is another tensor's (`diagnosis_state`), an option, a
learning rate, a batch that the reference had in another step (`diagnosis_config`). Numerical evidence
(`diagnosis_numbers`) is used only if nothing exact explains the failure. With both checkpoints open, some of the
differing tensors are read, and the cause says how they differ, with the file, bytes and rank of the first difference. A
cause is never made up: if nothing fits, it is "unknown", with the observations.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...engine.opening import OpenCheckpoint
from ..compare.differences import state_obstacle
from ..compare.verdict import Cause, Check
from ..text import format_list, fqn_of
from ..trace.model import Trace
from . import rules_config as diagnosis_config
from . import rules_numbers as diagnosis_numbers
from . import rules_state as diagnosis_state
from .context import Context

__all__ = ["find_causes"]


def find_causes(
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
    context = Context(reference, got, {c.name: c for c in checks if c.stage != "gate"}, opened)
    if not context.failed:
        return []
    diagnosis_state.explain_load(context)
    if reference is not None:
        if state_obstacle(reference, got) is None:
            diagnosis_state.explain_absent(context, reference)
            diagnosis_state.explain_shapes(context, reference)
            diagnosis_state.explain_tensors(context, reference)
        if got.failed is not None:  # what is missing says more than the load's error, but only if that is about it
            diagnosis_config.explain_lost_scheduler(context, reference)
            failure, *others = context.out
            about = [
                c for c in others if c.kind == "scheduler-missing" or any(fqn_of(n) in got.failed for n in c.tensors)
            ]
            context.out[:] = [*about, failure, *(c for c in others if c not in about)]
        diagnosis_config.explain_tied(context)
        diagnosis_config.explain_model_config(context, reference)
        rules = [diagnosis_config.explain_param_groups, diagnosis_config.explain_scheduler]
        if "config.scheduler" in context.failed:  # the learning rates in the groups follow from it
            rules.reverse()
        for rule in (*rules, diagnosis_config.explain_side_state, diagnosis_config.explain_data):
            rule(context, reference)
    diagnosis_numbers.explain_implausible(context)
    diagnosis_numbers.explain_not_finite(context)
    diagnosis_numbers.explain_probe_ranks(context)
    if reference is not None:
        diagnosis_numbers.explain_gradient_scale(context, reference)
        diagnosis_numbers.explain_steps(context, reference)
    diagnosis_numbers.explain_loss_ranks(context)
    diagnosis_numbers.explain_run(context)
    diagnosis_numbers.explain_round_trip(context)
    seen = [f"{c.name}: {c.text}" for c in context.failed.values()]
    return context.out or [
        Cause("unknown", f"no known fault looks like this: {format_list(context.failed)} failed", seen)
    ]
