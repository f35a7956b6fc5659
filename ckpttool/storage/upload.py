"""Objects of a store, written so that they appear whole or not at all, and removed.

Object stores have no rename: an object is uploaded in parts, which nobody sees, and completed in one request. That
request (unless something is to be replaced) and every write of `put_if_unchanged` carry a condition, If-None-Match or
If-Match, so two writers cannot overwrite each other; a store that ignores conditions, as old imitations of S3 do, is
not safe for a ledger that many write to. Sources: the API reference of S3 (CreateMultipartUpload,
CompleteMultipartUpload, PutObject, DeleteObject, PutObjectLegalHold; "Conditional writes"; "Multipart upload limits":
10,000 parts of 5 MiB to 5 GiB).
"""

from __future__ import annotations

import io
import json
import re
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from ..bounded_json import parse
from ..errors import (
    CkpttoolError,
    Corrupt,
    DestinationExists,
    NoSpace,
    RemoteError,
    Unsafe,
    Unsupported,
    UsageError,
    argument,
)
from .remote import filesystem_for as store_of
from .retries import Conflict, Denied
from .retries import NotFound as Missing
from .retries import with_retries as ask
from .urls import redact_url as shown

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["NOTE", "Upload", "UploadFolder", "get_with_token", "legal_hold", "put_if_unchanged", "remove"]

_PART, _PARTS = 16 << 20, 10_000
_SMALLEST = 5 << 20  # bytes of a part but the last
_IN_FLIGHT = 48 << 20  # bytes of parts on their way, at most, where parts are small
_BUFFERED = 128 << 20  # bytes of parts that are being filled, in memory
#: An object that lies in a folder while it is made visible, or where that was interrupted.
NOTE = ".ckpttool-partial"
# How stores say that a bucket has no object lock.
_NO_LOCK = re.compile(r"object ?lock|lock configuration|NotImplemented|MethodNotAllowed", re.IGNORECASE)


class _S3:
    """One object of an S3 store."""

    def __init__(self, fs: Any, path: str, url: str) -> None:
        self.fs, self.url = fs, shown(url)
        self.bucket, _, self.key = path.partition("/")
        if not self.key:
            raise UsageError(f"{shown(url)} names a bucket; give an object in it.")

    def ask(self, method: str, read: bool = False, **kwargs: Any) -> dict[str, Any]:
        """A request of S3's API; with `read`, its Body are the bytes.

        Raises:
            RemoteError: or one of its private kinds.
        """
        from fsspec.asyn import sync

        body = kwargs.get("Body")

        async def call() -> dict[str, Any]:
            await self.fs.set_session()
            client = await self.fs.get_s3(self.bucket)
            if body is not None:
                body.seek(0)
            said: dict[str, Any] = await getattr(client, method)(Bucket=self.bucket, **kwargs)
            if read:
                async with said["Body"] as stream:
                    said["Body"] = await stream.read()
            return said

        return ask(self.url, lambda: sync(self.fs.loop, call))

    def sweep(self, prefix: str, ours: Callable[[str], bool]) -> None:
        """Remove the parts of uploads that were never finished, of keys with that prefix that are `ours`; a store may not
        let us look, which stops nobody."""
        more: dict[str, Any] = {}
        try:
            while True:
                said = self.ask("list_multipart_uploads", Prefix=prefix, **more)
                for old in said.get("Uploads", []):
                    if ours(old["Key"]):
                        self.ask("abort_multipart_upload", Key=old["Key"], UploadId=old["UploadId"])
                if not said.get("IsTruncated"):
                    return
                more = {"KeyMarker": said["NextKeyMarker"], "UploadIdMarker": said["NextUploadIdMarker"]}
        except RemoteError:
            pass

    def head(self) -> dict[str, Any] | None:
        """What the store says of the object; None where there is none."""
        try:
            return self.ask("head_object", Key=self.key)
        except Missing:
            return None


def _s3(url: str) -> _S3 | None:
    """The object, where the store speaks S3."""
    fs, path, _ = store_of(url)
    protocol = [fs.protocol] if isinstance(fs.protocol, str) else list(fs.protocol)
    return _S3(fs, path, url) if "s3" in protocol else None


