"""A million chunks with almost nothing in them: `python bench/million.py [--ranks 512] [--work DIR] [--workers N]`.

The checkpoint is that of a job of many ranks with 2,000 small tensors: what a conversion does for every chunk, and nothing
else, takes the time. Its items are torch's own: `torch.save` writes one of each kind, and the others are that one with other
payloads and CRC32s. `.metadata` is pickled from torch's classes, and torch loads a sample of the result before it is used.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

from measure import measured

#: (dtype, shape of a rank's chunk) of every third tensor.
KINDS = (("float32", (1, 8)), ("bfloat16", (2, 4)), ("float32", (1,)))


def template(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, int, int, list[int]]:
    """(item as torch writes it, where its payload is, bytes of that, where its CRC32 is)."""
    import torch

    out = io.BytesIO()
    torch.save(torch.zeros(shape, dtype=getattr(torch, dtype)), out)
    raw = out.getvalue()
    entry = zipfile.ZipFile(out).getinfo("archive/data/0")
    name, extra = struct.unpack_from("<HH", raw, entry.header_offset + 26)
    at = entry.header_offset + 30 + name + extra
    descriptor = raw.index(b"PK\x07\x08", at + entry.file_size) + 4
    directory = raw.index(b"archive/data/0", at + entry.file_size) - 46 + 16
    return raw, at, entry.file_size, [descriptor, directory]


def make(folder: Path, ranks: int, tensors: int) -> None:
    """The synthetic checkpoint."""
    import gc
    import pickle

    import torch
    from isal.isal_zlib import crc32
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    gc.disable()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kinds = [template(*kind) for kind in KINDS]
    items = [kinds[i % len(KINDS)] for i in range(tensors)]
    ends = [0]
    for raw, *_ in items:
        ends.append(ends[-1] + len(raw))
    for rank in range(ranks):
        data = bytearray(b"".join(raw for raw, *_ in items))
        for i, (_, at, n, crcs) in enumerate(items):
            payload = (rank * tensors + i + 1).to_bytes(4, "little") * (n // 4)
            data[ends[i] + at : ends[i] + at + n] = payload
            for field in crcs:
                struct.pack_into("<I", data, ends[i] + field, crc32(payload))
        (folder / f"__{rank}_0.distcp").write_bytes(data)
    state, paths, storage = {}, {}, {}
    for i in range(tensors):
        key = f"model.layers.{i // len(KINDS)}.part{i % len(KINDS)}.weight"
        dtype, shape = KINDS[i % len(KINDS)]
        chunks = []
        for rank in range(ranks):
            start = torch.Size((rank * shape[0], *[0] * (len(shape) - 1)))
            chunks.append(ChunkStorageMetadata(start, torch.Size(shape)))
            storage[MetadataIndex(key, start, rank)] = _StorageInfo(
                f"__{rank}_0.distcp", ends[i], ends[i + 1] - ends[i]
            )
        whole = torch.Size((ranks * shape[0], *shape[1:]))
        state[key] = TensorStorageMetadata(TensorProperties(dtype=getattr(torch, dtype)), whole, chunks)
        paths[key] = ("model", key.removeprefix("model."))
    with open(folder / ".metadata", "wb") as f:
        pickle.dump(Metadata(state, paths, storage), f)


def prove(folder: Path, ranks: int, tensors: int) -> None:
    """Torch itself loads some tensors and finds the bytes that were meant."""
    import torch
    import torch.distributed.checkpoint as dcp

    for i in (0, 1, 2, tensors - 1):
        key = f"model.layers.{i // len(KINDS)}.part{i % len(KINDS)}.weight"
        dtype, shape = KINDS[i % len(KINDS)]
        want = {key: torch.zeros((ranks * shape[0], *shape[1:]), dtype=getattr(torch, dtype))}
        dcp.load(want, checkpoint_id=str(folder), no_dist=True)
        found = want[key].contiguous().view(torch.uint8).numpy().tobytes()
        per = len(found) // ranks
        for rank in range(ranks):
            assert found[rank * per : (rank + 1) * per] == (rank * tensors + i + 1).to_bytes(4, "little") * (per // 4)


PHASES = """
import gc, json, sys, time
gc.disable()
began = time.process_time()
from ckpttool.engine import opening
from ckpttool.layouts import WriteOptions, find
from ckpttool.storage.buffers import read_peak_memory
opened = opening.open(sys.argv[1])
read = time.process_time()
find("dcp").write(opened.checkpoint, opened.source, WriteOptions("out", 384))
planned = time.process_time()
located = opened.locate()
end = time.process_time()
print(json.dumps({
    "chunks": sum(len(t.chunks) for t in opened.checkpoint.tensors.values()),
    "read_and_check_s": round(read - began, 2), "plan_s": round(planned - read, 2), "locate_s": round(end - planned, 2),
    "peak_mib": read_peak_memory() >> 20,
}))
"""


def main() -> None:
    """Make it where it is not there yet, then measure."""
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--ranks", type=int, default=512)
    ap.add_argument("--tensors", type=int, default=2000)
    ap.add_argument("--work", type=Path, default=Path(__file__).resolve().parent.parent / "bench-data")
    ap.add_argument("--workers", default="", help="of ckpttool convert")
    ap.add_argument("--to", default="dcp --world-size 384", help="target, with its options")
    a = ap.parse_args()
    folder = a.work / f"million-{a.ranks}-{a.tensors}"
    if not (folder / ".metadata").exists():
        make(folder, a.ranks, a.tensors)
        prove(folder, a.ranks, a.tensors)
    out = subprocess.run([sys.executable, "-c", PHASES, str(folder)], stdout=subprocess.PIPE, text=True, check=True)
    print(out.stdout.strip())
    target = a.work / "million-out"
    shutil.rmtree(target, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "ckpttool",
        "convert",
        "-q",
        str(folder),
        str(target),
        "--no-verify",
        "--to",
        *a.to.split(),
    ]
    used = measured([*command, *(["--workers", a.workers] if a.workers else [])])
    row = {"convert_wall_s": used.wall, "cpu_s": used.cpu, "peak_mib": used.peak_mib}
    print(json.dumps({k: round(v, 2) for k, v in row.items()}))
    shutil.rmtree(target)


if __name__ == "__main__":
    main()
