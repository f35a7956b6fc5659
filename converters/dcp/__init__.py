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
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckpttool.by_fields import ByFields
from ckpttool.errors import CkpttoolError, Corrupt, Unsupported
from ckpttool.formats import safetensors_header, stored_tensors, torch_zip
from ckpttool.formats.pickles import Global, Opaque
from ckpttool.index.checkpoint import (
    Checkpoint,
    Chunk,
    Chunks,
    Leaves,
    Path,
    Salvage,
    TensorEntry,
    Value,
    joined,
    make_per_rank_path,
    same_value,
)
from ckpttool.index.composites import shape_of
from ckpttool.index.names import ROLES, canonical
from ckpttool.index.paths import is_number_text
from ckpttool.index.records import Extent, Record, Records
from ckpttool.layouts import Layout, Place, ReadOptions, checkpoint_of, find_by_trainer, late, name_leaves
from ckpttool.program import Advice, ForTrainer, Program, SeenFolder, Unfinished
from ckpttool.storage.overlay import LostBytes
from ckpttool.storage.source import Source

from ..options import MeshOptions
from ..rank_files import DifferentCopy, record_other_copies
from .dcp_metadata import Index, read_index
from .items import Items, SubclassFound, make_item_reader
from .object_items import has_short_items, list_item_ends, read_subclass_object

__all__ = ["LAYOUTS"]

_VALUE_BYTES, _VALUE_HEAD = 256 << 20, 1 << 20
_NAMED = 6  # names in a message
_END = 1 << 10  # last bytes of an item


class _LostLeaf(NamedTuple):
    """What stands for a tensor or value that is lost, while names are found; `why` says in what it was lost."""

    why: str


def detect(where: Place) -> tuple[bool, str]:
    """Return whether a place is a folder with .metadata; and, as text, why or why not."""
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


# --------------------------------------------------------------------------------------------------------- reading


def read(where: Place, options: ReadOptions) -> Checkpoint:
    """Return the index of a DCP folder. Values are read; items of tensors are not opened (`locate` does that), except
    those of tensor subclasses.

    Raises:
        Corrupt: files are missing or damaged, or two keys have the same path.
        Unsafe: reading it would run code or take too much memory. Unsupported: it has something ckpttool cannot read.
    """
    source = where.source
    index = read_index(source)
    if any(v[0].startswith("common_state/shard_") for v in index.values) and not {
        "metadata.json",
        "ckpttool.json",
    } & set(source.list()):
        raise Corrupt(
            f"{source.root} is a folder of Megatron-Core by its keys (common_state/shard_...), and its metadata.json "
            "is missing. The copy is incomplete: fetch that file.",
            code="CKPT0401",
        )
    try:
        sizes = [source.size(f) for f in index.files]
    except Corrupt:
        _refuse_missing_files(source, index)
        raise
    ranks = {i: int(m[1]) for i, f in enumerate(index.files) if (m := re.match(r"__(\d+)_", f))}
    reading = _Reading(source, index, sizes)
    reading.add_tensors()
    reading.add_values(ranks)
    leaves, lost = reading.leaves, reading.lost
    named = name_leaves(leaves, options, None)
    out = checkpoint_of(named, "dcp", source.root, max(ranks.values(), default=0) + 1, index.files, source)
    out.records, out.ranks, out.spreads_tensors = reading.records, ranks, True
    out.salvage = Salvage(missing=_name_lost_leaves(leaves, lost)) if lost else None
    if not options.salvage:
        out.tails, notes = _find_unlisted_bytes(source, index, sizes)
        out.notes = [*out.notes, *notes]
    ends_of = {item: _read_item_end(source, index, item) for pair in index.copies for item in pair}
    record_other_copies([DifferentCopy("", b.file, a) for a, b in index.copies if ends_of[a] != ends_of[b]], out)
    _restore_milestone_counters(out)
    return out


