"""What every rank does: build the job, load the checkpoint into it, fingerprint it, probe it, train some steps.

    run_job(settings, probe_file, status) -> Trace on rank 0, None elsewhere

The state is fingerprinted before the first forward pass, and the probe comes before the first update. After the first
step, the job is saved, overwritten with garbage and loaded again (`round_trip`), and training continues. A job that is
trained from its start loads nothing: it takes some steps, is saved, and goes on.

`python -m ckpttool.resume.ranks.worker FOLDER PARENT` is what the command starts: it reads the settings of all runs
from FOLDER/runs.json and leaves trace-<i>.json, or error-<rank>.json, and beat-<rank>.json while it runs. It ends with
PARENT.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, NoReturn

from ...engine.opening import OpenCheckpoint
from ...engine.workers.local_worker import die_with_parent
from ...errors import CkpttoolError, CommandLine, DoesNotFit, name_flags
from ...index.checkpoint import Checkpoint, Value
from ...index.fqns import split_extra_state
from ...live.collectives import do_all_ranks_meet, gather_objects
from ...live.job_optimizers import is_machine_error, list_optimizers, make_options_restorer
from ...live.load import load_opened
from ...live.plain_values import is_lossless_cast, to_torch_dtype
from ...live.shared_index import open_index_together
from ...printable import count_noun
from ...storage.buffers import read_peak_memory
from ..compare import misfit
from ..job.build import Job, build_job
from ..job.origin import OriginLoad, plan_origin_load
from ..job.round_trip import round_trip
from ..job.saving import save_job
from ..job.training import (
    OptimizerStepError,
    measure_memory,
    measure_probe,
    measure_recorded_probe,
    train_step,
)
from ..job.user_job import check_batches_fit_model
from ..job.watchdog import Beat, beat_to_json, enter_stage, publishing_beats, report_progress, write_stages_to
from ..request import RunSettings, Status, read_settings
from ..text import parse_fqn
from ..trace import batches, fingerprint
from ..trace.live_facts import (
    choose_collective_device,
    collect_named_state,
    describe_environment,
    get_dtype_name,
    has_dropout,
    list_dropouts,
    list_own_load_functions,
    list_tied_names,
    named_parameters,
    read_held_values,
    read_model_config,
    read_one_element_values,
    read_optimizer_numbers,
    to_plain_param_groups,
)
from ..trace.model import LIVE, OF_BUILD, Trace, trace_to_json
from ..trace.numerics import name_missing_kernel, use_numerics, use_recorded_buffers
from ..trace.recorded_state import gather_side_state
from ..trace.records import LoadCostRecord, RoundTripRecord
from ..trace.side_state import collect_side_state
from ..trace.state_after import read_state_after, sketch_buffers, step_scheduler_ahead
from .torchrun import exit_process, is_lost_peer_error, joined_job

__all__ = ["run_job"]

#: Seconds in which all ranks come to the error of an optimizer, if all do.
_PATIENCE = 2.5

#: The components of a checkpoint that are loaded into the job; what else it holds is compared as it is in the files.
_IN_JOB = ("model", "optim")


def run_job(settings: RunSettings, probe_file: str, status: Status) -> Trace | None:
    """Make one run on this rank, and return its trace on rank 0; None on other ranks. A collective.

    The run loads a checkpoint into the job, or trains the job from its start if `settings.fresh_steps` is not 0. Then
    it trains `settings.steps` steps.

    Args:
        settings: of the run, the same on every rank.
        probe_file: path of the .npy file to which the logits of the probe are written.
        status: called with a line of text about what is being done.

    Raises:
        CkpttoolError: the job cannot be built, or a rank cannot read its part. That the checkpoint does not fit the
            model is no error but a result (`Trace.failed`).
    """
    import torch
    import torch.distributed as dist

    def begin(stage: str) -> None:
        status(stage)
        enter_stage(stage)

    torch.manual_seed(settings.seed)
    use_numerics(settings.deterministic, settings.numerics)
    out = (_train_fresh_job if settings.fresh_steps else _resume_from_checkpoint)(settings, probe_file, status, begin)
    # the next run of this launch needs the memory
    gc.collect()
    if settings.device == "cuda":
        torch.cuda.empty_cache()
    return out if dist.get_rank() == 0 else None


def _train_fresh_job(settings: RunSettings, probe_file: str, status: Status, begin: Status) -> Trace:
    """Train a job from its start, save it, and train on; return the trace, whose `state` is that at the save. A
    collective.

    Args:
        settings: of the run: `fresh_steps` steps come before the save, and `steps` steps after it; if `source` is "",
            nothing is saved.
        probe_file: path of the .npy file to which the logits of the probe are written.
        status: called with a line of text about each step.
        begin: called with the name of each stage that begins, such as "saving the job".
    """
    import torch

    begin("building the model")
    job = build_job(settings, None)
    out = _make_trace(settings, job)
    out.source, out.layout = "the job, from its start", LIVE
    rows, out.sequence = _open_rows(settings, job)
    if settings.keep_dropout:  # ranks draw different numbers, as in a training
        torch.manual_seed(settings.seed + job.rank)
    last = settings.fresh_steps
    with name_missing_kernel():
        for step in range(1, last + 1):
            try:
                out.steps.append(train_step(job, rows, step, replace(settings, start=0, steps=last)))
            except OptimizerStepError as e:
                raise e.error from None
            status(f"step {step} of {last} before the save: loss {out.steps[-1].loss:.6g}")
    begin("looking at what the job holds")
    apart = _fingerprint_job(job, True, out)
    held = gather_side_state(
        {} if job.scheduler is None else {"scheduler": job.scheduler}, choose_collective_device(job.model), job.model
    )
    for name, found in held.items():
        setattr(out, name, found)
    # a save has one rank's copy of these
    out.variants |= fingerprint.fingerprint_each_rank(apart)
    out.scalars = {n: x for n, x in out.scalars.items() if n not in apart}
    saved: RoundTripRecord = {}
    if settings.source:
        begin("saving the job")
        saved = save_job(job, settings, last)
    out.after = {"loaded": sketch_buffers(job.model)}
    return replace(_probe_and_train(job, rows, settings, probe_file, out, status, begin), roundtrip=saved)


def _resume_from_checkpoint(settings: RunSettings, probe_file: str, status: Status, begin: Status) -> Trace:
    """Load the checkpoint `settings.source` into a job, and train some steps; return the trace. A collective.

    If the checkpoint cannot be loaded, nothing is trained, and `Trace.failed` says why.

    Args:
        settings: of the run.
        probe_file: path of the .npy file to which the logits of the probe are written.
        status: called with a line of text about the progress of the load, and about each step.
        begin: called with the name of each stage that begins, such as "building the model".
    """
    enter_stage(f"reading the index of {settings.source}")
    opened, problem = open_index_together(settings.source, settings.reading)
    with opened:
        begin("building the model")
        job = build_job(settings, opened)
        job.notes.extend(use_recorded_buffers(job.model, settings.buffers))
        out = _make_trace(settings, job)
        _add_checkpoint_facts(opened, out)
        rows, out.sequence = _open_rows(settings, job)
        trained = _has_optimizer_state(job, opened, out)
        begin(f"loading {settings.source}")
        out.failed = _load_checkpoint(settings, job, opened, problem, trained, out, status)
        if out.failed is not None:
            tensors = opened.checkpoint.tensors
            out.state = {n: (t.dtype, t.shape, "") for n, t in tensors.items() if t.component in _IN_JOB}
            return out
        # before the first forward pass
        begin("comparing what the job holds with the files")
        _fingerprint_job_and_files(job, trained, opened, settings, out, status)
        _restore_random_states(settings, opened, out)
        out.after = {"loaded": sketch_buffers(job.model)}
    return _probe_and_train(job, rows, settings, probe_file, out, status, begin)


def _probe_and_train(
    job: Job, rows: batches.Rows, settings: RunSettings, probe_file: str, out: Trace, status: Status, begin: Status
) -> Trace:
    """Compute a job's logits on the probe, train the steps after `settings.start`, and return the trace. A collective.

    Args:
        job: the job, with the state that it starts from.
        rows: function from sample index to row.
        settings: of the run.
        probe_file: path of the .npy file to which the logits of the probe are written.
        out: the trace so far, which gets the results and is returned.
        status: called with a line of text about each step.
        begin: called with the name of the stage that begins.
    """
    begin("probing")
    with name_missing_kernel():
        measure_probe(job, rows, settings, probe_file, out)
        measure_recorded_probe(job, settings, out)
        for k in range(settings.steps):
            try:
                out.steps.append(train_step(job, rows, settings.start + 1 + k, settings))
            except OptimizerStepError as e:
                # where it is the same on all ranks, options or state of the checkpoint may explain it
                if is_lost_peer_error(e.error) or not do_all_ranks_meet(_PATIENCE):
                    raise e.error from None
                out.stopped = str(e)
                break
            status(f"step {k + 1} of {settings.steps}: loss {out.steps[-1].loss:.6g}")
            if k == 0:
                round_trip(job, settings, out, status)
        if out.stopped is None:
            _record_final_state(job, settings, out)
    if any(gather_objects(job.random)):
        out.environment["random"] = "restored" if settings.keep_dropout else "seeded"
    out.final, _ = fingerprint.fingerprint_tensors(
        collect_named_state(job.model, job.optimizer), choose_collective_device(job.model)
    )
    return out


def _make_trace(settings: RunSettings, job: Job) -> Trace:
    """Return a new trace with what a run knows before it loads a checkpoint: its settings, its environment, and facts
    about the model."""
    import torch.distributed as dist

    environment = describe_environment(settings.device)
    environment["deterministic"] = settings.deterministic
    environment["compile"] = settings.compile
    environment["scheduler_waits"] = job.scheduler_waits
    environment["own_loading"] = list_own_load_functions(job.model, list_optimizers(job.optimizer))
    environment["dropout_probabilities"] = sorted({p for _, _, p in list_dropouts(job.model) if p > 0})
    return Trace(
        source=settings.source,
        start=settings.start,
        world_size=dist.get_world_size(),
        mesh=settings.mesh,
        device=settings.device,
        dtype=settings.dtype,
        seed=settings.seed,
        data=settings.data if job.data is None else OF_BUILD,
        global_batch=settings.global_batch,
        micro_batch=settings.micro_batch,
        clip=settings.clip,
        dropout=has_dropout(job.model),
        parameters=sum(p.numel() for p in job.model.parameters()),
        tied=list_tied_names(job.model),
        config=read_model_config(job.model),
        notes=[*job.notes],
        environment=environment,
        dropout_off=job.dropout_off,
        recipe=settings.job or settings.config,
        scheduler=None if job.scheduler is None else type(job.scheduler).__name__,
    )


def _add_checkpoint_facts(opened: OpenCheckpoint, out: Trace) -> None:
    """Add facts about a checkpoint's files to the trace `out`: their layout, notes, side state and param groups, and
    the files that the layout does not read."""
    ckpt = opened.checkpoint
    out.layout = opened.layout.name
    out.notes = [*ckpt.notes, *out.notes]
    out.unread = [(u.name, u.component) for u in ckpt.unread if u.component]
    # as stored; what the job holds of extra states is in `held`
    side = collect_side_state({v.path: v.data for v in ckpt.values.values() if v.path[0] != "optim"})
    out.values, out.others = side.values, side.others
    out.stored_groups = _list_stored_options(ckpt)


def _list_stored_options(ckpt: Checkpoint) -> list[dict[str, list[str]]]:
    """List the param groups of a checkpoint, each with the names of its "options" and the FQNs of its "params"."""
    out: dict[int, dict[str, list[str]]] = {}
    for entry in (*ckpt.values.values(), *ckpt.tensors.values()):
        if entry.option is not None:
            group = out.setdefault(entry.group, {"options": [], "params": []})
            if entry.option != "params":
                group["options"] = list(dict.fromkeys([*group["options"], entry.option]))
            elif isinstance(entry, Value) and isinstance(entry.data, list):
                group["params"] = [str(n) for n in entry.data]
    return [group for _, group in sorted(out.items())]


def _has_optimizer_state(job: Job, opened: OpenCheckpoint, out: Trace) -> bool:
    """Tell whether the job has an optimizer, and the checkpoint state for it; if not, add a note to the trace `out`."""
    ckpt = opened.checkpoint
    entries = [t.path for t in ckpt.tensors.values()] + [v.path for v in ckpt.values.values()]
    if job.optimizer is not None and any(path[0] == "optim" for path in entries):
        return True
    aside = any(r.component == "optim" for r in ckpt.unread)
    lacks = "what was read has no optimizer state" if aside else "the checkpoint has no optimizer state"
    out.notes.append(f"{lacks}; the optimizer of the job starts from zero")
    return False


def _open_rows(settings: RunSettings, job: Job) -> tuple[batches.Rows, int | None]:
    """Open the data of the job, and return (function from sample index to row, number of tokens in a row).

    A row is {"input_ids": numpy array, ...}. The number of tokens is None if rows have no "input_ids".

    Raises:
        UsageError: the data cannot be read, or is not what the model takes.
    """
    if job.data is not None:
        rows = batches.wrap_user_data(job.data)
        ids = rows(0).get("input_ids")
        length = None if ids is None else ids.size
    else:
        rows, length = batches.open_data(
            settings.data,
            seed=settings.seed,
            sequence=settings.sequence,
            vocabulary=job.vocabulary,
            tokenizer=settings.config,
        )
    if settings.job is not None:
        check_batches_fit_model(job.model, job.own_loss, rows, job.vocabulary)
    return rows, length


# ------------------------------------------------------------------------------------------------------- the checkpoint


class _RateReporter:
    """Tells, now and then, how much of this rank's part is read."""

    def __init__(self, status: Status) -> None:
        """Begin to measure the time; `status` will be called with lines of text about the progress."""
        self.status, self.began, self.said = status, time.monotonic(), time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Report progress to the watchdog, and at most every two seconds a line to the status.

        Args:
            what: the work that is being done, such as "load".
            done: bytes that this rank has read so far.
            total: bytes that this rank reads in all.
        """
        report_progress()
        now = time.monotonic()
        if now - self.said < 2 or not done:
            return
        self.said = now
        rate = done / (now - self.began)
        self.status(
            f"{what}: {done / 1e9:.1f} of {total / 1e9:.1f} GB of each rank, {rate / 1e9:.2f} GB/s, "
            f"{(total - done) / rate:.0f} s left"
        )


class _LoadCost:
    """Measures what a load costs this rank, from now on: time, bytes, and the most memory that it had
    meanwhile. `bytes` are those of tensors that this rank read, to be set by the caller."""

    def __init__(self, device: str) -> None:
        """Begin to measure, and reset the peaks of memory; `device` is "cuda" or "cpu"."""
        self.bytes = 0
        self._on_gpu, self._began = device == "cuda", time.monotonic()
        # on Linux; elsewhere the peak is that of the whole process
        with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as f:
            f.write("5")
        if self._on_gpu:
            import torch

            torch.cuda.reset_peak_memory_stats()

    def measure(self) -> LoadCostRecord:
        """Return what the load has cost this rank since this object was made.

        Returns:
            {"seconds": time, "bytes": as the caller set them in `self.bytes`, "host_bytes": peak of host memory,
            "device_bytes": peak of GPU memory, None on the CPU}.
        """
        device = None
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
            device = torch.cuda.max_memory_allocated()
        seconds = time.monotonic() - self._began
        return {"seconds": seconds, "bytes": self.bytes, "host_bytes": read_peak_memory(), "device_bytes": device}


def _load_checkpoint(
    settings: RunSettings,
    job: Job,
    opened: OpenCheckpoint,
    refused: CkpttoolError | None,
    trained: bool,
    out: Trace,
    status: Status,
) -> str | None:
    """Load the checkpoint into the job; return why that failed, the same text on every rank, or None. A collective.

    Args:
        settings: of the run.
        job: the job as it was built.
        opened: the checkpoint.
        refused: the error that opening the checkpoint gave; None for none.
        trained: also load optimizer and scheduler.
        out: the trace, which gets the costs of the load, notes, and what does not fit.
        status: called with the progress of the load.
    """
    problem = None if refused is None else str(refused)
    fits = not isinstance(refused, DoesNotFit)
    cost = _LoadCost(settings.device)

    def load_by_ckpttool() -> None:
        """Load all of the checkpoint by ckpttool's loader, and keep the reason if that fails."""
        nonlocal problem, fits
        try:
            optimizer, scheduler = (job.optimizer, job.scheduler) if trained else (None, None)
            loaded = load_opened(
                opened, settings.source, job.model, optimizer, scheduler, _RateReporter(status), time.monotonic()
            )
            out.notes.extend(loaded.notes)
            cost.bytes = loaded.bytes
        except CkpttoolError as e:
            problem, fits = " ".join(str(e).split()), not isinstance(e, DoesNotFit)
        except (RuntimeError, ValueError, KeyError) as e:  # torch's own, where it sets the state of a live job
            if is_machine_error(e):
                raise
            problem = f"{type(e).__name__}: {e}"

    if problem is None:
        parts = ["model", *(("optim",) if trained else ()), *(("scheduler",) if trained and job.scheduler else ())]
        origin = OriginLoad(lacking=dict.fromkeys(parts, ""))
        if settings.loader == "origin":
            origin = plan_origin_load(job, opened, parts, settings.scratch)
            out.unwitnessed = origin.lacking
        restore = make_options_restorer(g for o in list_optimizers(job.optimizer) for g in o.param_groups)
        if origin.partial or origin.lacking:
            load_by_ckpttool()
        if origin.readers and not any(gather_objects(problem is not None)):
            enter_stage(f"loading {settings.source} by {', '.join(dict.fromkeys(origin.readers.values()))}")
            if why := _try_origin_readers(origin):
                restore()
                out.unwitnessed = dict.fromkeys(parts, why)
                load_by_ckpttool()
                origin = OriginLoad()
        out.loaders = {p: origin.readers.get(p, "ckpttool") for p in parts}
    every: list[tuple[str | None, LoadCostRecord]] = gather_objects((problem, cost.measure()))
    problems = [said for said, _ in every]
    out.loads = [{"rank": rank, **measured} for rank, (_, measured) in enumerate(every)]
    out.load_seconds = max(m["seconds"] for m in out.loads)
    out.load_bytes = sum(m["bytes"] for m in out.loads)
    if not all(gather_objects(fits)):
        stored = {t.local_name: t.shape for t in opened.checkpoint.tensors.values() if t.component == "model"}
        live = {n.removeprefix("model."): tuple(t.shape) for n, t in collect_named_state(job.model).items()}
        # extra states are loaded by the modules, whatever they are
        stored, live = ({n: s for n, s in x.items() if split_extra_state(n) is None} for x in (stored, live))
        out.misfit = misfit.compare_names_and_shapes(stored, live, out.tied)
    errors = {p: r for r, p in reversed(list(enumerate(problems))) if p is not None}
    if not errors:
        return None
    text, rank = next(iter(errors.items()))
    text = "; ".join(" ".join(line.split()).rstrip(".") for line in text.replace(":\n", ": ").splitlines())
    return text if len(errors) == 1 and all(p is not None for p in problems) else f"rank {rank}: {text}"


