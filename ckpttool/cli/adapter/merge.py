"""`ckpttool adapter merge`: parse, call, print."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ...errors import UsageError
from ...options import OpenOptions, RunOptions, WriteRequest
from ..help import READING, about
from ..layout_options import LayoutCommand, add_layout_options
from ..shared_options import EDITS, add_shared_options, pick_keywords
from ..terminal import Json, Quiet, Verbose, split_commas
from .arguments import AdapterConfig, LoraAlpha, Rslora, run_and_print

__all__ = ["MergeCommand", "merge"]


#: What applies to the optimizer, or to the names that a trainer keeps.
_OF_TRAINING = (
    "canonical_keys",
    "keys",
    "strip_wrappers",
    "vocab_size",
    "regroup",
    "dequantize",
    "quantize",
    "map",
    *EDITS,
    "workers",
)


class MergeCommand(LayoutCommand):
    """Writes weights in any layout; which adapter is meant, the command's own options say."""

    without = ("--adapter", "--adapter-name", "--adapter-config", "--lora-alpha", "--rslora", "--base-model")


@about(
    ("A base model and PEFT's folder", "ckpttool adapter merge base lora/adapter merged"),
    (
        "The state of a job, which holds both",
        "ckpttool adapter merge lora/ckpt merged2 --adapter-config lora/adapter --config base",
    ),
    ("As the start of another job", "ckpttool adapter merge base lora/adapter merged3 --to dcp --world-size 3"),
    exits=(*READING, 5, 6),
    meaning={3: "cannot be merged exactly; training state would be left out", 5: "the result, read back, differs"},
)
@add_shared_options("weights", *_OF_TRAINING)
def merge(
    ctx: typer.Context,
    paths: Annotated[
        list[str],
        typer.Argument(
            help="Base model, adapter and destination; or a checkpoint that holds both, and the destination.",
            metavar="BASE [ADAPTER] DST",
            show_default=False,
        ),
    ],
    writing: WriteRequest,
    reading: OpenOptions,
    running: RunOptions,
    adapter_name: Annotated[
        str | None,
        typer.Option(
            "--adapter-name",
            "--adapter",
            help="Which adapters, merged in this order, where there are several.",
            metavar="NAME,...",
        ),
    ] = None,
    adapter_config: AdapterConfig = None,
    lora_alpha: LoraAlpha = None,
    rslora: Rslora = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a model with its LoRA merged, in any layout; the weights are those of PEFT's merge_and_unload, bit for bit.

    --config names the base model's config, --adapter-config the folder with adapter_config.json. Without --to the model
    is written as hf.
    """
    from ...engine.adapter import adapter_merge, choose_layout_or_hf

    if len(paths) not in (2, 3):
        raise UsageError(
            f"{len(paths)} paths were given. Write: ckpttool adapter merge BASE ADAPTER DST, or: ckpttool adapter "
            "merge SRC DST.",
            code="CKPT0201",
        )
    src, adapter, dst = paths[0], paths[1] if len(paths) == 3 else None, paths[-1]
    writing = add_layout_options(ctx, replace(writing, to=choose_layout_or_hf(writing.to, dst).name), dst)
    run_and_print(
        lambda meter: adapter_merge(
            src,
            dst,
            adapter=adapter,
            adapter_name=None if adapter_name is None else split_commas(adapter_name),
            adapter_config=adapter_config,
            lora_alpha=lora_alpha,
            rslora=rslora,
            **pick_keywords(adapter_merge, writing, reading, replace(running, progress=meter)),
        ),
        as_json=as_json,
        quiet=quiet,
        verbose=verbose,
    )
