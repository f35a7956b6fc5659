"""Masters of TransformerEngine's FusedAdam that are stored as remainders (`store_param_remainders`): the bf16 weight
has the upper half of an fp32 number, and an int16 tensor beside it the lower half.

    model.w bfloat16, optim.state.w.master_param int16     ->     optim.state.w.master_param float32, exact

The weight is the master rounded to the nearest bf16, and away from zero if it lies halfway: where the lower half, read
as a signed number, is negative, one was added to the upper half, which wraps around. So any pair is a master, and
nothing but the file's own CRC32s tells whether the two are of one step. Megatron-Core's precision-aware optimizer saves
the same tensors as `param` or `fp32_param`, which are extra.master here; in fully_reshardable it gathers them in
buffers of float32, so that the file has the remainders as numbers (`Checkpoint.numeric_remainders`), which no job loads
again.

Sources: TransformerEngine 2.20, common/multi_tensor/adam.cu (AdamFunctorMasterParamRemainder),
pytorch/optimizers/fused_adam.py; megatron-core 0.16.1, optimizer/distrib_optimizer.py (get_parameter_state_dp_zero).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import Corrupt, argument
from ...index.checkpoint import Checkpoint, Chunks, TensorEntry, joined
from ..computed_files import BoxReader, ComputedFiles, choose_page_size

if TYPE_CHECKING:
    from ...storage.source import Source
    from ..copy.dtypes import Array

__all__ = [
    "add_joined_masters",
    "describe_remainders",
    "find_remainders",
    "join_masters",
    "list_weights_with_remainders",
    "move_masters_to_extra",
]

#: What FusedAdam calls the master among a parameter's state.
_SLOT = "master_param"


def find_remainders(ckpt: Checkpoint) -> dict[str, TensorEntry]:
    """Return {name of a master that is stored as a remainder: its bf16 weight}. A tensor whose weight is missing, not
    bf16, or of another shape is no remainder."""
    out = {}
    for name, t in ckpt.tensors.items():
        of = _name_of_weight(t) if t.dtype == "int16" or name in ckpt.numeric_remainders else None
        weight = ckpt.tensors.get(of) if of is not None else None
        if weight is not None and weight.dtype == "bfloat16" and weight.shape == t.shape:
            out[name] = weight
    return out


def list_weights_with_remainders(ckpt: Checkpoint) -> frozenset[str]:
    """Return the names of the weights whose masters are stored as remainders."""
    return frozenset(joined(weight.path) for weight in find_remainders(ckpt).values())


def _name_of_weight(t: TensorEntry) -> str | None:
    """Return the name of the weight that a tensor is the master of, by the tensor's path; None if it is no master."""
    if t.path[:2] == ("extra", "master"):
        return joined(("model", *t.path[2:]))
    if t.path[:2] == ("optim", "state") and len(t.path) == 4 and t.path[3] == _SLOT:
        return joined(("model", t.path[2]))
    return None


def describe_remainders(found: Iterable[str]) -> list[str]:
    """Return a list with one sentence about masters that stay remainders; [] where there are none.

    Args:
        found: the names of the masters.
    """
    names = list(found)
    return names and [
        f'{len(names):,} fp32 masters, first "{names[0]}", stay as they are stored: int16 remainders of the bf16 '
        "weights (store_param_remainders of TransformerEngine), which only a job with the same setting reads; "
        f"{argument('dequantize', ['*master*'])} joins weight and remainder into the exact fp32 number"
    ]


def join_masters(weight: Array, remainder: Array) -> Array:
    """Return the exact fp32 masters of bf16 weights and int16 remainders. All arrays have one length; `weight` has any
    dtype of two bytes that holds the bits of bf16."""
    low = remainder.view("u2")
    out: Array = ((weight.view("u2") - (low >> 15)).astype("u4") << 16 | low).view("f4")
    return out


def add_joined_masters(
    ckpt: Checkpoint, source: Source, chosen: Mapping[str, TensorEntry], files: ComputedFiles
) -> Checkpoint:
    """Replace remainders by float32 masters that are computed when they are read, and return the new index.

    Args:
        ckpt: the index, located.
        source: its files.
        chosen: {remainder: its weight}.
        files: gets the computed files.
    """
    reader, tensors = BoxReader(ckpt, source), dict(ckpt.tensors)
    for name, weight in chosen.items():
        t = ckpt.tensors[name]
        compute = _make_joiner(reader, weight, t, name)
        place = files.add(
            f"{name} (joined with its weight)", "float32", t.shape, compute, choose_page_size([t, weight])
        )
        tensors[name] = TensorEntry("float32", t.shape, t.path, Chunks.whole(t.shape, *place))
    files.working_bytes += reader.working_bytes
    note = (
        f'{len(chosen):,} fp32 masters, first "{next(iter(chosen))}", are joined from bf16 weights and int16 '
        "remainders, exactly; any two fit together, so nothing proves that both are of the same step"
    )
    left = ckpt.numeric_remainders - chosen.keys()
    return replace(ckpt, tensors=tensors, notes=[*ckpt.notes, note], numeric_remainders=left)


def _make_joiner(
    reader: BoxReader, weight: TensorEntry, remainder: TensorEntry, name: str
) -> Callable[[int, int], Array]:
    """Return a function (first, end) that reads these elements of a weight and its remainder and joins them to float32;
    `name` names the remainder in errors."""

    def join_range(first: int, end: int) -> Array:
        """Read both, and join them.

        Raises:
            Corrupt: a remainder in float32 is no whole number of 16 bits.
        """
        import numpy as np

        low = reader.read_range(remainder, first, end)
        if low.dtype != "i2":
            with np.errstate(invalid="ignore"):
                whole = low.astype("i2")
            if (whole != low).any():
                raise Corrupt(
                    f'"{name}": the other masters are int16 remainders of the weights, as float32 numbers, and '
                    f"{low[whole != low][0]:g} is none. Take another copy of this step.",
                    code="CKPT0415",
                )
            low = whole
        return join_masters(reader.read_range(weight, first, end), low)

    return join_range


def move_masters_to_extra(ckpt: Checkpoint) -> Checkpoint:
    """Return the same state with FusedAdam's masters (the slot `master_param`, with the shape of its weight) moved to
    extra.master, where other layouts look for masters."""
    tensors = {}
    for name, t in ckpt.tensors.items():
        of = _name_of_weight(t)
        weight = ckpt.tensors.get(of) if of is not None and t.path[0] == "optim" else None
        path = ("extra", "master", t.path[2]) if weight is not None and weight.shape == t.shape else t.path
        there = name if path == t.path or joined(path) in ckpt.tensors else joined(path)
        tensors[there] = t if there == name else replace(t, path=path)
    if tensors.keys() == ckpt.tensors.keys():
        return ckpt
    recorded = {**ckpt.recorded}
    for name in ckpt.tensors.keys() - tensors.keys():
        if name in recorded:
            recorded[joined(("extra", "master", ckpt.tensors[name].path[2]))] = recorded.pop(name)
    return replace(ckpt, tensors=tensors, recorded=recorded)
