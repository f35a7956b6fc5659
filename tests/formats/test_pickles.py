"""The pickle door: what CPython pickles we read, what we write CPython reads, and nothing is ever called."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import io
import json
import os
import pathlib
import pickle
import random
import shutil
import struct
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.errors import CkpttoolError, Corrupt, Unsafe
from ckpttool.formats import pickle_writer, pickles, sandbox
from ckpttool.formats.pickles import Global, Opaque

PROTOCOLS = range(6)


class Schedule:
    """A class of a user."""

    def __init__(self) -> None:
        self.warmup, self.rates = 10, [0.1, 0.2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and vars(self) == vars(other)


class Marks(list[int]):
    """A list that is not a plain one, with something beside it."""

    note = ""


class Evil:
    """Pickles as a call of anything."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def load(data: bytes) -> Any:
    return pickles.load(data)[0]


def refusal(data: bytes, kind: type[CkpttoolError] = Unsafe) -> str:
    with pytest.raises(CkpttoolError) as e:
        pickles.load(data)
    assert isinstance(e.value, kind), e.value
    return str(e.value)


# ------------------------------------------------------------------------------------------------------ plain data

INTS = st.integers(-(1 << 490), 1 << 490)
BYTES = st.binary(min_size=1, max_size=8)  # none at all: see below
SCALARS = st.none() | st.booleans() | INTS | st.floats(allow_nan=False) | st.text(max_size=8) | BYTES
KEYS = SCALARS | st.lists(SCALARS, max_size=3).map(tuple)
PLAIN = st.recursive(
    SCALARS | st.complex_numbers(allow_nan=False) | BYTES.map(bytearray) | st.sets(SCALARS, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.frozensets(SCALARS, max_size=3)
    ),
    max_leaves=8,
)


def typed(x: Any) -> Any:
    """A value with its types, since 1 == True == 1.0."""
    if isinstance(x, dict):
        return type(x), [(typed(k), typed(v)) for k, v in x.items()]
    if isinstance(x, (set, frozenset)):
        return type(x), sorted(map(repr, x))
    if isinstance(x, (list, tuple)):
        return type(x), [typed(v) for v in x]
    return type(x), repr(x)


