"""The file of an archive: independent zstd frames at known places, checksums, and tables at the end that find them.

    frame | frame | ... | CRC table | seek table

Plain `zstd -d` decompresses it and skips the tables. Sources: frames and skippable frames, RFC 8878 and
zstd_compression_format.md of facebook/zstd; the seek table, contrib/seekable_format/zstd_seekable_compression_format.md
there. The CRC table is our own: a skippable frame (magic 0x184D2A5C) with b"CKPTCRC1", the number of frames, the CRC32
of each frame's bytes in the file, and the CRC32 of all that. All numbers are little-endian.

Every frame has at most `FRAME` bytes of content, its size in the header, one segment, a checksum and no dictionary, so
that its header has only one form. With that, the CRC table and the seek table, every bit of the file is covered by
something else in it: `frame_walk.walk_file` finds any bit that was changed, and says in which frame.

`frame_writer` writes such files, `frame_reader` reads ranges of them, `frame_walk` checks them from end to end.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
from array import array
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ..errors import Corrupt, NotRecognised, Unsafe
from ..formats.crc import crc32
from ..storage.source import Source

__all__ = [
    "CRC_MAGIC",
    "CRC_TAG",
    "FRAME",
    "LOOK",
    "MOST_FRAMES",
    "MOST_FRAME_BYTES",
    "SEEK_MAGIC",
    "ZSTD_MAGIC",
    "FrameFault",
    "FrameTable",
    "ThreadLocal",
    "decode_u32",
    "decode_u32_columns",
    "decompress_frame",
    "encode_u32",
    "make_crc_table",
    "make_frame_header",
    "make_seek_table",
    "parse_crc_table",
    "parse_frame_header",
    "read_frame_table",
]

FRAME = 4 << 20
#: Bytes that so much content takes at most, compressed (ZSTD_COMPRESSBOUND).
MOST_FRAME_BYTES = FRAME + (FRAME >> 8)
#: Frames in one file: 64 TiB of whole ones, and tables of 256 MiB.
MOST_FRAMES = 1 << 24

ZSTD_MAGIC, CRC_MAGIC, SEEK_MAGIC = 0xFD2FB528, 0x184D2A5C, 0x184D2A5E
CRC_TAG = b"CKPTCRC1"
_FOOT = struct.Struct("<IBI")  # frames, descriptor, magic
_DESCRIPTOR, _SEEKABLE = 0x80, 0x8F92EAB1


class ThreadLocal(threading.local):
    """The compressors and decompressors of a thread."""

    def __init__(self) -> None:
        """Start without compressors; threading.local calls this once in each thread that uses the object."""
        self.made: dict[str, Any] = {}


# -------------------------------------------------------------------------------------------------------- the tables


def decode_u32(data: bytes | bytearray | memoryview) -> array[int]:
    """Return little-endian unsigned 32-bit integers as an array."""
    out = array("I")
    assert out.itemsize == 4
    out.frombytes(data)
    if sys.byteorder == "big":
        out.byteswap()
    return out


def decode_u32_columns(rows: bytes | bytearray | memoryview, width: int) -> list[array[int]]:
    """Return the `width` columns of a row-major table of little-endian unsigned 32-bit integers."""
    numbers = decode_u32(rows)
    return [numbers[i::width] for i in range(width)]


def encode_u32(numbers: array[int]) -> bytes:
    """Return an array of unsigned 32-bit integers as little-endian bytes."""
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def make_crc_table(crcs: array[int]) -> bytes:
    """Return the CRC table of an archive file: a frame that zstd skips, with the CRC32 of the bytes of each frame
    before it."""
    payload = CRC_TAG + struct.pack("<I", len(crcs)) + encode_u32(crcs)
    return struct.pack("<II", CRC_MAGIC, len(payload) + 4) + payload + struct.pack("<I", crc32(payload))


def make_seek_table(sizes: array[int], lengths: array[int], checksums: array[int], last: int) -> bytes:
    """Return the seek table of an archive file: a frame that zstd skips, with a row for each frame before it.

    Args:
        sizes: bytes of each frame in the file.
        lengths: bytes of the content of each frame.
        checksums: the last four bytes of each frame, as an integer.
        last: bytes of the CRC table, which is the last frame before the seek table.
    """
    rows = array("I", bytes(12 * len(sizes) + 12))
    rows[0:-3:3], rows[1:-3:3], rows[2:-3:3] = sizes, lengths, checksums
    rows[-3] = last
    foot = _FOOT.pack(len(sizes) + 1, _DESCRIPTOR, _SEEKABLE)
    return struct.pack("<II", SEEK_MAGIC, 4 * len(rows) + len(foot)) + encode_u32(rows) + foot


@dataclass
class FrameTable:
    """The frames of a file, in columns: the place of each in the file and in the content, its checksum, the CRC32 of
    its bytes."""

    offsets: array[int]
    sizes: array[int]
    starts: array[int]
    lengths: array[int]
    checksums: array[int]
    crcs: array[int]
    logical_size: int


#: The advice in messages of commands other than `audit verify`.
LOOK = " Fetch the file again, or run `ckpttool audit verify` to see what is left of it."


def read_frame_table(source: Source, file: str) -> FrameTable:
    """Read and check the CRC table and the seek table at the end of an archive file, which say where its frames are.

    Raises:
        NotRecognised: there are none, or they are not those of ckpttool.
        Corrupt: they contradict each other or the file.
        Unsafe: they list frames of more than `FRAME` bytes, or too many.
    """
    path = os.path.join(source.root, file)
    none = (
        f"{path} does not end with the tables of an archive. It is not an archive, or it was cut off; fetch the file "
        "again."
    )
    wrong = f"{path}: the tables at its end are damaged: "
    size = source.size(file)
    if size < 8 + _FOOT.size:
        raise NotRecognised(none, code="CKPT0301")
    count, descriptor, magic = _FOOT.unpack(source.read(file, size - _FOOT.size, _FOOT.size))
    if (descriptor, magic) != (_DESCRIPTOR, _SEEKABLE) or not count:
        raise NotRecognised(none, code="CKPT0301")
    if count > MOST_FRAMES:
        raise Unsafe(
            f"{path}: its seek table has {count} frames; ckpttool writes and reads at most {MOST_FRAMES}.",
            code="CKPT0704",
        )
    span = 8 + 12 * count + _FOOT.size
    if span > size:
        raise Corrupt(
            f"{wrong}{count} frames take a seek table of {span} bytes, and the file has {size}.{LOOK}", code="CKPT0425"
        )
    raw = memoryview(source.read(file, size - span, span))
    if struct.unpack_from("<II", raw) != (SEEK_MAGIC, span - 8):
        raise Corrupt(
            f"{wrong}the seek table of {count} frames does not begin {span} bytes before the end.{LOOK}",
            code="CKPT0425",
        )
    sizes, lengths, checksums = decode_u32_columns(raw[8 : -_FOOT.size], 3)
    last, frames = sizes.pop(), count - 1
    mark = lengths.pop(), checksums.pop()
    want = 8 + len(CRC_TAG) + 4 + 4 * frames + 4
    if last != want or last > size - span or mark != (0, 0):
        raise NotRecognised(
            f"{path}: its seek table does not end with a CRC table. It is not an archive of ckpttool.", code="CKPT0301"
        )
    crc = memoryview(source.read(file, size - span - last, last))
    if struct.unpack_from("<II", crc) != (CRC_MAGIC, last - 8) or crc[8:16] != CRC_TAG:
        raise NotRecognised(
            f"{path}: the CRC table before its seek table is missing. It is not an archive of ckpttool.",
            code="CKPT0301",
        )
    crcs = parse_crc_table(crc[8:])
    if crcs is None:
        raise Corrupt(f"{wrong}the CRC table does not have its own CRC32.{LOOK}", code="CKPT0425")
    if frames:
        if max(sizes) > MOST_FRAME_BYTES or max(lengths) > FRAME:
            raise Unsafe(
                f"{path}: its seek table has a frame of {max(sizes)} bytes that decompress to {max(lengths)}; frames "
                f"of an archive have at most {FRAME}.",
                code="CKPT0704",
            )
        if not min(lengths):
            raise Corrupt(f"{wrong}frame {lengths.index(0)} is empty.{LOOK}", code="CKPT0425")
    offsets, starts = (array("Q", accumulate(column, initial=0)) for column in (sizes, lengths))
    if (end := offsets.pop()) != size - span - last:
        raise Corrupt(
            f"{wrong}its {frames} frames take {end} bytes, but {size - span - last} are there.{LOOK}", code="CKPT0425"
        )
    total = starts.pop()
    return FrameTable(offsets, sizes, starts, lengths, checksums, crcs, total)


def parse_crc_table(payload: memoryview) -> array[int] | None:
    """Return the CRC32s in a CRC table, one for each frame; None if the table is damaged.

    Args:
        payload: the bytes of the table's own frame, after its magic number and size.
    """
    fixed = len(CRC_TAG) + 4
    if len(payload) < fixed + 4 or len(payload) % 4 or payload[:8] != CRC_TAG:
        return None
    if struct.unpack_from("<I", payload, 8)[0] * 4 != len(payload) - fixed - 4:
        return None
    if struct.unpack_from("<I", payload, len(payload) - 4)[0] != crc32(payload[:-4]):
        return None
    return decode_u32(payload[fixed:-4])


class FrameFault(Exception):
    """What is wrong with a frame."""


def make_frame_header(length: int) -> bytes:
    """Return the header of a frame with `length` bytes of content, in the only form that ckpttool writes: size of the
    content, single segment, checksum, no dictionary."""
    flag, size = (0, 1) if length < 256 else (1, 2) if length < 65792 else (2, 4)
    header = length - 256 if flag == 1 else length
    return struct.pack("<IB", ZSTD_MAGIC, flag << 6 | 0x24) + header.to_bytes(size, "little")


def parse_frame_header(frame: memoryview) -> tuple[int, int] | None:
    """Return (bytes of content, bytes of the header) of a frame; None if its header is not as `make_frame_header` makes
    it."""
    if len(frame) < 6 or frame[4] & 0x3F != 0x24 or frame[4] >> 6 == 3:
        return None
    flag = frame[4] >> 6
    length = int.from_bytes(frame[5 : 5 + (1, 2, 4)[flag]], "little") + (256 if flag == 1 else 0)
    head = make_frame_header(length) if 0 < length <= FRAME else b""
    return (length, len(head)) if head and frame[: len(head)] == head else None


_local = ThreadLocal()


def decompress_frame(frame: memoryview, crc: int | None) -> bytes:
    """Return the content of a frame.

    Args:
        crc: the CRC32 that the bytes of the frame must have; None: it is not checked.

    Raises:
        FrameFault: the CRC32 differs, the frame cannot be decompressed, or its content has another size than its header
            says.
    """
    import zstandard

    if crc is not None and (have := crc32(frame)) != crc:
        raise FrameFault(f"the frame has CRC32 {have:08x}, the CRC table of the file says {crc:08x}")
    header = parse_frame_header(frame)
    if header is None:
        raise FrameFault("the header of the frame is not one that ckpttool writes")
    if "unfold" not in _local.made:
        _local.made["unfold"] = zstandard.ZstdDecompressor(max_window_size=FRAME)
    try:
        data: bytes = _local.made["unfold"].decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise FrameFault(f"the frame cannot be decompressed ({e})") from None
    if len(data) != header[0]:
        raise FrameFault(f"the frame decompresses to {len(data)} bytes, its header says {header[0]}")
    return data
