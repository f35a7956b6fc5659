"""Digests of values: what the digest of a tensor is for tensors, for all that a state holds besides them.

The digest of a value is BLAKE3 of its path and data, spelled as a line of values.json spells them (formats/values.py):
exact in types, bits of floats, integers of any size, types of keys and order. The digest of all values is a Merkle root
over those digests, sorted by name; its leaves begin with another byte than those of tensors (index/digests.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from blake3 import blake3

from ...formats import values
from ...formats.stored_tensors import Inline, flatten_tree
from ...index.checkpoint import Checkpoint, Value, joined
from ...index.digests import compute_component_roots, compute_value_root

__all__ = [
    "are_equal_data",
    "data_digest",
    "digest_values_without_arrays",
    "equal_values",
    "split_into_leaves",
    "split_lists",
    "state_roots",
    "value_digest",
    "value_digests",
]

#: The key of the digest of values beside those of components; no component has this name.
VALUES = "values"
#: Types of data whose `==` says whether two are the same; -0.0 and NaN are why floats are not here.
_EXACT = frozenset((type(None), bool, int, str, bytes))


def value_digest(value: Value) -> str:
    """Return the BLAKE3 hex digest of a value's path and data.

    Raises:
        Unsupported: values.json cannot represent the value.
    """
    return blake3(values.encode_value(value)).hexdigest()


def data_digest(value: Value) -> str:
    """Return the BLAKE3 hex digest of a value's data alone, without its path.

    Raises:
        Unsupported: values.json cannot represent the value.
    """
    return value_digest(Value(("",), value.data))


def split_into_leaves(held: Mapping[str, Value]) -> dict[str, Value]:
    """Split nested dicts and lists into their leaves, as readers of state dicts do; readers of JSON files keep nested
    values.

    Args:
        held: {name: value}; a value may be nested.

    Returns:
        {dotted name of a leaf: value of that leaf}.
    """
    return {joined(p): Value(p, x) for v in held.values() for p, x in flatten_tree(v.data, v.path).items()}


def split_lists(held: Mapping[str, Value], names: Iterable[str]) -> dict[str, Value]:
    """Replace some lists among values by their elements: the lists that contain no dict or tensor, but of which `names`
    has elements.

    A reader splits a list only if it contains dicts or tensors. Where a layout could not store those, the other
    elements of the list are separate values of the state, while the reader finds one list.

    Args:
        held: {name: value}.
        names: names of the values that are looked for; that of an element is the name of its list, a dot and its
            position.

    Returns:
        {name: value}, with an entry for each element in place of such a list.
    """
    heads = {head for n in names for head in accumulate(n.split(".")[:-1], "{}.{}".format)}
    out: dict[str, Value] = {}
    todo = list(held.items())
    for name, v in todo:
        if isinstance(v.data, list) and name in heads and name in split_into_leaves({name: v}):
            todo += [(f"{name}.{i}", Value((*v.path, i), x)) for i, x in enumerate(v.data)]
        else:
            out[name] = v
    return out


def value_digests(held: Mapping[str, Value]) -> dict[str, str]:
    """Split values into their leaves and digest each leaf.

    Args:
        held: {name: value}; a value may be nested.

    Returns:
        {dotted name of a leaf: BLAKE3 hex digest of its path and data}.
    """
    return {name: value_digest(value) for name, value in split_into_leaves(held).items()}


def digest_values_without_arrays(held: Mapping[str, Value]) -> dict[str, str]:
    """Split values into their leaves and return {name of a leaf: BLAKE3 hex digest}, without arrays, which a reader may
    find as tensors."""
    return {n: value_digest(v) for n, v in split_into_leaves(held).items() if not isinstance(v.data, Inline)}


def equal_values(a: Value, b: Value) -> bool:
    """Tell whether two values have equal paths and equal data, of equal types."""
    if a is b:
        return True
    if type(a.data) is type(b.data) and type(a.data) in _EXACT and a.path == b.path:
        return bool(a.data == b.data)
    return values.encode_value(a) == values.encode_value(b)


def are_equal_data(a: object, b: object) -> bool:
    """Tell whether the data of two values are equal, of equal types."""
    return equal_values(Value((), a), Value((), b))


def state_roots(ckpt: Checkpoint, digests: Mapping[str, str]) -> dict[str, str]:
    """Return root digests in hex: {"all": over all tensors, one key per component ("model", "optim", ...), and
    "values": over the non-tensor values, if there are any}.

    Args:
        digests: {tensor: BLAKE3 in hex} of all tensors of `ckpt`.
    """
    out = compute_component_roots(ckpt.tensors, digests)
    return out | {VALUES: compute_value_root(value_digests(ckpt.values))} if ckpt.values else out
