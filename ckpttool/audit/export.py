"""`audit export` and `audit restore`: conversions into an archive and out of it, and what belongs to an archive.

An export also writes a line into the store's ledger, sets the object lock if the store has one, and for an encrypted
archive writes a sidecar, NAME.tar.zst.age.json, with the archive's facts and the hashes of the ciphertext, so that it
can be listed, kept and checked without the key.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Unpack

from ..engine.conversion import ConvertResult, run_conversion
from ..engine.opening import CheckpointPath
from ..errors import CkpttoolError, Interrupted, UsageError, argument
from ..layouts import Place, place
from ..options import (
    ARCHIVE_LAYOUT,
    ExportKeywords,
    OpenOptions,
    RestoreKeywords,
    RunOptions,
    WriteRequest,
    list_keywords,
    split_keywords,
)
from ..storage import urls
from ..storage.sources import open_source
from . import ledger, sidecar
from .archive import ENCRYPTED, ArchiveFacts
from .archive_options import ArchiveOptions
from .spool import decrypt_to_spool

__all__ = ["Exported", "export", "export_archive", "restore", "restore_archive"]


@dataclass
class Exported:
    """The result of an export. `entry` is its line in the ledger, None if there is no ledger."""

    result: ConvertResult
    facts: ArchiveFacts
    entry: ledger.LedgerEntry | None


@list_keywords
def export(
    src: CheckpointPath,
    dst: str,
    options: ArchiveOptions = ArchiveOptions(),  # noqa: B008  # frozen
    *,
    in_ledger: bool = True,
    **keywords: Unpack[ExportKeywords],
) -> Exported:
    """Write a checkpoint in any layout into one archive, NAME.tar.zst.

    An encrypted archive is not read back, since that takes the secret key; age authenticates its bytes when they are
    read.

    Args:
        options: what to store, and how to compress, sign, encrypt and retain the archive.
        in_ledger: whether to write a line into the ledger of the store.
        (the others): as `convert`.

    Returns:
        The result of the conversion, the facts of the archive, and its line in the ledger (None: there is none).

    Raises:
        CkpttoolError: as `convert`, and the destination is unchanged; or the archive was written, but not its sidecar
            or its line in the ledger, which the message says.
    """
    reading, writing, running = split_keywords(keywords)
    return export_archive(src, dst, options, in_ledger=in_ledger, reading=reading, writing=writing, running=running)


def export_archive(
    src: CheckpointPath,
    dst: str,
    options: ArchiveOptions,
    *,
    in_ledger: bool,
    reading: OpenOptions,
    writing: WriteRequest,
    running: RunOptions,
) -> Exported:
    """Write a checkpoint into an archive, its line into the ledger and, if the archive is encrypted, a sidecar next to
    it.

    Args:
        src: the checkpoint, in any layout.
        dst: path or URL of the archive.
        options: what to store, and how to compress, sign, encrypt and retain the archive.
        in_ledger: whether to write a line into the ledger of the store.
        reading, writing, running: how to read the checkpoint, what to write, and how to carry it out, as in `convert`.

    Raises:
        CkpttoolError: the destination is unchanged; or the archive was written, but not its sidecar or its line in the
            ledger, which the message says.
    """
    sealed = bool(options.recipients)
    folder, name = urls.split_url(dst) if urls.is_url(dst) else os.path.split(urls.make_path_absolute(dst))
    # a ledger that cannot be written is refused now, not after everything was copied
    clock = None
    if in_ledger and (urls.is_url(folder) or os.path.isdir(folder)):
        clock = ledger.describe_clock_error(ledger.check_writable(folder))
    result = run_conversion(
        src,
        dst,
        replace(reading, only=options.only),
        replace(writing, to=ARCHIVE_LAYOUT, options=options),
        replace(running, verify=running.verify and not sealed),
    )
    if clock:
        result.notes.append(clock)
    # the archive is in place; an error from here on has to say what is still missing next to it
    entry, recorded = None, not sealed
    try:
        with open_source(folder) as source:
            known = ArchiveFacts(**{**result.about, "bytes": source.size(name)})
            ciphertext = sidecar.hash_ciphertext(source, name, running.progress) if sealed else None
        if ciphertext is not None:
            sidecar.write_small_file(
                folder, sidecar.get_sidecar_name(name), sidecar.encode_sidecar(asdict(known), ciphertext)
            )
            recorded = True
        if in_ledger:
            facts = {k: v for k, v in asdict(known).items() if k != "name"}
            if ciphertext is not None:
                facts["ciphertext_sha256"] = ciphertext["sha256"]
            entry = ledger.append_entry(folder, "export", name, **facts)
    except (CkpttoolError, OSError) as e:
        raise _make_unrecorded_error(e, dst, recorded) from e
    except KeyboardInterrupt:
        if entry is None and (in_ledger or not recorded):
            raise _make_unrecorded_error(Interrupted("interrupted."), dst, recorded) from None
        raise
    return Exported(result, known, entry)


def _make_unrecorded_error(e: CkpttoolError | OSError, dst: str, sidecar_there: bool) -> CkpttoolError:
    """Return an error that says that the archive is complete, but its sidecar or its line in the ledger is missing.

    It is of the class of `e`, or a CkpttoolError for an OSError.

    Args:
        e: why the sidecar or the line could not be written.
        dst: path or URL of the archive.
        sidecar_there: whether the sidecar exists or is not needed, so that only the line is missing.
    """
    where = urls.redact_url(dst)
    kind = type(e) if isinstance(e, CkpttoolError) else CkpttoolError
    if not sidecar_there:
        return kind(
            f"{e} The archive {where} is whole, but {sidecar.get_sidecar_name(where)} is missing, and without it "
            "nobody "
            "can list or keep it. Delete the archive and export again."
        )
    return kind(
        f"{e} The archive {where} is whole, but the ledger has no line for it. When the ledger can be written, run "
        f"`ckpttool audit ledger add {shlex.quote(where)}`."
    )


@list_keywords
def restore(
    archive: str,
    dst: str | os.PathLike[str],
    *,
    identities: Sequence[str] = (),
    scratch: str | None = None,
    **keywords: Unpack[RestoreKeywords],
) -> ConvertResult:
    """Write the state of an archive in any layout, and compare every tensor with its digest in the manifest.

    Args:
        archive: path or URL of the archive.
        dst: where to write the checkpoint.
        identities: files with the keys to an encrypted archive.
        scratch: folder for the decrypted bytes of the archive while it is read; None: that of the destination.
        (the others): as `convert`.

    Raises:
        CkpttoolError: as `convert`, also if a tensor differs from its digest; the destination is unchanged.
    """
    reading, writing, running = split_keywords(keywords)
    return restore_archive(
        archive,
        dst,
        identities=identities,
        scratch=scratch,
        reading=reading,
        writing=writing,
        running=running,
    )


def restore_archive(
    archive: str,
    dst: str | os.PathLike[str],
    *,
    identities: Sequence[str],
    scratch: str | None,
    reading: OpenOptions,
    writing: WriteRequest,
    running: RunOptions,
) -> ConvertResult:
    """Write the state of an archive in another layout, and compare every tensor with its digest in the manifest.

    An encrypted archive is decrypted first.

    Args:
        archive: path or URL of the archive.
        dst: where to write the checkpoint.
        identities: files with the keys to an encrypted archive; () for others.
        scratch: folder for the decrypted bytes of the archive while it is read; None: that of the destination, which
            must be a path then.
        reading, writing, running: how to read the archive, what to write, and how to carry it out, as in `convert`.

    Raises:
        UsageError: an encrypted archive is restored to a URL, without `scratch`.
        CkpttoolError: the conversion failed, or a tensor differs from its digest; the destination is unchanged.
    """
    where = place(archive)
    if where.file is not None and where.file.endswith(ENCRYPTED) and identities:
        if scratch is None and urls.is_url(dst):
            raise UsageError(
                f"{urls.redact_url(os.fspath(dst))}: the decrypted archive needs a folder on this machine while it is "
                f"read. Give {argument('scratch', 'FOLDER')}.",
                code="CKPT0204",
            )
        folder = scratch or os.path.dirname(urls.make_path_absolute(dst))
        spool, name = decrypt_to_spool(where.source, where.file, identities, folder, running.progress)
        where.source.close()
        where = Place(spool, name)
    done = run_conversion(where, dst, replace(reading, source_layout=ARCHIVE_LAYOUT), writing, running)
    return replace(done, source=archive)
