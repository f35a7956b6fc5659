"""The names directly below one folder of a store, page by page: as the store lists them, checked, and never without an
end.

The clients' own `ls` collects all pages first, and follows a server that names another page for ever. Stores that
fsspec knows besides S3, GCS, Azure, the Hub and web servers are asked through their `ls`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from html import unescape
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urljoin

from ..errors import CkpttoolError, RemoteError, Unsafe
from .answer_limits import LIMITS
from .retries import redact_message, with_retries
from .urls import check_object_name

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["follow_pages", "get_protocols", "list_entries", "list_tree", "make_hub_file_info"]

#: What a store says of an object or folder, as fsspec's `info`; or a page of such, and arguments for the next one.
StoreInfo = dict[str, Any]

# every part of it takes time linear in the page
_LINK = re.compile(
    r"""\bhref\s*=\s*(?:"([^"<>]{1,4096})"|'([^'<>]{1,4096})')|(https?://[-\w@:%+.~#?&/=]{1,4096})""", re.IGNORECASE
)

_AZURE_PAGE = 500  # blobs; a page of as many with the longest names stays below what is read of an answer in XML
_MOST_TOKEN = 1 << 14  # characters; S3 and GCS send some hundred, and refuse a longer URL themselves


def follow_pages(
    url: str,
    ask: Callable[[StoreInfo], StoreInfo],
    following: Callable[[StoreInfo], StoreInfo | None],
) -> Iterator[StoreInfo]:
    """Yield the pages of a listing until it ends.

    Args:
        url: of the listed folder, for messages.
        ask: requests a page with these arguments ({} for the first page), and returns it.
        following: returns the arguments for the page after the given one, or None after the last; raises KeyError if
            the server announced another page without naming it.

    Raises:
        RemoteError: a page is named twice, there are too many of them or of their entries, or they take too long.
    """
    more: StoreInfo | None = {}
    seen: set[str] = set()
    entries = 0
    until = time.monotonic() + LIMITS.question_seconds
    while more is not None:
        page = ask(more)
        yield page
        entries += sum(len(rows) for rows in page.values() if isinstance(rows, list))
        try:
            more = following(page)
        except KeyError as e:
            raise RemoteError(
                f"{url}: the server says that its listing has another page, and gives no {e} for it. Check the server.",
                code="CKPT0906",
            ) from None
        if len(token := repr(more)) > _MOST_TOKEN:
            raise RemoteError(
                f"{url}: the server names the next page of its listing with {len(token):,} characters, and no store "
                f"takes more than {_MOST_TOKEN:,} in a URL. Check the server.",
                code="CKPT0906",
            )
        if more is not None and token not in seen and entries > LIMITS.names:
            raise RemoteError(
                f"{url} has more than {LIMITS.names:,} objects, and ckpttool lists no more. Choose another prefix.",
                code="CKPT0906",
            )
        if more is not None and (token in seen or len(seen) >= LIMITS.answers):
            again = "comes back to a page that was there" if token in seen else f"has more than {LIMITS.answers} pages"
            raise RemoteError(
                f"{url}: the server's listing {again}, so it has no end. Check the server.", code="CKPT0906"
            )
        if more is not None and time.monotonic() > until:
            raise RemoteError(
                f"{url}: the server's listing did not end in {LIMITS.question_seconds:.0f} seconds. Check the network "
                "and the server, then run the same command again.",
                code="CKPT0901",
            )
        seen.add(token)


