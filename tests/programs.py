"""Programs that tests start, in process groups of their own, and what becomes of their processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent


def script(code: str, *arguments: object, before: tuple[str, ...] = (), **more: Any) -> subprocess.Popen[str]:
    """A program of its own that imports what the tests do, in a process group of its own."""
    env = os.environ | {"PYTHONPATH": str(TESTS)} | more.pop("env", {})
    command = [*before, sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True, **more
    )


def alive(pids: list[int]) -> list[int]:
    """Those of these processes that run; zombies do not."""
    out = []
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                out.append(pid)
        except OSError:
            pass
    return out


def wait_for(condition: Any, seconds: float) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def announced(folder: Path, n: int) -> list[str]:
    """The processes that `functions.announce_and_sleep` runs in, once there are `n`."""
    assert wait_for(lambda: len(os.listdir(folder)) == n, 8)
    return os.listdir(folder)


def mpiexec(n: int) -> tuple[str, ...]:
    """The words before a command that start it `n` times."""
    pytest.importorskip("mpi4py", reason="the extra [mpi] is not installed")
    found = Path(sys.executable).with_name("mpiexec")
    if not found.exists():
        pytest.skip("mpich is not installed next to Python")
    return (str(found), "-n", str(n))
