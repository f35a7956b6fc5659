"""Checks of what the job holds after the last step, and of the learning rates that follow.

    check_final_state(dynamics, limits)     a Check for each of "after.weights", "after.optimizer", ...

Tensors are compared by their sketches: weights relative to how far the steps moved them, all others relative to
themselves. Those of two runs are bit-equal if their fingerprints are. Where both sides had the same ranks and every
number of every step was bit-equal, tensors must be, too.
Buffers that the forward pass changes, such as the running statistics of BatchNorm, depend on which rank had which rows,
in which order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ...printable import count_noun, list_first
from ..text import is_step_counter
from ..trace.model import Trace
from ..trace.sketches import decode_sketches, estimate_sketch_distance
from ..trace.state_after import decode_rates
from .bounds import AFTER, SIGNALS, Bound
from .differences import are_equal_values, compute_relative_deviation, find_option_differences, pair_param_groups
from .dynamics import StepComparison
from .side_state_differences import is_recording
from .verdict import Check

__all__ = ["check_final_state", "measure_final_deviations"]

#: What each of the checks `bounds.AFTER` compares.
_WORDS = {"after.weights": "weight", "after.optimizer": "tensor of the optimizer", "after.buffers": "buffer"}

#: Sums of float64 in another order differ by less than this.
_EQUAL = 1e-12

#: The distance of a number to the next, relative to it at most; that of a dtype that is not listed is bfloat16's.
_SPACING = {"float64": 2**-52, "float32": 2**-23, "float16": 2**-10}


def _find_final_state_obstacle(reference: Trace, got: Trace) -> str | None:
    """Return why the states after the last step cannot be compared, as a text for the report; None if they can be."""
    if not got.after.get("sketches"):
        return "the run did not record what it held after the last step"
    step = got.after["step"]
    if not reference.after.get("sketches") or reference.after["step"] != step:
        if is_recording(reference):
            return f"the reference did not record what the job held after step {step} (Recorder.state({step}) does)"
        return "the reference run did not record what it held after the last step"
    return None


def _have_same_row_assignment(reference: Trace, got: Trace) -> bool:
    """Tell whether every rank is known to have processed the same rows, in the same order and micro-batches, on both
    sides."""
    if not _have_same_mesh(reference, got):
        return False
    sizes = [(t.micro_batch, t.global_batch) for t in (reference, got)]
    if any(None not in pair and pair[0] != pair[1] for pair in zip(*sizes, strict=True)):
        return False
    if not is_recording(reference):
        return True
    theirs = {s.step: s.rows for s in reference.steps}
    every = [(theirs.get(s.step), s.rows) for s in got.steps]
    if all(a and b for a, b in every):
        return all(a == b for a, b in every)
    return got.world_size == 1 or got.micro_batch == (got.global_batch or 0) // (got.world_size or 1)


def _have_same_mesh(reference: Trace, got: Trace) -> bool:
    """Tell whether both sides had the same world size and mesh; only world sizes count if the reference has no mesh."""
    return reference.world_size == got.world_size and (not reference.mesh or reference.mesh == got.mesh)


def _are_steps_bit_equal(dynamics: StepComparison) -> bool:
    """Tell whether both sides had the same mesh, and every signal of `SIGNALS` was bit-equal in every step of the
    run."""
    if len(dynamics.pairs) != len(dynamics.got.steps) or not _have_same_mesh(dynamics.reference, dynamics.got):
        return False
    for signal in SIGNALS:
        found = [w for stage in ("step1", "steps") for w in dynamics.measure_deviations(stage, signal)]
        if len(found) != len(dynamics.pairs) or any(w.deviation != 0 or w.left_out for w in found):
            return False
    return True


def measure_final_deviations(
    dynamics: StepComparison, exact: bool = False
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Measure how far tensors deviate from the reference after the last step.

    Weights and moments of tensors whose gradient is rounding noise are left out.

    Args:
        dynamics: the two traces, step by step.
        exact: count every difference; if False, the rounding of weights to their dtype in each step is no deviation.

    Returns:
        ({name of a check, a key of `AFTER`: {canonical name: deviation}}, names of buffers that differ but are not
        judged, since they depend on which rank had which rows). Weights deviate relative to the sum of their updates,
        other tensors relative to their norm in the reference. The inner dicts are empty if the states cannot be
        compared.
    """
    reference, got = dynamics.reference, dynamics.got
    out: dict[str, dict[str, float]] = {n: {} for n in AFTER}
    loose: list[str] = []
    if _find_final_state_obstacle(reference, got) or dynamics.numbers_obstacle("step1"):
        return out, loose
    noise, updates = dynamics.noise_tensors(), [a.updates or b.updates for a, b in dynamics.pairs]
    tied = [*reference.tied, *got.tied]
    theirs, ours = reference.after, got.after
    buffers = {*theirs["buffers"], *ours["buffers"]}
    for n, (dtype, text) in ours["sketches"].items():
        a, b = (decode_sketches(t, 1, "f8") for t in (theirs["sketches"].get(n, ("", ""))[1], text))
        fqn = n.removeprefix("model.").removeprefix("optim.state.")
        if a is None or b is None or is_step_counter(n) or any(fqn == m or fqn.startswith(f"{m}.") for m in noise):
            continue
        size, apart = estimate_sketch_distance(a, 0 * a), estimate_sketch_distance(a, b)
        same = _has_equal_final_bits(n, dynamics)
        apart = 0.0 if same or apart <= _EQUAL * size else apart
        if exact and same is False and n not in buffers:  # a sketch may hide the last bits
            apart = max(apart, math.ulp(size))
        if n in buffers:
            if apart and not _must_buffer_be_equal(n, dynamics):
                loose.append(n)
            else:
                out["after.buffers"][n] = _divide_by_size(apart, size)
        elif n.startswith("optim."):
            out["after.optimizer"][n] = _divide_by_size(apart, size)
        elif all(updates):
            names = next((group for group in tied if fqn in group), [fqn])
            moved = sum(max(of.get(name, 0.0) for name in names) for of in updates)
            rounded = moved and not exact
            rounding = _SPACING.get(dtype, 2**-7) * size * math.sqrt(len(updates)) if rounded else 0.0
            out["after.weights"][n] = _divide_by_size(max(0.0, apart - rounding), moved)
    return out, loose


