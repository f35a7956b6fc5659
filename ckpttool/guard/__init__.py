"""Prove each save of a training job from inside the job, in the background.

    Guard              for a loop of your own: check(path) after a save, poll() at a step, finish() at the end
    TrainerGuard       a callback of transformers' Trainer
    LightningGuard     a callback of Lightning
    guard_torchtitan   for torchtitan's CheckpointManager

The module of each is imported when it is first asked for, so none of these packages has to be there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .background import Guard
    from .lightning_guard import LightningGuard
    from .titan_guard import guard_torchtitan
    from .trainer_guard import TrainerGuard

__all__ = ["Guard", "LightningGuard", "TrainerGuard", "guard_torchtitan"]

_WHERE = {
    "Guard": "background",
    "LightningGuard": "lightning_guard",
    "TrainerGuard": "trainer_guard",
    "guard_torchtitan": "titan_guard",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name in _WHERE:
        from importlib import import_module

        return getattr(import_module(f".{_WHERE[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
