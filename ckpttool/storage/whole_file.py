"""Writes small text files, each of which is complete or is not written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import UsageError, kind_of_failure, note_change

__all__ = ["write_text_file"]


def write_text_file(path: Path, text: str, make: bool = True) -> Path:
    """Write a text file atomically, under a temporary name and then renamed, and return its path.

    Args:
        path: of the file.
        text: its content.
        make: create its folder if that is missing.

    Raises:
        UsageError: it cannot be written there. NoSpace: the disk is full.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # no .prom at its end: a collector would read it
    try:
        if make:
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{path}: there is something that is not a regular file.", code="CKPT0212")
        try:
            with open(draft, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as f:
                f.write(text)
                f.flush()
                os.fsync(f.fileno())
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as e:
        raise kind_of_failure(e, UsageError)(f"{path} cannot be written: {e.strerror or e}.") from None
    note_change(f"{path} was written.")
    return path
