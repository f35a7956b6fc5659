"""`ckpttool adapter merge`: parse, call, print."""

from __future__ import annotations

from typing import Annotated

import typer

from ...errors import UsageError
from ...options import OpenOptions
from ..help import READING, about
from ..layout_options import LayoutCommand, given
from ..reading import NOTHING_ASKED, reading_keywords, reads
from ..terminal import (
    Cast,
    Drop,
    Dtype,
    Force,
    IgnoreRecorded,
    Json,
    MaxMemory,
    NoVerify,
    Quiet,
    Threads,
    To,
    Verbose,
    WorldSize,
    bytes_of,
    cast_rules,
    comma,
)
from .arguments import AdapterConfig, LoraAlpha, Rslora, run

__all__ = ["MergeCommand", "merge"]


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
@reads()
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
    to: To = None,
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
    world_size: WorldSize = None,
    reading: OpenOptions = NOTHING_ASKED,
    dtype: Dtype = None,
    cast: Cast = None,
    ignore_recorded_digests: IgnoreRecorded = False,
    max_memory: MaxMemory = None,
    jobs: Threads = 2,
    drop: Drop = False,
    force: Force = False,
    no_verify: NoVerify = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a model with its LoRA merged, in any layout; the weights are those of PEFT's merge_and_unload, bit for bit.

    --config names the base model's config, --adapter-config the folder with adapter_config.json. Without --to the model
    is written as hf.
    """
    from ...engine.adapter import adapter_merge, merge_target
    from ...layouts import options_of

    if len(paths) not in (2, 3):
        raise UsageError(
            f"{len(paths)} paths were given. Write: ckpttool adapter merge BASE ADAPTER DST, or: ckpttool adapter "
            "merge SRC DST."
        )
    src, adapter, dst = paths[0], paths[1] if len(paths) == 3 else None, paths[-1]
    target = merge_target(to, dst)
    options = options_of(target, given(ctx))
    run(
        lambda meter: adapter_merge(
            src,
            dst,
            adapter=adapter,
            adapter_name=comma(adapter_name),
            adapter_config=adapter_config,
            lora_alpha=lora_alpha,
            rslora=rslora,
            to=target.name,
            options=options,
            world_size=world_size,
            dtype=dtype,
            cast=cast_rules(cast),
            drop=drop,
            force=force,
            verify=not no_verify,
            ignore_recorded_digests=ignore_recorded_digests,
            max_memory_bytes=bytes_of(max_memory) if max_memory else None,
            threads=jobs,
            progress=meter,
            **reading_keywords(reading),
        ),
        as_json=as_json,
        quiet=quiet,
        verbose=verbose,
    )
