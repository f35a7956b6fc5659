"""The save of a job that was trained from its start (`--fresh`): by the job's own code, or by dcp.save."""

from __future__ import annotations

import os
import shutil
import time

from ...errors import NoSpace, UsageError, argument
from ...live.collectives import gather_objects, run_on_first_rank
from ..request import RunSettings
from ..trace.live_facts import collect_named_state
from ..trace.records import RoundTripRecord
from .build import Job

__all__ = ["find_space_shortage", "save_job"]


def save_job(job: Job, settings: RunSettings, step: int) -> RoundTripRecord:
    """Save a job after a step into `settings.source`, which is emptied first. A collective.

    The job's own `save` does it, if build() returned one. Otherwise dcp.save writes model, optimizers, scheduler, step
    and the random states of each rank.

    Returns:
        {"save_seconds", "bytes", "own": whether the job's own `save` did it}.

    Raises:
        NoSpace: the disk has too little space. UsageError: the job's own save wrote nothing there. Errors of the job's
            save and of torch's pass through.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = settings.source
    need = sum(t.numel() * t.element_size() for t in collect_named_state(job.model, job.optimizer).values())

    def empty() -> None:
        """Make the folder anew, where the disk has room for the save."""
        shutil.rmtree(folder, ignore_errors=True)
        if why := find_space_shortage(os.path.dirname(folder), need):
            raise NoSpace(f"{why}. Pass {argument('scratch')}, a folder with more room.", code="CKPT0803")
        os.mkdir(folder)

    run_on_first_rank(empty)
    began = time.monotonic()
    if job.save is not None:
        job.save(folder, step)
    else:
        save(_collect_job_state(job, step, settings.device), checkpoint_id=folder)
    dist.barrier()
    if not run_on_first_rank(lambda: os.listdir(folder)):
        raise UsageError(
            "save(folder, step) of build() wrote nothing into the folder that it was given.", code="CKPT0215"
        )
    seconds = max(gather_objects(time.monotonic() - began))
    return {"save_seconds": seconds, "bytes": need, "own": job.save is not None}


def _collect_job_state(job: Job, step: int, device: str) -> dict[str, object]:
    """Return the dict that this rank passes to dcp.save: "model", "optim", "trainer", "rng", and "scheduler" if it has
    one.

    A collective.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optim = get_state_dict(job.model, job.optimizer)
    generators = {"torch": torch.get_rng_state()}
    if device == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state()
    tree = {"model": model, "optim": optim, "trainer": {"step": step}, "rng": {str(dist.get_rank()): generators}}
    return tree if job.scheduler is None else {**tree, "scheduler": job.scheduler.state_dict()}


def find_space_shortage(folder: str, need: int) -> str | None:
    """Return a text if a disk has too little space for a save of `need` bytes in a folder; None if it has enough."""
    free = shutil.disk_usage(folder).free
    if free < need * 1.1 + (64 << 20):
        return f"{folder} has {free / 1e9:.1f} GB free, {need / 1e9:.1f} GB are to be saved"
    return None
