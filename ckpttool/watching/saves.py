"""The saves of a run that are in its folder now, with a fingerprint of the files of each."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from blake3 import blake3

from ..engine.discover.detection import find_step
from ..engine.runs import RunStep, list_run
from ..errors import NotRecognised

__all__ = ["WatchedSave", "family", "list_files", "list_saves", "take_fingerprint"]

_UNKNOWN = "no layout knows it: it is being written, or damaged"
_WRITTEN_LAST = re.compile(rf"written last|writes last|unfinished save|did not finish|{_UNKNOWN}")


@dataclass(frozen=True)
class WatchedSave:
    """A save in the folder of a run.

    `fingerprint` changes when a file of it is written, replaced, added or removed; `changed` is the newest time of
    change of its files, in seconds since 1970.
    """

    found: RunStep
    fingerprint: str
    changed: float

    @property
    def name(self) -> str:
        """Return its name relative to the run; "." where it is the folder of the run itself."""
        return self.found.name or "."

    @property
    def path(self) -> str:
        """Return its path."""
        return self.found.path

    @property
    def step(self) -> int | None:
        """Return the step, or else the epoch, that its name has; None where it has none."""
        return self.found.number

    @property
    def age(self) -> tuple[int, float, str]:
        """Return the key that sorts saves from the oldest to the newest."""
        return (-1 if self.step is None else self.step, self.changed if self.step is None else 0.0, self.name)

    @property
    def begun(self) -> bool:
        """Tell whether its trainer may be writing it: it lacks what is written last, or its trainer keeps a file that
        names the newest save, and has not named this one."""
        return self.found.being_written if self.found.complete else bool(_WRITTEN_LAST.search(self.found.lacks))


def list_saves(run: str, state: str) -> list[WatchedSave]:
    """List the saves in the folder of a run, from the oldest to the newest; the folder itself where it is one save that
    is overwritten. [] where there is no such folder, or no save in it.

    Args:
        state: the folder of the journal, which is passed over.
    """
    if not os.path.isdir(run):
        return []
    try:
        found = list_run(run, look=False).steps
    except NotRecognised:
        return []
    inside = os.path.realpath(state) + "/"
    out = []
    for c in [*found, *_find_unknown(run, found)]:
        if not (os.path.realpath(c.path) + "/").startswith(inside) and (seen := take_fingerprint(c.path)) is not None:
            out.append(WatchedSave(c, *seen))
    return sorted(out, key=lambda save: save.age)


def _find_unknown(run: str, found: list[RunStep]) -> Iterator[RunStep]:
    """Yield a row for each entry beside the saves of a run that is named as they are, and that no layout knows."""
    kin = {(os.path.dirname(c.name), family(os.path.basename(c.name))): c for c in found if c.name}
    known = {c.name for c in found}
    for folder in {folder for folder, _ in kin}:
        with suppress(OSError):
            for entry in os.listdir(os.path.join(run, folder)):
                name, like = os.path.join(folder, entry), kin.get((folder, family(entry)))
                if like is not None and name not in known and not os.path.islink(path := os.path.join(run, name)):
                    row = replace(like, path=path, name=name, step=find_step(name), complete=False, lacks=_UNKNOWN)
                    yield replace(row, newest=False, weights_only=False, digest=None)


def take_fingerprint(path: str) -> tuple[str, float] | None:
    """Return (a digest of names, sizes, times and inodes of all files of a save, the newest time of a change); no file
    is opened. None where there is no file."""
    files: list[tuple[str, int, int, int, int]] = []
    newest = 0.0

    def add(name: str, here: str) -> None:
        """Add a file, unless it has just gone."""
        nonlocal newest
        try:
            st = os.stat(here)
        except OSError:
            return
        if stat.S_ISREG(st.st_mode):
            files.append((name, st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_ino))
            newest = max(newest, st.st_mtime, st.st_ctime)

    if os.path.isdir(path):
        for name in list_files(path):
            add(name, os.path.join(path, name))
    else:
        add("", path)
    if not files:
        return None
    return blake3(repr(sorted(files)).encode("utf-8", "surrogatepass")).hexdigest(length=16), newest


def family(name: str) -> str:
    """Return what the names of saves of one kind have in common: "checkpoint-#"."""
    return re.sub(r"\d+", "#", name)


def list_files(folder: str) -> list[str]:
    """List all files in a folder and below it, by their relative names."""
    return [os.path.relpath(os.path.join(where, name), folder) for where, _, names in os.walk(folder) for name in names]
