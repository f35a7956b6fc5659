"""Three trainers that save again and again, for `python -m tests.torture.watched`: FSDP2 with DCP, transformers' Trainer,
DeepSpeed's ZeRO-3. `torchrun --standalone --nproc-per-node N tests/torture/watched_jobs.py KIND RUN SAVES PAUSE`.

Rank 0 appends "STEP SECONDS" to RUN.saved when a save has returned, and sleeps for PAUSE seconds before training goes on.
"""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch
import torch.distributed as dist
from torch import nn

VOCAB, WIDTH = 131, 24


class Tied(nn.Module):
    """A small language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50), nn.GELU(), nn.Linear(50, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def tokens_of(step: int) -> torch.Tensor:
    """The batch of a rank at a step."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randint(0, VOCAB, (4, 12), generator=torch.Generator().manual_seed(1000 * step + rank))


def saved(run: str, step: int, pause: float) -> None:
    """Notes that the save of a step has returned, and sleeps."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        with open(f"{run}.saved", "a") as out:
            out.write(f"{step} {time.time()}\n")
    if dist.is_initialized():
        dist.barrier()
    time.sleep(pause)


def train_fsdp2(run: str, saves: int, pause: float) -> None:
    """FSDP2 at any world size: bf16 weights for those who serve them, and fp32 masters, from which training goes on."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Tied()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k / 50))
    for step in range(1, saves + 1):
        model(tokens_of(step)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        weights = get_model_state_dict(model)
        state = {
            "model": {n: w.to(torch.bfloat16) for n, w in weights.items()},
            "master": weights,
            "optim": get_optimizer_state_dict(model, optimizer),
            "scheduler": scheduler.state_dict(),
            "step": step,
        }
        dcp.save(state, checkpoint_id=f"{run}/step-{step}")
        saved(run, step, pause)


def train_zero3(run: str, saves: int, pause: float) -> None:
    """DeepSpeed ZeRO-3 with bf16, at any world size."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    model = Tied()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k / 50)),
        config=config,
    )
    for step in range(1, saves + 1):
        engine.backward(engine(tokens_of(step)))
        engine.step()
        engine.save_checkpoint(run, tag=f"global_step{step}")
        saved(run, step, pause)


def train_trainer(run: str, saves: int, pause: float) -> None:
    """transformers' Trainer with a tied Llama, in one process."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=50, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for k in range(saves) for row in tokens_of(k)]

    class Pause(TrainerCallback):
        """Sleeps after each save."""

        def on_save(self, args: object, state: object, control: object, **more: object) -> None:
            saved(run, state.global_step, pause)  # type: ignore[attr-defined]

    limit = int(os.environ["SAVES_KEPT"]) if "SAVES_KEPT" in os.environ else None
    arguments = TrainingArguments(
        output_dir=run, max_steps=saves, save_steps=1, per_device_train_batch_size=4, learning_rate=3e-3,
        report_to=[], use_cpu=True, logging_steps=10**6, save_total_limit=limit, disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=rows, callbacks=[Pause()]).train()


if __name__ == "__main__":
    kind, folder, count, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    {"fsdp2": train_fsdp2, "trainer": train_trainer, "zero3": train_zero3}[kind](folder, int(count), float(seconds))
    if dist.is_initialized():
        dist.destroy_process_group()
