"""Any layout into a live job's state dict: a StorageReader for `torch.distributed.checkpoint.load`.

    dcp.load(state_dict, storage_reader=ckpttool.storage_reader("runs/zero3"))

What drives it: torch's planner asks for one box of one tensor per local shard, since the metadata it is shown has one
chunk a tensor, the whole of it. The box is met with the chunks of the index (numpy, by columns), every part becomes
pieces of at most `_STAGE` bytes, and pieces that are neighbours in a file are read with one preadv: straight into the
target's memory where the bytes are contiguous in both and the dtype is the same, else into a staging buffer and from
there by `copy_`. So a rank reads what it needs, and no more than `_GAP` bytes in vain at a time.

Invariants. Nothing of a checkpoint is unpickled: values are the inert data of `pickles`, checked to be plain, and
travel to torch's planner in pickles that were made here. Whatever can be known before a byte is written is checked
before: names, classes of values, framing, bounds. A name that means two things is an error, never a guess.

Items of DCP are looked into (`Layout.locate`) only where this rank needs them, since a look costs more than the read.

Sources: torch/distributed/checkpoint/{storage,default_planner,planner_helpers,state_dict_loader}.py (2.10 to 2.13).
"""

from __future__ import annotations

import ctypes
import heapq
import io
import os
import re
import threading
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..engine import conversion, mixups
from ..engine.fill import Progress, silent, tensor_digests
from ..engine.recorded import other_digests
from ..engine.stream import Decoder
from ..errors import CkpttoolError, Corrupt, SourceChanged, Unsupported
from ..extras import need
from ..formats.pickles import Global, Opaque
from ..formats.torch_zip import Inline, ZipRecord, zip_records
from ..index import boxes
from ..index.checkpoint import ITEMSIZE, Checkpoint, Chunk, Chunks, Extent, TensorEntry, Value, joined
from ..index.names import COUNTERS, ROLES, WRAPPERS, original
from ..layouts import Layout
from ..storage.source import Source

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LiveReader", "Names", "Wanted", "lossless", "plain", "storage_reader", "torch_dtype"]

_STAGE = 32 << 20  # bytes of one staging buffer, and the most that one read asks for
_GAP = 16 << 10  # bytes that are read in vain rather than with another call
_LONG_RUN = 64 << 10  # a run of this length is worth a read of its own into its place
_VECTORS = 512  # ranges of memory in one preadv; IOV_MAX is 1024


# ------------------------------------------------------------------------------------------------------------ names


class Names:
    """What a live job may call the entries of a checkpoint; `find` gives canonical names.

    In this order, and never a choice between two: the canonical name or the name that the source itself had; then
    another word for a component ("optimizer.", "model_state_dict."), a counter at the root ("step"), a bare FQN,
    wrapper prefixes inside FQNs, one wrapper key in front of all ("app.model."), and per-parameter options of an
    optimizer that was flattened ("param_groups.<fqn>.lr"), which the group that lists the parameter answers.
    """

    def __init__(self, ckpt: Checkpoint) -> None:
        entries: dict[str, TensorEntry | Value] = {**ckpt.tensors, **ckpt.values}
        self._entries = entries
        self._own: dict[str, str] = {}
        self._groups: dict[str, set[str]] = {}
        for name, entry in entries.items():
            if entry.path[0] not in ("model", "optim"):
                self._own[joined(original(entry.path, ckpt.origin))] = name
            elif entry.path[:2] == ("optim", "param_groups") and entry.path[3:] == ("params",):
                members = entry.data if isinstance(entry, Value) else None
                for fqn in members if isinstance(members, list) else ():
                    self._groups.setdefault(str(fqn), set()).add(str(entry.path[2]))
        self._memo: dict[str, tuple[str, str] | None] = {}

    def find(self, asked: str) -> str | None:
        """The canonical name of what is asked for, None where the checkpoint has nothing of that name.

        Raises:
            Unsupported: it could be one of several.
        """
        if asked not in self._memo:
            found = {name: "" for name in (asked, self._own.get(asked, "")) if name in self._entries}
            if not found:
                found = {name: way for name, way in self._aliases(asked) if name in self._entries}
            if len(found) > 1:
                raise Unsupported(
                    f'"{asked}" can mean {" or ".join(map(repr, sorted(found)))} of this checkpoint. Ask for it by one '
                    "of these names."
                )
            self._memo[asked] = next(iter(found.items()), None)
        known = self._memo[asked]
        return known[0] if known else None

    def agree(self, asked: Iterable[str]) -> None:
        """Prove that names which were asked for together were understood in one way.

        Raises:
            Unsupported: two names mean one tensor, or model and optimizer were found under different wrapper keys.
        """
        meaning: dict[str, str] = {}
        ways: dict[str, str] = {}
        for name in asked:
            found = self.find(name)
            if found is None or not isinstance(self._entries[found], TensorEntry):
                continue
            other = meaning.setdefault(found, name)
            if other != name:
                raise Unsupported(
                    f'"{other}" and "{name}" both mean "{found}" of this checkpoint; one of them would get the wrong '
                    "tensor. Put the model under the key \"model\", as in {'model': ..., 'optim': ...}."
                )
            ways.setdefault((self._memo[name] or ("", ""))[1], name)
        wrapped = [w for w in ways if w.startswith("key ")]
        if len(wrapped) > 1 or (wrapped and "bare" in ways):
            said = ", ".join(f'"{ways[w]}"' for w in [*wrapped, *(w for w in ("bare",) if w in ways)])
            raise Unsupported(
                f"the names {said} are found in this checkpoint only if different keys in front of them are left out. "
                "Ask for the parts of the model under their names in the checkpoint."
            )

    def _aliases(self, asked: str) -> Iterator[tuple[str, str]]:
        top, _, rest = asked.partition(".")
        yield from ((n, "") for n in self._spelled(asked))
        if top in COUNTERS:
            yield f"trainer.{asked}", ""
        yield from ((n, "bare") for n in self._within("model", asked))
        if top in ("state", "param_groups"):
            yield from ((n, "") for n in self._within("optim", asked))
        if ROLES.get(rest.partition(".")[0]) in ("model", "optim"):
            yield from ((n, f"key {top}") for n in self._spelled(rest))

    def _spelled(self, name: str) -> Iterator[str]:
        top, _, rest = name.partition(".")
        role = ROLES.get(top)
        if role and rest:
            yield from self._within(role, rest)
            if role == "optim" and rest.startswith("0."):  # Lightning's list of optimizers, of one
                yield from self._within(role, rest[2:])

    def _within(self, role: str, rest: str) -> Iterator[str]:
        yield f"{role}.{rest}"
        if role == "model":
            yield from (f"model.{fqn}" for fqn in _cleaned(rest))
        elif role == "optim" and rest.startswith("state."):
            yield from (f"optim.state.{fqn}" for fqn in _cleaned(rest[len("state.") :]))
        elif role == "optim" and rest.startswith("param_groups."):
            fqn, _, key = rest[len("param_groups.") :].rpartition(".")
            for name in (fqn, *_cleaned(fqn)):
                yield from (f"optim.param_groups.{i}.{key}" for i in self._groups.get(name, ()))


