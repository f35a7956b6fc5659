"""The protocol of what a conversion writes to: a local folder, a local file, an object or a prefix of objects.

A destination appears whole or not at all. `local_destination` builds it in a hidden folder and renames that, and can go
on from what an interrupted run left; `object_destinations` sends it to a store, which shows objects that are complete,
and begins anew.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import CkpttoolError, Interrupted, NoSpace, NotPermitted, kind_of_failure
from .source import missing_resource

if TYPE_CHECKING:
    from .local_file import WriterPool
    from .partial import EarlierRun, JournalEntry

__all__ = [
    "Altered",
    "Destination",
    "DestinationFile",
    "ParallelDestination",
    "PartResult",
    "SharedState",
    "write_error",
]


#: What a worker said of a part that it has filled: digests, CRC32s, bytes, ...
PartResult = dict[str, Any]
#: What workers need to write to a shared destination, as plain data.
SharedState = dict[str, Any]


class Altered(Exception):
    """What an earlier run left on the disk is not what this run would have written: all of it is made anew."""


class DestinationFile:
    """A file of a destination, written front to back. Methods that a kind of file has no use for do nothing.

    `path` names it in messages, `at` counts the bytes appended.
    """

    path: str
    at: int

    @property
    def size(self) -> int:
        """Bytes of the file so far, as the destination stores them."""
        return self.at

    def append(self, data: bytes | memoryview) -> None:
        """Append bytes; compare them with what is there if the file was opened with `existing`.

        Raises:
            Altered: other bytes are there.
        """
        raise NotImplementedError

    def skip(self, data: bytes | memoryview) -> None:
        """Pass over the next bytes, of a tensor, which are there already: the read-back proves them."""
        self.append(data)

    def read_earlier(self, offset: int, length: int) -> bytes:
        """Return what an earlier run wrote there; fewer bytes where it did not."""
        return b""

    def start_writing(self) -> None:
        """Write from here on, instead of comparing with what is there.

        Raises:
            Altered: the file that is there ends before.
        """

    def flush(self) -> None:
        """Hand everything appended so far to the system or the store."""

    def sync(self) -> None:
        """Make durable what was flushed; all writes have ended."""

    def end(self) -> None:
        """Take note that the last byte was appended."""

    def finish(self) -> None:
        """Make the whole file durable; all writes have ended."""

    def close(self) -> None:
        """Close what is open, whether the file is finished or not."""


class Destination(Protocol):
    """A place where a checkpoint appears whole or not at all.

    `location`           path or URL, for messages
    `messages`           what people should know of what was found, put back, removed or left
    `earlier`            what an interrupted run of the same plan left there
    `parallel`           the destination itself if several processes can fill it; otherwise None
    `resumable`          whether a run that is interrupted can be continued, so that a journal is of use
    `max_open_finished`  files whose last byte has come are finished and closed when there are so many
    `readable_path`      where the result can be read before it is committed; None where that is not possible

    The engine ends with `commit` or `fail`; the other members below `fail` are what that is made of.
    """

    messages: list[str]
    location: str
    earlier: EarlierRun
    resumable: bool
    max_open_finished: int
    readable_path: str | None

    @property
    def parallel(self) -> ParallelDestination | None:
        """This destination if several processes can fill it; otherwise None."""

    def open_file(self, name: str, pool: WriterPool, existing: bool) -> DestinationFile:
        """Open a file at its first byte; with `existing`, what an earlier run wrote is compared until
        `start_writing`."""

    def write_file(self, name: str, data: bytes) -> None:
        """Write a whole file that is no part of the draft, and make it durable."""

    def append_journal(self, entry: JournalEntry) -> None:
        """Append a line to the journal and make it durable; does nothing unless `resumable`."""

    def restart(self) -> None:
        """Forget what an earlier run left."""

    def commit(self) -> None:
        """Make what was written the destination. Every file must be finished."""

    def fail(self, e: BaseException) -> BaseException:
        """Stop after an error, keep what the next run can continue from, and return the error to raise."""
        if isinstance(e, KeyboardInterrupt):
            self.interrupt()
            return Interrupted(f"interrupted. {self.resume_hint}")
        # an error that says nothing against what was written leaves it to the next run
        if not isinstance(e, CkpttoolError) or e.keeps_work or self.in_place:
            self.release()
        else:
            self.abandon()
        if isinstance(e, CkpttoolError):
            self.add_hint(e)
        if isinstance(e, OSError) and not isinstance(e, BrokenPipeError):
            return write_error(e, e.filename or self.location, self.state_after_error)
        return e

    @property
    def in_place(self) -> bool:
        """Whether what was written has the destination's name."""

    @property
    def state_after_error(self) -> str:
        """A sentence that says what is at the destination after an error."""

    @property
    def resume_hint(self) -> str:
        """Sentences that say what is there after an interruption, and what to do."""

    def add_hint(self, e: CkpttoolError) -> None:
        """Add to an error what is at the destination now, where its message does not say so."""

    def interrupt(self) -> None:
        """Keep what the next run can continue from, and remove the rest."""

    def abandon(self) -> None:
        """Remove everything that was written."""

    def release(self) -> None:
        """Stop writing, and keep what the next run can continue from."""


class ParallelDestination(Destination, Protocol):
    """A destination that several processes can fill.

    Workers write at any offset of the files that `path` names or, where `part_bytes` is not 0, send parts of so many
    bytes to a store.
    """

    part_bytes: int

    @property
    def has_earlier_parts(self) -> bool:
        """Whether an earlier run of several workers left something to continue from."""

    @property
    def filled_parts(self) -> dict[int, PartResult]:
        """What is filled of this plan: {number of a part: what its worker said of it}."""

    def share(self, files: Mapping[str, int]) -> SharedState:
        """Create files, {name: bytes}, for others to fill; returns what a `SharedTree` or `SharedObjects` is made
        of."""

    def stop_sharing(self) -> None:
        """Refuse what workers write from here on: all is filled."""

    def find_missing_cells(
        self, sent: Mapping[str, Mapping[int, str]], sizes: Mapping[str, int]
    ) -> list[tuple[str, int]]:
        """Return (file, cell) of what a store does not have as it was sent, {file: {cell: ETag}}; [] on a disk."""

    def path(self, name: str) -> str:
        """Return where a file is built on this machine; only where `part_bytes` is 0."""


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def write_error(e: OSError, path: str, outcome: str = "The destination is untouched.") -> CkpttoolError:
    """Return the error for a failed system call on the destination; `outcome` says what is there now."""
    if e.errno in _NO_ROOM:
        return NoSpace(
            f"{path}: {e.strerror}. {outcome} Free some space and run the same command again; what was written is kept "
            "and used."
        )
    if (what := missing_resource(e)) is not None:
        return NoSpace(
            f"{path}: {e.strerror}: {what}. {outcome} Fix that or write elsewhere, then run the same command again."
        )
    if kind_of_failure(e) is NotPermitted:
        folder = os.path.dirname(os.path.abspath(path))
        what = path if os.access(folder, os.W_OK | os.X_OK) else f"the folder {folder}"
        return NotPermitted(
            f"{what} is not writable: {e.strerror}. {outcome} Write elsewhere, or have its owner allow it."
        )
    return CkpttoolError(f"{path}: {e.strerror} (errno {e.errno}). {outcome}")
