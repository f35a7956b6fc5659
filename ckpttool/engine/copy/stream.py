"""Tensors as streams: the bytes of each tensor in row-major order, in blocks, read ahead, in constant memory.

    for block in Reader(source, ckpt.files, ckpt.records).blocks([StreamJob(name, entry, "bfloat16"), ...]):
        block.data       memoryview of elements [block.first, block.first + block.count) of tensor block.name

A block's data is valid until the next block is asked for.

What drives it: a generator of block plans (block_plans.py), in the order the caller wants the tensors. One thread runs
ahead and reads; the caller hashes, compares or copies. What bounds memory: a fixed pool of buffers, allocated once;
reading waits for a free one.

Reads of 256 KiB and more bypass the page cache (O_DIRECT, into 2 MiB-aligned huge pages: a sixth of the CPU time of
buffered reads on the machines of the README's table) unless the pages are there already (RWF_NOWAIT asks without
waiting). Where the file system knows neither, plain reads do.

CRC32s that the source carries are compared with the bytes as they are read (record_crcs.py).
"""

from __future__ import annotations

import errno
import itertools
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ...errors import Corrupt
from ...index import boxes
from ...index.checkpoint import ITEMSIZE, Checkpoint, Chunk, TensorEntry
from ...index.records import Record, Records
from ...storage.buffers import ALIGN, DEFAULT_BUDGET, BufferPool, IOBudget, Lease
from ...storage.source import Source, read_error
from .block_plans import BlockPlan, StreamJob, plan_blocks
from .dtypes import NOTHING, CastLosses, bits_dtype, cast
from .record_crcs import CrcMismatch, CrcVerifier
from .zstd_frames import ZstdDecoder

if TYPE_CHECKING:
    from concurrent.futures import Future

    from .dtypes import Array

__all__ = ["Block", "Reader", "StreamJob", "pair_stream_pieces", "read_small_tensors"]

_DIRECT = getattr(os, "O_DIRECT", 0)
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_SMALL = 256 << 10  # below this a read through the page cache is cheaper: neighbours come with it
_PIECE = 256 << 10  # stays in the cache while CRC, digest and copy pass over it
_BATCH = 512
_TINY, _WINDOW, _WINDOWS = 1024, 32 << 10, 512  # tiny pieces of a file, one after the other, are read many at a time
_GAP, _FAR_GAP = 4096, 256 << 10  # unwanted bytes that are read rather than with another call: local, remote


@dataclass(slots=True)
class Block:
    """Elements [first, first + count) of a tensor, row-major; a slab (`start`, `shape`) where the job was boxed.

    `data` is valid until the next block of the stream is asked for, or the stream is closed. Of an unchecked block it
    may be used as `pieces` hands it out.
    """

    name: str
    first: int
    count: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    data: memoryview
    crc: int | None  # CRC32 of `data`, where reading it has needed it
    last: bool
    source_bytes: int
    _lease: Lease
    _unchecked: tuple[Reader, int, int] | None = None  # (reader, file, offset) of bytes whose CRC is still to be taken
    lost: CastLosses = NOTHING  # what the cast of these elements could not hold

    def pieces(self, begin: int, end: int) -> Iterator[tuple[memoryview, int | None]]:
        """Yield bytes [begin, end) of `data` as (bytes, their CRC32); the CRC32 is None where it was not computed.

        The bytes of an unchecked block come in pieces that fit into the CPU cache, and are compared with the source's
        CRC32s.

        Raises:
            Corrupt: the bytes do not match the CRC32 that the source carries.
        """
        if self._unchecked is None:
            whole = begin == 0 and end == len(self.data)
            yield (self.data, self.crc) if whole else (self.data[begin:end], None)
            return
        reader, file, offset = self._unchecked
        for at in range(begin, end, _PIECE):
            piece = self.data[at : min(at + _PIECE, end)]
            yield piece, reader.check(file, offset + at, piece)


