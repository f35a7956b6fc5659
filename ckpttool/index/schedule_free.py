"""The state of a schedule-free optimizer: z of each parameter, and whether the weights are x or y.

    y = lerp(x, z, 1 - beta1)          where gradients are taken: the weights after optimizer.train()
    x = lerp(y, z, 1 - 1/beta1)        the average, to evaluate and to publish: the weights after optimizer.eval()

Sources: schedulefree 1.4 (adamw_schedulefree.py, sgd_schedulefree.py, radam_schedulefree.py: eval and train).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..by_fields import ByFields
from ..errors import Unsupported, argument
from .checkpoint import Checkpoint, TensorEntry
from .names import KEEPS_NUMBERS
from .optimizers import find_optimizers

__all__ = ["FreeParameter", "find_free_parameters", "has_schedule_free_optimizer"]


def has_schedule_free_optimizer(ckpt: Checkpoint) -> bool:
    """Whether the checkpoint has the state of a schedule-free optimizer."""
    return any(state.name.startswith("schedule-free") for state in find_optimizers(ckpt))


@dataclass(frozen=True, eq=False, repr=False)
class FreeParameter(ByFields):
    """A parameter of a schedule-free optimizer: its z, the momentum of its group, and whether the weights are y."""

    z: TensorEntry
    beta: float
    train_mode: bool


def find_free_parameters(ckpt: Checkpoint) -> dict[str, FreeParameter]:
    """Find the parameters of a schedule-free optimizer that have a z, and return {FQN: parameter}.

    Raises:
        Unsupported: the checkpoint has no such optimizer, or its param groups lack betas (or momentum) or train_mode.
    """
    if not has_schedule_free_optimizer(ckpt):
        unnamed = next((f" {n}" for n in ckpt.notes if n.startswith(KEEPS_NUMBERS)), "")
        raise Unsupported(
            f"{argument('weights', 'schedule-free-x')}: {ckpt.root} has no state of a schedule-free optimizer under "
            f'the names of its weights: no slot is called "z".{unnamed}',
            code="CKPT0335",
        )
    options: dict[int, dict[str, Any]] = {}
    for v in ckpt.values.values():
        if v.option is not None:
            options.setdefault(v.group, {})[v.option] = v.data
    out: dict[str, FreeParameter] = {}
    for i, group in options.items():
        betas = group.get("betas", (group.get("betas.0", group.get("momentum")),))
        beta, mode = betas[0], group.get("train_mode")
        for n in group.get("params", ()):
            z = ckpt.tensors.get(f"optim.state.{n}.z")
            if z is None:
                continue
            if not isinstance(beta, float) or not 0 < beta < 1 or not isinstance(mode, bool):
                raise Unsupported(
                    f"{argument('weights', 'schedule-free-x')}: param group {i} of {ckpt.root} says betas or momentum "
                    f"{beta!r} and train_mode {mode!r}; both are needed to tell whether the weights are x or y.",
                    code="CKPT0335",
                )
            out[str(n)] = FreeParameter(z, beta, mode)
    return out
