"""Hand parts to workers, each of which may be done twice: the loop that submits, waits, and submits again.

What fails because its worker died, or because a system call failed, is submitted again, three times in all. When
nothing is left to be submitted, what takes three times as long as the others did is given to a second worker; the first
answer counts.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from ...errors import CkpttoolError, RemoteError, Unreadable
from . import part_worker
from .executors import Workers
from .part_requests import parse_answer
from .parts import Part

__all__ = ["run_parts"]


_AT_ONCE = 64  # parts that are submitted to an engine that does not say how many workers it has
_TRIES = 3
_SLOW = 3.0  # a part is submitted once more when it takes so many times the median
_SLOW_SECONDS = 5.0


@dataclass
class _Flight:
    """A part that a worker has, or two."""

    part: Part
    began: float
    tries: int = 1
    futures: set[Future[str]] = field(default_factory=set)


def run_parts(
    parts: Sequence[Part],
    results: dict[int, dict[str, Any]],
    request: Callable[[int], str],
    workers: Workers,
    progress: Callable[[int, int], None],
    run: Callable[[str], str] = part_worker.run,
) -> int:
    """Have every part done that `results` {number: answer} has not, and add the answers.

    Returns how often a part was submitted again.

    Args:
        request: what to ask of a worker for a number.
        progress: called with (bytes done, bytes in all).
        run: what a worker calls with a request.

    Raises:
        CkpttoolError: what a worker raised, or that no worker could do a part.
    """
    total = sum(p.nbytes for p in parts)
    todo = deque(p for p in parts if p.number not in results)
    passed = total - sum(p.nbytes for p in todo)
    flights: dict[int, _Flight] = {}
    flight_of: dict[Future[str], _Flight] = {}
    seconds: list[float] = []  # of each part that is done
    submitted = 0

    def submit(flight: _Flight) -> None:
        nonlocal submitted
        submitted += 1
        future = workers.executor.submit(run, request(flight.part.number))
        flight.futures.add(future)
        flight_of[future] = flight

    try:
        progress(passed, total)
        while todo or flights:
            # keep every worker busy, and no more: a part that waits cannot be given to another
            at_once = workers.count_now() or _AT_ONCE
            while todo and len(flight_of) < at_once:
                part = todo.popleft()
                flights[part.number] = flight = _Flight(part, time.monotonic())
                submit(flight)
            for future in wait(list(flight_of), timeout=1.0, return_when=FIRST_COMPLETED).done:
                if future not in flight_of:
                    continue  # the other one of two was faster
                flight = flight_of.pop(future)
                flight.futures.discard(future)
                try:
                    results[flight.part.number] = parse_answer(future.result())
                except Exception as e:
                    if isinstance(e, CkpttoolError) and type(e) not in _PASSING:
                        raise
                    _resubmit(flight, e, submit)
                    continue
                seconds.append(time.monotonic() - flight.began)
                del flights[flight.part.number]
                for other in flight.futures:
                    other.cancel()
                    flight_of.pop(other, None)
                passed += flight.part.nbytes
                progress(passed, total)
            if not todo:
                _duplicate_slow_parts(flights, seconds, at_once - len(flight_of), submit)
    finally:
        for future in flight_of:
            future.cancel()
    return submitted - len(seconds)


#: Errors of ours after which another try may succeed: a failed system call, a store, a worker that plans something
#: else.
_PASSING = (CkpttoolError, Unreadable, RemoteError)


def _resubmit(flight: _Flight, e: Exception, submit: Callable[[_Flight], None]) -> None:
    """Submit a part that failed once more, unless another worker still has it.

    Raises:
        CkpttoolError: it failed three times.
    """
    if flight.futures:
        return
    if flight.tries == _TRIES:
        if isinstance(e, CkpttoolError):
            raise e
        raise CkpttoolError(
            f"a part was given to {_TRIES} workers, and none of them finished it: {str(e) or type(e).__name__}. What "
            "the others did is kept: run the same command again."
        ) from e
    flight.tries += 1
    flight.began = time.monotonic()
    submit(flight)


def _duplicate_slow_parts(
    flights: dict[int, _Flight], seconds: list[float], free: int, submit: Callable[[_Flight], None]
) -> None:
    """Submit parts that take much longer than the others once more, to workers that have nothing to do."""
    if not seconds:
        return
    late = time.monotonic() - max(_SLOW * statistics.median(seconds), _SLOW_SECONDS)
    for flight in sorted(flights.values(), key=lambda f: f.began):
        if free <= 0 or flight.began > late:
            return
        if flight.tries < _TRIES and len(flight.futures) < 2:
            flight.tries += 1
            submit(flight)
            free -= 1
