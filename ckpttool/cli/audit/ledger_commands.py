"""`ckpttool audit ledger verify`, `add` and `show`."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import Differs
from ..help import about
from ..terminal import (
    Json,
    note,
    print_json,
    say,
)
from .audit_arguments import ArchivePath, FailIfMissing, Store, print_ledger_entry

if TYPE_CHECKING:
    from ...audit.archive_store import ListingRow

__all__ = ["add", "show", "verify"]


@about(
    ("No line altered, removed or inserted", "ckpttool audit ledger verify store"),
    (
        "Nor the last ones cut off: the head that somebody wrote down is still there",
        "ckpttool audit ledger verify store --head 2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae",
    ),
    exits=(0, 1, 2, 3, 4, 5, 7, 8, 9, 14, 130),
    meaning={4: "missing or damaged", 5: "the head is not in it, or, with --fail-if-missing, an archive is missing"},
)
def verify(
    store: Store,
    head: Annotated[
        str | None, typer.Option("--head", help="Hash of a line, from a copy that you kept elsewhere.", metavar="HEX")
    ] = None,
    fail_if_missing: FailIfMissing = False,
    as_json: Json = False,
) -> None:
    """Check that no line of a store's ledger was altered, removed or inserted, and that its archives are there."""
    from ...audit.archive_store import list_missing_archives
    from ...audit.ledger import verify_chain as run

    found = run(store, head)
    gone = list_missing_archives(store)
    if as_json:
        rows = [{"name": r.name, "retain_until": r.retain_until, "held": r.held} for r in gone]
        print_json({**found, "missing": rows})
    else:
        _print_chain_check(found, gone)
    if fail_if_missing and gone:
        raise typer.Exit(Differs.exit_code)


def _print_chain_check(found: dict[str, Any], gone: list[ListingRow]) -> None:
    """Print the result of checking a ledger: its head on stdout, everything else on stderr.

    Args:
        found: the result of `ledger.verify_chain`.
        gone: the archives that are missing from the store.
    """
    note(f"{found['entries']} entries, from {found['first']} to {found['last']}, in one chain")
    for b in found["backwards"]:
        note(
            f"warning: line {b['line']} is of {b['time']}, {timedelta(seconds=b['seconds'])} before the line above it "
            f"({b['before']}): the clock of a machine was wrong."
        )
    for r in gone:
        note(f"warning: {r.name}: {r.warnings[0]}.")
    say(f"head        sha256:{found['head']}")


@about(
    ("An archive that was copied here", "ckpttool audit ledger add store/step3.tar.zst"),
    exits=(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 14, 130),
)
def add(archive: ArchivePath, as_json: Json = False) -> None:
    """Add an archive that is missing from the ledger of its store; print its line if it is there."""
    from ...audit.archive_store import add_to_ledger as run

    print_ledger_entry(run(archive), as_json)


@about(
    ("Every line", "ckpttool audit ledger show store"),
    ("For a script", "ckpttool audit ledger show store --json"),
    exits=(0, 1, 2, 3, 4, 7, 8, 9, 14, 130),
)
def show(store: Store, as_json: Json = False) -> None:
    """Check a store's ledger and print it."""
    from ...audit.ledger import read_entries, require_store

    require_store(store)
    rows = read_entries(store)
    if as_json:
        print_json(rows)
        return
    for e in rows:
        said = e.get("reason") or e.get("why") or e.get("merkle_root") or ""
        say(f"{e['seq']:5d}  {e['time']}  {e['event']:13s} {e['archive']}  {e['by']}  {said}")
