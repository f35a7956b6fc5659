"""A sample of what `make torture` does, with fixed numbers: it must end without a failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from peers import REPOSITORY

sys.path.insert(0, str(REPOSITORY))

from tests.torture import faults

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


#: (conversion, fault, which call, exit code)
FAULTS = [
    ("dcp-dcp", "write-ENOSPC-always", 3, 8), ("dcp-dcp", "sync-EIO", 2, 1), ("dcp-dcp", "mkdir-EIO", 1, 1),
    ("dcp-dcp", "read-short", 4, 0), ("dcp-full-force", "rename-EIO", 1, 1), ("dcp-full-force", "write-short", 2, 0),
    ("dcp-full-force", "open-EMFILE", 3, None), ("full-dcp-force", "rename-EIO", 1, 1), ("full-dcp-force", "write-EIO", 5, 1),
    ("export", "sync-EIO", 1, 1), ("export", "read+write+sync-EINTR", 6, None),
]  # fmt: skip
NAMES = ("dcp-dcp", "dcp-full-force", "full-dcp-force", "export")
RACES = ("two runs at one destination", "a reader during --force", "no RENAME_EXCHANGE", "a full tmpfs")


def ran(script: str, **environment: str) -> Any:
    """What a process prints last, as JSON."""
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=200,
        env={**os.environ, "DS_ACCELERATOR": "cpu", **environment},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_mutants_are_refused_or_read_as_their_own_reader_reads_them(tmp_path: Path) -> None:
    """In a process of its own, as torch is restricted there for good."""
    script = f"""
import json, sys, time
from pathlib import Path
import ckpttool
from tests.torture import fuzz, oracle, report, seeds

work = Path({str(tmp_path)!r})
made = seeds.build(work / "seeds", {(*SEEDS, "full-numbered")!r})
fuzz.warm(made, work / "warm", ("dcp", "full", "zero3"))
fuzz.supervised(made, work / "work", 7, time.time() + 60, work / "log", workers=1, most=80)
done = report.lines(work.glob("log.*.jsonl"))

def convert(*_, **__):
    raise ckpttool.CkpttoolError("nothing was left there: please report this.")

ckpttool.convert = convert
fuzz.supervised(made, work / "work", 7, time.time() + 60, work / "broken", workers=1, most=20)
broken = {{r["status"] for r in report.failures(report.lines(work.glob("broken.*.jsonl")))}}
print(json.dumps([len(done), report.failures(done), [r["status"] for r in done], list(broken)]))
"""
    count, bad, statuses, broken = ran(script)
    assert not bad
    assert broken == ["an error that asks to be reported"]
    assert count == 80
    assert {"refused with a clear error", "accepted: equal to the original"} <= set(statuses)


def test_holds_stand_while_others_export_release_and_prune(tmp_path: Path) -> None:
    script = f"""
import json
from pathlib import Path
from tests.torture import holds

print(json.dumps(holds.case(0, Path({str(tmp_path / "work")!r}))))
"""
    done = ran(script)
    assert not done["bad"], done
    assert done["operations"] > 20


def test_failing_calls_kills_and_races_leave_the_old_destination_or_the_new_one(tmp_path: Path) -> None:
    shim = faults.compiled(tmp_path)
    if shim is None:
        pytest.skip("no C compiler, or not Linux")
    faults.prepare(tmp_path / "sources")
    script = f"""
import json, sys
from pathlib import Path
from tests.torture import faults, kills, races

kills.NAMES[:] = {NAMES!r}
lab = faults.Lab(Path({str(tmp_path / "sources")!r}), Path({str(tmp_path / "lab" / "out")!r}), {NAMES!r})
failed = [lab.fault(name, faults.by_name(fault), n) for name, fault, n, _ in {FAULTS!r}]
calls = {{}}
killed = [kills.kill(lab, k, calls) for k in range(6)]
raced = [races.race(lab, name, 1) for name in {RACES!r}]
print(json.dumps([failed, killed, raced, "torch" in sys.modules]))
"""
    failed, killed, raced, torch_is_there = ran(script, LD_PRELOAD=str(shim))
    assert all(failed), "every one of these calls is made"
    assert not [r for r in (*failed, *killed, *raced) if r["bad"]]
    assert [r["code"] for r, (*_, code) in zip(failed, FAULTS, strict=True) if code is not None] == [
        code for *_, code in FAULTS if code is not None
    ]
    assert any(r["killed"] for r in killed)
    assert not torch_is_there
