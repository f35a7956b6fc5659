"""Jobs of one's own in which nothing is wrong, for tests/resume/test_benign.py: `torchrun own_jobs.py FOLDER NAME...` trains them.

FOLDER/<name> is the checkpoint after two steps, FOLDER/<name>.jsonl the recording of the whole training. `build_<name>` is what
--job is given. The training loop is that of the job and not that of resume-verify: it divides by what its loss counts.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

VOCABULARY, SEQUENCE, WIDTH, GLOBAL, MICRO, SAVED, RECORDED = 131, 12, 16, 12, 3, 2, 3


def row(i: int) -> Any:
    """The tokens of a sample."""
    return np.random.default_rng([5, i]).integers(0, VOCABULARY, SEQUENCE)


class Block(nn.Module):
    """A layer with a tensor and numbers in its extra state, by which it scales what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.amax, self.seen = torch.ones(3), {"passes": 0, "recipe": "delayed"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, width)"""
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x)))) * self.amax[0].to(x.dtype)
        return out

    def get_extra_state(self) -> Any:
        return {"amax": self.amax, **self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.amax, self.seen = state["amax"], {k: state[k] for k in self.seen}


class Language(nn.Module):
    """A language model without attention, whose running statistics each rank has for itself with `norm`."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(SEQUENCE) if norm else nn.Identity()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits."""
        x = self.embedding(input_ids)
        if attention_mask is not None:
            x = x * attention_mask[..., None].to(x.dtype)
        for block in self.blocks:
            x = block(x.cumsum(1) / SEQUENCE)
        out: torch.Tensor = self.head(self.norm(x))
        return out


class Pictures(nn.Module):
    """Convolutions with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)) for _ in range(2)
        )
        self.out = nn.Linear(6, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Logits of classes."""
        x = F.relu(self.first(self.stem(pixels)))
        for layer in self.layers:
            x = x + F.relu(layer(x))
        out: torch.Tensor = self.out(x.mean((2, 3)))
        return out


class Translation(nn.Module):
    """An encoder and a decoder with one embedding, to which the head is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.decoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.shared(source)
        for layer in self.encoder:
            x = x + torch.tanh(layer(x))
        y = self.shared(target) + x.mean(1, keepdim=True)
        for layer in self.decoder:
            y = y + torch.tanh(layer(y.cumsum(1) / SEQUENCE))
        out: torch.Tensor = self.head(y)
        return out


class Soap(torch.optim.Optimizer):
    """As SOAP was published: two lists of whole matrices for every matrix, one matrix a dimension."""

    def __init__(self, params: Any) -> None:
        super().__init__(
            params, {"lr": 3e-3, "betas": (0.9, 0.95), "precondition_frequency": 2, "normalize_grads": False}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for g in self.param_groups:
            for p in (p for p in g["params"] if p.grad is not None):
                grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                state = self.state[p]
                if not state:
                    state["step"], state["exp_avg"] = 0, torch.zeros_like(p)
                    state["GG"] = [torch.zeros(n, n) for n in p.shape] if p.dim() == 2 else []
                    state["Q"] = [torch.eye(n) for n in p.shape] if p.dim() == 2 else None
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 1 - g["betas"][0])
                step = state["exp_avg"].full_tensor() if isinstance(p, DTensor) else state["exp_avg"]
                if p.dim() == 2:
                    for k, x in enumerate((grad, grad.T)):
                        state["GG"][k].lerp_(x @ x.T, 0.05)
                        if state["step"] % g["precondition_frequency"] == 0:
                            state["Q"][k].copy_(
                                torch.linalg.qr(state["GG"][k] @ state["Q"][k] + 1e-3 * torch.eye(len(x)))[0]
                            )
                    left, right = state["Q"]
                    turned = left.T @ step @ right
                    step = left @ (turned / (turned.abs() + 1e-2)) @ right.T
                if isinstance(p, DTensor):
                    step = distribute_tensor(step.contiguous(), p.device_mesh, p.placements, src_data_rank=None)
                p.sub_(step, alpha=g["lr"])


def language(model: Language, optimizer: Any, **more: Any) -> dict[str, Any]:
    """A job on rows of tokens with a mask."""

    def sample(i: int) -> dict[str, Any]:
        return {"input_ids": row(i), "attention_mask": np.arange(SEQUENCE) < SEQUENCE - i % 4}

    return {"model": model, "optimizer": optimizer, "data": sample, **more}


def build_pictures() -> dict[str, Any]:
    """BatchNorm, float pixels, labels that are no rows, a loss of its own."""
    torch.manual_seed(3)
    model = Pictures()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def sample(i: int) -> dict[str, Any]:
        numbers = np.random.default_rng([9, i])
        return {"pixels": numbers.standard_normal((3, 6, 6)).astype("f4"), "y": np.int64(numbers.integers(10))}

    def loss(model: Any, batch: Any) -> Any:
        logits = model(batch["pixels"])
        return F.cross_entropy(logits, batch["y"], reduction="sum"), len(logits), logits

    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": sample, "loss": loss}


def build_translation() -> dict[str, Any]:
    """An encoder-decoder whose loss counts every label, as in the documents."""
    torch.manual_seed(2)
    model = Translation()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def sample(i: int) -> dict[str, Any]:
        return {
            "input_ids": row(i),
            "decoder_input_ids": np.roll(row(i)[::-1], 1).copy(),
            "labels": row(i)[::-1].copy(),
        }

    def loss(model: Any, batch: Any) -> Any:
        logits, labels = model(batch["input_ids"], batch["decoder_input_ids"]), batch["labels"]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel(), logits

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s))
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": sample, "loss": loss}


def build_several() -> dict[str, Any]:
    """torch's Muon for matrices beside AdamW for the rest, in three groups of options, and running statistics."""
    torch.manual_seed(4)
    model = Language(norm=True)
    matrices = [p for n, p in model.blocks.named_parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if not any(p is q for q in matrices)]
    groups = [{"params": rest[:1], "lr": 1e-2, "lr_mult": 5.0}, {"params": rest[1:], "weight_decay": 0.0}]
    return language(model, [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(groups, lr=1e-3)])


