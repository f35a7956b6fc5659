"""Checks of the optimizer: state that fits no weights, and param groups that the job would refuse."""

from __future__ import annotations

from ..index.checkpoint import Checkpoint, orphaned_optimizer_state
from ..index.param_groups import differences, groups_of
from .findings import MISMATCH, NOTE, Examined, Finding

__all__ = ["orphaned_state", "param_groups"]


def orphaned_state(at: Examined) -> list[Finding]:
    """State for parameters that the model does not have: weights and optimizer of two runs."""
    odd = orphaned_optimizer_state(at.ckpt)
    if not odd:
        return []
    text = (
        f'the optimizer has state for {len(odd):,} parameters that the model does not have, first "{odd[0]}": are the two of '
        "one training run?"
    )
    return [Finding("orphaned-state", NOTE, None, tuple(odd), text)]


def param_groups(at: Examined, other: Checkpoint, like: str) -> list[Finding]:
    """What in the param groups stops the job that wrote another checkpoint from loading this one."""
    here, there = groups_of(at.ckpt), groups_of(other)
    if here is None or there is None:
        which = at.path if here is None else like
        text = f"the param groups cannot be compared: {which} has none that list names of parameters"
        return [Finding("param-groups", NOTE, None, (), text)]
    texts = differences(here, there)
    if without := [n for n in _without_state(at.ckpt, here) if n in _with_state(other)]:
        texts.append(
            f"{len(without):,} parameters have no optimizer state here but have some there, first {without[0]}"
        )
    if not texts:
        return []
    repair = at.copy("regrouped", "--like", like, "--regroup", *(["--drop"] if _gone(here, there) else []))
    return [Finding("param-groups", MISMATCH, None, (), text, repair if here != there else None) for text in texts]


def _gone(here: tuple[tuple[str, ...], ...], there: tuple[tuple[str, ...], ...]) -> bool:
    return bool({n for g in here for n in g} - {n for g in there for n in g})


def _with_state(ckpt: Checkpoint) -> set[str]:
    return {str(t.path[2]) for t in ckpt.tensors.values() if t.path[:2] == ("optim", "state") and len(t.path) > 3}


def _without_state(ckpt: Checkpoint, groups: tuple[tuple[str, ...], ...]) -> list[str]:
    have = _with_state(ckpt)
    return [n for g in groups for n in g if n not in have] if have else []
