"""A job of torch's own FSDP2, tensor and expert parallelism, which loads what ckpttool wrote for its mesh, and trains.

python mesh_resume.py FOLDER MESH...      FOLDER/{MESH} is the checkpoint, FOLDER/state.pt and losses.json the truth
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCABULARY, WIDTH, INNER, EXPERTS, ROWS = 131, 12, 10, 6, 8
PLAN = """
layers.*.up        colwise
layers.*.down      rowwise   # its bias is whole on each rank
embed              embedding_rowwise
head               colwise
"""


class Experts(nn.Module):
    """Stacked experts, all of which every token visits."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))
        self.w2 = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # ranks of ep have different data, so their gradients are added
        w1, w2 = (
            w.full_tensor(grad_placements=[Partial()] * w.device_mesh.ndim) if isinstance(w, DTensor) else w
            for w in (self.w1, self.w2)
        )
        return torch.einsum("bse,edi,ein->bsn", x.new_ones(*x.shape[:2], EXPERTS), w1, w2) * 0.1 + x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts(x + self.down(torch.tanh(self.up(self.norm(x)))))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        g = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g) * 0.3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def train(model: Model, opt: Any, steps: range, at: int = 0, of: int = 1, ep: int = 1) -> list[float]:
    """The losses of some steps, on rows number `at` of `of` of each batch."""
    losses = []
    for step in steps:
        ids = torch.randint(0, VOCABULARY, (ROWS, 6), generator=torch.Generator().manual_seed(step))
        mine = ids[at * ROWS // of : (at + 1) * ROWS // of]
        loss = nn.functional.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        for name, p in model.named_parameters():
            if "experts" in name and ep > 1 and p.grad is not None:
                p.grad.div_(ep)  # FSDP has divided by its own ranks only
        opt.step()
        opt.zero_grad()
        whole = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(whole)
            whole /= dist.get_world_size()
        losses.append(whole.item())
    return losses


def make_optimizer(model: Model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def parallel_model(sizes: dict[str, int]) -> tuple[Model, int, int]:
    """The model of this rank of a mesh, which batch rows it reads, and of how many such parts."""
    replicate, shard, tp, ep = (sizes.get(n, 1) for n in ("dp_replicate", "dp_shard", "tp", "ep"))
    mesh = init_device_mesh("cpu", (replicate, shard, tp), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    model = Model()
    if tp > 1:
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        parallelize_module(
            model,
            mesh["tp"],
            {
                "embed": RowwiseParallel(input_layouts=Replicate()),
                "head": ColwiseParallel(output_layouts=Replicate()),
            },
        )
    dp = mesh["dp_replicate", "dp_shard"] if replicate > 1 else mesh["dp_shard"]
    if ep > 1:
        sparse = init_device_mesh(
            "cpu", (replicate, shard * tp // ep, ep), mesh_dim_names=("dp_replicate", "efsdp", "ep")
        )
        edp = sparse["dp_replicate", "efsdp"] if replicate > 1 else sparse["efsdp"]
        along = 1 if shard * tp > EXPERTS else 0
        for layer in model.layers:
            for name, w in list(layer.experts.named_parameters()):
                setattr(layer.experts, name, nn.Parameter(distribute_tensor(w.detach(), sparse["ep"], [Shard(0)])))
            fully_shard(layer.experts, mesh=edp, shard_placement_fn=lambda p: Shard(along))
    for layer in model.layers:
        fully_shard(layer, mesh=dp)
    fully_shard(model, mesh=dp)
    return model, dist.get_rank() // tp, replicate * shard


class CountingReader(dcp.FileSystemReader):
    """Notes which file every tensor is read from."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.files: dict[str, set[str]] = {}

    def read_data(self, plan: Any, planner: Any) -> Any:
        for item in plan.items:
            place = self.storage_data[item.storage_index].relative_path
            self.files.setdefault(item.dest_index.fqn, set()).add(place)
        return super().read_data(plan, planner)


def main(folder: Path, meshes: list[str]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    truth = torch.load(folder / "state.pt", weights_only=True)
    found: dict[str, Any] = {}
    for text in meshes:
        sizes = {n: int(s) for n, _, s in (part.partition("=") for part in text.split(","))}
        model, at, of = parallel_model(sizes)
        opt = make_optimizer(model)
        msd, osd = get_state_dict(model, opt)
        state = {"model": msd, "optim": osd}
        reader = CountingReader(str(folder / text))
        dcp.load(state, storage_reader=reader)
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        odd = []
        for name, p in model.named_parameters():
            slots = {"": p.detach(), **{k: opt.state[p][k] for k in ("exp_avg", "exp_avg_sq", "step")}}
            for slot, x in slots.items():
                want = truth["optim"]["state"][name][slot] if slot else truth["model"][name]
                got = x.full_tensor() if isinstance(x, DTensor) else x
                if not torch.equal(got, want):
                    odd.append(f"{name} {slot}")
        losses = train(model, opt, range(2, 4), at, of, sizes.get("ep", 1))
        files = [None] * dist.get_world_size()
        dist.all_gather_object(files, {n: sorted(f) for n, f in reader.files.items()})
        found[text] = {"odd": odd, "losses": losses, "files": files}
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
