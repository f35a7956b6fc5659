"""open -> write -> fill -> commit -> verify: one checkpoint becomes another.

`open` reads an index and proves it sound. `convert` asks the target layout for a draft, fills it, commits it in one
rename, reads the result back from the disk and compares digests. `verify` and `digest` read a checkpoint without
writing one.

What a digest is, digests.py says.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from blake3 import blake3

from .. import layouts
from .._version import __version__
from ..errors import (
    CkpttoolError,
    Corrupt,
    DestinationExists,
    Differs,
    Interrupted,
    NotRecognised,
    RemoteError,
    Unreadable,
    Unsupported,
    UsageError,
)
from ..formats import safetensors_header
from ..index.checkpoint import Checkpoint, TensorEntry, Unread, check, floating_dtype, joined, strangers, twins
from ..index.digests import merkle_root, roots
from ..index.names import NOT_THEIRS, refuse_surrogates
from ..storage import partial, remote
from ..storage.destinations import Sending, SendingFolder
from ..storage.source import Source, raise_file_limit
from ..storage.staging import Draft, Dropped, Staging, refuse_full, refuse_target, write_error
from ..storage.upload import NOTE
from . import mixups, unread_files
from .fill import Progress, fill, silent, tensor_digests
from .recorded import IGNORE, MOST_RECORD_BYTES, RECORD, Recorded, missing, of_folder, other_digests
from .stream import Effort, small

__all__ = [
    "MOST_RECORD_BYTES", "RECORD", "CheckpointPath", "ConvertResult", "DigestResult", "OpenCheckpoint", "OpenOptions", "Plan",
    "RunOptions", "VerifyResult", "WriteRequest", "check_destination", "convert", "convert_with", "digest", "effort_of", "encoded", "merkle_root",
    "open", "open_with", "plan", "plan_id", "plan_with", "record", "roots", "settled", "shown_path", "verify",
]  # fmt: skip

#: A folder or a file, or the place that it was found to be.
CheckpointPath = str | os.PathLike[str] | layouts.Place


def shown_path(path: CheckpointPath) -> str:
    """The path or URL of a checkpoint, for people."""
    return os.path.join(path.source.root, path.file or "") if isinstance(path, layouts.Place) else os.fspath(path)


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """How a checkpoint is read; the arguments of `open`, which explains them."""

    source_layout: str | None = None
    only: Iterable[str] | None = None
    config: str | None = None
    like: str | os.PathLike[str] | None = None
    flat_layout: str | os.PathLike[str] | None = None
    wrap: Iterable[str] | None = None
    tag: str | None = None
    allow_equal_ranks: bool = False
    allow_mixed_steps: bool = False

    def __post_init__(self) -> None:
        for name in ("only", "wrap"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise UsageError(f"{name}={value!r} is a string; give a list of strings, such as [{value!r}].")
            if value is not None:
                object.__setattr__(self, name, tuple(value))
        for name in ("like", "flat_layout"):  # plan_id compares them as text
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, os.fspath(value))


@dataclass(frozen=True, kw_only=True)
class WriteRequest:
    """What a conversion is asked to write; the arguments of `plan`, which explains them."""

    to: str | None = None
    options: object = None
    world_size: int | None = None
    dtype: str | None = None
    cast: Mapping[str, str] | None = None
    canonical_keys: bool = False
    drop: bool = False
    ignore_recorded_digests: bool = False
    expected: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.world_size is not None and (type(self.world_size) is not int or self.world_size < 1):
            raise UsageError(f"The world size is {self.world_size!r}; it must be an integer of at least 1.")
        if not self.cast:  # one way to say so, since plan_id compares requests
            object.__setattr__(self, "cast", None)


@dataclass(repr=False)
class OpenCheckpoint:
    """A checkpoint that was read and checked, with the files it lies in."""

    checkpoint: Checkpoint
    source: Source
    layout: layouts.Layout
    folder: bool  # whether it is a folder of its own, and not one file among others
    located: bool = False
    # what `locate` does not refuse
    allow_equal_ranks: bool = False
    allow_mixed_steps: bool = False
    only: tuple[str, ...] | None = None  # components that were asked for
    _record: list[Recorded | None] = field(default_factory=list)

    def recorded(self) -> Recorded | None:
        """What the ckpttool.json in the folder says; None where there is none. Read once."""
        if not self._record:
            self._record.append(of_folder(self.source) if self.folder else None)
        return self._record[0]

    def expect_recorded(self, ignore: bool = False) -> None:
        """Make the digests in ckpttool.json those that this checkpoint must have (`Checkpoint.recorded`), as far as they are
        about it; `ignore` takes away those that it carries itself too. What cannot be compared is put into `notes`.

        Raises:
            Corrupt: names, dtypes or shapes are not those of the record.
        """
        ckpt, found = self.checkpoint, None if self.checkpoint.recorded and not ignore else self.recorded()
        if ignore:
            if ckpt.recorded or found is not None:
                ckpt.notes.append(f"the digests that were recorded of it were not compared: {IGNORE}")
                ckpt.recorded, ckpt.ignored_digests = {}, True
            return
        if found is None:
            return
        if found.problem is not None:
            ckpt.notes.append(f"the digests in {RECORD} were not compared, since it is damaged: {found.problem}")
            return
        if not found.about(ckpt):
            ckpt.notes.append(
                f"the digests in {RECORD} were not compared: it is about other files than {ckpt.files[0]}, which this "
                "checkpoint lies in"
            )
            return
        expected = found.expected(ckpt, self.only)
        if gone := [n for n in expected if n not in ckpt.tensors]:
            raise missing(ckpt, gone, len(expected))
        for n, (dtype, shape, _) in expected.items():
            t = ckpt.tensors[n]
            if (t.dtype, t.shape) != (dtype, shape):
                raise Corrupt(
                    f'{ckpt.root}: "{n}" is {t.dtype} {list(t.shape)}, but {RECORD} lists it as {dtype} {list(shape)}: it was '
                    f"changed after the record was written. Take another copy. If it was on purpose, use {IGNORE}, or remove "
                    f"{RECORD}."
                )
        if new := [n for n in ckpt.tensors if n not in expected and n not in found.added and n not in found.tied]:
            ckpt.notes.append(
                f'{len(new)} tensors are not listed in {RECORD}, first "{new[0]}", so no digest of them was compared'
            )
        ckpt.recorded = {n: digest for n, (_, _, digest) in expected.items()}

    def locate(self) -> Checkpoint:
        """The index with raw byte ranges, checked again; every item's framing has been looked into."""
        if not self.located:
            if self.layout.locate is not None:
                self.checkpoint = self.layout.locate(self.checkpoint, self.source)
                check(self.checkpoint)
            if not self.allow_equal_ranks:
                mixups.refuse_equal_ranks(self.checkpoint, self.source)
            if not self.allow_mixed_steps:
                mixups.refuse_mixed_steps(self.checkpoint, self.source)
            self.located = True
        return self.checkpoint

    def read(self, name: str) -> bytes:
        """The row-major bytes of one small tensor, checked against the CRC32 that the source carries."""
        return small(self.locate(), self.source, [name])[name]

    def __repr__(self) -> str:
        ckpt = self.checkpoint
        return (
            f"<{type(self).__name__} {ckpt.layout} {ckpt.root}: {len(ckpt.tensors):,} tensors, {ckpt.nbytes:,} bytes>"
        )

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()


