"""`RemoteSource`: the objects below one URL as a `Source`. Stores are those of fsspec (s3://, gs://, az://,
hf://, http(s)://).

A request costs a round trip, whatever it brings. So one listing gives the sizes and versions of all objects of a
folder, announced ranges are fetched many at a time (prefetch.py), and `stream.Reader` uses more threads for remote
sources. What bounds memory: the caller's buffers, `FetchSizes.request_bytes` for each thread, and
`FetchSizes.kept_bytes`.

No message contains credentials or signed queries (retries.py, urls.py).
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..errors import Corrupt, MissingPackage, RemoteError, SourceChanged, Unsafe, UsageError
from ..extras import explain_missing_package
from .answer_limits import LIMITS
from .frames import FramedFile
from .hub_limits import bound_hub_client, get_commit_hash
from .listings import list_entries, list_tree, make_hub_file_info
from .prefetch import FetchSizes, Prefetcher
from .retries import BadRange, NotFound, redact_message, with_retries
from .source import Identity, Source
from .threads import run_in_threads
from .urls import check_object_name, get_scheme, redact_url, refuse_azure_query

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["RemoteSource", "filesystem_for"]

_PACKAGE = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
_PACKAGE |= dict.fromkeys(("az", "abfs", "abfss"), "adlfs")
# Fields by which stores identify the content of an object, the best first.
_STRONG = ("ETag", "etag", "generation", "blob_id", "xet_hash")
_VERSION = (
    "ETag",
    "etag",
    "VersionId",
    "version_id",
    "generation",
    "md5Hash",
    "content_md5",
    "Content-MD5",
    "Digest",
    "oid",
    "blob_id",
    "xet_hash",
    "LastModified",
    "Last-Modified",
    "last_modified",
    "mtime",
    "updated",
    "created",
)


def filesystem_for(url: str) -> tuple[AbstractFileSystem, str, str]:
    """Open fsspec's file system for a URL: (file system, path of the URL in it, "?..." that every request to a web
    server must carry or "").

    Raises:
        UsageError: the URL is of no known kind of store; MissingPackage if its package is not installed.
        RemoteError: a store that fsspec contacts at once (ftp) does not answer.
    """
    scheme = get_scheme(url)
    if scheme is None or "::" in url:
        raise UsageError(
            f"{redact_url(url)} is not the URL of a store; give one like s3://bucket/folder.", code="CKPT0214"
        )
    if scheme in ("file", "local"):
        raise UsageError(f"{url}: give the path itself, without {scheme}://.", code="CKPT0214")
    query = ""
    refuse_azure_query(url)
    if scheme in ("http", "https"):
        url, _, query = url.partition("?")
    options: dict[str, object] = {"use_listings_cache": False}
    if scheme == "hf":
        options["skip_instance_cache"] = True  # it caches listings and misses for as long as it lives
    try:
        from fsspec.core import url_to_fs

        options |= _make_client_options(scheme)
        fs, path = url_to_fs(url, **options)
    except ImportError:
        if scheme in _PACKAGE:
            raise explain_missing_package(f"{scheme}://", _PACKAGE[scheme]) from None
        how = "pip install aiohttp" if scheme in ("http", "https") else f"install fsspec's package for {scheme}://"
        raise MissingPackage(f"{scheme}:// needs a package that is not installed: {how}") from None
    except ValueError as e:
        azure = " Set AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_CONNECTION_STRING." if _is_azure(scheme) else ""
        raise UsageError(f"{redact_url(url)}: {redact_message(e)}.{azure}", code="CKPT0214") from None
    except OSError as e:  # some stores (ftp) are asked for at once
        raise RemoteError(
            f"{redact_url(url)}: {redact_message(e)}. Check the address and the network.", code="CKPT0901"
        ) from None
    gc.enable()  # the command line turns it off; clients of stores leave cycles that hold what they have read
    if scheme == "hf":
        import logging

        if path.startswith("buckets/"):
            _check_hub_buckets(url)

        bound_hub_client()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs its retries, with signed URLs
    if _is_azure(scheme):
        from .azure import bound_azure_client

        bound_azure_client(fs)
    if scheme in ("s3", "s3a"):
        fs.retries = 1  # its own retries would multiply with ours
    return fs, path.rstrip("/"), f"?{query}" if query else ""


def _check_hub_buckets(url: str) -> None:
    """Refuse the URL of a bucket where the huggingface_hub that is installed takes it for a repository.

    Raises:
        MissingPackage: it is too old.
    """
    import huggingface_hub
    from huggingface_hub import hf_file_system

    if not hasattr(hf_file_system, "HfFileSystemResolvedBucketPath"):
        raise MissingPackage(
            f"{redact_url(url)}: huggingface_hub {huggingface_hub.__version__} has no buckets in its file system: "
            "pip install -U huggingface_hub"
        )


def _is_azure(scheme: str) -> bool:
    """Return whether a scheme ("az") is one of Azure's."""
    return _PACKAGE.get(scheme) == "adlfs"


