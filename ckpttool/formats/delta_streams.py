"""The changes of one tensor, applied to its bytes from front to back: nothing is held but a block."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..errors import Corrupt
from ..extras import require_packages
from ..index.checkpoint import ITEMSIZE
from ..storage.source import Source
from .deltas import Delta, Payload, TensorPatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[Any]

__all__ = ["WORKING_BYTES", "ChangeStream", "check_payload", "open_change_stream", "require_checksum_package"]

_BLOCK = 256 << 10
_MOST_WINDOW = 8 << 20  # what any zstd decoder must take; the levels that programs use have 2 MiB or less
#: Memory of an open stream, in bytes.
WORKING_BYTES = _MOST_WINDOW + 4 * _BLOCK


class ChangeStream(Protocol):
    """The change of a tensor, which is applied from its first byte to its last."""

    def apply(self, data: Bytes) -> None:
        """Change the next bytes of the tensor, an array of uint8, in place."""

    def finish(self) -> None:
        """Check, after the last byte of the tensor, that the change is used up and the checksum is right.

        Raises:
            Corrupt: some of the change is left, or the tensor does not have the checksum that the delta states.
        """


def require_checksum_package(delta: Delta) -> None:
    """Check that the package for the checksums of a delta is installed.

    Raises:
        MissingPackage: it is not.
    """
    if any(p.checksum is not None and p.checksum[0] == "xxh3-128" for p in delta.patches.values()):
        require_packages(f"{delta.title}: its checksums", "xxhash")


def open_change_stream(delta: Delta, patch: TensorPatch, dtype: str, numel: int) -> ChangeStream:
    """Open the change of a tensor, to be applied to its bytes from front to back.

    Args:
        delta: the delta that the change is in.
        patch: the change.
        dtype: torch's name of the tensor's dtype.
        numel: number of its elements.

    Raises:
        Corrupt: the checksum is of an unknown kind.
    """
    what = f'{delta.where}: the change of "{patch.name}"'
    kind = _Xor if len(patch.payloads) == 1 else _Sparse
    stream = kind(delta.source, patch, dtype, numel, what)
    return stream if patch.checksum is None else _Checked(stream, *patch.checksum, what)


class _Checked:
    """A `ChangeStream` that hashes the tensor as it is changed, and compares its checksum in `finish`."""

    def __init__(self, stream: ChangeStream, algorithm: str, wanted: str, what: str) -> None:
        """Wrap a stream.

        Args:
            stream: the change that is applied.
            algorithm: "adler32", "sha256" or "xxh3-128".
            wanted: the checksum, in hex, that the tensor must have after the change.
            what: names the change in messages.

        Raises:
            Corrupt: the algorithm is unknown.
        """
        self._stream, self._algorithm, self._wanted, self._what = stream, algorithm, wanted, what
        self._hasher = _make_hasher(algorithm, what)

    def apply(self, data: Bytes) -> None:
        """Change the next bytes of the tensor, an array of uint8, in place, and hash the result."""
        self._stream.apply(data)
        self._hasher.update(data.data)

    def finish(self) -> None:
        """Check, after the last byte of the tensor, that the change is used up and the tensor has the wanted checksum.

        Raises:
            Corrupt: some of the change is left, or the checksum is another.
        """
        self._stream.finish()
        if (found := self._hasher.hexdigest()) != self._wanted:
            raise Corrupt(
                f"{self._what} gives a tensor with the {self._algorithm} {found}, and the delta says {self._wanted}. "
                "Either the base is not the version that the delta was made from, or one of the two was damaged.",
                code="CKPT0432",
            )


class _Adler32:
    """zlib's Adler-32 with the methods of a hash of hashlib."""

    def __init__(self) -> None:
        self._value = 1

    def update(self, data: memoryview) -> None:
        """Include the next bytes in the checksum."""
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        """Return the checksum of all bytes so far, as 8 hexadecimal digits."""
        return f"{self._value:08x}"


def _make_hasher(algorithm: str, what: str) -> Any:
    """Return a new hash object with the methods `update(bytes)` and `hexdigest()`, as those of hashlib have.

    Args:
        algorithm: "adler32", "sha256" or "xxh3-128".
        what: names the change in messages.

    Raises:
        Corrupt: the algorithm is unknown.
    """
    if algorithm == "adler32":
        return _Adler32()
    if algorithm == "sha256":
        import hashlib

        return hashlib.sha256()
    if algorithm != "xxh3-128":
        raise Corrupt(f"{what} has a checksum of the kind {algorithm!r}, which is not known.", code="CKPT0406")
    import xxhash

    return xxhash.xxh3_128()


class _Slice:
    """The bytes of a payload as a file that zstandard reads."""

    def __init__(self, source: Source, payload: Payload) -> None:
        """Take the source (folder) that the payload's file is in, and the payload."""
        self._source, self._file = source, payload.file
        self._at, self._end = payload.slot.offset, payload.slot.offset + payload.slot.length

    def read(self, size: int) -> bytes:
        """Return the next bytes, `size` at most; b"" at the end."""
        n = min(size, self._end - self._at)
        self._at += n
        return self._source.read(self._file, self._at - n, n)


