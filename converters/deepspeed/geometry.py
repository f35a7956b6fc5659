"""How ZeRO cuts parameters into the flat tensors of ranks: arithmetic over shapes, for reading and writing.

zero.py describes it.
"""

from __future__ import annotations

from itertools import count
from math import prod
from typing import NamedTuple

__all__ = [
    "FlatPlace",
    "Groups",
    "concatenate_parameters",
    "elements_per_rank",
    "partition_parameters",
    "split_groups",
    "split_into_subgroups",
]


class FlatPlace(NamedTuple):
    """Where a parameter lies: in which flat tensor, and (rank, first, last, element of the rank's flat tensor)."""

    group: int
    shape: tuple[int, ...]
    parts: list[tuple[int, int, int, int]]


Groups = list[dict[str, tuple[int, ...]]]


def partition_parameters(groups: Groups, world: int) -> tuple[dict[str, FlatPlace], list[int]]:
    """Place parameters as stage 3 does, which cuts each of them into `world` parts, one for each rank.

    `groups` is [{name: shape}], the parameters in each flat tensor. Return ({name: place}, [length of each flat tensor
    on one rank, in elements; the same on every rank]).

    partition_parameters([{"w": (5,), "b": (1,)}], 2)
        == ({"w": FlatPlace(0, (5,), [(0, 0, 3, 0), (1, 3, 5, 0)]), "b": FlatPlace(0, (1,), [(0, 0, 1, 3)])}, [4])
    """
    out: dict[str, FlatPlace] = {}
    lengths: list[int] = []
    for g, group in enumerate(groups):
        at = 0
        for name, shape in group.items():
            n = prod(shape)
            part = -(-n // world)
            cuts = [(r, r * part, min((r + 1) * part, n), at) for r in range(world) if r * part < n]
            out[name] = FlatPlace(g, shape, cuts)
            at += part
        lengths.append(at)
    return out, lengths


def concatenate_parameters(
    groups: Groups, parts: list[int], paddings: list[list[int]] | None = None
) -> dict[str, FlatPlace]:
    """Place parameters as stages 1 and 2 do: one after the other in a flat tensor that is cut into equal ranges, one a
    rank.

    Args:
        groups: [{name: shape}], the parameters in each flat tensor, in their order.
        parts: for each flat tensor, the number of its elements that one rank holds.
        paddings: for each flat tensor, the number of padding elements after each parameter; None: no padding.

    Returns:
        {name: place}.

    concatenate_parameters([{"w": (5,), "b": (1,)}], [4])
        == {"w": FlatPlace(0, (5,), [(0, 0, 4, 0), (1, 4, 5, 0)]), "b": FlatPlace(0, (1,), [(1, 0, 1, 1)])}
    """
    out: dict[str, FlatPlace] = {}
    for g, group in enumerate(groups):
        at, part = 0, parts[g]
        for k, (name, shape) in enumerate(group.items()):
            n = prod(shape)
            cuts = []
            first = 0
            while first < n:
                rank, inside = divmod(at + first, part)
                last = min(n, first + part - inside)
                cuts.append((rank, first, last, inside))
                first = last
            out[name] = FlatPlace(g, shape, cuts)
            at += n + (paddings[g][k] if paddings else 0)
    return out


def elements_per_rank(elements: int, world: int) -> int:
    """Return how many elements of a group each of `world` ranks has at stages 1 and 2, which pad the group to a
    multiple of twice the ranks."""
    return -(-elements // (2 * world)) * 2


def split_groups(groups: Groups, stage: int, world: int, most: float) -> tuple[Groups, list[list[int]]]:
    """Split param groups into flat tensors: one for each group, at stage 3 one for each sub-group.

    Args:
        groups: [{name: shape}], the parameters in each param group.
        stage: the ZeRO stage.
        world: the number of ranks.
        most: at stage 3, the number of elements on each rank at which a sub-group ends.

    Returns:
        ([{name: shape}], the parameters in each flat tensor; for each param group, the numbers of its flat tensors).
    """
    split = [split_into_subgroups(g, world, most) if stage == 3 else [g] for g in groups]
    numbers = count()
    return [g for parts in split for g in parts], [[next(numbers) for _ in parts] for parts in split]


def split_into_subgroups(group: dict[str, tuple[int, ...]], world: int, most: float) -> Groups:
    """Split a param group into the sub-groups of stage 3, and return [{name: shape}] of them; [] for an empty group.

    Parameters are not cut: a sub-group ends with the parameter that brings it to at least `most` elements on each rank.

    Args:
        group: {name: shape}, the parameters in order.
        world: the number of ranks.
        most: the number of elements on each rank at which a sub-group ends.
    """
    sizes = {n: -(-prod(s) // world) for n, s in group.items()}
    if not group or most >= sum(sizes.values()):
        return [group] if group else []
    out: Groups = []
    current: dict[str, tuple[int, ...]] = {}
    total = 0
    for name, shape in group.items():
        current[name] = shape
        total += sizes[name]
        if total >= most:
            out.append(current)
            current, total = {}, 0
    return [*out, current] if current else out
