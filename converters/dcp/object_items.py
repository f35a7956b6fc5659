"""Objects of tensor subclasses in dcp (torchao's optimizer states and quantised weights): read, cut among ranks,
written.

.metadata lists such an object as the dense tensor that it shows (float32, its shape), and every rank's item is a
torch.save file of the object that the rank had: the call that puts it together, and one storage for each tensor inside.
`joined` makes one `Composite` of the parts (index/composites.py has the rules); `Parts` are the items that ranks of
another number shall read.

Sources: torch/distributed/checkpoint/{filesystem,planner_helpers}.py of torch 2.13; torchao 0.18, optim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from operator import lt
from typing import Any, NamedTuple

from ckpttool.errors import Corrupt, Unsupported, argument
from ckpttool.formats import subclasses, torch_zip, zip_bytes
from ckpttool.formats.pickles import Opaque
from ckpttool.formats.stored_tensors import StoredTensor
from ckpttool.formats.torch_pickles import TensorRef
from ckpttool.formats.torch_zip_writer import make_head_of_tree
from ckpttool.index import boxes, composites
from ckpttool.index.checkpoint import ITEMSIZE, Chunks, Path, TensorEntry, joined
from ckpttool.index.composites import PLAIN, CannotCut, Composite
from ckpttool.index.draft import Written
from ckpttool.index.records import Records
from ckpttool.storage.source import Source

from .items import HEAD, TAIL, make_item_reader

__all__ = ["Parts", "Whole", "divide_object_rows", "has_short_items", "list_item_ends", "read_subclass_object"]

_WORLDS = 64  # world sizes that are tried for a message


def has_short_items(t: TensorEntry) -> bool:
    """Return whether an item of a tensor is shorter than the dense tensor that .metadata lists: it is of a subclass, or
    damaged."""
    c, item = t.chunks, ITEMSIZE.get(t.dtype, 0)
    row = prod(t.shape[1:]) * item
    if t.coding != "torch.save" or (
        c.ndim and c.ndim == len(t.shape) and not any(map(lt, c.length, map(row.__mul__, c.shape[0 :: c.ndim])))
    ):  # by columns, since there may be a million; no chunk is more than its rows
        return False
    return any(n < prod(shape) * item for (_, shape), n in zip(c.boxes(), c.length, strict=True))


def list_item_ends(tensors: Iterable[TensorEntry], files: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield (name of a file, offset, length) of the first `HEAD` and the last `TAIL` bytes of each item of these
    tensors, which parsing it reads; of a short item once, of all its bytes.

    Args:
        tensors: tensors whose chunks are items of a DCP folder.
        files: names of the checkpoint's files, in the order of their numbers.
    """
    for t in tensors:
        for file, offset, length in zip(t.chunks.file, t.chunks.offset, t.chunks.length, strict=True):
            if offset < 0 or length < 0:
                continue  # `check` says so
            yield files[file], offset, min(length, HEAD)
            if length > HEAD:
                yield files[file], offset + length - TAIL, TAIL


class _Part(NamedTuple):
    """What one rank had: its first row, its rows, the value, and the tensors inside with the file they are in."""

    first: int
    rows: int
    about: dict[str, object]
    tensors: dict[str, StoredTensor]
    file: int


