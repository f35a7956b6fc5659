"""`ckpttool audit list`, `prune`, `hold` and `release`: what is in a store, and what must stay there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import Differs
from ...printable import count_noun, printable
from ..help import about
from ..terminal import (
    Json,
    draw,
    note,
    print_json,
    say,
)
from .audit_arguments import ArchivePath, FailIfMissing, Store, print_ledger_entry

if TYPE_CHECKING:
    from ...audit.archive_store import ListingRow

__all__ = ["hold", "list_", "prune", "release"]


@about(
    ("A folder", "ckpttool audit list store"),
    ("A bucket, for a script", "ckpttool audit list s3://models-archive/llama --json"),
    exits=(0, 1, 2, 3, 4, 5, 7, 8, 9, 14, 130),
    meaning={5: "an archive is missing, with --fail-if-missing"},
)
def list_(store: Store, fail_if_missing: FailIfMissing = False, as_json: Json = False) -> None:
    """List the archives of a store with state, date, retention, holds, signer and last check."""
    from ...audit.archive_store import list_archives

    rows = list_archives(store)
    if as_json:
        print_json([asdict(r) for r in rows])
    elif rows:
        _print_listing(store, rows)
    else:
        note(f"{store} holds no archive.")
    if fail_if_missing and any(r.missing for r in rows):
        raise typer.Exit(Differs.exit_code)


def _print_listing(store: str, rows: Sequence[ListingRow]) -> None:
    """Print a table of a store's archives, and the warnings about them and about a missing ledger."""
    from ...engine.inspect import human

    if any(r.ledger == "missing" for r in rows):
        note(
            f"warning: {store} has no ledger: nothing shows what was done to its archives, or which were under a hold."
        )
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "archive", "state", "step", "size", "exported", "keep until", "held by", "signed by", "checked", box=None
    )
    for r in rows:
        f = r.facts
        if f is None:
            state = "missing" if r.missing else f"damaged: {r.damaged}"
            cells = [r.name, state, "", "", "", (r.retain_until or "")[:10], ", ".join(r.held), "", ""]
            table.add_row(*(Text(printable(c)) for c in cells), style="red")
            continue
        state = f"{f.layout or '?'} {', '.join(f.components)}" + (", encrypted" if f.encrypted else "")
        cells = [
            r.name,
            state,
            "" if f.step is None else f"{f.step:,}",
            human(f.bytes),
            f.created[:10] or "no date",
            (r.retain_until or "")[:10],
            ", ".join(r.held),
            _shorten_hashes(f.signed_by) or "no",
            (r.verified or "never")[:10],
        ]
        table.add_row(*(Text(printable(c)) for c in cells), style="red" if r.ledger == "differs" else None)
    draw(table)
    for r in rows:
        for text in r.warnings:
            note(f"warning: {f'{r.name}: {text}'.rstrip('.')}.")


def _shorten_hashes(signer: str) -> str:
    """Return the description of a signer with hashes cut to twelve digits, for a table."""
    return re.sub(r"([0-9a-f]{12})[0-9a-f]{52}", r"\1", signer)


@about(
    (
        "What would be deleted? Deletes nothing",
        "ckpttool audit prune store --keep-last 2 --keep-within 90d --keep-every 1000 --dry-run",
    ),
    ("Keep the newest two of every run", "ckpttool audit prune store --keep-last 2"),
    exits=(0, 1, 2, 3, 4, 6, 7, 8, 9, 14, 130),
    meaning={4: "the ledger is missing or damaged; nothing was deleted"},
)
def prune(
    store: Store,
    keep_last: Annotated[int | None, typer.Option("--keep-last", min=1, help="Keep the newest N of every run.")] = None,
    keep_within: Annotated[
        str | None,
        typer.Option("--keep-within", help="Keep what was exported within this time: 90d, 6m.", metavar="TIME"),
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", min=1, help="Keep training steps that are multiples of N.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted; delete nothing.")] = False,
    no_ledger: Annotated[
        bool, typer.Option("--no-ledger", help="Also delete archives that no ledger knows; their holds may be lost.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete the archives that no policy keeps, but none that is under retention, on hold, undated or damaged."""
    from ...audit.pruning import prune as run
    from ...audit.retention import parse_age
    from ...engine.inspect import human

    done = run(
        store,
        keep_last=keep_last,
        keep_within=parse_age(keep_within) if keep_within else None,
        keep_every=keep_every,
        dry_run=dry_run,
        no_ledger=no_ledger,
    )
    if as_json:
        print_json({"dry_run": dry_run, **asdict(done)})
        return
    for name in done.deleted:
        say(f"{'would delete' if dry_run else 'deleted':13s}{name}")
    for name, why in done.kept.items():
        say(f"{'kept':13s}{name}: {', '.join(why)}")
    for name, reason in done.refused.items():
        say(f"{'refused':13s}{name}: {reason}")
    note(
        f"{count_noun(len(done.deleted), 'archive')}, {human(done.freed)}"
        + (" would be freed; nothing was touched" if dry_run else " freed")
    )


@about(
    ("Until the case is closed", "ckpttool audit hold store/step3.tar.zst 'case 2026-114'"),
    exits=(0, 1, 2, 3, 4, 6, 7, 8, 9, 14, 130),
)
def hold(
    archive: ArchivePath,
    reason: Annotated[str, typer.Argument(metavar="REASON", help="Why it must be kept.")],
    as_json: Json = False,
) -> None:
    """Put an archive on legal hold: nothing deletes it until the hold is released."""
    from ...audit.holds import hold as run

    print_ledger_entry(run(archive, reason), as_json)


@about(
    ("The case is closed", "ckpttool audit release store/step3.tar.zst 'case closed'"),
    exits=(0, 1, 2, 3, 4, 6, 7, 8, 9, 14, 130),
)
def release(
    archive: ArchivePath,
    reason: Annotated[str, typer.Argument(metavar="REASON", help="Why it no longer has to be kept.")],
    as_json: Json = False,
) -> None:
    """End all legal holds of an archive; retention continues."""
    from ...audit.holds import release as run

    print_ledger_entry(run(archive, reason), as_json)
