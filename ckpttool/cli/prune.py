"""`ckpttool prune`: parse, call, print."""

from __future__ import annotations

from typing import Annotated

import typer

from .help import about
from .terminal import Json, Meter, Quiet, note, print_json, say

__all__ = ["prune"]


@about(
    ("What would be deleted? Deletes nothing", "ckpttool prune run --keep-last 3 --keep-every 1000"),
    ("Delete it", "ckpttool prune run --keep-last 3 --keep-every 1000 --yes"),
    (
        "Keep the step with the smallest loss, too",
        "ckpttool prune run --keep-last 3 --keep-best metrics.json:eval.loss",
    ),
    exits=(0, 1, 2, 3, 4, 6, 7, 8, 14, 130),
    meaning={4: "no step is complete, or the newest one is no longer; nothing more was deleted"},
)
def prune(
    run: Annotated[
        str, typer.Argument(help="The folder with the checkpoints of a run; not a URL.", show_default=False)
    ],
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", min=1, help="Keep the newest N complete steps of every run.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", min=1, help="Keep steps that are multiples of N.")
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(
            "--keep-best",
            help="Keep the step with the best number at KEY of FILE: a JSON file of each step, or a log of the run.",
            metavar="FILE:KEY",
        ),
    ] = None,
    keep_best_mode: Annotated[
        str | None, typer.Option("--keep-best-mode", help="Which number is the best.", metavar="min|max")
    ] = None,
    drop_incomplete: Annotated[
        str | None,
        typer.Option(
            "--drop-incomplete",
            help="Also delete incomplete steps that nothing was written to for this time, before the newest complete "
            "one: 2d, 12h.",
            metavar="TIME",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes/--dry-run", "-y", help="Delete; without it, nothing is deleted.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Delete the steps of a run that no policy keeps, but none that is the newest, unfinished, named or needed."""
    from ..audit.retention import parse_age
    from ..engine.run_pruning import prune_run

    with Meter(quiet or as_json) as meter:
        done = prune_run(
            run,
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=keep_best,
            keep_best_mode=keep_best_mode,
            drop_incomplete=parse_age(drop_incomplete) if drop_incomplete else None,
            dry_run=not yes,
            progress=meter,
        )
    if as_json:
        print_json(done.to_json())
        return
    for line in done.lines():
        say(line)
    note(done.summary + ("" if yes or not done.deleted else "; --yes deletes them"), quiet)
