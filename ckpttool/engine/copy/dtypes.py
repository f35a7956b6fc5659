"""numpy dtypes of torch's, and casts between them that round as torch does, with a count of what a cast could not
hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["NOTHING", "CastLosses", "bits_dtype", "cast", "numbers", "numpy_dtype"]

_PIECE = 64 << 10  # elements that stay in the processor's cache


class CastLosses(NamedTuple):
    """How many numbers a cast could not hold: finite ones that became infinite, others that became NaN, and those that
    became the largest number of a dtype without infinities (float8_e4m3fn: 448)."""

    infinite: int = 0
    nan: int = 0
    cut: int = 0

    def plus(self, other: CastLosses) -> CastLosses:
        """Return the sum of these counts and those of another cast."""
        return CastLosses(*(a + b for a, b in zip(self, other, strict=True)))


#: What a cast to a dtype that holds all numbers loses.
NOTHING = CastLosses()


def cast(data: memoryview, dtype: str, out: memoryview, to: str) -> CastLosses:
    """Convert elements, rounding to nearest even as torch does, and count what `to` could not hold.

    All numbers are torch's, bit for bit, and so are NaNs, with two exceptions. A NaN becomes 0x7FC0 in bfloat16, which
    is one of two answers of torch (its vectorised loops give 0xFFFF to float32 and float64). A signalling NaN stays one
    from float16 and from float32 to float16, where torch sets the quiet bit: no arithmetic makes such numbers, and to
    look for them would slow every cast down. float8_e8m0fnu has neither sign nor zero: as in torch, a negative number
    becomes its magnitude, and what is below 2**-127 becomes that.

    Args:
        data: the elements, in torch's dtype of the name `dtype`.
        out: where they are written in the dtype `to`; as many elements.

    Returns:
        Counts of elements; a cast to a dtype with the same range counts nothing.
    """
    import numpy as np

    src, dst = np.frombuffer(data, dtype=numpy_dtype(dtype)), np.frombuffer(out, dtype=numpy_dtype(to))
    convert = _choose_converter(dtype, to)
    overflowed: list[int] = []
    lost = NOTHING
    with np.errstate(over="call", call=lambda *_: overflowed.append(1), invalid="ignore"):
        for a in range(0, len(src), _PIECE):
            piece, part = src[a : a + _PIECE], dst[a : a + _PIECE]
            convert(piece, part)
            if overflowed or _may_have_lost(part, dtype, to):
                lost = lost.plus(_count_lost(piece, part, to))
                overflowed.clear()
                _set_nans(piece, part, dtype, to)
    return lost


def _choose_converter(dtype: str, to: str) -> Callable[[Array, Array], object]:
    """Return a function f(piece, part) that writes the elements of the array `piece`, of one dtype, to the array
    `part`, of another. Elements of one byte go through a table, others through numpy, with the steps that torch
    takes."""
    import numpy as np

    if dtype.startswith("float8"):
        table = _conversion_table(dtype, to)
        return lambda piece, part: np.take(table, piece.view("u1"), out=part, mode="clip")
    if to == "float8_e8m0fnu":
        return lambda piece, part: _convert_to_e8m0(piece, part)

    def convert(piece: Array, part: Array) -> None:
        """Write the elements of `piece` to `part` by numpy, with the steps that torch takes."""
        if to == "float8_e4m3fn":  # has no infinity: torch gives its largest number for all that is beyond
            piece = np.clip(piece, -448, 448)
        elif (dtype, to) == ("float64", "float16"):  # torch has no other way, and rounds twice
            piece = piece.astype("f4")
        part[...] = piece

    return convert


@lru_cache(128)
def _conversion_table(dtype: str, to: str) -> Array:
    """Return an array that holds, for each of the 256 bytes of a one-byte dtype, the same number in the dtype `to`."""
    import numpy as np

    codes = np.arange(256, dtype="u4")
    numbers = codes.astype("u1").view(numpy_dtype(dtype)).astype("f4")
    bits, nan = numbers.view("u4"), np.isnan(numbers)
    if shift := {"float8_e4m3fn": 20, "float8_e5m2": 21}.get(dtype):
        bits[nan] = (0x7FC00000 | codes >> 7 << 31 | (codes << shift) & 0x7FFFFF)[nan]
    else:  # one NaN, without a sign
        bits[nan] = 0x7F800001
    if to == "float32":
        return numbers
    out = np.empty(256, numpy_dtype(to))
    with np.errstate(all="ignore"):
        wide = numbers.astype("f8")
        _choose_converter("float64", to)(wide, out)
    _set_nans(wide, out, "float64", to)
    return out


def _set_nans(piece: Array, part: Array, dtype: str, to: str) -> None:
    """Overwrite NaNs in `part`, the cast of `piece` from `dtype` to `to`, by the NaNs that torch would give, where
    numpy and ml_dtypes give others."""
    import numpy as np

    if to == "bfloat16":
        part.view("u2")[np.isnan(piece)] = 0x7FC0
    elif to == "float8_e5m2":
        part.view("u1")[np.isnan(piece)] |= 0x7F
    elif (dtype, to) == ("bfloat16", "float16"):
        nan = np.isnan(piece)
        part.view("u2")[nan] |= (piece.view("u2")[nan] & 0x3F) << 3


def _convert_to_e8m0(piece: Array, part: Array) -> None:
    """Write the magnitudes of the numbers in `piece` to `part` as float8_e8m0fnu, rounded to the nearest power of two.

    A number halfway between two powers of two becomes the larger one; what is below 2**-127 becomes 2**-127, infinity
    and NaN become NaN.

    Source: torch/headeronly/util/Float8_e8m0fnu.h, fp8e8m0fnu_from_fp32_value.
    """
    import numpy as np

    bits = piece.astype("f4").view("u4")
    exponent, rest = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    up = (rest > 0x400000) | ((rest == 0x400000) & (exponent > 0))
    part.view("u1")[...] = np.where(exponent == 0xFF, 0xFF, exponent + up)


#: The smallest bits, without the sign, of what a number that `cast` cannot hold becomes.
_ENDS = {"float16": 0x7C00, "bfloat16": 0x7F80, "float8_e5m2": 0x7C, "float8_e4m3fn": 0x7E}


def _may_have_lost(part: Array, dtype: str, to: str) -> bool:
    """Tell whether a cast may have lost numbers, without comparing them: whether any element of its result `part` is
    infinite, NaN or the largest number of `to`.

    False for casts between numpy's own dtypes, since numpy itself reports an overflow.
    """
    if to in _ENDS and not (to == "float16" and dtype in ("float64", "float32")):
        end, item = _ENDS[to], part.itemsize
        return bool(part.view(f"i{item}").max() >= end or part.view(f"u{item}").max() >= end + (1 << 8 * item - 1))
    if to == "float8_e8m0fnu":
        return bool(part.view("u1").max() == 0xFF)
    return to.endswith("fnuz") and bool(part.view("i1").min() == -128)


def _count_lost(piece: Array, part: Array, to: str) -> CastLosses:
    """Count the numbers of `piece` that its cast `part` could not hold."""
    import numpy as np

    x, y = piece.astype("f8"), part.astype("f8")
    cut = np.abs(x) > 464 if to == "float8_e4m3fn" else np.zeros(1, bool)  # where 480 would be nearer than 448
    found = (np.isinf(y) & np.isfinite(x), np.isnan(y) & ~np.isnan(x), cut)
    return CastLosses(*(int(np.count_nonzero(mask)) for mask in found))


def bits_dtype(item: int) -> str:
    """Return the name of a numpy dtype that moves elements of `item` bytes as they are: an unsigned integer where one
    has that size ("u4"), else raw bytes ("V16")."""
    return {1: "u1", 2: "u2", 4: "u4", 8: "u8"}.get(item, f"V{item}")


def numpy_dtype(dtype: str) -> np.dtype[np.generic]:
    """Return the numpy dtype of a torch one, given by name; ml_dtypes gives those that numpy does not have."""
    import numpy as np

    if dtype in ("bfloat16", "complex32") or dtype.startswith("float8"):
        import ml_dtypes

        found: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, dtype))
        return found
    return np.dtype({"bool": "?"}.get(dtype, dtype))


def numbers(data: bytes | memoryview | Array, dtype: str) -> Array:
    """Return a buffer as a flat array in the numpy dtype that corresponds to the torch dtype `dtype`.

    float4_e2m1fn_x2 is unpacked: of the two numbers in a byte, the one in the lower four bits comes first.
    """
    import numpy as np

    if dtype != "float4_e2m1fn_x2":
        return np.frombuffer(data, dtype=numpy_dtype(dtype))
    import ml_dtypes

    pairs = np.frombuffer(data, dtype="u1")
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(-1).view(ml_dtypes.float4_e2m1fn)
