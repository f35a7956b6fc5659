"""A store of archives, in a folder or below a URL: what lies in it, until when, what holds it, and what may go.

What is known of an archive is what it says itself, what the ledger says of it, and the file of holds beside it. Of two
retentions the longer one counts, and a legal hold stands until the ledger has its release, so that an archive put in
the place of another does not shorten what was promised. An event is of an archive if it names its file, or its manifest
and the time of its export; so a file that was renamed keeps its holds.

A hold is a line in the ledger and a file, NAME.hold.json, that `release` removes after its own line. While the file is
there its holds count, whatever the ledger says; where the two disagree, `listing` says so.

Deletion is the exception and must be earned: policies say what is kept, and what none of them keeps goes only if it is
a sound archive with a date, not in the future, under no retention and no hold, and the one that the ledger has under
its name: an archive of which the ledger knows nothing may have been under a hold in a ledger that was lost. The ledger
has the deletion before it is done. A hold that came between is seen there and wins."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from ..engine.fill import silent
from ..errors import CkpttoolError, Corrupt, DestinationExists, Differs, RemoteError, UsageError
from ..storage import remote, upload, urls
from ..storage.source import Source
from . import ledger, sidecar
from .archive import ENCRYPTED, SUFFIX, Facts, facts
from .retention import stamp, time_of

__all__ = ["Pruned", "Row", "add", "disagreements", "evidence", "hold", "listing", "prune", "refuse_protected", "release"]  # fmt: skip


@dataclass(frozen=True)
class Row:
    """An archive of a store.

    `retain_until` and `held` are those that count: of the archive and of the ledger. `verified` is when the ledger last
    has it found sound. `damaged` says why a file is no sound archive, and then there are no facts. `ledger` is how the
    archive stands to the ledger: "match", "differs", "renamed" or "unknown" (see `ledger.Match`), "missing" where the
    store has no ledger, None where the archive is damaged. `warnings` are sentences on what does not fit together.
    """

    name: str
    facts: Facts | None
    retain_until: str | None
    held: tuple[str, ...]
    verified: str | None
    damaged: str | None
    ledger: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pruned:
    """What `prune` did, or would do: archives by name, and why each was kept or refused.

    Refused is what no policy keeps but something else forbids to delete, and whatever cannot be judged.
    """

    deleted: tuple[str, ...] = ()
    kept: dict[str, tuple[str, ...]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    freed: int = 0


def evidence(known: Facts) -> dict[str, Any]:
    """What an event of the ledger says of the archive it is about."""
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
    history = _History.of(store)
    return sorted((_row(name, _look(store, name)[1], history) for name in _names(store)), key=_order)


@dataclass
class _History:
    """What is written beside the archives of a store: the ledger, None where there is none, and the files of holds."""

    lines: list[dict[str, Any]] | None
    files: dict[str, list[dict[str, Any]]]  # {archive: holds}, as events
    recorded: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, store: str) -> _History:
        if not urls.is_url(store) and not os.path.isdir(store):
            raise UsageError(f"{store} is not a folder; a store is a folder with archives, or the URL of one.")
        lines = ledger.read_or_none(store)
        with remote.open_source(store) as source:
            beside = [n.removesuffix(sidecar.HOLD) for n in source.list() if n.endswith(sidecar.HOLD)]
            return cls(lines, {n: _held_by_file(source, n) for n in beside}, ledger.records(lines or []))

    def events(self, name: str) -> Iterable[dict[str, Any]]:
        """All that may concern an archive. The file beside it is last: a release in the ledger does not end its holds."""
        others = (e for n, held in self.files.items() if n != name for e in held)
        return (*others, *(self.lines or ()), *self.files.get(name, ()))


def _held_by_file(source: Source, name: str) -> list[dict[str, Any]]:
    return [{"event": "hold", "archive": name, **h} for h in sidecar.holds(source, name)]


def _order(row: Row) -> tuple[Any, ...]:
    made = _made(row.facts) if row.facts else None
    step = row.facts.step if row.facts and row.facts.step is not None else -1
    return row.damaged is not None, made is None, -made.timestamp() if made else 0.0, -step, _backwards(row.name)


def _backwards(name: str) -> tuple[int, ...]:
    return (*(-ord(c) for c in name), 1)


def _names(store: str) -> list[str]:
    with remote.open_source(store) as source:
        return [n for n in source.list() if n.endswith((SUFFIX, ENCRYPTED))]


def _look(store: str, name: str) -> tuple[Source, Facts | str]:
    """A source that has seen this archive alone, and the facts, or what is wrong with it."""
    with remote.open_source(store) as source:
        try:
            return source, facts(source, name)
        except RemoteError:
            raise
        except CkpttoolError as e:
            return source, str(e)


def _row(name: str, found: Facts | str, history: _History) -> Row:
    known, damaged = (None, found) if isinstance(found, str) else (found, None)
    standing = _Standing.of(name, known, history.events(name))
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
    """In what the ledger and the file of holds beside an archive differ, as sentences; [] where there is no ledger.

    Args:
        lines: of the ledger; None where there is none.
        held: what the file says.
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
        why = f"ended it in line {ended[reason]}" if reason in ended else "has no such hold"
        out.append(f"{beside} holds it ({reason}), the ledger {why}. The hold counts until `ckpttool audit release`")
    for reason in (r for r in by_ledger if r not in by_file):
        out.append(
            f"line {by_ledger[reason]} of the ledger holds it ({reason}), {beside} does not. The hold counts, but would be "
            "lost with the ledger: `ckpttool audit hold` writes the file again"
        )
    return out


