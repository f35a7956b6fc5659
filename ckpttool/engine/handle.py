"""Tensors of an open checkpoint, one by one: `opened["model.embed.weight"][2:5, 1:3]`.

A handle knows dtype and shape from the index and reads bytes only when it is indexed. A slice becomes a smaller tensor:
each chunk that meets it is cut to the part that is needed, and `stream.Reader` reads that. Chunks that are zstd frames
cannot be cut; they are decompressed from their beginning to the last row that is needed.

The first read locates the whole checkpoint, which refuses files of ranks that do not belong together.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from ..errors import Unsupported, UsageError, get_named_flags
from ..extras import require_packages
from ..index import boxes
from ..index.check import check_chunk
from ..index.checkpoint import ITEMSIZE, NOT_TORCHS, Checkpoint, Chunk, Chunks, TensorEntry
from ..index.records import Records
from ..printable import printable, quote_path
from ..storage.buffers import IOBudget
from .copy.dtypes import numbers, numpy_dtype
from .copy.stream import Reader, StreamJob
from .discover.unread_files import human

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor  # by a name that no method of TensorHandle has

    from ..layouts import Layout
    from ..storage.source import Source
    from .opening import OpenCheckpoint

__all__ = ["TensorHandle", "UnknownTensor", "cut_chunks", "locate_chunks", "make_handle", "parse_index"]

_Array: TypeAlias = "np.ndarray[Any, Any]"
_Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]
_Box = tuple[tuple[int, ...], tuple[int, ...]]  # start, shape

_FEW = 16  # chunks that are looked at one by one
_LARGE = 8 << 20  # bytes from which two threads and large buffers are worth their set-up
_SUGGEST_AMONG = 20_000  # names that difflib compares; it takes a second for each 100,000


class UnknownTensor(UsageError, KeyError):
    """The checkpoint has no tensor of that name. A KeyError too, as that of a dict."""

    def __str__(self) -> str:
        """Return the message itself; a KeyError would show it in quotes."""
        return printable(str(self.args[0]))


def make_handle(opened: OpenCheckpoint, name: str) -> TensorHandle:
    """Make the handle of a tensor, given by its canonical name.

    Raises:
        UnknownTensor: there is none; the message suggests names that are similar.
    """
    ckpt = opened.checkpoint
    if name in ckpt.tensors:
        return TensorHandle(opened, name)
    if name in ckpt.values:
        raise UnknownTensor(f'"{name}" is a value and not a tensor; read it with checkpoint.value({name!r}).')
    raise UnknownTensor(
        f'"{name}" is not among the {len(ckpt.tensors):,} tensors of {opened.location}.{_suggest_names(opened, name)}'
    )


def _suggest_names(opened: OpenCheckpoint, name: str) -> str:
    """Return the end of an error message: up to three names similar to `name`, or what lists all of them, in Python or
    on the command line."""
    from difflib import get_close_matches

    tensors = opened.checkpoint.tensors
    tail = [n for n in tensors if isinstance(name, str) and n.endswith(f".{name}")]
    if close := tail[:3] or get_close_matches(str(name), list(tensors)[:_SUGGEST_AMONG], 3):
        return f" Did you mean {' or '.join(map(repr, close))}?"
    in_python = get_named_flags() is None
    return f" {'keys()' if in_python else f'`ckpttool inspect {quote_path(opened.location)} --tree`'} lists them."


class TensorHandle:
    """A tensor of an open checkpoint, whose bytes are read when they are asked for.

    Examples:
        >>> with ckpttool.open("runs/step-1000") as ckpt:  # doctest: +SKIP
        ...     embed = ckpt["model.embed.weight"]
        ...     embed.dtype, embed.shape                       # no tensor byte is read
        ...     rows = embed[2:5]                              # reads three rows
        ...     whole = embed.torch()
        ('bfloat16', (128256, 4096))

    Indices are integers, slices and `...`, as in numpy; a result is a numpy array of its own memory. Only chunks that
    meet the index are read, and of these only the part that is needed. With a step, all elements from the first to the
    last are read. Chunks that are compressed are read from their beginning; archives are read frame by frame.

    What is checked: that bytes lie where the index says, inside their files; the CRC32 of every record that a read
    covers completely (files of torch.save, DCP items, ZeRO partitions; a slice covers none as a rule); the checksums of
    the frames of archives; zstd frames that are read to their end. The digests in ckpttool.json are not compared:
    `ckpttool.verify` with `read_data=True` does that.
    """

    def __init__(self, opened: OpenCheckpoint, name: str) -> None:
        """Make the handle of a tensor; no byte of it is read.

        Args:
            opened: the checkpoint, which has to be open when the tensor is read.
            name: the tensor's canonical name.

        Raises:
            KeyError: the checkpoint has no such tensor.
        """
        self._opened = opened
        self._entry = opened.checkpoint.tensors[name]
        #: The canonical name.
        self.name = name

    @property
    def dtype(self) -> str:
        """Get torch's name of the dtype: "bfloat16", "float32", "float8_e4m3fn"."""
        return self._entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Get the shape. Of float4_e2m1fn_x2 an element is a pair of numbers in one byte."""
        return self._entry.shape

    @property
    def ndim(self) -> int:
        """Get the number of dimensions."""
        return len(self._entry.shape)

    @property
    def nbytes(self) -> int:
        """Get the bytes of all elements."""
        return self._entry.nbytes

    def __len__(self) -> int:
        """Return the size of the first dimension.

        Raises:
            TypeError: the tensor has no dimensions.
        """
        if not self.shape:
            raise TypeError(f'"{printable(self.name)}" has no dimensions, so it has no length.')
        return self.shape[0]

    def __repr__(self) -> str:
        """Return a line with name, dtype, shape and size of the tensor; nothing is read."""
        size = human(self.nbytes)
        return f"<{type(self).__name__} {printable(self.name)}: {self.dtype} {list(self.shape)}, {size}>"

    def __iter__(self) -> Iterator[Any]:
        """Yield `self[0]`, `self[1]`, ... along the first dimension, each read from the files only when asked for:
        numpy arrays, or numpy scalars of a tensor with one dimension.

        Raises:
            TypeError: the tensor has no dimensions.
        """
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, index: slice | EllipsisType) -> _Array: ...

    @overload
    def __getitem__(self, index: _Index) -> Any: ...

    def __getitem__(self, index: _Index) -> Any:
        """Read elements as a numpy array, or as a numpy scalar where every dimension has an integer.

        Raises:
            IndexError: the index is outside the tensor, or has too many dimensions.
            TypeError: it is neither an integer nor a slice (a mask, a list, None).
            Corrupt, SourceChanged: bytes are missing, damaged or not those of before.
        """
        start, shape, rest = parse_index(index, self.shape, self.name)
        out = self._make_array(self._read(start, shape), shape)
        return out if not rest else out[rest].copy() if any(map(_has_step, rest)) else out[rest]

    def numpy(self) -> _Array:
        """Read the whole tensor as a numpy array.

        bfloat16, float8 and float4 have the dtypes of ml_dtypes. A pair of float4_e2m1fn_x2 becomes a last dimension of
        two, the number in the lower four bits first.

        Raises:
            Unsupported: neither numpy nor ml_dtypes has the dtype.
            Corrupt, SourceChanged: bytes are missing, damaged or not those of before.
        """
        return self._make_array(self._read((0,) * self.ndim, self.shape), self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> _Array:
        """Read the whole tensor as a numpy array, as `numpy.asarray(handle)` asks for it.

        Args:
            dtype: numpy dtype of the result; None for that which `numpy` returns.
            copy: as numpy passes it; False asks for an array without a copy.

        Raises:
            ValueError: `copy` is False.
            CkpttoolError: what `numpy` raises.
        """
        if copy is False:
            raise ValueError(f'"{printable(self.name)}" is in a file, so that every array of it is a copy.')
        found = self.numpy()
        return found if dtype is None else found.astype(dtype, copy=False)

    def torch(self, index: _Index = ...) -> Tensor:
        """Read the tensor, or the part that `index` selects, as a torch tensor on the CPU. Imports torch.

        Raises:
            MissingPackage: torch is not installed. Otherwise as indexing does.
        """
        require_packages("TensorHandle.torch", "torch")
        import torch

        self._refuse_opaque_dtype()
        start, shape, rest = parse_index(index, self.shape, self.name)
        raw = self._read(start, shape)
        dtype = getattr(torch, self.dtype)
        found = torch.from_numpy(raw).view(dtype) if len(raw) else torch.empty(0, dtype=dtype)
        found = found.reshape(shape)
        if not rest:
            return found
        for d, i in reversed(list(enumerate(rest))):  # torch takes no negative steps
            if isinstance(i, int):
                found = found.select(d, i)
            elif _has_step(i):
                found = found.index_select(d, torch.tensor(range(*i.indices(shape[d]))))
        return found

    # ---------------------------------------------------------------------------------------------------- reading

    def _refuse_opaque_dtype(self) -> None:
        """Refuse a dtype that neither numpy nor torch has.

        Raises:
            Unsupported: the tensor has such a dtype.
        """
        if self.dtype in NOT_TORCHS:
            raise Unsupported(
                f'"{self.name}" is {self.dtype}, numbers of six bits, which neither numpy nor torch has: ckpttool '
                "copies their bytes only.",
                code="CKPT0332",
            )

    def _make_array(self, raw: _Array, shape: tuple[int, ...]) -> _Array:
        """Make a numpy array of this shape from row-major bytes.

        Raises:
            Unsupported: neither numpy nor ml_dtypes has the dtype.
        """
        self._refuse_opaque_dtype()
        if self.dtype == "float4_e2m1fn_x2":
            fours: _Array = numbers(raw, self.dtype).reshape(*shape, 2)
            return fours
        found: _Array = raw.view(numpy_dtype(self.dtype)).reshape(shape)
        return found

    def _read(self, start: tuple[int, ...], shape: tuple[int, ...]) -> _Array:
        """Read the bytes of a box (start, shape) of the tensor, row-major, as a flat array of bytes.

        Raises:
            Corrupt, SourceChanged: bytes are missing, damaged or not those of before.
        """
        import numpy as np

        nbytes = prod(shape) * ITEMSIZE[self.dtype]
        if not nbytes:
            return np.empty(0, "u1")
        files, records, entry = self._locate_box(start, shape)
        budget = IOBudget() if nbytes >= _LARGE else IOBudget(1, 256 << 10)
        reader = Reader(self._opened.source, files, records, budget)
        if entry.chunks.zstd:
            out = np.empty(nbytes, "u1")
            self._read_compressed(reader, entry, (start, shape), out)
            return out
        part = replace(entry, shape=shape, chunks=cut_chunks(entry, (start, shape)))
        return reader.read([StreamJob(self.name, part)])

    def _read_compressed(self, reader: Reader, entry: TensorEntry, box: _Box, out: _Array) -> None:
        """Read a box of a tensor with zstd chunks into `out`.

        Each chunk is decompressed from its beginning until all of the box that lies in it was read.

        Args:
            box: (start, shape).
            out: gets the bytes of the box, row-major.
        """
        import numpy as np

        item = np.dtype(f"V{ITEMSIZE[entry.dtype]}")
        target = out.view(item).reshape(box[1])
        for chunk in entry.chunks:
            needed = boxes.intersect((chunk.start, chunk.shape), box)
            if needed is None:
                continue
            whole = chunk._replace(start=(0,) * len(chunk.shape))
            part = replace(entry, shape=chunk.shape, chunks=Chunks.of(len(chunk.shape), [whole]))
            left = prod(needed[1])
            for block in reader.blocks([StreamJob(self.name, part, boxed=True)]):
                here = tuple(map(operator.add, block.start, chunk.start))
                both = boxes.intersect((here, block.shape), needed)
                if both is not None:
                    slab = np.frombuffer(block.data, item).reshape(block.shape)
                    target[_make_slices(both, box[0])] = slab[_make_slices(both, here)]
                    left -= prod(both[1])
                    del slab
                if not left:
                    break

    def _locate_box(self, start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Sequence[str], Records, TensorEntry]:
        """Find the chunks of the tensor that meet a box (start, shape).

        Returns:
            (files; their records; the tensor with these chunks alone, as raw byte ranges).

        Raises:
            Corrupt: an item is damaged, or files of ranks do not belong together.
        """
        ckpt = self._opened.locate()
        found = ckpt.tensors.get(self.name, self._entry)
        meeting = [c for c in found.chunks if boxes.intersect((c.start, c.shape), (start, shape)) is not None]
        entry = replace(found, chunks=Chunks.of(self.ndim, meeting))
        if entry.coding != "raw":  # an item that turned out to be an object of several entries
            ckpt = locate_chunks(self._opened.layout, ckpt, {self.name: entry}, self._opened.source)
            entry = ckpt.tensors[self.name]
        return ckpt.files, ckpt.records, entry


def locate_chunks(layout: Layout, ckpt: Checkpoint, some: Mapping[str, TensorEntry], source: Source) -> Checkpoint:
    """Let a layout parse the framing of some chunks, and return an index of their tensors only, with the raw byte
    ranges.

    Args:
        some: {canonical name: entry with the chunks that are wanted}.

    Raises:
        Corrupt: an item is damaged, or ends outside its file.
    """
    assert layout.locate is not None  # only such a layout frames its items
    found = layout.locate(replace(ckpt, tensors=dict(some), records=Records()), source)
    for name in some:
        for chunk in found.tensors[name].chunks:
            file = found.files[chunk.extent.file]
            check_chunk(name, found.tensors[name].dtype, chunk, file, source.size(file))
    return found


def cut_chunks(entry: TensorEntry, box: _Box) -> Chunks:
    """Cut the chunks of a tensor to a box (start, shape), and return them with starts relative to that of the box."""
    item = ITEMSIZE[entry.dtype]
    out = Chunks(len(box[1]))
    chunk: Chunk
    for chunk in _select_overlapping_chunks(entry.chunks, box):
        both = boxes.intersect((chunk.start, chunk.shape), box)
        if both is None:
            continue
        start, shape = both
        inside = tuple(map(operator.sub, start, chunk.start))
        steps = chunk.strides or boxes.strides(chunk.shape)
        offset = chunk.extent.offset + sum(map(operator.mul, inside, steps)) * item
        flat = boxes.is_row_major(shape, steps)
        length = (prod(shape) if flat else boxes.span(shape, steps)) * item
        home = tuple(map(operator.sub, start, box[0]))
        out.add(home, shape, chunk.extent.file, offset, length, None if flat else tuple(steps))
    return out


def _select_overlapping_chunks(chunks: Chunks, box: _Box) -> Iterable[Chunk]:
    """Return the chunks that overlap a box (start, shape); of fewer than 16 chunks, all without a check."""
    if len(chunks) < _FEW or not chunks.ndim:
        return chunks
    import numpy as np

    start, size = (np.frombuffer(column, np.int64).reshape(-1, chunks.ndim) for column in (chunks.start, chunks.shape))
    first = np.array(box[0], np.int64)
    meets = ((start < first + np.array(box[1], np.int64)) & (start + size > first)).all(axis=1)
    return [chunks[k] for k in np.flatnonzero(meets).tolist()]


def _make_slices(box: _Box, origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices that select a box (start, shape) in an array whose first element has the index `origin`."""
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(*box, origin, strict=True))


