"""`LiveReader`: a checkpoint that is open for a live job, with its names, its values and any box of its tensors.

DCP items are parsed (`Layout.locate`) only where this rank needs them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.copy.fill import Progress, silent
from ..engine.copy.tensor_digests import tensor_digests
from ..engine.copy.zstd_frames import ZstdDecoder
from ..engine.handle import locate_chunks
from ..engine.opening import OpenCheckpoint
from ..engine.recorded import explain_other_digests
from ..errors import Unsupported
from ..formats.stored_tensors import flatten_like_dcp
from ..huggingface import encodings
from ..index import boxes
from ..index.checkpoint import ITEMSIZE, Checkpoint, Chunk, Chunks, TensorEntry, Value, joined
from ..index.records import Records
from ..layouts import Layout
from ..storage.source import Source
from .name_lookup import NameLookup
from .plain_values import is_lossless_cast, to_plain, to_torch_dtype
from .scatter import ReadPiece, SlicePlanner, TensorLoader, Tuning, is_plain_memory, view_box, view_memory

__all__ = ["LiveReader", "ReadRequest"]


class ReadRequest(NamedTuple):
    """A box of a tensor and where it goes."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    target: Tensor


class LiveReader:
    """A checkpoint that is open for a job: names, values, boxes of tensors."""

    progress: Progress | None = None
    tuning = Tuning()

    def __init__(self, path: str | os.PathLike[str], opened: OpenCheckpoint, progress: Progress | None = None) -> None:
        """Prepare the reading of an open checkpoint; no tensor is read yet.

        Args:
            path: path or URL of the checkpoint.
            opened: the open checkpoint.
            progress: called with ("load", bytes read, bytes in all) of this rank; None for nobody.
        """
        self.progress, self._opened = progress, opened
        self.path = os.fspath(path)
        self.source: Source = opened.source
        self.layout: Layout = opened.layout
        self.ckpt: Checkpoint = opened.checkpoint
        # what torch asks for where a value is a dict with keys that are not text
        self.pieces = {
            joined(p): Value(p, x)
            for v in self.ckpt.values.values()
            for p, x in flatten_like_dcp(v.data, v.path).items()
            if p != v.path
        }
        self.names = NameLookup(self.ckpt, self.pieces)
        self.bytes_read = self.bytes_checked = 0
        self.small: dict[str, bytes] = {}  # tensors that another rank has read
        self._compared: set[str] = set()  # tensors that have the digest that was recorded of them
        self._located: dict[tuple[str, int], Chunk] = {}
        self._rows: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}

    # -------------------------------------------------------------------------------------------------- what is there

    def entry(self, asked: str) -> tuple[str, TensorEntry | Value]:
        """Return (canonical name, entry of the index) for a name that a job asks for.

        Raises:
            Unsupported: the checkpoint has no such entry, or several.
        """
        name = self.names.find(asked)
        if name is None:
            raise Unsupported(f'"{asked}" is not in {self.path}.', code="CKPT0338")
        return name, self.ckpt.tensors.get(name) or self.ckpt.values.get(name) or self.pieces[name]

    def value(self, name: str) -> Any:
        """Return the value of a canonical name as plain data.

        Raises:
            Unsupported: it holds an instance of a class that is not rebuilt.
        """
        return to_plain((self.ckpt.values.get(name) or self.pieces[name]).data, name)

    @staticmethod
    def is_scalar_state(entry: TensorEntry | Value) -> bool:
        """Tell whether an entry is a single number in an optimizer's state (as a step counter); some optimizers keep it
        as a number, others as a 0-dim tensor."""
        if not entry.is_optimizer_state:
            return False
        if isinstance(entry, TensorEntry):
            return not entry.shape
        return type(entry.data) in (int, float)

    # ---------------------------------------------------------------------------------------------------- where it is

    def locate(self) -> None:
        """Find the raw byte ranges of all tensors, by parsing the headers of every item, and check the complete index.

        Raises:
            Corrupt: an item is damaged, or files of ranks do not belong together.
        """
        found = self._opened.locate()
        if (
            found.tensors.keys() == self.ckpt.tensors.keys()
        ):  # otherwise items turned out to be objects of several entries
            self.ckpt = found

    def chunk_rows(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
        """Return the positions, in `entry.chunks`, of the chunks that overlap a box of a tensor.

        Args:
            name: canonical name of the tensor.
            start, shape: start and shape of the box.
        """
        known = self._rows.get((name, start, shape))
        if known is None:
            known = self._rows[name, start, shape] = _find_overlapping_chunks(self.ckpt.tensors[name], start, shape)
        return known

    def prepare(self, wanted: Iterable[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> None:
        """Find the raw byte ranges of all chunks that boxes need, and open their files.

        Args:
            wanted: (canonical name, first element, shape) of each box.

        Raises:
            SourceChanged: a file is not the one that was there when the index was read.
            Corrupt: a file is missing, or an item in it is damaged.
        """
        places: dict[str, set[int]] = {}
        files: set[int] = set()
        for name, start, shape in wanted:
            entry = self.ckpt.tensors[name]
            rows = self.chunk_rows(name, start, shape)
            files.update(entry.chunks.file[k] for k in rows)
            if entry.coding != "raw" and (new := {k for k in rows if (name, k) not in self._located}):
                places.setdefault(name, set()).update(new)
        for file in files:
            self.source.size(self.ckpt.files[file])
        self._locate_chunks(places)

    def _locate_chunks(self, places: Mapping[str, set[int]]) -> None:
        """Let the layout parse the items (such as files of torch.save) that contain some chunks, and keep in `_located`
        where the raw bytes of these chunks are.

        Args:
            places: {canonical name of a tensor: positions of the chunks in its `chunks`}.

        Raises:
            Corrupt: an item is damaged, or ends outside its file.
        """
        if not places:
            return
        some: dict[str, TensorEntry] = {}
        for name in (n for n in self.ckpt.tensors if n in places):  # as they lie in the files
            entry = self.ckpt.tensors[name]
            rows = (entry.chunks[k] for k in sorted(places[name]))
            some[name] = replace(entry, chunks=Chunks.of(len(entry.shape), rows))
        found = locate_chunks(self.layout, self.ckpt, some, self.source)
        for name in some:
            for k, chunk in zip(sorted(places[name]), found.tensors[name].chunks, strict=True):
                self._located[name, k] = chunk

    # ---------------------------------------------------------------------------------------------------------- bytes

    def fill(self, wanted: Sequence[ReadRequest], compare: Iterable[str] | None = None) -> None:
        """Read boxes into their targets, and compare the digests of complete tensors with the recorded ones.

        Args:
            wanted: the boxes. If the target has another dtype, the numbers are cast, with a warning if that may change
                them.
            compare: canonical names of the tensors whose digests are compared; None for all. Only a tensor whose target
                holds all of its bytes is compared here; `check_recorded` reads the other ones again.

        Raises:
            Corrupt, SourceChanged: bytes are missing, damaged, or changed during the read.
            Unsupported: codes of quantised weights, or their scales, would be cast to the dtype of a target.
        """
        self._refuse_codes(wanted)
        self.prepare((w.name, w.start, w.shape) for w in wanted)
        tuning = self.tuning
        if any(w.target.device.type == "cuda" for w in wanted):  # pinned memory, two buffers for each thread
            tuning = replace(tuning, stage_bytes=min(tuning.stage_bytes, 8 << 20))
        pieces: list[ReadPiece] = []
        folded: list[tuple[ReadRequest, Chunk]] = []
        written: list[Tensor] = []
        changed: dict[str, tuple[str, str]] = {}
        for w in wanted:
            entry = self.ckpt.tensors[w.name]
            dtype = str(w.target.dtype).removeprefix("torch.")
            if not is_lossless_cast(entry.dtype, dtype):
                changed[w.name] = (entry.dtype, dtype)
            kind, target = entry.dtype, w.target
            if entry.dtype == dtype and ITEMSIZE[dtype] == 1:  # as bytes: not every kernel knows every such dtype
                kind, target = "uint8", target.view(torch.uint8)
            written.append(target)
            for k in self.chunk_rows(w.name, w.start, w.shape):
                chunk: Chunk = self._located[w.name, k] if entry.coding != "raw" else entry.chunks[k]
                both = boxes.intersect((chunk.start, chunk.shape), (w.start, w.shape))
                if both is None:
                    continue
                place = view_box(target, tuple(a - b for a, b in zip(both[0], w.start, strict=True)), both[1])
                if chunk.zstd is not None:
                    folded.append((w._replace(start=both[0], shape=both[1], target=place), chunk))
                    continue
                steps = chunk.strides or boxes.strides(chunk.shape)
                inside = sum((a - b) * s for a, b, s in zip(both[0], chunk.start, steps, strict=True))
                cutter = SlicePlanner(chunk.extent.file, kind, casts=entry.dtype != dtype, tuning=tuning)
                pieces += cutter.pieces(chunk.extent.offset + inside * cutter.item, both[1], steps, place)
        filler = TensorLoader(self.source, self.ckpt.files, tuning)
        try:
            filler.run(pieces, self.progress)
        finally:
            self.bytes_read += filler.bytes_read
        for w, chunk in folded:
            self._read_compressed(w, chunk)
        torch.autograd.graph.increment_version([t for t in written if not t.is_inference()])
        self.source.assert_unchanged()
        self._compare_whole_targets(wanted, self.ckpt.recorded if compare is None else frozenset(compare))
        self._rows.clear()
        if changed:
            first, (a, b) = next(iter(changed.items()))
            warnings.warn(
                f"{len(changed)} tensor{'s were' if len(changed) > 1 else ' was'} rounded to the dtype of the job, of "
                f'{self.path}: "{first}" is {a} in the checkpoint and {b} in the job.',
                stacklevel=2,
            )

    def _refuse_codes(self, wanted: Sequence[ReadRequest]) -> None:
        """Refuse to cast quantised weights to the dtype of a target: their codes are not the numbers of the weights.

        Raises:
            Unsupported: a box would be cast; with the first such tensor.
        """
        cast = [w for w in wanted if str(w.target.dtype) != f"torch.{self.ckpt.tensors[w.name].dtype}"]
        codes = encodings.find_codes(self.ckpt, None) if cast else encodings.Encodings()
        for w in cast:
            if said := codes.describe(w.name):
                raise Unsupported(
                    f"{self.path}: {said}, and {str(w.target.dtype).removeprefix('torch.')} in the job: a cast would "
                    "not give the numbers of the weight. Load weights that the program that quantised them has "
                    "dequantised.",
                    code="CKPT0318",
                )

    def _compare_whole_targets(self, wanted: Sequence[ReadRequest], names: Container[str]) -> None:
        """Hash the targets that hold all bytes of a tensor, and compare their digests with those that were recorded.

        Args:
            wanted: boxes that were read.
            names: canonical names of the tensors to compare; others are passed over.

        Raises:
            Corrupt: a digest differs.
        """
        from blake3 import blake3

        found: dict[str, str] = {}
        for w in wanted:
            entry, target = self.ckpt.tensors[w.name], w.target
            if (
                w.name in self.ckpt.recorded
                and w.name in names
                and w.shape == entry.shape
                and str(target.dtype) == f"torch.{entry.dtype}"
                and is_plain_memory(target)
            ):
                found[w.name] = blake3(view_memory(target, 0, entry.nbytes) if entry.nbytes else b"").hexdigest()
        self._check_digests(found)

    def check_recorded(self, names: Iterable[str]) -> None:
        """Compare the digests of tensors with the recorded ones. Tensors that `fill` has not compared are read once
        more, completely.

        Args:
            names: canonical names; tensors without a recorded digest are skipped.

        Raises:
            Corrupt: a tensor has another digest, or is damaged.
            SourceChanged: a file was written to during the read.
        """
        recorded = self.ckpt.recorded
        some = {n: self.ckpt.tensors[n] for n in names if n in recorded and n not in self._compared}
        if not some:
            return
        framed = {n: t for n, t in some.items() if t.coding != "raw"}
        if framed:
            some |= locate_chunks(self.layout, self.ckpt, framed, self.source).tensors
        found = tensor_digests(some, self.source, self.ckpt.files, Records(), silent)
        self.bytes_checked += sum(t.nbytes for t in some.values())
        self.source.assert_unchanged()
        self._check_digests(found)

    def _check_digests(self, found: Mapping[str, str]) -> None:
        """Compare digests, {canonical name: BLAKE3 in hex}, with the recorded ones.

        Raises:
            Corrupt: a digest differs.
        """
        recorded = self.ckpt.recorded
        wrong = [n for n, digest in found.items() if digest != recorded[n]]
        if wrong:
            raise explain_other_digests(self.ckpt, wrong, len(found))
        self._compared.update(found)

    def _read_compressed(self, w: ReadRequest, chunk: Chunk) -> None:
        """Read a box that lies in one compressed chunk: the chunk is decompressed slab by slab (along its first
        dimensions), up to the last slab that is needed.

        Args:
            w: the box and where it goes.
            chunk: has all of the box.

        Raises:
            Corrupt: the compressed data is damaged.
        """
        assert chunk.zstd is not None
        entry = self.ckpt.tensors[w.name]
        file = self.ckpt.files[chunk.extent.file]
        dtype, target = to_torch_dtype(entry.dtype), w.target
        if target.dtype == torch.uint8 and ITEMSIZE[entry.dtype] == 1:
            dtype = torch.uint8
        at = tuple(a - b for a, b in zip(w.start, chunk.start, strict=True))
        what = f'{os.path.join(self.source.root, file)} ("{w.name}")'
        decoder = ZstdDecoder(self.source, file, chunk.extent, *chunk.zstd, what)
        buffer = torch.empty(min(self.tuning.stage_bytes, prod(chunk.shape) * ITEMSIZE[entry.dtype]), dtype=torch.uint8)
        left, taken = prod(w.shape), 0
        for start, shape in boxes.cut_into_slabs(chunk.shape, len(buffer) // ITEMSIZE[entry.dtype]):
            n = prod(shape) * ITEMSIZE[entry.dtype]
            decoder.take(view_memory(buffer, 0, n))
            taken += prod(shape)
            both = boxes.intersect((start, shape), (at, w.shape))
            if both is not None:
                slab = buffer[:n].view(dtype).reshape(shape)
                place = view_box(target, tuple(a - b for a, b in zip(both[0], at, strict=True)), both[1])
                place.copy_(view_box(slab, tuple(a - b for a, b in zip(both[0], start, strict=True)), both[1]))
                left -= prod(both[1])
            if not left:
                break
        if taken == prod(chunk.shape):
            decoder.close()  # compares the CRC32, which is of the whole
        self.bytes_read += chunk.extent.length


def _find_overlapping_chunks(entry: TensorEntry, start: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Return the positions, in `entry.chunks`, of the chunks that overlap the box with this start and shape."""
    import numpy as np

    c = entry.chunks
    if not c.ndim or len(c) == 1:
        return list(range(len(c)))
    first = np.frombuffer(c.start, "i8").reshape(-1, c.ndim)
    end = first + np.frombuffer(c.shape, "i8").reshape(-1, c.ndim)
    low, high = np.asarray(start), np.asarray(start) + np.asarray(shape)
    return [int(k) for k in np.flatnonzero((np.maximum(first, low) < np.minimum(end, high)).all(axis=1))]