def _made(known: Facts) -> datetime | None:
    try:
        return time_of(known.created)
    except ValueError:
        return None


# ------------------------------------------------------------------------------------------------- what the ledger says


@dataclass
class _Standing:
    """What counts for an archive after all that happened."""

    retain_until: str | None = None
    holds: dict[str, None] = field(default_factory=dict)  # reasons, in order
    verified: str | None = None
    deleted: bool = False
    lifted: set[str] = field(default_factory=set)  # reasons that this very archive was released from

    @classmethod
    def of(cls, name: str, known: Facts | None, events: Iterable[dict[str, Any]]) -> _Standing:
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


# --------------------------------------------------------------------------------------------------------------- holds


def hold(archive: str, reason: str) -> dict[str, Any]:
    """Put an archive under a legal hold: in the ledger, in NAME.hold.json beside it and, where the store has such a
    thing, on the object.

    Returns the entry of the ledger; its `object_lock` says whether the store holds it too.

    Raises:
        UsageError: no reason, or no such archive. RemoteError: the store does not allow it; the ledger has nothing.
        CkpttoolError: the file cannot be written; the ledger has the hold.
    """
    store, name = _placed(archive, reason)
    _there(store, name)
    _, known = _look(store, name)
    said = evidence(known) if isinstance(known, Facts) else {}
    locked = urls.is_url(archive) and upload.legal_hold(archive, True)
    entry = ledger.append(store, "hold", name, reason=reason, object_lock=locked, **said)
    _there(store, name)
    with remote.open_source(store) as source:
        held = sidecar.holds(source, name) if sidecar.hold_name(name) in source.list() else []
    held = [h for h in held if h["reason"] != reason]
    held.append({**entry, "since": entry["time"]})
    try:
        sidecar.put(store, sidecar.hold_name(name), sidecar.encode_holds(name, held))
    except CkpttoolError as e:
        raise type(e)(
            f"{e} {name} is held by line {entry['seq']} of the ledger, but the hold would be lost with the ledger. The same "
            "command writes both again."
        ) from e
    return entry


def release(archive: str, reason: str) -> dict[str, Any]:
    """End every legal hold of an archive; `reason` says why. Retention goes on. The file of holds goes after the line.

    Raises:
        UsageError: no reason, no such archive, or nothing holds it. RemoteError: the store still holds the object; the
            same command again asks it again.
    """
    store, name = _placed(archive, reason)
    _there(store, name)
    _, known = _look(store, name)
    said = evidence(known) if isinstance(known, Facts) else {}
    history = _History.of(store)
    held = _row(name, known, history).held
    before = [e for e in history.lines or () if e["archive"] == name and e["event"] == "release"]
    if held:
        entry = ledger.append(store, "release", name, reason=reason, released=list(held), **said)
    elif before and urls.is_url(archive):
        entry = before[-1]
    else:
        raise UsageError(f"{urls.redact_url(archive)} is under no legal hold.")
    if name in history.files:
        _remove(store, sidecar.hold_name(name))
    if urls.is_url(archive):
        upload.legal_hold(archive, False)
    return entry


