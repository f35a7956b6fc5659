"""A checkpoint with deltas applied: its weights, of which those that change are computed when they are read.

    base, 3 files    model.w  ------------------------------.
    delta 1          the change of w: zstd of old XOR new --+-- ComputedSource: model.w, a block at a time
    delta 2          the change of w ----------------------'

Every layout writes such a checkpoint as any other. A program names weights as the folder of the Hub does that it was
started from. So changes are found by the names that the base's files have, and then every chunk of the index that lies
in the bytes of a weight that changes is moved to the computed bytes: tied weights and stacks of experts follow.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .. import layouts
from ..bounded_json import parse
from ..errors import CkpttoolError, Corrupt, Unsupported, UsageError, argument
from ..formats.delta_streams import WORKING_BYTES, ChangeStream, open_change_stream, require_checksum_package
from ..formats.deltas import Delta, TensorPatch
from ..index.checkpoint import ITEMSIZE, Checkpoint, Chunks, TensorEntry
from ..index.draft import Dropped
from ..index.records import Extent
from ..options import OpenOptions
from ..printable import count_noun
from ..storage import urls
from ..storage.overlay import ComputedSource
from ..storage.source import Source
from .computed_files import BoxReader, ComputedFiles, choose_page_size
from .deltas import find_deltas
from .opening import CheckpointPath, MergedCheckpoint, OpenCheckpoint, open_checkpoint
from .own_deltas import apply_own_deltas, open_own_delta
from .recorded import MOST_RECORD_BYTES, RECORD
from .selecting import select_merged_part
from .weights import remove_optimizer_notes

if TYPE_CHECKING:
    from .copy.dtypes import Array

__all__ = ["open_patched"]

_LEFT = "a delta changes weights only, and this belongs to those of before"
_OTHER = "Give the version that the delta was made from"


def open_patched(src: CheckpointPath, options: OpenOptions, model: layouts.ModelHints) -> MergedCheckpoint:
    """Open a checkpoint with the deltas of `options.apply` applied in their order.

    Args:
        model: what `collect_model_hints(options)` returns.

    Raises:
        Unsupported: a delta does not belong to the base, or to the delta before it.
        CkpttoolError: the base or a delta cannot be read.
    """
    whole = replace(options, apply=None, only=None, drop_matching=None, rename=None)
    base = open_checkpoint(src, whole, model, False, needed=lambda component: component == "model")
    with ExitStack() as keep:
        keep.callback(base.source.close)
        deltas, own, sources = list[Delta](), list[OpenCheckpoint](), list[Source]()
        for path in options.apply or ():
            where = layouts.place(path)
            keep.enter_context(where.source)
            if (archive := open_own_delta(where)) is not None:
                own.append(keep.enter_context(archive))
                sources.append(archive.source)
            else:
                sources.append(where.source)
                deltas += _find_required_deltas(where, path)
        if own and deltas:
            raise Unsupported(
                f"{own[0].source.root} is a delta of ckpttool, and {deltas[0].where} one of {deltas[0].program}. Apply "
                "those of one program, and then the others to the result.",
                code="CKPT0342",
            )
        _check_delta_order(base, deltas)
        made = apply_own_deltas(base, own, sources) if own else _build_patched(base, deltas, sources)
        part = select_merged_part(made, options)
        keep.pop_all()  # the checkpoint closes them
        return part


def _find_required_deltas(where: layouts.Place, path: str) -> list[Delta]:
    """Return the deltas at a place, at least one.

    Args:
        path: the place as the user gave it, for messages.

    Raises:
        UsageError: there is none.
        CkpttoolError: one cannot be read, or lacks checksums that it should have.
    """
    deltas = find_deltas(where, urls.redact_url(path) if urls.is_url(path) else path)
    if not deltas:
        raise UsageError(
            f"{argument('apply', [path])}: no delta of SkyRL, TRL or ModelExpress is there, and none in its folders.",
            code="CKPT0203",
        )
    for delta in deltas:
        require_checksum_package(delta)
    return deltas


def _check_delta_order(base: OpenCheckpoint, deltas: list[Delta]) -> None:
    """Raise if a delta is not based on the version of the delta before it, or on the recorded version of the base.

    Raises:
        Unsupported: with the two versions.
    """
    program, have, whose = _read_last_applied(base)
    for delta in deltas:
        if delta.program == program and None not in (have, delta.base_version) and have != delta.base_version:
            raise Unsupported(
                f"{delta.where} is {delta.title}, and {whose} is version {have}. {_OTHER}, or the deltas between.",
                code="CKPT0342",
            )
        program, have, whose = delta.program, delta.version, delta.where


def _read_last_applied(base: OpenCheckpoint) -> tuple[str, str | None, str]:
    """Return (program, version, path of the base) of the last delta in the base's ckpttool.json; ("", None, "") if
    none."""
    try:
        text = base.source.read_all(RECORD, MOST_RECORD_BYTES) if base.folder and base.source.exists(RECORD) else b"{}"
        last = parse(text, RECORD)["applied"]["deltas"][-1]
        return str(last["program"]), None if last["version"] is None else str(last["version"]), base.location
    except (CkpttoolError, TypeError, KeyError, IndexError):
        return "", None, ""


# ---------------------------------------------------------------------------------------------------------- the index


def _build_patched(base: OpenCheckpoint, deltas: list[Delta], sources: list[Source]) -> MergedCheckpoint:
    """Build the checkpoint with deltas applied; its weights are computed when they are read.

    Args:
        sources: the files of the deltas, which closing the result closes.

    Raises:
        Unsupported: a change does not fit its weight.
        Corrupt: the SHA-256 of all weights is not the one in the last delta.
    """
    stored = base.checkpoint
    located = base.locate()
    remove_optimizer_notes(base)
    named = _map_delta_names(stored, located, deltas)
    steps: dict[str, list[tuple[Delta, TensorPatch]]] = {}
    for delta in deltas:
        for name, patch in delta.patches.items():
            _refuse_unfit_patch(base, delta, patch, named[name])
            steps.setdefault(name, []).append((delta, patch))
    files, reader = ComputedFiles(located), BoxReader(located, base.source)
    moves, whole = _Moves(), dict[str, TensorEntry]()
    for name, changes in steps.items():
        t = named[name]
        if not t.numel:
            continue
        tensor = _Patched(name, t, reader, changes)
        place = files.add(
            f"{name} (patched)", t.dtype, t.shape, tensor.compute, choose_page_size([t]), ITEMSIZE[t.dtype]
        )
        if len(t.chunks) == 1 and not t.chunks.strides:
            moves.add(t.chunks[0].extent, place.file)
        else:
            whole[name] = replace(t, chunks=Chunks.whole(t.shape, *place))
    tensors, places = dict[str, TensorEntry](), {_make_bytes_key(named[name]): name for name in whole}
    for n, t in ((n, t) for n, t in located.tensors.items() if t.component == "model"):
        of = places.get(_make_bytes_key(t))
        tensors[n] = moves.apply(t) if of is None else replace(t, chunks=whole[of].chunks)
    computed = frozenset(n for n, t in tensors.items() if t is not located.tensors[n])
    most = max((len(changes) for changes in steps.values()), default=0)
    files.working_bytes += reader.working_bytes + base.source.working_bytes + most * WORKING_BYTES
    out = replace(
        located.without_source_facts(),
        files=files.names,
        sizes=files.sizes,
        tensors=tensors,
        values={n: v for n, v in located.values.items() if v.component == "model"},
        notes=[*located.notes, *_describe_patches(base, deltas)],
        derived={"applied": {"deltas": [_make_delta_record(d) for d in deltas]}},
    )
    source = ComputedSource(base.source, files.made, sources, files.working_bytes)
    if deltas[-1].sha256 is not None:
        _check_sha256_of_weights(out, source, deltas[-1], named)
    behind = [Dropped(n, t.nbytes, _LEFT) for n, t in located.tensors.items() if t.component != "model"]
    behind += [Dropped(n, 0, _LEFT) for n, v in located.values.items() if v.component != "model"]
    return MergedCheckpoint.of(
        ((base, computed),),
        out,
        source,
        {n: n for n in tensors if n not in computed},
        behind,
    )


def _check_sha256_of_weights(ckpt: Checkpoint, source: Source, delta: Delta, named: Mapping[str, TensorEntry]) -> None:
    """Compare the SHA-256 in a delta with that of all patched weights, which are read for that, in the order of their
    names.

    It is not compared, which a note says, if the base is not in bf16 or does not have all the weights.

    Args:
        named: the weights, by the names that the delta uses.

    Raises:
        Corrupt: the two differ.
    """
    weights = {n: ckpt.tensors[f"model.{n}"] for n in sorted(named) if f"model.{n}" in ckpt.tensors}
    if len(weights) < len(named) or any(t.dtype != "bfloat16" for t in weights.values()):
        ckpt.notes.append(f"the SHA-256 in {delta.where} is of weights in bf16, and was not compared")
        return
    reader, found = BoxReader(ckpt, source), hashlib.sha256()
    for t in weights.values():
        page = choose_page_size([t])
        for first in range(0, t.numel, page):
            found.update(reader.read_range(t, first, min(first + page, t.numel)).view("u1").data)
    if found.hexdigest() != delta.sha256:
        raise Corrupt(
            f"{delta.where} gives weights with the SHA-256 {found.hexdigest()[:16]}, and it says "
            f"{str(delta.sha256)[:16]}: the base is not the version that it was made from, or one of the two is "
            "damaged.",
            code="CKPT0432",
        )


def _map_delta_names(stored: Checkpoint, located: Checkpoint, deltas: list[Delta]) -> dict[str, TensorEntry]:
    """Return {name: tensor} of the base's weights, under the names that the deltas use.

    These are the names in the base's files, or those that the model has in memory.

    Args:
        stored, located: the index before and after it was located.

    Raises:
        Unsupported: a name in the deltas is among neither.
    """
    indices = [located] if any(t.coding != "raw" for t in stored.tensors.values()) else [stored, located]
    found = [{t.local_name: t for t in c.tensors.values() if t.component == "model"} for c in indices]
    missing = [[(d, n) for d in deltas for n in d.patches if n not in named] for named in found]
    best = min(range(len(found)), key=lambda k: len(missing[k]))
    if missing[best]:
        delta, name = missing[best][0]
        raise Unsupported(
            f"{delta.where} changes {count_noun(len(missing[best]), 'weight')} that {located.root} does not have, "
            f'first "{name}". {_OTHER}; if the names are those of another program, convert the base to hf first.',
            code="CKPT0342",
        )
    return found[best]


def _refuse_unfit_patch(base: OpenCheckpoint, delta: Delta, patch: TensorPatch, t: TensorEntry) -> None:
    """Raise if a change is for a weight of another dtype, shape or size.

    Raises:
        Unsupported: with both.
    """
    wanted = (patch.dtype or t.dtype, patch.shape if patch.shape is not None else t.shape, patch.nbytes or t.nbytes)
    if wanted != (t.dtype, t.shape, t.nbytes):
        raise Unsupported(
            f'{delta.where} changes "{patch.name}" as {wanted[0]} {list(wanted[1])}, and {base.location} has it as '
            f"{t.dtype} {list(t.shape)}. {_OTHER}.",
            code="CKPT0342",
        )


def _make_bytes_key(t: TensorEntry) -> tuple[object, ...]:
    """Return a key that is equal for tensors that are the same bytes: dtype, shape and chunks."""
    return t.dtype, t.shape, tuple(t.chunks[:])


class _Moves:
    """Byte ranges of files that are computed elsewhere, by file and offset."""

    def __init__(self) -> None:
        """Begin without byte ranges; `add` adds them."""
        self._starts: dict[int, list[tuple[int, int, int]]] = {}  # file -> (first byte, end, computed file)

    def add(self, extent: Extent, computed: int) -> None:
        """Add a byte range that is replaced by a computed file.

        Args:
            extent: the range in a file of the base.
            computed: number of the computed file.
        """
        self._starts.setdefault(extent.file, []).append((extent.offset, extent.offset + extent.length, computed))
        self._starts[extent.file].sort()

    def apply(self, t: TensorEntry) -> TensorEntry:
        """Return a tensor with its chunks in such ranges moved to the computed files; the same object if it has none.

        Raises:
            Unsupported: a chunk is only partly in such a range.
        """
        old, moved = t.chunks, False
        out = Chunks(old.ndim)
        for c in old:
            file, offset = c.extent.file, c.extent.offset
            rows = self._starts.get(file, ())
            k = bisect_right(rows, (offset, 1 << 62, 0)) - 1
            if k >= 0 and c.extent.length and offset < rows[k][1]:
                if offset + c.extent.length > rows[k][1]:
                    raise Unsupported(
                        f'"{t.local_name}" shares bytes with a weight that the delta changes.', code="CKPT0342"
                    )
                file, offset, moved = rows[k][2], offset - rows[k][0], True
            out.add(c.start, c.shape, file, offset, c.extent.length, c.strides, c.zstd)
        return replace(t, chunks=out) if moved else t


# ---------------------------------------------------------------------------------------------------------- computing


@dataclass
class _Patched:
    """A weight of the base and its changes, which are applied one after the other, from front to back. A page that is
    not the next one begins at the front again."""

    name: str
    tensor: TensorEntry
    reader: BoxReader
    changes: list[tuple[Delta, TensorPatch]]
    at: int = -1  # elements that were computed; -1 for none of this pass
    streams: tuple[ChangeStream, ...] = ()

    def compute(self, first: int, end: int) -> Array:
        """Compute elements [first, end); if they do not follow the previous ones, changes are applied again from the
        front.

        Raises:
            Corrupt: a change is damaged, or the patched weight does not have the delta's checksum.
        """
        t = self.tensor
        if first != self.at:
            self.at = 0
            self.streams = tuple(open_change_stream(d, p, t.dtype, t.numel) for d, p in self.changes)
            page = choose_page_size([t])
            while self.at < first:
                self._compute_next(min(self.at + page, first))
        return self._compute_next(end)

    def _compute_next(self, end: int) -> Array:
        """Compute the elements from the current position to `end`; at the end of the weight, its checksums are
        compared."""
        x = self.reader.read_range(self.tensor, self.at, end)
        for stream in self.streams:
            stream.apply(x.view("u1"))
        self.at = end
        if end == self.tensor.numel:
            for stream in self.streams:
                stream.finish()
            self.at, self.streams = -1, ()
        return x


# --------------------------------------------------------------------------------------------------------- describing


def _describe_patches(base: OpenCheckpoint, deltas: list[Delta]) -> list[str]:
    """Return notes on the deltas that are applied, and on what no checksum covers."""
    notes = []
    for delta in deltas:
        checked = delta.sha256 or any(p.checksum for p in delta.patches.values())
        proved = "their checksums are compared" if checked else "no checksums"
        notes.append(f"{delta.title}: {count_noun(len(delta.patches), 'weight')} of {base.location} changed; {proved}")
    if any(d.patches and not d.sha256 and not any(p.checksum for p in d.patches.values()) for d in deltas):
        notes.append(
            "the delta has no checksum of a weight: names, dtypes and positions fit, and nothing shows that the base "
            "is the version that it was made from"
        )
    elif not deltas[-1].sha256:
        notes.append(
            "the checksums are of the weights that change: nothing shows that the others are those of that version"
        )
    return notes


def _make_delta_record(delta: Delta) -> dict[str, Any]:
    """Return the entry of ckpttool.json for a delta that was applied."""
    return {
        "program": delta.program,
        "name": os.path.basename(delta.where.rstrip("/")),
        "version": delta.version,
        "base_version": delta.base_version,
        "tensors": len(delta.patches),
        "checksums": sorted({p.checksum[0] for p in delta.patches.values() if p.checksum}),
    }
