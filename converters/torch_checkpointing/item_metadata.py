"""metadata.pkl of torch_checkpointing: which box of a whole tensor each rank's local tensor is; torch_checkpointing.py
has the folder.

    {"version": "2.0", "world_size": 3, "metadata": {item: {
        "nested_path_to_metadata": {path in the item, as JSON: [{"ranks": (0, 1, 2), "sharding_metadata": {"type",
        "data"}}]}, "rank_to_layout_info": {rank: None, or {"file_path", "serialization_format": {"type":
        "SafetensorsSerialization"}}}}}}

A pickle of plain values, without a global. Types of sharding metadata:

    DTensorShardingMetadata   {"global_shape", "dtype", "stride", "mesh_spec": {"mesh_shape", "mesh_data", ...},
                              "placements"} placements {"type": "Shard", "dim"}, {"type": "StridedShard", "dim",
                              "split_factor"}, {"type": "Replicate"}
    default_tensor_v1         {"global_shape", "dtype", "global_offsets", "local_offsets", "local_sizes"}, of one rank's
                              local tensor

formats/placements.py says what placements cut. Version 1.0 has one flat dict {[item, *path] as JSON: ...} and
rank_to_layout_info_mappings.

Sources: torch_checkpointing/{distributed_metadata,dtensor_metadata,default_metadata,checkpoint_layout}.py of 0.1.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

from ckpttool import bounded_json
from ckpttool.errors import Corrupt, Unsupported
from ckpttool.formats import pickles
from ckpttool.formats.placements import PlacementCut, ShardPiece, compute_local_pieces
from ckpttool.storage.source import Source

from .filenames import METADATA

__all__ = ["FORMATS", "Item", "Placed", "read_metadata"]

#: {type of serialization: how its file is read}
FORMATS = {
    "TorchSerialization": "pt",
    "SafetensorsSerialization": "safetensors",
    "JsonSerialization": "json",
    "RawSerialization": "raw",
}
_MOST_BYTES = 1 << 30
_MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Placed:
    """What one group of ranks has of a tensor."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    data: dict[str, Any]
    is_dtensor: bool

    def pieces(self, rank: int) -> tuple[list[ShardPiece], tuple[int, ...] | None]:
        """Return (the boxes of the tensor that a rank has, the shape of its local tensor or None if the metadata has
        none).

        Raises:
            Unsupported: a checkpoint cannot hold such a placement.
            ValueError, KeyError, TypeError, IndexError: the metadata has another form.
        """
        if not self.is_dtensor:
            rows = zip(self.data["global_offsets"], self.data["local_offsets"], self.data["local_sizes"], strict=True)
            return [ShardPiece(_parse_integers(a), _parse_integers(b), _parse_integers(n)) for a, b, n in rows], None
        mesh = self.data["mesh_spec"]
        sizes, ranks = _parse_integers(mesh["mesh_shape"]), _parse_integers(mesh["mesh_data"])
        if prod(sizes) != len(ranks):
            raise ValueError(f"a mesh of {sizes} with {len(ranks)} ranks")
        place = _index_mesh_ranks(ranks)[rank]
        at: list[int] = []
        for n in reversed(sizes):
            place, k = divmod(place, n)
            at.insert(0, k)
        cuts = []
        for placement, n, k in zip(self.data["placements"], sizes, at, strict=True):
            kind = placement["type"]
            if kind == "Replicate":
                continue
            if kind not in ("Shard", "StridedShard"):
                raise Unsupported(f"a placement of type {pickles.short(kind)}", code="CKPT0319")
            cuts.append(
                PlacementCut(placement["dim"], n, k, placement["split_factor"] if kind == "StridedShard" else 1)
            )
        return compute_local_pieces(self.shape, cuts)


@lru_cache(64)
def _index_mesh_ranks(ranks: tuple[int, ...]) -> dict[int, int]:
    """Return {rank: its position in the flattened mesh}; cached, since tensors share their meshes."""
    return {rank: k for k, rank in enumerate(ranks)}


def _parse_integers(x: object) -> tuple[int, ...]:
    """Return a list of sizes or ranks as a tuple.

    Raises:
        ValueError: it is no list of integers from 0 on.
    """
    if isinstance(x, (list, tuple)) and len(x) <= _MOST_RANKS and all(type(n) is int and n >= 0 for n in x):
        return tuple(x)
    raise ValueError(f"{pickles.short(x)} are not sizes")


@dataclass
class Item:
    """An item: {path, each part as text: what the ranks have}; {rank: (file, "pt" or "safetensors" or "json" or
    "raw")}."""

    tensors: dict[tuple[str, ...], list[Placed]] = field(default_factory=dict)
    files: dict[int, tuple[str, str]] = field(default_factory=dict)