@dataclass(eq=False, repr=False)
class _Reading(ByFields):
    """The leaves of a folder while they are collected: `sizes` are the bytes of each file, `leaves` and `lost` {path in
    the tree: leaf} of what is there and what is not, `keys` {path: flat key}."""

    source: Source
    index: Index
    sizes: list[int]
    leaves: Leaves = field(default_factory=dict)
    lost: dict[Path, _LostLeaf] = field(default_factory=dict)
    keys: dict[Path, str] = field(default_factory=dict)
    records: Records = field(default_factory=Records)

    def add_tensors(self) -> None:
        """Add all tensors. The items of those that are shorter than their tensor are read: they may be objects of
        tensor subclasses.

        Raises:
            Corrupt: an item is damaged, or two keys have the same path. Unsafe: a pickle would run code.
            Unsupported: items have an unknown coding, or parts of an object cannot be joined.
        """
        source, index = self.source, self.index
        entries: list[tuple[str, TensorEntry]] = []
        for key, dtype, shape, chunks in index.tensors:
            entry = TensorEntry(dtype, shape, _look_up_path(index, key), chunks, "torch.save")
            if index.transforms:
                kinds = {tuple(index.transforms.get(f, ())) for f in chunks.file}
                entry = replace(entry, coding=_determine_coding(kinds, key))
            entries.append((key, entry))
        short = {entry.path for _, entry in entries if has_short_items(entry)}
        source.prefetch(list_item_ends((entry for _, entry in entries if entry.path in short), index.files))
        for key, entry in entries:
            leaf: object = entry
            if entry.path in short:
                try:
                    leaf = read_subclass_object(source, index.files, self.sizes, entry, self.records) or entry
                except LostBytes:  # only of a damaged checkpoint that is salvaged
                    of = ", ".join(sorted({index.files[f] for f in entry.chunks.file}))
                    self.lost[entry.path] = _LostLeaf(f"a part of it is in the lost bytes of {of}")
                    continue
            self._put(entry.path, key, leaf)

    def add_values(self, ranks: Mapping[int, int]) -> None:
        """Add all values. Of one that several ranks stored under one key, those that differ from the first are put
        below extra.per_rank. `ranks` is {number of a file: the rank that wrote it}.

        Raises:
            Corrupt: an item is damaged, or two keys have the same path. Unsafe: its pickle would run code.
            Unsupported: an item is too large, or has an unknown coding.
        """
        source, index = self.source, self.index
        seen: dict[str, tuple[dict[Path, object], list[Record]]] = {}
        source.prefetch((index.files[f], at, min(n, _VALUE_HEAD)) for _, f, at, n, _ in index.values)
        for key, file, offset, length, transforms in index.values:
            _determine_coding({tuple(transforms)}, key)
            path = _look_up_path(index, key)
            try:
                found, sums = _read_value(source, index, path, file, offset, length, bool(transforms))
            except LostBytes:  # only of a damaged checkpoint that is salvaged
                self.lost[path] = _LostLeaf(f"it is in the lost bytes of {index.files[file]}")
                continue
            if key in seen:  # per-rank metadata: every rank stores its own
                if _is_same_value_of_ranks((found, sums), seen[key]):
                    continue
                found = {("extra", *make_per_rank_path(ranks.get(file, file), p)): x for p, x in found.items()}
            seen.setdefault(key, (found, sums))
            self.records.extend(sums)
            for at_path, leaf in found.items():
                self._put(at_path, key, leaf)

    def _put(self, path: Path, key: str, leaf: object) -> None:
        """Add a leaf at a path, which came from a flat key.

        Raises:
            Corrupt: another key has that path already.
        """
        if path in self.leaves:
            raise Corrupt(
                f'.metadata gives "{self.keys[path]}" and "{key}" the same place {joined(path)!r}; one would be lost.',
                code="CKPT0416",
            )
        self.leaves[path], self.keys[path] = leaf, key


def _name_lost_leaves(leaves: Leaves, lost: dict[Path, _LostLeaf]) -> dict[str, str]:
    """Return {canonical name: why it is lost} of leaves that cannot be read, with the names that they would have in an
    undamaged checkpoint.

    Args:
        leaves: {path in the tree: leaf} of what was read.
        lost: {path in the tree: leaf} of what is lost. A leaf that cannot be named otherwise keeps its path, with
            "optim" as first component for the optimizer.
    """
    named: Leaves = {}
    tree = {**leaves, **lost}
    optim = {p for p in tree if ROLES.get(str(p[0])) == "optim"}
    for part in (tree, {p: leaf for p, leaf in tree.items() if p not in optim}):
        try:
            named = canonical(part, shape_of).leaves
            break
        except CkpttoolError:  # an optimizer without the lists of its parameters, mostly
            continue
    names = {id(leaf): joined(p) for p, leaf in named.items()}
    usual = {p: joined(("optim", *p[1:]) if p in optim else p) for p in lost}
    return {names.get(id(leaf), usual[p]): leaf.why for p, leaf in lost.items()}


