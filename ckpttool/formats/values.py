"""values.json: what a checkpoint holds besides tensors, without loss, as JSON that a person can read.

    {
    "optim.param_groups.0.betas": {"path": ["optim", "param_groups", 0, "betas"], "data": {"$tuple": [0.9, 0.95]}},
    "trainer.step": {"path": ["trainer", "step"], "data": 1200}
    }

One line a value, sorted by name; UTF-8. None, bool, int, finite float, str, list and dict with plain keys look as JSON
has them, so `jq '."trainer.step".data'` works. All else is an object of one key, which begins with "$":

    {"$tuple": [...]}  {"$set": [...]}  {"$frozenset": [...]}        members of sets sorted by their text
    {"$dict": [[key, value], ...]}      a dict with a key that is no str, begins with "$" or is half of a character
    {"$ordered": [[key, value], ...]}   a collections.OrderedDict inside a value
    {"$bytes": base64}  {"$bytearray": base64}
    {"$float": "inf" | "-inf" | "nan:7ff8000000000000"}              a NaN by its bits, big-endian
    {"$complex": [real, imaginary]}
    {"$int": hexadecimal}               of more than 2048 bits
    {"$str": hexadecimal}               UTF-8 of a text with halves of characters (lone surrogates), as it stands
    {"$global": [module, name]}         a name in a module: {"$global": ["torch", "float16"]} is a dtype
    {"$object": {"class": [module, name], "call", "label", "args", "state", "list", "dict"}}  an instance that is never
        built
    {"$again": label}                   the instance with that label, of those around this and of those before it inside
                                        the outermost one
    {"$tensor": {"dtype", "shape", "data": base64}}                  a small tensor inside a value, row-major

In "$object" what is not there is left out: "call" (the class was called, instead of made by __new__), "args" of that,
"state" that was set, items that were appended ("list") and set ("dict", pairs). The nodes of a config of OmegaConf
point to their parents: where an instance holds itself, however deep inside, all that is met twice in it has a "label",
from 0 in the order in which they are met again. Files of older versions have no "$ordered", no "$again" and no label.

Equal values have equal bytes: dicts keep their order, sets have none. Only those bytes are read; any other spelling of
the same values is refused. What two places of another value share is written twice.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterable, Mapping
from math import isfinite, prod
from typing import Any

from .. import bounded_json
from ..errors import Corrupt, Unsupported
from ..index.checkpoint import ITEMSIZE, Path, Value, joined
from .pickles import MAX_DEPTH, BackReference, Global, Opaque, Ordered
from .stored_tensors import Inline

__all__ = ["decode", "encode", "encode_value", "from_json_tree", "to_json_tree"]

_PLAIN_INT_BITS = 2048
_DEEPEST = MAX_DEPTH + 2  # the file is a dict of dicts itself


# --------------------------------------------------------------------------------------------------------- writing


def encode(values: Mapping[str, Value]) -> bytes:
    """Return the bytes of values.json, the file of everything but tensors.

    Args:
        values: {name: Value}.

    Raises:
        Unsupported: a value contains itself, is nested too deep, or is of a type that no checkpoint has.
    """
    rows: dict[Any, Any] = {}
    for name in sorted(values):
        path, data = values[name]
        if name != joined(path):
            raise AssertionError(f"{name!a} has the path {path!a}")
        rows[name] = {"path": _path_to_json(path), "data": data}
    return (_Writer().pairs(rows, "\n", ",\n") + "\n").encode()


def encode_value(value: Value) -> bytes:
    """Return path and data of one value as bytes of JSON, as its line in values.json has them.

    Raises:
        Unsupported: it contains itself, is nested too deep, or is of a type that no checkpoint has.
    """
    writer = _Writer()
    writer.name = joined(value.path)
    return writer.pairs({"path": _path_to_json(value.path), "data": value.data}).encode()


def _path_to_json(path: Path) -> list[str | int]:
    """Return a path as a list for JSON.

    The number of a parameter becomes text, as in DCP; the param groups list it as a number (index/trees.py).
    """
    return [p if type(p) is int else str(p) for p in path]


class _Writer:
    """Values to text; `name` is the one that a message speaks of."""

    def __init__(self) -> None:
        self.name = ""
        self.above: set[int] = set()  # containers that are being written, by identity
        self.labels: set[int] | None = None  # of the outermost instance that is being written

    def pairs(self, x: dict[Any, Any], edge: str = "", comma: str = ", ") -> str:
        """Return the JSON of a dict.

        Args:
            x: the dict.
            edge: text before the first and after the last item; if it is not "", the keys are names of values, which
                messages then give.
            comma: text between items.

        Raises:
            Unsupported: something inside contains itself, is nested too deep, or is of a type that no checkpoint has.
        """
        plain = all(type(k) is str and k[:1] != "$" and _is_valid_unicode(k) for k in x)
        rows = []
        for k, v in x.items():
            if edge:
                self.name = k
            rows.append(f"{self.text(k)}: {self.text(v)}" if plain else f"[{self.text(k)}, {self.text(v)}]")
        inner = edge + comma.join(rows) + edge if rows else ""
        return f"{{{inner}}}" if plain else f'{{"$dict": [{inner}]}}'

    def text(self, x: Any) -> str:
        """Return the JSON of a value of any type that a checkpoint can have.

        Raises:
            Unsupported: the value contains itself, is nested too deep, or is of a type that no checkpoint has.
        """
        kind = type(x)
        leaf = _LEAVES.get(kind)
        if leaf is not None:
            return leaf(x)
        if kind is complex:
            return f'{{"$complex": {self.items((x.real, x.imag))}}}'
        if id(x) in self.above or len(self.above) >= _DEEPEST:
            why = "holds itself" if id(x) in self.above else f"is nested deeper than {MAX_DEPTH}"
            raise Unsupported(
                f'the value "{_format_name(self.name)}" {why}; values.json cannot keep it.', code="CKPT0316"
            )
        self.above.add(id(x))
        try:
            return self.container(x, kind)
        finally:
            self.above.discard(id(x))

    def container(self, x: Any, kind: type) -> str:
        """Return the JSON of a value that contains others; `kind` is the value's type.

        Raises:
            Unsupported: it is of a type that no checkpoint has, or refers to an instance that it does not hold.
        """
        if kind is dict:
            return self.pairs(x)
        if kind is Ordered:
            return f'{{"$ordered": {self.items(map(list, x.items()))}}}'
        if kind is BackReference:
            if self.labels is None or x.label not in self.labels:
                raise Unsupported(
                    f'the value "{_format_name(self.name)}" refers to an instance that it does not hold.',
                    code="CKPT0316",
                )
            return f'{{"$again": {x.label}}}'
        if kind is list:
            return self.items(x)
        if kind is tuple:
            return f'{{"$tuple": {self.items(x)}}}'
        if kind is set or kind is frozenset:
            return f'{{"${kind.__name__}": [{", ".join(sorted(map(self.text, x)))}]}}'
        if kind is Opaque and type(x.cls) is Global:
            outermost = self.labels is None
            text = f'{{"$object": {{{self.instance(x)}}}}}'
            self.labels = None if outermost else self.labels
            return text
        raise Unsupported(
            f'the value "{_format_name(self.name)}" holds a {kind.__module__}.{kind.__qualname__}, which values.json '
            "cannot "
            "keep.",
            code="CKPT0316",
        )

    def items(self, x: Iterable[object]) -> str:
        """Return the JSON of some values as a list."""
        return f"[{', '.join(map(self.text, x))}]"

    def instance(self, x: Opaque) -> str:
        """Return the JSON of an instance without its outer braces: '"class": [...], "args": [...]', for "$object".

        Raises:
            Unsupported: two instances have one label.
        """
        out = [f'"class": {self.items(x.cls)}']
        if x.call:
            out.append('"call": true')
        if x.label is not None:
            out.append(f'"label": {x.label}')
        labels = self.labels = set() if self.labels is None else self.labels
        args = self.items(x.args)
        if x.label in labels:
            raise Unsupported(
                f'the value "{_format_name(self.name)}" holds two instances with the label {x.label}.', code="CKPT0316"
            )
        labels |= set() if x.label is None else {x.label}
        # in the order of a pickle, which says what comes before what
        items, pairs, state = self.items(x.list_items), ", ".join(map(self.items, x.dict_items)), self.text(x.state)
        if x.args:
            out.append(f'"args": {args}')
        if x.state is not None:
            out.append(f'"state": {state}')
        if x.list_items:
            out.append(f'"list": {items}')
        if x.dict_items:
            out.append(f'"dict": [{pairs}]')
        return ", ".join(out)


def _is_valid_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogates, halves of characters."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _format_name(name: object) -> str:
    """Return the name of a value for a message, in ASCII and at most 200 characters long."""
    text = ascii(name)[1:-1]
    return text if len(text) < 200 else text[:197] + "..."


def _write_str(x: str) -> str:
    """Return the JSON of a text: a string, or {"$str": its bytes in hex} if it has lone surrogates."""
    if _is_valid_unicode(x):
        return json.encoder.encode_basestring(x)  # `json.dumps` makes an encoder for each text
    return f'{{"$str": "{x.encode("utf-8", "surrogatepass").hex()}"}}'


def _write_int(x: int) -> str:
    """Return the JSON of an integer: a number, or {"$int": hexadecimal digits} if it has many bits."""
    return str(x) if x.bit_length() <= _PLAIN_INT_BITS else f'{{"$int": "{x:x}"}}'


def _write_float(x: float) -> str:
    """Return the JSON of a float: a number, or {"$float": "inf", "-inf" or "nan:" and its bits in hex}."""
    if isfinite(x):
        return repr(x)
    return f'{{"$float": "{x if x == x else "nan:" + struct.pack(">d", x).hex()}"}}'


def _write_tensor(x: Inline) -> str:
    """Return the JSON of a small tensor: {"$tensor": {"dtype", "shape", "data" (base64)}}."""
    row = {"dtype": x.dtype, "shape": list(x.shape), "data": base64.b64encode(x.data).decode()}
    return f'{{"$tensor": {json.dumps(row)}}}'


_LEAVES: dict[type, Callable[[Any], str]] = {
    type(None): lambda x: "null",
    bool: lambda x: "true" if x else "false",
    int: _write_int,
    float: _write_float,
    str: _write_str,
    bytes: lambda x: f'{{"$bytes": "{base64.b64encode(x).decode()}"}}',
    bytearray: lambda x: f'{{"$bytearray": "{base64.b64encode(x).decode()}"}}',
    Global: lambda x: f'{{"$global": [{_write_str(x.module)}, {_write_str(x.name)}]}}',
    Inline: _write_tensor,
}


# --------------------------------------------------------------------------------------------------------- reading


def to_json_tree(held: Mapping[str, Value]) -> dict[str, object]:
    """Return the content of values.json for values, {name: Value}, as parsed JSON, to be embedded in another file.

    Raises:
        Unsupported: a value contains itself, is nested too deep, or is of a type that no checkpoint has.
    """
    tree: dict[str, Any] = json.loads(encode(held))
    return tree


def from_json_tree(tree: object) -> dict[str, Value]:
    """Return the values, {name: Value}, of parsed JSON as `to_json_tree` returns it.

    Raises:
        ValueError, TypeError: it is something else.
    """
    found = _read_value(tree, 0)
    if type(found) is not dict:
        raise ValueError("it is not an object of values")
    return {name: _read_row(name, row) for name, row in found.items()}


def decode(data: bytes, what: str) -> dict[str, Value]:
    """Return the values, {name: Value}, in a values.json, which is not trusted.

    Args:
        data: the bytes of the file.
        what: names the file in messages.

    Raises:
        Corrupt: it is damaged, or has other bytes than `encode` writes.
        Unsafe: a key occurs twice, or it is nested too deep.
    """
    tree = bounded_json.parse(data, what)
    try:
        out = from_json_tree(tree)
        same = encode(out) == data
    except (ValueError, TypeError, Unsupported) as e:
        raise Corrupt(f"{what}: damaged, or not written by ckpttool ({e}).", code="CKPT0406") from None
    if not same:
        raise Corrupt(
            f"{what}: not spelled as ckpttool spells these values; damaged, or written by something else.",
            code="CKPT0406",
        )
    return out


def _read_row(name: object, row: object) -> Value:
    """Return the value that an entry of values.json represents.

    Args:
        name: the key of the entry, the name of the value.
        row: the entry, of parsed JSON, with the path and the data of the value.

    Raises:
        ValueError: the entry is something else, or its path is not that of the name.
    """
    if type(name) is not str or type(row) is not dict or list(row) != ["path", "data"] or type(row["path"]) is not list:
        raise ValueError(f"the entry {_format_name(name)!r} is not a path and data")
    path = tuple(row["path"])
    if not path or not all(type(k) is str or (type(k) is int and k >= 0) for k in path) or joined(path) != name:
        raise ValueError(f"the entry {_format_name(name)!r} has another path")
    return Value(path, row["data"])


def _read_value(x: object, depth: int) -> object:
    """Return the value that parsed JSON represents.

    Args:
        x: the parsed JSON.
        depth: how many lists and dicts of JSON contain it.

    Raises:
        ValueError, TypeError: it is nested too deep, has an unknown "$" key, or represents no value.
    """
    if not isinstance(x, (list, dict)):
        return x
    if depth > _DEEPEST + 2:  # a complex number, which `encode` takes for a leaf, is two levels more here
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(x, list):
        return [_read_value(v, depth + 1) for v in x]
    tag = next((k for k in x if k[:1] == "$"), None)
    if tag is None:
        return {k: _read_value(v, depth + 1) for k, v in x.items()}
    if len(x) != 1 or tag not in _TAGS:
        raise ValueError(f"an object with the unknown key {_format_name(tag)!r}")
    return _TAGS[tag](x[tag], depth + 1)


def _read_list(x: object, depth: int) -> list[object]:
    """Return the list of values that a list of parsed JSON represents.

    Args:
        x: the list.
        depth: how many lists and dicts of JSON contain its items.

    Raises:
        ValueError: it is not a list.
    """
    if type(x) is not list:
        raise ValueError("something other than a list")
    return [_read_value(v, depth) for v in x]


def _read_pair(x: object, depth: int) -> tuple[object, object]:
    """Return the (key, value) that a list of two represents.

    Args:
        x: the list, of parsed JSON.
        depth: how many lists and dicts of JSON contain its items.

    Raises:
        ValueError: it is something else.
    """
    key, value = _read_list(x, depth)
    return key, value


def _read_dict(x: object, depth: int) -> dict[object, object]:
    """Return the dict that a list of [key, value] represents.

    Args:
        x: the list, of parsed JSON.
        depth: how many lists and dicts of JSON contain its items.

    Raises:
        ValueError: it is something else.
        TypeError: a key cannot be hashed.
    """
    return dict(_read_pairs(x, depth))


def _read_pairs(x: object, depth: int) -> list[tuple[object, object]]:
    """Return the items of a dict, [(key, value)], that a list of [key, value] represents.

    Args:
        x: the list, of parsed JSON.
        depth: how many lists and dicts of JSON contain its items.

    Raises:
        ValueError: it is something else.
    """
    if type(x) is not list:
        raise ValueError("something other than pairs")
    return [_read_pair(row, depth) for row in x]


def _check_str(x: object) -> str:
    """Return `x` if it is a text.

    Raises:
        ValueError: it is something else.
    """
    if type(x) is not str:
        raise ValueError("something other than text")
    return x


def _read_bytes(x: object) -> bytes:
    """Decode bytes from base64.

    Raises:
        ValueError: it is something else.
    """
    return base64.b64decode(_check_str(x), validate=True)


def _read_float(x: Any) -> float:
    """Return the float that a string represents for which JSON has no number: "inf", "-inf", or "nan:" with its bits in
    hexadecimal.

    Raises:
        ValueError: it is something else.
    """
    if _check_str(x).startswith("nan:"):
        found: float = struct.unpack(">d", bytes.fromhex(x[4:]).rjust(8, b"\0")[:8])[0]
        return found
    return float(x)


def _read_complex(x: object, depth: int) -> complex:
    """Return the complex number that a list of real and imaginary part represents.

    Args:
        x: the list, of parsed JSON.
        depth: how many lists and dicts of JSON contain its items.

    Raises:
        ValueError: it is not two floats.
    """
    real, imaginary = _read_list(x, depth)
    if type(real) is not float or type(imaginary) is not float:
        raise ValueError("a complex number that is not made of floats")
    return complex(real, imaginary)


def _read_global(x: object, depth: int) -> Global:
    """Return the `Global` that a list of module and name represents.

    Args:
        x: the list, of parsed JSON.
        depth: how many lists and dicts of JSON contain its items.

    Raises:
        ValueError: it is something else.
    """
    module, name = map(_check_str, _read_list(x, depth))
    return Global(module, name)


_PARTS = {"class", "call", "label", "args", "state", "list", "dict"}


def _read_object(x: object, depth: int) -> Opaque:
    """Return the instance that the content of an "$object" represents.

    Args:
        x: the content, {"class", "args", ...}, of parsed JSON.
        depth: how many lists and dicts of JSON contain the values in it.

    Raises:
        ValueError: it has no class, or keys that objects do not have.
    """
    if type(x) is not dict or not x.keys() <= _PARTS or "class" not in x:
        raise ValueError("an object without a class, or with more than objects have")
    out = Opaque(_read_global(x["class"], depth), tuple(_read_list(x.get("args", []), depth)), "call" in x)
    out.label = _check_label(x["label"]) if "label" in x else None
    out.state = _read_value(x.get("state"), depth)
    out.list_items = _read_list(x.get("list", []), depth)
    out.dict_items = _read_pairs(x.get("dict", []), depth)
    return out


def _check_label(x: object) -> int:
    """Return `x` if it is a number that an instance may have as its label.

    Raises:
        ValueError: it is not a whole number from 0.
    """
    if type(x) is not int or x < 0:
        raise ValueError("a label that is no number")
    return x


def _read_tensor(x: object, depth: int) -> Inline:
    """Return the small tensor that the content of a "$tensor" represents.

    Args:
        x: the content, {"dtype", "shape", "data" (base64)}, of parsed JSON.
        depth: not used.

    Raises:
        ValueError: torch has no such dtype or shape, or the bytes are not as many.
    """
    if type(x) is not dict or list(x) != ["dtype", "shape", "data"] or type(x["shape"]) is not list:
        raise ValueError("a tensor without dtype, shape or data")
    dtype, shape, data = _check_str(x["dtype"]), tuple(x["shape"]), _read_bytes(x["data"])
    if dtype not in ITEMSIZE or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("a tensor of a dtype or shape that torch does not have")
    if prod(shape) * ITEMSIZE[dtype] != len(data):
        raise ValueError(f"a tensor of {dtype} {shape} with {len(data)} bytes")
    return Inline(dtype, shape, data)


_TAGS: dict[str, Callable[[object, int], object]] = {
    "$tuple": lambda x, depth: tuple(_read_list(x, depth)),
    "$set": lambda x, depth: set(_read_list(x, depth)),
    "$frozenset": lambda x, depth: frozenset(_read_list(x, depth)),
    "$dict": _read_dict,
    "$ordered": lambda x, depth: Ordered(_read_pairs(x, depth)),
    "$again": lambda x, depth: BackReference(_check_label(x)),
    "$bytes": lambda x, depth: _read_bytes(x),
    "$bytearray": lambda x, depth: bytearray(_read_bytes(x)),
    "$float": lambda x, depth: _read_float(x),
    "$complex": _read_complex,
    "$int": lambda x, depth: int(_check_str(x), 16),
    "$str": lambda x, depth: bytes.fromhex(_check_str(x)).decode("utf-8", "surrogatepass"),
    "$global": _read_global,
    "$object": _read_object,
    "$tensor": _read_tensor,
}
