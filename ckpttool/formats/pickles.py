"""Reads pickles as data: opcodes build plain values and inert records, and nothing is ever imported or called.

`load` is a small pickle machine of our own. A global (module, name) is looked up in a dict of *stand-ins*, functions
and inert classes of ours; one that is not there becomes `Global`, a pair of strings. NEWOBJ of a `Global` (an instance
of an unknown class) becomes `Opaque`, which keeps class, arguments and state and can be written to another pickle
unchanged (pickle_writer.py). REDUCE of a `Global` (a call) becomes one where the call makes data, and is refused
otherwise; `_make_call_record` has the rule.

Bounds: string and total length follow from the size of the input, which is itself bounded. Instructions have a budget
(`_BUDGET`), since a million take a third of a second here: three million, one for every 32 bytes of the pickle, and for
every storage 64 and one for every 16 bytes; numbers that follow each other, as in a list of tokens, are read at once
and are not counted. Every 2^18 instructions, what is on the stack and in the memo is compared with what a pickler
writes (`watched`). Integers have at most 64 bytes; keys of dicts are scalars or flat tuples of them, so nothing nested
is ever hashed, and none is set twice; the result is walked once and refused if it is deeper than 100 or expands to more
than 16 nodes per opcode. An instance that holds itself, as a config whose nodes point to their parents, is copied once,
with a `BackReference` for each reference back (`_copy_without_cycles`).

`load_large` reads a genuine 100 MB `.metadata` (a million chunks) fifty times faster with the C unpickler of the
standard library and the same stand-ins, in a child process whose memory and time are limited, since the C code would
hash nested tuples for ever; of globals without a stand-in, only classes that `load` keeps as `Opaque` are read there.

One module, since the loop over opcodes and the bounds that make it safe have to be read together.

Sources: CPython's Lib/pickletools.py for the opcodes; torch/serialization.py for what torch writes.
"""

from __future__ import annotations

import _compat_pickle
import builtins
import pickle
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import Corrupt, Unsafe, Unsupported

if TYPE_CHECKING:
    from .common_lists import CommonLists

__all__ = [
    "ANY_MODULE",
    "MEGATRON_ENUMS",
    "MEMORY_FORMATS",
    "BackReference",
    "Global",
    "Opaque",
    "Ordered",
    "Refused",
    "SharedStandIn",
    "StandIn",
    "Truncated",
    "find_unwritable_reason",
    "is_dangerous",
    "load",
    "load_large",
    "make_enum_stand_ins",
    "map_children",
    "refuse_deep_object",
    "resolve_attribute",
    "short",
]

#: {(module, name): what stands for that class or function}
StandIns = Mapping[tuple[str, str], Any]
#: In the place of a module: a class of this name wherever it is defined, for formats that others copied with their
#: classes.
ANY_MODULE = "*"
#: Members of torch's (_)MEM_FORMAT_ENCODING, by number (torch/distributed/checkpoint/metadata.py).
MEMORY_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")

MAX_BYTES = 1 << 30
MAX_DEPTH = 100
#: Instructions that a pickle may have without a tensor. A vocabulary of half a million entries has 1.5 to 2 million.
_BUDGET = 3_000_000
_LOOK = 1 << 18  # instructions between two looks at what they leave
_MOST_POPS = _MOST_GLOBALS = 100_000  # picklers pop for tuples that hold themselves, and write a global once
#: Numbers, bools and None, one after the other.
_SCALARS = re.compile(rb"(?:K.|M..|J.{4}|G.{8}|[N\x88\x89]){0,65536}+", re.DOTALL)
_PLAIN_TYPES = frozenset((int, float, bool, str, bytes, type(None)))
_FEW = 32  # items, above which a look at the types of all of them pays
_RUN = 256  # bytes of them from which on the C unpickler is faster


class _TooDeep(Unsafe):
    """Something is nested deeper than `MAX_DEPTH`."""

    code = "CKPT0704"


class _CommonListChanged(Exception):
    """A pickle changes a part of a list that other pickles have, too."""


class Truncated(Corrupt):
    """The bytes end before the pickle does."""

    code = "CKPT0403"


class Global(NamedTuple):
    """A (module, name) that a pickle refers to: a dtype, a class, a member of an enum ("Mode.FAST"); never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        """Return "module.name", such as "torch.float32"."""
        return f"{self.module}.{self.name}"


class StandIn:
    """Base of objects of ours that stand for those of a pickle. They are hashed by identity, so that they may be keys
    of dicts, and their `__setstate__`, if they have one, gets the state that the pickle sets."""

    __slots__ = ()


class Refused(StandIn):
    """A part of a file that is not supported, and why. Whoever needs it raises that; whoever does not leaves it out."""

    __slots__ = ("why",)

    def __init__(self, why: str) -> None:
        self.why = why


class SharedStandIn(StandIn):
    """One whose single instance stands for many objects of a pickle, so that a dict may seem to have a key twice."""

    __slots__ = ()


class Ordered(dict[Any, Any]):
    """A collections.OrderedDict, which stays one where it is kept as one value."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class BackReference:
    """In the place of an instance that was met before inside the same outermost instance: the one with this label."""

    label: int


class Opaque:
    """An instance of an unknown class: kept as it was pickled, never built.

    `call` is True when the pickle called the class (REDUCE), False when it used __new__ (NEWOBJ). `label` is a number
    to which the `BackReference` inside it refer, None where there is none.
    """

    __slots__ = ("_keys", "args", "call", "cls", "dict_items", "label", "list_items", "state")

    def __init__(self, cls: Global, args: tuple[Any, ...], call: bool = False) -> None:
        """Make an instance without state and items.

        Args:
            cls: the class, or the function that the pickle calls to make the instance.
            args: the arguments of the call, or of `__new__`.
            call: True when the pickle calls `cls` (REDUCE), False when it uses `cls.__new__` (NEWOBJ).
        """
        self.cls, self.args, self.call = cls, args, call
        self.label: int | None = None
        self.state: Any = None
        self.list_items: list[object] = []
        self.dict_items: list[tuple[object, object]] = []
        self._keys: dict[object, None] = {}

    def mapped(self, f: Callable[[Any], Any], made: Callable[[Opaque], None] = lambda out: None) -> Opaque:
        """Return a copy of the instance with `f` applied to its arguments, its items and its state, in the order of a
        pickle.

        Args:
            f: gets, one after the other, the tuple of arguments, the list of appended items, the list of (key, value)
                items and the state; returns what replaces each.
            made: gets the copy before its items and its state are set.
        """
        out = Opaque(self.cls, f(self.args), self.call)
        out.label = self.label
        made(out)
        out.list_items, out.dict_items, out.state = f(self.list_items), f(self.dict_items), f(self.state)
        return out

    def set_item(self, key: object, value: object, what: str) -> None:
        """Add an item to an instance of a subclass of dict.

        A key whose hashing has no bound (an instance, a tuple of tuples) is not compared with the others.

        Args:
            key, value: the item.
            what: names the pickle in messages.

        Raises:
            Unsafe: the key was set before.
        """
        if _has_bounded_hash(key):
            _set_new_key(self._keys, key, None, what)
        self.dict_items.append((key, value))

    def parts(self) -> tuple[Any, ...]:
        """Return everything inside, (class, arguments, state, appended items, (key, value) items), for walking and
        comparing."""
        return (self.cls, self.args, self.state, self.list_items, self.dict_items)

    def __eq__(self, other: object) -> bool:
        """Return whether another object is an `Opaque` of the same class with equal contents, made in the same way."""
        if not isinstance(other, Opaque) or (self.call, self.label) != (other.call, other.label):
            return False
        return self.parts() == other.parts()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Return the name of the class in angle brackets, "<module.name>"; the contents are left out."""
        return f"<{self.cls}>"


def _encode_text(text: str, encoding: str) -> bytes:
    """Return a text as bytes, as codecs.encode does, by a call of which protocol 2 represents bytes.

    Raises:
        Unsafe: the encoding is none that picklers use.
    """
    if encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise Unsafe(f"a pickle encodes text as {short(encoding)}", code="CKPT0701")
    return text.encode(encoding)


def _make_complex(real: float, imag: float) -> complex:
    """Return a complex number, in place of Python's own constructor: both parts are converted to float."""
    return complex(float(real), float(imag))


