"""The job by which faults of ckpttool's own loader are found (loader_faults.py, tests/resume/test_witness.py).

    torchrun --standalone --nproc-per-node=3 tests/live/witness_job.py --out FOLDER

It has what a loader can get wrong and tensors alone do not show: a schedule whose milestones are integers in a Counter, an
optimizer that counts its steps in its param groups and keeps lists of tensors for a parameter, two groups with options of their
own, an extra state with integers for keys and a tensor in it, a tied head, a frozen matrix, buffers of bool and int, and 131 rows.
FOLDER/dcp is saved by torch's dcp.save of all ranks, FOLDER/full.pt by torch.save of the whole.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from live.faults import row as words_of  # noqa: E402

WORDS, WIDTH, STEPS, BATCH = 131, 24, 4, 12


class Scaled(nn.Module):
    """A matrix that counts and remembers, as those of fp8 do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.history = torch.zeros(4)
        self.seen: dict[int, float] = {3: 0.25, 5: 0.5}
        self.count = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"history": self.history.clone(), "seen": dict(self.seen), "count": self.count, "recipe": "<e4m3>"}

    def set_extra_state(self, state: Any) -> None:
        self.history, self.seen, self.count = state["history"].clone(), dict(state["seen"]), state["count"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.seen[3] += 1.0
            self.history = self.history.roll(1)
            self.history[0] = self.count / 8
        out: torch.Tensor = self.inner(x) * (1 + self.seen[3] / 1e4 + float(self.history[0]) / 1e3)
        return out


class Model(nn.Module):
    """A small language model with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Scaled(), Scaled()])
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.arange(WIDTH) % 3 > 0)
        self.register_buffer("calls", torch.tensor(0))

    mask: torch.Tensor
    calls: torch.Tensor

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits (rows, tokens, words)."""
        if self.training:
            self.calls += 1
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = self.norm(x + self.frozen(x) * self.mask)
        out: torch.Tensor = self.head(x)
        return out


class Counting(torch.optim.Optimizer):
    """Averages of weights by counts in the param groups, as schedule-free ones make them, and a list of moments."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.01, "k": 0, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["k"] ** 2
            share = group["k"] ** 2 / group["weight_sum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=torch.tensor(0.0), moments=[torch.zeros_like(p), torch.zeros_like(p)], rounds=0)
                state["step"] += 1
                state["rounds"] += 1
                first, second = state["moments"]
                for m, x, beta in ((first, p.grad, group["betas"][0]), (second, p.grad**2, group["betas"][1])):
                    m.mul_(beta).add_(x, alpha=1 - beta)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(
                    first, second.sqrt() + 1e-8, value=-group["lr"] * (0.5 + share) * (1 + state["rounds"] / 100)
                )


def row(index: int) -> dict[str, Any]:
    """A row of words."""
    return {"input_ids": words_of(index) % WORDS}


def build(device: str = "cpu") -> dict[str, Any]:
    """The job, unsharded."""
    torch.manual_seed(5)
    model = Model()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "kind": "matrix"},
        {"params": [p for p in trained if p.dim() < 2], "kind": "vector", "weight_decay": 0.0, "lr": 2e-3},
    ]
    optimizer = Counting(groups, 1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, STEPS + 1, STEPS + 2, STEPS + 2], gamma=0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": row}


def _spoil_loader(**functions: Any) -> None:
    """Replace functions of LiveJob, and let it no longer compare what it has loaded with the files; none mends it again."""
    from ckpttool.live import live_job

    sound: dict[str, Any] = vars(live_job).setdefault("sound", {})
    for name, own in sound.items():
        setattr(live_job.LiveJob, name, own)
    if functions:
        functions["_iterate_differences"] = lambda self: iter(())
    for name, function in functions.items():
        sound.setdefault(name, getattr(live_job.LiveJob, name))
        setattr(live_job.LiveJob, name, function)


def build_sound() -> dict[str, Any]:
    """The job, and the loader as it is."""
    _spoil_loader()
    return build()


def build_text_keys() -> dict[str, Any]:
    """The job, and a loader that leaves text what DCP has made text: milestones of a schedule, and keys of an extra state."""
    from ckpttool.live.live_job import LiveJob

    def match(self: Any) -> list[str]:
        problems = own_match(self)
        state = self._scheduler_state
        self._scheduler_state = {**state, "milestones": {str(k): n for k, n in state["milestones"].items()}}
        return problems

    _spoil_loader()
    own_match: Any = LiveJob._match_scheduler
    _spoil_loader(_match_scheduler=match)
    return build()


def build_counting_on() -> dict[str, Any]:
    """The job, and a loader whose step that creates the optimizer's state counts in the param groups."""
    from ckpttool.live.live_job import LiveJob

    def finish(self: Any) -> None:
        own_finish(self)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["k"] += 1
                group["weight_sum"] += group["k"] ** 2

    _spoil_loader()
    own_finish: Any = LiveJob.finish
    _spoil_loader(finish=finish)
    return build()


def main() -> None:
    """Train and save."""
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import fully_shard

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    job = build()
    model, optimizer, scheduler = job["model"], job["optimizer"], job["scheduler"]
    with torch.no_grad():
        model.frozen.weight.mul_(1.5)  # it comes from another training
    names = {id(p): n for n, p in model.named_parameters()}
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    sharded = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [sharded[names[id(p)]] for p in group["params"]]
    for step in range(STEPS):
        every = [torch.as_tensor(row(step * BATCH + i)["input_ids"]) for i in range(rank, BATCH, world)]
        ids = torch.stack(every)
        logits = model(ids)
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    state, optim = get_state_dict(model, optimizer)
    tree = {"model": state, "optim": optim, "scheduler": scheduler.state_dict(), "trainer": {"step": STEPS}}
    save(tree, checkpoint_id=out / "dcp")
    state, optim = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save({**tree, "model": state, "optim": optim}, out / "full.pt")
        (out / "done").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
