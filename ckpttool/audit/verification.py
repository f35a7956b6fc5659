"""`audit verify`: an archive read from its first byte to its last and compared with its own records, never extracted.

    quick     the structure (archive.py) and the signature; reads kilobytes
    default   also every frame, the SHA-256 of every member and the digest of every tensor
    deep      also a live checkpoint, or a Merkle root that was written down

Damage becomes a `Finding`: which bytes of which tensor of which member. Reading continues after a damaged frame. If the
structure itself is damaged, the manifest is searched for at the end of the tar, so that findings have names even then.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from blake3 import blake3

from ..engine.diff import diff
from ..engine.fill import Progress, silent
from ..errors import CkpttoolError, Corrupt, Differs
from ..layouts import Place, ReadOptions, find
from ..storage.source import Source
from . import byte_planes, plan, signing, tarball
from . import manifest as records
from .archive import Archive
from .frame_format import FRAME, LOOK, read_table
from .frame_reader import FrameReader
from .frame_walk import Walked, walk

__all__ = ["Finding", "Verdict", "verify_archive"]

_MOST_FINDINGS = 1000


@dataclass(frozen=True)
class Finding:
    """One piece of damage, or one difference.

    `start`, `end` are bytes of the member; `tensor_start`, `tensor_end` bytes of the tensor; `file_start`, `file_end`
    bytes of the archive's file.
    """

    what: str
    member: str | None = None
    start: int | None = None
    end: int | None = None
    tensor: str | None = None
    tensor_start: int | None = None
    tensor_end: int | None = None
    file_start: int | None = None
    file_end: int | None = None

    def __str__(self) -> str:
        where = [] if self.member is None else [self.member]
        if self.start is not None:
            where.append(f"bytes {self.start}..{self.end}")
        if self.tensor is not None:
            where.append(f'"{self.tensor}"' if self.tensor.isprintable() else ascii(self.tensor))
        if self.tensor_start is not None:
            where.append(f"its bytes {self.tensor_start}..{self.tensor_end}")
        if self.file_start is not None:
            where.append(f"bytes {self.file_start}..{self.file_end} of the file")
        return f"{', '.join(where)}: {self.what}" if where else self.what


@dataclass
class Verdict:
    """The result of a verification; sound if `findings` is empty. `signature` says who signed, or why that is unknown,
    `ledger` what the store's ledger says about the archive, `warnings` where ledger and hold file disagree."""

    path: str
    depth: str
    file_bytes: int
    findings: list[Finding] = field(default_factory=list)
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

    def to_json(self) -> dict[str, Any]:
        """Plain data, with "sound", and "error" where it is not."""
        out = {"sound": not self.findings, **asdict(self)}
        if self.findings:
            out["error"] = {"kind": Corrupt.__name__, "exit_code": Corrupt.exit_code, "message": self.trouble()}
        return out

    def trouble(self) -> str:
        """The damage, in a sentence or two."""
        n = len(self.findings) - 1
        more = f" (and {n} more finding{'s' if n > 1 else ''})" if n else ""
        text = str(self.findings[0]).rstrip(". ")
        return f"{self.path} is damaged or altered: {text}{more}. Take another copy."