def _fill_dict(out: dict[object, object], items: Any = ()) -> dict[object, object]:
    """Add (key, value) pairs from a pickle to a dict, where every key must be new, and return the same dict.

    Args:
        out: the dict.
        items: the pairs, as the pickle has them.

    Raises:
        Unsafe: `out` has a key already, or its hashing has no bound.
    """
    for k, v in items:
        _set_new_key(out, k, v)
    return out


# Calls (REDUCE) that genuine checkpoints hold and that are data, not actions. What plain Python can hold becomes that,
PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): lambda items=(): _fill_dict(Ordered(), items),
    ("builtins", "set"): lambda items=(): _make_flat_set(set, items),
    ("__builtin__", "set"): lambda items=(): _make_flat_set(set, items),
    ("builtins", "frozenset"): lambda items=(): _make_flat_set(frozenset, items),
    ("__builtin__", "frozenset"): lambda items=(): _make_flat_set(frozenset, items),
    ("builtins", "complex"): _make_complex,
    ("__builtin__", "complex"): _make_complex,
    ("builtins", "bytearray"): lambda raw=b"": _make_bytearray(raw),
    ("__builtin__", "bytearray"): lambda raw=b"": _make_bytearray(raw),
    ("builtins", "bytes"): lambda: b"",  # how protocols below 3 spell no bytes at all
    ("__builtin__", "bytes"): lambda: b"",
    ("_codecs", "encode"): _encode_text,
}
#: Enumerations of Megatron-Core that the arguments of a job hold; a member is pickled as a call of its class with its
#: value.
MEGATRON_ENUMS = frozenset(
    Global(module, name)
    for module in ("megatron.core.transformer.enums", "megatron.core.enums", "megatron.training.enums")
    for name in (
        "AttnBackend",
        "AttnMaskType",
        "AttnType",
        "CudaGraphModule",
        "CudaGraphScope",
        "Fp4Recipe",
        "Fp8Recipe",
        "InferenceCudaGraphScope",
        "LayerType",
        "ModelType",
    )
)
# and the others are kept as Opaque and written out by name again.
_KEPT = MEGATRON_ENUMS | frozenset(
    Global(module, name)
    for module, names in {
        "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"),
        "pathlib._local": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"),
        "datetime": ("datetime", "timedelta", "date", "time", "timezone"),
        "collections": ("Counter", "defaultdict", "deque"),
        "decimal": ("Decimal",),
        "fractions": ("Fraction",),
        "functools": ("partial",),
        "ipaddress": ("IPv4Address", "IPv4Network", "IPv6Address", "IPv6Network"),
        "re": ("RegexFlag", "_compile"),
        "types": ("SimpleNamespace",),
        "uuid": ("SafeUUID", "UUID"),
        "zoneinfo": ("ZoneInfo._unpickle",),
        "torch": ("device", "Size"),
        "torch._C": ("Generator",),
        "numpy.random.bit_generator": ("__pyx_unpickle_SeedSequence",),
        "numpy.random._pickle": ("__bit_generator_ctor", "__generator_ctor", "__randomstate_ctor"),
        "numpy": ("dtype",),
        "numpy.core.multiarray": ("_reconstruct", "scalar"),
        "numpy._core.multiarray": ("_reconstruct", "scalar"),
        "numpy._core.numeric": ("_frombuffer",),
        "numpy.core.numeric": ("_frombuffer",),
        "builtins": ("slice", "range"),
        "__builtin__": ("slice", "range", "xrange"),
    }.items()
    for name in names
)


# Modules whose objects act when they are created, or represent calls: refused, not even kept as Opaque.
_NEVER = frozenset(
    (
        "os",
        "posix",
        "nt",
        "sys",
        "subprocess",
        "builtins",
        "__builtin__",
        "importlib",
        "runpy",
        "code",
        "pty",
        "shutil",
        "socket",
        "ctypes",
        "multiprocessing",
        "threading",
        "asyncio",
        "webbrowser",
        "pickle",
        "marshal",
        "types",
        "io",
        "commands",
        "copy_reg",
        "copyreg",
        "_pickle",
        "_posixsubprocess",
        "_socket",
        "_ctypes",
        "_thread",
        "_io",
        "functools",
        "operator",
        "tempfile",
        "urllib",
        "http",
        "signal",
        "gc",
        "inspect",
        "pdb",
        "timeit",
        "cProfile",
    )
)


#: Bytes in memory, in which Transformer Engine before 1.14 keeps the state of its modules.
_BUFFER = frozenset((Global("_io", "BytesIO"), Global("io", "BytesIO")))


#: Types of plain data, which are in a module of those that act.
_TYPES = frozenset(
    (
        "Ellipsis",
        "bool",
        "bytearray",
        "bytes",
        "complex",
        "dict",
        "float",
        "frozenset",
        "int",
        "list",
        "long",
        "object",
        "set",
        "str",
        "tuple",
        "unicode",
    )
)
_BUILTINS = ("builtins", "__builtin__")
_EXCEPTIONS = frozenset(n for n, x in vars(builtins).items() if isinstance(x, type) and issubclass(x, BaseException))
#: The first names of modules of Python itself, under those of Python 2 too.
_STANDARD = sys.stdlib_module_names | {
    name.partition(".")[0] for name in (*_compat_pickle.IMPORT_MAPPING, "exceptions")
}
#: Calls by which hints of types are pickled, in configs that have them: typing.List[int], list[int], int | None.
_HINTS = frozenset(
    (
        *(Global(module, name) for module in ("operator", "_operator") for name in ("getitem", "or_")),
        Global("types", "GenericAlias"),
    )
)


