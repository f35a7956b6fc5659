"""`ckpttool audit export` and `verify` against `tar | zstd -T0` of the same files: `python bench/archive.py --size 3G`.

Two checkpoints that torch wrote for 8 ranks: bfloat16 weights, and float32 weights with the moments of AdamW. Every round
runs all tools once, in an order that is reversed from round to round, the source dropped from the page cache before each;
durable wall time, as in bench/run.py. Ratios are medians over rounds of (tool / pipe of the same round); the pipe runs
twice in a round, and when the two are far apart the run says nothing. All use zstd level 1 and all cores.

The pipe writes what it reads and proves nothing; the export hashes every tensor (BLAKE3) and every member (SHA-256) and
checks the CRC32s of the source. `verify` is compared with `zstd -d | sha256sum` of the pipe's file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from run import PYTHON, ROOT, Tool, made_by_torch, once, size_of

AUDIT = [PYTHON, "-m", "ckpttool", "audit"]
EXPORT = ["export", "-q", "--no-ledger", "--no-verify", "--force"]


def shell(text: str) -> Callable[[str, str], list[str]]:
    """A pipe, with $0 and $1 for source and destination."""
    return lambda src, dst: ["bash", "-c", f"set -o pipefail; {text}", src, dst]


def exporters() -> list[Tool]:
    """Ways to make an archive."""
    pipe = shell('tar -c -C "$(dirname $0)" "$(basename $0)" | zstd -q -f -T0 -1 -o $1.tar.zst')
    return [
        Tool("tar \\| zstd -T0 -1", pipe),
        Tool("audit export", lambda src, dst: [*AUDIT, *EXPORT, src, f"{dst}.tar.zst"]),
        Tool("audit export --shuffle", lambda src, dst: [*AUDIT, *EXPORT, "--shuffle", src, f"{dst}.tar.zst"]),
        Tool("tar \\| zstd -T0 -1, again", pipe),
    ]


def checkers(work: Path) -> list[tuple[Tool, Path]]:
    """Ways to check what `exporters` left in files of their own."""
    unfold = shell("zstd -q -d -c $0 | sha256sum")
    verify = lambda src, dst: [*AUDIT, "verify", "-q", "--no-ledger", src]  # noqa: E731
    return [
        (Tool("zstd -d \\| sha256sum", unfold), work / "pipe.tar.zst"),
        (Tool("audit verify", verify), work / "plain.tar.zst"),
        (Tool("audit verify, shuffled", verify), work / "shuffled.tar.zst"),
        (Tool("zstd -d \\| sha256sum, again", unfold), work / "pipe.tar.zst"),
    ]


def measure(what: str, source: Path, work: Path, rounds: int) -> list[dict[str, object]]:
    """Rows of the two tables."""
    tools = exporters()
    sizes: dict[str, int] = {}
    keep = {"tar \\| zstd -T0 -1": "pipe", "audit export": "plain", "audit export --shuffle": "shuffled"}
    for r in range(rounds):
        for tool in tools if r % 2 == 0 else tools[::-1]:
            run(tool, source, work / "out")
            made = work / "out.tar.zst"
            sizes[tool.name] = made.stat().st_size
            if tool.name in keep:
                os.replace(made, work / f"{keep[tool.name]}.tar.zst")
    nbytes = size_of(source)
    rows = [row(what, t, tools[0], nbytes, nbytes / sizes[t.name]) for t in tools]
    pairs = checkers(work)
    for r in range(rounds):
        for tool, archive in pairs if r % 2 == 0 else pairs[::-1]:
            run(tool, archive, work / "none")
    return rows + [row(f"{what}, check", t, pairs[0][0], nbytes, None) for t, _ in pairs]


def run(tool: Tool, source: Path, destination: Path) -> None:
    """Once, noted."""
    wall, cpu, rss = once(tool.command(str(source), str(destination)), source, destination)
    tool.wall.append(wall)
    tool.cpu.append(cpu)
    tool.rss.append(rss)
    print(f"{tool.name}: {wall:.2f} s, cpu {cpu:.2f} s, {rss:.0f} MiB", file=sys.stderr)


def row(what: str, tool: Tool, first: Tool, nbytes: int, ratio: float | None) -> dict[str, object]:
    """One line of the table; GB are of the checkpoint."""
    ratios = [a / b for a, b in zip(tool.wall, first.wall, strict=True)]
    return {
        "what": what, "bytes": nbytes, "tool": tool.name, "gb_per_s": nbytes / 1e9 / statistics.median(tool.wall),
        "wall_to_pipe": statistics.median(ratios), "range": [min(ratios), max(ratios)],
        "cpu_s_per_gb": statistics.median(tool.cpu) / (nbytes / 1e9), "compression": ratio, "peak_mib": max(tool.rss),
    }  # fmt: skip


def table(rows: list[dict[str, object]]) -> str:
    """Markdown for docs/benchmarks.md."""
    out = [
        "| state | tool | GB/s | wall, to the pipe | CPU s/GB | compression | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        low, high = r["range"]  # type: ignore[misc]
        ratio = "" if r["compression"] is None else f"{r['compression']:.3f}"
        out.append(
            f"| {r['what']} {r['bytes'] / 1e9:.1f} GB | {r['tool']} | {r['gb_per_s']:.2f} | "  # type: ignore[operator]
            f"{r['wall_to_pipe']:.2f} [{low:.2f}-{high:.2f}] | {r['cpu_s_per_gb']:.2f} | {ratio} | {r['peak_mib']:.0f} |"
        )
    return "\n".join(out)


def main() -> None:
    """Prepare, run, print."""
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--size", default="3G", help="bytes of the checkpoint: 3G, 500M")
    ap.add_argument("--rounds", type=int, default=4)
    ap.add_argument("--work", type=Path, default=ROOT / "bench-data")
    ap.add_argument("--json", type=Path)
    a = ap.parse_args()
    size = int(float(a.size[:-1]) * {"G": 1e9, "M": 1e6}[a.size[-1]])
    a.work.mkdir(exist_ok=True)
    rows = []
    for what, options in (("bf16 weights", ()), ("fp32 weights, AdamW", ("--adam",))):
        rows += measure(what, made_by_torch(a.work, size, *options), a.work, a.rounds)
        if a.json:
            a.json.write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
