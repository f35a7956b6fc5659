"""judge: what a run showed, held against a reference, check by check; `noise` says how far two right runs lie apart.

    checks, envelope = judge(reference, got, "strict")

Checks come in the order of `ORDER`, each cheaper and more telling than those after it: the state that the job holds,
its configuration, the probe before any step, the first step, where nothing has been updated yet and numbers are nearly
exact, the later ones, what can be said without a reference, the save and load again. Without a reference only the last
two kinds are made, and of the state what can be told from it alone.

`differences` finds what is not the same, `dynamics` judges steps; here are the other checks, each a function of the
traces that gives a `Check`: what differs, how much of it, and the first one by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ..index.names import counted
from . import bounds as table
from .bounds import SIGNALS, Bound
from .differences import (
    alike,
    config_differences,
    copies_differ,
    deviation,
    differing,
    judged,
    missing_and_extra,
    not_as_stored,
    not_finite,
    option_differences,
    options,
    other_job,
    shape_differences,
    state_obstacle,
    steps_of,
    ties,
    told,
    value_differences,
)
from .dynamics import Dynamics
from .trace import Trace
from .verdict import Check
from .words import changed, fqn_of, listed, plural, slot_of

__all__ = ["ORDER", "judge", "noise"]

#: The names of all checks.
ORDER = (
    "state.loaded", "state.plausible", "state.names", "state.shapes", "state.digests", "state.scalars",
    "config.groups", "config.scheduler", "config.values", "config.tied", "config.model",
    "probe.logits", "probe.ranks",
    "step1.batch", "step1.learning_rates", *(f"step1.{s}" for s in SIGNALS),
    "steps.batch", "steps.learning_rates", *(f"steps.{s}" for s in SIGNALS),
    "run.ranks", "run.finite", "run.spike", "run.dead", "roundtrip.state",
)  # fmt: skip

#: A grad norm this many times what is usual is a spike.
SPIKE = 10.0


def judge(
    reference: Trace | None, got: Trace, profile: str = "strict", noise: Mapping[str, float] | None = None
) -> tuple[list[Check], dict[str, list[float]]]:
    """(checks in order, bound of each common step for loss, grad_norm and update_norm) of a run.

    Args:
        reference: what the job should have done; None leaves what can be told from the run alone.
        got: the run.
        profile: one of `bounds.PROFILES`.
        noise: what the function of that name gave for two runs of this job; widens bounds.

    Raises:
        UsageError: there is no such profile.
    """
    made = [_loaded(got, profile), _plausible(got)]
    envelope: dict[str, list[float]] = {}
    if reference is not None:
        limits = table.bounds(profile, reference, got, noise)
        dynamics = Dynamics(reference, got, profile, limits)
        made += _state(reference, got, profile)
        made += _configuration(reference, got)
        made.append(_probe(reference, got, limits["probe.logits"]))
        made += dynamics.checks()
        envelope = dynamics.envelope()
    elif (tied := _own_tied(got)) is not None:
        made.append(tied)
    made += [
        _probe_ranks(got),
        _ranks(got),
        _finite(got),
        _spike(reference, got),
        _dead(reference, got),
        _roundtrip(got),
    ]
    return sorted(made, key=lambda c: ORDER.index(c.name)), envelope


def noise(a: Trace, b: Trace) -> dict[str, float]:
    """{name of a check: deviation} between two runs of one job; what both have not is left out, NaN is infinite."""
    every: dict[str, list[float]] = {}
    found = _logits(a, b)
    if not isinstance(found, str):
        every["probe.logits"] = [found[0]]
    dynamics = Dynamics(a, b, "strict", table.bounds("strict", a, b))
    for stage in ("step1", "steps"):
        for signal in SIGNALS:
            every[f"{stage}.{signal}"] = [w.deviation for w in dynamics.found(stage, signal)]
    return {n: max(math.inf if math.isnan(x) else x for x in found) for n, found in every.items() if found}


def _exact(name: str, problems: Sequence[str], good: str, bad: str) -> Check:
    """A check that nothing may fail: problems are names, or names with what is wrong about them."""
    if not problems:
        return Check.of(name, True, good, 0, 0, "exact")
    first = problems[0].split(" ")[0]
    text = f"{bad}: {listed(problems)}"
    return Check.of(name, False, text, len(problems), 0, "exact", first if "." in first else None)


# ---------------------------------------------------------------------------------------------------------------- state


def _loaded(got: Trace, profile: str) -> Check:
    name = "state.loaded"
    if got.failed is not None:
        return Check.of(name, False, f"the checkpoint could not be loaded into the job: {got.failed}", source="exact")
    if copies := copies_differ(got):
        return _exact(name, copies, "", f"copies on several ranks are not equal, of {plural(len(copies), 'tensor')}")
    if (rounded := got.environment.get("rounded")) and profile != "relaxed":
        return _exact(name, rounded, "", f"the job rounds {plural(len(rounded), 'tensor')} to a dtype of fewer digits")
    if not got.stored or not got.state:
        return Check.unknown(
            name, "the files were not read a second time, so what was loaded was not compared with them"
        )
    wrong = not_as_stored(got)
    good = f"the job holds what the files say, in all {len(got.stored)} tensors"
    return _exact(name, wrong, good, f"the job does not hold what the files say in {plural(len(wrong), 'tensor')}")


def _plausible(got: Trace) -> Check:
    """What a state shows by itself. Parameters that never got a gradient have no state, and those that got fewer have
    smaller steps, so only what no training does is a fault."""
    name = "state.plausible"
    if got.failed is not None or (not got.state and not got.scalars):
        return Check.unknown(name, "the run does not say what the job held")
    problems = [
        f"{n} is {v}" for n, v in got.scalars.items() if math.isnan(v) or (math.isinf(v) and n.startswith("optim."))
    ]
    trained = _trained(got)
    steps = {n: v for n, v in steps_of(got).items() if math.isfinite(v)}
    if trained > 0:
        zeros = [n for n, v in steps.items() if v == 0]
        if zeros and len(zeros) == len(steps):
            problems.append(f"the optimizer's step is 0 on all {plural(len(steps), 'tensor')}, after {trained} steps")
        elif zeros:
            problems += [f"optim.state.{n}.step is 0, after {trained} steps" for n in zeros]
        moments = any(slot_of(n) != "weights" for n in got.state) or bool(steps)
        adaptive = any("betas" in g and g.get("params") for g in got.groups)
        if adaptive and not moments:
            problems.append(f"the optimizer has param groups and no moments, after {trained} steps")
    for module, found in _modules(steps).items():
        apart = sorted(set(found.values()))
        if 0 not in apart and len(apart) > 1:
            few = " and ".join(f"{v:g}" for v in apart[:3])
            problems.append(f"{module} has parameters with optimizer steps {few}")
    slots: dict[str, set[str]] = {}
    for n in got.state:
        slots.setdefault(slot_of(n), set()).add(fqn_of(n))
    if "exp_avg" in slots and "exp_avg_sq" in slots:
        problems += [f"{n} has one of exp_avg and exp_avg_sq" for n in sorted(slots["exp_avg"] ^ slots["exp_avg_sq"])]
    return _exact(
        name, problems, "optimizer steps, moments and scalars are such as a training leaves", "no training leaves this"
    )


def _trained(trace: Trace) -> int:
    """How many steps had been trained when the checkpoint was saved, as far as the trace says."""
    told = counted(trace.values.get)
    return trace.start if told is None else told


def _modules(steps: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Optimizer steps by the module within a layer, such as layers.1.self_attn, whose parts are trained together.

    Layers themselves are no such module, nor are lists of experts: one that no token was sent to may get no gradient.
    """
    out: dict[str, dict[str, float]] = {}
    for fqn, step in steps.items():
        parts = fqn.split(".")
        if (
            len(parts) >= 4
            and any(p.isdigit() for p in parts[:-2])
            and not parts[-3].isdigit()
            and not parts[-2].isdigit()
        ):
            out.setdefault(".".join(parts[:-2]), {})[fqn] = step
    return out