def is_dangerous(cls: Global) -> bool:
    """Return whether objects of a class act when they are created, or represent calls, as those of `subprocess` and
    `functools` do."""
    return cls.module.partition(".")[0] in _NEVER and cls not in _BUFFER


def _is_class_name(name: str) -> bool:
    """Return whether a name looks like that of a class by PEP 8: Mode, _Mode."""
    return name.isidentifier() and name.lstrip("_")[:1].isupper()


def _is_class_attribute(module: str, name: str) -> bool:
    """Return whether a dotted name in a module may be a nested class, a member of an enum or a method: its owners look
    like classes, and the module is not in Python's standard library. Names in `_KEPT` are accepted too."""
    *owners, last = name.split(".")
    if Global(module, name) in _KEPT:
        return True
    named = last.isidentifier() and last[:1] != "_" and all(map(_is_class_name, owners))
    return named and module.partition(".")[0] not in _STANDARD


def resolve_attribute(cls: object, name: object) -> Global | None:
    """Return the `Global` that getattr(cls, name) refers to, a nested class or a member of an enum; None for anything
    else."""
    if isinstance(cls, Global) and isinstance(name, str) and _is_class_attribute(cls.module, f"{cls.name}.{name}"):
        return Global(cls.module, f"{cls.name}.{name}")
    return None


def _make_call_record(f: Global, args: tuple[Any, ...]) -> object:
    """Return the record of a pickled call (REDUCE) that makes data; None for a call that is to be refused. `f` is the
    function or class that the pickle calls, `args` its arguments.

    Kept are calls of the functions and classes in `_KEPT`, of Python's exceptions, and of names that look like a class
    and are not in Python's standard library. Nothing is executed here; but if the record is written into a pickle
    again, loading that without `weights_only` executes the call. So a call of an unknown class with one plain argument,
    by which pickle represents a member of an enum, is kept as `__new__` of the class: for an enum this gives the same
    member, and for any other class no `__init__` runs. A call with other arguments, or of an instance that also gets a
    state or items, remains a call, which is never written (`find_unwritable_reason`).
    """
    if f.name == "getattr" and f.module in _BUILTINS:  # protocols below 4, and enums of Python 3.11.0 to 3.11.3
        return resolve_attribute(*args) if len(args) == 2 else None
    if f.name == "_reconstructor" and f.module in ("copyreg", "copy_reg"):  # an instance, in protocols 0 and 1
        made = len(args) == 3 and isinstance(args[0], Global) and not is_dangerous(args[0])
        return Opaque(args[0], ()) if made and args[1] in _OBJECT and args[2] is None else None
    if f in _KEPT or (f.name in _EXCEPTIONS and f.module in (*_BUILTINS, "exceptions")):
        refused = (
            f.name in ("partial", "defaultdict") and _holds_dangerous_class(args)
        ) or not _has_safe_generator_args(f, args)
        return None if refused else Opaque(f, args, call=True)
    if f in _HINTS or f in _TYPE:
        return Opaque(f, args, call=True) if _is_type_hint_call(f, args) else None
    if not _is_unknown_class(f):
        return None
    plain = len(args) == 1 and not isinstance(args[0], (Global, StandIn)) and _has_bounded_hash(args[0])
    return Opaque(f, args, call=not plain or _is_torchao_enum_call(f, args))


def _has_safe_generator_args(f: Global, args: tuple[object, ...]) -> bool:
    """Return whether a call of one of numpy's constructors of random generators, which call their arguments, passes
    only numpy's own classes; True for a call of any other function `f`."""

    def is_own(x: object) -> bool:
        """Whether an argument is numpy's own, or no class at all."""
        if isinstance(x, Global):
            return x.module.startswith("numpy.random.") and x.name in _GENERATORS
        return x.cls.module in _OF_GENERATORS if isinstance(x, Opaque) else True

    return f.module not in _OF_GENERATORS or all(map(is_own, args))


def _is_type_hint_call(f: Global, args: tuple[object, ...]) -> bool:
    """Return whether a call builds a type hint, such as list[int], from classes that do not act and from other
    hints."""

    def is_hint(x: object) -> bool:
        """Whether an argument is a class that does not act, another hint, or plain."""
        if type(x) is tuple or type(x) is list:
            return all(map(is_hint, x))
        if isinstance(x, Opaque):
            return x.call and (x.cls in _HINTS or x.cls in _TYPE)
        return not _holds_dangerous_class(x) if isinstance(x, Global) else x is None or isinstance(x, (int, str))

    if f in _TYPE:
        return args == (None,)
    generic = isinstance(args[0], Global) and (args[0].module in _GENERICS or args[0].name in _TYPES) if args else False
    return len(args) == 2 and (f.name != "getitem" or generic) and all(map(is_hint, args))


def _is_unknown_class(f: Global) -> bool:
    """Return whether a name looks like a class and is neither in `_KEPT`, nor in Python's standard library, nor one of
    torch's own tensor and storage classes."""
    standard = f.module.partition(".")[0] in _STANDARD or f.module in _OF_TORCH
    return not standard and f not in _KEPT and all(map(_is_class_name, f.name.split(".")))


def _is_torchao_enum_call(f: Global, args: tuple[object, ...]) -> bool:
    """Return whether a call is the pickled form of a member of one of torchao's enums, such as
    KernelPreference("auto")."""
    return f.module.partition(".")[0] == "torchao" and len(args) == 1 and type(args[0]) in (str, int)


#: Where torch has its classes of tensors and storages. What it pickles of them is in `_KEPT` or has a stand-in; it
#: calls no other.
_OF_TORCH = ("torch", "torch._C", "torch._tensor", "torch.storage")
_PARTIAL = Global("functools", "partial")
#: It is called with named arguments where ckpttool has written a DTensor (sharded.make_mesh).
_MESH = Global("torch.distributed.device_mesh", "DeviceMesh")
_TYPE = tuple(Global(module, "type") for module in _BUILTINS)
_OF_GENERATORS = ("numpy.random._pickle", "numpy.random.bit_generator")
_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64", "SeedSequence", "__bit_generator_ctor")
_GENERICS = ("typing", "typing_extensions", "collections", "collections.abc")
_OBJECT = tuple(Global(module, "object") for module in _BUILTINS)


