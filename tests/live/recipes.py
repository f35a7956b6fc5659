"""Runs the recipes of docs/how-to/record.md, as they stand there, in the trainers that they are for.

    torchrun --standalone --nproc-per-node=N tests/live/recipes.py NAME [...] --out FOLDER

Each leaves FOLDER/<name>/reference.jsonl, and losses.json with what the trainer itself said. ``deepspeed`` also saves its
state after 3 steps, before it goes on, so that there is something to verify.
"""

import argparse
import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import ckpttool  # noqa: E402
from fixtures import jobs  # noqa: E402

STEPS = 4
PROBE = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]]


def block(title: str) -> str:
    """The ```py block that follows a bold title."""
    text = (ROOT / "docs" / "how-to" / "record.md").read_text(encoding="utf-8")
    found = re.search(rf"^\*\*{re.escape(title)}.*?^```py\n(.*?)^```", text, re.M | re.S)
    assert found, title
    return found[1]


def rows(steps: int = STEPS, first: int = 0) -> list[torch.Tensor]:
    """This rank's rows of some steps."""
    return [jobs.batch(s, dist.get_rank(), dist.get_world_size()) for s in range(first, first + steps)]


def accelerate() -> list[float]:
    """A loop with Accelerate, on one rank."""
    from accelerate import Accelerator

    accelerator: Any = Accelerator(cpu=True)
    model = jobs.build("llama")
    optimizer = jobs.build_optimizer(model, "adamw", lr=0.01)
    scheduler = jobs.build_scheduler(optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    losses: list[float] = []

    def forward(**batch: Any) -> Any:
        out = model(**batch)
        losses.append(out.loss.item())
        return out

    class Counted:
        def __call__(self, **batch: Any) -> Any:
            return forward(**batch)

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

    loader = [{"input_ids": r, "labels": r} for r in rows()]
    exec(block("A loop of your own, or Accelerate's:"), {"ckpttool": ckpttool, "loader": loader, "model": Counted(), "optimizer": optimizer, "scheduler": scheduler, "accelerator": accelerator, "save_every": 2})  # fmt: skip
    return losses


def trainer() -> list[float]:
    """Hugging Face Trainer, two micro-batches a step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    said: list[float] = []

    class Listen(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                said.append(logs["loss"])

    args = TrainingArguments(
        "out", max_steps=STEPS, per_device_train_batch_size=12, gradient_accumulation_steps=2, logging_steps=1,
        use_cpu=True, report_to=[], disable_tqdm=True, save_steps=2, save_total_limit=1, learning_rate=1e-2, seed=0,
    )  # fmt: skip
    samples = [{"input_ids": r, "labels": r} for batch in rows() for r in batch]
    names = {"ckpttool": ckpttool, "model": jobs.build("llama"), "args": args, "dataset": samples, "Trainer": Trainer, "TrainerCallback": TrainerCallback}  # fmt: skip
    text = block("Hugging Face Trainer:")
    exec(text.replace("trainer.train()", "trainer.add_callback(Listen())\ntrainer.train()"), names | {"Listen": Listen})
    return said


def lightning() -> list[float]:
    """Lightning, two micro-batches a step."""
    import lightning as L
    from lightning.pytorch.callbacks import Callback

    said: list[float] = []

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = jobs.build("llama")

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.net(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
            said.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return jobs.build_optimizer(self, "adamw", lr=0.01)

    halves = [{"input_ids": half} for batch in rows() for half in batch.chunk(2)]
    loader: Any = torch.utils.data.DataLoader(halves, batch_size=None)  # type: ignore[arg-type]
    settings = {
        "accelerator": "cpu", "max_steps": STEPS, "accumulate_grad_batches": 2, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "devices": 1,
    }  # fmt: skip
    exec(block("Lightning:"), {"ckpttool": ckpttool, "L": L, "Callback": Callback, "module": Module(), "loader": loader, "settings": settings})  # fmt: skip
    return [(a + b) / 2 for a, b in zip(said[::2], said[1::2], strict=True)]


def deepspeed() -> list[float]:
    """DeepSpeed, ZeRO-3: three steps, a save, and the steps that are recorded."""
    import deepspeed as ds

    # as in fixtures/zero_jobs.py: it would have to be compiled, which takes a minute, and does nothing for us that gloo does not
    ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model: Any = jobs.build("llama")
    config = {
        "train_batch_size": jobs.GLOBAL_ROWS, "train_micro_batch_size_per_gpu": jobs.GLOBAL_ROWS // dist.get_world_size(),
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    }  # fmt: skip
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    for batch in rows(3):
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
    engine.save_checkpoint("ckpt")
    if dist.get_rank() == 0:
        model.config.save_pretrained("config")
    losses: list[float] = []

    class Counted:
        def __call__(self, **batch: Any) -> Any:
            out = engine(**batch)
            if out.loss is not None:  # it is None of the probe
                losses.append(out.loss.item())
            return out

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

    exec(block("DeepSpeed:"), {"ckpttool": ckpttool, "engine": Counted(), "loader": rows(6, 3), "probe": PROBE})
    together: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(together, losses)
    return [sum(x) / len(x) for x in zip(*together, strict=True)]


def main() -> None:
    """One rank of the launch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    for name in arguments.names:
        folder = arguments.out / name
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        os.chdir(folder)
        losses = globals()[name]()
        if dist.get_rank() == 0:
            Path("losses.json").write_text(json.dumps(losses))
    jobs.leave()


if __name__ == "__main__":
    main()