@dataclass
class _Map:
    """Members and tensors by their place in the tar."""

    members: list[tuple[int, int, str]]
    tensors: list[tuple[int, int, str, int]]  # start, end, name, bytes of an element where in planes
    starts: list[int]

    def of(self, start: int, end: int) -> Iterator[Finding]:
        """What a range of the tar contains, as findings without text."""
        for a, b, member in self.members:
            if a >= end:
                break
            if start >= b:
                continue
            first = bisect_right(self.starts, max(a, start)) - 1
            named = False
            for x, y, name, _ in self.tensors[max(0, first) :]:
                if x >= min(b, end):
                    break
                if y > max(start, a):
                    named = True
                    p, q = max(x, start), min(y, end)
                    yield Finding("", member, p - a, q - a, name, p - x, q - x)
            if not named:
                yield Finding("", member, max(a, start) - a, min(b, end) - a)


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
    progress: Progress = silent,
) -> Verdict:
    """Judge an archive; what is wrong with it is in the verdict.

    Args:
        public_key, certificates: who must have signed it; where None a signature is only described.
        against: a checkpoint in any layout that must hold the same state.
        root: what it must have: a Merkle root (of all tensors), or "sha256:" and the hash of MANIFEST.json (of all state).

    Raises:
        Differs: signature, checkpoint or root are others. UsageError: a key cannot be read.
    """
    path = f"{source.root}/{file}"
    out = Verdict(path, "quick" if quick else "deep" if against or root else "full", source.size(file))
    archive: Archive | None = None
    structure: CkpttoolError | None = None
    try:
        archive = Archive(source, file)
        components = _components(archive)
        archive.retention()
    except CkpttoolError as e:
        structure = e
    if not quick:
        _Reading(source, file, archive, out).run(jobs, progress)
    if structure is not None and not out.findings:
        text = str(structure).removeprefix(path).lstrip("/: ")
        out.findings.append(Finding(text.removesuffix(LOOK)))
    if archive is None or structure is not None:
        return out
    out.tensors = len(archive.manifest.tensors)
    out.tensor_bytes = sum(t.nbytes for t in archive.manifest.tensors.values())
    out.merkle_root, out.manifest_sha256 = archive.manifest.merkle_root, archive.manifest_sha256
    out.sums_sha256, out.created = archive.sums_sha256, archive.provenance["created"] or ""
    if out.findings:
        return out
    _signature(archive, out, public_key, certificates)
    if root is not None:
        kind, _, wanted = root.rpartition(":")
        have = {"": out.merkle_root, "blake3": out.merkle_root, "sha256": out.manifest_sha256}[kind]
        if wanted != have:
            what = "manifest has the SHA-256" if kind == "sha256" else "Merkle root is"
            raise Differs(f"{path}: its {what} {have}, not {wanted}. It is not the recorded state.")
    if against is not None:
        out.against = _against(archive, against, components, progress)
    elif root is not None:
        out.against = root
    source.assert_unchanged()
    return out


def _signature(archive: Archive, out: Verdict, public_key: str | None, certificates: Sequence[str]) -> None:
    asked = public_key is not None or bool(certificates)
    if not archive.signed:
        if asked:
            raise Differs(f"{out.path} is not signed, so nothing proves that it is the one that was exported.")
        return
    bundle = archive.read_all(plan.SIGNATURE, 16 << 20)
    if not asked:
        out.signature = f"{signing.describe(bundle)}, not checked (give --public-key or --cert)"
        return
    out.signature = "good: " + signing.verify(
        bundle, archive.signed_files(), public_key=public_key, certificates=certificates
    )


def _components(archive: Archive) -> list[str]:
    """The components that it holds, its records having been proved to agree."""
    ckpt = find("audit").read(Place(archive, None), ReadOptions())
    return sorted({str(ckpt.component(n)) for n in [*ckpt.tensors, *ckpt.values]})


def _against(archive: Archive, against: str, components: list[str], progress: Progress) -> str:
    """Compare with a live checkpoint: all of it, or the components that were kept; says what was compared."""
    only = components if archive.provenance["only"] is not None else None
    found = diff(Place(archive.base, archive.file), against, only=only, progress=progress)
    if not found.equal:
        names = [
            *found.only_in_a, *found.only_in_b, *found.dtypes, *found.shapes, *found.values, *(d.name for d in found.data),
        ]  # fmt: skip
        raise Differs(
            f'{against} differs from {archive.root}: {len(names)} entries differ, first "{names[0]}". '
            "`ckpttool diff` shows the values."
        )
    return against if only is None else f"the {', '.join(only)} of {against}, which is all that was kept"


# ---------------------------------------------------------------------------------------------------------- reading


