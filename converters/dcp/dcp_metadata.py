"""The `.metadata` of a DCP folder, read into columns; dcp/__init__.py describes the format.

Up to 2 MiB it is read by our own pickle parser, above that by the C unpickler in a limited child process, with the same
stand-ins for torch's classes. Before that, the records of chunks and items are cut out of it (metadata_records.py), so
that its million objects never exist at once.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import IO, Any, BinaryIO, ClassVar, TypeVar

from ckpttool.errors import Corrupt, Unsafe, Unsupported
from ckpttool.formats import pickles
from ckpttool.formats.sandbox import stream_from_child
from ckpttool.index.checkpoint import ITEMSIZE, Chunks, joined
from ckpttool.index.records import Extent
from ckpttool.storage.source import Source

from .metadata_records import BoxRun, PartOfRecord, PlaceRun, RecordCutter, SecondOfPair

__all__ = ["META", "STORAGE", "Index", "read_index", "read_index_in_child"]


META = "torch.distributed.checkpoint.metadata"
PLANNER = "torch.distributed.checkpoint.planner"
MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
STORAGE = "torch.distributed.checkpoint.filesystem"
#: Above this many bytes .metadata is read with the C unpickler in a limited child (pickles.load_large).
_LARGE_BYTES = 2 << 20

_BLOCK = 64 << 20  # bytes of .metadata in a store that are read at once

T = TypeVar("T")


class _Inert(pickles.StandIn):
    """An instance of a class of torch, of which only the state is needed."""

    __slots__ = ("state",)

    def __init__(self, *args: Any) -> None:
        """Keep the arguments as the state, until the pickle sets one."""
        self.state: Any = args

    def __setstate__(self, state: object) -> None:
        """Keep the state that the pickle gives to this instance."""
        self.state = state


class _Metadata(_Inert):
    __slots__ = ()


class _MemoryFormat(_Inert):
    __slots__ = ()


class _Properties(_Inert):
    """TensorProperties: (dtype, layout, requires_grad, memory format, pin_memory, ...)."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Keep the state.

        Raises:
            Corrupt: the fourth field is no memory format; torch's own class refuses that, too.
        """
        form = state[3] if isinstance(state, tuple) and len(state) > 3 else None
        if not isinstance(form, _MemoryFormat) or form.state not in ((0,), (1,), (2,)):
            raise Corrupt("the memory format of a tensor in .metadata is none of torch's", code="CKPT0406")
        self.state = state


class _Bytes(_Inert):
    __slots__ = ()


class _Stored:
    """The stored items of one flat key of .metadata, in columns with a row for each: the number of its file, its offset
    and length in bytes.

    `starts` has the starts of the chunks one after the other, without a gap. `dims` are the numbers of dimensions that
    were met, None for a value that is no tensor.
    """

    __slots__ = ("dims", "file", "length", "offset", "starts", "transforms")

    def __init__(self) -> None:
        self.starts, self.dims = array("q"), set[int | None]()
        self.file, self.offset, self.length = array("i"), array("q"), array("q")
        self.transforms: dict[int, Any] = {}

    def add_start(self, start: Any) -> None:
        """Append the start of a chunk, a tuple of integers; None for a value."""
        self.dims.add(None if start is None else len(start))
        self.starts.extend(start or ())

    def add(self, file: int, offset: int, length: int, transforms: Sequence[str] | None) -> None:
        """Append an item: the number of its file, its offset there, its length in bytes, and its transforms."""
        if transforms:
            self.transforms[len(self.file)] = transforms
        self.file.append(file)
        self.offset.append(offset)
        self.length.append(length)


#: Of torch's _StorageInfo; with the last one where items may be compressed.
_ITEM_FIELDS = ({"relative_path", "offset", "length"}, {"relative_path", "offset", "length", "transform_descriptors"})


def _make_empty_box_run() -> BoxRun:
    """Return a `BoxRun` without chunks."""
    return BoxRun(0, array("q"), array("q"), set())


class _Bound:
    """A stand-in that knows its collector: each collector makes a subclass of its own, with the attribute."""

    __slots__ = ()
    collect: ClassVar[_Collector]


class _Tensor(_Bound, _Inert):
    """TensorStorageMetadata, whose chunks are the boxes since the last one."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Make the boxes collected since the last tensor the chunks of this one.

        Raises:
            Corrupt: some belong to another tensor, or to none.
        """
        collect, chunks = self.collect, state["chunks"]
        own = collect.instances[collect.box_class]
        n = sum(x.rows if isinstance(x, BoxRun) else 1 for x in chunks)
        if not all(x is own or isinstance(x, BoxRun) for x in chunks):
            raise Corrupt(
                "a chunk in .metadata is no ChunkStorageMetadata, or is in a plan of its saver", code="CKPT0406"
            )
        if n > collect.boxes.rows:
            raise Corrupt("two tensors of .metadata share a chunk; torch does not write that", code="CKPT0406")
        if n < collect.boxes.rows:
            raise Corrupt(f"{collect.boxes.rows} chunks, of which {n} belong to a tensor", code="CKPT0406")
        self.state = (state["properties"], state["size"], collect.boxes)
        collect.boxes = _make_empty_box_run()
        collect.built[0] += 1


class _BytesCounted(_Bound, _Bytes):
    """BytesStorageMetadata."""

    __slots__ = ()

    def __new__(cls, *args: object) -> _BytesCounted:
        """Count one more value for the collector, and return a stand-in without content."""
        cls.collect.built[1] += 1
        return object.__new__(cls)


class _Single(_Bound, pickles.SharedStandIn):
    """A class with a single instance, and another one inside plans."""

    __slots__ = ()

    def __new__(cls, *args: object) -> _Single:
        """Return the instance for collected objects; inside a plan of a saver, the instance for objects that are not
        collected.

        Raises:
            Corrupt: the pickle gives it arguments.
        """
        if args:
            raise Corrupt(f"a {cls.__name__} with arguments", code="CKPT0406")
        cls.collect.begun += 1
        return (cls.collect.spent if cls.collect.depth else cls.collect.instances)[cls]

    def forgets(self, state: Any) -> bool:
        """Return whether the object whose state this is belongs to a plan (what a rank of a saver was to write), and is
        to be ignored; then its state is cleared.

        Args:
            state: the dict of the object's attributes, from the pickle.
        """
        self.collect.begun -= 1
        if self.collect.depth:
            state.clear()
        return self.collect.depth > 0


class _Box(_Single):
    """ChunkStorageMetadata: a row of starts and sizes."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Append the start and the shape of a chunk to the collector's columns."""
        if self.forgets(state):
            return
        start, size = state["offsets"], state["sizes"]
        self.collect.add_boxes(BoxRun(1, array("q", start), array("q", size), {len(start), len(size)}))
        state.clear()


