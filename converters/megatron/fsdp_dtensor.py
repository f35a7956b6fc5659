"""Megatron-FSDP's `fsdp_dtensor`: a plain DCP folder with names of its own, as the state that Megatron-Core's other
formats hold.

    model.module.{name}                                    DTensors, of any uneven cut, in fp32 also where the job
                                                           computes in bf16: they are the optimizer's
    optimizer.state.module.module.module.{name}.{slot}     moments; two "module" in a job of fp32
    optimizer.param_to_group_meta.module....{name}.{key}   the hyperparameters of each parameter, its step among them
    rng_state.(pp, tp)                                     of each model-parallel rank
    opt_param_scheduler, args, iteration, ...              as in common.pt

{name} is that of the module: a gated linear_fc1 is two tensors, {name}_w and {name}_v, experts have their numbers in
the model (experts.local_experts.3.linear_fc1.weight, experts.linear_fc1.weight3), and the norms of layers without
TransformerEngine are input_layernorm and pre_mlp_layernorm. All become what they are in `dist_checkpointing`: one
tensor, the gate above the other half; one tensor of all experts; norms of the linear layer behind them. Param groups
are the parameters with equal hyperparameters.

Source: megatron/core/transformer/fsdp_dtensor_checkpoint.py (handle_swiglu_in_state_dict) and
optimizer/distrib_optimizer.py (_param_groups_to_param2group_meta) of megatron-core 0.16.1, and its saves in
tests/live/test_megatron_fsdp.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.errors import Corrupt, Unsupported, argument
from ckpttool.formats.pickles import short
from ckpttool.index.checkpoint import Checkpoint, Chunks, Leaves, Path, TensorEntry, joined, same_value
from ckpttool.index.names import CanonicalState
from ckpttool.layouts import Place, ReadOptions, checkpoint_of
from ckpttool.storage.overlay import find_parent_folder
from ckpttool.storage.source import Source
from ckpttool.storage.sources import open_source

from .. import dcp
from .dist_checkpointing import locate_distcp_tensors
from .keys import TRAINER, to_plain_args

__all__ = ["FsdpDtensor"]

_TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_\d{7}|release")
_HALF = re.compile(r"(?P<name>.*linear_fc1\.(?:weight|bias)\d*)_(?P<half>[wv])")
_WRAPPERS = re.compile(r"^(?:module\.)+")  # of Float16Module, MegatronFSDP, and the adapter around them
_RANK = re.compile(r"\((\d{1,9}), (\d{1,9})\)")  # of the pipeline, and of the tensors
_EXPERTS = ".experts.experts."  # in dist_checkpointing's names, where the tensors of all experts are one
_META = ("optim", "param_to_group_meta")


class _Part(NamedTuple):
    """What a stored tensor is of a parameter in `dist_checkpointing`: all of it, where it has no expert and no half.

    `expert` is the number of its expert; `half` is "w" for the gate of linear_fc1, "v" for the other matrix, "" for
    neither.
    """

    expert: int | None
    half: str


class FsdpDtensor:
    """The dialect of folders that Megatron-LM saved with torch's own DCP."""

    evidence = "is an iter_N folder of DCP: fsdp_dtensor"

    @classmethod
    def find(cls, source: Source) -> FsdpDtensor | None:
        """Return the dialect if a folder was saved by Megatron-LM with DCP, else None.

        Such a folder is recognised by its name and by the tracker file in the folder above it.
        """
        parent, name = find_parent_folder(source)
        if not _ITERATION.fullmatch(name) or not parent:
            return None
        names = source.list()
        if ".metadata" not in names or "metadata.json" in names:
            return None
        with open_source(parent) as above:
            return cls() if above.exists(_TRACKER) else None

    def read(self, source: Source, options: ReadOptions) -> Checkpoint:
        """Return the index of the DCP folder, under the names that Megatron-Core's other formats have.

        Raises:
            Corrupt: half of a gated matrix or an expert is missing, or the DCP folder is damaged.
            Unsupported: parts of a parameter have different hyperparameters.
        """
        found = dcp.read(Place(source, None), ReadOptions(salvage=options.salvage))
        optimizer = options.only is None or "optim" in options.only
        leaves = {p: x for p, x in found.leaves().items() if optimizer or p[0] != "optim"}
        named = CanonicalState(_rename_leaves(leaves), {}, TRAINER, found.notes)
        if any(p[0] == "model" and _HALF.fullmatch(str(p[1])) for p in leaves):
            found.notes.append(
                "linear_fc1 is stored as two tensors, _w and _v, and is one tensor here, as in Megatron-Core's other "
                "formats"
            )
        out = checkpoint_of(named, "megatron", found.root, found.world_size, found.files, source)
        out.records, out.ranks, out.salvage, out.spreads_tensors = found.records, found.ranks, found.salvage, True
        out.tails = found.tails
        return out

    def locate(self, ckpt: Checkpoint, source: Source) -> Checkpoint:
        """Return the index with the place of every tensor in the .distcp files, which are opened for it."""
        experts = {n: t for n, t in ckpt.tensors.items() if len(t.chunks) and t.chunks.ndim > 1 and _EXPERTS in n}
        flat = {n: _flatten_experts(t) for n, t in experts.items() if t.coding != "raw"}
        found = locate_distcp_tensors(replace(ckpt, tensors=dict(ckpt.tensors) | flat), source)
        for n in flat:
            t, there = ckpt.tensors[n], found.tensors[n]
            out = Chunks(t.chunks.ndim)
            out.start, out.shape = t.chunks.start, t.chunks.shape
            out.file, out.offset, out.length = there.chunks.file, there.chunks.offset, there.chunks.length
            out.strides = {k: (0, *strides) for k, strides in there.chunks.strides.items()}
            found.tensors[n] = replace(there, shape=t.shape, chunks=out)
        return found


