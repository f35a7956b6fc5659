"""SIGKILL in the middle of conversions: at a random moment, or at a random system call.

The destination must be as before or complete, the same command must then succeed, and nothing may be left beside it that no
message names.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

from .faults import CONVERSIONS, KILL, Fault, Lab

ANY = Fault("open+read+write+sync+rename+mkdir+unlink+truncate+flock+stat+close", "", KILL)
#: Those that replace something more often than the others.
NAMES = [*CONVERSIONS, "full-dcp-force", "dcp-full-force", "full-dcp-force"]


def kill(lab: Lab, number: int, calls: dict[str, int]) -> dict[str, Any]:
    """One kill, judged; `calls` remembers how many system calls a conversion has."""
    rng = random.Random(number)
    name = rng.choice(NAMES)
    lab.learn(name)
    if lab.shim is not None and name not in calls:
        lab.clean(name)
        calls[name] = lab.command(lab.arguments(name), ANY._replace(how=0), 1 << 40).calls
    before = lab.clean(name)
    if lab.shim is not None and rng.random() < 0.6:
        n = rng.randrange(1, calls[name] + 1)
        ran, said = lab.command(lab.arguments(name), ANY, n), f"at call {n} of {calls[name]}"
    else:
        after = rng.uniform(0.0, 1.1) * lab.seconds[name]
        ran, said = lab.command(lab.arguments(name), kill_after=after), f"after {after * 1000:.0f} ms"
    killed = ran.code == -9
    bad = lab.judge(name, before, ran, killed)
    return {
        "id": f"kill:{name}:{number}", "said": said, "killed": killed, "status": "; ".join(bad) or "fine", "bad": bool(bad),
        "detail": ran.text[-400:] if bad else "",
    }  # fmt: skip


def run(lab: Lab, until: float, log: Path, part: int = 0, parts: int = 1, most: int = 1 << 30, first: int = 0) -> None:
    """Kills until a time or a number."""
    calls: dict[str, int] = {}
    with open(log, "a") as lines:
        for k in range(most):
            if time.time() > until:
                break
            lines.write(json.dumps(kill(lab, first + part + k * parts, calls)) + "\n")
            lines.flush()