@pytest.mark.slow
@given(PLAIN, st.sampled_from(PROTOCOLS))
def test_plain_data_reads_as_cpython_reads_it_in_every_protocol(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert typed(load(data)) == typed(pickle.loads(data))


@pytest.mark.parametrize("protocol", range(3))
@pytest.mark.parametrize("value", [b"", np.zeros((0, 3))])
def test_no_bytes_at_all_are_read_from_the_protocols_without_bytes(value: Any, protocol: int) -> None:
    assert repr(pickle.loads(pickle_writer.dump(load(pickle.dumps(value, protocol))))) == repr(value)


@pytest.mark.slow
@given(PLAIN, st.sampled_from(PROTOCOLS))
def test_plain_data_that_was_read_is_written_so_that_cpython_reads_the_same(value: Any, protocol: int) -> None:
    data = pickle_writer.dump(load(pickle.dumps(value, protocol)))
    assert typed(pickle.loads(data)) == typed(value)
    assert typed(load(data)) == typed(value)


def test_an_instruction_that_crosses_the_end_of_its_frame_is_read_by_nobody() -> None:
    whole = pickle.dumps([1, 2, "text", 2**40], protocol=4)
    longer = whole[:-2] + b"J1234" + whole[-2:]  # the frame's length is no longer right
    try:
        read = pickle.load(io.BytesIO(longer))
    except Exception:  # of whatever kind the lost place makes
        read = None
    assert read != [1, 2, "text", 2**40, 0x34333231]
    with pytest.raises(Corrupt, match="crosses the end of its frame"):
        pickles.load(longer)


def test_a_set_of_tuples_of_mixed_types_is_written() -> None:
    value = {(1, "a"), ("b", 2), (None, 1), (None, "c")}
    assert pickle.loads(pickle_writer.dump(value)) == value


def test_nan_and_minus_zero_and_the_largest_integer_survive() -> None:
    value = [float("nan"), -0.0, float("-inf"), (1 << 511) - 1, -(1 << 511), 1 << 31, -(1 << 31), 255, 256, 65536]
    assert repr(load(pickle.dumps(value, 2))) == repr(value) == repr(pickle.loads(pickle_writer.dump(value)))


def test_shared_objects_stay_shared_and_the_position_after_stop_is_given() -> None:
    inner = ["x"]
    data = pickle.dumps([inner, inner], 2)
    found, end = pickles.load(b"__" + data + b"rest", start=2)
    assert found[0] is found[1] and end == 2 + len(data)
    again = pickle.loads(pickle_writer.dump(found))
    assert again[0] is again[1]


def test_the_same_data_gives_the_same_bytes() -> None:
    a = {"lr": 0.1, "betas": (0.9, 0.95), "names": {"b", "a", "c"}, "raw": b"\x00\xff"}
    b = {"lr": 0.1, "betas": (0.9, 0.95), "names": {"c", "a", "b"}, "raw": b"\x00\xff"}
    assert pickle_writer.dump(a) == pickle_writer.dump(b)


def test_many_memo_entries_take_the_long_form() -> None:
    value = [f"parameter {i}" for i in range(300)] * 2
    assert pickle.loads(pickle_writer.dump(value)) == value
    assert load(pickle.dumps(value, 2)) == value


# ---------------------------------------------------------------------------------------------------- real objects


def equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def equal_arrays(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def equal_generator(a: Any, b: Any) -> bool:
    return a[0] == b[0] and equal_arrays(a[1], b[1]) and a[2:] == b[2:]


def marks() -> Marks:
    out = Marks([1, 2])
    out.note = "n"
    return out


OBJECTS: dict[str, tuple[Any, Callable[[Any, Any], bool]]] = {
    "numpy float32 matrix": (np.arange(6, dtype=np.float32).reshape(2, 3), equal_arrays),
    "numpy column-major": (np.asfortranarray(np.arange(6).reshape(2, 3)), equal_arrays),
    "numpy bool": (np.array([True, False]), equal_arrays),
    "numpy strings": (np.array(["a", "bc"]), equal_arrays),
    "numpy scalar": (np.float64(1.5), equal_arrays),
    "numpy bool scalar": (np.bool_(True), equal_arrays),
    "numpy dtype": (np.dtype("<f4"), equal),
    "numpy generator": (np.random.RandomState(0).get_state(), equal_generator),
    "random.getstate": (random.Random(0).getstate(), equal),
    "datetime": (datetime.datetime(2026, 1, 2, 3, 4, 5, 6), equal),
    "datetime in UTC": (datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), equal),
    "date": (datetime.date(2026, 1, 2), equal),
    "timedelta": (datetime.timedelta(days=1, microseconds=5), equal),
    "decimal": (decimal.Decimal("1.10"), equal),
    "path": (pathlib.PurePosixPath("/data/run/step-1"), equal),
    "namespace": (argparse.Namespace(lr=0.1, name="x", nested=argparse.Namespace(a=[1])), equal),
    "user class": (Schedule(), equal),
    "list subclass": (marks(), lambda a, b: equal(a, b) and a.note == b.note),
    "torch.device": (torch.device("cuda:1"), equal),
    "torch.dtype": (torch.bfloat16, equal),
    "slice and range": ([slice(1, 2, None), range(3)], equal),
    "a class": ([Schedule, dict, len], equal),
}


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("name", OBJECTS)
def test_a_real_object_is_read_and_written_so_that_cpython_builds_an_equal_one(name: str, protocol: int) -> None:
    value, same = OBJECTS[name]
    found = load(pickle.dumps({"it": value, "again": [value]}, protocol))
    back = pickle.loads(pickle_writer.dump(found))
    assert same(value, back["it"]) and same(value, back["again"][0])
    assert pickle_writer.dump(found) == pickle_writer.dump(load(pickle_writer.dump(found)))


@pytest.mark.parametrize("protocol", range(2, 6))
def test_an_instance_of_a_known_class_is_written_the_way_it_was_built(protocol: int) -> None:
    value = uuid.UUID(int=5)
    assert pickle.loads(pickle_writer.dump(load(pickle.dumps(value, protocol)))) == value


def test_a_torch_size_and_an_ordered_dict_stay_what_they_are() -> None:
    found = load(pickle.dumps(torch.Size([2, 3]), 2))
    assert pickle.loads(pickle_writer.dump(found)) == torch.Size([2, 3])
    ordered = collections.OrderedDict(b=1, a=2)
    for protocol in PROTOCOLS:
        found = load(pickle.dumps(ordered, protocol))
        assert isinstance(found, dict) and list(found.items()) == [("b", 1), ("a", 2)]
        assert equal(pickle.loads(pickle_writer.dump(found)), ordered)


def test_module_versions_of_a_state_dict_are_left_out() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    state = collections.OrderedDict((k, v.tolist()) for k, v in state.items())
    state._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    assert load(pickle.dumps(state, 2)) == dict(state)


@pytest.mark.parametrize("value", [collections.Counter({30: 1, 80: 2}), collections.defaultdict(int, {"a": 1})])
def test_the_collections_that_schedulers_hold_are_kept(value: Any) -> None:
    for protocol in range(2, 6):
        assert equal(pickle.loads(pickle_writer.dump(load(pickle.dumps(value, protocol)))), value)


def test_an_unknown_instance_is_a_record_and_not_built() -> None:
    found = load(pickle.dumps(Schedule(), 2))
    assert isinstance(found, Opaque) and found.cls == Global(__name__, "Schedule")
    assert found.state == {"warmup": 10, "rates": [0.1, 0.2]} and not found.call


def test_what_dump_does_not_know_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="a memoryview cannot be written"):
        pickle_writer.dump([memoryview(b"")])


