"""What a worker runs: one function, from a request of the coordinator to an answer, both JSON (part_requests.py)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from ...errors import CkpttoolError
from ...storage.buffers import IOBudget
from ...storage.shared_objects import SharedObjects
from ...storage.shared_tree import SharedTree
from ..copy.tensor_digests import tensor_digests_and_crcs
from ..copy.tensor_statistics import StatisticsCounter
from ..opening import OpenCheckpoint, OpenOptions, open_checkpoint
from ..planning import Plan, plan_conversion
from .part_fill import fill_part, send_cells
from .part_requests import Json, compute_index_id, encode_error, read_job
from .parts import WorkPart

__all__ = ["SingleEntryCache", "close_caches", "prepare", "run"]


T = TypeVar("T", bound=AbstractContextManager[Any])


class SingleEntryCache(Generic[T]):
    """Keeps open what was made for the last question: a worker fills many parts of one plan. What was made before is
    closed when nobody uses it: an engine may run several threads in a process, for several conversions."""

    def __init__(self, make: Callable[[str], T]) -> None:
        self.make: Callable[[str], T] = make
        self.kept: _Kept[T] | None = None
        self.lock = threading.Lock()

    @contextmanager
    def answer(self, question: str) -> Iterator[T]:
        """Provide the object that `make(question)` returns, for the `with` block.

        Args:
            question: what to make, as a text. If it equals the last question, the object of that is provided again;
                otherwise a new one is made, and the old one is closed when its last user is done.
        """
        with self.lock:
            if self.kept is None or question != self.kept.question:
                self._drop()
                self.kept = _Kept(question, self.make(question))
            kept = self.kept
            kept.users += 1
        try:
            yield kept.made
        finally:
            with self.lock:
                kept.users -= 1
                if kept is not self.kept:
                    kept.close()

    def close(self) -> None:
        """Empty the cache: close the object in it, or have its last user close it if it is in use."""
        with self.lock:
            self._drop()

    def _drop(self) -> None:
        """Empty the cache, and close the object that was in it unless that is in use. The caller holds the lock."""
        kept, self.kept = self.kept, None
        if kept is not None:
            kept.close()


@dataclass
class _Kept(Generic[T]):
    question: str
    made: T
    users: int = 0

    def close(self) -> None:
        """Close the cached object, unless it is in use."""
        if not self.users:
            with self.made:
                pass


def close_caches() -> None:
    """Close the plans and checkpoints that are cached for further requests; for processes that continue after their
    work."""
    _planned.close()
    _opened.close()


def prepare(request: str) -> str:
    """Plan the conversion or open the checkpoint that a request is about, and cache the result for all workers that are
    forked from this process. Return "".

    Args:
        request: JSON, as `run` takes it: {"fill" or "digest": its arguments}.

    Raises:
        CkpttoolError: the conversion cannot be planned, or the checkpoint cannot be opened.
    """
    ((what, asked),) = json.loads(request).items()
    with _planned.answer(json.dumps(asked["job"])) if what == "fill" else _opened.answer(json.dumps(asked["open"])):
        return ""


def run(request: str) -> str:
    """Execute a request of the coordinator in a worker, and return the answer as JSON. Errors of ckpttool are not
    raised, but returned as answers (`encode_error`).

    Args:
        request: JSON of one key, {what to do: its arguments}. "fill" writes a part of a draft (`_fill_part`), "cells"
            sends parts of objects to a store (`_send_cells`), "digest" hashes tensors (`_digest_part`).
    """
    ((what, asked),) = json.loads(request).items()
    try:
        return json.dumps(_ACTIONS[what](asked), separators=(",", ":"))
    except CkpttoolError as e:
        return encode_error(e)


def _fill_part(asked: Json) -> Json:
    """Fill one part of a conversion, and return the answer of `fill_part`.

    Args:
        asked: {"job": what `describe_job` returned, "tree": the destination, as the coordinator shares it, "part": the
            fields of a `WorkPart`, "there": whether an earlier run wrote its bytes, "threads" and "buffer_bytes": the
            limits of an `IOBudget`}.

    Raises:
        CkpttoolError: it cannot be planned, read or written.
    """
    with _planned.answer(json.dumps(asked["job"])) as planned:
        ckpt = planned.opened.checkpoint
        return fill_part(
            planned.draft,
            planned.opened.source,
            ckpt.files,
            ckpt.records,
            WorkPart(*asked["part"]),
            SharedObjects(asked["tree"]) if "objects" in asked["tree"] else SharedTree(asked["tree"]),
            IOBudget(asked["threads"], asked["buffer_bytes"]),
            there=asked["there"],
        )


def _send_cells(asked: Json) -> Json:
    """Send some cells (parts of objects in a store) of a conversion, and return the answer of `send_cells`.

    Args:
        asked: {"job": what `describe_job` returned, "tree": the destination, as the coordinator shares it, "cells": the
            cells, as `send_cells` takes them, "threads" and "buffer_bytes": the limits of an `IOBudget`}.

    Raises:
        CkpttoolError: it cannot be planned, read or sent.
    """
    with _planned.answer(json.dumps(asked["job"])) as planned:
        return send_cells(
            planned.draft,
            planned.opened.source,
            planned.opened.checkpoint.files,
            asked["cells"],
            SharedObjects(asked["tree"]),
            IOBudget(asked["threads"], asked["buffer_bytes"]),
        )


def _digest_part(asked: Json) -> Json:
    """Digest some tensors of a checkpoint, and return {"digests", "seen"} of `tensor_digests_and_crcs`, with
    "statistics" if they are asked for.

    Args:
        asked: {"open": the checkpoint, as `_open_asked` takes it, "first" and "stop": the tensors are [first, stop) of
            its index, "statistics": None for none, or whether to count exponents, "threads" and "buffer_bytes": the
            limits of an `IOBudget`}.

    Raises:
        CkpttoolError: it cannot be opened or read.
    """
    with _opened.answer(json.dumps(asked["open"])) as opened:
        ckpt = opened.checkpoint
        tensors = {n: ckpt.tensors[n] for n in list(ckpt.tensors)[asked["first"] : asked["stop"]]}
        counter = None if asked["statistics"] is None else StatisticsCounter(tensors, asked["statistics"])
        budget = IOBudget(asked["threads"], asked["buffer_bytes"])
        out = tensor_digests_and_crcs(
            tensors, opened.source, ckpt.files, ckpt.records, budget, None if counter is None else counter.add
        )
        return out if counter is None else {**out, "statistics": {n: asdict(s) for n, s in counter.found.items()}}


def _open_asked(asked: str) -> OpenCheckpoint:
    """Open and locate the checkpoint that a request is about.

    Args:
        asked: JSON with "path", "options" and "index", the checkpoint's `compute_index_id`.

    Raises:
        CkpttoolError: it cannot be opened, or this worker finds another checkpoint than the process that asked.
    """
    said = json.loads(asked)
    opened = open_checkpoint(said["path"], OpenOptions(**said["options"]), check_hints=False, prove_later=True)
    opened.locate()
    if compute_index_id(opened.checkpoint, opened.source) != said["index"]:
        raise CkpttoolError(
            f"this worker finds another checkpoint at {said['path']} than the process that asked: files that differ "
            "between the machines, or another version of ckpttool.",
            code="CKPT0102",
        )
    return opened


def _plan_asked(job: str) -> Plan:
    """Plan the conversion that a request is about.

    Args:
        job: JSON of what `describe_job` returned.

    Raises:
        CkpttoolError: it cannot be planned, or this worker plans it differently from the process that asked.
    """
    said = json.loads(job)
    src, dst, reading, writing = read_job(said)
    planned = plan_conversion(src, dst, reading, writing)
    if planned.id != said["plan"]:
        raise CkpttoolError(
            f"this worker plans the conversion of {src} differently from the process that asked: it has another "
            "version of ckpttool, or sees other files. Install the same version everywhere, on a file system that all "
            "of them see.",
            code="CKPT0102",
        )
    return planned


_planned, _opened = SingleEntryCache(_plan_asked), SingleEntryCache(_open_asked)
_ACTIONS = {"fill": _fill_part, "cells": _send_cells, "digest": _digest_part}
