"""What is special about the trees of some trainers. Which these are, layouts.py tells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ..errors import Corrupt
from .paths import joined

if TYPE_CHECKING:
    from .checkpoint import Path

__all__ = ["TrainerTree", "convert_composer_tree", "fuses_parameters", "identify_trainer", "schedules_by_epoch"]


class TrainerTree(NamedTuple):
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


#: Gives what is known; the first that fits is the trainer of a tree. layouts.py, which is above, puts its own here.
known_trees: Callable[[], Iterable[TrainerTree]] = tuple


def identify_trainer(keys: Iterable[object], *, model_at_root: bool) -> str | None:
    """Return the name of the trainer that writes trees with these keys at the root; None where it is not known.

    Args:
        keys: all keys at the root of the tree.
        model_at_root: whether the tree has an optimizer under a key of its own, and no such key for the model.
    """
    found = {str(k) for k in keys}
    for tree in known_trees():
        if tree.keys <= found and (model_at_root or not tree.model_at_root):
            return tree.name
    return None


def convert_composer_tree(leaves: Mapping[Path, object]) -> dict[Path, object] | None:
    """Return the leaves of a tree of Composer, {path: leaf}, under the usual keys; None where the tree is not
    Composer's.

    {"state": {"model", "optimizers": {class: state}, "schedulers": {class: state}, "timestamp", "callbacks", ...},
    "rng": [...]}

    Of several optimizers or schedulers, each keeps the name of its class.

    Raises:
        Corrupt: two leaves have the same usual path.

    Source: State.state_dict in composer/core/state.py, utils/checkpoint.py of 0.32.1.
    """
    inner = {p[1] for p in leaves if p[0] == "state" and len(p) > 2}
    if not {"model", "timestamp"} <= inner or not {p[0] for p in leaves} <= {"state", "rng"}:
        return None
    usual: dict[object, str] = {"optimizers": "optim", "schedulers": "scheduler"}
    several = {k for k in usual if len({p[2] for p in leaves if p[:2] == ("state", k) and len(p) > 3}) > 1}
    out: dict[Path, object] = {}
    for p, leaf in leaves.items():
        path = p if p[0] != "state" else ("trainer", *p[1:]) if p[1] == "timestamp" else p[1:]
        if p[0] == "state" and p[1] in usual and len(p) > 3:
            path = (usual[p[1]], *p[2 if p[1] in several else 3 :])
        if path in out:
            raise Corrupt(
                f"the state has {joined(p)!r} and another entry that means {joined(path)!r} too.", code="CKPT0416"
            )
        out[path] = leaf
    return out


def fuses_parameters(name: str | None) -> bool:
    """Whether a trainer's optimizer may have state for fused parameters, of which the model has only the parts.
    `name` is the trainer's name, or None."""
    return any(tree.fuses_parameters for tree in known_trees() if tree.name == name)


def schedules_by_epoch(name: str | None) -> bool:
    """Whether a trainer saves only `last_epoch` of torch's LambdaLR. `name` is the trainer's name, or None."""
    return any(tree.schedules_by_epoch for tree in known_trees() if tree.name == name)
