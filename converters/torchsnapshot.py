"""torchsnapshot: what `Snapshot.take(path, app_state)` writes.

    DIR/.snapshot_metadata              {"version", "world_size", "manifest": {"<rank>/<key>/<key>...": entry}}; written
                                        last
    DIR/batched/<uuid>                  many small tensors
    DIR/<rank>/..., replicated/..., sharded/...      one tensor or object a file

An entry has a `type`:

    dict, OrderedDict      keys, text or integers; "/" and "%" of a key are %2F and %25 in paths
    list                   its items are at <path>/0, <path>/1, ...
    int, str, bool         serialized_value, text; float: base64 of a double; bytes: base64
    Tensor                 dtype "torch.float32", shape, location, serializer, byte_range [first, end) or null,
                           replicated
    ShardedTensor, DTensor shards [{offsets, sizes, tensor}] of this rank; the tensor is those of all ranks,
                           and nothing else tells its shape
    ChunkedTensor          dtype, shape, chunks [{offsets, sizes, tensor}], replicated
    object                 location of a torch.save file

`serializer` is buffer_protocol (the elements, row-major) or torch_save; those of quantized tensors are refused.

An entry that is not sharded is of the rank it is listed under, unless `replicated`. Where ranks have the same value it
is kept once. Where they differ, RNG states are rng.<rank>, other values of ranks besides the first
extra.per_rank.<rank>.<key>. Tensors of the model or the optimizer that several ranks have, not replicated, may be
copies or parts: they are refused, unless --allow-equal-ranks says that they are copies.

Sources: torchsnapshot 0.1.0, manifest.py, flatten.py, serialization.py; a snapshot in fixtures/, which it wrote.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any
from urllib.parse import unquote

from ckpttool import bounded_json
from ckpttool.errors import Corrupt, Unsupported, argument
from ckpttool.formats import stored_tensors, torch_zip
from ckpttool.formats.pickles import short
from ckpttool.formats.stored_tensors import StoredTensor
from ckpttool.index.checkpoint import (
    ITEMSIZE,
    Checkpoint,
    Chunks,
    Leaves,
    Number,
    Path,
    TensorEntry,
    joined,
    make_per_rank_path,
    same_value,
)
from ckpttool.index.names import ROLES, with_canonical_keys
from ckpttool.index.records import Records
from ckpttool.layouts import Layout, Place, ReadOptions, checkpoint_of, name_leaves
from ckpttool.program import Program
from ckpttool.storage.source import Source

from .rank_files import describe_lacking_entries

__all__ = ["LAYOUTS"]

_METADATA = ".snapshot_metadata"
_MOST_METADATA = 256 << 20
_MOST_COMPARED = 64  # bytes of a tensor that ranks have each: a step, not a weight
_CONTAINERS = ("dict", "OrderedDict", "list")
_SHARDED = ("ShardedTensor", "DTensor")
_MOST_RANKS = 1 << 20

_Key = tuple[str, ...]  # a path in the manifest without its rank, unescaped
_Entry = dict[str, Any]


def detect(where: Place) -> tuple[bool, str]:
    """Return whether a place is a folder with .snapshot_metadata, and the reason as text."""
    if where.file is not None:
        return False, "a folder; this is a file"
    yes = _METADATA in where.source.list()
    return yes, f"has {_METADATA}" if yes else f"no {_METADATA}"


def read(where: Place, options: ReadOptions) -> Checkpoint:
    """Return the index of a snapshot.

    Raises:
        Corrupt: the manifest is damaged, or files are cut off. Unsafe: a pickle would run code.
        Unsupported: the manifest is YAML, or ranks have different tensors under one name, or a tensor is quantized.
    """
    source = where.source
    world, entries = _read_manifest(source)
    reading = _Reading(source, world, entries, options)
    named = with_canonical_keys(name_leaves(reading.leaves(), options))
    out = checkpoint_of(named, "torchsnapshot", source.root, world, reading.files, source)
    out.records = reading.records
    out.notes += reading.notes
    return out


def _read_manifest(source: Source) -> tuple[int, dict[_Key, dict[int, _Entry]]]:
    """Return (world size, {path as a tuple of keys, without the rank: {rank: entry}}) from .snapshot_metadata.

    An entry is a dict as the JSON of the manifest has it, with its "type".

    Raises:
        Corrupt: it is not what torchsnapshot writes. Unsupported: YAML.
    """
    what = f"{source.root}/{_METADATA}"
    data = source.read_all(_METADATA, _MOST_METADATA)
    if not data.lstrip().startswith(b"{"):
        raise Unsupported(
            f"{what} is not JSON. Older releases of torchsnapshot wrote YAML there, which ckpttool does not read: "
            "restore the snapshot with torchsnapshot and take it again with release 0.1.0.",
            code="CKPT0329",
        )
    found = bounded_json.parse(data, what)
    world, manifest = found.get("world_size"), found.get("manifest")
    if type(world) is not int or not 0 < world <= _MOST_RANKS or not isinstance(manifest, dict):
        raise Corrupt(
            f"{what} has no world_size and manifest, which torchsnapshot writes. Fetch the file again.", code="CKPT0406"
        )
    entries: dict[_Key, dict[int, _Entry]] = {}
    for path, entry in manifest.items():
        rank, *tokens = path.split("/")
        if not (rank.isascii() and rank.isdecimal()) or int(rank) >= world or not tokens:
            raise Corrupt(
                f"{what}: the path {path!a:.200} does not begin with one of {world} ranks and a key.", code="CKPT0406"
            )
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            raise Corrupt(f"{what}: the entry of {path!a:.200} has no type.", code="CKPT0406")
        entries.setdefault(tuple(unquote(t) for t in tokens), {})[int(rank)] = entry
    return world, entries


class _Reading:
    """The leaves that are collected while the manifest is read."""

    def __init__(
        self, source: Source, world: int, entries: Mapping[_Key, Mapping[int, _Entry]], options: ReadOptions
    ) -> None:
        """Find the dicts and lists among the entries.

        Args:
            source: the snapshot.
            world: its number of ranks.
            entries: {keys of a path: {rank: entry}} of the manifest.
            options: those of the read.
        """
        self.source, self.world, self.entries, self.options = source, world, entries, options
        self.what = f"{source.root}/{_METADATA}"
        self.files: list[str] = []
        self.numbers: dict[str, int] = {}
        self.records = Records()
        self.notes: list[str] = []
        self.containers = {
            key: next(e for e in rows.values() if e["type"] in _CONTAINERS)
            for key, rows in entries.items()
            if any(e["type"] in _CONTAINERS for e in rows.values())
        }
        self.texts = {key: frozenset(_list_text_keys(entry)) for key, entry in self.containers.items()}

    def leaves(self) -> Leaves:
        """Return {path in the tree: TensorEntry or data}; a list of plain values is one leaf.

        Raises:
            Corrupt: manifest and files contradict. Unsupported: ranks have tensors of their own under one name, and
                `allow_equal_ranks` is not set.
        """
        out: dict[Path, object] = {}
        differing: list[str] = []
        copies: list[str] = []
        lacking: list[str] = []
        whole = {
            e["location"]
            for rows in self.entries.values()
            for e in rows.values()
            if e["type"] == "object" and isinstance(e.get("location"), str)
        }
        self.source.prefetch_ends(sorted(whole))
        owners: dict[str, set[int]] = {}  # {key of the state: the ranks that have it}
        for key, rows in self.entries.items():
            owners.setdefault(key[0], set()).update(rows)
        for key, rows in self.entries.items():
            if key in self.containers:
                continue
            path = self._to_tree_path(key)
            role = ROLES.get(key[0])
            if any(e["type"] in _SHARDED for e in rows.values()):
                out[path] = self._read_sharded(path, rows)
                continue
            if any(e.get("replicated") is True and "serialized_value" not in e for e in rows.values()):
                rows = dict(list(rows.items())[:1])
            elif role == "rng" and self.world > 1:
                for rank, entry in rows.items():
                    out.update(self._read_leaf((path[0], str(rank), *path[1:]), entry))
                continue
            first, *others = sorted(rows)
            ours: Leaves = {}
            if role in ("model", "optim") or first == min(owners[key[0]]) or "serialized_value" not in rows[first]:
                ours = self._read_leaf(path, rows[first])
                out.update(ours)
                replicated = rows[first].get("replicated") is True  # then the first rank alone lists it
                if role not in ("model", "optim") and not replicated and rows.keys() < owners[key[0]]:
                    lacking.append(joined(path))
            else:  # a value that the first rank does not have
                others = [first, *others]
            for rank in others:
                theirs = self._read_leaf(path, rows[rank])
                if ours and self._has_equal_leaves(ours, theirs):
                    continue
                if role in ("model", "optim"):
                    copies.append(joined(path))
                    continue
                differing.append(joined(path))
                out.update(
                    {make_per_rank_path(rank, p): _with_path(make_per_rank_path(rank, p), x) for p, x in theirs.items()}
                )
        if copies and not self.options.allow_equal_ranks:
            raise Unsupported(
                f"{self.what}: several ranks have their own {copies[0]}, neither sharded nor replicated (and "
                f'{len(set(copies)) - 1} more). They may be copies, as of DDP without replicated=["**"], or parts, as '
                f"of tensor parallelism. If they are copies, use {argument('allow_equal_ranks', True)}: those of the "
                "first rank are taken.",
                code="CKPT0325",
            )
        if copies:
            self.notes.append(
                f"ranks have their own {copies[0]} and {len(set(copies)) - 1} more: those of the first rank are taken"
            )
        if differing:
            self.notes.append(
                f"ranks differ in {', '.join(sorted(set(differing))[:8])}: the first rank's is kept under its name, "
                "the others' as extra.per_rank.<rank>"
            )
        if lacking:
            self.notes.append(describe_lacking_entries(lacking))
        self._fold_containers(out)
        return out

    def _to_tree_path(self, key: _Key) -> Path:
        """Return the path in the state dict that the keys of an entry stand for.

        Positions in lists become integers, and integer keys of dicts become `Number`s; all other keys stay text.

        Args:
            key: the keys of the entry in the manifest, without the rank.

        Raises:
            Corrupt: an item of a list has no position.
        """
        out: list[str | int] = []
        for i, token in enumerate(key):
            container = self.containers.get(key[:i])
            if container is None:
                out.append(token)
            elif container["type"] == "list":
                if not (token.isascii() and token.isdecimal()):
                    raise Corrupt(f"{self.what}: a list has an item at {token!a:.80}.", code="CKPT0406")
                out.append(int(token))
            else:
                is_number = token not in self.texts[key[:i]] and token.lstrip("-").isdecimal()
                out.append(Number(token) if is_number else token)
        return tuple(out)

    def _fold_containers(self, out: dict[Path, object]) -> None:
        """Put empty containers, and lists of plain values, into the leaves `out` as one value each.

        Raises:
            Corrupt: items of a list are missing.
        """
        containers = {self._to_tree_path(key): entry for key, entry in self.containers.items()}
        below: dict[Path, list[Path]] = {}
        apart: set[Path] = set()  # containers that stay taken apart, since a tensor or a dict is in them
        for path, leaf in out.items():
            below.setdefault(path[:-1], []).append(path)
            if isinstance(leaf, TensorEntry) or path[:-1] not in containers:
                apart |= {path[:n] for n in range(len(path))}
        for path in sorted(containers, key=len, reverse=True):
            inside = below.get(path, [])
            if containers[path]["type"] == "list" and path not in apart:
                if sorted(int(p[-1]) for p in inside) != list(range(len(inside))):
                    raise Corrupt(f"{self.what}: items of the list {joined(path)} are missing.", code="CKPT0408")
                out[path] = [out.pop(p) for p in sorted(inside, key=lambda p: int(p[-1]))]
            elif not containers[path].get("keys") and not inside and path not in apart:
                out[path] = {}
            else:
                apart.add(path[:-1])
                continue
            below.setdefault(path[:-1], []).append(path)

    # ---------------------------------------------------------------------------------------------------- entries

    def _read_leaf(self, path: Path, entry: _Entry) -> dict[Path, object]:
        """Return {path: leaf} of an entry that is not sharded.

        It has several leaves only if it is a pickled object with tensors in it.

        Args:
            path: the path of the entry in the tree.
            entry: the entry, as the manifest has it.

        Raises:
            Corrupt: the entry or its file is damaged. Unsafe: a pickle would run code. Unsupported: a type that is not
                known.
        """
        kind = entry["type"]
        what = f"{self.what}: {joined(path)}"
        if kind == "Tensor":
            dtype, shape = self._parse_dtype(entry, what), _parse_numbers(entry.get("shape"), what)
            chunks = Chunks(len(shape))
            chunks.add((0,) * len(shape), shape, *self._find_elements(entry, dtype, shape, what))
            return {path: TensorEntry(dtype, shape, path, chunks)}
        if kind == "ChunkedTensor":
            return {path: self._make_tensor(path, entry.get("chunks"), _parse_numbers(entry.get("shape"), what), what)}
        if kind == "object":
            name, file, first, end = self._find_byte_range(entry, what)
            read_at = self.source.reader_of(name)
            tree = torch_zip.read(read_at, first, end - first, f"{self.source.root}/{name}")
            found, records = stored_tensors.read_leaves(tree, path, file, read_at, f"{self.source.root}/{name}")
            self.records += records
            return found
        return {path: _parse_primitive(kind, entry.get("serialized_value"), what)}

    def _read_sharded(self, path: Path, rows: Mapping[int, _Entry]) -> TensorEntry:
        """Return a tensor that is assembled from the shards of all ranks. Its shape is that of the smallest box around
        them.

        Args:
            path: its path in the tree.
            rows: {rank: entry}.

        Raises:
            Corrupt: a rank has no shards, or they do not fit.
        """
        what = f"{self.what}: {joined(path)}"
        shards: dict[tuple[tuple[int, ...], tuple[int, ...]], Any] = {}
        shape: tuple[int, ...] = ()
        for rank, entry in sorted(rows.items()):
            if entry["type"] not in _SHARDED or not isinstance(entry.get("shards"), list):
                raise Corrupt(f"{what}: rank {rank} has no shards of it, and another rank has.", code="CKPT0408")
            for shard in entry["shards"]:
                offsets, sizes = _parse_box(shard, what)
                shape = shape or (0,) * len(sizes)
                if len(shape) != len(sizes):
                    raise Corrupt(f"{what}: shards have {len(shape)} and {len(sizes)} dimensions.", code="CKPT0406")
                shape = tuple(max(n, o + s) for n, o, s in zip(shape, offsets, sizes, strict=True))
                shards.setdefault((offsets, sizes), shard)  # HSDP: ranks that hold the same shard
        if prod(shape):
            shards = {box: shard for box, shard in shards.items() if prod(box[1])}  # ranks that got nothing
        if not shards:
            raise Corrupt(f"{what}: no rank has a shard of it.", code="CKPT0408")
        return self._make_tensor(path, list(shards.values()), shape, what)

    def _make_tensor(self, path: Path, boxes: object, shape: tuple[int, ...], what: str) -> TensorEntry:
        """Return the entry of a tensor whose chunks are the given boxes.

        Args:
            path: its path in the tree.
            boxes: entries of the manifest, each with offsets, sizes and a tensor.
            shape: shape of the complete tensor.
            what: its name in messages.

        Raises:
            Corrupt: there is no box, or one has another dtype or shape than it should.
        """
        chunks = Chunks(len(shape))
        dtype = ""
        for box in boxes if isinstance(boxes, list) else ():
            offsets, sizes = _parse_box(box, what)
            inner = box["tensor"]
            dtype = dtype or self._parse_dtype(inner, what)
            if (
                self._parse_dtype(inner, what) != dtype
                or _parse_numbers(inner.get("shape"), what) != sizes
                or len(sizes) != len(shape)
            ):
                raise Corrupt(
                    f"{what}: a shard is {inner.get('dtype')} {inner.get('shape')}, its box is {dtype} {list(sizes)}.",
                    code="CKPT0412",
                )
            chunks.add(offsets, sizes, *self._find_elements(inner, dtype, sizes, what))
        if not dtype:
            raise Corrupt(f"{what}: it has no chunks.", code="CKPT0406")
        return TensorEntry(dtype, shape, path, chunks)

    def _find_elements(self, entry: _Entry, dtype: str, shape: tuple[int, ...], what: str) -> tuple[int, int, int]:
        """Return (number of the file, offset, bytes) of the elements of a tensor.

        Args:
            entry: the tensor in the manifest.
            dtype: by the manifest.
            shape: by the manifest.
            what: its name in messages.

        Raises:
            Corrupt: the file holds another tensor. Unsupported: it is quantized.
        """
        name, file, first, end = self._find_byte_range(entry, what)
        if entry.get("serializer") == "buffer_protocol":
            return file, first, end - first
        if entry.get("serializer") != "torch_save":
            raise Unsupported(
                f"{what}: a tensor in the form {short(entry.get('serializer'))} (quantized), which ckpttool does not "
                "read.",
                code="CKPT0318",
            )
        t = torch_zip.read(self.source.reader_of(name), first, end - first, f"{self.source.root}/{name}")
        if not isinstance(t, StoredTensor) or (t.dtype, t.shape) != (dtype, shape) or not t.contiguous:
            raise Corrupt(f"{what}: {name} holds {short(t)}, the manifest says {dtype} {list(shape)}.", code="CKPT0412")
        return (file, *t.extent)

    def _find_byte_range(self, entry: _Entry, what: str) -> tuple[str, int, int, int]:
        """Return (name of the file of an entry, its number, first byte, end). An entry without a range is the complete
        file. `what` is the name of the entry in messages.

        Raises:
            Corrupt: the range is damaged, or exceeds the file.
        """
        name, found = entry.get("location"), entry.get("byte_range")
        if not isinstance(found, list | None):
            raise Corrupt(f"{what}: {short(found)} is not a range of bytes.", code="CKPT0406")
        if not isinstance(name, str) or not name:
            raise Corrupt(f"{what}: its entry names no file.", code="CKPT0406")
        if name not in self.numbers:
            self.numbers[name] = len(self.files)
            self.files.append(name)
        size = self.source.size(name)
        first, end = _parse_numbers(found, what) if isinstance(found, list) and len(found) == 2 else (0, size)
        if (found is not None and (first, end) != tuple(found)) or not first <= end <= size:
            raise Corrupt(
                f"{what}: bytes {short(found)} of {name}, which has {size}. The file was not copied whole; fetch it "
                "again.",
                code="CKPT0403",
            )
        return name, self.numbers[name], first, end

    def _parse_dtype(self, entry: _Entry, what: str) -> str:
        """Return the dtype of an entry, which `what` names in messages.

        Raises:
            Unsupported: it is none that ckpttool reads.
        """
        name = str(entry.get("dtype")).removeprefix("torch.")
        if name not in ITEMSIZE:
            raise Unsupported(
                f"{what}: dtype {short(entry.get('dtype'))}, which ckpttool does not read.", code="CKPT0332"
            )
        return name

    def _has_equal_leaves(self, a: Mapping[Path, object], b: Mapping[Path, object]) -> bool:
        """Return whether two ranks have equal leaves, {path: leaf}: equal values, and equal bytes of small tensors.
        Tensors of more than 64 bytes count as different."""
        if a.keys() != b.keys():
            return False
        for path, x in a.items():
            y = b[path]
            if isinstance(x, TensorEntry) and isinstance(y, TensorEntry):
                if (
                    (x.dtype, x.shape) != (y.dtype, y.shape)
                    or x.nbytes > _MOST_COMPARED
                    or self._read_bytes(x) != self._read_bytes(y)
                ):
                    return False
            elif type(x) is not type(y) or not same_value(x, y):
                return False
        return True

    def _read_bytes(self, t: TensorEntry) -> bytes:
        """Read the bytes of a small tensor."""
        return b"".join(
            self.source.read(self.files[f], offset, length)
            for f, offset, length in zip(t.chunks.file, t.chunks.offset, t.chunks.length, strict=True)
        )


def _list_text_keys(container: _Entry) -> list[object]:
    """Return the keys of a dict in the manifest that are text; its others are integers."""
    keys = container.get("keys")
    return [k for k in keys if isinstance(k, str)] if isinstance(keys, list) else []


def _with_path(path: Path, leaf: object) -> object:
    """Return a leaf that knows its path, if it is a tensor; a value as it is."""
    return replace(leaf, path=path) if isinstance(leaf, TensorEntry) else leaf


def _parse_numbers(found: object, what: str) -> tuple[int, ...]:
    """Return a shape, offsets or sizes from a list in the manifest; `what` names its entry in messages.

    Raises:
        Corrupt: it is no list of integers from 0 on.
    """
    if not isinstance(found, list) or len(found) > 64 or not all(type(n) is int and n >= 0 for n in found):
        raise Corrupt(f"{what}: {short(found)} is not a list of sizes.", code="CKPT0406")
    return tuple(found)


def _parse_box(shard: object, what: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (offsets, sizes) of a shard or a chunk; `what` names its entry in messages.

    Raises:
        Corrupt: it has none, or no tensor.
    """
    if not isinstance(shard, dict) or not isinstance(shard.get("tensor"), dict):
        raise Corrupt(f"{what}: a shard without a tensor.", code="CKPT0406")
    offsets, sizes = _parse_numbers(shard.get("offsets"), what), _parse_numbers(shard.get("sizes"), what)
    if len(offsets) != len(sizes):
        raise Corrupt(f"{what}: a shard with {len(offsets)} offsets and {len(sizes)} sizes.", code="CKPT0406")
    return offsets, sizes


