"""Items of dcp that are recognised by a template are read as the parser reads them, and no other item is recognised."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ckpttool.converters.dcp.items import HEAD, TAIL, Items, Template, make_end_reader, make_template
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.errors import CkpttoolError
from ckpttool.formats import torch_zip
from ckpttool.formats.crc import crc32
from ckpttool.formats.stored_tensors import StoredTensor
from ckpttool.formats.torch_pickles import TensorRef, make_head, pickle_tree
from ckpttool.formats.zip_bytes import make_central_directory, make_data_descriptor, make_local_header
from ckpttool.index.checkpoint import ITEMSIZE, Chunks, TensorEntry
from ckpttool.index.records import Extent, Record
from ckpttool.storage.source import Source

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

DTYPES = [d for d in ITEMSIZE if hasattr(torch, d) and "float4" not in d]


def saved(x: torch.Tensor) -> bytes:
    """The item that DCP writes of a tensor."""
    out = io.BytesIO()
    torch.save(x, out)
    return out.getvalue()


def filled(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of random bytes."""
    n = ITEMSIZE[dtype]
    for k in shape:
        n *= k
    raw = random.Random(seed).randbytes(n)
    if dtype == "bool":
        raw = bytes(b & 1 for b in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if n else torch.empty(0, dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).reshape(shape) if n else torch.empty(shape, dtype=getattr(torch, dtype))


def ends(item: bytes) -> tuple[bytes, bytes]:
    """What a reader of an item has of it at first."""
    return (item[:HEAD], item[-TAIL:]) if len(item) > HEAD else (item, item)


def parsed(item: bytes) -> StoredTensor:
    """What the parser finds."""
    found = torch_zip.read(lambda at, n: item[at : at + n], 0, len(item), "item")
    assert isinstance(found, StoredTensor)
    return found


def template_of(item: bytes) -> Template | None:
    return make_template(*ends(item), len(item), parsed(item), 0)


def by_template(
    t: Template, item: bytes
) -> tuple[int, int, int | None, tuple[int, ...] | None, tuple[int, int]] | None:
    """What the template says of an item: first byte and length of the tensor, CRC32, strides, the storage; None: nothing."""
    head, tail = ends(item)
    crc = t.crc_of(head, tail, len(item) - len(tail))
    return None if crc is None else (t.at, t.nbytes, crc or None, t.strides, t.payload)


def by_parser(item: bytes) -> tuple[int, int, int | None, tuple[int, ...] | None, tuple[int, int]]:
    """The same from the parser."""
    f = parsed(item)
    return (*f.extent, f.storage.crc32, None if f.contiguous else f.strides, (f.storage.offset, f.storage.length))


SHAPES = st.one_of(
    st.lists(st.integers(0, 4), min_size=0, max_size=8).map(tuple),
    st.sampled_from([(300,), (70000,), (1, 257), (1024, 8), (3, 0, 5)]),
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(DTYPES), SHAPES, st.integers(0, 1 << 30))
def test_items_of_torch_are_recognised_and_read_as_the_parser_reads_them(
    dtype: str, shape: tuple[int, ...], seed: int
) -> None:
    first, second = saved(filled(dtype, shape, seed)), saved(filled(dtype, shape, seed + 1))
    t = template_of(first)
    assert t is not None
    assert by_template(t, second) == by_parser(second)
    assert by_template(t, first) == by_parser(first)


def test_a_transposed_tensor_keeps_its_strides() -> None:
    a, b = (saved(filled("float32", (6, 4), seed).T) for seed in (1, 2))
    t = template_of(a)
    assert t is not None and t.strides == (1, 4)
    assert by_template(t, b) == by_parser(b)


def test_a_part_of_a_storage_is_not_the_storage() -> None:
    a, b = (saved(filled("float32", (6, 4), seed)[2:4]) for seed in (1, 2))
    t = template_of(a)
    assert t is not None and t.nbytes == 32 and t.payload[1] == 96
    assert by_template(t, b) == by_parser(b)


def changed(item: bytes, at: int, bit: int) -> bytes:
    out = bytearray(item)
    out[at] ^= 1 << bit
    return bytes(out)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("float32", (2, 3)), ("bfloat16", ()), ("float8_e4m3fn", (5,)), ("int64", (0, 3)), ("float32", (700, 2))],
)
def test_a_changed_byte_is_read_as_the_parser_reads_it_or_not_recognised(dtype: str, shape: tuple[int, ...]) -> None:
    """Every byte of an item, two bits of each: whatever the template accepts, the parser accepts and reads the same."""
    t = template_of(saved(filled(dtype, shape, 1)))
    item = saved(filled(dtype, shape, 2))
    assert t is not None
    accepted = 0
    for at in range(len(item)):
        for bit in (0, 5):
            other = changed(item, at, bit)
            found = by_template(t, other)
            if found is not None:
                accepted += 1
                assert found == by_parser(other)
    frame = len(item) - t.payload[1]
    assert 0 < accepted - 2 * t.payload[1] < 0.1 * 2 * frame  # hashes and CRC32s


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["float32", "float8_e5m2"]), st.data())
def test_several_changed_bytes_likewise(dtype: str, data: st.DataObject) -> None:
    t = template_of(saved(filled(dtype, (2, 3), 1)))
    item = bytearray(saved(filled(dtype, (2, 3), 2)))
    assert t is not None
    around = [t.crc_at + i for i in range(-4, 8)] + list(range(sum(t.payload), sum(t.payload) + 24))
    for at in data.draw(st.lists(st.one_of(st.sampled_from(around), st.integers(0, len(item) - 1)), max_size=6)):
        item[at] = data.draw(st.integers(0, 255))
    found = by_template(t, bytes(item))
    if found is not None:
        assert found == by_parser(bytes(item))


