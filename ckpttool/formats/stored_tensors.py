"""Tensors of a torch.save file as byte ranges, and the trees of plain values that hold them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ..errors import Corrupt, Unsupported
from ..index import boxes
from ..index.checkpoint import ITEMSIZE, Checkpoint, Chunks, Leaves, Number, Path, TensorEntry, Value, joined
from ..index.composites import Composite
from ..index.names import ROLES
from ..index.records import Extent, Record
from ..storage.source import ReadAt
from .crc import crc32
from .pickles import Global, Opaque, list_children, map_children
from .subclasses import is_subclass, split_subclass

__all__ = [
    "Inline",
    "Size",
    "Storage",
    "StoredTensor",
    "decode_number",
    "flatten_like_dcp",
    "flatten_tree",
    "inline_tensors",
    "iter_tensors",
    "list_mapping_items",
    "map_tensors",
    "read_leaves",
    "split_components",
]


class Storage(NamedTuple):
    """A record of raw elements; `crc32` is None where the file carries none."""

    dtype: str | None
    offset: int
    length: int
    crc32: int | None

    def records(self, file: int) -> list[Record]:
        """Return [the record of its CRC32], where it is in file number `file`; [] if the file carries none."""
        return [] if self.crc32 is None else [Record(Extent(file, self.offset, self.length), self.crc32)]


class StoredTensor(NamedTuple):
    """A tensor of a torch file: element 0 is `at` bytes into its storage. `wrapper` is the class of the object that
    held it, where that was one that only accompanies a dense weight (subclasses.get_dense_tensor)."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: Storage
    at: int
    wrapper: str = ""

    def __repr__(self) -> str:
        """Return dtype and shape, such as "<float32 tensor [2, 3]>"."""
        return f"<{self.dtype} tensor {list(self.shape)}>"

    @property
    def contiguous(self) -> bool:
        """Return whether the elements are contiguous in row-major order."""
        return boxes.is_row_major(self.shape, self.strides)

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def span(self) -> int:
        """Return the number of bytes from the first element to the end of the last."""
        return boxes.span(self.shape, self.strides) * ITEMSIZE[self.dtype]

    @property
    def extent(self) -> tuple[int, int]:
        """Return (offset in the file, length) of the bytes from the first element to the end of the last."""
        return self.storage.offset + self.at, self.span


