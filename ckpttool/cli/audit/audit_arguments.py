"""What the audit commands share: arguments that mean the same everywhere, threads, a line of the ledger."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ..terminal import (
    print_json,
    say,
)

__all__ = [
    "ArchivePath",
    "FailIfMissing",
    "Identity",
    "Jobs",
    "NoLedger",
    "Scratch",
    "Store",
    "choose_thread_count",
    "print_ledger_entry",
]

ArchivePath = Annotated[str, typer.Argument(metavar="ARCHIVE", help="An archive, NAME.tar.zst or NAME.tar.zst.age.")]
Store = Annotated[str, typer.Argument(metavar="STORE", help="A folder with archives, or the URL of one (s3://...).")]
Identity = Annotated[
    list[str] | None,
    typer.Option(
        "--identity", help="age identity or ssh private key that decrypts the archive; may be repeated.", metavar="FILE"
    ),
]
Scratch = Annotated[
    str | None,
    typer.Option("--scratch", help="Folder for the decrypted bytes of an archive while it is read.", metavar="DIR"),
]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Number of threads; by default one per core, at most 8.")
]
NoLedger = Annotated[bool, typer.Option("--no-ledger", help="Do not write to the ledger of the store.")]
FailIfMissing = Annotated[
    bool,
    typer.Option("--fail-if-missing", help="Exit 5 if an archive is gone that nothing but ckpttool should delete."),
]


def choose_thread_count(given: int | None) -> int:
    """Return the number of threads to use.

    Args:
        given: the value of --jobs; None: one thread per core, from two to eight. More do not help: SHA-256 runs in one
            thread, which eight compressing threads keep busy.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    return given or min(8, max(2, cores))


def print_ledger_entry(entry: dict[str, object], as_json: bool) -> None:
    """Print a line of the ledger on stdout: its number and hash, or all of it as JSON."""
    if as_json:
        print_json(entry)
        return
    say(f"ledger      line {entry['seq']}, sha256:{entry['hash']}")
