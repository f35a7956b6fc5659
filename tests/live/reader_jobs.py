"""Fills fixtures' jobs from checkpoints in any layout, with no conversion between, and judges the result.

    torchrun --standalone --nproc-per-node=N tests/live/reader_jobs.py CASE_DIR CHECKPOINT TOLD [...] --out result.json

``CHECKPOINT`` is what ``ckpttool.open`` opens; TOLD is JSON: ``mesh``, by default one dimension over all ranks, ``how``
further arguments of ``ckpttool.open``, and ``way``:

    load     ``ckpttool.load(model, optimizer, path)``
    dcp      ``get_state_dict``, ``dcp.load`` through ``ckpttool.storage_reader``, ``set_state_dict``
    flat     the same with ``flatten_optimizer_state_dict``
    bare     ``dcp.load(model.state_dict())``, the weights only

The job is built under FSDP2 and filled with wrong values before; see ``verdicts`` for the judgement, which compares
every tensor with the truth of the fixture, bit for bit, and then trains on.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verdicts
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import ckpttool
from fixtures import jobs


def by_torch(job: jobs.Job, checkpoint: Path, how: dict[str, Any], flat: bool) -> bool:
    """torch's own way to load, through our reader; gives whether there was an optimizer. A collective."""
    reader = ckpttool.storage_reader(checkpoint, **how)
    stored = reader.read_metadata().state_dict_metadata
    with_optimizer = any(key.startswith("optim.") for key in stored)
    options = StateDictOptions(strict=False, flatten_optimizer_state_dict=flat)
    model, optim = get_state_dict(job.model, job.optimizer, options=options)
    if not with_optimizer:
        dcp_load({"model": model}, storage_reader=reader)
        set_model_state_dict(job.model, model)
        return False
    tree: Any = optim
    if flat:
        for key in [k for k in tree if k.startswith("state.") and f"optim.{k}" not in stored]:
            del tree[key]
    else:  # get_state_dict invents a zero state for a parameter that never had a gradient
        for fqn in [f for f in tree["state"] if not any(k.startswith(f"optim.state.{f}.") for k in stored)]:
            del tree["state"][fqn]
    own = {"scheduler": job.scheduler.state_dict()} if job.scheduler is not None else {}
    dcp_load({"model": model, "optim": optim, **own}, storage_reader=reader)
    set_state_dict(job.model, job.optimizer, model_state_dict=model, optim_state_dict=optim, options=options)
    if job.scheduler is not None:
        job.scheduler.load_state_dict(own["scheduler"])
    return True


def by_us(job: jobs.Job, checkpoint: Path, how: dict[str, Any]) -> bool:
    """Our own way; gives whether there was an optimizer. A collective."""
    try:
        done = ckpttool.load(job.model, job.optimizer, checkpoint, scheduler=job.scheduler, **how)
    except ckpttool.CkpttoolError as error:
        if "Pass optimizer=None" not in str(error):
            raise
        ckpttool.load(job.model, None, checkpoint, **how)
        return False
    if done.step not in (3, None):
        raise ValueError(f"the step is {done.step}")
    return True


def of_the_weights(folder: Path, state: dict[str, torch.Tensor], job: jobs.Job) -> dict[str, Any]:
    """The verdict where no optimizer was loaded: every tensor of the model, and the next loss."""
    case = jobs.read_case(folder)
    truth = {n: t for n, t in load_file(folder / "truth.safetensors").items() if n.startswith("model.")}
    sentence = verdicts.first_difference(state, truth)
    loss, reference = jobs.train_step(job, case["step"]), case["loss_next"][0]
    most = verdicts.tolerances(case)
    goes_on = abs(loss - reference) <= most.absolute + most.relative * abs(reference)
    return {
        "loaded_equal": sentence is None,
        "first_difference": sentence,
        "losses": [loss],
        "losses_reference": [reference],
        "ok": sentence is None and goes_on,
    }


def resume(folder: Path, checkpoint: Path, told: str) -> dict[str, Any]:
    """The verdict on one checkpoint: a collective, the same everywhere."""
    said = json.loads(told)
    way, how = said["way"], said.get("how", {})
    case = verdicts.without_frozen_group(jobs.read_case(folder))
    # DeepSpeed has schedulers that torch has not
    with ckpttool.open(checkpoint, **how) as opened:
        scheduled = case["scheduler"] and "scheduler.last_epoch" in opened.checkpoint.values
    job = jobs.start({**case, "scheduler": scheduled}, said.get("mesh", {"dp": dist.get_world_size()}))
    jobs.spoil(job.model, job.optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*rounded to the dtype")
        if way == "load":
            with_optimizer = by_us(job, checkpoint, how)
        elif way == "bare":
            dcp_load(job.model.state_dict(), storage_reader=ckpttool.storage_reader(checkpoint, **how))
            with_optimizer = False
        else:
            with_optimizer = by_torch(job, checkpoint, how, way == "flat")
    state = jobs.truth_of(job.model, job.optimizer if with_optimizer else None)
    if not with_optimizer:
        return of_the_weights(folder, state, job)
    return verdicts.judge(
        folder,
        state=state,
        train_step=lambda step: jobs.train_step(job, step),
        parameters=lambda: jobs.parameters_of(job.model),
        groups=job.optimizer.param_groups,
        scheduled=scheduled,
    )


def main() -> None:
    """One rank of the launch."""
    if "ANSWERS" in os.environ:
        sys.path.append(str(Path(__file__).resolve().parents[1]))
        import answers

        answers.remember()
    jobs.join()
    torch.set_num_threads(1)
    verdicts.run("Fill fixtures' jobs through our reader and judge the results.", "CASE_DIR CHECKPOINT TOLD", resume)


if __name__ == "__main__":
    main()
