"""Loads a checkpoint in any layout into a whole live job, on top of the reader for torch's planner.

    done = ckpttool.load(model, optimizer, "runs/zero3", scheduler=scheduler)            # done.step, done.values

Checkpoint and job are compared on every rank before a byte is written (live_job.py), and again when all is loaded; when
one rank cannot go on, none does.
"""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

from ..engine.copy.fill import Progress
from ..engine.opening import OpenCheckpoint, OpenOptions
from ..errors import CkpttoolError
from ..extras import require_packages
from ..options import ReadKeywords, list_keywords
from .collectives import run_on_all_ranks, union_over_ranks
from .shared_index import locate_together, open_together
from .storage_reader import storage_reader

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.stateful import Stateful

    from .job_optimizers import Optimizers

__all__ = ["Loaded", "load", "load_opened", "storage_reader"]


@dataclass(frozen=True)
class Loaded:
    """What `load` did, and the rest of the checkpoint for the caller to use.

    `step`    trainer.step of the checkpoint or, lacking that, the largest step of its optimizer; None without either
    `values`  {"trainer": {...}, "rng": {...}, "dataloader": {...}, "scaler": {...}, "extra": {...}}, as far as there
              are such, and "scheduler" where no scheduler was given: plain data, numpy arrays, and tensors of at most
              1 MiB on the CPU. The keys are those of the canonical names; lists are lists again.
    `notes`   sentences on what was assumed, what is not in `values`, and what was not changed in the job
    `bytes`   bytes that this rank read; `seconds` the duration of the load
    """

    step: int | None
    values: dict[str, Any] = field(default_factory=dict, repr=False)  # RNG states would flood a terminal
    notes: list[str] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0


@list_keywords
def load(
    model: torch.nn.Module,
    optimizer: Optimizers,
    path: str | os.PathLike[str],
    *,
    scheduler: Stateful | None = None,
    ignore_recorded_digests: bool = False,
    progress: Progress | None = None,
    **reading: Unpack[ReadKeywords],
) -> Loaded:
    """Load a checkpoint in any layout into a live job: FSDP2, HSDP, tensor parallel, DDP or plain. A collective.

    Examples:
        >>> done = ckpttool.load(model, optimizer, "runs/step-1000", scheduler=scheduler)  # doctest: +SKIP
        >>> ckpttool.load(model, None, "meta-llama/Llama-3.2-1B")  # doctest: +SKIP

    Parameters and persistent buffers are matched by FQN, and so is the optimizer's state. Options of a param group are
    those of the checkpoint's group that lists its parameters; `foreach`, `fused`, `capturable` and `differentiable`
    stay those of the job. A parameter without state in the checkpoint has none afterwards. Gradients are left alone.
    Modules get their extra state through `set_extra_state`.

    Keys, containers and kinds of numbers are those of the live objects: milestones of a MultiStepLR are integers in a
    Counter again, of which DCP has made text. When all is loaded, what the job would save (its state dicts) is compared
    with the files.

    Args:
        model: the module, sharded or not.
        optimizer: the optimizer over its parameters, or a list of several as in get_state_dict; None for the weights
            only.
        path: the checkpoint; it and the arguments after `scheduler` are those of `storage_reader`.
        scheduler: anything with `load_state_dict` and `state_dict`.

    Raises:
        Unsupported: checkpoint and job do not fit; all differences are in the message, and nothing was changed.
        Differs: the job does not hold what was loaded; the first difference is in the message, and the job is loaded in
            part. NotRecognised, Corrupt, Unsafe: see errors.py.
    """
    require_packages("loading into a live job", "torch")
    started = time.monotonic()
    options = OpenOptions(**reading)
    with open_together(path, options, ignore_recorded_digests) as opened:
        return load_opened(opened, path, model, optimizer, scheduler, progress, started)


def load_opened(
    opened: OpenCheckpoint,
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers,
    scheduler: Stateful | None,
    progress: Progress | None,
    started: float,
) -> Loaded:
    """Load a checkpoint that is open on every rank into a live job: `load` without the opening. A collective, which
    every rank has to call.

    Args:
        opened: the open checkpoint; the caller closes it.
        path: of the checkpoint, for messages.
        model: the module, sharded or not.
        optimizer: its optimizer, a list of several, or None for the weights only.
        scheduler: a scheduler to load, or None.
        progress: called with ("load", bytes, bytes in all) of this rank; None for nobody.
        started: `time.monotonic()` when the load began, from which its seconds are counted.

    Raises:
        Unsupported: checkpoint and job do not fit, and nothing was changed.
        Differs: the job does not hold what was loaded, and is loaded in part.
        CkpttoolError: whatever else makes one rank stop.
    """
    from .live_job import LiveJob
    from .torch_reader import AnyLayoutReader

    locate_together(opened)
    reader = AnyLayoutReader(path, opened, progress)
    job = run_on_all_ranks(lambda: LiveJob(model, optimizer, scheduler, reader.opened))
    try:
        job.share_small()
        anywhere = union_over_ranks({*job.live, *job.extra})
        run_on_all_ranks(lambda: job.match(anywhere))
        _dcp_load(job.wanted, reader)
        run_on_all_ranks(job.finish, "does not hold what is in the files, so no rank goes on")
        return Loaded(job.step, job.rest, job.notes, reader.bytes_read, time.monotonic() - started)
    except BaseException:
        job.undo()
        raise


def _dcp_load(state_dict: dict[str, object], reader: object) -> None:
    """Let torch.distributed.checkpoint fill a state dict in place from a StorageReader. A collective, which every rank
    has to call.

    Raises:
        CkpttoolError: ckpttool's own error stopped the load, on any rank.
        CheckpointException: another error did (torch's class, a BaseException).
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable", UserWarning)
            dcp_load(state_dict, storage_reader=reader)
    except CheckpointException as e:  # a BaseException that hides the cause
        for failure, _ in e.failures.values():
            if isinstance(failure, CkpttoolError):
                raise failure from None
        raise
