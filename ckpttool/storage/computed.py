"""`ComputedSource`: the files of a source, and others whose bytes are computed when they are read, such as merged
weights.

One such file is in memory at a time, so readers go from front to back with one thread (`Source.in_order`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from .source import Identity, Source

__all__ = ["ComputedSource"]


class ComputedSource(Source):
    """The files of another source, and files that exist nowhere.

    Args:
        base: the source whose names stay as they are.
        made: {name of a file that exists nowhere: (its size, what computes its bytes)}; the last one computed is kept.
        others: further sources that bytes are computed from; all are closed with this one.
        working_bytes: memory that computing one file takes.
    """

    local = False
    in_order = True

    def __init__(
        self,
        base: Source,
        made: Mapping[str, tuple[int, Callable[[], memoryview]]],
        others: Iterable[Source],
        working_bytes: int,
    ) -> None:
        self.base, self.made, self.others = base, made, [s for s in others if s is not base]
        self.root, self.is_remote, self.commit = base.root, base.is_remote, base.commit
        self.working_bytes = working_bytes
        self._making = threading.Lock()
        self._held: tuple[str, memoryview] = ("", memoryview(b""))

    @property
    def local_folder(self) -> str | None:
        return self.base.local_folder

    def list(self, folder: str = "") -> list[str]:
        return self.base.list(folder)

    def exists(self, name: str) -> bool:
        return name in self.made or self.base.exists(name)

    def glance(self, name: str) -> tuple[bool, int | None]:
        return self.base.glance(name)

    def size(self, name: str) -> int:
        return self.made[name][0] if name in self.made else self.base.size(name)

    def fd(self, name: str, flags: int = 0) -> int:
        return self.base.fd(name, flags)

    @contextmanager
    def borrow_fd(self, name: str, flags: int = 0) -> Iterator[int]:
        with self.base.borrow_fd(name, flags) as fd:
            yield fd

    def readinto(self, name: str, offset: int, into: memoryview) -> None:
        if name not in self.made:
            self.base.readinto(name, offset, into)
            return
        with self._making:
            if self._held[0] != name:
                self._held = ("", memoryview(b""))  # before the next one is made, so that there are never two
                self._held = (name, self.made[name][1]())
            into[:] = self._held[1][offset : offset + len(into)]

    def prefetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        self.base.prefetch(r for r in ranges if r[0] not in self.made)

    def identities(self) -> dict[str, Identity]:
        out = dict(self.base.identities())
        for other in self.others:
            out |= {os.path.join(other.root, n): i for n, i in other.identities().items()}
        return out

    def has_versions(self) -> bool:
        return all(s.has_versions() for s in (self.base, *self.others))

    def assert_unchanged(self) -> None:
        for source in (self.base, *self.others):
            source.assert_unchanged()

    def close_files(self) -> None:
        for source in (self.base, *self.others):
            source.close_files()

    def close(self) -> None:
        self._held = ("", memoryview(b""))
        for source in (self.base, *self.others):
            source.close()
