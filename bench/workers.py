"""What workers cost: `python bench/workers.py [--sizes 250M,1G] [--rounds 3] [--work DIR]`, DCP of 8 ranks into DCP of 6.

CPU seconds of all processes together, those of the template and of forked workers included (measure.py), follow

    CPU(N, S) = a(N) + b(N) * S          S: GB of the checkpoint, N: workers of one thread each

so a conversion whose work is spread evenly takes T(N) = a + b * S / N seconds if every worker has a core. a and b come from two
sizes, for 1, 2 and 4 workers, with and without read-back; the medians of alternated rounds. The table ends with what that makes of
10 TB on 64 workers, four on each of 16 nodes, and on 64 on each. That is a projection from one machine: it knows nothing of the
network, of stores and of stragglers. It counts what a worker of another node does before its first byte as `a` of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from measure import measured

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
CLI = [PYTHON, "-m", "ckpttool", "convert", "-q"]
WORKERS = (1, 2, 4)
MODES = {"without read-back": ["--no-verify"], "with read-back": []}
LARGE_GB, NODES = 10_000, 16

STATE = """
import sys, torch
path, count = sys.argv[1], int(sys.argv[2])
torch.save({"model": {f"layers.{i}.weight": torch.randn(1024, 1024).bfloat16() for i in range(count)}}, path)
"""


def source_of(size: int, work: Path) -> Path:
    """A DCP checkpoint of 8 ranks, of bf16 tensors of 2 MiB; made once."""
    out = work / f"dcp8-{size}"
    if not out.exists():
        file = work / "state.pt"
        subprocess.run([PYTHON, "-c", STATE, file, str(max(8, size >> 21))], check=True)
        command = [*CLI, file, out, "--to", "dcp", "--world-size", "8", "--no-verify"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        file.unlink()
    return out


def gigabytes(folder: Path) -> float:
    """GB of a folder's files."""
    return sum(p.stat().st_size for p in folder.iterdir()) / 1e9


def main() -> None:
    """Measure, fit, project."""
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--sizes", default="250M,1G", help="of the two checkpoints")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--work", type=Path, default=ROOT / "bench-data" / "workers", help="best on tmpfs")
    ap.add_argument("--json", type=Path)
    a = ap.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    load, by = os.getloadavg()[0], ""
    sources = [source_of(int(float(s[:-1]) * {"G": 1e9, "M": 1e6}[s[-1]]), a.work) for s in a.sizes.split(",")]
    sizes = [gigabytes(s) for s in sources]
    keys = [(mode, n, k) for mode in MODES for n in WORKERS for k in range(len(sources))]
    found: dict[tuple[str, int, int], list[tuple[float, float]]] = {key: [] for key in keys}
    out = a.work / "out"
    for r in range(a.rounds):
        for mode, n, k in keys if r % 2 == 0 else keys[::-1]:
            shutil.rmtree(out, ignore_errors=True)
            words = ["--to", "dcp", "--world-size", "6", "--jobs", "1", "--workers", str(n), *MODES[mode]]
            used = measured([*CLI, str(sources[k]), str(out), *words])
            found[mode, n, k].append((used.cpu, used.wall))
            by = used.by
            print(f"{mode}, {n} workers, {sizes[k]:.2f} GB: {used.cpu:.2f} CPU s, {used.wall:.2f} s", file=sys.stderr)
    shutil.rmtree(out, ignore_errors=True)
    print(f"CPU seconds by {by}; load average at the start {load:.1f}; {sizes[0]:.2f} and {sizes[1]:.2f} GB\n")
    print("| | workers | a, CPU s | b, CPU s/GB | wall of the larger, s |\n|---|---|---|---|---|")
    rows = []
    for mode in MODES:
        for n in WORKERS:
            low, high = (statistics.median(cpu for cpu, _ in found[mode, n, k]) for k in (0, 1))
            b = (high - low) / (sizes[1] - sizes[0])
            row = {"mode": mode, "workers": n, "a": low - b * sizes[0], "b": b}
            row["wall"] = statistics.median(wall for _, wall in found[mode, n, 1])
            rows.append(row)
            print(f"| {mode} | {n} | {row['a']:.2f} | {b:.2f} | {row['wall']:.2f} |")
    print(
        f"\n| {LARGE_GB / 1000:.0f} TB on {NODES} nodes | workers | T, s | GB/s in all, read and written |\n|---|---|---|---|"
    )
    for row in (r for r in rows if r["workers"] == WORKERS[-1]):
        for n in (4 * NODES, 64 * NODES):
            seconds = row["a"] + row["b"] * LARGE_GB / n
            print(f"| {row['mode']} | {n} | {seconds:,.0f} | {LARGE_GB / seconds:.1f} |")
    if a.json:
        a.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
