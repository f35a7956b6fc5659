"""The coordinator of workers: it has a draft filled, or a checkpoint digested, by any number of them.

To fill a draft:

    cut the draft into parts; create the files
    have the parts filled by the workers of an executor (parts.py, part_worker.py)
    write what lies between the chunks of different workers: heads, tails, frames that need several CRCs

In a store, what lies between chunks is part of cells that no part has sent:

    cells = those of every object that no part has sent
    have them sent (`part_fill.send_cells`), with the bytes between chunks, which are known by now
    compare with what the store lists; what is missing or has been replaced is sent again

A part that is filled twice gets the same bytes twice. What was filled stands in `parts/` of the destination's folder,
durably; a store lists what was sent to it. When the coordinator dies, the same command goes on with what is missing,
with any engine and any number of workers.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from ...errors import RemoteError
from ...index.draft import Draft, Written
from ...storage.buffers import DEFAULT_BUDGET, IOBudget
from ...storage.destination_protocol import ParallelDestination, write_error
from ...storage.local_file import write_all_at
from ...storage.overlay import ComputedSource
from ...storage.source import Source
from ...storage.urls import make_absolute
from ..copy.fill import Progress, record_cast_losses
from ..copy.stream import Block, Reader
from ..copy.tensor_digests import tensor_digests
from ..copy.tensor_statistics import StatisticsCounter
from ..opening import CheckpointPath, OpenCheckpoint, OpenOptions
from ..plan_files import with_absolute_paths
from ..planning import Plan
from . import part_worker
from .executors import Workers, WorkersSpec, choose_process_count, open_workers
from .part_fill import explain_one_process_for_cells, make_bytes_between_chunks, worker_writes_frames
from .part_requests import Json, compute_index_id
from .parts import WorkPart, choose_least_part_bytes, cut_draft, cut_tensors, run_parts

__all__ = ["digest_with_workers", "explain_one_process", "fill_with_workers", "workers_for_reading"]

_ROUNDS = 3
_Cell = tuple[int, int, int, list[tuple[int, int]], list[tuple[int, str]]]  # (file, cell, ...) of part_fill.send_cells


def fill_with_workers(
    planned: Plan,
    job: Json,
    destination: ParallelDestination,
    workers: Workers,
    progress: Progress,
    budget: IOBudget,
) -> tuple[dict[str, str], Json]:
    """Have workers write every file of a draft.

    Args:
        planned: the conversion.
        job: the conversion as workers get it (`describe_job`).
        destination: where the files are written.
        progress: called with ("copy" or "send", bytes done, bytes in all).
        budget: memory and threads of each worker.

    Returns:
        ({tensor: BLAKE3 hex digest of its bytes in the destination}, facts). The facts are the "name" and "count" of
            the workers, the number of "parts", how many of them an earlier run had "filled_before", how many were
            submitted "again", and "nodes", {machine: bytes that it filled}.

    Raises:
        Corrupt, SourceChanged: the source is damaged, or was written to meanwhile.
        NoSpace, CkpttoolError: the destination could not be written, or no worker could fill a part.
    """
    # cut the draft, and let workers write the files, or in a store those that have chunks
    draft, opened = planned.draft, planned.opened
    cells = destination.part_bytes
    parts = cut_draft(draft, cells)
    names = list(draft.checkpoint.tensors)
    touched = [_list_files_of_tensors(draft, names[part.first : part.stop]) for part in parts]
    shared = set[str]().union(*touched) if cells else {f.name for f in draft.files}
    tree = destination.share({f.name: f.size for f in draft.files if f.name in shared})
    results = {k: found for k, found in destination.filled_parts.items() if k < len(parts)}
    asked = {"job": job, "tree": tree, "threads": budget.threads, "buffer_bytes": budget.buffer_bytes}

    def request(number: int) -> str:
        """Make the request to fill the part of this number, as JSON."""
        part = parts[number]
        mine = _select_objects(tree, touched[number]) if cells else tree
        return json.dumps(
            {"fill": {**asked, "tree": mine, "part": part, "there": part.stop <= destination.earlier.done}}
        )

    before = len(results)
    again = _prepare_and_run_parts(
        opened, parts, results, request, workers, lambda done, total: progress("copy", done, total)
    )
    destination.stop_sharing()
    _check_shared_records(opened, parts, results, budget)

    digests, crcs, fringes = _merge_answers(draft, opened.source, [results[part.number] for part in parts])

    # what lies between the chunks of several workers
    if cells:
        sent: dict[str, dict[int, str]] = {name: {} for name in shared}
        _add_sent_cells(sent, results)
        before = sum(found["kept"] == sum(map(len, found["cells"].values())) > 0 for found in results.values())
        again += _send_remaining_cells(draft, asked, crcs, digests, sent, destination, workers, progress)
    else:
        for i in range(len(draft.files)):
            _finish_file(draft, i, crcs[i], fringes.get(i, ()), digests, destination)
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


def _merge_answers(
    draft: Draft, source: Source, answers: Iterable[Json]
) -> tuple[dict[str, str], dict[int, list[Written]], dict[int, list[tuple[int, str]]]]:
    """Put together what workers answered that filled parts of a draft, and record what casts lost and what was
    measured.

    Args:
        answers: in the order of the draft.

    Returns:
        ({tensor: digest}, {number of a file: the chunks that were written to it}, {number of a file: (offset, base64)
            of the bytes that are still to be written to it}).
    """
    digests: dict[str, str] = {}
    crcs: dict[int, list[Written]] = {i: [] for i in range(len(draft.files))}
    fringes: dict[int, list[tuple[int, str]]] = {}
    for found in answers:
        digests |= found["digests"]
        record_cast_losses(draft, found.get("lost", {}))
        if isinstance(source, ComputedSource):
            source.measured |= found.get("measured", {})
        for file, pieces in found["fringes"].items():
            fringes.setdefault(int(file), []).extend(pieces)
        for file, rows in found["crcs"].items():
            crcs[int(file)] += [(name, row, crc) for name, row, crc in rows]
    for name, other in draft.aliases.items():
        digests[name] = digests[other]
    return digests, crcs, fringes


def explain_one_process(draft: Draft, job: Json | None, sharable: bool, in_store: bool) -> str | None:
    """Return the reason why only one process can fill a draft; None if several can.

    Args:
        job: the conversion as workers get it (`describe_job`); None where they cannot plan it.
        sharable: whether several processes can write to its destination.
        in_store: whether the destination is an object store.
    """
    if not sharable:
        return "only S3 takes the parts of an object from several processes"
    if any(f.coded for f in draft.files):
        return "an archive is written front to back by one process"
    if job is None:
        return (
            "a checkpoint that is merged, salvaged or changed by a function, and one whose server tells no versions, "
            "is written by one process"
        )
    return explain_one_process_for_cells(draft) if in_store else None


def _list_files_of_tensors(draft: Draft, names: Sequence[str]) -> set[str]:
    """Return the names of the files that the tensors `names` are written to."""
    tensors = draft.checkpoint.tensors
    numbers = set[int]().union(*(tensors[n].chunks.file for n in names if n not in draft.aliases))
    return {draft.files[i].name for i in numbers}


def _finish_file(
    draft: Draft,
    i: int,
    written: Sequence[Written],
    fringes: Iterable[tuple[int, str]],
    digests: dict[str, str],
    destination: ParallelDestination,
) -> None:
    """Write the bytes of a file that workers left to this process, truncate it to its size and fsync it.

    Args:
        i: the number of the file in the draft.
        written: its chunks, in order.
        fringes: (offset, base64) of bytes at the ends of parts, which workers did not write.
        digests: {tensor: BLAKE3 hex digest}.

    Raises:
        CkpttoolError: the file cannot be written.
    """
    f = draft.files[i]
    path = destination.path(f.name)
    alone = worker_writes_frames(draft, i)
    pieces, f.size = make_bytes_between_chunks(draft, i, written, digests, lambda a, b: not alone)
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


# --------------------------------------------------------------------------------------------------- objects of a store


def _select_objects(tree: Mapping[str, Any], names: set[str]) -> Json:
    """Return the description of a destination with only some of its objects.

    Args:
        tree: the destination in a store, as `ParallelDestination.share` returns it; {"objects": {name: object}, ...}.
        names: the names of the objects to keep.
    """
    return {**tree, "objects": {name: found for name, found in tree["objects"].items() if name in names}}


def _add_sent_cells(sent: Mapping[str, dict[int, str]], results: Mapping[int, Mapping[str, Any]]) -> None:
    """Add the cells (parts of objects in a store) that workers have sent to `sent`.

    Args:
        sent: {file: {cell: ETag}}.
        results: {number of a part: the worker's answer}.
    """
    for found in results.values():
        for name, etags in found["cells"].items():
            sent[name].update((int(n), etag) for n, etag in etags.items())


def _send_remaining_cells(
    draft: Draft,
    asked: Mapping[str, object],
    written: Mapping[int, Sequence[Written]],
    digests: dict[str, str],
    sent: dict[str, dict[int, str]],
    destination: ParallelDestination,
    workers: Workers,
    progress: Progress,
) -> int:
    """Send every cell (part of an object in a store) that is not in `sent`, and every file without chunks, until the
    store lists all.

    Args:
        asked: what all requests to workers have in common.
        written: {file: its chunks, in order}.
        digests: {tensor: BLAKE3 in hex}.
        sent: {file: {cell: ETag}}, to which is added.

    Returns:
        How often something was sent again.

    Raises:
        CkpttoolError: what a worker raised.
        RemoteError: another run sends other parts of the same objects.
    """
    for i, f in enumerate(draft.files):
        if f.name not in sent:
            pieces, f.size = make_bytes_between_chunks(draft, i, (), digests, lambda a, b: True)
            destination.write_file(f.name, b"".join(data for _, data in pieces))
    # send what is missing, until the store lists every cell as it was sent
    again = 0
    for _ in range(_ROUNDS):
        cells = _list_cells_to_send(draft, written, digests, sent, destination.part_bytes)
        again += _send_cells_with_workers(draft, asked, cells, sent, workers, progress)
        lost = destination.find_missing_cells(sent, {f.name: f.size for f in draft.files})
        if not lost:
            return again
        for name, number in lost:
            sent[name].pop(number, None)
        again += len(lost)
    raise RemoteError(
        f"{destination.location}: parts that were sent have been replaced or lost. Another run sends to the same "
        "place; run the command again when it has ended.",
        code="CKPT0908",
    )


def _send_cells_with_workers(
    draft: Draft,
    asked: Mapping[str, Any],
    cells: Sequence[_Cell],
    sent: Mapping[str, dict[int, str]],
    workers: Workers,
    progress: Progress,
) -> int:
    """Have workers send cells (parts of objects in a store), and add them to `sent`.

    Args:
        asked: what all requests to workers have in common.
        cells: the cells, as `send_cells` takes them.
        sent: {file: {cell: ETag}}.

    Returns:
        How often some were submitted again.

    Raises:
        CkpttoolError: what a worker raised, or no worker could send some.
    """
    parts = _group_cells(cells)

    def request(number: int) -> str:
        chosen = cells[parts[number].first : parts[number].stop]
        tree = _select_objects(asked["tree"], {draft.files[cell[0]].name for cell in chosen})
        return json.dumps({"cells": {**asked, "tree": tree, "cells": chosen}}, separators=(",", ":"))

    results: dict[int, Json] = {}
    again = run_parts(
        parts, results, request, workers, lambda done, total: progress("send", done, total), part_worker.run
    )
    _add_sent_cells(sent, results)
    return again


def _group_cells(cells: Sequence[_Cell]) -> list[WorkPart]:
    """Group consecutive cells into parts of at least `choose_least_part_bytes` bytes, except for the last part; `first`
    and `stop` of a part are indices into `cells`."""
    least = choose_least_part_bytes(sum(cell[2] for cell in cells))
    out: list[WorkPart] = []
    first = size = 0
    for k, cell in enumerate(cells):
        size += cell[2]
        if size >= least or k == len(cells) - 1:
            out.append(WorkPart(len(out), first, k + 1, size))
            first, size = k + 1, 0
    return out


def _list_cells_to_send(
    draft: Draft,
    written: Mapping[int, Sequence[Written]],
    digests: dict[str, str],
    sent: Mapping[str, Mapping[int, str]],
    cell_bytes: int,
) -> list[_Cell]:
    """List the cells that are not in `sent`, as `send_cells` takes them, and set the sizes of the draft's files.

    Args:
        written: {file: its chunks, in order}.
        digests: {tensor: BLAKE3 hex digest}.
        sent: {file: {cell: ETag}}; files that are not in it are skipped.
        cell_bytes: the size of every cell but the last of a file.
    """
    tensors = draft.checkpoint.tensors
    index = {name: i for i, name in enumerate(tensors)}
    out: list[_Cell] = []
    for i, f in enumerate(draft.files):
        if f.name not in sent:
            continue
        done = sent[f.name]

        def needed(a: int, b: int, done: Mapping[int, str] = done) -> bool:
            """Tell whether a cell that meets bytes [a, b) of the file is still to be sent."""
            return any(n not in done for n in range(a // cell_bytes, -(-b // cell_bytes)))

        pieces, f.size = make_bytes_between_chunks(draft, i, written[i], digests, needed)
        # for each cell that is left: the chunks that meet it, and its share of the bytes between chunks
        todo = [n for n in range(max(1, -(-f.size // cell_bytes))) if n not in done]
        rows: list[list[tuple[int, int]]] = [[] for _ in todo]
        literals: list[list[tuple[int, str]]] = [[] for _ in todo]
        for name, row, _crc in written[i]:
            c = tensors[name].chunks
            if c.length[row]:
                a, b = c.offset[row], c.offset[row] + c.length[row]
                for k in range(bisect_left(todo, a // cell_bytes), bisect_left(todo, -(-b // cell_bytes))):
                    rows[k].append((index[name], row))
        for at, data in pieces:
            end = at + len(data)
            for k in range(bisect_left(todo, at // cell_bytes), bisect_left(todo, -(-end // cell_bytes))):
                a, b = max(at, todo[k] * cell_bytes), min(end, (todo[k] + 1) * cell_bytes)
                literals[k].append((a, b64encode(data[a - at : b - at]).decode()))
        for k, n in enumerate(todo):
            out.append((i, n, min(cell_bytes, f.size - n * cell_bytes), rows[k], literals[k]))
    return out


# -------------------------------------------------------------------------------------------------- digests of tensors


@contextmanager
def workers_for_reading(spec: WorkersSpec, path: object, nbytes: int) -> Iterator[Workers | None]:
    """Provide workers that read a checkpoint in the `with` block; None where this process reads it alone.

    Args:
        spec: the workers as the user named them; None for the usual number of local processes.
        path: the checkpoint as the user gave it. Workers open it by its path; if it is no path, this process reads it.
        nbytes: the bytes of the checkpoint.

    Raises:
        UsageError, RemoteError, MissingPackage: the workers cannot be used.
    """
    if (
        spec in (1, "1")
        or (spec is None and choose_process_count(nbytes) == 1)
        or not isinstance(path, (str, os.PathLike))
    ):
        yield None
    else:
        with open_workers(spec, nbytes) as workers:
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
    statistics: StatisticsCounter | None = None,
) -> dict[str, str]:
    """Read a checkpoint completely, check its CRC32s, and return {tensor: BLAKE3 hex digest of its canonical bytes}.

    Args:
        opened: the checkpoint, located.
        path, options: what it was opened with; workers open it again.
        workers: None for this process alone.
        progress: called with (`what`, bytes done, bytes in all).
        seen: called with every block, if this process reads them; ignored if `statistics` is given.
        statistics: collects the statistics of all tensors; None for no statistics.

    Raises:
        Corrupt, SourceChanged: it is damaged, or was written to meanwhile.
        CkpttoolError: no worker could read a part.
    """
    ckpt = opened.checkpoint
    seen = seen if statistics is None else statistics.add
    if workers is None or not isinstance(path, (str, os.PathLike)):
        found = tensor_digests(
            ckpt.tensors, opened.source, ckpt.files, ckpt.records, progress, what, None, budget, seen
        )
        opened.recheck()
        return found
    opened.source.prove_all()  # what workers prove, this process does not know
    opened.recheck()
    parts = cut_tensors(ckpt.tensors)
    same = {
        "open": {
            "path": make_absolute(os.fspath(path)),
            "options": asdict(with_absolute_paths(options)),
            "index": compute_index_id(ckpt, opened.source),
        },
        "statistics": None if statistics is None else statistics.exponents,
        "threads": budget.threads,
        "buffer_bytes": budget.buffer_bytes,
    }

    def request(number: int) -> str:
        return json.dumps({"digest": {**same, "first": parts[number].first, "stop": parts[number].stop}})

    results: dict[int, Json] = {}
    _prepare_and_run_parts(opened, parts, results, request, workers, lambda done, total: progress(what, done, total))
    _check_shared_records(opened, parts, results, budget)
    if statistics is not None:
        for answer in results.values():
            statistics.absorb(answer["statistics"])
    return {name: digest for part in parts for name, digest in results[part.number]["digests"].items()}


# -------------------------------------------------------------------------------------------------------------- both


def _prepare_and_run_parts(
    opened: OpenCheckpoint,
    parts: Sequence[WorkPart],
    results: dict[int, Json],
    request: Callable[[int], str],
    workers: Workers,
    progress: Callable[[int, int], None],
) -> int:
    """Have workers do all parts, after one process has opened the checkpoint for the local workers that are copied from
    it; a remote checkpoint is opened by each worker.

    Args:
        results: {number of a part: answer}; parts in it are done, the others are added.
        request: returns the request to a worker for the number of a part.
        progress: called with (bytes done, bytes in all).

    Returns:
        How often a part was submitted again.

    Raises:
        CkpttoolError: what a worker raised, or no worker could do a part.
    """
    todo = [p.number for p in parts if p.number not in results]
    if not opened.source.is_remote and len(todo) > 1:
        workers.prepare(part_worker.prepare, request(todo[0]))
    return run_parts(parts, results, request, workers, progress, part_worker.run)


def _check_shared_records(
    opened: OpenCheckpoint, parts: Sequence[WorkPart], results: Mapping[int, Json], budget: IOBudget
) -> None:
    """Check the CRC32s of the source's records that several parts have read in part, after reading the missing rest of
    them.

    Args:
        results: {number of a part: the answer of a worker}, of all parts.

    Raises:
        Corrupt: bytes do not have the CRC32 that the source carries.
    """
    ckpt = opened.checkpoint
    reader = Reader(opened.source, ckpt.files, ckpt.records, budget)
    for part in parts:
        reader.absorb(results[part.number]["seen"])
    reader.finish()
