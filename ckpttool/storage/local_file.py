"""Files of a destination on a local disk, written front to back: around the page cache, by threads, from shared
buffers."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from ..errors import kind_of_failure
from .buffers import ALIGN, BufferPool, IOBudget
from .destination_protocol import Altered, DestinationFile, write_error
from .lock import ensure_owner_mode

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["LocalFile", "WriterPool", "replace_file", "sync_folder", "write_all_at"]

_DIRECT = getattr(os, "O_DIRECT", 0)
_SMALL = (
    32 << 10
)  # so many bytes of a file wait without a buffer of the pool, which many files would take from each other


def sync_folder(path: str) -> None:
    """Make the entries of a folder durable: what was created, renamed or removed in it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: str, data: bytes) -> None:
    """Write a small file atomically and durably: under a temporary name, then renamed, so that readers see either the
    old file or the new one.

    Raises:
        CkpttoolError: it cannot be written.
    """
    folder, name = os.path.split(path)
    part = os.path.join(folder, f".{name}.partial-{os.getpid()}")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
        sync_folder(folder)
    except OSError as e:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise kind_of_failure(e)(f"{path} cannot be written: {e.strerror}.") from e


def write_all_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of the data to a descriptor at an offset in bytes, however many system calls it takes.

    Raises:
        OSError: one of them failed.
    """
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


class WriterPool:
    """Threads that write, and the buffers that wait for them."""

    def __init__(self, budget: IOBudget) -> None:
        count, size = 6 + 2 * budget.writer_threads, budget.buffer_bytes
        self.buffers = BufferPool(count, size)
        self.spare = count
        self.size = size
        from .threads import make_executor

        self.pool = make_executor(budget.writer_threads, "ckpttool-write")
        self.most_pending = max(
            1, budget.writer_threads - 1
        )  # a longer queue writes no faster, and its buffers leave the cache
        self.pending: list[Future[None]] = []
        self.lock = threading.Lock()
        self.holders: OrderedDict[LocalFile, None] = OrderedDict()  # files that hold a buffer, idle longest first

    def acquire(self, out: LocalFile) -> memoryview:
        """Return a free buffer for a file. If all are in use, the file that was idle longest gives up its buffer first;
        waits for a write if needed.

        Raises:
            CkpttoolError: an earlier write failed; this is its error.
        """
        if self.spare == 0:
            idle = next(iter(self.holders))
            idle.release_buffer()
        self.spare -= 1
        self.holders[out] = None
        buffer = self.buffers.free.get()  # waits for a write where none is free
        self.check()
        return buffer

    def submit(self, out: LocalFile, buffer: memoryview, n: int, offset: int) -> None:
        """Queue buffer[:n] to be written at byte `offset` of a file by a thread, which then frees the buffer; waits
        while too many writes are pending.

        Raises:
            CkpttoolError: an earlier write failed; this is its error.
        """
        self.holders.pop(out, None)
        self.spare += 1
        while len(self.pending) >= self.most_pending:
            self.pending.pop(0).result()
        self.pending.append(self.pool.submit(self._write_and_free, out, buffer, n, offset))

    def _write_and_free(self, out: LocalFile, buffer: memoryview, n: int, offset: int) -> None:
        """Write buffer[:n] at byte `offset` of a file, and free the buffer whether or not the write succeeds; runs in a
        writer thread."""
        try:
            out.pwrite(buffer[:n], offset)
        finally:
            self.buffers.free.put(buffer)

    def check(self) -> None:
        """Raise the error of a write that has ended, if there is one; does not wait."""
        while self.pending and self.pending[0].done():
            self.pending.pop(0).result()

    def drain(self) -> None:
        """Wait for every write that was submitted, and raise the error of the first that failed."""
        while self.pending:
            self.pending.pop(0).result()


class LocalFile(DestinationFile):
    """One file of the destination, written front to back.

    With `existing`, what is appended is compared with what an earlier run wrote, and nothing is written before
    `start_writing`. Without `create` the file must be there.
    """

    def __init__(self, path: str, writer: WriterPool, existing: bool = False, create: bool = True) -> None:
        self.path, self.writer = path, writer
        self.at = 0  # bytes appended so far
        self.buffer: memoryview | None = None
        self.base = 0  # file offset of buffer[0], a multiple of ALIGN
        self.tail = bytearray()  # the bytes from `base` on, while no buffer is held
        self.old_fd = -1
        flags = os.O_RDWR | (os.O_CREAT if create else 0) | os.O_CLOEXEC | os.O_NOFOLLOW
        self.direct = bool(_DIRECT)
        try:
            self.fd = os.open(path, flags | _DIRECT, 0o666)
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self.direct = False
            self.fd = os.open(path, flags, 0o666)
        self.there = -1  # a descriptor to read what is there, until `start_writing`
        try:
            ensure_owner_mode(self.fd, 0o600)
            if existing:
                self.there = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except BaseException:
            os.close(self.fd)
            raise

    def read_earlier(self, offset: int, length: int) -> bytes:
        """Return the `length` bytes from `offset` on that an earlier run wrote; fewer if it wrote fewer. Only before
        `start_writing`."""
        return os.pread(self.there, length, offset)

    def skip(self, data: bytes | memoryview) -> None:
        """Pass over the next bytes. Before `start_writing` they are on the disk already, and are checked by the
        read-back; afterwards they are appended."""
        if self.there < 0:
            self.append(data)
        else:
            self.at += len(data)

    def start_writing(self) -> None:
        """Switch from comparing with the bytes of an earlier run to writing, from the next byte on; does nothing if the
        file is being written already.

        Raises:
            Altered: the existing file is shorter than the bytes compared so far.
        """
        if self.there < 0:
            return
        self.base = self.at - self.at % ALIGN
        self.tail = bytearray(self.read_earlier(self.base, self.at - self.base))
        if os.fstat(self.there).st_size < self.at:
            raise Altered(self.path)
        os.close(self.there)
        self.there = -1

    def append(self, data: bytes | memoryview) -> None:
        """Append bytes; before `start_writing`, compare them with the bytes of the earlier run instead.

        Raises:
            Altered: they differ.
            CkpttoolError: an earlier write failed; this is its error.
        """
        if self.there >= 0:
            if self.read_earlier(self.at, len(data)) != data:
                raise Altered(self.path)
            self.at += len(data)
            return
        done, n = 0, len(data)
        if self.buffer is None and len(self.tail) + n <= _SMALL:
            self.tail += data
            self.at += n
            return
        view = memoryview(data)
        while done < n:
            if self.buffer is None:
                self.buffer = self.writer.acquire(self)
                self.buffer[: len(self.tail)] = self.tail
            elif self in self.writer.holders:
                self.writer.holders.move_to_end(self)
            used = self.at - self.base
            k = min(n - done, self.writer.size - used)
            self.buffer[used : used + k] = view[done : done + k]
            self.at += k
            done += k
            if used + k == self.writer.size:
                self.release_buffer()

    def release_buffer(self) -> None:
        """Submit the complete pages (of 4096 bytes) in the buffer for writing and give up the buffer; the remaining
        bytes are kept in `tail`."""
        if self.buffer is None:
            if len(self.tail) < ALIGN:
                return
            self.buffer = self.writer.acquire(self)
            self.buffer[: len(self.tail)] = self.tail
        used = self.at - self.base
        whole = used - used % ALIGN
        self.tail = bytearray(self.buffer[whole:used])
        buffer, self.buffer = self.buffer, None
        self.writer.submit(self, buffer, whole, self.base)
        self.base += whole

    def flush(self) -> None:
        """Submit everything appended so far for writing: complete pages, then the rest padded with zeros to a page;
        `finish` cuts off the padding."""
        self.release_buffer()
        if self.tail:
            n = -(-len(self.tail) // ALIGN) * ALIGN
            buffer = self.writer.acquire(self)
            buffer[: len(self.tail)] = self.tail
            buffer[len(self.tail) : n] = bytes(n - len(self.tail))
            self.writer.submit(self, buffer, n, self.base)

    def pwrite(self, data: memoryview, offset: int) -> None:
        """Write all of the data at an offset in bytes, through the page cache if the file system refuses direct writes;
        called by the writer threads.

        Raises:
            CkpttoolError: it cannot be written; `NoSpace` or `NotPermitted` where that is why.
        """
        done = 0
        while done < len(data):
            fd = self.fd
            try:
                done += os.pwrite(fd, data[done:], offset + done)
            except OSError as e:
                if e.errno == errno.EINVAL and self._reopen_cached(fd):
                    continue
                raise write_error(e, self.path) from e

    def _reopen_cached(self, fd: int) -> bool:
        """Open the file without O_DIRECT after the file system refused a direct write to `fd`; returns whether there is
        now another descriptor to write to."""
        with self.writer.lock:
            if self.fd == fd and self.direct:
                self.direct = False
                self.old_fd = self.fd  # another thread may be writing through it
                self.fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            return self.fd != fd

    def sync(self) -> None:
        """Make durable what was written. The caller must have waited for all writes.

        Raises:
            CkpttoolError: the system could not.
        """
        try:
            os.fdatasync(self.fd)
        except OSError as e:
            raise write_error(e, self.path) from e

    def end(self) -> None:
        """Hand the last bytes to the writer threads: nothing more will be appended."""
        self.flush()

    def finish(self) -> None:
        """Cut off the padding of the last page and make the file durable. The caller must have waited for all writes.

        Raises:
            CkpttoolError: the system could not.
        """
        try:
            os.ftruncate(self.fd, self.at)
            os.fsync(self.fd)
        except OSError as e:
            raise write_error(e, self.path) from e

    def close(self) -> None:
        """Close the descriptors."""
        for fd in (self.fd, self.old_fd, self.there):
            if fd >= 0:
                os.close(fd)
        self.fd = self.old_fd = self.there = -1
