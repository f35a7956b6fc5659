"""`WithSiblings`: a folder together with some files next to it, for trainers that put a part of a checkpoint there.

torchtune has epoch_3/ and recipe_state/recipe_state.pt next to it, verl has actor/ and data.pt. The files that were
named appear under "../"; every other name that leads out of the folder is refused, as in any source.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from . import remote
from .patched import PatchedSource
from .several import SeveralSources
from .source import Source

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


class WithSiblings(SeveralSources):
    """The files of `inner`, and "../<name>" for each of `names`, files below the folder above:
    "recipe_state/recipe_state.pt"."""

    def __init__(self, inner: Source, names: Iterable[str]) -> None:
        above = remote.open_source(parent_of(inner)[0])
        super().__init__(inner, above)
        self.inner, self.above, self.names = inner, above, frozenset(names)
        self.local = inner.local and above.local

    def where(self, name: str) -> tuple[Source, str]:
        """The file of the folder, or the one of the folder above that was named."""
        before, found, rest = name.partition("../")
        if not before and found and rest in self.names:
            return self.above, rest
        return self.inner, name

    def shown(self, number: int, name: str) -> str:
        """Below "../", of the folder above."""
        return f"../{name}" if number else name

    @property
    def local_folder(self) -> str | None:
        return self.inner.local_folder
