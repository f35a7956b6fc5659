"""Items of an object in a store whose bytes are assumed to be where those of the first item of their kind are, and are
proved when they are read.

A header before each tensor would be a request for each. So a layout that has looked into one item of a kind assumes the
same of the others (`Source.framed`), and the bytes around a payload are fetched in the request that reads the payload.
No byte is handed on before the item that it lies in is proved: where an item turns out to be laid out otherwise, its
bytes are read from where they are.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..index.records import Extent, Record

__all__ = ["FrameRead", "FramedFile", "LaterRecord", "Proof"]

#: Reads bytes (offset, length) of an object.
FrameRead = Callable[[int, int], bytes | bytearray | memoryview]

_GAP = 256 << 10  # a header that is so near to what is read comes with it


class Proof(NamedTuple):
    """What was found in an item: the CRC32 of its payload, 0 where the item does not say; and how its payload is read
    (byte of the payload, length), None where it is where it was assumed."""

    crc32: int = 0
    read: FrameRead | None = None


class FramedFile:
    """The items of one object, in columns. `raw` reads the object as it is.

    An item is added with `prove(row, reads the object)`, which looks into it.
    """

    def __init__(self, raw: FrameRead) -> None:
        self.raw = raw
        self._start, self._end, self._at, self._length, self._rows = (array("q") for _ in range(5))
        self._provers: list[Callable[[int, FrameRead], Proof]] = []
        self._known, self._crcs = bytearray(), array("L")
        self._elsewhere: dict[int, FrameRead] = {}
        self._locks = [threading.Lock() for _ in range(16)]
        self._ordered: tuple[list[int], list[int]] = [], []

    def add(
        self, start: int, end: int, at: int, length: int, prove: Callable[[int, FrameRead], Proof], row: int
    ) -> int:
        """Add an item whose payload offset is assumed, and return its number.

        Args:
            start, end: the item is bytes [start, end) of the object.
            at, length: the assumed offset of its payload in the object, and the bytes of that.
            prove: called as `prove(row, read)` before the payload is used, where `read(offset, length)` reads the
                object; returns what the item really says (`Proof`).
            row: passed on to `prove`.
        """
        for column, x in zip(
            (self._start, self._end, self._at, self._length, self._rows), (start, end, at, length, row), strict=True
        ):
            column.append(x)
        self._provers.append(prove)
        self._crcs.append(0)
        self._known.append(0)
        return len(self._known) - 1

    def count(self) -> tuple[int, int]:
        """Return (number of items not proved yet, number of all items)."""
        return len(self._known) - sum(self._known), len(self._known)

    def is_proved(self, number: int) -> bool:
        """Return whether the item with this number has been read and its payload offset confirmed or corrected."""
        return bool(self._known[number])

    def crc32(self, number: int) -> int:
        """Return the CRC32 that an item stores of its payload, after proving the item; 0 if it stores none.

        Raises:
            CkpttoolError: the item is damaged, or cannot be read.
        """
        self._prove_item(number, self.raw)
        return self._crcs[number]

    def prove_all(self) -> None:
        """Prove all items that are not proved yet.

        Raises:
            CkpttoolError: one is damaged, or cannot be read.
        """
        for number in self._sort_items()[0]:
            self._prove_item(number, self.raw)

    def ends(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges (offset, length) before and behind the payload of every item not proved yet, for prefetching
        before `prove_all`."""
        for k in self._sort_items()[0]:
            if not self._known[k]:
                behind = self._at[k] + self._length[k]
                yield from ((a, b - a) for a, b in ((self._start[k], self._at[k]), (behind, self._end[k])) if b > a)

    def _prove_item(self, number: int, read: FrameRead) -> None:
        """Prove an item, unless that was done before: keep its CRC32 and, if its payload is elsewhere, how to read it.

        Args:
            number: of the item.
            read: reads bytes (offset, length) of the object.

        Raises:
            CkpttoolError: it is damaged, or cannot be read.
        """
        with self._locks[number % len(self._locks)]:
            if not self._known[number]:
                found = self._provers[number](self._rows[number], read)
                self._crcs[number] = found.crc32
                if found.read is not None:
                    self._elsewhere[number] = found.read
                self._known[number] = 1

    def _sort_items(self) -> tuple[list[int], list[int]]:
        """Return (item numbers sorted by payload offset, those offsets)."""
        if len(self._ordered[0]) != len(self._at):
            numbers = sorted(range(len(self._at)), key=self._at.__getitem__)
            self._ordered = numbers, [self._at[k] for k in numbers]
        return self._ordered

    def _find_overlapping_items(self, offset: int, end: int) -> list[int]:
        """Return the numbers of the items whose payloads overlap bytes [offset, end), sorted by payload offset."""
        numbers, places = self._sort_items()
        first = max(0, bisect_right(places, offset) - 1)
        return [k for k in numbers[first : bisect_left(places, end)] if self._at[k] + self._length[k] > offset]

    def widen(self, offset: int, end: int) -> tuple[int, int]:
        """Return the range (low, high) to fetch for bytes [offset, end): extended to the headers and trailers of items
        not proved yet, unless these are more than 256 KiB away."""
        unproved = [k for k in self._find_overlapping_items(offset, end) if not self._known[k]]
        low = min((self._start[k] for k in unproved), default=offset)
        high = max((self._end[k] for k in unproved), default=end)
        return (low if 0 < offset - low <= _GAP else offset), (high if 0 < high - end <= _GAP else end)

    def read(self, offset: int, n: int) -> bytes | bytearray | memoryview:
        """Return the `n` bytes from byte `offset` on, as if every payload were at its assumed offset. Each item that
        the range overlaps is proved first, and a payload that is elsewhere is read from there.

        Raises:
            CkpttoolError: an item is damaged, or cannot be read.
        """
        end = offset + n
        low, high = self.widen(offset, end)
        data = memoryview(self.raw(low, high - low))

        def read_here(at: int, count: int) -> bytes | bytearray | memoryview:
            """Read bytes of the object, of which some are here."""
            return data[at - low : at - low + count] if low <= at and at + count <= high else self.raw(at, count)

        touched = self._find_overlapping_items(offset, end)
        for k in touched:
            if not self._known[k]:
                self._prove_item(k, read_here)
        moved = [k for k in touched if k in self._elsewhere]
        if not moved:
            return data[offset - low : end - low]
        out = bytearray(data[offset - low : end - low])
        for k in moved:
            a, b = max(offset, self._at[k]), min(end, self._at[k] + self._length[k])
            out[a - offset : b - offset] = self._elsewhere[k](a - self._at[k], b - a)
        return out


class LaterRecord(Record):
    """A `Record` whose CRC32 is known when its item was looked into; asking for it earlier looks into it.

    In the place of the CRC32, the tuple holds (the items of the object, the number of the item).
    """

    __slots__ = ()

    @classmethod
    def of(cls, extent: Extent, framed: FramedFile, number: int) -> LaterRecord:
        """Make the record of item `number` of an object, whose bytes are `extent`."""
        return cls(extent, (framed, number))  # type: ignore[arg-type]

    @property
    def _place(self) -> tuple[FramedFile, int]:
        """Return (the items of the object, the number of the item)."""
        place: Any = self[1]
        return place  # type: ignore[no-any-return]

    @property
    def crc32(self) -> int:
        """Return the CRC32 that the item stores of its payload; 0 if it stores none. Proves the item if needed."""
        framed, number = self._place
        return framed.crc32(number)

    @property
    def known(self) -> bool:
        """Return whether the CRC32 is known without reading: whether the item was proved."""
        framed, number = self._place
        return framed.is_proved(number)

    def moved(self, by: int) -> LaterRecord:
        """Return the same record with its file number increased by `by`, as `Record.moved` does."""
        return LaterRecord(self.extent._replace(file=self.extent.file + by), self[1])
