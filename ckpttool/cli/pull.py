"""`ckpttool pull`: parse, call, print."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from ..options import OpenOptions
from .help import READING, about
from .layout_options import given
from .reading import NOTHING_ASKED, reads
from .terminal import (
    Cast,
    Drop,
    Dtype,
    Force,
    IgnoreRecorded,
    Json,
    Meter,
    Quiet,
    Threads,
    To,
    Verbose,
    WorldSize,
    cast_rules,
    left_behind,
    note,
    peak,
    print_json,
    ranks,
    say,
)

__all__ = ["pull"]


@about(
    ("A checkpoint for 8 ranks", "ckpttool pull hf://org/llama-3 pulled --world-size 8"),
    ("A branch, as DeepSpeed files", "ckpttool pull hf://org/llama-3@bf16 pulled --to zero3 -n 4"),
    ("One file", "ckpttool pull hf://org/llama-3 llama-3.pt --to full"),
    exits=(*READING, 5, 6),
    meaning={5: "what was read is not what was pushed"},
)
@reads()
def pull(
    ctx: typer.Context,
    repository: Annotated[
        str, typer.Argument(help="A model repository: hf://org/name, or hf://org/name@revision.", show_default=False)
    ],
    dst: Annotated[str, typer.Argument(help="Where to write the checkpoint.", show_default=False)],
    to: To = "dcp",
    world_size: WorldSize = None,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit, if the URL does not name one.")
    ] = None,
    reading: OpenOptions = NOTHING_ASKED,
    dtype: Dtype = None,
    cast: Cast = None,
    jobs: Threads = 2,
    drop: Drop = False,
    ignore_recorded_digests: IgnoreRecorded = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Convert a repository on the Hugging Face Hub, pinned to one commit, into a training checkpoint."""
    from ..engine.conversion import RunOptions
    from ..engine.planning import WriteRequest
    from ..hub.pull import pull_with as run
    from ..layouts import options_of, target_of

    layout = target_of(to, dst)
    meter = Meter(quiet)
    began = time.monotonic()
    try:
        done = run(
            repository,
            dst,
            revision=revision,
            reading=reading,
            writing=WriteRequest(
                to=layout.name,
                options=options_of(layout, given(ctx)),
                world_size=world_size,
                dtype=dtype,
                cast=cast_rules(cast),
                drop=drop,
                ignore_recorded_digests=ignore_recorded_digests,
            ),
            running=RunOptions(force=force, threads=jobs, progress=meter),
        )
    finally:
        meter.close()
    seconds, result = time.monotonic() - began, done.result
    if as_json:
        told = {"url": done.url, "commit": done.commit, "compared": done.compared, **result.to_json()}
        print_json(
            {
                **told,
                "notes": [*result.notes, *done.notes],
                "seconds": round(seconds, 3),
                "peak_memory_mib": int(peak().split()[1]),
            }
        )
        return
    from ..engine.inspect import human

    for text in [*result.notes, *done.notes]:
        note(f"note: {text}", quiet)
    left_behind(result.dropped, quiet, verbose)
    where = f" for {ranks(result.world_size)}" if result.world_size else ""
    equal = f", {done.compared:,} digests equal to those that were pushed" if done.compared else ""
    note(
        f"{done.url} -> {result.layout_to}{where}: {result.tensors:,} tensors, {human(result.written_bytes)} in "
        f"{seconds:.1f} s, {peak()}, read back and equal{equal}",
        quiet,
    )
    say(f"commit {done.commit}")
    for component, root in result.digest.items():
        say(f"digest {component:10s} blake3:{root}")
