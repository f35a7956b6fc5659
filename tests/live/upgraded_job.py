"""A job that trains with trainer_kit, a package of which two Pythons have two versions (tests/resume/test_other_python.py)."""

import os
import signal
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import trainer_kit  # type: ignore[import-not-found]
import verify_job


def same(mesh: Any, device: str, scale: float = 1.0, act: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """A job that computes the same with every version; its loss is multiplied, and something happens in it."""
    job: dict[str, Any] = verify_job.meta(mesh, device)

    def loss(model: Any, batch: Any) -> Any:
        act()
        each, number, logits = job["loss"](model, batch)
        return each * scale, number, logits

    return {**job, "loss": loss}


def scaled(mesh: Any, device: str) -> dict[str, Any]:
    """A job whose loss depends on the version."""
    return same(mesh, device, trainer_kit.SCALE)


def killed(mesh: Any, device: str) -> dict[str, Any]:
    """With the old version, rank 1 is killed in its first forward pass."""

    def act() -> None:
        if dist.get_rank() == 1 and trainer_kit.SCALE == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    return same(mesh, device, act=act)
