"""torchrun script: `extra_states.py FOLDER` resumes the job of `train` from FOLDER/zero3, zero1 and universal with DeepSpeed, and from
FOLDER/fsdp1 with FSDP1, and writes FOLDER/found.json: what the module's get_extra_state() gives there, and the next three losses."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


class Scaled(nn.Linear):
    """A linear layer whose output is scaled by what only its extra state holds."""

    recipe = "none"
    scale = 1.0
    history = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale

    def get_extra_state(self) -> dict[str, Any]:
        return {"recipe": self.recipe, "scale": self.scale, "amax": {"history": self.history}}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.recipe, self.scale, self.history = state["recipe"], state["scale"], state["amax"]["history"]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), Scaled(7, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def batch(step: int) -> torch.Tensor:
    """The rows of a step, the same on all ranks."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def train(model: Any, optimizer: Any, steps: range, backward: Any = None) -> list[float]:
    """The losses of some steps."""
    losses = []
    for step in steps:
        loss = model(batch(step)).square().mean()
        losses.append(loss.item())
        if backward is not None:
            backward(loss)
        else:
            loss.backward()
        optimizer.step()
        if backward is None:
            optimizer.zero_grad()
    return losses


def save(folder: Path) -> list[float]:
    """Train two steps, save, and go on: the next three losses."""
    model, optimizer = build()
    scaled = model[1]
    scaled.set_extra_state({"recipe": "delayed", "scale": 0.25, "amax": {"history": torch.tensor([1.0, -0.0, 2.5])}})
    train(model, optimizer, range(2))
    names = [n for n, _ in model.named_parameters()]
    optim = optimizer.state_dict()
    state = {names[i]: slots for i, slots in optim["state"].items()}
    groups = [{**g, "params": [names[i] for i in g["params"]]} for g in optim["param_groups"]]
    torch.save({"model": model.state_dict(), "optim": {"state": state, "param_groups": groups}}, folder / "source.pt")
    return train(model, optimizer, range(2, 5))


def by_deepspeed(folder: Path, stage: int, universal: bool) -> dict[str, Any]:
    import deepspeed

    model, optimizer = build()
    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
        **({"checkpoint": {"load_universal": True}} if universal else {}),
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.load_checkpoint(str(folder))
    losses = train(engine, engine, range(2, 5), engine.backward)
    return {"extra": plain(engine.module[1].get_extra_state()), "losses": losses}


def by_fsdp1(folder: Path) -> dict[str, Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    model, _ = build()
    model = FSDP(model, use_orig_params=False, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    rank = dist.get_rank()
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        model.load_state_dict(torch.load(folder / f"local_rank{rank}.pt", weights_only=False))
    optimizer.load_state_dict(torch.load(folder / f"local_optim_rank{rank}.pt", weights_only=False))
    return {"losses": train(model, optimizer, range(2, 5)), "extra": plain(model.module[1].get_extra_state())}


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """An extra state as JSON."""
    return {**state, "amax": {"history": list(map(str, state["amax"]["history"].tolist()))}}


def main(folder: Path) -> None:
    """All layouts."""
    from fixtures import zero_jobs

    warnings.simplefilter("ignore")
    zero_jobs.prepare()
    found = {"fsdp1": by_fsdp1(folder / "fsdp1")}
    for name, stage in (("zero3", 3), ("zero1", 1), ("universal", 3)):
        found[name] = by_deepspeed(folder / name, stage, name == "universal")
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
