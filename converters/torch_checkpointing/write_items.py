"""Writes folders of torch_checkpointing: a file an item and rank, and metadata.pkl last; torch_checkpointing.py
describes both."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from ckpttool.engine.copy.stream import read_small_tensors
from ckpttool.errors import Unsupported
from ckpttool.formats.pickle_writer import dump
from ckpttool.formats.stored_tensors import Inline
from ckpttool.formats.torch_pickles import TensorRef
from ckpttool.formats.torch_zip_writer import TorchFiles
from ckpttool.index import boxes
from ckpttool.index.checkpoint import (
    ITEMSIZE,
    Checkpoint,
    Chunks,
    Leaves,
    Number,
    Path,
    TensorEntry,
    joined,
    same_bytes,
    tied_weights,
)
from ckpttool.index.draft import Draft, turn_positions_into_keys
from ckpttool.index.names import ROLES
from ckpttool.index.paths import keep_extra_state_trees, list_own_keys
from ckpttool.index.trees import nest
from ckpttool.layouts import WriteOptions, tree_of
from ckpttool.storage.source import Source

from .filenames import METADATA

__all__ = ["write"]

_ITEM = re.compile(r"[A-Za-z0-9_-]+")
#: {component: what the package's own examples call the item}
_ITEMS = {"optim": "optimizer", "scheduler": "lr_scheduler", "trainer": "train_state"}
#: A name of the mesh that no job has, so that the manager does not take the files of a rank as they are.
_MESH = ("ckpttool",)


def write(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """Draft a folder that CheckpointManager.load takes with its DefaultResharder, at any world size.

    Raises:
        UsageError: no world size was given and the source has none.
        Unsupported: the state has no entries.
    """
    world = options.ranks(ckpt)
    if not ckpt.tensors and not ckpt.values:
        raise Unsupported(
            "the state has no entries, and a folder without items is not read as a checkpoint. Write dcp or audit, "
            "which keep such a state.",
            code="CKPT0317",
        )
    tree, notes = tree_of(ckpt.leaves(), ckpt.origin, same_bytes, options)
    own_keys = list_own_keys(ckpt.origin)
    if not own_keys or not all(isinstance(p[0], str) and _ITEM.fullmatch(p[0]) for p in tree):
        if own_keys:
            notes = ["the keys are model, optimizer, ...: those of the source cannot be names of files"]
        extra_states = keep_extra_state_trees(ckpt.origin)
        tree = {(_ITEMS.get(str(p[0]), p[0]), *extra_states.get(p, p)[1:]): leaf for p, leaf in ckpt.leaves().items()}
    cast = {n: options.cast(n, t.dtype) for n, t in ckpt.tensors.items()}
    items: dict[str, Leaves] = {}
    for path, leaf in tree.items():
        items.setdefault(str(path[0]), {})[path[1:]] = leaf
    same: dict[str, str] = {}
    for leaves in items.values():  # an item is a file, and files share no storage
        held = {joined(x.path): x for x in leaves.values() if isinstance(x, TensorEntry) and x.path[0] != "optim"}
        same |= {n: o for n, o in tied_weights(held).items() if cast[n] == cast[o]}
    out = _Writing(ckpt, world, cast, same)
    of_ranks: set[str | None] = set()  # components of which each rank has its own
    for name, leaves in items.items():
        if ROLES.get(name) in ("model", "optim") and () not in leaves:
            out.cut_item(name, leaves)
        elif (of_rank := _split_by_rank(name, leaves, ckpt, source)) is not None:
            for rank, own in of_rank.items():
                out.put_item(name, rank, own, first=True)
            of_ranks.add(ROLES.get(name))
            notes.append(f"{name}_<rank>.pt has each rank's own state, of the {len(of_rank)} ranks that saved it")
        else:
            for rank in range(world):
                out.put_item(name, rank, leaves, first=rank == 0)
    described = {
        name: {"nested_path_to_metadata": of, "rank_to_layout_info": dict.fromkeys(range(world))}
        for name, of in out.described.items()
    }
    out.files.literal(METADATA, dump({"metadata": described, "world_size": world, "version": "2.0"}))
    draft = out.files.draft(
        Checkpoint("torch_checkpointing", options.target, world, [], [], out.tensors, dict(ckpt.values)),
        out.sources,
        aliases=same,
        notes=notes,
    )
    turn_positions_into_keys(draft, [v.path for v in ckpt.values.values() if v.path[0] in of_ranks])
    return draft


def _split_by_rank(
    name: str, leaves: Mapping[Path, object], ckpt: Checkpoint, source: Source
) -> dict[int, dict[Path, object]] | None:
    """Return {rank: {path: leaf}} of an item that differs between the ranks that saved it, such as RNG states.

    It is None for an item that all ranks have in common.

    Args:
        name: the name of the item.
        leaves: {path in the item: leaf}; the paths begin with a rank if the item has state of each rank.
        ckpt: the checkpoint to write.
        source: the source from which tensors are read, to compare them.
    """
    if ROLES.get(name) not in ("rng", "dataloader") or not all(len(p) > 1 and str(p[0]).isdecimal() for p in leaves):
        return None
    out: dict[int, dict[Path, object]] = {}
    for path, leaf in leaves.items():
        out.setdefault(int(path[0]), {})[path[1:]] = leaf
    ranks = sorted(out)
    if len(ranks) < 2 or ranks != list(range(len(ranks))):
        return None

    names = [joined(x.path) for x in leaves.values() if isinstance(x, TensorEntry)]
    held = read_small_tensors(ckpt, source, names)

    def shown(part: Mapping[Path, object]) -> dict[Path, object]:
        """Return {path: bytes of a tensor, or the value} of a rank's part."""
        return {p: held[joined(x.path)] if isinstance(x, TensorEntry) else x for p, x in part.items()}

    first = shown(out[0])
    return out if any(shown(out[r]) != first for r in ranks[1:]) else None


