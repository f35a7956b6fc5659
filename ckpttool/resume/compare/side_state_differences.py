"""How state beside model and optimizer differs: random states, dataloader, scaler, scheduler, counters, what a user
added.

Compared are the checkpoints' entries, not live objects: a conversion to another world size keeps the random states of
the ranks that saved, and so must its result.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

from ...layouts import get_program_of
from ..trace.model import LIVE, Trace
from ..trace.side_state import OBJECT
from .differences import are_equal_values

__all__ = [
    "Marked",
    "SideStateDiff",
    "compare_held_with_files",
    "compare_held_with_reference",
    "compare_side_state",
    "holds_live_state",
    "is_comparable",
    "is_recording",
    "select_side_state",
]

#: Values of a scheduler that change while it computes and mean nothing afterwards.
_TRANSIENT = frozenset(("_get_lr_called_within_step", "_is_initial", "verbose"))
#: Kinds of marks of states that a module may write in several ways.
_ENCODED = ("bytes", "uint8")
_FEW = 8  # values of a list that are shown
#: How DeepSpeed cut the state, in its own configuration: a conversion to another stage changes it.
_CUTS = "extra.ds_config.zero_optimization."


def is_comparable(value: object) -> bool:
    """Tell whether a value can be compared: False for a `Marked` of an unknown object, or without a fingerprint."""
    return not isinstance(value, Marked) or (value.kind != OBJECT and value.digest != "")


@dataclass
class SideStateDiff:
    """The differences of one component beside model and optimizer: values, and marks of arrays and tensors.

    `found` {name: (expected, found)}, `missing` names only in the reference, `extra` names only here, `unknown` names
    whose objects cannot be compared, `compared` how many names were. `held` is whether this side has any of it.
    """

    found: dict[str, tuple[object, object]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    compared: int = 0
    held: bool = True

    @property
    def is_lost(self) -> bool:
        """Whether the reference has the component and this side has nothing of it."""
        return bool(self.missing) and not self.held

    @property
    def problems(self) -> list[str]:
        """A text for each value that differs or is missing; the missing ones last."""
        return [*self.changes, *(f"{n} is missing" for n in self.missing)]

    @property
    def changes(self) -> list[str]:
        """A text for each value that differs, such as "scheduler.last_epoch is 3 and was 4"."""
        return [_describe_change(n, *two) for n, two in self.found.items()]


def _describe_change(name: str, expected: object, found: object) -> str:
    """Return a text about how a value differs; of long lists only the first difference is shown."""
    if type(expected) is type(found) is list and max(len(expected), len(found)) > _FEW:
        if len(expected) != len(found):
            return f"{name} has {len(found)} values and had {len(expected)}"
        wrong = [k for k, (a, b) in enumerate(zip(expected, found, strict=True)) if not are_equal_values(a, b)]
        more = f", and {len(wrong) - 1} more of its {len(found)} values differ" if len(wrong) > 1 else ""
        return f"{name}[{wrong[0]}] is {found[wrong[0]]!r} and was {expected[wrong[0]]!r}{more}"
    if not isinstance(expected, Marked) and not isinstance(found, Marked):
        return f"{name} is {found!r} and was {expected!r}"
    if isinstance(expected, Marked) and isinstance(found, Marked) and expected[:2] == found[:2]:
        return f"{name} ({expected}) has other contents"
    return f"{name} is {found} and was {expected}"


class Marked(NamedTuple):
    """What a mark says of a tensor, an array, bytes or a long list (`side_state.Mark`)."""

    kind: str
    shape: tuple[int, ...]
    digest: str

    def __str__(self) -> str:
        """Return the kind and the shape, such as "float32 [3, 4]", for messages."""
        return f"{self.kind} {list(self.shape)}"


def select_side_state(trace: Trace, component: str) -> dict[str, object]:
    """Return {canonical name: plain value, or Marked for an array} of one component of a trace's side state.

    `component` is such as "scheduler" or "rng". Values that are only meaningful within a step are left out.
    """
    out: dict[str, object] = {n: v for n, v in trace.values.items() if n.partition(".")[0] == component}
    out.update((n, Marked(*m)) for n, m in trace.others.items() if n.partition(".")[0] == component)
    if out.get(component) in ([], (), {}):
        del out[component]  # an empty list of schedulers holds none
    skip = _TRANSIENT if component == "scheduler" else frozenset[str]()
    return {n: v for n, v in out.items() if n.rpartition(".")[2] not in skip and not n.startswith(_CUTS)}


def compare_side_state(reference: Trace, got: Trace, component: str) -> SideStateDiff:
    """Compare one component of the state outside model and optimizer, such as "scheduler" or "rng".

    If the reference holds the state of live objects, and not of a checkpoint, nothing is compared if it lacks the
    component or is of another step. Such a reference without named random states has those of each rank; the
    checkpoint's are compared with these, regardless of their names.
    """
    theirs, ours = select_side_state(reference, component), select_side_state(got, component)
    out = SideStateDiff(held=bool(ours))
    if holds_live_state(reference) and (not theirs or reference.start != got.start):
        return (
            _compare_random_states(reference, ours, get_program_of(got.layout).saves_every_rng)
            if component == "rng" and reference.start == got.start
            else out
        )
    for n, expected in theirs.items():
        if n not in ours:
            # a recording may hold functions that no checkpoint does
            is_object = isinstance(expected, Marked) and expected.kind == OBJECT
            (out.unknown if is_object and holds_live_state(reference) else out.missing).append(n)
        elif not is_comparable(expected) or not is_comparable(ours[n]):
            out.unknown.append(n)
        else:
            out.compared += 1
            if not any(
                are_equal_values(x, ours[n]) or _is_same_number(x, ours[n])
                for x in (expected, *_list_rank_variants(reference, n))
            ):
                out.found[n] = (expected, ours[n])
    out.extra = [n for n in ours if n not in theirs]
    return out


def compare_held_with_files(trace: Trace) -> tuple[list[str], int]:
    """Compare what scheduler and modules hold after loading (`Trace.held`) with the values in the files.

    Only values that both have are compared, without bytes that a module makes itself, such as a pickle.

    Returns:
        (a text for each difference, how many values were compared).
    """
    problems, compared = [], 0
    for name, value in trace.held.items():
        plain = _strip_key_brackets(name)
        stored = _find_stored_value(trace, plain)
        if name.rpartition(".")[2] in _TRANSIENT or (plain not in trace.values and plain not in trace.others):
            continue
        if not is_comparable(_as_marked(stored)) or not is_comparable(_as_marked(value)):
            continue
        if _is_mark(stored) and stored[0] in _ENCODED:
            continue
        compared += 1
        if not _are_equal_held_values(stored, value):
            problems.append(f"{plain} is {value!r} in the job and {stored!r} in the files")
    return problems, compared


def compare_held_with_reference(reference: Trace, got: Trace) -> list[str]:
    """Compare what scheduler and modules hold after loading (`Trace.held`) with what they hold in the reference's job.

    A value that only this side has is no difference, since some readers load no key that the job does not have at
    first. Values that differ in the files already are left out: `compare_side_state` finds those.

    Returns:
        A text for each difference.
    """
    out = []
    for name, expected in reference.held.items():
        component = name.partition(".")[0]
        where = f"where {reference.loaders.get(component, 'the reference')} loads it"
        if reference.layout == LIVE:
            where = "in the run without a pause"
        theirs, ours = (_find_stored_value(trace, _strip_key_brackets(name)) for trace in (reference, got))
        if (
            component not in got.loaders
            or name.rpartition(".")[2] in _TRANSIENT
            or not _are_equal_held_values(theirs, ours)
        ):
            continue
        if name not in got.held:
            out.append(f"{name} is not in the job, and is {where}")
        elif not _are_equal_held_values(expected, got.held[name]):
            out.append(f"{name} is {got.held[name]!r}, and {expected!r} {where}")
    return out


def _strip_key_brackets(name: str) -> str:
    """Convert the name of a value in `Trace.held` to the name that the checkpoint's files have for it: without the
    brackets around keys that are not text."""
    return name.replace("[", "").replace("]", "")


def _find_stored_value(trace: Trace, name: str) -> object:
    """Return the value that a checkpoint's files have under a canonical name: plain data, or for a tensor, an array,
    bytes or a long list its mark [dtype, shape, fingerprint]; None if the files have no such value."""
    mark = trace.others.get(name)
    return trace.values.get(name) if mark is None else list(mark)


def _are_equal_held_values(a: object, b: object) -> bool:
    """Tell whether two values of `Trace.held` are equal; a number equals the mark of a tensor that holds only that
    number.

    Objects that cannot be compared are equal to anything.
    """
    sides = [_as_marked(x) for x in (a, b)]
    return not all(map(is_comparable, sides)) or are_equal_values(*sides) or _is_same_number(*sides)


def _as_marked(x: object) -> object:
    """Convert a mark [dtype, shape, fingerprint] in `Trace.held` to a `Marked`; return any other value unchanged."""
    return Marked(x[0], tuple(x[1]), x[2]) if _is_mark(x) else x


def _is_mark(x: object) -> TypeGuard[list[Any]]:
    """Tell whether a value of `Trace.held` is a mark: [dtype, shape, fingerprint]."""
    return isinstance(x, list) and len(x) == 3 and isinstance(x[0], str) and isinstance(x[1], (list, tuple))


def _list_rank_variants(reference: Trace, name: str) -> list[object]:
    """Return the different values that the ranks of a recorded job held under a name; [] if they agreed.

    A checkpoint has the value of one of them.
    """
    found = reference.variants.get(name, [])
    return [Marked(*x) for x in found] if name in reference.others else found


def _compare_random_states(reference: Trace, ours: dict[str, object], every: bool) -> SideStateDiff:
    """Compare the random states of a checkpoint with those of the recorded ranks.

    A state is matched to a kind of generator by its dtype and shape. A state with a rank in its name must equal that
    rank's, others must equal some rank's. The checkpoint may hold more states than were recorded, such as one of the
    data.

    Args:
        reference: the recording.
        ours: {canonical name: value, or Marked} of the checkpoint's random states.
        every: whether the trainer saves the states of all ranks, so that a checkpoint with those of one rank has lost
            the others.
    """
    out = SideStateDiff(held=bool(ours))
    for kind in ("torch", "cuda", "numpy", "python"):
        ranks = [Marked(str(g[kind][0]), tuple(g[kind][1]), str(g[kind][2])) for g in reference.generators if kind in g]
        if not ranks or len(ranks) != len(reference.generators):
            continue
        named = {n: x for n, x in ours.items() if isinstance(x, Marked) and (x.kind, tuple(x.shape)) == ranks[0][:2]}
        by_rank: dict[int | None, list[str]] = {}
        for n in named:
            rank = _parse_rank(n, kind)
            by_rank.setdefault(rank if rank is not None and rank < len(ranks) else None, []).append(n)
        for rank, names in by_rank.items():
            right = [n for n in names if named[n] in (ranks if rank is None else [ranks[rank]])]
            if not right:
                out.found[names[0]] = (ranks[rank or 0], named[names[0]])
            out.compared += max(1, len(right))
            for n in right if kind == "numpy" else []:
                at = n.removesuffix("1") + "2" if n.endswith(".1") else n.removesuffix("key") + "pos"
                drawn = reference.generators[ranks.index(named[n])].get("numpy_position")
                if ours.get(at, drawn) != drawn:
                    out.found[at] = (drawn, ours[at])
        several = {r for r in by_rank if r is not None}
        if len(several) > 1 or (every and several):
            out.missing += [f"{kind}'s of rank {r}" for r in range(len(ranks)) if r not in several]
    return out


def _parse_rank(name: str, kind: str) -> int | None:
    """Return the rank in the name of a random state, its first number; None if the name has none.

    `kind` is "torch", "cuda", "numpy" or "python". States of the last two are tuples, so that a final ".1" is an index
    and no rank.
    """
    numbers = re.findall(r"\d+", name.removesuffix(".1") if kind in ("numpy", "python") else name)
    return int(numbers[0]) if numbers else None


def is_recording(trace: Trace) -> bool:
    """Tell whether a trace comes from a Recorder, and not from a run of resume-verify on a checkpoint."""
    return trace.layout is None


def holds_live_state(trace: Trace) -> bool:
    """Tell whether a trace has the side state of live objects (a recording or a fresh run), and not of a checkpoint."""
    return trace.layout in (None, LIVE)


def _is_same_number(a: object, b: object) -> bool:
    """Tell whether one value is a number and the other the mark of a tensor that holds only that number."""
    number, marked = (b, a) if isinstance(a, Marked) else (a, b)
    if not isinstance(marked, Marked) or isinstance(number, Marked) or marked.shape not in ((), (1,)):
        return False
    if not isinstance(number, (bool, int, float)):
        return False
    import torch

    from ..trace.side_state import make_array_mark

    try:
        held = torch.tensor(number, dtype=getattr(torch, marked.kind, None)).reshape(marked.shape)
    except (OverflowError, RuntimeError, ValueError):  # its dtype has no such number
        return False
    same = held.is_floating_point() or held.item() == number  # of integers, a cast may make another one
    return same and make_array_mark(held)[2] == marked.digest
