"""What TAB completes behind options: layouts, dtypes, name maps, components, and names in a checkpoint on this
machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import typer

__all__ = ["COMPLETIONS", "complete_entry_name"]

_MOST = 200  # names that a shell is given
#: Words that no shell changes or runs. zsh evaluates what it is given, and bash inserts it without quotes.
_PLAIN = re.compile(r"[\w./][\w.@%+,/-]*", re.ASCII)


def _filter_by_prefix(words: Iterable[str], incomplete: str) -> list[str]:
    """Return the words that begin with `incomplete` and that no shell changes or runs, at most `_MOST` of them."""
    return [word for word in words if word.startswith(incomplete) and _PLAIN.fullmatch(word)][:_MOST]


def _complete_layout(incomplete: str) -> list[str]:
    """Return the names of layouts that begin with `incomplete`."""
    from ..layouts import layouts

    return _filter_by_prefix(layouts(), incomplete.lower())


def _complete_dtype(incomplete: str) -> list[str]:
    """Return the values of --dtype that begin with `incomplete`."""
    return _filter_by_prefix(("bf16", "fp16", "fp32", "fp64", "keep"), incomplete)


def _complete_name_map(incomplete: str) -> list[str]:
    """Return the names of built-in name maps that begin with `incomplete`."""
    from ..engine.map_choice import NO_MAP
    from ..huggingface import maps

    return _filter_by_prefix([*maps.list_map_names(), NO_MAP], incomplete)


def _complete_selection(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return completions of a list with commas: its last item is completed to components or, if it has a dot, to names
    in the checkpoint."""
    from ..index.names import COMPONENTS

    before, comma, last = incomplete.rpartition(",")
    words = complete_entry_name(ctx, last) if "." in last else _filter_by_prefix(COMPONENTS, last)
    return _filter_by_prefix((before + comma + word for word in words), incomplete)


def complete_entry_name(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of tensors and values, in the checkpoint on the command line, that begin with `incomplete` and
    that no shell changes or runs.

    [] if that checkpoint is not given yet, is behind a URL or cannot be read.

    Args:
        ctx: click's context; the checkpoint is its first argument.
        incomplete: the beginning of the name.
    """
    from ..engine.opening import OpenOptions, open_checkpoint
    from ..errors import CkpttoolError
    from ..storage.urls import is_url

    # behind an option without its value, click has not given the arguments their names yet
    path = next(filter(None, [*map(ctx.params.get, ("path", "src", "a")), *ctx.args]), None)
    if path is None or is_url(path):
        return []
    try:
        with open_checkpoint(path, OpenOptions(), check_hints=False, needed=lambda component: False) as opened:
            return _filter_by_prefix([*opened.checkpoint.tensors, *opened.checkpoint.values], incomplete)
    except (CkpttoolError, OSError):
        return []


#: {metavar of an option: what completes its value}
COMPLETIONS: dict[str | None, Callable[..., object]] = {
    "LAYOUT": _complete_layout,
    "DTYPE": _complete_dtype,
    "NAME|FILE": _complete_name_map,
    "model,GLOB,...": _complete_selection,
    "scheduler,GLOB,...": _complete_selection,
}
