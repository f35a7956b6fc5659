"""Fill one part of a draft: its tensors' bytes, into files that the coordinator has created, and nothing besides.

Of the bytes around a chunk a worker writes those that follow from the chunk alone (`DraftFile.frames_alone`: the items of DCP). What
needs the CRCs of other parts, and heads and tails, is the coordinator's.
"""

from __future__ import annotations

import os
import time
from base64 import b64encode
from typing import Any

from ..index.checkpoint import TensorEntry
from ..index.draft import Draft
from ..storage.buffers import IOBudget
from ..storage.local_file import WriterPool
from ..storage.local_range import LocalRange
from ..storage.shared_tree import SharedTree
from ..storage.source import Source
from .fill import ChunkRow, Scatter
from .parts import Part
from .stream import Reader

__all__ = ["fill_part", "framed_alone"]

_ZEROS = bytes(1 << 20)


def framed_alone(draft: Draft, file: int) -> bool:
    """Whether the worker that writes a chunk of a file writes the bytes around it, too."""
    return draft.files[file].frames_alone or (draft.before is None and draft.after is None)


def fill_part(
    draft: Draft,
    source: Source,
    files: list[str],
    records: Any,
    part: Part,
    tree: SharedTree,
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
        run.finish()
    finally:
        run.close()
    source.assert_unchanged()
    out = {
        "digests": run.digests, "crcs": {str(file): rows for file, rows in run.crcs.items()}, "seen": reader.crcs.seen(),
        "fringes": {str(file): [(at, b64encode(data).decode()) for at, data in out.fringes or ()] for file, out in run.outs.items()},
        "bytes": part.nbytes, "seconds": round(time.monotonic() - began, 3), "node": os.uname().nodename,
    }  # fmt: skip
    tree.note_part(part.number, out)
    return out


class _PartFilling(Scatter):
    def __init__(self, draft: Draft, tree: SharedTree, budget: IOBudget, there: bool) -> None:
        super().__init__(draft)
        self.tree, self.there = tree, there
        self.writer = WriterPool(budget)
        self.outs: dict[int, LocalRange] = {}

    def begin(self, name: str, entry: TensorEntry, row: ChunkRow) -> None:
        if self.there:
            return
        alone = framed_alone(self.draft, row.file)
        before = self.draft.before(name, entry, row.row, ()) if alone and self.draft.before else b""
        start = row.offset - len(before)
        out = self.outs.get(row.file)
        if out is None:
            out = self.outs[row.file] = self.tree.open_range(self.draft.files[row.file].name, self.writer, start)
        if out.at > start or (alone and out.at < start):
            raise AssertionError(f"{name} row {row.row}: at byte {out.at} of {out.path}, planned {start}")
        while out.at < start:  # the coordinator writes these
            out.append(memoryview(_ZEROS)[: start - out.at])
        out.append(before)

    def write(self, row: ChunkRow, data: memoryview) -> None:
        if not self.there:
            self.outs[row.file].append(data)

    def end(self, name: str, entry: TensorEntry, row: ChunkRow) -> None:
        if not self.there and self.draft.after and framed_alone(self.draft, row.file):
            self.outs[row.file].append(self.draft.after(name, entry, row.row, self.crcs[row.file]))

    def finish(self) -> None:
        """Make what was written durable."""
        for out in self.outs.values():
            out.settle()
        self.writer.drain()
        for out in self.outs.values():
            out.sync()

    def close(self) -> None:
        """Stop the writer; nothing is written afterwards."""
        self.writer.pool.shutdown(wait=True, cancel_futures=True)
        for out in self.outs.values():
            out.close()
