"""dcp.load through ckpttool's reader against torch's own: `python bench/reader.py --size 2G --world 2 --rounds 5`.

Two DCP folders are made: one of a bf16 model of --size by make_source.py, and one of --tensors small ones. In one
launch of torchrun both readers then fill the same state dict in turns, after a round each that does not count; what they
load is compared bit for bit. Everything is read from the page cache, where a file is that was just written, so what
counts is the work of the readers. The data is removed in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def arguments() -> argparse.Namespace:
    """What the user wants, or what the launcher told a rank."""
    parser = argparse.ArgumentParser(description="Time dcp.load with torch's FileSystemReader and with ckpttool's.")
    parser.add_argument("--size", default="2G", help="bytes of the large checkpoint")
    parser.add_argument("--tensors", type=int, default=3000, help="tensors of the small one, 64 KiB each")
    parser.add_argument("--world", type=int, default=2, help="ranks that load")
    parser.add_argument("--saved-by", type=int, help="ranks that save; by default as many")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--where", default=tempfile.gettempdir(), help="folder for the data")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--job", choices=("save", "load"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", action="append", default=[], help=argparse.SUPPRESS)
    return parser.parse_args()


def torchrun(world: int, script: Path, *words: str) -> None:
    """Run a script on that many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    subprocess.run([*command, str(script), *words], check=True, env=environment)


def main() -> None:
    """Make the data, launch the ranks, print."""
    wanted = arguments()
    if wanted.job == "save":
        save(Path(wanted.folder[0]), wanted.tensors)
    elif wanted.job == "load":
        load(wanted.folder, wanted.rounds, wanted.json)
    else:
        size = int(float(wanted.size.rstrip("KMG")) * UNITS.get(wanted.size[-1], 1))
        saved_by = wanted.saved_by or wanted.world
        data = Path(tempfile.mkdtemp(prefix="ckpttool-bench-", dir=wanted.where))
        try:
            torchrun(saved_by, HERE / "make_source.py", str(data / "large"), str(size))
            small = str(data / "small")
            torchrun(saved_by, Path(__file__), "--job", "save", "--folder", small, "--tensors", str(wanted.tensors))
            words = ["--job", "load", "--rounds", str(wanted.rounds), "--json", str(data / "numbers.json")]
            torchrun(wanted.world, Path(__file__), *words, "--folder", str(data / "large"), "--folder", small)
            numbers = json.loads((data / "numbers.json").read_text())
        finally:
            shutil.rmtree(data)
        print(
            f"saved by {saved_by} ranks, loaded by {wanted.world} on {os.cpu_count()} cores, {wanted.rounds} rounds\n"
        )
        for name, row in numbers.items():
            ratios = ", ".join(f"{r:.2f}" for r in sorted(row["ratios"]))
            print(f"{name}: {row['tensors']} tensors, {row['values']} values, {row['bytes'] / 1e6:.0f} MB")
            for who in ("torch", "ckpttool"):
                s = row[who]
                print(f"  {who:9s} median {statistics.median(s):.3f} s, {min(s):.3f} to {max(s):.3f}")
            print(f"  ratio     {row['ratio']:.2f} of the medians; by round: {ratios}")
            print(
                f"  rank 0 read {row['read'] / 1e6:.1f} MB for {row['own'] / 1e6:.1f} MB of its own; equal bit for bit\n"
            )
        if wanted.json:
            wanted.json.write_text(json.dumps(numbers, indent=1) + "\n")


def save(folder: Path, tensors: int) -> None:
    """A checkpoint of many small tensors; one rank of it."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(dist.get_rank())
    rows = 128 // dist.get_world_size()
    model = {f"layers.{i}.weight": DTensor.from_local(torch.randn(rows, 128), mesh, [Shard(0)]) for i in range(tensors)}
    dcp.save({"model": model, "step": 7, "args": {f"option_{i}": i for i in range(100)}}, checkpoint_id=folder)
    dist.destroy_process_group()


def load(folders: list[str], rounds: int, out: Path) -> None:
    """Load in turns; one rank of it."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    import ckpttool

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    numbers: dict[str, Any] = {}
    for folder in folders:
        known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        tree: dict[str, Any] = {}
        for name, entry in known.items():
            if isinstance(entry, TensorStorageMetadata):
                empty = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
                tree[name] = distribute_tensor(empty, mesh, [Shard(0)])
                tree[name] = torch.empty_like(tree[name], device="cpu")
            else:
                tree[name] = None
        held = {n: t.to_local() for n, t in tree.items() if isinstance(t, DTensor)}

        def once(reader: Any, tree: dict[str, Any] = tree, held: dict[str, Any] = held) -> float:
            for t in held.values():
                t.view(torch.uint8).fill_(255)
            for n in tree.keys() - held.keys():
                tree[n] = None
            dist.barrier()
            started = time.perf_counter()
            dcp.load(tree, storage_reader=reader())
            dist.barrier()
            return time.perf_counter() - started

        readers: dict[str, Any] = {
            "torch": lambda folder=folder: dcp.FileSystemReader(folder),
            "ckpttool": lambda folder=folder: ckpttool.storage_reader(folder),
        }
        once(readers["torch"])
        reference = {n: t.clone() for n, t in held.items()}
        plain = {n: v for n, v in tree.items() if n not in held}
        seconds: dict[str, list[float]] = {"torch": [], "ckpttool": []}
        used: list[Any] = []
        for i in range(-1, rounds):
            for who in list(readers)[:: 1 if i % 2 else -1]:

                def make(who: str = who, used: list[Any] = used, readers: dict[str, Any] = readers) -> Any:
                    reader = readers[who]()
                    if who == "ckpttool":
                        used[:] = [reader]
                    return reader

                took = once(make)
                if i >= 0:
                    seconds[who].append(took)
                for n, t in held.items():
                    assert torch.equal(t.view(torch.uint8), reference[n].view(torch.uint8)), (who, n)
                assert {n: v for n, v in tree.items() if n not in held} == plain, who
        numbers[Path(folder).name] = {
            **seconds,
            "tensors": len(held),
            "values": len(plain),
            "bytes": sum(t.numel() * t.element_size() for n, t in tree.items() if n in held),
            "own": sum(t.numel() * t.element_size() for t in held.values()),
            "read": used[0].bytes_read,
            "ratio": statistics.median(seconds["ckpttool"]) / statistics.median(seconds["torch"]),
            "ratios": [b / a for a, b in zip(seconds["torch"], seconds["ckpttool"], strict=True)],
        }
    if dist.get_rank() == 0:
        out.write_text(json.dumps(numbers))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
