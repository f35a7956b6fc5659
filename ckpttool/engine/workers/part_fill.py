"""Fill one part of a draft: its tensors' bytes, into files that the coordinator has created, or into parts of objects,
and nothing besides.

Of the bytes around a chunk a worker writes those that follow from the chunk alone (`DraftFile.frames_alone`: the items
of DCP). What needs the CRCs of other parts, and heads and tails, is the coordinator's.
"""

from __future__ import annotations

import os
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any

from ...index.checkpoint import TensorEntry
from ...index.draft import Draft, Written
from ...storage.buffers import IOBudget
from ...storage.local_file import WriterPool
from ...storage.local_range import LocalRange
from ...storage.shared_objects import CellRange, SharedObjects
from ...storage.shared_tree import SharedTree
from ...storage.source import Source
from ..copy.fill import ChunkRow, Scatter
from ..copy.stream import Reader
from .parts import Part

__all__ = ["between", "fill_part", "framed_alone"]


def framed_alone(draft: Draft, file: int) -> bool:
    """Whether the worker that writes a chunk of a file writes the bytes around it, too."""
    return draft.files[file].frames_alone or (draft.before is None and draft.after is None)


def between(
    draft: Draft, file: int, written: Sequence[Written], digests: dict[str, str], needed: Callable[[int, int], bool]
) -> tuple[list[tuple[int, bytes]], int]:
    """([(offset, bytes)] of what lies between the chunks of a file, in order, its bytes in all): head, frames, tail.

    Args:
        written: the chunks of the file, in order.
        needed: whether the bytes of a gap between two chunks, [first, stop), are needed.
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
    records: Any,
    part: Part,
    tree: SharedTree | SharedObjects,
    budget: IOBudget,
    *,
    there: bool,
) -> dict[str, Any]:
    """Fill a part and note that it is filled; what the coordinator has to know of it, as plain data.

    Args:
        there: an earlier run wrote these bytes; they are read from the source, digested, and not written again.

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
    out = {
        "digests": run.digests,
        "crcs": {str(file): rows for file, rows in run.crcs.items()},
        "seen": reader.crcs.seen(),
        "fringes": {
            str(file): [(at, b64encode(data).decode()) for at, data in out.fringes or ()]
            for file, out in run.outs.items()
        },
        "lost": run.lost,
        "bytes": part.nbytes,
        "seconds": round(time.monotonic() - began, 3),
        "node": os.uname().nodename,
        **sent,
    }
    tree.record_part(part.number, out)
    return out


class _PartFilling(Scatter):
    def __init__(self, draft: Draft, tree: SharedTree | SharedObjects, budget: IOBudget, there: bool) -> None:
        super().__init__(draft)
        self.tree, self.there = tree, there
        self.writer = WriterPool(budget)
        self.outs: dict[int, LocalRange | CellRange] = {}

    def begin(self, name: str, entry: TensorEntry, row: ChunkRow) -> None:
        if self.there:
            return
        alone = framed_alone(self.draft, row.file)
        before = b""
        if self.draft.before and alone:
            before = self.draft.before(name, entry, row.row, ())
        elif self.draft.before and isinstance(self.tree, SharedObjects) and self._whole_record(row.file):
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

    def _whole_record(self, file: int) -> bool:
        """Whether all chunks of the record that the last chunk of a file lies in were written here. A cell is sent
        whole or not at all, so that it pays to know what lies between; into a file, the coordinator writes it later."""
        record_at, written = self.draft.files[file].record_at, self.crcs.get(file)
        if record_at is None or not written:
            return False
        first, last = (
            self.draft.checkpoint.tensors[name].chunks.offset[row] for name, row, _ in (written[0], written[-1])
        )
        return record_at(last) >= first

    def write(self, row: ChunkRow, data: memoryview) -> None:
        if not self.there:
            self.outs[row.file].append(data)

    def end(self, name: str, entry: TensorEntry, row: ChunkRow) -> None:
        if not self.there and self.draft.after and framed_alone(self.draft, row.file):
            self.outs[row.file].append(self.draft.after(name, entry, row.row, self.crcs[row.file]))

    def finish(self) -> dict[str, Any]:
        """Make what was written durable; what was sent to a store."""
        for out in self.outs.values():
            out.flush()
        self.writer.drain()
        for out in self.outs.values():
            out.sync()
        return self.tree.finish_sending()

    def close(self) -> None:
        """Stop the writer; nothing is written afterwards."""
        self.writer.pool.shutdown(wait=True, cancel_futures=True)
        for out in self.outs.values():
            out.close()
        self.tree.close()
