"""Uploads one object so that it appears as a whole or not at all.

Object stores have no rename: an object is uploaded in parts, which are not visible, and completed in one request.
Unless something is to be replaced, that request carries a condition (If-None-Match), so two writers cannot overwrite
each other.

Sources: the API reference of S3 (CreateMultipartUpload, CompleteMultipartUpload, PutObject; "Multipart upload limits":
10,000 parts of 5 MiB to 5 GiB), and of Azure (Put Block, Put Block List: 50,000 blocks).
"""

from __future__ import annotations

import hashlib
import io
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from ..errors import CkpttoolError, NoSpace, RemoteError, Unsupported
from .azure import AzureObject
from .objects import NO_LOCK, S3Answer, S3Object, conditional_object, exists_error, get_required_value
from .remote import filesystem_for
from .retries import ConditionFailed, Denied, NotFound, with_retries
from .urls import redact_url

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = [
    "SIZES",
    "BlocksUpload",
    "FileUpload",
    "ObjectUpload",
    "PartsUpload",
    "SharedUpload",
    "UploadPool",
    "UploadSizes",
    "choose_part_bytes",
    "temp_space_error",
    "upload_lost_error",
]


@dataclass(frozen=True, kw_only=True)
class UploadSizes:
    """How objects are cut into parts.

    Args:
        part_bytes: a part, unless the object needs larger ones.
        smallest_part_bytes: what a store allows for a part that is not the last.
        parts: the most parts of one object.
        in_flight_bytes: parts that are being sent at the same time, at most, if parts are small.
        buffered_bytes: memory for parts that are being filled.
    """

    part_bytes: int = 16 << 20
    smallest_part_bytes: int = 5 << 20
    parts: int = 10_000
    in_flight_bytes: int = 48 << 20
    buffered_bytes: int = 128 << 20


#: The sizes of all uploads of this process.
SIZES = UploadSizes()


class UploadPool:
    """Threads that send the parts of all objects of one destination, `many` at a time. `submit` waits for a free one,
    so that no queue of parts grows in memory."""

    def __init__(self, many: int) -> None:
        """Prepare `many` threads, each of which sends one part at a time."""
        from concurrent.futures import ThreadPoolExecutor

        self.many, self.pool = many, ThreadPoolExecutor(many, "ckpttool-send")
        self.free = threading.Semaphore(many)

    def submit(self, call: Callable[..., None], *args: object) -> Future[None]:
        """Call a function in a thread of the pool, and return its future; waits until a thread is free."""
        self.free.acquire()
        future = self.pool.submit(call, *args)
        future.add_done_callback(lambda _: self.free.release())
        return future

    def close(self) -> None:
        """Wait for all calls, and end the threads."""
        self.pool.shutdown()


