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

from typing import Any

__all__ = ["BLOCK", "merge", "split"]

BLOCK = 1 << 20


def split(data: memoryview | bytes, item: int, into: memoryview | None = None) -> memoryview:
    """Return the planes of whole blocks (the last may be short), written to `into` if given."""
    return _for_each_block(data, item, into, _split_block)


def merge(data: memoryview | bytes, item: int, into: memoryview | None = None) -> memoryview:
    """Return the elements of planes, written to `into` if given: the inverse of `split`."""
    return _for_each_block(data, item, into, _merge_block)


def _for_each_block(data: memoryview | bytes, item: int, into: memoryview | None, turn: Any) -> memoryview:
    """Call `turn` for each block; bytes that do not fill an element stay as they are."""
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


def _split_halves(words: Any, item: int) -> tuple[Any, Any]:
    """Return the lower and the upper half of every word; there are no words of 16 bytes, but pairs of 8."""
    if item == 16:
        return words[0::2], words[1::2]
    half = f"<u{item // 2}"
    return words.astype(half), (words >> (4 * item)).astype(half)


def _split_block(data: Any, planes: Any, item: int) -> None:
    """Write the planes of a block of elements of `item` bytes."""
    _spread_words(data.view(f"<u{min(item, 8)}"), planes, item)


def _spread_words(words: Any, planes: Any, item: int) -> None:
    """Write words into their planes, by halves."""
    import numpy as np

    n = len(planes) // 2
    if item == 2:
        np.copyto(planes[:n], words, casting="unsafe")
        np.right_shift(words, 8, out=planes[n:], casting="unsafe")
    else:
        for part, half in zip((planes[:n], planes[n:]), _split_halves(words, item), strict=True):
            _spread_words(half, part, item // 2)


def _merge_block(planes: Any, data: Any, item: int) -> None:
    """Write the elements of a block from its planes."""
    _join_words(planes, data.view(f"<u{min(item, 8)}"), item)


def _join_words(planes: Any, words: Any, item: int) -> None:
    """Fill `words` from their planes."""
    import numpy as np

    n = len(planes) // 2
    low, high = planes[:n], planes[n:]
    if item == 16:
        _join_words(low, words[0::2], 8)
        _join_words(high, words[1::2], 8)
        return
    if item > 2:
        low, high = (np.empty(len(words), f"<u{item // 2}") for _ in range(2))
        _join_words(planes[:n], low, item // 2)
        _join_words(planes[n:], high, item // 2)
    np.copyto(words, high)
    np.left_shift(words, 4 * item, out=words)
    np.bitwise_or(words, low, out=words)
