"""`ckpttool push`: parse, call, print."""

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
    IgnoreRecorded,
    Json,
    Latest,
    Meter,
    Quiet,
    Src,
    Verbose,
    cast_rules,
    left_behind,
    newest_of,
    note,
    peak,
    print_json,
    say,
)

__all__ = ["push"]

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be uploaded; upload nothing.")]


@about(
    ("A private repository", "ckpttool push run/ckpt hf://org/llama-3 --config llama"),
    ("In bfloat16, as a pull request", "ckpttool push run/ckpt hf://org/llama-3 --config llama --dtype bf16 --pr"),
    ("What would be sent?", "ckpttool push run/ckpt hf://org/llama-3 --config llama --dry-run"),
    exits=(*READING, 5, 6),
    meaning={6: "another run pushes there, or the branch has moved"},
)
@reads("only")
def push(
    ctx: typer.Context,
    src: Src,
    target: Annotated[
        str, typer.Argument(help="A model repository: hf://org/name, or hf://org/name@branch.", show_default=False)
    ],
    public: Annotated[
        bool, typer.Option("--public/--private", help="Who may read a new repository; an existing one is not changed.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch to commit to; created if it is missing.")
    ] = None,
    pr: Annotated[bool, typer.Option("--pr", help="Open a pull request instead of committing.")] = False,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Title of the commit.")] = None,
    reading: OpenOptions = NOTHING_ASKED,
    dtype: Dtype = None,
    cast: Cast = None,
    latest: Latest = False,
    ignore_recorded_digests: IgnoreRecorded = False,
    stage: Annotated[
        str | None,
        typer.Option(
            "--stage",
            help="Write the files to this folder first and upload those (by Xet if the Hub offers it).",
            metavar="DIR",
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, help="Number of files hashed and uploaded at the same time.")
    ] = 4,
    drop: Drop = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Upload a checkpoint to the Hugging Face Hub as a model that from_pretrained loads, without a copy on disk."""
    from dataclasses import asdict

    from ..engine.planning import WriteRequest
    from ..hub.push import push_with
    from ..layouts import find, options_of

    writing = WriteRequest(
        options=options_of(find("hf"), given(ctx)),
        dtype=dtype,
        cast=cast_rules(cast),
        drop=drop,
        ignore_recorded_digests=ignore_recorded_digests,
    )
    src = newest_of(src, latest, quiet or as_json)
    meter = Meter(quiet)
    began = time.monotonic()
    try:
        done = push_with(
            src,
            target,
            reading,
            writing,
            revision=revision,
            public=public,
            pull_request=pr,
            message=message,
            stage=stage,
            threads=jobs,
            dry_run=dry_run,
            progress=meter,
        )
    finally:
        meter.close()
    seconds = time.monotonic() - began
    if as_json:
        print_json(
            {
                **asdict(done),
                "dropped": [{"name": n, "bytes": b, "why": why} for n, b, why in done.dropped],
                "dry_run": dry_run,
                "seconds": round(seconds, 3),
                "peak_memory_mib": int(peak().split()[1]),
            }
        )
        return
    from ..engine.inspect import human

    for text in done.notes:
        note(f"note: {text}", quiet)
    left_behind(done.dropped, quiet, verbose)
    if any(why.startswith("hf holds weights") for _, _, why in done.dropped):
        note("(--include-optimizer pushes it too)", quiet)
    for name in done.deleted:
        note(f"deleted: {name}, of other weights" if not dry_run else f"would be deleted: {name}", quiet)
    kind = "private" if done.private else "public"
    where = done.url + (f"@{done.revision}" if done.revision else "")
    if dry_run:
        new = "new, " if done.created else ""
        say(f"{done.layout_from} -> {where} ({new}{kind}): {len(done.files)} files, {human(sum(done.files.values()))}")
        for name, size in sorted(done.files.items()):
            say(f"  {name:44s} {human(size):>12s}" + ("  there already" if name in done.there else ""))
        say("  and README.md, ckpttool.json; nothing was sent.")
        return
    if done.commit is None:
        say(f"{where} ({kind}) has all {len(done.files)} files already; nothing was sent, no commit made.")
    else:
        sent = f"{len(done.sent)} files sent ({human(sum(done.sent.values()))})"
        there = f", {len(done.there)} there already" if done.there else ""
        note(f"{done.layout_from} -> {where} ({kind}): {sent}{there} in {seconds:.1f} s, {peak()}", quiet)
        note(f"the Hub has the hash of every one of the {len(done.files)} files", quiet)
        say(f"commit {done.commit}  {done.page}")
    for component, root in done.digest.items():
        say(f"digest {component:10s} blake3:{root}")
