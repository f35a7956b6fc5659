"""Streams: casts against torch, tensors in any chunks against numpy, and checksums that find every flipped byte."""

from __future__ import annotations

import os
import random
import time
import zlib
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
import zstandard
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.engine.copy.dtypes import cast, numpy_dtype
from ckpttool.engine.copy.fill import fill
from ckpttool.engine.copy.record_crcs import CrcMismatch, CrcVerifier
from ckpttool.engine.copy.stream import Reader, StreamJob
from ckpttool.engine.copy.tensor_digests import tensor_digests
from ckpttool.engine.copy.zstd_frames import decompress_ends
from ckpttool.errors import Corrupt, SourceChanged, Unsafe
from ckpttool.index import boxes
from ckpttool.index.checkpoint import ITEMSIZE, Checkpoint, Chunk, Chunks, TensorEntry
from ckpttool.index.draft import Draft, DraftFile
from ckpttool.index.records import Extent, Record, Records
from ckpttool.storage import source as store
from ckpttool.storage.buffers import IOBudget
from ckpttool.storage.local_destination import LocalDestination
from ckpttool.storage.source import Source

TINY = IOBudget(1, 32 << 10)  # two pages of it are for alignment, so blocks have 24 KiB

# ------------------------------------------------------------------------------------------------------------ cast

E4M3 = "float8_e4m3fn"


def ours(raw: bytes, dtype: str, to: str) -> bytes:
    out = bytearray(len(raw) // ITEMSIZE[dtype] * ITEMSIZE[to])
    cast(memoryview(raw), dtype, memoryview(out), to)
    return bytes(out)


def theirs(raw: bytes, dtype: str, to: str) -> bytes:
    t = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).to(getattr(torch, to))
    return bytes(t.view(torch.uint8).numpy())


def finite_bits(dtype: str, n: int) -> bytes:
    """Random bits of every exponent, and the edges of rounding; no NaN, no infinity."""
    raw = np.random.default_rng(0).integers(0, 256, n * ITEMSIZE[dtype], dtype=np.uint8)
    x = raw.view(numpy_dtype(dtype))
    if dtype == "float32":
        ties = (np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] + np.array(
            [0, 1, 0x7FFF, 0x8000, 0x8001, 0x1000], np.uint32
        )
        x = np.concatenate([x, ties.ravel().view(np.float32), np.linspace(-500, 500, 100_000, dtype=np.float32)])
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return x[np.isfinite(x.astype(np.float64))].tobytes()


@pytest.mark.parametrize(
    "to", ["bfloat16", "float16", E4M3, "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float64"]
)
def test_float32_is_rounded_as_torch_rounds_it(to: str) -> None:
    if to == E4M3 and torch.tensor(1e9).to(torch.float8_e4m3fn).isnan():
        pytest.skip("this torch makes NaN of what is too large, later ones the largest number")
    raw = finite_bits("float32", 300_000)
    a, b = ours(raw, "float32", to), theirs(raw, "float32", to)
    if a != b:  # say which numbers
        kind = numpy_dtype(to)
        bits = f"u{ITEMSIZE[to]}"
        wrong = np.flatnonzero(np.frombuffer(a, bits) != np.frombuffer(b, bits))[:5]
        x = np.frombuffer(raw, np.float32)[wrong]
        pytest.fail(f"{x} -> {np.frombuffer(a, kind)[wrong]}, torch {np.frombuffer(b, kind)[wrong]}")


@pytest.mark.parametrize(
    ("dtype", "to"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float8_e4m3fn", "float32"), ("float8_e5m2", "bfloat16"),
     ("float16", "bfloat16"), ("bfloat16", "float16"), ("bfloat16", "float64")],
)  # fmt: skip
def test_every_finite_number_of_a_small_dtype_is_converted_as_torch_converts_it(dtype: str, to: str) -> None:
    n = ITEMSIZE[dtype]
    every = np.arange(1 << (8 * n), dtype=f"u{n}").view(numpy_dtype(dtype))
    raw = every[np.isfinite(every.astype(np.float32))].tobytes()
    assert ours(raw, dtype, to) == theirs(raw, dtype, to)


