"""Every frame of an archive, from the first byte to the last, whatever is damaged; frame_format.py describes the
file."""

from __future__ import annotations

import re
from array import array
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from ..errors import CkpttoolError, Corrupt, RemoteError, SourceChanged
from ..formats.crc import crc32
from ..storage.source import Source
from .frame_format import (
    CRC_MAGIC,
    CRC_TAG,
    MOST_FRAME_BYTES,
    MOST_FRAMES,
    SEEK_MAGIC,
    ZSTD_MAGIC,
    FrameFault,
    FrameTable,
    decompress_frame,
    parse_crc_table,
    parse_frame_header,
    read_frame_table,
)

__all__ = ["FrameResult", "walk_file", "walk_frames"]


_MAGIC = re.compile(rb"\x28\xb5\x2f\xfd|[\x5c\x5e]\x2a\x4d\x18")
#: Blocks of one frame: zstd cuts each of its 128 KiB into less than 200.
_BLOCKS = 1 << 13
#: Blocks looked at in vain, in search of sound frames, before the rest of a file is given up.
_PATIENCE = 1 << 22


class FrameResult(NamedTuple):
    """A frame of a file, or a fault in it.

    `start` and `length` are those of its content, `offset` and `size` of its bytes; `stored` is the content, or None
    and `fault` says what is wrong. For bytes that are not a frame, `start` is -1 and `length` 0.
    """

    start: int
    length: int
    offset: int
    size: int
    stored: bytes | None
    fault: str | None


class _FrameSpan(NamedTuple):
    """A frame to check, or, with a fault, bytes that are not a frame; `raw` if they were read already."""

    offset: int
    size: int
    raw: memoryview | None
    length: int
    crc: int | None = None
    checksum: int | None = None
    fault: str | None = None


class _CheckedFrame(NamedTuple):
    length: int
    stored: bytes | None
    fault: str | None
    crc: int | None = None
    beside: str | None = None  # what is wrong with the tables


def walk_file(source: Source, file: str, jobs: int) -> Iterator[FrameResult]:
    """Yield a result for every frame of an archive file, in order; `jobs` threads decompress them.

    Damaged frames and other damage are results with a fault. If the tables at the end of the file are damaged, frames
    are found by their own headers and blocks.

    Raises:
        SourceChanged, RemoteError: the file cannot be read. Damage is never raised.
    """
    size = source.size(file)
    search: _Search | None = None
    try:
        table = read_frame_table(source, file)
        pieces = _list_spans_in_table(table, 0, len(table.offsets))
    except (SourceChanged, RemoteError):
        raise
    except CkpttoolError as e:
        search = _Search(source, file, size)
        pieces = search.spans()
        yield FrameResult(-1, 0, size, 0, None, str(e))
    crcs = array("I")
    yield from _check_spans(source, file, pieces, jobs, 0, crcs)
    if search is not None and search.crcs is not None and search.crcs != crcs:
        k = next(
            (k for k, (a, b) in enumerate(zip(search.crcs, crcs, strict=False)) if a != b),
            min(len(crcs), len(search.crcs)),
        )
        header = f"the CRC table lists {len(search.crcs)} frames, {len(crcs)} are there; they differ from number {k} on"
        yield FrameResult(-1, 0, size, 0, None, header)


def walk_frames(
    source: Source, file: str, table: FrameTable, first: int, stop: int, jobs: int
) -> Iterator[FrameResult]:
    """Yield a result for each of the frames `first` to `stop` - 1 of an archive file, in order; `jobs` threads
    decompress them.

    Damaged frames are results with a fault.

    Args:
        table: the tables at the end of the file, which must be intact.

    Raises:
        SourceChanged, RemoteError: the file cannot be read. Damage is never raised.
    """
    return _check_spans(source, file, _list_spans_in_table(table, first, stop), jobs, table.starts[first], array("I"))


def _check_spans(
    source: Source, file: str, pieces: Iterator[_FrameSpan], jobs: int, start: int, crcs: array[int]
) -> Iterator[FrameResult]:
    """Check spans of a file, and yield a result for each, in order; a wrong row of the seek table is a further result.

    Args:
        pieces: the spans: frames, and bytes that are not frames.
        jobs: number of threads.
        start: tar offset at which the content of the first frame begins.
        crcs: gets the CRC32 of each frame that could be read.
    """
    size = source.size(file)
    for piece, seen in _check_spans_in_threads(source, file, pieces, jobs):
        if seen.crc is not None:
            crcs.append(seen.crc)
        if seen.length:
            yield FrameResult(start, seen.length, piece.offset, piece.size, seen.stored, seen.fault)
            start += seen.length
        else:
            yield FrameResult(-1, 0, piece.offset, piece.size, None, seen.fault)
        if seen.beside is not None:
            yield FrameResult(-1, 0, size, 0, None, seen.beside)