def list_entries(fs: AbstractFileSystem, path: str, query: str, url: str) -> dict[str, StoreInfo]:
    """List the entries directly in a folder of a store: {name: fsspec's `info` of it}.

    Args:
        fs: fsspec's file system of the store.
        path: of the folder in `fs`, without a slash at its end.
        query: "?..." that every request to a web server carries, or "".
        url: of the folder, for messages.

    Raises:
        Unsafe: a name leads out of the folder.
        RemoteError: a name is listed twice, there are too many names, or the store fails.
    """
    protocols = get_protocols(fs)
    out: dict[str, StoreInfo] = {}
    if "http" in protocols:
        for name in with_retries(url, lambda: _list_links(fs, path + query)):
            out[name] = {"name": name, "type": "file", "size": None}
            _check_count(out, url)
        return out
    found: Iterable[StoreInfo]
    if (list_pages := _get_lister(protocols)) is not None:
        found = _check_answers(list_pages(fs, path, url, False), url)
    elif "hf" in protocols:
        at = with_retries(url, lambda: fs.resolve_path(path))
        found = with_retries(url, lambda: _list_hub(fs, path, at, url))
    else:
        found = with_retries(url, lambda: fs.ls(path, detail=True))
    head = path + "/"
    for info in found:
        name = str(info["name"])
        if name.rstrip("/") in (path, f"/{path}"):  # the mark of an empty folder; a file that is listed as a folder
            continue
        if not name.startswith(head):
            raise Unsafe(
                f"{url}: the store lists {name[:200]!r}, which does not lie there. Check the store.", code="CKPT0702"
            )
        name = name.removeprefix(head)
        name = name[:-1] if info.get("type") == "directory" and name.endswith("/") else name
        if "/" in name:
            check_object_name(name, url)
            raise RemoteError(
                f"{url}: the store lists {name[:200]!r}, which does not lie directly below. Check the store.",
                code="CKPT0906",
            )
        if check_object_name(name, url) in out and {out[name].get("type"), info.get("type")} == {"file"}:
            raise RemoteError(f"{url}: the store lists {name[:200]!r} twice. Check the store.", code="CKPT0906")
        if out.get(name, info).get("type") == info.get("type") or info.get("type") == "file":
            out[name] = info
        _check_count(out, url)
    return out


def _check_count(found: Sized, url: str) -> None:
    """Refuse a listing with more names than a checkpoint can have (`LIMITS.names`).

    Args:
        found: the names that were listed so far, or their `info`.
        url: of the folder, for messages.

    Raises:
        RemoteError: there are more.
    """
    if len(found) > LIMITS.names:
        raise RemoteError(
            f"{url}: the listing has more than {LIMITS.names:,} names, which no checkpoint has in one folder.",
            code="CKPT0906",
        )


def list_tree(fs: AbstractFileSystem, path: str, url: str) -> Iterator[tuple[str, StoreInfo]] | None:
    """Return an iterator of (name relative to a folder of a store, fsspec's `info`) over all objects below the folder,
    a page for each request; None if the store cannot list recursively (all but S3, GCS and Azure).

    Args:
        fs: fsspec's file system of the store.
        path: of the folder in `fs`, without a slash at its end.
        url: of the folder, for messages.

    Raises (while iterating):
        Unsafe: a name leads out of the folder.
        RemoteError: the store fails.
    """
    list_pages = _get_lister(get_protocols(fs))
    if list_pages is None:
        return None
    infos = _check_answers(list_pages(fs, path, url, True), url)
    found = ((str(info["name"]).removeprefix(path + "/"), info) for info in infos)
    # without the mark of an empty folder; that of one below it ends in a slash
    return (
        (check_object_name(name.removesuffix("/"), url) + "/" * name.endswith("/"), info)
        for name, info in found
        if name
    )


def _check_answers(found: Iterator[StoreInfo], url: str) -> Iterator[StoreInfo]:
    """Yield what a store lists, and refuse an answer that lacks a key or has a value of another type than it must have.

    Args:
        found: fsspec's `info` of each entry, made of the answers while they are asked for.
        url: of the folder, for messages.

    Raises:
        RemoteError: an answer does not have the form of a listing.
    """
    try:
        yield from found
    except CkpttoolError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError) as e:
        raise RemoteError(
            f"{url}: the store answers with something that is no listing ({type(e).__name__}: {redact_message(e)}). "
            "Check the address and the server.",
            code="CKPT0906",
        ) from None