def _flatten_experts(t: TensorEntry) -> TensorEntry:
    """Return a tensor of shape [experts, rows, ..] as one of shape [experts * rows, ..].

    Each chunk is of one expert, and gets the shape in which it is stored.
    """
    out = Chunks(len(t.shape) - 1)
    for c in t.chunks:
        out.add((c.start[0] * t.shape[1] + c.start[1], *c.start[2:]), c.shape[1:], *c.extent)
    return replace(t, shape=(t.shape[0] * t.shape[1], *t.shape[2:]), chunks=out)


def _rename_leaves(found: Mapping[Path, object]) -> Leaves:
    """Return the leaves of a DCP folder, {canonical path: tensor or data}, under the names that Megatron-Core's other
    formats have.

    Raises:
        Corrupt: half of a gated matrix or an expert is missing, or is of another shape.
        Unsupported: parts of a parameter have different hyperparameters.
    """
    out: Leaves = {}
    parts: dict[Path, dict[_Part, TensorEntry]] = {}
    metas: dict[str, dict[Any, Any]] = {}
    model = {_WRAPPERS.sub("", str(p[1])) for p in found if p[0] == "model" and len(p) == 2}
    shards = [m for p in found if p[0] == "rng" and len(p) > 1 and (m := _RANK.fullmatch(str(p[1])))]
    grid = ".".join(str(1 + max((int(m[k]) for m in shards), default=0)) for k in (1, 2))
    for path, leaf in found.items():
        at = 1 if path[0] == "model" and len(path) == 2 else 2 if path[0] == "optim" and len(path) > 3 else None
        if at is not None:
            name, part = _parse_name(str(path[at]), model)
            key = (*path[:at], name, *path[at + 1 :])
            if path[:2] == _META:
                first = metas.setdefault(name, {}).setdefault(path[3:], leaf)
                if not isinstance(first, TensorEntry) and not same_value(first, leaf):
                    raise Unsupported(
                        f'"{path[2]}" has {joined(path[3:])} {short(leaf)}, and another part of "{name}" has '
                        f"{short(first)}: one parameter has one of them. {argument('only', ['model'])} leaves the "
                        "optimizer out.",
                        code="CKPT0328",
                    )
            elif isinstance(leaf, TensorEntry):
                parts.setdefault(key, {})[part] = leaf
                out.setdefault(key, None)  # its place in the order
            else:
                out[key] = leaf
        elif path[:2] == ("extra", "opt_param_scheduler"):
            out["scheduler", *path[2:]] = leaf
        elif path[:2] == ("extra", "args"):
            out[path] = to_plain_args(leaf)
        elif path[0] == "rng" and len(path) > 1 and (of := _RANK.fullmatch(str(path[1]))):
            out["rng", f"shard_{of[1]}.{of[2]}_{grid}", *path[2:]] = leaf
        else:
            out[path] = leaf
    for path, tensors in parts.items():
        out[path] = _join_parts(path, tensors)
    return out | _build_param_groups(metas)


