"""`ckpttool adapter extract`: parse, call, print."""

from __future__ import annotations

from typing import Annotated

import typer

from ...options import OpenOptions
from ..help import READING, about
from ..reading import NOTHING_ASKED, reading_keywords, reads
from ..terminal import (
    Dtype,
    Force,
    IgnoreRecorded,
    Json,
    Latest,
    MaxMemory,
    NoVerify,
    Quiet,
    Src,
    Threads,
    Verbose,
    bytes_of,
    newest_of,
)
from .arguments import AdapterConfig, LoraAlpha, Rslora, run

__all__ = ["extract"]


@about(
    ("From the state of a job", "ckpttool adapter extract lora/ckpt lora/peft --adapter-config lora/adapter"),
    (
        "Without adapter_config.json",
        "ckpttool adapter extract lora/ckpt lora/made --lora-alpha 6 --base-model org/base",
    ),
    ("One of several adapters", "ckpttool adapter extract run/ckpt policy --adapter-name policy"),
    exits=(*READING, 5, 6),
    meaning={3: "no adapter, or no adapter_config.json", 5: "the result, read back, differs"},
)
@reads("only")
def extract(
    src: Src,
    dst: Annotated[
        str, typer.Argument(help="The folder to write, as PEFT's save_pretrained does.", show_default=False)
    ],
    adapter_name: Annotated[
        str | None,
        typer.Option(
            "--adapter-name",
            "--adapter",
            help="Which adapter, if there are several; by default the one named default.",
            metavar="NAME",
        ),
    ] = None,
    adapter_config: AdapterConfig = None,
    reading: OpenOptions = NOTHING_ASKED,
    lora_alpha: LoraAlpha = None,
    rslora: Rslora = False,
    base_model: Annotated[
        str | None,
        typer.Option("--base-model", help="With --lora-alpha: path or id of the base model.", metavar="MODEL"),
    ] = None,
    strip_prefix: Annotated[
        str | None,
        typer.Option("--strip-prefix", help="Prefix to remove from the names of weights.", metavar="PREFIX"),
    ] = None,
    dtype: Dtype = None,
    latest: Latest = False,
    ignore_recorded_digests: IgnoreRecorded = False,
    max_memory: MaxMemory = None,
    jobs: Threads = 2,
    force: Force = False,
    no_verify: NoVerify = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write the adapter in a checkpoint as PEFT's own folder."""
    from ...engine.adapter import adapter_extract

    src = newest_of(src, latest, quiet or as_json)
    run(
        lambda meter: adapter_extract(
            src,
            dst,
            adapter_name=adapter_name,
            adapter_config=adapter_config,
            lora_alpha=lora_alpha,
            rslora=rslora,
            base_model=base_model,
            strip_prefix=strip_prefix,
            dtype=dtype,
            ignore_recorded_digests=ignore_recorded_digests,
            force=force,
            verify=not no_verify,
            max_memory_bytes=bytes_of(max_memory) if max_memory else None,
            threads=jobs,
            progress=meter,
            **reading_keywords(reading, "only"),
        ),
        as_json=as_json,
        quiet=quiet,
        verbose=verbose,
    )
