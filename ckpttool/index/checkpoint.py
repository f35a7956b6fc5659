"""The index: what a checkpoint is, with no bytes in it.

    Checkpoint(layout, root, world_size, files, tensors, values, ...)
        tensors  "model.lm_head.weight" -> TensorEntry("bfloat16", (131, 36), path, chunks)
        values   "trainer.step"         -> Value(path, 3)
    Chunks       columns: start, shape, file, offset, length; row k is Chunk k
    Chunk        a box of one tensor, row-major, at one byte range of one file

Names are the elements of `path` joined by dots; `path` keeps what the joining loses (FQNs contain dots), so that a
tree can be built again: str elements are keys of dicts, int elements are positions in lists.

A checkpoint of a 70B model at 512 ranks has more than a million chunks, so they live in columns of machine integers
(72 bytes a chunk for a matrix) and are checked by whole columns; a `Chunk` is made when one is looked at.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan, prod
from typing import Any, NamedTuple, TypeVar, overload

from ..by_fields import ByFields
from ..errors import Corrupt, UsageError
from ..printable import count_noun
from .paths import HasPath, Number, Path, joined, keep_extra_state_trees
from .records import Extent, Records
from .trainer_trees import fuses_parameters

__all__ = [
    "FLOATING",
    "ITEMSIZE",
    "NOT_TORCHS",
    "PACKED",
    "Checkpoint",
    "Chunk",
    "Chunks",
    "DivergedNote",
    "Leaves",
    "MixupNote",
    "Number",
    "OtherCopy",
    "Path",
    "Replica",
    "Salvage",
    "TensorEntry",
    "Unread",
    "Value",
    "find_orphaned_optimizer_state",
    "find_unnamed_optimizer_state",
    "joined",
    "make_per_rank_path",
    "parse_floating_dtype",
    "same_bytes",
    "same_value",
    "tied_weights",
    "with_one_nan",
]

T = TypeVar("T")

#: Bytes of one element, by torch's name of the dtype (torch/headeronly/core/ScalarType.h); those of six bits are
#: safetensors' alone.
ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "f6_e2m3_x4": 3,
    "f6_e3m2_x4": 3,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
}

#: {path in a state dict: TensorEntry, Composite or plain data}.
Leaves = dict[Path, Any]

#: Dtypes of plain weights; others are of codes, or of no fractions.
FLOATING = frozenset(("float64", "float32", "float16", "bfloat16"))
#: How many numbers one element holds, where it holds several.
PACKED: dict[str, int] = {"float4_e2m1fn_x2": 2, "f6_e2m3_x4": 4, "f6_e3m2_x4": 4}
#: Dtypes that torch does not have: only files of safetensors, and archives, hold them.
NOT_TORCHS = frozenset(("f6_e2m3_x4", "f6_e3m2_x4"))

#: No tensor has more elements than this, so that products of sizes stay inside 64 bits.
MAX_NUMEL = 1 << 56

_SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "half": "float16",
    "float": "float32",
}


def parse_floating_dtype(name: str) -> str:
    """Return torch's name of a floating-point dtype that was given as "bf16", "torch.bfloat16" or "bfloat16".

    Raises:
        UsageError: torch has no floating-point dtype of that name, or it is one of four bits.
    """
    full = _SHORT.get(name, name.removeprefix("torch."))
    if full not in ITEMSIZE or "float" not in full or full.startswith("float4"):
        raise UsageError(
            f"Cannot cast to {name!r}: it is not a floating-point dtype of torch. Use bf16, fp16, fp32 or fp64.",
            code="CKPT0203",
        )
    return full


class MixupNote(str):
    """A note that a file of a rank is a copy of another rank's, or exchanged with it: no job resumes from that."""

    __slots__ = ()


class DivergedNote(str):
    """A note that ranks have other numbers under the names of the same weights or optimizer state: no conversion takes
    that unasked."""

    __slots__ = ()


def make_per_rank_path(rank: int | str, path: Path) -> Path:
    """Return the path, below the component "extra", of a value that one rank has for itself: ("per_rank", rank, *path).

    Positions in lists become text keys: a list of which only some elements differ between ranks would have holes, and
    torch cannot load such a list.
    """
    return ("per_rank", str(rank), *(str(p) if type(p) is int else p for p in path))