def open(
    path: CheckpointPath,
    *,
    source_layout: str | None = None,
    only: Iterable[str] | None = None,
    config: str | None = None,
    like: str | os.PathLike[str] | None = None,
    flat_layout: str | os.PathLike[str] | None = None,
    wrap: Iterable[str] | None = None,
    tag: str | None = None,
    allow_equal_ranks: bool = False,
    allow_mixed_steps: bool = False,
) -> OpenCheckpoint:
    """Read the index of a checkpoint in any layout and prove it sound; no tensor byte is read.

    Args:
        path: a folder, a file, or the URL of one.
        source_layout: its layout, where the files alone do not tell.
        only: components to keep (["model", "optim"]); all where None.
        config: folder or id of a Hugging Face model with the same architecture.
        like: another checkpoint of the same model: its names, shapes, and the order of its optimizer are used.
        flat_layout: file with what `describe_fsdp1` returned in the job.
        wrap: patterns of the modules that FSDP1 wrapped, ["**.layers.*"].
        tag: which save, where a DeepSpeed folder holds several; the one that `latest` names where None.
        allow_equal_ranks: read it although one rank's file looks like a copy of another's.
        allow_mixed_steps: read it although one rank's file looks like one of another step.

    Raises:
        NotRecognised, Unsupported, Corrupt, Unsafe: as errors.py tells them apart. Two files of ranks that do not belong
            together are Corrupt when the checkpoint is located, not here.
        UsageError: an argument makes no sense.
    """
    options = OpenOptions(
        source_layout=source_layout, only=only, config=config, like=like, flat_layout=flat_layout, wrap=wrap, tag=tag,
        allow_equal_ranks=allow_equal_ranks, allow_mixed_steps=allow_mixed_steps,
    )  # fmt: skip
    return open_with(path, options)


def open_with(path: CheckpointPath, options: OpenOptions, model: layouts.Model | None = None) -> OpenCheckpoint:
    """`open`; `model` is what `model_of(options)` gives, where it is known."""
    only = None if options.only is None else tuple(options.only)
    model = model or model_of(options)
    raise_file_limit()
    where = path if isinstance(path, layouts.Place) else layouts.place(path)
    folder = where.file is None
    try:
        if folder and where.source.distant and NOTE in where.source.list():
            raise Corrupt(
                f"{where.source.root}: a conversion to this place was interrupted while its files became visible. Run it "
                "again, or remove what lies there."
            )
        found = layouts.find(options.source_layout) if options.source_layout else layouts.detect(where)
        given, where = where, found.mount(where)
        ckpt = found.read(
            where,
            layouts.ReadOptions(
                config=model.config, like=model.like, flat_layout=model.flat_layout, wrap=model.wrap,
                only=None if only is None else frozenset(only), tag=options.tag, allow_equal_ranks=options.allow_equal_ranks,
            ),
        )  # fmt: skip
        opened = OpenCheckpoint(
            ckpt, where.source, found, folder, False, options.allow_equal_ranks, options.allow_mixed_steps, only=only
        )
        _leave_made(opened)
        if where == given:  # what is mounted holds all that it lists
            ckpt.unread = unread_files.unread(where.source, where.file, ckpt)
            ckpt.notes = [*ckpt.notes, *unread_files.note(ckpt.unread)]
        if only is not None:
            opened.checkpoint = _only(ckpt, only)
        check(opened.checkpoint)
    except BaseException:
        where.source.close()
        raise
    return opened


def _leave_made(opened: OpenCheckpoint) -> None:
    """Take out the values that ckpttool itself had to write into the checkpoint (`Layout.made`), and that still are what it
    wrote: they are no part of the state."""
    ckpt = opened.checkpoint
    if opened.layout.made and (found := opened.recorded()) is not None:
        for name, data in found.made.items():
            if ckpt.value(name) == data:
                ckpt.values.pop(name, None)


def _only(ckpt: Checkpoint, only: Iterable[str]) -> Checkpoint:
    wanted = list(only)
    have = {ckpt.component(n) for n in [*ckpt.tensors, *ckpt.values]}
    missing = [w for w in wanted if w not in have]
    if missing:
        raise UsageError(f"--only {','.join(missing)}: the checkpoint holds {', '.join(sorted(have))}.")
    return ckpt.only(wanted)


