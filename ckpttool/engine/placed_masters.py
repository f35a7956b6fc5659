"""fp32 masters in the place of the weights that a model computes with, for engines whose weights they are (DeepSpeed, FSDP1).

    model.w bfloat16, extra.master.w float32     ->     model.w float32, `rounded` bfloat16

Megatron-Core and nanotron save both. The engine gets the masters, and the weights follow from them by rounding, bit for bit: that is
proved here, reading both. So nothing is lost where only the masters are written.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import Unsupported, argument
from ..index.checkpoint import Checkpoint, TensorEntry, joined, tied_weights
from ..storage.source import Source
from .dtypes import cast, numpy_dtype
from .stream import Reader, StreamJob, side_by_side

__all__ = ["with_masters_as_weights"]

_HALF = ("bfloat16", "float16")
_SHOWN = 3
_LEAST_NORMAL = 2.0**-126  # below, kernels that are compiled with fast math take a float32 for zero


def with_masters_as_weights(ckpt: Checkpoint, source: Source) -> Checkpoint:
    """The same state with the masters of trained bf16 and fp16 weights as the weights; what they replace is in `rounded`.

    Raises:
        Unsupported: a master does not round to its weight.
    """
    paths = [t.path for t in ckpt.tensors.values()] + [v.path for v in ckpt.values.values()]
    trained = {str(p[2]) for p in paths if p[:2] == ("optim", "state")}
    model = {joined(t.path[1:]): t for t in ckpt.tensors.values() if t.path[0] == "model"}
    found = {
        n: (m, w) for n, w in model.items()
        if (m := ckpt.tensors.get(joined(("extra", "master", n)))) is not None
        and n in trained and m.dtype == "float32" and w.dtype in _HALF and m.shape == w.shape
    }  # fmt: skip
    if not found:
        return ckpt
    _refuse_others(ckpt, source, found)
    owners = {alias: owner for alias, owner in tied_weights(model).items() if owner in found}
    placed = {n: m for n, (m, _) in found.items()} | {a: found[o][0] for a, o in owners.items() if a not in found}
    tensors, rounded, recorded = {}, dict(ckpt.rounded), dict(ckpt.recorded)
    for name, t in ckpt.tensors.items():
        n = joined(t.path[1:])
        if t.path[:2] == ("extra", "master") and joined(t.path[2:]) in found:
            continue
        if t.path[0] == "model" and n in placed:
            rounded[name] = t
            recorded.pop(name, None)
            master = joined(placed[n].path)
            if master in ckpt.recorded:
                recorded[name] = ckpt.recorded[master]
            t = replace(placed[n], path=t.path)
        tensors[name] = t
    for n in found:
        recorded.pop(joined(("extra", "master", n)), None)
    dtypes = " and ".join(sorted({w.dtype for _, w in found.values()}))
    note = (
        f"{len(found):,} fp32 masters (extra.master) are the weights of the result, as its engine keeps them; the {dtypes} weights of the source are "
        "these, rounded, bit for bit, and are what the engine computes with"
    )
    return replace(ckpt, tensors=tensors, rounded=rounded, recorded=recorded, notes=[*ckpt.notes, note])


def _refuse_others(ckpt: Checkpoint, source: Source, found: dict[str, tuple[TensorEntry, TensorEntry]]) -> None:
    """Raises:
    Unsupported: a master does not round to its weight."""
    import numpy as np

    streams = [
        Reader(source, ckpt.files, ckpt.records).blocks([StreamJob(n, both[k]) for n, both in found.items()])
        for k in range(2)
    ]
    odd: dict[str, int] = {}
    for n, (master, weight) in found.items():
        dtype = numpy_dtype(weight.dtype)
        for _, wide, low in side_by_side(streams, master, weight):
            f, w = np.frombuffer(wide, "<f4"), np.frombuffer(low, dtype)
            rounded = np.empty(f.shape, dtype)
            cast(wide, "float32", rounded.view("u1").data, weight.dtype)
            wrong = rounded.view("u2") != w.view("u2")
            if wrong.any():
                wrong &= ~(np.isnan(f) & np.isnan(w)) & ~((w == 0) & (np.abs(f) < _LEAST_NORMAL))
                if count := int(np.count_nonzero(wrong)):
                    odd[n] = odd.get(n, 0) + count
    if odd:
        rows = ", ".join(f'"{n}" in {k:,} of {found[n][0].numel:,} elements' for n, k in list(odd.items())[:_SHOWN])
        more = f" and {len(odd) - _SHOWN:,} more" if len(odd) > _SHOWN else ""
        raise Unsupported(
            f"{len(odd):,} of {len(found):,} fp32 masters do not round to the weights beside them: {rows}{more}. The engine computes with its rounded "
            "masters, so the result would be another model than the source. Take another copy of this step or an earlier step; "
            f"{argument('only', ['model'])} converts the weights alone, and dcp and full carry both."
        )
