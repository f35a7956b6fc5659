"""JSON of others: what is refused before it is parsed, and that honest records of any size pass."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.bounded_json import MAX_DEPTH, _extract_structure, parse
from ckpttool.errors import CkpttoolError, Corrupt, Unsafe

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a"\\[]{},:\n😀'), max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.sampled_from('a"\\[{,:'), max_size=3), inner, max_size=4),
    max_leaves=30,
)  # fmt: skip
N = 3_000_000


def depth(x: Any) -> int:
    """Of containers with at most one thing in them."""
    n = 0
    while isinstance(x, (list, dict)):
        n, x = n + 1, next(iter(x.values() if isinstance(x, dict) else x), None)
    return n


def counts(x: Any) -> tuple[int, int, int]:
    """(lists, objects, strings with keys) of a tree."""
    out = [isinstance(x, list), isinstance(x, dict), isinstance(x, str)]
    for v in [*x.keys(), *x.values()] if isinstance(x, dict) else x if isinstance(x, list) else ():
        out = [a + b for a, b in zip(out, counts(v), strict=True)]
    return int(out[0]), int(out[1]), int(out[2])


@given(VALUES, st.booleans(), st.sampled_from((None, 1)))
def test_what_is_counted_is_what_the_text_holds(x: Any, escaped: bool, indent: int | None) -> None:
    text = json.dumps(x, ensure_ascii=escaped, indent=indent).encode()
    structure, strings = _extract_structure(text)
    assert (structure.count(b"["), structure.count(b"{"), strings) == counts(x)
    assert parse(text, "x") == x


BOMBS = {
    "empty lists": b"[" + b"[]," * (N // 3) + b"[]]",
    "empty objects": b"[" + b"{}," * (N // 3) + b"{}]",
    "objects of one key": b"[" + b'{"":0},' * (N // 7) + b"{}]",
    "lists in lists": b"[" + (b"[" * 200 + b"]" * 200 + b",") * (N // 401) + b"[]]",
    "lists behind a string with a quote": b'["\\"",' + b"[]," * (N // 3) + b"[]]",
    "lists behind a string that ends in a backslash": b'["\\\\",' + b"[]," * (N // 3) + b"[]]",
    "short strings": b"[" + b'"ab",' * (N // 5) + b"[]]",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_no_text_takes_many_times_its_length(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.bounded_json._FLOOR", 1 << 20)  # so that a text of three megabytes is a large one
    data = BOMBS[kind]
    tracemalloc.start()
    try:
        parse(data, "x")
        refused = False
    except Unsafe as e:
        refused = True
        assert "would fill the memory" in str(e)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 * len(data)
    assert refused or kind in ("short strings",)


def test_depth() -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        assert depth(parse((opening * 349 + "[]" + closing * 349).encode(), "x")) == MAX_DEPTH
        for n in (350, 100_000):
            with pytest.raises(Unsafe, match="nested deeper than 350"):
                parse((opening * n + "[]" + closing * n).encode(), "x")
    assert parse(b'["' + b"[" * 1000 + b'"]', "x") == ["[" * 1000]
    with pytest.raises(Corrupt, match="not JSON"):
        parse(b"[[[", "x")
    with pytest.raises(Unsafe, match="nested deeper"):
        parse(b"[" * 100_000, "x")


def test_other_refusals() -> None:
    with pytest.raises(Unsafe, match="'a' is there twice"):
        parse(b'{"b": {"a": 1, "a": 1}}', "x")
    for text in (b"", b"{", b"[1,]", b"\xff", b'"a', b"{]", b"9" * 5000):
        with pytest.raises(Corrupt, match="x: not JSON"):
            parse(text, "x")


def test_dense_honest_records_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the floor, which is for short texts: shapes of no dimension and names of three letters are the densest there are."""
    monkeypatch.setattr("ckpttool.bounded_json._FLOOR", 1 << 16)
    header = {f"{i:x}.w": {"dtype": "F32", "shape": [4], "data_offsets": [4 * i, 4 * i + 4]} for i in range(20_000)}
    record = {"tensors": {f"model.{i}": ["float32", [], f"{i:064x}"] for i in range(20_000)}, "made": {}, "added": []}
    index = {"metadata": {}, "weight_map": {f"{i:x}.w": "model-00001-of-00002.safetensors" for i in range(20_000)}}
    for found in (header, record, index):
        for indent in (None, 1):
            parse(json.dumps(found, indent=indent, separators=(",", ":")).encode(), "x")


@pytest.mark.parametrize(
    "bomb", [b"[" * 5000 + b"]" * 5000, b"[" + b"[]," * 4_000_000 + b"[]]", b"[", b"{}", b'{"tensors": 3}']
)
def test_a_hostile_ckpttool_json_is_no_traceback(tmp_path: Path, bomb: bytes, small_pt: Path) -> None:
    """Of a layout that looks into it when it is opened, and of one that does not."""
    for to in ("zero3", "dcp"):
        out = tmp_path / to
        ckpttool.convert(small_pt, out, to=to, world_size=2, drop=True)
        (out / "ckpttool.json").write_bytes(bomb)
        with ckpttool.open(out) as opened:
            assert opened.checkpoint.tensors
        try:
            ckpttool.verify(out, read_data=True)
        except CkpttoolError:
            pass


@pytest.fixture
def small_pt(tmp_path: Path) -> Path:
    import torch

    w = torch.arange(12.0).reshape(3, 4)
    slots = {"step": torch.tensor(3.0), "exp_avg": w, "exp_avg_sq": w}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}]
    torch.save({"model": {"w": w}, "optimizer": {"state": {0: slots}, "param_groups": groups}}, tmp_path / "x.pt")
    return tmp_path / "x.pt"
