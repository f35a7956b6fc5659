"""Count what commands ask of a store: `python bench/count_requests.py [MIB]`.

Makes a checkpoint of 40 weights with AdamW's moments (120 tensors, 62 MB) as DCP of two ranks, one .pt file and a Hub folder, puts
it into bench/s3.py, and prints for each command how many requests it sent, and how many of them listed something, asked for an
object alone (HEAD), or read bytes. docs/how-to/stores.md quotes the numbers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
MAKE = """
import sys, torch
out, bytes_of_one = sys.argv[1], int(sys.argv[2])
weights = {f"layers.{i // 4}.w{i % 4}.weight": torch.randn(bytes_of_one // 1440, 360) for i in range(40)}
moments = {i: {"exp_avg": w * 0.1, "exp_avg_sq": w * w} for i, w in enumerate(weights.values())}
group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": list(range(40))}
torch.save({"model": weights, "optimizer": {"state": moments, "param_groups": [group]}}, out)
"""


def kind_of(line: str) -> str:
    """What a line of the server's log asked for."""
    method, path, asked, *_ = line.split()
    if method == "GET" and ("list-type" in path or path.endswith("?uploads")):
        return "listings"
    return {"HEAD": "heads", "GET": "ranges" if asked != "-" else "objects"}.get(method, "writes")


def run(*command: str) -> None:
    """Run a command of ckpttool."""
    subprocess.run(
        [sys.executable, "-m", "ckpttool", *command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def main(bytes_of_all: int) -> None:
    """Make the checkpoint, serve it, count."""
    with tempfile.TemporaryDirectory() as work:
        bucket = Path(work) / "objects" / "b"
        bucket.mkdir(parents=True)
        subprocess.run([sys.executable, "-c", MAKE, str(bucket / "a.pt"), str(bytes_of_all // 120)], check=True)
        quiet = ("--quiet", "--no-verify")
        run("convert", *quiet, f"{bucket}/a.pt", f"{bucket}/dcp", "--to", "dcp", "--world-size", "2")
        run("convert", *quiet, f"{bucket}/a.pt", f"{bucket}/hf", "--to", "hf", "--only", "model")
        log = Path(work) / "log"
        server = subprocess.Popen(
            [sys.executable, str(HERE / "s3.py"), str(bucket.parent), str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )  # fmt: skip
        assert server.stdin and server.stdout
        endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
        os.environ.update(
            AWS_ENDPOINT_URL=endpoint, AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x", AWS_DEFAULT_REGION="us-east-1",
            AWS_EC2_METADATA_DISABLED="true",
        )  # fmt: skip
        local, new = f"{bucket}/dcp", f"{work}/new"
        for command in (
            ("inspect", "s3://b/dcp"),
            ("inspect", "s3://b/a.pt"),
            ("inspect", "s3://b/hf"),
            ("inspect", f"{endpoint}/b/a.pt"),
            ("verify", "s3://b/dcp"),
            ("verify", "s3://b/a.pt"),
            ("verify", "s3://b/hf"),
            ("verify", "s3://b/dcp", "--read-data"),
            ("convert", "s3://b/dcp", new, "--to", "dcp", "--world-size", "3"),
            ("convert", "s3://b/dcp", new, "--to", "hf", "--only", "model"),
            ("convert", "s3://b/a.pt", new, "--to", "dcp", "--world-size", "2"),
            ("convert", "s3://b/hf", new, "--to", "dcp", "--world-size", "2"),
            ("convert", f"{endpoint}/b/a.pt", new, "--to", "dcp", "--world-size", "2"),
            ("convert", local, "s3://b/new", "--to", "dcp", "--world-size", "3", "--force"),
        ):
            log.write_text("")
            run(*command)
            lines = log.read_text().splitlines()
            kinds = Counter(map(kind_of, lines))
            shown = " ".join(command).replace(work, "").replace(endpoint, "http://h").replace("/objects/b", "")
            counts = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
            print(f"{shown:60} {len(lines):5}  {counts}", flush=True)
            if "-v" in sys.argv:
                print("\n".join(lines))
            shutil.rmtree(new, ignore_errors=True)
        server.stdin.close()
        server.wait()


if __name__ == "__main__":
    main(int(next((a for a in sys.argv[1:] if a != "-v"), "62")) * 10**6)
