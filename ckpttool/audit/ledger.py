"""The ledger of a store: what happened to its archives, one line per event, each chained to the line before by a hash.

    STORE/ledger.jsonl    {"archive": ..., "by": "user@host", "event": ..., facts ..., "hash": ..., "prev": ...,
                           "seq": 1, "time": "2026-11-21T10:20:30Z"}

A line is the canonical JSON of its entry (keys sorted, no spaces, ASCII) and a newline. `hash` is the SHA-256 of the
canonical JSON of all other fields, `prev` the hash of the line before, 64 zeros in the first. So no line can be
altered, removed, inserted, swapped or doubled without rewriting all that follow. The chain alone does not show that
lines are missing at its end, or that somebody rewrote all of it; a hash that was written down elsewhere does (`head` of
`verify_chain`).

In a folder, a line is appended under a lock, in one write, and made durable. A run killed in that write may leave a
torn last line; nothing is appended until somebody has looked at it and removed it, since a ledger that repairs itself
hides what was done to it. In an object store, the whole object is replaced, on the condition that it has not changed.

Whoever holds, releases, deletes or replaces an archive does so in a turn (`take_turn`). In a folder, the lock lasts as
long as the turn, so one of them acts at a time. An object store has no locks, and there the order of the lines decides:
a deletion looks for holds in the lines before its own, and a hold is refused while a deletion in the lines before it
has no end (`find_unfinished_change`).
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from itertools import pairwise
from typing import Any

from ..bounded_json import parse
from ..errors import (
    CkpttoolError,
    Corrupt,
    Differs,
    Locked,
    NoSpace,
    RemoteError,
    Unsafe,
    Unsupported,
    UsageError,
    argument,
    kind_of_failure,
    note_change,
)
from ..storage import objects, urls
from ..storage.destination_protocol import write_error
from ..storage.local_file import sync_folder
from .retention import format_time, get_current_user, parse_time

__all__ = [
    "FILE",
    "FIRST",
    "LedgerEntry",
    "LedgerWait",
    "Match",
    "Turn",
    "append_entry",
    "check_writable",
    "describe_clock_error",
    "find_backward_times",
    "find_latest_records",
    "find_unfinished_change",
    "match_archive",
    "may_still_carry_out",
    "read_entries",
    "read_entries_or_none",
    "require_store",
    "take_turn",
    "verify_chain",
]

#: The fields of a line: those in `_OWN`, and facts that depend on the event.
LedgerEntry = dict[str, Any]

FILE = "ledger.jsonl"
FIRST = "0" * 64  # what the first line has for the hash of the line before
_LINE = 1 << 20  # bytes of a line, at most
_SWAPS = 100  # tries to replace the object of a store that others write to
_SILENT_SECONDS = 2.0  # of a wait for the lock; then it is said what is waited for
_LOCK_SECONDS = 60.0  # of a wait to read, at most
_TURN_SECONDS = 600.0  # of a wait to write, which may come after hours of work; prune keeps the lock while it deletes
_SKEW = timedelta(minutes=5)  # machines that share a store have clocks that differ; Kerberos allows as much
_ACTS_WITHIN = timedelta(minutes=10)  # what a line begins in an object store is done by then, or not at all
_DEAD_AFTER = timedelta(hours=1)  # a run that began something by then without ending it was killed
_ENDS = ("deleted", "delete-failed", "replaced", "replace-failed")
_RECORDS = ("export", "add")  # events that say which archive a name stands for
_KEY = re.compile(r"[0-9a-f]{64}")  # of a signer: the hash of the key or certificate
_HASHES = ("manifest_sha256", "merkle_root", "sums_sha256", "ciphertext_sha256")
_OWN = {"seq", "time", "event", "archive", "by", "prev", "hash"}


class LedgerWait(UserWarning):
    """Another process has the lock of a ledger, and this one waits for it."""


def append_entry(store: str, event: str, archive: str, **facts: Any) -> LedgerEntry:
    """Add an entry to the ledger of a store in a turn of its own, and return it.

    Args:
        event: what happened to the archive: "export", "hold", ...
        archive: its file name.
        facts: further fields of the entry, as plain data.

    Raises:
        Corrupt: there is no such folder, or the last line is torn or altered. UsageError: the facts use reserved names,
            or are too large.
        Locked: another process keeps the ledger locked.
        Unsafe, RemoteError, CkpttoolError: the ledger is full, or cannot be opened, locked or written.
    """
    with take_turn(store) as mine:
        return mine.append(event, archive, **facts)


@contextmanager
def take_turn(store: str) -> Iterator[Turn]:
    """Yield a turn to read the ledger of a store and append to it; in a folder, the ledger is locked while the block
    runs.

    An object store has no locks. In a folder, the ledger is created if there is none.

    Raises:
        Corrupt: the folder does not exist.
        Locked: another process keeps the ledger locked. Unsafe, CkpttoolError: it cannot be opened or locked.
    """
    with ExitStack() as held:
        fd = None
        if not urls.is_url(store):
            try:
                fd = held.enter_context(_open_locked_ledger(store, os.O_RDWR | os.O_CREAT | os.O_APPEND))
            except FileNotFoundError:
                raise Corrupt(f"{store}: no such folder.", code="CKPT0426") from None
        yield Turn(store, fd)


class Turn:
    """A turn at a store; `alone` says whether nobody else acts before it ends: in a folder, not in an object store."""

    def __init__(self, store: str, fd: int | None) -> None:
        """Begin a turn; `fd` is the open, locked file of the ledger, None in an object store."""
        self.store, self._fd, self.alone = store, fd, fd is not None

    def read(self) -> list[LedgerEntry]:
        """Return every entry, after checking the chain of hashes.

        Raises:
            Corrupt: with the number of the first line that is altered or out of order.
            Unsafe: the ledger is too large. RemoteError: the store fails.
        """
        if self._fd is None:
            return read_entries(self.store)
        path = _get_ledger_path(self.store)
        return _parse_chain(_read_open_ledger(self._fd, path), path)

    def append(
        self,
        event: str,
        archive: str,
        *,
        following: Callable[[list[LedgerEntry]], Mapping[str, object]] | None = None,
        **facts: Any,
    ) -> LedgerEntry:
        """Append an entry, durably, and return it.

        Args:
            event: what happened to the archive: "export", "hold", ...
            archive: its file name.
            following: called with all entries before the new one, and again if others have appended some meanwhile;
                returns further fields of the entry. If it raises, nothing is appended. None: there are no such fields.
            facts: further fields of the entry, as plain data.

        Raises:
            Corrupt: the last line is torn or altered; nothing was added.
            Unsafe: the ledger is full. RemoteError, CkpttoolError: the entry cannot be written.
            UsageError: the facts use reserved names, or are too large.
        """
        if taken := sorted(_OWN & facts.keys()):
            raise UsageError(f"{taken[0]!r} is a field of the ledger's own; an event cannot give it.", code="CKPT0203")
        if not archive or "/" in archive or not event:
            raise UsageError(
                f"An entry of the ledger needs an event and the file name of an archive, not {archive!r}.",
                code="CKPT0203",
            )
        facts = {"event": event, "archive": archive, "by": f"{get_current_user()}@{socket.gethostname()}", **facts}
        if self._fd is None:
            entry = _append_to_object(self.store, facts, following)
        else:
            if following is not None:
                facts |= following(self.read())
            entry = _append_to_file(self.store, self._fd, facts)
        where = urls.redact_url(self.store)
        note_change(
            f"Line {entry['seq']} of the ledger of {where} was written: {event} of {archive}. `ckpttool audit list "
            f"{shlex.quote(where)}` shows what is there; the same command again does what is missing."
        )
        return entry


def may_still_carry_out(entry: LedgerEntry) -> bool:
    """Return whether this machine may still carry out the change that a ledger line announces.

    The line must be less than ten minutes old, and less than five minutes in the future, as clocks differ. Later,
    others assume that the run was killed.
    """
    return -_SKEW < datetime.now(UTC) - parse_time(entry["time"]) < _ACTS_WITHIN


def find_unfinished_change(entries: Sequence[LedgerEntry], archive: str) -> Mapping[str, object] | None:
    """Return the line that announced a deletion or replacement of an archive whose outcome no later line records.

    None if there is none that is less than an hour old: later, the run is assumed to have been killed.
    """
    begun: dict[int, LedgerEntry] = {}
    for e in (e for e in entries if e["archive"] == archive):
        if e["event"] in ("delete", "replace"):
            begun[e["seq"]] = e
        elif e["event"] in _ENDS:
            ended = [e["begun"]] if type(e.get("begun")) is int else list(begun)  # lines of old do not name theirs
            for seq in ended:
                begun.pop(seq, None)
    now = datetime.now(UTC)
    return next((e for e in begun.values() if now - parse_time(e["time"]) < _DEAD_AFTER), None)


def check_writable(store: str) -> list[LedgerEntry]:
    """Raise if the ledger of a store cannot be written. Call it before long work that ends with a line in the ledger.

    An existing ledger in a folder is opened for writing and locked, but not changed.

    Returns:
        The entries of the ledger; [] if there is none.

    Raises:
        Unsupported: the store has no conditional writes.
        Corrupt: the ledger is damaged. Unsafe: it is full. Locked: another process keeps it locked.
        CkpttoolError: it cannot be opened for writing, or not be locked.
    """
    path = _get_ledger_path(store)
    if urls.is_url(store):
        if objects.conditional_object(_get_ledger_url(store)) is None:
            raise Unsupported(
                f"{urls.redact_url(store)}: a ledger needs a folder, S3 or Azure. Use {argument('no_ledger', True)}, "
                "and keep the hashes elsewhere.",
                code="CKPT0340",
            )
        data = _read_ledger_bytes(store) or b""
    else:
        try:
            with _open_locked_ledger(store, os.O_RDWR | os.O_APPEND) as fd:
                data = _read_open_ledger(fd, path)
        except FileNotFoundError:
            return []
    _refuse_full(len(data), path)
    return _parse_chain(data, path)


def require_store(store: str) -> None:
    """Raise UsageError unless a store is a URL or a folder."""
    if not urls.is_url(store) and not os.path.isdir(store):
        raise UsageError(
            f"{store} is not a folder; a store is a folder with archives, or the URL of one.", code="CKPT0221"
        )


def read_entries(store: str) -> list[LedgerEntry]:
    """Return every entry of a store's ledger, after checking the chain of hashes; [] if there is no ledger.

    Raises:
        Corrupt: with the number of the first altered line. Unsafe, RemoteError, CkpttoolError: it cannot be read.
    """
    return read_entries_or_none(store) or []


def read_entries_or_none(store: str) -> list[LedgerEntry] | None:
    """Return every entry of a store's ledger, after checking the chain of hashes; None if there is no ledger, [] if it
    is empty.

    Raises:
        Corrupt: with the number of the first altered line. Unsafe, RemoteError, CkpttoolError: it cannot be read.
    """
    data = _read_ledger_bytes(store)
    return None if data is None else _parse_chain(data, _get_ledger_path(store))


def verify_chain(store: str, head: str | None = None) -> dict[str, object]:
    """Check that no line of a store's ledger was altered, removed or inserted.

    Args:
        head: hash of any line, noted when that line was the last one. Without it, missing lines at the end, or a ledger
            that was rewritten completely, are not found. None: this is not checked.

    Returns:
        {"entries": number of lines, "head": hash of the last one, "first", "last": their times or None, "backwards":
        the lines before which a clock was set back, as `find_backward_times` returns them}.

    Raises:
        Corrupt: with the number of the first altered line; or there is no ledger.
        Differs: no line has the hash `head`.
        UsageError: `head` is not a hash, or the folder does not exist.
    """
    if head is not None and not re.fullmatch(r"[0-9a-f]{64}", head):
        raise UsageError(
            f"{head!r} is not the hash of a line: 64 digits 0-9a-f, as `audit ledger verify` prints them.",
            code="CKPT0203",
        )
    require_store(store)
    entries = read_entries_or_none(store)
    if entries is None:
        raise Corrupt(
            f"{_get_ledger_path(store)} is missing: {store} has no ledger, so nothing shows what was done to its "
            "archives. "
            "If there was one, bring it back.",
            code="CKPT0426",
        )
    if head is not None and all(e["hash"] != head for e in entries):
        raise Differs(
            f"{_get_ledger_path(store)}: the chain of its {len(entries)} lines is whole, but none has the hash {head}. "
            "Lines at its end were cut off, or it was written anew.",
            code="CKPT0501",
        )
    return {
        "entries": len(entries),
        "head": entries[-1]["hash"] if entries else FIRST,
        "first": entries[0]["time"] if entries else None,
        "last": entries[-1]["time"] if entries else None,
        "backwards": find_backward_times(entries),
    }


def find_backward_times(entries: Sequence[LedgerEntry]) -> list[dict[str, object]]:
    """Return the lines whose time is more than five minutes before that of the preceding line.

    A clock was wrong when one of the two was written; the ledger does not show which.

    Returns:
        {"line": its number, "time": its time, "before": the time of the preceding line, "seconds": the difference} of
        each.
    """
    out = []
    for a, b in pairwise(entries):
        step = parse_time(a["time"]) - parse_time(b["time"])
        if step > _SKEW:
            out.append(
                {
                    "line": b["seq"],
                    "time": b["time"],
                    "before": a["time"],
                    "seconds": int(step.total_seconds()),
                }
            )
    return out


def describe_clock_error(entries: Sequence[LedgerEntry]) -> str | None:
    """Return a warning if this machine's clock is more than five minutes behind the time of the last line; otherwise
    None."""
    now = datetime.now(UTC).replace(microsecond=0)
    if not entries or parse_time(entries[-1]["time"]) - now <= _SKEW:
        return None
    return (
        f"this machine's clock says {format_time(now)}, and the last line of the ledger was written at "
        f"{entries[-1]['time']}. One of the two clocks is wrong. Dates of archives, and so retention and prune, follow "
        "the clock"
    )


# ---------------------------------------------------------------------------------------------------- archives in it


@dataclass(frozen=True)
class Match:
    """What a ledger records of the archive that now has a name.

    `state` is "match": the name was given to this archive; "differs": it was given to another one; "renamed": this
    archive is recorded under another name; "unknown": no line records it. `says` is the same as a sentence.
    """

    state: str
    says: str


def find_latest_records(entries: Sequence[LedgerEntry]) -> dict[str, LedgerEntry]:
    """Return {archive: the last "export" or "add" line of this name}, of lines that have a manifest hash."""
    return {e["archive"]: e for e in entries if e["event"] in _RECORDS and isinstance(e.get("manifest_sha256"), str)}


def match_archive(recorded: Mapping[str, LedgerEntry], name: str, known: Mapping[str, object]) -> Match:
    """Compare an archive with the one that the ledger records under its name.

    Args:
        recorded: {name: the line that records an archive}, as `find_latest_records` returns it.
        name: the file name of the archive.
        known: facts of the archive: "manifest_sha256", "merkle_root", "sums_sha256", "ciphertext_sha256", "signed"
            (bool) and "signed_by"; what is None, empty or missing on either side is not compared.

    Returns:
        Whether it is the recorded archive, another one, recorded under another name, or not recorded; also as a
        sentence.
    """
    line = recorded.get(name)
    others = (e for n, e in recorded.items() if n != name and known.get("manifest_sha256") == e["manifest_sha256"])
    alias = next((e for e in others if not _describe_difference(known, e)), None)
    if line is None:
        if alias is None:
            return Match("unknown", f"the ledger does not know this archive: no line records {name}")
        return Match(
            "renamed", f"recorded as {alias['archive']} by line {alias['seq']} of {alias['time']}, not as {name}"
        )
    if unlike := _describe_difference(known, line):
        also = f" It is the archive that line {alias['seq']} records as {alias['archive']}." if alias else ""
        return Match(
            "differs", f"{unlike}, so it is another archive than the one recorded as {name} on {line['time']}.{also}"
        )
    return Match("match", f"the archive that line {line['seq']} recorded on {line['time']}")


def _describe_difference(known: Mapping[str, object], line: Mapping[str, object]) -> str:
    """Return a text that says how an archive with the facts `known` differs from the one that a line records; "" if it
    does not."""
    for key in _HASHES:
        have, listed = known.get(key), line.get(key)
        if have and listed and have != listed:
            return f"its {key} is {have}, and line {line['seq']} of the ledger has {listed}"
    signed, listed = known.get("signed"), line.get("signed")
    if isinstance(signed, bool) and isinstance(listed, bool) and signed != listed:
        return (
            f"it is {'signed' if signed else 'not signed'}, and line {line['seq']} of the ledger has it "
            f"{'' if listed else 'not '}signed"
        )
    keys, before = (set(_KEY.findall(str(m.get("signed_by") or ""))) for m in (known, line))
    if keys and before and keys != before:
        return f"it is signed by {known['signed_by']}, and line {line['seq']} of the ledger has {line['signed_by']}"
    return ""


# ----------------------------------------------------------------------------------------------------------- the chain


def _get_ledger_path(store: str) -> str:
    """Return the path of a store's ledger; of an object store, the URL without credentials, for messages."""
    return f"{urls.redact_url(store).rstrip('/')}/{FILE}" if urls.is_url(store) else os.path.join(store, FILE)


