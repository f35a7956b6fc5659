"""The third job whose checkpoint is spoiled (tests/resume/test_hybrid.py): state-space layers, attention, separate experts.

    torchrun --standalone --nproc-per-node=2 tests/live/hybrid.py --out FOLDER

Blocks 0 and 2 have a state-space layer (A_log, dt_bias, D, a depthwise convolution) and a pruned MLP, blocks 1 and 3
attention of four heads with two of keys and values, an output weight with a scale beside it as fp8 has it, and four
experts, each of three matrices of its own. Buffers that every step changes: the bias by which experts are chosen, running
statistics of the embeddings, a counter. LoRA on a frozen base, AdamW with four param groups, warmup and then a rate that
stays until it decays, clipping. FOLDER gets `7` and `8`, each saved by torch's DCP with scaler, random states of both
ranks, data loader, averages of the weights and counters, and `reference.jsonl` of all 10 steps.

`build` and the functions after it are what --job is given.
"""

import argparse
import random
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

from live.faults import GLOBAL, SEQUENCE  # noqa: E402
from live.zoo import CLIP, ROWS, WIDTH, WORDS, Adapter, optimizer_of, row  # noqa: E402

STALE, SAVED, RECORDED = 7, 8, 2
HEADS, KEYS, FEED, EXPERTS, LAYERS = 4, 2, 24, 4, 4
RATE, DECAY = 3e-3, 20  # the rate decays from this step on
BIAS_RATE, MOMENTUM = 0.01, 0.1


class StateSpace(nn.Module):
    """A recurrence whose step and decay are learned, as Mamba's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)
        self.A_log = nn.Parameter(torch.log(torch.linspace(1, 8, WIDTH)))
        self.dt_bias = nn.Parameter(torch.randn(WIDTH) * 0.5)
        self.D = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, width)"""
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step = F.softplus(x + self.dt_bias)
        decay = torch.exp(-step * torch.exp(self.A_log))
        state, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + step[:, t] * x[:, t]
            out.append(state)
        return torch.stack(out, 1) + self.D * x


class Attention(nn.Module):
    """Two heads of q share one of k and v; `wo` is stored divided by a scale."""

    def __init__(self, cap: float | None) -> None:
        super().__init__()
        self.cap, size = cap, WIDTH // HEADS
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, KEYS * size, bias=False) for _ in range(2))
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("wo_scale", torch.tensor(0.75))
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, size, 2).float() / size))

    wo_scale: torch.Tensor
    inv_freq: torch.Tensor

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(x.shape[2])[:, None] * self.inv_freq
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, width)"""
        q, k, v = (t.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for t in (self.wq(x), self.wk(x), self.wv(x)))
        k, v = (t.repeat_interleave(HEADS // KEYS, 1) for t in (self._turn(k), v))
        scores = self._turn(q) @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        if self.cap is not None:
            scores = self.cap * torch.tanh(scores / self.cap)
        seen = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        mixed = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
        out: torch.Tensor = self.wo(mixed.transpose(1, 2).flatten(2)) * self.wo_scale
        return out


class Pruned(nn.Module):
    """Gate and up are one matrix; some of what they give is pruned."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * FEED, bias=False)
        self.down = nn.Linear(FEED, WIDTH, bias=False)
        self.register_buffer("kept", torch.arange(FEED) % 5 != 3)

    kept: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, width)"""
        gate, up = self.gate_up(x).chunk(2, -1)
        out: torch.Tensor = self.down(F.silu(gate) * up * self.kept)
        return out


class Expert(nn.Module):
    """One of several."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, FEED, bias=False) for _ in range(2))
        self.w2 = nn.Linear(FEED, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, width)"""
        out: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Experts(nn.Module):
    """The best of each token, chosen with a bias that is no parameter and that `balance` moves after every step."""

    def __init__(self, best: int) -> None:
        super().__init__()
        self.best = best
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.register_buffer("select_bias", torch.zeros(EXPERTS))
        self.register_buffer("chosen", torch.zeros(EXPERTS, dtype=torch.int64), persistent=False)

    select_bias: torch.Tensor
    chosen: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, width)"""
        weight = self.router(x).softmax(-1)
        best = (weight + self.select_bias).topk(self.best, -1).indices
        mask = torch.zeros_like(weight).scatter(-1, best, 1.0)
        if self.training:
            self.chosen += mask.detach().sum((0, 1)).long()
        weight = weight * mask
        return torch.stack([weight[..., i, None] * e(x) for i, e in enumerate(self.experts)]).sum(0)


