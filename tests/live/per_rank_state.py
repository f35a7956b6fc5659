"""torchrun script: `per_rank_state.py DIR` trains with an optimizer whose state is a plain tensor for each rank, as those of
bitsandbytes and SOAP are under FSDP2, and saves with DCP. DIR/adamw is the same job with DTensors as state."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Local(torch.optim.Optimizer):
    """Keeps, of its part of each gradient: an average as 8 bits, block scales of it, and a square factor of the rows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of SGD, for the state's sake."""
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                part = p.to_local() if isinstance(p, DTensor) else p
                state = self.state[p]
                state["step"] = torch.tensor(float(state.get("step", torch.tensor(0.0))) + 1)
                state["state1"] = (grad.sign() * 100).to(torch.uint8)
                state["absmax1"] = grad.abs().reshape(-1)[:4].clone()
                state["GG"] = grad.reshape(len(grad), -1) @ grad.reshape(len(grad), -1).T
                part -= group["lr"] * grad


def main() -> None:
    """Two steps each, then the saves."""
    dist.init_process_group("gloo")
    for name in ("local", "adamw"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 13), torch.nn.Linear(13, 6))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = Local(model.parameters()) if name == "local" else torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=os.path.join(sys.argv[1], name))
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort the process on the usual way out


main()
