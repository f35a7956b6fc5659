"""What universal writes: one folder per parameter, and the model file of one rank."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpttool.engine.flat.placed_masters import with_masters_as_weights
from ckpttool.engine.flat.split_state import find_shared_scalars, split_training_state
from ckpttool.errors import Unsupported, UsageError, argument
from ckpttool.formats.stored_tensors import Inline, split_components
from ckpttool.formats.torch_pickles import TensorRef
from ckpttool.formats.torch_zip_writer import TorchFiles
from ckpttool.index.checkpoint import Checkpoint, Chunks, Path, TensorEntry, joined
from ckpttool.index.draft import Draft, Dropped
from ckpttool.layouts import WriteOptions
from ckpttool.storage.source import Source

from ..options import UniversalOptions
from . import files as ds
from . import write_common as dw
from .geometry import split_into_subgroups
from .write_experts import refuse_experts, refuse_pipeline

__all__ = ["prepare", "write"]

_RESTORED = {"exp_avg", "exp_avg_sq"}  # by DeepSpeed at stage 3


def prepare(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Checkpoint:
    """Return the state with its fp32 masters, the copies of the weights that the optimizer updates, as the weights,
    where the source has both.

    Raises:
        Unsupported: a master does not round to its weight.
    """
    return with_masters_as_weights(split_components(ckpt), source)


def write(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """Plan a folder that an engine of any number of ranks loads with {"checkpoint": {"load_universal": true}}.

    Raises:
        Unsupported: DeepSpeed cannot hold the state, or a parameter has a name that no folder can have.
        UsageError: the precision is none of DeepSpeed's, the tag is not the name of a folder, or an option is for other
            layouts.
    """
    refuse_pipeline(ckpt)
    state = split_training_state(ckpt, source, options.like and options.like.optimizer)
    tensors = {n: replace(t, dtype=options.cast(f"model.{n}", t.dtype)) for n, t in state.tensors.items()}
    asked = options.of(UniversalOptions)
    refuse_experts(state, asked.expert_parallel, "a universal checkpoint")
    if asked.tensor_parallel is not None:
        raise UsageError(
            f"{argument('tensor_parallel', asked.tensor_parallel)} is for zero1, zero2 and zero3; tensor parallel "
            "ranks of any number load a universal checkpoint, each its part of it.",
            code="CKPT0203",
        )
    stage = asked.stage or _find_source_stage(ckpt)
    plan = dw.SavePlan(state, tensors, stage, options, asked, ckpt)
    plan.tag += "" if asked.write_tag else "_universal"
    groups = [{n: tensors[n].shape for n in g.params} for g in state.groups]
    ids = [[k] if g else [] for k, g in zip(_number_groups(groups), groups, strict=True)]
    groups = [g for g in groups if g]
    files = TorchFiles()
    models = dw.ModelStateFiles(plan, groups, 1)
    models.add(files, each_rank=False)
    dropped: list[Dropped] = list(state.dropped)
    why = "a universal checkpoint of stage 3 keeps one for a whole param group"
    shared = [find_shared_scalars(state, group, why) for group in groups]
    dropped += [d for _, lost in shared for d in lost if stage == 3]
    scalars: list[dict[str, object]] = [dict(s) for s, _ in shared]
    kept = _number_steps(plan, groups, scalars) if stage == 3 else []
    for g, group in enumerate(groups):
        slots = plan.slots_of(group)
        for n in group:
            own = scalars[g] if n in state.fresh else state.scalars.get(n, {})
            _add_parameter_folder(files, models, n, slots, own if stage < 3 else {"step": kept[g]} if kept else {})
    found = plan.scaler_keys()
    found["zero_stage"] = dw.pickled_stage(stage)
    param_groups = [{**g.options, "params": own} for g, own in zip(state.groups, ids, strict=True)]
    if stage == 3:
        found["partition_count"] = 1
        found["optimizer_state_dict"] = {"state": dict(enumerate(scalars)), "param_groups": param_groups}
    else:
        found["ds_version"] = dw.DS_VERSION
    files.add(f"{plan.tag}/{ds.UNIVERSAL}", {**found, "param_groups": param_groups}, {})
    files.literal("latest_universal", plan.tag.encode())
    out = Checkpoint("universal", options.target, None, [], [], {}, {})
    return models.draft(files, out, {}, dropped, _list_unrestored_state(plan, scalars))


def _number_steps(
    plan: dw.SavePlan, groups: Sequence[dict[str, tuple[int, ...]]], scalars: list[dict[str, object]]
) -> list[object]:
    """Replace the steps in `scalars` by plain numbers if DeepSpeed would otherwise count them several times.

    DeepSpeed gives the first group's step to every flat tensor. If that step is a tensor, all flat tensors share one
    object, and each of them adds 1 to it in every step of the engine.

    Args:
        plan: what all files of the save have in common.
        groups: for each param group, {parameter: shape}.
        scalars: for each param group, {counter: value}; "step" is changed in place.

    Returns:
        The original step of each param group, for the parameters' folders; an empty list if nothing was changed.
    """
    steps = [s.get("step") for s in scalars]
    numbers = [x for x in map(dw.step_as_number, steps) if x is not None]
    flats = [flat for g in groups for flat in split_into_subgroups(g, 1, plan.sub_group_size)]
    if len(flats) < 2 or len(numbers) < len(steps) or not any(isinstance(x, Inline) for x in steps):
        return []
    for own, x in zip(scalars, numbers, strict=True):
        own["step"] = int(x) if x == x // 1 else x
    return steps


def _add_parameter_folder(
    files: TorchFiles, models: dw.ModelStateFiles, name: str, slots: list[str], counters: Mapping[str, object]
) -> None:
    """Add the folder of a parameter: fp32.pt, and a file for each slot and each counter.

    Args:
        files: the files of the draft.
        models: the model files, which record where all tensors lie.
        name: the name of the parameter.
        slots: the slots of its param group, which are written as zeros for a parameter without state.
        counters: {counter: value} that its folder is to hold.

    Raises:
        Unsupported: no folder can have the parameter's name, or DeepSpeed could not load one of the counters.
    """
    plan, state, stage = models.plan, models.plan.state, models.stage
    if set(name) & set("/\\\0") or name in ("", ".", "..", "optimizer_state.pt") or len(os.fsencode(name)) > 255:
        raise Unsupported(
            f"A universal checkpoint keeps each parameter in a folder of its name, and {name[:300]!a} cannot name "
            "one. Write another layout, or rename the parameter in the source.",
            code="CKPT0316",
        )
    entry, parallel = plan.tensors[name], plan.ds_config.get("tensor_parallel")
    autotp = isinstance(parallel, dict) and parallel.get("autotp_size") not in (None, 0, 1)
    entries: dict[str, tuple[TensorEntry, TensorEntry | None]] = {"fp32": (entry, state.tensors[name])}
    if name in state.fresh:  # zeros
        entries.update({s: (replace(entry, dtype="float32"), None) for s in slots})
    else:
        entries.update({s: (plan.slot_entry(name, s), t) for s, t in state.slots.get(name, {}).items()})
    for slot, (t, origin) in entries.items():
        bare = stage == 3 and not autotp  # as older DeepSpeed needs it
        ref = TensorRef(t.dtype, (t.numel,) if bare else entry.shape, "0", t.numel)
        tree = ref if bare else {"cat_dim": 0, "param": ref}
        f = files.add(f"{plan.tag}/zero/{name}/{slot}.pt", tree, {"0": t.nbytes})
        if origin is not None:
            path: Path = ("model", name) if slot == "fp32" else ("optim", "state", name, slot)
            chunks = Chunks.whole(entry.shape, f, files.offset(f, "0"), t.nbytes)
            models.tensors[joined(path)] = TensorEntry(t.dtype, entry.shape, path, chunks)
            models.sources[joined(path)] = origin
    if odd := sorted(counters.keys() - {"step"}):
        raise Unsupported(
            f"a universal checkpoint of stage 1 or 2 has tensors of a parameter's shape and its step. {name!r} also "
            f"has {', '.join(odd)}, a number, which no engine could load from there. Write zero{models.stage}.",
            code="CKPT0316",
        )
    for slot, x in counters.items():
        files.add(f"{plan.tag}/zero/{name}/{slot}.pt", x, {})


def _find_source_stage(ckpt: Checkpoint) -> int:
    """Return the ZeRO stage, 1 to 3, of the engine that wrote the source; 3 if it is not known, or not a DeepSpeed
    engine."""
    if ckpt.layout in ("zero1", "zero2", "zero3"):
        return int(ckpt.layout[-1])
    found = ckpt.values.get("extra.ds_config.zero_optimization.stage")
    return found.data if found is not None and found.data in (1, 2, 3) else 3


def _number_groups(groups: Sequence[Mapping[str, object]]) -> list[int]:
    """Return the number of each param group, counting only groups with parameters; an empty group gets that of the
    next.

    `groups` is [{parameter: any value}].
    """
    out, k = [], 0
    for g in groups:
        out.append(k)
        k += bool(g)
    return out


def _list_unrestored_state(plan: dw.SavePlan, scalars: list[dict[str, object]]) -> list[str]:
    """Return notes for the user on the state in the files that DeepSpeed's own loader does not restore.

    `scalars` has, for each param group with parameters, {counter: value} as the files hold it.
    """
    state, stage, out = plan.state, plan.stage, []
    names = [*state.buffers, *state.frozen, *state.extra_states]
    if names:
        out.append(
            "DeepSpeed does not restore buffers, frozen parameters and extra states of modules from a universal "
            f"checkpoint ({len(names)} here, first {names[0]}): load them yourself, or write zero{stage}"
        )
    if stage == 3 and any(g.options != state.groups[0].options for g in state.groups):
        out.append(
            "DeepSpeed gives all param groups the hyperparameters of the first; set them after loading, or write zero3"
        )
    steps = [s["step"] for s in scalars if "step" in s]
    if stage == 3 and len(set(map(repr, steps))) > 1:
        out.append("DeepSpeed gives all param groups the step of the first, and others have another; write zero3")
    held = scalars[:1] if stage == 3 else state.scalars.values()
    if any(type(s.get("step")) in (int, float) for s in held) and any("exp_avg_sq" in s for s in state.slots.values()):
        out.append(
            "the steps are numbers there, as FusedAdam and DeepSpeedCPUAdam have them; a DeepSpeed engine with torch's "
            "Adam or AdamW counts in tensors, and stops at its first step (RuntimeError: API has changed). For such an "
            f"engine write zero{stage}"
        )
    found = {n: {*state.slots.get(n, {}), *state.scalars.get(n, {})} for g in state.groups for n in g.params}
    asked = _RESTORED if scalars and "step" in scalars[0] else {*_RESTORED, "step"}  # the first group's step alone
    without = [n for n, own in found.items() if asked - own and n not in state.fresh]
    others = [n for n, own in found.items() if own - _RESTORED - {"step"}]
    scalar = any(own.keys() - {"step"} for own in state.scalars.values())  # which stages 1 and 2 cannot load
    advice = "Write zero3" + ("" if scalar else ", or for an engine of stage 1 or 2")
    if stage == 3 and without and any(g.options for g in state.groups):
        out.append(
            "a DeepSpeed engine of stage 3 asks a universal checkpoint for step, exp_avg and exp_avg_sq, and stops "
            f"without them; {len(without)} of {len(found)} parameters, first {without[0]}, have no "
            f"{', '.join(sorted((_RESTORED | {'step'}) - found[without[0]]))}. {advice}"
        )
    elif stage == 3 and others:
        out.append(
            "a DeepSpeed engine of stage 3 restores only step, exp_avg and exp_avg_sq from a universal checkpoint; "
            f"{len(others)} of {len(found)} parameters, first {others[0]}, also have "
            f"{', '.join(sorted(found[others[0]] - _RESTORED - {'step'}))}, without which its first step fails or is "
            f"another. {advice}"
        )
    return out