def _make_client_options(scheme: str) -> dict[str, object]:
    """Return the arguments of fsspec's file system, {name: value}, that limit the size and the duration of responses
    for a scheme such as "s3" (answer_limits.py); {} for a store that is limited elsewhere. Every call returns an equal
    dict, since fsspec caches file systems by their arguments, but a new one, since botocore adds to it.

    Raises:
        ImportError: the package of the store is not installed.
    """
    if scheme in ("s3", "s3a"):
        if find_spec("s3fs") is None:
            raise ImportError("s3fs")
        from .aiohttp_limits import make_s3_session_class

        return {
            "config_kwargs": {
                "retries": {"total_max_attempts": 1},
                "http_session_cls": make_s3_session_class(),
                "read_timeout": LIMITS.write_seconds,  # s3fs would give up sooner than our own limits do
            }
        }
    if scheme in ("http", "https", "gs", "gcs"):
        from .aiohttp_limits import session_settings

        return {"client_kwargs" if scheme in ("http", "https") else "session_kwargs": session_settings()}
    return {}


class RemoteSource(Source):
    """The objects below one URL. No connection is kept open, and no request is sent before it is needed."""

    local = False
    is_remote = True
    sizes = FetchSizes()

    def __init__(self, url: str) -> None:
        """Open fsspec's file system for a URL, that of a folder of objects; no object is requested yet."""
        self._fs, self._prefix, self._query = filesystem_for(url)
        self._web = url.lower().startswith("http")
        self._hub = url.lower().startswith("hf://")
        self._pinned: str | None = None
        self._pin = threading.Lock()
        self.root = redact_url(url).rstrip("/")
        self._identity: dict[str, Identity] = {}  # of objects that were looked at
        self._listed: dict[
            str, dict[str, Identity | None]
        ] = {}  # folder: {name: what the listing says, None of folders}
        self._files: dict[str, int | None] = {}  # names that listings tell as those of files, with their bytes
        self._times: dict[str, float] = {}  # {name: when it was written, in seconds since 1970} by listings
        self._ahead = Prefetcher(self._fetch_range, self.sizes)
        self._framed: dict[str, FramedFile] = {}

    def _get_pinned_prefix(self) -> str:
        """Return the path in the file system below which all objects are. On the Hub it contains the commit that the
        first call found, so that all reads see one commit even if the branch moves.

        Raises:
            RemoteError: the Hub fails.
        """
        if not self._hub:
            return self._prefix
        with self._pin:
            if self._pinned is None:
                self._pinned, self.commit = with_retries(self.root, lambda: _pin_commit(self._fs, self._prefix))
            return self._pinned

    def explain_missing(self) -> str:
        """Return a sentence, with the URL, that says why nothing was found at the URL.

        Raises:
            RemoteError: the Hub fails.
        """
        try:
            self._get_pinned_prefix()
        except NotFound as e:
            return str(e)
        kind = "bucket" if self._prefix.startswith("buckets/") else "repository"
        of_hub = f"the Hub has the {kind}, and no such file or folder in it"
        return f"{self.root}: {of_hub if self._hub else 'no such object, and no objects below it'}."

    def _make_object_path(self, name: str) -> str:
        """Return the path of an object in fsspec's file system.

        Raises:
            Unsafe: the name leads out of the source.
            RemoteError: the Hub fails.
        """
        check_object_name(name, self.root)
        return f"{self._get_pinned_prefix()}/{quote(name) if self._web else name}{self._query}"

    def _make_object_url(self, name: str) -> str:
        """Return the URL of an object, for messages; for "" the URL of the source."""
        return f"{self.root}/{name}" if name else self.root

    def _fetch_identity(self, name: str) -> Identity:
        """Ask the store for the identity of an object: (place, version, bytes, 0, 0).

        Raises:
            NotFound: there is no such object, or it is a folder.
            RemoteError: the store fails, or does not tell the size.
        """
        path = self._make_object_path(name)
        info: dict[str, Any] = with_retries(self._make_object_url(name), lambda: _fetch_info(self._fs, path))
        if info.get("type") != "file":
            raise NotFound(f"{self._make_object_url(name)} is a folder, not an object.")
        found = self._make_identity(name, info)
        if found is None and isinstance(info.get("size"), int):
            raise NotFound(f"{self._make_object_url(name)} is a folder, not an object.")
        if found is None:
            raise RemoteError(
                f"{self._make_object_url(name)}: the server does not give its size, which is needed to read parts of "
                "it. "
                "Download the file.",
                code="CKPT0906",
            )
        return found

    def _make_identity(self, name: str, info: dict[str, Any]) -> Identity | None:
        """Return the identity of an object by fsspec's `info` of it: (hash of its URL, hash of its version, bytes, 0,
        0); None if it is a folder or its size is unknown."""
        if info.get("type") != "file" or not isinstance(info.get("size"), int) or info["size"] < 0:
            return None
        if self._web and str(info.get("url", "")).partition("?")[0].endswith("/"):
            return None  # the server redirected to the page of a folder
        version = next((f"{k} {info[k]}" for k in _VERSION if info.get(k)), "")
        return _hash64(f"{self._prefix}/{name}{self._query}"), _hash64(version), info["size"], 0, 0

    def list(self, folder: str = "") -> list[str]:
        """Return the sorted names of the objects and prefixes directly below the URL, or below a prefix under it; [] if
        there are none. The store is asked at most once for each folder.

        Args:
            folder: the prefix, relative to the URL; "" for the URL itself.

        Raises:
            RemoteError: the store fails.
            Unsafe: a name leads out of the source.
        """
        if folder not in self._listed:
            no_folder = folder in self._files or (folder and self._find_listed_identity(folder) is not None)
            self._listed[folder] = {} if no_folder else self._fetch_listing(folder)
        return sorted(self._listed[folder])

    def _find_listed_identity(self, name: str) -> Identity | bool | None:
        """Return what earlier listings say about a name; sends no request.

        Returns:
            The identity of the object; False if there is no such object; None if the name is a folder, if its folder
            was not listed, or if the listing does not tell, as that of a web server.
        """
        if self._web:  # pages for people need not list everything
            return None
        parts = name.split("/")
        for k, part in enumerate(parts):
            listed = self._listed.get("/".join(parts[:k]))
            if listed is not None and part not in listed:
                return False
        return self._listed.get("/".join(parts[:-1]), {}).get(parts[-1])

    def _fetch_listing(self, folder: str) -> dict[str, Identity | None]:
        """Request the list of objects and prefixes directly in a folder ("" for the source): {name: identity, or None
        for a folder and for an object without a version in the listing}; {} if there is no such folder.

        Raises:
            RemoteError: the store fails.
            Unsafe: a name leads out of the source.
        """
        try:
            path = self._make_object_path(folder).removesuffix(self._query) if folder else self._get_pinned_prefix()
            found = list_entries(self._fs, path, self._query, self._make_object_url(folder))
        except NotFound:
            return {}
        return {name: self._record_listed(f"{folder}/{name}" if folder else name, info) for name, info in found.items()}

    def _record_listed(self, name: str, info: dict[str, object]) -> Identity | None:
        """Record size and time of a listed object, and return its identity; None for a folder, and for an object
        without a version in the listing.

        Args:
            name: relative to the URL.
            info: fsspec's `info` from the listing.
        """
        if info.get("type") == "file":
            size = info.get("size")
            self._files[name] = size if isinstance(size, int) else None
            if (when := _parse_time(info)) is not None:
                self._times[name] = when
        versioned = any(info.get(k) for k in _STRONG)  # else a listing may not say the same as info() of one object
        return self._make_identity(name, info) if versioned else None

    def list_ahead(self) -> bool:
        """List all objects below the URL, a page for each request. Return True if `list` and `glance` need no further
        requests; False, with nothing kept, if there are `LIMITS.names` objects and folders or more, or the store cannot
        list recursively (all but S3, GCS and Azure).

        Raises:
            RemoteError: the store fails.
        """
        found = list_tree(self._fs, self._get_pinned_prefix(), self.root)
        folders: set[str] = set()
        try:
            for n, (name, info) in enumerate(found or (), start=1):
                folder, _, last = name.rpartition("/")
                inside = self._listed.setdefault(folder, {})
                if last:
                    inside[last] = self._record_listed(name, info)
                while folder and folder not in folders:
                    folders.add(folder)
                    folder, _, last = folder.rpartition("/")
                    self._listed.setdefault(folder, {}).setdefault(last, None)
                if n + len(folders) >= LIMITS.names:
                    break
            else:
                return found is not None
        except (NotFound, Unsafe):
            pass
        for known in (self._listed, self._files, self._times):
            known.clear()
        return False

    def modified(self, name: str) -> float | None:
        """Return when an object that `list` gave was written, in seconds since 1970; None of a folder, and where the
        listing does not tell."""
        return self._times.get(name)

    def exists(self, name: str) -> bool:
        """Return whether there is an object of that name; False also for a name that leads out of the URL.

        Raises:
            RemoteError: the store fails.
        """
        if (known := self._find_listed_identity(name)) is not None:
            return bool(known)
        try:
            check_object_name(name, self.root)
        except Unsafe:
            return False
        try:
            self._identity.setdefault(name, self._fetch_identity(name))
        except NotFound:
            return False
        return True

    def glance(self, name: str) -> tuple[bool, int | None]:
        """Return (whether a name that `list` gave is a folder, bytes of the object or None if the listing does not
        tell); sends no request."""
        return name not in self._files, self._files.get(name)

    def size(self, name: str) -> int:
        """Return the size of an object in bytes.

        Raises:
            Corrupt: it is missing.
            Unsafe: the name leads out of the source.
            SourceChanged: it is not the object that `expect` requires.
            RemoteError: the store fails, or does not tell the size.
        """
        if name not in self._identity:
            known = self._find_listed_identity(name)
            try:
                now = known if isinstance(known, tuple) else self._fetch_identity(name)
            except NotFound:
                raise Corrupt(
                    f"{self._make_object_url(name)} is missing. The copy is incomplete; fetch the file again.",
                    code="CKPT0401",
                ) from None
            self._identity.setdefault(name, now)
            self._check_expected(name)
        return self._identity[name][2]

    def prefetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Announce ranges (name, offset, length) that will soon be read, in about this order; the first read of one of
        them fetches many of the others."""
        self._ahead.prefetch(self._widen_range(name, offset, n) for name, offset, n in ranges)

    def _widen_range(self, name: str, offset: int, n: int) -> tuple[str, int, int]:
        """Return the range (name, offset, length) to fetch for a range: with the headers of unproved items around it
        (`FramedFile.widen`)."""
        if (framed := self._framed.get(name)) is None:
            return name, offset, n
        low, high = framed.widen(offset, offset + n)
        return name, low, high - low

    def prove_later(self, on: bool) -> None:
        """Set whether layouts may assume the offsets of items instead of reading each header first (`framed`)."""
        self.proves_later = on

    def framed(self, name: str) -> FramedFile:
        """Return the items of an object whose offsets are assumed, to which layouts add; empty at first."""
        return self._framed.setdefault(name, FramedFile(partial(self._read_raw, name)))

    def count_unproved(self) -> tuple[int, int]:
        """Return (number of items whose assumed offsets are not proved yet, number of all items with assumed
        offsets)."""
        counts = [framed.count() for framed in self._framed.values()]
        return sum(n for n, _ in counts), sum(n for _, n in counts)

    def prove_all(self) -> None:
        """Read the headers of all items of DCP whose offsets were assumed from those of their neighbours, and compare.

        Raises:
            CkpttoolError: an item is damaged, or cannot be read.
        """
        for name, framed in self._framed.items():
            self._ahead.prefetch((name, offset, n) for offset, n in framed.ends())
            framed.prove_all()

    def readinto(self, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of an object from `offset` on; safe in many threads at once.

        Raises:
            Corrupt: the object is missing or ends before.
            SourceChanged: it was replaced meanwhile.
            RemoteError: the store fails.
            UsageError: the source was closed.
        """
        if offset < 0 or offset + len(into) > self.size(name):
            raise Corrupt(
                f"{self._make_object_url(name)} has {self.size(name)} bytes; {offset}..{offset + len(into)} are "
                "needed.",
                code="CKPT0403",
            )
        into = into.cast("B") if into.format != "B" else into
        if not len(into):
            return
        framed = self._framed.get(name)
        into[:] = self._read_raw(name, offset, len(into)) if framed is None else framed.read(offset, len(into))

    def _read_raw(self, name: str, offset: int, n: int) -> bytes | bytearray | memoryview:
        """Return `n` bytes of an object from `offset` on, unproved, from memory or from the store; large ranges by
        several requests at a time.

        Raises:
            SourceChanged: the object was replaced while it was read.
            RemoteError: the store fails.
            UsageError: the source was closed.
        """
        if (known := self._ahead.take(name, offset, n)) is not None:
            return known
        piece = self.sizes.request_bytes
        if n <= piece:
            return self._fetch_range(name, offset, n)
        out = bytearray(n)

        def fill(at: int) -> None:
            """Fetch one piece."""
            out[at : at + piece] = self._fetch_range(name, offset + at, min(piece, n - at))

        starts = range(0, n, piece)
        run_in_threads(fill, starts, min(4, len(starts)), "ckpttool-fetch")
        return out

    def _fetch_range(self, name: str, start: int, n: int) -> bytes:
        """Return `n` bytes of an object from byte `start` on; sends one request, with retries.

        Raises:
            SourceChanged: the object was replaced meanwhile.
            RemoteError: the store fails.
            UsageError: the source was closed.
        """
        self._refuse_closed()
        path, how = (
            self._make_object_path(name),
            {"cache_type": "none"} if self._hub else {},
        )  # else 5 MiB are read ahead

        def once() -> bytes:
            """Return the bytes that one request brings; EOFError if they are too few."""
            data: bytes
            if self._web:
                data = _fetch_web_range(self._fs, path, start, start + n)
            else:
                data = self._fs.cat_file(path, start=start, end=start + n, **how)
            if len(data) < n:
                raise EOFError(f"{len(data)} of {n} bytes from byte {start} on")
            return data

        try:
            data = with_retries(self._make_object_url(name), once)
        except (NotFound, BadRange):
            raise self._changed_error(name) from None
        except RemoteError:
            if self.commit is None:  # a commit does not change
                with suppress(RemoteError):
                    self._check_unchanged(name)
            raise
        if len(data) > n:  # of a store whose answers are not bounded while they arrive
            raise RemoteError(
                f"{self._make_object_url(name)}: the server ignores Range requests and sends the whole object. "
                "Download "
                "the file.",
                code="CKPT0906",
            )
        return data

    def has_versions(self) -> bool:
        """Return whether the store gave a version of every object used so far, so that `assert_unchanged` can notice a
        replacement by another object of the same size."""
        return all(identity[1] != _NO_VERSION for identity in self._identity.values())

    def assert_unchanged(self) -> None:
        """Check that no object was replaced since it was first used. On the Hub nothing is requested, since a commit
        does not change.

        Raises:
            SourceChanged: an object was replaced or removed; the message names it.
            RemoteError: the store fails.
        """
        if self.commit is not None:
            return
        folders: dict[str, list[str]] = {}
        for name in self._identity:
            folders.setdefault(name.rpartition("/")[0], []).append(name)
        single: list[str] = []
        for folder, names in folders.items():
            now = self._fetch_listing(folder) if len(names) > 2 else {}
            for name in names:
                found = now.get(name.rpartition("/")[2])
                if found is None:
                    single.append(name)
                elif found != self._identity[name]:
                    raise self._changed_error(name)
        run_in_threads(self._check_unchanged, single, self.sizes.threads, "ckpttool-fetch")

    def _check_unchanged(self, name: str) -> None:
        """Request the identity of an object, and check that it is that of the first use.

        Raises:
            SourceChanged: it was replaced or removed.
            RemoteError: the store fails.
        """
        try:
            now = self._fetch_identity(name)
        except NotFound:
            now = None
        if now != self._identity.get(name, now):
            raise self._changed_error(name)

    def _changed_error(self, name: str) -> SourceChanged:
        """Return the error for an object that was replaced; it is not raised."""
        return SourceChanged(
            f"{self._make_object_url(name)} changed while it was read. Wait until its writer has finished."
        )

    def close(self) -> None:
        """Refuse all further reads; nothing is open."""
        self._closed = True


