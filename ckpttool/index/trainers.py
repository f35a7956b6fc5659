"""What is special about the trees of some trainers. The one table in which the core names trainers."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["TRAINERS", "Trainer", "fuses_parameters", "schedules_by_epoch", "trainer_of"]


class Trainer(NamedTuple):
    """A trainer whose checkpoints are known by the keys at the root of their tree.

    Args:
        name: what messages call it, and `Checkpoint.trainer` holds.
        keys: all of them are at the root.
        model_at_root: the model has no key of its own: its parameters are at the root, next to the optimizer.
        fuses_parameters: the optimizer may have state for fused parameters of which the model holds the parts.
        schedules_by_epoch: its scheduler is torch's LambdaLR, of which it saves `last_epoch` alone.
    """

    name: str
    keys: frozenset[str]
    model_at_root: bool = False
    fuses_parameters: bool = False
    schedules_by_epoch: bool = False


#: The first that fits is the trainer of a tree.
TRAINERS = (
    Trainer("Lightning", frozenset(("loops", "callbacks"))),
    Trainer(
        "torchtitan", frozenset(("train_state",)), model_at_root=True, fuses_parameters=True, schedules_by_epoch=True
    ),
)


def trainer_of(keys: set[Any], *, model_at_root: bool) -> str | None:
    """The name of the trainer that writes trees with these keys at the root; None where it is not in the table.

    `model_at_root`: the tree has an optimizer under a key of its own, and no model.
    """
    found = {str(k) for k in keys}
    for trainer in TRAINERS:
        if trainer.keys <= found and (model_at_root or not trainer.model_at_root):
            return trainer.name
    return None


def fuses_parameters(name: str | None) -> bool:
    """Whether the optimizer of a trainer may name fused parameters, which the model does not have."""
    return any(trainer.fuses_parameters for trainer in TRAINERS if trainer.name == name)


def schedules_by_epoch(name: str | None) -> bool:
    """Whether a trainer saves `last_epoch` alone of a LambdaLR."""
    return any(trainer.schedules_by_epoch for trainer in TRAINERS if trainer.name == name)