class ObjectUpload:
    """One object, written from its first byte to its last; it is not visible before `commit`.

    Parts that a killed run left behind for the same object are removed first, so of two runs at one object the first
    fails; with `keep_parts`, they stay until the first byte, and `share` goes on from them. `lock` holds S3's arguments
    for an object lock; `locked` is False if the bucket has none. Memory is a few parts; parts are so large that 10,000
    of them hold `expect_bytes`.

    Raises:
        DestinationExists: the object exists, without `force`. RemoteError: the store fails.
    """

    def __init__(
        self,
        url: str,
        *,
        force: bool,
        lock: Mapping[str, Any] | None = None,
        expect_bytes: int = 0,
        keep_parts: bool = False,
    ) -> None:
        """Check what exists at the URL, and choose how the object is uploaded.

        Args:
            url: URL of the object.
            force: replace an object that exists already.
            lock: arguments of S3's requests for an object lock; None for no lock.
            expect_bytes: expected size of the object, which determines the size of a part.
            keep_parts: keep the parts that an earlier run left, so that `share` can resume.

        Raises:
            DestinationExists: the object exists, without `force`.
            Unsupported: a lock is asked for outside S3, or the store is read-only.
            RemoteError: the store fails.
        """
        self.url, self.force = url, force
        at = conditional_object(url)
        if lock and not isinstance(at, S3Object):
            raise Unsupported(f"{redact_url(url)}: only S3 stores have object locks.", code="CKPT0340")
        self._to: PartsUpload | FileUpload
        self._left: list[tuple[str, str]] = []
        if at is None:
            self._to = FileUpload(url, force=force, block_bytes=SIZES.part_bytes)
            self.locked = False
            return
        if not force and at.head() is not None:
            raise exists_error(at.url)
        size = choose_part_bytes(expect_bytes, SIZES.part_bytes)
        pool = UploadPool(max(1, SIZES.in_flight_bytes // size))
        if isinstance(at, AzureObject):
            self._to = BlocksUpload(at, force=force, part_bytes=size, pool=pool)
        else:
            self._at, self._left = at, at.list_unfinished_uploads(at.key, lambda key: key == at.key)
            if lock or not keep_parts:
                self._remove_leftover_parts()
            self._to = PartsUpload(at, force=force, part_bytes=size, pool=pool, lock=dict(lock or {}))
        self.locked = self._to.locked

    def _remove_leftover_parts(self) -> None:
        """Remove the parts that an earlier run left of this object, once; what the store refuses to remove stays."""
        if self._left:
            self._at.abort_uploads(self._left)
            self._left = []

    @property
    def sharable(self) -> bool:
        """Return whether other processes can send its parts: in S3, without an object lock."""
        return isinstance(self._to, PartsUpload) and self._to.sharable

    @property
    def part_bytes(self) -> int:
        """Return the size of a part in bytes; 0 if the store has no multipart uploads."""
        return self._to.size if isinstance(self._to, PartsUpload) else 0

    @property
    def has_earlier_parts(self) -> bool:
        """Return whether an earlier run left uploaded parts that `share` resumes from."""
        return len(self._left) == 1 and self._at.has_parts(self._left[0][1])

    def share(self) -> SharedUpload:
        """Begin the upload, or resume that of an earlier run, and return the upload whose id other processes need to
        send its parts. Requires `sharable`, and that nothing was appended.

        Raises:
            RemoteError: the store fails.
        """
        assert isinstance(self._to, PartsUpload) and self._to.id is None
        keep = self._left.pop()[1] if len(self._left) == 1 else None
        self._remove_leftover_parts()
        self._to = SharedUpload(self._at, force=self.force, part_bytes=self._to.size, pool=self._to.pool, upload=keep)
        return self._to

    def append(self, data: bytes | memoryview) -> None:
        """Append bytes to the object; the buffer `data` may be reused afterwards.

        Raises:
            NoSpace: the local disk, on which parts wait to be sent, is full.
            RemoteError: the store fails.
        """
        self._remove_leftover_parts()
        self._to.append(data)

    def commit(self) -> None:
        """Make the object visible, as a whole.

        Raises:
            DestinationExists: it was created meanwhile, without `force`; nothing was replaced.
            RemoteError: the store fails, or has lost parts.
        """
        self._remove_leftover_parts()
        self._to.commit()
        self._end_threads()

    def abort(self) -> None:
        """Remove what was written. Never raises; the next run removes what could not be removed now."""
        try:
            self._to.abort()
        except (CkpttoolError, OSError):
            pass
        self._end_threads()

    def _end_threads(self) -> None:
        """End the threads that send parts; nothing can be appended any more."""
        if isinstance(self._to, PartsUpload):
            self._to.pool.close()


def upload_lost_error(url: str) -> RemoteError:
    """Return, without raising it, the error for an upload that the store no longer knows."""
    return RemoteError(
        f"{url}: its parts are gone; another run began to write the same object. Nothing was replaced; run the command "
        "again when it has ended.",
        code="CKPT0908",
    )


def temp_space_error(e: OSError) -> NoSpace:
    """Return, without raising it, the error for parts that could not be written to the local disk; `e` is what the
    write raised."""
    import tempfile

    return NoSpace(
        f"{tempfile.gettempdir()}: {e.strerror}. So many files are written at once that their parts wait there to be "
        "sent; free some space, or set TMPDIR to a roomier folder, and run the same command again.",
        code="CKPT0803",
    )


def choose_part_bytes(expect_bytes: int, usual: int) -> int:
    """Return the size of a part in bytes: `usual`, or the next larger number of MiB with which 10,000 parts hold the
    object.

    Args:
        expect_bytes: expected size of the object.
        usual: the smallest size to return.
    """
    need = -(-expect_bytes // SIZES.parts)
    return usual if need <= usual else -(-need // (1 << 20)) << 20


class PartsUpload:
    """An object of S3: in parts where it has more than one, else in one request when it is committed. `on_disk` keeps
    the part that is being filled in a file without a name."""

    at: S3Object

    def __init__(
        self,
        at: S3Object,
        *,
        force: bool,
        part_bytes: int,
        pool: UploadPool,
        lock: dict[str, Any] | None = None,
        on_disk: bool = False,
    ) -> None:
        """Prepare the upload; with a lock, begin a multipart upload at once.

        Args:
            at: the object to write.
            force: replace an object that exists already.
            part_bytes: size of each part but the last, in bytes.
            pool: the threads that send the parts.
            lock: arguments of S3's requests for an object lock, emptied if the bucket has none; None for no lock.
            on_disk: keep the part that is being filled in a temporary file, not in memory.

        Raises:
            RemoteError: the store fails.
        """
        self.at, self.force, self.size, self.pool, self.on_disk = at, force, part_bytes, pool, on_disk
        # identifies this upload: if an answer was lost, the request may have succeeded
        self.mark = {"ckpttool-upload": uuid.uuid4().hex}
        self.id: str | None = None
        if lock:
            self._start_multipart(lock)
        self.locked = bool(lock)
        self.part, self.number, self.nbytes = self._open_part_file(), 0, 0
        self.done: dict[int, S3Answer] = {}
        self.pending: list[Future[None]] = []

    @property
    def sharable(self) -> bool:
        """Return whether other processes can send its parts."""
        return not self.locked

    def _open_part_file(self) -> IO[bytes]:
        """Return an empty temporary file, on disk or in memory, for the bytes of the next part."""
        import tempfile

        return tempfile.TemporaryFile() if self.on_disk else io.BytesIO()

    def _start_multipart(self, lock: dict[str, Any]) -> None:
        """Start a multipart upload and keep its id.

        Args:
            lock: S3's arguments for an object lock; emptied if the bucket has none.

        Raises:
            RemoteError: the store fails.
        """
        try:
            answer = self.at.request("create_multipart_upload", Key=self.at.key, Metadata=self.mark, **lock)
        except RemoteError as e:
            if not lock or not NO_LOCK.search(str(e)):
                raise
            lock.clear()
            self._start_multipart(lock)
            return
        self.id = str(get_required_value(answer, "UploadId", self.at.url))

    def append(self, data: bytes | memoryview) -> None:
        """Append bytes to the object; each part is sent when it is full.

        Raises:
            NoSpace: the local disk, on which parts wait to be sent, is full.
            RemoteError: an earlier part could not be sent, or there are too many parts.
        """
        view = memoryview(data).cast("B")
        self.nbytes += len(view)
        while len(view):
            if self.part.tell() == self.size:
                self._submit_part()
            n = min(len(view), self.size - self.part.tell())
            try:
                self.part.write(view[:n])
            except OSError as e:
                raise temp_space_error(e) from None
            view = view[n:]

    def _submit_part(self) -> None:
        """Hand the part that is being filled to the pool, and begin the next one.

        Raises:
            RemoteError: there are too many parts, or an earlier one could not be sent.
        """
        if self.number == SIZES.parts:
            raise RemoteError(
                f"{self.at.url}: {SIZES.parts:,} parts of {self.size:,} bytes are full; an object has no more of them."
            )
        if self.id is None:
            self._start_multipart({})
        while self.pending and self.pending[0].done():
            self.pending.pop(0).result()
        self.number += 1
        self.pending.append(self.pool.submit(self._send_part, self.number, self.part))
        self.part = self._open_part_file()

    def _send_part(self, number: int, body: IO[bytes]) -> None:
        """Upload a part and record the store's description of it; runs in a thread of the pool.

        Args:
            number: of the part, from 1 on.
            body: a file with its bytes, which is closed.
        """
        assert self.id is not None
        self.done[number] = self.at.put_part(self.id, number, body)
        body.close()

    def flush(self) -> None:
        """Upload all parts that are not sent yet, and wait for them; only the request that makes the object visible
        remains. A small object that is not in parts is sent with that request.

        Raises:
            RemoteError: a part could not be sent.
        """
        if self.id is not None and not self.part.closed and (self.part.tell() or not self.number):
            self._submit_part()
        while self.pending:
            self.pending.pop(0).result()
        if self.id is not None:
            self.part.close()

    def commit(self) -> None:
        """Make the object visible, as a whole.

        Raises:
            DestinationExists: it was created meanwhile, without `force`; nothing was replaced.
            RemoteError: the store fails, has lost parts, or another run has ended the upload.
        """
        self.flush()
        try:
            self._complete()
        except (ConditionFailed, NotFound) as e:
            found = self.at.head()
            if found and self._is_ours(found):
                return  # the first try succeeded, only its answer was lost
            if isinstance(e, ConditionFailed):
                self.abort()
                raise exists_error(self.at.url) from None
            raise upload_lost_error(self.at.url) from None

    def _complete(self) -> None:
        """Send the request that makes the object visible, and check the size of a multipart object.

        Raises:
            ConditionFailed, NotFound: the object was created meanwhile, or another run has completed or aborted the
                upload.
            RemoteError: the store fails, or has lost parts.
        """
        only_new: dict[str, Any] = {} if self.force else {"IfNoneMatch": "*"}
        if self.id is None:
            self.at.request("put_object", Key=self.at.key, Body=self.part, Metadata=self.mark, **only_new)
            self.part.close()
            return
        parts = {"Parts": [self.done[k] for k in sorted(self.done)]}
        self.at.request(
            "complete_multipart_upload", Key=self.at.key, UploadId=self.id, MultipartUpload=parts, **only_new
        )
        self._check_complete_size()

    def _check_complete_size(self) -> None:
        """Check that the store's object has as many bytes as were sent; without permission to read, check nothing.

        Raises:
            RemoteError: it has not, and was removed if it is ours; or there is no object.
        """
        try:
            found = self.at.head()
        except Denied:  # who may write need not be allowed to read
            return
        size = None if found is None else found.get("ContentLength")
        if size == self.nbytes:
            return
        removed = found is not None and self._is_ours(found)
        if removed:
            self.at.delete()
        made = "made nothing" if size is None else f"made it of {size:,} bytes, not"
        raise RemoteError(
            f"{self.at.url}: the store {made} of the {self.nbytes:,} that were sent, although it confirmed every "
            f"part.{' It was removed.' if removed else ''} Run the same command again; ask the operators of the store "
            "if this persists.",
            code="CKPT0906",
        )

    def _is_ours(self, found: Mapping[str, Any]) -> bool:
        """Return whether an object was written by this upload; `found` is its metadata (`S3Object.head`)."""
        return bool(self.mark.items() <= found.get("Metadata", {}).items())

    def abort(self) -> None:
        """Cancel the queued parts, wait for those being sent, and abort the upload, which removes its parts.

        Raises:
            RemoteError: the store fails.
        """
        for future in self.pending:
            future.cancel()
        for future in self.pending:
            if not future.cancelled():
                future.exception()
        self.pending.clear()
        self.part.close()
        if self.id is not None:
            self.at.abort(self.id)


class SharedUpload(PartsUpload):
    """An object of S3 whose parts other processes send (shared_objects.py). Each part but the last has `part_bytes`,
    and bytes [n, n + 1) * part_bytes of the object are part n + 1, so it does not matter who sends a part, nor how
    often.

    Args:
        upload: the id of an upload that an earlier run began; where None, one is begun.
    """

    def __init__(
        self, at: S3Object, *, force: bool, part_bytes: int, pool: UploadPool, upload: str | None = None
    ) -> None:
        """Resume a multipart upload, or begin one.

        Args:
            at: the object to write.
            force: replace an object that exists already.
            part_bytes: size of each part but the last, in bytes.
            pool: the threads that send parts.
            upload: id of an upload that an earlier run began; None begins a new one.

        Raises:
            RemoteError: the store fails.
        """
        super().__init__(at, force=force, part_bytes=part_bytes, pool=pool)
        self.id = upload
        if upload is None:
            self._start_multipart({})

    @property
    def upload_id(self) -> str:
        """Return the id of the upload, which a worker needs to send a part."""
        assert self.id is not None
        return self.id

    def find_wrong_parts(self, sent: Mapping[int, str], nbytes: int) -> list[int]:
        """Compare the parts that were sent with those that the store lists, and return the numbers of the parts that
        are missing or differ in size or ETag. The others are recorded for `commit`.

        Args:
            sent: {part number, from 1 on: its ETag}.
            nbytes: size of the complete object in bytes.

        Raises:
            RemoteError: the store fails, or another run aborted or completed the upload.
        """
        try:
            there = self.at.list_parts(self.upload_id)
        except NotFound:
            raise upload_lost_error(self.at.url) from None
        self.nbytes = nbytes
        wrong = []
        for number in range(1, max(1, -(-nbytes // self.size)) + 1):
            size = min(self.size, nbytes - (number - 1) * self.size)
            found = there.get(number)
            if found is None or found.pop("Size") != size or found["ETag"] != sent.get(number):
                wrong.append(number)
            else:
                self.done[number] = found
        return wrong

    def flush(self) -> None:
        """Close the unused part buffer; other processes have sent all parts."""
        self.part.close()

    def _is_ours(self, found: Mapping[str, Any]) -> bool:
        """Return whether an object was made of the parts of this upload: by the ETag that S3 computes for such an
        object, since an earlier run may have begun the upload with another mark; otherwise by the mark.

        Args:
            found: what `S3Object.head` returned.
        """
        try:
            parts = b"".join(bytes.fromhex(self.done[k]["ETag"].strip('"')) for k in sorted(self.done))
        except ValueError:
            return super()._is_ours(found)
        etag = f"{hashlib.md5(parts, usedforsecurity=False).hexdigest()}-{len(self.done)}"
        return bool(found.get("ETag", "").strip('"') == etag) or super()._is_ours(found)


class BlocksUpload(PartsUpload):
    """A blob of Azure. Its parts are blocks, whose ids are ours; one request makes the blob of them, and Azure removes
    those that it did not use a week after the last was sent."""

    at: AzureObject  # type: ignore[assignment]
    sharable = False

    def __init__(
        self, at: AzureObject, *, force: bool, part_bytes: int, pool: UploadPool, on_disk: bool = False
    ) -> None:
        super().__init__(at, force=force, part_bytes=part_bytes, pool=pool, on_disk=on_disk)  # type: ignore[arg-type]
        self.id = self.mark["ckpttool-upload"]
        self.mark = {"ckpttool_upload": self.id}  # names of metadata are identifiers there

    def _send_part(self, number: int, body: IO[bytes]) -> None:
        """Upload a part as a block, unless it is empty, and record the block's id; runs in a thread of the pool.

        Args:
            number: of the part, from 1 on.
            body: a file with its bytes, which is closed.
        """
        body.seek(0)
        if data := body.read():
            block = f"{self.mark['ckpttool_upload'][:27]}{number:05}"  # as long as adlfs's, which may wait there
            self.at.put_block(block, data)
            self.done[number] = {"block": block}
        body.close()

    def _complete(self) -> None:
        """Have the blob made of the blocks, and check it, as `PartsUpload._complete` does."""
        blocks = [self.done[k]["block"] for k in sorted(self.done)]
        try:
            self.at.put_block_list(blocks, self.mark, only_new=not self.force)
        except RemoteError as e:
            if "InvalidBlockList" in str(e):  # another run completed the blob, which drops our blocks
                raise NotFound(str(e)) from None
            raise
        self._check_complete_size()

    def abort(self) -> None:
        """Cancel the queued blocks, and wait for those being sent. Uploaded blocks remain until Azure removes them."""
        self.id = None
        super().abort()


class FileUpload:
    """An object of any other store that fsspec writes: a file that is committed or discarded."""

    def __init__(self, url: str, *, force: bool, block_bytes: int) -> None:
        """Open fsspec's file for writing; the object is not visible before `commit`.

        Args:
            url: URL of the object.
            force: replace an object that exists already.
            block_bytes: how many bytes fsspec buffers before it sends them.

        Raises:
            DestinationExists: the object exists, without `force`.
            Unsupported: the store is read-only.
            RemoteError: the store fails.
        """
        self.url, self.force = redact_url(url), force
        self.fs, self.path, _ = filesystem_for(url)
        self._refuse_existing()
        try:
            if "memory" in self.fs.protocol:  # shows files that are not whole
                raise NotImplementedError
            self.file = with_retries(
                self.url, lambda: self.fs.open(self.path, "wb", block_size=block_bytes, autocommit=False), writes=True
            )
        except NotImplementedError:
            raise Unsupported(f"{self.url}: this kind of store is for reading only.", code="CKPT0340") from None

    def _refuse_existing(self) -> None:
        """Check, unless `force`, that there is no such object.

        Raises:
            DestinationExists: there is one.
            RemoteError: the store fails.
        """
        if not self.force and with_retries(self.url, lambda: self.fs.exists(self.path)):
            raise exists_error(self.url)

    def append(self, data: bytes | memoryview) -> None:
        """Append bytes.

        Raises:
            RemoteError: the store fails.
        """
        buffered = False

        def write() -> None:
            """Write the bytes; if an earlier try failed, send what is in the buffer of the file instead."""
            nonlocal buffered
            if buffered:  # the bytes are in its buffer; only sending them failed
                self._reopen_unbegun()
                self.file.flush()
            else:
                buffered = True
                self.file.write(data)

        with_retries(self.url, write, writes=True)

    def flush(self) -> None:
        """Close fsspec's file, which sends what is buffered; the object is not visible yet.

        Raises:
            RemoteError: the store fails.
        """

        def close() -> None:
            """Close the file, also if an earlier try failed to begin the upload."""
            self._reopen_unbegun()
            self.file.close()

        if not self.file.closed:
            with_retries(self.url, close, writes=True)

    def _reopen_unbegun(self) -> None:
        """Let another try begin the upload if gcsfs could not begin it: fsspec then calls the file closed, and would
        not send its bytes."""
        if self.file.closed and getattr(self.file, "location", "") is None:
            self.file.closed, self.file.forced, self.file.offset = False, False, None

    def commit(self) -> None:
        """Make the object visible, as a whole.

        Raises:
            DestinationExists: it was created meanwhile, without `force`.
            RemoteError: the store fails.
        """
        self._refuse_existing()
        self.flush()
        with_retries(self.url, self.file.commit, writes=True)

    def abort(self) -> None:
        """Discard what was sent.

        Raises:
            RemoteError: the store fails.
        """
        with_retries(self.url, self.file.discard)
