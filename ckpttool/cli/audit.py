"""`ckpttool audit ...`: parse, call one function, print."""

from __future__ import annotations

import os
import re
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any

import typer

from ..errors import Corrupt, UsageError
from .help import App
from .layout_options import LayoutCommand, given
from .terminal import (  # fmt: skip
    AllowEqualRanks,
    AllowMixedSteps,
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
    WorldSize,
    Wrap,
    bytes_of,
    comma,
    draw,
    note,
    peak,
    print_json,
    printable,
    ranks,
)

__all__ = ["app"]

app = App(
    name="audit",
    help="Keep checkpoints for years: archives that anyone can check, signatures, retention, a ledger.",
    no_args_is_help=True,
)
ledger_app = App(name="ledger", help="The hash-chained record of what was done to a store.", no_args_is_help=True)
app.add_typer(ledger_app)

ArchivePath = Annotated[str, typer.Argument(metavar="ARCHIVE", help="An archive, NAME.tar.zst or NAME.tar.zst.age.")]
Store = Annotated[str, typer.Argument(metavar="STORE", help="A folder with archives, or the URL of one (s3://...).")]
Identity = Annotated[
    list[str] | None,
    typer.Option("--identity", help="age identity or ssh private key that opens the archive.", metavar="FILE"),
]
Scratch = Annotated[
    str | None,
    typer.Option("--scratch", help="Folder for the plain bytes of an encrypted archive meanwhile.", metavar="DIR"),
]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Threads; by default as many as cores, at most 8.")
]
NoLedger = Annotated[bool, typer.Option("--no-ledger", help="Write no line into the ledger of the store.")]


def _jobs(given: int | None) -> int:
    """Threads: SHA-256 is one stream, which eight that compress can just keep busy."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    return given or min(8, max(2, cores))


def _meta(pairs: list[str] | None) -> tuple[tuple[str, str], ...]:
    out = []
    for pair in pairs or []:
        key, eq, value = pair.partition("=")
        if not eq or not key:
            raise UsageError(f"--meta {pair!r}: write KEY=VALUE.")
        out.append((key, value))
    return tuple(out)


def _epoch(reproducible: bool) -> int | None:
    """SOURCE_DATE_EPOCH, which counts with --reproducible. https://reproducible-builds.org/specs/source-date-epoch/"""
    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not reproducible or not text:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 11:
        raise UsageError(f"SOURCE_DATE_EPOCH={text!r} is not a number of seconds.")
    return int(text)


