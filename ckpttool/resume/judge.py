"""judge: what a run showed, held against a reference, check by check; `noise` says how far two right runs lie apart.

    checks, envelope = judge(reference, got, "strict")

Checks come in the order of `ORDER`, each cheaper and more telling than those after it: the state that the job holds,
its configuration, the probe before any step, the first step, where nothing has been updated yet and numbers are nearly
exact, the later ones, what can be said without a reference, the save and load again. Without a reference only the last
two kinds are made, and of the state what can be told from it alone.

Raw numbers are compared, never printed ones. Equal numbers have the deviation 0; NaN is equal to nothing, not even NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from . import bounds as table
from .bounds import SIGNALS, Bound
from .trace import Step, Trace
from .verdict import Check, Word

__all__ = [
    "ORDER",
    "alike",
    "config_differences",
    "deviation",
    "differing",
    "judge",
    "missing_and_extra",
    "noise",
    "option_differences",
    "options",
    "pairs",
    "state_obstacle",
    "steps_of",
    "tensor_deviations",
    "value_differences",
]  # fmt: skip

ORDER = (
    "state.loaded", "state.plausible", "state.names", "state.shapes", "state.digests", "state.scalars",
    "config.groups", "config.scheduler", "config.values", "config.tied", "config.model",
    "probe.logits", "probe.ranks",
    "step1.batch", "step1.learning_rates", *(f"step1.{s}" for s in SIGNALS),
    "steps.batch", "steps.learning_rates", *(f"steps.{s}" for s in SIGNALS),
    "run.ranks", "run.finite", "run.spike", "run.dead", "roundtrip.state",
)  # fmt: skip

_STAGES = {
    "state": "state", "config": "configuration", "probe": "probe", "step1": "step 1", "steps": "steps", "run": "run",
    "roundtrip": "round trip",
}  # fmt: skip

#: How the optimizer computes, not what.
_HOW = frozenset(("foreach", "fused", "capturable", "differentiable", "params", "param_names"))

#: What a model's configuration says about its file, its use or its writer, and not about its computation.
_SILENT = frozenset((
    "torch_dtype", "dtype", "transformers_version", "architectures", "use_cache", "_name_or_path", "name_or_path",
    "_commit_hash", "output_attentions", "output_hidden_states", "return_dict", "torchscript", "auto_map", "id2label",
    "label2id", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "is_decoder",
    "use_bfloat16", "problem_type", "tokenizer_class", "prefix", "task_specific_params", "generation_config",
    "bos_token_id", "eos_token_id", "chunk_size_feed_forward",
))  # fmt: skip

#: Of a scheduler: what changes while it computes and says nothing afterwards.
_TRANSIENT = frozenset(("_get_lr_called_within_step", "_is_initial", "verbose"))

_WORDS = {
    "loss": "the loss", "grad_norm": "the grad norm", "worst_grad": "the gradient of a tensor",
    "update_norm": "the norm of the update", "worst_update": "the update of a tensor", "batch": "the batch",
    "learning_rates": "the learning rates",
}  # fmt: skip

_HINTS = {
    "grad_norm": "pass grad_norm to Recorder.step, or give Recorder the model and the optimizer",
    "worst_grad": "give Recorder the model and the optimizer, with norms=True",
    "update_norm": "give Recorder the model and the optimizer, with norms=True",
    "worst_update": "give Recorder the model and the optimizer, with norms=True",
    "batch": "pass batch to Recorder.step",
    "learning_rates": "give Recorder the optimizer, or pass learning_rates to Recorder.step",
}


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
    made = [_loaded(got), _plausible(got)]
    envelope: dict[str, list[float]] = {}
    if reference is not None:
        limits = table.bounds(profile, reference, got, noise)
        made += _state(reference, got, profile)
        made += _configuration(reference, got)
        made.append(_probe(reference, got, limits["probe.logits"]))
        dynamic = _Dynamic(reference, got, limits, table.column(profile, reference, got))
        made += dynamic.checks()
        envelope = dynamic.envelope()
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
    out: dict[str, float] = {}
    found = _logits(a, b)
    if not isinstance(found, str):
        out["probe.logits"] = found[0]
    limits = table.bounds("strict", a, b)
    dynamic = _Dynamic(a, b, limits, table.column("strict", a, b))
    for signal in SIGNALS:
        for stage in ("step1", "steps"):
            worst = [w.deviation for w in dynamic.found(stage, signal)]
            if worst:
                out[f"{stage}.{signal}"] = max(math.inf if math.isnan(x) else x for x in worst)
    return {n: math.inf if math.isnan(x) else x for n, x in out.items()}


def _check(
    name: str,
    verdict: Word | bool,
    text: str,
    number: float | None = None,
    bound: float | None = None,
    source: str = "",
    where: str | None = None,
) -> Check:
    word: Word = ("pass" if verdict else "fail") if isinstance(verdict, bool) else verdict
    if number is not None and not math.isfinite(number):
        number = None  # the text says it
    if bound is not None and not math.isfinite(bound):
        bound = None
    return Check(_STAGES[name.partition(".")[0]], name, word, text, number, bound, source, where)


def _unknown(name: str, why: str) -> Check:
    return _check(name, "not comparable", why)


def _exact(name: str, problems: Sequence[str], good: str, bad: str, number: int | None = None) -> Check:
    """A check that nothing may fail: problems are names, or names with what is wrong about them."""
    n = len(problems) if number is None else number
    if not problems:
        return _check(name, True, good, 0, 0, "exact")
    first = problems[0].split(" ")[0]
    return _check(name, False, f"{bad}: {listed(problems)}", n, 0, "exact", first if "." in first else None)


def listed(names: Iterable[str], most: int = 3) -> str:
    """listed(["a", "b", "c", "d"]) == "a, b, c and 1 more" """
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def plural(n: int, what: str) -> str:
    """plural(1, "tensor") == "1 tensor" """
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


# ----------------------------------------------------------------------------------------------------------- comparing


def deviation(got: float, expected: float) -> float:
    """|got - expected| / |expected|; 0 where they are equal, NaN where one is NaN, infinite where it has no measure."""
    if got == expected:
        return 0.0
    if math.isnan(got) or math.isnan(expected):
        return math.nan
    if expected == 0 or math.isinf(got) or math.isinf(expected):
        return math.inf
    return abs(got - expected) / abs(expected)


def alike(a: Any, b: Any) -> bool:
    """Whether two plain values are equal; a tuple and a list can be, True and 1 cannot. NaN is a value like others."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    return bool(a == b) or (a != a and b != b)


