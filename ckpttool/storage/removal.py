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

from ..errors import CkpttoolError, DestinationExists, SourceChanged, Unsafe, get_failed_path, kind_of_failure
from .local_file import sync_folder
from .partial import LeftoverFiles, explain_foreign_folder, holding_lock, make_private_folder, rename_with_flags

__all__ = ["Remover", "convert_os_errors", "find_leftovers", "has_no_leftovers", "open_folder_below"]

_NAME = "ckpttool-prune"
_ID = b"prune\0".hex()
_MOST = 100  # names of folders to rename to, if somebody else's are in the way


@contextmanager
def open_folder_below(root: str, folder: str) -> Iterator[int]:
    """Open a folder below another one, and yield its descriptor while the block runs.

    Args:
        root: path of the other folder; links in it are followed.
        folder: path relative to `root`, in which no link is followed; "" for `root` itself.

    Raises:
        Unsafe: a component of it is a link.
        SourceChanged: it no longer exists.
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
    """Return the paths of folders in which interrupted runs left checkpoints that were being deleted from a folder; []
    if it cannot be listed. Folders that are not ours are left out.

    Args:
        root: a path.
        folder: the folder to look in, relative to `root`.
    """
    leftovers = LeftoverFiles(os.path.join(root, folder, _NAME))
    try:
        return [f for f in leftovers.folders() if f"partial-{_ID}" in f and explain_foreign_folder(f) is None]
    except OSError:
        return []


def has_no_leftovers(root: str, folder: str) -> bool:
    """Return whether interrupted runs left neither deleted checkpoints nor a lock in a folder.

    Args:
        root: a path.
        folder: the folder to look in, relative to `root`.
    """
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
        """Prepare to delete entries of one folder.

        Args:
            root: path of the run's folder.
            folder: the folder whose entries are deleted, relative to `root`.
            freed: called as `freed(bytes, links)` for each deleted file: its size, and how many hard links it had
                before.
        """
        self.root, self.folder, self.freed = root, folder, freed

    @contextmanager
    def hold(self) -> Iterator[Remover]:
        """Hold the lock of the folder while the block runs, after deleting what interrupted runs left; yield this
        object."""
        at = os.path.join(self.root, self.folder)
        with convert_os_errors(at), open_folder_below(self.root, self.folder):
            pass  # no link leads out
        with convert_os_errors(at), holding_lock(LeftoverFiles(os.path.join(at, _NAME))):
            for left in find_leftovers(self.root, self.folder):
                self._delete_trash_folder(left)
            yield self

    def remove(self, name: str, identity: tuple[int, int]) -> None:
        """Move an entry out of the folder by a rename, and then delete it.

        Args:
            name: of the entry.
            identity: its expected (device, inode).

        Raises:
            SourceChanged: the entry was replaced or removed.
            Locked: a conversion is replacing it.
        """
        at = os.path.join(self.root, self.folder)
        with convert_os_errors(os.path.join(at, name)), open_folder_below(self.root, self.folder) as fd:
            with holding_lock(LeftoverFiles(os.path.join(at, name)), look_only=True):
                _check_identity(fd, name, identity, at)
                aside = self._create_trash_folder(at)
                with open_folder_below(at, os.path.basename(aside)) as into:
                    os.rename(name, "tree", src_dir_fd=fd, dst_dir_fd=into)
                    try:
                        _check_identity(into, "tree", identity, at)
                    except CkpttoolError:
                        _undo_rename(into, os.path.join(at, name))
                        raise
                    os.fsync(into)
                os.fsync(fd)
            self._delete_trash_folder(aside)

    def _create_trash_folder(self, at: str) -> str:
        """Create a private folder in the folder `at`, into which an entry is renamed before it is deleted, and return
        its path.

        Raises:
            DestinationExists: all names for it are taken.
        """
        prefix = LeftoverFiles(os.path.join(at, _NAME)).prefix
        for n in range(_MOST):
            aside = os.path.join(at, f"{prefix}{_ID}" + (f"-{n}" if n else ""))
            with suppress(FileExistsError):
                make_private_folder(aside)
                return aside
        raise DestinationExists(
            f"{aside} and {_MOST - 1} like it are there, and not ours. Remove them.", code="CKPT0603"
        )

    def _delete_trash_folder(self, aside: str) -> None:
        """Delete a folder that `_create_trash_folder` created, and everything in it."""
        with open_folder_below(os.path.dirname(aside), os.path.basename(aside)) as fd:
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


def _undo_rename(into: int, path: str) -> None:
    """Rename `tree` in the folder `into` back to `path`, because it is not the entry that was to be deleted; if `path`
    exists again, rename it to `not-deleted`, which no run deletes.

    Args:
        into: descriptor of the folder.
        path: where `tree` was.
    """
    try:
        if not rename_with_flags("tree", path, 1, into):  # NOREPLACE
            os.rename("tree", path, src_dir_fd=into)
    except (OSError, CkpttoolError):
        os.rename("tree", "not-deleted", src_dir_fd=into, dst_dir_fd=into)


def _check_identity(fd: int, name: str, identity: tuple[int, int], at: str) -> None:
    """Check that an entry of a folder still has the expected (device, inode).

    Args:
        fd: descriptor of the folder.
        name: of the entry.
        identity: the expected (device, inode).
        at: path of the folder, for the message.

    Raises:
        SourceChanged: the entry is another one, a link, or gone.
    """
    try:
        st = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        raise SourceChanged(f"{at}/{name} is gone; somebody else deleted it.") from None
    if (st.st_dev, st.st_ino) != identity or stat.S_ISLNK(st.st_mode):
        raise SourceChanged(f"{at}/{name} was replaced meanwhile; it was not deleted.")


@contextmanager
def convert_os_errors(path: str) -> Iterator[None]:
    """Convert an OSError in the block to a CkpttoolError that says that `path`, or the path of the error, cannot be
    deleted."""
    try:
        yield
    except OSError as e:
        raise kind_of_failure(e)(f"{get_failed_path(e, path)} cannot be deleted: {e.strerror}.") from e