class Inline(NamedTuple):
    """A small tensor inside a value that is not taken apart (in a tuple, say), with its bytes, row-major."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Size(tuple[int, ...]):
    """A torch.Size in a file whose format has sizes of its own; in a value it is the call that torch pickles
    (`inline_tensors`)."""

    __slots__ = ()


def map_tensors(
    x: object,
    f: Callable[[StoredTensor], object],
    of_size: Callable[[Size], object] = lambda size: size,
    of_storage: Callable[[Storage], object] = lambda storage: storage,
) -> object:
    """Return a copy of a tree of containers with `f` applied to every StoredTensor, `of_size` to every `Size`, and
    `of_storage` to every `Storage` that no tensor is made of."""
    if isinstance(x, StoredTensor):
        return f(x)
    if isinstance(x, Storage):
        return of_storage(x)
    if type(x) is Size:
        return of_size(x)
    return map_children(x, lambda part: map_tensors(part, f, of_size, of_storage))


def iter_tensors(x: object, what: str) -> Iterator[StoredTensor]:
    """Return an iterator over every StoredTensor in a value, at any depth.

    Args:
        x: the value.
        what: names it in messages.

    Raises:
        Unsupported: it holds a storage that no tensor is made of.
    """
    found: list[StoredTensor] = []

    def refuse(storage: Storage) -> None:
        """Raise Unsupported for a bare storage."""
        raise Unsupported(
            f"{what}: a value is, or holds, a bare storage of {storage.length} bytes, which has no shape. Save it as a "
            "tensor.",
            code="CKPT0307",
        )

    map_tensors(x, lambda t: found.append(t), of_storage=refuse)
    return iter(found)


def read_leaves(tree: object, path: Path, file: int, read_at: ReadAt, what: str) -> tuple[Leaves, list[Record]]:
    """Flatten a tree from a torch.save file: ({path: TensorEntry, Composite or plain value}, records of the storages
    with their CRC32s).

    Dicts with string keys, and lists that hold tensors or dicts, are flattened, as DCP does. An object of a tensor
    subclass becomes a `Composite`. Anything else is one value, and the bytes of tensors inside it are read
    (`inline_tensors`).

    Args:
        tree: what a torch.save file holds.
        path: the path of the tree itself.
        file: number of the file in the checkpoint's list of files.
        read_at: reads bytes (offset, length) of the file.
        what: names the file in messages.

    Raises:
        Corrupt: a tensor inside a value does not match its CRC32, or an object is not pickled as torch does.
        Unsupported: the tensors inside one value are too large.
    """
    found = flatten_tree(tree, path)
    records: dict[int, Record] = {}

    def entry(t: StoredTensor, at: Path) -> TensorEntry:
        """Make the entry of a tensor at path `at`, and remember the CRC32 of its storage."""
        chunks = Chunks.whole(t.shape, file, *t.extent, None if t.contiguous else t.strides)
        records.update((r.extent.offset, r) for r in t.storage.records(file))
        return TensorEntry(t.dtype, t.shape, at, chunks, wrapper=t.wrapper)

    for at, leaf in found.items():
        if isinstance(leaf, StoredTensor):
            found[at] = entry(leaf, at)
        elif is_subclass(leaf):
            about, inside = split_subclass(leaf, StoredTensor, f"{what}: {joined(at)}")
            tensors = {n: entry(t, (*at, *n.split("."))) for n, t in inside.items()}
            found[at] = Composite(at, about, tensors)
        else:
            found[at] = inline_tensors(leaf, read_at, f"{what}: {joined(at)}")
    return found, list(records.values())


def flatten_tree(tree: object, path: Path = ()) -> Leaves:
    """Flatten a tree to {path: leaf}, each path beginning with `path`: dicts with string keys, and lists that hold
    tensors or dicts, are flattened; the leaves are unchanged."""
    found: Leaves = {}
    _flatten(path, tree, found)
    return found


def split_components(ckpt: Checkpoint) -> Checkpoint:
    """Return the checkpoint with a scheduler, scaler, counters, ... that are one dict as an entry for each key, as
    trainers and engines look for them.

    DCP of torch until 2.3, and without flatten_state_dict, keeps a dict without tensors as one item. `dcp` writes it as
    one again, which newer torch finds, too (_traverse.py, traverse_state_dict_v_2_3).
    """
    parts: Leaves = {}
    whole: list[str] = []
    for name, v in ckpt.values.items():
        of_trainer = len(v.path) == 2 and v.path[0] == "extra" and ROLES.get(str(v.path[1])) == "trainer"
        at: Path = ("trainer",) if of_trainer else v.path
        if len(at) == 1 and at != ("model",) and at != ("optim",):
            found = flatten_tree(v.data, at)
            if at not in found:
                whole.append(name)
                parts |= found
    values = {n: v for n, v in ckpt.values.items() if n not in whole}
    made = {joined(p): Value(p, x) for p, x in parts.items()}
    if not whole or values.keys() & made.keys():
        return ckpt
    return replace(ckpt, values=values | made)


def _flatten(path: Path, x: Any, out: dict[Path, object], of_optimizer: bool = False) -> bool:
    """Add the leaves of `x`, which is at `path`, to `out`, {path: leaf}; return whether `x` was flattened, or is itself
    a leaf. `of_optimizer` says whether param groups are beside `x`, so that a dict called "state" is an optimizer's.

    A list is flattened if one of its items is, or is a tensor; DCP's planner has no keys for the items of other lists,
    such as [{}], [{6: 1}] or [[[1]]].
    """
    if isinstance(x, dict) and x and all(isinstance(k, str) for k in x):
        for k, v in x.items():
            _flatten((*path, k), v, out, "param_groups" in x)
        return True
    if _is_optimizer_state(path, x, of_optimizer):
        for k, v in x.items():
            _flatten((*path, Number(str(k))), v, out)
        return True
    if isinstance(x, list) and any(isinstance(v, (dict, list, StoredTensor, Inline)) or is_subclass(v) for v in x):
        apart = [
            _flatten((*path, i), v, out) or isinstance(v, (StoredTensor, Inline)) or is_subclass(v)
            for i, v in enumerate(x)
        ]
        if any(apart):
            return True
        for i in range(len(x)):
            del out[(*path, i)]
    out[path] = x
    return False


def list_mapping_items(x: object) -> list[tuple[object, object]] | None:
    """Return the (key, value) items of a dict, or of an instance of collections.Counter or collections.defaultdict;
    None for anything else."""
    if isinstance(x, dict):
        return list(x.items())
    if isinstance(x, Opaque) and x.cls in _DICTS:
        first = x.args[0] if x.args and x.cls.name == "Counter" else {}
        return [*first.items(), *x.dict_items]
    return None


#: Classes that torch's DCP takes apart like a dict.
_DICTS = frozenset((Global("collections", "Counter"), Global("collections", "defaultdict")))


def flatten_like_dcp(x: object, path: Path) -> dict[Path, object]:
    """Return the entries, {path: value}, to which DCP flattens a dict with keys that are not strings when torch saves
    and loads a state dict.

    Each key is converted to a string and becomes an entry; a list with a dict inside becomes an entry for each of its
    items. Any other value, a dict that holds arrays, or one whose keys would collide as strings, remains one entry.

    Source: traverse_state_dict of torch/distributed/checkpoint/_traverse.py (2.13).

    Args:
        x: the value.
        path: its path.
    """
    whole = list_mapping_items(x) is None or not _has_non_string_keys(x) or _holds_array(x)
    found = [] if whole else list(_walk_like_dcp(x, path))
    unambiguous = len({joined(p) for p, _ in found}) == len(found)  # {1: ..., "1": ...} has two entries of one name
    return dict(found) if found and unambiguous else {path: x}


def _walk_like_dcp(x: object, path: Path) -> Iterator[tuple[Path, object]]:
    """Yield (path, value) of the entries that DCP makes of a value at `path`."""
    items = list_mapping_items(x)
    if items is not None:
        for k, v in items:
            yield from _walk_like_dcp(v, (*path, str(k)))
    elif isinstance(x, list) and _holds_mapping(x):
        for i, v in enumerate(x):
            yield from _walk_like_dcp(v, (*path, i))
    else:
        yield path, x


def _has_non_string_keys(x: object) -> bool:
    """Return whether a dict, or one inside it, has a key that is not a string, or is an instance of a dict class of
    `collections`."""
    items = list_mapping_items(x)
    if items is None:
        return isinstance(x, list) and any(map(_has_non_string_keys, x))
    return isinstance(x, Opaque) or any(type(k) is not str or _has_non_string_keys(v) for k, v in items)


def _holds_mapping(x: list[object]) -> bool:
    """Return whether a list holds a dict with a value in it, directly or in nested lists.

    Torch takes a list with empty dicts apart, too, but writes nothing of them; when it loads, it leaves them out of the
    job's state before it looks for keys, and asks for the list as one entry.
    """
    return any(
        _holds_mapping(v) if isinstance(v, list) else list_mapping_items(v) is not None and any(_walk_like_dcp(v, ()))
        for v in x
    )


def _holds_array(x: object) -> bool:
    """Return whether a value holds an `Inline` tensor, at any depth."""
    todo = [x]
    while todo:
        v = todo.pop()
        if isinstance(v, Inline):
            return True
        todo.extend(list_children(v))
    return False


def _is_optimizer_state(path: Path, x: object, has_groups: bool) -> bool:
    """Return whether a value at `path` is the state of an optimizer that numbers its parameters, {0: {"exp_avg": ...}},
    to which names are given later: with param groups beside it (`has_groups`), or with tensors for every number."""
    return (
        isinstance(x, dict)
        and bool(x)
        and path[-1:] == ("state",)
        and all(type(k) is int for k in x)
        and all(isinstance(v, dict) for v in x.values())
        and (has_groups or all(any(isinstance(t, StoredTensor) for t in v.values()) for v in x.values()))
    )


def inline_tensors(x: object, read_at: ReadAt, what: str, most: int = 64 << 20) -> Any:
    """Return a value with each StoredTensor in it replaced by an `Inline` tensor, whose bytes are read, and each `Size`
    by the call that torch pickles.

    Args:
        x: the value.
        read_at: reads bytes (offset, length) of the file.
        what: names the value in messages.
        most: the largest total size of the tensors in bytes.

    Raises:
        Unsupported: they are larger, or the value holds a storage that no tensor is made of.
        Corrupt: their storage does not match its CRC32.
    """
    total = sum(max(t.storage.length, prod(t.shape) * ITEMSIZE[t.dtype]) for t in iter_tensors(x, what))
    if total > most:
        raise Unsupported(
            f"{what}: {total} bytes of tensors inside a container that is not a dict or list of tensors.",
            code="CKPT0307",
        )

    def one(t: StoredTensor) -> Inline:
        """Read the bytes of one tensor.

        Raises:
            Corrupt: its storage does not match its CRC32.
        """
        whole = read_at(t.storage.offset, t.storage.length)
        if t.storage.crc32 is not None and crc32(whole) != t.storage.crc32:
            raise Corrupt(f"{what}: a tensor inside it does not match its CRC32; the file is damaged.", code="CKPT0405")
        raw = whole[t.at : t.at + t.span]
        return Inline(t.dtype, t.shape, raw if t.contiguous else gather_strided(raw, t))

    return map_tensors(x, one, lambda size: Opaque(Global("torch", "Size"), (tuple(size),), call=True))


_NUMBERS = {"float64": "<d", "float32": "<f", "float16": "<e", "int64": "<q", "int32": "<i"}


def decode_number(dtype: str, data: bytes) -> float | int | None:
    """Decode the bytes of one element of float64, float32, float16, bfloat16, int64 or int32 as a Python number; None
    for any other dtype, or another number of bytes."""
    if dtype == "bfloat16" and len(data) == 2:
        dtype, data = "float32", b"\0\0" + data
    code = _NUMBERS.get(dtype)
    found: float | int | None = struct.unpack(code, data)[0] if code and len(data) == struct.calcsize(code) else None
    return found


def gather_strided(raw: bytes, t: StoredTensor) -> bytes:
    """Return the elements of a strided tensor as row-major bytes.

    Args:
        raw: the bytes from the tensor's first element to the end of its last.
        t: the tensor.
    """
    import numpy as np

    item = ITEMSIZE[t.dtype]
    view = np.lib.stride_tricks.as_strided(
        np.frombuffer(raw, dtype=f"V{item}"), t.shape, tuple(s * item for s in t.strides), writeable=False
    )
    return np.ascontiguousarray(view).tobytes()
