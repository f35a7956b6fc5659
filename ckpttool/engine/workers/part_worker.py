"""What a worker runs: one function, from a request of the coordinator to an answer, both JSON (part_requests.py)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from ...errors import CkpttoolError
from ...storage.buffers import IOBudget
from ...storage.shared_objects import SharedObjects
from ...storage.shared_tree import SharedTree
from ..copy.tensor_digests import tensor_digests_and_crcs
from ..opening import OpenCheckpoint, OpenOptions, open_with
from ..planning import Plan, plan_id, plan_with
from .cell_fill import send_cells
from .part_fill import fill_part
from .part_requests import encoded_error, index_id, read_job
from .parts import Part

__all__ = ["Last", "forget", "run"]


T = TypeVar("T", bound=AbstractContextManager[Any])


class Last(Generic[T]):
    """What was made for the last question, open: a worker fills many parts of one plan. What was made before is closed
    when nobody uses it: an engine may run several threads in a process, for several conversions."""

    def __init__(self, make: Callable[[str], T]) -> None:
        self.make: Callable[[str], T] = make
        self.kept: _Kept[T] | None = None
        self.lock = threading.Lock()

    @contextmanager
    def of(self, question: str) -> Iterator[T]:
        """The answer to a question, which stays open as long as it is used."""
        with self.lock:
            if self.kept is None or question != self.kept.question:
                self._let_go()
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
        """Forget it."""
        with self.lock:
            self._let_go()

    def _let_go(self) -> None:
        kept, self.kept = self.kept, None
        if kept is not None:
            kept.close()


@dataclass
class _Kept(Generic[T]):
    question: str
    made: T
    users: int = 0

    def close(self) -> None:
        """Close it, unless somebody uses it."""
        if not self.users:
            with self.made:
                pass


def forget() -> None:
    """Close what is kept for the next request: for processes that do not end when the work is done."""
    _planned.close()
    _opened.close()


def prepare(request: str) -> str:
    """Plan or open what a request is about, for all workers that are made as copies of this process."""
    ((what, asked),) = json.loads(request).items()
    with _planned.of(json.dumps(asked["job"])) if what == "fill" else _opened.of(json.dumps(asked["open"])):
        return ""


def run(request: str) -> str:
    """Do what is asked for; an error of ours is an answer, too."""
    ((what, asked),) = json.loads(request).items()
    try:
        return json.dumps({"fill": _fill, "cells": _cells, "digest": _digest}[what](asked), separators=(",", ":"))
    except CkpttoolError as e:
        return encoded_error(e)


def _fill(asked: dict[str, Any]) -> dict[str, Any]:
    """One part of a conversion."""
    with _planned.of(json.dumps(asked["job"])) as planned:
        ckpt = planned.opened.checkpoint
        return fill_part(
            planned.draft,
            planned.opened.source,
            ckpt.files,
            ckpt.records,
            Part(*asked["part"]),
            SharedObjects(asked["tree"]) if "objects" in asked["tree"] else SharedTree(asked["tree"]),
            IOBudget(asked["threads"], asked["buffer_bytes"]),
            there=asked["there"],
        )


def _cells(asked: dict[str, Any]) -> dict[str, Any]:
    """Some cells of the objects of a conversion."""
    with _planned.of(json.dumps(asked["job"])) as planned:
        return send_cells(
            planned.draft,
            planned.opened.source,
            planned.opened.checkpoint.files,
            asked["cells"],
            SharedObjects(asked["tree"]),
            IOBudget(asked["threads"], asked["buffer_bytes"]),
        )


def _digest(asked: dict[str, Any]) -> dict[str, Any]:
    """The digests of some tensors of a checkpoint."""
    with _opened.of(json.dumps(asked["open"])) as opened:
        ckpt = opened.checkpoint
        names = list(ckpt.tensors)[asked["first"] : asked["stop"]]
        return tensor_digests_and_crcs(
            {n: ckpt.tensors[n] for n in names},
            opened.source,
            ckpt.files,
            ckpt.records,
            IOBudget(asked["threads"], asked["buffer_bytes"]),
        )


def _open(asked: str) -> OpenCheckpoint:
    """An open checkpoint.

    Raises:
        CkpttoolError: this worker finds another one.
    """
    said = json.loads(asked)
    opened = open_with(said["path"], OpenOptions(**said["options"]), check_hints=False)
    opened.locate()
    if index_id(opened.checkpoint, opened.source) != said["index"]:
        raise CkpttoolError(
            f"this worker finds another checkpoint at {said['path']} than the process that asked: files that differ "
            "between the machines, or another version of ckpttool."
        )
    return opened


def _plan(job: str) -> Plan:
    """The plan of a conversion.

    Raises:
        CkpttoolError: this worker plans something else.
    """
    said = json.loads(job)
    src, dst, reading, writing = read_job(said)
    planned = plan_with(src, dst, reading, writing)
    mine = plan_id(planned.opened.source, planned.draft, planned.target, reading, replace(writing, drop=False))
    if mine != said["plan"]:
        raise CkpttoolError(
            f"this worker plans the conversion of {src} differently from the process that asked: it has another "
            "version of ckpttool, or sees other files. Install the same version everywhere, on a file system that all "
            "of them see."
        )
    return planned


_planned, _opened = Last(_plan), Last(_open)