def read_metadata(source: Source) -> tuple[int, dict[str, Item]]:
    """Return (world size, {name: item}) from a folder's metadata.pkl.

    Raises:
        Corrupt: the file is empty, or is not metadata of torch_checkpointing.
        Unsafe: it would run code.
        Unsupported: it has a type of metadata or of file that torch_checkpointing 0.1.1 does not have.
    """
    what = f"{source.root}/{METADATA}"
    data = source.read_all(METADATA, _MOST_BYTES)
    if not data:
        raise Corrupt(f"{what} is empty: the save was interrupted. Take an earlier step.", code="CKPT0404")
    try:
        found = pickles.load(data, what=what)[0]
        return _parse_metadata(found, what)
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise Corrupt(
            f"{what}: not the metadata of torch_checkpointing ({type(e).__name__}: {e}).", code="CKPT0406"
        ) from None


def _parse_metadata(found: Any, what: str) -> tuple[int, dict[str, Item]]:
    """Return (world size, {name: item}) of the unpickled metadata.pkl; `what` is the path of the file, for errors.

    Raises:
        Unsupported: it has another version, or another type of metadata or of file.
        KeyError, TypeError, ValueError, AttributeError: it has another form.
    """
    world, version = found["world_size"], found.get("version", "1.0")
    if type(world) is not int or not 0 < world <= _MOST_RANKS:
        raise ValueError(f"world_size {pickles.short(world)}")
    if version not in ("1.0", "2.0"):
        raise Unsupported(
            f"{what} has version {pickles.short(version)}; ckpttool reads 1.0 and 2.0. Use a newer ckpttool.",
            code="CKPT0329",
        )
    items: dict[str, Item] = {}
    if version == "1.0":
        for rank, layouts in found["rank_to_layout_info_mappings"].items():
            for name, layout in layouts.items():
                items.setdefault(name, Item()).files[int(rank)] = _parse_file_layout(name, int(rank), layout, what)
        for text, groups in found["metadata"].items():
            name, *path = bounded_json.parse(text.encode(), what)
            items[name].tensors[tuple(map(str, path))] = [_parse_sharding_entry(g, what) for g in groups]
        return world, items
    for name, data in found["metadata"].items():
        item = items[name] = Item()
        for rank, layout in data["rank_to_layout_info"].items():
            item.files[int(rank)] = _parse_file_layout(name, int(rank), layout, what)
        for text, groups in data["nested_path_to_metadata"].items():
            item.tensors[tuple(map(str, bounded_json.parse(text.encode(), what)))] = [
                _parse_sharding_entry(g, what) for g in groups
            ]
        if missing := sorted(set(range(world)) - set(item.files)):
            raise ValueError(f'"{name}" has no file for rank {missing[0]}')
    return world, items


def _parse_file_layout(name: str, rank: int, layout: Any, what: str) -> tuple[str, str]:
    """Return (path of a rank's file of an item, its kind: "pt", "safetensors", "json" or "raw").

    Args:
        name: the name of the item.
        rank: the rank.
        layout: the description of the file in metadata.pkl; None: it has the usual name.
        what: the path of metadata.pkl, for errors.

    Raises:
        Unsupported: the file is of another kind.
    """
    if layout is None:
        return f"{name}_{rank}.pt", "pt"
    kind = FORMATS.get(layout["serialization_format"]["type"])
    if kind is None or not isinstance(layout["file_path"], str):
        raise Unsupported(
            f'{what}: "{name}" is stored as {pickles.short(layout["serialization_format"])}, which ckpttool does not '
            "know.",
            code="CKPT0329",
        )
    return layout["file_path"], kind


def _parse_sharding_entry(group: Any, what: str) -> Placed:
    """Return what a group of ranks has of a tensor, from an entry of metadata.pkl; `what` is the path of that, for
    errors.

    Raises:
        Unsupported: the entry is of a class of the job's own.
        KeyError, TypeError, ValueError: it has another form.
    """
    meta = group["sharding_metadata"]
    kind, data = meta["type"], meta["data"]
    if kind not in ("DTensorShardingMetadata", "default_tensor_v1"):
        raise Unsupported(
            f"{what}: a tensor is described by {pickles.short(kind)}, a class of the job that saved it; ckpttool reads "
            "DTensorShardingMetadata and default_tensor_v1. Save with torch_checkpointing's own resharder.",
            code="CKPT0329",
        )
    return Placed(
        _parse_integers(group["ranks"]),
        _parse_integers(data["global_shape"]),
        str(data["dtype"]).removeprefix("torch."),
        data,
        kind == "DTensorShardingMetadata",
    )
