"""CRC32s that a source carries, compared with its bytes as they are read."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from ..formats.crc import crc32, crc32_combine
from ..index.checkpoint import Record

__all__ = ["CrcVerifier", "Mismatch"]


class Mismatch(Exception):
    """Bytes do not have the stored CRC32: (record, actual CRC32)."""


class CrcVerifier:
    """Checks the CRC32s of records while their bytes are read, in any order and in any pieces."""

    def __init__(self, records: Sequence[Record]) -> None:
        by_file: dict[int, list[Record]] = {}
        for r in records:
            by_file.setdefault(r.extent.file, []).append(r)
        self._records = {f: sorted(rs, key=lambda r: r.extent.offset) for f, rs in by_file.items()}
        self._starts = {f: [r.extent.offset for r in rs] for f, rs in self._records.items()}
        self._seen: dict[tuple[int, int], list[tuple[int, int, int]]] = {}  # (file, index) -> [(start, end, crc)]
        self._done: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def update(self, file: int, offset: int, data: memoryview) -> int | None:
        """Add bytes that were read at an offset. Returns their CRC32 if a record contains them and they are new.

        Raises:
            Mismatch: a record is complete, and its CRC32 is not the stored one.
        """
        starts = self._starts.get(file)
        if not starts or not len(data):
            return None
        i = bisect_right(starts, offset) - 1
        if i < 0:
            return None
        record = self._records[file][i]
        key, end = (file, i), offset + len(data)
        if key in self._done or end > record.extent.offset + record.extent.length:
            return None
        crc = crc32(data)
        with self._lock:
            seen = self._seen.setdefault(key, [])
            if len(seen) == 1 and seen[0][1] == offset:
                pass  # read from front to back, as usual
            elif any(a < end and offset < b for a, b, _ in seen):
                return crc  # read before, for another tensor that shares these bytes
            if seen and seen[-1][1] == offset:
                start, _, before = seen[-1]
                seen[-1] = (start, end, crc32_combine(before, crc, len(data)))
            else:
                seen.append((offset, end, crc))
            self._finish_record(key, record)
        return crc

    def _finish_record(self, key: tuple[int, int], record: Record) -> None:
        seen = self._seen[key]
        if sum(b - a for a, b, _ in seen) < record.extent.length:
            return
        crc = 0
        for a, b, c in sorted(seen):
            crc = crc32_combine(crc, c, b - a)
        del self._seen[key]
        self._done.add(key)
        if crc != record.crc32:
            raise Mismatch(record, crc)

    def seen(self) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
        """(file, number of a record in it, (first byte, end, CRC32) of what was read) of records that were read in part."""
        return [(file, i, sorted(parts)) for (file, i), parts in self._seen.items()]

    def absorb(self, seen: Iterable[tuple[int, int, Iterable[Sequence[int]]]]) -> None:
        """Add what another verifier of the same records has seen of those that it has not finished.

        Raises:
            Mismatch: a record is complete, and its CRC32 is not the stored one.
        """
        for file, i, parts in seen:
            key = (file, i)
            for start, end, crc in parts:
                if key in self._done:
                    break
                mine = self._seen.setdefault(key, [])
                if not any(a < end and start < b for a, b, _ in mine):
                    mine.append((start, end, crc))
                    self._finish_record(key, self._records[file][i])

    def unfinished(self) -> Iterator[tuple[int, int, int]]:
        """(file, offset, length) of the missing parts of records that were read in part."""
        for (file, i), seen in list(self._seen.items()):
            record = self._records[file][i]
            at = record.extent.offset
            for a, b, _ in sorted(seen):
                if at < a:
                    yield file, at, a - at
                at = b
            end = record.extent.offset + record.extent.length
            if at < end:
                yield file, at, end - at
