"""resume_verify: from a checkpoint and a reference to a Report.

On one node it starts the ranks itself, once for each world size, and judges the traces that they leave in a folder
(`ranks`). Where RANK and WORLD_SIZE are set, by torchrun or srun, every rank calls it, the runs happen in the job that
already exists, and rank 0 judges.

The reference (`against`) runs first, since the candidate may need its learning rates; then the run that measures the
noise (`calibrate`), then the candidate. Where nothing but updates and numbers of later steps fails, the noise is
measured unasked.
"""

from __future__ import annotations

import glob
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Unpack

from ..engine.opening import OpenCheckpoint, OpenOptions, open_checkpoint, usable
from ..errors import CkpttoolError, RankLost, Unsupported, UsageError, argument
from ..extras import need
from ..options import Reading, list_keywords
from .compare.bounds import PROFILES
from .compare.judging import MEASURING, Judged, judged_runs
from .compare.verdict import Cause, Report
from .first_step import step_of
from .job.user_job import check_config_exists, check_job_source
from .job.watchdog import current_stage, enter_stage
from .ranks.launch import launch_runs
from .ranks.torchrun import is_lost_peer, is_rank_of_job, joined_job, watched_job
from .ranks.workspace import temporary_workspace
from .settings import Settings, Status, parse_mesh
from .text import plural
from .trace.batches import check_data_exists
from .trace.model import Trace, read_reference
from .trace.numerics import NO_KERNEL

__all__ = ["resume_verify"]


def _silent(text: str) -> None:
    return None