def read_subclass_object(
    source: Source, files: Sequence[str], sizes: Sequence[int], t: TensorEntry, records: Records
) -> Composite | None:
    """Return the object of a tensor subclass whose parts are the items of `t`, one part a rank.

    Args:
        source: the folder.
        files: names of its files, by number.
        sizes: their bytes.
        t: the entry in .metadata.
        records: gets the CRC32s of the tensors inside.

    Returns:
        The object; None where the items hold dense tensors, or one is cut off or overwritten, which is found later.

    Raises:
        Corrupt: an item is damaged. Unsupported: the parts cannot be joined; the message names the class.
        Unsafe: a pickle would run code.
    """
    name = joined(t.path)
    parts: list[_Part] = []
    dense: list[tuple[int, int, StoredTensor, int]] = []
    for start, shape, (file, offset, length) in ((c.start, c.shape, c.extent) for c in t.chunks):
        if not 0 <= file < len(files) or offset < 0 or offset + length > sizes[file]:
            return None  # `check` says so
        what = f'{source.root}/{files[file]} at byte {offset} ("{name}")'
        if not zip_bytes.is_zip(source.read(files[file], offset, min(length, 4))):
            return None  # overwritten, or something else: `check` says that it is too short
        found: Any = _read_item(source, files[file], offset, length, what)
        if not isinstance(found, Opaque) or not subclasses.is_subclass(found):
            if isinstance(found, StoredTensor) and found.shape == shape and found.numel:
                dense.append((start[0] if start else 0, shape[0] if shape else 1, found, file))
            continue
        about, inside = subclasses.split_subclass(found, StoredTensor, what)
        if (about["dtype"], tuple(about["shape"])) != (t.dtype, shape):
            raise Corrupt(
                f"{what}: holds a {composites.class_label(about)} of {about['dtype']} {about['shape']}, .metadata says "
                f"{t.dtype} {list(shape)}.",
                code="CKPT0412",
            )
        if shape[1:] != t.shape[1:]:
            raise _make_join_error(
                name, about, f"a rank has columns {start[1]} to {start[1] + shape[1]} of it, and blocks run along rows"
            )
        parts.append(_Part(start[0] if start else 0, shape[0] if shape else 1, about, inside, file))
    if not parts:
        return None
    about = parts[0].about
    parts.sort(key=lambda p: p.first)
    try:
        return (
            _join_mixed(t, parts, sorted(dense, key=lambda d: d[0]), records)
            if dense
            else _join_parts(t, parts, records)
        )
    except CannotCut as e:
        raise _make_join_error(name, about, str(e)) from None


def _read_item(source: Source, file: str, offset: int, length: int, what: str) -> object:
    """Read the object in the item at `offset` of a file. The first and last bytes of a large item are read before the
    rest. `what` names it in messages."""
    head = source.read(file, offset, min(length, HEAD))
    tail = source.read(file, offset + length - TAIL, TAIL) if length > HEAD else head
    read_at = make_item_reader(source.reader_of(file), offset, length, head, tail)
    return torch_zip.read(read_at, offset, length, what)


def _make_join_error(name: str, about: Mapping[str, object], why: str) -> Unsupported:
    """Return the error for an object whose parts cannot be joined.

    Args:
        name: name of its entry.
        about: description of the object, with its class.
        why: end of the message.
    """
    return Unsupported(
        f'"{name}" is a {composites.class_label(about)}, and its parts cannot be put together: {why}. '
        f"{argument('only', ['model'])} leaves the optimizer out.",
        code="CKPT0319",
    )


