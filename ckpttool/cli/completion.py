"""What TAB completes behind options: layouts, dtypes, name maps, components, and names in a checkpoint on this
machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import typer

__all__ = ["COMPLETIONS", "complete_name"]

_MOST = 200  # names that a shell is given


def _begin(words: Iterable[str], incomplete: str) -> list[str]:
    """Return the first of some words that begin with what was typed so far."""
    return [word for word in words if word.startswith(incomplete)][:_MOST]


def _complete_layout(incomplete: str) -> list[str]:
    """Return the names of layouts that begin with what was typed so far."""
    from ..layouts import layouts

    return _begin(layouts(), incomplete.lower())


def _complete_dtype(incomplete: str) -> list[str]:
    """Return the dtypes that begin with what was typed so far."""
    return _begin(("bf16", "fp16", "fp32", "fp64", "keep"), incomplete)


def _complete_map(incomplete: str) -> list[str]:
    """Return the name maps that come with ckpttool and begin with what was typed so far."""
    from ..engine.map_choice import NO_MAP
    from ..huggingface import maps

    return _begin([*maps.names(), NO_MAP], incomplete)


def _complete_selection(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return components that begin with what was typed behind the last comma; behind a dot, names in the checkpoint."""
    from ..index.names import COMPONENTS

    before, comma, last = incomplete.rpartition(",")
    words = complete_name(ctx, last) if "." in last else _begin(COMPONENTS, last)
    return [before + comma + word for word in words]


def complete_name(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names in the checkpoint that was typed as the first argument, if it can be read on this machine."""
    from ..engine.opening import OpenOptions, open_checkpoint
    from ..errors import CkpttoolError
    from ..storage.urls import is_url

    # behind an option without its value, click has not given the arguments their names yet
    path = next(filter(None, [*map(ctx.params.get, ("path", "src", "a")), *ctx.args]), None)
    if path is None or is_url(path):
        return []
    try:
        with open_checkpoint(path, OpenOptions(), check_hints=False, needed=lambda component: False) as opened:
            return _begin([*opened.checkpoint.tensors, *opened.checkpoint.values], incomplete)
    except (CkpttoolError, OSError):
        return []


#: {metavar of an option: what completes its value}
COMPLETIONS: dict[str | None, Callable[..., Any]] = {
    "LAYOUT": _complete_layout,
    "DTYPE": _complete_dtype,
    "NAME|FILE": _complete_map,
    "model,GLOB,...": _complete_selection,
    "scheduler,GLOB,...": _complete_selection,
}
