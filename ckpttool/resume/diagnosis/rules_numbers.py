"""Rules about numbers: of the state itself, of steps, of ranks, of the round trip.

Each rule gets a `Context`. What differs first in a step narrows down the cause: logits and loss depend on the weights
and the batch, gradients also on how ranks are reduced, updates on the optimizer, later steps on the rest. So a rule
says nothing if an earlier part of the step is already wrong. Norms of single tensors tell which tensors are affected.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from statistics import median

from ...engine.tensor_faults.tensor_kinds import TensorKind
from ...printable import count_noun, list_first
from ..compare.differences import (
    collect_optimizer_steps,
    collect_options_by_parameter,
    compute_relative_deviation,
    find_first_common_step,
    find_non_finite_values,
    find_package_differences,
    measure_tensor_deviations,
)
from ..text import describe_selection, parse_fqn, to_readable_name
from ..trace.model import Step
from .context import Context
from .kinds import CauseKind

__all__ = [
    "explain_final_state",
    "explain_gradient_scale",
    "explain_implausible_state",
    "explain_loss_ranks",
    "explain_not_finite",
    "explain_probe_ranks",
    "explain_round_trip",
    "explain_run_failures",
    "explain_step_numbers",
]


#: Checks that fail where gradients of the first step differ, and where its updates do.
_GRADIENTS = frozenset(("step1.grad_norm", "step1.worst_grad", "step1.grad_direction"))
_UPDATES = frozenset(("step1.update_norm", "step1.worst_update", "step1.update_direction"))

#: A deviation of the loss up to so many times that of the logits follows from it.
_ALIKE = 10.0


def explain_implausible_state(context: Context) -> None:
    """Add a cause for a state that no training produces, if that check failed and no earlier cause is about the
    optimizer."""
    if "state.plausible" not in context.failed or "optimizer" in context.explained:
        return
    got, text = context.got, context.failed["state.plausible"].text
    steps = collect_optimizer_steps(got)
    if steps and all(v == 0 for v in steps.values()):
        moments = any(n.endswith(".exp_avg") for n in got.state)
        also = ": the moments were restored, the step was not" if moments else ""
        context.add(CauseKind.STEP_RESET, f"the optimizer's step is 0 on all tensors{also}", [text])
    elif "no moments" in text:
        context.add(CauseKind.OPTIMIZER_MISSING, "the checkpoint has no optimizer state", [text])
    else:
        context.add(CauseKind.STATE_ODD, f"the state is not plausible: {text}")


def explain_not_finite(context: Context) -> None:
    """Add a cause for the first step with NaN or infinity, if there is one."""
    if "run.finite" not in context.failed:
        return
    step, found = next((s, found) for s in context.got.steps if (found := list(find_non_finite_values(s))))
    tensors = [w.partition(" of ")[2] for w, _ in found if " of " in w]
    grads = all(math.isfinite(v) for v in step.grads.values()) and math.isfinite(step.loss)
    text = f"numbers are not finite from step {step.step} on, first {found[0][0]} ({found[0][1]})"
    if grads and any(not math.isfinite(v) for v in step.updates.values()):
        bad = [n for n, v in step.updates.items() if not math.isfinite(v)]
        which = describe_selection(bad, list(step.updates), "tensors")
        text = (
            f"the update of {which} is not finite in step {step.step}, though loss and gradients are: its moments hold "
            "NaN, or negative squares"
        )
        tensors = bad
        context.explained.add("optimizer")
    elif not math.isfinite(step.loss) and step is context.got.steps[0]:
        context.explained.add("weights")
        text += ": the weights hold NaN or infinity, or numbers that overflow"
    context.add(TensorKind.NOT_FINITE, text, context.failed_texts("run.finite"), tensors, explains=())


def explain_gradient_scale(context: Context) -> None:
    """Add a cause if the grad norm is an integer multiple or fraction of the reference's, while the loss is the
    same."""
    reference = context.expected
    first = find_first_common_step(reference, context.got)
    if "step1.grad_norm" not in context.failed or not context.passed("step1.loss") or first is None:
        return
    a, b = first
    if not a.grad_norm or not b.grad_norm:
        return
    ratio = b.grad_norm / a.grad_norm
    times = max(ratio, 1 / ratio)
    n = round(times)
    if n < 2 or abs(times / n - 1) > 1e-3:
        return
    every = [b.grads[k] / a.grads[k] for k in a.grads if a.grads[k] and k in b.grads]
    if every and compute_relative_deviation(median(every), ratio) > 0.05:
        return
    whose = ""
    if n == context.got.world_size:
        whose = " (its number of ranks)"
    elif n == reference.world_size:
        whose = " (the reference's number of ranks)"
    if ratio > 1:
        text = f"gradients are {n} times those of the reference{whose}: summed over ranks instead of averaged"
    else:
        text = f"gradients are 1/{n} of those of the reference{whose}: divided once too often, or summed there"
    context.explained.update(("gradients", "optimizer"))
    context.add(CauseKind.GRADIENT_SCALE, text, context.failed_texts("step1.grad_norm"))


def explain_step_numbers(context: Context) -> None:
    """Add causes that follow from the numbers of the steps alone, if no earlier cause explains these.

    Differences between the two environments are added to their evidence.
    """
    before = len(context.out)
    _explain_deviating_numbers(context)
    for cause in context.out[before:]:
        cause.evidence.extend(_describe_environment_changes(context))


def _explain_deviating_numbers(context: Context) -> None:
    """Add causes for logits, losses, gradients and updates that deviate, without those that earlier causes explain."""
    first = find_first_common_step(context.expected, context.got)
    weights, data = "weights" in context.explained, "data" in context.explained
    same = context.passed("state.digests") and context.passed("state.names")
    if "probe.logits" in context.failed and not weights:
        evidence = context.failed_texts("probe.logits", "step1.loss")
        if same:
            text = (
                "the weights are equal and the logits are not: the model's configuration differs (rope theta, eps "
                "of the norms), or other kernels compute it"
            )
            context.add(CauseKind.MODEL_CONFIGURATION, text, evidence)
        else:
            context.add(
                CauseKind.WEIGHTS, "the logits differ before any step: weights, or the model's configuration", evidence
            )
        weights = True
        context.explained.add("weights")
    elif "step1.loss" in context.failed and not weights and not data:
        evidence = context.failed_texts("step1.loss", "step1.grad_norm")
        if context.expected.dropout or context.got.dropout:
            _explain_dropout(context, evidence)
        elif same and context.passed("step1.batch") and (apart := _find_small_logit_deviation(context)):
            text = (
                f"weights and batch are equal, the logits deviate by {apart:.2g}, which is within their bound, and the "
                "loss deviates about as much: the model's configuration (eps of the norms, rope theta), or other "
                "kernels"
            )
            context.add(CauseKind.MODEL_CONFIGURATION, text, evidence)
        elif context.passed("probe.logits") and context.passed("step1.batch"):
            text = (
                "logits and batch are equal and the loss is not: its labels or masks, a term such as label smoothing "
                "or z-loss, or how tokens are counted over ranks"
            )
            context.add(CauseKind.LOSS_COMPUTATION, text, evidence)
        elif context.passed("probe.logits"):
            context.add(
                CauseKind.DATA,
                "logits are equal and the loss is not: another batch, or another computation of the loss",
                evidence,
            )
        elif same:
            rest = "its labels and masks" if context.passed("step1.batch") else "the batch"
            text = f"the weights are equal and the loss is not: the model's configuration, its kernels, or {rest}"
            context.add(CauseKind.MODEL_CONFIGURATION, text, evidence)
        else:
            context.add(
                CauseKind.WEIGHTS,
                "the loss differs in the first step: weights, the model's configuration or the batch",
                evidence,
            )
        weights = True
    if first is None:
        return
    _explain_frozen_parameters(context, *first)
    ruled_out = weights or data or "gradients" in context.explained
    if not ruled_out and _GRADIENTS & context.failed.keys():
        _explain_gradients(context, *first)
        ruled_out = True
    if not ruled_out and "optimizer" not in context.explained:
        if _UPDATES & context.failed.keys():
            _explain_updates(context, *first)
        elif not context.out and (later := [n for n in context.failed if n.startswith("steps.")]):
            kind, text = CauseKind.LATER_STEPS, "something random is not the same, or noise grows"
            if first[0].update_norm is None and not first[0].updates:
                kind, text = (
                    CauseKind.OPTIMIZER,
                    "the optimizer's state or its options (the reference has no norms of updates)",
                )
            elif "after.buffers" in context.failed:
                return  # explain_after says it
            context.add(kind, f"the first step agrees and later ones do not: {text}", context.failed_texts(*later))


def _find_small_logit_deviation(context: Context) -> float | None:
    """Return the relative deviation of the logits if that check passes and the loss deviates about as much; None
    otherwise.

    The check of the first step's loss must have failed.
    """
    logits, loss = context.checks.get("probe.logits"), context.failed["step1.loss"].number
    if logits is None or logits.verdict != "pass" or not logits.number or loss is None:
        return None
    return logits.number if loss <= _ALIKE * logits.number else None


def _explain_dropout(context: Context, evidence: list[str]) -> None:
    """Add a cause about dropout or its random numbers; none if dropout is equal and an earlier cause is about random
    states."""
    a, b = (t.environment.get("dropout_probabilities") for t in (context.expected, context.got))
    if context.expected.dropout != context.got.dropout:
        now, was = ("on", "off") if context.got.dropout else ("off", "on")
        text = f"dropout is {now} in this job and was {was} in the reference"
    elif a is not None and b is not None and a != b:
        text = f"dropout is {list_first(map(str, b))} and was {list_first(map(str, a))}"
    elif "config.rng" in context.failed:
        return
    else:
        text = (
            "dropout is on, and its random numbers are not the reference's: random states of another step, another "
            "order of calls, or another probability"
        )
    context.add(CauseKind.DROPOUT, text, evidence)


def _describe_environment_changes(context: Context) -> list[str]:
    """Return texts about the package versions, GPU, CUDA and attention kernels that differ from the reference's."""
    a, b = context.expected.environment, context.got.environment
    packages = find_package_differences(context.expected, context.got).items()
    out = [list_first([f"{n} is {ours} and was {theirs}" for n, (theirs, ours) in packages], 5)] if packages else []
    return out + [
        f"{k} is {b[k]} and was {a[k]}" for k in ("gpu", "cuda", "attention") if k in a and k in b and a[k] != b[k]
    ]


