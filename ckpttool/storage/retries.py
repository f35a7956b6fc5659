"""Requests to a store: which failures are tried again, what the others mean, and how they are quoted without
credentials.

Reading (remote.py) and writing (upload.py) go through here; huggingface_hub's own calls have their loop in
hub/client.py. A lost connection, a timeout, 408, 429 and 5xx are tried again (`RetryPolicy`), and longer where the
store says that it is asked too much (429, 503); nothing else is. The retries of the clients themselves are turned off,
since they would multiply with ours.
"""

from __future__ import annotations

import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

from ..errors import CkpttoolError, RemoteError
from .answer_limits import LIMITS, RequestBudget, Stalled, within_budget

__all__ = [
    "POLICY",
    "BadRange",
    "ConditionFailed",
    "Denied",
    "NotFound",
    "NotOffered",
    "RetryPolicy",
    "classify_error",
    "find_own_error",
    "redact_message",
    "with_retries",
]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often a request is tried, and how long to wait after the first try; every further wait is twice as long.

    Args:
        tries: in all.
        throttled_tries: where the store says that it is asked too much.
        first_wait_seconds: after the first try.
        most_wait_seconds: after any.
    """

    tries: int = 5
    throttled_tries: int = 10
    first_wait_seconds: float = 0.2
    most_wait_seconds: float = 8.0


#: The policy of all requests of this process.
POLICY = RetryPolicy()

# Class names of aiohttp, botocore, httpx, requests, urllib3 and http.client, which may not be installed.
_LOST = {
    "ConnectionError",
    "TimeoutError",
    "EOFError",
    "HTTPClientError",
    "ResponseStreamingError",
    "IncompleteReadError",
    "IncompleteRead",
    "ResponseParserError",
    "ClientConnectionError",
    "ClientPayloadError",
    "ServerDisconnectedError",
    "TransportError",
    "ChunkedEncodingError",
    "ProtocolError",
    "RemoteDisconnected",
}
_BUSY = {"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "OperationAborted", "Throttling"}
_THROTTLED = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "RequestTimeTooSkewed"}
_CONFLICT = {"PreconditionFailed", "ConditionalRequestConflict", "BlobAlreadyExists"}


class NotFound(RemoteError):
    """The store has no such object."""

    code = "CKPT0904"


class ConditionFailed(RemoteError):
    """The object is not in the state that a conditional request expects."""

    code = "CKPT0908"


class BadRange(RemoteError):
    """The object has no such bytes."""


class NotOffered(RemoteError):
    """The store does not know this kind of request."""


class Denied(RemoteError):
    """The store does not allow it."""

    code = "CKPT0903"


def with_retries(url: str, call: Callable[[], T], *, writes: bool = False) -> T:
    """Call a function that sends requests, again after temporary failures, and return its result. Size and duration of
    the responses are limited (answer_limits.py).

    Args:
        url: of the requests, without credentials, for messages.
        call: sends the requests; called up to `RetryPolicy.tries` times, or `throttled_tries` if the store throttles.
        writes: the requests send data, so a response may take long.

    Raises:
        RemoteError: all tries failed; or a subclass: NotFound, ConditionFailed, BadRange, NotOffered, Denied or
            Stalled.
        CkpttoolError, NotImplementedError: what `call` itself raises.
    """
    budget, stalls, outer = RequestBudget(url, writes=writes), 0, sys.exception()
    for k in range(max(POLICY.tries, POLICY.throttled_tries)):
        budget.start_try()
        try:
            with within_budget(budget):
                return call()
        except NotImplementedError:
            raise
        except Exception as e:
            ours = find_own_error(e, outer)
            if isinstance(ours, Stalled) and stalls + 1 < LIMITS.stalls:
                stalls += 1
                continue
            if ours is not None:
                raise ours from None
            kind, by = classify_error(e)
            throttled = _get_error_code(by) in _THROTTLED or _get_http_status(by) in (429, 503)
            if kind is None and k + 1 < (POLICY.throttled_tries if throttled else POLICY.tries):
                wait = min(POLICY.first_wait_seconds * 2**k, POLICY.most_wait_seconds)
                time.sleep(wait * random.uniform(0.5, 1) if throttled else wait)  # so that not all threads come again
                continue
            if kind is not None and (said := _describe_missing_on_hub(e)) is not None:
                raise (kind if kind is Denied else NotFound)(f"{url}: {said}.") from None
            error = _make_request_error(url, kind, redact_message(by), k + 1)
        raise error from None
    raise AssertionError


def _describe_missing_on_hub(e: Exception) -> str | None:
    """Return a clause that says which repository, bucket or revision the Hub lacks or hides, and what to do; None if
    the error of huggingface_hub has another cause.

    Without a token, the Hub answers 401 for a private repository and for a missing one; with a token that may not read
    it, 404 for both.
    """
    names = {c.__name__ for x in _iter_error_chain(e) for c in type(x).__mro__}
    if "GatedRepoError" in names:
        return "the repository is gated. Accept its terms on its page with the account of the token"
    if "RevisionNotFoundError" in names:
        return "the Hub has the repository, and no such revision of it. Its page lists branches and tags"
    if not names & {"RepositoryNotFoundError", "BucketNotFoundError"}:
        return None
    from huggingface_hub import get_token

    kind = "bucket" if "BucketNotFoundError" in names else "repository"
    if get_token() is None:
        return (
            f"the Hub has no such {kind}, or it is private, and there is no token. Check the name; log in with "
            "`hf auth login` or set HF_TOKEN"
        )
    return (
        f"the Hub has no such {kind}, or the token may not see it. Check the name, and whose token `hf auth whoami` "
        "names"
    )


def find_own_error(e: BaseException, outer: BaseException | None = None) -> CkpttoolError | None:
    """Return the first CkpttoolError among an exception and its causes, since clients wrap errors that are raised while
    they read a response; None if there is none.

    Args:
        e: the exception that a client raised.
        outer: the exception that was being handled when the client was called, at which the search ends; None if there
            was none.
    """
    return next(
        (x for x in takewhile(lambda x: x is not outer, _iter_error_chain(e)) if isinstance(x, CkpttoolError)), None
    )


def _make_request_error(url: str, kind: type[RemoteError] | None, text: str, tries: int) -> RemoteError:
    """Return the error to raise for a failed request.

    Args:
        url: what was asked for.
        kind: class of the error; None if all tries failed for a temporary reason.
        text: what the store or its client said, without credentials.
        tries: how often it was tried.
    """
    if kind is None:
        return RemoteError(
            f"{url}: no answer in {tries} tries ({text}). Check the network and the store, then run the same "
            "command again.",
            code="CKPT0901",
        )
    if kind is NotFound:
        return NotFound(f"{url}: the store has no such object ({text}).")
    if kind is Denied:
        return Denied(f"{url}: the store does not allow it ({text}). Check the credentials and what they may do.")
    return kind(f"{url}: {text}.")


def classify_error(e: BaseException) -> tuple[type[RemoteError] | None, BaseException]:
    """Return (class of the error to raise, the exception among `e` and its causes that decided it); the class is None
    for a failure that is temporary, so that another try may succeed.

    fsspec wraps the errors of its clients, so the chain of causes is searched.
    """
    for x in _iter_error_chain(e):
        code, status = _get_error_code(x), _get_http_status(x)
        if code in _BUSY or status in (408, 429) or ((status or 0) >= 500 and status != 501):
            return None, x
        if code in _CONFLICT or (status == 412 and code != "LeaseIdMissing"):
            return ConditionFailed, x
        if code in _EXPIRED:
            return Denied, x
        if code in ("NoSuchBucket", "ContainerNotFound", "LeaseIdMissing"):
            return RemoteError, x
        if status is not None and status >= 400:
            return {401: Denied, 403: Denied, 404: NotFound, 405: NotOffered, 416: BadRange, 501: NotOffered}.get(
                status, RemoteError
            ), x
        names = {c.__name__ for c in type(x).__mro__}
        if "OfflineModeIsEnabled" in names:  # HF_HUB_OFFLINE
            return RemoteError, x
        if "ClientAuthenticationError" in names:  # azure-identity finds no credentials
            return Denied, x
        if _LOST & names:
            return None, x
    for kind, means in ((PermissionError, Denied), (FileNotFoundError, NotFound)):
        if isinstance(e, kind):
            return means, e
    return RemoteError, e


def _iter_error_chain(e: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes, nearest first; nothing for None."""
    seen: set[int] = set()
    while e is not None and id(e) not in seen:
        seen.add(id(e))
        yield e
        e = e.__cause__ or (None if e.__suppress_context__ else e.__context__)