class Block(nn.Module):
    """State space and a pruned MLP, or attention and experts."""

    def __init__(self, number: int, cap: float | None, best: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.mixer: nn.Module = Attention(cap) if number % 2 else StateSpace()
        self.adapter = Adapter(8.0)
        self.mlp: nn.Module = Experts(best) if number % 2 else Pruned()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, width)"""
        x = x + self.mixer(self.n1(x))
        x = x + self.adapter(x)
        out: torch.Tensor = x + self.mlp(self.n2(x))
        return out


class Hybrid(nn.Module):
    """The model; the embeddings are centred by running statistics, as BatchNorm has them."""

    def __init__(self, cap: float | None = None, best: int = 2, drop: float = 0.0, low: bool = False) -> None:
        super().__init__()
        self.low = low
        self.emb = nn.Embedding(ROWS, WIDTH)
        nn.init.normal_(self.emb.weight, std=0.3)
        self.drop = nn.Dropout(drop)
        self.blocks = nn.ModuleList(Block(i, cap, best) for i in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.register_buffer("running_mean", torch.randn(WIDTH) * 0.02)
        self.register_buffer("running_var", 1 + 0.1 * torch.rand(WIDTH))
        self.register_buffer("seen", torch.tensor(16_777_000, dtype=torch.int64))  # nearly what fp32 counts to
        self.register_buffer("sums", torch.zeros(3, WIDTH), persistent=False)  # x, x^2, how many

    running_mean: torch.Tensor
    running_var: torch.Tensor
    seen: torch.Tensor
    sums: torch.Tensor

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits (rows, tokens, words)."""
        x = self.emb(input_ids)
        if self.training:
            flat = x.detach().flatten(0, 1)
            self.sums += torch.stack([flat.sum(0), flat.square().sum(0), torch.full((WIDTH,), float(len(flat)))])
        x = self.drop((x - self.running_mean) * torch.rsqrt(self.running_var + 1e-5))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.low):
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x.float()))[..., :WORDS]


@torch.no_grad()
def balance(model: nn.Module, rate: float = BIAS_RATE, momentum: float = MOMENTUM) -> None:
    """What follows a step of the optimizer: the bias of the experts, the running statistics, the counter."""
    for name, b in model.named_buffers():
        if name.endswith(("chosen", "sums")):
            dist.all_reduce(b)
    for module in model.modules():
        if isinstance(module, Experts):
            counts = module.chosen.float()
            module.select_bias += rate * torch.sign(counts.mean() - counts)
            module.chosen.zero_()
        if isinstance(module, Hybrid):
            mean, square = module.sums[0] / module.sums[2], module.sums[1] / module.sums[2]
            module.running_mean.lerp_(mean, momentum)
            module.running_var.lerp_(square - mean.square(), momentum)
            module.seen += 1
            module.sums.zero_()


def model_of(**changed: Any) -> Hybrid:
    """The model, with the same weights everywhere."""
    torch.manual_seed(11)
    model = Hybrid(**changed)
    for name, p in model.named_parameters():
        if "lora_B" in name or name.endswith(("n1.weight", "n2.weight", "norm.weight")):
            p.data += 0.05 * torch.randn(p.shape)
    return model


def scheduler_of(optimizer: torch.optim.Optimizer, decay: int = DECAY) -> torch.optim.lr_scheduler.SequentialLR:
    """Four steps of warmup, then a rate that stays, then one that falls to 0 within twenty steps."""
    of = torch.optim.lr_scheduler
    warm = of.LinearLR(optimizer, start_factor=0.25, total_iters=4)
    rest = of.LambdaLR(optimizer, lambda step: min(1.0, max(0.0, 1 - (step + 4 - decay) / 20)))
    return of.SequentialLR(optimizer, [warm, rest], milestones=[4])


