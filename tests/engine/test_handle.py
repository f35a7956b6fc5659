"""`opened[name]` against numpy and torch: slices of every layout are those of the whole tensor, and read little more."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import stores
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices
from peers import FIXTURES, FLAT, ORIGINALS, Original
from safetensors.torch import save_file
from torch import Tensor

import ckpttool
from ckpttool.engine.handle import TensorHandle, UnknownTensor
from ckpttool.errors import Corrupt, UsageError, name_flags
from ckpttool.index.records import Records
from ckpttool.storage.remote import RemoteSource
from ckpttool.storage.source import Source

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable")

CASES = (
    "fsdp2_w3", "fsdp2_w2_zstd", "fsdp2_w4_tp", "fsdp2_w2_stserial", "awkward_w3", "full_w1", "hf_llama", "hf_tied",
    "universal_z3_w2", "zero2_w3_bf16", "zero3_w4", "fsdp1_w3_uop0", "fsdp1_w4_uop1",
)  # fmt: skip
ALL = {o.label: o for o in [*ORIGINALS, *FLAT] if o.case in CASES}
ARCHIVE = "audit"


@pytest.fixture(scope="module", autouse=True)
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "a.tar.zst"
    ckpttool.export(FIXTURES / "zero2_w3_bf16" / "ckpt", path, in_ledger=False)
    opened_of.cache_clear()
    _ARCHIVES.append(path)
    return path


_ARCHIVES: list[Path] = []


@cache
def opened_of(label: str) -> tuple[Any, dict[str, Tensor]]:
    """(an open checkpoint, its tensors as the job had them: {canonical name: tensor})."""
    o = ALL[label] if label != ARCHIVE else Original("", "zero2_w3_bf16", _ARCHIVES[-1])
    opened = ckpttool.open(o.path, **o.how)
    truth = {n.replace("optim.", "optim.state.", 1) if n.startswith("optim.") else n: t for n, t in o.truth().items()}
    return opened, {n: t for n, t in truth.items() if n in opened or n.startswith("model.")}


def bits(x: Any) -> tuple[tuple[int, ...], bytes]:
    """Shape and bytes of a tensor or an array."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.shape(x), np.ascontiguousarray(x).tobytes()


