"""The file of an archive: independent zstd frames at known places, checksums, and tables at the end that find them.

    frame | frame | ... | CRC table | seek table

Plain `zstd -d` unfolds it, skipping the tables. Where the facts come from: frames and skippable frames, RFC 8878 and
zstd_compression_format.md of facebook/zstd; the seek table, contrib/seekable_format/zstd_seekable_compression_format.md
there. The CRC table is our own: a skippable frame (magic 0x184D2A5C) with b"CKPTCRC1", the number of frames, the CRC32 of
the bytes of each one as they lie in the file, and the CRC32 of all that. All numbers are little-endian.

Every frame has at most `FRAME` bytes of content, its size in the header, one segment, a checksum and no dictionary, so that
its header has one form only. With that, the CRC table and the seek table, every bit of the file is covered by something
else in it: `walk` finds any that was changed, and says in which frame.

Frames begin at cuts, which the caller knows beforehand, and every `FRAME` bytes from there on. What drives the writer: its
caller, which splits tensors into planes as it appends; one thread that hashes members in order; `jobs` that compress. What
bounds memory: the buffers of the frames in flight, 2 * jobs + 2, cut once.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import struct
import sys
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ..errors import CkpttoolError, Corrupt, NotRecognised, RemoteError, SourceChanged, Unsafe
from ..formats.crc import crc32
from ..index.draft import EarlierFile
from ..storage.source import Source
from . import byte_planes

__all__ = [
    "FRAME",
    "Cut",
    "DamagedFrame",
    "FrameReader",
    "FrameWriter",
    "Member",
    "Table",
    "Walked",
    "read_table",
    "walk",
]

FRAME = 4 << 20
#: Bytes that so much content takes at most, compressed (ZSTD_COMPRESSBOUND).
_BOUND = FRAME + (FRAME >> 8)
#: Frames in one file: 64 TiB of whole ones, and tables of 256 MiB.
_MOST = 1 << 24

_ZSTD, _CRCS, _SEEK = 0xFD2FB528, 0x184D2A5C, 0x184D2A5E
_TAG = b"CKPTCRC1"
_FOOT = struct.Struct("<IBI")  # frames, descriptor, magic
_DESCRIPTOR, _SEEKABLE = 0x80, 0x8F92EAB1
_MAGIC = re.compile(rb"\x28\xb5\x2f\xfd|[\x5c\x5e]\x2a\x4d\x18")
#: Blocks of one frame: zstd cuts each of its 128 KiB into less than 200.
_BLOCKS = 1 << 13
#: Blocks looked at in vain, in search of sound frames, before the rest of a file is given up.
_PATIENCE = 1 << 22


class Cut(NamedTuple):
    """A place in the content where a frame begins; up to the next one, bytes are coded like this.

    `item` is the number of byte planes (1: none), `fast` says that they are numbers, not text.
    """

    offset: int
    item: int
    fast: bool


class Member(NamedTuple):
    """A range of the content whose stored bytes get a SHA-256."""

    name: str
    start: int
    end: int


class _Local(threading.local):
    """What a thread compresses and unfolds with."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}


# ----------------------------------------------------------------------------------------------------------- writing


