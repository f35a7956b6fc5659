"""Resumes a fixture's job from the per-rank files of FSDP1 with torch alone, and judges the result.

    torchrun --standalone --nproc-per-node=N tests/live/fsdp1_resume.py CASE_DIR CHECKPOINT_DIR SETTINGS [...] --out FILE

``CASE_DIR`` is a case of ``fixtures/`` of any engine; ``CHECKPOINT_DIR`` has the files of N ranks that should hold the
same state, see ``fixtures/fsdp1_jobs.py`` for their names. ``SETTINGS`` is ``-`` for those of the case, or what FSDP1 is
told, as JSON: ``{"use_orig_params": true}``.

The job is built with wrong values everywhere and loaded the way a script loads what it saved: the model's
``load_state_dict`` under the type of state dict that wrote the files, the optimizer's own ``load_state_dict``, after
``FSDP.optim_state_dict_to_load`` for SHARDED_STATE_DICT; see ``verdicts`` for the judgement.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verdicts
from torch.distributed.fsdp import FullyShardedDataParallel

from fixtures import fsdp1_jobs, jobs


def load(job: fsdp1_jobs.Fsdp1Job, checkpoint: Path) -> None:
    """Loads this rank's files. A collective."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def file(name: str) -> Any:
        # a ShardedTensor is not among what weights_only loads, and these are files of our own
        return torch.load(checkpoint / name, weights_only=False)

    if (checkpoint / f"local_rank{rank}.pt").exists():
        with fsdp1_jobs.kind_of(job.model, "fsdp1_local"):
            # strict does not know what LOCAL_STATE_DICT itself writes with use_orig_params: the flat parameters, of
            # which the parameters are views
            missing, unexpected = job.model.load_state_dict(file(f"local_rank{rank}.pt"), strict=False)
        if missing or any(not key.endswith("_flat_param") for key in unexpected):
            raise KeyError(f"missing {missing}, unexpected {unexpected}")
        job.optimizer.load_state_dict(file(f"local_optim_rank{rank}.pt"))
        return
    with fsdp1_jobs.kind_of(job.model, "fsdp1_sharded"):
        job.model.load_state_dict(file(f"model_world_size_{world}_rank_{rank}.pt"))
        state = file(f"optim_world_size_{world}_rank_{rank}.pt")
        job.optimizer.load_state_dict(
            FullyShardedDataParallel.optim_state_dict_to_load(job.model, job.optimizer, state)
        )


def resume(folder: Path, checkpoint: Path, settings: str) -> dict[str, Any]:
    """The verdict on ``checkpoint`` as a continuation of the case in ``folder``: a collective."""
    case = verdicts.without_frozen_group(jobs.read_case(folder))
    wanted = case["settings"] if settings == "-" else json.loads(settings)
    mesh = case["mesh"] if case["world_size"] == dist.get_world_size() else {"dp": dist.get_world_size()}
    planned = {"precision": "float32", **case, "settings": wanted, "mesh": mesh, "scheduler": False}
    job = fsdp1_jobs.start(planned, spoiled=True)
    load(job, checkpoint)
    return verdicts.judge(
        folder,
        state=fsdp1_jobs.truth_of(job),
        train_step=lambda step: fsdp1_jobs.train_step(job, step),
        parameters=lambda: fsdp1_jobs.parameters_of(job),
        groups=job.optimizer.param_groups,
        scheduled=False,
    )


def main() -> None:
    """One rank of the launch."""
    jobs.join()
    fsdp1_jobs.prepare()
    verdicts.run(
        "Resume fixtures' jobs from the files of FSDP1 and judge the results.",
        "CASE_DIR CHECKPOINT_DIR SETTINGS",
        resume,
    )


if __name__ == "__main__":
    main()
