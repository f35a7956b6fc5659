"""Fill one part of a draft, in a worker: its tensors' bytes, into files that the coordinator has created, or into cells
of objects (storage/shared_objects.py).

Of the bytes around a chunk a worker writes those that follow from the chunk alone (`DraftFile.frames_alone`: the items
of DCP). What needs the CRCs of other parts, and heads and tails, is the coordinator's.

Of an object, a part sends the cells that lie within its bytes. The others, which two parts meet in, or in which bytes
lie that need the CRCs of other parts, are sent when all parts are done (`send_cells`): the rows of tensors that they
need are read from the source once more, and the coordinator gives the bytes between chunks.
"""

from __future__ import annotations

import os
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...index.checkpoint import ITEMSIZE, TensorEntry
from ...index.draft import Draft, Written
from ...index.records import Records
from ...storage.buffers import IOBudget
from ...storage.local_file import WriterPool
from ...storage.local_range import LocalRange
from ...storage.overlay import ComputedSource
from ...storage.shared_objects import CellRange, SharedObjects
from ...storage.shared_tree import SharedTree
from ...storage.source import Source
from ..copy.fill import ChunkRow, Scatter
from ..copy.stream import Reader, StreamJob
from ..handle import cut_chunks
from .part_requests import Json
from .parts import WorkPart

__all__ = [
    "explain_one_process_for_cells",
    "fill_part",
    "make_bytes_between_chunks",
    "send_cells",
    "worker_writes_frames",
]


def worker_writes_frames(draft: Draft, file: int) -> bool:
    """Tell whether the worker that writes a chunk also writes the bytes around it (frames); if not, the coordinator
    does.

    Args:
        file: the number of the file in the draft.
    """
    return draft.files[file].frames_alone or (draft.before is None and draft.after is None)


def make_bytes_between_chunks(
    draft: Draft, file: int, written: Sequence[Written], digests: dict[str, str], needed: Callable[[int, int], bool]
) -> tuple[list[tuple[int, bytes]], int]:
    """Make the bytes of a file that are in no chunk: head, frames, tail. Return ([(offset, bytes)] in order, the size
    of the file in bytes).

    Args:
        file: the number of the file in the draft.
        written: the chunks of the file, in order: (tensor, number of the chunk, CRC32).
        digests: {tensor: BLAKE3 hex digest}.
        needed: tells whether the bytes [first, stop) of a gap between two chunks are needed.
    """
    head = draft.files[file].first_bytes()
    out, end = [(0, head)], len(head)
    so_far: list[Written] = []
    last: tuple[str, TensorEntry, int] | None = None
    for name, row, crc in written:
        entry = draft.checkpoint.tensors[name]
        start = entry.chunks.offset[row]
        if needed(end, start):
            if draft.after and last:
                out.append((end, draft.after(*last, so_far)))
            if draft.before:
                frame = draft.before(name, entry, row, so_far)
                out.append((start - len(frame), frame))
        end = start + entry.chunks.length[row]
        so_far.append((name, row, crc))
        last = name, entry, row
    if draft.after and last:
        frame = draft.after(*last, so_far)
        out.append((end, frame))
        end += len(frame)
    if draft.tail:
        tail = draft.tail(file, written, digests)
        out.append((end, tail))
        end += len(tail)
    return out, end


def fill_part(
    draft: Draft,
    source: Source,
    files: list[str],
    records: Records,
    part: WorkPart,
    tree: SharedTree | SharedObjects,
    budget: IOBudget,
    *,
    there: bool,
) -> Json:
    """Write one part of a draft, record that it is filled, and return the worker's answer to the coordinator as plain
    data: digests, CRC32s, bytes that the coordinator has to write, and so on.

    Args:
        files: the source's files; the file numbers of chunks are indices into this list.
        records: byte ranges of these files with known CRC32s.
        part: which tensors to write.
        tree: the destination, as the coordinator shares it.
        there: whether an earlier run wrote these bytes; then they are only read from the source and digested.

    Raises:
        Corrupt, SourceChanged: the source is damaged, or was written to meanwhile.
        NoSpace, CkpttoolError: the destination could not be written.
    """
    began = time.monotonic()
    run = _PartFilling(draft, tree, budget, there)
    names = [n for n in list(draft.checkpoint.tensors)[part.first : part.stop] if n not in draft.aliases]
    try:
        reader = Reader(source, files, records, budget)
        for _ in run.blocks(reader, names, draft.sources):
            pass
        sent = run.finish()
    finally:
        run.close()
    source.assert_unchanged()
    measured = source.measured if isinstance(source, ComputedSource) else {}
    # JSON: the coordinator keeps it in a file, too
    out = {
        "digests": run.digests,
        "crcs": {str(file): rows for file, rows in run.crcs.items()},
        "seen": reader.crcs.parts_read(),
        "fringes": {
            str(file): [(at, b64encode(data).decode()) for at, data in out.fringes or ()]
            for file, out in run.outs.items()
        },
        "lost": run.lost,
        "measured": dict(measured),
        "bytes": part.nbytes,
        "seconds": round(time.monotonic() - began, 3),
        "node": os.uname().nodename,
        **sent,
    }
    measured.clear()
    tree.record_part(part.number, out)
    return out


