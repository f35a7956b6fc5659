"""The differences of two traces, as data: `judge` turns them into checks, diagnosis/ looks for causes in them.

Comparisons use full-precision values, not the rounded values shown. Equal numbers have the deviation 0; NaN never
equals NaN. A tied parameter is found under any of its names. What one side did not record is not a difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ...layouts import program_of
from ...printable import count_noun, list_first
from ..text import fqn_of, is_step
from ..trace.model import Step, Trace
from ..trace.records import EnvironmentRecord
from ..trace.sketches import decode_sketches, sketch_distance
from .bounds import QUANTA

T = TypeVar("T")

__all__ = [
    "MISSING",
    "are_alike",
    "common_inputs",
    "common_steps",
    "config_differences",
    "describe_lost_options",
    "differing_inputs",
    "differing_tensors",
    "first_common_step",
    "group_pairs",
    "ignored_config_keys",
    "ignored_options",
    "in_stored_dtypes",
    "inputs_of_one_side",
    "job_obstacle",
    "loaded_versions",
    "lost_options",
    "missing_and_extra",
    "must_be_equal",
    "non_finite_values",
    "optimizer_steps",
    "option_differences",
    "options_by_parameter",
    "package_differences",
    "rates_by_group",
    "relative_deviation",
    "shape_differences",
    "state_obstacle",
    "tensor_deviations",
    "tensors_not_as_stored",
    "tensors_with_unequal_copies",
    "tied_groups",
]

#: Options that change how the optimizer computes, but not the result.
_HOW = frozenset(("foreach", "fused", "capturable", "differentiable", "params", "param_names"))

#: Options that torch's own optimizers write, some versions of them.
_TORCHS = frozenset(
    (
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "amsgrad",
        "maximize",
        "decoupled_weight_decay",
        "momentum",
        "dampening",
        "nesterov",
        "rho",
        "alpha",
        "centered",
        "lambd",
        "t0",
        "lr_decay",
        "initial_accumulator_value",
        "momentum_decay",
        "etas",
        "step_sizes",
    )
)

#: Keys of a model's configuration about its file, its use or its writer, which do not affect the computation.
_SILENT = frozenset(
    (
        "torch_dtype",
        "dtype",
        "transformers_version",
        "architectures",
        "use_cache",
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "torchscript",
        "auto_map",
        "id2label",
        "label2id",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "is_decoder",
        "use_bfloat16",
        "problem_type",
        "tokenizer_class",
        "prefix",
        "task_specific_params",
        "generation_config",
        "bos_token_id",
        "eos_token_id",
        "chunk_size_feed_forward",
    )
)


class _Missing:
    """Stands for an option or a key that one side lacks."""

    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()


def relative_deviation(got: float, expected: float) -> float:
    """Return |got - expected| / |expected|; 0 if they are equal, NaN if one is NaN, infinite if `expected` is 0 or one
    is infinite."""
    if got == expected:
        return 0.0
    if math.isnan(got) or math.isnan(expected):
        return math.nan
    if expected == 0 or math.isinf(got) or math.isinf(expected):
        return math.inf
    return abs(got - expected) / abs(expected)


def are_alike(a: object, b: object) -> bool:
    """Tell whether two plain values are equal. A tuple can equal a list, True never equals 1, and NaN equals NaN."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(are_alike, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(are_alike(a[k], b[k]) for k in a)
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    return bool(a == b) or (a != a and b != b)


# ---------------------------------------------------------------------------------------------------------------- state


def state_obstacle(reference: Trace, got: Trace) -> str | None:
    """Return a text that says why the states of two traces cannot be compared; None if they can."""
    if reference.failed is not None:
        return "the reference could not be loaded"
    if not reference.state and not reference.scalars:
        return "the reference did not record what the job held (Recorder.state does, when the checkpoint is saved)"
    if reference.start != got.start:
        return f"the reference recorded the job at step {reference.start}, but this checkpoint is of step {got.start}"
    if not got.state and not got.scalars:
        return "the run did not record what the job held"
    return None


def must_be_equal(name: str) -> bool:
    """Tell whether a tensor must be equal on both sides; random states and states of data readers belong to a rank and
    need not be."""
    return name.partition(".")[0] not in ("rng", "dataloader")


