"""`ckpttool push`: parse, call, print."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..options import HUB_LAYOUT, OpenOptions, WriteRequest
from .help import READING, about
from .layout_options import add_layout_options
from .results import print_notes
from .shared_options import EDITS, add_shared_options
from .terminal import (
    Json,
    Latest,
    Meter,
    Quiet,
    Src,
    Verbose,
    describe_memory,
    find_newest,
    note,
    print_json,
    print_left_behind,
    say,
)

if TYPE_CHECKING:
    from ..hub.push import Pushed

__all__ = ["push"]

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be uploaded; upload nothing.")]


#: What applies to layouts that a job loads.
_OF_JOBS = (
    "to",
    "world_size",
    "canonical_keys",
    "keys",
    "strip_wrappers",
    "vocab_size",
    "regroup",
    "dequantize",
    "quantize",
    "map",
    *EDITS,
)


@about(
    ("A private repository", "ckpttool push run/ckpt hf://org/llama-3 --config llama"),
    ("In bfloat16, as a pull request", "ckpttool push run/ckpt hf://org/llama-3 --config llama --dtype bf16 --pr"),
    ("What would be sent?", "ckpttool push run/ckpt hf://org/llama-3 --config llama --dry-run"),
    exits=(*READING, 5, 6),
    meaning={6: "another run pushes there, or the branch has moved"},
)
@add_shared_options("only", *_OF_JOBS)
def push(
    ctx: typer.Context,
    src: Src,
    target: Annotated[
        str, typer.Argument(help="A model repository: hf://org/name, or hf://org/name@branch.", show_default=False)
    ],
    writing: WriteRequest,
    reading: OpenOptions,
    public: Annotated[
        bool, typer.Option("--public/--private", help="Who may read a new repository; an existing one is not changed.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch to commit to; created if it is missing.")
    ] = None,
    pr: Annotated[bool, typer.Option("--pr", help="Open a pull request instead of committing.")] = False,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Title of the commit.")] = None,
    latest: Latest = False,
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
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Upload a checkpoint to the Hugging Face Hub as a model that from_pretrained loads, without a copy on disk."""
    from dataclasses import asdict

    from ..hub.push import push_checkpoint

    writing = add_layout_options(ctx, replace(writing, to=HUB_LAYOUT), target)
    src = find_newest(src, latest, quiet or as_json)
    with Meter(quiet) as meter:
        done = push_checkpoint(
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
    if as_json:
        print_json(
            {
                **asdict(done),
                "dropped": [{"name": n, "bytes": b, "why": why} for n, b, why in done.dropped],
                "dry_run": dry_run,
                **meter.measure_costs(),
            }
        )
        return
    print_notes(done.notes, quiet)
    print_left_behind(done.dropped, quiet, verbose)
    if any(why.startswith("hf holds weights") for _, _, why in done.dropped):
        note("(--include-optimizer pushes it too)", quiet)
    for name in done.deleted:
        note(f"deleted: {name}, of other weights" if not dry_run else f"would be deleted: {name}", quiet)
    if dry_run:
        _print_push_preview(done)
    else:
        _print_push_result(done, meter, quiet)


def _describe_repository(done: Pushed) -> tuple[str, str]:
    """Return (the URL of the repository with the branch, "private" or "public")."""
    return done.url + (f"@{done.revision}" if done.revision else ""), "private" if done.private else "public"


def _print_push_preview(done: Pushed) -> None:
    """Print on stdout which files a push would send."""
    from ..engine.inspect import human

    where, kind = _describe_repository(done)
    new = "new, " if done.created else ""
    say(f"{done.layout_from} -> {where} ({new}{kind}): {len(done.files)} files, {human(sum(done.files.values()))}")
    for name, size in sorted(done.files.items()):
        say(f"  {name:44s} {human(size):>12s}" + ("  there already" if name in done.there else ""))
    say("  and README.md, ckpttool.json; nothing was sent.")


def _print_push_result(done: Pushed, meter: Meter, quiet: bool) -> None:
    """Print what a push has uploaded: the commit, or that there is none, and the digests on stdout, the rest on stderr.

    Args:
        meter: has measured how long the push took.
        quiet: print nothing on stderr.
    """
    from ..engine.inspect import human

    where, kind = _describe_repository(done)
    if done.commit is None:
        say(f"{where} ({kind}) has all {len(done.files)} files already; nothing was sent, no commit made.")
    else:
        sent = f"{len(done.sent)} files sent ({human(sum(done.sent.values()))})"
        there = f", {len(done.there)} there already" if done.there else ""
        note(
            f"{done.layout_from} -> {where} ({kind}): {sent}{there} in {meter.seconds:.1f} s, {describe_memory()}",
            quiet,
        )
        note(f"the Hub has the hash of every one of the {len(done.files)} files", quiet)
        say(f"commit {done.commit}  {done.page}")
    for component, root in done.digest.items():
        say(f"digest {component:10s} blake3:{root}")
