"""Prefetches byte ranges of remote objects that were announced, many with one request or several requests at a time."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..errors import CkpttoolError
from .answer_limits import Stalled

__all__ = ["FetchSizes", "Prefetcher"]


@dataclass(frozen=True, kw_only=True)
class FetchSizes:
    """How bytes are requested from a store.

    Args:
        request_bytes: the most that one request asks for, and so what a lost connection costs at most.
        gap_bytes: up to this many unwanted bytes are fetched rather than with another request.
        threads: requests at the same time.
        range_bytes: announced ranges that are longer are not prefetched.
        batch_ranges: announced ranges that are fetched together.
        lookahead_ranges: announced ranges among which one that is read is looked for.
        kept_bytes: memory for ranges that were fetched and not read yet.
    """

    request_bytes: int = 8 << 20
    gap_bytes: int = 64 << 10
    threads: int = 16
    range_bytes: int = 1 << 20
    batch_ranges: int = 256
    lookahead_ranges: int = 4096
    kept_bytes: int = 32 << 20


class Prefetcher:
    """Fetches announced ranges many at a time, and keeps them until others need the memory."""

    def __init__(self, fetch: Callable[[str, int, int], bytes], sizes: FetchSizes) -> None:
        self._fetch, self._sizes = fetch, sizes
        self._coming: list[tuple[deque[tuple[str, int, int]], Iterator[tuple[str, int, int]]]] = []
        self._kept: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._starts: dict[str, list[int]] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def prefetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Announce ranges (name, offset, length) that will soon be read, in about this order; ranges announced by a
        later call are looked at first. No request is sent yet."""
        with self._lock:
            self._coming.append((deque(), iter(ranges)))

    def take(self, name: str, offset: int, n: int) -> bytes | memoryview | None:
        """Return the `n` bytes of an object from `offset` on if they are within an announced range; None if they are
        not, are more than `range_bytes`, or could not be fetched. The first read of an announced range fetches many of
        the ranges after it as well.

        Raises:
            Stalled: the server makes no progress.
        """
        if n > self._sizes.range_bytes:
            return None  # what `stream.Reader` reads in many threads does not wait for each other here
        with self._lock:
            found = self._find_kept(name, offset, n)
            if found is None and self._coming and self._fetch_around(name, offset, n):
                found = self._find_kept(name, offset, n)
            return found

    def _find_kept(self, name: str, offset: int, n: int) -> memoryview | None:
        """Return the `n` bytes of an object from `offset` on, if all of them were fetched and are still kept; otherwise
        None."""
        starts = self._starts.get(name, [])
        i = bisect_right(starts, offset) - 1
        if i < 0:
            return None
        data = self._kept[name, starts[i]]
        return (
            memoryview(data)[offset - starts[i] : offset - starts[i] + n]
            if offset + n <= starts[i] + len(data)
            else None
        )

    def _fetch_around(self, name: str, offset: int, n: int) -> bool:
        """Fetch the announced range that contains the `n` bytes of an object from `offset` on, with the ranges
        announced after it, and forget those announced before it. Return False if no announced range contains them."""
        for k in range(len(self._coming) - 1, -1, -1):
            waiting, more = self._coming[k]
            waiting.extend(islice(more, self._sizes.lookahead_ranges - len(waiting)))
            if not waiting:
                del self._coming[k]
                continue
            for i, (other, start, length) in enumerate(waiting):
                if other == name and start <= offset and offset + n <= start + length:
                    for _ in range(i):
                        waiting.popleft()
                    self._fetch_next(waiting)
                    return True
        return False

    def _fetch_next(self, waiting: deque[tuple[str, int, int]]) -> None:
        """Fetch the next batch of announced ranges, and remove them from `waiting`: ranges that are near each other
        with one request, many requests at a time."""
        batch: list[tuple[str, int, int]] = []
        room = self._sizes.kept_bytes // 4
        while waiting and len(batch) < self._sizes.batch_ranges and (not batch or waiting[0][2] <= room):
            room -= waiting[0][2]
            batch.append(waiting.popleft())
        spans: list[list[Any]] = []
        for name, start, length in sorted(set(batch)):
            if (
                spans
                and spans[-1][0] == name
                and start - spans[-1][2] <= self._sizes.gap_bytes
                and start + length - spans[-1][1] <= self._sizes.request_bytes
            ):
                spans[-1][2] = max(spans[-1][2], start + length)
            else:
                spans.append([name, start, start + length])
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(self._sizes.threads, len(spans)), "ckpttool-fetch") as pool:
            for span, data in zip(spans, pool.map(self._fetch_or_empty, spans), strict=True):
                if data:
                    self._store(span[0], span[1], data)

    def _fetch_or_empty(self, span: list[Any]) -> bytes:
        """Return the bytes of a span [name, start, end]; b"" after an error, which the read itself meets again and
        reports.

        Raises:
            Stalled: the server makes no progress.
        """
        try:
            return self._fetch(span[0], span[1], span[2] - span[1])
        except Stalled:
            raise  # to ask again would take as long again
        except CkpttoolError:
            return b""  # the read itself requests it again, and reports the error

    def _store(self, name: str, start: int, data: bytes) -> None:
        """Keep the bytes of an object that were fetched from `start` on, and drop the oldest ones beyond
        `kept_bytes`."""
        if (name, start) in self._kept:
            if len(self._kept[name, start]) >= len(data):
                return
            self._bytes -= len(self._kept.pop((name, start)))
        else:
            insort(self._starts.setdefault(name, []), start)
        self._kept[name, start] = data
        self._bytes += len(data)
        while self._bytes > self._sizes.kept_bytes:
            (old, at), gone = self._kept.popitem(last=False)
            self._starts[old].remove(at)
            self._bytes -= len(gone)
