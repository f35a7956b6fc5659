"""Resumes a fixture's job from a DCP checkpoint with torch alone, and judges the result.

    torchrun --standalone --nproc-per-node=N tests/live/fsdp2_resume.py CASE_DIR CHECKPOINT_DIR [...] --out result.json

``CASE_DIR`` is a case of ``fixtures/``; ``CHECKPOINT_DIR`` is its own ``ckpt`` or any DCP folder that should hold the
same state; there may be several pairs, one job after the other, because starting torch on every rank takes most of the
time. At any world size N the job is built again under FSDP2 over a 1-d mesh, filled with wrong values, and loaded by
``get_state_dict``, ``dcp.load``, ``set_state_dict``; see ``verdicts`` for the judgement. The wrong values are there
because a frozen weight, or one that the checkpoint forgot, would otherwise pass by being initialised from the same seed.
A checkpoint without optimizer is judged by its weights and the first loss.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verdicts
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from fixtures import jobs


def load_scheduler(scheduler: torch.optim.lr_scheduler.LambdaLR, checkpoint: Path) -> None:
    """Loads the scheduler's state."""
    state = scheduler.state_dict()
    dcp_load({"lr_scheduler": state}, checkpoint_id=checkpoint)
    scheduler.load_state_dict(state)


def load(job: jobs.Job, checkpoint: Path) -> bool:
    """Loads ``checkpoint`` into ``job`` as torch's own documentation does it; gives whether there was an optimizer.

    A collective.
    """
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    # a checkpoint has the keys that its own job gave it: options of every parameter, or numbers of parameters
    flat = any(key.startswith("optim.") for key in stored) and "optim.param_groups.0.lr" not in stored
    options = StateDictOptions(flatten_optimizer_state_dict=flat, strict=False)
    model, optim = get_state_dict(job.model, job.optimizer, options=options)
    if any(key.startswith("optimizer.") for key in stored):
        raw = job.optimizer.state_dict()
        dcp_load({"model": model, "optimizer": raw}, checkpoint_id=checkpoint)
        set_model_state_dict(job.model, model)
        job.optimizer.load_state_dict(raw)
        return True
    # get_state_dict invents a zero state for a parameter that never had a gradient; the checkpoint rightly has none,
    # and dcp.load would call it missing
    if not any(key.startswith("optim.") for key in stored):
        dcp_load({"model": model}, checkpoint_id=checkpoint)
        set_model_state_dict(job.model, model)
        return False
    state: Any = {} if flat else optim["state"]
    for fqn in list(state):
        if not any(key.startswith(f"optim.state.{fqn}.") for key in stored):
            del state[fqn]
    dcp_load({"model": model, "optim": optim}, checkpoint_id=checkpoint)
    # not strict for the same parameter; what is missing in truth shows in the comparison
    set_state_dict(
        job.model,
        job.optimizer,
        model_state_dict=model,
        optim_state_dict=optim,
        options=options,
    )
    return True


def resume(folder: Path, checkpoint: Path) -> dict[str, Any]:
    """The verdict on ``checkpoint`` as a continuation of the case in ``folder``: a collective, the same everywhere."""
    # torch's set_state_dict cannot give a group without gradients what it has in the checkpoint
    case = verdicts.without_frozen_group(jobs.read_case(folder))
    # DeepSpeed has schedulers that torch has not; such a job goes on with the learning rates that the other one had
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    scheduled = case["scheduler"] and "lr_scheduler.last_epoch" in stored
    job = jobs.start({**case, "scheduler": scheduled}, {"dp": dist.get_world_size()})
    jobs.spoil(job.model, job.optimizer)
    with_optimizer = load(job, checkpoint)
    if job.scheduler is not None:
        load_scheduler(job.scheduler, checkpoint)
    return verdicts.judge(
        folder,
        state=jobs.truth_of(job.model, job.optimizer if with_optimizer else None),
        train_step=lambda step: jobs.train_step(job, step),
        parameters=lambda: jobs.parameters_of(job.model),
        groups=job.optimizer.param_groups,
        scheduled=scheduled,
    )


def main() -> None:
    """One rank of the launch."""
    jobs.join()
    verdicts.run("Resume fixtures' jobs from DCP checkpoints and judge the results.", "CASE_DIR CHECKPOINT_DIR", resume)


if __name__ == "__main__":
    main()
