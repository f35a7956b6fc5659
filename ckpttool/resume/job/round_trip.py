"""The round trip: save the job with torch's own `dcp.save`, overwrite it with garbage, load it again, compare.

Tensors of which every rank has a copy of its own, such as the running statistics of BatchNorm, come back as the copy of
one rank, since torch saves one. Each rank gets its own back afterwards, so that training goes on as it would have.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from ...errors import argument
from ...live.job_optimizers import select_loaded_options
from ...live.live_values import find_first_difference
from ...live.load import load
from ..request import RunSettings, Status
from ..trace import fingerprint
from ..trace.live_facts import choose_collective_device, collect_named_state, read_optimizer_numbers
from ..trace.model import Trace
from .build import Job
from .saving import find_space_shortage
from .watchdog import enter_stage

__all__ = ["overwrite_tensors", "round_trip"]


def overwrite_tensors(tensors: Iterable[Any]) -> None:
    """Overwrite this rank's shards of live tensors with a number that no training gives them, so that a load which
    leaves one out is seen."""
    import torch

    with torch.no_grad():
        for t in tensors:
            local = fingerprint.get_local_shard(t)
            local.fill_(1 if local.dtype == torch.bool else 77)


def round_trip(job: Job, settings: RunSettings, out: Trace, status: Status) -> None:
    """Save the job, overwrite its state, load it again, and compare; the result goes into `out.roundtrip`. A
    collective.

    If that is not possible, `out.roundtrip` has the reason as "skipped".

    Raises:
        CkpttoolError: what was saved cannot be loaded. Errors of torch's save pass through.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    if not settings.round_trip:
        out.roundtrip = {"skipped": "it was switched off"}
        return
    tensors = collect_named_state(job.model, job.optimizer)
    need = sum(t.numel() * t.element_size() for t in tensors.values())
    chosen: list[Any] = [None, None]
    if dist.get_rank() == 0:  # one answer for all, though another process may use the disk meanwhile
        chosen = _choose_folder(settings, need)
    dist.broadcast_object_list(chosen)
    folder, why = chosen
    if folder is None:
        out.roundtrip = {"skipped": why}
        return
    status("saving and loading again")
    enter_stage("saving for the round trip")
    device = choose_collective_device(job.model)
    before, apart = fingerprint.fingerprint_tensors(tensors, device)
    copies = fingerprint.fingerprint_each_rank({n: tensors[n] for n in apart})
    own = {n: fingerprint.get_local_shard(tensors[n]).clone() for n in apart}
    began = time.monotonic()
    model, optim = get_state_dict(job.model, job.optimizer)
    save({"model": model, "optim": optim}, checkpoint_id=folder)
    saved = time.monotonic() - began
    groups = [deepcopy(select_loaded_options(g)) for g in job.optimizer.param_groups]
    numbers = read_optimizer_numbers(job.model, job.optimizer)
    del model, optim
    overwrite_tensors(tensors.values())
    enter_stage("loading what was saved")
    began = time.monotonic()
    load(job.model, job.optimizer, folder)
    loaded = time.monotonic() - began
    dist.barrier()
    if dist.get_rank() == 0:  # if anything fails before, it goes with the folder that it is in
        shutil.rmtree(folder, ignore_errors=True)
    tensors = collect_named_state(job.model, job.optimizer)
    after, _ = fingerprint.fingerprint_tensors(tensors, device)
    differing = sorted(n for n in before.keys() | after.keys() if n not in own and before.get(n) != after.get(n))
    differing += [n for n, prints in copies.items() if after.get(n) not in {p for _, _, p in prints}]
    now = read_optimizer_numbers(job.model, job.optimizer)
    differing += sorted(n for n in numbers.keys() | now.keys() if numbers.get(n) != now.get(n))
    for k, (was, g) in enumerate(zip(groups, job.optimizer.param_groups, strict=True)):
        differing += [f"optim.param_groups.{k}.{o}" for o in was if find_first_difference(g.get(o), was[o]) is not None]
    with torch.no_grad():
        for n, t in own.items():
            if n in tensors:
                fingerprint.get_local_shard(tensors[n]).copy_(t)
    out.roundtrip = {
        "save_seconds": saved,
        "load_seconds": loaded,
        "bytes": need,
        "differing": differing,
        "apart": apart,
    }


def _choose_folder(settings: RunSettings, need: int) -> list[str | None]:
    """Choose a folder for a save of `need` bytes: [a path that does not exist yet, None], or [None, why there is
    none]."""
    if settings.scratch is None:
        return [None, f"{argument('scratch')} was not given, a folder that all ranks share"]
    if why := find_space_shortage(settings.scratch, need):
        return [None, why]
    return [os.path.join(settings.scratch, f"ckpttool-round-trip-{uuid.uuid4().hex}"), None]
