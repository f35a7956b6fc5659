"""Rules about tensors that have values of their own: what `inspect_tensors` found in the files, put into as few causes
as are true.

Tensors that differ in the same way are one cause. Ways that only one thing explains come before rounding, then come
single elements, and last values of which nothing is known but a distance. Factors of moments tell what left them there:
a loss scale, a sum over ranks, bias correction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..compare.differences import optimizer_steps, options_by_parameter
from ..text import component_of, describe_selection, format_list, fqn_of, is_step, name_components, plural, slot_of
from ..trace.model import Trace
from .context import Context
from .files import FaultyFiles, Inspected, file_of, find_faulty_files, place_of
from .tensor_diff import VAGUE, TensorDiff

__all__ = ["explain_by_files", "explain_differing"]

#: How far a factor may be from another, relatively.
_CLOSE = 1e-3

_VERBS = {"holds": "hold", "is": "are", "has": "have", "differs": "differ"}


def explain_by_files(context: Context, looked: Mapping[str, Inspected], wrong: Sequence[str]) -> bool:
    """Whether one file has every difference, or two that are exchanged; then that is a cause."""
    if context.opened is None or (found := find_faulty_files(context.opened, looked, wrong)) is None:
        return False
    seen = {n: x.diff for n, x in looked.items() if x.diff is not None}
    groups = _group_by_kind(seen)
    first = next(n for n in wrong if n in seen)
    most = max(groups, key=lambda kind: len(groups[kind]))
    parts = f"{plural(len(wrong), 'tensor')} ({name_components(wrong)})"
    evidence = [*context.seen("state.digests"), *(f"{n}: {d.text}" for n, d in list(seen.items())[:4])]
    kind, text = "one-file", f"every difference lies in {found}: its parts of {parts}"
    if len(found.files) > 1:
        if most != "exchanged-rows" or len(groups[most]) * 3 < len(seen) * 2:
            return False
        kind, text = "exchanged", f"{found} are exchanged: every difference lies in their parts of {parts}"
    elif set(groups) - {"elements"} <= VAGUE:
        text += " are from another step, or were computed differently"
    elif most == "copied-rows" and len(sources := _source_files(context, found, groups[most], seen)) == 1:
        text += f" are those of {sources.pop()}"
    elif all(k.startswith("zero") or k == "elements" for k in groups):
        text += " are zeros"
    elif len(groups) == 1:
        text += f" {_plural(_general(seen[first].kind, seen[first].plain))}"
    else:
        text += " differ from the reference's"
    steps = [n for n in wrong if is_step(n)]
    if steps:
        evidence.append(f"optimizer steps of {plural(len(steps), 'parameter')} in it differ as well")
    unread = len(wrong) - len(steps) - len(seen)
    if unread:
        evidence.append(f"{plural(unread, 'tensor')} were not read; all have a part in it")
    place = None if found.theirs else place_of(context.opened[1].locate(), first, seen[first].first)
    context.add(kind, text, evidence, list(wrong), place, {component_of(n) for n in wrong})
    return True


def _source_files(
    context: Context, found: FaultyFiles, names: Sequence[str], seen: Mapping[str, TensorDiff]
) -> set[str | None]:
    """The files that have the rows that tensors hold twice."""
    assert context.opened is not None
    ckpt = context.opened[0 if found.theirs else 1].locate()
    rows = {n: ckpt.tensors[n].numel // ckpt.tensors[n].shape[0] for n in names}
    return {file_of(ckpt, n, seen[n].detail["from"][0] * rows[n]) for n in names}


def explain_differing(context: Context, reference: Trace, rest: Sequence[str], looked: Mapping[str, Inspected]) -> None:
    """What differs and is not the bytes of another tensor; looked into where both checkpoints are open."""
    looked = {n: looked[n] for n in rest if n in looked}
    seen = {n: x.diff for n, x in looked.items() if x.diff is not None}
    left = [n for n in rest if n not in looked]
    groups = _group_by_kind(seen)
    for kind, names in groups.items():
        # others of the same slot that were not read are most likely of the kind, where all that were read are
        slots = {slot_of(n) for n in names}
        alone = all(n in names for n in looked if slot_of(n) in slots)
        more = [n for n in left if slot_of(n) in slots] if alone else []
        left = [n for n in left if n not in set(more)]
        text = _describe_tensors(context, reference, kind, names, more, seen)
        evidence = [f"{n}: {seen[n].text}" for n in names[:8]]
        if more:
            evidence.append(f"{plural(len(more), 'tensor')} of the same kind differ and were not read")
        place = None if context.opened is None else place_of(context.opened[1].locate(), names[0], seen[names[0]].first)
        context.add(kind, text, evidence, names + more, place, {component_of(n) for n in names})
    equal = [n for n in looked if n not in seen]
    if equal:
        which = describe_selection(equal, rest, "tensors")
        text = f"{which}: equal in both checkpoints' files, not in the jobs: loading did it"
        context.add("loading", text, context.seen("state.digests"), equal, explains={component_of(n) for n in equal})
    for component, kind in (("weights", "weights-differ"), ("optimizer", "moments-differ")):
        names = [n for n in left if component_of(n) == component]
        if not names:
            continue
        every = [n for n in reference.state if component_of(n) == component and not is_step(n)]
        what = "weights" if component == "weights" else "tensors of the optimizer"
        slots = {slot_of(n) for n in names}
        if component == "optimizer" and len(slots) == 1:
            what = f"{next(iter(slots))} tensors of the optimizer"
            every = [n for n in every if slot_of(n) in slots]
        which = describe_selection(names, every, what)
        text = f"{which} hold{'s' if len(names) == 1 else ''} other values than the reference's"
        context.add(kind, text, context.seen("state.digests"), names, explains=(component,))


def _group_by_kind(seen: Mapping[str, TensorDiff]) -> dict[str, list[str]]:
    """{kind: names} in the order of the causes.

    What is unrelated is put to what is close, if that is most of it, and so are tensors of so few elements that a
    distance says nothing of them.
    """
    tiny = [n for n, found in seen.items() if found.kind == "elements" and found.count * 2 > found.elements]
    by: dict[str, list[str]] = {}
    for n, found in seen.items():
        by.setdefault("tiny" if n in tiny else found.kind, []).append(n)
    close, unrelated = by.get("close", []), by.get("unrelated", [])
    if len(close) >= 2 * len(unrelated) > 0:
        by["close"] += by.pop("unrelated")
    vague = next((k for k in ("close", "unrelated") if len(by.get(k, ())) > len(tiny)), "elements")
    if tiny:
        by[vague] = [*by.get(vague, ()), *by.pop("tiny")]
    order = {"rounded": 1, "truncated": 1, "stochastic": 1, "quantised": 1, "elements": 2, "close": 3, "unrelated": 4}
    in_order = {n: k for k, n in enumerate(seen)}
    return {
        kind: sorted(names, key=in_order.__getitem__)
        for kind, names in sorted(by.items(), key=lambda item: order.get(item[0].partition("-")[0], 0))
    }


def _describe_tensors(
    context: Context,
    reference: Trace,
    kind: str,
    names: list[str],
    more: list[str],
    seen: Mapping[str, TensorDiff],
) -> str:
    """Which tensors differ, and how."""
    found = names + more
    slots = {slot_of(n) for n in names}
    every = [n for n in reference.state if slot_of(n) in slots]
    what = f"{next(iter(slots))} tensors" if len(slots) == 1 else "moments" if "weights" not in slots else "tensors"
    which = describe_selection(found, every, "weights" if slots == {"weights"} else what)
    if len(found) == 1:
        return f"{which} {seen[names[0]].text}"
    if kind == "scaled" and (factors := _describe_factors(context, reference, names, seen)):
        return f"{which} are multiplied ({factors}"
    texts, plain = {seen[n].text for n in names}, {seen[n].plain for n in names}
    how = texts.pop() if len(texts) == 1 else plain.pop() if len(plain) == 1 else _general(kind, seen[names[0]].plain)
    also = ""
    if kind == "close" and "weights" not in slots and len(found) * 10 >= len(every) * 9:
        weights = [n for n in reference.state if slot_of(n) == "weights"]
        if weights and all(n in context.got.state and context.got.state[n] == reference.state[n] for n in weights):
            also = "; weights and the optimizer's steps are the reference's"
    return f"{which} {_plural(how)}{also}"


def _plural(description: str) -> str:
    verb, _, rest = description.partition(" ")
    return f"{_VERBS.get(verb, verb)} {rest}".replace(" its ", " their ")


def _general(kind: str, text: str) -> str:
    """What is true of several tensors of one kind whose texts are not the same."""
    return {
        "close": "is close to the reference's: from another step, or computed differently",
        "unrelated": "has values unrelated to the reference's",
        "scaled": "holds the reference's values times a factor",
        "zero-rows": "has zeros in some rows",
        "zero-range": "has zeros in a range",
        "constant": "is one value throughout",
        "offset": "holds the reference's values plus a number",
        "elements": "differs in a few elements",
        "not-finite": "has elements that are NaN or infinite",
        "shifted": "holds the reference's elements some places on",
        "permuted-rows": "has the reference's rows in another order",
        "permuted-columns": "has the reference's columns in another order",
        "exchanged-rows": "has two ranges of rows exchanged",
        "copied-rows": "has some rows twice",
        "exchanged-columns": "has two ranges of columns exchanged",
        "copied-columns": "has some columns twice",
        "interleaved-rows": "has the rows of a fused weight's parts in another order",
        "interleaved-columns": "has the columns of a fused weight's parts in another order",
        "rope": "has its rows reordered as between the two ways to compute rope",
        "quantised": "holds the reference's values quantised to 8 bits",
        "lora-merged": "holds the reference's values plus the product of its adapter: merged, though it is kept",
    }.get(kind, text)


# -------------------------------------------------------------------------------------------------------------- factors


def _describe_factors(
    context: Context, reference: Trace, names: Sequence[str], seen: Mapping[str, TensorDiff]
) -> str | None:
    """The factor of each slot, and what leaves such factors; None of weights, or if factors have nothing in common."""
    of = {n: float(seen[n].detail["factor"]) for n in names if "factor" in seen[n].detail}
    if len(of) < len(names) or any(slot_of(n) == "weights" for n in names):
        return None
    by: dict[str, list[float]] = {}
    for n, factor in of.items():
        by.setdefault(slot_of(n), []).append(factor)
    texts = []
    for slot, found in sorted(by.items()):
        low, high = min(found), max(found)
        texts.append(f"{slot} x{low:.6g}" + (f" to x{high:.6g}" if not _are_close(low, high) else ""))
    why = _explain_bias_correction(reference, of)
    if why is None and all(_are_close(min(found), max(found)) for found in by.values()):
        why = _explain_gradient_factor(context, reference, {slot: found[0] for slot, found in by.items()})
    return f"{format_list(texts, 8)})" + (f": {why}" if why else "")


def _are_close(x: float, y: float) -> bool:
    return math.isclose(x, y, rel_tol=_CLOSE)


def _explain_bias_correction(reference: Trace, of: Mapping[str, float]) -> str | None:
    """Whether each moment is divided by 1 - beta^step of its own param group and step."""
    known, steps = options_by_parameter(reference), optimizer_steps(reference)
    for n, factor in of.items():
        fqn, which = fqn_of(n), {"exp_avg": 0, "exp_avg_sq": 1}.get(slot_of(n))
        betas: Any = known.get(fqn, {}).get("betas")
        if which is None or fqn not in steps or not isinstance(betas, (list, tuple)) or len(betas) != 2:
            return None
        left = 1 - float(betas[which]) ** steps[fqn]
        if not left or not _are_close(factor, 1 / left):
            return None
    return "they were divided by 1 - beta^step, so that the bias correction is applied twice"


def _explain_gradient_factor(context: Context, reference: Trace, by: Mapping[str, float]) -> str | None:
    """What gradients were multiplied by, if the first moment has that factor and the second one its square."""
    squares = [s for s in by if s.endswith("_sq")]
    plain = [s for s in by if not s.endswith("_sq")]
    if len({round(math.log(abs(by[s])), 3) for s in plain}) != 1 or by[plain[0]] <= 0:
        return None
    factor = by[plain[0]]
    if not all(_are_close(by[s], factor**2) for s in squares):
        return None
    scales = [
        float(v)
        for t in (reference, context.got)
        for n, v in (*t.values.items(), *t.scalars.items())
        if n.startswith("scaler.") and isinstance(v, (int, float)) and not isinstance(v, bool)
    ]
    if factor > 1 and any(_are_close(factor, s) for s in scales if s > 1):
        return f"their gradients were multiplied by the loss scale, {factor:.6g}"
    whole = round(factor)
    if factor < 1:
        whole = round(1 / factor)
        if whole > 1 and _are_close(factor, 1 / whole):
            return (
                f"their gradients were divided by {whole} once too often (the number of ranks, or of accumulation "
                "steps)"
            )
        return None
    if not _are_close(factor, whole):
        return None
    ranks = None if context.opened is None else context.opened[0].checkpoint.world_size
    if whole != ranks and whole >= 256 and whole & (whole - 1) == 0:
        return f"their gradients were multiplied by a loss scale of {whole}"
    whose = "ranks" if whole == ranks else "ranks or accumulation steps"
    return f"their gradients were summed over {whole} {whose} instead of averaged"
