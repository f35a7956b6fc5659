"""Compare `ckpttool convert` with cp and with what people use today: `make bench SIZE=3G`.

Every row is a conversion of one real FSDP2 checkpoint (8 ranks, written by torch), or of what ckpttool made of one. Each round runs `cp -r` and every
tool once, in an order that is reversed from round to round; before each run the destination is deleted, everything is
synced and the source is dropped from the page cache. *durable* wall time ends when every byte of the result is on the
disk: ckpttool fsyncs by itself, for the others the bench does. Ratios are medians over rounds of (tool / cp of the same
round). Another cp in every round is compared with the first: when that null pair is far from 1.0, the machine was not
quiet and the run says nothing. CPU seconds are those of all processes, peak memory that of the largest (measure.py). `floor` (floor.py) is a bare
loop over the same bytes; the CPU seconds of the others are also given as a ratio to it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from measure import measured

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
CLI = [PYTHON, "-m", "ckpttool", "convert", "-q"]


@dataclass
class Tool:
    """A way to do a conversion; `command` makes an argument list from (source, destination)."""

    name: str
    command: Callable[[str, str], list[str]]
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    rss: list[float] = field(default_factory=list)


def python(code: str) -> Callable[[str, str], list[str]]:
    """Run a line of Python with src and dst."""
    return lambda src, dst: [PYTHON, "-W", "ignore", "-c", f"import sys; src, dst = sys.argv[1:]; {code}", src, dst]


def ours(*options: str) -> Callable[[str, str], list[str]]:
    """ckpttool with options."""
    return lambda src, dst: [*CLI, src, dst, *options]


#: Conversions whose CPU seconds are compared with those of a bare loop: every byte of the source is in the result.
FLOOR = ("DCP8 -> hf", "DCP8 -> DCP3")

TASKS = (
    "DCP8 -> hf", "DCP8 -> DCP3", "hf -> DCP8", "HF shards -> hf", "fp32 -> bf16", "ZeRO-3 W=8 -> hf",
    "ZeRO-3 W=8 -> DCP8",
)  # fmt: skip

HF_WRITER = (
    "import torch.distributed.checkpoint as dcp; from torch.distributed.checkpoint import HuggingFaceStorageWriter; "
    "from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner as P; "
    "from torch.distributed.checkpoint.state_dict_loader import _load_state_dict as load; sd = {}; "
    "load(sd, storage_reader=dcp.FileSystemReader(src), planner=P(keys={'model'}), no_dist=True); "
    "dcp.save(sd['model'], storage_writer=HuggingFaceStorageWriter(path=dst, save_distributed=True, "
    "enable_consolidation=True), no_dist=True)"
)


def tools(task: str) -> list[Tool]:
    """Who takes part in a task."""
    from_torch = "from torch.distributed.checkpoint.format_utils import "
    if task == "DCP8 -> hf":
        return [
            Tool("ckpttool", ours("--to", "hf", "--no-verify")),
            Tool("ckpttool, read back", ours("--to", "hf")),
            Tool("dcp_to_torch_save", python(from_torch + "dcp_to_torch_save as f; f(src, dst + '.pt')")),
            Tool("HF writer", python(HF_WRITER)),
            Tool(
                "accelerate merge",
                python(
                    "from accelerate.utils import merge_fsdp_weights as f; f(src + '-bare', dst, safe_serialization=True)"
                ),
            ),
        ]
    if task == "DCP8 -> DCP3":
        return [
            Tool("ckpttool", ours("--to", "dcp", "--world-size", "3", "--no-verify")),
            Tool("ckpttool, read back", ours("--to", "dcp", "--world-size", "3")),
        ]
    if task == "hf -> DCP8":
        return [Tool("ckpttool", ours("--to", "dcp", "--world-size", "8", "--no-verify"))]
    if task == "HF shards -> hf":
        code = (
            "import glob, os; from safetensors import safe_open; "
            "from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files as f; "
            "os.makedirs(dst); files = [safe_open(x, 'pt') for x in glob.glob(src + '/*.safetensors')]; "
            "f(src, dst, {name: 1 for x in files for name in x.keys()})"
        )
        return [
            Tool("ckpttool", ours("--to", "hf", "--no-verify")),
            Tool("consolidate_safetensors_files", python(code)),
        ]
    if task == "fp32 -> bf16":
        return [Tool("ckpttool", ours("--to", "hf", "--dtype", "bf16", "--no-verify"))]
    if task == "ZeRO-3 W=8 -> hf":
        code = (
            "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as f; "
            "f(src, dst, safe_serialization=True)"
        )
        return [
            Tool("ckpttool", ours("--to", "hf", "--no-verify")),
            Tool("ckpttool, read back", ours("--to", "hf")),
            Tool("zero_to_fp32", python(code)),
        ]
    if task == "ZeRO-3 W=8 -> DCP8":
        return [
            Tool("ckpttool", ours("--to", "dcp", "--world-size", "8", "--no-verify")),
            Tool("ckpttool, read back", ours("--to", "dcp", "--world-size", "8")),
        ]
    raise KeyError(task)


def floor(task: str) -> list[Tool]:
    """The bare loop, where it does the work of the task."""
    command = [PYTHON, str(ROOT / "bench/floor.py")]
    loops = [
        Tool("floor", lambda s, d: [*command, s, d]),
        Tool("floor, O_DIRECT", lambda s, d: [*command, s, d, "--direct"]),
    ]
    return loops if task in FLOOR else []


def size_of(path: Path) -> int:
    """Bytes of a file or of all files of a folder."""
    return sum(p.stat().st_size for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file())


def forget(path: Path) -> None:
    """Drop a folder from the page cache."""
    for p in path.rglob("*"):
        if p.is_file():
            fd = os.open(p, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def once(command: list[str], source: Path, destination: Path) -> tuple[float, float, float]:
    """(durable wall seconds, CPU seconds, peak MiB) of one run."""
    for left in destination.parent.glob(destination.name + "*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    os.sync()
    forget(source)
    used = measured(command)
    began = time.monotonic()
    for made in destination.parent.glob(destination.name + "*"):
        for p in [made] if made.is_file() else made.rglob("*"):
            if p.is_file():
                fd = os.open(p, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)
    return used.wall + time.monotonic() - began, used.cpu, used.peak_mib


def compare(task: str, source: Path, work: Path, rounds: int, only: str | None) -> dict[str, object]:
    """All tools of a task against cp -r, alternating."""
    copy = lambda src, dst: ["cp", "-r", src, dst]  # noqa: E731
    wanted = (t for t in tools(task) if not only or only in t.name)
    bare_loop = floor(task)
    entrants = [Tool("cp -r", copy), *wanted, *bare_loop, Tool("cp -r again", copy)]
    load = os.getloadavg()[0]
    for r in range(rounds):
        for tool in entrants if r % 2 == 0 else entrants[::-1]:
            wall, cpu, rss = once(tool.command(str(source), str(work / "out")), source, work / "out")
            tool.wall.append(wall)
            tool.cpu.append(cpu)
            tool.rss.append(rss)
            print(f"{task}: round {r + 1}: {tool.name}: {wall:.2f} s, cpu {cpu:.2f} s, {rss:.0f} MiB", file=sys.stderr)
    nbytes = size_of(source)
    rows = []
    for tool in entrants:
        ratios = [w / c for w, c in zip(tool.wall, entrants[0].wall, strict=True)]
        rows.append(
            {
                "tool": tool.name,
                "wall_s": statistics.median(tool.wall),
                "wall_to_cp": statistics.median(ratios),
                "ratio_range": [min(ratios), max(ratios)],
                "cpu_s_per_gb": statistics.median(tool.cpu) / (nbytes / 1e9),
                "cpu_to_floor": statistics.median(c / f for c, f in zip(tool.cpu, bare_loop[0].cpu, strict=True))
                if bare_loop
                else None,
                "peak_mib": max(tool.rss),
            }
        )
    return {
        "task": task,
        "bytes": nbytes,
        "rounds": rounds,
        "load": load,
        "rows": rows,
        "raw": [asdict(t) | {"command": None} for t in entrants],
    }


def table(results: list[dict[str, object]]) -> str:
    """Markdown for docs/benchmarks.md."""
    out = [
        "| conversion | tool | durable wall, s | to `cp -r` | CPU s/GB | CPU to floor | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for row in result["rows"]:  # type: ignore[attr-defined]
            low, high = row["ratio_range"]
            to_floor = f"{row['cpu_to_floor']:.2f}" if row["cpu_to_floor"] else ""
            out.append(
                f"| {result['task']} {result['bytes'] / 1e9:.1f} GB | {row['tool']} | {row['wall_s']:.2f} | "  # type: ignore[operator]
                f"{row['wall_to_cp']:.2f} [{low:.2f}-{high:.2f}] | {row['cpu_s_per_gb']:.2f} | {to_floor} | "
                f"{row['peak_mib']:.0f} |"
            )
    return "\n".join(out)


def made_by_torch(work: Path, size: int, *options: str) -> Path:
    """A DCP checkpoint of 8 ranks, made once: bf16 weights, or with --adam fp32 ones and the state of AdamW."""
    out = work / f"dcp8{''.join(options)}-{size}"
    if not (out / ".metadata").exists():
        shutil.rmtree(out, ignore_errors=True)
        launch = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        script = str(ROOT / "bench/make_source.py")
        subprocess.run([*launch, script, str(out), str(size), *options], check=True, env=environment)
    return out


def derived(source: Path, kind: str, *options: str) -> Path:
    """Another layout of the same state."""
    out = source.with_name(f"{kind}-{source.name}")
    if not out.exists():
        subprocess.run([*CLI, str(source), str(out), *options], check=True)
    return out


def source_of(task: str, work: Path, size: int) -> Path:
    """What a task converts."""
    if task.startswith("ZeRO-3"):
        return derived(made_by_torch(work, size, "--adam"), "zero3", "--to", "zero3", "--world-size", "8")
    dcp8 = made_by_torch(work, size)
    if task == "DCP8 -> hf":
        bare(dcp8)
    if task == "hf -> DCP8":
        return derived(dcp8, "hf", "--to", "hf")
    if task == "HF shards -> hf":
        return hf_shards(dcp8)
    if task == "fp32 -> bf16":
        return derived(dcp8, "fp32", "--to", "dcp", "--world-size", "8", "--dtype", "fp32")
    return dcp8


def bare(dcp8: Path) -> None:
    """accelerate merges only checkpoints that hold nothing but the model: the same files under such a name."""
    out = Path(f"{dcp8}-bare")
    if not out.exists():
        code = (
            "import sys, torch.distributed.checkpoint as dcp; from torch.distributed.checkpoint.state_dict_loader import "
            "_load_state_dict as load; from torch.distributed.checkpoint.default_planner import "
            "_EmptyStateDictLoadPlanner as P; sd = {}; "
            "load(sd, storage_reader=dcp.FileSystemReader(sys.argv[1]), planner=P(keys={'model'}), no_dist=True); "
            "dcp.save(sd, checkpoint_id=sys.argv[2], no_dist=True)"
        )
        subprocess.run([PYTHON, "-W", "ignore", "-c", code, str(dcp8), str(out)], check=True)


def main() -> None:
    """Prepare, run, print."""
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--size", default="3G", help="bytes of the checkpoint: 3G, 500M")
    ap.add_argument("--rounds", type=int, default=4)
    ap.add_argument("--work", type=Path, default=ROOT / "bench-data")
    ap.add_argument("--tasks", default=",".join(TASKS))
    ap.add_argument("--tool", help="only tools whose name contains this")
    ap.add_argument("--json", type=Path)
    a = ap.parse_args()
    size = int(float(a.size[:-1]) * {"G": 1e9, "M": 1e6}[a.size[-1]])
    a.work.mkdir(exist_ok=True)
    results = []
    for task in a.tasks.split(","):
        source = source_of(task, a.work, size)
        results.append(compare(task, source, a.work, a.rounds, a.tool))
        if a.json:
            a.json.write_text(json.dumps(results, indent=1))
    print(table(results))


def hf_shards(dcp8: Path) -> Path:
    """The model as torch's HuggingFaceStorageWriter leaves it before consolidation."""
    out = dcp8.with_name(f"hfshards-{dcp8.name}")
    if not out.exists():
        code = HF_WRITER.replace(", enable_consolidation=True", "").replace("enable_consolidation=True", "")
        subprocess.run([*python(code)(str(dcp8), str(out))], check=True)
    return out


if __name__ == "__main__":
    main()