def add(archive: str) -> dict[str, Any]:
    """Record an archive that lies in a store and that the ledger does not know; returns its line.

    It may have been copied there, or its export was stopped before its line. The structure is checked, no data.

    Raises:
        UsageError: there is no such archive. Corrupt: it is damaged. Differs: another one is recorded under its name.
    """
    store, name = _named(archive)
    _there(store, name)
    source, known = _look(store, name)
    if isinstance(known, str):
        raise Corrupt(f"{urls.redact_url(archive)} is not a sound archive: {known}")
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
        raise Differs(f"{urls.redact_url(archive)}: {found.says} Give it another name, and it can be recorded.")
    entry = ledger.append(store, "add", name, **facts)
    source.assert_unchanged()
    return entry


def _placed(archive: str, reason: str) -> tuple[str, str]:
    if not reason.strip():
        raise UsageError("A legal hold, and its release, need a reason.")
    return _named(archive)


def _named(archive: str) -> tuple[str, str]:
    store, name = urls.split(archive) if urls.is_url(archive) else os.path.split(os.path.abspath(archive))
    if not name.endswith((SUFFIX, ENCRYPTED)):
        raise UsageError(f"{urls.redact_url(archive)} is not named like an archive ({SUFFIX}, {ENCRYPTED}).")
    return store, name


def _there(store: str, name: str) -> None:
    with remote.open_source(store) as source:
        if not source.exists(name):
            raise UsageError(f"{source.root}/{name}: this archive does not exist.")


# --------------------------------------------------------------------------------------------------------------- prune


def prune(
    store: str,
    *,
    keep_last: int | None = None,
    keep_within: timedelta | None = None,
    keep_every: int | None = None,
    dry_run: bool = False,
    no_ledger: bool = False,
    now: datetime | None = None,
) -> Pruned:
    """Delete the archives that no policy keeps and nothing protects.

    Args:
        keep_last: keep the newest so many of every run (`--meta run=` of the export; those without are a run too).
        keep_within: keep those exported in the time before `now`.
        keep_every: keep those of training steps that are multiples of it.
        dry_run: touch nothing, not even the ledger.
        no_ledger: delete also what no ledger knows, and where there is no ledger; holds that are known still count.
        now: the time; that of the clock if not given.

    Raises:
        UsageError: no policy is given, or one that makes no sense. Corrupt: the ledger is damaged, or archives lie there and
            there is none; nothing was deleted.
    """
    if keep_last is None and keep_within is None and keep_every is None:
        raise UsageError("Say what to keep: --keep-last N, --keep-within 90d or --keep-every STEPS; or several.")
    if any(n is not None and n < 1 for n in (keep_last, keep_every)) or (
        keep_within is not None and keep_within <= timedelta(0)
    ):
        raise UsageError("--keep-last, --keep-within and --keep-every keep something; they must be more than nothing.")
    now = (now or datetime.now(UTC)).astimezone(UTC)
    history = _History.of(store)
    names = _names(store)
    if names and history.lines is None and not no_ledger:
        raise Corrupt(
            f"{urls.redact_url(store)} holds {_counted(len(names), 'archive')} and no {ledger.FILE}. The ledger knows which are "
            "under a legal hold; without it one that is could be deleted. Bring the ledger back; or give --no-ledger if "
            "there never was one, or nothing was held."
        )
    seen = {name: _look(store, name) for name in names}
    rows = sorted((_row(name, known, history) for name, (_, known) in seen.items()), key=_order)
    kept: dict[str, tuple[str, ...]] = {}
    refused: dict[str, str] = {}
    going: list[Row] = []
    ranks: dict[str, int] = {}
    for row in rows:
        why = _not_judged(row, now)
        if why or row.facts is None:
            refused[row.name] = why
            continue
        run = row.facts.meta.get("run", "")
        ranks[run] = rank = ranks.get(run, 0) + 1
        reasons = _policies(row.facts, rank, now, keep_last, keep_within, keep_every)
        if reasons:
            kept[row.name] = reasons
        elif why := _protected(row, now) or _unrecorded(row, no_ledger):
            refused[row.name] = why
        else:
            going.append(row)
    gone: list[Row] = []
    for row in going:
        why = "" if dry_run else _delete(store, row, seen[row.name][0], history, now)
        if why:
            refused[row.name] = why
        else:
            gone.append(row)
    return Pruned(tuple(r.name for r in gone), kept, refused, sum(r.facts.bytes for r in gone if r.facts))