# -------------------------------------------------------------------------------------------------------- refusals


def glob(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def laughs(n: int = 64) -> bytes:
    """2**n leaves in n + 3 objects."""
    return b"K\x01" + b"q\x63h\x63\x86" * n


def deep(n: int) -> bytes:
    """A tuple in a tuple in a tuple ..."""
    return b"N" + b"\x85" * n


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("function", [os.system, eval, exec, subprocess.check_output, __import__, getattr, open])
def test_a_call_is_refused_whatever_it_calls(function: Any, protocol: int, canary: Path) -> None:
    script = f"open({str(canary)!r}, 'w').close()"
    args = (f"touch {canary}",) if function in (os.system, subprocess.check_output) else (script,)
    data = pickle.dumps({"model": [Evil(function, *args)]}, protocol)
    assert "the pickle calls" in refusal(data)
    assert not canary.exists()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_popen_is_refused_called_or_unbuilt(protocol: int, canary: Path) -> None:
    module = "subprocess" if protocol > 2 else "commands"  # its name in Python 2, which CPython maps back
    data = pickle.dumps(Evil(subprocess.Popen, ["touch", str(canary)]), protocol)
    assert f"the pickle calls {module}.Popen" in refusal(data)
    new = b"\x80\x02" + glob("subprocess", "Popen") + b"X\x05\x00\x00\x00touch\x85\x81."
    assert "an instance of subprocess.Popen" in refusal(new)
    assert not canary.exists()


@pytest.mark.parametrize("module", ["os", "builtins", "__builtin__", "subprocess", "functools", "importlib.util"])
def test_an_instance_of_a_class_that_acts_is_refused_unbuilt(module: str) -> None:
    assert "which is not training state" in refusal(b"\x80\x02" + glob(module, "anything") + b")\x81.")


@pytest.mark.parametrize("module", ["commands", "copy_reg", "copyreg", "_pickle", "_posixsubprocess"])
def test_an_instance_of_a_class_that_acts_is_refused_under_its_other_names(module: str) -> None:
    assert "which is not training state" in refusal(b"\x80\x02" + glob(module, "anything") + b")\x81.")


@pytest.mark.parametrize(("module", "name"), [("os", "path.join"), ("torch", "serialization.os.system"), ("a", "b.c")])
def test_a_dotted_name_is_refused(module: str, name: str) -> None:
    text = [struct.pack("<BB", 0x8C, len(t)) + t.encode() for t in (module, name)]
    assert "an attribute of something" in refusal(b"\x80\x04" + b"".join(text) + b"\x93.")
    assert "an attribute of something" in refusal(glob(module, name) + b".")


def test_a_global_whose_name_is_no_string_is_refused() -> None:
    assert "whose name is not a string" in refusal(b"\x80\x04K\x01\x8c\x01a\x93.")


def test_an_instance_with_keyword_arguments_is_refused() -> None:
    assert "with keyword arguments" in refusal(b"\x80\x04" + glob("a", "b") + b")}\x8c\x01kK\x01s\x92.")


def test_the_state_of_a_plain_value_or_of_a_function_of_ours_cannot_be_set() -> None:
    assert "sets the state of" in refusal(b"\x80\x02](K\x01eNb.")
    assert "sets the state of" in refusal(b"\x80\x02}}b.")
    assert "sets the state of" in refusal(b"\x80\x02" + glob("collections", "OrderedDict") + b"}X\x01\x00\x00\x00aNsb.")


def test_a_persistent_id_without_a_reader_is_refused() -> None:
    assert "outside of it" in refusal(b"\x80\x02X\x01\x00\x00\x00aQ.")
    assert "outside of it" in refusal(b"Pa\n.")


@pytest.mark.parametrize(
    "op", [b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00", b"i", b"o", b"\x97", b"\x98", b"S"]
)
def test_an_instruction_that_no_checkpoint_needs_is_refused(op: bytes) -> None:
    assert "which no checkpoint needs" in refusal(b"\x80\x04(N" + op + b"'a'\n.")


def test_an_unknown_instruction_is_refused() -> None:
    assert refusal(b"\x80\x02\xff.") == "pickle: pickle instruction 0xff at byte 2, which no checkpoint needs."


def test_an_unknown_protocol_is_corrupt() -> None:
    assert refusal(b"\x80\x06N.", Corrupt) == "pickle: pickle protocol 6."


@pytest.mark.slow
@pytest.mark.parametrize("op", [b"\x85", b"]\x61"])
def test_nesting_without_bound_is_refused(op: bytes) -> None:
    data = deep(300_000) if op == b"\x85" else b"]" * 100_000 + b"a" * 99_999
    assert "nested deeper than 100" in refusal(b"\x80\x02" + data + b".")
    assert "nested deeper than 100" in refusal(b"\x80\x02](" + data + b"e.")


def test_nesting_of_a_hundred_is_read_and_written() -> None:
    value: Any = 1
    for _ in range(99):
        value = [value]
    assert load(pickle.dumps(value, 2)) == value == pickle.loads(pickle_writer.dump(value))


def test_a_list_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert "nested deeper" in refusal(pickle.dumps(loop, 2))


def test_the_walk_counts_shared_parts_each_time_and_looks_into_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [{"offsets": [i], "sizes": (i, [i])} for i in range(500)]
    tree = {f"flat{i}": list(parts) for i in range(50)}
    looked = []
    real = pickles.list_children
    monkeypatch.setattr(pickles, "list_children", lambda x: looked.append(1) or real(x))
    assert pickles.refuse_deep_object(tree, "x", 1 << 30) == (4, 1 + 100 + 50 * (501 + 500 * 12))
    assert len(looked) == 1 + 50 + 500 * 4
    with pytest.raises(Unsafe, match="expands to more than"):
        pickles.refuse_deep_object(tree, "x", 50 * 500 * 12)


def test_a_value_that_unfolds_without_bound_is_refused() -> None:
    assert "expands to more than" in refusal(b"\x80\x02" + laughs() + b".")
    assert "expands to more than" in refusal(b"\x80\x02" + b"K\x01" + b"q\x63h\x63\x86" * 20 + b".")


@pytest.mark.parametrize(
    "data",
    [
        b"}" + laughs() + b"Ns.",
        b"}(" + laughs() + b"Nu.",
        b"(" + laughs() + b"Nd.",
        b"(" + laughs() + b"\x91.",
        b"\x8f(" + laughs() + b"\x90.",
        glob("builtins", "set") + b"](" + laughs() + b"e\x85R.",
        glob("builtins", "frozenset") + b"](" + laughs() + b"e\x85R.",
        b"}" + deep(200_000) + b"Ns.",
    ],
)
def test_a_key_whose_hash_has_no_bound_is_refused(data: bytes) -> None:
    assert "hashing it has no bound" in refusal(b"\x80\x04" + data)


HANGS = {
    "key of an OrderedDict": glob("collections", "OrderedDict") + b"](" + laughs() + b"N\x86e\x85R.",
    "called": laughs() + b")R.",
    "called without a tuple": laughs() + b"NR.",
    "class": laughs() + b")\x81.",
    "class with keywords": laughs() + b")}NNs\x92.",
    "encoding": glob("_codecs", "encode") + b"X\x01\x00\x00\x00a" + laughs() + b"\x86R.",
}
CRASHES = {
    "deep key of an OrderedDict": glob("collections", "OrderedDict") + b"](" + deep(1_000_000) + b"N\x86e\x85R.",
    "deep called": deep(100_000) + b")R.",
    "deep class": deep(100_000) + b")\x81.",
}


@pytest.mark.parametrize("name", [*HANGS, *CRASHES])
def test_what_has_no_bound_is_refused_wherever_it_stands(name: str) -> None:
    # in a child: the fault is a hang of 2**64 steps or an overflow of the C stack
    data = b"\x80\x04" + (HANGS.get(name) or CRASHES[name])
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_CPU, (1, 1)); from ckpttool import errors; from ckpttool.formats import pickles\n"
    code += "try: pickles.load(sys.stdin.buffer.read())\nexcept (errors.Unsafe, errors.Corrupt): sys.exit(9)"
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=False)
    assert done.returncode == 9, (done.returncode, done.stderr[-300:])


