"""Digests of the tensors of an open checkpoint, by any number of workers."""

from __future__ import annotations

import json
from concurrent.futures import Executor
from dataclasses import asdict
from typing import Any

from ..storage.buffers import IOBudget
from .dispatch import Task, run_all
from .fill import Progress
from .opening import OpenCheckpoint, OpenOptions
from .part_requests import index_id
from .parts import cut_tensors
from .stream import Reader

__all__ = ["digests_by_workers"]


def digests_by_workers(
    opened: OpenCheckpoint,
    path: str,
    options: OpenOptions,
    executor: Executor,
    at_once: int,
    progress: Progress,
    what: str,
    budget: IOBudget,
) -> dict[str, str]:
    """{tensor: BLAKE3 hex digest of its canonical bytes}, reading everything and checking the CRCs, as `fill.tensor_digests`.

    Args:
        path, options: what `opened` was opened with, and located; workers open it again.
        at_once: how many parts are submitted at a time.

    Raises:
        Corrupt, SourceChanged: it is damaged, or was written to meanwhile.
        CkpttoolError: no worker could read a part.
    """
    ckpt = opened.checkpoint
    parts = cut_tensors(ckpt.tensors)
    same = {
        "open": {"path": path, "options": asdict(options), "index": index_id(ckpt)}, "threads": budget.threads,
        "buffer_bytes": budget.buffer_bytes,
    }  # fmt: skip

    def request(number: int) -> str:
        return json.dumps({"digest": {**same, "first": parts[number].first, "stop": parts[number].stop}})

    results: dict[int, dict[str, Any]] = {}
    tasks = [Task(p.number, p.nbytes) for p in parts]
    run_all(tasks, results, request, executor, at_once, lambda done, total: progress(what, done, total))
    reader = Reader(opened.source, ckpt.files, ckpt.records, budget)
    out: dict[str, str] = {}
    for part in parts:
        reader.absorb(results[part.number]["seen"])
        out |= results[part.number]["digests"]
    reader.finish()
    return out
