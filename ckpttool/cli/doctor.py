"""`ckpttool doctor`: parse, call, print."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ..options import OpenOptions
from .help import READING, about
from .shared_options import EDITS, add_shared_options, pick_keywords
from .terminal import (
    Json,
    Latest,
    Meter,
    Quiet,
    Src,
    find_newest,
    print_json,
    say,
)

__all__ = ["doctor"]


@about(
    ("What is wrong with this checkpoint?", "ckpttool doctor run/ckpt"),
    ("Read every byte that is left, too", "ckpttool doctor step3.pt --read-data"),
    ("Names of all tensors that are lost, for a script", "ckpttool doctor step3.pt --json"),
    ("Why does the job refuse its param groups?", "ckpttool doctor run/ckpt --like run/new"),
    exits=(*READING, 5),
    meaning={
        0: "the checkpoint is sound",
        3: "nothing there looks like a checkpoint, or reading it needs a hint",
        4: "it is damaged",
        5: "it is sound, but does not fit --like",
    },
)
@add_shared_options("only", "weights", "like", "allow_equal_ranks", "allow_mixed_steps", *EDITS)
def doctor(
    path: Src,
    reading: OpenOptions,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Also read every byte: compare CRC32s, find NaN and ties that differ.")
    ] = False,
    like: Annotated[
        str | None,
        typer.Option(
            "--like", help="A checkpoint of the job that refuses to load this one; param groups are compared."
        ),
    ] = None,
    latest: Latest = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Name every tensor that is lost or rebuilt.")
    ] = False,
) -> None:
    """Find out what is wrong with a checkpoint, what is still whole, and how to repair it."""
    from ..engine.doctor.examine import doctor as look

    path = find_newest(path, latest, quiet or as_json)
    with Meter(quiet) as meter:
        found = look(path, read_data=read_data, progress=meter, **pick_keywords(look, replace(reading, like=like)))
    if as_json:
        print_json(found.to_json())
    else:
        for line in found.lines(verbose):
            say(line)
    if not found.sound:
        raise typer.Exit(4)
    if found.fits is False:
        raise typer.Exit(5)