def test_an_integer_without_bound_is_refused() -> None:
    assert "an integer of 65 bytes" in refusal(b"\x80\x02\x8a\x41" + b"\x01" * 65 + b".")
    assert "an integer of 200 digits" in refusal(b"L" + b"9" * 200 + b"L\n.")
    assert "which no checkpoint needs" in refusal(b"\x80\x02\x8b\x04\x00\x00\x00\x01\x01\x01\x01.")
    assert load(b"\x80\x02\x8a\x40" + b"\x01" * 64 + b".") == int.from_bytes(b"\x01" * 64, "little")


def test_a_bytearray_of_a_number_is_refused_since_it_would_be_allocated() -> None:
    assert "builds a bytearray from a int" in refusal(glob("builtins", "bytearray") + b"J\xff\xff\xff\x7f\x85R.")


@pytest.mark.parametrize(
    "length", [b"X\xff\xff\xff\x7f", b"B\xff\xff\xff\xff", b"\x8d" + b"\xff" * 8, b"\x96" + b"\xff" * 8]
)
def test_a_length_beyond_the_end_is_corrupt_before_anything_is_allocated(length: bytes) -> None:
    assert "ends in the middle" in refusal(b"\x80\x05" + length + b"abc.", Corrupt)


@pytest.mark.parametrize("data", [b"", b".", b"NN.", b"(N.", b"t.", b"h\x05.", b"\x80\x02s.", b"garbage", b"\x80\x02N"])
def test_what_is_no_pickle_is_refused(data: bytes) -> None:
    with pytest.raises((Corrupt, Unsafe)):
        pickles.load(data)