def _join_parts(t: TensorEntry, parts: list[_Part], records: Records) -> Composite:
    """Join the parts of one object that ranks saved. The CRC32s of its tensors are added to `records`.

    Raises:
        CannotCut: the parts differ where they must be equal, or do not make up the complete object.
    """
    total = t.shape[0] if t.shape else 1
    about = composites.resize_rows(parts[0].about, total)
    if len(parts) > 1 and composites.has_padded_scales(about) and len({p.rows for p in parts}) > 1:
        raise CannotCut(f"its scales are padded for parts of {', '.join(str(p.rows) for p in parts)} rows")
    for p in parts[1:]:
        if composites.resize_rows(p.about, total) != about:
            raise CannotCut("the ranks do not agree about its attributes")
    tensors: dict[str, TensorEntry] = {}
    for name in about["tensors"]:
        stored = [p.tensors[name] for p in parts]
        path: Path = (*t.path, *name.split("."))
        first = stored[0]
        if len(parts) == 1 or composites.is_replicated(about, name):
            _refuse_unequal_copies(name, stored)
            stored, whole = stored[:1], first.shape
        elif not first.shape:
            raise CannotCut(f'"{name}" is one number for all of its {total} rows')
        else:
            whole = (sum(s.shape[0] for s in stored), *first.shape[1:])
        chunks, at = Chunks(len(whole)), 0
        for s, p in zip(stored, parts, strict=False):
            if len(stored) > 1:
                here = composites.find_inner_rows(about, name, whole, p.first, p.rows)
                if (s.dtype, s.shape[1:], here) != (first.dtype, whole[1:], (at, s.shape[0])):
                    raise CannotCut(f'"{name}" is {s.dtype} {list(s.shape)} in a part of {p.rows} of {total} rows')
            chunks.add(
                (at, *(0 for _ in whole[1:]))[: len(whole)],
                s.shape,
                p.file,
                *s.extent,
                None if s.contiguous else s.strides,
            )
            at += s.shape[0] if s.shape else 0
            records += s.storage.records(p.file)
        tensors[name] = TensorEntry(first.dtype, whole, path, chunks)
    if len(parts) > 1 and composites.has_padded_scales(about):
        about["parts"] = [[p.first, p.rows, True] for p in parts]
    return Composite(t.path, about, tensors)


def _join_mixed(
    t: TensorEntry, parts: list[_Part], dense: list[tuple[int, int, StoredTensor, int]], records: Records
) -> Composite:
    """Join the parts of an object of which some ranks have plain tensors.

    Args:
        t: the entry in .metadata.
        parts: the parts that are objects, by first row.
        dense: the parts that are plain tensors, by first row: (first row, rows, tensor, number of its file).
        records: gets the CRC32s of the tensors.

    Raises:
        CannotCut: they do not make up the complete object.
    """
    rows, moved = 0, []
    for p in parts:
        moved.append(p._replace(first=rows))
        rows += p.rows
    of_objects = _join_parts(replace(t, shape=(rows, *t.shape[1:])), moved, records)
    plain = sum(n for _, n, _, _ in dense)
    chunks, at = Chunks(len(t.shape)), 0
    for _, n, s, file in dense:
        if (s.dtype, s.shape[1:]) != (dense[0][2].dtype, t.shape[1:]):
            raise CannotCut(f"its plain parts are {dense[0][2].dtype} and {s.dtype} {list(s.shape)}")
        chunks.add((at, *(0 for _ in t.shape[1:])), s.shape, file, *s.extent, None if s.contiguous else s.strides)
        at += n
        records += s.storage.records(file)
    entry = TensorEntry(dense[0][2].dtype, (plain, *t.shape[1:]), (*t.path, PLAIN), chunks)
    order = sorted([[p.first, p.rows, True] for p in parts] + [[first, n, False] for first, n, _, _ in dense])
    about = {**of_objects.about, "shape": list(t.shape), "tensors": [*of_objects.tensors, PLAIN], "parts": order}
    return Composite(t.path, about, {**of_objects.tensors, PLAIN: entry})


def _refuse_unequal_copies(name: str, stored: list[StoredTensor]) -> None:
    """Raise if ranks have unequal copies of a tensor that all parts of an object share, such as a scale.

    Args:
        name: its name inside the object.
        stored: the copies, by rank.

    Raises:
        CannotCut: they differ, or have no CRC32 to compare.
    """
    sums = {(s.dtype, s.shape, s.storage.crc32, s.at) for s in stored}
    if len(sums) > 1 or (len(stored) > 1 and stored[0].storage.crc32 is None):
        raise CannotCut(f'"{name}", which is one for the whole tensor, differs between ranks')


# --------------------------------------------------------------------------------------------------------- writing