class _Place(_Single):
    """MetadataIndex: the key of the item that comes next."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Append a place to the collector: the flat key and the start of the chunk whose item comes next.

        Raises:
            TypeError: the key is not text.
        """
        if self.forgets(state):
            return
        collect, key = self.collect, state["fqn"]
        if not isinstance(key, str):  # hashing a tuple of tuples has no bound
            raise TypeError("fqn")
        collect.last = collect.stored_at(key)
        collect.last.add_start(state.get("offset"))
        collect.places += 1
        state.clear()


class _Item(_Single):
    """_StorageInfo: where the item of the last place is."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Append the file, offset and length of an item to the columns of the place before it.

        Raises:
            Corrupt: its fields are not those of torch, or no place came before it. TypeError: a field is of another
                type.
        """
        if state.keys() not in _ITEM_FIELDS:
            raise Corrupt(
                f"a _StorageInfo of .metadata has the fields {', '.join(map(str, state))}, not those of torch",
                code="CKPT0406",
            )
        if self.forgets(state):
            return
        collect, path = self.collect, state["relative_path"]
        if not isinstance(path, str):
            raise TypeError("relative_path")
        transforms = state.get("transform_descriptors")
        if transforms and (not isinstance(transforms, (list, tuple)) or not all(type(t) is str for t in transforms)):
            raise TypeError("transform_descriptors")
        collect.last.add(collect.number_of(path), state["offset"], state["length"], transforms)
        collect.items += 1
        if collect.items != collect.places:
            raise Corrupt("storage_data of .metadata is not made of (index, info) pairs", code="CKPT0406")
        state.clear()


class _Planned(_Bound, pickles.SharedStandIn):
    """WriteItem, and what is in it."""

    __slots__ = ()

    def __new__(cls, *args: object) -> _Planned:
        """Return the one instance for all parts of a plan.

        Raises:
            Corrupt: no plan has begun.
        """
        if not cls.collect.depth:
            raise Corrupt("a part of a plan of a saver is in another field of .metadata", code="CKPT0406")
        return cls.collect.part

    def __setstate__(self, state: Any) -> None:
        """Clear the state: nothing of a plan is kept."""
        state.clear()


