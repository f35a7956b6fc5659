"""`ckpttool doctor`: parse, call, print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .help import READING, about
from .terminal import (
    Config,
    FlatLayout,
    From,
    Json,
    Latest,
    Meter,
    Quiet,
    Src,
    Tag,
    Wrap,
    comma,
    newest_of,
    print_json,
    say,
)

if TYPE_CHECKING:
    from ..engine.doctor import Diagnosis

__all__ = ["doctor"]

_SHOWN = 10


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
def doctor(
    path: Src,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Also read every byte: compare CRC32s, find NaN and ties that differ.")
    ] = False,
    like: Annotated[
        str | None,
        typer.Option(
            "--like", help="A checkpoint of the job that refuses to load this one; param groups are compared."
        ),
    ] = None,
    from_: From = None,
    config: Config = None,
    flat_layout: FlatLayout = None,
    wrap: Wrap = None,
    tag: Tag = None,
    latest: Latest = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Name every tensor that is lost or rebuilt.")
    ] = False,
) -> None:
    """Find out what is wrong with a checkpoint, what is still whole, and what to type next."""
    from ..engine.doctor import doctor as look

    path = newest_of(path, latest, quiet or as_json)
    meter = Meter(quiet)
    try:
        found = look(
            path,
            read_data=read_data,
            like=like,
            source_layout=from_,
            config=config,
            flat_layout=flat_layout,
            wrap=comma(wrap),
            tag=tag,
            progress=meter,
        )
    finally:
        meter.close()
    if as_json:
        print_json(found.to_json())
    else:
        _print(found, verbose)
    if not found.sound:
        raise typer.Exit(4)
    if found.fits is False:
        raise typer.Exit(5)


def _print(found: Diagnosis, verbose: bool) -> None:
    from ..engine.inspect import human

    state = (
        "damaged" if not found.sound else "sound" if found.fits is not False else "sound, but it does not fit --like"
    )
    say(f"{found.path}: {state}")
    for f in found.findings:
        say(f"  {f.kind}: {f.text}")
    if found.layout is not None:
        lost = f", {len(found.missing):,} lost" if found.missing else ""
        made = f", {len(found.rebuilt):,} can be rebuilt" if found.rebuilt else ""
        say(f"{found.layout}: {found.exact:,} tensors are whole, {human(found.exact_bytes)}{made}{lost}")
    elif not found.sound:
        say("nothing of it can be read")
    names = list(found.missing.items())
    for name, why in names if verbose else names[:_SHOWN]:
        say(f"  lost: {name}: {why}")
    if len(names) > _SHOWN and not verbose:
        say(f"  ... {len(names) - _SHOWN:,} more; -v names them")
    for line in found.next:
        say(f"next: {line}")
