"""Records of chunks and items that are cut out of a large .metadata: the index is that of the whole pickle."""

from __future__ import annotations

import io
import pickle
import pickletools
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpttool.converters.dcp import dcp_metadata as _dcp_metadata
from ckpttool.converters.dcp.metadata_records import RecordCutter
from torch.distributed.checkpoint import metadata as m
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckpttool.errors import CkpttoolError
from ckpttool.storage.source import Source


def saved(rng: random.Random, own_texts: bool, extra: bool = False) -> m.Metadata:
    """A state of tensors of 0 to 5 dimensions, in chunks of whole rows, and values; names with every kind of letter."""
    state: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for i in range(12):
        key = rng.choice(["w", "Ä\u0414", "\u0394\u2014", "x" * 148, "x" * 300, "offset", "index"]) + str(i)
        if rng.random() < 0.2:
            state[key] = m.BytesStorageMetadata()
            storage[m.MetadataIndex(key)] = _StorageInfo("__0_0.distcp", rng.randrange(1 << 40), 7)
            continue
        ndim = rng.randrange(6)
        rest = tuple(rng.choice([1, 300, 70_000]) for _ in range(ndim - 1))
        chunks, ranks = [], rng.choice([1, 3, 300]) if ndim else 1
        shared = torch.Size((70_000, *rest)[:ndim])
        for r in range(ranks):
            start = torch.Size((r * 70_000, *(0 for _ in rest))[:ndim])
            chunks.append(m.ChunkStorageMetadata(start, shared if extra else torch.Size(tuple(shared))))
            fqn = "".join([key]) if own_texts else key
            place = m.MetadataIndex(fqn, start, r)
            if extra:
                object.__setattr__(place, "offset", start)  # as it was before torch copied it
            info = _StorageInfo(f"__{r % 7}_0.distcp", rng.randrange(1 << rng.choice([7, 15, 30, 44])), 1577)
            if extra and ndim == 2:
                info = _StorageInfo(*list(info.__dict__.values())[:3], ["stream.zstd"])
            storage[place] = info
        state[key] = m.TensorStorageMetadata(
            m.TensorProperties(torch.bfloat16), torch.Size((ranks * 70_000, *rest)[:ndim]), chunks
        )
    return m.Metadata(state, {key: (key,) for key in state}, storage)


def read(folder: Path, data: bytes, large: bool, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The index of a folder with this .metadata; `large`: by what the child does, else by our own unpickler."""
    (folder / ".metadata").write_bytes(data)
    if large:
        return [bytes(part) for part in _dcp_metadata.read_index_in_child(str(folder / ".metadata"))]
    monkeypatch.setattr(_dcp_metadata, "_LARGE_BYTES", 1 << 30)
    return [bytes(part) for part in _dcp_metadata.read_index(Source(str(folder))).to_parts()]


def cut(data: bytes) -> bytes:
    """What is handed on of a pickle."""
    cutter, out = RecordCutter(io.BytesIO(data).read), b""
    while more := cutter.read(1 << 20):
        out += more
    return out


def unframed(data: bytes) -> bytes:
    """The same pickle without frames."""
    frames = [at for op, _, at in pickletools.genops(data) if op.name == "FRAME"]
    return b"".join(data[a:b] for a, b in zip([0, *(at + 9 for at in frames)], [*frames, len(data)], strict=True))


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_the_index_is_that_of_the_whole_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int, seed: int
) -> None:
    top = saved(random.Random(seed), own_texts=seed != 1, extra=seed == 2)
    for data in (pickle.dumps(top, protocol), pickletools.optimize(pickle.dumps(top, protocol))):
        assert read(tmp_path, data, True, monkeypatch) == read(tmp_path, data, False, monkeypatch)
    if protocol > 2:
        data = pickle.dumps(top, protocol)
        assert len(cut(data)) < len(data) / 4  # but for those at the edges of frames, all were cut


def test_our_own_pickle_is_cut_too(tmp_path: Path) -> None:
    import ckpttool

    torch.save({"model": {f"w{i}": torch.ones(40, 2) for i in range(20)}}, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="dcp", world_size=40)
    data = (tmp_path / "out" / ".metadata").read_bytes()
    assert len(cut(data)) < len(data) / 4


@pytest.mark.parametrize("change", ["twice", "shared", "part", "frame", "cut off", "outside", "order"])
def test_what_no_pickler_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    top = saved(random.Random(1), own_texts=True)
    storage: dict[Any, Any] = top.storage_data
    key, tensor = next((k, t) for k, t in top.state_dict_metadata.items() if len(getattr(t, "chunks", ())) > 9)
    if change == "twice":  # equal to the place of another item, though its key is not
        forged = m.MetadataIndex(key, torch.Size((-1,) * len(tensor.size)), 99)
        storage[forged] = _StorageInfo("__9_0.distcp", 0, 9)
        object.__setattr__(forged, "offset", next(i.offset for i in storage if i.fqn == key and i.index == 1))
        data = pickle.dumps(top)
    elif change == "shared":
        top.state_dict_metadata["z"] = m.TensorStorageMetadata(
            m.TensorProperties(torch.bfloat16), tensor.size, tensor.chunks[:]
        )
        data = pickle.dumps(top)
    elif change == "part":  # a dict that is a part of a record that was cut out
        data = unframed(pickle.dumps(top))
        dicts, number = [], -1
        for op, _, _ in pickletools.genops(data):
            number += op.name == "MEMOIZE"
            dicts += [number + 1] if op.name == "EMPTY_DICT" else []
        data = data[:-3] + b"\x8c\x04more\x94j" + struct.pack("<I", dicts[len(dicts) // 4]) + b"ub."
        assert pickle.loads(data).more.keys() == {"offsets", "sizes"}
    else:
        data = pickle.dumps(top, 4)
        frame = max(at for op, _, at in pickletools.genops(data) if at is not None and op.name == "FRAME") + 1
        data = {
            "frame": data[:3] + struct.pack("<Q", struct.unpack_from("<Q", data, 3)[0] - 1) + data[11:],
            "cut off": data[:frame]
            + struct.pack("<Q", struct.unpack_from("<Q", data, frame)[0] + 1)
            + data[frame + 8 :],
            "outside": data[:11] + b"K\x01Q0" + data[11:],
            "order": b"\x80\x02Nr\x07\x00\x00\x000" + pickle.dumps(top, 2)[2:],
        }[change]
    with pytest.raises((CkpttoolError, pickle.UnpicklingError)):
        read(tmp_path, data, True, monkeypatch)
