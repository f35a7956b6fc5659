"""The benchmarks of large indexes run: their code is text that no other check reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from peers import REPOSITORY


def run(tmp_path: Path, script: str, *words: str) -> list[dict[str, float]]:
    """The lines of numbers that it prints."""
    done = subprocess.run(
        [sys.executable, REPOSITORY / "bench" / script, "--work", tmp_path, *words], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_a_million_chunks(tmp_path: Path) -> None:
    phases, whole = run(tmp_path, "million.py", "--ranks", "3", "--tensors", "7", "--to", "dcp --world-size 2")
    assert phases["chunks"] == 21 and whole["cpu_s"] > 0
    assert phases["peak_mib"] < 100 and whole["peak_mib"] < 100  # the script has torch in memory


def test_an_index(tmp_path: Path) -> None:
    (found,) = run(tmp_path, "index.py", "--ranks", "2")
    assert found["chunks"] > 4000 and found["planned_chunks"] > 0 and found["peak_mib"] < 150
