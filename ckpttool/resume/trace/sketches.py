"""Sketches of tensors that are sharded over many ranks: 16 sums of a tensor's elements under fixed random signs.

    |sketch(a) - sketch(b)| / sqrt(16)  estimates  |a - b|, within about 18 %

A sketch is linear, and the sign of an element depends only on its flat row-major index in the whole tensor. So every
rank adds up its own shards, and one all-reduce completes the sketch, whichever rank holds which shard. Norms alone do
not see a tensor that was rotated: two vectors of equal norm at an angle of 1e-3 differ by 1e-3, and so do their
sketches.

It runs on the device of the tensor, in blocks of 2^20 elements, in float64: one product of matrices for each. The signs
come from Philox's raw numbers, which no version of numpy changes; those of different versions of this module must not
be compared.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from ...index.boxes import box_is_flat, flat_start
from ...live.collectives import gather_objects
from .fingerprint import can_fingerprint, find_shard_offset, get_local_shard, is_counted_on_this_rank, sum_over_ranks

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, device

__all__ = ["WIDE", "decode_sketches", "encode_sketches", "estimate_sketch_distance", "sketch_shard", "sketch_tensors"]

#: Numbers of a sketch.
WIDE = 16

_ROW = 1 << 14  # elements that share one row of signs
_ROWS = 64  # rows that are multiplied at once


@lru_cache(maxsize=2)
def _make_sign_tables(on: device) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tables of random signs, each (_ROW, WIDE) in float64.

    The sign of element i is the product of row i % _ROW of the first, row i // _ROW % _ROW of the second and row
    i // _ROW // _ROW of the third table.
    """
    import numpy as np
    import torch

    raw = np.random.Philox(key=16).random_raw(_ROW)
    bits = raw[:, None] >> np.arange(3 * WIDE, dtype=np.uint64) & np.uint64(1)
    signs = torch.from_numpy(1.0 - 2.0 * bits.astype("f8")).to(on)
    return signs[:, :WIDE].contiguous(), signs[:, WIDE:-WIDE].contiguous(), signs[:, -WIDE:].contiguous()


def _sketch_flat(x: Tensor, first: int) -> Tensor:
    """Return the sketch (WIDE,) of a contiguous 1-d tensor whose first element has the flat index `first` in its whole
    tensor."""
    import torch

    of_element, of_row, of_block = _make_sign_tables(x.device)
    out = torch.zeros(WIDE, dtype=torch.float64, device=x.device)
    at, end = 0, x.numel()
    while at < end:
        row, column = divmod(first + at, _ROW)
        block, row = divmod(row, _ROW)
        rows = 1 if column else min(_ROWS, (end - at) // _ROW, _ROW - row)
        count = rows * _ROW if rows and not column else min(_ROW - column, end - at)
        part = x[at : at + count].double().view(max(1, rows), -1)
        sums = part @ of_element[column : column + part.shape[1]]
        out += (sums * of_row[row : row + len(part)]).sum(0) * of_block[block % _ROW]
        at += count
    return out


def _sketch_box(x: Tensor, offset: Sequence[int], shape: Sequence[int], first: int) -> Tensor:
    """Return the contribution (WIDE,) of a box of a tensor to that tensor's sketch.

    A box that is not one range of the flattened tensor is padded with zeros to such ranges, a few rows at a time.

    Args:
        x: the box, not empty.
        offset: index of its first element in the tensor, by dimension.
        shape: of the tensor.
        first: flat index of the tensor's first element in the larger tensor that it is a part of; 0 if there is none.
    """
    import torch

    if box_is_flat(shape, offset, tuple(x.shape)):
        return _sketch_flat(x.reshape(-1), first + flat_start(shape, offset))
    inner = prod(shape[1:])
    out = torch.zeros(WIDE, dtype=torch.float64, device=x.device)
    if inner > _ROW * _ROWS:
        for i, part in enumerate(x):
            out += _sketch_box(part, offset[1:], shape[1:], first + (offset[0] + i) * inner)
        return out
    rows = max(1, _ROW * _ROWS // inner)
    place = (slice(None), *(slice(o, o + n) for o, n in zip(offset[1:], x.shape[1:], strict=True)))
    for a in range(0, len(x), rows):
        whole = x.new_zeros((len(x[a : a + rows]), *shape[1:]))
        whole[place] = x[a : a + rows]
        out += _sketch_flat(whole.reshape(-1), first + (offset[0] + a) * inner)
    return out


def sketch_shard(held: Tensor, tensor: torch.Tensor) -> list[float]:
    """Return what this rank's shard adds to the sketch of a tensor: WIDE numbers.

    Args:
        held: the elements of the shard.
        tensor: a tensor that is laid out over ranks as the sketched one; only its layout and shape count.
    """
    import torch

    if not held.numel():
        return [0.0] * WIDE
    offset, shape = tuple(find_shard_offset(tensor)), tuple(tensor.shape)
    if held.is_complex():
        held, offset, shape = torch.view_as_real(held), (*offset, 0), (*shape, 2)
    return [float(v) for v in _sketch_box(held, offset, shape, 0).tolist()]


def sketch_tensors(tensors: Mapping[str, Tensor], on: device | str) -> tuple[dict[str, str], list[str]]:
    """Sketch live tensors. A collective.

    Tensors of which no fingerprint can be taken are left out.

    Args:
        tensors: {name: tensor}, the same names in the same order on every rank.
        on: device of the tensor that is sent, as the process group needs it.

    Returns:
        ({name: encoded sketch}, names of the plain tensors whose copies differ between ranks). A sketch is that of the
        copies on the ranks that count.
    """
    tensors = {n: t for n, t in tensors.items() if can_fingerprint(t)}
    mine = {n: sketch_shard(get_local_shard(t), t) for n, t in tensors.items()}
    owners = {n for n, t in tensors.items() if is_counted_on_this_rank(t)}
    owned = [v if n in owners else 0.0 for n in tensors for v in mine[n]]
    total = sum_over_ranks(owned, integers=False, device=on)
    out = {n: encode_sketches([total[k * WIDE : (k + 1) * WIDE]], "f8") for k, n in enumerate(tensors)}
    plain = [n for n, t in tensors.items() if not hasattr(t, "_local_tensor")]
    copies = gather_objects([repr(mine[n]) for n in plain])
    return out, [n for k, n in enumerate(plain) if len({c[k] for c in copies}) > 1]


def encode_sketches(rows: Iterable[Sequence[float]], kind: str = "f4") -> str:
    """Return sketches, one after the other, as base64 of little-endian numbers: "f4" (with 64 bytes a sketch, as each
    step has them) or "f8"."""
    import numpy as np

    return base64.b64encode(np.asarray(list(rows), f"<{kind}").tobytes()).decode()


def decode_sketches(text: str | None, count: int, kind: str = "f4") -> NDArray[np.float64] | None:
    """Return the sketches (count, WIDE) that `encode_sketches` made a text of.

    Args:
        text: the text; None gives None.
        count: number of sketches; None is returned if the text has another number of them.
        kind: "f4" or "f8", as it was encoded.
    """
    import numpy as np

    try:
        flat = np.frombuffer(base64.b64decode(text or ""), f"<{kind}").astype("f8")
    except ValueError:
        return None
    return flat.reshape(count, WIDE) if count and flat.size == count * WIDE else None


def estimate_sketch_distance(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Estimate the L2 norm of the difference of two tensors from their sketches, arrays (WIDE,)."""
    import numpy as np

    return float(np.linalg.norm(a - b) / WIDE**0.5)
