"""From a request to the runs that answer it: where the job computes, the step that it starts from, its reference.

    planner = RunPlanner(request, device, mesh, open_scratch)
    planner.plan()         RunPlan(runs, noise), {label: RunSettings}; and planner.recorded, the recorded reference

The reference (`against`, `against_python`) runs first, since the candidate may need its learning rates; then the run
that measures the noise (`calibrate`), then the candidate.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ..engine.copy.stream import read_small_tensors
from ..engine.opening import OpenCheckpoint, OpenOptions, drop_unused_hints, open_checkpoint
from ..errors import UsageError, argument
from ..formats.stored_tensors import decode_number
from ..index.names import step_count
from ..printable import count_noun
from .request import RunSettings, VerifyRequest, parse_mesh
from .trace.model import Trace, read_reference
from .trace.records import NumericsRecord

__all__ = ["RunPlan", "RunPlanner", "choose_device", "choose_mesh", "choose_other_mesh", "find_start_step"]


class RunPlan(NamedTuple):
    """The runs by label ("reference", "noise", "candidate"; with --fresh also "repeat" and "second"), in order; and
    those that measure the noise, which are made if the others leave it unsure what their numbers mean."""

    runs: dict[str, RunSettings]
    noise: dict[str, RunSettings]

    def without_deterministic_kernels(self) -> RunPlan:
        """Return the same plan with `deterministic` off in all runs, so that torch chooses the kernels."""
        return RunPlan(*({k: replace(s, deterministic=False) for k, s in runs.items()} for runs in self))


class _Side(NamedTuple):
    """A checkpoint as it is read, its step, and its folder if that has a config.json."""

    path: str
    reading: OpenOptions
    step: int
    config: str | None


class RunPlanner:
    """Plans the runs of a request.

    `recorded` is the recorded reference once `plan` has read it; None without one. `open_scratch` is called once, and
    returns the folder for the save of the round trip; None for none.
    """

    def __init__(
        self,
        request: VerifyRequest,
        device: str,
        mesh: dict[str, int],
        open_scratch: Callable[[], str | None],
        other_mesh: dict[str, int] | None = None,
    ) -> None:
        """Keep what `plan` needs.

        Args:
            request: what the user asked for.
            device: "cuda" or "cpu".
            mesh: {dimension: ranks} of the candidate's job.
            open_scratch: called once by `plan`; returns the folder for the save of the round trip, or None.
            other_mesh: {dimension: ranks} of the second resume of a fresh job; None for none.
        """
        self.request, self.device, self.mesh, self.open_scratch = request, device, mesh, open_scratch
        self.other_mesh = other_mesh
        self.recorded: Trace | None = None

    def plan(self) -> RunPlan:
        """Plan the runs. Only one rank calls this, since it reads the index of each checkpoint.

        Raises:
            UsageError: the request does not say which model to build, the recorded reference has no step to compare, or
                the noise cannot be measured as asked. CkpttoolError: a checkpoint cannot be read.
        """
        request = self.request
        if request.fresh:
            return self._plan_fresh()
        source, original = self._inspect_checkpoints()
        # the same batches for both, even if the candidate has lost its step
        start = source.step if original is None else original.step
        if request.reference is not None:
            self.recorded = read_reference(request.reference, start, request.steps)
            if request.start_step is None:
                start = _choose_start(self.recorded, start, request.reference)
        own_config = request.reading.config is not None or request.job is not None
        config = request.reading.config if own_config else source.config or (original and original.config)
        candidate = self._make_settings(source, start, config)
        runs: dict[str, RunSettings] = {}
        if original is not None:
            runs["reference"] = replace(
                candidate,
                source=original.path,
                reading=original.reading,
                mesh=parse_mesh(None, request.against_world_size) if request.against_world_size else self.mesh,
                config=config if own_config else original.config or config,
                python=None if request.against_python is None else os.fspath(request.against_python),
                round_trip=False,
                loader=request.reference_loader,
            )
        if self.recorded is not None:
            rates = {s.step: s.learning_rates for s in self.recorded.steps if s.learning_rates}
            candidate = replace(candidate, rates=rates, probe=self.recorded.probe.get("rows", {}))
        noise = self._plan_noise(runs.get("reference", candidate))
        if request.calibrate:
            runs |= noise
        if config is None and request.job is None:
            raise UsageError(
                f"there is no config.json beside {source.path} that describes the model. Pass {argument('config')}, "
                f"the folder of a Hugging Face model, or {argument('job')}, module.py:build, a function that returns "
                "your own.",
                code="CKPT0216",
            )
        # fingerprints in the other side's dtypes, since it may have rounded
        if request.strictness == "relaxed" and "reference" in runs:
            dtypes = _list_float_dtypes(source.path, source.reading)
            runs["reference"] = replace(runs["reference"], dtypes=dtypes)
            candidate = replace(candidate, dtypes=[] if request.reread else dtypes)
        return RunPlan({**runs, "candidate": candidate}, noise)

    def _plan_fresh(self) -> RunPlan:
        """Plan the runs of a fresh job: twice from its start, of which the first one saves, and those that resume from
        that save.

        Raises:
            UsageError: there is no folder that all ranks share, or the noise cannot be measured as asked.
        """
        request, steps = self.request, self.request.fresh_steps
        settings = self._make_settings(_Side("", request.reading, steps, None), steps, request.reading.config)
        if settings.scratch is None:
            raise UsageError(
                f"{argument('fresh', True)} saves the job, and torchrun or srun may have started its ranks on several "
                f"machines. Pass {argument('scratch')}, a folder that all of them share.",
                code="CKPT0204",
            )
        resumed = replace(settings, source=os.path.join(settings.scratch, "save"), round_trip=False)
        reference = replace(resumed, fresh_steps=steps)
        noise = self._plan_noise(resumed)
        runs = {"reference": reference, "repeat": replace(reference, source=""), "candidate": resumed}
        if request.calibrate:
            runs |= noise
        if self.other_mesh is not None:
            runs["second"] = replace(resumed, mesh=self.other_mesh)
        return RunPlan(runs, noise)

    def _inspect_checkpoints(self) -> tuple[_Side, _Side | None]:
        """Open the checkpoint of the request, and the original that it is compared with, and return (checkpoint,
        original): for each its path, step and config folder. The original is None if there is none.

        With another Python and without `against` the original is the checkpoint itself. The `source_layout` of the
        request is only used for the checkpoint.
        """
        request = self.request
        original = None
        if request.against is not None:
            original = drop_unused_hints(request.against, replace(request.reading, source_layout=None))
        source = self._inspect_checkpoint(request.source, drop_unused_hints(request.source, request.reading))
        if request.against is None or original is None:
            return source, None if request.against_python is None else source
        return source, self._inspect_checkpoint(request.against, original)

    def _inspect_checkpoint(self, path: str | os.PathLike[str], reading: OpenOptions) -> _Side:
        """Open a checkpoint, and return its path, its step, and its folder if that has a config.json (otherwise None).

        The step is `start_step` of the request if that is given.

        Args:
            path: path of the checkpoint.
            reading: how it is read.
        """
        start = self.request.start_step
        with open_checkpoint(path, reading) as opened:
            step = start if start is not None else find_start_step(opened)
            folder = opened.source.root
        has_config = os.path.isfile(os.path.join(folder, "config.json"))
        return _Side(os.fspath(path), reading, step, folder if has_config else None)

    def _make_settings(self, source: _Side, start: int, config: str | None) -> RunSettings:
        """Make the settings of the candidate's run; what the request leaves open is as in the recorded job, if there is
        one.

        Args:
            source: the candidate's checkpoint.
            start: the optimizer step to start from.
            config: a Hugging Face folder or id; None if the job is the user's own.
        """
        request = self.request
        known = self.recorded or Trace()
        numerics = known.environment.get("numerics") or NumericsRecord()
        return RunSettings(
            source=source.path,
            reading=source.reading,
            mesh=self.mesh,
            config=config,
            job=request.job,
            steps=request.steps,
            start=start,
            data=request.data,
            seed=request.seed,
            sequence=request.sequence or known.sequence,
            global_batch=request.global_batch or known.global_batch or 8,
            micro_batch=request.micro_batch or known.micro_batch or 1,
            numerics=numerics,
            buffers=known.buffers,
            dtype=request.dtype or known.dtype or ("bf16" if self.device == "cuda" else "fp32"),
            device=self.device,
            clip=(known.clip if request.clip is None else request.clip) or None,
            keep_dropout=request.keep_dropout,
            activation_checkpointing=request.activation_checkpointing,
            compile=request.compile,
            cpu_offload=request.cpu_offload,
            module_prefix=request.module_prefix or "",
            deterministic=numerics.get("deterministic", True)
            if request.deterministic is None
            else request.deterministic,
            reread=request.reread,
            round_trip=request.round_trip,
            updates=request.updates,
            scratch=self.open_scratch(),
            timeout=request.timeout,
        )

    def _plan_noise(self, base: RunSettings) -> dict[str, RunSettings]:
        """Plan a second run of `base` with other micro-batches: {"noise": settings}; {} if its global batch cannot be
        divided so.

        Raises:
            UsageError: `calibrate` requires that run, and the global batch cannot be divided into other micro-batches.
        """
        other = _choose_other_micro_batch(base)
        if other is not None:
            return {"noise": replace(base, micro_batch=other, round_trip=False, reread=False)}
        if self.request.calibrate:
            raise UsageError(
                f"{argument('calibrate', True)} runs the job a second time with other micro-batches, but a global "
                f"batch of {base.global_batch} in micro-batches of {base.micro_batch} rows can be cut into neither "
                f"half nor double ones. Change {argument('micro_batch')} or {argument('global_batch')}.",
                code="CKPT0204",
            )
        return {}


# ------------------------------------------------------------------------------------------------ steps of checkpoints

_MOST = 256  # counters that are read


def find_start_step(opened: OpenCheckpoint) -> int:
    """Find how many optimizer steps were taken before a checkpoint was saved; 0 if nothing says so.

    It is the trainer's counter, or else the largest step count in the optimizer state, since a parameter without a
    gradient skips steps. If one of these step counts is the number at the end of the folder's name, it is that one: a
    larger one may come from a file of a later save.
    """
    ckpt = opened.checkpoint
    if (step := step_count(ckpt.value)) is not None:
        return step
    found = {
        int(v.data)
        for v in ckpt.values.values()
        if v.path[:2] == ("optim", "state") and v.path[-1] == "step" and isinstance(v.data, (int, float))
    }
    if not found:
        names = [
            n
            for n, t in ckpt.tensors.items()
            if t.path[-1] == "step" and t.path[0] in ("optim", "trainer") and t.numel == 1
        ]
        raw = read_small_tensors(opened.locate(), opened.source, names[:: 1 + len(names) // _MOST]) if names else {}
        numbers = (decode_number(ckpt.tensors[n].dtype, data) for n, data in raw.items())
        found = {int(x) for x in numbers if x is not None and math.isfinite(x)}
    named = re.search(r"(\d{1,15})$", os.path.basename(opened.source.root))
    if named is not None and int(named[1]) in found:
        return int(named[1])
    return max(found, default=0)


def _choose_start(recorded: Trace, begin: int, reference: str | os.PathLike[str] | None) -> int:
    """Choose the step to start from.

    Args:
        recorded: the recorded reference.
        begin: the step of the checkpoint; if it is 0 (not known), the step of the recorded state is used.
        reference: the path of the recording, for the error.

    Raises:
        UsageError: the recording has no later step.
    """
    begin = begin or recorded.start or recorded.steps[0].step - 1
    if not any(s.step > begin for s in recorded.steps):
        raise UsageError(
            f"{os.fspath(str(reference))} has steps {recorded.steps[0].step}..{recorded.steps[-1].step}, but the "
            f"checkpoint is of step {begin}, and none comes after it. If the checkpoint is of another step, pass "
            f"{argument('start_step')}.",
            code="CKPT0204",
        )
    return begin


def _choose_other_micro_batch(settings: RunSettings) -> int | None:
    """Return half or twice the number of rows of a micro-batch; None if neither divides the global batch."""
    if settings.micro_batch % 2 == 0:
        return settings.micro_batch // 2
    return 2 * settings.micro_batch if settings.global_batch % (2 * settings.micro_batch) == 0 else None


def _list_float_dtypes(path: str | os.PathLike[str], reading: OpenOptions) -> list[str]:
    """List the floating dtypes ("float32") that the weights and the optimizer state in a checkpoint have, sorted."""
    with open_checkpoint(path, reading) as opened:
        found = {t.dtype for t in opened.checkpoint.tensors.values() if t.path[0] in ("model", "optim")}
    return sorted(d for d in found if "float" in d)


# ------------------------------------------------------------------------------------------------ devices and ranks


#: Files of drivers of GPUs: NVIDIA's, AMD's (ROCm), and that of WSL2. Importing torch to ask takes seconds.
_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")


def choose_device(wanted: str) -> tuple[str, int]:
    """Choose where the job computes: ("cuda", number of GPUs of this machine) or ("cpu", 0).

    `wanted` is "cuda", "cpu", or "auto" for a GPU if there is one.

    Raises:
        UsageError: no such device.
    """
    if wanted not in ("auto", "cuda", "cpu"):
        raise UsageError(f"{argument('device', wanted)}: choose auto, cuda or cpu.", code="CKPT0203")
    if wanted == "cpu" or (wanted == "auto" and not any(map(glob.glob, _DEVICE_FILES))):
        return "cpu", 0
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and not count:
        raise UsageError(f"{argument('device', 'cuda')}: torch sees no GPU on this machine.", code="CKPT0219")
    return ("cuda", count) if count else ("cpu", 0)


def choose_mesh(world_size: int | None, mesh: str | None, as_rank: bool, device: str, gpus: int) -> dict[str, int]:
    """Choose the mesh of the job, {dimension: size}: "dp_shard", and "dp_replicate" and "tp" if `mesh` has them.

    Args:
        world_size: requested number of ranks; None for the product of `mesh`, or without that one rank for each GPU.
        mesh: "dp_replicate=R,dp_shard=S,tp=T"; None for all ranks in dp_shard.
        as_rank: whether this process is a rank of a job that torchrun or srun started; otherwise a job is to be
            launched.
        device: "cuda" or "cpu".
        gpus: number of GPUs of this machine.

    Raises:
        UsageError: the arguments contradict each other, or the machine has too few GPUs.
    """
    if as_rank:
        ranks = _read_world_size()
        if world_size is not None and world_size != ranks:
            raise UsageError(
                f"{argument('world_size', world_size)}, but this job was started with {ranks} ranks.", code="CKPT0209"
            )
    else:
        ranks = world_size or (math.prod(parse_mesh(mesh, 1).values()) if mesh else max(1, gpus))
    dims = parse_mesh(mesh, ranks)
    if (size := math.prod(dims.values())) != ranks:
        raise UsageError(f"{argument('mesh', mesh)} has {size} ranks, but there are {ranks}.", code="CKPT0209")
    if device == "cuda" and not as_rank and ranks > gpus:
        raise UsageError(
            f"{ranks} ranks, but this machine has {count_noun(gpus, 'GPU')}. Pass {argument('device', 'cpu')} to run "
            "them on the CPU, or start ckpttool with torchrun or srun to use several nodes.",
            code="CKPT0219",
        )
    return dims


def choose_other_mesh(mesh: dict[str, int], ranks: int | None, device: str, gpus: int) -> dict[str, int] | None:
    """Choose the mesh for the second resume of a fresh job, at another world size: {"dp_shard": S, ...}.

    The other dimensions are those of `mesh`. None if this machine has too few GPUs and `ranks` is None.

    Args:
        mesh: the mesh of the job.
        ranks: requested number of ranks; None for one shard fewer, or for two shards if there is one.
        device, gpus: as for `choose_mesh`.

    Raises:
        UsageError: `ranks` does not fit these dimensions, or this machine has too few GPUs for it.
    """
    shards = mesh["dp_shard"]
    rest = math.prod(mesh.values()) // shards
    if ranks is not None and ranks % rest:
        raise UsageError(
            f"{argument('resume_world_size', ranks)} is not a multiple of the {rest} ranks of a shard.", code="CKPT0209"
        )
    other = {**mesh, "dp_shard": shards - 1 or 2 if ranks is None else ranks // rest}
    if device == "cpu" or math.prod(other.values()) <= gpus:
        return other
    if ranks is not None:
        raise UsageError(
            f"{argument('resume_world_size', ranks)}, but this machine has {count_noun(gpus, 'GPU')}.", code="CKPT0219"
        )
    return None


def _read_world_size() -> int:
    """Return the number of ranks of the job that torchrun or srun started this process in, from WORLD_SIZE.

    Raises:
        UsageError: the variables that torchrun and srun set are missing or wrong.
    """
    variables = {k: os.environ.get(k, "") for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    rank, world = variables["RANK"], variables["WORLD_SIZE"]
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world) and all(variables.values())):
        shown = ", ".join(f"{k}={v!r}" for k, v in variables.items())
        raise UsageError(
            "RANK and WORLD_SIZE are set, so this process is one rank of a job, but the variables make no sense: "
            f"{shown}. Start it with torchrun or srun, or unset RANK and WORLD_SIZE.",
            code="CKPT0219",
        )
    return int(world)
