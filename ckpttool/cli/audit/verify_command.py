"""`ckpttool audit verify`: parse, call, print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import Corrupt, UsageError
from ...printable import count_noun
from ..help import READING, about
from ..shared_options import Workers
from ..terminal import (
    Json,
    Meter,
    Quiet,
    describe_memory,
    note,
    print_json,
    say,
)
from .audit_arguments import ArchivePath, Identity, Jobs, NoLedger, Scratch, choose_thread_count

if TYPE_CHECKING:
    from ...audit.archive_verification import ArchiveVerdict

__all__ = ["verify"]

_SHOWN = 40  # findings that are printed


@about(
    ("Every hash, and who signed it", "ckpttool audit verify store/step3.tar.zst --public-key keys/sign.pub"),
    ("Structure and signature only", "ckpttool audit verify store/step3.tar.zst --quick"),
    ("The same state as a checkpoint?", "ckpttool audit verify store/step3.tar.zst --deep --against run/ckpt"),
    exits=(*READING, 5),
    meaning={4: "damaged", 5: "not the archive that it should be, or not signed as it should be"},
)
def verify(
    archive: ArchivePath,
    quick: Annotated[bool, typer.Option("--quick", help="Check only structure and signature.")] = False,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Check every hash, and compare with --against, --root or the ledger."),
    ] = False,
    against: Annotated[
        str | None, typer.Option("--against", help="A checkpoint that must contain the same state.", metavar="SRC")
    ] = None,
    root: Annotated[
        str | None,
        typer.Option(
            "--root",
            help="Expected Merkle root, or sha256: and the expected hash of MANIFEST.json.",
            metavar="HEX",
        ),
    ] = None,
    public_key: Annotated[
        str | None, typer.Option("--public-key", help="Public EC key of the expected signer.", metavar="FILE")
    ] = None,
    cert: Annotated[
        list[str] | None,
        typer.Option("--cert", help="Root certificate of the expected signer's chain.", metavar="FILE"),
    ] = None,
    identity: Identity = None,
    scratch: Scratch = None,
    jobs: Jobs = None,
    workers: Workers = None,
    no_ledger: NoLedger = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check an archive without extracting it; exit 4 if it is damaged, 5 if it is not the expected one."""
    from ...audit.verify_in_store import verify

    if quick and (deep or against or root):
        raise UsageError(
            "--quick reads no data, so it goes with neither --deep, --against nor --root.", code="CKPT0204"
        )
    with Meter(quiet) as meter:
        found = verify(
            archive,
            quick=quick,
            deep=deep,
            public_key=public_key,
            certificates=cert or (),
            against=against,
            root=root,
            identities=identity or (),
            scratch=scratch,
            in_ledger=not no_ledger,
            jobs=choose_thread_count(jobs),
            workers=workers,
            progress=meter,
        )
    if as_json:
        print_json({**found.to_json(), **meter.measure_costs()})
        if found.findings:
            note(f"error: {found.describe_damage()}")
            note("more: ckpttool explain CKPT0425")
            raise typer.Exit(Corrupt.exit_code)
        return
    _print_verdict(found, meter.seconds, quiet)


def _print_verdict(found: ArchiveVerdict, seconds: float, quiet: bool) -> None:
    """Print the result of a verification.

    Args:
        seconds: how long it took.
        quiet: print no notes.

    Raises:
        Corrupt: the archive is damaged.
    """
    if found.workers is not None:
        note(
            f"{found.workers['name']} read {count_noun(found.workers['parts'], 'part')}; {found.workers['again']} were "
            "submitted again",
            quiet,
        )
    for text in found.warnings:
        note(f"warning: {text}.")
    from ...audit.archive_hashing import describe_findings

    wrong = describe_findings(found.findings)
    for text in wrong[:_SHOWN]:
        say(f"wrong: {text}")
    if len(wrong) > _SHOWN:
        say(f"... {len(wrong) - _SHOWN} more")
    if found.findings:
        raise Corrupt(found.describe_damage(), code="CKPT0425")
    from ...engine.inspect import human

    what = {
        "quick": "structure only",
        "full": "every hash",
        "deep": f"every hash, and equal to {found.against}",
        "ciphertext": f"the ciphertext as it was written{f', by {found.against}' if found.against else ''}; not looked "
        "into",
    }
    tensors = f"{count_noun(found.tensors, 'tensor')}, {human(found.tensor_bytes)}"
    said = tensors if found.merkle_root else human(found.file_bytes)
    note(f"{found.path}: sound ({what[found.depth]}); {said}; {seconds:.1f} s, {describe_memory()}", quiet)
    say(f"signature   {found.signature}")
    say(f"ledger      {found.ledger or 'none beside it to compare with'}")
    if found.merkle_root:
        say(f"merkle-root blake3:{found.merkle_root}")
