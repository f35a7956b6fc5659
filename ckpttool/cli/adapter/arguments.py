"""Options and output that both commands of `ckpttool adapter` have."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from ..terminal import Meter, left_behind, note, peak, print_json, ranks, say

if TYPE_CHECKING:
    from ...engine.conversion import ConvertResult

__all__ = ["AdapterConfig", "LoraAlpha", "Rslora", "run"]

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


def run(call: Callable[[Meter], ConvertResult], *, as_json: bool, quiet: bool, verbose: bool) -> None:
    """Call it with a meter, and print the result as `ckpttool convert` does."""
    meter = Meter(quiet)
    began = time.monotonic()
    try:
        done = call(meter)
    finally:
        meter.close()
    seconds = time.monotonic() - began
    if as_json:
        print_json({**done.to_json(), "seconds": round(seconds, 3), "peak_memory_mib": int(peak().split()[1])})
        return
    for text in done.notes:
        note(f"note: {text}", quiet)
    left_behind(done.dropped, quiet, verbose)
    from ...engine.inspect import human

    where = f" for {ranks(done.world_size)}" if done.world_size else ""
    note(
        f"{done.layout_from} -> {done.layout_to}{where}: {done.tensors:,} tensors, {human(done.written_bytes)} in "
        f"{seconds:.1f} s, {peak()}" + (", read back and equal" if done.verified else ", not read back"),
        quiet,
    )
    for component, root in done.digest.items():
        say(f"digest {component:10s} blake3:{root}")
