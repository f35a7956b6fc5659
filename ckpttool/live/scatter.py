"""Reads byte ranges of files into boxes of tensors that already exist.

`SlicePlanner` turns a box into pieces: byte ranges of at most `Tuning.stage_bytes`, each with its place. `TensorLoader`
sorts the pieces and reads neighbours in a file with one preadv, so that at most `Tuning.gap_bytes` unwanted bytes are
read between two pieces. Bytes go straight into the target's memory where they are contiguous in both and the dtype is
the same; otherwise they go into a staging buffer and from there by `copy_`, which also casts and crosses to a GPU.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..engine.copy.fill import Progress
from ..errors import Corrupt, SourceChanged
from ..index import boxes
from ..index.checkpoint import ITEMSIZE
from ..storage.source import Source
from .plain_values import to_torch_dtype

__all__ = ["ReadPiece", "SlicePlanner", "TensorLoader", "Tuning", "is_plain_memory", "view_box", "view_memory"]

_VECTORS = 512  # ranges of memory in one preadv; IOV_MAX is 1024


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How one rank reads.

    Args:
        stage_bytes: size of a staging buffer, and the most that one read asks for.
        gap_bytes: up to this many unwanted bytes are read rather than with another call.
        long_run_bytes: a run of contiguous bytes of this length gets a read of its own, straight into its place.
        threads: reader threads; None for two to four where the machine has the cores for them.
    """

    stage_bytes: int = 32 << 20
    gap_bytes: int = 16 << 10
    long_run_bytes: int = 64 << 10
    threads: int | None = None


@dataclass(slots=True)
class ReadPiece:
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


def view_memory(t: Tensor, a: int, n: int) -> memoryview:
    """Return a view of the bytes [a, a + n) of a contiguous CPU tensor's memory. The caller must keep the tensor
    alive."""
    return memoryview((ctypes.c_char * n).from_address(t.data_ptr() + a)).cast("B")


def is_plain_memory(t: Tensor) -> bool:
    """Whether a tensor is an ordinary CPU tensor or parameter with contiguous elements."""
    return type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type == "cpu" and t.is_contiguous()


