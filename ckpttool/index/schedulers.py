"""The state of a learning rate scheduler, for trainers that ask for more of it than the source has."""

from __future__ import annotations

from dataclasses import replace

from .checkpoint import Checkpoint, Path, Value, joined
from .paths import is_param_group
from .trainer_trees import schedules_by_epoch

__all__ = [
    "complete_scheduler_state",
    "describe_deepspeed_scheduler",
    "describe_missing_scheduler",
    "explain_missing_scheduler",
    "find_only_scheduler",
]


def find_only_scheduler(ckpt: Checkpoint) -> dict[Path, object]:
    """Return {canonical path: leaf} of the scheduler; empty where there is none, or several: a list, or a dict by
    class."""
    found = {p: leaf for p, leaf in ckpt.leaves().items() if p[0] == "scheduler" and len(p) > 1}
    by_class = len({p[1] for p in found}) > 1 and all(len(p) > 2 for p in found)
    return {} if by_class or any(str(p[1]).isdecimal() for p in found) else found


def explain_missing_scheduler(ckpt: Checkpoint) -> str:
    """Return why `find_only_scheduler` finds no scheduler, as a main clause."""
    several = any(p[0] == "scheduler" and len(p) > 1 for p in ckpt.leaves())
    return "the source has several schedulers" if several else "the source has no scheduler"


def describe_missing_scheduler(ckpt: Checkpoint, otherwise: str) -> list[str]:
    """Return a note, as a list of one, if a job would resume the optimizer and finds no state of its scheduler; [] if
    there is no optimizer, or if the source says that its job had no scheduler.

    Args:
        ckpt: what is written.
        otherwise: what the job does without, as a main clause.
    """
    if find_only_scheduler(ckpt) or "scheduler" in ckpt.values or not any(p[0] == "optim" for p in ckpt.leaves()):
        return []
    return [f"{explain_missing_scheduler(ckpt)}: {otherwise}"]


def describe_deepspeed_scheduler(ckpt: Checkpoint) -> list[str]:
    """Return a note, as a list of one, if the scheduler's state is that of a DeepSpeed scheduler, which torch's
    schedulers do not load; else [].

    DeepSpeed's own schedulers (deepspeed/runtime/lr_schedules.py) save `last_batch_iteration` and nothing else. torch's
    `LRScheduler.load_state_dict` updates the attributes of the scheduler, so it ignores that key.
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
    """Return the checkpoint with the full state dict of torch's LambdaLR, if its trainer saves only `last_epoch`; any
    other checkpoint is returned unchanged.

    torchtitan (components/optimizer/lr_scheduler.py) saves no more, since its job computes the other entries from the
    learning rates of the param groups: `lr`, and `initial_lr`, which every scheduler of torch puts there.
    `LambdaLR.load_state_dict` needs them. Nothing is added if a group lacks one of the two.
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
