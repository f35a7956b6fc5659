"""How much memory and how many threads a run may take, and the buffers that it takes them as."""

from __future__ import annotations

import mmap
import queue
from contextlib import suppress
from typing import NamedTuple

from ..errors import NoSpace, argument
from .source import Source

__all__ = ["ALIGN", "DEFAULT_BUDGET", "BufferPool", "IOBudget", "Lease", "read_peak_memory"]


def read_peak_memory() -> int:
    """Return the peak resident memory of this process in bytes; on Linux since the kernel last reset that peak (VmHWM;
    ru_maxrss would include the parent process)."""
    with suppress(OSError, StopIteration), open("/proc/self/status", encoding="ascii", errors="replace") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("VmHWM:"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


#: O_DIRECT moves whole pages of this many bytes.
ALIGN = 4096


class IOBudget(NamedTuple):
    """How much of the machine a run may take: threads that read and that write, and bytes of one buffer.

    With one thread, the thread that digests also reads and writes files of this machine.
    """

    threads: int = 2
    buffer_bytes: int = 4 << 20

    def reader_threads(self, source: Source) -> int:
        """Return the number of threads that read a source, besides the thread that computes digests: more for a remote
        source, 1 for one that must be read in order, 0 where the digest thread reads by itself."""
        if source.is_remote:
            return 1 if source.in_order else 4 * self.threads
        return 0 if self.threads == 1 else 1 if source.in_order else self.threads

    @property
    def writer_threads(self) -> int:
        """Return the number of threads that write to local disks, besides the thread that computes digests; 0 where the
        digest thread writes by itself."""
        return 0 if self.threads == 1 else self.threads


DEFAULT_BUDGET = IOBudget()


class BufferPool:
    """`count` buffers of `size` bytes, aligned to 2 MiB and on huge pages where the system has them.

    Raises:
        NoSpace: there is no memory for them.
    """

    def __init__(self, count: int, size: int) -> None:
        huge = 2 << 20
        self.size = size
        step = -(-size // huge) * huge
        try:
            self._map = mmap.mmap(-1, count * step + huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as e:
            raise NoSpace(
                f"{count * step + huge:,} bytes of buffers: {e.strerror}. Fewer {argument('threads')} or a smaller "
                f"{argument('max_memory_bytes')} take less.",
                code="CKPT0802",
            ) from e
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without them
        import ctypes

        start = -ctypes.addressof(ctypes.c_char.from_buffer(self._map)) % huge
        view = memoryview(self._map)
        # the one given back last is taken first: it is in the cache, and buffers that are never needed stay without
        # pages
        self.free: queue.LifoQueue[memoryview] = queue.LifoQueue()
        for i in range(count):
            self.free.put(view[start + i * step : start + i * step + size])


class Lease:
    """A buffer that some blocks share; it goes back to the pool when the last of them is released."""

    __slots__ = ("blocks", "buffer", "pool")

    def __init__(self, pool: BufferPool, buffer: memoryview, blocks: int) -> None:
        self.pool, self.buffer, self.blocks = pool, buffer, blocks

    def end(self) -> None:
        """Release one of the blocks that share the buffer; the last one gives the buffer back to the pool."""
        self.blocks -= 1
        if self.blocks == 0:
            self.pool.free.put(self.buffer)
