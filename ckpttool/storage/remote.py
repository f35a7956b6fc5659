"""Object stores, reading side: the objects below one URL as a `Source`, and how a store is asked.

Stores are those of fsspec (`s3://`, `gs://`, `hf://`, `http(s)://` to read). This module and upload.py, which writes, are
the only ones that try again: a lost connection, a timeout, 408, 429 and 5xx are met with `_TRIES` tries; nothing else is.

A request costs a round trip, whatever it brings. So one listing tells the sizes and versions of all objects of a folder;
ranges that were announced are fetched `_TOGETHER` at a time, with what lies between neighbours (`_Ahead`); and
`stream.Reader` reads with more threads what is far away. What bounds memory: the caller's buffers, `_PIECE` bytes for each
thread, and `_KEPT` bytes of announced ranges.

No message holds credentials or signed queries: `shown` takes them out of URLs, `words` out of what a store said.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from ..errors import CkpttoolError, Corrupt, MissingPackage, RemoteError, SourceChanged, Unsafe, UsageError
from ..extras import missing
from .source import Identity, Source

__all__ = [
    "BadRange", "Conflict", "Denied", "Missing", "RemoteSource", "ask", "is_url", "judge", "shown", "source", "split",
    "store_of", "whole", "words",
]  # fmt: skip

T = TypeVar("T")

_TRIES, _WAIT = 5, 0.2  # waits of 0.2, 0.4, 0.8, 1.6 seconds between the tries
_PIECE = 8 << 20  # bytes asked for at once: what a lost connection costs at most
_TOGETHER, _THREADS = 256, 16  # announced ranges that are fetched at once, and requests for them
_MOST = 1 << 20  # bytes of an announced range
_LOOK = 4096  # announced ranges among which one that is read is looked for
_GAP = 64 << 10  # bytes that are read in vain rather than with another request
_KEPT = 32 << 20  # bytes of announced ranges that are kept
_PACKAGE = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)

# Names of classes of aiohttp, botocore, httpx, requests, urllib3 and http.client; none of them need be installed.
_LOST = {
    "ConnectionError", "TimeoutError", "EOFError", "HTTPClientError", "ResponseStreamingError", "IncompleteReadError",
    "IncompleteRead", "ResponseParserError", "ClientConnectionError", "ClientPayloadError", "ServerDisconnectedError",
    "TransportError", "ChunkedEncodingError", "ProtocolError", "RemoteDisconnected",
}  # fmt: skip
_BUSY = {"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "OperationAborted", "Throttling"}
_CONFLICT = {"PreconditionFailed", "ConditionalRequestConflict"}
# What says which bytes an object holds, in the words of the stores, the best first.
_STRONG = ("ETag", "etag", "generation", "blob_id")
_VERSION = (
    "ETag", "etag", "VersionId", "version_id", "generation", "md5Hash", "content_md5", "Content-MD5", "Digest", "oid",
    "blob_id", "LastModified", "Last-Modified", "last_modified", "mtime", "updated", "created",
)  # fmt: skip


class Missing(RemoteError):
    """The store has no such object."""


class Conflict(RemoteError):
    """The object is not what a conditional request took it for."""


class BadRange(RemoteError):
    """The object has no such bytes."""


class Denied(RemoteError):
    """The store does not allow it."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether it is the URL of a store rather than a path."""
    return _URL.match(os.fspath(path)) is not None


def normal(url: str) -> str:
    """A URL with its scheme in lower case, which is all that code looks for: S3:// is s3://."""
    scheme, mark, rest = url.partition("://")
    return scheme.lower() + mark + rest


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


def store_of(url: str) -> tuple[Any, str, str]:
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
    gc.enable()  # the command line turns it off; clients of stores leave cycles that hold what they have read
    if scheme == "hf":
        options["skip_instance_cache"] = True  # it keeps listings, and what it did not find, as long as it lives
    try:
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(url, **options)
    except ImportError:
        if scheme in _PACKAGE:
            raise missing(f"{scheme}://", _PACKAGE[scheme]) from None
        how = "pip install aiohttp" if scheme in ("http", "https") else f"install fsspec's package for {scheme}://"
        raise MissingPackage(f"{scheme}:// needs a package that is not installed: {how}") from None
    except ValueError as e:
        raise UsageError(f"{shown(url)}: {words(e)}.") from None
    except OSError as e:  # some stores (ftp) are asked for at once
        raise RemoteError(f"{shown(url)}: {words(e)}. Check the address and the network.") from None
    if scheme == "hf":
        import logging

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells its retries, with URLs that are signed
    if scheme in ("s3", "s3a"):
        fs.retries = 1  # tries of its own would multiply with ours
    return fs, path.rstrip("/"), f"?{query}" if query else ""


