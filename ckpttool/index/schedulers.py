"""The state of a learning rate scheduler, for trainers that ask for more of it than the source has."""

from __future__ import annotations

from dataclasses import replace

from .checkpoint import Checkpoint, Path, Value, joined
from .paths import is_param_group
from .trainer_trees import schedules_by_epoch

__all__ = ["complete_scheduler_state", "describe_deepspeed_scheduler"]


def describe_deepspeed_scheduler(ckpt: Checkpoint) -> list[str]:
    """Return a note for a job with torch's schedulers where the state is that of one of DeepSpeed's own
    (deepspeed/runtime/lr_schedules.py), which save `last_batch_iteration` and nothing else; [] where it is not.

    torch's `LRScheduler.load_state_dict` updates the attributes of the scheduler, so it ignores that key.
    """
    if {p[1:] for p in ckpt.leaves() if p[0] == "scheduler"} != {("last_batch_iteration",)}:
        return []
    last = ckpt.value("scheduler.last_batch_iteration")
    return [
        f"the scheduler's state is that of one of DeepSpeed's own, {{last_batch_iteration: {last}}}: torch's "
        "schedulers find nothing of theirs in it, and most start over at step 0 without a word. Use the same class of "
        "deepspeed.runtime.lr_schedules, which also takes torch's optimizers"
    ]


def complete_scheduler_state(ckpt: Checkpoint) -> Checkpoint:
    """Return the checkpoint with all that torch's LambdaLR saves, where the trainer of the source saves its
    `last_epoch` only; any other checkpoint as it is.

    torchtitan (components/optimizer/lr_scheduler.py) saves no more: its job computes the rest from the rates of the
    param groups. `LambdaLR.load_state_dict` wants the rest. The rates are in the param groups: `lr`, and `initial_lr`,
    which every scheduler of torch puts there. Nothing is added where a group lacks one of them.
    """
    if not schedules_by_epoch(ckpt.trainer) or {p for p in ckpt.leaves() if p[0] == "scheduler"} != {
        ("scheduler", "last_epoch")
    }:
        return ckpt
    last = ckpt.value("scheduler.last_epoch")
    groups = sorted({p[2] for p in ckpt.leaves() if is_param_group(p) and len(p) > 3}, key=str)
    rates = [[ckpt.value(f"optim.param_groups.{i}.{key}") for i in groups] for key in ("initial_lr", "lr")]
    if not groups or not isinstance(last, int) or not all(isinstance(r, float) for row in rates for r in row):
        return ckpt
    made: dict[Path, object] = {
        ("scheduler", "base_lrs"): rates[0],
        ("scheduler", "last_epoch"): last,
        ("scheduler", "_step_count"): last + 1,
        ("scheduler", "_is_initial"): False,
        ("scheduler", "_get_lr_called_within_step"): False,
        ("scheduler", "_last_lr"): rates[1],
        ("scheduler", "lr_lambdas"): [None] * len(groups),
    }
    note = (
        f"the source has {{last_epoch: {last}}} of its scheduler, and no more: the state dict of a LambdaLR was made "
        f"of that and of the rates of the {len(groups)} param groups"
    )
    values = {**ckpt.values, **{joined(p): Value(p, data) for p, data in made.items()}}
    return replace(ckpt, values=values, notes=[*ckpt.notes, note])
