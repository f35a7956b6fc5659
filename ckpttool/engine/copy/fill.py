"""Fill a draft: every byte of the destination, from the source, once, in one pass, with digests and CRCs.

    for tensor in draft:                        in the order of the destination's files
        for block of its source:                read ahead by `stream.Reader`, cast if asked
            digest the block
            for each chunk it meets:            append to that chunk's file

What drives it: the destination's order, so that every file is an append-only stream. What bounds memory: the reader's
pool of buffers and the writer's; with more files than buffers the file that was idle longest
gives its buffer up. Writes go around the page cache (O_DIRECT) in whole buffers; the tail of a file is padded to a page
and cut off again. Other threads write while this one digests.

Now and then what was written is made durable and a line goes into the journal: tensors done. A run that finds such a
journal walks through those tensors once more without writing: it reads them, digests them, computes the CRCs of their
chunks and compares all literal bytes around them (headers, padding, frames of an archive) with the disk. Digests and
CRCs are therefore never taken from the journal, and the read-back, which such a run always has, proves the bytes of the
tensors. They are read from the source; where that is a store or the Hub, from the disk, and compared with the digests
in the journal, so that nothing is downloaded twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

from blake3 import blake3

from ...errors import Corrupt, argument
from ...formats.crc import crc32, crc32_combine
from ...index import boxes
from ...index.checkpoint import ITEMSIZE, TensorEntry, joined
from ...index.draft import Draft, EarlierFile, Sink, Written
from ...index.records import Records
from ...options import Progress, silent
from ...printable import count_noun
from ...storage.buffers import DEFAULT_BUDGET, IOBudget
from ...storage.destination_protocol import Altered, Destination, DestinationFile
from ...storage.local_file import WriterPool
from ...storage.source import Source
from .averages import Averages, describe_negative_averages
from .dtypes import NOTHING, CastLosses, bits_dtype
from .stream import Block, Reader, StreamJob

__all__ = ["ChunkRow", "Progress", "Scatter", "describe_cast_losses", "fill", "record_cast_losses", "silent"]

_JOURNAL_BYTES = 1 << 30
_JOURNAL_SECONDS = 5.0


class _CodedFile(DestinationFile):
    """A file whose bytes go through a sink on their way to the destination."""

    def __init__(self, raw: DestinationFile, sink: Sink) -> None:
        """Make a file whose bytes `sink` encodes (compression, encryption).

        Args:
            raw: the file of the destination, which gets the encoded bytes.
            sink: the encoder; it passes its output to `raw.append`.
        """
        self.raw, self.sink, self.path = raw, sink, raw.path

    @property
    def at(self) -> int:  # type: ignore[override]
        """Return how many bytes were appended so far, counted before they are encoded."""
        return self.sink.at

    @property
    def size(self) -> int:
        """Return the number of encoded bytes in the file so far."""
        return self.raw.size

    def append(self, data: bytes | memoryview) -> None:
        """Encode bytes and append the result; the sink may keep some of them in a buffer."""
        self.sink.append(data)

    def start_writing(self) -> None:
        """Switch from comparing with the bytes of an earlier run to writing, from the next byte on.

        Raises:
            Altered: the sink cannot continue the file from here, or the existing file is too short.
        """
        if not self.sink.resumable():
            raise Altered(self.path)
        self.sink.flush()
        self.raw.start_writing()

    def flush(self) -> None:
        """Encode everything that the sink has buffered, and hand it to the system or the store."""
        self.sink.flush()
        self.raw.flush()

    def sync(self) -> None:
        """Make durable what was flushed. The caller must have waited for all writes."""
        self.raw.sync()

    def end(self) -> None:
        """Encode the rest, and mark the file as complete: nothing more will be appended."""
        self.sink.finish()
        self.raw.end()

    def finish(self) -> None:
        """Make the complete file durable. The caller must have waited for all writes."""
        self.raw.finish()

    def close(self) -> None:
        """Stop the sink and close the file, whether the file is finished or not."""
        self.sink.close()
        self.raw.close()


def fill(
    draft: Draft,
    source: Source,
    files: list[str],
    records: Records,
    destination: Destination,
    progress: Progress,
    budget: IOBudget = DEFAULT_BUDGET,
) -> dict[str, str]:
    """Write every file of a draft to its destination; returns {tensor: BLAKE3 hex digest of its bytes there}. What an
    interrupted run left is continued, or written again where it was altered.

    Args:
        files: the source's files; the file numbers of chunks count in this list.
        records: byte ranges of these files with known CRC32s, checked as they are read.
        progress: called with ("copy" or "reread", bytes done, bytes in all).

    Raises:
        Corrupt, SourceChanged: the source is damaged, or was written to meanwhile.
        NoSpace, CkpttoolError: the destination could not be written.
    """
    while True:
        run = _Filling(draft, source, files, records, destination, budget)
        try:
            digests = run.run(progress)
            record_cast_losses(draft, run.lost)
            return digests
        except Altered:
            destination.restart()
            destination.messages.append(
                f"what an interrupted run left in {destination.location} was not what it had written; it was written "
                "again"
            )
        finally:
            run.close()


def record_cast_losses(draft: Draft, lost: Mapping[str, Iterable[int]]) -> None:
    """Record in `draft.lost`, by the tensor names of the source, the numbers that casts could not hold. Of several
    copies of a tensor, the one that lost most counts.

    Args:
        lost: {tensor of the draft: the three counts of its `CastLosses`}.
    """
    for name, counts in lost.items():
        of, row = joined(draft.sources[name].path), CastLosses(*counts)._asdict()
        before = draft.lost.get(of)
        if before is None or sum(before[kind] for kind in row) < sum(row.values()):
            draft.lost[of] = {"dtype": draft.checkpoint.tensors[name].dtype, **row}


_BECAME = {
    "infinite": "became infinite in {}",
    "nan": "became NaN in {}",
    "cut": "were cut to 448, the largest number of {}",
}


def describe_cast_losses(lost: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return sentences about the numbers that casts could not hold, one per destination dtype and effect (infinite,
    NaN, cut).

    Args:
        lost: `Draft.lost`, {tensor: {"dtype": destination dtype, and the counts of `CastLosses`}}.
    """
    out = []
    for kind, became in _BECAME.items():
        for dtype in dict.fromkeys(row["dtype"] for row in lost.values()):
            counts = {n: row[kind] for n, row in lost.items() if row["dtype"] == dtype and row[kind]}
            if counts:
                numbers, tensors = sum(counts.values()), len(counts)
                out.append(
                    f"{count_noun(numbers, 'number')} of {count_noun(tensors, 'tensor')} "
                    f"{became.format(dtype)}, first in {next(iter(counts))}"
                )
    return out


