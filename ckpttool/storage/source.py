"""`Source`: the files below one folder, by relative name. Everything that is read from a checkpoint is read through it.

A name is refused when it is absolute, holds "..", or is a link that leads out of the folder (a Hugging Face cache may
link from snapshots/ to its own blobs/). The checks look at the opened file and not at its name, so swapping
a link in between changes nothing. The identity of every file (device, inode, size, times) is taken when it is opened
and compared at the end: a source that a trainer is still writing to is an error, not a mixture.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import (
    CkpttoolError,
    Corrupt,
    NoSpace,
    NotPermitted,
    SourceChanged,
    Unreadable,
    Unsafe,
    UsageError,
    kind_of_failure,
)
from .urls import make_path_absolute

if TYPE_CHECKING:
    from .frames import FramedFile
    from .overlay import PatchedSource

__all__ = [
    "FileBytes",
    "OverlaySource",
    "ReadAt",
    "Source",
    "closed_on_error",
    "describe_missing_resource",
    "raise_open_file_limit",
    "read_error",
]

# File descriptors kept; a checkpoint of more files than that has its oldest ones closed and opened again.
_KEPT_OPEN = 400
_END = 64 << 10

Identity = tuple[int, int, int, int, int]

#: (offset, length) -> the bytes of one file there.
ReadAt = Callable[[int, int], bytes]


def raise_open_file_limit() -> None:
    """Raise this process's limit of open files to the maximum that the system allows (a checkpoint of 512 ranks,
    written to 384, needs that); does nothing where that is refused."""
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        global _KEPT_OPEN
        _KEPT_OPEN = max(_KEPT_OPEN, min(hard // 2, 1 << 16) - 100)
    except (ImportError, ValueError, OSError):
        pass  # not on this platform, or not allowed: the least recently used files are closed instead


def describe_missing_resource(e: OSError) -> str | None:
    """Return a clause for a message that names the resource a failed system call lacked and what sets its limit; None
    for other failures."""
    return {
        errno.EFBIG: "the file would be larger than this shell (`ulimit -f`) or the file system allows",
        errno.EMFILE: "this process has too many open files; allow more (`ulimit -n`)",
        errno.ENFILE: "the system has too many open files",
        errno.ENOMEM: "there is not enough memory",
    }.get(e.errno or 0)


def read_error(e: OSError, path: str) -> CkpttoolError:
    """Return the error for a failed system call on a file that is being read: NoSpace, NotPermitted or Unreadable. It
    is not raised.

    Args:
        e: what the system call raised.
        path: of the file, for the message.
    """
    if (what := describe_missing_resource(e)) is not None:
        return NoSpace(f"{path} cannot be read: {what}. Fix that, then run the same command again.")
    if kind_of_failure(e) is NotPermitted:
        return NotPermitted(
            f"{path} cannot be read: {e.strerror}. Whoever owns it can allow it; nothing is known about what it holds.",
            code="CKPT1401",
        )
    return Unreadable(f"{path} cannot be read: {e.strerror}.")


@contextmanager
def closed_on_error(sources: Iterable[Source]) -> Iterator[None]:
    """Return a context manager that closes all of `sources` if its block raises, including those that the block adds to
    `sources`."""
    try:
        yield
    except BaseException:
        for source in sources:
            source.close()
        raise


class Source:
    """The files below `root`, by relative name.

    Files of an archive or of an object store are a subclass with `local` False. It has no descriptors; its bytes come
    only from `read` and `readinto`.
    """

    local = True
    is_remote = False  # whether a read takes a round trip over a network
    #: Readers may assume where items are, which is proved when their bytes are read (frames.py): a store does that for
    #: whoever reads all bytes through this source, and hands no range on to others.
    proves_later: bool = False
    commit: str | None = None  # of a repository on the Hub: what all reads are of
    in_order = (
        False  # whether its bytes are made when they are read, so that one thread should read them from front to back
    )
    working_bytes = 0  # memory that making them takes
    _expected: Mapping[str, Identity] = {}
    is_users = False  # whether a program opened it, which has to close it
    _closed = False

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Keep the path of the folder; no file is opened yet.

        Args:
            root: path of the folder.

        Raises:
            Corrupt: there is no such folder.
        """
        self.root = make_path_absolute(root)
        if not os.path.isdir(self.root):
            raise Corrupt(f"{self.root}: no such folder.", code="CKPT0401")
        self._real = os.path.realpath(self.root)
        # huggingface_hub lays snapshots/<revision>/x as a link to ../../blobs/<hash>
        parent = os.path.dirname(self._real)
        self._blobs = (
            os.path.join(os.path.dirname(parent), "blobs") if os.path.basename(parent) == "snapshots" else None
        )
        self._open: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._busy: Counter[tuple[str, int]] = Counter()
        self._lock = threading.RLock()
        self._identity: dict[str, Identity] = {}
        self._folders: dict[str, tuple[int, list[str]]] = {}  # {folder: (when it changed, names in it)}

    @property
    def local_folder(self) -> str | None:
        """Return the folder on this machine that holds the files; None for an archive or a store."""
        return self.root if self.local else None

    @property
    def patched(self) -> PatchedSource | None:
        """Return this source if it shows damaged files as patched (`--salvage`); otherwise None."""
        return None

    @property
    def sibling_names(self) -> frozenset[str]:
        """Return the names of the files in the parent folder that this source also offers as "../NAME", each as NAME
        alone. Empty unless the source is, or patches, a `SiblingsSource`."""
        return frozenset()

    def list(self, folder: str = "") -> list[str]:
        """Return the sorted names of the files and folders that lie directly in a folder, each without the folder; []
        if there is no such folder.

        Args:
            folder: path relative to the source; "" for the source's own folder.

        Raises:
            Corrupt: the source's own folder cannot be listed; NotPermitted where the user may not.
            NoSpace: too many files are open.
        """
        path = os.path.join(self.root, folder)
        try:
            changed = os.stat(path).st_mtime_ns
            if (known := self._folders.get(folder)) is None or known[0] != changed:
                known = self._folders[folder] = changed, sorted(os.listdir(path))
            return known[1][:]
        except (OSError, ValueError) as e:  # a name from a file may be no name at all
            if isinstance(e, OSError) and describe_missing_resource(e):
                raise read_error(e, path) from e
            if not folder:
                kind = kind_of_failure(e, Corrupt) if isinstance(e, OSError) else Corrupt
                raise kind(f"{self.root} cannot be listed: {getattr(e, 'strerror', e)}.") from e
            return []

    def exists(self, name: str) -> bool:
        """Return whether there is a regular file of that name."""
        return os.path.isfile(os.path.join(self.root, name))

    def glance(self, name: str) -> tuple[bool, int | None]:
        """Return (whether the path `name`, relative to the source, is a folder; size of the file in bytes, None for a
        folder or if unknown). No file is opened."""
        try:
            st = os.stat(os.path.join(self.root, name))
        except (OSError, ValueError):
            return False, None
        return stat.S_ISDIR(st.st_mode), st.st_size if stat.S_ISREG(st.st_mode) else None

    def list_ahead(self) -> bool:
        """List all names below the source at once, if that takes fewer requests than a listing of each folder; return
        whether `list` and `glance` need no further requests."""
        return not self.is_remote

    def modified(self, name: str) -> float | None:
        """Return when a file or folder that `list` returned was last modified, in seconds since 1970; None if
        unknown."""
        try:
            return os.stat(os.path.join(self.root, name)).st_mtime
        except (OSError, ValueError):
            return None

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; opens the file unless that was done before.

        Raises:
            Unsafe: the file is outside the folder, or is not a regular file.
            Corrupt: it is missing.
            Unreadable, NotPermitted, NoSpace, SourceChanged: it cannot be opened, or was replaced since it was first
                opened.
            UsageError: the source was closed.
        """
        if name not in self._identity:
            self.fd(name)
        return self._identity[name][2]

    def fd(self, name: str, flags: int = 0) -> int:
        """Return the descriptor of a file, opened for reading and kept open until many others were opened. Use
        `borrow_fd` to read.

        Args:
            name: of the file.
            flags: further flags of os.open, such as O_DIRECT.

        Raises:
            Unsafe: the file lies outside the folder, or is not a regular file.
            Corrupt: it is missing.
            SourceChanged: it is not the file that was opened before.
            Unreadable, NotPermitted: it cannot be read.
            NoSpace: too many files are open.
            UsageError: the source was closed.
            OSError: it cannot be opened with `flags`.
        """
        with self._lock:
            self._refuse_closed()
            if (name, flags) in self._open:
                self._open.move_to_end((name, flags))
                return self._open[name, flags]
            fd = self._open_file(name, flags)
            if len(self._open) >= _KEPT_OPEN:
                idle = next((k for k in self._open if not self._busy[k]), None)
                if idle is not None:
                    os.close(self._open.pop(idle))
            self._open[name, flags] = fd
            return fd

    @contextmanager
    def borrow_fd(self, name: str, flags: int = 0) -> Iterator[int]:
        """Open a file and yield its descriptor, which no other thread closes while the block runs. (The number of a
        closed descriptor may soon belong to another file.)

        Args:
            name: of the file.
            flags: further flags of os.open, such as O_DIRECT.

        Raises:
            Unsafe, Corrupt, SourceChanged, Unreadable, NotPermitted, NoSpace, UsageError: the file cannot be opened;
                `fd` raises the same.
        """
        with self._lock:
            fd = self.fd(name, flags)
            self._busy[name, flags] += 1
        try:
            yield fd
        finally:
            with self._lock:
                self._busy[name, flags] -= 1
                if not self._busy[name, flags]:
                    del self._busy[name, flags]
                    if self._closed:
                        self._close_idle()

    def _open_file(self, name: str, flags: int) -> int:
        """Open a file for reading and return its descriptor; its name and what was opened are checked.

        Args:
            name: of the file.
            flags: further flags of os.open; where there are any, its OSError passes through.

        Raises:
            Unsafe: the file lies outside the folder, or is not a regular file.
            Corrupt: it is missing, or its name cannot be that of a file.
            SourceChanged: it is not the file that was opened before.
            Unreadable, NotPermitted, NoSpace: it cannot be opened.
        """
        parts = Path(name).parts
        if not parts or os.path.isabs(name) or ".." in parts or "\0" in name:
            raise Unsafe(
                f"{name!r} leads out of {self.root}; a checkpoint may name only files inside its own folder.",
                code="CKPT0702",
            )
        path = os.path.join(self.root, name)
        try:
            os.fsencode(name)
        except UnicodeEncodeError:
            raise Corrupt(
                f"{self.root}: a file named {name!a} is asked for, and half a surrogate pair cannot be in a file's "
                "name.",
                code="CKPT0406",
            ) from None
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
        except FileNotFoundError:
            raise Corrupt(
                f"{path} is missing. The copy is incomplete; fetch the file again.", code="CKPT0401"
            ) from None
        except OSError as e:
            if flags:
                raise
            raise read_error(e, path) from e
        try:
            self._check_opened_file(name, path, fd)
        except BaseException:
            os.close(fd)
            raise
        if hasattr(os, "posix_fadvise"):
            # we read ahead ourselves; the kernel's readahead around a thousand item headers wastes 256 MB
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return fd

    def _check_opened_file(self, name: str, path: str, fd: int) -> None:
        """Check, by its descriptor, that an opened file is a regular file inside the folder and the same as before.

        Args:
            name: of the file.
            path: of the file, for messages.
            fd: its descriptor.

        Raises:
            Unsafe: it is not a regular file inside the folder.
            SourceChanged: it was replaced since it was first opened, or is not the file that `expect` requires.
        """
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode):
            raise Unsafe(f"{path} is not a regular file.", code="CKPT0702")
        try:
            real = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # no /proc: the name must do
            real = os.path.realpath(path)
        inside = [self._real] + ([self._blobs] if self._blobs else [])
        if not any(real == d or real.startswith(d.rstrip("/") + "/") for d in inside):
            raise Unsafe(f"{path} is a link to {real}, outside the checkpoint's folder.", code="CKPT0702")
        now = (st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns)
        if self._identity.setdefault(name, now) != now:
            raise SourceChanged(f"{path} changed while it was read. Wait until the trainer has finished writing.")
        self._check_expected(name)

    def expect(self, identities: Mapping[str, Identity]) -> None:
        """Require that files are the same as those that another process opened, the one that read the index: from now
        on, reading a file of another size or modification time is refused. (Device and inode of one file may differ
        between machines. Of objects in a store, the version is compared.)

        Args:
            identities: {name: identity} as `identities` of that process's source returns; other files are not checked.

        Raises:
            SourceChanged: a file that was opened before differs.
        """
        self._expected = identities
        for name in self._identity:
            self._check_expected(name)

    def _check_expected(self, name: str) -> None:
        """Check that a file which was opened is the one that `expect` asks for.

        Raises:
            SourceChanged: it is another one.
        """
        there, here = self._expected.get(name), self._identity[name]
        if there is not None and (there[2:4] != here[2:4] or (self.is_remote and there[1] != here[1])):
            raise SourceChanged(
                f"{os.path.join(self.root, name)} is not the file that the rank had which read the index: {here[2]} "
                f"bytes and {there[2]}, written at {here[3]} and {there[3]} ns. All ranks must see one checkpoint, and "
                "nobody may write to it."
            )

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes of a file from byte `offset` on.

        Raises:
            Corrupt: the file is missing or ends before.
            Unsafe, Unreadable, NotPermitted, SourceChanged, NoSpace: it cannot be read, as `fd` and `readinto` say.
        """
        if offset < 0 or length < 0 or offset + length > self.size(name):
            raise Corrupt(
                f"{os.path.join(self.root, name)} ends at byte {self.size(name)}, but {offset}..{offset + length} is "
                "needed. The copy is incomplete; fetch the file again.",
                code="CKPT0403",
            )
        out = bytearray(length)
        self.readinto(name, offset, memoryview(out))
        return bytes(out)

    def readinto(self, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file from byte `offset` on.

        Raises:
            Unreadable, NotPermitted: they cannot be read.
            SourceChanged: the file became shorter, or was replaced.
            NoSpace: the machine lacks a resource, such as free file descriptors.
        """
        got = 0
        while got < len(into):
            try:
                with self.borrow_fd(name) as fd:
                    n = os.preadv(fd, [into[got:]], offset + got)
            except OSError as e:
                raise read_error(e, f"{os.path.join(self.root, name)}: byte {offset + got}") from e
            if not n:
                raise SourceChanged(f"{os.path.join(self.root, name)} became shorter while it was read.")
            got += n

    def reader_of(self, name: str) -> FileBytes:
        """Return a callable of (offset, length) that reads bytes of the file `name`."""
        return FileBytes(self, name)

    def below(self, folder: str) -> Source:
        """Return a source for one of the folders, with file names relative to that folder; closing it does nothing,
        since the files belong to this source.

        Args:
            folder: relative to this source; "" for its own folder.
        """
        return FolderOfSource(self, folder)

    def prefetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Announce ranges (name, offset, length) that will soon be read, in about this order. Local sources ignore
        it."""

    def framed(self, name: str) -> FramedFile:
        """Return the items of the object `name`, at offsets that a layout assumed without reading the items' headers
        (frames.py). Only a source with `proves_later` has them; others raise NotImplementedError."""
        raise NotImplementedError

    def count_unproved(self) -> tuple[int, int]:
        """Return (number of items whose assumed offsets are not proved yet, number of all items with assumed offsets);
        (0, 0) for local files."""
        return 0, 0

    def prove_later(self, on: bool) -> None:
        """Set whether layouts may assume the offsets of items instead of reading each header first; does nothing except
        in a store's source."""

    def prove_all(self) -> None:
        """Prove the assumed offsets of all items (frames.py); does nothing for local files, which have none."""

    def prefetch_ends(self, names: Iterable[str]) -> None:
        """Announce that the first and last bytes of some files will soon be read: headers, directories, small
        pickles."""
        self.prefetch(end for name in names for end in self._iter_end_ranges(name))

    def _iter_end_ranges(self, name: str) -> Iterator[tuple[str, int, int]]:
        """Yield the ranges (name, offset, length) of the first and last 64 KiB of a file."""
        size = self.size(name)
        yield name, 0, min(size, _END)
        if size > _END:
            yield name, max(_END, size - _END), min(size - _END, _END)

    def read_all(self, name: str, most: int) -> bytes:
        """Return all bytes of a small file.

        Args:
            name: of the file.
            most: the largest size that such a file may have, in bytes.

        Raises:
            Corrupt: it is larger, or missing.
        """
        n = self.size(name)
        if n > most:
            raise Corrupt(
                f"{os.path.join(self.root, name)} has {n} bytes; such a file has at most {most}.", code="CKPT0406"
            )
        return self.read(name, 0, n)

    def identities(self) -> dict[str, Identity]:
        """Return {name: (device, inode, bytes, mtime, ctime)} of every file opened so far; times in ns."""
        return dict(self._identity)

    def has_versions(self) -> bool:
        """Return whether `identities` change when a file is replaced by another one of the same size: always for local
        files."""
        return True

    def assert_unchanged(self) -> None:
        """Check that no opened file was modified, replaced or removed since it was first opened.

        Raises:
            SourceChanged: one was; the message names it.
        """
        for name, then in self._identity.items():
            path = os.path.join(self.root, name)
            try:
                st = os.stat(path)
                now = (st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns)
            except OSError:
                now = None
            if now != then:
                raise SourceChanged(f"{path} changed while it was read. Wait until the trainer has finished writing.")

    def close(self) -> None:
        """Close all descriptors, and refuse all further reads; a descriptor that another thread reads from is closed
        after that read."""
        with self._lock:
            self._closed = True
            self._close_idle()

    def close_files(self) -> None:
        """Close every descriptor that nobody reads from; the next read opens the file again."""
        if getattr(self, "_open", None):  # a subclass has none
            with self._lock:
                self._close_idle()

    def _close_idle(self) -> None:
        """Close descriptors that nobody reads from. The lock must be held."""
        for key in [k for k in self._open if not self._busy[k]]:
            try:
                os.close(self._open.pop(key))
            except OSError:
                pass  # only read from

    def _refuse_closed(self) -> None:
        """Refuse to read from a source that was closed.

        Raises:
            UsageError: it was.
        """
        if self._closed:
            raise UsageError(
                f"{self.root} was closed, and is read after that. Read inside the `with ckpttool.open(...)`.",
                code="CKPT0223",
            )

    def __del__(self) -> None:
        """Close the source if it has open files, with a ResourceWarning if a program opened it and never closed it."""
        if not getattr(self, "_open", None):  # a subclass has none
            return
        if self.is_users:
            warnings.warn(
                f"{self.root} was opened and never closed; use `with ckpttool.open(...)`, or close().",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )
        self.close()

    def __enter__(self) -> Source:
        """Return this source, which the end of the `with` block closes."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close this source; an exception in the block is not caught."""
        self.close()


class OverlaySource(Source):
    """Files of one or more other sources, as those of one source, which closes them.

    `sources[0]` gives the root and the revision, and every file that `locate` does not find elsewhere. Subclasses say
    with `locate` and `name_here` whose a file is, and may add files that are in no source (overlay.py).

    Args:
        local: whether a file can be opened, so that `borrow_fd` works for every name.
    """

    def __init__(self, *sources: Source, local: bool = False) -> None:
        """Take over the root, the revision and `is_remote` of the first source.

        Args:
            sources: at least one; closing this source closes all of them.
            local: whether each file can be opened on this machine, so that `borrow_fd` works for every name.
        """
        self.sources, self.local = sources, local
        self.root, self.is_remote, self.commit = self.inner.root, self.inner.is_remote, self.inner.commit

    @property
    def inner(self) -> Source:
        """Return the first source, whose names stay as they are."""
        return self.sources[0]

    @property
    def local_folder(self) -> str | None:
        """Return the folder on this machine that holds the files of the first source; None if it has none."""
        return self.inner.local_folder

    def locate(self, name: str) -> tuple[Source, str]:
        """Return (the source that has a file, the file's name in that source)."""
        return self.inner, name

    def name_here(self, number: int, name: str) -> str:
        """Return the name that a file has in this source; the inverse of `locate`.

        Args:
            number: index in `sources` of the source that has the file.
            name: the file's name in that source.
        """
        return name

    def list(self, folder: str = "") -> list[str]:
        """Return the sorted names of the entries of a folder, in the source that has it."""
        source, own = self.locate(folder)
        return source.list(own)

    def exists(self, name: str) -> bool:
        """Return whether a file exists in the source that `locate` finds for it."""
        source, own = self.locate(name)
        return source.exists(own)

    def glance(self, name: str) -> tuple[bool, int | None]:
        """Return (whether a name that `list` gave is a folder, bytes of the file or None if they are not known)."""
        source, own = self.locate(name)
        return source.glance(own)

    def modified(self, name: str) -> float | None:
        """Return when a file was last modified, in seconds since 1970, from the source that has it; None if unknown."""
        source, own = self.locate(name)
        return source.modified(own)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes, from the source that has it."""
        source, own = self.locate(name)
        return source.size(own)

    def fd(self, name: str, flags: int = 0) -> int:
        """Return the descriptor of a file from the source that has it, where that is on this machine."""
        source, own = self.locate(name)
        return source.fd(own, flags)

    @contextmanager
    def borrow_fd(self, name: str, flags: int = 0) -> Iterator[int]:
        """Open a file in the source that has it, which must be local, and yield its descriptor while the block runs."""
        source, own = self.locate(name)
        with source.borrow_fd(own, flags) as fd:
            yield fd

    def readinto(self, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file from byte `offset` on, by the source that has it."""
        source, own = self.locate(name)
        source.readinto(own, offset, into)

    def prefetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Announce ranges (name, offset, length) that will soon be read to the sources that have the files."""
        located = ((*self.locate(name), offset, length) for name, offset, length in ranges)
        if len(self.sources) == 1:  # which may take them one at a time
            self.inner.prefetch((own, offset, length) for _, own, offset, length in located)
            return
        rows = list(located)
        for source in self.sources:
            source.prefetch((own, offset, length) for of, own, offset, length in rows if of is source)

    def count_unproved(self) -> tuple[int, int]:
        """Return (number of unproved items, number of items with assumed offsets), each the total over all sources."""
        counts = [source.count_unproved() for source in self.sources]
        return sum(n for n, _ in counts), sum(n for _, n in counts)

    def prove_all(self) -> None:
        """Prove the assumed offsets of all items in all sources."""
        for source in self.sources:
            source.prove_all()

    def identities(self) -> dict[str, Identity]:
        """Return {name in this source: identity} of every file opened so far in any of the sources."""
        return {
            self.name_here(number, name): identity
            for number, source in enumerate(self.sources)
            for name, identity in source.identities().items()
        }

    def expect(self, identities: Mapping[str, Identity]) -> None:
        """Call `expect` of each source with the identities of its files, under their names there.

        Args:
            identities: {name in this source: identity}.
        """
        expected: dict[int, dict[str, Identity]] = {id(source): {} for source in self.sources}
        for name, identity in identities.items():
            source, own = self.locate(name)
            expected[id(source)][own] = identity
        for source in self.sources:
            source.expect(expected[id(source)])

    def has_versions(self) -> bool:
        """Return whether the identities of all sources change when a file is replaced by another one of the same
        size."""
        return all(source.has_versions() for source in self.sources)

    def assert_unchanged(self) -> None:
        """Check for all sources that no opened file was modified, replaced or removed since it was first opened.

        Raises:
            SourceChanged: one was.
        """
        for source in self.sources:
            source.assert_unchanged()

    def close_files(self) -> None:
        """Close, in all sources, the descriptors that nobody reads from."""
        for source in self.sources:
            source.close_files()

    def close(self) -> None:
        """Close all sources."""
        for source in self.sources:
            source.close()


class FolderOfSource(OverlaySource):
    """One folder of another source, which stays the owner of the files and closes them (`Source.below`)."""

    def __init__(self, above: Source, folder: str) -> None:
        """Show one folder of a source as a source of its own.

        Args:
            above: the source that has the folder.
            folder: path relative to `above`; "" for its own folder.
        """
        super().__init__(above, local=above.local)
        self._folder = folder
        self.root = f"{above.root.rstrip('/')}/{folder}" if folder else above.root

    @property
    def local_folder(self) -> str | None:
        """Return the folder on this machine that holds the files; None where the source above has no descriptors."""
        return self.root if self.local else None

    def locate(self, name: str) -> tuple[Source, str]:
        """Return (the source above, name of the file in it); for "" the name is that of this folder."""
        return self.inner, f"{self._folder}/{name}" if name and self._folder else name or self._folder

    def prove_later(self, on: bool) -> None:
        """Set whether layouts may assume the offsets of items, in the source above."""
        self.inner.prove_later(on)

    @property
    def proves_later(self) -> bool:  # type: ignore[override]
        """Return whether layouts may assume the offsets of items, by the source above."""
        return self.inner.proves_later

    def framed(self, name: str) -> FramedFile:
        """Return the items of an object whose places are assumed, from the source above."""
        source, own = self.locate(name)
        return source.framed(own)

    def identities(self) -> dict[str, Identity]:
        """Return {name relative to the folder: identity} of the files in it that were opened so far."""
        head = self._folder and self._folder + "/"
        return {n.removeprefix(head): i for n, i in self.inner.identities().items() if n.startswith(head)}

    def close_files(self) -> None:
        """Do nothing: the source above closes its files."""

    def close(self) -> None:
        """Do nothing: the source above is closed by whoever opened it."""


class FileBytes:
    """The bytes of one file: `file(offset, length)`."""

    __slots__ = ("name", "source")

    def __init__(self, source: Source, name: str) -> None:
        self.source, self.name = source, name

    def __call__(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes of the file from byte `offset` on; raises what `Source.read` raises."""
        return self.source.read(self.name, offset, length)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce ranges (offset, length) that will soon be read."""
        self.source.prefetch((self.name, offset, length) for offset, length in ranges)
