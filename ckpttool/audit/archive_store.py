"""A store of archives, in a folder or below a URL: what is in it, until when it must be kept, and what holds it.

An archive's own records, the ledger and the hold file next to the archive all count. Of two retentions the longer one
counts, and a legal hold lasts until the ledger records its release, so replacing an archive cannot shorten what was
promised. A ledger event applies to an archive when it names the archive's file, or its manifest hash and export time; so an
archive that was renamed keeps its holds.

`holds` places and ends legal holds, `pruning` deletes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from ..engine.fill import silent
from ..errors import (
    CkpttoolError,
    Corrupt,
    DestinationExists,
    Differs,
    RemoteError,
    UsageError,
    argument,
    kind_of_failure,
)
from ..storage import objects, remote, urls
from ..storage.source import Source
from . import ledger, sidecar
from .archive import ENCRYPTED, SUFFIX, Facts, facts
from .retention import time_of

__all__ = [
    "History",
    "Row",
    "add",
    "archive_names",
    "created_at",
    "disagreements",
    "evidence",
    "holds_in_file",
    "listing",
    "look",
    "order",
    "refuse_protected",
    "remove_file",
    "require",
    "row_of",
    "split_path",
    "why_protected",
]


@dataclass(frozen=True)
class Row:
    """An archive of a store.

    `retain_until` and `held` combine the archive's own records and the ledger. `verified` is when the ledger last recorded a
    successful verification. `damaged` says why a file is not a valid archive; then there are no facts. `ledger` is "match",
    "differs", "renamed" or "unknown" (see `ledger.Match`), "missing" if the store has no ledger, None if the archive is
    damaged. `warnings` are sentences about contradictions.
    """

    name: str
    facts: Facts | None
    retain_until: str | None
    held: tuple[str, ...]
    verified: str | None
    damaged: str | None
    ledger: str | None = None
    warnings: tuple[str, ...] = ()


def evidence(known: Facts) -> dict[str, Any]:
    """The fields of a ledger event that identify its archive."""
    return {
        "merkle_root": known.merkle_root,
        "manifest_sha256": known.manifest_sha256,
        "bytes": known.bytes,
        "created": known.created,
    }


def listing(store: str) -> list[Row]:
    """The archives of a store, the newest first, then those without a date, then what is damaged.

    Raises:
        UsageError: there is no such folder. Corrupt: the ledger is damaged. RemoteError: the store fails.
    """
    history = History.of(store)
    return sorted((row_of(name, look(store, name)[1], history) for name in archive_names(store)), key=order)


@dataclass
class History:
    """What a store records next to its archives: the ledger (None: there is none) and the hold files."""

    lines: list[dict[str, Any]] | None
    files: dict[str, list[dict[str, Any]]]  # {archive: holds}, as events
    recorded: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, store: str) -> History:
        if not urls.is_url(store) and not os.path.isdir(store):
            raise UsageError(f"{store} is not a folder; a store is a folder with archives, or the URL of one.")
        lines = ledger.read_or_none(store)
        with remote.open_source(store) as source:
            beside = [n.removesuffix(sidecar.HOLD) for n in source.list() if n.endswith(sidecar.HOLD)]
            return cls(lines, {n: holds_in_file(source, n) for n in beside}, ledger.records(lines or []))

    def events(self, name: str) -> Iterable[dict[str, Any]]:
        """All events that may apply to an archive. Its hold file comes last: a release in the ledger does not end these holds."""
        others = (e for n, held in self.files.items() if n != name for e in held)
        return (*others, *(self.lines or ()), *self.files.get(name, ()))


def holds_in_file(source: Source, name: str) -> list[dict[str, Any]]:
    """The holds in the file next to an archive, as ledger events."""
    return [{"event": "hold", "archive": name, **h} for h in sidecar.holds(source, name)]


def order(row: Row) -> tuple[Any, ...]:
    """The sort key of a listing: the newest first, then those without a date, then the damaged ones."""
    made = created_at(row.facts) if row.facts else None
    step = row.facts.step if row.facts and row.facts.step is not None else -1
    return row.damaged is not None, made is None, -made.timestamp() if made else 0.0, -step, _backwards(row.name)


def _backwards(name: str) -> tuple[int, ...]:
    return (*(-ord(c) for c in name), 1)


def archive_names(store: str) -> list[str]:
    """The files of a store that are named like archives."""
    with remote.open_source(store) as source:
        return [n for n in source.list() if n.endswith((SUFFIX, ENCRYPTED))]


def look(store: str, name: str) -> tuple[Source, Facts | str]:
    """A source that was used for this archive alone, and its facts, or what is wrong with it."""
    with remote.open_source(store) as source:
        try:
            return source, facts(source, name)
        except RemoteError:
            raise
        except CkpttoolError as e:
            return source, str(e)


def row_of(name: str, found: Facts | str, history: History) -> Row:
    """What is known of an archive from all records together; `found` as `look` returned it."""
    known, damaged = (None, found) if isinstance(found, str) else (found, None)
    standing = Standing.of(name, known, history.events(name))
    state, warnings = None, disagreements(name, history.lines, history.files.get(name, []))
    if known is not None and history.lines is None:
        state = "missing"
    elif known is not None:
        found_there = ledger.match(history.recorded, name, asdict(known))
        state = found_there.state
        if state != "match":
            warnings.insert(0, found_there.says)
    verified = None if state == "differs" else standing.verified
    return Row(name, known, standing.retain_until, tuple(standing.holds), verified, damaged, state, tuple(warnings))


def disagreements(name: str, lines: list[dict[str, Any]] | None, held: list[dict[str, Any]] | None = None) -> list[str]:
    """How the ledger and the hold file of an archive differ, as sentences; [] if there is no ledger.

    Args:
        lines: of the ledger; None if there is none.
        held: the holds in the file.
    """
    if lines is None:
        return []
    by_ledger: dict[str, int] = {}
    ended: dict[str, int] = {}
    for e in (e for e in lines if e["archive"] == name):
        if e["event"] == "hold":
            by_ledger[str(e.get("reason"))] = e["seq"]
        elif e["event"] in ("release", "delete"):
            ended |= dict.fromkeys(by_ledger, e["seq"])
            by_ledger = {}
    by_file = {str(h.get("reason")) for h in held or ()}
    beside, out = sidecar.hold_name(name), []
    for reason in sorted(by_file - by_ledger.keys()):
        why = f"ended it in line {ended[reason]}" if reason in ended else "does not record it"
        out.append(
            f"{beside} holds it ({reason}), but the ledger {why}. The hold counts until `ckpttool audit release`"
        )
    for reason in (r for r in by_ledger if r not in by_file):
        out.append(
            f"line {by_ledger[reason]} of the ledger holds it ({reason}), but {beside} does not. The hold counts, but would be "
            "lost with the ledger: `ckpttool audit hold` writes the file again"
        )
    return out


def created_at(known: Facts) -> datetime | None:
    """When an archive was exported; None if it does not say."""
    try:
        return time_of(known.created)
    except ValueError:
        return None


# ------------------------------------------------------------------------------------------------- what the ledger says


@dataclass
class Standing:
    """The state of an archive after all events."""

    retain_until: str | None = None
    holds: dict[str, None] = field(default_factory=dict)  # reasons, in order
    verified: str | None = None
    deleted: bool = False
    lifted: set[str] = field(default_factory=set)  # reasons that this very archive was released from

    @classmethod
    def of(cls, name: str, known: Facts | None, events: Iterable[dict[str, Any]]) -> Standing:
        it = cls()
        for e in events:
            own = e["archive"] == name or (known is not None and bool(known.created) and _about(e, known))
            if own:
                it._take(e, known)
            elif known is not None and e.get("manifest_sha256") == known.manifest_sha256:
                it._protect(e)  # the same state under another name or date: too much is kept rather than too little
        if known is not None:
            it._keep(known.retain_until)
            if known.legal_hold and known.legal_hold not in it.lifted:
                it.holds = {known.legal_hold: None, **it.holds}
        return it

    def _take(self, e: dict[str, Any], known: Facts | None) -> None:
        what = e["event"]
        if what == "add":
            self._protect(e)
        elif what == "export":
            if self.deleted:  # the name is used again
                self.retain_until, self.holds, self.verified, self.deleted = None, {}, None, False
            self._protect(e)
        elif what == "hold":
            self._protect(e)
            self.lifted.discard(str(e.get("reason")))
        elif what == "release":
            released = e.get("released")
            if known is not None and _about(e, known) and isinstance(released, list):
                self.lifted |= set(map(str, released))
            self.holds = {}
        elif what == "verify":
            if e.get("sound") is True and (known is None or _about(e, known)):
                self.verified = e["time"]
        elif what in ("delete", "delete-failed"):
            self.deleted = what == "delete"

    def _protect(self, e: dict[str, Any]) -> None:
        """Retention and holds of an event."""
        if e["event"] in ("export", "add"):
            self._keep(e.get("retain_until"))
            if e.get("legal_hold"):
                self.holds[str(e["legal_hold"])] = None
        elif e["event"] == "hold":
            self.holds[str(e.get("reason"))] = None

    def _keep(self, until: Any) -> None:
        if isinstance(until, str) and (self.retain_until is None or until > self.retain_until):
            self.retain_until = until


def _about(e: dict[str, Any], known: Facts) -> bool:
    return e.get("manifest_sha256") == known.manifest_sha256 and e.get("created") == known.created


def add(archive: str) -> dict[str, Any]:
    """Record an archive of a store that its ledger does not know; returns the new line.

    It may have been copied there, or its export was killed before it wrote its line. The structure is checked, no data.

    Raises:
        UsageError: there is no such archive. Corrupt: it is damaged. Differs: another one is recorded under its name.
    """
    store, name = split_path(archive)
    require(store, name)
    source, known = look(store, name)
    if isinstance(known, str):
        raise Corrupt(f"{urls.redact_url(archive)} is not a valid archive: {known}")
    recorded = ledger.records(ledger.read(store))
    facts = {k: v for k, v in asdict(known).items() if k != "name"}
    if name.endswith(ENCRYPTED):
        with remote.open_source(store) as fresh:
            want = sidecar.read(fresh, name)["ciphertext"]
            have = sidecar.ciphertext(fresh, name, silent)
        if have != want:
            raise Corrupt(
                f"{urls.redact_url(archive)}: the ciphertext is not the one that {sidecar.name(name)} describes."
            )
        facts["ciphertext_sha256"] = have["sha256"]
    found = ledger.match(recorded, name, facts)
    if found.state == "match":
        return recorded[name]
    if found.state == "differs":
        raise Differs(f"{urls.redact_url(archive)}: {found.says} To record this one, give it another name.")
    entry = ledger.append(store, "add", name, **facts)
    source.assert_unchanged()
    return entry


def split_path(archive: str) -> tuple[str, str]:
    """(store, name) of the path or URL of an archive.

    Raises:
        UsageError: it is not named like one.
    """
    store, name = urls.split(archive) if urls.is_url(archive) else os.path.split(os.path.abspath(archive))
    if not name.endswith((SUFFIX, ENCRYPTED)):
        raise UsageError(f"{urls.redact_url(archive)} is not named like an archive ({SUFFIX}, {ENCRYPTED}).")
    return store, name


def require(store: str, name: str) -> None:
    """Raise UsageError unless the archive exists."""
    with remote.open_source(store) as source:
        if not source.exists(name):
            raise UsageError(f"{source.root}/{name}: this archive does not exist.")


def refuse_protected(archive: str) -> None:
    """Refuse to replace an archive that is under retention or a legal hold.

    Raises:
        DestinationExists: it is protected, or damaged, so that this cannot be known. Corrupt: the ledger is damaged.
    """
    store, name = urls.split(archive) if urls.is_url(archive) else os.path.split(os.path.abspath(archive))
    with remote.open_source(store) as source:
        if not source.exists(name):
            return
    row = row_of(name, look(store, name)[1], History.of(store))
    why = f"it is not a valid archive: {row.damaged}" if row.facts is None else why_protected(row, datetime.now(UTC))
    if why:
        raise DestinationExists(
            f"{urls.redact_url(archive)} is not replaced, not even with {argument('force', True)}: {why}."
        )


def why_protected(row: Row, now: datetime) -> str:
    """Why an archive must not be deleted, or ""."""
    if row.held:
        return "under legal hold: " + "; ".join(row.held)
    if row.retain_until is not None:
        try:
            if time_of(row.retain_until) > now:
                return f"under retention until {row.retain_until}"
        except ValueError:
            return f"its retention is not a time: {row.retain_until[:40]!r}"
    return ""


def remove_file(store: str, name: str) -> None:
    """Delete a file of a store, durably; one that is already gone is fine."""
    if urls.is_url(store):
        objects.remove(f"{store.rstrip('/')}/{name}")
        return
    try:
        os.unlink(os.path.join(store, name))
        folder = os.open(store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except FileNotFoundError:
        pass  # gone is gone
    except OSError as e:
        raise kind_of_failure(e)(f"{os.path.join(store, name)}: {e.strerror}.") from None