class _Reading:
    """Every frame of an archive, hashed by member and by tensor."""

    def __init__(self, source: Source, file: str, archive: Archive | None, out: Verdict) -> None:
        self.source, self.file, self.archive, self.out = source, file, archive, out
        self.found: records.Manifest | None = None
        planned: plan.Plan | None = None
        if archive is not None:
            self.found, planned = archive.manifest, archive.plan
        else:
            self.found, planned = _salvaged(source, file)
        members = [(m.start, m.end, m.name) for m in planned.members] if planned else []
        if archive is not None:
            known = {m[2] for m in members}
            members += [(at, at + n, name) for name, (at, n) in archive.members().items() if name not in known]
        self.places = planned.places if planned else {}
        tensors = sorted((p.at, p.at + p.nbytes, n, p.item) for n, p in self.places.items())
        self.map = _Map(members, tensors, [t[0] for t in tensors])
        self.wrong_members: set[str] = set()
        self.wrong_tensors: set[str] = set()
        self.frames_end = 0  # of the file, so far
        self.member = 0  # the first that is not hashed to its end
        self.sums: dict[str, Any] = {}
        self.digests: dict[str, Any] = {}

    def note(self, finding: Finding) -> None:
        if len(self.out.findings) < _MOST_FINDINGS:
            self.out.findings.append(finding)

    def run(self, jobs: int, progress: Progress) -> None:
        """Read it all."""
        total = self.source.size(self.file)
        hashing: list[Future[None]] = []
        first_tensor = 0
        with ThreadPoolExecutor(1, "ckpttool-sha256") as pool:
            for row in walk(self.source, self.file, jobs):
                if row.fault is not None:
                    self._damaged(row)
                    if row.size and row.length:
                        self.frames_end = row.offset + row.size
                    continue
                data = row.stored
                if data is None:
                    continue
                self.frames_end = row.offset + row.size
                end = row.start + row.length
                hashing.append(pool.submit(self._sha256, row.start, end, data))
                if len(hashing) > 4:
                    hashing.pop(0).result()
                first_tensor = self._blake3(row.start, end, data, first_tensor)
                progress("verify", min(total, row.offset + row.size), total)
            for h in hashing:
                h.result()
        self._judge()

    def _damaged(self, row: Walked) -> None:
        assert row.fault is not None
        fault = row.fault.removesuffix(LOOK)  # which names this command
        # a fault of the tables is in them: behind the last frame
        a, b = (row.offset, row.offset + row.size) if row.size else (self.frames_end, self.out.file_bytes)
        named = list(self.map.of(row.start, row.start + row.length)) if row.start >= 0 and row.length else []
        for f in named:
            if f.member:
                self.wrong_members.add(f.member)
            if f.tensor:
                self.wrong_tensors.add(f.tensor)
            self.note(replace(f, what=fault, file_start=a, file_end=b))
        if not named:
            self.note(Finding(fault, file_start=a, file_end=b))

    def _sha256(self, start: int, end: int, data: bytes) -> None:
        view = memoryview(data)
        for k in range(self.member, len(self.map.members)):
            a, b, name = self.map.members[k]
            if a >= end:
                break
            p, q = max(a, start), min(b, end)
            self.sums.setdefault(name, hashlib.sha256()).update(view[p - start : q - start] if p < q else b"")
            if b <= end:
                self.member = k + 1

    def _blake3(self, start: int, end: int, data: bytes, k: int) -> int:
        """Digest the tensors that a frame meets, from the k-th on; returns the first that the next one may meet."""
        rows = self.map.tensors
        view = memoryview(data)
        while k < len(rows) and rows[k][1] <= start:
            k += 1
        for x, y, name, item in rows[k:]:
            if x >= end:
                break
            p, q = max(x, start), min(y, end)
            if p < q:
                part: Any = view[p - start : q - start]
                self.digests.setdefault(name, blake3()).update(byte_planes.merge(part, item) if item > 1 else part)
        return k

    def _judge(self) -> None:
        """Compare what was hashed with what was recorded."""
        if self.found is None:
            return
        for x, y, name, _ in self.map.tensors:
            have = self.digests[name].hexdigest() if name in self.digests else blake3().hexdigest() if x == y else None
            if have != self.found.digests[name] and name not in self.wrong_tensors:
                self.wrong_tensors.add(name)
                p = self.places[name]
                self.wrong_members.add(p.member)
                what = "the bytes do not have the digest of the manifest"
                self.note(Finding(what, p.member, p.offset, p.offset + p.nbytes, name, 0, p.nbytes))
        want = {n: h for n, (_, h) in self.found.hashes.items()} | (self.archive.sums if self.archive else {})
        for a, b, name in self.map.members:
            if name in want and name not in self.wrong_members:
                have = self.sums[name].hexdigest() if name in self.sums else None
                if have != want[name]:
                    self.note(Finding("the bytes do not have the SHA-256 that was recorded", name, 0, b - a))


def _salvaged(source: Source, file: str) -> tuple[records.Manifest | None, plan.Plan | None]:
    """The manifest of an archive whose structure is damaged, found by the header before it; None where it is lost."""
    try:
        table = read_table(source, file)
        reader = FrameReader(source, file, table, lambda start: 1)
        tail = b""
        at = table.logical_size
        for start in reversed(table.starts):
            piece = bytearray(at - start)
            reader.read_into(start, memoryview(piece))
            tail, at = bytes(piece) + tail, start
            skip = -at % tarball.BLOCK
            k = tail.find(plan.MANIFEST.encode() + bytes(8))
            if k >= 0 and (k - skip) % tarball.BLOCK == 0:
                found = tarball.entry(tail[k : k + tarball.BLOCK], file)
                assert found is not None
                data = tail[k + tarball.BLOCK :][: found.size]
                decoded = records.decode(data, file)
                return records.checked(data, found.mtime, bytes(decoded.hashes[plan.README][0]), file)
            if len(tail) > 64 * FRAME:
                break
    except (CkpttoolError, AssertionError, KeyError):
        pass
    return None, None
