"""A destination on a local disk: the folder in which a checkpoint is built, until one rename makes it the destination.

`LocalDestination` and what it uses of partial.py is the only code that creates, renames or removes anything. The
destination is built in `.<name>.partial-<id>/tree` beside it, where <id> is the digest of the plan, so that the same
command run again finds what an interrupted run left and goes on from its journal. Every file is fsynced, then the
folder, then one rename makes it the destination: at any instant the destination is absent or old, or complete. An
existing one is swapped whole (renameat2 EXCHANGE) and removed afterwards. A lock file names the process that writes.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress

from ..errors import (
    CkpttoolError,
    DestinationExists,
    NoSpace,
    RemoteError,
    Unreadable,
    Unsafe,
    UsageError,
    argument,
    get_failed_path,
    note_change,
)
from . import partial
from .destination_protocol import ParallelDestination, PartResult, SharedState, write_error
from .local_file import LocalFile, WriterPool, sync_folder
from .lock import ensure_owner_mode, take_lock, unlock
from .shared_tree import has_coherent_page_cache, read_filled_parts

__all__ = ["LocalDestination", "check_free_space", "refuse_target"]


class LocalDestination(ParallelDestination):
    """The folder in which a destination is built, locked and journalled.

    `earlier` is what an interrupted run of the same plan left there, `messages` what people should know of what was
    found, put back, removed or left.

    Raises:
        DestinationExists: something is at `target` and `force` is not set.
        Locked: another run is building the same destination.
        NoSpace: the file system has less room than the draft needs.
    """

    resumable = True
    part_bytes = 0
    max_open_finished = 64  # a layout may have a file for every tensor

    def __init__(self, target: str, is_file: bool, plan: str, need_bytes: int, force: bool) -> None:
        """Lock the destination, and prepare the partial folder in which it is built.

        Args:
            target: path of the destination.
            is_file: a file will be written there, not a folder.
            plan: digest of the plan; only a partial folder of the same plan is resumed.
            need_bytes: bytes that the destination will take on disk.
            force: an existing target of the same kind may be replaced.
        """
        self.leftovers = leftovers = partial.LeftoverFiles(target)
        self.target, self.parent, self.name = leftovers.target, leftovers.parent, leftovers.name
        self.is_file, self.force, self.plan = is_file, force, plan
        self._write_journal_line = self._lock = self._folder = -1
        self._built: tuple[int, int] | None = None  # device and inode of what is to be renamed to the target
        self.folder = self.location = self.tree = self.journal_path = self.parent
        self.earlier = partial.EarlierRun()
        self.messages: list[str] = []
        refuse_target(self.target, is_file, force)
        try:
            self._lock = take_lock(leftovers)
            if old := partial.restore_old_target(leftovers):
                self.messages.append(partial.describe_restored_target(self.target, old))
            refuse_target(self.target, is_file, force)
            self._prepare_folder(need_bytes)
        except BaseException as e:
            if self._folder >= 0 and not self._has_progress:
                self._remove_partial_folder()
            self.release()
            if isinstance(e, OSError):
                raise write_error(e, get_failed_path(e, self.folder)) from e
            raise

    def _prepare_folder(self, need_bytes: int) -> None:
        """Open the partial folder that an earlier run of this plan left, or a new one, and its journal; remove all
        other partial folders of ours for this destination.

        Args:
            need_bytes: bytes that the destination will take on disk.

        Raises:
            NoSpace: the file system has less free space.
            DestinationExists: no name is free for the folder.
        """
        mine = f"{self.leftovers.prefix}{self.plan[:12]}"
        found = None
        for folder in self.leftovers.folders():
            same = os.path.basename(folder).startswith(mine)
            if why := partial.explain_foreign_folder(folder):
                self.messages.append(
                    f"{folder} {why}, so it was not used; if you know that it can go: rm -r {shlex.quote(folder)}"
                )
                continue
            earlier = partial.parse_journal(partial.read_journal(folder), self.plan) if same and not found else None
            if earlier and partial.is_resumable_folder(folder):
                found, self.earlier = folder, earlier
                continue
            if left := partial.remove_partial_folder(folder, self.target):
                self.messages.append(left)
            elif not same:
                self.messages.append(
                    f"removed {os.path.basename(folder)}, left by an interrupted run with other options"
                )
        self._open_folder(found or self._create_folder(mine))
        check_free_space(self.parent, need_bytes, partial.count_disk_bytes(self.tree))
        if not found:
            self.restart()

    def _create_folder(self, name: str) -> str:
        """Create the partial folder under `name`, or the first free one of "NAME-1" to "NAME-99", and return its path.

        Raises:
            DestinationExists: none is free.
        """
        for k in range(100):
            folder = os.path.join(self.parent, f"{name}-{k}" if k else name)
            try:
                partial.make_private_folder(folder)
                return folder
            except FileExistsError:
                continue
        raise DestinationExists(
            f"100 entries of {self.parent} are named like {name}; remove them, or write elsewhere.", code="CKPT0602"
        )

    def _open_folder(self, folder: str) -> None:
        """Use `folder` as the partial folder: open it, its `tree`, in which the destination is built, and its journal,
        from which an incomplete last line is removed."""
        self.folder = self.location = folder
        self.tree, self.journal_path = os.path.join(folder, "tree"), os.path.join(folder, "journal")
        self.readable_path = os.path.join(self.tree, self.name) if self.is_file else self.tree
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if not os.path.isdir(self.tree):
            os.mkdir(self.tree)
            ensure_owner_mode(self.tree, 0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._write_journal_line = os.open(self.journal_path, flags, 0o600)
        ensure_owner_mode(self._write_journal_line, 0o600)
        with open(self.journal_path, "rb") as f:
            os.ftruncate(self._write_journal_line, f.read().rfind(b"\n") + 1)  # a line that was cut off

    def restart(self) -> None:
        """Remove what an earlier run left in the folder, and begin a new journal."""
        for entry in os.scandir(self.tree):
            (shutil.rmtree if entry.is_dir(follow_symlinks=False) else os.unlink)(entry.path)
        shutil.rmtree(os.path.join(self.folder, "parts"), ignore_errors=True)
        os.ftruncate(self._write_journal_line, 0)
        self.append_journal({"plan": self.plan, "name": self.name})
        self.earlier = partial.EarlierRun()

    @property
    def parallel(self) -> LocalDestination:
        """Return this destination: several processes can always fill it."""
        return self

    @property
    def in_place(self) -> bool:
        """Return whether the target's path is what this run built: the checkpoint has its final name."""
        try:
            st = os.lstat(self.target)
        except OSError:
            return False
        return self._built == (st.st_dev, st.st_ino)

    @property
    def state_after_error(self) -> str:
        """Return one or two sentences, for people, that say what the destination holds after an error."""
        if self.in_place:
            left = ""
            if os.path.lexists(self.folder):
                left = f" What was left beside it is removed by `{partial.clean_command(self.target)}`."
            return f"The new checkpoint is in place at {self.target} and complete.{left}"
        return "The destination is untouched."

    @property
    def resume_hint(self) -> str:
        """Return sentences, for people, that say what an interrupted run left and how to resume or restart."""
        if self.in_place:
            return self.state_after_error
        if not self._has_progress:
            return f"{self.target} is untouched. Too little was copied to be kept: the same command starts over."
        return f"{self.target} is untouched. Run the same command again to continue, or remove {self.folder}."

    @property
    def _has_progress(self) -> bool:
        """Return whether the partial folder holds finished tensors or parts from which the next run can resume."""
        earlier = partial.parse_journal(partial.read_journal(self.folder), self.plan)
        return (earlier is not None and earlier.done > 0) or bool(self.filled_parts)

    def interrupt(self) -> None:
        """Keep the partial folder if the next run can resume from it; otherwise remove it. Releases the lock."""
        if self.in_place or not self._has_progress:
            self.abandon()
        else:
            self.release()

    def add_hint(self, e: CkpttoolError) -> None:
        """Add a note with the resume hint to an error of the source (RemoteError, Unreadable); leave other errors
        unchanged."""
        if isinstance(e, (RemoteError, Unreadable)):
            e.add_note(self.resume_hint)

    def append_journal(self, entry: partial.JournalEntry) -> None:
        """Append an entry to the journal and make it durable. The bytes that it counts as done must be durable
        already."""
        os.write(self._write_journal_line, (json.dumps(entry, separators=(",", ":")) + "\n").encode())
        os.fdatasync(self._write_journal_line)

    def open_file(self, name: str, pool: WriterPool, existing: bool) -> LocalFile:
        """Open a file of the destination at its first byte.

        Args:
            name: of the file, relative to the destination.
            pool: the threads that write it.
            existing: an earlier run wrote a part of it: appended bytes are compared with that part until
                `start_writing`.
        """
        return LocalFile(self.path(name), pool, existing)

    def share(self, files: Mapping[str, int]) -> SharedState:
        """Create files in their full size that several processes will write, and return the plain data from which a
        worker makes its `SharedTree`: {"folder", "fence", "plan", "coherent"}.

        Args:
            files: {name: bytes} of the files.
        """
        parts = os.path.join(self.folder, "parts")
        if not os.path.isdir(parts):
            os.mkdir(parts)
            ensure_owner_mode(parts, 0o700)
        for name, size in files.items():
            fd = os.open(self.path(name), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                ensure_owner_mode(fd, 0o600)
                if os.fstat(fd).st_size < size:
                    os.ftruncate(fd, size)
            finally:
                os.close(fd)
        st = os.fstat(self._write_journal_line)
        return {
            "folder": self.folder,
            "fence": [st.st_ino, st.st_size],
            "plan": self.plan,
            "coherent": has_coherent_page_cache(self.folder),
        }

    def stop_sharing(self) -> None:
        """Refuse all further writes of workers, when all parts are complete: a slow worker would otherwise change files
        while they are read back."""
        self.append_journal({"done": self.earlier.done})  # the journal is another one than in their requests

    def find_missing_cells(
        self, sent: Mapping[str, Mapping[int, str]], sizes: Mapping[str, int]
    ) -> list[tuple[str, int]]:
        """Return [], since nothing is uploaded."""
        return []

    def why_alone(self) -> None:
        """Return None: several processes can fill files of this machine."""

    @property
    def has_earlier_parts(self) -> bool:
        """Return whether an earlier run with several workers left parts to resume from."""
        return bool(self.filled_parts)

    @property
    def filled_parts(self) -> dict[int, PartResult]:
        """Return {part number: the result that its worker recorded} for the complete parts of this plan."""
        return read_filled_parts(self.folder, self.plan)

    def write_file(self, name: str, data: bytes) -> None:
        """Write a complete file that is not planned in the index (`Draft`), and make it durable.

        Args:
            name: of the file, relative to the destination.
            data: its bytes.
        """
        with open(self.path(name), "wb") as f:
            ensure_owner_mode(f.fileno(), 0o600)
            f.write(data)
            f.flush()
            os.fsync(f.fileno())

    def path(self, name: str) -> str:
        """Return the path at which a file of the destination is built, and create the folders above it; `name` is
        relative to the destination."""
        path = os.path.join(self.tree, name)
        folder = os.path.dirname(path)
        if folder != self.tree and not os.path.isdir(folder):
            self.path(os.path.relpath(folder, self.tree))
            os.mkdir(folder)
            ensure_owner_mode(folder, 0o700)
        return path

    def commit(self) -> None:
        """Give the built files the target's name. All of them must be fsynced already.

        Raises:
            CkpttoolError: it failed; the message says whether the destination is the old one or (`in_place`) the new
                one.
            DestinationExists: the target was created meanwhile.
            Unsafe: the partial folder was replaced by another one.
        """
        for folder, _, _ in os.walk(self.tree):
            sync_folder(folder)
        there = os.stat(self.folder, follow_symlinks=False)
        if not os.path.samestat(there, os.fstat(self._folder)):
            raise Unsafe(f"{self.folder} was put in the place of ours while we wrote. The destination is untouched.")
        refuse_target(self.target, self.is_file, self.force)  # somebody may have put something there meanwhile
        whole = os.fstat(self._write_journal_line).st_size
        self.append_journal(
            {"committed": True}
        )  # from here on `tree` may hold the old destination: never to be continued
        try:
            self._rename_to_target()
        except BaseException:
            if not self.in_place and not os.path.lexists(os.path.join(self.folder, "old")):
                with suppress(OSError):
                    os.ftruncate(self._write_journal_line, whole)  # nothing was moved: the next run may continue
            raise
        try:
            sync_folder(self.parent)
        except OSError as e:
            old = ""
            if self._replaced:
                old = f" The old one is kept in {self.folder}; `{partial.clean_command(self.target)}` removes it."
            else:
                self._remove_partial_folder()
            error = NoSpace if e.errno in (errno.ENOSPC, errno.EDQUOT) else CkpttoolError
            raise error(
                f"{self.parent}: {e.strerror} (errno {e.errno}) while the folder was synced. The new checkpoint is in "
                f"place at {self.target} and complete, but its new name may not survive a power cut: run `sync`.{old}"
            ) from e
        self.abandon()

    _replaced = False

    def _rename_to_target(self) -> None:
        """Rename the built file or folder to the target's name. An existing folder of that name moves into the partial
        folder; an existing file is replaced.

        Raises:
            DestinationExists: the target was created meanwhile.
            OSError: the system call failed.
        """
        built = os.path.join("tree", self.name) if self.is_file else "tree"
        st = os.stat(built, dir_fd=self._folder, follow_symlinks=False)
        self._built = (st.st_dev, st.st_ino)
        if self.is_file and self.force:
            os.replace(built, self.target, src_dir_fd=self._folder)
        elif os.path.lexists(self.target):
            self._replaced = True
            if not partial.rename_with_flags(built, self.target, 2, self._folder):  # EXCHANGE
                self._replace_by_two_renames(built)
        elif not partial.rename_with_flags(built, self.target, 1, self._folder):  # NOREPLACE
            os.rename(built, self.target, src_dir_fd=self._folder)
        note_change(f"The new checkpoint is in place at {self.target} and complete.")

    def _replace_by_two_renames(self, built: str) -> None:
        """Replace the target with two renames, where the file system cannot exchange two names; between them there is
        no destination. If the second fails, the old destination is renamed back, here or by the next run if this
        process was killed.

        Args:
            built: path of the new file or folder, relative to the partial folder.

        Raises:
            OSError: a rename failed; the old destination is in its place.
            CkpttoolError: renaming the old destination back failed as well; the message says where it is.
        """
        old = os.path.join(self.folder, "old")
        try:
            os.rename(self.target, old)
            os.rename(os.path.join(self.folder, built), self.target)
        except BaseException:
            if not os.path.lexists(self.target):
                try:
                    os.rename(old, self.target)
                except OSError as e:
                    raise CkpttoolError(
                        f"{self.target}: {e.strerror} (errno {e.errno}). The old checkpoint is whole in {old} "
                        f"and could not be put back; `{partial.clean_command(self.target)}` does that, or the next run."
                    ) from e
            raise

    def _remove_partial_folder(self) -> None:
        """Remove the partial folder; if some of it cannot be removed, add a message to `messages`."""
        self._close_files()  # on NFS an open file is renamed, not removed
        if left := partial.remove_partial_folder(self.folder, self.target):
            self.messages.append(left)

    def abandon(self) -> None:
        """Remove everything that was built, and the lock."""
        self._remove_partial_folder()
        self.release()

    def release(self) -> None:
        """Stop writing and release the lock, but keep the partial folder for the next run."""
        self._close_files()
        if self._lock >= 0:
            unlock(self.leftovers, self._lock)
        self._lock = -1

    def _close_files(self) -> None:
        """Close the journal and the folder."""
        for fd in (self._write_journal_line, self._folder):
            if fd >= 0:
                try:
                    os.close(fd)
                except OSError:
                    pass  # each line of the journal was synced when it was written
        self._write_journal_line = self._folder = -1


def check_free_space(folder: str, need_bytes: int, have: int = 0) -> int:
    """Check that a file system has space for what will be written, and return its free bytes.

    Args:
        folder: an existing folder on that file system.
        need_bytes: total bytes to write.
        have: how many of these are on disk already.

    Raises:
        NoSpace: there is not enough space.
    """
    free = shutil.disk_usage(folder).free
    if need_bytes > free + have:
        raise NoSpace(
            f"{folder} has {free:,} bytes free, the destination needs {need_bytes:,}. Free {need_bytes - free:,} bytes "
            "or write elsewhere.",
            code="CKPT0801",
        )
    return free


def refuse_target(target: str, is_file: bool, force: bool) -> None:
    """Refuse a destination path that must not be written to; changes nothing.

    Args:
        target: absolute path of the destination.
        is_file: a file will be written there, not a folder.
        force: an existing target of the same kind may be replaced.

    Raises:
        DestinationExists: the target exists and must not be replaced.
        UsageError: its folder is missing, or the path cannot be examined.
    """
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        if os.path.lexists(folder):
            raise UsageError(
                f"{folder} is not a folder, so nothing can be written in it. Choose another destination.",
                code="CKPT0211",
            )
        hint = " A ~ in quotes is not expanded; give the whole path." if "/~/" in f"{target}/" else ""
        raise UsageError(
            f"The folder {folder} does not exist.{hint} Create it first, or choose another destination.",
            code="CKPT0211",
        )
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        return
    except OSError as e:
        raise UsageError(f"{target}: {e.strerror}.", code="CKPT0211") from None
    if stat.S_ISLNK(mode):
        raise DestinationExists(
            f"{target} is a link to {os.readlink(target)}; give the path it leads to, or remove it.", code="CKPT0602"
        )
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise DestinationExists(
            f"{target} is {_KINDS.get(stat.S_IFMT(mode), 'no regular file')}, which ckpttool never replaces. Choose "
            "another destination.",
            code="CKPT0602",
        )
    if not force:
        raise DestinationExists(
            f"{target} exists. Choose another destination, or {argument('force', True)} to replace it whole.",
            code="CKPT0601",
        )
    if stat.S_ISDIR(mode) == is_file:
        kinds = ("a folder", "file") if is_file else ("a file", "folder")
        raise DestinationExists(
            f"{target} is {kinds[0]}; a {kinds[1]} does not replace it. Remove it first.", code="CKPT0602"
        )


_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
