"""`ckpttool compare`: parse, call, print."""

from __future__ import annotations

from typing import Annotated

import typer

from ..options import CompareRequest, OpenOptions
from .help import READING, about
from .shared_options import EDITS, NameMap, add_shared_options, pick_keywords
from .terminal import Json, Latest, Meter, Quiet, Src, find_newest, note, print_json, say

__all__ = ["compare"]


@about(
    ("Does the export compute what the job does?", "ckpttool compare run/ckpt hf --config llama"),
    ("A merged model against its base and adapter", "ckpttool compare base merged --adapter-a lora/adapter"),
    ("Your own prompts, and a report", "ckpttool compare run/ckpt hf --config llama --prompts ids.jsonl --report out"),
    ("Within a limit, for a script", "ckpttool compare run/ckpt hf --config llama --max-kl 0.01 --json --quiet"),
    exits=(*READING, 5),
    meaning={0: "equal within the bound", 5: "they differ"},
)
@add_shared_options("allow_equal_ranks", "allow_mixed_steps", "only", *EDITS)
def compare(
    a: Src,
    b: Annotated[str, typer.Argument(help="Another checkpoint, in any layout.", show_default=False)],
    reading: OpenOptions,
    request: CompareRequest,
    config_a: Annotated[
        str | None, typer.Option("--config-a", help="Config of the first, instead of its own.", metavar="DIR|HF_ID")
    ] = None,
    config_b: Annotated[
        str | None, typer.Option("--config-b", help="Config of the second, instead of its own.", metavar="DIR|HF_ID")
    ] = None,
    adapter_a: Annotated[
        str | None, typer.Option("--adapter-a", help="LoRA adapter to merge into the first.", metavar="PATH")
    ] = None,
    adapter_b: Annotated[
        str | None, typer.Option("--adapter-b", help="LoRA adapter to merge into the second.", metavar="PATH")
    ] = None,
    name_map: NameMap = None,
    report: Annotated[
        str | None,
        typer.Option("--report", help="Write report.html and report.json to this folder.", metavar="DIR"),
    ] = None,
    latest: Latest = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare what two models compute, layer by layer, with one layer in memory; exit 5 if they differ.

    Both are run with transformers on the same tokens. --config names the config of those without a config.json.
    """
    from ..engine.logits.compare import compare as compare_models

    a, b = (find_newest(path, latest, quiet or as_json) for path in (a, b))
    with Meter(quiet) as meter:
        found = compare_models(
            a,
            b,
            config_a=config_a,
            config_b=config_b,
            adapter_a=adapter_a,
            adapter_b=adapter_b,
            map=name_map,
            progress=meter,
            **pick_keywords(compare_models, reading, request),
        )
    if report is not None:
        from ..resume.report.logits_page import write_comparison

        write_comparison(found, a, b, report)
    if as_json:
        print_json({**found.to_json(), **meter.measure_costs()})
    else:
        for text in found.notes:
            note(f"note: {text}", quiet)
        for line in found.lines():
            say(line)
    if not found.equal:
        raise typer.Exit(5)