class _Xor:
    """A zstd frame of bytes to XOR a tensor with."""

    def __init__(self, source: Source, patch: TensorPatch, dtype: str, numel: int, what: str) -> None:
        """Open the frame.

        Args:
            source: the folder of the delta.
            patch: the change, which has one payload.
            dtype, numel: not used; `_Sparse` needs them.
            what: names the change in messages.
        """
        import zstandard

        self._what, self._errors = what, zstandard.ZstdError
        decoder = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW)
        self._reader = decoder.stream_reader(cast(Any, _Slice(source, patch.payloads[0])), read_size=_BLOCK)

    def apply(self, data: Bytes) -> None:
        """XOR the next bytes of the tensor, an array of uint8, with the next bytes of the frame, in place.

        Raises:
            Corrupt: the frame is damaged, or ends before `data` does.
        """
        import numpy as np

        at = 0
        while at < len(data):
            part = self.read_bytes(min(_BLOCK, len(data) - at))
            if not part:
                raise Corrupt(f"{self._what} ends before the tensor does. It is cut, or of another.", code="CKPT0403")
            data[at : at + len(part)] ^= np.frombuffer(part, "u1")
            at += len(part)

    def finish(self) -> None:
        """Check that the frame has no bytes left after the last byte of the tensor.

        Raises:
            Corrupt: bytes are left, or the frame is damaged.
        """
        if self.read_bytes(1):
            raise Corrupt(f"{self._what} is longer than the tensor: it is of another.", code="CKPT0406")

    def read_bytes(self, size: int) -> bytes:
        """Decompress the next bytes, `size` at most; b"" at the end of the frame.

        Raises:
            Corrupt: it is damaged.
        """
        try:
            return bytes(self._reader.read(size))
        except self._errors as e:
            raise Corrupt(f"{self._what} is no zstd frame, or a damaged one: {e}.", code="CKPT0405") from None


class _Sparse:
    """Positions in ascending order, and the numbers that go there."""

    def __init__(self, source: Source, patch: TensorPatch, dtype: str, numel: int, what: str) -> None:
        """Prepare to read positions and numbers, block by block.

        Args:
            source: the folder of the delta.
            patch: the change, which has two payloads: positions, and the numbers that go there.
            dtype: torch's name of the tensor's dtype.
            numel: number of the tensor's elements.
            what: names the change in messages.
        """
        import numpy as np

        self._source, self._patch, self._what = source, patch, what
        self._item, self._numel, self._first = ITEMSIZE[dtype], numel, 0
        self._left, self._taken = patch.payloads[0].slot.shape[0], 0
        self._at, self._values = np.empty(0, "i8"), np.empty((0, self._item), "u1")
        self._last = -1

    def apply(self, data: Bytes) -> None:
        """Put the changed numbers into the next bytes of the tensor, in place.

        Args:
            data: an array of uint8 that holds whole elements.

        Raises:
            Corrupt: positions do not ascend, or are beyond the end of the tensor.
        """
        rows = data.reshape(-1, self._item)
        end = self._first + len(rows)
        while True:
            here = int(self._at.searchsorted(end))
            rows[self._at[:here] - self._first] = self._values[:here]
            self._at, self._values = self._at[here:], self._values[here:]
            if len(self._at) or not self.skip_block():
                break
        self._first = end

    def skip_block(self) -> bool:
        """Read the next block of positions and values, in place of the current one; return False if none is left.

        Raises:
            Corrupt: positions do not ascend, or are beyond the end of the tensor.
        """
        import numpy as np

        n = min(self._left, _BLOCK // 8)
        if not n:
            return False
        at, values = self._patch.payloads
        width = ITEMSIZE[at.slot.dtype]
        raw = self._source.read(at.file, at.slot.offset + self._taken * width, n * width)
        found = np.frombuffer(raw, f"<{'u' if at.slot.dtype.startswith('u') else 'i'}{width}").astype("i8")
        if self._patch.gaps:
            found = (found + 1).cumsum() + self._last
        steps = np.diff(found, prepend=self._last)
        if steps.min() < 1 or found[-1] >= self._numel:
            raise Corrupt(
                f"{self._what} has positions that do not ascend, or beyond the {self._numel:,} elements of the tensor.",
                code="CKPT0406",
            )
        numbers = self._source.read(values.file, values.slot.offset + self._taken * self._item, n * self._item)
        self._at, self._values = found, np.frombuffer(numbers, "u1").reshape(-1, self._item)
        self._last, self._left, self._taken = int(found[-1]), self._left - n, self._taken + n
        return True

    def finish(self) -> None:
        """Check, after the last byte of the tensor, that no position is left.

        Raises:
            Corrupt: some are left.
        """
        if self._left or len(self._at):
            raise Corrupt(f"{self._what} has positions behind the end of the tensor.", code="CKPT0406")


def check_payload(delta: Delta, patch: TensorPatch) -> None:
    """Decode the change of a tensor without applying it, to check that it is complete and undamaged.

    Raises:
        Corrupt: it is damaged, or decodes to another number of bytes than the delta states.
    """
    import numpy as np

    what = f'{delta.where}: the change of "{patch.name}"'
    if len(patch.payloads) > 1:
        # nobody knows how many elements the tensor has
        stream: Any = _Sparse(delta.source, patch, str(patch.dtype), 1 << 62, what)
        while stream.skip_block():
            pass
        return
    stream, count = _Xor(delta.source, patch, "uint8", 0, what), 0
    if patch.nbytes is None:
        while part := stream.read_bytes(_BLOCK):
            count += len(part)
        return
    while count < patch.nbytes:
        n = min(_BLOCK, patch.nbytes - count)
        stream.apply(np.zeros(n, "u1"))
        count += n
    stream.finish()
