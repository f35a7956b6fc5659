"""Fill a draft with any number of workers: the coordinator's side.

    cut the draft into parts; create the files
    submit the parts to an executor, a few at a time        workers: part_worker.run
    what fails is submitted again, three times; what takes three times as long as the others is submitted once more
    write what lies between the chunks of different workers: heads, tails, frames that need several CRCs

A part that is filled twice gets the same bytes twice. What was filled stands in `parts/` of the destination's folder, durably: when the
coordinator dies, the same command goes on with the parts that are missing, with any engine and any number of workers.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field
from typing import Any

from ..errors import CkpttoolError, RemoteError, Unreadable
from ..index.draft import Draft, Written
from ..storage.buffers import IOBudget
from ..storage.destination import write_error
from ..storage.local_destination import LocalDestination
from . import part_worker
from .fill import Progress
from .part_fill import framed_alone
from .part_requests import answered
from .parts import Part, cut
from .planning import Plan
from .stream import Reader

__all__ = ["InThisProcess", "fill_with_workers"]

_TRIES = 3
_SLOW = 3.0  # a part is submitted once more when it takes so many times the median
_SLOW_SECONDS = 5.0


@dataclass
class _Flight:
    """A part that is being filled."""

    part: Part
    began: float
    tries: int = 1
    futures: set[Future[str]] = field(default_factory=set)


def fill_with_workers(
    planned: Plan,
    job: dict[str, Any],
    destination: LocalDestination,
    executor: Executor,
    at_once: int,
    progress: Progress,
    budget: IOBudget,
) -> dict[str, str]:
    """Write every file of a draft; returns {tensor: BLAKE3 hex digest of its bytes there}, as `fill.fill`.

    Args:
        job: `part_requests.job_of` this conversion.
        at_once: how many parts are submitted at a time.

    Raises:
        Corrupt, SourceChanged: the source is damaged, or was written to meanwhile.
        NoSpace, CkpttoolError: the destination could not be written, or no worker could fill a part.
    """
    draft, source = planned.draft, planned.opened.source
    parts = cut(draft)
    tree = destination.share({f.name: f.size for f in draft.files})
    results = {k: found for k, found in destination.filled.items() if k < len(parts)}
    asked = {"job": job, "tree": tree, "threads": budget.threads, "buffer_bytes": budget.buffer_bytes}

    def request(part: Part) -> str:
        return json.dumps({**asked, "part": part, "there": part.stop <= destination.earlier.done})

    _run_all(parts, results, request, executor, at_once, progress)
    ckpt = planned.opened.checkpoint
    reader = Reader(source, ckpt.files, ckpt.records, budget)
    for part in parts:
        reader.absorb(results[part.number]["seen"])
    reader.finish()
    digests: dict[str, str] = {}
    crcs: dict[int, list[Written]] = {i: [] for i in range(len(draft.files))}
    for part in parts:
        found = results[part.number]
        digests |= found["digests"]
        for file, rows in found["crcs"].items():
            crcs[int(file)] += [(name, row, crc) for name, row, crc in rows]
    for name, other in draft.aliases.items():
        digests[name] = digests[other]
    for i in range(len(draft.files)):
        _finish(draft, i, crcs[i], digests, destination)
    return digests


def _run_all(
    parts: Sequence[Part],
    results: dict[int, dict[str, Any]],
    request: Any,
    executor: Executor,
    at_once: int,
    progress: Progress,
) -> None:
    """Have every part filled that `results` has not, and add what is said of it."""
    total = sum(p.nbytes for p in parts)
    todo = deque(p for p in parts if p.number not in results)
    flights: dict[int, _Flight] = {}
    of: dict[Future[str], _Flight] = {}
    seconds: list[float] = []

    def submit(flight: _Flight) -> None:
        future = executor.submit(part_worker.run, request(flight.part))
        flight.futures.add(future)
        of[future] = flight

    def done() -> int:
        return sum(p.nbytes for p in parts if p.number in results)

    try:
        progress("copy", done(), total)
        while todo or flights:
            while todo and len(of) < at_once:
                flight = _Flight(todo.popleft(), time.monotonic())
                flights[flight.part.number] = flight
                submit(flight)
            for future in wait(list(of), timeout=1.0, return_when=FIRST_COMPLETED).done:
                flight = of.pop(future)
                flight.futures.discard(future)
                number = flight.part.number
                if number in results:
                    continue  # the other one of two was faster
                try:
                    results[number] = answered(future.result())
                except (Unreadable, RemoteError) as e:
                    _again(flight, e, submit)
                except CkpttoolError as e:
                    if type(e) is not CkpttoolError:
                        raise
                    _again(flight, e, submit)
                except Exception as e:  # of the engine: its worker died, or cannot be reached
                    _again(flight, e, submit)
                else:
                    seconds.append(time.monotonic() - flight.began)
                    del flights[number]
                    for other in flight.futures:
                        other.cancel()
                        of.pop(other, None)
                    progress("copy", done(), total)
            _hurry(flights, seconds, at_once - len(of) - len(todo), submit)
    finally:
        for future in of:
            future.cancel()


def _again(flight: _Flight, e: Exception, submit: Any) -> None:
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
            f"part {flight.part.number} was given to {_TRIES} workers, and none of them filled it: {e or type(e).__name__}. What the "
            "others filled is kept: run the same command again."
        ) from e
    flight.tries += 1
    flight.began = time.monotonic()
    submit(flight)


def _hurry(flights: dict[int, _Flight], seconds: list[float], free: int, submit: Any) -> None:
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


def _finish(
    draft: Draft, i: int, written: Sequence[Written], digests: dict[str, str], destination: LocalDestination
) -> None:
    """Write what no worker has written of a file, cut it to its length and make it durable."""
    f, tensors = draft.files[i], draft.checkpoint.tensors
    path = destination.path(f.name)
    head = f.first_bytes()
    end = len(head)
    try:
        with open(path, "r+b", buffering=0) as out:
            fd = out.fileno()
            _put(fd, head, 0)
            alone = framed_alone(draft, i)
            so_far: list[Written] = []
            for k, (name, row, crc) in enumerate(written):
                entry = tensors[name]
                c = entry.chunks
                if not alone and draft.before:
                    frame = draft.before(name, entry, row, so_far)
                    _put(fd, frame, c.offset[row] - len(frame))
                end = c.offset[row] + c.length[row]
                so_far.append((name, row, crc))
                if draft.after and (not alone or k == len(written) - 1):
                    frame = draft.after(name, entry, row, so_far)
                    if not alone:
                        _put(fd, frame, end)
                    end += len(frame)
            if draft.tail:
                tail = draft.tail(i, written, digests)
                _put(fd, tail, end)
                end += len(tail)
            os.ftruncate(fd, end)
            os.fsync(fd)
    except OSError as e:
        raise write_error(e, path) from e
    f.size = end


def _put(fd: int, data: bytes, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, memoryview(data)[done:], offset + done)


class InThisProcess(Executor):
    """An executor that does the work when it is submitted: what goes on with parts that workers have left."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        out: Future[Any] = Future()
        try:
            out.set_result(fn(*args, **kwargs))
        except Exception as e:
            out.set_exception(e)
        return out
