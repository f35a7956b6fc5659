"""Byte planes: the bytes of a tensor, grouped by their place in the element, in blocks, so that exponents are together.

    element      0     1     2             plane 0     plane 1
    bytes       a0 a1 b0 b1 c0 c1    ->    a0 b0 c0    a1 b1 c1

A block is `BLOCK` bytes, from the tensor's first byte on; the last one may be shorter. In a block of n elements of
`item` bytes, byte j of element i is stored at j * n + i. Bytes that do not fill an element stay at the end of their
block.

It works by halves, with shifts and casts of whole words, which is five times as fast as transposing bytes. `item` is a
power of two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Words = NDArray[np.unsignedinteger]  # of 1, 2, 4 or 8 bytes

__all__ = ["BLOCK", "merge", "split"]

BLOCK = 1 << 20


def split(data: memoryview | bytes, item: int, into: memoryview | None = None) -> memoryview:
    """Split elements into byte planes (all first bytes, then all second ones, ...), separately in each block of `BLOCK`
    bytes.

    Args:
        data: complete blocks; the last block of a tensor may be shorter.
        item: bytes of an element, a power of two.
        into: buffer of the same length for the planes, which is returned; None: a new one.
    """
    return _convert_by_block(data, item, into, _split_block)


def merge(data: memoryview | bytes, item: int, into: memoryview | None = None) -> memoryview:
    """Merge the byte planes that `split` made back into elements.

    Args:
        data: complete blocks of `BLOCK` bytes; the last block of a tensor may be shorter.
        item: bytes of an element, a power of two.
        into: buffer of the same length for the elements, which is returned; None: a new one.
    """
    return _convert_by_block(data, item, into, _merge_block)


def _convert_by_block(
    data: memoryview | bytes, item: int, into: memoryview | None, turn: Callable[[Bytes, Bytes, int], None]
) -> memoryview:
    """Convert `data` block by block, and return the result. Bytes that do not fill an element are copied unchanged.

    Args:
        item: bytes of an element; 1: everything is copied unchanged.
        into: buffer of the same length for the result; None: a new one.
        turn: called with (complete elements of a block, where to write them, `item`), both as arrays of bytes.
    """
    out = memoryview(bytearray(len(data))) if into is None else into
    if item == 1:  # headers and JSON: `inspect` of an archive needs no numpy
        out.cast("B")[:] = memoryview(data).cast("B")
        return out

    import numpy as np

    a, b = np.frombuffer(data, "u1"), np.frombuffer(out, "u1")
    for at in range(0, len(a), BLOCK):
        x, y = a[at : at + BLOCK], b[at : at + BLOCK]
        whole = len(x) - len(x) % item
        if whole:
            turn(x[:whole], y[:whole], item)
            x, y = x[whole:], y[whole:]
        y[:] = x
    return out


def _split_halves(words: Words, item: int) -> tuple[Words, Words]:
    """Return (the lower halves, the upper halves) of words of `item` bytes. Words of 16 bytes are given as pairs of
    8."""
    if item == 16:
        return words[0::2], words[1::2]
    half = f"<u{item // 2}"
    return words.astype(half), (words >> (4 * item)).astype(half)


def _split_block(data: Bytes, planes: Bytes, item: int) -> None:
    """Write the byte planes of a block, `data`, of elements of `item` bytes into `planes`; both are arrays of bytes."""
    _split_words_into_planes(data.view(f"<u{min(item, 8)}"), planes, item)


def _split_words_into_planes(words: Words, planes: Bytes, item: int) -> None:
    """Write words of `item` bytes into their byte planes, by splitting them in halves down to single bytes."""
    import numpy as np

    n = len(planes) // 2
    if item == 2:
        np.copyto(planes[:n], words, casting="unsafe")
        np.right_shift(words, 8, out=planes[n:], casting="unsafe")
    else:
        for part, half in zip((planes[:n], planes[n:]), _split_halves(words, item), strict=True):
            _split_words_into_planes(half, part, item // 2)


def _merge_block(planes: Bytes, data: Bytes, item: int) -> None:
    """Write the elements of a block, of `item` bytes each, from its byte planes into `data`; both are arrays of
    bytes."""
    _join_planes_into_words(planes, data.view(f"<u{min(item, 8)}"), item)


def _join_planes_into_words(planes: Bytes, words: Words, item: int) -> None:
    """Fill `words`, of `item` bytes each, from their byte planes, by joining halves."""
    import numpy as np

    n = len(planes) // 2
    low, high = planes[:n], planes[n:]
    if item == 16:
        _join_planes_into_words(low, words[0::2], 8)
        _join_planes_into_words(high, words[1::2], 8)
        return
    if item > 2:
        low, high = (np.empty(len(words), f"<u{item // 2}") for _ in range(2))
        _join_planes_into_words(planes[:n], low, item // 2)
        _join_planes_into_words(planes[n:], high, item // 2)
    np.copyto(words, high)
    np.left_shift(words, 4 * item, out=words)
    np.bitwise_or(words, low, out=words)
