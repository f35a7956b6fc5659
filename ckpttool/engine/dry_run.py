"""What a conversion would do, in numbers: what `convert --dry-run` prints."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..options import OpenOptions, RunOptions, SizeRequest, WriteRequest
from ..storage import upload, urls
from .conversion import PYTHON_BYTES, choose_io_budget, compute_peak_memory
from .copy.tensor_digests import reporting
from .destination import can_fill_in_parallel, check_destination, normalise_destination
from .memory import compute_job_memory
from .opening import CheckpointPath, MergedCheckpoint
from .plan_files import save_plan
from .planning import Plan, make_dtype_chooser, plan_conversion, with_map_text
from .workers.coordinator import explain_one_process
from .workers.executors import describe_workers
from .workers.part_requests import describe_job

__all__ = ["ASSUMED_BYTES_PER_SECOND", "DryRun", "estimate_conversion"]

#: The rate of the time that is estimated: an assumption, of bytes read and written together. A local NVMe disk does
#: about twice that (docs/benchmarks.md), a disk on a network or a store less.
ASSUMED_BYTES_PER_SECOND = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What `convert` would do. Sizes are in bytes; words that `ConvertResult` has too mean the same there.

    `read_bytes` counts the source once and, where the result is read back, the result too. `memory_bytes` is the most
    for buffers and Python of all processes on this machine together; the index comes on top, in each. `workers` is None
    where one process does the work, else {"name", "count": None if the engine was not asked, "memory_bytes": of each}.
    `seconds` is reading and writing at `bytes_per_second`, which is assumed. `free_bytes` is None for an object store.
    `files` {"name", "bytes"}; an index that is made at the end (.metadata, pickles) is estimated, there and in
    `written_bytes`. `dropped` {"name", "bytes", "why"}, `changed` {"name", "how"}. `memory` is what a job of
    `world_size` ranks takes on the largest one, as a row of `JobMemory` with its "optimizer_is", None where the layout
    is not that of one strategy.
    """

    source: str
    destination: str
    layout_from: str
    layout_to: str
    world_size: int | None
    tensors: int
    source_bytes: int
    read_bytes: int
    written_bytes: int
    free_bytes: int | None
    memory_bytes: int
    workers: dict[str, Any] | None
    seconds: float
    bytes_per_second: int
    files: list[dict[str, Any]]
    dropped: list[dict[str, Any]]
    changed: list[dict[str, str]]
    notes: list[str]
    not_read: list[dict[str, Any]]
    memory: dict[str, Any] | None = None

    def to_json(self) -> dict[str, object]:
        """Convert to plain data; three of the fields also appear under the keys "from", "to" and "destination_bytes",
        which earlier versions had."""
        return {
            **asdict(self),
            "from": self.layout_from,
            "to": self.layout_to,
            "destination_bytes": self.written_bytes,
        }