@list_keywords
def resume_verify(
    source: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    reference: str | os.PathLike[str] | None = None,
    job: str | None = None,
    world_size: int | None = None,
    mesh: str | None = None,
    against_world_size: int | None = None,
    steps: int = 10,
    start_step: int | None = None,
    data: str = "synthetic",
    seed: int = 0,
    sequence: int | None = None,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    dtype: str | None = None,
    device: str = "auto",
    clip: float | None = None,
    profile: str = "strict",
    calibrate: bool = False,
    keep_dropout: bool = False,
    activation_checkpointing: bool = False,
    compile: bool = False,
    cpu_offload: bool = False,
    module_prefix: str | None = None,
    deterministic: bool | None = None,
    reread: bool = True,
    round_trip: bool = True,
    scratch: str | os.PathLike[str] | None = None,
    timeout: float = 600.0,
    peak_tflops: float | None = None,
    min_mfu: float | None = None,
    max_reserved_gib: float | None = None,
    max_step_seconds: float | None = None,
    max_load_seconds: float | None = None,
    status: Status = _silent,
    **reading: Unpack[Reading],
) -> Report | None:
    """Load a checkpoint into a live FSDP2 job, train some steps, and judge whether training goes on as before.

    >>> report = ckpttool.resume_verify("runs/new", against="runs/old", config="meta-llama/Llama-3.2-1B")  # doctest:
        +SKIP
    >>> report.word, report.exit_code                                                             # doctest: +SKIP
    ('pass', 0)

    Args:
        source: the checkpoint, in any layout.
        against: the original checkpoint, in its own layout. It runs with the same batches and is the reference.
        reference: the lines that a `Recorder` wrote in the original job. Without this and `against`, only the state and
        the
            run itself are checked.
        config: folder or id of the Hugging Face model; the folder of the checkpoint if it has a config.json.
        job: "module.py:build", a function of yours that returns the model, and perhaps optimizer, scheduler, data and
        loss. Each rank
            runs it, with the folder of module.py first on sys.path.
        world_size: ranks of the job; by default one for each GPU, or one.
        mesh: "dp_replicate=R,dp_shard=S,tp=T"; all ranks in dp_shard by default.
        against_world_size: ranks of the run of `against`; those of the candidate by default.
        steps: how many steps to train after loading.
        start_step: the step of the checkpoint, if it does not say.
        data: "synthetic", or a .npy or .jsonl file of token rows.
        seed: of the synthetic data.
        sequence, global_batch, micro_batch, dtype, clip: tokens of a row, rows of a step, rows of a forward pass,
        "fp32" or
            "bf16", bound of gradient clipping. By default those of `reference`, if it records them.
        device: "auto", "cuda" or "cpu".
        profile: "strict", "standard" or "relaxed": which differences pass.
        calibrate: measure the noise of this very job by running the reference twice, the second time with other
            micro-batches, and widen bounds accordingly.
        keep_dropout: leave dropout on, and restore the random states of the ranks.
        activation_checkpointing, compile, cpu_offload: how the job computes.
        module_prefix: what the names of the checkpoint begin with and those of the job's model do not: "net." of a
        Lightning
            module that keeps its model in self.net.
        deterministic: use deterministic kernels and collectives. By default as the job of `reference` did, else True
        where torch has such
            kernels for all that the model needs.
        reread: read the files a second time and compare them with what the job holds.
        round_trip: save after the first step, load again and compare.
        scratch: a folder that all ranks share, for that save; a temporary one if all ranks are on this machine.
        timeout: seconds without any progress of a rank, after which the job ends, with the name of the silent rank and
        its
            stack. A rank makes progress when it begins a stage or a micro-batch, or reads or writes 1 MiB. Collectives
            wait for a minute longer. Where torchrun or srun started this process, it ends with exit code 13.
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
    need("resume-verify", "torch", *(() if job else ("transformers",)), "jinja2")
    if against is not None and reference is not None:
        raise UsageError(f"{argument('against')} and {argument('reference')} are two references; give one.")
    if profile not in PROFILES:
        raise UsageError(f"{argument('profile', profile)}: choose one of {', '.join(PROFILES)}.")
    if steps < 1:
        raise UsageError(f"{argument('steps', steps)}: must be at least 1.")
    if timeout < 1:
        raise UsageError(f"{argument('timeout', timeout)}: must be at least 1 second.")
    if scratch is not None and not os.path.isdir(scratch):
        raise UsageError(f"{argument('scratch', os.fspath(scratch))}: this folder does not exist.")
    if job is not None:
        check_job_source(job)
    elif (config := reading.get("config")) is not None:  # with a job it may be the folder of a tokenizer alone
        check_config_exists(config)
    check_data_exists(data)
    as_rank = is_rank_of_job()
    device, gpus = _device(device)
    dims = _mesh(world_size, mesh, as_rank, device, gpus)
    asked = OpenOptions(**reading)
    # `config` also builds the model, whether or not the layout needs it; `source_layout` is that of the candidate
    recorded: Trace | None = None
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_workspace())

        def planned() -> Plans:
            """The runs, and those that are made if these leave it unsure. Called on one rank alone, since it reads the
            index of each checkpoint."""
            nonlocal recorded
            reference_reading = asked if against is None else usable(against, replace(asked, source_layout=None))
            candidate_reading = usable(source, asked)
            begin, found_config = _look(source, candidate_reading, start_step)
            original_config = None
            if against is not None:
                # the same batches for both, even if the candidate has lost its step
                begin, original_config = _look(against, reference_reading, start_step)
                found_config = found_config or original_config
            recorded = None if reference is None else read_reference(reference, begin)
            if recorded is not None and start_step is None:
                begin = _begin_of(recorded, begin, reference)
            known = recorded or Trace()
            numerics = dict(known.environment.get("numerics") or {})
            computes = numerics.get("deterministic", True) if deterministic is None else deterministic
            model_config = found_config if asked.config is None and job is None else asked.config
            shared = None if as_rank else folder
            if scratch is not None and round_trip:
                shared = stack.enter_context(temporary_workspace(os.fspath(scratch)))
            settings = Settings(
                source=os.fspath(source),
                reading=candidate_reading,
                mesh=dims,
                config=model_config,
                job=job,
                steps=steps,
                start=begin,
                data=data,
                seed=seed,
                sequence=sequence or known.sequence,
                global_batch=global_batch or known.global_batch or 8,
                micro_batch=micro_batch or known.micro_batch or 1,
                numerics=numerics,
                buffers=known.buffers,
                dtype=dtype or known.dtype or ("bf16" if device == "cuda" else "fp32"),
                device=device,
                clip=(known.clip if clip is None else clip) or None,
                keep_dropout=keep_dropout,
                activation_checkpointing=activation_checkpointing,
                compile=compile,
                cpu_offload=cpu_offload,
                module_prefix=module_prefix or "",
                deterministic=computes,
                reread=reread,
                round_trip=round_trip,
                scratch=shared,
                timeout=timeout,
            )
            plan: dict[str, Settings] = {}
            if against is not None:
                plan["reference"] = replace(
                    settings,
                    source=os.fspath(against),
                    reading=reference_reading,
                    mesh=parse_mesh(None, against_world_size) if against_world_size else dims,
                    config=original_config or model_config if asked.config is None and job is None else asked.config,
                    round_trip=False,
                    reread=False,
                )
            if recorded is not None:
                rates = {s.step: s.learning_rates for s in recorded.steps if s.learning_rates}
                settings = replace(settings, rates=rates, probe=recorded.probe.get("rows", {}))
            base = plan.get("reference", settings)
            other = _other_micro_batch(base)
            again = {} if other is None else {"noise": replace(base, micro_batch=other, round_trip=False, reread=False)}
            if calibrate and not again:
                raise UsageError(
                    f"{argument('calibrate', True)} runs the job a second time with other micro-batches, but a global "
                    f"batch of {base.global_batch} in micro-batches of {base.micro_batch} rows can be cut into neither "
                    f"half nor double ones. Change {argument('micro_batch')} or {argument('global_batch')}."
                )
            if calibrate:
                plan |= again
            plan["candidate"] = settings
            if model_config is None and job is None:
                raise UsageError(
                    f"there is no config.json beside {os.fspath(source)} that describes the model. Pass "
                    f"{argument('config')}, the folder of a Hugging Face model, or {argument('job')}, module.py:build, "
                    "a function that returns your own."
                )
            if profile == "relaxed" and "reference" in plan:
                dtypes = _dtypes(source, candidate_reading)
                plan["reference"] = replace(plan["reference"], dtypes=dtypes)
                plan["candidate"] = replace(settings, dtypes=[] if reread else dtypes)
            return plan, again

        def judged(traces: Mapping[str, Trace]) -> Judged:
            return judged_runs(traces, recorded, profile)

        if as_rank:
            of_rank = _run_here(planned, (device, deterministic is not False, timeout), judged, folder, status)
            if of_rank is None:
                return None
            plan, traces, found = of_rank
        else:
            plan, again = planned()
            try:
                traces = launch_runs(plan, folder, status)
            except Unsupported as e:
                if deterministic is not None or not str(e).startswith(NO_KERNEL):
                    raise
                status(f"{e} Starting once more without.")
                plan, again = ({k: replace(s, deterministic=False) for k, s in runs.items()} for runs in (plan, again))
                os.mkdir(without := os.path.join(folder, "without"))
                traces = launch_runs(plan, without, status)
                traces["candidate"].notes.append(
                    f"{str(e).partition('. ')[0]}: the runs were made without deterministic kernels"
                )
            found = judged(traces)
            if again and found.unsure:
                status(MEASURING)
                os.mkdir(second := os.path.join(folder, "again"))
                traces |= launch_runs(again, second, status)
                found = judged(traces)
        limits = {
            "min_mfu": min_mfu,
            "max_reserved_gib": max_reserved_gib,
            "max_step_seconds": max_step_seconds,
            "max_load_seconds": max_load_seconds,
        }
        return _report(plan, traces, recorded, found, profile, peak_tflops, limits)


def _report(
    plan: Mapping[str, Settings],
    traces: Mapping[str, Trace],
    recorded: Trace | None,
    judged: Judged,
    profile: str,
    peak_tflops: float | None,
    limits: Mapping[str, float | None],
) -> Report:
    """The report on these traces; opens both checkpoints if a check failed."""
    from .._version import __version__
    from .compare.differences import in_stored_dtypes
    from .compare.limits import check_gates, compute_metrics
    from .compare.misfit import describe_misfit, does_not_fit
    from .compare.not_verified import list_not_verified
    from .diagnosis.causes import find_causes

    got, reference = traces["candidate"], traces.get("reference") or recorded
    checks, envelope, calibration, _ = judged
    sides = (reference, got) if reference is None or profile != "relaxed" else in_stored_dtypes(reference, got)
    opened: list[OpenCheckpoint] = []
    try:
        if judged.failed and "reference" in plan:
            for settings in (plan["reference"], plan["candidate"]):
                opened.append(open_checkpoint(settings.source, settings.reading))
        found = find_causes(*sides, checks, (opened[0], opened[1]) if opened else None) if judged.failed else []
    finally:
        for one in opened:
            one.source.close()
    if does_not_fit(reference, got):
        found = [Cause("does-not-fit", describe_misfit(got), [str(got.failed)])]
    unseen = list_not_verified(reference, got, checks)
    numbers = compute_metrics(got, peak_tflops)
    checks.extend(check_gates(got, numbers, **limits))
    return Report(
        got,
        reference,
        profile,
        checks,
        found,
        envelope,
        calibration is not None,
        numbers,
        {"ckpttool": __version__, "python": sys.version.split()[0]},
        unseen,
        datetime.now(UTC).isoformat(timespec="seconds"),
    )


# ------------------------------------------------------------------------------------------------------ before the runs


def _device(wanted: str) -> tuple[str, int]:
    """("cuda" or "cpu", GPUs of this machine)."""
    if wanted not in ("auto", "cuda", "cpu"):
        raise UsageError(f"{argument('device', wanted)}: choose auto, cuda or cpu.")
    if wanted == "cpu" or (wanted == "auto" and not glob.glob("/dev/nvidia[0-9]*")):
        return "cpu", 0
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and not count:
        raise UsageError(f"{argument('device', 'cuda')}: torch sees no GPU on this machine.")
    return ("cuda", count) if count else ("cpu", 0)


def _mesh(world_size: int | None, mesh: str | None, as_rank: bool, device: str, gpus: int) -> dict[str, int]:
    """The dimensions of the job: of the one that this process is a rank of, or of the one to be launched.

    Raises:
        UsageError: they contradict each other, or the machine.
    """
    if as_rank:
        ranks = _world_size_of_job()
        if world_size is not None and world_size != ranks:
            raise UsageError(f"{argument('world_size', world_size)}, but this job was started with {ranks} ranks.")
    else:
        ranks = world_size or (math.prod(parse_mesh(mesh, 1).values()) if mesh else max(1, gpus))
    dims = parse_mesh(mesh, ranks)
    if (size := math.prod(dims.values())) != ranks:
        raise UsageError(f"{argument('mesh', mesh)} has {size} ranks, but there are {ranks}.")
    if device == "cuda" and not as_rank and ranks > gpus:
        raise UsageError(
            f"{ranks} ranks, but this machine has {plural(gpus, 'GPU')}. Pass {argument('device', 'cpu')} to run them "
            "on the CPU, or start ckpttool with torchrun or srun to use several nodes."
        )
    return dims


def _world_size_of_job() -> int:
    """WORLD_SIZE of the job that this process was started in.

    Raises:
        UsageError: the variables that torchrun and srun set are missing or wrong.
    """
    variables = {k: os.environ.get(k, "") for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    rank, world = variables["RANK"], variables["WORLD_SIZE"]
    if not (rank.isdigit() and world.isdigit() and int(rank) < int(world) and all(variables.values())):
        shown = ", ".join(f"{k}={v!r}" for k, v in variables.items())
        raise UsageError(
            "RANK and WORLD_SIZE are set, so this process is one rank of a job, but the variables make no sense: "
            f"{shown}. Start it with torchrun or srun, or unset RANK and WORLD_SIZE."
        )
    return int(world)


def _begin_of(recorded: Trace, begin: int, reference: str | os.PathLike[str] | None) -> int:
    """The step to start from: the checkpoint's, or, if that is not known, that of the recorded reference.

    Raises:
        UsageError: the reference has no step after it.
    """
    begin = begin or recorded.start or recorded.steps[0].step - 1
    if not any(s.step > begin for s in recorded.steps):
        raise UsageError(
            f"{os.fspath(str(reference))} has steps {recorded.steps[0].step}..{recorded.steps[-1].step}, but the "
            f"checkpoint is of step {begin}, and none comes after it. If the checkpoint is of another step, pass "
            f"{argument('start_step')}."
        )
    return begin


def _other_micro_batch(settings: Settings) -> int | None:
    """A micro-batch with half the rows, or twice as many; None if the global batch can be cut into neither."""
    if settings.micro_batch % 2 == 0:
        return settings.micro_batch // 2
    return 2 * settings.micro_batch if settings.global_batch % (2 * settings.micro_batch) == 0 else None


def _look(path: str | os.PathLike[str], reading: OpenOptions, start: int | None) -> tuple[int, str | None]:
    """(step of a checkpoint, the folder with its config.json)."""
    with open_checkpoint(path, reading) as opened:
        step = start if start is not None else step_of(opened)
        folder = opened.source.root
    return step, folder if os.path.isfile(os.path.join(folder, "config.json")) else None


def _dtypes(path: str | os.PathLike[str], reading: OpenOptions) -> list[str]:
    """The floating dtypes of weights and optimizer in a checkpoint."""
    with open_checkpoint(path, reading) as opened:
        found = {t.dtype for t in opened.checkpoint.tensors.values() if t.path[0] in ("model", "optim")}
    return sorted(d for d in found if "float" in d)


#: The runs, and those that are made if these leave it unsure what their numbers mean.
Plans = tuple[dict[str, Settings], dict[str, Settings]]


@contextmanager
def _failures_named() -> Iterator[None]:
    """What this rank raises names it. The traceback is printed.

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
        if is_lost_peer(e):
            raise RankLost(
                f"rank {os.environ['RANK']} lost another rank in {current_stage()!r} ({text}). The rank that ended "
                "first is the cause: torchrun lists it with its exit code, and srun prints it."
            ) from None
        raise CkpttoolError(
            f"rank {os.environ['RANK']} failed in {current_stage()!r}: {type(e).__name__}: {text}."
        ) from None


