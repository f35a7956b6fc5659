"""`ckpttool audit restore`: parse, call, print."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from ...options import OpenOptions
from ..help import READING, about
from ..layout_options import given
from ..reading import NOTHING_ASKED, reads
from ..terminal import (
    Drop,
    Dtype,
    Force,
    Json,
    MaxMemory,
    Meter,
    NoVerify,
    Quiet,
    To,
    WorldSize,
    bytes_of,
    note,
    peak,
    print_json,
    ranks,
    say,
)
from .audit_arguments import ArchivePath, Identity, Jobs, Scratch, threads_of

__all__ = ["restore"]


@about(
    ("For 3 ranks", "ckpttool audit restore store/step3.tar.zst dcp3 --to dcp --world-size 3"),
    ("One file, of the weights", "ckpttool audit restore store/step3.tar.zst weights.pt --only model"),
    (
        "An encrypted archive",
        "ckpttool audit restore store/step3.tar.zst.age step3.pt --identity keys/archive.key --scratch .",
    ),
    exits=(*READING, 5, 6),
    meaning={4: "damaged", 5: "the state is not the one in the manifest"},
)
@reads("source_layout", "tag", "allow_equal_ranks", "allow_mixed_steps")
def restore(
    ctx: typer.Context,
    archive: ArchivePath,
    dst: Annotated[str, typer.Argument(help="Where to write the checkpoint.", show_default=False)],
    to: To = None,
    world_size: WorldSize = None,
    reading: OpenOptions = NOTHING_ASKED,
    dtype: Dtype = None,
    identity: Identity = None,
    scratch: Scratch = None,
    max_memory: MaxMemory = None,
    jobs: Jobs = None,
    drop: Drop = False,
    force: Force = False,
    no_verify: NoVerify = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the state of an archive in any layout, comparing every tensor with the manifest.

    `ckpttool convert` does the same for archives that are not encrypted.
    """
    from ...audit.export import restore_with as run
    from ...engine.conversion import RunOptions
    from ...engine.inspect import human
    from ...engine.planning import WriteRequest
    from ...layouts import options_of, target_of

    target = target_of(to, dst)
    meter = Meter(quiet)
    began = time.monotonic()
    try:
        done = run(
            archive,
            dst,
            identities=identity or (),
            scratch=scratch,
            reading=reading,
            writing=WriteRequest(
                to=target.name, options=options_of(target, given(ctx)), world_size=world_size, dtype=dtype, drop=drop
            ),
            running=RunOptions(
                force=force,
                verify=not no_verify,
                max_memory_bytes=bytes_of(max_memory) if max_memory else None,
                threads=threads_of(jobs),
                progress=meter,
            ),
        )
    finally:
        meter.close()
    seconds = time.monotonic() - began
    if as_json:
        print_json({**done.to_json(), "seconds": round(seconds, 3), "peak_memory_mib": int(peak().split()[1])})
        return
    for text in done.notes:
        note(f"note: {text}", quiet)
    note(
        f"{archive} -> {done.layout_to}{f' for {ranks(done.world_size)}' if done.world_size else ''}: {done.tensors:,} "
        f"tensors, {human(done.written_bytes)} in {seconds:.1f} s, {peak()}, equal to the manifest"
        + (", read back and equal" if done.verified else ", not read back"),
        quiet,
    )
    for component, digest in done.digest.items():
        say(f"digest {component:10s} blake3:{digest}")
