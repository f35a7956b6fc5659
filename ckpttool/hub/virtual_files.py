"""Virtual files: each returns the bytes of one file of a draft, read from the source on demand.

A `Content` is one file of a draft in the hf layout: literal bytes, then whole tensors, row-major, one after the other
without gaps. `VirtualFile` is a file object over it. A read that starts where the last one ended continues the same
stream, which reads ahead; only another position opens a new one, so `seek` and `tell`, which clients call often, cost
nothing. A stream starts with the block that contains its first byte; a tensor in compressed chunks is decompressed from
its beginning.

Memory is bounded by the buffers of one `stream.Reader` for each file that is being read. Nothing is written to disk.
"""

from __future__ import annotations

import io
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..engine.copy.record_crcs import CrcVerifier
from ..engine.copy.stream import Block, Reader, StreamJob
from ..engine.opening import OpenCheckpoint
from ..errors import Interrupted
from ..index.checkpoint import ITEMSIZE
from ..index.draft import Draft
from ..index.records import Records
from ..storage.buffers import IOBudget

__all__ = ["Content", "VirtualFile", "make_contents"]


#: Whoever takes the file knows its SHA-256, which was computed of bytes whose CRC32s were compared.
_KNOWN = CrcVerifier(Records())


@dataclass
class Content:
    """The content of one file of a draft: `head`, then the tensors of `jobs`, which begin at the bytes `starts`."""

    name: str
    size: int
    head: bytes
    opened: OpenCheckpoint
    budget: IOBudget
    jobs: list[StreamJob] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    @property
    def source_bytes(self) -> int:
        """Return how many bytes are read from the source for this file."""
        return sum(job.entry.nbytes for job in self.jobs)

    def blocks(self, index: int = 0, first: int = 0, crcs: CrcVerifier | None = None) -> Iterator[Block]:
        """Yield blocks of bytes of the tensors in this file, in order.

        Args:
            index: number of the first tensor.
            first: the first element of that tensor that is needed; the first block may begin before it.
            crcs: compares the CRC32s of the source, together for several streams; None to compare them for this stream
                alone.

        Raises:
            Corrupt: bytes are missing or do not have the CRC32 that the source records. SourceChanged: the source was
                written to.
        """
        ckpt = self.opened.checkpoint
        reader = Reader(self.opened.source, ckpt.files, ckpt.records, self.budget)
        if crcs is not None:
            reader.crcs = crcs
        return reader.blocks(self.jobs[index:], first)


def make_contents(opened: OpenCheckpoint, draft: Draft, budget: IOBudget) -> list[Content]:
    """Return a `Content` for each file that a draft of the hf layout plans, in the draft's order; nothing is read.

    Args:
        opened: the checkpoint from which the tensors are read.
        draft: the draft.
        budget: limits how much is read at the same time.
    """
    if draft.before or draft.after or draft.tail or any(f.coded for f in draft.files):
        raise AssertionError("the hf layout has nothing around tensors")
    out = [Content(f.name, f.size, f.first_bytes(), opened, budget) for f in draft.files]
    at = [len(c.head) for c in out]
    for name, entry in draft.checkpoint.tensors.items():
        if name in draft.aliases:
            continue
        ((_, shape, extent, *_),) = entry.chunks
        content = out[extent.file]
        if extent.offset != at[extent.file] or shape != entry.shape:
            raise AssertionError(f"{name} lies at byte {extent.offset} of {content.name}, not {at[extent.file]}")
        content.jobs.append(StreamJob(name, draft.sources[name], entry.dtype))
        content.starts.append(extent.offset)
        at[extent.file] += extent.length
    for content, end in zip(out, at, strict=True):
        if end != content.size:
            raise AssertionError(f"{content.name} ends at byte {end}, not {content.size}")
    return out


