"""Checks of the optimizer: state that fits no weights or was lost at the save, steps of two saves, and param groups
that the job would refuse."""

from __future__ import annotations

import os
import re
from collections import Counter

from ... import layouts
from ...bounded_json import parse
from ...errors import CkpttoolError, Corrupt
from ...index.checkpoint import Checkpoint, find_orphaned_optimizer_state, joined
from ...index.names import step_count
from ...index.optimizers import describe_incomplete_state, describe_lost_slots, find_lost_slots
from ...index.param_groups import (
    describe_group_differences,
    describe_ungrouped_state,
    find_ungrouped_state,
    list_names_by_group,
)
from .. import mixups
from ..opening import OpenOptions, open_checkpoint
from .checks import Examined, check
from .findings import DAMAGE, MISMATCH, NOTE, Finding, define_kind

PER_RANK_STATE = define_kind(
    "per-rank-state", 160, "DCP kept one rank's part of some optimizer state", "what-is-recognised"
)
OTHER_WEIGHTS = define_kind("other-weights", 170, "ranks have other copies of the same weights", "what-is-recognised")
OWN_COPIES = define_kind("own-copies", 171, "buffers of which each rank has its own", "what-is-recognised")
MIXED_STEPS = define_kind("mixed-steps", 180, "files are of different steps", "what-is-recognised")
ORPHANED_STATE = define_kind(
    "orphaned-state", 190, "optimizer state of parameters that the model lacks", "what-is-whole-and-yet-does-not-load"
)
UNGROUPED_STATE = define_kind(
    "ungrouped-state",
    195,
    "optimizer state of parameters that no param group lists",
    "what-is-whole-and-yet-does-not-load",
)
INCOMPLETE_STATE = define_kind(
    "incomplete-state",
    196,
    "optimizer state that lacks slots, has other shapes than the weights, or is none at all",
    "what-is-whole-and-yet-does-not-load",
)
LEFTOVER = define_kind("leftover", 200, "files of an earlier save", "what-is-whole-and-yet-does-not-load")
PARAM_GROUPS = define_kind(
    "param-groups",
    220,
    "param groups that another checkpoint's job refuses",
    "what-is-whole-and-yet-does-not-load",
)

_MOST_STEPS = 4096  # steps that are read
_IN_NAME = re.compile(r"(checkpoint|global_step|step)s?[-_=]?(\d{1,15})", re.IGNORECASE)


@check(ORPHANED_STATE, needs_whole=True)
def find_orphaned_state(at: Examined) -> list[Finding]:
    """Find optimizer state for parameters that the model does not have: weights and optimizer may be of two runs."""
    odd = find_orphaned_optimizer_state(at.ckpt)
    if not odd:
        return []
    text = (
        f'the optimizer has state for {len(odd):,} parameters that the model does not have, first "{odd[0]}": are the '
        "two of one training run?"
    )
    return [Finding(ORPHANED_STATE, NOTE, None, tuple(odd), text)]


@check(UNGROUPED_STATE, needs_whole=True)
def find_state_without_group(at: Examined) -> list[Finding]:
    """Find optimizer state of parameters that no param group lists."""
    names = find_ungrouped_state(at.ckpt)
    return [Finding(UNGROUPED_STATE, NOTE, None, tuple(names), describe_ungrouped_state(names))] if names else []


@check(INCOMPLETE_STATE, needs_whole=True)
def find_incomplete_state(at: Examined) -> list[Finding]:
    """Find faults that the optimizer's state shows without a look at the model, such as slots that only some parameters
    have, no param groups, or parameters that the groups list twice. Each fault is a finding."""
    return [Finding(INCOMPLETE_STATE, NOTE, None, (), text) for text in describe_incomplete_state(at.ckpt)]


