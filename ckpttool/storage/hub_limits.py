"""The limits of answer_limits.py for huggingface_hub, which uses httpx (httpx2 since its version 2.4).

Requests and answers pass through the hooks of its client. What arrives is watched where it is read from the socket,
since httpx has no limit of time for a whole header: its connection pool is given another network backend
(`_network_backend`, the one attribute here that httpx does not document).
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock, get_ident
from typing import Any

from ..bounded_json import parse
from ..errors import Corrupt, RemoteError, Unsafe
from .answer_limits import LIMITS, RequestBudget, check_redirect, current_budget, get_origin, is_encoded

__all__ = ["bound_hub_client", "disabled_xet", "get_commit_hash", "make_hub_answer_error"]

#: A key in the extensions of a request, and of those that it is redirected to: whether it asks the Hub's API, not for a
#: file.
_ASKS_API = "ckpttool_asks_api"
#: What may be the name of a file in huggingface_hub's cache, which drops a W at the beginning of an ETag.
_PLAIN = re.compile(r'W*[^W./\\"][^/\\"]{0,127}')

_xet_lock = Lock()
_without_xet: list[bool] = []  # HF_HUB_DISABLE_XET as it was, once for each block of `disabled_xet` that runs


def bound_hub_client() -> None:
    """Make huggingface_hub's shared HTTP client report its requests and responses to the current `RequestBudget`;
    clients that huggingface_hub creates later do the same."""
    import huggingface_hub
    from huggingface_hub.utils import _http

    if _after_response in huggingface_hub.get_session().event_hooks["response"]:  # it is bounded already
        return
    make = getattr(_http, "_GLOBAL_CLIENT_FACTORY", _http.default_client_factory)
    huggingface_hub.set_client_factory(lambda: _bound_client(make()))


def _bound_client(client: Any) -> Any:
    """Add the hooks of this module to an httpx client, and wrap the network backends of its connection pools; return
    the client."""
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks["request"], _before_request],
        "response": [*hooks["response"], _after_response],
    }
    for transport in (client._transport, *client._mounts.values()):
        pool = getattr(transport, "_pool", None)
        if pool is not None:
            pool._network_backend = _WatchedBackend(pool._network_backend)
    return client


@contextmanager
def disabled_xet() -> Iterator[None]:
    """Keep huggingface_hub from using Xet while the block runs, or such a block of another thread. Xet has a client of
    its own, without our limits, and with it huggingface_hub takes names of files from listings, and the address that
    gets the token from a header."""
    from huggingface_hub import constants

    with _xet_lock:
        _without_xet.append(_without_xet[0] if _without_xet else constants.HF_HUB_DISABLE_XET)
        constants.HF_HUB_DISABLE_XET = True
    try:
        yield
    finally:
        with _xet_lock:
            before = _without_xet.pop()
            if not _without_xet:
                constants.HF_HUB_DISABLE_XET = before


def _before_request(request: Any) -> None:
    """Check a request against the current budget, if there is one, before it is sent, and ask for an unencoded
    response; a hook of httpx. A request to another server than the Hub, such as one to a signed URL, gets no
    credentials.

    Raises:
        RemoteError: the time for all requests has passed.
        Unsafe: the Hub has an address with https, and names one without.
    """
    if (budget := current_budget()) is None:
        return
    budget.check_request_allowed()
    request.headers["Accept-Encoding"] = "identity"
    from huggingface_hub import constants

    hub, to = (get_origin(str(url)) for url in (constants.ENDPOINT, request.url))
    if hub[0] == "https" and to[0] != "https":
        raise Unsafe(
            f"{budget.url}: the Hub names an address with {to[0][:20]}://, where anybody could read and change what is "
            "sent. Check HF_ENDPOINT.",
            code="CKPT0706",
        )
    if hub != to:
        for name in ("Authorization", "Cookie"):
            request.headers.pop(name, None)
    request.extensions.setdefault(_ASKS_API, _is_api_path(request.url.path))


def _is_api_path(path: str) -> bool:
    """Return whether a path of a URL, unquoted, is that of the Hub's API, and not of a file."""
    return "/api/models/" in path and "/resolve/" not in path


def make_hub_answer_error(url: str, told: object, wanted: str) -> RemoteError:
    """Return the error for a value in an answer of the Hub that is not what it must be; it is not raised.

    Args:
        url: what the Hub was asked about.
        told: the value.
        wanted: what should be there.
    """
    return RemoteError(
        f"{url}: the Hub says {str(told)[:80]!r} where {wanted} should be. Check HF_ENDPOINT.", code="CKPT0906"
    )


