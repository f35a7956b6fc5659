"""audit: one archive that holds a state for years, NAME.tar.zst.

    README.txt  tensors-00001.safetensors ...  values.json  MANIFEST.json  PROVENANCE.json  [RETENTION.json]
    SHA256SUMS  [model.sig]                                   one tar, in independent zstd frames, with a seek table

docs/reference/archive-format.md has the format, ckpttool/audit/archive_plan.py the arithmetic of it. Tensors are
ordered by name and values by name, so that the layout and the world size of the source play no part. Reading is by
`Archive`, whose members are files; an encrypted archive (NAME.tar.zst.age) is read by `audit verify` and
`audit restore`, which take its key.

Tied tensors are stored under each of their names, since some layouts know of them and others do not; that they were one
is in PROVENANCE.json, and so is the order of the source, which is that of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ckpttool import bounded_json
from ckpttool.audit.archive_options import ENCRYPTED, SUFFIX, ArchiveOptions
from ckpttool.by_fields import ByFields
from ckpttool.errors import Corrupt, Unsafe, Unsupported, UsageError, argument
from ckpttool.extras import require_packages
from ckpttool.formats import values
from ckpttool.huggingface import model_files
from ckpttool.index.checkpoint import Checkpoint, Chunks, Salvage, TensorEntry, joined
from ckpttool.index.draft import Draft, DraftFile, EarlierFile, Sink
from ckpttool.index.names import find_misplaced_path, is_trainer_tree_readable, refuse_surrogates, step_count
from ckpttool.index.selection import NOT_RESUMED, EntrySelection, find_unmatched_patterns
from ckpttool.layouts import Layout, Place, ReadOptions, WriteOptions
from ckpttool.program import Program
from ckpttool.storage.source import Source
from ckpttool.storage.urls import is_url

if TYPE_CHECKING:  # every command asks every layout whether a path is its own, and most paths are not archives
    from ckpttool.audit.archive import Archive
    from ckpttool.audit.archive_plan import ArchivePlan
    from ckpttool.audit.encryption import Encryptor
    from ckpttool.audit.frame_writer import FrameWriter

__all__ = ["LAYOUTS"]

_ZSTD, _AGE = b"\x28\xb5\x2f\xfd", b"age-encryption.org/"


def detect(where: Place) -> tuple[bool, str]:
    """Return whether a place is a zstd file with the name of an archive, or an encrypted one; and, as text, why or why
    not."""
    source, file = where
    if file is None:
        return False, f"one {SUFFIX} file; this is a folder"
    if not file.endswith((SUFFIX, ENCRYPTED)):
        return False, f"not named {SUFFIX} or {ENCRYPTED}"
    magic = source.read(file, 0, min(len(_AGE), source.size(file)))
    if magic.startswith(_ZSTD):
        return True, "is a zstd file with the name of an archive"
    return magic == _AGE, "is encrypted with age" if magic == _AGE else "neither a zstd nor an age file"


def mount(where: Place) -> Place:
    """Return a place in which the members of the archive are files of a folder.

    Raises:
        UsageError: it is encrypted, or a folder. Corrupt, Unsafe: it is damaged, or no archive of ckpttool.
    """
    from ckpttool.audit.archive import Archive

    source, file = where
    if file is None:
        raise UsageError(f"{source.root} is a folder; an archive is a file.", code="CKPT0221")
    if isinstance(source, Archive):
        return where
    if file.endswith(ENCRYPTED):
        raise UsageError(
            f"{source.root}/{file} is encrypted. `ckpttool audit restore --identity FILE` and `ckpttool audit verify "
            "--identity FILE` read it.",
            code="CKPT0218",
        )
    return Place(Archive(source, file), None)


# --------------------------------------------------------------------------------------------------------- reading


def read(where: Place, options: ReadOptions) -> Checkpoint:
    """Return the index of an archive that was mounted, by its manifest and values.json.

    Raises:
        Corrupt, Unsafe: the records contradict each other.
    """
    from ckpttool.audit.archive import Archive

    source = where.source
    assert isinstance(source, Archive)
    found, parsed = source.manifest, source.provenance
    files = list(source.plan.headers)
    number = {f: i for i, f in enumerate(files)}
    names = parsed.get("order") or []
    if sorted(names) != sorted(found.tensors):  # the order of the model, which some layouts need, is a hint
        names = list(found.tensors)
    tensors: dict[str, TensorEntry] = {}
    for name in names:
        t, p = found.tensors[name], source.plan.places[name]
        tensors[name] = replace(t, chunks=Chunks.whole(t.shape, number[p.member], p.offset, p.nbytes))
    held = source.read_values()
    out = Checkpoint("audit", source.root, None, files, [source.size(f) for f in files], tensors, held)
    _check_paths(out, source)
    out.recorded = dict(found.digests)
    origin = parsed.get("source") or {}
    out.world_size, out.trainer = origin.get("world_size"), origin.get("trainer")
    out.derived = {"delta": parsed["delta"]} if "delta" in parsed else None
    out.salvage = Salvage.of_states(parsed["salvage"]) if "salvage" in parsed else None
    for name, kept in (parsed.get("tied") or {}).items():
        a, b = tensors.get(name), tensors.get(kept)
        if a and b and (a.dtype, a.shape, found.digests[name]) == (b.dtype, b.shape, found.digests[kept]):
            tensors[name] = replace(b, path=a.path)
    out.origin = {tuple(a): tuple(b) for a, b in parsed.get("origin") or ()}
    if not is_trainer_tree_readable(out):
        out.origin = {}
        out.notes.append(
            "the keys of the source's tree, by PROVENANCE.json, are not those of this state; canonical ones stay"
        )
    if source.exists("config.json"):
        out.config = model_files.read_config_json(source)
    return out


def _check_paths(ckpt: Checkpoint, source: Archive) -> None:
    """Raise if a path is of an unknown component or inside another entry, if two entries have the same name, or if
    PROVENANCE.json does not list a component that is there.

    Raises:
        Corrupt: with the first such path.
    """
    from ckpttool.audit import archive_plan as plan
    from ckpttool.audit import tarball

    what = f"{source.root}/{plan.VALUES}"
    paths = [t.path for t in ckpt.tensors.values()] + [v.path for v in ckpt.values.values()]
    if (path := find_misplaced_path(paths)) is not None:
        raise Corrupt(
            f"{what}: {tarball.shorten_name(joined(path))} is of no component, or lies in another entry.",
            code="CKPT0425",
        )
    if len(set(paths)) != len(paths) or ckpt.tensors.keys() & ckpt.values.keys():
        raise Corrupt(f"{what}: a value has the name of a tensor.", code="CKPT0425")
    only = source.provenance["only"]
    names = list(map(joined, paths))
    if only is not None and (
        find_unmatched_patterns(only, names) or not all(map(EntrySelection(tuple(only)).holds, names))
    ):
        raise Corrupt(
            f"{source.root}/{plan.PROVENANCE}: only {', '.join(only)} were kept, it says; others are there.",
            code="CKPT0425",
        )
    if only is not None and not EntrySelection(tuple(only)).by_component:
        ckpt.notes.append(f"a part of a checkpoint was kept, {', '.join(only)}. {NOT_RESUMED}")


# --------------------------------------------------------------------------------------------------------- writing


def write(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """Draft one archive.

    Raises:
        Unsupported: a value is of no kind that values.json holds. UsageError: the destination is not named as an
            archive.
        MissingPackage: what encrypts or signs is not installed.
    """
    from ckpttool.audit import archive_plan as plan
    from ckpttool.audit import manifest as records
    from ckpttool.audit import provenance, retention

    own = options.of(ArchiveOptions)
    _check_target(options.target, own)
    refuse_surrogates(ckpt.values)
    # where every tensor will lie, which follows from names and sizes alone
    wanted = {n: replace(t, dtype=options.cast(n, t.dtype)) for n, t in ckpt.tensors.items()}
    mtime = _get_member_time(own, source)
    grouped = plan.group_tensors_by_member(wanted, own.member_bytes, own.shuffle)
    planned = plan.make_plan(grouped, wanted, own.shuffle, mtime, records.make_readme(own.shuffle))
    held = values.encode(ckpt.values)
    tensors: dict[str, TensorEntry] = {}
    for name in (n for names in grouped for n in names):
        t, p = wanted[name], planned.places[name]
        tensors[name] = TensorEntry(t.dtype, t.shape, t.path, Chunks.whole(t.shape, 0, p.at, p.nbytes))
    # the small files, which are complete once the tensors were hashed
    now = datetime.now(UTC).replace(microsecond=0) if own.epoch is None else datetime.fromtimestamp(own.epoch, UTC)
    story = provenance.collect_provenance(own, now, mtime, ckpt, source, options.config)
    kept = retention.encode_retention(own.retain, own.hold, now)
    parsed = retention.decode_retention(kept, plan.RETENTION) if kept is not None else None
    ordered, step = {n: wanted[n] for n in tensors}, step_count(ckpt.value)
    writing = _Writing(own, options.target, planned, grouped, ordered, held, mtime, step, story, kept, parsed)
    size = planned.end + len(held) + 400 * len(tensors) + sum(map(len, planned.headers.values())) + (1 << 20)
    made = DraftFile(options.target, size, planned.head, writing.open_sink)
    out = Checkpoint("audit", options.target, None, [options.target], [size], tensors, dict(ckpt.values))
    out.derived = ckpt.derived if ckpt.derived and "delta" in ckpt.derived else None
    draft = Draft(
        out,
        {n: ckpt.tensors[n] for n in tensors},
        [made],
        before=lambda name, entry, row, written: planned.before.get(name, b""),
        tail=lambda file, written, digests: writing.write_tail(draft, digests),
        object_lock=retention.make_object_lock_arguments(parsed, own.lock_mode.upper()),
    )
    return draft


def _check_target(target: str, own: ArchiveOptions) -> None:
    """Check the name of the destination, and that the key can sign, before anything is copied.

    Raises:
        UsageError: the name or the key is wrong. MissingPackage: what encrypts or signs is not installed.
    """
    suffix = ENCRYPTED if own.recipients else SUFFIX
    if not target.endswith(suffix) or target == suffix:
        kind = "an encrypted archive" if own.recipients else "an archive"
        raise UsageError(f"{target}: name {kind} *{suffix}.", code="CKPT0211")
    if own.key is not None:
        _sign_files([("x", "0" * 64)], target, own)
    if own.recipients:
        require_packages("encryption", "pyrage")


@dataclass(eq=False, repr=False)
class _Writing(ByFields):
    """An archive that is written: its plan, and what its small files will say.

    `wanted` are the tensors as they are written, in order; `values` is values.json; `mtime` the time of the members, in
    seconds; `kept` and `retained` are RETENTION.json and what it says, None where there is none.
    """

    own: ArchiveOptions
    target: str
    planned: ArchivePlan
    grouped: list[list[str]]
    wanted: dict[str, TensorEntry]
    values: bytes
    mtime: int
    step: int | None
    story: dict[str, object]
    kept: bytes | None
    retained: dict[str, object] | None
    sinks: list[FrameWriter] = field(default_factory=list)
    sent: int = 0  # bytes of the archive so far

    def open_sink(self, write: Callable[[bytes | memoryview], None], jobs: int, earlier: EarlierFile | None) -> Sink:
        """Open the sink that compresses the members, and encrypts them if there are recipients.

        Args:
            write: takes the bytes of the archive, in order.
            jobs: threads that compress.
            earlier: the file that an interrupted write left; None to start from the beginning.
        """
        from ckpttool.audit.encryption import Encryptor
        from ckpttool.audit.frame_writer import FrameWriter

        def counted_write(data: bytes | memoryview) -> None:
            self.sent += len(data)
            write(data)

        self.sent = 0
        seal = Encryptor(counted_write, self.own.recipients) if self.own.recipients else None
        frames = FrameWriter(
            seal.append if seal else counted_write,
            self.planned.cuts,
            self.planned.members,
            level=self.own.level,
            jobs=jobs,
            earlier=earlier,
        )
        self.sinks.append(frames)
        return _EncryptedSink(frames, seal) if seal else frames

    def write_tail(self, draft: Draft, digests: Mapping[str, str]) -> bytes:
        """Return the last bytes of the archive: the small files, which hold the digests of all other members.

        Args:
            draft: gets the summary of the archive.
            digests: {tensor: digest}.

        Raises:
            Unsupported: a record would be refused when it is read.
        """
        from ckpttool.audit import archive_plan as plan
        from ckpttool.audit import manifest as records
        from ckpttool.audit import provenance, tarball
        from ckpttool.audit.archive import make_archive_facts

        self.sinks[-1].flush()
        hashed = self.sinks[-1].member_sums()
        hashes = {m.name: (m.end - m.start, hashed[m.name]) for m in self.planned.members}
        hashes[plan.VALUES] = (len(self.values), records.sha256_hex(self.values))
        manifest = records.Manifest(
            self.wanted, {n: digests[n] for n in self.wanted}, self.grouped, hashes, self.own.shuffle, self.step
        )
        smalls = {
            plan.VALUES: self.values,
            plan.MANIFEST: records.encode_manifest(manifest, self.planned.places),
            plan.PROVENANCE: provenance.encode_provenance(self.story),
        }
        if self.kept is not None:
            smalls[plan.RETENTION] = self.kept
        listed = [(n, h) for n, (_, h) in hashes.items() if n != plan.VALUES]
        listed += [(n, records.sha256_hex(data)) for n, data in smalls.items()]
        smalls[plan.SUMS] = records.encode_sums(listed)
        if self.own.key is not None:
            listed.append((plan.SUMS, records.sha256_hex(smalls[plan.SUMS])))
            smalls[plan.SIGNATURE] = _sign_files(listed, self.target, self.own)
        draft.summary = asdict(
            make_archive_facts(
                self.target,
                0,
                manifest,
                records.sha256_hex(smalls[plan.MANIFEST]),
                records.sha256_hex(smalls[plan.SUMS]),
                self.story,
                self.retained,
                signature=smalls.get(plan.SIGNATURE),
                encrypted=bool(self.own.recipients),
            )
        )
        _check_records_readable(smalls, self.sent)
        out = b"".join(plan.make_small_member(n, data, self.mtime) for n, data in smalls.items())
        return plan.get_padding_after_tensors(self.planned) + out + tarball.END


def _check_records_readable(smalls: Mapping[str, bytes], archive_bytes: int) -> None:
    """Read the records of an archive as every reader does, before they are written: an encrypted archive is not read
    back, since that needs its key.

    Args:
        smalls: {name: bytes} of the small files of the archive.
        archive_bytes: bytes of the archive before them, by which their size is limited.

    Raises:
        Unsupported: a reader would refuse one: it is too large or too deep, or an entry is none that it knows.
    """
    from ckpttool.audit import archive_plan as plan
    from ckpttool.audit import manifest as records
    from ckpttool.audit import provenance

    most = records.compute_max_record_bytes(archive_bytes)
    try:
        for name, data in smalls.items():
            bounded_json.refuse_bomb(data, name)
            if len(data) > most:
                raise Unsafe(
                    f"{name} would have {len(data)} bytes in an archive of {archive_bytes}; at most {most} are read",
                    code="CKPT0704",
                )
        records.decode_manifest(smalls[plan.MANIFEST], plan.MANIFEST)
        story = provenance.decode_provenance(smalls[plan.PROVENANCE], plan.PROVENANCE)
        provenance.decode_config_files(story, plan.PROVENANCE)
    except (Corrupt, Unsafe) as e:
        raise Unsupported(
            f"The archive could not be read again: {str(e).rstrip('.')}. Keep less beside the tensors: "
            f"{argument('only', ['model', 'optim'])}.",
            code="CKPT0316",
        ) from None


def _sign_files(files: Sequence[tuple[str, str]], name: str, how: ArchiveOptions) -> bytes:
    """Return the signature of files, made with the key in `how`.

    Args:
        files: (name, SHA-256 in hex) of each.
        name: name of the archive.
        how: options of the archive, with the key.

    Raises:
        UsageError: a key or certificate is not what it should be. MissingPackage: model-signing is not installed.
    """
    from ckpttool.audit import signing

    assert how.key is not None
    return signing.sign_files(
        files, name, key=how.key, password=how.password, certificate=how.certificate, chain=how.chain
    )


class _EncryptedSink:
    """A sink that compresses and then encrypts. After an interruption it starts from the beginning."""

    def __init__(self, frames: FrameWriter, seal: Encryptor) -> None:
        self.frames, self.seal = frames, seal
        self.append, self.flush, self.state = frames.append, frames.flush, frames.state

    @property
    def at(self) -> int:
        """Return how many bytes were appended, before compression."""
        return self.frames.at

    def resumable(self) -> bool:
        """Return False: encryption cannot resume after an interruption."""
        return False

    def finish(self) -> None:
        """End the frames and the cipher."""
        self.frames.finish()
        self.seal.finish()

    def close(self) -> None:
        """Release what compresses and what encrypts."""
        self.frames.close()
        self.seal.close()


def _get_member_time(how: ArchiveOptions, source: Source) -> int:
    """Return the modification time of the archive's members, in seconds since 1970: that of the newest source file; for
    a reproducible archive the given time, or 0."""
    if how.reproducible:
        return how.epoch or 0
    return max([0, *(i[3] // 1_000_000_000 for i in source.identities().values())])


def refuse_protected(path: str) -> None:
    """Refuse to replace an archive that must be kept, or a folder that has archives; `path` is any destination.

    Raises:
        DestinationExists: it is under retention or a legal hold, or damaged, so that this cannot be known.
    """
    from ckpttool.audit import archive_store

    archive_store.refuse_protected(path)


def replacing(path: str) -> AbstractContextManager[None]:
    """Return a context manager around the replacement of what is at `path`. If that is an archive, it keeps others from
    placing a hold on it, and records the replacement in the ledger of an object store.

    Raises:
        DestinationExists: it is under retention or a legal hold, or damaged, so that this cannot be known.
        Corrupt: the ledger is damaged. RemoteError, CkpttoolError: it cannot be read or written.
    """
    from ckpttool.audit import archive_store

    if path.endswith((SUFFIX, ENCRYPTED)):
        return archive_store.replacing(path)
    if not is_url(path):  # a store is not listed twice
        archive_store.refuse_protected(path)
    return nullcontext()


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS = {
    "readme-layouts": (
        (
            "**audit**",
            "one self-describing archive, `.tar.zst`",
            "",
            "everything",
        ),
    ),
    "layouts": (
        (
            "**audit**",
            "archives of `audit export`, `.tar.zst`; `audit restore` reads encrypted ones",
            (
                "one file, ordered by tensor names: the same manifest and tensors whatever the source layout and "
                "world size. `convert` writes archives too, without a ledger"
            ),
        ),
    ),
}
LAYOUTS = (
    Layout(
        name="audit",
        title="Audit archive (.tar.zst)",
        detect=detect,
        read=read,
        write=write,
        mount=mount,
        keeps_subclasses=True,
        keeps_calls=True,
        is_file=True,
        suffixes=(SUFFIX, ENCRYPTED),
        aliases=("archive",),
        options=ArchiveOptions,
        check_replaceable=refuse_protected,
        replacing=replacing,
        reader_uses=(),
        writer_uses=("config",),
        program=Program(
            rows=_ROWS, next_step=lambda advice: f"ckpttool audit restore {advice.quoted} OUT --to dcp -n RANKS"
        ),
    ),
)
