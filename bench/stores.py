"""An S3 store against s3fs: `python bench/stores.py DCP_FOLDER [ROUNDS]`.

Alternated, over loopback, objects on tmpfs (bench/s3.py): reading a DCP folder into one for another number of ranks,
against `s3fs.get` of its files; writing it, against `s3fs.put`. Neither reads back. Prints ratios of wall times, and ours' peak memory.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import measured

HERE = Path(__file__).parent
PEER = "import sys, s3fs; getattr(s3fs.S3FileSystem(), sys.argv[1])(sys.argv[2], sys.argv[3], recursive=True)"


def timed(*command: str) -> tuple[float, int]:
    """(seconds, peak MiB) of a command."""
    used = measured(list(command))
    return used.wall, round(used.peak_mib)


def main(source: str, rounds: int) -> None:
    """Serve, and compare."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as objects, tempfile.TemporaryDirectory() as work:
        (Path(objects) / "bucket").mkdir()
        server = subprocess.Popen(
            [sys.executable, str(HERE / "s3.py"), objects], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert server.stdout and server.stdin
        os.environ.update(
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{int(server.stdout.readline())}", AWS_ACCESS_KEY_ID="x",
            AWS_SECRET_ACCESS_KEY="x", AWS_DEFAULT_REGION="us-east-1", AWS_EC2_METADATA_DISABLED="true",
        )  # fmt: skip
        ours = [sys.executable, "-m", "ckpttool", "convert", "--quiet", "--no-verify", "--to", "dcp"]
        theirs = [sys.executable, "-c", PEER]
        places = {"write": ([source, "s3://bucket/ours"], ["put", source + "/", "s3://bucket/theirs/"]),
                  "read": (["s3://bucket/ours", f"{work}/ours"], ["get", "s3://bucket/theirs/", f"{work}/theirs/"])}  # fmt: skip
        for what, (a, b) in places.items():
            ratios, peak = [], 0
            for k in range(rounds):
                if what == "read":
                    (
                        shutil.rmtree(f"{work}/ours", ignore_errors=True),
                        shutil.rmtree(f"{work}/theirs", ignore_errors=True),
                    )
                elif k:
                    shutil.rmtree(f"{objects}/bucket"), (Path(objects) / "bucket").mkdir()
                pair = [timed(*ours, *a, "-n", "3"), timed(*theirs, *b)]
                ratios.append(pair[0][0] / pair[1][0])
                peak = max(peak, pair[0][1])
                print(f"{what}: ours {pair[0][0]:.1f} s, s3fs {pair[1][0]:.1f} s", flush=True)
            print(
                f"{what}: ratio {statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}], peak {peak} MiB"
            )
        server.stdin.close()


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), int(sys.argv[2]) if len(sys.argv) > 2 else 3)