def get_commit_hash(told: object, url: str) -> str:
    """Return a commit, in hex.

    Args:
        told: what the Hub calls the commit of a revision.
        url: of the repository, for messages.

    Raises:
        RemoteError: that is no commit.
    """
    if not isinstance(told, str) or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", told):
        raise make_hub_answer_error(url, told, "the commit of a revision")
    return told


def _check_cache_names(response: Any, url: str) -> None:
    """Check the headers of an answer about a file, of which huggingface_hub makes names of files and folders in its
    cache. As there, the ETag of what an answer redirects to comes before that of the answer, and counts for HEAD alone;
    of an error only the commit does. Other ETags may be anything: those of errors and of the API are base64, in which
    "/" is a digit.

    Args:
        response: of httpx.
        url: of the repository, for messages.

    Raises:
        RemoteError: the ETag is not a plain name, or the commit is none.
    """
    headers = response.headers
    if (commit := headers.get("X-Repo-Commit")) is not None:
        get_commit_hash(commit, url)
    told = headers.get("X-Linked-ETag") or headers.get("ETag")
    if told is not None and response.request.method == "HEAD" and response.status_code < 400:
        name = told.removeprefix("W/").strip('"')
        if not (name.isascii() and name.isprintable() and _PLAIN.fullmatch(name)):
            raise make_hub_answer_error(url, told, "an ETag that can name a file")


def _after_response(response: Any) -> None:
    """Check the headers of a response and limit its body, if a request budget is in effect; a hook of httpx.

    Raises:
        RemoteError: the headers break a rule of the budget, or name a path where huggingface_hub expects a hash; the
            next page of a listing is none of the API.
        Unsafe: a redirect, or the link to the next page, is one that `check_redirect` refuses.
    """
    budget = current_budget()
    if budget is None:
        return
    budget.in_body.add(get_ident())
    request = response.request
    if response.has_redirect_location:
        check_redirect(request.method, str(request.url), response.headers["Location"])
    link = response.links.get("next", {}).get("url", "")
    if link:  # the token goes with the request for the next page
        check_redirect("POST", str(request.url), link)
    asks_api = budget.downloads and request.extensions.get(_ASKS_API, False)
    if link and asks_api and not _is_api_path(request.url.join(link).path):  # it would be read as a file
        raise make_hub_answer_error(budget.url, link, "the address of the next page of a listing")
    error = response.status_code >= 300
    if budget.downloads and not asks_api:
        _check_cache_names(response, budget.url)
    asked = request.headers.get("Range", "")
    downloads = budget.downloads and request.method == "GET" and not asked and not asks_api
    most = LIMITS.download_bytes if downloads else None
    most = budget.body_limit(request.method, str(request.url), asked, response.status_code, response.headers, most)
    if downloads and not error:
        most = LIMITS.download_bytes
    encoded = error and is_encoded(response.headers)
    if encoded:
        del response.headers["Content-Encoding"]  # so that httpx unpacks nothing
    stream_class = _make_body_class(sys.modules[type(response).__module__.partition(".")[0]].SyncByteStream)
    response.stream = stream_class(
        response.stream,
        budget,
        most,
        counted=error or not (asked or downloads),
        ignored=response.status_code == 200,
        names_commit=asks_api and not error,
        error=error,
        encoded=encoded,
    )


@cache
def _make_body_class(base: type) -> Any:
    """Return a class that is both `_BoundedBody` and `base`, the SyncByteStream of httpx or httpx2, which these require
    of a body."""
    return type("Body", (_BoundedBody, base), {})