class Scatter:
    """Digests tensors of a draft and hands their bytes on, chunk by chunk; what happens to them there is up to
    subclasses.

    `digests` {tensor: BLAKE3 in hex} of those that are done; `crcs` {file: chunks written to it, in order}; `lost`
    {tensor: what its cast could not hold}, of those that lost something.
    """

    def __init__(self, draft: Draft) -> None:
        """Start without digests, CRC32s and losses.

        Args:
            draft: the plan of the destination's files, with the tensors that are written to them.
        """
        self.draft = draft
        self.digests: dict[str, str] = {}
        self.lost: dict[str, CastLosses] = {}
        self.crcs: dict[int, list[Written]] = {}
        self.needs_crcs = draft.after is not None or draft.tail is not None
        self.averages = Averages(draft.averages)

    def end_tensor(self, name: str) -> None:
        """Handle the end of a tensor: a hook that is called after its last block was passed on, and by default does
        nothing."""

    def write(self, row: ChunkRow, data: memoryview) -> None:
        """Write the next bytes of a chunk; subclasses implement it."""
        raise NotImplementedError

    def begin(self, name: str, entry: TensorEntry, row: ChunkRow) -> None:
        """Prepare a chunk of tensor `name`; it is called before the first bytes of the chunk."""
        raise NotImplementedError

    def end(self, name: str, entry: TensorEntry, row: ChunkRow) -> None:
        """Complete a chunk of tensor `name`; it is called after its last bytes, when it is in `crcs`."""
        raise NotImplementedError

    def blocks(self, reader: Reader, names: Iterable[str], sources: Mapping[str, TensorEntry]) -> Iterator[Block]:
        """Digest tensors and pass their bytes to `write`, chunk by chunk; yield each block after that.

        Args:
            reader: reads the source.
            names: the tensors of the draft, in this order.
            sources: {tensor of the draft: the tensor whose bytes are read}.

        Raises:
            Corrupt: an average of squares is below 0, or bytes do not have the CRC32 that the source carries.
        """
        tensors = self.draft.checkpoint.tensors
        plan: list[ChunkRow] = []
        hasher: blake3 | None = None
        name = ""
        jobs = [StreamJob(n, sources[n], tensors[n].dtype, boxed=not _has_flat_chunks(tensors[n])) for n in names]
        for block in reader.blocks(jobs, checked=False):
            if block.name != name or hasher is None:
                name, hasher = block.name, blake3()
                plan = _list_chunk_rows(tensors[name])
            if block.count and plan[-1].first is not None:
                self._copy_ranges(name, tensors[name], plan, block, hasher)
            else:
                for piece, _ in block.pieces(0, len(block.data)):
                    hasher.update(piece)
                self._copy_boxes(name, tensors[name], plan, block)
            if block.lost != NOTHING:
                self.lost[name] = self.lost.get(name, NOTHING).plus(block.lost)
            if self.averages.add(name, tensors[name].dtype, block.first, block.data):
                raise Corrupt(
                    f"{describe_negative_averages(self.averages.found, sources)}, or use "
                    f"{argument('allow_mixed_steps', True)} "
                    "to copy it as it is.",
                    code="CKPT0415",
                )
            if block.last:
                self.digests[name] = hasher.hexdigest()
                hasher = None
                self.end_tensor(name)
            yield block

    def _copy_ranges(self, name: str, entry: TensorEntry, plan: list[ChunkRow], block: Block, hasher: blake3) -> None:
        """Digest a block and write it, piece by piece, to chunks that are contiguous ranges of the flattened tensor.

        `plan` holds the tensor's unfinished chunks, the last one first; finished chunks are removed from it.
        """
        item = ITEMSIZE[entry.dtype]
        at, end = block.first, block.first + block.count
        while at < end:
            row = plan[-1]
            assert row.first is not None
            if row.first + row.done != at:
                raise AssertionError(f"{name} row {row.row}: element {row.first + row.done} was due, not {at}")
            n = min(end - at, row.count - row.done)
            if row.done == 0:
                self.begin(name, entry, row)
            a = (at - block.first) * item
            for piece, crc in block.pieces(a, a + n * item):
                hasher.update(piece)
                self.write(row, piece)
                if self.needs_crcs:
                    row.crc = crc32(piece, row.crc) if crc is None else crc32_combine(row.crc, crc, len(piece))
            at += n
            row.done += n
            if row.done == row.count:
                self._end_chunk(name, entry, row)
                plan.pop()

    def _copy_boxes(self, name: str, entry: TensorEntry, plan: list[ChunkRow], block: Block) -> None:
        """Write the part of the slab in `block` that each chunk in `plan`, a box of the tensor, contains. The caller
        computes the digest."""
        item = ITEMSIZE[entry.dtype]
        if block.count == 0:
            for r in reversed(plan):
                self.begin(name, entry, r)
                self._end_chunk(name, entry, r)
            return
        for r in reversed(plan):
            both = boxes.intersect((r.start, r.shape), (block.start, block.shape))
            if both is None:
                continue
            part = _extract_box(block, both, item)
            if r.done == 0:
                self.begin(name, entry, r)
            self.write(r, part)
            if self.needs_crcs:
                r.crc = crc32(part, r.crc)
            r.done += prod(both[1])
            if r.done == r.count:
                self._end_chunk(name, entry, r)

    def _end_chunk(self, name: str, entry: TensorEntry, row: ChunkRow) -> None:
        """Note the CRC32 of a chunk in `crcs`, and call `end`."""
        self.crcs.setdefault(row.file, []).append((name, row.row, row.crc))
        self.end(name, entry, row)


