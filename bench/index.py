"""How long a large index takes: `python bench/index.py [--ranks 512] [--work DIR]`.

Writes the .metadata of a 70B-like model with Adam state (2169 tensors) saved by that many
ranks, beside sparse data files of the right sizes, then reads it, checks it and plans it for 384 ranks in a fresh
process; prints seconds and the peak memory of that process (VmHWM) and of its child, and the same for torch's own loader.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")

HIDDEN, INNER, VOCAB = 8192, 28672, 128256


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Parameters of a llama: with 80 layers, of that of 70B."""
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(layers):
        at = f"model.layers.{i}."
        out |= {
            at + "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            at + "self_attn.k_proj.weight": (HIDDEN // 8, HIDDEN),
            at + "self_attn.v_proj.weight": (HIDDEN // 8, HIDDEN),
            at + "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            at + "mlp.gate_proj.weight": (INNER, HIDDEN),
            at + "mlp.up_proj.weight": (INNER, HIDDEN),
            at + "mlp.down_proj.weight": (HIDDEN, INNER),
            at + "input_layernorm.weight": (HIDDEN,),
            at + "post_attention_layernorm.weight": (HIDDEN,),
        }
    return out | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def parts_of(ranks: int, layers: int) -> Iterator[tuple[tuple[str, ...], tuple[int, ...], int]]:
    """Path, shape and rows of a rank of every tensor: weights, and the two moments of Adam."""
    for fqn, shape in shapes(layers).items():
        for path in (("model", fqn), ("optim", "state", fqn, "exp_avg"), ("optim", "state", fqn, "exp_avg_sq")):
            yield path, shape, -(-shape[0] // ranks)


class Pickle:
    """The instructions that Python's pickler writes for the objects of a .metadata (protocol 4), without the objects:
    ten million of them would be 20 GB. Each method appends one; all that have an entry in the memo get one."""

    def __init__(self) -> None:
        self.out, self.entries, self.known = bytearray(b"\x80\x04"), 0, dict[object, int]()

    def memoize(self, key: object = None) -> None:
        if key is not None:
            self.known[key] = self.entries
        self.entries += 1
        self.out += b"\x94"

    def get(self, key: object) -> bool:
        if (n := self.known.get(key)) is not None:
            self.out += b"h" + bytes([n]) if n < 256 else b"j" + struct.pack("<I", n)
        return n is not None

    def text(self, value: str, shared: bool = True) -> None:
        if not (shared and self.get(value)):
            raw = value.encode()
            self.out += b"\x8c" + bytes([len(raw)]) + raw
            self.memoize(value if shared else None)

    def name(self, module: str, name: str) -> None:
        if not self.get((module, name)):
            self.text(module)
            self.text(name)
            self.out += b"\x93"
            self.memoize((module, name))

    def number(self, n: int) -> None:
        if n < 1 << 16:
            self.out += b"K" + bytes([n]) if n < 256 else b"M" + struct.pack("<H", n)
        elif n < 1 << 31:
            self.out += b"J" + struct.pack("<i", n)
        else:
            size = n.bit_length() // 8 + 1
            self.out += b"\x8a" + bytes([size]) + n.to_bytes(size, "little")

    def size(self, shape: tuple[int, ...]) -> None:
        self.name("torch", "Size")
        for n in shape:
            self.number(n)
        self.out += {1: b"\x85", 2: b"\x86"}[len(shape)]
        self.memoize()
        self.call()

    def call(self, key: object = None) -> None:
        self.out += b"\x85"
        self.memoize()
        self.out += b"R"
        self.memoize(key)

    def begin(self, module: str, name: str) -> None:
        self.name(module, name)
        self.out += b")\x81"
        self.memoize()
        self.begin_dict()

    def begin_dict(self) -> None:
        self.out += b"}"
        self.memoize()
        self.out += b"("


def write_metadata(file: BinaryIO, ranks: int, layers: int = 80) -> list[int]:
    """Write the .metadata as torch does it when every rank has sent its part: texts and sizes of each are its own.
    Returns the bytes of each rank's file."""
    of = "torch.distributed.checkpoint."
    p, ends = Pickle(), [0] * ranks
    tensors = [(".".join(path), path, shape, step) for path, shape, step in parts_of(ranks, layers)]

    def batches(rows: Iterable[T], end: bytes) -> Iterator[T]:
        for i, row in enumerate(rows):
            if i and i % 1000 == 0:
                p.out += end + b"("
            yield row
            if len(p.out) > 1 << 20:
                file.write(p.out)
                p.out.clear()
        p.out += end

    p.begin(of + "metadata", "Metadata")
    p.text("state_dict_metadata")
    p.begin_dict()
    for key, _, shape, step in batches(tensors, b"u"):
        p.text(key)
        p.begin(of + "metadata", "TensorStorageMetadata")
        p.text("properties")
        p.name(of + "metadata", "TensorProperties")
        p.out += b")\x81"
        p.memoize()
        p.out += b"("
        p.name("torch", "float32")
        if not p.get("layout"):
            p.name("torch.serialization", "_get_layout")
            p.text("torch.strided")
            p.call("layout")
        p.out += b"\x89"
        if not p.get("format"):
            p.name(of + "metadata", "_MEM_FORMAT_ENCODING")
            p.number(0)
            p.call("format")
        p.out += b"\x89t"
        p.memoize()
        p.out += b"b"
        p.text("size")
        p.size(shape)
        p.text("chunks")
        p.out += b"]"
        p.memoize()
        p.out += b"("
        for first in batches(range(0, shape[0], step), b"e"):
            p.begin(of + "metadata", "ChunkStorageMetadata")
            p.text("offsets")
            p.size((first, *[0] * (len(shape) - 1)))
            p.text("sizes")
            p.size((min(step, shape[0] - first), *shape[1:]))
            p.out += b"ub"
        p.out += b"ub"
    p.text("planner_data")
    p.begin_dict()
    for key, path, _, _ in batches(tensors, b"u"):
        p.text(key)
        p.out += b"(" if len(path) > 3 else b""
        for part in path:
            p.text(part)
        p.out += b"t" if len(path) > 3 else b"\x86"
        p.memoize()
    p.text("storage_data")
    p.begin_dict()
    for rank, (key, _, shape, step) in batches(product(range(ranks), tensors), b"u"):
        rows = min(step, shape[0] - rank * step)
        if rows <= 0:
            continue
        length = rows * prod(shape[1:]) * 4 + 1577
        p.begin(of + "metadata", "MetadataIndex")
        p.text("fqn")
        p.text(key, shared=False)
        p.text("index")
        p.number(rank)
        p.text("offset")
        p.size((rank * step, *[0] * (len(shape) - 1)))
        p.out += b"ub"
        p.begin(of + "filesystem", "_StorageInfo")
        p.text("relative_path")
        p.text(f"__{rank}_0.distcp")
        p.text("offset")
        p.number(ends[rank])
        p.text("length")
        p.number(length)
        p.out += b"ub"
        ends[rank] += length
    p.out += b"ub."
    file.write(p.out)
    return ends


def make(folder: Path, ranks: int, layers: int) -> None:
    """The synthetic checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with open(folder / ".metadata", "wb") as f:
        ends = write_metadata(f, ranks, layers)
    for rank, end in enumerate(ends):
        with open(folder / f"__{rank}_0.distcp", "wb") as f:
            f.truncate(end)


CODE = """
import sys, time, json, resource
began = time.monotonic()
from ckpttool.engine import opening
from ckpttool.layouts import WriteOptions, find
from ckpttool.storage.buffers import read_peak_memory
opened = opening.open(sys.argv[1])
read = time.monotonic()
child = resource.getrusage(resource.RUSAGE_CHILDREN)
cpu = time.process_time() + child.ru_utime + child.ru_stime
draft = find("dcp").write(opened.checkpoint, opened.source, WriteOptions("out", 384))
planned = time.monotonic()
meta = draft.files[-1].first_bytes()
done = time.monotonic()
print(json.dumps({
    "chunks": sum(len(t.chunks) for t in opened.checkpoint.tensors.values()),
    "planned_chunks": sum(len(t.chunks) for t in draft.checkpoint.tensors.values()),
    "read_and_check_s": round(read - began, 2), "read_and_check_cpu_s": round(cpu, 2), "plan_s": round(planned - read, 2),
    "metadata_s": round(done - planned, 2), "metadata_mb": len(meta) >> 20, "peak_mib": read_peak_memory() >> 20,
    "child_peak_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10,
}))
"""
TORCH = """
import sys, time, json
import torch.distributed.checkpoint as dcp
from ckpttool.storage.buffers import read_peak_memory
began = time.monotonic()
dcp.FileSystemReader(sys.argv[1]).read_metadata()
print(json.dumps({"torch_read_s": round(time.monotonic() - began, 2),
    "peak_mib": read_peak_memory() >> 20}))
"""


def main() -> None:
    """Make it where it is not there yet, then measure."""
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--ranks", type=int, default=512)
    ap.add_argument("--layers", type=int, default=80, help="58 at 8192 ranks are ten million chunks")
    ap.add_argument("--work", type=Path, default=Path(__file__).resolve().parent.parent / "bench-data")
    ap.add_argument("--torch", action="store_true", help="measure torch's loader too")
    a = ap.parse_args()
    folder = a.work / f"index-{a.ranks}-{a.layers}"
    if not (folder / ".metadata").exists():
        make(folder, a.ranks, a.layers)
    print(f".metadata: {(folder / '.metadata').stat().st_size / 1e6:.0f} MB")
    for code in [CODE] + ([TORCH] if a.torch else []):
        began = time.monotonic()
        out = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
        print(
            json.dumps(json.loads(out.stdout or "{}") | {"process_s": round(time.monotonic() - began, 2)}),
            out.stderr[-2000:],
        )


if __name__ == "__main__":
    main()
