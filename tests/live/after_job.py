"""A job whose faults no step shows: running statistics, a router's bias, a schedule that decays after the steps that are run.

    torchrun --standalone --nproc-per-node=2 tests/live/after_job.py --out FOLDER

FOLDER gets `ckpt-<world size>`, saved after 12 steps, and `recorded-<world size>.jsonl`, whose recorder was asked for the
state at 12 and at 15. `build` and the functions after it are what --job is given.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from live.faults import row  # noqa: E402

SAVED, STEPS = 12, 3
GLOBAL, MICRO, SEQUENCE = 8, 2, 16
WIDTH, EXPERTS, RATE = 24, 3, 1e-2


class Routed(nn.Module):
    """One of three matrices for each token, chosen with a bias that the optimizer's hook moves; counts that are in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("counts", torch.zeros(EXPERTS), persistent=False)

    bias: torch.Tensor
    counts: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, width)"""
        weight = self.router(x).softmax(-1)
        mask = F.one_hot((weight.detach() + self.bias).argmax(-1), EXPERTS).to(x.dtype)
        if self.training:
            self.counts += mask.sum((0, 1))
        return torch.einsum("btw,ewv,bte->btv", x, self.experts, weight * mask)

    @torch.no_grad()
    def balance(self) -> None:
        """Move the bias towards the experts with fewer tokens."""
        if dist.is_initialized():
            dist.all_reduce(self.counts)
        self.bias += 0.01 * torch.sign(self.counts.mean() - self.counts)
        self.counts.zero_()


class Model(nn.Module):
    """Logits of token ids."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.emb = nn.Embedding(131, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH, momentum=momentum)
        self.routed = Routed()
        self.head = nn.Linear(WIDTH, 131, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits (rows, tokens, 131)."""
        x = self.emb(input_ids)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        x = self.norm(x.flatten(0, 1)).view_as(x)
        out: torch.Tensor = self.head(x + self.routed(x))
        return out


def model_of(momentum: float = 0.1) -> Model:
    """The model, with the same weights everywhere."""
    torch.manual_seed(3)
    return Model(momentum)


def optimizer_of(model: Model, balanced: bool = True) -> torch.optim.AdamW:
    """AdamW, which moves the bias of the router after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    if balanced:
        optimizer.register_step_post_hook(lambda *_: model.routed.balance())
    return optimizer


def scheduler_of(optimizer: Any, until: int = 20) -> torch.optim.lr_scheduler.LambdaLR:
    """A constant rate, and a tenth of it after so many steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < until else 0.1)


def build(until: int = 20, momentum: float = 0.1, balanced: bool = True) -> dict[str, Any]:
    """The job as it should be, or otherwise."""
    model = model_of(momentum)
    optimizer = optimizer_of(model, balanced)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler_of(optimizer, until), "data": row}


def late() -> dict[str, Any]:
    """The rate decays 20 steps later."""
    return build(until=40)


def momentum() -> dict[str, Any]:
    """Running statistics follow the batches faster."""
    return build(momentum=0.5)


def unbalanced() -> dict[str, Any]:
    """Nothing moves the bias of the router."""
    return build(balanced=False)


def then(act: Callable[[Any], None]) -> dict[str, Any]:
    """The job, whose scheduler acts on the optimizer after the last step that is run."""
    out = build()
    scheduler = out["scheduler"]

    class Acting(type(scheduler)):  # type: ignore[misc]
        def step(self, epoch: Any = None) -> None:
            super().step(epoch)
            if self.last_epoch == SAVED + STEPS:
                act(out["optimizer"])

    scheduler.__class__ = Acting
    return out


def decaying() -> dict[str, Any]:
    """The last step leaves another weight decay, and a step count that is one too large."""

    def act(optimizer: Any) -> None:
        (group,) = optimizer.param_groups
        group["weight_decay"] = 0.2
        optimizer.state[group["params"][0]]["step"] += 1

    return then(act)


def meddling() -> dict[str, Any]:
    """After the last step, a moment is rotated by a thousandth: half of its elements grow, half of them shrink."""

    @torch.no_grad()
    def act(optimizer: Any) -> None:
        moment = optimizer.state[optimizer.param_groups[0]["params"][1]]["exp_avg"].to_local()
        moment[:, ::2] *= 1.001
        moment[:, 1::2] *= 0.999

    return then(act)


def failing() -> dict[str, Any]:
    """A scheduler that ends soon after the steps that are run."""
    out = build()
    scheduler = out["scheduler"]

    class Ending(type(scheduler)):  # type: ignore[misc]
        def step(self, epoch: Any = None) -> None:
            if self.last_epoch == SAVED + STEPS + 2:
                raise RuntimeError("this schedule has no more steps")
            super().step(epoch)

    scheduler.__class__ = Ending
    return out


def main() -> None:
    """One rank of the original."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    from fixtures import jobs

    jobs.join()
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.fsdp import fully_shard

    import ckpttool

    rank, world = dist.get_rank(), dist.get_world_size()
    model = model_of()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    recorder = ckpttool.Recorder(
        out / f"recorded-{world}.jsonl", model, optimizer, scheduler=scheduler, dtype="fp32", global_batch=GLOBAL,
        micro_batch=MICRO, sequence=SEQUENCE,
    )  # fmt: skip
    for step in range(1, SAVED + STEPS + 1):
        total, seen = 0.0, []
        for k in range(rank, GLOBAL // MICRO, world):
            first = (step - 1) * GLOBAL + k * MICRO
            ids = torch.as_tensor(np.stack([row(i) for i in range(first, first + MICRO)]))
            loss = F.cross_entropy(model(input_ids=ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            (loss * (MICRO * world / GLOBAL)).backward()
            total += loss.item() * MICRO * world / GLOBAL
            seen.append(ids)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        recorder.step(step, loss=total, batch=seen)
        if step in (SAVED, SAVED + STEPS):
            recorder.state(step)
        if step == SAVED:
            weights, optim = get_state_dict(model, optimizer)
            tree = {"model": weights, "optim": optim, "scheduler": scheduler.state_dict(), "step": step}
            save(tree, checkpoint_id=out / f"ckpt-{world}")
    if rank == 0:
        (out / f"done-{world}").touch()
    jobs.leave()


if __name__ == "__main__":
    main()