class _PartFilling(Scatter):
    """One run of `fill_part`. What is appended goes to `outs` {file: its range}, of which a part writes one each."""

    def __init__(self, draft: Draft, tree: SharedTree | SharedObjects, budget: IOBudget, there: bool) -> None:
        super().__init__(draft)
        self.tree, self.there = tree, there
        self.writer = WriterPool(budget)
        self.outs: dict[int, LocalRange | CellRange] = {}

    def begin(self, name: str, entry: TensorEntry, row: ChunkRow) -> None:
        """Append the frame (bytes of the file format) that precedes a chunk; leave those bytes to the coordinator if
        they depend on chunks that other workers write. Do nothing if an earlier run has written the part.

        Args:
            name, entry: the tensor's name, and the tensor in the destination.
            row: the chunk.
        """
        if self.there:
            return
        alone = worker_writes_frames(self.draft, row.file)
        before = b""
        if self.draft.before and alone:
            before = self.draft.before(name, entry, row.row, ())
        elif self.draft.before and isinstance(self.tree, SharedObjects) and self._wrote_whole_record(row.file):
            before = self.draft.before(name, entry, row.row, self.crcs[row.file])
        start = row.offset - len(before)
        out = self.outs.get(row.file)
        if out is None:
            out = self.outs[row.file] = self.tree.open_range(self.draft.files[row.file].name, self.writer, start)
        if out.at > start or (alone and out.at < start):
            raise AssertionError(f"{name} row {row.row}: at byte {out.at} of {out.path}, planned {start}")
        if out.at < start:  # the coordinator writes these
            out.skip_to(start)
        out.append(before)

    def _wrote_whole_record(self, file: int) -> bool:
        """Tell whether all chunks of the record that contains the last written chunk of a file were written here.

        A cell of a store is sent completely or not at all, so it pays to know the frames; in a file, the coordinator
        writes them later.
        """
        record_at, written = self.draft.files[file].record_at, self.crcs.get(file)
        if record_at is None or not written:
            return False
        first, last = (
            self.draft.checkpoint.tensors[name].chunks.offset[row] for name, row, _ in (written[0], written[-1])
        )
        return record_at(last) >= first

    def write(self, row: ChunkRow, data: memoryview) -> None:
        """Append the next bytes of a chunk to its file, unless an earlier run has written them."""
        if not self.there:
            self.outs[row.file].append(data)

    def end(self, name: str, entry: TensorEntry, row: ChunkRow) -> None:
        """Append the frame (bytes of the file format) that follows a chunk whose bytes are all written, if workers
        write the frames of its file. Do nothing if an earlier run has written the part.

        Args:
            name, entry: the tensor's name, and the tensor in the destination.
            row: the chunk.
        """
        if not self.there and self.draft.after and worker_writes_frames(self.draft, row.file):
            self.outs[row.file].append(self.draft.after(name, entry, row.row, self.crcs[row.file]))

    def finish(self) -> Json:
        """Make durable what was written, and return what `finish_sending` of the destination returns: what was sent to
        a store, as plain data."""
        for out in self.outs.values():
            out.flush()
        self.writer.drain()
        for out in self.outs.values():
            out.sync()
        return self.tree.finish_sending()

    def close(self) -> None:
        """Stop the writer and close the files; nothing is written afterwards."""
        self.writer.pool.shutdown(wait=True, cancel_futures=True)
        for out in self.outs.values():
            out.close()
        self.tree.close()


# --------------------------------------------------------------------------------------- cells that no part fills alone


def explain_one_process_for_cells(draft: Draft) -> str | None:
    """Return the reason why `send_cells` cannot read single rows of a draft's tensors; None if it can."""
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
) -> Json:
    """Fill and send some cells (parts of objects in a store); return what was sent (`SharedObjects.finish_sending`) and
    "node", the machine's name, as plain data.

    Args:
        files: the source's files; the file numbers of chunks are indices into this list.
        cells: (file, cell, bytes of the cell, [(tensor, chunk)] that overlap it, [(offset in the file, base64)] of the
            bytes between chunks); file, cell, tensor and chunk are numbers.
        objects: the destination, as the coordinator shares it.

    Raises:
        Corrupt, SourceChanged: bytes are missing, or the source was written to meanwhile.
        RemoteError: the store fails.
        NoSpace: the disk is full.
    """
    # the rows of all cells are one stream, in the order of the cells
    tensors, names = draft.checkpoint.tensors, list(draft.checkpoint.tensors)
    jobs: list[StreamJob] = []
    starts: list[list[int]] = []  # for each cell, where the bytes of its jobs begin in the file
    for _file, number, length, chunks, _between in cells:
        begin = number * objects.part_bytes
        starts.append([])
        for i, row in chunks:
            name = names[i]
            entry, at = _cut_rows_in_cell(tensors[name], draft.sources[name], row, begin, begin + length)
            jobs.append(StreamJob(str(len(jobs)), entry, tensors[name].dtype))
            starts[-1].append(at)
    stream = Reader(source, files, None, budget).blocks(jobs)
    try:
        for (file, number, length, _chunks, between), of_cell in zip(cells, starts, strict=True):
            begin, end = number * objects.part_bytes, number * objects.part_bytes + length
            to = objects.cells_of(draft.files[file].name)
            to.start_cell(number)
            for at, text in between:
                to.write_cell(at, b64decode(text))
            for at in of_cell:
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


def _cut_rows_in_cell(
    entry: TensorEntry, source: TensorEntry, row: int, begin: int, end: int
) -> tuple[TensorEntry, int]:
    """Return (the rows of a chunk that overlap bytes [begin, end) of its file, as a tensor of the source; the offset in
    the file at which they begin).

    Args:
        entry: the tensor in the destination.
        source: the same tensor in the source.
        row: the number of the chunk in the destination.
    """
    chunk = entry.chunks[row]
    start, shape, offset = chunk.start, chunk.shape, chunk.extent.offset
    if not shape:
        return source, offset
    size = prod(shape[1:]) * ITEMSIZE[entry.dtype]
    first = max(0, begin - offset) // size
    stop = min(shape[0], -(-(end - offset) // size))
    box = (start[0] + first, *start[1:]), (stop - first, *shape[1:])
    return replace(source, shape=box[1], chunks=cut_chunks(source, box)), offset + first * size
