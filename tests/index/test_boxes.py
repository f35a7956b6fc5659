"""Geometry, with numpy's index arithmetic and torch.chunk as the other side."""

from __future__ import annotations

import time
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.index import boxes

Box = tuple[tuple[int, ...], tuple[int, ...]]

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)
HOLLOW = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def numbered(shape: tuple[int, ...]) -> Any:
    """A tensor whose elements are their own flat indices."""
    return np.arange(prod(shape)).reshape(shape)


def part(shape: tuple[int, ...], box: Box) -> list[int]:
    """Flat indices of the elements of a box, row-major."""
    out: list[int] = numbered(shape)[tuple(slice(s, s + k) for s, k in zip(*box, strict=True))].ravel().tolist()
    return out


@st.composite
def a_box(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return start, tuple(draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True))


@st.composite
def chunking(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor cut, and its pieces cut again, in any direction; or cut as a grid; in any order."""
    whole: Box = ((0,) * len(shape), shape)
    if draw(st.booleans()):
        cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
        out: list[Box] = [((), ())]
        for c in cuts:
            out = [((*s, a), (*k, b - a)) for s, k in out for a, b in pairwise(c)]
        return draw(st.permutations(out))
    todo, out = [whole], []
    while todo:
        start, size = todo.pop()
        wide = [d for d, n in enumerate(size) if n > 1]
        if not wide or len(out) + len(todo) > 12 or not draw(st.booleans()):
            out.append((start, size))
            continue
        d = draw(st.sampled_from(wide))
        n = draw(st.integers(1, size[d] - 1))
        todo.append((start, (*size[:d], n, *size[d + 1 :])))
        todo.append(((*start[:d], start[d] + n, *start[d + 1 :]), (*size[:d], size[d] - n, *size[d + 1 :])))
    return draw(st.permutations(out))


@given(HOLLOW)
def test_strides_are_those_of_numpy(shape: tuple[int, ...]) -> None:
    assert boxes.strides((2, 3, 4)) == (12, 4, 1)
    assert boxes.strides(()) == ()
    if prod(shape):
        assert boxes.strides(shape) == tuple(s // 8 for s in np.zeros(shape, np.int64).strides)


@given(st.integers(0, 60), st.integers(1, 20))
def test_chunk_sizes_are_those_of_torch_chunk_with_zeros_appended(n: int, parts: int) -> None:
    real = [len(c) for c in torch.chunk(torch.empty(n), parts)]
    ours = boxes.chunk_sizes(n, parts)
    assert ours == (real + [0] * parts)[:parts]
    assert len(ours) == parts and sum(ours) == n


def test_chunk_sizes_of_five_rows_on_four_ranks() -> None:
    assert boxes.chunk_sizes(5, 4) == [2, 2, 1, 0]


@given(st.data())
def test_flat_start_is_the_flat_index_of_a_place(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    start, _ = data.draw(a_box(shape))
    assert boxes.flat_start(shape, start) == numbered(shape)[start]


@given(st.data())
def test_a_box_is_flat_when_its_flat_indices_have_no_gap(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    box = data.draw(a_box(shape))
    found = part(shape, box)
    assert boxes.box_is_flat(shape, *box) == (found == list(range(found[0], found[0] + len(found))))


def test_an_empty_box_is_flat_wherever_it_is() -> None:
    assert boxes.box_is_flat((3, 4), (1, 1), (2, 0))
    assert boxes.box_is_flat((3, 4), (0, 1), (0, 2))


@given(st.data())
def test_a_flat_range_is_rebuilt_in_order_by_at_most_2n_minus_1_boxes(data: st.DataObject) -> None:
    shape = data.draw(HOLLOW)
    n = prod(shape)
    first = data.draw(st.integers(0, n))
    last = data.draw(st.integers(first, n))
    found = boxes.flat_to_boxes(shape, first, last)
    assert [i for b in found for i in part(shape, b)] == list(range(first, last))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(prod(size) and boxes.box_is_flat(shape, start, size) for start, size in found)


def test_flat_to_boxes_of_a_range_that_begins_and_ends_within_rows() -> None:
    assert boxes.flat_to_boxes((4, 3), 2, 10) == [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    assert boxes.flat_to_boxes((4, 3), 4, 5) == [((1, 1), (1, 1))]
    assert boxes.flat_to_boxes((), 0, 1) == [((), ())]
    assert boxes.flat_to_boxes((4, 3), 7, 7) == []
    assert len(boxes.flat_to_boxes((9, 9, 9), 1, 728)) == 5


@given(HOLLOW, st.integers(1, 60))
def test_slabs_partition_a_tensor_in_order_and_none_is_larger_than_asked(shape: tuple[int, ...], most: int) -> None:
    found = list(boxes.cut_into_slabs(shape, most))
    assert [i for b in found for i in part(shape, b)] == list(range(prod(shape)))
    assert all(1 <= prod(size) <= most for _, size in found)


@given(st.data())
def test_a_slab_meets_any_box_in_a_part_that_is_contiguous_in_the_memory_of_that_box(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    start, size = data.draw(a_box(shape))
    at = 0
    for slab in boxes.cut_into_slabs(shape, data.draw(st.integers(1, 40))):
        both = boxes.intersect((start, size), slab)
        if both is not None:
            inside = tuple(a - b for a, b in zip(both[0], start, strict=True))
            assert boxes.box_is_flat(size, inside, both[1])
            assert boxes.flat_start(size, inside) == at  # and the box is used up from its first element to its last
            at += prod(both[1])
    assert at == prod(size)


@pytest.mark.slow
@given(st.data())
def test_meet_is_the_common_elements_of_two_boxes(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    a, b = data.draw(a_box(shape)), data.draw(a_box(shape))
    both = boxes.intersect(a, b)
    assert set(part(shape, both) if both else []) == set(part(shape, a)) & set(part(shape, b))
    assert both == boxes.intersect(b, a)


@pytest.mark.slow
@given(st.data())
def test_any_chunking_covers_its_tensor(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    assert boxes.find_cover_problem(shape, data.draw(chunking(shape))) is None


@pytest.mark.slow
@given(st.data())
def test_a_chunking_with_one_chunk_gone_moved_grown_or_twice_is_refused_with_a_reason(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    found = data.draw(chunking(shape))
    k = data.draw(st.integers(0, len(found) - 1))
    start, size = found[k]
    others = found[:k] + found[k + 1 :]
    assert "chunks hold" in str(boxes.find_cover_problem(shape, others))
    assert boxes.find_cover_problem(shape, [*found, found[k]])
    if shape:
        d = data.draw(st.integers(0, len(shape) - 1))
        by = data.draw(st.sampled_from((-2, -1, 1, 2)))
        assert boxes.find_cover_problem(shape, [*others, ((*start[:d], start[d] + by, *start[d + 1 :]), size)])
        assert boxes.find_cover_problem(shape, [*others, (start, (*size[:d], size[d] + 1, *size[d + 1 :]))])


def test_five_chunks_around_each_other_that_no_cut_separates_cover_a_square() -> None:
    wheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert boxes.find_cover_problem((3, 3), wheel) is None
    assert (
        boxes.find_cover_problem((3, 3), [*wheel[:3], ((1, 0), (2, 2)), wheel[4]])
        == "chunks [1:3, 0:2] and [1:2, 1:2] overlap"
    )


def test_the_reason_names_the_chunk_or_the_numbers() -> None:
    assert boxes.find_cover_problem((4,), [((0,), (3,))]) == "chunks hold 3 of 4 elements"
    assert boxes.find_cover_problem((4,), [((0,), (3,)), ((2,), (2,))]) == "chunks [0:3] and [2:4] overlap"
    assert boxes.find_cover_problem((4,), [((2,), (3,))]) == "chunk [2:5] reaches outside shape (4,)"
    assert boxes.find_cover_problem((4,), [((-1,), (5,))]) == "chunk [-1:4] reaches outside shape (4,)"
    assert boxes.find_cover_problem((4,), [((0, 0), (4, 1))]) == "a chunk has 2 dimensions, the tensor has 1"
    assert boxes.find_cover_problem((), [((), ()), ((), ())]) == "chunks [] and [] overlap"


def test_empty_chunks_are_legal_inside_and_refused_outside() -> None:
    assert boxes.find_cover_problem((4, 2), [((0, 0), (4, 2)), ((4, 0), (0, 2))]) is None
    assert boxes.find_cover_problem((0, 2), []) is None
    assert boxes.find_cover_problem((4, 2), [((0, 0), (4, 2)), ((5, 0), (0, 2))]) is not None


def test_a_grid_of_ten_thousand_chunks_is_checked_at_once() -> None:
    grid = [((i, j), (1, 1)) for i in range(100) for j in range(100)]
    began = time.monotonic()
    assert boxes.find_cover_problem((100, 100), grid) is None
    assert boxes.find_cover_problem((100, 100), [*grid[:-1], grid[0]]) == "chunks [0:1, 0:1] and [0:1, 0:1] overlap"
    assert time.monotonic() - began < 2


def spiral(rings: int) -> list[Box]:
    """Wheels inside wheels: 4 chunks a ring, and no cut separates any of them."""
    n = 2 * rings + 1
    out: list[Box] = []
    for i in range(rings):
        m = n - 2 * i - 1
        out += [((i, i), (1, m)), ((i, i + m), (m, 1)), ((i + m, i + 1), (1, m)), ((i + 1, i), (m, 1))]
    return [*out, ((rings, rings), (1, 1))]


def test_a_spiral_covers_its_square() -> None:
    assert boxes.find_cover_problem((9, 9), spiral(4)) is None


def onion(n: int) -> list[Box]:
    """n chunks that cover a square: a row, a column of what is left, a row, ..."""
    h, r, c = n // 2 + 1, 0, 0
    out: list[Box] = []
    for k in range(n - 1):
        out.append(((r, c), (1, h - c)) if k % 2 == 0 else ((r, c), (h - r, 1)))
        r, c = r + (k % 2 == 0), c + k % 2
    return [*out, ((r, c), (h - r, h - c))]


@pytest.mark.slow
def test_chunks_that_no_mesh_makes_are_proven_or_refused_in_time_that_is_linear_in_their_number() -> None:
    n = 8_000
    side = n // 2 + 1
    for name, good in (("onion", onion(n)), ("spiral", spiral(n // 4))):
        shape = (side, side) if name == "onion" else (n // 2 + 1, n // 2 + 1)
        began = time.process_time()
        assert boxes.find_cover_problem(shape, good) is None
        (r, c), (h, w) = good[n // 2]
        assert boxes.find_cover_problem(shape, [*good[: n // 2], *good[n // 2 + 1 :]]) == (
            f"chunks hold {prod(shape) - h * w} of {prod(shape)} elements"
        )
        moved = [
            *good[: n // 2],
            ((r - 1, c), (h, w)),
            *good[n // 2 + 1 :],
        ]  # as many elements, one twice and one never
        assert "overlap" in str(boxes.find_cover_problem(shape, moved))
        assert time.process_time() - began < 5  # about 1 s; minutes where every chunk is met with every other


@pytest.mark.slow
@given(st.data())
def test_boxes_are_a_cover_exactly_when_every_element_is_in_one_of_them(data: st.DataObject) -> None:
    shape = data.draw(HOLLOW)
    found = list(data.draw(chunking(shape))) if prod(shape) else []
    if prod(shape):
        others = data.draw(st.lists(a_box(shape), max_size=3))
        gone = data.draw(st.integers(0, len(found)))
        found = found[gone:] + others if data.draw(st.booleans()) else found
    counts = np.bincount([i for b in found for i in part(shape, b)], minlength=prod(shape))
    assert (boxes.find_cover_problem(shape, found) is None) == bool((counts == 1).all())


def test_flat_ranges_of_every_rank_cover_a_tensor_of_many_dimensions() -> None:
    shape = (3, 5, 2, 7, 131)
    n = prod(shape)
    cuts = [0, 1, 17, 130, 131, 132, 5000, n // 2, n - 1, n]
    found = [b for a, e in pairwise(cuts) for b in boxes.flat_to_boxes(shape, a, e)]
    assert boxes.find_cover_problem(shape, found) is None
    assert "chunks hold" in str(boxes.find_cover_problem(shape, found[:-1]))


def test_a_tensor_of_sixty_dimensions_is_checked_too() -> None:
    shape = (2,) * 56
    found, start, size = [], [0] * 56, [2] * 56
    for d in range(56):
        size[d] = 1
        found.append((tuple(start), tuple(size)))
        start[d] = 1
    assert boxes.find_cover_problem(shape, [*found, (tuple(start), tuple(size))]) is None
    assert "chunks hold" in str(boxes.find_cover_problem(shape, found))
