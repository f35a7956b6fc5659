"""An open archive: its members as the files of a `Source`, proved to be laid out as its own manifest says.

Tensors are read from it as from any folder: `tensors-00001.safetensors` and the others are files, with byte planes
merged, and each read decompresses only the frames that it meets. Opening reads the tables at the end, the manifest, and
one frame per member.

Proved on opening, without reading data: the frames are where the plan of the manifest puts them; every tar header and
safetensors header is the planned one; no member is missing, unknown or there twice; the small members have the hashes
in SHA256SUMS. archive_verification.py checks the data.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from ..errors import Corrupt, NotRecognised, Unsafe
from ..formats import values
from ..index.checkpoint import Value
from ..index.names import COMPONENTS, step_count
from ..storage.source import Identity, Source
from . import archive_plan as plan
from . import manifest as records
from . import provenance, retention, sidecar, signing, tarball
from .archive_options import ENCRYPTED, SUFFIX
from .frame_format import FRAME, read_frame_table
from .frame_reader import DamagedFrame, FrameReader
from .frame_writer import SplitPoint

__all__ = ["ENCRYPTED", "SUFFIX", "Archive", "ArchiveFacts", "make_archive_facts", "read_facts"]

_MOST_README = 64 << 10  # its words may change from version to version; its hash is in the manifest
_TAIL = (
    plan.VALUES,
    plan.MANIFEST,
    plan.PROVENANCE,
    plan.RETENTION,
    plan.SUMS,
    plan.SIGNATURE,
)
_NEEDED = {plan.VALUES, plan.MANIFEST, plan.PROVENANCE, plan.SUMS}


class Archive(Source):
    """The members of an archive as files, and what its records say.

    Raises:
        NotRecognised: it is not an archive of ckpttool. Corrupt, Unsafe: it is damaged, or not laid out as its manifest
            says.
    """

    local = False

    def __init__(self, base: Source, file: str) -> None:
        """Open the archive `file` of the source `base` and prove that it is laid out as its manifest says; no tensor is
        read.

        Raises:
            NotRecognised: it is not an archive of ckpttool. Corrupt, Unsafe: it is damaged, or not laid out as its
                manifest says. SourceChanged, RemoteError: it cannot be read.
        """
        self.base, self.file = base, file
        self.is_remote, self.commit = base.is_remote, base.commit
        self.root = f"{base.root}/{file}"
        self.table = read_frame_table(base, file)
        self._starts: list[int] = []
        self._items: list[int] = []
        self._reader = FrameReader(base, file, self.table, self._get_plane_count)
        self._members: dict[str, tuple[int, int]] = {}  # name -> (first byte in the tar, bytes)
        self._extra: dict[str, bytes] = {}
        self._read_members()
        data = self.read_record(plan.MANIFEST)
        head = self.read_record(plan.README)
        self.manifest, self.plan = records.decode_and_check_manifest(
            data, self.mtime, head, f"{self.root}/{plan.MANIFEST}"
        )
        self.manifest_sha256 = records.sha256_hex(data)
        sums = self.read_record(plan.SUMS)
        self.sums, self.sums_sha256 = records.decode_sums(sums, f"{self.root}/{plan.SUMS}"), records.sha256_hex(sums)
        self._check_against_plan(head)
        what = f"{self.root}/{plan.PROVENANCE}"
        self.provenance = provenance.decode_provenance(self.read_record(plan.PROVENANCE), what)
        if provenance.get_member_mtime(self.provenance) != self.mtime:
            raise Unsafe(f"{self.root}: the time of its members is not the one in {plan.PROVENANCE}.", code="CKPT0703")
        self._extra = provenance.decode_config_files(self.provenance, what)
        if both := sorted(self._extra.keys() & self._members.keys()):
            raise Unsafe(f"{what}: a configuration file is named like the member {both[0]}.", code="CKPT0703")
        self._starts = [c.offset for c in self.plan.cuts]
        self._items = [c.item for c in self.plan.cuts]
        self._reader = FrameReader(
            base, file, self.table, self._get_plane_count
        )  # frames kept so far had their planes unmerged

    # --------------------------------------------------------------------------------------------------- the layout

    def _get_plane_count(self, start: int) -> int:
        """Return the number of byte planes of the frame whose content begins at tar offset `start`; 1 until the plan is
        read."""
        i = bisect_right(self._starts, start) - 1
        return self._items[i] if i >= 0 else 1

    def _read_members(self) -> None:
        """Read all tar headers into `_members` and `mtime`, and check that no bytes are hidden between the members.

        Raises:
            Corrupt: the tar is cut off, or a member is missing.
            Unsafe: a member is unknown, out of order, duplicated or of another time than the first, or bytes are
                hidden.
        """
        at, total = 0, self.table.logical_size
        self.mtime = 0
        while True:
            if at + tarball.BLOCK > total:
                raise Corrupt(f"{self.root}: the tar has no end. The copy is incomplete.", code="CKPT0403")
            found = tarball.parse_header(self._read_content(at, tarball.BLOCK), self.root)
            if found is None:
                break
            if not self._members:
                self.mtime = found.mtime
            if found.mtime != self.mtime:
                raise Unsafe(
                    f"{self.root}: member {tarball.shorten_name(found.name)} has another time than the first one.",
                    code="CKPT0703",
                )
            self._check_member_name(found.name)
            end = at + tarball.BLOCK + found.size
            if found.size > total or end > total:
                raise Corrupt(
                    f"{self.root}: member {found.name} needs {found.size} bytes from byte {at}, but the tar ends at "
                    f"{total}. The copy is incomplete.",
                    code="CKPT0403",
                )
            self._members[found.name] = (at + tarball.BLOCK, found.size)
            if any(self._read_content(end, -end % tarball.BLOCK)):
                raise Unsafe(f"{self.root}: bytes are hidden behind member {found.name}.", code="CKPT0703")
            at = end + -end % tarball.BLOCK
        if self._read_content(at, total - at, 2 * len(tarball.END)) != tarball.END:
            raise Unsafe(
                f"{self.root}: {total - at} bytes follow the last member of the tar; its end takes {len(tarball.END)}.",
                code="CKPT0703",
            )
        if missing := sorted(_NEEDED - set(self._members)):
            raise Corrupt(
                f"{self.root} has no {missing[0]}. It is not an archive of ckpttool, or a damaged one.", code="CKPT0425"
            )

    def _check_member_name(self, name: str) -> None:
        """Raise Unsafe unless a member of this name may follow the members whose headers were read so far."""
        order = [plan.README, *_TAIL]
        before = next(reversed(self._members), None)
        data = len(self._members) - 1 if before and before.startswith("tensors-") else 0
        if name in self._members:
            raise Unsafe(
                f"{self.root}: member {tarball.shorten_name(name)} is there twice; readers differ on which counts.",
                code="CKPT0703",
            )
        if before is None:
            fits = name == plan.README
        elif name == f"tensors-{data + 1:05d}.safetensors":
            fits = before == plan.README or before.startswith("tensors-")
        else:
            rank = order.index(before) if before in order else 0
            fits = name in order and order.index(name) > rank
        if not fits:
            raise Unsafe(
                f"{self.root}: member {tarball.shorten_name(name)} does not belong there: it cannot follow "
                f"{before or 'the beginning'}.",
                code="CKPT0703",
            )

    def _read_content(self, at: int, length: int, most: int = FRAME) -> bytes:
        """Return `length` bytes of the tar from offset `at` on, but at most the first `most` of them.

        Raises:
            Corrupt: the tar ends before that, or a frame is damaged.
        """
        out = bytearray(min(length, most))
        self._reader.read_into(at, memoryview(out))
        return bytes(out)

    def _check_against_plan(self, head: bytes) -> None:
        """Check that members, safetensors headers, frames and hashes are those that follow from the manifest.

        Args:
            head: the content of README.txt.

        Raises:
            Corrupt, Unsafe: they are not; the message names the member and the numbers.
        """
        want: dict[str, tuple[int, int]] = {m.name: (m.start, m.end - m.start) for m in self.plan.members}
        have = {n: place for n, place in self._members.items() if n not in _TAIL}
        if want != have:
            odd = sorted(n for n in want.keys() | have.keys() if want.get(n) != have.get(n))[0]
            raise Corrupt(
                f"{self.root}: member {odd} is at {have.get(odd)}, but the manifest puts it at {want.get(odd)}.",
                code="CKPT0425",
            )
        if len(head) > _MOST_README:
            raise Unsafe(
                f"{self.root}: {plan.README} has {len(head)} bytes; such a text has at most {_MOST_README}.",
                code="CKPT0704",
            )
        for name, text in self.plan.headers.items():
            start, size = self._members[name]
            if size < len(text) or self._read_content_by_frames(start, len(text)) != text:
                raise Corrupt(
                    f"{self.root}/{name}: its safetensors header is not the one that follows from the manifest.",
                    code="CKPT0425",
                )
        self._check_frames()
        listed = [n for n in self._members if n not in (plan.SUMS, plan.SIGNATURE)]
        if list(self.sums) != listed:
            odd = sorted(set(self.sums) ^ set(listed) or set(listed))[0]
            raise Corrupt(
                f"{self.root}: {plan.SUMS} and the members do not agree, first on {tarball.shorten_name(odd)}.",
                code="CKPT0425",
            )
        data = [n for n in listed if n not in (plan.MANIFEST, plan.PROVENANCE, plan.RETENTION)]
        listed_hashes = {n: (self._members[n][1], self.sums[n]) for n in data}
        if listed_hashes != self.manifest.hashes:
            odd = sorted(
                n
                for n in listed_hashes.keys() | self.manifest.hashes.keys()
                if listed_hashes.get(n) != self.manifest.hashes.get(n)
            )[0]
            raise Corrupt(
                f"{self.root}: the manifest and {plan.SUMS} do not agree on member {tarball.shorten_name(odd)}.",
                code="CKPT0425",
            )
        for name in listed:
            if name.startswith("tensors-"):
                continue
            found = self.manifest_sha256 if name == plan.MANIFEST else records.sha256_hex(self.read_record(name))
            if found != self.sums[name]:
                raise Corrupt(
                    f"{self.root}/{name} does not have the SHA-256 that {plan.SUMS} says. It was altered.",
                    code="CKPT0425",
                )

    def _read_content_by_frames(self, at: int, length: int) -> bytes:
        """Return `length` bytes of the tar from offset `at` on, read in pieces of at most `FRAME` bytes."""
        return b"".join(self._read_content(at + i, min(FRAME, length - i)) for i in range(0, length, FRAME))

    def _check_frames(self) -> None:
        """Raise Corrupt unless frames begin where the plan splits the tar, and every `FRAME` bytes from there on."""
        want: list[int] = []
        cuts = [*self.plan.cuts, SplitPoint(self.table.logical_size, 1, False)]
        for a, b in pairwise(cuts):
            want.extend(range(a.offset, b.offset, FRAME))
        have = list(self.table.starts)
        if want != have:
            k = next((i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b), min(len(want), len(have)))
            raise Corrupt(
                f"{self.root}: frame {k} of {len(have)} does not begin where the manifest has one begin ({len(want)} "
                "in all). It was not written by ckpttool, or was assembled from parts.",
                code="CKPT0425",
            )

    def read_record(self, name: str) -> bytes:
        """Return the content of a small member, one of the JSON or text files.

        Raises:
            Corrupt: there is no such member, or it is damaged. Unsafe: it is too large for an archive of this size.
        """
        most = records.compute_max_record_bytes(self.base.size(self.file))
        if self.size(name) > most:
            raise Unsafe(
                f"{self.root}: {name} has {self.size(name)} bytes in an archive of {self.base.size(self.file)}; at "
                f"most {most} are read.",
                code="CKPT0704",
            )
        return self.read(name, 0, self.size(name))

    def members(self) -> dict[str, tuple[int, int]]:
        """Return {member: (its first byte in the tar, its size in bytes)}."""
        return dict(self._members)

    # --------------------------------------------------------------------------------------------------- as a Source

    def list(self, folder: str = "") -> list[str]:
        """Return the sorted names in a folder: of the members, which are all in the top one, "", and of the
        configuration files that PROVENANCE.json holds."""
        start = f"{folder}/" if folder else ""
        inside = (n.removeprefix(start) for n in (*self._members, *self._extra) if n.startswith(start))
        return sorted({n.partition("/")[0] for n in inside})

    def exists(self, name: str) -> bool:
        """Return whether the archive has a member, or a configuration file in PROVENANCE.json, of this name."""
        return name in self._members or name in self._extra

    def size(self, name: str) -> int:
        """Return the bytes of a member or configuration file.

        Raises:
            Corrupt: there is none of this name.
        """
        if name in self._extra:
            return len(self._extra[name])
        if name not in self._members:
            raise Corrupt(f"{self.root} has no member {tarball.shorten_name(name)}.", code="CKPT0425")
        return self._members[name][1]

    def readinto(self, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a member or configuration file from `offset` on; byte planes are merged into
        elements.

        Raises:
            Corrupt: there is no such member, it ends before the last byte that is needed, or a frame is damaged.
        """
        if offset < 0 or offset + len(into) > self.size(name):
            raise Corrupt(
                f"{self.root}/{name} has {self.size(name)} bytes; {offset}..{offset + len(into)} are needed.",
                code="CKPT0425",
            )
        if name in self._extra:
            into[:] = self._extra[name][offset : offset + len(into)]
            return
        try:
            self._reader.read_into(self._members[name][0] + offset, into)
        except DamagedFrame as e:
            end = e.start + e.length
            hit = [n for n, p in self.plan.places.items() if p.at < end and e.start < p.at + p.nbytes]
            more = f" and {len(hit) - 1} more" if len(hit) > 1 else ""
            raise Corrupt(
                f"{e} These bytes belong to {tarball.shorten_name(hit[0])}{more}." if hit else str(e), code="CKPT0425"
            ) from None

    def identities(self) -> dict[str, Identity]:
        """Return {file: identity} of the source that contains the archive; an identity changes when its file is written
        to."""
        return self.base.identities()

    def expect(self, identities: Mapping[str, Identity]) -> None:
        """Make later reads raise SourceChanged if the archive's file is not the one that another process has opened.

        Args:
            identities: what `identities` returned in that process.
        """
        self.base.expect(identities)

    def assert_unchanged(self) -> None:
        """Raise SourceChanged if the archive's file was written to since it was opened."""
        self.base.assert_unchanged()

    def close(self) -> None:
        """Close the source that contains the archive."""
        self.base.close()

    @property
    def signed(self) -> bool:
        """Whether the archive contains a signature."""
        return plan.SIGNATURE in self._members

    def read_values(self) -> dict[str, Value]:
        """Return {name: value} of values.json, after comparing its training step with the one in the manifest.

        Raises:
            Corrupt, Unsafe: values.json is damaged, or has another step than the manifest.
        """
        what = f"{self.root}/{plan.VALUES}"
        data = self.read_record(plan.VALUES)
        held = values.decode(data, what)
        step = step_count(lambda name: held[name].data if name in held else None)
        if step != self.manifest.step:
            raise Corrupt(f"{what} counts {step} steps, {plan.MANIFEST} {self.manifest.step}.", code="CKPT0425")
        return held

    def signed_files(self) -> Sequence[tuple[str, str]]:
        """Return (member, SHA-256 in hex) of every member that a signature covers, which is all but the signature
        itself."""
        return [*self.sums.items(), (plan.SUMS, self.sums_sha256)]

    def read_retention(self) -> dict[str, Any] | None:
        """Return the content of RETENTION.json, as `retention.decode_retention` returns it; None if there is none.

        Raises:
            Corrupt, Unsafe: it is damaged.
        """
        if plan.RETENTION not in self._members:
            return None
        return retention.decode_retention(self.read_record(plan.RETENTION), f"{self.root}/{plan.RETENTION}")