def divide_object_rows(found: Composite, world: int) -> list[int]:
    """Return how many rows of an object each of `world` ranks gets, by rank.

    Raises:
        Unsupported: a cut is inside a quantisation block; with the numbers and the world sizes that cut none.
    """
    rows = found.shape[0]
    sizes = boxes.chunk_sizes(rows, world)
    try:
        composites.check_cut(found, sizes)
    except CannotCut as e:
        of_optimizer = found.path[0] == "optim"
        fits = [n for n in range(1, _WORLDS + 1) if _fits_blocks(found, boxes.chunk_sizes(rows, n))]
        raise Unsupported(
            f'"{joined(found.path)}" is a {composites.class_label(found.about)}, which {world} ranks cannot divide: '
            f"{e}. "
            f"It fits {argument('world_size')} {', '.join(map(str, fits[:8]))}{', ...' if len(fits) > 8 else ''}."
            + (
                f" {argument('dequantize', ['optim.*'])} writes plain numbers, which any number of ranks can divide."
                if of_optimizer
                else ""
            ),
            code="CKPT0319",
        ) from None
    return sizes


def _fits_blocks(found: Composite, sizes: list[int]) -> bool:
    """Return whether rows of these sizes can be cut between the blocks of an object."""
    try:
        composites.check_cut(found, sizes)
    except CannotCut:
        return False
    return True


class _Frame(NamedTuple):
    """An item around its storages: `heads` are the bytes before each, `records` the entries of the small files in the
    zip."""

    heads: list[bytes]
    records: list[tuple[str, int, int, int, bool]]  # (name, position, bytes, CRC32, described)
    sizes: list[int]  # of the storages
    at: list[int]  # where each begins, in the item
    length: int

    def end(self, crcs: Sequence[int]) -> bytes:
        """Return the zip's directory, which ends the item, with the CRC32 of each storage."""
        n = len(self.sizes)
        rows = [(r[0], r[1], r[2], c, True) for r, c in zip(self.records[-n:], crcs, strict=True)]
        start = self.at[-1] + self.sizes[-1] + zip_bytes.DATA_DESCRIPTOR_BYTES
        return zip_bytes.make_central_directory([*self.records[:-n], *rows], start)


