"""How cost grows: `python bench/exponents.py [--layouts dcp,fsdp1] [--axes ranks] [--scale 1] [--rounds 2] [--work DIR] [--json FILE]`.

Each axis is doubled five times: tensors (500 to 16,000 of 2 kB), ranks (4 to 128, with 50 parameters), bytes (32 MB to 1 GB, with 32
parameters on 4 ranks). At every point a state with AdamW's moments, as DCP, is written in the layout, inspected there, and read
into DCP again. CPU seconds are those of all processes less those of the same command on a state of two parameters: what is left
is what grows. An exponent is the slope of a straight line through the logarithms of the last three points, or of the last two where
the one before costs less than 0.1 s; "-" means that there are no two, so that nothing grows that could be measured. Peak memory (VmHWM, in MiB) is that at the first and at the last point, the largest of the commands.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from measure import Measured, measured

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
CLI = [PYTHON, "-m", "ckpttool"]
LAYOUTS = "dcp,full,hf,zero1,zero3,universal,fsdp1,torch_checkpointing,megatron,audit"
#: (options of the layout that is written, how the name of a file ends, whether it takes a world size); else a folder that does.
SPECIAL = {
    "full": ((), ".pt", False),
    "hf": (("--include-optimizer",), "", False),
    "universal": ((), "", False),
    "audit": ((), ".tar.zst", False),
}
LEAST = 0.1  # CPU seconds of a point that counts
POINTS = 6
TENSORS_OF_A_PARAMETER = 4  # the weight, two moments, the step

STATE = """
import sys, torch
path, count, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
names = [f"layers.{count - i}.weight" for i in range(count)]  # not in the order of the alphabet, which FSDP1 refuses
model = {n: torch.randn(rows, 8) for n in names}
state = {n: {"step": torch.tensor(3.0), "exp_avg": torch.randn(rows, 8), "exp_avg_sq": torch.rand(rows, 8)} for n in names}
groups = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).state_dict()["param_groups"]
torch.save({"model": model, "optim": {"state": state, "param_groups": [{**groups[0], "params": names}]}}, path)
"""


class Point(NamedTuple):
    """A state: its parameters, the rows of 8 fp32 numbers of each, the ranks that saved it; `x` is its place on the axis."""

    x: int
    parameters: int
    rows: int
    ranks: int


def points_of(axis: str, scale: float) -> list[Point]:
    """The points of an axis, each twice the one before."""
    out = []
    for k in range(POINTS):
        if axis == "tensors":
            count = max(4, round(125 * scale)) << k
            out.append(Point(count * TENSORS_OF_A_PARAMETER, count, 16, 2))
        elif axis == "ranks":
            out.append(Point(4 << k, max(4, round(50 * scale)), 256, 4 << k))
        else:
            rows = round(scale * 32e6 / (32 * 3 * 32)) << k
            out.append(Point(rows * 32 * 3 * 32, 32, rows, 4))
    return out


def run(*words: object) -> None:
    """Run a command that is not measured."""
    subprocess.run([str(w) for w in words], check=True, stdout=subprocess.DEVNULL)


def source_at(point: Point, work: Path) -> Path:
    """A state as DCP."""
    out, file = work / "source", work / "state.pt"
    for path in (out, file):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    run(PYTHON, "-c", STATE, file, point.parameters, point.rows)
    run(*CLI, "convert", "-q", file, out, "--to", "dcp", "--world-size", point.ranks, "--no-verify")
    file.unlink()
    return out


def costs(layout: str, source: Path, ranks: int, work: Path, rounds: int) -> dict[str, Measured]:
    """{"write", "inspect", "read": what the command took}, of several rounds the least of each number."""
    options, suffix, has_ranks = SPECIAL.get(layout, ((), "", True))
    made, back = work / f"made{suffix}", work / "back"
    world = ["--world-size", str(ranks)]
    commands = {
        "write": [
            "convert",
            "-q",
            "--no-verify",
            source,
            made,
            "--to",
            layout,
            *options,
            *(world if has_ranks else []),
        ],
        "inspect": ["inspect", made],
        "read": ["convert", "-q", "--no-verify", made, back, "--to", "dcp", *world],
    }
    found: dict[str, list[Measured]] = {name: [] for name in commands}
    for _ in range(rounds):
        for path in (made, back):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        for name, words in commands.items():
            found[name].append(measured([*CLI, *map(str, words)]))
    return {
        name: Measured(min(m.wall for m in ms), min(m.cpu for m in ms), min(m.peak_mib for m in ms), ms[0].by)
        for name, ms in found.items()
    }


def exponent(points: list[tuple[int, float]]) -> float | None:
    """The slope of log(cost) over log(x) at the end; None where fewer than two points there cost enough to tell."""
    enough = [(math.log(x), math.log(cost)) for x, cost in points[-3:] if cost >= LEAST]
    return statistics.linear_regression(*zip(*enough, strict=True)).slope if len(enough) >= 2 else None


def measure_axis(axis: str, layouts: list[str], a: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the table: one for each layout."""
    least = Point(0, 2, 256, 4)
    source = source_at(least, a.work)
    start = {layout: costs(layout, source, least.ranks, a.work, a.rounds) for layout in layouts}
    at: dict[str, list[tuple[int, dict[str, Measured]]]] = {layout: [] for layout in layouts}
    for point in points_of(axis, a.scale):
        source = source_at(point, a.work)
        for layout in layouts:
            at[layout].append((point.x, costs(layout, source, point.ranks, a.work, a.rounds)))
            print(axis, point.x, layout, {k: round(m.cpu, 2) for k, m in at[layout][-1][1].items()}, file=sys.stderr)
    for layout in layouts:
        row: dict[str, Any] = {"axis": axis, "layout": layout, "from": at[layout][0][0], "to": at[layout][-1][0]}
        for name in ("write", "inspect", "read"):
            net = [(x, found[name].cpu - start[layout][name].cpu) for x, found in at[layout]]
            row[name] = exponent(net)
            row[f"{name}_cpu"] = [round(cost, 3) for _, cost in net]
        row["peak_mib"] = [round(max(m.peak_mib for m in found.values())) for _, found in at[layout]]
        yield row


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown for docs/benchmarks.md."""
    out = [
        "| axis | layout | write | inspect | read | CPU s at the end | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        slopes = " | ".join("-" if r[k] is None else f"{r[k]:.2f}" for k in ("write", "inspect", "read"))
        end = " / ".join(f"{max(0.0, r[k + '_cpu'][-1]):.2f}" for k in ("write", "inspect", "read"))
        axis = f"{r['axis']} {r['from']:,} to {r['to']:,}"
        out.append(f"| {axis} | {r['layout']} | {slopes} | {end} | {r['peak_mib'][0]} to {r['peak_mib'][-1]} |")
    return "\n".join(out)


def main() -> None:
    """Measure, and print the table."""
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--layouts", default=LAYOUTS)
    ap.add_argument("--axes", default="tensors,ranks,bytes")
    ap.add_argument("--scale", type=float, default=1, help="of tensors, parameters and bytes; 0.1 for a try")
    ap.add_argument("--rounds", type=int, default=2)
    ap.add_argument("--work", type=Path, default=ROOT / "bench-data" / "exponents", help="best on tmpfs")
    ap.add_argument("--json", type=Path)
    a = ap.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    for axis in a.axes.split(","):
        rows += measure_axis(axis, a.layouts.split(","), a)
        if a.json:
            a.json.write_text(json.dumps(rows, indent=1))
    print(table(rows))
    worst = max((r[k] for r in rows for k in ("write", "inspect", "read") if r[k] is not None), default=None)
    print(f"\nlargest exponent: {'-' if worst is None else f'{worst:.2f}'}; load average at the start: {load:.1f}")
    shutil.rmtree(a.work)


if __name__ == "__main__":
    main()
