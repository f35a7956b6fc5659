"""Axes of tensors, and how one tensor is a view of another: nothing here knows of names, and no byte is read.

    [(g (n+1+1) h) x]    two dimensions: the first is a product of g, of a sum of three terms, and of h; the second is x

`Axes.parse` reads that. A `Link` says where each axis of a part is in the whole, so that the part is a strided box, or
many, of it, and the whole is made of its parts: `place_chunks` turns chunks of one into chunks of the other, in both
directions. A permutation (`(h p)` here, `(p h)` there) and a transposition are links like any other.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from ..errors import UsageError
from . import boxes
from .checkpoint import ITEMSIZE, Chunk, Chunks, TensorEntry

__all__ = ["PAD", "Axes", "AxesError", "AxisRun", "Compressed", "Link", "UnknownSize", "link_part", "place_chunks"]

#: The term of a sum that is padding: rows that no part holds.
PAD = "_"
_DEEPEST = 50

Term = tuple[str, ...]  # atoms whose product is a size; () is 1
Factor = tuple[Term, ...]  # a sum of terms; an atom is a sum of one term of one atom
Dim = tuple[Factor, ...]


class AxesError(Exception):
    """A shape does not have these axes; the text says why."""


class UnknownSize(Exception):
    """The shapes do not tell the size of an atom: its name."""


class Compressed(Exception):
    """A chunk is compressed, so that no part of it can be taken."""


_TOKEN = re.compile(r"\s*([A-Za-z]\w*|_|1|[()+]|\S)")


@dataclass(frozen=True)
class Axes:
    """The dimensions of a tensor as products of named sizes.

    >>> Axes.parse("(g (n+1+1) h) x").shape({"g": 2, "n": 2, "h": 10, "x": 40})
    (80, 40)
    """

    dims: tuple[Dim, ...]

    @classmethod
    def parse(cls, text: str) -> Axes:
        """Parse a text of axes such as "(g (n+1+1) h) x", without its square brackets.

        Raises:
            UsageError: it is not made of names, 1, _, parentheses and +, has more than one sum, names an axis twice, or
                has _ outside of a sum.
        """
        tokens = _TOKEN.findall(text)

        def bad(what: str) -> UsageError:
            """Make the error for the text, which does not parse; `what` is the reason."""
            return UsageError(
                f"[{text if len(text) < 200 else text[:200] + '...'}]: {what}. Axes are names, products (a b) and sums "
                "(a+b), such as (g (n+1+1) h) x.",
                code="CKPT0213",
            )

        def atom(token: str) -> Term:
            """Turn a token into the product that it stands for: one name, or nothing for "1".

            Raises:
                UsageError: it is not the name of an axis.
            """
            if token != PAD and not token[0].isalpha() and token != "1":
                raise bad(f"{token!r} is not the name of an axis")
            return () if token == "1" else (token,)

        def group(depth: int) -> Dim:
            """Parse what is inside parentheses and remove it from the tokens: a product of factors, or a sum of
            products of names.

            Args:
                depth: how many other parentheses are open around it.

            Raises:
                UsageError: the parenthesis is not closed, is nested too deep, or has a term that is no product of
                    names.
            """
            terms: list[list[Factor]] = [[]]
            if depth > _DEEPEST:
                raise bad(f"parentheses are nested deeper than {_DEEPEST}")
            while True:
                if not tokens:
                    raise bad("a parenthesis is not closed")
                token = tokens.pop(0)
                if token == ")":
                    break
                if token == "+":
                    terms.append([])
                elif token == "(":
                    terms[-1].extend(group(depth + 1))
                else:
                    terms[-1].append((atom(token),))
            if len(terms) == 1:
                return tuple(terms[0])
            if not all(terms) or any(len(f) > 1 for t in terms for f in t):
                raise bad("a term of a sum must be a product of names")
            return (tuple(tuple(a for f in t for a in f[0]) for t in terms),)

        dims: list[Dim] = []
        while tokens:
            token = tokens.pop(0)
            dims.append(group(0) if token == "(" else ((atom(token),),))
        found = cls(tuple(dims))
        if len(found.sums) > 1:
            raise bad("only one sum is possible")
        if any(PAD in t for d in dims for f in d if len(f) == 1 for t in f):
            raise bad("_ is a term of a sum, such as (v+_)")
        for k in range(len(found.sums[0]) if found.sums else 1):
            names = [a for d in found.term(k).dims for f in d for t in f for a in t]
            if twice := next((a for a in names if names.count(a) > 1), None):
                raise bad(f"{twice} stands for two axes")
        return found

    @property
    def sums(self) -> list[Factor]:
        """List the factors that are sums of several terms; there is at most one."""
        return [f for d in self.dims for f in d if len(f) > 1]

    @property
    def atoms(self) -> set[str]:
        """Return the names of all its axes (atoms), without the padding _."""
        return {a for d in self.dims for f in d for t in f for a in t} - {PAD}

    def term(self, k: int) -> Axes:
        """Return these axes with term number `k` (from 0) in place of their sum; axes without a sum are returned
        unchanged."""

        def of(f: Factor) -> Dim:
            """Return a factor as it is, or, if it is a sum, the factors of its term number `k`."""
            return tuple(((a,),) for a in f[k]) if len(f) > 1 else (f,)

        return Axes(tuple(tuple(g for f in d for g in of(f)) for d in self.dims))

    def without(self, atoms: frozenset[str]) -> Axes:
        """Return these axes without the dimensions that are one single axis whose name is in `atoms`."""
        return Axes(tuple(d for d in self.dims if not (len(d) == 1 and len(d[0]) == 1 and set(d[0][0]) & atoms)))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Compute the shape of a tensor with these axes; `sizes` is {name of an axis: its size in elements}.

        Raises:
            UnknownSize: an axis has no size.
        """
        return tuple(prod(_compute_factor_size(f, sizes) for f in d) for d in self.dims)

    def solve(self, shape: Sequence[int], sizes: dict[str, int]) -> None:
        """Derive the sizes of axes that follow from a shape and from the sizes already known, and add them to `sizes`,
        {name of an axis: size}; axes whose size does not follow stay absent.

        Raises:
            AxesError: the shape contradicts the sizes, or has another number of dimensions.
        """
        if len(shape) != len(self.dims):
            raise AxesError(f"it has {len(shape)} dimensions, and its axes are {len(self.dims)}")
        while any([_solve_dim(d, n, sizes) for d, n in zip(self.dims, shape, strict=True)]):
            pass

    def __str__(self) -> str:
        """Return the text that `Axes.parse` reads back to the same axes."""

        def term(t: Term) -> str:
            """Return the text of a product of names; "1" of an empty one."""
            return " ".join(t) or "1"

        def dim(d: Dim) -> str:
            """Return the text of a dimension, in parentheses unless it is one factor."""
            inner = " ".join(term(f[0]) if len(f) == 1 else "(" + "+".join(map(term, f)) + ")" for f in d)
            return inner if len(d) == 1 else f"({inner})"

        return " ".join(map(dim, self.dims))


