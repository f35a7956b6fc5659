"""Statistics of the numbers of tensors, computed block by block while they are read.

Mean and standard deviation are merged block by block in float64 (Chan, Golub and LeVeque, 1979), so that they have the
precision of numpy's own in one pass. NaN and infinities are counted, and left out of everything else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...index.checkpoint import NOT_TORCHS, PACKED, TensorEntry
from .dtypes import numbers
from .stream import Block

if TYPE_CHECKING:
    from .dtypes import Array

__all__ = ["StatisticsCounter", "TensorStatistics", "merge_statistics", "sum_squares"]

_PIECE = 1 << 18  # elements that stay in the cache


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one tensor, or of several as if they were one.

    `norm` (L2), `mean`, `std` (of the population), `min` and `max` are of the finite numbers; of complex ones, of their
    absolute values. They are None where there is no number, and of numbers that nobody can read. `exponents` {e: how
    many numbers have 2**e <= |x| < 2**(e + 1)}; {} where it was not asked for.
    """

    elements: int = 0
    zeros: int = 0
    nan: int = 0
    infinite: int = 0
    norm: float | None = None
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    exponents: dict[int, int] = field(default_factory=dict)


def merge_statistics(parts: Iterable[TensorStatistics]) -> TensorStatistics:
    """Return the statistics of several tensors, or of parts of one, as if they were one."""
    out = TensorStatistics()
    for part in parts:
        n, m = (s.elements - s.nan - s.infinite for s in (out, part))
        exponents = dict(out.exponents)
        for e, count in part.exponents.items():
            exponents[e] = exponents.get(e, 0) + count
        counts = {k: getattr(out, k) + getattr(part, k) for k in ("elements", "zeros", "nan", "infinite")}
        merged = replace(out, **counts, exponents=exponents)
        if part.mean is None:
            out = merged
        elif out.mean is None:
            out = replace(part, **counts, exponents=exponents)
        else:
            assert out.std is not None and part.std is not None and out.norm is not None and part.norm is not None
            assert out.min is not None and part.min is not None and out.max is not None and part.max is not None
            apart, total = part.mean - out.mean, n + m
            squares = n * out.std**2 + m * part.std**2 + apart**2 * n * m / total
            out = replace(
                merged,
                norm=math.hypot(out.norm, part.norm),
                mean=out.mean + apart * m / total,
                std=math.sqrt(squares / total),
                min=min(out.min, part.min),
                max=max(out.max, part.max),
            )
    return out


class StatisticsCounter:
    """Computes the statistics of tensors from their blocks, which may come in any order; `found` has them.

    Args:
        tensors: {name: tensor} of all that will be seen.
        exponents: count the exponents of the numbers, too.
    """

    def __init__(self, tensors: dict[str, TensorEntry], exponents: bool) -> None:
        """Start without statistics of any tensor; the class describes the arguments."""
        self._tensors, self.exponents = tensors, exponents
        self.found: dict[str, TensorStatistics] = {}

    def add(self, block: Block) -> None:
        """Add the numbers of a block, which is a piece of one tensor, to the statistics of that tensor."""
        dtype = self._tensors[block.name].dtype
        old = self.found.get(block.name, TensorStatistics())
        if dtype in NOT_TORCHS:
            self.found[block.name] = replace(old, elements=old.elements + block.count * PACKED.get(dtype, 1))
            return
        flat = numbers(block.data, dtype)
        pieces = (flat[k : k + _PIECE] for k in range(0, len(flat), _PIECE))
        self.found[block.name] = merge_statistics([old, *(_compute_statistics(x, self.exponents) for x in pieces)])

    def absorb(self, answer: dict[str, dict[str, Any]]) -> None:
        """Add the statistics that a worker found: {tensor: the fields of `TensorStatistics`, as JSON has them}."""
        for name, row in answer.items():
            exponents = {int(e): n for e, n in row["exponents"].items()}
            self.found[name] = TensorStatistics(**{**row, "exponents": exponents})


def _compute_statistics(x: Array, with_exponents: bool) -> TensorStatistics:
    """Return the statistics of an array of numbers; of complex numbers, those of their absolute values.

    Args:
        with_exponents: count the binary exponents of the numbers, too.
    """
    import numpy as np

    elements, nan = x.size, 0
    if x.dtype.kind == "c":
        x = np.abs(x.astype("c16"))
    wide: Array = _convert_to_float64(x)
    with np.errstate(all="ignore"):
        if not math.isfinite(_sum_float64_squares(wide)):  # one look at most tensors, which have neither
            finite, nan = np.isfinite(wide), int(np.count_nonzero(np.isnan(wide)))
            wide, x = wide[finite], x[finite]
        infinite = elements - nan - wide.size
        if not wide.size:
            return TensorStatistics(elements, 0, nan, infinite)
        exponents: dict[int, int] = {}
        if with_exponents:
            found, times = np.unique(np.frexp(wide[wide != 0])[1] - 1, return_counts=True)
            exponents = dict(zip(found.tolist(), times.tolist(), strict=True))
        whole = x.dtype.kind in "iub"  # float64 does not tell all of these apart
        return TensorStatistics(
            elements,
            int(wide.size - np.count_nonzero(wide)),
            nan,
            infinite,
            math.sqrt(_sum_float64_squares(wide)),
            float(wide.mean()),
            float(wide.std()),
            int(x.min()) if whole else float(wide.min()),
            int(x.max()) if whole else float(wide.max()),
            exponents,
        )


def sum_squares(x: Array) -> float:
    """Return the sum of the squares of an array's finite numbers; complex numbers count by their absolute values."""
    import numpy as np

    total = 0.0
    with np.errstate(all="ignore"):
        for k in range(0, len(x), _PIECE):
            piece = x[k : k + _PIECE]
            wide = np.abs(piece.astype("c16")) if piece.dtype.kind == "c" else _convert_to_float64(piece)
            found = _sum_float64_squares(wide)
            if not math.isfinite(found):
                wide = wide[np.isfinite(wide)]
                found = _sum_float64_squares(wide)
            total += found
    return total


def _sum_float64_squares(x: Array) -> float:
    """Return the sum of the squares of a float64 array, computed in the calling thread.

    np.dot would start the threads of BLAS, which take ten times as long for small pieces on a busy machine.
    """
    import numpy as np

    return float(np.einsum("i,i->", x, x))


def _convert_to_float64(x: Array) -> Array:
    """Return numbers as float64; bfloat16 is converted by its bits, which is faster than the cast of ml_dtypes."""
    import numpy as np

    if x.dtype.name == "bfloat16":
        x = (x.view("u2").astype("u4") << np.uint32(16)).view("f4")
    return x.astype("f8")
