"""safetensors headers, with the library as the other side: the same bytes when written, the same slots when read."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

import ckpttool
from ckpttool.errors import CkpttoolError, Corrupt, Unsafe, Unsupported
from ckpttool.formats import safetensors_header
from ckpttool.index.checkpoint import ITEMSIZE, PACKED
from ckpttool.storage.source import Source

#: Several numbers share a byte in the others, and the library counts numbers; see below.
WHOLE = [d for d in safetensors_header.CODES if d not in PACKED]
NAMES = st.text('abz.0_é日"\\/\n\x07\x7f ', min_size=1, max_size=12)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def zeros(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return (
        torch.zeros(shape, dtype=torch.uint8)
        .repeat(*[1] * max(0, len(shape) - 1), 1)
        .new_zeros(prod(shape) * ITEMSIZE[dtype])
        .view(getattr(torch, dtype))
        .reshape(shape)
    )


def library(tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str] | None) -> bytes:
    return bytes(safetensors.torch.save({n: zeros(d, s) for n, (d, s) in tensors.items()}, metadata))


def ours(tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str] | None) -> bytes:
    rows = sorted(((n, d, s) for n, (d, s) in tensors.items()), key=lambda r: safetensors_header.sort_key(r[0], r[1]))
    return safetensors_header.encode_header(rows, metadata or {})


@pytest.mark.slow
@given(st.dictionaries(NAMES, st.tuples(st.sampled_from(WHOLE), SHAPES), min_size=1, max_size=12), st.booleans())
@settings(max_examples=150)
def test_a_header_is_byte_for_byte_what_the_library_writes(
    tensors: dict[str, tuple[str, tuple[int, ...]]], named: bool
) -> None:
    metadata = {"format": "pt"} if named else None
    whole = library(tensors, metadata)
    head = ours(tensors, metadata)
    assert whole[: len(head)] == head
    assert len(whole) == len(head) + sum(prod(s) * ITEMSIZE[d] for d, s in tensors.values())


def test_every_dtype_stands_where_the_library_puts_it() -> None:
    tensors = {f"t{i}": (d, (2,)) for i, d in enumerate(reversed(WHOLE))}
    assert library(tensors, {"format": "pt"}).startswith(ours(tensors, {"format": "pt"}))


def test_a_tensor_of_half_bytes_is_written_and_read_as_the_library_does(tmp_path: Path) -> None:
    whole = library({"w": ("float4_e2m1fn_x2", (2, 4))}, None)
    (tmp_path / "f").write_bytes(whole)
    with Source(tmp_path) as source:
        (slot,) = safetensors_header.read_slots(source, "f").values()
    assert slot[:2] == ("float4_e2m1fn_x2", (2, 4)) and slot.length == 8
    assert whole.startswith(ours({"w": ("float4_e2m1fn_x2", (2, 4))}, None))


@given(st.dictionaries(NAMES, st.tuples(st.sampled_from(WHOLE), SHAPES), min_size=1, max_size=8))
@settings(max_examples=50)
def test_what_the_library_wrote_is_read(tmp_path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    whole = library(tensors, {"format": "pt", "step": "3"})
    (tmp_path / "f").write_bytes(whole)
    with Source(tmp_path) as source:
        slots, metadata = safetensors_header.read_header(source, "f")
    assert metadata == {"format": "pt", "step": "3"}
    assert {n: (s.dtype, s.shape) for n, s in slots.items()} == tensors
    at = len(ours(tensors, metadata))
    for s in slots.values():
        assert (s.offset, s.length) == (at, prod(s.shape) * ITEMSIZE[s.dtype])
        at += s.length
    assert at == len(whole)


# --------------------------------------------------------------------------------------------------------- refused


def entry(begin: Any = 0, end: Any = 4, dtype: Any = "F32", shape: Any = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


def file(header: Any, data: bytes = b"1234", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def refusal(folder: Path, data: bytes, kind: type[CkpttoolError]) -> str:
    """The message; the library must not read the file either, unless we are the stricter."""
    (folder / "f").write_bytes(data)
    with Source(folder) as source, pytest.raises(CkpttoolError) as e:
        safetensors_header.read_header(source, "f")
    assert type(e.value) is kind, e.value
    return str(e.value)


REFUSED: dict[str, tuple[bytes, type[CkpttoolError], str]] = {
    "empty": (b"", Corrupt, "has 0 bytes"),
    "shorter than its length": (b"1234567", Corrupt, "has 7 bytes"),
    "a header past the end": (file({"a": entry()}, length=10_000), Corrupt, "the header needs 10000 bytes"),
    "a header of any length": (file({}, length=1 << 63), Unsafe, "a header of 9223372036854775808 bytes"),
    "no JSON": (file(b"{nonsense"), Corrupt, "not JSON"),
    "no object": (file(b"[1, 2]"), Corrupt, "does not begin with {"),
    "space before the object": (file(b' {"a": 1}'), Corrupt, "does not begin with {"),
    "not UTF-8": (file(b'{"\xff": 1}'), Corrupt, "not JSON"),
    "two values": (file(b"{}{}", b""), Corrupt, "not JSON"),
    "an integer of any length": (file(b'{"a": ' + b"9" * 10_000 + b"}"), Corrupt, "not JSON"),
    "deep": (file(b'{"a":' + b"[" * 200_000), Unsafe, "nested deeper than 350"),
    "a name twice": (file(b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry()).encode() + b"}"), Unsafe, "is there twice"),
    "a key of an entry twice": (file(b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}'), Unsafe, "is there twice"),
    "metadata that is no map": (file({"__metadata__": [1], "a": entry()}), Corrupt, "not a map of strings"),
    "metadata of numbers": (file({"__metadata__": {"a": 1}, "a": entry()}), Corrupt, "not a map of strings"),
    "an entry that is no object": (file({"a": 1}), Corrupt, 'the entry of "a" is damaged'),
    "an entry without shape": (file({"a": {"dtype": "F32", "data_offsets": [0, 4]}}), Corrupt, "is damaged"),
    "an entry with more": (file({"a": {**entry(), "x": 1}}), Corrupt, "is damaged"),
    "an unknown dtype": (file({"a": entry(dtype="F99")}), Unsupported, "dtype 'F99', which torch does not have"),
    "a dtype that is a number": (file({"a": entry(dtype=5)}), Unsupported, "which torch does not have"),
    "a shape that is no list": (file({"a": entry(shape="1")}), Corrupt, "has shape 1"),
    "a negative shape": (file({"a": entry(shape=(-1,))}), Corrupt, "has shape [-1]"),
    "a shape of fractions": (file({"a": entry(shape=(1.0,))}), Corrupt, "has shape [1.0]"),
    "a shape of truths": (file({"a": entry(shape=(True,))}), Corrupt, "has shape [True]"),
    "a shape of any size": (file({"a": entry(shape=(1 << 60,))}), Corrupt, "has shape"),
    "a shape that overflows": (file({"a": entry(shape=(1 << 40, 1 << 40))}), Corrupt, "but its range has 4"),
    "a shape of many dimensions": (file({"a": entry(shape=(1,) * 65)}), Corrupt, "has shape"),
    "offsets that are fractions": (file({"a": entry(0.0, 4.0)}), Corrupt, "has data_offsets [0.0, 4.0]"),
    "offsets that are text": (file({"a": entry("0", "4")}), Corrupt, "has data_offsets"),
    "negative offsets": (file({"a": entry(-4, 0)}), Corrupt, "has data_offsets [-4, 0]"),
    "three offsets": (file({"a": {**entry(), "data_offsets": [0, 4, 8]}}), Corrupt, "has data_offsets"),
    "offsets backwards": (file({"a": entry(4, 0)}), Corrupt, "but its range has -4"),
    "a shape of other bytes": (file({"a": entry(shape=(2,))}), Corrupt, "8 bytes, but its range has 4"),
    "a hole before": (file({"a": entry(4, 8)}, b"12345678"), Corrupt, "begins at byte 4 of the data, 0 was expected"),
    "a hole between": (file({"a": entry(), "b": entry(8, 12)}, b"1" * 12), Corrupt, "hole or overlap"),
    "an overlap": (file({"a": entry(), "b": entry(2, 6)}, b"123456"), Corrupt, "hole or overlap"),
    "two of one place": (file({"a": entry(), "b": entry()}), Corrupt, "hole or overlap"),
    "cut off": (file({"a": entry()}, b"123"), Corrupt, "The copy is incomplete"),
    "more behind": (file({"a": entry()}, b"12345"), Unsafe, "1 bytes follow the last tensor"),
    "only bytes": (file({}, b"x"), Unsafe, "1 bytes follow"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_damaged_or_ambiguous_file_is_refused(name: str, tmp_path: Path) -> None:
    data, kind, said = REFUSED[name]
    assert said in refusal(tmp_path, data, kind)


@pytest.mark.parametrize("dtype", [[], {}, ["F32"]])
def test_a_dtype_that_is_a_list_or_an_object_is_refused(dtype: Any, tmp_path: Path) -> None:
    assert "which torch does not have" in refusal(tmp_path, file({"a": entry(dtype=dtype)}), Unsupported)


def test_a_name_with_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    refusal(tmp_path, file(b'{"a\\ud800":' + json.dumps(entry()).encode() + b"}"), Corrupt)


@pytest.mark.slow
def test_a_name_twice_among_very_many_is_found_at_once(tmp_path: Path) -> None:
    import time

    one = json.dumps(entry(0, 0, shape=(0,)))
    text = ",".join(f'"n{i}":{one}' for i in range(12_000))
    spent = []
    for _ in range(3):  # the collector may come in between: the process has seen many tests
        began = time.process_time()
        refusal(tmp_path, file(f'{{{text},"n11999":{one}}}'.encode(), b""), Unsafe)
        spent.append(time.process_time() - began)
    assert min(spent) < 0.5


@pytest.mark.parametrize("name", [n for n in REFUSED if n not in ("a name twice", "an entry with more", "only bytes")])
def test_what_the_library_refuses_is_refused_by_us_and_hardly_more(name: str) -> None:
    stricter = {"a key of an entry twice", "a shape of many dimensions", "metadata that is no map"}
    if name not in stricter:
        with pytest.raises((SafetensorError, KeyError, ValueError, TypeError)):
            safetensors.torch.load(REFUSED[name][0])


def test_what_was_written_is_opened_with_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    there = safetensors.safe_open

    def refuse_the_third(path: str, framework: str) -> Any:
        opened.append(Path(path).name)
        if len(opened) == 3:
            raise SafetensorError("not this one")
        return there(path, framework=framework)

    source = Path(__file__).parents[2] / "fixtures" / "fsdp2_w3" / "ckpt"
    monkeypatch.setattr(safetensors, "safe_open", refuse_the_third)
    with pytest.raises(Corrupt, match=r"the safetensors library cannot open what was written \(not this one\)"):
        ckpttool.convert(source, tmp_path / "out", to="hf", options=ckpttool.HfOptions(max_shard_bytes=20_000))
    assert opened == sorted(set(opened)) and all(n.startswith("model-0000") for n in opened)
    assert list(tmp_path.iterdir()) == []
    ckpttool.convert(source, tmp_path / "out", to="hf")
    assert opened[3:] == ["model.safetensors"]


@pytest.mark.parametrize("dtype", safetensors_header.CODES)
def test_the_library_opens_every_dtype_that_is_written(tmp_path: Path, dtype: str) -> None:
    one = (1,) if dtype in PACKED else ()  # the format has no single number of four or six bits
    tensors = [("x", dtype, (2,)), ("one", dtype, one), ("empty", dtype, (0, 3))]
    head = safetensors_header.encode_header(tensors, {"format": "pt"})
    (tmp_path / "f.safetensors").write_bytes(head + bytes(3 * ITEMSIZE[dtype]))
    with Source(tmp_path) as source:
        safetensors_header.check_with_library(source, ["f.safetensors", "other.bin"])


def test_empty_tensors_anywhere_are_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(
        file({"z": entry(0, 0, shape=(0, 3)), "a": entry(), "e": entry(4, 4, shape=(0,)), "__metadata__": None})
    )
    with Source(tmp_path) as source:
        assert set(safetensors_header.read_slots(source, "f")) == {"z", "a", "e"}


@given(st.binary(max_size=40))
def test_any_json_is_a_value_or_an_error_of_ours(data: bytes) -> None:
    try:
        safetensors_header.parse(data, "x")
    except CkpttoolError:
        pass


def test_more_tensors_than_a_file_has_room_for_are_refused_before_the_header_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes time, and an empty one takes none of the file."""
    monkeypatch.setattr(safetensors_header, "_MOST_TENSORS", 10)
    safetensors.torch.save_file({f"t{i}": torch.zeros(0) for i in range(11)}, tmp_path / "empty.safetensors")
    with pytest.raises(Unsafe, match="11 tensors in 0 bytes; no checkpoint has more than 10 there"):
        ckpttool.verify(tmp_path / "empty.safetensors")
    safetensors.torch.save_file({f"t{i}": torch.zeros(16) for i in range(11)}, tmp_path / "some.safetensors")
    ckpttool.verify(tmp_path / "some.safetensors")