@check(PARAM_GROUPS)
def compare_param_groups(at: Examined) -> list[Finding]:
    """Find differences in the param groups that stop the job which wrote the checkpoint `at.request.like` from loading
    this one; returns [] where `like` is None.

    Raises:
        CkpttoolError: that checkpoint cannot be opened.
    """
    if at.request.like is None:
        return []
    with open_checkpoint(at.request.like, OpenOptions(allow_equal_ranks=True, allow_mixed_steps=True)) as opened:
        other = opened.checkpoint
        here, there = list_names_by_group(at.ckpt), list_names_by_group(other)
        if here is None or there is None:
            which = at.request.path if here is None else at.request.like
            text = f"the param groups cannot be compared: {which} has none that list names of parameters"
            return [Finding(PARAM_GROUPS, NOTE, None, (), text)]
        texts = describe_group_differences(here, there)
        with_state, with_state_there = _list_parameters_with_state(at.ckpt), _list_parameters_with_state(other)
    names = [n for group in here for n in group]
    if with_state and (lost := [n for n in names if n not in with_state and n in with_state_there]):
        texts.append(f"{len(lost):,} parameters have no optimizer state here, but have some there, first {lost[0]}")
    if not texts:
        return []
    surplus = set(names) - {n for group in there for n in group}
    repair = at.copy_with("regrouped", "--like", at.request.like, "--regroup", *(["--drop"] if surplus else []))
    return [Finding(PARAM_GROUPS, MISMATCH, None, (), text, repair if here != there else None) for text in texts]


def _list_parameters_with_state(ckpt: Checkpoint) -> set[str]:
    """Return the FQNs of the parameters that have tensors in the optimizer state."""
    return {t.parameter for t in ckpt.tensors.values() if t.slot is not None}


@check(PER_RANK_STATE)
def find_per_rank_state(at: Examined) -> list[Finding]:
    """Find optimizer state that was lost because every rank saved its own part under one name, of which DCP kept the
    part of one rank only."""
    found = find_lost_slots(at.ckpt)
    if not found:
        return []
    ckpt = at.ckpt
    kept = dict.fromkeys(ckpt.component(n) for n in (*ckpt.tensors, *ckpt.values))
    repair = at.copy_with("without-optimizer", "--only", ",".join(c for c in kept if c != "optim"))
    names = tuple(n for slots in found.values() for n in slots)
    return [Finding(PER_RANK_STATE, DAMAGE, None, names, describe_lost_slots(ckpt, found), repair)]


# ------------------------------------------------------------------------------------------------------------ steps


@check(MIXED_STEPS)
def find_mixed_steps(at: Examined) -> list[Finding]:
    """Find rank files that are of different steps; the finding lists the files of the step that most files are of."""
    try:
        mixups.refuse_mixed_steps(at.ckpt, at.source)
    except Corrupt as e:
        text = str(e)
        by_step: dict[float, list[str]] = {}
        for name, step in read_optimizer_steps(at).items():
            t = at.ckpt.tensors.get(name)
            if t is not None:
                by_step.setdefault(step, []).append(at.ckpt.files[t.chunks.file[0]])
        if by_step:
            best = max(by_step, key=lambda s: len(set(by_step[s])))
            files = sorted(set(by_step[best]))
            text += f" Of step {best:g}: {', '.join(files[:8])}{', ...' if len(files) > 8 else ''}."
        return [Finding(MIXED_STEPS, DAMAGE, None, (), text)]
    return []


@check(OTHER_WEIGHTS, OWN_COPIES)
def find_differing_copies(at: Examined) -> list[Finding]:
    """Find weights that should be equal on all ranks and are not, and buffers or values that differ between ranks."""
    out = []
    if weights := mixups.find_diverged_replicas(at.ckpt):
        names = tuple(dict.fromkeys(o.name for o in weights))
        out.append(Finding(OTHER_WEIGHTS, DAMAGE, None, names, mixups.explain_diverged_replicas(at.ckpt, weights)))
    if own := [o for o in at.ckpt.others if o not in set(weights)]:
        names = tuple(dict.fromkeys(o.name for o in own))
        text = (
            f'each rank has its own numbers in {len(names):,} buffers or values, first "{names[0]}"; those of the '
            "lowest rank are read, and a conversion lists the others as left behind"
        )
        out.append(Finding(OWN_COPIES, NOTE, None, names, text))
    return out