def _get_error_code(e: BaseException) -> str | None:
    """Return the store's error code ("NoSuchBucket") from an exception of botocore or azure-core; None if it has
    none."""
    response, code = getattr(e, "response", None), getattr(e, "error_code", None)
    if isinstance(response, dict):
        code = response.get("Error", {}).get("Code")
    return str(getattr(code, "value", code)) if code else None


def _get_http_status(e: BaseException) -> int | None:
    """Return the HTTP status in an exception of botocore, httpx, requests, aiohttp or gcsfs; None if there is none."""
    response = getattr(e, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = getattr(response, "status_code", None) or getattr(e, "status", None) or getattr(e, "code", None)
    return found if isinstance(found, int) and 100 <= found < 600 else None


def redact_message(e: BaseException) -> str:
    """Return the message of an error in one line of at most 300 characters, without anything that may be a
    credential."""
    response = getattr(e, "response", None)
    text = "it redirects for ever" if type(e).__name__ == "TooManyRedirects" else str(e)
    if isinstance(response, dict):
        error = response.get("Error", {})
        text = ": ".join(str(t) for t in (error.get("Code"), error.get("Message")) if t)
    text = " ".join(f"{text or type(e).__name__}".split())
    text = re.sub(r" RequestId:\S+ Time:\S+ ErrorCode:(\w+).*", r" (\1)", text)  # what Azure adds, among it the body
    text = text.replace(" ErrorCode:None", "")
    text = re.sub(r"(://)[^/@\s]*@", r"\1", text)
    text = re.sub(r"(https?://[^\s?'\"]*)\?[^\s'\")]*", r"\1", text)
    text = re.sub(r"(?i)((?:sig|signature|credential|token|secret|password|key|key_?id)=)[^\s&,;'\")]+", r"\1***", text)
    text = re.sub(r"(?i)\b((?:authorization|password|secret)\W{1,4}(?:bearer )?)[^\s,;'\")]+", r"\1***", text)
    for name, value in os.environ.items():
        if len(value) >= 8 and re.search(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL", name.upper()):
            text = text.replace(value, "***")
    text = re.sub(r"\b(AKIA|ASIA|hf_)[A-Za-z0-9]{12,}", "***", text)
    return text[:300].rstrip(". ")