class _Plan(_Bound, pickles.SharedStandIn):
    """SavePlan: what is built between its beginning and its state is not collected."""

    __slots__ = ()

    def __new__(cls, *args: object) -> _Plan:
        """Tell the collector that a plan begins, and return the one instance for all plans.

        Raises:
            Corrupt: the plan is inside another object.
        """
        cls.collect.pass_edge(1)
        return cls.collect.plan

    def __setstate__(self, state: Any) -> None:
        """Tell the collector that a plan ends, and clear the state.

        Raises:
            Corrupt: an object that began in the plan has not ended, or no plan has begun.
        """
        self.collect.pass_edge(-1)
        state.clear()


class _Collector:
    """Stand-ins for the classes in one .metadata, which collect the content of its million objects in columns.

    A class that occurs once per chunk has a single instance, whose __setstate__ appends a row: the unpickler
    builds a tensor's chunks right before the tensor, and an item's place right before the item. `_join_collected`
    checks this by counting.

    Megatron-Core's savers put the plans of all ranks (`all_local_plans`, a list of SavePlan) behind the fields of
    torch, and nvidia-resiliency-ext may keep them in planner_data (its pull request 353); they name every chunk and
    place once more. Inside a plan each class has another single instance, which forgets its state. So nothing of the
    plans can be part of what is collected: a plan inside an object that was begun before it is refused, and so is an
    object that is begun in a plan and set behind it; `_Tensor` and `_check_storage_data` look whether chunks, places
    and items are of the first kind of instance alone.
    """

    def __init__(self) -> None:
        """Make the empty columns, and the stand-ins that fill them: `stand_ins` {(module, class of torch):
        stand-in}."""
        self.boxes = _make_empty_box_run()  # those that belong to no tensor yet
        self.stored: dict[str, _Stored] = {}
        self.last = _Stored()
        self.files: dict[str, int] = {}
        self.places = self.items = 0
        self.built: list[int] = [0, 0]  # tensors and values
        self.begun = 0  # objects of classes with a single instance whose state is still to come
        self.depth, self.planned = 0, False  # plans that have begun and not ended; whether there was one
        box, place, item = self._bind_stand_in(_Box), self._bind_stand_in(_Place), self._bind_stand_in(_Item)
        planned, plan = self._bind_stand_in(_Planned), self._bind_stand_in(_Plan)
        self.tensor_class = self._bind_stand_in(_Tensor)
        self.box_class, self.place_class, self.item_class = box, place, item
        self.instances: dict[type, _Single] = {cls: object.__new__(cls) for cls in (box, place, item)}
        self.spent: dict[type, _Single] = {cls: object.__new__(cls) for cls in (box, place, item)}
        self.part, self.plan = object.__new__(planned), object.__new__(plan)
        self.single = self.instances[place], self.instances[item]
        self.stand_ins: dict[tuple[str, str], object] = {
            **_STAND_INS,
            **pickles.make_enum_stand_ins(_MEMORY_FORMATS, (planned, dict.fromkeys(_WRITE_ITEM_TYPES, self.part))),
            (META, "TensorStorageMetadata"): self.tensor_class,
            (META, "BytesStorageMetadata"): self._bind_stand_in(_BytesCounted),
            (META, "ChunkStorageMetadata"): box,
            (META, "MetadataIndex"): place,
            (pickles.ANY_MODULE, "_StorageInfo"): item,  # OLMo-core has a class of its own, with torch's fields
            (PLANNER, "SavePlan"): plan,
            (MEGATRON, "MCoreSavePlan"): plan,
            (STORAGE, "_StoragePrefix"): planned,
        }
        for name in ("WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"):
            self.stand_ins[PLANNER, name] = planned

    def stored_at(self, key: str) -> _Stored:
        """Return the columns of the items of a flat key, to be extended; new, empty ones for a new key."""
        found = self.stored.get(key)
        if found is None:
            found = self.stored[key] = _Stored()
        return found

    def number_of(self, file: str) -> int:
        """Return the number of a data file; a new file gets the next one."""
        return self.files.setdefault(file, len(self.files))

    def add_boxes(self, run: BoxRun) -> None:
        """Collect chunks that follow each other."""
        if not self.boxes.rows:
            self.boxes = run
            return
        self.boxes.starts.extend(run.starts)
        self.boxes.sizes.extend(run.sizes)
        self.boxes = self.boxes._replace(rows=self.boxes.rows + run.rows, dims=self.boxes.dims | run.dims)

    def add_places(self, run: PlaceRun) -> None:
        """Append a run of items to the columns of their flat keys.

        Raises:
            Corrupt: a place before them has no item.
        """
        if self.items != self.places:
            raise Corrupt("storage_data of .metadata is not made of (index, info) pairs", code="CKPT0406")
        stored, files = self.stored.get, self.files.get
        for key, start, path, offset, length, transforms in run:
            found = stored(key) or self.stored_at(key)
            found.add_start(start)
            file = files(path)
            found.add(self.number_of(path) if file is None else file, offset, length, transforms)
        self.places, self.items = self.places + len(run), self.items + len(run)

    def load_large(self, pickle: RecordCutter) -> object:
        """Unpickle what `RecordCutter` leaves of .metadata, collect the records that it cuts out, and return the object
        at the top of the pickle."""
        return pickles.load_large(pickle, self.stand_ins, lambda number: self.collect_run(pickle.take(number)))

    def collect_run(self, run: object) -> object:
        """Collect an object that `RecordCutter` cut out of the pickle, unless it is inside a plan, and return the
        object that the unpickler gets in its place.

        Args:
            run: what `RecordCutter.take` returned: a `BoxRun`, `PlaceRun`, `SecondOfPair` or `PartOfRecord`; any other
                object is returned unchanged.

        Raises:
            Corrupt: an object that is no plan refers to a part of a record.
        """
        if isinstance(run, BoxRun):
            if self.depth:
                return self.spent[self.box_class]
            self.add_boxes(run)
        elif isinstance(run, PlaceRun):
            if not self.depth:
                self.add_places(run)
            return (self.spent if self.depth else self.instances)[self.place_class]
        elif isinstance(run, SecondOfPair):
            return (self.spent if self.depth else self.instances)[self.item_class]
        elif isinstance(run, PartOfRecord):
            if not self.depth:
                raise Corrupt("an object of .metadata is a part of two chunks or items", code="CKPT0406")
            return self.part
        return run

    def pass_edge(self, by: int) -> None:
        """Note that a plan begins (1) or ends (-1).

        Raises:
            Corrupt: it does so inside another object, or none has begun.
        """
        if self.begun or self.depth + by < 0:
            raise Corrupt("a plan of a saver is inside another field of .metadata", code="CKPT0406")
        self.depth, self.planned = self.depth + by, True

    def _bind_stand_in(self, cls: type[T]) -> type[T]:
        """Return a subclass of a stand-in class whose attribute `collect` is this collector."""
        return type(cls.__name__[1:], (cls,), {"__slots__": (), "collect": self})


