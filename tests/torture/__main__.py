"""make torture MINUTES=30, or one case again."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import fuzz, report, seeds

SHARES = {"fuzz": 0.6, "faults": 0.25, "kills": 0.15}


def scratch() -> Path:
    """A folder of our own, in memory where that can be."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="ckpttool-torture-", dir=memory if memory.is_dir() else None))


def replay(case: str, work: Path) -> dict[str, Any]:
    """One case again, by its ID."""
    kind, name, number = case.split(":")[:3]
    assert kind == "fuzz", case
    made = seeds.build(work / "seeds", {name, "full-numbered"})
    fuzz.warm(made, work / "warm")
    signal.signal(signal.SIGALRM, fuzz._ring)
    return fuzz.Bench(made, work / "bench").mutant(name, int(number))


def torture(minutes: float, first: int, work: Path, keep: Path) -> int:
    """Everything; the exit status."""
    began = time.time()
    made = seeds.build(work / "seeds")
    fuzz.warm(made, work / "warm")
    print(f"{len(made)} seeds after {time.time() - began:.0f} s; logs in {keep}", flush=True)
    fuzz.supervised(made, work / "fuzz", first, began + minutes * 60 * SHARES["fuzz"], keep / "fuzz")
    done = report.lines(keep.glob("fuzz.*.jsonl"))
    rows = report.of_mutants(done)
    bad = report.failures(done)
    print(report.table(rows))
    print("\naccepted, though the real reader refuses:\n" + report.alone(done))
    (keep / "failures.json").write_text(json.dumps(bad, indent=1))
    for r in bad[:40]:
        print(f"\nFAILED {r['id']}: {r['status']}\n  {r['said'][:300]}\n  {r['detail'][-700:]}")
    print(
        f"\n{len(bad)} failures; {keep}/failures.json has them, `python -m tests.torture --replay ID` does one again."
    )
    return 1 if bad else 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first mutant: other numbers are other mutants"
    )
    parser.add_argument("--logs", type=Path, help="folder for logs and failures.json")
    parser.add_argument("--replay", metavar="ID", help="do one case again")
    given = parser.parse_args()
    work = scratch()
    try:
        if given.replay:
            print(json.dumps(replay(given.replay, work), indent=1))
            return 0
        keep = given.logs or Path(tempfile.mkdtemp(prefix="ckpttool-torture-logs-"))
        keep.mkdir(parents=True, exist_ok=True)
        return torture(given.minutes, given.first, work, keep.resolve())
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