def model_of(options: OpenOptions) -> layouts.Model:
    """What these options say about the model; opens the checkpoint that `like` names."""
    known = None
    if options.like is not None:
        with open(options.like) as other:
            known = _like(other.checkpoint)
    flat_layout = None if options.flat_layout is None else os.fspath(options.flat_layout)
    return layouts.Model(options.config, known, flat_layout, None if options.wrap is None else tuple(options.wrap))


def _like(ckpt: Checkpoint) -> layouts.Like:
    model = {joined(t.path[1:]): t for t in ckpt.tensors.values() if t.path[0] == "model"}
    return layouts.Like({n: (t.shape, t.dtype) for n, t in model.items()}, twins(model), optimizer_order(ckpt))


def optimizer_order(ckpt: Checkpoint) -> tuple[str, ...] | None:
    """FQNs in the order of the optimizer, as its param groups list them; None where there is no such list."""
    groups = {
        v.path[2]: v.data
        for v in ckpt.values.values()
        if v.path[:2] == ("optim", "param_groups") and v.path[3:] == ("params",)
    }
    names = [n for _, group in sorted(groups.items(), key=lambda kv: int(kv[0])) for n in group]
    return tuple(names) if names and all(isinstance(n, str) for n in names) else None


# --------------------------------------------------------------------------------------------------------- digests


@dataclass(frozen=True)
class DigestResult:
    """`digest` {"all", "model", ...: Merkle root}, `tensors` {name: BLAKE3}, both in hex; `not_read` files that belong to the
    checkpoint and are no part of the digest, as `Unread.to_json` has them."""

    digest: dict[str, str]
    tensors: dict[str, str]
    not_read: list[dict[str, Any]]


def digest(
    path: CheckpointPath,
    *,
    source_layout: str | None = None,
    only: Iterable[str] | None = None,
    config: str | None = None,
    like: str | os.PathLike[str] | None = None,
    flat_layout: str | os.PathLike[str] | None = None,
    wrap: Iterable[str] | None = None,
    tag: str | None = None,
    allow_equal_ranks: bool = False,
    allow_mixed_steps: bool = False,
    progress: Progress = silent,
) -> DigestResult:
    """The digest of a state, which is the same in every layout and at every world size; reads all bytes of its tensors.

    Args:
        progress: called with ("digest", bytes done, bytes in all).
        (the others): as `open`.
    """
    options = OpenOptions(
        source_layout=source_layout, only=only, config=config, like=like, flat_layout=flat_layout, wrap=wrap, tag=tag,
        allow_equal_ranks=allow_equal_ranks, allow_mixed_steps=allow_mixed_steps,
    )  # fmt: skip
    with open_with(path, options) as opened:
        ckpt = opened.locate()
        found = tensor_digests(ckpt.tensors, opened.source, ckpt.files, ckpt.records, progress)
        opened.source.unchanged()
        return DigestResult(roots(ckpt.tensors, found), found, [r.to_json() for r in ckpt.unread])


# ------------------------------------------------------------------------------------------------------ converting