_MEMORY_FORMATS = (_MemoryFormat, {name: _MemoryFormat(k) for k, name in enumerate(pickles.MEMORY_FORMATS)})
_WRITE_ITEM_TYPES = ("TENSOR", "SHARD", "BYTE_IO")  # WriteItemType of torch/distributed/checkpoint/planner.py
#: Where torch kept the classes of a tensor's properties before 2.3 (torch/distributed/checkpoint/metadata.py of 2.2.2).
_BEFORE_2_3 = "torch.distributed._shard.sharded_tensor.metadata"
_STAND_INS: dict[tuple[str, str], object] = {
    (META, "Metadata"): _Metadata,
    (MEGATRON, "MCoreMetadata"): _Metadata,
    (META, "TensorProperties"): _Properties,
    (META, "StorageMeta"): _Inert,
    (META, "_MEM_FORMAT_ENCODING"): _MemoryFormat,
    (_BEFORE_2_3, "TensorProperties"): _Properties,
    (_BEFORE_2_3, "MEM_FORMAT_ENCODING"): _MemoryFormat,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _Inert,
    ("collections", "OrderedDict"): pickles.PLAIN["collections", "OrderedDict"],
}
for _module in ("pathlib", "pathlib._local"):
    for _name in ("PosixPath", "WindowsPath", "PurePosixPath", "Path"):
        _STAND_INS[_module, _name] = lambda *parts: None  # where the save ran; not needed
for _dtype in ITEMSIZE:
    _STAND_INS["torch", _dtype] = pickles.Global("torch", _dtype)