def _parse_name(stored: str, model: Set[str]) -> tuple[str, _Part]:
    """Return (the name in `dist_checkpointing` of a parameter, the part of it that has the stored name).

    Args:
        stored: the name in the DCP folder, of the model or of the optimizer.
        model: the names of all parameters of the model, without the wrappers' prefix: norms get the names of fused ones
            where the layer's are modules of their own.
    """
    from .legacy.sharding import LAYER, to_global_name  # which loads what reads tensors

    name = _WRAPPERS.sub("", stored)
    half = m["half"] if (m := _HALF.fullmatch(name)) else ""
    name = m["name"] if m else name
    of = LAYER.fullmatch(name)
    layer = f"{of['head']}.{of['i']}" if of else ""
    fused = {f"{layer}.self_attention.linear_qkv.weight", f"{layer}.input_layernorm.weight"} <= model
    name, expert = to_global_name(name, 0, fused)
    return name, _Part(expert, half)


def _join_parts(path: Path, parts: Mapping[_Part, TensorEntry]) -> TensorEntry:
    """Join the parts of a tensor into one at `path`: the rows of half "w" above those of "v", and an axis before these
    that counts the experts. A tensor that is one part stays unchanged but for its path.

    Raises:
        Corrupt: a part is missing, or parts differ in dtype, shape or coding.
    """
    first = next(iter(parts.values()))
    halves = sorted({p.half for p in parts}, reverse=True)  # "w" before "v"
    experts = sorted({p.expert for p in parts}, key=lambda e: -1 if e is None else e)
    alike = all((t.dtype, t.shape, t.coding) == (first.dtype, first.shape, first.coding) for t in parts.values())
    whole = halves in ([""], ["w", "v"]) and experts in ([None], list(range(len(experts))))
    if not alike or not whole or len(parts) != len(halves) * len(experts):
        raise Corrupt(
            f'"{joined(path)}" is stored as {"two halves" if experts == [None] else "a tensor of each expert"}, and '
            f"{'they are not alike' if not alike else 'one is missing'}.",
            code="CKPT0412",
        )
    if not first.shape:  # the step, which is that of all parts
        return replace(first, path=path)
    stack = [] if experts == [None] else [len(experts)]
    out, rows = Chunks(len(stack) + len(first.shape)), first.shape[0]
    for part, t in parts.items():
        for c in t.chunks:
            start = (c.start[0] + rows * halves.index(part.half), *c.start[1:])
            if stack:
                out.add((part.expert or 0, *start), (1, *c.shape), *c.extent)
            else:
                out.add(start, c.shape, *c.extent, strides=c.strides, zstd=c.zstd)
    return replace(first, shape=(*stack, rows * len(halves), *first.shape[1:]), path=path, chunks=out)


def _build_param_groups(metas: Mapping[str, Mapping[Any, Any]]) -> Leaves:
    """Return the leaves of the param groups and of the steps; parameters with equal hyperparameters form one group.

    `metas` is {name of a parameter: {path inside its entry of param_to_group_meta: value}}.
    """
    groups: list[tuple[Mapping[Any, Any], list[str]]] = []
    out: Leaves = {}
    for name, meta in metas.items():
        for known, names in groups:
            if same_value(known, meta):
                names.append(name)
                break
        else:
            groups.append((meta, [name]))
        if ("step",) in meta:
            out["optim", "state", name, "step"] = meta["step",]
    for i, (meta, names) in enumerate(groups):
        out |= {("optim", "param_groups", i, *key): x for key, x in meta.items()}
        out["optim", "param_groups", i, "params"] = names
    return out
