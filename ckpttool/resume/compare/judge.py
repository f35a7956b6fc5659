"""Compares a run with a reference, check by check; `measure_noise` tells how far two correct runs differ.

    judge_single_run(reference, got, "strict").checks

Checks come in the order of `ORDER`; earlier ones cost less and say more exactly what is wrong. First the state in the
job and its configuration, then the probe before any step, the first step (nothing has been updated yet, so numbers are
nearly exact), the later steps, the checks that need no reference, and the save and load. Without a reference, only the
last two kinds are run, and those checks of the state that need none.

`state_checks` and `run_checks` have the checks, `dynamics` those of steps, `differences` finds what differs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..trace.model import Trace
from . import after_checks, fresh_checks, run_checks, state_checks
from . import bounds as table
from .bounds import SIGNALS
from .differences import with_stored_dtypes
from .dynamics import StepComparison
from .verdict import Check

__all__ = ["MEASURING", "ORDER", "Judgement", "judge_runs", "judge_single_run", "measure_noise"]

#: The names of all checks of a run by a reference.
ORDER = (
    "state.loaded",
    "state.plausible",
    "state.names",
    "state.shapes",
    "state.digests",
    "state.scalars",
    "state.values",
    "state.reference",
    "config.groups",
    "config.scheduler",
    "config.rng",
    "config.dataloader",
    "config.scaler",
    "config.values",
    "config.tied",
    "config.model",
    "probe.logits",
    "probe.ranks",
    "step1.batch",
    "step1.learning_rates",
    *(f"step1.{s}" for s in SIGNALS),
    "steps.batch",
    "steps.learning_rates",
    *(f"steps.{s}" for s in SIGNALS),
    "after.weights",
    "after.optimizer",
    "after.buffers",
    "after.counters",
    "after.groups",
    "after.schedule",
    "run.completed",
    "run.ranks",
    "run.finite",
    "run.spike",
    "run.dead",
    "roundtrip.state",
)


#: The status before a run that nobody asked for.
MEASURING = "nothing but updates and numbers of later steps fails, so the noise of this job is measured"

_LATER = ("steps.", "after.")
_UPDATES = ("step1.update_norm", "step1.worst_update", "step1.update_direction")
_OTHER_RANKS = re.compile(r"^at\d+\.")


class Judgement(NamedTuple):
    """The checks in order, the bound of each common step for loss, grad_norm and update_norm (`Report.envelope`), the
    noise of the job by check if that was measured, and whether the job draws random numbers that depend on its
    micro-batches. `second` are the checks of the second resume of --fresh by their usual names; `checks` has them, too.
    """

    checks: list[Check]
    envelope: dict[str, list[float]]
    noise: Mapping[str, float] | None
    random: bool
    second: Sequence[Check] = ()

    @property
    def failed(self) -> list[Check]:
        """Return the checks that failed, in order."""
        return [c for c in self.checks if c.verdict == "fail"]

    @property
    def unsure(self) -> bool:
        """Tell whether a measurement of the noise could still clear all failed checks.

        That is so if the noise was not measured, and only numbers of later steps, the state after the last step, or
        updates of the first step are out of bounds. These also fail in a correct job that amplifies every rounding:
        Muon orthogonalises its updates in bf16, and Adagrad makes full-size updates of rounding noise.
        """
        failed = self.failed
        names = (_OTHER_RANKS.sub("", c.name) for c in failed if c.source in ("measured", "given"))
        numbers = [n.startswith(_LATER) or n in _UPDATES for n in names]
        return self.noise is None and bool(failed) and not self.random and len(numbers) == len(failed) and all(numbers)


def judge_runs(traces: Mapping[str, Trace], recorded: Trace | None, profile: str) -> Judgement:
    """Judge the run "candidate" by the run "reference", or else by the recorded reference.

    Args:
        traces: {label of a run: its trace}, with "candidate" and, where they were made, "reference" and "noise" (a
            second run of the reference's job, or of the candidate's if the reference was recorded, which measures the
            noise). With a "repeat", these are the runs of a fresh job (fresh_checks.py).
        recorded: the recorded reference; None if there is none.
        profile: a key of `bounds.PROFILES`.

    Raises:
        UsageError: there is no such profile.
    """
    got, reference = traces["candidate"], traces.get("reference") or recorded
    noise: dict[str, float] | None = None
    if "noise" in traces:
        noise = measure_noise(got if recorded is not None else traces.get("reference", got), traces["noise"])
    if "repeat" in traces:
        return _judge_fresh_job(traces, profile, noise)
    return judge_single_run(reference, got, profile, noise)


def _judge_fresh_job(traces: Mapping[str, Trace], profile: str, noise: Mapping[str, float] | None) -> Judgement:
    """Judge a fresh job: its uninterrupted run, and against that the runs that resume from its save.

    Args:
        traces: {label: trace} of all runs.
        profile: a key of `bounds.PROFILES`.
        noise: what `measure_noise` returned for other micro-batches; None if it was not measured. If two uninterrupted
            runs are not bit-equal, the larger of it and of their deviation counts for each check.
    """
    run, repeat, got = (traces[k] for k in ("reference", "repeat", "candidate"))
    own = fresh_checks.check_fresh_run(run, repeat, got)
    repeats = all(c.verdict != "not comparable" for c in own if c.name == "fresh.repeat")
    if not repeats:
        a, b = (replace(t, steps=t.steps[: len(got.steps)]) for t in (run, repeat))
        found = measure_noise(a, b)
        noise = {n: max(x.get(n, 0.0) for x in (found, noise or {})) for n in found.keys() | (noise or {}).keys()}
    first = judge_single_run(run, got, profile, noise)
    second = judge_single_run(run, traces["second"], profile, noise).checks if "second" in traces else []
    every = [
        *own,
        fresh_checks.check_bit_equality(run, got, repeats),
        *first.checks,
        *(fresh_checks.label_checks_with_ranks(second, traces["second"]) if second else ()),
    ]
    # a round trip is what the whole run is
    checks = [c for c in every if not c.name.endswith("roundtrip.state")]
    return Judgement(checks, first.envelope, noise, first.random, second)


def judge_single_run(
    reference: Trace | None, got: Trace, profile: str = "strict", noise: Mapping[str, float] | None = None
) -> Judgement:
    """Make all checks of one run, and the bounds of its steps.

    Args:
        reference: what the job should have done; None: only what needs no reference is checked.
        got: the run.
        profile: a key of `bounds.PROFILES`.
        noise: what `measure_noise` returned for two runs of this job, which widens bounds. None if it was not measured.

    Raises:
        UsageError: there is no such profile.
    """
    made = [state_checks.check_loaded_state(got, profile), state_checks.check_plausible_state(got, reference)]
    made += [
        *state_checks.check_held_values(reference, got),
        *state_checks.check_reference_loaded(reference, profile),
    ]
    envelope: dict[str, list[float]] = {}
    if reference is not None:
        if profile == "relaxed":
            reference, got = with_stored_dtypes(reference, got)
        limits = table.choose_bounds(profile, reference, got, noise)
        dynamics = StepComparison(reference, got, profile, limits)
        made += state_checks.check_state(reference, got, profile)
        made += state_checks.check_configuration(reference, got)
        made.append(run_checks.check_probe(reference, got, limits["probe.logits"]))
        made += dynamics.checks()
        made += after_checks.check_final_state(dynamics, limits)
        envelope = dynamics.envelope()
    elif (tied := state_checks.check_configured_tying(got)) is not None:
        made.append(tied)
    if (completed := run_checks.check_completed(got)) is not None:
        made.append(completed)
    made += [
        run_checks.check_probe_ranks(got),
        run_checks.check_losses_of_ranks(got),
        run_checks.check_finite(got),
        run_checks.check_spike(reference, got),
        run_checks.check_dead_gradients(reference, got),
        run_checks.check_round_trip(got),
    ]
    made.sort(key=lambda c: ORDER.index(c.name))
    return Judgement(made, envelope, noise, "random" in got.environment)


def measure_noise(a: Trace, b: Trace) -> dict[str, float]:
    """Measure how far two runs of one job differ: {name of a check: largest deviation}.

    What one of them does not have is left out; a deviation that is NaN counts as infinite.
    """
    every: dict[str, list[float]] = {}
    found = run_checks.compare_logits(a, b)
    if not isinstance(found, str):
        every["probe.logits"] = [found[0]]
    dynamics = StepComparison(a, b, "strict", table.choose_bounds("strict", a, b))
    for stage in ("step1", "steps"):
        for signal in SIGNALS:
            every[f"{stage}.{signal}"] = [w.deviation for w in dynamics.measure_deviations(stage, signal)]
    after, _ = after_checks.measure_final_deviations(dynamics)
    every |= {n: list(found.values()) for n, found in after.items()}
    return {n: max(math.inf if math.isnan(x) else x for x in found) for n, found in every.items() if found}
