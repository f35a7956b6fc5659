"""Tensors of Megatron-Core in the shapes of the model: stacked layers taken apart, flat ranges as boxes."""

from __future__ import annotations

from math import prod

from ckpttool.errors import Corrupt
from ckpttool.index import boxes
from ckpttool.index.checkpoint import ITEMSIZE, Chunks, TensorEntry

__all__ = ["add_box", "take_layer", "unflatten_ranges"]


def add_box(out: Chunks, t: TensorEntry, row: int, start: tuple[int, ...], shape: tuple[int, ...], at: int) -> None:
    """Add to `out` a box whose elements are contiguous in one chunk of a tensor.

    Args:
        out: the chunks to add to.
        t: the tensor, whose chunks have their byte ranges in files.
        row: the number of the chunk.
        start: the start of the box in the tensor to which `out` belongs.
        shape: the shape of the box.
        at: the element of the chunk at which the box begins.

    Raises:
        Corrupt: the chunk is compressed or strided.
    """
    c = t.chunks
    if row in c.zstd or row in c.strides:
        raise Corrupt(
            "a chunk of Megatron-Core is compressed or not contiguous, which no version of it writes.", code="CKPT0406"
        )
    item = ITEMSIZE[t.dtype]
    out.add(start, shape, c.file[row], c.offset[row] + at * item, prod(shape) * item)


def take_layer(t: TensorEntry, i: int) -> TensorEntry:
    """Return layer `i` of a tensor whose first axis counts the layers, with an empty path.

    The tensor must have its byte ranges in files.

    Raises:
        Corrupt: a chunk is compressed or strided.
    """
    out = Chunks(len(t.shape) - 1)
    for row, (start, shape) in enumerate(t.chunks.boxes()):
        if start[0] <= i < start[0] + shape[0]:
            add_box(out, t, row, start[1:], shape[1:], (i - start[0]) * prod(shape[1:]))
    return TensorEntry(t.dtype, t.shape[1:], (), out)


def unflatten_ranges(t: TensorEntry, whole: tuple[int, ...], what: str) -> TensorEntry:
    """Return a tensor of shape [X/x, Y/y, .., x*y*..], which has its byte ranges in files, as one of shape [X, Y, ..].

    Megatron-Core before 0.14 cut tensors into boxes [x, y, ..], one for each combination of tensor- and
    pipeline-parallel ranks, flattened each box, and cut that among the data-parallel ranks (strategies/torch.py of
    0.12, mcore_to_pyt_state_dict).

    Args:
        t: the tensor as it is stored.
        whole: the shape [X, Y, ..].
        what: how errors name it.

    Raises:
        Corrupt: the two shapes contradict one another, or a chunk is compressed or strided.
    """
    grid, n = t.shape[:-1], t.shape[-1] if t.shape else 0
    if len(grid) != len(whole) or not all(grid) or any(a % b for a, b in zip(whole, grid, strict=True)):
        raise Corrupt(f"{what}: {list(whole)} is not a grid of {list(grid)} boxes.", code="CKPT0412")
    box = tuple(a // b for a, b in zip(whole, grid, strict=True))
    if prod(box) != n:
        raise Corrupt(
            f"{what}: boxes of {list(box)} have {prod(box)} elements, and {n} are stored of each.", code="CKPT0412"
        )
    out = Chunks(len(whole))
    for row, (start, shape) in enumerate(t.chunks.boxes()):
        if prod(shape[:-1]) != 1:
            raise Corrupt(f"{what}: a chunk spans several boxes.", code="CKPT0412")
        first = start[-1]
        corner = tuple(k * b for k, b in zip(start[:-1], box, strict=True))
        at = 0
        for inner, size in boxes.flat_to_boxes(box, first, first + shape[-1]):
            add_box(out, t, row, tuple(a + b for a, b in zip(corner, inner, strict=True)), size, at)
            at += prod(size)
    return TensorEntry(t.dtype, whole, (), out)
