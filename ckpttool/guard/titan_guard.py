"""`guard_torchtitan`: proves the saves of torchtitan's CheckpointManager.

Source: torchtitan/components/checkpointer/{base,dcp}.py (0.3.0): `save(step, last_step)` is called at every step and
returns whether it has saved, or begun to; `save_future` is that of an asynchronous save, None of another; the folder of
a save is `step-STEP` in `folder`.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

from .background import Guard

__all__ = ["guard_torchtitan"]


def guard_torchtitan(manager: Any, guard: Guard | None = None) -> Guard:
    """Verify each save of torchtitan's CheckpointManager in the background, also asynchronous ones.

    Faults are reported at the next step, and `manager.close()` waits until the last saves are verified.

    Args:
        manager: the `checkpointer` of torchtitan's Trainer; its `save` and `close` are wrapped.
        guard: the guard that verifies the saves; None for `Guard()`.

    Returns:
        The guard.
    """
    guard = Guard() if guard is None else guard
    save, close = manager.save, manager.close

    @wraps(save)
    def save_and_check(curr_step: int, *given: object, **more: object) -> object:
        """Save, if it is time to, and have the result proved."""
        guard.poll()
        saved = save(curr_step, *given, **more)
        if saved:
            guard.check(os.path.join(manager.folder, f"step-{curr_step}"), manager.save_future)
        return saved

    @wraps(close)
    def close_and_finish() -> None:
        """Close the manager, and wait for the last proofs."""
        close()
        guard.finish()

    manager.save, manager.close = save_and_check, close_and_finish
    return guard
