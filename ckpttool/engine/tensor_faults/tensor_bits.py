"""Arrays of any dtype, compared by their bits in blocks of 2^20 elements: what tensor_diff, tensor_order and
tensor_values share.

Bits, so that NaN equals NaN of the same bits and 0.0 is not -0.0. Values are compared only between different dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .tensor_kinds import TensorKind

if TYPE_CHECKING:
    from numpy import ndarray

    Array: TypeAlias = ndarray[Any, Any]

__all__ = [
    "LIMIT",
    "ArrayPair",
    "Found",
    "are_same_bits",
    "as_float64",
    "as_integers",
    "block_slices",
    "dtype_epsilon",
    "find_unequal_elements",
    "is_floating",
]

#: Of a larger tensor the kind is inferred from this many elements.
LIMIT = 1 << 24
_BLOCK = 1 << 20


class Found(NamedTuple):
    """How a tensor differs: the fields of a `TensorDiff` of these names."""

    kind: TensorKind
    text: str
    detail: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class ArrayPair:
    """Two contiguous arrays of one shape that differ.

    `first` and `last` are flat indices of differing elements, `count` is their number. `x` and `y` are the elements of
    `a` and `b` that the kind is inferred from: flat, the whole rows that differ, or the first LIMIT elements of them.
    `has_heads` is False where the tensor is known to have no heads of attention.
    """

    a: Array
    b: Array
    first: int
    last: int
    count: int
    x: Array
    y: Array
    sampled: bool = False
    has_heads: bool = True


def as_integers(x: Array) -> Array:
    """View elements as unsigned integers of their size, or as raw bytes if there is no such integer."""
    size = x.dtype.itemsize
    return x.view(f"u{size}") if size in (1, 2, 4, 8) else x.view(f"V{size}")


def find_unequal_elements(a: Array, b: Array) -> Any:
    """Return a boolean array that is True where elements differ: by their bits, or by value if the dtypes differ (then
    NaN equals NaN)."""
    import numpy as np

    if a.dtype == b.dtype:
        return as_integers(a) != as_integers(b)
    with np.errstate(all="ignore"):
        x, y = as_float64(a), as_float64(b)
        return (x != y) & ~(np.isnan(x) & np.isnan(y))


def are_same_bits(a: Array, b: Array) -> bool:
    """Tell whether two arrays have one shape and no differing element."""
    return a.shape == b.shape and not find_unequal_elements(a, b).any()


def as_float64(x: Array) -> Array:
    """Convert an array to float64, a complex one to complex128."""
    import numpy as np

    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def block_slices(n: int) -> Iterator[slice]:
    """Yield slices of at most 2^20 elements that cover range(n)."""
    for k in range(0, n, _BLOCK):
        yield slice(k, min(n, k + _BLOCK))


def is_floating(x: Array) -> bool:
    """Tell whether elements are floating-point or complex, bfloat16 and the like of ml_dtypes included."""
    return x.dtype.kind in "fc" or (x.dtype.kind == "V" and "float" in x.dtype.name)


def dtype_epsilon(x: Array) -> float:
    """Return the distance of 1 to the next larger number of an array's dtype; 0 for integers."""
    import ml_dtypes

    return float(ml_dtypes.finfo(x.dtype).eps) if is_floating(x) else 0.0  # type: ignore[no-untyped-call]
