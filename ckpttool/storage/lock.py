"""The lock of a destination, and the owner of its files: other users may create entries in the same folder.

The lock is one of flock. A forked child shares it, so the child closes its copy.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import Locked

if TYPE_CHECKING:
    from .partial import LeftoverFiles

__all__ = ["describe_user", "ensure_owner_mode", "is_our_uid", "open_lock", "take_lock", "try_lock", "unlock"]


def is_our_uid(uid: int, where: str) -> bool:
    """Return whether a file owner is the user that this process creates files as. On some file systems (NFS that
    squashes root, SMB) that is not the effective user, so a temporary file is created to find out.

    Args:
        uid: numeric user id of the owner.
        where: a folder on the same file system in which a temporary file can be created.
    """
    if uid == os.geteuid():
        return True
    try:
        with tempfile.TemporaryFile(dir=where) as probe:
            return os.fstat(probe.fileno()).st_uid == uid
    except OSError:
        return False


def describe_user(uid: int) -> str:
    """Return "user NAME", or "user NUMBER" where the user has no name."""
    import pwd

    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def ensure_owner_mode(path: str | int, owner: int) -> None:
    """Add missing owner permissions, which the umask removed, to a file or folder that was just created.

    Args:
        path: of the file or folder, or its descriptor.
        owner: mode bits that must be set, such as 0o700.
    """
    mode = os.stat(path).st_mode
    if mode & owner != owner:
        os.chmod(path, stat.S_IMODE(mode) | owner)


def take_lock(leftovers: LeftoverFiles) -> int:
    """Create and lock the lock file of a destination, and return its descriptor, for `unlock`.

    Args:
        leftovers: the names of the lock and the partial folders of the destination.

    Raises:
        Locked: another run holds the lock, or the lock file is not ours.
        OSError: the lock file cannot be created.
    """
    while True:
        fd = open_lock(leftovers, os.O_CREAT)
        try_lock(leftovers, fd)
        try:
            if os.stat(leftovers.lock).st_ino == os.fstat(fd).st_ino:
                break
        except FileNotFoundError:
            pass
        os.close(fd)  # the holder before us removed it in between
    try:
        os.ftruncate(fd, 0)
        os.write(fd, f"process {os.getpid()} on {os.uname().nodename}\n".encode())
    except OSError:
        os.close(fd)
        raise
    _held.add(fd)
    return fd


#: Descriptors of the locks that this process holds.
_held: set[int] = set()


def _close_inherited_locks() -> None:
    """Close the descriptors of all held locks in a forked child: otherwise workers of a ProcessPoolExecutor, for
    example, would hold the locks after their parent died."""
    while _held:
        with suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_close_inherited_locks)


def try_lock(leftovers: LeftoverFiles, fd: int) -> None:
    """Lock the open lock file `fd` of a destination without waiting; on failure close the descriptor.

    Args:
        leftovers: the names of the lock and the partial folders of the destination, for the message.
        fd: descriptor that `open_lock` returned.

    Raises:
        Locked: another process holds the lock.
        OSError: locking failed otherwise.
    """
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        holder = os.read(fd, 200).decode(errors="replace").strip() or "another process"
        os.close(fd)
        if e.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise Locked(f"{leftovers.target} is being written by {holder}. Wait for it, or stop it first.") from None


def open_lock(leftovers: LeftoverFiles, create: int) -> int:
    """Open the lock file of a destination, which must be ours, and return its descriptor; does not lock it.

    Args:
        leftovers: the names of the lock and the partial folders of the destination.
        create: os.O_CREAT to create a missing file; 0 otherwise.

    Raises:
        FileNotFoundError: it is missing and `create` is 0.
        Locked: it is a link or a special file, or belongs to another user.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        try:
            _refuse_foreign_lock(leftovers, os.lstat(leftovers.lock))
            fd = os.open(leftovers.lock, flags)
        except FileNotFoundError:
            if not create:
                raise
            try:
                # for the owner alone: whoever can open a file can lock it
                fd = os.open(leftovers.lock, flags | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                continue
            try:
                ensure_owner_mode(fd, 0o600)
            except OSError:
                os.close(fd)
                raise
            return fd
        try:
            _refuse_foreign_lock(leftovers, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd


def _refuse_foreign_lock(leftovers: LeftoverFiles, st: os.stat_result) -> None:
    """Refuse a lock file that is not a regular file of ours.

    Args:
        leftovers: the names of the lock and the partial folders of the destination.
        st: `os.stat` of the lock file.

    Raises:
        Locked: it is not; the message says why.
    """
    why = None
    if not stat.S_ISREG(st.st_mode) or st.st_nlink > 1:
        why = "is not a lock that ckpttool made (a link or a special file)"
    elif not is_our_uid(st.st_uid, leftovers.parent):
        why = f"belongs to {describe_user(st.st_uid)}, who may be writing the same destination"
    if why:
        raise Locked(f"{leftovers.lock} {why}. Ask its owner, remove it, or write elsewhere.")


def unlock(leftovers: LeftoverFiles, fd: int) -> None:
    """Remove the lock file of a destination and release its lock; does nothing in a forked child.

    Args:
        leftovers: the names of the lock and the partial folders of the destination.
        fd: what `take_lock` returned.
    """
    if fd not in _held:
        return
    _held.remove(fd)
    try:
        os.unlink(leftovers.lock)
    except OSError:
        pass  # an empty file stays, which holds nobody up; the lock itself goes with the descriptor
    try:
        os.close(fd)
    except OSError:
        pass
