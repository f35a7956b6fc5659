"""A range of a file that other processes write to at the same time, written front to back.

Whole pages of the range go around the page cache, as in local_file.py. The pages that the range shares with its
neighbours, its first and its last, are written through the cache, byte for byte: on a local disk all processes see the
same page there. On a network file system each machine has a cache of its own and may write a whole page back, so there
these bytes are handed to the coordinator.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from .buffers import ALIGN
from .destination_protocol import write_error
from .local_file import LocalFile, WriterPool, write_all_at

__all__ = ["LocalRange"]

_ZEROS = bytes(1 << 20)


class LocalRange(LocalFile):
    """Bytes of an existing file from `start` on.

    Args:
        may_write: called before each write; raises where the range is no longer to be written to.
        fringes: where (offset, bytes) on shared pages are added to, instead of writing them.
    """

    def __init__(
        self,
        path: str,
        writer: WriterPool,
        start: int,
        may_write: Callable[[], None],
        fringes: list[tuple[int, bytes]] | None = None,
    ) -> None:
        super().__init__(path, writer, create=False)
        self.may_write, self.fringes = may_write, fringes
        self.at, self.base = start, -(-start // ALIGN) * ALIGN
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self.cached = os.open(path, flags) if self.direct else self.fd

    def append(self, data: bytes | memoryview) -> None:
        """Append the next bytes of the range. Bytes on the first page, if the previous range shares it, are written
        through the page cache."""
        view = memoryview(data)
        if self.at < self.base:  # on the page that the range before ends on
            k = min(self.base - self.at, len(view))
            self._write_shared_page(view[:k], self.at)
            self.at += k
            view = view[k:]
        if len(view):
            super().append(view)

    def skip_to(self, to: int) -> None:
        """Advance to byte `to` of the file by writing zeros; others write these bytes later."""
        while self.at < to:
            self.append(memoryview(_ZEROS)[: to - self.at])

    def flush(self) -> None:
        """Write everything appended so far; the last page through the cache, since the next range shares it."""
        if self.at <= self.base and self.buffer is None:
            return
        self.release_buffer()
        if self.tail:
            self._write_shared_page(memoryview(self.tail), self.base)

    def pwrite(self, data: memoryview, offset: int) -> None:
        """Write data at an offset of the file, unless `may_write` raises; called by the writer threads."""
        self.may_write()
        super().pwrite(data, offset)

    def _write_shared_page(self, data: memoryview, offset: int) -> None:
        """Write bytes at byte `offset`, on a page shared with another range, through the page cache; if `fringes` is a
        list, add (offset, bytes) to it instead, for the coordinator to write.

        Raises:
            CkpttoolError: they cannot be written.
        """
        if self.fringes is not None:
            self.fringes.append((offset, bytes(data)))
            return
        self.may_write()
        try:
            write_all_at(self.cached, data, offset)
        except OSError as e:
            raise write_error(e, self.path) from e

    def sync(self) -> None:
        """Make durable what was written, also through the cache. The caller must have waited for all writes."""
        super().sync()
        if self.cached != self.fd:
            os.fdatasync(self.cached)

    def close(self) -> None:
        """Close the descriptors."""
        if self.cached not in (self.fd, self.old_fd, -1):
            os.close(self.cached)
        self.cached = -1
        super().close()
