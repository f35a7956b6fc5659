"""The limits of answer_limits.py for clients that use aiohttp: fsspec's HTTP, s3fs, gcsfs and adlfs.

The names of aiohttp that are used here are those of its documentation, except for one: aiobotocore makes its
ClientSession in a method without a setting for it (`_get_session`).
"""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import aiohttp

from .answer_limits import LIMITS, RequestBudget, check_redirect, current_budget, is_encoded, watch_upload

__all__ = ["make_s3_session_class", "session_settings", "xml_session_settings"]

_MOST_XML_BYTES = 2 << 20  # a thousand keys of the longest kind; a parsed page takes thirty times as much memory
# what a request to another server may carry: nothing that says who asks
_HARMLESS = {"accept", "accept-encoding", "range", "user-agent", "if-match", "if-none-match", "if-modified-since"}


class _BoundedReader:
    """The body of an answer, as aiohttp's StreamReader, which ends with an error where more than `most` bytes
    arrive."""

    def __init__(
        self, stream: Any, budget: RequestBudget, most: int, *, counted: bool, ignored: bool, error: bool, encoded: bool
    ) -> None:
        """Wrap the body of a response.

        Args:
            stream: the body, aiohttp's StreamReader.
            budget: the request budget of the response; gives the errors.
            most: bytes that the body may have.
            counted: whether the bytes count against the budget: those of a response without a range.
            ignored: whether the server sends the whole object, although a range of it was asked for.
            error: whether the response is an error or a redirect, whose body is filtered (`filter_error_body`).
            encoded: whether it has a content encoding.
        """
        self._stream, self._budget, self._most, self._counted, self._ignored = (
            stream,
            budget,
            most,
            counted,
            ignored,
        )
        self._error, self._encoded = error, encoded
        self._got = 0

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped stream's attribute of that name, for all that this class does not define."""
        return getattr(self._stream, name)

    async def read(self, n: int = -1) -> bytes:
        """Read at most `n` bytes of the body, or all that is left where `n` is negative, as StreamReader.read does.

        Raises:
            RemoteError: the body is longer than allowed, or would fill the memory once it is parsed.
        """
        if n >= 0 and not (self._error and self._encoded):
            return self._count_bytes(await self._stream.read(n))
        pieces = []
        while piece := await self.readany():
            pieces.append(piece)
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if self._error:
            return self._budget.filter_error_body(body, self._encoded)
        if self._counted:
            self._budget.check_body(body)
        return body

    async def readany(self) -> bytes:
        """Return the bytes that have arrived and wait for some if there are none, as StreamReader.readany does; b"" at
        the end.

        Raises:
            RemoteError: the body is longer than allowed.
        """
        return self._count_bytes(await self._stream.readany())

    def _count_bytes(self, data: bytes) -> bytes:
        """Count received bytes against the limits of this body and of its request budget, and return them unchanged.

        Raises:
            RemoteError: the body is longer than allowed.
        """
        self._got += len(data)
        if self._counted:
            self._budget.count_bytes(len(data))
        if self._got > self._most:
            raise self._budget.too_long_error(self._most, ignored=self._ignored)
        return data


