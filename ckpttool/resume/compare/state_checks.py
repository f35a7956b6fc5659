"""Checks of what the job holds after loading, before it computes anything: its state and its configuration.

Each function gets the traces and returns a `Check`, or the checks of a stage: what differs, how much of it, and the
first difference by name. `loaded`, `plausible` and `own_tied` need no reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ...index.names import step_count
from ...printable import count_noun, list_first
from ..text import describe_changes, parse_fqn, parse_slot
from ..trace.model import LIVE, Trace
from .differences import (
    are_equal_values,
    collect_optimizer_steps,
    collect_options_by_parameter,
    collect_tied_groups,
    describe_lost_options,
    find_lost_options,
    find_missing_and_extra_tensors,
    find_model_config_differences,
    find_option_differences,
    find_shape_and_dtype_differences,
    find_state_obstacle,
    list_differing_tensors,
    list_tensors_not_as_stored,
    list_tensors_with_unequal_copies,
    must_tensor_be_equal,
)
from .side_state_differences import (
    SideStateDiff,
    compare_held_with_files,
    compare_held_with_reference,
    compare_side_state,
    holds_live_state,
    select_side_state,
)
from .verdict import Check

__all__ = [
    "check_configuration",
    "check_configured_tying",
    "check_held_values",
    "check_loaded_state",
    "check_plausible_state",
    "check_reference_loaded",
    "check_state",
]


def check_loaded_state(got: Trace, profile: str) -> Check:
    """Check that the job holds after loading what the checkpoint's files contain.

    The profile "relaxed" allows the job to round tensors to a less precise dtype.
    """
    name = "state.loaded"
    if got.failed is not None:
        return Check.of(name, False, f"the checkpoint could not be loaded into the job: {got.failed}", source="exact")
    if copies := list_tensors_with_unequal_copies(got):
        return Check.exact(name, copies, "", f"copies on several ranks differ, of {count_noun(len(copies), 'tensor')}")
    if (rounded := got.environment.get("rounded")) and profile != "relaxed":
        return Check.exact(
            name, rounded, "", f"the job rounds {count_noun(len(rounded), 'tensor')} to a less precise dtype"
        )
    if not got.stored or not got.state:
        return Check.unknown(
            name, "the files were not read a second time, so what was loaded was not compared with them"
        )
    wrong = list_tensors_not_as_stored(got)
    good = f"the job holds what the files contain, in all {len(got.stored)} tensors"
    return Check.exact(
        name, wrong, good, f"the job does not hold what the files contain, in {count_noun(len(wrong), 'tensor')}"
    )


def check_reference_loaded(reference: Trace | None, profile: str) -> list[Check]:
    """Return a check that the reference's job holds what its files contain; [] if they were not read a second time."""
    if reference is None or not reference.stored:
        return []
    found = check_loaded_state(reference, profile)
    return [replace(found, name="state.reference", text=f"of the reference: {found.text}")]


def check_held_values(reference: Trace | None, got: Trace) -> list[Check]:
    """Check the values that the scheduler and the extra states of modules hold after loading.

    They must equal the files, and, if another reader loaded the reference, what the reference's job holds, including
    the types of keys. [] if the job has no such values.
    """
    name = "state.values"
    if got.failed is not None:
        return []
    problems, compared = compare_held_with_files(got)
    if reference is not None and reference.failed is None:
        problems += compare_held_with_reference(reference, got)
        compared = max(compared, len(reference.held))
    if not compared and not problems:
        return []
    good = f"the job holds the {count_noun(compared, 'value')} of scheduler and extra states that were stored"
    return [Check.exact(name, problems, good, f"{count_noun(len(problems), 'value')} not as stored")]


def check_plausible_state(got: Trace, reference: Trace | None = None) -> Check:
    """Check for faults that a state shows by itself, such as an optimizer whose steps are all 0.

    A fault that the reference shows at the same step as well does not count: parts of a module may have been frozen for
    some steps. `reference` is None if there is none.
    """
    name = "state.plausible"
    if got.failed is not None or (not got.state and not got.scalars):
        return Check.unknown(name, "the run did not record what the job held")
    problems = _list_implausible_facts(got)
    if problems and reference is not None and reference.failed is None and reference.start == got.start:
        theirs = set(_list_implausible_facts(reference))
        problems = [p for p in problems if p not in theirs]
    return Check.exact(
        name, problems, "optimizer steps, moments and scalars are plausible", "no training produces this"
    )