def ask(url: str, call: Callable[[], T]) -> T:
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
            kind, by = judge(e)
            if kind is None and k + 1 < _TRIES:
                time.sleep(_WAIT * 2**k)
                continue
            error = _told(url, kind, words(by))
        raise error from None
    raise AssertionError


def _told(url: str, kind: type[RemoteError] | None, words: str) -> RemoteError:
    if kind is None:
        return RemoteError(
            f"{url}: no answer in {_TRIES} tries ({words}). Check the network and the store, then run the same command "
            "again."
        )
    if kind is Missing:
        return Missing(f"{url}: the store has no such thing ({words}).")
    if kind is Denied:
        return Denied(f"{url}: the store does not allow it ({words}). Check the credentials and what they may do.")
    return kind(f"{url}: {words}.")


def judge(e: BaseException) -> tuple[type[RemoteError] | None, BaseException]:
    """(what it means, who says so); None is what may pass. File systems wrap what they were told; the inner knows."""
    for x in _chain(e):
        code, status = _code(x), _status(x)
        if code in _BUSY or status in (408, 429) or ((status or 0) >= 500 and status != 501):
            return None, x
        if code in _CONFLICT or status == 412:
            return Conflict, x
        if code == "NoSuchBucket":
            return RemoteError, x
        if status is not None and status >= 400:
            return {401: Denied, 403: Denied, 404: Missing, 416: BadRange}.get(status, RemoteError), x
        names = {c.__name__ for c in type(x).__mro__}
        if "OfflineModeIsEnabled" in names:  # HF_HUB_OFFLINE
            return RemoteError, x
        if _LOST & names:
            return None, x
    for kind, means in ((PermissionError, Denied), (FileNotFoundError, Missing)):
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


