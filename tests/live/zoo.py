"""The second job whose checkpoint is spoiled (tests/resume/test_zoo.py): a model of one's own, with what HF's do not have.

    torchrun --standalone --nproc-per-node=4 tests/live/zoo.py --out FOLDER

Fused qkv and gate/up, experts stacked in one tensor, a router with a bias, persistent buffers (rotary frequencies, the bias
by which experts are chosen, integer counters), LoRA on a frozen base, 131 rows of vocabulary of which 125 are words, AdamW
with four param groups (one with amsgrad, one with betas and a rate of its own), SequentialLR, clipping. FOLDER gets `6`,
`11` and `12`, each saved by torch's DCP with scaler, random states of every rank, data loader, averages of the weights
and values (None, an array, counters) as well; `reference.jsonl` of all 16 steps; `tied`, the same model with its head
tied to the embedding, saved after 3 steps, and `tied.jsonl`.

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

from live.faults import GLOBAL, MICRO, SEQUENCE  # noqa: E402
from live.faults import row as words_of  # noqa: E402

OLDEST, STALE, SAVED, RECORDED, TIED = 6, 11, 12, 4, 3
ROWS, WORDS = 131, 125
WIDTH, HEADS, FEED, EXPERTS, RANK, LAYERS = 32, 4, 24, 4, 4, 4
RATE, CLIP, SCALE = 3e-3, 1.0, 32768.0


class Rope(nn.Module):
    """Rotary frequencies, which are in the checkpoint."""

    def __init__(self, theta: float = 10000.0) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.register_buffer("inv_freq", theta ** (-torch.arange(0, size, 2).float() / size))

    inv_freq: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of q or k, (rows, heads, tokens, size of a head)."""
        angle = torch.arange(x.shape[2])[:, None] * self.inv_freq
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(x.dtype)


class Attention(nn.Module):
    """q, k and v are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """(rows, tokens, width)"""
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.wqkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True)
        out: torch.Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return out


class Adapter(nn.Module):
    """A frozen matrix with LoRA."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.scale = alpha / RANK
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.base.weight.requires_grad_(False)
        self.lora_A = nn.Linear(WIDTH, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, WIDTH, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, width)"""
        out: torch.Tensor = self.base(x) + self.scale * self.lora_B(self.lora_A(x))
        return out


class Dense(nn.Module):
    """Gate and up are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * FEED, bias=False)
        self.w2 = nn.Linear(FEED, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, width)"""
        gate, up = self.gate_up(x).chunk(2, -1)
        out: torch.Tensor = self.w2(F.silu(gate) * up)
        return out


class Experts(nn.Module):
    """All experts in one tensor; the two best of each token, chosen with a bias that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, FEED, WIDTH) / WIDTH**0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, FEED) / FEED**0.5)
        self.register_buffer("select_bias", torch.zeros(EXPERTS))
        self.register_buffer("tokens_per_expert", torch.zeros(EXPERTS, dtype=torch.int64))
        self.chosen: torch.Tensor | None = None

    select_bias: torch.Tensor
    tokens_per_expert: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, width)"""
        weight = self.router(x).softmax(-1)
        best = (weight + self.select_bias).topk(2, -1).indices
        mask = torch.zeros_like(weight).scatter(-1, best, 1.0)
        self.chosen = mask.detach().sum((0, 1)).long()
        weight = weight * mask
        hidden = F.gelu(torch.einsum("btd,efd->btef", x, self.w1)) * weight[..., None]
        return torch.einsum("btef,edf->btd", hidden, self.w2)


class Block(nn.Module):
    """Experts in every second one."""

    def __init__(self, number: int, alpha: float) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.adapter = Adapter(alpha)
        self.mlp: nn.Module = Experts() if number % 2 else Dense()

    def forward(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """(rows, tokens, width)"""
        x = x + self.attn(self.n1(x), rope)
        x = x + self.adapter(x)
        out: torch.Tensor = x + self.mlp(self.n2(x))
        return out


class Zoo(nn.Module):
    """The model."""

    def __init__(self, alpha: float = 8.0, eps: float = 1e-5, tied: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(ROWS, WIDTH)
        nn.init.normal_(self.emb.weight, std=0.3)
        self.rope = Rope()
        self.blocks = nn.ModuleList(Block(i, alpha) for i in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, eps=eps)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.emb.weight
        self.register_buffer("seen", torch.tensor(0, dtype=torch.int64))

    seen: torch.Tensor

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits (rows, tokens, words)."""
        x = self.emb(input_ids)
        for block in self.blocks:
            x = block(x, self.rope)
        return self.head(self.norm(x))[..., :WORDS]


def model_of(**changed: Any) -> Zoo:
    """The model, with the same weights everywhere."""
    torch.manual_seed(7)
    model = Zoo(**changed)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p, std=0.02)  # or those of norms would hold one value
    return model