def _compute_factor_size(f: Factor, sizes: Mapping[str, int]) -> int:
    """Compute the size of a factor, the sum of its terms; `sizes` is {name of an axis: size}.

    Raises:
        UnknownSize: an axis has no size.
    """
    for t in f:
        for a in t:
            if a not in sizes:
                raise UnknownSize(a)
    return sum(prod(sizes[a] for a in t) for t in f)


def _solve_dim(d: Dim, n: int, sizes: dict[str, int]) -> bool:
    """Find the size of the one axis that is unknown in a dimension of `n` elements, add it to `sizes`, {name of an
    axis: size}, and return True; return False where all are known or several are unknown.

    Raises:
        AxesError: no size gives `n` elements, or all are known and give another number.
    """
    unknown = {a for f in d for t in f for a in t if a not in sizes}
    if not unknown:
        if (have := prod(_compute_factor_size(f, sizes) for f in d)) != n:
            raise AxesError(f"an axis is {n} long, and {_describe_dim(d, sizes)} is {have}")
        return False
    if len(unknown) > 1:
        return False
    a = unknown.pop()
    one, two = (prod(_compute_factor_size(f, {**sizes, a: k}) for f in d) for k in (0, 1))
    # linear in `a`: one + a * (two - one) == n
    if two == one or (n - one) % (two - one) or n < one:
        raise AxesError(f"an axis is {n} long, which {_describe_dim(d, sizes)} cannot be")
    sizes[a] = (n - one) // (two - one)
    return True


def _describe_dim(d: Dim, sizes: Mapping[str, int]) -> str:
    """Return a text that shows a dimension and the sizes that are known of its axes, for messages: [(g h)] with g=2."""
    known = {a: sizes[a] for f in d for t in f for a in t if a in sizes}
    return f"[{Axes((d,))}]" + (f" with {', '.join(f'{a}={n}' for a, n in known.items())}" if known else "")


# --------------------------------------------------------------------------------------------------------------- links


class AxisRun(NamedTuple):
    """An axis of `size` indices, and how many elements one index moves along a dimension of either tensor."""

    size: int
    dim: int
    step: int
    other_dim: int
    other_step: int

    def swapped(self) -> AxisRun:
        """Return the same run with the two tensors exchanged: `dim` and `step` become those of the other tensor."""
        return AxisRun(self.size, self.other_dim, self.other_step, self.dim, self.step)


