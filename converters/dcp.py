"""dcp: torch.distributed.checkpoint folders.

    DIR/.metadata            pickle of one Metadata object, written last: without it the save did not finish
    DIR/__<rank>_<n>.distcp  items back to back, no header, no gap, no alignment
    DIR/__<rank>.metadata    instead of .metadata with use_collectives=False, one a rank

Metadata holds `state_dict_metadata` {flat key: TensorStorageMetadata(properties, size, chunks=[(offsets, sizes)]) or
BytesStorageMetadata}, `planner_data` {flat key: path}, and `storage_data` {MetadataIndex(fqn, offset): _StorageInfo(
relative_path, offset, length[, transform_descriptors])}. Flat keys are paths joined by dots, so paths come from
planner_data. Its order is that of the state dict. Files are named by storage_data only; others in the folder are left
over from other saves. Every item is a whole torch.save zip, or one zstd frame around it ("stream.zstd"); with
SerializationFormat.SAFETENSORS a file is one safetensors file and the offsets in storage_data mean nothing. A rank
without a share of a tensor lists a chunk of size 0.

`read` trusts the index and looks at no item but values; `locate` looks into every item. Written folders have one data
file a rank that holds just what that rank of an FSDP2 job reads: `torch.chunk` of every parameter and optimizer slot
along dim 0; what is replicated lies in rank 0's file. `.metadata` holds no path of this machine and is the same bytes
for the same state.

Sources: torch/distributed/checkpoint/{metadata,filesystem,default_planner,_traverse,_extension}.py of torch 2.13, and
the folders in fixtures/, which torch wrote.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, chain
from math import prod
from typing import Any

from ckpttool.engine.zstd_frames import decompress_ends
from ckpttool.errors import Corrupt, Unsafe, Unsupported, UsageError
from ckpttool.formats import pickles, safetensors_header, stored_tensors, torch_pickles, torch_zip, zip_bytes
from ckpttool.formats.sandbox import in_child
from ckpttool.index import boxes
from ckpttool.index.checkpoint import (
    ITEMSIZE,
    Checkpoint,
    Chunk,
    Chunks,
    Extent,
    Path,
    Record,
    TensorEntry,
    joined,
    shape_of,
)
from ckpttool.index.draft import Draft, DraftFile, Written
from ckpttool.index.names import canonical, own_tree
from ckpttool.layouts import Layout, Place, ReadOptions, WriteOptions, checkpoint_of
from ckpttool.storage.source import Source

__all__ = ["LAYOUTS"]

_META = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"
#: Above this many bytes .metadata is read with the C unpickler in a limited child (pickles.load_large).
_LARGE_BYTES = 2 << 20
_VALUE_BYTES, _VALUE_HEAD = 256 << 20, 1 << 20
_HEAD, _TAIL = 4096, 2048  # of an item: its zip's first records, and its directory


def detect(where: Place) -> tuple[bool, str]:
    """A folder with .metadata."""
    if where.file is not None:
        return False, "a folder with .metadata and *.distcp files; this is a file"
    names = where.source.list()
    if ".metadata" in names or (
        where.source.is_remote and where.source.exists(".metadata")
    ):  # a web server may not list it
        return True, "has .metadata"
    if any(re.fullmatch(r"__\d+\.metadata", n) for n in names):
        return True, "has one .metadata file a rank"
    if ".metadata.tmp" in names or any(n.endswith(".distcp") for n in names):
        return False, "*.distcp files without .metadata: the save was interrupted before its end; take an earlier step"
    return False, "no .metadata, no *.distcp"


# ------------------------------------------------------------------------------------------------------ .metadata


class _Inert:
    """An instance of a class of torch that holds nothing we need but its state."""

    hashed_by_identity = True
    __slots__ = ("state",)

    def __init__(self, *args: Any) -> None:
        self.state: Any = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Metadata(_Inert):
    __slots__ = ()


class _Properties(_Inert):
    __slots__ = ()


class _MemoryFormat(_Inert):
    __slots__ = ()


class _Bytes(_Inert):
    __slots__ = ()


class _Stored:
    """Where the items of one flat key are, in columns."""

    __slots__ = ("file", "length", "offset", "starts", "transforms")

    def __init__(self) -> None:
        self.starts: list[Any] = []  # torch.Size, or None for a value
        self.file, self.offset, self.length = array("q"), array("q"), array("q")
        self.transforms: dict[int, Any] = {}


class _Collector:
    """Stand-ins for the classes in one .metadata, which collect into columns what its million objects say.

    A class that occurs once a chunk has one instance for all of them, whose __setstate__ appends a row: the unpickler
    builds a tensor's chunks right before the tensor, and an item's place right before the item. `_columns` counts that
    it was so.
    """

    def __init__(self) -> None:
        self.starts: list[Any] = []
        self.sizes: list[Any] = []
        self.tensors = 0  # rows of starts that belong to a tensor already
        self.stored: dict[str, _Stored] = {}
        self.files: dict[str, int] = {}
        self.places = self.items = 0
        self.built: list[int] = [0, 0]  # tensors and values
        collect, stored, files = self, self.stored, self.files
        add_start, add_size = self.starts.append, self.sizes.append

        class Tensor(_Inert):
            __slots__ = ()

            def __setstate__(self, state: Any) -> None:
                n = len(state["chunks"])
                first = len(collect.starts) - n
                if first < collect.tensors:
                    raise Corrupt("two tensors of .metadata share a chunk; torch does not write that")
                self.state = (state["properties"], state["size"], first, n)
                collect.tensors = first + n
                collect.built[0] += 1

        class Bytes(_Bytes):
            __slots__ = ()

            def __new__(cls, *args: Any) -> Bytes:
                collect.built[1] += 1
                return object.__new__(cls)

        class Single:
            hashed_by_identity = stands_for_many = True
            __slots__ = ()

            def __new__(cls, *args: Any) -> Single:
                if args:
                    raise Corrupt(f"a {cls.__name__} with arguments")
                return instances[cls]

        class Box(Single):
            __slots__ = ()

            def __setstate__(self, state: Any) -> None:
                add_start(state["offsets"])
                add_size(state["sizes"])
                state.clear()  # a million of them are 170 MB

        class Place(Single):
            __slots__ = ()

            def __setstate__(self, state: Any) -> None:
                key = state["fqn"]
                found = stored.get(key)
                if found is None:
                    found = stored[key] = _Stored()
                found.starts.append(state.get("offset"))
                collect.last = found
                collect.places += 1
                state.clear()

        class Item(Single):
            __slots__ = ()

            def __setstate__(self, state: Any) -> None:
                found = collect.last
                path = state["relative_path"]
                if not isinstance(path, str):
                    raise TypeError("relative_path")
                transforms = state.get("transform_descriptors")
                if transforms:
                    if not isinstance(transforms, (list, tuple)) or not all(type(t) is str for t in transforms):
                        raise TypeError("transform_descriptors")
                    found.transforms[len(found.file)] = transforms
                found.file.append(files.setdefault(path, len(files)))
                found.offset.append(state["offset"])
                found.length.append(state["length"])
                collect.items += 1
                if collect.items != collect.places:
                    raise Corrupt("storage_data of .metadata is not made of (index, info) pairs")
                state.clear()

        instances: dict[type, Single] = {cls: object.__new__(cls) for cls in (Box, Place, Item)}
        self.last = _Stored()
        self.tensor_class = Tensor
        self.stand_ins: dict[tuple[str, str], Any] = {
            **_STAND_INS,
            (_META, "TensorStorageMetadata"): Tensor,
            (_META, "BytesStorageMetadata"): Bytes,
            (_META, "ChunkStorageMetadata"): Box,
            (_META, "MetadataIndex"): Place,
            (_STORAGE, "_StorageInfo"): Item,
        }


_STAND_INS: dict[tuple[str, str], Any] = {
    (_META, "Metadata"): _Metadata,
    (_META, "TensorProperties"): _Properties,
    (_META, "StorageMeta"): _Inert,
    (_META, "_MEM_FORMAT_ENCODING"): _MemoryFormat,
    **pickles.enum_members((_MemoryFormat, {name: _MemoryFormat(k) for k, name in enumerate(pickles.MEMORY_FORMATS)})),
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _Inert,
    ("collections", "OrderedDict"): pickles.ordered_dict,
}
for _module in ("pathlib", "pathlib._local"):
    for _name in ("PosixPath", "WindowsPath", "PurePosixPath", "Path"):
        _STAND_INS[_module, _name] = lambda *parts: None  # where the save ran; says nothing
for _dtype in ITEMSIZE:
    _STAND_INS["torch", _dtype] = pickles.Global("torch", _dtype)


class _Index:
    """What .metadata says, in columns: `tensors` (flat key, dtype, shape, chunks); chunk k of a tensor is item k.

    `paths` {flat key: path}; `values` (flat key, file, offset, length, transforms); `zstd` and `files` by index.
    """

    def __init__(self) -> None:
        self.files: list[str] = []
        self.tensors: list[tuple[str, str, tuple[int, ...], Chunks]] = []
        self.values: list[tuple[str, int, int, int, list[str]]] = []
        self.paths: dict[str, list[str | int]] = {}
        self.transforms: dict[int, list[str]] = {}  # file -> what its items went through

    def to_bytes(self) -> bytes:
        """For the way out of a child process: a JSON line of what is small, then the columns."""
        columns = [c for _, _, _, k in self.tensors for c in (k.start, k.shape, k.file, k.offset, k.length)]
        head = {
            "files": self.files,
            "tensors": [(k, d, s, len(c)) for k, d, s, c in self.tensors],
            "values": self.values,
            "paths": self.paths,
            "transforms": list(self.transforms.items()),
        }
        return json.dumps(head).encode() + b"\n" + b"".join(memoryview(c).cast("B") for c in columns)

    @classmethod
    def from_bytes(cls, data: bytes) -> _Index:
        """The other end."""
        out = cls()
        cut = data.index(b"\n")
        head = json.loads(data[:cut])
        out.files, out.paths = head["files"], head["paths"]
        out.values = [tuple(v) for v in head["values"]]
        out.transforms = dict(head["transforms"])
        view, at = memoryview(data), cut + 1
        for key, dtype, shape, n in head["tensors"]:
            c = Chunks(len(shape))
            for name, width in (
                ("start", len(shape)),
                ("shape", len(shape)),
                ("file", 1),
                ("offset", 1),
                ("length", 1),
            ):
                column = array("q")
                column.frombytes(view[at : at + 8 * n * width])
                at += 8 * n * width
                setattr(c, name, column)
            out.tensors.append((key, dtype, tuple(shape), c))
        return out


def read_index_in_child(path: str) -> bytes:
    """The index of one .metadata file, read by the C unpickler; runs in a limited child process (sandbox.py). The bytes of one
    that is no file come by stdin."""
    collector = _Collector()
    file: Any = open(path, "rb") if os.path.isabs(path) else sys.stdin.buffer  # noqa: SIM115
    with file as f:
        top = pickles.load_large(f, collector.stand_ins)
    return _index([(top, collector)], path).to_bytes()


def _read_index(source: Source) -> _Index:
    names = [".metadata"] if source.exists(".metadata") else []
    names = names or sorted(
        (n for n in source.list() if re.fullmatch(r"__\d+\.metadata", n)), key=lambda n: int(n[2:-9])
    )
    names = names or [".metadata"]  # no regular file: opening it says what it is
    if len(names) == 1 and source.size(names[0]) > _LARGE_BYTES:
        where, size = f"{source.root}/{names[0]}", source.size(names[0])
        data = b"" if source.local else source.read_all(names[0], 2 << 30)
        return _Index.from_bytes(in_child("ckpttool.converters.dcp:read_index_in_child", where, size, data))
    tops = []
    for n in names:
        what = f"{source.root}/{n}"
        data = source.read_all(n, 64 << 20)
        if not data:
            raise Corrupt(f"{what} is empty: the save was interrupted, or the copy is incomplete.")
        collector = _Collector()
        tops.append((pickles.load(data, collector.stand_ins, what=what)[0], collector))
    return _index(tops, f"{source.root}/{names[0]}")


def _index(tops: list[tuple[Any, _Collector]], what: str) -> _Index:
    try:
        return _columns(tops, what)
    except (TypeError, AttributeError, KeyError, ValueError, OverflowError) as e:
        raise Corrupt(f"{what}: not the metadata of a DCP checkpoint ({type(e).__name__}: {e}).") from None


def _columns(tops: list[tuple[Any, _Collector]], what: str) -> _Index:
    out = _Index()
    files: dict[str, int] = {}
    tensors: dict[str, tuple[str, tuple[int, ...], Chunks]] = {}
    for top, collector in tops:
        if not isinstance(top, _Metadata) or not isinstance(top.state, dict):
            raise Corrupt(f"{what}: holds a {type(top).__name__}, not the metadata of a DCP checkpoint.")
        state = top.state
        if collector.tensors != len(collector.starts) or collector.places != collector.items:
            raise Corrupt(f"{what}: {len(collector.starts)} chunks, of which {collector.tensors} belong to a tensor.")
        for key, path in (state.get("planner_data") or {}).items():
            if not isinstance(path, tuple) or not path or not all(isinstance(p, (str, int)) for p in path):
                raise Corrupt(f"{what}: the path of {pickles.short(key)} is {pickles.short(path)}.")
            if joined(path) != key:
                raise Corrupt(
                    f"{what}: planner_data gives {pickles.short(key)} the path {pickles.short(path)}. torch joins the path to "
                    "make the key and loads by the key alone, so the file was altered; take another copy."
                )
            out.paths[key] = list(path)
        listed = sum(isinstance(meta, collector.tensor_class) for meta in state["state_dict_metadata"].values())
        values = sum(isinstance(meta, _Bytes) for meta in state["state_dict_metadata"].values())
        if collector.built[0] > listed or collector.built[1] > values:  # what the C unpickler does not say of itself
            raise Unsafe(
                f"{what}: describes {sum(collector.built)} entries for {listed + values} names, so a name is there twice, and the "
                "first entry is lost to whoever loads it. Take another copy of the checkpoint."
            )
        numbers = [files.setdefault(name, len(files)) for name in collector.files]  # this file's -> all files'
        for key, meta in state["state_dict_metadata"].items():
            stored = collector.stored.get(key) or _Stored()
            for k, transforms in stored.transforms.items():
                out.transforms[numbers[stored.file[k]]] = list(transforms)
            if isinstance(meta, _Bytes):
                if not stored.file:
                    raise Corrupt(f'{what}: "{key}" is listed but stored nowhere.')
                if len(stored.file) > 1:
                    raise Unsafe(_twice(what, key))
                row = (numbers[stored.file[0]], stored.offset[0], stored.length[0])
                if key not in tensors:
                    out.values.append((key, *row, list(stored.transforms.get(0, ()))))
                continue
            if not isinstance(meta, collector.tensor_class):
                raise Corrupt(f'{what}: "{key}" is a {type(meta).__name__}.')
            dtype, size, chunks = _joined(key, meta.state, collector, stored, numbers, what)
            if key in tensors:  # per-rank metadata: each lists its own chunks, and what is replicated again
                known = tensors[key][2]
                places = set(known.boxes())
                for c in chunks:
                    if (c.start, c.shape) not in places:
                        known.add(c.start, c.shape, *c.extent)
            else:
                tensors[key] = dtype, size, chunks
    order = [k for k in out.paths if k in tensors] + [k for k in tensors if k not in out.paths]
    out.tensors = [(k, *tensors[k]) for k in order]
    place = {k: i for i, k in enumerate(out.paths)}
    out.values.sort(key=lambda v: place.get(v[0], len(place)))
    out.files = list(files)
    return out


def _twice(what: str, key: str) -> str:
    return (
        f'{what}: storage_data has two places for the same part of "{key}", and the first is lost to whoever loads it. Take '
        "another copy of the checkpoint."
    )


def _joined(
    key: str, state: Any, collector: _Collector, stored: _Stored, numbers: list[int], what: str
) -> tuple[str, tuple[int, ...], Chunks]:
    """One tensor: its chunks, each with the item that is stored for its place."""
    properties, size, first, n = state
    dtype = properties.state
    dtype = (dtype["dtype"] if isinstance(dtype, dict) else dtype[0]).name
    size = tuple(size)
    if not all(type(k) is int for k in size):
        raise Corrupt(f'{what}: "{key}" has size {pickles.short(size)}.')
    starts = collector.starts[first : first + n]
    chunks = Chunks(len(size))
    chunks.start.extend(chain.from_iterable(starts))
    chunks.shape.extend(chain.from_iterable(collector.sizes[first : first + n]))
    array("q", chain.from_iterable(stored.starts))  # integers, all of them, so that hashing them has a bound
    rows = dict(zip(stored.starts, range(len(stored.starts)), strict=True))
    if len(rows) < len(stored.starts):
        raise Unsafe(_twice(what, key))
    found = [rows.get(s) for s in starts]
    if None in found:
        place = starts[found.index(None)]
        raise Corrupt(f'{what}: the chunk of "{key}" at {tuple(place)} is listed but stored nowhere.')
    if len(chunks.start) != n * len(size) or len(chunks.shape) != n * len(size):
        raise Corrupt(f'{what}: chunks of "{key}" do not have {len(size)} dimensions.')
    chunks.file.extend(numbers[stored.file[k]] for k in found)  # type: ignore[index]
    chunks.offset.extend(stored.offset[k] for k in found)  # type: ignore[index]
    chunks.length.extend(stored.length[k] for k in found)  # type: ignore[index]
    return dtype, size, chunks


# --------------------------------------------------------------------------------------------------------- reading


def read(where: Place, options: ReadOptions) -> Checkpoint:
    """The index of a folder; values are read, tensor items are not looked into."""
    source = where.source
    index = _read_index(source)
    leaves: dict[Path, Any] = {}
    keys: dict[Path, str] = {}
    for key, dtype, shape, chunks in index.tensors:
        path = _path(index, key)
        entry = TensorEntry(dtype, shape, path, chunks, "torch.save")
        if index.transforms:
            kinds = {tuple(index.transforms.get(f, ())) for f in chunks.file}
            entry = replace(entry, coding=_coding(kinds, key))
        _put(leaves, keys, path, key, entry)
    notes: list[str] = []
    records: list[Record] = []
    seen: dict[str, dict[Path, Any]] = {}
    source.prefetch((index.files[f], at, min(n, _VALUE_HEAD)) for _, f, at, n, _ in index.values)
    for key, file, offset, length, transforms in index.values:
        _coding({tuple(transforms)}, key)
        found, sums = _value(source, index, _path(index, key), file, offset, length, bool(transforms))
        if key in seen:  # per-rank metadata: every rank stores its own
            if found != seen[key]:
                notes.append(
                    f'"{key}" differs between ranks; that of the first is kept, not that in {index.files[file]}'
                )
            continue
        seen[key] = found
        records.extend(sums)
        for path, leaf in found.items():
            _put(leaves, keys, path, key, leaf)
    named = canonical(
        leaves,
        shape_of,
        options.like and options.like.optimizer,
        None,
        options.only,
    )
    ranks = {i: int(m[1]) for i, f in enumerate(index.files) if (m := re.match(r"__(\d+)_", f))}
    named.notes.extend(notes)
    out = checkpoint_of(named, "dcp", source.root, max(ranks.values(), default=0) + 1, index.files, source)
    out.records, out.ranks = records, ranks
    return out


def _path(index: _Index, key: str) -> Path:
    return tuple(index.paths.get(key) or (key,))


def _put(leaves: dict[Path, Any], keys: dict[Path, str], path: Path, key: str, leaf: Any) -> None:
    if path in leaves:
        raise Corrupt(f'.metadata gives "{keys[path]}" and "{key}" the same place {joined(path)!r}; one would be lost.')
    leaves[path], keys[path] = leaf, key


def _coding(kinds: set[tuple[str, ...]], key: str) -> str:
    if kinds == {()}:
        return "torch.save"
    if len(kinds) == 1 and next(iter(kinds))[0].partition("/")[0] == "stream.zstd" and len(next(iter(kinds))) == 1:
        return "torch.save+zstd"
    raise Unsupported(f'"{key}" went through {sorted(kinds)}; ckpttool knows stream.zstd only.')


def _value(
    source: Source, index: _Index, path: Path, file: int, offset: int, length: int, zstd: bool
) -> tuple[dict[Path, Any], list[Record]]:
    """What a bytes item holds: one plain value, or, where tensors are in it, its leaves."""
    name = index.files[file]
    what = f"{source.root}/{name} at byte {offset}"
    if length > _VALUE_BYTES:
        raise Unsupported(f"{what}: a value of {length} bytes.")
    if offset + length > source.size(name):
        raise Corrupt(f"{what}: needs {length} bytes but the file ends at {source.size(name)}; fetch the file again.")
    if zstd:
        import zstandard

        packed = source.read(name, offset, length)
        try:
            data = zstandard.ZstdDecompressor(max_window_size=128 << 20).stream_reader(packed).read(_VALUE_BYTES)
        except zstandard.ZstdError as e:
            raise Corrupt(f"{what}: the zstd frame is damaged ({e}).") from None

        def unpacked(at: int, n: int) -> bytes:
            return data[at : at + n]

        return {path: stored_tensors.inlined(torch_zip.read(unpacked, 0, len(data), what), unpacked, what)}, []
    head = source.read(name, offset, min(length, _VALUE_HEAD))

    def read_at(at: int, n: int) -> bytes:
        inside = at - offset
        return head[inside : inside + n] if inside >= 0 and inside + n <= len(head) else source.read(name, at, n)

    tree = torch_zip.read(read_at, offset, length, what)
    if next(stored_tensors.tensors_in(tree), None) is None:
        return {path: tree}, []
    return stored_tensors.leaves(tree, path, file, read_at, what)


# -------------------------------------------------------------------------------------------------------- locating


def locate(ckpt: Checkpoint, source: Source) -> Checkpoint:
    """The same index with raw byte ranges: every item's zip has been looked into and agrees with .metadata.

    Raises:
        Corrupt: an item is cut off, overwritten, of another dtype or shape, or shares its bytes with another.
        Unsafe: its pickle would run code.
    """
    tensors: dict[str, TensorEntry] = {}
    records = list(ckpt.records)
    headers: dict[int, dict[str, safetensors_header.Slot] | None] = {}
    source.prefetch(_ends_of_items(ckpt))
    for name, t in ckpt.tensors.items():
        if t.coding == "raw":
            tensors[name] = t
            continue
        raw = Chunks(t.chunks.ndim)
        for c in t.chunks:
            file = c.extent.file
            if file not in headers:
                headers[file] = (
                    safetensors_header.slots(source, ckpt.files[file])
                    if _is_safetensors(source, ckpt.files[file])
                    else None
                )
            slots = headers[file]
            if slots is not None:
                found = _slot(slots, name, t, c, ckpt.files[file])
            else:
                found, record = _item(source, ckpt.files[file], name, t, c)
                records.extend(record)
            raw.add(*found[:2], *found.extent, strides=found.strides, zstd=found.zstd)
        tensors[name] = replace(t, chunks=raw, coding="raw")
    _refuse_shared(ckpt, tensors)
    return replace(ckpt, tensors=tensors, records=records)


def _ends_of_items(ckpt: Checkpoint) -> Iterator[tuple[str, int, int]]:
    """What `_item` reads, in its order."""
    for t in ckpt.tensors.values():
        if t.coding == "torch.save":
            for file, offset, length in zip(t.chunks.file, t.chunks.offset, t.chunks.length, strict=True):
                yield ckpt.files[file], offset, min(length, _HEAD)
                if length > _HEAD:
                    yield ckpt.files[file], offset + length - _TAIL, _TAIL


def _is_safetensors(source: Source, file: str) -> bool:
    head = source.read(file, 0, min(9, source.size(file)))
    return len(head) == 9 and head[8:] == b"{" and head[:2] != b"PK"


def _slot(slots: dict[str, safetensors_header.Slot], name: str, t: TensorEntry, c: Chunk, file: str) -> Chunk:
    for key in (name, name.partition(".")[2]):
        slot = slots.get(key)
        if slot is not None:
            break
    else:
        raise Corrupt(f'{file}: "{name}" is not in this safetensors file.')
    if slot.dtype != t.dtype or slot.shape != c.shape:
        raise Corrupt(f'{file}: "{name}" is {slot.dtype} {slot.shape} there, {t.dtype} {c.shape} in .metadata.')
    return c._replace(extent=Extent(c.extent.file, slot.offset, slot.length))


def _item(source: Source, file: str, name: str, t: TensorEntry, c: Chunk) -> tuple[Chunk, list[Record]]:
    offset, length = c.extent.offset, c.extent.length
    what = f'{source.root}/{file} at byte {offset} ("{name}")'
    zstd = t.coding == "torch.save+zstd"
    if zstd:
        head, tail, total = decompress_ends(
            source, file, offset, length, prod(c.shape) * ITEMSIZE[t.dtype] + (64 << 10), what
        )
        read_at, base = _windows(head, tail, total), 0
    else:
        # one or two reads: what is asked for lies at the ends
        head = source.read(file, offset, min(length, _HEAD))
        tail = head if length <= _HEAD else source.read(file, offset + length - _TAIL, _TAIL)
        windows = _windows(head, tail, length)

        def read_at(at: int, n: int) -> bytes:
            try:
                return windows(at - offset, n)
            except LookupError:
                return source.read(file, at, n)

        base, total = offset, length
    found = torch_zip.read(read_at, base, total, what)
    if not isinstance(found, stored_tensors.StoredTensor):
        raise Corrupt(f"{what}: holds a {type(found).__name__}, not a tensor.")
    if found.dtype != t.dtype or found.shape != c.shape:
        raise Corrupt(f"{what}: holds {found.dtype} {found.shape}, .metadata says {t.dtype} {c.shape}.")
    at, n = found.extent
    if zstd:
        if not found.contiguous:
            raise Unsupported(f"{what}: a compressed tensor that is not contiguous.")
        return c._replace(zstd=(at, found.storage.crc32 if n == found.storage.length else None)), []
    crc = found.storage.crc32
    records = (
        [Record(Extent(c.extent.file, found.storage.offset, found.storage.length), crc)] if crc is not None else []
    )
    strides = None if found.contiguous else found.strides
    return c._replace(extent=Extent(c.extent.file, at, n), strides=strides), records


def _windows(head: bytes, tail: bytes, total: int) -> Callable[[int, int], bytes]:
    """read_at over the first and the last bytes of something of `total` bytes."""

    def read_at(at: int, n: int) -> bytes:
        if at >= 0 and at + n <= len(head):
            return head[at : at + n]
        at -= total - len(tail)
        if at >= 0 and at + n <= len(tail):
            return tail[at : at + n]
        raise LookupError

    return read_at


def _refuse_shared(ckpt: Checkpoint, tensors: dict[str, TensorEntry]) -> None:
    """DCP writes every chunk of its own; two that share bytes are a fault of the index."""
    spans: list[list[tuple[int, int, str]]] = [[] for _ in ckpt.files]
    for name, t in tensors.items():
        for file, offset, length in zip(t.chunks.file, t.chunks.offset, t.chunks.length, strict=True):
            if length:
                spans[file].append((offset, length, name))
    for file, rows in enumerate(spans):
        rows.sort()
        for (a, n, first), (b, _, second) in itertools.pairwise(rows):
            if a + n > b:
                raise Corrupt(
                    f'{ckpt.files[file]}: "{first}" and "{second}" both claim the bytes from {b}. The index is damaged; '
                    "take another copy."
                )


# --------------------------------------------------------------------------------------------------------- writing


def write(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """A folder for an FSDP2 job of `world_size` ranks.

    Raises:
        UsageError: no world size was given and the source has none.
    """
    world = options.world_size or ckpt.world_size
    if not world or world < 1:
        raise UsageError("--world-size is needed: the number of ranks of the job that will load this.")
    leaves: dict[Path, Any] = {t.path: t for t in ckpt.tensors.values()}
    leaves |= {v.path: v.data for v in ckpt.values.values()}
    tree, notes = own_tree(leaves, _sharded_origin(ckpt), None)
    paths: dict[str, Path] = {}  # of tensors, by canonical name
    values: list[tuple[Path, int, int]] = []  # path, offset in rank 0's file, length
    head = bytearray()
    for path, leaf in tree.items():
        if isinstance(leaf, TensorEntry):
            paths[joined(leaf.path)] = path
            continue
        item = torch_pickles.small_zip(leaf)
        values.append((path, len(head), len(item)))
        head += item
    files = [f"__{r}_0.distcp" for r in range(world)]
    at = [len(head)] + [0] * (world - 1)
    tensors: dict[str, TensorEntry] = {}
    for name, stored in ckpt.tensors.items():
        t = replace(stored, dtype=options.cast(name, stored.dtype))
        sizes = boxes.chunk_sizes(t.shape[0], world) if _sharded(t) else []
        tensors[name] = replace(t, chunks=_placed(t, sizes, at), coding="raw")
    out = Checkpoint("dcp", options.target, world, [*files, ".metadata"], [*at, 0], tensors, ckpt.values)
    draft_files = [
        DraftFile(f, n, bytes(head) if i == 0 else b"") for i, (f, n) in enumerate(zip(files, at, strict=True))
    ]
    rows = sum(len(t.chunks) for t in tensors.values())
    draft_files.append(DraftFile(".metadata", 400 * rows + 1000, lambda: _metadata(out, paths, values)))
    return Draft(out, dict(ckpt.tensors), draft_files, before=_before, after=_after, notes=notes)


def _sharded_origin(ckpt: Checkpoint) -> dict[Path, Path]:
    """Without the numbers that an optimizer gives its parameters, unless ranks saved them: in a file of one process they
    stand for names, and a job of several ranks asks for names."""
    if ckpt.world_size is not None:
        return ckpt.origin
    return {
        q: p for q, p in ckpt.origin.items() if not (q[:2] == ("optim", "params") and len(q) == 3 and type(p[0]) is int)
    }


def _placed(t: TensorEntry, sizes: list[int], at: list[int]) -> Chunks:
    """Chunks of `sizes` rows for ranks 0, 1, ..., or one for rank 0; `at` are the ends of the ranks' files so far."""
    chunks = Chunks(len(t.shape))
    if not sizes:
        before, after = _frame_sizes(t.dtype, t.shape)
        chunks.add((0,) * len(t.shape), t.shape, 0, at[0] + before, t.nbytes)
        at[0] += before + t.nbytes + after
        return chunks
    ndim, rest = len(t.shape), t.shape[1:]
    row_bytes = prod(rest) * ITEMSIZE[t.dtype]
    frames = {n: _frame_sizes(t.dtype, (n, *rest)) for n in set(sizes) if n}
    sizes = [n for n in sizes if n]  # ranks beyond the data have none, and come last
    for rank, n in enumerate(sizes):
        before, after = frames[n]
        chunks.offset.append(at[rank] + before)
        at[rank] += before + n * row_bytes + after
    count = len(sizes)
    chunks.file.extend(range(count))
    chunks.length.extend(n * row_bytes for n in sizes)
    chunks.start, chunks.shape = array("q", [0]) * (count * ndim), array("q", t.shape) * count
    chunks.start[0::ndim] = array("q", [0, *accumulate(sizes[:-1])])
    chunks.shape[0::ndim] = array("q", sizes)
    return chunks