class _Filling(Scatter):
    """One run of `fill`."""

    def __init__(
        self,
        draft: Draft,
        source: Source,
        files: list[str],
        records: Records,
        destination: Destination,
        budget: IOBudget,
    ) -> None:
        """Prepare to write the files of a draft; nothing is read or written yet.

        Args:
            draft: the plan of the destination's files.
            source, files: the source, and its files; the file numbers of chunks are indices into this list.
            records: byte ranges of these files with known CRC32s, checked as they are read.
            destination: where to write; its `earlier` says what an interrupted run left there.
            budget: number of threads, and size of the buffers.
        """
        super().__init__(draft)
        self.source, self.destination, self.budget = source, destination, budget
        self.files, self.records = files, records
        tensors = draft.checkpoint.tensors
        self.names = list(tensors)
        self.writer = WriterPool(budget)
        self.crcs = {i: [] for i in range(len(draft.files))}
        self.earlier = destination.earlier
        self.again = self.earlier.done > 0  # what is appended is there already
        self.outs: dict[int, DestinationFile] = {}
        self.left: dict[int, int] = {}  # chunks that are still to come, by file
        for name in self.names:
            for file in tensors[name].chunks.file if name not in draft.aliases else ():
                self.left[file] = self.left.get(file, 0) + 1
        self.ended: list[int] = []  # files whose last chunk has come, still open
        self.closed: set[int] = set()
        self.fresh_digests: dict[str, str] = {}
        self.noted, self.last_note = 0, time.monotonic()

    def open_out(self, file: int) -> DestinationFile:
        """Return the output of a file of the draft, given by its number; at the first call, it is opened and its first
        bytes are appended."""
        if file not in self.outs:
            f = self.draft.files[file]
            out = raw = self.destination.open_file(f.name, self.writer, self.again)
            if f.coded:
                earlier = EarlierFile(self.earlier.sinks.get(file, {}), raw.read_earlier) if self.again else None
                out = _CodedFile(raw, f.coded(raw.append, self.budget.threads, earlier))
            self.outs[file] = out
            out.append(f.first_bytes())
        return self.outs[file]

    def run(self, progress: Progress) -> dict[str, str]:
        """Copy all tensors and finish all files; returns {tensor: BLAKE3 hex digest}.

        Args:
            progress: called with ("copy" or "reread", bytes done, bytes in all).

        Raises:
            Altered: what an interrupted run left is not what it had written.
            Corrupt, SourceChanged: the source is damaged, or was written to meanwhile.
            NoSpace, CkpttoolError: the destination could not be written.
        """
        sources, done = self.draft.sources, self.earlier.done
        if done > len(self.names):
            raise Altered(self.destination.location)
        reader = None
        if self.again:
            reader = self._redigest_finished_tensors(self.names[:done], progress)
            self.again = False
            for out in self.outs.values():
                out.start_writing()
        reader = reader or Reader(self.source, self.files, self.records, self.budget)
        todo = [n for n in self.names[done:] if n not in self.draft.aliases]
        total = sum(sources[n].nbytes for n in self.names if n not in self.draft.aliases)
        passed = self.noted = total - sum(sources[n].nbytes for n in todo)
        for block in self.blocks(reader, todo, sources):
            passed += block.source_bytes
            progress("copy", passed, total)
            if block.last:
                self._journal_if_due(block.name, passed)
        reader.finish()
        for name, other in self.draft.aliases.items():
            self.digests[name] = self.digests[other]
        self._finish_files([i for i in range(len(self.draft.files)) if i not in self.closed])
        return self.digests

    def _redigest_finished_tensors(self, names: list[str], progress: Progress) -> Reader | None:
        """Digest again the tensors that an earlier, interrupted run finished, without writing them.

        They are read from the source; where the source is remote and the earlier run's files can be read, from those
        files.

        Args:
            names: the tensors that the earlier run finished.
            progress: called with ("reread", bytes done, bytes in all).

        Returns:
            The reader of the source, which can continue with the next tensor; None where the earlier run's files were
                read.

        Raises:
            Altered: the earlier run's files are not what its journal says.
        """
        tensors, sources = self.draft.checkpoint.tensors, self.draft.sources
        names = [n for n in names if n not in self.draft.aliases]
        coded = any(f.coded for f in self.draft.files)  # what lies in such a file cannot be read by offset
        built = self.destination.readable_path if self.source.is_remote and not coded else None
        here = built is not None
        if built is not None:
            folder = built if os.path.isdir(built) else os.path.dirname(built)
            reader = Reader(Source(folder), [f.name for f in self.draft.files], None, self.budget)
            sources = tensors
        else:
            reader = Reader(self.source, self.files, self.records, self.budget)
        total, passed = sum(sources[n].nbytes for n in names), 0
        try:
            for block in self.blocks(reader, names, sources):
                passed += block.source_bytes
                progress("reread", passed, total)
                if here and block.last and self.digests[block.name] != self.earlier.digests.get(block.name):
                    raise Altered(self.destination.location)
            self.lost |= {n: CastLosses(*counts) for n, counts in self.earlier.lost.items() if here}
        except Corrupt:
            if here:
                raise Altered(self.destination.location) from None
            raise
        finally:
            if here:
                reader.source.close()
        return None if here else reader

    def _journal_if_due(self, name: str, passed: int) -> None:
        """Write a journal line after tensor `name` if enough bytes or seconds have passed since the last one.

        Args:
            passed: how many bytes of the source have been read so far.
        """
        now = time.monotonic()
        due = passed - self.noted >= _JOURNAL_BYTES or (
            passed > self.noted and now - self.last_note >= _JOURNAL_SECONDS
        )
        coded = [o.sink for o in self.outs.values() if isinstance(o, _CodedFile)]
        if due and self.destination.resumable and all(sink.resumable() for sink in coded):
            self._write_journal_line(self.names.index(name, self.earlier.done) + 1)
            self.noted, self.last_note = passed, now

    def end_tensor(self, name: str) -> None:
        """Note the digest of the tensor `name` for the journal; finish complete files if as many are open as are
        allowed."""
        self.fresh_digests[name] = self.digests[name]
        if len(self.ended) >= self.destination.max_open_finished:
            self._finish_files(self.ended)
            self.ended.clear()

    def write(self, row: ChunkRow, data: memoryview) -> None:
        """Append the next bytes of a chunk to its file, or skip them if an interrupted run has written them already."""
        out = self.open_out(row.file)
        out.skip(data) if self.again else out.append(data)

    def begin(self, name: str, entry: TensorEntry, row: ChunkRow) -> None:
        """Append what the layout puts in front of a chunk of the tensor `name`, such as the header of an item.

        Raises:
            AssertionError: the chunk would not begin at the offset that the draft planned.
        """
        out = self.open_out(row.file)
        if self.draft.before:
            out.append(self.draft.before(name, entry, row.row, self.crcs[row.file]))
        if out.at != row.offset:
            raise AssertionError(f"{name} row {row.row}: at byte {out.at} of {out.path}, planned {row.offset}")

    def end(self, name: str, entry: TensorEntry, row: ChunkRow) -> None:
        """Append what the layout puts behind a chunk of the tensor `name`, and note the file as ended if it was its
        last chunk."""
        if self.draft.after:
            self.open_out(row.file).append(self.draft.after(name, entry, row.row, self.crcs[row.file]))
        self.left[row.file] -= 1
        if not self.left[row.file]:
            self.ended.append(row.file)

    def _write_journal_line(self, done: int) -> None:
        """Make the first `done` tensors durable on the disk, then write a journal line that says so."""
        self._flush_writes()
        for out in self.outs.values():
            out.sync()
        entry: dict[str, Any] = {"done": done}
        if self.source.is_remote:
            entry["digests"] = self.fresh_digests
            entry["lost"] = {n: self.lost[n] for n in self.fresh_digests if n in self.lost}
        if sinks := {i: o.sink.state() for i, o in self.outs.items() if isinstance(o, _CodedFile)}:
            entry["sinks"] = sinks
        self.destination.append_journal(entry)
        self.fresh_digests = {}

    def _flush_writes(self) -> None:
        """Wait until everything that was appended is written."""
        for out in self.outs.values():
            out.flush()
        self.writer.drain()

    def _finish_files(self, files: list[int]) -> None:
        """Finish files, given by number, in that order: write the heads of files without chunks, write tails, truncate,
        fsync and close."""
        for i in files:
            f, out = self.draft.files[i], self.open_out(i)
            if self.again:
                out.start_writing()
            if self.draft.tail:
                out.append(self.draft.tail(i, self.crcs[i], self.digests))
            out.end()
            self.writer.drain()
            out.finish()
            f.size = out.size
            out.close()
            del self.outs[i]
            self.closed.add(i)

    def close(self) -> None:
        """Stop the writer and close the files; nothing is written afterwards."""
        self.writer.pool.shutdown(wait=True, cancel_futures=True)
        for out in self.outs.values():
            out.close()


