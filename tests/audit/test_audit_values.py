"""values.json: every value survives to the bit, equal values have equal bytes, and no other bytes are read."""

from __future__ import annotations

import copy
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.engine import opening
from ckpttool.errors import CkpttoolError, Corrupt, Unsafe, Unsupported
from ckpttool.formats import pickle_writer, pickles
from ckpttool.formats.pickles import Global, Opaque
from ckpttool.formats.stored_tensors import Inline
from ckpttool.formats.values import decode, encode
from ckpttool.index.checkpoint import Value, joined

FIXTURES = Path(__file__).parents[2] / "fixtures"
NAN, OTHER_NAN = (struct.unpack(">d", bytes.fromhex(h))[0] for h in ("7ff8000000000000", "fff8000000001234"))


def one(data: Any) -> dict[str, Value]:
    return {"extra.x": Value(("extra", "x"), data)}


def through(data: Any) -> Any:
    return decode(encode(one(data)), "values.json")["extra.x"].data


def text_of(data: Any) -> str:
    """How a value is spelled."""
    line = encode(one(data)).decode().split("\n")[1]
    head = '"extra.x": {"path": ["extra", "x"], "data": '
    assert line.startswith(head) and line.endswith("}")
    return line[len(head) : -1]


def file_of(spelled: str) -> bytes:
    return ('{\n"extra.x": {"path": ["extra", "x"], "data": ' + spelled + "}\n}\n").encode("utf-8", "surrogatepass")