def _find_unlisted_bytes(source: Source, index: Index, sizes: list[int]) -> tuple[dict[int, int], list[str]]:
    """Find bytes of data files that no item of the index covers. `sizes` are the bytes of each file of the index.

    The writers of torch and of Megatron-Core truncate a file and write items back to back (filesystem.py,
    _write_files_from_queue). Files of safetensors are passed over: their offsets in the index mean nothing.

    Returns:
        ({number of a file: bytes behind its last item}, notes on bytes between items).
    """
    last, covered = [0] * len(sizes), [0] * len(sizes)
    items: Iterable[Iterable[tuple[int, int, int]]] = (
        *(zip(c.file, c.offset, c.length, strict=True) for _, _, _, c in index.tensors),
        (v[1:4] for v in index.values),
        (copy for _, copy in index.copies),
    )
    for file, offset, length in itertools.chain.from_iterable(items):
        last[file] = max(last[file], offset + length)
        covered[file] += length
    odd = [f for f, size in enumerate(sizes) if covered[f] < size and not _is_safetensors(source, index.files[f])]
    between = [f for f in odd if covered[f] < last[f]]
    notes = (
        [
            f"{len(between):,} files have bytes between their items that .metadata does not name, first "
            f"{index.files[between[0]]}"
        ]
        if between
        else []
    )
    return {f: sizes[f] - last[f] for f in odd if last[f] < sizes[f]}, notes


def _read_item_end(source: Source, index: Index, item: Extent) -> bytes:
    """Read the last bytes of an item, at most 1 KiB: of torch.save's, they hold the CRC32s of its records."""
    n = min(item.length, _END)
    return source.read(index.files[item.file], item.offset + item.length - n, n)


def _is_same_value_of_ranks(
    a: tuple[dict[Path, object], list[Record]], b: tuple[dict[Path, object], list[Record]]
) -> bool:
    """Return whether two ranks have the same value under a key. Each value is ({path: leaf}, CRC32s of the tensors in
    it, in order); tensors are compared by their CRC32s and lengths alone."""
    plain = [{p: x for p, x in leaves.items() if not isinstance(x, TensorEntry)} for leaves, _ in (a, b)]
    sums = [[(r.extent.length, r.crc32) for r in records] for _, records in (a, b)]
    return a[0].keys() == b[0].keys() and same_value(*plain) and sums[0] == sums[1]


def _restore_milestone_counters(ckpt: Checkpoint) -> None:
    """Replace milestones of schedulers by the `collections.Counter` in which torch's MultiStepLR looks steps up
    (torch/optim/lr_scheduler.py), in place. DCP has one entry per milestone, scheduler.milestones.30, whose key is
    text."""
    found: dict[Path, dict[int, int]] = {}
    for v in ckpt.values.values():
        *head, key = v.path
        if (
            v.path[0] == "scheduler"
            and head[-1:] == ["milestones"]
            and is_number_text(str(key))
            and type(v.data) is int
        ):
            found.setdefault(tuple(head), {})[int(key)] = v.data
    for path, counts in found.items():
        names = {joined((*path, str(k))) for k in counts}
        if names == {n for n, v in ckpt.values.items() if v.path[: len(path)] == path}:
            ckpt.values = {n: v for n, v in ckpt.values.items() if n not in names}
            counter = Opaque(Global("collections", "Counter"), (dict(sorted(counts.items())),), call=True)
            ckpt.values[joined(path)] = Value(path, counter)


def _refuse_missing_files(source: Source, index: Index) -> None:
    """Raise if data files that .metadata names are missing from the folder.

    Raises:
        Corrupt: with the files, and the names of the tensors and values that were in them.
    """
    gone = {i for i, f in enumerate(index.files) if not source.exists(f)}
    if not gone:
        return
    lost = [joined(_look_up_path(index, key)) for key, _, _, chunks in index.tensors if gone & set(chunks.file)]
    values = [joined(_look_up_path(index, key)) for key, file, *_ in index.values if file in gone]
    files = ", ".join(sorted(index.files[i] for i in gone))
    names = ", ".join(
        [
            *lost[:_NAMED],
            *(["..."] if len(lost) > _NAMED else []),
            *values[:_NAMED],
            *(["..."] if len(values) > _NAMED else []),
        ]
    )
    raise Corrupt(
        f"{source.root}: {files} {'is' if len(gone) == 1 else 'are'} missing. The copy is incomplete; fetch it again. "
        f"In what is missing are parts of {len(lost):,} of {len(index.tensors):,} tensors, and {len(values):,} of "
        f"{len(index.values):,} values: {names}. `ckpttool doctor` says what is whole.",
        code="CKPT0401",
    )


