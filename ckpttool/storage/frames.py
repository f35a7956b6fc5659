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
        """Add an item, bytes [start, end) of the object, with its payload, `length` bytes from byte `at` on; return its
        number. `prove(row, reads the object)` looks into it."""
        for column, x in zip(
            (self._start, self._end, self._at, self._length, self._rows), (start, end, at, length, row), strict=True
        ):
            column.append(x)
        self._provers.append(prove)
        self._crcs.append(0)
        self._known.append(0)
        return len(self._known) - 1

    def count(self) -> tuple[int, int]:
        """Return (items that nobody has looked into, all of them)."""
        return len(self._known) - sum(self._known), len(self._known)

    def is_proved(self, number: int) -> bool:
        """Return whether an item was looked into."""
        return bool(self._known[number])

    def crc32(self, number: int) -> int:
        """Return the CRC32 of the payload of an item, as the item says it; 0 where it says none.

        Raises:
            CkpttoolError: the item is damaged, or cannot be read.
        """
        self._prove(number, self.raw)
        return self._crcs[number]

    def prove_all(self) -> None:
        """Look into all items.

        Raises:
            CkpttoolError: one is damaged, or cannot be read.
        """
        for number in self._order()[0]:
            self._prove(number, self.raw)

    def ends(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges (offset, length) that `prove_all` reads."""
        for k in self._order()[0]:
            if not self._known[k]:
                behind = self._at[k] + self._length[k]
                yield from ((a, b - a) for a, b in ((self._start[k], self._at[k]), (behind, self._end[k])) if b > a)

    def _prove(self, number: int, read: FrameRead) -> None:
        """Look into an item, once.

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

    def _order(self) -> tuple[list[int], list[int]]:
        """Return (numbers of the items by the place of their payloads, those places)."""
        if len(self._ordered[0]) != len(self._at):
            numbers = sorted(range(len(self._at)), key=self._at.__getitem__)
            self._ordered = numbers, [self._at[k] for k in numbers]
        return self._ordered

    def _touched(self, offset: int, end: int) -> list[int]:
        """Return the numbers of the items whose payloads have some of the bytes [offset, end)."""
        numbers, places = self._order()
        first = max(0, bisect_right(places, offset) - 1)
        return [k for k in numbers[first : bisect_left(places, end)] if self._at[k] + self._length[k] > offset]

    def widen(self, offset: int, end: int) -> tuple[int, int]:
        """Return the range [low, high) that is fetched when bytes [offset, end) are read: with what is to be looked at
        of items that are not proved, where that is near."""
        unproved = [k for k in self._touched(offset, end) if not self._known[k]]
        low = min((self._start[k] for k in unproved), default=offset)
        high = max((self._end[k] for k in unproved), default=end)
        return (low if 0 < offset - low <= _GAP else offset), (high if 0 < high - end <= _GAP else end)

    def read(self, offset: int, n: int) -> bytes | bytearray | memoryview:
        """Return the `n` bytes from byte `offset` on, where items are assumed to be; each item that they touch is
        proved before.

        Raises:
            CkpttoolError: an item is damaged, or cannot be read.
        """
        end = offset + n
        low, high = self.widen(offset, end)
        data = memoryview(self.raw(low, high - low))

        def read_here(at: int, count: int) -> bytes | bytearray | memoryview:
            """Read bytes of the object, of which some are here."""
            return data[at - low : at - low + count] if low <= at and at + count <= high else self.raw(at, count)

        touched = self._touched(offset, end)
        for k in touched:
            if not self._known[k]:
                self._prove(k, read_here)
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
        """Make the record of an item."""
        return cls(extent, (framed, number))  # type: ignore[arg-type]

    @property
    def _place(self) -> tuple[FramedFile, int]:
        """Return (the items of the object, the number of the item)."""
        place: Any = self[1]
        return place  # type: ignore[no-any-return]

    @property
    def crc32(self) -> int:
        """Return the CRC32; 0 where the item says none."""
        framed, number = self._place
        return framed.crc32(number)

    @property
    def known(self) -> bool:
        """Return whether the item was looked into."""
        framed, number = self._place
        return framed.is_proved(number)

    def moved(self, by: int) -> LaterRecord:
        """Return the same record, as `Record.moved`."""
        return LaterRecord(self.extent._replace(file=self.extent.file + by), self[1])
