"""Jobs for `ckpttool resume-verify --fresh --job`, sound ones and ones whose save or load is at fault (tests/resume/test_fresh.py).

The model has a vocabulary of 131, a tied head, a frozen parameter, one without gradients, and a name with a dot in a dict.
"""

from __future__ import annotations

import copy
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

ROWS, WIDTH, LENGTH = 131, 24, 12
of = torch.optim.lr_scheduler


class Block(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module], dropout: float) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 37), nn.Linear(37, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x.flatten(0, 1)).view(x.shape)
        return x + self.dropout(self.down(nn.functional.gelu(self.up(normed))))


class Model(nn.Module):
    def __init__(
        self, norm: Callable[[int], nn.Module] = nn.LayerNorm, dropout: float = 0.0, tied: bool = True
    ) -> None:
        super().__init__()
        self.emb = nn.Embedding(ROWS, WIDTH)
        nn.init.normal_(self.emb.weight, std=0.3)
        self.layers = nn.ModuleList(Block(norm, dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.emb.weight
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.idle = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits (rows, tokens, words)."""
        x = self.emb(input_ids) + self.frozen
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def row(index: int) -> Any:
    """Counting from somewhere, which is quickly learned."""
    return (np.random.default_rng(index).integers(0, ROWS) + np.arange(LENGTH)) % ROWS


def model_of(**how: Any) -> Model:
    torch.manual_seed(3)
    return Model(**how)


def trained(model: nn.Module) -> list[Any]:
    return [p for p in model.parameters() if p.requires_grad]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups."""
    matrices, rest = ([p for p in trained(model) if (p.ndim > 1) is wide] for wide in (True, False))
    return torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr=5e-3)


def job(model: nn.Module, optimizer: Any, scheduler: Any = None, **more: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": row, **more}


# ------------------------------------------------------------------------------------------------------------- sound


def warmup() -> dict[str, Any]:
    model = model_of()
    optimizer = adamw(model)
    warm = of.LinearLR(optimizer, start_factor=0.25, total_iters=4)
    return job(model, optimizer, of.SequentialLR(optimizer, [warm, of.CosineAnnealingLR(optimizer, 36)], [4]))


class Both:
    """Two schedulers as one object."""

    def __init__(self, inner: list[Any]) -> None:
        self.inner = inner

    def step(self) -> None:
        for one in self.inner:
            one.step()

    def state_dict(self) -> dict[str, Any]:
        return {f"s{i}": one.state_dict() for i, one in enumerate(self.inner)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, one in enumerate(self.inner):
            one.load_state_dict(state[f"s{i}"])


def muon() -> dict[str, Any]:
    model = model_of()
    inside = [p for p in model.layers.parameters() if p.ndim == 2]
    rest = [p for p in trained(model) if not any(p is x for x in inside)]
    two = [torch.optim.Muon(inside, lr=2e-3), torch.optim.AdamW(rest, lr=5e-3)]
    return job(model, two, Both([of.MultiStepLR(two[0], [3, 7], 0.5), of.CosineAnnealingLR(two[1], 40)]))


class Soap(torch.optim.Optimizer):
    """Lists of whole tensors in its state, as SOAP as published has them."""

    def __init__(self, params: Any, lr: float = 2e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                state = self.state[p]
                if not state:
                    state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p)}
                    state["GG"] = [torch.zeros(n, n) for n in whole.shape] if p.ndim == 2 else []
                    state["Q"] = [torch.eye(n) for n in whole.shape] if p.ndim == 2 else []
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 0.1)
                mean = state["exp_avg"].full_tensor() if isinstance(p, DTensor) else state["exp_avg"]
                if p.ndim == 2:
                    for gram, new in zip(state["GG"], (whole @ whole.T, whole.T @ whole), strict=True):
                        gram.lerp_(new, 0.05)
                    if int(state["step"]) % 4 == 0:
                        for q, gram in zip(state["Q"], state["GG"], strict=True):
                            q.copy_(torch.linalg.eigh(gram + 1e-3 * torch.eye(len(gram)))[1])
                    left, right = state["Q"]
                    x = left.T @ mean @ right
                    mean = left @ (x / (x.abs() + 1e-2)) @ right.T
                if isinstance(p, DTensor):
                    mean = distribute_tensor(mean, p.device_mesh, p.placements, src_data_rank=None)
                p.add_(mean, alpha=-group["lr"])


def soap() -> dict[str, Any]:
    model = model_of()
    return job(model, Soap(trained(model)))


def batch_norm() -> dict[str, Any]:
    """Every rank has running statistics of its own."""
    model = model_of(norm=nn.BatchNorm1d)
    optimizer = torch.optim.SGD(trained(model), lr=0.05, momentum=0.9)
    return job(model, optimizer, of.CosineAnnealingLR(optimizer, 40))


def low() -> dict[str, Any]:
    """Parameters of bf16."""
    model = model_of().to(torch.bfloat16)
    return job(model, adamw(model))


class ScheduleFree(torch.optim.Optimizer):
    """Counts its steps in its param groups."""

    def __init__(self, params: Any, lr: float = 5e-3) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0, "lr_max": -1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            rate = group["lr"] * min(1.0, (group["k"] + 1) / 3)
            group["lr_max"] = max(rate, group["lr_max"])
            group["weight_sum"] += group["lr_max"] ** 2
            share = group["lr_max"] ** 2 / group["weight_sum"] if group["weight_sum"] else 0.0
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"z": p.detach().clone(), "exp_avg_sq": torch.zeros_like(p)}
                state["exp_avg_sq"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                there = (state["exp_avg_sq"] / (1 - 0.999 ** (group["k"] + 1))).sqrt() + 1e-8
                p.lerp_(state["z"], share)
                p.add_(p.grad / there, alpha=rate * (0.9 * (1 - share) - 1))
                state["z"].sub_(p.grad / there, alpha=rate)
            group["k"] += 1


def schedule_free() -> dict[str, Any]:
    model = model_of()
    return job(model, ScheduleFree(trained(model)))


def dropout() -> dict[str, Any]:
    model = model_of(dropout=0.2)
    return job(model, adamw(model))


def milestones() -> dict[str, Any]:
    """The rate falls after the 3rd and after the 7th step."""
    model = model_of()
    optimizer = adamw(model)
    return job(model, optimizer, of.MultiStepLR(optimizer, [3, 7], 0.1))


def own_save() -> dict[str, Any]:
    """Saves under its own keys."""
    model = model_of()
    optimizer = adamw(model)
    scheduler = of.CosineAnnealingLR(optimizer, 40)

    def save(folder: str, step: int) -> None:
        weights, state = get_state_dict(model, optimizer)
        tree = {"net": weights, "opt": state, "lr_scheduler": scheduler.state_dict(), "global_step": step, "epoch": 1}
        dcp_save(tree, checkpoint_id=folder)

    return job(model, optimizer, scheduler, save=save)


def wrapped() -> dict[str, Any]:
    """DistributedDataParallel, by build() itself."""
    model = nn.parallel.DistributedDataParallel(model_of(), find_unused_parameters=True)
    return job(model, adamw(model))


def own_sharding(mesh: Any) -> dict[str, Any]:
    """On the meta device, sharded and initialised by build(), with an optimizer that is made afterwards."""
    torch.manual_seed(5)
    with torch.device("meta"):
        model = Model(tied=False)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.1)
    model.seen.zero_()
    return job(model, adamw(model))


