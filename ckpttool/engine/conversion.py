"""plan -> fill -> read back -> commit: one checkpoint becomes another.

`convert` asks the target layout for a draft, fills it, reads the result back from the disk, compares digests, and
commits it in one rename.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Unpack

from .. import layouts
from ..errors import CkpttoolError, Interrupted, UsageError, argument, get_change, note_change
from ..index.checkpoint import TensorEntry
from ..index.draft import Draft
from ..options import ConvertKeywords, OpenOptions, RunOptions, WriteRequest, list_keywords, split_keywords
from ..printable import Shown, count_noun
from ..progress import log_step
from ..storage import urls
from ..storage.buffers import IOBudget
from ..storage.destination_protocol import Destination
from ..storage.source import Source
from .copy.fill import describe_cast_losses, fill
from .copy.tensor_digests import reporting
from .destination import (
    normalise_destination,
    open_destination,
    refuse_destination,
    refuse_overlapping_destination,
    restore_old_destination,
)
from .discover.unread_files import human
from .logits.proof import LogitProof
from .opening import CheckpointPath
from .plan_files import with_absolute_paths
from .planning import Plan, plan_conversion, with_map_text
from .recorded import RECORD, encode_record, make_record
from .transform.quantizing import QuantizedSource, describe_quantisation_errors
from .verification import check_source_digests, read_back
from .workers import part_worker
from .workers.coordinator import explain_one_process, fill_with_workers, workers_for_reading
from .workers.executors import Workers, choose_process_count, open_workers, serve_if_worker
from .workers.part_requests import describe_job

__all__ = ["PYTHON_BYTES", "ConvertResult", "choose_io_budget", "compute_peak_memory", "convert", "run_conversion"]


@dataclass(repr=False)
class ConvertResult(Shown):
    """What a conversion did. Sizes are in bytes.

    Every tensor and value of the source is in `kept`, `changed` {name: how} or `dropped` (name, bytes, why); `added`
    are entries of the destination that the source does not have. `dropped` also lists files beside the checkpoint that
    were not read.
    """

    source: str
    destination: str
    layout_from: str
    layout_to: str
    world_size: int | None
    tensors: int
    source_bytes: int
    written_bytes: int
    digest: dict[str, str]
    verified: bool
    dropped: list[tuple[str, int, str]] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    changed: dict[str, str] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)  # what the layout says of the destination: Facts of an archive
    compared: int = 0  # tensors whose digest was expected, and is that
    not_read: list[dict[str, Any]] = field(default_factory=list)  # files of the source, as `Unread.to_json` has them
    workers: dict[str, Any] | None = None  # of a run with several workers: coordinator.fill_with_workers
    proof: dict[str, object] | None = (
        None  # that it computes the same: `LogitComparison.summarise`; None where not asked
    )

    def to_json(self) -> dict[str, object]:
        """Return the fields as plain data: "dropped" is a list of {"name", "bytes", "why"}, as in a dry run, and
        "changed" one of {"name", "how"}."""
        dropped = [{"name": name, "bytes": nbytes, "why": why} for name, nbytes, why in self.dropped]
        changed = [{"name": name, "how": how} for name, how in self.changed.items()]
        return {**asdict(self), "dropped": dropped, "changed": changed}

    def lines(self) -> Iterator[str]:
        """Yield lines of text: source and destination, layouts and sizes, what was dropped, notes, and the digests."""
        ranks = f" for {count_noun(self.world_size, 'rank')}" if self.world_size else ""
        equal = ", read back and equal" if self.verified else ", not read back"
        yield f"{self.source} -> {self.destination}"
        yield (
            f"{self.layout_from} -> {self.layout_to}{ranks}: {count_noun(self.tensors, 'tensor')}, "
            f"{human(self.written_bytes)}{equal}"
        )
        if self.dropped:
            yield f"left behind: {count_noun(len(self.dropped), 'entry', 'entries')}, first {self.dropped[0][0]}"
        for text in self.notes:
            yield f"note: {text}"
        for component, root in self.digest.items():
            yield f"digest {component:10s} blake3:{root}"


@list_keywords
def convert(src: CheckpointPath, dst: str | os.PathLike[str], **keywords: Unpack[ConvertKeywords]) -> ConvertResult:
    """Convert a checkpoint to another layout, world size or dtype, bit for bit.

    The destination appears complete or not at all. State that the target cannot hold, and state in files that the
    source's layout does not read, stops the conversion unless `drop` is set; `hf` stores only weights, so dropping the
    optimizer there is reported but not an error. Tensors that are copied are compared with the digests that were
    recorded for the source; tensors that are cast are read again for that.

    A run continues what an interrupted run of the same conversion has written, after reading it again; such a result is
    read back even if `verify` is not set. If an interrupted run had moved an old destination away, it is put back
    first.

    Args:
        src: a folder, a file, or the URL of one; never changed.
        dst: path or URL of the new checkpoint.
        to: layout to write ("dcp", "full", "hf", "zero3", "zero2", "zero1", "universal", "fsdp1",
            "torch_checkpointing", "megatron", "audit", "accelerate", "trainer", "lightning", "torchtitan"); None to
            infer it from the name of the destination (".pt", ".pth", ".bin" and ".ckpt" are full).
        options: options of that layout alone: an `HfOptions`, `ZeroOptions` (zero1 to zero3), `UniversalOptions`,
            `Fsdp1Options`, `ArchiveOptions` or `DirectoryOptions` (trainer, accelerate); `help` of these shows units
            and defaults.
        world_size: ranks of the job that will load it, at least 1; None for those of the source.
        only, drop_matching, rename: as `open`: a part of the source, and new names of parameters.
        weights: which weights are the model: the key of an average ("ema"), a file beside the checkpoint, or
            "schedule-free-x"; the result then has nothing else. None for the model as the trainer saved it.
        dtype: floating-point dtype of the weights ("bf16", "fp16", "fp32", "keep"); optimizer state keeps its own. None
            for "keep".
        cast: {glob of tensor names: dtype}, which overrides `dtype`; the last glob that matches counts.
        canonical_keys: dcp and full: write "model" and "optim" with plain FQNs, as torch's `get_state_dict` names them,
            "scheduler" and so on, instead of the keys of the source.
        keys: dcp and full: {component: the key under which a job looks for it}, as {"optim": "optimizer"}; a dot leads
            into a dict, {"model": "app.model"}. Below it, names are plain FQNs.
        drop: continue without state that the target cannot hold, and without state in files that were not read.
        force: replace an existing checkpoint completely.
        verify: read the result back from the disk and compare digests.
        source_layout, config, like, flat_layout, wrap, tag, allow_equal_ranks, allow_mixed_steps: as `open`. `config`,
            `like`, `flat_layout` and `wrap` also describe the model to the layout that is written.
        salvage: of a damaged source, write what is intact; ckpttool.json lists what is exact, rebuilt and missing.
        fill_from: with `salvage`: another step of the same run, from which lost entries are filled.
        apply: deltas of ckpttool, SkyRL, TRL or ModelExpress, or folders of them, to apply in this order. A delta of
            another program changes weights, and the result has nothing else.
        strip_wrappers: dcp and full: remove prefixes of wrappers ("_orig_mod.", "module.") from the source's own keys.
        vocab_size: rows of the embedding and the output layer, with their moments: added rows are zeros, and rows are
            cut only if nothing was learned in them.
        regroup: give the optimizer the param groups of the checkpoint that `like` names.
        dequantize: globs of names of quantised tensors (["*"]) to write as plain numbers: weights that are codes as the
            library that made them computes them, in `dtype` or the dtype of the model, and torchao's optimizers
            (["optim.*"]) as float32, the exact value of each code.
        quantize: "fp8-block": hf: write the weights of linear layers as fp8 codes with a scale for each block, as
            DeepSeek-V3 has them; the error against the source is in `about["quantized"]`.
        map: a name map: its file, or the name of one that comes with ckpttool ("torchtitan-llama3"), from one program's
            names and order of weights and optimizer to another's. None: if `to` is "hf", the map of the trainer that
            wrote the source, if there is one. "none" for no map.
        change: {glob of tensor names: function}: compute tensors. The function gets a `Page` of a tensor, usually some
            of its rows, and returns an array of the same shape; floating-point numbers are rounded to the dtype of the
            tensor. Each element is in one page, and a page may be computed again. Names are those that `open` shows, or
            those that `dequantize` makes of them.
        set_values: {glob of names of values: number, text or list}, such as {"optim.param_groups.*.lr": 1e-5}; the type
            is that of the old value.
        reset: components, and names or globs of entries, to leave out, so that the job initialises them.
        ignore_recorded_digests: do not compare the source with the digests in its ckpttool.json, or in itself.
        expected: {tensor: BLAKE3 in hex} that the source must have, instead of those in its ckpttool.json.
        max_memory_bytes: budget of all buffers of a process, in bytes; None for 150 MB, or 220 MB if the source is in a
            store.
        threads: number of threads that read, and of threads that write; in each worker, if there are several. With 1,
            one thread does both.
        workers: which processes fill the parts of the destination at the same time: a number of processes on this
            machine, "dask:ADDRESS", "ray:ADDRESS", "mpi", "package.module:factory", or a `concurrent.futures.Executor`.
            None to choose a number of processes by machine and size: one for less than 4 GB or on fewer than 4 cores.
        prove_logits: run source and result on the same tokens, layer by layer, as `compare` does, and commit the result
            only if they compute the same. In a store the result is committed before.
        progress: called with (what is done, bytes done, bytes in all).

    Raises:
        CkpttoolError: one of `ckpttool.errors`; the destination is as it was before, or the message says that it is the
            new one. The notes of the exception say what else happened, such as files that could not be removed.
    """
    return run_conversion(src, dst, *split_keywords(keywords))


def run_conversion(
    src: CheckpointPath,
    dst: str | os.PathLike[str],
    reading: OpenOptions,
    writing: WriteRequest,
    running: RunOptions,
    make_plan: Callable[[CheckpointPath, str, OpenOptions, WriteRequest], Plan] = plan_conversion,
) -> ConvertResult:
    """Convert a checkpoint: plan the conversion, fill the destination, read it back, and commit it, which makes it
    visible.

    Args:
        src, dst: as `convert`.
        reading, writing, running: the keywords of `convert`, as `split_keywords` returns them.
        make_plan: makes the plan from (src, dst, reading, writing); nothing has been written if it raises.

    Raises:
        CkpttoolError: whatever `convert` raises.
    """
    serve_if_worker(running.workers)
    note_change("")
    # what cannot be, before anything is opened
    writing, reading = with_map_text(writing), with_absolute_paths(reading)
    dst = normalise_destination(dst)
    refuse_overlapping_destination(src, dst)
    where = urls.display_path(dst)
    put_back = [] if urls.is_url(dst) else restore_old_destination(where)
    refuse_destination(dst, where, running.force)
    try:
        with reporting(running.progress), make_plan(src, dst, reading, writing) as planned:
            opened, draft, target = planned.opened, planned.draft, planned.target
            proof = LogitProof(src, reading, writing) if running.prove_logits else None
            if proof is not None:
                proof.check()
            budget = choose_io_budget(running.max_memory_bytes, running.threads, opened.source)
            destination = open_destination(dst, target.is_file, draft, planned.id, running.force)
            if writing.change:
                destination.resumable = False  # nobody knows whether the next run has the same functions
            with _clean_up_destination_on_error(destination):
                alone = writing.change or not opened.source.has_versions()
                job = None if alone else describe_job(src, dst, reading, writing, planned.id)
                filled = _fill_destination(planned, job, destination, writing, running, budget, reading.config, proof)
                filled = _commit_destination(planned, filled, dst, destination, running, budget, reading.config, proof)
            return _make_result(planned, filled, where, running, [*put_back, *destination.messages])
    except KeyboardInterrupt:
        e = Interrupted(f"interrupted. {get_change() or f'{where} is untouched, and nothing of it was written yet.'}")
        _add_notes(e, put_back)
        raise e from None
    except CkpttoolError as e:
        _add_notes(e, put_back)
        raise


def _add_notes(e: CkpttoolError, notes: Iterable[str]) -> None:
    """Attach each of these texts to an error, as an exception note."""
    for text in notes:
        e.add_note(text)


@contextmanager
def _clean_up_destination_on_error(destination: Destination) -> Iterator[None]:
    """If the block raises, keep what the next run can continue, remove the rest, and raise with notes on both.

    The error that is raised is the one that `Destination.fail` returns.
    """
    try:
        yield
    except BaseException as e:
        error = destination.fail(e)
        if isinstance(error, CkpttoolError):
            _add_notes(error, destination.messages)
        if error is e:
            raise
        raise error from (None if isinstance(e, KeyboardInterrupt) else e)


@dataclass(frozen=True)
class _Filled:
    """A destination that was filled, and not committed yet."""

    wanted: dict[str, TensorEntry]  # the source's tensors that it holds
    digests: dict[str, str]  # {tensor: BLAKE3 in hex}
    roots: dict[str, str]  # of the state and of its components
    facts: dict[str, Any] | None  # of a run with several workers: `fill_with_workers`
    done_before: int  # tensors that an interrupted run had written
    filled_before: int  # parts that workers of an interrupted run had filled
    readable: bool  # whether it could be read before the commit
    proof: dict[str, object] | None  # that it computes what the source does

    @property
    def continued(self) -> bool:
        """Tell whether an interrupted run had written a part of the destination."""
        return self.done_before > 0 or self.filled_before > 0


def _fill_destination(
    planned: Plan,
    job: dict[str, object] | None,
    destination: Destination,
    writing: WriteRequest,
    running: RunOptions,
    budget: IOBudget,
    config: str | None,
    proof: LogitProof | None,
) -> _Filled:
    """Write every byte of a draft and the record beside it; read it back if it can be read before the commit.

    Args:
        job: description of the conversion for workers (`describe_job`); None if one process has to do all of it.
        config: folder or id of a Hugging Face model, for reading back; None if none was given.
        proof: compares the logits of source and destination; None if that was not requested.

    Raises:
        CkpttoolError: the source is damaged or was changed, or the result differs from the draft.
    """
    opened, draft, target, progress = planned.opened, planned.draft, planned.target, running.progress
    ckpt, source = opened.checkpoint, opened.source
    with _start_workers(job, draft, destination, running) as workers:
        # every byte
        facts: dict[str, Any] | None = None
        parallel = destination.parallel
        if workers is None or job is None or parallel is None:
            digests = fill(draft, source, ckpt.files, ckpt.records, destination, progress, budget)
            planned.recheck()
        else:
            source.prove_all()  # what workers prove, this process does not know
            planned.recheck()
            digests, facts = fill_with_workers(planned, job, parallel, workers, progress, budget)
        # the source must still be what was planned, and what was recorded of it
        wanted, digests = check_source_digests(opened, draft, digests, writing, progress, budget)
        if ckpt.quantized is not None and isinstance(source, QuantizedSource):
            draft.summary["quantized"] = source.compute_errors(ckpt.quantized)
        written, path = make_record(planned, wanted, digests), destination.readable_path
        proven = None if proof is None or path is None else proof.prove(path, target, progress)
        if proven is not None:
            written["proof"] = proven
        if not target.is_file:
            destination.write_file(RECORD, encode_record(written))
        log_step("wrote %d tensors, %d bytes", len(wanted), draft.nbytes)
        filled = _Filled(
            wanted,
            digests,
            written["digest"],
            facts,
            destination.earlier.done,
            facts["filled_before"] if facts else 0,
            path is not None,
            proven,
        )
        # what an interrupted run has written, this one has not seen
        if path is not None and (running.verify or filled.continued):
            read_back(path, target, draft, digests, config, progress, budget, workers)
            log_step("read back from the disk: equal")
    return filled


def _commit_destination(
    planned: Plan,
    filled: _Filled,
    dst: str,
    destination: Destination,
    running: RunOptions,
    budget: IOBudget,
    config: str | None,
    proof: LogitProof | None,
) -> _Filled:
    """Commit a destination, which makes it visible. In an object store, read it back and compare its logits only then.

    Args:
        dst: its path or URL.
        config: folder or id of a Hugging Face model, for reading back; None if none was given.
        proof: compares the logits of source and destination; None if that was not requested.

    Returns:
        `filled`, with the result of the proof if it was made here.

    Raises:
        SourceChanged: the source changed during the conversion.
        Differs: the destination does not hold what was written.
        CkpttoolError: the destination cannot be written or read back.
    """
    planned.opened.source.assert_unchanged()
    with layouts.replacing(dst) if running.force else nullcontext():
        destination.commit()
    log_step("committed %s", urls.display_path(dst))
    if not filled.readable and running.verify:  # an object can be read when it is there, and not before
        with workers_for_reading(running.workers, dst, planned.draft.nbytes) as workers:
            read_back(dst, planned.target, planned.draft, filled.digests, config, running.progress, budget, workers)
        log_step("read back from the store: equal")
    if proof is not None and filled.proof is None:
        filled = replace(filled, proof=proof.prove(dst, planned.target, running.progress))
    return filled


def _make_result(planned: Plan, filled: _Filled, where: str, running: RunOptions, messages: list[str]) -> ConvertResult:
    """Make the result of a finished conversion, and log its notes.

    Args:
        where: path or URL of the destination, without credentials.
        messages: further notes.
    """
    opened, draft, account = planned.opened, planned.draft, planned.account
    ckpt = opened.checkpoint
    notes = [*ckpt.notes, *draft.notes, *describe_cast_losses(draft.lost), *messages]
    if "quantized" in draft.summary:
        notes.append(describe_quantisation_errors(draft.summary["quantized"]))
    if not opened.source.has_versions():
        notes.append("the server gives no versions of its files: a change while they were read would not be noticed")
    read_again = "" if running.verify or not filled.readable else ", so the result was read back"
    if filled.filled_before:
        notes.append(f"continued an interrupted run: {filled.filled_before} parts were filled{read_again}")
    elif filled.done_before:
        notes.append(
            f"continued an interrupted run: {filled.done_before} of {len(draft.checkpoint.tensors)} tensors were done "
            f"and were read again{read_again}"
        )
    for text in notes:
        log_step("note: %s", text)
    return ConvertResult(
        source=opened.source.root,
        destination=where,
        layout_from=opened.layout.name,
        layout_to=planned.target.name,
        world_size=draft.checkpoint.world_size,
        tensors=len(filled.wanted),
        source_bytes=ckpt.nbytes,
        written_bytes=draft.nbytes,
        digest=filled.roots,
        verified=running.verify or (filled.readable and filled.continued),
        dropped=[(d.name, d.nbytes, d.why) for d in account.dropped],
        kept=account.kept,
        changed=account.changed,
        added=account.added,
        notes=notes,
        about=draft.summary,
        compared=len(filled.wanted.keys() & ckpt.recorded.keys()),
        not_read=[r.to_json() for r in ckpt.unread],
        workers=filled.facts,
        proof=filled.proof,
    )


@contextmanager
def _start_workers(
    job: dict[str, object] | None, draft: Draft, destination: Destination, running: RunOptions
) -> Iterator[Workers | None]:
    """While the block runs, provide workers that fill a draft, or None if this process does all of it.

    If workers were requested and cannot be used, the reason is appended to `destination.messages`.

    Args:
        job: description of the conversion for workers (`describe_job`); None if one process has to do all of it.
    """
    spec = running.workers
    parallel = destination.parallel
    why = explain_one_process(draft, job, parallel is not None, parallel is not None and parallel.part_bytes > 0)
    alone = spec in (1, "1") or (spec is None and choose_process_count(draft.nbytes) == 1)
    if why is None and parallel is not None and not alone:
        why = parallel.why_alone()
    if why is not None:
        if not alone and spec is not None:
            destination.messages.append(f"workers were not used: {why}")
        yield None
    elif alone and not (parallel is not None and parallel.has_earlier_parts):
        yield None
    elif alone:
        from ..storage.threads import InThisThread

        try:
            yield Workers(InThisThread(), 1, False, "this process")
        finally:
            part_worker.close_caches()
    else:
        with open_workers(spec, draft.nbytes) as workers:
            yield workers


#: What Python and numpy take.
PYTHON_BYTES = 64 << 20


def _count_buffers(budget: IOBudget, source: Source) -> int:
    """Count the buffers that the readers of `source` and the writers hold at the same time."""
    return 9 + 2 * budget.writer_threads + 3 * budget.reader_threads(source)


def compute_peak_memory(budget: IOBudget, source: Source) -> int:
    """Return the most bytes of memory that a run takes besides the index: buffers, the source's own needs, and
    Python."""
    return PYTHON_BYTES + source.working_bytes + _count_buffers(budget, source) * budget.buffer_bytes


def choose_io_budget(max_memory_bytes: int | None, threads: int, source: Source) -> IOBudget:
    """Choose the size of buffers, so that all buffers, Python and numpy together fit into a budget of memory.

    Args:
        max_memory_bytes: the budget; None for buffers of the default size.
        threads: number of threads that read, and of threads that write.

    Raises:
        UsageError: `threads` is less than 1, or the buffers would be too small.
    """
    if threads < 1:
        raise UsageError(f"{argument('threads', threads)}: it must be at least 1.", code="CKPT0203")
    if max_memory_bytes is None:
        return IOBudget(threads)
    buffers = _count_buffers(IOBudget(threads), source)
    fixed = PYTHON_BYTES + source.working_bytes
    buffer = (max_memory_bytes - fixed) // buffers
    if buffer < 256 << 10:
        need = fixed + buffers * (256 << 10)
        raise UsageError(
            f"{argument('max_memory_bytes', max_memory_bytes)}: at least {-(-need // 10**6)} MB are needed.",
            code="CKPT0203",
        )
    return IOBudget(threads, min(16 << 20, buffer - buffer % 4096))
