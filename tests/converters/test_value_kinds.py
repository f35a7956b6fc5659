"""docs/reference/values.md: what becomes of every kind of value in every layout that is written, with CPython, torch and DCP as judges."""

from __future__ import annotations

import argparse
import collections
import copyreg
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import re
import struct
import sys
import types
import uuid
import zoneinfo
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
import pydantic
import pytest
import torch
from peers import REPOSITORY, load_dcp, load_full

import ckpttool
from ckpttool import layouts
from ckpttool.errors import Unsupported
from ckpttool.formats import values
from ckpttool.index.checkpoint import Value


class Mode(enum.Enum):
    FAST, SLOW = 1, (2, "b")


class Outer:
    class Inner(enum.Enum):
        X = 0.5


class Text(str, enum.Enum):  # noqa: UP042  as most write it
    A = "a"


class Number(enum.IntEnum):
    ONE = 1


class Rights(enum.Flag):
    R, W, X = 1, 2, 4


class Point(NamedTuple):
    x: int
    y: str


@dataclasses.dataclass
class Options:
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    lr: float


@attrs.define
class Attributes:
    lr: float


class Model(pydantic.BaseModel):
    lr: float
    tags: list[str]


class Several(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)


class Node:
    """An object that points to its owner, as the nodes of OmegaConf do."""

    def __init__(self, content: Any, parent: Any = None) -> None:
        self.__dict__["_parent"], self.__dict__["_content"] = parent, content

    def owned(self) -> Node:
        for child in self._content.values() if isinstance(self._content, dict) else self._content:
            if isinstance(child, Node):
                child.__dict__["_parent"] = self
                child.owned()
        return self

    def __eq__(self, other: object) -> bool:
        """Whether the contents are equal, and every child points to the very node that it lies in."""
        if type(self) is not type(other) or not isinstance(other, Node):
            return False
        inside = other._content.values() if isinstance(other._content, dict) else other._content
        owned = all(not isinstance(c, Node) or c._parent is other for c in inside)
        return owned and bool(self._content == other._content)

    __hash__ = None  # type: ignore[assignment]


def train(x: int, y: int = 1) -> int:
    return x + y


def generator() -> torch.Generator:
    made = torch.Generator()
    made.manual_seed(7)
    return made


NAN = struct.unpack(">d", bytes.fromhex("7ff8dead0000beef"))[0]
CONFIG = Node({"model": Node({"layers": Node([1, 2, Node({"deep": "${lr}"})])}), "lr": 0.1}).owned()