def _holds_dangerous_class(x: object) -> bool:
    """Return whether a value, or an element of a tuple, is a class or function that must not be called
    (`is_dangerous`). This checks functions that would be called later: that of a functools.partial, the factory of a
    defaultdict.

    Args:
        x: a value, or a tuple of arguments, from a pickle.
    """
    todo = list(x) if isinstance(x, tuple) and not isinstance(x, Global) else [x]
    return any(
        isinstance(v, Global) and is_dangerous(v) and not (v.module in _BUILTINS and v.name in _TYPES) for v in todo
    )


def find_unwritable_reason(x: object) -> str | None:
    """Return why a value must not be written into a pickle: it holds a call of an unknown class, which loading the
    pickle would execute. None if it may be written."""
    todo = [x]
    while todo:
        v = todo.pop()
        if isinstance(v, Opaque) and v.call and _is_unknown_class(v.cls) and not _is_torchao_enum_call(v.cls, v.args):
            return f"a call of {v.cls}, which would be executed when a pickle with it is loaded"
        todo.extend(list_children(v))
    return None


def _make_bytearray(raw: object) -> bytearray:
    """Return bytes as a bytearray, in place of Python's own constructor, which would allocate zeros for a number.

    Raises:
        Unsafe: the argument is not bytes.
    """
    if not isinstance(raw, bytes):  # bytearray(10**12) would allocate
        raise Unsafe(f"a pickle builds a bytearray from a {type(raw).__name__}", code="CKPT0701")
    return bytearray(raw)


def _make_flat_set(kind: Any, items: Any) -> object:
    """Return a set or frozenset of some members, all of which must hash in bounded time.

    Args:
        kind: the type, `set` or `frozenset`.
        items: the members, as the pickle has them.

    Raises:
        Unsafe: a member does not hash in bounded time.
    """
    for x in items:
        _check_key(x)
    return kind(items)


def _has_bounded_hash(k: object) -> bool:
    """Return whether hashing a key takes bounded work: a scalar, a stand-in, or a flat tuple of scalars."""
    if isinstance(k, tuple):
        return all(x is None or isinstance(x, (str, int, float, bytes, Global)) for x in k)
    return k is None or isinstance(k, (str, int, float, bytes, StandIn))


def _check_key(k: object) -> object:
    """Return a key unchanged if its hashing has a bound.

    Raises:
        Unsafe: it has none.
    """
    if _has_bounded_hash(k):
        return k
    raise Unsafe(f"a pickle uses a {type(k).__name__} as key of a dict; hashing it has no bound.", code="CKPT0704")


def _set_new_key(d: dict[Any, Any], k: object, v: object, what: str = "a pickle") -> None:
    """Set d[k] = v, where k must be new: a pickler writes every key of a dict once. `what` names the pickle in
    messages.

    Equal keys (1, 1.0, True) are one key. A `SharedStandIn` is not compared.

    Raises:
        Unsafe: the key is there already, or its hashing has no bound.
    """
    if _check_key(k) in d and not isinstance(k, SharedStandIn):
        raise Unsafe(
            f"{what}: the key {short(k)} is set twice in one dict, so loading it would lose the first value. No "
            "pickler writes that; use another copy of the checkpoint.",
            code="CKPT0703",
        )
    d[k] = v


def load(
    data: bytes,
    stand_ins: StandIns | None = None,
    persistent: Callable[[object], object] | None = None,
    start: int = 0,
    what: str = "pickle",
    inert: bool = False,
    lists: CommonLists | None = None,
) -> tuple[Any, int]:
    """Read one pickle as data, without importing or calling anything: (object, position after the pickle).

    Args:
        data: bytes in which the pickle begins at `start`.
        stand_ins: {(module, name): what replaces that class or function of a pickle}; None for none, which suffices for
            plain data.
        persistent: converts a persistent id (of torch's storages) to a value; None refuses them.
        start: position of the pickle in `data`.
        what: names the pickle in messages.
        inert: keep calls of anything unknown as `Opaque` instead of refusing them, for callers that only look for
            storages.
        lists: long lists of earlier pickles that were read with the same stand-ins; those that recur here become the
            same objects, which must not be changed. None to share nothing.

    Raises:
        Unsafe: it would call something, or exceeds a bound.
        Truncated: the bytes end before the pickle does.
        Corrupt: it is not a pickle, or a damaged one.
        Unsupported: it holds a function or class as a value, or a stand-in does not support its arguments.
    """
    try:
        obj, end = _run_opcodes(data, start, stand_ins or {}, persistent, what, inert, lists)
    except _CommonListChanged:
        return load(data, stand_ins, persistent, start, what, inert)
    except (IndexError, struct.error):
        raise Truncated(f"{what}: the pickle ends in the middle of an instruction.") from None
    except (UnicodeDecodeError, LookupError, TypeError, ValueError, AttributeError, OverflowError) as e:
        raise Corrupt(f"{what}: the pickle is malformed ({type(e).__name__}: {e}).", code="CKPT0407") from None
    most = 16 * (end - start) + 1000
    try:
        refuse_deep_object(obj, what, most, lists.measured if lists else {})
    except Unsafe:  # too large, or without end since an instance holds itself
        obj = _copy_without_cycles(obj, what, most)
        refuse_deep_object(obj, what, most)
    return obj, end