def row(index: int) -> Any:
    """Sample `index` of the data."""
    return words_of(index) % WORDS


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Matrices; norms and biases, which do not decay; routers; LoRA."""
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": 0.1},
        {"params": [], "weight_decay": 0.0},
        {"params": [], "weight_decay": 0.02, "betas": (0.8, 0.9), "lr": 1e-3},
        {"params": [], "weight_decay": 0.0, "amsgrad": True, "lr": 1e-2},
    ]
    for name, p in model.named_parameters():
        if p.requires_grad:
            which = 3 if "lora_" in name else 2 if "router" in name else 1 if p.ndim == 1 else 0
            groups[which]["params"].append(p)
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.SequentialLR:
    """Four steps of warmup, then a cosine."""
    of = torch.optim.lr_scheduler
    warm = of.LinearLR(optimizer, start_factor=0.25, total_iters=4)
    return of.SequentialLR(optimizer, [warm, of.CosineAnnealingLR(optimizer, T_max=36)], milestones=[4])


# --------------------------------------------------------------------------------------------------------- for --job


def build(**changed: Any) -> dict[str, Any]:
    """The job as it should be; of a model that is configured otherwise where told so."""
    model = model_of(**changed)
    optimizer = optimizer_of(model)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler_of(optimizer), "data": row}


def noisy() -> dict[str, Any]:
    """While it trains, the model adds noise to its embeddings, which no module of dropout shows."""
    out = build()

    def hook(module: nn.Module, inputs: Any, found: torch.Tensor) -> torch.Tensor:
        return found + 0.05 * torch.randn_like(found) if module.training else found

    out["model"].emb.register_forward_hook(hook)
    return out


def tied() -> dict[str, Any]:
    """The tied model."""
    return build(tied=True)


def backwards() -> dict[str, Any]:
    """The rows of each batch come in the opposite order."""
    return {**build(), "data": lambda i: row(i if i < GLOBAL else i // GLOBAL * GLOBAL + GLOBAL - 1 - i % GLOBAL)}


def _with(change: Callable[[list[dict[str, Any]]], Any], **how: Any) -> dict[str, Any]:
    model = model_of()
    groups = optimizer_of(model).param_groups
    change(groups)
    own = [{k: g[k] for k in ("params", "lr", "weight_decay", "betas", "amsgrad")} for g in groups]
    optimizer = torch.optim.AdamW(own, **how)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler_of(optimizer), "data": row}


def loop() -> dict[str, Any]:
    """The optimizer goes over its parameters one by one."""
    return _with(lambda groups: None, foreach=False)


def fused() -> dict[str, Any]:
    """The optimizer is one kernel."""
    return _with(lambda groups: None, fused=True)


def regrouped() -> dict[str, Any]:
    """The param groups come in another order."""
    return _with(lambda groups: groups.reverse())


def other_rate() -> dict[str, Any]:
    """The recipe has another learning rate, which the checkpoint's overrides."""
    return _with(lambda groups: [g.update(lr=0.1) for g in groups])


def two_threads() -> dict[str, Any]:
    """As with OMP_NUM_THREADS=2; for the last run of a launch, since it stays so."""
    torch.set_num_threads(2)
    return build()


def alpha() -> dict[str, Any]:
    """LoRA counts half."""
    return build(alpha=4.0)


def eps() -> dict[str, Any]:
    """Another epsilon of the last norm."""
    return build(eps=1e-4)


def thawed() -> dict[str, Any]:
    """The base trains as well."""
    model = model_of()
    for block in model.blocks:
        block.get_submodule("adapter.base").requires_grad_(True)
    optimizer = optimizer_of(model)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler_of(optimizer), "data": row}


def unrouted() -> dict[str, Any]:
    """The routers do not train."""
    out = build()
    for name, p in out["model"].named_parameters():
        if "router" in name:
            p.requires_grad_(False)
    return out


def one_on() -> dict[str, Any]:
    """The data is one sample on."""
    return {**build(), "data": lambda i: row(i + 1 if i >= SAVED * GLOBAL else i)}


def same_rows() -> dict[str, Any]:
    """Rank 1 reads what rank 0 reads."""

    def data(i: int) -> Any:
        return row(i - MICRO if dist.get_rank() == 1 and i >= SAVED * GLOBAL else i)

    return {**build(), "data": data}


def few_labels() -> dict[str, Any]:
    """Four labels of each row do not count."""

    def data(i: int) -> Any:
        ids = row(i)
        return {"input_ids": ids, "labels": np.where(np.arange(SEQUENCE) < SEQUENCE - 4, ids, -100)}

    return {**build(), "data": data}


def every_second() -> dict[str, Any]:
    """Every second row does not count."""
    return {**build(), "data": lambda i: {"input_ids": row(i), "labels": row(i) if i % 2 else np.full(SEQUENCE, -100)}}


def own_loss(tokens: int = SEQUENCE - 1, z: float = 0.0, smoothing: float = 0.0) -> dict[str, Any]:
    """Another loss: divided by so many tokens of a row, with z-loss, with label smoothing."""

    def loss(model: Any, batch: Any) -> tuple[Any, Any, Any]:
        ids = batch["input_ids"]
        logits = model(input_ids=ids)
        flat = logits[:, :-1].float().flatten(0, 1)
        each = F.cross_entropy(flat, ids[:, 1:].flatten(), reduction="sum", label_smoothing=smoothing)
        return each + z * flat.logsumexp(-1).square().sum(), len(ids) * tokens, logits

    return {**build(), "loss": loss}


