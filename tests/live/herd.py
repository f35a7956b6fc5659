"""Small jobs of many models, for tests/resume/test_benign.py: each is trained under FSDP2, saved, and goes on.

    torchrun --standalone --nproc-per-node=N tests/live/herd.py --out FOLDER NAME...

NAME is one of `HERD`. FOLDER/NAME gets `ckpt`, saved by torch's DCP after 4 steps, `reference.jsonl` of the 4 steps after
it, and `config`, the model's configuration. `lora`, `eager` and `sdpa` are what --job is given.
"""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from live.faults import GLOBAL, SEQUENCE, row  # noqa: E402

SAVED, RECORDED = 4, 4
SMALL: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "experts_implementation": "eager"}


@dataclass(frozen=True)
class Animal:
    """A job: `model` is a type of transformers, `changed` its configuration. `sgd` is SGD with momentum instead of AdamW;
    `groups` takes out of decay what is no matrix, and makes a scheduler. `dtype` is that of the parameters, `mixed` that
    of the computation. `frozen` begins the names of what does not train. With `narrow` half of the words of the data are one."""

    model: str
    world: int
    changed: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    mixed: bool = False
    sgd: bool = False
    amsgrad: bool = False
    groups: bool = False
    frozen: str = "-"
    tp: int = 1
    lora: bool = False
    narrow: bool = False
    rate: float = 3e-3


HERD: dict[str, Animal] = {
    "llama amsgrad": Animal("llama", 4, amsgrad=True),
    "llama tied, momentum": Animal("llama", 3, {"tie_word_embeddings": True}, sgd=True, rate=0.1),
    "gemma2 tied": Animal("gemma2", 2, {"tie_word_embeddings": True}),
    "qwen3-moe": Animal("qwen3_moe", 3, {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 20}),
    "mixtral": Animal("mixtral", 2, {**EXPERTS, "num_local_experts": 4, "intermediate_size": 20, "sliding_window": None}),
    "llama frozen": Animal("llama", 4, frozen="model.embed_tokens"),
    "llama groups": Animal("llama", 3, groups=True),
    "llama tp": Animal("llama", 4, tp=2),
    "gpt2": Animal("gpt2", 2, {"n_embd": 36, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 50}),
    "llama bf16 held": Animal("llama", 4, mixed=True),
    "llama lora": Animal("llama", 2, lora=True, rate=1e-2),
    "llama, bf16 parameters": Animal("llama", 4, dtype="bfloat16"),
    "qwen2, bf16 parameters": Animal("qwen2", 3, dtype="bfloat16"),
    "gemma2, bf16 parameters": Animal("gemma2", 2, {"tie_word_embeddings": True}, dtype="bfloat16"),
    "mixtral, bf16 parameters": Animal("mixtral", 2, {**EXPERTS, "num_local_experts": 4, "intermediate_size": 32, "hidden_size": 32, "head_dim": 8, "sliding_window": None}, dtype="bfloat16"),
    "llama fast, bf16 parameters": Animal("llama", 4, dtype="bfloat16", rate=1e-2),
    "qwen2 fast, bf16 parameters": Animal("qwen2", 3, {"tie_word_embeddings": True, "hidden_size": 24, "head_dim": 6}, dtype="bfloat16", rate=1e-2),
    "qwen2 narrow, bf16 parameters": Animal("qwen2", 3, {"tie_word_embeddings": True, "hidden_size": 24, "head_dim": 6}, dtype="bfloat16", rate=1e-2, narrow=True),
    "llama slow, bf16 parameters": Animal("llama", 4, dtype="bfloat16", rate=3e-4, groups=True),
}  # fmt: skip


def model_of(animal: Animal, **changed: Any) -> Any:
    """The model, with the same weights everywhere."""
    from transformers import AutoConfig, AutoModelForCausalLM

    of = (
        {"vocab_size": 131, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        if animal.model == "gpt2"
        else SMALL
    )
    torch.manual_seed(7)
    build: Any = AutoModelForCausalLM.from_config
    model = build(AutoConfig.for_model(animal.model, **{**of, **animal.changed, **changed}), dtype=torch.float32)
    model = model.to(getattr(torch, animal.dtype))
    for name, p in model.named_parameters():
        if name.startswith(animal.frozen):
            p.requires_grad_(False)
    if animal.lora:
        from peft import LoraConfig, get_peft_model

        wanted: Any = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, wanted)
    return model


