"""`ckpttool convert`: parse, call, print."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError, argument
from ..options import OpenOptions, RunOptions, WriteRequest
from ..printable import count_noun
from .help import READING, about
from .layout_options import add_layout_options, list_trainers
from .results import describe_read_back, print_notes, print_result
from .shared_options import add_shared_options
from .terminal import (
    Json,
    Latest,
    Meter,
    Quiet,
    Src,
    Verbose,
    find_newest,
    note,
    print_json,
    print_left_behind,
    say,
)

if TYPE_CHECKING:
    from ..engine.conversion import ConvertResult
    from ..engine.dry_run import DryRun

__all__ = ["convert", "print_conversion", "print_dry_run"]


def _choose_layout_for_trainer(name: str, to: str | None) -> tuple[str, bool]:
    """Return (the layout that a trainer resumes from, whether it needs canonical keys).

    Args:
        name: the value of --for.
        to: the value of --to; None if it was not given.

    Raises:
        UsageError: the trainer is unknown, ckpttool does not write for it, or --to was given, too.
    """
    from ..layouts import list_resuming_programs

    known = list_resuming_programs()
    if name.lower() not in known:
        raise UsageError(
            f"Unknown trainer {name!r}. Choose one of: {', '.join(list_trainers(called=True))}.", code="CKPT0206"
        )
    layout, program = known[name.lower()]
    if program.refused:
        raise UsageError(
            f"ckpttool reads checkpoints of {program.name}, but does not write them: {program.refused}", code="CKPT0206"
        )
    if to is not None:
        raise UsageError(
            f"--for {name} chooses the layout {layout.name}; leave --to {to} out, or --for.", code="CKPT0204"
        )
    return layout.name, program.canonical_keys


@about(
    ("A model for from_pretrained", "ckpttool convert run/ckpt hf --to hf --config llama"),
    ("The same job on 3 ranks", "ckpttool convert run/ckpt dcp3 --to dcp --world-size 3"),
    ("The newest complete checkpoint of a run", "ckpttool convert run step.pt --latest"),
    ("A directory that Trainer resumes from", "ckpttool convert run/ckpt checkpoint-3 --for trainer -n 8"),
    ("One file for torch.load", "ckpttool convert run/ckpt step3.pt"),
    ("One file of weights", "ckpttool convert run/ckpt weights.safetensors --config llama"),
    (
        "What would a DeepSpeed folder take? Nothing is written",
        "ckpttool convert run/ckpt zero3 --to zero3 -n 8 --dry-run",
    ),
    (
        "A plan to review, which `ckpttool apply` runs",
        "ckpttool convert run/ckpt dcp8 --to dcp -n 8 --dry-run --plan plan.json",
    ),
    exits=(*READING, 5, 6),
    meaning={5: "the result, read back, differs"},
)
@add_shared_options()
def convert(
    ctx: typer.Context,
    src: Src,
    dst: Annotated[
        str,
        typer.Argument(
            help="Where to write the new checkpoint: a path, or an s3://, gs:// or az:// URL.", show_default=False
        ),
    ],
    writing: WriteRequest,
    reading: OpenOptions,
    running: RunOptions,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="Trainer that will resume from it, instead of --to: {trainers}.",
            metavar="TRAINER",
            autocompletion=lambda: list_trainers(),
        ),
    ] = None,
    latest: Latest = False,
    salvage: Annotated[
        bool,
        typer.Option(
            "--salvage", help="Of a damaged source, write the tensors that are whole; ckpttool.json lists the others."
        ),
    ] = False,
    fill_from: Annotated[
        str | None,
        typer.Option(
            "--fill-from", help="With --salvage: another step of the same run, for what is lost.", metavar="PATH"
        ),
    ] = None,
    deltas: Annotated[
        list[str] | None,
        typer.Option(
            "--apply",
            help="A delta of weights, or a folder of them, to apply; may be repeated, in order.",
            metavar="DELTA",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print bytes to read and write, free space, memory and time; write nothing.",
        ),
    ] = False,
    plan_file: Annotated[
        str | None,
        typer.Option(
            "--plan", help="With --dry-run: write the plan to this file, for `ckpttool apply`.", metavar="FILE"
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a checkpoint in another layout (Hugging Face, DCP, DeepSpeed, one file, ...) or for other ranks.

    It can also leave parts out, cast, dequantise, rename, and estimate (--dry-run). The source is not changed.
    """
    from ..engine.conversion import run_conversion
    from ..engine.dry_run import estimate_conversion

    if plan_file is not None and not dry_run:
        raise UsageError(
            f"{argument('plan', plan_file)} goes with {argument('dry_run', True)}, which writes the plan.",
            code="CKPT0204",
        )
    src = find_newest(src, latest, quiet or as_json)
    reading = replace(reading, salvage=salvage, fill_from=fill_from, apply=deltas)
    # the layout, and its own options
    if for_ is not None:
        to, own = _choose_layout_for_trainer(for_, writing.to)
        writing = replace(writing, to=to, canonical_keys=writing.canonical_keys or own)
    writing = add_layout_options(ctx, writing, dst)
    if dry_run:
        with Meter(quiet) as meter:
            found = estimate_conversion(src, dst, reading, writing, replace(running, progress=meter), plan_file)
        if as_json:
            print_json(found.to_json())
        else:
            print_dry_run(found, verbose)
        return
    with Meter(quiet) as meter:
        done = run_conversion(src, dst, reading, writing, replace(running, progress=meter))
    print_conversion(done, meter, as_json, quiet, verbose)