class ChunkRow:
    """A chunk of the destination while it is filled."""

    __slots__ = ("count", "crc", "done", "file", "first", "offset", "row", "shape", "start")

    def __init__(self, row: int, entry: TensorEntry, box: tuple[tuple[int, ...], tuple[int, ...]], flat: bool) -> None:
        """Make the row of a chunk of which no byte is written yet.

        Args:
            row: number of the chunk in `entry`.
            entry: the tensor's entry in the index of the destination.
            box: (start, shape) of the chunk in the tensor.
            flat: whether the chunk is a contiguous range of the flattened tensor; `first` is then its first flat index,
                otherwise None.
        """
        c = entry.chunks
        self.row, self.file, self.offset = row, c.file[row], c.offset[row]
        self.start, self.shape = box
        self.count = prod(self.shape)
        self.first = boxes.flat_start(entry.shape, self.start) if flat else None
        self.done = self.crc = 0


def _has_flat_chunks(entry: TensorEntry) -> bool:
    """Tell whether every chunk is a range of the flattened tensor."""
    c = entry.chunks
    return c.rows_in_order() is not None or all(boxes.box_is_flat(entry.shape, k.start, k.shape) for k in c)


def _list_chunk_rows(entry: TensorEntry) -> list[ChunkRow]:
    """List the chunks of a tensor to fill, the last one first. They are in the order of the elements if each is a
    contiguous range of the flattened tensor, else in the order of the index."""
    flat = _has_flat_chunks(entry)
    rows = [ChunkRow(k, entry, box, flat) for k, box in enumerate(entry.chunks.boxes())]
    if entry.numel:
        rows = [r for r in rows if r.count]
    return sorted(rows, key=lambda r: r.first or 0)[::-1] if flat else rows[::-1]


def _extract_box(block: Block, box: tuple[tuple[int, ...], tuple[int, ...]], item: int) -> memoryview:
    """Return the row-major bytes of a box (start, shape) of the tensor, taken from the slab in `block`; `item` is the
    size of an element in bytes."""
    at = tuple(a - b for a, b in zip(box[0], block.start, strict=True))
    if boxes.box_is_flat(block.shape, at, box[1]):
        a = boxes.flat_start(block.shape, at) * item
        return block.data[a : a + prod(box[1]) * item]
    import numpy as np

    kind = bits_dtype(item)
    whole = np.frombuffer(block.data, dtype=kind).reshape(block.shape)
    part = np.ascontiguousarray(whole[tuple(slice(s, s + k) for s, k in zip(at, box[1], strict=True))])
    return memoryview(part.reshape(-1).view("u1").data)
