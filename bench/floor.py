"""The least that a conversion costs: `python bench/floor.py SOURCE DESTINATION` copies the files of a folder in one thread.

It does what every conversion has to do with every byte, with the libraries that ckpttool uses, and nothing else: read, CRC32
(isa-l), BLAKE3, write, fsync. Where the file system takes O_DIRECT, blocks of 4 MiB are read and written with it, and each
block goes into an aligned buffer of its own before it is written, since a tensor does not begin where a page does. Where it does
not (tmpfs), a piece is read and written from the same buffer. CRC, digest and copy pass over a piece of 256 KiB while it is in
the L2 cache. There is no index, no pickle, no thread, no journal, and no second buffer to read ahead into.

`make bench` runs it next to ckpttool and reports CPU seconds as a ratio to it.
"""

from __future__ import annotations

import ctypes
import errno
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


def cached(source: int, destination: int, size: int) -> None:
    """Copy with plain reads and writes."""
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
    source, destination = sys.argv[1:]
    os.makedirs(destination)
    for name in sorted(os.listdir(source)):
        paths = os.path.join(source, name), os.path.join(destination, name)
        write = os.O_WRONLY | os.O_CREAT
        try:
            a, b = os.open(paths[0], os.O_RDONLY | os.O_DIRECT), os.open(paths[1], write | os.O_DIRECT, 0o666)
            copy = direct
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            a, b, copy = os.open(paths[0], os.O_RDONLY), os.open(paths[1], write, 0o666), cached
        copy(a, b, os.fstat(a).st_size)
        os.fsync(b)
        os.close(a)
        os.close(b)


if __name__ == "__main__":
    main()