def _run_here(
    planned: Callable[[], Plans],
    joining: tuple[str, bool, float],
    judged: Callable[[Mapping[str, Trace]], Judged],
    folder: str,
    status: Status,
) -> tuple[dict[str, Settings], dict[str, Trace], Judged] | None:
    """(the runs that rank 0 has `planned`, their traces and perhaps those of the second plan, what is `judged` of them)
    in the job that this process is a rank of, which it enters with these arguments of `joined_job`; None on other ranks
    than 0.

    Raises:
        RankLost: another rank is gone. CkpttoolError: anything else that the job raised.
    """
    from ..live.collectives import gathered, of_first_rank
    from .ranks import worker

    with _failures_named(), joined_job(*joining), watched_job(joining[2], status):
        import torch.distributed as dist

        enter_stage("reading the indices")
        plan, again = of_first_rank(planned)
        out: dict[str, Trace] = {}
        first = dist.get_rank() == 0
        mine = status if first else _silent

        def run(label: str, settings: Settings) -> None:
            if settings.world_size != dist.get_world_size():
                raise UsageError(
                    f"the {label} has a mesh of {settings.world_size} ranks, but this job has {dist.get_world_size()}; "
                    "to run at another world size, start ckpttool without torchrun on one machine."
                )
            trace = worker.run_job(settings, os.path.join(folder, f"probe-{label}.npy"), mine)
            if trace is not None:
                out[label] = trace

        def verdict() -> Judged | None:
            enter_stage("judging the run" if first else "waiting for the verdict of rank 0", computes=first)
            return judged(out) if first else None

        for label, settings in plan.items():
            run(label, settings)
        found = verdict()
        if gathered(found is not None and bool(again) and found.unsure)[0]:
            mine(MEASURING)
            for label, settings in again.items():
                run(label, settings)
            found = verdict()
        return None if found is None else (plan, out, found)
