"""Byte ranges of files, and those with known CRC32s, one for each chunk of many layouts: in columns, 28 bytes each."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

__all__ = ["Extent", "Record", "Records"]


class Extent(NamedTuple):
    """A byte range of a file of the checkpoint."""

    file: int
    offset: int
    length: int


class Record(NamedTuple):
    """Bytes of a file whose CRC32 is stored in the source."""

    extent: Extent
    crc32: int

    @property
    def known(self) -> bool:
        """Return whether asking for the CRC32 sends no request to a store; always True of a plain `Record`."""
        return True

    def moved(self, by: int) -> Record:
        """Return the same record with `by` added to its file number, for a list of files that has `by` more in front of
        its own."""
        return Record(self.extent._replace(file=self.extent.file + by), self.crc32)


class Records(Sequence[Record]):
    """Records in columns: numbers of files, offsets and lengths in bytes, CRC32s; a `Record` is made when one is looked
    at.

    `later` has the records, by number, whose CRC32 is not known yet (storage/frames.py); their `crc32` is 0.
    """

    __slots__ = ("_by_file", "crc32", "file", "later", "length", "offset")

    def __init__(self, records: Iterable[Record] = ()) -> None:
        """Make columns of these records."""
        self.file, self.offset, self.length, self.crc32 = array("q"), array("q"), array("q"), array("I")
        self.later: dict[int, Record] = {}
        #: (how many records there were, what `by_file` returned then)
        self._by_file: tuple[int, dict[int, Records]] | None = None
        self.extend(records)

    def add(self, file: int, offset: int, length: int, crc32: int) -> None:
        """Append the record of the `length` bytes at `offset` of a file."""
        self.file.append(file)
        self.offset.append(offset)
        self.length.append(length)
        self.crc32.append(crc32)

    def append(self, record: Record) -> None:
        """Append a record."""
        if not record.known:
            self.later[len(self)] = record
        self.add(*record.extent, record.crc32 if record.known else 0)

    def extend(self, records: Iterable[Record]) -> None:
        """Append records."""
        if isinstance(records, Records):
            self.later |= {len(self) + k: r for k, r in records.later.items()}
            for mine, theirs in zip(self._columns(), records._columns(), strict=True):
                mine.extend(theirs)
            return
        for r in records:
            self.append(r)

    def __iadd__(self, records: Iterable[Record]) -> Records:
        """Append records, and return this object."""
        self.extend(records)
        return self

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.file)

    def __getitem__(self, k: int | slice) -> Any:
        """Return record number `k` as a `Record`; a new `Records` of those chosen if `k` is a slice."""
        if isinstance(k, slice):
            out = Records()
            out.file, out.offset, out.length, out.crc32 = (column[k] for column in self._columns())
            out.later = {new: self.later[old] for new, old in enumerate(range(len(self))[k]) if old in self.later}
            return out
        if self.later and (found := self.later.get(range(len(self))[k])) is not None:
            return found
        return Record(Extent(self.file[k], self.offset[k], self.length[k]), self.crc32[k])

    def __iter__(self) -> Iterator[Record]:
        """Yield every record as a `Record`, in order."""
        for k, (*extent, crc32) in enumerate(zip(*self._columns(), strict=True)):
            yield self.later.get(k) or Record(Extent(*extent), crc32)

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is a sequence of equal records in the same order."""
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Record.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def are_known(self) -> bool:
        """Return whether the CRC32s of all records are known: none is of an item in a store that is looked into
        later."""
        return all(r.known for r in self.later.values())

    def by_file(self) -> dict[int, Records]:
        """Return {number of a file: its records, in the order of their offsets}; the same dict until a record is
        added."""
        if self._by_file is None or self._by_file[0] != len(self):
            out: dict[int, Records] = {}
            for k, (file, *place) in enumerate(zip(*self._columns(), strict=True)):
                found = out.get(file)
                if found is None:
                    found = out[file] = Records()
                if k in self.later:
                    found.later[len(found)] = self.later[k]
                found.add(file, *place)
            for found in out.values():
                found._sort_by_offset()
            self._by_file = len(self), out
        return self._by_file[1]

    def _columns(self) -> tuple[array[int], array[int], array[int], array[int]]:
        """Return the columns: numbers of files, offsets, lengths and CRC32s."""
        return self.file, self.offset, self.length, self.crc32

    def _sort_by_offset(self) -> None:
        """Sort the records by offset, in place; records with equal offsets keep their order."""
        if any(a > b for a, b in zip(self.offset, self.offset[1:], strict=False)):
            order = sorted(range(len(self)), key=self.offset.__getitem__)
            self.offset, self.length = (array("q", map(c.__getitem__, order)) for c in (self.offset, self.length))
            self.crc32 = array("I", map(self.crc32.__getitem__, order))
            self.later = {new: self.later[old] for new, old in enumerate(order) if old in self.later}
