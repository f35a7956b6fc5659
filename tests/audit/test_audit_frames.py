"""The file of an archive: byte planes, frames at known places, tables, and what a flipped bit or a hostile file does.

The seek table is parsed here a second time, from its specification, and the frames are unfolded by `zstd` itself.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import shutil
import struct
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.audit import byte_planes, frame_format, frame_walk, frame_writer
from ckpttool.audit.frame_format import FRAME, read_frame_table
from ckpttool.audit.frame_reader import FrameReader
from ckpttool.audit.frame_walk import FrameResult, walk_file
from ckpttool.audit.frame_writer import FrameWriter, Member, SplitPoint
from ckpttool.errors import CkpttoolError, Corrupt, NotRecognised, RemoteError, SourceChanged, Unsafe
from ckpttool.index.draft import EarlierFile
from ckpttool.storage.source import Source

needs_zstd = pytest.mark.skipif(shutil.which("zstd") is None, reason="needs the zstd program")
NAME = "a.tar.zst"


# ---------------------------------------------------------------------------------------------------------- stand-ins


def planes_of(data: bytes, item: int, block: int = 1 << 20) -> bytes:
    """As the contract says it: byte j of element i of a block of n elements is at j * n + i."""
    out = b""
    for at in range(0, len(data), block):
        part = data[at : at + block]
        n = len(part) // item
        new = bytearray(part)
        for i in range(n):
            for j in range(item):
                new[j * n + i] = part[i * item + j]
        out += bytes(new)
    return out


def stored_of(data: bytes, cuts: Sequence[SplitPoint], block: int) -> bytes:
    ends = [*(c.offset for c in cuts[1:]), len(data)]
    return b"".join(planes_of(data[c.offset : e], c.item, block) for c, e in zip(cuts, ends, strict=True))


class Memory(Source):
    """A file in memory, counting what is read of it."""

    local = False

    def __init__(self, data: bytes) -> None:
        self.root, self.data = "memory:", data
        self.reads: list[tuple[int, int]] = []

    def size(self, name: str) -> int:
        assert name == NAME
        return len(self.data)

    def read(self, name: str, offset: int, length: int) -> bytes:
        assert offset >= 0 and length >= 0 and offset + length <= len(self.data)
        self.reads.append((offset, length))
        return self.data[offset : offset + length]

    def readinto(self, name: str, offset: int, into: memoryview) -> None:
        into[:] = self.read(name, offset, len(into))


def pack(
    data: bytes, cuts: Sequence[SplitPoint], members: Sequence[Member] = (), *, level: int = 1, jobs: int = 2, step: int = 1 << 22,
) -> tuple[bytes, dict[str, str]]:  # fmt: skip
    """(the file, the hashes)."""
    out = bytearray()
    writer = FrameWriter(out.extend, cuts, members, level=level, jobs=jobs)
    try:
        for at in range(0, len(data), step):
            writer.append(data[at : at + step])
        writer.finish()
        return bytes(out), writer.member_sums()
    finally:
        writer.close()


def tables(frames: Sequence[tuple[bytes, int]]) -> tuple[bytes, bytes]:
    """(CRC table, seek table) of frames and the size that is said of each, written a second time."""
    crc = b"CKPTCRC1" + struct.pack("<I", len(frames)) + b"".join(struct.pack("<I", zlib.crc32(f)) for f, _ in frames)
    crc += struct.pack("<I", zlib.crc32(crc))
    crc = struct.pack("<II", 0x184D2A5C, len(crc)) + crc
    rows = b"".join(struct.pack("<II", len(f), n) + f[-4:].rjust(4, b"\0") for f, n in frames)
    rows += struct.pack("<III", len(crc), 0, 0)
    seek = rows + struct.pack("<IBI", len(frames) + 1, 0x80, 0x8F92EAB1)
    return crc, struct.pack("<II", 0x184D2A5E, len(seek)) + seek


def file_of(frames: Sequence[tuple[bytes, int]]) -> bytes:
    return b"".join([*(f for f, _ in frames), *tables(frames)])


def frame_of(data: bytes, **other: Any) -> bytes:
    said: dict[str, Any] = {
        "write_checksum": True,
        "write_content_size": True,
        "write_dict_id": False,
        "window_log": 22,
    }
    made = zstandard.ZstdCompressionParameters(compression_level=1, **(said | other))
    return zstandard.ZstdCompressor(compression_params=made).compress(data)


def rows_of(data: bytes, jobs: int = 1) -> list[FrameResult]:
    """All that `walk_file` says, and what it must say in any case: rows in order, a fault or the content, never both."""
    rows = list(walk_file(Memory(data), NAME, jobs))
    for r in rows:
        assert (r.stored is None) == (r.fault is not None)
        if r.stored is not None:
            assert r.length == len(r.stored) > 0 and r.start >= 0
        if r.start < 0:
            assert r.length == 0
    starts = [r.start for r in rows if r.start >= 0]
    assert starts == sorted(starts)
    return rows


def faults(rows: Sequence[FrameResult]) -> list[FrameResult]:
    return [r for r in rows if r.fault is not None]


def whole(data: bytes) -> bytes:
    """The stored bytes of a sound file."""
    rows = rows_of(data)
    assert not faults(rows)
    return b"".join(r.stored or b"" for r in rows)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of 4 KiB and blocks of 1 KiB, so that a few bytes have many."""
    for module in (frame_format, frame_writer):
        monkeypatch.setattr(module, "FRAME", 4096)
    monkeypatch.setattr(byte_planes, "BLOCK", 1024)


# -------------------------------------------------------------------------------------------------------- byte planes


