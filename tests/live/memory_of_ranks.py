"""What fully_shard and DeepSpeed allocate on each rank for a fixture's job, after a step: bytes of storages, as JSON.

    torchrun --standalone --nproc-per-node=N tests/live/memory_of_ranks.py PRECISION CASE_DIR:fsdp2 CASE_DIR:zero3 ... --out FILE

PRECISION is that of DeepSpeed's engine, or the dtype of the model under FSDP2.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fixtures import jobs


def stored(tensors: Any) -> int:
    """Bytes of the storages that these tensors lie in, each counted once, padding included."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}.values())


def slots_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state."""
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]


def measure_fsdp2(case: dict[str, Any]) -> dict[str, int]:
    """What a rank has under fully_shard: gradients before the step, state after it."""
    job = jobs.start(case, {"dp": dist.get_world_size()})
    rows = jobs.batch(0, dist.get_rank(), dist.get_world_size())
    jobs.loss_of(job.model(input_ids=rows, labels=rows)).backward()
    params = list(job.model.parameters())
    grads = stored(p.grad for p in params if p.grad is not None)
    job.optimizer.step()
    buffers = [b for n, b in job.model.named_buffers() if n in dict(jobs.persistent_buffers(job.model))]
    return {"params": stored(params) + stored(buffers), "grads": grads, "optimizer": stored(slots_of(job.optimizer))}


def measure_zero(case: dict[str, Any], stage: int) -> dict[str, int]:
    """What a rank has under DeepSpeed."""
    from fixtures import zero_jobs

    zero_jobs.prepare()
    job = zero_jobs.start({**case, "settings": {"stage": stage}})
    rows = jobs.batch(0, dist.get_rank(), dist.get_world_size())
    job.engine.backward(jobs.loss_of(job.engine(input_ids=rows, labels=rows)))
    engine, params = job.engine.optimizer, list(job.model.parameters())
    buffers = stored(b for _, b in jobs.persistent_buffers(job.model))
    if stage == 3:
        persistent = sum(p.ds_numel * p.element_size() for p in params if p.ds_persist)
        weights = stored(p.ds_tensor for p in params) + persistent
        grads = stored([engine.grad_partitions_flat_buffer])
        masters = stored(engine.fp32_partitioned_groups_flat)
    else:
        weights = stored(params)
        grads = sum(t.nbytes for found in engine.averaged_gradients.values() for t in found or ())
        masters = stored(engine.single_partition_of_fp32_groups)
    job.engine.step()
    return {"params": weights + buffers, "grads": grads, "optimizer": masters + stored(slots_of(job.inner))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("precision")
    parser.add_argument("jobs", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    jobs.join()
    found = {}
    for one in given.jobs:
        folder, _, strategy = one.rpartition(":")
        case = {**jobs.read_case(Path(folder)), "precision": given.precision}
        mine = measure_fsdp2(case) if strategy == "fsdp2" else measure_zero(case, int(strategy[-1]))
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        found[one] = ranks
    if dist.get_rank() == 0:
        given.out.write_text(json.dumps(found))
    jobs.leave()


if __name__ == "__main__":
    main()