@dataclass
class ConvertResult:
    """What a conversion did. Sizes are in bytes; `dropped` are (name, bytes, why)."""

    source: str
    destination: str
    layout_from: str
    layout_to: str
    world_size: int | None
    tensors: int
    source_bytes: int
    written_bytes: int
    digest: dict[str, str]
    verified: bool
    dropped: list[tuple[str, int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)  # what the layout says of the destination: Facts of an archive
    compared: int = 0  # tensors whose digest was expected, and is that
    not_read: list[dict[str, Any]] = field(default_factory=list)  # files of the source, as `Unread.to_json` has them


@dataclass
class Plan:
    """A conversion that has not begun: the open source, the draft of the destination, and its layout. Close it, or use `with`."""

    opened: OpenCheckpoint
    draft: Draft
    target: layouts.Layout

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.source.close()


def plan(
    src: CheckpointPath,
    dst: str | os.PathLike[str],
    *,
    to: str | None = None,
    options: object = None,
    world_size: int | None = None,
    only: Iterable[str] | None = None,
    dtype: str | None = None,
    cast: Mapping[str, str] | None = None,
    canonical_keys: bool = False,
    drop: bool = False,
    source_layout: str | None = None,
    config: str | None = None,
    like: str | os.PathLike[str] | None = None,
    flat_layout: str | os.PathLike[str] | None = None,
    wrap: Iterable[str] | None = None,
    tag: str | None = None,
    allow_equal_ranks: bool = False,
    allow_mixed_steps: bool = False,
    ignore_recorded_digests: bool = False,
    expected: Mapping[str, str] | None = None,
) -> Plan:
    """What `convert` would write; writes nothing.

    Args:
        (all): as `convert`.

    Raises:
        Unsupported: the layout cannot hold a part of the state, or state lies in files that were not read, and `drop` is not
            set.
    """
    reading = OpenOptions(
        source_layout=source_layout, only=only, config=config, like=like, flat_layout=flat_layout, wrap=wrap, tag=tag,
        allow_equal_ranks=allow_equal_ranks, allow_mixed_steps=allow_mixed_steps,
    )  # fmt: skip
    writing = WriteRequest(
        to=to, options=options, world_size=world_size, dtype=dtype, cast=cast, canonical_keys=canonical_keys, drop=drop,
        ignore_recorded_digests=ignore_recorded_digests, expected=expected,
    )  # fmt: skip
    return plan_with(src, dst, reading, writing)


def plan_with(src: CheckpointPath, dst: str | os.PathLike[str], reading: OpenOptions, writing: WriteRequest) -> Plan:
    """`plan`."""
    target = layouts.target_of(writing.to, dst)
    if target.write is None:
        raise Unsupported(f"ckpttool reads {target.name}, but does not write it.")
    if writing.options is not None and type(writing.options) is not target.options:
        kind, wanted = type(writing.options).__name__, target.options.__name__ if target.options else "no options"
        raise UsageError(f"options={kind}(...) does not apply to {target.name}, which takes {wanted}.")
    if writing.canonical_keys and not target.own_keys:
        keep = ", ".join(x.name for x in layouts.layouts().values() if x.own_keys)
        raise UsageError(f"--canonical-keys applies to {keep}; {target.name} has keys of its own.")
    holds, drop = target.holds(writing.options), writing.drop
    model = model_of(reading)
    opened = open_with(src, reading, model)
    try:
        aside = unread_files.lost(opened.checkpoint, holds, opened.only)
        if aside and not drop:
            raise Unsupported(_not_carried(opened, target, aside))
        ckpt = opened.locate()
        if writing.expected is None:
            opened.expect_recorded(writing.ignore_recorded_digests)
        else:
            ckpt.recorded = {**ckpt.recorded, **writing.expected}
        if writing.canonical_keys:
            ckpt.origin = {k: v for k, v in ckpt.origin.items() if k[0] not in ("model", "optim")}
        options = layouts.WriteOptions(
            config=model.config, like=model.like, flat_layout=model.flat_layout, wrap=model.wrap,
            target=os.path.basename(os.path.abspath(dst)), world_size=writing.world_size,
            cast=_caster(writing.dtype, writing.cast or {}), own=writing.options,
        )  # fmt: skip
        ckpt = opened.checkpoint = target.prepare(ckpt, opened.source, options)
        if odd := strangers(ckpt):
            ckpt.notes.append(
                f"the optimizer has state for {len(odd)} parameters that the model does not have, first "
                f'"{odd[0]}": are the two of one training run?'
            )
        refuse_surrogates(ckpt.tensors)  # every record lists them by name
        draft = target.write(ckpt, opened.source, options)
        _refuse_casts(draft)
        theirs = target.own_keys and any(p[0] in ("model", "optim") for p in ckpt.origin)
        if theirs and NOT_THEIRS not in draft.notes:
            draft.notes.append(
                "model and optimizer keep the keys of the source; --canonical-keys writes model and optim"
            )
        lost = [d for d in draft.dropped if not holds or d.name.partition(".")[0] in holds]
        if lost and not drop:
            raise Unsupported(
                f"{target.name} cannot hold {len(lost)} of the {len(ckpt.tensors) + len(ckpt.values)} entries, first "
                f'"{lost[0].name}" ({lost[0].why}). Use --drop to go on without them, or another layout.'
            )
        draft.dropped += [Dropped(r.name, r.bytes or 0, f"{r.what}, {unread_files.NOT_READ}") for r in aside]
        for pattern in writing.cast or {}:
            if not fnmatch.filter([*ckpt.tensors, *draft.checkpoint.tensors], pattern):
                raise UsageError(
                    f"--cast {pattern}: no tensor has such a name. The first name is {next(iter(ckpt.tensors))}."
                )
    except BaseException:
        opened.source.close()
        raise
    return Plan(opened, draft, target)


def _refuse_casts(draft: Draft) -> None:
    """Refuse a layout's own choice of dtype (masters of ZeRO are float32) where numpy cannot convert the source's.

    Raises:
        Unsupported: with the first such tensor.
    """
    for name, t in draft.checkpoint.tensors.items():
        of = draft.sources.get(name)
        if of is not None and of.dtype != t.dtype and "float4_e2m1fn_x2" in (of.dtype, t.dtype):
            raise Unsupported(
                f'"{joined(of.path)}" is {of.dtype}, two numbers in a byte, and the destination keeps it as {t.dtype}. ckpttool moves '
                "such tensors, it does not convert them. Choose a layout that keeps dtypes, such as dcp."
            )


def _not_carried(opened: OpenCheckpoint, target: layouts.Layout, rows: list[Unread]) -> str:
    """Why a conversion stops at files that were not read."""
    where = opened.source.root if opened.folder else os.path.join(opened.source.root, opened.checkpoint.files[0])
    return (
        f"{where} is read as {opened.layout.name}, which does not include these files of the same checkpoint: "
        f"{unread_files.listed(rows)}. The {target.name} checkpoint would look complete, but training could not resume from it. "
        "Give --drop to convert without them, or --only model for the weights alone."
    )


def _caster(dtype: str | None, cast: Mapping[str, str]) -> layouts.Cast:
    whole = None if dtype in (None, "keep") else floating_dtype(str(dtype))
    rules = [(pattern, floating_dtype(to)) for pattern, to in cast.items()]

    def choose(name: str, stored: str) -> str:
        if "float" not in stored or stored.startswith("float4"):
            return stored
        out = whole if whole and name.startswith("model.") else stored
        for pattern, to in rules:
            if fnmatch.fnmatchcase(name, pattern):
                out = to
        return out

    return choose


def convert(
    src: CheckpointPath,
    dst: str | os.PathLike[str],
    *,
    to: str | None = None,
    options: object = None,
    world_size: int | None = None,
    only: Iterable[str] | None = None,
    dtype: str | None = None,
    cast: Mapping[str, str] | None = None,
    canonical_keys: bool = False,
    drop: bool = False,
    force: bool = False,
    verify: bool = True,
    source_layout: str | None = None,
    config: str | None = None,
    like: str | os.PathLike[str] | None = None,
    flat_layout: str | os.PathLike[str] | None = None,
    wrap: Iterable[str] | None = None,
    tag: str | None = None,
    allow_equal_ranks: bool = False,
    allow_mixed_steps: bool = False,
    ignore_recorded_digests: bool = False,
    expected: Mapping[str, str] | None = None,
    max_memory_bytes: int | None = None,
    threads: int = 2,
    progress: Progress = silent,
) -> ConvertResult:
    """Convert a checkpoint to another layout, world size or dtype, bit for bit.

    The destination appears whole or not at all. What the target cannot hold, and state in files that the source's layout
    does not read, stops the conversion unless `drop` is set; `hf` stores only weights, so dropping the optimizer there is
    reported but not an error. What is copied is compared with the digests that were recorded of the source; cast tensors are
    read again for that.

    What an interrupted run of the same conversion has left is used after it was read again; such a result is read back
    even where `verify` is not set. An old destination that an interrupted run had taken away is put back first.

    Args:
        src: a folder, a file, or the URL of one; never changed.
        dst: path or URL of the new checkpoint.
        to: layout to write ("dcp", "full", "hf", "zero3", "zero2", "zero1", "universal", "fsdp1", "audit"); where None, the
            name of the destination tells (".pt", ".pth", ".bin" and ".ckpt" are full).
        options: what only that layout understands: an `HfOptions`, `ZeroOptions` (zero1 to zero3), `UniversalOptions`,
            `Fsdp1Options` or `ArchiveOptions`; `help` of these shows units and defaults.
        world_size: ranks of the job that will load it, at least 1; those of the source where None.
        only: components to convert (["model", "optim"]); all where None.
        dtype: floating-point dtype of the weights ("bf16", "fp16", "fp32", "keep"); optimizer state keeps its own. "keep" where
            None.
        cast: {glob of tensor names: dtype}, stronger than `dtype`; the last that matches counts.
        canonical_keys: dcp and full: write model and optimizer under "model" and "optim" with plain FQNs, as torch's
            `get_state_dict` names them, and not under the keys of the source.
        drop: go on without what the target cannot hold, and without state in files that were not read.
        force: replace an existing checkpoint, whole.
        verify: read the result back from the disk and compare digests.
        source_layout, config, like, flat_layout, wrap, tag, allow_equal_ranks, allow_mixed_steps: as `open`. `config`, `like`,
            `flat_layout` and `wrap` also describe the model to the layout that is written.
        ignore_recorded_digests: do not compare the source with the digests in its ckpttool.json, or in itself.
        expected: {tensor: BLAKE3 in hex} that the source must have, instead of those in its ckpttool.json.
        max_memory_bytes: budget of all buffers, in bytes; about 400 MB where None.
        threads: threads that read, and as many that write.
        progress: called with (what is done, bytes done, bytes in all).

    Raises:
        CkpttoolError: one of `ckpttool.errors`; the destination is as it was before, or the message says that it is the new
            one. What is worth knowing besides, such as what could not be removed, is in the notes of the exception.
    """
    reading = OpenOptions(
        source_layout=source_layout, only=only, config=config, like=like, flat_layout=flat_layout, wrap=wrap, tag=tag,
        allow_equal_ranks=allow_equal_ranks, allow_mixed_steps=allow_mixed_steps,
    )  # fmt: skip
    writing = WriteRequest(
        to=to, options=options, world_size=world_size, dtype=dtype, cast=cast, canonical_keys=canonical_keys, drop=drop,
        ignore_recorded_digests=ignore_recorded_digests, expected=expected,
    )  # fmt: skip
    running = RunOptions(
        force=force, verify=verify, max_memory_bytes=max_memory_bytes, threads=threads, progress=progress
    )
    return convert_with(src, dst, reading, writing, running)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a conversion is carried out; the arguments of `convert`, which explains them."""

    force: bool = False
    verify: bool = True
    max_memory_bytes: int | None = None
    threads: int = 2
    progress: Progress = silent


def convert_with(
    src: CheckpointPath, dst: str | os.PathLike[str], reading: OpenOptions, writing: WriteRequest, running: RunOptions
) -> ConvertResult:
    """`convert`."""
    dst = _destination(dst)
    _refuse_source(src, dst)
    where = remote.whole(dst)
    said = [] if remote.is_url(dst) else _recovered(where)
    _refuse_destination(dst, where, running.force)
    try:
        return _convert(src, dst, where, reading, writing, running, said)
    except CkpttoolError as e:
        for text in said:
            e.add_note(text)
        raise


def _refuse_destination(dst: str, where: str, force: bool) -> None:
    """Refuse what is at a destination, before anything is opened."""
    if remote.is_url(dst):
        _refuse_store(where)
    elif os.path.lexists(where):
        refuse_target(where, not os.path.isdir(where), force)
    if force:
        _refuse_foreign(dst)


def check_destination(src: CheckpointPath, dst: str | os.PathLike[str], planned: Plan, force: bool) -> int | None:
    """Refuse a destination as `convert` would refuse it, and write nothing.

    Returns:
        The free bytes of its file system; None for an object store.

    Raises:
        DestinationExists, UsageError: nothing may be written there. NoSpace: the destination does not fit.
    """
    dst = _destination(dst)
    _refuse_source(src, dst)
    where = remote.whole(dst)
    _refuse_destination(dst, where, force)
    if force:
        planned.target.check_replaceable(dst)
    if remote.is_url(dst):
        return None
    refuse_target(where, planned.target.is_file, force)
    return refuse_full(os.path.dirname(where), planned.draft.nbytes + (1 << 20))


def _recovered(target: str) -> list[str]:
    """`partial.recover`."""
    try:
        return partial.recover(target)
    except OSError as e:
        raise write_error(
            e, target, f"An earlier run left the old checkpoint beside it; `{partial.command(target)}` puts it back."
        ) from e


def _convert(
    src: CheckpointPath,
    dst: str,
    where: str,
    reading: OpenOptions,
    writing: WriteRequest,
    running: RunOptions,
    said: list[str],
) -> ConvertResult:
    """`convert`, after the destination was looked at; what is worth knowing is added to `said`, also where it raises."""
    far = remote.is_url(dst)
    force, verify, progress = running.force, running.verify, running.progress
    with plan_with(src, dst, reading, writing) as planned:
        opened, draft, target = planned.opened, planned.draft, planned.target
        if force:
            target.check_replaceable(dst)
        ckpt, source = opened.checkpoint, opened.source
        effort = effort_of(running.max_memory_bytes, running.threads, source)
        need = draft.nbytes + (1 << 20)
        staging: Staging | Sending | SendingFolder
        if not far:
            staging = Staging(
                os.fspath(dst),
                target.is_file,
                plan_id(source, draft, target, reading, replace(writing, drop=False)),  # which refuses, and no more
                need,
                force,
            )
        elif target.is_file:
            staging = Sending(os.fspath(dst), need, force, draft.lock)
        else:
            staging = SendingFolder(os.fspath(dst), draft, force)
        said += staging.messages
        staging.messages = said
        try:
            digests = fill(draft, source, ckpt.files, ckpt.records, staging, progress, effort)
            done = staging.earlier.done if isinstance(staging, Staging) else 0
            wanted, digests = settled(opened, draft, digests, writing, progress, effort)
            root = roots(wanted, digests)
            if not isinstance(staging, Sending) and not target.is_file:
                staging.put(RECORD, encoded(record(ckpt, draft, wanted, digests, source.commit)))
            if isinstance(staging, Staging) and (verify or done):
                path = os.path.join(staging.tree, staging.name) if target.is_file else staging.tree
                _read_back(path, target, draft, digests, reading.config, progress, effort)
            source.unchanged()
            staging.commit()
            if verify and far:  # an object can be read when it is there, and not before
                _read_back(os.fspath(dst), target, draft, digests, reading.config, progress, effort)
        except KeyboardInterrupt:
            staging.release()
            raise Interrupted(f"interrupted. {staging.again}") from None
        except BaseException as e:
            if not isinstance(e, CkpttoolError) or e.keeps_work or staging.in_place:
                staging.release()  # the next run goes on from here
            else:
                staging.abandon()
            if isinstance(e, CkpttoolError) and far and staging.in_place:
                e.add_note(staging.outcome)
            elif isinstance(e, (RemoteError, Unreadable)) and not far:
                e.add_note(staging.again)
            if isinstance(e, OSError) and not isinstance(e, BrokenPipeError):
                raise write_error(e, e.filename or staging.folder, staging.outcome) from e
            raise
        notes = [*ckpt.notes, *draft.notes, *said]
        if not source.versioned():
            notes.append("the server tells no version of its files: a change while they were read would not be noticed")
        if done:
            again = "" if verify else "; the result was read back, as always then"
            notes.append(
                f"continued an interrupted run: {done} of {len(draft.checkpoint.tensors)} tensors were done, and read again{again}"
            )
        return ConvertResult(
            source.root, where, opened.layout.name, target.name, draft.checkpoint.world_size,
            len(wanted), ckpt.nbytes, draft.nbytes, root, verify or done > 0,
            [(d.name, d.nbytes, d.why) for d in draft.dropped], notes, draft.about, len(wanted.keys() & ckpt.recorded.keys()),
            [r.to_json() for r in ckpt.unread],
        )  # fmt: skip


def effort_of(max_memory_bytes: int | None, threads: int, source: Source) -> Effort:
    """Threads and buffers: all the buffers, and what Python and numpy take, fit into the budget."""
    if threads < 1:
        raise UsageError(f"--jobs {threads}: at least 1.")
    if max_memory_bytes is None:
        return Effort(threads)
    buffers = 9 + 2 * threads + 3 * Effort(threads).readers(source)
    buffer = (max_memory_bytes - (64 << 20)) // buffers
    if buffer < 256 << 10:
        need = (64 << 20) + buffers * (256 << 10)
        raise UsageError(f"--max-memory {max_memory_bytes}: at least {-(-need // 10**6)} MB are needed.")
    return Effort(threads, min(16 << 20, buffer - buffer % 4096))


def _destination(dst: str | os.PathLike[str]) -> str:
    """The destination as it was given, if it can be one at all."""
    text = os.fspath(dst)
    if not text or "\0" in text:
        raise UsageError(f"{text!r} cannot be a destination. Give the path that the new checkpoint shall have.")
    return remote.normal(text) if remote.is_url(text) else text


def _refuse_source(src: CheckpointPath, dst: str | os.PathLike[str]) -> None:
    """Refuse a destination that is the source, lies in it or holds it."""
    src = shown_path(src)
    if remote.is_url(dst) != remote.is_url(src):
        return
    a, b = (remote.shown(os.fspath(p)) if remote.is_url(p) else os.path.realpath(p) for p in (src, dst))
    a, b = a.rstrip("/") + "/", b.rstrip("/") + "/"
    if a == b or (b.startswith(a) and (remote.is_url(src) or os.path.isdir(a))) or a.startswith(b):
        raise UsageError(
            f"the destination {dst} is, holds or lies in the source {src}, which is never touched; write elsewhere."
        )


def _refuse_store(url: str) -> None:
    """A store that is written to in another way."""
    if url.startswith("hf://"):
        raise UsageError(f"{url}: the Hub is written to by `ckpttool push`, which makes one commit of it.")
    if url.startswith("http"):
        raise UsageError(f"{url}: http is for reading only. Write to a folder or to s3:// or gs://.")


def _refuse_foreign(target: str) -> None:
    """--force replaces a checkpoint, an empty folder or an empty file; not a folder or a file of other things."""
    if remote.is_url(target):
        try:
            where = layouts.place(target)
        except NotRecognised:
            return
        with where.source as source:
            names = [] if where.file else source.list()
    else:
        try:
            names = os.listdir(target) if os.path.isdir(target) else [target] if os.path.getsize(target) else []
        except FileNotFoundError:
            return
    if not names or RECORD in names or NOTE in names:
        return
    try:
        there = layouts.place(target)
        with there.source as source:
            layouts.detect(there)
            head = source.read(there.file, 0, min(source.size(there.file), 64)) if there.file else b"\0"
            if all(9 <= c <= 13 or 32 <= c < 127 for c in head):
                raise NotRecognised("a text file, whatever its name says")
    except CkpttoolError as e:
        if e.keeps_work:  # it says nothing of what is there
            raise
        what = f"a folder of {len(names)} entries"
        if names == [target]:
            what = f"a file of {os.path.getsize(target):,} bytes"
        raise DestinationExists(
            f"{remote.shown(target)} is {what} and not a checkpoint, so --force does not replace it. Remove it yourself, or "
            "choose another destination."
        ) from None


def plan_id(source: Source, draft: Draft, target: layouts.Layout, *asked: object) -> str:
    """Digest of everything that decides the bytes of the destination: source, draft, and the dataclasses `asked`.

    If the source has no version ids, a random salt is mixed in, so that the id never matches an earlier run."""
    h = blake3(b"" if source.versioned() else os.urandom(32))
    identities = sorted(source.identities().items())
    h.update(
        json.dumps([__version__, target.name, source.root, identities, list(map(repr, asked))], default=str).encode()
    )
    for f in draft.files:
        h.update(os.fsencode(f"{f.name} {f.size}\n"))
        if not callable(f.head):
            h.update(f.head)
    return h.hexdigest()


def _wanted(ckpt: Checkpoint, draft: Draft, cast: layouts.Cast) -> dict[str, TensorEntry]:
    """The source's tensors that the destination holds, under whatever name, with the dtype they have there."""
    there = draft.checkpoint.tensors
    kept = {t.path[0] for t in there.values()}
    gone = {d.name for d in draft.dropped}
    return {
        n: replace(t, dtype=there[n].dtype if n in there else cast(n, t.dtype))
        for n, t in ckpt.tensors.items()
        if t.path[0] in kept and n not in gone
    }


def settled(
    opened: OpenCheckpoint,
    draft: Draft,
    digests: dict[str, str],
    writing: WriteRequest,
    progress: Progress,
    effort: Effort,
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """(the source's tensors that the destination holds, their digests by canonical name) of a draft that was filled, where
    `digests` are those of its tensors; the source is unchanged, and has the digests that were
    recorded of it.

    Raises:
        SourceChanged, Corrupt: it is not.
    """
    opened.source.unchanged()
    wanted = _wanted(opened.checkpoint, draft, _caster(writing.dtype, writing.cast or {}))
    digests = _canonical(opened, draft, wanted, digests, progress, effort)
    _compare_recorded(opened, wanted, digests, progress, effort)
    return wanted, digests


def _canonical(
    opened: OpenCheckpoint,
    draft: Draft,
    wanted: dict[str, TensorEntry],
    digests: dict[str, str],
    progress: Progress,
    effort: Effort,
) -> dict[str, str]:
    """Digests by canonical name. Tensors that the destination splits are read again."""
    ckpt = opened.checkpoint
    out = {n: digests[n] for n in wanted if n in digests and (n in draft.same or draft.sources[n] == ckpt.tensors[n])}
    rest = {n: ckpt.tensors[n] for n in wanted if n not in out}
    if rest:
        dtypes = {n: wanted[n].dtype for n in rest}
        out.update(tensor_digests(rest, opened.source, ckpt.files, ckpt.records, progress, "digest", dtypes, effort))
    return out


def _compare_recorded(
    opened: OpenCheckpoint,
    wanted: Mapping[str, TensorEntry],
    digests: Mapping[str, str],
    progress: Progress,
    effort: Effort,
) -> None:
    """What was copied has the digests that were recorded of the source. Tensors that were cast are read again for that.

    Raises:
        Corrupt: with the first tensor that has not.
    """
    ckpt = opened.checkpoint
    named = {n for n in ckpt.recorded if n in wanted}
    cast = {n: ckpt.tensors[n] for n in sorted(named) if wanted[n].dtype != ckpt.tensors[n].dtype}
    found = dict(digests)
    if cast:
        found |= tensor_digests(cast, opened.source, ckpt.files, ckpt.records, progress, "digest", None, effort)
    wrong = sorted(n for n in named if found[n] != ckpt.recorded[n])
    if wrong:
        raise other_digests(ckpt, wrong, len(named))


def record(
    ckpt: Checkpoint,
    draft: Draft,
    wanted: Mapping[str, TensorEntry],
    digests: Mapping[str, str],
    commit: str | None = None,
) -> dict[str, Any]:
    """What ckpttool.json says of a destination: where it came from (on the Hub: from which commit), and the digest of every
    tensor."""
    return {
        "tool": "ckpttool",
        "version": __version__,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "layout": draft.checkpoint.layout,
        "world_size": draft.checkpoint.world_size,
        "source": {
            "name": os.path.basename(ckpt.root),
            "layout": ckpt.layout,
            "world_size": ckpt.world_size,
            "trainer": ckpt.trainer,
            **({"url": ckpt.root, "commit": commit} if commit else {}),
            **({"recorded_digests": "ignored"} if ckpt.ignored_digests else {}),
        },
        "digest": roots(wanted, digests),
        **(
            {"not_carried": aside}
            if (aside := [d for d in draft.dropped if d.why.endswith(unread_files.NOT_READ)])
            else {}
        ),
        "tied": draft.same,
        "added": draft.added,
        "made": draft.made,
        "files": {f.name: {"bytes": f.size} for f in draft.files},
        "tensors": {n: [wanted[n].dtype, list(wanted[n].shape), d] for n, d in digests.items()},
    }


def encoded(record: Mapping[str, Any]) -> bytes:
    """The bytes of ckpttool.json; a byte of a path that is not UTF-8 becomes a JSON escape."""
    return (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _read_back(
    path: str,
    target: layouts.Layout,
    draft: Draft,
    digests: dict[str, str],
    config: str | None,
    progress: Progress,
    effort: Effort,
) -> None:
    """Read what was written, from the disk, as any reader would, and compare every digest.

    Raises:
        Differs: with the first tensor that is not what was written. Corrupt: it cannot be read.
    """
    try:
        with open(
            path, source_layout=target.name, config=None if target.keeps_config else config,
            allow_equal_ranks=True, allow_mixed_steps=True,
        ) as back:  # fmt: skip
            safetensors_header.open_with_library(back.source, back.checkpoint.files)
            ckpt = back.locate()
            found = tensor_digests(
                ckpt.tensors, back.source, ckpt.files, ckpt.records, progress, "verify", None, effort
            )
    except Unreadable as e:  # what was written there would fail the next run too
        raise Corrupt(f"the destination cannot be read back: {e}") from e
    missing = sorted(set(digests) - set(found) - set(draft.same))
    extra = sorted(set(found) - set(digests) - {d.name for d in draft.dropped} - set(draft.added))
    wrong = sorted(n for n in digests if n in found and found[n] != digests[n])
    if missing or extra or wrong:
        first = (wrong or missing or extra)[0]
        left = f"Remove {remote.shown(path)}." if remote.is_url(path) else "Nothing was left there."
        raise Differs(
            f"the destination, read back, differs from the source: {len(wrong)} tensors have other bytes, "
            f'{len(missing)} are missing, {len(extra)} are new; first "{first}". {left} The disk may be failing; if '
            "it is not, please report this."
        )


# ------------------------------------------------------------------------------------------------------- verifying


@dataclass
class VerifyResult:
    """What `verify` found; sizes in bytes. What was not asked for is None.

    `crc32_covered_bytes` are those that CRC32s in the files themselves cover. `recorded` is "equal", "damaged" (the record
    cannot be read) or "other files" (it is about others); `against` {"path", "components", "verdict"}.
    """

    path: str
    layout: str
    tensors: int
    bytes: int
    structure: str
    crc32_covered_bytes: int
    not_read: list[dict[str, Any]]
    data: str | None = None
    digest: dict[str, str] | None = None
    recorded: str | None = None
    notes: list[str] = field(default_factory=list)
    against: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data, without what was not asked for."""
        return {k: v for k, v in asdict(self).items() if v is not None and (k != "notes" or v)}


def verify(
    path: CheckpointPath,
    *,
    read_data: bool = False,
    against: CheckpointPath | None = None,
    source_layout: str | None = None,
    config: str | None = None,
    like: str | os.PathLike[str] | None = None,
    flat_layout: str | os.PathLike[str] | None = None,
    wrap: Iterable[str] | None = None,
    tag: str | None = None,
    only: Iterable[str] | None = None,
    allow_equal_ranks: bool = False,
    allow_mixed_steps: bool = False,
    progress: Progress = silent,
) -> VerifyResult:
    """Check a checkpoint: its structure and every item's framing.

    Args:
        read_data: also read every byte, and compare it with the CRC32s and with the digests recorded beside it.
        against: also compare every tensor with another checkpoint, in any layout.
        progress: called with ("read", bytes done, bytes in all).
        (the others): as `open`.

    Raises:
        Corrupt, Unsafe: it is damaged. Differs: it is not what was recorded, or not equal to the other.
    """
    options = OpenOptions(
        source_layout=source_layout, only=only, config=config, like=like, flat_layout=flat_layout, wrap=wrap, tag=tag,
        allow_equal_ranks=allow_equal_ranks, allow_mixed_steps=allow_mixed_steps,
    )  # fmt: skip
    with open_with(path, options) as opened:
        ckpt = opened.locate()
        out = VerifyResult(
            remote.whole(shown_path(path)), ckpt.layout, len(ckpt.tensors), ckpt.nbytes, "ok",
            sum(r.extent.length for r in ckpt.records), [r.to_json() for r in ckpt.unread],
        )  # fmt: skip
        if not read_data and against is None:
            return out
        found = tensor_digests(ckpt.tensors, opened.source, ckpt.files, ckpt.records, progress, "read")
        opened.source.unchanged()
        out.data = "ok"
        out.digest = roots(ckpt.tensors, found)
        _verify_recorded(opened, found, out)
    if against is not None:
        with open(against, allow_equal_ranks=True, allow_mixed_steps=True) as other:
            second = other.locate()
            digests = tensor_digests(second.tensors, other.source, second.files, second.records, progress, "read")
            shared = {str(t.path[0]) for t in ckpt.tensors.values()} & {str(t.path[0]) for t in second.tensors.values()}
        mine = {n: d for n, d in found.items() if ckpt.component(n) in shared}
        yours = {n: d for n, d in digests.items() if second.component(n) in shared}
        name = shown_path(against)
        _compare(mine, yours, name)
        out.against = {"path": remote.whole(name), "components": sorted(shared), "verdict": "equal"}
    return out


def _verify_recorded(opened: OpenCheckpoint, found: Mapping[str, str], out: VerifyResult) -> None:
    """Compare digests with those that were recorded, and say in `out` what came of it.

    Raises:
        Differs: they are not equal.
    """
    ckpt, record = opened.checkpoint, opened.recorded()
    if ckpt.recorded:
        _compare(found, ckpt.recorded, "the digests it carries itself")
    elif record is None:
        return
    elif record.problem is not None:
        out.recorded, out.notes = "damaged", [f"digests were not compared: {record.problem}"]
        return
    elif not record.about(ckpt):
        out.recorded = "other files"
        out.notes = [f"digests were not compared: {RECORD} is about other files than {ckpt.files[0]}"]
        return
    else:
        expected = record.expected(ckpt, opened.only)
        mine = {n: (ckpt.tensors[n].dtype, ckpt.tensors[n].shape, d) for n, d in found.items() if n not in record.added}
        _compare(mine, expected, f"the digests in {RECORD}")
    out.recorded = "equal"


def _compare(mine: Mapping[str, Any], theirs: Mapping[str, Any], what: str) -> None:
    wrong = sorted(n for n in mine if n in theirs and mine[n] != theirs[n])
    missing, extra = sorted(set(theirs) - set(mine)), sorted(set(mine) - set(theirs))
    if wrong or missing or extra:
        first = (wrong or missing or extra)[0]
        raise Differs(
            f"not equal to {what}: {len(wrong)} tensors have other bytes, {len(missing)} are missing, {len(extra)} are "
            f'new; first "{first}". `ckpttool diff` shows the values.'
        )
