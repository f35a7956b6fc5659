"""`ckpttool stats`: parse, call, draw."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..errors import UsageError, argument
from ..options import OpenOptions
from ..printable import list_first
from .help import READING, about
from .shared_options import Workers, add_shared_options, pick_keywords
from .terminal import (
    Json,
    Latest,
    Meter,
    Quiet,
    Src,
    draw,
    find_newest,
    note,
    print_json,
    print_unread_files,
    say,
)

__all__ = ["stats"]


@about(
    ("Folded by layer", "ckpttool stats run/ckpt --only model"),
    ("Every tensor, those of the largest norm first", "ckpttool stats run/ckpt --each --sort norm"),
    ("Which layers moved since another step", "ckpttool stats run/step-200 --against run/step-100 --sort moved"),
    ("For a spreadsheet", "ckpttool stats run/ckpt --each --csv"),
    exits=READING,
)
@add_shared_options()
def stats(
    path: Src,
    reading: OpenOptions,
    against: Annotated[
        str | None,
        typer.Option("--against", help="Earlier checkpoint; measure how far each tensor moved.", metavar="PATH"),
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="A row for each tensor; layers are not folded.")] = False,
    sort: Annotated[
        str | None, typer.Option("--sort", help="Column to sort by; numbers from the largest.", metavar="COLUMN")
    ] = None,
    exponents: Annotated[
        bool, typer.Option("--exponents", help="With --json: count the numbers by binary exponent.")
    ] = False,
    latest: Latest = False,
    workers: Workers = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV on stdout.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Print norm, mean, spread, zeros and NaN of tensors, folded by layer, and how far they moved since a step."""
    from ..engine.stats import stats as compute

    if exponents and not as_json:
        raise UsageError(f"{argument('exponents', True)} adds to the JSON alone. Give --json too.", code="CKPT0204")
    if as_csv and as_json:
        raise UsageError("--csv and --json were both given. Leave out one of them.", code="CKPT0204")
    path = find_newest(path, latest, quiet or as_json)
    with Meter(quiet) as meter:
        found = compute(
            path,
            against=against,
            exponents=exponents,
            progress=meter,
            workers=workers,
            **pick_keywords(compute, reading),
        )
    found = found if each else found.folded()
    found = found if sort is None else found.sorted_by(sort)
    if as_json:
        print_json(found.to_json())
        return
    print_unread_files(found.not_read, quiet)
    for where, names in ((path, found.only_here), (against, found.only_there)):
        if names and not quiet:
            note(f"{len(names):,} tensors are in {where} alone, first {names[0]}")
    if found.not_compared and not quiet:
        note(f"not compared, of other shapes, of packed dtypes or of quantised codes: {list_first(found.not_compared)}")
    if not as_csv and sys.stdout.isatty():
        draw(found.draw())
        return
    for line in found.csv() if as_csv else found.lines():
        say(line)
