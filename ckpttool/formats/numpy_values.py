"""numpy arrays and scalars in pickles, as data: RNG states, best metrics, lists of losses.

They are kept as they were pickled. Where they cannot stay so (a file for `torch.load(weights_only=True)`, which refuses
numpy), `numpy_to_torch` gives an array as a tensor and a scalar as a number, of the same bytes.

Sources: numpy/_core/src/multiarray/methods.c (array_reduce, array_setstate), descriptor.c (arraydescr_reduce), and
pickles that numpy 1.26 and 2 wrote.
"""

from __future__ import annotations

from math import prod
from operator import is_
from typing import Any

from ..index.checkpoint import ITEMSIZE
from .pickles import Global, Opaque
from .stored_tensors import Inline, decode_number

__all__ = ["numpy_to_torch"]

_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
_FRAMES = ("numpy.core.numeric", "numpy._core.numeric")
#: What numpy calls the dtypes that torch has.
_DTYPES = {
    "f8": "float64",
    "f4": "float32",
    "f2": "float16",
    "c16": "complex128",
    "c8": "complex64",
    "b1": "bool",
    "i8": "int64",
    "i4": "int32",
    "i2": "int16",
    "i1": "int8",
    "u8": "uint64",
    "u4": "uint32",
    "u2": "uint16",
    "u1": "uint8",
}


def numpy_to_torch(x: object) -> object:
    """Return a value with numpy arrays replaced by `Inline` tensors and float64 and int64 scalars by Python numbers;
    other numpy scalars become tensors of shape (). The value itself if it holds none. Arrays of a dtype that torch
    lacks are kept."""
    if isinstance(x, Opaque):
        found = _decode_array(x)
        if found is None:
            return x
        array, is_scalar = found
        number = decode_number(array.dtype, array.data) if is_scalar and array.dtype in ("float64", "int64") else None
        return array if number is None else number
    if isinstance(x, dict):
        items = [numpy_to_torch(v) for v in x.values()]
        return x if all(map(is_, items, x.values())) else type(x)(zip(x, items, strict=True))
    if isinstance(x, (list, tuple)) and not isinstance(x, (Global, Inline)):
        items = [numpy_to_torch(v) for v in x]
        return x if all(map(is_, items, x)) else items if isinstance(x, list) else tuple(items)
    return x


def _decode_array(x: Opaque) -> tuple[Inline, bool] | None:
    """Decode the pickled record of a numpy array or scalar: (its elements as a tensor, whether it is a scalar); None
    for anything else, and for what torch has no dtype or memory order for."""
    where, args = (x.cls.module, x.cls.name), x.args
    shape: Any
    if where in [(m, "_reconstruct") for m in _MODULES]:
        state = x.state
        if not isinstance(state, tuple) or len(state) != 5 or args[:1] != (Global("numpy", "ndarray"),):
            return None
        _, shape, dtype, fortran, data = state
        if fortran and isinstance(shape, tuple) and len(shape) > 1:
            return None
    elif where in [(m, "_frombuffer") for m in _FRAMES] and len(args) == 4 and args[3] == "C":
        data, dtype, shape = args[0], args[1], args[2]
    elif where in [(m, "scalar") for m in _MODULES] and len(args) == 2:
        (dtype, data), shape = args, ()
    else:
        return None
    kind = _torch_dtype_name(dtype)
    sizes = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
    if (
        kind is None
        or not sizes
        or not isinstance(data, (bytes, bytearray))
        or len(data) != prod(shape) * ITEMSIZE[kind]
    ):
        return None
    return Inline(kind, shape, bytes(data)), where[1] == "scalar"


def _torch_dtype_name(x: object) -> str | None:
    """Return torch's name for a pickled numpy dtype; None if torch has no such dtype, it is big-endian, or `x` is not a
    dtype."""
    if not isinstance(x, Opaque) or x.cls != Global("numpy", "dtype") or not x.args or not isinstance(x.args[0], str):
        return None
    order = x.state[1] if isinstance(x.state, tuple) and len(x.state) > 1 else "|"
    return _DTYPES.get(x.args[0]) if order in ("<", "|", "=") else None
