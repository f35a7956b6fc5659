"""What can go wrong, and the exit code of each.

    CkpttoolError                 1     unexpected
    ├── UsageError                2  x  the command line or an argument makes no sense
    │   └── MissingPackage        2  x  a package that only some installs have is needed
    ├── NotRecognised             3  x  no layout knows this path
    ├── Unsupported               3  x  known, but this layout or pair cannot do that
    │   └── DoesNotFit           12  x  a live job has other names, shapes or another kind of optimizer
    ├── Corrupt                   4  x  incomplete, inconsistent or damaged
    │   ├── IncompleteWeights     4  x  weights end too early, so that they cannot be read alone either
    │   ├── SourceChanged         4  x  the source was written to while it was read
    │   └── Unreadable            4     the system failed to read it; it may succeed next time
    ├── Differs                   5  x  two checkpoints, or a digest, are not equal
    ├── DestinationExists         6     something is there already
    │   └── Locked                6     another run is writing there
    ├── Unsafe                    7  x  content that would run code, or that hides from a reader
    ├── NoSpace                   8     not enough memory or disk
    ├── RemoteError               9     a remote store or its authentication
    ├── ContinuityFailed         10     training does not go on as before
    ├── GateFailed               11     a threshold given by the user was not met
    ├── RankLost                 13     a rank of a job was killed, or makes no progress
    ├── NotPermitted             14     the system does not let this user read or write there
    └── Interrupted             130     stopped by a signal; the next run continues

x: what a run has written so far is of no use after such an error and is removed (`keeps_work` is False). After any
other error it is kept, and the same command continues from there.

A message says what was found, why that stops us and what to do, with file, tensor and numbers. It names an option as
the caller knows it: `argument("world_size", 0)` is `world_size=0` in Python, and `--world-size 0` on the command line.

Every error has a code (`codes.py`), which `ckpttool explain` explains: that of the place that raises it (`code=`), or
the one of its class.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from shlex import quote
from typing import TYPE_CHECKING

from .printable import printable, printable_lines

if TYPE_CHECKING:
    from .codes import Code

__all__ = [
    "EXIT_CODES",
    "CkpttoolError",
    "ContinuityFailed",
    "Corrupt",
    "DestinationExists",
    "Differs",
    "DoesNotFit",
    "GateFailed",
    "IncompleteWeights",
    "Interrupted",
    "Locked",
    "MissingPackage",
    "NoSpace",
    "NotPermitted",
    "NotRecognised",
    "RankLost",
    "RemoteError",
    "SourceChanged",
    "Unreadable",
    "Unsafe",
    "Unsupported",
    "UsageError",
    "argument",
    "get_change",
    "get_failed_path",
    "get_named_flags",
    "kind_of_failure",
    "name_flags",
    "note_change",
]


class CkpttoolError(Exception):
    """Anything ckpttool refuses or fails to do.

    `keeps_work`: whether what a run has written so far can still become the destination, so that the next run
    continues. `code`: the kind of failure, such as "CKPT0412"; None for that of the class.

    Its text is safe to print, whatever names are in it: one line, with escapes for what does not print (`args[0]` has
    it as it was made). `listing` are lines of ours below it.
    """

    exit_code = 1
    keeps_work = True
    code: Code = "CKPT0100"

    def __init__(self, *text: object, listing: str = "", code: Code | None = None) -> None:
        """Make the error.

        Args:
            text: the message, one str; more than one becomes a tuple in the message, as for any Exception.
            listing: lines of ckpttool's own to print below the message; "" for none.
            code: the kind of failure, such as "CKPT0412"; None for that of the class.
        """
        super().__init__(*text)
        self.listing = listing
        self.code = code or self.code

    @property
    def kind(self) -> str:
        """Return the name of the error's class ("Corrupt"); for a class of another module, that of its nearest base
        class in this module."""
        return next(c.__name__ for c in type(self).__mro__ if c.__name__ in __all__)

    def __str__(self) -> str:
        """Return the message in one line that is safe to print, with escapes, and the lines of `listing` below it."""
        return printable(super().__str__()) + (f"\n{printable_lines(self.listing)}" if self.listing else "")

    def add_note(self, note: str, /) -> None:
        """Add a note, which Python prints below the text; it is made safe to print, too."""
        super().add_note(printable(note))


class UsageError(CkpttoolError, ValueError):
    """The command line or an argument makes no sense; also a ValueError."""

    exit_code = 2
    code: Code = "CKPT0200"
    keeps_work = False


class MissingPackage(UsageError):
    """A package that only some installs have is needed; the message has the command that installs it."""

    code: Code = "CKPT0210"


class NotRecognised(CkpttoolError):
    """No layout knows this path.

    `below`: of a folder of checkpoints their list, an `engine.detection.Checkpoints`.
    """

    exit_code = 3
    code: Code = "CKPT0300"
    keeps_work = False
    below: object = None


class Unsupported(CkpttoolError):
    """The layout is known, but it cannot do what was asked."""

    exit_code = 3
    code: Code = "CKPT0300"
    keeps_work = False


class DoesNotFit(Unsupported):
    """A live job has other names, shapes or another kind of optimizer than the checkpoint."""

    exit_code = 12
    code: Code = "CKPT1200"


class Corrupt(CkpttoolError):
    """The checkpoint is incomplete, inconsistent or damaged.

    `wrong_bytes`: the file whose bytes do not have the CRC32 that it carries, where that is what was found.
    """

    wrong_bytes: str | None = None
    exit_code = 4
    code: Code = "CKPT0400"
    keeps_work = False


class IncompleteWeights(Corrupt):
    """Weights end before they should, and nothing in their own files shows it: they must not be read alone either."""

    code: Code = "CKPT0423"


class SourceChanged(Corrupt):
    """A source file was written to while it was read."""

    code: Code = "CKPT0422"


class Unreadable(Corrupt):
    """The system failed to read a file (EIO, a stale handle); it may succeed next time."""

    keeps_work = True
    code: Code = "CKPT0424"


class Differs(CkpttoolError):
    """Two checkpoints, or a checkpoint and its recorded digest, are not equal."""

    exit_code = 5
    code: Code = "CKPT0500"
    keeps_work = False


class DestinationExists(CkpttoolError):
    """Something is at the destination already."""

    exit_code = 6
    code: Code = "CKPT0600"


class Locked(DestinationExists):
    """Another run is writing to the destination."""

    code: Code = "CKPT0604"


class Unsafe(CkpttoolError):
    """Content that would run code, or that different readers would read differently."""

    exit_code = 7
    code: Code = "CKPT0700"
    keeps_work = False


class NoSpace(CkpttoolError):
    """Not enough memory or disk."""

    exit_code = 8
    code: Code = "CKPT0800"


class RemoteError(CkpttoolError):
    """A remote store, or its authentication, failed."""

    exit_code = 9
    code: Code = "CKPT0900"


class ContinuityFailed(CkpttoolError):
    """Training does not go on as before."""

    exit_code = 10
    code: Code = "CKPT1000"


class GateFailed(CkpttoolError):
    """A threshold given by the user was not met."""

    exit_code = 11
    code: Code = "CKPT1100"


class RankLost(CkpttoolError):
    """A rank of a job was killed, or makes no progress. The job says nothing about the checkpoint; it can be run
    again."""

    exit_code = 13
    code: Code = "CKPT1300"


class NotPermitted(CkpttoolError):
    """The system does not let this user read or write there. It says nothing about the checkpoint."""

    exit_code = 14
    code: Code = "CKPT1400"


class Interrupted(CkpttoolError):
    """Stopped by a signal; the next run continues."""

    exit_code = 130
    code: Code = "CKPT9900"


#: (code, meaning): the table of the README, and of `ckpttool --help`.
EXIT_CODES: tuple[tuple[int, str], ...] = (
    (0, "ok"),
    (1, "unexpected error"),
    (2, "usage"),
    (3, "not recognised or unsupported"),
    (4, "incomplete or corrupt"),
    (5, "differs"),
    (6, "destination exists or locked"),
    (7, "unsafe content refused"),
    (8, "not enough memory or disk"),
    (9, "remote or authentication"),
    (10, "loss continuity failed"),
    (11, "gate failed"),
    (12, "checkpoint does not fit the job"),
    (13, "rank lost or hung"),
    (14, "permission denied"),
    (130, "interrupted (resumable)"),
)


def kind_of_failure(e: OSError, otherwise: type[CkpttoolError] = CkpttoolError) -> type[CkpttoolError]:
    """Choose the class of the error for a failed system call: `NotPermitted` or `NoSpace` where the user's permissions
    or a full disk are the reason, and `otherwise` for any other."""
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return NotPermitted
    return NoSpace if e.errno in (errno.ENOSPC, errno.EDQUOT) else otherwise


def get_failed_path(e: OSError, otherwise: str) -> str:
    """Return the path that an OSError is about, as it was given to the system call; `otherwise` if the call had no
    path, or a file descriptor instead."""
    return os.fsdecode(e.filename) if isinstance(e.filename, (str, bytes)) else otherwise


#: Arguments whose option is not their name with dashes.
_FLAGS = {
    "max_memory_bytes": "--max-memory",
    "threads": "--jobs",
    "max_shard_bytes": "--max-shard-size",
    "set_values": "--set",
    "pull_request": "--pr",
    "member_bytes": "--member-size",
    "key": "--sign-key",
    "certificate": "--sign-cert",
    "chain": "--cert-chain",
    "hold": "--legal-hold",
    "identities": "--identity",
    "certificates": "--cert",
    "cases": "--case",
}


class CommandLine:
    """The command that a process runs. `flags` are the options that it has; () where that is not known."""

    def __init__(self, flags: Collection[str] = ()) -> None:
        self._flags = flags

    @property
    def flags(self) -> Collection[str]:
        """Return the options of the command, as typed ("--force"); empty where they are not known."""
        return self._flags

    def owner(self, flag: str) -> str | None:
        """Return the name of a command that has an option which this command lacks: always "ckpttool convert" in this
        class. A subclass may look the command up, and return None where no command has the option.

        Args:
            flag: the option, as typed ("--force").
        """
        return "ckpttool convert"


_command: CommandLine | None = None


@contextmanager
def name_flags(command: CommandLine | None = None) -> Iterator[None]:
    """While the block runs, make messages name options as the command line does (`--world-size 0`), in all threads.

    Args:
        command: the command that runs; an option that it lacks is named together with a command that has it. Where
            None, every option is taken for one of the command.
    """
    global _command
    before, _command = _command, command or CommandLine()
    try:
        yield
    finally:
        _command = before


def get_named_flags() -> list[str] | None:
    """Return the options of the running command, as typed ("--force"), inside a `name_flags` block: [] if its options
    are not known. Outside of such a block, return None: messages then name arguments as Python does.

    A process that this one starts, and whose messages are shown too, is given this list.
    """
    return None if _command is None else list(_command.flags)


_changed = ""


def note_change(what: str) -> None:
    """Record a permanent change that a run has made, as a sentence. The message of a later interrupt repeats it."""
    global _changed
    _changed = what


def get_change() -> str:
    """Return the sentence that was given to `note_change` last; "" if none was."""
    return _changed


def argument(name: str, value: object = None, of: str | None = None) -> str:
    """Return the text for an option in a message, in the form in which the caller gives it: in Python, or quoted for a
    shell on the command line.

    Examples:
        >>> argument("world_size", 0), argument("drop", True), argument("wrap"), argument("only", ["model", "optim"])
        ('world_size=0', 'drop=True', 'wrap', "only=['model', 'optim']")
        >>> with name_flags():
        ...     argument("world_size", 0), argument("drop", True), argument("only", ["model", "optim"])
        ('--world-size 0', '--drop', '--only model,optim')

    If the command that runs lacks the option, the text names a command that has it: "--drop of `ckpttool convert`".

    Args:
        name: name of the argument.
        value: None for the name alone, True or False for an option that is a switch.
        of: the dataclass that has it as a field, for an option of one layout.
    """
    if _command is not None:
        flag = _FLAGS.get(name) or ("--no-" if value is False else "--") + name.replace("_", "-")
        text = flag
        if value is not None and not isinstance(value, bool):
            words = value if isinstance(value, Iterable) and not isinstance(value, str) else [value]
            text += f" {quote(','.join(map(str, words)))}"
        if flag in (_command.flags or (flag,)):
            return text
        if (owner := _command.owner(flag)) is not None:
            return f"{text} of `{owner}`"
    said = name if value is None else f"{name}={value!r}"
    return f"{of}({said})" if of else said
