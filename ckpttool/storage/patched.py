"""`PatchedSource`: a source in which damaged files appear with the sizes and the structure that they should have.

A file that was cut off has a hole where its last bytes should be, and may have bytes behind the hole that follow from
those that are there (the directory of a zip). So every reader of whole files reads it too. The bytes of a hole are
never made up: asking for one raises `Lost`. The files themselves are not touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import Corrupt
from .source import Identity, Source

__all__ = ["ENDLESS", "Lost", "Patch", "PatchedSource"]

#: The size of a file whose own is not known; an index says where its items are.
ENDLESS = 1 << 60


class Lost(Corrupt):
    """Bytes of a damaged file that are not there; all before `present` are."""

    present = 0


@dataclass(frozen=True)
class Patch:
    """A damaged file as it should be.

    `present`   how many of its first bytes are on the disk, and trusted
    `size`      how many it should have
    `made`      (offset, bytes), ascending, not before `present`: bytes that follow from others; the rest is a hole
    """

    present: int
    size: int
    made: tuple[tuple[int, bytes], ...] = ()

    def pieces(self, offset: int, length: int) -> Iterator[tuple[int, bytes | int]]:
        """What the bytes [offset, offset + length) are, in order: (offset, literal bytes) or (offset, a number of bytes
        that are on the disk).

        Raises:
            LookupError: one of them is in a hole.
        """
        end = offset + length
        if offset < self.present and offset < end:
            n = min(end, self.present) - offset
            yield offset, n
            offset += n
        for at, data in self.made:
            if offset < end and at <= offset < at + len(data):
                part = data[offset - at : end - at]
                yield offset, part
                offset += len(part)
        if offset < end:
            raise LookupError

    def has(self, offset: int, length: int) -> bool:
        """Whether all of these bytes are known."""
        try:
            return length == 0 or bool(list(self.pieces(offset, length)))
        except LookupError:
            return False


class PatchedSource(Source):
    """The files of another source, some of them patched.

    Args:
        patches: {name: how it should be}; a file that does not exist may be one, with `present` 0.
        rest: the patch of a file that does not exist and is none of `patches`; None where it is just missing.
    """

    local = False

    def __init__(
        self, inner: Source, patches: Mapping[str, Patch], rest: Callable[[str], Patch | None] = lambda name: None
    ) -> None:
        self.inner, self.patches, self._rest = inner, dict(patches), rest
        self.root, self.is_remote, self.commit = inner.root, inner.is_remote, inner.commit

    @property
    def local_folder(self) -> str | None:
        return self.inner.local_folder

    def patch(self, name: str) -> Patch | None:
        """How a file is patched; None where it is as on the disk."""
        if name not in self.patches and not self.inner.exists(name) and (found := self._rest(name)) is not None:
            self.patches[name] = found
        return self.patches.get(name)

    def list(self, folder: str = "") -> list[str]:
        new = {n for n in self.patches if os.path.dirname(n) == folder}
        return sorted({*self.inner.list(folder), *(os.path.basename(n) for n in new)})

    def exists(self, name: str) -> bool:
        return self.inner.exists(name) or self.patch(name) is not None

    def glance(self, name: str) -> tuple[bool, int | None]:
        return (False, self.patches[name].size) if name in self.patches else self.inner.glance(name)

    def size(self, name: str) -> int:
        found = self.patch(name)
        return self.inner.size(name) if found is None else found.size

    def fd(self, name: str, flags: int = 0) -> int:
        return self.inner.fd(name, flags)

    @contextmanager
    def borrow_fd(self, name: str, flags: int = 0) -> Iterator[int]:
        with self.inner.borrow_fd(name, flags) as fd:
            yield fd

    def readinto(self, name: str, offset: int, into: memoryview) -> None:
        found = self.patch(name)
        if found is None:
            self.inner.readinto(name, offset, into)
            return
        at = 0
        try:
            for where, piece in found.pieces(offset, len(into)):
                if isinstance(piece, int):
                    self.inner.readinto(name, where, into[at : at + piece])
                    at += piece
                else:
                    into[at : at + len(piece)] = piece
                    at += len(piece)
        except LookupError:
            lost = Lost(
                f"{os.path.join(self.root, name)}: bytes {offset}..{offset + len(into)} are lost; only the first "
                f"{found.present} are there."
            )
            lost.present = found.present
            raise lost from None

    def prefetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        self.inner.prefetch(r for r in ranges if r[0] not in self.patches and self.patch(r[0]) is None)

    def identities(self) -> dict[str, Identity]:
        return self.inner.identities()

    def has_versions(self) -> bool:
        return self.inner.has_versions()

    def assert_unchanged(self) -> None:
        self.inner.assert_unchanged()

    def close_files(self) -> None:
        self.inner.close_files()

    def close(self) -> None:
        self.inner.close()
