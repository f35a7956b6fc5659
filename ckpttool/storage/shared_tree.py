"""A destination that several processes build at once: what a worker may do in the folder that the coordinator owns.

Workers write bytes into files that are there already, at offsets of the plan, and say what they have filled in
`parts/<number>.json`, which appears when those bytes are durable. Everything else is the coordinator's: it creates the
files, writes what lies between the parts, and renames.

A worker that was stopped for a while, or is slow, must not write into a destination that is read back or was committed
meanwhile. The journal tells: it gets a line when all parts are filled, and one more before the commit, so a worker
writes only while the journal is the same file with the same size as when its request was made. Bytes that it had read
before were read from a source that the commit found unchanged.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from threading import get_ident
from typing import Any

from ..errors import CkpttoolError
from .destination_protocol import write_error
from .local_file import WriterPool
from .local_range import LocalRange

__all__ = ["SharedTree", "has_coherent_page_cache", "read_filled_parts"]


_KEYS = {"digests", "crcs", "seen", "fringes", "bytes", "node"}


class SharedTree:
    """The folder of a destination, as a worker sees it.

    Args:
        shared: what `LocalDestination.share` gives.
    """

    def __init__(self, shared: Mapping[str, Any]) -> None:
        """Keep what the coordinator shares; nothing is opened.

        Args:
            shared: what `LocalDestination.share` returned: {"folder": the partial folder, "fence": (inode, bytes) of
                its journal, "plan": digest of the plan, "coherent": whether all machines share one page cache of the
                folder}.
        """
        self.folder, self.fence, self.plan = str(shared["folder"]), tuple(shared["fence"]), str(shared["plan"])
        self.coherent = bool(shared["coherent"])

    def may_write(self) -> None:
        """Check that the destination is still open for this worker: its journal is the same file, with the same size,
        as when the worker's request was made.

        Raises:
            CkpttoolError: the destination was committed, removed, restarted or completed since.
        """
        try:
            st = os.stat(os.path.join(self.folder, "journal"), follow_symlinks=False)
            now: tuple[int, int] | None = (st.st_ino, st.st_size)
        except OSError:
            now = None
        if now != self.fence:
            raise CkpttoolError(
                f"{self.folder} is no longer being filled; this worker has nothing to do there.", code="CKPT0102"
            )

    def open_range(self, name: str, pool: WriterPool, start: int) -> LocalRange:
        """Open a file of the destination for writing from byte `start` on.

        On a network file system, the `fringes` of the returned range collect the bytes that the coordinator has to
        write.

        Args:
            name: of the file, relative to the destination.
            pool: the threads that write it.
            start: offset of the first byte to write.

        Raises:
            CkpttoolError: the destination is no longer open for this worker.
        """
        self.may_write()
        fringes = None if self.coherent else list[tuple[int, bytes]]()
        return LocalRange(os.path.join(self.folder, "tree", name), pool, start, self.may_write, fringes)

    def finish_sending(self) -> dict[str, object]:
        """Return {}, since nothing is uploaded."""
        return {}

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def record_part(self, number: int, result: Mapping[str, object]) -> None:
        """Record durably that a part of the plan is filled; the bytes of the part must be durable already.

        Args:
            number: of the part.
            result: facts about the part, as plain data for JSON: its digests, CRC32s, number of bytes, ...

        Raises:
            CkpttoolError: the destination is no longer being filled, or it cannot be written.
        """
        path = os.path.join(self.folder, "parts", f"{number}.json")
        mine = f"{path}.{os.uname().nodename}.{os.getpid()}.{get_ident()}"  # two threads of a worker may fill it
        try:
            fd = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with open(fd, "w", encoding="utf-8") as f:
                json.dump({"plan": self.plan, **result}, f, separators=(",", ":"))
                f.flush()
                os.fsync(f.fileno())
            self.may_write()
            os.rename(mine, path)
        except OSError as e:
            raise write_error(e, path) from e


def has_coherent_page_cache(folder: str, mounts: str = "/proc/self/mountinfo") -> bool:
    """Return whether processes on all machines that mount a folder share one page cache: False on NFS, SMB and FUSE;
    True on other file systems, or if the kind is unknown.

    Args:
        folder: an existing one.
        mounts: file that lists the mounted file systems, in the format of /proc/self/mountinfo.
    """
    real, best = os.path.realpath(folder), ("", "")
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as f:
            for line in f:
                words, _, rest = line.partition(" - ")
                point = words.split(" ")[4].encode().decode("unicode_escape")
                if (real + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best[0]):
                    best = (point, rest.split(" ")[0])
    except (OSError, IndexError, UnicodeError):
        return True
    return not re.match(r"nfs|cifs|smb|fuse", best[1])


def read_filled_parts(folder: str, plan: str) -> dict[int, dict[str, object]]:
    """Return {part number: result} of the complete parts of a plan, where the result is what a worker gave to
    `SharedTree.record_part`. Malformed files and those of other plans are ignored.

    Args:
        folder: the partial folder, in which the destination is built.
        plan: digest of the plan.
    """
    out: dict[int, dict[str, Any]] = {}
    try:
        names = os.listdir(os.path.join(folder, "parts"))
    except OSError:
        return out
    for name in names:
        number, _dot, end = name.partition(".")
        if end != "json" or not number.isdecimal():
            continue
        try:
            fd = os.open(
                os.path.join(folder, "parts", name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
            with open(fd, encoding="utf-8") as f:
                found = json.load(f)
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(found, dict) and found.pop("plan", None) == plan and found.keys() >= _KEYS:
            out[int(number)] = found
    return out