class Chunk(NamedTuple):
    """A box of one tensor, stored row-major at one byte range.

    `strides` (elements) is None for row-major; else element (i, j, ..) of the box is at offset + itemsize * (i*s0 +
    j*s1 + ..). `zstd` is None, or the extent is one zstd frame: (byte of its content where the box starts, CRC32).
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    extent: Extent
    strides: tuple[int, ...] | None = None
    zstd: tuple[int, int | None] | None = None


_NO_STRIDES: dict[int, tuple[int, ...]] = {}  # shared by all that have none, never written to
_NO_ZSTD: dict[int, tuple[int, int | None]] = {}


class Chunks(Sequence[Chunk]):
    """Chunks of one tensor of `ndim` dimensions, in columns of int64."""

    __slots__ = ("file", "length", "ndim", "offset", "shape", "start", "strides", "zstd")

    def __init__(self, ndim: int) -> None:
        """Make an empty list of chunks of a tensor of `ndim` dimensions."""
        self.ndim = ndim
        self.start, self.shape = array("q"), array("q")  # ndim numbers a row
        self.file, self.offset, self.length = array("q"), array("q"), array("q")
        self.strides: dict[int, tuple[int, ...]] = _NO_STRIDES  # the rare row that is not row-major
        self.zstd: dict[int, tuple[int, int | None]] = _NO_ZSTD  # the rare row that is compressed

    @classmethod
    def of(cls, ndim: int, rows: Iterable[Chunk]) -> Chunks:
        """Make the columns from single chunks of a tensor of `ndim` dimensions.

        Raises:
            Corrupt: a chunk has another number of dimensions.
        """
        out = cls(ndim)
        for c in rows:
            out.add(c.start, c.shape, *c.extent, strides=c.strides, zstd=c.zstd)
        return out

    @classmethod
    def whole(
        cls, shape: Sequence[int], file: int, offset: int, length: int, strides: tuple[int, ...] | None = None
    ) -> Chunks:
        """Make the columns of one chunk that is the whole tensor.

        Args:
            shape: shape of the tensor.
            file: number of the file in the checkpoint's list of files.
            offset, length: where the chunk begins in that file, and its size, in bytes.
            strides: in elements; None for row-major.
        """
        out = cls(len(shape))
        out.add((0,) * len(shape), shape, file, offset, length, strides)
        return out

    def moved(self, by: int) -> Chunks:
        """Return the same chunks with their file numbers increased by `by`, for a list of files with `by` more files
        at its front."""
        if not by:
            return self
        out = Chunks(self.ndim)
        out.start, out.shape, out.offset, out.length = self.start, self.shape, self.offset, self.length
        out.strides, out.zstd = self.strides, self.zstd
        out.file = array("q", (f + by for f in self.file))
        return out

    def add(
        self,
        start: Sequence[int],
        shape: Sequence[int],
        file: int,
        offset: int,
        length: int,
        strides: tuple[int, ...] | None = None,
        zstd: tuple[int, int | None] | None = None,
    ) -> None:
        """Append a chunk, as a row of the columns.

        Args:
            start, shape: its box.
            file: number of the file in the checkpoint's list of files.
            offset, length: its bytes in that file.
            strides: in elements; None for row-major.
            zstd: None, or, where the bytes are one zstd frame, (byte of its content where the box starts, CRC32 or
                None).

        Raises:
            Corrupt: it has another number of dimensions than the tensor, or numbers beyond 64 bits.
        """
        if len(start) != self.ndim or len(shape) != self.ndim:
            raise Corrupt(
                f"a chunk has {len(start)} offsets and {len(shape)} sizes, the tensor {self.ndim} dimensions.",
                code="CKPT0406",
            )
        if zstd is not None:
            self.zstd = {**self.zstd, len(self.file): zstd}
        if strides is not None:
            self.strides = {**self.strides, len(self.file): strides}
        try:
            self.start.extend(start)
            self.shape.extend(shape)
        except OverflowError:
            raise Corrupt(
                f"A chunk of a tensor begins at {list(start)[:8]} and has the shape {list(shape)[:8]}, which no tensor "
                "reaches.",
                code="CKPT0406",
            ) from None
        self.file.append(file)
        self.offset.append(offset)
        self.length.append(length)

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.file)

    def __getitem__(self, k: int | slice) -> Any:
        """Return the chunk in row number `k` as a `Chunk`; a list of them if `k` is a slice."""
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(len(self)))]
        k = range(len(self))[k]
        a, b = k * self.ndim, (k + 1) * self.ndim
        extent = Extent(self.file[k], self.offset[k], self.length[k])
        return Chunk(tuple(self.start[a:b]), tuple(self.shape[a:b]), extent, self.strides.get(k), self.zstd.get(k))

    def __iter__(self) -> Iterator[Chunk]:
        """Yield every row as a `Chunk`, in the order in which they were added."""
        for k in range(len(self)):
            yield self[k]

    def shape_of(self, row: int) -> tuple[int, ...]:
        """Return the shape of the chunk in row number `row`."""
        return tuple(self.shape[row * self.ndim : (row + 1) * self.ndim])

    def boxes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return (start, shape) of every chunk, in the order of the rows."""
        n = self.ndim
        if n == 0:
            return [((), ())] * len(self)
        starts, shapes = iter(self.start), iter(self.shape)
        return list(zip(zip(*[starts] * n, strict=True), zip(*[shapes] * n, strict=True), strict=True))

    def rows_in_order(self) -> list[int] | None:
        """Return the row numbers of all non-empty chunks, sorted by their start along dimension 0.

        None where the chunks are not ranges of dimension 0: where some do not begin at 0 along another dimension, or
        differ in length there. For a tensor without dimensions, all rows are returned.
        """
        n = self.ndim
        if n == 0 or not len(self):
            return list(range(len(self)))
        if len(self.file) == 1:
            return None if any(self.start[1:]) else [0] if self.shape[0] else []
        for d in range(1, n):
            column = self.shape[d::n]
            if any(self.start[d::n]) or column.count(column[0]) != len(column):
                return None
        first, size = self.start[0::n], self.shape[0::n]
        return sorted((k for k in range(len(self)) if size[k]), key=first.__getitem__)


