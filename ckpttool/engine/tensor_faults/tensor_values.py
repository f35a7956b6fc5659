"""Values of a tensor that follow from the reference's, element by element: a factor, an offset, a root, 8 bits; or do
not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .tensor_bits import (
    ArrayPair,
    Found,
    are_same_bits,
    as_float64,
    as_integers,
    block_slices,
    dtype_epsilon,
    is_floating,
)
from .tensor_kinds import TensorKind

if TYPE_CHECKING:
    from .tensor_bits import Array

__all__ = ["find_formula", "find_not_finite", "find_sign_change", "measure_distance"]

#: How many values decide which factor, offset or levels are tried.
_SAMPLE = 1 << 16
#: Fewer different values than this prove no formula with a number of its own, or without one.
_LEAST, _LEAST_PLAIN = 8, 3
#: The most different values of 8 bits, and how many elements show that there are no others.
_EIGHT, _MANY = 256, 1024


def find_not_finite(pair: ArrayPair) -> Found | None:
    """Find NaN or infinity where the reference has numbers; None if there is none."""
    import numpy as np

    x, y = pair.x, pair.y
    if not is_floating(y):
        return None
    bad = sum(
        int(np.count_nonzero(~np.isfinite(as_float64(y[p])) & np.isfinite(as_float64(x[p]))))
        for p in block_slices(len(y))
    )
    if not bad:
        return None
    return Found(
        TensorKind.NOT_FINITE,
        f"has {bad} elements that are NaN or infinite where the reference's are numbers",
        {"count": bad},
    )


def find_sign_change(pair: ArrayPair) -> Found | None:
    """Find whether values are the reference's with the opposite signs, or without signs, or its complex conjugates;
    None if not."""
    x, y = pair.x, pair.y
    if x.dtype == y.dtype == bool and all(bool((x[p] != y[p]).all()) for p in block_slices(len(x))):
        return Found(TensorKind.NEGATED, "holds the opposite of the reference's values: true where it has false")
    if x.dtype != y.dtype or x.dtype.kind in "ub":
        return None
    if x.dtype.kind == "c":
        conjugated = all(bool((y[p] == x[p].conj()).all()) for p in block_slices(len(x)))
        text = "holds the complex conjugates of the reference's values"
        return Found(TensorKind.CONJUGATED, text) if conjugated else None
    if all(bool((as_float64(y[p]) == -as_float64(x[p])).all()) for p in block_slices(len(x))):
        return Found(TensorKind.NEGATED, "holds the reference's values with the opposite sign")
    if all(bool((as_float64(y[p]) == abs(as_float64(x[p]))).all()) for p in block_slices(len(x))):
        return Found(TensorKind.ABSOLUTE, "holds the reference's values without their signs")
    return None


@dataclass(frozen=True)
class _Sums:
    """Sums over the elements that are finite on both sides."""

    x: float
    y: float
    xy: float
    apart: float
    largest: float
    count: int


def _sum_pair(pair: ArrayPair) -> _Sums:
    """Sum up squares, products and squared differences of two arrays, over the elements that are finite on both
    sides."""
    import numpy as np

    sum_x = sum_y = sum_xy = apart = largest = 0.0
    count = 0
    for p in block_slices(len(pair.x)):
        u, v = as_float64(pair.x[p]), as_float64(pair.y[p])
        fine = np.isfinite(u) & np.isfinite(v)
        u, v = u[fine], v[fine]
        count += len(u)
        sum_x += float(np.vdot(u, u).real)
        sum_y += float(np.vdot(v, v).real)
        sum_xy += float(np.vdot(u, v).real)
        apart += float(np.square(np.abs(v - u)).sum())
        largest = max(largest, float(np.abs(v - u).max(initial=0.0)))
    return _Sums(sum_x, sum_y, sum_xy, apart, largest, count)


def _formula_holds_everywhere(
    pair: ArrayPair, formula: Callable[[Array], Array], fine: float, apart: Callable[[Array], Array] = abs
) -> bool:
    """Tell whether every element equals formula(reference) up to rounding.

    Args:
        formula: applied to an array of reference values.
        fine: relative tolerance.
        apart: returns the magnitudes that `fine` is relative to, for an array of the formula's values; by default their
            absolute values.
    """
    import numpy as np

    tiny = float(np.finfo(np.float32).tiny)  # of smaller numbers a few bits are left
    for p in block_slices(len(pair.x)):
        u, v = as_float64(pair.x[p]), as_float64(pair.y[p])
        if not (abs(v - formula(u)) <= fine * apart(formula(u)) + tiny * fine).all():
            return False
    return True


def _rounding_tolerance(pair: ArrayPair) -> float:
    """Return the relative error that rounding may leave in a product, in the coarser dtype of the two arrays."""
    size, name = min((x.dtype.itemsize, x.dtype.name) for x in (pair.x, pair.y))
    return {1: 0.15, 2: 1e-2 if name == "bfloat16" else 2e-3, 4: 1e-5}.get(size, 1e-12)


def find_formula(pair: ArrayPair) -> Found | None:
    """Find a formula that gives every element from the reference's: a factor, an offset, a power or a quantisation;
    None if there is none."""
    import numpy as np

    u, v = as_float64(pair.x[:_SAMPLE]), as_float64(pair.y[:_SAMPLE])
    if "c" in (pair.x.dtype.kind, pair.y.dtype.kind) or not (np.isfinite(u).all() and np.isfinite(v).all()):
        return None
    for rule in (_find_integer_offset, _find_factor, _find_offset, _find_power, _find_exponential, _find_quantisation):
        if found := rule(pair, u, v):
            return found
    return None


def _find_factor(pair: ArrayPair, u: Array, v: Array) -> Found | None:
    """Find whether all values of a tensor are the reference's times one factor, within the rounding of its dtype;
    return that as a cause, None if they are not.

    Args:
        pair: the reference's values and the tensor's, all of them.
        u, v: their first elements, in float64; only `u` is used.
    """
    import numpy as np

    sums, fine = _sum_pair(pair), _rounding_tolerance(pair)
    if not sums.x:
        return None
    factor = sums.xy / sums.x
    floor = float(abs(u).max()) * abs(factor) * 1e-12 / fine
    if abs(factor - 1.0) <= 4 * fine or abs(factor) < 1e-12 or len(np.unique(abs(u))) < 2:
        return None
    if not _formula_holds_everywhere(pair, lambda u: factor * u, fine, lambda v: abs(v) + floor):
        return None
    if abs(factor - round(factor)) <= fine:
        factor = float(round(factor))
    return Found(
        TensorKind.SCALED,
        f"holds the reference's values times {factor:.{6 if fine < 1e-3 else 3}g}",
        {"factor": factor},
    )


def _find_integer_offset(pair: ArrayPair, u: Array, v: Array) -> Found | None:
    """Find whether integers are the reference's plus a number, modulo their size: zero points off by 1, or signed codes
    read as unsigned ones; None if not. `u` and `v` are not used."""

    x, y = pair.x, pair.y
    if {x.dtype.kind, y.dtype.kind} - {"i", "u"} or x.dtype.itemsize != y.dtype.itemsize:
        return None
    offset = as_integers(y[:1])[0] - as_integers(x[:1])[0]
    if not offset or any((as_integers(y[p]) - as_integers(x[p]) != offset).any() for p in block_slices(len(x))):
        return None
    half = 1 << (8 * x.dtype.itemsize - 1)
    number = (int(offset) + half - 1) % (2 * half) - half + 1
    text = f"holds the reference's values {'plus' if number > 0 else 'minus'} {abs(number)}"
    if number == half:
        text += f", modulo {2 * half}, as between signed integers and unsigned ones with a zero point of {half}"
    return Found(TensorKind.OFFSET, text, {"offset": number})


def _find_offset(pair: ArrayPair, u: Array, v: Array) -> Found | None:
    """Find whether values are the reference's plus a number, such as 1 between two kinds of norms; None if not.

    `u` and `v` are the first elements of the reference and of the tensor, in float64.
    """
    import numpy as np

    x, y = pair.x, pair.y
    if not is_floating(x) or not is_floating(y):
        return None
    offset, fine, largest = float(np.median(v - u)), 4 * max(dtype_epsilon(x), dtype_epsilon(y)), float(abs(u).max())
    one = x.dtype.type(float(np.round(offset)))
    if (
        abs(one) == 1
        and len(np.unique(u)) > 1
        and all(are_same_bits((x[p] + one).astype(y.dtype), y[p]) for p in block_slices(len(x)))
    ):
        text = (
            f"holds the reference's values {'plus' if one > 0 else 'minus'} 1, as between norms that multiply by w and "
            "those that multiply by 1 + w (Megatron's zero-centered gamma)"
        )
        return Found(
            TensorKind.OFFSET,
            text,
            {"offset": float(one)},
        )
    certain = 25 * fine * largest
    if not abs(offset) > certain or not u.max() - u.min() > certain or len(np.unique(u)) < _LEAST:
        return None
    if not _formula_holds_everywhere(pair, lambda u: u + offset, fine, lambda v: abs(v) + 2 * abs(offset)):
        return None
    text = f"holds the reference's values {'plus' if offset > 0 else 'minus'} {abs(offset):g}"
    return Found(TensorKind.OFFSET, text, {"offset": offset})


def _find_power(pair: ArrayPair, u: Array, v: Array) -> Found | None:
    """Find whether values are the square root of the reference's, or their square; None if not.

    `u` and `v` are the first elements of the reference and of the tensor, in float64.
    """
    import numpy as np

    if not is_floating(pair.x) or (v < 0).any() or len(np.unique(u)) < _LEAST_PLAIN:
        return None
    fine = 4 * _rounding_tolerance(pair)

    def fits(formula: Callable[[Array], Array]) -> bool:
        # near 1, rounding hides which power it is
        return bool((abs(formula(u) - u) > 4 * fine * abs(u)).mean() > 0.5) and _formula_holds_everywhere(
            pair, formula, fine
        )

    if not (u < 0).any() and fits(np.sqrt):
        return Found(TensorKind.ROOT, "holds the square root of the reference's values")
    if fits(np.square):
        return Found(TensorKind.SQUARE, "holds the square of the reference's values")
    return None


def _find_exponential(pair: ArrayPair, u: Array, v: Array) -> Found | None:
    """Find whether values are the exponential or the logarithm of the reference's, possibly negated, as in state space
    models that keep A_log for A = -exp(A_log); None if not.

    Args:
        u, v: the first elements of the reference and of the tensor, in float64.
    """
    import numpy as np

    if not is_floating(pair.x) or len(np.unique(u)) < _LEAST_PLAIN:
        return None
    formulas: tuple[tuple[TensorKind, str, Callable[[Array], Array]], ...] = (
        (TensorKind.EXPONENTIAL, "the exponential of the reference's values", np.exp),
        (TensorKind.EXPONENTIAL, "minus the exponential of the reference's values", lambda x: -np.exp(x)),
        (TensorKind.LOGARITHM, "the logarithm of the reference's values", np.log),
        (TensorKind.LOGARITHM, "the logarithm of minus the reference's values", lambda x: np.log(-x)),
    )
    fine = 4 * _rounding_tolerance(pair)
    for kind, what, formula in formulas:
        # near 0 a logarithm has few digits
        if _formula_holds_everywhere(pair, formula, fine, lambda v: abs(v) + 1e-3):
            return Found(kind, f"holds {what}, as between A and A_log")
    return None


def _find_quantisation(pair: ArrayPair, u: Array, v: Array) -> Found | None:
    """Find whether values are the reference's quantised in blocks; None if not.

    They are then whole multiples of the block's largest value / 127 or / 7 (linear), or have at most 256 distinct
    levels (any other code). `u` and `v` are not used: blocks begin where the tensor does.
    """
    u, v = (as_float64(t.reshape(-1)[:_SAMPLE]) for t in (pair.a, pair.b))  # blocks begin where the tensor does
    if not is_floating(pair.x) or not 0 < float(((v - u) ** 2).sum()) <= 0.25 * float((u * u).sum()):
        return None
    rows = {pair.a.shape[-1], pair.a.size // pair.a.shape[0]} if pair.a.ndim > 1 else set[int]()
    for block in (len(v), *sorted(rows | {1 << k for k in range(5, 13)}, reverse=True)):
        if block > len(v) or block < 3:
            continue
        x, y = _divide_by_block_max(u, block), _divide_by_block_max(v, block)
        levels = _count_distinct(y)
        few = levels <= _EIGHT and len(v) >= _MANY and _count_distinct(x) > 2 * levels
        if few or any(_are_integer_multiples(y, most) and not _are_integer_multiples(x, most) for most in (7, 127)):
            width = 4 if levels <= 16 and few else 8
            whose = "the tensor" if block == len(v) else f"each block of {block}"
            text = f"holds the reference's values quantised to {width} bits, relative to the largest of {whose}"
            return Found(TensorKind.QUANTISED, text, {"block": None if block == len(v) else block})
    return None


def _divide_by_block_max(x: Array, block: int) -> Array:
    """Return the absolute values of a 1-d array, each divided by the largest absolute value of its block of `block`
    elements; the last block may be shorter."""
    import numpy as np

    rows = abs(np.pad(x, (0, -len(x) % block))).reshape(-1, block)
    scale = rows.max(axis=1, keepdims=True)
    return (rows / np.where(scale > 0, scale, 1)).reshape(-1)[: len(x)]


def _are_integer_multiples(x: Array, most: int) -> bool:
    """Tell whether all numbers of `x` between 0 and 1 are integer multiples of 1 / `most`; False if fewer than two are
    between 0 and 1."""
    import numpy as np

    inner = x[(x > 0) & (x < 1)] * most
    return len(inner) > 1 and bool((abs(inner - np.round(inner)) < 1e-3).all())


def _count_distinct(x: Array) -> int:
    """Count distinct values of a non-negative array; neighbours within 1e-5, relative, count as one; 1 for an empty
    array."""
    import numpy as np

    found = np.sort(x)
    return 1 + int(np.count_nonzero(np.diff(found) > 1e-5 * found[1:] + 1e-12))


def measure_distance(pair: ArrayPair) -> Found:
    """Describe the distance between two arrays where no formula fits: close, or unrelated."""
    sums = _sum_pair(pair)
    if not sums.count:
        return Found(TensorKind.UNRELATED, "has values that are not numbers")
    relative = (sums.apart / sums.x) ** 0.5 if sums.x else float("inf")
    detail = {"relative": relative, "largest": sums.largest}
    if relative <= 0.5:
        text = (
            f"is close to the reference (relative distance {relative:.2g}): from another step, or computed differently"
        )
        return Found(TensorKind.CLOSE, text, detail)
    cosine = sums.xy / (sums.x * sums.y) ** 0.5 if sums.x and sums.y else 0.0
    if cosine > 0.7:
        text = f"is similar to the reference (cosine {cosine:.2f}): from another step, or computed differently"
        return Found(TensorKind.CLOSE, text, {**detail, "cosine": cosine})
    ratio = (sums.y / sums.x) ** 0.5 if sums.x else float("inf")
    text = f"has values unrelated to the reference's (cosine {cosine:.2f}, {ratio:.3g} times its norm)"
    return Found(TensorKind.UNRELATED, text, {**detail, "cosine": cosine, "norm": ratio})
