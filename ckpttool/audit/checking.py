"""`audit verify` as it is called: the archive opened wherever it lies, judged, and the verdict put into the ledger."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from .. import remote
from ..errors import CkpttoolError, Corrupt, Differs, UsageError
from ..fill import Progress, silent
from ..layouts import place
from ..store import Source
from . import ledger, sidecar
from .archive import SEALED
from .spool import unsealed
from .verification import Finding, Verdict, verify_archive

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
    progress: Progress = silent,
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
        root = None if root is None else _digest_of(root)
        recorded = _recorded(store, file) if deep and against is None and root is None else {}
        root = recorded.get("merkle_root", root)
        name = file
        if file.endswith(SEALED):
            if not identities:
                if public_key or certificates or against:
                    raise UsageError(f"{path} is encrypted: give --identity to look inside.")
                found = _ciphertext(source, file, root, quick, progress)
                _compare(found, recorded)
                return _note(found, store, file, in_ledger)
            spool, name = unsealed(source, file, identities, scratch or _here(source), progress)
            source.close()
            source = spool
        found = verify_archive(
            source, name, quick=quick, public_key=public_key, certificates=certificates, against=against, root=root,
            jobs=jobs, progress=progress,
        )  # fmt: skip
        if not found.findings:
            _compare(found, recorded)
    except (Corrupt, Differs) as e:
        _append(store, file, in_ledger, sound=False, depth="quick" if quick else "full", why=str(e)[:500])
        raise
    finally:
        source.close()
    found.path = path
    return _note(found, store, file, in_ledger)


def _here(source: Source) -> str:
    """Where the plain bytes of an encrypted archive may lie meanwhile: beside it."""
    return source.root if os.path.isdir(source.root) else "."


def _digest_of(text: str) -> str:
    """A digest as people write it: HEX, blake3:HEX or sha256:HEX."""
    kind, _, told = text.strip().lower().rpartition(":")
    if kind not in ("", "blake3", "sha256") or not re.fullmatch(r"[0-9a-f]{64}", told):
        raise UsageError(
            f"--root {text!r}: give the 64 digits of a Merkle root, or sha256: and those of MANIFEST.json."
        )
    return f"{kind}:{told}" if kind else told


def _recorded(store: str, file: str) -> dict[str, str]:
    """The hashes that the ledger has of the export."""
    rows = (
        [e for e in ledger.read(store) if e["event"] == "export" and e["archive"] == file]
        if ledger.exists(store)
        else []
    )
    if not rows:
        raise UsageError(f"--deep: {store} has no ledger with an export of {file}; give --against or --root.")
    return {k: str(rows[-1].get(k)) for k in ("merkle_root", "manifest_sha256", "sums_sha256", "ciphertext_sha256")}


def _compare(found: Verdict, recorded: dict[str, str]) -> None:
    """Every hash that the ledger has and that was found: tensors, all state, all members, the ciphertext."""
    for key, told in recorded.items():
        have = getattr(found, key)
        if have is not None and told != str(have):
            raise Differs(
                f"{found.path}: its {key} is {have}, by the ledger {told} was exported. It is another archive than the one "
                "that was put there."
            )
    if recorded:
        found.against = "what the ledger recorded at the export"


def _ciphertext(source: Source, file: str, root: str | None, quick: bool, progress: Progress) -> Verdict:
    """An encrypted archive without its key: the ciphertext against the hashes beside it."""
    said = sidecar.read(source, file)
    known, want = said["archive"], said["ciphertext"]
    have = {**want, "bytes": source.size(file)} if quick else sidecar.ciphertext(source, file, progress)
    out = Verdict(f"{source.root}/{file}", "quick" if quick else "ciphertext", have["bytes"])
    for i, (a, b) in enumerate(zip(have["blocks"], want["blocks"], strict=False)):
        if a != b:
            what = "the ciphertext does not have the SHA-256 of the sidecar"
            end = min(have["bytes"], (i + 1) * sidecar.BLOCK)
            out.findings.append(Finding(what, file_start=i * sidecar.BLOCK, file_end=end))
    if not out.findings and have != want:
        out.findings.append(Finding(f"the file has {have['bytes']} bytes, by its sidecar {want['bytes']}"))
    out.ciphertext_sha256 = have["sha256"]
    out.signature = "in the ciphertext, not checked (give --identity)" if known.get("signed") else "none"
    out.manifest_sha256, out.created = known.get("manifest_sha256"), known.get("created")
    said_root = out.manifest_sha256 if (root or "").startswith("sha256:") else known.get("merkle_root")
    if root is not None and root.rpartition(":")[2] != said_root:
        raise Differs(f"{out.path}: the sidecar has {said_root}, not {root}.")
    out.against = root
    return out


def _note(found: Verdict, store: str, file: str, in_ledger: bool) -> Verdict:
    _append(
        store, file, in_ledger, sound=not found.findings, depth=found.depth, merkle_root=found.merkle_root,
        manifest_sha256=found.manifest_sha256, created=found.created or "", bytes=found.file_bytes,
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