class _BoundedAnswer(aiohttp.ClientResponse):
    """An answer whose headers and body have to arrive within the limits of the question that is asked."""

    most: int | None = None
    store_watches = False  # whether the code that sends data to such a store calls `watch_upload` itself
    _progress: asyncio.TimerHandle | None = None

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        """Receive the header as ClientResponse.start does, within the time and the rules of the current request budget;
        as aiohttp itself does where there is none.

        Raises:
            Stalled: the header takes too long.
            RemoteError: the header breaks a rule of the budget.
            Unsafe: the server wants the data of an upload to be sent to another server.
        """
        budget = current_budget()
        if budget is None:
            return await super().start(connection)
        try:
            if budget.writes and not self.store_watches:
                transport = connection.transport  # None where the connection is lost
                get_progress = None if transport is None else lambda: -1 - transport.get_write_buffer_size()
                await watch_upload(super().start(connection), get_progress, budget)
            else:
                async with asyncio.timeout(None if budget.writes else budget.stall_seconds):
                    await super().start(connection)
        except TimeoutError:
            raise budget.stalled_error() from None
        if budget.writes and not self.store_watches and (location := self.headers.get("Location")):
            check_redirect(self.method, str(self.url), location)  # where gcsfs sends the data, with the credentials
        sent = self.request_info.headers
        asked = sent.get("Range", "") or sent.get("x-ms-range", "")
        most = budget.body_limit(self.method, str(self.url), asked, self.status, self.headers, self.most)
        ranged = bool(asked) and self.status < 300
        stream = self.content
        self.content = _BoundedReader(  # type: ignore[assignment]
            stream,
            budget,
            most,
            counted=not ranged,
            ignored=ranged and self.status == 200,
            error=self.status >= 300,
            encoded=is_encoded(self.headers),
        )
        self._schedule_stall_check(stream, budget)
        return self

    def _schedule_stall_check(self, stream: Any, budget: RequestBudget) -> None:
        """Schedule a check after `stall_seconds`, and again after each check that passes: a body of which fewer than
        `stall_bytes` arrived in that period ends with Stalled.

        Args:
            stream: the body, aiohttp's StreamReader.
            budget: the request budget; gives the period and the error.
        """
        if stream.is_eof():
            return
        before = stream.total_bytes

        def look() -> None:
            """End the answer if too few bytes have arrived; otherwise look again later."""
            if self.closed or stream.is_eof():
                return
            if stream.total_bytes - before < LIMITS.stall_bytes:
                stream.set_exception(budget.stalled_error())
                self.close()
                return
            budget.note_progress()
            self._schedule_stall_check(stream, budget)

        self._progress = asyncio.get_running_loop().call_later(budget.stall_seconds, look)

    def _response_eof(self) -> None:
        """Cancel the scheduled stall check at the end of the body; aiohttp calls this method."""
        if self._progress is not None:
            self._progress.cancel()
        super()._response_eof()


class _PageOfXml(_BoundedAnswer):
    """An answer of S3 or Azure."""

    most = _MOST_XML_BYTES
    store_watches = True


async def _check_request_allowed(session: object, context: object, params: aiohttp.TraceRequestStartParams) -> None:
    """Check that the current budget, if there is one, allows another request; a hook of aiohttp, before each is sent.

    Raises:
        RemoteError: the time for all requests has passed.
    """
    if (budget := current_budget()) is not None:
        budget.check_request_allowed()


async def _strip_credentials(session: object, context: object, params: aiohttp.TraceRequestRedirectParams) -> None:
    """Remove every header that may hold credentials from a request that is redirected to another server; a hook of
    aiohttp.

    Raises:
        Unsafe: the redirect is one that `check_redirect` refuses.
    """
    location = params.response.headers.get("Location") or params.response.headers.get("URI")
    if location and not check_redirect(params.method, str(params.response.url), location):
        for name in set(params.headers) - {n for n in params.headers if n.lower() in _HARMLESS}:
            params.headers.popall(name, None)


def _make_trace_configs() -> list[aiohttp.TraceConfig]:
    """Return a list of one aiohttp.TraceConfig with this module's hooks for requests and redirects."""
    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(_check_request_allowed)
    trace.on_request_redirect.append(_strip_credentials)
    return [trace]


_TRACES = _make_trace_configs()  # one object: fsspec tells file systems apart by their arguments


def session_settings() -> dict[str, object]:
    """Return keyword arguments of aiohttp.ClientSession, {name: value}, that limit the size and the duration of
    responses."""
    return {
        "response_class": _BoundedAnswer,
        "trace_configs": _TRACES,
        "auto_decompress": False,
        "headers": {"Accept-Encoding": "identity"},
        "timeout": aiohttp.ClientTimeout(total=None, sock_connect=LIMITS.stall_seconds),
    }


def xml_session_settings() -> dict[str, Any]:
    """Return keyword arguments of aiohttp.ClientSession, {name: value}, as `session_settings` does, with the smaller
    response size for stores whose listings are XML (S3, Azure)."""
    return {**session_settings(), "response_class": _PageOfXml}


@cache
def make_s3_session_class() -> type:
    """Return a subclass of aiobotocore's AIOHTTPSession, for its setting `http_session_cls`, that limits the size and
    the duration of responses."""
    from aiobotocore.httpsession import AIOHTTPSession

    class Bounded(AIOHTTPSession):  # type: ignore[misc]
        """A session whose answers are bounded."""

        async def _get_session(self, proxy_url: object) -> object:
            """Return the session of aiohttp for this proxy, with our hooks and our class of answers; a method that
            aiobotocore calls."""
            session = await super()._get_session(proxy_url)
            if session._response_class is not _PageOfXml:
                session._response_class = _PageOfXml
                session._trace_configs.extend(_TRACES)
                for trace in _TRACES:
                    trace.freeze()
            return session

    return Bounded