def _explain_frozen_parameters(context: Context, a: Step, b: Step) -> None:
    """Add a cause for parameters that the first step does not update, though the reference's does.

    `a` is that step of the reference, `b` that of the run.
    """
    if not (a.updates and b.updates) or not {"step1.worst_update", "step1.update_norm"} & context.failed.keys():
        return
    still = [n for n, v in a.updates.items() if v > 0 and b.updates.get(n) == 0]
    still += [
        n
        for n, v in a.updates.items()
        if v > 0 and n not in b.updates and not any(n in g for g in context.expected.tied)
    ]
    if not still or set(still) <= {m for c in context.out for n in c.tensors for m in (n, parse_fqn(n))}:
        return
    if set(_list_deviating_tensors(context, a, b, updates=False)) <= set(still):
        context.explained.add("gradients")
    every = list(a.updates)
    which = "no tensor is" if len(still) == len(every) else f"{describe_selection(still, every, 'tensors')} not"
    rates = b.learning_rates
    if rates and not any(rates):
        context.add(
            CauseKind.LEARNING_RATE,
            "the learning rate is 0: nothing is updated",
            context.failed_texts("step1.learning_rates"),
            still,
        )
        return
    text = f"{which} updated in step {b.step}, but it was in the reference: frozen, or not in the optimizer"
    context.add(CauseKind.FROZEN, text, context.failed_texts("step1.worst_update"), still)


