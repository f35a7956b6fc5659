"""torchrun script: `shared_jobs.py WORDS.json OUT` opens checkpoints together with other ranks, and leaves OUT-<rank>.json.

WORDS.json: {"checkpoints": [[path, how], ...], "scratch": folder}. What a rank finds is compared by the test.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

import ckpttool
from ckpttool.engine.opening import OpenOptions
from ckpttool.index.checkpoint import Checkpoint
from ckpttool.live.shared_index import locate_together, open_alone, open_index_together
from ckpttool.storage.source import Source

CALLS: Counter[str] = Counter()


def count(owner: Any, name: str) -> None:
    """Count the calls of a function from now on."""
    real = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        return real(*args, **kwargs)

    setattr(owner, name, counted)


def parts(ckpt: Checkpoint) -> dict[str, Any]:
    """An index as values that can be compared."""
    tensors = [
        (n, t.dtype, t.shape, t.path, [type(p) for p in t.path], t.coding, t.wrapper, list(t.chunks))
        for n, t in ckpt.tensors.items()
    ]
    records = sorted(tuple(map(tuple, (r.extent, (r.crc32,)))) for r in ckpt.records)
    return {**vars(ckpt), "tensors": tensors, "records": records}


def same_index(path: str, how: dict[str, Any]) -> list[str]:
    """What differs between an index that was read here and one that came from rank 0, before and after it was located."""
    options = OpenOptions(**how)
    with open_alone(path, options) as alone:
        CALLS.clear()
        with open_index_together(path, options)[0] as shared:
            work = {k: CALLS[k] for k in ("list", "_open_file", "run") if CALLS[k]}
            a, b = parts(alone.checkpoint), parts(shared.checkpoint)
            out = [f"opened: {k}" for k in a if a[k] != b[k]]
            locate_together(shared)
            a, b = parts(alone.locate()), parts(shared.locate())
            out += [f"located: {k}" for k in a if a[k] != b[k]]
            if (shared.layout, shared.folder, shared.recorded()) != (alone.layout, alone.folder, alone.recorded()):
                out.append("layout or record")
            if dist.get_rank() and work and shared.layout.name != "audit":  # an archive is one file, opened by each
                out.append(f"work: {work}")
    return out


def job() -> tuple[Any, Any]:
    """A sharded model that has taken no step yet."""
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(8, 7), torch.nn.Linear(7, 5))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.5)


def forgetful(really: bool) -> tuple[Any, Any]:
    """The same, whose optimizer saves another number of steps than it holds."""

    class Forgetful(torch.optim.AdamW):
        def state_dict(self) -> Any:
            out = super().state_dict()
            if really:
                out["state"] = {k: {**s, "step": s["step"] + 1} for k, s in out["state"].items()}
            return out

    model, _ = job()
    return model, Forgetful(model.parameters(), lr=0.5)


def said(act: Any) -> str:
    """What it raises."""
    try:
        act()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    except BaseException as e:  # torch's CheckpointException
        return f"{type(e).__name__}: {e}"[:2000]
    return ""


def loaded(path: str | Path) -> dict[str, Any]:
    """What a job holds after a load, whole, and what `load` says."""
    model, optimizer = job()
    CALLS.clear()
    done = ckpttool.load(model, optimizer, path)
    opens = dict(CALLS)
    tensors = {n: t.full_tensor().tolist() for n, t in model.state_dict().items()}
    moments = [optimizer.state[p]["exp_avg"].full_tensor().tolist() for p in model.parameters()]
    rest = repr(sorted(done.values.items()))
    return {"model": tensors, "moments": moments, "lr": optimizer.param_groups[0]["lr"], "rest": rest, "calls": opens,
            "step": done.step}  # fmt: skip


def by_torch(path: str | Path, **how: Any) -> None:
    """torch's load, where no rank has read the index for the others."""
    model, _ = job()
    dcp.load({"model": model.state_dict()}, storage_reader=ckpttool.storage_reader(path, **how))


def main(words: str, out: str) -> None:
    """Everything, in one launch."""
    asked = json.loads(Path(words).read_text())
    dist.init_process_group("gloo")
    rank, scratch = dist.get_rank(), Path(asked["scratch"])
    for name in ("list", "_open_file", "readinto"):
        count(Source, name)
    count(subprocess, "run")
    mine: dict[str, Any] = {"same": {}}
    for path, how in asked["checkpoints"]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mine["same"][path] = same_index(path, how)
    one, two = scratch / "one", scratch / "two"
    mine["loaded"] = loaded(one)
    mine["copy on rank 1"] = loaded(scratch / ("copy" if rank == 1 else "one"))
    mine["other on rank 1"] = said(lambda: loaded(two if rank == 1 else one))
    mine["nothing on rank 1"] = said(lambda: loaded(scratch / "nothing" if rank == 1 else one))
    mine["damaged"] = said(lambda: loaded(scratch / "damaged"))
    mixed = scratch / "mixed"
    mine["mixed"] = [said(lambda: loaded(mixed)), said(lambda: ckpttool.storage_reader(mixed, shared=True))]
    mine["mixed"].append(said(lambda: by_torch(mixed)))
    mine["mixed, allowed"] = said(lambda: by_torch(mixed, allow_equal_ranks=True))

    mine["forgets on rank 1"] = said(lambda: ckpttool.load(*forgetful(rank == 1), one))

    def touched() -> None:
        reader = ckpttool.storage_reader(scratch / "touched", shared=True)
        dist.barrier()
        if rank == 0:
            for file in (scratch / "touched").glob("*.distcp"):
                os.utime(file)
        dist.barrier()
        model, _ = job()
        dcp.load({"model": model.state_dict()}, storage_reader=reader)

    if rank == 0:
        shutil.copytree(one, scratch / "touched")
    dist.barrier()
    mine["touched"] = said(touched)
    if rank == 0:  # alone, to broadcast it later
        state = {"model": {"0.bias": torch.zeros(7)}}
        dcp.load(state, storage_reader=ckpttool.storage_reader(one), no_dist=True)
        mine["alone"] = state["model"]["0.bias"].tolist()
    dist.barrier()
    Path(f"{out}-{rank}.json").write_text(json.dumps(mine))
    dist.barrier()
    dist.destroy_process_group()


main(*sys.argv[1:])
os._exit(0)  # gloo's threads now and then abort the process on the usual way out