SMALL = pickle.dumps(
    {"lr": 0.1, "n": 1 << 40, "betas": (0.9, 0.95), "who": Schedule(), "raw": b"xy", "s": {"a"}, "big": "é" * 40}, 4
)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_pickle_cut_off_at_any_byte_is_corrupt_or_unsafe_and_nothing_else(protocol: int) -> None:
    value = {
        "lr": 0.1,
        "n": 1 << 40,
        "betas": (0.9, 0.95),
        "raw": b"xy",
        "s": {"a"},
        "big": "é" * 40,
        "l": [None, True],
    }
    data = pickle.dumps(value, protocol)
    for n in range(len(data)):
        with pytest.raises((Corrupt, Unsafe)):
            pickles.load(data[:n])


GENUINE: dict[str, bytes] = {
    "small": SMALL,
    "group": pickle.dumps([{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(range(20)), "foreach": None}], 2),
    "numpy": pickle.dumps({"rng": np.random.RandomState(0).get_state(), "x": np.float32(1)}, 4),
    "text": pickle.dumps({"a": [1, 2.5, "x", None, True], "b": (1 << 70, b"raw")}, 0),
    "objects": pickle.dumps([argparse.Namespace(a=1), datetime.datetime(2026, 1, 1), pathlib.PurePath("a/b")], 5),
    "ordered": pickle.dumps(collections.OrderedDict((f"layers.{i}.weight", torch.Size([i, 2])) for i in range(9)), 2),
}