def _list_spans_in_table(table: FrameTable, first: int, stop: int) -> Iterator[_FrameSpan]:
    """Yield the spans of frames `first` to `stop` - 1 in the file, as the tables list them."""
    for k in range(first, stop):
        offset = table.offsets[k]
        yield _FrameSpan(offset, table.sizes[k], None, table.lengths[k], table.crcs[k], table.checksums[k])


def _check_spans_in_threads(
    source: Source, file: str, pieces: Iterator[_FrameSpan], jobs: int
) -> Iterator[tuple[_FrameSpan, _CheckedFrame]]:
    """Check spans in `jobs` threads, and yield (span, what was found in it), in order; at most 2 * `jobs` are in
    flight.

    Raises:
        SourceChanged, RemoteError: the file cannot be read.
    """
    flying: deque[tuple[_FrameSpan, Future[_CheckedFrame]]] = deque()
    pool = ThreadPoolExecutor(jobs, "ckpttool-unfold")
    try:
        for piece in pieces:
            flying.append((piece, pool.submit(_check_span, source, file, piece)))
            if len(flying) >= 2 * jobs:
                done, future = flying.popleft()
                yield done, future.result()
        while flying:
            done, future = flying.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _check_span(source: Source, file: str, piece: _FrameSpan) -> _CheckedFrame:
    """Read, decompress and check the frame in one span; what is wrong with it is in the result.

    Raises:
        SourceChanged, RemoteError: the file cannot be read.
    """
    if piece.fault is not None:
        return _CheckedFrame(piece.length, None, piece.fault)
    raw = piece.raw
    if raw is None:
        raw = memoryview(bytearray(piece.size))
        try:
            source.readinto(file, piece.offset, raw)
        except SourceChanged:
            raise
        except Corrupt as e:
            return _CheckedFrame(piece.length, None, f"the frame cannot be read ({e})")
    crc = crc32(raw)
    try:
        data = decompress_frame(raw, piece.crc)
    except FrameFault as e:
        return _CheckedFrame(piece.length, None, str(e), crc)
    beside = None
    if len(data) != piece.length:
        beside = (
            f"the seek table has {piece.length} bytes for the frame at {piece.offset}, which decompresses to "
            f"{len(data)}"
        )
    elif piece.checksum is not None and (own := int.from_bytes(raw[-4:], "little")) != piece.checksum:
        beside = (
            f"the seek table has checksum {piece.checksum:08x} for the frame at {piece.offset}, which has {own:08x}"
        )
    return _CheckedFrame(len(data), data, None, crc, beside)