@pytest.mark.parametrize("to", ["bfloat16", "float16", "float64", E4M3, "float8_e5m2"])
def test_nan_of_any_payload_and_sign_stays_nan_and_infinity_is_what_torch_makes_of_it(to: str) -> None:
    if to == E4M3 and torch.tensor(1e9).to(torch.float8_e4m3fn).isnan():
        pytest.skip("this torch makes NaN of infinity, later ones the largest number")
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000, 0x7F80FFFF], np.uint32)
    assert np.isnan(np.frombuffer(ours(bits.tobytes(), "float32", to), numpy_dtype(to)).astype(np.float64)).all()
    infinite = np.array([np.inf, -np.inf], np.float32).tobytes()
    a, b = (np.frombuffer(f(infinite, "float32", to), numpy_dtype(to)).astype(np.float64) for f in (ours, theirs))
    assert np.array_equal(a, b, equal_nan=True)


def test_float32_within_448_is_rounded_to_float8_as_torch_rounds_it() -> None:
    x = np.frombuffer(finite_bits("float32", 300_000), np.float32)
    raw = x[np.abs(x) <= 448].tobytes()
    assert ours(raw, "float32", "float8_e4m3fn") == theirs(raw, "float32", "float8_e4m3fn")


def test_zeros_keep_their_sign_and_denormals_their_bits() -> None:
    x = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-40], np.float32).tobytes()
    assert ours(x, "float32", "bfloat16") == theirs(x, "float32", "bfloat16")
    assert ours(x, "float32", "float64") == np.frombuffer(x, np.float32).astype(np.float64).tobytes()


def test_a_cast_of_more_than_one_piece_is_the_cast_of_all() -> None:
    raw = np.random.default_rng(1).standard_normal((256 << 10) * 2 + 17).astype(np.float32).tobytes()
    assert ours(raw, "float32", "bfloat16") == theirs(raw, "float32", "bfloat16")


def test_numpy_has_every_dtype_that_can_be_cast() -> None:
    assert numpy_dtype("bfloat16") == np.dtype(ml_dtypes.bfloat16)
    assert numpy_dtype("bool") == np.dtype("?")
    assert all(numpy_dtype(d).itemsize == ITEMSIZE[d] for d in ITEMSIZE if "float" in d and "float4" not in d)


# ---------------------------------------------------------------------------------------------------------- blocks