@dataclass
class _Writing:
    """A draft while its files are laid out."""

    ckpt: Checkpoint
    world: int
    cast: Mapping[str, str]
    same: Mapping[str, str]
    files: TorchFiles = field(default_factory=TorchFiles)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    sources: dict[str, TensorEntry] = field(default_factory=dict)
    described: dict[str, dict[str, object]] = field(default_factory=dict)

    def cut_item(self, item: str, leaves: Mapping[Path, object]) -> None:
        """Add the files of the model or the optimizer, one for each rank, with some rows of every tensor.

        Tensors that are not cut are in the file of rank 0. `leaves` is {path in the item: leaf}.
        """
        described = self.described[item] = {}
        held = {p: joined(t.path) for p, t in leaves.items() if isinstance(t, TensorEntry)}
        rows = {n: self._plan_rank_rows(self.ckpt.tensors[n]) for n in held.values()}
        for path, name in held.items():
            text = json.dumps([int(k) if isinstance(k, (int, Number)) else k for k in path], separators=(",", ":"))
            described[text] = [self._describe_tensor(self.ckpt.tensors[name], self.cast[name], bool(rows[name]))]
        owners = [n for n in held.values() if n not in self.same]
        numbers: list[int] = []
        keys: list[dict[str, str]] = []  # {name: its storage} in the file of each rank
        for rank in range(self.world):
            tree: dict[Path, object] = {p: x for p, x in leaves.items() if p not in held}
            here = [
                n
                for n in owners
                if self._count_rank_bytes(n, rows[n], rank) or (not rank and not self.ckpt.tensors[n].numel)
            ]
            keys.append({n: str(k) for k, n in enumerate(here)})
            sizes = {keys[rank][n]: self._count_rank_bytes(n, rows[n], rank) for n in here}
            for path, name in held.items():
                t, dtype = self.ckpt.tensors[name], self.cast[name]
                if not rows[name] and rank:
                    continue
                shape = (rows[name][rank], *t.shape[1:]) if rows[name] else t.shape
                key = keys[rank].get(self.same.get(name, name))
                tree[path] = Inline(dtype, shape, b"") if key is None else TensorRef(dtype, shape, key, prod(shape))
            numbers.append(self.files.add(f"{item}_{rank}.pt", nest({p: tree[p] for p in leaves if p in tree}), sizes))
        for name in owners:
            t = self.ckpt.tensors[name]
            chunks = Chunks(len(t.shape))
            at = 0
            for rank in range(self.world):
                n = self._count_rank_bytes(name, rows[name], rank)
                shape = (rows[name][rank], *t.shape[1:]) if rows[name] else t.shape
                if name in keys[rank]:
                    start = (at, *[0] * (len(t.shape) - 1)) if rows[name] else (0,) * len(t.shape)
                    chunks.add(start, shape, numbers[rank], self.files.offset(numbers[rank], keys[rank][name]), n)
                    at += shape[0] if rows[name] else 0
            self._record_tensor(name, name, chunks)
        for name in (n for n in held.values() if n in self.same):
            self._record_tensor(name, name, self.tensors[self.same[name]].chunks)

    def put_item(self, item: str, rank: int, leaves: Mapping[Path, object], first: bool) -> None:
        """Add the file of an item on one rank, with complete tensors.

        Args:
            item: the name of the item.
            rank: the rank.
            leaves: {path in the item: leaf}.
            first: whether the tensors get their own names in the draft; if not, they are copies, replica.<rank>.<name>.
        """
        tree: dict[Path, object] = {}
        keys: dict[str, str] = {}  # {name: its storage}
        sizes: dict[str, int] = {}
        tied: list[str] = []
        for path, x in leaves.items():
            if isinstance(x, TensorEntry):
                name = joined(x.path)
                dtype = self.cast[name]
                if name in self.same:
                    tied.append(name)
                else:
                    sizes[keys.setdefault(name, str(len(sizes)))] = x.numel * ITEMSIZE[dtype]
                tree[path] = TensorRef(dtype, x.shape, keys[self.same.get(name, name)], x.numel)
            else:
                tree[path] = x
        number = self.files.add(f"{item}_{rank}.pt", nest(tree), sizes)
        for name, key in keys.items():
            chunks = Chunks.whole(self.ckpt.tensors[name].shape, number, self.files.offset(number, key), sizes[key])
            self._record_tensor(name if first else f"replica.{rank}.{name}", name, chunks)
        for name in tied if first else ():
            self._record_tensor(name, name, self.tensors[self.same[name]].chunks)

    def _record_tensor(self, name: str, of: str, chunks: Chunks) -> None:
        """Record that the draft's tensor `name` lies at `chunks`, and is copied from the source's tensor `of`."""
        t = self.ckpt.tensors[of]
        self.tensors[name] = replace(t, dtype=self.cast[of], chunks=chunks, coding="raw")
        self.sources[name] = t

    def _plan_rank_rows(self, t: TensorEntry) -> list[int]:
        """Return the number of rows of a tensor that each rank gets; [] if only rank 0 gets it.

        Only rank 0 gets 0-dim tensors, tensors without elements, and 1-D tensors that are neither floating-point nor
        complex.
        """
        if not t.shape or not t.numel or (len(t.shape) == 1 and "float" not in t.dtype and "complex" not in t.dtype):
            return []
        return boxes.chunk_sizes(t.shape[0], self.world)

    def _count_rank_bytes(self, name: str, rows: list[int], rank: int) -> int:
        """Return the number of bytes of the tensor `name` in a rank's file.

        `rows` is the number of rows of each rank, or [] if only rank 0 has the tensor.
        """
        t = self.ckpt.tensors[name]
        n = rows[rank] * prod(t.shape[1:]) if rows else t.numel if rank == 0 else 0
        return n * ITEMSIZE[self.cast[name]]

    def _describe_tensor(self, t: TensorEntry, dtype: str, cut: bool) -> dict[str, object]:
        """Return the entry of a tensor for metadata.pkl.

        Args:
            t: the tensor.
            dtype: the dtype to write.
            cut: whether it is cut among all ranks along dim 0; otherwise it is complete on a mesh of rank 0 alone.
        """
        ranks = tuple(range(self.world)) if cut else (0,)
        mesh = {"device_type": "cpu", "mesh_shape": (len(ranks),), "mesh_data": ranks, "mesh_dim_names": _MESH}
        data = {
            "global_shape": list(t.shape),
            "dtype": f"torch.{dtype}",
            "stride": list(boxes.strides(t.shape)),
            "mesh_spec": mesh,
            "placements": [{"type": "Shard", "dim": 0} if cut else {"type": "Replicate"}],
        }
        return {"sharding_metadata": {"type": "DTensorShardingMetadata", "data": data}, "ranks": ranks}
