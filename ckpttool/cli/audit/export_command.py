"""`ckpttool audit export`: parse, call, print."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import Annotated

import typer

from ...errors import UsageError
from ...options import OpenOptions, RunOptions, WriteRequest, parse_size
from ...printable import count_noun
from ..help import READING, about
from ..shared_options import EDITS, add_shared_options
from ..terminal import (
    Json,
    Latest,
    Meter,
    Quiet,
    Src,
    describe_memory,
    find_newest,
    note,
    print_json,
    say,
)
from .audit_arguments import Jobs, NoLedger, choose_thread_count

__all__ = ["export"]


#: What applies to checkpoints that a job loads; the others have help of their own.
_NOT_OF_ARCHIVES = (
    "to",
    "world_size",
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
    "workers",
    "prove_logits",
    "force",
    "verify",
    "threads",
)


def _parse_meta(pairs: list[str] | None) -> tuple[tuple[str, str], ...]:
    """Return (key, value) of each "KEY=VALUE"; () for None.

    Raises:
        UsageError: one has no key or no "=".
    """
    out = []
    for pair in pairs or []:
        key, eq, value = pair.partition("=")
        if not eq or not key:
            raise UsageError(f"--meta {pair!r}: write KEY=VALUE.", code="CKPT0203")
        out.append((key, value))
    return tuple(out)


def _read_source_date_epoch(reproducible: bool) -> int | None:
    """Return the time in SOURCE_DATE_EPOCH, an environment variable, in seconds; None if it is not set or
    `reproducible` is false.

    Source: https://reproducible-builds.org/specs/source-date-epoch/

    Raises:
        UsageError: it is not a number of seconds.
    """
    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not reproducible or not text:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 11:
        raise UsageError(f"SOURCE_DATE_EPOCH={text!r} is not a number of seconds.", code="CKPT0203")
    return int(text)


@about(
    (
        "Signed, kept for seven years",
        "ckpttool audit export run/ckpt store/step3.tar.zst --retain 7y --sign-key keys/sign.pem",
    ),
    (
        "Weights only, smaller",
        "ckpttool audit export run/ckpt store/weights.tar.zst --only model --shuffle --dtype bf16",
    ),
    ("Encrypted", "ckpttool audit export run/ckpt store/step3.tar.zst.age --encrypt-to keys/archive.pub"),
    exits=(*READING, 5, 6),
    meaning={5: "the archive, read back, differs", 6: "the archive exists, or must be kept"},
)
@add_shared_options("weights", *_NOT_OF_ARCHIVES)
def export(
    src: Src,
    dst: Annotated[
        str, typer.Argument(help="The archive: NAME.tar.zst, NAME.tar.zst.age, or an s3:// URL.", show_default=False)
    ],
    writing: WriteRequest,
    reading: OpenOptions,
    running: RunOptions,
    meta: Annotated[
        list[str] | None,
        typer.Option("--meta", help="Who, why, which ticket, ...; may be repeated.", metavar="KEY=VALUE"),
    ] = None,
    git_commit: Annotated[
        str | None, typer.Option("--git-commit", help="Commit of the training code.", metavar="SHA")
    ] = None,
    level: Annotated[
        int, typer.Option("--level", min=1, max=19, help="zstd level; higher gains little on weights.")
    ] = 1,
    shuffle: Annotated[
        bool, typer.Option("--shuffle", help="Split numbers into byte planes, which compress better.")
    ] = False,
    member_size: Annotated[
        str, typer.Option("--member-size", help="Maximum size of a file of tensors in the archive.")
    ] = "5GB",
    reproducible: Annotated[
        bool,
        typer.Option(
            "--reproducible", help="Write the same bytes for the same state: no times, nothing about the source."
        ),
    ] = False,
    retain: Annotated[
        str | None, typer.Option("--retain", help="How long to keep it: 7y, 90d, 2033-01-01.", metavar="TIME")
    ] = None,
    legal_hold: Annotated[
        str | None, typer.Option("--legal-hold", help="Keep it until the hold is released.", metavar="REASON")
    ] = None,
    lock_mode: Annotated[
        str, typer.Option("--lock-mode", help="Object lock, if the store has it: governance or compliance.")
    ] = "governance",
    sign_key: Annotated[
        str | None, typer.Option("--sign-key", help="Private EC key (PEM) to sign with.", metavar="FILE")
    ] = None,
    sign_cert: Annotated[
        str | None, typer.Option("--sign-cert", help="Certificate (PEM) of that key.", metavar="FILE")
    ] = None,
    cert_chain: Annotated[
        list[str] | None,
        typer.Option("--cert-chain", help="Certificates between --sign-cert and the root.", metavar="FILE"),
    ] = None,
    encrypt_to: Annotated[
        list[str] | None,
        typer.Option("--encrypt-to", help="age or ssh public key, or a file of them.", metavar="RECIPIENT"),
    ] = None,
    latest: Latest = False,
    jobs: Jobs = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing archive.")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not read the archive back.")] = False,
    no_ledger: NoLedger = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a checkpoint in any layout into one archive that anyone can check."""
    from ...audit.archive_options import ArchiveOptions
    from ...audit.export import export_archive as run
    from ...engine.inspect import human

    options = ArchiveOptions(
        level=level,
        shuffle=shuffle,
        member_bytes=parse_size(member_size),
        meta=_parse_meta(meta),
        git_commit=git_commit,
        only=tuple(reading.only or ()) or None,
        reproducible=reproducible,
        epoch=_read_source_date_epoch(reproducible),
        retain=retain,
        hold=legal_hold,
        lock_mode=lock_mode,
        key=sign_key,
        password=os.environ.get("CKPTTOOL_SIGN_PASSWORD"),
        certificate=sign_cert,
        chain=tuple(cert_chain or ()),
        recipients=tuple(encrypt_to or ()),
    )
    src = find_newest(src, latest, quiet or as_json)
    with Meter(quiet) as meter:
        done = run(
            src,
            dst,
            options,
            in_ledger=not no_ledger,
            reading=replace(reading, only=None),  # it is what the archive holds
            writing=writing,
            running=replace(
                running, force=force, verify=not no_verify, threads=choose_thread_count(jobs), progress=meter
            ),
        )
    if as_json:
        print_json(
            {
                **asdict(done.facts),
                "source": done.result.source,
                "destination": done.result.destination,
                "read_back": done.result.verified,
                "ledger": done.entry,
                "notes": done.result.notes,
                "not_read": done.result.not_read,
                **meter.measure_costs(),
            }
        )
        return
    for text in done.result.notes:
        note(f"note: {text}", quiet)
    f = done.facts
    note(
        f"{done.result.layout_from} -> {f.name}: {count_noun(f.tensors, 'tensor')}, {human(f.tensor_bytes)} in "
        f"{human(f.bytes)} (ratio {f.tensor_bytes / max(1, f.bytes):.2f}), {meter.seconds:.1f} s, {describe_memory()}"
        + (", read back and equal" if done.result.verified else ", not read back"),
        quiet,
    )
    say(f"merkle-root blake3:{f.merkle_root}")
    say(f"manifest    sha256:{f.manifest_sha256}")