def get_protocols(fs: AbstractFileSystem) -> list[str]:
    """Return the URL schemes that a file system of fsspec serves."""
    return [fs.protocol] if isinstance(fs.protocol, str) else list(fs.protocol)


def _get_lister(protocols: Iterable[str]) -> Callable[[Any, str, str, bool], Iterator[StoreInfo]] | None:
    """Return the function that lists a store of these protocols by pages; None if it lists in other ways."""
    listers = {"s3": _list_s3, "gs": _list_gcs, "abfs": _list_azure}
    return next((lister for name, lister in listers.items() if name in protocols), None)


def _list_s3(fs: AbstractFileSystem, path: str, url: str, deep: bool) -> Iterator[StoreInfo]:
    """Yield fsspec's `info` of each object and common prefix directly below a path "bucket/key" of S3, or with `deep`
    of each object at any depth; `url` is for messages."""
    bucket, _, key = path.partition("/")
    where = {"Bucket": bucket, "Prefix": key + "/" if key else "", **({} if deep else {"Delimiter": "/"})}
    for page in follow_pages(
        url,
        lambda more: with_retries(url, lambda: fs.call_s3("list_objects_v2", **where, **more, **fs.req_kw)),
        lambda page: {"ContinuationToken": page["NextContinuationToken"]} if page.get("IsTruncated") else None,
    ):
        for prefix in page.get("CommonPrefixes", []):
            yield {"name": f"{bucket}/{prefix['Prefix']}", "type": "directory", "size": 0}
        for row in page.get("Contents", []):
            yield {
                "name": f"{bucket}/{row['Key']}",
                "type": "file",
                "size": row.get("Size"),
                "ETag": row.get("ETag"),
                "LastModified": row.get("LastModified"),
            }


def _list_gcs(fs: AbstractFileSystem, path: str, url: str, deep: bool) -> Iterator[StoreInfo]:
    """Yield fsspec's `info` of each object and prefix directly below a path "bucket/key" of Google's store, or with
    `deep` of each object at any depth; `url` is for messages."""
    bucket, _, key = path.partition("/")
    where = {"prefix": key + "/" if key else "", "maxResults": 1000, **({} if deep else {"delimiter": "/"})}
    for page in follow_pages(
        url,
        lambda more: with_retries(url, lambda: fs.call("GET", "b/{}/o", bucket, json_out=True, **where, **more)),
        lambda page: {"pageToken": page["nextPageToken"]} if page.get("nextPageToken") else None,
    ):
        for prefix in page.get("prefixes", []):
            yield {"name": f"{bucket}/{prefix}", "type": "directory", "size": 0}
        for row in page.get("items", []):
            size = str(row.get("size"))
            yield {
                **row,
                "name": f"{bucket}/{row['name']}",
                "type": "file",
                "size": int(size) if size.isdecimal() else None,
            }


def _list_azure(fs: AbstractFileSystem, path: str, url: str, deep: bool) -> Iterator[StoreInfo]:
    """Yield fsspec's `info` of each blob and prefix directly below a path "container/key" of Azure, or with `deep` of
    each blob at any depth; `url` is for messages. The blob by which an account with a hierarchical namespace represents
    a folder is reported as a folder."""
    from fsspec.asyn import sync

    container, _, key = path.partition("/")
    where = {"name_starts_with": key + "/" if key else None, "include": ["metadata"], "results_per_page": _AZURE_PAGE}

    async def ask(more: StoreInfo) -> StoreInfo:
        """Return a page, in fsspec's event loop."""
        client = fs.service_client.get_container_client(container)
        pages = (client.list_blobs if deep else client.walk_blobs)(**where).by_page(**more)
        return {"rows": [row async for row in await anext(pages)], "next": pages.continuation_token}

    for page in follow_pages(
        url,
        lambda more: with_retries(url, lambda: sync(fs.loop, ask, more)),
        lambda page: {"continuation_token": page["next"]} if page["next"] else None,
    ):
        for row in page["rows"]:
            info: StoreInfo = {"name": f"{container}/{row.name}", "type": "directory", "size": 0}
            if row.get("etag") and (row.metadata or {}).get("hdi_isfolder") != "true":
                etag = str(row.etag).strip('"')  # as adlfs's info() gives it
                info |= {"type": "file", "size": row.size, "etag": f'"{etag}"', "LastModified": row.last_modified}
            yield info


