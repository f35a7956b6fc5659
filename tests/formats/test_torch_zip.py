"""torch.save files, with torch and zipfile as the other side: read what they wrote, let them read what we write."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpttool
from ckpttool.errors import CkpttoolError, Corrupt, Unsafe, Unsupported
from ckpttool.formats import stored_tensors, torch_pickles, torch_zip, zip_bytes
from ckpttool.formats.pickles import Global, Opaque
from ckpttool.formats.stored_tensors import Inline, StoredTensor
from ckpttool.formats.torch_pickles import TensorRef
from ckpttool.index.checkpoint import ITEMSIZE

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

MAKEABLE = [d for d in ITEMSIZE if hasattr(torch, d)]


def saved(value: Any, **how: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **how)
    return out.getvalue()


def read(data: bytes) -> Any:
    return torch_zip.read(lambda at, n: data[at : at + n], 0, len(data), "x.pt")


def numbers(dtype: str, *shape: int) -> torch.Tensor:
    """A tensor with other bytes in every element."""
    n = ITEMSIZE[dtype]
    for k in shape:
        n *= k
    raw = torch.arange(n, dtype=torch.int64).mul(37).remainder(251).to(torch.uint8)
    if dtype == "bool":
        raw = raw % 2
    return raw.view(getattr(torch, dtype)).reshape(shape) if n else torch.empty(shape, dtype=getattr(torch, dtype))


def raw_bytes(t: torch.Tensor) -> bytes:
    """Row-major bytes, by torch."""
    return bytes(t.contiguous().reshape(-1).view(torch.uint8).numpy()) if t.numel() else b""


def bytes_of(data: bytes, t: StoredTensor) -> bytes:
    """Row-major bytes, by us."""
    at, n = t.extent
    raw = data[at : at + n]
    return raw if t.contiguous else stored_tensors.gather_strided(raw, t)


def same(data: bytes, ours: Any, theirs: Any) -> None:
    """Compare a tree of ours with what torch.load gives."""
    if isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.shape) == (str(theirs.dtype).removeprefix("torch."), tuple(theirs.shape))
        assert bytes_of(data, ours) == raw_bytes(theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for k in theirs:
            same(data, ours[k], theirs[k])
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            same(data, a, b)
    else:
        assert type(ours) is type(theirs) and ours == theirs


# --------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("dtype", MAKEABLE)
def test_tensors_of_every_dtype_that_torch_has_are_read(dtype: str, zipped: bool) -> None:
    value = {
        "m": numbers(dtype, 3, 4),
        "scalar": numbers(dtype),
        "empty": numbers(dtype, 0, 3),
        "row": numbers(dtype, 5),
    }
    data = saved(value, _use_new_zipfile_serialization=zipped)
    same(data, read(data), value)  # torch itself cannot read legacy files of its newer dtypes


@pytest.mark.parametrize("zipped", [True, False])
def test_views_transposes_and_shared_storages_are_read(zipped: bool) -> None:
    base = torch.arange(60.0).reshape(3, 4, 5)
    value = {
        "base": base, "row": base[1], "column": base[:, 1], "every second": base[..., ::2], "transposed": base.permute(2, 0, 1),
        "expanded": torch.tensor([1.0, 2.0])[:, None].expand(2, 3), "scalar of it": base[1, 2, 3], "tied": base,
        "none of it": base[1:1], "one wide": base[:1, :, :1],
    }  # fmt: skip
    data = saved(value, _use_new_zipfile_serialization=zipped)
    found = read(data)
    same(data, found, value)
    assert found["tied"] == found["base"] and found["row"].storage == found["base"].storage
    assert found["base"].contiguous and found["row"].contiguous and not found["transposed"].contiguous


def test_parameters_buffers_lists_tuples_and_plain_values_are_read() -> None:
    value = {
        "p": torch.nn.Parameter(torch.ones(2)), "buffer": torch.nn.Buffer(torch.zeros(1)), "list": [torch.ones(1), 3],
        "tuple": (torch.ones(1), "x"), "none": None, "float": 0.1, "size": (2, 3), 5: True,
    }  # fmt: skip
    data = saved(value)
    same(data, read(data), torch.load(io.BytesIO(data)))


def test_a_state_dict_of_a_module_and_its_optimizer_is_read() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    value = {"model": net.state_dict(), "optim": optimizer.state_dict(), "device": torch.device("cpu")}
    data = saved(value)
    found = read(data)
    assert found.pop("device") == Opaque(Global("torch", "device"), ("cpu",), call=True)
    value.pop("device")
    same(data, found, value)


def test_a_tensor_with_attributes_is_read_without_them() -> None:
    t = torch.nn.Parameter(torch.ones(2))
    t.group = "decay"  # type: ignore[attr-defined]
    data = saved({"t": t})
    same(data, read(data), {"t": torch.ones(2)})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_the_file_carries_the_crc_of_each_storage(dtype: str) -> None:
    data = saved({"t": numbers(dtype, 100)})
    assert read(data)["t"].storage.crc32 == zlib.crc32(raw_bytes(numbers(dtype, 100)))


def test_every_record_is_found_where_zipfile_finds_it() -> None:
    data = saved({"a": torch.ones(3), "b": torch.ones(50)})
    found = zip_bytes.read_zip_records(lambda at, n: data[at : at + n], 0, len(data), "x")
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        assert {i.filename.partition("/")[2] for i in z.infolist()} == set(found)
        for name, r in found.items():
            assert data[r.offset : r.offset + r.length] == z.read(f"archive/{name}")


def test_a_torch_file_inside_another_file_is_read_from_its_base() -> None:
    data = b"x" * 77 + saved([torch.ones(3)]) + b"y" * 10
    (found,) = torch_zip.read(lambda at, n: data[at : at + n], 77, len(data) - 87, "x")
    assert bytes_of(data, found) == raw_bytes(torch.ones(3))


def test_a_sparse_tensor_is_refused_and_not_misread() -> None:
    with pytest.raises(CkpttoolError, match="sparse"):
        read(saved(torch.eye(3).to_sparse()))


def test_a_whole_module_is_refused_or_inert() -> None:
    found = read(saved({"net": torch.nn.Linear(1, 1)}))
    assert isinstance(found["net"], Opaque) and found["net"].cls == Global("torch.nn.modules.linear", "Linear")


# ------------------------------------------------------------------------------------------------ damaged on the way


def small_file(folder: Path, **how: Any) -> bytes:
    shared = torch.arange(6.0)
    value = {
        "model": {"w": torch.arange(12.0).reshape(3, 4).t(), "b": shared[2:5], "all": shared, "n": torch.tensor(7)},
        "step": 3,
    }
    data = saved(value, **how)
    (folder / "x.pt").write_bytes(data)
    return data


def outcome(path: Path) -> Any:
    """Digests over names, dtypes, shapes and bytes; or the class of an error of ours; any other error passes through."""
    try:
        return ckpttool.digest(path)
    except CkpttoolError as e:
        return type(e)


@pytest.mark.slow
def test_a_zip_with_any_one_byte_changed_is_refused_or_gives_the_same_tensors(tmp_path: Path) -> None:
    data = small_file(tmp_path)
    good = outcome(tmp_path / "x.pt")
    dice = random.Random(0)
    refused = 0
    for i in range(0, len(data), 3):
        bad = bytearray(data)
        bad[i] ^= dice.randrange(1, 256)
        (tmp_path / "x.pt").write_bytes(bad)
        found = outcome(tmp_path / "x.pt")
        assert found == good or isinstance(found, type), i
        refused += found != good
    assert refused > len(data) // 12  # the rest is padding, dates and the like


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path, zipped: bool) -> None:
    data = small_file(tmp_path, _use_new_zipfile_serialization=zipped)
    for n in range(0, len(data), 19):
        (tmp_path / "x.pt").write_bytes(data[:n])
        assert isinstance(outcome(tmp_path / "x.pt"), type), n


@pytest.mark.slow
def test_a_legacy_file_with_a_byte_changed_gives_an_error_of_ours_or_tensors_of_these_shapes(tmp_path: Path) -> None:
    # the legacy form has no checksum: what is left is that nothing else happens
    data = small_file(tmp_path, _use_new_zipfile_serialization=False)
    dice = random.Random(0)
    for i in range(0, len(data), 3):
        bad = bytearray(data)
        bad[i] ^= dice.randrange(1, 256)
        (tmp_path / "x.pt").write_bytes(bad)
        outcome(tmp_path / "x.pt")


def test_bytes_lost_in_the_middle_are_refused(tmp_path: Path) -> None:
    data = small_file(tmp_path)
    for i in range(0, len(data), 61):
        (tmp_path / "x.pt").write_bytes(data[:i] + data[i + 1 :])
        assert isinstance(outcome(tmp_path / "x.pt"), type)


def test_a_view_read_before_the_whole_of_its_storage_is_no_damage(tmp_path: Path) -> None:
    whole = torch.arange(2_000_000.0)
    torch.save({"part": whole[1_100_000:1_500_000], "whole": whole}, tmp_path / "x.pt")
    assert not isinstance(outcome(tmp_path / "x.pt"), type)


# ------------------------------------------------------------------------------------------------------- refusals


def refusal(data: bytes, kind: type[CkpttoolError]) -> str:
    with pytest.raises(CkpttoolError) as e:
        read(data)
    assert type(e.value) is kind, e.value
    return str(e.value)


def rezipped(change: Callable[[dict[str, bytes]], Any], **how: Any) -> bytes:
    """A torch file whose records were changed, zipped again by zipfile."""
    with zipfile.ZipFile(io.BytesIO(saved({"t": torch.ones(4)}))) as z:
        records = {i.filename: z.read(i) for i in z.infolist()}
    more = change(records) or []
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", **how) as z:
        for name, body in [*records.items(), *more]:
            z.writestr(name, body)
    return out.getvalue()


def nothing(records: dict[str, bytes]) -> None:
    return None


def test_a_zip_that_zipfile_wrote_is_read() -> None:
    data = rezipped(nothing)
    same(data, read(data), {"t": torch.ones(4)})


def test_compressed_records_are_refused() -> None:
    assert "is compressed" in refusal(rezipped(nothing, compression=zipfile.ZIP_DEFLATED), Unsafe)


@pytest.mark.parametrize(
    "name", ["../../evil", "archive/../evil", "other/data.pkl", "archive/a\\b", "/etc/passwd", "archive/"]
)
def test_records_outside_the_root_folder_are_refused(name: str) -> None:
    assert "outside the folder" in refusal(rezipped(lambda r: [(name, b"x")]), Unsafe)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_records_of_one_name_are_refused() -> None:
    assert "two records are named" in refusal(rezipped(lambda r: [("archive/data.pkl", b"x")]), Unsafe)


def test_bytes_after_the_end_and_comments_are_refused() -> None:
    assert "bytes follow the end" in refusal(saved([1]) + b"x", Unsafe)
    out = io.BytesIO(saved([1]))
    with zipfile.ZipFile(out, "a") as z:
        z.comment = b"another zip may hide here"
    with pytest.raises((Corrupt, Unsafe)):
        read(out.getvalue())


def test_a_zip_behind_other_bytes_is_refused() -> None:
    data = b"PK\x03\x04" + b"x" * 96 + saved([1])
    with pytest.raises((Corrupt, Unsafe)):
        read(data)


def test_torchscript_big_endian_and_strange_byte_orders_are_refused() -> None:
    assert "TorchScript" in refusal(rezipped(lambda r: [("archive/constants.pkl", b"")]), Unsupported)
    assert "TorchScript" in refusal(rezipped(lambda r: [("archive/code/x.py", b"")]), Unsupported)
    assert "big-endian" in refusal(rezipped(lambda r: r.update({"archive/byteorder": b"big"})), Unsupported)
    assert "byte order is b'middle'" in refusal(rezipped(lambda r: r.update({"archive/byteorder": b"middle"})), Corrupt)


def test_missing_records_are_corrupt() -> None:
    assert "has no data.pkl" in refusal(rezipped(lambda r: r.pop("archive/data.pkl") and None), Corrupt)
    assert "storage '0' is missing" in refusal(rezipped(lambda r: r.pop("archive/data/0") and None), Corrupt)


@pytest.mark.parametrize("body", [b"", b"x" * 15, b"x" * 17, b"x" * 1000])
def test_a_storage_of_another_length_than_declared_is_corrupt(body: bytes) -> None:
    assert "but the pickle declares 4 elements" in refusal(
        rezipped(lambda r: r.update({"archive/data/0": body})), Corrupt
    )


def test_an_encrypted_flag_is_refused() -> None:
    data = bytearray(saved([1]))
    data[data.index(b"PK\x01\x02") + 8] |= 1
    assert "encrypted" in refusal(bytes(data), Unsafe)


def test_records_that_share_bytes_are_refused() -> None:
    out, entries = bytearray(), []
    for name, body in (("a/version", b"3\n"), ("a/data.pkl", b"N."), ("a/x", b"12345678")):
        entries.append((name, len(out), len(body), zlib.crc32(body), False))
        out += zip_bytes.make_local_header(name, len(body), zlib.crc32(body), len(out)) + body
    name, at, size, crc, _ = entries[2]
    assert read(bytes(out + zip_bytes.make_central_directory(entries, len(out)))) is None
    twice = bytes(out + zip_bytes.make_central_directory([*entries, ("a/y", at, size, crc, False)], len(out)))
    assert "overlaps another" in refusal(twice, Unsafe)
    moved = bytes(out + zip_bytes.make_central_directory([*entries[:2], (name, at + 1, size, crc, False)], len(out)))
    assert "disagrees" in refusal(moved, Unsafe) or "overlaps" in refusal(moved, Unsafe)
    longer = bytes(out + zip_bytes.make_central_directory([*entries[:2], (name, at, size + 9, crc, False)], len(out)))
    with pytest.raises((Corrupt, Unsafe)):
        read(longer)


def test_a_zip64_field_longer_than_its_place_is_refused() -> None:
    body = b"N."
    head = zip_bytes.make_local_header("a/data.pkl", len(body), zlib.crc32(body), 0) + body
    good = zip_bytes.make_central_directory([("a/data.pkl", 0, len(body), zlib.crc32(body), False)], len(head))
    entry, extra = bytearray(good[:-22]), struct.pack("<HHQ", 1, 16, 2)
    entry[30:32] = struct.pack("<H", len(extra))
    entry[20:28] = b"\xff" * 8
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1, 1, len(entry) + len(extra), len(head), 0)
    with pytest.raises((Corrupt, Unsafe)):
        read(head + bytes(entry) + extra + end)


def pickled(*instructions: bytes) -> bytes:
    """A torch file with one storage of four floats and this pickle, in which INT_BINGET 0 is the storage."""
    storage = pickle.dumps(("storage", torch.FloatStorage, "0", "cpu", 4), 2)[2:-1]
    data = b"\x80\x02" + storage + b"Qr\xe8\x03\x00\x000" + b"".join(instructions) + b"."
    return rezipped(lambda r: r.update({"archive/data.pkl": data}))


def rebuilt(offset: Any, size: Any, stride: Any) -> bytes:
    arguments = b"".join(pickle.dumps(x, 2)[2:-1] for x in (offset, size, stride, False, {}))
    return pickled(b"ctorch._utils\n_rebuild_tensor_v2\n(j\xe8\x03\x00\x00" + arguments + b"tR")


def test_a_tensor_that_reaches_past_its_storage_is_corrupt() -> None:
    same(rebuilt(1, (3,), (1,)), read(rebuilt(1, (3,), (1,))), torch.ones(3))
    for args in [
        (0, (5,), (1,)),
        (1, (4,), (1,)),
        (0, (2, 2), (3, 1)),
        (4, (1,), (1,)),
        (0, (2,), (1 << 50,)),
        (1 << 61, (1,), (1,)),
    ]:
        assert "reaches past its storage" in refusal(rebuilt(*args), Corrupt), args


@pytest.mark.parametrize(
    "args",
    [(-1, (1,), (1,)), (0, (-1,), (1,)), (0, (1,), (-1,)), (0, (1, 1), (1,)), (0.5, (1,), (1,)), (0, (1.5,), (1,)), (0, "1", (1,)),
     (0, (1 << 57,), (0,)), (0, (1 << 30, 1 << 30), (0, 0)), (0, (1,) * 65, (1,) * 65), (True, (1,), (1,))],
)  # fmt: skip
def test_a_tensor_of_impossible_numbers_is_corrupt(args: Any) -> None:
    assert refusal(rebuilt(*args), Corrupt)


def test_a_storage_of_impossible_numbers_is_corrupt() -> None:
    for pid in [("storage", torch.FloatStorage, "0", "cpu", -1), ("storage", torch.FloatStorage, "0", "cpu", 1 << 60),
                ("storage", torch.FloatStorage, 0, "cpu", 4), ("module", torch.FloatStorage, "0", "cpu", 4), "0", ()]:  # fmt: skip
        data = pickle.dumps(pid, 2)[:-1] + b"Q."
        assert refusal(rezipped(lambda r, d=data: r.update({"archive/data.pkl": d})), Corrupt)
    data = pickle.dumps(("storage", Opaque, "0", "cpu", 4), 2)[:-1] + b"Q."
    assert "storage of class" in refusal(rezipped(lambda r: r.update({"archive/data.pkl": data})), Unsupported)


@pytest.mark.parametrize("where", ["size", "stride", "offset", "numel", "dtype", "torch.Size", "_get_layout"])
def test_numbers_without_bound_are_refused_and_not_printed(where: str) -> None:
    import resource
    import subprocess
    import sys

    many = b"K\x01" + b"q\x63h\x63\x86" * 40
    plain = {"offset": b"K\x00", "size": b"K\x01\x85", "stride": b"K\x01\x85"}
    arguments = b"".join(many if k == where else v for k, v in plain.items())
    data = {
        "numel": b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
        + many
        + b"tQ",
        "dtype": b"ctorch._utils\n_rebuild_tensor_v3\n(j\xe8\x03\x00\x00" + arguments + b"\x89N" + many + b"tR",
        "torch.Size": b"ctorch\nSize\n" + many + b"\x85R",
        "_get_layout": b"ctorch.serialization\n_get_layout\n" + many + b"\x85R",
    }.get(where) or b"ctorch._utils\n_rebuild_tensor_v2\n(j\xe8\x03\x00\x00" + arguments + b"\x89NtR"
    code = (
        "import sys; from ckpttool import errors; from ckpttool.formats import torch_zip; d = sys.stdin.buffer.read()\n"
    )
    code += "try: torch_zip.read(lambda at, n: d[at:at + n], 0, len(d), 'x')\n"
    code += "except (errors.Unsafe, errors.Corrupt): sys.exit(9)"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickled(data), capture_output=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (1, 1)),
    )  # fmt: skip
    assert done.returncode == 9, (done.returncode, done.stderr[-300:])


# ---------------------------------------------------------------------------------------------------- legacy files


def legacy(obj: bytes, keys: bytes, storages: bytes) -> bytes:
    head = saved([], _use_new_zipfile_serialization=False)[: -len(pickle.dumps([], 2)) * 2]
    return head + b"\x80\x02" + obj + b".\x80\x02" + keys + b"." + storages


LEGACY_STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x02NtQ"
LEGACY_TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n(" + LEGACY_STORAGE + b"K\x00K\x02\x85K\x01\x85\x89}tR"
TWO = struct.pack("<qff", 2, 1, 1)


def test_a_legacy_file_made_by_hand_is_read() -> None:
    data = legacy(LEGACY_TENSOR, b"]X\x01\x00\x00\x000a", TWO)
    assert torch.equal(torch.load(io.BytesIO(data)), torch.ones(2))
    same(data, read(data), torch.ones(2))


@pytest.mark.parametrize(
    ("keys", "storages"),
    [(b"]", TWO), (b"]X\x01\x00\x00\x001a", TWO), (b"N", TWO), (b"](X\x01\x00\x00\x000X\x01\x00\x00\x000e", TWO + TWO),
     (b"]X\x01\x00\x00\x000a", TWO + b"x"), (b"]X\x01\x00\x00\x000a", struct.pack("<qff", 3, 1, 1)),
     (b"]X\x01\x00\x00\x000a", struct.pack("<qff", -2, 1, 1))],
)  # fmt: skip
def test_a_legacy_file_whose_storages_disagree_with_its_pickle_is_corrupt(keys: bytes, storages: bytes) -> None:
    refusal(legacy(LEGACY_TENSOR, keys, storages), Corrupt)


def test_a_legacy_file_that_ends_before_its_storages_is_corrupt() -> None:
    refusal(legacy(LEGACY_TENSOR, b"]X\x01\x00\x00\x000a", b"\x02\x00"), Corrupt)


def test_a_legacy_file_whose_keys_are_numbers_is_corrupt() -> None:
    refusal(legacy(LEGACY_TENSOR, b"]K\x00a", TWO), Corrupt)


@pytest.mark.parametrize("data", [b"", b"x", b"garbage" * 30, b"PK\x03\x04", b"PK\x05\x06" + bytes(18)])
def test_what_is_no_torch_file_is_corrupt(data: bytes) -> None:
    refusal(data, Corrupt)


# --------------------------------------------------------------------------------------------------------- inlined


def test_a_strided_tensor_inside_a_tuple_keeps_its_values() -> None:
    value = (torch.arange(6.0).reshape(2, 3).t(), [torch.tensor(5)])
    data = saved(value)
    found = stored_tensors.inline_tensors(read(data), lambda at, n: data[at : at + n], "x")
    assert found[0] == Inline("float32", (3, 2), raw_bytes(value[0]))
    assert found[1] == [Inline("int64", (), raw_bytes(value[1][0]))]


def test_tensors_of_more_than_the_limit_inside_a_tuple_are_refused() -> None:
    data = saved((torch.zeros(100),))
    with pytest.raises(Unsupported, match="400 bytes of tensors inside a container"):
        stored_tensors.inline_tensors(read(data), lambda at, n: data[at : at + n], "x", most=399)


def test_a_damaged_tensor_inside_a_tuple_is_corrupt() -> None:
    data = bytearray(saved((torch.arange(6.0), "x")))
    data[data.index(struct.pack("<f", 5.0))] ^= 1
    with pytest.raises(Corrupt):
        stored_tensors.inline_tensors(read(bytes(data)), lambda at, n: bytes(data[at : at + n]), "x")


def test_an_expanded_tensor_that_unfolds_to_more_than_the_limit_is_refused() -> None:
    data = saved((torch.zeros(1).expand(1000, 1000),))
    with pytest.raises(Unsupported):
        stored_tensors.inline_tensors(read(data), lambda at, n: data[at : at + n], "x", most=1_000_000)


# --------------------------------------------------------------------------------------------------------- writing

VALUES: list[Any] = [
    None, True, 3, -1.5, "text", [1, "a", None], {"lr": 0.1, "betas": [0.9, 0.95]}, (1, (2, 3)), {"ключ": "日本語"},
    Opaque(Global("torch", "device"), ("cpu",), call=True), Global("torch", "bfloat16"), 1 << 40, float("inf"),
    {"names": ["layers.0.weight"] * 300},
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(VALUES)))
def test_a_value_that_we_write_torch_and_zipfile_read(i: int) -> None:
    data = torch_pickles.save_small_file(VALUES[i])
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        assert z.testzip() is None
    found = torch.load(io.BytesIO(data), weights_only=True)
    wanted = {9: torch.device("cpu"), 10: torch.bfloat16}.get(i, VALUES[i])
    assert found == wanted and type(found) is type(wanted)
    assert read(data) == VALUES[i]


@pytest.mark.parametrize("dtype", MAKEABLE)
def test_a_small_tensor_of_every_dtype_that_we_write_torch_reads(dtype: str, tmp_path: Path) -> None:
    value = {"m": numbers(dtype, 2, 3), "scalar": numbers(dtype), "empty": numbers(dtype, 0, 2)}
    data = torch_pickles.save_small_file({k: Inline(dtype, tuple(t.shape), raw_bytes(t)) for k, t in value.items()})
    (tmp_path / "x.pt").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "x.pt") as z:
        assert z.testzip() is None
    for mapped in (False, True):
        found = torch.load(tmp_path / "x.pt", weights_only=True, mmap=mapped)
        for k, t in value.items():
            assert found[k].dtype == t.dtype and found[k].shape == t.shape and raw_bytes(found[k]) == raw_bytes(t)
    same(data, read(data), value)


def test_the_same_value_gives_the_same_bytes() -> None:
    assert torch_pickles.save_small_file(VALUES) == torch_pickles.save_small_file([*VALUES])


def big_zip(bodies: list[tuple[str, bytes, bool]], align: int = 64) -> bytes:
    """Records in a zip of ours; those marked have their CRC behind them."""
    out, entries = bytearray(), []
    for name, body, behind in bodies:
        crc = zlib.crc32(body)
        entries.append((name, len(out), len(body), crc, behind))
        out += zip_bytes.make_local_header(name, len(body), None if behind else crc, len(out), align) + body
        if behind:
            out += zip_bytes.make_data_descriptor(len(body), crc)
    return bytes(out + zip_bytes.make_central_directory(entries, len(out)))


NAMES = st.text("abcé日/._-0123", min_size=1, max_size=20).map(lambda s: "archive/x" + s.replace("/", "_"))


@given(
    st.lists(st.tuples(NAMES, st.binary(max_size=200), st.booleans()), max_size=6, unique_by=lambda r: r[0]),
    st.sampled_from((1, 8, 64)),
)
@settings(max_examples=50)
def test_records_that_we_write_zipfile_reads_and_each_is_aligned(
    bodies: list[tuple[str, bytes, bool]], align: int
) -> None:
    data = big_zip(bodies, align)
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        assert z.testzip() is None
        assert {i.filename: z.read(i) for i in z.infolist()} == {n: b for n, b, _ in bodies}
    found = zip_bytes.read_zip_records(lambda at, n: data[at : at + n], 0, len(data), "x")
    assert {"archive/" + n: data[r.offset : r.offset + r.length] for n, r in found.items()} == {
        n: b for n, b, _ in bodies
    }
    assert all(
        r.offset % align == 0 and r.crc32 == zlib.crc32(data[r.offset : r.offset + r.length]) for r in found.values()
    )


@pytest.mark.slow
def test_more_records_than_a_plain_zip_can_count_are_read_by_zipfile_and_by_us() -> None:
    data = big_zip([(f"archive/{i}", b"", False) for i in range(66_000)], 1)
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        assert len(z.infolist()) == 66_000
    assert len(zip_bytes.read_zip_records(lambda at, n: data[at : at + n], 0, len(data), "x")) == 66_000


GIB = 1 << 30


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("first_bytes", [5 * GIB, 0xFFFFFFFF, 0xFFFFFFFE, 4 * GIB])
def test_storages_of_four_gib_and_more_are_read_by_torch_zipfile_and_us(
    tmp_path: Path, first_bytes: int, behind: bool
) -> None:
    # a sparse file: no byte of the large storage is ever on the disk
    path, small = tmp_path / "x.pt", raw_bytes(torch.arange(3.0))
    tree = {"large": TensorRef("uint8", (first_bytes,), "0", first_bytes), "small": TensorRef("float32", (3,), "1", 3)}
    head, entries = torch_pickles.make_head("archive", torch_pickles.pickle_tree(tree))
    with open(path, "wb") as f:
        f.write(head)
        for key, size, body, crc in (("0", first_bytes, b"", 0), ("1", len(small), small, zlib.crc32(small))):
            at = f.tell()
            entries.append((f"archive/data/{key}", at, size, crc, behind))
            f.write(zip_bytes.make_local_header(f"archive/data/{key}", size, None if behind else crc, at, 64))
            assert f.tell() % 64 == 0
            f.write(body) if body else f.seek(size, os.SEEK_CUR)
            if behind:
                f.write(zip_bytes.make_data_descriptor(size, crc))
        f.write(zip_bytes.make_central_directory(entries, f.tell()))
    with zipfile.ZipFile(path) as z:
        info = {i.filename: i for i in z.infolist()}
        assert info["archive/data/0"].file_size == first_bytes and z.read("archive/data/1") == small
    found = torch.load(path, weights_only=True, mmap=True)
    assert found["large"].shape == (first_bytes,) and found["small"].tolist() == [0, 1, 2]
    assert found["large"][-1] == 0
    with open(path, "rb") as f:
        fd = f.fileno()
        ours = torch_zip.read(lambda at, n: os.pread(fd, n, at), 0, os.path.getsize(path), "x")
        assert ours["large"].span == first_bytes
        at, n = ours["small"].extent
        assert os.pread(fd, n, at) == small
    del found
    path.unlink()


def test_gather_is_what_numpy_makes_of_strides() -> None:
    storage = stored_tensors.Storage("float32", 0, 48, None)
    raw = np.arange(12, dtype="<f4").tobytes()
    t = StoredTensor("float32", (4, 3), (1, 4), storage, 0)
    assert stored_tensors.gather_strided(raw, t) == np.arange(12, dtype="<f4").reshape(3, 4).T.tobytes()


@pytest.mark.parametrize("zipped", (True, False))
def test_a_bare_storage_is_refused_by_name(zipped: bool, tmp_path: Path) -> None:
    bare = torch.arange(6.0).untyped_storage()
    state = {"model": {"w": torch.ones(3)}, "extra": {"s": [1, bare]}}
    torch.save(state, tmp_path / "s.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(Unsupported, match=r"s\.pt: extra\.s: .*holds, a bare storage of 24 bytes, which has no shape"):
        ckpttool.open(tmp_path / "s.pt")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable")
def test_an_item_of_dcp_that_is_a_bare_storage_is_refused_by_its_file(tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "s": (1, torch.arange(6.0).untyped_storage())}
    dcp.save(state, checkpoint_id=tmp_path / "bare")
    with pytest.raises(Unsupported, match=r"__0_0\.distcp at byte \d+: .*holds, a bare storage of 24 bytes"):
        ckpttool.open(tmp_path / "bare")