def optimizer_of(animal: Animal, model: Any) -> torch.optim.Optimizer:
    """AdamW, or SGD with momentum."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [p for _, p in named]}]
    if animal.groups:
        groups = [
            {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
        ]
    if animal.sgd:
        return torch.optim.SGD(groups, lr=animal.rate, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(groups, lr=animal.rate, betas=(0.9, 0.95), weight_decay=0.1, amsgrad=animal.amsgrad)


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A rate that falls."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


def _job(name: str, **changed: Any) -> dict[str, Any]:
    model = model_of(HERD[name], **changed)
    return {"model": model, "optimizer": optimizer_of(HERD[name], model), "data": row}


def lora() -> dict[str, Any]:
    """PEFT's model."""
    return _job("llama lora")


def eager() -> dict[str, Any]:
    """Attention as its formula has it."""
    return _job("llama amsgrad", attn_implementation="eager")


def sdpa() -> dict[str, Any]:
    """Attention of torch."""
    return _job("llama amsgrad", attn_implementation="sdpa")


# ------------------------------------------------------------------------------------------------------ the originals


def sharded(animal: Animal, model: Any) -> Any:
    """FSDP2 over all ranks, or over half of them with tensor parallelism over pairs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from fixtures import jobs

    if animal.tp > 1:
        jobs.apply_fsdp2(model, {"dp": dist.get_world_size() // animal.tp, "tp": animal.tp})
        return model
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    if animal.mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def live(animal: Animal, folder: Path) -> None:
    """Train, save, and go on."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    import ckpttool

    model = sharded(animal, model_of(animal))
    optimizer = optimizer_of(animal, model)
    scheduler = scheduler_of(optimizer) if animal.groups else None
    rank, world = dist.get_rank() // animal.tp, dist.get_world_size() // animal.tp
    mine = GLOBAL // world
    recorder: Any = None
    for step in range(1, SAVED + RECORDED + 1):
        first = (step - 1) * GLOBAL + rank * mine
        ids = torch.as_tensor(np.stack([row(i) for i in range(first, first + mine)]))
        if animal.narrow:
            ids[ids % 2 == 0] = 5
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        if recorder is not None:
            recorder.step(step, loss=loss, batch=ids, tokens=ids[:, 1:].numel())
        if step == SAVED:
            weights, optim = get_state_dict(model, optimizer)
            tree = {"model": weights, "optim": optim, "step": step}
            if scheduler is not None:
                tree["scheduler"] = scheduler.state_dict()
            save(tree, checkpoint_id=folder / "ckpt")
            group = None
            if animal.tp > 1:
                every = [list(range(k, dist.get_world_size(), animal.tp)) for k in range(animal.tp)]
                made = [dist.new_group(ranks) for ranks in every]
                group = made[dist.get_rank() % animal.tp]
            recorder = ckpttool.Recorder(
                folder / "reference.jsonl", model, optimizer, dtype="bf16" if animal.mixed else "fp32", group=group,
                global_batch=GLOBAL, micro_batch=mine, sequence=SEQUENCE,
            )  # fmt: skip
            recorder.state(step)
    if dist.get_rank() == 0:
        model.config.save_pretrained(folder / "config")
        if animal.lora:
            model.peft_config["default"].save_pretrained(folder / "config")


def main() -> None:
    """One rank of the originals."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parsed = parser.parse_args()
    from fixtures import jobs

    jobs.join()
    for name in parsed.names:
        live(HERD[name], parsed.out / name)
    if dist.get_rank() == 0:
        (parsed.out / f"done-{dist.get_world_size()}").touch()
    jobs.leave()


if __name__ == "__main__":
    main()
