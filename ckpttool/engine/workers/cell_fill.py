"""Send single cells of objects (storage/shared_objects.py): those that no part fills alone.

A part fills a run of tensors, and sends the cells that lie within its bytes. The others, which two parts meet in, or in
which bytes lie that need the CRCs of other parts, are sent when all parts are done: the rows of tensors that they need
are read from the source once more, and the coordinator gives the bytes between chunks.
"""

from __future__ import annotations

import os
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...index.checkpoint import ITEMSIZE, TensorEntry
from ...index.draft import Draft
from ...storage.buffers import IOBudget
from ...storage.shared_objects import SharedObjects
from ...storage.source import Source
from ..copy.stream import Reader, StreamJob
from ..handle import cut_to

__all__ = ["send_cells", "why_not"]


def why_not(draft: Draft) -> str | None:
    """Why rows of the tensors of a draft cannot be read alone; None where they can."""
    names = [n for n in draft.checkpoint.tensors if n not in draft.aliases]
    if any(draft.sources[n].chunks.zstd for n in names):
        return "a compressed source is sent by one process"
    if any(draft.sources[n].shape != draft.checkpoint.tensors[n].shape for n in names):
        return "tensors that get another shape are sent by one process"
    return None


def send_cells(
    draft: Draft,
    source: Source,
    files: list[str],
    cells: Sequence[Sequence[Any]],
    objects: SharedObjects,
    budget: IOBudget,
) -> dict[str, Any]:
    """Fill and send some cells; what was sent (`SharedObjects.finish_sending`), as plain data.

    Args:
        cells: (file, cell, bytes of it, [(tensor, chunk)] that meet it, [(offset in the file, base64)] of what lies
        between), where
            file, tensor and chunk are numbers.

    Raises:
        SourceChanged: the source was written to meanwhile. RemoteError: the store fails. NoSpace: the disk is full.
    """
    tensors, names = draft.checkpoint.tensors, list(draft.checkpoint.tensors)
    jobs: list[StreamJob] = []
    places: list[list[int]] = []  # for each cell, where the bytes of its jobs begin in the file
    for _file, number, length, chunks, _between in cells:
        begin = number * objects.part_bytes
        places.append([])
        for i, row in chunks:
            name = names[i]
            entry, at = _rows(tensors[name], draft.sources[name], row, begin, begin + length)
            jobs.append(StreamJob(str(len(jobs)), entry, tensors[name].dtype))
            places[-1].append(at)
    stream: Any = Reader(source, files, (), budget).blocks(jobs)
    try:
        for (file, number, length, _chunks, between), starts in zip(cells, places, strict=True):
            begin, end = number * objects.part_bytes, number * objects.part_bytes + length
            to = objects.cells_of(draft.files[file].name)
            to.start_cell(number)
            for at, text in between:
                to.write_cell(at, b64decode(text))
            for at in starts:
                last = False
                while not last:
                    block = next(stream)
                    a, b = max(begin, at), min(end, at + len(block.data))
                    if a < b:
                        to.write_cell(a, block.data[a - at : b - at])
                    at += len(block.data)
                    last = block.last
            if to.have != length:
                raise AssertionError(f"cell {number} of {to.at.url} has {to.have} bytes of {length}")
            to.finish_cell()
        out = objects.finish_sending()
    finally:
        stream.close()
        objects.close()
    source.assert_unchanged()
    return {**out, "node": os.uname().nodename}


def _rows(entry: TensorEntry, source: TensorEntry, row: int, begin: int, end: int) -> tuple[TensorEntry, int]:
    """(the rows of a chunk that meet bytes [begin, end) of its file, as a tensor of the source; where they begin in the
    file)."""
    chunk = entry.chunks[row]
    start, shape, offset = chunk.start, chunk.shape, chunk.extent.offset
    if not shape:
        return source, offset
    size = prod(shape[1:]) * ITEMSIZE[entry.dtype]
    first = max(0, begin - offset) // size
    stop = min(shape[0], -(-(end - offset) // size))
    box = (start[0] + first, *start[1:]), (stop - first, *shape[1:])
    return replace(source, shape=box[1], chunks=cut_to(source, box)), offset + first * size
