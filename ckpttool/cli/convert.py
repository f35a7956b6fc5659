"""`ckpttool convert`: parse, call, print."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from .help import READING, about
from .layout_options import given
from .terminal import (  # fmt: skip
    AllowEqualRanks,
    AllowMixedSteps,
    CanonicalKeys,
    Cast,
    Config,
    Drop,
    Dtype,
    FlatLayout,
    Force,
    From,
    IgnoreRecorded,
    Json,
    Like,
    Meter,
    Only,
    Quiet,
    Src,
    Tag,
    Threads,
    To,
    WorldSize,
    Wrap,
    bytes_of,
    cast_rules,
    comma,
    left_behind,
    note,
    peak,
    print_json,
    ranks,
)

if TYPE_CHECKING:
    from ..engine.planning import Plan

__all__ = ["convert"]


@about(
    ("A model for from_pretrained", "ckpttool convert run/ckpt hf --to hf --config llama"),
    ("The same job on 3 ranks", "ckpttool convert run/ckpt dcp3 --to dcp --world-size 3"),
    ("One file for torch.load", "ckpttool convert run/ckpt step3.pt"),
    ("One file of weights", "ckpttool convert run/ckpt weights.safetensors --config llama"),
    (
        "What would a DeepSpeed folder take? Nothing is written",
        "ckpttool convert run/ckpt zero3 --to zero3 -n 8 --dry-run",
    ),
    exits=(*READING, 5, 6),
    meaning={5: "the result, read back, differs"},
)
def convert(
    ctx: typer.Context,
    src: Src,
    dst: Annotated[
        str,
        typer.Argument(help="Where the new checkpoint shall be: a path, or an s3:// or gs:// URL.", show_default=False),
    ],
    to: To = None,
    from_: From = None,
    world_size: WorldSize = None,
    only: Only = None,
    dtype: Dtype = None,
    cast: Cast = None,
    config: Config = None,
    like: Like = None,
    flat_layout: FlatLayout = None,
    wrap: Wrap = None,
    tag: Tag = None,
    allow_equal_ranks: AllowEqualRanks = False,
    allow_mixed_steps: AllowMixedSteps = False,
    canonical_keys: CanonicalKeys = False,
    max_memory: Annotated[
        str | None, typer.Option("--max-memory", help="Memory budget; buffers shrink or grow to fit.")
    ] = None,
    jobs: Threads = 2,
    drop: Drop = False,
    ignore_recorded_digests: IgnoreRecorded = False,
    force: Force = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print what would be written and the free space, and stop; fails where the run would."
        ),
    ] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not read the result back from disk.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Convert a checkpoint to another layout or world size."""
    from ..engine import conversion, destination, opening, planning
    from ..layouts import options_of, target_of

    reading = opening.OpenOptions(
        source_layout=from_, only=comma(only), config=config, like=like, flat_layout=flat_layout, wrap=comma(wrap), tag=tag,
        allow_equal_ranks=allow_equal_ranks, allow_mixed_steps=allow_mixed_steps,
    )  # fmt: skip
    target = target_of(to, dst)
    writing = planning.WriteRequest(
        to=target.name, options=options_of(target, given(ctx)), world_size=world_size, dtype=dtype, cast=cast_rules(cast),
        canonical_keys=canonical_keys, drop=drop, ignore_recorded_digests=ignore_recorded_digests,
    )  # fmt: skip
    if dry_run:
        with planning.plan_with(src, dst, reading, writing) as planned:
            _dry_run(planned, destination.check_destination(src, dst, planned, force), as_json)
        return
    meter = Meter(quiet)
    began = time.monotonic()
    try:
        done = conversion.convert_with(
            src, dst, reading, writing,
            conversion.RunOptions(
                force=force, verify=not no_verify, max_memory_bytes=bytes_of(max_memory) if max_memory else None,
                threads=jobs, progress=meter,
            ),
        )  # fmt: skip
    finally:
        meter.close()
    seconds = time.monotonic() - began
    if as_json:
        from dataclasses import asdict

        print_json({**asdict(done), "seconds": round(seconds, 3), "peak_memory_mib": int(peak().split()[1])})
        return
    for text in done.notes:
        note(f"note: {text}", quiet)
    left_behind(done.dropped, quiet)
    from ..engine.inspect import human

    where = f" for {ranks(done.world_size)}" if done.world_size else ""
    note(
        f"{done.layout_from} -> {done.layout_to}{where}: {done.tensors:,} tensors, {human(done.written_bytes)} in "
        f"{seconds:.1f} s, {peak()}"
        + (", read back and equal" if done.verified else ", not read back")
        + (f", {done.compared:,} tensors have the recorded digests" if done.compared else ""),
        quiet,
    )
    for component, root in done.digest.items():
        print(f"digest {component:10s} blake3:{root}")


def _dry_run(planned: Plan, free: int | None, as_json: bool) -> None:
    from ..engine.inspect import human

    opened, draft, target = planned.opened, planned.draft, planned.target
    files = [(f.name, f.size) for f in draft.files]
    if as_json:
        print_json({
            "from": opened.layout.name, "to": target.name, "world_size": draft.checkpoint.world_size,
            "tensors": len(draft.checkpoint.tensors), "source_bytes": opened.checkpoint.nbytes,
            "destination_bytes": draft.nbytes, "free_bytes": free, "files": [{"name": n, "bytes": b} for n, b in files],
            "dropped": [{"name": d.name, "bytes": d.nbytes, "why": d.why} for d in draft.dropped],
            "notes": [*opened.checkpoint.notes, *draft.notes],
            "not_read": [r.to_json() for r in opened.checkpoint.unread],
        })  # fmt: skip
        return
    world = f" for {ranks(draft.checkpoint.world_size)}" if draft.checkpoint.world_size else ""
    room = "" if free is None else f", {human(free)} free there"
    print(
        f"{opened.layout.name} -> {target.name}{world}: {len(draft.checkpoint.tensors):,} tensors, about "
        f"{human(draft.nbytes)}{room}"
    )
    for name, size in files[:40]:
        print(f"  {name:44s} {human(size):>12s}")
    if len(files) > 40:
        print(f"  ... {len(files) - 40} more files")
    for text in [*opened.checkpoint.notes, *draft.notes]:
        print(f"note: {text}")
    sys.stdout.flush()
    left_behind([(d.name, d.nbytes, d.why) for d in draft.dropped], False)