# ------------------------------------------------------------------------------------------------------------ facts


@dataclass(frozen=True)
class ArchiveFacts:
    """What a listing shows of an archive. `bytes` are those of the file; times are UTC, "2026-11-21T10:20:30Z".
    `sums_sha256` is the hash of SHA256SUMS, and so of everything but the signature; `signed_by` the key that the
    signature names, not verified."""

    name: str
    bytes: int
    created: str
    step: int | None
    layout: str
    trainer: str | None
    world_size: int | None
    tensors: int
    tensor_bytes: int
    components: tuple[str, ...]
    merkle_root: str
    manifest_sha256: str
    meta: dict[str, str]
    retain_until: str | None
    legal_hold: str | None
    signed: bool
    encrypted: bool
    sums_sha256: str = ""
    signed_by: str = ""


def read_facts(source: Source, file: str) -> ArchiveFacts:
    """Return the facts of an archive for a listing, from its records or, if it is encrypted, from its sidecar file.

    No tensor is read.

    Args:
        source, file: the folder or bucket that contains the archive, and its name there.

    Raises:
        CkpttoolError: the file is not a valid archive, or is encrypted and has no sidecar.
    """
    if file.endswith(ENCRYPTED):
        return _read_facts_from_sidecar(source, file)
    if not file.endswith(SUFFIX):
        raise NotRecognised(f"{file} is not named like an archive ({SUFFIX}, {ENCRYPTED}).", code="CKPT0301")
    archive = Archive(source, file)
    archive.read_values()
    return make_archive_facts(
        file,
        source.size(file),
        archive.manifest,
        archive.manifest_sha256,
        archive.sums_sha256,
        archive.provenance,
        archive.read_retention(),
        signature=archive.read_record(plan.SIGNATURE) if archive.signed else None,
        encrypted=False,
    )


