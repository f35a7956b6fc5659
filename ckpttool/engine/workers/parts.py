"""Parts of a draft: runs of consecutive tensors, each of which any worker can fill by itself, and the loop that has
them done.

A draft lists its tensors so that every file is written front to back (index/draft.py). A run of them is therefore one
range of bytes in each file that it touches, and the next run begins where it ends. The cut depends on the draft alone,
so the bytes, the digests and the plan are the same for one worker and for a thousand. A tensor is never cut: its digest
is a BLAKE3 of all its bytes, in order.

Each part may be done twice (`run_parts`). What fails because its worker died, or because a system call failed, is
submitted again, three times in all. When nothing is left to be submitted, what takes three times as long as the others
did is given to another worker, twice if need be; the first answer counts.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import NamedTuple

from ...errors import CkpttoolError, RemoteError, Unreadable
from ...index.checkpoint import TensorEntry
from ...index.draft import Draft
from .clusters import FrozenWorkers, Workers
from .part_requests import Json, parse_answer

__all__ = ["WorkPart", "choose_least_part_bytes", "cut_draft", "cut_tensors", "run_parts"]

_MOST_BYTES = 1 << 30
_LEAST_BYTES = 16 << 20
_PARTS = 64  # as many at least, where that leaves _LEAST_BYTES for each
_LEAST_BYTES_OF_A_FILE = 8 << 20

#: Of a file that is sent to a store, a part has so many cells on average, at least and at most: those at its ends are
#: read twice.
_CELLS_OF_A_FILE = 2, 8


class WorkPart(NamedTuple):
    """Tensors [first, stop) of a draft, or frames of an archive, and their bytes."""

    number: int
    first: int
    stop: int
    nbytes: int


def cut_tensors(tensors: Mapping[str, TensorEntry]) -> list[WorkPart]:
    """Cut tensors that are only read into parts of consecutive tensors, regardless of the files that contain them."""
    return _cut_into_parts(tensors, {}, 0)


def cut_draft(draft: Draft, cell_bytes: int = 0) -> list[WorkPart]:
    """Cut a draft into parts of consecutive tensors.

    A part ends once it has both min(1 GiB, max(16 MiB, a 64th of the total)) and 8 MiB for each of its files that the
    next part continues; in a store, 2 to 8 cells instead of the 8 MiB.

    Args:
        cell_bytes: the bytes of a cell, a part of an object in a store; 0 if the destination is no store.
    """
    of_a_file = _LEAST_BYTES_OF_A_FILE
    if cell_bytes:
        fewest, most = (n * cell_bytes for n in _CELLS_OF_A_FILE)
        of_a_file = max(fewest, min(most, draft.nbytes // _PARTS // len(draft.files)))
    return _cut_into_parts(draft.checkpoint.tensors, draft.aliases, of_a_file)


def choose_least_part_bytes(whole: int) -> int:
    """Return the minimum size, in bytes, of every part but the last, if `whole` bytes are cut into parts."""
    return min(_MOST_BYTES, max(_LEAST_BYTES, whole // _PARTS))


def _cut_into_parts(tensors: Mapping[str, TensorEntry], aliases: Mapping[str, str], of_a_file: int) -> list[WorkPart]:
    """Cut tensors into parts of consecutive tensors.

    Args:
        aliases: names of tensors that share the bytes of others and are not counted.
        of_a_file: the minimum bytes of a part for each of its files that the next part continues; 0 to ignore files.
    """
    least = choose_least_part_bytes(sum(t.nbytes for n, t in tensors.items() if n not in aliases))
    last: dict[int, int] = {}  # the tensor that ends a file
    for i, (name, t) in enumerate(tensors.items() if of_a_file else ()):
        if name not in aliases:
            last.update(dict.fromkeys(t.chunks.file, i))
    out: list[WorkPart] = []
    first = size = 0
    files: set[int] = set()
    for i, (name, t) in enumerate(tensors.items()):
        if name in aliases:
            continue
        size += t.nbytes
        if of_a_file:
            files.update(t.chunks.file)
        if size >= least and size >= of_a_file * sum(last[f] > i for f in files):
            out.append(WorkPart(len(out), first, i + 1, size))
            first, size, files = i + 1, 0, set()
    if first < len(tensors):
        out.append(WorkPart(len(out), first, len(tensors), size))
    return out


# -------------------------------------------------------------------------------------------------- having them done

_AT_ONCE = 64  # parts that are submitted to an engine that does not say how many workers it has
_TRIES = 3
_SLOW = 3.0  # a part is submitted once more when it takes so many times the median
_SLOW_SECONDS = 5.0
_UNKNOWN_SECONDS, _UNKNOWN_BYTES = 30.0, 10e6  # while no part is done: so long, and a second for so many bytes
_SILENT_SECONDS = 60.0  # after that, a part that cannot be submitted again is worth a warning


@dataclass
class _Flight:
    """A part that a worker has, or several. `began` is when the first of them got it, `submitted` the last."""

    part: WorkPart
    began: float
    submitted: float = 0.0
    tries: int = 1
    futures: set[Future[str]] = field(default_factory=set)


def run_parts(
    parts: Sequence[WorkPart],
    results: dict[int, Json],
    request: Callable[[int], str],
    workers: Workers,
    progress: Callable[[int, int], None],
    run: Callable[[str], str],
) -> int:
    """Have workers do every part that is not in `results` yet, and add their answers.

    Args:
        results: {number of a part: answer}.
        request: returns the request to a worker for the number of a part.
        progress: called with (bytes done, bytes in all).
        run: what a worker calls with a request, such as `part_worker.run`.

    Returns:
        How often a part was submitted again.

    Raises:
        CkpttoolError: what a worker raised, or no worker could do a part.
    """
    total = sum(p.nbytes for p in parts)
    todo = deque(p for p in _sort_largest_first(parts) if p.number not in results)
    passed = total - sum(p.nbytes for p in todo)
    flights: dict[int, _Flight] = {}
    flight_of: dict[Future[str], _Flight] = {}
    seconds: list[float] = []  # of each part that is done
    submitted = 0
    silent = False  # whether a warning has said that a part hangs

    def submit(flight: _Flight) -> None:
        """Submit a part to the workers once more, and note the future."""
        nonlocal submitted
        submitted += 1
        flight.submitted = time.monotonic()
        future = workers.submit(run, request(flight.part.number), flight.futures)
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
            silent = silent or _warn_if_all_frozen(flights, seconds, workers)
    finally:
        for future in flight_of:
            future.cancel()
    return submitted - len(seconds)


def _sort_largest_first(parts: Sequence[WorkPart]) -> list[WorkPart]:
    """Sort parts so that those of more than twice the average size, which one large tensor makes, come first: else one
    of them might start when the other workers are almost done. All others stay in the order of the files."""
    usual = 2 * sum(p.nbytes for p in parts) // max(1, len(parts))
    return sorted(parts, key=lambda p: -p.nbytes if p.nbytes > usual else 0)


#: Errors of ours after which another try may succeed: a failed system call, a store, a worker that plans something
#: else.
_PASSING = (CkpttoolError, Unreadable, RemoteError)


def _resubmit(flight: _Flight, e: Exception, submit: Callable[[_Flight], None]) -> None:
    """Submit a part that failed once more, unless another worker still works on it.

    Args:
        flight: the part, with the requests for it.
        e: the error of the request that failed.
        submit: submits the part to a worker.

    Raises:
        CkpttoolError: the part failed three times; this is `e`, if that is an error of ckpttool.
    """
    if flight.futures:
        return
    if flight.tries == _TRIES:
        if isinstance(e, CkpttoolError):
            raise e
        raise CkpttoolError(
            f"a part was given to {_TRIES} workers, and none of them finished it: {str(e) or type(e).__name__}. What "
            "the others did is kept: run the same command again.",
            code="CKPT0102",
        ) from e
    flight.tries += 1
    flight.began = time.monotonic()
    submit(flight)


def _duplicate_slow_parts(
    flights: dict[int, _Flight], seconds: list[float], free: int, submit: Callable[[_Flight], None]
) -> None:
    """Submit parts that take much longer than the others again, to idle workers.

    Args:
        flights: {number of a part: the requests for it}.
        seconds: how long each finished part has taken.
        free: how many workers are idle.
        submit: submits a part.
    """
    for flight in sorted(flights.values(), key=lambda f: f.began):
        if free > 0 and flight.tries < _TRIES and _is_late(flight, seconds):
            flight.tries += 1
            submit(flight)
            free -= 1


def _is_late(flight: _Flight, seconds: list[float], least: float = 0.0) -> bool:
    """Tell whether a part takes much longer than the finished parts did, and more than `least` seconds, since it was
    last submitted. While no part is finished, the expected time is computed from its bytes.

    Args:
        seconds: how long each finished part has taken.
    """
    usual = max(_SLOW * statistics.median(seconds), _SLOW_SECONDS) if seconds else 0.0
    return time.monotonic() - flight.submitted > max(
        usual or _UNKNOWN_SECONDS + flight.part.nbytes / _UNKNOWN_BYTES, least
    )


def _warn_if_all_frozen(flights: dict[int, _Flight], seconds: list[float], workers: Workers) -> bool:
    """Warn that nothing progresses if every submitted part takes much longer than the finished parts did; the warning
    names the part that was submitted first. Return whether it warned.

    Args:
        flights: {number of a part: the requests for it}, of all parts that are submitted and not finished.
        seconds: how long each finished part has taken.
        workers: the workers, for the warning.
    """
    if not flights or not all(_is_late(f, seconds, _SILENT_SECONDS) for f in flights.values()):
        return False
    flight = min(flights.values(), key=lambda f: f.began)
    warnings.warn(
        f"part {flight.part.number} ({flight.part.nbytes:,} bytes) has been at work for "
        f"{time.monotonic() - flight.began:.0f} seconds, in {len(flight.futures)} of the workers of {workers.name}. "
        "They may be stopped, or wait for a disk or a store. The run goes on when one of them answers; if it is "
        "interrupted, the same command continues it.",
        FrozenWorkers,
        stacklevel=3,
    )
    return True
