"""Elements of a tensor in the wrong places: transposed, shifted, rows or columns exchanged, doubled, interleaved,
permuted.

Rows are compared by a hash of each. Columns are the rows of the transposed tensor: tensor-parallel shards of a
row-parallel weight (o_proj, down_proj) are columns.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ...printable import count_noun
from .tensor_bits import LIMIT, ArrayPair, Found, are_same_bits, as_integers, find_unequal_elements
from .tensor_kinds import TensorKind

if TYPE_CHECKING:
    from .tensor_bits import Array

__all__ = ["RULES"]


class _OrderKinds(NamedTuple):
    """The kinds of rows, or of columns, in wrong places."""

    exchanged: TensorKind
    copied: TensorKind
    interleaved: TensorKind
    permuted: TensorKind


_ROWS = _OrderKinds(
    TensorKind.EXCHANGED_ROWS, TensorKind.COPIED_ROWS, TensorKind.INTERLEAVED_ROWS, TensorKind.PERMUTED_ROWS
)
_COLUMNS = _OrderKinds(
    TensorKind.EXCHANGED_COLUMNS,
    TensorKind.COPIED_COLUMNS,
    TensorKind.INTERLEAVED_COLUMNS,
    TensorKind.PERMUTED_COLUMNS,
)

_SHIFTS = 256
_BLOCK = 1 << 20

#: The most elements of a tensor with one element a row: each is hashed.
_MOST = 1 << 22


def _find_transposed(pair: ArrayPair) -> Found | None:
    """Find whether a tensor is the reference with two dimensions exchanged, though it has the reference's shape, and
    describe that as a fault; None if not. The last two dimensions are tried first.

    Args:
        pair: the reference and the tensor.
    """
    a, b = pair.a, pair.b
    if pair.sampled or a.ndim < 2 or a.dtype != b.dtype:
        return None
    for j in range(a.ndim - 1, 0, -1):
        for i in (i for i in range(j - 1, -1, -1) if min(a.shape[i], a.shape[j]) > 1):
            if are_same_bits(a.swapaxes(i, j).reshape(-1), b.reshape(-1)):
                which = "" if a.ndim == 2 else " in its last two dimensions"
                if j < a.ndim - 1:
                    which = f" in its dimensions {i} and {j}"
                if (i, j) == (0, 1) and a.ndim > 2:
                    which = " in its first two dimensions, such as the channels in and out of a convolution"
                return Found(TensorKind.TRANSPOSED, f"holds the reference transposed{which}")
    return None


def _find_shifted(pair: ArrayPair) -> Found | None:
    """Find whether the elements of a tensor are the reference's, moved by k places, and describe that as a fault; None
    if not.

    Then tensor[i] == reference[i - k] for all flat indices i from the first to the last differing element, except for
    the first k of them; for a negative k, except for the last -k.

    Args:
        pair: the reference and the tensor.
    """
    a, b, first, last, count = pair.a, pair.b, pair.first, pair.last, pair.count
    if a.dtype != b.dtype:
        return None
    x, y = a.reshape(-1), b.reshape(-1)
    n = min(last + 1 - first, LIMIT)
    if count < 16 or count * 2 < last + 1 - first:
        return None
    most = min(_SHIFTS, n // 4)
    # the first element alone rules out nearly all shifts
    after = slice(first + 1, first + 1 + most)
    ruled_out = {
        1: find_unequal_elements(y[after], x[first : first + 1]),
        -1: find_unequal_elements(x[after], y[first : first + 1]),
    }
    for k in range(1, most + 1):
        for sign in (1, -1):
            if ruled_out[sign][k - 1]:
                continue
            s = first + k if sign > 0 else first
            probe = min(32, n - k)
            for size in (probe, n - k):
                u = x[s - k : s - k + size] if sign > 0 else x[s + k : s + k + size]
                if len(u) != size or not are_same_bits(u, y[s : s + size]):
                    break
            else:
                # a constant stretch is equal to itself at any distance
                if find_unequal_elements(y[s + 1 : s + size], y[s : s + size - 1]).any():
                    toward = "end" if sign > 0 else "beginning"
                    row = a.size // a.shape[0]
                    by, unit = (k // row, "row") if row > 1 and k % row == 0 else (k, "element")
                    what = f"holds the reference shifted by {count_noun(by, unit)} toward the {toward}"
                    if (first % row or (last + 1) % row) and last + 1 - first < a.size - 2 * k:
                        what += f", in elements {first}:{last + 1} of {a.size}"
                    return Found(TensorKind.SHIFTED, what, {"shift": sign * k})
    return None


# ----------------------------------------------------------------------------------------------------------------- rows


def _hash_slices(x: Array, axis: int) -> list[bytes | int]:
    """Return a hash of each slice along an axis, in order: of rows for axis 0, of columns for axis 1 of a matrix.
    Slices with equal hashes count as equal."""
    import numpy as np
    from blake3 import blake3

    if x.ndim == 1:
        return [int(v) for v in as_integers(x)]
    if axis == 0:
        raw = x.reshape(x.shape[0], -1)
        return [blake3(raw[i].tobytes()).digest(16) for i in range(len(raw))]
    # sums of the bits times random numbers, since columns do not lie together
    parts = as_integers(x).reshape(-1, x.shape[axis], math.prod(x.shape[axis + 1 :]))
    rng = np.random.default_rng(0)
    out = np.zeros(x.shape[axis], np.uint64)
    step = max(1, _BLOCK // max(1, parts[0].size))
    for k in range(0, len(parts), step):
        part = parts[k : k + step].astype(np.uint64)
        factors = rng.integers(0, 1 << 64, (len(part), 1, part.shape[2]), np.uint64, endpoint=False) | np.uint64(1)
        out += (part * factors).sum(axis=(0, 2), dtype=np.uint64)
    return [int(v) for v in out]


def _find_moved_rows(pair: ArrayPair) -> Found | None:
    """Find whether rows of the reference are in another order, or some of them twice; None if not."""
    return _find_moved_slices(pair, 0) if pair.a.ndim else None


def _find_moved_columns(pair: ArrayPair) -> Found | None:
    """Find whether columns, or the indices of another dimension, are in another order, or some of them twice; None if
    not."""
    for axis in range(1, pair.a.ndim):
        if found := _find_moved_slices(pair, axis):
            return found
    return None


def _find_moved_slices(pair: ArrayPair, axis: int) -> Found | None:
    """Find whether the slices along an axis are the reference's in another order, or some of them twice; None if
    not."""
    import numpy as np

    a, b = pair.a, pair.b
    n = a.shape[axis]
    if a.dtype != b.dtype or n < 2 or (a.size == n and n > _MOST):
        return None
    if axis:
        # one line of elements decides for nearly all tensors that this is not it
        line = [int(k) for k in np.unravel_index(pair.first, a.shape)]
        through: tuple[int | slice, ...] = (*line[:axis], slice(None), *line[axis + 1 :])
        x, y = as_integers(a[through]), as_integers(b[through])
        if x.dtype.kind == "V" or not np.isin(y, x).all():
            return None
    theirs, ours = _hash_slices(a, axis), _hash_slices(b, axis)
    wrong = [i for i, (m, n) in enumerate(zip(theirs, ours, strict=True)) if m != n]
    source: dict[bytes | int, int] = {}
    for i, m in enumerate(theirs):
        source.setdefault(m, i)
    if len(source) < 2 or any(ours[i] not in source for i in wrong):
        return None
    if a.ndim == 1 and (len(source) * 2 < len(theirs) or len(wrong) < 8):
        return None  # too few different elements to call it an order
    order = list(range(len(ours)))
    for i in wrong:
        order[i] = source[ours[i]]
    what = "elements" if a.ndim == 1 else "rows" if axis == 0 else "columns"
    if axis and axis < a.ndim - 1:
        what = f"indices of dimension {axis}"
    again = sorted(theirs, key=str) == sorted(ours, key=str)
    kinds = _COLUMNS if axis else _ROWS
    return _describe_order(order, wrong, what, kinds, again, again and len(source) == len(theirs), pair.has_heads)


def _describe_order(
    order: list[int], wrong: list[int], what: str, kinds: _OrderKinds, again: bool, unique: bool, heads: bool
) -> Found | None:
    """Describe rows that are in another order; None if the order has no description.

    Args:
        order: row k is the reference's row order[k].
        wrong: the rows that are not in their place.
        what: "rows", "columns" or "elements".
        kinds: the kinds of differences for these.
        again: whether every row of the reference is still present.
        unique: whether, besides, no two rows of the reference are equal.
        heads: whether the tensor may have attention heads, whose rows rope may reorder.
    """
    if unique and heads and (rope := _match_rope(order)):
        size, low, high, toward = rope
        where = "" if (low, high) == (0, len(order)) else f" in {what} {low}:{high} of {len(order)}"
        return Found(
            TensorKind.ROPE,
            f"has its {what} reordered within heads of {size}{where}: {toward}, as between the two ways to compute "
            "rope",
            {"head": size, "toward": toward},
        )
    runs = _find_consecutive_runs(wrong, order)
    if again and len(runs) == 2 and runs[0][:2] == runs[1][2:] and runs[0][2:] == runs[1][:2]:
        (p, q, r, s), _ = runs
        return Found(kinds.exchanged, f"has {what} {p}:{q} and {r}:{s} exchanged", {"ranges": [(p, q), (r, s)]})
    if not again and len(runs) <= 4:
        text = " and ".join(f"{what} {p}:{q} that are the reference's {what} {r}:{s}" for p, q, r, s in runs)
        return Found(kinds.copied, f"has {text}", {"to": runs[0][:2], "from": runs[0][2:]})
    if not unique:
        return None
    if parts := _match_interleaved(order):
        lengths, pieces, apart = parts
        sizes = " and ".join(map(str, lengths))
        text = (
            f"holds parts of {sizes} {what} in {pieces} pieces each, piece by piece, where the reference has them part "
            "by part"
            if apart
            else f"holds parts of {sizes} {what} part by part, where the reference has them in {pieces} pieces each, "
            "piece by piece"
        )
        if sum(lengths) == len(lengths) * pieces:
            parts_ = f"of {len(lengths)} parts in turn, one {what[:-1]} of each"
            text = (
                f"holds the {what} {parts_}, where the reference has them part by part"
                if apart
                else f"holds part by part the {what} that the reference has {parts_}"
            )
        text += f": the {what} of a fused weight merged or split without regard to its parts"
        return Found(kinds.interleaved, text, {"parts": lengths, "pieces": pieces})
    text = f"has the reference's {what} in another order, {len(wrong)} of {len(order)} elsewhere"
    if size := _find_moved_block_size(order):
        text += f", in blocks of {size}"
    return Found(kinds.permuted, text, {"order": order[:64]})


def _find_moved_block_size(order: list[int]) -> int:
    """Return the largest size of blocks of rows, such as heads, that are only moved as units; 0 if single rows are
    moved.

    Args:
        order: row k is the reference's row order[k].
    """
    n = len(order)
    for size in (k for k in range(n // 2, 1, -1) if n % k == 0):
        if all(
            order[h] % size == 0 and order[h : h + size] == list(range(order[h], order[h] + size))
            for h in range(0, n, size)
        ):
            return size
    return 0


def _find_consecutive_runs(wrong: list[int], order: list[int]) -> list[tuple[int, int, int, int]]:
    """Return the ranges of misplaced rows that are consecutive in the reference, too: [(first, end, first in the
    reference, end in the reference)].

    Args:
        wrong: the rows that are not in their place.
        order: row k is the reference's row order[k].
    """
    out: list[list[int]] = []
    for i in wrong:
        if out and out[-1][1] == i and out[-1][3] == order[i]:
            out[-1][1] += 1
            out[-1][3] += 1
        else:
            out.append([i, i + 1, order[i], order[i] + 1])
    return [(a, b, c, d) for a, b, c, d in out]


def _match_rope(order: list[int]) -> tuple[int, int, int, str] | None:
    """Find whether rows are reordered within heads from halves to interleaved pairs or back, and return (rows per head,
    first row, end, direction in words); None if not.

    Some heads may be unchanged, such as those of v in a fused weight of q, k and v.

    Args:
        order: row k is the reference's row order[k].
    """
    n = len(order)
    for size in range(4, n + 1, 2):
        if n % size:
            continue
        half = size // 2
        pairs = [k // 2 + half * (k % 2) for k in range(size)]  # got row k is the reference's row pairs[k]
        halves = [2 * k if k < half else 2 * (k - half) + 1 for k in range(size)]
        heads = [[i - h for i in order[h : h + size]] for h in range(0, n, size)]
        moved = [h for h, found in enumerate(heads) if found != list(range(size))]
        if size == 4 and len(moved) < min(2, len(heads)):
            continue  # two neighbours exchanged
        for wanted, text in ((pairs, "from halves to interleaved pairs"), (halves, "from interleaved pairs to halves")):
            if all(heads[h] == wanted for h in moved):
                return size, moved[0] * size, (moved[-1] + 1) * size, text
    return None


def _match_interleaved(order: list[int]) -> tuple[list[int], int, bool] | None:
    """Find whether 2 to 4 parts of a fused weight are cut into interleaved pieces on one side, and return (rows of each
    part, number of pieces, whether this tensor has the pieces and not the reference); None if not.

    Two tensor-parallel shards of [q, k, v], concatenated, are q0 k0 v0 q1 k1 v1; part by part they are q0 q1 k0 k1 v0
    v1.

    Args:
        order: row k is the reference's row order[k].
    """
    back = [0] * len(order)
    for k, i in enumerate(order):
        back[i] = k
    for found, apart in ((order, True), (back, False)):
        for pieces in range(2, len(order) // 2 + 1):
            if len(order) % pieces:
                continue
            head = found[: len(order) // pieces]
            cuts = [0, *(k for k in range(1, len(head)) if head[k] != head[k - 1] + 1), len(head)]
            lengths = [q - p for p, q in pairwise(cuts)]
            if not 2 <= len(lengths) <= 4:
                continue
            starts = [pieces * p for p in cuts[:-1]]
            wanted = [
                start + t * length + k
                for t in range(pieces)
                for start, length in zip(starts, lengths, strict=True)
                for k in range(length)
            ]
            if found == wanted:
                return [pieces * n for n in lengths], pieces, apart
    return None


RULES = (_find_transposed, _find_shifted, _find_moved_rows, _find_moved_columns)