class VirtualFile(io.BufferedIOBase):
    """A file object over a content; for one thread at a time.

    `passed(n)` is called for every n bytes that are read for the first time; once `stop` is set, reads raise
    Interrupted.
    """

    def __init__(
        self, content: Content, passed: Callable[[int], None] = lambda n: None, stop: threading.Event | None = None
    ) -> None:
        """Open a file whose bytes are read from the source on demand.

        Args:
            content: the head of the file, and the tensors of the source that follow it.
            passed: called with the number of bytes that were read for the first time, at every read.
            stop: once it is set, reads raise Interrupted; None: never.
        """
        self.content, self.name = content, content.name
        self.furthest = 0  # end of what was read so far
        self._passed, self._stop = passed, stop
        self._at = 0  # where the next read begins
        self._here = -1  # where the stream stands; -1 where there is none
        self._stream: Iterator[Block] | None = None
        self._block: Block | None = None
        self._rest = memoryview(b"")  # of the block
        self._gathered = bytearray()

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next read."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position of the next read, as `io.IOBase.seek` does, and return it, counted from the beginning;
        nothing is read."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.content.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next `size` bytes, fewer only at the end of the file; None or a negative number: all that are
        left.

        Raises:
            Corrupt, SourceChanged: the source is damaged, or has changed. Interrupted: it was stopped.
        """
        left = max(0, self.content.size - self._at)
        n = left if size is None or size < 0 else min(size, left)
        out = bytes(piece) if len(piece := self._read_some(n)) == n else self._read_remaining(piece, n)
        if self._at > self.furthest:
            self._passed(self._at - self.furthest)
            self.furthest = self._at
        if self._at >= self.content.size:
            self._close_stream()
        return out

    def read1(self, size: int = -1, /) -> bytes:
        """Return the next `size` bytes, as `read` does."""
        return self.read(size)

    def _read_remaining(self, piece: memoryview, n: int) -> bytes:
        """Return the next `n` bytes, of which `piece` was read already, by reading until they are complete.

        The bytes are collected in one buffer. Joining parts would make malloc return and request memory again and
        again, which costs more than everything else.
        """
        if len(self._gathered) < n:
            self._gathered = bytearray(n)
        into, end = memoryview(self._gathered), 0
        while True:
            into[end : end + len(piece)] = piece
            end += len(piece)
            if end == n:
                return bytes(into[:n])
            piece = self._read_some(n - end)

    def _read_some(self, most: int) -> memoryview:
        """Return between 1 and `most` of the next bytes, none if `most` is 0; the view is valid until the next call.

        Raises:
            Interrupted: `stop` was set. Corrupt, SourceChanged: the source is damaged, or has changed.
        """
        if self._stop is not None and self._stop.is_set():
            raise Interrupted("the upload was stopped.")
        if not most:
            return memoryview(b"")
        if self._at < len(self.content.head):
            out = memoryview(self.content.head)[self._at : self._at + most]
            self._at += len(out)
            return out
        if self._here != self._at:
            self._open_stream()
        while not len(self._rest):
            self._read_next_block()
        out = self._rest[:most]
        self._rest = self._rest[len(out) :]
        self._here = self._at = self._at + len(out)
        return out

    def _open_stream(self) -> None:
        """Start to read the source at the position of the next read, which must be in a tensor."""
        self._close_stream()
        index = bisect_right(self.content.starts, self._at) - 1
        item = ITEMSIZE[self.content.jobs[index].dtype]
        self._stream = self.content.blocks(index, (self._at - self.content.starts[index]) // item, _KNOWN)
        block = self._read_next_block()
        here = self.content.starts[index] + block.first * item
        while here + len(self._rest) <= self._at:
            here += len(self._rest)
            self._read_next_block()
        self._rest = self._rest[self._at - here :]
        self._here = self._at

    def _read_next_block(self) -> Block:
        """Read and return the next block of the source; the block before it becomes invalid."""
        self._rest = memoryview(b"")  # of a block that is not valid any more
        assert self._stream is not None
        self._block = next(self._stream)
        self._rest = self._block.data
        return self._block

    def _close_stream(self) -> None:
        """Stop reading the source, if a stream is open, and free its buffers."""
        stream, self._stream, self._block, self._rest, self._here = self._stream, None, None, memoryview(b""), -1
        self._gathered = bytearray()
        if stream is not None:
            stream.close()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Close the file, and stop reading the source."""
        self._close_stream()
        super().close()
