"""Folders for what a run leaves for a moment. A run that was killed cannot remove its own, so the next one on this
machine does."""

from __future__ import annotations

import fcntl
import glob
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["temporary_workspace"]

_LOCK = "lock"
_NEW = 60.0  # seconds in which a run certainly takes the lock of the folder that it made


@contextmanager
def temporary_workspace(parent: str | None = None) -> Iterator[str]:
    """Make a new folder in `parent`, or in the folder for temporary files, and remove it afterwards; and so are those
    of dead runs.

    A run holds the lock of its folder, and the kernel lets go of it when the run ends. Not every network file system
    has locks that other machines see, so the name says whose folder it is.
    """
    parent = parent or tempfile.gettempdir()
    prefix = f"ckpttool-resume-{re.sub('[^A-Za-z0-9.-]', '-', socket.gethostname())}-"
    for old in glob.glob(os.path.join(glob.escape(parent), f"{prefix}*")):
        _remove_if_dead(old)
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder,
        open(os.path.join(folder, _LOCK), "wb") as lock,
    ):
        with suppress(OSError):  # a file system without locks: nobody will know when this run is dead
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def _remove_if_dead(folder: str) -> None:
    """Remove the folder of a run that holds its lock no longer."""
    try:
        if time.time() - os.stat(folder).st_mtime < _NEW:
            return
        with open(os.path.join(folder, _LOCK), "rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # another run has it, or it is another user's
        return
