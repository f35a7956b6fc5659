"""fp32 masters in the place of the weights that a model computes with, for engines whose weights they are (DeepSpeed,
FSDP1).

    model.w bfloat16, extra.master.w float32     ->     model.w float32, `rounded` bfloat16

Megatron-Core and nanotron save both, and so does TransformerEngine's FusedAdam, as optim.state.w.master_param. The
engine gets the masters, and the weights follow from them by rounding, bit for bit: that is proved here, reading both.
So nothing is lost where only the masters are written.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import Unsupported, argument
from ...index.checkpoint import Checkpoint, joined, tied_weights
from ...storage.source import Source
from ..copy.fill import silent
from ..transform import masters
from ..transform.remainders import move_masters_to_extra

__all__ = ["with_masters_as_weights"]

_HALF = ("bfloat16", "float16")


def with_masters_as_weights(ckpt: Checkpoint, source: Source) -> Checkpoint:
    """Return the same state with trained bf16 and fp16 weights replaced by their fp32 master weights; the `rounded` of
    the result holds the replaced weights.

    Raises:
        Unsupported: a master does not round to its weight.
    """
    ckpt = move_masters_to_extra(ckpt)
    paths = [t.path for t in ckpt.tensors.values()] + [v.path for v in ckpt.values.values()]
    trained = {str(p[2]) for p in paths if p[:2] == ("optim", "state") and len(p) > 2}
    model = {t.local_name: t for t in ckpt.tensors.values() if t.component == "model"}
    found = {
        n: (m, w)
        for n, w in model.items()
        if (m := ckpt.tensors.get(joined(("extra", "master", n)))) is not None
        and n in trained
        and m.dtype == "float32"
        and w.dtype in _HALF
        and m.shape == w.shape
    }
    if not found:
        return ckpt
    if odd := masters.find_differing_masters(ckpt, source, silent):
        raise Unsupported(
            f"{masters.describe_differing_masters(ckpt, odd)}. An engine computes with its rounded masters, so the "
            "result "
            f"would be another model than the source: {argument('only', ['model'])} converts the weights alone, and "
            "dcp and full carry both.",
            code="CKPT0316",
        )
    # the masters take the places of the weights, and of names tied to them
    owners = {alias: owner for alias, owner in tied_weights(model).items() if owner in found}
    placed = {n: m for n, (m, _) in found.items()} | {a: found[o][0] for a, o in owners.items() if a not in found}
    tensors, rounded, recorded = {}, dict(ckpt.rounded), dict(ckpt.recorded)
    for name, t in ckpt.tensors.items():
        n = t.local_name
        if t.path[:2] == ("extra", "master") and joined(t.path[2:]) in found:
            continue
        if t.component == "model" and n in placed:
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
        f"{len(found):,} fp32 masters (extra.master) are the weights of the result, as its engine keeps them; the "
        f"{dtypes} weights of the source are these, rounded, bit for bit, and are what the engine computes with"
    )
    return replace(ckpt, tensors=tensors, rounded=rounded, recorded=recorded, notes=[*ckpt.notes, note])
