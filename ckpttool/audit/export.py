"""`audit export` and `audit restore`: conversions into an archive and out of it, and what belongs to an archive.

An export also writes a line into the store's ledger, sets the object lock if the store has one, and for an encrypted
archive writes a sidecar, NAME.tar.zst.age.json, with the archive's facts and the hashes of the ciphertext, so that it
can be listed, kept and checked without the key.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Unpack

from ..engine.conversion import ConvertResult, RunOptions, convert_with
from ..engine.copy.fill import Progress, silent
from ..engine.opening import CheckpointPath, OpenOptions
from ..engine.planning import WriteRequest
from ..errors import CkpttoolError, Interrupted
from ..layouts import Place, place
from ..options import Hints, Reading, list_reading_keywords
from ..storage import remote, urls
from . import ledger, sidecar
from .archive import ENCRYPTED, ArchiveFacts
from .archive_options import ArchiveOptions
from .spool import decrypted

__all__ = ["Exported", "export", "export_with", "restore", "restore_with"]


@dataclass
class Exported:
    """The result of an export. `entry` is its line in the ledger, None if there is no ledger."""

    result: ConvertResult
    facts: ArchiveFacts
    entry: dict[str, Any] | None


@list_reading_keywords
def export(
    src: CheckpointPath,
    dst: str,
    options: ArchiveOptions = ArchiveOptions(),  # noqa: B008  # frozen
    *,
    in_ledger: bool = True,
    dtype: str | None = None,
    drop: bool = False,
    force: bool = False,
    verify: bool = True,
    ignore_recorded_digests: bool = False,
    max_memory_bytes: int | None = None,
    threads: int = 2,
    progress: Progress = silent,
    **reading: Unpack[Reading],
) -> Exported:
    """Write a checkpoint in any layout into one archive, NAME.tar.zst.

    An encrypted archive is not read back, since the key is not here; age authenticates its bytes when they are read.

    Args:
        options: an `ArchiveOptions`.
        in_ledger: whether to write a line into the ledger of the store.
        (the others): as `convert`.

    Raises:
        CkpttoolError: as `convert`, and the destination is as it was before; or the archive is there and its sidecar or
        its
            line in the ledger could not be written, which the message says.
    """
    return export_with(
        src,
        dst,
        options,
        in_ledger=in_ledger,
        reading=OpenOptions(**reading),
        writing=WriteRequest(dtype=dtype, drop=drop, ignore_recorded_digests=ignore_recorded_digests),
        running=RunOptions(
            force=force, verify=verify, max_memory_bytes=max_memory_bytes, threads=threads, progress=progress
        ),
    )


def export_with(
    src: CheckpointPath,
    dst: str,
    options: ArchiveOptions,
    *,
    in_ledger: bool,
    reading: OpenOptions,
    writing: WriteRequest,
    running: RunOptions,
) -> Exported:
    """`export`."""
    sealed = bool(options.recipients)
    folder, name = urls.split_url(dst) if urls.is_url(dst) else os.path.split(os.path.abspath(dst))
    clock = None
    if in_ledger and (urls.is_url(folder) or os.path.isdir(folder)):
        clock = ledger.clock_behind(ledger.refuse_unwritable(folder))  # warn now, not after everything was copied
    result = convert_with(
        src,
        dst,
        replace(reading, only=options.only),
        replace(writing, to="audit", options=options),
        replace(running, verify=running.verify and not sealed),
    )
    if clock:
        result.notes.append(clock)
    entry, recorded = None, not sealed
    try:
        with remote.open_source(folder) as source:
            known = ArchiveFacts(**{**result.about, "bytes": source.size(name)})
            ciphertext = sidecar.ciphertext(source, name, running.progress) if sealed else None
        if ciphertext is not None:
            sidecar.put(folder, sidecar.name(name), sidecar.encode(asdict(known), ciphertext))
            recorded = True
        if in_ledger:
            facts = {k: v for k, v in asdict(known).items() if k != "name"}
            if ciphertext is not None:
                facts["ciphertext_sha256"] = ciphertext["sha256"]
            entry = ledger.append(folder, "export", name, **facts)
    except (CkpttoolError, OSError) as e:
        raise _unrecorded(e, dst, recorded) from e
    except KeyboardInterrupt:
        if entry is None and (in_ledger or not recorded):
            raise _unrecorded(Interrupted("interrupted."), dst, recorded) from None
        raise
    return Exported(result, known, entry)


def _unrecorded(e: CkpttoolError | OSError, dst: str, sidecar_there: bool) -> CkpttoolError:
    """The same error, with what it leaves behind: an archive that neither sidecar nor ledger knows."""
    where = urls.redact_url(dst)
    kind = type(e) if isinstance(e, CkpttoolError) else CkpttoolError
    if not sidecar_there:
        return kind(
            f"{e} The archive {where} is whole, but {sidecar.name(where)} is missing, and without it nobody can list "
            "or keep it. Delete the archive and export again."
        )
    return kind(
        f"{e} The archive {where} is whole, but the ledger has no line for it. When the ledger can be written, run "
        f"`ckpttool audit ledger add {shlex.quote(where)}`."
    )


@list_reading_keywords
def restore(
    archive: str,
    dst: str | os.PathLike[str],
    *,
    to: str | None = None,
    options: object = None,
    identities: Sequence[str] = (),
    scratch: str | None = None,
    world_size: int | None = None,
    only: Iterable[str] | None = None,
    dtype: str | None = None,
    drop: bool = False,
    force: bool = False,
    verify: bool = True,
    max_memory_bytes: int | None = None,
    threads: int = 2,
    progress: Progress = silent,
    **reading: Unpack[Hints],
) -> ConvertResult:
    """Write the state of an archive in any layout.

    Args:
        identities: files with the keys to an encrypted archive.
        scratch: folder for its plain bytes while it is read; by default that of the destination.
        (the others): as `convert`.

    Raises:
        CkpttoolError: as `convert`; every tensor has been compared with the digest in the manifest.
    """
    return restore_with(
        archive,
        dst,
        identities=identities,
        scratch=scratch,
        reading=OpenOptions(only=only, **reading),
        writing=WriteRequest(to=to, options=options, world_size=world_size, dtype=dtype, drop=drop),
        running=RunOptions(
            force=force, verify=verify, max_memory_bytes=max_memory_bytes, threads=threads, progress=progress
        ),
    )


def restore_with(
    archive: str,
    dst: str | os.PathLike[str],
    *,
    identities: Sequence[str],
    scratch: str | None,
    reading: OpenOptions,
    writing: WriteRequest,
    running: RunOptions,
) -> ConvertResult:
    """`restore`."""
    where = place(archive)
    if where.file is not None and where.file.endswith(ENCRYPTED) and identities:
        folder = scratch or os.path.dirname(os.path.abspath(dst))
        spool, name = decrypted(where.source, where.file, identities, folder, running.progress)
        where.source.close()
        where = Place(spool, name)
    done = convert_with(where, dst, replace(reading, source_layout="audit"), writing, running)
    return replace(done, source=archive)