def words(t: Tensor) -> Any:
    """The same elements as a numpy array of unsigned integers."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return t.contiguous().view(kind).numpy() if t.ndim else t.reshape(1).view(kind).reshape(()).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("label", [*ALL, ARCHIVE])
def test_every_tensor_of_every_layout_is_that_of_the_job(label: str) -> None:
    opened, truth = opened_of(label)
    assert set(truth) <= set(opened.keys()) and len(opened) == len(list(opened)) == len(opened.keys())
    for name, t in truth.items():
        h = opened[name]
        assert (h.dtype, h.shape, h.nbytes) == (str(t.dtype)[6:], tuple(t.shape), t.nbytes)
        assert bits(h.numpy()) == bits(t), name
        got = h.torch()
        assert got.dtype == t.dtype and bits(got) == bits(t), name


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_an_index_is_what_numpy_makes_of_it(data: st.DataObject) -> None:
    opened, truth = opened_of(data.draw(st.sampled_from([*ALL, ARCHIVE])))
    name = data.draw(st.sampled_from(sorted(truth)))
    index = data.draw(basic_indices(truth[name].shape, allow_newaxis=False))
    expected = words(truth[name])[index]
    assert bits(opened[name][index]) == bits(expected)
    assert bits(opened[name].torch(index)) == bits(expected)


DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool", "complex128", "complex64",
]  # fmt: skip


def zoo() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (6 * 5 * 16,), dtype=torch.uint8, generator=g)
    out = {n: raw.view(getattr(torch, n)).reshape(-1)[:30].reshape(6, 5).clone() for n in DTYPES if n != "bool"}
    out["bool"] = (raw[:30] > 99).reshape(6, 5)
    out["view"] = torch.arange(60.0).reshape(5, 12).T[1:11]
    out["none"] = torch.zeros(0, 3)
    out["number"] = torch.tensor(7.5, dtype=torch.bfloat16)
    return out


@pytest.fixture(scope="module")
def zoos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("zoo")
    tensors = zoo()
    torch.save({"model": tensors}, folder / "a.pt")
    dcp.save({"model": tensors}, checkpoint_id=folder / "dcp", no_dist=True)
    save_file(
        {k: t.contiguous() for k, t in tensors.items() if "fnuz" not in k and k != "complex128"},
        folder / "model.safetensors",
    )
    paths = {"full": folder / "a.pt", "dcp": folder / "dcp", "hf": folder / "model.safetensors"}
    opened = {k: ckpttool.open(p) for k, p in paths.items()}
    yield opened
    for x in opened.values():
        x.source.close()


@pytest.mark.parametrize("layout", ["full", "dcp", "hf"])
def test_dtypes_are_those_of_torch_and_ml_dtypes(zoos: dict[str, Any], layout: str) -> None:
    opened = zoos[layout]
    for name, t in zoo().items():
        if f"model.{name}" not in opened:
            continue
        h = opened[f"model.{name}"]
        array = h.numpy()
        assert bits(array) == bits(t) and bits(h.torch()) == bits(t) and h.torch().dtype == t.dtype
        own = {"float64", "float32", "float16", "complex128", "complex64", "bool"} | {n for n in DTYPES if "int" in n}
        dtype = str(t.dtype)[6:]
        assert array.dtype == (np.dtype(dtype) if dtype in own else np.dtype(getattr(ml_dtypes, dtype)))
        assert array.flags.writeable and bits(np.asarray(h)) == bits(t)


def test_numbers_of_bfloat16_are_numbers(zoos: dict[str, Any]) -> None:
    h = zoos["dcp"]["model.bfloat16"]
    t = zoo()["bfloat16"].float().numpy()
    assert np.array_equal(h[1:3].astype("f4"), t[1:3], equal_nan=True)
    assert (
        np.asarray(zoos["full"]["model.number"], dtype="f4") == 7.5 and float(zoos["full"]["model.number"][()]) == 7.5
    )


def test_pairs_of_float4(tmp_path: Path) -> None:
    raw = torch.tensor([[0x21, 0xF0, 0x07], [0x89, 0x3C, 0x55]], dtype=torch.uint8)
    dcp.save({"model": {"w": raw}}, checkpoint_id=tmp_path / "a", no_dist=True)
    with ckpttool.open(tmp_path / "a") as opened:
        ckpt = opened.locate()
        ckpt.tensors["model.w"] = replace(ckpt.tensors["model.w"], dtype="float4_e2m1fn_x2")
        h = opened["model.w"]
        assert h.shape == (2, 3) and h.nbytes == 6 and h.numpy().dtype == ml_dtypes.float4_e2m1fn
        assert h.numpy()[0].astype("f4").tolist() == [[0.5, 1.0], [0.0, -6.0], [6.0, 0.0]]
        assert h[1, 2].astype("f4").tolist() == [3.0, 3.0] and h[:, 1:].shape == (2, 2, 2)
        assert bits(h.torch().view(torch.uint8)) == bits(raw)


def test_complex32(tmp_path: Path) -> None:
    w = torch.view_as_complex(torch.arange(8, dtype=torch.float16).reshape(4, 2))
    torch.save({"model": {"w": w}}, tmp_path / "a.pt")
    with ckpttool.open(tmp_path / "a.pt") as opened:
        h = opened["model.w"]
        assert h.dtype == "complex32" and torch.equal(torch.view_as_real(h.torch()), torch.view_as_real(w))
        assert bits(h[1:3]) == bits(torch.view_as_real(w)[1:3].reshape(2, 2).view(torch.int32).reshape(2))


# ------------------------------------------------------------------------------------------------ what is read


class Reads:
    """What os.preadv read of one file, from an offset on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[int, int]] = []
        real = os.preadv

        def preadv(fd: int, views: Any, offset: int, *more: Any) -> int:
            n = real(fd, views, offset, *more)
            self.ranges.append((offset, n))
            return n

        monkeypatch.setattr(os, "preadv", preadv)

    @property
    def bytes(self) -> int:
        return sum(n for _, n in self.ranges)