@dataclass(frozen=True)
class Link:
    """Where a part is in the whole: `runs` are from the part to the whole, in which it begins at `start`. Where only
    some elements of the part are meant, the first of them is at `part_start`; () is its first element."""

    runs: tuple[AxisRun, ...]
    part_shape: tuple[int, ...]
    whole_shape: tuple[int, ...]
    start: tuple[int, ...]
    part_start: tuple[int, ...] = ()

    @property
    def is_identity(self) -> bool:
        """Whether part and whole have the same shape, and every element is at the same place in both."""
        return self.part_shape == self.whole_shape and all(
            r.dim == r.other_dim and r.step == r.other_step for r in self.runs if r.size > 1
        )


def _compute_axis_steps(axes: Axes, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return {name of an axis: (dimension that it belongs to, elements along it that one index moves)} for axes without
    sums; `sizes` is {name of an axis: size}."""
    out: dict[str, tuple[int, int]] = {}
    for i, d in enumerate(axes.dims):
        step = 1
        for f in reversed(d):
            for a in reversed(f[0]):
                out[a] = i, step
                step *= sizes[a]
    return out


def link_part(part: Axes, whole: Axes, term: int, at: Mapping[str, int], sizes: Mapping[str, int]) -> Link:
    """Compute where a part lies in the whole tensor that is made of such parts, and return it as a `Link`.

    Args:
        part, whole: the axes of the two tensors.
        term: which term of the sum in `whole` the part is, from 0; ignored where there is no sum.
        at: {axis that only the whole tensor has: index along it at which the part lies}; a missing axis counts as 0.
        sizes: {name of an axis: size}.

    Raises:
        UnknownSize: an axis has no size.
    """
    start = [0] * len(whole.dims)
    places: dict[str, tuple[int, int]] = {}
    for i, d in enumerate(whole.dims):
        step = 1
        for f in reversed(d):
            if len(f) > 1:
                start[i] += step * _compute_factor_size(f[:term], sizes)
                chosen = f[term]
                inner = step
                for a in reversed(chosen):
                    places[a] = i, inner
                    inner *= _compute_factor_size(((a,),), sizes)
            elif f[0]:
                places[f[0][0]] = i, step
                start[i] += step * at.get(f[0][0], 0)
            step *= _compute_factor_size(f, sizes)
    mine = _compute_axis_steps(part, sizes)
    runs = tuple(AxisRun(sizes[a], *mine[a], *places[a]) for a in mine)
    return Link(runs, part.shape(sizes), whole.shape(sizes), tuple(start))


def _merge_runs(runs: list[AxisRun]) -> list[AxisRun]:
    """Join runs along one dimension where one continues another in both tensors. Return the runs longer than 1, the
    largest step first."""
    out: list[AxisRun] = []
    for r in sorted((r for r in runs if r.size > 1), key=lambda r: -r.step):
        if out:
            o = out[-1]
            if o.other_dim == r.other_dim and o.step == r.step * r.size and o.other_step == r.other_step * r.size:
                out[-1] = r._replace(size=o.size * r.size)
                continue
        out.append(r)
    return out


#: So few rows that are apart in the source are boxes of their own: each is read as it lies there, and not with what is
#: between.
_SHORT = 8


class _Piece(NamedTuple):
    """A box of the destination that is a strided box of the source; `along[d]` is the dimension of the source, and the
    step in it, of dimension d of the box, None where that has length 1."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    source: tuple[int, ...]
    along: tuple[tuple[int, int] | None, ...]


def _iterate_strided_boxes(
    runs: Sequence[AxisRun], ndim: int, start: Sequence[int], source: Sequence[int]
) -> Iterator[_Piece]:
    """Yield the boxes of a destination tensor that are each a strided box of its source.

    Args:
        runs: how the elements of both correspond: `dim` and `step` of a run are those of the destination, `other_dim`
            and `other_step` those of the source.
        ndim: number of dimensions of the destination.
        start, source: indices, in the destination and in the source, of the element at which the first run begins.
    """
    kept: dict[int, AxisRun] = {}  # by dimension of the destination
    rest: list[AxisRun] = []
    for d in range(ndim):
        found = _merge_runs([r for r in runs if r.dim == d])
        if found and found[-1].step == 1 and (found[-1].other_step == 1 or found[-1].size > _SHORT):
            kept[d] = found.pop()
        rest += found
    widest: dict[int, int] = {}  # {dimension of the source: that of the destination which runs along it}
    for d, r in kept.items():
        if r.other_dim not in widest or r.size > kept[widest[r.other_dim]].size:
            widest[r.other_dim] = d
    rest += [r for d, r in kept.items() if widest[r.other_dim] != d]
    kept = {d: r for d, r in kept.items() if widest[r.other_dim] == d}
    shape = tuple(kept[d].size if d in kept else 1 for d in range(ndim))
    along = tuple((kept[d].other_dim, kept[d].other_step) if d in kept else None for d in range(ndim))
    for index in product(*(range(r.size) for r in rest)):
        to, of = list(start), list(source)
        for i, r in zip(index, rest, strict=True):
            to[r.dim] += i * r.step
            of[r.other_dim] += i * r.other_step
        yield _Piece(tuple(to), shape, tuple(of), along)


class _Rows:
    """Chunks of a tensor with the strides inside them, found by their interval of dimension 0."""

    def __init__(self, chunks: Chunks) -> None:
        """Sort the chunks of one tensor that are not empty by their first row (index of dimension 0)."""
        found = sorted((c for c in chunks if prod(c.shape)), key=lambda c: c.start[0])
        self.rows = [(c, c.strides or boxes.strides(c.shape)) for c in found]
        self.starts = [c.start[0] for c in found]
        self.ends = [c.start[0] + c.shape[0] for c in found]
        self.tile = all(a <= b for a, b in pairwise(self.ends))

    def between(self, first: int, last: int) -> list[tuple[Chunk, tuple[int, ...]]]:
        """Return (chunk, its strides in elements) for all chunks that may have rows (indices of dimension 0) from
        `first` to `last`, both included. Some of the chunks may have none."""
        stop = bisect_left(self.starts, last + 1)
        return self.rows[bisect_left(self.ends, first + 1) : stop] if self.tile else self.rows[:stop]


def place_chunks(found: Link, entry: TensorEntry, out: Chunks, to_whole: bool) -> None:
    """Describe the bytes of one tensor as chunks of another: of the larger tensor that it is a part of, or of a part
    that is cut out of it. The chunks are added to `out`; no byte is copied.

    Args:
        found: where the part lies in the larger tensor.
        entry: the tensor that has the bytes: the part if `to_whole`, else the larger tensor.
        out: the chunks of the other tensor, to which chunks are added.
        to_whole: True makes chunks of the larger tensor from a part, False chunks of a part from the larger tensor.

    Raises:
        Compressed: `entry` has a compressed chunk.
    """
    if entry.chunks.zstd:
        raise Compressed
    item = ITEMSIZE[entry.dtype]
    part_start = found.part_start or (0,) * len(found.part_shape)
    if not entry.shape or not out.ndim:
        for c in entry.chunks:  # one element
            out.add((0,) * out.ndim if not to_whole else found.start, (1,) * out.ndim, *c.extent)
        return
    rows = _Rows(entry.chunks)
    if any(r.size == 0 for r in found.runs):
        return
    if to_whole:
        runs, start, source = [r.swapped() for r in found.runs], found.start, part_start
    else:
        runs, start, source = list(found.runs), part_start, found.start
    for piece in _iterate_strided_boxes(runs, out.ndim, start, source):
        last = piece.source[0]
        for n, way in zip(piece.shape, piece.along, strict=True):
            if way is not None and way[0] == 0:
                last += (n - 1) * way[1]
        for c, inner in rows.between(piece.source[0], last):
            _add_overlap(out, piece, c, inner, item)


def _add_overlap(out: Chunks, piece: _Piece, c: Chunk, inner: tuple[int, ...], item: int) -> None:
    """Add to `out` the overlap of one box with one chunk of the source, if they overlap.

    Args:
        out: chunks of the destination.
        piece: a box of the destination that is a strided box of the source.
        c: a chunk of the source.
        inner: the strides inside that chunk, in elements.
        item: bytes of an element.
    """
    first, shape, steps = list(piece.start), list(piece.shape), [0] * len(piece.shape)
    at = list(piece.source)
    for d, way in enumerate(piece.along):
        if way is None:
            continue
        s, step = way
        low = max(0, -(-(c.start[s] - at[s]) // step))
        high = min(shape[d], -(-(c.start[s] + c.shape[s] - at[s]) // step))
        if high <= low:
            return
        first[d] += low
        shape[d] = high - low
        at[s] += low * step
        steps[d] = step * inner[s]
    offset = c.extent.offset
    for a, n, i, width in zip(c.start, c.shape, at, inner, strict=True):
        if not a <= i < a + n:
            return
        offset += item * (i - a) * width
    plain = boxes.is_row_major(shape, steps)
    length = item * (prod(shape) if plain else boxes.span(shape, steps))
    out.add(first, shape, c.extent.file, offset, length, None if plain else tuple(steps))
