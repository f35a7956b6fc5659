"""Who hears of what runs now: the progress of code that has no `progress` among its arguments, and the records of the
logger "ckpttool"."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .printable import printable

__all__ = ["log_detail", "log_step", "receive_progress", "report_progress"]

_HEARS: ContextVar[Callable[[str, int, int], None] | None] = ContextVar("hears", default=None)


@contextmanager
def receive_progress(progress: Callable[[str, int, int], None]) -> Iterator[None]:
    """Make `report_progress` call `progress` while the block runs in this context; afterwards, close it if it is a
    progress bar."""
    token = _HEARS.set(progress)
    try:
        yield
    finally:
        _HEARS.reset(token)
        getattr(progress, "close", lambda: None)()


def report_progress(what: str, done: int, total: int) -> None:
    """Report progress to the callback of `receive_progress`, if one is set.

    Args:
        what: name of the stage.
        done, total: bytes done and bytes in all; a stage without bytes reports 0 of 1, and 1 of 1 at its end.
    """
    if (progress := _HEARS.get()) is not None:
        progress(what, done, total)


def log_step(message: str, *values: object) -> None:
    """Log a step of a run with level INFO: what was opened, planned, written, committed; `message` has the form that
    `logging` takes."""
    _log_if_imported("info", message, values)


def log_detail(message: str, *values: object) -> None:
    """Log a detail with level DEBUG."""
    _log_if_imported("debug", message, values)


def _log_if_imported(level: str, message: str, values: tuple[object, ...]) -> None:
    """Log a record, if the program has imported `logging`; otherwise nothing would show it. What does not print in a
    text, as names of a checkpoint may have, becomes escapes. `level` is "info" or "debug"."""
    if (logging := sys.modules.get("logging")) is not None:
        shown = (printable(value) if isinstance(value, str) else value for value in values)
        getattr(logging.getLogger("ckpttool"), level)(message, *shown, stacklevel=3)
