"""One rank reads the index of a checkpoint, and gives it to the others.

    open_alone(path, options) -> OpenCheckpoint       in one process; located, if it is alone
    open_together(path, options) -> OpenCheckpoint    a collective; located
    open_index_together(path, options) -> (OpenCheckpoint, why it must not be loaded)    a collective
    locate_together(opened)                           a collective: every item's framing, each file read by one rank

Detecting the layout, listing folders, parsing pickles and headers, asking transformers in a child process, comparing
files of ranks: all of it is done by the first rank of those to which the path is the same place (same time of the last
change). Ranks whose path leads elsewhere, as to a copy on a node's own disk, have a first rank of their own, and must
find the same state.

What travels is pickled here, made of classes of ours and of plain data. `dcp.load` sends its plans in the same way; no
pickle of a checkpoint gets there. The ranks that did not read the index open only files that are as long and as old as
those which the reading rank had (`Source.expect`).
"""

from __future__ import annotations

import os
import pickle
import warnings
import zlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .. import layouts
from ..engine import opening
from ..errors import CkpttoolError, Corrupt
from ..index.checkpoint import Checkpoint, Chunks, TensorEntry
from ..index.records import Records
from ..printable import printable
from ..storage import urls
from ..storage.source import Source, closed_on_error
from .collectives import broadcast_bytes, gather_objects, get_rank_and_world_size, run_on_all_ranks

__all__ = ["locate_together", "open_alone", "open_index_together", "open_together"]

_COLUMNS = ("start", "shape", "file", "offset", "length")


def open_alone(
    path: str | os.PathLike[str], options: opening.OpenOptions, ignore_recorded_digests: bool = False
) -> opening.OpenCheckpoint:
    """Open a checkpoint in this process alone, which is no collective, and read its recorded digests.

    In a job of one rank, the raw byte ranges of all tensors are found, too; in a larger job `dcp.load` lets its
    coordinator do that (torch_reader.py).

    Args:
        path: path or URL of the checkpoint.
        options: how it is read.
        ignore_recorded_digests: whether to leave tensors uncompared with their recorded digests.

    Raises:
        CkpttoolError: it cannot be opened, or must not be loaded.
    """
    opened = _raise_problem(*_open_and_check(path, options, ignore_recorded_digests))
    with closed_on_error([opened.source]):
        if get_rank_and_world_size()[1] == 1:
            opened.locate()
    return opened


def _open_and_check(
    path: str | os.PathLike[str], options: opening.OpenOptions, ignore_recorded_digests: bool
) -> tuple[opening.OpenCheckpoint, CkpttoolError | None]:
    """Open a checkpoint and read its recorded digests.

    Args:
        path: path or URL of the checkpoint.
        options: how it is read.
        ignore_recorded_digests: whether to leave tensors uncompared with their recorded digests.

    Returns:
        (the open checkpoint, the error that forbids to load it; None if it may be loaded).

    Raises:
        CkpttoolError: it cannot be opened.
    """
    opened = opening.open_checkpoint(path, options)
    try:
        if not has_unparsed_items(opened.checkpoint):
            opened.locate()  # such a layout finds the names there, and has nothing to parse
        before = len(opened.checkpoint.notes)
        opened.expect_recorded(ignore_recorded_digests)
        if not ignore_recorded_digests:
            for text in opened.checkpoint.notes[before:]:
                warnings.warn(printable(f"{os.fspath(path)}: {text}"), stacklevel=2)
    except CkpttoolError as e:
        return opened, e
    except BaseException:
        opened.source.close()
        raise
    return opened, None


def _raise_problem(opened: opening.OpenCheckpoint, problem: CkpttoolError | None) -> opening.OpenCheckpoint:
    """Raise the error that forbids to load a checkpoint, after closing the checkpoint; without an error, return the
    checkpoint.

    Args:
        opened: the open checkpoint.
        problem: the error; None if the checkpoint may be loaded.

    Raises:
        CkpttoolError: the error.
    """
    if problem is not None:
        opened.source.close()
        raise problem
    return opened


def has_unparsed_items(ckpt: Checkpoint) -> bool:
    """Tell whether some tensors lie inside items (such as files of torch.save) that were not parsed, so that their raw
    byte ranges are not known."""
    return any(t.coding != "raw" for t in ckpt.tensors.values())


def locate_tensors(opened: opening.OpenCheckpoint, some: dict[str, TensorEntry]) -> Checkpoint:
    """Parse the items (such as files of torch.save) that contain some tensors, and return an index of these tensors
    only, with their raw byte ranges. These ranges are not checked.

    Args:
        opened: the open checkpoint, whose layout has such items.
        some: {canonical name: its entry, with only the chunks that are wanted}.

    Raises:
        Corrupt: an item is damaged.
    """
    assert opened.layout.locate is not None  # only such a layout frames its items
    return opened.layout.locate(replace(opened.checkpoint, tensors=some, records=Records()), opened.source)