def _list_hub(fs: AbstractFileSystem, path: str, at: Any, url: str) -> list[StoreInfo]:
    """List fsspec's `info` of each file and folder directly in a folder of a repository or bucket on the Hub.

    Args:
        fs: fsspec's file system of the Hub.
        path: of the folder in `fs`.
        at: what `fs.resolve_path(path)` returned.
        url: for messages.

    Raises:
        RemoteError: there are too many names.
    """
    from huggingface_hub import HfApi

    below = at.path_in_repo if hasattr(at, "repo_id") else at.path
    head = path.removesuffix(below).rstrip("/")
    out = []
    api: Any = HfApi(endpoint=fs.endpoint, token=fs.token)
    if hasattr(at, "repo_id"):
        listed = api.list_repo_tree(at.repo_id, below, revision=at.revision, repo_type=at.repo_type)
    else:  # a bucket, which also lists what begins like the folder's name
        listed = (
            entry
            for entry in api.list_bucket_tree(at.bucket_id, below or None, recursive=False)
            if not below or entry.path.startswith(f"{below}/")
        )
    for entry in listed:
        info: StoreInfo = {"name": f"{head}/{entry.path}", "type": "directory", "size": 0}
        if hasattr(entry, "size"):
            info |= make_hub_file_info(entry)
        out.append(info)
        _check_count(out, url)
    return out


def make_hub_file_info(entry: Any) -> StoreInfo:
    """Convert huggingface_hub's description of a file to fsspec's `info` without the name: {"type", "size", and
    "blob_id" (its hash in git, in a repository) or "xet_hash" and "LastModified" (upload time, in a bucket)}.

    Args:
        entry: huggingface_hub's RepoFile or BucketFile.
    """
    if hasattr(entry, "blob_id"):
        return {"type": "file", "size": entry.size, "blob_id": entry.blob_id}
    return {"type": "file", "size": entry.size, "xet_hash": entry.xet_hash, "LastModified": entry.uploaded_at}


def _list_links(fs: AbstractFileSystem, url: str) -> list[str]:
    """List the names directly below a URL that its web page links to; [] if it is no HTML page. Links to other places
    are ignored.

    Args:
        fs: fsspec's file system for HTTP.
        url: of the folder, possibly with a query.
    """
    from fsspec.asyn import sync

    async def call() -> str:
        session = await fs.set_session()
        async with session.get(fs.encode_url(url), **fs.kwargs) as answer:
            fs._raise_not_found_for_status(answer, url)
            kind = answer.headers.get("Content-Type", "text/html").partition(";")[0]
            # not the encoding that the server names: Python's decoders of some take hours for a page
            return await answer.text("utf-8", errors="ignore") if kind == "text/html" else ""

    page: str = sync(fs.loop, call)
    base = url.partition("?")[0].rstrip("/") + "/"
    out: dict[str, None] = {}
    for found in _LINK.finditer(page):
        try:
            link = urljoin(base, unescape(found[1] or found[2] or found[3])).partition("#")[0].partition("?")[0]
        except ValueError:
            continue
        # a server may call itself http:// behind a proxy that speaks https
        if link.partition("://")[2].startswith(base.partition("://")[2]):
            name = unquote(link.partition("://")[2].removeprefix(base.partition("://")[2]).rstrip("/"))
            try:
                if name and "/" not in name:
                    out[check_object_name(name, url)] = None
            except Unsafe:
                continue
        if len(out) > LIMITS.names:
            break
    return list(out)
