"""A store of archives, in a folder or below a URL: what is in it, until when it must be kept, and what holds it.

An archive's own records, the ledger and the hold file next to the archive all count. Of two retentions the longer one
counts, and a legal hold lasts until the ledger records its release, so replacing an archive cannot shorten what was
promised. A ledger event applies to an archive when it names the archive's file, or its manifest hash and export time;
so an archive that was renamed keeps its holds. A release applies to the archive that it names, and to one that had this
name before somebody renamed it; never to another copy.

`holds` places and ends legal holds, `pruning` deletes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property

from ..engine.copy.fill import silent
from ..errors import (
    CkpttoolError,
    Corrupt,
    DestinationExists,
    Differs,
    Locked,
    RemoteError,
    UsageError,
    argument,
    kind_of_failure,
)
from ..storage import objects, urls
from ..storage.listings import list_tree
from ..storage.local_file import sync_folder
from ..storage.remote import filesystem_for
from ..storage.retries import Denied, NotFound
from ..storage.source import Source
from ..storage.sources import open_source
from . import ledger, sidecar
from .archive import ENCRYPTED, SUFFIX, ArchiveFacts, read_facts
from .retention import parse_time

__all__ = [
    "History",
    "ListingRow",
    "add_to_ledger",
    "describe_unfinished_change",
    "explain_protection",
    "find_hold_disagreements",
    "find_holds_in_ledger",
    "get_export_time",
    "get_identifying_fields",
    "get_listing_sort_key",
    "list_archive_names",
    "list_archives",
    "list_missing_archives",
    "make_listing_row",
    "read_archive_facts",
    "read_hold_events",
    "refuse_protected",
    "remove_file",
    "replacing",
    "require_archive",
    "split_archive_path",
]


@dataclass(frozen=True)
class ListingRow:
    """An archive of a store, or one that should be there and is `missing`.

    `retain_until` and `held` combine the archive's own records and the ledger. `verified` is when the ledger last
    recorded a successful verification. `damaged` says why a file is not a valid archive; then there are no facts.
    `ledger` is "match", "differs", "renamed" or "unknown" (see `ledger.Match`), "missing" if the store has no ledger,
    None if the archive is damaged or missing. `warnings` are sentences about contradictions.
    """

    name: str
    facts: ArchiveFacts | None
    retain_until: str | None
    held: tuple[str, ...]
    verified: str | None
    damaged: str | None
    ledger: str | None = None
    warnings: tuple[str, ...] = ()
    missing: bool = False


def get_identifying_fields(known: ArchiveFacts) -> ledger.LedgerEntry:
    """Return the fields by which a ledger event identifies an archive: "merkle_root", "manifest_sha256", "bytes",
    "created"."""
    return {
        "merkle_root": known.merkle_root,
        "manifest_sha256": known.manifest_sha256,
        "bytes": known.bytes,
        "created": known.created,
    }


def list_archives(store: str) -> list[ListingRow]:
    """List the archives of a store, the newest first, then those without a date, then what is missing, then what is
    damaged.

    Raises:
        UsageError: there is no such folder. Corrupt: the ledger is damaged. RemoteError: the store fails.
    """
    history = History.of(store)
    rows = [make_listing_row(name, read_archive_facts(store, name)[1], history) for name in list_archive_names(store)]
    return sorted(
        [*rows, *_make_missing_rows(store, history, {r.name: r.facts for r in rows})], key=get_listing_sort_key
    )


def list_missing_archives(store: str) -> list[ListingRow]:
    """List the archives that should be in a store but are not, under any name.

    These are the ones that the ledger or a hold file names and that no ledger line deletes. Only archives that the
    ledger does not record under their names, or that were added to it, are opened: they may be renamed ones.

    Raises:
        UsageError: the folder does not exist.
        Corrupt: the ledger is damaged.
        RemoteError: the store fails.
    """
    history = History.of(store)
    found = {
        n: read_archive_facts(store, n)[1] if history.may_be_renamed(n) else None for n in list_archive_names(store)
    }
    return _make_missing_rows(store, history, {n: f if isinstance(f, ArchiveFacts) else None for n, f in found.items()})


def _make_missing_rows(store: str, history: History, there: Mapping[str, ArchiveFacts | None]) -> list[ListingRow]:
    """Return a listing row for each archive that the records of a store name and that the store has under no name.

    Args:
        history: the records: ledger and hold files.
        there: {file name: facts, or None if they were not read} of the archives in the store.
    """
    with open_source(store) as source:  # a folder, or a link that leads nowhere, is no archive, whatever its name
        source.list()  # so that a store is not asked for each
        there = {n: f for n, f in there.items() if f is not None or source.exists(n)}
    gone = {n: line for n, line in _find_expected_archives(history).items() if n not in there}
    if gone:  # a deletion since the ledger was read is in it now
        gone = {n: line for n, line in gone.items() if n in _find_expected_archives(History.of(store))}
    others = {n: f for n, f in there.items() if f is not None and history.may_be_renamed(n)}  # perhaps several times
    return [
        _make_missing_row(name, line, history)
        for name, line in gone.items()
        if not any(_is_about_archive(line, f) for f in others.values())
    ]


def _find_expected_archives(history: History) -> dict[str, ledger.LedgerEntry]:
    """Return {archive: the ledger line or hold that names it} of the archives that are recorded or on hold and that no
    ledger line deletes."""
    lines = history.lines or []
    out: dict[str, ledger.LedgerEntry] = {}
    for e in lines:
        name = e["archive"]
        if e["event"] in ("export", "add", "delete-failed"):
            out[name] = history.recorded.get(name, e)
        elif e["event"] == "hold":
            out.setdefault(name, e)
        elif e["event"] == "delete" or (e["event"] == "deleted" and name in out and out[name]["seq"] < _get_begin(e)):
            out.pop(name, None)
    out = {n: e for n, e in out.items() if n in history.recorded or find_holds_in_ledger(history.by_name[n], n)[0]}
    return dict(sorted(({n: held[0] for n, held in history.files.items()} | out).items()))


def _make_missing_row(name: str, line: Mapping[str, object], history: History) -> ListingRow:
    """Return the listing row of a missing archive; `line` is the ledger line, or the hold, that names it."""
    standing = RetentionStatus.of(name, None, history)
    row = ListingRow(name, None, standing.retain_until, tuple(standing.holds), standing.verified, None, missing=True)
    known = (
        f"Line {line['seq']} of the ledger has it" if "seq" in line else f"{sidecar.get_hold_file_name(name)} holds it"
    )
    why = explain_protection(row, datetime.now(UTC))
    text = f"it is missing although it is {why}" if why else "it is missing"
    return replace(row, warnings=(f"{text}. {known}, and ckpttool did not delete it",))


@dataclass
class History:
    """What a store records next to its archives: the ledger (None: there is none) and the hold files; and the names of
    its archives. Its indices are of the lines at their first use, so other lines need another History."""

    lines: list[ledger.LedgerEntry] | None
    files: dict[str, list[ledger.LedgerEntry]]  # {archive: holds}, as events
    recorded: dict[str, ledger.LedgerEntry]
    names: frozenset[str]

    @classmethod
    def of(cls, store: str, lines: list[ledger.LedgerEntry] | None = None) -> History:
        """Read the history of a store.

        Args:
            lines: the entries of its ledger, if they were read already; None: they are read.

        Raises:
            UsageError: there is no such folder. Corrupt: the ledger is damaged. RemoteError, CkpttoolError: the store
                fails.
        """
        ledger.require_store(store)
        lines = ledger.read_entries_or_none(store) if lines is None else lines
        with open_source(store) as source:
            names = source.list()
            held = [n.removesuffix(sidecar.HOLD) for n in names if n.endswith(sidecar.HOLD)]
            files = {n: read_hold_events(source, n) for n in held}
        return cls(lines, files, ledger.find_latest_records(lines or []), frozenset(names))

    @cached_property
    def by_name(self) -> dict[str, list[ledger.LedgerEntry]]:
        """Return {archive: the ledger lines that name it, in order}."""
        return _group_lines(self.lines or (), "archive")

    @cached_property
    def _by_manifest(self) -> dict[str, list[ledger.LedgerEntry]]:
        """Return {manifest hash: the ledger lines that have it, in order}."""
        return _group_lines(self.lines or (), "manifest_sha256")

    def list_events(self, name: str, known: ArchiveFacts | None) -> list[ledger.LedgerEntry]:
        """Return the ledger events and holds that may apply to the archive `name`: those that name it or its state.

        The holds in the files of other archives come first, then the ledger, then the archive's own hold file: a
        release in the ledger does not end the holds of that file.

        Args:
            known: the facts of the archive; None if it is damaged or missing.
        """
        others = [e for n, held in self.files.items() if n != name for e in held]
        own = {e["seq"]: e for e in self.by_name.get(name, ())}
        if known is not None:
            own |= {e["seq"]: e for e in self._by_manifest.get(known.manifest_sha256, ())}
        return [*others, *(own[seq] for seq in sorted(own)), *self.files.get(name, ())]

    def may_be_renamed(self, name: str) -> bool:
        """Return whether an archive may have had another name before: no export was recorded under this one."""
        return self.recorded.get(name, {}).get("event") != "export"

    def find_former_names(self, name: str, known: ArchiveFacts | None) -> set[str]:
        """Return the names that an archive had before somebody renamed it: those under which the ledger records it,
        that no archive of the store has, and whose archive was not deleted.

        Args:
            name: the present name.
            known: the facts of the archive; None, if it is damaged or missing, gives no names.
        """
        if known is None or not known.created or not self.may_be_renamed(name):
            return set()
        lines = self._by_manifest.get(known.manifest_sha256, ())
        own = {e["archive"] for e in lines if e["event"] in ("export", "add") and _is_about_archive(e, known)}
        return {n for n in own - {name} - self.names if not RetentionStatus.of(n, None, self).deleted}


def _group_lines(lines: Iterable[ledger.LedgerEntry], key: str) -> dict[str, list[ledger.LedgerEntry]]:
    """Return {text in the field `key` of a ledger line: the lines with it, in order}; lines without one are left
    out."""
    out: dict[str, list[ledger.LedgerEntry]] = {}
    for e in lines:
        if isinstance(e.get(key), str):
            out.setdefault(e[key], []).append(e)
    return out


def read_hold_events(source: Source, name: str) -> list[ledger.LedgerEntry]:
    """Return the holds in the hold file of the archive `name` as ledger events; that file must exist.

    Raises:
        RemoteError: the store fails.
    """
    return [{"event": "hold", "archive": name, **h} for h in sidecar.read_holds(source, name)]


def get_listing_sort_key(row: ListingRow) -> tuple[object, ...]:
    """Return the sort key of a row: the newest archives come first, then those without a date, then the missing, then
    the damaged ones."""
    made = get_export_time(row.facts) if row.facts else None
    step = row.facts.step if row.facts and row.facts.step is not None else -1
    return (
        row.damaged is not None,
        row.missing,
        made is None,
        -made.timestamp() if made else 0.0,
        -step,
        _make_descending_key(row.name),
    )


def _make_descending_key(name: str) -> tuple[int, ...]:
    """Return a sort key that sorts names from the last to the first."""
    return (*(-ord(c) for c in name), 1)


def list_archive_names(store: str) -> list[str]:
    """Return the names of the files in a store that have the suffix of an archive, `SUFFIX` or `ENCRYPTED`."""
    with open_source(store) as source:
        return [n for n in source.list() if n.endswith((SUFFIX, ENCRYPTED))]


def read_archive_facts(store: str, name: str) -> tuple[Source, ArchiveFacts | str]:
    """Read the facts of an archive, or find out why it is not a valid one.

    Returns:
        (a source that read this archive alone, its facts or a text that says why it is invalid). The source is closed;
        its `assert_unchanged` still works.

    Raises:
        RemoteError: the store fails.
    """
    with open_source(store) as source:
        try:
            return source, read_facts(source, name)
        except RemoteError:
            raise
        except CkpttoolError as e:
            return source, str(e)


def make_listing_row(name: str, found: ArchiveFacts | str, history: History) -> ListingRow:
    """Combine the facts of an archive, the ledger and the hold files into a listing row.

    Args:
        name: the file name of the archive.
        found: its facts, or why it is invalid, as `read_archive_facts` returns them.
        history: the ledger and the hold files of the store.
    """
    known, damaged = (None, found) if isinstance(found, str) else (found, None)
    standing = RetentionStatus.of(name, known, history)
    lines = None if history.lines is None else history.by_name.get(name, [])
    state, warnings = None, find_hold_disagreements(name, lines, history.files.get(name, []))
    if known is not None and history.lines is None:
        state = "missing"
    elif known is not None:
        found_there = ledger.match_archive(history.recorded, name, asdict(known))
        state = found_there.state
        if state != "match":
            warnings.insert(0, found_there.says)
    verified = None if state == "differs" else standing.verified
    return ListingRow(
        name, known, standing.retain_until, tuple(standing.holds), verified, damaged, state, tuple(warnings)
    )


def find_hold_disagreements(
    name: str, lines: list[ledger.LedgerEntry] | None, held: list[ledger.LedgerEntry] | None = None
) -> list[str]:
    """Compare the holds of an archive in the ledger with those in its hold file.

    Args:
        name: the file name of the archive.
        lines: the entries of the ledger; None if there is none.
        held: the holds in the hold file; None if there is none.

    Returns:
        A sentence for each hold that only one of them has; [] if there is no ledger.
    """
    if lines is None:
        return []
    by_ledger, ended = find_holds_in_ledger(lines, name)
    by_file = {str(h.get("reason")) for h in held or ()}
    beside, out = sidecar.get_hold_file_name(name), []
    for reason in sorted(by_file - by_ledger.keys()):
        why = f"ended it in line {ended[reason]}" if reason in ended else "does not record it"
        out.append(
            f"{beside} holds it ({reason}), but the ledger {why}. The hold counts until `ckpttool audit release`"
        )
    for reason in (r for r in by_ledger if r not in by_file):
        out.append(
            f"line {by_ledger[reason]['seq']} of the ledger holds it ({reason}), but {beside} does not. The hold "
            "counts, but would be lost with the ledger: `ckpttool audit hold` writes the file again"
        )
    return out


def find_holds_in_ledger(
    lines: Iterable[ledger.LedgerEntry], name: str
) -> tuple[dict[str, ledger.LedgerEntry], dict[str, int]]:
    """Return the holds on the archive `name` that are in force and that have ended, by the lines of a ledger.

    Returns:
        ({reason: the line that placed the hold} of those in force, {reason: the number of the line that ended it}).
    """
    held: dict[str, ledger.LedgerEntry] = {}
    ended: dict[str, int] = {}
    begun = 0  # the line of the last deletion, which older versions gave no end
    lines = [e for e in lines if e["archive"] == name]
    failed = _find_failed_deletions(lines)
    for e in lines:
        if e["event"] == "hold":
            held[str(e.get("reason"))] = e
            begun = 0  # it was there
        elif e["event"] == "delete" and e["seq"] not in failed:
            begun = e["seq"]
        elif e["event"] == "deleted" or (e["event"] == "export" and begun):
            end = _get_begin(e) if e["event"] == "deleted" else begun
            ended |= {reason: end for reason, placed in held.items() if placed["seq"] < end}
            held, begun = {reason: placed for reason, placed in held.items() if placed["seq"] > end}, 0
        elif e["event"] == "release":
            for reason in _get_released_reasons(e):
                if held.pop(reason, None):
                    ended[reason] = e["seq"]
    return held, ended


def _find_failed_deletions(lines: Iterable[ledger.LedgerEntry]) -> set[int]:
    """Return the numbers of the lines that announced a deletion which, by a later line, failed."""
    last: dict[str, int] = {}
    failed: set[int] = set()
    for e in lines:
        if e["event"] == "delete":
            last[e["archive"]] = e["seq"]
        elif e["event"] == "delete-failed":
            begun = e.get("begun", last.get(e["archive"]))
            failed |= {begun} if type(begun) is int else set()
    return failed


def _get_begin(e: ledger.LedgerEntry) -> int:
    """Return the number of the line that announced the deletion which a "deleted" line ends; its own number in ledgers
    of old, which do not say."""
    begun = e.get("begun", e["seq"])
    return begun if type(begun) is int else int(e["seq"])


def _get_released_reasons(e: ledger.LedgerEntry) -> list[str]:
    """Return the reasons of the holds that a release event ended; [] if it lists none."""
    released = e.get("released")
    return [str(r) for r in released] if isinstance(released, list) else []


def get_export_time(known: ArchiveFacts) -> datetime | None:
    """Return when an archive was exported; None if its records have no time, or one that cannot be read."""
    try:
        return parse_time(known.created)
    except ValueError:
        return None


# ------------------------------------------------------------------------------------------------- what the ledger says


@dataclass
class RetentionStatus:
    """How long an archive must be kept, after all events."""

    retain_until: str | None = None
    holds: dict[str, None] = field(default_factory=dict)  # reasons, in order
    verified: str | None = None
    deleted: bool = False
    lifted: set[str] = field(default_factory=set)  # reasons that this very archive was released from

    @classmethod
    def of(cls, name: str, known: ArchiveFacts | None, history: History) -> RetentionStatus:
        """Apply the events of a store to an archive, and return its retention, holds and last successful verification.

        Args:
            name: the file name of the archive.
            known: its facts; None if it is damaged or missing.
            history: the ledger and the hold files of the store.
        """
        it = cls()
        events = history.list_events(name, known)
        failed = _find_failed_deletions(events)
        former = history.find_former_names(name, known)
        # a former name that a line has after the first one about the present name was that of a copy
        named_at = next((e["seq"] for e in history.by_name.get(name, ())), None)
        for e in events:
            if e["event"] == "delete" and e["seq"] in failed:
                continue
            same = known is not None and bool(known.created) and _is_about_archive(e, known)
            before = e["archive"] in former and (named_at is None or e["seq"] < named_at)
            if e["archive"] == name or (same and (e["event"] == "verify" or before)):
                it._apply(e, known)
            elif known is not None and e.get("manifest_sha256") == known.manifest_sha256:
                it._add_protection(
                    e
                )  # the same state under another name or date: too much is kept rather than too little
        if known is not None:
            it._extend_retention(known.retain_until)
            if known.legal_hold and known.legal_hold not in it.lifted:
                it.holds = {known.legal_hold: None, **it.holds}
        return it

    def _apply(self, e: ledger.LedgerEntry, known: ArchiveFacts | None) -> None:
        """Update the status by an event about this archive itself.

        Args:
            e: the event.
            known: the facts of the archive; None if it is damaged or missing.
        """
        what = e["event"]
        if what == "add":
            self._add_protection(e)
        elif what == "export":
            if self.deleted:  # the name is used again
                self.retain_until, self.holds, self.verified, self.deleted = None, {}, None, False
            self._add_protection(e)
        elif what == "hold":
            self._add_protection(e)
            self.lifted.discard(str(e.get("reason")))
            self.deleted = False  # it was there
        elif what == "release":
            if known is not None and _is_about_archive(e, known):
                self.lifted |= set(_get_released_reasons(e))
            for reason in _get_released_reasons(e):
                self.holds.pop(reason, None)
        elif what == "verify":
            if e.get("sound") is True and (known is None or _is_about_archive(e, known)):
                self.verified = e["time"]
        elif what == "delete":
            self.deleted = True

    def _add_protection(self, e: ledger.LedgerEntry) -> None:
        """Add the retention and the holds that an event records, without ending any."""
        if e["event"] in ("export", "add"):
            self._extend_retention(e.get("retain_until"))
            if e.get("legal_hold"):
                self.holds[str(e["legal_hold"])] = None
        elif e["event"] == "hold":
            self.holds[str(e.get("reason"))] = None

    def _extend_retention(self, until: object) -> None:
        """Extend the retention to the time `until`, if that is a text and later than the present end."""
        if isinstance(until, str) and (self.retain_until is None or until > self.retain_until):
            self.retain_until = until


def _is_about_archive(e: Mapping[str, object], known: ArchiveFacts) -> bool:
    """Return whether an event names the manifest hash and export time of the archive with these facts."""
    return e.get("manifest_sha256") == known.manifest_sha256 and e.get("created") == known.created


def add_to_ledger(archive: str) -> ledger.LedgerEntry:
    """Record an archive of a store in its ledger, unless it is recorded there, and return its line.

    The ledger may not know the archive because it was copied there, or because its export was killed before the line
    was written. The structure is checked, no data; of an encrypted archive, the hashes of the ciphertext.

    Args:
        archive: path or URL of the archive.

    Raises:
        UsageError: the archive does not exist.
        Corrupt: it is damaged.
        Differs: another archive is recorded under its name.
    """
    store, name = split_archive_path(archive)
    require_archive(store, name)
    source, known = read_archive_facts(store, name)
    if isinstance(known, str):
        raise Corrupt(f"{urls.redact_url(archive)} is not a valid archive: {known}", code="CKPT0425")
    recorded = ledger.find_latest_records(ledger.read_entries(store))
    facts = {k: v for k, v in asdict(known).items() if k != "name"}
    if name.endswith(ENCRYPTED):
        with open_source(store) as fresh:
            want = sidecar.read_sidecar(fresh, name)["ciphertext"]
            have = sidecar.hash_ciphertext(fresh, name, silent)
        if have != want:
            raise Corrupt(
                f"{urls.redact_url(archive)}: the ciphertext is not the one that "
                f"{sidecar.get_sidecar_name(name)} describes.",
                code="CKPT0425",
            )
        facts["ciphertext_sha256"] = have["sha256"]
    found = ledger.match_archive(recorded, name, facts)
    if found.state == "match":
        return recorded[name]
    if found.state == "differs":
        raise Differs(
            f"{urls.redact_url(archive)}: {found.says} To record this one, give it another name.", code="CKPT0501"
        )
    entry = ledger.append_entry(store, "add", name, **facts)
    source.assert_unchanged()
    return entry


def split_archive_path(archive: str) -> tuple[str, str]:
    """Return (store, file name) of the path or URL of an archive.

    Raises:
        UsageError: the name does not have the suffix of an archive.
    """
    store, name = _split_path(archive)
    if not name.endswith((SUFFIX, ENCRYPTED)):
        raise UsageError(
            f"{urls.redact_url(archive)} is not named like an archive ({SUFFIX}, {ENCRYPTED}).", code="CKPT0221"
        )
    return store, name


def require_archive(store: str, name: str) -> None:
    """Raise UsageError unless a store has a file of this name."""
    with open_source(store) as source:
        if not source.exists(name):
            raise UsageError(f"{source.root}/{name}: this archive does not exist.", code="CKPT0221")


def refuse_protected(path: str) -> None:
    """Raise DestinationExists if a destination is an archive that must not be replaced, or a folder that has archives.

    Args:
        path: path or URL of any destination.

    Raises:
        DestinationExists: it is under retention or a legal hold, or is damaged, so that its holds are unknown; or what
            lies there has archives or their records in it.
        Corrupt: the ledger is damaged.
    """
    store, name = _split_path(path)
    if name.endswith((SUFFIX, ENCRYPTED)) and _file_exists(store, name):
        _refuse_protected(store, name, History.of(store))
    elif found := _find_archive_below(path):
        raise DestinationExists(
            f"{urls.redact_url(path)} has {found} in it, which {argument('force', True)} would delete without "
            "regard to retention and holds. Choose another destination, or move the archives away.",
            code="CKPT0602",
        )


def _find_archive_below(path: str) -> str:
    """Return the path, relative to a folder or prefix, of an archive, hold file or ledger in it; "" if there is none,
    or if `path` is that of a file, or of nothing."""
    if not urls.is_url(path):
        inside = ((folder, name) for folder, _, names in os.walk(path) for name in names)
        found = next((os.path.join(folder, name) for folder, name in inside if _is_of_store(folder, name)), None)
        return "" if found is None else os.path.relpath(found, path)
    fs, prefix, _ = filesystem_for(path)
    try:
        for name, _ in list_tree(fs, prefix, urls.redact_url(path)) or ():
            below, _, last = name.rpartition("/")
            if _is_of_store(f"{path.rstrip('/')}/{below}".rstrip("/"), last):
                return name
    except NotFound:
        pass
    return ""


def _is_of_store(folder: str, name: str) -> bool:
    """Return whether a file in a folder, or below a URL, is an archive, a hold file of one, or a ledger. Other files
    may be named like an archive, such as code.tar.zst."""
    if name.endswith(SUFFIX):
        return isinstance(read_archive_facts(folder, name)[1], ArchiveFacts)
    return (
        name == ledger.FILE
        or name.endswith(ENCRYPTED)
        or (name.endswith(sidecar.HOLD) and name.removesuffix(sidecar.HOLD).endswith((SUFFIX, ENCRYPTED)))
    )


@contextmanager
def replacing(archive: str) -> Iterator[None]:
    """Prevent that others place a hold on an archive while the block replaces it.

    In a folder, the ledger is locked meanwhile. In an object store, the ledger gets a line before the block and one
    after it, unless the outcome is unknown. If there is no ledger, or no archive yet, protection is only checked once,
    before the block.

    Args:
        archive: path or URL of the archive.

    Raises:
        DestinationExists: it is under retention or a legal hold, or is damaged, so that its holds are unknown.
        Locked: another run is about to delete it. Corrupt: the ledger is damaged.
        RemoteError, CkpttoolError: the ledger cannot be read or written.
    """
    store, name = _split_path(archive)
    if not _file_exists(store, name) or ledger.read_entries_or_none(store) is None:
        refuse_protected(archive)
        yield
        return
    with ledger.take_turn(store) as turn:
        if turn.alone:
            _refuse_protected(store, name, History.of(store, turn.read()))
            yield
            return

        def unprotected(lines: list[ledger.LedgerEntry]) -> ledger.LedgerEntry:
            """Return {}, no further fields for the line; raises DestinationExists if the archive is protected by now,
            Locked while another run is deleting it."""
            begun = ledger.find_unfinished_change(lines, name)
            if begun is not None and begun["event"] == "delete":
                raise Locked(
                    f"{urls.redact_url(archive)} is not replaced: {describe_unfinished_change(begun)}. Run the same "
                    "command again when that run has ended; if it was killed, an hour after that line."
                )
            _refuse_protected(store, name, History.of(store, lines))
            return {}

        entry = turn.append("replace", name, following=unprotected)
        try:
            yield
        except CkpttoolError as e:
            if not isinstance(e, RemoteError) or isinstance(e, Denied):  # others may have been done by the store
                turn.append("replace-failed", name, begun=entry["seq"], why=str(e))
            raise
        turn.append("replaced", name, begun=entry["seq"])


def describe_unfinished_change(begun: Mapping[str, object]) -> str:
    """Return, as text, which run is about to delete or replace an archive; `begun` is the line that announced it."""
    return (
        f"since line {begun['seq']} of the ledger, {begun['time']}, {begun['by']} is about to {begun['event']} it, and "
        "no line says how that ended"
    )


def _refuse_protected(store: str, name: str, history: History) -> None:
    """Raise DestinationExists if an existing archive is under retention or a legal hold, or damaged."""
    row = make_listing_row(name, read_archive_facts(store, name)[1], history)
    why = (
        f"it is not a valid archive: {row.damaged}" if row.facts is None else explain_protection(row, datetime.now(UTC))
    )
    if why:
        where = f"{urls.redact_url(store).rstrip('/')}/{name}" if urls.is_url(store) else os.path.join(store, name)
        raise DestinationExists(
            f"{where} is not replaced, not even with {argument('force', True)}: {why}.", code="CKPT0602"
        )


def _split_path(archive: str) -> tuple[str, str]:
    """Return (store, file name) of any path or URL."""
    return urls.split_url(archive) if urls.is_url(archive) else os.path.split(urls.make_path_absolute(archive))


def _file_exists(store: str, name: str) -> bool:
    """Return whether a store has a file of that name."""
    with open_source(store) as source:
        return source.exists(name)


def explain_protection(row: ListingRow, now: datetime) -> str:
    """Return why an archive must not be deleted at the time `now`, as text: a legal hold, a retention, or an invalid
    end of the retention; "" if nothing protects it."""
    if row.held:
        return "under legal hold: " + "; ".join(row.held)
    if row.retain_until is not None:
        try:
            if parse_time(row.retain_until) > now:
                return f"under retention until {row.retain_until}"
        except ValueError:
            return f"its retention is not a time: {row.retain_until[:40]!r}"
    return ""


def remove_file(store: str, name: str) -> None:
    """Delete a file of a store, durably; nothing happens if it is already gone.

    Raises:
        RemoteError, CkpttoolError: it cannot be deleted.
    """
    if urls.is_url(store):
        objects.delete_object_versions(f"{store.rstrip('/')}/{name}")
        return
    try:
        os.unlink(os.path.join(store, name))
        sync_folder(store)
    except FileNotFoundError:
        pass  # gone is gone
    except OSError as e:
        raise kind_of_failure(e)(f"{os.path.join(store, name)}: {e.strerror}.") from None
