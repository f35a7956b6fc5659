"""How long a large index takes: `python bench/index.py [--ranks 512] [--work DIR]`.

Writes, with torch's own classes, the .metadata of a 70B-like model with Adam state (2169 tensors) saved by that many
ranks, beside sparse data files of the right sizes, then reads it, checks it and plans it for 384 ranks in a fresh
process; prints seconds and the peak memory of that process (VmHWM) and of its child, and the same for torch's own loader.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

HIDDEN, INNER, LAYERS, VOCAB = 8192, 28672, 80, 128256


def shapes() -> dict[str, tuple[int, ...]]:
    """Parameters of a 70B llama."""
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
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


def make(folder: Path, ranks: int) -> None:
    """The synthetic checkpoint."""
    import gc
    import pickle

    import torch
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
    tensors, paths, storage = {}, {}, {}
    ends = [0] * ranks
    for fqn, shape in shapes().items():
        for path in (("model", fqn), ("optim", "state", fqn, "exp_avg"), ("optim", "state", fqn, "exp_avg_sq")):
            key = ".".join(path)
            step = -(-shape[0] // ranks)
            chunks = []
            for rank, first in enumerate(range(0, shape[0], step)):
                size = torch.Size((min(step, shape[0] - first), *shape[1:]))
                start = torch.Size((first, *[0] * (len(shape) - 1)))
                length = size.numel() * 4 + 1577
                chunks.append(ChunkStorageMetadata(start, size))
                storage[MetadataIndex(key, start, rank)] = _StorageInfo(f"__{rank}_0.distcp", ends[rank], length)
                ends[rank] += length
            tensors[key] = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), chunks)
            paths[key] = path
    with open(folder / ".metadata", "wb") as f:
        pickle.dump(Metadata(tensors, paths, storage), f)
    for rank, end in enumerate(ends):
        with open(folder / f"__{rank}_0.distcp", "wb") as f:
            f.truncate(end)


CODE = """
import sys, time, json, resource
began = time.monotonic()
from ckpttool.engine import opening
from ckpttool.layouts import WriteOptions, find
from ckpttool.storage.buffers import peak_memory
opened = opening.open(sys.argv[1])
read = time.monotonic()
draft = find("dcp").write(opened.checkpoint, opened.source, WriteOptions("out", 384))
planned = time.monotonic()
meta = draft.files[-1].first_bytes()
done = time.monotonic()
print(json.dumps({
    "chunks": sum(len(t.chunks) for t in opened.checkpoint.tensors.values()),
    "planned_chunks": sum(len(t.chunks) for t in draft.checkpoint.tensors.values()),
    "read_and_check_s": round(read - began, 2), "plan_s": round(planned - read, 2),
    "metadata_s": round(done - planned, 2), "metadata_mb": len(meta) >> 20, "peak_mib": peak_memory() >> 20,
    "child_peak_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10,
}))
"""
TORCH = """
import sys, time, json
import torch.distributed.checkpoint as dcp
from ckpttool.storage.buffers import peak_memory
began = time.monotonic()
dcp.FileSystemReader(sys.argv[1]).read_metadata()
print(json.dumps({"torch_read_s": round(time.monotonic() - began, 2),
    "peak_mib": peak_memory() >> 20}))
"""


def main() -> None:
    """Make it where it is not there yet, then measure."""
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--ranks", type=int, default=512)
    ap.add_argument("--work", type=Path, default=Path(__file__).resolve().parent.parent / "bench-data")
    ap.add_argument("--torch", action="store_true", help="measure torch's loader too")
    a = ap.parse_args()
    folder = a.work / f"index-{a.ranks}"
    if not (folder / ".metadata").exists():
        make(folder, a.ranks)
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
