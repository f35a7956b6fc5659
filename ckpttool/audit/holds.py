"""Legal holds: place and release them.

A hold is a line in the ledger and a file, NAME.hold.json, that `release` removes after its own line. While the file is
there its holds count, whatever the ledger says; where the two disagree, `list_archives` says so.

A hold that succeeded is not followed by a deletion: see `ledger.take_turn`. Object lock makes the store itself refuse,
so there a hold may even come between a deletion's line and the deletion.
"""

from __future__ import annotations

import os
from dataclasses import replace

from ..errors import CkpttoolError, Locked, UsageError
from ..storage import objects, urls
from ..storage.sources import open_source
from . import ledger, sidecar
from .archive import ArchiveFacts
from .archive_store import (
    History,
    describe_unfinished_change,
    find_holds_in_ledger,
    get_identifying_fields,
    make_listing_row,
    read_archive_facts,
    remove_file,
    require_archive,
    split_archive_path,
)

__all__ = ["hold", "release"]

_NAME_MAX = 255  # bytes of a file name, of Linux and most file systems


def hold(archive: str, reason: str) -> ledger.LedgerEntry:
    """Put an archive under a legal hold: in the ledger, in NAME.hold.json next to it and, if the store supports it, on
    the object.

    Returns the entry of the ledger; its `object_lock` says whether the store holds the object, too.

    Args:
        archive: path or URL of the archive.
        reason: why it must be kept.

    Raises:
        UsageError: no reason, no such archive, or its name is too long. RemoteError: the store does not allow it;
            nothing was recorded.
        Locked: another run is deleting or replacing it. Corrupt: the ledger is damaged. CkpttoolError: the file cannot
            be written; the hold is in the ledger.
    """
    store, name = _check_reason_and_split_path(archive, reason)
    require_archive(store, name)
    written = f".{sidecar.get_hold_file_name(name)}.partial-{os.getpid()}"  # by `replace_file`, before the rename
    if not urls.is_url(store) and len(os.fsencode(written)) > _NAME_MAX:
        most = _NAME_MAX - len(f".{sidecar.HOLD}.partial-4194304")
        raise UsageError(
            f"{archive} is not held: its name has {len(os.fsencode(name))} bytes, and that of its hold file would be "
            f"too long. Rename the archive so that its name has {most} bytes at most, and hold it then.",
            code="CKPT0203",
        )
    locked = urls.is_url(archive) and objects.set_legal_hold(archive, on=True)
    with ledger.take_turn(store) as turn:

        def still_there(lines: list[ledger.LedgerEntry]) -> ledger.LedgerEntry:
            """Return the fields that identify the archive, for the line; {} if it is damaged.

            Args:
                lines: the entries that the new one will follow.

            Raises:
                Locked: another run is about to delete or replace it. UsageError: it is gone.
            """
            begun = None if turn.alone or locked else ledger.find_unfinished_change(lines, name)
            if begun is not None:
                raise Locked(
                    f"{urls.redact_url(archive)} is not held: {describe_unfinished_change(begun)}. If that run was "
                    "killed, run it again, or hold the archive an hour after that line: by then it cannot be deleted "
                    "any more."
                )
            require_archive(store, name)
            _, known = read_archive_facts(store, name)
            return get_identifying_fields(known) if isinstance(known, ArchiveFacts) else {}

        entry = turn.append("hold", name, following=still_there, reason=reason, object_lock=locked)
        require_archive(store, name)
        try:
            _write_hold_file(store, name, turn, entry)
        except CkpttoolError as e:
            raise type(e)(
                f"{e} {name} is held by line {entry['seq']} of the ledger, but the hold would be lost with the ledger. "
                "Run the same command again to write both.",
                code=e.code,
            ) from e
        return entry


