"""A destination in an object store, sent while it is made.

`Sending` and `SendingFolder` stand where `draft.Staging` stands for a local path. Nothing is on the local disk but, where
very many files are written at once, the parts that wait to be sent; what is sent appears whole when the last byte was, and
an interrupted run leaves parts that the next one at the same place removes. There is nothing to go on from: sending begins
anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..index.draft import Draft
from . import urls
from .upload import Upload, UploadFolder

__all__ = ["Sending", "SendingFolder", "Sent"]


class Sent:
    """A file, with the methods that `fill` calls."""

    fd = -1

    def __init__(
        self, path: str, send: Callable[[bytes | memoryview], None], end: Callable[[], None] = lambda: None
    ) -> None:
        self.path, self._send, self.end, self.at = path, send, end, 0

    @property
    def size(self) -> int:
        """Bytes sent."""
        return self.at

    def append(self, data: bytes | memoryview) -> None:
        """The next bytes."""
        self._send(data)
        self.at += len(data)

    def settle(self) -> None:
        """Nothing waits here."""

    def go_on(self) -> None:
        """Nothing was there before."""

    def finish(self) -> None:
        """`commit` does."""

    def close(self) -> None:
        """`commit` or `abandon` do."""


class _Sent:
    """What the two destinations share."""

    local = False
    upload: Upload | UploadFolder

    def __init__(self, url: str) -> None:
        self.folder = urls.redact_url(url)
        self.messages: list[str] = []
        self.in_place = False

    @property
    def outcome(self) -> str:
        """What an error left at the destination."""
        return (
            f"{self.folder} is in place, whole, and was not read back."
            if self.in_place
            else "The destination is untouched."
        )

    @property
    def again(self) -> str:
        """What is there after an interruption, and what to do."""
        if self.in_place:
            return self.outcome
        return f"{self.folder} is untouched. Run the same command again; it begins anew, and removes the parts that were sent."

    def note(self, entry: dict[str, Any]) -> None:
        """No journal."""

    def commit(self) -> None:
        """What was sent is there, whole."""
        self.upload.commit()
        self.in_place = True

    def abandon(self) -> None:
        """Remove what was sent."""
        self.upload.abort()

    release = abandon


class Sending(_Sent):
    """The upload of one file.

    Raises:
        DestinationExists: there is such an object, and not `force`.
    """

    upload: Upload

    def __init__(self, url: str, need_bytes: int, force: bool, lock: Mapping[str, Any]) -> None:
        super().__init__(url)
        self.upload = Upload(url, force=force, lock=lock, expect_bytes=need_bytes)
        if lock and not self.upload.locked:
            self.messages.append(
                "the bucket has no object lock, so retention and legal hold stand in the archive and in the ledger alone"
            )

    def stream(self, name: str) -> Sent:
        """The file."""
        return Sent(self.folder, self.upload.append)


class SendingFolder(_Sent):
    """The upload of all files of a draft.

    Raises:
        DestinationExists: something lies there, and not `force`.
    """

    upload: UploadFolder

    def __init__(self, url: str, draft: Draft, force: bool) -> None:
        super().__init__(url)
        sizes = {f.name: f.size for f in draft.files}
        self.upload = UploadFolder(
            url, list(sizes), force=force, open_at_once=_open_at_once(draft), largest=max(sizes.values())
        )

    @property
    def again(self) -> str:
        """What is there after an interruption, and what to do."""
        if self.in_place or not self.upload.showing:
            return super().again
        return (
            f"Some objects below {self.folder} are visible already, and what they replace is gone; ckpttool takes them for no "
            "checkpoint. Run the same command again, which replaces them."
        )

    def stream(self, name: str) -> Sent:
        """A file."""
        return Sent(
            f"{self.folder}/{name}", lambda data: self.upload.append(name, data), lambda: self.upload.settle(name)
        )

    def put(self, name: str, data: bytes) -> None:
        """A file that is no part of the draft."""
        self.upload.append(name, data)


def _open_at_once(draft: Draft) -> int:
    """How many files of a draft are written to at the same time, at most."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for k, (name, entry) in enumerate(draft.checkpoint.tensors.items()):
        for file in entry.chunks.file if name not in draft.same else ():
            first.setdefault(file, k)
            last[file] = k
    change = [0] * (len(draft.checkpoint.tensors) + 1)
    for file, k in first.items():
        change[k] += 1
        change[last[file] + 1] -= 1
    most = now = 0
    for c in change:
        now += c
        most = max(most, now)
    return max(1, most)
