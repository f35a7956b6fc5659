"""A destination in an object store: one file, sent while it is made.

`Sending` stands where `draft.Staging` stands for a folder. Nothing is on the local disk, the object appears whole when the
last byte was sent, and an interrupted run leaves parts that the next one at the same object removes. There is nothing to
go on from: sending begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import remote
from .errors import Unsupported

__all__ = ["Sending", "Sent"]


class Sent:
    """The file, with the methods that `fill` calls."""

    fd = -1

    def __init__(self, upload: remote.Upload) -> None:
        self.upload, self.path, self.at = upload, remote.shown(upload.url), 0

    @property
    def size(self) -> int:
        """Bytes sent."""
        return self.at

    def append(self, data: bytes | memoryview) -> None:
        """The next bytes."""
        self.upload.append(data)
        self.at += len(data)

    def settle(self) -> None:
        """Nothing waits here."""

    def end(self) -> None:
        """The last byte was appended."""

    def finish(self) -> None:
        """`Sending.commit` does."""

    def close(self) -> None:
        """`Sending` does."""


class Sending:
    """The upload of one file.

    Raises:
        DestinationExists: there is such an object, and not `force`. Unsupported: the layout is a folder.
    """

    local = False

    def __init__(self, url: str, is_file: bool, need_bytes: int, force: bool, lock: Mapping[str, Any]) -> None:
        if not is_file:
            raise Unsupported(f"{remote.shown(url)}: a folder cannot be sent to an object store yet; one file can.")
        self.folder = remote.shown(url)
        self.entries: list[dict[str, Any]] = [{}]
        self.messages: list[str] = []
        self.upload = remote.Upload(url, force=force, lock=lock, expect_bytes=need_bytes)
        if lock and not self.upload.locked:
            self.messages.append(
                "the bucket has no object lock, so retention and legal hold stand in the archive and in the ledger alone"
            )

    @property
    def again(self) -> str:
        """What to do after an interruption."""
        return "Run the same command again; it begins anew, and removes the parts that were sent."

    def stream(self) -> Sent:
        """The file."""
        return Sent(self.upload)

    def note(self, entry: dict[str, Any]) -> None:
        """No journal."""

    def commit(self) -> None:
        """The object is there, whole."""
        self.upload.commit()

    def abandon(self) -> None:
        """Remove what was sent."""
        self.upload.abort()

    release = abandon
