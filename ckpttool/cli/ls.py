"""`ckpttool ls`: parse, call, print."""

from __future__ import annotations

from typing import Annotated

import typer

from .help import READING, about
from .terminal import Json, Quiet, note, print_json, say

__all__ = ["ls"]


@about(
    ("The steps of a run", "ckpttool ls run"),
    ("In a bucket", "ckpttool ls s3://bucket/run"),
    ("For a script", "ckpttool ls run --fast --json"),
    exits=READING,
)
def ls(
    path: Annotated[
        str,
        typer.Argument(
            help="A folder with the checkpoints of a run, or the URL of one (s3://, gs://, az://, hf://).",
            show_default=False,
        ),
    ],
    fast: Annotated[
        bool, typer.Option("--fast", help="Read names only; do not find ranks and what resumes from the steps.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List the steps of a run: layout, ranks, size, age, complete or why not, and what resumes from them."""
    from ..engine.runs import list_run

    found = list_run(path, look=not fast)
    if as_json:
        print_json(found.to_json())
        return
    for line in found.table():
        say(line)
    for line in found.warnings():
        note(f"warning: {line}", quiet)
    for line in found.next_steps():
        note(line, quiet)
