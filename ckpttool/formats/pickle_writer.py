"""Writes pickles as torch does, from plain data and the inert records of pickles.py; nothing is imported or called."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from itertools import islice
from typing import Any, NamedTuple

from .pickles import BackReference, Global, Opaque, Ordered

__all__ = ["CommonList", "dump", "dump_pieces"]

#: The persistent id of a tensor's storage; None of anything else.
PersistentId = Callable[[object], tuple[object, ...] | None]
_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}


class _Encoded(NamedTuple):
    """A list as pickled: what the memo must have had before (`outside`), what it got (`put`), the objects whose
    identities are among these, and the bytes."""

    outside: dict[object, int]
    put: dict[object, int]
    alive: list[object]
    raw: bytes


class CommonList(list[Any]):
    """A list that many pickles have in common: it is encoded once for all where it begins with the same number in the
    memo, and they share the bytes. It holds no tensor and no other such list, and must not be changed."""

    def __init__(self, items: Collection[object]) -> None:
        super().__init__(items)
        self.encoded: dict[int, list[_Encoded]] = {}


def dump(obj: object, persistent: PersistentId | None = None) -> bytes:
    """Return an object as a pickle of protocol 2, as torch writes it.

    Args:
        obj: plain data, `Global` and `Opaque`.
        persistent: returns the persistent id of a tensor's storage, or None for anything else; None if there are no
            tensors.

    Raises:
        TypeError: an object is of a type that no checkpoint has.
    """
    return b"".join(dump_pieces(obj, persistent))


def dump_pieces(obj: object, persistent: PersistentId | None = None) -> list[bytes]:
    """Return plain data, Global and Opaque as a pickle of protocol 2, as torch writes it, in pieces to be joined; equal
    data give equal bytes.

    An attribute of a class (a Global with a dot) is written as the call of getattr that CPython writes. An object with
    a `reduce()` method of ours, which returns (Global, args), is written as that call.

    The pieces of a `CommonList` are the same bytes objects in many pickles.

    Args:
        obj: the object.
        persistent: returns the persistent id of a tensor's storage, or None for anything else; None if there are no
            tensors.

    Raises:
        TypeError: an object is of a type that no checkpoint has.
    """
    pickler = _Pickler(persistent or (lambda x: None))
    pickler.save(obj)
    return [*pickler.pieces, bytes(pickler.out + b".")]


class _Pickler:
    """The bytes written so far, `pieces` and then `out`, and a memo of what is in them."""

    def __init__(self, persistent: PersistentId) -> None:
        self.persistent = persistent
        self.pieces: list[bytes] = []
        self.out = bytearray(b"\x80\x02")
        self.memo: dict[object, int] = {}
        self.alive: list[object] = []  # objects whose id() is in the memo must live as long as it does
        self.recalled: dict[object, int] = {}  # since the list began that is being encoded for other pickles, too

    def memoize(self, key: object) -> None:
        """Write a PUT for the object on top of the reader's stack, and remember its memo number under `key`."""
        n = self.memo[key] = len(self.memo)
        self.out += b"q" + bytes([n]) if n < 256 else b"r" + struct.pack("<I", n)

    def recall(self, key: object) -> bool:
        """Write a GET of the object that was memoized under `key`, and return True; return False if none was."""
        n = self.memo.get(key)
        if n is None:
            return False
        self.recalled[key] = n
        self.out += b"h" + bytes([n]) if n < 256 else b"j" + struct.pack("<I", n)
        return True

    def save(self, x: object) -> None:
        """Write an object, and all that is inside.

        Raises:
            TypeError: something is of a type that no checkpoint has.
        """
        pid = self.persistent(x)
        if pid is not None:
            self.save(pid)
            self.out += b"Q"
        elif not (self._save_scalar(x) or self._save_call_like(x)):
            self._save_container(x)

    def _save_scalar(self, x: object) -> bool:
        """Write None, a bool, a number or a text, and return True; return False if it is something else."""
        out = self.out
        if x is None:
            out += b"N"
        elif x is True or x is False:
            out += b"\x88" if x else b"\x89"
        elif type(x) is int:
            self._save_int(x)
        elif type(x) is float:
            out += b"G" + struct.pack(">d", x)
        elif type(x) is str:
            if not self.recall(x):
                raw = x.encode("utf-8", "surrogatepass")
                out += b"X" + struct.pack("<I", len(raw)) + raw
                self.memoize(x)
        else:
            return False
        return True

    def _save_int(self, x: int) -> None:
        """Write an integer by the shortest instruction that holds it."""
        if 0 <= x < 256:
            self.out += b"K" + bytes([x])
        elif 0 <= x < 65536:
            self.out += b"M" + struct.pack("<H", x)
        elif -(1 << 31) <= x < 1 << 31:
            self.out += b"J" + struct.pack("<i", x)
        else:
            raw = x.to_bytes(x.bit_length() // 8 + 1, "little", signed=True)
            self.out += b"\x8a" + bytes([len(raw)]) + raw

    def _save_call_like(self, x: object) -> bool:
        """Write an object that protocol 2 represents by a global, a call or a tuple opcode (bytes, bytearray, Global,
        complex, sets, tuples, objects with `reduce`), and return True; write nothing and return False for anything
        else.

        Raises:
            TypeError: something inside is of a type that no checkpoint has.
        """
        if type(x) is bytes:  # protocol 2 has no bytes; this is how CPython spells them there
            self.save_call(Global("_codecs", "encode"), (x.decode("latin-1"), "latin1"))
        elif type(x) is bytearray:
            self.save_call(Global("__builtin__", "bytearray"), (bytes(x),))
        elif isinstance(x, Global):
            self._save_global(x)
        elif hasattr(x, "reduce"):
            self.save_call(*x.reduce())
        elif isinstance(x, tuple):
            self.save_tuple(x)
        elif isinstance(x, complex):
            self.save_call(Global("__builtin__", "complex"), (x.real, x.imag))
        elif isinstance(x, (set, frozenset)):
            members = sorted(x, key=lambda v: (type(v).__name__, repr(v)))
            self.save_call(Global("__builtin__", type(x).__name__), (members,))
        else:
            return False
        return True

    def _save_global(self, x: Global) -> None:
        """Write a global, the name of a class or function in a module; an attribute of a class is written as a call of
        getattr."""
        if self.recall(("g", x)):
            return
        owner, _, last = x.name.rpartition(".")
        if owner:
            self.save_call(Global("__builtin__", "getattr"), (Global(x.module, owner), last))
        else:
            self.out += b"c" + x.module.encode() + b"\n" + x.name.encode() + b"\n"
        self.memoize(("g", x))

    def _save_container(self, x: object) -> None:
        """Write a list, dict or instance, memoized before its items so that these may refer to it.

        Raises:
            TypeError: it is of another type.
        """
        if self.recall(id(x)):
            return
        if type(x) is list:
            self._save_list(x)
        elif type(x) is CommonList:
            self._save_common_list(x)
        elif isinstance(x, dict) and type(x) in (dict, Ordered):
            if type(x) is dict:
                self.out += b"}"
            else:
                self.save_call(Global("collections", "OrderedDict"), ())
            self._memoize_identity(x)
            self._save_dict_items(x.items())
        elif type(x) is BackReference:
            if not self.recall(x):
                raise TypeError("a reference to an object that is not around it cannot be written to a checkpoint")
        elif isinstance(x, Opaque):
            self._save_instance(x)
        else:
            raise TypeError(f"a {type(x).__name__} cannot be written to a checkpoint")

    def _save_list(self, x: list[object]) -> None:
        """Write a list, memoized before its items."""
        self.out += b"]"
        self._memoize_identity(x)
        self._save_list_items(x)

    def _save_common_list(self, x: CommonList) -> None:
        """Write a list that many pickles have in common: with the bytes of an earlier pickle if they mean the same with
        this memo; otherwise encode it and keep the bytes."""
        self.pieces.append(bytes(self.out))
        self.out.clear()
        first = len(self.memo)
        forms = x.encoded.setdefault(first, [])
        for form in forms:
            if form.outside.items() <= self.memo.items() and form.put.keys().isdisjoint(self.memo):
                break
        else:
            self.recalled, alive = {}, len(self.alive)
            self._save_list(x)
            put = dict(islice(self.memo.items(), first, None))
            outside = {key: n for key, n in self.recalled.items() if n < first}
            form = _Encoded(outside, put, self.alive[alive:], bytes(self.out))
            forms.append(form)
            self.out.clear()
        self.memo.update(form.put)
        self.pieces.append(form.raw)

    def _save_instance(self, x: Opaque) -> None:
        """Write an instance of an unknown class as it was pickled.

        Raises:
            TypeError: something inside is of a type that no checkpoint has.
        """
        self.save(x.cls)
        self.save_tuple(x.args)
        self.out += b"R" if x.call else b"\x81"
        self._memoize_identity(x)
        if x.label is not None:  # of the outermost instance that is being written, whose labels come first
            self.memo[BackReference(x.label)] = self.memo[id(x)]
        self._save_list_items(x.list_items)
        self._save_dict_items(x.dict_items)
        if x.state is not None:
            self.save(x.state)
            self.out += b"b"

    def _memoize_identity(self, x: object) -> None:
        """Memoize an object under its id(), and keep the object alive so that the id stays unique."""
        self.alive.append(x)
        self.memoize(id(x))

    def save_tuple(self, x: tuple[object, ...]) -> None:
        """Write a tuple, which is not memoized.

        Raises:
            TypeError: an element is of a type that no checkpoint has.
        """
        if len(x) > 3:
            self.out += b"("
        for v in x:
            self.save(v)
        self.out += _TUPLES.get(len(x), b"t")

    def save_call(self, f: Global, args: tuple[object, ...]) -> None:
        """Write the call of a function with positional arguments.

        Raises:
            TypeError: an argument is of a type that no checkpoint has.
        """
        self.save(f)
        self.save_tuple(args)
        self.out += b"R"

    def _save_list_items(self, items: Collection[object]) -> None:
        """Append items to the list or instance on the stack; nothing is written if there are none."""
        if items:
            self.out += b"("
            for v in items:
                self.save(v)
            self.out += b"e"

    def _save_dict_items(self, items: Collection[tuple[object, object]]) -> None:
        """Set items of the dict or instance on the stack; nothing is written if there are none."""
        if items:
            self.out += b"("
            for k, v in items:
                self.save(k)
                self.save(v)
            self.out += b"u"