#: {kind of the page: values of it}
KINDS: dict[str, list[Any]] = {
    "None, bool, int of up to 64 bytes, float (-0.0, inf, NaN with its bits), complex, str": [
        None, True, 1, 1.0, 1 << 70, -(1 << 500), -0.0, float("-inf"), NAN, complex(-0.0, NAN), "ä\ud800",
    ],
    "bytes, bytearray": [b"", b"\x00\xff", bytearray(b"x")],
    "list, tuple, set": [[1, (2, [3])], (1, [2, (3,)]), (), {1, "a", None}],
    "dict with keys of any kind, in its order": [{True: 1, 2: "b", (1, "a"): 3, b"k": 4, None: 5, 1.5: 6}, {2: {3: {}}, 1: []}],
    "frozenset": [frozenset((1, "a"))],
    "collections.OrderedDict inside a value": [(collections.OrderedDict([("b", 1), ("a", collections.OrderedDict())]),), collections.OrderedDict({2: 1, 1: 2})],
    "collections.Counter": [collections.Counter({30: 1, 80: 2})],
    "collections.defaultdict, deque, ChainMap, UserDict": [
        collections.defaultdict(list, {"a": [1]}), collections.defaultdict(collections.Counter), collections.deque([1, 2], 3),
        collections.ChainMap({"a": 1}, {"b": 2}), collections.UserDict(a=1),
    ],
    "namedtuple": [Point(1, "y")],
    "range, slice": [range(1, 9, 2), slice(1, None)],
    "torch.dtype, torch.device, torch.Size": [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3]), (torch.Size([]),)],
    "torch.Generator, numpy.random.Generator": [generator(), np.random.default_rng(7)],
    "tensor inside a tuple": [(torch.arange(6).reshape(2, 3).t(), 1)],
    "numpy array": [np.arange(6, dtype=np.float32).reshape(2, 3)],
    "numpy scalar": [np.float64(1.5), np.int64(-3)],
    "numpy array of text": [np.array(["a", "bc"])],
    "Enum, str Enum, IntEnum, Flag": [Mode.FAST, Mode.SLOW, Outer.Inner.X, Text.A, Number.ONE, Rights.R | Rights.X, [Mode.FAST, {1: Mode.SLOW}]],
    "functools.partial, types.SimpleNamespace, argparse.Namespace": [
        functools.partial(train, 1, y=2), functools.partial(torch.optim.AdamW, lr=0.1), types.SimpleNamespace(a=[1]), argparse.Namespace(lr=0.1),
    ],
    "datetime, date, time, timedelta, timezone, ZoneInfo": [
        datetime.datetime(2026, 1, 2, 3, tzinfo=zoneinfo.ZoneInfo("UTC")), datetime.date(2026, 1, 2), datetime.time(1, 2), datetime.timedelta(1, 2),
        datetime.timezone(datetime.timedelta(hours=2)), zoneinfo.ZoneInfo("UTC"),
    ],
    "pathlib, UUID, Decimal, Fraction": [pathlib.PurePosixPath("/a/b"), uuid.UUID(int=5), decimal.Decimal("1.10"), fractions.Fraction(1, 3)],
    "re.Pattern": [re.compile("a+", re.IGNORECASE)],
    "dataclass, attrs and pydantic instances, instances of other classes": [Options(0.1), Frozen(0.1), Attributes(0.1), Model(lr=0.1, tags=["a"])],
    "OmegaConf's DictConfig and ListConfig, other objects that point to their owners": [CONFIG, CONFIG._content["model"]._content["layers"], (CONFIG, 1)],
    "reference to a class or function": [Options, Outer.Inner, [dict, len, collections.Counter], train],
    "exception of Python": [ValueError("x", 1), KeyError("k")],
    "instance that is pickled as a call of its class with several arguments": [Several(1, "x")],
}  # fmt: skip
WRITTEN = [
    name for name in layouts.list_writable_layouts() if name not in ("zero1", "zero2")
]  # which are written as zero3 is


def table() -> dict[str, dict[str, str]]:
    """{kind: {column: what the page says}}."""
    lines = (REPOSITORY / "docs" / "reference" / "values.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]}


TABLE = table()


def seen(x: Any) -> Any:
    """An object as something that equals that of an equal object, with types, and numbers by their bits."""
    if isinstance(x, float) and type(x) is float:
        return struct.pack(">d", x)
    if type(x) is complex:
        return seen(x.real), seen(x.imag)
    if isinstance(x, (torch.Tensor, np.ndarray, np.generic)):
        return type(x), str(x.dtype), tuple(x.shape), x.tolist()
    if isinstance(x, torch.Generator):
        return x.get_state().tolist()
    if isinstance(x, np.random.Generator):
        return x.bit_generator.state
    if isinstance(x, functools.partial):
        return type(x), x.func, x.args, x.keywords
    if isinstance(x, BaseException):
        return type(x), x.args
    if isinstance(x, collections.deque):
        return type(x), list(x), x.maxlen
    if isinstance(x, collections.defaultdict):
        return type(x), list(x.items()), x.default_factory
    if isinstance(x, dict):
        return type(x), [(seen(k), seen(v)) for k, v in x.items()]
    if type(x) in (list, tuple):
        return type(x), [seen(v) for v in x]
    return type(x), x


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small job that also holds one entry for each value."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    extra = {f"{k}_{i}": x for k, of in enumerate(KINDS.values()) for i, x in enumerate(of)}
    path = tmp_path_factory.mktemp("kinds") / "source.pt"
    for cls in [c for c in copyreg.dispatch_table if issubclass(c, BaseException)]:
        del copyreg.dispatch_table[cls]  # dask's tblib, of other tests, pickles exceptions in a way of its own
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 1, "extra": extra}, path)
    return path


@pytest.fixture(scope="module")
def written(source: Path) -> Callable[[str], tuple[Path, dict[str, str]]]:
    """layout -> (the source in it, {dropped: why}); once for all tests."""

    @functools.cache
    def write(to: str) -> tuple[Path, dict[str, str]]:
        layout = layouts.find(to)
        out = source.with_name(to + {"full": ".pt", "audit": ".tar.zst", "lightning": ".ckpt"}.get(to, ""))
        done = ckpttool.convert(
            source, out, to=to, drop=True, world_size=2 if "world_size" in layout.writer_uses else None,
            options=layout.options(include_optimizer=True) if to == "hf" and layout.options else None,
        )  # fmt: skip
        return out, {name: why for name, _, why in done.dropped}

    return write


