"""The command line: parse, call one function of the library, print. Data goes to stdout, everything else to stderr."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import time
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import EXIT_CODES, CkpttoolError, Interrupted, NoSpace, NotRecognised, UsageError
from . import hub
from .audit import app as audit_app
from .help import App, only_what_runs
from .layout_options import HfCommand, LayoutCommand, given
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
    OutputLost,
    Quiet,
    Src,
    Tag,
    Threads,
    WorldSize,
    Wrap,
    bytes_of,
    cast_rules,
    comma,
    draw,
    left_behind,
    not_read,
    note,
    peak,
    print_json,
    printable,
    ranks,
    refuse_empty,
    streams,
)

if TYPE_CHECKING:
    from ..engine.planning import Plan

__all__ = ["app", "main"]

_CODES = "  ·  ".join(f"{c} {t}" for c, t in EXIT_CODES)

app = App(
    name="ckpttool",
    help="Move PyTorch training checkpoints between layouts and world sizes, bit for bit, in constant memory.",
    epilog=f"Exit codes: {_CODES}",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(cls=LayoutCommand)
def convert(
    ctx: typer.Context,
    src: Src,
    dst: Annotated[
        str,
        typer.Argument(help="Where the new checkpoint shall be: a path, or an s3:// or gs:// URL.", show_default=False),
    ],
    to: Annotated[str | None, typer.Option("--to", help="Layout to write; `ckpttool layouts` lists them.")] = None,
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


@app.command()
def inspect(
    path: Src,
    show_tree: Annotated[bool, typer.Option("--tree", help="All names as a tree.")] = False,
    tensor: Annotated[
        str | None, typer.Option("--tensor", help="Where the chunks of some tensors lie.", metavar="GLOB")
    ] = None,
    from_: From = None,
    config: Config = None,
    like: Like = None,
    flat_layout: FlatLayout = None,
    wrap: Wrap = None,
    tag: Tag = None,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint is and what it lacks; reads headers only."""
    import fnmatch

    from ..engine import inspect as look
    from ..engine.opening import open as open_checkpoint

    with open_checkpoint(
        path, source_layout=from_, config=config, like=like, flat_layout=flat_layout, wrap=comma(wrap), tag=tag,
        allow_equal_ranks=True, allow_mixed_steps=True,
    ) as opened:  # fmt: skip
        if tensor is not None:
            ckpt = opened.locate()
            names = [n for n in ckpt.tensors if fnmatch.fnmatchcase(n, tensor)]
            if not names:
                raise UsageError(
                    f"no tensor matches {tensor!r}; there are {len(ckpt.tensors)}, first {next(iter(ckpt.tensors), None)}."
                )
            rows = look.tensor_rows(ckpt, names)
            if as_json:
                print_json(rows)
                return
            for r in rows:
                print(f"{r['name']}  {r['dtype']} {r['shape']}  {look.human(r['bytes'])}, {r['chunks']} chunks")
                for c in r["where"]:
                    spans = ", ".join(f"{a}:{a + n}" for a, n in zip(c["start"], c["shape"], strict=True))
                    print(f"    [{spans}]  {c['file']} bytes {c['offset']}..{c['offset'] + c['length']}")
            return
        s = look.summarise(opened.checkpoint, path)
        if as_json:
            listed = {n: [t.dtype, list(t.shape)] for n, t in opened.checkpoint.tensors.items()} if show_tree else None
            print_json({**s.to_json(), **({} if listed is None else {"names": listed})})
            return
        draw(look.screen(s), *([look.tree(opened.checkpoint)] if show_tree else []))


