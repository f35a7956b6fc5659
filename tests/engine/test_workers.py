"""Worker processes that are killed, stopped and woken; a coordinator that is killed. Real processes, `ckpttool convert --workers`.

A sitecustomize.py makes parts small and reading slow in all of them, so that there is time to do harm.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peers import FIXTURES
from test_parts import contents

import ckpttool

pytestmark = pytest.mark.slow

SOURCE = FIXTURES / "fsdp2_w3" / "ckpt"
SITE = """
import os, time
from ckpttool.engine import dispatch, parts, stream
parts._LEAST_BYTES, parts._LEAST_BYTES_OF_A_FILE, dispatch._SLOW_SECONDS = 8 << 10, 1 << 10, 1.0
load = stream.Reader._load_batch
def slowly(self, batch):
    time.sleep(float(os.environ["SECONDS_A_BLOCK"]))
    return load(self, batch)
stream.Reader._load_batch = slowly
"""


class Run:
    """`ckpttool convert SOURCE OUT --workers N --json`, while it runs."""

    def __init__(self, tmp_path: Path, *words: str, seconds: float = 0.05) -> None:
        (tmp_path / "site").mkdir(exist_ok=True)
        (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
        env = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "SECONDS_A_BLOCK": str(seconds)}
        self.out = tmp_path / "out"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ckpttool", "convert", str(SOURCE), str(self.out), "--json", "--jobs", "1", *words],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def parts(self) -> int:
        """How many parts are filled by now."""
        return len(list(self.out.parent.glob(".out.partial-*/parts/*.json")))

    def workers(self) -> list[int]:
        """The processes that work for it."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        threads = Path(f"/proc/{self.process.pid}/task")
        pids = [int(p) for t in threads.iterdir() for p in (t / "children").read_text().split()]
        return pids or [int(p) for p in children.read_text().split()]

    def wait_for(self, parts: int) -> None:
        """Until so many parts are filled."""
        end = time.monotonic() + 60
        while self.parts() < parts:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end
            time.sleep(0.01)

    def result(self) -> dict[str, Any]:
        """What it prints at its end."""
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        found: dict[str, Any] = json.loads(out)
        return found


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, bytes]]:
    """The bytes that one process writes."""
    out = tmp_path_factory.mktemp("one") / "out"
    ckpttool.convert(SOURCE, out, to="dcp", world_size=3)
    yield contents(out)


WORDS = ("--to", "dcp", "-n", "3")


def test_workers_that_are_killed_cost_their_parts_only(tmp_path: Path, wanted: dict[str, bytes]) -> None:
    run = Run(tmp_path, *WORDS, "--workers", "2", seconds=0.1)
    run.wait_for(1)
    for pid in run.workers():  # one of them may be between two parts
        os.kill(pid, signal.SIGKILL)
    found = run.result()
    assert contents(run.out) == wanted and found["workers"]["again"] >= 1 and found["workers"]["count"] == 2


def test_a_coordinator_that_is_killed_leaves_no_worker_and_any_number_go_on(
    tmp_path: Path, wanted: dict[str, bytes]
) -> None:
    for number, workers in enumerate(("3", "1")):
        run = Run(tmp_path, *WORDS, "--workers", "2")
        run.wait_for(2)
        pids = run.workers()
        assert len(pids) == 2
        run.process.kill()
        run.process.communicate()
        end = time.monotonic() + 10
        while any(alive(pid) for pid in pids):
            assert time.monotonic() < end, "workers outlive their coordinator"
            time.sleep(0.02)
        assert not run.out.exists()
        done = run.parts()
        again = Run(tmp_path, *WORDS, "--workers", workers, seconds=0.0).result()
        assert again["workers"]["filled_before"] == done >= 2 and again["verified"]
        assert contents(run.out) == wanted
        run.out.rename(tmp_path / f"done_{number}")


def alive(pid: int) -> bool:
    """Whether a process runs; not one that has ended and waits to be noticed."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_a_worker_that_was_stopped_and_wakes_after_the_commit_does_no_harm(
    tmp_path: Path, wanted: dict[str, bytes]
) -> None:
    run = Run(tmp_path, *WORDS, "--workers", "2", "--no-verify")
    run.wait_for(2)
    (stopped, *_) = run.workers()
    os.kill(stopped, signal.SIGSTOP)
    try:
        found = run.result()  # the other worker does its part, and it is killed at the end
    finally:
        if alive(stopped):
            os.kill(stopped, signal.SIGCONT)
    assert found["workers"]["again"] >= 1
    time.sleep(0.3)
    assert contents(run.out) == wanted and not alive(stopped)


def test_an_interrupted_run_leaves_no_worker_and_what_was_filled(tmp_path: Path, wanted: dict[str, bytes]) -> None:
    run = Run(tmp_path, *WORDS, "--workers", "2")
    run.wait_for(2)
    pids = run.workers()
    run.process.send_signal(signal.SIGINT)
    out, err = run.process.communicate(timeout=20)
    assert run.process.returncode == 130 and "Run the same command again to continue" in out + err
    assert "Traceback" not in err
    assert not any(alive(pid) for pid in pids)
    assert Run(tmp_path, *WORDS, seconds=0.0).result()["workers"]["filled_before"] >= 2
    assert contents(run.out) == wanted
