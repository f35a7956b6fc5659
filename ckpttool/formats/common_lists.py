"""Long lists that the pickles of all ranks have in common, read once.

The file of each rank of a ShardedTensor lists the shards of all ranks, so W files have W times W entries, and all these
lists are the same bytes. `CommonLists` keeps the bytes of such a list and what they made. Where another pickle has the
same bytes, and the numbers in them refer to the same things there, its reader uses the same objects and executes no
instruction. Anything else is executed, so a list that differs in one byte is read as what it says.

Several pickles then share objects, so none of these may be changed: a pickle that does so is read by itself
(`pickles.load`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..errors import Unsafe, Unsupported
from .pickles import Global, Opaque, Ordered, list_children, refuse_deep_object

__all__ = ["CommonLists"]

_LEAST = 512  # bytes of a list that is kept
_MOST_BYTES = 64 << 20  # of all that are kept
_MOST_NODES = 1 << 24  # of one that is kept
_PLAIN = (str, int, float, bool, type(None), Global)
_PUTS, _GETS = ("BINPUT", "LONG_BINPUT"), ("BINGET", "LONG_BINGET")
#: Instructions that may depend on, or change, what is outside of the list.
_OUTSIDE = frozenset(("MEMOIZE", "PUT", "GET", "FRAME", "PROTO", "PERSID", "BINPERSID", "POP", "POP_MARK"))
#: Those that end at a mark.
_MARKED = frozenset(("TUPLE", "DICT", "LIST", "APPENDS", "SETITEMS", "ADDITEMS", "FROZENSET"))
_TRIES = 4  # pickles in a row that have long lists, none of which is common


class Memo(dict[int, Any]):
    """The memo of a pickle, {number: object}, with those of whole lists beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.lists: dict[int, list[Any]] = {}  # by the number of the first object
        self._firsts: list[int] = []  # ascending
        self._highest, self._seen = -1, 0  # of the numbers looked at, and how many these are

    def __missing__(self, n: int) -> object:
        """Return object number `n` of the pickle from the list, added by `add`, that includes it. Python calls this for
        a number that is no key of the dict itself.

        Raises:
            KeyError: no added list includes it, so the pickle is damaged.
        """
        first = self.first_beside(n)
        return self.lists[first][n - first]

    def first_beside(self, n: int) -> int:
        """Return the number of the first object of that list, of those added by `add`, whose objects include number
        `n`.

        Raises:
            KeyError: no added list includes it.
        """
        k = bisect_right(self._firsts, n) - 1
        if k < 0 or n >= self._firsts[k] + len(self.lists[self._firsts[k]]):
            raise KeyError(n)
        return self._firsts[k]

    def ends_before(self, n: int) -> bool:
        """Return whether all numbers that have an object, of single entries and of added lists, are below `n`."""
        new = islice(reversed(self), len(self) - self._seen)  # the last ones set
        self._highest, self._seen = max(self._highest, max(new, default=-1)), len(self)
        return self._highest < n

    def add(self, first: int, objects: list[Any]) -> None:
        """Add the objects of a list under consecutive numbers from `first` on; every number that already has an object
        must be below `first`."""
        self._firsts.append(first)
        self.lists[first] = objects
        self._highest = first + len(objects) - 1

    def fold(self, first: int, objects: list[object]) -> bool:
        """Replace the entries of a list's objects, which were set one by one, by one added list (`add`). Return False,
        without a change, if numbers from `first` on remain that are not of this list.

        Args:
            first: the number of the first object, the list itself.
            objects: all objects of the list, in the order of their numbers.
        """
        for n in range(first, first + len(objects)):
            del self[n]
        self._highest, self._seen = max((n + len(x) - 1 for n, x in self.lists.items()), default=-1), 0
        if not self.ends_before(first):
            self.update(zip(range(first, first + len(objects)), objects, strict=True))
            return False
        self.add(first, objects)
        return True


@dataclass(slots=True)
class _CommonList:
    """A list as pickled, from its EMPTY_LIST to its last APPENDS, and what it made: `objects` by number, from `first`
    on, which is the list. It refers to the objects `outside`, by number, and to those of the lists `others`, by the
    number of the first."""

    raw: bytes
    first: int
    objects: list[object]
    outside: dict[int, Any]
    others: dict[int, list[Any]]