def read(path: Path) -> dict[str, str]:
    """{name: text} of the values in a checkpoint; the text is that of values.json, which is the same for the same values alone."""
    with ckpttool.open(path) as opened:
        return {n: values.encode({"x": Value(("x",), v.data)}).decode() for n, v in opened.locate().values.items()}


def test_the_page_has_every_kind_and_every_layout() -> None:
    assert list(TABLE) == list(KINDS)
    page = (REPOSITORY / "docs" / "reference" / "values.md").read_text(encoding="utf-8")
    for name in layouts.list_writable_layouts():
        assert name in ("full", "dcp", "hf", "audit") or f"`{name}`" in page


@pytest.mark.parametrize("to", WRITTEN)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_value_in_a_layout(kind: str, to: str, source: Path, written: Any) -> None:
    said = TABLE[kind][to if to in ("full", "dcp", "hf", "audit") else "others"]
    out, dropped = written(to)
    before, after = texts(source), texts(out)
    number = list(KINDS).index(kind)
    for i in range(len(KINDS[kind])):
        name = f"extra.{number}_{i}"
        if said == "listed":
            assert name in dropped and name not in after, name
        elif said == "kept":
            assert name not in dropped and before[name] == after[name], name
        else:
            assert name not in dropped and after.get(name) != before[name], name


@functools.cache
def texts(path: Path) -> dict[str, str]:
    return read(path)


@pytest.mark.parametrize("by", ["full", "dcp", "dcp of hf", "dcp of audit"])
def test_torch_builds_the_same_objects(by: str, tmp_path: Path, written: Any) -> None:
    """What `kept` says, by torch.load(weights_only=True) of full, and by dcp.load of dcp, also of what was in hf and audit between."""
    if " of " in by:
        ckpttool.convert(written(by.rpartition(" ")[2])[0], tmp_path / "out", to="dcp", world_size=1, drop=True)
        found = load_dcp(tmp_path / "out")["extra"]
    elif by == "dcp":
        found = load_dcp(written("dcp")[0])["extra"]
    else:
        found = load_full(written("full")[0])["extra"]
    compared = 0
    for k, (kind, of) in enumerate(KINDS.items()):
        if TABLE[kind][by[:4].strip()] == "kept":
            for i, x in enumerate(of):
                if "dcp" in by and isinstance(x, dict) and not (type(x) is dict and all(type(k) is str for k in x)):
                    continue  # torch's own form is a dict with text for keys; ckpttool's readers give the value back
                assert seen(found[f"{k}_{i}"]) == seen(x), (kind, x)
                compared += 1
    assert compared > 25
    as_torch = found[f"{list(KINDS).index('numpy array')}_0"], found[f"{list(KINDS).index('numpy scalar')}_1"]
    if by == "full":
        assert (
            as_torch[0].tolist() == [[0, 1, 2], [3, 4, 5]] and as_torch[0].dtype == torch.float32 and as_torch[1] == -3
        )


def test_what_cannot_be_held_stops_a_conversion_and_not_one_that_leaves_it(source: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"full cannot hold .* first \"extra\..*--drop|drop=True"):
        ckpttool.convert(source, tmp_path / "out.pt")
    with pytest.raises(Unsupported, match=r"dcp cannot hold 1 of .*a call of .*Several"):
        ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=1)
    ckpttool.convert(source, tmp_path / "weights.pt", only=["model"])
    ckpttool.convert(source, tmp_path / "hf", to="hf")
    shown = " ".join(ckpttool.inspect(source).notes)
    assert re.search(r"\d+ values hold instances of classes, kept as data: ", shown)


