"""How differing tensors differ in the files of two open checkpoints, and where.

Some tensors are read, one at a time, and compared with those of the reference (tensor_diff.py), and where that says
little with other tensors of it (related_tensors.py). The place of an element follows from the index; the rank that
wrote it, from the file names that engines use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...engine.copy.dtypes import numpy_dtype
from ...engine.copy.stream import Reader, StreamJob
from ...engine.opening import OpenCheckpoint
from ...engine.tensor_faults.tensor_diff import VAGUE, TensorDiff, compare_tensors, differ_in_box
from ...errors import CkpttoolError
from ...index import boxes
from ...index.checkpoint import ITEMSIZE, Checkpoint, Chunk
from ..text import parse_fqn, parse_slot
from .related_tensors import find_related_tensor

if TYPE_CHECKING:
    from ...engine.tensor_faults.tensor_bits import Array

__all__ = [
    "FaultyFiles",
    "Inspected",
    "describe_element_place",
    "find_faulty_files",
    "find_file_of_element",
    "inspect_tensors",
]

#: How many differing tensors are read in any case, the most bytes of one, and of all that are read besides.
_LOOK = 8
_MOST = 1 << 30
_MORE = 1 << 26

#: A file is blamed for differences in this many tensors, and in this part of those that it holds.
_FEWEST = 3
_PART = 2 / 3


@dataclass(frozen=True)
class Inspected:
    """How one tensor differs, None if the files are equal, and in which files: indices of the reference's, of the
    other's."""

    diff: TensorDiff | None
    files: tuple[frozenset[int], frozenset[int]]


@dataclass(frozen=True)
class FaultyFiles:
    """The one or two files that have every difference; `theirs` says that they are the reference's."""

    files: tuple[str, ...]
    theirs: bool

    def __str__(self) -> str:
        """Return the names of the files with their ranks, such as "rank0.pt (rank 0) and rank1.pt (rank 1) of the
        reference"."""
        names = [
            name if (rank := _parse_rank_of_file(name)) is None else f"{name} (rank {rank})" for name in self.files
        ]
        return " and ".join(names) + (" of the reference" if self.theirs else "")


def inspect_tensors(opened: tuple[OpenCheckpoint, OpenCheckpoint], names: Sequence[str]) -> dict[str, Inspected]:
    """Read some tensors in the files of both checkpoints, and find how they differ.

    One tensor of every slot (weights, exp_avg, ...) comes first, then `names` in order: 8 tensors are read, and more
    while all together have at most 64 MiB. Tensors with different shapes, of more than 1 GiB or in damaged files are
    left out.

    Args:
        opened: the reference and the other checkpoint.
        names: canonical names.

    Returns:
        {canonical name: how the tensor differs} of those that were read, in the order of `names`.
    """
    left, right = (o.locate() for o in opened)

    def readable(n: str, m: str) -> bool:
        a, b = left.tensors.get(n), right.tensors.get(m)
        return a is not None and b is not None and a.shape == b.shape and 0 < max(a.nbytes, b.nbytes) <= _MOST

    def read(n: str) -> Array | None:
        return _read_array(opened[0], left, n) if 0 < left.tensors[n].nbytes <= _MOST else None

    def look(n: str) -> Inspected:
        """Read a tensor in both checkpoints, and find how and in which files it differs."""
        expected, got = _read_array(opened[0], left, n), _read_array(opened[1], right, n)
        found = compare_tensors(expected, got, may_have_attention_heads(n))
        if found is None:
            return Inspected(None, (frozenset(), frozenset()))
        if found.way in VAGUE:
            found = find_related_tensor(left, read, n, found, got) or found
        files = tuple(
            frozenset(
                chunk.extent.file
                for chunk in ckpt.tensors[n].chunks
                if differ_in_box(
                    expected, got, tuple(slice(s, s + k) for s, k in zip(chunk.start, chunk.shape, strict=True))
                )
            )
            for ckpt in (left, right)
        )
        return Inspected(found, (files[0], files[1]))

    fit = [n for n in names if readable(n, n)]
    heads = list({parse_slot(n): n for n in reversed(fit)}.values())
    chosen: set[str] = set()
    total = 0
    for n in dict.fromkeys([*heads, *fit]):
        total += right.tensors[n].nbytes
        if len(chosen) < _LOOK or total <= _MORE:
            chosen.add(n)
    out: dict[str, Inspected] = {}
    for n in names:
        if n in chosen:
            try:
                out[n] = look(n)
            except (CkpttoolError, TypeError):
                continue  # damaged, which was reported before; or a dtype that numpy does not have
    return out


#: Words in the names of tensors that have no heads of attention, and of those that have.
_NO_HEADS = re.compile(r"mlp|ffn|feed_?forward|gate|up_proj|down_proj|experts?|emb|head|\bfc\d?|\bw[123i]\b|\bwi_\d")
_HEADS = re.compile(r"att|qkv|query|key|\bw?[qk]\b|[qk]_proj")


