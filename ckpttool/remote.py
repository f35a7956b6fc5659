"""Object stores: the objects below one URL as a `Source`, and objects written so that they appear whole or not at all.

Stores are those of fsspec (`s3://`, `gs://`, `hf://`, `http(s)://` to read). S3 is asked in its own words through the
client that s3fs holds, so that one set of credentials, endpoints and settings, found by the ecosystem's own ways,
serves reading and writing. This module is the only one that tries again: a lost connection, a timeout, 408, 429 and
5xx are met with `_TRIES` tries; nothing else is.

Object stores have no rename: an object is uploaded in parts, which nobody sees, and completed in one request. That
request (unless something is to be replaced) and every write of `put_if_unchanged` carry a condition, If-None-Match or
If-Match, so two writers cannot overwrite each other; a store that ignores conditions, as old imitations of S3 do, is
not safe for a ledger that many write to. Sources: the API reference of S3 (CreateMultipartUpload,
CompleteMultipartUpload, PutObject, DeleteObject, PutObjectLegalHold; "Conditional writes"; "Multipart upload limits":
10,000 parts of 5 MiB to 5 GiB).

No message holds credentials or signed queries: `shown` takes them out of URLs, `_words` out of what a store said.
"""

from __future__ import annotations

import io
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from .errors import (
    CkpttoolError,
    Corrupt,
    DestinationExists,
    RemoteError,
    SourceChanged,
    Unsafe,
    Unsupported,
    UsageError,
)
from .store import Identity, Source

__all__ = [
    "RemoteSource",
    "Upload",
    "get_with_token",
    "is_url",
    "legal_hold",
    "put_if_unchanged",
    "remove",
    "shown",
    "source",
    "split",
    "whole",
]

T = TypeVar("T")

_TRIES, _WAIT = 5, 0.2  # waits of 0.2, 0.4, 0.8, 1.6 seconds between the tries
_PIECE = 8 << 20  # bytes asked for at once: what a lost connection costs at most
_PART, _PARTS = 16 << 20, 10_000
_IN_FLIGHT = 48 << 20  # bytes of parts on their way, at most, where parts are small
_EXTRA = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)

# Names of classes of aiohttp, botocore, httpx, requests, urllib3 and http.client; none of them need be installed.
_LOST = {
    "ConnectionError", "TimeoutError", "EOFError", "HTTPClientError", "ResponseStreamingError", "IncompleteReadError",
    "IncompleteRead", "ResponseParserError", "ClientConnectionError", "ClientPayloadError", "ServerDisconnectedError",
    "TransportError", "ChunkedEncodingError", "ProtocolError", "RemoteDisconnected",
}  # fmt: skip
_BUSY = {"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "OperationAborted", "Throttling"}
_CONFLICT = {"PreconditionFailed", "ConditionalRequestConflict"}
# How stores say that a bucket has no object lock.
_NO_LOCK = re.compile(r"object ?lock|lock configuration|NotImplemented|MethodNotAllowed", re.IGNORECASE)
# What says which bytes an object holds, in the words of the stores, the best first.
_VERSION = (
    "ETag", "etag", "VersionId", "version_id", "generation", "md5Hash", "content_md5", "Content-MD5", "Digest", "oid",
    "blob_id", "LastModified", "last_modified", "mtime", "updated", "created",
)  # fmt: skip


class _Missing(RemoteError):
    """The store has no such object."""


class _Conflict(RemoteError):
    """The object is not what a conditional request took it for."""


class _Range(RemoteError):
    """The object has no such bytes."""


class _Denied(RemoteError):
    """The store does not allow it."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether it is the URL of a store rather than a path."""
    return _URL.match(os.fspath(path)) is not None


def shown(url: str) -> str:
    """A URL without user, password and query: these may be credentials."""
    url = re.sub(r"(://)[^/@\s]*@", r"\1", url)
    return url.split("?")[0].split("#")[0] if url.lower().startswith("http") else url


def whole(path: str | os.PathLike[str]) -> str:
    """A path as records say it: absolute, or a URL without secrets."""
    return shown(os.fspath(path)) if is_url(path) else os.path.abspath(path)


def split(url: str) -> tuple[str, str]:
    """(URL of the folder, name of the object in it); the query of an http URL stays with the folder."""
    query = ""
    if url.lower().startswith("http"):
        url, mark, query = url.partition("?")
        query = mark + query
    folder, _, name = url.rstrip("/").rpartition("/")
    return folder + query, unquote(name) if url.lower().startswith("http") else name


# ------------------------------------------------------------------------------------------------------------ asking


def _store(url: str) -> tuple[Any, str, str]:
    """(fsspec file system, path in it, query that every request carries) of a URL.

    Raises:
        UsageError: no such kind of store, or its package is not installed.
    """
    found = _URL.match(url)
    if not found or "::" in url:
        raise UsageError(f"{shown(url)} is not the URL of a store; give one like s3://bucket/folder.")
    scheme = found[1].lower()
    if scheme in ("file", "local"):
        raise UsageError(f"{url}: give the path itself, without {found[0]}.")
    query = ""
    if scheme in ("http", "https"):
        url, _, query = url.partition("?")
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme in ("s3", "s3a"):
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}}
    if scheme == "hf":
        options["skip_instance_cache"] = True  # it keeps listings, and what it did not find, as long as it lives
    try:
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(url, **options)
    except ImportError:
        extra = _EXTRA.get(scheme)
        how = f"pip install 'ckpttool[{extra}]'" if extra else f"install fsspec's package for {scheme}://"
        raise UsageError(f"{scheme}:// needs a package that is not installed: {how}") from None
    except ValueError as e:
        raise UsageError(f"{shown(url)}: {_words(e)}.") from None
    if scheme in ("s3", "s3a"):
        fs.retries = 1  # tries of its own would multiply with ours
    return fs, path.rstrip("/"), f"?{query}" if query else ""


