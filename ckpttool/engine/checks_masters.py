"""Check of fp32 masters beside the bf16 or fp16 weights that a model computes with: each rounds to its weight, bit for bit.

Trainers with masters update them and round the result into the weights (`Tensor.copy_`), so the two differ only where they are of
different steps. Megatron-Core and nanotron load both again; of DeepSpeed's, the index has the masters as the weights, and what its
engine computes with in `Checkpoint.rounded`. Trainers that round at random (torchao's bf16_stochastic_round) keep no masters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..index.checkpoint import Checkpoint, TensorEntry, joined
from .checks_numbers import where
from .dtypes import cast, numpy_dtype
from .fill import Progress
from .findings import DAMAGE, Examined, Finding
from .stream import Reader, StreamJob, side_by_side

__all__ = ["masters"]

_HALF = ("bfloat16", "float16")
_SHOWN = 3
#: Below, kernels that are compiled with fast math take a float32 for zero.
_LEAST_NORMAL = 2.0**-126


@dataclass
class _Odd:
    """Elements of a master that do not round to the weight."""

    count: int
    first: int
    master: float
    rounded: float
    weight: float


def _pairs(ckpt: Checkpoint) -> dict[str, tuple[TensorEntry, TensorEntry]]:
    """{canonical name of a weight: (its master, the weight)}."""
    out = {}
    for name, t in ckpt.tensors.items():
        if t.path[:2] == ("extra", "master"):
            of = joined(("model", *t.path[2:]))
            if (weight := ckpt.tensors.get(of)) is not None:
                out[of] = (t, weight)
        elif (low := ckpt.rounded.get(name)) is not None:
            out[name] = (t, low)
    return {
        n: (t, w)
        for n, (t, w) in out.items()
        if t.dtype == "float32" and w.dtype in _HALF and t.shape == w.shape and t.numel
    }


def masters(at: Examined, progress: Progress) -> list[Finding]:
    """Masters that do not round to their weights, reading both, block by block; `progress` is called with ("compare", ...)."""
    ckpt, pairs = at.ckpt, _pairs(at.ckpt)
    jobs = ([StreamJob(n, pair[k]) for n, pair in pairs.items()] for k in range(2))
    streams = [Reader(at.source, ckpt.files).blocks(of) for of in jobs]
    total, passed = sum(t.nbytes for t, _ in pairs.values()), 0
    found: dict[str, _Odd] = {}
    for name, (master, weight) in pairs.items():
        for first, wide, low in side_by_side(streams, master, weight):
            odd = _differing(wide, low, weight.dtype)
            if odd is not None and name in found:
                found[name].count += odd.count
            elif odd is not None:
                odd.first += first
                found[name] = odd
            passed += len(wide)
            progress("compare", passed, total)
    if not found:
        return []
    rows = [
        f'"{n}": {o.count:,} of {pairs[n][0].numel:,} elements, the first {where(ckpt, pairs[n][0], o.first)}: the master {o.master:.9g} '
        f"rounds to {o.rounded:.9g}, and the weight is {o.weight:.9g}"
        for n, o in list(found.items())[:_SHOWN]
    ]
    more = f"; and {len(found) - _SHOWN:,} more" if len(found) > _SHOWN else ""
    text = (
        f"{len(found):,} of {len(pairs):,} fp32 masters do not round to the weights beside them. {'; '.join(rows)}{more}. The model computes with the "
        "weights, and training goes on from the masters, so they are from different steps, or one of the two was changed or restored in part. Take "
        "another copy of this step, or an earlier step"
    )
    return [Finding("masters", DAMAGE, None, tuple(found), text)]


def _differing(wide: memoryview, low: memoryview, dtype: str) -> _Odd | None:
    """What differs in a piece; `first` is relative to it."""
    import numpy as np

    f, w = np.frombuffer(wide, "<f4"), np.frombuffer(low, numpy_dtype(dtype))
    r = _rounded(f, "float32", dtype)
    wrong = r.view("u2") != w.view("u2")
    if not wrong.any():
        return None
    with np.errstate(all="ignore"):
        a, b = r.astype("f4"), w.astype("f4")
        wrong &= ~(np.isnan(a) & np.isnan(b))
        wrong &= ~((b == 0) & (np.abs(f) < _LEAST_NORMAL))
    other = _HALF[1 - _HALF.index(dtype)]  # of weights that were cast from one to the other since
    twice = _rounded(_rounded(f, "float32", other), other, dtype)
    wrong &= twice.view("u2") != w.view("u2")
    if not wrong.any():
        return None
    k = int(wrong.argmax())
    return _Odd(int(np.count_nonzero(wrong)), k, float(f[k]), float(a[k]), float(b[k]))


def _rounded(x: Any, dtype: str, to: str) -> Any:
    """Elements in another dtype, as torch rounds them."""
    import numpy as np

    out = np.empty(x.shape, numpy_dtype(to))
    cast(x.view("u1").data, dtype, out.view("u1").data, to)
    return out
