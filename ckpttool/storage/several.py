"""`SeveralSources`: the files of two or more sources as those of one. Subclasses say whose a name is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from .source import Identity, Source

__all__ = ["SeveralSources"]


class SeveralSources(Source):
    """The files of `sources`, each of which is closed with this one. Root and revision are those of the first.

    `where(name)` is (the source that has a file, its name there), `shown(number, name)` the other way: its name here.
    """

    def __init__(self, *sources: Source) -> None:
        self.sources = sources
        first = sources[0]
        self.root, self.is_remote, self.commit = first.root, first.is_remote, first.commit

    def where(self, name: str) -> tuple[Source, str]:
        """The source that has a file, and the name of the file there."""
        raise NotImplementedError

    def shown(self, number: int, name: str) -> str:
        """The name here of a file of the source with this number."""
        raise NotImplementedError

    def list(self, folder: str = "") -> list[str]:
        source, own = self.where(folder)
        return source.list(own)

    def exists(self, name: str) -> bool:
        source, own = self.where(name)
        return source.exists(own)

    def glance(self, name: str) -> tuple[bool, int | None]:
        source, own = self.where(name)
        return source.glance(own)

    def size(self, name: str) -> int:
        source, own = self.where(name)
        return source.size(own)

    def fd(self, name: str, flags: int = 0) -> int:
        source, own = self.where(name)
        return source.fd(own, flags)

    @contextmanager
    def borrow_fd(self, name: str, flags: int = 0) -> Iterator[int]:
        source, own = self.where(name)
        with source.borrow_fd(own, flags) as fd:
            yield fd

    def readinto(self, name: str, offset: int, into: memoryview) -> None:
        source, own = self.where(name)
        source.readinto(own, offset, into)

    def prefetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        rows = [(*self.where(name), offset, length) for name, offset, length in ranges]
        for source in self.sources:
            source.prefetch((own, offset, length) for of, own, offset, length in rows if of is source)

    def identities(self) -> dict[str, Identity]:
        return {
            self.shown(i, n): found for i, source in enumerate(self.sources) for n, found in source.identities().items()
        }

    def expect(self, identities: Mapping[str, Identity]) -> None:
        of: dict[int, dict[str, Identity]] = {id(source): {} for source in self.sources}
        for name, identity in identities.items():
            source, own = self.where(name)
            of[id(source)][own] = identity
        for source in self.sources:
            source.expect(of[id(source)])

    def has_versions(self) -> bool:
        return all(source.has_versions() for source in self.sources)

    def assert_unchanged(self) -> None:
        for source in self.sources:
            source.assert_unchanged()

    def close_files(self) -> None:
        for source in self.sources:
            source.close_files()

    def close(self) -> None:
        for source in self.sources:
            source.close()