@app.command()
def export(
    src: Src,
    dst: Annotated[
        str, typer.Argument(help="The archive: NAME.tar.zst, NAME.tar.zst.age, or an s3:// URL.", show_default=False)
    ],
    only: Only = None,
    meta: Annotated[
        list[str] | None,
        typer.Option("--meta", help="Who, why, which ticket, ...; may be given again.", metavar="KEY=VALUE"),
    ] = None,
    git_commit: Annotated[
        str | None, typer.Option("--git-commit", help="Commit of the training code, for the record.", metavar="SHA")
    ] = None,
    level: Annotated[
        int, typer.Option("--level", min=1, max=19, help="zstd level; higher gains little on weights.")
    ] = 1,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Store byte planes, which compress better.")] = False,
    member_size: Annotated[str, typer.Option("--member-size", help="Largest file of tensors in the archive.")] = "5GB",
    reproducible: Annotated[
        bool,
        typer.Option("--reproducible", help="The same bytes for the same state: no times, nothing of the source."),
    ] = False,
    retain: Annotated[
        str | None, typer.Option("--retain", help="How long to keep it: 7y, 90d, 2033-01-01.", metavar="TIME")
    ] = None,
    legal_hold: Annotated[
        str | None, typer.Option("--legal-hold", help="Keep it until the hold is released.", metavar="REASON")
    ] = None,
    lock_mode: Annotated[
        str, typer.Option("--lock-mode", help="Object lock, where the store has it: governance or compliance.")
    ] = "governance",
    sign_key: Annotated[
        str | None, typer.Option("--sign-key", help="Private EC key (PEM) to sign with.", metavar="FILE")
    ] = None,
    sign_cert: Annotated[
        str | None, typer.Option("--sign-cert", help="Certificate (PEM) of that key.", metavar="FILE")
    ] = None,
    cert_chain: Annotated[
        list[str] | None,
        typer.Option("--cert-chain", help="Certificates between it and the root.", metavar="FILE"),
    ] = None,
    encrypt_to: Annotated[
        list[str] | None,
        typer.Option("--encrypt-to", help="age or ssh public key, or a file of them.", metavar="RECIPIENT"),
    ] = None,
    from_: From = None,
    config: Config = None,
    like: Like = None,
    flat_layout: FlatLayout = None,
    wrap: Wrap = None,
    tag: Tag = None,
    allow_equal_ranks: AllowEqualRanks = False,
    allow_mixed_steps: AllowMixedSteps = False,
    dtype: Dtype = None,
    ignore_recorded_digests: IgnoreRecorded = False,
    max_memory: Annotated[str | None, typer.Option("--max-memory", help="Memory budget of the buffers.")] = None,
    jobs: Jobs = None,
    drop: Drop = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing archive.")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not read the archive back.")] = False,
    no_ledger: NoLedger = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a checkpoint in any layout into one archive that anyone can check."""
    from ..audit.export import export_with as run
    from ..audit.options import ArchiveOptions
    from ..engine.conversion import RunOptions
    from ..engine.inspect import human
    from ..engine.opening import OpenOptions
    from ..engine.planning import WriteRequest

    options = ArchiveOptions(
        level=level, shuffle=shuffle, member_bytes=bytes_of(member_size), meta=_meta(meta), git_commit=git_commit,
        only=tuple(comma(only) or ()) or None, reproducible=reproducible, epoch=_epoch(reproducible), retain=retain,
        hold=legal_hold, lock_mode=lock_mode, key=sign_key, password=os.environ.get("CKPTTOOL_SIGN_PASSWORD"),
        certificate=sign_cert, chain=tuple(cert_chain or ()), recipients=tuple(encrypt_to or ()),
    )  # fmt: skip
    meter = Meter(quiet)
    began = time.monotonic()
    try:
        done = run(
            src, dst, options, in_ledger=not no_ledger,
            reading=OpenOptions(
                source_layout=from_, config=config, like=like, flat_layout=flat_layout, wrap=comma(wrap), tag=tag,
                allow_equal_ranks=allow_equal_ranks, allow_mixed_steps=allow_mixed_steps,
            ),
            writing=WriteRequest(dtype=dtype, drop=drop, ignore_recorded_digests=ignore_recorded_digests),
            running=RunOptions(
                force=force, verify=not no_verify, max_memory_bytes=bytes_of(max_memory) if max_memory else None,
                threads=_jobs(jobs), progress=meter,
            ),
        )  # fmt: skip
    finally:
        meter.close()
    seconds = time.monotonic() - began
    if as_json:
        print_json({
            **asdict(done.facts), "source": done.result.source, "destination": done.result.destination,
            "read_back": done.result.verified, "ledger": done.entry, "notes": done.result.notes,
            "not_read": done.result.not_read,
            "seconds": round(seconds, 3), "peak_memory_mib": int(peak().split()[1]),
        })  # fmt: skip
        return
    for text in done.result.notes:
        note(f"note: {text}", quiet)
    f = done.facts
    note(
        f"{done.result.layout_from} -> {f.name}: {f.tensors:,} tensors, {human(f.tensor_bytes)} in {human(f.bytes)} "
        f"(ratio {f.tensor_bytes / max(1, f.bytes):.2f}), {seconds:.1f} s, {peak()}"
        + (", read back and equal" if done.result.verified else ", not read back"),
        quiet,
    )
    print(f"merkle-root blake3:{f.merkle_root}")
    print(f"manifest    sha256:{f.manifest_sha256}")


@app.command()
def verify(
    archive: ArchivePath,
    quick: Annotated[bool, typer.Option("--quick", help="Structure and signature only.")] = False,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Every hash, and --against, --root or what the ledger recorded at the export."),
    ] = False,
    against: Annotated[
        str | None, typer.Option("--against", help="A checkpoint that must hold the same state.", metavar="SRC")
    ] = None,
    root: Annotated[
        str | None,
        typer.Option(
            "--root",
            help="The Merkle root that it must have, or sha256: and the hash of its MANIFEST.json.",
            metavar="HEX",
        ),
    ] = None,
    public_key: Annotated[
        str | None, typer.Option("--public-key", help="Public EC key of who must have signed.", metavar="FILE")
    ] = None,
    cert: Annotated[
        list[str] | None,
        typer.Option("--cert", help="Root certificate that the signer's must lead to.", metavar="FILE"),
    ] = None,
    identity: Identity = None,
    scratch: Scratch = None,
    jobs: Jobs = None,
    no_ledger: NoLedger = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check an archive without extracting it; exit 4 when it is damaged, 5 when it is another than it should be."""
    from ..audit.checking import check

    if quick and (deep or against or root):
        raise UsageError("--quick reads no data, so it goes with neither --deep, --against nor --root.")
    meter = Meter(quiet)
    began = time.monotonic()
    try:
        found = check(
            archive, quick=quick, deep=deep, public_key=public_key, certificates=cert or (), against=against, root=root,
            identities=identity or (), scratch=scratch, in_ledger=not no_ledger, jobs=_jobs(jobs), progress=meter,
        )  # fmt: skip
    finally:
        meter.close()
    seconds = time.monotonic() - began
    if as_json:
        print_json({**found.to_json(), "seconds": round(seconds, 3), "peak_memory_mib": int(peak().split()[1])})
        if found.findings:
            note(f"error: {found.trouble()}")
            raise typer.Exit(Corrupt.exit_code)
        return
    for f in found.findings[:40]:
        print(f"wrong: {printable(str(f))}")
    if len(found.findings) > 40:
        print(f"... {len(found.findings) - 40} more")
    if found.findings:
        raise Corrupt(found.trouble())
    from ..engine.inspect import human

    what = {
        "quick": "structure only", "full": "every hash", "deep": f"every hash, and equal to {found.against}",
        "ciphertext": f"the ciphertext as it was written{f', by {found.against}' if found.against else ''}; not looked into",
    }  # fmt: skip
    said = f"{found.tensors:,} tensors, {human(found.tensor_bytes)}" if found.merkle_root else human(found.file_bytes)
    note(f"{found.path}: sound ({what[found.depth]}); {said}; {seconds:.1f} s, {peak()}", quiet)
    for text in found.warnings:
        note(f"warning: {text}.")
    print(f"signature   {found.signature}")
    print(f"ledger      {printable(found.ledger or 'none beside it to compare with')}")
    if found.merkle_root:
        print(f"merkle-root blake3:{found.merkle_root}")


