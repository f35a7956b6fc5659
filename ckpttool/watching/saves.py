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
from ..engine.runs import Run, RunStep, list_run
from ..errors import NotRecognised

__all__ = ["WatchedSave", "list_files_below", "list_saves", "take_fingerprint", "to_name_family"]

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
        """Return whether its trainer may still be writing it: the file that is written last is missing, or the
        trainer's file that names the newest save does not name this one."""
        return self.found.being_written if self.found.complete else bool(_WRITTEN_LAST.search(self.found.lacks))


def list_saves(run: str, state: str) -> list[WatchedSave]:
    """Return the saves in the folder of a run, the oldest first; the folder itself if it is one save that is
    overwritten. Empty if there is no such folder, or no save in it.

    Args:
        run: the folder of the run.
        state: the folder of the journal, which is skipped.
    """
    if not os.path.isdir(run):
        return []
    try:
        found = list_run(run, look=False)
    except NotRecognised:
        return []
    inside = os.path.realpath(state) + "/"
    out = []
    for c in [*found.steps, *_find_closed_saves(found), *_find_unknown_saves(run, found)]:
        if not (os.path.realpath(c.path) + "/").startswith(inside) and (seen := take_fingerprint(c.path)) is not None:
            out.append(WatchedSave(c, *seen))
    return sorted(out, key=lambda save: save.age)


def _find_closed_saves(run: Run) -> Iterator[RunStep]:
    """Yield a `RunStep`, marked as incomplete and with a `problem`, for each folder that cannot be listed and is named
    like a recognised save of the run, apart from numbers."""
    for name, why in run.not_listed.items():
        like = next((c for c in run.steps if to_name_family(c.name) == to_name_family(name)), None)
        if like is not None:
            yield _make_other_row(like, run.path, name, f"cannot be listed: {why}", f"cannot be listed: {why}")


def _make_other_row(like: RunStep, run: str, name: str, lacks: str, problem: str = "") -> RunStep:
    """Return the `RunStep`, marked as incomplete, of an entry of a run that no layout recognises.

    Args:
        like: a recognised save with a similar name.
        run: the folder of the run.
        name: the entry's name, relative to the run.
        lacks, problem: what it lacks, and why it cannot be opened.
    """
    row = replace(like, path=os.path.join(run, name), name=name, step=find_step(name), complete=False, lacks=lacks)
    return replace(row, newest=False, weights_only=False, digest=None, problem=problem)


def _find_unknown_saves(run: str, found: Run) -> Iterator[RunStep]:
    """Yield a `RunStep`, marked as incomplete, for each entry that is named like a recognised save beside it (apart
    from numbers) and that no layout recognises.

    Args:
        run: the folder of the run.
        found: the saves of the run that a layout recognises, and the folders that cannot be listed.
    """
    kin = {(os.path.dirname(c.name), to_name_family(os.path.basename(c.name))): c for c in found.steps if c.name}
    known = {c.name for c in found.steps} | found.not_listed.keys()
    for folder in {folder for folder, _ in kin}:
        with suppress(OSError):
            for entry in os.listdir(os.path.join(run, folder)):
                name, like = os.path.join(folder, entry), kin.get((folder, to_name_family(entry)))
                if like is not None and name not in known and not os.path.islink(os.path.join(run, name)):
                    yield _make_other_row(like, run, name, _UNKNOWN)


def take_fingerprint(path: str) -> tuple[str, float] | None:
    """Return (a digest, in hex, of the names, sizes, times and inodes of all files of a save; the newest time at which
    one of them changed, in seconds since 1970). None where there is no file. No file is opened. Of a folder that this
    user may not list, it is the folder itself that is looked at."""
    files: list[tuple[str, int, int, int, int]] = []
    newest = 0.0

    def add(name: str, here: str, any_kind: bool = False) -> None:
        """Add a file, unless it has just gone; with `any_kind` a folder, too."""
        nonlocal newest
        try:
            st = os.stat(here)
        except OSError:
            return
        if any_kind or stat.S_ISREG(st.st_mode):
            files.append((name, st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_ino))
            newest = max(newest, st.st_mtime, st.st_ctime)

    if os.path.isdir(path):
        for name in list_files_below(path):
            add(name, os.path.join(path, name))
        if not files and not os.access(path, os.R_OK | os.X_OK):
            add("", path, any_kind=True)
    else:
        add("", path)
    if not files:
        return None
    return blake3(repr(sorted(files)).encode("utf-8", "surrogatepass")).hexdigest(length=16), newest


def to_name_family(name: str) -> str:
    """Return a name with every number replaced by "#": "checkpoint-#". Saves of one kind have equal families."""
    return re.sub(r"\d+", "#", name)


def list_files_below(folder: str) -> list[str]:
    """Return the paths of all files in a folder and below it, relative to it."""
    return [os.path.relpath(os.path.join(where, name), folder) for where, _, names in os.walk(folder) for name in names]