class _Compress:
    """One frame from its content; what comes out depends on the content, its planes, `fast` and the level alone.

    Level 1 looks for matches of seven bytes by a hash. In planes of exponents there are many by chance, which cost more
    time and more bits than they save; a hash of 2^7 entries finds few of those and none of zeros or short periods less.
    It would also miss rows that are there twice. Those show in the plane below the uppermost, which is mantissa for the
    most part and does not compress otherwise: a sample of it decides.
    """

    def __init__(self, level: int) -> None:
        self.level = level
        self.local = _Local()

    def _compressor(self, hash_log: int) -> Any:
        import zstandard

        key = str(hash_log)
        if key not in self.local.made:
            # the window of a whole frame makes every frame a single segment; a hash_log of 0 leaves it to the level
            parameters = zstandard.ZstdCompressionParameters(
                compression_level=self.level, window_log=FRAME.bit_length() - 1, hash_log=hash_log,
                write_content_size=True, write_checksum=True, write_dict_id=False,
            )  # fmt: skip
            self.local.made[key] = zstandard.ZstdCompressor(compression_params=parameters)
        return self.local.made[key]

    def __call__(self, data: memoryview, item: int, fast: bool) -> tuple[bytes, int]:
        """(the frame, CRC32 of its bytes)."""
        few = self.level == 1 and fast and item > 1 and not self._repeats(data, item)
        frame: bytes = self._compressor(7 if few else 0).compress(data)
        return frame, crc32(frame)

    def _repeats(self, data: memoryview, item: int) -> bool:
        sample = bytearray()
        for at in range(0, len(data), byte_planes.BLOCK):
            block = data[at : at + byte_planes.BLOCK]
            n = len(block) // item
            sample += block[(item - 2) * n :][: min(n, byte_planes.BLOCK // 4)]
        return len(self._compressor(0).compress(sample)) < len(sample) - (len(sample) >> 5)


@dataclass
class _Flying:
    """A frame between its last byte and the file."""

    buffer: memoryview
    length: int
    frame: Future[tuple[bytes, int]]
    hashed: Future[None]


class FrameWriter:
    """A sink for the content of an archive; `write` gets the bytes of the file, in order, in the thread that appends.

    `cuts` begin with one at 0 and ascend, `members` do not overlap. With `earlier`, it is given the same content as an
    earlier writer from the beginning on; a frame that this one has written is unfolded and compared with the content, which
    takes less time than making it again. `write` gets it as if it had been made now.
    """

    def __init__(
        self, write: Callable[[bytes | memoryview], object], cuts: Sequence[Cut], members: Sequence[Member], *, level: int,
        jobs: int, earlier: EarlierFile | None = None,
    ) -> None:  # fmt: skip
        assert cuts[0].offset == 0 and all(a.offset < b.offset for a, b in pairwise(cuts))
        self.write = write
        self.cuts = cuts
        self.members = sorted(members, key=lambda m: m.start)
        self.most = 2 * jobs + 2
        self._compress = _Compress(level)
        self._pool = ThreadPoolExecutor(jobs, "ckpttool-zstd")
        self._hash_pool = ThreadPoolExecutor(1, "ckpttool-sha256")
        self._free: list[memoryview] = []
        self._made = 0
        self._flying: deque[_Flying] = deque()
        self._buffer: memoryview | None = None  # of the frame that is open
        self._block = memoryview(bytearray(0))  # a block whose rest has not come yet
        self._waiting = 0  # bytes in it
        self._over = False
        self._earlier = _earlier_frames(earlier)  # those that have not been met yet
        self._read = earlier.read if earlier else None
        self.at = self._start = self._end = self._hashed = self._cut = 0
        self._rows = bytearray()  # per frame: its row in the seek table, its CRC32
        self._sums: dict[str, str] = {}
        self._ended = 0
        self._hasher: Any = None

    def append(self, data: bytes | memoryview) -> None:
        """Go on with `data`; of tensors in planes, the tensor's own bytes."""
        assert not self._over
        view = memoryview(data).cast("B")
        while len(view):
            if self._buffer is None:
                self._open()
            n = self._take(view)
            self.at += n
            view = view[n:]
            if self.at == self._end:
                self._submit()

    def _open(self) -> None:
        """Begin a frame where the last one ended."""
        while self._cut + 1 < len(self.cuts) and self.cuts[self._cut + 1].offset <= self.at:
            self._cut += 1
        self._start, self._end = self.at, self.at + FRAME
        if self._cut + 1 < len(self.cuts):
            self._end = min(self._end, self.cuts[self._cut + 1].offset)
        if not self._free and self._made == self.most:
            self._land()
        if not self._free:
            self._free.append(memoryview(bytearray(FRAME)))
            self._made += 1
        self._buffer = self._free.pop()

    def _take(self, view: memoryview) -> int:
        """Store the first bytes of `view` in the open frame; how many."""
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
            self._split_waiting(at + n)
        return n

    def _split_waiting(self, end: int) -> None:
        assert self._buffer is not None
        item, n = self.cuts[self._cut].item, self._waiting
        byte_planes.split(self._block[:n], item, self._buffer[end - n : end])
        self._waiting = 0

    def _submit(self) -> None:
        """Compress and hash the open frame."""
        assert self._buffer is not None
        n = self.at - self._start
        cut = self.cuts[self._cut]
        hashed = self._hash_to(self.at)
        there = self._earlier.popleft() if self._earlier else None
        frame = self._pool.submit(self._frame, self._buffer[:n], cut, there)
        self._flying.append(_Flying(self._buffer, n, frame, hashed))
        self._buffer = None
        while self._flying and self._flying[0].frame.done() and self._flying[0].hashed.done():
            self._land()

    def _frame(self, data: memoryview, cut: Cut, there: tuple[int, int] | None) -> tuple[bytes, int]:
        """(the frame, CRC32 of its bytes): the one at this (offset, length) of the file, if it holds the data."""
        if there and self._read:
            frame = self._read(*there)
            try:
                if _unfold(memoryview(frame), None) == data:
                    return frame, crc32(frame)
            except _Fault:
                pass  # the one that is made now will not be equal to it either, and `write` says so
        return self._compress(data, cut.item, cut.fast)

    def _land(self) -> None:
        """Wait for the oldest frame in flight and write it."""
        f = self._flying.popleft()
        frame, crc = f.frame.result()
        f.hashed.result()
        self._rows += struct.pack("<II4sI", len(frame), f.length, frame[-4:], crc)
        self._free.append(f.buffer)
        self.write(frame)

    def _hash_to(self, end: int) -> Future[None]:
        assert self._buffer is not None
        part = self._buffer[self._hashed - self._start : end - self._start]
        future = self._hash_pool.submit(self._hash, self._hashed, part)
        self._hashed = end
        return future

    def _hash(self, start: int, data: memoryview) -> None:
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

    def sums(self) -> dict[str, str]:
        """{member: SHA-256 of its stored bytes} of those that have ended."""
        if self._buffer is not None:
            self._hash_to(self.at - self._waiting).result()
        elif self._flying:
            self._flying[-1].hashed.result()
        return dict(self._sums)

    def resumable(self) -> bool:
        """Whether an unfinished file can be gone on with from here: a frame begins, and no member is cut in two."""
        i = bisect_left(self.cuts, self.at, key=lambda c: c.offset)
        return i < len(self.cuts) and self.cuts[i].offset == self.at and self._outside(self.at)

    def _outside(self, at: int) -> bool:
        i = bisect_left(self.members, at, key=lambda m: m.start)  # the members before i begin before
        return i == 0 or self.members[i - 1].end <= at

    def settle(self) -> None:
        """Wait until all that was appended is hashed and written; not resumable, it must have been the last."""
        if self._buffer is not None:
            if self._waiting:
                self._split_waiting(self.at - self._start)
            self._over = True
            self._submit()
        while self._flying:
            self._land()

    def state(self) -> dict[str, Any]:
        """Where the frames are, after `settle`; JSON holds it."""
        assert not self._flying and self.resumable()
        return {"frames": base64.b64encode(_bytes(_columns(self._rows, 4)[0])).decode()}

    def finish(self) -> None:
        """The last frame and the tables."""
        self.settle()
        self._over = True
        sizes, lengths, checksums, crcs = _columns(self._rows, 4)
        table = _crc_table(crcs)
        self.write(table)
        self.write(_seek_table(sizes, lengths, checksums, len(table)))

    def close(self) -> None:
        """Stop the threads; nothing is written afterwards."""
        for pool in (self._pool, self._hash_pool):
            pool.shutdown(wait=True, cancel_futures=True)


def _earlier_frames(earlier: EarlierFile | None) -> deque[tuple[int, int]]:
    """(offset, length) of the frames that an earlier writer says it has written; none where that makes no sense."""
    out: deque[tuple[int, int]] = deque()
    try:
        sizes = _numbers(base64.b64decode(earlier.state["frames"], validate=True)) if earlier else ()
    except (KeyError, TypeError, ValueError):
        return out
    at = 0
    for n in sizes:
        if n > _BOUND:
            break
        out.append((at, n))
        at += n
    return out


# -------------------------------------------------------------------------------------------------------- the tables


def _numbers(data: bytes | bytearray | memoryview) -> array[int]:
    """Little-endian numbers of four bytes."""
    out = array("I")
    assert out.itemsize == 4
    out.frombytes(data)
    if sys.byteorder == "big":
        out.byteswap()
    return out


def _columns(rows: bytes | bytearray | memoryview, width: int) -> list[array[int]]:
    numbers = _numbers(rows)
    return [numbers[i::width] for i in range(width)]


def _bytes(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def _crc_table(crcs: array[int]) -> bytes:
    payload = _TAG + struct.pack("<I", len(crcs)) + _bytes(crcs)
    return struct.pack("<II", _CRCS, len(payload) + 4) + payload + struct.pack("<I", crc32(payload))


def _seek_table(sizes: array[int], lengths: array[int], checksums: array[int], last: int) -> bytes:
    """Of the frames and of the CRC table, which takes `last` bytes."""
    rows = array("I", bytes(12 * len(sizes) + 12))
    rows[0:-3:3], rows[1:-3:3], rows[2:-3:3] = sizes, lengths, checksums
    rows[-3] = last
    foot = _FOOT.pack(len(sizes) + 1, _DESCRIPTOR, _SEEKABLE)
    return struct.pack("<II", _SEEK, 4 * len(rows) + len(foot)) + _bytes(rows) + foot


@dataclass
class Table:
    """The frames of a file, in columns: where each lies in it, which content it has, its checksum, the CRC32 of its bytes."""

    offsets: array[int]
    sizes: array[int]
    starts: array[int]
    lengths: array[int]
    checksums: array[int]
    crcs: array[int]
    logical_size: int


#: What a message says to whoever did not ask `audit verify`.
LOOK = " Fetch the file again, or see with `ckpttool audit verify` what is left of it."


def read_table(source: Source, file: str) -> Table:
    """The tables at the end of a file.

    Raises:
        NotRecognised: there are none, or none of ours. Corrupt: they contradict each other or the file.
        Unsafe: they have frames of more than `FRAME` bytes, or too many.
    """
    path = os.path.join(source.root, file)
    none = f"{path} does not end with the tables of an archive. It is none, or it was cut off; fetch the file again."
    wrong = f"{path}: the tables at its end are damaged: "
    size = source.size(file)
    if size < 8 + _FOOT.size:
        raise NotRecognised(none)
    count, descriptor, magic = _FOOT.unpack(source.read(file, size - _FOOT.size, _FOOT.size))
    if (descriptor, magic) != (_DESCRIPTOR, _SEEKABLE) or not count:
        raise NotRecognised(none)
    if count > _MOST:
        raise Unsafe(f"{path}: its seek table has {count} frames; ckpttool writes and reads at most {_MOST}.")
    span = 8 + 12 * count + _FOOT.size
    if span > size:
        raise Corrupt(f"{wrong}{count} frames take a seek table of {span} bytes, and the file has {size}.{LOOK}")
    raw = memoryview(source.read(file, size - span, span))
    if struct.unpack_from("<II", raw) != (_SEEK, span - 8):
        raise Corrupt(f"{wrong}the seek table of {count} frames does not begin {span} bytes before the end.{LOOK}")
    sizes, lengths, checksums = _columns(raw[8 : -_FOOT.size], 3)
    last, frames = sizes.pop(), count - 1
    mark = lengths.pop(), checksums.pop()
    want = 8 + len(_TAG) + 4 + 4 * frames + 4
    if last != want or last > size - span or mark != (0, 0):
        raise NotRecognised(f"{path}: its seek table does not end with a CRC table. It is not an archive of ckpttool.")
    crc = memoryview(source.read(file, size - span - last, last))
    if struct.unpack_from("<II", crc) != (_CRCS, last - 8) or crc[8:16] != _TAG:
        raise NotRecognised(
            f"{path}: the CRC table before its seek table is missing. It is not an archive of ckpttool."
        )
    crcs = _sound_crcs(crc[8:])
    if crcs is None:
        raise Corrupt(f"{wrong}the CRC table does not have its own CRC32.{LOOK}")
    if frames:
        if max(sizes) > _BOUND or max(lengths) > FRAME:
            raise Unsafe(
                f"{path}: its seek table has a frame of {max(sizes)} bytes that unfold to {max(lengths)}; frames of an "
                f"archive have at most {FRAME}."
            )
        if not min(lengths):
            raise Corrupt(f"{wrong}frame {lengths.index(0)} is empty.{LOOK}")
    offsets, starts = (array("Q", accumulate(column, initial=0)) for column in (sizes, lengths))
    if (end := offsets.pop()) != size - span - last:
        raise Corrupt(f"{wrong}its {frames} frames take {end} bytes, but {size - span - last} are there.{LOOK}")
    total = starts.pop()
    return Table(offsets, sizes, starts, lengths, checksums, crcs, total)


def _sound_crcs(payload: memoryview) -> array[int] | None:
    """The CRCs that the payload of a CRC table has; None where it is damaged."""
    fixed = len(_TAG) + 4
    if len(payload) < fixed + 4 or len(payload) % 4 or payload[:8] != _TAG:
        return None
    if struct.unpack_from("<I", payload, 8)[0] * 4 != len(payload) - fixed - 4:
        return None
    if struct.unpack_from("<I", payload, len(payload) - 4)[0] != crc32(payload[:-4]):
        return None
    return _numbers(payload[fixed:-4])


# ----------------------------------------------------------------------------------------------------------- reading


class _Fault(Exception):
    """What is wrong with a frame."""


def _header(length: int) -> bytes:
    """The only form of a frame's header: size of the content, single segment, checksum, no dictionary."""
    flag, size = (0, 1) if length < 256 else (1, 2) if length < 65792 else (2, 4)
    said = length - 256 if flag == 1 else length
    return struct.pack("<IB", _ZSTD, flag << 6 | 0x24) + said.to_bytes(size, "little")


def _content_size(frame: memoryview) -> tuple[int, int] | None:
    """(bytes of content, bytes of the header) of a frame whose header has that form."""
    if len(frame) < 6 or frame[4] & 0x3F != 0x24 or frame[4] >> 6 == 3:
        return None
    flag = frame[4] >> 6
    length = int.from_bytes(frame[5 : 5 + (1, 2, 4)[flag]], "little") + (256 if flag == 1 else 0)
    head = _header(length) if 0 < length <= FRAME else b""
    return (length, len(head)) if head and frame[: len(head)] == head else None


_local = _Local()


def _unfold(frame: memoryview, crc: int | None) -> bytes:
    """The content of a frame.

    Raises:
        _Fault: it does not have this CRC32, or is damaged by what it says itself.
    """
    import zstandard

    if crc is not None and (have := crc32(frame)) != crc:
        raise _Fault(f"the frame has CRC32 {have:08x}, the CRC table of the file says {crc:08x}")
    said = _content_size(frame)
    if said is None:
        raise _Fault("the header of the frame is not one that ckpttool writes")
    if "unfold" not in _local.made:
        _local.made["unfold"] = zstandard.ZstdDecompressor(max_window_size=FRAME)
    try:
        data: bytes = _local.made["unfold"].decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise _Fault(f"the frame does not unfold ({e})") from None
    if len(data) != said[0]:
        raise _Fault(f"the frame unfolds to {len(data)} bytes, its header says {said[0]}")
    return data


class DamagedFrame(Corrupt):
    """A frame that does not hold what it should: `length` bytes of the tar from `start` on."""

    def __init__(self, message: str, start: int, length: int) -> None:
        super().__init__(message)
        self.start, self.length = start, length


class FrameReader:
    """Ranges of the content of a file, as they were before they were split into planes; any number of threads may ask.

    `item_at(start)` is the number of planes of the frame whose content begins at `start`. The last `kept` frames that
    were needed in part are kept, and unfolded once.
    """

    def __init__(
        self, source: Source, file: str, table: Table, item_at: Callable[[int], int], kept: int = 8
    ) -> None:  # fmt: skip
        self.source, self.file, self.table, self.item_at, self.kept = source, file, table, item_at, kept
        self._frames: OrderedDict[int, Future[memoryview]] = OrderedDict()
        self._lock = threading.Lock()

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the content from `offset` on.

        Raises:
            Corrupt: there is not so much, or a frame is damaged.
        """
        table = self.table
        if offset < 0 or offset + len(view) > table.logical_size:
            raise Corrupt(
                f"{os.path.join(self.source.root, self.file)} unfolds to {table.logical_size} bytes; "
                f"{offset}..{offset + len(view)} are needed."
            )
        i = bisect_right(table.starts, offset) - 1
        while len(view):
            skip = offset - table.starts[i]
            n = min(len(view), table.lengths[i] - skip)
            if n == table.lengths[i] and i not in self._frames:
                byte_planes.merge(self._stored(i), self.item_at(offset), view[:n])
            else:
                view[:n] = self._kept(i)[skip : skip + n]
            view, offset, i = view[n:], offset + n, i + 1

    def _kept(self, i: int) -> memoryview:
        """A frame that is kept, or will be; the thread that asks first unfolds it, others wait."""
        with self._lock:
            future = self._frames.get(i)
            mine = future is None
            if future is None:
                future = self._frames[i] = Future()
                if len(self._frames) > self.kept:
                    self._frames.popitem(last=False)
            self._frames.move_to_end(i)
        if mine:
            try:
                future.set_result(byte_planes.merge(self._stored(i), self.item_at(self.table.starts[i])))
            except BaseException as e:
                with self._lock:
                    self._frames.pop(i, None)
                future.set_exception(e)
        return future.result()

    def _stored(self, i: int) -> bytes:
        t = self.table
        raw = memoryview(bytearray(t.sizes[i]))
        self.source.readinto(self.file, t.offsets[i], raw)
        try:
            data = _unfold(raw, t.crcs[i])
            if (len(data), int.from_bytes(raw[-4:], "little")) != (t.lengths[i], t.checksums[i]):
                raise _Fault("the seek table has another size or checksum than the frame")
            return data
        except _Fault as e:
            raise DamagedFrame(
                f"{os.path.join(self.source.root, self.file)}: bytes {t.offsets[i]}..{t.offsets[i] + t.sizes[i]}, which "
                f"unfold to {t.starts[i]}..{t.starts[i] + t.lengths[i]} of the tar, are damaged: {e}. Fetch the file "
                "again or take another copy.",
                t.starts[i],
                t.lengths[i],
            ) from None


# ----------------------------------------------------------------------------------------------------------- walking


class Walked(NamedTuple):
    """A frame of a file, or something in it that is wrong.

    `start` and `length` are those of its content, `offset` and `size` of its bytes; `stored` is the content, None where
    `fault` says what is wrong. Of what is no frame, `start` is -1 and `length` 0.
    """

    start: int
    length: int
    offset: int
    size: int
    stored: bytes | None
    fault: str | None


class _Piece(NamedTuple):
    """A frame to be looked at, or, with a fault, bytes that are none; `raw` where they have been read."""

    offset: int
    size: int
    raw: memoryview | None
    length: int
    crc: int | None = None
    checksum: int | None = None
    fault: str | None = None


class _Seen(NamedTuple):
    length: int
    stored: bytes | None
    fault: str | None
    crc: int | None = None
    beside: str | None = None  # what is wrong with the tables


def walk(source: Source, file: str, jobs: int) -> Iterator[Walked]:
    """Every frame of a file, in order, unfolded by `jobs` threads; the damaged ones and what else is wrong, as faults.

    Where the tables at the end are damaged, frames are found by their own headers and blocks.

    Raises:
        SourceChanged, RemoteError: the file cannot be read. Damage is never raised.
    """
    size = source.size(file)
    search: _Search | None = None
    try:
        pieces = _listed(read_table(source, file))
    except (SourceChanged, RemoteError):
        raise
    except CkpttoolError as e:
        search = _Search(source, file, size)
        pieces = search.pieces()
        yield Walked(-1, 0, size, 0, None, str(e))
    crcs = array("I")
    start = 0
    for piece, seen in _look(source, file, pieces, jobs):
        if seen.crc is not None:
            crcs.append(seen.crc)
        if seen.length:
            yield Walked(start, seen.length, piece.offset, piece.size, seen.stored, seen.fault)
            start += seen.length
        else:
            yield Walked(-1, 0, piece.offset, piece.size, None, seen.fault)
        if seen.beside is not None:
            yield Walked(-1, 0, size, 0, None, seen.beside)
    if search is not None and search.crcs is not None and search.crcs != crcs:
        k = next(
            (k for k, (a, b) in enumerate(zip(search.crcs, crcs, strict=False)) if a != b),
            min(len(crcs), len(search.crcs)),
        )
        said = f"the CRC table lists {len(search.crcs)} frames, {len(crcs)} are there; they differ from number {k} on"
        yield Walked(-1, 0, size, 0, None, said)


def _listed(table: Table) -> Iterator[_Piece]:
    for k, offset in enumerate(table.offsets):
        yield _Piece(offset, table.sizes[k], None, table.lengths[k], table.crcs[k], table.checksums[k])


def _look(source: Source, file: str, pieces: Iterator[_Piece], jobs: int) -> Iterator[tuple[_Piece, _Seen]]:
    """The pieces, looked at in threads, in order; at most 2 * jobs at once."""
    flying: deque[tuple[_Piece, Future[_Seen]]] = deque()
    pool = ThreadPoolExecutor(jobs, "ckpttool-unfold")
    try:
        for piece in pieces:
            flying.append((piece, pool.submit(_see, source, file, piece)))
            if len(flying) >= 2 * jobs:
                done, future = flying.popleft()
                yield done, future.result()
        while flying:
            done, future = flying.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _see(source: Source, file: str, piece: _Piece) -> _Seen:
    if piece.fault is not None:
        return _Seen(piece.length, None, piece.fault)
    raw = piece.raw
    if raw is None:
        raw = memoryview(bytearray(piece.size))
        try:
            source.readinto(file, piece.offset, raw)
        except SourceChanged:
            raise
        except Corrupt as e:
            return _Seen(piece.length, None, f"the frame cannot be read ({e})")
    crc = crc32(raw)
    try:
        data = _unfold(raw, piece.crc)
    except _Fault as e:
        return _Seen(piece.length, None, str(e), crc)
    beside = None
    if len(data) != piece.length:
        beside = (
            f"the seek table has {piece.length} bytes for the frame at {piece.offset}, which unfolds to {len(data)}"
        )
    elif piece.checksum is not None and (own := int.from_bytes(raw[-4:], "little")) != piece.checksum:
        beside = (
            f"the seek table has checksum {piece.checksum:08x} for the frame at {piece.offset}, which has {own:08x}"
        )
    return _Seen(len(data), data, None, crc, beside)


class _Search:
    """Frames found without the tables: each begins where the one before it ends, as its blocks say.

    What is no sound frame is left out up to the next one. `crcs` are those of the CRC table that was found, if one was.
    """

    def __init__(self, source: Source, file: str, size: int) -> None:
        self.source, self.file, self.size = source, file, size
        self.crcs: array[int] | None = None
        self._base, self._data = 0, memoryview(b"")
        self._steps = self._vain = 0

    def _get(self, at: int, length: int) -> memoryview:
        """Bytes of the file, as many as there are."""
        length = max(0, min(length, self.size - at))
        if at < self._base or at + length > self._base + len(self._data):
            want = memoryview(bytearray(min(max(length, 2 * _BOUND), self.size - at)))
            self.source.readinto(self.file, at, want)
            self._base, self._data = at, want
        return self._data[at - self._base :][:length]

    def pieces(self) -> Iterator[_Piece]:
        """What is there, from the first byte to the last."""
        at = 0
        try:
            while at < self.size:
                end = self._end(at)
                if end is None:
                    end = self._next(at + 1)
                    said = _content_size(self._get(at, 16)) if self._magic(at) == _ZSTD else None
                    fault = "the frame is damaged or cut off" if said else "these bytes are not a frame"
                    yield _Piece(at, end - at, None, said[0] if said else 0, fault=fault)
                elif self._magic(at) == _ZSTD:
                    frame = self._get(at, end - at)
                    said = _content_size(frame)
                    assert said is not None
                    yield _Piece(at, end - at, memoryview(bytes(frame)), said[0])
                elif not self._table(at, end):
                    yield _Piece(at, end - at, None, 0, fault="a skippable frame that is not a table of an archive")
                at = end
        except SourceChanged:
            raise
        except Corrupt as e:
            yield _Piece(at, self.size - at, None, 0, fault=f"the file cannot be read from here on ({e})")

    def _magic(self, at: int) -> int:
        return int.from_bytes(self._get(at, 4), "little")

    def _known(self, at: int) -> bool:
        """Whether something can begin here, be it the end of the file."""
        magic = self._magic(at)
        return at == self.size or magic == _ZSTD or magic >> 4 == _CRCS >> 4

    def _end(self, at: int) -> int | None:
        """Where the frame that begins here ends; None where none does.

        It is one where something known follows, or else where it is sound itself.
        """
        magic = self._magic(at)
        if magic == _ZSTD:
            end = self._blocks(at)
        elif magic >> 4 == _CRCS >> 4 and self.size - at >= 8:
            end = at + 8 + int.from_bytes(self._get(at + 4, 4), "little")
        else:
            return None
        if end is None or end > self.size:
            return None
        return end if self._known(end) or self._sound(at, end) else None

    def _sound(self, at: int, end: int) -> bool:
        if self._magic(at) != _ZSTD:
            self._steps += (end - at) >> 10
            return self._crcs_at(at, end) is not None
        frame = self._get(at, end - at)
        said = _content_size(frame)
        self._steps += said[0] >> 10 if said else 0
        try:
            _unfold(frame, None)
        except _Fault:
            return False
        return True

    def _blocks(self, at: int) -> int | None:
        frame = self._get(at, _BOUND)
        said = _content_size(frame)
        if said is None:
            return None
        p = said[1]
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

    def _crcs_at(self, at: int, end: int) -> array[int] | None:
        """The CRCs of the table in this skippable frame, if it is a sound one."""
        if self._magic(at) != _CRCS or end - at > 4 * _MOST or self._get(at + 8, len(_TAG)) != _TAG:
            return None
        return _sound_crcs(memoryview(bytes(self._get(at + 8, end - at - 8))))

    def _table(self, at: int, end: int) -> bool:
        """Whether this skippable frame is one of the tables, as far as can be seen."""
        if self._magic(at) == _SEEK:
            return end == self.size
        if self.crcs is None:
            self.crcs = self._crcs_at(at, end)
            return self.crcs is not None
        return False

    def _next(self, at: int) -> int:
        """Where the next sound frame begins; the end of the file where none does, or where looking takes too long."""
        while at + 4 <= self.size and self._vain < _PATIENCE:
            view = self._get(at, min(_BOUND, self.size - at))
            found = _MAGIC.search(view)
            if found is None:
                at += len(view) - 3
                continue
            at += found.start()
            before = self._steps
            if self._end(at) is not None:
                return at
            self._vain += self._steps - before + 1
            at += 1
        return self.size
