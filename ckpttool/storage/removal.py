"""Deletes checkpoints out of a folder that a trainer writes to: one rename, then the bytes.

    .ckpttool-prune.partial-7072756e6500/tree    a checkpoint that is being deleted; it was renamed to here
    .ckpttool-prune.partial-lock                 locked with flock while a run deletes

No trainer finds a checkpoint under such a name, and `ckpttool clean` knows it as what an interrupted run left. Whatever
is there at the start of a run is deleted first.

A path is followed from the run's folder down by descriptors, and no link in it is followed; what was renamed is
compared with what was looked at before, so that nothing outside of that folder is ever deleted.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ..errors import CkpttoolError, DestinationExists, SourceChanged, Unsafe, kind_of_failure, path_of_failure
from .local_file import sync_folder
from .partial import LeftoverFiles, holding_lock, make_private_folder, rename_special, why_foreign

__all__ = ["Remover", "explain_failures", "find_leftovers", "is_tidy", "open_below"]

_NAME = "ckpttool-prune"
_ID = b"prune\0".hex()
_MOST = 100  # names of folders to rename to, if somebody else's are in the way


@contextmanager
def open_below(root: str, folder: str) -> Iterator[int]:
    """While the block runs, lend a descriptor of a folder below another one.

    Args:
        root: a path, whose links are followed.
        folder: relative to it; "" for itself.

    Raises:
        Unsafe: a part of it is a link.
        SourceChanged: it is not there any more.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    fd = os.open(root, flags)
    try:
        for part in folder.split("/") if folder else ():
            try:
                below = os.open(part, flags | os.O_NOFOLLOW, dir_fd=fd)
            except NotADirectoryError:
                raise Unsafe(
                    f"{root}/{folder}: {part} is a link; nothing is deleted through a link.", code="CKPT0702"
                ) from None
            except FileNotFoundError:
                raise SourceChanged(f"{root}/{folder} is gone.") from None
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def find_leftovers(root: str, folder: str) -> list[str]:
    """Return the paths of what interrupted runs left in a folder that they renamed and did not delete. What is not ours
    is left out."""
    leftovers = LeftoverFiles(os.path.join(root, folder, _NAME))
    try:
        return [f for f in leftovers.folders() if f"partial-{_ID}" in f and why_foreign(f) is None]
    except OSError:
        return []


def is_tidy(root: str, folder: str) -> bool:
    """Return whether no interrupted run left anything in a folder, not even its lock."""
    lock = LeftoverFiles(os.path.join(root, folder, _NAME)).lock
    return not os.path.lexists(lock) and not find_leftovers(root, folder)


class Remover:
    """Deletes entries of one folder, and holds its lock while it is open.

    Raises (all methods):
        Locked: another run deletes in this folder.
        NotPermitted: the user may not change it.
        CkpttoolError: the system fails.
    """

    def __init__(self, root: str, folder: str, freed: Callable[[int, int], None]) -> None:
        """Delete in `folder`, relative to `root`; `freed` is called for each file that was deleted, with its bytes, and
        the number of names that it had, of which this was one."""
        self.root, self.folder, self.freed = root, folder, freed

    @contextmanager
    def hold(self) -> Iterator[Remover]:
        """While the block runs, hold the lock of the folder; first, delete what an interrupted run left."""
        at = os.path.join(self.root, self.folder)
        with explain_failures(at), open_below(self.root, self.folder):
            pass  # no link leads out
        with explain_failures(at), holding_lock(LeftoverFiles(os.path.join(at, _NAME))):
            for left in find_leftovers(self.root, self.folder):
                self._delete_aside(left)
            yield self

    def remove(self, name: str, identity: tuple[int, int]) -> None:
        """Rename an entry of the folder out of the way, and delete it.

        Args:
            name: of the entry.
            identity: its (device, inode), as it was looked at.

        Raises:
            SourceChanged: it is another one by now, or gone.
            Locked: a conversion is replacing it.
        """
        at = os.path.join(self.root, self.folder)
        with explain_failures(os.path.join(at, name)), open_below(self.root, self.folder) as fd:
            with holding_lock(LeftoverFiles(os.path.join(at, name)), look_only=True):
                _check_identity(fd, name, identity, at)
                aside = self._make_aside(at)
                with open_below(at, os.path.basename(aside)) as into:
                    os.rename(name, "tree", src_dir_fd=fd, dst_dir_fd=into)
                    try:
                        _check_identity(into, "tree", identity, at)
                    except CkpttoolError:
                        _put_back(into, os.path.join(at, name))
                        raise
                    os.fsync(into)
                os.fsync(fd)
            self._delete_aside(aside)

    def _make_aside(self, at: str) -> str:
        """Create a folder of ours in the folder `at` to rename something into, and return its path."""
        prefix = LeftoverFiles(os.path.join(at, _NAME)).prefix
        for n in range(_MOST):
            aside = os.path.join(at, f"{prefix}{_ID}" + (f"-{n}" if n else ""))
            with suppress(FileExistsError):
                make_private_folder(aside)
                return aside
        raise DestinationExists(
            f"{aside} and {_MOST - 1} like it are there, and not ours. Remove them.", code="CKPT0603"
        )

    def _delete_aside(self, aside: str) -> None:
        """Delete a folder of ours, with what was renamed into it."""
        with open_below(os.path.dirname(aside), os.path.basename(aside)) as fd:
            for _, folders, files, here in os.fwalk(".", topdown=False, dir_fd=fd):
                for name in (*files, *folders):
                    st = os.stat(name, dir_fd=here, follow_symlinks=False)
                    if stat.S_ISDIR(st.st_mode):
                        os.rmdir(name, dir_fd=here)
                    else:
                        os.unlink(name, dir_fd=here)
                        self.freed(st.st_size, st.st_nlink)
        os.rmdir(aside)
        sync_folder(os.path.dirname(aside))


def _put_back(into: int, path: str) -> None:
    """Rename `tree` in the folder `into` back to a path, since it is not what was to be deleted; where something is
    there again, rename it so that nothing deletes it."""
    try:
        if not rename_special("tree", path, 1, into):  # NOREPLACE
            os.rename("tree", path, src_dir_fd=into)
    except (OSError, CkpttoolError):
        os.rename("tree", "not-deleted", src_dir_fd=into, dst_dir_fd=into)


def _check_identity(fd: int, name: str, identity: tuple[int, int], at: str) -> None:
    """Refuse an entry of the folder `fd` that is not the one with this (device, inode).

    Raises:
        SourceChanged: it is another one, a link, or gone. `at` is the path of the folder, for the message.
    """
    try:
        st = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        raise SourceChanged(f"{at}/{name} is gone; somebody else deleted it.") from None
    if (st.st_dev, st.st_ino) != identity or stat.S_ISLNK(st.st_mode):
        raise SourceChanged(f"{at}/{name} was replaced meanwhile; it was not deleted.")


@contextmanager
def explain_failures(path: str) -> Iterator[None]:
    """While the block runs, make errors of the system errors of ours, about a path."""
    try:
        yield
    except OSError as e:
        raise kind_of_failure(e)(f"{path_of_failure(e, path)} cannot be deleted: {e.strerror}.") from e
