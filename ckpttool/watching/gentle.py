"""Low priority for a process beside a training job: nice, the idle class of the disk's queue, a rate of reading, and no
pages of a checkpoint left in the page cache."""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress

from ..errors import CkpttoolError
from ..storage.source import Source

__all__ = ["Pace", "lower_priority"]

#: Numbers of the system call ioprio_set (asm/unistd.h); the C library has no function for it.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
_PROCESS, _IDLE = 1, 3 << 13  # IOPRIO_WHO_PROCESS, IOPRIO_PRIO_VALUE(IOPRIO_CLASS_IDLE, 0)
_DROP_EVERY = 256 << 20


def lower_priority() -> list[str]:
    """Give this process, and the threads that it starts from now on, the lowest priority for the CPU and the disk.

    Returns:
        What was set, for people: ["nice 19", "idle I/O"]; what the system refuses is missing.
    """
    done = []
    with suppress(OSError):
        done.append(f"nice {os.nice(19)}")
    if (number := _IOPRIO_SET.get(platform.machine())) is not None and platform.system() == "Linux":
        import ctypes

        if ctypes.CDLL(None).syscall(number, _PROCESS, 0, _IDLE) == 0:
            done.append("idle I/O")
    return done


class Pace:
    """Progress of a read that keeps to a rate, and drops the pages that were read from the page cache.

    Args:
        rate: bytes a second at most; None for no limit.
    """

    def __init__(self, rate: int | None) -> None:
        self.rate = rate
        self.source: Source | None = None
        self.read_bytes = 0
        self._what, self._done = "", 0
        self._began, self._since = time.monotonic(), 0
        self._kept = 0

    def start(self, source: Source | None) -> None:
        """Reset the counters before a new read; `source` is the source whose pages are dropped from the page cache,
        None if it is not open yet."""
        self.source = source
        self.read_bytes = self._since = self._kept = self._done = 0
        self._what, self._began = "", time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Count the bytes read since the last call, and sleep as long as the rate is exceeded.

        Args:
            what: the stage; each counts its bytes from 0.
            done, total: bytes of the stage so far and in all.
        """
        step = done - self._done if what == self._what else done
        self._what, self._done = what, done
        self.read_bytes += step
        self._kept += step
        if self._kept >= _DROP_EVERY:
            self.drop_pages()
        if self.rate is not None:
            self._since += step
            ahead = self._since / self.rate - (time.monotonic() - self._began)
            if ahead > 0:
                time.sleep(ahead)

    def drop_pages(self) -> None:
        """Ask the system to remove the source's files from the page cache; pages that are not yet on the disk stay."""
        self._kept = 0
        if self.source is None or not self.source.local or not hasattr(os, "posix_fadvise"):
            return
        for name in self.source.identities():
            with suppress(OSError, CkpttoolError), self.source.borrow_fd(name) as fd:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