def _ask(url: str, call: Callable[[], T]) -> T:
    """What the store answers, asked again after what passes.

    Raises:
        RemoteError: or one of the private kinds above.
    """
    for k in range(_TRIES):
        try:
            return call()
        except (CkpttoolError, NotImplementedError):
            raise
        except Exception as e:
            kind, by = _judge(e)
            if kind is None and k + 1 < _TRIES:
                time.sleep(_WAIT * 2**k)
                continue
            error = _told(url, kind, _words(by))
        raise error from None
    raise AssertionError


def _told(url: str, kind: type[RemoteError] | None, words: str) -> RemoteError:
    if kind is None:
        return RemoteError(
            f"{url}: no answer in {_TRIES} tries ({words}). Check the network and the store, then run the same command "
            "again."
        )
    if kind is _Missing:
        return _Missing(f"{url}: the store has no such thing ({words}).")
    if kind is _Denied:
        return _Denied(f"{url}: the store does not allow it ({words}). Check the credentials and what they may do.")
    return kind(f"{url}: {words}.")


def _judge(e: BaseException) -> tuple[type[RemoteError] | None, BaseException]:
    """(what it means, who says so); None is what may pass. File systems wrap what they were told; the inner knows."""
    for x in _chain(e):
        code, status = _code(x), _status(x)
        if code in _BUSY or status in (408, 429) or ((status or 0) >= 500 and status != 501):
            return None, x
        if code in _CONFLICT or status == 412:
            return _Conflict, x
        if code == "NoSuchBucket":
            return RemoteError, x
        if status is not None and status >= 400:
            return {401: _Denied, 403: _Denied, 404: _Missing, 416: _Range}.get(status, RemoteError), x
        if _LOST & {c.__name__ for c in type(x).__mro__}:
            return None, x
    for kind, means in ((PermissionError, _Denied), (FileNotFoundError, _Missing)):
        if isinstance(e, kind):
            return means, e
    return RemoteError, e


