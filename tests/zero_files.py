"""DeepSpeed's files, made and read with plain torch: the format as its engine writes it, and no line of ckpttool.

    job = Job(...)                       weights, groups, slots: what an engine has
    zero3(job, folder, 4)                the files of ZeRO-3 on four ranks, padding filled with garbage
    zero12, zero0, universal             the other stages
    load(path)                           torch.load with DeepSpeed's classes as inert ones
    edit(path, change)                   a file that was made here, changed
    gathered3(folder), gathered12(...)   the tensors that an engine would find in a save

DeepSpeed is not imported: its three pickled classes are made here under their own names, only while a file is written
or read.
"""

from __future__ import annotations

import enum
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GARBAGE = -3309.03125


class LossScaler:
    """deepspeed.runtime.fp16.loss_scaler.LossScaler."""

    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state or {"cur_scale": 1.0, "dynamic": False})


class DynamicLossScaler(LossScaler):
    """The one that scales."""


class ZeroStageEnum(int, enum.Enum):
    """deepspeed.runtime.zero.config.ZeroStageEnum."""

    disabled, optimizer_states, gradients, weights = 0, 1, 2, 3


class fragment_address:
    """deepspeed.utils.tensor_fragment.fragment_address."""

    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


PLACES = {
    LossScaler: "deepspeed.runtime.fp16.loss_scaler",
    DynamicLossScaler: "deepspeed.runtime.fp16.loss_scaler",
    ZeroStageEnum: "deepspeed.runtime.zero.config",
    fragment_address: "deepspeed.utils.tensor_fragment",
}


@contextmanager
def deepspeed_classes() -> Iterator[None]:
    """While it lasts, the three classes lie where DeepSpeed has them."""
    names = {".".join(p.split(".")[: k + 1]) for p in PLACES.values() for k in range(p.count(".") + 1)}
    before = {n: sys.modules.get(n) for n in names}
    modules = {cls: cls.__module__ for cls in PLACES}
    try:
        for n in names:
            sys.modules[n] = types.ModuleType(n)
        for cls, place in PLACES.items():
            cls.__module__ = place
            setattr(sys.modules[place], cls.__name__, cls)
        yield
    finally:
        for n, module in before.items():
            if module is None:
                del sys.modules[n]
            else:
                sys.modules[n] = module
        for cls, name in modules.items():
            cls.__module__ = name


def save(tree: Any, path: Path, **how: Any) -> None:
    """torch.save, with DeepSpeed's names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with deepspeed_classes():
        torch.save(tree, path, **how)


def load(path: Path) -> Any:
    """torch.load by the restricted unpickler, with DeepSpeed's classes as ours."""
    with deepspeed_classes(), torch.serialization.safe_globals(list(PLACES)):
        return torch.load(path, weights_only=True)


def edit(path: Path, change: Callable[[Any], Any], **how: Any) -> None:
    """Change what a file that was made here holds; `change` changes it, or gives something else."""
    with deepspeed_classes():
        tree = torch.load(path, weights_only=False)
        new = change(tree)
    save(tree if new is None else new, path, **how)


