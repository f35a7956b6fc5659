"""Checks of a job that was trained from its start (`--fresh`): of the run without a pause, of its repetition, of its
save, and of runs that resume from that.

The runs, by label: "reference" trains some steps, saves and goes on; "repeat" does the same without a save, to find out
whether the job computes the same numbers twice; "candidate" resumes at the same world size, "second" at another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pvariance

from ...index.names import step_count
from ...printable import count_noun
from ..trace.model import Trace
from . import run_checks
from .differences import are_equal_values, collect_optimizer_steps, pair_common_steps
from .verdict import Check

__all__ = ["check_bit_equality", "check_fresh_run", "label_checks_with_ranks"]

#: Steps whose losses tell whether the loss falls.
_LEAST_STEPS = 9
#: The mean loss may rise by this many standard errors before that is more than the batches' own differences.
_ERRORS = 4.0


def _find_first_difference(a: Trace, b: Trace) -> tuple[int, str] | None:
    """Find the first step in which two runs of the same steps are not bit-equal: (step, name of the number that
    differs).

    After the steps, the fingerprints of the final state are compared, without tensors whose copies differ between
    ranks. None if nothing differs.
    """
    for x, y in pair_common_steps(a, b):
        for what in ("loss", "grad_norm", "update_norm", "grads", "updates"):
            if not are_equal_values(getattr(x, what), getattr(y, what)):
                return x.step, what.replace("_", " ")
    for name, mark in a.final.items():
        if name not in a.variants and b.final.get(name) != mark:
            return a.steps[-1].step, f"{name} at the end"
    return None


def check_fresh_run(run: Trace, repeat: Trace, got: Trace) -> list[Check]:
    """Check the uninterrupted run of a fresh job: its losses and gradients, its repetition, and the step in its save.

    Args:
        run: the uninterrupted run.
        repeat: the run that repeats it.
        got: the run that resumed from the save at the same world size.
    """
    found = [
        run_checks.check_finite(run),
        _check_loss_falls(run),
        run_checks.check_losses_of_ranks(run),
        run_checks.check_spike(None, run),
        run_checks.check_dead_gradients(None, run),
    ]
    named = [replace(c, stage="smoke test", name=f"fresh.{c.name.partition('.')[2]}") for c in found]
    return [*named, _check_repetition(run, repeat), _check_saved_step(got)]


def _check_loss_falls(run: Trace) -> Check:
    """Check that the mean loss over the last third of the steps is below that over the first third.

    A rise within what single batches differ by, or a run with too few steps, is not judged.
    """
    name = "fresh.falls"
    losses = [s.loss for s in run.steps]
    if len(losses) < _LEAST_STEPS or not all(map(math.isfinite, losses)):
        few = f"{count_noun(len(losses), 'step')} in all, and at least {_LEAST_STEPS} are needed"
        return Check.unknown(name, few if len(losses) < _LEAST_STEPS else "a loss is not finite")
    k = len(losses) // 3
    before, after = fmean(losses[:k]), fmean(losses[-k:])
    error = math.sqrt((pvariance(losses[:k]) + pvariance(losses[-k:])) / (k - 1))
    text = f"the mean loss is {before:.4g} in the first {k} steps, {after:.4g} in the last {k}"
    if before <= after <= before + _ERRORS * error:
        return Check.unknown(name, f"{text}, within what single batches differ by: train more steps to tell")
    return Check.of(name, after < before, text, source="exact")


def _check_repetition(run: Trace, repeat: Trace) -> Check:
    """Check whether the job computes the same numbers twice from its start.

    A difference that begins only after the save, which only the first run makes, is a failure: the save changes the
    training. A difference that begins earlier, or with non-deterministic kernels, is not judged.
    """
    name = "fresh.repeat"
    differs = _find_first_difference(run, repeat)
    if differs is None:
        text = f"two runs from the start are bit-equal, in {count_noun(len(run.steps), 'step')}"
        return Check.of(name, True, text, 0, 0, "exact")
    step, what = differs
    if step <= run.start or not run.environment.get("deterministic"):
        return Check.unknown(
            name,
            f"two runs of this job from its start are not bit-equal, first in the {what} of step {step}: a resumed run "
            "need not be either, and bounds follow from how far they differ",
        )
    text = (
        f"two runs from the start are bit-equal up to step {run.start}, where only one of them saved, and differ from "
        f"the {what} of step {step} on: the save changes the training"
    )
    return Check.of(name, False, text, source="exact", where=f"step {step}")


def _check_saved_step(got: Trace) -> Check:
    """Check that the saved checkpoint tells after which step it was saved, by a counter or by its optimizer state."""
    name = "fresh.saved_step"
    if got.failed is not None:
        return Check.unknown(name, "the checkpoint could not be loaded")
    found = step_count(got.values.get)
    if found is None:
        counted = [int(x) for x in collect_optimizer_steps(got).values() if math.isfinite(x)]
        found = max(counted, default=None)
    if found is None:
        text = (
            f"neither a counter nor the optimizer of the checkpoint says that it is of step {got.start}: save the step"
        )
        return Check.of(name, False, text, source="exact")
    text = f"the checkpoint says that it is of step {found}, and was saved after step {got.start}"
    if found == got.start:
        text = f"the checkpoint says that it is of step {found}"
    return Check.of(name, found == got.start, text, found, got.start, "exact")


def check_bit_equality(run: Trace, got: Trace, repeats: bool) -> Check:
    """Check that a run that resumed at the same world size is bit-equal to the uninterrupted run.

    Args:
        run: the uninterrupted run.
        got: the resumed run.
        repeats: whether two uninterrupted runs of the job are bit-equal; if not, nothing is judged.
    """
    name = "fresh.bit_equal"
    if not pair_common_steps(run, got):
        return Check.unknown(name, "the resumed run has no step")
    if not repeats:
        return Check.unknown(name, "two runs without a pause are not bit-equal either")
    if run.dropout and not got.environment.get("rng_restored"):
        return Check.unknown(name, "dropout is on, and the random states are not those of the save")
    differs = _find_first_difference(run, got)
    if differs is None:
        text = f"the resumed run is bit-equal to the one without a pause, in {count_noun(len(got.steps), 'step')}"
        return Check.of(name, True, text, 0, 0, "exact")
    step, what = differs
    text = f"the resumed run is not bit-equal to the one without a pause, first in the {what} of step {step}"
    return Check.of(name, False, text, source="exact", where=f"step {step}")


def label_checks_with_ranks(checks: Sequence[Check], got: Trace) -> list[Check]:
    """Return copies of checks that name the world size of the run `got`, such as "at3.step1.loss" of stage "at 3
    ranks"."""
    ranks = got.world_size
    return [
        replace(c, name=f"at{ranks}.{c.name}", stage=f"at {ranks} ranks" if ranks != 1 else "at 1 rank") for c in checks
    ]