@dataclass(frozen=True, slots=True)
class TensorEntry(HasPath):
    """A logical tensor and where its chunks are.

    `coding` says what an extent holds: "raw" the bytes of the chunk; "torch.save" a zip around them, and
    "torch.save+zstd" that zip in one zstd frame, as DCP items are until `locate` has looked inside. `wrapper` is the
    class of the object that held the tensor, where that only accompanies a dense weight through training.
    """

    dtype: str
    shape: tuple[int, ...]
    path: Path
    chunks: Chunks
    coding: str = "raw"
    wrapper: str = ""

    @property
    def numel(self) -> int:
        """Count the elements; 1 for a 0-dim tensor."""
        return prod(self.shape)

    @property
    def numbers(self) -> int:
        """Count the numbers: `numel`, or a multiple of it for a packed dtype, whose elements hold several numbers
        each."""
        return self.numel * PACKED.get(self.dtype, 1)

    @property
    def nbytes(self) -> int:
        """Count the bytes of the elements."""
        return prod(self.shape) * ITEMSIZE[self.dtype]


class _PathAndData(NamedTuple):
    path: Path
    data: Any


class Value(_PathAndData, HasPath):
    """Plain data at a path of the state dict: a number, string, None, list, `pickles.Opaque`, ..."""

    __slots__ = ()


class Unread(NamedTuple):
    """A file next to a checkpoint that its layout does not read, or a folder of such files ("optimizer_0/").

    `name` is relative, `bytes` None if unknown; `what` it contains, judging by its name; `component` that a resume
    would lack, or ""; `damaged` whether the layout does read such a file, and this one is damaged or of another rank.
    """

    name: str
    bytes: int | None
    what: str
    component: str
    damaged: bool = False

    def to_json(self) -> dict[str, object]:
        """Return plain data: {"name", "bytes", "what", "component", "damaged"}."""
        return self._asdict()


class OtherCopy(NamedTuple):
    """What another rank has under the name of an entry of which one rank's is in the index, where the two differ.

    `nbytes` is 0 if it is a value, or a sharded tensor of which it is a part.
    """

    name: str
    rank: int
    nbytes: int


