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
        """Return the cells of an object, the pieces in which it is uploaded.

        Args:
            name: of the object, relative to the destination.

        Raises:
            RemoteError: this machine does not recognise its URL as one of S3.
        """
        if name not in self.cells:
            url, upload = self.objects[name]
            self.cells[name] = Cells(url, upload, self)
        return self.cells[name]

    def open_range(self, name: str, pool: WriterPool, start: int) -> CellRange:
        """Return a writer that uploads an object's bytes from a given one on.

        Args:
            name: of the object, relative to the destination.
            pool: ignored; here because `SharedTree.open_range` writes with it.
            start: offset in the object of the first byte to write, in bytes.
        """
        return CellRange(self.cells_of(name), start)

    def record_part(self, number: int, result: Mapping[str, object]) -> None:
        """Do nothing, since the store itself lists the uploaded parts. (`SharedTree.record_part` records them on
        disk.)"""

    def finish_sending(self) -> dict[str, object]:
        """Wait until all cells are uploaded, and return what was uploaded.

        Returns:
            {"cells": {object name: {cell number, from 0 on: ETag of the cell}}, "kept": how many of these cells an
                earlier run had uploaded already}.

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
        """Cancel all cells that are not being uploaded yet, and wait for the others."""
        for cells in self.cells.values():
            cells.cancel()
        self.pool.close()


class Cells:
    """The cells of one object. Bytes come in ascending order, with gaps; a cell is sent when it is full."""

    def __init__(self, url: str, upload: str, shared: SharedObjects) -> None:
        """Start without bytes.

        Args:
            url: URL of the object.
            upload: id of its multipart upload, which the coordinator began.
            shared: the worker's view of the destination, which gives the size of a cell and the threads that send.

        Raises:
            RemoteError: this machine does not recognise the URL as one of S3.
        """
        at = s3_object(url)
        if at is None:
            raise RemoteError(
                f"{redact_url(url)}: this machine does not take it for an S3 store; configure fsspec the same way "
                "everywhere."
            )
        self.at: S3Object = at
        self.upload, self.shared, self.size = upload, shared, shared.part_bytes
        self.there: dict[int, S3Answer] | None = None if shared.earlier else {}
        self.number, self.have, self.body = -1, 0, self._open_body_file()
        self.etags: dict[int, str] = {}
        self.kept: set[int] = set()
        self.pending: list[Future[None]] = []

    def _open_body_file(self) -> IO[bytes]:
        """Return an empty temporary file, on disk or in memory, for the bytes of a cell."""
        return tempfile.TemporaryFile() if self.shared.on_disk else io.BytesIO()

    def append_at(self, offset: int, data: bytes | memoryview) -> None:
        """Add bytes of the object at byte `offset`; offsets must ascend from call to call. Each cell is uploaded when
        it is full, and an incomplete cell is dropped when bytes of another one follow.

        Raises:
            NoSpace: the local disk, on which cells wait to be uploaded, is full.
            RemoteError: an earlier cell could not be uploaded.
        """
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
        """Begin to fill the cell with this number; the bytes of an incomplete earlier cell are dropped."""
        self.number, self.have = number, 0
        self.body.seek(0)
        self.body.truncate()

    def write_cell(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes at byte `offset` of the object, which lies in the cell that was started. No byte of a cell may be
        written twice.

        Raises:
            NoSpace: the local disk is full, on which cells wait to be sent.
        """
        self.have += len(data)
        try:
            self.body.seek(offset - self.number * self.size)
            self.body.write(data)
        except OSError as e:
            raise temp_space_error(e) from None

    def finish_cell(self) -> None:
        """Queue the started cell, all of whose bytes were written, for upload by another thread.

        Raises:
            RemoteError: an earlier cell could not be uploaded.
        """
        while self.pending and self.pending[0].done():
            self.pending.pop(0).result()
        self.pending.append(self.shared.pool.submit(self._send_cell, self.number, self.body))
        self.number, self.have, self.body = -1, 0, self._open_body_file()

    def _send_cell(self, number: int, body: IO[bytes]) -> None:
        """Upload the bytes of a cell and record its ETag; if an earlier run uploaded the same bytes, only record the
        ETag.

        Args:
            number: of the cell.
            body: a file with its bytes, which is closed.

        Raises:
            RemoteError: the store fails, or the upload was completed or aborted.
        """
        try:
            if self.there is None:
                self.there = self.at.list_parts(self.upload)
            found = self.there.get(number + 1)
            if found is not None and found["ETag"].strip('"') == _compute_md5(body):
                self.etags[number] = found["ETag"]
                self.kept.add(number)
            else:
                self.etags[number] = self.at.put_part(self.upload, number + 1, body)["ETag"]
        except NotFound:
            raise upload_lost_error(self.at.url) from None
        body.close()

    def wait(self) -> None:
        """Wait for the cells that are being sent, and raise the error of the first that failed."""
        while self.pending:
            self.pending.pop(0).result()

    def cancel(self) -> None:
        """Send no more cells, and drop the one that is being filled; what is on its way is not stopped."""
        for future in self.pending:
            future.cancel()
        self.body.close()


def _compute_md5(body: IO[bytes]) -> str:
    """Return the MD5 of a file's complete content in hex, which S3 uses as the ETag of a part."""
    body.seek(0)
    return hashlib.file_digest(body, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()  # type: ignore[arg-type]


class CellRange(DestinationFile):
    """Bytes of an object from `start` on; those of cells that begin before it, or end after it, are not sent."""

    fringes = None

    def __init__(self, cells: Cells, start: int) -> None:
        self.cells, self.path, self.at = cells, cells.at.url, start

    def append(self, data: bytes | memoryview) -> None:
        """Add the next bytes of the object; a cell is sent when it is full."""
        self.cells.append_at(self.at, data)
        self.at += len(data)

    def skip_to(self, to: int) -> None:
        """Advance to byte `to` of the object; other workers send the bytes between."""
        self.at = to
