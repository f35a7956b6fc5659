"""Rules about the state in the job, from fingerprints, names, shapes and optimizer steps.

Each rule gets a `Context`. Every tensor is explained once: by the load, by its name or shape, by another tensor's bytes
(a fingerprint recognises them anywhere: moments, layers or parameters of a module exchanged, single tensors, averages
loaded as weights), by the one file that has all differences, or by the optimizer's step, if the state is from another
step. Any other tensor has values of its own (`rules_values`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from math import prod
from typing import TypeVar

from ...engine.tensor_faults.tensor_kinds import TensorKind
from ...printable import count_noun, list_first
from ..compare.differences import (
    collect_optimizer_steps,
    collect_options_by_parameter,
    find_missing_and_extra_tensors,
    find_shape_and_dtype_differences,
    list_differing_tensors,
    list_tensors_not_as_stored,
    list_tensors_with_unequal_copies,
    must_tensor_be_equal,
)
from ..text import (
    LAYER,
    describe_components,
    describe_selection,
    is_step_counter,
    parse_component,
    parse_fqn,
    parse_layer_number,
    parse_slot,
    to_readable_name,
)
from . import rules_values as diagnosis_values
from .context import Context
from .files import inspect_tensors
from .kinds import CauseKind, Topic
from .related_tensors import yield_side_tensors

T = TypeVar("T")

__all__ = [
    "explain_held_values",
    "explain_load",
    "explain_missing_and_extra",
    "explain_shapes_and_dtypes",
    "explain_unequal_tensors",
]


def explain_load(context: Context) -> None:
    """Add a cause for a load that failed, or after which the job does not hold what the files have."""
    got = context.got
    if got.failed is not None:
        context.add(CauseKind.LOAD_FAILED, f"the checkpoint could not be loaded: {got.failed}")
        return
    if copies := list_tensors_with_unequal_copies(got):
        context.add(
            CauseKind.COPIES_DIFFER,
            f"ranks that should hold the same {count_noun(len(copies), 'tensor')} do not, first "
            f"{to_readable_name(copies[0])}",
            context.failed_texts("state.loaded"),
            copies,
        )
        return
    rounded: list[str] = got.environment.get("rounded") or []
    if rounded and "state.loaded" in context.failed:
        context.add(
            CauseKind.ROUNDED_ON_LOAD,
            f"the job cannot hold {count_noun(len(rounded), 'tensor')} as the files have them, first "
            f"{to_readable_name(rounded[0])}: an optimizer keeps its moments in the dtype of the parameter. The files "
            "may "
            "well be right (compare them with ckpttool diff), but this job begins with rounded ones",
            context.failed_texts("state.loaded"),
            rounded,
        )
        return
    wrong = list_tensors_not_as_stored(got)
    if not wrong:
        return
    holders: dict[str, list[str]] = {}
    for n, mark in got.stored.items():
        holders.setdefault(mark, []).append(n)
    evidence = context.failed_texts("state.loaded")
    for n in wrong[:4]:
        from_ = holders.get(got.state[n][2], []) if n in got.state else []
        if len(from_) == 1 and prod(got.state[n][1]) > 1:
            evidence.append(f"{n} holds what the files have for {from_[0]}")
    text = f"loading changed {count_noun(len(wrong), 'tensor')}: the job does not hold what the files contain"
    context.add(CauseKind.LOADING, text, evidence, wrong)


def explain_held_values(context: Context) -> None:
    """Add a cause if the scheduler or the extra states of modules hold other values than those that were stored."""
    if evidence := context.failed_texts("state.values"):
        text = context.failed["state.values"].text
        topics: tuple[Topic, ...] = ("rates",) if "scheduler." in text else ()
        topics += ("weights", "gradients") if "model." in text else ()
        context.add(CauseKind.LOADED_VALUES, f"loading did not restore everything: {text}", evidence, explains=topics)


def explain_missing_and_extra(context: Context) -> None:
    """Add causes for tensors that only one side has."""
    reference = context.expected
    if not reference.state or (not context.got.state and context.got.failed is None):
        return
    missing, extra = find_missing_and_extra_tensors(reference, context.got)
    evidence = context.failed_texts("state.names")
    if context.got.failed is not None:
        evidence.append(f"the checkpoint could not be loaded: {context.got.failed}")
    theirs = {n for n in reference.state if n.startswith("optim.state.")}
    ours = {n for n in context.got.state if n.startswith("optim.state.")}
    members, known = collect_options_by_parameter(context.got), collect_options_by_parameter(reference)
    gone = [n for n in missing if n.startswith("optim.state.")]
    # what this optimizer does not train has no state in it; `explain_param_groups` says that
    gone = [n for n in gone if not members or parse_fqn(n) in members or parse_fqn(n) not in known]
    if theirs and not ours:
        context.add(
            CauseKind.OPTIMIZER_MISSING,
            "the checkpoint has no optimizer state: moments and steps would start from zero",
            evidence,
            gone,
        )
        gone = []
    weights = [n for n in missing if not n.startswith("optim.")]
    if weights:
        every = [n for n in reference.state if not n.startswith("optim.")]
        which = describe_selection(weights, every, "weights")
        text = f"{which} not in the checkpoint: a new job would start with random values"
        context.add(CauseKind.TENSOR_MISSING, text, evidence, weights)
    lost = {parse_fqn(n) for n in weights}
    gone = [n for n in gone if parse_fqn(n) not in lost]
    if gone:
        params = list(dict.fromkeys(parse_fqn(n) for n in gone))
        whole = [p for p in params if not any(parse_fqn(n) == p for n in ours)]
        slots = sorted({parse_slot(n) for n in gone})
        many = count_noun(len(params), "parameter")
        if len(whole) == len(params):
            text = f"the optimizer's state of {many} is missing, first {to_readable_name(params[0])}"
        else:
            text = f"{' and '.join(slots)} of {many} missing, first {to_readable_name(params[0])}"
        context.add(CauseKind.MOMENTS_MISSING, text, evidence, gone)
    strange = [n for n in extra if not n.startswith("optim.state.")] or extra
    if extra and not missing:
        context.add(
            CauseKind.TENSOR_EXTRA,
            f"{count_noun(len(extra), 'tensor')} that the reference does not have, first "
            f"{to_readable_name(strange[0])}",
            evidence,
            extra,
        )


def explain_shapes_and_dtypes(context: Context) -> None:
    """Add causes for tensors with other shapes, and for those with other dtypes unless the profile allows them."""
    reference = context.expected
    common = [n for n in reference.state if n in context.got.state and must_tensor_be_equal(n)]
    other_shapes, other_dtypes = find_shape_and_dtype_differences(reference, context.got)
    for (s, t), names in _group_by_change(other_shapes).items():
        text = f"{describe_selection(names, common, 'tensors')}: shape {list(t)} instead of {list(s)}"
        kind: CauseKind | TensorKind = CauseKind.SHAPE
        if t == s[::-1]:
            kind, text = TensorKind.TRANSPOSED, text + ", the shape of the transposed tensor"
        elif s[1:] == t[1:] and re.search(r"embed|lm_head|wte|output", names[0]):
            kind = CauseKind.VOCABULARY
            text += f": the vocabulary was {'padded' if t[0] > s[0] else 'cut'} by {abs(t[0] - s[0])} rows"
        context.add(kind, text, context.failed_texts("state.shapes"), names, explains=("weights", "optimizer"))
    if "state.shapes" in context.failed:
        for (d, e), names in _group_by_change(other_dtypes).items():
            text = f"{describe_selection(names, common, 'tensors')}: {e} instead of {d}"
            context.add(TensorKind.DTYPE, text, context.failed_texts("state.shapes"), names)


def _group_by_change(found: Mapping[str, tuple[T, T]]) -> dict[tuple[T, T], list[str]]:
    """Group names by their change: {(expected, found): [names]}, from {name: (expected, found)}."""
    out: dict[tuple[T, T], list[str]] = {}
    for n, two in found.items():
        out.setdefault(two, []).append(n)
    return out


def explain_unequal_tensors(context: Context) -> None:
    """Add causes for tensors with equal name, shape and dtype but different bytes."""
    reference = context.expected
    if context.got.failed is not None:
        return
    wrong = list_differing_tensors(reference, context.got)
    marked = {parse_fqn(n) for n in wrong if is_step_counter(n)}
    theirs, ours = collect_optimizer_steps(reference), collect_optimizer_steps(context.got)
    steps = {n: (theirs[n], ours[n]) for n in theirs if n in ours and theirs[n] != ours[n]}
    rest = [
        n for n in wrong if not (is_step_counter(n) and (parse_fqn(n) in steps or prod(reference.state[n][1]) == 1))
    ]
    rest = _explain_side_tensors(context, _explain_moved_tensors(context, rest))
    looked = {} if context.opened is None else inspect_tensors(context.opened, rest)
    if diagnosis_values.explain_faulty_files(context, looked, wrong):
        return
    rest = _explain_step_counters(context, steps, rest)
    strange = [n for n in wrong if is_step_counter(n) and parse_fqn(n) in marked - set(steps) and n not in rest]
    diagnosis_values.explain_differing_tensors(context, rest + strange, looked)


def _explain_moved_tensors(context: Context, wrong: list[str]) -> list[str]:
    """Add causes for tensors that hold the bytes of other tensors of the reference.

    Args:
        context: the comparison, which gets the causes.
        wrong: canonical names of tensors that differ.

    Returns:
        The names in `wrong` that hold no other tensor's bytes.
    """
    holders: dict[tuple[str, str], list[str]] = {}
    for n, (dtype, shape, mark) in context.expected.state.items():
        if prod(shape) > 1 and mark:
            holders.setdefault((dtype, mark), []).append(n)
    tied = [set(g) for g in context.expected.tied]
    moves: dict[str, str] = {}
    for n in wrong:
        dtype, shape, mark = context.got.state[n]
        found = holders.get((dtype, mark), []) if prod(shape) > 1 and not _is_all_zeros(shape, mark) else []
        if len(found) == 2 and any({parse_fqn(found[0]), parse_fqn(found[1])} <= g for g in tied):
            found = found[:1]
        if len(found) == 1:  # bytes that several have are a constant, and tell nothing
            moves[n] = found[0]
    left = dict(moves)
    _explain_moved_slots(context, left)
    _explain_moved_layers(context, left)
    _explain_exchanged_leaves(context, left)
    _explain_moved_layer_parts(context, left)
    for component in ("weights", "optimizer"):
        some = {a: b for a, b in left.items() if parse_component(a) == component}
        pairs = {a: b for a, b in some.items() if some.get(b) == a}
        several = {a: b for a, b in some.items() if a not in pairs} if len(some) > 3 else {}
        for a, b in some.items():
            both = a in pairs
            if a in several or (both and a > b):
                continue
            text = (
                f"{to_readable_name(a)} and {to_readable_name(b)} are exchanged"
                if both
                else f"{to_readable_name(a)} holds the bytes of {to_readable_name(b)}"
            )
            evidence = [f"{a} has the fingerprint that {b} has in the reference"]
            context.add(
                CauseKind.EXCHANGED if both else TensorKind.COPIED, text, evidence, [a, b], explains=(component,)
            )
        if several:
            what = "; ".join(f"{to_readable_name(a)} holds {to_readable_name(b)}" for a, b in list(several.items())[:3])
            where = f"{count_noun(len(several), 'tensor')} ({describe_components(several)})"
            text = f"{where} hold the bytes of others: {what}"
            evidence = [f"{a} has the fingerprint that {b} has in the reference" for a, b in list(several.items())[:8]]
            context.add(TensorKind.COPIED, text, evidence, list(several), explains=(component,))
    return [n for n in wrong if n not in moves]


#: The most elements of a tensor that is compared with zeros.
_MOST_ZEROS = 1 << 24


def _is_all_zeros(shape: tuple[int, ...], mark: str) -> bool:
    """Tell whether a fingerprint is that of a tensor of zeros; False for large tensors.

    Many tensors can be all zeros, so such a fingerprint identifies none of them. `mark` is the fingerprint.
    """
    import torch

    from ..trace.side_state import make_array_mark

    if prod(shape) > _MOST_ZEROS:
        return False
    return any(
        make_array_mark(torch.zeros(prod(shape), dtype=dtype))[2] == mark for dtype in (torch.int8, torch.complex128)
    )


def _explain_side_tensors(context: Context, wrong: list[str]) -> list[str]:
    """Add causes for weights that hold tensors from outside model and optimizer, such as averages.

    `wrong` are canonical names of tensors that differ; those that this does not explain are returned.
    """
    holders: dict[str, dict[str, None]] = {}
    for trace in (context.expected, context.got):
        for n, (_, shape, mark) in trace.others.items():
            if prod(shape) > 1:
                holders.setdefault(mark, {})[n] = None
    by: dict[str, list[str]] = {}
    for n in wrong:
        if parse_component(n) == "weights" and not _is_all_zeros(*context.got.state[n][1:]):
            for _, at in islice(yield_side_tensors(holders.get(context.got.state[n][2], ()), parse_fqn(n)), 1):
                by.setdefault(at, []).append(n)
    for at, names in by.items():
        every = [n for n in context.expected.state if parse_component(n) == "weights"]
        text = f"{describe_selection(names, every, 'weights')} hold{'s' if len(names) == 1 else ''} the values of {at}"
        evidence = [f"{names[0]} has the fingerprint of {at}.{parse_fqn(names[0])}"]
        context.add(TensorKind.COPIED, f"{text}, loaded in their place", evidence, names, explains=("weights",))
    found = {n for names in by.values() for n in names}
    return [n for n in wrong if n not in found]


def _explain_moved_slots(context: Context, left: dict[str, str]) -> None:
    """Add causes for slots (exp_avg and the like) that hold the bytes of another slot of the same parameter.

    `left` is {tensor: the tensor whose bytes it holds}; the explained tensors are removed from it.
    """
    pairs_ = {a: b for a, b in left.items() if parse_fqn(a) == parse_fqn(b) and parse_slot(a) != parse_slot(b)}
    for two in sorted({tuple(sorted((parse_slot(a), parse_slot(b)))) for a, b in pairs_.items()}):
        names = [a for a, b in pairs_.items() if tuple(sorted((parse_slot(a), parse_slot(b)))) == two]
        params = list(dict.fromkeys(parse_fqn(n) for n in names))
        of = f"of {count_noun(len(params), 'parameter')}, first {to_readable_name(params[0])}"
        both = sum(pairs_.get(pairs_[a]) == a for a in names) == len(names)
        if both:
            text = f"{two[0]} and {two[1]} are exchanged, {of}"
        else:
            held = parse_slot(names[0])
            text = f"{'the weight' if held == 'weights' else held} holds {parse_slot(pairs_[names[0]])}, {of}"
        evidence = [f"{names[0]} has the fingerprint that {pairs_[names[0]]} has in the reference"]
        kind: CauseKind | TensorKind = CauseKind.MOMENTS_EXCHANGED if both else TensorKind.MOMENTS_COPIED
        context.add(kind, text, evidence, names)
    for a in pairs_:
        del left[a]


def _group_by_moved_layer(left: Mapping[str, str]) -> dict[tuple[int, int], list[str]]:
    """Return {(layer, the layer whose bytes it holds): tensors of the first that hold those of the same names in the
    second}. `left` is {tensor: the tensor whose bytes it holds}."""
    by: dict[tuple[int, int], list[str]] = {}
    for a, b in left.items():
        i, j = parse_layer_number(a), parse_layer_number(b)
        if i is not None and j is not None and i != j and LAYER.sub(".#.", a, 1) == LAYER.sub(".#.", b, 1):
            by.setdefault((i, j), []).append(a)
    return by


def _explain_moved_layers(context: Context, left: dict[str, str]) -> None:
    """Add a cause for layers in another order.

    At least half of a layer's tensors must hold those of the same names in another layer. `left` is {tensor: the tensor
    whose bytes it holds}; the explained tensors are removed from it.
    """
    by = _group_by_moved_layer(left)
    sizes = Counter(
        (parse_layer_number(n), parse_component(n)) for n in context.expected.state if not is_step_counter(n)
    )
    order: dict[int, int] = {}
    names: list[str] = []
    for (i, j), group in by.items():
        for component in ("weights", "optimizer"):
            part = [n for n in group if parse_component(n) == component]
            if len(part) > 1 and len(part) * 2 >= sizes[i, component] and order.get(i, j) == j:
                order[i] = j
                names += part
    if not order:
        return
    for n in names:
        left.pop(n)
    which = describe_components(names)
    swapped = [(i, j) for i, j in sorted(order.items()) if i < j and order.get(j) == i]
    if len(swapped) * 2 == len(order):
        text = " and ".join(f"layers {i} and {j}" for i, j in swapped[:4]) + f" are exchanged ({which})"
    else:
        what = ", ".join(f"layer {i} holds layer {j}" for i, j in sorted(order.items())[:4])
        text = f"layers are in another order ({which}): {what}"
        every = sorted({k for n in context.expected.state if (k := parse_layer_number(n)) is not None})
        if all(order.get(i, i) == j for i, j in zip(every, sorted(every, key=str), strict=True)):
            text += "; this is the order of their numbers sorted as text"
    evidence = [f"{count_noun(len(names), 'tensor')} with the fingerprint of the same tensor of another layer"]
    context.add(CauseKind.LAYERS_EXCHANGED, text, evidence, names)


def _explain_exchanged_leaves(context: Context, left: dict[str, str]) -> None:
    """Add causes for two parameters of one module that are exchanged, such as q and k, or gate and up.

    `left` is {tensor: the tensor whose bytes it holds}; the explained tensors are removed from it.
    """
    by: dict[tuple[str, str], dict[str, list[str]]] = {}
    for a, b in left.items():
        if parse_slot(a) != parse_slot(b) or parse_layer_number(a) != parse_layer_number(b):
            continue
        p, q = parse_fqn(a).split("."), parse_fqn(b).split(".")
        apart = [k for k in range(len(p)) if len(p) == len(q) and p[k] != q[k]]
        if len(apart) == 1 and left.get(b) == a:
            x, y = sorted((p[apart[0]], q[apart[0]]))
            m = LAYER.search(parse_fqn(a))
            module = ".".join(p[parse_fqn(a)[: m.end()].count(".") if m else 0 : apart[0]])
            by.setdefault((x, y), {}).setdefault(module, []).append(a)
    for (x, y), modules in by.items():
        names = [n for found in modules.values() for n in found]
        layers = sorted({i for n in names if (i := parse_layer_number(n)) is not None})
        inside = f" in layer{'s' if len(layers) > 1 else ''} {list_first(map(str, layers), 6)}" if layers else ""
        at = next(iter(modules)) if len(modules) == 1 else ""
        what = f"{f'{at}.{x}' if at else x} and {f'{at}.{y}' if at else y}"
        if len(modules) > 1:
            what += f" of {list_first(modules)}"
        text = f"{what} are exchanged{inside} ({describe_components(names)})"
        evidence = [f"{names[0]} has the fingerprint that {left[names[0]]} has in the reference"]
        context.add(CauseKind.EXCHANGED, text, evidence, names)
    for n in {n for modules in by.values() for names in modules.values() for n in names}:
        left.pop(n)


def _explain_moved_layer_parts(context: Context, left: dict[str, str]) -> None:
    """Add a cause for a part of layers, such as the attention, that holds that part of other layers.

    At least two tensors of each layer must hold those of the same names in another layer. `left` is {tensor: the tensor
    whose bytes it holds}; the explained tensors are removed from it.
    """
    by = {two: names for two, names in _group_by_moved_layer(left).items() if len(names) > 1}
    if not by or len({i for i, _ in by}) < len(by):
        return
    names = [n for group in by.values() for n in group]
    parts = [parse_fqn(n)[m.end() :].split(".") for n in names if (m := LAYER.search(parse_fqn(n)))]
    common = [x for x, *others in zip(*parts, strict=False) if all(x == y for y in others)]
    what = ".".join(common).removesuffix(".weight") or count_noun(len(names), "tensor")
    moves = ", ".join(f"that of layer {i} is layer {j}'s" for i, j in sorted(by))
    evidence = [f"{names[0]} has the fingerprint that {left[names[0]]} has in the reference"]
    text = f"{what} is that of another layer ({describe_components(names)}): {moves}"
    context.add(TensorKind.COPIED, text, evidence, names)
    for n in names:
        left.pop(n)


def _explain_step_counters(context: Context, steps: Mapping[str, tuple[float, float]], rest: list[str]) -> list[str]:
    """Add a cause for step counters of the optimizer that differ, or for state that is from another step.

    Args:
        context: the comparison, which gets the cause.
        steps: {FQN: (expected, found) step count} where they differ.
        rest: canonical names of the tensors that differ.

    Returns:
        The names in `rest` that the cause does not explain.
    """
    if not steps:
        return rest
    names = [f"optim.state.{n}.step" for n in steps]
    every = [n for n in collect_optimizer_steps(context.expected) if n in collect_optimizer_steps(context.got)]
    where = (
        "on all tensors"
        if len(steps) == len(every)
        else f"on {len(steps)} of {len(every)} tensors, first {to_readable_name(next(iter(steps)))}"
    )
    moments = {parse_fqn(n) for n in rest if n.startswith("optim.state.")}
    evidence = context.failed_texts("state.scalars")
    if all(b == 0 for _, b in steps.values()):
        also = "the moments were restored, the step was not" if not moments & set(steps) else "the moments differ, too"
        context.add(CauseKind.STEP_RESET, f"the optimizer's step is 0 {where}: {also}", evidence, names)
        return rest
    gaps = {b - a for a, b in steps.values()}
    if len(gaps) > 1:
        context.add(CauseKind.STEP_DIFFERS, f"the optimizer's steps differ {where}", evidence, names)
        return rest
    gap = int(gaps.pop())
    far = f"{count_noun(abs(gap), 'step')} {'earlier' if gap < 0 else 'later'}"
    if len(moments & set(steps)) * 10 < len(steps) * 9:
        context.add(
            CauseKind.STEP_OFFSET,
            f"the optimizer's step is {abs(gap)} {'less' if gap < 0 else 'more'} {where}; the "
            "moments are those of the reference",
            evidence,
            names,
        )
        return rest
    # a frozen weight, or a buffer, is the same in every step
    trained = collect_optimizer_steps(context.expected)
    universe = [n for n in context.expected.state if parse_component(n) == "weights" and parse_fqn(n) in trained]
    others = set(rest)
    weights = [n for n in universe if n in others]
    old = [n for n in rest if n.startswith("optim.state.") and parse_fqn(n) in steps]
    if len(weights) * 10 >= len(universe) * 9:
        text = f"weights and optimizer state are from another checkpoint, {far}"
        context.add(CauseKind.OTHER_CHECKPOINT, text, evidence, [*weights, *old])
        return [n for n in rest if n not in set(weights) | set(old)]
    layers = {parse_layer_number(n) for n in old}
    part = (
        ""
        if len(steps) == len(every)
        else f" of layer {layers.pop()}"
        if len(layers) == 1 and None not in layers
        else f" of {count_noun(len(steps), 'parameter')}"
    )
    text = f"the optimizer's state{part} is from another step, {far}"
    context.add(CauseKind.OPTIMIZER_STALE, text, evidence, old)
    return [n for n in rest if n not in set(old)]
