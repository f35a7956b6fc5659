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
from ckpttool.index.checkpoint import Chunks, Path, TensorEntry, joined

from .keys import data_of_args

__all__ = ["canonical_fsdp"]

_HALF = re.compile(r"(?P<name>.*linear_fc1\.(?:weight|bias)\d*)_(?P<half>[wv])")
_META = ("optim", "param_to_group_meta")


def canonical_fsdp(found: Mapping[Path, Any], original: Mapping[str, str]) -> dict[Path, Any]:
    """The leaves of a folder as dcp reads it, under the names of Megatron-Core's other formats.

    Args:
        found: {canonical path: tensor or data}.
        original: {name of a parameter in `param_to_group_meta`: its name in the model}.

    Raises:
        Corrupt: one half of a gated matrix is missing, or is of another shape.
    """
    out: dict[Path, Any] = {}
    halves: dict[Path, dict[str, TensorEntry]] = {}
    metas: dict[str, dict[Any, Any]] = {}
    for path, leaf in found.items():
        if path[:2] == _META and len(path) > 3:
            name = original.get(str(path[2]), str(path[2]))
            metas.setdefault(_whole(name), {})[path[3:]] = leaf
        elif path[:2] == ("extra", "opt_param_scheduler"):
            out["scheduler", *path[2:]] = leaf
        elif path[:2] == ("extra", "args"):
            out[path] = data_of_args(leaf)
        elif isinstance(leaf, TensorEntry) and path[0] in ("model", "optim") and _whole(at := _named(path)) != at:
            key = tuple(_whole(p) if isinstance(p, str) and p == at else p for p in path)
            m = _HALF.fullmatch(at)
            assert m is not None
            halves.setdefault(key, {})[m["half"]] = leaf
            out.setdefault(key, None)  # its place in the order
        else:
            out[path] = leaf
    for path, both in halves.items():
        out[path] = _joined(path, both)
    return out | _groups(metas)


def _named(path: Path) -> str:
    return str(path[1]) if path[0] == "model" else str(path[2]) if len(path) > 3 else ""


def _whole(name: str) -> str:
    m = _HALF.fullmatch(name)
    return m["name"] if m else name


def _joined(path: Path, both: Mapping[str, TensorEntry]) -> TensorEntry:
    """The two halves of a tensor, one above the other."""
    if both.keys() != {"w", "v"} or (both["w"].dtype, both["w"].shape, both["w"].coding) != (
        both["v"].dtype,
        both["v"].shape,
        both["v"].coding,
    ):
        raise Corrupt(
            f'"{joined(path)}" is stored as two halves, and '
            f"{'one is missing' if len(both) < 2 else 'they are not alike'}."
        )
    first, second = both["w"], both["v"]
    out, rows = Chunks(len(first.shape)), first.shape[0]
    for start, t in ((0, first), (rows, second)):
        for c in t.chunks:
            out.add((c.start[0] + start, *c.start[1:]), c.shape, *c.extent, strides=c.strides, zstd=c.zstd)
    return replace(first, shape=(2 * rows, *first.shape[1:]), path=path, chunks=out)


def _groups(metas: Mapping[str, Mapping[Any, Any]]) -> dict[Path, Any]:
    """Param groups of parameters with equal hyperparameters, and the step of each parameter."""
    groups: list[tuple[Mapping[Any, Any], list[str]]] = []
    out: dict[Path, Any] = {}
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
