"""torchrun script of DeepSpeed's AutoTP: `autotp_job.py make FOLDER TP STAGE DTYPE` trains a small module for three steps, saves
FOLDER/ckpt with FOLDER/truth.safetensors, what the ranks hold together, trains three more, and writes their losses to
FOLDER/case.json; `autotp_job.py resume FOLDER TP STAGE DTYPE CKPT` loads CKPT instead, a universal checkpoint or a save of as many
ranks, and writes the losses of its three steps to FOLDER/resumed.json. fixtures/autotp was made by the first."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fixtures import zero_jobs

import deepspeed  # isort: skip  (after zero_jobs, which prepares the ground)
from deepspeed.checkpoint.affine import ParamAffineMap, replicated_map  # isort: skip
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state  # isort: skip

VOCABULARY, ROWS = 131, 12
SPECS: list[dict[str, Any]] = [
    # two matrices in one, each cut by itself: 7 rows on 3 ranks are 3, 2, 2
    {"patterns": [".*gate_up_proj\\.weight$"], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
    {"patterns": [".*down_proj\\.weight$"], "partition_type": "row"},
    {"patterns": [".*lm_head\\.weight$"], "partition_type": "column", "gather_output": True},
]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(4, 14), nn.Linear(7, 4)
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(nn.functional.silu(gate) * up)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(VOCABULARY, 4), nn.LayerNorm(4)
        self.layers = nn.ModuleList([Mlp()])
        self.lm_head = nn.Linear(4, VOCABULARY, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embed_tokens(rows)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.lm_head(self.norm(x)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows.flatten())


def start(tp: int, stage: int, dtype: str, universal: bool) -> Any:
    """The engine."""
    torch.manual_seed(0)
    model = Net()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": tp, "partition_config": {"use_default_specs": False, "layer_specs": SPECS}},
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
        **({"checkpoint": {"load_universal": True}} if universal else {}),
    }
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train(engine: Any, tp: int, steps: range) -> list[float]:
    """The mean losses of some steps, of the same rows at every size."""
    out = []
    for step in steps:
        rows = torch.randint(0, VOCABULARY, (ROWS, 8), generator=torch.Generator().manual_seed(step))
        part = rows.chunk(dist.get_world_size() // tp)[dist.get_rank() // tp]
        loss = engine(part)
        engine.backward(loss)
        engine.step()
        everyone = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, loss.detach().float())
        out.append(float(torch.stack(everyone).mean()))
    return out


def truth(engine: Any, tp: int) -> dict[str, Tensor]:
    """Masters and moments, as the ranks of one model hold them, joined by DeepSpeed's own maps."""
    out = {}
    for name, p in engine.module.named_parameters():
        mine = {f"model.{name}": safe_get_full_fp32_param(p).clone()}
        mine |= {
            f"optim.state.{name}.{s}": safe_get_full_optimizer_state(p, s).clone() for s in ("exp_avg", "exp_avg_sq")
        }
        how = getattr(p, "ds_autotp_universal_checkpoint_meta", {}).get("conversion", {}).get("affine_map")
        for key, x in mine.items():
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, x)
            joined = replicated_map(x.shape, tp) if how is None else ParamAffineMap.from_dict(how)
            out[key] = joined.rebuild(dict(enumerate(parts[:tp]))).contiguous()
    return out


def main(mode: str, folder: Path, tp: int, stage: int, dtype: str, *source: str) -> None:
    """One of the two."""
    zero_jobs.prepare()
    engine = start(tp, stage, dtype, any(Path(s, "latest_universal").exists() for s in source))
    written: dict[str, Any] = {"tp": tp, "world": dist.get_world_size(), "stage": stage, "dtype": dtype}
    if mode == "resume":
        assert engine.load_checkpoint(*source)[0]
        written["losses"] = train(engine, tp, range(3, 6))
        written["step"] = engine.global_steps
    else:
        train(engine, tp, range(3))
        engine.save_checkpoint(str(folder / "ckpt"))
        held = truth(engine, tp)
        written["losses"] = train(engine, tp, range(3, 6))
        if dist.get_rank() == 0:
            save_file(held, folder / "truth.safetensors")
    if dist.get_rank() == 0:
        (folder / ("resumed.json" if mode == "resume" else "case.json")).write_text(json.dumps(written))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:5]), *sys.argv[5:])