class Reader:
    """Streams tensors of one source.

    Its buffers, three and three more for each thread, are all the memory it takes.

    Args:
        records: byte ranges whose CRC32s are compared with the bytes as they are read; None compares nothing.
    """

    def __init__(
        self,
        source: Source,
        files: Sequence[str],
        records: Records | None = None,
        budget: IOBudget = DEFAULT_BUDGET,
    ) -> None:
        """Prepare to read tensors.

        Args:
            source, files: the source, and its files; the file numbers of chunks are indices into this list.
            records: byte ranges whose CRC32s are compared with the bytes as they are read; None compares nothing.
            budget: number of threads, and size of the buffers.
        """
        self.source, self.files = source, files
        self.crcs = CrcVerifier(records or Records())
        self.block_bytes = budget.buffer_bytes - 2 * ALIGN  # an aligned read takes in up to a page before and after
        self._threads = budget.reader_threads(source)
        # blocks that are read or wait; more would have left the cache when their turn comes
        self._ahead = max(1, self._threads)
        self._pool = BufferPool(3 + 3 * self._threads, budget.buffer_bytes)
        self._gap = _FAR_GAP if source.is_remote else _GAP
        self._no_direct = False
        self._cold: dict[int, int] = {}  # file -> reads for which the page cache is not asked
        self._decoders: dict[tuple[str, int], ZstdDecoder] = {}
        self._plain = type(source) is Source
        #: {file: (end of the last read, offset of its window, the window)}, a row for each thread that reads
        self._windows: dict[int, tuple[tuple[int, int, bytes], ...]] = {}
        self._windows_held = 0  # rows with a window

    def blocks(self, jobs: Iterable[StreamJob], first: int = 0, *, checked: bool = True) -> Generator[Block]:
        """Yield the blocks of tensors, in the order of `jobs`.

        Args:
            first: blocks before this element of the first tensor are not read, unless its chunks are compressed.
            checked: whether to compare the bytes of each block with the source's CRC32s before it is yielded. If False,
                the caller has to iterate over `Block.pieces` of every block, which compares them piece by piece.

        Raises:
            Corrupt: bytes are missing or do not match the CRC32 the source carries.
            SourceChanged: a file became shorter while it was read.
        """
        listed = list(jobs)
        to_read = plan_blocks(listed, self.block_bytes)
        if first and not listed[0].entry.chunks.zstd:
            to_read = (p for p in to_read if p.job is not listed[0] or p.first + p.count > first)
        batches = self._group_plans(to_read)
        waiting: deque[Future[list[Block]]] = deque()
        compressed = any(job.entry.chunks.zstd for job in listed)  # a frame is decompressed in order only
        threads = min(1, self._threads) if compressed else self._threads
        from ...storage.threads import make_executor

        with make_executor(threads, "ckpttool-read") as pool:
            try:
                while True:
                    while len(waiting) < self._ahead and (batch := next(batches, None)) is not None:
                        waiting.append(pool.submit(self._load_batch, batch))
                    if not waiting:
                        return
                    yield from self._yield_blocks(waiting.popleft().result(), checked)
            finally:
                for read in [w for w in waiting if not w.cancel()]:
                    if read.exception() is None:
                        for block in read.result():
                            block._lease.end()

    def read(self, jobs: Sequence[StreamJob]) -> Array:
        """Read tensors and return one uint8 array with their bytes, one tensor after the other.

        Raises:
            Corrupt, SourceChanged: as `blocks`.
        """
        import numpy as np

        out, at = np.empty(sum(job.entry.nbytes for job in jobs), "u1"), 0
        for block in self.blocks(jobs):
            out[at : at + len(block.data)] = block.data
            at += len(block.data)
        return out

    def _group_plans(self, plans: Iterator[BlockPlan]) -> Iterator[list[BlockPlan]]:
        """Yield groups of block plans that are read into one buffer: small blocks together, since passing each on
        separately costs more than reading it, and each larger block alone."""
        batch: list[BlockPlan] = []
        total = 0
        for plan in plans:
            n = plan.count * ITEMSIZE[plan.job.entry.dtype]
            small = n <= _SMALL and plan.one and plan.job.dtype == plan.job.entry.dtype
            if self.source.is_remote:  # where each read is a round trip
                c = plan.job.entry.chunks
                small = not c.strides and not c.zstd and plan.job.dtype == plan.job.entry.dtype
            if batch and (not small or total + n > self.block_bytes or len(batch) == _BATCH):
                yield batch
                batch, total = [], 0
            if small:
                batch.append(plan)
                total += n
            else:
                yield [plan]
        if batch:
            yield batch

    def _load_batch(self, batch: list[BlockPlan]) -> list[Block]:
        """Read a group of blocks into one buffer. Ranges that are close to each other in a file are read with one call,
        together with the bytes between them (item headers).

        Raises:
            Corrupt: bytes are missing or do not match the CRC32 that the source carries.
        """
        if len(batch) == 1:
            return [self._load_block(batch[0])]
        if self.source.is_remote:
            return self._load_from_store(batch)
        buffer = self._pool.free.get()
        lease = Lease(self._pool, buffer, len(batch))
        out: list[Block] = []
        wanted = [self._locate_in_file(plan) for plan in batch]
        room = len(buffer) - sum(n for _, _, n in wanted)  # what may be spent on bytes between neighbours
        at = i = 0
        while i < len(batch):
            file, offset, n = wanted[i]
            end, j = offset + n, i + 1
            while j < len(batch) and wanted[j][0] == file and 0 <= wanted[j][1] - end <= min(self._gap, room):
                room -= wanted[j][1] - end
                end = wanted[j][1] + wanted[j][2]
                j += 1
            into = buffer[at : at + end - offset]
            if end - offset > _TINY or not self._fill_from_window(file, offset, into):
                self._read_raw(self.files[file], file, offset, end - offset, into, large=False)
            for plan, (_, a, k) in zip(batch[i:j], wanted[i:j], strict=True):
                data = buffer[at + a - offset : at + a - offset + k]
                crc = self.check(file, a, data)
                where = (plan.first, plan.count, plan.start, plan.shape)
                out.append(Block(plan.job.name, *where, data, crc, plan.last, k, lease))
            at += end - offset
            i = j
        return out

    def _load_from_store(self, batch: list[BlockPlan]) -> list[Block]:
        """Read a group of blocks from a remote store into one buffer. Ranges that are close to each other in a file are
        read with one request, even if they belong to different blocks.

        Raises:
            Corrupt: bytes are missing or do not match the CRC32 that the source carries.
        """
        # (file, offset, bytes, number of the plan, part of the plan; None is all of it)
        places: list[tuple[int, int, int, int, tuple[int, tuple[int, ...], tuple[int, ...]] | None]] = []
        for number, plan in enumerate(batch):
            if plan.one:
                places.append((*self._locate_in_file(plan), number, None))
                continue
            e = plan.job.entry
            for part in plan.parts:
                chunk = e.chunks[part[0]]
                inside = tuple(a - b for a, b in zip(part[1], chunk.start, strict=True))
                at = chunk.extent.offset + boxes.flat_start(chunk.shape, inside) * ITEMSIZE[e.dtype]
                places.append((chunk.extent.file, at, prod(part[2]) * ITEMSIZE[e.dtype], number, part))
        places.sort(key=lambda place: place[:2])
        buffer, spare = self._pool.free.get(), self._pool.free.get()
        crcs: list[int | None] = [None] * len(batch)
        try:
            ends = list(itertools.accumulate(plan.count * ITEMSIZE[plan.job.entry.dtype] for plan in batch))
            out = [buffer[a:b] for a, b in zip([0, *ends], ends, strict=False)]
            i = 0
            while i < len(places):
                file, offset, n, *_ = places[i]
                end, j = offset + n, i + 1
                while j < len(places) and places[j][0] == file and places[j][1] - end <= self._gap:
                    if max(end, places[j][1] + places[j][2]) - offset > len(spare):
                        break
                    end, j = max(end, places[j][1] + places[j][2]), j + 1
                self.source.readinto(self.files[file], offset, spare[: end - offset])
                for _, at, n, number, place in places[i:j]:
                    got = spare[at - offset : at - offset + n]
                    crc = self.check(file, at, got)
                    crcs[number] = crc if place is None else None
                    _put_into_slab(batch[number], place, got, out[number])
                i = j
        finally:
            self._pool.free.put(spare)
        lease = Lease(self._pool, buffer, len(batch))
        return [
            Block(p.job.name, p.first, p.count, p.start, p.shape, data, crc, p.last, len(data), lease)
            for p, data, crc in zip(batch, out, crcs, strict=True)
        ]

    def _fill_from_window(self, file: int, offset: int, into: memoryview) -> bool:
        """Fill `into` with bytes of a file from a window, a larger range of the file that is kept in memory; read a new
        window where small reads follow each other.

        Args:
            file: the file's number.
            offset: offset of the bytes in the file.

        Returns:
            Whether `into` was filled; False where a window does not pay, and nothing was read.
        """
        if not self._plain:
            return False
        n, follows = len(into), None
        # Each thread reads pieces of a batch of its own, in their order: with one window for all of them, each would
        # replace what the other one is about to need.
        rows = self._windows.get(file, ())
        for row in rows:
            end, at, window = row
            if at <= offset <= offset + n <= at + len(window):
                into[:] = window[offset - at : offset - at + n]
                return True
            if 0 <= offset - end < _WINDOW // 4:
                follows = row
        found = (offset + n, 0, b"")
        if follows is not None:
            if not follows[2] and self._windows_held >= _WINDOWS:
                return False
            name = self.files[file]
            window = self.source.read(name, offset, max(n, min(_WINDOW, self.source.size(name) - offset)))
            found = (offset + len(window), offset, window)
            into[:] = window[:n]
        others = [row for row in rows if row is not follows]
        self._windows[file] = (*others[max(0, len(others) + 1 - self._ahead) :], found)
        self._windows_held += sum(bool(row[2]) for row in self._windows[file]) - sum(bool(row[2]) for row in rows)
        return follows is not None

    def _locate_in_file(self, plan: BlockPlan) -> tuple[int, int, int]:
        """Return (file number, offset, length in bytes) of a block that is one contiguous part of one chunk."""
        e = plan.job.entry
        item = ITEMSIZE[e.dtype]
        row = plan.parts[0][0]
        inside = plan.first if plan.job.boxed else plan.start[0]
        return e.chunks.file[row], e.chunks.offset[row] + inside * item, plan.count * item

    def _load_block(self, plan: BlockPlan) -> Block:
        """Read a block: assemble it from its chunks and cast it to the dtype of its job.

        Raises:
            Corrupt: bytes are missing, damaged, or do not match the CRC32 that the source carries.
        """
        e = plan.job.entry
        item = ITEMSIZE[e.dtype]
        n = plan.count * item
        crc, lost = None, NOTHING
        if plan.one:
            buffer = self._pool.free.get()
            file, offset, _ = self._locate_in_file(plan)
            data = self._read_raw(self.files[file], file, offset, n, buffer)
            if plan.job.dtype == e.dtype:
                where = (plan.first, plan.count, plan.start, plan.shape)
                lease = Lease(self._pool, buffer, 1)
                return Block(plan.job.name, *where, data, None, plan.last, n, lease, (self, file, offset))
            self.check(file, offset, data)
        else:
            buffer = self._pool.free.get()
            data = buffer[:n]
            for row, start, shape in plan.parts:
                self._read_into_slab(e, row, start, shape, plan, data, item)
        if plan.job.dtype != e.dtype and n:
            other = self._pool.free.get()
            size = plan.count * ITEMSIZE[plan.job.dtype]
            lost = cast(data, e.dtype, other[:size], plan.job.dtype)
            self._pool.free.put(buffer)
            buffer, data, crc = other, other[:size], None
        lease = Lease(self._pool, buffer, 1)
        where = (plan.first, plan.count, plan.start, plan.shape)
        return Block(plan.job.name, *where, data, crc, plan.last, n, lease, lost=lost)

    def _read_into_slab(
        self,
        e: TensorEntry,
        row: int,
        start: tuple[int, ...],
        shape: tuple[int, ...],
        plan: BlockPlan,
        data: memoryview,
        item: int,
    ) -> None:
        """Read one chunk's part of a slab and copy it to its place in the slab.

        Args:
            e: the tensor's index entry.
            row: the number of the chunk.
            start, shape: the intersection of the chunk and the slab, a box of the tensor.
            plan: the slab.
            data: the slab's bytes, which are written to.
            item: size of an element in bytes.
        """
        chunk: Chunk = e.chunks[row]
        inside = tuple(a - b for a, b in zip(start, chunk.start, strict=True))
        at = tuple(a - b for a, b in zip(start, plan.start, strict=True))
        n = prod(shape) * item
        if chunk.strides is not None:
            import numpy as np

            target = np.frombuffer(data, dtype=f"V{item}").reshape(plan.shape)
            place = target[tuple(slice(a, a + k) for a, k in zip(at, shape, strict=True))]
            first = sum(i * s for i, s in zip(inside, chunk.strides, strict=True))
            self._read_strided(chunk.extent.file, chunk.extent.offset, first, shape, chunk.strides, place, item)
            return
        spare = self._pool.free.get()
        try:
            if chunk.zstd is not None:
                got = self._get_decoder(chunk).take(spare[:n])
                if boxes.flat_start(chunk.shape, inside) + prod(shape) == prod(chunk.shape):
                    self._decoders.pop((self.files[chunk.extent.file], chunk.extent.offset)).close()
            else:
                offset = chunk.extent.offset + boxes.flat_start(chunk.shape, inside) * item
                got, _ = self._read_checked(chunk.extent.file, offset, n, spare)
            if boxes.box_is_flat(plan.shape, at, shape):
                a = boxes.flat_start(plan.shape, at) * item
                data[a : a + n] = got
            else:
                _put_into_slab(plan, (row, start, shape), got, data)
        finally:
            self._pool.free.put(spare)

    def _read_strided(
        self, file: int, base: int, first: int, shape: Sequence[int], strides: Sequence[int], place: Any, item: int
    ) -> None:
        """Read a strided box into `place`: its whole span when few bytes of it are unneeded, else in two halves along
        its widest dimension, recursively.

        Args:
            file: the file's number.
            base: offset of the chunk in the file, in bytes.
            first: the box's first element, counted in elements from `base`.
            shape, strides: of the box, in elements.
            place: the numpy array that is filled.
            item: size of an element in bytes.
        """
        import numpy as np

        span = boxes.span(shape, strides) * item
        if span <= min(self.block_bytes, 4 * max(prod(shape) * item, ALIGN)):
            spare = self._pool.free.get()
            raw, _ = self._read_checked(file, base + first * item, span, spare)
            view = np.lib.stride_tricks.as_strided(
                np.frombuffer(raw, dtype=f"V{item}"), tuple(shape), tuple(s * item for s in strides), writeable=False
            )
            place[...] = view
            del view, raw
            self._pool.free.put(spare)
            return
        d = max((i for i, n in enumerate(shape) if n > 1), key=lambda i: strides[i] * (shape[i] - 1))
        half = shape[d] // 2
        for a, b in ((0, half), (half, shape[d])):
            part = tuple(b - a if i == d else n for i, n in enumerate(shape))
            where = tuple(slice(a, b) if i == d else slice(None) for i in range(len(shape)))
            self._read_strided(file, base, first + a * strides[d], part, strides, place[where], item)

    def _get_decoder(self, chunk: Chunk) -> ZstdDecoder:
        """Return the zstd decoder of a compressed chunk; the first call creates it, and later calls return the same
        one, which continues where the last read ended."""
        name = self.files[chunk.extent.file]
        key = (name, chunk.extent.offset)
        if key not in self._decoders:
            what = f"{name} at byte {chunk.extent.offset}"
            assert chunk.zstd is not None
            self._decoders[key] = ZstdDecoder(self.source, name, chunk.extent, *chunk.zstd, what)
        return self._decoders[key]

    def _read_checked(self, file: int, offset: int, n: int, buffer: memoryview) -> tuple[memoryview, int | None]:
        """Read exactly `n` bytes of a file, given by its number, into the buffer, and check them against the source's
        CRC32s.

        Returns:
            (the bytes, a part of the buffer; their CRC32, or None where no record holds them).
        """
        name = self.files[file]
        data = self._read_raw(name, file, offset, n, buffer)
        return data, self.check(file, offset, data)

    def _yield_blocks(self, batch: list[Block], checked: bool) -> Iterator[Block]:
        """Yield the blocks of a batch. The buffer of each is released when the next block is requested; all are
        released when the caller stops.

        Args:
            checked: whether to compare the bytes of each block with the source's CRC32s first.
        """
        left = iter(batch)
        for block in left:
            try:
                if checked:
                    for _ in block.pieces(0, len(block.data)):
                        pass
                yield block
            except BaseException:
                for other in left:
                    other._lease.end()
                raise
            finally:
                block._lease.end()

    def check(self, file: int, offset: int, data: memoryview) -> int | None:
        """Compare bytes that were read from a file with the source's CRC32s.

        Args:
            file: the file's number.
            offset: offset of the bytes in the file.
            data: the bytes.

        Returns:
            The CRC32 of `data` if it lies in one record that is not complete yet, else None.

        Raises:
            Corrupt: a record is complete now and does not have the CRC32 that the source carries.
        """
        try:
            return self.crcs.update(file, offset, data)
        except CrcMismatch as e:
            raise self._make_crc_error(*e.args) from None

    def _make_crc_error(self, record: Record, crc: int) -> Corrupt:
        """Return the error for a record whose bytes have the CRC32 `crc` instead of the stored one."""
        name = os.path.join(self.source.root, self.files[record.extent.file])
        error = Corrupt(
            f"{name}: bytes {record.extent.offset}..{record.extent.offset + record.extent.length} have CRC32 "
            f"{crc:08x}, the file itself says {record.crc32:08x}. They were damaged after they were written; "
            "fetch the file again or take another copy.",
            code="CKPT0405",
        )
        error.wrong_bytes = self.files[record.extent.file]
        return error

    def _read_raw(
        self, name: str, file: int, offset: int, n: int, buffer: memoryview, large: bool = True
    ) -> memoryview:
        """Read exactly `n` bytes of a file into the buffer, and return the part of the buffer that holds them. Large
        reads go around the page cache where that is faster, unless `large` is False.

        Args:
            name, file: the file, by its name and by its number.
        """
        if n >= _SMALL and large and self.source.local:
            data = self._read_cached(name, file, offset, n, buffer)
            if data is None and _DIRECT and not self._no_direct:
                data = self._read_direct(name, offset, n, buffer)
            if data is not None:
                return data
        self.source.readinto(name, offset, buffer[:n])
        return buffer[:n]

    def _read_cached(self, name: str, file: int, offset: int, n: int, buffer: memoryview) -> memoryview | None:
        """Read `n` bytes of a file at `offset` into `buffer` if the page cache of the system contains all of them.

        After a miss, the next 32 calls for that file return None without asking the cache.

        Args:
            name, file: the file, by its name and by its number.

        Returns:
            The part of `buffer` with the bytes; None if they were not read.
        """
        if not _NOWAIT:
            return None
        if self._cold.get(file, 0) > 0:
            self._cold[file] -= 1
            return None
        try:
            with self.source.borrow_fd(name) as fd:
                if os.preadv(fd, [buffer[:n]], offset, _NOWAIT) == n:
                    return buffer[:n]
        except OSError:
            pass
        self._cold[file] = 32
        return None

    def _read_direct(self, name: str, offset: int, n: int, buffer: memoryview) -> memoryview | None:
        """Read with O_DIRECT, in whole pages, and return the part of the buffer that holds the bytes; None where that
        does not work.

        Raises:
            CkpttoolError: the disk fails.
        """
        a = offset - offset % ALIGN
        b = -(-(offset + n) // ALIGN) * ALIGN
        try:
            with self.source.borrow_fd(name, _DIRECT) as fd:
                got = os.preadv(fd, [buffer[: b - a]], a)
        except OSError as e:
            if e.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
                self._no_direct = True  # this file system has no O_DIRECT
                return None
            raise read_error(e, f"{os.path.join(self.source.root, name)}: byte {offset}") from e
        if got < offset - a + n:
            return None  # an unusual short read: read again through the cache
        return buffer[offset - a : offset - a + n]

    def absorb(self, seen: Iterable[tuple[int, int, Iterable[Sequence[int]]]]) -> None:
        """Add the ranges of records that another reader of the same source has read.

        Args:
            seen: what `crcs.parts_read()` of the other reader returned: (file number, number of the record in the file,
                [(first byte, end, CRC32)]) of each record that it read in part.

        Raises:
            Corrupt: a record is complete now and does not have the CRC32 that the source carries.
        """
        try:
            self.crcs.absorb(seen)
        except CrcMismatch as e:
            raise self._make_crc_error(*e.args) from None

    def finish(self) -> None:
        """Read the missing rest of records that were read in part, so that their CRC32s are checked too.

        Raises:
            Corrupt: a record does not have the CRC32 that the source carries.
        """
        buffer = self._pool.free.get()
        for file, offset, length in self.crcs.missing_parts():
            for at in range(offset, offset + length, self.block_bytes):
                self._read_checked(file, at, min(self.block_bytes, offset + length - at), buffer)
        self._pool.free.put(buffer)


def _put_into_slab(
    plan: BlockPlan, part: tuple[int, tuple[int, ...], tuple[int, ...]] | None, got: memoryview, data: memoryview
) -> None:
    """Copy the bytes `got` of a part of a block to their place in `data`, the bytes of the whole block.

    Args:
        plan: the block, a box of a tensor.
        part: (number of the chunk that it is read from, start in the tensor, shape) of the part; None if `got` is the
            whole block.
        got: the part's bytes, row-major.
        data: the block's bytes, row-major, which get them.
    """
    if part is None:
        data[:] = got
        return
    import numpy as np

    kind = bits_dtype(ITEMSIZE[plan.job.entry.dtype])
    at = tuple(a - b for a, b in zip(part[1], plan.start, strict=True))
    target = np.frombuffer(data, dtype=kind).reshape(plan.shape)
    place = tuple(slice(a, a + n) for a, n in zip(at, part[2], strict=True))
    target[place] = np.frombuffer(got, dtype=kind).reshape(part[2])


def read_small_tensors(ckpt: Checkpoint, source: Source, names: Iterable[str]) -> dict[str, bytes]:
    """Read small tensors into memory and return {name: row-major bytes}; the records that they lie in are checked to
    their ends before.

    Raises:
        Corrupt: bytes do not have the CRC32 that the source says.
    """
    out: dict[str, bytearray] = {n: bytearray() for n in names}
    reader = Reader(source, ckpt.files, ckpt.records, IOBudget(1, 256 << 10))
    for block in reader.blocks([StreamJob(n, ckpt.tensors[n]) for n in out]):
        out[block.name] += block.data
    reader.finish()
    return {n: bytes(b) for n, b in out.items()}


def pair_stream_pieces(
    streams: Sequence[Iterator[Block]], s: TensorEntry, t: TensorEntry
) -> Iterator[tuple[int, memoryview, memoryview]]:
    """Yield the next tensor of two block streams piece by piece: (flat index of the piece's first element, its bytes in
    the first stream, its bytes in the second stream).

    Args:
        streams: two iterators of blocks, both at the first block of the tensor.
        s, t: the tensor's index entries in the first and in the second stream.
    """
    items = (ITEMSIZE[s.dtype], ITEMSIZE[t.dtype])
    blocks = [next(stream) for stream in streams]
    at = 0
    while True:
        ends = [b.first + b.count for b in blocks]
        end = min(ends)
        views = [b.data[(at - b.first) * i : (end - b.first) * i] for b, i in zip(blocks, items, strict=True)]
        if end > at:
            yield at, views[0], views[1]
        del views
        at = end
        if all(b.last and e == at for b, e in zip(blocks, ends, strict=True)):
            return
        for k in range(2):
            if ends[k] == at and not blocks[k].last:
                blocks[k] = next(streams[k])