def test_a_slice_reads_its_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.arange(1000 * 4096, dtype=torch.float32).reshape(1000, 4096)  # rows of 16 KiB
    torch.save({"model": {"w": w, "t": w.T}}, tmp_path / "a.pt")
    with ckpttool.open(tmp_path / "a.pt") as opened:
        reads = Reads(monkeypatch)
        h, base = opened["model.w"], opened.checkpoint.tensors["model.w"].chunks.offset[0]
        assert h.shape == (1000, 4096) and "16.4 MB" in repr(h) and reads.bytes == 0
        assert np.array_equal(h[2:5], w[2:5]) and reads.ranges == [(base + 2 * 16384, 3 * 16384)]
        reads.ranges.clear()
        assert np.array_equal(h[7:9, 1:3], w[7:9, 1:3]) and reads.bytes <= 2 * 4096
        reads.ranges.clear()
        assert np.array_equal(h[:, 5], w[:, 5]) and reads.bytes <= 1000 * 4096, "not the 16 MB around the column"
        reads.ranges.clear()
        assert np.array_equal(opened["model.t"][5, 3:9], w.T[5, 3:9]) and reads.bytes <= 6 * 4096
        reads.ranges.clear()
        assert np.array_equal(opened["model.t"][10:12], w.T[10:12]) and reads.bytes <= 1000 * 4096
        reads.ranges.clear()
        assert h[3:3].shape == (0, 4096) and h[..., 0:0].shape == (1000, 0) and reads.bytes == 0


def test_items_are_looked_into_once_for_all_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpttool.converters.dcp.items import Items

    seen: list[str] = []
    real = Items._parse_item
    monkeypatch.setattr(Items, "_parse_item", lambda self, name, *more: (seen.append(name), real(self, name, *more))[1])
    o = ALL["fsdp2_w3"]
    with ckpttool.open(o.path) as opened:
        assert opened["model.lm_head.weight"].shape == (131, 36) and len(opened) > 9 and not seen, (
            "no byte was asked for"
        )
        assert bits(opened["model.lm_head.weight"][50:88]) == bits(o.truth()["model.lm_head.weight"][50:88])
        first = len(seen)
        assert first > 0, "all of them, since files of ranks could be a mixture"
        for name in [n for n in opened if n.startswith("model.")]:
            assert bits(opened[name].numpy()) == bits(o.truth()[name])
    assert len(seen) == first


