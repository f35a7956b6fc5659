"""The least that a conversion costs: `python bench/floor.py SOURCE DESTINATION [--direct]` copies the files of a folder in one thread.

It does what every conversion has to do with every byte, with the libraries that ckpttool uses, and nothing else: read, CRC32
(isa-l), BLAKE3, write, fsync. A piece of 256 KiB is read, summed and written while it is in the L2 cache, with plain reads and
writes. There is no index, no pickle, no thread, no journal, and no second buffer to read ahead into.

With --direct, blocks of 4 MiB are read and written with O_DIRECT, past the page cache, as ckpttool does where the file system
takes it, and each block goes into an aligned buffer of its own before it is written, since a tensor does not begin where a page
does. That spares the kernel two copies of every byte.

`make bench` runs it next to ckpttool and reports CPU seconds as a ratio to it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

from blake3 import blake3
from isal.isal_zlib import crc32

PIECE, BLOCK, PAGE, HUGE = 256 << 10, 4 << 20, 4096, 2 << 20


def buffer(size: int) -> tuple[memoryview, int]:
    """Anonymous memory on huge pages, and its address."""
    raw = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    raw.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(raw))
    start = -address % HUGE
    return memoryview(raw)[start : start + size], address + start


def direct(source: int, destination: int, size: int) -> None:
    """Copy with O_DIRECT on both sides."""
    (data, at), (out, to) = buffer(BLOCK), buffer(BLOCK)
    crc, digest = 0, blake3()
    for offset in range(0, size, BLOCK):
        n = os.preadv(source, [data], offset)
        for a in range(0, n, PIECE):
            piece = data[a : min(a + PIECE, n)]
            crc = crc32(piece, crc)
            digest.update(piece)
            ctypes.memmove(to + a, at + a, len(piece))
        os.pwritev(destination, [out[: -(-n // PAGE) * PAGE]], offset)
    digest.digest()
    os.ftruncate(destination, size)


def plain(source: int, destination: int, size: int) -> None:
    """Copy through the page cache."""
    data, _ = buffer(PIECE)
    crc, digest = 0, blake3()
    for offset in range(0, size, PIECE):
        n = os.preadv(source, [data], offset)
        crc = crc32(data[:n], crc)
        digest.update(data[:n])
        os.pwrite(destination, data[:n], offset)
    digest.digest()


def main() -> None:
    """Copy every file of a folder."""
    source, destination, *options = sys.argv[1:]
    os.makedirs(destination)
    for name in sorted(os.listdir(source)):
        flags, copy = (os.O_DIRECT, direct) if options == ["--direct"] else (0, plain)
        a = os.open(os.path.join(source, name), os.O_RDONLY | flags)
        b = os.open(os.path.join(destination, name), os.O_WRONLY | os.O_CREAT | flags, 0o666)
        copy(a, b, os.fstat(a).st_size)
        os.fsync(b)
        os.close(a)
        os.close(b)


if __name__ == "__main__":
    main()
