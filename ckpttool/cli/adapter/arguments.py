"""Options and output that both commands of `ckpttool adapter` have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from ..results import describe_read_back, print_notes, print_result
from ..terminal import Meter, print_json, print_left_behind

if TYPE_CHECKING:
    from ...engine.conversion import ConvertResult

__all__ = ["AdapterConfig", "LoraAlpha", "Rslora", "run_and_print"]

AdapterConfig = Annotated[
    str | None,
    typer.Option(
        "--adapter-config", help="Folder with adapter_config.json, if it is not beside the adapter.", metavar="DIR"
    ),
]
LoraAlpha = Annotated[
    float | None,
    typer.Option(
        "--lora-alpha", help="lora_alpha of the LoraConfig, if there is no adapter_config.json.", metavar="NUMBER"
    ),
]
Rslora = Annotated[
    bool, typer.Option("--rslora", help="With --lora-alpha: the LoraConfig had use_rslora (alpha / sqrt(r)).")
]


def run_and_print(call: Callable[[Meter], ConvertResult], *, as_json: bool, quiet: bool, verbose: bool) -> None:
    """Run a conversion, show its progress, and print its result.

    Args:
        call: runs the conversion and returns the result; it is called with the function that shows progress.
        as_json: print the result as JSON.
        quiet: print only the digests.
        verbose: print the name of every entry that was not converted.
    """
    with Meter(quiet) as meter:
        done = call(meter)
    if as_json:
        print_json({**done.to_json(), **meter.measure_costs()})
        return
    print_notes(done.notes, quiet)
    print_left_behind(done.dropped, quiet, verbose)
    print_result(done, done.layout_from, meter, quiet, describe_read_back(done))
