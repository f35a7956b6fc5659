"""Tensors that are computed from others, a block of rows at a time: files that exist nowhere, which
`storage.overlay.ComputedSource` makes when they are read.

    files = ComputedFiles(ckpt)
    chunks = files.add("model.w", "bfloat16", (131072, 4096), compute)     chunks of at most 4 MiB of float32
    ComputedSource(source, files.made, others, files.working_bytes)

Blocks are computed from the same blocks of other tensors, which `BoxReader` reads with the CRC32s of their files
checked, whatever the blocks of the destination are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from ..index import boxes
from ..index.checkpoint import ITEMSIZE, Checkpoint, Chunks, TensorEntry
from ..storage.buffers import IOBudget
from ..storage.source import Source
from .copy.dtypes import cast, numpy_dtype
from .copy.stream import Reader, StreamJob
from .handle import cut_chunks

if TYPE_CHECKING:
    from .copy.dtypes import Array

__all__ = ["MOST_ELEMENTS", "BoxReader", "ComputedFiles", "Shape", "cast_array"]

#: Elements of a block.
MOST_ELEMENTS = 1 << 20
#: Bytes of a block in each step of a computation, in float64.
_STEPS = 4 * 8

Shape = tuple[int, ...]


class ComputedFiles:
    """The files of an index, and those of computed blocks behind them.

    `names`, `sizes` of all; `made` {file: (its bytes, what computes them)}; `working_bytes` that computing one takes.
    """

    def __init__(self, ckpt: Checkpoint) -> None:
        self.names, self.sizes = [*ckpt.files], [*ckpt.sizes]
        self.made: dict[str, tuple[int, Callable[[], memoryview]]] = {}
        self.working_bytes = 0

    def add(
        self, name: str, dtype: str, shape: Shape, compute: Callable[[Shape, Shape], Array], *, whole: bool = False
    ) -> Chunks:
        """Add the blocks of a tensor, and return them as its chunks.

        Args:
            compute: returns the elements of a box (start, shape) of it, in the numpy dtype of `dtype`.
            whole: the tensor is one block, whatever its size.
        """
        chunks = Chunks(len(shape))
        for start, size in [((0,) * len(shape), shape)] if whole else boxes.cut_into_slabs(shape, MOST_ELEMENTS):
            if nbytes := prod(size) * ITEMSIZE[dtype]:
                file = f"(computed) {name} from {list(start)}"
                chunks.add(start, size, len(self.names), 0, nbytes)
                self.names.append(file)
                self.sizes.append(nbytes)
                self.made[file] = (nbytes, _make(compute, start, size))
                self.working_bytes = max(self.working_bytes, prod(size) * _STEPS)
        if not prod(shape):
            chunks.add((0,) * len(shape), shape, 0, 0, 0)
        return chunks


def _make(compute: Callable[[Shape, Shape], Array], start: Shape, size: Shape) -> Callable[[], memoryview]:
    """Return a function that computes the bytes of a block, row-major."""

    def make() -> memoryview:
        """Compute the block."""
        import numpy as np

        return memoryview(np.ascontiguousarray(compute(start, size)).reshape(-1).view("u1").data)

    return make


class BoxReader:
    """Reads boxes of tensors of one checkpoint with buffers that are allocated once.

    Args:
        ckpt: the index, with raw byte ranges.
        source: its files.
        readers: how many readers share the memory.
    """

    def __init__(self, ckpt: Checkpoint, source: Source, readers: int = 1) -> None:
        self._ckpt, self._source = ckpt, source
        self._budget = IOBudget(1, max(256 << 10, min(4 << 20, (48 << 20) // (6 * readers))))
        self._reader: Reader | None = None
        buffers = 3 + 3 * self._budget.reader_threads(source)
        self.working_bytes = buffers * max(2 << 20, self._budget.buffer_bytes)  # they lie on huge pages

    def read(self, t: TensorEntry, start: Shape, shape: Shape) -> Array:
        """Read the elements of a box (start, shape) of a tensor as a flat array. Of one that is compressed, the box is
        all of it.

        Raises:
            Corrupt, SourceChanged: bytes are missing, damaged or not those of before.
        """
        import numpy as np

        if self._reader is None:
            self._reader = Reader(self._source, self._ckpt.files, self._ckpt.records, self._budget)
        out = np.empty(prod(shape) * ITEMSIZE[t.dtype], "u1")
        at = 0
        part = t if t.shape == shape else replace(t, shape=shape, chunks=cut_chunks(t, (start, shape)))
        for block in self._reader.blocks([StreamJob("", part)] if len(out) else []):
            out[at : at + len(block.data)] = block.data
            at += len(block.data)
        return out.view(numpy_dtype(t.dtype))


def cast_array(x: Array, dtype: str, to: str) -> tuple[Array, int]:
    """Return (a flat array of torch's `dtype` in the dtype `to`, rounded as torch does; how many finite numbers became
    infinite).

    Args:
        x: contiguous.
    """
    import numpy as np

    if dtype == to:
        return x, 0
    out = np.empty(x.shape, numpy_dtype(to))
    return out, cast(x.view("u1").data, dtype, out.view("u1").data, to).infinite
