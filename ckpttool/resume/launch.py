"""resume_verify: from a checkpoint and a reference to a Report.

On one node it starts torchrun itself, one launch for each world size, and judges the traces that the ranks leave in a
folder. Where RANK and WORLD_SIZE are set, by torchrun or srun on many nodes, every rank calls it, the runs happen in the
job that is there, and rank 0 judges.

The order of runs: the reference (--against) first, since the candidate may need what it says; the run that measures the
noise (--calibrate); the candidate.
"""

from __future__ import annotations

import glob
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from .. import errors
from ..engine.opening import OpenCheckpoint, usable
from ..engine.opening import open as open_checkpoint
from ..errors import CkpttoolError, Interrupted, UsageError
from ..extras import need
from ..index.names import counted
from .bounds import PROFILES
from .settings import Settings, Status, mesh_of, write_settings
from .trace import Trace, read_reference, read_trace
from .verdict import Report

__all__ = ["resume_verify"]


def _silent(text: str) -> None:
    return None


def resume_verify(
    source: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    reference: str | os.PathLike[str] | None = None,
    config: str | None = None,
    job: str | None = None,
    how: Mapping[str, Any] | None = None,
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
    deterministic: bool = True,
    reread: bool = True,
    round_trip: bool = True,
    scratch: str | os.PathLike[str] | None = None,
    peak_tflops: float | None = None,
    min_mfu: float | None = None,
    max_reserved_gib: float | None = None,
    max_step_seconds: float | None = None,
    max_load_seconds: float | None = None,
    status: Status = _silent,
) -> Report | None:
    """Load a checkpoint into a live FSDP2 job, train some steps, and judge them.

    Args:
        source: the checkpoint, in any layout.
        against: the original, in its own layout; it is run with the same batches, and is the reference.
        reference: lines that a `Recorder` wrote in the original job.
        config: Hugging Face folder of the model; `job`: module.py:build of the user. `how`: arguments of `open`.
        world_size, mesh: of the job; as many ranks as there are GPUs, or one, where None.
        against_world_size: of the run of `against`; that of the candidate where None.
        start_step: step of the checkpoint, where it does not say.
        data, seed, sequence, global_batch, micro_batch, dtype, clip: of the job; those of a recorded reference where
            None and it knows them.
        calibrate: measure the noise of this job by running the reference once more with another accumulation.
        scratch: folder that all ranks share, for the save of the round trip; a temporary one where None and the ranks
            are on this machine.

    Returns:
        The report; None on ranks other than the first of a job that was started from outside.

    Raises:
        CkpttoolError: nothing could be judged; that training does not go on as before is in the report, not raised.
    """
    need("resume-verify", "torch", *(() if job else ("transformers",)), "jinja2")
    if against is not None and reference is not None:
        raise UsageError("--against and --reference are two references; give one.")
    if profile not in PROFILES:
        raise UsageError(f"--profile {profile}: one of {', '.join(PROFILES)}.")
    if steps < 1:
        raise UsageError(f"--steps {steps}: at least one step is judged.")
    outside = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    device, count = _device(device)
    if scratch is not None and not os.path.isdir(scratch):
        raise UsageError(f"--scratch {os.fspath(scratch)}: this folder does not exist.")
    if outside:
        ranks = _outside()
        if world_size is not None and world_size != ranks:
            raise UsageError(f"--world-size {world_size}, but this job was started with {ranks} ranks.")
    else:
        ranks = world_size or (math.prod(mesh_of(mesh, 1).values()) if mesh else max(1, count))
    dims = mesh_of(mesh, ranks)
    if (size := math.prod(dims.values())) != ranks:
        raise UsageError(f"--mesh {mesh} has {size} ranks, but there are {ranks}.")
    if device == "cuda" and not outside and ranks > count:
        raise UsageError(
            f"{ranks} ranks, but this machine has {count} GPUs. On several nodes, start it with torchrun or srun."
        )
    options = usable(source, dict(how or {}))  # `config` also builds the model, whatever the layout
    theirs = {k: v for k, v in (how or {}).items() if k != "source_layout"}  # --source-layout is that of the candidate
    theirs = {} if against is None else usable(against, theirs)
    begin, found_config = _look(source, options, start_step)
    their_config = None
    if against is not None:
        # the same batches for both, also where the candidate has lost its step
        begin, their_config = _look(against, theirs, start_step)
        found_config = found_config or their_config
    recorded = None if reference is None else read_reference(reference, begin)
    known = recorded or Trace()
    if recorded is not None and not begin and start_step is None:
        begin = recorded.start or recorded.steps[0].step - 1
    original_config = config
    if config is None and job is None:
        config, original_config = found_config, their_config or found_config
    if recorded is not None and start_step is None and not any(s.step > begin for s in recorded.steps):
        raise UsageError(
            f"{os.fspath(str(reference))} has steps {recorded.steps[0].step}..{recorded.steps[-1].step}, but the checkpoint is of "
            f"step {begin}: none comes after it. If it is of another step, say so with --start-step."
        )
    with tempfile.TemporaryDirectory(prefix="ckpttool-resume-") as folder:
        settings = Settings(
            source=os.fspath(source), how=options, mesh=dims, config=config, job=job, steps=steps, start=begin, data=data,
            seed=seed, sequence=sequence or known.sequence, global_batch=global_batch or known.global_batch or 8,
            micro_batch=micro_batch or known.micro_batch or 1, dtype=dtype or known.dtype or ("bf16" if device == "cuda" else "fp32"),
            device=device, clip=known.clip if clip is None else clip, keep_dropout=keep_dropout,
            activation_checkpointing=activation_checkpointing, compile=compile, cpu_offload=cpu_offload,
            deterministic=deterministic, reread=reread,
            scratch=None if not round_trip else os.fspath(scratch) if scratch is not None else None if outside else folder,
        )  # fmt: skip
        plan: dict[str, Settings] = {}
        if against is not None:
            apart = mesh_of(None, against_world_size) if against_world_size else dims
            plan["reference"] = replace(
                settings,
                source=os.fspath(against),
                how=theirs,
                mesh=apart,
                config=original_config,
                scratch=None,
                reread=False,
            )
        if recorded is not None:
            rates = {s.step: s.learning_rates for s in recorded.steps if s.learning_rates}
            settings = replace(settings, rates=rates)
        if calibrate:
            base = plan.get("reference", settings)
            plan["noise"] = replace(base, micro_batch=_other_shape(base), scratch=None, reread=False)
        plan["candidate"] = settings
        if outside:
            traces = _here(plan, folder, status)
            if traces is None:
                return None
        else:
            traces = _launched(plan, folder, status)
        got = traces["candidate"]
        original = traces.get("reference") or recorded
        gauge = _gauge(calibrate, traces, recorded)
        return _judged(
            original, got, profile, gauge, plan.get("reference"), settings, peak_tflops,
            {"min_mfu": min_mfu, "max_reserved_gib": max_reserved_gib, "max_step_seconds": max_step_seconds,
             "max_load_seconds": max_load_seconds},
        )  # fmt: skip


