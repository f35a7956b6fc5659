"""For tests of a trainer: two checkpoints hold the same training state, or the test says in what they differ."""

from __future__ import annotations

from typing import Any

from .engine.diff import diff
from .engine.opening import CheckpointPath
from .printable import printable

__all__ = ["assert_same_training_state"]


def assert_same_training_state(a: CheckpointPath, b: CheckpointPath, **comparing: Any) -> None:
    """Compare two checkpoints in any layouts, at any world sizes: names, dtypes, shapes, bytes and values.

    With pytest, the fixture of this name is this function (pytest_plugin.py).

    Args:
        a, b: folders, files or URLs.
        comparing: arguments of `ckpttool.diff`: `only`, `rtol`, `atol`, `rename`, ...

    Raises:
        AssertionError: they differ, or a file with state beside one of them was not read and so not compared.
        CkpttoolError: one of them cannot be read.
    """
    __tracebackhide__ = True
    found = diff(a, b, **comparing)
    not_read = [(which, row) for which, rows in (("A", found.not_read_a), ("B", found.not_read_b)) for row in rows]
    if found or not_read:
        lines = [f"not compared, in {which}: {row['name']} ({row['what']})" for which, row in not_read]
        raise AssertionError("\n".join(map(printable, [f"A is {found.a}, B is {found.b}", *lines, *found.lines()])))