def _pin_commit(fs: AbstractFileSystem, path: str) -> tuple[str, str | None]:
    """Resolve the revision in a path on the Hub: (path with the commit as its revision, commit); (the path unchanged,
    None) if it names no repository or the Hub gives no commit.

    Args:
        fs: fsspec's file system of the Hub.
        path: in it.

    Raises:
        RemoteError: the Hub's answer is not a commit hash. Other errors are those of huggingface_hub.
    """
    from huggingface_hub import HfApi, constants

    try:
        at = fs.resolve_path(path)
    except (ValueError, NotImplementedError):
        return path, None
    if not hasattr(at, "repo_id"):  # a bucket
        return path, None
    api: Any = HfApi(endpoint=fs.endpoint, token=fs.token)
    found = api.repo_info(at.repo_id, repo_type=at.repo_type, revision=at.revision, expand=["sha"])
    kind = constants.REPO_TYPES_URL_PREFIXES.get(at.repo_type, "")
    if not found.sha:
        return path, None
    commit = get_commit_hash(found.sha, f"hf://{kind}{at.repo_id}")
    return f"{kind}{at.repo_id}@{commit}/{at.path_in_repo}".rstrip("/"), commit


def _fetch_info(fs: AbstractFileSystem, path: str) -> dict[str, object]:
    """Request fsspec's `info` of an object. A file in a bucket of the Hub is looked up at the Hub each time, since it
    may be replaced and fsspec's file system would answer from its cached listing.

    Raises:
        FileNotFoundError: the bucket has no such file. Other errors are those of the store's client.
    """
    if "s3" in fs.protocol and "/" in path:  # s3fs would list what is below a name that is no object's
        head = fs.call_s3("head_object", **dict(zip(("Bucket", "Key"), path.split("/", 1), strict=True)), **fs.req_kw)
        return {"type": "file", "size": head.get("ContentLength"), **head}
    if "hf" not in fs.protocol or not path.startswith("buckets/"):
        found: dict[str, Any] = fs.info(path)
        return found
    from huggingface_hub import HfApi

    try:
        at = fs.resolve_path(path)
    except ValueError:  # names no bucket
        raise FileNotFoundError(path) from None
    api: Any = HfApi(endpoint=fs.endpoint, token=fs.token)
    for entry in api.get_bucket_paths_info(at.bucket_id, [at.path]) if at.path else ():
        if entry.path == at.path:
            return make_hub_file_info(entry)
    raise FileNotFoundError(path)