def _explain_gradients(context: Context, a: Step, b: Step) -> None:
    """Add a cause for gradients that differ in the first step though the loss is equal.

    `a` is that step of the reference, `b` that of the run.
    """
    evidence = context.failed_texts(*sorted(_GRADIENTS))
    found = _list_deviating_tensors(context, a, b, updates=False)
    if not found:
        context.add(
            CauseKind.GRADIENTS, "the loss is equal and the gradients are not: how they are reduced or scaled", evidence
        )
        return
    every = list(a.grads)
    if len(found) <= 2 and all(re.search(r"embed|lm_head|wte", n) for n in found):
        text = f"only the gradient of {' and '.join(found)} differs: weights that are tied on one side alone"
        context.add(CauseKind.UNTIED, text, evidence, found)
    elif len(found) * 10 >= len(every) * 9:
        text = "the loss is equal and all gradients are not: how they are reduced, scaled or accumulated"
        if "config.model" not in context.checks or context.checks["config.model"].verdict == "not comparable":
            text += ", or the model's configuration, which the reference did not record"
        context.add(CauseKind.GRADIENTS, text, evidence, found)
    else:
        text = f"the loss is equal and the gradient of {describe_selection(found, every, 'tensors')} is not"
        context.add(CauseKind.GRADIENTS, text, evidence, found)


