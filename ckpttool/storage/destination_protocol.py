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

from ..errors import CkpttoolError, Interrupted, NoSpace, NotPermitted, kind_of_failure, path_of_failure
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
        """Return the bytes of the file so far, as the destination stores them."""
        return self.at

    def append(self, data: bytes | memoryview) -> None:
        """Append bytes. If the file was opened with `existing`, and until `start_writing`, they are compared with what
        an earlier run wrote, instead.

        Raises:
            Altered: other bytes are there.
        """
        raise NotImplementedError

    def skip(self, data: bytes | memoryview) -> None:
        """Pass over the next bytes of a tensor, which an earlier run has written already; they are not compared here,
        since the whole result is read back later."""
        self.append(data)

    def read_earlier(self, offset: int, length: int) -> bytes:
        """Return the `length` bytes from `offset` on that an earlier run wrote; fewer, or none, where it did not."""
        return b""

    def start_writing(self) -> None:
        """Write from the next byte on, instead of comparing with what an earlier run wrote; does nothing where that is
        the case already.

        Raises:
            Altered: the file that is there ends before.
        """

    def flush(self) -> None:
        """Hand everything appended so far to the system or the store."""

    def sync(self) -> None:
        """Make durable what was flushed. The caller must have waited for all writes."""

    def end(self) -> None:
        """Take note that the last byte was appended. Writes may still be under way."""

    def finish(self) -> None:
        """Make the whole file durable. The caller must have waited for all writes."""

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
        """Return this destination if several processes can fill it; otherwise None."""

    def open_file(self, name: str, pool: WriterPool, existing: bool) -> DestinationFile:
        """Open a file of the destination at its first byte.

        Args:
            name: of the file, relative to the destination.
            pool: the threads that write it.
            existing: an earlier run has begun it: what is appended is compared with what is there, until
                `start_writing`.
        """

    def write_file(self, name: str, data: bytes) -> None:
        """Write a whole file that is none of those planned from the index (`Draft`), and make it durable."""

    def append_journal(self, entry: JournalEntry) -> None:
        """Append an entry to the journal, by which an interrupted run is continued, and make it durable; does nothing
        unless `resumable`."""

    def restart(self) -> None:
        """Forget what an earlier run left: everything is written anew."""

    def commit(self) -> None:
        """Make what was written the destination. Every file must be finished.

        Raises:
            CkpttoolError: that failed; `state_after_error` says what is there.
        """

    def fail(self, e: BaseException) -> BaseException:
        """Stop after an error, keep what the next run can continue from, and return the error to raise: `e`, or one
        that says more about a system call or an interrupt."""
        if isinstance(e, KeyboardInterrupt):
            self.interrupt()
            return Interrupted(f"interrupted. {self.resume_hint}")
        # an error that says nothing against what was written leaves it to the next run
        if self.in_place:
            self.release()
        elif not isinstance(e, CkpttoolError) or e.keeps_work:
            self.interrupt()
        else:
            self.abandon()
        if isinstance(e, CkpttoolError):
            self.add_hint(e)
        if isinstance(e, OSError) and not isinstance(e, BrokenPipeError):
            return write_error(e, path_of_failure(e, self.location), self.state_after_error)
        return e

    @property
    def in_place(self) -> bool:
        """Return whether what was written has the destination's name by now."""

    @property
    def state_after_error(self) -> str:
        """Return a sentence that says what is at the destination after an error."""

    @property
    def resume_hint(self) -> str:
        """Return sentences that say what is there after an interruption, and what to do."""

    def add_hint(self, e: CkpttoolError) -> None:
        """Add a note to an error that says what is at the destination now, where its message does not say so."""

    def interrupt(self) -> None:
        """Keep what the next run can continue from, and remove the rest."""

    def abandon(self) -> None:
        """Remove everything that was written."""

    def release(self) -> None:
        """Stop writing, give up the destination, and keep what the next run can continue from."""


class ParallelDestination(Destination, Protocol):
    """A destination that several processes can fill.

    Workers write at any offset of the files that `path` names or, where `part_bytes` is not 0, send parts of so many
    bytes to a store.
    """

    part_bytes: int

    @property
    def has_earlier_parts(self) -> bool:
        """Return whether an earlier run of several workers left something to continue from."""

    @property
    def filled_parts(self) -> dict[int, PartResult]:
        """Return {number of a part: what its worker recorded of it} for the parts of this plan that are filled."""

    def why_alone(self) -> str | None:
        """Return a text that says why one process has to fill it after all; None where several can. It may ask a
        store."""

    def share(self, files: Mapping[str, int]) -> SharedState:
        """Create files for several processes to fill, and return as plain data what a worker makes its `SharedTree` or
        `SharedObjects` of.

        Args:
            files: {name: bytes} of the files.
        """

    def stop_sharing(self) -> None:
        """Refuse what workers write from here on; to be called when all is filled."""

    def find_missing_cells(
        self, sent: Mapping[str, Mapping[int, str]], sizes: Mapping[str, int]
    ) -> list[tuple[str, int]]:
        """Return [(file, number of a cell)] for the cells, pieces of `part_bytes`, that a store does not have as they
        were sent; [] on a disk, where nothing is sent.

        Args:
            sent: {file: {number of a cell: ETag that the store answered}}.
            sizes: {file: bytes}.
        """

    def path(self, name: str) -> str:
        """Return the path at which a file is built on this machine; only where `part_bytes` is 0."""


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def write_error(e: OSError, path: str, outcome: str = "The destination is untouched.") -> CkpttoolError:
    """Return the error for a failed system call on the destination; it is not raised.

    Args:
        e: what the system call raised.
        path: the file or folder that it was about.
        outcome: a sentence that says what is at the destination now.
    """
    if e.errno in _NO_ROOM:
        return NoSpace(
            f"{path}: {e.strerror}. {outcome} Free some space and run the same command again; what was written is kept "
            "and used.",
            code="CKPT0801",
        )
    if (what := missing_resource(e)) is not None:
        return NoSpace(
            f"{path}: {e.strerror}: {what}. {outcome} Fix that or write elsewhere, then run the same command again."
        )
    folder = os.path.dirname(os.path.abspath(path))
    # /proc and its like say that what they refuse to make does not exist
    if kind_of_failure(e) is NotPermitted or (e.errno == errno.ENOENT and os.path.isdir(folder)):
        what = path if os.access(folder, os.W_OK | os.X_OK) else f"the folder {folder}"
        return NotPermitted(
            f"{what} is not writable: {e.strerror}. {outcome} Write elsewhere, or have its owner allow it.",
            code="CKPT1402",
        )
    return CkpttoolError(f"{path}: {e.strerror} (errno {e.errno}). {outcome}")