class Lane:
    """Requests that carry bytes, of all objects of one destination: `many` at once, and nobody waits in memory."""

    def __init__(self, many: int) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self.many, self.pool = many, ThreadPoolExecutor(many, "ckpttool-send")
        self.free = threading.Semaphore(many)

    def submit(self, call: Callable[..., None], *args: Any) -> Future[None]:
        """Do it in a thread, as soon as one is free."""
        self.free.acquire()
        future = self.pool.submit(call, *args)
        future.add_done_callback(lambda _: self.free.release())
        return future

    def close(self) -> None:
        """Wait for what was begun."""
        self.pool.shutdown()


class Upload:
    """One object, written from its first byte to its last; nobody sees it before `commit`.

    Parts that a killed run left behind for the same object are removed first, so of two runs at one object the first
    fails. `lock` are S3's arguments of an object lock; `locked` tells whether the bucket has such a thing. Memory is a
    few parts, and a part is as large as `expect_bytes` needs to be made of 10,000.

    Raises:
        DestinationExists: there is such an object, and not `force`. RemoteError: the store fails.
    """

    def __init__(self, url: str, *, force: bool, lock: Mapping[str, Any] | None = None, expect_bytes: int = 0) -> None:
        self.url, self.force = url, force
        at = _s3(url)
        if at is None and lock:
            raise Unsupported(f"{shown(url)}: only S3 stores have object locks.")
        self._to: _Parts | _File
        if at is None:
            self._to = _File(url, force)
        else:
            if not force and at.head() is not None:
                raise _taken(at.url)
            at.sweep(at.key, lambda key: key == at.key)
            size = _part_bytes(expect_bytes, _PART)
            self._to = _Parts(at, force, size, Lane(max(1, _IN_FLIGHT // size)), dict(lock or {}))
        self.locked = isinstance(self._to, _Parts) and self._to.locked

    def append(self, data: bytes | memoryview) -> None:
        """Write on; `data` is not kept."""
        self._to.append(data)

    def commit(self) -> None:
        """Make the object visible, as a whole.

        Raises:
            DestinationExists: somebody made one meanwhile, and not `force`; nothing was replaced.
        """
        self._to.commit()

    def abort(self) -> None:
        """Remove what was written. Never raises: what a store does not remove now is removed by the next run."""
        try:
            self._to.abort()
        except (CkpttoolError, OSError):
            pass


def _part_bytes(expect_bytes: int, usual: int) -> int:
    """Bytes of a part, so that 10,000 of them are enough."""
    need = -(-expect_bytes // _PARTS)
    return usual if need <= usual else -(-need // (1 << 20)) << 20


class _Parts:
    """An object of S3: in parts where it has more than one, else in one request when it is committed. `on_disk` keeps the
    part that is being filled in a file without a name."""

    def __init__(
        self, at: _S3, force: bool, size: int, lane: Lane, lock: dict[str, Any] | None = None, on_disk: bool = False
    ) -> None:
        self.at, self.force, self.size, self.lane, self.on_disk = at, force, size, lane, on_disk
        # uploads of one object are told apart by a name of ours: an answer that was lost may have been a success
        self.mark = {"ckpttool-upload": uuid.uuid4().hex}
        self.id: str | None = None
        if lock:
            self._begin(lock)
        self.locked = bool(lock)
        self.part, self.number = self._empty(), 0
        self.done: dict[int, dict[str, Any]] = {}
        self.pending: list[Future[None]] = []

    def _empty(self) -> IO[bytes]:
        return tempfile.TemporaryFile() if self.on_disk else io.BytesIO()

    def _begin(self, lock: dict[str, Any]) -> None:
        try:
            said = self.at.ask("create_multipart_upload", Key=self.at.key, Metadata=self.mark, **lock)
        except RemoteError as e:
            if not lock or not _NO_LOCK.search(str(e)):
                raise
            lock.clear()
            self._begin(lock)
            return
        self.id = str(said["UploadId"])

    def append(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            if self.part.tell() == self.size:
                self._send()
            n = min(len(view), self.size - self.part.tell())
            try:
                self.part.write(view[:n])
            except OSError as e:
                raise NoSpace(
                    f"{tempfile.gettempdir()}: {e.strerror}. So many files are written at once that their parts wait there to "
                    "be sent; free some space, or set TMPDIR to a roomier folder, and run the same command again."
                ) from None
            view = view[n:]

    def _send(self) -> None:
        if self.number == _PARTS:
            raise RemoteError(
                f"{self.at.url}: {_PARTS:,} parts of {self.size:,} bytes are full; S3 takes no more of them."
            )
        if self.id is None:
            self._begin({})
        while self.pending and self.pending[0].done():
            self.pending.pop(0).result()
        self.number += 1
        self.pending.append(self.lane.submit(self._put, self.number, self.part))
        self.part = self._empty()

    def _put(self, number: int, body: IO[bytes]) -> None:
        said = self.at.ask("upload_part", Key=self.at.key, UploadId=self.id, PartNumber=number, Body=body)
        sums = {k: v for k, v in said.items() if k.startswith("Checksum") and k != "ChecksumType"}
        self.done[number] = {"PartNumber": number, "ETag": said["ETag"], **sums}
        body.close()

    def settle(self) -> None:
        """Send what waits; only the request that makes the object visible is left."""
        if self.id is not None and not self.part.closed and (self.part.tell() or not self.number):
            self._send()
        while self.pending:
            self.pending.pop(0).result()
        if self.id is not None:
            self.part.close()

    def commit(self) -> None:
        self.settle()
        only_new: dict[str, Any] = {} if self.force else {"IfNoneMatch": "*"}
        try:
            if self.id is None:
                self.at.ask("put_object", Key=self.at.key, Body=self.part, Metadata=self.mark, **only_new)
                self.part.close()
            else:
                parts = {"Parts": [self.done[k] for k in sorted(self.done)]}
                self.at.ask(
                    "complete_multipart_upload", Key=self.at.key, UploadId=self.id, MultipartUpload=parts, **only_new
                )
        except (Conflict, Missing) as e:
            found = self.at.head()
            said = found.get("Metadata", {}) if found else {}
            if said.get("ckpttool-upload") == self.mark["ckpttool-upload"]:
                return  # the first try had come through, only its answer had not
            if isinstance(e, Conflict):
                self.abort()
                raise _taken(self.at.url) from None
            raise RemoteError(
                f"{self.at.url}: its parts are gone; another run began to write the same object. Nothing was "
                "replaced; run the command again when it has ended."
            ) from None

    def abort(self) -> None:
        for future in self.pending:
            future.cancel()
        for future in self.pending:
            if not future.cancelled():
                future.exception()
        self.pending.clear()
        self.part.close()
        if self.id is None:
            return
        try:
            self.at.ask("abort_multipart_upload", Key=self.at.key, UploadId=self.id)
        except Missing:
            pass


class _File:
    """What fsspec offers of any store: a file that is committed or discarded."""

    def __init__(self, url: str, force: bool, block_bytes: int = _PART) -> None:
        self.url, self.force = shown(url), force
        self.fs, self.path, _ = store_of(url)
        self._free()
        try:
            if "memory" in self.fs.protocol:  # shows files that are not whole
                raise NotImplementedError
            self.file = ask(self.url, lambda: self.fs.open(self.path, "wb", block_size=block_bytes, autocommit=False))
        except NotImplementedError:
            raise Unsupported(f"{self.url}: this kind of store is for reading only.") from None

    def _free(self) -> None:
        if not self.force and ask(self.url, lambda: self.fs.exists(self.path)):
            raise _taken(self.url)

    def append(self, data: bytes | memoryview) -> None:
        taken = False

        def write() -> None:
            nonlocal taken
            if taken:  # the bytes are in its buffer; only sending them has failed
                self.file.flush()
            else:
                taken = True
                self.file.write(data)

        ask(self.url, write)

    def settle(self) -> None:
        if not self.file.closed:
            ask(self.url, self.file.close)

    def commit(self) -> None:
        self._free()
        self.settle()
        ask(self.url, self.file.commit)

    def abort(self) -> None:
        ask(self.url, self.file.discard)


def _taken(url: str) -> DestinationExists:
    return DestinationExists(f"{url} exists. Choose another destination, or {argument('force', True)} to replace it.")


class UploadFolder:
    """Objects below one URL that together are a checkpoint, written so that nobody takes them for one before all are there.

    Every object is uploaded as `Upload` does. `commit` makes them visible one after the other, the marker (the last of
    `names`) last; what it replaces loses its marker first. While that goes on, an object `NOTE` lists the names and says
    whose they are: where it is found, what lies there was never whole, and the next run replaces it. Of two runs, one has
    the note and the other stops; without `force` nothing is overwritten that was not there, as a part of an interrupted
    run, at the beginning. A store without conditional requests (all but S3) is looked at again instead.

    `open_at_once` files are written to at the same time; beyond `_BUFFERED` bytes their parts wait on the local disk.

    Raises:
        DestinationExists: something lies there, and not `force`. Unsupported: the store is for reading only.
    """

    def __init__(self, url: str, names: Sequence[str], *, force: bool, open_at_once: int, largest: int) -> None:
        self.url, self.names, self.force = url.rstrip("/"), list(names), force
        self._fs, self._path, _ = store_of(self.url)
        self._note, self._mine = f"{self.url}/{NOTE}", b""
        far = _s3(self._note)
        self._old, self._token = self._look()
        if far:  # objects of the folder itself, and what lies deeper only where this run will write it, too
            prefix = far.key.removesuffix(NOTE)
            far.sweep(prefix, lambda key: "/" not in key.removeprefix(prefix) or key.removeprefix(prefix) in self.names)
        share = _BUFFERED // max(1, open_at_once)
        share -= share % (256 << 10) if share > 256 << 10 else 0  # Google takes multiples of that
        size = _part_bytes(largest, max(_SMALLEST, min(_PART, share)))
        self._size, self._on_disk = size, size * open_at_once > _BUFFERED
        self._lane = Lane(max(2, _IN_FLIGHT // size))
        self._uploads: dict[str, _Parts | _File] = {}
        self.showing = False  # whether some of it may be visible

    def _look(self) -> tuple[list[str], str | None]:
        """(names of what lies there and is to be replaced, token of the note that was found)."""
        found, token, ours = self._below(), None, set[str]()
        if NOTE in found:
            data, token = get_with_token(self._note)
            try:
                ours = {NOTE, *parse(data, NOTE)["names"]}
            except (Corrupt, Unsafe, TypeError, KeyError):
                pass  # not a note of ours
        if found and not self.force and not set(found) <= ours:
            raise DestinationExists(
                f"{shown(self.url)} holds {len(found)} objects, first {found[0]!r}. Choose another destination, or "
                f"{argument('force', True)} "
                "to replace it whole."
            )
        return found, token

    def _below(self) -> list[str]:
        """Names of all objects below the URL, sorted."""
        try:
            found: list[str] = ask(shown(self.url), lambda: self._fs.find(self._path))
        except Missing:
            return []
        names = (f.removeprefix(self._path).lstrip("/") for f in found if f.startswith(self._path + "/"))
        return sorted(n for n in names if n)  # none is that of the "folder" that the console of S3 makes

    def append(self, name: str, data: bytes | memoryview) -> None:
        """The next bytes of one of the objects."""
        if name not in self._uploads:
            self._uploads[name] = self._begin(name)
        self._uploads[name].append(data)

    def _begin(self, name: str) -> _Parts | _File:
        at = _s3(f"{self.url}/{name}")
        if at is None:
            return _File(f"{self.url}/{name}", True, self._size)
        return _Parts(at, True, self._size, self._lane, on_disk=self._on_disk)

    def settle(self, name: str) -> None:
        """The last byte of this object was appended: send what waits."""
        self._uploads[name].settle()

    def commit(self) -> None:
        """Make all of it visible.

        Raises:
            DestinationExists: another run has written there meanwhile. RemoteError: the store failed; the same command
            begins anew, and replaces what is there by then.
        """
        for upload in self._uploads.values():
            upload.settle()
        self._take_note()
        self.showing = True
        marker = self.names[-1]
        for name in self._old:
            if name == marker or (name not in self._uploads and name != NOTE):
                _hide(f"{self.url}/{name}")
        for name, upload in self._uploads.items():
            upload.force = name in self._old and name != marker
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(8, "ckpttool-send") as pool:
            for _ in pool.map(lambda name: self._uploads[name].commit(), [n for n in self._uploads if n != marker]):
                pass
        if get_with_token(self._note)[0] != self._mine:
            raise self._other_run()
        self._uploads[marker].commit()
        _hide(self._note)
        self._lane.close()

    def _take_note(self) -> None:
        """From here on what lies there is ours, and no checkpoint."""
        said = {"tool": "ckpttool", "run": uuid.uuid4().hex, "names": sorted(self._uploads)}
        self._mine = json.dumps(said).encode()
        try:
            if (
                not put_if_unchanged(self._note, self._mine, self._token)
                and get_with_token(self._note)[0] != self._mine
            ):
                raise self._other_run()
        except Unsupported:
            note = self._begin(NOTE)
            note.append(self._mine)
            note.commit()
        new = sorted(set(self._below()) - {*self._old, NOTE})
        if new and not self.force:
            _hide(self._note)
            raise DestinationExists(
                f"{shown(self.url)}: {new[0]!r} came there while this run was sending; nothing was replaced. Choose another "
                f"destination, or {argument('force', True)} to replace what is there."
            )
        self._old += new

    def _other_run(self) -> DestinationExists:
        return DestinationExists(
            f"{shown(self.url)}: another run makes its files visible there. Wait for it and look at what it wrote; if it is "
            "gone, run the same command again."
        )

    def abort(self) -> None:
        """Remove what was sent and nobody saw. Never raises."""
        for upload in self._uploads.values():
            try:
                upload.abort()
            except (CkpttoolError, OSError):
                pass
        self._lane.close()


def _hide(url: str) -> None:
    """Remove an object from sight; a bucket that keeps versions keeps those that were there."""
    at = _s3(url)
    if at is not None:
        at.ask("delete_object", Key=at.key)
        return
    fs, path, _ = store_of(url)
    try:
        ask(shown(url), lambda: fs.rm_file(path))
    except Missing:
        pass


def remove(url: str) -> None:
    """Remove an object, with every version that the store keeps of it, the oldest first; a missing one is no error.

    Where versions are kept, a deletion without one only hides the object, and no lock stops that; so each is named.

    Raises:
        RemoteError: the store refuses, because of an object lock or of missing permissions.
    """
    at = _s3(url)
    if at is None or not (at.head() or {}).get("VersionId"):
        _hide(url)
        return
    for version in _versions(at):
        at.ask("delete_object", Key=at.key, VersionId=version)


def _versions(at: _S3) -> list[str]:
    """Versions of the object and marks of its deletion, the oldest first."""
    found: list[dict[str, Any]] = []
    more: dict[str, Any] = {}
    while True:
        said = at.ask("list_object_versions", Prefix=at.key, **more)
        found += [v for v in (*said.get("Versions", []), *said.get("DeleteMarkers", [])) if v["Key"] == at.key]
        if not said.get("IsTruncated"):
            break
        more = {"KeyMarker": said["NextKeyMarker"], "VersionIdMarker": said["NextVersionIdMarker"]}
    return [v["VersionId"] for v in sorted(found, key=lambda v: (bool(v.get("IsLatest")), v["LastModified"]))]


def legal_hold(url: str, on: bool) -> bool:
    """Put the object under a legal hold of the store, or end it; False where the store or bucket has no such thing.

    Raises:
        RemoteError: the store does not allow it, or fails.
    """
    at = _s3(url)
    if at is None:
        return False
    try:
        at.ask("put_object_legal_hold", Key=at.key, LegalHold={"Status": "ON" if on else "OFF"})
    except (Missing, Denied):
        raise
    except RemoteError as e:
        if _NO_LOCK.search(str(e)):
            return False
        raise
    return True


# ------------------------------------------------------------------------------------------------- compare and swap


def get_with_token(url: str) -> tuple[bytes, str | None]:
    """(bytes, token) of a small object; (b"", None) where there is none. The token is what `put_if_unchanged` wants."""
    at = _s3(url)
    try:
        if at is None:
            fs, path, _ = store_of(url)
            return ask(shown(url), lambda: fs.cat_file(path)), ""
        said = at.ask("get_object", read=True, Key=at.key)
        return said["Body"], said["ETag"]
    except Missing:
        return b"", None


def put_if_unchanged(url: str, data: bytes, token: str | None) -> bool:
    """Write a small object if it is still the one that `get_with_token` saw; False where it is not.

    False may also mean that it was written and the answer was lost: look again before you write again.

    Raises:
        Unsupported: the store has no conditional writes; only S3 and its like do.
    """
    at = _s3(url)
    if at is None:
        raise Unsupported(
            f"{shown(url)}: this kind of store has no conditional writes; a ledger needs them. Use S3 or a folder."
        )
    condition: dict[str, Any] = {"IfNoneMatch": "*"} if token is None else {"IfMatch": token}
    try:
        at.ask("put_object", Key=at.key, Body=io.BytesIO(data), **condition)
    except (Conflict, Missing):  # with If-Match, missing is another one's deletion
        return False
    return True