def _explain_updates(context: Context, a: Step, b: Step) -> None:
    """Add a cause for updates that differ in the first step though gradients are equal.

    `a` is that step of the reference, `b` that of the run.
    """
    evidence = context.failed_texts(*sorted(_UPDATES))
    if a.update_norm and b.update_norm:
        evidence.append(f"the norm of the update is {b.update_norm / a.update_norm:.4g} times the reference's")
    equal = "gradients are equal, " if context.passed("step1.grad_norm") else ""
    found = _list_deviating_tensors(context, a, b, updates=True)
    if not found:
        context.add(CauseKind.OPTIMIZER, f"{equal}the update is not: the optimizer's state or its options", evidence)
        return
    every = list(a.updates)
    ratios = sorted(b.updates.get(n, 0.0) / a.updates[n] for n in found if a.updates.get(n))
    if ratios:
        evidence.append(f"updates are {ratios[0]:.3g} to {ratios[-1]:.3g} times those of the reference")
    guess = "moments dropped or of another step, a step that was reset, or other betas"
    if context.passed("state.digests"):
        guess = "its options, or what is done to gradients before its step, such as clipping, since its state is equal"
    if len(found) * 10 >= len(every) * 9:
        most = "all" if len(found) == len(every) else "nearly all"
        text = f"{equal}the updates of {most} {len(found)} tensors are not: {guess}"
        context.add(CauseKind.OPTIMIZER, text, evidence, found)
        return
    known = collect_options_by_parameter(context.got)
    members: dict[int, set[str]] = {}
    for n, chosen in known.items():
        members.setdefault(id(chosen), set()).add(n)
    group = next((m for m in members.values() if len(members) > 1 and set(found) == m & set(every)), None)
    if group is not None and len(found) > 1:
        text = f"{equal}the updates of one param group ({count_noun(len(found), 'tensor')}) are not: its options"
        context.add(CauseKind.OPTIMIZER_GROUP, text, evidence, found)
        return
    text = f"{equal}the update of {describe_selection(found, every, 'tensors')} is not: "
    if context.passed("state.digests"):
        context.add(CauseKind.OPTIMIZER, text + guess.replace("its", "the optimizer's", 1), evidence, found)
    else:
        whose = "its" if len(found) == 1 else "their"
        context.add(CauseKind.MOMENTS, f"{text}{whose} moments", evidence, found)


def _list_deviating_tensors(context: Context, a: Step, b: Step, updates: bool) -> list[str]:
    """List the FQNs of tensors whose gradient deviates in norm or direction by more than its check's bound, largest
    first.

    `updates` compares updates instead of gradients. `a` is the step of the reference, `b` that of the run.
    """
    far: dict[str, float] = {}
    names = ("worst_update", "update_direction") if updates else ("worst_grad", "grad_direction")
    for direction, name in enumerate(names):
        check = context.checks.get(f"step1.{name}")
        bound = check.bound if check is not None and check.bound is not None else 0.0
        every, _ = measure_tensor_deviations(context.expected, context.got, a, b, updates, 1e-6, bool(direction))
        far = {n: d for n, (d, _, _) in every.items() if not d <= bound} | far
    return sorted(far, key=lambda n: -far[n] if far[n] == far[n] else -math.inf)


