"""A process for faults, kills and races: with shim.c before libc where that can be compiled, and without torch.

python -m tests.torture.lab '{"sources": ..., "out": ..., "log": ..., "part": 0, "parts": 2, "first": 0,
                              "faults": [seconds, most], "kills": [seconds, most], "races": [seconds, most]}'
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import conserved, faults, holds, kills, planted, races, servers, terminal

REPOSITORY = Path(__file__).resolve().parents[2]


def started(shim: Path | None, **what: Any) -> subprocess.Popen[bytes]:
    """Such a process."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **({"LD_PRELOAD": str(shim)} if shim else {})}
    command = [
        sys.executable,
        "-m",
        "tests.torture.lab",
        json.dumps({k: str(v) if isinstance(v, Path) else v for k, v in what.items()}),
    ]
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment)


def main() -> None:
    """Do what the argument says."""
    what = json.loads(sys.argv[1])
    lab = faults.Lab(Path(what["sources"]), Path(what["out"]))
    log, part, parts, first = Path(what["log"]), what["part"], what["parts"], what.get("first", 0)
    if lab.shim is not None and "faults" in what:
        seconds, most = what["faults"]
        faults.run(lab, time.time() + seconds, log, part, parts, most)
    testers = {
        "kills": kills, "races": races, "conserved": conserved, "holds": holds, "planted": planted, "servers": servers,
        "terminal": terminal,
    }  # fmt: skip
    for name, tester in testers.items():
        if name in what:
            seconds, most = what[name]
            tester.run(lab, time.time() + seconds, log, part, parts, most, first)


def replay(case: str, sources: Path, out: Path) -> dict[str, Any]:
    """One fault, kill or race again, by its ID, in this process."""
    kind, name, *rest = case.split(":")
    lab = faults.Lab(sources, out)
    if kind == "fault":
        return lab.fault(name, faults.by_name(rest[0]), int(rest[1])) or {"id": case, "status": "no such call any more"}
    return kills.kill(lab, int(rest[0]), {}) if kind == "kill" else races.race(lab, name, int(rest[0]))


if __name__ == "__main__":
    main()
