"""Objects of Python in pickles: which are read as data, what is written of them, and what stays refused."""

from __future__ import annotations

import base64
import collections
import enum
import functools
import os
import pickle
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.errors import CkpttoolError, Corrupt, Unsafe
from ckpttool.formats import pickle_writer, pickles, values
from ckpttool.formats.pickles import BackReference, Global, Opaque, Ordered, Refused
from ckpttool.formats.shown_values import to_readable
from ckpttool.index.checkpoint import Value

PROTOCOLS = range(2, 6)
#: {"cfg": OmegaConf.create({"model": {"layers": [1, {"deep": True}], "name": "x"}, "lr": 0.1, "same": "${lr}", "none": None, "missing": "???"}),
#: "part": [cfg.model]}, as OmegaConf 2.3.1 pickles it, protocol 2
OMEGACONF = zlib.decompress(base64.b85decode(
    'c-'
    'mc*c~{dw6vbN*giui272FYn3+@YURopFB4K8uPn55HAG);Q5aP0BSIr@j^z(>$;;<xk7w86yw)0gG_?wvbt@_j&{q??1KQps($P<F#MYuRoXH0'
    'K+ho5;dzY4@nS+bc0J_XC3hn{;!OnyfZU?1r7#7|OLecFZ(tNNg`)(bN7b8iuKNv%rXMj!<vJnpV>7FpRqN=LIe8PSDk$nPc=YbUrgT={+BFEz'
    '3zgKk)*~(xfj96@>^pi5CX8kMT9NhA*s(iMlyNWz)A?F}4V7HMQ*0io!6#<hnVb<m1p^Ws&9DE@#;0x}oorCIMru!J2mJCq1q0yz&z}4D3{zq|'
    'vjri)&_uZZMy<S<v^on`^0KZkEw>?1*k-'
    'PhGWHluRP8_X_OOmBn`0U_Pd}jC5LHzs`rajOc*CL7k6sjgRpPA7A4We2UXb4)Mu#zKtt8hYcLz<bW$dzK0KT0w2}QVFLShmqjsVa$DkiakiUF'
    'RA#$*jO1noj%U)kz+7Lt5V~yFaH3~sMw&U9GjqzoX}+u25Ym2Pe#720-'
    '@Ae{dd^WmtB>WD*QwBOmekJ)oF^y$Ptv~ux<D^o6u8v4SXX{(CF$pK&d(JCSC#6lxk*O9N)xhBE7L6*^)-'
    'R(*?MmX+$=_2D@)p~9Ia~Lb|LCn8TB27ZZOutBA4dx3fz-'
    'e>G8h6gMvrCD5(!~)JFy$E7~=_u$DS;>M$A{$qei^!xP1<2`pvIrvmjN^ND0W%Q2rDc+pRL!7LN%D~!}hi8~;tBEqtwz7%+sQC|zZDN>gu)yz@'
    'f8hF<qv4w}#KfmPfci(F)y}nn}4+1M0^`n4Qq`sHbPdTb>z{#lUG|YVSBLO!HAq*HA3d{tW8Mr0Di{OR?dpYoD179+5y?++lUL4a02EGEe1%eD'
    '13UrD<UjmT>Mh4;yr}8UPtyYora+Ox;oF_<Eu*#?Hbp9{b;igp'
))  # fmt: skip


class Mode(enum.Enum):
    FAST = 1


class Outer:
    class Rights(enum.Flag):
        R, W, X = 1, 2, 4


class Node:
    """A node of a tree that knows its parent and its peers."""

    def __init__(self, name: str, parent: Node | None = None) -> None:
        self.name, self.parent = name, parent
        self.children: list[Node] = []
        if parent is not None:
            parent.children.append(self)


class Stateful:
    """Pickled as a call with one plain argument, and a state."""

    def __init__(self, n: int) -> None:
        self.n, self.m = n, 2

    def __reduce__(self) -> Any:
        return Stateful, (self.n,), {"m": self.m}


class Called:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def load(data: bytes) -> Any:
    return pickles.load(data)[0]


def through_json(x: Any) -> Any:
    """A value after values.json."""
    return values.decode(values.encode({"x": Value(("x",), x)}), "values.json")["x"].data


# ------------------------------------------------------------------------------------------------------------ which calls