class Replica(NamedTuple):
    """A copy that a rank has of a tensor, or of a part of it, and that must equal the one in the index: `name` is the
    tensor, `kept` what is in the index, `copy` what the rank has."""

    name: str
    rank: int
    kept: TensorEntry
    copy: TensorEntry


@dataclass(eq=False, repr=False)
class Salvage(ByFields):
    """What is left of a damaged checkpoint. Every entry of it that is neither missing nor rebuilt is exact.

    `problems`  sentences about its files
    `missing`   {tensor, value or prefix of names ("optim") that was lost: why}, by canonical name
    `rebuilt`   {entry that is not what was saved, but the best that is left of it, or from another checkpoint: how}
    """

    problems: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    rebuilt: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_states(cls, states: Mapping[str, str]) -> Salvage:
        """Make a salvage record without problems from what `Salvage.states` returned: {name: "exact", "rebuilt: how"
        or "missing: why"}."""
        of: dict[str, dict[str, str]] = {"exact": {}, "missing": {}, "rebuilt": {}}
        for name, state in states.items():
            kind, _, why = state.partition(": ")
            of.setdefault(kind, {})[name] = why
        return cls([], of["missing"], of["rebuilt"])

    def states(self, tensors: Iterable[str], values: Iterable[str] = ()) -> dict[str, str]:
        """Return {canonical name: "exact", "rebuilt: how" or "missing: why"} of the entries of a damaged checkpoint.
        Lost entries (`missing`) are always among them.

        Args:
            tensors: canonical names of the tensors that were read.
            values: canonical names of values, of which only the rebuilt ones are listed.
        """
        names = [*tensors, *(n for n in values if n in self.rebuilt)]
        out = {n: f"rebuilt: {self.rebuilt[n]}" if n in self.rebuilt else "exact" for n in names}
        return out | {n: f"missing: {why}" for n, why in self.missing.items()}


