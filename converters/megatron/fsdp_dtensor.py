"""Megatron-FSDP's `fsdp_dtensor`: a plain DCP folder with names of its own, as the state that Megatron-Core's other
formats hold.

    model.{name}, optimizer.state.{name}.{slot}            DTensors, of any uneven cut; a gated linear_fc1 is two
                                                           tensors, {name}_w and {name}_v
    optimizer.param_to_group_meta.{name}.{key}             the hyperparameters of each parameter
    opt_param_scheduler, rng_state, args, iteration, ...   as in common.pt

The two halves of linear_fc1 become one tensor again, the gate above the other; param groups are the parameters with
equal hyperparameters.

Source: megatron/core/transformer/fsdp_dtensor_checkpoint.py (handle_swiglu_in_state_dict) and
optimizer/distrib_optimizer.py (_param_groups_to_param2group_meta) of megatron-core 0.16.1; no such job was run, since
it needs a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpttool.errors import Corrupt
from ckpttool.index.checkpoint import Checkpoint, Chunks, Leaves, Path, TensorEntry, joined
from ckpttool.index.names import CanonicalState, original_path
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
_META = ("optim", "param_to_group_meta")


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
            Corrupt: half of a gated matrix is missing, or the DCP folder is damaged.
        """
        found = dcp.read(Place(source, None), ReadOptions(salvage=options.salvage))
        leaves = found.leaves()
        names = {str(original_path(p, found.origin)[-1]): str(p[1]) for p in leaves if p[0] == "model" and len(p) == 2}
        named = CanonicalState(_rename_leaves(leaves, names), {}, TRAINER, found.notes)
        if len(named.leaves) != len(leaves):
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
        return locate_distcp_tensors(ckpt, source)


def _rename_leaves(found: Mapping[Path, object], names: Mapping[str, str]) -> Leaves:
    """Return the leaves of a DCP folder under the names that Megatron-Core's other formats have.

    Args:
        found: {canonical path: tensor or data}.
        names: {name of a parameter in `param_to_group_meta`: its name in the model}.

    Raises:
        Corrupt: one half of a gated matrix is missing, or is of another shape.
    """
    out: Leaves = {}
    halves: dict[Path, dict[str, TensorEntry]] = {}
    metas: dict[str, dict[Any, Any]] = {}
    for path, leaf in found.items():
        if path[:2] == _META and len(path) > 3:
            name = names.get(str(path[2]), str(path[2]))
            metas.setdefault(_without_half_suffix(name), {})[path[3:]] = leaf
        elif path[:2] == ("extra", "opt_param_scheduler"):
            out["scheduler", *path[2:]] = leaf
        elif path[:2] == ("extra", "args"):
            out[path] = to_plain_args(leaf)
        elif (
            isinstance(leaf, TensorEntry)
            and path[0] in ("model", "optim")
            and _without_half_suffix(at := _find_parameter_name(path)) != at
        ):
            key = tuple(_without_half_suffix(p) if isinstance(p, str) and p == at else p for p in path)
            m = _HALF.fullmatch(at)
            assert m is not None
            halves.setdefault(key, {})[m["half"]] = leaf
            out.setdefault(key, None)  # its place in the order
        else:
            out[path] = leaf
    for path, both in halves.items():
        out[path] = _join_halves(path, both)
    return out | _build_param_groups(metas)


def _find_parameter_name(path: Path) -> str:
    """Return the name of the parameter whose weight or optimizer state has this path; "" for any other path."""
    return str(path[1]) if path[0] == "model" else str(path[2]) if len(path) > 3 else ""


def _without_half_suffix(name: str) -> str:
    """Return the name without its suffix _w or _v, which marks one half of a gated linear_fc1; any other name
    unchanged."""
    m = _HALF.fullmatch(name)
    return m["name"] if m else name


def _join_halves(path: Path, both: Mapping[str, TensorEntry]) -> TensorEntry:
    """Join the two halves of a gated tensor into one tensor at `path`, with the rows of "w" before those of "v".

    `both` is {"w": one half, "v": the other}.

    Raises:
        Corrupt: one half is missing, or they differ in dtype, shape or coding.
    """
    if both.keys() != {"w", "v"} or (both["w"].dtype, both["w"].shape, both["w"].coding) != (
        both["v"].dtype,
        both["v"].shape,
        both["v"].coding,
    ):
        raise Corrupt(
            f'"{joined(path)}" is stored as two halves, and '
            f"{'one is missing' if len(both) < 2 else 'they are not alike'}.",
            code="CKPT0412",
        )
    first, second = both["w"], both["v"]
    out, rows = Chunks(len(first.shape)), first.shape[0]
    for start, t in ((0, first), (rows, second)):
        for c in t.chunks:
            out.add((c.start[0] + start, *c.start[1:]), c.shape, *c.extent, strides=c.strides, zstd=c.zstd)
    return replace(first, shape=(2 * rows, *first.shape[1:]), path=path, chunks=out)


def _build_param_groups(metas: Mapping[str, Mapping[Any, Any]]) -> Leaves:
    """Return the leaves of the param groups and of the steps; parameters with equal hyperparameters form one group.

    `metas` is {name of a parameter: {path inside its entry of param_to_group_meta: value}}.
    """
    groups: list[tuple[Mapping[Any, Any], list[str]]] = []
    out: Leaves = {}
    for name, meta in metas.items():
        for known, names in groups:
            if known == meta:
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
