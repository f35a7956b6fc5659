"""Random access to the content of an archive; frame_format.py describes its file."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from ..errors import Corrupt
from ..storage.source import Source
from . import byte_planes
from .frame_format import (
    FrameFault,
    FrameTable,
    decompress_frame,
)

__all__ = ["DamagedFrame", "FrameReader"]


class DamagedFrame(Corrupt):
    """A frame that is damaged: `length` bytes of the tar from `start` on."""

    code = "CKPT0425"

    def __init__(self, message: str, start: int, length: int) -> None:
        """Make the error for one damaged frame.

        Args:
            message: the text of the error.
            start: offset in the tar of the first byte that the frame contains.
            length: number of bytes of the tar that the frame contains.
        """
        super().__init__(message)
        self.start, self.length = start, length


class FrameReader:
    """Reads ranges of the content, with byte planes merged; any number of threads may call it.

    `item_at(start)` is the number of planes of the frame whose content begins at `start`. The last `kept` frames that
    were needed in part are cached decompressed.
    """

    def __init__(
        self, source: Source, file: str, table: FrameTable, item_at: Callable[[int], int], kept: int = 8
    ) -> None:
        """Prepare to read the archive file `file`, whose frames are in `table`.

        Args:
            item_at: returns the number of byte planes of the frame whose content begins at an offset; 1: none.
            kept: decompressed frames to cache.
        """
        self.source, self.file, self.table, self.item_at, self.kept = source, file, table, item_at, kept
        self._frames: OrderedDict[int, Future[memoryview]] = OrderedDict()
        self._lock = threading.Lock()

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the content (the tar) from `offset` on, with byte planes merged to elements.

        Raises:
            DamagedFrame: a frame is damaged. Corrupt: the content ends before that, or the file cannot be read.
            RemoteError: the store fails.
        """
        table = self.table
        if offset < 0 or offset + len(view) > table.logical_size:
            raise Corrupt(
                f"{os.path.join(self.source.root, self.file)} decompresses to {table.logical_size} bytes; "
                f"{offset}..{offset + len(view)} are needed.",
                code="CKPT0425",
            )
        i = bisect_right(table.starts, offset) - 1
        while len(view):
            skip = offset - table.starts[i]
            n = min(len(view), table.lengths[i] - skip)
            if n == table.lengths[i] and i not in self._frames:
                byte_planes.merge(self._read_frame(i), self.item_at(offset), view[:n])
            else:
                view[:n] = self._get_cached_frame(i)[skip : skip + n]
            view, offset, i = view[n:], offset + n, i + 1

    def _get_cached_frame(self, i: int) -> memoryview:
        """Return the content of the frame with number `i`, its byte planes merged to elements.

        The last `kept` frames are cached. One thread decompresses a frame and others wait for it; an error is not
        cached.
        """
        with self._lock:
            future = self._frames.get(i)
            mine = future is None
            if future is None:
                future = self._frames[i] = Future()
                if len(self._frames) > self.kept:
                    self._frames.popitem(last=False)
            self._frames.move_to_end(i)
        if mine:
            try:
                future.set_result(byte_planes.merge(self._read_frame(i), self.item_at(self.table.starts[i])))
            except BaseException as e:
                with self._lock:
                    self._frames.pop(i, None)
                future.set_exception(e)
        return future.result()

    def _read_frame(self, i: int) -> bytes:
        """Return the content of the frame with number `i` as it is stored, with byte planes not merged.

        Raises:
            DamagedFrame: it is damaged. Corrupt, RemoteError: it cannot be read.
        """
        t = self.table
        raw = memoryview(bytearray(t.sizes[i]))
        self.source.readinto(self.file, t.offsets[i], raw)
        try:
            data = decompress_frame(raw, t.crcs[i])
            if (len(data), int.from_bytes(raw[-4:], "little")) != (t.lengths[i], t.checksums[i]):
                raise FrameFault("the seek table has a different size or checksum for the frame")
            return data
        except FrameFault as e:
            raise DamagedFrame(
                f"{os.path.join(self.source.root, self.file)}: bytes {t.offsets[i]}..{t.offsets[i] + t.sizes[i]}, "
                f"which decompress to {t.starts[i]}..{t.starts[i] + t.lengths[i]} of the tar, are damaged: {e}. Fetch "
                "the file again or take another copy.",
                t.starts[i],
                t.lengths[i],
            ) from None
