"""Nested dicts and lists from leaves with paths."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import takewhile
from typing import Any

from ..errors import Corrupt
from .checkpoint import Number, Path, joined

__all__ = ["check_no_leaf_inside_leaf", "nest"]


def check_no_leaf_inside_leaf(paths: Collection[Path]) -> None:
    """Check that no path begins with another path, as ("a", "b") does with ("a",): a dict cannot hold both.

    Raises:
        Corrupt: a path begins with another; with the longer one.
    """
    lengths = sorted({len(path) for path in paths} - {0})
    for path in paths:
        for k in takewhile(len(path).__gt__, lengths):
            if path[:k] in paths:
                raise _make_nesting_error(path)


def _make_nesting_error(path: Path) -> Corrupt:
    """Make the error for a path that leads into another leaf."""
    return Corrupt(f"{joined(path)!r} is inside a value that is neither a dict nor a list.", code="CKPT0406")


def nest(leaves: Mapping[Path, object]) -> Any:
    """Build dicts and lists from leaves, {path: leaf}: str elements of a path become keys, a `Number` an integer key,
    int elements positions in lists. A leaf at the empty path is the whole tree.

    nest({("a", 0): 1, ("a", 1): 2}) == {"a": [1, 2]}

    Raises:
        Corrupt: two leaves have one place, or a list has positions that are negative or far beyond its length.
    """
    if () in leaves:
        if len(leaves) > 1:
            raise Corrupt("a tree is a value and a dict or list at once.", code="CKPT0406")
        return leaves[()]
    tree = _Node()
    for path, leaf in leaves.items():
        at = tree
        for key in path[:-1]:
            inner = at.setdefault(key, _Node())
            if type(inner) is not _Node:
                raise _make_nesting_error(path)
            at = inner
        if path[-1] in at:
            raise Corrupt(f"{joined(path)!r} is a value and a dict or list at once.", code="CKPT0406")
        at[path[-1]] = leaf
    return _as_plain_tree(tree)


class _Node(dict[Any, Any]):
    """An inner node while a tree is built; a leaf may be a plain dict."""


def _as_plain_tree(x: object) -> object:
    """Convert an inner node of a tree that is being built, and all nodes below it, to dicts and lists; a leaf is
    returned unchanged.

    Raises:
        Corrupt: a list has positions that are negative or far beyond its length.
    """
    if type(x) is not _Node:
        return x
    if x and all(type(k) is int for k in x):
        last = max(x)
        if min(x) < 0 or last > 2 * len(x) + 64:
            raise Corrupt(f"a list with {len(x)} elements has one at position {last}.", code="CKPT0406")
        return [_as_plain_tree(x.get(k)) for k in range(last + 1)]  # DCP forgets an empty dict, which leaves a hole
    out = {int(k) if type(k) is Number else k: _as_plain_tree(v) for k, v in x.items()}
    # as a leaf, the state has keys of several types, and nobody turned them into text
    if out.keys() >= {"state", "param_groups"} and type(x.get("state")) is _Node and isinstance(out["state"], dict):
        out["state"] = _restore_parameter_numbers(out["state"], out["param_groups"])
    return out


def _restore_parameter_numbers(state: dict[object, object], groups: object) -> dict[object, object]:
    """Return an optimizer's state with integers as keys if its param groups list numbers; otherwise unchanged.

    DCP and JSON turn the numbers into text, and `load_state_dict` ignores a key that no group lists.
    """
    if not isinstance(groups, list) or not all(
        isinstance(g, dict) and isinstance(g.get("params"), (list, tuple)) for g in groups
    ):
        return state
    if not any(type(i) is int for g in groups for i in g["params"]):
        return state
    return {int(k) if type(k) is str and re.fullmatch("0|[1-9][0-9]{0,17}", k) else k: v for k, v in state.items()}
