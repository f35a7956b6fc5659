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
    """While the block runs, provide a new folder for temporary files, which is removed at the end.

    Folders that dead runs left are removed first. A run holds a lock in its folder, which the kernel releases when the
    run ends. Not every network file system has locks that other machines see, so the folder's name has the host name.

    Args:
        parent: where it is made; None for the system's folder for temporary files.

    Raises:
        OSError: no folder can be made there.
    """
    parent = parent or tempfile.gettempdir()
    prefix = f"ckpttool-resume-{re.sub('[^A-Za-z0-9.-]', '-', socket.gethostname())}-"
    for old in glob.glob(os.path.join(glob.escape(parent), f"{prefix}*")):
        _remove_dead_workspace(old)
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder,
        open(os.path.join(folder, _LOCK), "wb") as lock,
    ):
        with suppress(OSError):  # a file system without locks: nobody will know when this run is dead
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def _remove_dead_workspace(folder: str) -> None:
    """Remove a workspace folder if its run has ended, so that nobody holds its lock; one younger than a minute is
    kept."""
    try:
        if time.time() - os.stat(folder).st_mtime < _NEW:
            return
        with open(os.path.join(folder, _LOCK), "rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # another run has it, or it is another user's
        return