def _list_implausible_facts(got: Trace) -> list[str]:
    """Return a text for each fact about a state that no training produces.

    Parameters that never got a gradient have no optimizer state, and those that got fewer gradients have smaller steps;
    neither counts as such a fact.
    """
    problems = [f"{n} is {v}" for n, v in got.scalars.items() if n.startswith("optim.") and not math.isfinite(v)]
    trained = _count_trained_steps(got)
    steps = {n: v for n, v in collect_optimizer_steps(got).items() if math.isfinite(v)}
    if trained > 0:
        zeros = [n for n, v in steps.items() if v == 0]
        if zeros and len(zeros) == len(steps):
            problems.append(
                f"the optimizer's step is 0 on all {count_noun(len(steps), 'tensor')}, after {trained} steps"
            )
        elif zeros:
            problems += [f"optim.state.{n}.step is 0, after {trained} steps" for n in zeros]
        moments = any(parse_slot(n) != "weights" for n in got.state) or bool(steps)
        adaptive = any("betas" in g and g.get("params") for g in got.groups)
        if adaptive and not moments:
            problems.append(f"the optimizer has param groups but no moments, after {trained} steps")
    for module, found in _group_steps_by_module(steps).items():
        apart = sorted(set(found.values()))
        if 0 not in apart and len(apart) > 1:
            few = " and ".join(f"{v:g}" for v in apart[:3])
            problems.append(f"{module} has parameters with optimizer steps {few}")
    slots: dict[str, set[str]] = {}
    for n in got.state:
        slots.setdefault(parse_slot(n), set()).add(parse_fqn(n))
    if "exp_avg" in slots and "exp_avg_sq" in slots:
        problems += [
            f"{n} has only one of exp_avg and exp_avg_sq" for n in sorted(slots["exp_avg"] ^ slots["exp_avg_sq"])
        ]
    return problems


def _count_trained_steps(trace: Trace) -> int:
    """Return how many steps had been trained when the checkpoint was saved, by its counter or else by the start of
    the run."""
    count = step_count(trace.values.get)
    return trace.start if count is None else count


