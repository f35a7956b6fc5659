"""torchrun script: `amsgrad_universal.py FOLDER` loads FOLDER/first-1, first-2, last-1 and last-2, universal checkpoints of a job
in which one of two param groups has AMSGrad, into DeepSpeed engines of stages 1 and 2, and compares them with FOLDER/<group>.pt."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fixtures import zero_jobs

import deepspeed  # isort: skip  (after zero_jobs, which prepares the ground)
from deepspeed.utils import safe_get_full_optimizer_state  # isort: skip


def build(where: str) -> tuple[Any, Any]:
    """The model, and an optimizer whose first or last group has AMSGrad."""
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))
    groups = [
        {"params": [model[0].weight, model[1].weight], "weight_decay": 0.1, "amsgrad": where == "first"},
        {"params": [model[0].bias, model[1].bias], "weight_decay": 0.0, "amsgrad": where == "last"},
    ]
    return model, torch.optim.AdamW(groups, lr=0.01)


def differing(folder: Path, where: str, stage: int) -> list[str]:
    """The entries of the optimizer's state that an engine does not hold as the job had them."""
    model, optimizer = build(where)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
            "checkpoint": {"load_universal": True},
        },
    )  # fmt: skip
    engine.load_checkpoint(str(folder / f"{where}-{stage}"))
    truth = torch.load(folder / f"{where}.pt", weights_only=False)["optim"]["state"]
    out = [
        f"{n}.{slot}"
        for n, p in model.named_parameters()
        for slot, x in truth[n].items()
        if slot != "step" and not torch.equal(safe_get_full_optimizer_state(p, slot), x)
    ]
    engine.backward(engine(torch.ones(1, 6)).sum())
    engine.step()
    return out


def main(folder: Path) -> None:
    """All four."""
    zero_jobs.prepare()
    found = {f"{w}-{s}": differing(folder, w, s) for w in ("first", "last") for s in (1, 2)}
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