def _parse_primitive(kind: str, text: object, what: str) -> object:
    """Return a value that lies in the manifest as text.

    Args:
        kind: "int", "str", "bool", "float" or "bytes".
        text: the value; floats and bytes are in base64.
        what: its name in messages.

    Raises:
        Corrupt: the text is no such value. Unsupported: another kind.
    """
    try:
        if not isinstance(text, str):
            raise ValueError("no serialized_value")
        if kind == "int":
            return int(text)
        if kind == "str":
            return text
        if kind == "bool" and text in ("True", "False"):
            return text == "True"
        if kind in ("float", "bytes"):
            raw = base64.b64decode(text, validate=True)
            return raw if kind == "bytes" else struct.unpack("<d", raw)[0]
    except (ValueError, binascii.Error, struct.error) as e:
        raise Corrupt(f"{what}: {short(text)} is not a value of type {kind} ({e}).", code="CKPT0406") from None
    raise Unsupported(f"{what}: an entry of type {kind!a:.80}, which ckpttool does not know.", code="CKPT0329")


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS = {
    "readme-trainers": (
        (
            "[torchsnapshot](docs/how-to/trainers/torchsnapshot.md) (**torchsnapshot**)",
            "every rank",
            "yes",
            "under your key",
            "under your key",
            "under your key",
        ),
    ),
    "layouts": (
        (
            "**torchsnapshot**",
            (
                "what `Snapshot.take` writes: sharded, chunked and replicated tensors, objects, values of every "
                "rank; a manifest in YAML is refused"
            ),
            "not written",
        ),
    ),
    "directories": (
        (
            "what torchsnapshot's `Snapshot.take` writes",
            "`torchsnapshot`",
            ("everything in the manifest: sharded, chunked and replicated tensors, values, objects, RNG of every rank"),
        ),
    ),
}
LAYOUTS = (
    Layout(
        name="torchsnapshot",
        title="snapshot of torchsnapshot",
        detect=detect,
        read=read,
        reader_uses=("config", "like"),
        writer_uses=(),
        program=Program(rows=_ROWS, is_part=lambda name, beside: name == "sharded"),
    ),
)