@dataclass(eq=False, repr=False)
class Checkpoint(ByFields):
    """A checkpoint as an index, without bytes of tensors.

    `origin` maps prefixes of canonical paths to those of the source if they differ, {("trainer", "step"): ("step",)},
    so that a destination that stores trees can restore the user's own keys. `notes` are sentences about what was
    assumed on reading; the command line prints them.
    """

    layout: str
    root: str
    world_size: int | None
    files: list[str]
    sizes: list[int]
    tensors: dict[str, TensorEntry]
    values: dict[str, Value]
    records: Records = field(default_factory=Records)
    origin: dict[Path, Path] = field(default_factory=dict)
    trainer: str | None = None
    config: dict[str, Any] | None = None  # the config.json of the model, if there is one next to the weights
    ranks: dict[int, int] = field(default_factory=dict)  # {file: rank} of files that one rank wrote for itself
    #: Ranks divide all tensors among their files, so a file may hold whole tensors, and the steps of some parameters.
    #: If False, every rank's file holds its own part of each tensor.
    spreads_tensors: bool = False
    #: {file: bytes behind the last item that the index names}: the file is not the one that the index was written for,
    #: or not its whole content
    tails: dict[int, int] = field(default_factory=dict)
    recorded: dict[str, str] = field(default_factory=dict)  # {tensor: digest} stored in the checkpoint itself
    recorded_values: dict[str, str] = field(default_factory=dict)  # {value: digest} likewise
    notes: list[str] = field(default_factory=list)
    others: list[OtherCopy] = field(default_factory=list)  # what other ranks have where one rank's is kept
    replicas: list[Replica] = field(default_factory=list)  # copies that were not compared yet
    unread: list[Unread] = field(default_factory=list)  # files that belong to it but that its layout does not read
    ignored_digests: bool = False  # there were digests, but the user disabled the comparison
    merged: dict[str, object] | None = (
        None  # the adapter that was merged into it: {"adapter", "names", "scaling": {module: factor}}
    )
    derived: dict[str, Any] | None = (
        None  # how its weights were chosen or computed, for ckpttool.json: {"weights": ...}
    )
    dequantized: dict[str, str] = field(default_factory=dict)  # {weight: the codes that it is computed from}
    #: the weights that were quantised: {"scheme", "config": their quantization_config, "files": {computed file of
    #: codes: weight}, "more_to_read": bytes that are read besides those that are computed}
    quantized: dict[str, Any] | None = None
    salvage: Salvage | None = None  # of what is left of a damaged checkpoint, or of a copy of what was left
    #: {name of a weight: what the model computes with}, where `tensors` has the fp32 master as the weight; nothing
    #: carries it
    rounded: dict[str, TensorEntry] = field(default_factory=dict)
    #: masters in float32 whose numbers are int16 remainders of bf16 weights, as Megatron-Core gathers them
    numeric_remainders: frozenset[str] = frozenset()
    #: the parameters as the optimizer of the source numbers them, where that is known though `origin` does not say so
    numbered: tuple[str, ...] = ()
    #: how tensor-parallel ranks of the source cut each parameter, in the words of its layout; None where they did not,
    #: or the tensors themselves show it
    tensor_parallel: dict[str, Any] | None = None
    #: the layers and stages of a pipeline, as its layout keeps them; None where the source is not one
    pipeline: Any = None
    #: {path below extra.args: data}: the arguments of the job, where they were left out of `values` with their
    #: component
    left_arguments: dict[Path, object] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return a short text for people: the layout, the root, the number of tensors and their bytes."""
        return (
            f"<{type(self).__name__} {self.layout} {self.root}: {count_noun(len(self.tensors), 'tensor')}, "
            f"{self.nbytes:,} bytes>"
        )

    @property
    def has_masters(self) -> bool:
        """Whether the checkpoint holds fp32 master copies of weights."""
        return bool(self.rounded) or any(t.path[:2] == ("extra", "master") for t in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Count the bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    def component(self, name: str) -> str:
        """Return the component ("model", "optim", "scheduler", ...) of the entry with this canonical name.

        Raises:
            KeyError: no entry has this name.
        """
        return (self.tensors.get(name) or self.values[name]).component

    @overload
    def value(self, name: str) -> Any: ...

    @overload
    def value(self, name: str, kind: type[T]) -> T | None: ...

    def value(self, name: str, kind: type[object] = object) -> Any:
        """Return the data of the value with this canonical name; None if there is no such value.

        Args:
            name: the canonical name, such as "trainer.step".
            kind: the type that the data must have, for type checkers: `value("trainer.step", int)`.

        Raises:
            TypeError: the data has another type.
        """
        found = self.values.get(name)
        if found is not None and not isinstance(found.data, kind):
            raise TypeError(f'"{name}" is a {type(found.data).__name__}, not a {kind.__name__}.')
        return None if found is None else found.data

    def leaves(self) -> Leaves:
        """Return {canonical path: leaf} of all entries: a TensorEntry for a tensor, the data for a value."""
        out: Leaves = {t.path: t for t in self.tensors.values()}
        return out | {v.path: v.data for v in self.values.values()}

    @property
    def arguments(self) -> Leaves:
        """Return the arguments of the job that wrote the checkpoint, {path below extra.args: data}, also where their
        component was not selected."""
        found = {
            v.path[2:]: v.data for v in self.values.values() if v.path[:2] == ("extra", "args") and len(v.path) > 2
        }
        return found or self.left_arguments

    def only(self, components: Iterable[str]) -> Checkpoint:
        """Return a copy of the checkpoint with the entries of these components only ("model", "optim", ...)."""
        keep = set(components)
        return self.part(lambda name: name.partition(".")[0] in keep)

    def without_source_facts(self) -> Checkpoint:
        """Return a copy of the checkpoint without the facts that hold for the source's own files only: the recorded
        digests of tensors, the weights that the model computes with (`rounded`), the keys and the parameter numbers
        of the source (`origin`), and its trainer."""
        kept = keep_extra_state_trees(self.origin)
        return replace(self, origin=kept, trainer=None, recorded={}, recorded_values={}, rounded={})

    def part(self, holds: Callable[[str], bool]) -> Checkpoint:
        """Return a copy of the checkpoint that has only some of its entries: those for which `holds` returns True when
        it is called with their canonical name."""
        lost = self.salvage
        return replace(
            self,
            tensors={n: t for n, t in self.tensors.items() if holds(n)},
            values={n: v for n, v in self.values.items() if holds(n)},
            others=[o for o in self.others if holds(o.name)],
            replicas=[r for r in self.replicas if holds(r.name)],
            recorded={n: d for n, d in self.recorded.items() if holds(n)},
            recorded_values={n: d for n, d in self.recorded_values.items() if holds(n)},
            salvage=lost
            and replace(
                lost,
                missing={n: why for n, why in lost.missing.items() if holds(n)},
                rebuilt={n: how for n, how in lost.rebuilt.items() if holds(n)},
            ),
            left_arguments=self.arguments,
        )


def tied_weights(tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Return {name of a tied weight: name of the first tensor with the same bytes in the same file}. Tied weights
    that were saved twice, as separate bytes, are not found."""
    first: dict[object, str] = {}
    out: dict[str, str] = {}
    for name, t in tensors.items():
        if t.numel and t.coding == "raw":
            place = (t.dtype, t.shape, tuple(t.chunks[:]))
            if first.setdefault(place, name) != name:
                out[name] = first[place]
    return out


