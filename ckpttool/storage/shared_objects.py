"""Objects of S3 that several processes send at once: what a worker may do.

A cell is `part_bytes` of an object: bytes [n, n + 1) * part_bytes are cell n, and part n + 1 of its upload. Cells
follow from the draft alone. So a cell may be sent twice, by whomever: the second one replaces the same bytes. Nothing
else is written by a worker; the coordinator begins the uploads and completes or aborts them, and a worker that wakes
afterwards is refused by the store.

What an earlier run sent is taken for sent if its ETag is the MD5 of the bytes that would be sent now. Where a store has
other ETags (SSE-KMS), the cell is sent again.

Sources: the API reference of S3 (UploadPart, ListParts; "Checking object integrity": the ETag of a part is the MD5 of
its bytes, unless it is encrypted with SSE-C or SSE-KMS).
"""

from __future__ import annotations

import hashlib
import io
import tempfile
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

from ..errors import RemoteError
from .destination_protocol import DestinationFile
from .objects import S3Answer, S3Object, s3_object
from .retries import NotFound
from .upload import SIZES, UploadPool, temp_space_error, upload_lost_error
from .urls import redact_url

if TYPE_CHECKING:
    from concurrent.futures import Future

    from .local_file import WriterPool

__all__ = ["CellRange", "Cells", "SharedObjects"]


class SharedObjects:
    """The objects of a destination, as a worker sees them.

    Args:
        shared: what `PrefixDestination.share` gives, or `ObjectDestination.share`: {"part_bytes", "on_disk", "earlier":
            whether an earlier run left parts, "objects": {name: [URL, id of the upload]}}.
    """

    def __init__(self, shared: Mapping[str, Any]) -> None:
        self.part_bytes, self.on_disk, self.earlier = shared["part_bytes"], shared["on_disk"], shared["earlier"]
        self.objects: dict[str, list[str]] = dict(shared["objects"])
        self.pool = UploadPool(max(2, SIZES.in_flight_bytes // self.part_bytes))
        self.cells: dict[str, Cells] = {}

    def cells_of(self, name: str) -> Cells:
        """Return the cells of an object."""
        if name not in self.cells:
            url, upload = self.objects[name]
            self.cells[name] = Cells(url, upload, self)
        return self.cells[name]

    def open_range(self, name: str, pool: WriterPool, start: int) -> CellRange:
        """Return a file that fills an object from byte `start` on."""
        return CellRange(self.cells_of(name), start)

    def record_part(self, number: int, result: Mapping[str, Any]) -> None:
        """Do nothing: the store lists what it has."""

    def finish_sending(self) -> dict[str, Any]:
        """Wait until all has arrived; returns "cells" {name: {cell: ETag}}, and how many of them were there before,
        "kept".

        Raises:
            RemoteError: the store fails, or the coordinator has completed or aborted the upload.
        """
        for cells in self.cells.values():
            cells.wait()
        return {
            "cells": {name: cells.etags for name, cells in self.cells.items() if cells.etags},
            "kept": sum(len(cells.kept) for cells in self.cells.values()),
        }

    def close(self) -> None:
        """Stop sending."""
        for cells in self.cells.values():
            cells.cancel()
        self.pool.close()


class Cells:
    """The cells of one object. Bytes come in ascending order, with gaps; a cell is sent when it is full."""

    def __init__(self, url: str, upload: str, shared: SharedObjects) -> None:
        at = s3_object(url)
        if at is None:
            raise RemoteError(
                f"{redact_url(url)}: this machine does not take it for an S3 store; configure fsspec the same way "
                "everywhere."
            )
        self.at: S3Object = at
        self.upload, self.shared, self.size = upload, shared, shared.part_bytes
        self.there: dict[int, S3Answer] | None = None if shared.earlier else {}
        self.number, self.have, self.body = -1, 0, self._new_body()
        self.etags: dict[int, str] = {}
        self.kept: set[int] = set()
        self.pending: list[Future[None]] = []

    def _new_body(self) -> IO[bytes]:
        """Return an empty file for the bytes of a cell, on disk or in memory."""
        return tempfile.TemporaryFile() if self.shared.on_disk else io.BytesIO()

    def append_at(self, offset: int, data: bytes | memoryview) -> None:
        """Add bytes of the object at an offset; calls come in ascending order. A cell is sent when it is full."""
        view = memoryview(data).cast("B")
        while len(view):
            number, inside = divmod(offset, self.size)
            if number != self.number:  # the one before has a gap
                self.start_cell(number)
            n = min(len(view), self.size - inside)
            self.write_cell(offset, view[:n])
            if self.have == self.size:
                self.finish_cell()
            view, offset = view[n:], offset + n

    def start_cell(self, number: int) -> None:
        """Fill this cell from here on; what came of another one is dropped."""
        self.number, self.have = number, 0
        self.body.seek(0)
        self.body.truncate()

    def write_cell(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes of the object that lie in the cell that was started; none of them twice."""
        self.have += len(data)
        try:
            self.body.seek(offset - self.number * self.size)
            self.body.write(data)
        except OSError as e:
            raise temp_space_error(e) from None

    def finish_cell(self) -> None:
        """Send the cell, which has all its bytes."""
        while self.pending and self.pending[0].done():
            self.pending.pop(0).result()
        self.pending.append(self.shared.pool.submit(self._send_cell, self.number, self.body))
        self.number, self.have, self.body = -1, 0, self._new_body()

    def _send_cell(self, number: int, body: IO[bytes]) -> None:
        """Send a cell, unless the store has it already with the same bytes."""
        try:
            if self.there is None:
                self.there = self.at.list_parts(self.upload)
            found = self.there.get(number + 1)
            if found is not None and found["ETag"].strip('"') == _md5(body):
                self.etags[number] = found["ETag"]
                self.kept.add(number)
            else:
                self.etags[number] = self.at.put_part(self.upload, number + 1, body)["ETag"]
        except NotFound:
            raise upload_lost_error(self.at.url) from None
        body.close()

    def wait(self) -> None:
        """Wait for what is being sent."""
        while self.pending:
            self.pending.pop(0).result()

    def cancel(self) -> None:
        """Send no more."""
        for future in self.pending:
            future.cancel()
        self.body.close()


def _md5(body: IO[bytes]) -> str:
    """Return the MD5 of a file in hex, which S3 uses as the ETag of a part."""
    body.seek(0)
    return hashlib.file_digest(body, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()  # type: ignore[arg-type]


class CellRange(DestinationFile):
    """Bytes of an object from `start` on; those of cells that begin before it, or end after it, are not sent."""

    fringes = None

    def __init__(self, cells: Cells, start: int) -> None:
        self.cells, self.path, self.at = cells, cells.at.url, start

    def append(self, data: bytes | memoryview) -> None:
        """Append the next bytes of the object."""
        self.cells.append_at(self.at, data)
        self.at += len(data)

    def skip_to(self, to: int) -> None:
        """Advance to offset `to`; other workers send the bytes skipped."""
        self.at = to
