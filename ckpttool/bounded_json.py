"""JSON of any names: written, and what somebody else wrote parsed within bounds, so that a short text cannot fill the
memory or the stack.

Memory: an empty list takes three bytes of text and more than sixty as an object. So brackets, strings and commas are
counted before anything is parsed, at the speed of bytes.count, and what would take more than 32 MiB and twelve times
its length is refused. Honest records need up to eleven times their length: a safetensors header of 10^6 tensors passes.
Depth: at most MAX_DEPTH levels. Time: linear.
"""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Any

from .errors import Corrupt, Unsafe

__all__ = ["MAX_DEPTH", "encode", "parse", "refuse_bomb"]

MAX_DEPTH = 350
_FLOOR, _RATIO = 32 << 20, 12
#: Bytes of the objects that CPython 3.11 makes of each, as an upper bound for short ones.
_LIST, _OBJECT, _STRING, _KEY, _ITEM = 72, 180, 60, 40, 24
_NO_STRUCTURE = bytes(sorted(set(range(256)) - set(b'"[]{},:')))
_STEP = [0] * 256
for _opening, _closing in (b"[]", b"{}"):
    _STEP[_opening], _STEP[_closing] = 1, -1


def parse(data: bytes, what: str) -> Any:
    """Parse JSON in UTF-8 with no key twice in one object.

    Args:
        data: the whole text.
        what: file name, for messages.

    Raises:
        Corrupt: not JSON.
        Unsafe: a key twice, nested deeper than MAX_DEPTH, or a text that would fill the memory (`refuse_bomb`).
    """
    refuse_bomb(data, what)
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_refuse_duplicate_keys)
    except Unsafe as e:
        raise Unsafe(f"{what}: {e}.", code="CKPT0703") from None
    except RecursionError:
        raise Unsafe(f"{what}: nested too deep.", code="CKPT0704") from None
    except ValueError as e:
        raise Corrupt(f"{what}: not JSON ({e}).", code="CKPT0406") from None


def encode(data: object, **layout: Any) -> bytes:
    """Write data as JSON in UTF-8.

    Names and texts of a checkpoint may hold half of a surrogate pair, which UTF-8 has no bytes for: it becomes a JSON
    escape.

    Args:
        data: what `json.dumps` can write.
        layout: further arguments of `json.dumps`, such as `indent`.
    """
    return json.dumps(data, ensure_ascii=False, **layout).encode("utf-8", "backslashreplace")


def refuse_bomb(data: bytes, what: str) -> None:
    """Refuse a JSON text that would take far more memory than its own length, or that is nested too deep.

    Args:
        data: the whole text, before it is parsed.
        what: file name, for messages.

    Raises:
        Unsafe: it would, or it is nested deeper than MAX_DEPTH levels; with the numbers.
    """
    structure, strings = _extract_structure(data)
    lists, objects, keys = structure.count(b"["), structure.count(b"{"), structure.count(b":")
    need = _LIST * lists + _OBJECT * objects + _STRING * max(0, strings - keys) + _KEY * keys
    need += _ITEM * structure.count(b",")
    if need > _FLOOR + _RATIO * len(data):
        raise Unsafe(
            f"{what}: {lists} lists, {objects} objects and {strings} strings in {len(data)} bytes would fill the "
            f"memory (about {need >> 20} MiB). No checkpoint has such a record; take another copy, or remove the file.",
            code="CKPT0704",
        )
    brackets = structure.translate(None, b",:")
    if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > MAX_DEPTH:
        raise Unsafe(
            f"{what}: nested deeper than {MAX_DEPTH} levels. No checkpoint has such a record.", code="CKPT0704"
        )


def _extract_structure(data: bytes) -> tuple[bytes, int]:
    """Return (the characters []{},: of a JSON text that are outside of strings, in order; the number of strings, an
    estimate if the text is no JSON)."""
    if b"\\" in data:
        data = data.replace(rb"\\", b"").replace(rb"\"", b"")
    strings = data.count(b'"') // 2
    found = data.translate(None, _NO_STRUCTURE).replace(b'""', b"")
    if b'"' in found:
        found = b"".join(found.split(b'"')[::2])
    return found, strings


def _refuse_duplicate_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make a dict of the (key, value) pairs of one JSON object; a hook of `json.loads`.

    Raises:
        Unsafe: a key is there twice.
    """
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twin = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise Unsafe(
            f"the key {twin!r} is there twice in one JSON object; readers differ on which one counts", code="CKPT0703"
        )
    return out