def _write_hold_file(store: str, name: str, turn: ledger.Turn, entry: ledger.LedgerEntry) -> None:
    """Add the hold of a ledger entry to the hold file next to an archive.

    In an object store, holds that others have meanwhile added to the ledger are written, too.

    Args:
        store, name: the store, and the file name of the archive.
        turn: the open turn at the ledger.
        entry: the "hold" line.

    Raises:
        CkpttoolError: the hold file or the ledger cannot be read or written.
    """
    seen: list[ledger.LedgerEntry] = []
    new = [entry]
    while new:
        with open_source(store) as source:
            held = sidecar.read_holds(source, name) if sidecar.get_hold_file_name(name) in source.list() else []
        reasons = {h["reason"] for h in new}
        held = [h for h in held if h["reason"] not in reasons] + [{**h, "since": h["time"]} for h in new]
        sidecar.write_small_file(store, sidecar.get_hold_file_name(name), sidecar.encode_holds(name, held))
        seen += new
        standing = [] if turn.alone else find_holds_in_ledger(turn.read(), name)[0].values()
        new = [e for e in standing if e["seq"] > entry["seq"] and e not in seen]


def release(archive: str, reason: str) -> ledger.LedgerEntry:
    """End every legal hold of an archive, and return the ledger entry. Retention is not affected.

    The hold file is removed after the line is written. If an object is not held any more, an earlier release, which may
    have been interrupted, is completed and its entry returned.

    Args:
        archive: path or URL of the archive.
        reason: why it no longer has to be kept.

    Raises:
        UsageError: the reason is empty, the archive does not exist, or nothing holds it.
        Corrupt: the ledger is damaged.
        RemoteError: the store still holds the object; run the same command again.
    """
    store, name = _check_reason_and_split_path(archive, reason)
    require_archive(store, name)
    if (
        not urls.is_url(store)
        and not make_listing_row(name, read_archive_facts(store, name)[1], History.of(store)).held
    ):
        raise _NothingHeld(f"{archive} is not under a legal hold.")  # before a ledger is made for it
    with ledger.take_turn(store) as turn:
        _, known = read_archive_facts(store, name)
        identity = get_identifying_fields(known) if isinstance(known, ArchiveFacts) else {}
        history = History.of(store, turn.read())

        def ended(lines: list[ledger.LedgerEntry]) -> ledger.LedgerEntry:
            """Return {"released": the reasons of the holds that end}, for the line.

            Args:
                lines: the entries that the new one will follow.

            Raises:
                _NothingHeld: nothing holds the archive.
            """
            held = make_listing_row(name, known, replace(history, lines=lines)).held
            if not held:
                raise _NothingHeld(f"{urls.redact_url(archive)} is not under a legal hold.")
            return {"released": list(held)}

        try:
            entry = turn.append("release", name, following=ended, reason=reason, **identity)
        except _NothingHeld:
            before = [e for e in history.lines or () if e["archive"] == name and e["event"] == "release"]
            if not before or not urls.is_url(archive):
                raise
            entry = before[-1]
        if name in history.files:
            remove_file(store, sidecar.get_hold_file_name(name))
        if not turn.alone:
            objects.set_legal_hold(archive, on=False)
            _restore_later_holds(archive, turn, entry)
        return entry


def _restore_later_holds(archive: str, turn: ledger.Turn, entry: ledger.LedgerEntry) -> None:
    """Set the legal hold of an object again if the ledger has holds after a release.

    Ending the object's hold for the release may have ended that of the later holds, too.

    Args:
        archive: URL of the archive.
        turn: the open turn at the ledger.
        entry: the line of the release.

    Raises:
        CkpttoolError: the store does not allow it, or the ledger or the hold file cannot be read or written.
    """
    store, name = split_archive_path(archive)
    for later in find_holds_in_ledger(turn.read(), name)[0].values():
        if later["seq"] > entry["seq"]:
            objects.set_legal_hold(archive, on=True)
            _write_hold_file(store, name, turn, later)


class _NothingHeld(UsageError):
    """There is nothing to release."""


def _check_reason_and_split_path(archive: str, reason: str) -> tuple[str, str]:
    """Return (store, file name) of the path or URL of an archive.

    Raises:
        UsageError: it is not named like an archive, or the reason is empty.
    """
    if not reason.strip():
        raise UsageError("A legal hold, and its release, need a reason.", code="CKPT0202")
    return split_archive_path(archive)