@pytest.mark.skipif(sys.version_info < (3, 11, 4), reason="this Python pickles members of enums by their names")
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("member", [Mode.FAST, Outer.Rights.R, Outer.Rights.R | Outer.Rights.X])
def test_a_member_of_an_enum_is_written_so_that_no_init_runs(member: enum.Enum, protocol: int) -> None:
    found = load(pickle.dumps(member, protocol))
    assert isinstance(found, Opaque) and not found.call and found.args == (member.value,)
    written = pickle_writer.dump(found)
    assert pickle.loads(written) is member or pickle.loads(written) == member
    assert load(written) == found == through_json(found) and pickles.find_unwritable_reason(found) is None


def test_a_class_that_only_looks_like_an_enum_is_not_called_by_what_is_written(canary: Path) -> None:
    """psutil.Popen("reboot") is spelled as a member of an enum is."""
    psutil = pytest.importorskip("psutil")
    data = pickle.dumps(Called(psutil.Popen, str(canary)), 2)
    found = load(data)
    assert found == Opaque(Global("psutil", "Popen"), (str(canary),)) and pickles.find_unwritable_reason(found) is None
    script = canary.with_name("script")
    script.write_text(f"#!/bin/sh\ntouch {canary}\n")
    script.chmod(0o700)
    pickle.loads(pickle_writer.dump(load(pickle.dumps(Called(psutil.Popen, str(script)), 2))))
    time.sleep(0.2)
    assert not canary.exists()
    several = load(pickle.dumps(Called(psutil.Popen, ["touch", str(canary)]), 2))
    assert several.call and "a call of psutil.Popen" in str(pickles.find_unwritable_reason([{"a": (several,)}]))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", [Stateful(3), collections.UserList([1])], ids=["stateful", "list"])
def test_a_call_with_a_state_stays_a_call(value: Any, protocol: int) -> None:
    found = load(pickle.dumps(value, protocol))
    assert (pickles.find_unwritable_reason(found) is None) == (not isinstance(value, Stateful))
    assert found.state is not None and through_json(found) == found


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "value", [re.compile, os.path.join, functools.reduce, Mode.FAST.__class__.__call__], ids=range(4)
)
def test_calls_of_functions_stay_refused(value: Any, protocol: int) -> None:
    with pytest.raises(Unsafe, match=r"the pickle (calls|names)"):
        load(pickle.dumps(Called(value, "a", "b"), protocol))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("function", [os.system, eval, subprocess.check_output, subprocess.Popen, __import__])
def test_a_partial_and_a_factory_of_what_acts_are_refused(function: Any, protocol: int) -> None:
    for value in (functools.partial(function, "true"), collections.defaultdict(function)):
        with pytest.raises(Unsafe):
            load(pickle.dumps({"a": [value]}, protocol))
    state = pickle.dumps(functools.partial(dict, "true"), 2).replace(b"__builtin__\ndict", b"os\nsystem")
    with pytest.raises(Unsafe):
        load(state)


