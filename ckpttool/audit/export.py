"""`audit export` and `audit restore`: a conversion into an archive and out of it, and what goes with it.

With an export go its line in the ledger of the store, for a store with object lock the headers that hold the object
there, and for an encrypted archive a sidecar, NAME.tar.zst.age.json, that says what is in it and has the hashes of the
ciphertext, so that it can be listed, kept and checked by those who have no key.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from blake3 import blake3

from .. import remote
from ..conversion import Result, convert
from ..draft import write_error
from ..fill import Progress
from ..layouts import Place, place
from ..store import Source
from . import ledger
from . import manifest as records
from .archive import SEALED, Facts, read_sidecar, sidecar
from .options import ArchiveOptions
from .spool import unsealed
from .verification import Finding

__all__ = ["Exported", "check_ciphertext", "export", "restore"]

_BLOCK = 64 << 20  # bytes of ciphertext that have a hash of their own
_PIECE = 4 << 20


@dataclass
class Exported:
    """What an export did. `entry` is its line in the ledger, None where there is none."""

    result: Result
    facts: Facts
    entry: dict[str, Any] | None


def _silent(what: str, done: int, total: int) -> None:
    return None


def export(
    src: str | os.PathLike[str],
    dst: str,
    options: ArchiveOptions,
    *,
    in_ledger: bool = True,
    verify: bool = True,
    progress: Progress = _silent,
    **how: Any,
) -> Exported:
    """Write a checkpoint in any layout into one archive; `how` are further arguments of `convert`.

    An encrypted archive is not read back, since the key to it is not here: age proves its bytes when they are read.

    Raises:
        CkpttoolError: as `convert`; the destination is as it was before.
    """
    sealed = bool(options.recipients)
    result = convert(
        src, dst, to="audit", archive=options, only=options.only, verify=verify and not sealed, progress=progress, **how
    )
    folder, name = os.path.split(dst) if remote.is_url(dst) else os.path.split(os.path.abspath(dst))
    with _store(folder) as source:
        known = Facts(**{**result.about, "bytes": source.size(name)})
        ciphertext = _ciphertext(source, name, progress) if sealed else None
    if ciphertext is not None:
        said = {"schema": records.SCHEMA, "archive": asdict(known), "ciphertext": ciphertext}
        _put(folder, sidecar(name), (json.dumps(said, indent=1, ensure_ascii=False) + "\n").encode())
    entry = None
    if in_ledger:
        facts = {k: v for k, v in asdict(known).items() if k != "name"}
        if ciphertext is not None:
            facts["ciphertext_sha256"] = ciphertext["sha256"]
        entry = ledger.append(folder, "export", name, **facts)
    return Exported(result, known, entry)


def _store(folder: str) -> Source:
    return remote.RemoteSource(folder) if remote.is_url(folder) else Source(folder)


def _put(folder: str, name: str, data: bytes) -> None:
    """A small file beside an archive, whole or not at all."""
    if remote.is_url(folder):
        up = remote.Upload(f"{folder}/{name}", force=True)
        up.append(data)
        up.commit()
        return
    path = os.path.join(folder, name)
    try:
        with open(f"{path}.partial", "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(f"{path}.partial", path)
    except OSError as e:
        raise write_error(e, path) from e


def _ciphertext(source: Source, file: str, progress: Progress) -> dict[str, Any]:
    """Hashes of a file as it lies there: of all of it, and of every 64 MiB, so that damage has a place."""
    whole, tree = hashlib.sha256(), blake3()
    blocks = []
    size = source.size(file)
    for a in range(0, size, _BLOCK):
        block = hashlib.sha256()
        for b in range(a, min(size, a + _BLOCK), _PIECE):
            data = source.read(file, b, min(_PIECE, size - b, a + _BLOCK - b))
            for h in (whole, tree, block):
                h.update(data)
            progress("hash", b + len(data), size)
        blocks.append(block.hexdigest())
    return {
        "bytes": size, "sha256": whole.hexdigest(), "blake3": tree.hexdigest(), "block_bytes": _BLOCK, "blocks": blocks,
    }  # fmt: skip


def check_ciphertext(source: Source, file: str, progress: Progress = _silent) -> tuple[dict[str, Any], list[Finding]]:
    """(what the sidecar says of an encrypted archive, what is wrong with its ciphertext); no key is needed.

    Raises:
        UsageError: there is no sidecar. Corrupt: it is damaged.
    """
    said = read_sidecar(source, file)
    want, have = said["ciphertext"], _ciphertext(source, file, progress)
    wrong = [
        Finding(
            "the ciphertext does not have the SHA-256 of the sidecar",
            file_start=i * _BLOCK,
            file_end=min(have["bytes"], (i + 1) * _BLOCK),
        )
        for i, (a, b) in enumerate(zip(have["blocks"], want.get("blocks", ()), strict=False))
        if a != b
    ]
    if not wrong and have != want:
        wrong = [
            Finding(
                f"the file has {have['bytes']} bytes, by the sidecar {want.get('bytes')}; the copy is incomplete or another"
            )
        ]
    return said["archive"], wrong


def restore(
    archive: str,
    dst: str | os.PathLike[str],
    *,
    identities: Sequence[str] = (),
    scratch: str | None = None,
    progress: Progress = _silent,
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