def masked_otherwise() -> dict[str, Any]:
    """`build_soap` with another mask in some rows, which is a fault."""
    job = build_soap()
    sample = job["data"]
    return {**job, "data": lambda i: {**sample(i), "attention_mask": np.arange(SEQUENCE) < SEQUENCE - i % 3}}


def flipped() -> dict[str, Any]:
    """`build_pictures` with its pictures turned around, which is a fault."""
    job = build_pictures()
    sample = job["data"]
    return {**job, "data": lambda i: {**sample(i), "pixels": sample(i)["pixels"][:, ::-1].copy()}}


def build_soap() -> dict[str, Any]:
    """Lists in the optimizer's state, and extra states of modules with tensors."""
    torch.manual_seed(5)
    model = Language()
    return language(model, Soap(model.parameters()))


def build_adafactor() -> dict[str, Any]:
    """torch's Adafactor, which cannot train what FSDP2 has sharded."""
    torch.manual_seed(6)
    model = Language()
    return language(model, torch.optim.Adafactor(model.parameters()))


JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    "pictures": build_pictures, "translation": build_translation, "translation16": build_translation, "several": build_several,
    "soap": build_soap,
}  # fmt: skip


def usual_loss(model: Any, batch: Any) -> Any:
    """The cross-entropy of the next token."""
    ids = batch["input_ids"]
    logits = model(**batch)
    return (
        F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"),
        ids[:, 1:].numel(),
        logits,
    )


def trained(name: str, folder: Path) -> None:
    """Train a job, save it after `SAVED` steps and record it."""
    import ckpttool

    rank, world, low = dist.get_rank(), dist.get_world_size(), name.endswith("16")
    job = JOBS[name]()
    model, optimizer, scheduler = job["model"], job["optimizer"], job.get("scheduler")
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    names = {id(p): n for n, p in model.named_parameters()}
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
    )
    for block in (m for group in model.children() if isinstance(group, nn.ModuleList) for m in group):
        fully_shard(block, mp_policy=policy)
        if isinstance(block, Block):
            block.amax, block.seen["passes"] = torch.tensor([1.5, 2.5, 0.5]), 7
    fully_shard(model, mp_policy=policy)
    new = dict(model.named_parameters())
    for g in (g for o in optimizers for g in o.param_groups):
        g["params"] = [new[names[id(p)]] for p in g["params"]]
    sampler = {"seed": 17, "order": np.arange(30)[::-1].copy(), "tag": "<s>"}
    step = 0

    def beside() -> dict[str, Any]:
        return {
            "sampler": sampler,
            "dataloader": {"position": step, "tags": ["<a>", "<b>"]},
            "step": step,
            "pad": "<pad>",
        }

    recorder = ckpttool.Recorder(
        folder / f"{name}.jsonl", model, optimizer, scheduler=scheduler, extra=beside, global_batch=GLOBAL, micro_batch=MICRO,
        dtype="bf16" if low else "fp32", **({} if name == "pictures" else {"sequence": SEQUENCE}),
        probe=np.stack([row(500), row(501)]) if isinstance(model, Language) else None,
    )  # fmt: skip
    loss_of, mine = job.get("loss", usual_loss), GLOBAL // world
    for step in range(1, SAVED + RECORDED + 1):
        first = (step - 1) * GLOBAL + rank * mine
        parts = []
        for at in range(first, first + mine, MICRO):
            samples = [job["data"](i) for i in range(at, at + MICRO)]
            parts.append({k: torch.stack([torch.as_tensor(s[k]) for s in samples]) for k in samples[0]})
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in parts:
            loss, count, _ = loss_of(model, batch)
            (loss / (count * len(parts))).backward()  # FSDP averages over the ranks
            sums += torch.tensor([float(loss), float(count)])
        dist.all_reduce(sums)
        for o in optimizers:
            o.step()
        for o in optimizers:
            o.zero_grad()
        if scheduler is not None:
            scheduler.step()
        recorder.step(step, loss=float(sums[0] / sums[1]), batch=parts)
        if step == SAVED:
            weights, optim = get_state_dict(model, optimizers)
            own = {} if scheduler is None else {"scheduler": scheduler.state_dict()}
            dcp.save({"model": weights, "optim": optim, **own, **beside()}, checkpoint_id=folder / name)
            recorder.state(step)
    recorder.close()


def main(folder: str, *names: str) -> None:
    """The jobs of these names."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for name in names:
        trained(name, Path(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, "done").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # gloo's threads now and then abort the process on the usual way out