def glob(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


@pytest.mark.parametrize(
    "data",
    [
        glob("logging", "FileHandler") + b"X\x01\0\0\0a\x85R",  # a class of Python's own library
        glob("torch.hub", "load") + b"X\x01\0\0\0a\x85R",
        glob("job", "load") + b")R",
        glob("copyreg", "_reconstructor") + glob("os", "_wrap_close") + glob("builtins", "object") + b"N\x87R",
        glob("copyreg", "_reconstructor") + glob("job", "A") + glob("job", "B") + b"N\x87R",
        glob("operator", "getitem") + glob("os", "environ") + b"X\x01\0\0\0a\x86R",
        glob("operator", "getitem") + b"]X\x01\0\0\0a\x86R",
        glob("operator", "getitem") + glob("job", "A") + b")\x81X\x01\0\0\0a\x86R",
        glob("operator", "getitem") + glob("job", "A") + b"X\x01\0\0\0a\x86R",
        glob("operator", "or_") + glob("job", "A") + b")\x81K\x01\x86R",
        glob("types", "GenericAlias") + glob("os", "system") + b")\x86R",
        glob("numpy.random._pickle", "__generator_ctor") + b"X\x01\0\0\0a" + glob("os", "system") + b"\x86R",
        glob("numpy.random._pickle", "__generator_ctor") + b"X\x01\0\0\0a" + glob("job", "A") + b"\x86R",
        glob("numpy.random._pickle", "__generator_ctor") + glob("job", "A") + b")\x81\x85R",
        glob("numpy.random._pickle", "__bit_generator_ctor") + glob("psutil", "Popen") + b"\x85R",
        glob("numpy.random._pickle", "__bit_generator_ctor") + glob("numpy.random._pickle", "Popen") + b"\x85R",
        glob("numpy.random.bit_generator", "__pyx_unpickle_SeedSequence") + glob("job", "A") + b"K\x01N\x87R",
        glob("builtins", "type") + b"X\x01\0\0\0a)}\x87R",
        glob("builtins", "getattr") + glob("job", "Mode") + b"X\x08\0\0\0__init__\x86R",
        glob("job", "Mode.FAST.value.os"),
        glob("job", "mode.FAST"),
        glob("os", "Path.x"),
    ],
)
def test_what_looks_like_data_and_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(Unsafe):
        load(b"\x80\x02" + data + b".")


def test_hints_of_types_in_a_config_are_data() -> None:
    data = (
        b"\x80\x02"
        + glob("_operator", "getitem")
        + glob("typing", "Tuple")
        + glob("builtins", "float")
        + glob("builtins", "Ellipsis")
    )
    found = load(data + b"\x86\x86R.")
    assert (
        pickle.loads(pickle_writer.dump(found)) == tuple[float, ...]
        or str(pickle.loads(pickle_writer.dump(found))) == "typing.Tuple[float, ...]"
    )


def test_flags_of_python_3_11_2_are_data() -> None:
    """Flag.__reduce_ex__ of 3.11.0 to 3.11.3: operator.or_ of members by name."""
    cls = b"c__builtin__\ngetattr\n" * 2 + glob(__name__, "Outer") + b"X\x06\0\0\0Rights\x86R"
    members = [cls + b"X\x01\0\0\0" + name + b"\x86R" for name in (b"R", b"X")]
    found = load(b"\x80\x02" + glob("_operator", "or_") + b"".join(members) + b"\x86R.")
    assert found.args == (Global(__name__, "Outer.Rights.R"), Global(__name__, "Outer.Rights.X"))
    assert pickle.loads(pickle_writer.dump(found)) == Outer.Rights.R | Outer.Rights.X


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "made", [np.random.default_rng(3), np.random.RandomState(3), np.random.Philox(3)], ids=lambda x: type(x).__name__
)
def test_a_generator_of_numpy_is_data(made: Any, protocol: int) -> None:
    back = pickle.loads(pickle_writer.dump(through_json(load(pickle.dumps(made, protocol)))))
    draw = (
        (lambda x: x.random_raw(4).tolist()) if isinstance(made, np.random.Philox) else (lambda x: x.random(4).tolist())
    )
    assert type(back) is type(made) and draw(back) == draw(pickle.loads(pickle.dumps(made)))


def test_functions_that_stand_for_others_are_references_where_they_are_values() -> None:
    """collections.defaultdict(set) was refused: `set` is read by a function of ours."""
    for protocol in PROTOCOLS:
        value = [collections.defaultdict(set, {1: {2}}), collections.OrderedDict, complex]
        assert pickle.loads(pickle_writer.dump(load(pickle.dumps(value, protocol)))) == value


# ------------------------------------------------------------------------------------------------- objects that hold themselves


def family() -> Node:
    root = Node("root")
    first, second = Node("first", root), Node("second", root)
    Node("grandchild", first).peer = second  # type: ignore[attr-defined]
    return root


def shape(node: Node) -> list[Any]:
    """A tree, with whether every pointer leads to the very object that it should."""
    return [node.name, [(c.parent is node, shape(c)) for c in node.children]]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_object_that_holds_itself_is_read_and_written(protocol: int) -> None:
    root = family()
    found = load(pickle.dumps([root, (root.children[0], 1), {"a": root}], protocol))
    for kept in (found, through_json(found)):
        a, (b, one), again = pickle.loads(pickle_writer.dump(kept))
        assert shape(a) == shape(root) == shape(again["a"]) and one == 1
        assert a.children[0].children[0].peer is a.children[1]
        assert b.name == "first" and shape(b.parent) == shape(root) and b.parent.children[0] is b
    assert load(pickle_writer.dump(found)) == found, "a value is the same, wherever it was pickled"
    assert load(pickle.dumps(root, protocol)) == found[0]