def numbers(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of numbers that no other name has."""
    seed = sum((i + 1) * b for i, b in enumerate(name.encode())) % (1 << 31)
    t = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (t * 100).to(dtype) if not dtype.is_floating_point else t.to(dtype)


@dataclass
class Job:
    """What an engine has in memory. `weights` in the order of the module, tied and frozen ones and buffers among them."""

    weights: dict[str, Tensor]
    groups: list[list[str]]
    buffers: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    step: Any = field(default_factory=lambda: torch.tensor(3.0))
    options: list[dict[str, Any]] = field(default_factory=list)
    precision: torch.dtype = torch.float32
    client: dict[str, Any] = field(default_factory=dict)
    scheduler: Any = None
    steps: int = 3
    scaler: LossScaler | None = None

    def slot(self, name: str, slot: str) -> Tensor:
        """Optimizer state of a parameter."""
        found = numbers(f"{slot} {name}", tuple(self.weights[name].shape))
        return found.abs() if slot.endswith("_sq") else found  # averages of squares

    def option(self, g: int) -> dict[str, Any]:
        """Hyperparameters of a group."""
        default = {"lr": 0.01 * (g + 1), "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1 * g, "foreach": None}
        return self.options[g] if self.options else default

    def truth(self) -> dict[str, Tensor]:
        """`model.<fqn>`, `optim.<fqn>.<slot>`: what a reader must find."""
        out = {f"model.{n}": t for n, t in self.weights.items()}
        for n in [n for g in self.groups for n in g]:
            out.update({f"optim.{n}.{s}": self.slot(n, s) for s in self.slots})
            if isinstance(self.step, Tensor):
                out[f"optim.{n}.step"] = self.step
        return out


def awkward(**more: Any) -> Job:
    """Shapes that divide nothing, two groups that are no order of the module, frozen, tied, buffers."""
    shapes = {
        "embed.weight": (131, 6), "fc.weight": (9, 6), "fc.bias": (9,), "gate": (3, 5, 2), "lora.weight": (5, 7),
        "scale": (1,), "head.bias": (131,),
    }  # fmt: skip
    weights = {n: numbers(n, s, torch.float16 if "lora" in n else torch.float32) for n, s in shapes.items()}
    weights["lm_head.weight"] = weights["embed.weight"]
    weights["pos_table"] = numbers("pos_table", (4, 6))
    weights["seen"] = torch.tensor(17)
    return Job(
        **{
            "weights": weights, "groups": [["head.bias", "embed.weight", "fc.weight"], ["scale", "fc.bias", "gate"]],
            "buffers": ["pos_table", "seen"], "frozen": ["lora.weight"], "tied": {"lm_head.weight": "embed.weight"},
            **more,
        }
    )  # fmt: skip


def plain(**more: Any) -> Job:
    """Two parameters, for attacks."""
    weights = {"w": numbers("w", (5, 3)), "b": numbers("b", (4,))}
    return Job(**{"weights": weights, "groups": [["w", "b"]], **more})


# ------------------------------------------------------------------------------------------------- flat tensors


def padded(t: Tensor, n: int, garbage: float = GARBAGE) -> Tensor:
    """A flattened tensor, made n elements long."""
    out = torch.full((n,), garbage, dtype=t.dtype)
    out[: t.numel()] = t.reshape(-1)
    return out


def sub_groups(job: Job, world: int, most: float) -> tuple[list[list[str]], list[list[int]]]:
    """(names by sub-group, sub-groups by param group): whole parameters until the elements of a rank reach `most`."""
    flat: list[list[str]] = []
    ids: list[list[int]] = []
    for group in job.groups:
        mine: list[list[str]] = []
        total = 0.0
        for n in group:
            if not mine or total >= most:
                mine.append([])
                total = 0
            mine[-1].append(n)
            total += -(-job.weights[n].numel() // world)
        ids.append(list(range(len(flat), len(flat) + len(mine))))
        flat += mine
    return flat, ids


def model_file(
    job: Job, rank: int, world: int, stage: int, shapes: list[list[str]] | None, most: float = 1e9
) -> dict[str, Any]:
    """A *_model_states.pt."""
    trained = {n for g in job.groups for n in g}
    module: OrderedDict[str, Tensor] = OrderedDict()
    for n, t in job.weights.items():
        own = job.precision if n in trained or job.tied.get(n) in trained else t.dtype
        real = stage < 3 or n in job.buffers
        module[n] = t if n in job.buffers else t.to(own) if real else torch.empty(0, dtype=own)
    frozen: Any = OrderedDict((n, job.weights[n].shape) for n in job.frozen)
    parts: Any = OrderedDict()
    for n in job.frozen:
        t = job.weights[n]
        part = -(-t.numel() // world)
        parts[n] = t if stage < 3 else padded(t, part * world).view(world, part)[rank].clone()
    return {
        "module": module, "buffer_names": list(job.buffers), "optimizer": None,
        "param_shapes": None if shapes is None else [OrderedDict((n, job.weights[n].shape) for n in g) for g in shapes],
        "frozen_param_shapes": frozen if stage > 1 else None, "shared_params": dict(job.tied) if rank == 0 else {},
        "frozen_param_fragments": parts if stage > 1 else None, "lr_scheduler": job.scheduler, "data_sampler": None,
        "random_ltd": None, "sparse_tensor_module_names": set(), "skipped_steps": 1, "global_steps": job.steps,
        "global_samples": 12 * job.steps, "dp_world_size": world, "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {"train_batch_size": 12, "zero_optimization": {"stage": stage, "sub_group_size": most}, "bf16": {"enabled": job.precision == torch.bfloat16}},
        "ds_version": "0.19.8", **job.client,
    }  # fmt: skip


def scaler_keys(job: Job) -> dict[str, Any]:
    """What an optimizer file says of the loss scaler."""
    found = job.scaler or LossScaler()
    return {"loss_scaler": found, "dynamic_loss_scale": isinstance(found, DynamicLossScaler), "overflow": False}


def in_memory(job: Job) -> dict[str, Any]:
    """Scalars of the state of a flat tensor."""
    return {} if job.step is None else {"step": job.step.clone() if isinstance(job.step, Tensor) else job.step}


def zero3(
    job: Job, folder: Path, world: int, most: float = 1e9, tag: str | None = None, old_name: bool = False, **how: Any
) -> Path:
    """engine.save_checkpoint at stage 3, `most` being sub_group_size."""
    tag = tag or f"global_step{job.steps}"
    names, ids = sub_groups(job, world, most)
    prefix = "bf16_" if job.precision == torch.bfloat16 else ""
    for rank in range(world):
        save(
            model_file(job, rank, world, 3, names, most), folder / tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", **how
        )  # fmt: skip

        def flat(value: Callable[[str], Tensor], group: list[str], rank: int = rank, pad: float = 0.0) -> Tensor:
            parts = [padded(t := value(n), -(-t.numel() // world) * world, pad).view(world, -1)[rank] for n in group]
            return torch.cat(parts)

        state: dict[int, Any] = {}
        for g, group in enumerate(names):
            state[g] = in_memory(job)
            state[g] |= {s: flat(lambda n, s=s: job.slot(n, s), group) for s in job.slots}
        optim = {
            "zero_stage": ZeroStageEnum(3), **scaler_keys(job), "partition_count": world,
            "optimizer_state_dict": {
                "state": {} if not job.slots and job.step is None else state,
                "param_groups": [{**job.option(g), "params": own} for g, own in enumerate(ids)],
            },
            "fp32_flat_groups": [flat(lambda n: job.weights[n], group, pad=GARBAGE).requires_grad_() for group in names],
        }  # fmt: skip
        name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00{'' if old_name else '_'}optim_states.pt"
        save({"optimizer_state_dict": optim, "ds_config": {}, "ds_version": "0.19.8"}, folder / tag / name, **how)
    (folder / "latest").write_text(tag)
    return folder


def zero12(
    job: Job,
    folder: Path,
    world: int,
    stage: int = 2,
    aligned: bool = False,
    elastic: bool = False,
    bf16_optimizer: bool = False,
    stripped: bool = True,
    orders: list[list[str]] | None = None,
    **how: Any,
) -> Path:
    """engine.save_checkpoint at stages 1 and 2.

    `orders` is the order of a flat tensor where that is not the param group's (round_robin_gradients); `bf16_optimizer`
    writes what BF16_Optimizer does; `stripped` False leaves the padding at the end of the masters.
    """
    tag = f"global_step{job.steps}"
    orders = orders or job.groups
    save(model_file(job, 0, world, stage, orders), folder / tag / "mp_rank_00_model_states.pt", **how)
    item = torch.empty(0, dtype=job.precision).element_size()
    paddings = [
        [-job.weights[n].numel() % (16 // item) if aligned and n != group[-1] else 0 for n in group] for group in orders
    ]
    prefix = "bf16_" if job.precision == torch.bfloat16 else ""

    def flat(value: Callable[[str], Tensor], g: int, pad: float) -> tuple[Tensor, int]:
        parts = [padded(t := value(n), t.numel() + k, pad) for n, k in zip(orders[g], paddings[g], strict=True)]
        whole = torch.cat(parts)
        return padded(whole, -(-whole.numel() // (2 * world)) * 2 * world, pad), whole.numel()

    for rank in range(world):
        masters, state, short, slices = [], {}, [], []
        for g in range(len(orders)):
            whole, raw = flat(lambda n: job.weights[n], g, GARBAGE)
            part = len(whole) // world
            mine = whole.view(world, part)[rank]
            keep = max(0, min(part, raw - rank * part))
            masters.append((mine[:keep] if stripped and not bf16_optimizer else mine).clone())
            short.append(part - keep)
            state[g] = in_memory(job)
            for s in job.slots:
                moments = flat(lambda n, s=s: job.slot(n, s), g, 0.0)[0].view(world, part)[rank]
                state[g][s] = (moments[:keep] if elastic else moments).clone()
            slices.append(
                OrderedDict((n, fragment_address(1, 7)) for n in job.groups[g])
            )  # wrong, as the engine's may be
        groups = [{**job.option(g), "params": [g]} for g in range(len(orders))]
        base: Any = list(state.values()) if elastic else {"state": state, "param_groups": groups}
        optim: dict[str, Any] = {
            "base_optimizer_state": base, "single_partition_of_fp32_groups": masters, "group_paddings": short,
            "partition_count": [world] * len(orders), "ds_version": "0.19.8", "param_slice_mappings": slices, "clip_grad": 0.0,
        }  # fmt: skip
        if not bf16_optimizer:
            optim |= {"zero_stage": ZeroStageEnum(stage), **scaler_keys(job)}
        if aligned:
            optim["param_alignment_paddings"] = paddings
        name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        save({"optimizer_state_dict": optim, "ds_config": {}, "ds_version": "0.19.8"}, folder / tag / name, **how)
    (folder / "latest").write_text(tag)
    return folder


def zero0(job: Job, folder: Path, world: int, masters: bool = False, **how: Any) -> Path:
    """engine.save_checkpoint at stage 0: the optimizer lies in the model file, numbered; `masters` as a bf16 engine."""
    tag = f"global_step{job.steps}"
    tree = model_file(job, 0, world, 0, None)
    named = [n for group in job.groups for n in group]
    numbered = iter(range(len(named)))
    ids = [[next(numbered) for _ in group] for group in job.groups]
    state = {i: in_memory(job) | {s: job.slot(n, s) for s in job.slots} for i, n in enumerate(named)}
    inner = {"state": state, "param_groups": [{**job.option(g), "params": own} for g, own in enumerate(ids)]}
    tree["optimizer"] = inner
    if masters:
        tree["optimizer"] = {
            "dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 3, "optimizer_state_dict": inner,
            "fp32_groups": [[job.weights[n].clone() for n in group] for group in job.groups],
        }  # fmt: skip
    save(tree, folder / tag / "mp_rank_00_model_states.pt", **how)
    (folder / "latest").write_text(tag)
    return folder


def universal(job: Job, folder: Path, world: int, stage: int = 3, **how: Any) -> Path:
    """ds_to_universal on a save of `world` ranks: the model files of those ranks, one folder a parameter."""
    tag = f"global_step{job.steps}_universal"
    out = folder / tag
    for rank in range(world if stage == 3 else 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        save(model_file(job, rank, world, stage, job.groups), out / f"{name}_model_states.pt", **how)
    for n in [n for g in job.groups for n in g]:
        parts = {"fp32": job.weights[n], **{s: job.slot(n, s) for s in job.slots}}
        for slot, t in parts.items():
            x = t.reshape(-1).clone() if stage == 3 else {"param": t.clone(), "cat_dim": 0}
            save(x, out / "zero" / n / f"{slot}.pt", **how)
        if stage < 3 and job.step is not None:
            save(job.step, out / "zero" / n / "step.pt", **how)
    if stage < 3:  # these have no fragment in the flat tensors, so they are written from the module
        for n in [*job.buffers, *job.frozen]:
            save({"param": job.weights[n].float()}, out / "zero" / n / "fp32.pt", **how)
    groups = [{**job.option(g), "params": [g]} for g in range(len(job.groups))]
    optim = {"zero_stage": ZeroStageEnum(stage), **scaler_keys(job), "param_groups": groups}
    if stage == 3:
        shard = {s: torch.full((3,), GARBAGE) for s in job.slots}  # rank 0's own part, of no use
        state = {g: {**in_memory(job), **shard} for g in range(len(job.groups))}
        optim |= {
            "partition_count": world, "optimizer_state_dict": {"state": state, "param_groups": groups},
            "fp32_flat_groups": [torch.full((3,), GARBAGE) for _ in job.groups],
        }  # fmt: skip
    save(optim, out / "zero" / "optimizer_state.pt", **how)
    (folder / "latest_universal").write_text(tag)
    return folder


# ------------------------------------------------------------------------------------------- what an engine finds


def _ranks(folder: Path, ending: str) -> list[Path]:
    found = [p for p in folder.iterdir() if p.name.endswith(ending)]
    return sorted(found, key=lambda p: int(re.findall(r"rank_(\d+)_mp", p.name)[0]))


def save_of(folder: Path) -> Path:
    """The folder of the tag that `latest` names."""
    return folder / (folder / "latest").read_text()


def gathered3(folder: Path) -> dict[str, Tensor]:
    """`model.<fqn>`, `optim.<fqn>.<slot>` of a save of stage 3: parts of all ranks put together."""
    where = save_of(folder)
    models = [load(p) for p in _ranks(where, "_model_states.pt")]
    optims = [load(p)["optimizer_state_dict"] for p in _ranks(where, "_optim_states.pt")]
    world = len(models)
    assert len(optims) == world
    out: dict[str, Tensor] = {}
    for g, shapes in enumerate(models[0]["param_shapes"]):
        rows = {"": [o["fp32_flat_groups"][g] for o in optims]}
        state = [o["optimizer_state_dict"]["state"].get(g, {}) for o in optims]
        rows |= {s: [x[s] for x in state] for s in state[0]}
        for slot, of_ranks in rows.items():
            at = 0
            for n, shape in shapes.items():
                name = f"optim.{n}.{slot}" if slot else f"model.{n}"
                if not isinstance(of_ranks[0], Tensor) or of_ranks[0].ndim == 0:
                    assert all(x == of_ranks[0] for x in of_ranks)
                    if isinstance(of_ranks[0], Tensor):
                        out[name] = of_ranks[0]
                    continue
                part = -(-shape.numel() // world)
                whole = torch.cat([x.detach()[at : at + part] for x in of_ranks])
                assert not whole[shape.numel() :].any(), "padding is zeros"
                out[name] = whole[: shape.numel()].view(shape)
                at += part
            assert not isinstance(of_ranks[0], Tensor) or of_ranks[0].ndim == 0 or at == len(of_ranks[0])
    for n, shape in (models[0]["frozen_param_shapes"] or {}).items():
        whole = torch.cat([m["frozen_param_fragments"][n] for m in models])
        out[f"model.{n}"] = whole[: shape.numel()].view(shape)
    _rest_of_module(models, out, True)
    return out


def gathered12(folder: Path) -> dict[str, Tensor]:
    """The same for stages 1 and 2."""
    where = save_of(folder)
    model = load(where / "mp_rank_00_model_states.pt")
    optims = [load(p)["optimizer_state_dict"] for p in _ranks(where, "_optim_states.pt")]
    out: dict[str, Tensor] = {}
    for g, shapes in enumerate(model["param_shapes"]):
        rows = {"": [o["single_partition_of_fp32_groups"][g] for o in optims]}
        state = [o["base_optimizer_state"]["state"].get(g, {}) for o in optims]
        rows |= {s: [x[s] for x in state] for s in state[0]}
        total = sum(s.numel() for s in shapes.values())
        for slot, of_ranks in rows.items():
            at = 0
            whole = torch.cat(of_ranks) if of_ranks[0].ndim else of_ranks[0]
            if whole.ndim:
                assert len(whole) == (-(-total // (2 * len(optims))) * 2 * len(optims) if slot else total)
            for n, shape in shapes.items():
                name = f"optim.{n}.{slot}" if slot else f"model.{n}"
                out[name] = whole[at : at + shape.numel()].view(shape) if whole.ndim else whole
                at += shape.numel()
    _rest_of_module([model], out, False)
    return out


def _rest_of_module(models: list[Any], out: dict[str, Tensor], holes: bool) -> None:
    module = models[0]["module"]
    for a, owner in models[0]["shared_params"].items():
        out[f"model.{a}"] = out[f"model.{owner}"]
    assert all(not m["shared_params"] for m in models[1:])
    for n, t in module.items():
        if f"model.{n}" in out:
            assert t.shape == ((0,) if holes else out[f"model.{n}"].shape)
            if not holes:
                assert torch.equal(t, out[f"model.{n}"].to(t.dtype))
        else:
            out[f"model.{n}"] = t
            assert all(torch.equal(m["module"][n], t) and m["module"][n].dtype == t.dtype for m in models)
