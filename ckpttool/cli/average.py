"""`ckpttool average`: parse, call, print."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ..errors import UsageError, argument
from ..options import OpenOptions, RunOptions, WriteRequest
from .adapter.arguments import run_and_print
from .convert import print_dry_run
from .help import READING, about
from .layout_options import add_layout_options
from .shared_options import EDITS, add_shared_options
from .terminal import Json, Meter, Quiet, Verbose, print_json, split_commas

__all__ = ["average"]

#: What applies to the optimizer, or to the names that a trainer keeps.
_NOT_OF_AVERAGES = (
    "only",
    "canonical_keys",
    "keys",
    "strip_wrappers",
    "vocab_size",
    "regroup",
    "dequantize",
    "map",
    *EDITS,
    "workers",
)


def _parse_numbers(name: str, text: str | None) -> tuple[float, ...] | None:
    """Parse numbers with commas between them, such as "0.2,0.3,0.5".

    Args:
        name: the parameter, for messages.
        text: the value of the option; None stays None.

    Raises:
        UsageError: one of them is not a number.
    """
    try:
        return None if text is None else tuple(float(part) for part in split_commas(text))
    except ValueError:
        raise UsageError(f"{argument(name, text)}: not numbers with commas between them.", code="CKPT0203") from None


@about(
    ("The mean of three checkpoints, in any layouts", "ckpttool average a b c out --to hf --config llama"),
    ("With coefficients", "ckpttool average a b c out --coefficients 0.2,0.3,0.5"),
    (
        "An EMA over the checkpoints of a run, as the start of another job",
        "ckpttool average a b c out --ema-decay 0.9 --to dcp -n 8",
    ),
    ("The mean of their EMA weights", "ckpttool average a.pt b.pt out --weights ema"),
    ("Task arithmetic", "ckpttool average a b out --base base --scale 0.5"),
    exits=(*READING, 5, 6),
    meaning={3: "the checkpoints are not of one model", 5: "the result, read back, differs"},
)
@add_shared_options(*_NOT_OF_AVERAGES)
def average(
    ctx: typer.Context,
    paths: Annotated[
        list[str],
        typer.Argument(
            help="Checkpoints of one model, in any layouts and in order, and the destination.",
            metavar="SRC SRC... DST",
            show_default=False,
        ),
    ],
    writing: WriteRequest,
    reading: OpenOptions,
    running: RunOptions,
    coefficients: Annotated[
        str | None, typer.Option("--coefficients", help="A factor for each; they sum to 1.", metavar="NUMBER,...")
    ] = None,
    linear: Annotated[bool, typer.Option("--linear", help="Let --coefficients have any sum.")] = False,
    ema_decay: Annotated[
        float | None,
        typer.Option(
            "--ema-decay", help="An EMA over them in order: a = d a + (1 - d) x, from the first.", metavar="D"
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", help="Task arithmetic: this checkpoint + the sum of scale (x - this).", metavar="PATH"),
    ] = None,
    scale: Annotated[
        str | None, typer.Option("--scale", help="With --base: one number, or one for each; 1.", metavar="NUMBER,...")
    ] = None,
    slerp: Annotated[
        float | None,
        typer.Option("--slerp", help="Of two: the part of the way to the second, along the arc.", metavar="T"),
    ] = None,
    accumulate: Annotated[
        str, typer.Option("--accumulate", help="dtype of the computation: fp64 or fp32.", metavar="DTYPE")
    ] = "fp64",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print bytes to read and write, free space, memory and time; write nothing."),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Average the weights of several checkpoints of one model, or combine them in other ways (EMA, SLERP, ...).

    It is computed in fp64, or fp32, in the order of the checkpoints, and rounded once to the dtype of each weight.
    Without --to it is written as hf.
    """
    from ..engine.adapter import choose_layout_or_hf
    from ..engine.average import make_average_request
    from ..engine.conversion import run_conversion
    from ..engine.dry_run import estimate_conversion

    *sources, dst = paths
    src, request = make_average_request(
        sources,
        dst,
        coefficients=_parse_numbers("coefficients", coefficients),
        linear=linear,
        ema_decay=ema_decay,
        base=base,
        scale=_parse_numbers("scale", scale),
        slerp=slerp,
        accumulate=accumulate,
    )
    reading = replace(reading, average=request)
    writing = add_layout_options(ctx, replace(writing, to=choose_layout_or_hf(writing.to, dst).name), dst)
    if not dry_run:
        run_and_print(
            lambda meter: run_conversion(src, dst, reading, writing, replace(running, progress=meter)),
            as_json=as_json,
            quiet=quiet,
            verbose=verbose,
        )
        return
    with Meter(quiet) as meter:
        found = estimate_conversion(src, dst, reading, writing, replace(running, progress=meter))
    if as_json:
        print_json(found.to_json())
    else:
        print_dry_run(found, verbose)
