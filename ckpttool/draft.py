"""The checkpoint to be, and the folder in which it becomes one.

A `Draft` is the index of the destination with the bytes still missing: `checkpoint.tensors` says where every chunk will
lie, `sources` which tensor of the source (or which part of one) fills it, `files` what else each file holds. It is the
plan: `--dry-run` prints it.

`Staging` is the only code that creates, renames or removes anything. The destination is built in
`.<name>.partial-<id>/tree` beside it, where <id> is the digest of the plan, so that the same command run again finds
what an interrupted run left and goes on from its journal. Every file is fsynced, then the folder, then one rename makes
it the destination: at any instant the destination is absent or old, or complete. An existing one is swapped whole
(renameat2 EXCHANGE) and removed afterwards. A lock file names the process that writes.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from .errors import CkpttoolError, DestinationExists, Locked, NoSpace, UsageError
from .index import Checkpoint, TensorEntry

__all__ = ["Draft", "DraftFile", "Dropped", "Sink", "Staging", "Written"]

#: (tensor, chunk of it, CRC32 of its bytes): a chunk of the destination that was written.
Written = tuple[str, int, int]
Framing = Callable[[str, TensorEntry, int, Sequence[Written]], bytes]


class Dropped(NamedTuple):
    """A part of the state that the target cannot hold."""

    name: str
    nbytes: int
    why: str


class Sink(Protocol):
    """What stands between the bytes of a file, as the draft has them, and those on the disk: compression, a cipher.

    `at` counts the bytes appended. Where `resumable`, `settle` hands everything on and `state` is what another sink needs
    to go on from there, JSON-able, with "physical", the length of the file on the disk.
    """

    @property
    def at(self) -> int: ...
    def append(self, data: bytes | memoryview) -> None: ...
    def resumable(self) -> bool: ...
    def settle(self) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


@dataclass
class DraftFile:
    """One file to be: `head` are its first bytes, or all of them where no chunk lies in it.

    `coded(write, jobs, state)` makes the sink of a file whose bytes on the disk are other ones.
    """

    name: str
    size: int
    head: bytes | Callable[[], bytes] = b""
    coded: Callable[[Callable[[bytes | memoryview], None], int, dict[str, Any] | None], Sink] | None = None

    def first_bytes(self) -> bytes:
        """The literal bytes."""
        return self.head() if callable(self.head) else self.head


@dataclass
class Draft:
    """A destination whose tensor bytes are still missing.

    Files are written front to back in the order of `checkpoint.tensors`, which therefore lists, for every file, its
    chunks by ascending offset. `files[i]` is `checkpoint.files[i]`; the last one is the marker without which a reader
    does not take the folder for a checkpoint.

    `before(name, entry, row, written)` and `after(name, entry, row, written)` are the bytes around a chunk (a zip's
    local header and data descriptor, padding), `tail(file, written, digests)` those at the end of a file; `written` are
    the chunks of that file so far, in order, in `after` with the one it follows. None means none. A tensor under a name
    that no canonical one is ("replica...", "module...") is a further copy of its source.
    """

    checkpoint: Checkpoint
    sources: dict[str, TensorEntry]
    files: list[DraftFile]
    dropped: list[Dropped] = field(default_factory=list)
    same: dict[str, str] = field(default_factory=dict)  # name without bytes of its own -> the name that has them
    before: Framing | None = None
    after: Framing | None = None
    tail: Callable[[int, Sequence[Written], dict[str, Any]], bytes] | None = None
    notes: list[str] = field(default_factory=list)
    added: list[str] = field(
        default_factory=list
    )  # tensors that the layout has and the source has not: zeros, counters
    made: dict[str, Any] = field(default_factory=dict)  # values likewise: {name: data}
    lock: dict[str, Any] = field(default_factory=dict)  # arguments of an object lock, where the destination has such
    about: dict[str, Any] = field(default_factory=dict)  # what is known of the destination when its last byte is

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(f.size for f in self.files)


class Staging:
    """The folder in which a destination is built, locked and journalled.

    Raises:
        DestinationExists: something is at `target` and `force` is not set.
        Locked: another run is building the same destination.
        NoSpace: the file system has less room than the draft needs.
    """

    local = True

    def __init__(self, target: str, is_file: bool, plan: str, need_bytes: int, force: bool) -> None:
        self.target = os.path.abspath(target)
        self.is_file, self.force = is_file, force
        self.parent, self.name = os.path.split(self.target)
        if not self.name:
            raise UsageError(f"{target!r} names no file or folder.")
        refuse_target(self.target, is_file, force)
        prefix = f".{self.name}.partial-"
        self.lock_path = os.path.join(self.parent, prefix + "lock")
        self._journal = self._lock = -1
        self.folder = os.path.join(self.parent, prefix + plan[:12])
        self.tree = os.path.join(self.folder, "tree")
        self.journal_path = os.path.join(self.folder, "journal")
        self.messages: list[str] = []
        try:
            self._lock = self._take_lock()
            self.entries = self._prepare(prefix, plan, need_bytes)
        except BaseException as e:
            self.release()
            if isinstance(e, OSError):
                raise write_error(e, e.filename or self.folder) from e
            raise

    def _prepare(self, prefix: str, plan: str, need_bytes: int) -> list[dict[str, Any]]:
        """Clear what other runs left, make room for this one, open its journal; returns the lines found in it."""
        for stale in sorted(os.listdir(self.parent)):
            path = os.path.join(self.parent, stale)
            if stale.startswith(prefix) and path != self.folder and _journal_of(os.path.join(path, "journal")):
                shutil.rmtree(path)  # ours: it has a journal, and we hold the lock
                self.messages.append(f"removed {stale}, left by an interrupted run with other options")
        entries = self._read_journal(plan)
        os.makedirs(self.tree, exist_ok=True)
        have = sum(e.stat().st_blocks * 512 for e in _walk(self.tree))
        free = shutil.disk_usage(self.parent).free
        if need_bytes > free + have:
            if not entries:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise NoSpace(
                f"{self.parent} has {free:,} bytes free, the destination needs {need_bytes:,}. Free "
                f"{need_bytes - free:,} bytes or write elsewhere."
            )
        self._journal = os.open(self.journal_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if not entries:
            self.note({"plan": plan})
        return entries

    def _take_lock(self) -> int:
        import fcntl

        while True:
            fd = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                holder = os.read(fd, 200).decode(errors="replace").strip() or "another process"
                os.close(fd)
                if e.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                raise Locked(f"{self.target} is being written by {holder}. Wait for it, or stop it first.") from None
            try:
                if os.stat(self.lock_path).st_ino == os.fstat(fd).st_ino:
                    break
            except FileNotFoundError:
                pass
            os.close(fd)  # the holder before us removed it in between
        try:
            os.ftruncate(fd, 0)
            os.write(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError:
            os.close(fd)
            raise
        return fd

    def _read_journal(self, plan: str) -> list[dict[str, Any]]:
        entries = _journal_of(self.journal_path)
        if entries and entries[0].get("plan") == plan and "committed" not in entries[-1]:
            return entries
        shutil.rmtree(self.folder, ignore_errors=True)
        return []

    @property
    def again(self) -> str:
        """What is there after an interruption, and what to do."""
        return f"{self.target} is untouched. Run the same command again to continue, or remove {self.folder}."

    def note(self, entry: dict[str, Any]) -> None:
        """Append to the journal and make it durable. What it speaks of must be durable already."""
        os.write(self._journal, (json.dumps(entry, separators=(",", ":")) + "\n").encode())
        os.fdatasync(self._journal)

    def put(self, name: str, data: bytes) -> None:
        """A file that is no part of the draft, made durable."""
        with open(self.path(name), "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())

    def path(self, name: str) -> str:
        """Where a file of the destination is built."""
        path = os.path.join(self.tree, name)
        if os.path.dirname(path) != self.tree:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def commit(self) -> None:
        """Make what was built the destination. Every file in it must be fsynced already."""
        built = os.path.join(self.tree, self.name) if self.is_file else self.tree
        for folder, _, _ in os.walk(self.tree):
            _fsync_folder(folder)
        self.note({"committed": True})  # from here on `tree` may hold the old destination: never to be continued
        refuse_target(self.target, self.is_file, self.force)  # somebody may have put something there meanwhile
        if self.is_file and self.force:
            os.replace(built, self.target)
        elif os.path.lexists(self.target):
            if not _rename2(built, self.target, 2):  # EXCHANGE
                os.rename(self.target, os.path.join(self.folder, "old"))
                os.rename(built, self.target)
        elif not _rename2(built, self.target, 1):  # NOREPLACE
            os.rename(built, self.target)
        _fsync_folder(self.parent)
        self.abandon()

    def abandon(self) -> None:
        """Remove everything that was built, and the lock."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Stop writing but keep what was built, for the next run; give up the lock."""
        for fd in (self._journal, self._lock):
            if fd >= 0:
                if fd == self._lock:
                    try:
                        os.unlink(self.lock_path)
                    except OSError:
                        pass  # an empty file stays; the lock itself goes with the descriptor
                os.close(fd)
        self._journal = self._lock = -1