def _run_opcodes(  # noqa: C901  # one branch for each opcode
    data: bytes,
    pos: int,
    known: StandIns,
    persistent: Any,
    what: str,
    inert: bool,
    lists: CommonLists | None,
) -> tuple[object, int]:
    """Execute the instructions of a pickle on a stack of plain data: (object, position after STOP).

    The Python errors that a malformed pickle causes (IndexError, ValueError, ...) are converted by `load`.

    Args:
        data, pos: the bytes, and the position of the pickle in them.
        known: the stand-ins, {(module, name): what replaces that class or function}.
        persistent: converts a persistent id to a value; None refuses them.
        what: names the pickle in messages.
        inert: keep calls of anything unknown as `Opaque` instead of refusing them.
        lists: long lists of earlier pickles; None for none.

    Raises:
        _CommonListChanged: the pickle changes a list of an earlier pickle; that list itself is not changed.
        Unsafe: it would call something, or no pickler writes such a pickle.
        Corrupt: it is too long, or damaged.
    """
    stack: list[Any] = []
    memo: Any = {} if lists is None else lists.new_memo()
    begun: dict[int, int] = {}  # where a list begins, by its identity
    frozen = lists.frozen if lists is not None else ()
    below: list[list[object]] = []  # the stacks under the marks: nothing above a mark takes from them
    push, pop = stack.append, stack.pop
    u16, u32, u64 = struct.Struct("<H").unpack_from, struct.Struct("<I").unpack_from, struct.Struct("<Q").unpack_from
    i32, f64 = struct.Struct("<i").unpack_from, struct.Struct(">d").unpack_from
    size = len(data)
    budget = _BUDGET + (size - pos) // 32
    storages: set[object] = set()
    named = popped = 0
    if size > MAX_BYTES:
        raise Corrupt(f"{what}: {size} bytes of pickle; at most {MAX_BYTES} are read.", code="CKPT0407")

    def take(n: int) -> bytes:
        """Read the next n bytes.

        Raises:
            IndexError: there are fewer.
        """
        nonlocal pos
        if n < 0 or pos + n > size:
            raise IndexError
        out = data[pos : pos + n]
        pos += n
        return out

    def since_mark() -> list[object]:
        """Pop everything above the last mark, and the mark."""
        nonlocal stack, push, pop
        out, stack = stack, below.pop()
        push, pop = stack.append, stack.pop
        return out

    def line() -> bytes:
        """Read up to the next line end, and return what is before it."""
        end = data.index(b"\n", pos)
        return take(end + 1 - pos)[:-1]

    def find(module: str, name: str) -> object:
        """Look up a global, the name of a class or function: its stand-in, or a `Global`.

        Raises:
            Unsafe: it is an attribute of something, or there are too many names.
        """
        nonlocal named
        named += 1
        if named > _MOST_GLOBALS:
            raise Unsafe(
                f"{what}: the pickle names more than {_MOST_GLOBALS:,} classes and functions, which no training state "
                "does.",
                code="CKPT0704",
            )
        if "." in name and not _is_class_attribute(module, name):
            raise Unsafe(
                f"{what}: the pickle names {module}.{name}, an attribute of something; refused.", code="CKPT0701"
            )
        found = known.get((module, name), known.get((ANY_MODULE, name)))
        return Global(module, name) if found is None else found

    members: dict[int, Opaque] = {}  # calls that are kept as those of an enum, which gets no state

    def call(f: object, args: object) -> Any:
        """Make what a REDUCE, the call of `f` with a tuple `args`, makes, if it is data.

        Raises:
            Unsafe: it is not.
            Corrupt: the arguments are not a tuple.
        """
        if not isinstance(args, tuple):
            raise Corrupt(f"{what}: arguments of {short(f)} are not a tuple.", code="CKPT0407")
        if isinstance(f, Global):
            if (made := PLAIN.get(f)) is not None:
                return made(*args)
            if (found := Opaque(f, args, call=True) if inert else _make_call_record(f, args)) is not None:
                if isinstance(found, Opaque) and found.args and not found.call:
                    members[id(found)] = found
                return found
        if isinstance(f, Opaque) and (f.cls, f.args) == (_PARTIAL, (_MESH,)) and isinstance(f.state, tuple):
            return Opaque(_MESH, (*args, *f.state[2:3]), call=True)  # the named arguments come last
        if isinstance(f, Global) or not callable(f):
            raise Unsafe(
                f"{what}: the pickle calls {f if isinstance(f, Global) else short(f)}{short(args)}. ckpttool never "
                "runs what a checkpoint asks for; ask its author for a copy without that object. If it is your own, "
                "load it with torch, replace the object by plain data and save it again.",
                code="CKPT0701",
            )
        return f(*args)

    def watched() -> Iterator[Iterator[None]]:
        """Yield portions of the instructions to be executed, and check after each what they have left on the stack.

        Raises:
            Unsafe: no pickler writes such a pickle.
        """
        done = before = memoized = 0
        while True:
            yield repeat(None, _LOOK)
            done += _LOOK
            unfinished = len(stack) + sum(map(len, below))
            left, kept = unfinished - before, len(memo) - memoized
            before, memoized = unfinished, len(memo)
            if done > budget:
                raise Unsafe(
                    f"{what}: a pickle of {size:,} bytes and {len(storages):,} storages has more than {done:,} "
                    "instructions, which no training state does. If it is genuine, load it with torch, and save large "
                    "tables of values apart from the tensors.",
                    code="CKPT0704",
                )
            if 10 * left > 9 * _LOOK or 10 * kept > 6 * _LOOK or len(below) > 10 * MAX_DEPTH or popped > _MOST_POPS:
                raise Unsafe(
                    f"{what}: no pickler writes such a pickle: {unfinished:,} unfinished objects after {done:,} "
                    "instructions.",
                    code="CKPT0704",
                )
            _refuse_deep_chain(stack[-1] if stack else None, what)

    frame_end = size
    for _ in chain.from_iterable(watched()):
        if pos >= frame_end:
            if pos > frame_end:  # where Python's own unpickler, which reads a frame at a time, loses its place
                raise Corrupt(
                    f"{what}: an instruction of the pickle crosses the end of its frame at byte {frame_end}.",
                    code="CKPT0407",
                )
            frame_end = size
        op = data[pos]
        pos += 1
        # ordered by how often torch's pickles use them
        if op == 0x94:  # MEMOIZE
            if frozen and memo.lists:
                raise _CommonListChanged
            memo[len(memo)] = stack[-1]
        elif op == 0x4B:  # BININT1
            push(data[pos])
            pos += 1
        elif op == 0x68:  # BINGET
            push(memo[data[pos]])
            pos += 1
        elif op == 0x6A:  # LONG_BINGET
            push(memo[u32(data, pos)[0]])
            pos += 4
        elif op == 0x71:  # BINPUT
            memo[data[pos]] = stack[-1]
            pos += 1
        elif op == 0x72:  # LONG_BINPUT
            memo[u32(data, pos)[0]] = stack[-1]
            pos += 4
        elif op == 0x58:  # BINUNICODE
            n = u32(data, pos)[0]
            pos += 4
            push(take(n).decode("utf-8", "surrogatepass"))
        elif op == 0x8C:  # SHORT_BINUNICODE
            n = data[pos]
            pos += 1
            push(take(n).decode("utf-8", "surrogatepass"))
        elif op == 0x28:  # MARK
            below.append(stack)
            stack = []
            push, pop = stack.append, stack.pop
            while (
                run := _SCALARS.match(data, pos)
            ) is not None and run.end() - pos > _RUN:  # it has nothing that could act
                stack.extend(pickle.loads(b"".join((b"\x80\x02(", run[0], b"t."))))
                pos = run.end()
        elif op == 0x74:  # TUPLE
            items = since_mark()
            push(tuple(items))
        elif op == 0x85:  # TUPLE1
            stack[-1] = (stack[-1],)
        elif op == 0x86:  # TUPLE2
            b = pop()
            stack[-1] = (stack[-1], b)
        elif op == 0x87:  # TUPLE3
            c, b = pop(), pop()
            stack[-1] = (stack[-1], b, c)
        elif op == 0x29:  # EMPTY_TUPLE
            push(())
        elif op == 0x7D:  # EMPTY_DICT
            push({})
        elif op == 0x5D:  # EMPTY_LIST
            found = lists.find(data, pos - 1, memo) if frozen and lists is not None and frame_end == size else None
            if found is not None:
                pos = found[1]
            push([] if found is None else found[0])
            if lists is not None and found is None:
                begun[id(stack[-1])] = pos - 1
        elif op == 0x52:  # REDUCE
            args = pop()
            stack[-1] = call(stack[-1], args)
        elif op in (0x81, 0x92):  # NEWOBJ, NEWOBJ_EX
            kwargs = pop() if op == 0x92 else {}
            args, cls = pop(), pop()
            if kwargs:
                raise Unsafe(f"{what}: the pickle builds a {short(cls)} with keyword arguments.", code="CKPT0701")
            if isinstance(cls, Global) and cls not in PLAIN:
                if is_dangerous(cls):
                    raise Unsafe(
                        f"{what}: the pickle holds an instance of {cls}, which is not training state.", code="CKPT0701"
                    )
                if not isinstance(args, tuple):
                    raise Corrupt(f"{what}: arguments of {cls} are not a tuple.", code="CKPT0407")
                push(Opaque(cls, args))
            elif isinstance(cls, type):
                push(call(cls, args))
            else:
                raise Corrupt(
                    f"{what}: the pickle makes an instance of what is no class, which no pickler writes; the file is "
                    "damaged.",
                    code="CKPT0407",
                )
        elif op == 0x62:  # BUILD
            state, obj = pop(), stack[-1]
            if frozen and id(obj) in frozen:
                raise _CommonListChanged
            if isinstance(obj, Opaque):
                if obj.state is not None:
                    raise Unsafe(
                        f"{what}: the pickle sets the state of a {obj.cls} twice; the first one would be lost.",
                        code="CKPT0703",
                    )
                obj.call |= id(obj) in members
                if obj.cls == _PARTIAL and isinstance(state, tuple) and _holds_dangerous_class(state[:1]):
                    raise Unsafe(f"{what}: the pickle holds a functools.partial of {short(state[0])}.", code="CKPT0701")
                obj.state = state
            elif isinstance(obj, StandIn) and hasattr(obj, "__setstate__"):
                obj.__setstate__(state)
            elif not isinstance(obj, Ordered):  # which may have _metadata: versions of modules, which are not needed
                raise Unsafe(f"{what}: the pickle sets the state of {short(obj)}.", code="CKPT0701")
        elif op == 0x75:  # SETITEMS
            items = since_mark()
            if frozen and id(stack[-1]) in frozen:
                raise _CommonListChanged
            if isinstance(stack[-1], Opaque):
                stack[-1].call |= id(stack[-1]) in members
                for k, v in zip(items[::2], items[1::2], strict=True):
                    stack[-1].set_item(k, v, what)
            else:
                d = stack[-1]
                if not isinstance(d, dict):
                    raise TypeError("SETITEMS on a " + type(d).__name__)
                if len(items) > _FEW and _PLAIN_TYPES.issuperset(map(type, items[::2])):
                    new = dict(zip(items[::2], items[1::2], strict=True))
                    if 2 * len(new) == len(items) and d.keys().isdisjoint(new):
                        d.update(new)
                        continue
                for i in range(0, len(items), 2):
                    _set_new_key(d, items[i], items[i + 1], what)
        elif op == 0x73:  # SETITEM
            v, k = pop(), pop()
            if frozen and id(stack[-1]) in frozen:
                raise _CommonListChanged
            if isinstance(stack[-1], Opaque):
                stack[-1].call |= id(stack[-1]) in members
                stack[-1].set_item(k, v, what)
            elif not isinstance(stack[-1], dict):
                raise TypeError("SETITEM on a " + type(stack[-1]).__name__)
            else:
                _set_new_key(stack[-1], k, v, what)
        elif op in (0x65, 0x61):  # APPENDS, APPEND
            items = since_mark() if op == 0x65 else [pop()]
            if frozen and id(stack[-1]) in frozen:
                raise _CommonListChanged
            if isinstance(stack[-1], Opaque):
                stack[-1].call |= id(stack[-1]) in members
                stack[-1].list_items.extend(items)
            elif type(stack[-1]) is list:
                stack[-1].extend(items)
                if lists is not None and data[pos] != 0x28:  # another APPENDS may follow a MARK
                    lists.record(data, begun.get(id(stack[-1]), pos), pos, memo, stack[-1])
            else:
                raise TypeError("APPEND to a " + type(stack[-1]).__name__)
        elif op == 0x90:  # ADDITEMS
            items = since_mark()
            if type(stack[-1]) is not set:
                raise TypeError("ADDITEMS to a " + type(stack[-1]).__name__)
            stack[-1].update(map(_check_key, items))
        elif op == 0x93:  # STACK_GLOBAL
            name, module = pop(), pop()
            if not isinstance(name, str) or not isinstance(module, str):
                raise Unsafe(f"{what}: a global whose name is not a string.", code="CKPT0701")
            push(find(module, name))
        elif op == 0x63:  # GLOBAL
            module, name = line().decode(), line().decode()
            push(find(module, name))
        elif op in (0x51, 0x50):  # BINPERSID, PERSID
            pid = pop() if op == 0x51 else line().decode()
            if persistent is None:
                raise Unsafe(f"{what}: the pickle refers to an object outside of it.", code="CKPT0701")
            push(persistent(pid))
            key = pid[2] if isinstance(pid, tuple) and len(pid) > 2 else None
            if isinstance(key, str) and key not in storages:
                storages.add(key)
                budget += 64 + getattr(stack[-1], "length", 0) // 16
        elif op == 0x88:
            push(True)
        elif op == 0x89:
            push(False)
        elif op == 0x4E:
            push(None)
        elif op == 0x4D:  # BININT2
            push(u16(data, pos)[0])
            pos += 2
        elif op == 0x4A:  # BININT
            push(i32(data, pos)[0])
            pos += 4
        elif op == 0x47:  # BINFLOAT
            push(f64(data, pos)[0])
            pos += 8
        elif op == 0x8A:  # LONG1
            n = data[pos]
            pos += 1
            if n > 64:
                raise Unsafe(f"{what}: an integer of {n} bytes.", code="CKPT0704")
            push(int.from_bytes(take(n), "little", signed=True))
        elif op in (0x43, 0x55):  # SHORT_BINBYTES, SHORT_BINSTRING
            n = data[pos]
            pos += 1
            raw = take(n)
            push(raw if op == 0x43 else raw.decode("latin-1"))
        elif op in (0x42, 0x54):  # BINBYTES, BINSTRING
            n = u32(data, pos)[0]
            pos += 4
            raw = take(n)
            push(raw if op == 0x42 else raw.decode("latin-1"))
        elif op in (0x8D, 0x8E, 0x96):  # BINUNICODE8, BINBYTES8, BYTEARRAY8
            n = u64(data, pos)[0]
            pos += 8
            raw = take(n)
            push(raw.decode("utf-8", "surrogatepass") if op == 0x8D else raw if op == 0x8E else bytearray(raw))
        elif op == 0x95:  # FRAME
            pos += 8
            frame_end = pos + u64(data, pos - 8)[0]
            if frame_end > size:
                raise IndexError
        elif op == 0x80:  # PROTO
            if data[pos] > 5:
                raise Corrupt(f"{what}: pickle protocol {data[pos]}.", code="CKPT0407")
            pos += 1
        elif op == 0x8F:
            push(set())
        elif op == 0x91:
            items = since_mark()
            push(frozenset(map(_check_key, items)))
        elif op == 0x30:  # POP
            popped += 1
            pop() if stack else since_mark()
        elif op == 0x31:  # POP_MARK
            popped += 1
            since_mark()
        elif op == 0x6C:
            items = since_mark()
            push(items)
        elif op == 0x64:
            items = since_mark()
            push(_fill_dict({}, zip(items[::2], items[1::2], strict=True)))
        elif op in (0x49, 0x4C):  # INT, LONG as text (protocol 0)
            text = line().rstrip(b"L")
            if len(text) > 150:
                raise Unsafe(f"{what}: an integer of {len(text)} digits.", code="CKPT0704")
            push({b"00": False, b"01": True}.get(text) if op == 0x49 and text in (b"00", b"01") else int(text))
        elif op == 0x46:
            push(float(line()))
        elif op == 0x56:
            push(line().decode("raw-unicode-escape"))
        elif op in (0x70, 0x67):  # PUT, GET as text
            n = int(line())
            if op == 0x70:
                memo[n] = stack[-1]
            else:
                push(memo[n])
        elif op == 0x2E:  # STOP
            if len(stack) != 1 or below:
                raise Corrupt(f"{what}: the pickle leaves {len(stack)} objects instead of one.", code="CKPT0407")
            return stack[0], pos
        else:
            raise Unsafe(
                f"{what}: pickle instruction 0x{op:02x} at byte {pos - 1}, which no checkpoint needs.", code="CKPT0701"
            )
    raise AssertionError  # there is always another one


