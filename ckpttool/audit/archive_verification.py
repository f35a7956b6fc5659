"""`audit verify`: an archive read from its first byte to its last and compared with its own records, never extracted.

    quick     the structure (archive.py) and the signature; reads kilobytes
    default   also every frame, the SHA-256 of every member and the digest of every tensor
    deep      also a live checkpoint, or a Merkle root that was written down

Damage becomes an `ArchiveFinding`: which bytes of which tensor of which member. Reading continues after a damaged
frame. If the structure itself is damaged, the manifest is searched for at the end of the tar, so that findings have
names even then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from ..engine.copy.fill import Progress, silent
from ..engine.diff import diff
from ..engine.workers.coordinator import workers_for_reading
from ..engine.workers.executors import Workers, WorkersSpec
from ..errors import CkpttoolError, Corrupt, Differs, argument
from ..layouts import Place, ReadOptions, find
from ..options import ARCHIVE_LAYOUT
from ..printable import count_noun
from ..storage.source import Source
from . import archive_plan as plan
from . import signing
from .archive import Archive
from .archive_hashing import ArchiveFinding, ArchiveHasher
from .frame_format import LOOK
from .parallel_reading import hash_with_workers

__all__ = ["ArchiveFinding", "ArchiveVerdict", "verify_archive"]


@dataclass
class ArchiveVerdict:
    """The result of a verification; sound if `findings` is empty. `signature` says who signed, or why that is unknown,
    `ledger` what the store's ledger says about the archive, `warnings` where ledger and hold file disagree and why
    workers were not used, `workers` who read: `parallel_reading.hash_with_workers`, None for one process."""

    path: str
    depth: str
    file_bytes: int
    findings: list[ArchiveFinding] = field(default_factory=list)
    tensors: int = 0
    tensor_bytes: int = 0
    merkle_root: str | None = None
    manifest_sha256: str | None = None
    sums_sha256: str | None = None
    ciphertext_sha256: str | None = None
    created: str | None = None
    signature: str = "none"
    against: str | None = None
    ledger: str | None = None
    warnings: list[str] = field(default_factory=list)
    workers: dict[str, Any] | None = None

    def to_json(self) -> dict[str, object]:
        """Return the fields as plain data, with "sound" (bool) and, if it is false, "error", as in JSON of the command
        line."""
        out = {"sound": not self.findings, **asdict(self)}
        if self.findings:
            e = Corrupt(self.describe_damage(), code="CKPT0425")
            out["error"] = {"code": e.code, "kind": e.kind, "exit_code": e.exit_code, "message": str(e)}
        return out

    def describe_damage(self) -> str:
        """Return a text on the first finding and the number of the others; there must be at least one."""
        n = len(self.findings) - 1
        more = f" (and {count_noun(n, 'more finding')})" if n else ""
        text = str(self.findings[0]).rstrip(". ")
        return f"{self.path} is damaged or altered: {text}{more}. Take another copy."


def verify_archive(
    source: Source,
    file: str,
    *,
    quick: bool = False,
    public_key: str | None = None,
    certificates: Sequence[str] = (),
    against: str | None = None,
    root: str | None = None,
    jobs: int = 2,
    workers: WorkersSpec = None,
    path_for_workers: str | None = None,
    progress: Progress = silent,
) -> ArchiveVerdict:
    """Verify an archive that is not encrypted; what is wrong with it is in the verdict.

    Args:
        source, file: the folder or bucket that contains it, and its name there.
        quick: read only the structure and the signature, not the data.
        public_key, certificates: files with the key or the root certificates of the expected signer; without any, a
            signature is described but not checked.
        against: a checkpoint in any layout that must hold the same state; None: compare with none.
        root: the expected Merkle root (of all tensors), or "sha256:" and the expected hash of MANIFEST.json (of all
            state); None: expect none.
        jobs: threads that decompress and hash; of each worker, if there are some.
        workers: who reads, as in `ckpttool.convert`; None: this process.
        path_for_workers: the path or URL at which workers open the archive; if None, this process reads it alone.
        progress: called with (stage, bytes done, bytes in all).

    Raises:
        Differs: it is not signed, or signature, checkpoint or root are not the expected ones.
        UsageError: a key cannot be read. Corrupt, Unsupported: the signature is damaged, or model-signing before 1.0
            made it.
        SourceChanged, RemoteError: the file was written to, or could not be read, after it was opened.
    """
    path = f"{source.root}/{file}"
    out = ArchiveVerdict(path, "quick" if quick else "deep" if against or root else "full", source.size(file))
    archive: Archive | None = None
    structure: CkpttoolError | None = None
    try:
        archive = Archive(source, file)
        components = _list_components(archive)
        archive.read_retention()
    except CkpttoolError as e:
        structure = e
    # every byte, also of an archive whose structure is damaged
    if not quick:
        hasher = ArchiveHasher(source, file, archive)
        with _open_workers(archive, workers, path_for_workers, out) as crew:
            if crew is None or path_for_workers is None:
                hasher.hash_all(jobs, progress)
            else:
                out.workers = hash_with_workers(hasher, path_for_workers, crew, jobs, progress)
        out.findings += hasher.compare()
    if structure is not None and not out.findings:
        text = str(structure).removeprefix(path).lstrip("/: ")
        out.findings.append(ArchiveFinding(text.removesuffix(LOOK)))
    if archive is None or structure is not None:
        return out
    # what the records say, which are proved by now
    out.tensors = len(archive.manifest.tensors)
    out.tensor_bytes = sum(t.nbytes for t in archive.manifest.tensors.values())
    out.merkle_root, out.manifest_sha256 = archive.manifest.merkle_root, archive.manifest_sha256
    out.sums_sha256, out.created = archive.sums_sha256, archive.provenance["created"] or ""
    if out.findings:
        return out
    # a sound archive: is it the expected one?
    _check_signature(archive, out, public_key, certificates)
    if root is not None:
        _check_root(out, root)
    if against is not None:
        out.against = _compare_with_checkpoint(archive, against, components, workers, path_for_workers, progress)
    elif root is not None:
        out.against = root
    source.assert_unchanged()
    return out


@contextmanager
def _open_workers(
    archive: Archive | None, spec: WorkersSpec, path: str | None, out: ArchiveVerdict
) -> Iterator[Workers | None]:
    """Keep the workers that read an archive open while the block runs.

    Args:
        archive: the archive; None if its structure is damaged.
        spec: which workers to use, as in `ckpttool.convert`.
        path: path or URL at which workers open the archive; None if they cannot.
        out: gets a warning if workers were requested and cannot be used.

    Yields:
        The workers; None if this process must read alone.
    """
    why = None
    if path is None:
        why = "an encrypted archive is decrypted, and read, by one process"
    elif archive is None:
        why = "the structure is damaged, so its frames have to be searched for from front to back"
    if archive is not None and why is None:
        with workers_for_reading(spec, path, archive.table.logical_size) as crew:
            yield crew
        return
    if spec not in (None, 1, "1"):
        out.warnings.append(f"workers were not used: {why}")
    yield None


def _check_signature(
    archive: Archive, out: ArchiveVerdict, public_key: str | None, certificates: Sequence[str]
) -> None:
    """Check the signature, if a key or certificate was given; otherwise only describe it. Sets `out.signature`.

    Raises:
        Differs: the archive is not signed although a key or certificate was given, or the signature does not fit.
        Corrupt, Unsupported: the signature is damaged, or was made by model-signing before 1.0.
        UsageError: model-signing is not installed, or a key or certificate is missing or unreadable.
    """
    asked = public_key is not None or bool(certificates)
    if not archive.signed:
        if asked:
            raise Differs(
                f"{out.path} is not signed, so nothing proves that it is the one that was exported.", code="CKPT0502"
            )
        return
    bundle = archive.read_all(plan.SIGNATURE, 16 << 20)
    if not asked:
        wanted = f"{argument('public_key')} or {argument('certificates')}"
        out.signature = f"{signing.describe_signer(bundle)}, not checked (give {wanted})"
        return
    out.signature = "good: " + signing.verify_signature(
        bundle, archive.signed_files(), public_key=public_key, certificates=certificates
    )


def _check_root(out: ArchiveVerdict, root: str) -> None:
    """Compare the root that a verification found with an expected one.

    Args:
        out: what was found; it is only read.
        root: the Merkle root in hex, or "sha256:" and the SHA-256 of MANIFEST.json.

    Raises:
        Differs: it is another.
    """
    kind, _, wanted = root.rpartition(":")
    have = {"": out.merkle_root, "blake3": out.merkle_root, "sha256": out.manifest_sha256}[kind]
    if wanted != have:
        what = "manifest has the SHA-256" if kind == "sha256" else "Merkle root is"
        raise Differs(f"{out.path}: its {what} {have}, not {wanted}. It is not the recorded state.", code="CKPT0501")


def _list_components(archive: Archive) -> list[str]:
    """Return the sorted names of the components (model, optim, ...) that an archive holds.

    Raises:
        CkpttoolError: the records of the archive contradict each other.
    """
    ckpt = find(ARCHIVE_LAYOUT).read(Place(archive, None), ReadOptions())
    return sorted({str(ckpt.component(n)) for n in [*ckpt.tensors, *ckpt.values]})


def _compare_with_checkpoint(
    archive: Archive, against: str, components: list[str], workers: WorkersSpec, path: str | None, progress: Progress
) -> str:
    """Compare an archive with a checkpoint, and return a text that says what was compared.

    Args:
        against: the checkpoint, in any layout.
        components: those in the archive; if not all were exported, only these are compared.
        workers: which processes read, as in `ckpttool.convert`.
        path: path or URL at which workers open the archive; None: only the source of the open archive is read.

    Raises:
        Differs: they are not equal.
    """
    only = archive.provenance["only"]
    only = components if only is not None and set(only) == set(components) else only
    found = diff(path or Place(archive.base, archive.file), against, only=only, workers=workers, progress=progress)
    if not found.equal:
        names = [
            *found.only_in_a,
            *found.only_in_b,
            *found.dtypes,
            *found.shapes,
            *found.values,
            *(d.name for d in found.data),
        ]
        raise Differs(
            f'{against} differs from {archive.root}: {len(names)} entries differ, first "{names[0]}". '
            "`ckpttool diff` shows the values.",
            code="CKPT0501",
        )
    return against if only is None else f"the {', '.join(only)} of {against}, which is all that was kept"
