"""The round trip: save the job with torch's own `dcp.save`, overwrite it with garbage, load it again, compare."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from typing import Any

from ..live.load import load
from . import fingerprint
from .job import Job
from .live_facts import (  # fmt: skip
    device_of,
    named_state,
)
from .settings import Settings, Status
from .trace import Trace

__all__ = ["round_trip"]


def round_trip(job: Job, settings: Settings, out: Trace, status: Status) -> None:
    """Save, overwrite with garbage, load, and compare. A collective."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    if settings.scratch is None:
        out.roundtrip = {"skipped": "no --scratch folder that all ranks share was given"}
        return
    tensors = named_state(job.model, job.optimizer)
    need = sum(t.numel() * t.element_size() for t in tensors.values())
    free = shutil.disk_usage(settings.scratch).free
    if free < need * 1.1 + (64 << 20):
        out.roundtrip = {
            "skipped": f"{settings.scratch} has {free / 1e9:.1f} GB free, {need / 1e9:.1f} GB are to be saved"
        }
        return
    status("saving and loading again")
    device = device_of(job.model)
    names: list[Any] = [f"ckpttool-round-trip-{uuid.uuid4().hex}"]
    dist.broadcast_object_list(names)  # one that nobody else has, the same on every rank
    folder = os.path.join(settings.scratch, names[0])
    before, _ = fingerprint.in_memory(tensors, device)
    try:
        began = time.monotonic()
        model, optim = get_state_dict(job.model, job.optimizer)
        save({"model": model, "optim": optim}, checkpoint_id=folder)
        saved = time.monotonic() - began
        rates = [g["lr"] for g in job.optimizer.param_groups]
        del model, optim
        with torch.no_grad():
            for t in tensors.values():
                local = fingerprint.local(t)
                local.fill_(1 if local.dtype == torch.bool else 77)
        began = time.monotonic()
        load(job.model, job.optimizer, folder)
        loaded = time.monotonic() - began
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    after, _ = fingerprint.in_memory(named_state(job.model, job.optimizer), device)
    differing = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
    if rates != [g["lr"] for g in job.optimizer.param_groups]:
        differing.append("optim.param_groups: lr")
    out.roundtrip = {"save_seconds": saved, "load_seconds": loaded, "bytes": need, "differing": differing}
