"""`ckpttool apply`: parse, call, print."""

from __future__ import annotations

from typing import Annotated

import typer

from ..options import RunOptions
from .convert import print_conversion
from .help import READING, about
from .shared_options import add_shared_options, pick_keywords
from .terminal import Json, Meter, Quiet, Verbose

__all__ = ["apply"]


@about(
    ("Run exactly what was reviewed", "ckpttool apply plan.json"),
    ("With eight workers", "ckpttool apply plan.json --workers 8"),
    ("In a script: the result, or what has changed, as JSON", "ckpttool apply plan.json --json"),
    exits=(*READING, 5, 6),
    meaning={
        4: "incomplete or corrupt, or the source is not the one that was planned",
        5: "what would be written is not what was planned, or the result, read back, differs",
    },
)
@add_shared_options("force", "verify", "prove_logits")
def apply(
    plan: Annotated[
        str, typer.Argument(help="File that `ckpttool convert --dry-run --plan` wrote.", show_default=False)
    ],
    running: RunOptions,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run the conversion of a plan file, exactly, or say what has changed since."""
    from ..engine.apply import apply as run

    with Meter(quiet) as meter:
        done = run(plan, **{**pick_keywords(run, running), "progress": meter})
    print_conversion(done, meter, as_json, quiet, verbose)