def same(a: Any, b: Any) -> bool:
    """Equal in type, bits and order, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, j) and same(v, w) for (k, v), (j, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        rest = list(b)
        for x in a:
            found = next((i for i, y in enumerate(rest) if same(x, y)), None)
            if found is None:
                return False
            del rest[found]
        return not rest
    if isinstance(a, Opaque):
        return a.call is b.call and all(map(same, a.parts(), b.parts()))
    return bool(a == b)


names = st.sampled_from(["torch", "collections", "numpy.core.multiarray", "m\u00fc", "\ud83d"])
floats = st.floats() | st.sampled_from([NAN, OTHER_NAN, -0.0, 5e-324, 1e22, 1e16, 0.1])
texts = st.text(st.characters(codec=None)) | st.sampled_from(
    ["\ud83d\ude00", "\U0001f600", "$tuple", "", "a\u2028\x00"]
)
keys = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts | st.binary(max_size=9)
keys = keys | st.tuples(keys, keys) | st.builds(Global, names, names)


@st.composite
def tensors(draw: Any) -> Inline:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype, item = draw(st.sampled_from([("bfloat16", 2), ("uint8", 1), ("complex128", 16)]))
    return Inline(
        dtype, tuple(shape), draw(st.binary(min_size=math.prod(shape) * item, max_size=math.prod(shape) * item))
    )


def opaque(cls: Global, args: Any, call: bool, state: Any, items: list[Any], pairs: list[Any]) -> Opaque:
    out = Opaque(cls, args, call)
    out.state, out.list_items, out.dict_items = state, items, pairs
    return out


leaves = (
    st.none() | st.booleans() | st.integers() | st.integers(-(1 << 4000), 1 << 4000) | floats | texts
    | st.complex_numbers(allow_nan=False) | st.binary() | st.builds(bytearray, st.binary()) | tensors()
    | st.builds(Global, names, names) | st.sets(keys, max_size=4) | st.frozensets(keys, max_size=4)
)  # fmt: skip


def grown(inner: Any) -> Any:
    lists = st.lists(inner, max_size=4)
    tuples = st.builds(tuple, lists)
    return (
        lists | tuples | st.dictionaries(keys, inner, max_size=4) | st.dictionaries(texts, inner, max_size=4)
        | st.builds(
            opaque, st.builds(Global, names, names), tuples, st.booleans(), inner, lists,
            st.lists(st.tuples(inner, inner), max_size=3),
        )
    )  # fmt: skip


anything = st.recursive(leaves, grown, max_leaves=25)


@given(anything)
def test_every_value_survives(data: Any) -> None:
    written = encode(one(data))
    back = decode(written, "values.json")["extra.x"].data
    assert same(back, data)
    assert encode(one(back)) == written


picklable = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 500), 1 << 500) | floats | texts | st.binary()
    | st.builds(bytearray, st.binary()) | st.complex_numbers(allow_nan=False)
    | st.builds(Global, st.just("torch"), st.sampled_from(["float16", "bfloat16"])) | st.sets(st.text(), max_size=4),
    grown, max_leaves=25,
)  # fmt: skip


@given(picklable)
def test_the_pickle_of_what_comes_back_is_the_same(data: Any) -> None:
    # hypothesis may hand out one object twice, which a pickle says and values.json does not
    data = through(data)
    try:
        before = pickle_writer.dump(data)
    except UnicodeEncodeError:  # a class with half of a character in its name
        return
    assert pickle_writer.dump(through(data)) == before


@given(st.dictionaries(st.lists(texts | st.integers(0, 9), min_size=1).map(tuple), floats, max_size=8), st.randoms())
def test_the_order_of_the_values_plays_no_part(found: dict[Any, float], dice: Any) -> None:
    values = {joined(path): Value(path, data) for path, data in found.items()}
    mixed = list(values.items())
    dice.shuffle(mixed)
    written = encode(values)
    assert encode(dict(mixed)) == written
    back = decode(written, "values.json")
    assert list(back) == sorted(values)
    assert all(same(back[n], values[n]) for n in values)


def test_sets_are_written_alike_whatever_their_order() -> None:
    code = (
        "from ckpttool.formats.values import encode; from ckpttool.index.checkpoint import Value; import sys;"
        "sys.stdout.buffer.write(encode({'extra.x': Value(('extra', 'x'),"
        " [set('zaqwsxcderfv'), frozenset({'b', 'a', 1, None, (2, 'c')})])}))"
    )
    out = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1", "2", "3")
    }
    assert len(out) == 1
    assert b'{"$frozenset": ["a", "b", 1, null, {"$tuple": [2, "c"]}]}' in out.pop()


def test_how_values_are_spelled() -> None:
    plain = {"a": [1, -2.5, True, None, "\u00fc\n"], "b": {}}
    assert text_of(plain) == '{"a": [1, -2.5, true, null, "\u00fc\\n"], "b": {}}'
    assert text_of((0.9, (), 1e-08)) == '{"$tuple": [0.9, {"$tuple": []}, 1e-08]}'
    assert text_of({1: 2, "a": 3}) == '{"$dict": [[1, 2], ["a", 3]]}'
    assert text_of({"$tuple": []}) == '{"$dict": [["$tuple", []]]}'
    assert text_of([math.inf, -math.inf, NAN, OTHER_NAN, -0.0]) == (
        '[{"$float": "inf"}, {"$float": "-inf"}, {"$float": "nan:7ff8000000000000"}, '
        '{"$float": "nan:fff8000000001234"}, -0.0]'
    )
    assert text_of([b"\x00a", bytearray(b"b")]) == '[{"$bytes": "AGE="}, {"$bytearray": "Yg=="}]'
    assert text_of(complex(-0.0, math.inf)) == '{"$complex": [-0.0, {"$float": "inf"}]}'
    assert text_of([2**2048 - 1, -(2**2048)]) == f'[{2**2048 - 1}, {{"$int": "-1{"0" * 512}"}}]'
    assert text_of(["\ud83d\ude00", "\U0001f600"]) == '[{"$str": "eda0bdedb880"}, "\U0001f600"]'
    assert text_of(Global("torch", "float16")) == '{"$global": ["torch", "float16"]}'
    assert text_of(Inline("int16", (1, 2), b"\x01\x00\x02\x00")) == (
        '{"$tensor": {"dtype": "int16", "shape": [1, 2], "data": "AQACAA=="}}'
    )
    assert text_of(opaque(Global("a", "B"), (), False, None, [], [])) == '{"$object": {"class": ["a", "B"]}}'
    assert text_of(opaque(Global("a", "B"), (1,), True, {"s": 2}, [3], [(4, 5)])) == (
        '{"$object": {"class": ["a", "B"], "call": true, "args": [1], "state": {"s": 2}, "list": [3], "dict": [[4, 5]]}}'
    )


def test_the_whole_file() -> None:
    values = {
        "trainer.step": Value(("trainer", "step"), 3),
        "optim.param_groups.0.lr": Value(("optim", "param_groups", 0, "lr"), 0.01),
    }
    assert encode(values) == (
        b'{\n"optim.param_groups.0.lr": {"path": ["optim", "param_groups", 0, "lr"], "data": 0.01},\n'
        b'"trainer.step": {"path": ["trainer", "step"], "data": 3}\n}\n'
    )
    assert json.loads(encode(values))["trainer.step"]["data"] == 3
    assert encode({}) == b"{}\n" and decode(b"{}\n", "v") == {}
    half = {"extra.\ud800": Value(("extra", "\ud800"), 1), "extra.x": Value(("extra", "x"), 2)}
    assert decode(encode(half), "v") == half


def test_what_is_shared_is_written_twice_and_a_cycle_is_refused() -> None:
    shared = [1]
    back = through([shared, (shared,)])
    assert back == [[1], ([1],)] and back[0] is not back[1][0]
    ring: list[Any] = [1]
    ring.append({"again": ring})
    with pytest.raises(Unsupported, match=r'"extra\.x" holds itself'):
        encode(one(ring))
    around = Opaque(Global("a", "B"), ())
    around.state = (around,)
    with pytest.raises(Unsupported, match="holds itself"):
        encode(one(around))


def test_depth_is_bounded_where_pickles_is() -> None:
    deep: Any = complex(1, math.inf)
    for _ in range(pickles.MAX_DEPTH + 1):
        deep = [deep]
    pickles.refuse_deep_object(deep, "x", 1000)
    assert through(deep) == deep
    inner: Any = ()
    while True:
        outer = Opaque(Global("a", "B"), (), True)
        outer.dict_items.append(({"k": inner}, [inner]))
        try:
            pickles.refuse_deep_object(outer, "x", 1 << 62)
        except Unsafe:
            break
        inner = outer
        if len(text_of(inner)) > 100_000:  # it doubles with every level
            break
    assert through(inner) == inner
    with pytest.raises(Unsupported, match=r'"extra\.x" is nested deeper than 100'):
        encode(one([deep]))
    with pytest.raises(Corrupt, match="nested deeper than 100"):
        decode(file_of("[" + text_of(deep) + "]"), "v")
    for spelled in ("[" * 200 + "]" * 200, '{"$tuple": [' * 150 + "]}" * 150):
        with pytest.raises(Corrupt, match="nested deeper than 100"):
            decode(file_of(spelled), "v")
    with pytest.raises(Unsafe, match="nested deeper than 350"):
        decode(file_of("[" * 100_000 + "]" * 100_000), "v")


class Number(int):
    """A type that no pickle gives."""


@pytest.mark.parametrize(
    "data", [Number(3), object(), {"a": [Number(3)]}, {Number(3): 1}, range(3), Opaque(Opaque, ())]
)
def test_other_types_are_refused(data: Any) -> None:
    with pytest.raises(Unsupported, match=r'the value "extra\.x" holds a .*, which values\.json cannot keep'):
        encode(one(data))


@pytest.mark.parametrize(
    "spelled",
    [
        "1.50", "1E5", "1e5", "1e400", "NaN", "Infinity", "-Infinity", "-0", "0x10", "01", "+1", " 1", "1 ", "[1,2]",
        '"\\u0041"', '"\\ud800"', '"\\/"', '{"a":1}', '{"a": 1,"b": 2}', '{"$tuple":[]}', '{"$none": 1}', '{"$": 1}',
        '{"$tuple": [], "a": 1}', '{"a": 1, "$tuple": []}', '{"$tuple": 1}', '{"$tuple": null}', '{"$tuple": {"a": 1}}',
        '{"$set": [2, 1]}', '{"$set": [1, 1]}', '{"$set": [1, 1.0]}', '{"$set": [[]]}', '{"$set": [1, true]}',
        '{"$frozenset": "ab"}', '{"$dict": [["a", 1]]}', '{"$dict": [[1, 1], [1, 2]]}', '{"$dict": [[1]]}',
        '{"$dict": [[1, 2, 3]]}', '{"$dict": [[[], 1]]}', '{"$dict": {"a": 1}}', '{"$dict": []}', '{"$dict": ["ab"]}',
        '{"$bytes": "AGE"}', '{"$bytes": "AGF="}', '{"$bytes": "AG E="}', '{"$bytes": 1}', '{"$bytearray": [1]}',
        '{"$float": "1.5"}', '{"$float": "Infinity"}', '{"$float": "nan"}', '{"$float": 1.5}', '{"$float": "x"}',
        '{"$float": "nan:7ff0000000000000"}', '{"$float": "nan:3ff0000000000000"}', '{"$float": "nan:7FF8000000000000"}',
        '{"$float": "nan:7ff8000000000000ff"}', '{"$float": "nan:f8"}', '{"$float": "nan:zz"}', '{"$complex": [1, 2]}',
        '{"$complex": [1.0]}', '{"$complex": 1.0}', '{"$complex": [1.0, {"$str": "00"}]}', '{"$int": "ff"}',
        '{"$int": "z"}', '{"$int": 3}', f'{{"$int": "0x1{"0" * 600}"}}', f'{{"$int": "1{"A" * 600}"}}', f"{2**2048}",
        "1" * 5000, '{"$str": "61"}', '{"$str": "eda0"}', '{"$str": "EDA080"}', '{"$str": "ed a0 80"}', '{"$str": 1}',
        '{"$global": ["a"]}', '{"$global": ["a", "b", "c"]}', '{"$global": ["a", 1]}', '{"$global": "ab"}',
        '{"$object": {}}', '{"$object": []}', '{"$object": {"class": ["a", "B"], "call": false}}',
        '{"$object": {"class": ["a", "B"], "args": []}}', '{"$object": {"class": ["a", "B"], "state": null}}',
        '{"$object": {"class": ["a", "B"], "list": []}}', '{"$object": {"class": ["a", "B"], "dict": []}}',
        '{"$object": {"class": ["a", "B"], "more": 1}}', '{"$object": {"args": [1], "class": ["a", "B"]}}',
        '{"$object": {"class": ["a", "B"], "dict": [[1]]}}', '{"$object": {"class": {"$tuple": ["a", "B"]}}}',
        '{"$tensor": {"dtype": "int16", "shape": [2], "data": "AQA="}}', '{"$tensor": {"dtype": "int17", "shape": [], "data": ""}}',
        '{"$tensor": {"dtype": "int8", "shape": [-1], "data": ""}}', '{"$tensor": {"dtype": "int8", "shape": [true], "data": "AA=="}}',
        '{"$tensor": {"dtype": "int8", "shape": 1, "data": "AA=="}}', '{"$tensor": {"shape": [1], "dtype": "int8", "data": "AA=="}}',
        '{"$tensor": {"dtype": ["int8"], "shape": [1], "data": "AA=="}}', '{"$tensor": 1}',
    ],
)  # fmt: skip
def test_no_other_spelling_is_read(spelled: str) -> None:
    with pytest.raises(Corrupt, match=r"^v: "):
        decode(file_of(spelled), "v")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"[]\n", b"null\n", b'{"$tuple": []}\n', b"\xff\n", b"{\n}\n", b'{\n"x": 1\n}\n',
        b'{\n"x": {"path": ["x"]}\n}\n', b'{\n"x": {"path": ["y"], "data": 1}\n}\n', b'{\n"x": {"data": 1, "path": ["x"]}\n}\n',
        b'{\n"": {"path": [], "data": 1}\n}\n', b'{\n"x.-1": {"path": ["x", -1], "data": 1}\n}\n',
        b'{\n"x.True": {"path": ["x", true], "data": 1}\n}\n', b'{\n"x.1.5": {"path": ["x", 1.5], "data": 1}\n}\n',
        b'{\n"x": {"path": "x", "data": 1}\n}\n', b'{\n"x": {"path": ["x"], "data": 1, "more": 1}\n}\n',
        b'{\n"y": {"path": ["y"], "data": 1},\n"x": {"path": ["x"], "data": 1}\n}\n', b'{"x": {"path": ["x"], "data": 1}}\n',
        b'{\n"x": {"path": ["x"], "data": 1}\n}\n\n', b'{\n"x": {"path": ["x"], "data": 1}\n}', b'\xef\xbb\xbf{}\n',
        b'{\r\n"x": {"path": ["x"], "data": 1}\r\n}\r\n', b'{"$dict": [\n[1, {"path": ["x"], "data": 1}]\n]}\n',
    ],
)  # fmt: skip
def test_no_other_file_is_read(data: bytes) -> None:
    with pytest.raises(Corrupt, match=r"^v: "):
        decode(data, "v")


def test_a_key_twice_is_refused() -> None:
    with pytest.raises(Unsafe, match="'a' is there twice"):
        decode(file_of('{"a": 1, "a": 1}'), "v")


@given(anything, st.randoms())
def test_a_flipped_bit_is_refused_or_is_another_value(data: Any, dice: Any) -> None:
    written = encode(one(data))
    for _ in range(20):
        damaged = bytearray(written)
        damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
        try:
            back = decode(bytes(damaged), "v")
        except (Corrupt, Unsafe):
            continue
        assert encode(back) == damaged


def checkpoints() -> list[str]:
    found = [p.parent.name for p in FIXTURES.glob("*/ckpt")]
    return sorted(found)


@pytest.mark.parametrize("name", checkpoints())
def test_values_of_every_fixture(name: str) -> None:
    opened = 0
    folder = FIXTURES / name / "ckpt"
    for path in [folder, *sorted(folder.glob("*.pt")), *sorted(folder.glob("checkpoint-*"))]:
        described = FIXTURES / name / "flat_layout.json"
        try:
            found = opening.open(path, flat_layout=described if path == folder and described.exists() else None)
        except CkpttoolError:  # no checkpoint on its own
            continue
        with found:
            values = found.checkpoint.values
            back = decode(encode(values), "values.json")
        opened += 1
        assert list(back) == sorted(values)
        for n, v in values.items():
            assert same(back[n], v) and pickle_writer.dump(copy.deepcopy(v.data)) == pickle_writer.dump(back[n].data)
    assert opened