@pytest.mark.slow
def test_one_of_many_objects_that_know_each_other_costs_what_it_holds() -> None:
    crowd = [Node(str(i)) for i in range(30)]
    for n in crowd:
        n.children = [*crowd]  # 30! ways from the first to the last
    flat = Node("flat")
    for i in range(3000):
        Node(str(i), flat)
    began = time.monotonic()
    for value in (crowd[0], flat):
        back = pickle.loads(pickle_writer.dump(load(pickle.dumps([value, value], 4))))
        assert [len(n.children) for n in back] == [len(value.children)] * 2
    assert time.monotonic() - began < 5
    deep = [Node(str(i)) for i in range(60)]
    for n in deep:
        n.children = [*deep]
    found = load(pickle.dumps([deep[0], {"lr": 0.1}], 4))  # from the first to the last, each in the one before
    assert found[1] == {"lr": 0.1}, "one value that cannot be read stops nobody who does not need it"
    assert isinstance(found[0], Refused) and "Node is nested deeper than 100" in found[0].why


def test_a_list_that_holds_itself_inside_an_object_is_refused() -> None:
    node = Node("x")
    node.children.append(node.children)  # type: ignore[arg-type]
    assert isinstance(load(pickle.dumps(node, 4)), Refused)
    with pytest.raises(Unsafe, match=r"nested deeper than 100"):
        load(pickle.dumps(node.children, 4))
    # an instance among its own arguments, which no pickler writes
    assert isinstance(load(b"\x80\x02" + b"]q\0" + glob("job", "A") + b"h\0\x85\x81q\x01a0h\x01."), Refused)


def test_a_config_of_omegaconf_is_read_shown_and_written_again() -> None:
    found = load(OMEGACONF)
    plain = {
        "model": {"layers": [1, {"deep": True}], "name": "x"},
        "lr": 0.1,
        "same": "${lr}",
        "none": None,
        "missing": "???",
    }
    assert to_readable(found) == {"cfg": plain, "part": [plain["model"]]}
    assert load(pickle_writer.dump(found)) == found == through_json(found)


def inner(x: Any) -> str:
    return values.encode({"x": Value(("x",), x)}).decode()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('{"$again": 0}', '{"$again": 7}'),
        ('{"$again": 0}', '{"$again": true}'),
        ('"label": 0', '"label": 1'),
        ('"label": 0', '"label": -1'),
        ('"label": 0, ', ""),
    ],
)
def test_references_that_lead_nowhere_are_damage(old: str, new: str) -> None:
    text = inner(load(pickle.dumps(family(), 2)))
    assert old in text
    with pytest.raises(Corrupt):
        values.decode(text.replace(old, new, 1).encode(), "values.json")


def test_a_reference_is_of_its_own_value_only() -> None:
    """Labels are counted from 0 in every outermost instance."""
    a = load(pickle.dumps(family(), 2))
    assert inner([a, a]).count('"label": 0') == 2
    lone = Opaque(Global("job", "A"), ())
    lone.state = [BackReference(0)]
    with pytest.raises(CkpttoolError):
        values.encode({"x": Value(("x",), [a, lone])})


def test_files_without_labels_are_read_as_before() -> None:
    old = b'{\n"x": {"path": ["x"], "data": {"$object": {"class": ["job", "A"], "call": true, "args": [1], "state": {"a": [1]}, "dict": [[1, 2]]}}}\n}\n'
    found = values.decode(old, "values.json")["x"].data
    assert (
        found.call and found.label is None and found.args == (1,) and values.encode({"x": Value(("x",), found)}) == old
    )


def test_an_ordered_dict_stays_one_and_a_dict_stays_a_dict() -> None:
    value = (collections.OrderedDict([((1, "a"), 1), (2, {})]), {1: 2})
    found = load(pickle.dumps(value, 2))
    assert [type(x) for x in found] == [Ordered, dict] == [type(x) for x in through_json(found)]
    back = pickle.loads(pickle_writer.dump(through_json(found)))
    assert back == value and type(back[0]) is collections.OrderedDict