def _has_equal_final_bits(name: str, dynamics: StepComparison) -> bool | None:
    """Tell whether a tensor has the same bits on both sides after the last step, by its fingerprints.

    None if a side has no fingerprint of it (a recording has none), or if its copies differ between ranks.
    """
    sides = (dynamics.reference, dynamics.got)
    if any(name not in t.final or name in t.variants for t in sides):
        return None
    return sides[0].final[name] == sides[1].final[name]


def _divide_by_size(apart: float, size: float) -> float:
    """Return `apart` / `size`: 0 if `apart` is 0, infinite if only `size` is 0, NaN if one of them is NaN."""
    return 0.0 if apart == 0 else apart / size if size else math.inf


def _must_buffer_be_equal(name: str, dynamics: StepComparison) -> bool:
    """Tell whether a buffer that differs after the last step should have been equal on both sides.

    This holds if every rank processed the same rows on both sides; for a buffer whose copies differ between ranks only
    if it was also equal after loading. Otherwise it holds only for a floating-point buffer that several ranks hold
    alike: it cannot depend on which rank had which rows. An integer that the job leaves unchanged after loading is not
    judged, since the training loop may count it.
    """
    theirs, ours = dynamics.reference.after, dynamics.got.after
    floating = "float" in ours["sketches"][name][0]
    if name in {*theirs["apart"], *ours["apart"]}:
        # a recorded job went on with a copy for each rank, and a checkpoint has one of them
        held = [t.state.get(name) for t in (dynamics.reference, dynamics.got)]
        return held[0] == held[1] and _have_same_row_assignment(dynamics.reference, dynamics.got)
    idle = ours.get("loaded", {}).get(name) == ours["sketches"][name][1]
    if idle and not floating:
        return False
    if _have_same_row_assignment(dynamics.reference, dynamics.got):
        return True
    return floating and max(dynamics.reference.world_size or 1, dynamics.got.world_size or 1) > 1