def _cleaned(fqn: str) -> Iterator[str]:
    """The FQN without what wrappers put into it, and also without DDP's "module."."""
    *path, last = fqn.split(".")
    kept = [p for p in path if p not in WRAPPERS]
    yield ".".join([*kept, last])
    if kept[:1] == ["module"]:
        yield ".".join([*kept[1:], last])


# ----------------------------------------------------------------------------------------------------------- values


def plain(x: Any, name: str) -> Any:
    """A value as objects that torch's planner may be given: plain data, and real numpy arrays and torch constants.

    Only bytes and numbers of the checkpoint take part: an array is made of its dtype, its shape and its bytes.

    Raises:
        Unsupported: an instance of any other class.
    """
    if x is None or type(x) in (int, float, str, bool, bytes, complex):
        return x
    if isinstance(x, bytearray):
        return bytearray(x)
    if isinstance(x, Inline):
        import torch

        if not x.data:
            return torch.empty(x.shape, dtype=torch_dtype(x.dtype))
        return torch.frombuffer(bytearray(x.data), dtype=torch_dtype(x.dtype)).reshape(x.shape)
    if isinstance(x, Global):
        import torch

        found = getattr(torch, x.name, None) if x.module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise _foreign(x, name)
    if isinstance(x, Opaque):
        return _known_class(x, name)
    if isinstance(x, dict):
        return {plain(k, name): plain(v, name) for k, v in x.items()}
    if type(x) in (list, tuple, set, frozenset):
        return type(x)(plain(v, name) for v in x)
    raise Unsupported(f'"{name}" holds a {type(x).__name__}, which cannot be given to a job.')


def _foreign(cls: object, name: str) -> Unsupported:
    return Unsupported(
        f'"{name}" holds an instance of {cls}. ckpttool builds no object of a class that a checkpoint names, so this '
        "entry cannot be given to a job. Leave its key out of what is loaded."
    )


def _known_class(x: Opaque, name: str) -> Any:
    import numpy as np

    cls, args = x.cls, x.args
    try:
        if cls.module == "numpy" and cls.name == "dtype":
            return _numpy_dtype(x)
        if cls.module in ("numpy.core.multiarray", "numpy._core.multiarray") and cls.name == "scalar":
            dtype = _numpy_dtype(args[0])
            return np.frombuffer(_bytes(args[1], dtype.itemsize), dtype)[0]
        if cls.name == "_reconstruct" and args and args[0] == Global("numpy", "ndarray"):
            _, shape, described, column_major, data = x.state
            return _array(data, _numpy_dtype(described), shape, "F" if column_major else "C")
        if cls.name == "_frombuffer" and cls.module.startswith("numpy."):
            data, described, shape, order = args
            return _array(data, _numpy_dtype(described), shape, order)
        if cls.module == "torch" and cls.name in ("Size", "device"):
            import torch

            return torch.Size(map(_natural, args[0])) if cls.name == "Size" else torch.device(*map(_word, args))
    except (TypeError, ValueError, IndexError, RuntimeError):
        pass
    raise _foreign(cls, name)


def _numpy_dtype(x: Any) -> Any:
    """A dtype of plain numbers, from what numpy pickles."""
    import numpy as np

    if not isinstance(x, Opaque) or x.cls != Global("numpy", "dtype") or not re.fullmatch(r"[biufc]\d{1,2}", x.args[0]):
        raise ValueError
    order = x.state[1] if x.state is not None else "="
    if order not in ("<", ">", "|", "="):
        raise ValueError
    return np.dtype(order + x.args[0])


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    import numpy as np

    if order not in ("C", "F") or not isinstance(shape, tuple):
        raise ValueError
    raw = _bytes(data, prod(map(_natural, shape)) * dtype.itemsize)
    return np.frombuffer(raw, dtype).reshape(shape, order=order).copy(order="K")


def _bytes(data: Any, n: int) -> bytes:
    if not isinstance(data, (bytes, bytearray)) or len(data) != n:
        raise ValueError
    return bytes(data)


def _natural(n: Any) -> int:
    if type(n) is not int or n < 0:
        raise ValueError
    return n


def _word(x: Any) -> Any:
    if type(x) not in (str, int):
        raise ValueError
    return x


def torch_dtype(name: str) -> Any:
    """torch's dtype of that name."""
    import torch

    return getattr(torch, name)


def lossless(source: str, target: str) -> bool:
    """Whether every number of one dtype is a number of the other; the names are torch's."""
    import torch

    if source in (target, "bool"):
        return True
    a, b = torch_dtype(source), torch_dtype(target)
    if b is torch.bool or (a.is_complex and not b.is_complex):
        return False
    a, b = (d.to_real() if d.is_complex else d for d in (a, b))
    if a.is_floating_point:
        if not b.is_floating_point:
            return False
        x, y = torch.finfo(a), torch.finfo(b)
        return bool(x.eps >= y.eps and x.max <= y.max and x.smallest_normal >= y.smallest_normal)
    whole = torch.iinfo(a)
    if b.is_floating_point:
        return bool(whole.max <= 2 / torch.finfo(b).eps)
    return bool(torch.iinfo(b).min <= whole.min and whole.max <= torch.iinfo(b).max)


# ----------------------------------------------------------------------------------------------------------- pieces


@dataclass(slots=True)
class _Piece:
    """Bytes of one file that go to one place: `memory` itself, or by way of a buffer to `target`.

    In the buffer the elements of the target are `strides` apart. With `every`, the bytes are not one range but runs of
    `run` bytes, `every` apart in the file, which lie packed in the buffer.
    """

    file: int
    offset: int
    length: int
    memory: memoryview | None
    target: Tensor
    dtype: str
    strides: tuple[int, ...] = ()
    run: int = 0
    every: int = 0


