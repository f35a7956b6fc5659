"""The differences of two traces, as data: `judge` turns them into checks, diagnosis/ looks for causes in them.

Comparisons use full-precision values, not the rounded values shown. Equal numbers have the deviation 0; NaN never
equals NaN. A tied parameter is found under any of its names. What one side did not record is not a difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ...layouts import get_program_of
from ...printable import count_noun, list_first
from ..text import is_step_counter, parse_fqn
from ..trace.model import Step, Trace
from ..trace.records import EnvironmentRecord
from ..trace.sketches import decode_sketches, estimate_sketch_distance
from .bounds import QUANTA

T = TypeVar("T")

__all__ = [
    "MISSING",
    "are_equal_values",
    "collect_optimizer_steps",
    "collect_options_by_parameter",
    "collect_package_versions",
    "collect_tied_groups",
    "compare_common_inputs",
    "compute_relative_deviation",
    "describe_lost_options",
    "find_first_common_step",
    "find_job_obstacle",
    "find_lost_options",
    "find_missing_and_extra_tensors",
    "find_model_config_differences",
    "find_non_finite_values",
    "find_option_differences",
    "find_package_differences",
    "find_shape_and_dtype_differences",
    "find_state_obstacle",
    "list_differing_inputs",
    "list_differing_tensors",
    "list_ignored_config_keys",
    "list_ignored_options",
    "list_one_sided_inputs",
    "list_tensors_not_as_stored",
    "list_tensors_with_unequal_copies",
    "measure_tensor_deviations",
    "must_tensor_be_equal",
    "pair_common_steps",
    "pair_learning_rates",
    "pair_param_groups",
    "with_stored_dtypes",
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
        """Return "missing", for messages."""
        return "missing"


MISSING = _Missing()


def compute_relative_deviation(got: float, expected: float) -> float:
    """Return |got - expected| / |expected|; 0 if they are equal, NaN if one is NaN, infinite if `expected` is 0 or one
    is infinite."""
    if got == expected:
        return 0.0
    if math.isnan(got) or math.isnan(expected):
        return math.nan
    if expected == 0 or math.isinf(got) or math.isinf(expected):
        return math.inf
    return abs(got - expected) / abs(expected)


def are_equal_values(a: object, b: object) -> bool:
    """Tell whether two plain values are equal: a tuple may equal a list, True never equals 1, and NaN equals NaN."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(are_equal_values, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(are_equal_values(a[k], b[k]) for k in a)
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    return bool(a == b) or (a != a and b != b)


# ---------------------------------------------------------------------------------------------------------------- state


def find_state_obstacle(reference: Trace, got: Trace) -> str | None:
    """Return why the states after loading of two traces cannot be compared, as a text for the report; None if they
    can be."""
    if reference.failed is not None:
        return "the reference could not be loaded"
    if not reference.state and not reference.scalars:
        return "the reference did not record what the job held (Recorder.state does, when the checkpoint is saved)"
    if reference.start != got.start:
        return f"the reference recorded the job at step {reference.start}, but this checkpoint is of step {got.start}"
    if not got.state and not got.scalars:
        return "the run did not record what the job held"
    return None


def must_tensor_be_equal(name: str) -> bool:
    """Tell whether a tensor, by its canonical name, must be equal on both sides.

    Random states and dataloader states belong to single ranks, and need not be equal.
    """
    return name.partition(".")[0] not in ("rng", "dataloader")


