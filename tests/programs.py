"""Programs that tests start, in process groups of their own, and what becomes of their processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent


#: Parts are small and reading is slow, so that there is time to do harm.
_SITE = """
import os, time
from ckpttool.engine.copy import stream
from ckpttool.engine.workers import parts
parts._LEAST_BYTES, parts._LEAST_BYTES_OF_A_FILE, parts._SLOW_SECONDS = 8 << 10, 1 << 10, 1.0
load = stream.Reader._load_batch
def slowly(self, batch):
    time.sleep(float(os.environ["SECONDS_A_BLOCK"]))
    return load(self, batch)
stream.Reader._load_batch = slowly
"""


class SlowConversion:
    """`ckpttool convert WORDS --json --jobs 1`, while it runs, with a sitecustomize.py in `tmp_path` for all of its processes."""

    def __init__(self, tmp_path: Path, *words: object, seconds: float, more: str = "") -> None:
        (tmp_path / "site").mkdir(exist_ok=True)
        (tmp_path / "site" / "sitecustomize.py").write_text(_SITE + more)
        env = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "SECONDS_A_BLOCK": str(seconds)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ckpttool", "convert", *map(str, words), "--json", "--jobs", "1"],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def processes(self) -> tuple[int, list[int]]:
        """The template, and the workers that it has made."""
        (template,) = children(self.process.pid)
        return template, children(template)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until a condition is met, while it runs."""
        end = time.monotonic() + 60
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end
            time.sleep(0.01)

    def result(self) -> dict[str, Any]:
        """What it prints at its end."""
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        found: dict[str, Any] = json.loads(out)
        return found


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(p) for t in Path(f"/proc/{pid}/task").iterdir() for p in (t / "children").read_text().split()]


def script(code: str, *arguments: object, before: tuple[str, ...] = (), **more: Any) -> subprocess.Popen[str]:
    """A program of its own that imports what the tests do, in a process group of its own."""
    env = os.environ | {"PYTHONPATH": str(TESTS)} | more.pop("env", {})
    command = [*before, sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True, **more
    )


def alive(pids: list[int]) -> list[int]:
    """Those of these processes that run; a zombie does not, once its last thread has ended and it can be waited for."""
    out = []
    for pid in pids:
        try:
            state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if state != "Z" or int(rest[16]) > 1:  # fields 3 and 20 of proc(5): the state, the number of threads
            out.append(pid)
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