@st.composite
def a_chunking(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes of a tensor: shards of dim 0, a grid, or pieces cut again and again."""
    if not shape or prod(shape) == 0:
        return [((0,) * len(shape), shape)]
    kind = draw(st.sampled_from(("whole", "rows", "grid", "cut")))
    if kind in ("rows", "grid"):
        cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) if kind == "grid" or d == 0 else [0, n]
                for d, n in enumerate(shape)]  # fmt: skip
        out: list[Any] = [((), ())]
        for c in cuts:
            out = [((*s, a), (*k, b - a)) for s, k in out for a, b in pairwise(c)]
        return draw(st.permutations(out))
    todo: list[Any] = [((0,) * len(shape), shape)]
    out = []
    while todo:
        start, size = todo.pop()
        wide = [d for d, n in enumerate(size) if n > 1]
        if kind == "whole" or not wide or len(out) + len(todo) > 6:
            out.append((start, size))
            continue
        d = draw(st.sampled_from(wide))
        n = draw(st.integers(1, size[d] - 1))
        todo.append((start, (*size[:d], n, *size[d + 1 :])))
        todo.append(((*start[:d], start[d] + n, *start[d + 1 :]), (*size[:d], size[d] - n, *size[d + 1 :])))
    return draw(st.permutations(out))


def stored(
    whole: Any, box: tuple[tuple[int, ...], tuple[int, ...]], how: str, dice: random.Random
) -> tuple[bytes, Any, Any]:
    """(bytes in the file, strides, zstd) of a box of a tensor, stored row-major, strided or compressed."""
    part = whole[tuple(slice(s, s + k) for s, k in zip(*box, strict=True))].copy()
    if how == "strided" and part.size and part.ndim:  # a scalar has no strides
        order = list(range(part.ndim))
        dice.shuffle(order)
        gap = dice.choice((1, 1, 2, 5))  # and only every second element of the storage, say
        spaced = np.zeros((*(part.shape[d] for d in order), gap), part.dtype)
        spaced[..., 0] = part.transpose(order)
        own = [s // part.itemsize for s in spaced.strides]
        strides = [0] * part.ndim
        for d, s in zip(order, own, strict=False):
            strides[d] = s
        span = sum((n - 1) * s for n, s in zip(part.shape, strides, strict=True)) + 1
        return spaced.tobytes()[: span * part.itemsize], tuple(strides), None
    raw = part.tobytes()
    if how == "zstd" and part.size:
        skip = dice.choice((0, 1, 700, 3000))
        return (
            zstandard.compress(dice.randbytes(skip) + raw + b"tail"),
            None,
            (skip, dice.choice((None, zlib.crc32(raw)))),
        )
    return raw, None, None


class Made(NamedTuple):
    """A tensor, its elements, its chunks, the file they lie in, and checksums of some of them."""

    dtype: str
    whole: Any
    chunks: Chunks
    file: bytes
    records: Records

    def __repr__(self) -> str:
        return f"<{self.dtype} {self.whole.shape} in {self.chunks[:]}>"


@st.composite
def a_tensor(draw: st.DrawFn) -> Made:
    dtype = draw(st.sampled_from(("uint8", "bfloat16", "float32", "int64", "complex128")))
    shape = (
        tuple(draw(st.lists(st.integers(1, 40), max_size=3)))
        if draw(st.integers(0, 9))
        else (draw(st.integers(0, 2)), 0)
    )
    item = ITEMSIZE[dtype]
    dice = random.Random(draw(st.integers(0, 1 << 32)))
    whole = np.frombuffer(dice.randbytes(prod(shape) * item), f"V{item}").reshape(shape)
    chunks, file, records = Chunks(len(shape)), bytearray(), Records()
    for box in draw(a_chunking(shape)):
        raw, strides, zstd = stored(whole, box, draw(st.sampled_from(("plain", "plain", "strided", "zstd"))), dice)
        file += dice.randbytes(dice.choice((0, 1, 13, 4096)))
        chunks.add(*box, 0, len(file), len(raw), strides=strides, zstd=zstd)
        if zstd is None and dice.random() < 0.7:
            records.append(Record(Extent(0, len(file), len(raw)), zlib.crc32(raw)))
        file += raw
    return Made(dtype, whole, chunks, bytes(file + b"end"), records)


def put_together(reader: Reader, entry: TensorEntry, dtype: str, boxed: bool) -> bytes:
    """The bytes of a tensor from its blocks, and everything a block says about itself."""
    out = np.zeros(entry.shape, f"V{ITEMSIZE[dtype]}")
    flat = out.reshape(-1)
    at = 0
    for block in reader.blocks([StreamJob("t", entry, dtype, boxed=boxed)]):
        assert (block.name, block.first) == ("t", at) and len(block.data) == block.count * ITEMSIZE[
            dtype
        ] <= reader.block_bytes
        data = np.frombuffer(block.data, out.dtype)
        flat[at : at + block.count] = data
        at += block.count
        if boxed and block.count:
            assert prod(block.shape) == block.count and boxes.flat_start(entry.shape, block.start) == block.first
            inside = tuple(slice(s, s + n) for s, n in zip(block.start, block.shape, strict=True))
            assert np.array_equal(out[inside].reshape(-1), data)
        assert block.last == (at == entry.numel)
        del data
    reader.finish()
    return out.tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stream")


@pytest.mark.slow
@given(a_tensor(), st.booleans(), st.integers(1, 3))
@settings(max_examples=120)
def test_a_tensor_in_any_chunks_streams_as_numpy_has_it(folder: Path, made: Made, boxed: bool, jobs: int) -> None:
    dtype, whole, chunks, file, records = made
    (folder / "f").write_bytes(file)
    with Source(folder) as source:
        entry = TensorEntry(dtype, whole.shape, ("t",), chunks)
        assert (
            put_together(Reader(source, ["f"], records, IOBudget(jobs, 32 << 10)), entry, dtype, boxed)
            == whole.tobytes()
        )


@pytest.mark.slow
@given(a_tensor().filter(lambda t: t.dtype in ("bfloat16", "float32")), st.booleans(), st.integers(1, 3))
@settings(max_examples=40)
def test_a_tensor_in_any_chunks_is_cast_as_it_streams(folder: Path, made: Made, boxed: bool, jobs: int) -> None:
    dtype, whole, chunks, file, records = made
    to = "float32" if dtype == "bfloat16" else "bfloat16"
    (folder / "f").write_bytes(file)
    with Source(folder) as source:
        entry = TensorEntry(dtype, whole.shape, ("t",), chunks)
        assert put_together(Reader(source, ["f"], records, IOBudget(jobs, 32 << 10)), entry, to, boxed) == ours(
            whole.tobytes(), dtype, to
        )


@pytest.mark.slow
@given(a_tensor().filter(lambda t: t.records and t.whole.size), st.data())
@settings(max_examples=40)
def test_a_flipped_byte_anywhere_under_a_checksum_is_found(folder: Path, made: Made, data: st.DataObject) -> None:
    dtype, whole, chunks, file, records = made
    extent = data.draw(st.sampled_from(records)).extent
    bad = bytearray(file)
    bad[extent.offset + data.draw(st.integers(0, extent.length - 1))] ^= data.draw(st.integers(1, 255))
    (folder / "f").write_bytes(bad)
    entry = TensorEntry(dtype, whole.shape, ("t",), chunks)
    with Source(folder) as source, pytest.raises(Corrupt, match="the file itself says"):
        put_together(Reader(source, ["f"], records, TINY), entry, dtype, data.draw(st.booleans()))


def one_file(folder: Path, data: bytes) -> Source:
    (folder / "f").write_bytes(data)
    return Source(folder)


@pytest.mark.parametrize("offset", [0, 1, 4095, 4097])
@pytest.mark.parametrize("warm", [False, True])
def test_large_reads_around_the_page_cache_give_the_bytes_of_the_file(tmp_path: Path, offset: int, warm: bool) -> None:
    data = random.Random(0).randbytes(3_000_001)
    with one_file(tmp_path, data) as source:
        if warm:
            assert (tmp_path / "f").read_bytes() == data
        else:
            fd = source.fd("f")
            os.fsync(os.open(tmp_path / "f", os.O_RDWR))
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        n = len(data) - offset
        entry = TensorEntry("uint8", (n,), ("t",), Chunks.whole((n,), 0, offset, n))
        records = Records([Record(Extent(0, offset, n), zlib.crc32(data[offset:]))])
        assert (
            put_together(Reader(source, ["f"], records, IOBudget(2, 1 << 20)), entry, "uint8", False) == data[offset:]
        )


def test_a_scalar_plain_or_compressed_is_read(tmp_path: Path) -> None:
    packed = zstandard.compress(b"abcdefgh")
    with one_file(tmp_path, b"12345678" + packed) as source:
        for chunk, want in (
            (Chunk((), (), Extent(0, 0, 8)), b"12345678"),
            (Chunk((), (), Extent(0, 8, len(packed)), None, (0, None)), b"abcdefgh"),
        ):
            entry = TensorEntry("int64", (), ("t",), Chunks.of(0, [chunk]))
            assert put_together(Reader(source, ["f"], None, TINY), entry, "int64", False) == want


def test_an_expanded_tensor_is_its_one_element_many_times(tmp_path: Path) -> None:
    with one_file(tmp_path, b"1234") as source:
        entry = TensorEntry("float32", (50, 300), ("t",), Chunks.whole((50, 300), 0, 0, 4, (0, 0)))
        assert put_together(Reader(source, ["f"], None, TINY), entry, "float32", False) == b"1234" * 15000


def test_compressed_chunks_that_are_damaged_or_too_short_are_corrupt(tmp_path: Path) -> None:
    raw = random.Random(0).randbytes(60_000)
    packed = zstandard.compress(raw)
    cases = {
        "ends too early": (zstandard.compress(raw[:50_000]), None),
        "have CRC32": (packed, 5),
        "is damaged": (b"XXXX" + packed[4:], None),
    }
    for said, (data, crc) in cases.items():
        with one_file(tmp_path, data) as source, pytest.raises(Corrupt, match=said):
            chunk = Chunk((0,), (60_000,), Extent(0, 0, len(data)), None, (0, crc))
            entry = TensorEntry("uint8", (60_000,), ("t",), Chunks.of(1, [chunk]))
            put_together(Reader(source, ["f"], None, TINY), entry, "uint8", False)


def test_a_file_that_became_shorter_is_a_changed_source(tmp_path: Path) -> None:
    with one_file(tmp_path, bytes(5000)) as source:
        assert source.size("f") == 5000
        os.truncate(tmp_path / "f", 100)
        entry = TensorEntry("uint8", (5000,), ("t",), Chunks.whole((5000,), 0, 0, 5000))
        with pytest.raises(SourceChanged):
            put_together(Reader(source, ["f"], None, TINY), entry, "uint8", False)
        with pytest.raises(SourceChanged):
            source.assert_unchanged()


def test_a_block_that_is_dropped_early_leaves_the_reader_usable(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(200_000)
    with one_file(tmp_path, data) as source:
        reader = Reader(source, ["f"], None, TINY)
        entry = TensorEntry("uint8", (200_000,), ("t",), Chunks.whole((200_000,), 0, 0, 200_000))
        stream = reader.blocks([StreamJob("t", entry)])
        next(stream)
        stream.close()
        for _ in range(30):
            stream = reader.blocks([StreamJob("t", entry)])
            assert next(stream).first == 0
            stream.close()
        assert put_together(reader, entry, "uint8", False) == data


def test_unfold_counts_a_frame_and_keeps_its_ends(tmp_path: Path) -> None:
    raw = random.Random(0).randbytes(200_000)
    packed = zstandard.compress(raw)
    with one_file(tmp_path, b"__" + packed) as source:
        assert decompress_ends(source, "f", 2, len(packed), 200_000, "x") == (raw[:65536], raw[-65536:], 200_000)
        with pytest.raises(Unsafe, match="decompresses to more than 199999 bytes"):
            decompress_ends(source, "f", 2, len(packed), 199_999, "x")
        with pytest.raises(Corrupt, match="zstd frame is damaged"):
            decompress_ends(source, "f", 1, len(packed), 200_000, "x")


def test_a_frame_that_asks_for_a_huge_window_is_refused(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, write_content_size=False)
    packed = zstandard.ZstdCompressor(compression_params=parameters)
    stream = packed.compressobj()
    data = stream.compress(bytes(1000)) + stream.flush()
    with one_file(tmp_path, data) as source, pytest.raises((Corrupt, Unsafe)):
        decompress_ends(source, "f", 0, len(data), 1 << 20, "x")


# ------------------------------------------------------------------------------------------------------------ crcs


def told(crcs: CrcVerifier, file: int, offset: int, data: memoryview) -> Any:
    """(record, the CRC32 it has) where these bytes complete one that is damaged, else None."""
    try:
        crcs.update(file, offset, data)
    except CrcMismatch as e:
        return e.args
    return None


def pieces(length: int, cuts: list[int]) -> list[tuple[int, int]]:
    return [(a, b) for a, b in pairwise(sorted({0, length, *cuts}))]


@given(st.data())
def test_sums_find_any_flipped_byte_with_pieces_in_any_order(data: st.DataObject) -> None:
    raw = data.draw(st.binary(min_size=1, max_size=60))
    base = data.draw(st.integers(0, 100))
    records = Records([Record(Extent(0, base, len(raw)), zlib.crc32(raw)), Record(Extent(0, base + len(raw), 5), 0)])
    bad = bytearray(raw)
    flipped = data.draw(st.booleans())
    if flipped:
        bad[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    crcs = CrcVerifier(records)
    order = data.draw(st.permutations(pieces(len(raw), data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))))
    answers = [told(crcs, 0, base + a, memoryview(bad)[a:b]) for a, b in order]
    assert answers[:-1] == [None] * (len(order) - 1)
    assert answers[-1] == ((records[0], zlib.crc32(bad)) if flipped else None)
    assert list(crcs.missing_parts()) == []


def test_sums_of_bytes_that_are_read_again_behind_others_are_no_damage() -> None:
    raw = bytes(range(25))
    crcs = CrcVerifier(Records([Record(Extent(0, 0, 25), zlib.crc32(raw))]))
    for a, b in ((10, 20), (0, 10), (10, 20), (20, 25)):
        assert told(crcs, 0, a, memoryview(raw)[a:b]) is None
    assert list(crcs.missing_parts()) == []


@pytest.mark.slow
@given(st.data())
def test_sums_of_pieces_that_are_read_again_find_every_flipped_byte_and_no_other(data: st.DataObject) -> None:
    raw = bytes(range(40))
    bad = bytearray(raw)
    flipped = data.draw(st.booleans())
    if flipped:
        bad[data.draw(st.integers(0, 39))] ^= data.draw(st.integers(1, 255))
    crcs = CrcVerifier(Records([Record(Extent(0, 0, 40), zlib.crc32(raw))]))
    parts = st.sampled_from([(a, b) for a in range(0, 40, 10) for b in range(a + 10, 50, 10)])
    read = data.draw(st.lists(parts, min_size=1, max_size=8))
    answers = [told(crcs, 0, a, memoryview(bad)[a:b]) for a, b in read]
    answers += [told(crcs, 0, at, memoryview(bad)[at : at + n]) for _, at, n in list(crcs.missing_parts())]
    assert [a for a in answers if a] == (
        [(Record(Extent(0, 0, 40), zlib.crc32(raw)), zlib.crc32(bad))] if flipped else []
    )


def test_unfinished_are_the_gaps_of_what_was_begun() -> None:
    crcs = CrcVerifier(Records([Record(Extent(0, 10, 20), 1), Record(Extent(0, 50, 5), 2), Record(Extent(1, 0, 8), 3)]))
    told(crcs, 0, 14, memoryview(b"1234"))
    told(crcs, 1, 0, memoryview(b"12"))
    told(crcs, 0, 20, memoryview(b"1"))
    assert sorted(crcs.missing_parts()) == [(0, 10, 4), (0, 18, 2), (0, 21, 9), (1, 2, 6)]


def test_bytes_outside_of_records_and_files_without_any_mean_nothing() -> None:
    crcs = CrcVerifier(Records([Record(Extent(0, 10, 4), zlib.crc32(b"abcd"))]))
    assert told(crcs, 0, 0, memoryview(b"12345")) is None
    assert told(crcs, 3, 10, memoryview(b"abcd")) is None
    assert told(crcs, 0, 12, memoryview(b"12345")) is None
    assert told(crcs, 0, 10, memoryview(b"abcx")) == (
        Record(Extent(0, 10, 4), zlib.crc32(b"abcd")),
        zlib.crc32(b"abcx"),
    )


# ------------------------------------------------------------------------------------------------------------ fill


@pytest.mark.slow
@given(a_tensor(), a_tensor(), st.data())
@settings(max_examples=30)
def test_a_draft_in_any_boxes_is_filled_from_a_source_in_any_others(
    folder: Path, one: Made, two: Made, data: st.DataObject
) -> None:
    """Every chunk of the destination in a file of its own, so that all of them grow at once, as for a 2-D mesh."""
    made = {"a": one, "b": two}
    names = [f"{n}.src" for n in made]
    sources, records = {}, Records()
    for i, (n, (dtype, whole, chunks, raw, crcs)) in enumerate(made.items()):
        (folder / names[i]).write_bytes(raw)
        moved = Chunks.of(len(whole.shape), [c._replace(extent=c.extent._replace(file=i)) for c in chunks])
        sources[n] = TensorEntry(dtype, whole.shape, (n,), moved)
        records += [Record(r.extent._replace(file=i), r.crc32) for r in crcs]
    tensors, files = {}, []
    for n, s in sources.items():
        to = "bfloat16" if s.dtype == "float32" and data.draw(st.booleans()) else s.dtype
        chunks = Chunks(len(s.shape))
        for start, shape in data.draw(a_chunking(s.shape)):
            size = prod(shape) * ITEMSIZE[to]
            chunks.add(start, shape, len(files), 3, size)
            files.append(DraftFile(f"{len(files)}.out", 3 + size, b"HDR"))
        tensors[n] = TensorEntry(to, s.shape, (n,), chunks)
    files.append(DraftFile("marker", 2, lambda: b"ok"))
    out = Checkpoint("x", "out", None, [f.name for f in files], [f.size for f in files], tensors, {})
    with Source(folder) as source:
        staging = LocalDestination(str(folder / "out"), False, "plan" * 9, 1, False)
        try:
            digests = fill(Draft(out, sources, files), source, names, records, staging, lambda *_: None, TINY)
            written = {f.name: (Path(staging.tree) / f.name).read_bytes() for f in files}
        finally:
            staging.abandon()
    assert written.pop("marker") == b"ok"
    for n, (dtype, whole, _, _, _) in made.items():
        to = tensors[n].dtype
        want = whole.tobytes() if to == dtype else ours(whole.tobytes(), dtype, to)
        assert digests[n] == blake3(want).hexdigest()
        again = np.frombuffer(want, f"V{ITEMSIZE[to]}").reshape(whole.shape)
        for c in tensors[n].chunks:
            part = again[tuple(slice(s, s + k) for s, k in zip(c.start, c.shape, strict=True))]
            assert written[files[c.extent.file].name] == b"HDR" + part.tobytes()


def test_digests_are_over_row_major_bytes_whatever_the_chunks(tmp_path: Path) -> None:
    whole = np.arange(24, dtype=np.int64).reshape(4, 6)
    halves = [np.ascontiguousarray(whole[:, :3]), np.ascontiguousarray(whole[:, 3:])]
    with one_file(tmp_path, whole.tobytes() + halves[0].tobytes() + halves[1].tobytes()) as source:
        entries = {
            "whole": TensorEntry("int64", (4, 6), ("w",), Chunks.whole((4, 6), 0, 0, 192)),
            "halves": TensorEntry(
                "int64", (4, 6), ("h",),
                Chunks.of(2, [Chunk((0, 3), (4, 3), Extent(0, 288, 96)), Chunk((0, 0), (4, 3), Extent(0, 192, 96))]),
            ),
        }  # fmt: skip
        found = tensor_digests(entries, source, ["f"], Records(), lambda *_: None, budget=TINY)
    assert found["whole"] == found["halves"] == blake3(whole.tobytes()).hexdigest()


@pytest.mark.slow
def test_two_threads_that_read_more_files_than_are_kept_open_get_the_bytes_of_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_KEPT_OPEN", 3)
    for i in range(24):
        (tmp_path / str(i)).write_bytes(bytes([i]) * 2000)
    chunks = Chunks(2)
    for k in range(6000):
        chunks.add((k, 0), (1, 40), k * 7 % 24, k % 1900, 40)
    entry = TensorEntry("uint8", (6000, 40), ("t",), chunks)
    want = b"".join(bytes([k * 7 % 24]) * 40 for k in range(6000))
    for _ in range(3):
        with Source(tmp_path) as source:
            assert (
                put_together(
                    Reader(source, [str(i) for i in range(24)], None, IOBudget(4, 32 << 10)), entry, "uint8", False
                )
                == want
            )


# ------------------------------------------------------------------------------------------------------ tiny pieces


def tiny_pieces(folder: Path, pieces: int, files: int) -> tuple[dict[str, TensorEntry], Records, dict[str, bytes]]:
    """Tensors of a few bytes in some files, with a kilobyte between them, one row of each tensor in each file."""
    rng = random.Random(5)
    data = [bytearray(rng.randbytes(100)) for _ in range(files)]
    tensors, records, expected = {}, Records(), {}
    for i in range(pieces):
        width = rng.choice((1, 8, 100, 255))
        chunks = Chunks(2)
        expected[f"t{i}"] = b""
        for file in range(files):
            row = rng.randbytes(4 * width)
            chunks.add((file, 0), (1, width), file, len(data[file]), len(row))
            records.append(Record(Extent(file, len(data[file]), len(row)), zlib.crc32(row)))
            data[file] += row + rng.randbytes(rng.choice((900, 1500, 5000)))
            expected[f"t{i}"] += row
        tensors[f"t{i}"] = TensorEntry("float32", (files, width), ("model", f"t{i}"), chunks)
    for file in range(files):
        (folder / str(file)).write_bytes(data[file][: -500 if file else None])
    return tensors, records, expected


def test_stream_tiny_pieces_one_after_the_other_are_read_many_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, records, expected = tiny_pieces(tmp_path, 400, 5)
    calls: list[int] = []
    with Source(tmp_path) as source:
        plain = source.readinto

        def counted(name: str, offset: int, into: memoryview) -> None:
            calls.append(len(into))
            plain(name, offset, into)
            time.sleep(random.random() / 1000)  # so that the threads are at different places of each file

        monkeypatch.setattr(source, "readinto", counted)
        reader = Reader(source, [str(i) for i in range(5)], records)
        found: dict[str, bytes] = dict.fromkeys(tensors, b"")
        for block in reader.blocks([StreamJob(n, t) for n, t in tensors.items()]):
            found[block.name] += bytes(block.data)
        reader.finish()
    assert found == expected
    assert len(calls) < 2000 / 6


def test_stream_a_flipped_bit_in_a_tiny_piece_is_found(tmp_path: Path) -> None:
    tensors, records, _ = tiny_pieces(tmp_path, 60, 2)
    where = tensors["t40"].chunks[1].extent
    data = bytearray((tmp_path / "1").read_bytes())
    data[where.offset + 2] ^= 4
    (tmp_path / "1").write_bytes(data)
    with Source(tmp_path) as source, pytest.raises(Corrupt, match="CRC32"):
        for _ in Reader(source, ["0", "1"], records).blocks([StreamJob(n, t) for n, t in tensors.items()]):
            pass
