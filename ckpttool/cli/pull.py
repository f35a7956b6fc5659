"""`ckpttool pull`: parse, call, print."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ..options import DEFAULT_LAYOUT, OpenOptions, RunOptions, WriteRequest
from .help import READING, about
from .layout_options import add_layout_options
from .results import print_notes, print_result
from .shared_options import EDITS, add_shared_options
from .terminal import Json, Meter, Quiet, Verbose, print_json, print_left_behind, say

__all__ = ["pull"]


#: What `ckpttool convert hf://...` has besides.
_ONLY_OF_CONVERT = (
    "canonical_keys",
    "keys",
    "strip_wrappers",
    "vocab_size",
    "regroup",
    "dequantize",
    "quantize",
    "map",
    *EDITS,
    "verify",
    "max_memory_bytes",
    "workers",
    "prove_logits",
)


@about(
    ("A checkpoint for 8 ranks", "ckpttool pull hf://org/llama-3 pulled --world-size 8"),
    ("A branch, as DeepSpeed files", "ckpttool pull hf://org/llama-3@bf16 pulled --to zero3 -n 4"),
    ("One file", "ckpttool pull hf://org/llama-3 llama-3.pt --to full"),
    exits=(*READING, 5, 6),
    meaning={5: "what was read is not what was pushed"},
)
@add_shared_options("weights", *_ONLY_OF_CONVERT, to=DEFAULT_LAYOUT)
def pull(
    ctx: typer.Context,
    repository: Annotated[
        str, typer.Argument(help="A model repository: hf://org/name, or hf://org/name@revision.", show_default=False)
    ],
    dst: Annotated[str, typer.Argument(help="Where to write the checkpoint.", show_default=False)],
    writing: WriteRequest,
    reading: OpenOptions,
    running: RunOptions,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit, if the URL does not name one.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Download a repository of the Hugging Face Hub, pinned to one commit, as a checkpoint in any layout."""
    from ..hub.pull import pull_repository

    writing = add_layout_options(ctx, writing, dst)
    with Meter(quiet) as meter:
        done = pull_repository(
            repository,
            dst,
            revision=revision,
            reading=reading,
            writing=writing,
            running=replace(running, progress=meter),
        )
    result, notes = done.result, [*done.result.notes, *done.notes]
    if as_json:
        told = {"url": done.url, "commit": done.commit, "compared": done.compared, **result.to_json()}
        print_json({**told, "notes": notes, **meter.measure_costs()})
        return
    print_notes(notes, quiet)
    print_left_behind(result.dropped, quiet, verbose)
    say(f"commit {done.commit}")
    equal = f", {done.compared:,} digests equal to those that were pushed" if done.compared else ""
    print_result(result, done.url, meter, quiet, f", read back and equal{equal}")