def _state(reference: Trace, got: Trace, profile: str) -> list[Check]:
    names = ("state.names", "state.shapes", "state.digests", "state.scalars")
    why = state_obstacle(reference, got)
    if why is not None:
        return [Check.unknown(n, why) for n in names]
    out = []
    if reference.state and got.state:
        missing, extra = missing_and_extra(reference, got)
        parts = [f"{plural(len(missing), 'tensor')} missing"] if missing else []
        parts += [f"{len(extra)} that the reference does not have"] if extra else []
        out.append(_exact(names[0], missing + extra, f"the same {len(got.state)} tensors", ", ".join(parts)))
    else:
        out.append(Check.unknown(names[0], "one of the two does not list its tensors"))
    if got.failed is not None:
        return out + [Check.unknown(n, "the checkpoint could not be loaded") for n in names[1:]]
    common = [n for n in reference.state if n in got.state and judged(n)]
    other_shapes, other_dtypes = shape_differences(reference, got)
    shapes, dtypes = changed(other_shapes, lambda shape: str(list(shape))), changed(other_dtypes, str)
    relaxed = profile == "relaxed"
    good = f"the same shapes and dtypes in all {len(common)} tensors"
    if dtypes and relaxed:
        what = plural(len(dtypes), "tensor")
        good = f"the same shapes; {what} of another dtype, as the profile allows: {listed(dtypes)}"
    if not common:
        out.append(Check.unknown(names[1], "no tensor is on both sides"))
    else:
        parts = [f"{plural(len(shapes), 'tensor')} of another shape"] if shapes else []
        parts += [f"{plural(len(dtypes), 'tensor')} of another dtype"] if dtypes else []
        out.append(_exact(names[1], shapes + ([] if relaxed else dtypes), good, ", ".join(parts)))
    same = [n for n in common if n not in other_shapes and n not in other_dtypes]
    compared = [n for n in same if reference.state[n][2] and got.state[n][2]]
    if compared:
        wrong = differing(reference, got)
        good = f"equal bytes in all {len(compared)} tensors" + (
            f"; {len(dtypes)} of another dtype are not counted" if dtypes and relaxed else ""
        )
        bad = f"{len(wrong)} of {plural(len(compared), 'tensor')} hold other bytes"
        out.append(_exact(names[2], wrong, good, bad))
    else:
        out.append(Check.unknown(names[2], "no tensor has a fingerprint on both sides"))
    both = [n for n in reference.scalars if n in got.scalars and judged(n)]
    two = {n: (reference.scalars[n], got.scalars[n]) for n in both}
    wrong = changed({n: (a, b) for n, (a, b) in two.items() if not alike(float(a), float(b))})
    if both:
        good = f"equal values of all {plural(len(both), 'tensor')} with one element"
        bad = f"{plural(len(wrong), 'tensor')} with one element has another value"
        out.append(_exact(names[3], wrong, good, bad))
    else:
        out.append(Check.unknown(names[3], "no tensor with one element is known on both sides"))
    return out


