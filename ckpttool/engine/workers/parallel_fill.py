"""Fill a draft with any number of workers: the coordinator's side.

    cut the draft into parts; create the files
    have the parts filled by the workers of an executor (dispatch.py, part_worker.py)
    write what lies between the chunks of different workers: heads, tails, frames that need several CRCs
    (parallel_cells.py in a store)

A part that is filled twice gets the same bytes twice. What was filled stands in `parts/` of the destination's folder,
durably; a store lists what was sent to it. When the coordinator dies, the same command goes on with what is missing,
with any engine and any number of workers.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode
from collections.abc import Iterable, Sequence
from typing import Any

from ...index.draft import Draft, Written
from ...storage.buffers import IOBudget
from ...storage.destination_protocol import ParallelDestination, write_error
from ...storage.local_file import write_all_at
from ..copy.fill import Progress, note_lost
from ..copy.stream import Reader
from ..planning import Plan
from . import part_worker
from .cell_fill import why_not
from .dispatch import run_all
from .executors import Workers
from .parallel_cells import note_sent, objects_of, send_rest
from .part_fill import between, framed_alone
from .parts import cut

__all__ = ["fill_with_workers", "why_one_process"]


def fill_with_workers(
    planned: Plan,
    job: dict[str, Any],
    destination: ParallelDestination,
    workers: Workers,
    progress: Progress,
    budget: IOBudget,
) -> tuple[dict[str, str], dict[str, Any]]:
    """Write every file of a draft; returns ({tensor: BLAKE3 hex digest of its bytes there}, as `fill.fill`, and facts
    of the run).

    The facts: "name" and "count" of the workers, "parts", how many of them an earlier run had "filled_before", how many
    were submitted "again", and the bytes that each machine filled, by name, in "nodes".

    Args:
        job: `part_requests.job_of` this conversion.

    Raises:
        Corrupt, SourceChanged: the source is damaged, or was written to meanwhile.
        NoSpace, CkpttoolError: the destination could not be written, or no worker could fill a part.
    """
    draft, source = planned.draft, planned.opened.source
    cells = destination.part_bytes
    parts = cut(draft, cells)
    names = list(draft.checkpoint.tensors)
    touched = [_files_of(draft, names[part.first : part.stop]) for part in parts]
    shared = set[str]().union(*touched) if cells else {f.name for f in draft.files}
    tree = destination.share({f.name: f.size for f in draft.files if f.name in shared})
    results = {k: found for k, found in destination.filled_parts.items() if k < len(parts)}
    asked = {"job": job, "tree": tree, "threads": budget.threads, "buffer_bytes": budget.buffer_bytes}

    def request(number: int) -> str:
        part = parts[number]
        mine = objects_of(tree, touched[number]) if cells else tree
        return json.dumps(
            {"fill": {**asked, "tree": mine, "part": part, "there": part.stop <= destination.earlier.done}}
        )

    before = len(results)
    if not source.is_remote and (todo := [p.number for p in parts if p.number not in results])[1:]:
        workers.prepare(part_worker.prepare, request(todo[0]))
    again = run_all(parts, results, request, workers, lambda done, total: progress("copy", done, total))
    destination.stop_sharing()
    ckpt = planned.opened.checkpoint
    reader = Reader(source, ckpt.files, ckpt.records, budget)
    for part in parts:
        reader.absorb(results[part.number]["seen"])
    reader.finish()
    digests: dict[str, str] = {}
    crcs: dict[int, list[Written]] = {i: [] for i in range(len(draft.files))}
    fringes: dict[int, list[tuple[int, str]]] = {}
    for part in parts:
        found = results[part.number]
        digests |= found["digests"]
        note_lost(draft, found.get("lost", {}))
        for file, pieces in found["fringes"].items():
            fringes.setdefault(int(file), []).extend(pieces)
        for file, rows in found["crcs"].items():
            crcs[int(file)] += [(name, row, crc) for name, row, crc in rows]
    for name, other in draft.aliases.items():
        digests[name] = digests[other]
    if cells:
        sent: dict[str, dict[int, str]] = {name: {} for name in shared}
        note_sent(sent, results)
        before = sum(found["kept"] == sum(map(len, found["cells"].values())) > 0 for found in results.values())
        again += send_rest(draft, asked, crcs, digests, sent, destination, workers, progress)
    else:
        for i in range(len(draft.files)):
            _finish(draft, i, crcs[i], fringes.get(i, ()), digests, destination)
    nodes: dict[str, int] = {}
    for found in results.values():
        nodes[found["node"]] = nodes.get(found["node"], 0) + found["bytes"]
    facts = {
        "name": workers.name,
        "count": workers.count,
        "parts": len(parts),
        "filled_before": before,
        "again": again,
        "nodes": nodes,
    }
    return digests, facts


def why_one_process(draft: Draft, job: dict[str, Any] | None, sharable: bool, in_store: bool) -> str | None:
    """Why one process has to fill a draft; None if several can.

    Args:
        job: `part_requests.job_of` the conversion.
        sharable, in_store: whether its destination can be filled by several, and whether that is a store.
    """
    if not sharable:
        return "only S3 takes the parts of an object from several processes"
    if any(f.coded for f in draft.files):
        return "an archive is written front to back by one process"
    if job is None:
        return "a merged or salvaged checkpoint, and one whose server tells no versions, is written by one process"
    return why_not(draft) if in_store else None


def _files_of(draft: Draft, names: Sequence[str]) -> set[str]:
    """The files that some tensors are written to."""
    tensors = draft.checkpoint.tensors
    numbers = set[int]().union(*(tensors[n].chunks.file for n in names if n not in draft.aliases))
    return {draft.files[i].name for i in numbers}


def _finish(
    draft: Draft,
    i: int,
    written: Sequence[Written],
    fringes: Iterable[tuple[int, str]],
    digests: dict[str, str],
    destination: ParallelDestination,
) -> None:
    """Write what no worker has written of a file, cut it to its length and make it durable."""
    f = draft.files[i]
    path = destination.path(f.name)
    alone = framed_alone(draft, i)
    pieces, f.size = between(draft, i, written, digests, lambda a, b: not alone)
    try:
        with open(path, "r+b", buffering=0) as out:
            fd = out.fileno()
            for at, text in fringes:  # with zeros where frames belong
                write_all_at(fd, b64decode(text), at)
            for at, data in pieces:
                write_all_at(fd, data, at)
            os.ftruncate(fd, f.size)
            os.fsync(fd)
    except OSError as e:
        raise write_error(e, path) from e
