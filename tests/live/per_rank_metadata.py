"""torchrun script: `per_rank_metadata.py DIR` saves one state twice, with one .metadata and with one a rank.

DIR/one is an ordinary save; DIR/each is written with use_collectives=False, where every rank lists its own chunks, and
what is replicated is listed and stored by every rank. DIR/own, too, with a buffer of each rank's own.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Two steps of a small net with buffers, then the saves."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.BatchNorm1d(13), torch.nn.Linear(13, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments, "step": 2, "rank": dist.get_rank(), "ids": torch.arange(4)}
    dcp.save(state, checkpoint_id=os.path.join(sys.argv[1], "one"))
    dcp.save(state, checkpoint_id=os.path.join(sys.argv[1], "each"), use_collectives=False)
    own = {"w": torch.ones(3), "norm.running_mean": torch.full((3,), float(dist.get_rank()))}
    dcp.save({"model": own}, checkpoint_id=os.path.join(sys.argv[1], "own"), use_collectives=False)
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort the process on the usual way out


main()