def check_final_state(dynamics: StepComparison, limits: Mapping[str, Bound]) -> list[Check]:
    """Check the state after the last step: weights, moments, buffers, step counters, param groups, later learning
    rates.

    Args:
        dynamics: the two traces, step by step.
        limits: {name of a check: Bound}, for the names in `AFTER`.

    Returns:
        One check for each name in `AFTER`, "after.counters", "after.groups" and "after.schedule".
    """
    reference, got = dynamics.reference, dynamics.got
    names = (*AFTER, "after.counters", "after.groups")
    why = _find_final_state_obstacle(reference, got) or dynamics.numbers_obstacle("step1")
    if why is not None:
        out = [Check.unknown(n, why) for n in names]
    else:
        exact, steps = _are_steps_bit_equal(dynamics), len(dynamics.pairs)
        every, loose = measure_final_deviations(dynamics, exact)
        out = [_check_tensor_deviations(n, every[n], limits[n], dynamics, exact) for n in AFTER]
        if got.environment.get("as_stored") or got.environment.get("not_rounded"):
            why = "tensors of another dtype in the files, as the profile allows, stay rounded"
            out = [Check.unknown(n, why) for n in AFTER]
        if loose and not any(c.name == "after.buffers" and c.verdict == "fail" for c in out):
            text = (
                f"{count_noun(len(loose), 'buffer')} that the two sides hold differently after the last step, since "
                f"ranks had other rows or only the training loop changes them: {list_first(loose)}"
            )
            out = [*(c for c in out if c.name != "after.buffers"), Check.unknown("after.buffers", text)]
        out += [
            _check_step_counters(reference, got),
            _check_group_options(reference, got, limits["after.optimizer"], steps),
        ]
    return [*out, _check_schedule(reference, got)]


def _check_tensor_deviations(
    name: str, found: Mapping[str, float], bound: Bound, dynamics: StepComparison, exact: bool
) -> Check:
    """Check the deviations of tensors after the last step.

    Args:
        name: of the check, a key of `AFTER`.
        found: {canonical name: deviation} for that check.
        bound: the bound of the deviations.
        dynamics: the two traces, step by step.
        exact: require deviations of 0 instead of the bound.
    """
    if why := None if exact else bound.obstacle():
        return Check.unknown(name, why)
    if not found and name == "after.weights":
        return Check.unknown(name, "no side measured updates, by which weights are judged")
    if not found:
        return Check.of(name, True, f"no {_WORDS[name]} is compared after the last step", 0, 0, "exact")
    worst = max(found, key=lambda n: math.inf if math.isnan(found[n]) else found[n])
    most = 0.0 if exact else bound.at(0.0, len(dynamics.pairs))
    what = count_noun(len(found), _WORDS[name]).replace("tensor of the optimizers", "tensors of the optimizer")
    if found[worst] == 0:
        how = "bit-equal" if all(_has_equal_final_bits(n, dynamics) for n in found) else "equal, by sketches,"
        return Check.of(name, True, f"{what}: {how} after the last step", 0, most, "exact" if exact else bound.source)
    of = "how far the steps moved it" if name == "after.weights" else "its norm"
    text = f"{worst} deviates by {found[worst]:.2g} of {of} after the last step"
    if (more := sum(not x <= most for x in found.values()) - 1) > 0:
        text += f", and {more} more of the {what}"
    if exact:
        text += ", though all numbers of the steps are bit-equal"
    source = "exact" if exact else bound.source
    return Check.of(name, found[worst] <= most, text, found[worst], most, source, worst)