class Index:
    """The content of .metadata, in columns: `tensors` (flat key, dtype, shape, chunks); chunk k of a tensor is item k.

    `paths` {flat key: path}; `values` (flat key, file, offset, length, transforms); `transforms` {number of a file:
    transforms}; `files` by number. `copies` (kept item, item) of one part of a tensor, as (file, offset, length):
    per-rank metadata list what is replicated again. `whole` {flat key: shape} of tensors that Megatron-Core before 0.14
    cut into boxes and those into flat ranges.
    """

    def __init__(self) -> None:
        self.files: list[str] = []
        self.tensors: list[tuple[str, str, tuple[int, ...], Chunks]] = []
        self.values: list[tuple[str, int, int, int, list[str]]] = []
        self.paths: dict[str, list[str | int]] = {}
        self.transforms: dict[int, list[str]] = {}  # file -> what its items went through
        self.copies: list[tuple[Extent, Extent]] = []
        self.whole: dict[str, list[int]] = {}

    def to_parts(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the encoded index, as the child process returns it: a JSON line with everything small,
        then the columns of chunks. `copies` are left out: only metadata of several files has any."""
        head = {
            "files": self.files,
            "tensors": [(k, d, s, len(c)) for k, d, s, c in self.tensors],
            "values": self.values,
            "paths": self.paths,
            "transforms": list(self.transforms.items()),
            "whole": self.whole,
        }
        yield json.dumps(head).encode() + b"\n"
        for _, _, _, c in self.tensors:
            yield from (memoryview(column).cast("B") for column in (c.start, c.shape, c.file, c.offset, c.length))

    @classmethod
    def read_from(cls, stream: IO[bytes]) -> Index:
        """Read the index that `to_parts` encoded.

        Raises:
            EOFError: it is cut off.
        """
        out = cls()
        head = json.loads(stream.readline() or "{}")
        if not head:
            raise EOFError
        out.files, out.paths, out.whole = head["files"], head["paths"], head["whole"]
        out.values = [tuple(v) for v in head["values"]]
        out.transforms = dict(head["transforms"])
        for key, dtype, shape, n in head["tensors"]:
            c = Chunks(len(shape))
            for column, width in (
                (c.start, len(shape)),
                (c.shape, len(shape)),
                (c.file, 1),
                (c.offset, 1),
                (c.length, 1),
            ):
                column.fromfile(stream, n * width)
            out.tensors.append((key, dtype, tuple(shape), c))
        return out


def read_index_in_child(path: str) -> Iterator[bytes | memoryview]:
    """Read one .metadata file and return its index, encoded by `Index.to_parts`; runs in a limited child process.

    Records of chunks and items are cut out first; the C unpickler reads the rest. If `path` is absolute, it is a local
    file; if not, the file's bytes come from stdin and the path is for messages.
    """
    collector = _Collector()
    file: BinaryIO = open(path, "rb") if os.path.isabs(path) else sys.stdin.buffer  # noqa: SIM115
    with file as f:
        top = collector.load_large(RecordCutter(f.read))
    return _build_index([(top, collector)], path).to_parts()


def read_index(source: Source) -> Index:
    """Read the index of a folder: of its one `.metadata`, or of one such file a rank.

    Raises:
        Corrupt: it is missing, damaged, or not of DCP. Unsafe: it would run code, or take more memory or time than its
            size allows. Unsupported: it has a class that ckpttool does not know.
    """
    names = [".metadata"] if source.exists(".metadata") else []
    names = names or sorted(
        (n for n in source.list() if re.fullmatch(r"__\d+\.metadata", n)), key=lambda n: int(n[2:-9])
    )
    names = names or [".metadata"]  # not a regular file: opening it raises the right error
    if len(names) == 1 and source.size(names[0]) > _LARGE_BYTES:
        where, size = f"{source.root}/{names[0]}", source.size(names[0])
        blocks = () if source.local else range(0, size, _BLOCK)
        pickle = (source.read(names[0], at, min(_BLOCK, size - at)) for at in blocks)
        function = "ckpttool.converters.dcp.dcp_metadata:read_index_in_child"
        return stream_from_child(function, where, size, pickle, Index.read_from)
    tops = []
    for n in names:
        what = f"{source.root}/{n}"
        data = source.read_all(n, 64 << 20)
        if not data:
            raise Corrupt(f"{what} is empty: the save was interrupted, or the copy is incomplete.", code="CKPT0404")
        collector = _Collector()
        tops.append((pickles.load(data, collector.stand_ins, what=what)[0], collector))
    return _build_index(tops, f"{source.root}/{names[0]}")


def _build_index(tops: list[tuple[object, _Collector]], what: str) -> Index:
    """Build the index from unpickled objects. Whatever does not fit the classes of torch is damage.

    Args:
        tops: for each file, the object at the top of its pickle and the collector that filled while it was read.
        what: name of the file in messages.

    Raises:
        Corrupt: it does not fit. Unsafe: a name is there twice. Unsupported: it has a class that is not known.
    """
    try:
        return _join_collected(tops, what)
    except (TypeError, AttributeError, LookupError, ValueError, OverflowError) as e:
        raise Corrupt(
            f"{what}: not the metadata of a DCP checkpoint ({type(e).__name__}: {e}).", code="CKPT0406"
        ) from None


def _join_collected(tops: list[tuple[object, _Collector]], what: str) -> Index:
    """Join what was collected from one or several metadata files into one index.

    Args:
        tops: the top object and the collector of each file.
        what: name of the file in messages.

    Raises:
        Corrupt, Unsafe, Unsupported: as `_build_index`.
    """
    out = Index()
    files: dict[str, int] = {}
    tensors: dict[str, tuple[str, tuple[int, ...], Chunks]] = {}
    for top, collector in tops:
        if not isinstance(top, _Metadata) or not isinstance(top.state, dict):
            raise Corrupt(
                f"{what}: holds a {type(top).__name__}, not the metadata of a DCP checkpoint.", code="CKPT0406"
            )
        state = top.state
        _check_storage_data(state, collector, what)
        for key, more in (state.get("mcore_data") or {}).items():
            if (shape := more.get("nd_reformulated_orig_global_shape")) is not None:
                if not isinstance(shape, (tuple, list)) or not all(type(n) is int for n in shape):
                    raise Corrupt(
                        f"{what}: mcore_data gives {pickles.short(key)} the shape {pickles.short(shape)}.",
                        code="CKPT0406",
                    )
                out.whole[key] = list(shape)
        _read_paths(state, collector, out, what)
        _refuse_duplicate_entries(state["state_dict_metadata"].values(), collector, what)
        numbers = [files.setdefault(name, len(files)) for name in collector.files]  # this file's -> all files'
        _read_entries(state["state_dict_metadata"], collector, numbers, tensors, out, what)
    order = [k for k in out.paths if k in tensors] + [k for k in tensors if k not in out.paths]
    out.tensors = [(k, *tensors[k]) for k in order]
    place = {k: i for i, k in enumerate(out.paths)}
    out.values.sort(key=lambda v: place.get(v[0], len(place)))
    out.files = list(files)
    return out


def _check_storage_data(state: dict[str, Any], collector: _Collector, what: str) -> None:
    """Refuse storage_data of classes that are not known, or with other objects than those that were collected.

    Args:
        state: fields of Metadata, of one file.
        collector: what was collected while that file was unpickled.
        what: name of the file in messages.

    Raises:
        Unsupported: a class is not known.
        Corrupt: chunks or items do not add up, or plans of a saver are among them.
    """
    items = state.get("storage_data")
    if not isinstance(items, dict):
        raise Corrupt(
            f"{what}: has no storage_data, which says where items are and without which torch loads nothing; the file "
            "is damaged.",
            code="CKPT0406",
        )
    if other := next((x for x in items.values() if isinstance(x, pickles.Opaque)), None):
        raise Unsupported(
            f"{what}: storage_data says where items are with objects of {other.cls}, a class that ckpttool does "
            "not know. Save the checkpoint with torch's own writer.",
            code="CKPT0329",
        )
    if collector.boxes.rows or collector.places != collector.items:
        raise Corrupt(f"{what}: {collector.boxes.rows} chunks belong to no tensor.", code="CKPT0406")
    if collector.planned and any(pair != collector.single for pair in items.items()):
        raise Corrupt(f"{what}: storage_data holds plans of a saver.", code="CKPT0406")


def _read_paths(state: dict[str, Any], collector: _Collector, out: Index, what: str) -> None:
    """Add the paths of planner_data to `out.paths`; it has those of all entries or none. A list of plans there is
    passed over.

    Args:
        state: fields of Metadata, of one file.
        collector: what was collected while that file was unpickled.
        out: the index so far.
        what: name of the file in messages.

    Raises:
        Corrupt: torch does not write such paths.
    """
    if "planner_data" not in state:
        raise Corrupt(
            f"{what}: has no planner_data, which torch writes even where it is empty; the file is damaged.",
            code="CKPT0406",
        )
    paths, listed = state["planner_data"] or {}, state["state_dict_metadata"]
    if collector.planned:
        plan = collector.plan
        paths = {k: v for k, v in paths.items() if not (isinstance(v, (list, tuple)) and all(x is plan for x in v))}
    for key, path in paths.items():
        if not isinstance(path, tuple) or not path or not all(isinstance(p, (str, int)) for p in path):
            raise Corrupt(f"{what}: the path of {pickles.short(key)} is {pickles.short(path)}.", code="CKPT0406")
        if joined(path) != key:
            raise Corrupt(
                f"{what}: planner_data gives {pickles.short(key)} the path {pickles.short(path)}. torch joins the "
                "path to make the key and loads by the key alone, so the file was altered; take another copy.",
                code="CKPT0406",
            )
        out.paths[key] = list(path)
    if lost := [key for key in listed if key not in paths] if paths else []:
        raise Corrupt(
            f"{what}: planner_data has the paths of other entries, and none for {len(lost):,} of {len(listed):,}, "
            f"first {pickles.short(lost[0])}. torch writes all or none; the file was altered, take another copy.",
            code="CKPT0406",
        )
    _refuse_mixed_paths(out.paths, what)


def _refuse_duplicate_entries(entries: Collection[object], collector: _Collector, what: str) -> None:
    """Raise if a file describes more entries than it has names. The C unpickler keeps the last of two equal names
    silently.

    Args:
        entries: values of state_dict_metadata.
        collector: what was collected, which counts the entries that were built.
        what: name of the file in messages.

    Raises:
        Unsafe: a name is there twice.
    """
    listed = sum(isinstance(meta, collector.tensor_class) for meta in entries)
    values = sum(isinstance(meta, _Bytes) for meta in entries)
    if collector.built[0] > listed or collector.built[1] > values:
        raise Unsafe(
            f"{what}: describes {sum(collector.built)} entries for {listed + values} names, so a name is there "
            "twice, and the first entry is lost to whoever loads it. Take another copy of the checkpoint.",
            code="CKPT0703",
        )


def _read_entries(
    entries: Mapping[str, object],
    collector: _Collector,
    numbers: list[int],
    tensors: dict[str, tuple[str, tuple[int, ...], Chunks]],
    out: Index,
    what: str,
) -> None:
    """Add the tensors and values of one file to `tensors` and `out`.

    Args:
        entries: state_dict_metadata, {flat key: its description}.
        collector: what was collected from this file.
        numbers: {number of a data file in this metadata file: its number among those of all}, as a list.
        tensors: {flat key: (dtype, shape, chunks)} so far.
        out: the index so far; gets values, transforms, and copies of what an earlier file listed.
        what: name of the file in messages.

    Raises:
        Corrupt: an entry is stored nowhere, or of an unknown class. Unsafe: a part of one is stored twice.
    """
    for key, meta in entries.items():
        stored = collector.stored.pop(key, None) or _Stored()
        for k, transforms in stored.transforms.items():
            out.transforms[numbers[stored.file[k]]] = list(transforms)
        if isinstance(meta, _Bytes):
            if not stored.file:
                raise Corrupt(f'{what}: "{key}" is listed but stored nowhere.', code="CKPT0408")
            if len(stored.file) > 1:
                raise Unsafe(_describe_duplicate_item(what, key), code="CKPT0703")
            row = (numbers[stored.file[0]], stored.offset[0], stored.length[0])
            if key not in tensors:
                out.values.append((key, *row, list(stored.transforms.get(0, ()))))
            continue
        if not isinstance(meta, collector.tensor_class):
            raise Corrupt(f'{what}: "{key}" is a {type(meta).__name__}.', code="CKPT0406")
        dtype, size, chunks = _join_chunks(key, meta.state, stored, numbers, what)
        if key not in tensors:
            tensors[key] = dtype, size, chunks
            continue
        # per-rank metadata: each lists its own chunks, and what is replicated again
        known = tensors[key][2]
        places = {box: k for k, box in enumerate(known.boxes())}
        for c in chunks:
            if (same := places.get((c.start, c.shape))) is None:
                known.add(c.start, c.shape, *c.extent)
            else:
                out.copies.append((known[same].extent, c.extent))


def _refuse_mixed_paths(paths: Mapping[str, Sequence[str | int]], what: str) -> None:
    """Raise if paths make one container both a list and a dict, of which torch's planner loads only one.

    Args:
        paths: {flat key: path}.
        what: name of the file in messages.

    Raises:
        Corrupt: with the first such path.
    """
    lists = {tuple(path[:i]) for path in paths.values() for i, part in enumerate(path) if type(part) is int}
    depths = {len(above) for above in lists}
    for key, path in paths.items() if lists else ():
        for i in depths:
            if i < len(path) and type(part := path[i]) is str and tuple(path[:i]) in lists:
                raise Corrupt(
                    f"{what}: planner_data gives {pickles.short(key)} the path {pickles.short(tuple(path))}, and "
                    f"others have list positions in the place of {pickles.short(part)}. torch loads only one of the "
                    "two, so the file was altered; take another copy.",
                    code="CKPT0416",
                )


def _describe_duplicate_item(what: str, key: str) -> str:
    """Return the error message for a part of an entry that is stored in two places.

    Args:
        what: name of the file.
        key: flat key of the entry.
    """
    return (
        f'{what}: storage_data has two places for the same part of "{key}", and the first is lost to whoever loads it. '
        "Take another copy of the checkpoint."
    )


def _join_chunks(
    key: str, state: Any, stored: _Stored, numbers: list[int], what: str
) -> tuple[str, tuple[int, ...], Chunks]:
    """Return (dtype, shape, chunks) of one tensor; each chunk gets the file, offset and length of its item.

    Args:
        key: its flat key, for messages.
        state: (properties, size, boxes) of it.
        stored: the items of this key.
        numbers: {number of a data file in this metadata file: its number among those of all}, as a list.
        what: name of the file in messages.

    Raises:
        Corrupt: a chunk is stored nowhere, or has another number of dimensions. Unsafe: one is stored twice.
        Unsupported: the dtype is not known.
    """
    properties, size, run = state
    if not isinstance(properties, _Properties):
        raise Corrupt(f'{what}: the properties of "{key}" are {pickles.short(properties)}.', code="CKPT0406")
    dtype = properties.state[0].name
    if dtype not in ITEMSIZE:
        raise Unsupported(
            f'{what}: tensor "{key}" is of dtype torch.{dtype}, which ckpttool does not know.', code="CKPT0329"
        )
    size = tuple(size)
    ndim = len(size)
    if not all(type(k) is int for k in size):
        raise Corrupt(f'{what}: "{key}" has size {pickles.short(size)}.', code="CKPT0406")
    if run.dims - {ndim} or stored.dims - {ndim}:
        raise Corrupt(f'{what}: chunks of "{key}" do not have {ndim} dimensions.', code="CKPT0406")
    chunks = Chunks(ndim)
    chunks.start, chunks.shape = run.starts, run.sizes
    starts, places = _iterate_rows(run.starts, ndim, run.rows), _iterate_rows(stored.starts, ndim, len(stored.file))
    rows = {place: k for k, place in enumerate(places)}
    if len(rows) < len(stored.file):
        raise Unsafe(_describe_duplicate_item(what, key), code="CKPT0703")
    found: Sequence[int] = range(run.rows)
    if run.starts != stored.starts or run.rows != len(rows):
        order = [rows.get(s) for s in starts]
        if None in order:
            place = next(itertools.islice(_iterate_rows(run.starts, ndim, run.rows), order.index(None), None))
            raise Corrupt(f'{what}: the chunk of "{key}" at {place} is listed but stored nowhere.', code="CKPT0408")
        found = [k for k in order if k is not None]
    chunks.file.extend(numbers[stored.file[k]] for k in found)
    if isinstance(found, range):
        chunks.offset, chunks.length = stored.offset, stored.length
    else:
        chunks.offset.extend(stored.offset[k] for k in found)
        chunks.length.extend(stored.length[k] for k in found)
    return dtype, size, chunks


def _iterate_rows(column: array[int], ndim: int, rows: int) -> Iterator[tuple[int, ...]]:
    """Yield the rows of a flat column, tuples of `ndim` integers; `rows` empty tuples if `ndim` is 0."""
    return zip(*[iter(column)] * ndim, strict=True) if ndim else itertools.repeat((), rows)
