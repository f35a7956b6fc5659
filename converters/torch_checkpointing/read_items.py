"""The index of a folder of torch_checkpointing; the package says what is in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpttool import bounded_json
from ckpttool.errors import Corrupt, Unsafe, Unsupported, argument
from ckpttool.formats import safetensors_header, stored_tensors
from ckpttool.formats.pickles import short
from ckpttool.formats.sharded import get_local_tensor, is_sharded
from ckpttool.formats.stored_tensors import Storage, StoredTensor
from ckpttool.formats.subclasses import is_subclass, split_subclass
from ckpttool.index import boxes
from ckpttool.index.checkpoint import (
    ITEMSIZE,
    Checkpoint,
    Chunks,
    Leaves,
    Path,
    TensorEntry,
    joined,
    make_per_rank_path,
    same_value,
)
from ckpttool.index.composites import class_label
from ckpttool.index.names import ROLES
from ckpttool.index.records import Records
from ckpttool.layouts import Place, ReadOptions, checkpoint_of, name_leaves
from ckpttool.printable import list_first
from ckpttool.storage.source import Source

from ..rank_files import (
    Files,
    Rank,
    assemble_tensor,
    compare_replicas,
    describe_lacking_entries,
    load_rank_file,
    merge_other_state,
    record_other_copies,
    refuse_incomplete_tensor,
)
from .filenames import FILE, METADATA
from .item_metadata import Item, Placed, read_metadata

__all__ = ["read"]

_MOST_RAW, _MOST_JSON = 64 << 20, 256 << 20
_Boxes = dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, StoredTensor]]  # (start, shape): (file, tensor)


def read(where: Place, options: ReadOptions) -> Checkpoint:
    """Return the index of a folder.

    Raises:
        Corrupt: files of ranks are missing, or they and metadata.pkl are from different saves.
        Unsafe: a pickle would run code.
        Unsupported: it is not known which parts of a whole the plain tensors of several ranks are, or there is an
            object of a tensor subclass.
    """
    source = where.source
    world, described = read_metadata(source) if source.exists(METADATA) else (None, {})
    items = _find_items(source, world, described, options.only)
    if world is None:
        world = max((len(item.files) for item in items.values()), default=1)
    reading = _Reading(source, world, options, Files(source))
    source.prefetch_ends(f for item in items.values() for f, kind in item.files.values() if kind == "pt")
    leaves: Leaves = {}
    for name in sorted(
        items, key=lambda n: ("model", "optim").index(r) if (r := ROLES.get(n)) in ("model", "optim") else 2
    ):
        leaves |= reading.read_item(name, items[name], leaves)
    named = name_leaves(leaves, options)
    files = reading.files
    if described:
        files.number(METADATA)
    out = checkpoint_of(named, "torch_checkpointing", source.root, world, files.names, source)
    out.records, out.ranks = Records(files.records.values()), reading.ranks
    out.notes += files.notes
    record_other_copies(files.unlike, out)
    return out


def _is_item_needed(item: str, only: frozenset[str] | None) -> bool:
    """Return whether an item, such as "model" or "optimizer", must be read for the components `only`; None: for all of
    them.

    The model always must be, since it names the parameters of an optimizer.
    """
    role = ROLES.get(item)
    return only is None or role == "model" or (role in only if role else bool(only - {"model", "optim"}))


def _find_items(
    source: Source, world: int | None, described: Mapping[str, Item], only: frozenset[str] | None
) -> dict[str, Item]:
    """Return {name: item} of the items to read: those in metadata.pkl, and others that the names of files show.

    Args:
        source: the folder.
        world: the number of ranks by metadata.pkl; None if there is no such file.
        described: {name: item} from metadata.pkl.
        only: the components to read; None: all.

    Raises:
        Corrupt: a file of a rank is missing or empty, or two files belong to one rank.
    """
    out = dict(described)
    taken = {file for item in described.values() for file, _ in item.files.values()}
    for name in sorted(set(source.list()) - taken):
        m = FILE.fullmatch(name)
        if m is None or m["item"] in described:
            continue
        kind = m["ext"] if m["ext"] in ("pt", "safetensors", "json") else "raw"
        item = out.setdefault(m["item"], Item())
        other = item.files.setdefault(int(m["rank"]), (name, kind))
        if other[0] != name:
            raise Corrupt(
                f"{source.root}: {other[0]} and {name} both belong to rank {m['rank']}. Remove the one that is not of "
                "this save.",
                code="CKPT0411",
            )
    for name, item in list(out.items()):
        if not _is_item_needed(name, only):
            del out[name]
            continue
        ranks = set(item.files)
        if {kind for _, kind in item.files.values()} == {"raw"} and ranks != set(range(world or len(ranks))):
            del out[name]  # a file that somebody else put there
            continue
        for rank in range(
            max(world or 0, *(r + 1 for r in ranks)) if ROLES.get(name) in ("model", "optim") else max(ranks) + 1
        ):
            file = item.files.get(rank, (f"{name}_{rank}.*", ""))[0]
            if rank not in ranks or not source.exists(file):
                raise Corrupt(
                    f"{source.root} has no {file}, the file of rank {rank}. The copy is incomplete; fetch the files of "
                    "all ranks.",
                    code="CKPT0402",
                )
            if source.size(file) == 0:
                raise Corrupt(
                    f"{source.root}/{file} is empty: the save was interrupted. Take an earlier step.", code="CKPT0404"
                )
    if not out and only is None:
        raise Corrupt(
            f"{source.root} has {METADATA}, which lists no items, and no <item>_<rank>.pt. The copy is incomplete.",
            code="CKPT0401",
        )
    return out


@dataclass
class _Reading:
    source: Source
    world: int
    options: ReadOptions
    files: Files
    ranks: dict[int, int] = field(default_factory=dict)  # {number of a file: its rank}
    _names: dict[int, dict[str, tuple[str, ...]]] = field(default_factory=dict)

    def read_item(self, name: str, item: Item, taken: Mapping[Path, object]) -> dict[Path, object]:
        """Return {path: TensorEntry or value} of an item.

        Args:
            name: the name of the item.
            item: its files, and its tensors by metadata.pkl.
            taken: the leaves of the items read before.

        Raises:
            Corrupt: files of ranks and metadata.pkl are from different saves.
            Unsafe: a pickle would run code.
            Unsupported: it is not known which parts of a whole the ranks' plain tensors are, or one is an object of a
                tensor subclass.
        """
        ranks = [
            Rank(self.files.number(file), rank, self._read_file_tree(file, kind))
            for rank, (file, kind) in sorted(item.files.items())
        ]
        self.ranks |= {r.file: r.rank for r in ranks}
        flat = [stored_tensors.flatten_tree(r.tree) for r in ranks]
        self._refuse_tensor_subclasses(name, ranks, flat)
        in_one = any(kind == "safetensors" for _, kind in item.files.values())  # paths are joined by dots
        sharded = any(is_sharded(x) for leaves in flat for x in leaves.values())
        if not item.tensors and not sharded and ROLES.get(name) not in ("model", "optim"):
            return merge_other_state(self.files, {name: [r._replace(tree={name: r.tree}) for r in ranks]}, taken)
        by_text = [{self._find_metadata_key(item, p): (p, x) for p, x in leaves.items()} for leaves in flat]
        out: dict[Path, object] = {}
        lacking: list[str] = []
        empty = {key for leaves in by_text for key, (_, x) in leaves.items() if x == {}}
        above = {key[:i] for leaves in by_text for key in leaves for i in range(len(key))} if empty else set()
        for key in dict.fromkeys([*(k for leaves in by_text for k in leaves), *item.tensors]):
            column = [(r, *leaves[key]) for r, leaves in zip(ranks, by_text, strict=True) if key in leaves]
            if (
                key in empty and key in above and all(x == {} for _, _, x in column)
            ):  # it is a full dict on another rank
                continue
            path: Path = (name, *(column[0][1] if column and not in_one else key))
            if key in item.tensors:
                out[path] = self._assemble_listed_tensor(
                    path, item.tensors[key], {r.rank: (r, x) for r, _, x in column}
                )
            elif any(is_sharded(x) for _, _, x in column):
                out[path] = assemble_tensor(
                    self.files, [r for r, _, _ in column], joined(path), [x for _, _, x in column]
                )
            elif any(isinstance(x, StoredTensor) for _, _, x in column):
                out[path] = self._read_common_tensor(path, [(r, x) for r, _, x in column])
            else:
                state = ROLES.get(name) in ("model", "optim")
                out |= self._merge_values(path, [(r, x) for r, _, x in column], column[0][0] if state else ranks[0])
                if len(column) < len(ranks) and path in out and (not state or "param_groups" in path):
                    lacking.append(joined(path))
        if lacking:
            self.files.notes.append(describe_lacking_entries(lacking))
        return out

    def _refuse_tensor_subclasses(self, item: str, ranks: list[Rank], flat: list[Leaves]) -> None:
        """Refuse objects of tensor subclasses, since no metadata describes their parts on other ranks.

        Args:
            item: the name of the item.
            ranks: what each rank has of it.
            flat: for each rank, {path: leaf}.

        Raises:
            Unsupported: the error names the class of the first such object.
        """
        for r, leaves in zip(ranks, flat, strict=True):
            for path, x in leaves.items():
                inside = get_local_tensor(x) if is_sharded(x) else x
                if is_subclass(inside):
                    about, _ = split_subclass(inside, StoredTensor, self.files.path(r.file))
                    raise Unsupported(
                        f'{self.files.path(r.file)}: "{item}.{joined(path)}" is a {class_label(about)}, which ckpttool '
                        "reads from dcp and full only. Save it with torch.distributed.checkpoint, or leave the item "
                        "out.",
                        code="CKPT0319",
                    )

    def _read_file_tree(self, file: str, kind: str) -> object:
        """Return the content of a file of the kind "pt", "safetensors", "json" or "raw".

        A safetensors file gives {name: StoredTensor}, a raw one bytes.
        """
        what = f"{self.source.root}/{file}"
        if kind == "pt":
            return load_rank_file(self.files, file)
        if kind == "json":
            return bounded_json.parse(self.source.read_all(file, _MOST_JSON), what)
        if kind == "raw":
            return self.source.read_all(file, _MOST_RAW)
        return {
            name: StoredTensor(s.dtype, s.shape, boxes.strides(s.shape), Storage(None, s.offset, s.length, None), 0)
            for name, s in safetensors_header.read_slots(self.source, file).items()
        }

    def _find_metadata_key(self, item: Item, path: Path) -> tuple[str, ...]:
        """Return the key, a tuple of names, under which metadata.pkl describes the tensor at a path of an item.

        If metadata.pkl does not have the path itself, it is looked up joined by dots, which is all that a safetensors
        file has of it.

        Args:
            item: the item, with its tensors by metadata.pkl.
            path: the path of the leaf in the item's files.
        """
        key = tuple(map(str, path))
        if key in item.tensors or not item.tensors:
            return key
        return self._index_joined_keys(item).get(".".join(key), key)

    def _index_joined_keys(self, item: Item) -> dict[str, tuple[str, ...]]:
        """Return {path joined by dots: path} of an item's tensors in metadata.pkl.

        Raises:
            Unsafe: two paths are equal when they are joined.
        """
        found = self._names.get(id(item))
        if found is None:
            found = self._names[id(item)] = {".".join(k): k for k in item.tensors}
            if len(found) < len(item.tensors):
                raise Unsafe(
                    f"{self.source.root}/{METADATA}: two tensors of an item have one name, joined by dots.",
                    code="CKPT0703",
                )
        return found

    def _assemble_listed_tensor(
        self, path: Path, groups: list[Placed], found: Mapping[int, tuple[Rank, object]]
    ) -> TensorEntry:
        """Assemble a tensor from its ranks' parts as metadata.pkl lists them.

        Args:
            path: the path of the tensor.
            groups: what each group of ranks has of it, by metadata.pkl.
            found: {number of a rank: (rank, what its file holds)}.

        Raises:
            Corrupt: files and metadata contradict one another.
            Unsupported: a checkpoint cannot hold such a placement.
        """
        name, what = joined(path), f"{self.source.root}/{METADATA}"
        shape, dtype = groups[0].shape, groups[0].dtype
        chunks = Chunks(len(shape))
        seen: _Boxes = {}
        for group in groups:
            if (group.shape, group.dtype) != (shape, dtype):
                raise Corrupt(
                    f'{what}: "{name}" is {dtype} {shape} on some ranks and {group.dtype} {group.shape} on others.',
                    code="CKPT0409",
                )
            for rank in group.ranks:
                try:
                    pieces, local = group.pieces(rank)
                except Unsupported as e:
                    raise Unsupported(
                        f'{what}: "{name}" has {e}, which a checkpoint cannot hold.', code="CKPT0319"
                    ) from None
                except (KeyError, TypeError, ValueError, IndexError) as e:
                    raise Corrupt(
                        f'{what}: what it says of "{name}" on rank {rank} does not hold together ({e}).',
                        code="CKPT0406",
                    ) from None
                if rank not in found:
                    if any(all(p.shape) for p in pieces):
                        raise Corrupt(
                            f'{self.source.root}: the file of rank {rank} has no "{name}", which {METADATA} lists. '
                            "They are from different saves.",
                            code="CKPT0409",
                        )
                    continue
                r, x = found[rank]
                tensor = self._unwrap_local_tensor(name, r, x, shape, [p.start for p in pieces if all(p.shape)])
                if tensor.dtype != dtype or (
                    local is not None and tensor.shape != local and any(all(p.shape) for p in pieces)
                ):
                    raise Corrupt(
                        f'{self.files.path(r.file)}: "{name}" is {tensor.dtype} {tensor.shape} there, and {METADATA} '
                        f"leaves this rank {dtype} {local} of {shape}. The file and its metadata are from different "
                        "saves.",
                        code="CKPT0409",
                    )
                for piece in pieces:
                    self._add_box(chunks, seen, name, r, tensor, piece)
        if not shape and not seen:
            raise Corrupt(f'{self.source.root}: no rank has "{name}".', code="CKPT0408")
        refuse_incomplete_tensor(self.source, name, shape, chunks)
        return TensorEntry(dtype, shape, path, chunks)

    def _unwrap_local_tensor(
        self, name: str, r: Rank, x: Any, shape: tuple[int, ...], starts: list[tuple[int, ...]]
    ) -> StoredTensor:
        """Return a rank's local tensor, which the file has as a plain tensor or inside a DTensor.

        Args:
            name: the name of the tensor, for errors.
            r: the rank.
            x: what its file holds.
            shape: the shape of the whole tensor, by metadata.pkl.
            starts: the starts of the rank's boxes in the whole, by metadata.pkl.

        Raises:
            Corrupt: it is not a tensor, or the DTensor has another shape, rank or starts than metadata.pkl.
        """
        if is_sharded(x):
            stated = self.files.shards(r.file, name, x)
            if stated.shape != shape or (stated.rank is not None and stated.rank != r.rank):
                raise Corrupt(
                    f'{self.files.path(r.file)}: "{name}" is of rank {stated.rank} and of shape {stated.shape}; '
                    f"{METADATA} says {r.rank} and {shape}. Files of ranks were exchanged, or are from different "
                    "saves.",
                    code="CKPT0410",
                )
            if [start for start, _ in stated.pieces] != starts:
                raise Corrupt(
                    f'{self.files.path(r.file)}: "{name}" begins at {[list(s) for s, _ in stated.pieces]} there, and '
                    f"{METADATA} says {[list(s) for s in starts]}. The file and its metadata are from different saves.",
                    code="CKPT0409",
                )
            x = get_local_tensor(x)
        if not isinstance(x, StoredTensor):
            raise Corrupt(
                f'{self.files.path(r.file)}: "{name}" is {short(x)} there, and {METADATA} says that it is a tensor.',
                code="CKPT0412",
            )
        return x

    def _add_box(self, chunks: Chunks, seen: _Boxes, name: str, r: Rank, tensor: StoredTensor, piece: Any) -> None:
        """Add a box of a local tensor to `chunks`; if another rank has the same box, the bytes are compared instead.

        Args:
            chunks: the chunks of the whole tensor so far.
            seen: {(start, shape) of a box: (number of a file, the tensor in it)} so far.
            name: the name of the tensor, for errors.
            r: the rank.
            tensor: its local tensor.
            piece: the place of the box in the local tensor and in the whole.

        Raises:
            Corrupt: the box is not inside the local tensor.
        """
        if len(piece.local) != len(tensor.shape) or any(
            a + n > m for a, n, m in zip(piece.local, piece.shape, tensor.shape, strict=True)
        ):
            raise Corrupt(
                f'{self.files.path(r.file)}: "{name}" is {tensor.shape} there, and {METADATA} has a box at '
                f"{piece.local} of {piece.shape}.",
                code="CKPT0412",
            )
        at = tensor.at + ITEMSIZE[tensor.dtype] * sum(a * s for a, s in zip(piece.local, tensor.strides, strict=True))
        part = tensor._replace(shape=piece.shape, at=at)
        first = seen.setdefault((piece.start, piece.shape), (r.file, part))
        if first != (r.file, part):
            compare_replicas(self.files, name, first, (r.file, part))
            return
        self.files.keep(r.file, tensor)
        chunks.add(piece.start, piece.shape, r.file, *part.extent, None if part.contiguous else part.strides)

    def _read_common_tensor(self, path: Path, column: list[tuple[Rank, StoredTensor]]) -> TensorEntry:
        """Return a plain tensor of an item that metadata.pkl does not have: one rank's, or the same on all. `column` is
        what each rank has there.

        With `allow_equal_ranks` the first rank's is read, and a note names the ranks whose bytes are known to differ.

        Raises:
            Corrupt: the first rank has no tensor there.
            Unsupported: dtypes or shapes differ, or a rank has no tensor; or, without `allow_equal_ranks`, the bytes
                differ or have no CRC32 to compare.
        """
        name = joined(path)
        (r, first), *others = column
        if not isinstance(first, StoredTensor):
            raise Corrupt(
                f'{self.files.path(r.file)}: "{name}" is {short(first)} there, and a tensor on other ranks.',
                code="CKPT0412",
            )
        comparable = first.storage.length == first.span and first.storage.crc32 is not None
        different: list[str] = []
        for other, x in others:
            alike = isinstance(x, StoredTensor) and (x.dtype, x.shape) == (first.dtype, first.shape)
            if alike and comparable and x.storage.crc32 == first.storage.crc32:
                continue
            if not alike or not self.options.allow_equal_ranks:
                kinds = "" if alike else f" ({short(x)}, {short(first)})"
                copies = f" If they are copies, use {argument('allow_equal_ranks', True)}: the first rank's are read."
                raise Unsupported(
                    f'{self.files.path(other.file)}: "{name}" differs from that of rank {r.rank}{kinds}, and no '
                    f"{METADATA} says whether they are copies or parts: the item was saved without a resharder."
                    f"{copies if alike else ''}",
                    code="CKPT0325",
                )
            if comparable:
                different.append(f"rank {other.rank}'s")
        if different:
            lost = f"{list_first(different)} {'is' if len(different) == 1 else 'are'} not"
            self.files.notes.append(f"ranks differ in {name}: rank {r.rank}'s is read, {lost}")
        return self.files.entry(r.file, first)

    def _merge_values(self, path: Path, column: list[tuple[Rank, object]], first: Rank) -> dict[Path, object]:
        """Return {path: value} of the first rank's value, and of those of other ranks that differ, below
        extra.per_rank.<rank>.

        Args:
            path: the path of the value.
            column: (rank, its value at that path) of each rank that has one.
            first: the rank whose value has the path; where it has none, all are of other ranks.

        Raises:
            Unsupported: a DTensor is inside a tuple.
        """
        data = []
        for r, x in column:
            if any(is_sharded(y) for y in _list_nested_values(x)):
                raise Unsupported(
                    f'{self.files.path(r.file)}: "{joined(path)}" holds a DTensor inside a tuple, which has no name of '
                    "its own.",
                    code="CKPT0319",
                )
            data.append((r.rank, stored_tensors.inline_tensors(x, self.files.reader(r.file), self.files.path(r.file))))
        out = {path: data[0][1]} if data[0][0] == first.rank else {}
        differ = [(rank, x) for rank, x in data if not out or not same_value(x, out[path])]
        if differ:
            self.files.notes.append(
                f"ranks differ in {joined(path)}: the first rank's is kept under its name, the others' as "
                "extra.per_rank.<rank>"
            )
        return out | {make_per_rank_path(rank, path): x for rank, x in differ}


def _list_nested_values(x: object) -> list[object]:
    """Return a list of a value and all values nested in it."""
    todo, out = [x], []
    while todo:
        out.append(y := todo.pop())
        if isinstance(y, dict):
            todo += y.values()
        elif isinstance(y, (list, tuple)) and not isinstance(y, (StoredTensor, stored_tensors.Inline)):
            todo += y
    return out
