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

from ..errors import CkpttoolError, Interrupted, NoSpace, NotPermitted, get_failed_path, kind_of_failure
from .source import describe_missing_resource
from .urls import make_path_absolute

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
        """Return the number of bytes in the file so far, as the destination stores them."""
        return self.at

    def append(self, data: bytes | memoryview) -> None:
        """Append bytes. In a file opened with `existing`, until `start_writing`, compare them with the bytes of the
        earlier run instead.

        Raises:
            Altered: they differ.
        """
        raise NotImplementedError

    def skip(self, data: bytes | memoryview) -> None:
        """Advance over the next bytes of a tensor, which an earlier run wrote already. They are not compared here,
        since the result is read back later; a destination without earlier bytes appends them."""
        self.append(data)

    def read_earlier(self, offset: int, length: int) -> bytes:
        """Return the `length` bytes from `offset` on that an earlier run wrote; fewer, or none, where it did not."""
        return b""

    def start_writing(self) -> None:
        """Switch from comparing with the bytes of an earlier run to writing, from the next byte on; does nothing if the
        file is being written already.

        Raises:
            Altered: the existing file is shorter than the bytes compared so far.
        """

    def flush(self) -> None:
        """Hand everything appended so far to the system or the store."""

    def sync(self) -> None:
        """Make durable what was flushed. The caller must have waited for all writes."""

    def end(self) -> None:
        """Mark the file as complete: nothing more will be appended. Writes may still be pending."""

    def finish(self) -> None:
        """Make the complete file durable. The caller must have waited for all writes."""

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
            existing: an earlier run wrote a part of it: appended bytes are compared with that part until
                `start_writing`.
        """

    def write_file(self, name: str, data: bytes) -> None:
        """Write a complete file that is not planned in the index (`Draft`), and make it durable.

        Args:
            name: of the file, relative to the destination.
            data: its bytes.
        """

    def append_journal(self, entry: JournalEntry) -> None:
        """Append an entry to the journal, by which an interrupted run is continued, and make it durable; does nothing
        unless `resumable`."""

    def restart(self) -> None:
        """Discard the progress of an earlier run, so that everything is written again."""

    def commit(self) -> None:
        """Give the written checkpoint its final name, or make it visible in the store. Every file must be finished.

        Raises:
            CkpttoolError: that failed; `state_after_error` says what the destination holds.
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
            return write_error(e, get_failed_path(e, self.location), self.state_after_error)
        return e

    @property
    def in_place(self) -> bool:
        """Return whether the written checkpoint has its final name, or is visible in the store."""

    @property
    def state_after_error(self) -> str:
        """Return a sentence, for people, that says what the destination holds after an error."""

    @property
    def resume_hint(self) -> str:
        """Return sentences, for people, that say what an interrupted run left and how to resume or restart."""

    def add_hint(self, e: CkpttoolError) -> None:
        """Add a note to an error that says what the destination holds now or how to resume, unless its message says
        so."""

    def interrupt(self) -> None:
        """Keep what the next run can continue from, and remove the rest."""

    def abandon(self) -> None:
        """Remove everything that was written."""

    def release(self) -> None:
        """Stop writing and release the lock, but keep what the next run can resume from."""


class ParallelDestination(Destination, Protocol):
    """A destination that several processes can fill.

    Workers write at any offset of the files that `path` names or, where `part_bytes` is not 0, send parts of so many
    bytes to a store.
    """

    part_bytes: int

    @property
    def has_earlier_parts(self) -> bool:
        """Return whether an earlier run with several workers left parts to resume from."""

    @property
    def filled_parts(self) -> dict[int, PartResult]:
        """Return {part number: the result that its worker recorded} for the complete parts of this plan."""

    def why_alone(self) -> str | None:
        """Return the reason, as text, why only one process can write to this destination; None if several can. May send
        a request to a store."""

    def share(self, files: Mapping[str, int]) -> SharedState:
        """Create files that several processes will write, and return the plain data from which a worker makes its
        `SharedTree` or `SharedObjects`.

        Args:
            files: {name: bytes} of the files.
        """

    def stop_sharing(self) -> None:
        """Refuse all further writes of workers; called when all parts are complete."""

    def find_missing_cells(
        self, sent: Mapping[str, Mapping[int, str]], sizes: Mapping[str, int]
    ) -> list[tuple[str, int]]:
        """Return [(file, cell number)] of the cells, pieces of `part_bytes`, that a store lacks or has with another
        size or ETag; [] for a destination on disk, which uploads nothing.

        Args:
            sent: {file: {cell number: ETag that the store returned}}.
            sizes: {file: bytes}.
        """

    def path(self, name: str) -> str:
        """Return the local path at which a file is built; only if `part_bytes` is 0.

        Args:
            name: of the file, relative to the destination.
        """


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
    if (what := describe_missing_resource(e)) is not None:
        return NoSpace(
            f"{path}: {e.strerror}: {what}. {outcome} Fix that or write elsewhere, then run the same command again."
        )
    folder = os.path.dirname(make_path_absolute(path))
    # /proc and its like say that what they refuse to make does not exist
    if kind_of_failure(e) is NotPermitted or (e.errno == errno.ENOENT and os.path.isdir(folder)):
        what = path if os.access(folder, os.W_OK | os.X_OK) else f"the folder {folder}"
        return NotPermitted(
            f"{what} is not writable: {e.strerror}. {outcome} Write elsewhere, or have its owner allow it.",
            code="CKPT1402",
        )
    return CkpttoolError(f"{path}: {e.strerror} (errno {e.errno}). {outcome}")
