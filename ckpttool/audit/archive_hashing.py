"""Hashes every frame of an archive, by member and by tensor, and says what is wrong with it.

`ArchiveHasher` reads all frames, or a run of them; what it found of a run can be added to another one, which then
judges the whole.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from blake3 import blake3

from ..engine.copy.fill import Progress, silent
from ..errors import CkpttoolError
from ..printable import list_first, printable
from ..storage.source import Source
from . import archive_plan as plan
from . import byte_planes, tarball
from . import manifest as records
from .archive import Archive
from .frame_format import FRAME, LOOK, read_frame_table
from .frame_reader import FrameReader
from .frame_walk import FrameResult, walk_file, walk_frames

__all__ = ["ArchiveFinding", "ArchiveHasher", "describe_findings"]

_MOST_FINDINGS = 1000


@dataclass(frozen=True)
class ArchiveFinding:
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
        """Return the finding as a line: where it is, as far as that is known, and what is wrong."""
        where = [] if self.member is None else [self.member]
        if self.start is not None:
            where.append(f"bytes {self.start}..{self.end}")
        if self.tensor is not None:
            where.append(f'"{printable(self.tensor)}"')
        if self.tensor_start is not None:
            where.append(f"its bytes {self.tensor_start}..{self.tensor_end}")
        if self.file_start is not None:
            where.append(f"bytes {self.file_start}..{self.file_end} of the file")
        return f"{', '.join(where)}: {self.what}" if where else self.what


def describe_findings(findings: Sequence[ArchiveFinding]) -> list[str]:
    """Return the findings as lines of text; all findings of one damaged frame, which may hold many tensors, share a
    line."""
    of_frame: dict[tuple[object, ...], list[ArchiveFinding]] = {}
    for i, f in enumerate(findings):
        of_frame.setdefault((f.what, f.file_start, f.file_end, i if f.file_start is None else None), []).append(f)
    lines = []
    for found in of_frame.values():
        more = list_first(printable(f.tensor or f.member or "") for f in found[1:])
        lines.append(f"{found[0]}" + (f". The same frame holds {more}" if more else ""))
    return lines


@dataclass
class _Map:
    """Members and tensors by their place in the tar."""

    members: list[tuple[int, int, str]]
    tensors: list[tuple[int, int, str, int]]  # start, end, name, bytes of an element where in planes
    starts: list[int]

    def locate(self, start: int, end: int) -> Iterator[ArchiveFinding]:
        """Yield the tensors and members that bytes `start` to `end` of the tar belong to, as findings with an empty
        text.

        Yields:
            One finding for each piece of a tensor in the range, and one for each member of which no tensor is in the
            range.
        """
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
                    yield ArchiveFinding("", member, p - a, q - a, name, p - x, q - x)
            if not named:
                yield ArchiveFinding("", member, max(a, start) - a, min(b, end) - a)


class ArchiveHasher:
    """Frames of an archive, hashed by member and by tensor; `findings` is the damage that was met on the way."""

    def __init__(self, source: Source, file: str, archive: Archive | None) -> None:
        """Prepare to hash an archive.

        Args:
            source, file: the folder or bucket that contains the archive, and its name there.
            archive: the open archive; None if its structure is damaged: the manifest is then searched for at the end of
                the file.
        """
        self.source, self.file, self.archive = source, file, archive
        self.file_bytes = source.size(file)
        self.found: records.Manifest | None = None
        planned: plan.ArchivePlan | None = None
        if archive is not None:
            self.found, planned = archive.manifest, archive.plan
        else:
            self.found, planned = _recover_manifest(source, file)
        members = [(m.start, m.end, m.name) for m in planned.members] if planned else []
        if archive is not None:
            known = {m[2] for m in members}
            members += [(at, at + n, name) for name, (at, n) in archive.members().items() if name not in known]
        self.places = planned.places if planned else {}
        tensors = sorted((p.at, p.at + p.nbytes, n, p.item) for n, p in self.places.items())
        self.map = _Map(members, tensors, [t[0] for t in tensors])
        self.findings: list[ArchiveFinding] = []
        self.wrong_members: set[str] = set()
        self.wrong_tensors: set[str] = set()
        self.frames_end = 0  # of the file, so far
        self.member = 0  # the first that is not hashed to its end
        self._sums: dict[str, Any] = {}  # of what is being read
        self._digests: dict[str, Any] = {}
        self.sums: dict[str, str] = {}
        self.digests: dict[str, str] = {}

    def add_finding(self, finding: ArchiveFinding) -> None:
        """Keep a finding; those after the first thousand are discarded."""
        if len(self.findings) < _MOST_FINDINGS:
            self.findings.append(finding)

    def hash_all(self, jobs: int, progress: Progress) -> None:
        """Read and hash the whole file with `jobs` threads. Call `compare` afterwards.

        The hashes are stored in `sums` and `digests`, damage in `findings`.

        Raises:
            SourceChanged, RemoteError: the file cannot be read.
        """
        self._hash_frames(walk_file(self.source, self.file, jobs), progress)

    def hash_part(self, first: int, stop: int, jobs: int) -> dict[str, object]:
        """Read and hash frames `first` to `stop` - 1 with `jobs` threads; both ends must be boundaries of members.

        Returns:
            Plain data for `add_part_result`: {"findings": list of fields of `ArchiveFinding`, "wrong_members": names,
            "wrong_tensors": names, "sums": {member: SHA-256}, "digests": {tensor: BLAKE3}}.

        Raises:
            SourceChanged, RemoteError: the file cannot be read.
        """
        assert self.archive is not None
        table = self.archive.table
        begin = table.starts[first]
        self.frames_end = table.offsets[first]
        self.member = next(
            (k for k, (a, b, _) in enumerate(self.map.members) if b > begin or a >= begin), len(self.map.members)
        )
        self._hash_frames(walk_frames(self.source, self.file, table, first, stop, jobs), silent)
        return {
            "findings": [asdict(f) for f in self.findings],
            "wrong_members": sorted(self.wrong_members),
            "wrong_tensors": sorted(self.wrong_tensors),
            "sums": self.sums,
            "digests": self.digests,
        }

    def add_part_result(self, found: Mapping[str, Any]) -> None:
        """Add the result of `hash_part`, of this or another process. Call it for all parts, in their order in the
        archive."""
        for f in found["findings"]:
            self.add_finding(ArchiveFinding(**f))
        self.wrong_members.update(found["wrong_members"])
        self.wrong_tensors.update(found["wrong_tensors"])
        self.sums |= found["sums"]
        self.digests |= found["digests"]

    def _hash_frames(self, rows: Iterable[FrameResult], progress: Progress) -> None:
        """Hash the content of frames for `sums` (members, SHA-256, in a second thread) and `digests` (tensors, BLAKE3).

        Args:
            rows: the frames, in order. Damaged ones are added to `findings`.
            progress: called with ("verify", bytes of the file that were read, bytes in all).
        """
        total = self.file_bytes
        waiting: list[Future[None]] = []
        first_tensor = 0
        with ThreadPoolExecutor(1, "ckpttool-sha256") as pool:
            for row in rows:
                if row.fault is not None:
                    self._add_damage_findings(row)
                    if row.size and row.length:
                        self.frames_end = row.offset + row.size
                    continue
                data = row.stored
                if data is None:
                    continue
                self.frames_end = row.offset + row.size
                end = row.start + row.length
                waiting.append(pool.submit(self._hash_members, row.start, end, data))
                if len(waiting) > 4:
                    waiting.pop(0).result()
                first_tensor = self._hash_tensors(row.start, end, data, first_tensor)
                progress("verify", min(total, row.offset + row.size), total)
            for h in waiting:
                h.result()
        self.sums |= {name: h.hexdigest() for name, h in self._sums.items()}
        self.digests |= {name: h.hexdigest() for name, h in self._digests.items()}
        self._sums.clear()
        self._digests.clear()

    def _add_damage_findings(self, row: FrameResult) -> None:
        """Add a finding for each tensor and member that a damaged frame, or bytes that are not a frame, belong to.

        If they belong to none, one finding says where in the file they are.
        """
        assert row.fault is not None
        fault = row.fault.removesuffix(LOOK)  # which names this command
        # a fault of the tables is in them: behind the last frame
        a, b = (row.offset, row.offset + row.size) if row.size else (self.frames_end, self.file_bytes)
        named = list(self.map.locate(row.start, row.start + row.length)) if row.start >= 0 and row.length else []
        for f in named:
            if f.member:
                self.wrong_members.add(f.member)
            if f.tensor:
                self.wrong_tensors.add(f.tensor)
            self.add_finding(replace(f, what=fault, file_start=a, file_end=b))
        if not named:
            self.add_finding(ArchiveFinding(fault, file_start=a, file_end=b))

    def _hash_members(self, start: int, end: int, data: bytes) -> None:
        """Add bytes `start` to `end` of the tar to the SHA-256 of the members that they belong to.

        Args:
            data: these bytes.
        """
        view = memoryview(data)
        for k in range(self.member, len(self.map.members)):
            a, b, name = self.map.members[k]
            if a >= end:
                break
            p, q = max(a, start), min(b, end)
            self._sums.setdefault(name, hashlib.sha256()).update(view[p - start : q - start] if p < q else b"")
            if b <= end:
                self.member = k + 1

    def _hash_tensors(self, start: int, end: int, data: bytes, k: int) -> int:
        """Add bytes `start` to `end` of the tar to the BLAKE3 digests of the tensors that they belong to.

        Args:
            data: these bytes.
            k: number of the first tensor, by place in the tar, that they may belong to.

        Returns:
            The value of `k` for the next frame.
        """
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
                self._digests.setdefault(name, blake3()).update(byte_planes.merge(part, item) if item > 1 else part)
        return k

    def compare(self) -> list[ArchiveFinding]:
        """Compare the hashes of members and tensors with those in the manifest and SHA256SUMS, after all frames were
        read.

        Returns:
            All findings. If no manifest was found, these are the damaged frames alone.
        """
        if self.found is None:
            return self.findings
        for x, y, name, _ in self.map.tensors:
            have = self.digests.get(name, blake3().hexdigest() if x == y else None)
            if have != self.found.digests[name] and name not in self.wrong_tensors:
                self.wrong_tensors.add(name)
                p = self.places[name]
                self.wrong_members.add(p.member)
                what = "the bytes do not have the digest of the manifest"
                self.add_finding(ArchiveFinding(what, p.member, p.offset, p.offset + p.nbytes, name, 0, p.nbytes))
        want = {n: h for n, (_, h) in self.found.hashes.items()} | (self.archive.sums if self.archive else {})
        for a, b, name in self.map.members:
            if name in want and name not in self.wrong_members and self.sums.get(name) != want[name]:
                self.add_finding(ArchiveFinding("the bytes do not have the SHA-256 that was recorded", name, 0, b - a))
        return self.findings


def _recover_manifest(source: Source, file: str) -> tuple[records.Manifest | None, plan.ArchivePlan | None]:
    """Search the end of an archive whose structure is damaged for its manifest.

    Returns (the manifest, the plan of places that follows from it), or (None, None) if it was not found.
    """
    try:
        table = read_frame_table(source, file)
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
                found = tarball.parse_header(tail[k : k + tarball.BLOCK], file)
                assert found is not None
                data = tail[k + tarball.BLOCK :][: found.size]
                decoded = records.decode_manifest(data, file)
                return records.decode_and_check_manifest(data, found.mtime, bytes(decoded.hashes[plan.README][0]), file)
            if len(tail) > 64 * FRAME:
                break
    except (CkpttoolError, AssertionError, KeyError):
        pass
    return None, None
