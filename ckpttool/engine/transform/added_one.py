"""Tensors that one program stores less one: the gamma of a norm that multiplies by 1 + gamma (Megatron-Core's
apply_layernorm_1p).

The sum is rounded once, to the dtype of the tensor, as Megatron-Core's norms do (`weight + 1`,
transformer/torch_norm.py and fusions/fused_layer_norm.py of 0.16). An fp32 master gets the same, and rounds to its
weight where it did before. These tensors are small, so they are read when the conversion is planned, and their new
bytes are kept in memory.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import Unsupported, argument
from ...index.checkpoint import FLOATING, ITEMSIZE, Checkpoint, Chunks, TensorEntry, joined
from ...storage.source import Source
from ..copy.dtypes import numpy_dtype
from ..copy.stream import read_small_tensors

if TYPE_CHECKING:
    from ..copy.dtypes import Array

__all__ = ["FILE", "add_one_to_norms"]

#: The file of an index that holds the new bytes. No file on a disk can have a name with NUL in it.
FILE = "\0one added"


def add_one_to_norms(
    ckpt: Checkpoint, source: Source, tensors: Mapping[str, TensorEntry], patterns: Iterable[str], by: int
) -> tuple[dict[str, TensorEntry], bytes, str]:
    """Add `by`, which is 1 or -1, to the weights that match patterns and to their fp32 masters.

    Args:
        tensors: {name: tensor}, in which the weights and masters are searched.
        patterns: globs of the weights' names, without "model.".

    Returns:
        ({name: new tensor}, the bytes of the file `FILE`, which becomes the next file of `ckpt`, a note, "" where no
            name matches).

    Raises:
        Unsupported: such a weight or master has no floating-point dtype.
    """
    import numpy as np

    globs = list(patterns)
    weights = {
        t.local_name: t
        for t in tensors.values()
        if t.component == "model" and any(fnmatch.fnmatchcase(t.local_name, g) for g in globs)
    }
    if odd := next((n for n, t in weights.items() if t.dtype not in FLOATING), None):
        raise Unsupported(
            f'"{odd}" is {weights[odd].dtype}, to which no 1 can be added. Dequantise it first.', code="CKPT0318"
        )
    masters = {n: m for n in weights if (m := tensors.get(joined(("extra", "master", n)))) is not None}
    if odd := next((n for n, m in masters.items() if m.dtype not in FLOATING), None):
        raise Unsupported(
            f'"{odd}" has a master that is {masters[odd].dtype}, a remainder of the weight, to which no 1 can be '
            f"added. {argument('dequantize', ['*master*'])} joins both first.",
            code="CKPT0318",
        )
    every = [*weights.values(), *masters.values()]
    named = {joined(t.path): t for t in every}
    data = read_small_tensors(replace(ckpt, tensors=named), source, named)

    def numbers_of(t: TensorEntry) -> Array:
        return np.frombuffer(data[joined(t.path)], numpy_dtype(t.dtype))

    made: dict[str, TensorEntry] = {}
    out = bytearray()

    def append(t: TensorEntry, x: Array) -> None:
        """Put the elements `x` of tensor `t` at the end of the file."""
        nbytes = len(x) * ITEMSIZE[t.dtype]
        made[joined(t.path)] = replace(t, chunks=Chunks.whole(t.shape, len(ckpt.files), len(out), nbytes))
        out.extend(x.tobytes())

    rounded = 0
    for n, t in weights.items():
        old = numbers_of(t)
        new = old + np.asarray(by, old.dtype)
        rounded += int(np.count_nonzero(new - np.asarray(by, old.dtype) != old))
        append(t, new)
        if (m := masters.get(n)) is not None:
            before = numbers_of(m)
            after = before + np.asarray(by, before.dtype)
            # a master that rounded to its weight must do so still: take the sum, or else the nearest number at hand
            # that rounds to the new weight
            wanted = best = new.astype(before.dtype)
            edge = (wanted + after.astype(old.dtype).astype(before.dtype)) / 2
            for x in (np.nextafter(edge, wanted), edge, after):
                best = np.where(x.astype(old.dtype) == new, x, best)
            append(m, np.where(before.astype(old.dtype) == old, best, after))
    count = sum(t.numel for t in weights.values())
    dtypes = " and ".join(sorted({t.dtype for t in weights.values()}))
    note = (
        f'{len(weights):,} weights of norms, first "{next(iter(weights), "")}", are '
        f"{'one more' if by > 0 else 'one less'} than in the source: the job stores them less one and multiplies with "
        f"the sum, which {dtypes} rounds in {rounded:,} of {count:,} elements"
    )
    return made, bytes(out), note if weights else ""
