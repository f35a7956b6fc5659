"""Plans torch.save files: their pickles and small records are known, the bytes of their storages come later.

    files = TorchFiles()
    f = files.add("rank0.pt", {"w": TensorRef("float32", (4,), "0", 4)}, {"0": 16})
    files.offset(f, "0")                  where storage "0" begins; chunks of any tensors may be laid into it
    files.draft(checkpoint, sources)      checkpoint.tensors say which

A storage is one stored record of the zip, `<root>/data/<key>`: 64-byte aligned, its CRC32 behind it in a data
descriptor and again in the directory. What no chunk covers is padding, written as zeros. The CRC32 of a record is
put together from those of its chunks and of the padding between, so nothing is read twice and a run that was
interrupted needs no state but the list of chunks written.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from .. import bounded_json
from ..index.checkpoint import Checkpoint, TensorEntry
from ..index.draft import Draft, DraftFile, Dropped, Written
from . import stored_tensors, torch_pickles, zip_bytes
from .crc import crc32, crc32_combine
from .pickle_writer import CommonList
from .pickles import Opaque

__all__ = ["TorchFiles", "make_head_of_tree"]


class _PendingRecord(NamedTuple):
    """A record whose bytes come later: its header's offset, its own, its length."""

    name: str
    header: int
    offset: int
    length: int


class _File(NamedTuple):
    head: list[bytes]
    records: list[tuple[str, int, int, int, bool]]  # directory entries of what is in the head
    holes: list[_PendingRecord]
    places: dict[str, int]
    end: int  # of the last hole, its descriptor included

    @property
    def head_bytes(self) -> int:
        """Return the size of the head in bytes."""
        return sum(map(len, self.head))