# --------------------------------------------------------------------------------------------------------- for --job


def build(
    data: Callable[[int], Any] = row, decay: int = DECAY, rate: float = BIAS_RATE, momentum: float = MOMENTUM,
    **changed: Any,
) -> dict[str, Any]:  # fmt: skip
    """The job as it should be; otherwise where told so."""
    model = model_of(**changed)
    optimizer = optimizer_of(model)
    optimizer.register_step_post_hook(lambda *_: balance(model, rate, momentum))
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler_of(optimizer, decay), "data": data}


def capped() -> dict[str, Any]:
    """Scores of attention are capped."""
    return build(cap=2.0)


def one_expert() -> dict[str, Any]:
    """Each token goes to one expert."""
    return build(best=1)


def dropping() -> dict[str, Any]:
    """Embeddings are dropped."""
    return build(drop=0.1)


def autocast() -> dict[str, Any]:
    """Blocks compute in bf16."""
    return build(low=True)


def late_decay() -> dict[str, Any]:
    """The rate decays twelve steps later."""
    return build(decay=DECAY + 12)


def fast_bias() -> dict[str, Any]:
    """The bias of the experts moves ten times as fast."""
    return build(rate=10 * BIAS_RATE)


def momentum() -> dict[str, Any]:
    """Running statistics follow twice as fast."""
    return build(momentum=2 * MOMENTUM)


def unbalanced() -> dict[str, Any]:
    """Nothing follows a step: buffers stay."""
    model = model_of()
    optimizer = optimizer_of(model)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler_of(optimizer), "data": row}