def _has_step(i: int | slice) -> bool:
    """Tell whether an index is a slice with a step other than 1."""
    return isinstance(i, slice) and i.step not in (None, 1)


def parse_index(
    index: _Index, shape: tuple[int, ...], name: str
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int | slice, ...]]:
    """Find the smallest box of a tensor that contains all elements that an index selects.

    Args:
        shape, name: of the tensor.

    Returns:
        (start of the box, its shape, the index that selects the elements in the box); the last is () if it is the
        complete box.

    Raises:
        IndexError: the index is outside the tensor, has too many dimensions, or two "...".
        TypeError: it is neither an integer nor a slice.
    """
    name = printable(name)
    given = index if isinstance(index, tuple) else (index,)
    dots = [k for k, i in enumerate(given) if i is ...]
    if len(dots) > 1:
        raise IndexError("An index can have only one '...'.")
    missing = len(shape) - len(given) + len(dots)
    if missing < 0:
        raise IndexError(f'"{name}" has {len(shape)} dimensions, but {len(given) - len(dots)} were indexed.')
    at = dots[0] if dots else len(given)
    full = (*given[:at], *[slice(None)] * missing, *given[at + len(dots) :])
    starts: list[int] = []
    sizes: list[int] = []
    rest: list[int | slice] = []
    for d, (i, n) in enumerate(zip(full, shape, strict=True)):
        if isinstance(i, slice):
            chosen = range(*i.indices(n))
            first, last = (chosen[0], chosen[-1]) if chosen else (0, -1)
            starts.append(min(first, last) if chosen else 0)
            sizes.append(abs(last - first) + 1 if chosen else 0)
            step = chosen.step if len(chosen) > 1 else 1
            rest.append(slice(None, None, step) if step != 1 else slice(None))
            continue
        try:
            k = operator.index(i)  # type: ignore[arg-type]  # that it may be no integer is what is found out here
        except TypeError:
            k = None
        if k is None or isinstance(i, bool):
            raise TypeError(
                f'"{name}" is indexed with integers, slices and "...", not with {type(i).__name__}. Read it with '
                "numpy() and index the array."
            )
        if not -n <= k < n:
            raise IndexError(f'Index {k} is outside dimension {d} of "{name}", which has {n} elements.')
        starts.append(k % n)
        sizes.append(1)
        rest.append(0)
    return tuple(starts), tuple(sizes), () if all(r == slice(None) for r in rest) else tuple(rest)