@pytest.mark.parametrize("name", GENUINE)
def test_a_genuine_pickle_with_flipped_bytes_is_data_or_an_error_of_ours_at_once(name: str) -> None:
    dice = random.Random(name)
    for _ in range(1000):
        data = bytearray(GENUINE[name])
        for _ in range(dice.choice((1, 1, 2, 4))):
            data[dice.randrange(len(data))] = dice.randrange(256)
        began = time.monotonic()
        try:
            found = pickles.load(bytes(data))[0]
            assert not callable(found) or isinstance(found, Global) or (found in pickles.PLAIN.values())
        except CkpttoolError:
            pass
        assert time.monotonic() - began < 1


@given(st.binary(max_size=60))
def test_any_bytes_are_data_or_an_error_of_ours(data: bytes) -> None:
    try:
        pickles.load(data)
    except (Corrupt, Unsafe):
        pass


OPS = b"0123(])}etaubsR\x81\x85\x86\x87\x94q\x01h\x00N\x88K\x05X\x01\x00\x00\x00ac\x8c\x01x\x93cos\nsystem\n."
KNOWN = [glob(m, n) for m, n in pickles.PLAIN][:40]


@pytest.mark.slow
@given(
    st.lists(st.sampled_from([bytes([b]) for b in OPS] + KNOWN + [b"K\x01", b")", b"X\x01\x00\x00\x00a"]), max_size=30)
)
def test_any_instructions_are_data_or_an_error_of_ours(ops: list[bytes]) -> None:
    try:
        pickles.load(b"\x80\x04" + b"".join(ops) + b".")
    except (Corrupt, Unsafe):
        pass