def _encode_canonical_json(entry: LedgerEntry) -> bytes:
    """Return an entry as bytes, in the only form in which it is hashed and written."""
    return json.dumps(entry, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _hash_entry(entry: LedgerEntry) -> str:
    """Return the SHA-256, in hex, of an entry without its field "hash"."""
    return sha256(_encode_canonical_json({k: v for k, v in entry.items() if k != "hash"})).hexdigest()


def _make_entry(facts: LedgerEntry, last: LedgerEntry | None) -> tuple[LedgerEntry, bytes]:
    """Return (the entry that follows `last`, its line in bytes).

    Args:
        facts: the fields of the entry, but for number, time and hashes.
        last: the entry before; None if this is the first.

    Raises:
        UsageError: the facts are not plain data, or too large.
    """
    entry = {
        "seq": last["seq"] + 1 if last else 1,
        "time": format_time(datetime.now(UTC).replace(microsecond=0)),
        "prev": last["hash"] if last else FIRST,
        **facts,
    }
    try:
        entry = json.loads(_encode_canonical_json(entry))
        entry["hash"] = _hash_entry(entry)
        line = _encode_canonical_json(entry) + b"\n"
    except (TypeError, ValueError, RecursionError) as e:
        raise UsageError(f"An entry of the ledger must be plain data ({e}).", code="CKPT0203") from None
    if len(line) > _LINE:
        raise UsageError(f"An entry of the ledger has {len(line):,} bytes; it may have {_LINE:,}.", code="CKPT0203")
    return entry, line


def _parse_line(line: bytes, what: str, number: int) -> LedgerEntry:
    """Return the entry of a line, after checking its form, its field types and its own hash.

    Args:
        line: the line, without its newline.
        what, number: the ledger's path and the number of the line, for messages.

    Raises:
        Corrupt: the line was altered.
    """
    try:
        entry = parse(line, what)
        if not isinstance(entry, dict) or not entry.keys() >= _OWN or _encode_canonical_json(entry) != line:
            raise ValueError("it is not written as ckpttool writes it")
        if entry["hash"] != _hash_entry(entry):
            raise ValueError("its hash is wrong")
        if type(entry["seq"]) is not int or entry["seq"] < 1:
            raise ValueError("its number is not a number")
        if not all(isinstance(entry[k], str) for k in ("event", "archive", "by", "prev")):
            raise ValueError("its fields have wrong types")
        parse_time(entry["time"])
    except (TypeError, ValueError, RecursionError) as e:
        raise _make_altered_error(what, number, str(e)) from None
    except (Corrupt, Unsafe):
        raise _make_altered_error(what, number, "it is not JSON that ckpttool writes") from None
    return entry


def _make_altered_error(what: str, number: int, why: str) -> Corrupt:
    """Return the error for line `number` of the ledger at path `what`, which was altered, as the text `why` says."""
    return Corrupt(
        f"{what}: line {number} was altered: {why}. What it and the lines after it say proves nothing.", code="CKPT0426"
    )


def _parse_chain(data: bytes, what: str) -> list[LedgerEntry]:
    """Parse all lines of a ledger, and check that each follows the preceding one.

    Args:
        data: the content of the ledger.
        what: its path, for messages.

    Raises:
        Corrupt: a line is torn or altered, or does not follow the preceding one.
    """
    entries: list[LedgerEntry] = []
    prev, at = FIRST, 0
    while at < len(data):
        end = data.find(b"\n", at)
        number = len(entries) + 1
        if end < 0:
            raise _make_torn_error(what, number, at, len(data))
        entry = _parse_line(data[at:end], what, number)
        if (entry["seq"], entry["prev"]) != (number, prev):
            raise Corrupt(
                f"{what}: line {number} does not follow the line before: it is entry {entry['seq']}, and the hash that "
                f"it names is {'that line’s' if entry['prev'] == prev else 'another one'}. Lines were removed, "
                "inserted, swapped or doubled.",
                code="CKPT0426",
            )
        entries.append(entry)
        prev, at = entry["hash"], end + 1
    return entries


def _refuse_full(size: int, what: str) -> None:
    """Refuse to append to a ledger that has no room for the longest line, since no command reads a larger one.

    Args:
        size: bytes of the ledger.
        what: its path, for messages.

    Raises:
        Unsafe: it has no room.
    """
    if size + _LINE > objects.MOST_LEDGER_BYTES:
        raise Unsafe(
            f"{what} is full: it has {size:,} bytes, and no command reads one of more than "
            f"{objects.MOST_LEDGER_BYTES:,}. Nothing was written. Keep new archives in another store; "
            "`ckpttool audit verify` with "
            f"{argument('no_ledger', True)} needs no line.",
            code="CKPT0704",
        )


def _make_torn_error(what: str, number: int, at: int, size: int) -> Corrupt:
    """Return the error for a last line that does not end with a newline.

    Args:
        what, number: the ledger's path and the number of the line.
        at, size: the offset at which the line begins, and the bytes of the ledger.
    """
    return Corrupt(
        f"{what}: line {number} is torn: its {size - at} bytes have no end. A run was killed while it wrote them, or "
        f"they were altered. Keep a copy, cut them off (truncate -s {at} FILE), and see that the archives are as "
        "the lines say.",
        code="CKPT0426",
    )


# -------------------------------------------------------------------------------------------------------------- folder


def _read_ledger_bytes(store: str) -> bytes | None:
    """Return the whole ledger of a store; None if there is none.

    Raises:
        Unsafe, RemoteError, CkpttoolError: it cannot be read.
    """
    if urls.is_url(store):
        data, token = objects.get_with_token(_get_ledger_url(store))
        return None if token is None else data
    try:
        with _open_locked_ledger(store, os.O_RDONLY) as fd:
            return _read_open_ledger(fd, _get_ledger_path(store))
    except FileNotFoundError:
        return None


def _read_open_ledger(fd: int, path: str) -> bytes:
    """Return the whole ledger of a folder.

    Args:
        fd: the open, locked ledger.
        path: of it, for messages.

    Raises:
        Unsafe: it is too large to be read whole.
    """
    size = os.fstat(fd).st_size
    if size > objects.MOST_LEDGER_BYTES:
        raise objects.too_large_error(path, size)
    with open(fd, "rb", closefd=False) as f:
        f.seek(0)
        return f.read(size)


@contextmanager
def _open_locked_ledger(store: str, flags: int) -> Iterator[int]:
    """Keep the ledger of a folder open and locked while the block runs, and yield its file descriptor.

    Args:
        flags: those of `os.open`. With O_RDONLY the lock is shared with other readers, otherwise it is exclusive.

    Raises:
        FileNotFoundError: there is no ledger.
        Unsafe: it is not a regular file.
        Locked: another process keeps it locked.
        CkpttoolError: it cannot be opened or locked.
    """
    import fcntl
    import stat

    path = _get_ledger_path(store)
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except FileNotFoundError:
        raise
    except OSError as e:
        kind = Unsafe if e.errno in (errno.ELOOP, errno.EISDIR) else kind_of_failure(e)
        raise kind(f"{path} cannot be opened: {e.strerror}.") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Unsafe(f"{path} is not a regular file.", code="CKPT0702")
        _lock_ledger(fd, fcntl.LOCK_SH if flags == os.O_RDONLY else fcntl.LOCK_EX, path)
        yield fd
    finally:
        os.close(fd)


def _lock_ledger(fd: int, how: int, path: str) -> None:
    """Lock an open ledger, and wait for another process that has the lock, with a warning after two seconds.

    Whoever may read the ledger can lock it, so the wait has an end.

    Args:
        fd: the open ledger.
        how: fcntl.LOCK_SH or LOCK_EX.
        path: of the ledger, for messages.

    Raises:
        Locked: another process has had the lock for `_LOCK_SECONDS`, or `_TURN_SECONDS` to write.
        CkpttoolError: it cannot be locked.
    """
    import fcntl

    most = _LOCK_SECONDS if how == fcntl.LOCK_SH else _TURN_SECONDS
    began, told, pause = time.monotonic(), False, 0.01
    while True:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            return
        except OSError as e:
            if e.errno not in (errno.EAGAIN, errno.EACCES):
                raise CkpttoolError(
                    f"{path} cannot be locked: {e.strerror}. Nothing was read from it or written."
                ) from None
        waited = time.monotonic() - began
        if waited >= most:
            raise Locked(
                f"{path} is locked by another process, and was so for {most:g} seconds. Nothing was read from "
                f"it or written. `fuser -v {shlex.quote(path)}` names the process: wait for it, or stop it."
            )
        if waited >= _SILENT_SECONDS and not told:
            told = True
            warnings.warn(
                f"{path} is locked by another process; this one waits for it, {most:g} seconds at most",
                LedgerWait,
                stacklevel=2,
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _append_to_file(store: str, fd: int, facts: LedgerEntry) -> LedgerEntry:
    """Append an entry with these fields to the ledger of a folder, whose lock is held, and make it durable; returns the
    entry.

    Raises:
        Corrupt: the last line is torn or altered. UsageError: the facts are not plain data, or too large.
        Unsafe: the ledger is full.
        CkpttoolError: the line cannot be written (NoSpace: for lack of room); the ledger is as it was.
    """
    path = _get_ledger_path(store)
    try:
        size = os.fstat(fd).st_size
        _refuse_full(size, path)
        entry, line = _make_entry(facts, _read_last_entry(fd, size, path))
        try:
            if os.write(fd, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(fd, size)  # what is our own, under our own lock
            raise
        os.fsync(fd)
        if not size:
            sync_folder(store)
        return entry
    except OSError as e:
        if kind_of_failure(e) is not NoSpace:
            raise write_error(e, path, "The entry was not written.") from None
        text = f"{path}: {e.strerror}. The entry was not written. Free some space and run the same command again."
        raise NoSpace(text, code="CKPT0801") from None


def _read_last_entry(fd: int, size: int, what: str) -> LedgerEntry | None:
    """Return the entry of the last line; None if the ledger is empty. Only this line's own hash is checked, not the
    chain.

    Args:
        fd, size: the open ledger and its bytes.
        what: its path, for messages.

    Raises:
        Corrupt: the line is torn or altered.
    """
    if not size:
        return None
    start = max(0, size - _LINE - 1)
    tail = os.pread(fd, size - start, start)
    at = tail.rfind(b"\n", 0, len(tail) - 1) + 1
    if not tail.endswith(b"\n") or (at == 0 and start):
        number = _count_lines(fd, size) + 1
        raise _make_torn_error(what, number, start + tail.rfind(b"\n") + 1, size)
    try:
        return _parse_line(tail[at:-1], what, 0)
    except Corrupt:
        return _parse_line(tail[at:-1], what, _count_lines(fd, size))  # the number is worth looking for only now


def _count_lines(fd: int, size: int) -> int:
    """Return the number of newlines in the first `size` bytes of a file."""
    return sum(os.pread(fd, 1 << 20, at).count(b"\n") for at in range(0, size, 1 << 20))


# -------------------------------------------------------------------------------------------------------- object store


def _get_ledger_url(store: str) -> str:
    """Return the URL of a store's ledger."""
    return f"{store.rstrip('/')}/{FILE}"


def _append_to_object(
    store: str, facts: LedgerEntry, following: Callable[[list[LedgerEntry]], Mapping[str, object]] | None
) -> LedgerEntry:
    """Append an entry to the ledger of an object store, and return the entry.

    The object is replaced on the condition that it has not changed since it was read; otherwise this is tried again.

    Args:
        facts: the fields of the entry.
        following: called at every try with all entries before the new one; returns further fields, or raises. None:
            there are no such fields.

    Raises:
        Corrupt: the ledger is damaged. Unsafe: it is full.
        UsageError: the facts are not plain data, or too large.
        RemoteError: the store fails, or others wrote to it at every try; nothing was added.
    """
    url, what = _get_ledger_url(store), _get_ledger_path(store)
    sent: tuple[LedgerEntry, bytes] | None = None
    for k in range(_SWAPS):
        data, token = objects.get_with_token(url)
        if sent and data.startswith(sent[1]):
            return sent[0]  # it had been written, only the answer was lost
        _refuse_full(len(data), what)
        entries = _parse_chain(data, what)
        more = following(entries) if following is not None else {}
        entry, line = _make_entry({**facts, **more}, entries[-1] if entries else None)
        if objects.put_if_unchanged(url, data + line, token):
            return entry
        sent = entry, data + line
        time.sleep(min(0.01 * (k + 1), 0.2))
    raise RemoteError(
        f"{what}: somebody else wrote to it each of the {_SWAPS} times we tried. The entry was not written; try again.",
        code="CKPT0908",
    )
