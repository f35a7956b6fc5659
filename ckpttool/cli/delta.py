"""`ckpttool delta`: parse, call, print."""

from __future__ import annotations

from typing import Annotated

import typer

from ..options import OpenOptions, RunOptions
from .adapter.arguments import run_and_print
from .help import READING, about
from .shared_options import add_shared_options, pick_keywords
from .terminal import Json, Quiet, Verbose

__all__ = ["delta"]


@about(
    ("What changed between two steps, in any layouts", "ckpttool delta step-1 step-2 step-2.delta.tar.zst"),
    ("Of a store", "ckpttool delta s3://bucket/step-1 s3://bucket/step-2 step-2.delta.tar.zst"),
    ("The optimizer, too", "ckpttool delta step-1 step-2 step-2.delta.tar.zst --only model,optim"),
    exits=(*READING, 5, 6),
    meaning={5: "the delta, read back, differs"},
)
@add_shared_options("weights", "drop_matching", "rename", "prove_logits", "workers")
def delta(
    old: Annotated[str, typer.Argument(help="The checkpoint that it is applied to later.", show_default=False)],
    new: Annotated[str, typer.Argument(help="The checkpoint that comes out then.", show_default=False)],
    dst: Annotated[str, typer.Argument(help="Where to write the delta, named *.tar.zst.", show_default=False)],
    reading: OpenOptions,
    running: RunOptions,
    level: Annotated[int, typer.Option("--level", help="Level of zstd.", min=1, max=19)] = 3,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write what makes one checkpoint of another: both XORed, in byte planes and zstd, with the digests of both.

    It has the weights; --only has more of the state.
    """
    from ..engine.make_delta import delta as make

    given = pick_keywords(make, reading) | pick_keywords(make, running)
    run_and_print(
        lambda meter: make(old, new, dst, level=level, **{**given, "progress": meter}),
        as_json=as_json,
        quiet=quiet,
        verbose=verbose,
    )
