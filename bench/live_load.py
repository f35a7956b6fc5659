"""What a live load costs all ranks together: `torchrun --nproc-per-node=4 bench/live_load.py CHECKPOINT PARAMETERS`.

The checkpoint is one of 24 ranks that this script makes if it is missing: PARAMETERS matrices and as many vectors, AdamW, one
file a rank. It has 144 chunks for each of PARAMETERS, so 700 of them make 100,800 chunks and 107 MB.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import ckpttool
from ckpttool.storage.source import Source

CALLS: Counter[str] = Counter()


class Model(nn.Module):
    """PARAMETERS small matrices with their biases."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(n))

    def forward(self, x: Any) -> Any:
        return sum(layer(x).sum() for layer in self.layers)


def make(path: str, n: int) -> None:
    """The checkpoint."""
    torch.manual_seed(0)
    model = Model(n)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 8)).backward()
    optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    rng = {str(rank): {"torch": torch.get_rng_state()} for rank in range(24)}
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole.pt"
        torch.save({"model": of_model, "optim": of_optimizer, "rng": rng}, whole)
        ckpttool.convert(whole, path, to="dcp", world_size=24)


def counted(name: str) -> None:
    """Count the calls of a method of `Source`."""
    real = getattr(Source, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        return real(*args, **kwargs)

    setattr(Source, name, call)


def main(path: str, n: int) -> None:
    """Load once and print one line of JSON for all ranks."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0 and not Path(path).exists():
        make(path, n)
    dist.barrier()
    torch.manual_seed(1)
    model = Model(n)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ckpttool.load  # noqa: B018 - what it imports is not measured
    for name in ("_open_file", "readinto", "list"):
        counted(name)
    dist.barrier()
    began, usage = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = ckpttool.load(model, optimizer, path)
    seconds = time.monotonic() - began
    now, now_children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    mine = {
        "seconds": round(seconds, 2),
        "cpu": round(
            sum(getattr(now, k) - getattr(usage, k) for k in ("ru_utime", "ru_stime"))
            + sum(getattr(now_children, k) - getattr(children, k) for k in ("ru_utime", "ru_stime")),
            2,
        ),
        "opens": CALLS["_open_file"], "reads": CALLS["readinto"], "lists": CALLS["list"], "bytes": done.bytes,
        "rss_mib": now.ru_maxrss >> 10, "more_mib": (now.ru_maxrss - usage.ru_maxrss) >> 10,
    }  # fmt: skip
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    if dist.get_rank() == 0:
        print(json.dumps({k: [m[k] for m in every] for k in mine}, indent=None), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
