"""`ckpttool audit restore`: parse, call, print."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ...options import OpenOptions, RunOptions, WriteRequest
from ..help import READING, about
from ..layout_options import add_layout_options
from ..results import describe_read_back, print_notes, print_result
from ..shared_options import EDITS, add_shared_options
from ..terminal import Json, Meter, Quiet, print_json
from .audit_arguments import ArchivePath, Identity, Jobs, Scratch, choose_thread_count

__all__ = ["restore"]


#: What the archive says itself, or what applies to the state of a job in other layouts.
_NOT_OF_ARCHIVES = (
    "source_layout",
    "tag",
    "allow_equal_ranks",
    "allow_mixed_steps",
    "cast",
    "canonical_keys",
    "keys",
    "strip_wrappers",
    "vocab_size",
    "regroup",
    "dequantize",
    "quantize",
    "map",
    *EDITS,
    "ignore_recorded_digests",
    "threads",
    "workers",
    "prove_logits",
)


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
@add_shared_options("weights", *_NOT_OF_ARCHIVES)
def restore(
    ctx: typer.Context,
    archive: ArchivePath,
    dst: Annotated[str, typer.Argument(help="Where to write the checkpoint.", show_default=False)],
    writing: WriteRequest,
    reading: OpenOptions,
    running: RunOptions,
    identity: Identity = None,
    scratch: Scratch = None,
    jobs: Jobs = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the state of an archive in any layout, comparing every tensor with the manifest.

    `ckpttool convert` does the same for archives that are not encrypted.
    """
    from ...audit.export import restore_archive as run

    writing = add_layout_options(ctx, writing, dst)
    with Meter(quiet) as meter:
        done = run(
            archive,
            dst,
            identities=identity or (),
            scratch=scratch,
            reading=reading,
            writing=writing,
            running=replace(running, threads=choose_thread_count(jobs), progress=meter),
        )
    if as_json:
        print_json({**done.to_json(), **meter.measure_costs()})
        return
    print_notes(done.notes, quiet)
    print_result(done, archive, meter, quiet, f", equal to the manifest{describe_read_back(done)}")
