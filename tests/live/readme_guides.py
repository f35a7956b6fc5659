"""Runs the lines of the migration guides (docs/how-to/migrations.md) in the engines they are for, and judges what they loaded.

    torchrun --standalone --nproc-per-node=N tests/live/readme_guides.py CASE_DIR FOLDER ENGINE GUIDE [...] --out FILE

``GUIDE`` is a file with the lines, run in ``FOLDER``, where the converted checkpoints lie; ``ENGINE`` is ``fsdp2``, ``zero3`` or
``fsdp1``. The lines find ``model``, ``optimizer``, ``engine`` and ``rank``, and what they would import. The job of
``CASE_DIR`` is built with wrong values everywhere before; see ``verdicts`` for the judgement.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import verdicts
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from fixtures import jobs


def built(engine: str, case: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    """(what the lines find, how the job is looked at afterwards)."""
    job: Any
    if engine == "fsdp2":
        job = jobs.start({**case, "scheduler": False}, {"dp": dist.get_world_size()})
        jobs.spoil(job.model, job.optimizer)
        found = {"model": job.model, "optimizer": job.optimizer}
        state = {
            "state": lambda: jobs.truth_of(job.model, job.optimizer),
            "parameters": lambda: jobs.parameters_of(job.model),
        }
        return found, {**state, "step": lambda k: jobs.train_step(job, k), "groups": lambda: job.optimizer.param_groups}
    if engine == "fsdp1":
        from fixtures import fsdp1_jobs

        fsdp1_jobs.prepare()
        settings = {"use_orig_params": False}
        mesh = {"dp": dist.get_world_size()}
        job = fsdp1_jobs.start(
            {"precision": "float32", **case, "settings": settings, "mesh": mesh, "scheduler": False}, spoiled=True
        )
        found = {"model": job.model, "optimizer": job.optimizer}
        state = {"state": lambda: fsdp1_jobs.truth_of(job), "parameters": lambda: fsdp1_jobs.parameters_of(job)}
        return found, {
            **state,
            "step": lambda k: fsdp1_jobs.train_step(job, k),
            "groups": lambda: job.optimizer.param_groups,
        }
    from fixtures import zero_jobs

    zero_jobs.prepare()
    settings = {**case.get("settings", {}), "stage": 3, "zero": {}}
    job = zero_jobs.start({"precision": "float32", **case, "settings": settings}, spoiled=True)
    state = {"state": lambda: zero_jobs.truth_of(job), "parameters": lambda: zero_jobs.parameters_of(job)}
    return {"engine": job.engine}, {
        **state, "step": lambda k: zero_jobs.train_step(job, k), "groups": lambda: job.inner.param_groups,
    }  # fmt: skip


def resume(folder: Path, place: Path, engine: str, guide: str) -> dict[str, Any]:
    """The verdict on a job of the case in ``folder`` after the lines of ``guide``. A collective."""
    found, look = built(engine, jobs.read_case(folder))
    known = {
        "torch": torch, "dcp": dcp, "get_state_dict": get_state_dict, "set_state_dict": set_state_dict,
        "FSDP": FullyShardedDataParallel, "StateDictType": StateDictType, "rank": dist.get_rank(),
    }  # fmt: skip
    os.chdir(place)
    exec(compile(Path(guide).read_text(encoding="utf-8"), guide, "exec"), {**known, **found})
    return verdicts.judge(
        folder,
        state=look["state"](),
        train_step=look["step"],
        parameters=look["parameters"],
        groups=look["groups"](),
        scheduled=engine == "zero3" and jobs.read_case(folder)["scheduler"],
    )


def main() -> None:
    """One rank of the launch."""
    jobs.join()
    verdicts.run(
        "Run the migration guides (docs/how-to/migrations.md) and judge them.", "CASE_DIR FOLDER ENGINE GUIDE", resume
    )


if __name__ == "__main__":
    main()
