"""Who hears of what runs now: the progress of code that has no `progress` among its arguments, and the records of the
logger "ckpttool"."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["hear_progress", "log_detail", "log_step", "report_progress"]

_HEARS: ContextVar[Callable[[str, int, int], None] | None] = ContextVar("hears", default=None)


@contextmanager
def hear_progress(progress: Callable[[str, int, int], None]) -> Iterator[None]:
    """While the block runs, have `report_progress` call `progress`; at its end, close that where it is a bar."""
    token = _HEARS.set(progress)
    try:
        yield
    finally:
        _HEARS.reset(token)
        getattr(progress, "close", lambda: None)()


def report_progress(what: str, done: int, total: int) -> None:
    """Tell whoever asked for it how far this thread is: what is done, bytes done, bytes in all. What has no bytes is 0
    of 1, and 1 of 1 at its end."""
    if (progress := _HEARS.get()) is not None:
        progress(what, done, total)


def log_step(message: str, *values: object) -> None:
    """Log a step of a run with level INFO: what was opened, planned, written, committed; `message` has the form that
    `logging` takes."""
    _log("info", message, values)


def log_detail(message: str, *values: object) -> None:
    """Log a detail with level DEBUG."""
    _log("debug", message, values)


def _log(level: str, message: str, values: tuple[object, ...]) -> None:
    """Log a record, if the program has imported `logging`; otherwise nobody could see it."""
    if (logging := sys.modules.get("logging")) is not None:
        getattr(logging.getLogger("ckpttool"), level)(message, *values, stacklevel=3)