def _parse_time(info: dict[str, Any]) -> float | None:
    """Return when an object was written, in seconds since 1970, by fsspec's `info` of it; None where it does not
    tell."""
    when = info.get("LastModified") or info.get("updated")
    try:
        return (datetime.fromisoformat(when) if isinstance(when, str) else when).timestamp() if when else None
    except (ValueError, AttributeError):
        return None


def _hash64(text: str) -> int:
    """Return the first 64 bits of the SHA-256 of a text, as an integer; an ETag may hold halves of surrogate pairs."""
    from hashlib import sha256

    return int.from_bytes(sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "little")


_NO_VERSION = 0x141CFC9842C4B0E3  # _hash64("")


def _fetch_web_range(fs: AbstractFileSystem, url: str, start: int, end: int) -> bytes:
    """Request bytes [start, end) of the file at a web URL. The server may send others; errors are those of aiohttp and
    fsspec."""
    from fsspec.asyn import sync

    async def call() -> bytes:
        session = await fs.set_session()
        headers = {**fs.kwargs.get("headers", {}), "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        async with session.get(fs.encode_url(url), headers=headers) as answer:
            fs._raise_not_found_for_status(answer, url)
            data: bytes = await answer.read()
            return data

    data: bytes = sync(fs.loop, call)
    return data
