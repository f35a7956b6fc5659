"""What a worker runs: one function, from a request of the coordinator to an answer, both JSON (part_requests.py)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Generic, TypeVar

from ..errors import CkpttoolError
from ..storage.buffers import IOBudget
from ..storage.shared_objects import SharedObjects
from ..storage.shared_tree import SharedTree
from .cell_fill import send_cells
from .opening import OpenCheckpoint, OpenOptions, open_with
from .part_fill import fill_part
from .part_requests import encoded_error, index_id, read_job
from .parts import Part
from .planning import Plan, plan_id, plan_with
from .tensor_digests import tensor_digests_and_crcs

__all__ = ["Last", "forget", "run"]


T = TypeVar("T", bound=AbstractContextManager[Any])


class Last(Generic[T]):
    """What was made for the last question, open: a worker fills many parts of one plan. What was made before is closed."""

    def __init__(self, make: Callable[[str], T]) -> None:
        self.make: Callable[[str], T] = make
        self.question = ""
        self.made: T | None = None
        self.lock = threading.Lock()  # an engine may run several threads in a process

    def __call__(self, question: str) -> T:
        with self.lock:
            if self.made is None or question != self.question:
                self.close()
                self.made, self.question = self.make(question), question
            return self.made

    def close(self) -> None:
        """Forget it."""
        made, self.made = self.made, None
        if made is not None:
            with made:
                pass


def forget() -> None:
    """Close what is kept for the next request: for processes that do not end when the work is done."""
    _planned.close()
    _opened.close()


def prepare(request: str) -> str:
    """Plan or open what a request is about, for all workers that are made as copies of this process."""
    ((what, asked),) = json.loads(request).items()
    if what == "fill":
        _planned(json.dumps(asked["job"]))
    else:
        _opened(json.dumps(asked["open"]))
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
    planned = _planned(json.dumps(asked["job"]))
    ckpt = planned.opened.checkpoint
    return fill_part(
        planned.draft, planned.opened.source, ckpt.files, ckpt.records, Part(*asked["part"]),
        SharedObjects(asked["tree"]) if "objects" in asked["tree"] else SharedTree(asked["tree"]),
        IOBudget(asked["threads"], asked["buffer_bytes"]), there=asked["there"],
    )  # fmt: skip


def _cells(asked: dict[str, Any]) -> dict[str, Any]:
    """Some cells of the objects of a conversion."""
    planned = _planned(json.dumps(asked["job"]))
    return send_cells(
        planned.draft, planned.opened.source, planned.opened.checkpoint.files, asked["cells"], SharedObjects(asked["tree"]),
        IOBudget(asked["threads"], asked["buffer_bytes"]),
    )  # fmt: skip


def _digest(asked: dict[str, Any]) -> dict[str, Any]:
    """The digests of some tensors of a checkpoint."""
    opened = _opened(json.dumps(asked["open"]))
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
            f"this worker finds another checkpoint at {said['path']} than the process that asked: files that differ between the machines, or "
            "another version of ckpttool."
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
            f"this worker plans the conversion of {src} differently from the process that asked: it has another version of ckpttool, or "
            "sees other files. Install the same version everywhere, on a file system that all of them see."
        )
    return planned


_planned, _opened = Last(_plan), Last(_open)