class SlicePlanner:
    """Plans which byte ranges of one file make up a slice of a tensor."""

    def __init__(self, file: int, dtype: str, *, casts: bool, tuning: Tuning) -> None:
        """Keep the arguments.

        Args:
            file: number of the file, its position in the checkpoint's list of files.
            dtype: name of the dtype in the file, such as "bfloat16".
            casts: whether the target has another dtype than the tensor, so that bytes cannot go straight into its
                memory.
            tuning: how large a staging buffer and a single read may be.
        """
        self.file, self.dtype, self.casts, self.tuning = file, dtype, casts, tuning
        self.stage = tuning.stage_bytes
        self.item = ITEMSIZE[dtype]

    def pieces(
        self, offset: int, shape: tuple[int, ...], steps: tuple[int, ...], target: Tensor
    ) -> Iterator[ReadPiece]:
        """Yield the pieces of the file to read for a box of a tensor.

        Args:
            offset: byte of the file at which the first element of the box is.
            shape: shape of the box.
            steps: strides of the box in the file, in elements.
            target: a tensor of that shape, into which the box is read.
        """
        order = sorted(range(len(shape)), key=lambda d: -steps[d])
        if order != list(range(len(shape))):
            shape, steps = tuple(shape[d] for d in order), tuple(steps[d] for d in order)
            target = target.permute(order)
        yield from self._iterate_pieces(offset, shape, steps, target)

    def _iterate_pieces(
        self, offset: int, shape: tuple[int, ...], steps: tuple[int, ...], target: Tensor
    ) -> Iterator[ReadPiece]:
        """Yield the pieces of the file to read for a box whose dimensions are sorted by their strides, the largest
        first.

        Args:
            offset: byte of the file at which the first element of the box is.
            shape: shape of the box.
            steps: strides of the box in the file, in elements.
            target: a tensor of that shape, into which the box is read.
        """
        if boxes.is_row_major(shape, steps):
            yield from self._iterate_contiguous_pieces(offset, shape, target)
            return
        n, step, inner, inner_steps = shape[0], steps[0], shape[1:], steps[1:]
        if n == 1:
            yield from self._iterate_pieces(offset, inner, inner_steps, target[0])
            return
        width = boxes.span(inner, inner_steps)
        packed = boxes.is_row_major(inner, inner_steps)
        run = prod(inner) * self.item
        if step == 0:  # one row stands for all
            if width * self.item <= self.stage:
                yield self._make_spanning_piece(offset, width, shape, steps, target)
            else:
                for i in range(n):
                    yield from self._iterate_pieces(offset, inner, inner_steps, target[i])
        elif (step - width) * self.item > self.tuning.gap_bytes or width * self.item > self.stage:
            if packed and run < self.tuning.long_run_bytes:
                most = max(1, self.stage // run)
                for a in range(0, n, most):
                    k = min(most, n - a)
                    yield ReadPiece(
                        self.file,
                        offset + a * step * self.item,
                        k * run,
                        None,
                        target[a : a + k],
                        self.dtype,
                        boxes.strides((k, *inner)),
                        run,
                        step * self.item,
                    )
            else:
                for i in range(n):
                    yield from self._iterate_pieces(offset + i * step * self.item, inner, inner_steps, target[i])
        else:
            most = 1 + (self.stage // self.item - width) // step
            for a in range(0, n, most):
                k = min(most, n - a)
                at = offset + a * step * self.item
                yield self._make_spanning_piece(at, (k - 1) * step + width, (k, *inner), steps, target[a : a + k])

    def _make_spanning_piece(
        self, offset: int, n: int, shape: tuple[int, ...], steps: tuple[int, ...], target: Tensor
    ) -> ReadPiece:
        """Make one piece of `n` consecutive elements of the file, from which a strided box is copied to the target.

        Args:
            offset: byte of the file at which the piece begins.
            n: number of elements.
            shape: shape of the box.
            steps: strides of the box in the piece, in elements.
            target: a tensor of that shape.
        """
        return ReadPiece(self.file, offset, n * self.item, None, target, self.dtype, steps)

    def _iterate_contiguous_pieces(self, offset: int, shape: tuple[int, ...], target: Tensor) -> Iterator[ReadPiece]:
        """Yield the pieces of the file to read for a box that is one contiguous byte range; they go straight into the
        target's memory if possible.

        Args:
            offset: byte of the file at which the box begins.
            shape: shape of the box.
            target: a tensor of that shape, into which the box is read.
        """
        n = prod(shape) * self.item
        if not self.casts and is_plain_memory(target):
            for a in range(0, n, self.stage):
                k = min(self.stage, n - a)
                yield ReadPiece(self.file, offset + a, k, view_memory(target, a, k), target, self.dtype)
            return
        for start, size in boxes.cut_into_slabs(shape, max(1, self.stage // self.item)):
            at = offset + boxes.flat_start(shape, start) * self.item
            yield ReadPiece(
                self.file,
                at,
                prod(size) * self.item,
                None,
                view_box(target, start, size),
                self.dtype,
                boxes.strides(size),
            )


def view_box(t: Tensor, start: Sequence[int], size: Sequence[int]) -> Tensor:
    """Return a view of the box of a tensor with this start and shape (`size`)."""
    for d, (a, k) in enumerate(zip(start, size, strict=True)):
        if k != t.shape[d]:
            t = t.narrow(d, a, k)
    return t


def _group_pieces(pieces: Iterable[ReadPiece], tuning: Tuning) -> Iterator[list[ReadPiece]]:
    """Yield groups of pieces that one call reads: neighbours in one file, in order, at most as many as a staging
    buffer holds."""
    group: list[ReadPiece] = []
    end = total = 0
    for p in sorted(pieces, key=lambda p: (p.file, p.offset)):
        fits = (
            group
            and not p.every
            and not group[-1].every
            and p.file == group[0].file
            and p.target.device == group[0].target.device  # the copies of a group are in the stream of one device
            and 0 <= p.offset - end <= tuning.gap_bytes
            and total + p.length + 16 <= tuning.stage_bytes
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


class TensorLoader:
    """Reads pieces into their places, with a few threads; each has its own staging buffers."""

    def __init__(self, source: Source, files: Sequence[str], tuning: Tuning) -> None:
        """Keep the arguments.

        Args:
            source: the open checkpoint's folder or file, from which the bytes are read.
            files: names of the checkpoint's files; the `file` of a piece is a position in this list.
            tuning: how large a staging buffer and a single read may be.
        """
        self.source, self.files, self.tuning = source, files, tuning
        self.bytes_read = 0
        self._local = threading.local()
        self._lock = threading.Lock()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._events: list[torch.cuda.Event] = []

    def run(self, pieces: list[ReadPiece], progress: Progress | None) -> None:
        """Read all pieces into their places; everything has arrived when it returns, on GPUs too.

        Args:
            pieces: in any order.
            progress: called with ("load", bytes, bytes in all) after each group of pieces; None for nobody.

        Raises:
            Corrupt: bytes cannot be read.
            SourceChanged: a file became shorter.
        """
        for device in {p.target.device for p in pieces if p.target.device.type == "cuda"}:
            self._streams[device] = torch.cuda.current_stream(device)  # the copies come after what the job has queued
        groups, total = list(_group_pieces(pieces, self.tuning)), sum(p.length for p in pieces)
        try:
            threads = self.tuning.threads or _choose_thread_count()
            if threads == 1 or len(groups) == 1:
                for group in groups:
                    self._read_group(group)
                    if progress is not None:
                        progress("load", min(self.bytes_read, total), total)
            else:
                with ThreadPoolExecutor(threads, "ckpttool-load") as pool:
                    for done in [pool.submit(self._read_group, group) for group in groups]:
                        done.result()
                        if progress is not None:
                            progress("load", min(self.bytes_read, total), total)
        finally:
            for event in self._events:
                event.synchronize()

    def _read_group(self, group: list[ReadPiece]) -> None:
        """Read a group of neighbouring pieces with one call, each into its memory, or through a staging buffer to its
        target."""
        device = next((p.target.device for p in group if p.target.device.type == "cuda"), None)
        staged = [p for p in group if p.memory is None]
        buffer, slot = self._get_staging_buffer(device, sum(p.length + 16 for p in staged)) if staged else (None, None)
        places: list[memoryview] = []
        at: list[int] = []
        used = 0
        for p in group:
            if p.memory is None:
                at.append(used)
                assert buffer is not None
                places.append(view_memory(buffer, used, p.length))
                used += -(-p.length // 16) * 16
            else:
                places.append(p.memory)
        if group[0].every:
            self._read_runs(group[0], places[0])
        else:
            self._read_ranges(group, places)
        with torch.no_grad():
            if device is not None:
                with torch.cuda.stream(self._streams[device]):
                    for p, a in zip(staged, at, strict=True):
                        self._copy_to_target(p, buffer, a)
                    if slot is not None:
                        slot.record()
            else:
                for p, a in zip(staged, at, strict=True):
                    self._copy_to_target(p, buffer, a)

    def _copy_to_target(self, p: ReadPiece, buffer: Tensor | None, a: int) -> None:
        """Copy a piece from the staging buffer, where it begins at byte `a`, to its target. For a GPU the bytes are
        moved first, and cast and reordered there."""
        assert buffer is not None
        raw = buffer[a : a + p.length]
        if p.target.device.type == "cuda":
            raw = raw.to(p.target.device, non_blocking=True)
        p.target.copy_(raw.view(to_torch_dtype(p.dtype)).as_strided(p.target.shape, p.strides))

    def _get_staging_buffer(self, device: object, n: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Return (a staging buffer of this thread, an event of CUDA after which it may be used again); the event is
        None without a GPU.

        Args:
            device: the GPU that the bytes go to, or None.
            n: bytes that the buffer has to hold.
        """
        if device is None:
            known = getattr(self._local, "buffer", None)
            if known is None or known.numel() < n:
                known = self._local.buffer = torch.empty(n, dtype=torch.uint8)
            return known, None
        ring = self._local.__dict__.setdefault("ring", {}).setdefault(device, [])
        if len(ring) < 2:
            event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            with self._lock:
                self._events.append(event)
            ring.append((torch.empty(max(n, self.tuning.stage_bytes), dtype=torch.uint8, pin_memory=True), event))
        else:
            ring.append(ring.pop(0))  # the one that was handed over longest ago
            ring[-1][1].synchronize()
            if ring[-1][0].numel() < n:
                ring[-1] = (torch.empty(n, dtype=torch.uint8, pin_memory=True), ring[-1][1])
        return ring[-1][0], ring[-1][1]

    def _read_ranges(self, group: list[ReadPiece], places: list[memoryview]) -> None:
        """Read neighbouring pieces with one call, together with the unwanted bytes between them.

        Args:
            group: pieces of one file, in order.
            places: the memory for each.
        """
        views: list[memoryview] = []
        end = group[0].offset
        for p, place in zip(group, places, strict=True):
            if p.offset > end:
                views.append(memoryview(bytearray(p.offset - end)))
            views.append(place)
            end = p.offset + p.length
        self._read_consecutive(group[0].file, group[0].offset, views)

    def _read_runs(self, p: ReadPiece, place: memoryview) -> None:
        """Read the runs of a strided piece (equally long, at equal distances in the file) one after the other into
        `place`, without gaps."""
        for i in range(p.length // p.run):
            self._read_consecutive(p.file, p.offset + i * p.every, [place[i * p.run : (i + 1) * p.run]])

    def _count_bytes(self, n: int) -> None:
        """Add `n` to the number of bytes read so far; thread-safe."""
        with self._lock:
            self.bytes_read += n

    def _read_consecutive(self, file: int, offset: int, views: list[memoryview]) -> None:
        """Read consecutive bytes of a file into several pieces of memory, one after the other.

        Args:
            file: position in `files`.
            offset: first byte of the file to read.
            views: the pieces of memory; the list is emptied.

        Raises:
            Corrupt: the bytes cannot be read.
            SourceChanged: the file became shorter.
        """
        name, left = self.files[file], sum(map(len, views))
        if not self.source.local:
            together = memoryview(self.source.read(name, offset, left)) if len(views) > 1 else None
            for view in views:
                if together is None:
                    self.source.readinto(name, offset, view)
                else:
                    view[:], together = together[: len(view)], together[len(view) :]
            self._count_bytes(left)
            return
        with self.source.borrow_fd(name) as fd:
            while left:
                try:
                    n = os.preadv(fd, views, offset)
                except OSError as e:
                    raise Corrupt(
                        f"{os.path.join(self.source.root, name)}: byte {offset}: {e.strerror}.", code="CKPT0424"
                    ) from e
                if not n:
                    raise SourceChanged(
                        f"{os.path.join(self.source.root, name)} became shorter while it was read: it has no byte "
                        f"{offset}. Wait until it is written, or fetch it again."
                    )
                self._count_bytes(n)
                left -= n
                offset += n
                while views and n >= len(views[0]):
                    n -= len(views.pop(0))
                if n:
                    views[0] = views[0][n:]


def _choose_thread_count() -> int:
    """Return the number of reader threads of one rank: one to four, by the number of cores for each rank of this
    machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
    return max(1, min(4, cores // ranks))