def make_archive_facts(
    file: str,
    nbytes: int,
    found: records.Manifest,
    manifest_sha256: str,
    sums_sha256: str,
    provenance: dict[str, Any],
    kept: dict[str, Any] | None,
    *,
    signature: bytes | None,
    encrypted: bool,
) -> ArchiveFacts:
    """Combine the records of an archive into its facts for a listing.

    Args:
        file, nbytes: its file name, and the size of that file in bytes.
        found: its manifest.
        manifest_sha256, sums_sha256: the SHA-256 of MANIFEST.json and of SHA256SUMS.
        provenance: the content of PROVENANCE.json.
        kept: the content of RETENTION.json; None if there is none.
        signature: the content of model.sig; None if the archive is not signed.
        encrypted: whether the file is encrypted.

    Raises:
        Corrupt: the signature is damaged.
        Unsupported: the signature was made by model-signing before 1.0.
    """
    origin = provenance.get("source") or {}
    hold = (kept or {}).get("legal_hold") or {}
    return ArchiveFacts(
        name=file,
        bytes=nbytes,
        created=str(provenance.get("created") or ""),
        step=found.step,
        layout=str(origin.get("layout") or ""),
        trainer=origin.get("trainer"),
        world_size=origin.get("world_size"),
        tensors=len(found.tensors),
        tensor_bytes=sum(t.nbytes for t in found.tensors.values()),
        components=tuple(sorted({t.component for t in found.tensors.values()}, key=COMPONENTS.index)),
        merkle_root=found.merkle_root,
        manifest_sha256=manifest_sha256,
        meta={str(k): str(v) for k, v in (provenance.get("meta") or {}).items()},
        retain_until=(kept or {}).get("retain_until"),
        legal_hold=hold.get("reason"),
        signed=signature is not None,
        encrypted=encrypted,
        sums_sha256=sums_sha256,
        signed_by=signing.describe_signer(signature) if signature is not None else "",
    )


