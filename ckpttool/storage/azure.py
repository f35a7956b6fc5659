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

from ..errors import UsageError
from .answer_limits import current_budget, watch_upload
from .retries import NotFound, with_retries
from .urls import redact_url

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["AzureObject", "bound_azure_client", "is_azure"]

_GET_BYTES = 8 << 20  # of one request; no range that we read has more
_WRITES = frozenset({"stage_block", "commit_block_list", "upload_blob"})


def is_azure(fs: AbstractFileSystem) -> bool:
    """Return whether an fsspec file system is adlfs, which accesses Azure."""
    return "abfs" in fs.protocol


def bound_azure_client(fs: AbstractFileSystem) -> None:
    """Replace the client in an adlfs file system by one for the same account and credentials that reports requests and
    responses to the current `RequestBudget`, follows no redirects and makes no retries. Does nothing if it was replaced
    before."""
    logging.getLogger("azure").setLevel(logging.ERROR)  # it logs what it tries again
    client = fs.service_client
    if getattr(client, "ckpttool_bounded", False):
        return
    fs.service_client = type(client)(
        client.url,
        credential=client.credential,
        transport=_make_transport_class()(),
        retry_total=0,
        permit_redirects=False,
        max_single_get_size=_GET_BYTES,
        _location_mode=fs.location_mode,
    )
    fs.service_client.ckpttool_bounded = True


@cache
def _make_transport_class() -> Any:
    """Return a subclass of azure-core's AioHttpTransport whose sessions limit the size and the duration of
    responses."""
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

    def request(self, method: str, *args: object, **kwargs: object) -> Any:
        """Call a method of azure-storage-blob's BlobClient, with retries, and return its result. A write must be
        confirmed within `write_seconds`.

        Args:
            method: name of the method, such as "upload_blob".
            args, kwargs: its arguments.
        """
        from fsspec.asyn import sync

        async def call() -> Any:
            """Send the request once, in fsspec's event loop."""
            client = self.fs.service_client.get_blob_client(self.container, self.key)
            asked = getattr(client, method)(*args, **kwargs)
            budget = current_budget()
            return await (watch_upload(asked, None, budget) if budget and budget.writes else asked)

        return with_retries(self.url, lambda: sync(self.fs.loop, call), writes=method in _WRITES)

    def head(self) -> dict[str, Any] | None:
        """Return {"ContentLength": bytes of the blob, "ETag", "Metadata": {name: value}}, with the keys of
        `S3Object.head`; None if the blob does not exist."""
        try:
            found = self.request("get_blob_properties")
        except NotFound:
            return None
        return {"ContentLength": found.size, "ETag": str(found.etag), "Metadata": found.metadata or {}}

    def read_range(self, start: int, n: int, token: str | None = None) -> tuple[bytes, int, str]:
        """Read a part of the blob, as `S3Object.read_range` does. It is one request, so `n` is at most 8 MiB."""
        from azure.core import MatchConditions
        from fsspec.asyn import sync

        same = {} if token is None else {"etag": token, "match_condition": MatchConditions.IfNotModified}

        async def call() -> tuple[bytes, Any]:
            """Read the bytes once, in fsspec's event loop."""
            client = self.fs.service_client.get_blob_client(self.container, self.key)
            stream = await client.download_blob(offset=start, length=n, **same)
            return await stream.readall(), stream.properties

        data, properties = with_retries(self.url, lambda: sync(self.fs.loop, call))
        return data, int(properties.content_range.rpartition("/")[2]), str(properties.etag)

    def put(self, data: bytes, token: str | None) -> None:
        """Write a small blob on the condition that it is unchanged, or that it does not exist.

        Args:
            data: the new bytes.
            token: the ETag that the blob must still have; None if the blob must not exist.

        Raises:
            ConditionFailed, NotFound: the condition does not hold.
        """
        from azure.core import MatchConditions

        same = {} if token is None else {"etag": token, "match_condition": MatchConditions.IfNotModified}
        self.request("upload_blob", data, length=len(data), overwrite=token is not None, **same)

    def delete(self) -> None:
        """Delete the blob; a missing blob is no error. Accounts with versioning or soft delete keep a copy."""
        try:
            self.request("delete_blob")
        except NotFound:
            pass

    def put_block(self, block: str, data: bytes) -> None:
        """Upload a block, which is invisible until `put_block_list`; the store verifies its MD5.

        Args:
            block: id of the block; all ids of a blob have the same length.
            data: bytes of the block.
        """
        self.request("stage_block", block, data, length=len(data), validate_content=True)

    def put_block_list(self, blocks: Sequence[str], metadata: Mapping[str, str], *, only_new: bool) -> None:
        """Create the blob, visible, from uploaded blocks.

        Args:
            blocks: ids of the blocks, in order.
            metadata: {name: value} to store with the blob; names are identifiers.
            only_new: fail if the blob exists.

        Raises:
            ConditionFailed: the blob exists, with `only_new`.
        """
        from azure.core import MatchConditions
        from azure.storage.blob import BlobBlock

        condition = {"match_condition": MatchConditions.IfMissing} if only_new else {}
        self.request("commit_block_list", [BlobBlock(b) for b in blocks], metadata=dict(metadata), **condition)
