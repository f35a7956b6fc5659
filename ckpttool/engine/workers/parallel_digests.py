"""Digests of the tensors of an open checkpoint, by any number of workers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from ...storage.buffers import DEFAULT_BUDGET, IOBudget
from ..copy.fill import Progress
from ..copy.stream import Block, Reader
from ..copy.tensor_digests import tensor_digests
from ..opening import CheckpointPath, OpenCheckpoint, OpenOptions
from . import part_worker
from .dispatch import run_parts
from .executors import Workers, WorkersSpec, default_count, workers_of
from .part_requests import absolute_path, index_id, with_absolute_paths
from .parts import cut_tensors

__all__ = ["digest_with_workers", "workers_for_reading"]


@contextmanager
def workers_for_reading(spec: WorkersSpec, path: object, nbytes: int) -> Iterator[Workers | None]:
    """Start the workers to read a checkpoint of so many bytes, which they open by its path; None where this process
    reads it alone."""
    if spec in (1, "1") or (spec is None and default_count(nbytes) == 1) or not isinstance(path, (str, os.PathLike)):
        yield None
    else:
        with workers_of(spec, nbytes) as workers:
            yield workers


def digest_with_workers(
    opened: OpenCheckpoint,
    path: CheckpointPath,
    options: OpenOptions,
    workers: Workers | None,
    progress: Progress,
    what: str,
    budget: IOBudget = DEFAULT_BUDGET,
    seen: Callable[[Block], None] | None = None,
) -> dict[str, str]:
    """Return {tensor: BLAKE3 hex digest of its canonical bytes}, reading everything and checking the CRCs.

    Args:
        seen: called with every block, if this process reads them.
        path, options: what `opened` was opened with; it was located. Workers open it again.

    Raises:
        Corrupt, SourceChanged: it is damaged, or was written to meanwhile.
        CkpttoolError: no worker could read a part.
    """
    ckpt = opened.checkpoint
    if workers is None or not isinstance(path, (str, os.PathLike)):
        return tensor_digests(ckpt.tensors, opened.source, ckpt.files, ckpt.records, progress, what, None, budget, seen)
    parts = cut_tensors(ckpt.tensors)
    same = {
        "open": {
            "path": absolute_path(os.fspath(path)),
            "options": asdict(with_absolute_paths(options)),
            "index": index_id(ckpt, opened.source),
        },
        "threads": budget.threads,
        "buffer_bytes": budget.buffer_bytes,
    }

    def request(number: int) -> str:
        return json.dumps({"digest": {**same, "first": parts[number].first, "stop": parts[number].stop}})

    results: dict[int, dict[str, Any]] = {}
    if not opened.source.is_remote and len(parts) > 1:
        workers.prepare(part_worker.prepare, request(0))
    run_parts(parts, results, request, workers, lambda done, total: progress(what, done, total), part_worker.run)
    reader = Reader(opened.source, ckpt.files, ckpt.records, budget)
    out: dict[str, str] = {}
    for part in parts:
        reader.absorb(results[part.number]["seen"])
        out |= results[part.number]["digests"]
    reader.finish()
    return out
