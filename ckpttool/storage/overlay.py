"""Sources that add to the files of another source: computed files, a second checkpoint, files next to the folder,
repaired files.

    ComputedSource   bytes that are computed when they are read, such as merged weights
    JoinedSource     the files of a second checkpoint under other names, and a file of zeros
    SiblingsSource   files next to the folder, for trainers that put a part of a checkpoint there
    PatchedSource    damaged files with the sizes and the structure that they should have

No file on a disk is touched by any of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import Corrupt
from .source import OverlaySource, Source
from .sources import open_source

__all__ = [
    "ENDLESS",
    "ZEROS",
    "ComputedSource",
    "JoinedSource",
    "LostBytes",
    "PagedFile",
    "Patch",
    "PatchedSource",
    "SiblingsSource",
    "add_sibling_files",
    "find_parent_folder",
    "name_in_joined",
]

#: The size of a file whose real size is not known; an index says where its items are.
ENDLESS = 1 << 60
#: A file of `ENDLESS` zeros in a `JoinedSource`. No file on a disk can have a name with NUL in it.
ZEROS = "\0zeros"
_OTHER = "\0other checkpoint/"

# ---------------------------------------------------------------------------------------------------- computed files


class PagedFile(NamedTuple):
    """A file that exists nowhere, and is computed a page at a time: `compute(k)` returns bytes [k * page, (k + 1) *
    page), as far as the file goes."""

    size: int
    page: int
    compute: Callable[[int], memoryview]


class ComputedSource(OverlaySource):
    """The files of another source, and files that exist nowhere.

    One page of one such file is in memory at a time, so readers go from front to back with one thread
    (`Source.in_order`).

    Args:
        base: the source whose names stay as they are.
        made: {name of a file that exists nowhere: its pages}; the page that was computed last is kept.
        others: further sources that bytes are computed from; all are closed with this one.
        working_bytes: memory that computing a page takes.
    """

    in_order = True

    def __init__(
        self,
        base: Source,
        made: Mapping[str, PagedFile],
        others: Iterable[Source],
        working_bytes: int,
    ) -> None:
        super().__init__(base, *(s for s in others if s is not base))
        self.made, self.working_bytes = made, working_bytes
        self.measured: dict[str, list[float]] = {}  # what `compute` notes of pages, for whoever made them
        self._making = threading.Lock()
        self._held: tuple[str, int, memoryview] = ("", 0, memoryview(b""))

    def name_here(self, number: int, name: str) -> str:
        """Return the path of a file of `sources[number]`: its own name for number 0; otherwise its full path, for
        messages only, since it cannot be read under that name here."""
        return os.path.join(self.sources[number].root, name) if number else name

    def exists(self, name: str) -> bool:
        """Return whether a file of that name is computed, or is in the first source."""
        return name in self.made or super().exists(name)

    def size(self, name: str) -> int:
        """Return the bytes of a file, computed or not."""
        return self.made[name].size if name in self.made else super().size(name)

    def readinto(self, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file from `offset` on. A computed file is computed by complete pages, of
        which the last one is kept."""
        if name not in self.made:
            super().readinto(name, offset, into)
            return
        made = self.made[name]
        with self._making:
            at = 0
            while at < len(into):
                page, inside = divmod(offset + at, made.page)
                if self._held[:2] != (name, page):
                    self._held = ("", 0, memoryview(b""))  # before the next one is made, so that there are never two
                    self._held = (name, page, made.compute(page))
                n = min(made.page - inside, len(into) - at)
                into[at : at + n] = self._held[2][inside : inside + n]
                at += n

    def prefetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Announce ranges (name, offset, length) to the first source, except those of computed files."""
        self.inner.prefetch(r for r in ranges if r[0] not in self.made)

    def close(self) -> None:
        """Drop the page that is in memory, and close all sources."""
        self._held = ("", 0, memoryview(b""))
        super().close()


# -------------------------------------------------------------------------------------------------- a second checkpoint


def name_in_joined(name: str) -> str:
    """Return the name, in a `JoinedSource`, of the file that its second checkpoint calls `name`."""
    return _OTHER + name


class JoinedSource(OverlaySource):
    """The files of one checkpoint, those of `other` under the names of `name_in_joined`, and `ZEROS`.

    So a tensor of one index may come from two checkpoints, or have rows that are zero. Lists, and with that everything
    that looks around in a folder, are those of the first.
    """

    def __init__(self, inner: Source, other: Source | None = None) -> None:
        """Join `inner`, the source of the first checkpoint, and `other`, that of the second; None for none."""
        super().__init__(inner, *([] if other is None else [other]))

    @property
    def local_folder(self) -> str | None:
        """Return None: no folder holds the files of both checkpoints."""
        return None

    def locate(self, name: str) -> tuple[Source, str]:
        """Return (the source of the checkpoint that has a file, the file's name in that source)."""
        if len(self.sources) > 1 and name.startswith(_OTHER):
            return self.sources[1], name.removeprefix(_OTHER)
        return self.inner, name

    def name_here(self, number: int, name: str) -> str:
        """Return the name in this source of a file of `sources[number]`: 0 is the first checkpoint, 1 the other."""
        return name_in_joined(name) if number else name

    def list(self, folder: str = "") -> list[str]:
        """Return the sorted names in a folder of the first checkpoint."""
        return self.inner.list(folder)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; `ENDLESS` for the file of zeros."""
        return ENDLESS if name == ZEROS else super().size(name)

    def readinto(self, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file of either checkpoint from `offset` on, or with zeros where the name is
        `ZEROS`."""
        if name == ZEROS:
            into[:] = bytes(len(into))
        else:
            super().readinto(name, offset, into)

    def prefetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Announce ranges (name, offset, length) to the sources that have the files, except those of zeros."""
        super().prefetch(r for r in ranges if r[0] != ZEROS)


# ------------------------------------------------------------------------------------------- files next to the folder


def find_parent_folder(source: Source) -> tuple[str, str]:
    """Return (path or URL of the folder that contains a source's folder, name of the source's folder in it), with links
    resolved; the path is "" if there is no parent, as for a bucket."""
    root = os.path.realpath(source.root) if source.local else source.root
    parent, _, name = root.rstrip("/").rpartition("/")
    return ("" if parent.endswith("/") else parent), name


class SiblingsSource(OverlaySource):
    """A folder, and "../<name>" for each of `names`, files below the folder above: "recipe_state/recipe_state.pt".

    torchtune has epoch_3/ and recipe_state/recipe_state.pt next to it, verl has actor/ and data.pt. Every other name
    that leads out of the folder is refused, as in any source.
    """

    def __init__(self, inner: Source, names: Iterable[str]) -> None:
        above = open_source(find_parent_folder(inner)[0])
        super().__init__(inner, above, local=inner.local and above.local)
        self._names = frozenset(names)

    @property
    def sibling_names(self) -> frozenset[str]:
        """Return the files of the parent folder that this source also has, as "../NAME"; the set holds the NAMEs."""
        return self._names

    def locate(self, name: str) -> tuple[Source, str]:
        """Return (source that has a file, name of the file in that source): the parent folder for "../NAME" with one of
        the sibling names, this folder for all others."""
        before, found, rest = name.partition("../")
        if not before and found and rest in self._names:
            return self.sources[1], rest
        return self.inner, name

    def name_here(self, number: int, name: str) -> str:
        """Return the name in this source of a file of `sources[number]`: 0 is the folder, 1 the folder above."""
        return f"../{name}" if number else name


def add_sibling_files(source: Source, names: Iterable[str]) -> Source:
    """Return a source that also has files of the parent folder, as "../NAME". A `PatchedSource` is changed in place and
    returned, so that its patches still apply.

    Args:
        source: the folder that is read.
        names: of the files, relative to the parent folder.
    """
    if source.patched is None:
        return SiblingsSource(source, names)
    source.patched.sources = (SiblingsSource(source.patched.inner, names),)
    return source


# ------------------------------------------------------------------------------------------------------ repaired files


class LostBytes(Corrupt):
    """Bytes of a damaged file are not there; all before `present` are."""

    code = "CKPT0403"
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
        """Yield bytes [offset, offset + length) of the patched file in order: (offset, computed bytes), or (offset,
        number of bytes to read from disk).

        Raises:
            LookupError: one of them is in a hole; the pieces before it were yielded.
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
        """Return whether all of the bytes [offset, offset + length) are known."""
        try:
            return length == 0 or bool(list(self.pieces(offset, length)))
        except LookupError:
            return False


class PatchedSource(OverlaySource):
    """The files of another source, some of them patched, so that every reader of whole files reads them too.

    A file that was cut off has a hole where its last bytes should be, and may have bytes behind the hole that follow
    from those that are there (the directory of a zip). The bytes of a hole are never made up: asking for one raises
    `LostBytes`.

    Args:
        patches: {name: how it should be}; a file that does not exist may be one, with `present` 0.
        patch_missing: returns the patch of a file that does not exist and is none of `patches`, or None where it is
            just missing.
    """

    def __init__(
        self,
        inner: Source,
        patches: Mapping[str, Patch],
        patch_missing: Callable[[str], Patch | None] = lambda name: None,
    ) -> None:
        """Patch files of the source `inner`; the class describes the other arguments."""
        super().__init__(inner)
        self.patches, self._patch_missing = dict(patches), patch_missing

    @property
    def patched(self) -> PatchedSource:
        """Return this source: damaged files appear in it as patched."""
        return self

    @property
    def sibling_names(self) -> frozenset[str]:
        """Return the files of the parent folder that the source below the patches has as "../NAME"; the set holds the
        NAMEs."""
        return self.inner.sibling_names

    def patch(self, name: str) -> Patch | None:
        """Return the patch of a file; None if the file is unchanged, or if it is missing and `patch_missing` has no
        patch for it."""
        if name not in self.patches and not self.inner.exists(name):
            found = self._patch_missing(name)
            if found is not None:
                self.patches[name] = found
        return self.patches.get(name)

    def list(self, folder: str = "") -> list[str]:
        """Return the sorted names in a folder, with those of patched files that do not exist."""
        new = {n for n in self.patches if os.path.dirname(n) == folder}
        return sorted({*self.inner.list(folder), *(os.path.basename(n) for n in new)})

    def exists(self, name: str) -> bool:
        """Return whether there is a file of that name, on the disk or as a patch."""
        return self.inner.exists(name) or self.patch(name) is not None

    def glance(self, name: str) -> tuple[bool, int | None]:
        """Return (whether a name that `list` returned is a folder, size of the file in bytes after patching or None if
        unknown)."""
        return (False, self.patches[name].size) if name in self.patches else self.inner.glance(name)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes, after patching."""
        found = self.patch(name)
        return self.inner.size(name) if found is None else found.size

    def readinto(self, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file from `offset` on, after patching.

        Raises:
            LostBytes: some of them are in the hole of a patched file.
        """
        found = self.patch(name)
        if found is None:
            self.inner.readinto(name, offset, into)
            return
        at = 0
        try:
            for where, piece in found.pieces(offset, len(into)):
                n = piece if isinstance(piece, int) else len(piece)
                if isinstance(piece, int):
                    self.inner.readinto(name, where, into[at : at + n])
                else:
                    into[at : at + n] = piece
                at += n
        except LookupError:
            lost = LostBytes(
                f"{os.path.join(self.root, name)}: bytes {offset}..{offset + len(into)} are lost; only the first "
                f"{found.present} are there."
            )
            lost.present = found.present
            raise lost from None

    def prefetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Announce ranges (name, offset, length), except those of patched files."""
        super().prefetch(r for r in ranges if self.patch(r[0]) is None)