def short(x: object) -> str:
    """Return a short repr of any object from a pickle, for messages: at most 80 characters, and bounded in work."""
    try:
        refuse_deep_object(x, "", 200)
        text = repr(x)
    except (Unsafe, RecursionError):
        return "(...)"
    return text if len(text) < 80 else text[:77] + "..."


def list_children(x: object) -> Any:
    """Return the objects directly inside a container, as a list or another collection: keys and values of a dict, the
    parts of an `Opaque`, items of a list, tuple or set; () for anything else."""
    if isinstance(x, dict):
        return [*x.keys(), *x.values()]
    if isinstance(x, Opaque):
        return x.parts()
    return x if isinstance(x, (list, tuple, set, frozenset)) and not isinstance(x, Global) else ()


def map_children(x: Any, f: Callable[[object], object]) -> object:
    """Return a copy of a dict, list, tuple or `Opaque` with `f` applied to every object directly inside (to the values
    of a dict, not to its keys); anything else, sets included, is returned unchanged."""
    if isinstance(x, dict):
        return type(x)((k, f(v)) for k, v in x.items())
    if type(x) in (list, tuple):
        return type(x)(map(f, x))
    return x.mapped(f) if isinstance(x, Opaque) else x


def _refuse_deep_chain(x: Any, what: str) -> None:
    """Refuse an object whose last item, the last item of that, and so on, are nested deeper than in any training state;
    a cheap check while a pickle is being read.

    Args:
        x: the object.
        what: names the pickle in messages.

    Raises:
        Unsafe: they are.
    """
    for _ in range(10 * MAX_DEPTH):
        if type(x) not in (list, tuple) or not x:
            return
        x = x[-1]
    raise _TooDeep(f"{what}: nested deeper than {MAX_DEPTH}; no training state is.")