# -------------------------------------------------------------------------------------------------------- the index


@dataclass
class _Shared:
    """What the reading rank gives to another."""

    checkpoint: Checkpoint  # without tensors
    opened: dict[str, Any]  # the other fields of OpenCheckpoint
    layout: str
    tensors: bytes
    identities: dict[str, tuple[int, int, int, int, int]]
    problem: tuple[type[CkpttoolError], str] | None


def open_together(
    path: str | os.PathLike[str], options: opening.OpenOptions, ignore_recorded_digests: bool = False
) -> opening.OpenCheckpoint:
    """Open a checkpoint on all ranks, ready to be read from. A collective, which every rank has to call.

    Of the ranks that see the same folder or file under the path, one reads the index for all.

    Args:
        path: path of the checkpoint.
        options: how it is read.
        ignore_recorded_digests: tensors will not be compared with their recorded digests.

    Raises:
        CkpttoolError: on all ranks, if one of them cannot open it, or if files of ranks do not belong together.
        Corrupt: two ranks see different checkpoints.
    """
    opened = _raise_problem(*open_index_together(path, options, ignore_recorded_digests))
    with closed_on_error([opened.source]):
        locate_together(opened)
    return opened


def open_index_together(
    path: str | os.PathLike[str], options: opening.OpenOptions, ignore_recorded_digests: bool = False
) -> tuple[opening.OpenCheckpoint, CkpttoolError | None]:
    """Open a checkpoint on all ranks without parsing its items. A collective, which every rank has to call.

    Return (the open checkpoint, the error that forbids to load it or None).

    Args:
        path: path of the checkpoint.
        options: how it is read.
        ignore_recorded_digests: tensors will not be compared with their recorded digests.

    Raises:
        CkpttoolError: on all ranks, if one of them cannot open it.
        Corrupt: two ranks see different checkpoints.
    """
    rank, world = get_rank_and_world_size()
    if world == 1:
        return _open_and_check(path, options, ignore_recorded_digests)
    places = gather_objects(_identify_place(path))
    first = places.index(places[rank])
    out: opening.OpenCheckpoint | None = None
    problem: CkpttoolError | None = None
    packed = b""

    def read() -> None:
        """Open the checkpoint and pack it for the others, if this is the first of the ranks that see this place."""
        nonlocal out, problem, packed
        if rank == first:
            out, problem = _open_and_check(path, options, ignore_recorded_digests)
            packed = _pack_opened(out, problem)

    def follow() -> None:
        """Open what the first rank has sent, on the others."""
        nonlocal out, problem
        if out is None:
            out, problem = _unpack_opened(path, packed)

    try:
        run_on_all_ranks(read)
        for leader in sorted({places.index(p) for p in places}):
            sent = broadcast_bytes(packed if rank == leader else None, leader)
            packed = sent if leader == first else packed
        run_on_all_ranks(follow)
        assert out is not None
        _refuse_different_states(path, gather_objects(_compute_state_digests(out.checkpoint)))
    except BaseException:
        if out is not None:
            out.source.close()
        raise
    problems = gather_objects(None if problem is None else (type(problem), str(problem)))
    return out, next((kind(text) for kind, text in filter(None, problems)), None)


def _identify_place(path: str | os.PathLike[str]) -> tuple[object, ...]:
    """Return a tuple that is equal on two ranks if both see the same folder or file under a path.

    The tuple is (URL,) for a URL, (real path, time of its last change in ns) for a local path, and (path, errno) for a
    local path that cannot be accessed.
    """
    text = os.fspath(path)
    if urls.is_url(text):
        return (text,)
    try:
        found = os.stat(text)
    except OSError as e:
        return (text, e.errno)
    return os.path.realpath(text), found.st_mtime_ns


def _pack_opened(opened: opening.OpenCheckpoint, problem: CkpttoolError | None) -> bytes:
    """Return an open checkpoint as compressed bytes, for `_unpack_opened` on another rank.

    Args:
        opened: what this rank has read.
        problem: the error that forbids to load it, or None.
    """
    ckpt = opened.checkpoint
    fields = {
        "folder": opened.folder,
        "located": opened.located,
        "selection": opened.selection,
        "allow_equal_ranks": opened.allow_equal_ranks,
        "allow_mixed_steps": opened.allow_mixed_steps,
        "left_behind": opened.left_behind,
        "_record": opened._record,
    }
    why = None if problem is None else (type(problem), str(problem))
    index = replace(ckpt, tensors={})
    shared = _Shared(index, fields, opened.layout.name, _pack_entries(ckpt.tensors), opened.source.identities(), why)
    return zlib.compress(pickle.dumps(shared, protocol=5), 1)


