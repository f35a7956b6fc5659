"""Cuts the records of chunks and items out of the pickle of a `.metadata`, as columns, before it is unpickled.

The C unpickler keeps every dict and tuple of a pickle in its memo until the end, which is 0.9 kB for each chunk of a
tensor. What a pickler writes of one chunk, and of one item, is the same instructions each time, with other numbers:

    ChunkStorageMetadata   {offsets: Size, sizes: Size}
    MetadataIndex          {fqn: text[, index: number][, offset: Size]}      these two, the key and the value of
    _StorageInfo           {relative_path: text, offset, length[, transform_descriptors]}    a dict, as one record

`RecordCutter` reads the pickle in blocks and hands on all other instructions as they are. A run of records becomes one
reference to an object outside of the pickle (BINPERSID), whose number `take` turns into a `BoxRun` or `PlaceRun`. A
record that is written in another way stays in the pickle, so nothing is read here that the unpickler would refuse.

The memo: a pickler numbers its entries in order. Those of the records are gone, so later references are numbered anew,
and a reference to a text or a Size inside a record that was cut out becomes a reference to an object outside. One to
anything else in a record becomes a `PartOfRecord`: Megatron-Core's plans of all ranks refer to the chunks and places
of the fields before them.

Sources: CPython's Lib/pickle.py and Modules/_pickle.c for the order of the instructions; the classes of torch in
torch/distributed/checkpoint/metadata.py and filesystem.py for the order of the fields.
"""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from ckpttool.errors import Corrupt, Unsafe
from ckpttool.formats import pickles

__all__ = ["BoxRun", "PartOfRecord", "PlaceRun", "PlacedItem", "RecordCutter", "SecondOfPair"]

_BLOCK = 1 << 20  # bytes that are read at once
_MARGIN = 1 << 14  # bytes of the longest record that is cut out
_LONG = 1 << 26  # bytes of a long text that are read at once
_FRAME = 1 << 16  # bytes of instructions that are handed on at once
_MOST_OUTSIDE = 8  # runs of records that wait for the unpickler
_MOST_KNOWN = 1 << 16  # Sizes that are kept decoded
_MOST_KEYS = 8  # entries of the memo with one text that are taken for the name of a field

_INT = rb"(?:K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
_INTS = re.compile(_INT, re.DOTALL)
_TUPLES = (1, b"\x85"), (2, b"\x86"), (3, b"\x87")
_GET = rb"(?:h.|j.{4})"
_TEXT = rb"\x8c.[^\x94]*+\x94"
_TEXTS_OF_PAIR = 0, 2, 5  # the groups of its pattern that hold texts
_TEXTS = re.compile(_TEXT + b"|" + _GET, re.DOTALL)
#: Instructions whose length the first byte tells, and which get nothing from the memo.
_PLAIN = rb"[()}\]\x81\x85-\x89\x8f-\x92NtsubeaR01ld]|K.|M..|J.{4}|G.{8}"
#: A run of those and of gets, as `_make_run_pattern` makes it, less its MEMOIZE instructions.
_ALL_BUT_MEMOIZE = re.compile(rb"[^\x94KMJGh]++|K.|M..|J.{4}|G.{8}|h.", re.DOTALL)
_PART = b"K\0Q"  # pushes the object outside of the pickle whose number is 0
_PLAIN_BYTES = {0x4B: 2, 0x4D: 3, 0x4A: 5, 0x47: 9}  # BININT1, BININT2, BININT, BINFLOAT
_MEMO_BYTES = {0x94: 1, 0x71: 2, 0x72: 5}
#: {instruction: (bytes of the length behind it, whether it pushes a text)}
_COUNTED = {0x8C: (1, True), 0x58: (4, True), 0x8D: (8, True), 0x43: (1, False), 0x42: (4, False), 0x8A: (1, False)}
_FIELDS = (b"offsets", b"sizes", b"fqn", b"index", b"offset", b"relative_path", b"length", b"transform_descriptors")
_CLASSES = {"ChunkStorageMetadata": "box", "MetadataIndex": "place", "_StorageInfo": "item", "Size": "size"}
_U16, _I32, _U32, _U64 = (struct.Struct(f) for f in ("<H", "<i", "<I", "<Q"))


