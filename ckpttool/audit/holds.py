"""Legal holds: place and release them.

A hold is a line in the ledger and a file, NAME.hold.json, that `release` removes after its own line. While the file is
there its holds count, whatever the ledger says; where the two disagree, `archive_store.listing` says so.
"""

from __future__ import annotations

from typing import Any

from ..errors import CkpttoolError, UsageError
from ..storage import objects, remote, urls
from . import ledger, sidecar
from .archive import Facts
from .archive_store import (
    History,
    evidence,
    look,
    remove_file,
    require,
    row_of,
    split_path,
)

__all__ = ["hold", "release"]


def hold(archive: str, reason: str) -> dict[str, Any]:
    """Put an archive under a legal hold: in the ledger, in NAME.hold.json next to it and, if the store supports it, on the
    object.

    Returns the entry of the ledger; its `object_lock` says whether the store holds the object, too.

    Raises:
        UsageError: no reason, or no such archive. RemoteError: the store does not allow it; nothing was recorded.
        CkpttoolError: the file cannot be written; the hold is in the ledger.
    """
    store, name = _placed(archive, reason)
    require(store, name)
    _, known = look(store, name)
    identity = evidence(known) if isinstance(known, Facts) else {}
    locked = urls.is_url(archive) and objects.legal_hold(archive, on=True)
    entry = ledger.append(store, "hold", name, reason=reason, object_lock=locked, **identity)
    require(store, name)
    with remote.open_source(store) as source:
        held = sidecar.holds(source, name) if sidecar.hold_name(name) in source.list() else []
    held = [h for h in held if h["reason"] != reason]
    held.append({**entry, "since": entry["time"]})
    try:
        sidecar.put(store, sidecar.hold_name(name), sidecar.encode_holds(name, held))
    except CkpttoolError as e:
        raise type(e)(
            f"{e} {name} is held by line {entry['seq']} of the ledger, but the hold would be lost with the ledger. Run the same "
            "command again to write both."
        ) from e
    return entry


def release(archive: str, reason: str) -> dict[str, Any]:
    """End every legal hold of an archive; `reason` says why. Retention is not affected. The hold file is removed after the line is written.

    Raises:
        UsageError: no reason, no such archive, or nothing holds it. RemoteError: the store still holds the object; run
            the same command again.
    """
    store, name = _placed(archive, reason)
    require(store, name)
    _, known = look(store, name)
    identity = evidence(known) if isinstance(known, Facts) else {}
    history = History.of(store)
    held = row_of(name, known, history).held
    before = [e for e in history.lines or () if e["archive"] == name and e["event"] == "release"]
    if held:
        entry = ledger.append(store, "release", name, reason=reason, released=list(held), **identity)
    elif before and urls.is_url(archive):
        entry = before[-1]
    else:
        raise UsageError(f"{urls.redact_url(archive)} is not under a legal hold.")
    if name in history.files:
        remove_file(store, sidecar.hold_name(name))
    if urls.is_url(archive):
        objects.legal_hold(archive, on=False)
    return entry


def _placed(archive: str, reason: str) -> tuple[str, str]:
    if not reason.strip():
        raise UsageError("A legal hold, and its release, need a reason.")
    return split_path(archive)
