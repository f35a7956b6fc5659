"""Modules that torch.save pickled whole are read as their state dicts, and no class is imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool.errors import Corrupt, Unsafe, Unsupported
from ckpttool.formats.pickles import BackReference, Global, Opaque
from ckpttool.formats.whole_modules import replace_modules

_CODE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(131, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2))
        self.lstm = nn.LSTM(6, 6)
        self.shared = self.blocks[0]
        self.head = nn.Linear(6, 131, bias=False)
        self.head.weight = self.embed.weight
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_parameter("none", None)
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_buffer("count", torch.tensor(7))
        self.attribute = torch.ones(3)
        object.__setattr__(self.head, "parent", [self])  # a cycle, which torch pickles

    def __setstate__(self, state):
        raise RuntimeError("the class was built")
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model of a class in a module that only this test can import."""
    (tmp_path / "their_code.py").write_text(_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    torch.manual_seed(0)
    made = importlib.import_module("their_code").Model()
    yield made
    sys.modules.pop("their_code", None)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the module with the class away."""
    monkeypatch.undo()
    del sys.modules["their_code"]


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("key", [None, "model", "net"])
def test_a_module_is_read_as_its_state_dict(
    model: Any, key: str | None, legacy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {n: t.clone() for n, t in model.state_dict().items()}
    whole = model if key is None else {key: model, "epoch": 3}
    torch.save(whole, tmp_path / "whole.pt", _use_new_zipfile_serialization=not legacy)
    forget(monkeypatch)
    result = ckpttool.convert(tmp_path / "whole.pt", tmp_path / "out.pt")
    assert "their_code" not in sys.modules
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    found = found["model" if key is None else key] if key or "model" in found else found
    assert list(found) == list(wanted)
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in wanted.items())
    (said,) = (n for n in result.notes if "pickled" in n)
    assert "a whole their_code.Model was pickled" in said and "2 tensors besides" in said  # passing, attribute


def test_a_module_among_other_values_and_one_without_tensors(tmp_path: Path) -> None:
    """As YOLO saves its EMA: beside a model that is None, and a loss that has no tensor."""
    half = nn.Linear(3, 2).half()
    torch.save({"model": None, "ema": half, "loss": nn.MSELoss(), "epoch": 1}, tmp_path / "yolo.pt")
    with ckpttool.open(tmp_path / "yolo.pt") as opened:
        names = [n for n in opened if n.endswith("weight")]
        assert len(names) == 1 and (opened[names[0]].numpy() == half.weight.detach().numpy()).all()
        assert any("MSELoss" in repr(v.data) for v in opened.checkpoint.values.values())


def module(modules: dict[str, Any], parameters: dict[str, Any] | None = None, passing: Any = None) -> Opaque:
    """A pickled module, as the reader of pickles has it."""
    out = Opaque(Global("m", "M"), ())
    out.state = {"_parameters": parameters or {}, "_buffers": {}, "_modules": modules}
    out.state["_non_persistent_buffers_set"] = passing
    return out


@pytest.mark.slow
def test_a_module_that_no_torch_pickles_is_refused_in_bounded_time() -> None:
    inner = module({}, {"w": 1})
    for i in range(25):
        inner.label = i
        inner = module({"a": inner, "b": BackReference(i)})
    with pytest.raises(Unsafe, match=r"more than 300,000 modules"):
        replace_modules(inner, "file", [])
    with pytest.raises(Corrupt, match="two tensors of one name"):
        replace_modules(module({"a": module({}, {"b": 1})}, {"a.b": 2}), "file", [])
    itself = module({"a": module({"b": BackReference(0)})})
    itself.label = 0
    with pytest.raises(Unsupported, match=r"module 'a\.b' contains itself"):
        replace_modules(itself, "file", [])
    assert replace_modules(module({"a": BackReference(9)}, {"w": 1}, passing=5), "file", []) == {"w": 1}