@pytest.fixture
def omegaconf(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """A class that pickles as OmegaConf's; the package itself is no dependency of the tests."""
    module = types.ModuleType("omegaconf.dictconfig")
    module.DictConfig = type("DictConfig", (Node,), {"__module__": module.__name__})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "omegaconf", types.ModuleType("omegaconf"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module.DictConfig


def test_inspect_shows_a_config_as_what_it_configures(omegaconf: type, tmp_path: Path) -> None:
    from commands import ckpttool_here

    config = omegaconf({"model": omegaconf({"layers": 2}), "seed": 7}).owned()
    partial = functools.partial(torch.optim.AdamW, lr=0.1)
    torch.save(
        {
            "model": {"w": torch.ones(2)},
            "hyper_parameters": {"cfg": config, "mode": Mode.FAST, "opt": partial, "n": {1: {2: 3}}},
        },
        tmp_path / "a.ckpt",
    )
    shown = ckpttool_here("inspect", "--tree", tmp_path / "a.ckpt").stdout
    for line in (
        "layers = 2",
        "seed = 7",
        "2 = 3",
        "mode = test_value_kinds.Mode" + ("(1)" if sys.version_info >= (3, 11, 4) else ".FAST"),
        "opt = functools.partial(torch.optim.adamw.AdamW, lr=0.1)",
    ):
        assert line in shown
    assert "_parent" not in shown


def test_an_entry_that_cannot_be_read_stops_only_who_needs_it(tmp_path: Path) -> None:
    """An object deeper than 100, and a sparse tensor among the moments."""
    chain = Node({})
    for _ in range(60):
        chain = Node({"next": chain}).owned()
    optim = {"state": {0: {"exp_avg": torch.eye(3).to_sparse()}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"model": {"w": torch.eye(3)}, "optim": optim, "chain": chain}, tmp_path / "a.pt")
    notes = ckpttool.inspect(tmp_path / "a.pt").notes
    assert any("was left out: it cannot be read" in n and "1 more cannot be read" in n for n in notes)
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "hf", to="hf")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "model.pt", only=["model"])
    dropped = ckpttool.convert(tmp_path / "a.pt", tmp_path / "b", to="dcp", world_size=1, drop=True).dropped
    assert {name: "cannot be read" in why for name, _, why in dropped} == {
        "optim.state.w.exp_avg": True,
        "extra.chain": True,
    }
    for act in (ckpttool.open, ckpttool.verify, ckpttool.digest):
        with pytest.raises(Unsupported, match="cannot be read"):
            act(tmp_path / "a.pt")
    with pytest.raises(Unsupported, match="cannot be read"):
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "c", to="dcp", world_size=1)
    torch.save({"model": {"w": torch.eye(3).to_sparse(), "v": torch.eye(2)}}, tmp_path / "sparse.pt")
    assert any("was left out" in n for n in ckpttool.inspect(tmp_path / "sparse.pt").notes)
    with pytest.raises(Unsupported, match=r"cannot be read.*sparse"):
        ckpttool.convert(tmp_path / "sparse.pt", tmp_path / "d", to="hf", drop=True)


def test_a_state_without_tensors_is_not_written_as_a_file(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "trainer": {"step": 3}}, tmp_path / "in.pt")
    with pytest.raises(Unsupported, match="the checkpoint holds no tensors, and a file") as e:
        ckpttool.convert(tmp_path / "in.pt", tmp_path / "out.pt", only=["trainer"])
    assert e.value.code == "CKPT0317" and not list(tmp_path.glob(".out*"))
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="dcp", world_size=1, only=["trainer"])
    with ckpttool.open(tmp_path / "out") as opened:
        assert opened.checkpoint.value("trainer.step") == 3


@pytest.mark.parametrize("to", ["dcp", "lightning", "torchtitan", "full", "zero3"])
def test_a_dict_with_other_keys_than_texts_in_a_model_comes_back(tmp_path: Path, to: str) -> None:
    """DCP makes entries of such keys, of which the reader makes entries of the model."""
    extra = {1: {True: "x"}, "b": [{None: 4}]}
    torch.save({"model": {"a.weight": torch.ones(2), "a._extra_state": extra}}, tmp_path / "in.pt")
    out = tmp_path / ("out.pt" if to == "full" else "out")
    ckpttool.convert(tmp_path / "in.pt", out, to=to, **({} if to == "full" else {"world_size": 2}))
    with ckpttool.open(out) as found:
        assert {n: v.data for n, v in found.checkpoint.values.items()} == {"model.a._extra_state": extra}


def test_a_key_that_is_nan_does_not_set_ranks_apart(tmp_path: Path) -> None:
    """Every rank's file has a NaN of its own, and Python finds a NaN in a dict as the same object alone."""
    nan = float("nan")
    torch.save({"model": {"a.weight": torch.ones(2)}, "args": {nan: 1, "x": nan}}, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="zero3", world_size=2)
    with ckpttool.open(tmp_path / "out") as found:
        values = {n: v.data for n, v in found.checkpoint.values.items()}
    assert len(values) == 1 and repr(values) in ("{'extra.args': {nan: 1, 'x': nan}}", "{'args': {nan: 1, 'x': nan}}")
