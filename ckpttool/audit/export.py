"""`audit export` and `audit restore`: a conversion into an archive and out of it, and what goes with it.

With an export go its line in the ledger of the store, for a store with object lock the headers that hold the object
there, and for an encrypted archive a sidecar, NAME.tar.zst.age.json, that says what is in it and has the hashes of the
ciphertext, so that it can be listed, kept and checked by those who have no key.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..engine.conversion import Result, convert
from ..engine.fill import Progress, silent
from ..errors import CkpttoolError
from ..layouts import Place, place
from ..storage import remote
from . import ledger, sidecar
from .archive import SEALED, Facts
from .options import ArchiveOptions
from .spool import unsealed

__all__ = ["Exported", "export", "restore"]


@dataclass
class Exported:
    """What an export did. `entry` is its line in the ledger, None where there is none."""

    result: Result
    facts: Facts
    entry: dict[str, Any] | None


def export(
    src: str | os.PathLike[str],
    dst: str,
    options: ArchiveOptions,
    *,
    in_ledger: bool = True,
    verify: bool = True,
    progress: Progress = silent,
    **how: Any,
) -> Exported:
    """Write a checkpoint in any layout into one archive; `how` are further arguments of `convert`.

    An encrypted archive is not read back, since the key to it is not here: age proves its bytes when they are read.

    Raises:
        CkpttoolError: as `convert`, and the destination is as it was before; or the archive is there and its sidecar or its
            line in the ledger could not be written, which the message says.
    """
    sealed = bool(options.recipients)
    folder, name = remote.split(dst) if remote.is_url(dst) else os.path.split(os.path.abspath(dst))
    clock = None
    if in_ledger and (remote.is_url(folder) or os.path.isdir(folder)):
        clock = ledger.clock_behind(ledger.refuse_unwritable(folder))  # said now, and not when everything is copied
    result = convert(
        src, dst, to="audit", archive=options, only=options.only, verify=verify and not sealed, progress=progress, **how
    )
    if clock:
        result.notes.append(clock)
    entry, recorded = None, not sealed
    try:
        with remote.source(folder) as source:
            known = Facts(**{**result.about, "bytes": source.size(name)})
            ciphertext = sidecar.ciphertext(source, name, progress) if sealed else None
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
    return Exported(result, known, entry)


def _unrecorded(e: CkpttoolError | OSError, dst: str, sidecar_there: bool) -> CkpttoolError:
    """The same error, with what it leaves: an archive that has its name, and nothing that knows of it."""
    where = remote.shown(dst)
    kind = type(e) if isinstance(e, CkpttoolError) else CkpttoolError
    if not sidecar_there:
        return kind(
            f"{e} The archive {where} is whole, but {sidecar.name(where)} is missing, and without it nobody can list or keep "
            "it. Delete the archive and export again."
        )
    return kind(
        f"{e} The archive {where} is whole, but the ledger has no line for it. When the ledger can be written, run "
        f"`ckpttool audit ledger add {shlex.quote(where)}`."
    )


def restore(
    archive: str,
    dst: str | os.PathLike[str],
    *,
    identities: Sequence[str] = (),
    scratch: str | None = None,
    progress: Progress = silent,
    **how: Any,
) -> Result:
    """Write the state of an archive in any layout; `how` are arguments of `convert`.

    Args:
        identities: files with the keys to an encrypted archive.
        scratch: folder for its plain bytes while it is read; the destination's own where None.

    Raises:
        CkpttoolError: as `convert`; every tensor has been compared with the digest in the manifest.
    """
    where = place(archive)
    if where.file is not None and where.file.endswith(SEALED) and identities:
        folder = scratch or os.path.dirname(os.path.abspath(dst))
        spool, name = unsealed(where.source, where.file, identities, folder, progress)
        where.source.close()
        where = Place(spool, name)
    done = convert(where, dst, layout="audit", progress=progress, **how)
    return replace(done, source=archive)
