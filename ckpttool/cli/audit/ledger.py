"""`ckpttool audit ledger verify`, `add` and `show`."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from ..terminal import (  # fmt: skip
    Json,
    note,
    print_json,
    printable,
)
from .arguments import ArchivePath, Store, print_entry

__all__ = ["add", "show", "verify"]


def verify(
    store: Store,
    head: Annotated[
        str | None, typer.Option("--head", help="The hash of a line that somebody wrote down.", metavar="HEX")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that no line of a store's ledger was altered, removed or inserted."""
    from ...audit.ledger import verify as run

    found = run(store, head)
    if as_json:
        print_json(found)
        return
    note(f"{found['entries']} entries, from {found['first']} to {found['last']}, in one chain")
    for b in found["backwards"]:
        note(
            f"warning: line {b['line']} is of {b['time']}, {timedelta(seconds=b['seconds'])} before the line above it "
            f"({b['before']}): the clock of a machine was wrong."
        )
    print(f"head        sha256:{found['head']}")


def add(archive: ArchivePath, as_json: Json = False) -> None:
    """Record an archive that the ledger of its store does not know; prints its line if it does."""
    from ...audit.archive_store import add as run

    print_entry(run(archive), as_json)


def show(store: Store, as_json: Json = False) -> None:
    """Print what a store's ledger says, the chain having been checked."""
    from ...audit.ledger import read

    rows = read(store)
    if as_json:
        print_json(rows)
        return
    for e in rows:
        said = e.get("reason") or e.get("why") or e.get("merkle_root") or ""
        print(printable(f"{e['seq']:5d}  {e['time']}  {e['event']:13s} {e['archive']}  {e['by']}  {said}"))
