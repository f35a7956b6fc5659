"""`ckpttool adapter extract`: parse, call, print."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ...options import OpenOptions, RunOptions, WriteRequest
from ..help import READING, about
from ..shared_options import EDITS, add_shared_options, pick_keywords
from ..terminal import Json, Latest, Quiet, Src, Verbose, find_newest
from .arguments import AdapterConfig, LoraAlpha, Rslora, run_and_print

__all__ = ["extract"]


#: What applies to more than an adapter.
_OF_WHOLE_STATES = (
    "to",
    "world_size",
    "cast",
    "canonical_keys",
    "drop",
    "keys",
    "strip_wrappers",
    "vocab_size",
    "regroup",
    "dequantize",
    "quantize",
    "map",
    *EDITS,
    "workers",
    "prove_logits",
)


@about(
    ("From the state of a job", "ckpttool adapter extract lora/ckpt lora/peft --adapter-config lora/adapter"),
    (
        "Without adapter_config.json",
        "ckpttool adapter extract lora/ckpt lora/made --lora-alpha 6 --base-model org/base",
    ),
    (
        "For vLLM or SGLang, each expert by itself",
        "ckpttool adapter extract moe/adapter moe/split --config moe/base --split-experts",
    ),
    ("One of several adapters", "ckpttool adapter extract run/ckpt policy --adapter-name policy"),
    exits=(*READING, 5, 6),
    meaning={3: "no adapter, or no adapter_config.json", 5: "the result, read back, differs"},
)
@add_shared_options("only", "weights", *_OF_WHOLE_STATES)
def extract(
    src: Src,
    dst: Annotated[
        str, typer.Argument(help="The folder to write, as PEFT's save_pretrained does.", show_default=False)
    ],
    writing: WriteRequest,
    reading: OpenOptions,
    running: RunOptions,
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
    lora_alpha: LoraAlpha = None,
    rslora: Rslora = False,
    base_model: Annotated[
        str | None,
        typer.Option("--base-model", help="With --lora-alpha: path or id of the base model.", metavar="MODEL"),
    ] = None,
    split_experts: Annotated[
        bool,
        typer.Option(
            "--split-experts",
            help="Write the LoRA of stacked experts as that of each expert, as the Hub names them; needs --config.",
        ),
    ] = False,
    strip_prefix: Annotated[
        str | None,
        typer.Option("--strip-prefix", help="Prefix to remove from the names of weights.", metavar="PREFIX"),
    ] = None,
    latest: Latest = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write the adapter in a checkpoint as PEFT's own folder."""
    from ...engine.adapter import adapter_extract

    src = find_newest(src, latest, quiet or as_json)
    run_and_print(
        lambda meter: adapter_extract(
            src,
            dst,
            adapter_name=adapter_name,
            adapter_config=adapter_config,
            lora_alpha=lora_alpha,
            rslora=rslora,
            base_model=base_model,
            split_experts=split_experts,
            strip_prefix=strip_prefix,
            **pick_keywords(adapter_extract, writing, reading, replace(running, progress=meter)),
        ),
        as_json=as_json,
        quiet=quiet,
        verbose=verbose,
    )