class BoxRun(NamedTuple):
    """Chunks that follow each other: how many, the flat columns of their starts and of their sizes, and the numbers of
    dimensions that they have."""

    rows: int
    starts: array[int]
    sizes: array[int]
    dims: set[int]


class PlacedItem(NamedTuple):
    """An item: flat key, start of its chunk or None, file, offset and length in bytes, transforms."""

    key: str
    start: tuple[int, ...] | None
    file: str
    offset: int
    length: int
    transforms: list[str]


class PlaceRun(list[PlacedItem]):
    """Items that follow each other."""

    __slots__ = ()


class SecondOfPair:
    """What stands for the value of the pair whose key was a `PlaceRun`."""


class PartOfRecord:
    """What stands for an object of a record that was cut out, where the pickle refers to it again."""


class _Patterns(NamedTuple):
    """What records look like in this pickle, as soon as their classes and fields are known."""

    size: re.Pattern[bytes] | None
    box: re.Pattern[bytes] | None
    pair: re.Pattern[bytes] | None


def _make_run_pattern(gets: bytes) -> re.Pattern[bytes]:
    """Return the pattern of a run of instructions that are copied unchanged: plain ones, and BINGET of the memo entries
    whose numbers are the bytes of `gets`. Each may be memoized; none pushes a text or a class."""
    get = b"|h[" + b"".join(map(re.escape, map(bytes, zip(gets)))) + b"]" if gets else b""
    return re.compile(b"(?:(?:" + _PLAIN + get + b")\x94?+)*+", re.DOTALL)


def _decode_int(code: bytes) -> int:
    """Decode the instruction that pushes an integer."""
    if code[0] == 0x4B:
        return code[1]
    if code[0] == 0x4D:
        return int(_U16.unpack_from(code, 1)[0])
    return int.from_bytes(code[1 if code[0] == 0x4A else 2 :], "little", signed=True)


def _make_frame_error() -> Corrupt:
    """Return the error for an instruction that crosses the end of its frame. Python's own unpickler, which reads a
    frame at a time, loses its position there."""
    return Corrupt("an instruction of the pickle crosses the end of its frame.", code="CKPT0407")


def _decode_memo_number(code: bytes) -> int:
    """Return the number of the memo entry that a BINGET or LONG_BINGET instruction gets."""
    return int.from_bytes(code[1:], "little")


def _encode_get(number: int) -> bytes:
    """Return the instruction that pushes memo entry `number`."""
    return b"h" + bytes((number,)) if number < 256 else b"j" + _U32.pack(number)