def _look_up_path(index: Index, key: str) -> Path:
    """Return the path of a flat key, by planner_data; (key,) if planner_data does not have it."""
    return tuple(index.paths.get(key) or (key,))


def _determine_coding(kinds: set[tuple[str, ...]], key: str) -> str:
    """Return how the items of a tensor are framed, "torch.save" or "torch.save+zstd"; all must be framed alike.

    Args:
        kinds: the transforms of the files that hold the items, such as ("stream.zstd",); () is none.
        key: flat key of the tensor, for the message.

    Raises:
        Unsupported: they are framed in several ways, or in an unknown one.
    """
    if kinds == {()}:
        return "torch.save"
    if len(kinds) == 1 and next(iter(kinds))[0].partition("/")[0] == "stream.zstd" and len(next(iter(kinds))) == 1:
        return "torch.save+zstd"
    raise Unsupported(f'"{key}" went through {sorted(kinds)}; ckpttool knows stream.zstd only.', code="CKPT0329")


def _read_value(
    source: Source, index: Index, path: Path, file: int, offset: int, length: int, zstd: bool
) -> tuple[dict[Path, object], list[Record]]:
    """Read a bytes item.

    Args:
        source: the folder.
        index: its index, for the names of files.
        path: path of the value. A plain value is one leaf at that path; a value with tensors in it has its leaves
            below.
        file: number of the file.
        offset: where the item begins, in bytes.
        length: its bytes in the file.
        zstd: whether it is one zstd frame.

    Returns:
        ({path: leaf}, the CRC32s of the tensors in the value).

    Raises:
        Corrupt: it is cut off or damaged. Unsafe: its pickle would run code. Unsupported: it is larger than 256 MiB.
    """
    name = index.files[file]
    what = f"{source.root}/{name} at byte {offset}"
    if length > _VALUE_BYTES:
        raise Unsupported(f"{what}: a value of {length} bytes.")
    if offset + length > source.size(name):
        raise Corrupt(
            f"{what}: needs {length} bytes but the file ends at {source.size(name)}; fetch the file again.",
            code="CKPT0403",
        )
    if zstd:
        import zstandard

        packed = source.read(name, offset, length)
        try:
            data = zstandard.ZstdDecompressor(max_window_size=128 << 20).stream_reader(packed).read(_VALUE_BYTES)
        except zstandard.ZstdError as e:
            raise Corrupt(f"{what}: the zstd frame is damaged ({e}).", code="CKPT0405") from None

        def unpacked(at: int, n: int) -> bytes:
            return data[at : at + n]

        return {path: stored_tensors.inline_tensors(torch_zip.read(unpacked, 0, len(data), what), unpacked, what)}, []
    head = source.read(name, offset, min(length, _VALUE_HEAD))
    read_at = make_item_reader(source.reader_of(name), offset, length, head, b"")
    tree = torch_zip.read(read_at, offset, length, what)
    if next(stored_tensors.iter_tensors(tree, what), None) is None:
        return {path: tree}, []
    return stored_tensors.read_leaves(tree, path, file, read_at, what)


# -------------------------------------------------------------------------------------------------------- locating