# ---------------------------------------------------------------------------------------------------------- at fault


def text_milestones() -> dict[str, Any]:
    """The loader of old: keys of a scheduler's state stay the text that DCP makes of them."""
    from ckpttool.live import live_job

    fit = live_job.fit_to_live

    def fit_to_live(stored: Any, live: Any) -> Any:
        found = fit(stored, live)
        if isinstance(found, dict) and "milestones" in found:
            found["milestones"] = Counter({str(k): n for k, n in found["milestones"].items()})
        return found

    live_job.fit_to_live = fit_to_live
    return milestones()


def counted_twice() -> dict[str, Any]:
    """The loader of old: options are set before the step that creates state, which counts in the param groups."""
    from ckpttool.live import job_optimizers

    create = job_optimizers.create_optimizer_state

    def create_state(optimizer: Any, wanted: Any, plans: Any) -> None:
        job_optimizers.make_options_restorer = lambda groups: lambda: None
        create(optimizer, wanted, plans)
        for group, stored in plans:
            group["lr"] = stored["lr"]
        job_optimizers.set_options = lambda group, stored: copy.deepcopy(job_optimizers.select_loaded_options(group))

    job_optimizers.create_optimizer_state = create_state
    return schedule_free()


def _with_save(change: Callable[[dict[str, Any], Any], None]) -> dict[str, Any]:
    """A job whose own save does something to its tree, or to its model."""
    model = model_of(dropout=0.0)
    optimizer = torch.optim.SGD(trained(model), lr=0.05, momentum=0.9)

    def save(folder: str, step: int) -> None:
        weights, state = get_state_dict(model, optimizer)
        tree = {"model": weights, "optim": state, "step": step}
        change(tree, model)
        dcp_save(tree, checkpoint_id=folder)

    return job(model, optimizer, save=save)


def no_step() -> dict[str, Any]:
    return _with_save(lambda tree, model: tree.pop("step"))


def other_step() -> dict[str, Any]:
    return _with_save(lambda tree, model: tree.update(step=tree["step"] - 1))


def no_momentum() -> dict[str, Any]:
    """Momentum is saved as zeros."""

    def forget(tree: dict[str, Any], model: Any) -> None:
        state = tree["optim"]["state"]  # whose dicts are the optimizer's own
        tree["optim"]["state"] = {n: {k: torch.zeros_like(t) for k, t in slots.items()} for n, slots in state.items()}

    return _with_save(forget)


def spoiling_save() -> dict[str, Any]:
    """The save leaves the model changed: here it shrinks a weight, as one that merges an average of weights and does not
    put the old ones back."""

    def shrink(tree: dict[str, Any], model: Any) -> None:
        with torch.no_grad():
            model.layers[0].down.bias.mul_(0.5)

    return _with_save(shrink)


def empty_save() -> dict[str, Any]:
    """Its save writes nothing."""
    return {**_with_save(lambda tree, model: None), "save": lambda folder, step: None}


def diverging() -> dict[str, Any]:
    model = model_of()
    return job(model, torch.optim.SGD(trained(model), lr=30.0))


def random_job() -> dict[str, Any]:
    """No two runs compute the same numbers: its gradients are scaled by 1 + 1e-6 of a number that nothing seeds."""
    model = model_of()
    source = np.random.default_rng()
    model.layers[0].up.register_full_backward_hook(
        lambda module, given, got: tuple(
            None if g is None else g * (1 + 1e-6 * source.standard_normal()) for g in given
        )
    )
    return job(model, adamw(model))


def on_meta() -> dict[str, Any]:
    with torch.device("meta"):
        return job(Model(), None)


def no_optimizer() -> dict[str, Any]:
    return {"model": model_of(), "data": row}


def hanging_save() -> dict[str, Any]:
    """Never comes back from its save."""

    def wait(tree: dict[str, Any], model: Any) -> None:
        time.sleep(600)

    return _with_save(wait)
