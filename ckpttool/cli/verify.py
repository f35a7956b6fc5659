"""`ckpttool verify`: parse, call, print."""

from __future__ import annotations

from typing import Annotated

import typer

from ..options import OpenOptions
from .help import READING, about
from .reading import NOTHING_ASKED, reading_keywords, reads
from .terminal import (
    Json,
    Latest,
    Meter,
    Quiet,
    Src,
    Workers,
    newest_of,
    not_read,
    note,
    print_json,
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
@reads()
def verify(
    path: Src,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Read every byte and compare CRC32s and recorded digests.")
    ] = False,
    against: Annotated[
        str | None, typer.Option("--against", help="A checkpoint that must contain the same state.", metavar="PATH")
    ] = None,
    reading: OpenOptions = NOTHING_ASKED,
    latest: Latest = False,
    workers: Workers = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check that a checkpoint is complete: its structure and, with --read-data, every byte."""
    from ..engine.verification import verify as check

    path = newest_of(path, latest, quiet or as_json)
    meter = Meter(quiet)
    try:
        found = check(
            path, read_data=read_data, against=against, progress=meter, workers=workers, **reading_keywords(reading)
        )
    finally:
        meter.close()
    if as_json:
        print_json(found.to_json())
        return
    not_read(found.not_read, quiet)
    for text in found.notes:
        note(f"note: {text}", quiet)
    for line in found.lines():
        say(line)
