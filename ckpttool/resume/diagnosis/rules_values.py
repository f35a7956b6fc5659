"""Rules about tensors that have values of their own: what `inspect_tensors` found in the files, put into as few causes
as are true.

Tensors that differ in the same way are one cause. Ways that only one thing explains come before rounding, then come
single elements, and last values of which nothing is known but a distance. Factors of moments tell what left them there:
a loss scale, a sum over ranks, bias correction.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...engine.tensor_faults.tensor_diff import VAGUE, TensorDiff
from ...engine.tensor_faults.tensor_kinds import TensorKind
from ...printable import count_noun, list_first
from ..compare.differences import collect_optimizer_steps, collect_options_by_parameter
from ..text import describe_components, describe_selection, is_step_counter, parse_component, parse_fqn, parse_slot
from ..trace.model import Trace
from .context import Context
from .files import FaultyFiles, Inspected, describe_element_place, find_faulty_files, find_file_of_element
from .kinds import CauseKind

__all__ = ["explain_differing_tensors", "explain_faulty_files"]

#: How far a factor may be from another, relatively.
_CLOSE = 1e-3

_ZEROS = frozenset((TensorKind.ZERO, TensorKind.ZERO_ROWS, TensorKind.ZERO_RANGE))

_VERBS = {"holds": "hold", "is": "are", "has": "have", "differs": "differ"}


def explain_faulty_files(context: Context, looked: Mapping[str, Inspected], wrong: Sequence[str]) -> bool:
    """Add a cause if one file contains every difference, or if two files are exchanged; return whether a cause was
    added.

    Args:
        context: the comparison, which gets the cause.
        looked: what `inspect_tensors` returned.
        wrong: canonical names of all tensors that differ.
    """
    if context.opened is None or (found := find_faulty_files(context.opened, looked, wrong)) is None:
        return False
    seen = {n: x.diff for n, x in looked.items() if x.diff is not None}
    groups = _group_by_kind(seen)
    first = next(n for n in wrong if n in seen)
    kinds = {group.kind for group in groups}
    most = max(groups, key=lambda group: len(group.names))
    parts = f"{count_noun(len(wrong), 'tensor')} ({describe_components(wrong)})"
    evidence = [*context.failed_texts("state.digests"), *(f"{n}: {d.text}" for n, d in list(seen.items())[:4])]
    kind, text = CauseKind.ONE_FILE, f"every difference lies in {found}: its parts of {parts}"
    if len(found.files) > 1:
        if most.kind is not TensorKind.EXCHANGED_ROWS or len(most.names) * 3 < len(seen) * 2:
            return False
        kind, text = CauseKind.EXCHANGED, f"{found} are exchanged: every difference lies in their parts of {parts}"
    elif kinds - {TensorKind.ELEMENTS} <= VAGUE:
        text += " are from another step, or were computed differently"
    elif (
        most.kind is TensorKind.COPIED_ROWS
        and len(sources := _find_source_files(context, found, most.names, seen)) == 1
    ):
        text += f" are those of {sources.pop()}"
    elif kinds <= _ZEROS | {TensorKind.ELEMENTS}:
        text += " are zeros"
    elif len(groups) == 1:
        text += f" {_make_plural(_describe_kind(seen[first].way, seen[first].plain))}"
    else:
        text += " differ from the reference's"
    steps = [n for n in wrong if is_step_counter(n)]
    if steps:
        evidence.append(f"optimizer steps of {count_noun(len(steps), 'parameter')} in it differ as well")
    unread = len(wrong) - len(steps) - len(seen)
    if unread:
        evidence.append(f"{count_noun(unread, 'tensor')} were not read; all have a part in it")
    place = None if found.theirs else describe_element_place(context.opened[1].locate(), first, seen[first].first)
    context.add(kind, text, evidence, list(wrong), place)
    return True


def _find_source_files(
    context: Context, found: FaultyFiles, names: Sequence[str], seen: Mapping[str, TensorDiff]
) -> set[str | None]:
    """Find the files from which copied rows were taken, for tensors in which some rows hold the values of other rows.

    Args:
        context: the comparison, with open checkpoints.
        found: the files that contain the copies.
        names: canonical names of the tensors with copied rows.
        seen: {canonical name: how the tensor differs}.

    Returns:
        Names of files in the checkpoint that `found` is of; None in the set stands for rows that no file contains.
    """
    assert context.opened is not None
    ckpt = context.opened[0 if found.theirs else 1].locate()
    rows = {n: ckpt.tensors[n].numel // ckpt.tensors[n].shape[0] for n in names}
    return {find_file_of_element(ckpt, n, seen[n].detail["from"][0] * rows[n]) for n in names}


def explain_differing_tensors(context: Context, rest: Sequence[str], looked: Mapping[str, Inspected]) -> None:
    """Add a cause for each kind of difference among tensors that no earlier rule explained.

    Args:
        rest: names of those tensors.
        looked: {name: what `inspect_tensors` found}; empty unless both checkpoints are open.
    """
    looked = {n: looked[n] for n in rest if n in looked}
    seen = {n: x.diff for n, x in looked.items() if x.diff is not None}
    left = [n for n in rest if n not in looked]
    for kind, dtype, names in _group_by_kind(seen):
        # others of the same slot that were not read are most likely of the kind, where all that were read are
        slots = {parse_slot(n) for n in names}
        alone = all(n in names for n in looked if parse_slot(n) in slots)
        more = [n for n in left if parse_slot(n) in slots] if alone else []
        left = [n for n in left if n not in set(more)]
        text = _describe_tensors(context, kind, names, more, seen)
        evidence = [f"{n}: {seen[n].text}" for n in names[:8]]
        if more:
            evidence.append(f"{count_noun(len(more), 'tensor')} of the same kind differ and were not read")
        place = (
            None
            if context.opened is None
            else describe_element_place(context.opened[1].locate(), names[0], seen[names[0]].first)
        )
        context.add(kind, text, evidence, names + more, place, name=dtype)
    equal = [n for n in looked if n not in seen]
    if equal:
        which = describe_selection(equal, rest, "tensors")
        text = f"{which}: equal in both checkpoints' files, not in the jobs: loading did it"
        context.add(CauseKind.LOADING, text, context.failed_texts("state.digests"), equal)
    for component, vague in (("weights", CauseKind.WEIGHTS_DIFFER), ("optimizer", CauseKind.MOMENTS_DIFFER)):
        names = [n for n in left if parse_component(n) == component]
        if not names:
            continue
        every = [n for n in context.expected.state if parse_component(n) == component and not is_step_counter(n)]
        what = "weights" if component == "weights" else "tensors of the optimizer"
        slots = {parse_slot(n) for n in names}
        if component == "optimizer" and len(slots) == 1:
            what = f"{next(iter(slots))} tensors of the optimizer"
            every = [n for n in every if parse_slot(n) in slots]
        which = describe_selection(names, every, what)
        text = f"{which} hold{'s' if len(names) == 1 else ''} other values than the reference's"
        context.add(vague, text, context.failed_texts("state.digests"), names)


class _Group(NamedTuple):
    """The tensors that differ in one way, with the dtype that they were rounded to, "" for other ways."""

    kind: TensorKind
    dtype: str
    names: list[str]


def _group_by_kind(seen: Mapping[str, TensorDiff]) -> list[_Group]:
    """Group tensors by kind of difference, in the order of the kinds.

    Unrelated tensors are counted as close ones if there are at least twice as many of these. Tensors with few elements,
    whose distance says little, join the most frequent of the kinds close, unrelated and other elements.

    Args:
        seen: {canonical name: how the tensor differs}.
    """
    tiny = {n for n, found in seen.items() if found.way is TensorKind.ELEMENTS and found.count * 2 > found.elements}
    count = Counter(found.way for n, found in seen.items() if n not in tiny)
    close, unrelated = count[TensorKind.CLOSE], count[TensorKind.UNRELATED]
    merges = close >= 2 * unrelated > 0
    if merges:
        close, unrelated = close + unrelated, 0
    many = len(tiny)
    vague = TensorKind.CLOSE if close > many else TensorKind.UNRELATED if unrelated > many else TensorKind.ELEMENTS
    by: dict[tuple[TensorKind, str], list[str]] = {}
    for n, found in seen.items():
        way = vague if n in tiny else found.way
        if merges and way is TensorKind.UNRELATED:
            way = TensorKind.CLOSE
        dtype = found.detail["dtype"] if way is TensorKind.ROUNDED else ""
        by.setdefault((way, dtype), []).append(n)
    groups = [_Group(way, dtype, names) for (way, dtype), names in by.items()]
    return sorted(groups, key=lambda group: group.kind.rank)


def _describe_tensors(
    context: Context,
    kind: TensorKind,
    names: list[str],
    more: list[str],
    seen: Mapping[str, TensorDiff],
) -> str:
    """Return a text about which tensors differ, and how.

    Args:
        kind: the kind of difference of all of them.
        names: those that were read.
        more: those that were not read, and most likely differ in the same way.
        seen: {name: how the tensor differs} of those that were read.
    """
    found = names + more
    slots = {parse_slot(n) for n in names}
    every = [n for n in context.expected.state if parse_slot(n) in slots]
    what = f"{next(iter(slots))} tensors" if len(slots) == 1 else "moments" if "weights" not in slots else "tensors"
    which = describe_selection(found, every, "weights" if slots == {"weights"} else what)
    if len(found) == 1:
        return f"{which} {seen[names[0]].text}"
    if kind is TensorKind.SCALED and (factors := _describe_factors(context, names, seen)):
        return f"{which} are multiplied ({factors}"
    texts, plain = {seen[n].text for n in names}, {seen[n].plain for n in names}
    how = _describe_kind(kind, seen[names[0]].plain)
    if len(texts) == 1 or len(plain) == 1:
        how = (texts if len(texts) == 1 else plain).pop()
    also = ""
    if kind is TensorKind.CLOSE and "weights" not in slots and len(found) * 10 >= len(every) * 9:
        weights = [n for n in context.expected.state if parse_slot(n) == "weights"]
        if weights and all(
            n in context.got.state and context.got.state[n] == context.expected.state[n] for n in weights
        ):
            also = "; weights and the optimizer's steps are the reference's"
    return f"{which} {_make_plural(how)}{also}"


def _make_plural(description: str) -> str:
    """Return a description in the plural: "hold their ..." for "holds its ..."."""
    verb, _, rest = description.partition(" ")
    return f"{_VERBS.get(verb, verb)} {rest}".replace(" its ", " their ")


def _describe_kind(kind: TensorKind, text: str) -> str:
    """Return the general phrase of a kind if it has one, otherwise `text`, the description of its first tensor."""
    return kind.phrase if kind.is_general else text


# -------------------------------------------------------------------------------------------------------------- factors


def _describe_factors(context: Context, names: Sequence[str], seen: Mapping[str, TensorDiff]) -> str | None:
    """Return a text about the factor by which the tensors of each slot (exp_avg, ...) are multiplied, and about the
    fault that leaves such factors. The text ends a parenthesis that the caller has begun.

    None if one of the tensors is a weight or has no factor.

    Args:
        context: the comparison.
        names: canonical names of the tensors.
        seen: {canonical name: how the tensor differs}.
    """
    of = {n: float(seen[n].detail["factor"]) for n in names if "factor" in seen[n].detail}
    if len(of) < len(names) or any(parse_slot(n) == "weights" for n in names):
        return None
    by: dict[str, list[float]] = {}
    for n, factor in of.items():
        by.setdefault(parse_slot(n), []).append(factor)
    texts = []
    for slot, found in sorted(by.items()):
        low, high = min(found), max(found)
        texts.append(f"{slot} x{low:.6g}" + (f" to x{high:.6g}" if not _are_factors_close(low, high) else ""))
    why = _explain_bias_correction(context.expected, of)
    if why is None and all(_are_factors_close(min(found), max(found)) for found in by.values()):
        why = _explain_gradient_factor(context, {slot: found[0] for slot, found in by.items()})
    return f"{list_first(texts, 8)})" + (f": {why}" if why else "")


def _are_factors_close(x: float, y: float) -> bool:
    """Tell whether two factors are equal up to rounding."""
    return math.isclose(x, y, rel_tol=_CLOSE)


def _explain_bias_correction(reference: Trace, of: Mapping[str, float]) -> str | None:
    """Return a text that moments were bias-corrected already, if all factors fit; None otherwise.

    A factor fits if it is 1 / (1 - beta^step), with the beta and the step count of its own parameter. `of` is
    {canonical name of a moment: its factor}.
    """
    known, steps = collect_options_by_parameter(reference), collect_optimizer_steps(reference)
    for n, factor in of.items():
        fqn, which = parse_fqn(n), {"exp_avg": 0, "exp_avg_sq": 1}.get(parse_slot(n))
        betas: object = known.get(fqn, {}).get("betas")
        if which is None or fqn not in steps or not isinstance(betas, (list, tuple)) or len(betas) != 2:
            return None
        left = 1 - float(betas[which]) ** steps[fqn]
        if not left or not _are_factors_close(factor, 1 / left):
            return None
    return "they were divided by 1 - beta^step, so that the bias correction is applied twice"


def _explain_gradient_factor(context: Context, by: Mapping[str, float]) -> str | None:
    """Return a text about what multiplied the gradients, if first moments have one factor and second moments its
    square.

    None otherwise, or if nothing known has this factor. `by` is {slot: factor}.
    """
    squares = [s for s in by if s.endswith("_sq")]
    plain = [s for s in by if not s.endswith("_sq")]
    if len({round(math.log(abs(by[s])), 3) for s in plain}) != 1 or by[plain[0]] <= 0:
        return None
    factor = by[plain[0]]
    kept = {parse_slot(n) for n in context.expected.state if parse_slot(n).endswith("_sq")}
    if kept - set(squares) or not all(_are_factors_close(by[s], factor**2) for s in squares):
        return None
    scales = [
        float(v)
        for t in (context.expected, context.got)
        for n, v in (*t.values.items(), *t.scalars.items())
        if n.startswith("scaler.") and isinstance(v, (int, float)) and not isinstance(v, bool)
    ]
    if factor > 1 and any(_are_factors_close(factor, s) for s in scales if s > 1):
        return f"their gradients were multiplied by the loss scale, {factor:.6g}"
    whole = round(factor)
    if factor < 1:
        whole = round(1 / factor)
        if whole > 1 and _are_factors_close(factor, 1 / whole):
            return (
                f"their gradients were divided by {whole} once too often (the number of ranks, or of accumulation "
                "steps)"
            )
        return None
    if not _are_factors_close(factor, whole):
        return None
    ranks = None if context.opened is None else context.opened[0].checkpoint.world_size
    if whole != ranks and whole >= 256 and whole & (whole - 1) == 0:
        return f"their gradients were multiplied by a loss scale of {whole}"
    whose = "ranks" if whole == ranks else "ranks or accumulation steps"
    return f"their gradients were summed over {whole} {whose} instead of averaged"
