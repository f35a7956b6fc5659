"""CRC32s that a source carries, compared with its bytes as they are read."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

from ...formats.crc import crc32, crc32_combine
from ...index.records import Record, Records

__all__ = ["CrcMismatch", "CrcVerifier"]


class CrcMismatch(Exception):
    """Bytes do not have the stored CRC32: (record, actual CRC32)."""


class CrcVerifier:
    """Checks the CRC32s of records while their bytes are read, in any order and in any pieces."""

    def __init__(self, records: Records) -> None:
        """Start with no byte of any record read.

        Args:
            records: byte ranges of files, each with its stored CRC32.
        """
        self._records = records.by_file()
        #: {(file, number of the record): [(start, end, crc)], sorted}
        self._seen: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        self._done: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def update(self, file: int, offset: int, data: memoryview) -> int | None:
        """Add bytes that were read from a file, given by its number, at an offset.

        Returns:
            Their CRC32, if they lie in one record that is not complete yet; else None.

        Raises:
            CrcMismatch: a record is complete, and its CRC32 is not the stored one.
        """
        records = self._records.get(file)
        if records is None or not len(data):
            return None
        i = bisect_right(records.offset, offset) - 1
        if i < 0:
            return None
        record = records[i]
        key, end = (file, i), offset + len(data)
        if key in self._done or end > record.extent.offset + record.extent.length:
            return None
        crc = crc32(data)
        with self._lock:
            self._add_range(key, record, offset, end, crc)
        return crc

    def _add_range(self, key: tuple[int, int], record: Record, start: int, end: int, crc: int) -> None:
        """Add the CRC32 of bytes [start, end) of a file, which lie in `record`, and merge it with those of adjacent
        ranges.

        Bytes that were added before, because two tensors share them, are ignored.

        Args:
            key: (file number, number of the record in the file).

        Raises:
            CrcMismatch: the record is complete, and its CRC32 is not the stored one.
        """
        seen = self._seen.setdefault(key, [])
        k = bisect_right(seen, start, key=itemgetter(0))
        if (k and seen[k - 1][1] > start) or (k < len(seen) and seen[k][0] < end):
            return
        if k < len(seen) and seen[k][0] == end:
            _, last, after = seen.pop(k)
            crc, end = crc32_combine(crc, after, last - end), last
        if k and seen[k - 1][1] == start:
            first, _, before = seen[k - 1]
            seen[k - 1] = (first, end, crc32_combine(before, crc, end - start))
        else:
            seen.insert(k, (start, end, crc))
        if len(seen) > 1 or seen[0][1] - seen[0][0] < record.extent.length:
            return
        (_, _, crc) = seen[0]
        del self._seen[key]
        self._done.add(key)
        if (stated := record.crc32) and crc != stated:
            raise CrcMismatch(record, crc)

    def parts_read(self) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
        """List the byte ranges that were read of incomplete records: (file number, number of the record in the file,
        [(first byte, end, CRC32)])."""
        return [(file, i, list(parts)) for (file, i), parts in self._seen.items()]

    def absorb(self, seen: Iterable[tuple[int, int, Iterable[Sequence[int]]]]) -> None:
        """Add the ranges that another verifier of the same records has read of its incomplete records.

        Args:
            seen: what `parts_read()` of the other verifier returned: (file number, number of the record in the file,
                [(first byte, end, CRC32)]) of each of these records.

        Raises:
            CrcMismatch: a record is complete, and its CRC32 is not the stored one.
        """
        for file, i, parts in seen:
            key = (file, i)
            for start, end, crc in parts:
                if key in self._done:
                    break
                self._add_range(key, self._records[file][i], start, end, crc)

    def missing_parts(self) -> Iterator[tuple[int, int, int]]:
        """Yield (file number, offset, length in bytes) of the ranges still to be read in records that were read in
        part."""
        for (file, i), seen in list(self._seen.items()):
            record = self._records[file][i]
            at = record.extent.offset
            for a, b, _ in list(seen):
                if at < a:
                    yield file, at, a - at
                at = b
            end = record.extent.offset + record.extent.length
            if at < end:
                yield file, at, end - at
