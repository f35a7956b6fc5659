"""How tensors are cut into blocks.

When a tensor's chunks are flat ranges of it (dim-0 shards, whole tensors) and the caller does not ask for boxes, a
block is a part of one chunk: one read, no copy. Else blocks are slabs (boxes.py) and each chunk's part of a slab, which
is contiguous in the chunk, is read and put in its place. Either way a chunk is consumed from its first byte to its
last, so compressed chunks are decompressed as streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from ...index import boxes
from ...index.checkpoint import ITEMSIZE, TensorEntry

__all__ = ["BlockPlan", "StreamJob", "plan_blocks"]


class StreamJob:
    """One tensor to stream.

    Args:
        dtype: what the blocks hold; the tensor's own where None.
        boxed: blocks are slabs, with `start` and `shape`.
    """

    __slots__ = ("boxed", "dtype", "entry", "name")

    def __init__(self, name: str, entry: TensorEntry, dtype: str | None = None, *, boxed: bool = False) -> None:
        """Make the job to stream one tensor.

        Args:
            name, entry: name of the tensor, and its entry in the index.
            dtype: torch's name of the dtype to cast to; None for the tensor's own.
            boxed: whether blocks are slabs (boxes with `start` and `shape`), and not just ranges of elements.
        """
        self.name, self.entry, self.dtype, self.boxed = name, entry, dtype or entry.dtype, boxed


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """A block that is to be read."""

    job: StreamJob
    first: int
    count: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    parts: list[tuple[int, tuple[int, ...], tuple[int, ...]]]  # chunk row, start in tensor, shape
    one: bool  # the block is one contiguous part of one chunk
    last: bool


def plan_blocks(jobs: Iterable[StreamJob], block_bytes: int) -> Iterator[BlockPlan]:
    """Yield the plans of the blocks in which tensors are streamed, in the order of `jobs`.

    No block is larger than `block_bytes`, neither in the stored dtype nor in the dtype that the job asks for.
    """
    for job in jobs:
        e = job.entry
        item = ITEMSIZE[e.dtype]
        most = max(1, block_bytes // max(item, ITEMSIZE[job.dtype]))
        if e.numel == 0:
            yield BlockPlan(job, 0, 0, (0,) * len(e.shape), e.shape, [], False, True)
            continue
        rows = _list_flat_chunks(e)
        if rows is None or (job.boxed and len(rows) > 1):
            yield from _plan_slabs(job, most)
        elif job.boxed:
            for start, shape in boxes.cut_into_slabs(e.shape, most):
                first = boxes.flat_start(e.shape, start)
                n = prod(shape)
                yield BlockPlan(job, first, n, start, shape, [(rows[0][0], start, shape)], True, first + n == e.numel)
        else:
            for row, first, count in rows:
                for a in range(first, first + count, most):
                    n = min(most, first + count - a)
                    yield BlockPlan(job, a, n, (a - first,), (), [(row, (), ())], True, a + n == e.numel)


def _list_flat_chunks(e: TensorEntry) -> list[tuple[int, int, int]] | None:
    """Return (chunk number, first element, element count) of each chunk of a tensor, in the order of the elements.

    None unless every chunk is a contiguous, uncompressed, row-major range of the flattened tensor.
    """
    c = e.chunks
    if c.strides or c.zstd:
        return None
    order = c.rows_in_order()
    if order is not None and c.ndim and c.shape[1 : c.ndim].tolist() == list(e.shape[1:]):
        row = prod(e.shape[1:])
        return [(k, c.start[k * c.ndim] * row, c.shape[k * c.ndim] * row) for k in order]
    if c.ndim == 0:
        return [(0, 0, 1)]
    out = []
    for k, chunk in enumerate(c):
        if prod(chunk.shape):
            if not boxes.box_is_flat(e.shape, chunk.start, chunk.shape):
                return None
            out.append((k, boxes.flat_start(e.shape, chunk.start), prod(chunk.shape)))
    return sorted(out, key=lambda r: r[1])


def _plan_slabs(job: StreamJob, most: int) -> Iterator[BlockPlan]:
    """Yield the plans of a tensor's slabs (boxes that are contiguous ranges of the flattened tensor) of at most `most`
    elements; each slab is assembled from the chunks that intersect it."""
    e = job.entry
    chunks = [(k, c.start, c.shape) for k, c in enumerate(e.chunks) if prod(c.shape)]
    for start, shape in boxes.cut_into_slabs(e.shape, most):
        parts = []
        for k, s, n in chunks:
            both = boxes.intersect((s, n), (start, shape))
            if both:
                parts.append((k, *both))
        first = boxes.flat_start(e.shape, start)
        n_elements = prod(shape)
        yield BlockPlan(job, first, n_elements, start, shape, parts, False, first + n_elements == e.numel)
