"""How two tensors of one shape differ, in a word that says what went wrong.

    compare_tensors(reference, got) -> TensorDiff("rounded-bfloat16", "holds the reference's values rounded to
    bfloat16", ...)

The most specific kind (tensor_kinds.py) that is true of every differing element is the one that is given.

Comparisons are of bits, so that NaN equals NaN of the same bits and 0.0 is not -0.0. A tensor of a narrower dtype, or
whose values were all rounded to one, is compared with the reference rounded to that dtype, so that what was done to it
besides is still recognised. Tensors are looked through in blocks. Of one with more than `LIMIT` elements the kind is
inferred from LIMIT elements, from the first differing row on, and the result says so; where it differs and in how many
elements is always of all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import tensor_order, tensor_values
from .tensor_bits import (
    LIMIT,
    ArrayPair,
    Found,
    are_same_bits,
    as_float64,
    as_integers,
    block_slices,
    dtype_epsilon,
    find_unequal_elements,
    is_floating,
)
from .tensor_kinds import TensorKind

if TYPE_CHECKING:
    from numpy import dtype, generic

    from .tensor_bits import Array

__all__ = ["LIMIT", "VAGUE", "TensorDiff", "compare_tensors", "differ_in_box", "find_rounded_dtype"]

_FEW = 4

#: Kinds that say little: the values are others.
VAGUE = frozenset((TensorKind.CLOSE, TensorKind.UNRELATED))


@dataclass
class TensorDiff:
    """How a tensor differs from its reference.

    `first` and `last` are flat indices of differing elements, `count` how many there are of `elements`. `rows` is the
    range of indices of dim 0 that they lie in. `text` completes "the tensor ...", and `plain` is the same without what
    is true of this tensor alone (its rows). `detail` has what the kind is about: {"factor": 2.0}, {"shift": 1},
    {"from": (16, 32), "to": (0, 16)}. `sampled` says that a part was looked at.
    """

    way: TensorKind
    text: str
    first: int
    last: int
    count: int
    elements: int
    rows: tuple[int, int] | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    sampled: bool = False
    plain: str = ""

    def __post_init__(self) -> None:
        """Set `plain` to `text` if it was not given."""
        self.plain = self.plain or self.text

    @property
    def kind(self) -> str:
        """The name of the kind of difference; for rounded values, with the dtype that they were rounded to:
        "rounded-bfloat16"."""
        return self.way.label + (f"-{self.detail['dtype']}" if self.way is TensorKind.ROUNDED else "")


def compare_tensors(reference: Array, got: Array, has_heads: bool = True) -> TensorDiff | None:
    """Describe how `got` differs from `reference`, two arrays of one shape; None if they are equal.

    Args:
        has_heads: False if the tensor is known to have no attention heads, so that rows in another order are not
            explained by rope.

    Raises:
        ValueError: the shapes are not the same.
    """
    if reference.shape != got.shape:
        raise ValueError(f"shapes {reference.shape} and {got.shape}")
    a, b = _make_contiguous(reference), _make_contiguous(got)
    extent = _find_extent(a, b)
    if extent is None:
        if a.dtype == b.dtype:
            return None
        text = f"holds the reference's values as {b.dtype}"
        return TensorDiff(TensorKind.DTYPE, text, 0, max(0, a.size - 1), a.size, a.size)
    found = _describe_diff(a, b, extent, has_heads)
    if a.dtype != b.dtype and _is_real_float(a) and _is_real_float(b):
        rounded = _cast_quietly(a, b.dtype)
        if found.way in VAGUE and (apart := _find_extent(rounded, b)) is not None:
            return _describe_diff(rounded, b, apart, has_heads, f"; the rest is the reference's rounded to {b.dtype}")
    elif a.dtype == b.dtype and found.way in VAGUE and (dtype := find_rounded_dtype(a, b)) is not None:
        more = compare_tensors(a, _cast_quietly(b, dtype), has_heads)
        if more is not None and (more.way not in VAGUE or more.count * 2 <= found.count):
            return more
    return found


def differ_in_box(a: Array, b: Array, box: tuple[slice, ...]) -> bool:
    """Tell whether two arrays of one shape differ in a box, given by one slice per dimension. If the dtypes differ, `a`
    is cast to that of `b` first."""
    x, y = a[box], b[box]
    return bool(
        find_unequal_elements(_cast_quietly(x, y.dtype) if _is_real_float(x) and _is_real_float(y) else x, y).any()
    )


def _is_real_float(x: Array) -> bool:
    """Tell whether elements are floating-point numbers, and not complex."""
    return is_floating(x) and x.dtype.kind != "c"


def _cast_quietly(x: Array, dtype: dtype[generic]) -> Array:
    """Convert to another dtype; numbers that overflow become infinite without a warning."""
    import numpy as np

    with np.errstate(all="ignore"):
        return x.astype(dtype)


def _describe_diff(a: Array, b: Array, extent: tuple[int, int, int], has_heads: bool, note: str = "") -> TensorDiff:
    """Describe the difference of two arrays of one shape.

    Args:
        extent: (first flat index, last flat index, number) of differing elements.
        has_heads: whether the tensor may have attention heads.
        note: appended to the text.
    """
    import numpy as np

    first, last, count = extent
    row = a.size // a.shape[0] if a.ndim else 1
    rows = (first // row, last // row + 1) if a.ndim else None
    # the region: whole rows, so that what is said is said of rows
    low, high = rows or (0, 1)
    sampled = (high - low) * row > LIMIT
    end = low * row + LIMIT if sampled else high * row
    x, y = a.reshape(-1), b.reshape(-1)
    with np.errstate(all="ignore"):
        kind, text, detail = _find_kind(
            ArrayPair(a, b, first, last, count, x[low * row : end], y[low * row : end], sampled, has_heads)
        )
    # a bias goes the way of the rows of its weight
    plain = (text.replace("elements", "rows") if a.ndim == 1 and kind in _ROWS else text) + note
    if a.ndim > 1 and kind not in _PLACED and ((x[: low * row] != 0).any() or (x[high * row :] != 0).any()):
        text += f", in rows {low}:{high} of {a.shape[0]}"
    if sampled and kind not in _PLACED:
        text += f" (inferred from {end - low * row} of {a.size} elements)"
    return TensorDiff(kind, text + note, first, last, count, a.size, rows, detail, sampled, plain)


#: Kinds of rows in other places; and all whose text says where.
_ROWS = frozenset(
    (
        TensorKind.ZERO_ROWS,
        TensorKind.ROPE,
        TensorKind.EXCHANGED_ROWS,
        TensorKind.COPIED_ROWS,
        TensorKind.INTERLEAVED_ROWS,
        TensorKind.PERMUTED_ROWS,
    )
)
_PLACED = _ROWS | {
    TensorKind.IDENTITY,
    TensorKind.MEAN_ROWS,
    TensorKind.ZERO,
    TensorKind.ZERO_RANGE,
    TensorKind.ELEMENTS,
    TensorKind.TRANSPOSED,
    TensorKind.EXCHANGED_COLUMNS,
    TensorKind.COPIED_COLUMNS,
    TensorKind.INTERLEAVED_COLUMNS,
    TensorKind.PERMUTED_COLUMNS,
}


def _make_contiguous(x: Array) -> Array:
    """Return an array in row-major order; a 0-dim array stays 0-dim."""
    import numpy as np

    return np.ascontiguousarray(x).reshape(np.shape(x))  # a 0-dim array stays one


def _find_extent(a: Array, b: Array) -> tuple[int, int, int] | None:
    """Find where two arrays of one shape differ: (first flat index, last flat index, number of elements); None if
    nowhere."""
    import numpy as np

    x, y = a.reshape(-1), b.reshape(-1)
    first = last = -1
    count = 0
    for part in block_slices(len(x)):
        where = np.flatnonzero(find_unequal_elements(x[part], y[part]))
        if len(where):
            first = part.start + int(where[0]) if first < 0 else first
            last = part.start + int(where[-1])
            count += len(where)
    return (first, last, count) if count else None


def _find_kind(pair: ArrayPair) -> Found:
    """Return the most specific kind of difference that applies to every differing element, with its text.

    If no rule applies, a few differing elements are listed, or the distance of the two tensors is measured.
    """
    for rule in (_find_signed_zeros, _find_rounded, _find_zeros, _find_identity, _find_constant):
        if found := rule(pair):
            return found
    if found := _find_truncated_bfloat16(pair.x, pair.y):
        return found
    if pair.count <= _FEW and pair.a.size > 4 * _FEW:
        return _list_elements(pair)
    for rule in (_find_byte_order, tensor_values.find_not_finite, tensor_values.find_sign_change, *tensor_order.RULES):
        if found := rule(pair):
            return found
    for rule in (_find_mean_rows, _find_scattered_zeros):
        if found := rule(pair):
            return found
    if pair.count > 2 and (
        found := tensor_values.find_formula(pair)
    ):  # two elements always have some factor or distance
        return found
    return _list_elements(pair) if pair.count <= _FEW else tensor_values.measure_distance(pair)


def _list_half_dtypes() -> dict[str, dtype[generic]]:
    """Return {name: numpy dtype} of the floating-point dtypes with 16 bits."""
    import ml_dtypes
    import numpy as np

    return {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


def _find_rounded(pair: ArrayPair) -> Found | None:
    """Find whether values are the reference's rounded to a narrower dtype, or to the precision of bfloat16, float16 or
    tf32; None if not."""
    import numpy as np

    x, y = pair.x, pair.y
    if not _is_real_float(x) or not _is_real_float(y) or x.dtype.itemsize < y.dtype.itemsize:
        return None
    for name, dtype in (_list_half_dtypes() if x.dtype == y.dtype else {y.dtype.name: y.dtype}).items():
        if dtype == x.dtype:
            continue
        if all(are_same_bits(x[p].astype(dtype).astype(y.dtype), y[p]) for p in block_slices(len(x))):
            if not (y != 0).any():
                return None  # all of it vanished: zero says more
            text = f"holds exactly the reference's values rounded to {name}"
            if name == "float16" and y.dtype == np.float32:
                text += ", or to tf32, which has as many digits"
            return Found(TensorKind.ROUNDED, text, {"dtype": name})
    if x.dtype == y.dtype == np.float32 and all(_is_rounded_to_tf32(x[p], y[p]) for p in block_slices(len(x))):
        text = "holds the reference's values rounded to tf32, which has 10 bits of mantissa"
        return Found(TensorKind.ROUNDED, text, {"dtype": "tf32"})
    return None


def _is_rounded_to_tf32(x: Array, y: Array) -> bool:
    """Tell whether all values of `y` are those of `x` rounded to tf32 (10 bits of mantissa) in one way: truncated, to
    nearest with ties up, or to nearest with ties to even. Both are float32."""
    import numpy as np

    exact, found = as_integers(x).astype(np.int64), as_integers(y).astype(np.int64)
    low = exact & ~np.int64(0x1FFF)
    near = (exact + 0x1000) & ~np.int64(0x1FFF)
    even = (exact + 0xFFF + ((exact >> 13) & 1)) & ~np.int64(0x1FFF)
    return bool((found == low).all() or (found == near).all() or (found == even).all())


def _find_truncated_bfloat16(x: Array, y: Array) -> Found | None:
    """Find whether all values of `y` are the bfloat16 number next to that of `x`, below or above in magnitude:
    truncated, or rounded stochastically; None if not."""
    import numpy as np

    if x.dtype != np.float32 or y.dtype not in (x.dtype, _list_half_dtypes()["bfloat16"]):
        return None
    up = False
    for p in block_slices(len(x)):
        exact, found = as_integers(x[p]), as_integers(y[p].astype(x.dtype))
        low = exact & np.uint32(0xFFFF0000)
        above = (found == low + np.uint32(0x10000)) & (exact != low)
        if not (above | (found == low)).all():
            return None
        up = up or bool(above.any())
    if not up:
        text = "holds the reference's values cut off to bfloat16, not rounded"
        return Found(TensorKind.TRUNCATED_BFLOAT16, text)
    return Found(
        TensorKind.STOCHASTIC_BFLOAT16, "holds the reference's values rounded to bfloat16 at random, up or down"
    )


def find_rounded_dtype(a: Array, b: Array) -> dtype[generic] | None:
    """Return the 16-bit float dtype that all values of `b` are rounded to while those of `a` are not; None if there is
    none."""
    if not _is_real_float(a) or not _is_real_float(b):
        return None
    for dtype in _list_half_dtypes().values():
        if dtype.itemsize < a.dtype.itemsize and _can_hold(dtype, b.reshape(-1)):
            return None if _can_hold(dtype, a.reshape(-1)) else dtype
    return None


def _can_hold(dtype: dtype[generic], x: Array) -> bool:
    """Tell whether a dtype can hold all elements of a 1-d array without rounding."""
    return all(are_same_bits(_cast_quietly(_cast_quietly(x[p], dtype), x.dtype), x[p]) for p in block_slices(len(x)))


def _find_signed_zeros(pair: ArrayPair) -> Found | None:
    """Find whether nothing differs but the signs of zeros; None if more does."""
    if pair.x.dtype != pair.y.dtype or not all(bool((pair.x[p] == pair.y[p]).all()) for p in block_slices(len(pair.x))):
        return None
    text = f"differs in {pair.count} of {pair.a.size} elements, all of them zeros: -0.0 and 0.0 stand for each other"
    return Found(TensorKind.ELEMENTS, text)


def _find_zeros(pair: ArrayPair) -> Found | None:
    """Find whether every element from the first difference to the last is zero: the whole tensor, whole rows, or a
    range; None if not."""
    import numpy as np

    a, b, first, last = pair.a, pair.b, pair.first, pair.last
    flat = b.reshape(-1)
    if any((flat[first : last + 1][p] != 0).any() for p in block_slices(last + 1 - first)):
        return None
    if not any((flat[p] != 0).any() for p in block_slices(len(flat))):
        return Found(TensorKind.ZERO, "is all zeros")
    if last == first:
        return None  # one element; its bits are told
    row = a.size // a.shape[0] if a.ndim > 1 else 1
    # rows that are zero in both need not be told apart, so the range is as wide as zeros reach
    low, high = first // row, last // row + 1
    whole = not flat[low * row : high * row].astype(bool).any()
    if a.ndim > 1 and whole:
        detail = {"rows": (low, high)}
        if high == a.shape[0] and (high - low) * 4 <= a.shape[0]:
            return Found(
                TensorKind.ZERO_ROWS,
                f"has zeros in its last {high - low} rows ({low}:{high})",
                {**detail, "last": True},
            )
        return Found(TensorKind.ZERO_ROWS, f"has zeros in rows {low}:{high} of {a.shape[0]}", detail)
    if (
        np.count_nonzero(find_unequal_elements(a.reshape(-1)[first : last + 1], flat[first : last + 1])) * 2
        < last + 1 - first
    ):
        return None  # zeros here and there are no range
    return Found(
        TensorKind.ZERO_RANGE, f"has zeros in elements {first}:{last + 1} of {a.size}", {"range": (first, last + 1)}
    )


def _find_scattered_zeros(pair: ArrayPair) -> Found | None:
    """Find whether the differing elements are all zero, scattered over the tensor, as after underflow or pruning; None
    if not."""
    import numpy as np

    if pair.count <= _FEW or not _is_real_float(pair.y):
        return None
    lost, largest, smallest = 0, 0.0, np.inf
    for p in block_slices(len(pair.x)):
        x, y = pair.x[p], pair.y[p]
        wrong = find_unequal_elements(x, y)
        if y[wrong].any():
            return None
        sizes = abs(as_float64(x))
        lost += int(np.count_nonzero(wrong))
        largest = max(largest, float(sizes[wrong].max(initial=0.0)))
        smallest = min(smallest, float(sizes[~wrong & (x != 0)].min(initial=np.inf)))
    text = f"has zeros in {lost} of {pair.a.size} elements, here and there"
    if largest <= smallest < np.inf:
        text += f": those that were smallest, up to {largest:.3g}, as where numbers underflow"
    return Found(TensorKind.ZERO_ELEMENTS, text, {"count": lost})


def _find_identity(pair: ArrayPair) -> Found | None:
    """Find whether a square matrix is the identity; None if not."""
    import numpy as np

    b = pair.b
    if b.ndim != 2 or b.shape[0] != b.shape[1] or len(b) < 2 or pair.sampled:
        return None
    if not (b == np.eye(len(b), dtype=b.dtype)).all():
        return None
    return Found(TensorKind.IDENTITY, "is the identity matrix, as if newly initialised")


def _find_mean_rows(pair: ArrayPair) -> Found | None:
    """Find whether all differing rows are the mean of the other rows, as new rows of a vocabulary may be initialised;
    None if not."""
    import numpy as np

    b = pair.b
    if b.ndim != 2 or pair.sampled or not _is_real_float(b):
        return None
    row = b.shape[1]
    low, high = pair.first // row, pair.last // row + 1
    others = [*range(low), *range(high, len(b))]
    if high - low < 2 or len(others) < 2:
        return None
    block = b[low:high].astype(np.float64)
    mean = b[others].astype(np.float64).mean(axis=0)
    fine = 4 * dtype_epsilon(b) * float(abs(b[others].astype(np.float64)).max())
    if not (abs(block - mean) <= fine).all():
        return None
    where = f"rows {low}:{high} of {len(b)}"
    return Found(TensorKind.MEAN_ROWS, f"has {where} that are the mean of the others", {"rows": (low, high)})


def _find_constant(pair: ArrayPair) -> Found | None:
    """Find whether one value stands in every differing element, where the reference has several; None if not."""
    x, y = pair.x, pair.y
    if (
        len(y) < 2
        or pair.count < 2
        or find_unequal_elements(y[1:], y[:-1]).any()
        or not find_unequal_elements(x[1:], x[:-1]).any()
    ):
        return None
    value = y[0].item()
    return Found(TensorKind.CONSTANT, f"is {value:g} in every element, as if newly initialised", {"value": value})


def _list_elements(pair: ArrayPair) -> Found:
    """Describe a few differing elements, each with its index, both values and the differing bit."""
    import numpy as np

    a = pair.a
    x, y = a.reshape(-1), pair.b.reshape(-1)
    where: list[int] = []
    for part in block_slices(len(x)):
        where += [part.start + int(i) for i in np.flatnonzero(find_unequal_elements(x[part], y[part]))]
    texts, listed = [], []
    for i in where:
        index = [int(k) for k in np.unravel_index(i, a.shape)] if a.ndim else []
        text = f"element {index}: {y[i].item()!r} instead of {x[i].item()!r}"
        flipped = _name_flipped_bit(x[i : i + 1], y[i : i + 1])
        texts.append(f"{text} ({flipped})" if flipped else text)
        listed.append({"index": index, "expected": x[i].item(), "found": y[i].item(), "bit": flipped})
    return Found(
        TensorKind.ELEMENTS, f"differs in {len(where)} of {a.size} elements: {'; '.join(texts)}", {"elements": listed}
    )


#: (bits of the exponent, bits of the mantissa) by name of the dtype.
_FORMATS = {
    "float64": (11, 52),
    "float32": (8, 23),
    "float16": (5, 10),
    "bfloat16": (8, 7),
    "float8_e4m3fn": (4, 3),
    "float8_e5m2": (5, 2),
}


def _name_flipped_bit(x: Array, y: Array) -> str:
    """Name the bit in which two elements (arrays of one) differ, if it is a single one: "the sign bit flipped"; "" if
    not."""
    if x.dtype != y.dtype or x.dtype.itemsize > 8:
        return ""
    apart = int(as_integers(x)[0]) ^ int(as_integers(y)[0])
    if apart.bit_count() != 1:
        return ""
    k = apart.bit_length() - 1
    if x.dtype.name not in _FORMATS:
        return f"bit {k} flipped"
    exponent, mantissa = _FORMATS[x.dtype.name]
    if k == exponent + mantissa:
        return "the sign bit flipped"
    return f"exponent bit {k - mantissa} flipped" if k >= mantissa else f"mantissa bit {k} flipped"


def _find_byte_order(pair: ArrayPair) -> Found | None:
    """Find whether the bytes of every element are in reverse order; None if not."""
    x, y = pair.x, pair.y
    if x.dtype != y.dtype or x.dtype.itemsize not in (2, 4, 8) or x.dtype.kind == "c":
        return None
    if not all(bool((as_integers(x[p]).byteswap() == as_integers(y[p])).all()) for p in block_slices(len(x))):
        return None
    text = "holds the reference's bytes in reverse order within each element: written big-endian, read little-endian"
    return Found(TensorKind.BYTE_ORDER, text)
