"""Values that come from other tensors of the checkpoint, where a tensor resembles nothing in its own reference.

Another moment of the same parameter; a tensor outside model and optimizer with the parameter's name, such as an average
(EMA); adapters (LoRA) that were added to the weight they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ...engine.tensor_faults.tensor_bits import dtype_epsilon, is_floating
from ...engine.tensor_faults.tensor_diff import TensorDiff, compare_tensors, find_rounded_dtype
from ...engine.tensor_faults.tensor_kinds import TensorKind
from ...index.checkpoint import Checkpoint
from ..text import parse_fqn, parse_slot

if TYPE_CHECKING:
    from ...engine.tensor_faults.tensor_bits import Array

__all__ = ["find_related_tensor", "yield_side_tensors"]

#: Kinds that only equal values can have.
_TELLING = frozenset((TensorKind.ABSOLUTE, TensorKind.NEGATED, TensorKind.ROUNDED, TensorKind.DTYPE))

#: What the names of two factors of an adapter have, in lower case.
_FACTORS = (("lora_a", "lora_b"), ("lora_down", "lora_up"))

Read = Callable[[str], "Array | None"]


def find_related_tensor(ckpt: Checkpoint, read: Read, name: str, found: TensorDiff, got: Array) -> TensorDiff | None:
    """Find whether the values of a tensor come from other tensors of the reference.

    Args:
        ckpt: the reference.
        read: returns the array of one of its tensors by name, or None if that is too large.
        name: canonical name of the tensor.
        found: how the tensor differs from the reference's tensor of that name.
        got: the tensor's values.

    Returns:
        `found` with the kind and text of that relation; None if there is no relation.
    """
    is_weight = parse_slot(name) == "weights"
    way = TensorKind.COPIED if is_weight else TensorKind.MOMENTS_COPIED
    for other, whose in (_yield_side_values if is_weight else _yield_other_moments)(ckpt, name):
        if (text := _describe_equal_values(read(other), got, whose)) is not None:
            return replace(found, way=way, text=text, plain=text)
    return _find_merged_lora(ckpt, read, name, found, got) if is_weight else None


def _yield_other_moments(ckpt: Checkpoint, name: str) -> Iterator[tuple[str, str]]:
    """Yield (canonical name, text about its values) of the other slots that the same parameter has, whose values a slot
    may hold by mistake: exp_avg those of exp_avg_sq.

    Args:
        ckpt: the reference.
        name: canonical name of the slot.
    """
    for other in ckpt.tensors:
        if other != name and parse_slot(other) != "weights" and parse_fqn(other) == parse_fqn(name):
            yield other, f"the values of {parse_slot(other)}"


def _yield_side_values(ckpt: Checkpoint, name: str) -> Iterator[tuple[str, str]]:
    """Yield (canonical name, text about its values) of the tensors outside model and optimizer that belong to a weight,
    such as its moving average.

    Args:
        ckpt: the reference.
        name: canonical name of the weight.
    """
    for other, at in yield_side_tensors(ckpt.tensors, parse_fqn(name)):
        yield other, f"the values that the reference has in {at}"


def yield_side_tensors(names: Iterable[str], fqn: str) -> Iterator[tuple[str, str]]:
    """Yield (name, its prefix before the FQN) of the tensors outside model and optimizer that belong to a parameter.

    `names` are canonical names, such as "extra.ema.model.norm.weight".
    """
    for n in names:
        if n.endswith("." + fqn) and n.partition(".")[0] not in ("model", "optim", "rng", "dataloader"):
            yield n, n[: -len(fqn) - 1]


def _describe_equal_values(other: Array | None, got: Array, whose: str) -> str | None:
    """Return a text "holds ..." if `got` has the values of `other`, up to rounding, sign or dtype; None otherwise.

    `other` is None if it could not be read; `whose` describes its values.
    """
    if other is None or other.shape != got.shape:
        return None
    found = compare_tensors(other, got)
    if found is None:
        return f"holds {whose}"
    return found.text.replace("the reference's values", whose) if found.way in _TELLING else None


def _find_merged_lora(ckpt: Checkpoint, read: Read, name: str, found: TensorDiff, got: Array) -> TensorDiff | None:
    """Find whether a weight is the reference's plus a multiple of the product of its two LoRA factors.

    Arguments and result are those of `find_related_tensor`.
    """
    import numpy as np

    for names, words in _yield_lora_factors(ckpt, name) if got.ndim == 2 and is_floating(got) else ():
        base, down, up = (read(n) for n in (name, *names))
        if base is None or down is None or up is None or down.ndim != 2 or up.ndim != 2:
            continue
        change = got.astype(np.float32) - base.astype(np.float32)
        coarse = find_rounded_dtype(base, got)
        rounding = (
            2
            * dtype_epsilon(got if coarse is None else np.empty(0, coarse))
            * float(np.linalg.norm(got.astype(np.float32)))
        )
        for product in _yield_factor_products(down.astype(np.float32), up.astype(np.float32), got.shape):
            size = float(np.linalg.norm(product))
            scale = float(np.vdot(product, change)) / size**2 if size else 0.0
            rest = float(np.linalg.norm(change - scale * product))
            if rest <= 1e-3 * abs(scale) * size + rounding and rest < 0.1 * float(np.linalg.norm(change)):
                text = (
                    f"holds the reference's values plus {scale:.4g} times {words}: its adapter was merged, though it "
                    "is kept"
                )
                return replace(found, way=TensorKind.LORA_MERGED, text=text, plain=text)
    return None


def _yield_lora_factors(ckpt: Checkpoint, name: str) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield ((canonical name of the factor applied first, canonical name of the other factor), text for their product,
    such as "lora_b x lora_a") for each LoRA adapter of a weight.

    Args:
        ckpt: the reference.
        name: canonical name of the weight.
    """
    of = parse_fqn(name).removesuffix(".weight").removesuffix(".base_layer").removesuffix(".base") + "."
    for one in ckpt.tensors:
        if not one.startswith("model." + of):
            continue
        for a, b in _FACTORS:
            at = one.lower().find(a)
            if at >= 0 and one[:at].removeprefix("model.") == of:
                yield from (
                    ((one, two), f"{b} x {a}") for two in ckpt.tensors if two.lower() == one.lower().replace(a, b)
                )


def _yield_factor_products(down: Array, up: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    """Yield the products of two factors, in either order and transposed if necessary, that have the given shape."""
    for x, y in ((up, down), (down, up)):
        if x.shape[1] == y.shape[0]:
            if (x.shape[0], y.shape[1]) == shape:
                yield x @ y
            elif (y.shape[1], x.shape[0]) == shape:
                yield (x @ y).T
