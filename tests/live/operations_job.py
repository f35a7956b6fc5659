"""Jobs for `ckpttool resume-verify --job` in which one rank dies, hangs or fails, as it happens on nodes."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from fixtures import jobs


def sample(index: int) -> dict[str, Any]:
    """One row."""
    return {"input_ids": jobs.sample(index), "labels": jobs.sample(index)}


def job(act: Callable[[], None] = lambda: None, rank: int = 1, data: Any = sample, training: bool = False) -> Any:
    """The job of fixtures/awkward_w3, in whose loss, from the probe or the first step on, one rank does something."""
    model = jobs.build("awkward")

    def loss(model: Any, batch: Any) -> Any:
        if dist.get_rank() == rank and (torch.is_grad_enabled() or not training):
            act()
        number = batch["labels"][:, 1:].numel()
        return model(**batch) * number, torch.tensor(number)

    return {"model": model, "optimizer": jobs.build_optimizer(model, "adamw", lr=0.01), "data": data, "loss": loss}


def healthy() -> Any:
    """A job in which nothing happens."""
    return job()


def helped() -> Any:
    """Each rank starts a process that outlives it, as a loader of data may."""
    subprocess.Popen(["sleep", "1000"])
    return job()


def killed() -> Any:
    """Rank 1 is killed in the probe, as by the kernel when memory runs out."""
    return job(lambda: os.kill(os.getpid(), signal.SIGKILL))


def stopped() -> Any:
    """Rank 1 stops in the first step, as a process whose GPU hangs."""
    return job(lambda: os.kill(os.getpid(), signal.SIGSTOP), training=True)


def hung_in_native_code() -> Any:
    """Rank 0 never comes back from a call that holds Python's lock."""

    def call() -> None:
        ctypes.PyDLL(None).sleep(1000)

    return job(call, rank=0)


def hung_in_python() -> Any:
    """Rank 1 waits for a row of its data, which is on a file system that does not answer."""

    def slow_row(index: int) -> dict[str, Any]:
        if dist.get_rank() == 1 and index >= 8:
            time.sleep(1000)
        return sample(index)

    return job(data=slow_row)


def hung_judge() -> Any:
    """Rank 0 trains, and never comes back from what judges the run: a stand-in for a file system that hangs only then."""
    from ckpttool.resume.compare import judge

    judge.judge_single_run = lambda *_: time.sleep(1000)  # type: ignore[assignment,func-returns-value]
    return job()


def fails() -> Any:
    """Rank 1 raises in its loss."""

    def act() -> None:
        raise ValueError("the labels\nare of another vocabulary")

    return job(act)


def crashes() -> Any:
    """Rank 1 aborts in native code."""
    return job(os.abort)


def ends() -> Any:
    """Rank 1 ends in the middle of a step, and leaves no error."""
    return job(lambda: os._exit(7), training=True)


def leaves() -> Any:
    """Whoever builds the job ends the process."""
    sys.exit(3)


def loader() -> Any:
    """The data can only be read in order."""
    return job(data=torch.utils.data.DataLoader([sample(k) for k in range(8)]))  # type: ignore[arg-type]
