"""Uploads many objects that together are a checkpoint, so that readers never see a partial one."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence, Set

from ..bounded_json import parse
from ..errors import CkpttoolError, Corrupt, DestinationExists, Unsafe, Unsupported, argument
from . import upload
from .azure import AzureObject
from .listings import list_tree
from .objects import conditional_object, delete_remote_object, get_with_token, put_if_unchanged, s3_object
from .remote import filesystem_for
from .retries import NotFound, with_retries
from .threads import run_in_threads
from .upload import BlocksUpload, FileUpload, PartsUpload, SharedUpload, UploadPool, choose_part_bytes
from .urls import UNFINISHED, redact_url

__all__ = ["UploadFolder"]


class UploadFolder:
    """Objects below one URL that together are a checkpoint; readers never see a partial one.

    Every object is uploaded as `ObjectUpload` does. `commit` makes them visible one after the other, the marker (the
    last of `names`) last; what it replaces loses its marker first. Meanwhile an object `UNFINISHED` lists the names and
    identifies the run. If it is found later, the folder was never complete, and the next run replaces it. Of two runs,
    one has the note and the other stops; without `force` nothing is overwritten that was not there, as a part of an
    interrupted run, at the beginning. A store without conditional requests (all but S3 and Azure) is looked at
    again instead.

    `open_at_once` files are written to at the same time; beyond `UploadSizes.buffered_bytes` their parts wait on the
    local disk.

    Raises:
        DestinationExists: the folder is not empty, without `force`. Unsupported: the store is read-only.
    """

    def __init__(self, url: str, names: Sequence[str], *, force: bool, open_at_once: int, largest: int) -> None:
        """Check what exists below the URL, and choose the size of a part.

        Args:
            url: URL of the folder.
            names: names of all objects to write, relative to the URL; the last one marks the checkpoint as complete.
            force: replace what exists below the URL.
            open_at_once: how many objects are written to at the same time.
            largest: size of the largest object, in bytes.

        Raises:
            DestinationExists: objects exist that no interrupted run left, without `force`.
            RemoteError: the store fails.
        """
        self.url, self.names, self.force = url.rstrip("/"), list(names), force
        self._fs, self._path, _ = filesystem_for(self.url)
        self._note, self._mine = f"{self.url}/{UNFINISHED}", b""
        self._far = far = s3_object(self._note)
        self._old, self._token = self._inspect_target()
        #: (name, key, id) of uploads that an earlier run left
        self._left: list[tuple[str, str, str]] = []
        if far:  # objects of the folder itself, and what lies deeper only where this run will write it, too
            prefix = far.key.removesuffix(UNFINISHED)
            left = far.list_unfinished_uploads(
                prefix, lambda key: "/" not in key.removeprefix(prefix) or key.removeprefix(prefix) in self.names
            )
            self._left = [(key.removeprefix(prefix), key, upload) for key, upload in left]
        sizes = upload.SIZES
        share = sizes.buffered_bytes // max(1, open_at_once)
        share -= share % (256 << 10) if share > 256 << 10 else 0  # Google takes multiples of that
        size = choose_part_bytes(largest, max(sizes.smallest_part_bytes, min(sizes.part_bytes, share)))
        self.part_bytes, self.on_disk = size, size * open_at_once > sizes.buffered_bytes
        self._pool = UploadPool(max(2, sizes.in_flight_bytes // size))
        self._uploads: dict[str, PartsUpload | FileUpload] = {}
        self.shared: dict[str, SharedUpload] = {}
        self.showing = False  # whether some of it may be visible

    def _inspect_target(self) -> tuple[list[str], str | None]:
        """Find out what exists below the URL: (names of the existing objects, which will be replaced; token of the note
        that an interrupted run left, for `put_if_unchanged`, or None without a note).

        Raises:
            DestinationExists: objects exist that no interrupted run left, without `force`.
            RemoteError: the store fails.
        """
        found, token, ours = self._list_objects(), None, set[str]()
        if UNFINISHED in found:
            data, token = get_with_token(self._note)
            try:
                ours = {UNFINISHED, *parse(data, UNFINISHED)["names"]}
            except (Corrupt, Unsafe, TypeError, LookupError):
                pass  # not a note of ours
        if found and not self.force and not set(found) <= ours:
            raise DestinationExists(
                f"{redact_url(self.url)} holds {len(found)} objects, first {found[0]!r}. Choose another destination, "
                f"or {argument('force', True)} to replace it whole.",
                code="CKPT0601",
            )
        return found, token

    def _list_objects(self) -> list[str]:
        """Return the names of all objects below the URL, relative to it, sorted; [] if there are none.

        Raises:
            RemoteError: the store fails.
        """
        try:
            if (tree := list_tree(self._fs, self._path, redact_url(self.url))) is not None:
                return sorted(name for name, info in tree if info["type"] == "file")
            found: list[str] = with_retries(redact_url(self.url), lambda: self._fs.find(self._path))
        except NotFound:
            return []
        names = (f.removeprefix(self._path).lstrip("/") for f in found if f.startswith(self._path + "/"))
        return sorted(n for n in names if n)  # none is that of the "folder" that the console of S3 makes

    @property
    def sharable(self) -> bool:
        """Return whether other processes can send the parts of its objects: in S3."""
        return self._far is not None

    def _find_earlier_uploads(self) -> dict[str, tuple[str, str]]:
        """Return {name of an object, relative to the URL: (its key in the bucket, id of the upload)} of this folder's
        objects for which an earlier run left exactly one unfinished upload."""
        many = Counter(name for name, _, _ in self._left)
        return {name: (key, upload) for name, key, upload in self._left if name in self.names and many[name] == 1}

    @property
    def has_earlier_parts(self) -> bool:
        """Return whether an earlier run left uploaded parts that `share` resumes from."""
        return self._far is not None and any(
            self._far.has_parts(upload, key) for key, upload in self._find_earlier_uploads().values()
        )

    def share(self, names: Iterable[str]) -> None:
        """Begin the uploads of objects, or resume those of an earlier run, so that other processes can send their
        parts; `shared` is then {name: upload}.

        Args:
            names: of the objects, relative to the URL.

        Raises:
            RemoteError: the store fails.
        """
        own, wanted = self._find_earlier_uploads(), list(names)
        self._remove_leftover_parts(keep={own[name][1] for name in wanted if name in own})

        def begin(name: str) -> SharedUpload:
            """Return the upload of an object: that of an earlier run, or a new one."""
            at = s3_object(f"{self.url}/{name}")
            assert at is not None
            kept = own[name][1] if name in own else None
            return SharedUpload(at, force=True, part_bytes=self.part_bytes, pool=self._pool, upload=kept)

        self.shared = dict(zip(wanted, run_in_threads(begin, wanted, 8, "ckpttool-send"), strict=True))
        self._uploads |= self.shared

    def _remove_leftover_parts(self, keep: Set[str] = frozenset()) -> None:
        """Abort the uploads that an earlier run left, which removes their parts; those that the store refuses to abort
        remain.

        Args:
            keep: ids of uploads that are not aborted.
        """
        if self._far is not None and self._left:
            self._far.abort_uploads((key, upload) for _, key, upload in self._left if upload not in keep)
        self._left = []

    def append(self, name: str, data: bytes | memoryview) -> None:
        """Append bytes to one of the objects, which the first call begins.

        Args:
            name: of the object, relative to the URL.
            data: the bytes.

        Raises:
            NoSpace: the local disk, on which parts wait to be sent, is full.
            RemoteError: the store fails.
        """
        self._remove_leftover_parts()
        if name not in self._uploads:
            self._uploads[name] = self._start_upload(name)
        self._uploads[name].append(data)

    def _start_upload(self, name: str) -> PartsUpload | FileUpload:
        """Return a new upload for an object.

        Args:
            name: of the object, relative to the URL.
        """
        at = conditional_object(f"{self.url}/{name}")
        if at is None:
            return FileUpload(f"{self.url}/{name}", force=True, block_bytes=self.part_bytes)
        if isinstance(at, AzureObject):
            return BlocksUpload(at, force=True, part_bytes=self.part_bytes, pool=self._pool, on_disk=self.on_disk)
        return PartsUpload(at, force=True, part_bytes=self.part_bytes, pool=self._pool, on_disk=self.on_disk)

    def flush(self, name: str) -> None:
        """Send everything that was appended to a complete object.

        Raises:
            RemoteError: the store fails.
        """
        self._uploads[name].flush()

    def commit(self) -> None:
        """Make all objects visible, the marker of the checkpoint last.

        Raises:
            DestinationExists: another run has written below the URL meanwhile.
            RemoteError: the store failed; the same command starts over and replaces the objects that are visible by
                then.
        """
        for one in self._uploads.values():
            one.flush()
        self._write_note()
        self.showing = True
        marker = self.names[-1]
        for name in self._old:
            if name == marker or (name not in self._uploads and name != UNFINISHED):
                delete_remote_object(f"{self.url}/{name}")
        for name, one in self._uploads.items():
            one.force = name in self._old and name != marker
        others = [one for name, one in self._uploads.items() if name != marker]
        run_in_threads(lambda one: one.commit(), others, 8, "ckpttool-send")
        if get_with_token(self._note)[0] != self._mine:
            raise self._make_other_run_error()
        self._uploads[marker].commit()
        delete_remote_object(self._note)
        self._pool.close()

    def _write_note(self) -> None:
        """Write the note, an object that identifies this run and lists its objects: from then on this run owns the
        folder, and the folder is no checkpoint.

        Raises:
            DestinationExists: another run has written below the URL meanwhile.
            RemoteError: the store fails.
        """
        mark = {"tool": "ckpttool", "run": uuid.uuid4().hex, "names": sorted(self._uploads)}
        self._mine = json.dumps(mark).encode()
        try:
            if (
                not put_if_unchanged(self._note, self._mine, self._token)
                and get_with_token(self._note)[0] != self._mine
            ):
                raise self._make_other_run_error()
        except Unsupported:
            note = self._start_upload(UNFINISHED)
            note.append(self._mine)
            note.commit()
        new = sorted(set(self._list_objects()) - {*self._old, UNFINISHED})
        if new and not self.force:
            delete_remote_object(self._note)
            raise DestinationExists(
                f"{redact_url(self.url)}: {new[0]!r} appeared there during the upload; nothing was replaced. Choose "
                f"another destination, or {argument('force', True)} to replace what is there.",
                code="CKPT0603",
            )
        self._old += new

    def _make_other_run_error(self) -> DestinationExists:
        """Return, without raising it, the error for another run that is committing to the same folder."""
        return DestinationExists(
            f"{redact_url(self.url)}: another run is making its files visible there. Wait for it and look at what it "
            "wrote; if it has stopped, run the same command again.",
            code="CKPT0603",
        )

    def abort(self, *, keep_shared: bool = False) -> None:
        """Remove what was sent and is not visible yet. Never raises.

        Args:
            keep_shared: keep what other processes have sent, for the next run.
        """
        for name, one in self._uploads.items():
            if keep_shared and name in self.shared:
                continue
            try:
                one.abort()
            except (CkpttoolError, OSError):
                pass
        self._pool.close()
