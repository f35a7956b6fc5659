"""A small decoder that torch's own context parallelism (cp) or pipeline stages (pp) train under FSDP2.

torch's ring attention has no kernel for CPUs, so with cp, torch divides the tokens, and keys and values are gathered.

python stages_and_contexts.py DIR MESH [FROM]   MESH is dp_shard=2,cp=2 or pp=2,dp_shard=2

Without FROM, two steps are taken and saved with DCP as DIR/ckpt; with it, the state is loaded from there. Then DIR/found.json gets
the losses of the next two steps, and DIR/whole.pt the state before them, gathered: {"PARAMETER SLOT": tensor}, no SLOT for weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor, all_gather_tensor_autograd
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel

VOCABULARY, WIDTH, HEADS, LENGTH, ROWS, LAYERS = 37, 16, 2, 8, 8, 4


class Block(nn.Module):
    """Attention and an MLP, each after a norm. `cp` has the ranks among which the tokens of a row are divided."""

    cp: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        every = at
        if self.cp is not None:
            k, v = (all_gather_tensor_autograd(t.contiguous(), 2, self.cp) for t in (k, v))
            every = all_gather_tensor(at, 0, self.cp)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(at[:, None] < every, float("-inf"))
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.mlp_norm(x))))
        return out


class Model(nn.Module):
    """The decoder, or the layers of it that a stage has; `at` of forward are the positions of the tokens."""

    def __init__(self, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.place: nn.Module | None = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY, bias=False)
        g = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g) * 0.3)
        for i in range(LAYERS):
            if i * stages // LAYERS != stage:
                del self.layers[str(i)]
        if stage:
            self.embed = self.place = None
        if stage < stages - 1:
            self.head = None

    def forward(self, x: torch.Tensor, at: torch.Tensor | None = None) -> torch.Tensor:
        at = torch.arange(LENGTH) if at is None else at
        if self.embed is not None and self.place is not None:
            x = self.embed(x) + self.place(at)
        for layer in self.layers.values():
            x = layer(x, at)
        return x if self.head is None else self.head(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of a step and those that follow them, [ROWS, LENGTH] each."""
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_of(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The mean over tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with another decay for norms and biases."""
    few = [p for p in model.parameters() if p.ndim == 1]
    many = [p for p in model.parameters() if p.ndim > 1]
    return torch.optim.AdamW([{"params": many, "weight_decay": 0.1}, {"params": few, "weight_decay": 0.0}], lr=1e-2)


def train_alone(model: nn.Module, opt: torch.optim.Optimizer, steps: range) -> list[float]:
    """The losses of some steps of one process."""
    losses = []
    for step in steps:
        tokens, wanted = batch(step)
        loss = loss_of(model(tokens), wanted)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def average(loss: torch.Tensor, group: Any = None) -> float:
    """The mean of a loss over ranks."""
    loss = loss.detach().clone()
    dist.all_reduce(loss, group=group)
    return loss.item() / dist.get_world_size(group)


def main(folder: Path, sizes: dict[str, int], source: str | None) -> None:
    """Train, or resume."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if sizes.get("pp", 1) > 1:
        mesh = init_device_mesh("cpu", (sizes["pp"], sizes["dp_shard"]), mesh_dim_names=("pp", "dp_shard"))
        stage, part = mesh.get_coordinate() or (0, 0)
        model, fsdp, parts = Model(stage, sizes["pp"]), mesh["dp_shard"], sizes["dp_shard"]
    else:
        mesh = init_device_mesh("cpu", (sizes["dp_shard"], sizes["cp"]), mesh_dim_names=("dp_shard", "cp"))
        stage, part = 0, rank // sizes["cp"]
        model, fsdp, parts = Model(), mesh["dp_shard", "cp"]._flatten("dp_shard_cp"), sizes["dp_shard"]
    for layer in model.layers.values():
        layer.cp = mesh.get_group("cp") if "cp" in sizes else None
        fully_shard(layer, mesh=fsdp)
    fully_shard(model, mesh=fsdp)
    opt = make_optimizer(model)

    def step_of_stages(tokens: torch.Tensor, wanted: torch.Tensor) -> float:
        group = mesh.get_group("pp")
        schedule = ScheduleGPipe(
            PipelineStage(model, stage, sizes["pp"], torch.device("cpu"), group=group), 2, loss_fn=loss_of
        )
        losses: list[torch.Tensor] = []
        if stage == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=wanted, losses=losses)
        mean = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.all_reduce(mean, group=group)
        return average(mean, mesh.get_group("dp_shard"))

    def step_of_contexts(tokens: torch.Tensor, wanted: torch.Tensor) -> float:
        at = torch.arange(LENGTH)
        with context_parallel(
            mesh["cp"], buffers=[tokens, wanted, at], buffer_seq_dims=[1, 1, 0], no_restore_buffers={tokens, wanted, at}
        ):
            loss = loss_of(model(tokens, at), wanted)
            loss.backward()
        return average(loss)

    def train(steps: range) -> list[float]:
        losses = []
        for step in steps:
            tokens, wanted = (t.chunk(parts)[part].clone() for t in batch(step))
            opt.zero_grad()
            losses.append((step_of_stages if "pp" in sizes else step_of_contexts)(tokens, wanted))
            opt.step()
        return losses

    # each stage has param groups of its own; as lists, DCP would keep those of the first one only
    flat = StateDictOptions(flatten_optimizer_state_dict="pp" in sizes)

    def state() -> dict[str, Any]:
        weights, optim = get_state_dict(model, opt, options=flat)
        return {"model": weights, "optim": optim}

    if source is None:
        train(range(2))
        dcp.save(state(), checkpoint_id=str(folder / "ckpt"))
    else:
        found = state()
        dcp.load(found, checkpoint_id=source)
        set_state_dict(model, opt, model_state_dict=found["model"], optim_state_dict=found["optim"], options=flat)
    mine: dict[str, Any] = {}
    for name, p in model.named_parameters():
        for key, x in {"": p.detach(), **opt.state[p]}.items():
            mine[f"{name} {key}"] = x.full_tensor() if isinstance(x, DTensor) else x
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    losses = train(range(2, 4))
    if rank == 0:
        torch.save({n: x for one in every for n, x in one.items()}, folder / "whole.pt")
        (folder / "found.json").write_text(json.dumps(losses), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    dims = {n: int(s) for n, _, s in (d.partition("=") for d in sys.argv[2].split(","))}
    main(Path(sys.argv[1]), dims, sys.argv[3] if len(sys.argv) > 3 else None)
