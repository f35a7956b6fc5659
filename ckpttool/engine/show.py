"""`show`: the numbers of tensors, or a part of them, and plain values, as people read them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ..errors import UsageError
from ..formats.shown_values import to_readable
from ..huggingface import encodings
from .handle import TensorHandle, make_handle, parse_index
from .opening import OpenCheckpoint

__all__ = ["Selection", "select_entries"]

_WHOLE = 1_000  # numbers that are all printed
_MOST = 10_000_000  # numbers, from the first to the last that an index selects
_EDGE = 3  # of a dimension, at both ends


@dataclass
class Selection:
    """A tensor or value of a checkpoint, or a part of a tensor.

    `dtype` and `shape` are of the whole tensor, None of a value. `data` is a numpy array or scalar, or plain data;
    `edges` says that it has the ends of each dimension only, and one element between them. `note` explains numbers that
    mean nothing by themselves.
    """

    name: str
    index: str
    data: Any
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    edges: bool = False
    note: str = ""

    def to_json(self) -> dict[str, object]:
        """Convert to plain data; `values` is None where only the ends were read."""
        values = None if self.edges else self.data.tolist() if self.dtype is not None else self.data
        about = f"{prod(self.shape or ()):,} numbers: give an index" if self.edges else self.note
        return {
            "name": self.name, "index": self.index, "dtype": self.dtype, "shape": self.shape, "values": values,
            "note": about,
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """Yield lines of text: name, dtype and shape, then the numbers; a value takes one line."""
        import numpy as np

        if self.dtype is None:
            yield f"{self.name} = {self.data!r}"
            return
        yield f"{self.name}{self.index}  {self.dtype} {list(self.shape or ())}"
        x = np.asarray(self.data)
        if x.dtype.kind == "V" or x.dtype.name.startswith(("bfloat", "float8", "float4")):
            x = x.astype("f4")
        threshold = 0 if self.edges else max(_WHOLE, x.size)
        yield from np.array2string(x, threshold=threshold, edgeitems=_EDGE, max_line_width=100).splitlines()


def select_entries(opened: OpenCheckpoint, asked: Sequence[str]) -> Iterator[Selection]:
    """Read the tensors and values that texts select, and yield them in order.

    Only the ends of each dimension are read of a tensor of more than 1,000 numbers, if no index is given.

    Args:
        asked: names or globs of tensors and values; a tensor's name may have a numpy index ("model.w[2:5, :8]").

    Raises:
        UsageError: nothing has such a name, or the index does not fit the tensor.
    """
    ckpt = opened.checkpoint
    codes = encodings.find_codes(ckpt, opened.source if opened.folder else None)
    every = [*ckpt.tensors, *ckpt.values]
    for text in asked:
        name, index = text, ""
        if text not in ckpt.tensors and text not in ckpt.values and (found := re.fullmatch(r"(.+?)(\[[^\[]*\])", text)):
            name, index = found.groups()
        known = name in ckpt.tensors or name in ckpt.values
        names = [name] if known else [n for n in every if fnmatch.fnmatchcase(n, name)]
        if not names:
            make_handle(opened, name)  # which raises an error that suggests others
        for n in names:
            if n in ckpt.values:
                yield Selection(n, "", to_readable(ckpt.values[n].data))
                continue
            handle, said = make_handle(opened, n), codes.describe(n)
            about = f"{said}: these are not the numbers of the weight" if said else ""
            large = not index and prod(handle.shape) > _WHOLE
            data = _read_edges(handle, ()) if large else _read_indexed(handle, index)
            yield Selection(n, index, data, handle.dtype, handle.shape, large, about)


def _read_indexed(handle: TensorHandle, index: str) -> Any:
    """Read the numbers of a tensor that an index such as "[2:5, -1]" selects; all of them for "".

    Raises:
        UsageError: the index has something else than integers, slices and "...", does not fit the tensor, or selects
            too much to print.
    """
    try:
        parsed = tuple(_parse_index_part(part.strip()) for part in index[1:-1].split(",") if part.strip()) or (...,)
        if prod(parse_index(parsed, handle.shape, handle.name)[1]) > _MOST:
            raise UsageError(
                f'"{handle.name}{index}" selects more than {_MOST:,} numbers. Select fewer.', code="CKPT0203"
            )
        return handle[parsed]
    except (IndexError, ValueError) as e:
        raise UsageError(f'"{handle.name}{index}": {e} Its shape is {list(handle.shape)}.', code="CKPT0203") from None


def _parse_index_part(text: str) -> Any:
    """Parse an index in one dimension: "3", "2:5", "::2" or "...".

    Returns:
        An int, a slice or `...`.

    Raises:
        ValueError: the text is none of these.
    """
    if text == "...":
        return ...
    parts = text.split(":")
    if len(parts) > 3 or not all(re.fullmatch(r"\s*-?\d*\s*", p) for p in parts):
        raise ValueError(f"{text!r} is neither an integer nor a slice.")
    return int(text) if len(parts) == 1 else slice(*(int(p) if p.strip() else None for p in parts))


def _read_edges(handle: TensorHandle, before: tuple[slice, ...]) -> object:
    """Read the first and last three elements in every dimension of a tensor, with one between them if more are left
    out.

    Args:
        before: slices of the leading dimensions, for the recursion; () at first.
    """
    import numpy as np

    if len(before) == len(handle.shape):
        return handle[before]
    size = handle.shape[len(before)]
    ends = [slice(0, _EDGE), slice(_EDGE, _EDGE + 1), slice(size - _EDGE, size)]
    cuts = ends if size > 2 * _EDGE + 1 else [slice(None)]
    return np.concatenate([_read_edges(handle, (*before, cut)) for cut in cuts], axis=len(before))