def locate(ckpt: Checkpoint, source: Source) -> Checkpoint:
    """Return the index with raw byte ranges: the zip of every item is parsed and must agree with .metadata. In a store
    most items are parsed only when they are read (`Items.assume`).

    Raises:
        Corrupt: an item is cut off, overwritten, of another dtype or shape, or shares its bytes with another.
        Unsafe: its pickle would run code. Unsupported: it is of a kind that ckpttool does not read.
    """
    tensors: dict[str, TensorEntry] = {}
    values = dict(ckpt.values)
    items = Items(source, ckpt.files)
    items.records.extend(ckpt.records)
    headers: dict[int, dict[str, safetensors_header.Slot] | None] = {}
    plain = {n: t for n, t in ckpt.tensors.items() if t.coding == "torch.save"}
    if source.proves_later:  # in a store
        files = sorted({f for t in plain.values() for f in t.chunks.file})
        source.prefetch((ckpt.files[f], 0, min(9, source.size(ckpt.files[f]))) for f in files)
        headers = {f: _read_safetensors_slots(source, ckpt.files[f]) for f in files}
        items.assume({n: t for n, t in plain.items() if all(headers[f] is None for f in set(t.chunks.file))})
    else:
        source.prefetch(list_item_ends(plain.values(), ckpt.files))
    for name, t in ckpt.tensors.items():
        if t.coding == "raw":
            tensors[name] = t
            continue
        for file in set(t.chunks.file):
            if file not in headers:
                headers[file] = _read_safetensors_slots(source, ckpt.files[file])
        if not any(headers[file] is not None for file in set(t.chunks.file)):
            try:
                chunks = items.locate(name, t)
            except SubclassFound:  # a small one, longer than the tensor that it shows
                found_object = read_subclass_object(source, ckpt.files, ckpt.sizes, t, items.records)
                for path, leaf in found_object.leaves().items() if found_object else ():
                    if isinstance(leaf, TensorEntry):
                        tensors[joined(path)] = leaf
                    else:
                        values[joined(path)] = Value(path, leaf)
                continue
        else:
            chunks = Chunks(t.chunks.ndim)
            for k, c in enumerate(t.chunks):
                slots = headers[c.extent.file]
                if slots is not None:
                    found = _locate_chunk_in_slots(slots, name, t, c, ckpt.files[c.extent.file])
                else:
                    found = items.locate(name, replace(t, chunks=Chunks.of(t.chunks.ndim, t.chunks[k : k + 1])))[0]
                chunks.add(*found[:2], *found.extent, strides=found.strides, zstd=found.zstd)
        tensors[name] = replace(t, chunks=chunks, coding="raw", wrapper=items.wrappers.get(name, ""))
    _refuse_overlapping_chunks(ckpt, tensors)
    return replace(ckpt, tensors=tensors, values=values, records=items.records)


def _read_safetensors_slots(source: Source, file: str) -> dict[str, safetensors_header.Slot] | None:
    """Return {name: slot (dtype, shape, offset, length)} of a safetensors file; None if the file is no safetensors
    file."""
    return safetensors_header.read_slots(source, file) if _is_safetensors(source, file) else None


def _is_safetensors(source: Source, file: str) -> bool:
    """Return whether a file begins as a safetensors file."""
    head = source.read(file, 0, min(9, source.size(file)))
    return len(head) == 9 and head[8:] == b"{" and head[:2] != b"PK"


def _locate_chunk_in_slots(
    slots: dict[str, safetensors_header.Slot], name: str, t: TensorEntry, c: Chunk, file: str
) -> Chunk:
    """Return chunk `c` of a tensor with its byte range in a safetensors file.

    Args:
        slots: {name: slot} of the header of that file.
        name: name of the tensor; the file may have it without the first component of the name ("model.").
        t: the tensor, by .metadata.
        c: the chunk.
        file: name of the file, for messages.

    Raises:
        Corrupt: it is not in the file, or has another dtype or shape there than in .metadata.
    """
    for key in (name, name.partition(".")[2]):
        slot = slots.get(key)
        if slot is not None:
            break
    else:
        raise Corrupt(f'{file}: "{name}" is not in this safetensors file.', code="CKPT0412")
    if slot.dtype != t.dtype or slot.shape != c.shape:
        raise Corrupt(
            f'{file}: "{name}" is {slot.dtype} {slot.shape} there, {t.dtype} {c.shape} in .metadata.', code="CKPT0412"
        )
    return c._replace(extent=Extent(c.extent.file, slot.offset, slot.length))


def _refuse_overlapping_chunks(ckpt: Checkpoint, tensors: dict[str, TensorEntry]) -> None:
    """Raise if byte ranges of two chunks of `tensors` overlap: DCP writes every chunk separately.

    Raises:
        Corrupt: with the first two such chunks.
    """
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
                    f'{ckpt.files[file]}: "{first}" and "{second}" both claim the bytes from {b}. The index is '
                    "damaged; take another copy.",
                    code="CKPT0408",
                )


