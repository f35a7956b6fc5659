"""How much of a server's answer is read, and how long it is waited for: one set of limits for S3, GCS, Azure, HTTP and
the Hub.

A `RequestBudget` is for one question that we ask a server: all tries of with_retries, or a page of a listing, with the
requests that a client makes of it. The transports (aiohttp_limits.py, hub_limits.py) report every request and every
answer to the budget they are made under, and read no more than it allows. Outside of a budget they do nothing, so a
program that uses the same clients keeps its own rules.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urljoin, urlsplit
from xml.parsers import expat

from ..bounded_json import refuse_bomb
from ..errors import RemoteError, Unsafe

__all__ = [
    "LIMITS",
    "Limits",
    "RequestBudget",
    "Stalled",
    "check_redirect",
    "current_budget",
    "get_origin",
    "is_encoded",
    "watch_upload",
    "within_budget",
    "within_budget_in_all_threads",
]


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """
    Args:
        stall_seconds: headers arrive within this time, and then `stall_bytes` of the body, or its end, in every such
            period.
        stall_bytes: fewer bytes in a period are no progress.
        stalls: tries of one question that may stall.
        write_seconds: the same period where something was sent: a store checks and joins it before it answers.
        question_seconds: no request of a question is sent later than this after the first, or after the last progress
            of a body.
        wait_seconds: waits that the Hub may ask for when it limits requests, in all of one question.
        answer_bytes: an answer to a request that names no range, such as a page of a listing.
        question_bytes: all such answers to one question.
        download_bytes: a whole file that huggingface_hub downloads (config and tokenizer files).
        error_bytes: an answer that is an error or a redirect.
        answers: answers to one question, and pages of one listing.
        names: names in one listing.
    """

    stall_seconds: float = 15.0
    stall_bytes: int = 16 << 10
    stalls: int = 2
    write_seconds: float = 300.0
    question_seconds: float = 60.0
    wait_seconds: float = 310.0
    answer_bytes: int = 6 << 20
    question_bytes: int = 16 << 20
    download_bytes: int = 256 << 20
    error_bytes: int = 64 << 10
    answers: int = 1000
    names: int = 100_000


#: The limits of all requests of this process.
LIMITS = Limits()


class Stalled(RemoteError):
    """A server makes no progress with its answer."""

    code = "CKPT0901"


class RequestBudget:
    """How much may be read, and how long waited, for one question to the server of `url`.

    Raises (all methods):
        RemoteError: the answer is beyond the limits; with why. Stalled: it makes no progress.
    """

    def __init__(self, url: str, *, writes: bool = False, downloads: bool = False) -> None:
        self.url, self.writes, self.downloads = url, writes, downloads
        self._until = time.monotonic() + LIMITS.question_seconds
        self._waits = LIMITS.wait_seconds
        self.in_body: set[int] = set()  # threads that have a whole header, where threads read
        self.start_try()

    def start_try(self) -> None:
        """Reset what is counted for one try of the question; to be called before its first request."""
        self._asked: dict[str, int] = {}
        self._left = LIMITS.question_bytes
        self._stalled = False

    @property
    def stall_seconds(self) -> float:
        """Return after how many seconds without progress a response has stalled: `write_seconds` if the question sends
        data, otherwise `stall_seconds` of `LIMITS`."""
        return LIMITS.write_seconds if self.writes else LIMITS.stall_seconds

    def check_request_allowed(self) -> None:
        """Check that the budget allows another request; to be called before each is sent.

        Raises:
            RemoteError: the time for all requests of this question has passed.
            Stalled: a response of this try has stalled already.
        """
        if self._stalled:  # clients ask again in other words
            raise self.stalled_error()
        if not self.writes and time.monotonic() > self._until:
            raise RemoteError(
                f"{self.url}: the server has not given a whole answer in {LIMITS.question_seconds:.0f} seconds. Check "
                "the network and the server, then run the same command again.",
                code="CKPT0901",
            )

    def note_progress(self) -> None:
        """Move the deadline for further requests to at least `question_seconds` from now; called when bytes of a body
        arrive."""
        self._until = max(self._until, time.monotonic() + LIMITS.question_seconds)

    def stalled_error(self) -> Stalled:
        """Return the error for an answer without progress, and refuse further requests of this try; it is not
        raised."""
        self._stalled = True
        return Stalled(
            f"{self.url}: the server makes no progress: in {self.stall_seconds:g} seconds it sent neither a whole "
            f"header nor {LIMITS.stall_bytes >> 10} KiB. Check the network and the server, then run the same command "
            "again."
        )

    def body_limit(
        self, method: str, url: str, asked: str, status: int, headers: Mapping[str, str], most: int | None = None
    ) -> int:
        """Check the header of an answer, and return how many bytes of its body may be read.

        Args:
            method: of the request: "GET", "HEAD", ...
            url: of the request.
            asked: the Range header of the request, or "".
            status: of the answer: 200, ...
            headers: of the answer; keys in any case.
            most: a smaller limit than `answer_bytes`, in bytes; None for that one.

        Raises:
            RemoteError: the server asks to wait too long, sends an encoding or a range that was not asked for, or lists
                without an end. (An error or a redirect may have an encoding, see `filter_error_body`.)
        """
        if status >= 300:
            self._allow_wait(status, headers)
            return LIMITS.error_bytes
        if is_encoded(headers):
            coding = headers["Content-Encoding"].strip().lower()
            raise RemoteError(
                f"{self.url}: the server sends it with the content encoding {coding[:40]!r}, which was not asked for. "
                "Turn the encoding off there, or download the file.",
                code="CKPT0906",
            )
        if found := re.fullmatch(r"bytes=(\d+)-(\d+)", asked):
            first, n = int(found[1]), int(found[2]) - int(found[1]) + 1
            sent = headers.get("Content-Range", "")
            if status == 206 and not sent.replace(" ", "").startswith(f"bytes{first}-"):
                raise RemoteError(
                    f"{self.url}: requested bytes from {first} on, but the server sent {sent[:80] or 'others'!r}. A "
                    "proxy or cache may be broken; download the file by other means.",
                    code="CKPT0906",
                )
            length = headers.get("Content-Length", "")
            if method != "HEAD" and length.isdecimal() and int(length[:20]) > n:
                raise self.too_long_error(n, ignored=status == 200)
            return n
        if method == "GET":
            self._asked[url] = again = self._asked.get(url, 0) + 1
            if again > 2 or len(self._asked) > LIMITS.answers:
                raise RemoteError(
                    f"{self.url}: the server's listing has no end: {again if again > 2 else LIMITS.answers} answers, "
                    "and every one names another page. Check the server.",
                    code="CKPT0906",
                )
        return min(most or LIMITS.answer_bytes, self._left)

    def count_bytes(self, n: int) -> None:
        """Subtract `n` bytes, read from a response without a range, from the bytes that this try may still read."""
        self._left = max(0, self._left - n)

    def check_body(self, body: bytes) -> None:
        """Refuse the complete body of a response without a range if parsing it as JSON or, from S3 and Azure, as XML
        would take too much memory.

        Raises:
            RemoteError: it would.
        """
        try:
            refuse_bomb(body, "the server's answer")
            if self.url.startswith(("s3://", "az://", "abfs://", "abfss://")):
                _refuse_xml_bomb(body)
        except Unsafe as e:
            found = str(e).partition(". ")[0]
            raise RemoteError(
                f"{self.url}: {found}. Check the address, the server and the proxy.", code="CKPT0906"
            ) from None

    def filter_error_body(self, body: bytes, encoded: bool) -> bytes:
        """Return the complete body of an error or a redirect for the client; b"" in its place if it is encoded or
        `check_body` refuses it, so that the client goes by the status alone.

        Args:
            body: as it arrived.
            encoded: whether the response has a content encoding.
        """
        if encoded:
            return b""
        try:
            self.check_body(body)
        except RemoteError:
            return b""
        return body

    def _allow_wait(self, status: int, headers: Mapping[str, str]) -> None:
        """Extend the deadline by the wait that a server demands (headers Retry-After and RateLimit of an error
        response).

        Args:
            status: HTTP status of the response.
            headers: of the response; keys in any case.

        Raises:
            RemoteError: the wait is longer than what is left of `wait_seconds`.
        """
        waits = re.findall(r"^\s*(\d+)\s*$", headers.get("Retry-After", "")) + re.findall(
            r"\bt\s*=\s*(\d+)", headers.get("RateLimit", "")
        )
        wait = max((int(w.lstrip("0")[:12] or 0) for w in waits), default=0) if status >= 400 else 0
        if wait > self._waits:
            raise RemoteError(
                f"{self.url}: the server limits requests (status {status}) and wants us to wait {wait:,} seconds. Run "
                "the same command again later.",
                code="CKPT0902",
            )
        self._waits -= wait
        self._until += wait

    def too_long_error(self, most: int, *, ignored: bool = False) -> RemoteError:
        """Return the error for a body that is too long.

        Args:
            most: bytes that were allowed.
            ignored: the server sends the whole object, although a range of it was asked for.
        """
        if ignored:
            return RemoteError(
                f"{self.url}: the server ignores Range requests and sends the whole object. Download the file.",
                code="CKPT0906",
            )
        return RemoteError(
            f"{self.url}: the server sends more than the {most:,} bytes that an answer to this request may have. Check "
            "the server, or download the file by other means.",
            code="CKPT0906",
        )


#: How deep XML of S3 is nested at most: a listing has four levels.
_XML_DEPTH = 32


def _refuse_xml_bomb(body: bytes) -> None:
    """Refuse XML that takes far more memory in its reader than it has bytes: nested deeply, each open element taking
    400 bytes, or with a DTD, whose entities stand for more XML. What is not XML is for the reader to refuse.

    Raises:
        Unsafe: elements are nested deeper than in any answer of S3, or there is a DTD.
    """
    depth = 0

    def declared(*_: object) -> None:
        raise Unsafe("the server's answer has XML with a DTD, which no store sends", code="CKPT0704")

    def opened(name: str, attributes: Mapping[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > _XML_DEPTH:
            raise Unsafe(f"the server's answer has XML nested deeper than {_XML_DEPTH} levels", code="CKPT0704")

    def closed(name: str) -> None:
        nonlocal depth
        depth -= 1

    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = declared
    parser.StartElementHandler, parser.EndElementHandler = opened, closed
    with suppress(expat.ExpatError):
        parser.Parse(body, True)


_CURRENT: ContextVar[RequestBudget | None] = ContextVar("ckpttool question", default=None)
_everywhere: list[RequestBudget] = []


def current_budget() -> RequestBudget | None:
    """Return the request budget in effect: that of the current thread or task, else the innermost of
    `within_budget_in_all_threads`; None if there is neither."""
    return _CURRENT.get() or (_everywhere[-1] if _everywhere else None)


@contextmanager
def within_budget(budget: RequestBudget) -> Iterator[RequestBudget]:
    """Apply a request budget, while the block runs, to all requests of the current thread and of the coroutines that it
    runs in an event loop; yield the budget."""
    token = _CURRENT.set(budget)
    try:
        yield budget
    finally:
        _CURRENT.reset(token)


@contextmanager
def within_budget_in_all_threads(budget: RequestBudget) -> Iterator[RequestBudget]:
    """Apply a request budget, while the block runs, to all requests of the current thread and of every thread without a
    budget of its own; yield the budget. For huggingface_hub, which uploads and downloads in threads."""
    _everywhere.append(budget)
    try:
        with within_budget(budget):
            yield budget
    finally:
        _everywhere.remove(budget)


def is_encoded(headers: Mapping[str, str]) -> bool:
    """Return whether the headers of an answer name a content encoding, so that its body would have to be unpacked."""
    # the last is a word that some stores keep from an upload
    return headers.get("Content-Encoding", "").strip().lower() not in ("", "identity", "aws-chunked")


async def watch_upload(asked: Awaitable[T], get_progress: Callable[[], int] | None, budget: RequestBudget) -> T:
    """Await a request that sends data and return its result; cancel it after a period in which no byte of its body was
    sent and no response came, and where this call itself is cancelled.

    Args:
        asked: the request, not yet awaited.
        get_progress: returns a number that changes while the body is sent, such as the position in a file. -1 at the
            end of the first period ends the wait: nothing was sent yet, or nothing is left to send. None if progress
            cannot be seen, so that one period must suffice.
        budget: gives the length of the period.

    Raises:
        Stalled: nothing was sent in a period.
    """
    import asyncio

    task, before = asyncio.ensure_future(asked), -1
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=budget.stall_seconds)
            if done:
                return task.result()
            now = get_progress() if get_progress is not None else -1
            if now == before:
                raise budget.stalled_error()
            before = now
    finally:
        task.cancel()


def get_origin(url: str) -> tuple[str, str | None, int | None]:
    """Return (scheme, host, port) of a URL; a port that it does not name is that of the scheme. Raises ValueError if
    it is no URL."""
    at = urlsplit(url)
    return at.scheme, at.hostname, {"http": 80, "https": 443}.get(at.scheme) if at.port is None else at.port


def check_redirect(method: str, at: str, location: str) -> bool:
    """Return whether a redirect stays on the same server (scheme, host and port).

    Args:
        method: of the request: "GET", ...
        at: URL of the request.
        location: where the server redirects to, absolute or relative.

    Raises:
        Unsafe: it leads from https to something else, would send data elsewhere, or is no URL.
    """
    here = urlsplit(at)
    try:
        there = urlsplit(urljoin(at, location))
        same = get_origin(at) == get_origin(there.geturl())
    except ValueError:
        raise Unsafe(
            f"{here.scheme}://{here.hostname}: the server redirects to what is no URL.", code="CKPT0706"
        ) from None
    if there.scheme not in ("http", "https") or (here.scheme == "https" and there.scheme != "https"):
        raise Unsafe(
            f"{here.scheme}://{here.hostname}: the server redirects to {there.scheme[:20]}://, where anybody could "
            "read and change what is sent. Use the URL that it redirects to, if you trust it.",
            code="CKPT0706",
        )
    if not same and method not in ("GET", "HEAD"):
        raise Unsafe(
            f"{here.scheme}://{here.hostname}: the server wants what is sent to it to be sent to {there.hostname}. Use "
            "the URL of that server, if you trust it.",
            code="CKPT0706",
        )
    return same
