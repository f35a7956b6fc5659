"""Items of dcp: where the bytes of one tensor are in the torch.save zip around them.

The first item of a kind (dtype, shape, length) is parsed (formats/torch_zip.py): its directory, its local headers, its
pickle. What torch writes for the next one of that kind differs in four places only: the payload, its CRC32 in the
directory and in the data descriptor, and `.data/serialization_id`, which is a hash. None of them has a part in what the
parser finds, but for the CRC32 in the directory, which it hands on. So an item whose every other byte is equal to that
of one that was parsed would be read as that one was, and is not parsed again (`Template`). Any other byte that differs,
and the item is parsed.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import partial
from math import prod
from typing import NamedTuple

from ckpttool.engine.copy.zstd_frames import decompress_ends
from ckpttool.errors import Corrupt, Unsupported
from ckpttool.formats import stored_tensors, torch_zip, zip_bytes
from ckpttool.formats.pickles import Opaque
from ckpttool.formats.subclasses import is_subclass
from ckpttool.index import boxes
from ckpttool.index.checkpoint import ITEMSIZE, Chunks, TensorEntry
from ckpttool.index.records import Extent, Records
from ckpttool.storage.frames import FrameRead, LaterRecord, Proof
from ckpttool.storage.source import ReadAt, Source

__all__ = ["HEAD", "TAIL", "Items", "SubclassFound", "Template", "make_end_reader", "make_item_reader", "make_template"]

HEAD, TAIL = 4096, 2048  # of an item, what is read: its zip's first records, and its directory
_WINDOW = 64 << 10  # small items are read many at a time
_WINDOWS = 512  # such reads that are kept, one a file
_NOTHING = 0, b""
_VARIANTS = 8  # templates of one kind
_MOST_GATHERED = 256 << 20  # bytes of a tensor that is not stored row by row, though the first of its kind is

_CRC = struct.Struct("<I")


class SubclassFound(Unsupported):
    """An item is an object of a tensor subclass."""

    code = "CKPT0319"


class Template(NamedTuple):
    """An item that was parsed, but for its payload: what all others of its kind have, byte for byte.

    Positions are relative to the item; `fixed` are (position, bytes) of everything behind the payload that has to be
    equal.
    """

    head: bytes
    fixed: tuple[tuple[int, bytes], ...]
    payload: tuple[int, int]  # the storage: offset, length
    crc_at: int
    at: int  # the first element of the tensor
    nbytes: int
    strides: tuple[int, ...] | None
    wrapper: str = ""

    def crc_of(self, head: bytes, tail: bytes, tail_at: int) -> int | None:
        """Return the CRC32 of the payload of an item, as its zip has it; None if the item differs from the template in
        more than its payload.

        Args:
            head: the first bytes of the item.
            tail: its last bytes.
            tail_at: offset in the item at which `tail` begins.
        """
        if not head.startswith(self.head):
            return None
        for at, wanted in self.fixed:
            at -= tail_at
            if tail[at : at + len(wanted)] != wanted:
                return None
        crc: int = _CRC.unpack_from(tail, self.crc_at - tail_at)[0]
        return crc


def make_template(
    head: bytes, tail: bytes, length: int, found: stored_tensors.StoredTensor, base: int
) -> Template | None:
    """Make a template from a parsed item; None if other items cannot be recognised by it.

    Args:
        head: the first bytes of the item.
        tail: its last bytes. Together with `head` they must be all that the parser looked at.
        length: bytes of the item.
        found: the tensor in it.
        base: offset in the file at which the item begins.
    """
    start = found.storage.offset - base
    end = start + found.storage.length
    tail_at = length - len(tail)
    if start > len(head) or end < tail_at:
        return None
    entries, directory_at = zip_bytes.read_directory_entries(make_end_reader(head, tail, length), length)
    varying: list[tuple[int, int]] = []  # (position, bytes) behind the payload that the parser does not look at
    crc_at = None
    for entry in entries:
        name = entry.name.partition("/")[2]
        behind = entry.data + entry.length
        if entry.data == start and entry.length == found.storage.length and name.startswith("data/"):
            crc_at = entry.crc_at
            if entry.length == 0:
                continue  # nothing about it varies
        elif name == ".data/serialization_id" and entry.header >= end:
            varying.append((entry.data, entry.length))
        else:
            continue
        if not entry.described:
            return None  # its CRC32 is in its local header too, and the parser compares the two
        varying.append((entry.crc_at, 4))
        alone = behind + 8 <= directory_at and not any(
            e.header < behind + 8 and behind < e.data + e.length for e in entries if e is not entry
        )
        if alone and tail[behind - tail_at : behind - tail_at + 4] == b"PK\x07\x08":
            varying.append((behind + 4, 4))
    if crc_at is None:
        return None
    fixed, at = [], end
    for position, n in sorted(varying):
        if position < at:
            return None
        fixed.append((at, tail[at - tail_at : position - tail_at]))
        at = position + n
    fixed.append((at, tail[at - tail_at :]))
    strides = None if found.contiguous else found.strides
    first, nbytes = found.extent
    payload = (start, found.storage.length)
    return Template(
        head[:start], tuple(f for f in fixed if f[1]), payload, crc_at, first - base, nbytes, strides, found.wrapper
    )


def make_end_reader(head: bytes, tail: bytes, total: int) -> ReadAt:
    """Return a function (offset, n) -> bytes that reads from the first bytes (`head`) and the last bytes (`tail`) of
    `total` bytes. It raises LookupError for a range that is in neither."""

    def read_at(at: int, n: int) -> bytes:
        """Read `n` bytes from byte `at` of the whole.

        Raises:
            LookupError: they are in neither end.
        """
        if at >= 0 and at + n <= len(head):
            return head[at : at + n]
        at -= total - len(tail)
        if at >= 0 and at + n <= len(tail):
            return tail[at : at + n]
        raise LookupError

    return read_at


def make_item_reader(read: ReadAt, offset: int, length: int, head: bytes, tail: bytes) -> ReadAt:
    """Return a function (offset in the file, n) -> bytes. The first and last bytes of one item are taken from memory,
    everything else is read from the file.

    Args:
        read: reads (offset, bytes) of the file.
        offset: where the item begins, in bytes.
        length: its bytes.
        head: its first bytes, which were read before.
        tail: its last bytes, which were read before.
    """
    here = make_end_reader(head, tail, length)

    def read_at(at: int, n: int) -> bytes:
        try:
            return here(at - offset, n)
        except LookupError:
            return read(at, n)

    return read_at


class Items:
    """Looks into the items of a checkpoint.

    `records` are the CRC32s that were found, `wrappers` {tensor: class} those that an object held which only
    accompanies a dense weight.
    """

    def __init__(self, source: Source, files: list[str]) -> None:
        """Keep the source and the names of its files, by number."""
        self.source, self.files = source, files
        self.records = Records()
        self.wrappers: dict[str, str] = {}
        self._templates: dict[tuple[str, tuple[int, ...], int], list[Template]] = {}
        self._windows: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        self._plain = type(source) is Source
        #: {kind: where the payload begins in an item of that kind; None where that is not assumed}
        self._assumed: dict[tuple[str, int], int | None] = {}
        self._looked: set[tuple[int, int]] = set()  # (file, offset) of items that are looked into whatever their kind
        self._later: list[tuple[str, TensorEntry, int]] = []  # items that are looked into when they are read

    def assume(self, tensors: Mapping[str, TensorEntry]) -> None:
        """Parse one sample item of each kind, so that `locate` may assume that the payloads of all others of the kind
        begin at the same offset of the item. Also parse one item of each file, whose CRC32 tells the file from an
        altered copy.

        Items of one kind have the same dtype and the same number of bytes around the payload.

        Args:
            tensors: {name: tensor} of all tensors that are saved as plain items.

        Raises:
            Corrupt, Unsafe: as `locate`.
        """
        samples: dict[tuple[int, int], tuple[str, TensorEntry, int]] = {}
        kinds: set[tuple[str, int]] = set()
        of_file: dict[int, tuple[bool, int, tuple[str, TensorEntry, int]]] = {}
        for name, t in tensors.items():
            c = t.chunks
            for k, (file, offset, length) in enumerate(zip(c.file, c.offset, c.length, strict=True)):
                count = prod(c.shape_of(k))
                if (kind := (t.dtype, length - count * ITEMSIZE[t.dtype])) not in kinds:
                    kinds.add(kind)
                    samples[file, offset] = name, t, k
                if count > 1 and (key := (c.ndim < 2, offset)) < of_file.get(file, (True, 1 << 62))[:2]:
                    of_file[file] = (*key, (name, t, k))
        samples |= {(file, offset): sample for file, (_, offset, sample) in of_file.items()}
        self._looked = set(samples)
        self._prefetch_ends((file, offset, t.chunks.length[k]) for (file, offset), (_, t, k) in samples.items())
        for (file, offset), (name, t, k) in samples.items():
            length, shape = t.chunks.length[k], t.chunks.shape_of(k)
            nbytes = prod(shape) * ITEMSIZE[t.dtype]
            head, tail = self._read_ends(file, offset, length)
            try:
                found = self._parse_item(name, t.dtype, shape, file, offset, length, head, tail)
            except SubclassFound:
                found = None
            usual = found is not None and found.contiguous and found.storage.length == nbytes and not found.wrapper
            at = found.extent[0] - offset if found is not None and usual else None
            self._assumed.setdefault((t.dtype, length - nbytes), at)
        self._prefetch_ends(
            (file, offset, length)
            for t in tensors.values()
            for k, (file, offset, length) in enumerate(
                zip(t.chunks.file, t.chunks.offset, t.chunks.length, strict=True)
            )
            if (file, offset) not in self._looked and self._assumed[self._get_kind(t, k)] is None
        )

    def _get_kind(self, t: TensorEntry, k: int) -> tuple[str, int]:
        """Return the kind of item number `k` of a tensor: (dtype, bytes of the item around its payload)."""
        return t.dtype, t.chunks.length[k] - prod(t.chunks.shape_of(k)) * ITEMSIZE[t.dtype]

    def _prefetch_ends(self, items: Iterable[tuple[int, int, int]]) -> None:
        """Prefetch the first and last bytes of items, which are given as (number of the file, offset, length)."""
        self.source.prefetch(
            (self.files[file], *end)
            for file, offset, length in items
            for end in (((offset, HEAD), (offset + length - TAIL, TAIL)) if length > HEAD else ((offset, length),))
        )

    def _assume_payload(self, name: str, t: TensorEntry, k: int) -> tuple[int, int] | None:
        """Return (offset in the file, bytes) of the assumed payload of item number `k` of a tensor, and register the
        item for the check when it is read. None if the item has to be parsed now."""
        file, offset, length = t.chunks.file[k], t.chunks.offset[k], t.chunks.length[k]
        at = self._assumed.get(self._get_kind(t, k)) if self._assumed else None
        if at is None or (file, offset) in self._looked:
            return None
        nbytes = prod(t.chunks.shape_of(k)) * ITEMSIZE[t.dtype]
        framed = self.source.framed(self.files[file])
        number = framed.add(offset, offset + length, offset + at, nbytes, self._prove, len(self._later))
        self._later.append((name, t, k))
        if nbytes:
            self.records.append(LaterRecord.of(Extent(file, offset + at, nbytes), framed, number))
        return offset + at, nbytes

    def _prove(self, row: int, read: FrameRead) -> Proof:
        """Parse an item whose payload was assumed, and return the proof for it: the payload's CRC32, or how to read its
        elements if they are elsewhere in the item.

        Args:
            row: index of the item in `_later`.
            read: reads its file.

        Raises:
            Corrupt, Unsafe: as `locate`.
            Unsupported: it is an object of a tensor subclass, unlike the first of its kind.
        """
        name, t, k = self._later[row]
        c, shape, at = t.chunks, t.chunks.shape_of(k), self._assumed[self._get_kind(t, k)] or 0
        file, offset, length = c.file[k], c.offset[k], c.length[k]
        behind = offset + at + prod(shape) * ITEMSIZE[t.dtype]
        head, tail = bytes(read(offset, at)), bytes(read(behind, offset + length - behind))
        templates = self._templates.setdefault((t.dtype, shape, length), [])
        for template in templates:
            crc = template.crc_of(head, tail, length - len(tail))
            if crc is not None and template.at == at and template.strides is None and not template.wrapper:
                return Proof(crc)
        raw = self.source.framed(self.files[file]).raw
        what = f'{self.source.root}/{self.files[file]} at byte {offset} ("{name}")'
        read_at = make_item_reader(lambda start, n: bytes(raw(start, n)), offset, length, head, tail)
        found = _check_tensor(torch_zip.read(read_at, offset, length, what), t.dtype, shape, what)
        if found.wrapper:
            raise Unsupported(
                f"{what}: holds a {found.wrapper}, and other items of its kind plain tensors. Copy the checkpoint to a "
                "disk, and read it there.",
                code="CKPT0319",
            )
        made = make_template(head, tail, length, found, offset) if len(templates) < _VARIANTS else None
        if made is not None:
            templates.append(made)
        first, n = found.extent
        if found.contiguous and (first, n) == (offset + at, found.storage.length):
            return Proof(found.storage.crc32 or 0)
        if found.contiguous:
            return Proof(read=lambda start, count: raw(first + start, count))
        return Proof(read=partial(_read_strided, found, ITEMSIZE[t.dtype], raw, what))

    def locate(self, name: str, t: TensorEntry) -> Chunks:
        """Return the chunks of a tensor that is saved as items, with the byte ranges of their elements.

        Raises:
            Corrupt: an item is cut off, overwritten, or of another dtype or shape. Unsafe: its pickle would run code.
            SubclassFound: an item is an object of a tensor subclass. Unsupported: a compressed one is not contiguous.
        """
        old = t.chunks
        out = Chunks(old.ndim)
        out.start, out.shape, out.file = old.start, old.shape, old.file  # which nobody changes any more
        if t.coding == "torch.save+zstd":
            places = zip(old.boxes(), old.file, old.offset, old.length, strict=True)
            out.zstd = {k: self._locate_in_zstd(name, t, box[1], *place) for k, (box, *place) in enumerate(places)}
            out.offset, out.length = old.offset, old.length
            return out
        strided: dict[int, tuple[int, ...]] = {}
        templates: list[Template] = []
        kind: tuple[int, ...] | None = None
        for k, (_, shape) in enumerate(old.boxes()):
            file, offset, length = old.file[k], old.offset[k], old.length[k]
            if (place := self._assume_payload(name, t, k)) is not None:
                out.offset.append(place[0])
                out.length.append(place[1])
                continue
            head, tail = self._read_ends(file, offset, length)
            if kind != (*shape, length):
                kind = (*shape, length)
                templates = self._templates.setdefault((t.dtype, shape, length), [])
            for found in templates:
                crc = found.crc_of(head, tail, length - len(tail))
                if crc is not None:
                    start, n = found.payload
                    if crc:
                        self.records.add(file, offset + start, n, crc)
                    out.offset.append(offset + found.at)
                    out.length.append(found.nbytes)
                    if found.strides is not None:
                        strided[k] = found.strides
                    if found.wrapper:
                        self.wrappers[name] = found.wrapper
                    break
            else:
                tensor = self._parse_item(name, t.dtype, shape, file, offset, length, head, tail)
                self.records += tensor.storage.records(file)
                at, n = tensor.extent
                out.offset.append(at)
                out.length.append(n)
                if not tensor.contiguous:
                    strided[k] = tensor.strides
                if tensor.wrapper:
                    self.wrappers[name] = tensor.wrapper
                made = make_template(head, tail, length, tensor, offset) if len(templates) < _VARIANTS else None
                if made is not None:
                    templates.append(made)
        if strided:
            out.strides = strided
        return out

    def _read_ends(self, file: int, offset: int, length: int) -> tuple[bytes, bytes]:
        """Read (first bytes, last bytes) of an item at `offset` of file number `file`. An item of up to 4 KiB is
        returned completely, twice."""
        if length <= HEAD:
            head = self._read_ahead(file, offset, length, _WINDOW)
            return head, head
        return self._read_ahead(file, offset, HEAD, 0), self._read_ahead(file, offset + length - TAIL, TAIL, HEAD)

    def _read_ahead(self, file: int, offset: int, n: int, more: int) -> bytes:
        """Read `n` bytes at `offset` of file number `file`. On a local disk, up to `more` bytes behind them are read
        too and kept for the next item."""
        name = self.files[file]
        if not self._plain:
            return self.source.read(name, offset, n)
        at, window = self._windows.get(file, _NOTHING)
        if not at <= offset <= offset + n <= at + len(window):
            more = max(0, min(more, self.source.size(name) - offset - n))
            at, window = offset, self.source.read(name, offset, n + more)
            if more:
                self._windows[file] = at, window
                self._windows.move_to_end(file)
                if len(self._windows) > _WINDOWS:
                    self._windows.popitem(last=False)
        return window[offset - at : offset - at + n]

    def _parse_item(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        file: int,
        offset: int,
        length: int,
        head: bytes,
        tail: bytes,
    ) -> stored_tensors.StoredTensor:
        """Parse the zip of an item, whose first and last bytes (`head`, `tail`) are given, and return its tensor.

        Args:
            name: of the tensor, for messages.
            dtype: of the tensor, by .metadata.
            shape: of the chunk, by .metadata.
            file: number of the file.
            offset: where the item begins, in bytes.
            length: its bytes.
            head: its first bytes.
            tail: its last bytes.

        Raises:
            Corrupt: it is damaged, or of another dtype or shape. Unsafe: its pickle would run code.
            SubclassFound: it is an object of a tensor subclass.
        """
        what = f'{self.source.root}/{self.files[file]} at byte {offset} ("{name}")'
        read_at = make_item_reader(self.source.reader_of(self.files[file]), offset, length, head, tail)
        return _check_tensor(torch_zip.read(read_at, offset, length, what), dtype, shape, what)

    def _locate_in_zstd(
        self, name: str, t: TensorEntry, shape: tuple[int, ...], file: int, offset: int, length: int
    ) -> tuple[int, int | None]:
        """Return (byte in the content of a compressed item where its tensor begins, the tensor's CRC32; None if not
        known).

        Args:
            name: of the tensor, for messages.
            t: the tensor, by .metadata.
            shape: of the chunk.
            file: number of the file.
            offset: where the item begins, in bytes.
            length: its bytes.

        Raises:
            Unsupported: the tensor is not contiguous. SubclassFound: it is an object of a tensor subclass.
            Corrupt: it is damaged, or of another dtype or shape. Unsafe: its pickle would run code.
        """
        what = f'{self.source.root}/{self.files[file]} at byte {offset} ("{name}")'
        most = prod(shape) * ITEMSIZE[t.dtype] + (64 << 10)
        head, tail, total = decompress_ends(self.source, self.files[file], offset, length, most, what)
        found = _check_tensor(torch_zip.read(make_end_reader(head, tail, total), 0, total, what), t.dtype, shape, what)
        if not found.contiguous:
            raise Unsupported(f"{what}: a compressed tensor that is not contiguous.", code="CKPT0324")
        at, n = found.extent
        return at, found.storage.crc32 if n == found.storage.length else None


def _read_strided(found: stored_tensors.StoredTensor, item: int, raw: FrameRead, what: str, at: int, n: int) -> bytes:
    """Return `n` bytes, from byte `at`, of the row-major form of a tensor that the file stores with other strides.

    Args:
        found: the tensor.
        item: bytes of an element.
        raw: reads its file.
        what: name of its item in messages.
        at: offset in the row-major tensor, in bytes.
        n: number of bytes.

    Raises:
        Unsupported: the tensor spans more than 256 MiB.
    """
    import numpy as np

    span = boxes.span(found.shape, found.strides) * item
    if span > _MOST_GATHERED:
        raise Unsupported(
            f"{what}: its {span:,} bytes are not stored row by row, and those of other items of its kind are. Copy the "
            "checkpoint to a disk, and read it there.",
            code="CKPT0324",
        )
    kind = np.frombuffer(raw(found.extent[0], span), f"V{item}")
    view = np.lib.stride_tricks.as_strided(kind, found.shape, tuple(s * item for s in found.strides), writeable=False)
    return view.tobytes()[at : at + n]


def _check_tensor(found: object, dtype: str, shape: tuple[int, ...], what: str) -> stored_tensors.StoredTensor:
    """Return what was found in an item, if it is the tensor that .metadata says. `what` names the item in messages.

    Raises:
        SubclassFound: it is an object of a tensor subclass. Corrupt: it is another tensor, or none.
    """
    if isinstance(found, Opaque) and is_subclass(found):
        raise SubclassFound(f"{what}: holds a {found.args[1]}, which ckpttool reads only where it is not compressed.")
    if not isinstance(found, stored_tensors.StoredTensor):
        raise Corrupt(f"{what}: holds a {type(found).__name__}, not a tensor.", code="CKPT0412")
    if found.dtype != dtype or found.shape != shape:
        raise Corrupt(f"{what}: holds {found.dtype} {found.shape}, .metadata says {dtype} {shape}.", code="CKPT0412")
    return found
