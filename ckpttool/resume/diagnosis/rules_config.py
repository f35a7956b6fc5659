"""Rules about the configuration (ties, model, param groups, scheduler, counters) and the data.

Each rule gets a `Context`. Options and values are compared one by one. Learning rates and batches are looked up in the
reference's other steps: a schedule or a loader that started over, or is some steps off, shows there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ...errors import argument
from ...printable import count_noun, list_first
from ..compare.differences import (
    collect_options_by_parameter,
    compare_common_inputs,
    describe_lost_options,
    find_lost_options,
    find_model_config_differences,
    find_option_differences,
    list_differing_inputs,
    pair_common_steps,
    pair_learning_rates,
)
from ..compare.side_state_differences import compare_side_state, select_side_state
from ..text import describe_changes
from ..trace.model import Step, Trace
from .context import Context
from .kinds import CauseKind, Topic
from .row_differences import describe_row_mismatch

#: Checks that fail if one of the two runs clips gradients.
_TRAINED = (
    "step1.grad_norm",
    "step1.update_norm",
    "step1.worst_update",
    "steps.loss",
    "steps.grad_norm",
    "steps.worst_grad",
    "steps.update_norm",
    "steps.worst_update",
)

__all__ = [
    "explain_differing_batches",
    "explain_groups_and_scheduler",
    "explain_lost_scheduler",
    "explain_model_config",
    "explain_side_state",
    "explain_tied_parameters",
]


def explain_tied_parameters(context: Context) -> None:
    """Add a cause for parameters that are tied on one side only, if that check failed."""
    check = context.failed.get("config.tied")
    if check is not None:
        names = [check.where] if check.where else []
        context.add(
            CauseKind.UNTIED,
            f"{check.text}: they get separate gradients and updates",
            context.failed_texts("config.tied"),
            names,
        )


def explain_model_config(context: Context) -> None:
    """Add a cause for a model configuration that differs, if that check failed."""
    reference = context.expected
    if "config.model" not in context.failed or reference.config is None or context.got.config is None:
        return
    found = find_model_config_differences(reference.config, context.got.config)
    text = f"the model's configuration differs: {list_first(describe_changes(found))}"
    context.add(CauseKind.MODEL_CONFIGURATION, text, context.failed_texts("probe.logits", "step1.loss"))


def explain_param_groups(context: Context) -> None:
    """Add causes for options of param groups that differ, and for parameters that only one optimizer has, if that check
    failed."""
    reference = context.expected
    if "config.groups" not in context.failed:
        return
    found, missing, extra = find_option_differences(reference, context.got)
    lost, _ = find_lost_options(reference, context.got)
    if lost and all(c.kind != CauseKind.OPTIMIZER_MISSING.label for c in context.out):
        text = (
            f"{describe_lost_options(context.got, lost)}: this job goes on with its own, and another loader takes "
            "defaults or fails"
        )
        names = list(dict.fromkeys(n for where in lost.values() for n in where))
        context.add(CauseKind.OPTIONS_LOST, text, context.failed_texts("config.groups"), names)
    known = collect_options_by_parameter(context.got)
    for key, where in found.items():
        if key in ("lr", "initial_lr") and "rates" in context.explained:
            continue
        by: dict[str, list[str]] = {}
        for n, two in where.items():
            by.setdefault(repr(two), []).append(n)
        for names in by.values():
            a, b = where[names[0]]
            whose = f"{count_noun(len(names), 'parameter')}, first {names[0]}"
            if len(names) == len(known):
                whose = "all parameters"
            kind, name = CauseKind.OPTION, key.replace("_", "-")
            text = f"{key} is {b!r} and was {a!r} for {whose}"
            if key == "weight_decay" and a == 0 and b and all(_is_usually_undecayed(n) for n in names):
                kind, name = CauseKind.WEIGHT_DECAY_ON_NORMS, ""
                what = "1 norm or bias" if len(names) == 1 else f"{len(names)} norms and biases"
                text = f"weight decay ({b!r}) is applied to {what} that had none, first {names[0]}"
            if key == "betas" and b in ((0.9, 0.999), [0.9, 0.999]):
                text += ", which is the default of AdamW"
            if key in ("lr", "initial_lr"):
                context.explained.add("rates")
            context.add(kind, text, context.failed_texts("config.groups"), names, name=name)
    if missing:
        text = f"{count_noun(len(missing), 'parameter')} not in the optimizer and not trained, first {missing[0]}"
        context.add(CauseKind.OPTIMIZER_MEMBERS, text, context.failed_texts("config.groups"), missing)
    if extra:
        text = f"{count_noun(len(extra), 'parameter')} that the reference's optimizer does not have, first {extra[0]}"
        context.add(CauseKind.OPTIMIZER_MEMBERS, text, context.failed_texts("config.groups"), extra)


def explain_groups_and_scheduler(context: Context) -> None:
    """Add causes about param groups and scheduler; the scheduler's first if its state differs, since it sets
    learning rates."""
    rules = [explain_param_groups, explain_scheduler]
    for rule in reversed(rules) if "config.scheduler" in context.failed else rules:
        rule(context)


def explain_lost_scheduler(context: Context) -> None:
    """Add a cause for a load that failed because the checkpoint has no scheduler state, where the reference has it."""
    reference = context.expected
    if (
        "scheduler" in (context.got.failed or "")
        and select_side_state(reference, "scheduler")
        and not select_side_state(context.got, "scheduler")
    ):
        context.add(
            CauseKind.SCHEDULER_MISSING,
            "the checkpoint has lost the scheduler's state, which the reference holds",
            context.failed_texts("state.loaded"),
        )


def explain_scheduler(context: Context) -> None:
    """Add a cause about the scheduler, from its state or from the learning rates, if a check of those failed."""
    reference = context.expected
    evidence = context.failed_texts("config.scheduler", "step1.learning_rates", "steps.learning_rates")
    if "config.scheduler" in context.failed:
        apart = compare_side_state(reference, context.got, "scheduler")
        found, missing = apart.found, apart.missing
        if apart.is_lost:
            context.add(
                CauseKind.SCHEDULER_MISSING,
                "the checkpoint has no scheduler state",
                evidence,
            )
            return
        epochs: list[tuple[Any, Any]] = [two for n, two in found.items() if n.rpartition(".")[2] == "last_epoch"]
        if epochs:
            a, b = epochs[0]
            if b == 0:
                kind, text = CauseKind.SCHEDULER_RESET, f"the scheduler starts over: its last_epoch is 0 and was {a}"
            else:
                kind, text = (
                    CauseKind.SCHEDULER_OFFSET,
                    f"the scheduler is off by {b - a:+d}: its last_epoch is {b} and was {a}",
                )
        elif found:
            kind, text = (
                CauseKind.SCHEDULER_STATE,
                f"the scheduler state differs: {list_first(describe_changes(found))}",
            )
        else:
            kind, text = CauseKind.SCHEDULER_INCOMPLETE, f"of the scheduler {list_first(missing)} is missing"
        context.add(kind, text, evidence)
        return
    if not evidence or "rates" in context.explained:
        return
    kind, text = _explain_learning_rates(reference, context.got)
    context.add(kind, text, evidence)


def explain_side_state(context: Context) -> None:
    """Add causes about clipping, counters, random states, dataloader, scaler and other values, where their checks
    failed."""
    reference = context.expected
    seen = context.failed_texts("config.values")
    if (why := reference.unrecorded.get("clip")) and context.got.clip is None and context.failed_texts(*_TRAINED):
        text = f"the recorded job seems to clip gradients, and this run does not: {why}, here, too"
        context.add(CauseKind.CLIPPING, text, context.failed_texts(*_TRAINED))
    if seen and reference.clip is not None and context.got.clip != reference.clip:
        now = "off" if context.got.clip is None else f"at {context.got.clip!r}"
        text = f"gradient clipping is {now} and was at {reference.clip!r}; it matters once the grad norm exceeds that"
        context.add(CauseKind.CLIPPING, text, seen)
    for component, kind, what in (
        ("trainer", CauseKind.COUNTERS, "the trainer's counters"),
        ("rng", CauseKind.RNG, "random states"),
        ("dataloader", CauseKind.DATALOADER, "the dataloader's state"),
        ("scaler", CauseKind.SCALER, "the grad scaler's state"),
        ("extra", CauseKind.VALUES, "other values"),
        ("model", CauseKind.VALUES, "extra states of the model's modules"),
    ):
        check = f"config.{component}" if component in ("rng", "dataloader", "scaler") else "config.values"
        found = compare_side_state(reference, context.got, component)
        if check not in context.failed or not found.problems:
            continue
        if found.is_lost:
            text = f"the checkpoint has lost {what}: {list_first(found.missing)}"
        else:
            text = f"{what} differ{'s' if what.endswith(' state') else ''}: {list_first(found.problems)}"
        # modules compute with them
        explains: tuple[Topic, ...] = ("weights",) if component == "model" else ()
        context.add(kind, text, context.failed_texts(check), explains=explains)


def _is_usually_undecayed(name: str) -> bool:
    """Tell whether a parameter is, by its name, a norm or a bias, which usually has no weight decay."""
    return bool(re.search(r"norm|ln_|\.bias$|^bias$|layernorm", name))


def _explain_learning_rates(reference: Trace, got: Trace) -> tuple[CauseKind, str]:
    """Find why learning rates differ from the reference's, such as a restarted scheduler: (kind of cause, text).

    They must differ in at least one common step.
    """
    known = [(a, b) for a, b in pair_common_steps(reference, got) if a.learning_rates and b.learning_rates]
    a, b = next((x, y) for x, y in known if any(u != v for _, u, v in pair_learning_rates(reference, got, x, y)))
    ours, theirs = b.learning_rates or [], a.learning_rates or []
    by = {s.step: s.learning_rates for s in reference.steps if s.learning_rates}
    for gap in sorted({t - b.step for t in by} - {0}, key=abs):
        shifted = [(by[y.step + gap], y.learning_rates) for _, y in known if y.step + gap in by]
        varied = len({tuple(r) for r in by.values()}) > 1
        if varied and len(shifted) > (len(known) + 1) // 2 and all(u == v for u, v in shifted):
            if b.step + gap == 1:
                return (
                    CauseKind.SCHEDULER_RESET,
                    "the learning rates are those of the training's first steps: the scheduler started over",
                )
            return (
                CauseKind.SCHEDULER_OFFSET,
                f"the learning rates are those of {count_noun(abs(gap), 'step')} {'later' if gap > 0 else 'earlier'}",
            )
    mine = {tuple(y.learning_rates or []) for _, y in known}
    if len(mine) == 1 and len(known) > 1 and len({tuple(x.learning_rates or []) for x, _ in known}) > 1:
        initial = [g.get("initial_lr") for g in got.groups]
        also = ", which is where the schedule begins" if initial and initial == list(ours) else ""
        return CauseKind.SCHEDULER_LOST, f"the learning rate stays at {ours[0]!r}{also}: no scheduler changes it"
    ratios = {round(v / u, 9) for u, v in zip(theirs, ours, strict=False) if u}
    if len(theirs) == len(ours) and len(ratios) == 1:
        return (
            CauseKind.LEARNING_RATE,
            f"the learning rate is {ours[0]!r} and was {theirs[0]!r} in step {b.step} ({ratios.pop():.6g} times)",
        )
    return CauseKind.LEARNING_RATE, f"the learning rates are {ours!r} and were {theirs!r} in step {b.step}"


def _describe_differing_inputs(wrong: Sequence[tuple[Step, Step]]) -> str | None:
    """Return a text about which keys of the samples (such as masks) differ while others are equal; None if all differ.

    `wrong` are the steps whose batches differ, (expected, found).
    """
    every = [compare_common_inputs(x, y) for x, y in wrong]
    keys = [k for k in (every[0] if every else ()) if not all(same.get(k, True) for same in every)]
    equal = [k for k in (every[0] if every else ()) if k not in keys]
    if not equal:
        return None
    if not keys:
        return f"{list_first(equal)} of the samples are those of the reference, but not together with each other"
    return (
        f"{list_first(keys)} of the samples {'differs' if len(keys) == 1 else 'differ'} from step "
        f"{wrong[0][1].step} on, and {list_first(equal)} {'does' if len(equal) == 1 else 'do'} not"
    )


def _identify_batch(step: Step) -> str:
    """Return a text that identifies the batch of a step: the digest of its token ids, or else those of its tensors."""
    return step.batch or repr(sorted(step.inputs.items()))


def explain_differing_batches(context: Context) -> None:
    """Add a cause for batches that differ or are those of other steps, if that check failed."""
    reference = context.expected
    if "step1.batch" not in context.failed and "steps.batch" not in context.failed:
        return
    evidence = context.failed_texts("step1.batch", "steps.batch")
    a, b = reference, context.got
    if None not in (a.global_batch, b.global_batch) and a.global_batch != b.global_batch:
        text = f"the global batch is {b.global_batch} and was {a.global_batch}"
        context.add(CauseKind.GLOBAL_BATCH, text, evidence)
        return
    if None not in (a.sequence, b.sequence) and a.sequence != b.sequence:
        context.add(
            CauseKind.SEQUENCE,
            f"sequences are {b.sequence} tokens long and were {a.sequence}",
            evidence,
        )
        return
    wrong = [(x, y) for x, y in pair_common_steps(a, b) if list_differing_inputs(x, y)]
    if (inputs := _describe_differing_inputs(wrong)) is not None:
        context.add(CauseKind.DATA_INPUTS, inputs, evidence)
        return
    tokens = [(x.tokens, y.tokens) for x, y in wrong if x.tokens and y.tokens and x.tokens != y.tokens]
    if tokens and len(tokens) == len(wrong):
        ratio = tokens[0][1] / tokens[0][0]
        text = f"a step has {tokens[0][1]} tokens and had {tokens[0][0]} ({ratio:.3g} times): another global batch"
        context.add(CauseKind.GLOBAL_BATCH, text, evidence)
        return
    of: dict[str, int] = {}
    for s in a.steps:
        of.setdefault(_identify_batch(s), s.step)
    gaps = Counter(of[_identify_batch(y)] - y.step for _, y in wrong if _identify_batch(y) in of)
    if not gaps and (found := describe_row_mismatch(a, b, wrong)) is not None:
        context.add(*found, evidence)
        return
    if not gaps:
        first = wrong[0][1].step if wrong else b.start + 1
        text = f"the data differs from step {first} on: none of these batches is in the reference"
        if b.data == "synthetic" != a.data:
            text += (
                f". This run made its rows itself; pass {argument('data')} with the rows of the recorded job, in their "
                "order"
            )
        context.add(CauseKind.DATA_OTHER, text, evidence)
        return
    gap, times = gaps.most_common(1)[0]
    when = "later" if gap > 0 else "earlier"
    evidence.append(f"{times} of the {len(wrong)} batches that differ are the reference's of {abs(gap)} steps {when}")
    if gap == -b.start and b.start:
        context.add(CauseKind.DATA_RESTART, "the data starts over from the beginning", evidence)
    elif len(gaps) == 1:
        text = f"the data is {count_noun(abs(gap), 'step')} {'ahead of' if gap > 0 else 'behind'} the reference"
        context.add(CauseKind.DATA_OFFSET, text, evidence)
    else:
        context.add(CauseKind.DATA_ORDER, "the same batches come in a different order", evidence)