def _group_steps_by_module(steps: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Group the step counts of the optimizer, {FQN: step}, by module within a layer: {"layers.1.self_attn": {FQN:
    step}}.

    The parameters of such a module train together. Whole layers are not grouped, nor are lists of experts: an expert
    without tokens gets no gradient.
    """
    out: dict[str, dict[str, float]] = {}
    for fqn, step in steps.items():
        parts = fqn.split(".")
        if (
            len(parts) >= 4
            and any(p.isdecimal() for p in parts[:-2])
            and not parts[-3].isdecimal()
            and not parts[-2].isdecimal()
        ):
            out.setdefault(".".join(parts[:-2]), {})[fqn] = step
    return out


def check_state(reference: Trace, got: Trace, profile: str) -> list[Check]:
    """Check names, shapes and dtypes, fingerprints, and one-element tensors of the loaded state against the reference.

    Returns:
        The checks "state.names", "state.shapes", "state.digests" and "state.scalars".
    """
    names = ("state.names", "state.shapes", "state.digests", "state.scalars")
    why = find_state_obstacle(reference, got)
    if why is not None:
        return [Check.unknown(n, why) for n in names]
    out = []
    if reference.state and got.state:
        missing, extra = find_missing_and_extra_tensors(reference, got)
        parts = [f"{count_noun(len(missing), 'tensor')} missing"] if missing else []
        parts += [f"{len(extra)} that the reference does not have"] if extra else []
        out.append(Check.exact(names[0], missing + extra, f"the same {len(got.state)} tensors", ", ".join(parts)))
    else:
        out.append(Check.unknown(names[0], "the run or the reference does not list its tensors"))
    if got.failed is not None:
        return out + [Check.unknown(n, "the checkpoint could not be loaded") for n in names[1:]]
    common = [n for n in reference.state if n in got.state and must_tensor_be_equal(n)]
    other_shapes, other_dtypes = find_shape_and_dtype_differences(reference, got)
    shapes, dtypes = describe_changes(other_shapes, lambda shape: str(list(shape))), describe_changes(other_dtypes, str)
    rounded: list[str] = got.environment.get("as_stored") or []
    unknown: list[str] = got.environment.get("not_rounded") or []
    good = f"the same shapes and dtypes in all {len(common)} tensors"
    if rounded or unknown:
        what = count_noun(len(rounded) + len(unknown), "tensor")
        good = (
            f"the same shapes; {what} of another dtype in the files, as the profile allows: "
            f"{list_first([*rounded, *unknown])}"
        )
    if not common:
        out.append(Check.unknown(names[1], "run and reference have no tensor in common"))
    else:
        parts = [f"{count_noun(len(shapes), 'tensor')} with another shape"] if shapes else []
        parts += [f"{count_noun(len(dtypes), 'tensor')} with another dtype"] if dtypes else []
        out.append(Check.exact(names[1], shapes + dtypes, good, ", ".join(parts)))
    same = [n for n in common if n not in other_shapes and n not in other_dtypes]
    compared = [n for n in same if reference.state[n][2] and got.state[n][2]]
    if compared:
        wrong = list_differing_tensors(reference, got)
        good = f"equal bytes in all {len(compared)} tensors"
        if rounded:
            good += f"; {len(rounded)} of them are exactly the reference's rounded to {got.state[rounded[0]][0]}"
        if unknown:
            good += f"; {len(unknown)} of another dtype are not compared, since a recording has no rounded ones"
        verb = "has" if len(wrong) == 1 else "have"
        bad = f"{len(wrong)} of {count_noun(len(compared), 'tensor')} {verb} different bytes"
        out.append(Check.exact(names[2], wrong, good, bad))
    else:
        out.append(Check.unknown(names[2], "no tensor has a fingerprint on both sides"))
    both = [
        n for n in reference.scalars if n in got.scalars and must_tensor_be_equal(n) and n not in {*rounded, *unknown}
    ]
    two = {n: (reference.scalars[n], got.scalars[n]) for n in both}
    wrong = describe_changes({n: (a, b) for n, (a, b) in two.items() if not are_equal_values(float(a), float(b))})
    if both:
        good = f"equal values of all {count_noun(len(both), 'tensor')} with one element"
        bad = f"{count_noun(len(wrong), 'tensor')} with one element {'differs' if len(wrong) == 1 else 'differ'}"
        out.append(Check.exact(names[3], wrong, good, bad))
    else:
        out.append(Check.unknown(names[3], "no tensor with one element is known on both sides"))
    return out


# -------------------------------------------------------------------------------------------------------- configuration


def check_configuration(reference: Trace, got: Trace) -> list[Check]:
    """Check param groups, scheduler, other values, ties and the model's configuration against the reference."""
    if got.failed is not None:
        names = ("groups", "scheduler", *_WORDS, "values", "tied", "model")
        return [Check.unknown(f"config.{n}", "the checkpoint could not be loaded") for n in names]
    out = [_check_param_groups(reference, got), _check_scheduler(reference, got)]
    out += [_check_component(reference, got, n) for n in _WORDS]
    return [
        *out,
        _check_other_values(reference, got),
        _check_tied_parameters(reference, got),
        _check_model_config(reference, got),
    ]


#: Components that have a check of their own, in words.
_WORDS = {"rng": "random states", "dataloader": "the dataloader's state", "scaler": "the grad scaler's state"}


def _check_param_groups(reference: Trace, got: Trace) -> Check:
    """Check the options of each parameter's group, and which parameters are in the optimizer."""
    name = "config.groups"
    theirs, ours = collect_options_by_parameter(reference), collect_options_by_parameter(got)
    if not theirs or not ours:
        who = "the run" if theirs else "the reference"
        return Check.unknown(name, f"{who} did not record its param groups (Recorder.state does)")
    if reference.start != got.start:
        return Check.unknown(name, f"the reference's param groups are those of step {reference.start}")
    found, missing, extra = find_option_differences(reference, got)
    lost, _ = find_lost_options(reference, got)
    problems = [describe_lost_options(got, lost)] if lost else []
    for key, where in found.items():
        first, (expected, value) = next(iter(where.items()))
        problems.append(
            f"{key} is {value!r} and was {expected!r} for {count_noun(len(where), 'parameter')}, first {first}"
        )
    if missing:
        problems.append(f"{count_noun(len(missing), 'parameter')} not in the optimizer, first {missing[0]}")
    if extra:
        problems.append(f"{count_noun(len(extra), 'parameter')} only in this optimizer, first {extra[0]}")
    good = f"the same options for all {len(ours)} parameters"
    out = Check.exact(name, problems, good, "param groups differ")
    if problems:
        wrong = (n for where in (*lost.values(), *found.values()) for n in where)
        out.where = next(wrong, None) or [*missing, *extra][0]
    return out


def _check_scheduler(reference: Trace, got: Trace) -> Check:
    """Check that the scheduler's stored state equals the reference's exactly; "not comparable" if there is nothing to
    compare."""
    name = "config.scheduler"
    found = compare_side_state(reference, got, "scheduler")
    if found.is_lost:
        return Check.of(name, False, "the checkpoint has no scheduler state, but the reference has", 1, 0, "exact")
    if not found.compared and not found.missing:
        return Check.unknown(name, _explain_not_compared(reference, got, "scheduler", "a scheduler's state"))
    problems = found.changes
    if problems or not found.missing:
        return _mention_extra(
            Check.exact(name, problems, "the same scheduler state", "the scheduler state differs"), found
        )
    text = f"the scheduler's {list_first(found.missing)} is missing"
    return Check.of(name, False, text, len(found.missing), 0, "exact")


def _check_component(reference: Trace, got: Trace, component: str) -> Check:
    """Check a component that has a check of its own: "rng", "dataloader" or "scaler"."""
    name, what = f"config.{component}", _WORDS[component]
    found = compare_side_state(reference, got, component)
    if found.is_lost:
        if files := [n for n, what in got.unread if what == component]:
            return Check.unknown(name, f"{what} may be in {list_first(files)}, which was not read")
        text = f"the checkpoint has lost {what}: {list_first(found.missing)}"
        return Check.of(name, False, text, len(found.missing), 0, "exact")
    if not found.compared and not found.missing:
        return Check.unknown(name, _explain_not_compared(reference, got, component, what))
    good = f"{what}: the same {count_noun(found.compared, 'value')}"
    return _mention_extra(Check.exact(name, found.problems, good, f"{what} differ"), found)


def _explain_not_compared(reference: Trace, got: Trace, component: str, what: str) -> str:
    """Return why nothing of a component was compared, as a text; `what` is the component in words."""
    if holds_live_state(reference):
        if reference.start != got.start:
            return f"the reference recorded {what} at step {reference.start}"
        if component == "rng" and reference.generators:
            return (
                "the checkpoint holds no random states, so that a job resumed from it draws other numbers than the "
                "recorded one"
            )
        if reference.layout == LIVE and component not in reference.unrecorded:
            return f"build() gives nothing that has {what}"
        why = reference.unrecorded.get(component)
        return f"the reference did not record {what}" + (f" ({why})" if why else "")
    theirs, ours = select_side_state(reference, component), select_side_state(got, component)
    if not theirs:
        return f"the original checkpoint does not hold {what}" + ("" if ours else ", and neither does this one")
    return f"{what} cannot be compared: {list_first(theirs)} are objects of other classes"


def _mention_extra(check: Check, found: SideStateDiff) -> Check:
    """Append to a check's text the values that only the run has, if there are any, and return the check."""
    if found.extra:
        check.text += f"; only here: {list_first(found.extra)}"
    return check


def _check_other_values(reference: Trace, got: Trace) -> Check:
    """Check the trainer's counters, other stored values, tensors outside the job, and the bound of gradient
    clipping."""
    name = "config.values"
    problems, extra, compared = list[str](), list[str](), 0
    for component in ("trainer", "extra", "model", "optim"):
        found = compare_side_state(reference, got, component)
        problems += found.problems
        extra += found.extra
        compared += found.compared
    if reference.clip is not None:
        compared += 1
        if got.clip != reference.clip:
            problems.append(f"clip is {got.clip!r} and was {reference.clip!r}")
    if not compared and not problems:
        return Check.unknown(name, "no counter or other value is known on both sides")
    bad = f"{count_noun(len(problems), 'value')} differing"
    out = Check.exact(name, problems, f"the same {count_noun(compared, 'value')}", bad)
    return _mention_extra(out, SideStateDiff(extra=extra))


def check_configured_tying(got: Trace) -> Check | None:
    """Check that the output head is tied to the embedding if the model's configuration says so.

    None if it does not say so, or if there is no head.
    """
    heads = [n for n in got.state if n.startswith("model.") and n.endswith("lm_head.weight")]
    if got.config is None or got.config.get("tie_word_embeddings") is not True or not heads:
        return None
    if got.tied:
        return Check.of("config.tied", True, "tied as the configuration says", 0, 0, "exact")
    text = "the configuration has tie_word_embeddings, but the job trains the head and the embedding separately"
    return Check.of("config.tied", False, text, 1, 0, "exact", heads[0].removeprefix("model."))


def _check_tied_parameters(reference: Trace, got: Trace) -> Check:
    """Check that the same parameters are tied on both sides."""
    name = "config.tied"
    own = check_configured_tying(got)
    if own is not None and own.verdict == "fail":
        return own
    if not reference.tied and not reference.state and reference.parameters is None:
        return own or Check.unknown(
            name, "the reference did not record which parameters are tied (pass the model to Recorder)"
        )
    theirs, ours = collect_tied_groups(reference), collect_tied_groups(got)
    problems = [f"{' and '.join(sorted(g))} were tied and are not" for g in sorted(theirs - ours, key=sorted)]
    problems += [f"{' and '.join(sorted(g))} are tied and were not" for g in sorted(ours - theirs, key=sorted)]
    good = f"the same {count_noun(len(ours), 'tied parameter')}" if ours else "no parameter is tied on either side"
    return Check.exact(name, problems, good, "tied parameters differ")


def _check_model_config(reference: Trace, got: Trace) -> Check:
    """Check that the model's configuration is the reference's."""
    name = "config.model"
    if reference.config is None or got.config is None:
        who = "the reference" if reference.config is None else "the run"
        return Check.unknown(name, f"{who} has no model configuration")
    found = find_model_config_differences(reference.config, got.config)
    return Check.exact(
        name, describe_changes(found), "the same configuration of the model", "the model's configuration differs"
    )
