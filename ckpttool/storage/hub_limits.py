"""The limits of answer_limits.py for huggingface_hub, which uses httpx (httpx2 since its version 2.4).

Requests and answers pass through the hooks of its client. What arrives is watched where it is read from the socket,
since httpx has no limit of time for a whole header: its connection pool is given another network backend
(`_network_backend`, the one attribute here that httpx does not document).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import cache
from threading import get_ident
from typing import Any

from .answer_limits import LIMITS, Question, current, permit_redirect

__all__ = ["bound_hub_client"]


def bound_hub_client() -> None:
    """Have the client that huggingface_hub shares report to the question that is asked, now and whenever it is made
    again."""
    import huggingface_hub
    from huggingface_hub.utils import _http

    if _bounded(huggingface_hub.get_session()):
        return
    make = getattr(_http, "_GLOBAL_CLIENT_FACTORY", _http.default_client_factory)
    huggingface_hub.set_client_factory(lambda: _bind(make()))


def _bounded(client: Any) -> bool:
    return _answered in client.event_hooks["response"]


def _bind(client: Any) -> Any:
    hooks = client.event_hooks
    client.event_hooks = {"request": [*hooks["request"], _asked], "response": [*hooks["response"], _answered]}
    for transport in (client._transport, *client._mounts.values()):
        pool = getattr(transport, "_pool", None)
        if pool is not None:
            pool._network_backend = _Backend(pool._network_backend)
    return client


def _asked(request: Any) -> None:
    if (question := current()) is not None:
        question.request()
        request.headers["Accept-Encoding"] = "identity"


def _answered(response: Any) -> None:
    question = current()
    if question is None:
        return
    question.in_body.add(get_ident())
    request = response.request
    if response.has_redirect_location:
        permit_redirect(request.method, str(request.url), response.headers["Location"])
    link = response.links.get("next", {}).get("url", "")
    if link:  # the token goes with the request for the next page
        permit_redirect("POST", str(request.url), link)
    asked = request.headers.get("Range", "")
    downloads = question.downloads and request.method == "GET" and not asked
    most = LIMITS.download_bytes if downloads else None
    most = question.allowed(request.method, str(request.url), asked, response.status_code, response.headers, most)
    if downloads and response.status_code < 300:
        most = LIMITS.download_bytes
    ranged = bool(asked) and response.status_code < 300
    stream_class = _body_class(sys.modules[type(response).__module__.partition(".")[0]].SyncByteStream)
    response.stream = stream_class(
        response.stream, question, most, counted=not (ranged or downloads), ignored=response.status_code == 200
    )


@cache
def _body_class(base: type) -> Any:
    """`_Body` as httpx wants it: of its own class."""
    return type("Body", (_Body, base), {})


class _Body:
    """The body of an answer, as httpx's SyncByteStream, which ends with an error where more than `most` bytes
    arrive."""

    def __init__(self, stream: Any, question: Question, most: int, *, counted: bool, ignored: bool) -> None:
        self._stream, self._question, self._most, self._counted, self._ignored = (
            stream,
            question,
            most,
            counted,
            ignored,
        )

    def __iter__(self) -> Iterator[bytes]:
        got, whole = 0, bytearray()
        for data in self._stream:
            got += len(data)
            if self._counted:
                self._question.read(len(data))
            if got > self._most:
                raise self._question.too_long(self._most, ignored=self._ignored and not self._counted)
            if self._counted:
                whole += data
            yield data
        self._question.check_body(bytes(whole))

    def close(self) -> None:
        self._stream.close()


class _Backend:
    """httpcore's network backend, whose streams are watched."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def connect_tcp(self, *args: Any, timeout: float | None = None, **how: Any) -> Any:
        """As the backend's."""
        question = current()
        if question is not None:
            timeout = min(timeout or question.stall_seconds, question.stall_seconds)
        return _Stream(self._backend.connect_tcp(*args, timeout=timeout, **how))


class _Stream:
    """httpcore's network stream: waiting for an answer ends when too few bytes arrive in too long a time."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._waited, self._got, self._sent = 0.0, 0, time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def start_tls(self, *args: Any, **how: Any) -> Any:
        """As the stream's."""
        return _Stream(self._stream.start_tls(*args, **how))

    def write(self, *args: Any, **how: Any) -> None:
        """As the stream's."""
        question = current()
        if question is not None:
            how["timeout"] = question.stall_seconds
            question.in_body.discard(get_ident())
        self._stream.write(*args, **how)
        self._waited, self._got, self._sent = 0.0, 0, time.monotonic()

    def read(self, most: int, timeout: float | None = None) -> bytes:
        """As the stream's."""
        question = current()
        if question is None:
            data: bytes = self._stream.read(most, timeout=timeout)
            return data
        left = max(0.001, question.stall_seconds - self._waited)
        began = time.monotonic()
        try:
            data = self._stream.read(most, timeout=left)
        except Exception as e:
            if type(e).__name__ == "ReadTimeout":
                raise question.stalled() from None
            raise
        now = time.monotonic()
        self._waited += now - began
        self._got += len(data)
        if get_ident() not in question.in_body and now - self._sent >= question.stall_seconds:
            raise question.stalled()  # headers, of however many answers that are none (status 100 to 199)
        if self._got >= LIMITS.stall_bytes:
            question.progress()
            self._waited, self._got = 0.0, 0
        elif self._waited >= question.stall_seconds and data:
            raise question.stalled()
        return data