class _Search:
    """Frames found without the tables: each begins where the one before it ends, as its blocks say.

    Damaged bytes are skipped up to the next intact frame. `crcs` are those of the CRC table that was found, if one was.
    """

    def __init__(self, source: Source, file: str, size: int) -> None:
        """Prepare to search a file of `size` bytes."""
        self.source, self.file, self.size = source, file, size
        self.crcs: array[int] | None = None
        self._base, self._data = 0, memoryview(b"")
        self._steps = self._vain = 0

    def _read_bytes_at(self, at: int, length: int) -> memoryview:
        """Return `length` bytes of the file from offset `at` on, fewer at its end; valid until the next call.

        Raises:
            SourceChanged, Corrupt, RemoteError: the file cannot be read.
        """
        length = max(0, min(length, self.size - at))
        if at < self._base or at + length > self._base + len(self._data):
            want = memoryview(bytearray(min(max(length, 2 * MOST_FRAME_BYTES), self.size - at)))
            self.source.readinto(self.file, at, want)
            self._base, self._data = at, want
        return self._data[at - self._base :][:length]

    def spans(self) -> Iterator[_FrameSpan]:
        """Yield the frames of the file and the bytes between them that are not frames, from the first byte to the last.
        The tables at the end are left out.

        Raises:
            SourceChanged, RemoteError: the file cannot be read.
        """
        at = 0
        try:
            while at < self.size:
                end = self._frame_end(at)
                if end is None:
                    end = self._find_next_frame(at + 1)
                    header = (
                        parse_frame_header(self._read_bytes_at(at, 16))
                        if self._read_magic_at(at) == ZSTD_MAGIC
                        else None
                    )
                    fault = "the frame is damaged or cut off" if header else "these bytes are not a frame"
                    yield _FrameSpan(at, end - at, None, header[0] if header else 0, fault=fault)
                elif self._read_magic_at(at) == ZSTD_MAGIC:
                    frame = self._read_bytes_at(at, end - at)
                    header = parse_frame_header(frame)
                    assert header is not None
                    yield _FrameSpan(at, end - at, memoryview(bytes(frame)), header[0])
                elif not self._is_archive_table(at, end):
                    yield _FrameSpan(at, end - at, None, 0, fault="a skippable frame that is not a table of an archive")
                at = end
        except SourceChanged:
            raise
        except Corrupt as e:
            yield _FrameSpan(at, self.size - at, None, 0, fault=f"the file cannot be read from here on ({e})")

    def _read_magic_at(self, at: int) -> int:
        """Return the four bytes at a file offset as a little-endian integer."""
        return int.from_bytes(self._read_bytes_at(at, 4), "little")

    def _is_frame_boundary(self, at: int) -> bool:
        """Return whether a file offset is the end of the file, or has the first bytes of a frame."""
        magic = self._read_magic_at(at)
        return at == self.size or magic == ZSTD_MAGIC or magic >> 4 == CRC_MAGIC >> 4

    def _frame_end(self, at: int) -> int | None:
        """Return the file offset at which the frame that begins at offset `at` ends; None if no frame begins there.

        It counts as a frame if another frame or the end of the file follows, or if it is intact.
        """
        magic = self._read_magic_at(at)
        if magic == ZSTD_MAGIC:
            end = self._find_end_by_blocks(at)
        elif magic >> 4 == CRC_MAGIC >> 4 and self.size - at >= 8:
            end = at + 8 + int.from_bytes(self._read_bytes_at(at + 4, 4), "little")
        else:
            return None
        if end is None or end > self.size:
            return None
        return end if self._is_frame_boundary(end) or self._is_intact_frame(at, end) else None

    def _is_intact_frame(self, at: int, end: int) -> bool:
        """Return whether bytes `at` to `end` are an intact frame or an intact CRC table."""
        if self._read_magic_at(at) != ZSTD_MAGIC:
            self._steps += (end - at) >> 10
            return self._read_crcs_at(at, end) is not None
        frame = self._read_bytes_at(at, end - at)
        header = parse_frame_header(frame)
        self._steps += header[0] >> 10 if header else 0
        try:
            decompress_frame(frame, None)
        except FrameFault:
            return False
        return True

    def _find_end_by_blocks(self, at: int) -> int | None:
        """Return the file offset at which the zstd frame at offset `at` ends, by the lengths of its blocks; None if
        they are invalid."""
        frame = self._read_bytes_at(at, MOST_FRAME_BYTES)
        header = parse_frame_header(frame)
        if header is None:
            return None
        p = header[1]
        for _ in range(_BLOCKS):
            if p + 3 > len(frame):
                break
            head = int.from_bytes(frame[p : p + 3], "little")
            kind, n = head >> 1 & 3, head >> 3
            if kind == 3:
                return None
            p += 3 + (1 if kind == 1 else n)
            self._steps += 1
            if head & 1:
                return at + p + 4 if p + 4 <= len(frame) else None
        return None

    def _read_crcs_at(self, at: int, end: int) -> array[int] | None:
        """Return the CRC32s in the CRC table at bytes `at` to `end`; None if these are not an intact CRC table."""
        if (
            self._read_magic_at(at) != CRC_MAGIC
            or end - at > 4 * MOST_FRAMES
            or self._read_bytes_at(at + 8, len(CRC_TAG)) != CRC_TAG
        ):
            return None
        return parse_crc_table(memoryview(bytes(self._read_bytes_at(at + 8, end - at - 8))))

    def _is_archive_table(self, at: int, end: int) -> bool:
        """Return whether the skippable frame at bytes `at` to `end` is the seek table or the CRC table. The CRC32s of
        the latter are kept in `crcs`."""
        if self._read_magic_at(at) == SEEK_MAGIC:
            return end == self.size
        if self.crcs is None:
            self.crcs = self._read_crcs_at(at, end)
            return self.crcs is not None
        return False

    def _find_next_frame(self, at: int) -> int:
        """Return the offset of the next intact frame at or after offset `at`; the size of the file if there is none, or
        if the search takes too long."""
        while at + 4 <= self.size and self._vain < _PATIENCE:
            view = self._read_bytes_at(at, min(MOST_FRAME_BYTES, self.size - at))
            found = _MAGIC.search(view)
            if found is None:
                at += len(view) - 3
                continue
            at += found.start()
            before = self._steps
            if self._frame_end(at) is not None:
                return at
            self._vain += self._steps - before + 1
            at += 1
        return self.size
