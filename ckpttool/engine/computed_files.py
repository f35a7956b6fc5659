"""Tensors that are computed from others when they are read: files that exist nowhere, of which
`storage.overlay.ComputedSource` holds a page at a time.

    files = ComputedFiles(ckpt)
    place = files.add("model.w (average)", "bfloat16", (131072, 4096), compute)
    entry = TensorEntry("bfloat16", (131072, 4096), path, Chunks.whole((131072, 4096), *place))
    replace(ckpt, files=files.names, sizes=files.sizes, tensors=...), ComputedSource(source, files.made, ...)

So are averages, weights with an adapter merged into them, those of a schedule-free optimizer, and what is dequantised
or quantised. A page is computed from parts of other tensors, which `BoxReader` reads with the CRC32s of their files
checked, whatever the blocks of the destination are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from ..index import boxes
from ..index.checkpoint import ITEMSIZE, Checkpoint, TensorEntry
from ..index.records import Extent
from ..storage.buffers import IOBudget
from ..storage.overlay import PagedFile
from ..storage.source import Source
from .copy.dtypes import cast, numpy_dtype
from .copy.stream import Reader, StreamJob
from .handle import cut_chunks

if TYPE_CHECKING:
    from .copy.dtypes import Array

__all__ = ["MOST_ELEMENTS", "BoxReader", "ComputedFiles", "cast_array", "choose_page_size"]

#: Elements of a page that is computed from the same elements of other tensors.
MOST_ELEMENTS = 1 << 20

Shape = tuple[int, ...]


class ComputedFiles:
    """The files of an index, and computed ones behind them.

    `names`, `sizes` of all; `made` {computed file: its pages}; `working_bytes` that computing a page takes.
    """

    def __init__(self, ckpt: Checkpoint) -> None:
        """Start with the files of the index `ckpt`, and without computed files."""
        self.names, self.sizes = [*ckpt.files], [*ckpt.sizes]
        self.made: dict[str, PagedFile] = {}
        self.working_bytes = 0

    def add(
        self,
        name: str,
        dtype: str,
        shape: Shape,
        compute: Callable[[int, int], Array],
        page: int,
        bytes_each: int = 4 * 8,
    ) -> Extent:
        """Add a computed file that contains one tensor, or a box of one, and return its extent (number of the file, 0,
        bytes).

        Args:
            name: name of the computed file, for messages.
            dtype, shape: torch's name of the dtype, and the shape, of the tensor or box.
            compute: returns elements [first, end), row-major, as an array whose bytes are those of `dtype`.
            page: the most elements that one call of `compute` has to return.
            bytes_each: bytes of memory that computing an element takes; by default four steps in float64.
        """
        item, count = ITEMSIZE[dtype], prod(shape)
        step = max(1, min(page, count))

        def compute_page(k: int) -> memoryview:
            """Compute the bytes of a page."""
            import numpy as np

            found = compute(k * step, min((k + 1) * step, count))
            return memoryview(np.ascontiguousarray(found).reshape(-1).view("u1").data)

        self.made[name] = PagedFile(count * item, step * item, compute_page)
        self.names.append(name)
        self.sizes.append(count * item)
        self.working_bytes = max(self.working_bytes, step * bytes_each)
        return Extent(len(self.names) - 1, 0, count * item)


def choose_page_size(tensors: Sequence[TensorEntry]) -> int:
    """Choose how many elements to compute together from the same elements of these tensors of one shape.

    Returns:
        A number of elements: complete rows, at most `MOST_ELEMENTS` in all; or all elements if a tensor has zstd
        chunks, which are decompressed completely.
    """
    shape = tensors[0].shape
    row = next(n for k in range(len(shape) + 1) if (n := prod(shape[k:])) <= MOST_ELEMENTS)
    return max((t.numel for t in tensors if t.chunks.zstd), default=MOST_ELEMENTS // max(1, row) * row)


class BoxReader:
    """Reads parts of tensors of one checkpoint with buffers that are allocated once.

    Args:
        ckpt: the index, with raw byte ranges.
        source: its files.
        readers: how many readers share the memory.
    """

    def __init__(self, ckpt: Checkpoint, source: Source, readers: int = 1) -> None:
        """Choose the size of the buffers, which are allocated at the first read; the class describes the arguments."""
        self._ckpt, self._source = ckpt, source
        self._budget = IOBudget(1, max(256 << 10, min(4 << 20, (48 << 20) // (6 * readers))))
        self._reader: Reader | None = None
        buffers = 3 + 3 * self._budget.reader_threads(source)
        self.working_bytes = buffers * max(2 << 20, self._budget.buffer_bytes)  # they lie on huge pages

    def read_range(self, t: TensorEntry, first: int, end: int) -> Array:
        """Read elements [first, end) of a tensor, in row-major order, as a flat array; raises what `read` raises."""
        return self.read(t, boxes.flat_to_boxes(t.shape, first, end))

    def read(self, t: TensorEntry, parts: Iterable[tuple[Shape, Shape]]) -> Array:
        """Read boxes of a tensor, one after the other, as a flat array of its dtype.

        Args:
            parts: boxes as (start, shape); for a tensor with zstd chunks, the only box is the complete tensor.

        Raises:
            Corrupt, SourceChanged: bytes are missing, damaged, or have changed since the source was opened.
        """
        if self._reader is None:
            self._reader = Reader(self._source, self._ckpt.files, self._ckpt.records, self._budget)
        jobs = [
            StreamJob("", t if size == t.shape else replace(t, shape=size, chunks=cut_chunks(t, (start, size))))
            for start, size in parts
            if prod(size)
        ]
        return self._reader.read(jobs).view(numpy_dtype(t.dtype))


def cast_array(x: Array, dtype: str, to: str) -> tuple[Array, int]:
    """Convert a contiguous flat array to another dtype, rounding as torch does.

    Args:
        dtype: torch's name of the dtype of `x`.
        to: torch's name of the new dtype; if it equals `dtype`, `x` itself is returned.

    Returns:
        (the converted array; how many finite numbers became infinite).
    """
    import numpy as np

    if dtype == to:
        return x, 0
    out = np.empty(x.shape, numpy_dtype(to))
    return out, cast(x.view("u1").data, dtype, out.view("u1").data, to).infinite
