"""State beside model and optimizer in one form, whether a checkpoint of any layout holds it or a live job does.

    values, others, sharded = collect_side_state({("scheduler", "last_epoch"): 12, ("rng", "0", "torch"): tensor, ...})

Layouts differ in how far they take containers apart, and in what an array is kept as, so both sides of a comparison are
taken apart here by one rule: dicts by their keys, lists and tuples that hold more than scalars by position. What is
left is a plain value (None, bool, int, float, str, a list of them; infinities and NaN are spelled as in a trace) or has
a mark (dtype, shape, fingerprint): tensors and numpy arrays by their elements, ("bytes", (n,), ...) and lists that are
too long to be shown by a BLAKE3 of their JSON. An instance of another class has the mark ("object", (),
"module.Class"), and is not compared. Empty dicts are left out, since torch.distributed.checkpoint forgets them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...errors import Unsupported
from ...formats.pickles import Global, Opaque
from ...formats.stored_tensors import Inline, flatten_tree
from ...index.checkpoint import Path, joined
from ...index.names import canonical
from ...live.plain_values import to_plain

__all__ = [
    "OBJECT",
    "Mark",
    "SideState",
    "collect_side_state",
    "flatten_side_state",
    "make_array_mark",
    "make_object_mark",
]

#: (dtype, shape, fingerprint)
Mark = tuple[str, tuple[int, ...], str]

OBJECT = "object"  # in place of a dtype: what cannot be compared
_LONG = 256  # scalars in a list that is shown
_MANY = 4096  # entries of a container that is taken apart


class SideState(NamedTuple):
    """Plain values, marks of what is not plain, and live DTensors, whose fingerprints need all ranks."""

    values: dict[str, Any]
    others: dict[str, Mark]
    sharded: dict[str, Any]


def collect_side_state(leaves: Mapping[Path, object]) -> SideState:
    """Sort the leaves of a tree into plain values, marks (dtype, shape, fingerprint) and live DTensors, by their names.

    Args:
        leaves: {path: object}, where a path is a tuple of keys; objects of a live job, or read from a checkpoint. Dicts
            and lists among them are flattened.
    """
    out = SideState({}, {}, {})
    for path, x in leaves.items():
        _add_leaf(tuple(map(str, path)), x, out)
    return out


def flatten_side_state(tree: Mapping[str, object]) -> dict[Path, object]:
    """Return the leaves of a tree that has neither model nor optimizer: {canonical path: object}.

    {"lr_scheduler": {...}, "epoch": 3} gives paths that begin with "scheduler", and ("trainer", "epoch").

    Args:
        tree: nested dicts and lists; its keys are those at the root of a checkpoint.
    """
    weight = object()  # a tree without a model would be taken for a model
    leaves = {("model", "w"): weight, **flatten_tree(dict(tree))}
    found = canonical(leaves, lambda x: (1,) if x is weight or hasattr(x, "element_size") else None).leaves
    return {path: x for path, x in found.items() if x is not weight}


def make_array_mark(x: Any) -> Mark:
    """Return (dtype, shape, fingerprint in hex) of a tensor that is not sharded, or of a numpy array of numbers.

    Raises:
        TypeError, KeyError, RuntimeError, NotImplementedError, ValueError: its elements cannot be viewed as integers,
            because it is sparse, quantised or of strings.
    """
    import numpy as np
    import torch

    from .fingerprint import fingerprint_flat

    if isinstance(x, np.ndarray):
        bits = np.ascontiguousarray(x).reshape(-1)
        same_size = {1: "u1", 2: "i2", 4: "i4", 8: "i8", 16: "c16"}[x.dtype.itemsize]
        native = bits.astype(bits.dtype.newbyteorder("="), copy=False)
        return (
            x.dtype.newbyteorder("=").name,
            x.shape,
            f"{fingerprint_flat(torch.from_numpy(native.view(same_size).copy()), 0):016x}",
        )
    data = x.detach().contiguous().reshape(-1)
    return str(x.dtype).removeprefix("torch."), tuple(x.shape), f"{fingerprint_flat(data, 0):016x}"


def make_object_mark(cls: str) -> Mark:
    """Return the mark ("object", (), class) of an object that ckpttool does not build and cannot compare; `cls` is
    "module.Class"."""
    return OBJECT, (), cls


def _add_leaf(path: Path, x: Any, out: SideState) -> None:
    """Add an object to `out` as a value, a mark (dtype, shape, fingerprint) or a live DTensor; containers are taken
    apart."""
    import numpy as np
    import torch

    name = joined(path)
    if isinstance(x, (Inline, Opaque, Global)):
        try:
            x = to_plain(x, name)
        except Unsupported:
            cls = x.cls if isinstance(x, Opaque) else x
            out.others[name] = make_object_mark(
                f"{cls.module}.{cls.name}" if isinstance(cls, Global) else type(x).__name__
            )
            return
    if isinstance(x, np.generic):
        x = x.item()
    if _is_scalar(x):
        out.values[name] = _spell_scalar(x)
    elif isinstance(x, torch.Tensor) and hasattr(x, "_local_tensor"):
        out.sharded[name] = x
    elif isinstance(x, (torch.Tensor, np.ndarray)):
        try:
            out.others[name] = make_array_mark(x)
        except (TypeError, KeyError, RuntimeError, NotImplementedError, ValueError):  # sparse, quantised, of strings
            out.others[name] = make_object_mark(f"{type(x).__module__}.{type(x).__name__}")
    elif isinstance(x, (bytes, bytearray)):
        out.others[name] = ("bytes", (len(x),), _hash_bytes(bytes(x)))
    elif isinstance(x, dict):
        _add_container(path, {str(k): v for k, v in x.items()}, out)
    elif type(x) in (list, tuple, torch.Size):
        items = [v.item() if isinstance(v, np.generic) else v for v in x]
        if not all(map(_is_scalar, items)):
            _add_container(path, {str(k): v for k, v in enumerate(items)}, out)
        elif len(items) <= _LONG:
            out.values[name] = [_spell_scalar(v) for v in items]
        else:
            out.others[name] = (
                "list",
                (len(items),),
                _hash_bytes(json.dumps([_spell_scalar(v) for v in items]).encode()),
            )
    elif type(x) in (set, frozenset):
        _add_leaf(path, sorted(x, key=repr), out)
    elif isinstance(x, (torch.dtype, torch.device, complex)):
        out.values[name] = str(x)
    else:
        out.others[name] = make_object_mark(f"{type(x).__module__}.{type(x).__qualname__}")


def _add_container(path: Path, items: Mapping[str, object], out: SideState) -> None:
    """Add the entries of a container, {key: value}, to `out`; one of more than 4096 entries is hashed as a whole."""
    if len(items) <= _MANY:
        for key, value in items.items():
            _add_leaf((*path, key), value, out)
        return
    inner = SideState({}, {}, {})
    for key, value in items.items():
        _add_leaf((key,), value, inner)
    out.sharded.update({joined((*path, n)): t for n, t in inner.sharded.items()})
    # objects as the first recordings have them
    objects = {n: f"<{cls}>" for n, (kind, _, cls) in inner.others.items() if kind == OBJECT}
    others = {n: m for n, m in inner.others.items() if n not in objects}
    text = json.dumps([inner.values | objects, others], sort_keys=True)
    out.others[joined(path)] = ("tree", (len(items),), _hash_bytes(text.encode()))


def _is_scalar(x: object) -> bool:
    """Tell whether a value is None, a bool, an int, a float or a str."""
    return x is None or type(x) in (bool, int, float, str)


def _spell_scalar(x: object) -> object:
    """Return a scalar; NaN and infinities are the strings "nan", "inf" and "-inf"."""
    if type(x) is float and not math.isfinite(x):
        return "nan" if math.isnan(x) else "inf" if x > 0 else "-inf"
    return x


def _hash_bytes(data: bytes) -> str:
    """Return the first 16 hex digits of the BLAKE3 of some bytes."""
    from blake3 import blake3

    return blake3(data).hexdigest()[:16]