def _try_origin_readers(origin: OriginLoad) -> str | None:
    """Load a checkpoint with the readers of the program that wrote it (`origin`). A collective.

    Returns:
        Why a reader failed, on the lowest rank where one did; None if none failed on any rank.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    why = None
    try:
        origin.load()
    except CheckpointException as e:  # hides the cause
        why = "; ".join(f"{type(x).__name__}: {x}" for x, _ in e.failures.values())
    except Exception as e:
        why = f"{type(e).__name__}: {e}"
    return next((" ".join(text.split())[:300] for text in gather_objects(why) if text is not None), None)


def _fingerprint_job(job: Job, trained: bool, out: Trace) -> dict[str, Any]:
    """Put the fingerprints of the job's state into the trace `out`. A collective.

    Args:
        job: the live job.
        trained: whether the state of optimizer and scheduler is included.
        out: the trace.

    Returns:
        {canonical name: tensor} of the tensors whose copies differ between ranks.
    """
    device = choose_collective_device(job.model)
    tensors = collect_named_state(job.model, job.optimizer if trained else None)
    prints, apart = fingerprint.fingerprint_tensors(tensors, device)
    out.state = {n: (get_dtype_name(t), tuple(t.shape), prints[n]) for n, t in tensors.items()}
    out.scalars = read_one_element_values(tensors) | (
        read_optimizer_numbers(job.model, job.optimizer) if trained else {}
    )
    low = {n: p for n, p in named_parameters(job.model).items() if p.is_floating_point() and p.element_size() == 2}
    out.quanta = fingerprint.compute_global_norms(low, device, fingerprint.compute_16bit_spacing)
    out.groups = [] if job.optimizer is None else to_plain_param_groups(job.model, job.optimizer)
    out.held = read_held_values(job.model, job.scheduler if trained else None)
    return {n: tensors[n] for n in apart}


def _fingerprint_job_and_files(
    job: Job, trained: bool, opened: OpenCheckpoint, settings: RunSettings, out: Trace, status: Status
) -> None:
    """Put the fingerprints of the job's state, and of the checkpoint's files, into the trace `out`. A collective.

    Args:
        job: the job after loading.
        trained: whether the optimizer's state was loaded, too.
        opened: the checkpoint.
        settings: of the run.
        out: the trace.
        status: called with the progress of the second reading of the files.
    """
    import torch
    import torch.distributed as dist

    device = choose_collective_device(job.model)
    tensors = collect_named_state(job.model, job.optimizer if trained else None)
    if apart := list(_fingerprint_job(job, trained, out)):
        out.notes.append(
            f"copies on several ranks are not equal, of {count_noun(len(apart), 'tensor')}, first {apart[0]}"
        )
        out.environment["copies_differ"] = apart
    tied = {n for group in out.tied for n in group}
    used = _IN_JOB if trained else ("model",)
    rest = [
        n
        for n, t in opened.locate().tensors.items()
        if t.component not in _IN_JOB or (t.component in used and n not in tensors and parse_fqn(n) not in tied)
    ]
    ranks = dist.get_rank(), dist.get_world_size()
    marks = fingerprint.fingerprint_files(opened, rest, *ranks, device)
    out.others |= {n: (opened.checkpoint.tensors[n].dtype, opened.checkpoint.tensors[n].shape, marks[n]) for n in rest}
    for dtype in settings.dtypes:
        others = {n: t for n, t in tensors.items() if t.is_floating_point() and get_dtype_name(t) != dtype}
        out.rounded[dtype], _ = fingerprint.fingerprint_tensors(others, device, getattr(torch, dtype))
    entries = opened.locate().tensors
    other = [n for n, t in entries.items() if n in tensors and t.dtype != get_dtype_name(tensors[n])]
    if settings.reread or settings.dtypes:
        marks = fingerprint.fingerprint_files(opened, other, *ranks, device)
        out.stored_as = {n: (entries[n].dtype, marks[n]) for n in other}
    if settings.reread:
        lossy = [n for n in other if not is_lossless_cast(entries[n].dtype, get_dtype_name(tensors[n]))]
        for dtype in sorted({entries[n].dtype for n in lossy}):
            # what the job holds may still be every digit of it, such as a step that was saved as an integer
            again = {n: tensors[n] for n in lossy if entries[n].dtype == dtype}
            back, _ = fingerprint.fingerprint_tensors(again, device, to_torch_dtype(dtype))
            lossy = [n for n in lossy if back.get(n) != marks[n]]
        out.environment["rounded"] = lossy
        if other:
            kinds = f"{entries[other[0]].dtype} in the files and {get_dtype_name(tensors[other[0]])} in the job"
            out.notes.append(f"of another dtype: {count_noun(len(other), 'tensor')}, first {other[0]}: {kinds}")
        common = [n for n in entries if n in tensors]
        in_job = {n: tensors[n].dtype for n in other}
        out.stored = fingerprint.fingerprint_files(opened, common, *ranks, device, _RateReporter(status), in_job)


def _record_final_state(job: Job, settings: RunSettings, out: Trace) -> None:
    """Put the memory of each rank, the state after the last step, and the learning rates that the scheduler gives from
    then on into the trace `out`. A collective.

    The job cannot be used afterwards, since its scheduler is stepped ahead.
    """
    enter_stage("reading what the job holds after the last step")
    out.memory = measure_memory(job, settings)
    out.after |= read_state_after(job.model, job.optimizer, settings.start + settings.steps)
    if job.scheduler_waits:
        out.schedule = {"skipped": f"{type(job.scheduler).__name__} needs a metric for a step"}
    elif job.scheduler is not None:
        enter_stage("stepping the scheduler ahead")
        groups = job.optimizer.param_groups
        out.schedule = step_scheduler_ahead(job.scheduler, groups, settings.start + settings.steps, report_progress)


def _restore_random_states(settings: RunSettings, opened: OpenCheckpoint, out: Trace) -> None:
    """Restore this rank's random states if dropout is kept and the checkpoint has the states of exactly as many ranks.

    Whether it has them goes into `out.environment["rng_restored"]`; if not, a note is added.
    """
    if not settings.keep_dropout:
        return
    import torch
    import torch.distributed as dist

    states: dict[str, dict[tuple[str, ...], str]] = {}  # {rank: {the rest of the path: name of a state}}
    for n, t in opened.locate().tensors.items():
        if t.component == "rng" and t.dtype == "uint8":
            states.setdefault(str(t.path[1]), {})[tuple(map(str, t.path[2:]))] = n
    # of its GPU a rank has one state, or a list of all GPUs that it sees (torch.cuda.get_rng_state_all)
    setters: list[tuple[set[tuple[str, ...]], Callable[[torch.Tensor], None]]]
    setters = [({("torch",), ("cpu",)}, torch.set_rng_state)]
    if settings.device == "cuda":
        setters.append(({("cuda",), ("cuda", str(torch.cuda.current_device()))}, torch.cuda.set_rng_state))
    own = states.get(str(dist.get_rank()), {})
    kept = states.keys() == {str(r) for r in range(dist.get_world_size())}
    complete = all(gather_objects(kept and all(keys & own.keys() for keys, _ in setters)))
    out.environment["rng_restored"] = complete
    if not complete:
        lacking = "of GPUs" if kept and setters[0][0] & own.keys() else "for this world size"
        out.notes.append(f"dropout is active, and the checkpoint has no generators {lacking}")
        return
    for keys, set_state in setters:
        for key in keys & own.keys():
            set_state(torch.frombuffer(bytearray(opened.read(own[key])), dtype=torch.uint8))


# ---------------------------------------------------------------------------------------------------------- a launch


def main(folder: str) -> None:
    """Make the runs of a launch as one of its ranks, and end the process: with status 0, or with 1 after an error.

    Args:
        folder: path of the launch's folder, which all ranks share: the settings of the runs are read from its
            runs.json, and traces, errors and signs of life are written into it.
    """
    faulthandler.enable()
    rank = int(os.environ["RANK"])
    runs = read_settings(os.path.join(folder, "runs.json"))

    def status(text: str) -> None:
        if rank == 0:
            with open(os.path.join(folder, "events"), "a", encoding="utf-8") as f:
                f.write(text.replace("\n", " ") + "\n")

    write_stages_to(os.path.join(folder, f"stage-{rank}"))

    def publish(beat: Beat) -> None:
        _write_atomically(folder, f"beat-{rank}.json", beat_to_json(beat))

    with (
        nullcontext() if runs[0].flags is None else name_flags(CommandLine(runs[0].flags)),
        open(os.path.join(folder, f"stack-{rank}"), "a", encoding="utf-8") as stacks,
        publishing_beats(rank, runs[0].timeout, publish, stacks),
    ):
        try:
            with joined_job(runs[0].device, runs[0].deterministic, runs[0].timeout, os.path.join(folder, "meeting")):
                try:
                    for i, settings in enumerate(runs):
                        trace = run_job(settings, os.path.join(folder, f"probe-{i}.npy"), status)
                        if trace is not None:
                            _write_atomically(folder, f"trace-{i}.json", json.dumps(trace_to_json(trace), default=str))
                except BaseException as e:
                    _exit_with_error(folder, rank, e)  # before the job is left, which may wait for a rank that is gone
        except BaseException as e:
            _exit_with_error(folder, rank, e)
    exit_process(0)


def _exit_with_error(folder: str, rank: int, e: BaseException) -> NoReturn:
    """Write this rank's error `e` to a file for the launching process, and end this process with status 1."""
    import traceback

    word: Mapping[str, object] = {
        "rank": rank,
        "known": isinstance(e, CkpttoolError),
        "lost_peer": is_lost_peer_error(e),
        "kind": e.kind if isinstance(e, CkpttoolError) else type(e).__name__,
        "code": e.code if isinstance(e, CkpttoolError) else None,
        "text": str(e) or type(e).__name__,
        "time": time.time(),
        "traceback": traceback.format_exc(),
    }
    _write_atomically(folder, f"error-{rank}.json", json.dumps(word))
    exit_process(1)


def _write_atomically(folder: str, name: str, text: str) -> None:
    """Write a text to the file `name` of a folder, under another name first, so that nobody reads half of it."""
    temporary = os.path.join(folder, f".{name}")
    with open(temporary, "w", encoding="utf-8") as f:
        f.write(text)
    os.replace(temporary, os.path.join(folder, name))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        die_with_parent(int(sys.argv[2]))
    main(sys.argv[1])
