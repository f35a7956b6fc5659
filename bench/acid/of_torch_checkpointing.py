"""torch_checkpointing's CheckpointManager, in one process, loading what more ranks have saved, as its README shows.

The model is that of the fixtures, fixtures/checkpointing_jobs.py, since the manager loads into a state dict that is there.
"""

import os
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist

from fixtures import checkpointing_jobs as job

NAME = "torch_checkpointing"
VERSIONS = {"torch_checkpointing": version("torch_checkpointing")}
CLAIMS = {"torch_checkpointing": ("weights", "optimizer", "values")}


def load(path, about):
    how = "safetensors" if os.path.isdir(os.path.join(path, "weights")) else "fsdp"
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/rendezvous", rank=0, world_size=1)
    parts = job.start("fsdp")
    job.train(*parts, seed=5)
    into = job.state(*parts)
    if how == "safetensors":
        del into["model"]["head.weight"]
        into["note"] = b""
    found = job.manager(how).load(path, into, strict=True)
    out = {f"model.{name}": job.whole(t) for name, t in found["model"].items()}
    for name, slots in found["optimizer"]["state"].items():
        out |= {f"optim.state.{name}.{slot}": job.whole(t) for slot, t in slots.items()}
    return out
