"""Values of a checkpoint in the form that a live object has for them, and the first difference between the two.

DCP makes text of every key (torch/distributed/checkpoint/_traverse.py: `path + (str(k),)`), and a dict of every
mapping. The live object knows better: `MultiStepLR` holds its milestones as a Counter with integers for keys.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Container, Iterator, Mapping, MutableMapping
from copy import copy
from typing import TYPE_CHECKING, Any

from ..index.checkpoint import joined

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Keys", "find_first_difference", "fit_to_live", "has_no_leaves", "iterate_leaves", "set_value_at"]

#: A path in a live object, of its own keys.
Keys = tuple[Any, ...]


def has_no_leaves(x: object) -> bool:
    """Whether an object is a container (mapping, list or tuple) without a leaf at any depth; flattened checkpoints
    do not store such containers."""
    if isinstance(x, Mapping):
        return all(map(has_no_leaves, x.values()))
    return isinstance(x, (list, tuple)) and all(map(has_no_leaves, x))


def fit_to_live(stored: object, live: object) -> Any:
    """Convert a value of a checkpoint to the types of the live object that it is for, and return it.

    A text key becomes the live key with that text. If there is no such key (a scheduler with other milestones), it is
    converted to the type that all live keys have. Containers get the live containers' types. A tensor of one element
    and a number are converted to each other. Tensors are moved to the live tensor's device; those of one element also
    get its dtype. Anything without a live counterpart stays as it was stored.

    Args:
        stored: value of the checkpoint.
        live: the job's object at that place, None if it has none; it is not changed.
    """
    import torch

    if isinstance(live, Mapping) and isinstance(stored, Mapping):
        keys = _match_keys(stored, live)
        found = {keys[k]: fit_to_live(x, live.get(keys[k])) for k, x in stored.items()}
        return _make_container_like(
            live, found | {k: copy(x) for k, x in live.items() if k not in found and has_no_leaves(x)}
        )
    if isinstance(live, (list, tuple, deque)) and isinstance(stored, (list, tuple, deque)):
        pairs = zip(stored, [*live, *[None] * len(stored)], strict=False)
        rest = live if len(live) == len(stored) else ()
        # DCP has nothing of an empty dict in a list, which leaves a hole there
        items = [copy(y) if x is None and rest and has_no_leaves(y) else fit_to_live(x, y) for x, y in pairs]
        return _make_container_like(live, items)
    if isinstance(live, torch.Tensor):
        if isinstance(stored, (bool, int, float)) or (isinstance(stored, torch.Tensor) and stored.numel() == 1):
            number: torch.Tensor = torch.as_tensor(stored, dtype=live.dtype, device=live.device)
            return number.reshape(live.shape) if live.numel() == 1 else number
        return _move_like(stored, live) if isinstance(stored, torch.Tensor) else stored
    if isinstance(stored, torch.Tensor) and type(live) in (bool, int, float) and stored.numel() == 1:
        return stored.item()
    return stored


def _move_like(stored: Tensor, live: Tensor) -> object:
    """Return a complete tensor on the device of the live tensor; if that is a DTensor, as a DTensor with the same
    mesh and placements."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    stored = stored.to(live.device)
    if not isinstance(live, DTensor) or isinstance(stored, DTensor):
        return stored
    return distribute_tensor(stored, live.device_mesh, live.placements, src_data_rank=None)


def _match_keys(stored: Mapping[object, object], live: Mapping[object, object]) -> dict[object, object]:
    """Return {stored key: the live object's key for it}; all stored keys unchanged if two of them would become one."""
    texts = Counter(map(str, live))
    by_text = {str(k): k for k in live if texts[str(k)] == 1}
    kinds = {type(k) for k in live} or ({int} if isinstance(live, Counter) else set())
    kind = kinds.pop() if len(kinds) == 1 else str
    out = {}
    for k in stored:
        out[k] = k if k in live else by_text.get(k, _parse_key(kind, k)) if type(k) is str else k
    return out if len(set(out.values())) == len(out) else {k: k for k in stored}


def _parse_key(kind: type, text: str) -> object:
    """Convert the text of a key to an int or float, if `kind` is that type and the result has exactly this text;
    otherwise return the text."""
    if kind not in (int, float):
        return text
    try:
        key = kind(text)
    except ValueError:
        return text
    return key if str(key) == text else text


def _make_container_like(live: object, items: Any) -> object:
    """Return the items in a container of the live object's class, with its settings (a deque's length, a default
    factory).

    Args:
        live: a container; it is not changed.
        items: a dict where it is a mapping, and otherwise a list.
    """
    if isinstance(live, MutableMapping):
        out = copy(live)  # keeps the default factory of a defaultdict
        out.clear()
        out.update(items)
        return out
    if isinstance(live, deque):
        return deque(items, live.maxlen)
    if isinstance(live, tuple):
        return type(live)(*items) if hasattr(live, "_fields") else type(live)(items)
    return items


# ------------------------------------------------------------------------------------------------------------- leaves


