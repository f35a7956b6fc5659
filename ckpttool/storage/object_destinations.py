"""A destination in an object store, sent while it is made: one object, or all objects below a prefix.

Nothing is on the local disk but, where very many files are written at once, the parts that wait to be sent. An object
appears whole when its last byte was sent. In S3, several workers may send parts (shared_objects.py). What an
interrupted run of several workers, or one that was killed, leaves is gone on from by the next run to the same place;
one process that is interrupted removes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..errors import CkpttoolError, Corrupt, Differs, NotRecognised, Unsafe, note_change
from ..index.draft import Draft
from . import urls
from .destination_protocol import DestinationFile, ParallelDestination, PartResult, SharedState
from .local_file import WriterPool
from .objects import s3_object
from .partial import EarlierRun, JournalEntry
from .upload import ObjectUpload, SharedUpload
from .upload_folder import UploadFolder

__all__ = ["ObjectDestination", "PrefixDestination"]


class ObjectFile(DestinationFile):
    """A file that is sent while it is written; the upload it belongs to makes it durable."""

    def __init__(
        self, path: str, send: Callable[[bytes | memoryview], None], end: Callable[[], None] = lambda: None
    ) -> None:
        """Make a file of an upload.

        Args:
            path: URL of the file.
            send: called with the next bytes of the file.
            end: called when the last byte was appended.
        """
        self.path, self._send, self._end, self.at = path, send, end, 0

    def append(self, data: bytes | memoryview) -> None:
        """Hand the next bytes to the upload, which sends them when a part is full."""
        self._send(data)
        self.at += len(data)

    def end(self) -> None:
        """Tell the upload that the last byte was appended."""
        self._end()


class _UploadDestination(ParallelDestination):
    """What an object and a prefix share."""

    resumable = False
    shared: Mapping[str, SharedUpload] = {}
    max_open_finished = 1  # what is complete need not wait
    readable_path = None  # a store shows an object when it is complete, and not before
    earlier = EarlierRun()
    upload: ObjectUpload | UploadFolder

    def __init__(self, url: str, upload: ObjectUpload | UploadFolder) -> None:
        self.location = urls.redact_url(url)
        self.messages: list[str] = []
        self.upload, self.part_bytes = upload, upload.part_bytes
        self._committed = False

    @property
    def parallel(self) -> ParallelDestination | None:
        """Return this destination if the store lets several processes send its parts; otherwise None."""
        return self if self.upload.sharable else None

    @property
    def in_place(self) -> bool:
        """Return whether the upload was committed, so that the store shows the new objects."""
        return self._committed

    @property
    def state_after_error(self) -> str:
        """Return a sentence, for people, that says what the destination holds after an error."""
        return (
            f"{self.location} is in place, whole, and was not read back."
            if self.in_place
            else "The destination is untouched."
        )

    @property
    def resume_hint(self) -> str:
        """Return sentences, for people, that say what an interrupted run left and how to resume or restart."""
        if self.in_place:
            return self.state_after_error
        if self.shared:
            return (
                f"{self.location} is untouched. Run the same command again to continue: the store keeps the parts that "
                "were sent (and bills them), until then or until a lifecycle rule of the bucket removes them."
            )
        return (
            f"{self.location} is untouched. Run the same command again; it starts over, and removes the parts that "
            "were sent."
        )

    def interrupt(self) -> None:
        """Keep the parts that several workers sent, from which the next run can resume; remove those that this process
        sent alone."""
        self.release()

    def add_hint(self, e: CkpttoolError) -> None:
        """Add a note to an error: that the new checkpoint is in place, after `commit`; or how to resume, if workers
        sent parts and the error keeps them. The message about a difference that the read-back found says what to
        do."""
        if self.in_place:
            if isinstance(e, (Corrupt, NotRecognised, Unsafe)):
                e.add_note(f"{self.location} is in place, but cannot be read back. Remove it.")
            elif not isinstance(e, Differs):
                e.add_note(self.state_after_error)
        elif self.shared and e.keeps_work:
            e.add_note(self.resume_hint)

    def append_journal(self, entry: JournalEntry) -> None:
        """Do nothing: a destination in a store has no journal."""

    @property
    def filled_parts(self) -> dict[int, PartResult]:
        """Return {}: the store itself lists what it has."""
        return {}

    def why_alone(self) -> str | None:
        """Return the reason, as text, why only one process can send the parts; None if several can. Sends a request to
        the store."""
        at = s3_object(self.upload.url)
        if at is None or at.lists_parts():
            return None
        return (
            "the store does not list the parts of an upload (ListParts), which shows whether all has arrived that "
            "several processes send"
        )

    @property
    def has_earlier_parts(self) -> bool:
        """Return whether an earlier run left uploaded parts to resume from."""
        return self.upload.sharable and self.upload.has_earlier_parts

    def share(self, files: Mapping[str, int]) -> SharedState:
        """Begin the uploads of these files, or resume those of an earlier run, and return the plain data from which a
        worker makes its `SharedObjects`.

        Args:
            files: {name: bytes} of the files.
        """
        raise NotImplementedError

    def stop_sharing(self) -> None:
        """Do nothing: what is sent too late is noticed by `find_missing_cells`, or refused by the store."""

    def find_missing_cells(
        self, sent: Mapping[str, Mapping[int, str]], sizes: Mapping[str, int]
    ) -> list[tuple[str, int]]:
        """Return [(file, cell number)] of the cells, pieces of `part_bytes`, that the store does not list with the size
        and the ETag of what was sent; all others are then ready for `commit`.

        Args:
            sent: {file: {cell number: ETag that the store returned}}.
            sizes: {file: bytes}.

        Raises:
            RemoteError: the store fails, or another run aborted or completed an upload.
        """
        with ThreadPoolExecutor(8, "ckpttool-send") as pool:
            calls = {
                name: pool.submit(up.find_wrong_parts, {n + 1: etag for n, etag in sent[name].items()}, sizes[name])
                for name, up in self.shared.items()
            }
            return [(name, number - 1) for name, call in calls.items() for number in call.result()]

    def path(self, name: str) -> str:
        """Raise NotImplementedError: a destination in a store has no local files."""
        raise NotImplementedError

    def restart(self) -> None:
        """Do nothing: this run uses nothing that an earlier run left."""

    def commit(self) -> None:
        """Make the uploaded objects visible, each of them complete.

        Raises:
            DestinationExists: the object, or one below the prefix, was created meanwhile.
            RemoteError: the store fails.
        """
        self.upload.commit()
        self._committed = True
        note_change(self.state_after_error)

    def abandon(self) -> None:
        """Remove what was sent and is not visible yet. Never raises."""
        self.upload.abort()

    def release(self) -> None:
        """Stop sending. Keep the parts that several workers sent; remove those that this process sent alone."""
        if not self.shared:
            self.abandon()


class ObjectDestination(_UploadDestination):
    """The upload of one file.

    Raises:
        DestinationExists: there is such an object, and not `force`.
    """

    upload: ObjectUpload

    def __init__(self, url: str, need_bytes: int, force: bool, lock: Mapping[str, Any]) -> None:
        """Prepare the upload of one object.

        Args:
            url: of the object.
            need_bytes: bytes that the object is expected to have.
            force: an existing object may be replaced.
            lock: S3's arguments for an object lock, {name: value}; {} for none.
        """
        super().__init__(url, ObjectUpload(url, force=force, lock=lock, expect_bytes=need_bytes, keep_parts=True))
        if lock and not self.upload.locked:
            self.messages.append(
                "the bucket has no object lock, so retention and legal hold are recorded only in the archive and the "
                "ledger"
            )

    def share(self, files: Mapping[str, int]) -> SharedState:
        """Begin the upload of the only file, or resume that of an earlier run, and return the plain data from which a
        worker makes its `SharedObjects`.

        Args:
            files: {name: bytes} of that file.

        Raises:
            RemoteError: the store fails.
        """
        begun = self.has_earlier_parts
        (name,) = files
        up = self.upload.share()
        self.shared = {name: up}
        return {
            "part_bytes": up.size,
            "on_disk": False,
            "earlier": begun,
            "objects": {name: [self.upload.url, up.upload_id]},
        }

    def open_file(self, name: str, pool: WriterPool, existing: bool) -> ObjectFile:
        """Return the file whose bytes become the object; all arguments are ignored."""
        return ObjectFile(self.location, self.upload.append)

    def write_file(self, name: str, data: bytes) -> None:
        """Raise AssertionError: one object has no room for another file."""
        raise AssertionError(f"{name} cannot be put into {self.location}, which is one object")


class PrefixDestination(_UploadDestination):
    """The upload of all files of a draft.

    Raises:
        DestinationExists: something lies there, and not `force`.
    """

    upload: UploadFolder

    def __init__(self, url: str, draft: Draft, force: bool) -> None:
        sizes = {f.name: f.size for f in draft.files}
        largest = max(sizes.values())
        super().__init__(
            url,
            UploadFolder(url, list(sizes), force=force, open_at_once=_compute_max_open_files(draft), largest=largest),
        )

    def share(self, files: Mapping[str, int]) -> SharedState:
        """Begin the uploads of these files, or resume those of an earlier run, and return the plain data from which a
        worker makes its `SharedObjects`.

        Args:
            files: {name: bytes} of the files.

        Raises:
            RemoteError: the store fails.
        """
        begun = self.has_earlier_parts
        self.upload.share(files)
        self.shared = self.upload.shared
        objects = {name: [f"{self.upload.url}/{name}", up.upload_id] for name, up in self.shared.items()}
        return {"part_bytes": self.part_bytes, "on_disk": self.upload.on_disk, "earlier": begun, "objects": objects}

    def release(self) -> None:
        """Stop sending. Keep the parts that several workers sent; remove those that this process sent alone."""
        self.upload.abort(keep_shared=True)

    @property
    def resume_hint(self) -> str:
        """Return sentences, for people, that say what an interrupted run left and how to resume or restart."""
        if self.in_place or not self.upload.showing:
            return super().resume_hint
        return (
            f"Some objects below {self.location} are visible already, and what they replace is gone; they are not a "
            "checkpoint yet. Run the same command again, which replaces them."
        )

    def open_file(self, name: str, pool: WriterPool, existing: bool) -> ObjectFile:
        """Return a file whose bytes become the object `name` below the prefix; `pool` and `existing` play no part."""
        return ObjectFile(
            f"{self.location}/{name}", lambda data: self.upload.append(name, data), lambda: self.upload.flush(name)
        )

    def write_file(self, name: str, data: bytes) -> None:
        """Upload a complete file that is not planned in the index (`Draft`); it becomes visible with `commit`."""
        self.upload.append(name, data)


def _compute_max_open_files(draft: Draft) -> int:
    """Return the largest number of files of a draft that are open at the same time when its tensors are written in
    order; at least 1."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for k, (name, entry) in enumerate(draft.checkpoint.tensors.items()):
        for file in entry.chunks.file if name not in draft.aliases else ():
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
