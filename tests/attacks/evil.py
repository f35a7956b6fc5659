"""Parts of malicious checkpoints. Everything is made here: nothing of it is a file in the repository."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import shutil
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ckpttool.errors import CkpttoolError


class Case(NamedTuple):
    """One thing that is wrong, and how it must be refused."""

    make: Callable[[Path, Path], Path]  # (empty folder, canary) -> path to give to convert
    kind: type[CkpttoolError] | None  # None: a valid checkpoint that looks odd
    said: str = ""


class Calls:
    """Pickles as a call of anything."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def runs(canary: Path) -> Calls:
    """An object that makes the canary when it is unpickled."""
    return Calls(exec, f"open({str(canary)!r}, 'w').close()")


def saved(value: Any, **how: Any) -> bytes:
    """torch.save, in memory."""
    out = io.BytesIO()
    torch.save(value, out, **how)
    return out.getvalue()


def laughs(n: int = 64) -> bytes:
    """Instructions for a tuple that unfolds to 2**n leaves."""
    return b"K\x01" + b"q\x63h\x63\x86" * n


def rezipped(data: bytes, change: Callable[[dict[str, bytes]], Any] = lambda r: None, **how: Any) -> bytes:
    """A zip whose records were changed; `change` may return more (name, body) records."""
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        records = {i.filename: z.read(i) for i in z.infolist()}
    more = change(records) or []
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", **how) as z:
        warnings.simplefilter("ignore")  # two records of one name are what is wanted
        for name, body in [*records.items(), *more]:
            z.writestr(name, body)
    return out.getvalue()


def with_record(data: bytes, ending: str, body: bytes) -> bytes:
    """A zip with another body of the record that ends so."""
    return rezipped(data, lambda r: r.update({next(n for n in r if n.endswith(ending)): body}))


# ------------------------------------------------------------------------------------------------------------- dcp

W = torch.arange(24.0).reshape(6, 4)
STATE = {
    "model": {"w": W, "b": torch.arange(6.0), "v": W + 100},
    "optim": {"state": {"w": {"exp_avg": W / 2}}, "param_groups": [{"lr": 0.1, "params": ["w", "b", "v"]}]},
}


