"""Launches of several ranks on this machine, as torchrun makes them, without importing torch anew for every rank."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from peers import REPOSITORY

from ckpttool.resume.ranks import launch as resume_ranks
from ckpttool.resume.request import RunSettings, Status

LIVE = REPOSITORY / "tests" / "live"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Only one launch on this machine, whatever pytest's workers do."""
    with open(Path(tempfile.gettempdir()) / f"ckpttool-torchrun-{os.getuid()}.lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


class Nurseries:
    """One process for each rank that may be needed; they end with this one."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []
        atexit.register(self.close)

    def begin(self, arguments: Sequence[str], log: Path, folder: Path, **more: str) -> tuple[int, Callable[[], int]]:
        """A process that works in this folder: (its id, a function that waits for its exit status)."""
        self._open(1)
        child = self._children[0]
        self._tell(child, arguments=arguments, environment={**os.environ, **more}, folder=str(folder), log=str(log))
        return int(self._said(child)), lambda: int(self._said(child))

    def launch(
        self, world: int, arguments: Sequence[str], log: Path, patience: float = 30, store: Any = None, **more: str
    ) -> list[int]:
        """The exit statuses of so many ranks, which are told what torchrun tells them; `more` is environment.

        Where a rank has failed, the others have `patience` seconds to end as well. With the store of an earlier launch, this one is
        what --max-restarts makes of it.
        """
        self._open(world)
        store = store or self.store(world)
        common = {
            **os.environ, **more, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        children = self._children[:world]
        for rank, child in enumerate(children):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._tell(child, arguments=arguments, environment=environment, folder=os.getcwd(), log=str(log))
        pids = [int(self._said(child)) for child in children]
        statuses: dict[int, int] = {}
        deadline = None
        while len(statuses) < world:
            waiting = {child.stdout: rank for rank, child in enumerate(children) if rank not in statuses}
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ended, _, _ = select.select(list(waiting), [], [], left)
            for pipe in ended:
                statuses[waiting[pipe]] = int(self._said(children[waiting[pipe]]))
            if not ended:
                for rank in waiting.values():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pids[rank], signal.SIGKILL)
                deadline = None
            elif deadline is None and any(statuses.values()):
                deadline = time.monotonic() + patience
        return [statuses[rank] for rank in range(world)]

    @staticmethod
    def store(world: int) -> Any:
        """The store of a job, as torchrun has one."""
        return dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)

    def close(self) -> None:
        """End them."""
        for child in self._children:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.close()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:  # a launch was interrupted, and its rank goes on
                child.kill()
                child.wait()
            child.stdout.close()
        self._children = []

    def _open(self, world: int) -> None:
        while len(self._children) < world:
            command = [sys.executable, str(LIVE / "nursery.py")]
            self._children.append(
                # without buffers, so that `select` knows of every line that has not been read
                subprocess.Popen(
                    command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **ENVIRONMENT}
                )
            )

    @staticmethod
    def _tell(child: subprocess.Popen[bytes], **launch: Any) -> None:
        assert child.stdin is not None
        line = json.dumps(launch).encode() + b"\n"
        while line:
            line = line[child.stdin.write(line) :]

    @staticmethod
    def _said(child: subprocess.Popen[bytes]) -> bytes:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line, "a nursery has ended; what it said is above"
        return line


NURSERIES = Nurseries()


def torchrun(world: int, script: str, *arguments: str) -> str:
    """What tests/live/<script> prints to stderr when that many ranks run it."""
    with one_at_a_time(), tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        NURSERIES.launch(world, [str(LIVE / script), *arguments], log, **ENVIRONMENT)
        return log.read_text(encoding="utf-8", errors="replace")


def run_map_jobs(*arguments: object) -> str:
    """What fixtures/map_jobs.py prints in one process."""
    with one_at_a_time(), tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        (status,) = NURSERIES.launch(
            1, [str(REPOSITORY / "fixtures" / "map_jobs.py"), *map(str, arguments)], log, **ENVIRONMENT
        )
        said = log.read_text(encoding="utf-8", errors="replace")
    assert status == 0, said[-4000:]
    return said


@contextmanager
def forked() -> Iterator[None]:
    """resume_verify of this process has its ranks from here instead of starting them."""

    def instead(folder: str, world: int, settings: RunSettings, status: Status) -> None:
        statuses = NURSERIES.launch(
            world, ["-m", "ckpttool.resume.ranks.worker", folder], Path(folder) / "log", **{**ENVIRONMENT, "TOKENIZERS_PARALLELISM": "false"}
        )  # fmt: skip
        resume_ranks.forward_status_lines(folder, 0, status)
        if any(statuses):
            resume_ranks.raise_rank_error(folder, dict(enumerate(statuses)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume_ranks, "run_ranks", instead)
        yield
