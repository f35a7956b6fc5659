"""Fill a draft with any number of workers: the coordinator's side.

    cut the draft into parts; create the files
    have the parts filled by the workers of an executor (dispatch.py, part_worker.py)
    write what lies between the chunks of different workers: heads, tails, frames that need several CRCs

A part that is filled twice gets the same bytes twice. What was filled stands in `parts/` of the destination's folder, durably: when the
coordinator dies, the same command goes on with the parts that are missing, with any engine and any number of workers.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode
from collections.abc import Iterable, Sequence
from typing import Any

from ..index.draft import Draft, Written
from ..storage.buffers import IOBudget
from ..storage.destination import Destination, write_error
from ..storage.local_file import write_at
from .dispatch import run_all
from .executors import Workers
from .fill import Progress
from .part_fill import framed_alone
from .parts import cut
from .planning import Plan
from .stream import Reader

__all__ = ["fill_with_workers"]


def fill_with_workers(
    planned: Plan,
    job: dict[str, Any],
    destination: Destination,
    workers: Workers,
    progress: Progress,
    budget: IOBudget,
) -> tuple[dict[str, str], dict[str, Any]]:
    """Write every file of a draft; returns ({tensor: BLAKE3 hex digest of its bytes there}, as `fill.fill`, and facts of the run).

    The facts: "name" and "count" of the workers, "parts", how many of them an earlier run had "filled_before", how many were submitted
    "again", and the bytes that each machine filled, by name, in "nodes".

    Args:
        job: `part_requests.job_of` this conversion.

    Raises:
        Corrupt, SourceChanged: the source is damaged, or was written to meanwhile.
        NoSpace, CkpttoolError: the destination could not be written, or no worker could fill a part.
    """
    draft, source = planned.draft, planned.opened.source
    parts = cut(draft)
    tree = destination.share({f.name: f.size for f in draft.files})
    results = {k: found for k, found in destination.filled.items() if k < len(parts)}
    asked = {"job": job, "tree": tree, "threads": budget.threads, "buffer_bytes": budget.buffer_bytes}

    def request(number: int) -> str:
        part = parts[number]
        return json.dumps({"fill": {**asked, "part": part, "there": part.stop <= destination.earlier.done}})

    before = len(results)
    again = run_all(parts, results, request, workers, lambda done, total: progress("copy", done, total))
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
        for file, pieces in found["fringes"].items():
            fringes.setdefault(int(file), []).extend(pieces)
        for file, rows in found["crcs"].items():
            crcs[int(file)] += [(name, row, crc) for name, row, crc in rows]
    for name, other in draft.aliases.items():
        digests[name] = digests[other]
    for i in range(len(draft.files)):
        _finish(draft, i, crcs[i], fringes.get(i, ()), digests, destination)
    nodes: dict[str, int] = {}
    for found in results.values():
        nodes[found["node"]] = nodes.get(found["node"], 0) + found["bytes"]
    facts = {
        "name": workers.name, "count": workers.count, "parts": len(parts), "filled_before": before, "again": again, "nodes": nodes,
    }  # fmt: skip
    return digests, facts


def _finish(
    draft: Draft,
    i: int,
    written: Sequence[Written],
    fringes: Iterable[tuple[int, str]],
    digests: dict[str, str],
    destination: Destination,
) -> None:
    """Write what no worker has written of a file, cut it to its length and make it durable."""
    f, tensors = draft.files[i], draft.checkpoint.tensors
    path = destination.path(f.name)
    head = f.first_bytes()
    end = len(head)
    try:
        with open(path, "r+b", buffering=0) as out:
            fd = out.fileno()
            write_at(fd, head, 0)
            for at, data in fringes:
                write_at(fd, b64decode(data), at)
            alone = framed_alone(draft, i)
            so_far: list[Written] = []
            for k, (name, row, crc) in enumerate(written):
                entry = tensors[name]
                c = entry.chunks
                if not alone and draft.before:
                    frame = draft.before(name, entry, row, so_far)
                    write_at(fd, frame, c.offset[row] - len(frame))
                end = c.offset[row] + c.length[row]
                so_far.append((name, row, crc))
                if draft.after and (not alone or k == len(written) - 1):
                    frame = draft.after(name, entry, row, so_far)
                    if not alone:
                        write_at(fd, frame, end)
                    end += len(frame)
            if draft.tail:
                tail = draft.tail(i, written, digests)
                write_at(fd, tail, end)
                end += len(tail)
            os.ftruncate(fd, end)
            os.fsync(fd)
    except OSError as e:
        raise write_error(e, path) from e
    f.size = end