@app.command(cls=LayoutCommand)
def restore(
    ctx: typer.Context,
    archive: ArchivePath,
    dst: Annotated[str, typer.Argument(help="Where the checkpoint shall be.", show_default=False)],
    to: Annotated[str | None, typer.Option("--to", help="Layout to write; `ckpttool layouts` lists them.")] = None,
    world_size: WorldSize = None,
    only: Only = None,
    dtype: Dtype = None,
    config: Config = None,
    like: Like = None,
    flat_layout: FlatLayout = None,
    wrap: Wrap = None,
    identity: Identity = None,
    scratch: Scratch = None,
    max_memory: Annotated[str | None, typer.Option("--max-memory", help="Memory budget of the buffers.")] = None,
    jobs: Jobs = None,
    drop: Drop = False,
    force: Force = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not read the result back from disk.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the state of an archive in any layout; every tensor is compared with the manifest on the way.

    `ckpttool convert` does the same for archives that are not encrypted.
    """
    from ..audit.export import restore_with as run
    from ..engine.conversion import RunOptions
    from ..engine.inspect import human
    from ..engine.opening import OpenOptions
    from ..engine.planning import WriteRequest
    from ..layouts import options_of, target_of

    target = target_of(to, dst)
    meter = Meter(quiet)
    began = time.monotonic()
    try:
        done = run(
            archive, dst, identities=identity or (), scratch=scratch,
            reading=OpenOptions(only=comma(only), config=config, like=like, flat_layout=flat_layout, wrap=comma(wrap)),
            writing=WriteRequest(
                to=target.name, options=options_of(target, given(ctx)), world_size=world_size, dtype=dtype, drop=drop
            ),
            running=RunOptions(
                force=force, verify=not no_verify, max_memory_bytes=bytes_of(max_memory) if max_memory else None,
                threads=_jobs(jobs), progress=meter,
            ),
        )  # fmt: skip
    finally:
        meter.close()
    seconds = time.monotonic() - began
    if as_json:
        print_json({**asdict(done), "seconds": round(seconds, 3), "peak_memory_mib": int(peak().split()[1])})
        return
    for text in done.notes:
        note(f"note: {text}", quiet)
    note(
        f"{archive} -> {done.layout_to}{f' for {ranks(done.world_size)}' if done.world_size else ''}: {done.tensors:,} tensors, {human(done.written_bytes)} in {seconds:.1f} s, "
        f"{peak()}, equal to the manifest" + (", read back and equal" if done.verified else ", not read back"),
        quiet,
    )
    for component, digest in done.digest.items():
        print(f"digest {component:10s} blake3:{digest}")


@app.command("list")
def list_(store: Store, as_json: Json = False) -> None:
    """List the archives of a store: what, when, until when, what holds it, who signed, when it was last checked."""
    from ..audit.shelf import listing
    from ..engine.inspect import human

    rows = listing(store)
    if as_json:
        print_json([asdict(r) for r in rows])
        return
    if not rows:
        note(f"{store} holds no archive.")
        return
    if any(r.ledger == "missing" for r in rows):
        note(
            f"warning: {store} has no ledger: nothing shows what was done to its archives, or which were under a hold."
        )
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "archive", "state", "step", "size", "exported", "keep until", "held by", "signed by", "checked", box=None
    )
    for r in rows:
        f = r.facts
        if f is None:
            cells = [r.name, f"damaged: {r.damaged}", "", "", "", r.retain_until or "", ", ".join(r.held), "", ""]
            table.add_row(*(Text(printable(c)) for c in cells), style="red")
            continue
        state = f"{f.layout or '?'} {', '.join(f.components)}" + (", encrypted" if f.encrypted else "")
        cells = [
            r.name, state, "" if f.step is None else f"{f.step:,}", human(f.bytes), f.created[:10] or "no date",
            (r.retain_until or "")[:10], ", ".join(r.held), _short(f.signed_by) or "no", (r.verified or "never")[:10],
        ]  # fmt: skip
        table.add_row(*(Text(printable(c)) for c in cells), style="red" if r.ledger == "differs" else None)
    draw(table)
    for r in rows:
        for text in r.warnings:
            note(f"warning: {printable(f'{r.name}: {text}').rstrip('.')}.")


def _short(signer: str) -> str:
    """A signer in a table: of a long hash its beginning."""
    return re.sub(r"([0-9a-f]{12})[0-9a-f]{52}", r"\1", signer)


@app.command()
def prune(
    store: Store,
    keep_last: Annotated[int | None, typer.Option("--keep-last", min=1, help="Keep the newest N of every run.")] = None,
    keep_within: Annotated[
        str | None, typer.Option("--keep-within", help="Keep what was exported in that time: 90d, 6m.", metavar="TIME")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", min=1, help="Keep training steps that are multiples of it.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")] = False,
    no_ledger: Annotated[
        bool, typer.Option("--no-ledger", help="Delete also what no ledger knows: its holds may be lost.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete the archives that no policy keeps; never one under retention or a legal hold, undated or damaged."""
    from ..audit.retention import age
    from ..audit.shelf import prune as run
    from ..engine.inspect import human

    done = run(
        store, keep_last=keep_last, keep_within=age(keep_within) if keep_within else None, keep_every=keep_every,
        dry_run=dry_run, no_ledger=no_ledger,
    )  # fmt: skip
    if as_json:
        print_json({"dry_run": dry_run, **asdict(done)})
        return
    for name in done.deleted:
        print(f"{'would delete' if dry_run else 'deleted':13s}{printable(name)}")
    for name, why in done.kept.items():
        print(f"{'kept':13s}{printable(name)}: {printable(', '.join(why))}")
    for name, reason in done.refused.items():
        print(f"{'refused':13s}{printable(name)}: {printable(reason)}")
    note(
        f"{len(done.deleted)} archive{'s' * (len(done.deleted) != 1)}, {human(done.freed)}"
        + (" would be freed; nothing was touched" if dry_run else " freed")
    )


@app.command()
def hold(
    archive: ArchivePath,
    reason: Annotated[str, typer.Argument(metavar="REASON", help="Why it must be kept.")],
    as_json: Json = False,
) -> None:
    """Put an archive under a legal hold: nothing deletes it until the hold is released."""
    from ..audit.shelf import hold as run

    _entry(run(archive, reason), as_json)


@app.command()
def release(
    archive: ArchivePath,
    reason: Annotated[str, typer.Argument(metavar="REASON", help="Why it need not be kept any more.")],
    as_json: Json = False,
) -> None:
    """Release an archive from its legal holds; retention goes on."""
    from ..audit.shelf import release as run

    _entry(run(archive, reason), as_json)


def _entry(entry: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(entry)
        return
    print(f"ledger      line {entry['seq']}, sha256:{entry['hash']}")


@ledger_app.command("verify")
def ledger_verify(
    store: Store,
    head: Annotated[
        str | None, typer.Option("--head", help="The hash of a line that somebody wrote down.", metavar="HEX")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that no line of a store's ledger was altered, removed or inserted."""
    from ..audit.ledger import verify as run

    found = run(store, head)
    if as_json:
        print_json(found)
        return
    note(f"{found['entries']} entries, from {found['first']} to {found['last']}, in one chain")
    for b in found["backwards"]:
        note(
            f"warning: line {b['line']} is of {b['time']}, {timedelta(seconds=b['seconds'])} before the line above it "
            f"({b['before']}): the clock of a machine was wrong."
        )
    print(f"head        sha256:{found['head']}")


@ledger_app.command("add")
def ledger_add(archive: ArchivePath, as_json: Json = False) -> None:
    """Record an archive that the ledger of its store does not know; prints its line if it does."""
    from ..audit.shelf import add as run

    _entry(run(archive), as_json)


@ledger_app.command("show")
def ledger_show(store: Store, as_json: Json = False) -> None:
    """Print what a store's ledger says, the chain having been checked."""
    from ..audit.ledger import read

    rows = read(store)
    if as_json:
        print_json(rows)
        return
    for e in rows:
        said = e.get("reason") or e.get("why") or e.get("merkle_root") or ""
        print(printable(f"{e['seq']:5d}  {e['time']}  {e['event']:13s} {e['archive']}  {e['by']}  {said}"))
