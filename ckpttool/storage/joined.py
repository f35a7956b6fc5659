"""`JoinedSource`: the files of one checkpoint, those of another one under other names, and a file of zeros that is on no disk.

So a tensor of one index may come from two checkpoints, or have rows that are zero. Both sources must stay open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from .patched import ENDLESS
from .source import Identity, Source

__all__ = ["ZEROS", "JoinedSource", "of_other"]

#: A file of `ENDLESS` zeros. No file on a disk can have a name with NUL in it.
ZEROS = "\0zeros"
_OTHER = "\0other checkpoint"


def of_other(name: str) -> str:
    """The name in a `JoinedSource` of a file of the other checkpoint."""
    return f"{_OTHER}/{name}"


class JoinedSource(Source):
    """The files of `inner`; those of `other`, where there is one, as `of_other` names them; and `ZEROS`.

    Lists, and with that everything that looks around in a folder, are those of `inner`.
    """

    local = False

    def __init__(self, inner: Source, other: Source | None = None) -> None:
        self.inner, self.other = inner, other
        self.root, self.is_remote, self.commit = inner.root, inner.is_remote, inner.commit

    def _where(self, name: str) -> tuple[Source, str]:
        if self.other is not None and name.startswith(f"{_OTHER}/"):
            return self.other, name.removeprefix(f"{_OTHER}/")
        return self.inner, name

    def list(self, folder: str = "") -> list[str]:
        return self.inner.list(folder)

    def exists(self, name: str) -> bool:
        source, own = self._where(name)
        return source.exists(own)

    def glance(self, name: str) -> tuple[bool, int | None]:
        source, own = self._where(name)
        return source.glance(own)

    def size(self, name: str) -> int:
        if name == ZEROS:
            return ENDLESS
        source, own = self._where(name)
        return source.size(own)

    def fd(self, name: str, flags: int = 0) -> int:
        source, own = self._where(name)
        return source.fd(own, flags)

    @contextmanager
    def borrow_fd(self, name: str, flags: int = 0) -> Iterator[int]:
        source, own = self._where(name)
        with source.borrow_fd(own, flags) as fd:
            yield fd

    def readinto(self, name: str, offset: int, into: memoryview) -> None:
        if name == ZEROS:
            into[:] = bytes(len(into))
            return
        source, own = self._where(name)
        source.readinto(own, offset, into)

    def prefetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        rows = [(*self._where(name), offset, length) for name, offset, length in ranges if name != ZEROS]
        self.inner.prefetch((own, offset, length) for of, own, offset, length in rows if of is self.inner)
        if self.other is not None:
            self.other.prefetch((own, offset, length) for of, own, offset, length in rows if of is self.other)

    def identities(self) -> dict[str, Identity]:
        others = self.other.identities() if self.other is not None else {}
        return self.inner.identities() | {of_other(n): i for n, i in others.items()}

    def has_versions(self) -> bool:
        return self.inner.has_versions() and (self.other is None or self.other.has_versions())

    def assert_unchanged(self) -> None:
        self.inner.assert_unchanged()
        if self.other is not None:
            self.other.assert_unchanged()

    def close(self) -> None:
        self.inner.close()
        if self.other is not None:
            self.other.close()
