"""Averages of squares in an optimizer's state, which cannot be below 0: looked at while their blocks pass for another
reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ...index import boxes
from ...index.checkpoint import ITEMSIZE, TensorEntry
from .dtypes import bits_dtype

__all__ = ["EXPONENT", "Averages", "describe_negative_averages", "find_nonnegative_state"]

#: Slots of optimizers that are sums or averages of squares or of absolute values.
_NOT_NEGATIVE = frozenset(
    (
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "square_avg",
        "sum",
        "acc_delta",
        "exp_avg_sq_row",
        "exp_avg_sq_col",
        "row_var",
        "col_var",
        "variance",
    )
)
#: {dtype: (bits of the exponent, all set in NaN and infinity; bit of the sign)}.
EXPONENT = {
    "float64": (0x7FF << 52, 1 << 63),
    "float32": (0xFF << 23, 1 << 31),
    "float16": (0x1F << 10, 1 << 15),
    "bfloat16": (0xFF << 7, 1 << 15),
    "float8_e5m2": (0x1F << 2, 1 << 7),
}


class Averages:
    """Looks at the blocks of averages of squares; `found` {tensor: (its elements below 0, the flat index of the
    first)}."""

    def __init__(self, names: Collection[str]) -> None:
        """Start without negative elements in `found`.

        Args:
            names: names of the tensors that are averages of squares; `add` ignores all others.
        """
        self.names = names
        self.found: dict[str, tuple[int, int]] = {}

    def add(self, name: str, dtype: str, first: int, data: memoryview) -> bool:
        """Count the negative elements in a piece of a tensor and add them to `found`; NaN and -0 do not count as
        negative.

        Args:
            name: tensor name; a tensor that is not in `names` is ignored.
            dtype: a tensor whose dtype is not in `EXPONENT` is ignored.
            first: flat index of the first element of the piece.
            data: the bytes of the piece.

        Returns:
            Whether the piece holds negative elements; False for ignored tensors.
        """
        if name not in self.names or dtype not in EXPONENT:
            return False
        import numpy as np

        signed = np.frombuffer(data, f"<i{ITEMSIZE[dtype]}")  # its sign is that of the float; one pass over the bytes
        if not signed.size or signed.min() >= 0:
            return False
        bits = signed.view(bits_dtype(ITEMSIZE[dtype]))
        exponent, sign = (bits.dtype.type(x) for x in EXPONENT[dtype])
        below = (bits > sign) & ((bits & exponent) != exponent)
        n = int(np.count_nonzero(below))
        if n:
            known, at = self.found.get(name, (0, first + int(below.argmax())))
            self.found[name] = known + n, at
        return n > 0


def find_nonnegative_state(tensors: Mapping[str, TensorEntry]) -> frozenset[str]:
    """Return the names of the optimizer state tensors that cannot be negative: sums or averages of squares or of
    absolute values."""
    return frozenset(n for n, t in tensors.items() if t.component == "optim" and str(t.path[-1]) in _NOT_NEGATIVE)


def describe_negative_averages(
    found: Mapping[str, tuple[int, int]], tensors: Mapping[str, TensorEntry], at: str = ""
) -> str:
    """Return the error text for averages of squares that hold negative elements: what they mean and what to do.

    Args:
        found: {tensor name: (count of negative elements, flat index of the first one)}, not empty.
        tensors: {tensor name: its index entry}, at least for the names in `found`.
        at: where the first negative element is, "at [3, 4], in FILE"; if "", its index in the tensor is written.
    """
    name, (n, first) = next(iter(found.items()))
    t = tensors[name]
    at = at or f"at {list(boxes.flat_to_boxes(t.shape, first, first + 1)[0][0])}"
    return (
        f'{len(found):,} tensors hold numbers below 0 and are averages of squares. "{name}": {n:,} of {t.numel:,} '
        f"elements, the first {at}. The next step divides by their roots; nothing in the checkpoint says what the "
        "numbers were. Take an earlier step"
    )
