"""Files that were cut off: what is left of them, as a `Patch`, so that readers of whole files read them.

torch.save, zip        `data.pkl` comes first and says how many bytes every storage has; then the records in order, each
                       behind a local header (sizes 0, flag 0x808) and before a data descriptor with its CRC32. So every
                       record before the cut is whole, and the headers and the directory behind it follow.
torch.save, legacy     the pickles come first and say the same; then, for every storage, its count and its bytes.
safetensors            the header comes first and says where every tensor is.

Nothing can be said of a file that was cut off in its pickle or in its header.

Sources: torch/serialization.py, caffe2/serialize/inline_container.cc and miniz.c (data descriptors of 16 bytes, of 24
above 4 GiB).
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from ..bounded_json import parse
from ..errors import Corrupt
from ..storage.overlay import Patch
from ..storage.source import ReadAt
from . import pickles, safetensors_header, sharded, torch_zip, zip_bytes
from .crc import crc32

__all__ = ["LEGACY", "ends_like_zip", "repair_safetensors_file", "repair_torch_file"]

#: How a legacy torch.save file begins: a pickle of its magic number, in one of two protocols.
LEGACY = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_MOST_BYTES = 1 << 62
_SMALL_RECORD = 1 << 16  # byteorder, version, .format_version, ckpttool.json: searched for their ends up to here


def ends_like_zip(read_at: ReadAt, length: int) -> bool:
    """Return whether a file ends with a zip's end record without a comment, as torch writes it.

    Args:
        read_at: reads bytes (offset, length) of the file.
        length: size of the file in bytes.
    """
    return length >= 22 and read_at(length - 22, 4) == b"PK\x05\x06"


def repair_torch_file(read_at: ReadAt, length: int, what: str) -> Patch | None:
    """Return a patch that completes a torch.save file that was cut off; None if nothing is missing.

    Args:
        read_at: reads bytes (offset, length) of the file.
        length: size of the file in bytes.
        what: names the file in messages.

    Raises:
        Corrupt: it was cut off before its first tensor, or is damaged otherwise.
        Unsafe: its pickle would run code, or exceeds a bound.
        Unsupported: it holds tensors of an unsupported kind.
    """
    head = read_at(0, min(length, 64))
    if zip_bytes.is_zip(head):
        return None if ends_like_zip(read_at, length) else _repair_zip(read_at, length, what)
    if LEGACY in head:
        return _repair_legacy(read_at, length, what)
    raise Corrupt(f"{what}: it begins neither like a zip nor like a legacy torch.save file.", code="CKPT0407")


class _FoundRecord(NamedTuple):
    """A record of which at least the local header is there."""

    name: str
    header: int
    offset: int
    length: int
    crc32: int


def _list_window_sizes(length: int) -> list[int]:
    """Return the numbers of bytes, ascending, in which to look for a pickle; mostly the smallest suffices.

    Args:
        length: the largest number possible.
    """
    out = [min(length, n) for n in (1 << 20, 16 << 20, torch_zip.MAX_PICKLE_BYTES)]
    return sorted(set(out))


def _read_storages(read_at: ReadAt, start: int, length: int, what: str) -> tuple[dict[str, tuple[int, int]], int]:
    """Read the storages that a pickle in a file refers to: ({key: (number of elements, bytes)}, offset after the
    pickle).

    Args:
        read_at: reads bytes (offset, length) of the file.
        start, length: offset of the pickle, and size of the file in bytes.
        what: names the file in messages.

    Raises:
        Corrupt: the file was cut off within the pickle, or is damaged.
    """
    for window in _list_window_sizes(length - start):
        try:
            found, end = torch_zip.find_storages(read_at(start, window), 0, what, sharded.make_stand_ins(what))
        except pickles.Truncated:
            continue
        if (total := sum(n for _, n in found.values())) > _MOST_BYTES:
            raise Corrupt(f"{what}: its storages would have {total} bytes.", code="CKPT0407")
        return found, start + end
    raise Corrupt(
        f"{what} was cut off within its pickle, before the first tensor. Nothing of it can be read.", code="CKPT0403"
    )


def _repair_zip(read_at: ReadAt, length: int, what: str) -> Patch:
    """Return a patch that completes a zip of torch.save that was cut off: with the missing local headers, and the
    directory.

    Args:
        read_at: reads bytes (offset, length) of the file.
        length: size of the file in bytes.
        what: names the file in messages.

    Raises:
        Corrupt: the sizes of its tensors are unknown.
    """
    sizes: dict[str, int] = {}
    found: list[_FoundRecord] = []
    present = at = 0
    root = ""
    while (header := _read_local_header(read_at, at, length)) is not None:
        name, flags, crc, size, offset = header
        folder, _, short = name.partition("/")
        root = root or folder
        if short == "data.pkl":
            storages, end = _read_storages(read_at, offset, length, what)
            sizes, size = {key: n for key, (_, n) in storages.items()}, end - offset
        elif not flags & 8:
            pass  # the header has its size and CRC32
        elif short.startswith("data/") and short[5:] in sizes:
            size = sizes[short[5:]]
        else:
            small = _find_small_record_length(read_at, offset, length)
            if small is None:
                break
            size = small
        if flags & 8:
            descriptor = _read_descriptor(read_at, offset + size, length, size)
        else:
            descriptor = (crc, offset + size) if offset + size <= length else None
        if descriptor is None:
            whole = short in ("version", ".data/serialization_id")  # which torch.load reads whole
            if not whole and _ends_inside_record(read_at, offset + size, length):  # what there is of it counts
                found.append(_FoundRecord(name, at, offset, size, 0))
                present, at = length, max(length, offset + size)
            break
        found.append(_FoundRecord(name, at, offset, size, descriptor[0]))
        present = at = descriptor[1]
    if not sizes and not any(r.name.endswith("/data.pkl") for r in found):
        raise Corrupt(
            f"{what}: its first records are damaged, so the sizes of its tensors are not known.", code="CKPT0407"
        )
    there = {r.name.partition("/")[2] for r in found}
    made: list[tuple[int, bytes]] = []
    entries = [(r.name, r.header, r.length, r.crc32, True) for r in found]
    for key, size in sizes.items():
        if f"data/{key}" not in there:
            name = f"{root}/data/{key}"
            raw = zip_bytes.make_local_header(name, size, None, at)
            made.append((at, raw))
            entries.append((name, at, size, 0, True))
            at += len(raw) + size
    if "version" not in there:  # which torch.save writes behind the tensors, and torch.load asks for
        name, body = f"{root}/version", b"3\n"
        raw = zip_bytes.make_local_header(name, len(body), crc32(body), at) + body
        made.append((at, raw))
        entries.append((name, at, len(body), crc32(body), False))
        at += len(raw)
    directory = zip_bytes.make_central_directory(entries, at)
    return Patch(present, at + len(directory), (*made, (at, directory)))


def _read_local_header(read_at: ReadAt, at: int, length: int) -> tuple[str, int, int, int, int] | None:
    """Read the local header of a zip record: (name, flags, CRC32, bytes of the record, offset of its data); None if
    there is no complete header, or the record is compressed.

    Args:
        read_at: reads bytes (offset, length) of the file.
        at: offset of the header.
        length: size of the file in bytes.
    """
    if at + 30 > length:
        return None
    raw = read_at(at, 30)
    if raw[:4] != b"PK\x03\x04":
        return None
    flags, method = struct.unpack("<2H", raw[6:10])
    crc, _, size, name_n, extra_n = struct.unpack("<3I2H", raw[14:30])
    if at + 30 + name_n + extra_n > length or method != 0:
        return None
    more = read_at(at + 30, name_n + extra_n)
    try:
        name = more[:name_n].decode()
    except UnicodeDecodeError:
        return None
    if size == 0xFFFFFFFF:
        extra = more[name_n:]
        if extra[:2] != b"\x01\x00" or len(extra) < 12:
            return None
        size = struct.unpack("<Q", extra[4:12])[0]
    return name, flags, crc, size, at + 30 + name_n + extra_n


def _read_descriptor(read_at: ReadAt, at: int, length: int, size: int) -> tuple[int, int] | None:
    """Read the data descriptor behind a record: (CRC32, offset after the descriptor); None if there is none.

    Args:
        read_at: reads bytes (offset, length) of the file.
        at: offset of the descriptor.
        length: size of the file in bytes.
        size: bytes of the record, which the descriptor repeats.
    """
    raw = read_at(at, min(28, length - at)) if at < length else b""
    wide = len(raw) >= 24 and struct.unpack("<2Q", raw[8:24]) == (size, size)
    narrow = len(raw) >= 16 and struct.unpack("<2I", raw[8:16]) == (size, size)
    if raw[:4] != b"PK\x07\x08" or not (wide or narrow):
        return None
    if narrow and (not wide or raw[16:18] == b"PK"):
        return struct.unpack("<I", raw[4:8])[0], at + 16
    return struct.unpack("<I", raw[4:8])[0], at + 24


def _ends_inside_record(read_at: ReadAt, end: int, length: int) -> bool:
    """Return whether a file was cut off inside a record or inside the data descriptor behind it.

    Args:
        read_at: reads bytes (offset, length) of the file.
        end: offset at which the record ends.
        length: size of the file in bytes.
    """
    rest = read_at(end, length - end) if 0 < length - end < zip_bytes.DATA_DESCRIPTOR_BYTES else b""
    return length <= end or (bool(rest) and rest[:4] == b"PK\x07\x08"[: len(rest)])


def _find_small_record_length(read_at: ReadAt, offset: int, length: int) -> int | None:
    """Return the length in bytes of a small record whose header does not state it, found by the data descriptor behind
    it; None if none follows.

    Args:
        read_at: reads bytes (offset, length) of the file.
        offset: of the record's data.
        length: size of the file in bytes.
    """
    window = read_at(offset, min(_SMALL_RECORD, length - offset))
    at = window.find(b"PK\x07\x08")
    while at >= 0:
        if _read_descriptor(read_at, offset + at, length, at) is not None:
            return at
        at = window.find(b"PK\x07\x08", at + 1)
    return None


def _repair_legacy(read_at: ReadAt, length: int, what: str) -> Patch | None:
    """Return a patch that completes a legacy torch.save file that was cut off; None if nothing is missing.

    Args:
        read_at: reads bytes (offset, length) of the file.
        length: size of the file in bytes.
        what: names the file in messages.

    Raises:
        Corrupt: it was cut off within its pickles, or they contradict each other.
    """
    for window in _list_window_sizes(length):
        try:
            data = read_at(0, window)
            at = 0
            for _ in range(3):
                _, at = pickles.load(data, start=at, what=what)
            sizes, at = torch_zip.find_storages(data, at, what)
            keys, at = pickles.load(data, start=at, what=what)
            break
        except pickles.Truncated:
            continue
    else:
        raise Corrupt(
            f"{what} was cut off within its pickles, before the first tensor. Nothing of it can be read.",
            code="CKPT0403",
        )
    named = isinstance(keys, list) and sorted(map(str, keys)) == sorted(sizes)
    if not named or sum(n for _, n in sizes.values()) > _MOST_BYTES:
        raise Corrupt(f"{what}: the list of its storages disagrees with its pickle.", code="CKPT0407")
    made = []
    for key in keys:
        elements, n = sizes[str(key)]
        if at + 8 > length:
            made.append((max(at, length), struct.pack("<q", elements)[max(length - at, 0) :]))
        at += 8 + n
    return None if at <= length else Patch(length, at, tuple(made))


def repair_safetensors_file(read_at: ReadAt, length: int, what: str) -> Patch | None:
    """Return a patch that completes a safetensors file that was cut off; None if nothing is missing.

    Args:
        read_at: reads bytes (offset, length) of the file.
        length: size of the file in bytes.
        what: names the file in messages.

    Raises:
        Corrupt: it was cut off within its header, or is no safetensors file.
    """
    n = struct.unpack("<Q", read_at(0, 8))[0] if length >= 8 else 0
    if length < 8 or 8 + n > length:
        cut = f"{what} was cut off within its header of {n} bytes. Nothing of it can be read."
        looks = length < 9 or read_at(8, 1) == b"{"
        raise Corrupt(
            cut if n <= safetensors_header.MAX_HEADER_BYTES and looks else f"{what} is not a safetensors file.",
            code="CKPT0403",
        )
    if n > safetensors_header.MAX_HEADER_BYTES:
        raise Corrupt(f"{what} is not a safetensors file.", code="CKPT0406")
    data: Any = parse(read_at(8, n), what)
    ends = [0]
    for name, t in data.items() if isinstance(data, dict) else ():
        offsets = t.get("data_offsets") if isinstance(t, dict) and name != "__metadata__" else None
        if isinstance(offsets, list) and len(offsets) == 2 and type(offsets[1]) is int:
            ends.append(offsets[1])
    size = 8 + n + max(ends)
    return Patch(length, size) if length < size <= _MOST_BYTES else None