def _check_step_counters(reference: Trace, got: Trace) -> Check:
    """Check that the optimizer's step counters are equal on both sides after the last step."""
    name, theirs, ours = "after.counters", reference.after["scalars"], got.after["scalars"]
    known = [n for n in theirs if n in ours and is_step_counter(n)]
    wrong = [f"{n} is {ours[n]:g} and was {theirs[n]:g}" for n in known if ours[n] != theirs[n]]
    good = f"the same {count_noun(len(known), 'step count')} of the optimizer after the last step"
    return Check.exact(name, wrong, good, "step counts of the optimizer differ after the last step")


def _check_group_options(reference: Trace, got: Trace, bound: Bound, steps: int) -> Check:
    """Check that options of param groups that were equal after loading are equal after the last step.

    Learning rates are left out, since those in the groups are for a step that was not run. Floating-point options may
    deviate by `bound`, since an optimizer may compute them from gradients. `steps` is the number of common steps.
    """
    name = "after.groups"
    sides = [replace(t, groups=t.after["groups"]) for t in (reference, got)]
    if not all(t.groups for t in sides):
        return Check.unknown(name, "one side has no param groups after the last step")
    before, _, _ = find_option_differences(reference, got)
    most = bound.at(0.0, steps)
    found, _, _ = find_option_differences(*sides)
    problems = []
    for key, where in found.items():
        for fqn, (a, b) in where.items():
            computed = isinstance(a, float) and isinstance(b, float) and compute_relative_deviation(b, a) <= most
            if key == "lr" or fqn in before.get(key, ()) or computed:
                continue
            problems.append(f"{key} is {b!r} and was {a!r} for {fqn}")
            break
    good = "the same options of param groups after the last step"
    return Check.exact(name, problems, good, "options of param groups differ after the last step")


def _check_schedule(reference: Trace, got: Trace) -> Check:
    """Check that the schedulers give the same learning rates for the steps after the last one."""
    name = "after.schedule"
    if reference.scheduler is None and got.scheduler is None and "scheduler" not in reference.unrecorded:
        return Check.of(name, True, "no scheduler on either side", 0, 0, "exact")
    for trace, who in ((got, "this job"), (reference, "the reference")):
        if not trace.schedule.get("curves"):
            why = trace.schedule.get("skipped") or trace.unrecorded.get("schedule")
            why = why or f"{who} has no scheduler that was stepped ahead"
            return Check.unknown(name, f"rates of later steps: {why}")
    theirs, ours = (decode_rates(t.schedule) for t in (reference, got))
    begin = max(reference.schedule["first"], got.schedule["first"])
    rates = [
        [column[begin - t.schedule["first"] :] for column in columns]
        for t, columns in ((reference, theirs), (got, ours))
    ]
    lengths = [min(map(len, side), default=0) for side in rates]
    if not min(lengths):
        return Check.unknown(name, f"no rates of steps after {begin - 1} are known on both sides")
    pairs = pair_param_groups(reference, got, len(rates[0]), len(rates[1]))
    if not pairs:
        return Check.unknown(name, "rates of later steps: the param groups of the two sides cannot be matched")
    for k in range(min(lengths)):
        for label, i, j in pairs:
            a, b = rates[0][i][k], rates[1][j][k]
            if not are_equal_values(a, b):
                text = f"the learning rate will be {b!r} and was to be {a!r}, from step {begin + k} on, {label}"
                number = compute_relative_deviation(b, a)
                return Check.of(name, False, text, number, 0, "exact", f"step {begin + k}, {label}")
    stops = [t.schedule.get("stopped") for t in (reference, got)]
    if lengths[0] != lengths[1] and any(stop and lengths[k] < lengths[1 - k] for k, stop in enumerate(stops)):
        k = lengths.index(min(lengths))
        who = ("the reference's", "this job's")[k]
        text = f"{who} scheduler ends after step {begin + lengths[k] - 1} ({stops[k]}), the other goes on"
        return Check.of(name, False, text, source="exact", where=f"step {begin + lengths[k]}")
    return Check.of(
        name, True, f"the same learning rates in the next {count_noun(min(lengths), 'step')}", 0, 0, "exact"
    )
