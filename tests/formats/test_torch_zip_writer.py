"""torch.save files with holes: filled by the engine, read by torch and zipfile, cut off and continued anywhere."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.engine.copy import fill
from ckpttool.formats.pickles import Global, Opaque
from ckpttool.formats.stored_tensors import Inline
from ckpttool.formats.torch_pickles import TensorRef
from ckpttool.formats.torch_zip_writer import TorchFiles
from ckpttool.index.checkpoint import ITEMSIZE, Checkpoint, Chunks, TensorEntry
from ckpttool.index.records import Records
from ckpttool.storage.local_destination import LocalDestination
from ckpttool.storage.source import Source


class Place(NamedTuple):
    """Elements [first, last) of a tensor of bytes, in a storage of a file."""

    first: int
    last: int
    file: int
    key: str
    at: int = 0


def draft_of(folder: Path, files: TorchFiles, tensors: dict[str, tuple[bytes, list[Place]]], **how: Any) -> Any:
    """(draft, source, source checkpoint's files): every tensor is uint8 and lies in one file of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "in.bin").write_bytes(b"".join(data for data, _ in tensors.values()))
    placed, sources, at = {}, {}, 0
    for name, (data, places) in tensors.items():
        chunks = Chunks(1)
        for p in places:
            chunks.add((p.first,), (p.last - p.first,), p.file, files.offset(p.file, p.key) + p.at, p.last - p.first)
        shape = (len(data),)
        placed[name] = TensorEntry("uint8", shape, (name,), chunks)
        sources[name] = TensorEntry("uint8", shape, (name,), Chunks.whole(shape, 0, at, len(data)))
        at += len(data)
    checkpoint = Checkpoint("x", "x", None, [], [], placed, {})
    return files.draft(checkpoint, sources, **how), Source(folder)


def built(folder: Path, made: Any, stop_after: int | None = None) -> dict[str, bytes]:
    """The files, filled by the engine; `stop_after` gives up once so many tensors are done, and begins again."""
    draft, source = made
    target = folder / "out"

    class Enough(Exception):
        pass

    def watch(what: str, done: int, total: int) -> None:
        seen.append(done)
        if stop_after is not None and len(seen) > stop_after:
            raise Enough

    before = fill._JOURNAL_BYTES
    fill._JOURNAL_BYTES = 1
    try:
        for attempt in (0, 1):
            seen: list[int] = []
            staging = LocalDestination(str(target), False, "a" * 64, 0, False)
            if attempt and stop_after:
                assert staging.earlier.done, "the second run goes on from the journal of the first"
            try:
                fill.fill(draft, source, ["in.bin"], Records(), staging, watch if not attempt else lambda *_: None)
            except Enough:
                staging.release()
                continue
            staging.commit()
            break
    finally:
        fill._JOURNAL_BYTES = before
    return {p.name: p.read_bytes() for p in sorted(target.iterdir())}


def whole(data: bytes) -> Any:
    """What torch makes of a file, whose zip is proved sound by zipfile; the CRC32s behind the records are right too."""
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        assert z.testzip() is None
        names = z.namelist()
        assert len(set(names)) == len(names)
        for i in z.infolist():
            if i.flag_bits & 8:
                n, extra = struct.unpack_from("<HH", data, i.header_offset + 26)
                end = i.header_offset + 30 + n + extra + i.file_size
                said = (b"PK\x07\x08", zlib.crc32(data[end - i.file_size : end]), i.file_size, i.file_size)
                assert struct.unpack_from("<4sIQQ", data, end) == said
    return torch.load(io.BytesIO(data), weights_only=True)


def flat(n: int, key: str, dtype: str = "uint8") -> TensorRef:
    return TensorRef(dtype, (n,), key, n)


def some(n: int, seed: int = 1) -> bytes:
    return bytes(random.Random(seed).randbytes(n))


# ------------------------------------------------------------------------------------------------------ one record


def test_chunks_of_several_tensors_lie_in_one_record_with_zeros_between_and_behind(tmp_path: Path) -> None:
    files = TorchFiles()
    f = files.add("a.pt", {"w": flat(20, "0")}, {"0": 20})
    a, b = b"aaaaa", b"bbb"
    made = draft_of(tmp_path, files, {"a": (a, [Place(0, 5, f, "0", 2)]), "b": (b, [Place(0, 3, f, "0", 11)])})
    found = whole(built(tmp_path, made)["a.pt"])
    assert bytes(found["w"].numpy()) == b"\0\0aaaaa\0\0\0\0bbb\0\0\0\0\0\0"


def test_a_record_that_no_chunk_fills_is_zeros(tmp_path: Path) -> None:
    files = TorchFiles()
    sizes = {"0": 70_001, "1": 4, "2": 1 << 17}
    f = files.add("a.pt", {"x": flat(70_001, "0"), "w": flat(4, "1"), "y": flat(1 << 17, "2")}, sizes)
    found = whole(built(tmp_path, draft_of(tmp_path, files, {"w": (b"wwww", [Place(0, 4, f, "1")])}))["a.pt"])
    assert (found["x"].sum(), bytes(found["w"].numpy()), found["y"].sum()) == (0, b"wwww", 0)
    assert (len(found["x"]), len(found["y"])) == (70_001, 1 << 17)


def test_a_file_without_any_chunk_is_whole(tmp_path: Path) -> None:
    files = TorchFiles()
    files.add("a.pt", {"x": flat(5, "0"), "e": flat(0, "1"), "n": 3}, {"0": 5, "1": 0})
    files.add("b.pt", {"lr": 0.5}, {})
    files.literal("latest", b"tag")
    made = draft_of(tmp_path, files, {})
    out = built(tmp_path, made)
    assert bytes(whole(out["a.pt"])["x"].numpy()) == bytes(5)
    assert whole(out["a.pt"])["e"].shape == (0,)
    assert whole(out["b.pt"]) == {"lr": 0.5}
    assert out["latest"] == b"tag"


def test_records_of_no_bytes_stand_before_between_and_behind_others(tmp_path: Path) -> None:
    files = TorchFiles()
    sizes = {"e0": 0, "0": 4, "e1": 0, "e2": 0, "1": 3, "e3": 0}
    f = files.add("a.pt", {k: flat(n, k) for k, n in sizes.items()}, sizes)
    tensors = {
        "none": (b"", [Place(0, 0, f, "e1")]),
        "w": (b"wwww", [Place(0, 4, f, "0")]),
        "v": (b"vvv", [Place(0, 3, f, "1")]),
        "last": (b"", [Place(0, 0, f, "e3")]),
    }
    tensors = {k: tensors[k] for k in ("w", "none", "v", "last")}
    found = whole(built(tmp_path, draft_of(tmp_path, files, tensors))["a.pt"])
    assert {k: bytes(t.numpy()) for k, t in found.items()} == {
        "e0": b"", "0": b"wwww", "e1": b"", "e2": b"", "1": b"vvv", "e3": b""
    }  # fmt: skip


def test_tensors_of_one_storage_are_views_of_it_again(tmp_path: Path) -> None:
    files = TorchFiles()
    tree = {"all": TensorRef("int16", (2, 3), "0", 6), "second": TensorRef("int16", (3,), "0", 6, 3)}
    f = files.add("a.pt", tree, {"0": 12})
    data = np.arange(6, dtype="<i2").tobytes()
    found = whole(built(tmp_path, draft_of(tmp_path, files, {"w": (data, [Place(0, 12, f, "0")])}))["a.pt"])
    assert found["all"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["second"].tolist() == [3, 4, 5]
    assert found["second"].untyped_storage().data_ptr() == found["all"].untyped_storage().data_ptr()


def test_small_tensors_inside_values_become_tensors_of_their_own(tmp_path: Path) -> None:
    files = TorchFiles()
    step = Inline("float32", (), np.float32(3).tobytes())
    odd = Opaque(Global("collections", "OrderedDict"), (), call=True)
    odd.dict_items = [("k", Inline("int64", (2,), np.array([5, 6]).tobytes()))]
    tree = {"step": step, "pair": (step, [Inline("bool", (2, 0), b"")], {"w": flat(3, "0")}), "odd": odd}
    f = files.add("a.pt", tree, {"0": 3})
    found = whole(built(tmp_path, draft_of(tmp_path, files, {"w": (b"www", [Place(0, 3, f, "0")])}))["a.pt"])
    assert found["step"].item() == 3 and found["step"].dtype == torch.float32 and found["step"].shape == ()
    assert found["pair"][0].item() == 3 and found["pair"][1][0].shape == (2, 0)
    assert bytes(found["pair"][2]["w"].numpy()) == b"www"
    assert found["odd"]["k"].tolist() == [5, 6]


def test_storages_may_not_have_the_numbers_of_small_tensors() -> None:
    with pytest.raises(AssertionError, match=r"a\.pt: storages are numbered otherwise: \['1'\]"):
        TorchFiles().add("a.pt", {"s": Inline("uint8", (), b"x")}, {"1": 4})


def test_storages_begin_at_multiples_of_64_bytes(tmp_path: Path) -> None:
    files = TorchFiles()
    sizes = {"0": 1, "1": 65, "with a long name " * 5: 3, "ü": 0, "2": 2}
    f = files.add("a.pt", {k: flat(n, k) for k, n in sizes.items()}, sizes)
    assert [files.offset(f, k) % 64 for k in sizes] == [0] * 5
    data = built(tmp_path, draft_of(tmp_path, files, {}))["a.pt"]
    for info in zipfile.ZipFile(io.BytesIO(data)).infolist():
        n, extra = (int.from_bytes(data[info.header_offset + k :][:2], "little") for k in (26, 28))
        if "/data/" in info.filename:
            assert (info.header_offset + 30 + n + extra) % 64 == 0
            assert info.header_offset + 30 + n + extra == files.offset(f, info.filename.partition("/data/")[2])


def test_every_dtype_is_the_tensor_that_torch_would_have_saved(tmp_path: Path) -> None:
    kinds = [d for d in ITEMSIZE if hasattr(torch, d) and d != "float4_e2m1fn_x2" and not d.startswith("complex32")]
    files = TorchFiles()
    f = files.add("a.pt", {d: flat(3, d, d) for d in kinds}, {d: 3 * ITEMSIZE[d] for d in kinds})
    raw = {d: some(3 * ITEMSIZE[d]) if d != "bool" else b"\1\0\1" for d in kinds}
    tensors = {d: (raw[d], [Place(0, len(raw[d]), f, d)]) for d in kinds}
    found = whole(built(tmp_path, draft_of(tmp_path, files, tensors))["a.pt"])
    for d in kinds:
        assert found[d].dtype == getattr(torch, d) and found[d].shape == (3,)
        assert bytes(found[d].view(torch.uint8).numpy()) == raw[d]


def test_the_digests_stand_in_the_file_where_they_are_asked_for(tmp_path: Path) -> None:
    files = TorchFiles()
    f = files.add("a.pt", {"w": flat(3, "0")}, {"0": 3}, root="mine")
    made = draft_of(tmp_path, files, {"w": (b"www", [Place(0, 3, f, "0")])}, recorded=True)
    data = built(tmp_path, made)["a.pt"]
    assert bytes(whole(data)["w"].numpy()) == b"www"
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        assert json.loads(z.read("mine/ckpttool.json")) == {"w": blake3(b"www").hexdigest()}


def test_a_planned_size_is_never_smaller_than_the_file(tmp_path: Path) -> None:
    files = TorchFiles()
    sizes = {str(k): k % 7 for k in range(300)}
    files.add("many.pt", [flat(n, k) for k, n in sizes.items()], sizes)
    files.add("none.pt", {}, {})
    files.add("inline.pt", [Inline("uint8", (1,), b"x")] * 50, {})
    names = [f"frozen.{'layers.' * 20}{k}.weight" for k in range(40)]
    files.add("names.pt", [flat(0, n) for n in names], dict.fromkeys(names, 0))
    planned = dict(zip(files.names, files.sizes(), strict=True))
    out = built(tmp_path, draft_of(tmp_path, files, {}))
    assert [n for n, d in out.items() if len(d) > planned[n]] == []
    assert all(planned[n] - len(d) < 2000 + 120 * 300 for n, d in out.items())


# ------------------------------------------------------------------------------------------- any files, any cut


@st.composite
def plans(draw: Any) -> tuple[list[dict[str, int]], list[tuple[int, list[tuple[int, str, int, int]]]]]:
    """(storages of every file, [(length, [(file, key, offset, length)])] of tensors in their order)."""
    storages = [
        {str(k): n for k, n in enumerate(draw(st.lists(st.sampled_from([0, 1, 5, 64, 300, 5000]), max_size=4)))}
        for _ in range(draw(st.integers(1, 3)))
    ]
    spots = []
    for k, sizes in enumerate(storages):
        mine = []
        for key, n in sizes.items():
            at = 0
            while at <= n and draw(st.booleans()):
                at += draw(st.integers(0, 40)) if draw(st.booleans()) else 0
                length = draw(st.integers(0, max(0, n - at)))
                if at + length > n:
                    break
                mine.append((k, key, at, length))
                at += length or 1
        spots.append(mine)
    tensors: list[tuple[int, list[tuple[int, str, int, int]]]] = []
    while any(spots):
        parts = [mine.pop(0) for mine in spots if mine and draw(st.booleans())]
        if parts:
            tensors.append((sum(p[3] for p in parts), parts))
    return storages, tensors


@pytest.mark.slow
@settings(max_examples=60)
@given(plan=plans(), stop=st.integers(0, 6))
def test_any_chunks_in_any_records_are_the_bytes_torch_reads_however_often_the_run_was_cut_off(
    plan: Any, stop: int, tmp_path_factory: Any
) -> None:
    storages, wanted = plan
    folder = tmp_path_factory.mktemp("draft")
    files = TorchFiles()
    for k, sizes in enumerate(storages):
        files.add(f"{k}.pt", {key: flat(n, key) for key, n in sizes.items()}, sizes)
    expected = {(k, key): bytearray(n) for k, sizes in enumerate(storages) for key, n in sizes.items()}
    tensors = {}
    for i, (length, parts) in enumerate(wanted):
        data, at, places = some(length, i), 0, []
        for file, key, offset, n in parts:
            places.append(Place(at, at + n, file, key, offset))
            expected[file, key][offset : offset + n] = data[at : at + n]
            at += n
        tensors[f"t{i}"] = (data, places)
    made = draft_of(folder, files, tensors)
    once = built(folder, made)
    found = {k: whole(once[f"{k}.pt"]) for k in range(len(storages))}
    assert {(k, key): bytes(t.numpy()) for k, tree in found.items() for key, t in tree.items()} == expected
    with_bytes = sum(length > 0 for length, _ in wanted)
    if 0 < stop < with_bytes:
        assert built(folder / "again", draft_of(folder / "again", files, tensors), stop) == once


@pytest.fixture
def long_record(tmp_path: Path) -> Iterator[Any]:
    """A record of eight chunks with padding, and a second file that is fed at the same time."""
    files = TorchFiles()
    f = files.add("a.pt", {"w": flat(9000, "0"), "v": flat(10, "1")}, {"0": 9000, "1": 10})
    g = files.add("b.pt", {"w": flat(9000, "0")}, {"0": 9000})
    tensors = {
        f"t{k}": (some(1500, k), [Place(0, 1000, f, "0", 1100 * k), Place(1000, 1500, g, "0", 1100 * k + 3)])
        for k in range(8)
    }
    yield files, tensors


@pytest.mark.parametrize("stop", [1, 2, 5, 7])
def test_a_run_that_was_cut_off_in_the_middle_of_a_record_is_continued_to_the_same_bytes(
    stop: int, long_record: Any, tmp_path: Path
) -> None:
    files, tensors = long_record
    once = built(tmp_path / "once", draft_of(tmp_path / "once", files, tensors))
    twice = built(tmp_path / "twice", draft_of(tmp_path / "twice", files, tensors), stop)
    assert twice == once
    w = bytes(whole(once["a.pt"])["w"].numpy())
    assert w[1100:2100] == tensors["t1"][0][:1000] and not any(w[2100:2200])


def test_a_thousand_chunks_in_one_record_have_one_checksum(tmp_path: Path) -> None:
    files = TorchFiles()
    f = files.add("a.pt", {"w": flat(7000, "0")}, {"0": 7000})
    tensors = {f"t{k}": (some(5, k), [Place(0, 5, f, "0", 7 * k)]) for k in range(1000)}
    found = whole(built(tmp_path, draft_of(tmp_path, files, tensors))["a.pt"])
    assert bytes(found["w"].numpy()) == b"".join(some(5, k) + b"\0\0" for k in range(1000))
