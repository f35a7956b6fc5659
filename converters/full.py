"""full: one torch.save file (.pt, .pth, .bin, .ckpt), zip or legacy, of a tree of dicts and lists.

Read: any tree whose leaves are tensors and plain values, in the shapes that names.py knows: {"model", "optim"},
{"model_state_dict", "optimizer_state_dict"}, {"state_dict", "optimizer_states"}, a bare state dict; integer optimizer
ids are named where order and shapes leave one way. Storages may be shared (tied weights), larger than what is used of
them (views) or strided (transposed). Containers other than dicts with string keys and lists are values, kept whole.

Written: a zip of stored records under `archive/`, each 64-byte aligned and with its CRC32, that
`torch.load(weights_only=True, mmap=True)` reads:

    {"model": {fqn: tensor}, "optim": {"state": {fqn: {slot: tensor}}, "param_groups": [...]}, ...the rest}

Tied weights share a storage again. `archive/ckpttool.json` holds the digests; torch does not look at it. What
weights_only=True would refuse (instances of classes, numpy arrays) is listed as dropped.

Sources: torch/serialization.py, torch/_weights_only_unpickler.py (what may be loaded), torchzip.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from ckpttool import torchzip
from ckpttool.crc import crc32
from ckpttool.draft import Draft, DraftFile, Dropped
from ckpttool.errors import Corrupt, Unsupported
from ckpttool.index import Checkpoint, Chunks, Path, TensorEntry
from ckpttool.layouts import Layout, Place, ReadOptions, WriteOptions, checkpoint_of
from ckpttool.names import canonical, nest, original
from ckpttool.pickles import Global, Opaque, children
from ckpttool.store import Source

__all__ = ["LAYOUT"]

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_LEGACY = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
# What torch's weights_only unpickler builds besides plain values (torch/_weights_only_unpickler.py).
_LOADABLE = {("torch", "device"), ("torch", "Size"), ("collections", "OrderedDict"), ("collections", "Counter")}


def detect(where: Place) -> tuple[bool, str]:
    """One file that torch.save wrote."""
    source, name = where
    if name is None:
        return False, "one .pt file; this is a folder"
    head = source.read(name, 0, min(source.size(name), 64))
    if torchzip.is_zip(head):
        return True, "is a zip, as torch.save writes"
    if _LEGACY in head:
        return True, "is a legacy torch.save file"
    if name.endswith(_SUFFIXES):
        return True, f"is named {name.rpartition('.')[2]}"
    return False, "neither a zip nor a legacy torch.save file"


def read(where: Place, options: ReadOptions) -> Checkpoint:
    """The index of a file.

    Raises:
        Unsupported: it holds no dict of tensors.
    """
    source, name = where
    assert name is not None
    what = f"{source.root}/{name}"

    def read_at(offset: int, n: int) -> bytes:
        return source.read(name, offset, n)

    tree = torchzip.read(read_at, 0, source.size(name), what)
    if not isinstance(tree, dict):
        kind = f"an instance of {tree.cls}" if isinstance(tree, Opaque) else f"a {type(tree).__name__}"
        raise Unsupported(f"{what} holds {kind}, not a state dict. Save model.state_dict() instead.")
    entries, records = torchzip.leaves(tree, (), 0, read_at, what)
    if not any(isinstance(x, TensorEntry) for x in entries.values()):
        raise Unsupported(f"{what} holds no tensor at a key of a dict; nothing in it is a state dict.")
    named = canonical(
        entries, lambda x: x.shape if isinstance(x, TensorEntry) else None, options.order, _same_bytes, options.only
    )
    out = checkpoint_of(named, "full", source.root, None, [name], source)
    out.records = records
    out.recorded = _recorded(read_at, source.size(name), what)
    return out


def _recorded(read_at: torchzip.ReadAt, length: int, what: str) -> dict[str, str]:
    """The digests that `write` left in the archive."""
    if not torchzip.is_zip(read_at(0, min(4, length))):
        return {}
    record = torchzip.zip_records(read_at, 0, length, what).get("ckpttool.json")
    if record is None:
        return {}
    try:
        found = json.loads(read_at(record.offset, record.length))
        return {str(k): str(v) for k, v in found.items()}
    except (ValueError, AttributeError):
        raise Corrupt(f"{what}: its ckpttool.json is damaged.") from None


def _same_bytes(a: TensorEntry, b: TensorEntry) -> bool:
    return a.numel > 0 and a.shape == b.shape and a.dtype == b.dtype and a.chunks[:] == b.chunks[:]


def write(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """One zip. The world size has no meaning here."""
    dropped = [Dropped(n, 0, why) for n, v in ckpt.values.items() if (why := _not_loadable(v.data)) is not None]
    gone = {d.name for d in dropped}
    values = {n: v for n, v in ckpt.values.items() if n not in gone}
    same: dict[str, str] = {}
    by_place: dict[Any, str] = {}
    wanted = {n: replace(t, dtype=options.cast(n, t.dtype)) for n, t in ckpt.tensors.items()}
    for name, t in ckpt.tensors.items():
        place = (t.dtype, wanted[name].dtype, t.shape, tuple(t.chunks[:]))
        if t.numel and t.coding == "raw" and by_place.setdefault(place, name) != name:
            same[name] = by_place[place]
    keys = {name: str(i) for i, name in enumerate(n for n in ckpt.tensors if n not in same)}
    leaves: dict[Path, Any] = {}
    for name, t in wanted.items():
        ref = torchzip.TensorRef(t.dtype, t.shape, keys[same.get(name, name)], t.numel)
        leaves[original(t.path, ckpt.origin)] = ref
    for v in values.values():
        leaves[original(v.path, ckpt.origin)] = v.data
    inline: list[bytes] = []
    tree = _number_inline(nest(leaves), len(keys), inline)
    head, records = torchzip.head_records("archive", torchzip.pickled(tree))
    head_bytes = bytearray(head)
    for i, data in enumerate(inline):
        name = f"archive/data/{len(keys) + i}"
        records.append((name, len(head_bytes), len(data), crc32(data), False))
        head_bytes += torchzip.local_header(name, len(data), crc32(data), len(head_bytes), 64) + data
    at = len(head_bytes)
    tensors: dict[str, TensorEntry] = {}
    headers: dict[str, int] = {}
    for name, t in wanted.items():
        if name in same:
            continue
        headers[name] = at
        at += len(torchzip.local_header(f"archive/data/{keys[name]}", t.nbytes, None, at, 64))
        tensors[name] = replace(t, chunks=Chunks.whole(t.shape, 0, at, t.nbytes), coding="raw")
        at += t.nbytes + torchzip.DATA_DESCRIPTOR_BYTES
    for name, other in same.items():
        tensors[name] = replace(wanted[name], chunks=tensors[other].chunks, coding="raw")
    tensors = {name: tensors[name] for name in ckpt.tensors}

    def before(name: str, t: TensorEntry, row: int, crc: int) -> bytes:
        return torchzip.local_header(f"archive/data/{keys[name]}", t.nbytes, None, headers[name], 64)

    def after(name: str, t: TensorEntry, row: int, crc: int) -> bytes:
        return torchzip.data_descriptor(t.nbytes, crc)

    def tail(file: int, crcs: list[tuple[str, int, int]], digests: Any) -> bytes:
        found = {n: c for n, _, c in crcs}
        entries = [
            *records,
            *((f"archive/data/{keys[n]}", headers[n], tensors[n].nbytes, found[n], True) for n in keys),
        ]
        note = json.dumps(digests, indent=1, ensure_ascii=False).encode()
        entries.append(("archive/ckpttool.json", at, len(note), crc32(note), False))
        note = torchzip.local_header("archive/ckpttool.json", len(note), crc32(note), at) + note
        return note + torchzip.central_directory(entries, at + len(note))

    size = at + 120 * (len(tensors) + 8) + 200 * len(tensors)
    out = Checkpoint("full", options.target, None, [options.target], [size], tensors, values)
    return Draft(
        out, dict(ckpt.tensors), [DraftFile(options.target, size, bytes(head_bytes))],
        dropped=dropped, same=same, before=before, after=after, tail=tail,
    )  # fmt: skip


def _number_inline(x: Any, first: int, inline: list[bytes]) -> Any:
    """Small tensors inside values become tensors of their own storages."""
    if isinstance(x, torchzip.Inline):
        inline.append(x.data)
        n = 1
        for k in x.shape:
            n *= k
        return torchzip.TensorRef(x.dtype, x.shape, str(first + len(inline) - 1), n)
    if isinstance(x, dict):
        return {k: _number_inline(v, first, inline) for k, v in x.items()}
    if isinstance(x, list):
        return [_number_inline(v, first, inline) for v in x]
    if type(x) is tuple:
        return tuple(_number_inline(v, first, inline) for v in x)
    return x


def _not_loadable(x: Any) -> str | None:
    """Why torch.load(weights_only=True) would refuse a value, or None."""
    todo = [x]
    while todo:
        v = todo.pop()
        if isinstance(v, Opaque) and (v.cls.module, v.cls.name) not in _LOADABLE:
            return f"an instance of {v.cls}, which torch.load(weights_only=True) refuses"
        if isinstance(v, Global) and v.module != "torch":
            return f"a reference to {v}, which torch.load(weights_only=True) refuses"
        if isinstance(v, frozenset):
            return "a frozenset, which torch.load(weights_only=True) refuses"
        if not isinstance(v, torchzip.Inline):
            todo.extend(children(v))
    return None


LAYOUT = Layout("full", "one torch.save file (FULL_STATE_DICT)", frozenset(), True, detect, read, write)
