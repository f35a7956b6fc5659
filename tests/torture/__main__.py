"""make torture MINUTES=30, or one case again."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import conserved, faults, fuzz, holds, lab, planted, report, seeds, servers, terminal

#: Of the time; what building and importing takes comes out of the share of the fuzzer, which is last.
SHARES = {
    "fuzz": 0.38, "faults": 0.14, "kills": 0.08, "races": 0.05, "conserved": 0.18, "holds": 0.05, "planted": 0.05, "servers": 0.05,
    "terminal": 0.02,
}  # fmt: skip
#: How to repeat one case by its number, of testers whose cases have no other place in their IDs.
CASES = {
    "conserved": conserved.case, "holds": holds.case, "planted": planted.replay, "servers": servers.case, "terminal": terminal.case,
}  # fmt: skip


def scratch() -> Path:
    """A folder of our own, in memory where that can be."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="ckpttool-torture-", dir=memory if memory.is_dir() else None))


def replay(case: str, work: Path) -> dict[str, Any]:
    """One case again, by its ID."""
    kind, name, number = case.split(":")[:3]
    if kind in CASES:
        return CASES[kind](int(number), work / kind)
    if kind != "fuzz":
        shim = faults.compiled(work)
        if shim and "LD_PRELOAD" not in os.environ:  # the loader reads it when a process begins
            os.environ["LD_PRELOAD"] = str(shim)
            faults.prepare(work / "sources")
            script = (
                f"import json; from pathlib import Path; from tests.torture import lab; "
                f"print(json.dumps(lab.replay({case!r}, Path({str(work / 'sources')!r}), Path({str(work / 'lab' / 'out')!r})), indent=1))"
            )
            subprocess.run([sys.executable, "-c", script], check=True, cwd=lab.REPOSITORY)
            return {}
        return lab.replay(case, work / "sources", work / "lab" / "out")
    made = seeds.build(work / "seeds", {name, "full-numbered"})
    fuzz.warm(made, work / "warm")
    signal.signal(signal.SIGALRM, fuzz._ring)
    return fuzz.Bench(made, work / "bench").mutant(name, int(number))


def in_labs(work: Path, keep: Path, seconds: dict[str, float], first: int, count: int) -> bool:
    """All testers but the fuzzer in `count` processes of their own; whether the shim could be compiled."""
    shim = faults.compiled(work)
    faults.prepare(work / "sources")
    running = [
        lab.started(
            shim, sources=work / "sources", out=work / f"lab{k}" / "out", log=keep / f"lab.{k}.jsonl", part=k, parts=count,
            first=first, **{name: [s, 1 << 30] for name, s in seconds.items()},
        )
        for k in range(count)
    ]  # fmt: skip
    failed = [p.returncode for p in running if p.wait()]
    if failed:
        raise SystemExit(f"a process for faults, kills and races ended with {failed}")
    return shim is not None


def torture(minutes: float, first: int, work: Path, keep: Path, workers: int, testers: set[str]) -> int:
    """The testers of these names, each in as many processes; the exit status."""
    began = time.time()
    print(f"from number {first} on, for {minutes:.0f} minutes", flush=True)
    whole = minutes * 60
    shares = {name: share / sum(SHARES[t] for t in testers) for name, share in SHARES.items() if name in testers}
    for old in keep.glob("*.jsonl"):
        old.unlink()
    others = {name: whole * share for name, share in shares.items() if name != "fuzz"}
    shim = in_labs(work, keep, others, first, workers) if others else True
    if "fuzz" in testers:
        made = seeds.build(work / "seeds")
        fuzz.warm(made, work / "warm")
        fuzz.supervised(made, work / "fuzz", first, began + whole, keep / "fuzz", workers)
    mutants, cases = report.lines(keep.glob("fuzz.*.jsonl")), report.lines(keep.glob("lab.*.jsonl"))
    bad = report.failures([*mutants, *cases])
    (keep / "failures.json").write_text(json.dumps(bad, indent=1))
    print(report.table([*report.of_mutants(mutants), *report.of_others(cases)]))
    if not shim:
        print("\nNo system call failed: there is no C compiler, or this is not Linux.")
    print("\nAccepted, though the real reader refuses:\n" + (report.alone(mutants) or "nothing"))
    for r in bad[:40]:
        print(f"\nFAILED {r['id']}: {r['status']}\n  {r['said'][:300]}\n  {r['detail'][-700:]}")
    everything = testers == set(SHARES)
    if shim and minutes >= 30 and everything and (short := report.short_of(mutants, cases)):
        print(f"\nFewer than wanted in {minutes:.0f} minutes: {short}. The machine was busy, or something became slow.")
    print(
        f"\n{len(bad)} failures in {(time.time() - began) / 60:.1f} minutes from number {first} on. {keep}/failures.json has them; "
        "`python -m tests.torture --replay ID` does one again."
    )
    return 1 if bad else 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument(
        "--first",
        type=int,
        default=int(time.time()) * 1000,
        help="number of the first mutant, by the clock unless given: other numbers are other mutants",
    )
    parser.add_argument("--workers", type=int, default=2, help="processes that work side by side")
    parser.add_argument(
        "--testers", default=",".join(SHARES), help="those to run, which share the time; all by default"
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
        testers = set(given.testers.split(","))
        if unknown := testers - SHARES.keys():
            parser.error(f"no such testers: {', '.join(sorted(unknown))}")
        return torture(given.minutes, given.first, work, keep.resolve(), given.workers, testers)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
