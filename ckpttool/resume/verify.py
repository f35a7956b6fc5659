"""resume_verify: from a request to a Report, in five stages.

    request (request.py) -> plan of the runs (plan.py) -> runs (ranks/) -> judgement (compare/judge.py) -> Report

On one node the ranks are started here, once for each world size, and leave their traces in a folder. Where RANK and
WORLD_SIZE are set, by torchrun or srun, every rank calls this, the runs happen in the job that already exists, and rank
0 judges. Where nothing but updates and numbers of later steps fails, the noise of the job is measured unasked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple, Unpack

from ..engine.opening import open_checkpoint
from ..errors import CkpttoolError, RankLost, Unsupported, UsageError, argument
from ..extras import require_packages
from ..options import list_keywords
from .compare.bounds import PROFILES
from .compare.judge import MEASURING, Judgement, judge_runs
from .compare.verdict import Cause, Report
from .job.user_job import check_config_exists, check_job_source
from .job.watchdog import enter_stage, get_current_stage
from .plan import RunPlanner, choose_device, choose_mesh, choose_other_mesh
from .ranks.interpreter import check_interpreter
from .ranks.launch import launch_runs
from .ranks.torchrun import is_lost_peer_error, is_rank_of_job, joined_job, watched_job
from .ranks.workspace import temporary_workspace
from .request import (
    RunSettings,
    Status,
    VerifyKeywords,
    VerifyRequest,
    ignore_status,
    make_request,
)
from .trace.batches import check_data_exists
from .trace.model import Trace
from .trace.numerics import NO_KERNEL

__all__ = ["resume_verify", "run_verify_request"]


class Outcome(NamedTuple):
    """What was run, the trace of each run, and the judgement on them."""

    runs: dict[str, RunSettings]
    traces: dict[str, Trace]
    judgement: Judgement


@partial(list_keywords, others=(VerifyRequest,))
def resume_verify(source: str | os.PathLike[str] | None = None, **keywords: Unpack[VerifyKeywords]) -> Report | None:
    """Load a checkpoint into a live FSDP2 job, train some steps, and judge whether training goes on as before.

    Examples:
        >>> report = ckpttool.resume_verify("runs/new", against="runs/old", config="org/model")  # doctest: +SKIP
        >>> report.word, report.exit_code  # doctest: +SKIP
        ('pass', 0)

    Args:
        source: the checkpoint, in any layout; None with `fresh`.
        against: the original checkpoint, in its own layout. It runs with the same batches and is the reference.
        against_python: the program of another Python, with a torch, a transformers and a trainer of its own, which runs
            the reference. Without `against`, the reference is `source` itself. It needs what ckpttool needs, and not
            ckpttool.
        reference: the lines that a `Recorder` wrote in the original job. Without this and `against`, only the state and
            the run itself are checked.
        reference_loader: who loads `against` into its job. "origin": the reader of the program that wrote it, as far as
            there is one here (torch's dcp.load and torch.load, safetensors, DeepSpeed's conversion), so that a fault of
            ckpttool's loader is no fault of both sides; the report says who loaded what. "ckpttool": ckpttool's own.
        fresh: take no checkpoint, but train the job from its start, save it, go on, and hold runs that resume from the
            save against that. The job saves by the `save(folder, step)` that build() returns in its dict, or else by
            dcp.save.
        fresh_steps: how many steps to train before that save.
        resume_world_size: ranks of the second run that resumes; by default one shard fewer, or two of one.
        config: folder or id of the Hugging Face model; the folder of the checkpoint if it has a config.json.
        job: "module.py:build", a function of yours that returns the model, and perhaps optimizer, scheduler, data and
            loss. Each rank runs it, with the folder of module.py first on sys.path.
        world_size: ranks of the job; by default one for each GPU, or one.
        mesh: "dp_replicate=R,dp_shard=S,tp=T"; all ranks in dp_shard by default.
        against_world_size: ranks of the run of `against`; those of the candidate by default.
        steps: how many steps to train after loading.
        start_step: the step of the checkpoint, if it does not say.
        data: "synthetic", or a .npy or .jsonl file of token rows.
        seed: of the synthetic data.
        sequence, global_batch, micro_batch, dtype, clip: tokens of a row, rows of a step, rows of a forward pass,
            "fp32" or "bf16", bound of gradient clipping. By default those of `reference`, if it records them.
        device: "auto", "cuda" or "cpu".
        profile: "strict", "standard" or "relaxed": which differences pass. By default "strict", with `against_python`
            "standard".
        calibrate: measure the noise of this very job by running the reference twice, the second time with other
            micro-batches, and widen bounds accordingly.
        keep_dropout: leave dropout on, and restore the random states of the ranks.
        activation_checkpointing, compile, cpu_offload: how the job computes.
        module_prefix: what the names of the checkpoint begin with and those of the job's model do not: "net." of a
            Lightning module that keeps its model in self.net.
        deterministic: use deterministic kernels and collectives. By default as the job of `reference` did, else True
            where torch has such kernels for all that the model needs.
        reread: read the files a second time and compare them with what the job holds.
        round_trip: save after the first step, load again and compare.
        updates: measure the update of every tensor, for which each step keeps a copy of this rank's parameters.
        scratch: a folder that all ranks share, for that save and the one of `fresh`; a temporary one if all ranks are
            on this machine.
        timeout: seconds without any progress of a rank, after which the job ends, with the name of the silent rank and
            its stack. A rank makes progress when it begins a stage or a micro-batch, or reads or writes 1 MiB.
            Collectives wait for a minute longer. Where torchrun or srun started this process, it ends with exit code
            13.
        peak_tflops: peak of one device, for MFU; by default that of dense bf16, if the device is known.
        min_mfu, max_reserved_gib, max_step_seconds, max_load_seconds: gates, which fail the report.
        source_layout, like, flat_layout, wrap, tag, allow_equal_ranks, allow_mixed_steps: as for `open`. All but
            `source_layout` apply to `against` too.
        status: called with a line about what is being done.

    Returns:
        The report; None on ranks other than the first, in a job that torchrun or srun started.

    Raises:
        RankLost: a rank was killed, or made no progress for `timeout` seconds. CkpttoolError: nothing could be judged.
            A training that does not go on as before is not an error: the report says so.
    """
    return run_verify_request(make_request(source, keywords))


def run_verify_request(request: VerifyRequest) -> Report | None:
    """Run a request and return its report; None on ranks other than the first, in a job that torchrun or srun started.

    Raises:
        RankLost: a rank was killed, or made no progress for `timeout` seconds. CkpttoolError: nothing could be judged.
    """
    check_request(request)
    as_rank = is_rank_of_job()
    device, gpus = choose_device(request.device)
    mesh = choose_mesh(request.world_size, request.mesh, as_rank, device, gpus)
    other = choose_other_mesh(mesh, request.resume_world_size, device, gpus) if request.fresh and not as_rank else None
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_workspace())
        if request.against_python is not None:
            python, job = os.fspath(request.against_python), request.job
            check_interpreter(python, device, folder, request.timeout, transformers=job is None)
        # ranks on several machines share no folder unless they are given one
        shared = None if as_rank else folder
        planner = RunPlanner(request, device, mesh, partial(_make_scratch_folder, request, stack, shared), other)
        outcome = run_as_rank(planner, folder) if as_rank else run_in_launches(planner, folder)
        return None if outcome is None else make_report(request, planner.recorded, outcome)


def check_request(request: VerifyRequest) -> None:
    """Refuse a request that can be seen to be wrong before a checkpoint is read.

    Raises:
        UsageError: an argument makes no sense. MissingPackage: a package is needed that is not installed.
    """
    require_packages("resume-verify", "torch", *(() if request.job else ("transformers",)))
    check_fresh_request(request)
    if request.against is not None and request.reference is not None:
        raise UsageError(
            f"{argument('against')} and {argument('reference')} are two references; give one.", code="CKPT0204"
        )
    if request.against_python is not None:
        _check_against_python(request)
    if request.strictness not in PROFILES:
        raise UsageError(
            f"{argument('profile', request.strictness)}: choose one of {', '.join(PROFILES)}.", code="CKPT0203"
        )
    if request.reference_loader not in ("origin", "ckpttool"):
        raise UsageError(
            f"{argument('reference_loader', request.reference_loader)}: choose origin or ckpttool.", code="CKPT0203"
        )
    if request.steps < 1:
        raise UsageError(f"{argument('steps', request.steps)}: must be at least 1.", code="CKPT0203")
    if request.timeout < 1:
        raise UsageError(f"{argument('timeout', request.timeout)}: must be at least 1 second.", code="CKPT0203")
    if request.scratch is not None and not os.path.isdir(request.scratch):
        raise UsageError(
            f"{argument('scratch', os.fspath(request.scratch))}: this folder does not exist.", code="CKPT0212"
        )
    if request.job is not None:
        check_job_source(request.job)
    elif request.reading.config is not None:  # with a job it may be the folder of a tokenizer alone
        check_config_exists(request.reading.config)
    check_data_exists(request.data)


def _check_against_python(request: VerifyRequest) -> None:
    """Refuse `against_python` with a recorded reference, or in a job that torchrun or srun started.

    Raises:
        UsageError: one of these is so.
    """
    if request.reference is not None:
        raise UsageError(
            f"{argument('reference')} was recorded in its own Python, so {argument('against_python')} would run "
            "nothing. Leave one of the two out.",
            code="CKPT0204",
        )
    if is_rank_of_job():
        raise UsageError(
            f"{argument('against_python')}: torchrun or srun started this job, whose ranks are all of one Python. "
            "Start ckpttool without them, on one machine; or record the job in the other Python with "
            f"ckpttool.Recorder, and pass {argument('reference')}.",
            code="CKPT0204",
        )


def check_fresh_request(request: VerifyRequest) -> None:
    """Refuse a request that has both a checkpoint and `fresh`, or neither, or options that do not go with that.

    Raises:
        UsageError: one of these is so, or `fresh` lacks an option that it needs.
    """
    fresh = argument("fresh", True)
    if not request.fresh:
        if not os.fspath(request.source):
            raise UsageError(
                f"there is no checkpoint to verify. Give one, or {fresh} to train a job from its start.",
                code="CKPT0204",
            )
        if request.resume_world_size is not None:
            raise UsageError(
                f"{argument('resume_world_size', request.resume_world_size)} goes with {fresh}.", code="CKPT0204"
            )
        return
    if os.fspath(request.source):
        raise UsageError(
            f"{fresh} trains the job from its start and resumes from what it saves; it does not take a checkpoint "
            f"({os.fspath(request.source)}).",
            code="CKPT0204",
        )
    for name in ("against", "against_python", "reference", "start_step", "against_world_size"):
        if (value := getattr(request, name)) is not None:
            raise UsageError(
                f"{argument(name, value)} does not go with {fresh}, whose own run is the reference.", code="CKPT0204"
            )
    if request.job is None:
        raise UsageError(
            f"{fresh} needs {argument('job')}: only your own job says what to train, and how.", code="CKPT0204"
        )
    if request.fresh_steps < 1:
        raise UsageError(f"{argument('fresh_steps', request.fresh_steps)}: must be at least 1.", code="CKPT0203")
    if request.resume_world_size is not None and is_rank_of_job():
        raise UsageError(
            f"{argument('resume_world_size', request.resume_world_size)}: the ranks of this job were started by "
            "torchrun or srun. To resume at another world size, start ckpttool without, on one machine.",
            code="CKPT0209",
        )


def _make_scratch_folder(request: VerifyRequest, stack: ExitStack, shared: str | None) -> str | None:
    """Return the path of a folder for the save of the round trip or of a fresh job.

    Args:
        request: if it has a `scratch` and such a save, a new folder is made in `scratch`.
        stack: removes the new folder when the stack is closed.
        shared: path of a folder that all ranks share, or None; it is returned if no folder is made.
    """
    if request.scratch is None or not (request.round_trip or request.fresh):
        return shared
    return stack.enter_context(temporary_workspace(os.fspath(request.scratch)))


# ------------------------------------------------------------------------------------------------------------ the runs


def run_in_launches(planner: RunPlanner, folder: str) -> Outcome:
    """Start the ranks of every run on this machine, and judge their traces; files are written to `folder`.

    If torch has no deterministic kernel for the model, and none was asked for, the runs are made again without.

    Raises:
        RankLost: a rank was killed, or made no progress. CkpttoolError: nothing could be judged.
    """
    request, status = planner.request, planner.request.status
    plan = planner.plan()
    try:
        traces = launch_runs(plan.runs, folder, status)
    except Unsupported as e:
        # unless they were asked for, deterministic kernels are a try
        if request.deterministic is not None or not str(e).startswith(NO_KERNEL):
            raise
        status(f"{e} Starting once more without.")
        plan = plan.without_deterministic_kernels()
        traces = launch_runs(plan.runs, _make_folder(folder, "without"), status)
        traces["candidate"].notes.append(
            f"{str(e).partition('. ')[0]}: the runs were made without deterministic kernels"
        )
    judgement = judge_runs(traces, planner.recorded, request.strictness)
    if plan.noise and judgement.unsure:
        status(MEASURING)
        traces |= launch_runs(plan.noise, _make_folder(folder, "again"), status)
        judgement = judge_runs(traces, planner.recorded, request.strictness)
    return Outcome(plan.runs, traces, judgement)


def _make_folder(parent: str, name: str) -> str:
    """Make a folder in `parent`, where it must not exist yet, and return its path."""
    folder = os.path.join(parent, name)
    os.mkdir(folder)
    return folder


def run_as_rank(planner: RunPlanner, folder: str) -> Outcome | None:
    """Make the runs as a rank of the job that torchrun or srun started; rank 0 plans and judges. A collective.

    `folder` is this rank's own, for files. Returns None on ranks other than the first.

    Raises:
        RankLost: another rank is gone. CkpttoolError: anything else that the job raised.
    """
    from ..live.collectives import gather_objects, run_on_first_rank

    request = planner.request
    deterministic = request.deterministic is not False
    with (
        _naming_failures(),
        joined_job(planner.device, deterministic, request.timeout),
        watched_job(request.timeout, request.status),
    ):
        import torch.distributed as dist

        enter_stage("reading the indices")
        plan = run_on_first_rank(planner.plan)
        status = request.status if dist.get_rank() == 0 else ignore_status
        traces = _run_on_this_rank(plan.runs, folder, status)
        judgement = _judge_on_first_rank(planner, traces)
        if gather_objects(judgement is not None and bool(plan.noise) and judgement.unsure)[0]:
            status(MEASURING)
            traces |= _run_on_this_rank(plan.noise, folder, status)
            judgement = _judge_on_first_rank(planner, traces)
        return None if judgement is None else Outcome(plan.runs, traces, judgement)


def _run_on_this_rank(runs: Mapping[str, RunSettings], folder: str, status: Status) -> dict[str, Trace]:
    """Take part in the runs, {label: settings}; return {label: trace} on rank 0, {} on others. A collective.

    Raises:
        UsageError: a run is for another world size than that of this job. CkpttoolError: a run cannot be made.
    """
    import torch.distributed as dist

    from .ranks.worker import run_job

    out: dict[str, Trace] = {}
    for label, settings in runs.items():
        if settings.world_size != dist.get_world_size():
            raise UsageError(
                f"the {label} has a mesh of {settings.world_size} ranks, but this job has {dist.get_world_size()}; "
                "to run at another world size, start ckpttool without torchrun on one machine.",
                code="CKPT0209",
            )
        trace = run_job(settings, os.path.join(folder, f"probe-{label}.npy"), status)
        if trace is not None:
            out[label] = trace
    return out


def _judge_on_first_rank(planner: RunPlanner, traces: Mapping[str, Trace]) -> Judgement | None:
    """Judge the traces, {label: trace}, on rank 0; return None on others, whose `traces` is empty."""
    enter_stage("judging the run" if traces else "waiting for the verdict of rank 0", computes=bool(traces))
    return judge_runs(traces, planner.recorded, planner.request.strictness) if traces else None


@contextmanager
def _naming_failures() -> Iterator[None]:
    """While the block runs, turn errors that are not ckpttool's into ones that name this rank, and print their
    traceback.

    Raises:
        RankLost: another rank is gone. CkpttoolError: anything else that the job raised.
    """
    try:
        yield
    except CkpttoolError:
        raise
    except Exception as e:
        import traceback

        traceback.print_exc()
        text = " ".join(str(e).split()).rstrip(".")
        if is_lost_peer_error(e):
            raise RankLost(
                f"rank {os.environ['RANK']} lost another rank in {get_current_stage()!r} ({text}). The rank that ended "
                "first is the cause: torchrun lists it with its exit code, and srun prints it."
            ) from None
        raise CkpttoolError(
            f"rank {os.environ['RANK']} failed in {get_current_stage()!r}: {type(e).__name__}: {text}.", code="CKPT0103"
        ) from None


# ---------------------------------------------------------------------------------------------------------- the report


def make_report(request: VerifyRequest, recorded: Trace | None, outcome: Outcome) -> Report:
    """Make the report of the runs; if a check failed, both checkpoints are opened to find how their tensors differ.

    `recorded` is the recorded reference, None if there is none.

    Raises:
        CkpttoolError: the optimizer of the job failed, and its state and options are not the cause.
    """
    from .._version import __version__
    from .compare.limits import check_gates, compute_metrics
    from .compare.not_verified import list_not_verified

    judgement, traces = outcome.judgement, outcome.traces
    _refuse_failed_job(outcome)
    got, reference = traces["candidate"], traces.get("reference") or recorded
    causes = _find_causes(request, reference, outcome) if judgement.failed else []
    not_verified = list_not_verified(reference, got, judgement.checks)
    numbers = compute_metrics(got, request.peak_tflops)
    if request.fresh and reference is not None:
        numbers["save_seconds"] = reference.roundtrip["save_seconds"]
        if "second" not in traces:
            not_verified.append(_explain_no_second_resume())
    gates = check_gates(
        got,
        numbers,
        min_mfu=request.min_mfu,
        max_reserved_gib=request.max_reserved_gib,
        max_step_seconds=request.max_step_seconds,
        max_load_seconds=request.max_load_seconds,
    )
    return Report(
        candidate=got,
        reference=reference,
        profile=request.strictness,
        checks=[*judgement.checks, *gates],
        causes=causes,
        envelope=judgement.envelope,
        calibrated=judgement.noise is not None,
        metrics=numbers,
        versions={"ckpttool": __version__, "python": sys.version.split()[0]},
        not_verified=not_verified,
        second=traces.get("second"),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _explain_no_second_resume() -> str:
    """Return a sentence that says why a fresh job was not resumed at another world size."""
    if is_rank_of_job():
        return (
            "a resume at another world size, and one in new processes: torchrun or srun started this job; run ckpttool "
            "without them, on one machine"
        )
    return "a resume at another world size: this machine has too few GPUs"


def _refuse_failed_job(outcome: Outcome) -> None:
    """Raise an error if the optimizer failed in a run, unless a different state or different options may be the cause.

    Raises:
        CkpttoolError: it failed in another run than the candidate, or in the candidate with the same state and options.
    """
    for label, trace in outcome.traces.items():
        known = label == "candidate" and any(c.stage in ("state", "configuration") for c in outcome.judgement.failed)
        if trace.stopped is not None and not known:
            step = trace.start + 1 + len(trace.steps)
            raise CkpttoolError(
                f"the optimizer of the job fails in step {step} of the {label}: {trace.stopped}.", code="CKPT0103"
            )


def _find_causes(request: VerifyRequest, reference: Trace | None, outcome: Outcome) -> list[Cause]:
    """Find the likely causes of failed checks, most likely first. `reference` is None if there is nothing to compare
    with."""
    from .compare.differences import with_stored_dtypes
    from .compare.misfit import describe_misfit, does_not_fit_job
    from .diagnosis.causes import find_causes
    from .diagnosis.kinds import CauseKind

    got, checks = outcome.traces["candidate"], outcome.judgement.checks
    if request.fresh:
        # what fails at another world size alone has its cause there, and the checks of the smoke test say it themselves
        checks = [c for c in checks if not c.name.startswith(("at", "fresh."))]
        if all(c.verdict != "fail" for c in checks) and "second" in outcome.traces:
            got, checks = outcome.traces["second"], [*outcome.judgement.second]
        if all(c.verdict != "fail" for c in checks):
            return []
    if does_not_fit_job(reference, got):
        return [Cause(CauseKind.DOES_NOT_FIT.label, describe_misfit(got), [str(got.failed)])]
    sides = (reference, got)
    if reference is not None and request.strictness == "relaxed":
        sides = with_stored_dtypes(reference, got)
    if "reference" not in outcome.runs or request.fresh:
        return find_causes(*sides, checks)
    with ExitStack() as stack:
        original, candidate = (
            stack.enter_context(open_checkpoint(run.source, run.reading))
            for run in (outcome.runs["reference"], outcome.runs["candidate"])
        )
        return find_causes(*sides, checks, (original, candidate))
