"""Recognises the framing of torch.save items, so that one item of each kind is parsed and the others are compared with it.

A DCP folder has one zip per item, and parsing it costs more than reading a small tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import Unsupported
from ..formats.zip_bytes import ZipRecord, zip_records
from ..index.checkpoint import Chunk, Extent
from ..storage.source import Source

__all__ = ["Frame"]


class Frame:
    """What stands around the data of one torch.save item, to be found around others without reading it again.

    The same framing means the same tensor: same pickle, same directory, same places. What may differ are the CRC32s of
    the data and of the serialization id, and that id, a hash of the data that torch writes and nobody reads.
    """

    def __init__(self, source: Source, file: str, item: Extent, found: Chunk) -> None:
        records = zip_records(lambda at, n: source.read(file, at, n), item.offset, item.length, file)
        data = [r for r in records.values() if r.name.startswith("data/")]
        if len(data) != 1:
            raise Unsupported(f"{file}: an item with {len(data)} storages.")
        self.at, self.length, self.strides = found.extent.offset - item.offset, found.extent.length, found.strides
        self._data = (data[0].offset - item.offset, data[0].offset - item.offset + data[0].length)
        self._blank: list[tuple[int, int]] = []  # where other bytes may stand
        self._sums: list[list[int]] = []  # for each such record, where its CRC32 stands
        around = self._read(source, file, item)
        for record in (*data, *(r for r in records.values() if r.name == ".data/serialization_id")):
            self._sums.append([p for p in self._checksums(around, record) if _is_at(around, p, record.crc32)])
            self._blank += [(p, 4) for p in self._sums[-1]]
            if record is not data[0]:
                self._blank.append((self._inside(record.offset - item.offset), record.length))
        pickled = records["data.pkl"]
        first = self._inside(pickled.offset - item.offset)
        if any(a < first + pickled.length and first < a + n for a, n in self._blank):
            raise Unsupported(f"{file}: a header inside the pickle.")
        self._same = self._blanked(around)

    def _inside(self, at: int) -> int:
        """Where a byte of the item is among those around its data."""
        return at if at < self._data[0] else at - (self._data[1] - self._data[0])

    def _read(self, source: Source, file: str, item: Extent) -> bytes:
        before, after = self._data
        return source.read(file, item.offset, before) + source.read(file, item.offset + after, item.length - after)

    def _checksums(self, around: bytes, record: ZipRecord) -> Iterator[int]:
        """Places of the CRC32 of a record: in its local header, in the directory, in the descriptor behind it."""
        for signature, header, crc, size in ((b"PK\x03\x04", 30, 14, 26), (b"PK\x01\x02", 46, 16, 28)):
            at = around.find(signature)
            while at >= 0:
                n = int.from_bytes(around[at + size : at + size + 2], "little")
                if around[at + header : at + header + n].partition(b"/")[2] == record.name.encode():
                    yield at + crc
                at = around.find(signature, at + 4)
        at = around.find(b"PK\x07\x08" + record.crc32.to_bytes(4, "little"))
        if at >= 0:
            yield at + 4

    def _blanked(self, around: bytes) -> bytes:
        out = bytearray(around)
        for a, n in self._blank:
            out[a : a + n] = bytes(n)
        return bytes(out)

    def fits(self, source: Source, file: str, item: Extent) -> bool:
        """Whether another item of the same length is framed so."""
        around = self._read(source, file, item)
        if any(len({around[p : p + 4] for p in places}) > 1 for places in self._sums):
            return False
        return self._blanked(around) == self._same


def _is_at(around: bytes, at: int, crc: int) -> bool:
    return around[at : at + 4] == crc.to_bytes(4, "little")