def explain_probe_ranks(context: Context) -> None:
    """Add a cause for ranks that compute other logits than the others, if weights do not explain it."""
    if "probe.ranks" in context.failed and "weights" not in context.explained:
        odd = context.got.probe.get("odd") or []
        who = f"rank {odd[0]} computes" if len(odd) == 1 else f"ranks {list_first(map(str, odd), 8)} compute"
        text = f"{who} other logits than the others" if odd else "ranks compute different logits"
        text += " from one batch: another model there, other buffers or kernels, or no eval mode"
        context.add(CauseKind.RANK_DISAGREES, text, context.failed_texts("probe.ranks"))


def explain_loss_ranks(context: Context) -> None:
    """Add a cause for ranks that do not agree on the loss, if there are any."""
    if "run.ranks" in context.failed:
        step = next(s for s in context.got.steps if s.losses and any(x != s.losses[0] for x in s.losses))
        losses = [repr(x) for x in step.losses or []]
        usual, times = Counter(losses).most_common(1)[0]
        odd = [r for r, x in enumerate(losses) if x != usual]
        if times * 2 > len(losses):
            who = f"ranks {list_first(map(str, odd), 8)} disagree" if len(odd) > 1 else f"rank {odd[0]} disagrees"
            text = f"{who} with the others on the loss, from step {step.step} on"
        else:
            text = f"ranks disagree on the loss, from step {step.step} on: it is not reduced over all of them"
        context.add(CauseKind.RANK_DISAGREES, text, context.failed_texts("run.ranks"))


def explain_run_failures(context: Context) -> None:
    """Add causes for an optimizer that fails, and, if there is no other cause, for missing gradients or a spike."""
    if "run.completed" in context.failed:
        context.add(CauseKind.STEP_FAILED, context.failed["run.completed"].text)
    if "run.dead" in context.failed and not context.out:
        context.add(
            CauseKind.NO_GRADIENT,
            "no gradient arrives: parameters are frozen, or the loss does not depend on them",
            context.failed_texts("run.dead"),
        )
    if "run.spike" in context.failed and not context.out:
        context.add(
            CauseKind.SPIKE, f"training spikes: {context.failed['run.spike'].text}", context.failed_texts("run.spike")
        )


def explain_final_state(context: Context) -> None:
    """Add causes for what only the state after the last step shows: later learning rates, buffers, or anything else."""
    failed = {n: c for n, c in context.failed.items() if n.startswith("after.")}
    follows = bool(context.explained)  # other weights, gradients or batches leave other buffers
    if "after.schedule" in failed and "rates" not in context.explained:
        text = f"the schedule differs later on: {failed['after.schedule'].text}"
        context.add(CauseKind.SCHEDULE_AHEAD, text, context.failed_texts("after.schedule"))
    if "after.buffers" in failed and not follows:
        check = failed["after.buffers"]
        loaded, after = context.got.after.get("loaded", {}), context.got.after.get("sketches", {})
        where = check.where or ""
        idle = where in after and loaded.get(where) == after[where][1]
        what = "is not updated by this job, or only by its training loop" if idle else "is updated otherwise"
        text = f"{to_readable_name(where)} {what}: it was equal before the steps, and is not after them"
        later = [n for n in context.failed if n.startswith("steps.")]
        if later and not context.out:
            text += ". Later steps differ, too: because of it, or it does because of them"
        context.add(CauseKind.BUFFERS, text, context.failed_texts("after.buffers", *later), [where], explains=())
    if failed and not context.out:
        text = f"the steps agree and what they leave does not: {next(iter(failed.values())).text}"
        context.add(CauseKind.STATE_AFTER, text, context.failed_texts(*failed))


def explain_round_trip(context: Context) -> None:
    """Add a cause if a save and a load changed the job's state."""
    if "roundtrip.state" in context.failed:
        names = [str(n) for n in context.got.roundtrip.get("differing", [])]
        text = f"saving and loading again changes {list_first([to_readable_name(n) for n in names], 1)}"
        context.add(CauseKind.SAVE_OR_LOAD, text, context.failed_texts("roundtrip.state"), names)