def _yield_other_tied_names(name: str, tied: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the other canonical names of a tied parameter, or of a slot (such as exp_avg) of its optimizer state.

    `name` may also be an FQN; then FQNs are yielded. `tied` lists the FQNs of each parameter that has several.
    """
    for group in tied:
        for fqn in group:
            for before in ("model.", "optim.state.", ""):
                head = before + fqn
                if name == head or (before != "model." and name.startswith(head + ".")):
                    yield from (before + other + name[len(head) :] for other in group if other != fqn)


def find_missing_and_extra_tensors(reference: Trace, got: Trace) -> tuple[list[str], list[str]]:
    """Return (canonical names that only the reference has, canonical names that only the run has).

    A tied parameter is not missing if the other side has it under another of its names. Random states and dataloader
    states are left out.
    """
    tied = [*reference.tied, *got.tied]

    def gone(have: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
        return [
            n
            for n in have
            if n not in other
            and must_tensor_be_equal(n)
            and not any(alias in other for alias in _yield_other_tied_names(n, tied))
        ]

    return gone(reference.state, got.state), gone(got.state, reference.state)


def list_tensors_with_unequal_copies(got: Trace) -> list[str]:
    """List the canonical names of the tensors whose replicated copies differ between ranks."""
    return [str(n) for n in got.environment.get("copies_differ") or []]


def list_tensors_not_as_stored(got: Trace) -> list[str]:
    """List the canonical names of the tensors whose fingerprint in the job is not that of the checkpoint's files.

    [] if the files were not read a second time.
    """
    return [n for n, mark in got.stored.items() if n not in got.state or (got.state[n][2] and got.state[n][2] != mark)]


def with_stored_dtypes(reference: Trace, got: Trace) -> tuple[Trace, Trace]:
    """Return (reference, got) prepared for a comparison that allows rounding to the dtypes of `got`'s files.

    A tensor that `got`'s files store in another dtype than the reference gets the stored dtype on both sides, and in
    the reference the fingerprint after rounding to it. If the reference has no fingerprint of the rounded tensor, it
    gets none on either side. The names are listed in the second trace: `environment["as_stored"]` has those of the
    rounded tensors, `environment["not_rounded"]` those without a fingerprint.
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


def find_shape_and_dtype_differences(
    reference: Trace, got: Trace
) -> tuple[dict[str, tuple[tuple[int, ...], tuple[int, ...]]], dict[str, tuple[str, str]]]:
    """Find the tensors that differ in shape, and those of equal shape that differ in dtype.

    Returns:
        ({canonical name: (expected shape, found shape)}, {canonical name: (expected dtype, found dtype)}).
    """
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    dtypes: dict[str, tuple[str, str]] = {}
    for n, (dtype, shape, _) in reference.state.items():
        if n not in got.state or not must_tensor_be_equal(n):
            continue
        other, other_shape, _ = got.state[n]
        if tuple(shape) != tuple(other_shape):
            shapes[n] = (tuple(shape), tuple(other_shape))
        elif dtype != other:
            dtypes[n] = (dtype, other)
    return shapes, dtypes


def list_differing_tensors(reference: Trace, got: Trace) -> list[str]:
    """List the canonical names of tensors with equal dtype and shape but other elements, in the order of the
    reference."""
    out = []
    for n, (dtype, shape, mark) in reference.state.items():
        other = got.state.get(n)
        if other is None or not must_tensor_be_equal(n) or not mark or not other[2]:
            continue
        right = {mark, *(v[2] for v in reference.variants.get(n, []))}  # a checkpoint has the copy of one rank
        if other[0] == dtype and tuple(other[1]) == tuple(shape) and other[2] not in right:
            out.append(n)
    return out


def collect_optimizer_steps(trace: Trace) -> dict[str, float]:
    """Return {FQN: step count in the parameter's optimizer state}."""
    return {parse_fqn(n): float(v) for n, v in trace.scalars.items() if is_step_counter(n)}


# -------------------------------------------------------------------------------------------------------- configuration


def collect_options_by_parameter(trace: Trace) -> dict[str, dict[str, object]]:
    """Return {FQN: {option: value} of its param group}, without options that do not affect the result, such as
    fused."""
    out: dict[str, dict[str, object]] = {}
    for group in trace.groups:
        chosen = {k: v for k, v in group.items() if k not in _HOW}
        for name in group.get("params") or []:
            out[str(name)] = chosen
    return out


def find_option_differences(
    reference: Trace, got: Trace
) -> tuple[dict[str, dict[str, tuple[object, object]]], list[str], list[str]]:
    """Compare the options of param groups, parameter by parameter.

    An option that one side lacks has the value `MISSING` there. It is left out if it is an option of torch's own
    optimizers and the two sides ran different versions of torch, or if the reference lacks it and was loaded by torch's
    loader, which drops options that the job does not have.

    Returns:
        ({option: {FQN: (expected, found)}}, FQNs that only the reference's optimizer has, FQNs that only `got`'s has).
    """
    by_torch = reference.loaders.get("optim", "ckpttool") != "ckpttool"
    theirs, ours = collect_options_by_parameter(reference), collect_options_by_parameter(got)
    out: dict[str, dict[str, tuple[object, object]]] = {}
    for name, expected in theirs.items():
        for key in dict.fromkeys((*expected, *ours.get(name, ()))) if name in ours else ():
            a, b = expected.get(key, MISSING), ours[name].get(key, MISSING)
            aside = (a is MISSING or b is MISSING) and key in _TORCHS and not _has_same_torch(reference, got)
            aside = aside or (a is MISSING and by_torch)
            aside = aside or a in ("dict", "tensor")  # as earlier recorders wrote them
            if not aside and not are_equal_values(a, b):
                out.setdefault(key, {})[name] = (a, b)
    tied = [*reference.tied, *got.tied]
    missing = [n for n in theirs if n not in ours and not any(a in ours for a in _yield_other_tied_names(n, tied))]
    extra = [n for n in ours if n not in theirs and not any(a in theirs for a in _yield_other_tied_names(n, tied))]
    return out, missing, extra


def list_ignored_options(reference: Trace, got: Trace) -> list[str]:
    """List the options of torch's optimizers that only one side has and that are not compared.

    [] if both sides ran the same version of torch; versions differ in the options that they have.
    """
    if _has_same_torch(reference, got):
        return []
    theirs, ours = collect_options_by_parameter(reference), collect_options_by_parameter(got)
    both = [(theirs[n], ours[n]) for n in theirs if n in ours]
    return sorted({k for a, b in both for k in a.keys() ^ b.keys() if k in _TORCHS})


def describe_lost_options(got: Trace, lost: Mapping[str, Sequence[str]]) -> str:
    """Return a sentence about the options of param groups that a checkpoint has lost.

    `lost` is {option: FQNs}, the first part of what `find_lost_options` returned; it must not be empty.
    """
    names = list(dict.fromkeys(n for where in lost.values() for n in where))
    whose = f"for {count_noun(len(names), 'parameter')}, first {names[0]}"
    if not got.stored_groups:
        return f"the checkpoint has lost its param groups, {whose}"
    if not any(g["params"] for g in got.stored_groups):
        return f"the checkpoint has lost which parameters its param groups have, {whose}"
    return f"the checkpoint has lost {list_first(lost)} of its param groups, {whose}"


def find_lost_options(reference: Trace, got: Trace) -> tuple[dict[str, list[str]], list[str]]:
    """Find the options of param groups that the reference has and the files of `got` lack.

    The reference's options are those in its files, or for a recording those that its job held. Parameters that are in
    no param group of `got`'s files are left out, unless those files have no param groups at all.

    Returns:
        ({option: FQNs of the parameters that lost it}, options that the layout of `got` never stores, which are not in
        the dict).
    """
    if got.stored_groups is None:
        return {}, []
    ours = {n: set(g["options"]) for g in got.stored_groups for n in g["params"]}
    theirs = {n: set(g["options"]) for g in reference.stored_groups or [] for n in g["params"]}
    if reference.stored_groups is None:
        # an empty dict or list is in no file of torch's
        theirs = {
            n: {k for k, v in x.items() if v not in ({}, [])}
            for n, x in collect_options_by_parameter(reference).items()
        }
    out: dict[str, list[str]] = {}
    for name, options in theirs.items():
        if name in ours or not ours:
            for key in sorted(options - ours.get(name, set()) - _HOW):
                out.setdefault(key, []).append(name)
    kept = set().union(*ours.values())
    aside = [k for k in out if k not in kept and not get_program_of(got.layout).keeps_options]
    return {k: names for k, names in out.items() if k not in aside}, aside


def _has_same_torch(reference: Trace, got: Trace) -> bool:
    """Tell whether both sides ran the same version of torch."""
    return reference.environment.get("torch") == got.environment.get("torch")


def find_model_config_differences(
    reference: Mapping[str, object], got: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """Return {key: (expected, found)} of the values that differ between two model configurations; nested keys have
    dots.

    Keys that do not affect the computation are left out. A key that one side lacks has the value `MISSING` there; it is
    left out if the other side's value is None, False or empty, or if `list_ignored_config_keys` lists it. rope_theta is
    compared as a top-level key, also where it is in rope_parameters, as in transformers 5.
    """
    a, b, aside = _flatten_config(reference), _flatten_config(got), set(list_ignored_config_keys(reference, got))
    return {
        k: (a.get(k, MISSING), b.get(k, MISSING))
        for k in dict.fromkeys((*a, *b))
        if k not in aside and not are_equal_values(a.get(k), b.get(k)) and (k in a or b[k]) and (k in b or a[k])
    }


def list_ignored_config_keys(reference: Mapping[str, object], got: Mapping[str, object]) -> list[str]:
    """List the keys of two model configurations that only one of them has and that are not compared.

    Only versions of transformers differ in which defaults they write: [] if both sides have the same version.
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


def find_package_differences(reference: Trace, got: Trace) -> dict[str, tuple[object, object]]:
    """Return {package: (version of the reference, version of the run)} where both sides have a version and these
    differ.

    torch, transformers and "python" come first, then the other packages by name.
    """
    a, b = (collect_package_versions(trace) for trace in (reference, got))
    first = ("torch", "transformers", "python")
    names = [*first, *sorted(a.keys() - {*first})]
    return {n: (a[n], b[n]) for n in names if n in a and n in b and a[n] != b[n]}


def collect_package_versions(trace: Trace) -> dict[str, object]:
    """Return {package: version} of the packages that a run had imported, and of "python"; {} if none was recorded."""
    own: Mapping[str, object] = trace.environment
    packages = own.get("packages")
    known = packages if isinstance(packages, dict) else {}  # a recording may hold anything
    return known | {n: own[n] for n in ("torch", "python") if n in own}


def collect_tied_groups(trace: Trace) -> set[frozenset[str]]:
    """Return the sets of FQNs that name the same parameter, one set for each tied parameter."""
    return {frozenset(group) for group in trace.tied if len(group) > 1}


# ---------------------------------------------------------------------------------------------------------------- steps


def find_job_obstacle(reference: Trace, got: Trace) -> str | None:
    """Return why the two jobs compute different numbers even from the same state, as a text; None if they should
    not."""
    if got.failed is not None:
        return "the checkpoint could not be loaded"
    if reference.failed is not None:
        return "the reference could not be loaded"
    if None not in (reference.sequence, got.sequence) and reference.sequence != got.sequence:
        return f"sequences have {got.sequence} tokens, those of the reference {reference.sequence}"
    a, b = (_shorten_dtype_name(t.dtype) for t in (reference, got))
    if a is not None and b is not None and a != b:
        return f"this run computes in {b}, the reference computed in {a}"
    return None


def _shorten_dtype_name(name: str | None) -> str | None:
    """Return the short name of a dtype, such as "bf16" for "torch.bfloat16"; None if `name` is None or ""."""
    if not name:
        return None
    short = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
    plain = name.removeprefix("torch.")
    return short.get(plain, plain)


def pair_common_steps(reference: Trace, got: Trace) -> list[tuple[Step, Step]]:
    """Return [(step of the reference, step of the run)] for the steps that both traces have, in the order of the
    run."""
    theirs = {s.step: s for s in reference.steps}
    return [(theirs[s.step], s) for s in got.steps if s.step in theirs]


def _collect_input_digests(step: Step) -> dict[str, str]:
    """Return {key of a sample, such as "input_ids": digest of its tensors in the step}; keys without a digest are
    left out."""
    return {**({} if step.batch is None else {"input_ids": step.batch}), **step.inputs}


def compare_common_inputs(expected: Step, found: Step) -> dict[str, bool]:
    """Return {key: whether the tensors under it are equal in the two steps}, for the keys of samples (such as
    "input_ids") of which both steps have digests."""
    theirs, ours = _collect_input_digests(expected), _collect_input_digests(found)
    return {k: mark == ours[k] for k, mark in theirs.items() if k in ours}


def list_differing_inputs(expected: Step, found: Step) -> list[str] | None:
    """List the keys of samples whose tensors differ between two steps; [] if none differs, None if there is no common
    key.

    All common keys are listed if each key has the same tensors, but these are combined into other samples.
    """
    common = compare_common_inputs(expected, found)
    wrong = [k for k, same in common.items() if not same]
    if (
        not wrong
        and None not in (expected.samples, found.samples)
        and _collect_input_digests(expected) == _collect_input_digests(found)
    ):
        return list(common) if expected.samples != found.samples else []
    return wrong if common else None


def list_one_sided_inputs(reference: Trace, got: Trace) -> list[str]:
    """List the keys of samples that only one side has, by the first common step for which both sides have digests.

    [] if there is no such step.
    """
    pairs = ((_collect_input_digests(a), _collect_input_digests(b)) for a, b in pair_common_steps(reference, got))
    return next((sorted(a.keys() ^ b.keys()) for a, b in pairs if a and b), [])


def find_first_common_step(reference: Trace, got: Trace) -> tuple[Step, Step] | None:
    """Return (step of the reference, step of the run) for the run's first step; None if the reference does not have
    it."""
    return next(((a, b) for a, b in pair_common_steps(reference, got) if b is got.steps[0]), None)


def measure_tensor_deviations(
    reference: Trace,
    got: Trace,
    expected: Step,
    found: Step,
    updates: bool,
    floor: float,
    direction: bool = False,
) -> tuple[dict[str, tuple[float, float, float]], int]:
    """Measure how the gradients or updates of single tensors deviate in a step.

    Without `direction` the norms are compared. With it, the tensors themselves are compared, by the norm of their
    difference, which is estimated from sketches; tensors without a sketch on both sides are then left out.

    A deviation is relative to the tensor's norm in the reference, or to `floor` times the norm over all tensors if that
    is larger; that of an update also to several quanta of the parameter (`bounds.QUANTA`) if that is larger. A gradient
    below `floor` times the norm over all gradients on both sides is rounding noise and is left out, and so is the
    update of its tensor, which Adam makes from the noise. A tensor that one side lacks counts as zero there, unless it
    is tied and has another name.

    Args:
        reference, got: the two traces.
        expected, found: the step of the reference, and that of `got`.
        updates: compare updates; if False, gradients.
        floor: fraction of the norm over all tensors below which a gradient is noise.
        direction: compare directions as well as norms.

    Returns:
        ({FQN: (deviation, expected norm, found norm)}, number of tensors left out as noise).
    """
    theirs, ours = (expected.updates, found.updates) if updates else (expected.grads, found.grads)
    whole = math.sqrt(sum(v * v for v in theirs.values() if math.isfinite(v)))
    least = floor * whole
    grads = math.sqrt(sum(v * v for v in expected.grads.values() if math.isfinite(v)))
    same = collect_tied_groups(reference) & collect_tied_groups(got)
    tied = [sorted(g) for g in same]
    units = [_decode_unit_sketches(step, updates) if direction else {} for step in (expected, found)]
    out: dict[str, tuple[float, float, float]] = {}
    left_out = 0
    for n in [*theirs, *(n for n in ours if n not in theirs)]:
        a = _find_tied_value(n, theirs, tied)
        b = _find_tied_value(n, ours, tied)
        if a is None and b is None:
            continue
        x, y = a or 0.0, b or 0.0
        if n not in theirs and a is not None:
            continue  # met under its other name
        u, v = (_find_tied_value(n, of, tied) for of in units)
        if direction and (u is None or v is None):
            continue
        apart = abs(y - x) if u is None or v is None else max(abs(y - x), estimate_sketch_distance(x * u, y * v))
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


def _decode_unit_sketches(step: Step, updates: bool) -> dict[str, Any]:
    """Return {FQN: sketch of the gradient (or with `updates` of the update), divided by its norm}; {} if the step
    has none."""
    names, text = (step.updates, step.update_sketches) if updates else (step.grads, step.grad_sketches)
    rows = decode_sketches(text, len(names))
    return {} if rows is None else dict(zip(names, rows, strict=True))


def _find_tied_value(name: str, values: Mapping[str, T], tied: Sequence[Sequence[str]]) -> T | None:
    """Return the value of a tensor in {FQN: value}, under any of its tied names; None if there is none.

    `tied` lists the FQNs of each parameter that has several.
    """
    return next((values[a] for a in (name, *_yield_other_tied_names(name, tied)) if a in values), None)


def pair_learning_rates(reference: Trace, got: Trace, a: Step, b: Step) -> list[tuple[str, float, float]]:
    """Pair the learning rates of a step by param group: [(label of the group for the report, expected, found)].

    Groups are matched as `pair_param_groups` does. If they cannot be matched, one pair stands for all groups: if both
    sides have the same set of rates, the smallest rate on both sides; otherwise the largest rate of each side, with NaN
    as the found one if the largest rates are equal.

    Args:
        reference, got: the two traces.
        a, b: the step of the reference, and that of `got`.
    """
    x, y = a.learning_rates or [], b.learning_rates or []
    if pairs := pair_param_groups(reference, got, len(x), len(y)):
        return [(label, x[i], y[j]) for label, i, j in pairs]
    u, v = sorted(set(x)), sorted(set(y))
    if u == v:
        return [("all groups", u[0], v[0])]
    return [(f"{len(y)} groups instead of {len(x)}", u[-1], v[-1] if v[-1] != u[-1] else math.nan)]


def pair_param_groups(reference: Trace, got: Trace, theirs: int, ours: int) -> list[tuple[str, int, int]]:
    """Pair param groups: [(label of the group for the report, its index in the reference, its index in `got`)].

    Groups are matched by their parameters if both sides list them, since their order may differ; otherwise by index if
    both sides have as many groups; otherwise [] is returned.

    Args:
        reference, got: the two traces.
        theirs, ours: number of param groups of the reference, and of `got`.
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


def find_non_finite_values(step: Step) -> Iterator[tuple[str, float]]:
    """Yield (label, value) for each number of a step that is NaN or infinite.

    The order and the labels are "loss", "grad_norm", "update_norm", "gradient of <FQN>", "update of <FQN>".
    """
    for what, value in (("loss", step.loss), ("grad_norm", step.grad_norm), ("update_norm", step.update_norm)):
        if value is not None and not math.isfinite(value):
            yield what, value
    for what, norms in (("gradient", step.grads), ("update", step.updates)):
        yield from ((f"{what} of {n}", v) for n, v in norms.items() if not math.isfinite(v))