# -------------------------------------------------------------------------------------------------------- configuration


def _configuration(reference: Trace, got: Trace) -> list[Check]:
    if got.failed is not None:
        names = ("groups", "scheduler", "values", "tied", "model")
        return [Check.unknown(f"config.{n}", "the checkpoint could not be loaded") for n in names]
    rules = (_groups, _scheduler, _values, _tied, _model)
    return [rule(reference, got) for rule in rules]


def _groups(reference: Trace, got: Trace) -> Check:
    name = "config.groups"
    theirs, ours = options(reference), options(got)
    if not theirs or not ours:
        who = "the run" if theirs else "the reference"
        return Check.unknown(name, f"{who} does not say what its param groups are (Recorder.state writes them down)")
    if reference.start != got.start:
        return Check.unknown(name, f"the reference's param groups are those of step {reference.start}")
    found, missing, extra = option_differences(reference, got)
    problems = []
    for key, where in found.items():
        first, (expected, value) = next(iter(where.items()))
        problems.append(f"{key} is {value!r} and was {expected!r} for {plural(len(where), 'parameter')}, first {first}")
    if missing:
        problems.append(f"{plural(len(missing), 'parameter')} not in the optimizer, first {missing[0]}")
    if extra:
        problems.append(f"{plural(len(extra), 'parameter')} only in this optimizer, first {extra[0]}")
    good = f"the same options for all {len(ours)} parameters"
    out = _exact(name, problems, good, "param groups differ")
    if problems:
        out.where = next((n for where in found.values() for n in where), None) or [*missing, *extra][0]
    return out


