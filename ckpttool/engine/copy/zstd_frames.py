"""Chunks that are zstd frames, decompressed as streams."""

from __future__ import annotations

import io
from typing import IO, Any

from ...errors import Corrupt, Unsafe
from ...formats.crc import crc32
from ...index.records import Extent
from ...storage.source import Source

__all__ = ["ZstdDecoder", "decompress_ends"]


class _Raw(io.RawIOBase, IO[bytes]):
    """A byte range of a source file as a stream."""

    def __init__(self, source: Source, name: str, offset: int, length: int) -> None:
        """Make a stream of `length` bytes of the file `name` in `source`, from `offset` on."""
        self.source, self.name_, self.at, self.end = source, name, offset, offset + length

    def readable(self) -> bool:
        """Return True: the stream can be read from."""
        return True

    def readinto(self, b: Any) -> int:
        """Read the next bytes into the buffer `b`, and return their number; 0 at the end of the range."""
        n = min(len(b), self.end - self.at)
        b[:n] = self.source.read(self.name_, self.at, n)
        self.at += n
        return n


class ZstdDecoder:
    """The content of one zstd frame from byte `skip` on; `crc` is the CRC32 that it must have from there on, None where
    it is not known, and `what` names it in errors."""

    crc = 0

    def __init__(self, source: Source, name: str, extent: Extent, skip: int, crc: int | None, what: str) -> None:
        """Begin to decompress a frame, and skip the first bytes of its content.

        Args:
            source, name: the source, and the name of the file in it.
            extent: the range of the frame in the file, in bytes.
            skip: bytes of the content to skip.
            crc: CRC32 that the content must have from there on; None if it is not known.
            what: what errors call the frame.

        Raises:
            Corrupt: the frame is damaged, or ends before that.
        """
        import zstandard

        self.what, self.want = what, crc
        self.error = zstandard.ZstdError
        self.stream = zstandard.ZstdDecompressor(max_window_size=128 << 20).stream_reader(
            _Raw(source, name, extent.offset, extent.length), read_size=256 << 10
        )
        scratch = memoryview(bytearray(min(skip, 1 << 20)))
        while skip:
            skip -= len(self.take(scratch[: min(skip, len(scratch))]))
        self.crc = 0

    def take(self, into: memoryview) -> memoryview:
        """Fill `into` with the next bytes, and return it.

        Raises:
            Corrupt: the frame is damaged, or ends too early.
        """
        got = 0
        while got < len(into):
            try:
                k = self.stream.readinto(into[got:])
            except self.error as e:
                raise Corrupt(f"{self.what}: the zstd frame is damaged ({e}).", code="CKPT0405") from None
            if not k:
                raise Corrupt(f"{self.what}: the zstd frame ends too early.", code="CKPT0405")
            got += k
        self.crc = crc32(into, self.crc)
        return into

    def close(self) -> None:
        """Free the decompressor, after the last byte of the tensor.

        Raises:
            Corrupt: the bytes do not have the CRC32 that the file itself says.
        """
        self.stream.close()  # type: ignore[no-untyped-call]
        if self.want is not None and self.crc != self.want:
            raise Corrupt(
                f"{self.what}: the bytes have CRC32 {self.crc:08x}, the file itself says {self.want:08x}.",
                code="CKPT0405",
            )


def decompress_ends(
    source: Source, name: str, offset: int, length: int, most: int, what: str
) -> tuple[bytes, bytes, int]:
    """Decompress a zstd frame in constant memory and return (first 64 KiB, last 64 KiB, size in bytes) of its content.

    Args:
        name: the file in `source`.
        offset, length: the frame's range in the file, in bytes.
        most: the largest size of the content that is accepted, in bytes.
        what: names the frame in errors.

    Raises:
        Unsafe: it decompresses to more than `most` bytes.
        Corrupt: it is damaged.
    """
    import zstandard

    head, tail, total = b"", b"", 0
    stream = zstandard.ZstdDecompressor(max_window_size=128 << 20).stream_reader(_Raw(source, name, offset, length))
    try:
        while piece := stream.read(1 << 20):
            total += len(piece)
            if total > most:
                raise Unsafe(
                    f"{what}: the zstd frame decompresses to more than {most} bytes, which its tensor needs.",
                    code="CKPT0704",
                )
            if len(head) < 65536:
                head += piece[: 65536 - len(head)]
            tail = (tail + piece)[-65536:]
    except zstandard.ZstdError as e:
        raise Corrupt(f"{what}: the zstd frame is damaged ({e}).", code="CKPT0405") from None
    return head, tail, total