def thinned() -> dict[str, Any]:
    """The loader drops the last row of every batch, and so is ever farther ahead."""
    return build(data=lambda i: row(i + i // (GLOBAL - 1) if i >= GLOBAL else i))


def first_token() -> dict[str, Any]:
    """Rows begin with another token."""

    def data(i: int) -> Any:
        out = row(i).copy()
        out[0] = 1
        return out

    return build(data=data)


def packed_on() -> dict[str, Any]:
    """Documents are packed one token on."""
    return build(data=lambda i: np.concatenate([row(i)[1:], row(i + 1)[:1]]))


def interleaved_ranks() -> dict[str, Any]:
    """Ranks read every second row instead of blocks, which changes nothing but the order within a batch."""

    def data(i: int) -> Any:
        step, k = divmod(i, GLOBAL)
        return row(step * GLOBAL + (k % 2) * (GLOBAL // 2) + k // 2 if step else i)

    return build(data=data)


def twice_scheduled() -> dict[str, Any]:
    """Trainer and callback both step the scheduler."""

    class Twice(torch.optim.lr_scheduler.SequentialLR):
        def step(self) -> None:  # type: ignore[override]
            super().step()
            super().step()

    out = build()
    out["scheduler"].__class__ = Twice
    return out


def by_value() -> dict[str, Any]:
    """Gradients are clipped by value."""
    out = build()

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for g in optimizer.param_groups:
            nn.utils.clip_grad_value_(g["params"], 2e-3)

    out["optimizer"].register_step_pre_hook(clip)
    return out


def coupled() -> dict[str, Any]:
    """Decay is in the gradients, and not beside them."""
    out = build()

    def add(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for g in optimizer.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.grad.add_(p.detach(), alpha=g["weight_decay"])

    def outside(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for g in optimizer.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.data.div_(1 - g["lr"] * g["weight_decay"])

    out["optimizer"].register_step_pre_hook(add)
    out["optimizer"].register_step_post_hook(outside)
    return out


def slow_embedding() -> dict[str, Any]:
    """The gradient of the embedding counts a tenth."""
    out = build()
    out["model"].emb.register_forward_hook(lambda module, inputs, found: 0.1 * found + 0.9 * found.detach())
    return out


def stuck_expert() -> dict[str, Any]:
    """The first expert of block 1 does not train."""
    out = build()
    out["model"].blocks[1].mlp.experts[0].requires_grad_(False)
    return out


def own_loss(act: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Another loss, of the logits of all but the last token and the tokens that follow."""

    def loss(model: Any, batch: Any) -> tuple[Any, Any, Any]:
        ids = batch["input_ids"]
        logits = model(input_ids=ids)
        return act(logits[:, :-1], ids[:, 1:]), ids[:, 1:].numel(), logits

    return {**build(), "loss": loss}


def bf16_loss() -> dict[str, Any]:
    """The loss is computed in bf16."""
    return own_loss(
        lambda logits, ids: F.cross_entropy(logits.bfloat16().flatten(0, 1), ids.flatten(), reduction="sum").float()
    )


def cooled() -> dict[str, Any]:
    """Logits are divided by a temperature."""
    return own_loss(lambda logits, ids: F.cross_entropy((logits / 1.1).flatten(0, 1), ids.flatten(), reduction="sum"))


# ------------------------------------------------------------------------------------------------------ the original


def main() -> None:
    """One rank of the original."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    from fixtures import jobs

    jobs.join()
    train(out)
    if dist.get_rank() == 0:
        (out / "done").touch()
    jobs.leave()


def train(out: Path) -> None:
    """The loop, with its saves and its recording."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import ckpttool

    model, world, rank = model_of(), dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    optimizer.register_step_post_hook(lambda *_: balance(model))
    ema: dict[str, Any] = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    rest: dict[str, Any] = {}
    recorder = ckpttool.Recorder(
        out / "reference.jsonl", model, optimizer, scheduler=scheduler, scaler=lambda: rest["scaler"],
        dataloader=lambda: rest["dataloader"],
        extra=lambda: {k: v for k, v in rest.items() if k not in ("scheduler", "scaler", "dataloader")},
        probe=np.stack([row(i) for i in range(GLOBAL // world)]), dtype="fp32", clip=CLIP, global_batch=GLOBAL,
        micro_batch=GLOBAL // world, sequence=SEQUENCE,
    )  # fmt: skip
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    mine = GLOBAL // world
    for step in range(1, SAVED + RECORDED + 1):
        start = (step - 1) * GLOBAL + rank * mine
        ids = torch.as_tensor(np.stack([row(i) for i in range(start, start + mine)]))
        logits = model(input_ids=ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        recorder.step(step, loss=loss, batch=ids, tokens=ids[:, 1:].numel(), grad_norm=norm)
        torch.rand(3), np.random.rand(3), random.random()
        with torch.no_grad():
            for n, p in model.named_parameters():
                if n in ema:
                    ema[n].to_local().lerp_(p.to_local(), 0.1)
        if step in (STALE, SAVED, SAVED + RECORDED):
            rest.update(beside(step, scheduler, ema))
            if step <= SAVED:
                write(out / str(step), model, optimizer, rest)
            recorder.state(step)


def beside(step: int, scheduler: Any, ema: dict[str, Any]) -> dict[str, Any]:
    """What is saved beside model and optimizer; a collective."""
    own = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return {
        "scheduler": scheduler.state_dict(),
        "scaler": {
            "scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 500, "_growth_tracker": step,
        },
        "rng": {str(r): state for r, state in enumerate(every)},
        "dataloader": {
            "sampler": {"epoch": 1, "seed": 17},
            "workers": {"0": {"position": 12 * step, "shard": 3}, "1": {"position": 12 * step - 4, "shard": 5}},
            "in_flight": 2,
        },
        "ema": ema, "ema_updates": step, "tokens_seen": step * GLOBAL * SEQUENCE, "step": step,
        "curriculum": {"stage": "long", "length": SEQUENCE}, "loss_history": [5.0 - k / 8 for k in range(step)],
    }  # fmt: skip


def write(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, rest: dict[str, Any]) -> None:
    """Save as torch's documentation does it."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    weights, optim = get_state_dict(model, optimizer)
    save({"model": weights, "optim": optim, **rest}, checkpoint_id=folder)


if __name__ == "__main__":
    main()