def _memory(t: Tensor, a: int, n: int) -> memoryview:
    """Bytes [a, a + n) of the memory of a contiguous CPU tensor, which the caller keeps."""
    return memoryview((ctypes.c_char * n).from_address(t.data_ptr() + a)).cast("B")


def _is_plain_memory(t: Tensor) -> bool:
    import torch

    return type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type == "cpu" and t.is_contiguous()


class _Cutter:
    """Cuts parts of tensors into pieces."""

    def __init__(self, file: int, dtype: str, same: bool, stage: int) -> None:
        self.file, self.dtype, self.same, self.stage = file, dtype, same, stage
        self.item = ITEMSIZE[dtype]

    def pieces(self, offset: int, shape: tuple[int, ...], steps: tuple[int, ...], target: Tensor) -> Iterator[_Piece]:
        """Pieces of a box whose first element is at `offset` and whose elements are `steps` apart in the file."""
        order = sorted(range(len(shape)), key=lambda d: -steps[d])
        if order != list(range(len(shape))):
            shape, steps = tuple(shape[d] for d in order), tuple(steps[d] for d in order)
            target = target.permute(order)
        yield from self._cut(offset, shape, steps, target)

    def _cut(self, offset: int, shape: tuple[int, ...], steps: tuple[int, ...], target: Tensor) -> Iterator[_Piece]:
        if boxes.is_row_major(shape, steps):
            yield from self._flat(offset, shape, target)
            return
        n, step, inner, inner_steps = shape[0], steps[0], shape[1:], steps[1:]
        if n == 1:
            yield from self._cut(offset, inner, inner_steps, target[0])
            return
        width = boxes.span(inner, inner_steps)
        packed = boxes.is_row_major(inner, inner_steps)
        run = prod(inner) * self.item
        if step == 0:  # one row stands for all
            if width * self.item <= self.stage:
                yield self._span(offset, width, shape, steps, target)
            else:
                for i in range(n):
                    yield from self._cut(offset, inner, inner_steps, target[i])
        elif (step - width) * self.item > _GAP or width * self.item > self.stage:
            if packed and run < _LONG_RUN:
                most = max(1, self.stage // run)
                for a in range(0, n, most):
                    k = min(most, n - a)
                    yield _Piece(
                        self.file, offset + a * step * self.item, k * run, None, target[a : a + k], self.dtype,
                        boxes.strides((k, *inner)), run, step * self.item,
                    )  # fmt: skip
            else:
                for i in range(n):
                    yield from self._cut(offset + i * step * self.item, inner, inner_steps, target[i])
        else:
            most = 1 + (self.stage // self.item - width) // step
            for a in range(0, n, most):
                k = min(most, n - a)
                at = offset + a * step * self.item
                yield self._span(at, (k - 1) * step + width, (k, *inner), steps, target[a : a + k])

    def _span(self, offset: int, n: int, shape: tuple[int, ...], steps: tuple[int, ...], target: Tensor) -> _Piece:
        return _Piece(self.file, offset, n * self.item, None, target, self.dtype, steps)

    def _flat(self, offset: int, shape: tuple[int, ...], target: Tensor) -> Iterator[_Piece]:
        n = prod(shape) * self.item
        if self.same and _is_plain_memory(target):
            for a in range(0, n, _STAGE):
                k = min(_STAGE, n - a)
                yield _Piece(self.file, offset + a, k, _memory(target, a, k), target, self.dtype)
            return
        for start, size in boxes.slabs(shape, max(1, self.stage // self.item)):
            at = offset + boxes.flat_start(shape, start) * self.item
            yield _Piece(
                self.file, at, prod(size) * self.item, None, _part(target, start, size), self.dtype, boxes.strides(size)
            )


def _part(t: Tensor, start: Sequence[int], size: Sequence[int]) -> Tensor:
    for d, (a, k) in enumerate(zip(start, size, strict=True)):
        if k != t.shape[d]:
            t = t.narrow(d, a, k)
    return t


def _grouped(pieces: Iterable[_Piece], stage: int) -> Iterator[list[_Piece]]:
    """Pieces that are read with one call: neighbours in a file, in order, as many as one staging buffer takes."""
    group: list[_Piece] = []
    end = total = 0
    for p in sorted(pieces, key=lambda p: (p.file, p.offset)):
        fits = (
            group
            and not p.every
            and not group[-1].every
            and p.file == group[0].file
            and 0 <= p.offset - end <= _GAP
            and total + p.length + 16 <= stage
            and len(group) < _VECTORS // 2
        )
        if group and not fits:
            yield group
            group, total = [], 0
        group.append(p)
        end = p.offset + p.length
        total += p.length + 16
    if group:
        yield group


class _Filler:
    """Reads pieces into their places, with a few threads; each has its own staging buffers."""

    def __init__(self, source: Source, files: Sequence[str], threads: int, stage: int) -> None:
        self.source, self.files, self.threads, self.stage = source, files, threads, stage
        self.bytes_read = 0
        self._local = threading.local()
        self._lock = threading.Lock()
        self._streams: dict[Any, Any] = {}
        self._events: list[Any] = []

    def run(self, pieces: list[_Piece], progress: Progress | None) -> None:
        """Fill all of them; everything has arrived when it returns.

        Raises:
            Corrupt: bytes cannot be read. SourceChanged: a file became shorter.
        """
        import torch

        for device in {p.target.device for p in pieces if p.target.device.type == "cuda"}:
            self._streams[device] = torch.cuda.current_stream(device)  # the copies come after what the job has queued
        groups, total = list(_grouped(pieces, self.stage)), sum(p.length for p in pieces)
        try:
            if self.threads == 1 or len(groups) == 1:
                for group in groups:
                    self._group(group)
                    if progress is not None:
                        progress("load", min(self.bytes_read, total), total)
            else:
                with ThreadPoolExecutor(self.threads, "ckpttool-load") as pool:
                    for done in [pool.submit(self._group, group) for group in groups]:
                        done.result()
                        if progress is not None:
                            progress("load", min(self.bytes_read, total), total)
        finally:
            for event in self._events:
                event.synchronize()

    def _group(self, group: list[_Piece]) -> None:
        import torch

        device = next((p.target.device for p in group if p.target.device.type == "cuda"), None)
        staged = [p for p in group if p.memory is None]
        buffer, slot = self._buffer(device, sum(p.length + 16 for p in staged)) if staged else (None, None)
        places: list[memoryview] = []
        at: list[int] = []
        used = 0
        for p in group:
            if p.memory is None:
                at.append(used)
                assert buffer is not None
                places.append(_memory(buffer, used, p.length))
                used += -(-p.length // 16) * 16
            else:
                places.append(p.memory)
        if group[0].every:
            self._runs(group[0], places[0])
        else:
            self._ranges(group, places)
        with torch.no_grad():
            if device is not None:
                with torch.cuda.stream(self._streams[device]):
                    for p, a in zip(staged, at, strict=True):
                        self._hand_over(p, buffer, a)
                    if slot is not None:
                        slot.record()
            else:
                for p, a in zip(staged, at, strict=True):
                    self._hand_over(p, buffer, a)

    def _hand_over(self, p: _Piece, buffer: Any, a: int) -> None:
        """From the buffer to the target. On a GPU the bytes go there as they are and are put in order there."""
        raw = buffer[a : a + p.length]
        if p.target.device.type == "cuda":
            raw = raw.to(p.target.device, non_blocking=True)
        p.target.copy_(raw.view(torch_dtype(p.dtype)).as_strided(p.target.shape, p.strides))

    def _buffer(self, device: Any, n: int) -> tuple[Any, Any]:
        """A staging buffer of this thread and, for a GPU, the event after which it may be used again."""
        import torch

        if device is None:
            known = getattr(self._local, "buffer", None)
            if known is None or known.numel() < n:
                known = self._local.buffer = torch.empty(n, dtype=torch.uint8)
            return known, None
        ring = self._local.__dict__.setdefault("ring", {}).setdefault(device, [])
        if len(ring) < 2:
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            with self._lock:
                self._events.append(event)
            ring.append((torch.empty(max(n, self.stage), dtype=torch.uint8, pin_memory=True), event))
        else:
            ring.append(ring.pop(0))  # the one that was handed over longest ago
            ring[-1][1].synchronize()
            if ring[-1][0].numel() < n:
                ring[-1] = (torch.empty(n, dtype=torch.uint8, pin_memory=True), ring[-1][1])
        return ring[-1][0], ring[-1][1]

    def _ranges(self, group: list[_Piece], places: list[memoryview]) -> None:
        """Read the ranges of neighbours, and what lies between them in vain."""
        views: list[memoryview] = []
        end = group[0].offset
        for p, place in zip(group, places, strict=True):
            if p.offset > end:
                views.append(memoryview(bytearray(p.offset - end)))
            views.append(place)
            end = p.offset + p.length
        self._read(group[0].file, group[0].offset, views)

    def _runs(self, p: _Piece, place: memoryview) -> None:
        for i in range(p.length // p.run):
            self._read(p.file, p.offset + i * p.every, [place[i * p.run : (i + 1) * p.run]])

    def _read(self, file: int, offset: int, views: list[memoryview]) -> None:
        name, left = self.files[file], sum(map(len, views))
        if not self.source.local:
            together = memoryview(self.source.read(name, offset, left)) if len(views) > 1 else None
            for view in views:
                if together is None:
                    self.source.readinto(name, offset, view)
                else:
                    view[:], together = together[: len(view)], together[len(view) :]
            self.bytes_read += left
            return
        with self.source.using(name) as fd:
            while left:
                try:
                    n = os.preadv(fd, views, offset)
                except OSError as e:
                    raise Corrupt(f"{os.path.join(self.source.root, name)}: byte {offset}: {e.strerror}.") from e
                if not n:
                    raise SourceChanged(
                        f"{os.path.join(self.source.root, name)} became shorter while it was read: it has no byte "
                        f"{offset}. Wait until it is written, or fetch it again."
                    )
                self.bytes_read += n
                left -= n
                offset += n
                while views and n >= len(views[0]):
                    n -= len(views.pop(0))
                if n:
                    views[0] = views[0][n:]


def _threads() -> int:
    """Reader threads of one rank: two to four where the machine has the cores for them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
    return max(1, min(4, cores // ranks))


# ---------------------------------------------------------------------------------------------------------- reading


class Wanted(NamedTuple):
    """A box of a tensor and where it goes."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    target: Tensor


class _Share(NamedTuple):
    """The tensors whose recorded digests one rank compares."""

    names: Sequence[str]


class _Frame:
    """What stands around the data of one torch.save item, to be found around others without reading it again.

    The same framing means the same tensor: same pickle, same directory, same places. What may differ are the CRC32s of
    the data and of the serialization id, and that id, a hash of the data that torch writes and nobody reads.
    """

    def __init__(self, source: Source, file: str, item: Extent, found: Chunk) -> None:
        records = zip_records(lambda at, n: source.read(file, at, n), item.offset, item.length, file)
        data = [r for r in records.values() if r.name.startswith("data/")]
        if len(data) != 1:
            raise Unsupported(f"{file}: an item with {len(data)} storages.")
        self.at, self.length, self.strides = found.extent.offset - item.offset, found.extent.length, found.strides
        self._data = (data[0].offset - item.offset, data[0].offset - item.offset + data[0].length)
        self._blank: list[tuple[int, int]] = []  # where other bytes may stand
        self._sums: list[list[int]] = []  # for each such record, where its CRC32 stands
        around = self._read(source, file, item)
        for record in (*data, *(r for r in records.values() if r.name == ".data/serialization_id")):
            self._sums.append([p for p in self._checksums(around, record) if _is_at(around, p, record.crc32)])
            self._blank += [(p, 4) for p in self._sums[-1]]
            if record is not data[0]:
                self._blank.append((self._inside(record.offset - item.offset), record.length))
        pickled = records["data.pkl"]
        first = self._inside(pickled.offset - item.offset)
        if any(a < first + pickled.length and first < a + n for a, n in self._blank):
            raise Unsupported(f"{file}: a header inside the pickle.")
        self._same = self._blanked(around)

    def _inside(self, at: int) -> int:
        """Where a byte of the item is among those around its data."""
        return at if at < self._data[0] else at - (self._data[1] - self._data[0])

    def _read(self, source: Source, file: str, item: Extent) -> bytes:
        before, after = self._data
        return source.read(file, item.offset, before) + source.read(file, item.offset + after, item.length - after)

    def _checksums(self, around: bytes, record: ZipRecord) -> Iterator[int]:
        """Places of the CRC32 of a record: in its local header, in the directory, in the descriptor behind it."""
        for signature, header, crc, size in ((b"PK\x03\x04", 30, 14, 26), (b"PK\x01\x02", 46, 16, 28)):
            at = around.find(signature)
            while at >= 0:
                n = int.from_bytes(around[at + size : at + size + 2], "little")
                if around[at + header : at + header + n].partition(b"/")[2] == record.name.encode():
                    yield at + crc
                at = around.find(signature, at + 4)
        at = around.find(b"PK\x07\x08" + record.crc32.to_bytes(4, "little"))
        if at >= 0:
            yield at + 4

    def _blanked(self, around: bytes) -> bytes:
        out = bytearray(around)
        for a, n in self._blank:
            out[a : a + n] = bytes(n)
        return bytes(out)

    def fits(self, source: Source, file: str, item: Extent) -> bool:
        """Whether another item of the same length is framed so."""
        around = self._read(source, file, item)
        if any(len({around[p : p + 4] for p in places}) > 1 for places in self._sums):
            return False
        return self._blanked(around) == self._same


def _is_at(around: bytes, at: int, crc: int) -> bool:
    return around[at : at + 4] == crc.to_bytes(4, "little")


class LiveReader:
    """A checkpoint that is open for a job: names, values, boxes of tensors."""

    progress: Progress | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: conversion.OpenOptions,
        progress: Progress | None = None,
        ignore_recorded_digests: bool = False,
    ) -> None:
        opened = conversion.open_with(path, options)
        self.progress = progress
        self.path = os.fspath(path)
        self.source: Source = opened.source
        self.layout: Layout = opened.layout
        try:
            framed = any(t.coding != "raw" for t in opened.checkpoint.tensors.values())
            if not framed and self.layout.locate is not None:
                opened.locate()  # of such a layout, it is the names that `locate` finds
            before = len(opened.checkpoint.notes)
            opened.expect_recorded(ignore_recorded_digests)
            if not ignore_recorded_digests:
                for text in opened.checkpoint.notes[before:]:
                    warnings.warn(f"{os.fspath(path)}: {text}", stacklevel=2)
            self.ckpt: Checkpoint = opened.checkpoint
            self._refuse_mixups(opened, framed)
            self.names = Names(self.ckpt)
        except BaseException:
            self.source.close()
            raise
        self.bytes_read = self.bytes_checked = 0
        self._compared: set[str] = set()  # tensors that have the digest that was recorded of them
        self._located: dict[tuple[str, int], Chunk] = {}
        self._rows: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}

    def _refuse_mixups(self, opened: conversion.OpenCheckpoint, framed: bool) -> None:
        """What `OpenCheckpoint.locate` refuses of files of ranks. Of framed items, which are not all looked into, only steps are
        compared."""
        if not framed and not opened.allow_equal_ranks:
            mixups.refuse_equal_ranks(self.ckpt, self.source)
        if framed and not opened.allow_mixed_steps:
            some = {
                n: t for n, t in self.ckpt.tensors.items() if t.path[:2] == ("optim", "state") and t.path[-1] == "step"
            }
            assert self.layout.locate is not None  # which takes the framing off
            mixups.refuse_mixed_steps(self.layout.locate(replace(self.ckpt, tensors=some), self.source), self.source)

    # -------------------------------------------------------------------------------------------------- what is there

    def entry(self, asked: str) -> tuple[str, TensorEntry | Value]:
        """The canonical name and the entry of a name that was found before."""
        name = self.names.find(asked)
        if name is None:
            raise Unsupported(f'"{asked}" is not in {self.path}.')
        return name, self.ckpt.tensors.get(name) or self.ckpt.values[name]

    def value(self, name: str) -> Any:
        """A value, as plain data."""
        return plain(self.ckpt.values[name].data, name)

    @staticmethod
    def is_scalar_state(entry: TensorEntry | Value) -> bool:
        """Whether it is a number of an optimizer's state, which some optimizers keep as such, others as a tensor."""
        if entry.path[:2] != ("optim", "state"):
            return False
        if isinstance(entry, TensorEntry):
            return not entry.shape
        return type(entry.data) in (int, float)

    # ---------------------------------------------------------------------------------------------------- where it is

    def rows(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
        """The chunks of a tensor that have elements of a box."""
        known = self._rows.get((name, start, shape))
        if known is None:
            known = self._rows[name, start, shape] = _rows_meeting(self.ckpt.tensors[name], start, shape)
        return known

    def prepare(self, wanted: Iterable[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> None:
        """Look into the framing of all chunks that (canonical name, start, shape) need.

        Of items that have one dtype, shape and length, the layout looks into the first. Another whose framing is the
        same, byte for byte but for the checksums of its own data, needs no look of its own; any other gets one.
        """
        alike: dict[tuple[Any, ...], list[tuple[str, int]]] = {}
        for name, start, shape in wanted:
            entry = self.ckpt.tensors[name]
            if entry.coding == "raw":
                continue
            for k in self.rows(name, start, shape):
                if (name, k) not in self._located:
                    chunk = entry.chunks[k]
                    kind = (entry.coding, entry.dtype, chunk.shape, chunk.extent.length)
                    alike.setdefault(kind, []).append((name, k))
        self._look([same[0] for same in alike.values()])
        others: list[tuple[str, int]] = []
        for (coding, *_), same in alike.items():
            rest = [at for at in dict.fromkeys(same) if at not in self._located]
            frame = self._frame(*same[0]) if rest and coding == "torch.save" else None
            for name, k in rest:
                chunk = self.ckpt.tensors[name].chunks[k]
                if frame is None or not frame.fits(self.source, self.ckpt.files[chunk.extent.file], chunk.extent):
                    others.append((name, k))
                    continue
                found = chunk._replace(
                    extent=chunk.extent._replace(offset=chunk.extent.offset + frame.at, length=frame.length),
                    strides=frame.strides,
                )
                self._sound(name, self.ckpt.tensors[name].dtype, found)
                self._located[name, k] = found
        self._look(others)

    def _look(self, places: Iterable[tuple[str, int]]) -> None:
        """Let the layout look into some chunks."""
        rows: dict[str, set[int]] = {}
        for name, k in places:
            rows.setdefault(name, set()).add(k)
        if not rows:
            return
        some: dict[str, TensorEntry] = {}
        for name, ks in rows.items():
            entry = self.ckpt.tensors[name]
            some[name] = replace(entry, chunks=Chunks.of(len(entry.shape), (entry.chunks[k] for k in sorted(ks))))
        assert self.layout.locate is not None  # only such a layout frames its items
        found = self.layout.locate(replace(self.ckpt, tensors=some, records=[]), self.source)
        for name, ks in rows.items():
            for k, chunk in zip(sorted(ks), found.tensors[name].chunks, strict=True):
                self._sound(name, found.tensors[name].dtype, chunk)
                self._located[name, k] = chunk

    def _frame(self, name: str, k: int) -> _Frame | None:
        """The framing of an item that was looked into, None where it is not that of a zip."""
        item, found = self.ckpt.tensors[name].chunks[k].extent, self._located[name, k]
        file = self.ckpt.files[item.file]
        try:
            return _Frame(self.source, file, item, found)
        except CkpttoolError:
            return None  # a safetensors file, say

    def _sound(self, name: str, dtype: str, chunk: Chunk) -> None:
        """What `index.check` proves of a chunk, for one that was found after it ran."""
        file, offset, length = chunk.extent
        item = ITEMSIZE[dtype]
        want = (boxes.span(chunk.shape, chunk.strides) if chunk.strides else prod(chunk.shape)) * item
        if offset < 0 or offset + length > self.source.size(self.ckpt.files[file]):
            raise Corrupt(
                f'{self.ckpt.files[file]}: "{name}" needs bytes {offset}..{offset + length}; the file ends before.'
            )
        if chunk.zstd is None and length != want:
            raise Corrupt(
                f'{self.ckpt.files[file]}: a chunk of "{name}" is {length} bytes long, but {want} are needed.'
            )

    # ---------------------------------------------------------------------------------------------------------- bytes

    def fill(self, wanted: Sequence[Wanted], compare: Iterable[str] | None = None) -> None:
        """Read every box into its target, and compare the digests of whole tensors with those that were recorded.

        Args:
            compare: canonical names of the tensors to compare; all where None. Of these, a tensor of which the target holds
                every byte is hashed there, without reading it again. `check_recorded` is for the others.

        Raises:
            Corrupt, SourceChanged: bytes are missing, damaged or not those of before.
        """
        import torch

        self.prepare((w.name, w.start, w.shape) for w in wanted)
        threads = _threads()
        on_gpu = any(w.target.device.type == "cuda" for w in wanted)
        stage = min(_STAGE, 8 << 20) if on_gpu else _STAGE
        pieces: list[_Piece] = []
        folded: list[tuple[Wanted, Chunk]] = []
        written: list[Tensor] = []
        changed: dict[str, tuple[str, str]] = {}
        for w in wanted:
            entry = self.ckpt.tensors[w.name]
            dtype = str(w.target.dtype).removeprefix("torch.")
            if not lossless(entry.dtype, dtype):
                changed[w.name] = (entry.dtype, dtype)
            kind, target = entry.dtype, w.target
            if entry.dtype == dtype and ITEMSIZE[dtype] == 1:  # as bytes: not every kernel knows every such dtype
                kind, target = "uint8", target.view(torch.uint8)
            written.append(target)
            for k in self.rows(w.name, w.start, w.shape):
                chunk: Chunk = self._located[w.name, k] if entry.coding != "raw" else entry.chunks[k]
                both = boxes.meet((chunk.start, chunk.shape), (w.start, w.shape))
                if both is None:
                    continue
                place = _part(target, tuple(a - b for a, b in zip(both[0], w.start, strict=True)), both[1])
                if chunk.zstd is not None:
                    folded.append((w._replace(start=both[0], shape=both[1], target=place), chunk))
                    continue
                steps = chunk.strides or boxes.strides(chunk.shape)
                inside = sum((a - b) * s for a, b, s in zip(both[0], chunk.start, steps, strict=True))
                cutter = _Cutter(chunk.extent.file, kind, entry.dtype == dtype, stage)
                pieces += cutter.pieces(chunk.extent.offset + inside * cutter.item, both[1], steps, place)
        filler = _Filler(self.source, self.ckpt.files, threads, stage)
        try:
            filler.run(pieces, self.progress)
        finally:
            self.bytes_read += filler.bytes_read
        for w, chunk in folded:
            self._unfold(w, chunk)
        torch.autograd.graph.increment_version([t for t in written if not t.is_inference()])
        self.source.unchanged()
        self._compare_whole(wanted, self.ckpt.recorded if compare is None else frozenset(compare))
        self._rows.clear()
        if changed:
            first, (a, b) = next(iter(changed.items()))
            warnings.warn(
                f'{len(changed)} tensors of {self.path} were rounded to the dtype that the job has: "{first}" is {a} '
                f"there and {b} in the job.",
                stacklevel=2,
            )

    def _compare_whole(self, wanted: Sequence[Wanted], names: Container[str]) -> None:
        """Hash the targets that hold all bytes of a tensor."""
        from blake3 import blake3

        found: dict[str, str] = {}
        for w in wanted:
            entry, target = self.ckpt.tensors[w.name], w.target
            if (
                w.name in self.ckpt.recorded
                and w.name in names
                and w.shape == entry.shape
                and str(target.dtype) == f"torch.{entry.dtype}"
                and _is_plain_memory(target)
            ):
                found[w.name] = blake3(_memory(target, 0, entry.nbytes) if entry.nbytes else b"").hexdigest()
        self._equal(found)

    def check_recorded(self, names: Iterable[str]) -> None:
        """Compare the digests of tensors with those that were recorded; what `fill` has not compared is read, whole.

        Raises:
            Corrupt: a tensor has another digest.
        """
        recorded = self.ckpt.recorded
        some = {n: self.ckpt.tensors[n] for n in names if n in recorded and n not in self._compared}
        if not some:
            return
        framed = {n: t for n, t in some.items() if t.coding != "raw"}
        if framed:
            assert self.layout.locate is not None
            some.update(self.layout.locate(replace(self.ckpt, tensors=framed, records=[]), self.source).tensors)
            for n in framed:
                for chunk in some[n].chunks:
                    self._sound(n, some[n].dtype, chunk)
        found = tensor_digests(some, self.source, self.ckpt.files, [], silent)
        self.bytes_checked += sum(t.nbytes for t in some.values())
        self.source.unchanged()
        self._equal(found)

    def _equal(self, found: Mapping[str, str]) -> None:
        recorded = self.ckpt.recorded
        wrong = [n for n, digest in found.items() if digest != recorded[n]]
        if wrong:
            raise other_digests(self.ckpt, wrong, len(found))
        self._compared.update(found)

    def _unfold(self, w: Wanted, chunk: Chunk) -> None:
        """A part of a compressed chunk: slabs of it are decompressed in order, up to the last one that is needed."""
        import torch

        assert chunk.zstd is not None
        entry = self.ckpt.tensors[w.name]
        file = self.ckpt.files[chunk.extent.file]
        dtype, target = torch_dtype(entry.dtype), w.target
        if target.dtype == torch.uint8 and ITEMSIZE[entry.dtype] == 1:
            dtype = torch.uint8
        at = tuple(a - b for a, b in zip(w.start, chunk.start, strict=True))
        what = f'{os.path.join(self.source.root, file)} ("{w.name}")'
        decoder = Decoder(self.source, file, chunk.extent, *chunk.zstd, what)
        buffer = torch.empty(min(_STAGE, prod(chunk.shape) * ITEMSIZE[entry.dtype]), dtype=torch.uint8)
        left, taken = prod(w.shape), 0
        for start, shape in boxes.slabs(chunk.shape, len(buffer) // ITEMSIZE[entry.dtype]):
            n = prod(shape) * ITEMSIZE[entry.dtype]
            decoder.take(_memory(buffer, 0, n))
            taken += prod(shape)
            both = boxes.meet((start, shape), (at, w.shape))
            if both is not None:
                slab = buffer[:n].view(dtype).reshape(shape)
                place = _part(target, tuple(a - b for a, b in zip(both[0], at, strict=True)), both[1])
                place.copy_(_part(slab, tuple(a - b for a, b in zip(both[0], start, strict=True)), both[1]))
                left -= prod(both[1])
            if not left:
                break
        if taken == prod(chunk.shape):
            decoder.close()  # compares the CRC32, which is of the whole
        self.bytes_read += chunk.extent.length


def _rows_meeting(entry: TensorEntry, start: Sequence[int], shape: Sequence[int]) -> list[int]:
    """The chunks of a tensor that have elements of a box."""
    import numpy as np

    c = entry.chunks
    if not c.ndim or len(c) == 1:
        return list(range(len(c)))
    first = np.frombuffer(c.start, "i8").reshape(-1, c.ndim)
    end = first + np.frombuffer(c.shape, "i8").reshape(-1, c.ndim)
    low, high = np.asarray(start), np.asarray(start) + np.asarray(shape)
    return [int(k) for k in np.flatnonzero((np.maximum(first, low) < np.minimum(end, high)).all(axis=1))]


# ------------------------------------------------------------------------------------------------------ for torch's


def storage_reader(
    path: str | os.PathLike[str],
    *,
    source_layout: str | None = None,
    config: str | None = None,
    like: str | os.PathLike[str] | None = None,
    flat_layout: str | os.PathLike[str] | None = None,
    wrap: Iterable[str] | None = None,
    tag: str | None = None,
    allow_equal_ranks: bool = False,
    allow_mixed_steps: bool = False,
    ignore_recorded_digests: bool = False,
    progress: Progress | None = None,
) -> Any:
    """A StorageReader of torch.distributed.checkpoint for a checkpoint in any layout.

    The arguments are those of `open`, and `progress`, which is called with ("load", bytes, bytes in all) of this rank.

    Where digests were recorded (ckpttool.json, or in the checkpoint itself), every tensor that is loaded is compared with
    its own, unless `ignore_recorded_digests`. A tensor that lies whole in the memory of one rank is hashed there. The
    others (sharded ones, and those on a GPU or in another dtype) are shared out among the ranks and read once more, so
    the job reads up to twice as many bytes, the second time mostly from the page cache. Where a digest differs, dcp.load
    fails on every rank, and the job's tensors are then partly overwritten.

    >>> dcp.load(state_dict, storage_reader=ckpttool.storage_reader("runs/step-1000"))             # doctest: +SKIP

    The index is read here, on every rank; each rank then reads the bytes of its own shards. Names are understood as
    `Names` says; one that is not in the checkpoint is missing in torch's eyes too (allow_partial_load, or its error).

    Raises:
        NotRecognised, Unsupported, Corrupt, Unsafe: as errors.py tells them apart. What goes wrong inside dcp.load
            comes in torch's CheckpointException.
    """
    need("loading into a live job", "torch")
    options = conversion.OpenOptions(
        source_layout=source_layout, config=config, like=like, flat_layout=flat_layout, wrap=wrap, tag=tag,
        allow_equal_ranks=allow_equal_ranks, allow_mixed_steps=allow_mixed_steps,
    )  # fmt: skip
    return _reader_class()(path, options, progress, ignore_recorded_digests)


@cache
def _reader_class() -> Any:
    """The class, made when torch is there."""
    import torch
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
    from torch.distributed.checkpoint.storage import StorageReader
    from torch.futures import Future

    class ByAnyName(dict[str, Any]):
        """Entries by canonical name; other names are looked up as `Names` understands them."""

        def __init__(self, names: Names) -> None:
            super().__init__()
            self.names = names

        def __contains__(self, asked: object) -> bool:
            return super().__contains__(asked) or (isinstance(asked, str) and self.names.find(asked) is not None)

        def __missing__(self, asked: str) -> Any:
            found = self.names.find(asked)
            if found is None:
                raise KeyError(asked)
            return self[found]

        def get(self, asked: str, default: Any = None) -> Any:
            try:
                return self[asked]
            except KeyError:
                return default

    class AnyLayoutReader(StorageReader):
        """Reads a checkpoint that is not DCP, or is, for torch.distributed.checkpoint.load."""

        def __init__(
            self, path: str | os.PathLike[str], options: conversion.OpenOptions, progress: Progress | None, ignore: bool
        ) -> None:
            super().__init__()
            self._options, self._progress, self._ignore = options, progress, ignore
            self._open = LiveReader(path, options, progress, ignore)

        @property
        def checkpoint_id(self) -> str:
            """The path of the checkpoint."""
            return self._open.path

        @property
        def bytes_read(self) -> int:
            """Bytes of tensors that this rank has read so far."""
            return self._open.bytes_read

        @property
        def bytes_checked(self) -> int:
            """Bytes that this rank has read once more to compare digests."""
            return self._open.bytes_checked

        @property
        def opened(self) -> LiveReader:
            """The checkpoint behind it."""
            return self._open

        def reset(self, checkpoint_id: Any = None, *args: Any, **kwargs: Any) -> None:
            if checkpoint_id is not None and os.fspath(checkpoint_id) != self._open.path:
                self._open.source.close()
                self._open = LiveReader(checkpoint_id, self._options, self._progress, self._ignore)

        # No parameter is called kwargs: torch would take an error here for a missing .metadata and ask again.
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            ckpt = self._open.ckpt
            entries = ByAnyName(self._open.names)
            paths: dict[str, Any] = {}
            for name, value in ckpt.values.items():
                dict.__setitem__(entries, name, BytesStorageMetadata())
                paths[name] = value.path
            described: dict[
                Any, Any
            ] = {}  # one for all of a kind: a hundred thousand objects are a second for the collector
            for name, t in ckpt.tensors.items():
                kind = (t.dtype, t.shape)
                if self._open.is_scalar_state(t):  # a job that has a plain number there is right too
                    found: Any = BytesStorageMetadata()
                elif (found := described.get(kind)) is None:
                    size = torch.Size(t.shape)
                    found = described[kind] = TensorStorageMetadata(
                        TensorProperties(dtype=torch_dtype(t.dtype)),
                        size,
                        [ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
                    )
                dict.__setitem__(entries, name, found)
                paths[name] = t.path
            return Metadata(state_dict_metadata=entries, planner_data=paths)

        def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
            pass

        def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
            self._check(plan.items)
            return plan

        def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
            """On the coordinator alone: every rank is told, in its plan, which tensors it shall compare."""
            shares = self._shares([plan.items for plan in plans])
            return [replace(plan, storage_data=_Share(names)) for plan, names in zip(plans, shares, strict=True)]

        def _shares(self, items: Sequence[Sequence[ReadItem]]) -> list[list[str]]:
            """For every rank, the tensors with a recorded digest that it compares: one that it reads whole, or else an equal
            share of the bytes."""
            shares: list[list[str]] = [[] for _ in items]
            if not self._open.ckpt.recorded:
                return shares
            whole: dict[str, list[int]] = {}  # ranks that read all of it
            for rank, mine in enumerate(items):
                for item in mine:
                    name, entry = self._open.entry(item.storage_index.fqn)
                    if name in self._open.ckpt.recorded and isinstance(entry, TensorEntry):
                        ranks = whole.setdefault(name, [])
                        if item.type == LoadItemType.BYTE_IO or tuple(item.lengths) == entry.shape:
                            ranks.append(rank)
            tensors = self._open.ckpt.tensors
            load = [(0, rank) for rank in range(len(items))]
            for k, name in enumerate(sorted(whole, key=lambda n: -tensors[n].nbytes)):
                if whole[name]:
                    shares[whole[name][k % len(whole[name])]].append(name)
                else:
                    nbytes, rank = heapq.heappop(load)
                    shares[rank].append(name)
                    heapq.heappush(load, (nbytes + tensors[name].nbytes, rank))
            return shares

        def _check(self, items: Sequence[ReadItem]) -> None:
            """All that can be found out before a byte is written."""
            self._open.names.agree({item.storage_index.fqn for item in items})
            boxed: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
            for item in items:
                name, entry = self._open.entry(item.storage_index.fqn)
                if isinstance(entry, Value):
                    self._open.value(name)
                elif item.type == LoadItemType.BYTE_IO:
                    boxed.append((name, (), ()))
                else:
                    boxed.append((name, tuple(item.storage_offsets), tuple(item.lengths)))
            self._open.prepare(boxed)

        def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
            try:
                self._check(plan.items)
                share = plan.storage_data
                if not isinstance(
                    share, _Share
                ):  # a planner of its own that made a new plan: this rank sees to all it reads
                    share = _Share(self._shares([plan.items])[0])
                self._read(plan.items, planner, share)
                self._open.check_recorded(share.names)
            finally:
                self._open.source.close()
            done: Future[None] = Future()
            done.set_result(None)
            return done

        def _read(self, items: Sequence[ReadItem], planner: LoadPlanner, share: _Share) -> None:
            live = getattr(planner, "state_dict", None)
            live = live if isinstance(live, dict) else {}
            wanted: list[Wanted] = []
            commit: list[tuple[ReadItem, Tensor]] = []
            later: list[tuple[ReadItem, Tensor, Any]] = []
            for item in items:
                name, entry = self._open.entry(item.storage_index.fqn)
                if item.type != LoadItemType.BYTE_IO:
                    target = planner.resolve_tensor(item).detach()
                    wanted.append(Wanted(name, tuple(item.storage_offsets), tuple(item.lengths), target))
                    if tuple(target.shape) != tuple(item.lengths):
                        raise Unsupported(
                            f'"{item.dest_index.fqn}" has a place of shape {tuple(target.shape)} for a part of shape '
                            f"{tuple(item.lengths)}."
                        )
                    commit.append((item, target))
                    continue
                held = live.get(item.dest_index.fqn)
                if not self._open.is_scalar_state(entry):
                    planner.load_bytes(item, _saved(self._open.value(name)))
                elif isinstance(held, torch.Tensor):
                    if held.ndim:
                        raise Unsupported(
                            f'"{name}" is a number, but the job has a tensor of shape {tuple(held.shape)} there.'
                        )
                    none = torch.Size([])
                    whole = ReadItem(
                        LoadItemType.TENSOR, MetadataIndex(item.dest_index.fqn, none), none,
                        MetadataIndex(item.storage_index.fqn, none), none, none,
                    )  # fmt: skip
                    target = planner.resolve_tensor(whole).detach()
                    commit.append((whole, target))
                    if isinstance(entry, Value):
                        target.fill_(entry.data)
                    else:
                        wanted.append(Wanted(name, (), (), target))
                else:
                    number = torch.empty((), dtype=torch_dtype(getattr(entry, "dtype", "float32")))
                    if isinstance(entry, TensorEntry):
                        wanted.append(Wanted(name, (), (), number))
                    else:
                        number.fill_(entry.data)
                    later.append((item, number, held))
            self._open.fill(wanted, share.names)
            for item, target in commit:
                planner.commit_tensor(item, target)
            for item, number, held in later:
                planner.load_bytes(item, _saved(_like_held(number, held)))

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
            return os.path.exists(checkpoint_id)

        def __del__(self) -> None:
            opened = self.__dict__.get("_open")
            if opened is not None:
                opened.source.close()

    return AnyLayoutReader


def _saved(x: Any) -> io.BytesIO:
    """What torch's planner unpickles: a pickle made here, of data that was found to be plain."""
    import torch

    out = io.BytesIO()
    torch.save(x, out)
    out.seek(0)
    return out


def _like_held(number: Tensor, held: Any) -> Any:
    """A number of an optimizer's state as the job keeps it: a plain one where it does, else a 0-dim tensor."""
    if type(held) not in (int, float):
        return number
    x = number.item()
    return int(x) if type(held) is int and x == int(x) else x