def iterate_leaves(live: Any, names: Container[str], path: Keys = ()) -> Iterator[tuple[str, Keys, Any]]:
    """Yield (name, path, value) of every leaf of a live object; leaves that are None are skipped.

    The name is the path joined by dots, as in flattened checkpoints. A container whose own name is in `names` is one
    leaf: DCP stores lists of numbers and all tuples as one value, and so does the reader of torch.save's files for
    dicts whose keys are no text.

    Args:
        live: nested mappings, lists and tuples.
        names: names of leaves in the checkpoint.
        path: keys that lead to `live` in a larger object, with which names and paths begin.
    """
    name = joined(path)
    if path and (name in names or not isinstance(live, (Mapping, list, tuple)) or not live):
        if live is not None:
            yield name, path, live
        return
    parts = live.items() if isinstance(live, Mapping) else enumerate(live)
    for key, x in parts:
        yield from iterate_leaves(x, names, (*path, key))


def set_value_at(tree: Any, path: Keys, value: object) -> Any:
    """Set a value inside nested containers, and return the outermost container: the same object, changed in place, or a
    new one if it is a tuple.

    Args:
        tree: the outermost container, of mappings, lists and tuples.
        path: the keys and indices that lead from `tree` to the value; at least one.
        value: the new value.
    """
    key, *rest = path
    if rest:
        value = set_value_at(tree[key], tuple(rest), value)
    if isinstance(tree, tuple):
        return _make_container_like(tree, [value if k == key else x for k, x in enumerate(tree)])
    tree[key] = value
    return tree


# --------------------------------------------------------------------------------------------------------- comparison


def find_first_difference(live: object, want: object, name: str = "") -> str | None:
    """Return a clause about the first place where a live object differs from the one that it should be: '"milestones.3"
    is ... in the checkpoint and ... in the job'; None if they are equal.

    Types of containers and keys, types of numbers, and the bits of floats and tensors are compared exactly. Keys that
    only the live object has, and the devices of tensors, are not compared. An empty container equals None in the live
    object: a LambdaLR saves an empty dict for a callable without attributes, and None for a function.

    Args:
        live: the job's object.
        want: what it should be.
        name: name of the object for the text; "" for the outermost.
    """
    import torch

    if live is None and isinstance(want, (Mapping, list, tuple)) and has_no_leaves(want):
        return None
    if isinstance(want, Mapping) and type(live) is type(want):
        lacks = [k for k in want if k not in live]
        if lacks:
            shown = _show_value(want[lacks[0]])
            return f'"{_join_name(name, lacks[0])}" is {shown} in the checkpoint, and the job has none'
        pairs = [(k, live[k], x) for k, x in want.items()]
    elif isinstance(want, (list, tuple, deque)) and type(live) is type(want) and len(live) == len(want):
        pairs = [(k, x, y) for k, (x, y) in enumerate(zip(live, want, strict=True))]
    elif isinstance(want, torch.Tensor) and isinstance(live, torch.Tensor):
        return None if _is_same_tensor(live, want) else _describe_difference(name, live, want)
    else:
        return None if _is_same_value(live, want) else _describe_difference(name, live, want)
    return next(filter(None, (find_first_difference(x, y, _join_name(name, k)) for k, x, y in pairs)), None)


def _describe_difference(name: str, live: object, want: object) -> str:
    """Return a clause about two values that differ. `name` is their place, `live` the job's value, `want` the
    checkpoint's."""
    a, b = _show_value(want), _show_value(live)
    if a == b:
        return f'"{name}" ({a}) has other numbers in the job than in the checkpoint'
    return f'"{name}" is {a} in the checkpoint and {b} in the job'


def _join_name(name: str, key: object) -> str:
    """Return the dotted name of an item in a container, such as "milestones.3".

    Args:
        name: dotted name of the container; "" for the outermost.
        key: key or index of the item.
    """
    return f"{name}.{key}" if name else str(key)


def _is_same_tensor(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors have equal dtype, shape and bits, on whatever device; of two DTensors, the shards of
    this rank."""
    import torch

    if a is b:
        return True
    a, b = (getattr(t, "_local_tensor", t).detach() for t in (a, b))
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.device != b.device:
        a, b = a.cpu(), b.cpu()
    if a.numel() and a.device == b.device and a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return True
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def _is_same_value(a: Any, b: Any) -> bool:
    """Tell whether two values are of one type and equal, floats and numpy arrays bit for bit."""
    if type(a) is not type(b):
        return False
    if type(a) is float:
        return struct.pack("d", a) == struct.pack("d", b)
    if hasattr(a, "tobytes") and hasattr(a, "dtype"):  # of numpy
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return bool(a == b)


def _show_value(x: Any) -> str:
    """Return a value as a short text for a message; of a tensor, its dtype and shape."""
    if hasattr(x, "element_size") and x.numel() > 1:
        return f"a tensor {str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    text = repr(x)
    return text if len(text) < 80 else f"{text[:76]} ..."