def _not_judged(row: Row, now: datetime) -> str:
    """Why nothing can be said of an archive, or ""."""
    if row.facts is None:
        return f"it is not a sound archive: {row.damaged}"
    made = _made(row.facts)
    if made is None:
        return "it has no date (it was exported with --reproducible)" if not row.facts.created else "its date is none"
    if made > now:
        return f"it was exported in the future, at {row.facts.created}; it is {stamp(now)}"
    return ""


def _policies(
    known: Facts, rank: int, now: datetime, last: int | None, within: timedelta | None, every: int | None
) -> tuple[str, ...]:
    made = _made(known)
    out: list[str] = []
    if last is not None and rank <= last:
        out.append(f"one of the last {last}" + (f" of run {known.meta['run']}" if "run" in known.meta else ""))
    if within is not None and made is not None and now - made <= within:
        out.append(f"exported within {_age(within)}")
    if every is not None and known.step is not None and known.step % every == 0:
        out.append(f"step {known.step} is a multiple of {every}")
    return tuple(out)


def _age(within: timedelta) -> str:
    """As people say it: "90 days", "12 hours", "1 day"."""
    hours, rest = divmod(int(within.total_seconds()), 3600)
    if rest or not hours:
        return _counted(int(within.total_seconds()), "second")
    return _counted(hours // 24, "day") if hours % 24 == 0 else _counted(hours, "hour")


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def _unrecorded(row: Row, no_ledger: bool) -> str:
    """Why an archive is not known well enough to be deleted, or ""."""
    if row.ledger == "differs":
        return row.warnings[0].rstrip(".")
    if row.ledger == "unknown" and not no_ledger:
        return (
            f"{row.warnings[0]}, so a hold may be known elsewhere. `ckpttool audit ledger add` records it; --no-ledger "
            "deletes it as it is"
        )
    return ""


def refuse_protected(archive: str) -> None:
    """Refuse to replace an archive that is under retention or a legal hold.

    Raises:
        DestinationExists: it is, or it cannot be told that it is not. Corrupt: the ledger is damaged.
    """
    store, name = urls.split(archive) if urls.is_url(archive) else os.path.split(os.path.abspath(archive))
    with remote.open_source(store) as source:
        if not source.exists(name):
            return
    row = _row(name, _look(store, name)[1], _History.of(store))
    why = f"it is not a sound archive: {row.damaged}" if row.facts is None else _protected(row, datetime.now(UTC))
    if why:
        raise DestinationExists(f"{urls.redact_url(archive)} is not replaced, --force or not: {why}.")


def _protected(row: Row, now: datetime) -> str:
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


def _delete(store: str, row: Row, source: Source, history: _History, now: datetime) -> str:
    """Delete an archive; why it was not, or "". The ledger, of which `history` is known, has it first."""
    assert row.facts is not None
    entry = ledger.append(store, "delete", row.name, **evidence(row.facts))
    lines = history.lines or []
    if entry["prev"] == (lines[-1]["hash"] if lines else ledger.FIRST):
        lines.append(entry)
    else:  # what others wrote since we looked counts as well
        lines = ledger.read(store)
    history.lines = lines
    with remote.open_source(store) as fresh:
        files = dict(history.files)
        if fresh.exists(sidecar.hold_name(row.name)):
            files[row.name] = _held_by_file(fresh, row.name)
    before = _History([e for e in lines if e["seq"] < entry["seq"]], files, history.recorded)
    why = _protected(_row(row.name, row.facts, before), now)
    if not why:
        lost = row.name
        try:
            source.assert_unchanged()
            _remove(store, row.name)
            if row.name.endswith(ENCRYPTED):
                lost = sidecar.name(row.name)
                _remove(store, lost)
        except CkpttoolError as e:
            why = str(e) if lost == row.name else f"it is deleted, but {lost} is not: {e}"
    if why:
        ledger.append(store, "delete-failed", row.name, why=why, **evidence(row.facts))
    return why


def _remove(store: str, name: str) -> None:
    if urls.is_url(store):
        upload.remove(f"{store.rstrip('/')}/{name}")
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
        raise CkpttoolError(f"{os.path.join(store, name)}: {e.strerror}.") from None