@lru_cache(1024)
def _compute_crc_of_zeros(n: int) -> int:
    """Return the CRC32 of `n` zero bytes."""
    if n <= 1 << 16:
        return int(crc32(bytes(n)))
    half = _compute_crc_of_zeros(n // 2)
    return int(crc32_combine(crc32_combine(half, half, n // 2), _compute_crc_of_zeros(n % 2), n % 2))


class TorchFiles:
    """The files of a draft, in the order in which they are to be finished."""

    def __init__(self) -> None:
        self.files: list[_File | bytes] = []
        self.names: list[str] = []
        self.ends: dict[tuple[str, int], int] = {}

    def add(self, name: str, tree: object, storages: Mapping[str, int], root: str = "archive") -> int:
        """Add a file that holds a tree of plain values with `TensorRef` and `Inline` tensors, and return its number.

        Args:
            name: of the file.
            tree: the tree.
            storages: {key: bytes} of the storages that the `TensorRef` refer to, in the order of their records;
                storages of `Inline` tensors are added.
            root: the folder in the zip that all records are in.

        Raises:
            TypeError: an object in the tree is of a type that no checkpoint has.
        """
        head, records = make_head_of_tree(root, tree, len(storages))
        names = {record[0] for record in records}
        if clash := sorted(key for key in storages if f"{root}/data/{key}" in names):
            raise AssertionError(f"{name}: storages are numbered otherwise: {clash}")
        at = sum(map(len, head))
        holes: list[_PendingRecord] = []
        places: dict[str, int] = {}
        for key, n in storages.items():
            record = f"{root}/data/{key}"
            offset = at + len(zip_bytes.make_local_header(record, n, None, at, 64))
            holes.append(_PendingRecord(record, at, offset, n))
            places[key] = offset
            at = offset + n + zip_bytes.DATA_DESCRIPTOR_BYTES
        self.names.append(name)
        self.files.append(_File(head, records, holes, places, at))
        return len(self.files) - 1

    def literal(self, name: str, data: bytes) -> int:
        """Add a file whose bytes are all known, and return its number."""
        self.names.append(name)
        self.files.append(data)
        return len(self.files) - 1

    def offset(self, file: int, key: str) -> int:
        """Return the offset in bytes of the storage `key` in file number `file`, which must be one of `add`."""
        f = self.files[file]
        assert isinstance(f, _File)
        return f.places[key]

    def head_bytes(self, file: int) -> int:
        """Return the size of the head of file number `file`, in bytes: what is known before the storages are
        written."""
        f = self.files[file]
        assert isinstance(f, _File)
        return f.head_bytes

    def sizes(self) -> list[int]:
        """Return the size of every file in bytes; for files with storages an upper bound, without ckpttool's own
        records."""
        out = []
        for f in self.files:
            if isinstance(f, bytes):
                out.append(len(f))
                continue
            names = [name for name, *_ in f.records] + [hole.name for hole in f.holes]
            out.append(f.end + sum(46 + 28 + len(n.encode()) for n in names) + 98)  # directory, its end records
        return out

    def draft(
        self,
        checkpoint: Checkpoint,
        sources: dict[str, TensorEntry],
        *,
        dropped: list[Dropped] | None = None,
        aliases: dict[str, str] | None = None,
        notes: list[str] | None = None,
        recorded: bool = False,
        salvage: Mapping[str, str] | None = None,
        values: Mapping[str, str] | None = None,
        synthesized_tensors: list[str] | None = None,
        synthesized_values: dict[str, object] | None = None,
        changed: dict[str, str] | None = None,
    ) -> Draft:
        """Return the draft of a checkpoint whose chunks are in these files; the files and their sizes become those of
        the checkpoint.

        Args:
            checkpoint: the index of what will be written.
            sources: {name of a tensor: the source's tensor that provides its bytes}.
            recorded: end every file with a record `ckpttool.json` of the digests.
            salvage: {name: "exact", "rebuilt: how", "missing: why"}, for a record `ckpttool-salvage.json`; rebuilt
                tensors get no digest. None for no such record.
            values: {name of a value: its digest}, for a record `ckpttool-values.json`; None for no such record.
            dropped, aliases, notes, synthesized_tensors, synthesized_values, changed: those of `Draft`; None for empty.
        """
        framing = _Framing(self.files, checkpoint, recorded, salvage or {}, values or {})
        more = framing.count_record_bytes()
        sizes = [n if isinstance(f, bytes) else n + more for n, f in zip(self.sizes(), self.files, strict=True)]
        checkpoint = replace(checkpoint, files=self.names, sizes=sizes)
        framing = framing._replace(checkpoint=checkpoint)
        files = [
            DraftFile(n, size, f)
            if isinstance(f, bytes)
            else DraftFile(n, size, f.head, record_at=partial(framing.record_at, f))
            for n, size, f in zip(self.names, checkpoint.sizes, self.files, strict=True)
        ]
        return Draft(
            checkpoint,
            sources,
            files,
            dropped=dropped or [],
            aliases=aliases or {},
            before=framing.before,
            tail=framing.tail,
            notes=notes or [],
            synthesized_tensors=synthesized_tensors or [],
            synthesized_values=synthesized_values or {},
            changed=changed or {},
        )


class _Framing(NamedTuple):
    """What stands around the chunks in the files of a draft; the arguments are those of `TorchFiles.draft`."""

    files: Sequence[_File | bytes]
    checkpoint: Checkpoint
    recorded: bool
    salvage: Mapping[str, str]
    values: Mapping[str, str]

    def before(self, name: str, t: TensorEntry, row: int, written: Sequence[Written]) -> bytes:
        """Return the bytes between the last chunk written to a file and the next one: padding, and ends and headers of
        records.

        Args:
            name, t, row: the next chunk: row `row` of the tensor `t`, named `name`.
            written: (tensor name, row, CRC32) of the chunks written to that file so far.
        """
        f = self.files[t.chunks.file[row]]
        assert isinstance(f, _File)
        return self._make_bytes_between(f, self._find_written_end(written, f), t.chunks.offset[row], written)

    def tail(self, file: int, written: Sequence[Written], digests: Mapping[str, object]) -> bytes:
        """Return the last bytes of a file: padding, ckpttool's own records, and the zip's directory; b"" for a file
        whose bytes were given.

        Args:
            file: its number.
            written: (tensor name, row, CRC32) of all its chunks, in order.
            digests: {name of a tensor: its digest}, for the records.
        """
        f = self.files[file]
        if isinstance(f, bytes):
            return b""
        out = self._make_bytes_between(f, self._find_written_end(written, f), f.end, written)
        entries, at = list(f.records), f.end
        at_chunk = 0
        for record in f.holes:
            crc, at_chunk = self._compute_record_crc(record, written, at_chunk)
            entries.append((record.name, record.header, record.length, crc, True))
        for short, data in self._make_own_records(digests).items():
            name = f.records[0][0].partition("/")[0] + "/" + short
            note = bounded_json.encode(data, indent=1)
            entries.append((name, at, len(note), crc32(note), False))
            note = zip_bytes.make_local_header(name, len(note), crc32(note), at) + note
            out, at = out + note, at + len(note)
        return out + zip_bytes.make_central_directory(entries, at)

    def _make_own_records(self, digests: Mapping[str, object]) -> dict[str, dict[str, object]]:
        """Return ckpttool's own records for the end of a file: {name: content, to be written as JSON}.

        Args:
            digests: {name of a tensor: its digest}.
        """
        out: dict[str, dict[str, Any]] = {}
        if self.recorded:
            rebuilt = {n for n, state in self.salvage.items() if state.startswith("rebuilt")}
            own = self.checkpoint.tensors  # other files of a directory have the others
            out["ckpttool.json"] = {n: d for n, d in digests.items() if n in own and n not in rebuilt}
        if self.salvage:
            out["ckpttool-salvage.json"] = dict(self.salvage)
        if self.values:
            out["ckpttool-values.json"] = dict(self.values)
        return out

    def count_record_bytes(self) -> int:
        """Return an upper bound of the bytes that ckpttool's own records add to a file, directory entries included."""
        records = self._make_own_records(dict.fromkeys(self.checkpoint.tensors, "0" * 64))
        encoded = (len(bounded_json.encode(data, indent=1)) for data in records.values())
        return sum(n + 2 * 160 for n in encoded)  # a header, padding to 64 bytes and an entry take less than that

    def _find_written_end(self, written: Sequence[Written], f: _File) -> int:
        """Return the offset at which the last written chunk ends in its file, or the end of the file's head if there is
        none.

        Args:
            written: (tensor name, row, CRC32) of the chunks written to that file so far.
            f: the file.
        """
        if not written:
            return f.head_bytes
        name, row, _ = written[-1]
        c = self.checkpoint.tensors[name].chunks
        return c.offset[row] + c.length[row]

    def _make_bytes_between(self, f: _File, a: int, b: int, written: Sequence[Written]) -> bytes:
        """Return bytes [a, b) of a file, which hold no chunk: padding, and ends and headers of records.

        Args:
            f: the file.
            a, b: the range.
            written: (tensor name, row, CRC32) of the chunks written to that file so far.

        Raises:
            AssertionError: the range ends in the middle of a header.
        """
        out, at = bytearray(), a
        for hole in self._iter_records_from(f, a):
            if at == hole.header and at < b:
                out += zip_bytes.make_local_header(hole.name, hole.length, None, hole.header, 64)
                at = hole.offset
            end = hole.offset + hole.length
            if at >= b:
                break
            stop = min(end, b)
            out += bytes(stop - at)
            at = stop
            if at == end and at < b:
                crc = self._compute_record_crc(hole, written, self._find_first_chunk(hole, written))[0]
                out += zip_bytes.make_data_descriptor(hole.length, crc)
                at += zip_bytes.DATA_DESCRIPTOR_BYTES
        if at != b:
            raise AssertionError(f"bytes {a}..{b} cannot be laid out: at {at}")
        return bytes(out)

    @staticmethod
    def record_at(f: _File, offset: int) -> int:
        """Return the offset at which the data of the storage record begins that contains byte `offset` of a file."""
        return f.holes[bisect_right(f.holes, offset, key=lambda hole: hole.offset) - 1].offset

    @staticmethod
    def _iter_records_from(f: _File, at: int) -> Iterator[_PendingRecord]:
        """Yield the storage records of a file whose data end at or after byte `at`, in order."""
        first = bisect_left(f.holes, at, key=lambda hole: hole.offset + hole.length)
        return (f.holes[i] for i in range(first, len(f.holes)))

    def _find_first_chunk(self, hole: _PendingRecord, written: Sequence[Written]) -> int:
        """Return the index in `written` of the first chunk at or behind the start of a record; len(written) if there is
        none.

        Args:
            hole: the record.
            written: (tensor name, row, CRC32) of the chunks written to that file so far, in order.
        """
        k = len(written)
        while k:
            name, row, _ = written[k - 1]
            if self.checkpoint.tensors[name].chunks.offset[row] < hole.offset:
                break
            k -= 1
        return k

    def _compute_record_crc(self, hole: _PendingRecord, written: Sequence[Written], k: int) -> tuple[int, int]:
        """Return the CRC32 of a record, combined from those of its chunks and of the padding between: (CRC32, index in
        `written` of the first chunk after the record).

        Args:
            hole: the record.
            written: (tensor name, row, CRC32) of the chunks of its file, in order.
            k: index in `written` of the first chunk in the record.
        """
        crc, at, end = 0, hole.offset, hole.offset + hole.length
        while k < len(written):
            name, row, part = written[k]
            c = self.checkpoint.tensors[name].chunks
            offset, length = c.offset[row], c.length[row]
            if offset >= end and (length or offset > end):
                break
            if offset > at:
                crc = crc32_combine(crc, _compute_crc_of_zeros(offset - at), offset - at)
            crc, at, k = crc32_combine(crc, part, length), offset + length, k + 1
        if at < end:
            crc = crc32_combine(crc, _compute_crc_of_zeros(end - at), end - at)
        return int(crc), k


def make_head_of_tree(
    root: str, tree: object, storages: int
) -> tuple[list[bytes], list[tuple[str, int, int, int, bool]]]:
    """Return the first records of a torch.save file that holds a tree with `TensorRef` and `Inline` tensors, as
    `torch_pickles.make_head_pieces` does, and behind them the storages of the `Inline` tensors.

    Args:
        root: the folder in the zip that all records are in.
        storages: the number of the other storages, from which on those of `Inline` tensors are numbered.

    Raises:
        TypeError: an object in the tree is of a type that no checkpoint has.
    """
    inline: list[bytes] = []
    tree = _replace_inline_tensors(tree, storages, inline)
    head, records = torch_pickles.make_head_pieces(root, torch_pickles.pickle_pieces(tree))
    at = sum(map(len, head))
    for i, data in enumerate(inline, storages):
        record, crc = f"{root}/data/{i}", crc32(data)
        records.append((record, at, len(data), crc, False))
        head.append(zip_bytes.make_local_header(record, len(data), crc, at, 64) + data)
        at += len(head[-1])
    return head, records


def _replace_inline_tensors(
    x: object, first: int, inline: list[bytes], done: dict[int, object] | None = None
) -> object:
    """Return a copy of a value with each `Inline` tensor replaced by a `TensorRef` to a storage of its own. Shared
    lists, dicts and instances remain shared.

    Args:
        x: the value.
        first: number of the first new storage.
        inline: gets the bytes of each new storage.
        done: {id of an object: its copy}; None in the outermost call.
    """
    done = {} if done is None else done
    if id(x) in done:
        return done[id(x)]
    if isinstance(x, stored_tensors.Inline):
        inline.append(x.data)
        n = 1
        for k in x.shape:
            n *= k
        return torch_pickles.TensorRef(x.dtype, x.shape, str(first + len(inline) - 1), n)
    if isinstance(x, dict):
        done[id(x)] = type(x)((k, _replace_inline_tensors(v, first, inline, done)) for k, v in x.items())
    elif isinstance(x, list) and type(x) is not CommonList:
        done[id(x)] = [_replace_inline_tensors(v, first, inline, done) for v in x]
    elif type(x) is tuple:
        return tuple(_replace_inline_tensors(v, first, inline, done) for v in x)
    elif isinstance(x, Opaque):
        done[id(x)] = x.mapped(lambda part: _replace_inline_tensors(part, first, inline, done))
    return done.get(id(x), x)