def _scheduler(reference: Trace, got: Trace) -> Check:
    name = "config.scheduler"
    found, missing, extra, compared = value_differences(reference, got, "scheduler")
    if missing and not compared and not extra:
        return Check.of(
            name, False, "the checkpoint has no state of the scheduler, the reference has one", 1, 0, "exact"
        )
    if not compared:
        return Check.unknown(name, "no state of a scheduler on both sides")
    out = _exact(name, changed(found), "the same state of the scheduler", "the state of the scheduler differs")
    gone = [n for n in missing if told(reference.values[n])]
    if gone and out.verdict == "pass":
        return Check.of(name, False, f"the scheduler's {listed(gone)} is missing", len(gone), 0, "exact")
    return _with_rest(out, missing, extra)


def _with_rest(check: Check, missing: Sequence[str], extra: Sequence[str]) -> Check:
    if missing:
        check.text += f"; only in the reference: {listed(missing)}"
    if extra:
        check.text += f"; only here: {listed(extra)}"
    return check


def _values(reference: Trace, got: Trace) -> Check:
    name = "config.values"
    problems, missing, extra, compared = [], list[str](), list[str](), 0
    for component in ("trainer", "scaler", "dataloader", "extra"):
        found, gone, new, n = value_differences(reference, got, component)
        problems += changed(found)
        if component == "trainer":
            problems += [f"{k} is missing and was {reference.values[k]!r}" for k in gone if told(reference.values[k])]
        else:
            missing += gone
        extra += new
        compared += n
    if reference.others or got.others:
        compared += len(reference.others.keys() & got.others.keys())
        if reference.layout is not None:  # not a recording, which knows of none
            problems += [f"{n} is missing" for n in reference.others if n not in got.others]
        problems += [f"{n} is not as it was" for n, x in reference.others.items() if got.others.get(n, x) != x]
    if reference.clip is not None:
        compared += 1
        if got.clip != reference.clip:
            problems.append(f"clip is {got.clip!r} and was {reference.clip!r}")
    if not compared and not problems:
        return Check.unknown(name, "no counter or other value is known on both sides")
    out = _exact(
        name, problems, f"the same {plural(compared, 'value')}", f"{plural(len(problems), 'value')} not as it was"
    )
    return _with_rest(out, missing, extra)


def _own_tied(got: Trace) -> Check | None:
    """The model's own configuration says that the head is tied; None where it does not, or has no head."""
    heads = [n for n in got.state if n.startswith("model.") and n.endswith("lm_head.weight")]
    if got.config is None or got.config.get("tie_word_embeddings") is not True or not heads:
        return None
    if got.tied:
        return Check.of("config.tied", True, "tied as the configuration says", 0, 0, "exact")
    text = "the configuration says tie_word_embeddings, and the job trains the head and the embedding apart"
    return Check.of("config.tied", False, text, 1, 0, "exact", heads[0].removeprefix("model."))


