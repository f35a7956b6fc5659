"""`WithSiblings`: a folder together with some files next to it, for trainers that put a part of a checkpoint there.

torchtune has epoch_3/ and recipe_state/recipe_state.pt next to it, verl has actor/ and data.pt. The files that were named
appear under "../"; every other name that leads out of the folder is refused, as in any source.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from . import remote
from .patched import PatchedSource
from .source import Identity, Source

__all__ = ["WithSiblings", "parent_of", "siblings_in"]


def parent_of(source: Source) -> tuple[str, str]:
    """(path of the folder above, name of the folder in it); of a link, those of the folder that it leads to."""
    root = os.path.realpath(source.root) if source.local else source.root
    parent, _, name = root.rstrip("/").rpartition("/")
    return ("" if parent.endswith("/") else parent), name


def siblings_in(source: Source) -> frozenset[str]:
    """The files of the folder above that a source has under "../", also below patches."""
    if isinstance(source, PatchedSource):
        source = source.inner
    return source.names if isinstance(source, WithSiblings) else frozenset()


class WithSiblings(Source):
    """The files of `inner`, and "../<name>" for each of `names`, files below the folder above: "recipe_state/recipe_state.pt"."""

    def __init__(self, inner: Source, names: Iterable[str]) -> None:
        self.inner, self.names = inner, frozenset(names)
        self.above = remote.open_source(parent_of(inner)[0])
        self.root, self.commit = inner.root, inner.commit
        self.local, self.is_remote = inner.local and self.above.local, inner.is_remote

    def _where(self, name: str) -> tuple[Source, str]:
        above, found, rest = name.partition("../")
        if not above and found and rest in self.names:
            return self.above, rest
        return self.inner, name

    @property
    def local_folder(self) -> str | None:
        return self.inner.local_folder

    def list(self, folder: str = "") -> list[str]:
        source, name = self._where(folder)
        return source.list(name)

    def exists(self, name: str) -> bool:
        source, own = self._where(name)
        return source.exists(own)

    def glance(self, name: str) -> tuple[bool, int | None]:
        source, own = self._where(name)
        return source.glance(own)

    def size(self, name: str) -> int:
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
        source, own = self._where(name)
        source.readinto(own, offset, into)

    def prefetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        rows = [(*self._where(name), offset, length) for name, offset, length in ranges]
        for source in (self.inner, self.above):
            source.prefetch((own, offset, length) for of, own, offset, length in rows if of is source)

    def identities(self) -> dict[str, Identity]:
        return self.inner.identities() | {f"../{n}": i for n, i in self.above.identities().items()}

    def has_versions(self) -> bool:
        return self.inner.has_versions() and self.above.has_versions()

    def assert_unchanged(self) -> None:
        self.inner.assert_unchanged()
        self.above.assert_unchanged()

    def close(self) -> None:
        self.inner.close()
        self.above.close()