def _unpack_opened(path: str | os.PathLike[str], packed: bytes) -> tuple[opening.OpenCheckpoint, CkpttoolError | None]:
    """Open a checkpoint from what another rank has packed. Return (the open checkpoint, the error that forbids to load
    it or None).

    Args:
        path: path of the checkpoint on this machine.
        packed: what `_pack_opened` returned.

    Raises:
        SourceChanged: a file here differs from the one that the other rank had.
        CkpttoolError: it cannot be opened here.
    """
    shared: _Shared = pickle.loads(zlib.decompress(packed))
    layout = layouts.find(shared.layout)
    source: Source = layouts.place(path).source
    try:
        source = layout.mount(layouts.place(path)).source
        source.expect(shared.identities)
    except BaseException:
        source.close()
        raise
    index = replace(shared.checkpoint, tensors=dict(_unpack_entries(shared.tensors)))
    out = opening.OpenCheckpoint(source=source, layout=layout, checkpoint=index, **shared.opened)
    return out, None if shared.problem is None else shared.problem[0](shared.problem[1])


def _pack_entries(tensors: Mapping[str, TensorEntry]) -> bytes:
    """Return the entries {canonical name: entry} as bytes, pickled as few objects: the numbers of all chunks are in
    five columns."""
    rows: list[tuple[object, ...]] = []
    columns = {k: array("q") for k in _COLUMNS}
    for name, t in tensors.items():
        c = t.chunks
        rows.append((name, t.dtype, t.shape, t.path, t.coding, t.wrapper, len(c), c.strides or None, c.zstd or None))
        for k, column in columns.items():
            column.extend(getattr(c, k))
    return pickle.dumps((rows, columns), protocol=5)


def _unpack_entries(packed: bytes) -> Iterable[tuple[str, TensorEntry]]:
    """Yield (canonical name, entry) of what `_pack_entries` returned."""
    rows, columns = pickle.loads(packed)
    row = cell = 0
    for name, dtype, shape, path, coding, wrapper, n, strides, zstd in rows:
        chunks = Chunks(len(shape))
        cells = n * len(shape)
        chunks.start, chunks.shape = columns["start"][cell : cell + cells], columns["shape"][cell : cell + cells]
        chunks.file, chunks.offset, chunks.length = (columns[k][row : row + n] for k in _COLUMNS[2:])
        chunks.strides, chunks.zstd = strides or chunks.strides, zstd or chunks.zstd
        row, cell = row + n, cell + cells
        yield name, TensorEntry(dtype, shape, path, chunks, coding, wrapper)


def _compute_state_digests(ckpt: Checkpoint) -> tuple[str, ...]:
    """Return (digest of the tensors' names, dtypes and shapes; digest of the names and simple values), which are equal
    for two copies of one checkpoint."""
    from blake3 import blake3

    tensors = [(n, t.dtype, t.shape) for n, t in ckpt.tensors.items()]
    values = [(n, v.data) for n, v in ckpt.values.items() if v.data is None or isinstance(v.data, (int, float, str))]
    return tuple(blake3(repr(sorted(rows)).encode("utf-8", "surrogatepass")).hexdigest() for rows in (tensors, values))


def _refuse_different_states(path: str | os.PathLike[str], found: list[tuple[str, ...]]) -> None:
    """Check that all ranks see one checkpoint.

    Args:
        path: of the checkpoint, for the message.
        found: what `_compute_state_digests` returned on each rank, in the order of ranks.

    Raises:
        Corrupt: two ranks see different ones.
    """
    for rank, states in enumerate(found):
        for what, mine, its in zip(("tensors", "values"), found[0], states, strict=True):
            if mine != its:
                raise Corrupt(
                    f"rank {rank} sees another checkpoint under {os.fspath(path)} than rank 0: its {what} are others. "
                    "Let all ranks see one folder, or copies of it.",
                    code="CKPT0422",
                )


# ------------------------------------------------------------------------------------------------------- the framing