class _BoundedBody:
    """The body of an answer, as httpx's SyncByteStream, which ends with an error where more than `most` bytes
    arrive."""

    def __init__(
        self,
        stream: Any,
        budget: RequestBudget,
        most: int,
        *,
        counted: bool,
        ignored: bool,
        names_commit: bool,
        error: bool,
        encoded: bool,
    ) -> None:
        """Wrap the body of a response.

        Args:
            stream: the body, an iterable of bytes with `close`.
            budget: the request budget of the response; gives the errors.
            most: bytes that the body may have.
            counted: whether the bytes count against the budget: not those of ranges and downloads, unless it is an
                error.
            ignored: whether the response has status 200: the whole object, even if a range of it was asked for.
            names_commit: whether the body is JSON that may name the commit of a download, which is checked.
            error: whether the response is an error or a redirect, whose body is filtered (`filter_error_body`).
            encoded: whether that has a content encoding.
        """
        self._stream, self._budget, self._most, self._counted, self._ignored = (
            stream,
            budget,
            most,
            counted,
            ignored,
        )
        self._names_commit, self._error, self._encoded = names_commit, error, encoded

    def __iter__(self) -> Iterator[bytes]:
        """Yield the pieces of the body, as bytes; that of an error in one piece, if at all.

        Raises:
            RemoteError: the body is longer than allowed, would fill the memory once it is parsed, or names a path as
                the commit of a download.
        """
        got, whole = 0, bytearray()
        for data in self._stream:
            got += len(data)
            if self._counted:
                self._budget.count_bytes(len(data))
            if got > self._most:
                raise self._budget.too_long_error(self._most, ignored=self._ignored and not self._counted)
            if self._counted:
                whole += data
            if not self._error:
                yield data
        body = bytes(whole)
        if self._error:
            yield self._budget.filter_error_body(body, self._encoded)
            return
        self._budget.check_body(body)
        if self._names_commit:
            try:
                found = parse(body, "the Hub's answer")
            except (Corrupt, Unsafe) as e:
                raise RemoteError(f"{self._budget.url}: {e} Check HF_ENDPOINT.", code="CKPT0906") from None
            if isinstance(found, dict) and "sha" in found:
                get_commit_hash(found["sha"], self._budget.url)

    def close(self) -> None:
        """Close the wrapped stream."""
        self._stream.close()


class _WatchedBackend:
    """httpcore's network backend, whose streams are watched."""

    def __init__(self, backend: Any) -> None:
        """Wrap `backend`, a network backend of httpcore."""
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped backend's attribute of that name, for all that this class does not define."""
        return getattr(self._backend, name)

    def connect_tcp(self, *args: Any, timeout: float | None = None, **how: object) -> object:
        """Connect as the wrapped backend does, within `stall_seconds`, and return a watched stream; `args` and `how`
        are the backend's."""
        budget = current_budget()
        if budget is not None:
            timeout = min(timeout or budget.stall_seconds, budget.stall_seconds)
        return _WatchedStream(self._backend.connect_tcp(*args, timeout=timeout, **how))


class _WatchedStream:
    """httpcore's network stream: waiting for an answer ends when too few bytes arrive in too long a time."""

    def __init__(self, stream: Any) -> None:
        """Wrap `stream`, a network stream of httpcore, and begin to measure the wait for a response."""
        self._stream = stream
        self._waited, self._got, self._sent = 0.0, 0, time.monotonic()

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped stream's attribute of that name, for all that this class does not define."""
        return getattr(self._stream, name)

    def start_tls(self, *args: Any, **how: object) -> object:
        """Start TLS as the wrapped stream does, with its arguments, within `stall_seconds`, and return a watched
        stream."""
        budget = current_budget()
        if budget is not None:
            timeout = how.get("timeout")
            most = budget.stall_seconds
            how["timeout"] = min(timeout, most) if isinstance(timeout, int | float) else most
        return _WatchedStream(self._stream.start_tls(*args, **how))

    def write(self, *args: Any, **how: object) -> None:
        """Write as the wrapped stream does, with the same arguments, and restart the measured wait for a response."""
        budget = current_budget()
        if budget is not None:
            how["timeout"] = budget.stall_seconds
            budget.in_body.discard(get_ident())
        self._stream.write(*args, **how)
        self._waited, self._got, self._sent = 0.0, 0, time.monotonic()

    def read(self, most: int, timeout: float | None = None) -> bytes:
        """Read up to `most` bytes as the wrapped stream does; `timeout`, in seconds, counts only where no request
        budget is in effect.

        Raises:
            Stalled: too few bytes have arrived in `stall_seconds`.
        """
        budget = current_budget()
        if budget is None:
            data: bytes = self._stream.read(most, timeout=timeout)
            return data
        left = max(0.001, budget.stall_seconds - self._waited)
        began = time.monotonic()
        try:
            data = self._stream.read(most, timeout=left)
        except Exception as e:
            if type(e).__name__ == "ReadTimeout":
                raise budget.stalled_error() from None
            raise
        now = time.monotonic()
        self._waited += now - began
        self._got += len(data)
        if get_ident() not in budget.in_body and now - self._sent >= budget.stall_seconds:
            raise budget.stalled_error()  # headers, of however many answers that are none (status 100 to 199)
        if self._got >= LIMITS.stall_bytes:
            budget.note_progress()
            self._waited, self._got = 0.0, 0
        elif self._waited >= budget.stall_seconds and data:
            raise budget.stalled_error()
        return data