def _read_facts_from_sidecar(source: Source, file: str) -> ArchiveFacts:
    """Return the facts of an encrypted archive from its sidecar, the JSON file next to it.

    Raises:
        UsageError: there is no sidecar.
        Corrupt, Unsafe: the sidecar is damaged, or a field is missing or of another type.
    """
    parsed = sidecar.read_sidecar(source, file)["archive"]
    kinds = {f.name: str(f.type) for f in fields(ArchiveFacts)}
    if parsed.keys() != kinds.keys() or not all(_FITS[kind](parsed[name]) for name, kind in kinds.items()):
        raise Corrupt(
            f"{source.root}/{sidecar.get_sidecar_name(file)} is damaged: it is not what ckpttool writes.",
            code="CKPT0425",
        )
    return ArchiveFacts(
        **{
            **parsed,
            "name": file,
            "bytes": source.size(file),
            "encrypted": True,
            "components": tuple(parsed["components"]),
        }
    )


#: Whether a value of the sidecar is of the kind of a field of Facts.
_FITS: dict[str, Callable[[object], bool]] = {
    "str": lambda x: isinstance(x, str),
    "str | None": lambda x: x is None or isinstance(x, str),
    "int": lambda x: type(x) is int and x >= 0,
    "int | None": lambda x: x is None or (type(x) is int and x >= 0),
    "bool": lambda x: type(x) is bool,
    "dict[str, str]": lambda x: isinstance(x, dict) and all(isinstance(v, str) for v in x.values()),
    "tuple[str, ...]": lambda x: isinstance(x, list) and all(isinstance(v, str) for v in x),
}