def print_conversion(done: ConvertResult, meter: Meter, as_json: bool, quiet: bool, verbose: bool) -> None:
    """Print the result of a conversion: as JSON on stdout, or its digests there and everything else on stderr.

    Args:
        meter: has measured how long the conversion took.
        as_json: print JSON.
        quiet: print only the digests.
        verbose: also print the name of every entry that was changed or not converted.
    """
    if as_json:
        print_json({**done.to_json(), **meter.measure_costs()})
        return
    print_notes(done.notes, quiet)
    _print_changed(done.changed, quiet, verbose)
    print_left_behind(done.dropped, quiet, verbose)
    if done.workers is not None:
        note(
            f"{done.workers['name']} filled {count_noun(done.workers['parts'], 'part')}; {done.workers['again']} were "
            "submitted again",
            quiet,
        )
    tensors = count_noun(done.compared, "tensor has", "tensors have")
    compared = f", {tensors} the recorded digests" if done.compared else ""
    print_result(done, done.layout_from, meter, quiet, describe_read_back(done) + compared)


def _print_changed(changed: dict[str, str], quiet: bool, verbose: bool) -> None:
    """Print a line on stderr for each kind of change that entries went through.

    Args:
        changed: {name of an entry: how it was changed}.
        quiet: print nothing.
        verbose: also print the name of every entry.
    """
    of: dict[str, list[str]] = {}
    for name, how in changed.items():
        of.setdefault(how, []).append(name)
    for how, names in of.items():
        note(f"changed: {count_noun(len(names), 'entry', 'entries')}, first {names[0]}: {how}", quiet)
        for name in names if verbose else ():
            note(f"  {name}", quiet)


_PARTS = {"params": "parameters", "grads": "gradients", "optimizer": "optimizer"}


def print_dry_run(found: DryRun, verbose: bool) -> None:
    """Print the result of a dry run; with `verbose`, also the name of every entry that would be changed or not
    converted."""
    from ..engine.inspect import human

    world = f" for {count_noun(found.world_size, 'rank')}" if found.world_size else ""
    room = "" if found.free_bytes is None else f", {human(found.free_bytes)} free there"
    say(
        f"{found.layout_from} -> {found.layout_to}{world}: {count_noun(found.tensors, 'tensor')}, about "
        f"{human(found.written_bytes)}{room}"
    )
    say(
        f"reads {human(found.read_bytes)}, writes {human(found.written_bytes)}: about "
        f"{_describe_duration(found.seconds)} if the disks do {human(found.bytes_per_second)}/s; memory: at most "
        f"{human(found.memory_bytes)}{_describe_memory_of_workers(found)}"
    )
    if (m := found.memory) is not None:
        sizes = ", ".join(f"{human(m[k])} {word}" for k, word in _PARTS.items())
        say(
            f"a job on {count_noun(found.world_size or 0, 'rank')}, {m['strategy']}, holds in each, but for "
            f"activations: {sizes} ({m['optimizer_is']}); {human(m['gathered'])} more at its peak"
        )
    for file in found.files[:40]:
        say(f"  {file['name']:44s} {human(file['bytes']):>12s}")
    if len(found.files) > 40:
        say(f"  ... {len(found.files) - 40} more files")
    for text in found.notes:
        say(f"note: {text}")
    sys.stdout.flush()
    _print_changed({c["name"]: c["how"] for c in found.changed}, False, verbose)
    print_left_behind([(d["name"], d["bytes"], d["why"]) for d in found.dropped], False, verbose)


def _describe_memory_of_workers(found: DryRun) -> str:
    """Return how the memory that a dry run estimates is divided among processes, as text; "" if no workers were
    requested."""
    from ..engine.inspect import human

    if found.workers is None:
        return ""
    each = human(found.workers["memory_bytes"])
    if found.workers["count"] is None:
        return f" here, and {each} in each worker of {found.workers['name']}"
    return f" in all, {each} in each of {found.workers['name']}"


def _describe_duration(seconds: float) -> str:
    """Return a duration as text: "1 s", "4 min", "2.5 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
