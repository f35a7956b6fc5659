"""How two tensors of one shape differ, in a word that says what went wrong.

    tensor_diff(reference, got) -> TensorDiff("rounded-bfloat16", "holds the reference's values rounded to bfloat16", ...)

The most specific kind that is true of every differing element is the one that is given:

    dtype, rounded-bfloat16, rounded-float16, zero, zero-rows, zero-range, constant, elements, not-finite, negated,
    absolute, transposed, shifted, rope, exchanged-rows, copied-rows, permuted-rows, scaled, close, unrelated

Comparisons are of bits, so that NaN equals NaN of the same bits and 0.0 is not -0.0. Tensors are looked through in
blocks. Of one with more than `LIMIT` elements the kind is told from LIMIT elements, from the first differing row on,
and the result says so; where it differs and in how many elements is always of all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LIMIT", "TensorDiff", "tensor_diff"]

LIMIT = 1 << 24
_BLOCK = 1 << 20
_FEW = 4
_SHIFTS = 256


@dataclass
class TensorDiff:
    """How a tensor differs from its reference.

    `first` and `last` are flat indices of differing elements, `count` how many there are of `elements`. `rows` is the
    range of indices of dim 0 that they lie in. `text` completes "the tensor ...". `detail` has what the kind is about:
    {"factor": 2.0}, {"shift": 1}, {"from": (16, 32), "to": (0, 16)}. `sampled` says that a part was looked at.
    """

    kind: str
    text: str
    first: int
    last: int
    count: int
    elements: int
    rows: tuple[int, int] | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    sampled: bool = False


def tensor_diff(reference: Any, got: Any) -> TensorDiff | None:
    """How `got` differs from `reference`, arrays of one shape; None if they are equal.

    Raises:
        ValueError: the shapes are not the same.
    """
    if reference.shape != got.shape:
        raise ValueError(f"shapes {reference.shape} and {got.shape}")
    a, b = _contiguous(reference), _contiguous(got)
    place = _extent(a, b)
    if place is None:
        if a.dtype == b.dtype:
            return None
        return TensorDiff("dtype", f"holds the reference's values as {b.dtype}", 0, max(0, a.size - 1), a.size, a.size)
    first, last, count = place
    row = a.size // a.shape[0] if a.ndim else 1
    rows = (first // row, last // row + 1) if a.ndim else None
    # the region: whole rows, so that what is said is said of rows
    low, high = (rows[0], rows[1]) if rows else (0, 1)
    sampled = (high - low) * row > LIMIT
    if sampled:
        high = low + max(1, LIMIT // row)
    flat = (a.reshape(-1), b.reshape(-1))
    end = min(high * row, low * row + LIMIT) if sampled else high * row
    region = (flat[0][low * row : end], flat[1][low * row : end])
    found = _kind(a, b, region, (first, last, count), sampled)
    kind, text, detail = found
    if rows is not None and a.ndim > 1 and rows != (0, a.shape[0]) and kind not in _PLACED:
        text += f", in rows {rows[0]}:{rows[1]} of {a.shape[0]}"
    if sampled:
        text += f" (told from {end - low * row} of {a.size} elements)"
    return TensorDiff(kind, text, first, last, count, a.size, rows, detail, sampled)


#: Kinds whose text says where.
_PLACED = frozenset((
    "zero", "zero-rows", "zero-range", "elements", "exchanged-rows", "copied-rows", "permuted-rows", "rope",
    "transposed",
))  # fmt: skip

Found = tuple[str, str, dict[str, Any]]


def _contiguous(x: Any) -> Any:
    import numpy as np

    return np.ascontiguousarray(x).reshape(np.shape(x))  # a 0-dim array stays one


def _bits(x: Any) -> Any:
    """The elements as integers, or as raw bytes if there is no integer of that size."""
    size = x.dtype.itemsize
    return x.view(f"u{size}") if size in (1, 2, 4, 8) else x.view(f"V{size}")


def _unequal(a: Any, b: Any) -> Any:
    """Where elements differ: by their bits, or by value if the dtypes differ."""
    import numpy as np

    if a.dtype == b.dtype:
        return _bits(a) != _bits(b)
    with np.errstate(all="ignore"):
        x, y = _wide(a), _wide(b)
        return (x != y) & ~(np.isnan(x) & np.isnan(y))


def _wide(x: Any) -> Any:
    import numpy as np

    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _blocks(n: int) -> Iterator[slice]:
    for k in range(0, n, _BLOCK):
        yield slice(k, min(n, k + _BLOCK))


def _extent(a: Any, b: Any) -> tuple[int, int, int] | None:
    """(first, last, count) of differing elements, or None."""
    import numpy as np

    x, y = a.reshape(-1), b.reshape(-1)
    first = last = -1
    count = 0
    for part in _blocks(len(x)):
        where = np.flatnonzero(_unequal(x[part], y[part]))
        if len(where):
            first = part.start + int(where[0]) if first < 0 else first
            last = part.start + int(where[-1])
            count += len(where)
    return (first, last, count) if count else None


def _same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and not _unequal(a, b).any()


def _floating(x: Any) -> bool:
    return x.dtype.kind in "fc" or (x.dtype.kind == "V" and "float" in x.dtype.name)


def _kind(a: Any, b: Any, region: tuple[Any, Any], place: tuple[int, int, int], sampled: bool) -> Found:
    import numpy as np

    x, y = region
    with np.errstate(all="ignore"):
        for rule in (_rounded, _zeros, _constant):
            if found := rule(a, b, region, place):
                return found
        if place[2] <= _FEW and a.size > 4 * _FEW:
            return _elements(a, b)
        if _floating(b) and (found := _not_finite(x, y)):
            return found
        for rule in (_signs, _transposed, _shifted, _rows):
            if (not sampled or rule is not _transposed) and (found := rule(a, b, region, place)):
                return found
        if place[2] <= _FEW:
            return _elements(a, b)
        return _values(x, y)


def _rounded(a: Any, b: Any, region: tuple[Any, Any], place: tuple[int, int, int]) -> Found | None:
    import ml_dtypes
    import numpy as np

    x, y = region
    if not _floating(x) or not _floating(y) or x.dtype.kind == "c" or x.dtype.itemsize < y.dtype.itemsize:
        return None
    if x.dtype.itemsize <= 2 and x.dtype == y.dtype:
        # bf16 and fp16 can each be rounded to the other
        names = [n for n, d in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)) if np.dtype(d) != x.dtype]
    else:
        names = ["bfloat16", "float16"]
    for name in names:
        dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else np.float16)
        if x.dtype != y.dtype and y.dtype != dtype:
            continue
        if all(_same(x[p].astype(dtype).astype(y.dtype), y[p]) for p in _blocks(len(x))):
            if not (y != 0).any():
                return None  # all of it vanished: zero says more
            return f"rounded-{name}", f"holds exactly the reference's values rounded to {name}", {"dtype": name}
    return None


def _zeros(a: Any, b: Any, region: tuple[Any, Any], place: tuple[int, int, int]) -> Found | None:
    import numpy as np

    first, last, _ = place
    flat = b.reshape(-1)
    if any((flat[first : last + 1][p] != 0).any() for p in _blocks(last + 1 - first)):
        return None
    if not any((flat[p] != 0).any() for p in _blocks(len(flat))):
        return "zero", "is all zeros", {}
    if last == first:
        return None  # one element; its bits are told
    row = a.size // a.shape[0] if a.ndim > 1 else 1
    # rows that are zero in both need not be told apart, so the range is as wide as zeros reach
    low, high = first // row, last // row + 1
    whole = not flat[low * row : high * row].astype(bool).any()
    if a.ndim > 1 and whole:
        detail = {"rows": (low, high)}
        if high == a.shape[0] and (high - low) * 4 <= a.shape[0]:
            return "zero-rows", f"has zeros in its last {high - low} rows ({low}:{high})", {**detail, "last": True}
        return "zero-rows", f"has zeros in rows {low}:{high} of {a.shape[0]}", detail
    if np.count_nonzero(_unequal(a.reshape(-1)[first : last + 1], flat[first : last + 1])) * 2 < last + 1 - first:
        return None  # zeros here and there are no range
    return "zero-range", f"has zeros in elements {first}:{last + 1} of {a.size}", {"range": (first, last + 1)}


def _constant(a: Any, b: Any, region: tuple[Any, Any], place: tuple[int, int, int]) -> Found | None:
    x, y = region
    if len(y) < 2 or place[2] < 2 or _unequal(y[1:], y[:-1]).any() or not _unequal(x[1:], x[:-1]).any():
        return None
    value = y[0].item()
    return "constant", f"is {value:g} in every element, as if newly initialised", {"value": value}


def _elements(a: Any, b: Any) -> Found:
    """A few elements, each with its index, both values and the differing bits."""
    import numpy as np

    x, y = a.reshape(-1), b.reshape(-1)
    where: list[int] = []
    for part in _blocks(len(x)):
        where += [part.start + int(i) for i in np.flatnonzero(_unequal(x[part], y[part]))]
    texts, listed = [], []
    for i in where:
        index = [int(k) for k in np.unravel_index(i, a.shape)] if a.ndim else []
        text = f"element {index}: {y[i].item()!r} instead of {x[i].item()!r}"
        flipped = _flipped(x[i : i + 1], y[i : i + 1])
        texts.append(f"{text} ({flipped})" if flipped else text)
        listed.append({"index": index, "expected": x[i].item(), "found": y[i].item(), "bit": flipped})
    return "elements", f"differs in {len(where)} of {a.size} elements: {'; '.join(texts)}", {"elements": listed}


#: (bits of the exponent, bits of the mantissa) by name of the dtype.
_FORMATS = {
    "float64": (11, 52), "float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7), "float8_e4m3fn": (4, 3),
    "float8_e5m2": (5, 2),
}  # fmt: skip


def _flipped(x: Any, y: Any) -> str:
    """Which bit differs, if it is a single one: "the sign bit", "exponent bit 7", "mantissa bit 0"."""
    if x.dtype != y.dtype or x.dtype.itemsize > 8:
        return ""
    apart = int(_bits(x)[0]) ^ int(_bits(y)[0])
    if apart.bit_count() != 1:
        return ""
    k = apart.bit_length() - 1
    if x.dtype.name not in _FORMATS:
        return f"bit {k} flipped"
    exponent, mantissa = _FORMATS[x.dtype.name]
    if k == exponent + mantissa:
        return "the sign bit flipped"
    return f"exponent bit {k - mantissa} flipped" if k >= mantissa else f"mantissa bit {k} flipped"


def _not_finite(x: Any, y: Any) -> Found | None:
    import numpy as np

    bad = sum(int(np.count_nonzero(~np.isfinite(_wide(y[p])) & np.isfinite(_wide(x[p])))) for p in _blocks(len(y)))
    if not bad:
        return None
    return (
        "not-finite",
        f"has {bad} elements that are NaN or infinite where the reference's are numbers",
        {"count": bad},
    )


def _signs(a: Any, b: Any, region: tuple[Any, Any], place: tuple[int, int, int]) -> Found | None:
    x, y = region
    if x.dtype != y.dtype or x.dtype.kind in "ub" or x.dtype.kind == "c":
        return None
    if all(bool((_wide(y[p]) == -_wide(x[p])).all()) for p in _blocks(len(x))):
        return "negated", "holds the reference's values with the opposite sign", {}
    if all(bool((_wide(y[p]) == abs(_wide(x[p]))).all()) for p in _blocks(len(x))):
        return "absolute", "holds the reference's values without their signs", {}
    return None


def _transposed(a: Any, b: Any, region: tuple[Any, Any], place: tuple[int, int, int]) -> Found | None:
    if a.ndim != 2 or min(a.shape) < 2 or a.dtype != b.dtype:
        return None
    turned = a.T.reshape(-1)
    return ("transposed", "holds the reference transposed", {}) if _same(turned, b.reshape(-1)) else None


def _shifted(a: Any, b: Any, region: tuple[Any, Any], place: tuple[int, int, int]) -> Found | None:
    """got[i] == reference[i - k] over the differing range, except its first k elements."""
    if a.dtype != b.dtype:
        return None
    first, last, count = place
    x, y = a.reshape(-1), b.reshape(-1)
    n = min(last + 1 - first, LIMIT)
    if count < 16 or count * 2 < last + 1 - first:
        return None
    for k in range(1, min(_SHIFTS, n // 4) + 1):
        for sign in (1, -1):
            s = first + k if sign > 0 else first
            probe = min(32, n - k)
            for size in (probe, n - k):
                u = x[s - k : s - k + size] if sign > 0 else x[s + k : s + k + size]
                if len(u) != size or not _same(u, y[s : s + size]):
                    break
            else:
                # a constant stretch is equal to itself at any distance
                if _unequal(y[s + 1 : s + size], y[s : s + size - 1]).any():
                    toward = "end" if sign > 0 else "beginning"
                    what = f"holds the reference shifted by {k} element{'s' if k > 1 else ''} toward the {toward}"
                    if (first, last + 1) != (0, a.size) and last + 1 - first < a.size - 2 * k:
                        what += f", in elements {first}:{last + 1} of {a.size}"
                    return "shifted", what, {"shift": sign * k}
    return None


# ----------------------------------------------------------------------------------------------------------------- rows


def _marks(x: Any) -> list[bytes | int]:
    """A hash of each row; rows with the same hash count as equal."""
    from blake3 import blake3

    if x.ndim == 1:
        return [int(v) for v in _bits(x)]
    raw = x.reshape(x.shape[0], -1)
    return [blake3(raw[i].tobytes()).digest(16) for i in range(len(raw))]


def _rows(a: Any, b: Any, region: tuple[Any, Any], place: tuple[int, int, int]) -> Found | None:
    """Rows of the reference in another order, or some of them twice."""
    if a.dtype != b.dtype or a.ndim == 0 or a.shape[0] < 2 or (a.ndim == 1 and a.size > 1 << 22):
        return None
    if a.ndim > 1 and a.size == a.shape[0] and a.size > 1 << 22:
        return None
    theirs, ours = _marks(a), _marks(b)
    wrong = [i for i, (m, n) in enumerate(zip(theirs, ours, strict=True)) if m != n]
    source: dict[bytes | int, int] = {}
    for i, m in enumerate(theirs):
        source.setdefault(m, i)
    if len(source) < 2 or any(ours[i] not in source for i in wrong):
        return None
    if a.ndim == 1 and (len(source) * 2 < len(theirs) or len(wrong) < 8):
        return None  # too few different elements to call it an order
    order = list(range(len(ours)))
    for i in wrong:
        order[i] = source[ours[i]]
    unique = len(source) == len(theirs)
    what = "elements" if a.ndim == 1 else "rows"
    again = sorted(theirs, key=str) == sorted(ours, key=str)
    if again and unique and (head := _interleaved(order)):
        size, toward = head
        return (
            "rope",
            f"has its {what} reordered within heads of {size}: {toward}, as between the two ways to compute rope",
            {"head": size, "toward": toward},
        )
    runs = _runs(wrong, order)
    if again and len(runs) == 2 and (runs[0][0], runs[0][1]) == (runs[1][2], runs[1][3]):
        (p, q, r, s), _ = runs
        if (r, s) == (runs[1][0], runs[1][1]):
            text = f"has {what} {p}:{q} and {r}:{s} exchanged"
            return "exchanged-rows", text, {"ranges": [(p, q), (r, s)]}
    if not again and len(runs) <= 4:
        text = " and ".join(f"{what} {p}:{q} that are the reference's {what} {r}:{s}" for p, q, r, s in runs)
        return "copied-rows", f"has {text}", {"to": runs[0][:2], "from": runs[0][2:]}
    if again and unique:
        return "permuted-rows", f"has the reference's {what} in another order, {len(wrong)} of {len(ours)} elsewhere", {
            "order": order[:64]
        }  # fmt: skip
    return None


def _runs(wrong: list[int], order: list[int]) -> list[tuple[int, int, int, int]]:
    """(first, end, first in the reference, end there) of consecutive rows that are consecutive in the reference, too."""
    out: list[list[int]] = []
    for i in wrong:
        if out and out[-1][1] == i and out[-1][3] == order[i]:
            out[-1][1] += 1
            out[-1][3] += 1
        else:
            out.append([i, i + 1, order[i], order[i] + 1])
    return [(a, b, c, d) for a, b, c, d in out]


def _interleaved(order: list[int]) -> tuple[int, str] | None:
    """(size of a head, direction) if rows are reordered from halves to pairs, or back, within each head."""
    n = len(order)
    for size in range(4, n + 1, 2):
        if n % size:
            continue
        half = size // 2
        pairs = [k // 2 + half * (k % 2) for k in range(size)]  # got row k is the reference's row pairs[k]
        halves = [2 * k if k < half else 2 * (k - half) + 1 for k in range(size)]
        for wanted, text in ((pairs, "from halves to interleaved pairs"), (halves, "from interleaved pairs to halves")):
            if all(order[h + k] == h + wanted[k] for h in range(0, n, size) for k in range(size)):
                return size, text
    return None


# --------------------------------------------------------------------------------------------------------------- values


def _values(x: Any, y: Any) -> Found:
    """A factor, a small distance, or nothing in common, measured in the region that differs."""
    import numpy as np

    kept = sum_x = sum_y = sum_xy = apart = largest = 0.0
    ratios: list[Any] = []
    for p in _blocks(len(x)):
        u, v = _wide(x[p]), _wide(y[p])
        fine = np.isfinite(u) & np.isfinite(v)
        u, v = u[fine], v[fine]
        kept += len(u)
        sum_x += float(np.vdot(u, u).real)
        sum_y += float(np.vdot(v, v).real)
        sum_xy += float(np.vdot(u, v).real)
        apart += float(np.square(np.abs(v - u)).sum())
        largest = max(largest, float(np.abs(v - u).max(initial=0.0)))
        ratios.append((u[:4096], v[:4096]))
    if not kept:
        return "unrelated", "has values that are not numbers", {}
    u, v = (np.concatenate([r[k] for r in ratios]) for k in (0, 1))
    some = u != 0
    if some.any() and sum_x > 0:
        factor = sum_xy / sum_x
        fine = {1: 0.15, 2: 1e-2 if "bfloat16" in x.dtype.name else 2e-3, 4: 1e-5}.get(x.dtype.itemsize, 1e-12)
        exact = abs(v - factor * u) <= fine * np.abs(factor * u) + np.abs(u).max() * 1e-12
        rest = apart - (factor - 1.0) ** 2 * sum_x
        far = abs(factor - 1.0) > 4 * fine and abs(factor) > 1e-6
        if far and exact.all() and rest <= fine**2 * factor**2 * sum_x + 1e-30:
            return "scaled", f"holds the reference's values times {factor:.6g}", {"factor": factor}
    relative = (apart / sum_x) ** 0.5 if sum_x else float("inf")
    detail = {"relative": relative, "largest": largest}
    if relative <= 0.5:
        text = (
            f"is close to the reference (relative distance {relative:.2g}): from another step, or computed differently"
        )
        return "close", text, detail
    cosine = sum_xy / (sum_x * sum_y) ** 0.5 if sum_x and sum_y else 0.0
    if cosine > 0.7:
        text = f"is similar to the reference (cosine {cosine:.2f}): from another step, or computed differently"
        return "close", text, {**detail, "cosine": cosine}
    ratio = (sum_y / sum_x) ** 0.5 if sum_x else float("inf")
    text = f"has values unrelated to the reference's (cosine {cosine:.2f}, {ratio:.3g} times its norm)"
    return "unrelated", text, {**detail, "cosine": cosine, "norm": ratio}
