"""`audit verify` as a command: open the archive, verify it, compare it with the ledger, and record the verdict
there."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..engine.copy.fill import Progress, silent
from ..engine.workers.executors import WorkersSpec, serve_if_worker
from ..errors import CkpttoolError, Corrupt, Differs, Locked, Unsafe, UsageError, argument
from ..layouts import place
from ..storage import urls
from ..storage.source import Source
from ..storage.sources import open_source
from . import ledger, sidecar
from .archive import ENCRYPTED
from .archive_store import find_hold_disagreements
from .archive_verification import ArchiveFinding, ArchiveVerdict, verify_archive
from .spool import decrypt_to_spool

__all__ = ["verify"]


def verify(
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
    workers: WorkersSpec = None,
    progress: Progress = silent,
) -> ArchiveVerdict:
    """Verify an archive and compare it with the ledger of its store. Of an encrypted one without a key, only the
    ciphertext is compared with the sidecar, the file next to it.

    If the store has a ledger, the archive is compared with the one recorded under this name, at any depth, and the
    result is appended if the ledger is writable.

    Args:
        path: path or URL of the archive.
        quick: read only the structure and the signature, not the data.
        deep: if neither `against` nor `root` is given, compare with the Merkle root in the ledger.
        public_key, certificates: files with the key or the root certificates of the expected signer; without any, a
            signature is described but not checked.
        against: a checkpoint in any layout that must hold the same state; None: compare with none.
        root: the expected Merkle root, or "sha256:" and the expected hash of MANIFEST.json; None: expect none.
        identities: files with keys that decrypt it.
        scratch: folder for its decrypted bytes; None: next to it, or the current one if it is behind a URL.
        in_ledger: whether to append the result to the ledger.
        jobs: threads that decompress and hash; of each worker, if there are some.
        workers: who reads the archive, as in `ckpttool.convert`; None: this process. One process reads an encrypted
            one, or one whose structure is damaged; a warning says so.
        progress: called with (stage, bytes done, bytes in all).

    Raises:
        Differs: signature, checkpoint or root differ, or it is not the recorded archive.
        UsageError: arguments that contradict each other, no key that fits, or nothing to compare with. Corrupt: the
            ledger, the sidecar or the ciphertext is damaged. Damage of the archive itself is in the verdict. Locked:
            another process keeps the ledger locked.
    """
    serve_if_worker(workers)
    _refuse_quick_workers(quick, workers)
    where = place(path)
    source, file = where.source, where.file
    # what the archive is compared with: the arguments, or what the ledger recorded at the export
    by_ledger = deep and against is None and root is None
    try:
        if file is None:
            raise UsageError(f"{path} is a folder; an archive is a file.", code="CKPT0221")
        root = None if root is None else _parse_root(root)
        in_store = _InStore.of(source.root, file, in_ledger)
        if by_ledger:
            root = in_store.recorded_root()
    except CkpttoolError:
        source.close()
        raise
    sealed = file.endswith(ENCRYPTED) and not identities
    try:
        if sealed:
            if public_key or certificates or against:
                raise UsageError(f"{path} is encrypted: give {argument('identities')} to look inside.", code="CKPT0218")
            found = _verify_ciphertext(source, file, root, quick, workers, progress)
        else:
            name = file
            if file.endswith(ENCRYPTED):
                beside = source.root if os.path.isdir(source.root) else "."
                spool, name = decrypt_to_spool(source, file, identities, scratch or beside, progress)
                source.close()
                source = spool
            found = verify_archive(
                source,
                name,
                quick=quick,
                public_key=public_key,
                certificates=certificates,
                against=against,
                root=root,
                jobs=jobs,
                workers=workers,
                path_for_workers=path if source is where.source else None,
                progress=progress,
            )
        in_store.compare(found, by_ledger)
    except (Corrupt, Differs) as e:
        if lost := in_store.append_line(sound=False, depth="quick" if quick else "full", why=str(e)[:500]):
            e.add_note(lost)
        raise
    finally:
        source.close()
    if not sealed:
        found.path = path
    return in_store.record_result(found)


def _refuse_quick_workers(quick: bool, workers: WorkersSpec) -> None:
    """Raise UsageError if workers are given for a quick verification, which reads only kilobytes."""
    if quick and workers is not None:
        raise UsageError(
            f"{argument('workers', workers)}: only structure and signature were asked for, which one process reads. "
            "Leave one of the two out.",
            code="CKPT0204",
        )


@dataclass
class _InStore:
    """An archive in its store, and the lines of the store's ledger.

    `lines` is None if there is no ledger, or if it cannot be read: then `unread` says why. `appends` says whether the
    result is recorded there; looking at an archive does not begin a ledger.
    """

    store: str
    file: str
    lines: list[ledger.LedgerEntry] | None
    unread: str | None
    appends: bool

    @classmethod
    def of(cls, store: str, file: str, in_ledger: bool) -> _InStore:
        """Read the ledger of a store, for the archive `file` in it.

        Args:
            in_ledger: whether to append the result of the verification to the ledger, if there is one.

        Raises:
            Corrupt, Unsafe: the ledger is damaged, and `in_ledger` is set. Locked: another process keeps it locked, and
                `in_ledger` is set.
        """
        try:
            lines = ledger.read_entries_or_none(store)
            return cls(store, file, lines, None, in_ledger and lines is not None)
        except CkpttoolError as e:
            if in_ledger and isinstance(e, (Corrupt, Locked, Unsafe)):
                raise
            return cls(store, file, None, f"not compared with it: {e}", False)

    def recorded_root(self) -> str:
        """Return the Merkle root that the ledger records for the archive; raises UsageError if there is none."""
        recorded = ledger.find_latest_records(self.lines or [])
        if self.file not in recorded:
            raise UsageError(
                f"{argument('deep', True)}: "
                f"{self.unread or f'{self.store} has no ledger with an export of {self.file}'}; give "
                f"{argument('against')} or {argument('root')}.",
                code="CKPT0204",
            )
        return str(recorded[self.file].get("merkle_root"))

    def compare(self, found: ArchiveVerdict, by_ledger: bool) -> None:
        """Compare a verdict with what the ledger and the hold file record of the archive.

        Compared are every hash, whether the archive was signed, and by which key. The result is stored in the fields
        `ledger`, `warnings` and `against` of the verdict.

        Args:
            found: the verdict; it is not compared if it has findings.
            by_ledger: whether the expected Merkle root was the ledger's, which `found.against` then says.

        Raises:
            Differs: the ledger records another archive under this name.
        """
        found.ledger = self.unread
        if self.lines is None or found.findings:
            return
        known = {**asdict(found), "signed": found.signature != "none", "signed_by": found.signature}
        match = ledger.match_archive(ledger.find_latest_records(self.lines), self.file, known)
        if match.state == "differs":
            raise Differs(f"{found.path}: {match.says}", code="CKPT0501")
        found.ledger = match.says
        with open_source(self.store) as folder:
            there = folder.exists(sidecar.get_hold_file_name(self.file))
            held = sidecar.read_holds(folder, self.file) if there else []
        found.warnings += find_hold_disagreements(self.file, self.lines, held)
        if by_ledger:
            found.against = "what the ledger recorded at the export"

    def record_result(self, found: ArchiveVerdict) -> ArchiveVerdict:
        """Append a line with the verdict to the ledger, if it may be written; returns the verdict, with a warning if it
        is bad and the line could not be written."""
        lost = self.append_line(
            sound=not found.findings,
            depth=found.depth,
            merkle_root=found.merkle_root,
            manifest_sha256=found.manifest_sha256,
            created=found.created or "",
            bytes=found.file_bytes,
            why=str(found.findings[0])[:500] if found.findings else None,
        )
        if lost:
            found.warnings.append(lost)
        return found

    def append_line(self, *, sound: bool, **facts: object) -> str:
        """Append a "verify" line with these facts to the ledger, if `appends` is set.

        A failure is ignored in an object store, and if this user may not write to the ledger.

        Args:
            sound: whether the archive is sound. If it is not, the caller reports that, whatever fails here.
            facts: further fields of the line.

        Returns:
            Why the line is missing, if the archive is not sound, or another process keeps the ledger locked; "" if it
            is there, or if this user may not write it.

        Raises:
            CkpttoolError, OSError: the line of a sound archive could not be written to a writable ledger in a folder.
        """
        if not self.appends:
            return ""
        try:
            ledger.append_entry(self.store, "verify", self.file, sound=sound, **facts)
        except (CkpttoolError, OSError) as e:
            if not urls.is_url(self.store) and os.access(os.path.join(self.store, "ledger.jsonl"), os.W_OK):
                if sound and not isinstance(e, Locked):
                    raise
                return f"this verdict is not in the ledger: {str(e).rstrip('.')}"
        return ""


def _parse_root(text: str) -> str:
    """Return a root from the command line in lower case, without surrounding spaces.

    Args:
        text: HEX or blake3:HEX (Merkle root), or sha256:HEX (hash of MANIFEST.json), with 64 digits.

    Raises:
        UsageError: it is none of these.
    """
    kind, _, digits = text.strip().lower().rpartition(":")
    if kind not in ("", "blake3", "sha256") or not re.fullmatch(r"[0-9a-f]{64}", digits):
        raise UsageError(
            f"{argument('root')} {text!r}: give the 64 digits of a Merkle root, or sha256: and those of MANIFEST.json.",
            code="CKPT0203",
        )
    return f"{kind}:{digits}" if kind else digits


def _verify_ciphertext(
    source: Source, file: str, root: str | None, quick: bool, workers: WorkersSpec, progress: Progress
) -> ArchiveVerdict:
    """Verify an encrypted archive without its key: its bytes against the hashes in its sidecar, the file next to it.

    Args:
        root: the Merkle root, or "sha256:" and the hash of MANIFEST.json, that the sidecar must have; None: any.
        quick: compare the size alone.
        workers: a warning says that they are not used.

    Raises:
        Differs: the sidecar has another root. UsageError: there is no sidecar. Corrupt, Unsafe: it is damaged.
    """
    parsed = sidecar.read_sidecar(source, file)
    known, want = parsed["archive"], parsed["ciphertext"]
    have = {**want, "bytes": source.size(file)} if quick else sidecar.hash_ciphertext(source, file, progress)
    out = ArchiveVerdict(f"{source.root}/{file}", "quick" if quick else "ciphertext", have["bytes"])
    if workers not in (None, 1, "1"):
        out.warnings.append("workers were not used: one process hashes the ciphertext")
    for i, (a, b) in enumerate(zip(have["blocks"], want["blocks"], strict=False)):
        if a != b:
            what = "the ciphertext does not have the SHA-256 of the sidecar"
            end = min(have["bytes"], (i + 1) * sidecar.BLOCK)
            out.findings.append(ArchiveFinding(what, file_start=i * sidecar.BLOCK, file_end=end))
    if not out.findings and have != want:
        out.findings.append(ArchiveFinding(f"the file has {have['bytes']} bytes, by its sidecar {want['bytes']}"))
    out.ciphertext_sha256 = have["sha256"]
    out.signature = f"in the ciphertext, not checked (give {argument('identities')})" if known.get("signed") else "none"
    out.manifest_sha256, out.created = known.get("manifest_sha256"), known.get("created")
    said_root = out.manifest_sha256 if (root or "").startswith("sha256:") else known.get("merkle_root")
    if root is not None and root.rpartition(":")[2] != said_root:
        raise Differs(f"{out.path}: the sidecar has {said_root}, not {root}.", code="CKPT0501")
    out.against = root
    return out