def test_the_cost_of_a_read_does_not_grow_with_the_number_of_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file with a CRC32 for every tensor, in which each read once sorted all of them."""
    torch.save({"model": {f"w{i}": torch.tensor([float(i)]) for i in range(300)}}, tmp_path / "a.pt")
    with ckpttool.open(tmp_path / "a.pt") as opened:
        assert float(opened["model.w0"].numpy()[0]) == 0
        monkeypatch.setattr(Records, "_sort_by_offset", lambda self: pytest.fail("sorted for one read"))
        assert [float(opened[f"model.w{i}"].numpy()[0]) for i in range(300)] == list(map(float, range(300)))


@pytest.mark.slow
def test_a_slice_of_a_tensor_in_a_store_requests_its_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.arange(1000 * 4096, dtype=torch.float32).reshape(1000, 4096)  # 16 MB
    torch.save({"model": {"w": w}}, tmp_path / "a.pt")
    bucket = stores.moto().bucket(monkeypatch)
    stores.moto().client().upload_file(tmp_path / "a.pt", bucket[5:], "run/a.pt")
    sent: list[int] = []
    real = RemoteSource._fetch_range
    monkeypatch.setattr(
        RemoteSource, "_fetch_range", lambda self, name, at, n: (sent.append(n), real(self, name, at, n))[1]
    )
    with ckpttool.open(f"{bucket}/run/a.pt") as opened:
        sent.clear()
        assert np.array_equal(opened["model.w"][2:5, 1:3], w[2:5, 1:3]) and sum(sent) <= 64 << 10
        sent.clear()
        assert np.array_equal(opened["model.w"].numpy(), w) and sum(sent) == w.nbytes


def flipped(path: Path, at: int) -> None:
    with path.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("layout", ["full", "dcp"])
def test_a_flipped_bit_is_found_where_a_whole_record_is_read(tmp_path: Path, layout: str) -> None:
    w = torch.randn(100, 64)
    path = tmp_path / "a.pt"
    if layout == "full":
        torch.save({"model": {"w": w}}, path)
    else:
        dcp.save({"model": {"w": w}}, checkpoint_id=tmp_path / "a", no_dist=True)
        path = tmp_path / "a" / "__0_0.distcp"
    at = path.read_bytes().index(w.numpy().tobytes())
    flipped(path, at + 50 * 256)
    with ckpttool.open(path if layout == "full" else path.parent) as opened:
        with pytest.raises(Corrupt, match="CRC32"):
            opened["model.w"].numpy()
        with pytest.raises(Corrupt, match="CRC32"):
            opened["model.w"].torch()
        assert np.array_equal(opened["model.w"][:50], w[:50]), "the record is not read as a whole"


def test_a_compressed_chunk_is_compared_when_it_is_read_to_its_end() -> None:
    o = ALL["fsdp2_w2_zstd"]
    opened, truth = opened_of(o.label)
    name = "model.lm_head.weight"
    assert bits(opened[name][3:7, 2:5]) == bits(truth[name][3:7, 2:5])
    assert bits(opened[name][-1]) == bits(truth[name][-1])


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(100_000)}}, tmp_path / "a.pt")
    with ckpttool.open(tmp_path / "a.pt") as opened:
        os.truncate(tmp_path / "a.pt", 200_000)
        with pytest.raises(ckpttool.CkpttoolError):
            opened["model.w"].numpy()


# -------------------------------------------------------------------------------------------------- the mapping


def test_it_is_a_mapping_of_names(zoos: dict[str, Any]) -> None:
    opened = zoos["full"]
    assert len(opened) == len(zoo()) and list(opened) == list(opened.keys()) == [f"model.{n}" for n in zoo()]
    assert "model.view" in opened and "view" not in opened and 3 not in opened
    h = opened["model.float32"]
    assert isinstance(h, TensorHandle) and repr(h) == "<TensorHandle model.float32: float32 [6, 5], 120 B>"
    assert len(h) == 6 and h.ndim == 2 and [bits(row) for row in h] == [bits(row) for row in zoo()["float32"]]
    with pytest.raises(TypeError, match="no dimensions"):
        len(opened["model.number"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("view", "Did you mean 'model.view'?"),
        ("model.bfloat61", "Did you mean 'model.bfloat16'"),
        ("zzz", "keys() lists them."),
        (3, "keys() lists them."),
    ],
)
def test_a_name_that_is_not_there_suggests_one_that_is(zoos: dict[str, Any], name: Any, said: str) -> None:
    for kind in (KeyError, ckpttool.CkpttoolError, UnknownTensor):
        with pytest.raises(kind) as e:
            zoos["full"][name]
        assert said in str(e.value) and str(e.value).startswith(f'"{name}" is not among the {len(zoo())} tensors of ')


def test_the_command_line_says_which_command_lists_the_names(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "a b.pt")
    with name_flags(), ckpttool.open(tmp_path / "a b.pt") as opened, pytest.raises(UnknownTensor) as e:
        opened["zzz"]
    path = tmp_path / "a b.pt"
    said = f'"zzz" is not among the 1 tensors of {path}. '
    assert str(e.value) == f"{said}`ckpttool inspect '{path}' --tree` lists them."


def test_a_value_is_named_as_one(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "step": 3}, tmp_path / "a.pt")
    with ckpttool.open(tmp_path / "a.pt") as opened:
        with pytest.raises(
            KeyError, match=r"\"trainer.step\" is a value and not a tensor; read it with checkpoint.value"
        ):
            opened["trainer.step"]
        assert opened.checkpoint.value("trainer.step") == 3


@pytest.mark.parametrize(
    ("index", "kind", "said"),
    [
        (6, IndexError, "Index 6 is outside dimension 0 of \"model.float32\", which has 6 elements"),
        ((0, -6), IndexError, "Index -6 is outside dimension 1"),
        ((0, 0, 0), IndexError, "has 2 dimensions, but 3 were indexed"),
        ((..., ...), IndexError, "only one"),
        ([1, 2], TypeError, "not with list"),
        (None, TypeError, "not with NoneType"),
        (True, TypeError, "not with bool"),
        (np.array([True] * 6), TypeError, "not with ndarray"),
        (1.0, TypeError, "not with float"),
    ],
)  # fmt: skip
def test_an_index_that_numpy_alone_understands(
    zoos: dict[str, Any], index: Any, kind: type[Exception], said: str
) -> None:
    h = zoos["full"]["model.float32"]
    for read in (h.__getitem__, h.torch):
        with pytest.raises(kind, match=said):
            read(index)


def test_no_copy_is_not_possible(zoos: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is in a file"):
        zoos["full"]["model.float32"].__array__(copy=False)


# ---------------------------------------------------------------------------------------------------- open and closed


@pytest.mark.slow
def test_a_checkpoint_that_nobody_closes_is_closed_with_a_warning() -> None:
    with ckpttool.open(FIXTURES / "fsdp2_w3" / "ckpt") as opened:
        name = next(iter(opened))
    gc.collect()  # what other tests left open
    before = len(os.listdir("/proc/self/fd"))
    with pytest.warns(ResourceWarning, match="was opened and never closed; use `with ckpttool.open"):
        assert ckpttool.open(FIXTURES / "fsdp2_w3" / "ckpt")[name].numpy().size
        gc.collect()
    end = time.monotonic() + 5  # a thread that has not ended yet closes its descriptor when it does
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < end:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_read_after_the_end_of_the_with_is_an_error_of_its_own() -> None:
    with ckpttool.open(FIXTURES / "fsdp2_w3" / "ckpt") as opened:
        tensor = opened[next(iter(opened))]
        tensor.numpy()
    with pytest.raises(UsageError, match=r"was closed, and is read after that\. Read inside the `with"):
        tensor.numpy()
    opened.close()


def test_a_descriptor_that_a_thread_reads_from_is_closed_after_that(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    source = Source(tmp_path)
    with source.borrow_fd("a") as fd:
        source.close()
        assert os.pread(fd, 3, 0) == b"abc"
    with pytest.raises(OSError):
        os.fstat(fd)


def test_an_open_checkpoint_is_a_mapping_that_shows_what_is_public() -> None:
    with (
        ckpttool.open(FIXTURES / "fsdp2_w3" / "ckpt") as opened,
        ckpttool.open(FIXTURES / "fsdp2_w3" / "ckpt") as other,
    ):
        assert isinstance(opened, Mapping) and opened == opened and opened != other and len({opened, other}) == 2
        name = next(iter(opened))
        assert [n for n, _ in opened.items()] == list(opened) and {h.name for h in opened.values()} == set(opened)
        handle = opened.get(name)
        assert handle is not None and handle.shape == opened[name].shape and opened.get("nope") is None
        public = [n for n in dir(opened) if not n.startswith("_")]
        assert public == ["checkpoint", "close", "get", "items", "keys", "layout", "location", "source", "values"]
        assert opened.checkpoint.value("trainer.step", int) == opened.checkpoint.value("trainer.step")
        assert opened.checkpoint.value("trainer.nope", int) is None
        with pytest.raises(TypeError, match=r'"trainer.step" is a int, not a str\.'):
            opened.checkpoint.value("trainer.step", str)


def test_an_error_has_the_kind_that_json_has() -> None:
    with ckpttool.open(FIXTURES / "fsdp2_w3" / "ckpt") as opened, pytest.raises(UnknownTensor) as e:
        opened["nope"]
    assert e.value.kind == "UsageError" and Corrupt("x").kind == "Corrupt"


def test_an_unknown_layout_to_write_is_answered_with_those_that_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Choose one of") as e:
        ckpttool.plan(FIXTURES / "fsdp2_w3" / "ckpt", tmp_path / "x", to="nope")
    assert "zero3" in str(e.value) and "skyrl" not in str(e.value)