def refuse_deep_object(
    obj: object, what: str, most: int, measured: Mapping[int, tuple[int, int]] = MappingProxyType({})
) -> tuple[int, int]:
    """Refuse an object that is nested too deep or has too many nodes; return (nesting depth of its containers, number
    of nodes).

    Shared parts are walked once, but counted each time they occur. There is no recursion.

    Args:
        obj: the object.
        what: names the object in messages.
        most: the largest number of nodes.
        measured: {id of an object: what this function returned for it}; the objects must stay alive.

    Raises:
        Unsafe: it is deeper than 100, or has more than `most` nodes. So any later walk is bounded.
        Unsupported: it contains one of our stand-ins, as the pickle has a function or class that it never calls.
    """
    done: dict[int, tuple[int, int] | None] = {}  # (depth, nodes) of the containers met; None while inside of one
    todo: list[tuple[object, list[object] | None, int, int]] = [(obj, None, 0, 0)]
    depth = nodes = met = 0
    while todo:
        x, parts, depth, nodes = todo.pop()
        if parts is None and (id(x) in done or id(x) in measured):
            depth, nodes = done.setdefault(id(x), measured.get(id(x))) or (MAX_DEPTH + 1, 0)  # inside of itself
        elif parts is None:
            depth, nodes, parts = _measure_container(x, what)
            met += nodes
            done[id(x)] = None if parts else (depth, nodes)
            if parts:
                todo.append((x, parts, depth, nodes))
                todo.extend([(c, None, 0, 0) for c in parts])
        else:
            for c in parts:
                below, more = done[id(c)] or (0, 0)
                depth, nodes = max(depth, below + 1), nodes + more
            done[id(x)] = depth, nodes
        if depth > MAX_DEPTH:
            raise Unsafe(f"{what}: nested deeper than {MAX_DEPTH}; no training state is.", code="CKPT0704")
        if nodes > most or met > most:
            raise Unsafe(f"{what}: expands to more than {most:,} objects; no training state does.", code="CKPT0704")
    return depth, nodes