def words(e: BaseException) -> str:
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
    distant = True

    def __init__(self, url: str) -> None:
        self._fs, self._prefix, self._query = store_of(url)
        self._web = url.lower().startswith("http")
        self._hub = url.lower().startswith("hf://")
        self._pinned: str | None = None
        self._pin = threading.Lock()
        self.root = shown(url).rstrip("/")
        self._identity: dict[str, Identity] = {}  # of objects that were looked at
        self._listed: dict[
            str, dict[str, Identity | None]
        ] = {}  # folder: {name: what the listing says, None of folders}
        self._files: dict[str, int | None] = {}  # names that listings tell as those of files, with their bytes
        self._ahead = _Ahead(self._piece)

    def _base(self) -> str:
        """The path that all objects lie below. On the Hub it names the commit that was first seen: one listing and many
        reads are of one commit, though the branch moves on."""
        if not self._hub:
            return self._prefix
        with self._pin:
            if self._pinned is None:
                self._pinned, self.commit = ask(self.root, lambda: _at_commit(self._fs, self._prefix))
            return self._pinned

    def _path(self, name: str) -> str:
        parts = name.split("/")
        if any(p in ("", ".", "..") for p in parts) or "\0" in name or "\\" in name or "?versionId=" in name:
            raise Unsafe(f"{name!r} leads out of {self.root}; a checkpoint may only name objects below its own URL.")
        return f"{self._base()}/{quote(name) if self._web else name}{self._query}"

    def _url(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def _ask_identity(self, name: str) -> Identity:
        path = self._path(name)
        said: dict[str, Any] = ask(self._url(name), lambda: self._fs.info(path))
        if said.get("type") != "file":
            raise Missing(f"{self._url(name)} is a folder, not an object.")
        found = self._identity_in(name, said)
        if found is None and isinstance(said.get("size"), int):
            raise Missing(f"{self._url(name)} is a folder, not an object.")
        if found is None:
            raise RemoteError(f"{self._url(name)}: the server does not tell its size.")
        return found

    def _identity_in(self, name: str, said: dict[str, Any]) -> Identity | None:
        """The five numbers of a file are here: the place, the version as the store names it, the size, and nothing."""
        if said.get("type") != "file" or not isinstance(said.get("size"), int):
            return None
        if self._web and str(said.get("url", "")).partition("?")[0].endswith("/"):
            return None  # the server has led on to the page of a folder
        version = next((f"{k} {said[k]}" for k in _VERSION if said.get(k)), "")
        return _number(f"{self._prefix}/{name}{self._query}"), _number(version), said["size"], 0, 0

    def list(self, folder: str = "") -> list[str]:
        """Names of what lies directly below the URL, or below one prefix under it, sorted; none where nothing does. A
        folder is asked for once."""
        if folder not in self._listed:
            no_folder = folder in self._files or (folder and self._known(folder) is not None)
            self._listed[folder] = {} if no_folder else self._ask_list(folder)
        return sorted(self._listed[folder])

    def _known(self, name: str) -> Identity | bool | None:
        """What listings that were made say of a name: False where there is no such thing, None where they do not tell, or
        that it is a folder."""
        if self._web:  # pages for people need not list everything
            return None
        parts = name.split("/")
        for k, part in enumerate(parts):
            listed = self._listed.get("/".join(parts[:k]))
            if listed is not None and part not in listed:
                return False
        return self._listed.get("/".join(parts[:-1]), {}).get(parts[-1])

    def _ask_list(self, folder: str) -> dict[str, Identity | None]:
        try:
            path = self._path(folder) if folder else self._base() + self._query
            found: list[dict[str, Any]] = ask(self._url(folder), lambda: self._fs.ls(path, detail=True))
        except Missing:
            return {}
        head = path.removesuffix(self._query) + "/"
        out: dict[str, Identity | None] = {}
        for said in found:
            if not said["name"].startswith(head):
                continue
            name = said["name"].rstrip("/").removeprefix(head)
            if self._web:
                name = unquote(name.partition("?")[0].rstrip("/"))
            if name and "/" not in name:
                if said.get("type") == "file":
                    size = said.get("size")
                    self._files[f"{folder}/{name}" if folder else name] = size if isinstance(size, int) else None
                told = any(said.get(k) for k in _STRONG)  # else listings and single answers may tell other things
                out[name] = self._identity_in(f"{folder}/{name}" if folder else name, said) if told else None
        return out

    def exists(self, name: str) -> bool:
        """Whether there is an object of that name."""
        if (known := self._known(name)) is not None:
            return bool(known)
        try:
            self._identity.setdefault(name, self._ask_identity(name))
        except (Missing, Unsafe):
            return False
        return True

    def glance(self, name: str) -> tuple[bool, int | None]:
        """(whether it is a folder, bytes of an object where the listing tells them) of an entry of `list`; asks nothing."""
        return name not in self._files, self._files.get(name)

    def size(self, name: str) -> int:
        """Bytes of an object.

        Raises:
            Corrupt: it is missing. Unsafe: the name leads elsewhere. RemoteError: the store does not tell.
        """
        if name not in self._identity:
            known = self._known(name)
            try:
                now = known if isinstance(known, tuple) else self._ask_identity(name)
            except Missing:
                raise Corrupt(f"{self._url(name)} is missing. The copy is incomplete; fetch the file again.") from None
            self._identity.setdefault(name, now)
        return self._identity[name][2]

    def announce(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Ranges (name, offset, length) that will soon be read, in about this order: the first that is wanted brings many
        that follow."""
        self._ahead.announce(ranges)

    def readinto(self, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on; safe in many threads at once.

        Raises:
            Corrupt: the object is missing or ends before. SourceChanged: it is another one by now. RemoteError: the
            store fails.
        """
        if offset < 0 or offset + len(into) > self.size(name):
            raise Corrupt(f"{self._url(name)} has {self.size(name)} bytes; {offset}..{offset + len(into)} are needed.")
        into = into.cast("B") if into.format != "B" else into
        if not len(into):
            return
        if (known := self._ahead.take(name, offset, len(into))) is not None:
            into[:] = known
            return

        def fill(at: int) -> None:
            n = min(_PIECE, len(into) - at)
            into[at : at + n] = self._piece(name, offset + at, n)

        starts = range(0, len(into), _PIECE)
        if len(starts) == 1:
            fill(0)
            return
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(4, len(starts)), "ckpttool-fetch") as pool:
            for _ in pool.map(fill, starts):
                pass

    def _piece(self, name: str, start: int, n: int) -> bytes:
        path, how = self._path(name), {"cache_type": "none"} if self._hub else {}  # else 5 MiB are read ahead

        def once() -> bytes:
            data: bytes
            if self._web:
                data = _of_web(self._fs, path, start, start + n)
            else:
                data = self._fs.cat_file(path, start=start, end=start + n, **how)
            if len(data) < n:
                raise EOFError(f"{len(data)} of {n} bytes from byte {start} on")
            return data

        try:
            data = ask(self._url(name), once)
        except (Missing, BadRange):
            raise SourceChanged(
                f"{self._url(name)} changed while it was read. Wait until its writer has finished."
            ) from None
        except RemoteError:
            self._same([name], sure=False)
            raise
        if len(data) > n:
            raise RemoteError(f"{self._url(name)}: the server sends the whole object where a range is asked for.")
        return data

    def identities(self) -> dict[str, Identity]:
        """(place, version, size, 0, 0) of every object looked at so far."""
        return dict(self._identity)

    def versioned(self) -> bool:
        """Whether the store tells versions, so that `unchanged` proves something."""
        return all(identity[1] != _NO_VERSION for identity in self._identity.values())

    def unchanged(self) -> None:
        """Prove that no object was replaced since it was first looked at. A commit on the Hub does not change.

        Raises:
            SourceChanged: with the object.
        """
        if self.commit is not None:
            return
        folders: dict[str, list[str]] = {}
        for name in self._identity:
            folders.setdefault(name.rpartition("/")[0], []).append(name)
        single: list[str] = []
        for folder, names in folders.items():
            now = self._ask_list(folder) if len(names) > 2 else {}
            for name in names:
                found = now.get(name.rpartition("/")[2])
                if found is None:
                    single.append(name)
                elif found != self._identity[name]:
                    raise self._changed(name)
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(_THREADS, "ckpttool-fetch") as pool:
            for _ in pool.map(lambda name: self._same([name]), single):
                pass

    def _same(self, names: Iterable[str], sure: bool = True) -> None:
        """Objects are those that were first looked at; where not `sure`, a store that fails proves nothing."""
        for name in names:
            try:
                now = self._ask_identity(name)
            except Missing:
                now = None
            except RemoteError:
                if sure:
                    raise
                continue
            if now != self._identity.get(name, now):
                raise self._changed(name)

    def _changed(self, name: str) -> SourceChanged:
        return SourceChanged(f"{self._url(name)} changed while it was read. Wait until its writer has finished.")

    def close(self) -> None:
        """Nothing is open."""


class _Ahead:
    """Ranges that were announced: fetched many at a time, kept until others push them out."""

    def __init__(self, fetch: Callable[[str, int, int], bytes]) -> None:
        self._fetch = fetch
        self._coming: list[tuple[deque[tuple[str, int, int]], Iterator[tuple[str, int, int]]]] = []
        self._kept: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._starts: dict[str, list[int]] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def announce(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """What is announced last is looked at first."""
        with self._lock:
            self._coming.append((deque(), iter(ranges)))

    def take(self, name: str, offset: int, n: int) -> bytes | memoryview | None:
        """Bytes of a range that was announced, or of a part of one; None of any other."""
        if n > _MOST:
            return None  # what `stream.Reader` reads in many threads does not wait for each other here
        with self._lock:
            found = self._look(name, offset, n)
            if found is None and self._coming and self._load(name, offset, n):
                found = self._look(name, offset, n)
            return found

    def _look(self, name: str, offset: int, n: int) -> memoryview | None:
        starts = self._starts.get(name, [])
        i = bisect_right(starts, offset) - 1
        if i < 0:
            return None
        data = self._kept[name, starts[i]]
        return (
            memoryview(data)[offset - starts[i] : offset - starts[i] + n]
            if offset + n <= starts[i] + len(data)
            else None
        )

    def _load(self, name: str, offset: int, n: int) -> bool:
        """Fetch the announced range that holds this one, and those that follow it."""
        for k in range(len(self._coming) - 1, -1, -1):
            waiting, more = self._coming[k]
            waiting.extend(islice(more, _LOOK - len(waiting)))
            if not waiting:
                del self._coming[k]
                continue
            for i, (other, start, length) in enumerate(waiting):
                if other == name and start <= offset and offset + n <= start + length:
                    for _ in range(i):
                        waiting.popleft()
                    self._fetch_next(waiting)
                    return True
        return False

    def _fetch_next(self, waiting: deque[tuple[str, int, int]]) -> None:
        batch: list[tuple[str, int, int]] = []
        room = _KEPT // 4
        while waiting and len(batch) < _TOGETHER and (not batch or waiting[0][2] <= room):
            room -= waiting[0][2]
            batch.append(waiting.popleft())
        spans: list[list[Any]] = []
        for name, start, length in sorted(set(batch)):
            if (
                spans
                and spans[-1][0] == name
                and start - spans[-1][2] <= _GAP
                and start + length - spans[-1][1] <= _PIECE
            ):
                spans[-1][2] = max(spans[-1][2], start + length)
            else:
                spans.append([name, start, start + length])
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(_THREADS, len(spans)), "ckpttool-fetch") as pool:
            for span, data in zip(spans, pool.map(self._try, spans), strict=True):
                if data:
                    self._keep(span[0], span[1], data)

    def _try(self, span: list[Any]) -> bytes:
        try:
            return self._fetch(span[0], span[1], span[2] - span[1])
        except CkpttoolError:
            return b""  # whoever wants it asks again, and is told

    def _keep(self, name: str, start: int, data: bytes) -> None:
        if (name, start) in self._kept:
            if len(self._kept[name, start]) >= len(data):
                return
            self._bytes -= len(self._kept.pop((name, start)))
        else:
            insort(self._starts.setdefault(name, []), start)
        self._kept[name, start] = data
        self._bytes += len(data)
        while self._bytes > _KEPT:
            (old, at), gone = self._kept.popitem(last=False)
            self._starts[old].remove(at)
            self._bytes -= len(gone)


def _at_commit(fs: Any, path: str) -> tuple[str, str | None]:
    """(a path on the Hub with the commit in the place of its branch, that commit); as it is where it names no repository."""
    from huggingface_hub import HfApi, constants

    try:
        at = fs.resolve_path(path)
    except (ValueError, NotImplementedError):
        return path, None
    if not hasattr(at, "repo_id"):  # a bucket
        return path, None
    found = HfApi(endpoint=fs.endpoint, token=fs.token).repo_info(
        at.repo_id, repo_type=at.repo_type, revision=at.revision
    )
    kind = constants.REPO_TYPES_URL_PREFIXES.get(at.repo_type, "")
    if not found.sha:
        return path, None
    return f"{kind}{at.repo_id}@{found.sha}/{at.path_in_repo}".rstrip("/"), found.sha


def _number(text: str) -> int:
    from hashlib import sha256

    return int.from_bytes(sha256(text.encode()).digest()[:8], "little")


_NO_VERSION = 0x141CFC9842C4B0E3  # _number("")


def _of_web(fs: Any, url: str, start: int, end: int) -> bytes:
    """Bytes [start, end) of what lies at a URL.

    Raises:
        RemoteError: the server sends others.
    """
    from fsspec.asyn import sync

    async def call() -> Any:
        session = await fs.set_session()
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        async with session.get(fs.encode_url(url), headers={**fs.kwargs.get("headers", {}), **headers}) as answer:
            fs._raise_not_found_for_status(answer, url)
            return answer.status, answer.headers.get("Content-Range", ""), await answer.read()

    data: bytes
    status, told, data = sync(fs.loop, call)
    if status == 206 and not told.replace(" ", "").startswith(f"bytes{start}-"):
        raise RemoteError(
            f"{shown(url)}: bytes from {start} on were asked for, and the server sends {told or 'others'!r}. A proxy or cache "
            "between may be at fault; fetch the file by other means."
        )
    return data


def source(path: str) -> Source:
    """The files of a folder, or the objects below a URL."""
    return RemoteSource(path) if is_url(path) else Source(path)
