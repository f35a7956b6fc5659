"""`JoinedSource`: the files of one checkpoint, those of another one under other names, and a file of zeros that is on
no disk.

So a tensor of one index may come from two checkpoints, or have rows that are zero. Both sources must stay open.
"""

from __future__ import annotations

from collections.abc import Iterable

from .patched import ENDLESS
from .several import SeveralSources
from .source import Source

__all__ = ["ZEROS", "JoinedSource", "of_other"]

#: A file of `ENDLESS` zeros. No file on a disk can have a name with NUL in it.
ZEROS = "\0zeros"
_OTHER = "\0other checkpoint"


def of_other(name: str) -> str:
    """The name in a `JoinedSource` of a file of the other checkpoint."""
    return f"{_OTHER}/{name}"


class JoinedSource(SeveralSources):
    """The files of `inner`; those of `other`, where there is one, as `of_other` names them; and `ZEROS`.

    Lists, and with that everything that looks around in a folder, are those of `inner`.
    """

    local = False

    def __init__(self, inner: Source, other: Source | None = None) -> None:
        super().__init__(inner, *([] if other is None else [other]))
        self.inner, self.other = inner, other

    def where(self, name: str) -> tuple[Source, str]:
        """The file of either checkpoint."""
        if self.other is not None and name.startswith(f"{_OTHER}/"):
            return self.other, name.removeprefix(f"{_OTHER}/")
        return self.inner, name

    def shown(self, number: int, name: str) -> str:
        """As `of_other` names it, of the other checkpoint."""
        return of_other(name) if number else name

    def list(self, folder: str = "") -> list[str]:
        return self.inner.list(folder)

    def size(self, name: str) -> int:
        return ENDLESS if name == ZEROS else super().size(name)

    def readinto(self, name: str, offset: int, into: memoryview) -> None:
        if name == ZEROS:
            into[:] = bytes(len(into))
        else:
            super().readinto(name, offset, into)

    def prefetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        super().prefetch(r for r in ranges if r[0] != ZEROS)
