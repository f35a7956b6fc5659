"""How ZeRO cuts parameters into the flat tensors of ranks: arithmetic over shapes, for reading and writing.

zero.py describes it.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

__all__ = ["Flat", "Groups", "concatenated", "part_of", "partitioned", "subgroups"]


class Flat(NamedTuple):
    """Where a parameter lies: in which flat tensor, and (rank, first, last, element of the rank's flat tensor)."""

    group: int
    shape: tuple[int, ...]
    parts: list[tuple[int, int, int, int]]


Groups = list[dict[str, tuple[int, ...]]]


def partitioned(groups: Groups, world: int) -> tuple[dict[str, Flat], list[int]]:
    """Stage 3: every parameter is cut into `world` parts; also the elements of each flat tensor, on every rank.

    partitioned([{"w": (5,), "b": (1,)}], 2) == ({"w": Flat(0, (5,), [(0, 0, 3, 0), (1, 3, 5, 0)]),
                                                  "b": Flat(0, (1,), [(0, 0, 1, 3)])}, [4])
    """
    out: dict[str, Flat] = {}
    lengths: list[int] = []
    for g, group in enumerate(groups):
        at = 0
        for name, shape in group.items():
            n = prod(shape)
            part = -(-n // world)
            cuts = [(r, r * part, min((r + 1) * part, n), at) for r in range(world) if r * part < n]
            out[name] = Flat(g, shape, cuts)
            at += part
        lengths.append(at)
    return out, lengths


def concatenated(groups: Groups, parts: list[int], paddings: list[list[int]] | None = None) -> dict[str, Flat]:
    """Stages 1 and 2: parameters of a group one after the other, cut into ranges of `parts[g]` elements, one a rank.

    concatenated([{"w": (5,), "b": (1,)}], [4]) == {"w": Flat(0, (5,), [(0, 0, 4, 0), (1, 4, 5, 0)]),
                                                    "b": Flat(0, (1,), [(1, 0, 1, 1)])}
    """
    out: dict[str, Flat] = {}
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
            out[name] = Flat(g, shape, cuts)
            at += n + (paddings[g][k] if paddings else 0)
    return out


def part_of(elements: int, world: int) -> int:
    """Elements a rank of a group at stages 1 and 2, which is padded to a multiple of twice the ranks."""
    return -(-elements // (2 * world)) * 2


def subgroups(group: dict[str, tuple[int, ...]], world: int, most: float) -> Groups:
    """The sub-groups of a param group at stage 3: whole parameters, until the elements a rank reach `most`."""
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
