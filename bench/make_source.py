"""A real FSDP2 checkpoint of a chosen size: `torchrun --nproc-per-node 8 bench/make_source.py DIR BYTES [--adam]`.

A llama-shaped model of bf16 parameters (fp32 with AdamW state with --adam), random values, written by dcp.save.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

HIDDEN, INNER, VOCAB = 2048, 8192, 128256 // 4


class Block(nn.Module):
    """The matrices of a llama block."""

    def __init__(self) -> None:
        super().__init__()
        for name, (rows, columns) in {
            "q_proj": (HIDDEN, HIDDEN),
            "k_proj": (HIDDEN // 4, HIDDEN),
            "v_proj": (HIDDEN // 4, HIDDEN),
            "o_proj": (HIDDEN, HIDDEN),
            "gate_proj": (INNER, HIDDEN),
            "up_proj": (INNER, HIDDEN),
            "down_proj": (HIDDEN, INNER),
        }.items():
            self.add_module(name, nn.Linear(columns, rows, bias=False))
        self.norm = nn.RMSNorm(HIDDEN)


class Model(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)


def main() -> None:
    """Build, shard, fill with random numbers, save."""
    folder, size, adam = sys.argv[1], int(sys.argv[2]), "--adam" in sys.argv
    dist.init_process_group("gloo")
    per_element = 12 if adam else 2
    block = sum(p.numel() for p in Block().parameters())
    blocks = max(1, round((size / per_element - 2 * VOCAB * HIDDEN) / block))
    with torch.device("meta"):
        model = Model(blocks).to(torch.float32 if adam else torch.bfloat16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().normal_(0, 0.02)
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, object] = {"step": 1}
    if adam:
        for _ in range(2):  # moments like those of training: no two equal, over many orders of magnitude
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
                p.grad.to_local().normal_(0, 1e-3)
            optimizer.step()
        for p in model.parameters():
            p.grad = None
        state["model"], state["optim"] = get_state_dict(model, optimizer)
    else:
        state["model"] = model.state_dict()
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


main()