def _tied(reference: Trace, got: Trace) -> Check:
    name = "config.tied"
    own = _own_tied(got)
    if own is not None and own.verdict == "fail":
        return own
    if not reference.tied and not reference.state and reference.parameters is None:
        return own or Check.unknown(
            name, "the reference does not say which parameters are tied (give Recorder the model)"
        )
    theirs, ours = ties(reference), ties(got)
    problems = [f"{' and '.join(sorted(g))} were tied and are not" for g in sorted(theirs - ours, key=sorted)]
    problems += [f"{' and '.join(sorted(g))} are tied and were not" for g in sorted(ours - theirs, key=sorted)]
    good = f"the same {plural(len(ours), 'tied parameter')}" if ours else "no parameter is tied on either side"
    return _exact(name, problems, good, "parameters are not tied as they were")


def _model(reference: Trace, got: Trace) -> Check:
    name = "config.model"
    if reference.config is None or got.config is None:
        who = "the reference" if reference.config is None else "the run"
        return Check.unknown(name, f"{who} has no configuration of the model")
    found = config_differences(reference.config, got.config)
    return _exact(name, changed(found), "the same configuration of the model", "the model's configuration differs")


# ---------------------------------------------------------------------------------------------------------------- probe


def _logits(reference: Trace, got: Trace) -> tuple[float, float, float] | str:
    """(relative L2, largest absolute difference, mean KL divergence of the distributions), or why not."""
    import numpy as np

    files = [str(t.probe.get("file") or "") for t in (reference, got)]
    if not all(files):
        return f"{'the run' if files[0] else 'the reference'} has no probe"
    batches = [t.probe.get("batch") for t in (reference, got)]
    if None not in batches and batches[0] != batches[1]:
        return "the probes were made with different batches"
    if why := other_job(reference, got):
        return why
    try:
        a, b = (np.load(f, mmap_mode="r", allow_pickle=False) for f in files)
    except (OSError, ValueError, EOFError) as e:
        return f"the logits cannot be read ({e})"
    if a.shape != b.shape or a.ndim < 2 or not a.size:
        return f"the logits are {list(b.shape)}, those of the reference {list(a.shape)}"
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    apart = total = divergence = largest = 0.0
    rows = max(1, (1 << 22) // a.shape[1])
    with np.errstate(all="ignore"):
        for k in range(0, len(a), rows):
            x, y = np.asarray(a[k : k + rows], "f8"), np.asarray(b[k : k + rows], "f8")
            gap = np.where(x == y, 0.0, y - x)  # an infinite logit that is the same on both sides is no difference
            apart += float(np.square(gap).sum())
            total += float(np.square(np.where(np.isinf(x), 0.0, x)).sum())
            largest = float(np.maximum(largest, np.abs(gap).max()))
            p, q = _log_softmax(x), _log_softmax(y)
            divergence += float(np.where(p == -np.inf, 0.0, np.exp(p) * (p - q)).sum())
    if math.isnan(apart):
        return math.nan, math.nan, math.nan
    number = 0.0 if apart == 0 else math.sqrt(apart / total) if total else math.inf
    return number, largest, divergence / len(a) if apart else 0.0


def _log_softmax(x: Any) -> Any:
    import numpy as np

    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def _probe(reference: Trace, got: Trace, bound: Bound) -> Check:
    name = "probe.logits"
    found = _logits(reference, got)
    if isinstance(found, str):
        return Check.unknown(name, found)
    if why := bound.obstacle():
        return Check.unknown(name, why)
    number, largest, divergence = found
    if math.isnan(number):
        return Check.of(name, False, "there is NaN among the logits", None, bound.relative, bound.source)
    text = (
        f"logits deviate by {number:.2g} (relative L2); largest difference {largest:.2g}, mean KL divergence "
        f"{divergence:.2g}"
    )
    if number == 0:
        text = "the logits are bit-equal"
    return Check.of(name, number <= bound.relative, text, number, bound.relative, bound.source)


def _probe_ranks(got: Trace) -> Check:
    name, agree = "probe.ranks", got.probe.get("agree")
    if agree is None:
        return Check.unknown(name, "the ranks did not compare their logits")
    text = "all ranks have the same logits" if agree else "ranks have different logits for one batch"
    return Check.of(name, bool(agree), text, source="exact")


# ------------------------------------------------------------------------------------------------------------------ run


def _ranks(got: Trace) -> Check:
    name = "run.ranks"
    known = [s for s in got.steps if s.losses]
    if not known:
        return Check.unknown(name, "the losses of the ranks were not gathered")
    for s in known:
        losses = s.losses or []
        if any(x != losses[0] and not (x != x and losses[0] != losses[0]) for x in losses):
            text = f"ranks do not have the same loss in step {s.step}: {_values_of(losses)}"
            return Check.of(
                name, False, text, max(deviation(x, losses[0]) for x in losses), 0, "exact", f"step {s.step}"
            )
    return Check.of(name, True, f"all ranks have the same loss, in {plural(len(known), 'step')}", 0, 0, "exact")


def _values_of(losses: Sequence[float]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, x in enumerate(losses):
        ranks.setdefault(repr(x), []).append(rank)
    return "; ".join(f"{x} on {listed([f'rank {r}' for r in rs])}" for x, rs in list(ranks.items())[:4])


def _finite(got: Trace) -> Check:
    name = "run.finite"
    if not got.steps:
        return Check.unknown(name, "no step was run")
    for s in got.steps:
        found = list(not_finite(s))
        if found:
            more = f", and {len(found) - 1} more" if len(found) > 1 else ""
            text = f"{found[0][0]} is {found[0][1]} in step {s.step}{more}"
            return Check.of(name, False, text, source="exact", where=f"step {s.step}, {found[0][0]}")
    return Check.of(
        name, True, f"loss and norms are finite numbers in {plural(len(got.steps), 'step')}", source="exact"
    )


def _spike(reference: Trace | None, got: Trace) -> Check:
    """Against the reference's norm of the same step, where it has one; else against the median of the steps before."""
    name = "run.spike"
    theirs = {s.step: s.grad_norm for s in reference.steps} if reference is not None else {}
    before: list[float] = []
    judged, worst, where, usual = 0, 0.0, None, 0.0
    for s in got.steps:
        norm = s.grad_norm
        if norm is None or not math.isfinite(norm):
            continue
        expected = theirs.get(s.step)
        if not expected or not math.isfinite(expected):
            expected = median(before) if len(before) >= 3 else None
        before.append(norm)
        if expected:
            judged += 1
            if norm / expected > worst:
                worst, where, usual = norm / expected, f"step {s.step}", expected
    if not judged:
        return Check.unknown(name, "too few steps with a grad norm to know what is usual")
    text = f"the largest grad norm is {worst:.2g} times what is usual ({usual:.3g}), in {where}"
    return Check.of(name, worst <= SPIKE, text, worst, SPIKE, "given", where)


def _dead(reference: Trace | None, got: Trace) -> Check:
    name = "run.dead"
    known = [s for s in got.steps if s.grad_norm is not None]
    if not known:
        return Check.unknown(name, "no grad norm was recorded")
    theirs = {s.step: s.grad_norm for s in reference.steps} if reference is not None else {}
    dead = [s.step for s in known if s.grad_norm == 0 and theirs.get(s.step) != 0]
    if dead:
        text = f"the grad norm is 0 in {plural(len(dead), 'step')}: nothing is learnt"
        return Check.of(name, False, text, len(dead), 0, "exact", f"step {dead[0]}")
    return Check.of(name, True, "there is a gradient in every step", 0, 0, "exact")


def _roundtrip(got: Trace) -> Check:
    name = "roundtrip.state"
    if "differing" not in got.roundtrip:
        return Check.unknown(name, f"no save and load: {got.roundtrip.get('skipped', 'it was not asked for')}")
    wrong = [str(n) for n in got.roundtrip["differing"]]
    bad = f"{plural(len(wrong), 'tensor')} not as saved after loading"
    return _exact(name, wrong, "what was saved was loaded again, bit for bit", bad)
