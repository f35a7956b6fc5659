"""Pure geometry of boxes in row-major tensors; nothing here knows of files or bytes.

A *box* is (start, shape): one interval per dimension. Two facts carry the engine:

* A flat range of a row-major tensor is at most 2n-1 boxes (`flat_to_boxes`), each contiguous in the range.
* A *slab* (leading indices fixed, one interval, all of the rest) meets any box in a part that is contiguous in the
  memory of that box. So a tensor can be streamed in row-major order, slab by slab, while every chunk of it, whatever
  its shape, is read or written from its first byte to its last (`cut_into_slabs`, `intersect`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from math import prod

Shape = tuple[int, ...]

__all__ = [
    "box_is_flat",
    "chunk_sizes",
    "cut_into_slabs",
    "find_cover_problem",
    "flat_start",
    "flat_to_boxes",
    "intersect",
    "is_row_major",
    "span",
    "strides",
]


def strides(shape: Sequence[int]) -> Shape:
    """Return row-major strides, in elements: strides((2, 3, 4)) == (12, 4, 1)."""
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        step *= n
    return tuple(reversed(out))


def is_row_major(shape: Sequence[int], steps: Sequence[int]) -> bool:
    """Whether elements that are `steps` elements apart along each dimension lie row-major without gaps; the step along
    a dimension of length 1 does not count."""
    return prod(shape) == 0 or all(n == 1 or a == b for n, a, b in zip(shape, steps, strides(shape), strict=True))


def span(shape: Sequence[int], steps: Sequence[int]) -> int:
    """Count the elements of memory from the first element of a strided box to its last, both included; 0 for an
    empty box. `steps` are the strides of the box in elements."""
    return sum((n - 1) * s for n, s in zip(shape, steps, strict=True)) + 1 if prod(shape) else 0


def chunk_sizes(n: int, parts: int) -> list[int]:
    """Return the lengths of the `parts` pieces into which torch.chunk splits `n` rows, 0 for pieces that it does not
    make: chunk_sizes(5, 4) == [2, 2, 1, 0].

    FSDP2 shards every parameter so on dim 0 (torch/distributed/tensor/placement_types.py, Shard._split_tensor).
    """
    step = -(-n // parts)
    return [max(0, min(step, n - i * step)) for i in range(parts)]


def flat_start(shape: Sequence[int], start: Sequence[int]) -> int:
    """Return the index of the element at `start` when the tensor is flattened."""
    at = 0
    for n, s in zip(shape, start, strict=True):
        at = at * n + s
    return at


def box_is_flat(shape: Sequence[int], start: Sequence[int], size: Sequence[int]) -> bool:
    """Whether the box of shape `size` at `start`, in a tensor of `shape`, is one contiguous range of the flattened
    tensor."""
    inner = False  # a dimension has been met that is cut into more than one index: all after it must be whole
    for n, s, k in zip(shape, start, size, strict=True):
        if inner and (s != 0 or k != n):
            return prod(size) == 0
        inner = inner or k != 1
    return True


def flat_to_boxes(shape: Sequence[int], first: int, last: int) -> list[tuple[Shape, Shape]]:
    """Split elements [first, last) of the flattened tensor into boxes (start, shape), in row-major order; at most 2n-1
    for a tensor of n dimensions.

    flat_to_boxes((4, 3), 2, 10) == [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if first >= last:
        return []
    if not shape:
        return [((), ())]
    row = prod(shape[1:])
    if row == 0:
        return []
    head, tail = -(-first // row), last // row
    out: list[tuple[Shape, Shape]] = []

    def part(i: int, a: int, b: int) -> None:
        """Add the boxes of elements [a, b) of row i."""
        out.extend(((i, *s), (1, *k)) for s, k in flat_to_boxes(shape[1:], a, b))

    if head > tail:  # within one row
        part(tail, first - tail * row, last - tail * row)
        return out
    if first < head * row:
        part(head - 1, first - (head - 1) * row, row)
    if head < tail:
        out.append(((head, *([0] * (len(shape) - 1))), (tail - head, *shape[1:])))
    if tail * row < last:
        part(tail, 0, last - tail * row)
    return out


def cut_into_slabs(shape: Sequence[int], most: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut a tensor into slabs of at most `most` elements, but at least one, and yield (start, shape) of each, in
    row-major order.

    A slab has fixed leading indices, an interval along the next dimension, and all indices of the remaining dimensions.
    """
    if prod(shape) == 0:
        return
    depth, row = 0, prod(shape)
    while depth < len(shape) and row > most:
        row //= shape[depth]
        depth += 1
    if depth == 0:
        yield (0,) * len(shape), tuple(shape)
        return
    depth -= 1  # the dimension that is cut into intervals
    row = prod(shape[depth + 1 :])
    step = max(1, most // row)
    rest = (0,) * (len(shape) - depth - 1)
    for outer in _iterate_indices(shape[:depth]):
        for i in range(0, shape[depth], step):
            n = min(step, shape[depth] - i)
            yield (*outer, i, *rest), (*(1 for _ in outer), n, *shape[depth + 1 :])


def _iterate_indices(shape: Sequence[int]) -> Iterator[Shape]:
    """Yield all indices of a shape in row-major order."""
    if not shape:
        yield ()
        return
    for i in range(shape[0]):
        for rest in _iterate_indices(shape[1:]):
            yield (i, *rest)


def intersect(
    a: tuple[Sequence[int], Sequence[int]], b: tuple[Sequence[int], Sequence[int]]
) -> tuple[Shape, Shape] | None:
    """Return the box that two boxes have in common, each (start, shape); None when they share no element."""
    start, size = [], []
    for s1, k1, s2, k2 in zip(a[0], a[1], b[0], b[1], strict=True):
        s = s1 if s1 > s2 else s2
        k = min(s1 + k1, s2 + k2) - s
        if k <= 0:
            return None
        start.append(s)
        size.append(k)
    return tuple(start), tuple(size)


def find_cover_problem(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """Return a sentence on why the boxes, each (start, shape), do not cover a tensor of `shape` exactly once; None when
    they do. Empty boxes are legal.

    Time is linear in the number of boxes, whatever they look like: see `_covers_exactly_once`.
    """
    volume, real = 0, []
    for start, size in boxes:
        if len(start) != len(shape) or len(size) != len(shape):
            return f"a chunk has {len(start)} dimensions, the tensor has {len(shape)}"
        for n, s, k in zip(shape, start, size, strict=True):
            if s < 0 or k < 0 or s + k > n:
                return f"chunk [{_describe_box(start, size)}] reaches outside shape {tuple(shape)}"
        v = prod(size)
        if v:
            volume += v
            real.append((tuple(start), tuple(size)))
    total = prod(shape)
    if volume == total and _covers_exactly_once(shape, real):
        return None
    clash = _find_overlap(real)
    if clash:
        (s1, k1), (s2, k2) = clash
        return f"chunks [{_describe_box(s1, k1)}] and [{_describe_box(s2, k2)}] overlap"
    if volume != total:
        return f"chunks hold {volume} of {total} elements"
    return f"some of the {len(real)} chunks overlap, and others leave holes"


def _describe_box(start: Sequence[int], size: Sequence[int]) -> str:
    """Return the text of a box as slices, such as "0:4, 8:16"; `size` is its shape."""
    return ", ".join(f"{s}:{s + k}" for s, k in zip(start, size, strict=True))


Box = tuple[Shape, Shape]


_PRIME = (1 << 127) - 1


def _covers_exactly_once(shape: Sequence[int], boxes: list[Box]) -> bool:
    """Whether boxes inside a tensor of `shape` cover every element of it exactly once.

    Give every index i of every dimension d a weight w_d(i), and an element the product of the weights of its indices.
    The weights of a box add up to the product over d of W_d(end) - W_d(start), where W_d are the partial sums of w_d.
    If the boxes cover everything once, their sums add up to that of the whole tensor, whatever the weights are. If they
    do not, the difference is a polynomial in the W_d that is not zero, and of degree len(shape). So with W_d drawn at
    random modulo a prime, a wrong answer has a probability of len(shape) / 2^127, also against somebody who chose the
    boxes (Schwartz, Zippel): they are not known before the boxes are.
    """
    at: list[dict[int, int]] = [{} for _ in shape]

    def weight(start: Sequence[int], size: Sequence[int]) -> int:
        """Compute the weight of a box from random weights of its corners."""
        out = 1
        for known, s, k in zip(at, start, size, strict=True):
            for i in (s, s + k):
                if i not in known:
                    known[i] = int.from_bytes(os.urandom(16), "little")
            out = out * (known[s + k] - known[s]) % _PRIME
        return out

    return sum(weight(s, k) for s, k in boxes) % _PRIME == weight((0,) * len(shape), shape)


_MOST_WORK = 500_000


def _find_overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Find two boxes that share an element, for the message; None where there are none, or where they are not found in
    reasonable time. `boxes` are (start, shape), and are sorted in place.

    Cut the set along one dimension into groups whose intervals do not meet and look into each; when no dimension
    separates the set any more, compare all pairs.
    """
    todo, work = [boxes], -20 * len(boxes)
    while todo:
        group = todo.pop()
        if len(group) < 2:
            continue
        for d in range(len(group[0][0])):
            work += len(group)
            if work > _MOST_WORK:
                return None
            group.sort(key=lambda b: (b[0][d], b[1][d]))
            parts: list[list[Box]] = []
            end = -1
            for b in group:
                if b[0][d] >= end:
                    parts.append([])
                parts[-1].append(b)
                end = max(end, b[0][d] + b[1][d])
            if len(parts) > 1:
                todo.extend(parts)
                break
        else:
            for i, a in enumerate(group):
                work += len(group) - i
                if work > _MOST_WORK:
                    return None
                for b in group[i + 1 :]:
                    if intersect(a, b):
                        return a, b
    return None
