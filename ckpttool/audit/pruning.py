"""Deletes archives that no policy keeps and nothing protects.

Policies say what is kept. What none of them keeps is deleted only if it is a sound archive with a date that is not in
the future, under no retention and no hold, and the one that the ledger records under its name: an archive that the
ledger does not know may have been under a hold in a ledger that was lost. The ledger records the deletion before it
happens and how it ended, and a hold in a line before it wins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from ..errors import CkpttoolError, Corrupt, RemoteError, UsageError, argument
from ..printable import count_noun
from ..storage import urls
from ..storage.retries import Denied
from ..storage.source import Source
from ..storage.sources import open_source
from . import ledger, sidecar
from .archive import ENCRYPTED, ArchiveFacts
from .archive_store import (
    History,
    ListingRow,
    describe_unfinished_change,
    explain_protection,
    get_export_time,
    get_identifying_fields,
    get_listing_sort_key,
    list_archive_names,
    make_listing_row,
    read_archive_facts,
    read_hold_events,
    remove_file,
)
from .retention import format_time

__all__ = ["Pruned", "prune"]


@dataclass(frozen=True)
class Pruned:
    """The result of `prune`: archives by name, and why each was kept or refused.

    Refused are archives that no policy keeps but that must not be deleted, and those that cannot be judged.
    """

    deleted: tuple[str, ...] = ()
    kept: dict[str, tuple[str, ...]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    freed: int = 0


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
    """Delete the archives of a store that no policy keeps and nothing protects.

    At least one of the three policies is needed; None: do not use it.

    Args:
        store: folder or URL of the store.
        keep_last: keep this many of the newest archives of each run (`--meta run=` of the export; archives without it
            are one run).
        keep_within: keep those exported within this time before `now`.
        keep_every: keep those whose training step is a multiple of this number.
        dry_run: change nothing, not even the ledger.
        no_ledger: also delete archives that the ledger does not know, and those in stores without a ledger; known holds
            still count.
        now: the present time; None: that of the clock.

    Raises:
        UsageError: no policy is given, or an invalid one.
        Corrupt: the ledger is damaged, or, without `no_ledger`, missing although there are archives; nothing was
            deleted.
        RemoteError, CkpttoolError: the store or the ledger cannot be read or written.
    """
    _check_policies(keep_last, keep_within, keep_every)
    store, now = urls.make_absolute(store), (now or datetime.now(UTC)).astimezone(UTC)
    history = History.of(store)
    names = list_archive_names(store)
    if names and history.lines is None and not no_ledger:
        raise Corrupt(
            f"{urls.redact_url(store)} holds {count_noun(len(names), 'archive')} and no {ledger.FILE}. The ledger "
            "knows which are under a legal hold; without it, one of those could be deleted. Restore the ledger, or "
            f"pass {argument('no_ledger', True)} if there never was one.",
            code="CKPT0426",
        )
    # sort the archives, the newest first, into what a policy keeps, what must not be deleted, and the rest
    seen = {name: read_archive_facts(store, name) for name in names}
    rows = sorted(
        (make_listing_row(name, known, history) for name, (_, known) in seen.items()), key=get_listing_sort_key
    )
    kept: dict[str, tuple[str, ...]] = {}
    refused: dict[str, str] = {}
    going: list[ListingRow] = []
    ranks: dict[str, int] = {}
    for row in rows:
        why = _explain_unjudged(row, now)
        if why or row.facts is None:
            refused[row.name] = why
            continue
        run = row.facts.meta.get("run", "")
        ranks[run] = rank = ranks.get(run, 0) + 1
        reasons = _list_keep_reasons(row.facts, rank, now, keep_last, keep_within, keep_every)
        if reasons:
            kept[row.name] = reasons
        elif why := explain_protection(row, now) or _explain_unrecorded(row, no_ledger):
            refused[row.name] = why
        else:
            going.append(row)

    # delete the rest, one after the other; each may have become protected meanwhile
    gone: list[ListingRow] = []
    for row in going:
        why = "" if dry_run else _delete_archive(store, row, seen[row.name][0], history, now)
        if why:
            refused[row.name] = why
        else:
            gone.append(row)
    return Pruned(tuple(r.name for r in gone), kept, refused, sum(r.facts.bytes for r in gone if r.facts))


def _check_policies(keep_last: int | None, keep_within: timedelta | None, keep_every: int | None) -> None:
    """Raise UsageError unless at least one policy is given (not None), and each is greater than zero."""
    if keep_last is None and keep_within is None and keep_every is None:
        raise UsageError(
            f"Say what to keep: {argument('keep_last')}, {argument('keep_within')}, {argument('keep_every')}, or "
            "several of them.",
            code="CKPT0204",
        )
    if any(n is not None and n < 1 for n in (keep_last, keep_every)) or (
        keep_within is not None and keep_within <= timedelta(0)
    ):
        raise UsageError(
            f"{argument('keep_last')}, {argument('keep_within')} and {argument('keep_every')} must be greater than "
            "zero.",
            code="CKPT0203",
        )


def _explain_unjudged(row: ListingRow, now: datetime) -> str:
    """Return why no policy can be applied to an archive: it is damaged, or its date is missing, invalid or later than
    `now`; "" if one can."""
    if row.facts is None:
        return f"it is not a valid archive: {row.damaged}"
    made = get_export_time(row.facts)
    if made is None:
        return (
            f"it has no date (it was exported with {argument('reproducible', True)})"
            if not row.facts.created
            else "its date is invalid"
        )
    if made > now:
        return f"it was exported in the future, at {row.facts.created}; it is {format_time(now)}"
    return ""


def _list_keep_reasons(
    known: ArchiveFacts, rank: int, now: datetime, last: int | None, within: timedelta | None, every: int | None
) -> tuple[str, ...]:
    """Return a text for each policy that keeps an archive; () if none does.

    Args:
        known: the facts of the archive.
        rank: 1 for the newest archive of its run, 2 for the one before, ...
        now: the present time.
        last, within, every: the policies `keep_last`, `keep_within` and `keep_every` of `prune`; None: not used.
    """
    made = get_export_time(known)
    out: list[str] = []
    if last is not None and rank <= last:
        out.append(f"one of the last {last}" + (f" of run {known.meta['run']}" if "run" in known.meta else ""))
    if within is not None and made is not None and now - made <= within:
        out.append(f"exported within {_describe_age(within)}")
    if every is not None and known.step is not None and known.step % every == 0:
        out.append(f"step {known.step} is a multiple of {every}")
    return tuple(out)


def _describe_age(within: timedelta) -> str:
    """Return a duration as text: "90 days", "12 hours", "1 day"."""
    hours, rest = divmod(int(within.total_seconds()), 3600)
    if rest or not hours:
        return count_noun(int(within.total_seconds()), "second")
    return count_noun(hours // 24, "day") if hours % 24 == 0 else count_noun(hours, "hour")


def _explain_unrecorded(row: ListingRow, no_ledger: bool) -> str:
    """Return why the ledger forbids to delete an archive, as text; "" if it does not.

    It does if it records another archive under this name, or does not know this one.

    Args:
        no_ledger: whether an archive that the ledger does not know may be deleted.
    """
    if row.ledger == "differs":
        return row.warnings[0].rstrip(".")
    if row.ledger == "unknown" and not no_ledger:
        return (
            f"{row.warnings[0]}, so it may be under a hold that is recorded elsewhere. `ckpttool audit ledger add` "
            f"records it; {argument('no_ledger', True)} "
            "deletes it as it is"
        )
    return ""


def _delete_archive(store: str, row: ListingRow, source: Source, history: History, now: datetime) -> str:
    """Delete an archive, after recording that in the ledger.

    Args:
        row: the listing row of the archive.
        source: the source from which its facts were read, to find out whether it has changed since.
        history: the ledger and the hold files of the store; its lines are updated.
        now: the present time.

    Returns:
        Why it was not deleted; "" if it was.

    Raises:
        CkpttoolError: the ledger cannot be read or written.
    """
    assert row.facts is not None
    with ledger.take_turn(store) as turn:

        def record(event: str, **facts: Any) -> ledger.LedgerEntry:
            """Append a line about the archive to the ledger, bring `history` up to date, and return the line."""
            entry = turn.append(event, row.name, **facts, **get_identifying_fields(known))
            lines = history.lines or []
            if entry["prev"] == (lines[-1]["hash"] if lines else ledger.FIRST):
                lines.append(entry)
            else:  # what others wrote since we looked counts as well
                lines = turn.read()
            history.lines = lines
            return entry

        known = row.facts
        entry = record("delete")
        with open_source(store) as fresh:
            files = dict(history.files)
            if fresh.exists(sidecar.get_hold_file_name(row.name)):
                files[row.name] = read_hold_events(fresh, row.name)
        lines = [e for e in history.lines or () if e["seq"] < entry["seq"]]
        then = History(lines, files, history.recorded, history.names)
        why = explain_protection(make_listing_row(row.name, known, then), now)
        begun = None if turn.alone else ledger.find_unfinished_change(lines, row.name)
        if not why and begun is not None and begun["event"] == "replace":
            why = describe_unfinished_change(begun)
        if not why and not turn.alone and not ledger.may_still_carry_out(entry):
            why = (
                f"the deletion that line {entry['seq']} of the ledger announced comes too late; others may rely on the "
                "archive by now"
            )
        if not why:
            lost = row.name
            try:
                source.assert_unchanged()
                remove_file(store, row.name)
                if row.name.endswith(ENCRYPTED):
                    lost = sidecar.get_sidecar_name(row.name)
                    remove_file(store, lost)
            except CkpttoolError as e:
                why = str(e) if lost == row.name else f"it is deleted, but {lost} is not: {e}"
                if isinstance(e, RemoteError) and not isinstance(e, Denied):
                    return f"{why} The store may still delete it."  # so the line gets no end
        record("delete-failed" if why else "deleted", begun=entry["seq"], **({"why": why} if why else {}))
        return why
