"""A job of two ranks with dropout, once without a Recorder and once with all that one can record, under FSDP2 and under DDP.

Writes <kind>.jsonl, and report.json with the losses of both and what was warned about.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

VOCABULARY, SEQUENCE, ROWS = 31, 6, 2
PROBE = [[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]]


class Small(nn.Module):
    """A model with dropout, numpy's and Python's random numbers in its forward pass, and a buffer that counts passes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)) for _ in range(2))
        self.norm = nn.BatchNorm1d(SEQUENCE)
        self.head = nn.Linear(8, VOCABULARY)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        self.passes += 1  # in evaluation, too, as some models do
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + block(x)
        noise = 0.01 * (random.random() + float(np.random.rand()))
        out: torch.Tensor = self.head(self.norm(x) + noise)
        return out


class Loader:
    """A loader whose state differs from rank to rank, and which raises on rank 1 after the first time if `broken`."""

    def __init__(self, broken: bool = False) -> None:
        self.broken, self.asked = broken, 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        if self.broken and dist.get_rank() == 1:
            raise RuntimeError("the loader has gone")
        rank = dist.get_rank()
        return {"position": rank, f"rank_{rank}": {"at": 10 + rank}, "epoch": 2, "order": np.arange(3) + rank}


def trained(kind: str, out: Path | None, steps: int = 3) -> list[float]:
    """The losses of a job, with a Recorder where `out` is given."""
    import ckpttool

    torch.manual_seed(5)
    model: Any = Small()
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    ema = {"w": next(iter(model.parameters())).detach().clone()}
    seed = 7 + dist.get_rank()
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    recorder = None
    if out is not None:
        recorder = ckpttool.Recorder(
            out / f"{kind}.jsonl", model, optimizer, scheduler=scheduler, scaler=lambda: {"scale": 2.0},
            dataloader=Loader(kind == "broken"), extra={"ema": lambda: ema, "epoch": 2}, probe=PROBE, global_batch=2 * ROWS,
        )  # fmt: skip
    losses = []
    for step in range(1, steps + 1):
        draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
        ids = torch.randint(0, VOCABULARY, (ROWS, SEQUENCE), generator=draw)
        logits = model(input_ids=ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if recorder is not None:
            recorder.step(step, loss=object() if kind == "broken" and step == 2 else loss, batch=ids)
            recorder.state(step)
    inner = getattr(model, "module", model)
    return [*losses, float(inner.passes), float(inner.norm.running_mean.sum())]


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    from fixtures import jobs

    jobs.join()
    report: dict[str, Any] = {}
    for kind in ("fsdp", "ddp", "broken"):
        without = trained(kind, None)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            recorded = trained(kind, out)
        ours = [str(w.message) for w in seen if "ckpttool" in str(w.message)]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, {"without": without, "recorded": recorded, "warned": ours})
        report[kind] = every
    if dist.get_rank() == 0:
        (out / "report.json").write_text(json.dumps(report))
    jobs.leave()


if __name__ == "__main__":
    main()