def _measure_container(x: object, what: str) -> tuple[int, int, list[Any]]:
    """Measure one container: (depth of its plain items: 1 if containers of nothing but plain data are among them, else
    0; number of nodes, those containers included; its other containers, which remain to be measured).

    Args:
        x: the container.
        what: names the object around it in messages.

    Raises:
        Unsupported: an item is one of our stand-ins.
    """
    inside = list_children(x)
    depth, nodes = 0, 1 + len(inside)
    parts: list[Any] = []
    if len(inside) > _FEW and _PLAIN_TYPES.issuperset(map(type, inside)):
        return depth, nodes, parts
    for c in inside:
        kind = type(c)
        if kind in _PLAIN_TYPES:
            continue
        if kind is Global or (kind is tuple and _PLAIN_TYPES.issuperset(map(type, c))):
            depth, nodes = 1, nodes + 1 + (len(c) if kind is tuple else 0)
        elif isinstance(c, (dict, list, tuple, set, frozenset, Opaque)):
            parts.append(c)
        elif isinstance(c, (FunctionType, type)):
            raise Unsupported(
                f"{what}: holds a function or a class that rebuilds objects ({c.__name__}) as a value. That is not "
                "state; save the checkpoint without it.",
                code="CKPT0307",
            )
    return depth, nodes, parts


def _copy_without_cycles(obj: object, what: str, most: int) -> Any:
    """Return a copy of an object in which no instance contains itself.

    Inside each outermost instance that contains itself, an instance that occurs again becomes a `BackReference` with
    its label. An outermost instance that is still nested deeper than 100 becomes a `Refused`.

    Args:
        obj: the object.
        what: names the object in messages.
        most: the largest number of nodes of all copies together.

    Raises:
        Unsafe: a list or dict is deeper than 100 or contains itself, or the copies have more than `most` nodes.
    """
    nodes = 0

    def copy(x: Any, depth: int, scope: _Scope | None) -> Any:
        """Copy a value.

        Args:
            depth: how many containers are around it.
            scope: that of the outermost instance around it; None outside of any.

        Raises:
            Unsafe: it is too deep, or too large.
        """
        nonlocal nodes
        inside = list_children(x)
        nodes += 1 + len(inside)
        if depth > MAX_DEPTH:
            raise _TooDeep(f"{what}: nested deeper than {MAX_DEPTH}; no training state is.")
        if nodes > most:
            raise Unsafe(f"{what}: expands to more than {most:,} objects; no training state does.", code="CKPT0704")
        if isinstance(x, Opaque) and scope is None:
            scope = _Scope({}, set())
            try:
                out = instance(x, depth, scope)
            except _TooDeep:
                return Refused(f"{what}: an instance of {x.cls} is nested deeper than {MAX_DEPTH}.")
            return out if scope.tangled else x
        if isinstance(x, Opaque) and scope is not None:
            return instance(x, depth, scope)
        if isinstance(x, dict):
            return type(x)((k, copy(v, depth + 1, scope)) for k, v in x.items())
        if type(x) in (list, tuple):
            return type(x)(copy(v, depth + 1, scope) for v in x)
        return x

    def instance(x: Opaque, depth: int, scope: _Scope) -> Opaque | BackReference:
        """Copy an instance inside a scope, or return a reference to the copy that there is.

        Raises:
            Unsafe: it is too deep, or too large.
        """
        if (known := scope.met.get(id(x))) is not None:
            if known.label is None:
                known.label, scope.labels = scope.labels, scope.labels + 1
            scope.tangled |= id(x) in scope.open
            return BackReference(known.label)
        scope.open.add(id(x))
        out = x.mapped(lambda part: copy(part, depth + 1, scope), lambda made: scope.met.__setitem__(id(x), made))
        scope.open.discard(id(x))
        return out

    return copy(obj, 0, None)


@dataclass(slots=True)
class _Scope:
    """An outermost instance that is being copied: copies by identity, the instances that the walk is inside of, how
    many have labels, and whether one holds itself."""

    met: dict[int, Opaque]
    open: set[int]
    labels: int = 0
    tangled: bool = False


def make_enum_stand_ins(*enums: tuple[object, Mapping[str, object]]) -> dict[tuple[str, str], Callable[..., object]]:
    """Return stand-ins for getattr, as a call of which Python 3.11.0 to 3.11.3 (Debian 12 has 3.11.2) pickles members
    of an enum: {("builtins", "getattr"): stand-in, ("__builtin__", "getattr"): the same}.

    For a class that is not among `enums`, the stand-in returns what `resolve_attribute` returns, or raises Unsafe.

    Source: Enum.__reduce_ex__ in Lib/enum.py of those versions.

    Args:
        enums: (stand-in of an enum class, {name: member}) each.
    """

    def member(cls: object, name: object) -> Any:
        """Return the member of a known enum, or what any other getattr refers to.

        Raises:
            Unsafe: it refers to nothing that a checkpoint needs.
        """
        for known, members in enums:
            if cls is known and isinstance(name, str) and name in members:
                return members[name]
        if (found := resolve_attribute(cls, name)) is not None:
            return found
        raise Unsafe(
            f"the pickle calls getattr({short(cls)}, {short(name)}), which a checkpoint does not need.", code="CKPT0701"
        )

    return {("builtins", "getattr"): member, ("__builtin__", "getattr"): member}


def _make_opaque_class(name: Global) -> type[Opaque]:
    """Return a subclass of `Opaque` that replaces an unknown class in the C unpickler; its instances keep arguments and
    state.

    Args:
        name: the unknown class.
    """

    class Instance(Opaque):
        __slots__ = ()

        def __new__(cls, *args: object) -> Instance:
            out = object.__new__(cls)
            Opaque.__init__(out, name, args)
            return out

        def __init__(self, *args: Any) -> None:
            """Do nothing; NEWOBJ does not come here, so that __new__ has done everything."""

        def __setstate__(self, state: object) -> None:
            self.state = state

    return Instance


def load_large(data: Any, stand_ins: StandIns, persistent: Callable[[object], object] | None = None) -> object:
    """Read a pickle with the C unpickler of the standard library and return the object; only in a child process with
    limited memory and time.

    Args:
        data: the pickle, a file opened for reading.
        stand_ins: {(module, name): what replaces that class or function}.
        persistent: converts a persistent id to a value; None refuses them.

    Raises:
        Unsafe: the pickle names a function without a stand-in, or a class whose objects may act, or has a persistent id
            that is refused.
        Exception: whatever the unpickler raises on a damaged pickle.
    """

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            """Return the stand-in for a class or function, or the one for instances of an unknown class; nothing is
            ever imported.

            Raises:
                Unsafe: there is none.
            """
            found = stand_ins.get((module, name), stand_ins.get((ANY_MODULE, name)))
            if found is None and _is_unknown_class(cls := Global(module, name)) and not is_dangerous(cls):
                return _make_opaque_class(cls)
            if found is None:
                raise Unsafe(f"the pickle names {module}.{name}, which a checkpoint does not need.", code="CKPT0701")
            return found

        def persistent_load(self, pid: object) -> object:
            """Return what stands for a persistent id.

            Raises:
                Unsafe: the pickle may have none.
            """
            if persistent is not None:
                return persistent(pid)
            raise Unsafe("the pickle refers to an object outside of it.", code="CKPT0701")

    return Unpickler(data).load()
