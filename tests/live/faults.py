"""The job whose checkpoint tests/resume/test_faults.py spoils, and the same job with faults of its own.

    torchrun --standalone --nproc-per-node=4 tests/live/faults.py --out FOLDER

A Llama of four layers without grouped attention, so that q and k have one shape, and with 131 words, which no number of
ranks divides; AdamW with a group that does not decay, warmup and cosine. FOLDER gets `stale` (saved after 10 steps) and
`ckpt` (after 20), `reference.jsonl` of all 30 steps, `bf16.jsonl` of those after the save, run from it in mixed
precision, `tied` (saved after 6 steps) and `tied.jsonl`, the same model with its head tied to the embedding; `config` and
`config-tied`, and `tokens.npy`, the rows of the data.

`build` and the functions after it are what --job is given.
"""

import argparse
import gc
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

gc.freeze()  # so that the collection after each of a hundred runs does not look through all of torch

STALE, SAVED, RECORDED, TIED = 10, 20, 10, 6
GLOBAL, MICRO, SEQUENCE = 24, 6, 16  # four micro-batches: one a rank at the world size of the save
RATE = 3e-3
OF_MODEL: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def model_of(**changed: Any) -> Any:
    """The model, with the same weights everywhere."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**{**OF_MODEL, **changed}))


def row(index: int) -> Any:
    """Sample `index` of the data: words that follow each other by a rule, with some noise."""
    draw = np.random.Generator(np.random.Philox(key=[5, index]))
    out = np.empty(SEQUENCE, np.int64)
    out[0] = draw.integers(131)
    noise = draw.random(SEQUENCE) < 0.2
    other = draw.integers(0, 131, SEQUENCE)
    for i in range(1, SEQUENCE):
        out[i] = other[i] if noise[i] else (3 * out[i - 1] + 7) % 131
    return out


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """AdamW with two groups."""
    norms = [p for n, p in model.named_parameters() if "norm" in n]
    rest = [p for n, p in model.named_parameters() if "norm" not in n]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))


def rate(step: int) -> float:
    """Factor of the learning rate: five steps of warmup, then a cosine."""
    return (step + 1) / 5 if step < 5 else 0.1 + 0.45 * (1 + math.cos(math.pi * (step - 5) / 45))


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Warmup and cosine."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


# --------------------------------------------------------------------------------------------------------- for --job


def build(**changed: Any) -> dict[str, Any]:
    """The job as it should be; of a model that is configured otherwise where told so."""
    model = model_of(**changed)
    optimizer = optimizer_of(model)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler_of(optimizer), "data": row}


def theta() -> dict[str, Any]:
    """Another base of the rotary frequencies."""
    return build(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})


def eps() -> dict[str, Any]:
    """Another epsilon of the norms."""
    return build(rms_norm_eps=1e-5)


def moved(by: int) -> dict[str, Any]:
    """The reader of the data does not go on where it was, but some samples on; those before are what they were."""
    return {**build(), "data": lambda i: row(i + by if i >= SAVED * GLOBAL else i)}


def ahead() -> dict[str, Any]:
    """The data is one batch ahead."""
    return moved(GLOBAL)


def again() -> dict[str, Any]:
    """The data begins from its beginning."""
    return moved(-SAVED * GLOBAL)


def another() -> dict[str, Any]:
    """The data is other data."""
    return moved(10**6)


def tied() -> dict[str, Any]:
    """The tied model."""
    return build(tie_word_embeddings=True)


def summed() -> dict[str, Any]:
    """Gradients are summed over four ranks, where their mean is meant."""

    class FourTimes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] * 4

    def loss(model: Any, batch: Any) -> tuple[Any, Any, Any]:
        ids = batch["input_ids"]
        logits = model(input_ids=ids, use_cache=False).logits
        each = torch.nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
        )
        return FourTimes.apply(each), ids[:, 1:].numel(), logits

    return {**build(), "loss": loss}


def unshifted() -> dict[str, Any]:
    """The loss is that of the word itself and not of the next one."""

    def loss(model: Any, batch: Any) -> tuple[Any, Any, Any]:
        ids = batch["input_ids"]
        logits = model(input_ids=ids, use_cache=False).logits
        each = torch.nn.functional.cross_entropy(
            logits[:, 1:].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
        )
        return each, ids[:, 1:].numel(), logits

    return {**build(), "loss": loss}


def one_gradient() -> dict[str, Any]:
    """The gradient of one weight is 3e-5 too large, after it was reduced over ranks."""
    calls = [0]

    def loss(model: Any, batch: Any) -> tuple[Any, Any, Any]:
        if not calls[0]:
            passes = GLOBAL // MICRO // dist.get_world_size()

            def hook(p: Any) -> None:
                calls[0] += 1
                if (calls[0] - 1) % passes == 0:  # in the last pass of a step
                    p.grad.to_local().mul_(1 + 3e-5)

            calls[0] = 1
            model.model.layers[1].self_attn.q_proj.weight.register_post_accumulate_grad_hook(hook)
        ids = batch["input_ids"]
        logits = model(input_ids=ids, use_cache=False).logits
        each = torch.nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
        )
        return each, ids[:, 1:].numel(), logits

    return {**build(), "loss": loss}


def frozen() -> dict[str, Any]:
    """One weight does not train."""
    out = build()
    out["model"].model.layers[2].mlp.up_proj.weight.requires_grad_(False)
    return out


def unlisted() -> dict[str, Any]:
    """The optimizer has forgotten one weight."""
    model = model_of()
    optimizer = optimizer_of(model)
    optimizer.param_groups[0]["params"] = [
        p for p in optimizer.param_groups[0]["params"] if p is not model.model.layers[2].mlp.up_proj.weight
    ]
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler_of(optimizer), "data": row}


def own_schedule() -> dict[str, Any]:
    """A scheduler that knows nothing of the checkpoint: the rate is the highest one, for ever."""
    model = model_of()
    optimizer = optimizer_of(model)

    class Constant:
        def step(self) -> None:
            for group in optimizer.param_groups:
                group["lr"] = RATE

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            self.step()

    return {"model": model, "optimizer": optimizer, "scheduler": Constant(), "data": row}


# ------------------------------------------------------------------------------------------------------ the original


def sharded(model: Any, bf16: bool = False) -> Any:
    """FSDP2 over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    if bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def train(model: Any, optimizer: Any, scheduler: Any, steps: range, recorder: Any = None) -> None:
    """Steps of the whole training, counted from 1."""
    mine = GLOBAL // dist.get_world_size()
    for step in steps:
        first = (step - 1) * GLOBAL + dist.get_rank() * mine
        ids = torch.as_tensor(np.stack([row(i) for i in range(first, first + mine)]))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if recorder is not None:
            recorder.step(step, loss=loss, batch=ids, tokens=ids[:, 1:].numel())