def _names_if_tied(name: str, tied: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the other canonical names of the same parameter, or of the same slot (such as exp_avg) of its optimizer
    state.

    `tied` lists the FQNs of each parameter that has several.
    """
    for group in tied:
        for fqn in group:
            for before in ("model.", "optim.state.", ""):
                head = before + fqn
                if name == head or (before != "model." and name.startswith(head + ".")):
                    yield from (before + other + name[len(head) :] for other in group if other != fqn)


def missing_and_extra(reference: Trace, got: Trace) -> tuple[list[str], list[str]]:
    """Return (tensors that only the reference has, tensors that only this side has), by canonical name.

    A tied parameter counts as there under any of its names. Random states and states of data readers are left out.
    """
    tied = [*reference.tied, *got.tied]

    def gone(have: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
        return [
            n
            for n in have
            if n not in other and must_be_equal(n) and not any(alias in other for alias in _names_if_tied(n, tied))
        ]

    return gone(reference.state, got.state), gone(got.state, reference.state)


def tensors_with_unequal_copies(got: Trace) -> list[str]:
    """List the tensors whose copies on several ranks differ."""
    return [str(n) for n in got.environment.get("copies_differ") or []]


def tensors_not_as_stored(got: Trace) -> list[str]:
    """List the tensors whose fingerprint in the job is not that of the files; [] if these were not read a second
    time."""
    return [n for n, mark in got.stored.items() if n not in got.state or (got.state[n][2] and got.state[n][2] != mark)]


def in_stored_dtypes(reference: Trace, got: Trace) -> tuple[Trace, Trace]:
    """Return (reference, got) as a comparison sees them that allows rounding.

    A tensor that the files of `got` have in another dtype than the reference is on both sides what it is in that dtype,
    and those that the reference has no rounded fingerprint of have none. `environment["as_stored"]` and
    `["not_rounded"]` of the second list them.
    """
    theirs, ours, files = dict(reference.state), dict(got.state), dict(got.stored)
    as_stored: list[str] = []
    unknown: list[str] = []
    for n, (dtype, shape, mark) in got.state.items():
        if n not in theirs:
            continue
        held, (stored, found) = theirs[n], got.stored_as.get(n, (dtype, mark))
        if stored == held[0]:
            ours[n] = (stored, shape, found)  # the job may have rounded it, as it did with the reference's
        elif n in (rounded := reference.rounded.get(stored, {})):
            theirs[n], ours[n] = (stored, held[1], rounded[n]), (stored, shape, found)
            as_stored.append(n)
        else:
            theirs[n], ours[n] = (stored, held[1], ""), (stored, shape, "")
            unknown.append(n)
        if files.get(n) == mark:
            files[n] = ours[n][2]  # it was loaded as it is in the files, in whatever dtype
    environment: EnvironmentRecord = {**got.environment, "as_stored": as_stored, "not_rounded": unknown}
    return replace(reference, state=theirs), replace(got, state=ours, stored=files, environment=environment)


def shape_differences(
    reference: Trace, got: Trace
) -> tuple[dict[str, tuple[tuple[int, ...], tuple[int, ...]]], dict[str, tuple[str, str]]]:
    """Find the tensors that differ in shape or dtype: ({name: (expected, found) shape}, {name: (expected, found)
    dtype}).

    A tensor is in one of the two at most; the second has those of equal shape.
    """
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    dtypes: dict[str, tuple[str, str]] = {}
    for n, (dtype, shape, _) in reference.state.items():
        if n not in got.state or not must_be_equal(n):
            continue
        other, other_shape, _ = got.state[n]
        if tuple(shape) != tuple(other_shape):
            shapes[n] = (tuple(shape), tuple(other_shape))
        elif dtype != other:
            dtypes[n] = (dtype, other)
    return shapes, dtypes


def differing_tensors(reference: Trace, got: Trace) -> list[str]:
    """List the tensors with the same dtype and shape but other elements, in the order of the reference."""
    out = []
    for n, (dtype, shape, mark) in reference.state.items():
        other = got.state.get(n)
        if other is None or not must_be_equal(n) or not mark or not other[2]:
            continue
        right = {mark, *(v[2] for v in reference.variants.get(n, []))}  # a checkpoint has the copy of one rank
        if other[0] == dtype and tuple(other[1]) == tuple(shape) and other[2] not in right:
            out.append(n)
    return out


def optimizer_steps(trace: Trace) -> dict[str, float]:
    """Return {FQN: how many steps the optimizer has counted for that parameter}."""
    return {fqn_of(n): float(v) for n, v in trace.scalars.items() if is_step(n)}


# -------------------------------------------------------------------------------------------------------- configuration


def options_by_parameter(trace: Trace) -> dict[str, dict[str, object]]:
    """Return {FQN: {option: value} of its param group}, without options that do not change the result, such as
    fused."""
    out: dict[str, dict[str, object]] = {}
    for group in trace.groups:
        chosen = {k: v for k, v in group.items() if k not in _HOW}
        for name in group.get("params") or []:
            out[str(name)] = chosen
    return out


def option_differences(
    reference: Trace, got: Trace
) -> tuple[dict[str, dict[str, tuple[object, object]]], list[str], list[str]]:
    """Compare param groups: ({option: {FQN: (expected, found)}}, FQNs only in the reference's optimizer, FQNs only in
    `got`'s).

    An option that one side lacks is MISSING there; of those that torch itself writes, only if both ran the same torch.
    torch's loader gives a group no option that the job does not have: what it left out of the reference is none.
    """
    by_torch = reference.loaders.get("optim", "ckpttool") != "ckpttool"
    theirs, ours = options_by_parameter(reference), options_by_parameter(got)
    out: dict[str, dict[str, tuple[object, object]]] = {}
    for name, expected in theirs.items():
        for key in dict.fromkeys((*expected, *ours.get(name, ()))) if name in ours else ():
            a, b = expected.get(key, MISSING), ours[name].get(key, MISSING)
            aside = (a is MISSING or b is MISSING) and key in _TORCHS and not _same_version(reference, got, "torch")
            aside = aside or (a is MISSING and by_torch)
            aside = aside or a in ("dict", "tensor")  # as earlier recorders wrote them
            if not aside and not are_alike(a, b):
                out.setdefault(key, {})[name] = (a, b)
    tied = [*reference.tied, *got.tied]
    missing = [n for n in theirs if n not in ours and not any(a in ours for a in _names_if_tied(n, tied))]
    extra = [n for n in ours if n not in theirs and not any(a in theirs for a in _names_if_tied(n, tied))]
    return out, missing, extra


def ignored_options(reference: Trace, got: Trace) -> list[str]:
    """List the options of torch's optimizers that only one side has and that were not compared, since the other ran
    another version of torch."""
    if _same_version(reference, got, "torch"):
        return []
    theirs, ours = options_by_parameter(reference), options_by_parameter(got)
    both = [(theirs[n], ours[n]) for n in theirs if n in ours]
    return sorted({k for a, b in both for k in a.keys() ^ b.keys() if k in _TORCHS})


def describe_lost_options(got: Trace, lost: Mapping[str, Sequence[str]]) -> str:
    """Return a text about the options of param groups that a checkpoint has lost; `lost` is the first part of what
    `lost_options` returned, and has at least one."""
    names = list(dict.fromkeys(n for where in lost.values() for n in where))
    whose = f"for {count_noun(len(names), 'parameter')}, first {names[0]}"
    if not got.stored_groups:
        return f"the checkpoint has lost its param groups, {whose}"
    if not any(g["params"] for g in got.stored_groups):
        return f"the checkpoint has lost which parameters its param groups have, {whose}"
    return f"the checkpoint has lost {list_first(lost)} of its param groups, {whose}"


def lost_options(reference: Trace, got: Trace) -> tuple[dict[str, list[str]], list[str]]:
    """Find the options of param groups that the files of `got` lack, though the reference has them: ({option: FQNs of
    the parameters of the groups}, options that the layout of `got` does not keep, which are not counted).

    The reference's are those of its files, or what its job held where it is a recording. Parameters that the files of
    `got` put into no group are left out, unless there are no groups at all.
    """
    if got.stored_groups is None:
        return {}, []
    ours = {n: set(g["options"]) for g in got.stored_groups for n in g["params"]}
    theirs = {n: set(g["options"]) for g in reference.stored_groups or [] for n in g["params"]}
    if reference.stored_groups is None:
        # an empty dict or list is in no file of torch's
        theirs = {n: {k for k, v in x.items() if v not in ({}, [])} for n, x in options_by_parameter(reference).items()}
    out: dict[str, list[str]] = {}
    for name, options in theirs.items():
        if name in ours or not ours:
            for key in sorted(options - ours.get(name, set()) - _HOW):
                out.setdefault(key, []).append(name)
    kept = set().union(*ours.values())
    aside = [k for k in out if k not in kept and not program_of(got.layout).keeps_options]
    return {k: names for k, names in out.items() if k not in aside}, aside


def _same_version(reference: Trace, got: Trace, package: str) -> bool:
    """Tell whether both sides ran the same version of a package, such as "torch"."""
    return reference.environment.get(package) == got.environment.get(package)


def config_differences(reference: Mapping[str, object], got: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Compare two configurations of a model: {key: (expected, found)}, with dots in keys that are nested.

    Keys that do not affect the computation are left out. A key that one side lacks has the value MISSING there; it is
    left out if its value is None, False or empty, or if `ignored_config_keys` lists it. rope_theta is the same at the
    top and in rope_parameters, where transformers 5 has it.
    """
    a, b, aside = _flatten_config(reference), _flatten_config(got), set(ignored_config_keys(reference, got))
    return {
        k: (a.get(k, MISSING), b.get(k, MISSING))
        for k in dict.fromkeys((*a, *b))
        if k not in aside and not are_alike(a.get(k), b.get(k)) and (k in a or b[k]) and (k in b or a[k])
    }


def ignored_config_keys(reference: Mapping[str, object], got: Mapping[str, object]) -> list[str]:
    """List the keys of two model configurations that only one has and that are not compared; [] where both are of one
    version of transformers.

    Versions differ in which defaults they write.
    """
    if reference.get("transformers_version") == got.get("transformers_version"):
        return []
    a, b = _flatten_config(reference), _flatten_config(got)
    return sorted(k for k in a.keys() ^ b.keys() if a.get(k) or b.get(k))


def _flatten_config(config: Mapping[str, object], at: str = "") -> dict[str, object]:
    """Return {key: value} of the compared keys of a configuration, with dots in those that are nested; `at` is put
    before every key."""
    out: dict[str, object] = {}
    for key, value in config.items():
        if key in _SILENT or "drop" in key:  # the runner sets dropout to 0; whether it is active is in the trace
            continue
        if key in ("rope_parameters", "rope_scaling") and isinstance(value, Mapping) and "rope_theta" in value:
            out[f"{at}rope_theta"] = value["rope_theta"]
            value = {k: v for k, v in value.items() if k != "rope_theta"}
        if isinstance(value, Mapping):
            out.update(_flatten_config(value, f"{at}{key}."))
        else:
            out[f"{at}{key}"] = value
    return out


def package_differences(reference: Trace, got: Trace) -> dict[str, tuple[object, object]]:
    """Return {name: (version of the reference, version here)} of torch, transformers, "python" and the other packages,
    in this order, of which both sides have imported one, and not the same version."""
    a, b = (loaded_versions(trace) for trace in (reference, got))
    first = ("torch", "transformers", "python")
    names = [*first, *sorted(a.keys() - {*first})]
    return {n: (a[n], b[n]) for n in names if n in a and n in b and a[n] != b[n]}


def loaded_versions(trace: Trace) -> dict[str, object]:
    """Return {name: version} of the packages that a side had imported, and of "python"; {} where nothing is known."""
    own: Mapping[str, object] = trace.environment
    packages = own.get("packages")
    known = packages if isinstance(packages, dict) else {}  # a recording may hold anything
    return known | {n: own[n] for n in ("torch", "python") if n in own}


def tied_groups(trace: Trace) -> set[frozenset[str]]:
    """Return the FQNs of each parameter that has more than one, as a set for each."""
    return {frozenset(group) for group in trace.tied if len(group) > 1}


# ---------------------------------------------------------------------------------------------------------------- steps


def job_obstacle(reference: Trace, got: Trace) -> str | None:
    """Return a text that says why run and reference would differ even with the same state; None if they should not."""
    if got.failed is not None:
        return "the checkpoint could not be loaded"
    if reference.failed is not None:
        return "the reference could not be loaded"
    if None not in (reference.sequence, got.sequence) and reference.sequence != got.sequence:
        return f"sequences have {got.sequence} tokens, those of the reference {reference.sequence}"
    a, b = (_short_dtype(t.dtype) for t in (reference, got))
    if a is not None and b is not None and a != b:
        return f"this run computes in {b}, the reference computed in {a}"
    return None


def _short_dtype(name: str | None) -> str | None:
    """Return the short name of a dtype, "bf16" for "torch.bfloat16"; None if `name` is None or ""."""
    if not name:
        return None
    short = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
    plain = name.removeprefix("torch.")
    return short.get(plain, plain)


def common_steps(reference: Trace, got: Trace) -> list[tuple[Step, Step]]:
    """Return the steps that both traces have, in order: [(expected, found)]."""
    theirs = {s.step: s for s in reference.steps}
    return [(theirs[s.step], s) for s in got.steps if s.step in theirs]


def _inputs_of(step: Step) -> dict[str, str]:
    """Return {key of a sample: digest of its tensors in a step}, without keys that are not known."""
    return {**({} if step.batch is None else {"input_ids": step.batch}), **step.inputs}


def common_inputs(expected: Step, found: Step) -> dict[str, bool]:
    """Return {key of a sample that both sides have: whether its tensors are equal in a step}."""
    theirs, ours = _inputs_of(expected), _inputs_of(found)
    return {k: mark == ours[k] for k, mark in theirs.items() if k in ours}


def differing_inputs(expected: Step, found: Step) -> list[str] | None:
    """List the keys of the samples in which the batches of a step differ; [] if none does, None if no key is known on
    both sides. Where each key has the same tensors, but not together with the same of the others, all are listed."""
    common = common_inputs(expected, found)
    wrong = [k for k, same in common.items() if not same]
    if not wrong and None not in (expected.samples, found.samples) and _inputs_of(expected) == _inputs_of(found):
        return list(common) if expected.samples != found.samples else []
    return wrong if common else None


def inputs_of_one_side(reference: Trace, got: Trace) -> list[str]:
    """List the keys of samples that only one side has, so that they are compared with nothing; [] where no step has a
    batch on both sides."""
    pairs = ((_inputs_of(a), _inputs_of(b)) for a, b in common_steps(reference, got))
    return next((sorted(a.keys() ^ b.keys()) for a, b in pairs if a and b), [])


def first_common_step(reference: Trace, got: Trace) -> tuple[Step, Step] | None:
    """Return the first step after loading on both sides, (expected, found); None if the reference does not have it."""
    return next(((a, b) for a, b in common_steps(reference, got) if b is got.steps[0]), None)


def tensor_deviations(
    reference: Trace,
    got: Trace,
    expected: Step,
    found: Step,
    updates: bool,
    floor: float,
    direction: bool = False,
) -> tuple[dict[str, tuple[float, float, float]], int]:
    """Measure how gradients or updates of single tensors deviate in a step: ({FQN: (deviation, expected norm, found
    norm)}, number left out).

    It is their norms that are compared; or with `direction` the tensors themselves, by the norm of their difference,
    which is estimated from sketches. Tensors that one side has no sketch of are left out then.

    Deviations are relative to the tensor's norm in the reference, or to `floor` times the norm of all, if that is
    larger; of updates to some quanta of the parameter (`bounds.QUANTA`), if that is. Gradients below that on both sides
    are rounding noise; they are left out, and so are the updates of such tensors, which Adam makes from the noise. A
    tensor that one side lacks counts as zero there, unless it is tied and has another name.

    Args:
        expected, found: the step of the reference, and that of `got`.
        updates: compare updates; if False, gradients.
        floor: part of the whole norm below which a gradient is noise.
        direction: compare directions as well as norms.
    """
    theirs, ours = (expected.updates, found.updates) if updates else (expected.grads, found.grads)
    whole = math.sqrt(sum(v * v for v in theirs.values() if math.isfinite(v)))
    least = floor * whole
    grads = math.sqrt(sum(v * v for v in expected.grads.values() if math.isfinite(v)))
    same = tied_groups(reference) & tied_groups(got)
    tied = [sorted(g) for g in same]
    units = [_unit_sketches(step, updates) if direction else {} for step in (expected, found)]
    out: dict[str, tuple[float, float, float]] = {}
    left_out = 0
    for n in [*theirs, *(n for n in ours if n not in theirs)]:
        a = _value_of(n, theirs, tied)
        b = _value_of(n, ours, tied)
        if a is None and b is None:
            continue
        x, y = a or 0.0, b or 0.0
        if n not in theirs and a is not None:
            continue  # met under its other name
        u, v = (_value_of(n, of, tied) for of in units)
        if direction and (u is None or v is None):
            continue
        apart = abs(y - x) if u is None or v is None else max(abs(y - x), sketch_distance(x * u, y * v))
        gradients = (expected.grads.get(n), found.grads.get(n)) if updates else (x, y)
        if apart and all(g is not None and g < floor * grads for g in gradients) and any(gradients):
            left_out += 1
            continue
        if x == y and not apart > 0:
            out[n] = (0.0, x, y)
        elif math.isnan(x) or math.isnan(y):
            out[n] = (math.nan, x, y)
        else:
            quanta = max(reference.quanta.get(n, 0.0), got.quanta.get(n, 0.0)) if updates else 0.0
            scale = max(x, least, QUANTA * quanta)
            out[n] = (apart / scale if scale and math.isfinite(x) else math.inf, x, y)
    return out, left_out


def _unit_sketches(step: Step, updates: bool) -> dict[str, Any]:
    """Return {FQN: sketch of its gradient or update, over its norm} of a step; {} if it has none."""
    names, text = (step.updates, step.update_sketches) if updates else (step.grads, step.grad_sketches)
    rows = decode_sketches(text, len(names))
    return {} if rows is None else dict(zip(names, rows, strict=True))


def _value_of(name: str, values: Mapping[str, T], tied: Sequence[Sequence[str]]) -> T | None:
    """Return the value of a tensor in {FQN: value}, under any of its tied names; None if there is none.

    `tied` has the FQNs of each parameter that has several.
    """
    return next((values[a] for a in (name, *_names_if_tied(name, tied)) if a in values), None)


def rates_by_group(reference: Trace, got: Trace, a: Step, b: Step) -> list[tuple[str, float, float]]:
    """Pair the learning rates of a step by param group: [(name of the group for people, expected, found)].

    Groups are matched as `group_pairs` does. Lists of different lengths are compared as sets of values: a missing value
    is NaN. `a` is the step of the reference, `b` that of `got`.
    """
    x, y = a.learning_rates or [], b.learning_rates or []
    if pairs := group_pairs(reference, got, len(x), len(y)):
        return [(label, x[i], y[j]) for label, i, j in pairs]
    u, v = sorted(set(x)), sorted(set(y))
    if u == v:
        return [("all groups", u[0], v[0])]
    return [(f"{len(y)} groups instead of {len(x)}", u[-1], v[-1] if v[-1] != u[-1] else math.nan)]


def group_pairs(reference: Trace, got: Trace, theirs: int, ours: int) -> list[tuple[str, int, int]]:
    """Pair param groups: [(name of the group for people, its number in the reference, its number in `got`)].

    They are matched by their parameters if both sides list them, since their order may differ; else by position, if
    there are as many; else there are no pairs.

    Args:
        theirs, ours: how many there are on each side.
    """
    sides = []
    for trace, count in ((reference, theirs), (got, ours)):
        fqns = [[str(p) for p in g.get("params") or []] for g in trace.groups]
        sides.append({n: i for i, g in enumerate(fqns) for n in g} if len(fqns) == count else {})
    pairs: dict[tuple[int, int], str] = {}
    for n, i in sides[0].items():
        if n in sides[1]:
            pairs.setdefault((i, sides[1][n]), f"group of {n}")
    if not pairs and theirs == ours:
        return [(f"group {i}", i, i) for i in range(theirs)]
    return [(label, i, j) for (i, j), label in pairs.items()]


def non_finite_values(step: Step) -> Iterator[tuple[str, float]]:
    """Yield (what, value) for each number of a step that is NaN or infinite: loss, norms, gradients, updates, in this
    order.

    `what` is such as "loss" or "gradient of <FQN>".
    """
    for what, value in (("loss", step.loss), ("grad_norm", step.grad_norm), ("update_norm", step.update_norm)):
        if value is not None and not math.isfinite(value):
            yield what, value
    for what, norms in (("gradient", step.grads), ("update", step.updates)):
        yield from ((f"{what} of {n}", v) for n, v in norms.items() if not math.isfinite(v))
