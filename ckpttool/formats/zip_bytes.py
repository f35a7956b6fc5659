"""Zip files as torch.save writes them, as bytes: records finds and proves records, makes headers and directories.

`read_zip_records` trusts the central directory only after proving it: every record's local header agrees with it, no
two records share a name or a byte, and all are in one root folder. Files that another zip reader could read differently
are refused, so a scanner always sees the same records as we do.

Sources: caffe2/serialize/inline_container.cc (records, 64-byte alignment by an extra field "FB"), PKWARE APPNOTE 6.3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ..errors import Corrupt, Unsafe, Unsupported
from ..storage.frames import FrameRead, Proof
from ..storage.source import FileBytes, ReadAt

__all__ = [
    "DATA_DESCRIPTOR_BYTES",
    "DirectoryEntry",
    "ZipRecord",
    "is_zip",
    "make_central_directory",
    "make_data_descriptor",
    "make_local_header",
    "read_directory_entries",
    "read_first_record_name",
    "read_zip_records",
    "torchscript_error",
]


_EOCD = struct.Struct("<4s4H2IH")
_EOCD64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")


def read_first_record_name(head: bytes) -> str:
    """Return the name of the first record of a zip.

    Args:
        head: the first bytes of the file, at least 30; a name that extends beyond them is cut off.
    """
    n: int = _LOCAL.unpack(head[:30])[9]
    return head[30 : 30 + n].decode("utf-8", "replace")


def torchscript_error(what: str) -> Unsupported:
    """Return, without raising it, the error for a TorchScript archive, as torch.jit.save writes it; `what` names the
    file."""
    return Unsupported(
        f"{what}: this is a TorchScript archive, which is a program. Save model.state_dict() instead.", code="CKPT0307"
    )


class ZipRecord(NamedTuple):
    """One stored record of a zip: where its bytes are in the file."""

    name: str
    offset: int
    length: int
    crc32: int


def is_zip(head: bytes) -> bool:
    """Return whether the first bytes of a file are those of a zip."""
    return head[:4] == b"PK\x03\x04"


def read_zip_records(read_at: ReadAt, base: int, length: int, what: str) -> dict[str, ZipRecord]:
    """Read the directory of a zip and verify it against the local headers: {name of a record without the root folder:
    record}.

    Args:
        read_at: reads bytes (offset, length) of the file that contains the zip.
        base, length: offset and size of the zip in that, in bytes.
        what: names the file in messages.

    Raises:
        Corrupt: it is not a complete zip.
        Unsafe: different readers would read it differently.
        Unsupported: it is a TorchScript archive.
    """
    tail_length = min(length, 22 + 20 + 56)
    tail = read_at(base + length - tail_length, tail_length)
    if len(tail) < 22 or tail[-22:-18] != b"PK\x05\x06":
        if b"PK\x05\x06" in tail:
            raise Unsafe(f"{what}: bytes follow the end of the zip.", code="CKPT0703")
        raise Corrupt(
            f"{what}: the zip has no end record in its last bytes. It was cut off or overwritten while it was "
            "written; fetch the file again.",
            code="CKPT0403",
        )
    _, disk, cd_disk, here, count, cd_size, cd_offset, comment = _EOCD.unpack(tail[-22:])
    if 0xFFFF in (here, count) or 0xFFFFFFFF in (cd_size, cd_offset) or tail[-42:-38] == b"PK\x06\x07":
        if tail[-42:-38] != b"PK\x06\x07" or tail[-98:-94] != b"PK\x06\x06":
            raise Corrupt(f"{what}: the zip64 end record is missing.", code="CKPT0407")
        _, _, at64, disks = _LOCATOR64.unpack(tail[-42:-22])
        _, size64, _, _, disk, cd_disk, here, count, cd_size, cd_offset = _EOCD64.unpack(tail[-98:-42])
        if size64 != 44 or disks > 1 or at64 != length - 98:
            raise Unsafe(f"{what}: the zip64 end record is not where it says.", code="CKPT0703")
        end_of_directory = length - 98
    else:
        end_of_directory = length - 22
    if comment or disk or cd_disk or here != count or cd_offset + cd_size != end_of_directory:
        raise Unsafe(f"{what}: the zip's directory is not where its end record says.", code="CKPT0703")
    directory = read_at(base + cd_offset, cd_size)
    out: dict[str, ZipRecord] = {}
    spans: list[tuple[int, int]] = []
    root, at = None, 0
    for _ in range(count):
        if directory[at : at + 4] != b"PK\x01\x02" or at + 46 > cd_size:
            raise Corrupt(f"{what}: the zip's directory is damaged at entry {len(out)}.", code="CKPT0407")
        (_, _, _, flags, method, _, _, crc, packed, size, n, extra_n, comment_n, _, _, attributes, header) = (
            _CENTRAL.unpack(directory[at : at + 46])
        )
        raw_name = directory[at + 46 : at + 46 + n]
        extra = directory[at + 46 + n : at + 46 + n + extra_n]
        at += 46 + n + extra_n + comment_n
        packed, size, header = _apply_zip64(extra, packed, size, header, what)
        try:
            name = raw_name.decode("utf-8")
        except UnicodeDecodeError:
            raise Unsafe(f"{what}: a record name is not UTF-8.", code="CKPT0703") from None
        folder, _, short = name.partition("/")
        if short.startswith("code/"):
            raise torchscript_error(what)
        if method != 0 or packed != size:
            raise Unsafe(
                f"{what}: record {name!r} is compressed ({packed} -> {size} bytes). torch never does that; refused, "
                "since it could decompress without limit.",
                code="CKPT0704",
            )
        if flags & 0x2041:
            raise Unsafe(f"{what}: record {name!r} is encrypted.", code="CKPT0703")
        root = root if root is not None else folder
        if folder != root or not short or ".." in short.split("/") or "\\" in name or "\0" in name:
            raise Unsafe(f"{what}: record {name!r} is outside the folder {root!r} of the archive.", code="CKPT0702")
        if attributes & 0x10 or name.endswith("/"):
            raise Unsafe(
                f"{what}: record {name!r} is marked as a folder. torch then reads nothing from it and leaves memory as "
                "it was, other readers see its bytes; take another copy of the file.",
                code="CKPT0703",
            )
        if short in out:
            raise Unsafe(f"{what}: two records are named {name!r}; readers differ on which counts.", code="CKPT0703")
        out[short] = ZipRecord(short, header, size, crc)  # offset is the header's until _locate_data
        spans.append((header, n))
    if at != cd_size:
        raise Unsafe(f"{what}: {cd_size - at} bytes of the zip's directory belong to no entry.", code="CKPT0703")
    return _locate_data(read_at, base, out, spans, cd_offset, root or "", what)


class DirectoryEntry(NamedTuple):
    """One record of a zip with the places of all that the zip says about it; positions are relative to the zip.

    `described`: its CRC32 is not in its local header, but in a data descriptor behind it.
    """

    name: str
    header: int
    data: int
    length: int
    crc32: int
    crc_at: int
    described: bool


def read_directory_entries(read_at: ReadAt, length: int) -> tuple[list[DirectoryEntry], int]:
    """Read the directory of a zip that `read_zip_records` has verified: (entries, offset of the directory).

    Args:
        read_at: reads bytes (offset, length) of the zip.
        length: size of the zip in bytes.
    """
    tail_length = min(length, 98)
    tail = read_at(length - tail_length, tail_length)
    count, size, at = _EOCD.unpack(tail[-22:])[4:7]
    if tail[-42:-38] == b"PK\x06\x07":
        count, size, at = _EOCD64.unpack(tail[-98:-42])[7:10]
    directory = read_at(at, size)
    out, here = [], 0
    for _ in range(count):
        fields = _CENTRAL.unpack_from(directory, here)
        n, extra_n, comment_n = fields[10:13]
        extra = directory[here + 46 + n : here + 46 + n + extra_n]
        _, nbytes, header = _apply_zip64(extra, fields[8], fields[9], fields[16], "")
        local = _LOCAL.unpack(read_at(header, 30))
        data = header + 30 + local[9] + local[10]
        name = directory[here + 46 : here + 46 + n].decode()
        out.append(DirectoryEntry(name, header, data, nbytes, fields[7], at + here + 16, bool(local[2] & 8)))
        here += 46 + n + extra_n + comment_n
    return out, at


def _apply_zip64(extra: bytes, packed: int, size: int, header: int, what: str) -> tuple[int, int, int]:
    """Return (packed, size, header), with values that do not fit in 32 bits replaced by those in the zip64 field of a
    directory entry.

    Args:
        extra: the extra fields of the entry.
        packed, size: compressed and uncompressed size of the record in bytes.
        header: offset of its local header.
        what: names the file in messages.

    Raises:
        Corrupt: the field is too short.
    """
    at = 0
    while at + 4 <= len(extra):
        tag, n = struct.unpack_from("<HH", extra, at)
        if tag == 1 and at + 4 + n <= len(extra):
            fields = iter(struct.unpack_from(f"<{n // 8}Q", extra, at + 4))
            try:
                size = next(fields) if size == 0xFFFFFFFF else size
                packed = next(fields) if packed == 0xFFFFFFFF else packed
                header = next(fields) if header == 0xFFFFFFFF else header
            except StopIteration:
                raise Corrupt(f"{what}: a zip64 field is too short.", code="CKPT0407") from None
        at += 4 + n
    return packed, size, header


def _locate_data(
    read_at: ReadAt,
    base: int,
    found: dict[str, ZipRecord],
    spans: list[tuple[int, int]],
    end: int,
    root: str,
    what: str,
) -> dict[str, ZipRecord]:
    """Compare every local header with the directory, and return the records with the offsets of their data in place of
    those of their headers: {name: record}. If the source proves offsets later, those of storages after the first are
    assumed instead.

    Args:
        read_at: reads bytes (offset, length) of the file that contains the zip.
        base: offset of the zip in that.
        found: {name without the root folder: record, with the offset of its local header in the zip}.
        spans: (offset of the local header, bytes of the name) of each record in `found`, in the same order.
        end: offset of the directory in the zip.
        root: the folder that all records are in.
        what: names the file in messages.

    Raises:
        Unsafe: a header disagrees with the directory, or records overlap.
        Corrupt: a record extends beyond the directory's start.
    """
    out: dict[str, ZipRecord] = {}
    previous = behind = 0  # behind: bytes between the first tensor and the next record, its data descriptor
    ordered = sorted(zip(found.values(), spans, strict=True), key=lambda x: x[1][0])
    ends = [*(header for _, (header, _) in ordered[1:]), end]
    tensors: list[int] = []
    later: set[int] = set()
    if isinstance(read_at, FileBytes):  # in an object store every read is a round trip
        if read_at.source.proves_later:
            tensors = [k for k, (record, _) in enumerate(ordered) if record.name.startswith("data/")]
        later = set(tensors[1:])
        read_at.prefetch((base + header, 30 + n) for k, (_, (header, n)) in enumerate(ordered) if k not in later)
    for k, (record, (header, n)) in enumerate(ordered):
        if header < previous or header + 30 + n > end:
            raise Unsafe(f"{what}: record {record.name!r} overlaps another one.", code="CKPT0703")
        find = partial(_find_data_offset, record, header, n, end, root, what)
        data = ends[k] - behind - record.length if k in later else 0
        if data >= header + 30 + n and isinstance(read_at, FileBytes):
            _assume_data_offset(read_at, base, header, data, record.length, 30 + n, ends[k], find)
        else:
            data = find(read_at(base + header, 30 + n))
            if k in tensors[:1]:
                behind = ends[k] - data - record.length
        previous = data + record.length
        out[record.name] = record._replace(offset=base + data)
    return out


def _find_data_offset(record: ZipRecord, header: int, n: int, end: int, root: str, what: str, head: bytes) -> int:
    """Compare the local header of a record with the directory, and return the offset of the record's data in the zip.

    Args:
        record: the record, from the directory.
        header, n: offset of the local header in the zip, and bytes of the name.
        end: offset in the zip of its directory, before which the record must end.
        root: the folder that all records are in.
        what: names the file in messages.
        head: the bytes of the local header, name included.

    Raises:
        Unsafe: the header disagrees with the directory.
        Corrupt: the record extends beyond the directory's start.
    """
    sig, _, flags, method, _, _, crc, _, size, name_n, extra_n = _LOCAL.unpack(head[:30])
    stated = f"{root}/{record.name}".encode()
    if sig != b"PK\x03\x04" or method != 0 or name_n != n or head[30:] != stated:
        raise Unsafe(
            f"{what}: the local header of {record.name!r} disagrees with the zip's directory.", code="CKPT0703"
        )
    if not flags & 8 and (crc != record.crc32 or size not in (record.length, 0xFFFFFFFF)):
        raise Unsafe(
            f"{what}: the local header of {record.name!r} has another size or CRC than the directory.",
            code="CKPT0703",
        )
    data: int = header + 30 + n + extra_n
    if data + record.length > end:
        raise Corrupt(f"{what}: record {record.name!r} reaches past the data of the zip.", code="CKPT0407")
    return data


def _assume_data_offset(
    file: FileBytes,
    base: int,
    header: int,
    data: int,
    length: int,
    n: int,
    following: int,
    find: Callable[[bytes], int],
) -> None:
    """Register a record whose data are assumed to begin at offset `data` of the zip; this is proved when they are read
    (frames.py).

    Args:
        file: the file that contains the zip.
        base: offset of the zip in that.
        header, n: offset of the local header in the zip, and its bytes, name included.
        data: the assumed offset.
        length: bytes of the record.
        following: offset in the zip of the next record, or of the directory.
        find: returns the real offset of the data in the zip, from the bytes of the local header.
    """
    framed = file.source.framed(file.name)

    def prove(_: int, read: FrameRead) -> Proof:
        """Look into the header.

        Raises:
            Unsafe: it disagrees with the directory, or the record overlaps another one. Corrupt: it reaches too far.
        """
        found = find(bytes(read(base + header, n)))
        if found + length > following:
            raise Unsafe(f"{file.source.root}/{file.name}: a record overlaps the one behind it.", code="CKPT0703")
        return Proof() if found == data else Proof(read=lambda at, count: framed.raw(base + found + at, count))

    framed.add(base + header, base + data + length, base + data, length, prove, 0)


DATA_DESCRIPTOR_BYTES = 24  # signature, CRC32 and two 64-bit sizes, behind a record whose CRC is known only afterwards


def make_local_header(name: str, size: int, crc: int | None, at: int, align: int = 1) -> bytes:
    """Return the local header of a zip record.

    Args:
        name: of the record.
        size: its bytes; 4 GiB and more take the zip64 field.
        crc: its CRC32; None if that follows the record in a data descriptor.
        at: file offset of the header.
        align: the data of the record begin at a multiple of this many bytes, after padding.
    """
    raw = name.encode()
    big = crc is None or size >= 0xFFFFFFFF  # descriptors are written with 64-bit sizes, which needs the zip64 field
    extra = struct.pack("<HHQQ", 1, 16, size if crc is not None else 0, size if crc is not None else 0) if big else b""
    here = at + 30 + len(raw) + len(extra)
    if align > 1 and here % align:
        pad = -(here + 4) % align
        extra += struct.pack("<2sH", b"FB", pad) + b"Z" * pad
    word = 0xFFFFFFFF if big else size
    flags = 0x0800 | (8 if crc is None else 0)
    return (
        _LOCAL.pack(b"PK\x03\x04", 45 if big else 20, flags, 0, 0, 0x21, crc or 0, word, word, len(raw), len(extra))
        + raw
        + extra
    )


def make_data_descriptor(size: int, crc: int) -> bytes:
    """Return the data descriptor that follows a record of `size` bytes whose local header has no CRC32."""
    return struct.pack("<4sIQQ", b"PK\x07\x08", crc, size, size)


def make_central_directory(records: list[tuple[str, int, int, int, bool]], at: int) -> bytes:
    """Make the directory and the end record of a zip.

    Args:
        records: (name, offset of its header, bytes, CRC32, whether a data descriptor follows it) of each record.
        at: file offset of the directory.
    """
    out = bytearray()
    for name, header, size, crc, descriptor in records:
        raw = name.encode()
        wide = [n for n in (size, size) if size >= 0xFFFFFFFF] + ([header] if header >= 0xFFFFFFFF else [])
        extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        word, where = min(size, 0xFFFFFFFF), min(header, 0xFFFFFFFF)
        flags = 0x0800 | (8 if descriptor else 0)
        version = 45 if wide or descriptor else 20
        out += _CENTRAL.pack(
            b"PK\x01\x02", version, version, flags, 0, 0, 0x21, crc, word, word, len(raw), len(extra), 0, 0, 0, 0, where
        )
        out += raw + extra
    n, size = len(records), len(out)
    if n >= 0xFFFF or size >= 0xFFFFFFFF or at >= 0xFFFFFFFF:
        out += _EOCD64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, n, n, size, at)
        out += _LOCATOR64.pack(b"PK\x06\x07", 0, at + size, 1)
    out += _EOCD.pack(
        b"PK\x05\x06", 0, 0, min(n, 0xFFFF), min(n, 0xFFFF), min(size, 0xFFFFFFFF), min(at, 0xFFFFFFFF), 0
    )
    return bytes(out)
