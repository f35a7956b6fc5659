"""`ckpttool convert`: parse, call, print."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from ..options import OpenOptions
from .help import READING, about
from .layout_options import given
from .reading import NOTHING_ASKED, reads
from .terminal import (
    CanonicalKeys,
    Cast,
    Drop,
    Dtype,
    Force,
    IgnoreRecorded,
    Json,
    Latest,
    MaxMemory,
    Meter,
    NameMap,
    NoVerify,
    Quiet,
    Src,
    Threads,
    To,
    Verbose,
    Workers,
    WorldSize,
    bytes_of,
    cast_rules,
    left_behind,
    newest_of,
    note,
    peak,
    print_json,
    ranks,
    say,
)

if TYPE_CHECKING:
    from ..engine.dry_run import DryRun

__all__ = ["convert"]

#: {what `--for` calls a trainer: (the layout that it resumes from, whether with canonical keys)}
TRAINERS = {
    "accelerate": ("accelerate", False),
    "trainer": ("trainer", False),
    "lightning": ("lightning", False),
    "torchtitan": ("torchtitan", False),
    "deepspeed": ("zero3", False),
    "torch": ("dcp", True),
}

_MEANT = {"trainer": "Hugging Face Trainer, TRL", "torch": "a loop of your own, with dcp.load"}

#: {a trainer that --for does not write for: why, and what to do}
_NOT_WRITTEN = {
    "verl": "it resumes from pickled DTensors, which are bound to one version of torch and to the ranks that wrote "
    "them. Write the weights with --to hf, and give that folder as the path of the model.",
    "torchtune": "a recipe resumes from its own recipe_state.pt. Write the weights with --to hf, and give that folder "
    "as checkpoint_dir; or weights and optimizer under its names with --map torchtune-llama3, and put "
    "them into its two files (docs, torchtune).",
}


def _of_trainer(name: str, to: str | None) -> tuple[str, bool]:
    """The layout that a trainer resumes from, and whether it asks for canonical keys.

    Raises:
        UsageError: there is no such trainer, or `--to` asks for something else.
    """
    found = TRAINERS.get(name.lower())
    if why := _NOT_WRITTEN.get(name.lower()):
        raise UsageError(f"ckpttool reads checkpoints of {name}, but does not write them: {why}")
    if found is None:
        known = ", ".join(n + (f" ({_MEANT[n]})" if n in _MEANT else "") for n in TRAINERS)
        raise UsageError(f"Unknown trainer {name!r}. Choose one of: {known}.")
    if to is not None:
        raise UsageError(f"--for {name} chooses the layout {found[0]}; leave --to {to} out, or --for.")
    return found


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
    exits=(*READING, 5, 6),
    meaning={5: "the result, read back, differs"},
)
@reads()
def convert(
    ctx: typer.Context,
    src: Src,
    dst: Annotated[
        str,
        typer.Argument(help="Where to write the new checkpoint: a path, or an s3:// or gs:// URL.", show_default=False),
    ],
    to: To = None,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for",
            help=f"Trainer that will resume from it, instead of --to: {', '.join(TRAINERS)}.",
            metavar="TRAINER",
            autocompletion=lambda: list(TRAINERS),
        ),
    ] = None,
    reading: OpenOptions = NOTHING_ASKED,
    world_size: WorldSize = None,
    dtype: Dtype = None,
    cast: Cast = None,
    latest: Latest = False,
    canonical_keys: CanonicalKeys = False,
    strip_wrappers: Annotated[
        bool,
        typer.Option(
            "--strip-wrappers",
            help="dcp, full: leave _orig_mod., module. and other wrappers out of the source's own keys.",
        ),
    ] = False,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            "--vocab-size",
            help="Rows of the embedding and the output layer: pad with zeros, or cut rows that hold nothing.",
            metavar="N",
        ),
    ] = None,
    regroup: Annotated[
        bool, typer.Option("--regroup", help="Give the optimizer the param groups of the checkpoint that --like names.")
    ] = False,
    dequantize: Annotated[
        list[str] | None,
        typer.Option(
            "--dequantize",
            help="Write quantised tensors (torchao's 8-bit, 4-bit and fp8 optimizers) whose names match as float32, "
            "the exact value of each code; may be repeated. To move to plain AdamW: 'optim.*'.",
            metavar="GLOB",
        ),
    ] = None,
    name_map: NameMap = None,
    max_memory: MaxMemory = None,
    jobs: Threads = 2,
    workers: Workers = None,
    drop: Drop = False,
    ignore_recorded_digests: IgnoreRecorded = False,
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
    force: Force = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print bytes to read and write, free space, memory and time; write nothing.",
        ),
    ] = False,
    no_verify: NoVerify = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Convert a checkpoint to another layout or world size."""
    from ..engine import conversion, planning
    from ..engine.dry_run import dry_run_with
    from ..layouts import options_of, target_of

    src = newest_of(src, latest, quiet or as_json)
    reading = replace(reading, salvage=salvage, fill_from=fill_from)
    if for_ is not None:
        to, own = _of_trainer(for_, to)
        canonical_keys = canonical_keys or own
    target = target_of(to, dst)
    writing = planning.WriteRequest(
        to=target.name,
        options=options_of(target, given(ctx)),
        world_size=world_size,
        dtype=dtype,
        cast=cast_rules(cast),
        canonical_keys=canonical_keys,
        drop=drop,
        ignore_recorded_digests=ignore_recorded_digests,
        strip_wrappers=strip_wrappers,
        regroup=regroup,
        vocab_size=vocab_size,
        dequantize=dequantize,
        map=name_map,
    )
    meter = Meter(quiet)
    running = conversion.RunOptions(
        force=force,
        verify=not no_verify,
        max_memory_bytes=bytes_of(max_memory) if max_memory else None,
        threads=jobs,
        workers=workers,
        progress=meter,
    )
    if dry_run:
        try:
            found = dry_run_with(src, dst, reading, writing, running)
        finally:
            meter.close()
        if as_json:
            print_json(found.to_json())
        else:
            _print_plan(found, verbose)
        return
    began = time.monotonic()
    try:
        done = conversion.convert_with(src, dst, reading, writing, running)
    finally:
        meter.close()
    seconds = time.monotonic() - began
    if as_json:
        print_json({**done.to_json(), "seconds": round(seconds, 3), "peak_memory_mib": int(peak().split()[1])})
        return
    for text in done.notes:
        note(f"note: {text}", quiet)
    _print_changed(done.changed, quiet, verbose)
    left_behind(done.dropped, quiet, verbose)
    from ..engine.inspect import human

    where = f" for {ranks(done.world_size)}" if done.world_size else ""
    if done.workers is not None:
        count = done.workers["parts"]
        note(
            f"{done.workers['name']} filled {count} part{'s'[: count != 1]}; {done.workers['again']} were submitted "
            "again",
            quiet,
        )
    note(
        f"{done.layout_from} -> {done.layout_to}{where}: {done.tensors:,} tensors, {human(done.written_bytes)} in "
        f"{seconds:.1f} s, {peak()}"
        + (", read back and equal" if done.verified else ", not read back")
        + (f", {done.compared:,} tensors have the recorded digests" if done.compared else ""),
        quiet,
    )
    for component, root in done.digest.items():
        say(f"digest {component:10s} blake3:{root}")


