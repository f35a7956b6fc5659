"""Writes the file of an archive, frame by frame; frame_format.py describes it.

Frames begin at cuts, which the caller knows beforehand, and every `FRAME` bytes from there on. The caller splits
tensors into byte planes as it appends, one thread hashes members in order, and `jobs` threads compress. Memory is
bounded by the buffers of the frames in flight: 2 * jobs + 2, allocated once.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ..formats.crc import crc32
from ..index.draft import EarlierFile
from . import byte_planes
from .frame_format import (
    FRAME,
    MOST_FRAME_BYTES,
    FrameFault,
    ThreadLocal,
    decode_u32,
    decode_u32_columns,
    decompress_frame,
    encode_u32,
    make_crc_table,
    make_seek_table,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["FrameWriter", "Member", "SplitPoint"]


class SplitPoint(NamedTuple):
    """A place in the content where a frame begins; it describes the content up to the next one.

    `item` is the number of byte planes (1: none), `fast` is for numbers, not text.
    """

    offset: int
    item: int
    fast: bool


class Member(NamedTuple):
    """A range of the content whose stored bytes get a SHA-256."""

    name: str
    start: int
    end: int


class _Compress:
    """One frame from its content; what comes out depends on the content, its planes, `fast` and the level alone.

    Level 1 looks for matches of seven bytes by a hash. In planes of exponents there are many by chance, which cost more
    time and more bits than they save; a hash of 2^7 entries finds few of those and none of zeros or short periods less.
    It would also miss rows that are there twice. Those show in the plane below the uppermost, which is mantissa for the
    most part and does not compress otherwise: a sample of it decides.
    """

    def __init__(self, level: int) -> None:
        """Prepare to compress at a zstd level, from 1 to 19."""
        self.level = level
        self.local = ThreadLocal()

    def _get_compressor(self, hash_log: int) -> Any:
        """Return this thread's zstd compressor with a match table of 2^`hash_log` entries; 0: the level decides."""
        import zstandard

        key = str(hash_log)
        if key not in self.local.made:
            # the window of a whole frame makes every frame a single segment; a hash_log of 0 leaves it to the level
            parameters = zstandard.ZstdCompressionParameters(
                compression_level=self.level,
                window_log=FRAME.bit_length() - 1,
                hash_log=hash_log,
                write_content_size=True,
                write_checksum=True,
                write_dict_id=False,
            )
            self.local.made[key] = zstandard.ZstdCompressor(compression_params=parameters)
        return self.local.made[key]

    def __call__(self, data: memoryview, item: int, fast: bool) -> tuple[bytes, int]:
        """Return (the frame with this content, the CRC32 of the frame's bytes).

        Args:
            item: number of byte planes of the content; 1: none.
            fast: whether the content is numbers, not text.
        """
        few = self.level == 1 and fast and item > 1 and not self._has_repeats(data, item)
        frame: bytes = self._get_compressor(7 if few else 0).compress(data)
        return frame, crc32(frame)

    def _has_repeats(self, data: memoryview, item: int) -> bool:
        """Return whether a sample of the second-highest byte plane compresses, as it does if rows of a tensor occur
        twice.

        Args:
            data: content in byte planes, block by block.
            item: number of byte planes, at least two.
        """
        sample = bytearray()
        for at in range(0, len(data), byte_planes.BLOCK):
            block = data[at : at + byte_planes.BLOCK]
            n = len(block) // item
            sample += block[(item - 2) * n :][: min(n, byte_planes.BLOCK // 4)]
        return len(self._get_compressor(0).compress(sample)) < len(sample) - (len(sample) >> 5)


@dataclass
class _FrameInFlight:
    """A frame between its last byte and the file."""

    buffer: memoryview
    length: int
    frame: Future[tuple[bytes, int]]
    hashed: Future[None]


class FrameWriter:
    """A sink for the content of an archive; `write` gets the bytes of the file, in order, in the thread that appends.

    `cuts` begin with one at 0 and ascend, `members` do not overlap. With `earlier`, it is given the same content as an
    earlier writer, from the beginning; a frame that was written then is decompressed and compared with the content,
    which is faster than compressing again. `write` gets it as if it were new.
    """

    def __init__(
        self,
        write: Callable[[bytes | memoryview], object],
        cuts: Sequence[SplitPoint],
        members: Sequence[Member],
        *,
        level: int,
        jobs: int,
        earlier: EarlierFile | None = None,
    ) -> None:
        """Start the threads.

        Args:
            write: called with the bytes of the file, in order.
            cuts: where frames must begin, ascending from offset 0.
            members: the ranges of the content that are hashed.
            level: zstd level, from 1 to 19.
            jobs: threads that compress.
            earlier: what an earlier run left of the file; its frames are compared instead of compressed again. None:
                nothing.
        """
        assert cuts[0].offset == 0 and all(a.offset < b.offset for a, b in pairwise(cuts))
        self.write = write
        self.cuts = cuts
        self.members = sorted(members, key=lambda m: m.start)
        self.most = 2 * jobs + 2
        self._compress = _Compress(level)
        from concurrent.futures import ThreadPoolExecutor

        self._pool = ThreadPoolExecutor(jobs, "ckpttool-zstd")
        self._hash_pool = ThreadPoolExecutor(1, "ckpttool-sha256")
        self._free: list[memoryview] = []
        self._made = 0
        self._flying: deque[_FrameInFlight] = deque()
        self._buffer: memoryview | None = None  # of the frame that is open
        self._block = memoryview(bytearray(0))  # a block whose rest has not come yet
        self._waiting = 0  # bytes in it
        self._over = False
        self._earlier = _list_earlier_frames(earlier)  # those that have not been met yet
        self._read = earlier.read if earlier else None
        self.at = self._start = self._end = self._hashed = self._cut = 0
        self._rows = bytearray()  # per frame: its row in the seek table, its CRC32
        self._sums: dict[str, str] = {}
        self._ended = 0
        self._hasher: Any = None

    def append(self, data: bytes | memoryview) -> None:
        """Append content of the tar. For tensors that are stored in byte planes, pass the tensor's own bytes; they are
        split here."""
        assert not self._over
        view = memoryview(data).cast("B")
        while len(view):
            if self._buffer is None:
                self._open_frame()
            n = self._fill_frame(view)
            self.at += n
            view = view[n:]
            if self.at == self._end:
                self._submit_frame()

    def _open_frame(self) -> None:
        """Begin a frame where the last one ended; waits for an earlier frame to be written if all buffers are in
        use."""
        while self._cut + 1 < len(self.cuts) and self.cuts[self._cut + 1].offset <= self.at:
            self._cut += 1
        self._start, self._end = self.at, self.at + FRAME
        if self._cut + 1 < len(self.cuts):
            self._end = min(self._end, self.cuts[self._cut + 1].offset)
        if not self._free and self._made == self.most:
            self._write_oldest()
        if not self._free:
            self._free.append(memoryview(bytearray(FRAME)))
            self._made += 1
        self._buffer = self._free.pop()

    def _fill_frame(self, view: memoryview) -> int:
        """Store the first bytes of `view` in the open frame, in byte planes if its split point has more than one.

        Returns:
            The number of bytes that were stored, or kept until a block is complete.
        """
        assert self._buffer is not None
        item, at, room = self.cuts[self._cut].item, self.at - self._start, self._end - self.at
        if item == 1:
            n = min(room, len(view))
            self._buffer[at : at + n] = view[:n]
            return n
        if not self._waiting:
            n = room if len(view) >= room else len(view) - len(view) % byte_planes.BLOCK
            if n:
                byte_planes.split(view[:n], item, self._buffer[at : at + n])
                return n
            if not self._block:
                self._block = memoryview(bytearray(byte_planes.BLOCK))
        n = min(byte_planes.BLOCK - self._waiting, room, len(view))
        self._block[self._waiting : self._waiting + n] = view[:n]
        self._waiting += n
        if self._waiting == byte_planes.BLOCK or n == room:
            self._split_waiting_bytes(at + n)
        return n

    def _split_waiting_bytes(self, end: int) -> None:
        """Split the bytes of the incomplete block into byte planes, and store them in the open frame, where they end at
        byte `end`."""
        assert self._buffer is not None
        item, n = self.cuts[self._cut].item, self._waiting
        byte_planes.split(self._block[:n], item, self._buffer[end - n : end])
        self._waiting = 0

    def _submit_frame(self) -> None:
        """Close the open frame and submit it to the threads that compress and hash; write earlier frames that are
        done."""
        assert self._buffer is not None
        n = self.at - self._start
        cut = self.cuts[self._cut]
        hashed = self._submit_hashing(self.at)
        there = self._earlier.popleft() if self._earlier else None
        frame = self._pool.submit(self._make_frame, self._buffer[:n], cut, there)
        self._flying.append(_FrameInFlight(self._buffer, n, frame, hashed))
        self._buffer = None
        while self._flying and self._flying[0].frame.done() and self._flying[0].hashed.done():
            self._write_oldest()

    def _make_frame(self, data: memoryview, cut: SplitPoint, there: tuple[int, int] | None) -> tuple[bytes, int]:
        """Return (a frame with this content, the CRC32 of the frame's bytes).

        Args:
            data: the content, in byte planes if `cut` says so.
            there: (offset, length) of a frame in the earlier run's file, which is returned if it holds the same
                content; None: there is none.
        """
        if there and self._read:
            frame = self._read(*there)
            try:
                if decompress_frame(memoryview(frame), None) == data:
                    return frame, crc32(frame)
            except FrameFault:
                pass  # the one that is made now will not be equal to it either, and `write` says so
        return self._compress(data, cut.item, cut.fast)

    def _write_oldest(self) -> None:
        """Wait for the oldest frame in flight and write it."""
        f = self._flying.popleft()
        frame, crc = f.frame.result()
        f.hashed.result()
        self._rows += struct.pack("<II4sI", len(frame), f.length, frame[-4:], crc)
        self._free.append(f.buffer)
        self.write(frame)

    def _submit_hashing(self, end: int) -> Future[None]:
        """Submit the content of the open frame, from where hashing ended up to the content offset `end`, to the hashing
        thread."""
        assert self._buffer is not None
        part = self._buffer[self._hashed - self._start : end - self._start]
        future = self._hash_pool.submit(self._hash_members, self._hashed, part)
        self._hashed = end
        return future

    def _hash_members(self, start: int, data: memoryview) -> None:
        """Add `data`, the content from offset `start` on, to the SHA-256 of the members that it belongs to. Calls run
        in one thread, in order."""
        end = start + len(data)
        while self._ended < len(self.members):
            m = self.members[self._ended]
            if m.end > end and m.start >= end:
                break
            if self._hasher is None:
                self._hasher = hashlib.sha256()
            a, b = max(m.start, start), min(m.end, end)
            if a < b:
                self._hasher.update(data[a - start : b - start])
            if m.end > end:
                break
            self._sums[m.name] = self._hasher.hexdigest()
            self._hasher = None
            self._ended += 1

    def member_sums(self) -> dict[str, str]:
        """Return {member: SHA-256 of its stored bytes, in hex} of the members that were appended to their end; waits
        for the hashing."""
        if self._buffer is not None:
            self._submit_hashing(self.at - self._waiting).result()
        elif self._flying:
            self._flying[-1].hashed.result()
        return dict(self._sums)

    def resumable(self) -> bool:
        """Return whether a later run could continue the file from here: a frame begins here, and no member is split by
        this offset."""
        i = bisect_left(self.cuts, self.at, key=lambda c: c.offset)
        return i < len(self.cuts) and self.cuts[i].offset == self.at and self._is_between_members()

    def _is_between_members(self) -> bool:
        """Return whether no member begins before the current offset and ends behind it."""
        i = bisect_left(self.members, self.at, key=lambda m: m.start)  # the members before i begin before
        return i == 0 or self.members[i - 1].end <= self.at

    def flush(self) -> None:
        """Wait until all appended content is hashed and written. Content may be appended afterwards only if a frame
        ends here."""
        if self._buffer is not None:
            if self._waiting:
                self._split_waiting_bytes(self.at - self._start)
            self._over = True
            self._submit_frame()
        while self._flying:
            self._write_oldest()

    def state(self) -> dict[str, Any]:
        """Return {"frames": the sizes of the frames so far, in base64}, for a later run to continue from. Call it only
        after `flush`, and if `resumable()`."""
        assert not self._flying and self.resumable()
        return {"frames": base64.b64encode(encode_u32(decode_u32_columns(self._rows, 4)[0])).decode()}

    def finish(self) -> None:
        """Write the last frame and the tables."""
        self.flush()
        self._over = True
        sizes, lengths, checksums, crcs = decode_u32_columns(self._rows, 4)
        table = make_crc_table(crcs)
        self.write(table)
        self.write(make_seek_table(sizes, lengths, checksums, len(table)))

    def close(self) -> None:
        """Stop the threads; nothing is written afterwards."""
        for pool in (self._pool, self._hash_pool):
            pool.shutdown(wait=True, cancel_futures=True)


def _list_earlier_frames(earlier: EarlierFile | None) -> deque[tuple[int, int]]:
    """Return (offset, length) in the file of each frame that an earlier run has recorded; none if there was no such
    run, or its record is invalid."""
    out: deque[tuple[int, int]] = deque()
    try:
        sizes = decode_u32(base64.b64decode(earlier.state["frames"], validate=True)) if earlier else ()
    except (LookupError, TypeError, ValueError):
        return out
    at = 0
    for n in sizes:
        if n > MOST_FRAME_BYTES:
            break
        out.append((at, n))
        at += n
    return out