def test_reading_causes_none_of_the_events_by_which_a_process_acts(tmp_path: Path, canary: Path) -> None:
    touch = f"touch {canary}"
    evil = [
        pickle.dumps(Evil(os.system, touch), 2),
        pickle.dumps(Evil(exec, f"open({str(canary)!r}, 'w')"), 4),
        pickle.dumps(Evil(eval, f"open({str(canary)!r}, 'w')"), 0),
        pickle.dumps(Evil(subprocess.Popen, ["touch", str(canary)]), 5),
        pickle.dumps(Evil(__import__, "antigravity"), 3),
        glob("antigravity", "x") + b".",
        b"\x80\x02" + glob("this", "Zen") + b")\x81}X\x01\x00\x00\x00aNsb.",
    ]
    genuine = [pickle.dumps(value, p) for value, _ in OBJECTS.values() for p in range(2, 6)]
    (tmp_path / "pickles").write_text(json.dumps([d.hex() for d in [*evil, *genuine, *GENUINE.values()]]))
    script = """
        import json, sys
        from ckpttool.formats import pickle_writer, pickles
        from ckpttool.errors import CkpttoolError
        for codec in ("latin1", "latin-1", "utf-8", "ascii", "raw-unicode-escape"):
            "".encode(codec); b"".decode(codec)  # the first use of a codec is an import of its module
        everything = [bytes.fromhex(x) for x in json.load(open(sys.argv[1]))]
        events, quiet = [], ("builtins.id", "object.__getattr__")
        listening = False
        def hook(event, args):
            if listening and not event.startswith(quiet):
                events.append((event, str(args)[:200]))
        sys.addaudithook(hook)
        read = 0
        listening = True
        for data in everything:
            try:
                pickle_writer.dump(pickles.load(data)[0])
                read += 1
            except CkpttoolError:
                pass
        listening = False
        print(json.dumps([read, len(everything), events]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "pickles")],
        capture_output=True,
        text=True,
        check=True,
    )
    read, total, events = json.loads(done.stdout)
    assert events == []
    assert total - read == 5  # the two without a call are inert records
    assert not canary.exists()


# ------------------------------------------------------------------------------------------------------ load_large


def test_the_large_reader_keeps_what_the_small_one_keeps_and_refuses_every_other_global(canary: Path) -> None:
    stand_ins = {("torch", "Size"): tuple}
    found = pickles.load_large(io.BytesIO(pickle.dumps({"a": torch.Size([2, 3])}, 2)), stand_ins)
    assert found == {"a": (2, 3)}
    data = pickle.dumps(Schedule(), 4)
    large, (small, _) = pickles.load_large(io.BytesIO(data), stand_ins), pickles.load(data, stand_ins, what="x")
    assert isinstance(large, pickles.Opaque) and large.parts() == small.parts() and large.state
    for value in (Evil(os.system, f"touch {canary}"), Evil(exec, "1"), len):
        with pytest.raises(Unsafe, match="which a checkpoint does not need"):
            pickles.load_large(io.BytesIO(pickle.dumps(value, 4)), stand_ins)
    with pytest.raises(Unsafe, match="outside of it"):
        pickles.load_large(io.BytesIO(b"\x80\x02X\x01\x00\x00\x00aQ."), stand_ins)
    assert not canary.exists()


# ------------------------------------------------------------------------------------- enums of Python 3.11.0 to 3.11.3


def by_name(module: str, cls: str, member: str, builtins: str = "builtins") -> bytes:
    """A member of an enum as those versions pickle it (Debian 12 has 3.11.2): getattr(cls, member)."""
    return b"\x80\x02c%b\ngetattr\nc%b\n%b\nX%b%b\x86R." % (
        builtins.encode(), module.encode(), cls.encode(), len(member).to_bytes(4, "little"), member.encode(),
    )  # fmt: skip


@pytest.mark.parametrize("builtins", ["builtins", "__builtin__"])
def test_members_of_known_enums(builtins: str) -> None:
    from ckpttool.converters.deepspeed import files as _deepspeed_files

    from ckpttool.formats.sharded import make_stand_ins

    zero, torch_ = "deepspeed.runtime.zero.config", "torch.distributed._shard.sharded_tensor.metadata"
    for name, number in (("disabled", 0), ("optimizer_states", 1), ("gradients", 2), ("weights", 3)):
        data = by_name(zero, "ZeroStageEnum", name, builtins)
        assert pickles.load(data, _deepspeed_files.list_pickle_stand_ins("x"), what="x")[0] == number
    data = by_name(torch_, "MEM_FORMAT_ENCODING", "TORCH_PRESERVE_FORMAT", builtins)
    assert pickles.load(data, make_stand_ins("x"), what="x")[0] == 2
    for cls, member, tables in (
        ("ZeroStageEnum", "__class__", _deepspeed_files.list_pickle_stand_ins("x")),
        ("ZeroStageEnum", "mro", _deepspeed_files.list_pickle_stand_ins("x")),
    ):
        with pytest.raises(Unsafe, match="getattr"):
            pickles.load(by_name(zero, cls, member, builtins), tables, what="x")
    with pytest.raises(Unsafe, match="getattr"):
        pickles.load(by_name(torch_, "MEM_FORMAT_ENCODING", "__init__", builtins), make_stand_ins("x"), what="x")
    for tables in ({}, make_stand_ins("x"), _deepspeed_files.list_pickle_stand_ins("x")):  # a user's own is a name
        data = by_name("job", "Mode", "FAST", builtins)
        assert pickles.load(data, tables, what="x")[0] == Global("job", "Mode.FAST")
        for module, cls, member in (
            ("job", "Mode", "_value2member_map_"), ("job", "load", "FAST"), ("os", "Path", "x"), ("subprocess", "Popen", "x"),
            ("builtins", "BaseException", "x"),
        ):  # fmt: skip
            with pytest.raises(Unsafe, match="getattr"):
                pickles.load(by_name(module, cls, member, builtins), tables, what="x")


@pytest.mark.slow
@pytest.mark.parametrize("child", [False, True], ids=["read here", "read in a child"])
def test_a_checkpoint_that_such_a_python_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: bool) -> None:
    """torch's own .metadata, written again with what those versions have as Enum.__reduce_ex__."""
    from ckpttool.converters.dcp import dcp_metadata as _dcp_metadata
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    from ckpttool.engine.diff import diff

    source = Path(__file__).parents[2] / "fixtures" / "fsdp2_w3" / "ckpt"
    shutil.copytree(source, tmp_path / "there")
    with open(source / ".metadata", "rb") as f:
        metadata = pickle.load(f)
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    data = pickle.dumps(metadata)
    assert b"getattr" in data and b"TORCH_CONTIGUOUS_FORMAT" in data
    (tmp_path / "there" / ".metadata").write_bytes(data)
    if child:
        monkeypatch.setattr(_dcp_metadata, "_LARGE_BYTES", 0)
    assert diff(str(source), str(tmp_path / "there")).equal
    evil = data.replace(b"TORCH_CONTIGUOUS_FORMAT", b"__init_subclass_______z")
    assert len(evil) == len(data)
    (tmp_path / "there" / ".metadata").write_bytes(evil)
    with pytest.raises(Unsafe, match="getattr"):
        diff(str(source), str(tmp_path / "there"))


