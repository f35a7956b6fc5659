"""Writes pickles as torch does, from plain data and the inert records of pickles.py; nothing is imported or called."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from .pickles import Again, Global, Opaque, Ordered

__all__ = ["dump"]


def dump(obj: Any, persistent: Callable[[Any], tuple[Any, ...] | None] | None = None) -> bytes:
    """A protocol 2 pickle, as torch writes, of plain data, Global and Opaque; the same bytes for the same data. An
    attribute of a class (a Global with a dot) is written as the call of getattr that CPython writes.

    `persistent(x)` gives the persistent id of a tensor's storage, or None for anything else. Objects with a `reduce()`
    method of ours give (Global, args) to be called by the reader.

    Raises:
        TypeError: an object of another type.
    """
    out = bytearray(b"\x80\x02")
    memo: dict[Any, int] = {}
    keep: list[Any] = []  # objects whose id() is in the memo must live as long as it does

    def put(key: Any) -> None:
        n = memo[key] = len(memo)
        out.extend(b"q" + bytes([n]) if n < 256 else b"r" + struct.pack("<I", n))

    def get(key: Any) -> bool:
        n = memo.get(key)
        if n is None:
            return False
        out.extend(b"h" + bytes([n]) if n < 256 else b"j" + struct.pack("<I", n))
        return True

    def save(x: Any) -> None:
        pid = persistent(x) if persistent is not None else None
        if pid is not None:
            save(pid)
            out.extend(b"Q")
        elif x is None:
            out.extend(b"N")
        elif x is True or x is False:
            out.extend(b"\x88" if x else b"\x89")
        elif type(x) is int:
            if 0 <= x < 256:
                out.extend(b"K" + bytes([x]))
            elif 0 <= x < 65536:
                out.extend(b"M" + struct.pack("<H", x))
            elif -(1 << 31) <= x < 1 << 31:
                out.extend(b"J" + struct.pack("<i", x))
            else:
                raw = x.to_bytes(x.bit_length() // 8 + 1, "little", signed=True)
                out.extend(b"\x8a" + bytes([len(raw)]) + raw)
        elif type(x) is float:
            out.extend(b"G" + struct.pack(">d", x))
        elif type(x) is str:
            if not get(x):
                raw = x.encode("utf-8", "surrogatepass")
                out.extend(b"X" + struct.pack("<I", len(raw)) + raw)
                put(x)
        elif type(x) is bytes:  # protocol 2 has no bytes; this is how CPython spells them there
            save_call(Global("_codecs", "encode"), (x.decode("latin-1"), "latin1"))
        elif type(x) is bytearray:
            save_call(Global("__builtin__", "bytearray"), (bytes(x),))
        elif isinstance(x, Global):
            if not get(("g", x)):
                owner, _, last = x.name.rpartition(".")
                if owner:
                    save_call(Global("__builtin__", "getattr"), (Global(x.module, owner), last))
                else:
                    out.extend(b"c" + x.module.encode() + b"\n" + x.name.encode() + b"\n")
                put(("g", x))
        elif hasattr(x, "reduce"):
            save_call(*x.reduce())
        elif isinstance(x, tuple):
            save_tuple(x)
        elif isinstance(x, complex):
            save_call(Global("__builtin__", "complex"), (x.real, x.imag))
        elif isinstance(x, (set, frozenset)):
            save_call(Global("__builtin__", type(x).__name__), (sorted(x, key=lambda v: (type(v).__name__, repr(v))),))
        elif get(id(x)):
            pass
        elif type(x) is list:
            out.extend(b"]")
            keep.append(x)
            put(id(x))
            save_items(b"e", [x])
        elif type(x) in (dict, Ordered):
            if type(x) is dict:
                out.extend(b"}")
            else:
                save_call(Global("collections", "OrderedDict"), ())
            keep.append(x)
            put(id(x))
            save_items(b"u", [list(x.keys()), list(x.values())])
        elif type(x) is Again:
            get(x)
        elif isinstance(x, Opaque):
            keep.append(x)
            save(x.cls)
            save_tuple(x.args)
            out.extend(b"R" if x.call else b"\x81")
            put(id(x))
            if x.label is not None:
                memo[Again(x.label)] = memo[
                    id(x)
                ]  # of the outermost instance that is being written, whose labels come first
            save_items(b"e", [x.list_items])
            save_items(b"u", [[k for k, _ in x.dict_items], [v for _, v in x.dict_items]])
            if x.state is not None:
                save(x.state)
                out.extend(b"b")
        else:
            raise TypeError(f"a {type(x).__name__} cannot be written to a checkpoint")

    def save_tuple(x: tuple[Any, ...]) -> None:
        if len(x) > 3:
            out.extend(b"(")
        for v in x:
            save(v)
        out.extend({0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(x), b"t"))

    def save_call(f: Global, args: tuple[Any, ...]) -> None:
        save(f)
        save_tuple(args)
        out.extend(b"R")

    def save_items(op: bytes, columns: list[list[Any]]) -> None:
        if columns[0]:
            out.extend(b"(")
            for row in zip(*columns, strict=True):
                for v in row:
                    save(v)
            out.extend(op)

    save(obj)
    return bytes(out + b".")
