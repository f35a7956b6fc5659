"""The frames of an archive, read by any number of workers: the coordinator's side, and what a worker runs.

    {"path", "archive", "first", "stop", "jobs"}              frames [first, stop)
    what `ArchiveHasher.hash_part` returns, or {"error": ...}

A part is a run of members, since the SHA-256 of a member needs its bytes in order; frames begin and end with members
(archive_plan.py). A worker opens the archive for itself, and refuses one with another manifest.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from typing import Any

from ..engine.copy.fill import Progress
from ..engine.workers.executors import Workers
from ..engine.workers.part_requests import encode_error
from ..engine.workers.part_worker import SingleEntryCache
from ..engine.workers.parts import WorkPart, choose_least_part_bytes, run_parts
from ..errors import CkpttoolError
from ..layouts import place
from ..storage.source import closed_on_error
from ..storage.urls import make_absolute
from .archive import Archive
from .archive_hashing import ArchiveHasher

__all__ = ["hash_requested_part", "hash_with_workers", "split_archive_into_parts"]


def split_archive_into_parts(archive: Archive) -> list[WorkPart]:
    """Return the parts of an archive for workers: runs of frames that begin and end at boundaries of members (files in
    the archive)."""
    table = archive.table
    least = choose_least_part_bytes(table.logical_size)
    out: list[WorkPart] = []
    first = at = 0
    for member in archive.plan.members:
        if member.end - at >= least and member.end < table.logical_size:
            stop = bisect_left(table.starts, member.end)
            out.append(WorkPart(len(out), first, stop, member.end - at))
            first, at = stop, member.end
    out.append(WorkPart(len(out), first, len(table.starts), table.logical_size - at))
    return out


def hash_with_workers(
    hasher: ArchiveHasher, path: str, workers: Workers, jobs: int, progress: Progress
) -> dict[str, Any]:
    """Have workers read and hash every frame of an archive, and add the results to `hasher`.

    Args:
        hasher: the hasher of an archive whose structure is intact.
        path: path or URL at which the workers open the archive.
        workers: the workers.
        jobs: threads of each worker.
        progress: called with ("verify", bytes done, bytes in all).

    Returns:
        {"name", "count": of the workers, "parts": number of parts, "again": how many of them had to be submitted
        again}.

    Raises:
        SourceChanged, CkpttoolError: what a worker raised, or that no worker could read a part.
    """
    archive = hasher.archive
    assert archive is not None
    parts = split_archive_into_parts(archive)
    same = {"path": make_absolute(path), "archive": _identify_archive(archive), "jobs": jobs}

    def request(number: int) -> str:
        """Return the request for the part with this number, as JSON."""
        return json.dumps({**same, "first": parts[number].first, "stop": parts[number].stop})

    results: dict[int, dict[str, object]] = {}
    again = run_parts(
        parts, results, request, workers, lambda done, total: progress("verify", done, total), hash_requested_part
    )
    for part in parts:
        hasher.add_part_result(results[part.number])
    return {"name": workers.name, "count": workers.count, "parts": len(parts), "again": again}


def hash_requested_part(request: str) -> str:
    """Read and hash the frames that a request names; this runs in a worker.

    Args:
        request: {"path", "archive": as `_identify_archive` returns it, "jobs": threads, "first", "stop": frames} as
            JSON.

    Returns:
        The result of `ArchiveHasher.hash_part` as JSON, or, if a CkpttoolError was raised, that error as JSON.
    """
    asked = json.loads(request)
    try:
        with _opened.answer(json.dumps([asked["path"], asked["archive"]])) as archive:
            found = ArchiveHasher(archive.base, archive.file, archive).hash_part(
                asked["first"], asked["stop"], asked["jobs"]
            )
            archive.assert_unchanged()
        return json.dumps(found, separators=(",", ":"))
    except CkpttoolError as e:
        return encode_error(e)


def _identify_archive(archive: Archive) -> list[object]:
    """Return what identifies an archive on any machine: the hash of its manifest, and the identity of its file (size,
    time or version) without the device."""
    return [archive.manifest_sha256, *archive.identities()[archive.file][1:]]


def _open_requested_archive(asked: str) -> Archive:
    """Open the archive that a request names.

    Args:
        asked: [its path, what `_identify_archive` must return for it] as JSON.

    Raises:
        CkpttoolError: it cannot be opened, or this worker finds another one at that path.
    """
    path, wanted = json.loads(asked)
    where = place(path)
    with closed_on_error([where.source]):
        archive = Archive(where.source, where.file or "")
        if _identify_archive(archive) != wanted:
            raise CkpttoolError(
                f"this worker finds another archive at {path} than the process that asked: all machines must see the "
                "same file under this path.",
                code="CKPT0102",
            )
    return archive


_opened = SingleEntryCache(_open_requested_archive)
