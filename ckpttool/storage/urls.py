"""URLs of stores: parsing, checks of names below them, and display without credentials."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from ..errors import Unsafe, UsageError

__all__ = [
    "UNFINISHED",
    "check_object_name",
    "display_path",
    "get_scheme",
    "is_url",
    "lower_scheme",
    "make_absolute",
    "make_path_absolute",
    "redact_url",
    "refuse_azure_query",
    "split_url",
]

#: An object that is in a folder while its files become visible, and stays there if that is interrupted.
UNFINISHED = ".ckpttool-partial"

_MOST_NAME_BYTES = 1024  # of S3 and GCS

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_AZURE = re.compile(r"(?:az|abfss?)://", re.IGNORECASE)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a text is the URL of a store (it begins with SCHEME://) and not a path."""
    return _URL.match(os.fspath(path)) is not None


def lower_scheme(url: str) -> str:
    """Return a URL with its scheme in lower case, as the code expects it: S3:// becomes s3://."""
    scheme, mark, rest = url.partition("://")
    return scheme.lower() + mark + rest


def redact_url(url: str) -> str:
    """Return a URL without parts that may be credentials: user and password; the query of a web server's or Azure's
    URL; the fragment of a web server's. In a URL of Azure, a name before @ is a container and is kept."""
    if _AZURE.match(url):
        return re.sub(r"(://)[^/@\s]*:[^/@\s]*@", r"\1", url).split("?")[0]
    url = re.sub(r"(://)[^/@\s]*@", r"\1", url)
    return url.split("?")[0].split("#")[0] if url.lower().startswith("http") else url


def refuse_azure_query(url: str) -> None:
    """Refuse a URL of Azure with a query, which may be a signature.

    Raises:
        UsageError: it has one.
    """
    if _AZURE.match(url) and "?" in url:
        raise UsageError(
            f"{redact_url(url)}: a URL of Azure has no query; set AZURE_STORAGE_SAS_TOKEN to a signed one.",
            code="CKPT0214",
        )


def make_path_absolute(path: str | os.PathLike[str]) -> str:
    """Return a path as an absolute path without "..", of the same file or folder.

    The kernel follows a link before it takes the ".." after it: with `link -> ../real/sub`, link/../s.pt is
    ../real/s.pt. os.path.abspath drops "link/.." and gets ./s.pt, another file. Here a link before a ".." is followed,
    and all others stay in the path.

    Args:
        path: of something that exists or does not; not a URL.
    """
    text = os.fspath(path)
    parts = text.split("/")
    if ".." not in parts:
        return os.path.abspath(text)
    at = "/" if text.startswith("/") else os.getcwd()
    for part in parts:
        if part == "..":
            at = os.path.dirname(os.path.realpath(at) if os.path.islink(at) else at)
        elif part not in ("", "."):
            at = os.path.join(at, part)
    return at


def make_absolute(path: str) -> str:
    """Return a path as an absolute path; a URL is returned unchanged."""
    return path if is_url(path) else make_path_absolute(path)


def display_path(path: str | os.PathLike[str]) -> str:
    """Return a path for messages and records: absolute, or a URL without credentials."""
    return redact_url(os.fspath(path)) if is_url(path) else make_path_absolute(path)


def split_url(url: str) -> tuple[str, str]:
    """Split a URL: (URL of the folder, name of the object in it). The query of a web URL stays with the folder, and its
    name is unquoted."""
    query = ""
    if url.lower().startswith("http"):
        url, mark, query = url.partition("?")
        query = mark + query
    folder, _, name = url.rstrip("/").rpartition("/")
    return folder + query, unquote(name) if url.lower().startswith("http") else name


def get_scheme(url: str) -> str | None:
    """Return the scheme of a URL in lower case; None for a path."""
    found = _URL.match(url)
    return found[1].lower() if found else None


def check_object_name(name: str, root: str) -> str:
    """Check that a name, which may come from a checkpoint, a listing or the Hub, names an object below a URL, and
    return it unchanged.

    Args:
        name: relative to the URL.
        root: the URL, for messages.

    Raises:
        Unsafe: it leads out of the URL, or no store has such a name.
    """
    parts = name.split("/")
    if re.search("[\ud800-\udfff]", name):
        raise Unsafe(
            f"{name[:200]!r} in {root} has half of a surrogate pair, which no store allows in a name.", code="CKPT0702"
        )
    if any(p in ("", ".", "..") for p in parts) or "\0" in name or "\\" in name or "?versionId=" in name:
        raise Unsafe(
            f"{name[:200]!r} leads out of {root}; a checkpoint may name only objects below its own URL.",
            code="CKPT0702",
        )
    if len(name.encode("utf-8", "replace")) > _MOST_NAME_BYTES:
        raise Unsafe(
            f"{name[:80]!r}... in {root} has more than {_MOST_NAME_BYTES} bytes, which no store allows.",
            code="CKPT0702",
        )
    return name
