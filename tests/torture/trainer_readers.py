"""What the real readers read from directories of trainers: torch, torch.distributed.checkpoint and safetensors, a part at a time.

Each reader gives {path: tensor} of the weights and moments under canonical names. The parts are put together in a few lines here, as
the trainer's own code does it; no trainer is installed beside the tests. What has no reader here (Megatron-Core, nanotron,
torchsnapshot, torchao's classes) is only watched, and converted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.tensor import DTensor

from ckpttool.index import names

from .oracle import READERS as OF_LAYOUTS
from .oracle import Tree, are_tied, dcp, flat, hf, load

BOTH = frozenset({"model", "optim.state"})


def named(tree: Tree, live: bool = False) -> Tree:
    """The weights and moments of a tree under canonical names; PEFT's names of a live adapter as it saves them, but where
    the trainer has them `live`."""
    found = names.canonical(tree, lambda x: tuple(x.shape) if isinstance(x, Tensor) else None, same=are_tied).leaves
    renamed = {
        tuple(_ADAPTER.sub(r"\1", p) if isinstance(p, str) and not live else p for p in path): x
        for path, x in found.items()
    }
    return {
        p: x for p, x in renamed.items() if isinstance(x, Tensor) and (p[0] == "model" or p[:2] == ("optim", "state"))
    }


_ADAPTER = re.compile(r"(\.lora_[AB])\.default(?=\.)")


#: {folder of DCP: {first keys there: ours instead}}
Places = dict[str, dict[tuple[str, ...], tuple[str, ...]]]


def parts(places: Places, live: bool = False) -> Callable[[Path], Tree]:
    """A reader of those folders of DCP below the checkpoint's that are there. A key around others is only left out, as
    ckpttool does it, where nothing is beside it."""

    def read(path: Path) -> Tree:
        found: Tree = {}
        for folder, heads in places.items():
            there = dcp(path / folder) if (path / folder / ".metadata").exists() else {}
            alone = len({p[0] for p in there}) == 1
            for p, x in there.items():
                head = next((h for h in heads if p[: len(h)] == h and (alone or len(h) == 1)), ())
                found[(*heads.get(head, ()), *p[len(head) :])] = x
        return named(found, live)

    return read


def full(path: Path) -> Tree:
    """A file of all weights and one of the optimizer, by names."""
    weights = {("model", n): x for n, x in load(path / "pytorch_model_fsdp.bin").items() if isinstance(x, Tensor)}
    return weights | named(flat({"optim": load(path / "optimizer.bin")}))


def adapter(path: Path) -> Tree:
    """The weights of an adapter, as PEFT saves them."""
    return {("model", n): t for n, t in load_file(path / "adapter_model.safetensors").items()}


def _shards(path: Path) -> Tree:
    """safetensors files that DCP wrote, a part of every tensor in each."""
    tree: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(tree, storage_reader=HuggingFaceStorageReader(str(path)), planner=planner, no_dist=True)
    return {("model", n): t for n, t in tree.items()}


def automodel(path: Path) -> Tree:
    """NeMo AutoModel."""
    return named(_shards(path / "model") | dcp(path / "optim"))


def transformers(path: Path) -> Tree:
    """transformers' own sharded save."""
    return named(_shards(path / "weights") | dcp(path / "optimizer"))


def _joined(parts: list[Any]) -> Any:
    """A tensor of which every rank has a part, or has it whole."""
    first = parts[0]
    if not isinstance(first, DTensor):
        return first
    (placement,) = first.placements
    local = [t.to_local() for t in parts]
    whole = torch.cat(local, placement.dim) if placement.is_shard() else local[0]
    assert all(t.shape == first.shape and t.dtype == first.dtype for t in parts) and whole.shape == first.shape
    return whole


def verl(path: Path) -> Tree:
    """verl: files of ranks with DTensors."""
    models = [load(path / f"model_world_size_3_rank_{r}.pt") for r in range(3)]
    optims = [load(path / f"optim_world_size_3_rank_{r}.pt") for r in range(3)]
    out: Tree = {("model", n): _joined([m[n] for m in models]) for n in models[0]}
    named = list(models[0])
    # numbers follow the order of the module; where another order of the file does not fit the shapes, nobody can name them
    numbered = [
        (named[i], x) for i, slots in optims[0]["state"].items() if not isinstance(i, str) for x in slots.values()
    ]
    if any(isinstance(x, DTensor) and x.shape != models[0][n].shape for n, x in numbered):
        return {p: t for p, t in out.items() if isinstance(t, Tensor)}
    for i, slots in optims[0]["state"].items():
        name = i if isinstance(i, str) else named[i]
        out.update({("optim", "state", name, slot): _joined([o["state"][i][slot] for o in optims]) for slot in slots})
    return {p: t for p, t in out.items() if isinstance(t, Tensor)}


READERS: dict[str, tuple[Callable[[Path], Tree], frozenset[str] | None]] = {
    "fsdp_parts": (parts({"pytorch_model_fsdp_0": {}, "optimizer_0": {}}), BOTH), "olmo": (parts({"model_and_optim": {}}), BOTH), "dcp_model": (parts({".": {}}), BOTH),
    "lightning": (parts({".": {("state_dict",): ("model",), ("optimizer_0",): ("optim",)}}, live=True), BOTH), "fsdp_full": (full, BOTH), "adapter": (adapter, frozenset({"model"})), "automodel": (automodel, BOTH),
    "transformers": (transformers, BOTH), "verl": (verl, BOTH), "torchtune": (hf, frozenset({"model"})),
    "nemo_rl": (parts({"policy/weights": {}, "policy/optimizer": {("optim", "optim"): ("optim",)}}), BOTH),
    "prime_rl": (parts({"trainer": {("app", "model"): ("model",), ("app", "optimizers"): ("optim",)}}), BOTH),
    "xtuner": (parts({"weights": {("optimizer",): ("optim",)}}), BOTH),
    "llamafactory": (parts({"model": {(): ("model",)}, "optimizer": {(): ("optim",)}}), BOTH),
    "lerobot": (parts({"pretrained_model/pytorch_model_fsdp_0": {}, "training_state/optimizer_0": {("optimizer",): ("optim",)}}), BOTH),
}  # fmt: skip

OF_LAYOUTS.update(READERS)