def crafted(between: bytes, *, described: bool = True, twice: bool = False) -> bytes:
    """An item of four bytes of payload, and what is given, between the payload and the directory."""
    pkl = pickle_tree(TensorRef("float32", (1,), "0", 1))
    head, records = make_head("archive", pkl)
    payload = b"abcd"
    crc = crc32(payload)
    header = make_local_header("archive/data/0", 4, None if described else crc, len(head), 64)
    out = head + header + payload + between
    records = [*records, ("archive/data/0", len(head), 4, crc, described)]
    return out + make_central_directory(records, len(out))


def test_an_item_whose_crc_is_in_the_local_header_has_no_template() -> None:
    """The parser compares that one with the directory's."""
    assert template_of(crafted(b"", described=False)) is None


def test_an_item_of_our_own_has_a_template() -> None:
    t = template_of(crafted(make_data_descriptor(4, crc32(b"abcd"))))
    assert t is not None
    other = crafted(make_data_descriptor(4, 7))
    assert by_template(t, other) == by_parser(other)


def test_what_looks_like_a_descriptor_and_is_a_record_is_compared() -> None:
    """After the payload: the first bytes of a descriptor, and where its CRC would be, the header of another record."""
    pkl = pickle_tree(TensorRef("float32", (1,), "0", 1))
    head, records = make_head("archive", pkl)
    crc = crc32(b"abcd")
    out = head + make_local_header("archive/data/0", 4, None, len(head), 64) + b"abcd" + b"PK\x07\x08"
    at = len(out)
    out += make_local_header("archive/extra", 3, crc32(b"xyz"), at) + b"xyz"
    entries = [*records, ("archive/data/0", len(head), 4, crc, True), ("archive/extra", at, 3, crc32(b"xyz"), False)]
    item = out + make_central_directory(entries, len(out))
    t = template_of(item)
    assert t is not None
    broken = item[:at] + b"XXXX" + item[at + 4 :]
    with pytest.raises(CkpttoolError):
        parsed(broken)
    assert by_template(t, broken) is None


def test_a_record_that_reaches_into_the_middle_has_no_template() -> None:
    """A zip with more around its payload than is read at first."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(filled("float32", (2,), 1)))) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
        new.writestr("archive/more", bytes(9000))
    assert template_of(out.getvalue()) is None


def items_of(folder: Path, tensors: list[torch.Tensor], gap: int) -> tuple[TensorEntry, list[bytes]]:
    """A file of items, as .metadata lists them."""
    raw = [saved(x) for x in tensors]
    shape = tuple(tensors[0].shape)
    chunks, at = Chunks(len(shape)), gap
    data = bytearray(gap)
    for k, item in enumerate(raw):
        chunks.add((k * shape[0], *[0] * (len(shape) - 1)), shape, 0, at, len(item))
        data += item
        at += len(item)
    (folder / "__0_0.distcp").write_bytes(data)
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    return TensorEntry(dtype, (len(raw) * shape[0], *shape[1:]), ("model", "w"), chunks, "torch.save"), raw


def one_by_one(entry: TensorEntry, raw: list[bytes]) -> Iterator[tuple[int, int, Record]]:
    for k, item in enumerate(raw):
        f = parsed(item)
        base = entry.chunks.offset[k]
        assert f.storage.crc32 is not None
        record = Record(Extent(0, base + f.storage.offset, f.storage.length), f.storage.crc32)
        yield base + f.extent[0], f.extent[1], record


@pytest.mark.parametrize("shape", [(2, 3), (1, 900), (64, 900)])
def test_a_file_of_items_is_located_as_item_by_item(tmp_path: Path, shape: tuple[int, ...]) -> None:
    entry, raw = items_of(tmp_path, [filled("bfloat16", shape, seed) for seed in range(90)], gap=13)
    with Source(tmp_path) as source:
        items = Items(source, ["__0_0.distcp"])
        found = items.locate("model.w", entry)
    assert list(zip(found.offset, found.length, items.records, strict=True)) == list(one_by_one(entry, raw))
    assert found.boxes() == entry.chunks.boxes()


@pytest.mark.parametrize("shape", [(2, 3), (64, 900)])
@pytest.mark.parametrize("what", ["shape", "dtype", "pickle", "name", "end"])
def test_a_wrong_item_among_many_is_refused(tmp_path: Path, shape: tuple[int, ...], what: str) -> None:
    entry, raw = items_of(tmp_path, [filled("float32", shape, seed) for seed in range(20)], gap=0)
    bad = bytearray(raw[11])
    if what == "shape":
        bad = bytearray(saved(filled("float32", shape[::-1], 3)))
    elif what == "dtype":
        bad = bytearray(saved(filled("int32", shape, 3)))
    elif what == "pickle":
        bad[bad.index(b"_rebuild_tensor_v2")] ^= 1
    elif what == "name":
        bad[bad.rindex(b"archive/data/0")] ^= 1
    else:
        bad[-22] ^= 1
    if len(bad) != len(raw[11]):
        pytest.skip("another length: .metadata would say so")
    path = tmp_path / "__0_0.distcp"
    at = entry.chunks.offset[11]
    data = path.read_bytes()
    path.write_bytes(data[:at] + bytes(bad) + data[at + len(bad) :])
    with Source(tmp_path) as source, pytest.raises(CkpttoolError):
        Items(source, ["__0_0.distcp"]).locate("model.w", entry)


def test_windows_are_only_the_ends() -> None:
    read = make_end_reader(b"abcd", b"wxyz", 100)
    assert read(1, 2) == b"bc" and read(97, 3) == b"xyz"
    with pytest.raises(LookupError):
        read(3, 2)