def _print_changed(changed: dict[str, str], quiet: bool, verbose: bool) -> None:
    """Print a line for each way in which entries were changed; with `verbose`, every name."""
    of: dict[str, list[str]] = {}
    for name, how in changed.items():
        of.setdefault(how, []).append(name)
    for how, names in of.items():
        entries = "1 entry" if len(names) == 1 else f"{len(names):,} entries"
        note(f"changed: {entries}, first {names[0]}: {how}", quiet)
        for name in names if verbose else ():
            note(f"  {name}", quiet)


def _print_plan(found: DryRun, verbose: bool) -> None:
    from ..engine.inspect import human

    world = f" for {ranks(found.world_size)}" if found.world_size else ""
    room = "" if found.free_bytes is None else f", {human(found.free_bytes)} free there"
    say(
        f"{found.layout_from} -> {found.layout_to}{world}: {found.tensors:,} tensors, about "
        f"{human(found.written_bytes)}{room}"
    )
    say(
        f"reads {human(found.read_bytes)}, writes {human(found.written_bytes)}: about {_duration(found.seconds)} if "
        f"the disks do {human(found.bytes_per_second)}/s; memory: at most "
        f"{human(found.memory_bytes)}{_of_workers(found)}"
    )
    for file in found.files[:40]:
        say(f"  {file['name']:44s} {human(file['bytes']):>12s}")
    if len(found.files) > 40:
        say(f"  ... {len(found.files) - 40} more files")
    for text in found.notes:
        say(f"note: {text}")
    sys.stdout.flush()
    left_behind([(d["name"], d["bytes"], d["why"]) for d in found.dropped], False, verbose)


def _of_workers(found: DryRun) -> str:
    from ..engine.inspect import human

    if found.workers is None:
        return ""
    each = human(found.workers["memory_bytes"])
    if found.workers["count"] is None:
        return f" here, and {each} in each worker of {found.workers['name']}"
    return f" in all, {each} in each of {found.workers['name']}"


def _duration(seconds: float) -> str:
    """1 s, 4 min, 2.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