@dataclass
class _LocatedPart:
    """What one rank found out about the chunks in its files, in the order of the index: columns, and the rare rest by
    row."""

    offset: array[int] = field(default_factory=lambda: array("q"))
    length: array[int] = field(default_factory=lambda: array("q"))
    strides: dict[int, tuple[int, ...]] = field(default_factory=dict)
    zstd: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    wrappers: dict[str, str] = field(default_factory=dict)
    records: array[int] = field(default_factory=lambda: array("q"))  # file, offset, length, CRC32 of each

    @classmethod
    def of(cls, found: Checkpoint) -> _LocatedPart:
        """Collect the raw byte ranges and CRC32s from an index of the chunks in one rank's files."""
        out = cls()
        for name, t in found.tensors.items():
            first = len(out.offset)
            out.strides.update((first + k, s) for k, s in t.chunks.strides.items())
            out.zstd.update((first + k, z) for k, z in t.chunks.zstd.items())
            out.offset.extend(t.chunks.offset)
            out.length.extend(t.chunks.length)
            if t.wrapper:
                out.wrappers[name] = t.wrapper
        for r in found.records:
            out.records.extend((*r.extent, r.crc32))
        return out


def locate_together(opened: opening.OpenCheckpoint) -> None:
    """Find the raw byte ranges of all tensors, for every rank; each file is parsed by one rank. A collective, which
    every rank has to call.

    Rank 0 checks all chunks, against each other and for files of ranks that do not belong together.

    Raises:
        CkpttoolError: on all ranks, if one of them finds a damaged item, or the checks fail.
    """
    rank, world = get_rank_and_world_size()
    ckpt = opened.checkpoint
    if opened.located or world == 1 or not has_unparsed_items(ckpt):
        run_on_all_ranks(opened.locate)
        return
    mine = _select_chunks_of_rank(ckpt.tensors, rank, world)
    found = run_on_all_ranks(lambda: locate_tensors(opened, mine))  # the items in the files that fall to this rank
    odd = found.tensors.keys() != mine.keys() or found.values != ckpt.values
    if any(gather_objects(odd)):  # an item turned out to be an object that is several entries
        run_on_all_ranks(opened.locate)
        return
    packed = zlib.compress(pickle.dumps(_LocatedPart.of(found), protocol=5), 1)
    opened.checkpoint = _merge_located_parts(ckpt, [pickle.loads(zlib.decompress(p)) for p in gather_objects(packed)])
    run_on_all_ranks(lambda: opened.locate() if rank == 0 else None)  # rank 0 checks the whole index
    opened.located = True


def _select_chunks_of_rank(tensors: Mapping[str, TensorEntry], rank: int, world: int) -> dict[str, TensorEntry]:
    """Return {canonical name: entry} with only those chunks that lie in the files that a rank parses: file number n
    is parsed by rank n % world."""
    out: dict[str, TensorEntry] = {}
    for name, t in tensors.items():
        rows = [k for k, file in enumerate(t.chunks.file) if file % world == rank]
        if len(rows) == len(t.chunks.file) and rows:
            out[name] = t
        elif rows:
            out[name] = replace(t, chunks=Chunks.of(t.chunks.ndim, (t.chunks[k] for k in rows)))
    return out


def _merge_located_parts(ckpt: Checkpoint, parts: list[_LocatedPart]) -> Checkpoint:
    """Return the complete index, with the raw byte ranges that all ranks found in their files.

    Args:
        ckpt: the index without raw byte ranges.
        parts: what each rank found in its files, in the order of ranks.
    """
    import numpy as np

    owner = np.concatenate([np.frombuffer(t.chunks.file, "i8") for t in ckpt.tensors.values()]) % len(parts)
    offset, length = np.empty(len(owner), "i8"), np.empty(len(owner), "i8")
    strides: dict[int, tuple[int, ...]] = {}
    zstd: dict[int, tuple[int, int | None]] = {}
    wrappers: dict[str, str] = {}
    records = Records(ckpt.records)
    for rank, part in enumerate(parts):
        rows = np.flatnonzero(owner == rank)
        offset[rows], length[rows] = part.offset, part.length
        strides.update((int(rows[k]), s) for k, s in part.strides.items())
        zstd.update((int(rows[k]), z) for k, z in part.zstd.items())
        wrappers.update(part.wrappers)
        numbers = iter(part.records)
        for row in zip(*[numbers] * 4, strict=True):
            records.add(*row)
    tensors: dict[str, TensorEntry] = {}
    first = 0
    for name, t in ckpt.tensors.items():
        old, chunks = t.chunks, Chunks(t.chunks.ndim)
        end = first + len(old)
        chunks.start, chunks.shape, chunks.file = old.start, old.shape, old.file
        chunks.offset, chunks.length = array("q", offset[first:end].tobytes()), array("q", length[first:end].tobytes())
        if strides:
            chunks.strides = {k - first: strides[k] for k in range(first, end) if k in strides}
        if zstd:
            chunks.zstd = {k - first: zstd[k] for k in range(first, end) if k in zstd}
        tensors[name] = replace(t, chunks=chunks, coding="raw", wrapper=wrappers.get(name, t.wrapper))
        first = end
    return replace(ckpt, tensors=tensors, records=records)
