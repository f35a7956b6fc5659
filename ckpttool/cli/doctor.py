"""`ckpttool doctor`: parse, call, print."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

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
    note,
    print_json,
    say,
)

if TYPE_CHECKING:
    from ..engine.doctor.examine import Diagnosis

__all__ = ["doctor"]


@about(
    ("What is wrong with this checkpoint?", "ckpttool doctor run/ckpt"),
    ("Read every byte that is left, too", "ckpttool doctor step3.pt --read-data"),
    ("Names of all tensors that are lost, for a script", "ckpttool doctor step3.pt --json"),
    ("A file for a bug report, without a value of the checkpoint", "ckpttool doctor run/ckpt --report report.json"),
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
    report: Annotated[
        str | None,
        typer.Option(
            "--report",
            help="Also write a file for a bug report: versions, names, shapes and kinds of findings, no value or path.",
            metavar="FILE",
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
    refused: Exception | None = None
    with Meter(quiet) as meter:
        try:
            found = look(path, read_data=read_data, progress=meter, **pick_keywords(look, replace(reading, like=like)))
        except Exception as e:  # also what is a bug of ours: that is what reports are for
            if report is None:
                raise
            refused = e
    if report is not None:
        _write_report(report, path, reading, refused or found)
    if refused is not None:
        raise refused
    if as_json:
        print_json(found.to_json())
    else:
        for line in found.lines(verbose):
            say(line)
    if not found.sound:
        raise typer.Exit(4)
    if found.fits is False:
        raise typer.Exit(5)


def _write_report(file: str, path: str, reading: OpenOptions, found: Diagnosis | Exception) -> None:
    """Write the file of --report, JSON for a bug report: versions, names, shapes and kinds of findings, no value or
    path.

    Args:
        file: where to write it.
        path: the checkpoint.
        reading: how the checkpoint is read.
        found: the diagnosis, or the exception that ended the examination.
    """
    from ..engine.doctor.bundle import describe_checkpoint
    from ..printable import printable_json
    from ..storage.local_file import replace_file
    from ..storage.urls import make_path_absolute
    from .versions import describe_versions

    about = {**describe_versions(), **describe_checkpoint(path, replace(reading, allow_mixed_steps=True), found)}
    replace_file(make_path_absolute(file), (printable_json(about) + "\n").encode())
    note(f"{file} has names, shapes and sizes, but no value, text or path; read it before you send it")