@app.command()
def diff(
    a: Src,
    b: Annotated[str, typer.Argument(help="Another checkpoint, in any layout.", show_default=False)],
    rtol: Annotated[float, typer.Option("--rtol", min=0, help="Relative tolerance.")] = 0.0,
    atol: Annotated[float, typer.Option("--atol", min=0, help="Absolute tolerance.")] = 0.0,
    only: Only = None,
    config: Config = None,
    like: Like = None,
    flat_layout: FlatLayout = None,
    wrap: Wrap = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare two checkpoints, whatever their layouts; exit 5 when they differ."""
    from ..engine.diff import diff as compare

    meter = Meter(quiet)
    try:
        found = compare(
            a, b, rtol=rtol, atol=atol, only=comma(only), config=config, like=like, flat_layout=flat_layout,
            wrap=comma(wrap), progress=meter,
        )  # fmt: skip
    finally:
        meter.close()
    if as_json:
        print_json(found.to_json())
    else:
        for path, rows in ((a, found.not_read_a), (b, found.not_read_b)):
            not_read(rows, quiet, f"{printable(path)}: ")
        _print_difference(found)
    if not found.equal:
        raise typer.Exit(5)


def _print_difference(d: Any) -> None:
    for title, names in (("only in A", d.only_in_a), ("only in B", d.only_in_b)):
        for n in names[:20]:
            print(f"{title}: {n}")
        if len(names) > 20:
            print(f"{title}: ... {len(names) - 20} more")
    for n, (x, y) in d.shapes.items():
        print(f"shape: {n}: {list(x)} | {list(y)}")
    for n, (x, y) in list(d.dtypes.items())[:20]:
        print(f"dtype: {n}: {x} | {y}")
    if len(d.dtypes) > 20:
        print(f"dtype: ... {len(d.dtypes) - 20} more")
    for n, (x, y) in d.values.items():
        print(f"value: {n}: {x} | {y}")
    for t in d.data[:50]:
        ulp = f", {t.max_ulp} ulp" if t.max_ulp is not None else ""
        nan = f", {t.nan_mismatch} NaN on one side only" if t.nan_mismatch else ""
        print(
            f"data: {t.name}: {t.differing:,} of {t.elements:,} elements differ, max abs {t.max_abs:.3g}, max rel "
            f"{t.max_rel:.3g}{ulp}{nan}, first at {list(t.first)}, worst at {list(t.worst)}"
        )
    if len(d.data) > 50:
        print(f"data: ... {len(d.data) - 50} more tensors")
    close = f" ({d.within_tolerance} within the tolerance)" if d.within_tolerance else ""
    print(
        f"{'equal' if d.equal else 'different'}: {d.tensors:,} tensors in both, {len(d.data)} with other values{close}"
    )


@app.command()
def verify(
    path: Src,
    read_data: Annotated[bool, typer.Option("--read-data", help="Read every byte: CRC32s, recorded digests.")] = False,
    against: Annotated[
        str | None, typer.Option("--against", help="A checkpoint that must hold the same state.")
    ] = None,
    from_: From = None,
    config: Config = None,
    like: Like = None,
    flat_layout: FlatLayout = None,
    wrap: Wrap = None,
    tag: Tag = None,
    allow_equal_ranks: AllowEqualRanks = False,
    allow_mixed_steps: AllowMixedSteps = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check that a checkpoint is whole: structure, and with --read-data every byte."""
    from ..engine.verification import verify as check

    meter = Meter(quiet)
    try:
        found = check(
            path, read_data=read_data, against=against, progress=meter, source_layout=from_, config=config, like=like,
            flat_layout=flat_layout, wrap=comma(wrap), tag=tag,
            allow_equal_ranks=allow_equal_ranks, allow_mixed_steps=allow_mixed_steps,
        )  # fmt: skip
    finally:
        meter.close()
    if as_json:
        print_json(found.to_json())
        return
    from ..engine.inspect import human

    not_read(found.not_read, quiet)
    print(f"{found.layout}: {found.tensors:,} tensors, {human(found.bytes)}: structure ok")
    if found.data is not None:
        covered = found.crc32_covered_bytes
        told = f", {human(covered)} covered by CRC32s of the files themselves" if covered else ""
        print(f"data ok: every byte read{told}")
        if found.recorded == "equal":
            print("equal to the digests that were recorded when it was written")
        for text in found.notes:
            note(f"note: {text}", quiet)
        for component, root in (found.digest or {}).items():
            print(f"digest {component:10s} blake3:{root}")
    if found.against is not None:
        print(f"equal to {found.against['path']}: {', '.join(found.against['components'])}")


@app.command("resume-verify")
def resume_verify(
    src: Src,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", help="The original checkpoint, in any layout: the reference.", rich_help_panel="Reference"
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference", help="What ckpttool.Recorder wrote in the original job (JSONL).", rich_help_panel="Reference"
        ),
    ] = None,
    config: Config = None,
    job: Annotated[
        str | None,
        typer.Option(
            "--job", help="Your own job: a function that builds it.", metavar="MODULE.PY:BUILD", rich_help_panel="Job"
        ),
    ] = None,
    from_: From = None,
    like: Like = None,
    flat_layout: FlatLayout = None,
    wrap: Wrap = None,
    tag: Tag = None,
    allow_equal_ranks: AllowEqualRanks = False,
    allow_mixed_steps: AllowMixedSteps = False,
    world_size: Annotated[
        int | None,
        typer.Option(
            "--world-size", "-n", min=1, help="Ranks of the job; else one for every GPU.", rich_help_panel="Job"
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh", help="Mesh of the job.", metavar="dp_replicate=R,dp_shard=S,tp=T", rich_help_panel="Job"
        ),
    ] = None,
    against_world_size: Annotated[
        int | None,
        typer.Option(
            "--against-world-size",
            min=1,
            help="Ranks of the run of --against; else the same.",
            rich_help_panel="Reference",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Optimizer steps to run.", rich_help_panel="Batches")
    ] = 10,
    start_step: Annotated[
        int | None,
        typer.Option(
            "--start-step", min=0, help="Step of the checkpoint, where it does not say.", rich_help_panel="Batches"
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            "--data", help="Token rows: a .npy or .jsonl file, or synthetic.", metavar="FILE", rich_help_panel="Batches"
        ),
    ] = "synthetic",
    seed: Annotated[int, typer.Option("--seed", help="Seed of synthetic data.", rich_help_panel="Batches")] = 0,
    sequence: Annotated[
        int | None, typer.Option("--seq-len", "--sequence", min=2, help="Tokens of a row.", rich_help_panel="Batches")
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch", min=1, help="Rows of one optimizer step, over all ranks.", rich_help_panel="Batches"
        ),
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            "--micro-batch",
            min=1,
            help="Rows of one forward pass; the same at every world size.",
            rich_help_panel="Batches",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="What is computed in: fp32, or bf16 (gradients reduced in fp32).", rich_help_panel="Job"
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="auto, cuda (NCCL) or cpu (gloo).", rich_help_panel="Job")
    ] = "auto",
    clip: Annotated[
        float | None,
        typer.Option(
            "--max-grad-norm",
            "--clip",
            min=0,
            help="Largest gradient norm; larger ones are scaled down.",
            rich_help_panel="Job",
        ),
    ] = None,
    profile: Annotated[
        str, typer.Option("--profile", help="How sharp: strict, standard or relaxed.", rich_help_panel="Judgement")
    ] = "strict",
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure the noise of this very job first, by one run more.",
            rich_help_panel="Judgement",
        ),
    ] = False,
    keep_dropout: Annotated[
        bool,
        typer.Option(
            "--keep-dropout", help="Leave dropout on; comparable at the saved world size only.", rich_help_panel="Job"
        ),
    ] = False,
    activation_checkpointing: Annotated[
        bool,
        typer.Option(
            "--activation-checkpointing", help="Recompute activations in the backward pass.", rich_help_panel="Job"
        ),
    ] = False,
    compile_: Annotated[
        bool, typer.Option("--compile", help="torch.compile every block.", rich_help_panel="Job")
    ] = False,
    cpu_offload: Annotated[
        bool,
        typer.Option("--cpu-offload", help="Parameters and optimizer state in host memory.", rich_help_panel="Job"),
    ] = False,
    deterministic: Annotated[
        bool, typer.Option(help="Deterministic kernels and collectives, where torch has them.", rich_help_panel="Job")
    ] = True,
    reread: Annotated[
        bool,
        typer.Option(
            help="Read the files again and compare them with what the job holds.", rich_help_panel="Judgement"
        ),
    ] = True,
    round_trip: Annotated[
        bool, typer.Option(help="Save after the first step, load that, and go on.", rich_help_panel="Judgement")
    ] = True,
    scratch: Annotated[
        str | None,
        typer.Option(
            "--scratch", help="Folder that all ranks share, for that save.", metavar="DIR", rich_help_panel="Judgement"
        ),
    ] = None,
    min_mfu: Annotated[
        float | None, typer.Option("--min-mfu", min=0, max=1, help="Gate: least MFU.", rich_help_panel="Gates")
    ] = None,
    peak_tflops: Annotated[
        float | None,
        typer.Option(
            "--peak-tflops", min=0, help="Peak of one GPU, where it is not known, for the MFU.", rich_help_panel="Gates"
        ),
    ] = None,
    max_reserved_gib: Annotated[
        float | None,
        typer.Option(
            "--max-reserved-gib", min=0, help="Gate: most memory reserved on a rank.", rich_help_panel="Gates"
        ),
    ] = None,
    max_step_seconds: Annotated[
        float | None,
        typer.Option("--max-step-seconds", min=0, help="Gate: longest median step.", rich_help_panel="Gates"),
    ] = None,
    max_load_seconds: Annotated[
        float | None, typer.Option("--max-load-seconds", min=0, help="Gate: longest load.", rich_help_panel="Gates")
    ] = None,
    report: Annotated[
        str | None,
        typer.Option(
            "--report", help="Write report.html and report.json there.", metavar="DIR", rich_help_panel="Reports"
        ),
    ] = None,
    junit: Annotated[
        str | None, typer.Option("--junit", help="Write JUnit XML.", metavar="FILE", rich_help_panel="Reports")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option("--metrics", help="Write Prometheus metrics.", metavar="FILE.prom", rich_help_panel="Reports"),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Load a checkpoint into a live FSDP2 job and judge whether training goes on as before; exit 10 when it does not."""
    from ..resume import report as reports
    from ..resume.launch import resume_verify as run

    if report is not None:
        try:
            os.makedirs(report, exist_ok=True)
        except OSError as e:
            raise UsageError(f"--report {report}: {e.strerror or e}.") from None
    if metrics is not None and not os.path.isdir(os.path.dirname(os.path.abspath(metrics))):
        raise UsageError(
            f"--metrics {metrics}: this folder does not exist: {os.path.dirname(os.path.abspath(metrics))}."
        )
    gc.enable()  # a training job makes cycles
    how = {
        "source_layout": from_, "config": config, "like": like, "flat_layout": flat_layout, "wrap": comma(wrap), "tag": tag,
        "allow_equal_ranks": allow_equal_ranks or None, "allow_mixed_steps": allow_mixed_steps or None,
    }  # fmt: skip
    telling = _Telling(quiet)
    try:
        found = run(
            src, against=against, reference=reference, config=config, job=job,
            how={k: v for k, v in how.items() if v is not None}, world_size=world_size, mesh=mesh,
            against_world_size=against_world_size, steps=steps, start_step=start_step, data=data, seed=seed,
            sequence=sequence, global_batch=global_batch, micro_batch=micro_batch, dtype=dtype, device=device, clip=clip,
            profile=profile, calibrate=calibrate, keep_dropout=keep_dropout,
            activation_checkpointing=activation_checkpointing, compile=compile_, cpu_offload=cpu_offload,
            deterministic=deterministic, reread=reread, round_trip=round_trip, scratch=scratch, peak_tflops=peak_tflops,
            min_mfu=min_mfu, max_reserved_gib=max_reserved_gib, max_step_seconds=max_step_seconds,
            max_load_seconds=max_load_seconds, tell=telling,
        )  # fmt: skip
    finally:
        telling.close()
    if found is None:  # a rank other than the first of a job that was started from outside
        return
    if not as_json:
        draw(reports.screen(found))
        sys.stdout.flush()
    reports.write(found, folder=report, junit_file=junit, metrics_file=metrics)
    if as_json:
        print_json(found.to_json())
    if found.exit_code:
        raise typer.Exit(found.exit_code)


class _Telling:
    """What is being done, on stderr: one line that changes on a terminal, a line each in a log."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.began, self.status = quiet, time.monotonic(), None

    status: Any

    def __call__(self, text: str) -> None:
        if self.quiet:
            return
        if not sys.stderr.isatty():
            print(f"[{time.monotonic() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)
            return
        if self.status is None:
            from rich.console import Console

            self.status = Console(stderr=True).status(text)
            self.status.start()
        self.status.update(text)

    def close(self) -> None:
        """Take the line off the screen."""
        if self.status is not None:
            self.status.stop()
            self.status = None


@app.command()
def digest(
    path: Src,
    from_: From = None,
    only: Only = None,
    config: Config = None,
    like: Like = None,
    flat_layout: FlatLayout = None,
    wrap: Wrap = None,
    tag: Tag = None,
    allow_equal_ranks: AllowEqualRanks = False,
    allow_mixed_steps: AllowMixedSteps = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="The digest of every tensor too.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Digest of the state, the same in every layout and at every world size."""
    from ..engine.verification import digest as compute

    meter = Meter(quiet)
    try:
        found = compute(
            path, progress=meter, source_layout=from_, only=comma(only), config=config, like=like, flat_layout=flat_layout,
            wrap=comma(wrap), tag=tag, allow_equal_ranks=allow_equal_ranks, allow_mixed_steps=allow_mixed_steps,
        )  # fmt: skip
    finally:
        meter.close()
    if as_json:
        print_json({
            "digest": found.digest, **({"tensors": found.tensors} if tensors else {}), "not_read": found.not_read,
        })  # fmt: skip
        return
    not_read(found.not_read, quiet)
    for component, root in found.digest.items():
        print(f"blake3:{root}  {component}")
    for name, value in found.tensors.items() if tensors else ():
        print(f"blake3:{value}  {name}")


@app.command()
def clean(
    path: Annotated[
        str,
        typer.Argument(help="A destination, or a folder in which destinations lie; no URL.", show_default=False),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be removed, and stop.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove what interrupted runs left beside a destination, and put an old destination back that they took away.

    Removes what belongs to you and is not in use; anything else is named. In an object store the next run at the same URL
    removes what was left.
    """
    from ..engine.inspect import human
    from ..storage import remote
    from ..storage.partial import clean as remove

    if remote.is_url(path):
        raise UsageError(f"{path}: in an object store, the next run at the same URL removes what was left.")
    done = remove(path, dry_run=dry_run)
    if as_json:
        print_json({
            "put_back": [{"from": a, "to": b} for a, b in done.put_back],
            "removed": [{"path": p, "bytes": n} for p, n in done.removed],
            "kept": [{"path": p, "why": why} for p, why in done.kept], "failed": done.failed, "dry_run": dry_run,
        })  # fmt: skip
        if done.failed:
            raise typer.Exit(1)
        return
    would = "would be " if dry_run else ""
    for old, target in done.put_back:
        print(f"{would}put back {printable(target)}, from {printable(old)}")
    for p, n in done.removed:
        print(f"{would}removed {printable(p)}" + (f"  {human(n)}" if n else ""))
    for p, why in done.kept:
        note(f"kept {printable(p)}: {printable(why)}", quiet)
    if not done.removed and not done.put_back and not done.kept:
        note("nothing was left there", quiet)
    if done.failed:
        raise typer.Exit(1)


app.command(cls=HfCommand)(hub.push)
app.command(cls=LayoutCommand)(hub.pull)
app.add_typer(audit_app)


@app.command()
def layouts(as_json: Json = False) -> None:
    """List the layouts ckpttool knows."""
    from ..layouts import layouts as known

    rows: list[dict[str, Any]] = [
        {
            "name": x.name, "title": x.title, "reads": True, "writes": x.write is not None,
            "holds": sorted(x.holds(None)) or "everything",
        }
        for x in known().values()
    ]  # fmt: skip
    if as_json:
        print_json(rows)
        return
    for r in rows:
        verbs = "read, write" if r["writes"] else "read"
        holds = r["holds"] if isinstance(r["holds"], str) else ", ".join(r["holds"])
        print(f"{r['name']:10s} {r['title']:44s} {verbs:12s} holds {holds}")


def _version(show: bool) -> None:
    if show:
        from .._version import __version__

        print(f"ckpttool {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _stop(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point: runs a command and turns what it raises into a line on stderr and an exit code."""
    signal.signal(signal.SIGTERM, _stop)
    streams()
    warnings.showwarning = _show
    gc.disable()  # a large index is millions of objects that live until the end; looking for cycles is half of the time
    try:
        _run()
    except OutputLost as e:
        _lost(e.error)
    except CkpttoolError as e:
        _fail(e, e.exit_code)
    except KeyboardInterrupt:
        _fail(Interrupted("interrupted; nothing was changed."), 130)
    except MemoryError:
        _fail(NoSpace("not enough memory."), 8)
    except OSError as e:
        found = _refused(e)
        _fail(found, found.exit_code)
    except Exception as e:  # a fault of ours: no traceback unless asked for, but say where it was
        if os.environ.get("CKPTTOOL_DEBUG"):
            raise
        import traceback

        where = traceback.extract_tb(e.__traceback__)[-1]
        text = f"unexpected {type(e).__name__}: {e} ({os.path.basename(where.filename)}:{where.lineno})."
        _fail(CkpttoolError(f"{text} This is a bug of ckpttool; CKPTTOOL_DEBUG=1 shows the traceback to report."), 1)


_usual = warnings.showwarning


def _show(message: Warning | str, category: type[Warning], *more: Any, **where: Any) -> None:
    """A warning of ours in one line; those of other packages as usual."""
    if category.__module__.startswith("ckpttool."):
        note(f"warning: {printable(str(message))}")
    else:
        _usual(message, category, *more, **where)


def _run() -> None:
    refuse_empty(sys.argv[1:])
    program = typer.main.get_command(only_what_runs(app, sys.argv[1:]))
    try:
        sys.exit(_status(program) if "--json" in sys.argv else program())
    finally:
        sys.stdout.flush()  # here, where a failure has a handler


def _status(program: Any) -> int:
    """The exit status of a command line whose mistakes are raised, so that `--json` prints them as JSON too."""
    try:
        status = program(standalone_mode=False)
    except Exception as e:
        if not hasattr(e, "format_message"):  # click's own class differs between versions of typer
            raise
        raise UsageError(e.format_message()) from None
    return status if isinstance(status, int) else 0


def _lost(e: OSError) -> None:
    """Standard output failed. It is closed for good, so that Python does not try again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if isinstance(e, BrokenPipeError):
        sys.exit(141)  # as a program that SIGPIPE ends: whoever read our output has enough
    print(
        f"error: standard output: {e.strerror}. What was printed is incomplete; a checkpoint that this command wrote is not "
        "affected.",
        file=sys.stderr,
    )
    sys.exit(_refused(e).exit_code)


def _refused(e: OSError) -> CkpttoolError:
    """What the system refused, where no command knew better."""
    try:
        os.getcwd()
    except OSError:
        return UsageError("The current folder was removed. Change to another one, or give absolute paths.")
    name = os.fsdecode(e.filename) if isinstance(e.filename, (str, bytes)) else "the system"
    kind = (
        NoSpace if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE) else CkpttoolError
    )
    return kind(f"{name}: {e.strerror or e}" + (f" (errno {e.errno})." if e.errno else "."))


def _fail(e: CkpttoolError, code: int) -> None:
    if "--json" in sys.argv:
        with suppress(OutputLost):
            print_json({"error": {"kind": type(e).__name__, "exit_code": code, "message": str(e)}})
            sys.stdout.flush()
    # names from files do not draw on the screen, nor make lines of their own; what NotRecognised lists are ours
    lines = str(e).split("\n") if isinstance(e, NotRecognised) else [str(e)]
    print("error: " + "\n".join(map(printable, lines)), file=sys.stderr)
    for text in getattr(e, "__notes__", ()):
        print("note: " + printable(text), file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