def _sharded(t: TensorEntry) -> bool:
    """Whether FSDP2 shards it: parameters and optimizer slots; not scalars, counters or what lies elsewhere."""
    if t.path[0] not in ("model", "optim") or not t.shape or t.numel == 0:
        return False
    return len(t.shape) > 1 or "float" in t.dtype or "complex" in t.dtype


@lru_cache(4096)
def _frame(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, list[tuple[str, int, int, int, bool]]]:
    """The bytes before an item's payload, and the directory entries of its small records."""
    ref = torch_pickles.TensorRef(dtype, shape, "0", prod(shape))
    head, records = torch_pickles.head_records("archive", torch_pickles.pickled(ref))
    header = zip_bytes.local_header("archive/data/0", prod(shape) * ITEMSIZE[dtype], None, len(head), 64)
    return head + header, [*records, ("archive/data/0", len(head), prod(shape) * ITEMSIZE[dtype], 0, True)]


@lru_cache(4096)
def _frame_sizes(dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
    return len(_frame(dtype, shape)[0]), len(_trailer(dtype, shape, 0))


def _trailer(dtype: str, shape: tuple[int, ...], crc: int) -> bytes:
    head, records = _frame(dtype, shape)
    size = prod(shape) * ITEMSIZE[dtype]
    name, at, _, _, _ = records[-1]
    directory = zip_bytes.central_directory(
        [*records[:-1], (name, at, size, crc, True)], len(head) + size + zip_bytes.DATA_DESCRIPTOR_BYTES
    )
    return zip_bytes.data_descriptor(size, crc) + directory


def _before(name: str, t: TensorEntry, row: int, written: Sequence[Written]) -> bytes:
    return _frame(t.dtype, t.chunks[row].shape)[0]


def _after(name: str, t: TensorEntry, row: int, written: Sequence[Written]) -> bytes:
    return _trailer(t.dtype, t.chunks[row].shape, written[-1][2])


class _Emitter:
    """The pickle of Metadata, protocol 2: globals and keys are memoized once, each chunk costs 40 bytes."""

    GLOBALS = (
        (_META, "Metadata"), (_META, "TensorStorageMetadata"), (_META, "TensorProperties"),
        (_META, "ChunkStorageMetadata"), (_META, "BytesStorageMetadata"), (_META, "MetadataIndex"),
        (_META, "_MEM_FORMAT_ENCODING"), (_STORAGE, "_StorageInfo"), ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
    )  # fmt: skip
    KEYS = (
        "properties", "size", "chunks", "offsets", "sizes", "fqn", "offset", "index", "relative_path", "length",
        "state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version",
    )  # fmt: skip

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.memo: dict[Any, bytes] = {}
        self.sizes: dict[tuple[int, ...], bytes] = {}
        for module, name in self.GLOBALS:
            self._define(name, f"c{module}\n{name}\n".encode())
            self.out += b"0"
        for key in self.KEYS:
            self._define(key, _text(key))
            self.out += b"0"

    def _define(self, key: Any, code: bytes) -> None:
        n = len(self.memo)
        self.memo[key] = b"h" + bytes([n]) if n < 256 else b"j" + struct.pack("<I", n)
        self.out += code + (b"q" + bytes([n]) if n < 256 else b"r" + struct.pack("<I", n))

    def text(self, value: str) -> None:
        """A string, memoized."""
        if ("text", value) in self.memo:
            self.out += self.memo["text", value]
        else:
            self._define(("text", value), _text(value))

    def size(self, shape: tuple[int, ...]) -> bytes:
        """torch.Size(shape)."""
        if shape not in self.sizes:
            ints = b"".join(map(_int, shape))
            wrap = {0: b")", 1: ints + b"\x85", 2: ints + b"\x86", 3: ints + b"\x87"}.get(len(shape))
            self.sizes[shape] = self.memo["Size"] + (wrap or b"(" + ints + b"t") + b"\x85R"
        return self.sizes[shape]


def _int(n: int) -> bytes:
    if n < 256:
        return b"K" + bytes([n])
    if n < 65536:
        return b"M" + struct.pack("<H", n)
    if n < 1 << 31:
        return b"J" + struct.pack("<i", n)
    raw = n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def _metadata(ckpt: Checkpoint, paths: dict[str, Path], values: list[tuple[Path, int, int]]) -> bytes:
    """The bytes of .metadata: tensors at `paths`, by canonical name, and values at theirs."""
    e = _Emitter()
    m, out = e.memo, e.out
    keys = {name: joined(paths[name]) for name in paths}
    out += m["Metadata"] + b")\x81}(" + m["state_dict_metadata"] + b"}("
    properties: dict[str, bytes] = {}
    for name, t in ckpt.tensors.items():
        e.text(keys[name])
        if t.dtype not in properties:
            layout = m["_get_layout"] + _text("torch.strided") + b"\x85R"
            memory = m["_MEM_FORMAT_ENCODING"] + b"K\x00\x85R"
            properties[t.dtype] = (
                m["TensorProperties"]
                + b")\x81(ctorch\n"
                + t.dtype.encode()
                + b"\n"
                + layout
                + b"\x89"
                + memory
                + b"\x89tb"
            )
        box = m["ChunkStorageMetadata"] + b")\x81}(" + m["offsets"]
        rows = b"".join(box + e.size(start) + m["sizes"] + e.size(shape) + b"ub" for start, shape in t.chunks.boxes())
        out += m["TensorStorageMetadata"] + b")\x81}(" + m["properties"] + properties[t.dtype]
        out += m["size"] + e.size(t.shape) + m["chunks"] + b"](" + rows + b"eub"
    for path, _, _ in values:
        e.text(joined(path))
        out += m["BytesStorageMetadata"] + b")\x81"
    out += b"u" + m["planner_data"] + b"}("
    for path in [*(paths[name] for name in ckpt.tensors), *(path for path, _, _ in values)]:
        e.text(joined(path))
        out += b"("
        for p in path:
            if isinstance(p, int):
                out += _int(p)
            else:
                e.text(p)
        out += b"t"
    out += b"u" + m["storage_data"] + b"}("
    for name, t in ckpt.tensors.items():
        c = t.chunks
        for k, (start, shape) in enumerate(c.boxes()):
            before, after = _frame_sizes(t.dtype, shape)
            file, offset = ckpt.files[c.file[k]], c.offset[k] - before
            _storage(e, keys[name], e.size(start), k, file, offset, c.length[k] + before + after)
    for path, offset, length in values:
        _storage(e, joined(path), b"N", None, ckpt.files[0], offset, length)
    out += b"u" + m["storage_meta"] + b"N" + m["version"] + _text("1.0.0") + b"ub."
    return bytes(out)


def _storage(e: _Emitter, key: str, at: bytes, index: int | None, file: str, offset: int, length: int) -> None:
    m, out = e.memo, e.out
    out += m["MetadataIndex"] + b")\x81}(" + m["fqn"]
    e.text(key)
    out += m["offset"] + at + m["index"] + (b"N" if index is None else _int(index)) + b"ub"
    out += m["_StorageInfo"] + b")\x81}(" + m["relative_path"]
    e.text(file)
    out += m["offset"] + _int(offset) + m["length"] + _int(length) + b"ub"


LAYOUTS = (
    Layout(
        name="dcp", title="torch.distributed.checkpoint folder", detect=detect, read=read, write=write, locate=locate,
        aliases=("distcp", "fsdp", "fsdp2", "torch-dcp"), own_keys=True,
    ),
)  # fmt: skip