class CommonLists:
    """The long lists of the pickles read so far, whose stand-ins must be the same. `frozen` are the identities of
    objects that no pickle may change, `measured` what `pickles.refuse_deep_object` returned of the lists."""

    def __init__(self) -> None:
        self.frozen: set[int] = set()
        self.measured: dict[int, tuple[int, int]] = {}
        self._lists: dict[bytes, list[_CommonList]] = {}  # by their first bytes, which have the number of the list
        self._bytes = self._useless = self._kept = self._found = 0

    def new_memo(self) -> Memo:
        """Return an empty memo for the next pickle. Ends the counts for the one before: after several pickles in a row
        whose long lists were all new, no more lists are recorded."""
        self._useless = 0 if self._found else self._useless + (self._kept > 0)
        self._kept = self._found = 0
        return Memo()

    def find(self, data: bytes, at: int, memo: Memo) -> tuple[object, int] | None:
        """Look for the list that begins at a position of a pickle among the recorded lists of earlier pickles, so that
        its bytes need not be read again, and return (the earlier list, position after its bytes); None if no recorded
        list has the same bytes and meaning. The objects of the list are added to `memo`.

        Args:
            data: the bytes of the pickle.
            at: position of the list's first instruction.
            memo: the memo of the pickle.
        """
        for known in self._lists.get(data[at : at + 7], ()):
            if data.startswith(known.raw, at) and self._has_same_references(known, memo):
                self._found += 1
                memo.add(known.first, known.objects)
                return known.objects[0], at + len(known.raw)
        return None

    @staticmethod
    def _has_same_references(known: _CommonList, memo: Memo) -> bool:
        """Return whether the bytes of a recorded list mean the same in another pickle.

        Args:
            known: the recorded list.
            memo: the memo of the other pickle. In it, the numbers by which the list refers to objects outside of
                itself must have the same objects, and the list's own numbers must be free.
        """
        for n, x in known.outside.items():
            found = memo.get(n)
            if found is not x and not (type(found) is type(x) and found == x):
                return False
        for n, objects in known.others.items():
            if memo.lists.get(n) is not objects:
                return False
        return memo.ends_before(known.first)

    def record(self, data: bytes, start: int, end: int, memo: Memo, made: list[object]) -> None:
        """Keep a list for later pickles, if it is long enough, consists of plain data and instances, and refers to
        nothing mutable outside of it.

        Args:
            data: the bytes of the pickle.
            start, end: the list is bytes [start, end) of it.
            memo: the memo of the pickle.
            made: the list that the pickle made of these bytes.
        """
        if end - start < _LEAST or self._bytes + end - start > _MOST_BYTES or self._useless >= _TRIES:
            return
        known = _parse_list(data[start:end], memo)
        if known is None or known.objects[0] is not made:
            return
        inside = _find_containers(known.objects, self.frozen)
        if inside is None or not all(type(x) in _PLAIN and x is not None for x in known.outside.values()):
            return
        try:
            self.measured[id(made)] = refuse_deep_object(made, "", _MOST_NODES, self.measured)
        except (Unsafe, Unsupported):
            return
        if not memo.fold(known.first, known.objects):
            return
        self.frozen |= inside
        self._bytes, self._kept = self._bytes + len(known.raw), self._kept + 1
        self._lists.setdefault(known.raw[:7], []).append(known)


def _parse_list(raw: bytes, memo: Memo) -> _CommonList | None:
    """Parse the pickled bytes of a list, and return the record by which later pickles can reuse the list.

    None is returned unless the bytes are exactly one list whose objects have consecutive memo numbers, as picklers
    write it, and whose instructions refer to objects outside of the list by memo number only.

    Args:
        raw: bytes from the list's EMPTY_LIST to its last APPENDS.
        memo: the memo of the pickle.
    """
    import pickletools

    first = marks = put = 0
    outside: dict[int, Any] = {}
    others: dict[int, list[Any]] = {}
    op: Any
    n: Any
    try:
        for i, (op, n, _) in enumerate(pickletools.genops(raw + b".")):
            if op.name in _OUTSIDE or (i == 1) != (op.name in _PUTS and not put):
                return None
            if op.name in _PUTS:
                first = first if put else n
                if n != first + put:
                    return None
                put += 1
            elif op.name in _GETS and n < first:
                if n in memo:
                    outside[n] = memo[n]
                else:
                    n = memo.first_beside(n)
                    others[n] = memo.lists[n]
            if i > 1 and not marks and op.name not in ("MARK", "STOP"):
                return None
            marks += (op.name == "MARK") - (op.name in _MARKED)
            if op.name in _MARKED and not marks and op.name != "APPENDS":
                return None
    except (ValueError, KeyError):
        return None
    own = [memo[n] for n in range(first, first + put) if n in memo]
    return _CommonList(raw, first, own, outside, others) if len(own) == put else None


def _find_containers(objects: Iterable[object], known: set[int]) -> set[int] | None:
    """Return the identities, id(x), of all containers in `objects`, at any depth; None if there is anything but plain
    data and instances.

    Args:
        objects: where to look.
        known: identities of containers that are neither returned nor looked into.
    """
    out: set[int] = set()
    todo = list(objects)
    while todo:
        x = todo.pop()
        if type(x) in _PLAIN or id(x) in out or id(x) in known:
            continue
        if type(x) not in (list, tuple, dict, Ordered, Opaque):
            return None
        out.add(id(x))
        todo.extend(list_children(x))
    return out
