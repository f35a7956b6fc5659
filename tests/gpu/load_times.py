"""Load times of torch's own reader and of ckpttool's, alternated, into one live job on the GPU; the last line is JSON."""

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import ckpttool

ROUNDS = 5


def main(folder: Path) -> None:
    """Five rounds after one that warms up."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "config"), dtype=torch.float32)
    mesh = init_device_mesh("cuda", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    weights, state = get_state_dict(model, optimizer)
    tensors = [
        t for t in [*weights.values(), *(x for s in state["state"].values() for x in s.values())] if hasattr(t, "fill_")
    ]
    readers = {
        "torch": lambda: dcp.FileSystemReader(folder / "ckpt"),
        "ckpttool": lambda: ckpttool.storage_reader(folder / "ckpt"),
    }
    times: dict[str, list[float]] = {n: [] for n in readers}
    sums: dict[str, list[float]] = {}
    for round_ in range(ROUNDS + 1):
        for name, reader in readers.items():
            for t in tensors:
                t.fill_(7)
            torch.cuda.synchronize()
            began = time.perf_counter()
            dcp.load({"model": weights, "optim": state}, storage_reader=reader())
            torch.cuda.synchronize()
            if round_:
                times[name].append(time.perf_counter() - began)
            sums[name] = [float(t.double().sum()) for t in tensors]
    medians = {n: statistics.median(t) for n, t in times.items()}
    nbytes = sum(t.numel() * t.element_size() for t in tensors)
    print(json.dumps({
        "bytes": nbytes, **{f"{n}_seconds": m for n, m in medians.items()}, "rounds": times,
        "ratio": medians["ckpttool"] / medians["torch"], "equal": sums["torch"] == sums["ckpttool"],
    }))  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # threads of torch.distributed now and then abort the process on the usual way out
