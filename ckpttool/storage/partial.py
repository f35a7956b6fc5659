"""What lies beside a destination while it is built, and after a run was interrupted.

    .NAME.partial-lock              locked with flock while a run writes
    .NAME.partial-<id>/journal      one JSON object a line
    .NAME.partial-<id>/tree/        the destination to be
    .NAME.partial-<id>/parts/       where several workers fill it: what each says of the parts that it has filled, one
                                    JSON a part
    .NAME.partial-<id>/old          the old destination, between two renames, where the system cannot exchange names

Others may be able to create entries in the same parent folder (a scratch folder with the sticky bit), so a name proves
nothing. A partial folder is used or removed only if it belongs to us and nobody else can write to it; it is continued
only if, besides, nobody else can enter it. What does not belong to us is named and left alone.

`old` is put back when the destination is absent, and a folder that holds it is not removed before.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import DestinationExists, Locked, UsageError, get_failed_path, kind_of_failure, note_change
from .lock import describe_user, ensure_owner_mode, is_our_uid, open_lock, take_lock, try_lock, unlock
from .urls import make_path_absolute

__all__ = [
    "Cleaned",
    "EarlierRun",
    "JournalEntry",
    "LeftoverFiles",
    "clean",
    "clean_command",
    "count_disk_bytes",
    "describe_restored_target",
    "explain_foreign_folder",
    "holding_lock",
    "is_resumable_folder",
    "make_private_folder",
    "parse_journal",
    "read_journal",
    "recover_old_target",
    "remove_partial_folder",
    "rename_with_flags",
    "restore_old_target",
]

#: A line of the journal.
JournalEntry = dict[str, Any]

_ID = 12  # hex digits of the plan's digest
_MOST = 100  # partial folders of one plan: the names of others are passed over
_SUFFIX = re.compile(rf"(?P<stem>.+)\.partial-(?:lock|(?P<id>[0-9a-f]{{{_ID}}})(?:-\d{{1,2}})?)", re.DOTALL)
_OURS = {"journal", "tree", "old", "parts"}


# ----------------------------------------------------------------------------------------------------------- names


class LeftoverFiles:
    """The names of what is kept next to a destination while it is built: partial folders and a lock.

    Raises:
        UsageError: the destination's own name is longer than the file system allows.
    """

    def __init__(self, target: str) -> None:
        self.target = make_path_absolute(target)
        self.parent, self.name = os.path.split(self.target)
        if not self.name:
            raise UsageError(f"{target!r} names no file or folder.", code="CKPT0211")
        most = _max_name_bytes(self.parent)
        if (n := len(os.fsencode(self.name))) > most:
            raise UsageError(
                f"the name of the destination has {n} bytes, and {self.parent} allows {most}: {self.name}",
                code="CKPT0211",
            )
        self.prefix = f".{_shorten_name(self.name, most)}.partial-"
        self.lock = os.path.join(self.parent, self.prefix + "lock")

    def folders(self) -> list[str]:
        """Return the sorted paths of all partial folders of this destination; only their names are checked."""
        found = (n for n in os.listdir(self.parent) if n.startswith(self.prefix))
        return [os.path.join(self.parent, n) for n in sorted(found) if (m := _SUFFIX.fullmatch(n)) and m["id"]]


def _max_name_bytes(parent: str) -> int:
    """Return the maximal length of a file name in a folder, in bytes; 255 if the system does not tell."""
    try:
        return os.pathconf(parent, "PC_NAME_MAX")
    except (OSError, ValueError, AttributeError):
        return 255


def _shorten_name(name: str, most: int) -> str:
    """Return the name of a destination as it is used in the names of its lock and partial folders: unchanged, or its
    beginning and a hash if those names would exceed `most` bytes."""
    room = most - len(f"..partial-{'0' * _ID}-99")
    raw = os.fsencode(name)
    if len(raw) <= room:
        return name
    import hashlib

    return f"{raw[: room - 17].decode('utf-8', 'ignore')}~{hashlib.sha256(raw).hexdigest()[:16]}"


def clean_command(target: str) -> str:
    """Return the command line that removes what interrupted runs left next to a destination."""
    return f"ckpttool clean {shlex.quote(target)}"


# ------------------------------------------------------------------------------------------------------------- whose


def explain_foreign_folder(path: str) -> str | None:
    """Return why the partial folder at `path` is not ours to use or remove, as a clause for a message ("is a link");
    None if it is ours.

    Raises:
        OSError: it is missing, or cannot be examined.
    """
    st = os.lstat(path)
    if stat.S_ISLNK(st.st_mode):
        return "is a link"
    if not stat.S_ISDIR(st.st_mode):
        return "is not a folder"
    if not is_our_uid(st.st_uid, os.path.dirname(path)):
        return f"belongs to {describe_user(st.st_uid)}"
    if st.st_mode & 0o022:
        return f"can be changed by other users (mode {st.st_mode & 0o7777:04o})"
    try:
        other = sorted(set(os.listdir(path)) - _OURS)
    except PermissionError:
        return f"cannot be looked into (mode {st.st_mode & 0o7777:04o})"
    if other:
        return f"holds {other[0]!r}, which ckpttool does not make"
    return None


def is_resumable_folder(folder: str) -> bool:
    """Return whether the next run may resume from a partial folder: nobody else can have changed it, since only we can
    enter it and its journal, tree and parts are regular files and folders of ours.

    Raises:
        OSError: its journal or tree is missing.
    """
    if os.lstat(folder).st_mode & 0o077:
        return False
    todo = [
        path
        for name in ("journal", "tree", "parts")
        if os.path.lexists(path := os.path.join(folder, name)) or name != "parts"
    ]
    while todo:
        path = todo.pop()
        st = os.lstat(path)
        if not is_our_uid(st.st_uid, folder):
            return False
        if stat.S_ISDIR(st.st_mode):
            todo += [os.path.join(path, name) for name in os.listdir(path)]
        elif not stat.S_ISREG(st.st_mode) or st.st_nlink != 1:
            return False
    return True


def make_private_folder(folder: str) -> None:
    """Create a folder that nobody else can enter, whatever the umask is.

    Raises:
        FileExistsError: something has that name.
    """
    os.mkdir(folder, 0o700)
    ensure_owner_mode(folder, 0o700)


@contextmanager
def holding_lock(leftovers: LeftoverFiles, look_only: bool = False) -> Iterator[None]:
    """Hold the lock of a destination while the block runs.

    Args:
        leftovers: the names of the lock and the partial folders of the destination.
        look_only: change nothing: lock an existing lock file without removing it afterwards, and run without a lock if
            there is none.

    Raises:
        Locked: another run holds the lock, or the lock file is not ours.
    """
    fd = -1
    if not look_only:
        fd = take_lock(leftovers)
    elif os.path.lexists(leftovers.lock):
        fd = open_lock(leftovers, 0)
        try_lock(leftovers, fd)
    try:
        yield
    finally:
        if not look_only:
            unlock(leftovers, fd)
        elif fd >= 0:
            os.close(fd)


# ----------------------------------------------------------------------------------------------------------- journal


class EarlierRun(NamedTuple):
    """What an earlier run left: tensors done, and what it says of them.

    `digests` {tensor: BLAKE3} of those that are done, only where their source is far away, and `lost` {tensor: counts
    of numbers that its cast could not hold} likewise; `sinks` {number of a file: state of what its bytes went through}.
    """

    done: int = 0
    digests: dict[str, str] = {}  # noqa: RUF012
    sinks: dict[int, dict[str, object]] = {}  # noqa: RUF012
    lost: dict[str, tuple[int, int, int]] = {}  # noqa: RUF012


def read_journal(folder: str) -> list[JournalEntry]:
    """Return the complete lines of the journal of a partial folder, as dicts; [] if there is none or it is
    malformed."""
    try:
        fd = os.open(os.path.join(folder, "journal"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, encoding="utf-8") as f:
            lines = f.read().split("\n")[:-1]  # what follows the last newline was cut off
        entries = [json.loads(line) for line in lines]
    except (OSError, ValueError, RecursionError):
        return []
    if not entries or not all(isinstance(e, dict) for e in entries) or "plan" not in entries[0]:
        return []
    return entries


def parse_journal(entries: list[JournalEntry], plan: str) -> EarlierRun | None:
    """Return the progress that a journal records; None if it belongs to another plan, is malformed, or records that its
    run began to commit, after which the tree may be the old destination.

    Args:
        entries: the lines of the journal (`read_journal`), of which the first names the plan.
        plan: digest of the plan that this run executes.
    """
    if not entries or entries[0]["plan"] != plan or "committed" in entries[-1]:
        return None
    done, digests, sinks = 0, dict[str, str](), dict[int, dict[str, Any]]()
    lost: dict[str, tuple[int, int, int]] = {}
    try:
        for e in entries[1:]:
            if type(e["done"]) is not int or e["done"] < done:
                return None
            done = e["done"]
            digests |= {str(n): str(d) for n, d in e.get("digests", {}).items()}
            for name, (infinite, nan, cut) in e.get("lost", {}).items():
                lost[str(name)] = int(infinite), int(nan), int(cut)
            sinks = {int(file): dict(state) for file, state in e.get("sinks", {}).items()}
    except (LookupError, TypeError, ValueError, AttributeError):
        return None
    return EarlierRun(done, digests, sinks, lost)


# -------------------------------------------------------------------------------------- putting back, and removing


def restore_old_target(leftovers: LeftoverFiles, dry_run: bool = False) -> str | None:
    """Rename the old destination back to its place if an interrupted run moved it away, and return the path it was at;
    None if there was nothing to do. The lock must be held.

    Args:
        leftovers: the names of the lock and the partial folders of the destination.
        dry_run: rename nothing.

    Raises:
        OSError: it could not be renamed.
        DestinationExists: the destination was created meanwhile.
    """
    for folder in leftovers.folders():
        old = os.path.join(folder, "old")
        if os.path.lexists(leftovers.target):
            return None
        if explain_foreign_folder(folder) is None and os.path.lexists(old):
            if not dry_run and not rename_with_flags(old, leftovers.target, 1):  # NOREPLACE
                os.rename(old, leftovers.target)
            return old
    return None


def describe_restored_target(target: str, old: str) -> str:
    """Return a sentence, for people, that says that the old destination `target` was restored from the path `old`."""
    return (
        f"an earlier run was interrupted after it had taken the old {target} away and before the new one was in its "
        f"place; the old one was put back from {old}"
    )


def recover_old_target(target: str) -> list[str]:
    """Restore the old destination if an interrupted run moved it away and no other run is writing; return messages for
    people, [] if nothing was done. A run calls this first of all.

    Raises:
        UsageError: the name is too long.
        OSError: the old destination could not be renamed back.
    """
    try:
        leftovers = LeftoverFiles(target)
        if os.path.lexists(leftovers.target) or not any(
            os.path.lexists(os.path.join(f, "old")) for f in leftovers.folders()
        ):
            return []
        with holding_lock(leftovers):
            old = restore_old_target(leftovers)
            return [describe_restored_target(leftovers.target, old)] if old else []
    except (Locked, FileNotFoundError, NotADirectoryError, PermissionError):
        return []  # said later, by whoever needs it


def remove_partial_folder(folder: str, target: str) -> str | None:
    """Remove a partial folder of ours, and return None if it is gone, or a sentence that says what is left of it and
    why. A folder that holds the old destination is kept while the destination is missing.

    Args:
        folder: path of the partial folder.
        target: path of the destination.
    """
    if os.path.lexists(os.path.join(folder, "old")) and not os.path.lexists(target):
        return (
            f"{folder} holds the old {target}, which is missing, and was kept; `{clean_command(target)}` puts it back"
        )
    failed: list[str] = []

    def note(function: object, path: str, what: Any) -> None:
        """Collect an error of rmtree: the function that failed, its path, and what `sys.exc_info` gives."""
        failed.append(f"{path}: {what[1].strerror or what[1]}")

    shutil.rmtree(folder, onerror=note)
    if not os.path.lexists(folder):
        return None
    return (
        f"{folder} could not be removed ({failed[0] if failed else 'it is there again'}); `{clean_command(target)}` "
        "removes it"
    )


@dataclass
class Cleaned:
    """What `clean` did, or would do."""

    put_back: list[tuple[str, str]] = field(default_factory=list)  # (where the old destination was, destination)
    removed: list[tuple[str, int]] = field(default_factory=list)  # (path, bytes on the disk)
    kept: list[tuple[str, str]] = field(default_factory=list)  # (path, why)
    failed: bool = False  # whether some of `kept` is ours, and could not be removed

    def to_json(self) -> dict[str, object]:
        """Return plain data: {"put_back": [{"from", "to"}], "removed": [{"path", "bytes"}], "kept": [{"path", "why"}],
        "failed"}."""
        return {
            "put_back": [{"from": a, "to": b} for a, b in self.put_back],
            "removed": [{"path": p, "bytes": n} for p, n in self.removed],
            "kept": [{"path": p, "why": why} for p, why in self.kept],
            "failed": self.failed,
        }


def clean(path: str | os.PathLike[str], *, dry_run: bool = False) -> Cleaned:
    """Remove what interrupted runs left next to a destination, or next to any destination in a folder.

    Partial folders and locks of ours are removed unless a running process holds the lock. An old destination that an
    interrupted run moved away is first put back in its place. What belongs to other users, or is in use, is reported in
    `kept`.

    Args:
        path: a destination, whether or not it exists, or a folder with destinations in it.
        dry_run: only report.

    Raises:
        UsageError: the parent folder of the path does not exist.
        CkpttoolError: a system call failed.
    """
    target = make_path_absolute(path)
    if not os.path.isdir(os.path.dirname(target)):
        raise UsageError(f"{os.path.dirname(target)} is not a folder.", code="CKPT0211")
    out = Cleaned()
    try:
        all_leftovers = [LeftoverFiles(target)] if os.path.basename(target) else []
        if os.path.isdir(target):
            all_leftovers += _find_all_leftovers(target)
        for leftovers in all_leftovers:
            _clean_leftovers(leftovers, dry_run, out)
            if (out.removed or out.put_back) and not dry_run:
                note_change("Some of what was left is removed already; the same command again removes the rest.")
    except OSError as e:
        raise kind_of_failure(e)(f"{get_failed_path(e, target)}: {e.strerror}.") from e
    return out


def _find_all_leftovers(folder: str) -> list[LeftoverFiles]:
    """Return the `LeftoverFiles` of each destination, existing or not, for which a folder holds a lock or a partial
    folder."""
    names: dict[str, str] = {}
    for entry in sorted(os.listdir(folder)):
        if entry.startswith(".") and (m := _SUFFIX.fullmatch(entry[1:])):
            stem = m["stem"]
            said = read_journal(os.path.join(folder, entry))[:1] if m["id"] else []
            name = said[0].get("name") if said else None
            if isinstance(name, str) and "/" not in name and _shorten_name(name, _max_name_bytes(folder)) == stem:
                names[stem] = name  # a long one, which is cut in the names beside it
            names.setdefault(stem, stem)
    return [LeftoverFiles(os.path.join(folder, name)) for name in names.values()]


def _clean_leftovers(leftovers: LeftoverFiles, dry_run: bool, out: Cleaned) -> None:
    """Remove the partial folders and the lock of one destination, and record in `out` what was done.

    Args:
        leftovers: the names of the lock and the partial folders of the destination.
        dry_run: only record what would be done.
        out: gets the results; folders that another run is using go to its `kept`.
    """
    folders = leftovers.folders()
    if not folders and not os.path.lexists(leftovers.lock):
        return
    stale = os.path.lexists(leftovers.lock)
    try:
        with holding_lock(leftovers, dry_run):
            if old := restore_old_target(leftovers, dry_run):
                out.put_back.append((old, leftovers.target))
            for folder in folders:
                if why := explain_foreign_folder(folder):
                    out.kept.append((folder, f"{why}; if you know that it can go: rm -r {shlex.quote(folder)}"))
                    continue
                size = count_disk_bytes(folder)
                left = None if dry_run else remove_partial_folder(folder, leftovers.target)
                if left is None:
                    out.removed.append((folder, size))
                else:
                    out.kept.append((folder, left))
                    out.failed = True
            if stale:
                out.removed.append((leftovers.lock, 0))
    except Locked as e:
        out.kept += [(path, str(e)) for path in folders or [leftovers.lock]]


def count_disk_bytes(folder: str) -> int:
    """Return the disk space that the files below a folder take, in bytes."""
    return sum(
        os.lstat(os.path.join(where, name)).st_blocks * 512 for where, _, names in os.walk(folder) for name in names
    )


def rename_with_flags(a: str, b: str, flags: int, a_folder: int = -100) -> bool:
    """Call renameat2(2); return False if the system or the file system does not support it, True if the rename was
    done.

    Args:
        a: path to rename.
        b: its new path.
        flags: 1 to fail if `b` exists (NOREPLACE), 2 to exchange the two (EXCHANGE).
        a_folder: descriptor of the folder that `a` is relative to; the default is the current folder (AT_FDCWD).

    Raises:
        DestinationExists: `b` exists, with NOREPLACE.
        OSError: the call failed otherwise.
    """
    import ctypes

    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if call(a_folder, os.fsencode(a), -100, os.fsencode(b), flags) == 0:
        return True
    error = ctypes.get_errno()
    if error == errno.EEXIST:
        raise DestinationExists(f"{b} was created by somebody else meanwhile; nothing was replaced.", code="CKPT0603")
    if error in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(error, os.strerror(error), b)