def estimate_conversion(
    src: CheckpointPath,
    dst: str | os.PathLike[str],
    reading: OpenOptions,
    writing: WriteRequest,
    running: RunOptions,
    plan_file: str | None = None,
) -> DryRun:
    """Estimate what a conversion would read and write, its memory and its time; write nothing but the plan file.

    Args:
        reading, writing, running: the keywords of `convert`, as `split_keywords` returns them.
        plan_file: where to save the plan for `apply`; None to save none.

    Raises:
        CkpttoolError: whatever `convert` would refuse before it begins to copy, or the plan cannot be saved.
    """
    writing = with_map_text(writing)
    with reporting(running.progress), plan_conversion(src, dst, reading, writing) as planned:
        opened, draft = planned.opened, planned.draft
        free = check_destination(src, dst, planned, running.force)
        if plan_file is not None:
            save_plan(plan_file, planned, running)
        budget = choose_io_budget(running.max_memory_bytes, running.threads, opened.source)
        inputs = len(opened.parts) if reading.average is not None and isinstance(opened, MergedCheckpoint) else 1
        read = inputs * sum(t.nbytes for t in draft.sources.values()) + (draft.nbytes if running.verify else 0)
        read += (opened.checkpoint.quantized or {}).get("more_to_read", 0)
        each = compute_peak_memory(budget, opened.source)
        if urls.is_url(os.fspath(dst)):
            each += upload.SIZES.in_flight_bytes + upload.SIZES.buffered_bytes
        workers, memory, notes = _estimate_workers(src, os.fspath(dst), reading, writing, running, planned, each)
        return DryRun(
            source=opened.source.root,
            destination=os.fspath(dst),
            layout_from=opened.layout.name,
            layout_to=planned.target.name,
            world_size=draft.checkpoint.world_size,
            tensors=planned.held_tensors,
            source_bytes=opened.checkpoint.nbytes,
            read_bytes=read,
            written_bytes=draft.nbytes,
            free_bytes=free,
            memory_bytes=memory,
            workers=workers,
            seconds=round((read + draft.nbytes) / ASSUMED_BYTES_PER_SECOND, 3),
            bytes_per_second=ASSUMED_BYTES_PER_SECOND,
            files=[{"name": f.name, "bytes": f.size} for f in draft.files],
            dropped=[{"name": d.name, "bytes": d.nbytes, "why": d.why} for d in planned.account.dropped],
            changed=[{"name": n, "how": how} for n, how in planned.account.changed.items()],
            notes=[*opened.checkpoint.notes, *draft.notes, *notes, *opened.note_unproved("the conversion")],
            not_read=[r.to_json() for r in opened.checkpoint.unread],
            memory=_estimate_job_memory(planned),
        )


def _estimate_job_memory(planned: Plan) -> dict[str, object] | None:
    """Compute the memory of a job that loads the destination of a plan, as `DryRun.memory` describes it.

    None if the layout does not belong to one sharding strategy, the job uses tensor or expert parallelism, the world
    size is not known, or the checkpoint has no weights.
    """
    sharding, ranks = planned.target.sharding, planned.draft.checkpoint.world_size
    ckpt, writing = planned.opened.checkpoint, planned.writing
    mesh = getattr(writing.options, "sizes", None)
    if mesh is not None:  # what tp or ep divides is not in the formulas
        ranks = mesh.replica if mesh.tp == mesh.ep == 1 else None
    if sharding is None or not ranks or not any(t.component == "model" for t in ckpt.tensors.values()):
        return None
    cast = make_dtype_chooser(writing.dtype, writing.cast or {})
    tensors = {n: replace(t, dtype=cast(n, t.dtype)) for n, t in ckpt.tensors.items()}
    precision = {None: "saved", "fp32": "fp32"}.get(getattr(writing.options, "precision", None), "mixed")
    request = SizeRequest(fits=str(ranks), strategy=[sharding], precision=precision)
    found = compute_job_memory(replace(ckpt, tensors=tensors), request)
    return {**found.rows[0], "optimizer_is": found.optimizer}


def _estimate_workers(
    src: CheckpointPath,
    dst: str,
    reading: OpenOptions,
    writing: WriteRequest,
    running: RunOptions,
    planned: Plan,
    each: int,
) -> tuple[dict[str, object] | None, int, list[str]]:
    """Estimate which processes would fill the destination, and how much memory they take.

    Args:
        each: bytes of memory that one process takes.

    Returns:
        ({"name", "count", "memory_bytes": of each} of the workers, None where one process does it; the bytes of memory
            of all processes on this machine; a note, if workers were asked for and would not be used).
    """
    draft, source, spec = planned.draft, planned.opened.source, running.workers
    name, count, elsewhere = describe_workers(spec, draft.nbytes)
    if count == 1 and not elsewhere:
        return None, each, []
    job = describe_job(src, dst, reading, writing, "") if source.has_versions() else None
    dst = normalise_destination(dst)
    why = explain_one_process(draft, job, can_fill_in_parallel(dst, planned.target.is_file, draft), urls.is_url(dst))
    if why is not None:
        return None, each, [] if spec is None else [f"workers would not be used: {why}"]
    here = 0
    if count is not None and not elsewhere:
        here = PYTHON_BYTES + count * each  # the first is the process that the others are copies of
    return {"name": name, "count": count, "memory_bytes": each}, PYTHON_BYTES + here, []