def dcp_folder(folder: Path) -> Path:
    """A good checkpoint, by torch, of one rank; "model.w" lies in two chunks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.INFO)  # a page of it for every save
        dcp.save(STATE, checkpoint_id=folder, no_dist=True)
        logging.disable(logging.NOTSET)

    def split(m: Metadata) -> None:
        entry = m.state_dict_metadata["model.w"]
        with open(folder / "__0_0.distcp", "ab") as f:
            for k, at in enumerate((0, 3)):
                index = MetadataIndex("model.w", torch.Size([at, 0]), k)
                data = saved(W[at : at + 3].clone())
                old = next(iter(m.storage_data.values()))
                m.storage_data[index] = type(old)(old.relative_path, f.tell(), len(data))
                f.write(data)
        entry.chunks = [ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([3, 4])) for at in (0, 3)]

    edit(folder, split)
    return folder


def edit(folder: Path, change: Callable[[Metadata], Any]) -> Path:
    """Change .metadata, which we wrote ourselves and may therefore unpickle."""
    path = folder / ".metadata"
    m = pickle.loads(path.read_bytes())
    change(m)
    path.write_bytes(pickle.dumps(m))
    return folder


def place(m: Metadata, key: str, k: int = 0) -> Any:
    """(index, storage info) of a chunk."""
    found = [
        (i, s)
        for i, s in m.storage_data.items()
        if i.fqn == key and (i.index or 0) == k and i.offset != torch.Size([9])
    ]
    return found[-1]


def move(key: str, k: int = 0, **to: Any) -> Callable[[Path, Path], Path]:
    """A case: the item of a chunk is said to lie elsewhere."""

    def make(folder: Path, canary: Path) -> Path:
        def change(m: Metadata) -> None:
            _, info = place(m, key, k)
            for name, value in to.items():
                object.__setattr__(info, name, value)

        return edit(dcp_folder(folder), change)

    return make


def chunks(key: str, *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Path, Path], Path]:
    """A case: a tensor has these chunks, each with the item of its first or second one."""

    def make(folder: Path, canary: Path) -> Path:
        def change(m: Metadata) -> None:
            entry = m.state_dict_metadata[key]
            infos = [place(m, key, k)[1] for k in range(len(entry.chunks))]
            for index in [i for i in m.storage_data if i.fqn == key]:
                del m.storage_data[index]
            entry.chunks = [ChunkStorageMetadata(torch.Size(s), torch.Size(n)) for s, n in boxes]
            for k, (start, _) in enumerate(boxes):
                m.storage_data[MetadataIndex(key, torch.Size(start), k)] = replace(infos[k % len(infos)])

        return edit(dcp_folder(folder), change)

    return make


def metadata(change: Callable[[Metadata, Path], Any]) -> Callable[[Path, Path], Path]:
    """A case: .metadata was changed."""
    return lambda folder, canary: edit(dcp_folder(folder), lambda m: change(m, canary))


def raw_metadata(data: Callable[[Path], bytes]) -> Callable[[Path, Path], Path]:
    """A case: .metadata is these bytes."""

    def make(folder: Path, canary: Path) -> Path:
        (dcp_folder(folder) / ".metadata").write_bytes(data(canary))
        return folder

    return make


def item(key: str, data: Callable[[Path], bytes]) -> Callable[[Path, Path], Path]:
    """A case: the item of a tensor or value is these bytes."""

    def make(folder: Path, canary: Path) -> Path:
        def change(m: Metadata) -> None:
            index, info = place(m, key)
            body = data(canary)
            with open(folder / "__0_0.distcp", "ab") as f:
                m.storage_data[index] = type(info)(info.relative_path, f.tell(), len(body))
                f.write(body)

        return edit(dcp_folder(folder), change)

    return make


def flip(name: str, where: Callable[[bytes], int]) -> Callable[[Path, Path], Path]:
    """A case: one bit of a file of the dcp folder is another."""

    def make(folder: Path, canary: Path) -> Path:
        path = dcp_folder(folder) / name
        data = bytearray(path.read_bytes())
        data[where(bytes(data))] ^= 1
        path.write_bytes(data)
        return folder

    return make


def replace_bytes(path: Path, old: bytes, new: bytes) -> None:
    """Replace the first occurrence of some bytes in a file, which has to have one."""
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


def files(change: Callable[[Path], Any]) -> Callable[[Path, Path], Path]:
    """A case: the files of the dcp folder were changed."""

    def make(folder: Path, canary: Path) -> Path:
        change(dcp_folder(folder))
        return folder

    return make


def is_bytes(m: Metadata, key: str) -> bool:
    """Whether an entry is a value."""
    return isinstance(m.state_dict_metadata[key], BytesStorageMetadata)


def tensor_entry(m: Metadata, key: str) -> TensorStorageMetadata:
    """An entry that is a tensor."""
    entry = m.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


# -------------------------------------------------------------------------------------------------------- full, hf


def pt(data: Callable[[Path], bytes], name: str = "x.pt") -> Callable[[Path, Path], Path]:
    """A case: a file of these bytes."""

    def make(folder: Path, canary: Path) -> Path:
        folder.mkdir()
        (folder / name).write_bytes(data(canary))
        return folder / name

    return make


def torch_pickle(*instructions: bytes, numel: int = 4) -> bytes:
    """A torch file of one storage whose pickle is these instructions; memo 1000 is the storage."""
    storage = pickle.dumps(("storage", torch.FloatStorage, "0", "cpu", numel), 2)[2:-1]
    body = b"\x80\x02" + storage + b"Qr\xe8\x03\x00\x000" + b"".join(instructions) + b"."
    return with_record(saved({"w": torch.ones(4)}), "data.pkl", body)


def rebuilt(offset: Any, size: Any, stride: Any) -> bytes:
    """A torch file {"w": a view of four floats}."""
    args = b"".join(pickle.dumps(x, 2)[2:-1] for x in (offset, size, stride, False, {}))
    return torch_pickle(b"}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n(j\xe8\x03\x00\x00" + args + b"tRs")


def one_entry(begin: Any = 0, end: Any = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    """An entry of a safetensors header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def safetensors_file(header: Any, data: bytes = b"12345678", length: int | None = None) -> bytes:
    """A safetensors file, whatever is in it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


GOOD = safetensors_file({"w": one_entry()})
TWO = safetensors_file({"w": one_entry(), "v": one_entry(8, 16)}, bytes(16))
CONFIG = {"model_type": "llama", "tie_word_embeddings": False}


def hf(**contents: Any) -> Callable[[Path, Path], Path]:
    """A case: a folder of files {name with _ for . before the ending: bytes, or what becomes JSON, or canary -> bytes}."""

    def make(folder: Path, canary: Path) -> Path:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        for key, body in contents.items():
            name = key.replace("__", "-").replace("_json", ".json").replace("_index", ".index")
            name = name.replace("_safetensors", ".safetensors").replace("_bin", ".bin").replace("_py", ".py")
            body = body(canary) if callable(body) else body
            (folder / name).write_bytes(body if isinstance(body, bytes) else json.dumps(body).encode())
        return folder

    return make


def one_safetensors(header: Any, data: bytes = b"12345678", length: int | None = None) -> Callable[[Path, Path], Path]:
    """A case: model.safetensors with this header."""
    return hf(model_safetensors=safetensors_file(header, data, length))


def indexed(weight_map: Any, outside: bytes | None = None, two: bool = False) -> Callable[[Path, Path], Path]:
    """A case: an index with this map over a shard a.safetensors of "w"; `outside` lies beside the folder."""

    def make(folder: Path, canary: Path) -> Path:
        folder.mkdir()
        (folder / "a.safetensors").write_bytes(TWO if two else GOOD)
        text = weight_map if isinstance(weight_map, bytes) else json.dumps({"weight_map": weight_map}).encode()
        (folder / "model.safetensors.index.json").write_bytes(text)
        if outside is not None:
            (folder.parent / "outside.safetensors").write_bytes(outside)
        return folder

    return make


def linked(folder: Path, name: str, data: bytes) -> Path:
    """A file of a folder that is a link to one outside."""
    folder.mkdir(exist_ok=True)
    (folder.parent / "outside").write_bytes(data)
    (folder / name).unlink(missing_ok=True)
    os.symlink(folder.parent / "outside", folder / name)
    return folder


def bomb(n: int) -> bytes:
    """A torch file whose storage is n zeros, deflated."""
    return rezipped(
        saved({"w": torch.ones(4)}), lambda r: r.update({"archive/data/0": bytes(n)}), compression=zipfile.ZIP_DEFLATED
    )


def crc(data: bytes) -> int:
    """CRC32 as zips have it."""
    return zlib.crc32(data)


def copy(folder: Path, name: str, to: str) -> None:
    """Copy a file within a folder."""
    shutil.copy(folder / name, folder / to)