def may_have_attention_heads(name: str) -> bool:
    """Tell whether a tensor, by its canonical name, may consist of attention heads."""
    fqn = parse_fqn(name)
    return _NO_HEADS.search(fqn) is None or _HEADS.search(fqn) is not None


def find_faulty_files(
    opened: tuple[OpenCheckpoint, OpenCheckpoint], looked: Mapping[str, Inspected], wrong: Sequence[str]
) -> FaultyFiles | None:
    """Find one or two files of a checkpoint that contain a part of every differing tensor.

    None if there are no such files, if they are all its files, if less than two thirds of the tensors in them differ,
    or if fewer than three differing tensors were read.

    Args:
        opened: the reference and the other checkpoint, whose files are tried first.
        looked: what `inspect_tensors` returned.
        wrong: canonical names of all tensors that differ.
    """
    names = [n for n, found in looked.items() if found.diff is not None]
    if len(names) < _FEWEST:
        return None
    slots = {parse_slot(n) for n in wrong}
    for side in (1, 0):
        ckpt = opened[side].locate()
        files = set().union(*(looked[n].files[side] for n in names))
        of = {
            n: set(t.chunks.file)
            for n, t in ckpt.tensors.items()
            if t.component in ("model", "optim") and t.numel > 1 and parse_slot(n) in slots
        }
        if len(files) > 2 or not set().union(*of.values()) > files:
            continue
        inside = [n for n in of if files & of[n]]
        here = [n for n in wrong if n in of]
        if all(files & of[n] for n in here) and len(here) >= _PART * len(inside):
            return FaultyFiles(tuple(ckpt.files[f] for f in sorted(files)), side == 0)
    return None


def _read_array(opened: OpenCheckpoint, ckpt: Checkpoint, name: str) -> Array:
    """Read a tensor from the files of a checkpoint into an array of its shape.

    Raises:
        CkpttoolError: a file cannot be read, or is damaged. TypeError: numpy does not have the dtype.
    """
    import numpy as np

    entry = ckpt.tensors[name]
    out = np.empty(entry.numel, dtype=numpy_dtype(entry.dtype))
    reader = Reader(opened.source, ckpt.files, ckpt.records)
    for block in reader.blocks([StreamJob(name, entry)]):
        if block.count:
            out[block.first : block.first + block.count] = np.frombuffer(block.data, dtype=out.dtype)
    return out.reshape(entry.shape)


def find_file_of_element(ckpt: Checkpoint, name: str, flat: int) -> str | None:
    """Return the file that contains an element of a tensor; None if no chunk (a stored part of a tensor) contains it.

    `flat` is the row-major index of the element.
    """
    chunk, _ = _find_chunk(ckpt, name, flat)
    return None if chunk is None else ckpt.files[chunk.extent.file]


def describe_element_place(ckpt: Checkpoint, name: str, flat: int) -> str | None:
    """Return a text about where an element of a tensor is stored: the file, and the bytes and box of its chunk.

    The rank of the shard is added if the file's name has it. None if no chunk (a stored part of a tensor) contains the
    element. `flat` is the row-major index of the element.
    """
    chunk, at = _find_chunk(ckpt, name, flat)
    if chunk is None:
        return None
    entry = ckpt.tensors[name]
    file, offset, length = ckpt.files[chunk.extent.file], chunk.extent.offset, chunk.extent.length
    text = f"{file}, bytes {offset}..{offset + length}"
    if chunk.zstd is None:
        steps = chunk.strides or boxes.strides(chunk.shape)
        inside = sum((i - s) * k for i, s, k in zip(at, chunk.start, steps, strict=True))
        text += f", first difference at byte {offset + inside * ITEMSIZE[entry.dtype]}"
    box = ", ".join(f"{s}:{s + n}" for s, n in zip(chunk.start, chunk.shape, strict=True))
    rank = _parse_rank_of_file(file)
    whose = "" if rank is None else f"rank {rank}'s shard, "
    return f"{text} ({whose}[{box}] of {list(entry.shape)})" if box else text


def _find_chunk(ckpt: Checkpoint, name: str, flat: int) -> tuple[Chunk | None, list[int]]:
    """Find where an element of a tensor is stored: (chunk, None if there is none; index of the element in each
    dimension).

    `flat` is the row-major index of the element.
    """
    at: list[int] = []
    entry = ckpt.tensors.get(name)
    if entry is None or not entry.numel:
        return None, at
    for step in boxes.strides(entry.shape):
        at.append(flat // step)
        flat -= at[-1] * step
    for chunk in entry.chunks:
        if all(s <= i < s + n for i, s, n in zip(at, chunk.start, chunk.shape, strict=True)):
            return chunk, at
    return None, at


def _parse_rank_of_file(file: str) -> int | None:
    """Return the rank in the name of a file of DCP, ZeRO or FSDP1; None if the name has none."""
    name = file.rpartition("/")[2]
    for pattern in (
        r"^__(\d+)_\d+\.distcp$",
        r"zero_pp_rank_(\d+)_",
        r"(?<!mp_)(?<!pp_)rank_?(\d+)\.(?:pt|pth|bin)$",
    ):
        if m := re.search(pattern, name):
            return int(m[1])
    return None