def z_loss() -> dict[str, Any]:
    """With z-loss."""
    return own_loss(z=1e-4)


def smoothed() -> dict[str, Any]:
    """With label smoothing."""
    return own_loss(smoothing=0.05)


def all_tokens() -> dict[str, Any]:
    """The mean counts the last token, which predicts nothing."""
    return own_loss(tokens=SEQUENCE)


def unscheduled() -> dict[str, Any]:
    """There is no scheduler."""
    return {**build(), "scheduler": None}


# ------------------------------------------------------------------------------------------------------ the original


def sharded(model: Zoo) -> Zoo:
    """FSDP2 over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Training:
    """The loop, and all that it saves."""

    def __init__(self, model: Zoo, recorded: Path, balanced: int) -> None:
        """The bias of the experts' choice stays after `balanced` steps, so that a resumed job needs no loop of its own."""
        import ckpttool

        self.balanced = balanced
        self.model, self.optimizer = model, optimizer_of(model)
        self.scheduler = scheduler_of(self.optimizer)
        self.ema = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        self.curve: list[float] = []
        self.rest: dict[str, Any] = {}
        self.recorder = ckpttool.Recorder(
            recorded, model, self.optimizer, scheduler=self.scheduler, scaler=lambda: self.rest["scaler"],
            dataloader=lambda: self.rest["dataloader"], extra=self.others, probe=np.stack([row(i) for i in range(MICRO)]),
            dtype="fp32", clip=CLIP, global_batch=GLOBAL, micro_batch=MICRO, sequence=SEQUENCE,
        )  # fmt: skip
        torch.manual_seed(dist.get_rank())
        np.random.seed(dist.get_rank())
        random.seed(dist.get_rank())

    def steps(self, first: int, last: int) -> None:
        """Steps of the whole training, counted from 1."""
        mine = GLOBAL // dist.get_world_size()
        for step in range(first, last + 1):
            start = (step - 1) * GLOBAL + dist.get_rank() * mine
            ids = torch.as_tensor(np.stack([row(i) for i in range(start, start + mine)]))
            logits = self.model(input_ids=ids)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.recorder.step(step, loss=loss, batch=ids, tokens=ids[:, 1:].numel(), grad_norm=norm)
            torch.rand(3), np.random.rand(3), random.random()
            self._count(step)
            self.curve.append(step / 7)

    def others(self) -> dict[str, Any]:
        """What is saved beside model, optimizer, scheduler, scaler and dataloader."""
        return {k: v for k, v in self.rest.items() if k not in ("scheduler", "scaler", "dataloader")}

    @torch.no_grad()
    def _count(self, step: int) -> None:
        """What changes beside the weights."""
        self.model.seen += 1
        for module in self.model.modules():
            if isinstance(module, Experts) and module.chosen is not None:
                counts = module.chosen.clone()
                dist.all_reduce(counts)
                module.tokens_per_expert += counts
                if step <= self.balanced:
                    module.select_bias += 0.01 * torch.sign(counts.float().mean() - counts)
        for n, p in self.model.named_parameters():
            if n in self.ema:
                average: Any = self.ema[n]
                average.to_local().lerp_(p.to_local(), 0.1)  # type: ignore[attr-defined]

    def save(self, step: int, folder: Path) -> None:
        """Everything, as torch's documentation does it."""
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.checkpoint.state_dict_saver import save

        weights, optim = get_state_dict(self.model, self.optimizer)
        mine = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        shuffle = torch.Generator().manual_seed(step)
        order = torch.randperm(40, generator=shuffle).tolist()
        self.rest = {
            "scheduler": self.scheduler.state_dict(),
            "scaler": {
                "scale": SCALE, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": step,
            },
            "rng": {str(r): state for r, state in enumerate(every)},
            "dataloader": {"position": step * GLOBAL, "order": order, "shuffle": shuffle.get_state()},
            "ema": self.ema, "best": None, "curve": np.array(self.curve), "step": step, "epoch": 3,
        }  # fmt: skip
        save({"model": weights, "optim": optim, **self.rest}, checkpoint_id=folder)
        self.recorder.state(step)


def main() -> None:
    """One rank of the original."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    from fixtures import jobs

    jobs.join()
    zoo = Training(sharded(model_of()), out / "reference.jsonl", SAVED - 2)
    done = 0
    for step in (OLDEST, STALE, SAVED):
        zoo.steps(done + 1, step)
        zoo.save(step, out / str(step))
        done = step
    zoo.steps(SAVED + 1, SAVED + RECORDED)
    second = Training(sharded(model_of(tied=True)), out / "tied.jsonl", TIED)
    second.steps(1, TIED)
    second.save(TIED, out / "tied")
    second.steps(TIED + 1, TIED + RECORDED)
    if dist.get_rank() == 0:
        (out / "done").touch()
    jobs.leave()


if __name__ == "__main__":
    main()