def state_obstacle(reference: Trace, got: Trace) -> str | None:
    """Why the states cannot be compared, or None."""
    if reference.failed is not None:
        return "the reference could not be loaded"
    if not reference.state and not reference.scalars:
        return (
            "the reference does not say what the job held (Recorder.state writes it down when the checkpoint is saved)"
        )
    if reference.start != got.start:
        return f"the reference says what the job held at step {reference.start}, this checkpoint is of step {got.start}"
    if not got.state and not got.scalars:
        return "the run does not say what the job held"
    return None


def _judged(name: str) -> bool:
    """Whether a tensor is part of what must be equal; streams of random numbers and readers belong to a rank."""
    return name.partition(".")[0] not in ("rng", "dataloader")


def _other_names(name: str, tied: Sequence[Sequence[str]]) -> Iterator[str]:
    """Canonical names of the same parameter, or of the same slot of its optimizer state."""
    for group in tied:
        for fqn in group:
            for before in ("model.", "optim.state.", ""):
                head = before + fqn
                if name == head or (before != "model." and name.startswith(head + ".")):
                    yield from (before + other + name[len(head) :] for other in group if other != fqn)


def missing_and_extra(reference: Trace, got: Trace) -> tuple[list[str], list[str]]:
    """Tensors that only one side has, but those that the other has under another name of a tied parameter."""
    tied = [*reference.tied, *got.tied]

    def gone(have: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
        return [
            n for n in have
            if n not in other and _judged(n) and not any(alias in other for alias in _other_names(n, tied))
        ]  # fmt: skip

    return gone(reference.state, got.state), gone(got.state, reference.state)


def differing(reference: Trace, got: Trace) -> list[str]:
    """Tensors of one dtype and shape with other elements, in the order of the reference."""
    out = []
    for n, (dtype, shape, mark) in reference.state.items():
        other = got.state.get(n)
        if other is None or not _judged(n) or not mark or not other[2]:
            continue
        if other[0] == dtype and tuple(other[1]) == tuple(shape) and other[2] != mark:
            out.append(n)
    return out


def options(trace: Trace) -> dict[str, dict[str, Any]]:
    """{FQN: options of its param group}, without those that only say how the optimizer computes."""
    out: dict[str, dict[str, Any]] = {}
    for group in trace.groups:
        chosen = {k: v for k, v in group.items() if k not in _HOW}
        for name in group.get("params") or []:
            out[str(name)] = chosen
    return out


def option_differences(
    reference: Trace, got: Trace
) -> tuple[dict[str, dict[str, tuple[Any, Any]]], list[str], list[str]]:
    """({option: {FQN: (expected, found)}}, FQNs of the reference's optimizer alone, FQNs of this one alone)."""
    theirs, ours = options(reference), options(got)
    out: dict[str, dict[str, tuple[Any, Any]]] = {}
    for name, expected in theirs.items():
        for key, value in expected.items():
            if name in ours and key in ours[name] and not alike(value, ours[name][key]):
                out.setdefault(key, {})[name] = (value, ours[name][key])
    tied = [*reference.tied, *got.tied]
    missing = [n for n in theirs if n not in ours and not any(a in ours for a in _other_names(n, tied))]
    extra = [n for n in ours if n not in theirs and not any(a in theirs for a in _other_names(n, tied))]
    return out, missing, extra


def _told(value: Any) -> bool:
    """Whether a value is plain data that a comparison can say something about."""
    if isinstance(value, (list, tuple)):
        return all(_told(v) for v in value)
    return isinstance(value, (bool, int, float, str)) and not (isinstance(value, str) and value.startswith("<"))


def value_differences(
    reference: Trace, got: Trace, component: str
) -> tuple[dict[str, tuple[Any, Any]], list[str], list[str], int]:
    """({name: (expected, found)}, names only there, names only here, how many were compared) of one component."""
    theirs = {n: v for n, v in reference.values.items() if n.partition(".")[0] == component}
    ours = {n: v for n, v in got.values.items() if n.partition(".")[0] == component}
    skip = _TRANSIENT if component == "scheduler" else frozenset[str]()
    both = [n for n in theirs if n in ours and n.rpartition(".")[2] not in skip and _told(theirs[n]) and _told(ours[n])]
    out = {n: (theirs[n], ours[n]) for n in both if not alike(theirs[n], ours[n])}
    return out, [n for n in theirs if n not in ours], [n for n in ours if n not in theirs], len(both)


def config_differences(reference: Mapping[str, Any], got: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{key: (expected, found)} of two configurations of a model, with dots where they are nested.

    Keys that say nothing about the computation are left out, and those that one side lacks: versions of transformers
    write defaults or do not. rope_theta is the same at the top and in rope_parameters, where version 5 has it.
    """
    a, b = _leaves(reference), _leaves(got)
    return {k: (a[k], b[k]) for k in a if k in b and not alike(a[k], b[k])}


def _leaves(config: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in config.items():
        if key in _SILENT or "drop" in key:  # the runner sets dropout to 0; whether it is active is in the trace
            continue
        if key in ("rope_parameters", "rope_scaling") and isinstance(value, Mapping) and "rope_theta" in value:
            out[f"{at}rope_theta"] = value["rope_theta"]
            value = {k: v for k, v in value.items() if k != "rope_theta"}
        if isinstance(value, Mapping):
            out.update(_leaves(value, f"{at}{key}."))
        else:
            out[f"{at}{key}"] = value
    return out


def steps_of(trace: Trace) -> dict[str, float]:
    """{FQN: optimizer step} of what the optimizer holds."""
    head, tail = "optim.state.", ".step"
    return {
        n[len(head) : -len(tail)]: float(v)
        for n, v in trace.scalars.items()
        if n.startswith(head) and n.endswith(tail) and len(n) > len(head) + len(tail)
    }


# ---------------------------------------------------------------------------------------------------------------- state


def _loaded(got: Trace) -> Check:
    name = "state.loaded"
    if got.failed is not None:
        return _check(name, False, f"the checkpoint could not be loaded into the job: {got.failed}", source="exact")
    copies = [str(n) for n in got.environment.get("copies_differ") or []]
    if copies:
        return _exact(name, copies, "", f"copies on several ranks are not equal, of {plural(len(copies), 'tensor')}")
    if not got.stored or not got.state:
        return _unknown(name, "the files were not read a second time, so what was loaded was not compared with them")
    wrong = [n for n, mark in got.stored.items() if n not in got.state or (got.state[n][2] and got.state[n][2] != mark)]
    good = f"the job holds what the files say, in all {len(got.stored)} tensors"
    return _exact(name, wrong, good, f"the job does not hold what the files say in {plural(len(wrong), 'tensor')}")


def _plausible(got: Trace) -> Check:
    """What a state shows by itself. Parameters that never got a gradient have no state, and those that got fewer have
    smaller steps, so only what no training does is a fault."""
    name = "state.plausible"
    if got.failed is not None or (not got.state and not got.scalars):
        return _unknown(name, "the run does not say what the job held")
    problems = [
        f"{n} is {v}" for n, v in got.scalars.items() if math.isnan(v) or (math.isinf(v) and n.startswith("optim."))
    ]
    trained = trained_steps(got)
    steps = {n: v for n, v in steps_of(got).items() if math.isfinite(v)}
    if trained > 0:
        zeros = [n for n, v in steps.items() if v == 0]
        if zeros and len(zeros) == len(steps):
            problems.append(f"the optimizer's step is 0 on all {plural(len(steps), 'tensor')}, after {trained} steps")
        elif zeros:
            problems += [f"optim.state.{n}.step is 0, after {trained} steps" for n in zeros]
        moments = any(n.startswith("optim.state.") for n in got.state) or bool(steps)
        adaptive = any("betas" in g and g.get("params") for g in got.groups)
        if adaptive and not moments:
            problems.append(f"the optimizer has param groups and no moments, after {trained} steps")
    for module, found in _modules(steps).items():
        if 0 not in found.values() and len(set(found.values())) > 1:
            problems.append(f"{module} has parameters with optimizer steps {_few(sorted(set(found.values())))}")
    slots: dict[str, set[str]] = {}
    for n in got.state:
        if n.startswith("optim.state.") and n.count(".") > 2:
            fqn, _, slot = n[len("optim.state.") :].rpartition(".")
            slots.setdefault(slot, set()).add(fqn)
    if "exp_avg" in slots and "exp_avg_sq" in slots:
        problems += [f"{n} has one of exp_avg and exp_avg_sq" for n in sorted(slots["exp_avg"] ^ slots["exp_avg_sq"])]
    return _exact(
        name, problems, "optimizer steps, moments and scalars are such as a training leaves", "no training leaves this"
    )


def trained_steps(trace: Trace) -> int:
    """How many steps had been trained when the checkpoint was saved, as far as the trace says."""
    for name in ("step", "global_step", "steps", "global_steps", "num_steps", "iteration"):
        found = trace.values.get(f"trainer.{name}")
        if isinstance(found, int) and not isinstance(found, bool):
            return found
    return trace.start


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


def _few(numbers: Sequence[float]) -> str:
    return " and ".join(f"{n:g}" for n in numbers[:3])


def _state(reference: Trace, got: Trace, profile: str) -> list[Check]:
    names = ("state.names", "state.shapes", "state.digests", "state.scalars")
    why = state_obstacle(reference, got)
    if why is not None:
        return [_unknown(n, why) for n in names]
    out = []
    if reference.state and got.state:
        missing, extra = missing_and_extra(reference, got)
        parts = [f"{plural(len(missing), 'tensor')} missing"] if missing else []
        parts += [f"{len(extra)} that the reference does not have"] if extra else []
        out.append(_exact(names[0], missing + extra, f"the same {len(got.state)} tensors", ", ".join(parts)))
    else:
        out.append(_unknown(names[0], "one of the two does not list its tensors"))
    if got.failed is not None:
        return out + [_unknown(n, "the checkpoint could not be loaded") for n in names[1:]]
    common = [n for n in reference.state if n in got.state and _judged(n)]
    shapes, dtypes = [], []
    for n in common:
        (d, s, _), (e, t, _) = reference.state[n], got.state[n]
        if tuple(s) != tuple(t):
            shapes.append(f"{n} is {list(t)} and was {list(s)}")
        elif d != e:
            dtypes.append(f"{n} is {e} and was {d}")
    relaxed = profile == "relaxed"
    good = f"the same shapes and dtypes in all {len(common)} tensors"
    if dtypes and relaxed:
        what = plural(len(dtypes), "tensor")
        good = f"the same shapes; {what} of another dtype, as the profile allows: {listed(dtypes)}"
    if not common:
        out.append(_unknown(names[1], "no tensor is on both sides"))
    else:
        parts = [f"{plural(len(shapes), 'tensor')} of another shape"] if shapes else []
        parts += [f"{plural(len(dtypes), 'tensor')} of another dtype"] if dtypes else []
        out.append(_exact(names[1], shapes + ([] if relaxed else dtypes), good, ", ".join(parts)))
    compared = [
        n for n in common if reference.state[n][0] == got.state[n][0] and reference.state[n][2] and got.state[n][2]
    ]
    compared = [n for n in compared if tuple(reference.state[n][1]) == tuple(got.state[n][1])]
    if compared:
        wrong = differing(reference, got)
        good = f"equal bytes in all {len(compared)} tensors" + (
            f"; {len(dtypes)} of another dtype are not counted" if dtypes and relaxed else ""
        )
        bad = f"{len(wrong)} of {plural(len(compared), 'tensor')} hold other bytes"
        out.append(_exact(names[2], wrong, good, bad))
    else:
        out.append(_unknown(names[2], "no tensor has a fingerprint on both sides"))
    both = [n for n in reference.scalars if n in got.scalars and _judged(n)]
    wrong = [f"{n} is {got.scalars[n]!r} and was {reference.scalars[n]!r}" for n in both
             if not alike(float(reference.scalars[n]), float(got.scalars[n]))]  # fmt: skip
    if both:
        good = f"equal values of all {plural(len(both), 'tensor')} with one element"
        bad = f"{plural(len(wrong), 'tensor')} with one element has another value"
        out.append(_exact(names[3], wrong, good, bad))
    else:
        out.append(_unknown(names[3], "no tensor with one element is known on both sides"))
    return out


# -------------------------------------------------------------------------------------------------------- configuration


def _configuration(reference: Trace, got: Trace) -> list[Check]:
    if got.failed is not None:
        names = ("groups", "scheduler", "values", "tied", "model")
        return [_unknown(f"config.{n}", "the checkpoint could not be loaded") for n in names]
    rules = (_groups, _scheduler, _values, _tied, _model)
    return [rule(reference, got) for rule in rules]


def _groups(reference: Trace, got: Trace) -> Check:
    name = "config.groups"
    theirs, ours = options(reference), options(got)
    if not theirs or not ours:
        who = "the run" if theirs else "the reference"
        return _unknown(name, f"{who} does not say what its param groups are (Recorder.state writes them down)")
    if reference.start != got.start:
        return _unknown(name, f"the reference's param groups are those of step {reference.start}")
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
        return _check(name, False, "the checkpoint has no state of the scheduler, the reference has one", 1, 0, "exact")
    if not compared:
        return _unknown(name, "no state of a scheduler on both sides")
    out = _exact(
        name, [f"{n} is {b!r} and was {a!r}" for n, (a, b) in found.items()], "the same state of the scheduler",
        "the state of the scheduler differs",
    )  # fmt: skip
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
        problems += [f"{k} is {b!r} and was {a!r}" for k, (a, b) in found.items()]
        if component == "trainer":
            problems += [f"{k} is missing and was {reference.values[k]!r}" for k in gone if _told(reference.values[k])]
        else:
            missing += gone
        extra += new
        compared += n
    if reference.clip is not None:
        compared += 1
        if got.clip != reference.clip:
            problems.append(f"clip is {got.clip!r} and was {reference.clip!r}")
    if not compared and not problems:
        return _unknown(name, "no counter or other value is known on both sides")
    out = _exact(
        name, problems, f"the same {plural(compared, 'value')}", f"{plural(len(problems), 'value')} not as it was"
    )
    return _with_rest(out, missing, extra)


def _ties(trace: Trace) -> set[frozenset[str]]:
    return {frozenset(group) for group in trace.tied if len(group) > 1}


def _own_tied(got: Trace) -> Check | None:
    """The model's own configuration says that the head is tied; None where it does not, or has no head."""
    heads = [n for n in got.state if n.startswith("model.") and n.endswith("lm_head.weight")]
    if got.config is None or got.config.get("tie_word_embeddings") is not True or not heads:
        return None
    if got.tied:
        return _check("config.tied", True, "tied as the configuration says", 0, 0, "exact")
    text = "the configuration says tie_word_embeddings, and the job trains the head and the embedding apart"
    return _check("config.tied", False, text, 1, 0, "exact", heads[0].removeprefix("model."))


def _tied(reference: Trace, got: Trace) -> Check:
    name = "config.tied"
    own = _own_tied(got)
    if own is not None and own.verdict == "fail":
        return own
    if not reference.tied and not reference.state and reference.parameters is None:
        return own or _unknown(name, "the reference does not say which parameters are tied (give Recorder the model)")
    theirs, ours = _ties(reference), _ties(got)
    problems = [f"{' and '.join(sorted(g))} were tied and are not" for g in sorted(theirs - ours, key=sorted)]
    problems += [f"{' and '.join(sorted(g))} are tied and were not" for g in sorted(ours - theirs, key=sorted)]
    good = f"the same {plural(len(ours), 'tied parameter')}" if ours else "no parameter is tied on either side"
    return _exact(name, problems, good, "parameters are not tied as they were")


def _model(reference: Trace, got: Trace) -> Check:
    name = "config.model"
    if reference.config is None or got.config is None:
        who = "the reference" if reference.config is None else "the run"
        return _unknown(name, f"{who} has no configuration of the model")
    found = config_differences(reference.config, got.config)
    problems = [f"{k} is {b!r} and was {a!r}" for k, (a, b) in found.items()]
    return _exact(name, problems, "the same configuration of the model", "the model's configuration differs")


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
    if why := _other_job(reference, got):
        return why
    try:
        a, b = (np.load(f, mmap_mode="r", allow_pickle=False) for f in files)
    except (OSError, ValueError, EOFError) as e:
        return f"the logits cannot be read ({e})"
    if a.shape != b.shape or a.ndim < 2 or not a.size:
        return f"the logits are {list(b.shape)}, those of the reference {list(a.shape)}"
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    apart = total = divergence = 0.0
    largest = 0.0
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
        return _unknown(name, found)
    number, largest, divergence = found
    if bound.chaotic:
        return _unknown(name, _chaotic(bound))
    if math.isnan(number):
        return _check(name, False, "there is NaN among the logits", None, bound.relative, bound.source)
    text = (
        f"logits deviate by {number:.2g} (relative L2); largest difference {largest:.2g}, mean KL divergence "
        f"{divergence:.2g}"
    )
    if number == 0:
        text = "the logits are bit-equal"
    return _check(name, number <= bound.relative, text, number, bound.relative, bound.source)


def _probe_ranks(got: Trace) -> Check:
    name, agree = "probe.ranks", got.probe.get("agree")
    if agree is None:
        return _unknown(name, "the ranks did not compare their logits")
    return _check(
        name,
        bool(agree),
        "all ranks have the same logits" if agree else "ranks have different logits for one batch",
        source="exact",
    )


def _chaotic(bound: Bound) -> str:
    return (
        f"two runs of this very job differ so much ({bound.relative / 5:.2g}) that a bound of five times that would "
        "prove nothing: switch off what is random, or compute deterministically"
    )


# ---------------------------------------------------------------------------------------------------------------- steps


@dataclass
class _Worst:
    """The deviation of one signal in one step. `order` is that of the step after loading, from 1."""

    step: int
    order: int
    deviation: float
    expected: float
    got: float
    tensor: str | None = None
    left_out: int = 0


def pairs(reference: Trace, got: Trace) -> list[tuple[Step, Step]]:
    """(expected, found) of the steps that both have, by number."""
    theirs = {s.step: s for s in reference.steps}
    return [(theirs[s.step], s) for s in got.steps if s.step in theirs]


def tensor_deviations(
    reference: Trace, got: Trace, expected: Step, found: Step, updates: bool, floor: float
) -> tuple[dict[str, tuple[float, float, float]], int]:
    """({FQN: (deviation, expected, found)}, how many were left out) of the gradients or the updates of single tensors.

    Deviations are relative to the tensor's norm in the reference, or to `floor` times the norm of all where it is less.
    Gradients below that on both sides are left out, and updates of tensors with such gradients: the ones are rounding
    noise, the others Adam's picture of it. A tensor that one side does not have counts as zero there, but for another
    name of a tied one.
    """
    theirs, ours = (expected.updates, found.updates) if updates else (expected.grads, found.grads)
    whole = math.sqrt(sum(v * v for v in theirs.values() if math.isfinite(v)))
    least = floor * whole
    grads = math.sqrt(sum(v * v for v in expected.grads.values() if math.isfinite(v)))
    same = _ties(reference) & _ties(got)
    tied = [sorted(g) for g in same]
    out: dict[str, tuple[float, float, float]] = {}
    left_out = 0
    for n in [*theirs, *(n for n in ours if n not in theirs)]:
        a = _norm_of(n, theirs, tied)
        b = _norm_of(n, ours, tied)
        if a is None and b is None:
            continue
        x, y = a or 0.0, b or 0.0
        if n not in theirs and a is not None:
            continue  # met under its other name
        gradients = (expected.grads.get(n), found.grads.get(n)) if updates else (x, y)
        if x != y and all(g is not None and g < floor * grads for g in gradients) and any(gradients):
            left_out += 1
            continue
        if x == y:
            out[n] = (0.0, x, y)
        elif math.isnan(x) or math.isnan(y):
            out[n] = (math.nan, x, y)
        else:
            scale = max(x, least)
            out[n] = (abs(y - x) / scale if scale and math.isfinite(x) else math.inf, x, y)
    return out, left_out


def _norm_of(name: str, norms: Mapping[str, float], tied: Sequence[Sequence[str]]) -> float | None:
    if name in norms:
        return norms[name]
    return next((norms[a] for a in _other_names(name, tied) if a in norms), None)


def _other_job(reference: Trace, got: Trace) -> str | None:
    """Why the two did not compute the same thing, whatever was loaded, or None."""
    if got.failed is not None:
        return "the checkpoint could not be loaded"
    if reference.failed is not None:
        return "the reference could not be loaded"
    if None not in (reference.sequence, got.sequence) and reference.sequence != got.sequence:
        return f"sequences are of {got.sequence} tokens, those of the reference of {reference.sequence}"
    a, b = (_dtype(t.dtype) for t in (reference, got))
    if a is not None and b is not None and a != b:
        return f"this run computes in {b}, the reference did in {a}"
    return None


def _dtype(name: str | None) -> str | None:
    if not name:
        return None
    short = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
    plain = name.removeprefix("torch.")
    return short.get(plain, plain)


def _other_data(reference: Trace, got: Trace) -> str | None:
    """Why the batches are not meant to be the same, or None; names of files say nothing where the batches are equal."""
    both = pairs(reference, got)
    if both and both[0][0].batch is not None and both[0][0].batch == both[0][1].batch:
        return None
    if None not in (reference.data, got.data) and reference.data != got.data:
        return f"the data is {got.data}, that of the reference {reference.data}"
    if (
        got.data == reference.data == "synthetic"
        and None not in (reference.seed, got.seed)
        and reference.seed != got.seed
    ):
        return f"the synthetic data is of seed {got.seed}, that of the reference of {reference.seed}"
    return None


def _random(reference: Trace, got: Trace) -> str | None:
    if not (reference.dropout or got.dropout):
        return None
    restored = got.environment.get("rng_restored") is True
    if restored and got.world_size is not None and got.world_size == reference.world_size:
        return None
    return (
        "dropout is on, and the streams of random numbers are not those of the reference: switch it off in both, or "
        "restore them at the same world size"
    )


@dataclass
class _Dynamic:
    """The checks of steps. `column` names that of the table."""

    reference: Trace
    got: Trace
    limits: Mapping[str, Bound]
    column: str

    def __post_init__(self) -> None:
        self.pairs = pairs(self.reference, self.got)
        tight = self.column.startswith("fp32") or self.column.endswith("held")
        kind = table.precision(self.reference, self.got)
        self.floor = table.NOISE_FLOOR["fp32" if tight else kind]

    def _part(self, stage: str) -> list[tuple[int, Step, Step]]:
        """(how many steps after loading, expected, found)"""
        if not self.got.steps:
            return []
        first = self.got.steps[0].step
        part = [(b.step - first + 1, a, b) for a, b in self.pairs]
        return [p for p in part if (p[0] == 1) == (stage == "step1")]

    def _unmatched(self, stage: str) -> str | None:
        if self.got.failed is not None:
            return "the checkpoint could not be loaded"
        if self.reference.failed is not None:
            return "the reference could not be loaded"
        if not self.got.steps:
            return "no step was run"
        if not self.reference.steps:
            return "the reference has no steps"
        if not self.pairs:
            a, b = self.reference.steps, self.got.steps
            return (
                f"no step is on both sides: the reference has steps {a[0].step} to {a[-1].step}, this run "
                f"{b[0].step} to {b[-1].step}"
            )
        if not self._part(stage):
            if stage == "step1":
                return f"the reference does not have step {self.got.steps[0].step}"
            return "only one step is on both sides" if len(self.pairs) == 1 else "no later step is on both sides"
        return None

    def _obstacle(self, stage: str) -> str | None:
        """Why numbers of steps cannot be compared, or None."""
        if why := self._unmatched(stage) or _other_job(self.reference, self.got):
            return why
        a, b = self.reference, self.got
        if None not in (a.global_batch, b.global_batch) and a.global_batch != b.global_batch:
            return f"the global batch is {b.global_batch}, that of the reference {a.global_batch}"
        return _other_data(a, b) or _random(a, b)

    def found(self, stage: str, signal: str) -> list[_Worst]:
        """Deviations of a signal in every step that has it on both sides."""
        if self._obstacle(stage):
            return []
        out = []
        for order, expected, got in self._part(stage):
            if signal.startswith("worst"):
                updates = signal == "worst_update"
                if not (expected.updates and got.updates if updates else expected.grads and got.grads):
                    continue
                every, left_out = tensor_deviations(self.reference, self.got, expected, got, updates, self.floor)
                if every:
                    n = max(every, key=lambda n: math.inf if math.isnan(every[n][0]) else every[n][0])
                    out.append(_Worst(got.step, order, *every[n], n, left_out))
            else:
                x, y = getattr(expected, signal), getattr(got, signal)
                if x is not None and y is not None:
                    out.append(_Worst(got.step, order, deviation(y, x), x, y))
        return out

    def checks(self) -> list[Check]:
        """Those of stages "step 1" and "steps"."""
        out = []
        for stage in ("step1", "steps"):
            out += [self._batch(stage), self._rates(stage)]
            out += [self._signal(stage, s) for s in SIGNALS]
        return out

    def envelope(self) -> dict[str, list[float]]:
        """Bounds of the common steps, empty where they are not compared."""
        out: dict[str, list[float]] = {}
        for signal in ("loss", "grad_norm", "update_norm"):
            out[signal] = []
            if not self.pairs or self._obstacle("step1" if self._part("step1") else "steps"):
                continue
            first = self.got.steps[0].step
            for a, b in self.pairs:
                order = b.step - first + 1
                value = getattr(a, signal)
                bound = self.limits[f"{'step1' if order == 1 else 'steps'}.{signal}"]
                out[signal].append(bound.at(value if value is not None else math.nan, order))
        return out

    def _signal(self, stage: str, signal: str) -> Check:
        name = f"{stage}.{signal}"
        bound = self.limits[name]
        if why := self._obstacle(stage):
            return _unknown(name, why)
        every = self.found(stage, signal)
        if not every:
            return _unknown(name, self._lacking(stage, signal))
        if bound.chaotic:
            return _unknown(name, _chaotic(bound))

        def excess(w: _Worst) -> float:
            return math.inf if math.isnan(w.deviation) else w.deviation / bound.at(w.expected, w.order)

        worst = max(every, key=excess)
        most = bound.at(worst.expected, worst.order)
        where = f"step {worst.step}" + (f", {worst.tensor}" if worst.tensor else "")
        what = (
            f"{_WORDS[signal]} deviates by {worst.deviation:.2g}: {worst.got!r} and was {worst.expected!r}, in {where}"
        )
        if worst.deviation == 0:
            what = f"{_WORDS[signal]} is bit-equal" + ("" if stage == "step1" else f" in {plural(len(every), 'step')}")
        if worst.left_out:
            what += f"; {plural(worst.left_out, 'tensor')} with a gradient of rounding noise not counted"
        shown = None if worst.deviation == 0 else where
        return _check(name, worst.deviation <= most, what, worst.deviation, most, bound.source, shown)

    def _lacking(self, stage: str, signal: str) -> str:
        attribute = {"worst_grad": "grads", "worst_update": "updates"}.get(signal, signal)
        bare = [a for _, a, _ in self._part(stage) if getattr(a, attribute) in (None, {}, [])]
        who = "the reference" if bare else "the run"
        hint = f": {_HINTS[signal]}" if bare and signal in _HINTS else ""
        return f"{who} does not have {_WORDS[signal]}{hint}"

    def _batch(self, stage: str) -> Check:
        name = f"{stage}.batch"
        if why := self._unmatched(stage) or _other_data(self.reference, self.got):
            return _unknown(name, why)
        known = [(a, b) for _, a, b in self._part(stage) if a.batch is not None and b.batch is not None]
        if not known:
            return _unknown(name, self._lacking(stage, "batch"))
        wrong = [b.step for a, b in known if a.batch != b.batch]
        if not wrong:
            return _check(name, True, f"the same batch in {plural(len(known), 'step')}", 0, 0, "exact")
        text = f"another batch than the reference's in {len(wrong)} of {plural(len(known), 'step')}"
        return _check(name, False, text, len(wrong), 0, "exact", f"step {wrong[0]}")

    def _rates(self, stage: str) -> Check:
        name = f"{stage}.learning_rates"
        if why := self._unmatched(stage):
            return _unknown(name, why)
        known = [(a, b) for _, a, b in self._part(stage) if a.learning_rates and b.learning_rates]
        if not known:
            return _unknown(name, self._lacking(stage, "learning_rates"))
        worst, where, text = 0.0, None, f"the same learning rates in {plural(len(known), 'step')}"
        for a, b in known:
            for label, x, y in rates_by_group(self.reference, self.got, a, b):
                d = deviation(y, x)
                if not d <= worst:
                    worst, where = d, f"step {b.step}, {label}"
                    text = f"the learning rate is {y!r} and was {x!r} in step {b.step}, {label}"
            if not math.isfinite(worst):
                break
        return _check(name, worst == 0, text, worst, 0, "exact", where)


def rates_by_group(reference: Trace, got: Trace, a: Step, b: Step) -> list[tuple[str, float, float]]:
    """(which group, expected, found) of the learning rates of a step.

    By the parameters of the groups where both sides list them, since groups may be in another order; else by position.
    Lists of different lengths are compared as sets of values: a missing value has the rate NaN.
    """
    x, y = a.learning_rates or [], b.learning_rates or []
    sides = []
    for trace, rates in ((reference, x), (got, y)):
        fqns = [[str(p) for p in g.get("params") or []] for g in trace.groups]
        sides.append({n: rates[i] for i, g in enumerate(fqns) for n in g} if len(fqns) == len(rates) else {})
    common = [n for n in sides[0] if n in sides[1]]
    if common:
        return [(f"group of {n}", sides[0][n], sides[1][n]) for n in common]
    if len(x) == len(y):
        return [(f"group {i}", u, v) for i, (u, v) in enumerate(zip(x, y, strict=True))]
    u, v = sorted(set(x)), sorted(set(y))
    if u == v:
        return [("all groups", u[0], v[0])]
    return [(f"{len(y)} groups instead of {len(x)}", u[-1], v[-1] if v[-1] != u[-1] else math.nan)]


# ------------------------------------------------------------------------------------------------------------------ run


def _ranks(got: Trace) -> Check:
    name = "run.ranks"
    known = [s for s in got.steps if s.losses]
    if not known:
        return _unknown(name, "the losses of the ranks were not gathered")
    for s in known:
        losses = s.losses or []
        if any(x != losses[0] and not (x != x and losses[0] != losses[0]) for x in losses):
            text = f"ranks do not have the same loss in step {s.step}: {_values_of(losses)}"
            return _check(name, False, text, max(deviation(x, losses[0]) for x in losses), 0, "exact", f"step {s.step}")
    return _check(name, True, f"all ranks have the same loss, in {plural(len(known), 'step')}", 0, 0, "exact")


def _values_of(losses: Sequence[float]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, x in enumerate(losses):
        ranks.setdefault(repr(x), []).append(rank)
    return "; ".join(f"{x} on {listed([f'rank {r}' for r in rs])}" for x, rs in list(ranks.items())[:4])


def not_finite(step: Step) -> Iterator[tuple[str, float]]:
    """What is NaN or infinite in a step, and its value: the loss first, then norms, gradients before updates."""
    for what, value in (("loss", step.loss), ("grad_norm", step.grad_norm), ("update_norm", step.update_norm)):
        if value is not None and not math.isfinite(value):
            yield what, value
    for what, norms in (("gradient", step.grads), ("update", step.updates)):
        yield from ((f"{what} of {n}", v) for n, v in norms.items() if not math.isfinite(v))


def _finite(got: Trace) -> Check:
    name = "run.finite"
    if not got.steps:
        return _unknown(name, "no step was run")
    for s in got.steps:
        found = list(not_finite(s))
        if found:
            more = f", and {len(found) - 1} more" if len(found) > 1 else ""
            text = f"{found[0][0]} is {found[0][1]} in step {s.step}{more}"
            return _check(name, False, text, source="exact", where=f"step {s.step}, {found[0][0]}")
    return _check(name, True, f"loss and norms are finite numbers in {plural(len(got.steps), 'step')}", source="exact")


#: A grad norm this many times what is usual is a spike.
SPIKE = 10.0


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
        return _unknown(name, "too few steps with a grad norm to know what is usual")
    text = f"the largest grad norm is {worst:.2g} times what is usual ({usual:.3g}), in {where}"
    return _check(name, worst <= SPIKE, text, worst, SPIKE, "given", where)


def _dead(reference: Trace | None, got: Trace) -> Check:
    name = "run.dead"
    known = [s for s in got.steps if s.grad_norm is not None]
    if not known:
        return _unknown(name, "no grad norm was recorded")
    theirs = {s.step: s.grad_norm for s in reference.steps} if reference is not None else {}
    dead = [s.step for s in known if s.grad_norm == 0 and theirs.get(s.step) != 0]
    if dead:
        text = f"the grad norm is 0 in {plural(len(dead), 'step')}: nothing is learnt"
        return _check(name, False, text, len(dead), 0, "exact", f"step {dead[0]}")
    return _check(name, True, "there is a gradient in every step", 0, 0, "exact")


def _roundtrip(got: Trace) -> Check:
    name = "roundtrip.state"
    if "differing" not in got.roundtrip:
        return _unknown(name, f"no save and load: {got.roundtrip.get('skipped', 'it was not asked for')}")
    wrong = [str(n) for n in got.roundtrip["differing"]]
    bad = f"{plural(len(wrong), 'tensor')} not as saved after loading"
    return _exact(name, wrong, "what was saved was loaded again, bit for bit", bad)
