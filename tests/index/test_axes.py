"""Axes and links: views of random tensors, in random chunks, hold the elements that numpy finds there, and the way back is the identity."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.errors import UsageError
from ckpttool.index import boxes
from ckpttool.index.axes import Axes, AxesError, Compressed, UnknownSize, link_part, place_chunks
from ckpttool.index.check import check
from ckpttool.index.checkpoint import Checkpoint, Chunks, TensorEntry

Array = np.ndarray[Any, np.dtype[np.int32]]


def stored(array: Array, cuts: list[list[int]], transposed: bool) -> tuple[TensorEntry, Array]:
    """A tensor as boxes of a file of int32, each row-major or with its dimensions turned round, and that file."""
    chunks, file = Chunks(array.ndim), list[Array]()
    at = 0

    def box(start: tuple[int, ...], shape: tuple[int, ...]) -> None:
        nonlocal at
        part = array[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
        steps = tuple(reversed(boxes.strides(tuple(reversed(shape))))) if transposed else None
        file.append((part.T if transposed else part).reshape(-1))
        plain = steps is None or boxes.is_row_major(shape, steps)
        length = 4 * (prod(shape) if plain or steps is None else boxes.span(shape, steps))
        chunks.add(start, shape, 0, at, length, None if plain else steps)
        at += 4 * prod(shape)

    def along(d: int, start: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if d == array.ndim:
            box(start, shape)
            return
        edges = [0, *sorted({c for c in cuts[d] if 0 < c < array.shape[d]}), array.shape[d]]
        for a, b in pairwise(edges):
            along(d + 1, (*start, a), (*shape, b - a))

    along(0, (), ())
    return TensorEntry("int32", array.shape, ("model", "w"), chunks), np.concatenate(file) if file else np.zeros(
        0, np.int32
    )


def read(entry: TensorEntry, file: Array) -> Array:
    """What an index says a tensor holds; it must be sound."""
    check(Checkpoint("x", "x", None, ["f"], [file.nbytes], {"w": entry}, {}))
    out = np.full(entry.shape, -1, np.int32)
    for c in entry.chunks:
        steps = c.strides or boxes.strides(c.shape)
        raw = file[c.extent.offset // 4 : (c.extent.offset + c.extent.length) // 4]
        view = np.lib.stride_tricks.as_strided(raw, c.shape, tuple(4 * s for s in steps))
        out[tuple(slice(a, a + n) for a, n in zip(c.start, c.shape, strict=True))] = view
    return out


@st.composite
def orders(draw: st.DrawFn, atoms: list[str]) -> str:
    """Axes: the atoms in some order, some of them joined to one dimension."""
    left, out = draw(st.permutations(atoms)), []
    while left:
        n = draw(st.integers(1, min(3, len(left))))
        out.append(left[0] if n == 1 else f"({' '.join(left[:n])})")
        left = left[n:]
    return " ".join(out)


CUTS = st.lists(st.lists(st.integers(1, 40), max_size=3), min_size=6, max_size=6)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_permutation_of_any_axes_is_what_numpy_says_and_its_inverse_is_the_identity(data: st.DataObject) -> None:
    atoms = list("abcd")[: data.draw(st.integers(1, 4))]
    sizes = {a: data.draw(st.integers(1, 4)) for a in atoms}
    left, right = Axes.parse(data.draw(orders(atoms))), Axes.parse(data.draw(orders(atoms)))
    order = [[a for d in axes.dims for f in d for a in f[0]] for axes in (left, right)]
    whole = np.arange(prod(sizes.values()), dtype=np.int32).reshape(right.shape(sizes))
    by_atom = whole.reshape([sizes[a] for a in order[1]]).transpose([order[1].index(a) for a in order[0]])
    part = by_atom.reshape(left.shape(sizes))
    found = link_part(left, right, 0, {}, sizes)
    entry, file = stored(whole, data.draw(CUTS), data.draw(st.booleans()))
    chunks = Chunks(part.ndim)
    place_chunks(found, entry, chunks, to_whole=False)
    there = TensorEntry("int32", part.shape, ("model", "p"), chunks)
    assert np.array_equal(read(there, file), part)
    back = Chunks(whole.ndim)
    place_chunks(found, there, back, to_whole=True)
    assert np.array_equal(read(TensorEntry("int32", whole.shape, ("model", "w"), back), file), whole)
    assert found.is_identity == (left.shape(sizes) == right.shape(sizes) and np.array_equal(part, whole))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_parts_of_a_sum_are_cut_out_and_joined_again(data: st.DataObject) -> None:
    g, n, h, x, e = (data.draw(st.integers(1, 3)) for _ in range(5))
    sizes = {"g": g, "n": n, "h": h, "x": x, "e": e}
    whole_axes = Axes.parse(data.draw(st.sampled_from(("e (g (n+1+1) h) x", "x (g (n+1+1) h) e", "(e g (n+1+1)) h x"))))
    parts = [Axes.parse(data.draw(orders(a))) for a in (["g", "n", "h", "x"], ["g", "h", "x"], ["g", "h", "x"])]
    whole = np.arange(prod(whole_axes.shape(sizes)), dtype=np.int32).reshape(whole_axes.shape(sizes))
    entry, file = stored(whole, data.draw(CUTS), data.draw(st.booleans()))
    back = Chunks(whole.ndim)
    seen = []
    for at in range(e):
        for k, axes in enumerate(parts):
            found = link_part(axes, whole_axes, k, {"e": at}, sizes)
            chunks = Chunks(len(axes.dims))
            place_chunks(found, entry, chunks, to_whole=False)
            there = TensorEntry("int32", axes.shape(sizes), ("model", str(k)), chunks)
            seen += read(there, file).reshape(-1).tolist()
            place_chunks(found, there, back, to_whole=True)
    assert sorted(seen) == whole.reshape(-1).tolist()
    assert np.array_equal(read(TensorEntry("int32", whole.shape, ("model", "w"), back), file), whole)


def test_the_rotation_of_a_head_is_that_of_llama() -> None:
    """Meta's rope turns neighbours, transformers' turns halves: q is permuted as its conversion script does."""
    heads, half, x = 4, 12, 8
    q = np.arange(heads * half * 2 * x, dtype=np.int32).reshape(-1, x)
    hub = q.reshape(heads, half, 2, x).swapaxes(1, 2).reshape(-1, x)
    found = link_part(Axes.parse("(a h p) x"), Axes.parse("(a p h) x"), 0, {}, {"a": heads, "h": half, "p": 2, "x": x})
    entry, file = stored(q, [[13], []], transposed=False)
    chunks = Chunks(2)
    place_chunks(found, entry, chunks, to_whole=True)
    assert np.array_equal(read(TensorEntry("int32", hub.shape, ("model", "q"), chunks), file), hub)
    assert len(chunks) == 2 * heads + 2  # a head is two strided boxes; the cut through one makes two more
    back = Chunks(2)
    place_chunks(found, stored(hub, [[], []], transposed=False)[0], back, to_whole=False)
    assert np.array_equal(read(TensorEntry("int32", q.shape, ("model", "q"), back), hub.reshape(-1)), q)
    assert len(back) == len(q) and not back.strides  # row by row, each as it lies in the file


def test_sizes_follow_from_shapes() -> None:
    sizes = {"h": 10}
    Axes.parse("(g (n+1+1) h) x").solve((80, 40), sizes)
    assert sizes == {"h": 10, "x": 40}  # g and n are not told apart
    sizes["g"] = 2
    Axes.parse("(g (n+1+1) h) x").solve((80, 40), sizes)
    assert sizes["n"] == 2
    sizes = {"v": 131}
    Axes.parse("(v+_) x").solve((160, 4), sizes)
    assert sizes["_"] == 29
    both: dict[str, int] = {}
    Axes.parse("(f+f) x").solve((104, 4), both)
    assert both == {"f": 52, "x": 4}
    with pytest.raises(AxesError, match="an axis is 105 long"):
        Axes.parse("(f+f) x").solve((105, 4), {})
    with pytest.raises(AxesError, match="2 dimensions, and its axes are 3"):
        Axes.parse("a b c").solve((1, 2), {})
    with pytest.raises(AxesError, match="with v=131"):
        Axes.parse("v x").solve((160, 4), {"v": 131})
    with pytest.raises(UnknownSize, match="g"):
        Axes.parse("(g h) x").shape({"h": 1, "x": 1})


@pytest.mark.parametrize("text", ["(a", "a)", "2 x", "(a+b) (c+d)", "a a", "((a b)+c) (a+b)", "(+a)", "a,b"])
def test_what_is_no_axes_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Axes.parse(text)


def test_text_comes_back() -> None:
    for text in ("(g (n+1+1) h) x", "e (f+f) x", "x", "(v+_) x"):
        assert str(Axes.parse(text)) == text


def test_compressed_chunks_are_not_cut() -> None:
    chunks = Chunks(1)
    chunks.add((0,), (4,), 0, 0, 9, zstd=(0, None))
    entry = TensorEntry("int32", (4,), ("model", "w"), chunks)
    with pytest.raises(Compressed):
        place_chunks(link_part(Axes.parse("a"), Axes.parse("(a+a)"), 0, {}, {"a": 2}), entry, Chunks(1), to_whole=False)