class RecordCutter:
    """A pickle as a file for an unpickler (`read`, `readline`), without its records of chunks and items."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        """Start at the beginning of a pickle. `read` returns its next n bytes, and fewer only at the end."""
        self._read_more = read
        self._buf, self._pos, self._base, self._ended = b"", 0, 0, False
        self._frame_end: int | None = None  # byte of the pickle where its frame ends
        self._next = 0  # number of the next entry of the memo, as the pickler counts
        # entries that are gone with records: where each run of them begins and ends, and how many are gone up to there
        self._begins, self._ends, self._gone = array("q"), array("q"), array("q")
        self._known_at, self._known = array("I"), list[Any]()  # texts and Sizes in the memo, by number
        self._sizes: dict[bytes, tuple[tuple[int, ...], int]] = {}
        self._texts: dict[bytes, str] = {}
        self._refs: dict[str, list[bytes]] = {}  # instructions that get a class, or the name of a field
        self._kinds: dict[bytes, str] = {}  # of those that get a class by which records begin, which one
        self._match_plain, self._gets_known = _make_run_pattern(b"").match, False
        self._memo = b"\x94"  # how records set entries of the memo: b"" of a pickle that does not
        self._patterns: _Patterns | None = _Patterns(None, None, None)  # None: to be made of the references
        self._outside: dict[int, object] = {}
        self._given = 0
        #: What the last two instructions pushed, if it is a text, or an entry of the memo: the text, or the number.
        self._pushed: list[str | int] = ["", ""]
        self._last: object = None  # the text or class that the last instruction pushed
        self._stopped = False
        self._frames, self._ready, self._at = self._iterate_frames(), b"", 0

    def read(self, n: int) -> bytes:
        """Return the next `n` bytes of the pickle without the records that were cut out."""
        while len(self._ready) - self._at < n and (more := next(self._frames, b"")):
            self._ready, self._at = self._ready[self._at :] + more, 0
        self._at += n
        return self._ready[self._at - n : self._at]

    def readline(self) -> bytes:
        """Raise Corrupt. Only an instruction outside of a frame reads lines, and all instructions are passed on in
        frames."""
        raise Corrupt("an instruction of the pickle is outside of its frame.", code="CKPT0407")

    def take(self, number: object) -> Any:
        """Return the object that was cut out of the pickle and has the persistent id `number`, and forget it: a
        `BoxRun`, `PlaceRun` or `SecondOfPair`, or a text or tuple that a record held. Number 0 is always a
        `PartOfRecord`."""
        return self._outside.pop(number) if number else PartOfRecord()  # type: ignore[call-overload]

    # ------------------------------------------------------------------------------------------------ instructions

    def _require_bytes(self, n: int) -> None:
        """Read until the buffer holds the next `n` bytes.

        Raises:
            Truncated: the pickle ends before.
        """
        while len(self._buf) - self._pos < n:
            more = b"" if self._ended else self._read_more(max(_BLOCK, min(n, _LONG)))
            if not more:
                self._ended = True
                raise pickles.Truncated("the pickle ends in the middle of an instruction.")
            self._base += self._pos
            self._buf, self._pos = self._buf[self._pos :] + more, 0

    def _fill_buffer(self) -> None:
        """Read until the buffer holds enough bytes for any record, or the pickle ends."""
        if not self._ended:
            try:
                self._require_bytes(_MARGIN)
            except pickles.Truncated:
                pass

    def _push_outside(self, found: object) -> bytes:
        """Keep an object for the unpickler to ask for by a persistent id, and return the opcodes that push that id."""
        self._given = (self._given + 1) & 0x7FFFFFFF
        self._outside[self._given] = found
        return b"J" + _I32.pack(self._given) + b"Q"

    def _iterate_frames(self) -> Iterator[bytes]:
        """Yield the pickle without its records, in frames of instructions.

        Raises:
            Corrupt: no pickler writes such instructions. Unsafe: one refers to an object outside of the pickle.
        """
        yield b"\x80\x04"
        out = bytearray()
        while not self._stopped:
            if len(self._buf) - self._pos < _MARGIN:
                self._fill_buffer()
            here = self._base + self._pos
            if self._frame_end is not None and here >= self._frame_end:
                if here > self._frame_end:
                    raise _make_frame_error()
                self._frame_end = None
            if len(out) >= _FRAME or len(self._outside) > _MOST_OUTSIDE:
                yield b"\x95" + _U64.pack(len(out)) + out
                out.clear()
            limit = self._find_limit()
            if code := self._match_plain(self._buf, self._pos, limit)[0]:  # type: ignore[index]  # it may be empty
                out += code
                self._pos += len(code)
                self._pushed, self._last = ["", ""], None
                if b"\x94" in code:
                    self._next += len(_ALL_BUT_MEMOIZE.sub(b"", code))
                if limit - self._pos < _MARGIN:  # what follows may need more of the pickle, or end the frame
                    continue
            self._require_bytes(1)
            out += self._read_instruction(self._buf[self._pos])
        yield b"\x95" + _U64.pack(len(out)) + out

    def _read_instruction(self, op: int) -> bytes:
        """Consume an instruction that is not `_PLAIN`, or the records that begin with it, and return the instructions
        to pass on. `op` is its first byte.

        Raises:
            Corrupt: no pickler writes it. Unsafe: it refers to an object outside of the pickle, or no checkpoint needs
                it.
        """
        if op in (0x68, 0x6A):  # BINGET, LONG_BINGET
            return self._read_get(2 if op == 0x68 else 5)
        if op in _MEMO_BYTES:  # MEMOIZE, BINPUT, LONG_BINPUT
            number = self._take_bytes(_MEMO_BYTES[op])[1:]
            if number and int.from_bytes(number, "little") != self._next:
                raise Corrupt("entries of the memo of the pickle are not in order.", code="CKPT0407")
            self._add_memo_entry(self._last)
            self._last = None
            return b"\x94"
        last, self._last = self._last, None
        if op in _COUNTED:  # texts and bytes
            width, is_text = _COUNTED[op]
            self._require_bytes(1 + width)
            code = self._take_bytes(
                1 + width + int.from_bytes(self._buf[self._pos + 1 : self._pos + 1 + width], "little")
            )
            if is_text:
                self._last = text = code[1 + width :].decode("utf-8", "surrogatepass")
                self._pushed = [self._pushed[1], text]
                if self._buf[self._pos : self._pos + 1] == b"\x94" and self._pos < self._find_limit():
                    return code + self._read_instruction(0x94)
            return code
        if op == 0x93:  # STACK_GLOBAL
            self._last = pickles.Global(*(str(self._value(x)) if isinstance(x, int) else x for x in self._pushed))
            return self._take_bytes(1)
        if op == 0x63:  # GLOBAL
            code = self._take_two_lines()
            self._last = pickles.Global(*code[1:-1].decode("utf-8").split("\n"))
            return code
        if op == 0x95:  # FRAME
            self._frame_end = int(_U64.unpack_from(self._take_bytes(9), 1)[0]) + self._base + self._pos
            self._last = last
            return b""
        if op == 0x80:  # PROTO
            if (version := self._take_bytes(2)[1]) > 5:
                raise Corrupt(f"pickle protocol {version}.", code="CKPT0407")
            self._memo = b"\x94" if version >= 4 else b""
            return b""
        if op == 0x2E:
            code, self._stopped = self._take_bytes(1), True
            if self._frame_end is not None:  # a frame has all its bytes, whatever is behind the end of the pickle
                self._require_bytes(self._frame_end - self._base - self._pos)
            return code
        if op == 0x51:
            raise Unsafe("the pickle refers to an object outside of it.", code="CKPT0701")
        if op in _PLAIN_BYTES:  # which the end of the pickle, or of its frame, cuts off
            self._require_bytes(_PLAIN_BYTES[op])
            raise _make_frame_error()
        raise Unsafe(f"pickle instruction 0x{op:02x}, which no checkpoint needs.", code="CKPT0701")

    def _read_get(self, n: int) -> bytes:
        """Consume an instruction of `n` bytes that gets a memo entry, or the records that begin with it, and return the
        instructions to pass on."""
        self._require_bytes(n)
        code = self._buf[self._pos : self._pos + n]
        self._last = None
        if (kind := self._kinds.get(code)) is not None and (cut := self._cut_records(kind, code)) is not None:
            self._pushed = ["", ""]
            return cut
        self._pos += n
        number = _decode_memo_number(code)
        self._pushed = [self._pushed[1], number]
        return self._make_get(number)

    def _find_limit(self) -> int:
        """Return the position in the buffer where the current frame ends, or the end of the buffer if that is first."""
        return len(self._buf) if self._frame_end is None else min(len(self._buf), self._frame_end - self._base)

    def _take_bytes(self, n: int) -> bytes:
        """Consume the next `n` bytes and return them."""
        self._require_bytes(n)
        self._pos += n
        return self._buf[self._pos - n : self._pos]

    def _take_two_lines(self) -> bytes:
        """Consume the instruction up to the end of its second line, and return it."""
        n = 1
        for _ in range(2):
            while True:
                self._require_bytes(n)
                n += 1
                if self._buf[self._pos + n - 2] == 0x0A:
                    break
        return self._take_bytes(n - 1)

    # ------------------------------------------------------------------------------------------------- the memo

    def _add_memo_entry(self, value: object) -> None:
        """Count the next memo entry, and remember it if it is a text or a class; `value` is None for anything else."""
        if isinstance(value, pickles.Global):
            if (kind := _CLASSES.get(value.name)) is not None:
                self._learn_reference(kind)
        elif isinstance(value, str):
            self._remember_value(self._next, value)
            if value.encode(errors="replace") in _FIELDS:
                self._learn_reference(value)
        self._next += 1

    def _remember_value(self, number: int, value: object) -> None:
        """Remember the text or Size of memo entry `number`."""
        self._known_at.append(number)
        self._known.append(value)

    def _value(self, number: int) -> object:
        """Return the text or Size of an entry of the memo; None if it is anything else."""
        k = bisect_left(self._known_at, number)
        return self._known[k] if k < len(self._known_at) and self._known_at[k] == number else None

    def _make_get(self, number: int) -> bytes:
        """Return the instructions that push memo entry `number` of the original pickle: with its new number, or as an
        object outside of the pickle if the entry was cut out."""
        k = bisect_right(self._ends, number)
        if k < len(self._begins) and number >= self._begins[k]:
            value = self._value(number)
            return _PART if value is None else self._push_outside(value)
        number -= self._gone[k - 1] if k else 0
        return _encode_get(number)

    def _learn_reference(self, name: str) -> None:
        """Record that the next memo entry is a class of records (`name` is its kind) or the name of a field."""
        refs = self._refs.setdefault(name, [])
        refs.append(_encode_get(self._next))
        for old in refs[:-_MOST_KEYS]:
            self._kinds.pop(old, None)
        del refs[:-_MOST_KEYS]
        if name in _CLASSES.values():
            self._kinds[refs[-1]] = name
        self._patterns = None

    def _pass_gets_below(self, end: int) -> None:
        """From here on, copy BINGET instructions of memo entries below number `end` unchanged: no record before them
        was cut out. Excluded are classes, with which records begin, and texts that may name one."""
        numbers = (n for n in range(min(end, 256)) if _encode_get(n) not in self._kinds)
        known = (n for n in numbers if self._value(n) not in _CLASSES)
        self._match_plain, self._gets_known = _make_run_pattern(bytes(known)).match, True

    def _make_patterns(self) -> _Patterns:
        """Return the patterns of records, each None until all its classes and fields are in the memo."""
        memo = self._memo

        def ref(*names: str) -> bytes | None:
            """Return the pattern of what gets one of these entries; None if none is known."""
            known = [re.escape(r) for n in names for r in self._refs.get(n, ())]
            return b"(?:" + b"|".join(known) + b")" if known else None

        def build(*parts: bytes | None) -> re.Pattern[bytes] | None:
            """Join the parts of a pattern; None if one is not known."""
            known = [p for p in parts if p is not None]
            return re.compile(b"".join(known), re.DOTALL) if len(known) == len(parts) else None

        numbers = b"|".join((b"\\)", *(_INT * n + op + memo for n, op in _TUPLES), b"\\(" + _INT + b"{4,64}t" + memo))
        of_size = ref("size")
        size = None if of_size is None else of_size + b"(?:" + numbers + b")\x85" + memo + b"R" + memo
        size_or_get = None if size is None else b"(" + size + b"|" + _GET + b")"
        text = b"(?:" + (_TEXT + b"|" if memo else b"") + _GET + b")"
        begin, index = b"\\)\x81" + memo + b"}" + memo + b"\\(", ref("index")
        index = b"" if index is None else b"(?:" + index + b"(?:N|" + _INT + b"))?"
        transforms = ref("transform_descriptors")
        if transforms is not None:
            transforms = transforms + b"(N|\\]" + memo + b"(?:" + text + b"a|\\(" + text + b"{1,9}e))"
        return _Patterns(
            build(size),
            build(ref("box"), begin, ref("offsets"), size_or_get, ref("sizes"), size_or_get, b"ub"),
            build(
                *(ref("place"), begin, ref("fqn"), b"(" + text + b")", index, b"(?:", ref("offset")),
                *(None if size_or_get is None else size_or_get[:-1] + b"|N))?", index, b"ub"),
                *(ref("item"), begin, ref("relative_path"), b"(" + text + b")", ref("offset"), b"(" + _INT + b")"),
                *(ref("length"), b"(" + _INT + b")", b"()" if transforms is None else b"(?:" + transforms + b")?"),
                b"ub",
            ),
        )

    # ---------------------------------------------------------------------------------------------------- records

    def _cut_records(self, kind: str, code: bytes) -> bytes | None:
        """Consume the records that begin here, and return the instructions that replace them; None if no record begins
        here.

        Args:
            kind: kind of the class that the instruction gets: "box", "place", "item" or "size".
            code: that instruction.
        """
        patterns, begins = self._patterns or self._make_patterns(), self._next
        self._patterns = patterns
        if kind == "box" and patterns.box is not None:
            out = self._cut_boxes(patterns.box)
        elif kind == "place" and patterns.pair is not None:
            out = self._cut_pairs(patterns.pair)
        elif kind == "size" and patterns.size is not None:  # which stays where it is
            if (found := patterns.size.match(self._buf, self._pos, self._find_limit())) is None:
                return None
            value, entries = self._decode_size(found[0])
            ref = self._make_get(_decode_memo_number(code))
            self._pos = found.end()
            self._next += entries
            if entries:
                self._remember_value(self._next - 1, value)
            return ref + found[0][len(code) :]
        else:
            return None
        if out is not None and kind != "size" and not self._gets_known:
            self._pass_gets_below(begins)
        if out is not None and self._next > begins:
            self._begins.append(begins)
            self._ends.append(self._next)
            self._gone.append((self._gone[-1] if self._gone else 0) + self._next - begins)
        return out

    def _match_run(self, pattern: re.Pattern[bytes], texts: Sequence[int] = ()) -> list[tuple[bytes, ...]]:
        """Consume consecutive records of one kind, and return a tuple for each: the instructions in each group of the
        pattern, b"" for a group that is absent.

        Args:
            pattern: pattern of one record; its groups are the variable parts.
            texts: numbers of the groups that hold texts. A text with the byte of MEMOIZE in it, by which the pattern
                finds the end of a text, ends the run.
        """
        rows: list[tuple[bytes, ...]] = []
        match, end, known = pattern.match, self._find_limit(), self._texts
        while (found := match(self._buf, self._pos, end)) is not None:
            codes = found.groups(b"")
            for k in texts:
                if (code := codes[k]) not in known and any(
                    t[0] == 0x8C and len(t) != t[1] + 3 for t in _TEXTS.findall(code)
                ):
                    return rows
            rows.append(codes)
            self._pos = found.end()
            if len(self._buf) - self._pos < _MARGIN:
                self._fill_buffer()
                end = self._find_limit()
        return rows

    def _decode_size(self, code: bytes) -> tuple[tuple[int, ...], int]:
        """Return (the integers of a Size, number of memo entries that its instructions set).

        Raises:
            Corrupt: the instructions get something other than a Size from the memo.
        """
        if (known := self._sizes.get(code)) is not None:
            return known
        if len(code) == (2 if code[0] == 0x68 else 5):
            value, entries = self._value(_decode_memo_number(code)), 0
            if not isinstance(value, tuple):
                raise Corrupt("a place of .metadata is no torch.Size.", code="CKPT0406")
        else:
            value = tuple(map(_decode_int, _INTS.findall(code, 2 if code[0] == 0x68 else 5)))
            entries = (2 + bool(value)) * len(self._memo)
        if len(self._sizes) > _MOST_KNOWN:
            self._sizes.clear()
        self._sizes[code] = value, entries
        return value, entries

    def _cut_boxes(self, pattern: re.Pattern[bytes]) -> bytes | None:
        """Consume the chunks that begin here, and return the instructions that replace them; None if none begins
        here."""
        if not (rows := self._match_run(pattern)):
            return None
        starts, sizes, at = [], [], self._next
        own, known, remember, number = 2 * len(self._memo), self._sizes.get, self._known.append, self._known_at.append
        for start, size in rows:
            at += own
            value, entries = known(start) or self._decode_size(start)
            starts.append(value)
            if entries:
                at += entries
                number(at - 1)
                remember(value)
            value, entries = known(size) or self._decode_size(size)
            sizes.append(value)
            if entries:
                at += entries
                number(at - 1)
                remember(value)
        self._next = at
        dims = {*map(len, starts), *map(len, sizes)}
        flat = array("q", chain.from_iterable(starts)), array("q", chain.from_iterable(sizes))
        return self._push_outside(BoxRun(len(rows), *flat, dims))

    def _cut_pairs(self, pattern: re.Pattern[bytes]) -> bytes | None:
        """Consume the pairs of a place and an item that begin here, and return the instructions that replace them; None
        if none begins here."""
        if not (rows := self._match_run(pattern, _TEXTS_OF_PAIR)):
            return None
        run = PlaceRun()
        own, known, texts = 2 * len(self._memo), self._sizes.get, self._texts.get
        for key_code, start, path_code, offset, length, transforms in rows:
            self._next += own
            key = self._decode_text(key_code) if key_code[0] == 0x8C else texts(key_code) or self._decode_text(key_code)
            value: tuple[int, ...] | None = None
            if start not in (b"", b"N"):
                value, entries = known(start) or self._decode_size(start)
                if entries:
                    self._next += entries
                    self._remember_value(self._next - 1, value)
            self._next += own
            path = (
                self._decode_text(path_code)
                if path_code[0] == 0x8C
                else texts(path_code) or self._decode_text(path_code)
            )
            through = self._decode_transforms(transforms) if transforms else []
            run.append(PlacedItem(key, value, path, _decode_int(offset), _decode_int(length), through))
        return self._push_outside(run) + self._push_outside(SecondOfPair())

    def _decode_transforms(self, code: bytes) -> list[str]:
        """Return the transforms that instructions of a record push, a list of texts, and count its memo entries."""
        if code == b"N":
            return []
        self._next += len(self._memo)
        return [self._decode_text(t) for t in _TEXTS.findall(code, 1 + len(self._memo))]

    def _decode_text(self, code: bytes) -> str:
        """Return the text that instructions of a record push. A new text is remembered as the next memo entry.

        Raises:
            Corrupt: they push something else.
        """
        fresh = code[0] == 0x8C
        if (value := self._texts.get(code)) is None:
            found = code[2:-1].decode("utf-8", "surrogatepass") if fresh else self._value(_decode_memo_number(code))
            if not isinstance(found, str) or (fresh and len(code) != code[1] + 3):
                raise Corrupt("a name in .metadata is no text.", code="CKPT0406")
            value = self._texts[code] = found
        if fresh:
            self._remember_value(self._next, value)
            self._next += 1
        return value