# ------------------------------------------------------------------------------------------- how long it may take

_N = 2_000_000  # bytes; without a bound, 50 MB of these take 10 to 20 s of CPU
_ENDLESS = {
    "lists": b"]" * _N + b".",
    "copies": b"K\x01" + b"2" * _N + b".",
    "popped": b"N0" * (_N // 2) + b"}.",
    "empty tuples that are popped": b"(1" * (_N // 2) + b"}.",
    "marks": b"(" * _N + b".",
    "memo": b"N" + b"".join(b"r" + struct.pack("<I", i) for i in range(_N // 5)) + b".",
    "calls": b"ccollections\nOrderedDict\nq\x00" + b"h\x00)R0" * (_N // 5) + b"}.",
    "tuples in tuples": b")" + b"\x85" * _N + b".",
    "lists in lists": b"]" + b"l(".join([b"("] * 300_000) + b"l.",
    "globals": b"(" + b"ca\nb\n" * (_N // 5) + b"l.",
    "text": b"(" + b"I1\n" * (_N // 3) + b"l.",
    "large integers": b"(" + b"\x8a\x01\x05" * (_N // 3) + b"l.",
    "references": b"}q\x00]" + (b"(" + b"h\x00" * 1000 + b"e") * 4000 + b".",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", _ENDLESS)
def test_work_that_no_pickler_leaves_is_refused_early(name: str) -> None:
    began = time.process_time()
    with pytest.raises(CkpttoolError):
        pickles.load(b"\x80\x02" + _ENDLESS[name])
    assert time.process_time() - began < 4  # 1.5 for the one with the most, alone on a core


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [2, 4])
def test_large_tables_of_a_training_state_are_read(protocol: int) -> None:
    values = {
        "vocabulary": {f"token{i}": i for i in range(200_000)},
        "seen": {i: 2 * i for i in range(100_000)},
        "tokens": [[i % 255, 70_000, -3, 0.5, None, True, 300] * 100 for i in range(200)],
        "order": list(range(400_000)),
        "pair": (0, 1, 2.5, None) * 5000,
        "names": tuple(map(str, range(100_000))),
    }
    assert pickles.load(pickle.dumps(values, protocol)) == (values, len(pickle.dumps(values, protocol)))


def test_a_key_that_is_twice_among_many_is_refused() -> None:
    pairs = b"".join(b"J" + struct.pack("<i", i) + b"K\x01" for i in (*range(1000), 7))
    for batches in (b"(" + pairs + b"u", b"(" + pairs[:-70] + b"u(" + pairs[-70:] + b"u"):
        with pytest.raises(Unsafe, match="the key 7 is set twice"):
            pickles.load(b"\x80\x02}" + batches + b".")


@pytest.mark.slow
def test_storages_pay_for_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary is as long as its embedding, so a file with tensors may have larger tables."""
    monkeypatch.setattr(pickles, "_BUDGET", 300_000)
    table = pickle.dumps({f"token{i}": i for i in range(300_000)}, 2)[2:-1]
    with pytest.raises(Unsafe, match="instructions, which no training state does"):
        pickles.load(b"\x80\x02" + table + b".")
    stored = b"(X\x07\x00\x00\x00storageK\x01X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ0"
    big = SimpleNamespace(length=150_000 * 64)
    assert len(pickles.load(b"\x80\x02" + stored + table + b".", persistent=lambda pid: big)[0]) == 300_000


@pytest.mark.parametrize(
    "made", [Evil(torch.FloatTensor, [1.0]), Evil(torch.FloatStorage, 3), Evil(torch.Tensor, 2)], ids=["tensor", "storage", "base"]
)  # fmt: skip
def test_numbers_that_a_call_would_make_are_refused(made: Any) -> None:
    assert "ckpttool never runs" in refusal(pickle.dumps({"weight": made}))


def test_a_child_that_returns_too_little_without_an_error_is_a_failure() -> None:
    def receive(stream: IO[bytes]) -> bytes:
        if len(got := stream.read()) < 9:
            raise EOFError
        return got

    assert sandbox.stream_from_child("codecs:encode", "nine bytes", 1, [], receive) == b"nine bytes"
    with pytest.raises(Corrupt, match="few: the reader failed"):
        sandbox.stream_from_child("codecs:encode", "few", 1, [], receive)
