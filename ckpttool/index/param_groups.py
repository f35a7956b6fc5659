"""The param groups of an optimizer: how those of two checkpoints differ, and the groups of one with the state of the
other.

    list_names_by_group(ckpt)               the FQNs in each group
    find_ungrouped_state(ckpt)              parameters with state that no group lists
    describe_group_differences(here, there) sentences: parameters that are too many, too few, in another group or order
    regroup_optimizer(ckpt, groups)         the same state in other groups: split, merged, reordered

torch loads optimizer state by position: the k-th parameter of the i-th group gets the state of the k-th of the i-th
that was saved. So a job refuses groups of other lengths, and takes those in another order without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import argument
from ..printable import count_noun, list_first
from .checkpoint import Checkpoint, Path, TensorEntry, Value, joined
from .trainer_trees import fuses_parameters

__all__ = [
    "Groups",
    "describe_group_differences",
    "describe_ungrouped_state",
    "find_ungrouped_state",
    "list_names_by_group",
    "list_numbered_parameters",
    "regroup_optimizer",
]

Groups = tuple[tuple[str, ...], ...]
#: Lists of schedulers with one entry for each param group.
_PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "initial_lrs")
#: How a path of `Checkpoint.origin` begins that says what the optimizer calls a parameter.
_NAMED_PARAMETER = ("optim", "params")
_NAMED = 4  # names that a sentence gives


def list_numbered_parameters(origin: Mapping[Path, Path]) -> tuple[str, ...]:
    """List the FQNs of an optimizer's parameters in the order of the numbers that the source gives them; () if `origin`
    has no such numbers.

    Args:
        origin: {canonical path, or its beginning: path in the source}, as `Checkpoint.origin`.
    """
    numbers = {str(q[2]): p[0] for q, p in origin.items() if q[:2] == _NAMED_PARAMETER and type(p[0]) is int}
    return tuple(sorted(numbers, key=lambda name: numbers[name]))


def list_names_by_group(ckpt: Checkpoint) -> Groups | None:
    """Return the FQNs in each param group, as a tuple for each group in the order of their numbers; None where there
    are no groups, where they do not list names, or where a number is missing."""
    lists: dict[int, list[Any]] = {}
    for v in ckpt.values.values():
        if v.option == "params":
            names = v.data if isinstance(v.data, list) else [None]
            if not str(v.path[2]).isdecimal() or not all(isinstance(n, str) for n in names):
                return None
            lists[v.group] = names
    if not lists or lists.keys() != set(range(len(lists))):
        return None
    return tuple(tuple(lists[i]) for i in range(len(lists)))


def find_ungrouped_state(ckpt: Checkpoint) -> list[str]:
    """List the FQNs of parameters that have optimizer state although no param group lists them, sorted; [] where the
    groups do not list names."""
    groups = list_names_by_group(ckpt)
    if groups is None or fuses_parameters(ckpt.trainer):
        return []
    with_state = {t.parameter for t in ckpt.tensors.values() if t.slot is not None}
    return sorted(with_state.difference(*groups))


def describe_ungrouped_state(names: Sequence[str]) -> str:
    """Return a text that says what happened to the param groups and what to do; `names` are those of
    `find_ungrouped_state`, not empty."""
    return (
        f"the optimizer has state of {count_noun(len(names), 'parameter')} that no param group lists, first "
        f'"{names[0]}". torch gives a group of the job no options if none of its parameters is listed, and stops at '
        "the next step (KeyError: 'betas'). Of a job with pipeline stages, DCP keeps the groups of one stage unless it "
        "saves with flatten_optimizer_state_dict=True. If another checkpoint lists all parameters, "
        f"{argument('like')} with {argument('regroup', True)} takes its groups"
    )


def describe_group_differences(here: Groups, there: Groups) -> list[str]:
    """Return a sentence for each difference between param groups, given as FQNs by group.

    Args:
        here: the groups of a checkpoint.
        there: the groups in a checkpoint of the job that is to load it.
    """
    out: list[str] = []
    sizes = [
        f"{count_noun(len(groups), 'group')} of {', '.join(str(len(g)) for g in groups)}" for groups in (here, there)
    ]
    if [len(g) for g in here] != [len(g) for g in there]:
        out.append(f"the optimizer has {sizes[0]} parameters, that of the job {sizes[1]}")
    mine = {n: i for i, g in enumerate(here) for n in g}
    yours = {n: i for i, g in enumerate(there) for n in g}
    if extra := [n for n in mine if n not in yours]:
        out.append(f"{len(extra):,} parameters are only here, not in the job: {list_first(extra, _NAMED)}")
    if new := [n for n in yours if n not in mine]:
        out.append(f"{len(new):,} parameters are only in the job, not here: {list_first(new, _NAMED)}")
    moved = [n for n in mine if n in yours and mine[n] != yours[n]]
    if moved:
        first = moved[0]
        out.append(
            f"{len(moved):,} parameters are in another group: {list_first(moved, _NAMED)}; the first is in group "
            f"{mine[first]} here and in group {yours[first]} there"
        )
    for i, (a, b) in enumerate(zip(here, there, strict=False)):
        ours, theirs = [n for n in a if n in b], [n for n in b if n in a]
        if ours != theirs:
            k = next(k for k, (x, y) in enumerate(zip(ours, theirs, strict=True)) if x != y)
            out.append(
                f"group {i} has the same parameters in another order: {ours[k]} here where the job has {theirs[k]}, so "
                "the job would load the state of one parameter into another"
            )
    return out


def regroup_optimizer(ckpt: Checkpoint, groups: Groups) -> tuple[Checkpoint, list[str], list[str]]:
    """Put the same optimizer state into other param groups. Nothing is changed where the checkpoint has no groups that
    list names.

    A new group gets the hyperparameters of the group that most of its parameters come from, or, if none of them is
    here, those of the new group before it. State of parameters that are in no new group is left out.

    Args:
        ckpt: the checkpoint, which is not changed.
        groups: the new groups, a tuple of FQNs for each.

    Returns:
        (the checkpoint with the new groups, canonical names of the entries that were left out, notes for the user).
    """
    old = list_names_by_group(ckpt)
    if old is None:
        return ckpt, [], []
    place = {n: i for i, g in enumerate(old) for n in g}
    kept = {n for g in groups for n in g}
    notes: list[str] = []
    origin_of: list[int] = []
    for i, g in enumerate(groups):
        votes = Counter(place[n] for n in g if n in place)
        best = min(votes, key=lambda j: (-votes[j], j)) if votes else (origin_of[-1] if origin_of else 0)
        origin_of.append(best)
        if len(votes) > 1 and (odd := _list_differing_options(ckpt, best, sorted(votes))):
            notes.append(
                f"group {i} is made of groups {', '.join(map(str, sorted(votes)))}, which differ in {odd}; it has "
                f"those of group {best}"
            )
        if not votes:
            notes.append(f"no parameter of group {i} is here; it has the hyperparameters of group {best} and no state")
    if new := [n for g in groups for n in g if n not in place]:
        notes.append(
            f"{len(new):,} parameters of the job are not in this optimizer and have no state: {list_first(new, _NAMED)}"
        )

    gone = [n for n in place if n not in kept]
    left_out: list[str] = []
    tensors = {}
    values: dict[str, Value] = {}
    grouped: dict[int, list[Value]] = {}
    grouped_tensors: dict[int, list[TensorEntry]] = {}
    for name, t in ckpt.tensors.items():
        if t.is_optimizer_state and t.parameter in gone:
            left_out.append(name)
        elif t.option is not None:
            grouped_tensors.setdefault(t.group, []).append(t)
        else:
            tensors[name] = t
    for name, v in ckpt.values.items():
        if v.is_optimizer_state and v.parameter in gone:
            left_out.append(name)
        elif v.option is not None:
            grouped.setdefault(v.group, []).append(v)
        else:
            values[name] = v
    for i, (g, j) in enumerate(zip(groups, origin_of, strict=True)):
        for v in grouped.get(j, []):
            if v.option != "param_names":  # they follow from params
                new_path = (*v.path[:2], i, *v.path[3:])
                values[joined(new_path)] = Value(new_path, list(g) if v.option == "params" else v.data)
        for t in grouped_tensors.get(j, []):
            new_path = (*t.path[:2], i, *t.path[3:])
            tensors[joined(new_path)] = replace(t, path=new_path)
    values = _regroup_scheduler(values, len(old), origin_of, notes)
    numbers = {n: i for i, n in enumerate(n for g in groups for n in g)}
    origin = {
        q: ((numbers[q[2]],) if isinstance(p[0], int) and q[2] in numbers else p)
        for q, p in ckpt.origin.items()
        if q[:2] != _NAMED_PARAMETER or q[2] in kept
    }
    if any(q[:2] == _NAMED_PARAMETER and isinstance(p[0], int) for q, p in origin.items()):
        origin |= {(*_NAMED_PARAMETER, n): (k,) for n, k in numbers.items()}
    recorded = {n: d for n, d in ckpt.recorded.items() if n in tensors}
    out = replace(ckpt, tensors=tensors, values=values, origin=origin, recorded=recorded, recorded_values={})
    return out, left_out, notes


def _list_differing_options(ckpt: Checkpoint, best: int, among: Sequence[int]) -> str:
    """Return the names of the hyperparameters in which the param groups `among` differ from group `best`, as one text;
    "" if there are none. Groups are given by number."""
    options: dict[int, dict[str, Any]] = {}
    for v in ckpt.values.values():
        if v.option is not None and v.path[3] not in ("params", "param_names"):
            options.setdefault(v.group, {})[v.option] = v.data
    mine = options.get(best, {})
    odd = {
        k for i in among for k in {*options.get(i, {}), *mine} if repr(options.get(i, {}).get(k)) != repr(mine.get(k))
    }
    return ", ".join(sorted(odd))


def _regroup_scheduler(
    values: dict[str, Value], n: int, origin_of: Sequence[int], notes: list[str]
) -> dict[str, Value]:
    """Return the values of a checkpoint with the lists of the scheduler that have an entry for each param group in the
    order of the new groups.

    Args:
        values: {name: value}, of all components.
        n: the number of old groups.
        origin_of: for each new group, the number of the old one that it takes its entry from.
        notes: gets a sentence where the checkpoint has a scheduler.
    """
    if list(origin_of) == list(range(n)):
        return values
    out: dict[str, Value] = {}
    flat: dict[Path, dict[int, object]] = {}
    for name, v in values.items():
        if v.component == "scheduler" and len(v.path) > 1:
            if v.path[-1] in _PER_GROUP and isinstance(v.data, list) and len(v.data) == n:
                v = Value(v.path, [v.data[j] for j in origin_of])
            elif len(v.path) > 2 and v.path[-2] in _PER_GROUP and isinstance(v.path[-1], int):
                flat.setdefault(v.path[:-1], {})[v.path[-1]] = v.data
                continue
        out[name] = v
    for path, entries in flat.items():
        order = origin_of if sorted(entries) == list(range(n)) else sorted(entries)
        for i, j in enumerate(order):
            out[joined((*path, i))] = Value((*path, i), entries[j])
    if any(v.component == "scheduler" for v in out.values()):
        notes.append("the learning rates of the scheduler follow the new groups")
    return out
