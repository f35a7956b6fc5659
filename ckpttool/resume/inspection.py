"""How differing tensors differ in the files of two open checkpoints, and where.

A few tensors are read, one at a time, and compared with those of the reference (`tensor_diff`). Moments that resemble nothing
in their own reference are also compared with the other moments of their parameter. The place of an element follows from the
index; the rank that wrote it, from the file names that engines use.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..engine.dtypes import numpy_dtype
from ..engine.opening import OpenCheckpoint
from ..engine.stream import Reader, StreamJob
from ..errors import CkpttoolError
from ..index import boxes
from ..index.checkpoint import ITEMSIZE, Checkpoint
from .tensor_diff import TensorDiff, tensor_diff
from .text import fqn_of, slot_of

__all__ = ["inspect", "place_of"]

#: How many differing tensors are read, and the most bytes of one.
_LOOK = 8
_MOST = 1 << 30

#: Kinds of difference that say little, and those that only equal values can have.
_VAGUE = frozenset(("close", "unrelated"))
_TELLING = frozenset(("absolute", "negated", "rounded-bfloat16", "rounded-float16"))


def inspect(opened: tuple[OpenCheckpoint, OpenCheckpoint], names: Sequence[str]) -> dict[str, TensorDiff | None]:
    """How some of these tensors differ in the files: the first of every slot, then the first ones; None: they do not."""
    left, right = (o.locate() for o in opened)

    def readable(n: str, m: str) -> bool:
        a, b = left.tensors.get(n), right.tensors.get(m)
        return a is not None and b is not None and a.shape == b.shape and 0 < max(a.nbytes, b.nbytes) <= _MOST

    def look(n: str) -> TensorDiff | None:
        got = _read(opened[1], right, n)
        found = tensor_diff(_read(opened[0], left, n), got)
        if found is None or found.kind not in _VAGUE or slot_of(n) == "weights":
            return found
        for m in left.tensors:
            if m != n and slot_of(m) != "weights" and fqn_of(m) == fqn_of(n) and readable(m, n):
                other = tensor_diff(_read(opened[0], left, m), got)
                if other is not None and other.kind in _TELLING:
                    text = other.text.replace("the reference's values", f"the values of {slot_of(m)}")
                    return replace(found, kind="moments-copied", text=text)
        return found

    fit = [n for n in names if readable(n, n)]
    heads = list({slot_of(n): n for n in reversed(fit)}.values())
    chosen = set(list(dict.fromkeys([*heads, *fit]))[:_LOOK])
    out: dict[str, TensorDiff | None] = {}
    for n in names:
        if n in chosen:
            try:
                out[n] = look(n)
            except (CkpttoolError, TypeError):
                continue  # damaged, which was reported before; or a dtype that numpy does not have
    return out


def _read(opened: OpenCheckpoint, ckpt: Checkpoint, name: str) -> Any:
    """A tensor of the files as an array."""
    import numpy as np

    entry = ckpt.tensors[name]
    out = np.empty(entry.numel, dtype=numpy_dtype(entry.dtype))
    reader = Reader(opened.source, ckpt.files, ckpt.records)
    for block in reader.blocks([StreamJob(name, entry)]):
        if block.count:
            out[block.first : block.first + block.count] = np.frombuffer(block.data, dtype=out.dtype)
    return out.reshape(entry.shape)


def place_of(ckpt: Checkpoint, name: str, flat: int) -> str | None:
    """Where an element of a tensor is: file, bytes of its chunk, and the rank of the shard if file names tell it.

    `flat` is its row-major index; None if no chunk contains it.
    """
    entry = ckpt.tensors.get(name)
    if entry is None or not entry.numel:
        return None
    at = []
    for step in boxes.strides(entry.shape):
        at.append(flat // step)
        flat -= at[-1] * step
    for chunk in entry.chunks:
        if all(s <= i < s + n for i, s, n in zip(at, chunk.start, chunk.shape, strict=True)):
            file, offset, length = ckpt.files[chunk.extent.file], chunk.extent.offset, chunk.extent.length
            text = f"{file}, bytes {offset}..{offset + length}"
            if chunk.zstd is None:
                steps = chunk.strides or boxes.strides(chunk.shape)
                inside = sum((i - s) * k for i, s, k in zip(at, chunk.start, steps, strict=True))
                byte = offset + inside * ITEMSIZE[entry.dtype]
                text += f", first difference at byte {byte}"
            box = ", ".join(f"{s}:{s + n}" for s, n in zip(chunk.start, chunk.shape, strict=True))
            rank = _rank(file)
            whose = "" if rank is None else f"rank {rank}'s shard, "
            return f"{text} ({whose}[{box}] of {list(entry.shape)})" if box else text
    return None


def _rank(file: str) -> int | None:
    """The rank that wrote a file, from the file names of DCP, ZeRO and FSDP1."""
    name = file.rpartition("/")[2]
    for pattern in (
        r"^__(\d+)_\d+\.distcp$",
        r"zero_pp_rank_(\d+)_",
        r"(?<!mp_)(?<!pp_)rank_?(\d+)\.(?:pt|pth|bin)$",
    ):
        if m := re.search(pattern, name):
            return int(m[1])
    return None
