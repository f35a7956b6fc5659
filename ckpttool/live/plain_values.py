"""Values and dtypes of a checkpoint as Python, numpy and torch objects that a job may be given.

`to_plain` rebuilds a value from inert data (numbers, strings, bytes). It never imports or calls what a checkpoint
names.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict, deque
from math import prod
from typing import Any

from ..errors import Unsupported
from ..formats.pickles import Global, Opaque, Ordered
from ..formats.stored_tensors import Inline
from ..index.checkpoint import NOT_TORCHS

__all__ = ["is_lossless_cast", "to_plain", "to_torch_dtype"]


def to_plain(x: Any, name: str) -> Any:
    """Convert a value of a checkpoint to objects that torch's planner may get: plain Python data, numpy arrays,
    tensors, and dtypes of torch.

    An array is made of its dtype, shape and bytes; no code that the checkpoint names is called.

    Args:
        x: the value as it was parsed from a pickle, without an instance of any class that the pickle names.
        name: canonical name of its entry, for messages.

    Raises:
        Unsupported: it holds an instance of any other class.
    """
    if x is None or type(x) in (int, float, str, bool, bytes, complex):
        return x
    if isinstance(x, bytearray):
        return bytearray(x)
    if isinstance(x, Inline):
        import torch

        if not x.data:
            return torch.empty(x.shape, dtype=to_torch_dtype(x.dtype))
        return torch.frombuffer(bytearray(x.data), dtype=to_torch_dtype(x.dtype)).reshape(x.shape)
    if isinstance(x, Global):
        import torch

        found = getattr(torch, x.name, None) if x.module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise _make_foreign_class_error(x, name)
    if isinstance(x, Opaque):
        return _rebuild_known_class(x, name)
    if isinstance(x, Ordered):
        return OrderedDict((to_plain(k, name), to_plain(v, name)) for k, v in x.items())
    if isinstance(x, dict):
        return {to_plain(k, name): to_plain(v, name) for k, v in x.items()}
    if type(x) in (list, tuple, set, frozenset):
        return type(x)(to_plain(v, name) for v in x)
    raise Unsupported(f'"{name}" holds a {type(x).__name__}, which cannot be given to a job.', code="CKPT0307")


def _make_foreign_class_error(cls: object, name: str) -> Unsupported:
    """Return the error for an instance of a class that is not rebuilt; it is not raised.

    Args:
        cls: the class, as the pickle names it.
        name: of the entry that holds it.
    """
    return Unsupported(
        f'"{name}" holds an instance of {cls}. ckpttool builds no object of a class that a checkpoint names, so this '
        "entry cannot be given to a job. Leave its key out of what is loaded.",
        code="CKPT0307",
    )


def _rebuild_known_class(x: Opaque, name: str) -> Any:
    """Rebuild an instance of a class of numpy, torch or collections from what its pickle says; `name` is that of the
    entry, for messages.

    Raises:
        Unsupported: it is of another class, or malformed.
    """
    import numpy as np

    cls, args = x.cls, x.args
    try:
        if cls.module == "collections":
            return _rebuild_collection(x, name)
        if cls.module == "numpy" and cls.name == "dtype":
            return _rebuild_dtype(x)
        if cls.module in ("numpy.core.multiarray", "numpy._core.multiarray") and cls.name == "scalar":
            dtype = _rebuild_dtype(args[0])
            return np.frombuffer(_require_bytes(args[1], dtype.itemsize), dtype)[0]
        if cls.name == "_reconstruct" and args and args[0] == Global("numpy", "ndarray"):
            _, shape, described, column_major, data = x.state
            return _rebuild_array(data, _rebuild_dtype(described), shape, "F" if column_major else "C")
        if cls.name == "_frombuffer" and cls.module.startswith("numpy."):
            data, described, shape, order = args
            return _rebuild_array(data, _rebuild_dtype(described), shape, order)
        if cls.module == "torch" and cls.name in ("Size", "device"):
            import torch

            return (
                torch.Size(map(_require_natural, args[0]))
                if cls.name == "Size"
                else torch.device(*map(_require_text_or_int, args))
            )
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError):
        pass
    raise _make_foreign_class_error(cls, name)


_FACTORIES = {"int": int, "long": int, "float": float, "list": list, "dict": dict, "set": set, "str": str, "bool": bool}


def _rebuild_collection(x: Opaque, name: str) -> Any:
    """Rebuild a Counter, a deque, or a defaultdict of plain values from what its pickle says; `name` is that of the
    entry, for messages.

    Raises:
        ValueError: it is none of these.
        Unsupported: an item is of a class that is not rebuilt.
        TypeError, LookupError, AttributeError: it is malformed.
    """
    items = {to_plain(k, name): to_plain(v, name) for k, v in x.dict_items}
    if x.cls.name == "Counter":
        return Counter(to_plain(x.args[0], name) if x.args else {})
    if x.cls.name == "deque":
        return deque(
            x.list_items and map(lambda v: to_plain(v, name), x.list_items), x.args[1] if len(x.args) > 1 else None
        )
    if x.cls.name == "defaultdict" and (not x.args or x.args[0].module in ("builtins", "__builtin__")):
        return defaultdict(_FACTORIES[x.args[0].name] if x.args else None, items)
    raise ValueError


def _rebuild_dtype(x: object) -> Any:
    """Rebuild a numpy dtype of numbers from its parsed pickle.

    Raises:
        ValueError: it is something else.
    """
    import numpy as np

    if not isinstance(x, Opaque) or x.cls != Global("numpy", "dtype") or not re.fullmatch(r"[biufc]\d{1,2}", x.args[0]):
        raise ValueError
    order = x.state[1] if x.state is not None else "="
    if order not in ("<", ">", "|", "="):
        raise ValueError
    return np.dtype(order + x.args[0])


def _rebuild_array(data: Any, dtype: Any, shape: object, order: object) -> Any:
    """Return a new numpy array with these bytes as its elements.

    Args:
        data: the bytes.
        dtype: dtype of numpy.
        shape: a tuple of natural numbers.
        order: "C" or "F", the order of the elements in the bytes.

    Raises:
        ValueError: the number of bytes does not fit, or an argument is malformed.
    """
    import numpy as np

    if order not in ("C", "F") or not isinstance(shape, tuple):
        raise ValueError
    raw = _require_bytes(data, prod(map(_require_natural, shape)) * dtype.itemsize)
    return np.frombuffer(raw, dtype).reshape(shape, order=order).copy(order="K")


def _require_bytes(data: object, n: int) -> bytes:
    """Return `data` as bytes.

    Raises:
        ValueError: it is not bytes or a bytearray, or not `n` bytes long.
    """
    if not isinstance(data, (bytes, bytearray)) or len(data) != n:
        raise ValueError
    return bytes(data)


def _require_natural(n: object) -> int:
    """Return `n` unchanged.

    Raises:
        ValueError: it is not an int of at least 0.
    """
    if type(n) is not int or n < 0:
        raise ValueError
    return n


def _require_text_or_int(x: object) -> Any:
    """Return `x` unchanged.

    Raises:
        ValueError: it is neither a str nor an int.
    """
    if type(x) not in (str, int):
        raise ValueError
    return x


def to_torch_dtype(name: str) -> Any:
    """Return the torch.dtype for the name of a dtype, such as "bfloat16".

    Raises:
        Unsupported: torch has no such dtype, though checkpoints do.
        AttributeError: it is not the name of a dtype.
    """
    import torch

    if name in NOT_TORCHS:
        raise Unsupported(
            f"A tensor is {name}, numbers of six bits, which torch has no dtype for; only its bytes can be copied, as "
            "to hf.",
            code="CKPT0332",
        )
    return getattr(torch, name)


def is_lossless_cast(source: str, target: str) -> bool:
    """Tell whether every number of the dtype `source` is also one of `target`; both are names such as "bfloat16"."""
    import torch

    if source in (target, "bool"):
        return True
    a, b = to_torch_dtype(source), to_torch_dtype(target)
    if b is torch.bool or (a.is_complex and not b.is_complex):
        return False
    a, b = (d.to_real() if d.is_complex else d for d in (a, b))
    if a.is_floating_point:
        if not b.is_floating_point:
            return False
        x, y = torch.finfo(a), torch.finfo(b)
        return bool(x.eps >= y.eps and x.max <= y.max and x.smallest_normal >= y.smallest_normal)
    whole = torch.iinfo(a)
    if b.is_floating_point:
        return bool(whole.max <= 2 / torch.finfo(b).eps)
    return bool(torch.iinfo(b).min <= whole.min and whole.max <= torch.iinfo(b).max)