def refuse_target(target: str, is_file: bool, force: bool) -> None:
    """Refuse a destination that nothing may be written to, before any work is done.

    Raises:
        DestinationExists: something is there that is not to be replaced. UsageError: its folder is missing.
    """
    if os.path.islink(target):
        raise DestinationExists(
            f"{target} is a link to {os.readlink(target)}; give the path it leads to, or remove it."
        )
    if not os.path.isdir(os.path.dirname(target)):
        raise UsageError(f"{os.path.dirname(target)} is not a folder; create it first.")
    if not os.path.lexists(target):
        return
    if not force:
        raise DestinationExists(f"{target} exists. Choose another destination, or --force to replace it whole.")
    if os.path.isdir(target) == is_file:
        kinds = ("a folder", "file") if is_file else ("a file", "folder")
        raise DestinationExists(f"{target} is {kinds[0]}; a {kinds[1]} does not replace it. Remove it first.")


def write_error(e: OSError, path: str) -> CkpttoolError:
    """What a failed system call on the destination means."""
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(
            f"{path}: {e.strerror}. The destination is untouched; free some space and run the same command again, it "
            "goes on from here (or remove the folder)."
        )
    return CkpttoolError(f"{path}: {e.strerror} (errno {e.errno}). The destination is untouched.")


def _journal_of(path: str) -> list[dict[str, Any]]:
    """The whole lines of a journal; [] where there is none."""
    try:
        with open(path, encoding="utf-8") as f:
            lines = f.read().split("\n")[:-1]  # what follows the last newline was cut off
        entries = [json.loads(line) for line in lines]
    except (OSError, ValueError):
        return []
    return entries if entries and isinstance(entries[0], dict) and "plan" in entries[0] else []


def _walk(folder: str) -> list[os.DirEntry[str]]:
    out: list[os.DirEntry[str]] = []
    with os.scandir(folder) as entries:
        for e in entries:
            out.extend(_walk(e.path) if e.is_dir(follow_symlinks=False) else [e])
    return out


def _fsync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _rename2(a: str, b: str, flags: int) -> bool:
    """renameat2(2) with NOREPLACE (1) or EXCHANGE (2); False where the system or the file system has no such thing."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if call(-100, os.fsencode(a), -100, os.fsencode(b), flags) == 0:
        return True
    error = ctypes.get_errno()
    if error == errno.EEXIST:
        raise DestinationExists(f"{b} was created by somebody else meanwhile; nothing was replaced.")
    if error in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(error, os.strerror(error), b)
