"""Jobs whose live objects are more than tensors; `torchrun live_objects_job.py FOLDER` trains, saves and resumes them with torch alone.

FOLDER/<name> is the checkpoint after two steps, FOLDER/<name>.jsonl what a Recorder saw when torch's own load went on from it.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

VOCABULARY, SEQUENCE, GLOBAL, STEPS = 31, 8, 8, 3


def row(i: int) -> Any:
    """The tokens of a sample."""
    return np.random.default_rng([5, i]).integers(0, VOCABULARY, SEQUENCE)


class Scaled(nn.Linear):
    """A layer with a tensor and numbers in its extra state, by which it scales what it computes."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.amax, self.seen = torch.ones(2), {0: 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.amax[0]

    def get_extra_state(self) -> Any:
        return {"amax": self.amax, "seen": self.seen, "recipe": "delayed"}

    def set_extra_state(self, state: Any) -> None:
        self.amax, self.seen = state["amax"], dict(state["seen"])


class Model(nn.Module):
    """A language model without attention."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))
        self.norm = nn.BatchNorm1d(SEQUENCE) if norm else nn.Identity()
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x.cumsum(1)))
        out: torch.Tensor = self.head(self.norm(x))
        return out


class Counting(torch.optim.Optimizer):
    """Counts its steps in the param groups, as schedule-free and Prodigy do, and has lists of whole tensors, as SOAP has."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for g in self.param_groups:
            g["k"] += 1
            g["weight_sum"] += 0.5 / g["k"]
            for p in g["params"]:
                if p.grad is None:
                    continue
                state, grad = self.state[p], p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                if not state:
                    state["GG"] = [torch.zeros(n, n) for n in p.shape] if p.dim() == 2 else []
                    state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg"].lerp_(p.grad, 0.3)
                for m, x in zip(state["GG"], (grad, grad.T), strict=False):
                    m.lerp_(x @ x.T, 0.1)
                scale = 1 / (1 + sum(m.norm() for m in state["GG"])) * g["weight_sum"]
                whole = scale * torch.ones(p.shape)
                if isinstance(p, DTensor):
                    whole = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
                p.sub_(state["exp_avg"] * whole * g["lr"])


def build_counting() -> dict[str, Any]:
    """Counters in the param groups, lists in the state, and milestones."""
    torch.manual_seed(1)
    model = Model(norm=False)
    optimizer = Counting(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 4], 0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": row}


def build_several() -> dict[str, Any]:
    """Two optimizers, and running statistics of which every rank has its own."""
    torch.manual_seed(2)
    model = Model(norm=True)
    matrices, rest = ([p for p in model.parameters() if (p.dim() > 1) is flag] for flag in (True, False))
    optimizers = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]
    return {"model": model, "optimizer": optimizers, "data": row}


def sharded(job: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Model, optimizer and scheduler under FSDP2."""
    model, optimizer = job["model"], job["optimizer"]
    names = {id(p): n for n, p in model.named_parameters()}
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    new = dict(model.named_parameters())
    for o in optimizer if isinstance(optimizer, list) else [optimizer]:
        for g in o.param_groups:
            g["params"] = [new[names[id(p)]] for p in g["params"]]
    return model, optimizer, job.get("scheduler")


def train(model: Any, optimizer: Any, scheduler: Any, first: int, last: int, recorder: Any = None) -> None:
    """Some steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    n = GLOBAL // world
    for step in range(first, last + 1):
        ids = torch.from_numpy(np.stack([row((step - 1) * GLOBAL + rank * n + i) for i in range(n)]))
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        for o in optimizer if isinstance(optimizer, list) else [optimizer]:
            o.step()
            o.zero_grad()
        if scheduler is not None:
            scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if recorder is not None:
            recorder.step(step, loss=float(mean) / world, batch=ids, tokens=ids.numel() - len(ids))


def main(folder: str) -> None:
    """Both jobs."""
    import ckpttool

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for name, build in (("counting", build_counting), ("several", build_several)):
        job = sharded(build())
        for block in job[0].blocks:
            block.amax, block.seen = torch.tensor([1.5, 2.5]), {0: 7}
        train(*job, 1, 2)
        model, optimizer, scheduler = job
        weights, optim = get_state_dict(model, optimizer)
        own = {} if scheduler is None else {"scheduler": scheduler.state_dict()}
        dcp.save({"model": weights, "optim": optim, "step": 2, **own}, checkpoint_id=f"{folder}/{name}")
        if name == "several":
            continue
        model, optimizer, scheduler = sharded(build())
        weights, optim = get_state_dict(model, optimizer)
        tree = {"model": weights, "optim": optim, "scheduler": scheduler.state_dict()}
        dcp.load(tree, checkpoint_id=f"{folder}/{name}")
        for k in range(2):  # dcp.load added a key of text
            seen = tree["model"][f"blocks.{k}._extra_state"]["seen"]
            seen[0] = seen.pop("0")
        set_state_dict(model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optim"])
        scheduler.load_state_dict(tree["scheduler"])
        recorder = ckpttool.Recorder(
            f"{folder}/{name}.jsonl", model, optimizer, scheduler=scheduler, global_batch=GLOBAL, micro_batch=GLOBAL // 2,
            sequence=SEQUENCE, dtype="fp32", extra={"step": lambda: 2},
        )  # fmt: skip
        recorder.state(2)
        train(model, optimizer, scheduler, 3, 2 + STEPS, recorder)
        recorder.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)  # gloo's threads now and then abort the process on the usual way out