def save(model: Any, optimizer: Any, scheduler: Any, step: int, folder: Path) -> None:
    """As torch's documentation does it."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    model_state, optim_state = get_state_dict(model, optimizer)
    tree = {"model": model_state, "optim": optim_state, "scheduler": scheduler.state_dict(), "step": step}
    dcp_save(tree, checkpoint_id=folder)


def main() -> None:
    """One rank of the original."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    from fixtures import jobs

    jobs.join()
    import ckpttool

    known = {"global_batch": GLOBAL, "micro_batch": MICRO, "sequence": SEQUENCE}
    model = sharded(model_of())
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    recorder = ckpttool.Recorder(out / "reference.jsonl", model, optimizer, dtype="fp32", **known)
    train(model, optimizer, scheduler, range(1, STALE + 1), recorder)
    save(model, optimizer, scheduler, STALE, out / "stale")
    train(model, optimizer, scheduler, range(STALE + 1, SAVED + 1), recorder)
    save(model, optimizer, scheduler, SAVED, out / "ckpt")
    recorder.state(SAVED)
    train(model, optimizer, scheduler, range(SAVED + 1, SAVED + RECORDED + 1), recorder)

    model = sharded(model_of(), bf16=True)
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    ckpttool.load(model, optimizer, out / "ckpt", scheduler=scheduler)
    recorder = ckpttool.Recorder(out / "bf16.jsonl", model, optimizer, dtype="bf16", **known)
    recorder.state(SAVED)
    train(model, optimizer, scheduler, range(SAVED + 1, SAVED + RECORDED + 1), recorder)

    model = sharded(model_of(tie_word_embeddings=True))
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    train(model, optimizer, scheduler, range(1, TIED + 1))
    save(model, optimizer, scheduler, TIED, out / "tied")
    recorder = ckpttool.Recorder(out / "tied.jsonl", model, optimizer, dtype="fp32", **known)
    recorder.state(TIED)
    train(model, optimizer, scheduler, range(TIED + 1, TIED + 5), recorder)
    if dist.get_rank() == 0:
        model_of().config.save_pretrained(out / "config")
        model_of(tie_word_embeddings=True).config.save_pretrained(out / "config-tied")
        np.save(out / "tokens.npy", np.stack([row(i) for i in range((SAVED + RECORDED + 1) * GLOBAL)]))
    jobs.leave()


if __name__ == "__main__":
    main()