def same_value(a: object, b: object) -> bool:
    """Whether two plain values are equal; NaN equals NaN, and a list equals the tuple with the same elements, since DCP
    (torch.distributed.checkpoint) makes lists of some tuples."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        a, b = with_one_nan(a), with_one_nan(b)
        return a.keys() == b.keys() and all(same_value(a[k], b[k]) for k in a)
    return bool(a == b) or (a != a and b != b)


def with_one_nan(x: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict in which a key that is NaN equals that of another dict: NaN is found only as the same object, and
    each file has another one. A dict with several such keys is returned unchanged."""
    odd = [k for k in x if k != k]
    return {(nan if k != k else k): v for k, v in x.items()} if len(odd) == 1 else x


def same_bytes(a: TensorEntry, b: TensorEntry) -> bool:
    """Whether two tensors are the same bytes of the same file; False for empty ones."""
    return a.numel > 0 and a.shape == b.shape and a.dtype == b.dtype and a.chunks[:] == b.chunks[:]


def find_orphaned_optimizer_state(ckpt: Checkpoint) -> list[str]:
    """List the FQNs for which the optimizer has state and the model has no weight, sorted; empty if the checkpoint has
    no model.

    The list is also empty for a trainer that fuses parameters in the optimizer and keeps their parts in the model.
    """
    if fuses_parameters(ckpt.trainer):
        return []
    model = {t.parameter for t in ckpt.tensors.values() if t.component == "model"}
    state = {t.parameter for t in ckpt.tensors.values() if t.is_optimizer_state and len(t.path) > 2}
    return sorted(state - model) if model else []


_MOST_RANKS = 1 << 16  # a file may claim any world size


def find_ranks_without_rng_state(ckpt: Checkpoint) -> list[int]:
    """List the ranks that have no RNG state (random number generators) although other ranks have; empty if no rank
    has one."""
    leaves: list[TensorEntry | Value] = [*ckpt.tensors.values(), *ckpt.values.values()]
    keys = {str(leaf.path[1]) for leaf in leaves if leaf.component == "rng" and len(leaf.path) > 1}
    have = {int(k) for k in keys if k.isdecimal() and len(k) < 7}
    if not have:
        return []
    return [r for r in range(min(max(ckpt.world_size or 0, max(have) + 1), _MOST_RANKS)) if r not in have]


def find_unnamed_optimizer_state(ckpt: Checkpoint) -> list[str]:
    """List the tensors of optimizer state that are kept as plain data under extra, because the optimizer's parameters
    could not be matched to FQNs; empty if the checkpoint has both weights and a named optimizer.

    Their names are extra.<file>.optimizer.state..., or extra.<key>.state.<number>... where the parameters are numbers.
    """
    if {t.component for t in ckpt.tensors.values()} >= {"model", "optim"}:
        return []

    def is_state(path: Path) -> bool:
        numbered = path[2:3] == ("state",) and len(path) > 4 and str(path[3]).isdecimal()
        return path[0] == "extra" and (path[2:4] == ("optimizer", "state") or numbered)

    return [n for n, t in ckpt.tensors.items() if is_state(t.path)]
