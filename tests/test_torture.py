"""A sample of what `make torture` does, with fixed numbers: it must end without a failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from peers import REPOSITORY

SEEDS = (
    "full",
    "full-legacy",
    "dcp-files",
    "dcp-zstd",
    "hf-sharded",
    "zero3",
    "zero2",
    "universal",
    "fsdp1-ours",
    "audit",
)


def test_mutants_are_refused_or_read_as_their_own_reader_reads_them(tmp_path: Path) -> None:
    """In a process of its own, as torch is restricted there for good."""
    script = f"""
import json, sys, time
from pathlib import Path
from tests.torture import fuzz, oracle, report, seeds

work = Path({str(tmp_path)!r})
made = seeds.build(work / "seeds", {(*SEEDS, "full-numbered")!r})
fuzz.warm(made, work / "warm")
fuzz.supervised(made, work / "work", 7, time.time() + 60, work / "log", workers=1, most=100)
done = report.lines(work.glob("log.*.jsonl"))
print(json.dumps([len(done), report.failures(done), [r["status"] for r in done]]))
"""
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    count, bad, statuses = json.loads(run.stdout.splitlines()[-1])
    assert not bad
    assert count == 100
    assert {"refused with a clear error", "accepted: equal to the original"} <= set(statuses)
