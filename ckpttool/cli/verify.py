"""`ckpttool verify`: parse, call, print."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import NotRecognised, Unsupported
from ..options import OpenOptions
from .help import READING, about
from .results import print_delta, print_notes
from .shared_options import Workers, add_shared_options, pick_keywords
from .terminal import (
    Json,
    Latest,
    Meter,
    Quiet,
    Src,
    find_newest,
    print_json,
    print_unread_files,
    say,
)

__all__ = ["verify"]


@about(
    ("Structure only", "ckpttool verify run/ckpt"),
    ("Every byte, CRC32s, recorded digests", "ckpttool verify dcp3 --read-data"),
    ("The same state as another checkpoint?", "ckpttool verify dcp3 --against run/ckpt"),
    exits=(*READING, 5),
    meaning={5: "it differs from what was recorded, or from --against"},
)
@add_shared_options("weights")
def verify(
    path: Src,
    reading: OpenOptions,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Read every byte and compare CRC32s and recorded digests.")
    ] = False,
    against: Annotated[
        str | None, typer.Option("--against", help="A checkpoint that must contain the same state.", metavar="PATH")
    ] = None,
    latest: Latest = False,
    workers: Workers = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check that a checkpoint, or a download of one, is complete, and with --read-data every byte of it."""
    from ..engine.verification import verify as check

    path = find_newest(path, latest, quiet or as_json)
    try:
        with Meter(quiet) as meter:
            found = check(
                path,
                read_data=read_data,
                against=against,
                progress=meter,
                workers=workers,
                **pick_keywords(check, reading),
            )
    except (NotRecognised, Unsupported):
        if against is None and print_delta(path, as_json, read_data):
            return
        raise
    if as_json:
        print_json(found.to_json())
        return
    print_unread_files(found.not_read, quiet)
    print_notes(found.notes, quiet)
    for line in found.lines():
        say(line)