def _describe_next_step(advice: Advice) -> str:
    """Return advice on what to do with the folder: that of the trainer whose key layout it has; otherwise the commands
    for an adapter, or for torch and transformers."""
    if (trainer := find_by_trainer(advice.ckpt.trainer)) is not None:
        return trainer.program.next_step(advice)
    if advice.adapter is not None:
        return advice.extract_adapter()
    model = advice.convert("--to hf --config MODEL")
    return f"torch.distributed.checkpoint reads it at any world size; for transformers: {model}"


def lacks_index(names: Sequence[str]) -> bool:
    """Return whether file names in a folder are those of an interrupted save: data files or `.metadata.tmp`, and no
    `.metadata`."""
    begun = any(n.endswith(".distcp") for n in names) or ".metadata.tmp" in names
    return begun and not any(map(_INDEX.fullmatch, names))


def _find_unfinished_save(folder: SeenFolder) -> Unfinished | None:
    """Return the evidence that a save did not finish, the missing .metadata; None if it is there or the folder is not
    DCP."""
    return Unfinished("no .metadata, which is written last") if lacks_index(folder.names) else None


def _is_model_export(source: Source) -> bool:
    """Return whether a folder holds a model and nothing else, as torchtitan exports it at its last step. One that
    cannot be read is no export."""
    try:
        index = read(Place(source, None), ReadOptions())
    except CkpttoolError:
        return False
    return {index.component(n) for n in (*index.tensors, *index.values)} == {"model"}


#: An index of a folder, or of one rank.
_INDEX = re.compile(r"(__\d+)?\.metadata")
_FILES = re.compile(r"(?s)(__\d+)?\.metadata(\.tmp)?|.*\.distcp")
#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS = {
    "readme-layouts": (
        (
            "**dcp**",
            "`torch.distributed.checkpoint` folder",
            "FSDP2, HSDP, tensor parallel; torchtitan, Lightning, Accelerate; zstd and safetensors items",
            "everything",
        ),
    ),
    "readme-trainers": (
        (
            "[your loop](docs/how-to/trainers/torch.md) (**dcp**, **full**, **script**, **script_dcp**)",
            "`dcp.save`, `torch.save`; `model.pt` next to `optimizer.pt`",
            "yes",
            "yes",
            "yes",
            "yes",
        ),
    ),
    "layouts": (
        (
            "**dcp**",
            (
                "everything `torch.distributed.checkpoint` writes: several files per rank, one file per tensor, one "
                "`.metadata` per rank, `stream.zstd` items, safetensors items; FSDP2, HSDP, tensor parallel, "
                "replicated tensors, empty shards, flat or raw optimizer state"
            ),
            (
                "one data file per rank with exactly what that rank of an FSDP2 job reads, or a rank of the mesh that "
                "`--mesh` names; `.metadata` last; the same bytes for the same state"
            ),
        ),
    ),
    "directories": (
        (
            "AReaL's DCP folder, everything under the key `dcp`",
            "`dcp`",
            "weights, optimizer; `dcp` and `full` keep the key",
        ),
    ),
    "for": (
        (
            "a `dcp` folder with `model`, `optim`, `scheduler`",
            "`dcp.load` and `set_state_dict`",
        ),
    ),
    "resumed": (
        (
            "your own loop with DCP",
            "yes",
            "yes, any world size",
            "yes",
            "yes",
            "if your loop saves it",
            "if your loop saves it",
        ),
    ),
}
LAYOUTS = (
    Layout(
        name="dcp",
        title="torch.distributed.checkpoint folder",
        detect=detect,
        read=read,
        locate=locate,
        write=late("ckpttool.converters.dcp.write_dcp:write"),
        aliases=("distcp", "fsdp", "fsdp2", "torch-dcp"),
        options=MeshOptions,
        own_keys=True,
        reader_uses=("config", "like"),
        writer_uses=("world_size",),
        keeps_subclasses=True,
        refuses_numbers=True,
        sharding="fsdp2",
        program=Program(
            rows=_ROWS,
            next_step=_describe_next_step,
            without_weights=", or move this folder and that of the weights into one",
            is_piece=lambda source, name: _FILES.fullmatch(name) is not None,
            unfinished=_find_unfinished_save,
            is_export=_is_model_export,
            resumed_by=(ForTrainer("torch", "a loop of your own, with dcp.load", canonical_keys=True),),
        ),
    ),
)
