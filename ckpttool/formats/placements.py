"""Which boxes of a whole tensor one rank's local tensor holds, after the placements of a DTensor.

Placements cut from left to right, dimension by dimension of the mesh. Shard(d) cuts what is left along d as torch.chunk
does. _StridedShard(d, split_factor) cuts it into split_factor parts, each of them as Shard does, and gives a rank its
piece of every part; so tensor parallelism, on the right, has in effect cut first, and a local tensor may hold several
runs of rows.

Source: _StridedShard._split_tensor in torch/distributed/tensor/placement_types.py,
_compute_local_shape_and_global_offset in torch/distributed/tensor/_utils.py of 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

__all__ = ["PlacementCut", "ShardPiece", "compute_local_pieces"]

_MOST_RUNS = 1 << 20
_Runs = list[
    tuple[int, int]
]  # (first index of the whole, number) of what a rank has along a dimension, in its own order


class PlacementCut(NamedTuple):
    """A placement along tensor dimension `dim`: this rank is number `at` of `parts`; `split` is 1 for a plain Shard."""

    dim: int
    parts: int
    at: int
    split: int = 1


class ShardPiece(NamedTuple):
    """A box of the whole tensor at `start`, which begins at `local` in the rank's tensor."""

    start: tuple[int, ...]
    local: tuple[int, ...]
    shape: tuple[int, ...]


def compute_local_pieces(
    shape: Sequence[int], cuts: Iterable[PlacementCut]
) -> tuple[list[ShardPiece], tuple[int, ...]]:
    """Compute which boxes of a complete tensor the local tensor of a rank holds: (boxes, shape of the local tensor).

    For a rank without elements, every box is empty.

    Args:
        shape: of the complete tensor.
        cuts: its sharding placements on this rank, in the order in which they apply.

    Raises:
        ValueError: a cut is impossible, such as a split factor below 1, or there are more boxes than any job has.
        IndexError: a cut is along a dimension that the tensor does not have.
    """
    along: list[_Runs] = [[(0, n)] for n in shape]
    for cut in cuts:
        if cut.split < 1 or cut.dim < 0 or not 0 <= cut.at < cut.parts:
            raise ValueError(f"split factor {cut.split} along dimension {cut.dim}, part {cut.at} of {cut.parts}")
        along[cut.dim] = _apply_cut(along[cut.dim], cut)
    rows: list[list[tuple[int, int, int]]] = []  # (start, local, number) by dimension
    for runs in along:
        at, row = 0, []
        for start, n in runs:
            row.append((start, at, n))
            at += n
        rows.append(row)
    if prod(map(len, rows)) > _MOST_RUNS:
        raise ValueError(f"more than {_MOST_RUNS} boxes of one tensor on one rank")
    pieces = [
        ShardPiece(tuple(x[0] for x in box), tuple(x[1] for x in box), tuple(x[2] for x in box))
        for box in product(*rows)
    ]
    return pieces, tuple(sum(n for _, n in runs) for runs in along)


def _apply_cut(runs: _Runs, cut: PlacementCut) -> _Runs:
    """Apply a placement to the runs that a rank holds along a dimension, and return the remaining runs, (first index,
    number) each. Sizes come from files, so the work is bounded by the number of runs.

    Raises:
        ValueError: there would be more runs than any job has.
    """
    total = sum(n for _, n in runs)
    outer = -(-total // cut.split)
    if outer and total // outer * len(runs) > _MOST_RUNS:
        raise ValueError(f"a split factor of {cut.split} makes more than {_MOST_RUNS} runs")
    out: _Runs = []
    for first in range(0, total, outer) if outer else ():
        n = min(outer, total - first)
        inner = -(-n // cut.parts)
        a = first + min(n, cut.at * inner)
        for start, count in _slice_runs(runs, a, min(a + inner, first + n)):
            if out and sum(out[-1]) == start:
                out[-1] = (out[-1][0], out[-1][1] + count)
            else:
                out.append((start, count))
    return out


def _slice_runs(runs: _Runs, a: int, b: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of runs, (first index, number) each, that lie in elements [a, b) of the concatenated runs."""
    at = 0
    for start, n in runs:
        x, y = max(a, at), min(b, at + n)
        if x < y:
            yield start + x - at, y - x
        at += n