def _make_object_frame(found: Composite, about: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> _Frame:
    """Return the bytes around the storages of an item that holds a part of an object.

    Args:
        found: the object, for the names and dtypes of its tensors.
        about: description of the part that is written.
        shapes: {name inside the object: shape of that tensor in the part}.
    """
    names = list(found.tensors)
    sizes = [prod(shapes[n]) * ITEMSIZE[found.tensors[n].dtype] for n in names]
    refs = {n: TensorRef(found.tensors[n].dtype, shapes[n], str(i), prod(shapes[n])) for i, n in enumerate(names)}
    return _make_frame(subclasses.make_rebuild_call(about, refs), sizes)


def _make_frame(tree: object, sizes: list[int]) -> _Frame:
    """Return the bytes around the storages of an item. The item holds a tree whose tensors are `TensorRef`s, or
    `Inline` inside of values; storage i has `sizes[i]` bytes."""
    pieces, records = make_head_of_tree("archive", tree, len(sizes))
    head, heads = b"".join(pieces), []
    at = len(head)
    places = []
    for i, n in enumerate(sizes):
        header = zip_bytes.make_local_header(f"archive/data/{i}", n, None, at, 64)
        records.append((f"archive/data/{i}", at, n, 0, True))
        heads.append(head + header if i == 0 else header)
        places.append(at + len(header))
        at = places[-1] + n + zip_bytes.DATA_DESCRIPTOR_BYTES
    out = _Frame(heads, records, sizes, places, 0)
    return out._replace(length=at + len(out.end([0] * len(sizes))))


class Whole:
    """An object that is one item, although it has tensors inside: a tree of dicts and lists whose tensors are
    `TensorEntry`."""

    def __init__(self, tree: object) -> None:
        self.tree = tree

    def mapped(self, f: Callable[[TensorEntry], object]) -> object:
        """Return a copy of the tree in which every tensor is replaced by what `f` returns for it, called in order."""

        def one(x: object) -> object:
            if isinstance(x, TensorEntry):
                return f(x)
            if isinstance(x, dict):
                return {k: one(v) for k, v in x.items()}
            return [one(v) for v in x] if isinstance(x, list) else x

        return one(self.tree)

    def tensors(self) -> list[TensorEntry]:
        """List the tensors inside, in the order of the tree."""
        out: list[TensorEntry] = []
        self.mapped(out.append)
        return out


class Parts:
    """The items of the objects of a draft: which part each rank gets, and the bytes around the tensors inside."""

    def __init__(self, plain_frame: Callable[[str, tuple[int, ...]], tuple[int, int]]) -> None:
        """Start without objects. `plain_frame` returns, for a dtype and shape, the number of bytes before and behind
        the payload in an item of a plain tensor."""
        self.plain_frame = plain_frame  # (dtype, shape) -> bytes before and behind a plain tensor
        self.frames: dict[tuple[str, int], tuple[_Frame, int]] = {}  # {(entry, file): its item, which storage of it}
        self.logical: dict[
            str, tuple[TensorEntry, list[tuple[int, int, int]]]
        ] = {}  # first entry: tensor, places of items
        self.inside: set[str] = set()  # entries in items that are framed here
        self.placed: set[str] = set()  # all entries of objects

    def place(self, found: Composite, sizes: list[int], at: list[int]) -> dict[str, TensorEntry]:
        """Place the items of an object in the ranks' files.

        Args:
            found: the object.
            sizes: its rows by rank; empty: rank 0 gets all of it.
            at: size of each rank's file so far, in bytes; updated in place.

        Returns:
            {name: entry to write} of the tensors inside, including the copies on later ranks of tensors that all parts
                share.
        """
        whole = composites.without_plain_rows(found)
        ranks = [(r, n) for r, n in enumerate(sizes) if n] or [(0, found.shape[0] if found.shape else 1)]
        plain = {first for first, _, quantised in found.about.get("parts", ()) if not quantised}
        chunks = {n: Chunks(len(t.shape)) for n, t in found.tensors.items()}
        copies: dict[str, dict[str, TensorEntry]] = {}
        box = Chunks(len(found.shape))
        places: list[tuple[int, int, int]] = []
        first = of_objects = of_plain = 0  # rows so far
        for r, rows in ranks:
            if first in plain:
                t = found.tensors[PLAIN]
                shape = (rows, *t.shape[1:])
                before, after = self.plain_frame(t.dtype, shape)
                nbytes = prod(shape) * ITEMSIZE[t.dtype]
                chunks[PLAIN].add((of_plain, *(0 for _ in shape[1:])), shape, r, at[r] + before, nbytes)
                length = before + nbytes + after
                of_plain += rows
            else:
                length = self._place_part(whole, (of_objects, rows), r, at[r], chunks, copies)
                of_objects += rows
            start: tuple[int, ...] = (first, *(0 for _ in found.shape[1:]))
            box.add(start[: len(found.shape)], (rows, *found.shape[1:])[: len(found.shape)], r, 0, 0)
            places.append((r, at[r], length))
            at[r] += length
            first += rows
        out: dict[str, TensorEntry] = {}
        for n, t in found.tensors.items():
            out[joined(t.path)] = replace(t, chunks=chunks[n], coding="raw")
            out |= copies.get(n, {})
        self.placed |= set(out)
        self.inside |= {name for name in out if name != joined((*found.path, PLAIN)) or PLAIN in whole.tensors}
        self.logical[next(iter(out))] = TensorEntry(found.dtype, found.shape, found.path, box), places
        return out

    def _place_part(
        self,
        whole: Composite,
        part: tuple[int, int],
        r: int,
        at: int,
        chunks: dict[str, Chunks],
        copies: dict[str, dict[str, TensorEntry]],
    ) -> int:
        """Place the part of an object that one rank gets, and return the bytes of its item.

        Args:
            whole: the object, without rows that are plain.
            part: (first row, rows).
            r: the rank.
            at: offset in its file at which the item begins.
            chunks: {name inside the object: its chunks}; gets those of this part.
            copies: {name inside: {entry: tensor}}; gets this part's copies of tensors that all parts share.
        """
        cuts = {n: composites.find_inner_rows(whole.about, n, t.shape, *part) for n, t in whole.tensors.items()}
        shapes = {n: t.shape if (c := cuts[n]) is None else (c[1], *t.shape[1:]) for n, t in whole.tensors.items()}
        about = composites.resize_rows(whole.about, part[1]) if whole.shape else whole.about
        frame = _make_object_frame(whole, about, shapes)
        for i, (n, t) in enumerate(whole.tensors.items()):
            name, where, row = joined(t.path), at + frame.at[i], cuts[n]
            if row is None and len(chunks[n]):
                copy = replace(t, chunks=Chunks.whole(t.shape, r, where, t.nbytes), path=("replica", r, *t.path))
                name = joined(copy.path)
                copies.setdefault(n, {})[name] = copy
            else:
                start = (0,) * len(t.shape) if row is None else (row[0], *(0 for _ in t.shape[1:]))
                chunks[n].add(start, shapes[n], r, where, frame.sizes[i])
            self.frames[name, r] = frame, i
        return frame.length

    def place_whole(self, whole: Whole, at: list[int]) -> tuple[dict[str, TensorEntry], int, int]:
        """Place an object that is one item in rank 0's file. `at[0]`, the size of that file so far, is updated.

        Returns:
            ({name: entry to write} of the tensors inside, offset of the item, its bytes).
        """
        inside = whole.tensors()
        refs = iter(TensorRef(t.dtype, t.shape, str(i), t.numel) for i, t in enumerate(inside))
        frame = _make_frame(whole.mapped(lambda t: next(refs)), [t.nbytes for t in inside])
        out = {}
        for i, t in enumerate(inside):
            name = joined(t.path)
            out[name] = replace(t, chunks=Chunks.whole(t.shape, 0, at[0] + frame.at[i], t.nbytes), coding="raw")
            self.frames[name, 0] = frame, i
        self.inside |= set(out)
        self.placed |= set(out)
        at[0] += frame.length
        return out, at[0] - frame.length, frame.length

    def before(self, name: str, file: int) -> bytes:
        """Return the bytes that precede tensor `name` in its item, which is in file number `file`."""
        frame, i = self.frames[name, file]
        return frame.heads[i]

    def after(self, name: str, file: int, written: Sequence[Written]) -> bytes:
        """Return the bytes that follow tensor `name` in its item: a data descriptor, and after the last tensor the
        zip's directory.

        Args:
            name: name of the entry.
            file: number of the file it is in.
            written: what was written so far; the last ones are the item's tensors, with their CRC32s.
        """
        frame, i = self.frames[name, file]
        out = zip_bytes.make_data_descriptor(frame.sizes[i], written[-1][2])
        return out + frame.end([w[2] for w in written[-i - 1 :]]) if i == len(frame.sizes) - 1 else out

    def tensors(
        self, tensors: Mapping[str, TensorEntry]
    ) -> Iterator[tuple[str, TensorEntry, list[tuple[int, int, int]] | None]]:
        """Yield (name, tensor, its items) as .metadata lists them. An object is yielded once, as the dense tensor that
        it stands for, under the name of its first tensor.

        Items are [(number of the file, offset, bytes)], one per chunk; None for a plain tensor, whose items follow from
        its chunks.
        """
        for name, t in tensors.items():
            if name in self.logical:
                yield name, *self.logical[name]
            elif name not in self.placed:
                yield name, t, None
