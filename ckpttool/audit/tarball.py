"""Headers of the tar inside an archive: regular files with plain names, and nothing else.

A header is 512 bytes, as the standard library's tarfile makes them in the GNU format (sizes beyond 8 GiB in base 256);
the data is padded with zeros to 512; two zero blocks end the tar. Reading is the inverse and no more: a header must be,
byte for byte, the one that would be written for its name, size and time, so links, devices, sparse files, extensions
and owners cannot occur.

Source: POSIX.1-2017, pax, "ustar Interchange Format"; the GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

import tarfile
from typing import NamedTuple

from ..errors import Corrupt, Unsafe

__all__ = ["BLOCK", "END", "Entry", "make_header", "make_padding", "parse_header"]

BLOCK = 512
END = bytes(2 * BLOCK)


class Entry(NamedTuple):
    """A header: name, bytes of data, time of modification in seconds."""

    name: str
    size: int
    mtime: int


def make_header(name: str, size: int, mtime: int) -> bytes:
    """Return the tar header of a member.

    Args:
        name, size: the name of the member, and the bytes of its data.
        mtime: its modification time in seconds.

    Raises:
        ValueError, UnicodeError: one of them does not fit into a header.
    """
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size, mtime, 0o644
    return info.tobuf(tarfile.GNU_FORMAT)


def make_padding(size: int) -> bytes:
    """Return the zero bytes that follow `size` bytes of data in a tar, to fill the last block."""
    return bytes(-size % BLOCK)


def parse_header(block: bytes, what: str) -> Entry | None:
    """Return the content of a tar header; None for the zero block that ends a tar.

    Args:
        block: its 512 bytes.
        what: the path of the archive, for messages.

    Raises:
        Corrupt: it is not a header. Unsafe: it is one that ckpttool does not write.
    """
    if len(block) != BLOCK:
        raise Corrupt(f"{what}: the tar ends within a header. The copy is incomplete.", code="CKPT0403")
    if not any(block):
        return None
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, ValueError) as e:
        raise Corrupt(f"{what}: a tar header is damaged ({e}).", code="CKPT0425") from None
    found = Entry(info.name, info.size, int(info.mtime))
    kind = {
        tarfile.SYMTYPE: "a symbolic link",
        tarfile.LNKTYPE: "a hard link",
        tarfile.DIRTYPE: "a folder",
        tarfile.CHRTYPE: "a device",
        tarfile.BLKTYPE: "a device",
        tarfile.FIFOTYPE: "a pipe",
    }.get(info.type)
    if kind or info.type != tarfile.REGTYPE:
        raise Unsafe(
            f"{what}: member {shorten_name(info.name)} is {kind or 'no regular file'}; an archive holds only those.",
            code="CKPT0702",
        )
    try:
        same = make_header(*found) == block
    except (ValueError, UnicodeError):
        same = False
    if found.size < 0 or found.mtime < 0 or not same:
        raise Unsafe(
            f"{what}: the header of member {shorten_name(info.name)} is not one that ckpttool writes.", code="CKPT0703"
        )
    return found


def shorten_name(name: str) -> str:
    """Return a name for a message: quoted, in ASCII, and at most about 80 characters long."""
    text = ascii(name)
    return text if len(text) <= 80 else text[:60] + f"...' ({len(name)} characters)"