def _chain(e: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while e is not None and id(e) not in seen:
        seen.add(id(e))
        yield e
        e = e.__cause__ or (None if e.__suppress_context__ else e.__context__)


def _code(e: BaseException) -> str | None:
    """The code in botocore's answer."""
    response = getattr(e, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


def _status(e: BaseException) -> int | None:
    """The HTTP status: of botocore, of httpx and requests, of aiohttp, of gcsfs."""
    response = getattr(e, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = getattr(response, "status_code", None) or getattr(e, "status", None) or getattr(e, "code", None)
    return found if isinstance(found, int) and 100 <= found < 600 else None


def _words(e: BaseException) -> str:
    """What the store said, in one line, without what may be credentials."""
    response = getattr(e, "response", None)
    text = str(e)
    if isinstance(response, dict):
        error = response.get("Error", {})
        text = ": ".join(str(t) for t in (error.get("Code"), error.get("Message")) if t)
    text = " ".join(f"{text or type(e).__name__}".split())
    text = re.sub(r"(://)[^/@\s]*@", r"\1", text)
    text = re.sub(r"(https?://[^\s?'\"]*)\?[^\s'\")]*", r"\1", text)
    text = re.sub(r"(?i)((?:signature|credential|token|secret|password|key|key_?id)=)[^\s&,;'\")]+", r"\1***", text)
    text = re.sub(r"(?i)\b((?:authorization|password|secret)\W{1,4}(?:bearer )?)[^\s,;'\")]+", r"\1***", text)
    for name, value in os.environ.items():
        if len(value) >= 8 and re.search(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL", name.upper()):
            text = text.replace(value, "***")
    text = re.sub(r"\b(AKIA|ASIA|hf_)[A-Za-z0-9]{12,}", "***", text)
    return text[:300].rstrip(". ")


# ----------------------------------------------------------------------------------------------------------- reading


class RemoteSource(Source):
    """The objects below one URL. Nothing is kept open and nothing is asked for before it is needed."""

    local = False

    def __init__(self, url: str) -> None:
        self._fs, self._prefix, self._query = _store(url)
        self._web = url.lower().startswith("http")
        self._hub = url.lower().startswith("hf://")
        self._commit: str | None = None
        self._pin = threading.Lock()
        self.root = shown(url).rstrip("/")
        self._identity: dict[str, Identity] = {}

    def _base(self) -> str:
        """The path that all objects lie below. On the Hub it names the commit that was first seen: one listing and many
        reads are of one commit, though the branch moves on."""
        if not self._hub:
            return self._prefix
        with self._pin:
            if self._commit is None:
                self._commit = _ask(self.root, lambda: _at_commit(self._fs, self._prefix))
            return self._commit

    def _path(self, name: str) -> str:
        parts = name.split("/")
        if any(p in ("", ".", "..") for p in parts) or "\0" in name or "\\" in name or "?versionId=" in name:
            raise Unsafe(f"{name!r} leads out of {self.root}; a checkpoint may only name objects below its own URL.")
        return f"{self._base()}/{quote(name) if self._web else name}{self._query}"

    def _url(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def _info(self, name: str) -> dict[str, Any]:
        path = self._path(name)
        said: dict[str, Any] = _ask(self._url(name), lambda: self._fs.info(path))
        if said.get("type") != "file":
            raise _Missing(f"{self._url(name)} is a folder, not an object.")
        if not isinstance(said.get("size"), int):
            raise RemoteError(f"{self._url(name)}: the server does not tell its size.")
        return said

    def _identify(self, name: str) -> Identity:
        """The five numbers of a file are here: the place, the version as the store names it, the size, and nothing."""
        said = self._info(name)
        version = next((f"{k} {said[k]}" for k in _VERSION if said.get(k)), "")
        return _number(f"{self._prefix}/{name}{self._query}"), _number(version), said["size"], 0, 0

    def list(self, folder: str = "") -> list[str]:
        """Names of what lies directly below the URL, or below one prefix under it, sorted; none where nothing does."""
        try:
            path = self._path(folder) if folder else self._base() + self._query
            found: list[str] = _ask(self._url(folder), lambda: self._fs.ls(path, detail=False))
        except _Missing:
            return []
        head = path.removesuffix(self._query) + "/"
        names = {f.rstrip("/").removeprefix(head) for f in found if f.startswith(head)}
        if self._web:
            names = {unquote(n.partition("?")[0].rstrip("/")) for n in names}
        return sorted(n for n in names if n and "/" not in n)

    def exists(self, name: str) -> bool:
        """Whether there is an object of that name."""
        try:
            self._info(name)
        except (_Missing, Unsafe):
            return False
        return True

    def size(self, name: str) -> int:
        """Bytes of an object.

        Raises:
            Corrupt: it is missing. Unsafe: the name leads elsewhere. RemoteError: the store does not tell.
        """
        if name not in self._identity:
            try:
                self._identity.setdefault(name, self._identify(name))
            except _Missing:
                raise Corrupt(f"{self._url(name)} is missing. The copy is incomplete; fetch the file again.") from None
        return self._identity[name][2]

    def readinto(self, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on; safe in many threads at once.

        Raises:
            Corrupt: the object is missing or ends before. SourceChanged: it is another one by now. RemoteError: the
            store fails.
        """
        if offset < 0 or offset + len(into) > self.size(name):
            raise Corrupt(f"{self._url(name)} has {self.size(name)} bytes; {offset}..{offset + len(into)} are needed.")
        path, into = self._path(name), into.cast("B") if into.format != "B" else into
        for at in range(0, len(into), _PIECE):
            n = min(_PIECE, len(into) - at)
            into[at : at + n] = self._piece(name, path, offset + at, n)

    def _piece(self, name: str, path: str, start: int, n: int) -> bytes:
        how = {"cache_type": "none"} if self._hub else {}  # else 5 MiB are read ahead of every range

        def once() -> bytes:
            data: bytes = self._fs.cat_file(path, start=start, end=start + n, **how)
            if len(data) < n:
                raise EOFError(f"{len(data)} of {n} bytes from byte {start} on")
            return data

        try:
            data = _ask(self._url(name), once)
        except (_Missing, _Range):
            raise SourceChanged(
                f"{self._url(name)} changed while it was read. Wait until its writer has finished."
            ) from None
        except RemoteError:
            self._same(name)
            raise
        if len(data) > n:
            raise RemoteError(f"{self._url(name)}: the server sends the whole object where a range is asked for.")
        return data

    def identities(self) -> dict[str, Identity]:
        """(place, version, size, 0, 0) of every object looked at so far."""
        return dict(self._identity)

    def _same(self, name: str) -> None:
        try:
            now = self._identify(name)
        except _Missing:
            now = None
        except RemoteError:
            return
        if now != self._identity.get(name, now):
            raise SourceChanged(f"{self._url(name)} changed while it was read. Wait until its writer has finished.")

    def unchanged(self) -> None:
        """Prove that no object was replaced since it was first looked at.

        Raises:
            SourceChanged: with the object.
        """
        for name, then in self._identity.items():
            try:
                now = self._identify(name)
            except _Missing:
                now = None
            if now != then:
                raise SourceChanged(f"{self._url(name)} changed while it was read. Wait until its writer has finished.")

    def close(self) -> None:
        """Nothing is open."""


def _at_commit(fs: Any, path: str) -> str:
    """A path on the Hub with the commit in the place of its branch; as it is where it names no repository."""
    from huggingface_hub import HfApi, constants

    try:
        at = fs.resolve_path(path)
    except (ValueError, NotImplementedError):
        return path
    if not hasattr(at, "repo_id"):  # a bucket
        return path
    found = HfApi(endpoint=fs.endpoint, token=fs.token).repo_info(
        at.repo_id, repo_type=at.repo_type, revision=at.revision
    )
    kind = constants.REPO_TYPES_URL_PREFIXES.get(at.repo_type, "")
    return f"{kind}{at.repo_id}@{found.sha}/{at.path_in_repo}".rstrip("/") if found.sha else path


def _number(text: str) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:8], "little")


def source(path: str) -> Source:
    """The files of a folder, or the objects below a URL."""
    return RemoteSource(path) if is_url(path) else Source(path)


# ----------------------------------------------------------------------------------------------------------- writing


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

        return _ask(self.url, lambda: sync(self.fs.loop, call))

    def head(self) -> dict[str, Any] | None:
        """What the store says of the object; None where there is none."""
        try:
            return self.ask("head_object", Key=self.key)
        except _Missing:
            return None


def _s3(url: str) -> _S3 | None:
    """The object, where the store speaks S3."""
    fs, path, _ = _store(url)
    protocol = [fs.protocol] if isinstance(fs.protocol, str) else list(fs.protocol)
    return _S3(fs, path, url) if "s3" in protocol else None


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
        self._to = _Parts(at, force, dict(lock or {}), expect_bytes) if at else _File(url, force)
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


class _Parts:
    """The multipart upload of S3."""

    def __init__(self, at: _S3, force: bool, lock: dict[str, Any], expect_bytes: int) -> None:
        self.at, self.force = at, force
        if not force and at.head() is not None:
            raise _taken(at.url)
        self._sweep()
        # uploads of one object are told apart by a name of ours: an answer that was lost may have been a success
        self.mark = uuid.uuid4().hex
        self.id, self.locked = self._begin(lock), bool(lock)
        need = -(-expect_bytes // _PARTS)
        self.size = max(_PART, -(-need // (1 << 20)) << 20)
        self.many = max(1, _IN_FLIGHT // self.size)
        self.part, self.number = io.BytesIO(), 0
        self.done: dict[int, dict[str, Any]] = {}
        self.pending: list[Future[None]] = []
        self.pool = ThreadPoolExecutor(self.many, thread_name_prefix="upload")

    def _sweep(self) -> None:
        """Remove the parts of uploads that were never finished; a store may not let us look, which stops nobody."""
        try:
            for old in self.at.ask("list_multipart_uploads", Prefix=self.at.key).get("Uploads", []):
                if old["Key"] == self.at.key:
                    self.at.ask("abort_multipart_upload", Key=self.at.key, UploadId=old["UploadId"])
        except RemoteError:
            pass

    def _begin(self, lock: dict[str, Any]) -> str:
        try:
            said = self.at.ask(
                "create_multipart_upload", Key=self.at.key, Metadata={"ckpttool-upload": self.mark}, **lock
            )
        except RemoteError as e:
            if not lock or not _NO_LOCK.search(str(e)):
                raise
            lock.clear()
            return self._begin(lock)
        return str(said["UploadId"])

    def append(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            n = min(len(view), self.size - self.part.tell())
            self.part.write(view[:n])
            view = view[n:]
            if self.part.tell() == self.size:
                self._send()

    def _send(self) -> None:
        if self.number == _PARTS:
            raise RemoteError(
                f"{self.at.url}: {_PARTS:,} parts of {self.size:,} bytes are full; S3 takes no more of them."
            )
        while len(self.pending) >= self.many:
            self.pending.pop(0).result()
        self.number += 1
        self.pending.append(self.pool.submit(self._put, self.number, self.part))
        self.part = io.BytesIO()

    def _put(self, number: int, body: io.BytesIO) -> None:
        said = self.at.ask("upload_part", Key=self.at.key, UploadId=self.id, PartNumber=number, Body=body)
        sums = {k: v for k, v in said.items() if k.startswith("Checksum") and k != "ChecksumType"}
        self.done[number] = {"PartNumber": number, "ETag": said["ETag"], **sums}

    def commit(self) -> None:
        if self.part.tell() or not self.number:
            self._send()
        while self.pending:
            self.pending.pop(0).result()
        self.pool.shutdown()
        parts = {"Parts": [self.done[k] for k in sorted(self.done)]}
        only_new: dict[str, Any] = {} if self.force else {"IfNoneMatch": "*"}
        try:
            self.at.ask(
                "complete_multipart_upload", Key=self.at.key, UploadId=self.id, MultipartUpload=parts, **only_new
            )
        except (_Conflict, _Missing) as e:
            found = self.at.head()
            if found is not None and found.get("Metadata", {}).get("ckpttool-upload") == self.mark:
                return  # the first try had come through, only its answer had not
            if isinstance(e, _Conflict):
                self.abort()
                raise _taken(self.at.url) from None
            raise RemoteError(
                f"{self.at.url}: its parts are gone; another run began to write the same object. Nothing was "
                "replaced; run the command again when it has ended."
            ) from None

    def abort(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        try:
            self.at.ask("abort_multipart_upload", Key=self.at.key, UploadId=self.id)
        except _Missing:
            pass


class _File:
    """What fsspec offers of any store: a file that is committed or discarded."""

    def __init__(self, url: str, force: bool) -> None:
        self.url, self.force = shown(url), force
        self.fs, self.path, _ = _store(url)
        self._free()
        try:
            if "memory" in self.fs.protocol:  # shows files that are not whole
                raise NotImplementedError
            self.file = _ask(self.url, lambda: self.fs.open(self.path, "wb", autocommit=False))
        except NotImplementedError:
            raise Unsupported(f"{self.url}: this kind of store is for reading only.") from None

    def _free(self) -> None:
        if not self.force and _ask(self.url, lambda: self.fs.exists(self.path)):
            raise _taken(self.url)

    def append(self, data: bytes | memoryview) -> None:
        _ask(self.url, lambda: self.file.write(data))

    def commit(self) -> None:
        self._free()
        _ask(self.url, self.file.close)
        _ask(self.url, self.file.commit)

    def abort(self) -> None:
        _ask(self.url, self.file.discard)


def _taken(url: str) -> DestinationExists:
    return DestinationExists(f"{url} exists. Choose another destination, or --force to replace it.")


def remove(url: str) -> None:
    """Remove an object, with every version that the store keeps of it, the oldest first; a missing one is no error.

    Where versions are kept, a deletion without one only hides the object, and no lock stops that; so each is named.

    Raises:
        RemoteError: the store refuses, because of an object lock or of missing permissions.
    """
    at = _s3(url)
    if at is None:
        fs, path, _ = _store(url)
        try:
            _ask(shown(url), lambda: fs.rm_file(path))
        except _Missing:
            pass
        return
    if (found := at.head()) is None:
        return
    if not found.get("VersionId"):
        at.ask("delete_object", Key=at.key)
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
    except (_Missing, _Denied):
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
            fs, path, _ = _store(url)
            return _ask(shown(url), lambda: fs.cat_file(path)), ""
        said = at.ask("get_object", read=True, Key=at.key)
        return said["Body"], said["ETag"]
    except _Missing:
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
    except (_Conflict, _Missing):  # with If-Match, missing is another one's deletion
        return False
    return True