@given(st.binary(max_size=200), st.sampled_from([1, 2, 4, 8, 16]))
def test_planes_are_what_the_contract_says_and_come_back(data: bytes, item: int) -> None:
    made = byte_planes.split(data, item)
    assert bytes(made) == planes_of(data, item)
    assert bytes(byte_planes.merge(made, item)) == data


@pytest.mark.parametrize("item", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("size", [0, 1 << 20, (1 << 20) + 16, (2 << 20) + 48, (3 << 20) - 16])
def test_blocks_begin_every_mebibyte(item: int, size: int) -> None:
    data = random.Random(size).randbytes(size)
    want = b"".join(
        np.frombuffer(data[a : a + (1 << 20)], "u1").reshape(-1, item).T.tobytes() for a in range(0, size, 1 << 20)
    )
    out = memoryview(bytearray(size + 3))[3:]  # not aligned
    assert bytes(byte_planes.split(data, item, out)) == want == bytes(out)
    back = memoryview(bytearray(size + 1))[1:]
    assert bytes(byte_planes.merge(out, item, back)) == data == bytes(back)


# ------------------------------------------------------------------------------------------------------------ the file


def sample() -> tuple[bytes, list[SplitPoint], list[Member]]:
    """Text, bf16 and fp32 of more than one frame, a run of zeros, text again, and a cut at the end of it all."""
    dice = np.random.default_rng(5)
    head = b"README\n" * 100
    bf16 = (dice.standard_normal((9 << 20) // 2, dtype="f4") * 0.02).astype(ml_dtypes.bfloat16).tobytes()
    fp32 = dice.standard_normal(300_001, dtype="f4").tobytes()
    zeros, tail = bytes(70_000), b'{"values": 1}\n' * 50
    parts = [(head, 1, False), (bf16, 2, True), (fp32, 4, True), (zeros, 8, True), (tail, 1, False)]
    cuts, members, at = [], [], 0
    for i, (part, item, fast) in enumerate(parts):
        cuts.append(SplitPoint(at, item, fast))
        members.append(Member(f"m{i}", at, at + len(part)))
        at += len(part)
    cuts.append(SplitPoint(at, 1, False))
    return b"".join(p for p, _, _ in parts), cuts, members


@pytest.fixture(scope="module")
def packed() -> tuple[bytes, dict[str, str]]:
    data, cuts, members = sample()
    return pack(data, cuts, members)


def test_the_file_is_frames_and_tables_by_the_specification(packed: tuple[bytes, dict[str, str]]) -> None:
    data, cuts, _ = sample()
    file, _ = packed
    frames, descriptor, magic = struct.unpack("<IBI", file[-9:])
    assert (magic, descriptor) == (0x8F92EAB1, 0x80)
    begin = len(file) - 17 - 12 * frames
    assert struct.unpack_from("<II", file, begin) == (0x184D2A5E, 12 * frames + 9)
    rows = list(struct.iter_unpack("<III", file[begin + 8 : -9]))
    assert len(rows) == frames == 8  # text, bf16 in three, fp32, zeros, text; the CRC table
    assert [r[1] for r in rows] == [700, 4 << 20, 4 << 20, 1 << 20, 1_200_004, 70_000, 700, 0]
    stored, at, content = stored_of(data, cuts, 1 << 20), 0, 0
    crcs = []
    for size, length, checksum in rows[:-1]:
        frame = file[at : at + size]
        said = zstandard.get_frame_parameters(frame)
        assert (said.content_size, said.window_size, said.dict_id, said.has_checksum) == (
            length,
            max(length, 0),
            0,
            True,
        )
        assert frame[4] & 0x20  # single segment
        assert (
            zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False) == stored[content : content + length]
        )
        assert struct.pack("<I", checksum) == frame[-4:]
        crcs.append(zlib.crc32(frame))
        at, content = at + size, content + length
    assert content == len(data)
    assert rows[-1] == (8 + 8 + 4 + 28 + 4, 0, 0) and at + rows[-1][0] == begin
    payload = file[at + 8 : begin]
    assert struct.unpack_from("<II", file, at) == (0x184D2A5C, len(payload))
    assert payload[:-4] == b"CKPTCRC1" + struct.pack("<8I", 7, *crcs)
    assert payload[-4:] == struct.pack("<I", zlib.crc32(payload[:-4]))
    assert file.endswith(b"".join(tables([(file[a : a + s], n) for a, (s, n, _) in zip(
        itertools.accumulate([0, *(r[0] for r in rows[:-2])]), rows[:-1], strict=True)])))  # fmt: skip


def test_hashes_are_those_of_the_stored_bytes(packed: tuple[bytes, dict[str, str]]) -> None:
    data, cuts, members = sample()
    stored = stored_of(data, cuts, 1 << 20)
    assert packed[1] == {m.name: hashlib.sha256(stored[m.start : m.end]).hexdigest() for m in members}


@needs_zstd
def test_zstd_itself_unfolds_tests_and_lists_it(packed: tuple[bytes, dict[str, str]], tmp_path: Path) -> None:
    data, cuts, _ = sample()
    (tmp_path / NAME).write_bytes(packed[0])
    run = lambda *a: subprocess.run(["zstd", *a, NAME], cwd=tmp_path, capture_output=True, check=True)  # noqa: E731
    assert run("-dc").stdout == stored_of(data, cuts, 1 << 20)
    run("-t")
    listed = run("-l").stdout.decode().splitlines()[-1].split()
    assert listed[:2] == ["9", "2"] and "XXH64" in listed  # zstd counts the two skippable frames too


def test_a_real_file_is_read_and_walked(packed: tuple[bytes, dict[str, str]], tmp_path: Path) -> None:
    data, cuts, _ = sample()
    (tmp_path / NAME).write_bytes(packed[0])
    item = {c.offset: c.item for c in cuts}
    with Source(tmp_path) as source:
        table = read_frame_table(source, NAME)
        assert table.logical_size == len(data)
        starts = {s: item.get(s, 2) for s in table.starts}
        out = bytearray(len(data))
        FrameReader(source, NAME, table, starts.__getitem__).read_into(0, memoryview(out))
        assert out == data
        rows = list(walk_file(source, NAME, 2))
    assert b"".join(r.stored or b"" for r in rows) == stored_of(data, cuts, 1 << 20)
    assert [(r.start, r.length, r.offset, r.size, r.fault) for r in rows] == [
        (*row, None) for row in zip(table.starts, table.lengths, table.offsets, table.sizes, strict=True)
    ]


@pytest.mark.parametrize("data", [b"", b"x"])
def test_the_smallest_files(data: bytes) -> None:
    file, sums = pack(
        data, [SplitPoint(0, 1, False)], [Member("all", 0, len(data)), Member("none", len(data), len(data))]
    )
    assert whole(file) == data
    assert sums == ({"all": hashlib.sha256(data).hexdigest(), "none": hashlib.sha256().hexdigest()} if data else {})
    table = read_frame_table(Memory(file), NAME)
    assert table.logical_size == len(data) == len(table.starts)


@pytest.mark.parametrize("n", [1, 255, 256, 257, 65791, 65792, 65793, FRAME - 1, FRAME, FRAME + 1])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("level", [1, 3])
def test_every_size_of_frame_has_the_one_header(n: int, fast: bool, level: int) -> None:
    data = np.arange(n, dtype="<u4").tobytes()[:n]
    assert whole(pack(data, [SplitPoint(0, 1, fast)], level=level)[0]) == data


# ----------------------------------------------------------------------------- the same bytes, however they were written


def random_plan(dice: random.Random) -> tuple[bytes, list[SplitPoint], list[Member]]:
    """Parts of random lengths, whole elements each, for small frames; members from a cut on or within a cut of text."""
    data, cuts, members = b"", [], []
    for i in range(dice.randrange(1, 7)):
        item = dice.choice([1, 1, 2, 4, 8, 16])
        n = dice.choice([1, 3, 64, 100, 256, 300, 1000]) * dice.choice([1, 7]) * item
        part = dice.choice([bytes(n), dice.randbytes(n), (b"weights " * n)[:n]])
        cuts.append(SplitPoint(len(data), item, dice.random() < 0.5))
        skip = dice.randrange(n) if item == 1 else 0
        members.append(Member(f"m{i}", len(data) + skip, len(data) + n))
        data += part
    if dice.random() < 0.5:
        cuts.append(SplitPoint(len(data), 1, False))
    return data, cuts, members


def feed(writer: FrameWriter, data: bytes, dice: random.Random) -> None:
    at = 0
    while at < len(data):
        n = dice.choice([1, 5, 100, 1023, 1024, 1025, 4096, 5000, 20_000])
        kind = dice.choice([bytes, bytearray, memoryview])
        piece = bytearray(data[at : at + n])
        writer.append(kind(piece))
        piece[:] = bytes(len(piece))  # what was given is not kept
        at += n


@pytest.mark.parametrize("seed", range(60))
def test_threads_and_the_sizes_of_pieces_change_nothing(seed: int, small: None) -> None:
    dice = random.Random(seed)
    data, cuts, members = random_plan(dice)
    level = dice.choice([1, 1, 3, 9])
    want, sums = pack(data, cuts, members, level=level, jobs=1)
    stored = stored_of(data, cuts, 1024)
    assert whole(want) == stored
    assert sums == {m.name: hashlib.sha256(stored[m.start : m.end]).hexdigest() for m in members}
    for jobs in (1, 3):
        out = bytearray()
        writer = FrameWriter(out.extend, cuts, members[::-1], level=level, jobs=jobs)
        feed(writer, data, dice)
        assert writer.at == len(data)
        writer.finish()
        assert writer.member_sums() == sums
        writer.close()
        assert bytes(out) == want


def test_compressors_that_have_seen_much_make_the_same_frames(packed: tuple[bytes, dict[str, str]]) -> None:
    data, cuts, members = sample()
    for jobs, step in ((1, 1 << 20), (4, (1 << 20) + 4096), (2, 700_001)):
        assert pack(data, cuts, members, jobs=jobs, step=step) == packed


@pytest.mark.parametrize("seed", range(40))
def test_an_interrupted_file_is_gone_on_with(
    seed: int, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(1000 + seed)
    data, cuts, members = random_plan(dice)
    want, sums = pack(data, cuts, members)
    path = tmp_path / NAME
    inside = {c.offset for c in cuts if any(m.start < c.offset < m.end for m in members)}
    stops = [c.offset for c in cuts[1:] if c.offset not in inside]
    stop = dice.choice(stops) if stops else 0
    with open(path, "wb") as f:
        writer = FrameWriter(f.write, cuts, members, level=1, jobs=2)
        feed(writer, data[:stop], dice)
        assert writer.resumable()
        writer.flush()
        state = json.loads(json.dumps(writer.state()))
        feed(writer, data[stop : stop + 3000], dice)  # written on for a while, and lost
        writer.close()
    made: list[int] = []
    monkeypatch.setattr(frame_writer._Compress, "__call__", step_count(frame_writer._Compress.__call__, made))
    for lie in (
        None,
        {},
        {"frames": "?"},
        {"frames": "AAAAAQ=="},
        {"frames": 7},
    ):  # what it says is checked, not believed
        made.clear()
        out = bytearray()
        there = EarlierFile(state if lie is None else lie, lambda at, n: path.read_bytes()[at : at + n])
        writer = FrameWriter(out.extend, cuts, members, level=1, jobs=2, earlier=there)
        feed(writer, data[:stop], dice)
        writer.flush()
        if lie is None:
            assert not made, "frames that are there are not made again"
        feed(writer, data[stop:], dice)
        writer.finish()
        assert writer.member_sums() == sums
        writer.close()
        assert bytes(out) == want


def step_count(call: Any, made: list[int]) -> Any:
    def count(self: Any, data: Any, *args: Any) -> Any:
        made.append(len(data))
        return call(self, data, *args)

    return count


def test_resumable_only_at_cuts_outside_of_members(small: None) -> None:
    cuts = [SplitPoint(0, 1, False), SplitPoint(100, 1, False), SplitPoint(200, 2, True), SplitPoint(300, 1, False)]
    writer = FrameWriter(lambda b: None, cuts, [Member("a", 50, 250), Member("b", 250, 300)], level=1, jobs=1)
    can = []
    for at in range(400):
        assert writer.at == at
        if writer.resumable():
            can.append(at)
        writer.append(b"x")
    writer.close()
    assert can == [0, 300]


def test_sums_are_of_members_that_have_ended_also_within_a_frame() -> None:
    writer = FrameWriter(
        lambda b: None, [SplitPoint(0, 1, False)], [Member("a", 2, 5), Member("b", 6, 9)], level=1, jobs=1
    )
    seen = []
    for c in b"0123456789":
        seen.append(writer.member_sums())
        writer.append(bytes([c]))
    writer.finish()
    a, b = (hashlib.sha256(x).hexdigest() for x in (b"234", b"678"))
    assert seen == [{}] * 5 + [{"a": a}] * 4 + [{"a": a, "b": b}]
    assert writer.member_sums() == {"a": a, "b": b}
    writer.close()


def test_what_write_raises_reaches_the_caller_and_closing_ends(small: None) -> None:
    def full(data: bytes | memoryview) -> None:
        raise OSError(28, "no space")

    writer = FrameWriter(full, [SplitPoint(0, 1, False)], [], level=1, jobs=2)
    with pytest.raises(OSError, match="no space"):
        for _ in range(100):
            writer.append(bytes(4096))
    writer.close()


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_no_more_frames_are_in_flight_than_promised(jobs: int, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, lock = threading.Semaphore(0), threading.Lock()
    begun = 0
    real = frame_writer._Compress.__call__

    def slow(self: Any, data: memoryview, item: int, fast: bool) -> tuple[bytes, int]:
        nonlocal begun
        with lock:
            begun += 1
        gate.acquire()
        return real(self, data, item, fast)

    monkeypatch.setattr(frame_writer._Compress, "__call__", slow)
    written: list[int] = []
    writer = FrameWriter(lambda b: written.append(len(b)), [SplitPoint(0, 1, False)], [], level=1, jobs=jobs)
    frames, most, seen = 40, 2 * jobs + 2, 0

    def append() -> None:
        for _ in range(frames):
            writer.append(bytes(4096))
        writer.finish()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(append)
        for released in range(frames):
            still, waited = -1, 0
            while waited < 3:  # until the appending thread waits
                time.sleep(0.002)
                waited, still = (waited + 1, still) if writer.at == still else (0, writer.at)
            flying = writer.at // 4096 - len(written)
            seen = max(seen, flying)
            assert flying <= most and begun <= released + jobs
            gate.release()
        done.result()
    assert seen == most and writer._made == most
    assert len(written) == frames + 2
    writer.close()


@pytest.mark.parametrize("jobs", [1, 3])
def test_walking_reads_no_further_ahead_than_promised(jobs: int, small: None) -> None:
    file, _ = pack(random.Random(1).randbytes(4096 * 40), [SplitPoint(0, 1, False)])
    source = Memory(file)
    for k, row in enumerate(walk_file(source, NAME, jobs)):
        assert row.fault is None
        frames = [r for r in source.reads if r[1] > 4000]
        assert k < len(frames) <= k + 2 * jobs
    assert len(source.reads) == 3 + 40


def test_walking_may_be_left_early(small: None) -> None:
    file, _ = pack(random.Random(1).randbytes(4096 * 40), [SplitPoint(0, 1, False)])
    rows = walk_file(Memory(file), NAME, 2)
    before = {t.name for t in threading.enumerate()}
    assert next(rows).start == 0
    assert any(t.name.startswith("ckpttool-unfold") for t in threading.enumerate())
    rows.close()  # type: ignore[attr-defined]
    assert {t.name for t in threading.enumerate()} == before


# ---------------------------------------------------------------------------------------------------------- how small


def regression_moments() -> dict[str, bytes]:
    """exp_avg, exp_avg_sq and the weights of twenty steps of AdamW on a random regression."""
    dice = np.random.default_rng(3)
    true = dice.standard_normal((512, 1024)).astype("f4")
    scale = np.exp(dice.standard_normal(512)).astype("f4")
    w, m, v = (np.zeros_like(true) for _ in range(3))
    for step in range(1, 21):
        x = (dice.standard_normal((64, 512)) * scale).astype("f4")
        g = x.T @ (x @ (w - true)) / np.float32(64)
        m, v = (0.9 * m + 0.1 * g).astype("f4"), (0.999 * v + 0.001 * g * g).astype("f4")
        w = (w * 0.9999 - 1e-3 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)).astype("f4")
    return {"exp_avg": m.tobytes(), "exp_avg_sq": v.tobytes(), "master": w.tobytes()}


def plain(data: bytes) -> int:
    """What level 1 makes of it, in the same frames."""
    made = zstandard.ZstdCompressor(level=1, write_checksum=True)
    return sum(len(made.compress(data[a : a + FRAME])) for a in range(0, len(data), FRAME))


def size(data: bytes, item: int) -> int:
    file, _ = pack(data, [SplitPoint(0, item, True)])
    return sum(read_frame_table(Memory(file), NAME).sizes)


@pytest.mark.parametrize("item", [1, 4])
def test_moments_of_adam_are_as_small_as_with_plain_level_1(item: int) -> None:
    for name, data in regression_moments().items():
        shuffled = bytes(byte_planes.split(data, item))
        assert size(data, item) <= plain(shuffled), name
        if item > 1:
            assert size(data, item) < 0.93 * plain(data), name


def test_planes_of_weights_pay_as_much_as_was_measured() -> None:
    w = np.random.default_rng(0).standard_normal(4 << 20, dtype="f4") * np.float32(0.02)
    bf16 = w.astype(ml_dtypes.bfloat16).tobytes()
    assert len(bf16) / size(bf16, 2) > 1.48 and len(bf16) / size(bf16, 1) > 1.27
    assert len(w.tobytes()) / size(w.tobytes(), 4) > 1.19


@pytest.mark.parametrize("columns", [1, 100, 768, 4096, 5000, 11008])
def test_rows_that_repeat_are_still_found_in_planes(columns: int) -> None:
    dice = np.random.default_rng(columns)
    row = np.zeros(1, "f4") if columns == 1 else dice.standard_normal(columns, dtype="f4")
    same = np.resize(row.astype(ml_dtypes.bfloat16).view("u2"), 4 << 20).tobytes()
    assert size(same, 2) < 1.05 * plain(same) and len(same) > 180 * size(same, 2)


@pytest.mark.parametrize("columns", [768, 4096])
def test_a_table_of_which_a_third_is_one_row_is_still_small(columns: int) -> None:
    rows = np.random.default_rng(1).standard_normal(((4 << 20) // columns, columns), dtype="f4")
    rows[::3] = rows[0]
    data = rows.astype(ml_dtypes.bfloat16).tobytes()
    assert size(data, 2) < 0.95 * plain(data)


# ------------------------------------------------------------------------------------------------------------- reading


def opened(seed: int) -> tuple[bytes, Memory, Any, Callable[[int], int]]:
    dice = random.Random(seed)
    while True:
        data, cuts, _ = random_plan(dice)
        if len(data) > 20_000:
            break
    source = Memory(pack(data, cuts)[0])

    def item_at(start: int) -> int:
        return [c.item for c in cuts if c.offset <= start][-1]

    return data, source, read_frame_table(source, NAME), item_at


@pytest.mark.parametrize("seed", range(10))
def test_any_range_comes_out_as_it_was_before_the_planes(seed: int, small: None) -> None:
    data, source, table, item_at = opened(seed)
    reader = FrameReader(source, NAME, table, item_at, kept=3)
    dice = random.Random(seed)
    for _ in range(300):
        a = dice.randrange(len(data) + 1)
        b = dice.choice([a, min(a + 10, len(data)), dice.randrange(a, len(data) + 1), len(data)])
        out = memoryview(bytearray(b - a + 2))
        reader.read_into(a, out[1:-1])
        assert out[1:-1] == data[a:b] and out[0] == out[-1] == 0
        assert len(reader._frames) <= 3
    for a, n in ((-1, 1), (0, len(data) + 1), (len(data), 1), (len(data) + 5, 0), (1 << 70, 1)):
        with pytest.raises(Corrupt, match=f"decompresses to {len(data)} bytes"):
            reader.read_into(a, memoryview(bytearray(n)))


@pytest.mark.parametrize("item", [1, 4])
def test_a_frame_is_unfolded_once_while_it_is_kept_whoever_asks(item: int, small: None) -> None:
    data = random.Random(6).randbytes(4096 * 12 - 100)
    source = Memory(pack(data, [SplitPoint(0, item, True)])[0])
    table = read_frame_table(source, NAME)
    reader = FrameReader(source, NAME, table, lambda start: item, kept=12)
    source.reads.clear()

    def ask(k: int) -> None:
        dice = random.Random(k)
        for _ in range(200):
            a = dice.randrange(len(data) - 100)
            out = bytearray(100)
            reader.read_into(a, memoryview(out))
            assert out == data[a : a + 100]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(16)))
    frames = list(zip(table.offsets, table.sizes, strict=True))
    assert len(frames) == 12 and sorted(source.reads) == frames
    out = bytearray(len(data))
    reader.read_into(0, memoryview(out))  # kept ones are not read again, even where they are whole
    assert out == data and len(source.reads) == 12
    fresh = FrameReader(source, NAME, table, lambda start: item, kept=1)
    fresh.read_into(0, memoryview(out))  # whole ones are not kept
    assert out == data and sorted(source.reads) == sorted(2 * frames) and not fresh._frames
    for _ in range(3):
        fresh.read_into(5, memoryview(bytearray(10)))
        fresh.read_into(5000, memoryview(bytearray(10)))
    assert len(source.reads) == 24 + 6


def test_a_damaged_frame_is_named_and_the_others_are_read(small: None) -> None:
    data, source, table, item_at = opened(2)
    k = len(table.starts) // 2
    at, end = table.offsets[k], table.offsets[k] + table.sizes[k]
    bad = bytearray(source.data)
    bad[(at + end) // 2] ^= 16
    source.data = bytes(bad)
    reader = FrameReader(source, NAME, table, item_at)
    a, b = table.starts[k], table.starts[k] + table.lengths[k]
    for _ in range(2):  # a failure is not kept
        with pytest.raises(
            Corrupt, match=rf"{NAME}: bytes {at}\.\.{end}, which decompress to {a}\.\.{b} of the tar.*CRC32"
        ):
            reader.read_into(a, memoryview(bytearray(1)))
        with pytest.raises(Corrupt, match=rf"bytes {at}\.\.{end}"):
            reader.read_into(0, memoryview(bytearray(len(data))))
    for x, y in ((0, a), (b, len(data))):
        out = bytearray(y - x)
        reader.read_into(x, memoryview(out))
        assert out == data[x:y]


# -------------------------------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def tiny() -> tuple[bytes, list[FrameResult]]:
    """A file of a few hundred bytes: text, planes, zeros, noise, text; and its sound rows."""
    dice = np.random.default_rng(9)
    w = (dice.standard_normal(24, dtype="f4") * 0.02).astype(ml_dtypes.bfloat16).tobytes()
    f = dice.standard_normal(6, dtype="f4").tobytes()
    parts = [(b"README " * 6, 1, False), (w, 2, True), (bytes(300), 4, True), (f, 4, True), (b'{"a": 1}\n', 1, False)]
    offsets = [0, *itertools.accumulate(len(p) for p, _, _ in parts)]
    cuts = [SplitPoint(o, item, fast) for o, (_, item, fast) in zip(offsets[:-1], parts, strict=True)] + [
        SplitPoint(offsets[-1], 1, False)
    ]
    file, _ = pack(b"".join(p for p, _, _ in parts), cuts)
    rows = rows_of(file)
    assert not faults(rows) and len(rows) == 5 and len(file) < 500
    return file, rows


def only_ckpttool_errors(data: bytes) -> Any:
    """Open and read; the table, or None where it was refused."""
    try:
        table = read_frame_table(Memory(data), NAME)
        assert table.logical_size <= len(table.starts) * FRAME
        reader = FrameReader(Memory(data), NAME, table, lambda start: 4)
        for start, length in zip(table.starts, table.lengths, strict=True):
            for n in (1, length):
                try:
                    reader.read_into(start, memoryview(bytearray(n)))
                except CkpttoolError as e:
                    assert NAME in str(e)
        return table
    except CkpttoolError as e:
        assert NAME in str(e)
        return None


def test_every_flipped_bit_is_found_and_the_other_frames_come_out(tiny: tuple[bytes, list[FrameResult]]) -> None:
    file, sound = tiny
    last = sound[-1].offset + sound[-1].size
    for bit in range(8 * len(file)):
        bad = bytearray(file)
        bad[bit // 8] ^= 1 << bit % 8
        rows = rows_of(bytes(bad))
        found = faults(rows)
        assert found, bit
        if bit // 8 >= last:  # a table: every frame comes out, where it was
            assert [r for r in rows if r.fault is None] == sound, bit
            assert all(r.start == -1 for r in found), bit
        else:
            hit = next(r for r in sound if r.offset <= bit // 8 < r.offset + r.size)
            assert [r for r in rows if r.fault is None] == [r for r in sound if r is not hit], bit
            assert [(r.start, r.length, r.offset, r.size) for r in found] == [hit[:4]], bit
        only_ckpttool_errors(bytes(bad))


def test_every_flipped_bit_of_a_damaged_file_too(tiny: tuple[bytes, list[FrameResult]]) -> None:
    """With the tables gone: a frame that is hit is left out, the others come out, though perhaps not where they were."""
    file, sound = tiny
    file = file[: sound[-1].offset + sound[-1].size]
    for bit in range(8 * len(file)):
        bad = bytearray(file)
        bad[bit // 8] ^= 1 << bit % 8
        hit = next(r for r in sound if r.offset <= bit // 8 < r.offset + r.size)
        rows = rows_of(bytes(bad))
        good = [(r.offset, r.size, r.stored) for r in rows if r.fault is None]
        assert [r for r in good if r[0] != hit.offset] == [
            (r.offset, r.size, r.stored) for r in sound if r is not hit
        ], bit
        assert all(r[2] == hit.stored for r in good if r[0] == hit.offset), bit
        assert faults(rows), bit


def test_cut_off_anywhere_it_is_found(tiny: tuple[bytes, list[FrameResult]]) -> None:
    file, sound = tiny
    for n in range(len(file)):
        rows = rows_of(file[:n])
        assert faults(rows), n
        assert [r for r in rows if r.fault is None] == [r for r in sound if r.offset + r.size <= n], n
        with pytest.raises((NotRecognised, Corrupt)):
            read_frame_table(Memory(file[:n]), NAME)


def test_bytes_that_do_not_belong_are_found_wherever_they_are(tiny: tuple[bytes, list[FrameResult]]) -> None:
    file, sound = tiny
    ends = [0, *(r.offset + r.size for r in sound), len(file) - 17 - 12 * 6, len(file)]
    assert len(set(ends)) == 8
    skippable = struct.pack("<II", 0x184D2A50, 3) + b"abc"
    frame = frame_of(b"more")
    for at, more in itertools.product(
        ends, [b"\0", b"junk", skippable, frame, b"".join(tables([])), tables([(frame, 4)])[0], b"\x28\xb5\x2f\xfd"]
    ):
        data = file[:at] + more + file[at:]
        rows = rows_of(data)
        assert faults(rows), (at, more)
        shift = [(r.offset + (len(more) if r.offset >= at else 0), r.stored) for r in sound]
        if more == frame:
            shift = sorted([*shift, (at, b"more")])
        assert [(r.offset, r.stored) for r in rows if r.fault is None] == shift, (at, more)
        assert only_ckpttool_errors(data) is None, (at, more)
    twice = rows_of(file + file)
    assert [r.stored for r in twice if r.fault is None] == 2 * [r.stored for r in sound]
    assert len(faults(twice)) >= 2 and only_ckpttool_errors(file + file) is None


def test_frames_that_changed_places_or_are_gone_are_found(tiny: tuple[bytes, list[FrameResult]]) -> None:
    file, sound = tiny
    frames = [file[r.offset : r.offset + r.size] for r in sound]
    end = file[sum(map(len, frames)) :]
    for i, j in itertools.combinations(range(5), 2):
        swapped = frames.copy()
        swapped[i], swapped[j] = swapped[j], swapped[i]
        assert faults(rows_of(b"".join(swapped) + end)), (i, j)
        # with tables that fit it is another sound file: what is missing then is for the manifest to say
        assert not faults(rows_of(file_of([(f, len(zstandard.decompress(f))) for f in swapped])))
    for i in range(5):
        for data in (frames[:i] + frames[i + 1 :], frames[: i + 1] + frames[i:]):
            rows = rows_of(b"".join(data) + end)
            found = faults(rows)
            assert [r.stored for r in rows if r.fault is None] == [zstandard.decompress(f) for f in data]
            assert f"lists 5 frames, {len(data)} are there" in str(found[-1].fault)
            assert only_ckpttool_errors(b"".join(data) + end) is None


def test_damage_to_the_tables_and_to_frames_at_once(tiny: tuple[bytes, list[FrameResult]]) -> None:
    file, sound = tiny
    dice = random.Random(7)
    for _ in range(300):
        bad = bytearray(file)
        hit = {dice.randrange(5) for _ in range(dice.randrange(1, 3))}
        for k in hit:
            bad[dice.randrange(sound[k].offset, sound[k].offset + sound[k].size)] ^= 1 << dice.randrange(8)
        bad[dice.randrange(sound[-1].offset + sound[-1].size, len(file))] ^= 1 << dice.randrange(8)
        rows = rows_of(bytes(bad))
        good = {(r.offset, r.stored) for r in rows if r.fault is None}
        assert {(r.offset, r.stored) for k, r in enumerate(sound) if k not in hit} <= good
        assert faults(rows)


@given(st.binary(max_size=300), st.booleans())
def test_noise_is_no_archive(data: bytes, ends_well: bool) -> None:
    if ends_well:
        data += struct.pack("<IBI", 1 + len(data) // 40, 0x80, 0x8F92EAB1)
    assert only_ckpttool_errors(data) is None
    assert faults(rows_of(data))


# ------------------------------------------------------------------------------------------------------------- hostile


def hostile_frames() -> Iterator[tuple[str, bytes, int]]:
    """(what it is, the frame, the size that the tables say): CRC and tables are right for each."""
    good = frame_of(b"good content " * 9)
    n = 13 * 9
    magic, check = b"\x28\xb5\x2f\xfd", good[-4:]
    yield "without checksum", frame_of(b"x" * 50, write_checksum=False), 50
    yield (
        "of unknown size",
        zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compress(b"x" * 50),
        50,
    )
    yield "of many segments", frame_of(bytes(1 << 20), window_log=10), 1 << 20
    yield "with a window of 2 GiB", magic + b"\x04\xa8" + b"\x01\x00\x00" + check, 1
    yield "that says 2^63", magic + b"\xe4" + struct.pack("<Q", 1 << 63) + b"\x01\x00\x00" + check, n
    yield "that says 4 GiB", magic + b"\xa4\xff\xff\xff\xff" + b"\x01\x00\x00" + check, n
    yield "that says more than a frame has", frame_of(bytes(FRAME + 1), window_log=23), FRAME
    yield "with a size in a longer form", magic + b"\xa4" + struct.pack("<I", n) + good[6:], n
    yield "with a dictionary", magic + b"\x25\x75\x07" + good[6:], n
    yield "with the unused bit", good[:4] + bytes([good[4] | 0x10]) + good[5:], n
    yield "with the reserved bit", good[:4] + bytes([good[4] | 0x08]) + good[5:], n
    yield "of a run longer than it says", magic + b"\x24\x05" + b"\x03\x00\x80" + b"A" + check, 5
    yield "with bytes behind it", good + b"behind", n
    yield "that is two", good + good, n
    yield "that is empty", frame_of(b""), 1
    yield "that is cut off", good[:-1], n
    yield "that is no frame", b"no frame at all", 9
    yield "of one byte", b"x", 1
    yield "that is skippable", struct.pack("<II", 0x184D2A55, 9) + b"skippable", 9
    yield "of an old zstd", b"\x27" + good[1:], n


@pytest.mark.parametrize("what,frame,said", [pytest.param(*f, id=f[0]) for f in hostile_frames()])
def test_a_frame_that_no_writer_of_ours_makes_is_a_fault(what: str, frame: bytes, said: int) -> None:
    sides = [(frame_of(b"before " * 5), 35), (frame_of(b"after"), 5)]
    data = file_of([sides[0], (frame, said), sides[1]])
    begin = time.monotonic()
    rows = rows_of(data)
    assert [r.stored for r in rows if r.fault is None] == [b"before " * 5, b"after"]
    found = faults(rows)
    assert len(found) == 1 and (found[0].offset, found[0].size) == (len(sides[0][0]), len(frame))
    assert only_ckpttool_errors(data) is not None
    reader = FrameReader(Memory(data), NAME, read_frame_table(Memory(data), NAME), lambda start: 1)
    with pytest.raises(Corrupt, match="decompress to 35"):
        reader.read_into(35, memoryview(bytearray(1)))
    assert time.monotonic() - begin < 2


def foot(frames: int, before: bytes = b"") -> bytes:
    return before + struct.pack("<IBI", frames, 0x80, 0x8F92EAB1)


def test_tables_that_ask_for_too_much_are_refused_before_anything_is_read_of_them() -> None:
    good = frame_of(b"x" * 100)
    for data, kind, text in (
        (foot(0xFFFFFFFF, good), Unsafe, "4294967295 frames"),
        (foot((1 << 24) + 1, good), Unsafe, "16777217 frames"),
        (foot(1 << 24, good), Corrupt, "201326609 bytes, and the file has"),
        (foot(0, good), NotRecognised, "does not end with the tables"),
        (foot(3, bytes(200)), Corrupt, "does not begin 53 bytes before the end"),
    ):
        source = Memory(data)
        with pytest.raises(kind, match=text):
            read_frame_table(source, NAME)
        assert sum(n for _, n in source.reads) <= 100
        assert faults(rows_of(data))
    more = [
        ([(good, FRAME + 1)], Unsafe, f"decompress to {FRAME + 1}"),
        ([(good, 0xFFFFFFFF)], Unsafe, "decompress to 4294967295"),
        ([(good, 0)], Corrupt, "frame 0 is empty"),
        ([(good, 100), (good + bytes(FRAME + (FRAME >> 8)), 5)], Unsafe, "frames of an archive have at most"),
        ([(good, 100), (struct.pack("<II", 0x184D2A55, 1) + b"x", 0), (good, 100)], Corrupt, "frame 1 is empty"),
    ]
    for frames, kind, text in more:
        with pytest.raises(kind, match=text):
            read_frame_table(Memory(file_of(frames)), NAME)
        assert faults(rows_of(file_of(frames)))


def test_seekable_files_of_others_are_not_taken_for_ours() -> None:
    good = frame_of(b"x" * 100)
    rows = struct.pack("<II4s", len(good), 100, good[-4:])
    theirs = good + struct.pack("<II", 0x184D2A5E, 21) + foot(1, rows)
    without = good + struct.pack("<II", 0x184D2A5E, 17) + rows[:8] + struct.pack("<IBI", 1, 0, 0x8F92EAB1)
    crc, seek = tables([(good, 100)])
    other = good + crc.replace(b"CKPTCRC1", b"ELSECRC1") + seek
    for data in (theirs, without, other, good, b"", b"x" * 16, b"x" * 17):
        with pytest.raises(NotRecognised):
            read_frame_table(Memory(data), NAME)
        assert faults(rows_of(data))


def test_tables_that_contradict_the_file_are_corrupt() -> None:
    good = frame_of(b"x" * 100)
    frames = [(good, 100), (good, 100)]
    crc, seek = tables(frames)
    one, _ = tables(frames[:1])
    pair = good + good
    for data, text in (
        (pair + good + crc + seek, "take .* but .* are there"),
        (b"\0" + pair + crc + seek, "take .* but .* are there"),
        (good + crc + seek, "take .* but .* are there"),
        (pair + crc[:-1] + b"\0" + seek, "does not have its own CRC32"),
        (pair + crc + b"\x5d" + seek[1:], "does not begin"),
    ):
        with pytest.raises(Corrupt, match=text):
            read_frame_table(Memory(data), NAME)
        assert faults(rows_of(data))
    wrong = pair + one + tables(frames[:1])[1][:20] + seek[20:]  # a CRC table of fewer frames than the seek table has
    assert only_ckpttool_errors(wrong) is None and faults(rows_of(wrong))


def test_looking_for_frames_in_a_hostile_file_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers everywhere, and a chain of blocks from each that leads past all others to the end: not all for each."""
    monkeypatch.setattr(frame_walk, "_PATIENCE", 1 << 18)
    good = frame_of(b"behind it all")
    link = b"\x28\xb5\x2f\xfd\x24\x05" + (6 << 3).to_bytes(3, "little")
    begin = time.monotonic()
    rows = rows_of(link * 40_000 + good)  # 300 million steps without a limit
    assert time.monotonic() - begin < 10
    assert len(rows) == 2 and not any(r.stored for r in rows)
    assert rows[1].size == len(link) * 40_000 + len(good)
    rows = rows_of(link * 300 + b"\0" + good)  # patience lasts for this one
    assert [r.stored for r in rows if r.fault is None] == [b"behind it all"]


def test_a_frame_of_endless_empty_blocks_is_not_followed() -> None:
    tail = frame_of(b"A", window_log=10)
    many = tail[:6] + bytes(3 * 10_000) + tail[6:]
    assert zstandard.ZstdDecompressor().decompress(many) == b"A"
    rows = rows_of(many + tail)
    assert [(r.offset, r.stored) for r in rows if r.fault is None] == [(len(many), b"A")]


def test_what_cannot_be_read_is_a_fault_and_what_is_not_damage_is_raised(tiny: tuple[bytes, list[FrameResult]]) -> None:
    file, sound = tiny

    class Broken(Memory):
        error: CkpttoolError = Corrupt("byte 7: Input/output error.")
        bad = range(sound[2].offset, sound[2].offset + 1)

        def read(self, name: str, offset: int, length: int) -> bytes:
            if offset <= self.bad[0] < offset + length:
                raise self.error
            return super().read(name, offset, length)

    rows = list(walk_file(Broken(file), NAME, 2))
    assert [r for r in rows if r.fault is None] == [r for r in sound if r.offset != sound[2].offset]
    assert [r.fault for r in faults(rows)] == ["the frame cannot be read (byte 7: Input/output error.)"]
    for at in (len(file) - 1, len(file) - 20):  # the tables: what is before them can be read
        source = Broken(file)
        source.bad = range(at, at + 1)
        rows = list(walk_file(source, NAME, 2))
        assert faults(rows) and all("Input/output error" in str(r.fault) for r in faults(rows))
    for error in (RemoteError("gone"), SourceChanged("grew")):
        for data, at in ((file, sound[2].offset), (file, len(file) - 1), (file[:-1], sound[2].offset)):
            source = Broken(data)
            source.error, source.bad = error, range(at, at + 1)
            with pytest.raises(type(error)):
                list(walk_file(source, NAME, 2))
