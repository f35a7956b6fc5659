"""`ckpttool digest`: parse, call, print."""

from __future__ import annotations

from typing import Annotated

import typer

from ..options import OpenOptions
from .help import READING, about
from .results import print_notes
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

__all__ = ["digest"]


@about(
    ("Of the state and of each component", "ckpttool digest run/ckpt"),
    ("Of the weights", "ckpttool digest step3.pt --only model"),
    ("Of every tensor, for a script", "ckpttool digest run/ckpt --tensors --json"),
    exits=READING,
)
@add_shared_options()
def digest(
    path: Src,
    reading: OpenOptions,
    latest: Latest = False,
    workers: Workers = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Print the digest of every tensor too.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Print a digest of the state, which is the same in every layout and at every world size."""
    from ..engine.verification import digest as compute

    path = find_newest(path, latest, quiet or as_json)
    with Meter(quiet) as meter:
        found = compute(path, progress=meter, workers=workers, **pick_keywords(compute, reading))
    if as_json:
        print_json(
            {
                "digest": found.digest,
                **({"tensors": found.tensors} if tensors else {}),
                "not_read": found.not_read,
                **({"notes": found.notes} if found.notes else {}),
            }
        )
        return
    print_unread_files(found.not_read, quiet)
    print_notes(found.notes, quiet)
    for line in found.lines():
        say(line)
    for name, value in found.tensors.items() if tensors else ():
        say(f"blake3:{value}  {name}")
