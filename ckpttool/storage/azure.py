"""Blobs of Azure: a client whose answers are bounded, and the requests that write a blob whole.

adlfs finds the account and the credentials, and reads. It makes a blob visible when its file is closed, and replaces
what another one wrote meanwhile; so writes go to the client of azure-storage-blob that adlfs holds, under conditions.

Sources: the reference of Azure's REST API (Put Block, Put Block List, Put Blob, "Specifying conditional headers for
Blob service operations").
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ..errors import RemoteError, UsageError
from .answer_limits import LIMITS, current_budget, watch_upload
from .retries import NotFound, with_retries
from .urls import redact_url

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["AzureObject", "bound_azure_client", "is_azure"]

_GET_BYTES = 8 << 20  # of one request; no range that we read has more
_WRITES = frozenset({"stage_block", "commit_block_list", "upload_blob"})


def is_azure(fs: AbstractFileSystem) -> bool:
    """Return whether fsspec's file system is adlfs's."""
    return "abfs" in fs.protocol


def bound_azure_client(fs: AbstractFileSystem) -> None:
    """Give adlfs's file system a client for the same account and credentials that reports its requests and answers to
    the current `RequestBudget`, follows no redirects, and leaves retries to us."""
    logging.getLogger("azure").setLevel(logging.ERROR)  # it logs what it tries again
    client = fs.service_client
    if getattr(client, "ckpttool_bounded", False):
        return
    fs.service_client = type(client)(
        client.url,
        credential=client.credential,
        transport=_bounded_transport()(),
        retry_total=0,
        permit_redirects=False,
        max_single_get_size=_GET_BYTES,
        _location_mode=fs.location_mode,
    )
    fs.service_client.ckpttool_bounded = True


@cache
def _bounded_transport() -> Any:
    """Return azure-core's transport for aiohttp as a class whose sessions bound what they receive."""
    import aiohttp
    from azure.core.pipeline.transport import AioHttpTransport

    from .aiohttp_limits import xml_session_settings

    class Bounded(AioHttpTransport):  # type: ignore[misc]
        """A transport whose answers are bounded in length and time."""

        async def open(self) -> None:
            """Make the session with our hooks and our class of answers; a method that azure-core calls."""
            if self.session is None:  # type: ignore[has-type]
                cookies = aiohttp.DummyCookieJar()
                self.session = aiohttp.ClientSession(trust_env=True, cookie_jar=cookies, **xml_session_settings())
            await super().open()

    return Bounded


class AzureObject:
    """One blob, which need not exist.

    Args:
        fs: adlfs's file system.
        path: "container/name" in it.
        url: of the blob.

    Raises:
        UsageError: the path is a container alone.
        RemoteError (all methods): the store fails; or one of its subclasses in retries.py.
    """

    def __init__(self, fs: AbstractFileSystem, path: str, url: str) -> None:
        self.fs, self.url = fs, redact_url(url)
        self.container, _, self.key = path.partition("/")
        if not self.key:
            raise UsageError(f"{self.url} names a container; give an object in it.", code="CKPT0214")

    def request(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of azure-storage-blob's BlobClient with these arguments, with retries, and return its result.
        What it sends has to be confirmed within `write_seconds`."""
        from fsspec.asyn import sync

        async def call() -> Any:
            """Send the request once, in fsspec's event loop."""
            client = self.fs.service_client.get_blob_client(self.container, self.key)
            asked = getattr(client, method)(*args, **kwargs)
            budget = current_budget()
            return await (watch_upload(asked, None, budget) if budget and budget.writes else asked)

        return with_retries(self.url, lambda: sync(self.fs.loop, call), writes=method in _WRITES)

    def head(self) -> dict[str, Any] | None:
        """Return the blob's "ContentLength" in bytes and its "Metadata", as `S3Object.head` does; None if it does not
        exist."""
        try:
            found = self.request("get_blob_properties")
        except NotFound:
            return None
        return {"ContentLength": found.size, "Metadata": found.metadata or {}}

    def read(self) -> tuple[bytes, str]:
        """Return (bytes of a small blob, its ETag).

        Raises:
            NotFound: there is none.
        """
        from fsspec.asyn import sync

        async def call() -> tuple[bytes, Any]:
            """Read the blob once, in fsspec's event loop."""
            client = self.fs.service_client.get_blob_client(self.container, self.key)
            stream = await client.download_blob()
            if stream.size > LIMITS.answer_bytes:
                raise RemoteError(
                    f"{self.url} has {stream.size:,} bytes, more than the {LIMITS.answer_bytes:,} of a small object.",
                    code="CKPT0906",
                )
            return await stream.readall(), stream.properties

        data, properties = with_retries(self.url, lambda: sync(self.fs.loop, call))
        return data, str(properties.etag)

    def put(self, data: bytes, token: str | None) -> None:
        """Write a small blob.

        Args:
            data: the new bytes.
            token: the ETag that the blob must have; None if there must be no such blob.

        Raises:
            ConditionFailed, NotFound: it is another one by now.
        """
        from azure.core import MatchConditions

        same = {} if token is None else {"etag": token, "match_condition": MatchConditions.IfNotModified}
        self.request("upload_blob", data, length=len(data), overwrite=token is not None, **same)

    def delete(self) -> None:
        """Delete the blob; a missing one is no error. An account that keeps versions, or what was deleted, still has
        it."""
        try:
            self.request("delete_blob")
        except NotFound:
            pass

    def put_block(self, block: str, data: bytes) -> None:
        """Send a block, which is not visible; `block` is its id, as long as every other one of this blob. The store
        compares its MD5."""
        self.request("stage_block", block, data, length=len(data), validate_content=True)

    def put_block_list(self, blocks: Sequence[str], metadata: Mapping[str, str], *, only_new: bool) -> None:
        """Make the blob of these blocks (their ids) visible.

        Args:
            blocks: ids, in order.
            metadata: {name: value} to store with the blob; names are identifiers.
            only_new: there must be no such blob.

        Raises:
            ConditionFailed: there is one.
        """
        from azure.core import MatchConditions
        from azure.storage.blob import BlobBlock

        condition = {"match_condition": MatchConditions.IfMissing} if only_new else {}
        self.request("commit_block_list", [BlobBlock(b) for b in blocks], metadata=dict(metadata), **condition)