def read_optimizer_steps(at: Examined) -> dict[str, float]:
    """Return {name of a tensor or value: step} of the "step" entries of the optimizer state. At most `_MOST_STEPS`
    tensors are read."""
    ckpt = at.ckpt
    names = [n for n, t in ckpt.tensors.items() if t.is_optimizer_state and t.path[-1] == "step" and t.numel == 1][
        :_MOST_STEPS
    ]
    found = mixups.read_steps(ckpt, at.source, names)
    out: dict[str, float | int] = {n: step for n, step in found.items() if step is not None}
    for v in ckpt.values.values():
        if v.is_optimizer_state and v.path[-1] == "step" and type(v.data) in (int, float):
            out[joined(v.path)] = v.data
    return {n: float(step) for n, step in out.items() if 0 <= step < 1 << 53}  # not NaN either


@check(MIXED_STEPS)
def compare_recorded_steps(at: Examined) -> list[Finding]:
    """Compare the step of the optimizer, the trainer's counter and the step in the name of the folder, and report those
    that cannot be of one save."""
    counter, what = step_count(at.ckpt.value), "the trainer's counter"
    state = read_trainer_state_step(at)
    if state is not None:
        counter, what = state, "trainer_state.json"
    steps = read_optimizer_steps(at)
    optimizer = int(max(steps.values())) if steps else None
    tag = _find_folder_step(at)
    rows = [("the name of the folder", tag), (what, counter), ("the optimizer", optimizer)]
    known = [(name, step) for name, step in rows if step is not None]
    if len(known) < 2 or counter is None:
        return []
    named_wrong = tag is not None and tag != counter  # one program has written both
    ahead = state is not None and optimizer is not None and optimizer > counter
    if not named_wrong and not ahead:
        return []
    most, votes = Counter(step for _, step in known).most_common(1)[0]
    together = [name for name, step in known if step == most]
    text = ", ".join(f"{name} has step {step:,}" for name, step in known)
    renamed = not ahead and optimizer in (None, counter)
    text += (
        ": the folder was renamed, or they are from different saves" if renamed else ": they are from different saves"
    )
    if votes > 1:
        text += f"; {' and '.join(together)} are of step {most:,}"
    return [Finding(MIXED_STEPS, NOTE if renamed else DAMAGE, None, (), text)]


def read_trainer_state_step(at: Examined) -> int | None:
    """Read the step in trainer_state.json; None where there is no such file, or no step in it."""
    if not at.opened.folder or not at.source.exists("trainer_state.json"):
        return None
    try:
        found = parse(at.source.read_all("trainer_state.json", 256 << 20), "trainer_state.json")
    except CkpttoolError:
        return None
    step = found.get("global_step") if isinstance(found, dict) else None
    return step if type(step) is int else None


def _find_folder_step(at: Examined) -> int | None:
    """Return the step in the name of the folder, if it has the form that the checkpoint's program uses: Trainer's
    checkpoint-N, DeepSpeed's global_stepN, torchtitan's step-N. None for other programs and names."""
    ckpt = at.ckpt
    of_tree, layout = layouts.find_by_trainer(ckpt.trainer), at.opened.layout
    word = (layout if of_tree is None else of_tree).program.step_word
    name = os.path.basename(os.path.abspath(at.source.root))
    if at.opened.folder and at.source.exists("trainer_state.json"):
        word = "checkpoint"
    elif layout.saves is not None and word == layout.saves.folder:  # a folder in the one that was opened
        folders = {os.path.dirname(f) for f in ckpt.files}
        name = os.path.basename(folders.pop() or at.source.root) if len(folders) == 1 else ""
    m = _IN_NAME.fullmatch(name)
    return int(m[2]) if m is not None and m[1].lower() == word else None


@check(LEFTOVER, needs_whole=True)
def find_leftover_files(at: Examined) -> list[Finding]:
    """Find files of ranks in a DCP folder that its `.metadata` does not name: of an earlier save, by more ranks."""
    rest = [r.name for r in at.ckpt.unread if r.name.endswith(".distcp") and r.bytes]
    if not rest:
        return []
    text = (
        f"{len(rest):,} files are of another save, since .metadata does not name them: {', '.join(rest[:4])}"
        f"{', ...' if len(rest) > 4 else ''}. The checkpoint is whole without them"
    )
    return [Finding(LEFTOVER, NOTE, rest[0], (), text)]
