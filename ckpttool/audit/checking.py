"""`audit verify` as it is called: the archive opened wherever it lies, judged, and the verdict put into the ledger."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .. import remote
from ..errors import CkpttoolError, Corrupt, Differs, UsageError
from ..fill import Progress
from ..layouts import place
from . import ledger
from .archive import SEALED
from .export import check_ciphertext
from .spool import unsealed
from .verification import Verdict, verify_archive

__all__ = ["check"]


def check(
    path: str,
    *,
    quick: bool = False,
    deep: bool = False,
    public_key: str | None = None,
    certificates: Sequence[str] = (),
    against: str | None = None,
    root: str | None = None,
    identities: Sequence[str] = (),
    scratch: str | None = None,
    in_ledger: bool = True,
    jobs: int = 2,
    progress: Progress = lambda what, done, total: None,
) -> Verdict:
    """Judge an archive. Without a key, of an encrypted one the ciphertext is compared with its sidecar.

    A line goes into the ledger of the store, where there is one that can be written to.

    Raises:
        Differs: signature, checkpoint or root are others. UsageError: arguments that make no sense together.
    """
    where = place(path)
    source, file = where.source, where.file
    if file is None:
        source.close()
        raise UsageError(f"{path} is a folder; an archive is a file.")
    store = source.root
    try:
        if deep and against is None and root is None:
            root = _recorded(store, file)
        name = file
        if file.endswith(SEALED):
            if not identities:
                if public_key or certificates or against:
                    raise UsageError(f"{path} is encrypted: give --identity to look inside.")
                return _note(_ciphertext(source, file, root, progress), store, file, in_ledger)
            spool, name = unsealed(source, file, identities, scratch or _here(source), progress)
            source.close()
            source = spool
        found = verify_archive(
            source, name, quick=quick, public_key=public_key, certificates=certificates, against=against, root=root,
            jobs=jobs, progress=progress,
        )  # fmt: skip
    except (Corrupt, Differs) as e:
        _append(store, file, in_ledger, sound=False, depth="quick" if quick else "full", why=str(e)[:500])
        raise
    finally:
        source.close()
    found.path = path
    return _note(found, store, file, in_ledger)


def _here(source: object) -> str:
    root = getattr(source, "root", "")
    return root if os.path.isdir(root) else "."


def _recorded(store: str, file: str) -> str:
    """The root that the ledger has of the export."""
    rows = (
        [e for e in ledger.read(store) if e["event"] == "export" and e["archive"] == file]
        if ledger.exists(store)
        else []
    )
    if not rows:
        raise UsageError(f"--deep: {store} has no ledger with an export of {file}; give --against or --root.")
    return str(rows[-1]["merkle_root"])


def _ciphertext(source: object, file: str, root: str | None, progress: Progress) -> Verdict:
    from ..store import Source

    assert isinstance(source, Source)
    said, wrong = check_ciphertext(source, file, progress)
    out = Verdict(f"{source.root}/{file}", "deep" if root else "full", source.size(file), wrong)
    out.signature = "in the ciphertext, not checked (give --identity)" if said.get("signed") else "none"
    if root is not None and root.lower().removeprefix("blake3:") != said.get("merkle_root"):
        raise Differs(f"{out.path}: the sidecar has the Merkle root {said.get('merkle_root')}, not {root}.")
    out.against = root
    out.manifest_sha256, out.created = said.get("manifest_sha256"), said.get("created")
    return out


def _note(found: Verdict, store: str, file: str, in_ledger: bool) -> Verdict:
    _append(
        store, file, in_ledger, sound=not found.findings, depth=found.depth, merkle_root=found.merkle_root,
        manifest_sha256=found.manifest_sha256, created=found.created, bytes=found.file_bytes,
        why=str(found.findings[0])[:500] if found.findings else None,
    )  # fmt: skip
    return found


def _append(store: str, file: str, in_ledger: bool, **facts: object) -> None:
    """A line, where there is a ledger and it may be written to: looking at an archive does not begin one."""
    if not in_ledger:
        return
    try:
        if ledger.exists(store):
            ledger.append(store, "verify", file, **facts)
    except (CkpttoolError, OSError):
        if not remote.is_url(store) and os.access(os.path.join(store, "ledger.jsonl"), os.W_OK):
            raise
