"""What a conversion writes to: a local folder, a local file, an object or a prefix of objects behind one protocol.

A destination appears whole or not at all. `local_destination` builds it in a hidden folder and renames that, and can go
on from what an interrupted run left; `object_destinations` sends it to a store, which shows objects that are complete,
and begins anew.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import CkpttoolError, NoSpace, NotPermitted, kind_of_failure
from .source import short_of

if TYPE_CHECKING:
    from .local_file import WriterPool
    from .partial import Earlier

__all__ = ["Altered", "Destination", "DestinationFile", "write_error"]


class Altered(Exception):
    """What an earlier run left on the disk is not what this run would have written: all of it is made anew."""


class DestinationFile:
    """A file of a destination, written front to back. What a kind of file has no use for does nothing.

    `path` names it in messages, `at` counts the bytes appended.
    """

    path: str
    at: int

    @property
    def size(self) -> int:
        """Bytes of the file so far, as the destination stores them."""
        return self.at

    def append(self, data: bytes | memoryview) -> None:
        """The next bytes. Of a file that was opened with `existing`, they are compared with what is there.

        Raises:
            Altered: other bytes are there.
        """
        raise NotImplementedError

    def skip(self, data: bytes | memoryview) -> None:
        """The next bytes, of a tensor, which are there already: the read-back proves them."""
        self.append(data)

    def peek(self, offset: int, length: int) -> bytes:
        """What an earlier run wrote there; fewer bytes where it did not."""
        return b""

    def go_on(self) -> None:
        """From here on, write.

        Raises:
            Altered: the file that is there ends before.
        """

    def settle(self) -> None:
        """Hand on everything appended so far."""

    def sync(self) -> None:
        """Make durable what was handed on; all writes have ended."""

    def end(self) -> None:
        """The last byte was appended."""

    def finish(self) -> None:
        """Make the whole file durable; all writes have ended."""

    def close(self) -> None:
        """Give up what is open, whether the file is finished or not."""


class Destination(Protocol):
    """A place where a checkpoint appears whole or not at all.

    `place`         path or URL, for messages
    `messages`      what people should know of what was found, put back, removed or left
    `earlier`       what an interrupted run of the same plan left there
    `sharable`      whether several processes can fill it: `share`, `begun` and `filled` are of use then
    `part_bytes`    of a store, bytes of a part of an object; 0 where workers write at any offset, in files that `path`
                    names
    `begun`         whether an earlier run of several workers left something to go on from
    `continuable`   whether a run that is interrupted can be continued, so that a journal is of use
    `finish_after`  files whose last byte has come are finished when there are so many
    `readable`      where the result can be read before it is committed; None where that is not possible
    `in_place`      whether what was written has the destination's name
    """

    messages: list[str]
    finish_after: int
    continuable: bool
    sharable: bool
    part_bytes: int

    @property
    def begun(self) -> bool: ...

    @property
    def filled(self) -> dict[int, dict[str, Any]]:
        """{number of a part: what its worker said of it} of the parts of this plan that are filled."""

    def share(self, files: Mapping[str, int]) -> dict[str, Any]:
        """Create files, {name: bytes}, for others to fill; what a `SharedTree` or `SharedObjects` is made of."""

    def unshare(self) -> None:
        """All is filled: what others write from here on is refused."""

    def confirm(self, sent: Mapping[str, Mapping[int, str]], sizes: Mapping[str, int]) -> list[tuple[str, int]]:
        """(file, cell) of what a store does not have as it was sent, {file: {cell: ETag}}; where `part_bytes`."""

    def path(self, name: str) -> str:
        """Where a file is built."""

    @property
    def place(self) -> str: ...
    @property
    def earlier(self) -> Earlier: ...
    @property
    def readable(self) -> str | None: ...
    @property
    def in_place(self) -> bool: ...
    @property
    def outcome(self) -> str:
        """What an error left at the destination."""

    @property
    def again(self) -> str:
        """What is there after an interruption, and what to do."""

    def explain(self, e: CkpttoolError) -> None:
        """Add to an error what is at the destination now, where its message does not say so."""

    def open_file(self, name: str, pool: WriterPool, existing: bool) -> DestinationFile:
        """A file, opened at its first byte; with `existing`, what an earlier run wrote is compared until `go_on`."""

    def put(self, name: str, data: bytes) -> None:
        """A whole file that is no part of the draft, made durable."""

    def note(self, entry: dict[str, Any]) -> None:
        """Append to the journal; where `continuable`."""

    def begin_anew(self) -> None:
        """Forget what an earlier run left."""

    def commit(self) -> None:
        """Make what was written the destination. Every file must be finished."""

    def abandon(self) -> None:
        """Remove everything that was written."""

    def release(self) -> None:
        """Stop writing, and keep what the next run can go on from."""

    def stop(self) -> str:
        """After an interruption: keep what the next run can go on from, remove the rest, and say what is there."""


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def write_error(e: OSError, path: str, outcome: str = "The destination is untouched.") -> CkpttoolError:
    """What a failed system call on the destination means; `outcome` is what is there now."""
    if e.errno in _NO_ROOM:
        return NoSpace(
            f"{path}: {e.strerror}. {outcome} Free some space and run the same command again; what was written is kept "
            "and used."
        )
    if (what := short_of(e)) is not None:
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