def _gauge(calibrate: bool, traces: Mapping[str, Trace], recorded: Trace | None) -> dict[str, float] | None:
    from .judge import noise

    if not calibrate:
        return None
    return noise(
        traces["candidate"] if recorded is not None or "reference" not in traces else traces["reference"],
        traces["noise"],
    )


def _judged(
    reference: Trace | None,
    got: Trace,
    profile: str,
    gauge: Mapping[str, float] | None,
    against: Settings | None,
    settings: Settings,
    peak_tflops: float | None,
    limits: Mapping[str, float | None],
) -> Report:
    from .diagnosis import causes
    from .gates import gates, metrics
    from .judge import judge

    checks, envelope = judge(reference, got, profile, gauge)
    failed = any(c.verdict == "fail" for c in checks)
    opened: tuple[OpenCheckpoint, OpenCheckpoint] | None = None
    try:
        if failed and against is not None:
            opened = (open_checkpoint(against.source, **against.how), open_checkpoint(settings.source, **settings.how))
        blamed = causes(reference, got, checks, opened) if failed else []
    finally:
        for one in opened or ():
            one.source.close()
    numbers = metrics(got, peak_tflops)
    checks.extend(gates(got, numbers, **limits))
    from .._version import __version__

    return Report(
        got, reference, profile, checks, blamed, envelope, gauge is not None, numbers,
        {"ckpttool": __version__, "python": sys.version.split()[0]}, datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- before


def _device(wanted: str) -> tuple[str, int]:
    """("cuda" or "cpu", GPUs of this machine)."""
    if wanted not in ("auto", "cuda", "cpu"):
        raise UsageError(f"--device {wanted}: auto, cuda or cpu.")
    if wanted == "cpu" or (wanted == "auto" and not glob.glob("/dev/nvidia[0-9]*")):
        return "cpu", 0
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and not count:
        raise UsageError("--device cuda: torch sees no GPU on this machine.")
    return ("cuda", count) if count else ("cpu", 0)


def _outside() -> int:
    """WORLD_SIZE of the job that this process was started in.

    Raises:
        UsageError: what torchrun or srun should have set makes no sense.
    """
    words = {k: os.environ.get(k, "") for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    rank, world = words["RANK"], words["WORLD_SIZE"]
    if not (rank.isdigit() and world.isdigit() and int(rank) < int(world) and all(words.values())):
        said = ", ".join(f"{k}={v!r}" for k, v in words.items())
        raise UsageError(f"RANK and WORLD_SIZE are set, so this is one rank of a job, but they make no sense: {said}.")
    return int(world)


def _other_shape(settings: Settings) -> int:
    """A micro-batch of another shape: half the rows, or twice as many."""
    if settings.micro_batch % 2 == 0:
        return settings.micro_batch // 2
    if settings.global_batch % (2 * settings.micro_batch) == 0:
        return 2 * settings.micro_batch
    raise UsageError(
        f"--calibrate runs the job with another accumulation, but a global batch of {settings.global_batch} in "
        f"micro-batches of {settings.micro_batch} rows has neither half nor double ones."
    )


def _look(path: str | os.PathLike[str], how: Mapping[str, Any], start: int | None) -> tuple[int, str | None]:
    """(step of a checkpoint, the Hugging Face folder it is or lies beside)."""
    with open_checkpoint(path, **how) as opened:
        step = start if start is not None else step_of(opened)
        folder = opened.source.root
    return step, folder if os.path.isfile(os.path.join(folder, "config.json")) else None


def step_of(opened: OpenCheckpoint) -> int:
    """How many optimizer steps a checkpoint has behind it; 0 where nothing tells."""
    ckpt = opened.checkpoint
    if (told := counted(ckpt.value)) is not None:
        return told
    most = 0
    for v in ckpt.values.values():
        if v.path[:2] == ("optim", "state") and v.path[-1] == "step" and isinstance(v.data, (int, float)):
            most = max(most, int(v.data))
    names = [
        n
        for n, t in ckpt.tensors.items()
        if t.path[-1] == "step" and t.path[0] in ("optim", "trainer") and t.numel == 1
    ]
    if not most and names:
        for n in names[:4]:
            most = max(most, _number(ckpt.tensors[n].dtype, opened.read(n)))
    return most


def _number(dtype: str, data: bytes) -> int:
    import numpy as np

    from ..engine.dtypes import numpy_dtype

    value = float(np.frombuffer(data, dtype=numpy_dtype(dtype))[0])
    return int(value) if math.isfinite(value) else 0


# -------------------------------------------------------------------------------------------------------------- running


def _here(plan: Mapping[str, Settings], folder: str, status: Status) -> dict[str, Trace] | None:
    """The runs, in the job that this process is a rank of; the traces on rank 0."""
    from . import worker

    first = next(iter(plan.values()))
    with worker.joined_job(first.device, first.deterministic):
        import torch.distributed as dist

        out = {}
        for i, (label, settings) in enumerate(plan.items()):
            if settings.world_size != dist.get_world_size():
                raise UsageError(
                    f"the {label} has a mesh of {settings.world_size} ranks, but this job has {dist.get_world_size()}; runs at "
                    "another world size need a launch of their own, or one machine."
                )
            out[label] = worker.run(
                settings, os.path.join(folder, f"probe-{i}.npy"), status if dist.get_rank() == 0 else _silent
            )
        return None if dist.get_rank() else {k: v for k, v in out.items() if v is not None}


def _launched(plan: Mapping[str, Settings], folder: str, status: Status) -> dict[str, Trace]:
    """The runs, by torchrun; consecutive ones with one world size share a launch."""
    out: dict[str, Trace] = {}
    waiting = list(plan.items())
    number = 0
    while waiting:
        world = waiting[0][1].world_size
        together = []
        while waiting and waiting[0][1].world_size == world:
            together.append(waiting.pop(0))
        inner = os.path.join(folder, f"launch-{number}")
        number += 1
        os.mkdir(inner)
        write_settings(os.path.join(inner, "runs.json"), [s for _, s in together])
        status(f"starting {world} rank{'s' if world > 1 else ''}: {', '.join(label for label, _ in together)}")
        _torchrun(inner, world, together[0][1], status)
        for i, (label, _) in enumerate(together):
            out[label] = read_trace(os.path.join(inner, f"trace-{i}.json"))
    return out


def _torchrun(folder: str, world: int, settings: Settings, status: Status) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "--log-dir", folder,
        "-m", "ckpttool.resume.worker", folder,
    ]  # fmt: skip
    environment = dict(os.environ)
    environment.setdefault(
        "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)) if settings.device == "cpu" else "8"
    )
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    with open(os.path.join(folder, "log"), "wb") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    seen = 0
    try:
        while child.poll() is None:
            time.sleep(0.1)
            seen = _pass_on(folder, seen, status)
            if _words(folder):
                _wait_and_stop(child)
        _pass_on(folder, seen, status)
    except BaseException as e:
        _stop(child)
        if isinstance(e, KeyboardInterrupt):
            raise Interrupted("stopped; nothing was written to the checkpoint.") from None
        raise
    if child.returncode:
        _explain(folder, child.returncode)


def _pass_on(folder: str, seen: int, status: Status) -> int:
    try:
        with open(os.path.join(folder, "events"), encoding="utf-8") as f:
            f.seek(seen)
            text = f.read()
    except OSError:
        return seen
    whole = text[: text.rfind("\n") + 1]
    for sentence in whole.splitlines():
        status(sentence)
    return seen + len(whole.encode())


def _words(folder: str) -> list[str]:
    return glob.glob(os.path.join(folder, "error-*.json"))


def _wait_and_stop(child: subprocess.Popen[bytes]) -> None:
    """A rank has failed: torchrun ends the others, unless they hang."""
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        _stop(child)


def _stop(child: subprocess.Popen[bytes]) -> None:
    for sign, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        if child.poll() is None:
            try:
                os.killpg(child.pid, sign)
                child.wait(patience)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def _explain(folder: str, status: int) -> None:
    """Raise what the ranks have left word of: the first that ckpttool itself refused, else the first at all."""
    words = []
    for path in _words(folder):
        with open(path, encoding="utf-8") as f:
            words.append((path, json.load(f)))
    words.sort(key=lambda w: (not w[1]["known"], w[1]["time"]))
    if words and words[0][1]["known"]:
        kinds = {c: getattr(errors, c) for c in errors.__all__ if c != "EXIT_CODES"}
        raise kinds.get(words[0][1]["kind"], CkpttoolError)(words[0][1]["text"])
    kept = os.path.join(tempfile.mkdtemp(prefix="ckpttool-failed-"), "log")
    shutil.copyfile(os.path.join(folder, "log"), kept)
    if not words:
        raise CkpttoolError(f"the job ended with status {status} and said nothing of its own; its log is {kept}.")
    path, word = words[0]
    rank = os.path.basename(path)[len("error-") : -len(".json")]
    with open(kept, "a", encoding="utf-8") as f:
        f.write(f"\nrank {rank}:\n{word['traceback']}")
    raise CkpttoolError(f"rank {rank} failed: {word['kind']}: {word['text']}\nThe log with the traceback is {kept}.")
