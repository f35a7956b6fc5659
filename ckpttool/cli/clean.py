"""`ckpttool clean`: parse, call, print."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import UsageError
from .help import about
from .terminal import (
    Json,
    Quiet,
    note,
    print_json,
    say,
)

__all__ = ["clean"]


@about(
    ("What interrupted runs left in this folder", "ckpttool clean . --dry-run"),
    ("Remove what a run with this destination left", "ckpttool clean dcp3"),
    exits=(0, 1, 2, 14, 130),
    meaning={1: "something of yours could not be removed"},
)
def clean(
    path: Annotated[
        str,
        typer.Argument(help="A destination, or a folder that contains destinations; not a URL.", show_default=False),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be removed; remove nothing.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove what interrupted commands left beside a destination, and put back what they had moved away.

    Removes what belongs to you and is not in use; anything else is named. In an object store the next run at the same
    URL uses or removes what was left.
    """
    from ..engine.inspect import human
    from ..storage import urls
    from ..storage.partial import clean as remove

    if urls.is_url(path):
        raise UsageError(
            f"{path}: in an object store, the next run at the same URL uses or removes what was left.", code="CKPT0205"
        )
    done = remove(path, dry_run=dry_run)
    if as_json:
        print_json({**done.to_json(), "dry_run": dry_run})
        if done.failed:
            raise typer.Exit(1)
        return
    would = "would be " if dry_run else ""
    for old, target in done.put_back:
        say(f"{would}put back {target}, from {old}")
    for p, n in done.removed:
        say(f"{would}removed {p}" + (f"  {human(n)}" if n else ""))
    for p, why in done.kept:
        note(f"kept {p}: {why}", quiet)
    if not done.removed and not done.put_back and not done.kept:
        note("nothing was left there", quiet)
    if done.failed:
        raise typer.Exit(1)
