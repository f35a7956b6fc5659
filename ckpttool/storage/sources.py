"""The source for a path or a URL."""

from __future__ import annotations

from .source import Source
from .urls import is_url

__all__ = ["open_source"]


def open_source(path: str) -> Source:
    """Return a source for a folder, by its path, or for the objects below a URL.

    Raises:
        Corrupt: there is no such folder.
        UsageError: the URL is of no known store.
    """
    if not is_url(path):
        return Source(path)
    from .remote import RemoteSource  # at the first URL, since most checkpoints are local

    return RemoteSource(path)
