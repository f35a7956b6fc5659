"""`ckpttool diff`: parse, call, print."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ..options import OpenOptions
from .help import READING, about
from .results import print_notes
from .shared_options import NameMap, Workers, add_shared_options, pick_keywords
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

__all__ = ["diff"]


@about(
    ("Bit for bit, whatever the layouts", "ckpttool diff run/ckpt step3.pt"),
    ("Weights only, with a tolerance", "ckpttool diff run/ckpt hf --only model --rtol 0.01 --atol 1e-6"),
    ("What training changed most", "ckpttool diff run/step-100 run/step-200 --sort moved --top 10 --fold"),
    ("Names of torchtitan on one side", "ckpttool diff step-3 hf --map torchtitan-llama3 --config DIR"),
    ("For a script", "ckpttool diff run/ckpt dcp3 --json --quiet"),
    exits=(*READING, 5),
    meaning={0: "equal", 5: "they differ"},
)
@add_shared_options("allow_equal_ranks", "allow_mixed_steps")
def diff(
    a: Src,
    b: Annotated[str, typer.Argument(help="Another checkpoint, in any layout.", show_default=False)],
    reading: OpenOptions,
    rtol: Annotated[float, typer.Option("--rtol", min=0, help="Relative tolerance.")] = 0.0,
    atol: Annotated[float, typer.Option("--atol", min=0, help="Absolute tolerance.")] = 0.0,
    sort: Annotated[
        str | None,
        typer.Option(
            "--sort",
            help="Sort the tensors that differ by moved (relative L2), abs, rel, ulp or name.",
            metavar="ORDER",
        ),
    ] = None,
    top: Annotated[int | None, typer.Option("--top", help="List the first N tensors that differ.", min=1)] = None,
    fold: Annotated[
        bool, typer.Option("--fold", help="One row for tensors whose names differ only in numbers.")
    ] = False,
    name_map: NameMap = None,
    latest: Latest = False,
    workers: Workers = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare two checkpoints, in any layouts, tensor by tensor; exit 5 if they differ."""
    from ..engine.diff import diff as compare

    a, b = (find_newest(path, latest, quiet or as_json) for path in (a, b))
    with Meter(quiet) as meter:
        found = compare(
            a,
            b,
            rtol=rtol,
            atol=atol,
            map=name_map,
            workers=workers,
            progress=meter,
            **pick_keywords(compare, reading),
        )
    found = found.folded() if fold else found
    found = found.sorted_by(sort) if sort is not None else found
    if as_json:
        print_json(replace(found, data=found.data[:top]).to_json())
    else:
        for path, rows in ((a, found.not_read_a), (b, found.not_read_b)):
            print_unread_files(rows, quiet, f"{path}: ")
        print_notes(found.notes, quiet)
        for line in found.lines() if top is None else found.lines(top):
            say(line)
    if not found.equal:
        raise typer.Exit(5)
