"""`ckpttool push` of a DCP checkpoint against `hf upload` of the same model already converted: `python bench/push.py`.

The Hub is the small one of tests/fake_hub.py in a process of its own, which takes objects without keeping or hashing them, so
that the two clients are what is measured; it is started anew for every run, with parts of 16 MiB. Both clients use the LFS
road, as `push` does (Xet takes paths only, and this Hub has none). A round runs both once, in an order that is reversed from
round to round; `hf upload` runs twice in a round, and when the two are far apart, the run says nothing. The hashes that
`push` keeps are removed before each run. With --cold all sources are dropped from the page cache before each run.

Wall seconds from start to end of the process; peak memory by wait4 of a shell around it; bytes read and written by its
/proc/<pid>/io, of which the import of Python's modules is a part (a run of `--dry-run` says how much).
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

from run import PYTHON, ROOT, forget, size_of

sys.path.insert(0, str(ROOT / "tests"))

SERVER = """
import os, sys
sys.path.insert(0, sys.argv[1])
import hub

class Handler(hub._Handler):
    def _body(self):
        left = int(self.headers.get("Content-Length", 0))
        if self.command != "PUT" or not self.path.startswith("/lfs/"):
            return super()._body()
        buffer = bytearray(1 << 20)
        while left:
            left -= self.rfile.readinto(memoryview(buffer)[: min(left, len(buffer))])
        return b""

    def _lfs(self, signature, what, body):
        oid, size, parts = self.server.uploads[signature]
        if self.command == "PUT":
            if not what:
                self.server.objects[oid] = range(size)
            return 200, b"", {"ETag": '"x"'}
        if what == ["complete"]:
            self.server.objects[oid] = range(size)
        return hub._json({})

server = hub.Hub(part=16 << 20)
server.RequestHandlerClass = Handler
with server:
    print(server.endpoint, flush=True)
    sys.stdin.read()
"""


def once(command: list[str], home: Path) -> dict[str, Any]:
    """{"wall", "peak_mib", "read", "written", "staged"} of one run against a new Hub."""
    shutil.rmtree(home, ignore_errors=True)
    server = subprocess.Popen(
        [PYTHON, "-c", SERVER, str(ROOT / "tests")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None and server.stdin is not None
    env = {
        **os.environ, "HF_ENDPOINT": server.stdout.readline().strip(), "HF_TOKEN": "hf_OwnerOwnerOwnerOwnerOwner012345",
        "HF_HOME": str(home / "hf"), "XDG_CACHE_HOME": str(home / "cache"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "NO_PROXY": "127.0.0.1", "TMPDIR": str(home / "tmp"),
    }  # fmt: skip
    (home / "tmp").mkdir(parents=True)
    try:
        began = time.monotonic()
        shell = ["sh", "-c", '"$@"; exit $?', "sh", *command]
        process = subprocess.Popen(shell, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        io: dict[str, int] = {}
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            io = counted(process.pid) or io
            time.sleep(0.02)
        wall = time.monotonic() - began
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            assert process.stderr is not None
            raise RuntimeError(f"{command}: exit {process.returncode}: {process.stderr.read().decode()[-2000:]}")
        cpu = usage.ru_utime + usage.ru_stime
        left = size_of(home)
        return {
            "wall": wall, "cpu": cpu, "peak_mib": io.get("VmHWM", 0) / 1024, "read": io.get("rchar", 0), "written": io.get("wchar", 0),
            "left": left,
        }  # fmt: skip
    finally:
        server.stdin.close()
        server.wait()


def counted(pid: int) -> dict[str, int]:
    """/proc/<pid>/io of the one child of a process, and its peak memory in kB (VmHWM)."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        lines = Path(f"/proc/{children[0]}/io").read_text().splitlines()
        status = Path(f"/proc/{children[0]}/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0])
        return {"VmHWM": peak} | {k: int(v) for k, v in (line.split(": ") for line in lines)}
    except (OSError, IndexError, ValueError):
        return {}


def main() -> None:
    """Prepare, run, print."""
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--size", default="2G", help="bytes of the weights: 2G, 500M")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--max-shard-size", default="5GB")
    ap.add_argument("--cold", action="store_true")
    ap.add_argument("--work", type=Path, default=ROOT / "bench-data")
    ap.add_argument("--source", type=Path, help="a DCP folder, instead of one that is made")
    ap.add_argument("--json", type=Path)
    a = ap.parse_args()
    a.work.mkdir(exist_ok=True)
    if a.source is None:
        from run import made_by_torch

        a.source = made_by_torch(a.work, int(float(a.size[:-1]) * {"G": 1e9, "M": 1e6}[a.size[-1]]))
    converted = a.work / "push-hf"
    shutil.rmtree(converted, ignore_errors=True)
    shards = ["--max-shard-size", a.max_shard_size]
    convert = [PYTHON, "-m", "ckpttool", "convert", "-q", "--to", "hf", "--no-verify", *shards]
    subprocess.run([*convert, str(a.source), str(converted)], check=True, stdout=subprocess.DEVNULL)
    hf = [str(Path(PYTHON).with_name("hf")), "upload", "org/name", str(converted), ".", "--private", "--quiet"]
    tools = {
        "hf upload": hf,
        "ckpttool push": [PYTHON, "-m", "ckpttool", "push", "-q", *shards, str(a.source), "org/name"],
        "hf upload, again": hf,
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in tools}
    home = Path(tempfile.mkdtemp(dir=a.work))
    try:
        dry = once([*tools["ckpttool push"], "--dry-run"], home)
        for r in range(a.rounds):
            for name in list(tools) if r % 2 == 0 else list(tools)[::-1]:
                for folder in (a.source, converted):
                    if a.cold:
                        forget(folder)
                    else:
                        subprocess.run(["cat", *map(str, folder.iterdir())], check=True, stdout=subprocess.DEVNULL)
                runs[name].append(once(tools[name], home))
                print(name, json.dumps({k: round(v, 2) for k, v in runs[name][-1].items()}), file=sys.stderr)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    if a.json:
        a.json.write_text(json.dumps({"dry_run": dry, **runs}, indent=1))
    nbytes = size_of(converted)
    print("| tool | GB/s | wall, to `hf upload` | CPU s/GB | peak MiB | source bytes read | bytes written |")
    print("|---|---|---|---|---|---|---|")
    for name, rows in runs.items():
        ratios = [x["wall"] / y["wall"] for x, y in zip(rows, runs["hf upload"], strict=True)]
        read = max(x["read"] for x in rows) - (dry["read"] if "ckpttool" in name else 0)
        print(
            f"| {name} | {nbytes / 1e9 / statistics.median(x['wall'] for x in rows):.2f} | {statistics.median(ratios):.2f} "
            f"[{min(ratios):.2f}-{max(ratios):.2f}] | {statistics.median(x['cpu'] for x in rows) / (nbytes / 1e9):.2f} | "
            f"{max(x['peak_mib'] for x in rows):.0f} | {read / nbytes:.3f} x | {max(x['written'] for x in rows):,.0f} |"
        )


if __name__ == "__main__":
    main()
