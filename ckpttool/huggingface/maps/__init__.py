"""The name maps that come with ckpttool, NAME.map: texts in the format of index/name_maps.py, for names of transformers
on the right."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib import resources

from ...errors import UsageError
from ...index.name_maps import NameMap, parse_name_map

__all__ = ["list_map_names", "load_map", "read_shipped_or_own_map"]

_SUFFIX = ".map"
_MOST = 1 << 20


def list_map_names() -> list[str]:
    """List the names of the maps that come with ckpttool, sorted, without those that other maps include (their names
    begin with _)."""
    return [n for n in _list_all_names() if not n.startswith("_")]


def _list_all_names() -> list[str]:
    """List the names of all maps that come with ckpttool, sorted, with those that other maps include."""
    found = (f.name for f in resources.files(__name__).iterdir())
    return sorted(n.removesuffix(_SUFFIX) for n in found if n.endswith(_SUFFIX))


def read_shipped_or_own_map(asked: str) -> str:
    """Return the text of a name map.

    Args:
        asked: the text itself if it has a line end, else the name of a map that comes with ckpttool, else a file.

    Raises:
        UsageError: there is no such map, or the file is no text or no map, or too long.
    """
    if "\n" in asked:
        return asked
    if asked in _list_all_names():
        return resources.files(__name__).joinpath(asked + _SUFFIX).read_text("utf-8")
    if os.path.isfile(asked):
        try:
            with open(asked, encoding="utf-8-sig") as f:
                text = f.read(_MOST + 1)
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(f"name map {asked!r:.200}: it cannot be read as text ({e}).", code="CKPT0213") from None
        if len(text) > _MOST:
            raise UsageError(
                f"name map {asked!r:.200}: it has more than {_MOST:,} characters, which no name map has.",
                code="CKPT0213",
            )
        parse_name_map(text, asked, _read_include)  # here, where the file has a name
        return text + "\n"
    if os.path.exists(asked):
        raise UsageError(
            f"name map {asked!r:.200}: it is not a regular file. Give the file of a name map.", code="CKPT0213"
        )
    raise UsageError(
        f"name map {asked!r:.200}: no such file, and no such map. Maps: {', '.join(list_map_names())}.", code="CKPT0213"
    )


@lru_cache(64)
def load_map(asked: str) -> NameMap:
    """Parse the name map that a name, a file or a text with a line end gives.

    Raises:
        UsageError: there is no such map, or its text is wrong.
    """
    return parse_name_map(
        read_shipped_or_own_map(asked), "given" if "\n" in asked else os.path.basename(asked), _read_include
    )


def _read_include(name: str) -> str:
    """Return the text of the map that a line `include NAME` names. Only maps that come with ckpttool can be included: a
    worker on another machine would not have a file.

    Raises:
        UsageError: no such map comes with ckpttool.
    """
    if name not in _list_all_names():
        raise UsageError(
            f"include {name}: no such map comes with ckpttool. Maps: {', '.join(list_map_names())}.", code="CKPT0213"
        )
    return read_shipped_or_own_map(name)
